"""The jobs behind the commands: train, evaluate, generate. Files and display live here."""

import itertools
import json
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax

from tim_jax import (
    assembly,
    audit,
    charts,
    checkpoints,
    config_io,
    evaluation,
    kernel_choice,
    mismatch,
    programs,
    runs,
    sharded,
    sinks,
    train,
    warm_start,
)
from tim_jax.assembly import Model
from tim_jax.config import RunConfig
from tim_jax.errors import InputError
from tim_jax.learner import Policy, TrainState
from tim_jax.model import hf
from tim_jax.placement import SINGLE, Placement
from tim_jax.policy import Sampling
from tim_jax.progress import Completion, Display, completion_line, open_display
from tim_jax.runs import Run
from tim_jax.tasks.base import Example, Task
from tim_jax.tasks.supervised import Quality, supervised
from tim_jax.tokenizers import encode_prompt
from tim_jax.train import Sample, Step, Text
from tim_jax.types import Rollout

_EVAL_KEY = 0
_SHOWN = 4  # completions shown before and after
_EXTRA = {"held-out": "eval/reward"}


@dataclass(frozen=True)
class _Job:
    """Everything a training job was assembled from."""

    config: RunConfig
    model: Model
    task: Task
    text: Text
    policy: Policy
    programs: programs.Programs
    evaluate: Any  # (weights) -> (metrics, samples), or None


def train_run(config: RunConfig) -> Path:
    """Runs (or resumes) the training job of `config`; returns the run folder.

    Raises:
      InputError, MismatchError: one clear line each; what was written stays.
    """
    section = config.run
    text = config_io.dump(config)
    with runs.open_run(
        section.folder, text, may_change=_may_change(config), keep=section.keep
    ) as run:
        job = _assemble(config)
        try:
            _follow(job, run)
        finally:
            job.task.close()
    folder = Path(section.folder)
    charts.training_chart(folder / "metrics.jsonl", folder / "chart.png")
    return folder


def _may_change(config: RunConfig) -> tuple[str, ...]:
    """Keys in which a run in this folder may differ from the one before: all, if that left nothing.

    Else a mistake in the config, found before the first checkpoint, could not be mended in place.
    """
    if checkpoints.list_steps(Path(config.run.folder) / "checkpoints"):
        return config.may_change()
    return tuple(RunConfig.model_fields)


def _assemble(config: RunConfig) -> _Job:
    model = assembly.make_model(config)
    task = assembly.make_task(config)
    text = assembly.make_text(config, model)
    policy = assembly.make_policy(config, model)
    wanted = config.eval.every and len(task.evaluation)
    evaluate = _evaluator(config, policy, task, text) if wanted else None
    built = assembly.make_programs(config, policy)
    return _Job(config, model, task, text, policy, built, evaluate)


