"""The one place that calls Pallas for a GPU."""

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from tim_jax.kernels.pallas import check_platform
from tim_jax.numerics import Numerics


def call(
    kernel: Callable, *, numerics: Numerics, name: str, warps: int, stages: int = 1, **options: Any
) -> Callable:
    """`pl.pallas_call`, compiled by Triton, or interpreted if the numerics say so."""
    check_platform(numerics)
    return pl.pallas_call(
        kernel,
        interpret=numerics.interpret,
        name=name,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        **options,
    )
