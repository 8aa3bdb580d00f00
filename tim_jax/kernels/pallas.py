"""What the Pallas families share: padding, gradients, and refusals by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from tim_jax.errors import InputError
from tim_jax.numerics import Numerics

PLATFORMS: Mapping[str, str] = MappingProxyType({"pallas_gpu": "gpu", "pallas_tpu": "tpu"})
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


def with_gradient(kernel: Callable, plain: Callable) -> Callable:
    """`kernel` between fences; its gradient is that of `plain`, taken at the same inputs.

    The fences are for interpret mode, where a kernel is ordinary code that could be fused; around a
    real kernel they cost nothing.
    """

    def forward(*args):
        return fence(kernel(*fence(args)))

    def backward(args, cotangent):
        return jax.vjp(plain, *fence(args))[1](cotangent)

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *args: (forward(*args), args), backward)
    return call


def divides(tile: int, size: int, what: str, name: str) -> None:
    """Raises InputError unless `tile` divides `size`; `name` is the tile's place in Numerics."""
    if size % tile == 0:
        return
    fitting = tile
    while size % fitting:
        fitting //= 2
    raise InputError(
        f"numerics: {name} = {tile} does not divide {what} of {size}; the largest power of two that"
        f" does is {fitting}" + ("" if fitting >= 16 else ', too small for a tile: use family "tiles"')
    )


def check_platform(numerics: Numerics) -> None:
    """Raises InputError where these kernels cannot run: known before anything is compiled."""
    wanted = PLATFORMS.get(numerics.family)
    if wanted is None or numerics.interpret:
        return
    found = _platform()
    if found != wanted:
        raise InputError(
            f"numerics: family {numerics.family!r} needs a {wanted.upper()}, the default device is"
            f" of platform {found!r}; use family \"tiles\" there, or interpret mode for tests"
        )


def _platform() -> str:
    """That of the abstract device one lowers for, if there is one, else of the default device."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    found = jax.default_backend() if device is None else device.platform
    return "gpu" if found in ("cuda", "rocm") else found
