"""Decoding attention cut along the keys, as FlashDecoding and the engines built on it do.

Each piece of the keys has a softmax of its own, and the pieces are merged by their maxima and
sums. How many pieces there are follows the batch: a small batch is cut more, to fill the machine.
So a sequence's bits depend on the batch it is decoded in, which is what this imitates.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tim_jax.kernels import formulas, native
from tim_jax.numerics import Numerics

_KEYS = 8  # in the smallest piece


def pieces(batch: int, heads: int, keys: int, *, numerics: Numerics) -> int:
    """How many pieces: as many as fill `split_kv` programs, at most one per 8 keys."""
    wanted = -(-numerics.order.split_kv // (batch * heads))
    return max(1, min(wanted, -(-keys // _KEYS)))


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
    fence: Callable,
) -> jax.Array:
    """As `tiles.attention` of rows that are not aligned: same arguments, the same up to rounding.

    With m_i, l_i, o_i the maximum, sum and mix of piece i and m the largest m_i, the result is
    (sum_i exp(m_i - m) o_i) / (sum_i exp(m_i - m) l_i) (Dao et al. 2023, Flash-Decoding).
    """
    keys = key.shape[3]
    count = pieces(query.shape[0], query.shape[1], keys, numerics=numerics)
    size = -(-keys // (count * _KEYS)) * _KEYS
    found = [
        fence(_piece(query, key, value, positions, start, min(start + size, keys), numerics))
        for start in range(0, keys, size)
    ]
    peaks, totals, mixes = (jnp.stack(parts) for parts in zip(*found, strict=True))
    shares = fence(jnp.exp(peaks - jnp.max(peaks, axis=0, keepdims=True)))
    mixed = jnp.sum(mixes * shares[..., None], axis=0)
    return fence(mixed / jnp.sum(totals * shares, axis=0)[..., None])


def _piece(query, key, value, last, start, stop, numerics):
    """Maximum [B, Kv, N], sum [B, Kv, N] and mix [B, Kv, N, D] over keys start..stop."""
    visible = jnp.arange(start, stop)[None, None, :] <= last[:, :, None]
    found = native.scores(query, key[..., start:stop])
    found = jnp.where(visible[:, None], found, native.MASKED)
    peak = jnp.max(found, axis=-1)
    weights = jnp.exp(found - peak[..., None])
    weights = formulas.narrowed(weights, numerics.precision.attention_softmax)
    rounded = formulas.rounded(weights, value.dtype)
    return peak, jnp.sum(weights, axis=-1), native.mix(rounded, value[:, :, start:stop])
