"""Rates of products by tile, at the shapes of the 1.7B model, beside XLA's.

A program holds as many products, each with a matrix of its own, as exceed the device's cache: a
single small one would be over before the host has launched the next.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import bench_common as common
import jax
import jax.numpy as jnp
from gates import CANDIDATES, MOSAIC, text, with_tile
from records import Case
from setting import Setting, normal, seconds

from tim_jax import kernels
from tim_jax.kernels import native
from tim_jax.numerics import Numerics

_CACHE = 2**28  # bytes of matrices in a program, several times what a cache holds
_MOST = 16  # products in a program
_SHAPES = ((2048, 4096), (2048, 12288), (6144, 2048), (2048, 151936))  # K, M
# The products with o and down, if they were cut into four pieces of the contraction: as many
# programs with as much to load. Whether that would be faster is to be known before it is built.
_PIECES = ((512, 8192), (1536, 8192))


def cases(setting: Setting) -> Iterator[Case]:
    """Few rows first: decoding is made of them."""
    if setting.smoke:
        yield Case("dot 8 x 32 x 64", partial(_measure, setting, 8, 32, 64))
        return
    for count in (64, 256, 4096, 16):
        pieces = _PIECES if count == 64 else ()
        for size, width in (*_SHAPES[: 4 if count <= 256 else 3], *pieces):
            name = f"dot {count} x {size} x {width}"
            yield Case(name, partial(_measure, setting, count, size, width))


def _measure(setting: Setting, count: int, size: int, width: int) -> dict[str, Any]:
    """Rates of every tile; one that does not compile for this device is a finding."""
    found: dict[str, Any] = {}
    copies = 2 if setting.smoke else max(2, min(_MOST, _CACHE // (2 * size * width)))
    x = normal(0, count, size, dtype=jnp.bfloat16)
    weights = [normal(1 + i, size, width, dtype=jnp.bfloat16) for i in range(copies)]
    for label, product in _products(setting).items():
        program = jax.jit(lambda x, weights, product=product: [product(x, w) for w in weights])
        try:
            taken = seconds(partial(program, x, weights), least=0.05) / copies
        except common.CompiledError:
            raise
        except Exception as error:  # a tile too large for this device, whoever notices
            found[label] = type(error).__name__
            continue
        flops, moved = 2 * count * size * width, 2 * size * (count + width) + 4 * count * width
        found[label] = f"{flops / taken / 1e12:.0f} TF/s {moved / taken / 1e12:.2f} TB/s"
    return {"products in a program": copies, **found}


def _products(setting: Setting) -> dict[str, Callable]:
    exact = setting.exact("bfloat16")
    if setting.smoke:
        return {"one tile": _dot(exact), "XLA": native.product}
    tiles = {text(tile): _dot(with_tile(exact, tile)) for tile in CANDIDATES}
    if not setting.without_mosaic:
        mosaic = setting.mosaic()
        tiles |= {f"Mosaic {text(tile)}": _dot(with_tile(mosaic, tile)) for tile in MOSAIC}
    return tiles | {"XLA": native.product}


def _dot(numerics: Numerics) -> Callable:
    return partial(kernels.family(numerics).dot, numerics=numerics)
