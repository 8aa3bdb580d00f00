"""The gradient of causal attention, as kernels for GPUs and TPUs.

The equations are those of FlashAttention-2 (Dao 2023, section 3.1.2). For a row with the scores
s_j, the weights p_j = exp(s_j - log sum_i exp(s_i)), the output o = sum_j p_j v_j and the cotangent
do of that:

    dv_j = p_j do,    ds_j = p_j (do . v_j - do . o),    dq = sum_j ds_j k_j,    dk_j = ds_j q

Two kernels, and no sum that is shared among programs, so that a gradient repeats to the bit:

- by rows: a tile of rows runs over the key blocks that it sees, twice: first for the logarithm of
  the normaliser, then for dq. The forward keeps no normaliser: its kernel is the one of decoding.
- by keys: a block of keys runs over the tiles of rows that see it, ascending, for dk and dv.

Products have the compute dtype's operands and float32 sums, as those of the forward.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels import native
from tim_jax.kernels.pallas import LOG2_E, MASKED, padded
from tim_jax.kernels.pallas_attention import parts_of, seen
from tim_jax.kernels.pallas_calls import attention_cost, gpu_call, tpu_call
from tim_jax.numerics import Numerics

_PART = 128  # numbers of a head that a program of a GPU multiplies at a time
_LANES = 128  # a statistic per row fills a whole register row
_BY_ROWS, _BY_KEYS = "attention_gradient_rows", "attention_gradient_keys"
Gradients = tuple[jax.Array, jax.Array, jax.Array]


class _Sizes(NamedTuple):
    batch: int
    heads: int
    rows: int  # of a tile
    keys: int  # of a block
    size: int  # of a query and a key
    width: int  # of a value
    tiles: int
    blocks: int


class _Inputs(NamedTuple):
    """In whole tiles and blocks. `first` is None where there is no window."""

    query: jax.Array  # [B, Kv, N, D]
    cotangent: jax.Array  # [B, Kv, N, E], in the compute dtype
    product: jax.Array  # float32 [B, Kv, N]: cotangent . output
    key: jax.Array  # [B, Kv, D, S]
    value: jax.Array  # [B, Kv, S, E]
    last: jax.Array  # i32[B, N]
    first: jax.Array | None


def _filled(query, key, value, positions, window, out, cotangent, *, rows: int, keys: int):
    batch, heads, _, size = query.shape
    product = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    last, first = seen(positions, window, rows)
    inputs = _Inputs(
        query=padded(query, rows, axis=2),
        cotangent=padded(cotangent.astype(query.dtype), rows, axis=2),
        product=padded(product, rows, axis=2),
        key=padded(key, keys, axis=3),
        value=padded(value, keys, axis=2),
        last=last,
        first=first,
    )
    tiles, blocks = inputs.query.shape[2] // rows, inputs.key.shape[3] // keys
    sizes = _Sizes(batch, heads, rows, keys, size, value.shape[3], tiles, blocks)
    return inputs, sizes


def _tiles_that_see(inputs: _Inputs, sizes: _Sizes) -> tuple[jax.Array, jax.Array]:
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


def _product(x: jax.Array, y: jax.Array, axes: tuple[int, int], precise: dict[str, Any]):
    """Sums over axis axes[0] of x and axes[1] of y, float32."""
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(x, y, numbers, **precise)


def _products(xs: list[jax.Array], ys: list[jax.Array], axes: tuple[int, int], precise):
    """The `_product` of what comes in parts."""
    first, *others = (_product(x, y, axes, precise) for x, y in zip(xs, ys, strict=True))
    return sum(others, first)


def _visible(index, keys: int, last, first):
    """Which keys of block `index` rows see, bool[rows, keys], of their last and first [rows, 1]."""
    shape = last.shape[0], keys
    at = index * keys + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    found = at <= jnp.broadcast_to(last, shape)
    return found if first is None else found & (at >= jnp.broadcast_to(first, shape))


# --- GPU -------------------------------------------------------------------------------------


def on_gpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    window: jax.Array | None,
    out: jax.Array,
    cotangent: jax.Array,
    *,
    numerics: Numerics,
) -> Gradients:
    """Gradients of query, key and value in their dtypes; arguments as `kernels.attention`.

    `out` is what attention returned, `cotangent` [B, Kv, N, E] that of it.
    """
    tiles = numerics.gpu
    inputs, sizes = _filled(
        *(query, key, value, positions, window, out, cotangent),
        rows=tiles.gradient_rows,
        keys=tiles.gradient_keys,
    )
    options = {
        "numerics": numerics,
        "warps": tiles.gradient_warps,
        "stages": tiles.gradient_stages,
    }
    dquery, normaliser = _by_rows_on_gpu(inputs, sizes, options)
    dkey, dvalue = _by_keys_on_gpu(inputs, sizes, normaliser, options)
    count, length = query.shape[2], key.shape[3]
    return dquery[:, :, :count], dkey[..., :length], dvalue[:, :, :length]


def _by_rows_on_gpu(inputs: _Inputs, sizes: _Sizes, options: dict[str, Any]):
    rows, size, width = sizes.rows, sizes.size, sizes.width
    query = pl.BlockSpec((None, None, rows, size), lambda i, h, b: (b, h, i, 0))
    out = pl.BlockSpec((None, None, rows, width), lambda i, h, b: (b, h, i, 0))
    number = pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, i))
    seen_by = pl.BlockSpec((None, rows), lambda i, h, b: (b, i))
    whole = [
        pl.BlockSpec((None, None, *x.shape[2:]), lambda i, h, b: (b, h, 0, 0))
        for x in (inputs.key, inputs.value)
    ]
    given = [x for x in inputs if x is not None]
    length, moved = sizes.blocks * sizes.keys, rows * (2 * size + width)
    cost = attention_cost(
        multiplied=rows * length * (3 * size + width),
        loaded=(moved + length * (2 * size + width)) * inputs.key.dtype.itemsize,
        exponentials=2 * rows * length,
        programs=sizes.tiles * sizes.heads * sizes.batch,
    )
    return gpu_call(
        partial(_rows_on_gpu, keys=sizes.keys, windowed=inputs.first is not None),
        name=_BY_ROWS,
        cost_estimate=cost,
        grid=(sizes.tiles, sizes.heads, sizes.batch),
        in_specs=[query, out, number, *whole, *(seen_by,) * (len(given) - 5)],
        out_specs=(query, number),
        out_shape=(
            jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype),
            jax.ShapeDtypeStruct(inputs.query.shape[:3], jnp.float32),
        ),
        **options,
    )(*given)


def _rows_on_gpu(query_ref, cotangent_ref, product_ref, key_ref, value_ref, last_ref, *refs, **how):
    keys, windowed = how["keys"], how["windowed"]
    dquery_ref, normaliser_ref = refs[-2:]
    last, first = last_ref[...], refs[0][...] if windowed else None
    rows, size = query_ref.shape
    parts, value_parts = parts_of(size, _PART), parts_of(cotangent_ref.shape[1], _PART)
    query = [query_ref[:, part] for part in parts]
    cotangent = [cotangent_ref[:, part] for part in value_parts]
    product, precise = product_ref[...], native.precise(query[0])
    begin = 0 if first is None else jax.lax.div(jnp.maximum(jnp.min(first), 0), keys)
    end = jax.lax.div(jnp.max(last) + keys, keys)
    columns = None if first is None else first[:, None]

    def scores(index):
        """Of a block, in units of log 2, and which of its keys are visible."""
        at = pl.ds(index * keys, keys)
        key = [key_ref[part, at] for part in parts]
        visible = _visible(index, keys, last[:, None], columns)
        return jnp.where(visible, _products(query, key, (1, 0), precise) * LOG2_E, MASKED), visible

    def add_up(index, state):
        peak, total = state
        found, visible = scores(index)
        new = jnp.maximum(peak, jnp.max(found, axis=1))
        weights = jnp.where(visible, jnp.exp2(found - new[:, None]), 0.0)
        return new, total * jnp.exp2(peak - new) + jnp.sum(weights, axis=1)

    start = jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32)
    peak, total = jax.lax.fori_loop(begin, end, add_up, start)
    # A row that fills a tile may see nothing.
    normaliser = jnp.where(total > 0, peak + jnp.log2(jnp.where(total > 0, total, 1.0)), 0.0)
    normaliser_ref[...] = normaliser

    def step(index, sums):
        at = pl.ds(index * keys, keys)
        found, visible = scores(index)
        weights = jnp.where(visible, jnp.exp2(found - normaliser[:, None]), 0.0)
        value = [value_ref[at, part] for part in value_parts]
        dweights = _products(cotangent, value, (1, 1), precise)
        dscores = (weights * (dweights - product[:, None])).astype(dquery_ref.dtype)
        return [
            total + _product(dscores, key_ref[part, at], (1, 1), precise)
            for total, part in zip(sums, parts, strict=True)
        ]

    zeros = [jnp.zeros((rows, part.stop - part.start), jnp.float32) for part in parts]
    for part, total in zip(parts, jax.lax.fori_loop(begin, end, step, zeros), strict=True):
        dquery_ref[:, part] = total.astype(dquery_ref.dtype)


def _by_keys_on_gpu(inputs: _Inputs, sizes: _Sizes, normaliser, options: dict[str, Any]):
    keys, size, width = sizes.keys, sizes.size, sizes.width
    key = pl.BlockSpec((None, None, size, keys), lambda j, h, b: (b, h, 0, j))
    value = pl.BlockSpec((None, None, keys, width), lambda j, h, b: (b, h, j, 0))
    query, cotangent = (
        pl.BlockSpec((None, None, *x.shape[2:]), lambda j, h, b: (b, h, 0, 0))
        for x in (inputs.query, inputs.cotangent)
    )
    number = pl.BlockSpec((None, None, inputs.query.shape[2]), lambda j, h, b: (b, h, 0))
    seen_by = pl.BlockSpec((None, inputs.query.shape[2]), lambda j, h, b: (b, 0))
    one = pl.BlockSpec((None, None), lambda j, h, b: (b, j))
    given = [x for x in inputs if x is not None]
    count = sizes.tiles * sizes.rows
    cost = attention_cost(
        multiplied=keys * count * 2 * (size + width),
        loaded=(count + 2 * keys) * (size + width) * inputs.key.dtype.itemsize,
        exponentials=keys * count,
        programs=sizes.blocks * sizes.heads * sizes.batch,
    )
    return gpu_call(
        partial(_keys_on_gpu, rows=sizes.rows, windowed=inputs.first is not None),
        name=_BY_KEYS,
        cost_estimate=cost,
        grid=(sizes.blocks, sizes.heads, sizes.batch),
        in_specs=[
            *(query, cotangent, number, key, value),
            *(seen_by,) * (len(given) - 5),
            *(number, one, one),
        ],
        out_specs=(key, value),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[3:5]),
        **options,
    )(*given, normaliser, *_tiles_that_see(inputs, sizes))


def _keys_on_gpu(query_ref, cotangent_ref, product_ref, key_ref, value_ref, last_ref, *refs, **how):
    rows, windowed = how["rows"], how["windowed"]
    normaliser_ref, begin_ref, end_ref, dkey_ref, dvalue_ref = refs[-5:]
    index, (size, keys) = pl.program_id(0), key_ref.shape
    parts, value_parts = parts_of(size, _PART), parts_of(value_ref.shape[1], _PART)
    key = [key_ref[part, :] for part in parts]
    value = [value_ref[:, part] for part in value_parts]
    precise, dtype = native.precise(value[0]), value_ref.dtype

    def step(tile, sums):
        at = pl.ds(tile * rows, rows)
        query = [query_ref[at, part] for part in parts]
        cotangent = [cotangent_ref[at, part] for part in value_parts]
        first = refs[0][at][:, None] if windowed else None
        scores = _products(query, key, (1, 0), precise) * LOG2_E
        visible = _visible(index, keys, last_ref[at][:, None], first)
        weights = jnp.where(visible, jnp.exp2(scores - normaliser_ref[at][:, None]), 0.0)
        dweights = _products(cotangent, value, (1, 1), precise)
        dscores = weights * (dweights - product_ref[at][:, None])
        pairs = [(q, dscores.astype(dtype)) for q in query]
        pairs += [(weights.astype(dtype), c) for c in cotangent]
        return [
            total + _product(*pair, (0, 0), precise)
            for total, pair in zip(sums, pairs, strict=True)
        ]

    outs = [dkey_ref.at[part, :] for part in parts]
    outs += [dvalue_ref.at[:, part] for part in value_parts]
    zeros = [jnp.zeros(out.shape, jnp.float32) for out in outs]
    sums = jax.lax.fori_loop(begin_ref[...], end_ref[...], step, zeros)
    for out, total in zip(outs, sums, strict=True):
        out[...] = total.astype(out.dtype)


# --- TPU -------------------------------------------------------------------------------------


def on_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    window: jax.Array | None,
    out: jax.Array,
    cotangent: jax.Array,
    *,
    numerics: Numerics,
) -> Gradients:
    """As `on_gpu`. What a step of the grid does not need is not copied."""
    rows, keys = numerics.tpu.attention_rows, numerics.kv_block
    inputs, sizes = _filled(
        *(query, key, value, positions, window, out, cotangent), rows=rows, keys=keys
    )
    dquery, normaliser = _by_rows_on_tpu(inputs, sizes, numerics)
    dkey, dvalue = _by_keys_on_tpu(inputs, sizes, normaliser, numerics)
    count, length = query.shape[2], key.shape[3]
    return dquery[:, :, :count], dkey[..., :length], dvalue[:, :, :length]


def _columns(inputs: _Inputs) -> list[jax.Array]:
    """The arrays that are given to a kernel, those of a number per row [..., N, 1]."""
    given = inputs._replace(product=inputs.product[..., None], last=inputs.last[..., None])
    if inputs.first is not None:
        given = given._replace(first=inputs.first[..., None])
    return [x for x in given if x is not None]


def _by_rows_on_tpu(inputs: _Inputs, sizes: _Sizes, numerics: Numerics):
    batch, heads, rows, keys, size, width, tiles, blocks = sizes
    scalars = [jnp.max(inputs.last.reshape(batch, tiles, rows), axis=2) // keys]
    if inputs.first is not None:
        first = jnp.min(inputs.first.reshape(batch, tiles, rows), axis=2)
        scalars.append(jnp.maximum(first, 0) // keys)

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, rows, width), lambda b, h, i, j, *_: (b, h, i, 0))

    def block(b, i, j, scalars):
        found = jnp.minimum(jax.lax.rem(j, blocks), jnp.maximum(scalars[0][b, i], 0))
        return jnp.maximum(found, scalars[1][b, i]) if len(scalars) > 1 else found

    given = _columns(inputs)
    return tpu_call(
        partial(_rows_on_tpu, keys=keys, windowed=inputs.first is not None),
        numerics=numerics,
        name=_BY_ROWS,
        grid=(batch, heads, tiles, 2 * blocks),
        scalars=len(scalars),
        scratch=[(rows, size), (rows, _LANES), (rows, _LANES)],
        in_specs=[
            *(of_rows(size), of_rows(width), of_rows(1)),
            pl.BlockSpec(
                (None, None, size, keys), lambda b, h, i, j, *s: (b, h, 0, block(b, i, j, s))
            ),
            pl.BlockSpec(
                (None, None, keys, width), lambda b, h, i, j, *s: (b, h, block(b, i, j, s), 0)
            ),
            *(pl.BlockSpec((None, rows, 1), lambda b, h, i, j, *_: (b, i, 0)),) * (len(given) - 5),
        ],
        out_specs=(of_rows(size), of_rows(1)),
        out_shape=(
            jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype),
            jax.ShapeDtypeStruct((*inputs.query.shape[:3], 1), jnp.float32),
        ),
    )(*scalars, *given)


def _rows_on_tpu(*refs, keys: int, windowed: bool):
    # The scalars before these are read by the index maps alone.
    given = refs[2:] if windowed else refs[1:]
    query_ref, cotangent_ref, product_ref, key_ref, value_ref, last_ref = given[:6]
    dquery_ref, normaliser_ref, sums, peak, total = refs[-5:]
    step, blocks = pl.program_id(3), pl.num_programs(3) // 2
    index = jax.lax.rem(step, blocks)
    last, first = last_ref[...], given[6][...] if windowed else None
    needed = index * keys <= jnp.max(last)
    if first is not None:
        needed &= (index + 1) * keys > jnp.min(first)

    def scores():
        query = query_ref[...]
        found = _product(query, key_ref[...], (1, 0), native.precise(query))
        visible = _visible(index, keys, last, first)
        return jnp.where(visible, found, MASKED), visible

    @pl.when(step == 0)
    def _start():
        sums[...] = jnp.zeros_like(sums)
        peak[...] = jnp.full_like(peak, MASKED)
        total[...] = jnp.zeros_like(total)

    @pl.when(needed & (step < blocks))
    def _add_up():
        found, visible = scores()
        old = peak[...][:, :1]
        new = jnp.maximum(old, jnp.max(found, axis=1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(found - new), 0.0)
        total[...] = total[...] * jnp.exp(old - new) + jnp.sum(weights, axis=1, keepdims=True)
        peak[...] = jnp.broadcast_to(new, peak.shape)

    @pl.when(step == blocks)
    def _normalise():
        # A row that fills a tile may see nothing.
        some = total[...] > 0
        log = peak[...] + jnp.log(jnp.where(some, total[...], 1.0))
        peak[...] = jnp.where(some, log, 0.0)
        normaliser_ref[...] = peak[...][:, :1]

    @pl.when(needed & (step >= blocks))
    def _step():
        found, visible = scores()
        cotangent, precise = cotangent_ref[...], native.precise(cotangent_ref[...])
        weights = jnp.where(visible, jnp.exp(found - peak[...][:, :1]), 0.0)
        dweights = _product(cotangent, value_ref[...], (1, 1), precise)
        dscores = (weights * (dweights - product_ref[...])).astype(cotangent.dtype)
        sums[...] += _product(dscores, key_ref[...], (1, 1), precise)

    @pl.when(step == 2 * blocks - 1)
    def _finish():
        dquery_ref[...] = sums[...].astype(dquery_ref.dtype)


def _by_keys_on_tpu(inputs: _Inputs, sizes: _Sizes, normaliser, numerics: Numerics):
    batch, heads, rows, keys, size, width, tiles, blocks = sizes

    def tile(b, j, i, begin, end):
        return jnp.maximum(jnp.minimum(jnp.maximum(i, begin[b, j]), end[b, j] - 1), 0)

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, rows, width), lambda b, h, j, i, *s: (b, h, tile(b, j, i, *s), 0)
        )

    key = pl.BlockSpec((None, None, size, keys), lambda b, h, j, i, *_: (b, h, 0, j))
    value = pl.BlockSpec((None, None, keys, width), lambda b, h, j, i, *_: (b, h, j, 0))
    seen_by = pl.BlockSpec((None, rows, 1), lambda b, h, j, i, *s: (b, tile(b, j, i, *s), 0))
    given = _columns(inputs)
    return tpu_call(
        partial(_keys_on_tpu, windowed=inputs.first is not None),
        numerics=numerics,
        name=_BY_KEYS,
        grid=(batch, heads, blocks, tiles),
        scalars=2,
        scratch=[(size, keys), (keys, width)],
        in_specs=[
            *(of_rows(size), of_rows(width), of_rows(1), key, value),
            *(seen_by,) * (len(given) - 5),
            of_rows(1),
        ],
        out_specs=(key, value),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[3:5]),
    )(*_tiles_that_see(inputs, sizes), *given, normaliser)


def _keys_on_tpu(begin_ref, end_ref, *refs, windowed: bool):
    query_ref, cotangent_ref, product_ref, key_ref, value_ref, last_ref = refs[:6]
    normaliser_ref, dkey_ref, dvalue_ref, dkey, dvalue = refs[-5:]
    row, index, tile = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(tile == 0)
    def _start():
        dkey[...] = jnp.zeros_like(dkey)
        dvalue[...] = jnp.zeros_like(dvalue)

    @pl.when((tile >= begin_ref[row, index]) & (tile < end_ref[row, index]))
    def _step():
        query, cotangent, value = query_ref[...], cotangent_ref[...], value_ref[...]
        precise = native.precise(query)
        scores = _product(query, key_ref[...], (1, 0), precise)
        first = refs[6][...] if windowed else None
        visible = _visible(index, scores.shape[1], last_ref[...], first)
        weights = jnp.where(visible, jnp.exp(scores - normaliser_ref[...]), 0.0)
        dvalue[...] += _product(weights.astype(value.dtype), cotangent, (0, 0), precise)
        dweights = _product(cotangent, value, (1, 1), precise)
        dscores = (weights * (dweights - product_ref[...])).astype(value.dtype)
        dkey[...] += _product(query, dscores, (0, 0), precise)

    @pl.when(tile == pl.num_programs(3) - 1)
    def _finish():
        dkey_ref[...] = dkey[...].astype(dkey_ref.dtype)
        dvalue_ref[...] = dvalue[...].astype(dvalue_ref.dtype)
