"""What to change where a step does not fit."""

from collections.abc import Iterator
from dataclasses import replace

from tim_jax.errors import InputError
from tim_jax.model import axes
from tim_jax.placement import Devices, Placement
from tim_jax.plan import recipe as shapes
from tim_jax.plan.recipe import Recipe

_GIB = 2**30


def advice(
    recipe: Recipe, stage: str, devices: Devices, *, rows_drawn: int | None
) -> Iterator[str]:
    """One line per change, those that cost least first.

    Args:
      stage: the program that does not fit.
      rows_drawn: the most sequences at a time for which the sampler fits, if that is known; 0 if
        it never does.
    """
    yield from _spread(recipe, devices)
    if stage == "sampler":
        yield from _of_sampler(recipe, rows_drawn)
    else:
        yield from _of_learner(recipe)
    if recipe.policy.numerics.compute_dtype == "float32":
        yield 'numerics.dtype = "bfloat16": half the weights, keys and values, and activations'
    yield "a slice of more chips: a batch's rows, masters and optimiser are split over all of them"


def _spread(recipe: Recipe, devices: Devices) -> Iterator[str]:
    """More of the slice's devices, and state on all of them."""
    where = recipe.policy.placement
    spare = len(devices) // where.devices
    wider = replace(where, fsdp=where.fsdp * spare)
    if spare > 1 and _possible(recipe, wider):
        yield f"placement.fsdp = {wider.fsdp}: the slice has devices that nothing lies on"
    merged = replace(where, data=1, fsdp=where.data * where.fsdp)
    if where.data > 1 and _possible(recipe, merged):
        now, then = (_state(recipe.with_placement(one), devices) for one in (where, merged))
        yield (
            f"placement.data = 1 with placement.fsdp = {merged.fsdp}: masters and optimiser take"
            f" {then / _GIB:.1f} instead of {now / _GIB:.1f} GiB a device"
        )


def _possible(recipe: Recipe, where: Placement) -> bool:
    try:
        axes.check(recipe.policy.config, recipe.policy.numerics, where)
    except InputError:
        return False
    return recipe.sequences % where.shards == 0


def _state(recipe: Recipe, devices: Devices) -> int:
    return shapes.resident(recipe, devices, "scoring")


def _of_sampler(recipe: Recipe, rows_drawn: int | None) -> Iterator[str]:
    where = recipe.sampling_policy.placement
    key = "placement" if recipe.drawing is None else "placement.sampler"
    if rows_drawn:
        rounds = recipe.sequences // rows_drawn
        yield f"sampler.micro_batch = {rows_drawn}: a step is sampled in {rounds} rounds, same bits"
    yield "sampling.max_response_length: room for keys and values is made for the longest response"
    if where.decode == "whole" and where.fsdp > 1:
        whole = shapes.weight_bytes(recipe) / where.tensor
        saved = whole * (1 - 1 / where.fsdp) / _GIB
        yield (
            f'{key}.decode = "sharded": {saved:.1f} GiB less a device, but all weights are gathered'
            " for every token"
        )
    if recipe.policy.numerics.family in ("tiles", "native"):
        yield f"{key}.tensor = {2 * where.tensor}: half the weights and key heads a device"


def _of_learner(recipe: Recipe) -> Iterator[str]:
    learning, shards = recipe.learning, recipe.policy.placement.shards
    if not learning.remat:
        yield "learner.remat = true: activations of one layer at a time, for a second forward"
    if recipe.micro_batch > shards:
        yield f"learner.micro_batch = {shards}: one sequence a device at a time"
