"""Blocks that need a statistic of the whole batch: normalisation, and adaptive mixing.

The statistic must not depend on how the batch was split. So `update` has to be given the whole
batch: with micro-batches, compute the log-ratios of all of them first. Each row is then summed in a
fixed order, and the rows' sums in a fixed tree (`tim_jax.numerics.sums`). That gives the same bits
on one device, on arrays sharded over many under `jit`, and inside `shard_map`, if `axis_name` names
the mesh axis that the rows are split over: the rows' sums are then gathered before the tree. Counts
are integers.
"""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from tim_jax.common.errors import InputError, check_choice
from tim_jax.corrections import ratios
from tim_jax.corrections.base import (
    Block,
    Bounds,
    Correction,
    Transform,
    declared,
    known_number,
    map_coefficients,
    map_leaves,
    matching,
    plain_number,
    take_extra,
)
from tim_jax.corrections.blocks import checked_bounds
from tim_jax.corrections.ratios import Level
from tim_jax.numerics import masked, strict
from tim_jax.numerics.sums import compensated_sum, count, row_count

Unit = Literal["token", "sequence"]
Among = Literal["response", "survivors"]


def normalise(
    unit: Unit = "token", *, among: Among = "response", axis_name: str | None = None
) -> Correction:
    """Divides the coefficients by their mean over the batch, so that they average 1.

    - unit token: the mean over tokens; unit sequence: the mean over sequences of each one's mean
    - among response: over all response tokens, rejected ones counting as 0; among survivors: over
      tokens (sequences) with a coefficient that is not 0

    verl's `rollout_is_batch_normalize` is `scale_by_truncated_ratio, normalise`, then `reject`.
    Put it after the ratio in the chain; blocks after it do not count in the mean.
    A batch without survivors stays 0.
    """
    check_choice("unit", unit, get_args(Unit))
    check_choice("among", among, get_args(Among))

    def divisor(coefficients, mask):
        mean = batch_mean(coefficients, mask, unit=unit, among=among, axis_name=axis_name)
        return jnp.where(mean != 0.0, mean, 1.0)

    def divide(coefficients, mask):
        # XLA makes a product of a quotient by one number in some programs only; so one is written.
        return coefficients * strict.uncontracted(1.0 / divisor(coefficients, mask))

    made = map_coefficients("normalise", divide, needs=(), effect="scale", whole_batch=True)
    return declared(made, divisor=divisor)


class RunningMeanState(NamedTuple):
    """State of `normalise_by_running_mean`."""

    mean: jax.Array  # f32[] or f64[], over all arrays of coefficients together


def normalise_by_running_mean(
    unit: Unit = "token", *, decay: float = 0.99, axis_name: str | None = None
) -> Correction:
    """Divides by a running mean of the batches' means: `m <- m + (1 - decay) (mean - m)`, m_0 = 1.

    A batch is divided by the mean of the batches before it. `update` must still be given a whole
    batch at a time, or the state would change once for every part of it. A batch without tokens, or
    with a NaN, leaves the mean as it is.
    """
    check_choice("unit", unit, get_args(Unit))
    number = known_number(decay)
    if number is not None and not 0.0 <= number < 1.0:
        raise InputError(f"decay is {decay}; it must lie in [0, 1)")
    decay = plain_number(decay)

    def init(params):
        return RunningMeanState(jnp.ones((), strict.arithmetic_dtype(*jax.tree.leaves(params))))

    def update(updates, state, params=None, **extra):
        del params
        mask = take_extra(extra, "mask", "normalise_by_running_mean")
        safe = jnp.where(state.mean > 0.0, state.mean, 1.0)
        rows = []

        def divide(coefficients, mask):
            rows.append(_row_totals(coefficients, mask, unit, "response"))
            return coefficients / safe.astype(coefficients.dtype)

        divided = map_leaves(divide, updates, mask)
        if not rows:
            return divided, state
        sums, counts = (jnp.concatenate(parts) for parts in zip(*rows, strict=True))
        new = _mean_of(sums, counts, axis_name).astype(state.mean.dtype)
        part = 1.0 - matching(decay, new)
        mean = jax.lax.stop_gradient(state.mean + part * (new - state.mean))
        empty = jnp.sum(_gathered(counts, axis_name), dtype=jnp.int32) == 0
        return divided, RunningMeanState(jnp.where(empty | jnp.isnan(new), state.mean, mean))

    name = "normalise_by_running_mean"
    block = Block(name, Transform(init, update), effect="scale", whole_batch=True)
    return Correction((block,))


