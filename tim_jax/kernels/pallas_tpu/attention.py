"""Causal attention with an online softmax; key blocks along the sequential axis of the grid."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels.pallas import MASKED, padded
from tim_jax.kernels.pallas_tpu.call import call, precision
from tim_jax.numerics import Numerics

_LANES = 128  # a statistic per row fills a whole register row


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
) -> jax.Array:
    """[B, Kv, N, D] in the compute dtype; the arguments are those of `tiles.attention`."""
    batch, heads, count, size = query.shape
    rows, block = numerics.tpu.attention_rows, numerics.kv_block
    key, value = padded(key, block, axis=3), padded(value, block, axis=2)
    query = padded(query, rows, axis=2)
    positions = padded(positions, rows, axis=1, value=-1)[:, :, None]
    tile = pl.BlockSpec((None, None, rows, size), lambda b, h, i, j: (b, h, i, 0))
    mixed = call(
        partial(_attend, block=block),
        numerics=numerics,
        name="attention",
        grid=(batch, heads, query.shape[2] // rows, key.shape[3] // block),
        scratch=[(rows, size), (rows, _LANES), (rows, _LANES)],
        in_specs=[
            tile,
            pl.BlockSpec((None, None, size, block), lambda b, h, i, j: (b, h, 0, j)),
            pl.BlockSpec((None, None, block, size), lambda b, h, i, j: (b, h, j, 0)),
            pl.BlockSpec((None, rows, 1), lambda b, h, i, j: (b, i, 0)),
        ],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(query.shape, numerics.dtype),
    )(query, key, value, positions)
    return mixed[:, :, :count]


def _attend(query_ref, key_ref, value_ref, last_ref, out_ref, mixed, peak, total, *, block: int):
    index = pl.program_id(3)
    last = last_ref[...]

    @pl.when(index == 0)
    def _start():
        mixed[...] = jnp.zeros_like(mixed)
        peak[...] = jnp.full_like(peak, MASKED)
        total[...] = jnp.zeros_like(total)

    @pl.when(index * block <= jnp.max(last))
    def _step():
        query, value = query_ref[...], value_ref[...]
        precise = {"precision": precision(query.dtype), "preferred_element_type": jnp.float32}
        scores = jnp.dot(query, key_ref[...], **precise)
        at = index * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(at <= jnp.broadcast_to(last, scores.shape), scores, MASKED)
        old = peak[...][:, :1]
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        shrink = jnp.exp(old - new)
        weights = jnp.exp(scores - new)
        mixed[...] = mixed[...] * shrink + jnp.dot(weights.astype(value.dtype), value, **precise)
        total[...] = total[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        peak[...] = jnp.broadcast_to(new, peak.shape)

    @pl.when(index == pl.num_programs(3) - 1)
    def _finish():
        out_ref[...] = (mixed[...] / total[...][:, :1]).astype(out_ref.dtype)
