"""The gradient of causal attention, as kernels for GPUs and TPUs.

The equations are those of FlashAttention-2 (Dao 2023, section 3.1.2). For a row with the scores
s_j, the weights p_j = exp(s_j - log sum_i exp(s_i)), the output o = sum_j p_j v_j and the cotangent
do of that:

    dv_j = p_j do,    ds_j = p_j (do . v_j - do . o),    dq = sum_j ds_j k_j,    dk_j = ds_j q

Two kernels, and no sum that is shared among programs, so that a gradient repeats to the bit:

- by rows: a tile of rows runs over the key blocks that it sees, for dq. On a GPU it is given the
  logarithm of the normaliser, which attention's kernel writes beside its output, in decoding too.
  On a TPU it runs over the blocks twice, first for that logarithm.
- by keys: a block of keys runs over the tiles of rows that see it, ascending, for dk and dv.

Products have the compute dtype's operands and float32 sums, as those of the forward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels import native
from tim_jax.kernels.pallas import (
    LOG2_E,
    attention_cost,
    gpu_call,
    padded,
    parts_of,
    power_of_two_in,
    tpu_call,
)
from tim_jax.kernels.pallas_attention import LANES, seen, visible
from tim_jax.numerics import Numerics

BY_ROWS, BY_KEYS = "attention_gradient_rows", "attention_gradient_keys"


class Arrays(NamedTuple):
    """What `kernels.attention` was given, what its kernel returned, and the output's cotangent."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    positions: jax.Array
    window: jax.Array | None
    out: jax.Array
    normaliser: jax.Array | None  # see `Inputs`
    cotangent: jax.Array


class Sizes(NamedTuple):
    """Of a call."""

    batch: int
    heads: int
    rows: int  # of a tile
    keys: int  # of a block
    size: int  # of a query and a key
    width: int  # of a value
    tiles: int
    blocks: int

    def of_tiles(self, rows: int, keys: int) -> "Sizes":
        """Those of as many rows and keys in other tiles and blocks, which divide them."""
        tiles, blocks = self.tiles * self.rows // rows, self.blocks * self.keys // keys
        return self._replace(rows=rows, keys=keys, tiles=tiles, blocks=blocks)


class Inputs(NamedTuple):
    """In whole tiles and blocks. `first` is None where there is no window."""

    query: jax.Array  # [B, Kv, N, D]
    cotangent: jax.Array  # [B, Kv, N, E], in the compute dtype
    out: jax.Array  # [B, Kv, N, E], what attention returned
    key: jax.Array  # [B, Kv, D, S]
    value: jax.Array  # [B, Kv, S, E]
    normaliser: jax.Array | None  # log2 of the sum of the weights, float32 [B, Kv, N]; on a GPU
    last: jax.Array  # i32[B, N]
    first: jax.Array | None


def gradients(by_rows: Callable, by_keys: Callable, arrays: Arrays, *, rows: int, keys: int):
    """Gradients of query, key and value in their dtypes, of a device's two kernels.

    Args:
      by_rows: inputs, sizes -> the gradient of the query, and what it finds for `by_keys`.
      by_keys: inputs, sizes, that -> the gradients of key and value.
      arrays: see `Arrays`.
      rows: of a tile.
      keys: of a block.
    """
    inputs, sizes = _filled(arrays, rows=rows, keys=keys)
    dquery, of_rows = by_rows(inputs, sizes)
    dkey, dvalue = by_keys(inputs, sizes, of_rows)
    count, length = arrays.query.shape[2], arrays.key.shape[3]
    return dquery[:, :, :count], dkey[..., :length], dvalue[:, :, :length]


