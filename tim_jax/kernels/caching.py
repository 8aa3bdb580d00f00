"""How keys and values get into the KV cache, and what a cache of a narrower dtype does to them."""

from functools import partial

import jax
import jax.numpy as jnp

from tim_jax.kernels import formats, formulas
from tim_jax.kernels.interface import Kernels
from tim_jax.numerics import Numerics


def cached(x: jax.Array, *, numerics: Numerics, ops: Kernels) -> jax.Array:
    """Keys or values [..., D] as they come back out of the cache, in the dtype they went in.

    x itself, and no operation, where the cache has the compute dtype. Straight-through: the
    gradient is that of the identity.
    """
    if numerics.precision.cache in (None, numerics.compute_dtype):
        return x
    call = jax.custom_vjp(partial(_rounded, numerics=numerics, ops=ops))
    call.defvjp(lambda x: (_rounded(x, numerics=numerics, ops=ops), None), lambda _, g: (g,))
    return call(x)


def _rounded(x, *, numerics, ops):
    name, fence = numerics.precision.cache, ops.fence
    wide = fence(x).astype(jnp.float32)
    if numerics.precision.cache_scale == "token" and formats.is_scaled(name):
        largest = fence(ops.peak(jnp.abs(wide)))[..., None]
        wide = formats.scaled(wide, name, largest=largest, fence=fence)
    else:
        wide = formats.nearest(wide, name)
    return fence(formulas.rounded(wide, x.dtype))


def write(
    cache: jax.Array, rows: jax.Array, positions: jax.Array, *, axis: int, numerics: Numerics
) -> jax.Array:
    """The cache with `rows` in it, each at its own position.

    Args:
      cache: keys [B, Kv, D, S] or values [B, Kv, S, D].
      rows: [B, T, Kv, D].
      positions: i32[B, T], inside the cache and different from each other within a sequence.
      axis: that of the positions, 3 or 2.
    """
    how = _by_scatter if numerics.cache_write == "scatter" else _by_rows
    return how(cache, rows, positions, axis)


def _by_scatter(cache, rows, positions, axis):
    places = [jnp.arange(cache.shape[0])[:, None], slice(None), slice(None), slice(None)]
    places[axis] = positions
    at = cache.at[tuple(places)]
    return at.set(rows, unique_indices=True, mode="promise_in_bounds")


def _by_rows(cache, rows, positions, axis):
    """A write per row, in a loop: what XLA:CPU makes of one scatter in a large program copies the
    cache."""
    batch, length = positions.shape
    rows = jnp.expand_dims(rows.reshape(batch * length, *rows.shape[2:]), axis)
    at = positions.reshape(-1)

    def one(index, cache):
        start = [index // length, 0, 0, 0]
        start[axis] = at[index]
        row = jax.lax.dynamic_slice_in_dim(rows, index, 1)
        return jax.lax.dynamic_update_slice(cache, row, start)

    return jax.lax.fori_loop(0, batch * length, one, cache, unroll=4)
