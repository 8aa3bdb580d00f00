"""The jobs of `tim-jax eval` and `export`, and the assembly shared with training."""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.jobs import checks, memory
from tim_jax.app.run import assembly, checkpoints, folders, grading, sources
from tim_jax.app.run.checkpoints import Restored
from tim_jax.app.run.display import Completion, completion_line
from tim_jax.app.run.sources import Model
from tim_jax.common.errors import InputError
from tim_jax.model import adapters, hf
from tim_jax.model.adapters import Adapter
from tim_jax.model.execution import Execution
from tim_jax.numerics import Numerics
from tim_jax.rl import drawing, episodes, evaluation, programs
from tim_jax.rl.drawing import Sample, Text
from tim_jax.tasks.base import Task
from tim_jax.tasks.episodes import Environment

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
    environment: Environment | None = None  # of episodes of several turns


def assemble(config: RunConfig, *, measured: Path | None = None, training: bool = True) -> Job:
    """Assembles a run, or with `training` off what its evaluation needs of it.

    `measured` is the file for measurements of this machine, if there is one.
    """
    model = sources.begin_model(config)
    task = drawing.shared(grading.make_task(config))
    try:
        text = grading.make_text(config, model).declaring(task.environment)
        checks.check_prompts(task, text, training=training)
        return _assembled(config, model, task, text, measured)
    except BaseException:
        task.close()
        raise


def _assembled(
    config: RunConfig, model: Model, task: Task, text: Text, measured: Path | None
) -> Job:
    execution = assembly.make_execution(config, model, measured=measured)
    model = sources.with_params(model, config)
    wanted = config.eval.every and len(task.evaluation)
    environment = _environment(config, execution, task, text)
    evaluate = _evaluator(config, execution, task, text, environment) if wanted else None
    built = programs.build(assembly.make_training(config, execution))
    return Job(config, model, task, text, execution, built, evaluate, environment)


def _environment(
    config: RunConfig, execution: Execution, task: Task, text: Text
) -> Environment | None:
    """The task's environment in tokens, if episodes have several turns."""
    if task.environment is None and config.sampling.max_turns is None:
        return None
    if task.environment is None:
        raise InputError(
            f"sampling.max_turns = {config.sampling.max_turns}: the task {task.name} has no"
            " environment; name one in task.environment, or leave max_turns out"
        )
    if config.sampling.max_turns is None:
        raise InputError(
            f"the task {task.name} has episodes of several turns; set sampling.max_turns"
        )
    history = config.task.history
    return text.bridged(task.environment, execution.sampling.stop_tokens, history)


def _evaluator(
    config: RunConfig,
    execution: Execution,
    task: Task,
    text: Text,
    environment: Environment | None,
):
    section = config.eval
    batching = config.sampler.batching
    slots = batching.slots or config.sequences_per_step
    batching = replace(batching, slots=slots)
    # The prompts' keys and values of a whole batch are kept, so it is not the whole evaluation.
    batch = min(section.prompts, max(1, _EVAL_ROUNDS * slots // section.samples))
    # Whole rows for every device; the evaluation fills up with prompts that are not counted.
    batch += -batch % execution.placement.prompts_multiple(section.samples)
    sampling = replace(execution.sampling, temperature=section.temperature, top_k=0, top_p=1.0)
    own = replace(execution, sampling=sampling)
    batching = batching.rounded(execution.placement.shards)
    how: Any = {"samples": section.samples, "batching": batching}
    if (turns := config.turns) is not None:
        sample = episodes.build(own, turns=turns, **how)
    else:
        sample = programs.sampling_program(own, **how)

    def run(weights) -> tuple[dict[str, float], list[Sample]]:
        return evaluation.evaluate(
            weights,
            task,
            text,
            sample=sample,
            environment=environment,
            key=drawing.step_key(config.seed, _EVAL_KEY),
            prompts=section.prompts,
            samples=section.samples,
            batch=batch,
            ks=section.k,
            solved=section.solved,
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
        config = config.model_copy(update={"model": section, "lora": None})
    with memory.explained(partial(memory.of_run, config)):
        return _evaluated(config, of_run=model is None)


def _evaluated(config: RunConfig, *, of_run: bool) -> dict[str, float]:
    checks.check_evaluation(config)
    job = assemble(config, training=False)
    try:
        evaluate = job.evaluate or _evaluator(
            config, job.execution, job.task, job.text, job.environment
        )
        params, which = job.model.params, ""
        if of_run and checkpoints.list_steps(Path(config.run.folder) / "checkpoints"):
            restored = folders.read_params(config.run.folder, params)
            _warn_of_damage(restored)
            params = restored.state["params"]
            which = f"step {restored.step} of {config.run.folder}"
        elif of_run:
            which = f"the config's own model, as {config.run.folder} has no checkpoint"
        metrics, samples = evaluate(job.programs.prepare(params))
        if which:
            print(f"evaluated {which}")
        for row in shown(samples):
            print(completion_line(row, width=160))
        return metrics
    finally:
        job.task.close()


def export(
    run: str,
    folder: str,
    *,
    step: int | None = None,
    dtype: str | None = None,
    adapter: bool = False,
) -> int:
    """Writes a run's checkpoint (the newest if `step` is None) as a Hugging Face folder.

    Adapters are merged, or with `adapter` written alone, as PEFT loads them. Returns the
    checkpoint's step.

    Raises:
      InputError: no such run or checkpoint, a damaged one, or `folder` exists and is not empty.
    """
    config = toml.build(
        tomllib.loads(folders.read_config(run, say=True)), source=f"{run}/config.toml"
    )
    model = sources.make_model(config)
    if adapter and model.lora is None:
        raise InputError(f"export: the run {run!r} trains all weights and has no adapter")
    if adapter and dtype is not None:
        raise InputError("export: an adapter is written in float32; leave the dtype out")
    restored = folders.read_params(run, model.params, step=step)
    _warn_of_damage(restored)
    params = restored.state["params"]
    if adapter and model.lora is not None:
        alone = Adapter(model.lora, jax.device_get(params[adapters.ADAPTERS]))
        adapters.save(folder, alone, model.config, base=config.model.path)
        return restored.step
    if model.lora is not None:
        execution = Execution(model.config, Numerics(), lora=model.lora)
        params = programs.merged_program(execution)(params)
    params = jax.device_get(params)
    hf.save(
        folder,
        params,
        model.config,
        tokenizer=model.tokenizer,
        generation=hf.generation_config(
            model.config, model.tokenizer, assembly.stop_tokens(config, model)
        ),
        dtype=dtype or "float32",
    )
    return restored.step


def _warn_of_damage(restored: Restored) -> None:
    for step, what in restored.damaged:
        line = f"checkpoint of step {step} is damaged: {what}; taking step {restored.step}"
        print(line, file=sys.stderr)
