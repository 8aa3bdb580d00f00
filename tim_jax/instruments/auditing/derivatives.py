"""The gradients of the forward's units written out in float64 NumPy: what a compiler must find.

Each function takes a unit's inputs with a leading axis B of examples, its weights without, and the
cotangent of its output. It returns the gradients of the weights, one for each example, and of the
inputs. `c` is the cotangent of an output, `d_x` that of x.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Gradients = tuple[tuple[Array, ...], tuple[Array, ...]]  # of the weights, of the inputs


def norm(weights: tuple[Array], inputs: tuple[Array], c: Array, *, eps: float) -> Gradients:
    """RMSNorm of x [B, N, d] with weight [d]."""
    (weight,), (x,) = weights, inputs
    d_x, d_weight = _norm(x, weight, c, eps)
    return (d_weight.sum(1),), (d_x,)


def _norm(x: Array, weight: Array, c: Array, eps: float) -> tuple[Array, Array]:
    """Gradients of x * f * weight with f = (mean(x^2) + eps)^-1/2: of x, and of weight by row."""
    factor = (np.mean(x * x, axis=-1, keepdims=True) + eps) ** -0.5
    normed, scaled = x * factor, c * weight
    d_x = factor * (scaled - normed * np.mean(scaled * normed, axis=-1, keepdims=True))
    return d_x, c * normed


def dot(weights: tuple[Array], inputs: tuple[Array], c: Array) -> Gradients:
    """x [B, N, K] @ weight [K, M]."""
    (weight,), (x,) = weights, inputs
    return (x.swapaxes(1, 2) @ c,), (c @ weight.T,)


def dot_add(weights: tuple[Array, Array], inputs: tuple[Array, Array], c: Array) -> Gradients:
    """residual + (x @ weight + bias), with weights (weight, bias) and inputs (x, residual)."""
    weight, _ = weights
    x, _ = inputs
    d_weight, d_x = dot((weight,), (x,), c)
    return (*d_weight, c.sum(1)), (*d_x, c)


def gated_dot(weights: tuple[Array, Array], inputs: tuple[Array], c: Array) -> Gradients:
    """silu(gate) * up of (gate, up) = x @ weight [K, 2 M] + bias."""
    weight, bias = weights
    gate, up = np.split(inputs[0] @ weight + bias, 2, axis=-1)
    sigmoid = 1 / (1 + np.exp(-gate))
    d_gate = c * up * sigmoid * (1 + gate * (1 - sigmoid))
    joint = np.concatenate([d_gate, c * gate * sigmoid], axis=-1)
    d_weight, d_x = dot((weight,), inputs, joint)
    return (*d_weight, joint.sum(1)), d_x


def project(
    weights: tuple[Array, Array, Array],
    inputs: tuple[Array],
    c: Array,
    *,
    angles: Array,
    heads: tuple[int, int],
    eps: float,
) -> Gradients:
    """Query, key and value of y [B, N, (H + 2 Kv) D], with weights (bias, q_norm, k_norm).

    Query and key are normed and then turned by angles [N, D / 2]; the query is scaled by D^-1/2.
    heads: H and Kv.
    """
    bias, q_norm, k_norm = weights
    size = q_norm.shape[0]
    split = np.cumsum([size * heads[0], size * heads[1]])
    outer, inner = (
        [part.reshape(*part.shape[:2], -1, size) for part in np.split(joint, split, axis=-1)]
        for joint in (c, inputs[0] + bias)
    )
    d_query, of_query = _norm(inner[0], q_norm, _turned(outer[0] * size**-0.5, -angles), eps)
    d_key, of_key = _norm(inner[1], k_norm, _turned(outer[1], -angles), eps)
    parts = (d_query, d_key, outer[2])
    joint = np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=-1)
    return (joint.sum(1), of_query.sum((1, 2)), of_key.sum((1, 2))), (joint,)


def _turned(x: Array, angles: Array) -> Array:
    """x [B, N, heads, D] turned by angles [N, D / 2], halves paired; by -angles it is undone."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(weights: tuple[()], inputs: tuple[Array, Array, Array], c: Array) -> Gradients:
    """Causal attention of query [B, Kv, N, D] over key [B, Kv, D, S] and value [B, Kv, S, D].

    N / S rows of a query belong to one token, tokens major (Dao et al. 2022, appendix B.2).
    """
    query, key, value = inputs
    rows, keys = query.shape[2], key.shape[3]
    hidden = np.arange(keys)[None, :] > (np.arange(rows) // (rows // keys))[:, None]
    scores = np.where(hidden, -np.inf, query @ key)
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    d_chances = c @ value.swapaxes(2, 3)
    d_scores = chances * (d_chances - np.sum(d_chances * chances, axis=-1, keepdims=True))
    d_query, d_key = d_scores @ key.swapaxes(2, 3), query.swapaxes(2, 3) @ d_scores
    return weights, (d_query, d_key, chances.swapaxes(2, 3) @ c)


def log_prob(
    weights: tuple[Array],
    inputs: tuple[Array],
    c: Array,
    *,
    tokens: np.ndarray[Any, np.dtype[np.int64]],
    temperature: float,
) -> Gradients:
    """log softmax(x @ head / temperature) at tokens [N], of x [B, N, d] and head [d, V]."""
    scaled = inputs[0] @ weights[0] / temperature
    chances = np.exp(scaled - scaled.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    chosen = np.arange(scaled.shape[-1]) == tokens[:, None]
    return dot(weights, inputs, c[..., None] * (chosen - chances) / temperature)
