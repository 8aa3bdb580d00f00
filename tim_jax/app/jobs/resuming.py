"""Where a run stands before its next step: at its newest checkpoint, or at its beginning."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from tim_jax import mismatch
from tim_jax.app.jobs.assembling import Job
from tim_jax.app.run import checkpoints, folders
from tim_jax.app.run.folders import Run
from tim_jax.app.run.numerics import write_numerics
from tim_jax.common import waiting
from tim_jax.model import adapters
from tim_jax.placement import processes
from tim_jax.rl import loop
from tim_jax.rl.types import TrainState


class Start(NamedTuple):
    """Where a run stands before its next step."""

    contents: dict[str, Any]  # of a checkpoint, see `folders.saved`; taken out as they are used
    step: int  # the checkpoint's, -1 for a new run
    notes: list[str]  # on the task, on what was resumed, on what is trained
    base: Any  # of adapters, on the devices; None if all weights are trained
    mark: dict[str, int]  # what checkpoints keep of it and of the rows

    def save(
        self, run: Run, step: int, state: TrainState, reference: Any, history: Iterable[Any]
    ) -> None:
        """Saves a checkpoint; `history` as the loop has it."""
        run.save(step, folders.saved(state, reference, tuple(history)), self.mark)
        if jax.default_backend() == "cpu":
            # What is written are the very buffers that the next update is to take.
            run.wait()


def begun(job: Job, run: Run) -> tuple[Job, Start]:
    """Restores or starts. The job is then without the host's parameters, which nothing needs."""
    try:
        processes.agree(repr(job.execution), "what was measured of its machine")
        if processes.leads():
            drawing = job.programs.training.sampler.mismatch.numerics(job.execution.numerics)
            write_numerics(run.folder / "numerics.json", job.execution, drawing)
        base = adapters.split(job.model.params)[1]
        train = job.task.train
        mark = {
            **checkpoints.base_mark(base),
            **checkpoints.rows_mark(train),
            **checkpoints.prompts_mark(job.text, train),
        }
        contents, step, notes = _restored(job, run, mark)
        base = None if base is None else job.programs.place(base)
        notes = [*job.task.notes, *notes, *_described(job)]
    except BaseException:
        job.task.close()
        raise
    start = Start(dict(contents), step, notes, base, mark)
    return replace(job, model=replace(job.model, params=None)), start


def _restored(job: Job, run: Run, mark: dict[str, int]) -> tuple[checkpoints.State, int, list[str]]:
    """The contents of a checkpoint (`folders.saved`), its step, and notes.

    The step is -1, and the contents are those of a new run, if there is nothing to resume.
    """
    checkpoint = run.restore(_shapes(job))
    if checkpoint is None:
        return _first(job), -1, []
    checkpoints.check_marks(checkpoint, mark, run.folder)
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
