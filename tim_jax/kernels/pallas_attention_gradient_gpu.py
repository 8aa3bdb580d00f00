"""The kernels of attention's gradient for GPUs, in Pallas' Triton dialect."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels import native
from tim_jax.kernels.pallas import LOG2_E, MASKED, parts_of
from tim_jax.kernels.pallas_attention import visible
from tim_jax.kernels.pallas_attention_gradient import (
    BY_KEYS,
    BY_ROWS,
    Arrays,
    Inputs,
    OfRows,
    Sizes,
    dot_along,
    dots_along,
    row_products,
    tiles_that_see,
)
from tim_jax.kernels.pallas_attention_gradient import gradients as attention_gradients
from tim_jax.kernels.pallas_calls import attention_cost, gpu_call
from tim_jax.numerics import Numerics

_PART = 128  # numbers of a head that a program multiplies at a time


def gradients(*arrays: Any, numerics: Numerics):
    """Gradients of query, key and value in their dtypes, of what `Arrays` has."""
    tiles = numerics.gpu
    options = {
        "numerics": numerics,
        "warps": tiles.gradient_warps,
        "stages": tiles.gradient_stages,
    }
    return attention_gradients(
        partial(_by_rows, options=options),
        partial(_by_keys, options=options),
        Arrays(*arrays),
        rows=tiles.gradient_rows,
        keys=tiles.gradient_keys,
    )


def _by_rows(inputs: Inputs, sizes: Sizes, options: dict[str, Any]):
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
    length, moved = sizes.blocks * sizes.keys, rows * (2 * size + 2 * width)
    cost = attention_cost(
        multiplied=rows * length * (3 * size + width),
        loaded=(moved + length * (2 * size + width)) * inputs.key.dtype.itemsize,
        exponentials=2 * rows * length,
        programs=sizes.tiles * sizes.heads * sizes.batch,
    )
    of_row = jax.ShapeDtypeStruct(inputs.query.shape[:3], jnp.float32)
    dquery, *of_rows = gpu_call(
        partial(_rows, keys=sizes.keys, windowed=inputs.first is not None),
        name=BY_ROWS,
        cost_estimate=cost,
        grid=(sizes.tiles, sizes.heads, sizes.batch),
        in_specs=[query, out, out, *whole, *(seen_by,) * (len(given) - 5)],
        out_specs=(query, number, number),
        out_shape=(
            jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype),
            *(of_row, of_row),
        ),
        **options,
    )(*given)
    return dquery, OfRows(*of_rows)


def _rows(*refs, keys: int, windowed: bool):
    query_ref, cotangent_ref, attended_ref, key_ref, value_ref, last_ref, *refs = refs
    dquery_ref, product_ref, normaliser_ref = refs[-3:]
    last, first = last_ref[...], refs[0][...] if windowed else None
    rows, size = query_ref.shape
    parts, value_parts = parts_of(size, _PART), parts_of(cotangent_ref.shape[1], _PART)
    query = [query_ref[:, part] for part in parts]
    cotangent = [cotangent_ref[:, part] for part in value_parts]
    precise = native.precise(query[0])
    products = [
        row_products(part, attended_ref[:, at])
        for part, at in zip(cotangent, value_parts, strict=True)
    ]
    product = sum(products[1:], products[0])
    product_ref[...] = product[:, 0]
    begin = 0 if first is None else jax.lax.div(jnp.maximum(jnp.min(first), 0), keys)
    end = jax.lax.div(jnp.max(last) + keys, keys)
    columns = None if first is None else first[:, None]

    def scores(index):
        """Of a block, in units of log 2, and which of its keys are seen."""
        at = pl.ds(index * keys, keys)
        key = [key_ref[part, at] for part in parts]
        seen_keys = visible(index, keys, last[:, None], columns)
        found = dots_along(query, key, (1, 0), precise) * LOG2_E
        return jnp.where(seen_keys, found, MASKED), seen_keys

    def add_up(index, state):
        peak, total = state
        found, seen_keys = scores(index)
        new = jnp.maximum(peak, jnp.max(found, axis=1))
        weights = jnp.where(seen_keys, jnp.exp2(found - new[:, None]), 0.0)
        return new, total * jnp.exp2(peak - new) + jnp.sum(weights, axis=1)

    start = jnp.full((rows,), MASKED, jnp.float32), jnp.zeros((rows,), jnp.float32)
    peak, total = jax.lax.fori_loop(begin, end, add_up, start)
    # A row that fills a tile may see nothing.
    normaliser = jnp.where(total > 0, peak + jnp.log2(jnp.where(total > 0, total, 1.0)), 0.0)
    normaliser_ref[...] = normaliser

    def step(index, sums):
        at = pl.ds(index * keys, keys)
        found, seen_keys = scores(index)
        weights = jnp.where(seen_keys, jnp.exp2(found - normaliser[:, None]), 0.0)
        value = [value_ref[at, part] for part in value_parts]
        dweights = dots_along(cotangent, value, (1, 1), precise)
        dscores = (weights * (dweights - product)).astype(dquery_ref.dtype)
        return [
            total + dot_along(dscores, key_ref[part, at], (1, 1), precise)
            for total, part in zip(sums, parts, strict=True)
        ]

    zeros = [jnp.zeros((rows, part.stop - part.start), jnp.float32) for part in parts]
    for part, total in zip(parts, jax.lax.fori_loop(begin, end, step, zeros), strict=True):
        dquery_ref[:, part] = total.astype(dquery_ref.dtype)


def _by_keys(inputs: Inputs, sizes: Sizes, of_rows: OfRows, options: dict[str, Any]):
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
    given = [x for x in inputs._replace(out=None) if x is not None]
    count = sizes.tiles * sizes.rows
    cost = attention_cost(
        multiplied=keys * count * 2 * (size + width),
        loaded=(count + 2 * keys) * (size + width) * inputs.key.dtype.itemsize,
        exponentials=keys * count,
        programs=sizes.blocks * sizes.heads * sizes.batch,
    )
    return gpu_call(
        partial(_keys, rows=sizes.rows, windowed=inputs.first is not None),
        name=BY_KEYS,
        cost_estimate=cost,
        grid=(sizes.blocks, sizes.heads, sizes.batch),
        in_specs=[
            *(query, cotangent, key, value),
            *(seen_by,) * (len(given) - 4),
            *(number, number, one, one),
        ],
        out_specs=(key, value),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[2:4]),
        **options,
    )(*given, *of_rows, *tiles_that_see(inputs, sizes))


def _keys(*refs, rows: int, windowed: bool):
    query_ref, cotangent_ref, key_ref, value_ref, last_ref, *refs = refs
    product_ref, normaliser_ref, begin_ref, end_ref, dkey_ref, dvalue_ref = refs[-6:]
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
        scores = dots_along(query, key, (1, 0), precise) * LOG2_E
        seen_keys = visible(index, keys, last_ref[at][:, None], first)
        weights = jnp.where(seen_keys, jnp.exp2(scores - normaliser_ref[at][:, None]), 0.0)
        dweights = dots_along(cotangent, value, (1, 1), precise)
        dscores = weights * (dweights - product_ref[at][:, None])
        pairs = [(q, dscores.astype(dtype)) for q in query]
        pairs += [(weights.astype(dtype), c) for c in cotangent]
        return [
            total + dot_along(*pair, (0, 0), precise)
            for total, pair in zip(sums, pairs, strict=True)
        ]

    outs = [dkey_ref.at[part, :] for part in parts]
    outs += [dvalue_ref.at[:, part] for part in value_parts]
    zeros = [jnp.zeros(out.shape, jnp.float32) for out in outs]
    sums = jax.lax.fori_loop(begin_ref[...], end_ref[...], step, zeros)
    for out, total in zip(outs, sums, strict=True):
        out[...] = total.astype(out.dtype)
