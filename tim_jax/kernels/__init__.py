"""The same few operations in several families, one family a module."""

from types import ModuleType

from tim_jax.kernels import native, tiles
from tim_jax.numerics import Numerics

_FAMILIES = {"tiles": tiles, "native": native}


def family(numerics: Numerics) -> ModuleType:
    """The module with fence, total, peak, unit, dot and attention for these numerics."""
    return _FAMILIES[numerics.family]
