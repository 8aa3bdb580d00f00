"""Flash attention as one Pallas kernel, for GPU and TPU; for the sampler, prefill and decode.

One program per sequence, key head and tile of rows. It walks over the keys in fixed blocks from
the sequence's first token, keeps a running maximum, sum and mix (Dao et al. 2022, algorithm 1),
and stops after the last block that any of its rows can see. Grouped queries share a key head's
program; causality and lengths are in `positions`: a row attends to keys 0..position.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels import native
from tim_jax.numerics import Numerics

_ROWS = 64  # rows of a program where there are as many
_LEAST_ROWS = 16  # what a matrix unit takes


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
    interpret: bool,
) -> jax.Array:
    """As `tiles.attention`: [B, Kv, N, D] by keys [B, Kv, D, S] and values [B, Kv, S, D].

    `positions` i32[B, N]; rows are (token, head of the group), so that decoding has the group's
    heads as rows. The result is float32 [B, Kv, N, D]. `interpret` runs the kernel's operations
    one by one on any backend: slow, for tests. No gradient: this is for samplers.
    """
    batch, heads, count, size = query.shape
    block = max(numerics.kv_block, _LEAST_ROWS)
    rows = min(_ROWS, max(_LEAST_ROWS, 1 << (count - 1).bit_length()))
    padding, keys = -count % rows, key.shape[3] + -key.shape[3] % block
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padding), (0, 0)))
    last = jnp.pad(positions, ((0, 0), (0, padding)))[..., None]
    key = jnp.pad(key, ((0, 0), (0, 0), (0, 0), (0, keys - key.shape[3])))
    value = jnp.pad(value, ((0, 0), (0, 0), (0, keys - value.shape[2]), (0, 0)))
    out = pl.pallas_call(
        partial(_kernel, block=block),
        grid=(batch, heads, (count + padding) // rows),
        in_specs=[
            pl.BlockSpec((None, None, rows, size), lambda b, h, i: (b, h, i, 0)),
            pl.BlockSpec((None, None, size, keys), lambda b, h, i: (b, h, 0, 0)),
            pl.BlockSpec((None, None, keys, size), lambda b, h, i: (b, h, 0, 0)),
            pl.BlockSpec((None, rows, 1), lambda b, h, i: (b, i, 0)),
        ],
        out_specs=pl.BlockSpec((None, None, rows, size), lambda b, h, i: (b, h, i, 0)),
        out_shape=jax.ShapeDtypeStruct(query.shape, jnp.float32),
        interpret=interpret,
    )(query, key, value, last)
    return out[:, :, :count]


def _kernel(query_ref, key_ref, value_ref, last_ref, out_ref, *, block: int):
    """query [M, D], key [D, S], value [S, D], last [M, 1] -> out [M, D]."""
    query, last = query_ref[...], last_ref[...]
    rows, size = query.shape

    def step(index, carry):
        peak, total, mixed = carry
        span = pl.ds(index * block, block)
        scores = jnp.dot(query, key_ref[:, span], **native.precise(query))
        at = index * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        visible = at <= jnp.broadcast_to(last, scores.shape)
        scores = jnp.where(visible, scores, native.MASKED)
        highest = jnp.maximum(peak, jnp.max(scores, axis=1, keepdims=True))
        shrink = jnp.exp(peak - highest)
        weights = jnp.exp(scores - jnp.broadcast_to(highest, scores.shape))
        values = value_ref[span, :]
        part = jnp.dot(weights.astype(values.dtype), values, **native.precise(values))
        total = total * shrink + jnp.sum(weights, axis=1, keepdims=True)
        return highest, total, mixed * jnp.broadcast_to(shrink, mixed.shape) + part

    first = (
        jnp.full((rows, 1), native.MASKED, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        jnp.zeros((rows, size), jnp.float32),
    )
    blocks = jnp.max(last) // block + 1
    _, total, mixed = jax.lax.fori_loop(0, blocks, step, first)
    out_ref[...] = mixed / jnp.broadcast_to(total, mixed.shape)