def _filled(arrays: Arrays, *, rows: int, keys: int) -> tuple[Inputs, Sizes]:
    query, key, value, positions, window, out, normaliser, cotangent = arrays
    batch, heads, _, size = query.shape
    last, first = seen(positions, window, rows)
    inputs = Inputs(
        query=padded(query, rows, axis=2),
        cotangent=padded(cotangent.astype(query.dtype), rows, axis=2),
        out=padded(out.astype(query.dtype), rows, axis=2),
        key=padded(key, keys, axis=3),
        value=padded(value, keys, axis=2),
        normaliser=None if normaliser is None else padded(normaliser, rows, axis=2),
        last=last,
        first=first,
    )
    counts = inputs.query.shape[2] // rows, inputs.key.shape[3] // keys
    sizes = Sizes(batch, heads, rows, keys, size, value.shape[3], *counts)
    return inputs, sizes


def tiles_that_see(inputs: Inputs, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """The first tile of rows that sees each block of keys, and the one after the last.

    Each i32[B, blocks]. A block that no tile sees has the last tile, and none.
    """

    def of_tiles(rows):
        return rows.reshape(sizes.batch, 1, sizes.tiles, sizes.rows)

    start = (jnp.arange(sizes.blocks, dtype=jnp.int32) * sizes.keys)[None, :, None]
    sees = jnp.max(of_tiles(inputs.last), axis=3) >= start
    if inputs.first is not None:
        sees &= jnp.min(of_tiles(inputs.first), axis=3) < start + sizes.keys
    tile = jnp.arange(sizes.tiles, dtype=jnp.int32)
    first = jnp.min(jnp.where(sees, tile, sizes.tiles - 1), axis=2)
    return first, jnp.max(jnp.where(sees, tile + 1, 0), axis=2)


def dot_along(x: jax.Array, y: jax.Array, axes: tuple[int, int], precise: dict[str, Any]):
    """Sums over axis axes[0] of x and axes[1] of y, float32."""
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(x, y, numbers, **precise)


def row_products(cotangent: jax.Array, out: jax.Array) -> jax.Array:
    """cotangent . output of each row [rows, E], float32 [rows, 1]."""
    terms = cotangent.astype(jnp.float32) * out.astype(jnp.float32)
    return jnp.sum(terms, axis=1, keepdims=True)


def dots_along(xs: list[jax.Array], ys: list[jax.Array], axes: tuple[int, int], precise):
    """The `dot_along` of what comes in parts."""
    first, *others = (dot_along(x, y, axes, precise) for x, y in zip(xs, ys, strict=True))
    return sum(others, first)


_PART = 128  # numbers of a head that a GPU's program multiplies at a time


def on_gpu(*arrays: Any, numerics: Numerics):
    """Gradients of query, key and value in their dtypes, of what `Arrays` has.

    A program has `gradient_own` rows or keys, whose sums stay in registers, and takes
    `gradient_step` of the others at a time. Those with the most work come first, so that what ends
    last is short.
    """
    tiles = numerics.gpu
    own, step = tiles.gradient_own, tiles.gradient_step
    options = {"numerics": numerics, "warps": tiles.gradient_warps, "stages": tiles.gradient_stages}
    most = max(own, step)
    return gradients(
        partial(_gpu_by_rows, tile=(own, step), options=options),
        partial(_gpu_by_keys, tile=(step, own), options=options),
        Arrays(*arrays),
        rows=most,
        keys=most,
    )


def _gpu_by_rows(inputs: Inputs, sizes: Sizes, tile: tuple[int, int], options: dict[str, Any]):
    sizes = sizes.of_tiles(*tile)
    rows, size, width, tiles = sizes.rows, sizes.size, sizes.width, sizes.tiles

    def of_rows(*columns: int) -> pl.BlockSpec:
        """The last tile of rows first, which sees the most keys."""
        nothing = (0,) * len(columns)
        return pl.BlockSpec(
            (None, None, rows, *columns), lambda h, i, b: (b, h, tiles - 1 - i, *nothing)
        )

    seen_by = pl.BlockSpec((None, rows), lambda h, i, b: (b, tiles - 1 - i))
    whole = [
        pl.BlockSpec((None, None, *x.shape[2:]), lambda h, i, b: (b, h, 0, 0))
        for x in (inputs.key, inputs.value)
    ]
    given = [x for x in inputs if x is not None]
    length, moved = sizes.blocks * sizes.keys, rows * (2 * size + 2 * width)
    cost = attention_cost(
        multiplied=rows * length * (2 * size + width),
        loaded=(moved + length * (size + width)) * inputs.key.dtype.itemsize,
        exponentials=rows * length,
        programs=tiles * sizes.heads * sizes.batch,
    )
    return gpu_call(
        partial(_gpu_rows, keys=sizes.keys, windowed=inputs.first is not None),
        name=BY_ROWS,
        cost_estimate=cost,
        grid=(sizes.heads, tiles, sizes.batch),
        in_specs=[
            *(of_rows(size), of_rows(width), of_rows(width), *whole, of_rows()),
            *(seen_by,) * (len(given) - 6),
        ],
        out_specs=(of_rows(size), of_rows()),
        out_shape=(
            jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype),
            jax.ShapeDtypeStruct(inputs.query.shape[:3], jnp.float32),
        ),
        **options,
    )(*given)


