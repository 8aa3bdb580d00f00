"""Blocks that need a statistic of the whole batch: normalisation and denominators.

The batch's statistic must not depend on how the batch was split. So `update` has to see the whole
batch: with micro-batches, compute the log-ratios of all of them first. Each row is then summed in a
fixed order, and the rows' sums in a fixed tree (`tim_jax.sums`), which gives the same bits on one
device, on arrays sharded over many (under `jit`, nothing to do), and inside `shard_map`, where
`axis_name` names the mesh axis that the rows are split over: the rows' sums are gathered, not
added, before the tree. Counts are integers.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from tim_jax.corrections.blocks import (
    Transform,
    map_coefficients,
    map_leaves,
    take_extra,
)
from tim_jax.corrections.ratios import check_choice
from tim_jax.errors import InputError
from tim_jax.objectives import Aggregation
from tim_jax.sums import compensated_sum, row_count

Unit = Literal["token", "sequence"]
Among = Literal["response", "survivors"]


def normalise(
    unit: Unit = "token", *, among: Among = "response", axis_name: str | None = None
) -> Transform:
    """Divides the coefficients by their mean over the batch, so that they average 1.

    - unit token: the mean over tokens; unit sequence: the mean over sequences of each one's mean
    - among response: over all response tokens, rejected ones counting as 0; among survivors: over
      tokens (sequences) with a coefficient that is not 0

    verl's `rollout_is_batch_normalize` is `scale_by_truncated_ratio, normalise`, then `reject`.
    Order: put it after the ratio; what comes later in the chain is not in the mean.
    A batch without survivors stays 0.
    """
    check_choice("unit", unit, Unit)
    check_choice("among", among, Among)

    def divide(coefficients, mask):
        mean = batch_mean(coefficients, mask, unit=unit, among=among, axis_name=axis_name)
        return coefficients / jnp.where(mean != 0.0, mean, 1.0)

    return map_coefficients("normalise", divide, needs=())


class RunningMeanState(NamedTuple):
    """State of `normalise_by_running_mean`."""

    mean: jax.Array  # f32[], over all arrays of coefficients together


def normalise_by_running_mean(
    unit: Unit = "token", *, decay: float = 0.99, axis_name: str | None = None
) -> Transform:
    """Divides by a running mean of the batches' means: `m <- m + (1 - decay) (mean - m)`, m_0 = 1.

    The mean that divides a batch comes from the batches before it. So within a step the block is
    row by row, and micro-batches need no pass of their own; with them, take the state of the last.
    """
    check_choice("unit", unit, Unit)
    if not 0.0 <= decay < 1.0:
        raise InputError(f"decay is {decay}; it must lie in [0, 1)")

    def init(params):
        del params
        return RunningMeanState(jnp.ones((), jnp.float32))

    def update(updates, state, params=None, **extra):
        del params
        mask = take_extra(extra, "mask", "normalise_by_running_mean")
        safe = jnp.where(state.mean > 0.0, state.mean, 1.0)
        rows = []

        def divide(coefficients, mask):
            rows.append(_row_totals(coefficients, mask, unit, "response"))
            return coefficients / safe

        divided = map_leaves(divide, updates, mask)
        if not rows:
            return divided, state
        sums, counts = (jnp.concatenate(parts) for parts in zip(*rows, strict=True))
        new = _mean_of(sums, counts, axis_name)
        mean = jax.lax.stop_gradient(state.mean + (1.0 - decay) * (new - state.mean))
        empty = jnp.sum(_gathered(counts, axis_name), dtype=jnp.int32) == 0
        return divided, RunningMeanState(jnp.where(empty, state.mean, mean))

    return Transform(init, update)


def shrink_denominator(aggregation: Aggregation, *, axis_name: str | None = None) -> Transform:
    """Scales survivors as if rejected tokens had never been in the loss's denominator.

    A token's coefficient is multiplied by its weight among survivors over its weight among all
    response tokens, both of the loss's aggregation (`objectives.token_weights`): for token_mean,
    by (response tokens) / (surviving tokens). Survivors are coefficients that are not 0 at this
    point of the chain: put it right after the rejections, and before any mask whose tokens should
    stay in the denominator. verl and slime shrink; NeMo-RL and OpenRLHF keep, which is the default
    here. A loss whose weights already come from the survivors must not use it.
    """
    check_choice("aggregation", aggregation, Aggregation)

    def scale(coefficients, mask):
        own = row_count(mask), row_count(mask & (coefficients != 0.0))
        lengths, surviving = (_gathered(x, axis_name) for x in own)
        if aggregation == "token_mean":
            return coefficients * (_number(lengths) / _number(surviving))
        factor = _number(lengths > 0) / _number(surviving > 0)
        if aggregation == "sequence_mean_token_mean":
            before, after = (jnp.maximum(x, 1).astype(jnp.float32) for x in own)
            return coefficients * (factor * (before / after)[:, None])
        return coefficients * factor

    return map_coefficients("shrink_denominator", scale, needs=())


def batch_mean(
    coefficients: jax.Array,
    mask: jax.Array,
    *,
    unit: Unit = "token",
    among: Among = "response",
    axis_name: str | None = None,
) -> jax.Array:
    """Returns f32[], the mean coefficient of the whole batch (see `normalise`); 0 if it is empty.

    `coefficients` f32[B, R] are 0 off `mask`. Same bits however the batch is split.
    """
    return _mean_of(*_row_totals(coefficients, mask, unit, among), axis_name)


def _row_totals(coefficients, mask, unit: Unit, among: Among) -> tuple[jax.Array, jax.Array]:
    """f32[B] and i32[B]: what each row adds to the mean's numerator and denominator."""
    counted = mask if among == "response" else mask & (coefficients != 0.0)
    sums, counts = compensated_sum(coefficients)[0], row_count(counted)
    if unit == "token":
        return sums, counts
    return sums / jnp.maximum(counts, 1).astype(jnp.float32), (counts > 0).astype(jnp.int32)


def _mean_of(sums: jax.Array, counts: jax.Array, axis_name: str | None) -> jax.Array:
    return compensated_sum(_gathered(sums, axis_name))[0] / _number(_gathered(counts, axis_name))


def _number(counts: jax.Array) -> jax.Array:
    """f32[], the sum of integers or truths, at least 1: exact in any order, and a safe divisor."""
    return jnp.maximum(jnp.sum(counts, dtype=jnp.int32), 1).astype(jnp.float32)


def _gathered(rows: jax.Array, axis_name: str | None) -> jax.Array:
    if axis_name is None:
        return rows
    return jax.lax.all_gather(rows, axis_name, tiled=True)
