"""Writes into the KV cache in place, as a kernel for TPUs.

XLA's scatter wants the positions of a cache to lie apart in memory, and attention's kernel wants
them beside each other: with a scatter every step of decoding would copy the whole cache to the
other layout. This kernel reads the block around each position, replaces the position, and writes
the block back.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels.pallas_calls import tpu_call
from tim_jax.numerics import Numerics

_POSITIONS = {3: 128, 2: 16}  # of a block, by the axis of the positions: a tile of the memory


def write(
    cache: jax.Array,
    rows: jax.Array,
    first: jax.Array,
    positions: jax.Array,
    axis: int,
    *,
    numerics: Numerics,
) -> jax.Array:
    """The cache with `rows` in it.

    Args:
      cache: [pages, Kv, D, S] with axis 3, or [pages, Kv, S, E] with axis 2.
      rows: [B, T, Kv, D] or [B, T, Kv, E].
      first: i32[B, T], the page of each row.
      positions: i32[B, T], its position in the page. Rows of a block follow each other.
      axis: that of the positions.
    """
    size = min(_POSITIONS[axis], cache.shape[axis])
    shape = [1, *cache.shape[1:]]
    shape[axis] = size
    first, positions = first.reshape(-1), positions.reshape(-1)
    rows = rows.reshape(-1, *rows.shape[2:])

    def block_at(index, first, positions):
        place = [first[index], 0, 0, 0]
        place[axis] = positions[index] // size
        return tuple(place)

    block = pl.BlockSpec(tuple(shape), block_at)
    return tpu_call(
        partial(_write, axis=axis, size=size),
        numerics=numerics,
        name="cache_write",
        grid=(rows.shape[0],),
        scalars=2,
        ordered=1,
        in_specs=[pl.BlockSpec((1, *rows.shape[1:]), lambda index, *_: (index, 0, 0)), block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={3: 0},
    )(first, positions, rows, cache)


def _write(first_ref, positions_ref, row_ref, cache_ref, out_ref, *, axis: int, size: int):
    index = pl.program_id(0)
    before = jnp.maximum(index - 1, 0)
    position, last = positions_ref[index], positions_ref[before]
    same = (first_ref[index] == first_ref[before]) & (position // size == last // size)

    @pl.when((index == 0) | ~same)
    def _start():
        out_ref[...] = cache_ref[...]

    shape = out_ref.shape
    here = jax.lax.broadcasted_iota(jnp.int32, shape, axis) == position % size
    # Not every TPU turns rows of 2-byte numbers; through float32 no bit of them changes.
    row = jnp.expand_dims(row_ref[...].astype(jnp.float32), axis).astype(out_ref.dtype)
    out_ref[...] = jnp.where(here, jnp.broadcast_to(row, shape), out_ref[...])
