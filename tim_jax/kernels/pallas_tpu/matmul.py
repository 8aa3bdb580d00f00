"""Products with weight matrices: partial sums in vector memory, K in ascending blocks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels.pallas import divides, padded
from tim_jax.kernels.pallas_tpu.call import call, precision
from tim_jax.numerics import Numerics


def _kernel(x_ref, *refs, halves: int, kinds: tuple[str, ...], epilogue: Callable):
    """One step of the sums of a tile; the epilogue after the last."""
    weight_refs, extra_refs = refs[:halves], refs[halves : -halves - 1]
    out_ref, sum_refs = refs[-halves - 1], refs[-halves:]
    index = pl.program_id(2)

    @pl.when(index == 0)
    def _start():
        for ref in sum_refs:
            ref[...] = jnp.zeros_like(ref)

    x = x_ref[...]
    for total, weight in zip(sum_refs, weight_refs, strict=True):
        total[...] += jnp.dot(
            x, weight[...], precision=precision(x.dtype), preferred_element_type=jnp.float32
        )

    @pl.when(index == pl.num_programs(2) - 1)
    def _finish():
        extras = [
            ref[...] if kind == "tile" else tuple(ref[h : h + 1, :] for h in range(halves))
            for kind, ref in zip(kinds, extra_refs, strict=True)
        ]
        y = epilogue([ref[...] for ref in sum_refs], *extras)
        out_ref[...] = y.astype(out_ref.dtype)


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
    rows, (size, width) = x.shape[0], (weight.shape[0], weight.shape[1] // halves)
    tiles = numerics.tpu
    shape = f"a weight of shape {size} x {weight.shape[1]}"
    divides(tiles.block_k, size, f"the rows of {shape},", "tpu.block_k")
    divides(tiles.columns, width, f"the columns of {shape}, in {halves} parts", "tpu.columns")
    x = padded(x, tiles.rows)
    extras = [(kind, padded(e, tiles.rows) if kind == "tile" else e) for kind, e in extras]
    steps = width // tiles.columns

    def columns_of(half: int) -> pl.BlockSpec:
        block = (tiles.block_k, tiles.columns)
        return pl.BlockSpec(block, lambda i, j, k: (k, j + half * steps))

    specs = {
        "tile": pl.BlockSpec((tiles.rows, tiles.columns), lambda i, j, k: (i, j)),
        "bias": pl.BlockSpec((halves, tiles.columns), lambda i, j, k: (0, j)),
    }
    result = call(
        partial(
            _kernel,
            halves=halves,
            kinds=tuple(kind for kind, _ in extras),
            epilogue=epilogue,
        ),
        numerics=numerics,
        name=name,
        grid=(x.shape[0] // tiles.rows, steps, size // tiles.block_k),
        scratch=[(tiles.rows, tiles.columns)] * halves,
        in_specs=[
            pl.BlockSpec((tiles.rows, tiles.block_k), lambda i, j, k: (i, k)),
            *(columns_of(half) for half in range(halves)),
            *(specs[kind] for kind, _ in extras),
        ],
        out_specs=specs["tile"],
        out_shape=jax.ShapeDtypeStruct((x.shape[0], width), dtype),
    )(x, *(weight,) * halves, *(extra for _, extra in extras))
    return result[:rows]
