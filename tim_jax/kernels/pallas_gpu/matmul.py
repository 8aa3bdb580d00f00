"""Products with weight matrices: one chain of multiply-adds per element, in the order of K.

A program owns a tile of the result and runs over all of K in steps of `block_k`. Float32 products
are true float32 (no TF32).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels.pallas import divides, padded
from tim_jax.kernels.pallas_gpu.call import call
from tim_jax.numerics import Numerics


def _kernel(x_ref, *refs, halves: int, kinds: tuple[str, ...], block_k: int, epilogue: Callable):
    """Sums over K for each of `halves` weight tiles, then the epilogue."""
    weight_refs, extra_refs, out_ref = refs[:halves], refs[halves:-1], refs[-1]
    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def step(index, sums):
        at = pl.ds(index * block_k, block_k)
        x = x_ref[:, at]
        return tuple(
            total + jnp.dot(x, ref[at, :], precision=precision, preferred_element_type=jnp.float32)
            for total, ref in zip(sums, weight_refs, strict=True)
        )

    zeros = (jnp.zeros(out_ref.shape, jnp.float32),) * halves
    sums = jax.lax.fori_loop(0, x_ref.shape[1] // block_k, step, zeros)
    extras = [
        ref[...] if kind == "tile" else tuple(ref[half, :][None, :] for half in range(halves))
        for kind, ref in zip(kinds, extra_refs, strict=True)
    ]
    out_ref[...] = epilogue(sums, *extras).astype(out_ref.dtype)


def product(
    x: jax.Array,
    weight: jax.Array,
    extras: Sequence[tuple[str, jax.Array]],
    epilogue: Callable,
    dtype: Any,
    *,
    numerics: Numerics,
    name: str,
    halves: int,
) -> jax.Array:
    """The epilogue of x [N, K] @ weight [K, halves * M]; see `PallasFamily`."""
    rows, width = x.shape[0], weight.shape[1] // halves
    tile, block_k = numerics.gpu.tile(rows), numerics.gpu.block_k
    columns = max(16, tile.columns // halves)
    shape = f"a weight of shape {weight.shape[0]} x {weight.shape[1]}"
    divides(block_k, weight.shape[0], f"the rows of {shape},", "gpu.block_k")
    divides(columns, width, f"the columns of {shape}, in {halves} parts", "the gpu tile's columns")
    x = padded(x, tile.rows)
    extras = [(kind, padded(e, tile.rows) if kind == "tile" else e) for kind, e in extras]
    steps = width // columns

    def columns_of(half: int) -> pl.BlockSpec:
        return pl.BlockSpec((weight.shape[0], columns), lambda j, i: (0, j + half * steps))

    specs = {
        "tile": pl.BlockSpec((tile.rows, columns), lambda j, i: (i, j)),
        "bias": pl.BlockSpec((halves, columns), lambda j, i: (0, j)),
    }
    result = call(
        partial(
            _kernel,
            halves=halves,
            kinds=tuple(kind for kind, _ in extras),
            block_k=block_k,
            epilogue=epilogue,
        ),
        numerics=numerics,
        name=name,
        warps=tile.warps,
        stages=max(1, tile.stages * 2 // x.dtype.itemsize),
        grid=(steps, x.shape[0] // tile.rows),
        in_specs=[
            pl.BlockSpec((tile.rows, x.shape[1]), lambda j, i: (i, 0)),
            *(columns_of(half) for half in range(halves)),
            *(specs[kind] for kind, _ in extras),
        ],
        out_specs=specs["tile"],
        out_shape=jax.ShapeDtypeStruct((x.shape[0], width), dtype),
    )(x, *(weight,) * halves, *(extra for _, extra in extras))
    return result[:rows]
