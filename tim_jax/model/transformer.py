"""THE forward: one pure function for the sampler's prefill and decode and for the learner.

Weights flow in, hidden states and keys and values flow out. What is computed comes from
`ModelConfig`, how from `Numerics`; nothing here knows who is calling.

Shapes: B sequences, T tokens each, d hidden size, H query heads, Kv key heads, G = H / Kv,
D head size, S key positions, V vocabulary.
"""

from functools import partial
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from tim_jax import kernels
from tim_jax.kernels import formulas
from tim_jax.model import rope
from tim_jax.model.config import ModelConfig
from tim_jax.numerics import Numerics

Params = dict[str, Any]  # master weights: see model/params.py
Weights = dict[str, Any]  # compute weights: see `prepare`


@struct.dataclass
class LayerCache:
    """Keys and values of one layer, laid out so that attention needs no transpose."""

    key: jax.Array  # compute dtype [B, Kv, D, S]
    value: jax.Array  # compute dtype [B, Kv, S, D]


Cache = tuple[LayerCache, ...]


def prepare(params: Params, *, config: ModelConfig, numerics: Numerics) -> Weights:
    """Casts the master weights to the compute dtype and joins what is multiplied together.

    Done once per update, outside every loop; sampler and learner use the same result, and the
    gradient flows through it to the float32 masters. Norm weights and biases stay float32, as they
    enter float32 arithmetic.
    """
    layers, dtype = params["layers"], numerics.dtype
    stay = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "o_bias", "down_bias")
    joined = {
        "qkv": _join(layers, ("q", "k", "v")).astype(dtype),
        "gate_up": _join(layers, ("gate", "up")).astype(dtype),
        "o": layers["o"].astype(dtype),
        "down": layers["down"].astype(dtype),
    }
    if "q_bias" in layers:
        joined["qkv_bias"] = _join(layers, ("q_bias", "k_bias", "v_bias"))
    if "gate_bias" in layers:
        joined["gate_up_bias"] = _join(layers, ("gate_bias", "up_bias"))
    joined.update({name: layers[name] for name in stay if name in layers})
    head = params["embed"].T if config.tied_embeddings else params["head"]
    return {
        "embed": params["embed"].astype(dtype),
        "layers": joined,
        "final_norm": params["final_norm"],
        "head": head.astype(dtype),
    }


def unstacked(weights: Weights) -> Weights:
    """`weights` with a dictionary per layer, as the forward with a cache takes them.

    To be called before a decode loop: a slice of the stack inside it is a copy at every step.
    """
    layers = weights["layers"]
    count = jax.tree.leaves(layers)[0].shape[0]
    split = tuple(jax.tree.map(lambda w, i=index: w[i], layers) for index in range(count))
    return {**weights, "layers": split}


def _join(layers: dict, names: tuple[str, ...]) -> jax.Array:
    return jnp.concatenate([layers[name] for name in names], axis=-1)


@overload
def forward(
    weights: Weights,
    tokens: jax.Array,
    positions: jax.Array,
    cache: None = None,
    *,
    config: ModelConfig,
    numerics: Numerics,
    remat: bool = False,
) -> tuple[jax.Array, LayerCache]: ...
@overload
def forward(
    weights: Weights,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    *,
    config: ModelConfig,
    numerics: Numerics,
    remat: bool = False,
) -> tuple[jax.Array, Cache]: ...
def forward(
    weights: Weights,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache | None = None,
    *,
    config: ModelConfig,
    numerics: Numerics,
    remat: bool = False,
) -> tuple[jax.Array, LayerCache | Cache]:
    """Hidden states of `tokens`, each attending to its sequence's tokens up to itself.

    Args:
      weights: from `prepare`, and with a cache from `unstacked`.
      tokens: i32[B, T].
      positions: i32[B, T]. Without a cache they must be 0..T-1 in every row.
      cache: keys and values of the positions before; the tokens' own are written into it.
      remat: recompute each layer in the backward instead of keeping its activations.

    Returns:
      Hidden states [B, T, d] before the final norm, in the compute dtype, and the keys and values:
      the updated cache, or without one a `LayerCache` stacked over layers, [L, B, ...].
    """
    batch, length = tokens.shape
    x = _embedded(weights["embed"], tokens.reshape(-1))
    span = length if cache is None else cache[0].key.shape[3]
    angles = _angles(positions.reshape(-1), span, config)
    layer = partial(_layer, config=config, numerics=numerics, shape=(batch, length))
    if cache is None:

        def body(x, layer_weights):
            return layer(x, layer_weights, angles, positions, None)

        x, keys_values = jax.lax.scan(jax.checkpoint(body) if remat else body, x, weights["layers"])
    else:
        updated = []
        for layer_weights, old in zip(weights["layers"], cache, strict=True):
            x, new = layer(x, layer_weights, angles, positions, old)
            updated.append(new)
        keys_values = tuple(updated)
    return x.reshape(batch, length, -1), keys_values


