"""Row functions: RMSNorm, and the rotation of queries and keys."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels.interface import Heads
from tim_jax.kernels.pallas import padded, turned
from tim_jax.kernels.pallas_tpu.call import call
from tim_jax.numerics import Numerics


def normed(x: jax.Array, weight: jax.Array, *, eps: float, numerics: Numerics) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight, whole rows at a time."""
    rows, width = x.shape
    x = padded(x, numerics.tpu.rows)
    tile = pl.BlockSpec((numerics.tpu.rows, width), lambda i: (i, 0))
    return call(
        partial(_norm, eps=eps),
        numerics=numerics,
        name="norm",
        grid=(x.shape[0] // numerics.tpu.rows,),
        in_specs=[tile, pl.BlockSpec((1, width), lambda i: (0, 0))],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(x.shape, numerics.dtype),
    )(x, weight[None, :])[:rows]


def _norm(x_ref, weight_ref, out_ref, *, eps: float):
    x = x_ref[...].astype(jnp.float32)
    mean_square = jnp.sum(x * x, axis=1, keepdims=True) * (1.0 / x.shape[1])
    y = x * jax.lax.rsqrt(mean_square + eps) * jnp.broadcast_to(weight_ref[...], x.shape)
    out_ref[...] = y.astype(out_ref.dtype)


def rotated(
    y: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    optional: dict[str, jax.Array],
    *,
    heads: Heads,
    eps: float,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array]:
    """Query and key of `Kernels.project`."""
    if "bias" in optional:
        y = y + optional["bias"][None, :]
    parts = y.reshape(y.shape[0], -1, 2, heads.size // 2).transpose(1, 2, 0, 3)
    turn = partial(_turned, cos=cos, sin=sin, eps=eps, numerics=numerics)
    query, key = parts[: heads.query], parts[heads.query : heads.query + heads.key]
    query = turn(query, optional.get("q_norm"), scale=heads.size**-0.5)
    return query, turn(key, optional.get("k_norm"), scale=1.0)


def _turned(parts, weight, *, cos, sin, scale, eps, numerics: Numerics):
    """Heads of parts [heads, 2, N, D / 2], normed, rotated and scaled: [N, heads, D]."""
    count, _, rows, half = parts.shape
    tile = numerics.tpu.rows
    parts, cos, sin = padded(parts, tile, axis=2), padded(cos, tile), padded(sin, tile)
    pair = pl.BlockSpec((None, 2, tile, half), lambda i, h: (h, 0, i, 0))
    angle = pl.BlockSpec((tile, half), lambda i, h: (i, 0))
    inputs, specs = [parts, cos, sin], [pair, angle, angle]
    if weight is not None:
        inputs.append(weight.reshape(2, half))
        specs.append(pl.BlockSpec((2, half), lambda i, h: (0, 0)))
    result = call(
        partial(_turn, normed=weight is not None, scale=scale, eps=eps),
        numerics=numerics,
        name="turn",
        grid=(parts.shape[2] // tile, count),
        in_specs=specs,
        out_specs=pair,
        out_shape=jax.ShapeDtypeStruct(parts.shape, numerics.dtype),
    )(*inputs)
    return result[:, :, :rows].transpose(2, 0, 1, 3).reshape(rows, count, 2 * half)


def _turn(parts_ref, cos_ref, sin_ref, *refs, normed: bool, scale: float, eps: float):
    """One head of a tile of rows; its two halves are the pairs that turn."""
    pair = parts_ref[0], parts_ref[1]
    norm = [refs[0][half : half + 1, :] for half in (0, 1)] if normed else None
    angle = cos_ref[...], sin_ref[...]
    for half, part in enumerate(turned(pair, angle, norm, eps=eps, scale=scale)):
        refs[-1][half] = part.astype(refs[-1].dtype)