def _evaluator(config: RunConfig, policy: Policy, task: Task, text: Text):
    section = config.eval
    batch = min(section.prompts, max(1, config.sequences_per_step // section.samples))
    # Whole rows for every device; the evaluation fills up with prompts that are not counted.
    batch += -batch % sharded.prompts_multiple(policy.placement, section.samples)
    sampling = replace(policy.sampling, temperature=section.temperature, top_k=0, top_p=1.0)
    sample = programs.sampling_program(replace(policy, sampling=sampling), samples=section.samples)

    def run(weights) -> tuple[dict[str, float], list[Sample]]:
        return evaluation.evaluate(
            weights,
            task,
            text,
            sample=sample,
            key=train.step_key(config.seed, _EVAL_KEY),
            prompts=section.prompts,
            samples=section.samples,
            batch=batch,
            ks=section.k,
        )

    return run


def _follow(job: _Job, run: Run) -> None:
    """Restores or starts, then writes and shows what the loop yields."""
    config = job.config
    _write_numerics(job, run)
    restored, start, notes = _restored(job, run)
    state = TrainState(params=restored["params"], **restored["rest"])
    reference, history = restored.get("reference"), restored.get("history", ())
    title = f"{config.run.folder}: {job.task.name}"
    with (
        open_display(total=config.steps, start=start, title=title, extra=_EXTRA) as display,
        closing(_extra_sinks(config, run, start)) as more,
    ):
        for note in (*job.task.notes, *notes, *_described(job)):
            display.note(note)
        writer = sinks.Tee((run.metrics, more))
        if start < 0:
            state = _first_steps(job, state, run, writer, display)
            # The parameters are donated to the next update; a reference must outlive it.
            reference = train.copied(state.params) if config.objective.kl_coefficient else None
            history = train.first_history(job.programs.prepare(state.params), job.programs, ())
            run.save(0, runs.saved(state, reference, tuple(history)))
        steps = train.train(
            state,
            job.task,
            job.text,
            programs=job.programs,
            seed=config.seed,
            steps=config.steps,
            prompts_per_step=config.learner.prompts_per_step,
            exact=config.exact == "required",
            reference=None if reference is None else job.programs.prepare(reference),
            history=history,
        )
        for step in steps:
            state = step.state
            _record(job, step, run, writer, display)
            if step.number == config.steps and config.run.export:
                # Before the last checkpoint: a run that has that one is never resumed to this line.
                _export(job, state, display)
            if _due(step.number, config.run.checkpoint_every, config.steps):
                run.save(step.number, runs.saved(state, reference, step.history))
        if config.run.export and not (run.folder / "model").exists():
            _export(job, state, display)


def _write_numerics(job: _Job, run: Run) -> None:
    """numerics.json: how numbers are computed, by which kernels, on what."""
    device = jax.devices()[0]
    found = {
        "numerics": audit.describe(job.policy.numerics),
        "kernels": kernel_choice.kernels_used(job.policy.config, job.policy.numerics),
        "platform": device.platform,
        "device": device.device_kind,
        "jax": jax.__version__,
    }
    (run.folder / "numerics.json").write_text(json.dumps(found, indent=2) + "\n")


def _restored(job: _Job, run: Run) -> tuple[checkpoints.State, int, list[str]]:
    """What `runs.saved` holds, the step it is of (-1: nothing to resume), and notes."""
    built, params = job.programs, job.model.params
    state = built.init(params)
    reference = state.params if job.config.objective.kl_coefficient else None
    stale = built.mismatch.stale_updates
    history = train.first_history(built.prepare(params), built, ()) if stale else ()
    first = runs.saved(state, reference, tuple(history))
    found = run.restore(first)
    if found is None:
        return first, -1, []
    notes = [f"checkpoint of step {step} is damaged: {what}" for step, what in found.damaged]
    notes.append(f"resumed after step {found.step}")
    return found.state, found.step, notes


def _described(job: _Job) -> list[str]:
    """How the sampler differs from the learner, a line each."""
    lines = mismatch.describe(job.programs.mismatch, job.policy.numerics)
    return [f"the sampler differs: {line}" for line in lines]


def _extra_sinks(config: RunConfig, run: Run, start: int) -> sinks.Tee:
    section = config.run
    extra: list[sinks.Sink] = []
    if "tensorboard" in section.sinks:
        folder = run.folder / "tensorboard"
        extra.append(sinks.TensorBoard(folder, resume_step=max(start, 0)))
    if "wandb" in section.sinks:
        extra.append(
            sinks.Wandb(
                run.folder,
                project=section.wandb_project,
                name=run.folder.name,
                config=config.model_dump(),
                mode=section.wandb_mode,
            )
        )
    return sinks.Tee(tuple(extra))


def _first_steps(
    job: _Job, state: TrainState, run: Run, writer: sinks.Tee, display: Display
) -> TrainState:
    """Warm start, if asked for, and the first evaluation."""
    warmup = job.config.warmup
    if warmup.steps:
        display.note(f"warm start: {warmup.steps} supervised steps on {job.task.name}")
        started = warm_start.warm_start(
            job.model.params,
            _demonstrations(job),
            policy=replace(job.policy, placement=SINGLE),
            learning_rate=warmup.learning_rate,
            steps=warmup.steps,
        )
        params, loss = deque(started, maxlen=1).pop()
        display.note(f"warm start: {loss:.3f} nats per token after {warmup.steps} steps")
        state = job.programs.init(params)
    if job.evaluate is not None:
        metrics, samples = job.evaluate(job.programs.prepare(state.params))
        writer.write(0, {f"eval/{name}": value for name, value in metrics.items()})
        display.note(f"held-out reward before training: {metrics['reward']:.3f}")
        display.completions(_shown(samples), title="held-out completions before training")
    else:
        writer.write(0, {})
    return state


def _demonstrations(job: _Job) -> Iterator[Rollout]:
    section, sampling = job.config.warmup, job.config.sampling
    quality = Quality(section.worked, section.partial, section.errors)
    for step in itertools.count():
        pairs = supervised(
            job.task,
            quality,
            seed=job.config.seed,
            start=step * section.batch,
            count=section.batch,
        )
        yield warm_start.demonstrations(pairs, job.text, response_size=sampling.max_response_length)


def _record(job: _Job, step: Step, run: Run, writer: sinks.Tee, display: Display) -> None:
    """Writes and shows one step, with an evaluation where one is due."""
    config, metrics = job.config, dict(step.metrics)
    shown: list[Sample] = []
    if job.evaluate is not None and _due(step.number, config.eval.every, config.steps):
        scores, shown = job.evaluate(step.weights)
        metrics |= {f"eval/{name}": value for name, value in scores.items()}
    run.timing.write(step.number, step.timing)
    for sample in step.samples[: config.run.samples_logged]:
        run.samples.write(step.number, sample._asdict())
    writer.write(step.number, metrics)
    display.update(step.number, metrics | step.timing)
    if shown:
        display.completions(_shown(shown), title=f"held-out completions after step {step.number}")


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _shown(samples: Sequence[Sample]) -> list[Completion]:
    return [Completion(s.prompt, s.completion, s.reward) for s in samples[:_SHOWN]]


def _export(job: _Job, state: TrainState, display: Display) -> None:
    """Writes the final model; that of a shorter run gives way once the new one is whole."""
    folder = Path(job.config.run.folder)
    final, new, old = folder / "model", folder / ".model.new", folder / ".model.old"
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    params = jax.device_get(state.params)
    hf.save(new, params, job.model.config, tokenizer=job.model.tokenizer)
    if final.exists():
        final.rename(old)
    new.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    display.note(f"final model, as transformers loads it: {final}")


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
    job = _assemble(config)
    try:
        evaluate = job.evaluate or _evaluator(config, job.policy, job.task, job.text)
        params = job.model.params
        if model is None and checkpoints.list_steps(Path(config.run.folder) / "checkpoints"):
            restored = runs.read_checkpoint(config.run.folder, {"params": params})
            params = restored.state["params"]
        metrics, samples = evaluate(job.programs.prepare(params))
        for row in _shown(samples):
            print(completion_line(row, width=160))
        return metrics
    finally:
        job.task.close()


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
) -> Iterator[tuple[str, str, float]]:
    """Yields (prompt, completion, log-prob of the completion) from a model folder, hub or run."""
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
    policy = assembly.generating_policy(model, sampling, where, dtype, length=length, rows=rows)
    program = programs.sampling_program(policy, samples=samples)
    weights = programs.weights_program(policy)(model.params)
    drawn = text.prompts(examples, range(len(examples)))
    rollout = program(weights, drawn, train.step_key(seed, 0))
    rollout = jax.tree.map(lambda x: x[: len(prompts) * samples], rollout)
    log_probs = jax.device_get(rollout.log_probs.sum(axis=1))
    for row, completion in enumerate(text.completions(rollout)):
        yield prompts[row // samples], completion, float(log_probs[row])
