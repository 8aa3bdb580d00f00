"""A run's steps as they come: recorded, shown, saved, and ended where that is asked for."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tim_jax.app.jobs import warming
from tim_jax.app.jobs.assembling import Job, shown
from tim_jax.app.jobs.resuming import Start
from tim_jax.app.run import loggers, sources
from tim_jax.app.run.display import Display, RewardWatch, open_display
from tim_jax.app.run.folders import Run
from tim_jax.app.run.signals import Preemption
from tim_jax.common.errors import NonFiniteError, PreemptedError, writing
from tim_jax.model import adapters
from tim_jax.placement import processes
from tim_jax.rl import loop
from tim_jax.rl.drawing import Sample
from tim_jax.rl.loop import Step
from tim_jax.rl.types import TrainState
from tim_jax.tasks.episodes import Recorded

_EXTRA = {"held-out": "eval/reward"}


def follow(job: Job, run: Run, begun: Start) -> None:
    """Writes and shows what the loop yields."""
    config, start, contents, base = job.config, begun.step, begun.contents, begun.base
    state = TrainState(params=contents.pop("params"), **contents.pop("rest"))
    reference, history = contents.pop("reference", None), contents.pop("history", ())
    with ExitStack() as stack:
        display = stack.enter_context(_display(job, start, stack))
        more = stack.enter_context(closing(loggers.extra_sinks(config, run.folder, start)))
        preemption = stack.enter_context(Preemption())
        for note in begun.notes:
            display.note(note)
        writer = loggers.Tee((run.metrics, more))
        if start < 0:
            state = _first_steps(job, state, base, run, writer, display)
            # The next update takes the parameters' buffers, so the reference needs its own.
            reference = loop.copied(state.params) if config.objective.has_reference else None
            params = adapters.whole(state.params, base)
            history = loop.first_history(job.programs.prepare(params), job.programs, ())
            begun.save(run, 0, state, reference, history)
            _end_if(processes.any_of(preemption.asked), 0, config.steps)
        teaching = RewardWatch()
        kept = {"history": history, "base": base}
        if reference is not None:
            kept["reference"] = job.programs.prepare(adapters.whole(reference, base))
        for step in _steps(job, run, state, **kept):
            state = step.state
            _record(job, step, run, writer, display)
            teaching.add(step, display)
            asked = processes.any_of(preemption.asked)
            if step.number == config.steps and config.run.export:
                # Before the last checkpoint: a run that has it would not come here when resumed.
                _export(job, state, base, display)
            if asked or _due(step.number, config.run.checkpoint_every, config.steps):
                begun.save(run, step.number, state, reference, step.history)
            _end_if(asked, step.number, config.steps)
        teaching.sum_up(display)
        # Not at hand if this run had come to its end before, with `run.export` off or fewer steps.
        exported = processes.led(partial(sources.final_step, run.folder))
        if config.run.export and exported != int(state.step):
            _export(job, state, base, display)


def _steps(job: Job, run: Run, state: TrainState, **kept: Any) -> Iterator[Step]:
    """The loop's steps. If the loss or gradient stops being finite, its batch is saved."""
    config, environment = job.config, job.environment
    if environment is not None:
        environment = Recorded(environment, run.folder / "failures.jsonl")
    try:
        yield from loop.train(
            state,
            job.task,
            job.text,
            programs=job.programs,
            seed=config.seed,
            steps=config.steps,
            environment=environment,
            **kept,
        )
    except NonFiniteError as error:
        path = run.folder / "non_finite.npz"
        if processes.leads():
            with writing(path):
                np.savez(path, **error.batch)
        raise NonFiniteError(f"{error}; the last one's batch is in {path}", error.batch) from error


def _end_if(asked: bool, step: int, last: int) -> None:
    if asked and step < last:
        raise PreemptedError(f"asked to end, saved after step {step}; the same command goes on")


def _display(job: Job, start: int, stack: ExitStack) -> Display:
    """On standard output, of process 0 alone."""
    config = job.config
    file = None
    if not processes.leads():
        file = stack.enter_context(open(os.devnull, "w"))  # noqa: SIM115
    title = f"{config.run.folder}: {job.task.name}"
    return open_display(total=config.steps, start=start, title=title, extra=_EXTRA, file=file)


def _first_steps(
    job: Job, state: TrainState, base: Any, run: Run, writer: loggers.Tee, display: Display
) -> TrainState:
    """Warm start, if asked for, and the first evaluation."""
    config = job.config
    if config.warmup.steps:
        state = job.programs.init(warming.params(job, state.params, display))
    if job.evaluate is not None:
        params = adapters.whole(state.params, base)
        metrics, samples = job.evaluate(job.programs.prepare(params))
        writer.write(0, {f"eval/{name}": value for name, value in metrics.items()})
        within = f"{metrics['reward']:.3f} ± {1.96 * metrics['reward_error']:.3f} (95%)"
        display.note(f"held-out reward before training: {within}")
        display.completions(shown(samples), title="held-out completions before training")
    else:
        writer.write(0, {})
    return state


def _record(job: Job, step: Step, run: Run, writer: loggers.Tee, display: Display) -> None:
    """Writes and shows one step, with an evaluation where one is due."""
    config, metrics = job.config, dict(step.metrics)
    chosen: list[Sample] = []
    if job.evaluate is not None and _due(step.number, config.eval.every, config.steps):
        scores, chosen = job.evaluate(step.weights)
        metrics |= {f"eval/{name}": value for name, value in scores.items()}
    run.timing.write(step.number, step.timing)
    for sample in step.samples[: config.run.samples_logged]:
        run.samples.write(step.number, sample._asdict())
    writer.write(step.number, metrics)
    display.update(step.number, metrics | step.timing)
    if overflows := int(metrics.get("overflows", 0)):
        display.note(
            f"step {step.number}: a float16 gradient overflowed in {overflows} updates, which were"
            f" skipped; the loss scale is now {metrics['loss_scale']:g}"
        )
    if chosen:
        display.completions(shown(chosen), title=f"held-out completions after step {step.number}")


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _export(job: Job, state: TrainState, base: Any, display: Display) -> None:
    """Writes the final model."""
    merged = job.programs.merged
    params = state.params if merged is None else merged(adapters.whole(state.params, base))
    params = processes.whole(params)
    if not processes.leads():
        return
    final = sources.write_final(
        Path(job.config.run.folder),
        params,
        job.model,
        job.execution.sampling.stop_tokens,
        step=int(state.step),
    )
    display.note(f"final model, as transformers loads it: {final}")