def mix_in_adaptively(
    level: Level = "token", *, upper: float, kl_scale: float = 0.01, axis_name: str | None = None
) -> Correction:
    """Multiplies by `1 + m (min(ratio, upper) - 1)`, with one m in [0, 1] for the whole batch.

    m = 0 leaves the gradient as it is, m = 1 is truncated importance sampling. m comes from three
    figures of the batch, after AIS (Zhou et al., arXiv 2605.13907):

    - reliability: the effective sample size of the truncated weights w over the number of tokens,
      `mean(w)^2 / mean(w^2)`
    - severity: `1 - exp(-K3 / kl_scale)`, K3 = mean(r - 1 - log r), nats a token
    - amplification: `v / (1 + v)`, v the weights' standard deviation over their mean

    and `m = reliability * max(severity, amplification)`: correct more where the policies differ
    more, and less where few tokens would carry the correction. The paper's abstract names the three
    figures and the mixture; how they are joined here is ours.
    """
    check_choice("level", level, get_args(Level))
    _, upper = checked_bounds(None, upper, what="the ratio")
    number = known_number(kl_scale)
    if number is not None and not number > 0.0:
        raise InputError(f"kl_scale is {kl_scale}; it must be above 0")
    kl_scale = plain_number(kl_scale)

    def mixed(coefficients, mask, log_ratio):
        def mean(values):
            return batch_mean(jnp.where(mask, values, 0.0), mask, axis_name=axis_name)

        ratio = jnp.broadcast_to(ratios.ratio(log_ratio, mask, level), mask.shape)
        weights = jnp.minimum(ratio, matching(upper, ratio))
        square, centre = mean(jnp.square(weights)), mean(weights)
        reliability = jnp.square(centre) / jnp.where(square > 0.0, square, 1.0)
        spread = jnp.sqrt(mean(jnp.square(weights - centre)))
        amplification = spread / jnp.where(spread + centre > 0.0, spread + centre, 1.0)
        divergence = mean(ratios.token_statistic("k3", log_ratio))
        severity = 1.0 - strict.exp(-divergence / matching(kl_scale, divergence))
        share = reliability * jnp.maximum(severity, amplification)
        return coefficients * (1.0 + strict.uncontracted(share * (weights - 1.0)))

    return map_coefficients(
        "mix_in_adaptively",
        mixed,
        needs=("log_ratio",),
        whole_batch=True,
        bounds=Bounds(level, None, upper),
    )


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
    [coefficients] = strict.widened(coefficients)
    return _mean_of(*_row_totals(coefficients, mask, unit, among), axis_name)


def _row_totals(coefficients, mask, unit: Unit, among: Among) -> tuple[jax.Array, jax.Array]:
    """f32[B] and i32[B]: what each row adds to the mean's numerator and denominator."""
    counted = mask if among == "response" else mask & (coefficients != 0.0)
    sums, counts = compensated_sum(coefficients)[0], row_count(counted)
    if unit == "token":
        return sums, counts
    means = masked.quotient(sums, jnp.maximum(counts, 1).astype(sums.dtype))
    return means, (counts > 0).astype(jnp.int32)


def _mean_of(sums: jax.Array, counts: jax.Array, axis_name: str | None) -> jax.Array:
    total = compensated_sum(_gathered(sums, axis_name))[0]
    return masked.quotient(total, count(_gathered(counts, axis_name), total.dtype))


def _gathered(rows: jax.Array, axis_name: str | None) -> jax.Array:
    if axis_name is None:
        return rows
    return jax.lax.all_gather(rows, axis_name, tiled=True)
