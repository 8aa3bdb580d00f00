"""The KV cache: how keys and values are written into it, and rounding to narrow formats.

The formats are 8-bit floats and integers, with or without a scale. Rounded values are those of the
format, but stay in the dtype they came in; no memory is saved. The 8-bit floats are not rounded by
casts, because XLA may drop a cast down and up again, and because a cast of a number that is too
large gives NaN where hardware saturates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels import formulas
from tim_jax.kernels.families import Into, Kernels
from tim_jax.kernels.pallas import PLATFORMS, gpu_call, parts_of, tpu_call
from tim_jax.numerics import GPU_FAMILIES, Numerics, strict

Pair = tuple[jax.Array, jax.Array]  # keys and values


@dataclass(frozen=True)
class _Float8:
    mantissa: int  # bits
    exponent: int  # of the smallest normal number
    largest: float


_FLOATS = {"float8_e4m3fn": _Float8(3, -6, 448.0), "float8_e5m2": _Float8(2, -14, 57344.0)}
_LARGEST = {"int8": 127.0, "int4": 7.0} | {name: f.largest for name, f in _FLOATS.items()}


def nearest(x: jax.Array, name: str) -> jax.Array:
    """The format's number nearest to each of x float32, ties to even, clipped to its range.

    Formats: "float8_e4m3fn", "float8_e5m2", "int8" (whole numbers to 127), "int4" (to 7), and the
    compute dtypes of `numerics`, which are not clipped.
    """
    if name not in _LARGEST:
        return formulas.narrowed(x, name)
    x = jnp.clip(x, -_LARGEST[name], _LARGEST[name])
    if name not in _FLOATS:
        return jnp.round(x)
    kind = _FLOATS[name]
    step = 2.0 ** (kind.exponent - kind.mantissa)
    below = jnp.round(x * (1.0 / step)) * step
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=kind.mantissa)
    return jnp.where(jnp.abs(x) < 2.0**kind.exponent, below, normal)


def scaled(
    x: jax.Array, name: str, *, largest: jax.Array, fence: Callable, full: bool = False
) -> jax.Array:
    """s * `nearest`(x / s), with the scale s that maps `largest` to the format's largest number.

    `largest` broadcasts to x, and has its rank. With `full`, whole numbers are from -128 (of int4
    from -8) on, and `largest` is half a step beyond the largest, 127.5.
    """
    most = _LARGEST[name] + 0.5 * full
    # What is smaller than any weight in use is 0: the inverse of its scale would be infinite.
    scale = fence(jnp.where(largest > 1e-30, largest, 1.0) * (1.0 / most))
    inverse = fence(1.0 / scale)
    wide = fence(x * jnp.broadcast_to(inverse, x.shape))
    quantised = jnp.clip(jnp.round(wide), -most - 0.5, most - 0.5) if full else nearest(wide, name)
    return fence(quantised) * jnp.broadcast_to(scale, x.shape)


def cached(x: jax.Array, *, numerics: Numerics, ops: Kernels) -> jax.Array:
    """Keys or values [..., D] as they are read back from the cache, in the dtype they went in.

    x itself, and no operation, where the cache has the compute dtype. The gradient is that of the
    identity (straight-through).
    """
    precision = numerics.precision
    if precision.cache in (None, numerics.compute_dtype):
        return x
    return _straight_through(x, precision.cache, by_token=precision.cache_scale == "token", ops=ops)


def operand(x: jax.Array, name: str | None, *, ops: Kernels) -> jax.Array:
    """Rows [N, K] as a quantised matrix is multiplied by them, with a scale per row.

    x itself, and no operation, for the name None. The gradient is that of the identity.
    """
    return x if name is None else _straight_through(x, name, by_token=True, ops=ops)


def _straight_through(x: jax.Array, name: str, *, by_token: bool, ops: Kernels) -> jax.Array:
    rounded = partial(_rounded, name=name, by_token=by_token, ops=ops)
    call = jax.custom_vjp(rounded)
    call.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))
    return call(x)


def _rounded(x, *, name, by_token, ops):
    fence = ops.fence
    wide = fence(x).astype(jnp.float32)
    if by_token and name in _LARGEST:  # no compute dtype has a scale
        largest = fence(ops.peak(jnp.abs(wide)))[..., None]
        wide = scaled(wide, name, largest=largest, fence=fence)
    else:
        wide = nearest(wide, name)
    return fence(strict.rounded(wide, x.dtype))


def write(
    caches: Pair,
    rows: Pair,
    positions: jax.Array,
    *,
    numerics: Numerics,
    pages: jax.Array | None = None,
) -> Pair:
    """The keys and the values with `rows` in them, each at its own position.

    Args:
      caches: keys [B, Kv, D, S] and values [B, Kv, S, E]; in blocks, [B, n, Kv, D, block] and
        [B, n, Kv, block, E]; with pages, [pages, Kv, D, block] and [pages, Kv, block, E].
      rows: [B, T, Kv, D] and [B, T, Kv, E].
      positions: i32[B, T], inside the cache and different from each other within a sequence.
      pages: i32[B, S / block], where each row's blocks of positions lie.
    """
    block = caches[0].shape[-1]
    sequences = jnp.broadcast_to(jnp.arange(positions.shape[0])[:, None], positions.shape)
    first: tuple[jax.Array, ...] = (sequences,)
    if pages is not None:
        first = (jnp.take_along_axis(pages, positions // block, axis=1),)
    elif caches[0].ndim == 5:
        first = (sequences, positions // block)
    if pages is not None or caches[0].ndim == 5:
        positions = positions % block
    if numerics.cache_write == "kernel" and numerics.family in PLATFORMS:
        return _by_kernel(caches, rows, first[0], positions, numerics=numerics)
    method = _by_rows if numerics.cache_write == "rows" else _by_scatter
    every = slice(None)
    key = method(caches[0], rows[0], (*first, every, every, positions))
    return key, method(caches[1], rows[1], (*first, every, positions, every))


def into(caches: Pair, positions: jax.Array, *, pages: jax.Array | None) -> Into:
    """Where `write` puts rows, for a kernel that makes the rows and writes them.

    The arguments are those of `write`, with caches that are not in blocks.
    """
    block = caches[0].shape[-1]
    if pages is None:
        return Into(caches, None, positions.reshape(-1))
    of_rows = jnp.take_along_axis(pages, positions // block, axis=1)
    return Into(caches, of_rows.reshape(-1), (positions % block).reshape(-1))


def in_blocks(numerics: Numerics) -> bool:
    """Whether attention reads keys and values in blocks, one product each.

    A cache that lies so is read as it is; otherwise every block would be copied out of it.
    """
    whole = numerics.whole_kv or numerics.attention != "family" or numerics.order.split_kv
    return numerics.family == "tiles" and not whole


def gathered(
    key: jax.Array, value: jax.Array, pages: jax.Array, *, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of rows from their pages: [B, Kv, D, S] and [B, Kv, S, E], or in blocks."""
    if in_blocks(numerics):
        return key[pages], value[pages]
    keys = jnp.moveaxis(key[pages], 1, 3)
    values = jnp.moveaxis(value[pages], 1, 2)
    batch, heads, size = keys.shape[:3]
    values = values.reshape(batch, heads, -1, value.shape[3])
    return keys.reshape(batch, heads, size, -1), values


