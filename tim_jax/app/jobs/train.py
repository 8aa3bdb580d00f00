"""The training job: assembled from its configuration, checked, opened or resumed, and followed.

The job of `tim-jax eval` is the same, without what only training needs.

If there are several processes, each runs this with the same config; see `placement`.
"""

import itertools
import json
import os
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tim_jax import placement
from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.jobs import planning
from tim_jax.app.run import assembly, charts, checkpoints, folders, loggers, sources
from tim_jax.app.run.display import Display, RewardWatch, completion_line
from tim_jax.app.run.folders import Run
from tim_jax.app.run.sources import Model
from tim_jax.common import waiting
from tim_jax.common.errors import InputError, MismatchError, NonFiniteError, PreemptedError
from tim_jax.common.machine import Preemption
from tim_jax.model import adapters
from tim_jax.model.execution import Execution
from tim_jax.placement import SINGLE
from tim_jax.rl import drawing, loop, programs
from tim_jax.rl.drawing import Sample, Text
from tim_jax.rl.loop import Step
from tim_jax.rl.types import TrainState
from tim_jax.tasks.base import Environment, Task
from tim_jax.tasks.environments import Recorded

_EVAL_KEY = 0
_SOME = 64  # prompts that are looked at among those that are made one by one
SHOWN = 4  # completions that are shown before and after


@dataclass(frozen=True)
class Job:
    """Everything a training job was assembled from."""

    config: RunConfig
    model: Model
    task: Task
    text: Text
    execution: Execution
    programs: programs.Programs
    environment: Environment | None = None  # of episodes of several turns
    evaluate: Any = None  # (weights) -> (metrics, samples), or None


def assemble(config: RunConfig, *, measured: Path | None = None, training: bool = True) -> Job:
    """Assembles a run, or with `training` off what its evaluation needs of it.

    `measured` is the file for measurements of this machine, if there is one.
    """
    folder = Path(config.run.folder).absolute()  # code of a task may change the current one
    model = sources.begin_model(config)
    task = drawing.shared(sources.make_task(config))
    try:
        text = sources.make_text(config, model, run=folder).declaring(task.environment)
        check_prompts(task, text, training=training)
        if training and config.warmup.steps:
            _check_warm_start(config, task, text)
        # Before the machine is measured, which may take minutes.
        unmeasured = assembly.make_execution(config, model, devices=tuple(jax.devices()))
        planned = assembly.make_training(config, unmeasured)
        planned.check_sampler()
        execution = assembly.make_execution(config, model, measured=measured)
        model = sources.with_params(model, config)
        environment = _environment(config, execution, task, text)
        built = programs.build(assembly.make_training(config, execution))
        job = Job(config, model, task, text, execution, built, environment)
        wanted = config.eval.every and len(task.evaluation)
        return replace(job, evaluate=evaluator(job)) if wanted or not training else job
    except BaseException:
        task.close()
        raise


