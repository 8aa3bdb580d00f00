"""Sums whose bits depend on the values alone: not on the split, the sharding or the padding.

A plain `jnp.sum` adds in an order that the compiler picks per shape, fusion and device count.
Here neighbours are added in pairs, then the pair sums in pairs, and so on: elementwise code, whose
order no compiler changes. Because the pairs start at index 0 and missing partners are zeros, zeros
appended to the axis change nothing either.

The input is clipped to the finite range. For finite values that is the identity, but it keeps a
product that feeds the sum from being contracted into a fused multiply-add (see `strict`), and an
infinity from becoming NaN in the two-sum.

Each sum is one compiled program where it is called outside of one, instead of some fifty; within
one its operations are written out, as if it were not jitted.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tim_jax.numerics import strict


@partial(jax.jit, static_argnames="axis", inline=True)
def tree_sum(values: jax.Array, axis: int = -1) -> jax.Array:
    """Returns the sum of a float array over `axis`, in one fixed order. Differentiable."""
    values = _finite(jnp.moveaxis(values, axis, -1))
    while values.shape[-1] > 1:
        left, right = _pairs(values)
        values = left + right
    return values[..., 0]


@partial(jax.jit, static_argnames="axis", inline=True)
def compensated_sum(values: jax.Array, axis: int = -1) -> tuple[jax.Array, jax.Array]:
    """Returns `(high, low)`, the sum over `axis` as an unevaluated pair of floats.

    The same tree with Knuth's exact two-sum at every node: `high` is the correctly rounded sum in
    all but contrived cases, and `low` what it lacks. Same bits for any split, as for `tree_sum`.
    """
    high = _finite(jnp.moveaxis(values, axis, -1))
    low = jnp.zeros_like(high)
    while high.shape[-1] > 1:
        (a, b), (low_a, low_b) = _pairs(high), _pairs(low)
        high, error = two_sum(a, b)
        low = (low_a + low_b) + error
    return two_sum(high[..., 0], low[..., 0])


def running_sum(values: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Returns f32[..., R], the sums of the last axis up to each place, itself included.

    With `reverse`, from each place on. In log2(R) rounds of doubling: the order of additions at a
    place depends on how far it reaches only, so zeros appended to the axis change no bit.
    """
    before = jax.typeof(values).sharding
    values, reach = strict.uncontracted(_gathered(values)), 1
    while reach < values.shape[-1]:
        pad = [(0, 0)] * (values.ndim - 1) + [(0, reach) if reverse else (reach, 0)]
        moved = values[..., reach:] if reverse else values[..., :-reach]
        values = values + jnp.pad(moved, pad)
        reach *= 2
    return _placed_as(before, values)


def run_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns f32[..., R], at each place the sum over the unbroken run of True that it lies in.

    0 where the mask is False. In rounds of doubling, as `running_sum`.
    """
    before = jax.typeof(values).sharding
    values, mask = _gathered(values), _gathered(mask)
    beyond = [(0, 0)] * (mask.ndim - 1)
    starts = mask & ~jnp.pad(mask[..., :-1], [*beyond, (1, 0)])
    ends = mask & ~jnp.pad(mask[..., 1:], [*beyond, (0, 1)])
    zero = jnp.zeros((), values.dtype)
    total = _segment_sum(jnp.where(mask, values, zero), starts | ~mask)
    # The last of a run has its sum, which the others are given from behind.
    last = jnp.where(ends, total, zero)
    sums = _segment_sum(last[..., ::-1], (ends | ~mask)[..., ::-1])[..., ::-1]
    return _placed_as(before, sums)


def _placed_as(before: Any, values: jax.Array) -> jax.Array:
    """The array with the sharding that its type had before."""
    same = all(axis is None for axis in before.spec)
    return values if same else jax.sharding.reshard(values, before)


def _segment_sum(values: jax.Array, starts: jax.Array) -> jax.Array:
    """The sums of the last axis up to each place, from the last start on."""
    values, reach = strict.uncontracted(values), 1
    while reach < values.shape[-1]:
        pad = [(0, 0)] * (values.ndim - 1) + [(reach, 0)]
        moved = jnp.pad(values[..., :-reach], pad)
        values = values + jnp.where(starts, jnp.zeros((), values.dtype), moved)
        starts = starts | jnp.pad(starts[..., :-reach], pad, constant_values=True)
        reach *= 2
    return values


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `(s, e)` with `s = fl(a + b)` and `s + e = a + b` exactly (Knuth, TAOCP 2, 4.2.2)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def row_count(mask: jax.Array) -> jax.Array:
    """Returns i32[B], the number of True places in each row. Integers, so exact in any order."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32)


def count(mask: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Returns f32[], or of `dtype`, the number of True places, at least 1: a safe divisor.

    Of integers, their sum.
    """
    return jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1).astype(dtype)


def whole(values: jax.Array) -> jax.Array:
    """Returns the array unsharded where its sharding is part of the type, else as it is.

    Explicit meshes need this before an operation without a sharded form, such as a sort over all
    elements. On other meshes the compiler places the data.
    """
    sharding = jax.typeof(values).sharding
    if all(axis is None for axis in sharding.spec):
        return values
    return jax.sharding.reshard(values, NamedSharding(sharding.mesh, PartitionSpec()))


def _finite(values: jax.Array) -> jax.Array:
    if values.shape[-1] == 0:
        return jnp.zeros((*values.shape[:-1], 1), values.dtype)
    limit = float(jnp.finfo(values.dtype).max)
    return jnp.clip(_gathered(values), -limit, limit)


def _gathered(values: jax.Array) -> jax.Array:
    """Brings the last axis together where its sharding is part of the type (explicit meshes)."""
    sharding = jax.typeof(values).sharding
    if len(sharding.spec) < values.ndim or sharding.spec[-1] is None:
        return values
    together = PartitionSpec(*sharding.spec[:-1], None)
    return jax.sharding.reshard(values, NamedSharding(sharding.mesh, together))


def _pairs(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    if values.shape[-1] % 2:
        values = jnp.concatenate([values, jnp.zeros_like(values[..., :1])], axis=-1)
    pairs = values.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
    return pairs[..., 0], pairs[..., 1]
