"""Attention within a layer of the forward: projections, the cache, and what attends to what.

Shapes: B sequences, T tokens each, N = B T rows, H query heads, Kv key heads, G = H / Kv, D size of
a query and key, E of a value, S key positions.

Latent attention (MLA) is computed in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section
2.1.2), in sampler and learner alike. A head's query is multiplied by the head's part of the matrix
that would make keys of the compressed state c, and so compared with c itself:

    q_plain . (W_k c) = (W_k' q_plain) . c

Then all heads share one key, (c, rotated key), and one value, c, which are what the cache keeps. A
head's part of the matrix for values comes after attention. One arithmetic serves prefill, decoding
and training: in the form that multiplies keys out, other sums would be rounded.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from tim_jax import kernels
from tim_jax.kernels import formulas
from tim_jax.kernels.families import elementwise
from tim_jax.model import packing as packed
from tim_jax.model.config import LatentConfig
from tim_jax.model.execution import Execution
from tim_jax.model.packing import Packing
from tim_jax.model.rope import RopeConfig
from tim_jax.model.weights import Weights
from tim_jax.numerics import strict
from tim_jax.placement import collectives

_LATENT_NORM_EPS = 1e-6  # of the norms of compressed states, whatever `rms_norm_eps` is


@struct.dataclass
class LayerCache:
    """Keys and values of one layer, laid out so that attention needs no transpose.

    In blocks of `numerics.kv_block` positions (`kernels.in_blocks`), `key` is
    [B, S / block, Kv, D, block] and `value` [B, S / block, Kv, block, E]. With pages, they are
    [pages, Kv, D, block] and [pages, Kv, block, E], and row b has its position s in page
    `pages[b, s // block]`.
    """

    key: jax.Array  # compute dtype [B, Kv, D, S]
    value: jax.Array  # compute dtype [B, Kv, S, E]
    pages: jax.Array | None = None  # i32[B, S / block]

    @property
    def span(self) -> int:
        """S, the positions that a row has room for."""
        if self.pages is not None:
            return self.pages.shape[1] * self.key.shape[-1]
        return self.key.shape[-1] * (self.key.shape[1] if self.key.ndim == 5 else 1)


Cache = tuple[LayerCache, ...]


def attended(
    normed: jax.Array,
    w: Weights,
    angles: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    cache: LayerCache | None,
    window: jax.Array | None,
    *,
    execution: Execution,
    shape: tuple[int, int],
    packing: Packing | None = None,
) -> tuple[jax.Array, LayerCache]:
    """What the heads of a layer make of rows, and the keys and values.

    Args:
      normed: [N, d], in the compute dtype.
      w: the layer's weights; with a tensor axis this device's columns.
      angles: cos and sin f32[N, D / 2] of the rows' positions.
      positions: i32[B, T].
      cache: the keys and values of the positions before, into which the rows' own are written.
      window: i32[], how many positions a token attends to, or None.
      execution: its numerics are those of this device.
      shape: B, T.
      packing: the sequences that lie in the rows, where these are no B sequences of T tokens;
        without a cache.

    Returns:
      [N, heads x size of a head's output], for the projection after attention.
    """
    into = None  # the cache, if the projection writes it
    if execution.config.latent is None:
        into = cache if kernels.projects_into_cache(execution.numerics) else None
        query, key, value = _projected(normed, w, angles, execution, into, positions)
    else:
        query, key = _absorbed(normed, w, angles, execution)
        value = None
    attend = partial(_attend, window=window, execution=execution, written=into is not None)
    out, keys_values = attend(query, key, value, positions, cache, shape=shape, packing=packing)
    if execution.config.latent is None:
        return out.reshape(out.shape[0], -1), keys_values
    return _values_of_heads(out, w, execution), keys_values


def _projected(normed, w, angles, execution: Execution, into: LayerCache | None, positions):
    """The joint projection, split into normed, rotated, scaled q, k and v, [N, heads, D] each.

    With `into` its keys and values [pages, ...] are in place of k and v, which are written there.
    """
    config, numerics, placement = execution.config, execution.numerics, execution.placement
    ops = collectives.family(numerics, placement)
    names = (("bias", "qkv_bias"), ("q_norm", "q_norm"), ("k_norm", "k_norm"))
    heads, kv_heads = (n // placement.tensor for n in (config.num_heads, config.num_kv_heads))
    weight = collectives.matrix(w["qkv"], numerics=numerics, placement=placement)
    project = ops.project
    if into is not None:
        project = partial(kernels.project_into, (into.key, into.value), positions, into.pages)
    return project(
        ops.dot(normed, weight, numerics=numerics),
        angles[0],
        angles[1],
        {name: w[key] for name, key in names if key in w},
        heads=kernels.Heads(heads, kv_heads, config.head_dim),
        eps=config.rms_norm_eps,
        numerics=numerics,
    )


def _absorbed(normed, w, angles, execution: Execution):
    """Latent attention's scaled queries [N, H, D] and the key that all heads share, [N, 1, D]."""
    config, numerics, placement = execution.config, execution.numerics, execution.placement
    sizes = config.latent
    assert sizes is not None
    ops = collectives.family(numerics, placement)
    norm = partial(ops.norm, eps=_LATENT_NORM_EPS, numerics=numerics)

    def product(x, name):
        weight = collectives.matrix(w[name], numerics=numerics, placement=placement)
        return ops.dot(x, weight, numerics=numerics)

    if sizes.q_lora_rank:
        state = _rounded(product(normed, "q_down"), execution)
        query = product(norm(state, w["q_down_norm"]), "q_up")
    else:
        query = product(normed, "q")
    scale = _score_scale(sizes, config.rope)
    query = query.reshape(-1, config.num_heads, sizes.qk_head_dim)
    state = product(normed, "kv_down")
    plain, turned, state, key = _parted(query, state, angles, scale, execution)
    up = collectives.stack(w["k_up"], placement)
    query = ops.dots(plain.transpose(1, 0, 2), up, numerics=numerics)
    query = _rounded(query.transpose(1, 0, 2), execution, scale)
    state = norm(state, w["kv_norm"])
    return jnp.concatenate([query, turned], axis=-1), jnp.concatenate(
        [state[:, None, :], key], axis=-1
    )


def _score_scale(latent: LatentConfig, rope: RopeConfig) -> float:
    """What scores are multiplied by: D^-1/2 of a query's D numbers, and YaRN's temperature.

    With `mscale_all_dim` m and `factor` s of YaRN the latter is (0.1 m ln(s) + 1)^2, as DeepSeek-V2
    has it (its section 3.1.4).
    """
    plain = latent.qk_head_dim**-0.5
    if rope.kind != "yarn" or rope.mscale_all_dim is None or rope.factor is None:
        return plain
    return plain * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def _parted(query, state, angles, scale: float, execution: Execution):
    """Queries f32[N, H, D] and states f32[N, D] in their parts, rotated, rounded to compute.

    A head's query without rotation, its scaled rotated part, the compressed state before its norm,
    and the rotated key [N, 1, D].
    """
    sizes, dtype = execution.config.latent, execution.numerics.dtype
    assert sizes is not None

    def formula(query, state, cos, sin, maths):
        plain, turned = jnp.split(query, [sizes.qk_nope_head_dim], axis=-1)
        state, key = jnp.split(state, [sizes.kv_lora_rank], axis=-1)
        turned, key = (formulas.rotate(x, cos, sin, maths=maths) for x in (turned, key[:, None, :]))
        return tuple(strict.rounded(x, dtype) for x in (plain, turned * scale, state, key))

    return elementwise(formula, execution.numerics)(query, state, *angles)


def _rounded(x: jax.Array, execution: Execution, scale: float | None = None) -> jax.Array:
    """float32, multiplied by `scale` if there is one, in the compute dtype."""
    dtype = execution.numerics.dtype

    def formula(x, maths):
        del maths
        return strict.rounded(x if scale is None else x * scale, dtype)

    return elementwise(formula, execution.numerics)(x)


def _values_of_heads(mixed, w, execution: Execution):
    """What heads make of their mixtures [N, H, E] of compressed states, side by side."""
    numerics, placement = execution.numerics, execution.placement
    up = collectives.stack(w["v_up"], placement)
    values = kernels.family(numerics).dots(mixed.transpose(1, 0, 2), up, numerics=numerics)
    return _rounded(values.transpose(1, 0, 2).reshape(mixed.shape[0], -1), execution)


def _attend(
    query, key, value, positions, cache, *, window, execution: Execution, written, shape, packing
):
    """Lays out heads, writes the cache if there is one, and attends.

    Rows in, [N, heads, D] each, and [N, heads, E] out. Without a `value` it is the first E numbers
    of the key, as it is read back from the cache. `written`: key and value are those of the cache,
    with the rows in them.
    """
    config, numerics = execution.config, execution.numerics
    batch, length = shape
    attention = config.attention
    kv_heads = query.shape[1] // (config.num_heads // attention.key_heads)
    laid_out = None if packing is not None else _laid_out(query, shape, kv_heads)
    if not written:
        key, value = _read_back(key, value, (batch, length, kv_heads), execution)
    if cache is None:
        new = _keys_values(key, value)
    else:
        if not written:
            options = {"numerics": numerics, "pages": cache.pages}
            key, value = kernels.written(
                (cache.key, cache.value), (key, value), positions, **options
            )
        new = LayerCache(key, value, pages=cache.pages)
    over = partial(_over_keys, numerics=numerics, aligned=cache is None)
    if packing is None:
        return over(laid_out, new, positions, window, shape=shape), new

    def of_sequences(query, key, value, positions, window):
        size = query.shape[:2]
        own = _laid_out(query, size, kv_heads), _keys_values(key, value)
        out = over(*own, positions, window, shape=size, runs=1)  # rows may be part of a sequence
        return out.reshape(*size, *out.shape[1:])

    grouping = packed.grouping(numerics.family)
    out = packed.attended(query, key[0], value[0], window, packing, of_sequences, grouping)
    return out, new


def _read_back(key, value, shape: tuple[int, int, int], execution: Execution):
    """Rows of keys and values as they are read back from the cache, [B, T, Kv, size]."""
    attention, numerics = execution.config.attention, execution.numerics
    key = key.reshape(*shape, attention.key_dim)
    if value is None:
        key = kernels.cached(key, numerics=numerics)
        return key, key[..., : attention.value_dim]
    value = value.reshape(*shape, attention.value_dim)
    return tuple(kernels.cached(x, numerics=numerics) for x in (key, value))


def _laid_out(query, shape: tuple[int, int], kv_heads: int):
    """Queries [B, T, H, D] or [B * T, H, D] as attention takes them, [B, Kv, T G, D]."""
    batch, length = shape
    heads, size = query.shape[-2:]
    group = heads // kv_heads
    query = query.reshape(batch, length, kv_heads, group, size).transpose(0, 2, 1, 3, 4)
    return query.reshape(batch, kv_heads, length * group, size)


def _keys_values(key, value) -> LayerCache:
    """Keys and values [B, T, Kv, size] as attention takes them."""
    return LayerCache(key=key.transpose(0, 2, 3, 1), value=value.transpose(0, 2, 1, 3))


def _over_keys(
    query, keys_values: LayerCache, positions, window, *, numerics, shape, aligned, **options
):
    """Attention of queries [B, Kv, T G, D]: [B * T, H, E] in the compute dtype."""
    batch, length = shape
    kv_heads, group = query.shape[1], query.shape[2] // length
    out = kernels.attention(
        query,
        keys_values.key,
        keys_values.value,
        jnp.repeat(positions, group, axis=1),
        window=window,
        pages=keys_values.pages,
        numerics=numerics,
        aligned=aligned,
        **options,
    )
    out = strict.rounded(out, numerics.dtype)
    out = out.reshape(batch, kv_heads, length, group, -1)
    return out.transpose(0, 2, 1, 3, 4).reshape(batch * length, kv_heads * group, -1)
