"""What a step takes: planned for devices that are not here, and checked for those that are.

This is the job behind `tim-jax plan`, what commands refuse before they begin, and the settings that
they name if memory runs out all the same.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import jax

from tim_jax import placement
from tim_jax.app.config.run import RunConfig
from tim_jax.app.run import assembly, folders, sources
from tim_jax.app.run.sources import Model
from tim_jax.common import inputs
from tim_jax.common.errors import InputError
from tim_jax.instruments import plan
from tim_jax.instruments.plan import Layers, Plan, Say, budget, topology
from tim_jax.instruments.plan.budget import Ways
from tim_jax.instruments.plan.workload import Workload
from tim_jax.model import hf
from tim_jax.model.config import ModelConfig
from tim_jax.placement import Devices, host_helps
from tim_jax.rl import drawing, loop


def plan_run(
    config: RunConfig,
    slice_name: str,
    *,
    architecture: Path | None = None,
    layers: Layers = (4, 8),
    mean_tokens: int | None = None,
    searching: bool = True,
    say: Say = lambda text: None,
) -> Plan:
    """Plans a run's step on a TPU slice or GPUs, which need not be here; no weights are made.

    Args:
      slice_name: such as "v5e:4x4" or "h200:1".
      architecture: a config.json to take in place of the config's model.
      layers: see `plan.make`.
      mean_tokens: of the responses that are learnt from; None: all are the longest.

    Raises:
      InputError: the slice, the model or the placement is not possible, the compiler for it is
        missing, episodes have several turns, or `mean_tokens` cannot be a mean; before anything is
        compiled.
    """
    limit = config.sampling.max_tokens
    if mean_tokens is not None and config.learner.micro_batch_tokens is None:
        raise InputError(
            f"--mean-tokens {mean_tokens} needs learner.micro_batch_tokens: rows are padded to the"
            " longest"
        )
    if mean_tokens is not None and not 1 <= mean_tokens <= limit:
        raise InputError(
            f"--mean-tokens {mean_tokens}: must be from 1 to sampling.max_tokens, which is {limit}"
        )
    if config.sampling.max_turns is not None:
        given = inputs.changed(config.task)
        without = (
            f"task.{key}=none" for key in given if key.startswith(("environment", "history"))
        )
        raise InputError(
            f"plan: sampling.max_turns = {config.sampling.max_turns}: the programs of several turns"
            " are not planned; a single turn of an episode's length has as large a cache and the"
            " same update: sampling.max_turns=none sampling.max_episode_tokens=none"
            f" {' '.join([*without, f'sampling.max_tokens={config.sampling.longest}'])}"
        )
    generation, _ = topology.check(slice_name)
    topology.check_devices(slice_name, config.placement.all_devices)
    topology.check_family(generation, config.numerics.family)
    model = model_config(config, architecture)
    target = topology.target(slice_name)
    with target.tracing():
        step = workload_of(config, model, target.devices)
    step = replace(step, mean_tokens=mean_tokens)
    return plan.make(step, target, layers=layers, searching=searching, say=say)


def parse_layers(text: str) -> Layers:
    """None for "all", or the two numbers of layers of a text such as "4,8".

    Raises:
      InputError: anything else.
    """
    if text == "all":
        return None
    parts = text.split(",")
    if len(parts) == 2 and all(part.isdecimal() and len(part) < 10 for part in parts):
        low, high = (int(part) for part in parts)
        if 0 < low < high:
            return low, high
    raise InputError(f'--layers {text!r}: write "all", or two rising numbers such as 4,8')


def workload_of(config: RunConfig, model: ModelConfig, devices: Devices) -> Workload:
    """A step of a run on these devices; nothing is measured or made.

    Raises:
      InputError: as `assembly.make_execution`.
    """
    bare = Model(model, None, None, model.eos_token_ids, sources.make_lora(config.lora, model))
    execution = assembly.make_execution(config, bare, devices=devices)
    training = assembly.make_training(config, execution)
    return Workload(training, prompt_length=config.sampling.max_prompt_length)


def model_config(config: RunConfig, architecture: Path | None = None) -> ModelConfig:
    """The architecture alone: of a file, of the config's sizes, published, or of a config.json.

    Raises:
      InputError: there is none, or it is not supported.
    """
    if architecture is not None:
        return hf.read_architecture(architecture, option="--architecture")
    random = config.model.random_architecture
    if random is not None:
        return sources.random_config(random)
    path = config.model.path
    assert path is not None  # the section has exactly one source
    return hf.find_architecture(path)


# Before a command begins


def check_memory(config: RunConfig) -> None:
    """Refuses a step that the model or the devices cannot have, before a weight is read or drawn.

    Such as one that the model has too few positions for, or the devices too little memory. A model
    that cannot be read is refused where it is read.
    """
    # A process knows the memory of its own devices alone, and all must refuse together.
    placement.led(partial(_check_memory, config, evaluating=False))


def check_evaluation(config: RunConfig) -> None:
    """The same for the evaluation alone, which has no optimiser and no reference policy."""
    placement.led(partial(_check_memory, config, evaluating=True))


def _check_memory(config: RunConfig, *, evaluating: bool) -> None:
    try:
        model = model_config(config)
    except InputError:
        return
    step = workload_of(config, model, tuple(jax.devices()))
    if not evaluating:
        budget.check(step, tuple(jax.devices()))
        return
    prompts, batching = assembly.batch_evaluation(config, step.execution.placement)
    budget.check_sampling(
        step.execution,
        prompts=prompts,
        samples=config.eval.samples,
        prompt_length=step.prompt_length,
        helps="a smaller sampler.slots, or placement.fsdp with more devices and placement.decode ="
        ' "sharded", needs less',
        batching=batching,
        turns=config.turns,
        offload=True,
    )


# Once memory has run out

# What was being done -> keys of a run that need less memory, the better ones first.
_KEYS: Ways = MappingProxyType(
    {
        drawing.SAMPLING: (
            *("sampler.slots", "sampler.pages", "sampling.max_episode_tokens"),
            *("learner.offload", "sampling.max_tokens", "placement.fsdp"),
        ),
        loop.EVALUATING: ("sampler.slots", "sampler.pages", "eval.samples", "placement.fsdp"),
        "": (
            *("learner.micro_batch", "learner.micro_batch_tokens", "learner.remat"),
            *("placement.fsdp", "sampling.max_tokens", "sampling.max_episode_tokens"),
        ),
    }
)


def explaining_memory(config: RunConfig) -> AbstractContextManager[None]:
    """`budget.explaining_memory` of a run's job."""
    return budget.explaining_memory(partial(less_memory, config))


