"""Row functions: RMSNorm, and the rotation of queries and keys."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from tim_jax.kernels.interface import Heads
from tim_jax.kernels.pallas import padded, turned
from tim_jax.kernels.pallas_gpu.call import call
from tim_jax.numerics import Numerics


def normed(x: jax.Array, weight: jax.Array, *, eps: float, numerics: Numerics) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight, one program per row; the block follows from the width."""
    rows, width = x.shape
    row = pl.BlockSpec((None, width), lambda i: (i, 0))
    return call(
        partial(_norm, eps=eps, width=width),
        numerics=numerics,
        name="norm",
        warps=4,
        grid=(rows,),
        in_specs=[row, pl.BlockSpec((width,), lambda i: (0,))],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(x.shape, numerics.dtype),
    )(x, weight)


def _norm(x_ref, weight_ref, out_ref, *, eps: float, width: int):
    at = jnp.arange(pl.next_power_of_2(width))
    inside = at < width
    x = plt.load(x_ref.at[at], mask=inside, other=0.0).astype(jnp.float32)
    weight = plt.load(weight_ref.at[at], mask=inside, other=0.0)
    mean_square = jnp.sum(x * x) * (1.0 / width)
    y = x * jax.lax.rsqrt(mean_square + eps) * weight
    plt.store(out_ref.at[at], y.astype(out_ref.dtype), mask=inside)


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
    half = heads.size // 2
    parts = y.reshape(y.shape[0], -1, 2, half)
    biases = optional["bias"].reshape(-1, 2, half) if "bias" in optional else None
    turn = partial(_turned, parts, cos, sin, biases, eps=eps, numerics=numerics)
    query = turn(optional.get("q_norm"), first=0, count=heads.query, scale=heads.size**-0.5)
    return query, turn(optional.get("k_norm"), first=heads.query, count=heads.key, scale=1.0)


def _turned(parts, cos, sin, biases, weight, *, first, count, scale, eps, numerics: Numerics):
    """Heads `first`.. of parts [N, heads, 2, D / 2], normed, rotated and scaled: [N, count, D]."""
    rows, _, _, half = parts.shape
    tile = numerics.gpu.row_tile
    parts, cos, sin = (padded(x, tile) for x in (parts, cos, sin))
    angle = pl.BlockSpec((tile, half), lambda i, h: (i, 0))
    inputs = [parts, cos, sin]
    specs = [pl.BlockSpec((tile, None, 2, half), lambda i, h: (i, h + first, 0, 0)), angle, angle]
    if biases is not None:
        inputs.append(biases)
        specs.append(pl.BlockSpec((None, 2, half), lambda i, h: (h + first, 0, 0)))
    if weight is not None:
        inputs.append(weight.reshape(2, half))
        specs.append(pl.BlockSpec((2, half), lambda i, h: (0, 0)))
    result = call(
        partial(_turn, biased=biases is not None, normed=weight is not None, scale=scale, eps=eps),
        numerics=numerics,
        name="turn",
        warps=4,
        grid=(parts.shape[0] // tile, count),
        in_specs=specs,
        out_specs=pl.BlockSpec((tile, None, 2, half), lambda i, h: (i, h, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((parts.shape[0], count, 2, half), numerics.dtype),
    )(*inputs)
    return result[:rows].reshape(rows, count, 2 * half)


def _turn(parts_ref, cos_ref, sin_ref, *refs, biased: bool, normed: bool, scale: float, eps: float):
    """One head of a tile of rows; its two halves are the pairs that turn."""
    pair = [parts_ref[:, half, :] for half in (0, 1)]
    if biased:
        pair = [
            part + jnp.broadcast_to(refs[0][half, :][None, :], part.shape)
            for half, part in enumerate(pair)
        ]
    norm = [refs[-2][half, :][None, :] for half in (0, 1)] if normed else None
    angle = cos_ref[...], sin_ref[...]
    for half, part in enumerate(turned(pair, angle, norm, eps=eps, scale=scale)):
        refs[-1][:, half, :] = part.astype(refs[-1].dtype)
