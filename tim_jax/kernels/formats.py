"""Rounding to narrow number formats: 8-bit floats and integers, with or without a scale.

The values are those of the format, in the dtype they came in; the bytes are not saved. Casts would
do for the 8-bit floats, but XLA may drop a cast down and up again, and a cast of what is too large
gives NaN where hardware saturates.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tim_jax.kernels import formulas


@dataclass(frozen=True)
class _Float8:
    mantissa: int  # bits
    exponent: int  # of the smallest normal number
    largest: float


_FLOATS = {"float8_e4m3fn": _Float8(3, -6, 448.0), "float8_e5m2": _Float8(2, -14, 57344.0)}
_LARGEST = {"int8": 127.0, "int4": 7.0} | {name: f.largest for name, f in _FLOATS.items()}


def nearest(x: jax.Array, name: str) -> jax.Array:
    """The format's number nearest to each of x float32, ties to even, held within its range.

    Formats: "float8_e4m3fn", "float8_e5m2", "int8" (whole numbers to 127), "int4" (to 7), and the
    dtypes of `numerics`, which are not held within their range.
    """
    if name not in _LARGEST:
        return formulas.narrowed(x, name)
    x = jnp.clip(x, -_LARGEST[name], _LARGEST[name])
    if name not in _FLOATS:
        return jnp.round(x)
    kind = _FLOATS[name]
    step = 2.0 ** (kind.exponent - kind.mantissa)
    below = jnp.round(x * (1.0 / step)) * step
    normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=kind.mantissa)
    return jnp.where(jnp.abs(x) < 2.0**kind.exponent, below, normal)


def scaled(x: jax.Array, name: str, *, largest: jax.Array, fence: Callable) -> jax.Array:
    """`nearest` of x / s, times s, with s such that `largest`, of x's rank, is the format's own."""
    scale = fence(jnp.where(largest > 0, largest, 1.0) * (1.0 / _LARGEST[name]))
    inverse = fence(1.0 / scale)
    quantised = nearest(fence(x * jnp.broadcast_to(inverse, x.shape)), name)
    return fence(quantised) * jnp.broadcast_to(scale, x.shape)


def is_scaled(name: str) -> bool:
    """Whether the format is narrow enough to be used with a scale."""
    return name in _LARGEST