def _by_scatter(cache, rows, places):
    # With pages, rows without a sequence may all write to one place, where any of them may win.
    return cache.at[places].set(rows, mode="promise_in_bounds")


def _by_rows(cache, rows, places):
    """A write per row, in a loop: XLA:CPU would copy the cache for a scatter in a large program."""
    axes = [axis for axis, place in enumerate(places) if not isinstance(place, slice)]
    at = [places[axis].reshape(-1) for axis in axes]
    rows = jnp.expand_dims(rows.reshape(-1, *rows.shape[2:]), axes[1:])

    def one(index, cache):
        start = [0] * cache.ndim
        for axis, numbers in zip(axes, at, strict=True):
            start[axis] = numbers[index]
        row = jax.lax.dynamic_slice_in_dim(rows, index, 1)
        return jax.lax.dynamic_update_slice(cache, row, start)

    return jax.lax.fori_loop(0, rows.shape[0], one, cache, unroll=4)


# Writes in place, as a kernel for GPUs and one for TPUs. On a TPU, XLA's scatter wants positions of
# a cache apart in memory, and attention's kernel wants them side by side, so that every step of
# decoding would copy the whole cache to the other layout. The kernel reads the block around each
# position, replaces the position, and writes the block back. On a GPU a scatter of keys and one of
# values are several small kernels in every layer of a step; this is one, that writes the numbers of
# each position and reads none. There rows that a projection makes need none at all, see `into`.

# Positions of a block on a TPU, by the axis of the positions: a tile of the memory.
_POSITIONS = {3: 128, 2: 16}


def _by_kernel(
    caches: Pair, rows: Pair, first: jax.Array, positions: jax.Array, *, numerics: Numerics
) -> Pair:
    """`write` at these positions i32[B, T] of the pages `first` i32[B, T], by a Pallas family.

    Rows of a block follow each other.
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