def less_memory(config: RunConfig) -> Ways:
    """The settings of a run that need less memory, three for each stage, with their values now.

    If the run has checkpoints, those come first with which it goes on; the others need another
    folder, and say so.
    """
    values = _what_needs_less(config)
    kept = folders.list_steps(config.run.folder)
    free = [f"{key}." for key in config.may_change()]

    def bound(key: str) -> bool:
        return bool(kept) and not f"{key}.".startswith(tuple(free))

    def shown(key: str) -> str:
        return f"{key} {values[key]}{' (in another run.folder)' if bound(key) else ''}"

    there = {stage: [key for key in keys if key in values] for stage, keys in _KEYS.items()}
    return {stage: tuple(map(shown, sorted(keys, key=bound)[:3])) for stage, keys in there.items()}


def _what_needs_less(config: RunConfig) -> dict[str, str]:
    """Key -> what would be less. Episodes that wait for replies keep their keys and values."""
    learner, sampler, sampling = config.learner, config.sampler, config.sampling
    padded, turns = learner.micro_batch_tokens is None, sampling.max_turns is not None
    limits = {
        "learner.micro_batch": config.micro_batch if padded else None,
        "learner.micro_batch_tokens": learner.micro_batch_tokens,
        "sampler.slots": None if turns else sampler.slots or config.sequences_per_step,
        "sampling.max_tokens": None if turns else sampling.max_tokens,
        "sampling.max_episode_tokens": sampling.longest if turns else None,
        "eval.samples": config.eval.samples,
    }
    found = {key: f"below {value}" for key, value in limits.items() if value is not None}
    found["placement.fsdp"] = f"above {config.placement.fsdp}, with more devices"
    if turns:
        found["sampler.pages"] = "set" if sampler.pages is None else f"below {sampler.pages}"
    if not learner.remat:
        found["learner.remat"] = "= true"
    if not (learner.offload or sampler.max_staleness) and host_helps(jax.devices()):
        found["learner.offload"] = "= true"
    return found
