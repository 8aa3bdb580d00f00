"""The supervised steps before a run's first one, if its configuration asks for some."""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tim_jax.app.config.sections import part
from tim_jax.app.jobs.assembling import Job
from tim_jax.app.run import assembly
from tim_jax.app.run.display import Display
from tim_jax.common import waiting
from tim_jax.common.types import Rollout
from tim_jax.model.execution import Execution
from tim_jax.placement import SINGLE, processes
from tim_jax.rl import warm_start
from tim_jax.tasks import builtin


def params(job: Job, before: Any, display: Display) -> Any:
    """The parameters after the warm start from these."""
    warmup = job.config.warmup
    display.note(f"warm start: {warmup.steps} supervised steps on {job.task.name}")
    started = warm_start.warm_start(
        processes.whole(before),
        _demonstrations(job),
        execution=_execution(job),
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


def _execution(job: Job) -> Execution:
    """The policy, on one device.

    A control, which has an entry of the dial on both sides, starts from the weights of what it
    controls.
    """
    config, execution = job.config, job.execution
    if config.sampler.both_sides:
        alone = config.sampler.model_copy(update={"both_sides": False})
        execution = assembly.make_execution(config.model_copy(update={"sampler": alone}), job.model)
    return replace(execution, placement=SINGLE)