def _gpu_rows(*refs, keys: int, windowed: bool):
    query_ref, cotangent_ref, attended_ref, key_ref, value_ref, normaliser_ref, *refs = refs
    last, first = refs[0][...], refs[1][...] if windowed else None
    dquery_ref, product_ref = refs[-2:]
    rows, size = query_ref.shape
    parts, value_parts = parts_of(size, _PART), parts_of(cotangent_ref.shape[1], _PART)
    query = [query_ref[:, part] for part in parts]
    cotangent = [cotangent_ref[:, part] for part in value_parts]
    precise, normaliser = native.precise(query[0]), normaliser_ref[...][:, None]
    products = [
        row_products(part, attended_ref[:, at])
        for part, at in zip(cotangent, value_parts, strict=True)
    ]
    product = sum(products[1:], products[0])
    product_ref[...] = product[:, 0]
    begin = 0 if first is None else jax.lax.div(jnp.maximum(jnp.min(first), 0), keys)
    end = jax.lax.div(jnp.max(last) + keys, keys)
    columns = None if first is None else first[:, None]

    def step(index, sums):
        at = pl.ds(index * keys, keys)
        key = [key_ref[part, at] for part in parts]
        scores = dots_along(query, key, (1, 0), precise) * LOG2_E
        seen_keys = visible(index, keys, last[:, None], columns)
        weights = jnp.where(seen_keys, jnp.exp2(scores - normaliser), 0.0)
        value = [value_ref[at, part] for part in value_parts]
        dweights = dots_along(cotangent, value, (1, 1), precise)
        dscores = (weights * (dweights - product)).astype(dquery_ref.dtype)
        return [
            total + dot_along(dscores, part, (1, 1), precise)
            for total, part in zip(sums, key, strict=True)
        ]

    zeros = [jnp.zeros((rows, part.stop - part.start), jnp.float32) for part in parts]
    for part, total in zip(parts, jax.lax.fori_loop(begin, end, step, zeros), strict=True):
        dquery_ref[:, part] = total.astype(dquery_ref.dtype)


def _gpu_by_keys(
    inputs: Inputs, sizes: Sizes, product: jax.Array, tile: tuple[int, int], options: dict[str, Any]
):
    sizes = sizes.of_tiles(*tile)
    keys, size, width = sizes.keys, sizes.size, sizes.width
    key = pl.BlockSpec((None, None, size, keys), lambda h, j, b: (b, h, 0, j))
    value = pl.BlockSpec((None, None, keys, width), lambda h, j, b: (b, h, j, 0))
    query, cotangent = (
        pl.BlockSpec((None, None, *x.shape[2:]), lambda h, j, b: (b, h, 0, 0))
        for x in (inputs.query, inputs.cotangent)
    )
    number = pl.BlockSpec((None, None, inputs.query.shape[2]), lambda h, j, b: (b, h, 0))
    seen_by = pl.BlockSpec((None, inputs.query.shape[2]), lambda h, j, b: (b, 0))
    one = pl.BlockSpec((None, None), lambda h, j, b: (b, j))
    given = [x for x in inputs._replace(out=None) if x is not None]
    count = sizes.tiles * sizes.rows
    cost = attention_cost(
        multiplied=keys * count * 2 * (size + width),
        loaded=(count + 2 * keys) * (size + width) * inputs.key.dtype.itemsize,
        exponentials=keys * count,
        programs=sizes.blocks * sizes.heads * sizes.batch,
    )
    return gpu_call(
        partial(_gpu_keys, rows=sizes.rows, windowed=inputs.first is not None),
        name=BY_KEYS,
        cost_estimate=cost,
        grid=(sizes.heads, sizes.blocks, sizes.batch),
        in_specs=[
            *(query, cotangent, key, value, number),
            *(seen_by,) * (len(given) - 5),
            *(number, one, one),
        ],
        out_specs=(key, value),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[2:4]),
        **options,
    )(*given, product, *tiles_that_see(inputs, sizes))


