"""The operations of the forward in several families: plain XLA, exact tiles, and Pallas kernels.

`families` says what a family is, and makes "tiles" and "native"; `pallas_gpu`, `pallas_mosaic_gpu`
and `pallas_tpu` are the others.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax

from tim_jax.common.errors import InputError
from tim_jax.kernels import (
    cache,
    families,
    native,
    pallas,
    pallas_gpu,
    pallas_mosaic_gpu,
    pallas_tpu,
    tiles,
    variants,
)
from tim_jax.kernels.cache import in_blocks
from tim_jax.kernels.cache import write as written
from tim_jax.kernels.families import Heads, Kernels
from tim_jax.numerics import GPU_FAMILIES, Numerics

__all__ = ["Heads", "Kernels", "family", "in_blocks", "native", "tiles", "written"]

_FAMILIES: dict[str, Kernels] = {
    "tiles": families.TILES,
    "native": families.NATIVE,
    "pallas_gpu": pallas_gpu.KERNELS,
    "pallas_mosaic_gpu": replace(pallas_gpu.KERNELS, product=pallas_mosaic_gpu.product),
    "pallas_tpu": pallas_tpu.KERNELS,
}


def family(numerics: Numerics) -> Kernels:
    """The kernels of these numerics."""
    return _FAMILIES[numerics.family]


def check(numerics: Numerics) -> None:
    """Raises InputError where the family's kernels cannot run, before anything is compiled."""
    if numerics.family == "pallas_mosaic_gpu":
        pallas_mosaic_gpu.check(numerics)
    pallas.check_platform(numerics)


def check_blocks(matrices: Iterable[tuple[str, int, int, int]], numerics: Numerics) -> None:
    """Raises InputError for a block of keys or a matrix that a Pallas family cannot take.

    Args:
      matrices: name, inputs, outputs of each part, and parts that share a program.
    """
    family, gpu = numerics.family, numerics.gpu
    least = pallas_gpu.LEAST if family in GPU_FAMILIES else pallas_tpu.LEAST
    if numerics.kv_block < least:
        raise InputError(
            f"numerics: {family} needs a kv_block of at least {least}, got {numerics.kv_block}"
        )
    for name, size, width, parts in matrices:
        shape = size, width * parts
        if family == "pallas_tpu":
            pallas_tpu.blocks(shape, parts, numerics, name)
            continue
        least = pallas_mosaic_gpu.LEAST if family == "pallas_mosaic_gpu" else pallas_gpu.LEAST
        for tile in (gpu.experts, *gpu.matmul):
            pallas_gpu.blocks(shape, parts, tile.columns, numerics, name, least=least)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
    aligned: bool,
    window: jax.Array | None = None,
    pages: jax.Array | None = None,
    runs: int = native.RUNS,
) -> jax.Array:
    """Attention by the family, by another kernel, or cut along the keys, as the numerics say.

    With a window i32[] a row attends to this many positions up to its own; None is no such limit.
    With pages i32[B, S / block] the keys are [pages, Kv, D, block], the values
    [pages, Kv, block, D]. `runs` of aligned rows, see `tiles.attention`.
    """
    ops = family(numerics)
    options: dict[str, Any] = {"numerics": numerics, "window": window}
    if pages is not None:
        if ops.takes_pages and numerics.attention == "family":
            return ops.attention(
                query, key, value, positions, aligned=False, pages=pages, **options
            )
        key, value = cache.gathered(key, value, pages, numerics=numerics)
    if numerics.attention == "triton":
        return variants.triton_attention(query, key, value, positions, **options)
    if numerics.attention != "family":
        interpret = numerics.attention == "flash_interpreted"
        return variants.flash_attention(
            query, key, value, positions, interpret=interpret, **options
        )
    batch, heads = query.shape[:2]
    if not aligned and variants.pieces(batch, heads, key.shape[3], numerics=numerics) > 1:
        return variants.split_attention(query, key, value, positions, fence=ops.fence, **options)
    return ops.attention(query, key, value, positions, aligned=aligned, runs=runs, **options)


def projects_into_cache(numerics: Numerics) -> bool:
    """Whether `project_into` writes keys and values in the kernel that makes them."""
    narrow = numerics.precision.cache not in (None, numerics.compute_dtype)
    return numerics.family in GPU_FAMILIES and numerics.cache_write == "kernel" and not narrow


def project_into(
    caches: cache.Pair,
    positions: jax.Array,
    pages: jax.Array | None,
    *projection: Any,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`Kernels.project`, whose keys and values are `written`: the query and the caches.

    Args:
      caches, positions, pages: those of `written`.
      *projection, **options: those of `Kernels.project`, of numerics that `projects_into_cache`.
    """
    into = cache.into(caches, positions, pages=pages)
    return pallas_gpu.KERNELS.project(*projection, **options, into=into)


def cached(x: jax.Array, *, numerics: Numerics) -> jax.Array:
    """Keys or values as they are read back from the cache; see `cache.cached`."""
    return cache.cached(x, numerics=numerics, ops=family(numerics))


def operand(x: jax.Array, name: str | None, *, numerics: Numerics) -> jax.Array:
    """Rows as a quantised matrix is multiplied by them; see `cache.operand`."""
    return cache.operand(x, name, ops=family(numerics))
