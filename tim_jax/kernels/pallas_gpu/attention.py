"""Causal attention with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).

One kernel for prefill, decode and training: a tile of query rows against the key blocks of its
sequence, ascending from position 0. What a row's own position hides adds exact zeros: its weight is
exp2(-1e30 - peak) = 0, and the running peak and sums stay as they are.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels.pallas import LOG2_E, MASKED, padded
from tim_jax.kernels.pallas_gpu.call import call
from tim_jax.numerics import Numerics


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
    tiles, block = numerics.gpu, numerics.kv_block
    rows = tiles.attention_rows
    key, value = padded(key, block, axis=3), padded(value, block, axis=2)
    query = padded(query, rows, axis=2)
    positions = padded(positions, rows, axis=1, value=-1)
    length = key.shape[3]
    tile = pl.BlockSpec((None, None, rows, size), lambda i, h, b: (b, h, i, 0))
    mixed = call(
        partial(_attend, block=block),
        numerics=numerics,
        name="attention",
        warps=tiles.attention_warps,
        stages=tiles.attention_stages,
        grid=(query.shape[2] // rows, heads, batch),
        in_specs=[
            tile,
            pl.BlockSpec((None, None, size, length), lambda i, h, b: (b, h, 0, 0)),
            pl.BlockSpec((None, None, length, size), lambda i, h, b: (b, h, 0, 0)),
            pl.BlockSpec((None, rows), lambda i, h, b: (b, i)),
        ],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(query.shape, numerics.dtype),
    )(query, key, value, positions)
    return mixed[:, :, :count]


def _attend(query_ref, key_ref, value_ref, position_ref, out_ref, *, block: int):
    query, last = query_ref[...], position_ref[...]
    rows, size = query.shape
    precise = {"preferred_element_type": jnp.float32}
    if query.dtype == jnp.float32:
        precise["precision"] = jax.lax.Precision.HIGHEST

    def step(index, state):
        mixed, peak, total = state
        at = pl.ds(index * block, block)
        scores = jnp.dot(query, key_ref[:, at], **precise) * LOG2_E
        visible = (index * block + jnp.arange(block))[None, :] <= last[:, None]
        scores = jnp.where(visible, scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        shrink = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores - new_peak[:, None])
        mixed = mixed * shrink[:, None] + jnp.dot(
            weights.astype(value_ref.dtype), value_ref[at, :], **precise
        )
        return mixed, new_peak, total * shrink + jnp.sum(weights, axis=1)

    start = (
        jnp.zeros((rows, size), jnp.float32),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    blocks = jax.lax.div(jnp.max(last) + block, block)
    mixed, _, total = jax.lax.fori_loop(0, blocks, step, start)
    out_ref[...] = (mixed / total[:, None]).astype(out_ref.dtype)