def _gpu_keys(*refs, rows: int, windowed: bool):
    """Weights and their gradients are [keys, rows] here, so that the sums take them as they are."""
    query_ref, cotangent_ref, key_ref, value_ref, normaliser_ref, last_ref, *refs = refs
    product_ref, begin_ref, end_ref, dkey_ref, dvalue_ref = refs[-5:]
    size, keys = key_ref.shape
    parts, value_parts = parts_of(size, _PART), parts_of(value_ref.shape[1], _PART)
    key = [key_ref[part, :] for part in parts]
    value = [value_ref[:, part] for part in value_parts]
    precise, dtype = native.precise(value[0]), value_ref.dtype
    own = pl.program_id(1) * keys + jax.lax.broadcasted_iota(jnp.int32, (keys, rows), 0)

    def step(tile, sums):
        at = pl.ds(tile * rows, rows)
        query = [query_ref[at, part] for part in parts]
        cotangent = [cotangent_ref[at, part] for part in value_parts]
        seen_keys = own <= last_ref[at][None, :]
        if windowed:
            seen_keys &= own >= refs[0][at][None, :]
        scores = dots_along(key, query, (0, 1), precise) * LOG2_E
        weights = jnp.where(seen_keys, jnp.exp2(scores - normaliser_ref[at][None, :]), 0.0)
        dvalue = [
            total + dot_along(weights.astype(dtype), part, (1, 0), precise)
            for total, part in zip(sums[1], cotangent, strict=True)
        ]
        dweights = dots_along(value, cotangent, (1, 1), precise)
        dscores = (weights * (dweights - product_ref[at][None, :])).astype(dtype)
        dkey = [
            total + dot_along(dscores, part, (1, 0), precise)
            for total, part in zip(sums[0], query, strict=True)
        ]
        return dkey, dvalue

    zeros = tuple(
        [jnp.zeros((keys, part.stop - part.start), jnp.float32) for part in group]
        for group in (parts, value_parts)
    )
    dkey, dvalue = jax.lax.fori_loop(begin_ref[...], end_ref[...], step, zeros)
    for part, total in zip(parts, dkey, strict=True):
        dkey_ref[part, :] = total.astype(dtype).T
    for part, total in zip(value_parts, dvalue, strict=True):
        dvalue_ref[:, part] = total.astype(dtype)


def on_tpu(*arrays: Any, numerics: Numerics):
    """Gradients of query, key and value in their dtypes, of what `Arrays` has.

    A step has several heads, one after the other. What it does not need is not copied.
    """
    tiles = numerics.tpu
    return gradients(
        partial(_tpu_by_rows, numerics=numerics),
        partial(_tpu_by_keys, numerics=numerics),
        Arrays(*arrays),
        rows=tiles.gradient_rows,
        keys=tiles.gradient_keys,
    )


def _columns(inputs: Inputs) -> list[jax.Array]:
    """The arrays that are given to a kernel, those of a number per row [..., N, 1]."""
    given = inputs._replace(last=inputs.last[..., None])
    if inputs.first is not None:
        given = given._replace(first=inputs.first[..., None])
    return [x for x in given if x is not None]