@waiting.during("checking the prompts")
def check_prompts(task: Task, text: Text, *, training: bool) -> None:
    """Refuses a prompt that is too long or cannot be encoded, before a weight is read.

    All of those that are at hand, such as a dataset's, are looked at. Of those that are made one by
    one, of which there may be billions, some from everywhere among them. Without training, held-out
    prompts alone matter.
    """
    if training and not len(task.train):
        raise InputError(f"task {task.name} has no prompts to train on")
    parts = {"prompt": task.train} if training else {}
    for name, examples in (parts | {"held-out prompt": task.evaluation}).items():
        apart = 1 if isinstance(examples, tuple) else max(1, len(examples) // _SOME)
        text.check(name, ((row, examples[row]) for row in range(0, len(examples), apart)))


@waiting.during("checking the worked solutions")
def _check_warm_start(config: RunConfig, task: Task, text: Text) -> None:
    """Refuses worked solutions that no response has room for, before the machine is measured.

    Some are looked at, from everywhere among those that the warm start takes.
    """
    total = config.warmup.steps * config.warmup.batch
    pairs = [
        pair
        for start in range(0, total, max(1, total // _SOME))
        for pair in sources.worked_solutions(config, task, start=start, count=1)
    ]
    loop.demonstrations(pairs, text, response_size=config.sampling.longest)


def _environment(
    config: RunConfig, execution: Execution, task: Task, text: Text
) -> Environment | None:
    """The task's environment in tokens, if episodes have several turns."""
    turns = config.sampling.max_turns
    if task.environment is None and turns is None:
        return None
    if task.environment is None:
        raise InputError(
            f"sampling.max_turns = {turns}: the task {task.name} has no environment; name one in"
            " task.environment, or leave max_turns out"
        )
    if turns is None:
        raise InputError(
            f"the task {task.name} has episodes of several turns; set sampling.max_turns"
        )
    return text.bridged(task.environment, execution.sampling.stop_tokens, config.task.history)


def evaluator(job: Job) -> Callable[[Any], tuple[dict[str, float], list[Sample]]]:
    """(weights) -> metrics and samples of the held-out problems, as `config.eval` asks for."""
    config, execution, section = job.config, job.execution, job.config.eval
    batch, batching = assembly.batch_evaluation(config, execution.placement)
    sampling = replace(execution.sampling, temperature=section.temperature, top_k=0, top_p=1.0)
    own = replace(execution, sampling=sampling)
    sample = loop.evaluation_program(
        own, samples=section.samples, batching=batching, turns=config.turns
    )
    return partial(
        loop.evaluate,
        task=job.task,
        text=job.text,
        sample=sample,
        environment=job.environment,
        key=drawing.step_key(config.seed, _EVAL_KEY),
        prompts=section.prompts,
        samples=section.samples,
        batch=batch,
        ks=section.k,
        solved=section.solved,
    )


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
    with planning.explaining_memory(config):
        return _evaluate(config, of_run=model is None)


def _evaluate(config: RunConfig, *, of_run: bool) -> dict[str, float]:
    planning.check_evaluation(config)
    job = assemble(config, training=False)
    try:
        params, which = job.model.params, ""
        if of_run and folders.list_steps(config.run.folder):
            restored = folders.read_params(
                config.run.folder, params, config=job.model.config, lora=job.model.lora
            )
            restored.warn()
            params = restored.state["params"]
            which = f"step {restored.step} of {config.run.folder}"
        elif of_run:
            which = f"the config's own model, as {config.run.folder} has no checkpoint"
        metrics, samples = job.evaluate(job.programs.prepare(params))
        if which:
            print(f"evaluated {which}")
        for row in samples[:SHOWN]:
            print(completion_line(row, width=160))
        return metrics
    finally:
        job.task.close()


def train_run(config: RunConfig) -> Path:
    """Runs (or resumes) the training job of `config`; returns the run folder.

    Raises:
      InputError, MismatchError, NonFiniteError, PreemptedError, OutOfMemoryError: one clear line
        each; what was written stays.
    """
    with planning.explaining_memory(config):
        _train(config)
    return Path(config.run.folder)


def _train(config: RunConfig) -> None:
    section, text = config.run, toml.dump(config)
    placement.agree(f"jax {jax.__version__}, config {text}", "its config or version of JAX")
    config.placement.of_sampler(jax.devices())  # which the sampler may be unable to have apart
    placement.check_all_used(config.placement.value)
    placement.check_all_used(config.placement.for_sampler, "placement.sampler")
    placement.led(partial(check_resumed, config))
    placement.led(partial(loggers.check_installed, section.sinks))
    with folders.open_run(
        section.folder, text, may_change=folders.changeable(config), keep=section.keep
    ) as run:
        if not folders.list_steps(run.folder):  # an older version may have begun it, without a date
            placement.led(partial(folders.record_start, run.folder))
        planning.check_memory(config)
        measured = run.folder / "calibration.json"
        with folders.as_it_was(measured):
            job, start = begun(assemble(config, measured=measured), run)
        try:
            follow(job, run, start)
        except (MismatchError, NonFiniteError, PreemptedError):
            # These errors end all processes. A launcher kills the others as soon as one has ended,
            # so all wait until process 0 has completed the last checkpoint.
            run.wait()
            placement.meet()
            raise
        finally:
            job.task.close()
    if placement.leads():
        with waiting.during("drawing the chart"):
            charts.training_chart(run.folder / "metrics.jsonl", run.folder / "chart.png")


def check_resumed(config: RunConfig) -> None:
    """Refuses to resume a run with other kernels, even if "auto" has another meaning by now.

    And one that is beyond its last step, which would end without a word on it, and one that keeps
    older weights, which are kept as they are multiplied, in other tiles.
    """
    folder = Path(config.run.folder)
    steps = folders.list_steps(folder)
    if not steps:
        return
    before, now = _family_before(folder), assembly.family_here(config.numerics.family)
    if before not in (now, "auto"):
        raise InputError(
            f"{folder} holds a run whose numerics.family was {before!r};"
            f" {config.numerics.family!r} is {now!r} here: set numerics.family={before}, or another"
            " run.folder"
        )
    if config.steps < steps[-1]:
        raise InputError(
            f"steps = {config.steps}: the run in {folder} is at step {steps[-1]} already; set steps"
            f" to {steps[-1]} or more, or another run.folder"
        )
    if config.sampler.max_staleness or config.sampler.dial.stale_updates:
        tiles = toml.build(tomllib.loads(folders.read_config(folder))).column_tiles
        if tiles != config.column_tiles:
            raise InputError(
                f"the run in {folder} keeps older weights in numerics.column_tiles = {tiles}, and"
                f" placement.tensor makes them {config.column_tiles}: set placement.tensor and"
                " placement.sampler.tensor as they were"
            )


def _family_before(folder: Path) -> str:
    """The family in numerics.json; runs of older versions have it in their config only."""
    section = tomllib.loads(folders.read_config(folder)).get("numerics", {})
    return assembly.read_numerics(folder).get("family") or section.get("family", "auto")


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
        placement.agree(repr(job.execution), "what was measured of its machine")
        base = adapters.split(job.model.params)[1]
        train = job.task.train
        mark = {
            **checkpoints.base_mark(base, job.execution.lora),
            **checkpoints.model_mark(job.execution.config, job.execution.sampling.stop_tokens),
            **checkpoints.rows_mark(train),
            **checkpoints.prompts_mark(job.text, train),
        }
        placement.agree(json.dumps(mark), "its model, its dataset, its prompts or its base weights")
        kept = run.restore(jax.tree.map(_shape_of, _make_contents(job)), mark)
        contents, step = (_make_contents(job), -1) if kept is None else (kept.state, kept.step)
        before = assembly.read_numerics(run.folder)
        if placement.leads():
            drawing = job.programs.training.sampler.mismatch.numerics(job.execution.numerics)
            assembly.write_numerics(run.folder, job.execution, drawing)
        base = None if base is None else job.programs.place(base)
        notes = [*job.task.notes, *_describe_resumption(run, kept, before), *_describe_run(job)]
    except BaseException:
        job.task.close()
        raise
    start = Start(dict(contents), step, notes, base, mark)
    return replace(job, model=replace(job.model, params=None)), start


def _shape_of(x: Any) -> Any:
    """That of an array, so that a state is not on the devices twice while one is read."""
    if not isinstance(x, jax.Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _describe_resumption(
    run: Run, kept: checkpoints.Restored | None, before: Mapping[str, Any]
) -> list[str]:
    """Lines about a checkpoint that the run goes on from, if it does.

    `before`: what numerics.json said then.
    """
    if kept is None:
        return []
    damaged = [f"checkpoint of step {step} is damaged: {what}" for step, what in kept.damaged]
    changes = f" with other settings: {'; '.join(map(str, run.changed))}" if run.changed else ""
    now = assembly.read_numerics(run.folder)
    others = [
        f"{key} was {before[key]}, now {now.get(key)}"
        for key in ("jax", "device", "numerics")
        if key in before and before[key] != now.get(key)
    ]
    bits = f"bits may differ from those of an uninterrupted run: {'; '.join(others)}"
    return [*damaged, f"resumed after step {kept.step}{changes}", *([bits] if others else [])]


@waiting.during("putting the model on the devices", about=waiting.COMPILES)
def _make_contents(job: Job) -> checkpoints.State:
    """The contents of the checkpoint of a run that has not begun."""
    built, params = job.programs, job.model.params
    state = built.init(adapters.split(params)[0])
    reference = state.params if job.config.objective.has_reference else None
    kept = built.training.kept_weights
    history = loop.first_history(built.prepare(params), built, ()) if kept else ()
    return folders.saved(state, reference, tuple(history))


def _describe_run(job: Job) -> list[str]:
    """Lines about what is ignored, what is trained, and how the sampler differs."""
    lora = job.execution.lora
    adapted = [] if lora is None else [adapters.describe(job.execution.config, lora)]
    unread = job.text.unread(job.config.model.template_options)
    ignored = [f"model.template_options.{name}: no prompt depends on it" for name in unread]
    return ignored + adapted + job.programs.training.describe_sampler()


def follow(job: Job, run: Run, before: Start) -> None:
    """Writes and shows what the loop yields."""
    config, start, contents, base = job.config, before.step, before.contents, before.base
    state = TrainState(params=contents.pop("params"), **contents.pop("rest"))
    reference, history = contents.pop("reference", None), contents.pop("history", ())
    title, extra = f"{config.run.folder}: {job.task.name}", {"held-out": "eval/reward"}
    with ExitStack() as stack:
        file = None if placement.leads() else stack.enter_context(open(os.devnull, "w"))
        display = stack.enter_context(
            Display(total=config.steps, start=max(start, 0), title=title, extra=extra, file=file)
        )
        more = stack.enter_context(loggers.extra_sinks(config, run.folder, start))
        preemption = stack.enter_context(Preemption())
        for note in before.notes:
            display.note(note)
        writer = loggers.Tee((run.metrics, more))
        if start < 0:
            if config.warmup.steps:
                after = _start_warm(job, state.params, display, preemption)
                state = job.programs.init(after)
            _first_evaluation(job, state, base, writer, display)
            # The next update takes the parameters' buffers, so the reference needs its own.
            reference = loop.copied(state.params) if config.objective.has_reference else None
            params = adapters.whole(state.params, base)
            history = loop.first_history(job.programs.prepare(params), job.programs, ())
            before.save(run, 0, state, reference, history)
            _end_if(placement.any_of(preemption.asked), 0, config.steps)
        teaching = RewardWatch()
        kept = {"history": history, "base": base}
        if reference is not None:
            kept["reference"] = job.programs.prepare(adapters.whole(reference, base))
        for step in _steps(job, run, state, **kept):
            state = step.state
            _record(job, step, run, writer, display)
            teaching.add(step, display)
            asked = placement.any_of(preemption.asked)
            if asked or _is_due(step.number, config.run.checkpoint_every, config.steps):
                before.save(run, step.number, state, reference, step.history)
            _end_if(asked, step.number, config.steps)
        teaching.sum_up(display)
        # After the last checkpoint, so that a failure loses no step. A run that is resumed here and
        # has exported has nothing left to do.
        exported = placement.led(partial(sources.final_step, run.folder))
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
        path = run.save_arrays("non_finite.npz", error.batch)
        raise NonFiniteError(f"{error}; the last one's batch is in {path}", error.batch) from error


def _end_if(asked: bool, step: int, last: int) -> None:
    if asked and step < last:
        raise PreemptedError(f"asked to end, saved after step {step}; the same command goes on")


def _first_evaluation(
    job: Job, state: TrainState, base: Any, writer: loggers.Tee, display: Display
) -> None:
    """The line of step 0, with the held-out scores, if they are asked for."""
    if job.evaluate is not None:
        params = adapters.whole(state.params, base)
        metrics, samples = job.evaluate(job.programs.prepare(params))
        writer.write(0, {f"eval/{name}": value for name, value in metrics.items()})
        within = f"{metrics['reward']:.3f} ± {1.96 * metrics['reward_error']:.3f} (95%)"
        display.note(f"held-out reward before training: {within}")
        display.completions(samples[:SHOWN], title="held-out completions before training")
    else:
        writer.write(0, {})


def _record(job: Job, step: Step, run: Run, writer: loggers.Tee, display: Display) -> None:
    """Writes and shows one step, with an evaluation where one is due."""
    config, metrics = job.config, dict(step.metrics)
    chosen: list[Sample] = []
    if job.evaluate is not None and _is_due(step.number, config.eval.every, config.steps):
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


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _export(job: Job, state: TrainState, base: Any, folder: Path, display: Display) -> None:
    merged = job.programs.merged
    params = state.params if merged is None else merged(adapters.whole(state.params, base))
    model = replace(job.model, params=placement.whole(params))
    stops = job.execution.sampling.stop_tokens
    write = partial(sources.write_final, folder, model, stops, step=int(state.step))
    # All wait for it: a process that has ended would end the others after five minutes.
    final = Path(job.config.run.folder, placement.led(lambda: write().name))
    display.note(f"final model, as transformers loads it: {final}")


def _start_warm(job: Job, before: Any, display: Display, preemption: Preemption) -> Any:
    """The parameters after the warm start from these.

    Raises:
      PreemptedError: the process was asked to end before the last step.
    """
    warmup = job.config.warmup
    display.note(f"warm start: {warmup.steps} supervised steps on {job.task.name}")
    batches = (
        loop.demonstrations(
            sources.worked_solutions(job.config, job.task, start=start, count=warmup.batch),
            job.text,
            response_size=job.config.sampling.longest,
        )
        for start in itertools.count(step=warmup.batch)
    )
    started = loop.warm_start(
        placement.whole(before),
        batches,
        execution=_warm_execution(job),
        learning_rate=warmup.learning_rate,
        steps=warmup.steps,
    )
    followed = waiting.each(started, "starting warm", total=warmup.steps)
    after, loss = deque(_unless_asked(followed, warmup.steps, preemption), maxlen=1).pop()
    display.note(f"warm start: {loss:.3f} nats per token after {warmup.steps} steps")
    return after


def _unless_asked(steps: Iterable[Any], last: int, preemption: Preemption) -> Iterator[Any]:
    """Yields what the steps of a warm start give; ends them before the last if asked to."""
    for number, item in enumerate(steps, start=1):
        if placement.any_of(preemption.asked) and number < last:
            raise PreemptedError(
                f"asked to end in step {number} of {last} of the warm start, of which nothing is"
                " kept; the same command begins it anew"
            )
        yield item


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
