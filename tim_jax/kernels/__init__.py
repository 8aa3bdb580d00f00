"""The same few operations in several families, one family a module."""

from types import ModuleType

import jax

from tim_jax.kernels import caching, flash, native, split_kv, tiles
from tim_jax.numerics import Numerics

_FAMILIES = {"tiles": tiles, "native": native}


def family(numerics: Numerics) -> ModuleType:
    """The module with fence, total, peak, unit, dot and attention for these numerics."""
    return _FAMILIES[numerics.family]


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
    aligned: bool,
) -> jax.Array:
    """Attention by the family, or by another kernel or cut along the keys, as the numerics say."""
    ops = family(numerics)
    if numerics.attention != "family":
        interpret = numerics.attention == "flash_interpreted"
        return flash.attention(query, key, value, positions, numerics=numerics, interpret=interpret)
    if numerics.order.split_kv and not aligned:
        return split_kv.attention(query, key, value, positions, numerics=numerics, fence=ops.fence)
    return ops.attention(query, key, value, positions, numerics=numerics, aligned=aligned)


def cached(x: jax.Array, *, numerics: Numerics) -> jax.Array:
    """Keys or values as the cache gives them back; see `caching.cached`."""
    return caching.cached(x, numerics=numerics, ops=family(numerics))
