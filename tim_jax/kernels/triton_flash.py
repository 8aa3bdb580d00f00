"""Attention by the kernel of `triton_source`, through jax-triton: NVIDIA GPUs, for the sampler.

Needs the extra `triton`. jax, jax-triton and triton fit each other only in part: `check` refuses
other versions by name.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp

from tim_jax.errors import InputError
from tim_jax.numerics import Numerics

NEEDS = {"jax": ((0, 11), (0, 12)), "jax-triton": ((0, 4), (0, 5)), "triton": ((3, 7), (3, 8))}
_ROWS = 64
_LEAST = 16  # rows, keys and head sizes that a matrix unit takes


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
) -> jax.Array:
    """As `flash.attention`, by Triton; for the platform "cuda" only."""
    jax_triton = importlib.import_module("jax_triton")
    source = importlib.import_module("tim_jax.kernels.triton_source")
    batch, heads, count, size = query.shape
    rows = min(_ROWS, max(_LEAST, 1 << (count - 1).bit_length()))
    return jax_triton.triton_call(
        query,
        key,
        value,
        positions,
        kernel=source.flash_kernel,
        out_type=jax.ShapeDtypeStruct(query.shape, jnp.float32),
        grid=(batch * heads, -(-count // rows)),
        num_warps=4,
        num_stages=2,
        HEADS=heads,
        COUNT=count,
        KEYS=key.shape[3],
        SIZE=size,
        ROWS=rows,
        DIMS=max(_LEAST, 1 << (size - 1).bit_length()),
        BLOCK=max(numerics.kv_block, _LEAST),
    )


def check() -> None:
    """Raises InputError naming the first package that is missing or does not fit."""
    for name, (low, high) in NEEDS.items():
        wanted = f"{'.'.join(map(str, low))} up to, not with, {'.'.join(map(str, high))}"
        try:
            found = version(name)
        except PackageNotFoundError:
            raise InputError(
                f"Triton attention needs {name} {wanted}, which is not installed; install"
                " tim-jax[triton] (Python 3.12 or newer)"
            ) from None
        if not low <= tuple(int(part) for part in found.split(".")[:2]) < high:
            raise InputError(f"Triton attention needs {name} {wanted}; here it is {found}")
