"""The training job: checks, opens or resumes the run, and follows its steps.

If there are several processes, each runs this with the same config; see `processes`.
"""

import itertools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tim_jax import mismatch
from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.config.sections import part
from tim_jax.app.jobs import checks, memory
from tim_jax.app.jobs.assembling import SHOWN, Job, assemble
from tim_jax.app.run import assembly, charts, checkpoints, folders, loggers, sources
from tim_jax.app.run.display import Display, RewardWatch, open_display
from tim_jax.app.run.folders import Run
from tim_jax.app.run.numerics import write_numerics
from tim_jax.app.run.signals import Preemption
from tim_jax.common import waiting
from tim_jax.common.errors import MismatchError, NonFiniteError, PreemptedError, writing
from tim_jax.common.types import Rollout
from tim_jax.model import adapters
from tim_jax.model.execution import Execution
from tim_jax.placement import SINGLE, processes
from tim_jax.rl import loop, warm_start
from tim_jax.rl.drawing import Sample
from tim_jax.rl.loop import Step
from tim_jax.rl.types import TrainState
from tim_jax.tasks import builtin
from tim_jax.tasks.episodes import Recorded


def train_run(config: RunConfig) -> Path:
    """Runs (or resumes) the training job of `config`; returns the run folder.

    Raises:
      InputError, MismatchError, NonFiniteError, PreemptedError, OutOfMemoryError: one clear line
        each; what was written stays.
    """
    with memory.explained(partial(memory.of_run, config)):
        return _train_run(config)


def _train_run(config: RunConfig) -> Path:
    section = config.run
    text = toml.dump(config)
    processes.agree(f"jax {jax.__version__}, config {text}", "its config or version of JAX")
    checks.check_devices(config)
    processes.led(partial(checks.check_resumed, config))
    with folders.open_run(
        section.folder, text, may_change=folders.changeable(config), keep=section.keep
    ) as run:
        processes.led(partial(folders.record_start, run.folder))
        checks.check_memory(config)
        measured = run.folder / "calibration.json"
        with folders.as_it_was(measured):
            job, start = begun(assemble(config, measured=measured), run)
        try:
            follow(job, run, start)
        except (MismatchError, NonFiniteError, PreemptedError):
            # These errors end all processes. A launcher kills the others as soon as one has ended,
            # so all wait until process 0 has completed the last checkpoint.
            run.wait()
            processes.meet()
            raise
        finally:
            job.task.close()
    if processes.leads():
        with waiting.during("drawing the chart"):
            charts.training_chart(run.folder / "metrics.jsonl", run.folder / "chart.png")
    return Path(section.folder)


class Start(NamedTuple):
    """Where a run stands before its next step."""

    contents: dict[str, Any]  # of a checkpoint, see `folders.saved`; taken out as they are used
    step: int  # the checkpoint's, -1 for a new run
    notes: list[str]  # on the task, on what was resumed, on what is trained
    base: Any  # of adapters, on the devices; None if all weights are trained
    mark: dict[str, Any]  # what checkpoints keep of it and of the rows

    def save(
        self, run: Run, step: int, state: TrainState, reference: Any, history: Iterable[Any]
    ) -> None:
        """Saves a checkpoint; `history` as the loop has it."""
        run.save(step, folders.saved(state, reference, tuple(history)), self.mark)
        if step == 0 or jax.default_backend() == "cpu":
            # A folder with lines and no checkpoint would be taken for one that has lost it. On a
            # CPU, what is written are the very buffers that the next update is to take.
            run.wait()