def _tpu_by_rows(inputs: Inputs, sizes: Sizes, numerics: Numerics):
    batch, heads, rows, keys, size, width, tiles, blocks = sizes
    some = min(power_of_two_in(heads), numerics.tpu.gradient_heads)
    scalars = [jnp.max(inputs.last.reshape(batch, tiles, rows), axis=2) // keys]
    if inputs.first is not None:
        first = jnp.min(inputs.first.reshape(batch, tiles, rows), axis=2)
        scalars.append(jnp.maximum(first, 0) // keys)

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, some, rows, width), lambda b, h, i, j, *_: (b, h, i, 0))

    def block(b, i, j, scalars):
        found = jnp.minimum(jax.lax.rem(j, blocks), jnp.maximum(scalars[0][b, i], 0))
        return jnp.maximum(found, scalars[1][b, i]) if len(scalars) > 1 else found

    given = _columns(inputs)
    of_row = jax.ShapeDtypeStruct((*inputs.query.shape[:3], 1), jnp.float32)
    dquery, *found = tpu_call(
        partial(_tpu_rows, keys=keys, windowed=inputs.first is not None),
        numerics=numerics,
        name=BY_ROWS,
        grid=(batch, heads // some, tiles, 2 * blocks),
        scalars=len(scalars),
        scratch=[(some, rows, size), (some, rows, LANES), (some, rows, LANES)],
        in_specs=[
            *(of_rows(size), of_rows(width), of_rows(width)),
            pl.BlockSpec(
                (None, some, size, keys), lambda b, h, i, j, *s: (b, h, 0, block(b, i, j, s))
            ),
            pl.BlockSpec(
                (None, some, keys, width), lambda b, h, i, j, *s: (b, h, block(b, i, j, s), 0)
            ),
            *(pl.BlockSpec((None, rows, 1), lambda b, h, i, j, *_: (b, i, 0)),) * (len(given) - 5),
        ],
        out_specs=(of_rows(size), of_rows(1), of_rows(1)),
        out_shape=(jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype), *(of_row, of_row)),
    )(*scalars, *given)
    return dquery, found


def _tpu_rows(*refs, keys: int, windowed: bool):
    # The scalars before these are read by the index maps alone.
    given = refs[2:] if windowed else refs[1:]
    query_ref, cotangent_ref, attended_ref, key_ref, value_ref, last_ref = given[:6]
    dquery_ref, product_ref, normaliser_ref, sums, peak, total = refs[-6:]
    step, blocks = pl.program_id(3), pl.num_programs(3) // 2
    index = jax.lax.rem(step, blocks)
    last, first = last_ref[...], given[6][...] if windowed else None
    needed = index * keys <= jnp.max(last)
    if first is not None:
        needed &= (index + 1) * keys > jnp.min(first)

    heads = range(query_ref.shape[0])

    def scores(head):
        query = query_ref[head]
        found = dot_along(query, key_ref[head], (1, 0), native.precise(query))
        seen_keys = visible(index, keys, last, first)
        return jnp.where(seen_keys, found, native.MASKED), seen_keys

    @pl.when(step == 0)
    def _start():
        sums[...] = jnp.zeros_like(sums)
        peak[...] = jnp.full_like(peak, native.MASKED)
        total[...] = jnp.zeros_like(total)
        for head in heads:
            product_ref[head] = row_products(cotangent_ref[head], attended_ref[head])

    @pl.when(needed & (step < blocks))
    def _add_up():
        for head in heads:
            found, seen_keys = scores(head)
            old = peak[head][:, :1]
            new = jnp.maximum(old, jnp.max(found, axis=1, keepdims=True))
            weights = jnp.where(seen_keys, jnp.exp(found - new), 0.0)
            summed = jnp.sum(weights, axis=1, keepdims=True)
            total[head] = total[head] * jnp.exp(old - new) + summed
            peak[head] = jnp.broadcast_to(new, peak.shape[1:])

    @pl.when(step == blocks)
    def _normalise():
        for head in heads:
            # A row that fills a tile may see nothing.
            some = total[head] > 0
            log = peak[head] + jnp.log(jnp.where(some, total[head], 1.0))
            peak[head] = jnp.where(some, log, 0.0)
            normaliser_ref[head] = peak[head][:, :1]

    @pl.when(needed & (step >= blocks))
    def _step():
        for head in heads:
            found, seen_keys = scores(head)
            cotangent, precise = cotangent_ref[head], native.precise(cotangent_ref[head])
            weights = jnp.where(seen_keys, jnp.exp(found - peak[head][:, :1]), 0.0)
            dweights = dot_along(cotangent, value_ref[head], (1, 1), precise)
            dscores = (weights * (dweights - product_ref[head])).astype(cotangent.dtype)
            sums[head] += dot_along(dscores, key_ref[head], (1, 1), precise)

    @pl.when(step == 2 * blocks - 1)
    def _finish():
        dquery_ref[...] = sums[...].astype(dquery_ref.dtype)


