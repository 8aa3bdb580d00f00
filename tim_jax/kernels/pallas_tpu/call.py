"""The one place that calls Pallas for a TPU."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tim_jax.kernels.pallas import check_platform
from tim_jax.numerics import Numerics


def call(
    kernel: Callable,
    *,
    numerics: Numerics,
    name: str,
    grid: tuple[int, ...],
    scratch: Sequence[tuple[int, int]] = (),
    **options: Any,
) -> Callable:
    """`pl.pallas_call`, compiled by Mosaic, or interpreted if the numerics say so.

    With scratch (float32 arrays of vector memory) the last axis of the grid runs in order, as the
    steps of a sum; all other axes may run in any.
    """
    check_platform(numerics)
    parallel = len(grid) - (1 if scratch else 0)
    semantics: Any = ("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel)
    return pl.pallas_call(
        kernel,
        interpret=numerics.interpret,
        name=name,
        grid=grid,
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        **options,
    )


def precision(dtype) -> jax.lax.Precision | None:
    """True float32 products of float32 operands."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