def begun(job: Job, run: Run) -> tuple[Job, Start]:
    """Restores or starts. The job is then without the host's parameters, which nothing needs."""
    try:
        processes.agree(repr(job.execution), "what was measured of its machine")
        base = adapters.split(job.model.params)[1]
        train = job.task.train
        mark = {
            **checkpoints.base_mark(base, job.execution.lora),
            **checkpoints.model_mark(job.execution.config, job.execution.sampling.stop_tokens),
            **checkpoints.rows_mark(train),
            **checkpoints.prompts_mark(job.text, train),
        }
        processes.agree(json.dumps(mark), "its model, its dataset, its prompts or its base weights")
        contents, step, notes = _restored(job, run, mark)
        if processes.leads():
            drawing = job.programs.training.sampler.mismatch.numerics(job.execution.numerics)
            write_numerics(run.folder / "numerics.json", job.execution, drawing)
        base = None if base is None else job.programs.place(base)
        notes = [*job.task.notes, *notes, *_described(job)]
    except BaseException:
        job.task.close()
        raise
    start = Start(dict(contents), step, notes, base, mark)
    return replace(job, model=replace(job.model, params=None)), start


def _restored(job: Job, run: Run, mark: dict[str, Any]) -> tuple[checkpoints.State, int, list[str]]:
    """The contents of a checkpoint (`folders.saved`), its step, and notes.

    The step is -1, and the contents are those of a new run, if there is nothing to resume.
    """
    checkpoint = run.restore(_shapes(job), mark)
    if checkpoint is None:
        return _first(job), -1, []
    notes = [f"checkpoint of step {step} is damaged: {what}" for step, what in checkpoint.damaged]
    notes.append(
        f"resumed after step {checkpoint.step}{folders.describe_changes(job.config, run.changed)}"
    )
    return checkpoint.state, checkpoint.step, notes


