"""The same few operations in several families, one family a module."""

from tim_jax.kernels import composed, native, pallas_gpu, pallas_tpu, tiles
from tim_jax.kernels.interface import Heads, Kernels
from tim_jax.numerics import Numerics

__all__ = ["Heads", "Kernels", "family", "native", "tiles"]

_FAMILIES: dict[str, Kernels] = {
    "tiles": composed.TILES,
    "native": composed.NATIVE,
    "pallas_gpu": pallas_gpu.KERNELS,
    "pallas_tpu": pallas_tpu.KERNELS,
}


def family(numerics: Numerics) -> Kernels:
    """The kernels of these numerics."""
    return _FAMILIES[numerics.family]
