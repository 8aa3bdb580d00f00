"""The products of `pallas_mosaic_gpu`, as Mosaic kernels for NVIDIA's Hopper; the rest is Triton's.

One warpgroup of a program copies blocks of the operands into shared memory (the tensor memory
accelerator does it), as many steps ahead as the tile has stages. The others each multiply 64 rows
of the tile (wgmma) and apply the epilogue to the float32 sums in their registers. What decides
bits is as in `pallas_gpu`: a sum lives in one program and runs over ascending blocks from 0,
whatever the number of rows, and rows that are missing are zeros.

Operands have 2 bytes an element: the tensor cores would round those of float32 products, which are
Triton's here as well.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.common.errors import InputError
from tim_jax.kernels import pallas_gpu
from tim_jax.kernels.pallas import Product, check_platform, compute_capability, padded
from tim_jax.numerics import MatmulTile, Numerics

LEAST = 64  # of a block in any direction
_ROWS = 64  # of a warpgroup's products
_REGISTERS = 56  # of the warpgroup that copies: with fewer that of `gated_dot` would spill
_AHEAD = 1  # steps whose products may be under way when the next one's begin
_HOPPER = "9.0"
_JAX = (0, 12)


@cache
def mosaic() -> Any:
    """Pallas' dialect. It takes 0.1 s to import, which only this family's users should wait for."""
    return importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def check(numerics: Numerics) -> None:
    """Raises InputError where these kernels cannot run, before anything is compiled."""
    check_platform(numerics)
    name = numerics.family
    if jax.__version_info__ < _JAX:
        needed = ".".join(map(str, _JAX))
        raise InputError(
            f"numerics: family {name!r} needs JAX {needed} or newer, here is {jax.__version__};"
            ' family "pallas_gpu" has no such need'
        )
    if numerics.compute_dtype != "bfloat16":
        raise InputError(
            f"numerics: family {name!r} is for bfloat16, got {numerics.compute_dtype};"
            ' family "pallas_gpu" takes any'
        )
    if numerics.interpret and jax.sharding.get_abstract_mesh().size > 1:
        raise InputError(
            f"numerics: family {name!r} is interpreted on one device, as JAX simulates no more;"
            " leave out placements on several"
        )
    found = None if numerics.interpret else compute_capability()
    if found not in (None, _HOPPER):
        raise InputError(
            f"numerics: family {name!r} is for Hopper GPUs (compute capability {_HOPPER}), here is"
            f' {found}; family "pallas_gpu" takes others'
        )


@dataclass(frozen=True)
class _Tiling:
    """How a product is divided among programs, and a program among its warpgroups."""

    rows: int  # of a tile
    columns: int  # of a tile, of each half
    block_k: int
    halves: int
    steps: int  # tiles beside each other, of a half
    contraction: int
    stages: int
    groups: int  # warpgroups that multiply
    kinds: tuple[str, ...]  # of the extras
    epilogue: Callable
    dtype: Any  # of the operands

    @property
    def part(self) -> int:
        """Rows of a warpgroup."""
        return self.rows // self.groups


def product(
    x: jax.Array, weight: jax.Array, extras: Sequence[tuple[str, jax.Array]], what: Product
) -> jax.Array:
    """A `Product` of x [N, K] and weight [K, halves * M]; see `PallasFamily`."""
    numerics, halves = what.numerics, what.halves
    if numerics.dtype.itemsize != 2:
        return pallas_gpu.product(x, weight, extras, what)
    check(numerics)
    count, width = x.shape[0], weight.shape[1] // halves
    tile = numerics.gpu.tile(count, weight.shape[1])
    columns, block_k = pallas_gpu.blocks(weight.shape, halves, tile.columns, numerics, least=LEAST)
    tiling = _Tiling(
        rows=tile.rows,
        columns=columns,
        block_k=block_k,
        halves=halves,
        steps=width // columns,
        contraction=weight.shape[0],
        stages=tile.stages,
        groups=_groups(tile),
        kinds=tuple(kind for kind, _ in extras),
        epilogue=what.epilogue,
        dtype=x.dtype,
    )
    x = padded(x, tile.rows)
    others = [padded(extra, tile.rows) if kind == "tile" else extra for kind, extra in extras]
    out = jax.ShapeDtypeStruct((x.shape[0], width), what.dtype)
    kernel = mosaic().kernel(
        partial(_kernel, tiling=tiling),
        out_type=out,
        scratch_types=[
            mosaic().SMEM(
                (tile.rows, columns), what.dtype, transforms=_transforms(columns, what.dtype)
            )
        ],
        cost_estimate=_cost(tiling, [x, weight, *others, out]),
        grid=(tiling.steps, x.shape[0] // tile.rows),
        grid_names=("columns", "rows"),
        num_threads=tiling.groups + 1,
        thread_name="group",
        kernel_name=what.name,
        interpret=mosaic().InterpretGPUParams() if numerics.interpret else None,
    )
    return kernel(x, weight, *others)[:count]


def _groups(tile: MatmulTile) -> int:
    """Warpgroups that multiply.

    Raises:
      InputError: they would not have 64 rows each.
    """
    groups = tile.warps // 4
    if groups * _ROWS != tile.rows or tile.stages <= _AHEAD:
        raise InputError(
            f"numerics: a tile of pallas_mosaic_gpu has 64 rows for every 4 warps, and at least"
            f" {_AHEAD + 1} stages; got {tile.rows} rows, {tile.warps} warps, {tile.stages} stages"
        )
    return groups


def _cost(tiling: _Tiling, arrays: Sequence[Any]) -> pl.CostEstimate:
    """What all programs do. The last of the arrays is the result."""
    rows, width = arrays[-1].shape
    programs = rows // tiling.rows * tiling.steps
    wide = tiling.columns * tiling.halves
    operands = tiling.contraction * (tiling.rows + wide) * arrays[0].dtype.itemsize
    others = sum(one.size * one.dtype.itemsize for one in arrays[2:])
    return pl.CostEstimate(
        flops=2 * rows * tiling.contraction * width * tiling.halves,
        transcendentals=0,
        bytes_accessed=programs * operands + others,
    )


def _transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    """How blocks of this many columns lie in shared memory: as the tensor cores read them."""
    size = jnp.dtype(dtype).itemsize
    swizzle = mosaic().find_swizzle(columns * size * 8)
    return mosaic().TilingTransform((8, swizzle // size)), mosaic().SwizzleTransform(swizzle)


def _block(shape: tuple[int, int], index: Callable, dtype: Any) -> Any:
    return mosaic().BlockSpec(
        shape,
        index,
        transforms=_transforms(shape[1], dtype),
        memory_space=mosaic().SMEM,
        delay_release=_AHEAD,
    )


def _kernel(x_ref, weight_ref, *refs, tiling: _Tiling):
    """Sums over K for each of the halves, then the epilogue; what every warpgroup runs."""
    *extra_refs, out_ref, stage_ref = refs
    row, column = jax.lax.axis_index("rows"), jax.lax.axis_index("columns")
    own = pl.ds(jax.lax.axis_index("group") * tiling.part, tiling.part)

    def multiply(_, x_tile, *rest):
        *weight_tiles, sums = rest
        for total, weight_tile in zip(sums, weight_tiles, strict=True):
            mosaic().wgmma(total, x_tile.at[own], weight_tile)
        mosaic().wgmma_wait(_AHEAD * tiling.halves)
        return sums

    def compute(run):
        def with_sums(*sums):
            run(sums)
            whole = tuple(total[...] for total in sums)
            _finish(whole, extra_refs, out_ref, stage_ref, own, tiling=tiling)

        shape = tiling.part, tiling.columns
        pl.run_scoped(with_sums, *[mosaic().ACC(shape, jnp.float32)] * tiling.halves)

    def columns_of(half: int):
        shape = tiling.block_k, tiling.columns
        return _block(shape, lambda k: (k, column + half * tiling.steps), tiling.dtype)

    of_rows = _block((tiling.rows, tiling.block_k), lambda k: (row, k), tiling.dtype)
    mosaic().emit_pipeline_warp_specialized(
        multiply,
        grid=(tiling.contraction // tiling.block_k,),
        memory_registers=_REGISTERS,
        in_specs=[of_rows, *map(columns_of, range(tiling.halves))],
        wg_axis="group",
        num_compute_wgs=tiling.groups,
        max_concurrent_steps=tiling.stages,
        compute_context=compute,
    )(x_ref, *[weight_ref] * tiling.halves)


def _finish(sums, extra_refs, out_ref, stage_ref, own, *, tiling: _Tiling):
    """Writes a warpgroup's part of the tile: through shared memory, from where it is copied."""
    row = jax.lax.axis_index("rows") * tiling.rows + own.start
    at = (
        pl.ds(row, tiling.part),
        pl.ds(jax.lax.axis_index("columns") * tiling.columns, tiling.columns),
    )
    extras = [
        mosaic().load(ref.at[at], layout=mosaic().Layout.WGMMA, optimized=False)
        if kind == "tile"
        else _of_columns(ref, at[1], tiling)
        for kind, ref in zip(tiling.kinds, extra_refs, strict=True)
    ]
    stage_ref[own] = tiling.epilogue(sums, *extras).astype(stage_ref.dtype)
    mosaic().commit_smem()
    mosaic().copy_smem_to_gmem(stage_ref.at[own], out_ref.at[at])
    mosaic().wait_smem_to_gmem(0)


def _of_columns(ref, at, tiling: _Tiling) -> tuple[jax.Array, ...]:
    """Of [halves, M] a row for each half, below itself as often as a warpgroup has rows."""
    layout = mosaic().Layout.WGMMA.reduce(0)
    rows = (
        mosaic().load(ref.at[half, at], layout=layout, optimized=False)
        for half in range(tiling.halves)
    )
    shape = tiling.part, tiling.columns
    return tuple(jax.lax.broadcast_in_dim(row, shape, (1,)) for row in rows)