def _shapes(job: Job) -> checkpoints.State:
    """The shapes of `_first`, so that a state is not on the devices twice while one is read."""

    def shape(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return jax.tree.map(shape, _first(job))


@waiting.during("putting the model on the devices", about=waiting.COMPILES)
def _first(job: Job) -> checkpoints.State:
    """The contents of the checkpoint of a run that has not begun."""
    built, params = job.programs, job.model.params
    state = built.init(adapters.split(params)[0])
    reference = state.params if job.config.objective.has_reference else None
    kept = built.training.kept_weights
    history = loop.first_history(built.prepare(params), built, ()) if kept else ()
    return folders.saved(state, reference, tuple(history))


def _described(job: Job) -> list[str]:
    """Lines about what is trained, and the differences of the sampler from the learner."""
    sampler = job.programs.training.sampler
    lines = mismatch.describe(sampler.mismatch, job.execution.numerics)
    lora = job.execution.lora
    adapted = [] if lora is None else [adapters.describe(job.execution.config, lora)]
    ahead = sampler.max_staleness
    early = [f"the sampler draws ahead: max_staleness {ahead}"] if ahead else []
    return adapted + early + [f"the sampler differs: {line}" for line in lines]


def follow(job: Job, run: Run, before: Start) -> None:
    """Writes and shows what the loop yields."""
    config, start, contents, base = job.config, before.step, before.contents, before.base
    state = TrainState(params=contents.pop("params"), **contents.pop("rest"))
    reference, history = contents.pop("reference", None), contents.pop("history", ())
    with ExitStack() as stack:
        display = stack.enter_context(_display(job, start, stack))
        more = stack.enter_context(loggers.extra_sinks(config, run.folder, start))
        preemption = stack.enter_context(Preemption())
        for note in before.notes:
            display.note(note)
        writer = loggers.Tee((run.metrics, more))
        if start < 0:
            state = _first_steps(job, state, base, run, writer, display)
            # The next update takes the parameters' buffers, so the reference needs its own.
            reference = loop.copied(state.params) if config.objective.has_reference else None
            params = adapters.whole(state.params, base)
            history = loop.first_history(job.programs.prepare(params), job.programs, ())
            before.save(run, 0, state, reference, history)
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
            if asked or _due(step.number, config.run.checkpoint_every, config.steps):
                before.save(run, step.number, state, reference, step.history)
            _end_if(asked, step.number, config.steps)
        teaching.sum_up(display)
        # After the last checkpoint, so that a failure loses no step. A run that is resumed here and
        # has exported has nothing left to do.
        exported = processes.led(partial(sources.final_step, run.folder))
        if config.run.export and exported != int(state.step):
            _export(job, state, base, run.folder, display)


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
        if error.batch is None:
            raise
        path = run.folder / "non_finite.npz"
        if processes.leads():
            with writing(path):
                np.savez(path, **error.batch)
        shown = Path(config.run.folder, path.name)
        raise NonFiniteError(f"{error}; the last one's batch is in {shown}", error.batch) from error


def _end_if(asked: bool, step: int, last: int) -> None:
    if asked and step < last:
        raise PreemptedError(f"asked to end, saved after step {step}; the same command goes on")


def _display(job: Job, start: int, stack: ExitStack) -> Display:
    """On standard output, of process 0 alone."""
    config = job.config
    file = None
    if not processes.leads():
        file = stack.enter_context(open(os.devnull, "w"))  # noqa: SIM115
    title, extra = f"{config.run.folder}: {job.task.name}", {"held-out": "eval/reward"}
    return open_display(total=config.steps, start=start, title=title, extra=extra, file=file)


def _first_steps(
    job: Job, state: TrainState, base: Any, run: Run, writer: loggers.Tee, display: Display
) -> TrainState:
    """Warm start, if asked for, and the first evaluation."""
    config = job.config
    if config.warmup.steps:
        state = job.programs.init(_warmed(job, state.params, display))
    if job.evaluate is not None:
        params = adapters.whole(state.params, base)
        metrics, samples = job.evaluate(job.programs.prepare(params))
        writer.write(0, {f"eval/{name}": value for name, value in metrics.items()})
        within = f"{metrics['reward']:.3f} ± {1.96 * metrics['reward_error']:.3f} (95%)"
        display.note(f"held-out reward before training: {within}")
        display.completions(samples[:SHOWN], title="held-out completions before training")
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
        display.completions(chosen[:SHOWN], title=f"held-out completions after step {step.number}")


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _export(job: Job, state: TrainState, base: Any, folder: Path, display: Display) -> None:
    merged = job.programs.merged
    params = state.params if merged is None else merged(adapters.whole(state.params, base))
    params = processes.whole(params)
    stops = job.execution.sampling.stop_tokens
    write = partial(sources.write_final, folder, params, job.model, stops, step=int(state.step))
    # All wait for it: a process that has ended would end the others after five minutes.
    final = Path(job.config.run.folder, processes.led(lambda: write().name))
    display.note(f"final model, as transformers loads it: {final}")


def _warmed(job: Job, before: Any, display: Display) -> Any:
    """The parameters after the warm start from these."""
    warmup = job.config.warmup
    display.note(f"warm start: {warmup.steps} supervised steps on {job.task.name}")
    started = warm_start.warm_start(
        processes.whole(before),
        _demonstrations(job),
        execution=_warm_execution(job),
        learning_rate=warmup.learning_rate,
        steps=warmup.steps,
    )
    followed = waiting.each(started, "starting warm", total=warmup.steps)
    after, loss = deque(followed, maxlen=1).pop()
    display.note(f"warm start: {loss:.3f} nats per token after {warmup.steps} steps")
    return after


def _demonstrations(job: Job) -> Iterator[Rollout]:
    """Yields batches of worked solutions, without end."""
    config, section = job.config, job.config.warmup
    quality = part(builtin.Quality, section)
    for start in itertools.count(step=section.batch):
        pairs = builtin.supervised(
            job.task, quality, seed=config.seed, start=start, count=section.batch
        )
        yield warm_start.demonstrations(pairs, job.text, response_size=config.sampling.longest)


def _warm_execution(job: Job) -> Execution:
    """The policy, on one device.

    A control, which has an entry of the dial on both sides, starts from the weights of what it
    controls.
    """
    config, execution = job.config, job.execution
    if config.sampler.both_sides:
        alone = config.sampler.model_copy(update={"both_sides": False})
        execution = assembly.make_execution(config.model_copy(update={"sampler": alone}), job.model)
    return replace(execution, placement=SINGLE)
