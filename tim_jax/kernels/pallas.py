"""What the Pallas kernels share: padding, refusals by name, and elementwise maths.

The maths runs inside kernels, on tiles: float32 [rows, columns].
"""

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from tim_jax.errors import InputError
from tim_jax.numerics import Numerics

PLATFORMS: Mapping[str, str] = MappingProxyType({"pallas_gpu": "gpu", "pallas_tpu": "tpu"})
Rows = tuple[jax.Array, ...]  # each [1, columns]
MASKED = -1e30
LOG2_E = 1.4426950408889634

fence = jax.lax.optimization_barrier


def padded(x: jax.Array, tile: int, axis: int = 0, value: int | float = 0) -> jax.Array:
    """`x` with `value` appended to `axis` up to a multiple of `tile`."""
    missing = -x.shape[axis] % tile
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths, constant_values=value)


def residual_sum(product: jax.Array, residual: jax.Array, bias: Rows = ()) -> jax.Array:
    """residual + (product + bias); bias: none, or one row."""
    if bias:
        product = product + jnp.broadcast_to(bias[0], product.shape)
    return residual.astype(jnp.float32) + product


def gated(gate: jax.Array, up: jax.Array, bias: Rows = ()) -> jax.Array:
    """silu(gate) * up; bias: none, or two rows."""
    if bias:
        gate = gate + jnp.broadcast_to(bias[0], gate.shape)
        up = up + jnp.broadcast_to(bias[1], up.shape)
    return gate / (1.0 + jnp.exp(-gate)) * up


def turned(pair, angle, norm, *, eps: float, scale: float) -> tuple[jax.Array, jax.Array]:
    """The halves `pair` of a head [rows, D / 2], normed, rotated by `angle` = (cos, sin), scaled.

    `norm`: the halves of the norm's weight, [1, D / 2] each, or None.
    """
    first, second = pair
    shape = first.shape
    if norm is not None:
        squares = jnp.sum(first * first, axis=1) + jnp.sum(second * second, axis=1)
        factor = jax.lax.rsqrt(squares * (0.5 / shape[1]) + eps)
        factor = jnp.broadcast_to(factor[:, None], shape)
        first = first * factor * jnp.broadcast_to(norm[0], shape)
        second = second * factor * jnp.broadcast_to(norm[1], shape)
    cos, sin = angle
    return (first * cos - second * sin) * scale, (second * cos + first * sin) * scale


def divides(tile: int, size: int, what: str, name: str) -> None:
    """Raises InputError unless `tile` divides `size`; `name` is the tile's place in Numerics."""
    if size % tile == 0:
        return
    fits = power_of_two_in(size)
    advice = f"it can be {fits}" if fits >= 16 else 'no tile fits; family "tiles" takes any size'
    raise InputError(f"numerics: {name} = {tile} does not divide {what} of {size}; {advice}")


def power_of_two_in(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size


def check_platform(numerics: Numerics) -> None:
    """Raises InputError where these kernels cannot run: known before anything is compiled."""
    wanted = PLATFORMS.get(numerics.family)
    if wanted is None or numerics.interpret:
        return
    found = _platform()
    if found != wanted:
        raise InputError(
            f"numerics: family {numerics.family!r} needs a {wanted.upper()}, the default device is"
            f' of platform {found!r}; use family "tiles" there, or interpret mode for tests'
        )


def _platform() -> str:
    """That of the abstract device one lowers for, if there is one, else of the default device."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    found = jax.default_backend() if device is None else device.platform
    return "gpu" if found in ("cuda", "rocm") else found
