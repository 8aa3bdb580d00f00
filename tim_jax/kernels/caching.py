"""What a KV cache of a narrower dtype does to the keys and values that go into it."""

from functools import partial

import jax
import jax.numpy as jnp

from tim_jax.kernels import formats, formulas
from tim_jax.kernels.interface import Kernels
from tim_jax.numerics import Numerics


def cached(x: jax.Array, *, numerics: Numerics, ops: Kernels) -> jax.Array:
    """Keys or values [..., D] as they come back out of the cache, in the dtype they went in.

    x itself, and no operation, where the cache has the compute dtype. Straight-through: the
    gradient is that of the identity.
    """
    if numerics.precision.cache in (None, numerics.compute_dtype):
        return x
    call = jax.custom_vjp(partial(_rounded, numerics=numerics, ops=ops))
    call.defvjp(lambda x: (_rounded(x, numerics=numerics, ops=ops), None), lambda _, g: (g,))
    return call(x)


def _rounded(x, *, numerics, ops):
    name, fence = numerics.precision.cache, ops.fence
    wide = fence(x).astype(jnp.float32)
    if numerics.precision.cache_scale == "token" and formats.is_scaled(name):
        largest = fence(ops.peak(jnp.abs(wide)))[..., None]
        wide = formats.scaled(wide, name, largest=largest, fence=fence)
    else:
        wide = formats.nearest(wide, name)
    return fence(formulas.rounded(wide, x.dtype))
