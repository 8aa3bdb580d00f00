"""`pl.pallas_call` in the dialects of the Pallas families, compiled or interpreted."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

from tim_jax.kernels.pallas import check_platform
from tim_jax.numerics import Numerics


def gpu_call(
    kernel: Callable, *, numerics: Numerics, name: str, warps: int, stages: int = 1, **options: Any
) -> Callable:
    """`pl.pallas_call`, compiled by Triton, or interpreted if the numerics say so.

    A kernel that loads parts of its arguments in a loop should be given a `cost_estimate` (see
    `attention_cost`): a plan can count what is in the grid and its blocks, and nothing else.
    """
    check_platform(numerics)
    return pl.pallas_call(
        kernel,
        interpret=numerics.interpret,
        name=name,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        **options,
    )


def tpu_call(
    kernel: Callable,
    *,
    numerics: Numerics,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs: Any,
    out_shape: Any,
    scalars: int = 0,
    scratch: Sequence[tuple[int, ...]] = (),
    ordered: int | None = None,
    **options: Any,
) -> Callable:
    """`pl.pallas_call`, compiled by Mosaic, or interpreted if the numerics say so.

    The first `scalars` arguments are integers that the index maps may read. The last `ordered` axes
    of the grid run in order, as the steps of a sum; all other axes may run in any. If that is not
    given it is one axis with scratch (float32 arrays of vector memory), and none without.
    """
    check_platform(numerics)
    parallel = len(grid) - (bool(scratch) if ordered is None else ordered)
    semantics: Any = ("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel)
    return pl.pallas_call(
        kernel,
        interpret=numerics.interpret,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        **options,
    )


def attention_cost(
    *, multiplied: int, loaded: int, exponentials: int, programs: int
) -> pl.CostEstimate:
    """What programs of attention do at most, that is without the keys that a mask leaves out.

    Of one program: `multiplied` pairs of numbers of products, `loaded` and stored bytes.
    """
    return pl.CostEstimate(
        flops=2 * multiplied * programs,
        transcendentals=exponentials * programs,
        bytes_accessed=loaded * programs,
    )