def logits(
    weights: Weights, hidden: jax.Array, *, config: ModelConfig, numerics: Numerics
) -> jax.Array:
    """Vocabulary logits float32 [N, V] of hidden states [N, d]."""
    ops = kernels.family(numerics)
    normed = _norm(hidden, weights["final_norm"], config, numerics)
    return ops.dot(normed, weights["head"], numerics=numerics)


@jax.custom_vjp
def _embedded(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows [N, d] of the embedding table [V, d]."""
    return table[tokens]


def _embedded_backward(residuals, cotangent):
    """Sums the rows of a frequent token in float32, and rounds once."""
    table, tokens = residuals
    total = jnp.zeros(table.shape, jnp.float32).at[tokens].add(cotangent.astype(jnp.float32))
    return total.astype(table.dtype), None


_embedded.defvjp(lambda table, tokens: (table[tokens], (table, tokens)), _embedded_backward)


def _angles(positions: jax.Array, span: int, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin [N, D / 2] by position, from a table made on the host.

    A table, not `jnp.cos`: the same bits in every program, and exact to float32 rounding.
    """
    inverse_frequencies, scale = rope.frequencies(config.rope, config.head_dim)
    angles = np.arange(span, dtype=np.float32)[:, None] * inverse_frequencies[None, :]
    cos = (np.cos(angles.astype(np.float64)) * scale).astype(np.float32)
    sin = (np.sin(angles.astype(np.float64)) * scale).astype(np.float32)
    return jnp.asarray(cos)[positions], jnp.asarray(sin)[positions]


def _layer(x, w, angles, positions, cache, *, config, numerics, shape):
    """One decoder layer on rows x [B * T, d]."""
    ops = kernels.family(numerics)
    dtype = numerics.dtype
    dot = partial(ops.dot, numerics=numerics)
    normed = _norm(x, w["attn_norm"], config, numerics)
    query, key, value = _project(dot(normed, w["qkv"]), w, angles, config, numerics)
    mixed, keys_values = _attend(query, key, value, positions, cache, config, numerics, shape)
    x = _add(x, dot(mixed, w["o"]), w.get("o_bias"), numerics)
    normed = _norm(x, w["mlp_norm"], config, numerics)

    def gated(y, *bias):
        y = y + jnp.broadcast_to(bias[0], y.shape) if bias else y
        gate, up = jnp.split(y, 2, axis=-1)
        return formulas.rounded(formulas.gated_silu(gate, up), dtype)

    bias = (w["gate_up_bias"],) if "gate_up_bias" in w else ()
    hidden = ops.unit(gated, gated)(dot(normed, w["gate_up"]), *bias)
    return _add(x, dot(hidden, w["down"]), w.get("down_bias"), numerics), keys_values


def _norm(x, weight, config, numerics):
    """RMSNorm, rounded to the compute dtype."""

    def norm(x, weight, total):
        y = formulas.rms_norm(x, weight, eps=config.rms_norm_eps, total=total)
        return formulas.rounded(y, numerics.dtype)

    return _unit_with_total(norm, numerics)(x, weight)


def _unit_with_total(f, numerics):
    """The family's unit of f(*args, total): its own sum forward, the plain sum backward."""
    ops = kernels.family(numerics)
    return ops.unit(partial(f, total=ops.total), partial(f, total=kernels.native.total))


def _add(x, y, bias, numerics):
    """The residual sum, rounded to the compute dtype."""

    def add(x, y, *bias):
        y = y + jnp.broadcast_to(bias[0], y.shape) if bias else y
        return formulas.rounded(x.astype(jnp.float32) + y, numerics.dtype)

    biases = () if bias is None else (bias,)
    return kernels.family(numerics).unit(add, add)(x, y, *biases)


def _project(y, w, angles, config, numerics):
    """Splits the joint projection [N, (H + 2 Kv) D] into normed, rotated, scaled q, k and v."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim

    def project(y, cos, sin, optional, total):
        if "bias" in optional:
            y = y + jnp.broadcast_to(optional["bias"], y.shape)
        query, key, value = jnp.split(y, [heads * size, (heads + kv_heads) * size], axis=-1)
        query = query.reshape(-1, heads, size)
        key = key.reshape(-1, kv_heads, size)
        if "q_norm" in optional:
            norm = partial(formulas.rms_norm, eps=config.rms_norm_eps, total=total)
            query, key = norm(query, optional["q_norm"]), norm(key, optional["k_norm"])
        query = formulas.rotate(query, cos, sin) * size**-0.5
        key = formulas.rotate(key, cos, sin)
        value = value.reshape(-1, kv_heads, size)
        return tuple(formulas.rounded(part, numerics.dtype) for part in (query, key, value))

    optional = {"bias": w["qkv_bias"]} if "qkv_bias" in w else {}
    if "q_norm" in w:
        optional |= {"q_norm": w["q_norm"], "k_norm": w["k_norm"]}
    return _unit_with_total(project, numerics)(y, *angles, optional)


def _written(cache, rows, positions, *, axis):
    """`rows` [B, T, Kv, D] in the cache, each at its own position along `axis` of [Kv, ...].

    A write per row, in a loop: prompts of different lengths sit side by side, and what XLA:CPU
    makes of one scatter in a large program copies the cache.
    """
    batch, length = positions.shape
    rows = jnp.expand_dims(rows.reshape(batch * length, *rows.shape[2:]), axis + 1)
    at = positions.reshape(-1)

    def write(index, cache):
        start = [index // length, 0, 0, 0]
        start[axis + 1] = at[index]
        row = jax.lax.dynamic_slice_in_dim(rows, index, 1)
        return jax.lax.dynamic_update_slice(cache, row, start)

    return jax.lax.fori_loop(0, batch * length, write, cache, unroll=4)


def _attend(query, key, value, positions, cache, config, numerics, shape):
    """Lays out heads, writes the cache if there is one, and attends. Rows in, rows out."""
    batch, length = shape
    kv_heads, size = config.num_kv_heads, config.head_dim
    group = config.num_heads // kv_heads
    query = query.reshape(batch, length, kv_heads, group, size).transpose(0, 2, 1, 3, 4)
    query = query.reshape(batch, kv_heads, length * group, size)
    key = key.reshape(batch, length, kv_heads, size)
    value = value.reshape(batch, length, kv_heads, size)
    if cache is None:
        new = LayerCache(key=key.transpose(0, 2, 3, 1), value=value.transpose(0, 2, 1, 3))
    else:
        new = LayerCache(
            key=_written(cache.key, key, positions, axis=2),
            value=_written(cache.value, value, positions, axis=1),
        )
    out = kernels.family(numerics).attention(
        query,
        new.key,
        new.value,
        jnp.repeat(positions, group, axis=1),
        numerics=numerics,
        aligned=cache is None,
    )
    out = formulas.rounded(out, numerics.dtype).reshape(batch, kv_heads, length, group, size)
    return out.transpose(0, 2, 1, 3, 4).reshape(batch * length, -1), new
