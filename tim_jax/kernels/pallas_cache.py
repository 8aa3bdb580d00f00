"""Writes into the KV cache in place, as a kernel for GPUs and one for TPUs.

On a TPU, XLA's scatter wants the positions of a cache to lie apart in memory, and attention's
kernel wants them beside each other: with a scatter every step of decoding would copy the whole
cache to the other layout. The kernel reads the block around each position, replaces the position,
and writes the block back. On a GPU a scatter of keys and one of values are several small kernels in
every layer of a step; this is one, that writes the numbers of each position and reads none.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels.pallas import parts_of
from tim_jax.kernels.pallas_calls import gpu_call, tpu_call
from tim_jax.numerics import GPU_FAMILIES, Numerics

# Positions of a block on a TPU, by the axis of the positions: a tile of the memory.
_POSITIONS = {3: 128, 2: 16}

Pair = tuple[jax.Array, jax.Array]


def write(
    caches: Pair, rows: Pair, first: jax.Array, positions: jax.Array, *, numerics: Numerics
) -> Pair:
    """Keys [pages, Kv, D, S] and values [pages, Kv, S, E] with `rows` in them.

    Args:
      caches: keys and values.
      rows: [B, T, Kv, D] and [B, T, Kv, E].
      first: i32[B, T], the page of each row.
      positions: i32[B, T], its position in the page. Rows of a block follow each other.
      numerics: of a Pallas family.
    """
    first, positions = first.reshape(-1), positions.reshape(-1)
    key_rows, value_rows = (x.reshape(-1, *x.shape[2:]) for x in rows)
    call = _on_gpu if numerics.family in GPU_FAMILIES else _on_tpu
    key, value = call(caches, (key_rows, value_rows), numerics=numerics)(
        first, positions, key_rows, value_rows, *caches
    )
    return key, value


def _on_gpu(caches: Pair, rows: Pair, *, numerics: Numerics):
    one = pl.BlockSpec((None,), lambda i, h: (i,))
    of_rows = [pl.BlockSpec((None, None, x.shape[2]), lambda i, h: (i, h, 0)) for x in rows]
    of_heads = [
        pl.BlockSpec((x.shape[0], None, *x.shape[2:]), lambda i, h: (0, h, 0, 0)) for x in caches
    ]
    written = sum(x[0].nbytes for x in rows)
    return gpu_call(
        _write_rows,
        numerics=numerics,
        name="cache_write",
        warps=1,
        grid=rows[0].shape[:2],
        in_specs=[one, one, *of_rows, *of_heads],
        out_specs=of_heads,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
        input_output_aliases={4: 0, 5: 1},
        cost_estimate=pl.CostEstimate(  # of the caches, a program writes one position
            flops=0, transcendentals=0, bytes_accessed=2 * rows[0].shape[0] * written
        ),
    )


def _write_rows(first_ref, position_ref, key_row, value_row, _key, _value, key_ref, value_ref):
    page, at = first_ref[...], position_ref[...]
    for part in parts_of(key_row.shape[0]):
        key_ref[page, part, at] = key_row[part]
    for part in parts_of(value_row.shape[0]):
        value_ref[page, at, part] = value_row[part]


def _on_tpu(caches: Pair, rows: Pair, *, numerics: Numerics):
    def block_of(cache: jax.Array, axis: int) -> pl.BlockSpec:
        shape = [1, *cache.shape[1:]]
        shape[axis] = size = min(_POSITIONS[axis], cache.shape[axis])

        def at(index, first, positions):
            place = [first[index], 0, 0, 0]
            place[axis] = positions[index] // size
            return tuple(place)

        return pl.BlockSpec(tuple(shape), at)

    blocks = [block_of(cache, axis) for cache, axis in zip(caches, (3, 2), strict=True)]
    return tpu_call(
        _write_blocks,
        numerics=numerics,
        name="cache_write",
        grid=(rows[0].shape[0],),
        scalars=2,
        ordered=1,
        in_specs=[
            *(pl.BlockSpec((1, *x.shape[1:]), lambda index, *_: (index, 0, 0)) for x in rows),
            *blocks,
        ],
        out_specs=blocks,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
        input_output_aliases={4: 0, 5: 1},
    )


def _write_blocks(first_ref, positions_ref, key_row, value_row, *refs):
    index = pl.program_id(0)
    before = jnp.maximum(index - 1, 0)
    position, last = positions_ref[index], positions_ref[before]
    same_page = first_ref[index] == first_ref[before]
    caches, outs = refs[:2], refs[2:]
    for row_ref, cache_ref, out_ref, axis in zip(
        (key_row, value_row), caches, outs, (3, 2), strict=True
    ):
        size = out_ref.shape[axis]
        same = same_page & (position // size == last // size)
        pl.when((index == 0) | ~same)(partial(_copy, cache_ref, out_ref))
        shape = out_ref.shape
        here = jax.lax.broadcasted_iota(jnp.int32, shape, axis) == position % size
        # Not every TPU turns rows of 2-byte numbers; through float32 no bit of them changes.
        row = jnp.expand_dims(row_ref[...].astype(jnp.float32), axis).astype(out_ref.dtype)
        out_ref[...] = jnp.where(here, jnp.broadcast_to(row, shape), out_ref[...])


def _copy(cache_ref, out_ref):
    out_ref[...] = cache_ref[...]
