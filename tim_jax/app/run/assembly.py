"""From a configuration to the run as one value: policy, learning, optimizer."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import optax

from tim_jax import corrections, mismatch, optimizers
from tim_jax.app.config.run import Optimizer, RunConfig
from tim_jax.app.config.sections import Section, part
from tim_jax.app.run.numerics import make_numerics
from tim_jax.app.run.sources import Model
from tim_jax.common.errors import InputError
from tim_jax.model.execution import Batching, Execution, Sampling, check_compiler_options
from tim_jax.numerics import Numerics
from tim_jax.placement import Devices, Placement
from tim_jax.rl import programs
from tim_jax.rl.training import Sampler, Training
from tim_jax.rl.types import Learning

_EVAL_ROUNDS = 4  # times as many sequences as slots are queued at a time


def make_execution(
    config: RunConfig,
    model: Model,
    *,
    devices: Devices | None = None,
    measured: Path | None = None,
) -> Execution:
    """The one policy of sampler and learner.

    `devices`: those that are planned for; nothing is measured then. Left out: those at hand.
    `measured`: see `make_numerics`.
    """
    section = config.sampling
    length = section.max_prompt_length + section.longest
    if length > model.config.most_positions:
        raise InputError(
            f"sampling.max_tokens: {section.longest} after a prompt of"
            f" {section.max_prompt_length} is {length} tokens, more than the model's"
            f" {model.config.most_positions} positions"
        )
    beyond = [t for t in section.stop_tokens if t >= model.config.vocab_size]
    if beyond:
        raise InputError(
            f"sampling.stop_tokens: {beyond[0]} is outside the model's vocabulary of"
            f" {model.config.vocab_size}"
        )
    where = config.placement.value
    tiles = Numerics(column_tiles=config.column_tiles)
    programs.check_placement(Execution(model.config, tiles, placement=where), devices)
    batch = max(1, config.sequences_per_step // where.shards)
    shared = config.sampler.shared_dial
    numerics = make_numerics(
        config.numerics.family,
        config.numerics.dtype,
        model.config,
        length=length,
        batch=batch if devices is None else None,
        column_tiles=config.column_tiles,
        measured=measured,
        shared=shared,
        several_tiles=config.numerics.several_tiles,
    )
    if devices is None:
        check_compiler_options(config.numerics.compiler_options)
    ends = stop_tokens(config, model)
    sampling = part(Sampling, section, stop_tokens=ends, max_tokens=section.longest)
    numerics = numerics.with_options(config.numerics.compiler_options)
    execution = Execution(model.config, numerics, sampling, where, shared.edits, model.lora)
    before = Numerics(family=numerics.family, compute_dtype=config.numerics.dtype)
    mismatch.check(shared, replace(execution, numerics=before))
    return execution


def on_one_device(config: RunConfig) -> RunConfig:
    """The config of the same numerics without its meshes, for which there may be no devices."""
    numerics = config.numerics.model_copy(update={"column_tiles": config.column_tiles})
    return config.model_copy(update={"numerics": numerics, "placement": type(config.placement)()})


def stop_tokens(config: RunConfig, model: Model) -> tuple[int, ...]:
    """The tokens that end a response of a run: those of its model and those of its config."""
    return tuple(sorted({*model.stop_tokens, *config.sampling.stop_tokens}))


def batch_evaluation(config: RunConfig, where: Placement) -> tuple[int, Batching]:
    """How many held-out problems are sampled at a time, and how their sequences are decoded."""
    section = config.eval
    slots = config.sampler.batching.slots or config.sequences_per_step
    # The prompts' keys and values of a whole batch are kept, so it is not the whole evaluation.
    batch = min(section.prompts, max(1, _EVAL_ROUNDS * slots // section.samples))
    # Whole rows for every device; the evaluation fills up with prompts that are not counted.
    batch += -batch % where.prompts_multiple(section.samples)
    return batch, replace(config.sampler.batching, slots=slots).rounded(where.shards)


def make_optimizer(
    section: Optimizer, *, steps: int, max_tokens: int
) -> optax.GradientTransformationExtraArgs:
    """The chain of a run with this many updates and responses of at most this length."""
    end = None if section.schedule == "constant" else section.total_steps or steps
    own = part(optimizers.AdamW, section, total_steps=end)
    chain = own.transform(section.length_decay.value(max_tokens))
    return chain if section.loss_scale is None else section.loss_scale.transform(chain)


def make_learning(config: RunConfig) -> Learning:
    """Returns how rollouts become gradients: objective, mode, corrections, micro-batches."""
    own = _shared(config.learner, Learning) | {
        "objective": config.objective,
        "samples": config.sampling.samples,
        "correction": corrections.build(config.learner.corrections),
    }
    return Learning(**own)


def _shared(section: Section, kind: type) -> dict[str, Any]:
    """The keys of a section that are fields of the dataclass `kind` by the same name."""
    names = [field.name for field in fields(kind) if field.name in type(section).model_fields]
    return {name: getattr(section, name) for name in names}


def make_training(config: RunConfig, execution: Execution) -> Training:
    """Returns the run of a config, as one value, by the policy of `make_execution`."""
    section, where = config.learner, config.placement
    placement = None if where.for_sampler == execution.placement else where.for_sampler
    return Training(
        execution=execution,
        learning=make_learning(config),
        optimizer=make_optimizer(
            config.optimizer,
            steps=config.updates,
            max_tokens=config.sampling.longest,
        ),
        **_shared(section, Training),
        turns=config.turns,
        sampler=Sampler(
            placement=placement,
            own_devices=where.split,
            batching=config.sampler.batching,
            mismatch=config.sampler.own_dial,
            max_staleness=config.sampler.max_staleness,
        ),
        exact=config.exact == "required",
    )
