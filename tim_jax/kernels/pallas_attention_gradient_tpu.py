"""The kernels of attention's gradient for TPUs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels import native
from tim_jax.kernels.pallas import MASKED
from tim_jax.kernels.pallas_attention_gradient import (
    BY_KEYS,
    BY_ROWS,
    Arrays,
    Inputs,
    Sizes,
    dot_along,
    tiles_that_see,
    visible,
)
from tim_jax.kernels.pallas_attention_gradient import gradients as attention_gradients
from tim_jax.kernels.pallas_calls import tpu_call
from tim_jax.numerics import Numerics

_LANES = 128  # a statistic per row fills a whole register row


def gradients(*arrays: Any, numerics: Numerics):
    """Gradients of query, key and value in their dtypes, of what `Arrays` has.

    What a step of the grid does not need is not copied.
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
    given = inputs._replace(product=inputs.product[..., None], last=inputs.last[..., None])
    if inputs.first is not None:
        given = given._replace(first=inputs.first[..., None])
    return [x for x in given if x is not None]


def _by_rows(inputs: Inputs, sizes: Sizes, numerics: Numerics):
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
        partial(_rows, keys=keys, windowed=inputs.first is not None),
        numerics=numerics,
        name=BY_ROWS,
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


def _rows(*refs, keys: int, windowed: bool):
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
        found = dot_along(query, key_ref[...], (1, 0), native.precise(query))
        seen_keys = visible(index, keys, last, first)
        return jnp.where(seen_keys, found, MASKED), seen_keys

    @pl.when(step == 0)
    def _start():
        sums[...] = jnp.zeros_like(sums)
        peak[...] = jnp.full_like(peak, MASKED)
        total[...] = jnp.zeros_like(total)

    @pl.when(needed & (step < blocks))
    def _add_up():
        found, seen_keys = scores()
        old = peak[...][:, :1]
        new = jnp.maximum(old, jnp.max(found, axis=1, keepdims=True))
        weights = jnp.where(seen_keys, jnp.exp(found - new), 0.0)
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
        found, seen_keys = scores()
        cotangent, precise = cotangent_ref[...], native.precise(cotangent_ref[...])
        weights = jnp.where(seen_keys, jnp.exp(found - peak[...][:, :1]), 0.0)
        dweights = dot_along(cotangent, value_ref[...], (1, 1), precise)
        dscores = (weights * (dweights - product_ref[...])).astype(cotangent.dtype)
        sums[...] += dot_along(dscores, key_ref[...], (1, 1), precise)

    @pl.when(step == 2 * blocks - 1)
    def _finish():
        dquery_ref[...] = sums[...].astype(dquery_ref.dtype)


def _by_keys(inputs: Inputs, sizes: Sizes, normaliser, numerics: Numerics):
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
        partial(_keys, windowed=inputs.first is not None),
        numerics=numerics,
        name=BY_KEYS,
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
    )(*tiles_that_see(inputs, sizes), *given, normaliser)


def _keys(begin_ref, end_ref, *refs, windowed: bool):
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
        scores = dot_along(query, key_ref[...], (1, 0), precise)
        first = refs[6][...] if windowed else None
        seen_keys = visible(index, scores.shape[1], last_ref[...], first)
        weights = jnp.where(seen_keys, jnp.exp(scores - normaliser_ref[...]), 0.0)
        dvalue[...] += dot_along(weights.astype(value.dtype), cotangent, (0, 0), precise)
        dweights = dot_along(cotangent, value, (1, 1), precise)
        dscores = (weights * (dweights - product_ref[...])).astype(value.dtype)
        dkey[...] += dot_along(query, dscores, (0, 0), precise)

    @pl.when(tile == pl.num_programs(3) - 1)
    def _finish():
        dkey_ref[...] = dkey[...].astype(dkey_ref.dtype)
        dvalue_ref[...] = dvalue[...].astype(dvalue_ref.dtype)