def _tpu_by_keys(inputs: Inputs, sizes: Sizes, found: list[jax.Array], numerics: Numerics):
    batch, heads, rows, keys, size, width, tiles, blocks = sizes
    some = min(power_of_two_in(heads), numerics.tpu.gradient_heads)

    def tile(b, j, i, begin, end):
        return jnp.maximum(jnp.minimum(jnp.maximum(i, begin[b, j]), end[b, j] - 1), 0)

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, some, rows, width), lambda b, h, j, i, *s: (b, h, tile(b, j, i, *s), 0)
        )

    key = pl.BlockSpec((None, some, size, keys), lambda b, h, j, i, *_: (b, h, 0, j))
    value = pl.BlockSpec((None, some, keys, width), lambda b, h, j, i, *_: (b, h, j, 0))
    seen_by = pl.BlockSpec((None, rows, 1), lambda b, h, j, i, *s: (b, tile(b, j, i, *s), 0))
    given = _columns(inputs._replace(out=None))
    return tpu_call(
        partial(_tpu_keys, windowed=inputs.first is not None),
        numerics=numerics,
        name=BY_KEYS,
        grid=(batch, heads // some, blocks, tiles),
        scalars=2,
        scratch=[(some, size, keys), (some, keys, width)],
        in_specs=[
            *(of_rows(size), of_rows(width), key, value),
            *(seen_by,) * (len(given) - 4),
            *(of_rows(1), of_rows(1)),
        ],
        out_specs=(key, value),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[2:4]),
    )(*tiles_that_see(inputs, sizes), *given, *found)


def _tpu_keys(begin_ref, end_ref, *refs, windowed: bool):
    query_ref, cotangent_ref, key_ref, value_ref, last_ref = refs[:5]
    product_ref, normaliser_ref, dkey_ref, dvalue_ref, dkey, dvalue = refs[-6:]
    row, index, tile = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(tile == 0)
    def _start():
        dkey[...] = jnp.zeros_like(dkey)
        dvalue[...] = jnp.zeros_like(dvalue)

    @pl.when((tile >= begin_ref[row, index]) & (tile < end_ref[row, index]))
    def _step():
        first = refs[5][...] if windowed else None
        for head in range(query_ref.shape[0]):
            query, cotangent, value = query_ref[head], cotangent_ref[head], value_ref[head]
            precise = native.precise(query)
            scores = dot_along(query, key_ref[head], (1, 0), precise)
            seen_keys = visible(index, scores.shape[1], last_ref[...], first)
            weights = jnp.where(seen_keys, jnp.exp(scores - normaliser_ref[head]), 0.0)
            dvalue[head] += dot_along(weights.astype(value.dtype), cotangent, (0, 0), precise)
            dweights = dot_along(cotangent, value, (1, 1), precise)
            dscores = (weights * (dweights - product_ref[head])).astype(value.dtype)
            dkey[head] += dot_along(query, dscores, (0, 0), precise)

    @pl.when(tile == pl.num_programs(3) - 1)
    def _finish():
        dkey_ref[...] = dkey[...].astype(dkey_ref.dtype)
        dvalue_ref[...] = dvalue[...].astype(dvalue_ref.dtype)
