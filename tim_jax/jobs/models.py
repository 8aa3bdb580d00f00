"""The jobs of `tim-jax eval`, `generate` and `export`, and the assembly shared with training."""

import hashlib
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax

from tim_jax.config import toml
from tim_jax.config.run import RunConfig
from tim_jax.config.sections import FamilyChoice
from tim_jax.errors import InputError
from tim_jax.model import hf
from tim_jax.model.execution import Execution, Sampling
from tim_jax.placement import SINGLE, Placement, processes
from tim_jax.rl import drawing, evaluation, programs, sharded
from tim_jax.rl.drawing import Sample, Text
from tim_jax.run import assembly, checkpoints, folders
from tim_jax.run.assembly import Model
from tim_jax.run.checkpoints import Restored
from tim_jax.run.display import Completion, completion_line
from tim_jax.tasks.base import Example, SharedGrader, Task
from tim_jax.tasks.text import encode_prompt

_EVAL_KEY = 0
_EVAL_ROUNDS = 4  # times as many sequences as slots are queued at a time
_SHOWN = 4  # completions shown before and after


@dataclass(frozen=True)
class Job:
    """Everything a training job was assembled from."""

    config: RunConfig
    model: Model
    task: Task
    text: Text
    execution: Execution
    programs: programs.Programs
    evaluate: Any  # (weights) -> (metrics, samples), or None


def assemble(config: RunConfig, *, measured: Path | None = None) -> Job:
    """Assembles a run; `measured` is the file for measurements of this machine, if there is one."""
    model = assembly.make_model(config)
    task = _shared(assembly.make_task(config))
    text = assembly.make_text(config, model)
    execution = assembly.make_execution(config, model, measured=measured)
    wanted = config.eval.every and len(task.evaluation)
    evaluate = _evaluator(config, execution, task, text) if wanted else None
    built = assembly.make_programs(config, execution)
    return Job(config, model, task, text, execution, built, evaluate)


def _shared(task: Task) -> Task:
    """The task, graded in parts if there are several processes."""
    count = jax.process_count()
    if count == 1:
        return task
    return replace(
        task, grade=SharedGrader(task.grade, jax.process_index(), count, processes.texts)
    )


