"""The kernels of attention's gradient for TPUs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels import native
from tim_jax.kernels.pallas import MASKED, power_of_two_in
from tim_jax.kernels.pallas_attention import visible
from tim_jax.kernels.pallas_attention_gradient import (
    BY_KEYS,
    BY_ROWS,
    Arrays,
    Inputs,
    OfRows,
    Sizes,
    dot_along,
    row_products,
    tiles_that_see,
)
from tim_jax.kernels.pallas_attention_gradient import gradients as attention_gradients
from tim_jax.kernels.pallas_calls import tpu_call
from tim_jax.numerics import Numerics

_LANES = 128  # a statistic per row fills a whole register row


def gradients(*arrays: Any, numerics: Numerics):
    """Gradients of query, key and value in their dtypes, of what `Arrays` has.

    A step has several heads, one after the other. What it does not need is not copied.
    """
    tiles = numerics.tpu
    return attention_gradients(
        partial(_by_rows, numerics=numerics),
        partial(_by_keys, numerics=numerics),
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


def _by_rows(inputs: Inputs, sizes: Sizes, numerics: Numerics):
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
        partial(_rows, keys=keys, windowed=inputs.first is not None),
        numerics=numerics,
        name=BY_ROWS,
        grid=(batch, heads // some, tiles, 2 * blocks),
        scalars=len(scalars),
        scratch=[(some, rows, size), (some, rows, _LANES), (some, rows, _LANES)],
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
        out_shape=(
            jax.ShapeDtypeStruct(inputs.query.shape, inputs.query.dtype),
            *(of_row, of_row),
        ),
    )(*scalars, *given)
    return dquery, OfRows(*found)


def _rows(*refs, keys: int, windowed: bool):
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
        return jnp.where(seen_keys, found, MASKED), seen_keys

    @pl.when(step == 0)
    def _start():
        sums[...] = jnp.zeros_like(sums)
        peak[...] = jnp.full_like(peak, MASKED)
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


def _by_keys(inputs: Inputs, sizes: Sizes, found: OfRows, numerics: Numerics):
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
        partial(_keys, windowed=inputs.first is not None),
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


def _keys(begin_ref, end_ref, *refs, windowed: bool):
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
