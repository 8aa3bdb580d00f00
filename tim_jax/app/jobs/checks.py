"""What commands refuse before they begin: by devices, memory and kernels."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import optax

from tim_jax import objectives
from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.config.sections import part
from tim_jax.app.jobs import planning
from tim_jax.app.run import assembly, checkpoints, folders
from tim_jax.app.run import numerics as run_numerics
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.instruments.plan import budget
from tim_jax.instruments.plan.workload import Workload
from tim_jax.model.execution import Execution
from tim_jax.placement import processes
from tim_jax.rl import warm_start
from tim_jax.rl.drawing import Text
from tim_jax.rl.training import Sampler, Training
from tim_jax.rl.types import Learning
from tim_jax.tasks import builtin
from tim_jax.tasks.base import Task

_SOME = 64  # prompts that are looked at among those that are made one by one


def check_devices(config: RunConfig) -> None:
    """Refuses meshes that do not include all devices of all processes, or cannot be apart."""
    section = config.placement
    section.of_sampler(jax.devices())
    processes.check_all_used(section.value)
    processes.check_all_used(section.for_sampler, "placement.sampler")


def check_memory(config: RunConfig) -> None:
    """Refuses a step that the model or the devices cannot have, before a weight is read or drawn.

    Such as one that the model has too few positions for, or the devices too little memory.
    """

    def check() -> None:
        if (step := _step(config)) is not None:
            budget.check(step, tuple(jax.devices()))

    # A process knows the memory of its own devices alone, and all must refuse together.
    processes.led(check)


def check_evaluation(config: RunConfig) -> None:
    """The same for the evaluation alone, which has no optimiser and no reference policy."""

    def check() -> None:
        if (step := _step(config)) is not None:
            prompts, batching = assembly.batch_evaluation(config, step.execution.placement)
            training = _drawing(step.execution, prompts=prompts, samples=config.eval.samples)
            sampler = Sampler(batching=batching)
            training = replace(training, sampler=sampler, turns=config.turns, offload=True)
            helps = (
                "a smaller sampler.slots, or placement.fsdp with more devices and"
                ' placement.decode = "sharded", needs less'
            )
            drawn = Workload(training, prompt_length=step.prompt_length)
            budget.check_sampling(drawn, tuple(jax.devices()), helps)

    processes.led(check)


def _step(config: RunConfig) -> Workload | None:
    """The step of a run; None if its model cannot be read, which is said where the run reads it."""
    try:
        model = planning.model_config(config, None)
    except InputError:
        return None
    return planning.workload_of(config, model, tuple(jax.devices()))


def check_sampling(
    execution: Execution,
    *,
    prompts: int,
    samples: int,
    prompt_length: int,
    helps: str,
    offload: bool = False,
) -> None:
    """Refuses more responses at a time than the devices can hold, before a weight is read.

    Args:
      helps: what would need less, in words.
      offload: whether the float32 parameters are in the host's memory while responses are drawn.
    """
    training = _drawing(execution, prompts=prompts, samples=samples)
    step = Workload(replace(training, offload=offload), prompt_length=prompt_length)
    budget.check_sampling(step, tuple(jax.devices()), helps)


def _drawing(execution: Execution, *, prompts: int, samples: int) -> Training:
    """A step that only draws: nothing is kept for an update."""
    learning = Learning(objectives.reinforce(), samples)
    return Training(execution, learning, optax.identity(), prompts_per_step=prompts)


@waiting.during("checking the prompts")
def check_prompts(task: Task, text: Text, *, training: bool) -> None:
    """Refuses a prompt that is too long or cannot be encoded, before a weight is read.

    All of those that are at hand, such as a dataset's, are looked at. Of those that are made one by
    one, of which there may be billions, some from everywhere among them.

    Args:
      training: whether the task is trained on; otherwise its held-out prompts alone matter.
    """
    if training and not len(task.train):
        raise InputError(f"task {task.name} has no prompts to train on")
    parts = {"prompt": task.train} if training else {}
    for name, examples in (parts | {"held-out prompt": task.evaluation}).items():
        apart = 1 if isinstance(examples, tuple) else max(1, len(examples) // _SOME)
        text.check(name, ((row, examples[row]) for row in range(0, len(examples), apart)))


@waiting.during("checking the worked solutions")
def check_warm_start(config: RunConfig, task: Task, text: Text) -> None:
    """Refuses worked solutions that no response has room for, before the machine is measured.

    Some are looked at, from everywhere among those that the warm start takes.
    """
    warmup, quality = config.warmup, part(builtin.Quality, config.warmup)
    total = warmup.steps * warmup.batch
    pairs = [
        pair
        for start in range(0, total, max(1, total // _SOME))
        for pair in builtin.supervised(task, quality, seed=config.seed, start=start, count=1)
    ]
    warm_start.demonstrations(pairs, text, response_size=config.sampling.longest)


def check_resumed(config: RunConfig) -> None:
    """Refuses to resume a run with other kernels, even if "auto" has another meaning by now.

    And one that is beyond its last step, which would end without a word on it, and one that keeps
    older weights in other tiles.
    """
    folder = Path(config.run.folder)
    steps = checkpoints.list_steps(folder / "checkpoints")
    if not steps:
        return
    before, now = _family_before(folder), run_numerics.family_here(config.numerics.family)
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
        _check_tiles(config, folder)


def _check_tiles(config: RunConfig, folder: Path) -> None:
    """Older weights are kept as they are multiplied, and so in tiles."""
    before = toml.build(tomllib.loads(folders.read_config(folder))).column_tiles
    if before != config.column_tiles:
        raise InputError(
            f"the run in {folder} keeps older weights in numerics.column_tiles = {before}, and"
            f" placement.tensor makes them {config.column_tiles}: set placement.tensor and"
            " placement.sampler.tensor as they were"
        )


def _family_before(folder: Path) -> str:
    """The family in numerics.json; runs of older versions have it in their config only."""
    try:
        return json.loads((folder / "numerics.json").read_text())["family"]
    except (OSError, ValueError, KeyError, TypeError):
        config = tomllib.loads(folders.read_config(folder))
        return config.get("numerics", {}).get("family", "auto")