def _evaluator(config: RunConfig, execution: Execution, task: Task, text: Text):
    section = config.eval
    batching = config.sampler.batching
    slots = batching.slots or config.sequences_per_step
    batching = replace(batching, slots=slots)
    # The prompts' keys and values of a whole batch are kept, so it is not the whole evaluation.
    batch = min(section.prompts, max(1, _EVAL_ROUNDS * slots // section.samples))
    # Whole rows for every device; the evaluation fills up with prompts that are not counted.
    batch += -batch % sharded.prompts_multiple(execution.placement, section.samples)
    sampling = replace(execution.sampling, temperature=section.temperature, top_k=0, top_p=1.0)
    sample = programs.sampling_program(
        replace(execution, sampling=sampling),
        samples=section.samples,
        batching=batching.rounded(execution.placement.shards),
    )

    def run(weights) -> tuple[dict[str, float], list[Sample]]:
        return evaluation.evaluate(
            weights,
            task,
            text,
            sample=sample,
            key=drawing.step_key(config.seed, _EVAL_KEY),
            prompts=section.prompts,
            samples=section.samples,
            batch=batch,
            ks=section.k,
        )

    return run


def shown(samples: Sequence[Sample]) -> list[Completion]:
    """The first few completions of a step, as the display takes them."""
    return [Completion(s.prompt, s.completion, s.reward) for s in samples[:_SHOWN]]


def evaluate_run(config: RunConfig, *, model: str | None = None) -> dict[str, float]:
    """Evaluates a model on the held-out problems of `config`.

    The model is the folder or hub name `model`, else the newest checkpoint of the config's run
    folder, else the config's own model.
    """
    if model is not None:
        section = config.model.model_copy(
            update={"path": model, "preset": None, "architecture": None}
        )
        config = config.model_copy(update={"model": section})
    job = assemble(config)
    try:
        evaluate = job.evaluate or _evaluator(config, job.execution, job.task, job.text)
        params = job.model.params
        if model is None and checkpoints.list_steps(Path(config.run.folder) / "checkpoints"):
            restored = folders.read_checkpoint(config.run.folder, {"params": params})
            _warn_of_damage(restored)
            params = restored.state["params"]
        metrics, samples = evaluate(job.programs.prepare(params))
        for row in shown(samples):
            print(completion_line(row, width=160))
        return metrics
    finally:
        job.task.close()


def export(run: str, folder: str, *, step: int | None = None, dtype: str = "float32") -> int:
    """Writes a run's checkpoint (the newest if `step` is None) as a Hugging Face folder.

    Returns the checkpoint's step.

    Raises:
      InputError: no such run or checkpoint, a damaged one, or `folder` exists and is not empty.
    """
    config = toml.build(tomllib.loads(folders.read_config(run)), source=f"{run}/config.toml")
    model = assembly.make_model(config)
    restored = folders.read_checkpoint(run, {"params": model.params}, step=step)
    _warn_of_damage(restored)
    params = jax.device_get(restored.state["params"])
    hf.save(folder, params, model.config, tokenizer=model.tokenizer, dtype=dtype)
    return restored.step


def _warn_of_damage(restored: Restored) -> None:
    for step, what in restored.damaged:
        line = f"checkpoint of step {step} is damaged: {what}; taking step {restored.step}"
        print(line, file=sys.stderr)


def generate(
    source: str,
    prompts: Sequence[str],
    *,
    samples: int,
    sampling: Sampling,
    dtype: str,
    seed: int,
    chat_template: bool | Literal["auto"] = "auto",
    where: Placement = SINGLE,
    family: FamilyChoice = "auto",
    measured: Path | None = None,
) -> Iterator[tuple[str, str, float]]:
    """Yields (prompt, completion, log-prob of the completion) from a model folder, hub or run.

    `measured`: a folder that keeps what is measured of this machine, see
    `calibration.calibrate_once`; a run's own measurement serves as well.
    """
    folder = Path(source) / "model"
    model = assembly.load_model(str(folder) if folder.is_dir() else source)
    examples = [Example(prompt, "") for prompt in prompts]
    room = model.config.max_positions - sampling.max_response_length
    if room < 1:
        raise InputError(
            f"--max-tokens {sampling.max_response_length} leaves no room for a prompt in the"
            f" model's {model.config.max_positions} positions"
        )
    longest = max(
        len(encode_prompt(model.tokenizer, prompt, chat_template=chat_template, max_length=room))
        for prompt in prompts
    )
    text = Text(model.tokenizer, longest, chat_template)
    # Whole rows for every device: filled up with the last prompt, whose samples are dropped.
    examples += examples[-1:] * (-len(prompts) % sharded.prompts_multiple(where, samples))
    rows = len(examples) * samples
    length = longest + sampling.max_response_length
    if rows * length >= 2**31:  # places in an array are numbers of 32 bits
        raise InputError(
            f"--samples {samples} of {len(prompts)} prompts are {rows} sequences of up to {length}"
            " tokens, over 2**31 tokens"
        )
    execution = assembly.generating_execution(
        model,
        sampling,
        where,
        dtype,
        length=length,
        rows=rows,
        family=family,
        measured=None if measured is None else _measurement(source, model, dtype, measured),
    )
    program = programs.sampling_program(execution, samples=samples)
    weights = programs.weights_program(execution)(model.params)
    drawn = text.prompts(examples, range(len(examples)))
    rollout = program(weights, drawn, drawing.step_key(seed, 0))
    rollout = jax.tree.map(lambda x: x[: len(prompts) * samples], rollout)
    log_probs = jax.device_get(rollout.log_probs.sum(axis=1))
    for row, completion in enumerate(text.completions(rollout)):
        yield prompts[row // samples], completion, float(log_probs[row])


def _measurement(source: str, model: Model, dtype: str, folder: Path) -> Path | None:
    """The file that keeps a model's measurement, begun with that of its run if there is one."""
    name = hashlib.sha256(repr((model.config, dtype)).encode()).hexdigest()[:16]
    file, of_run = folder / f"{name}.json", Path(source) / "calibration.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if of_run.is_file() and not file.exists():
            shutil.copyfile(of_run, file)
    except OSError:  # nothing can be kept there
        return None
    return file
