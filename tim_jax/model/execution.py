"""`jax.jit` with the compiler options that the numerics ask for."""

from collections.abc import Callable
from typing import Any

import jax

from tim_jax.numerics import Numerics


def jit(function: Callable, numerics: Numerics, **options: Any) -> Callable:
    """`jax.jit(function, **options)`; XLA's own options are part of how numbers are computed.

    An option that this version of XLA does not know is refused by XLA, by name, when it compiles.
    """
    return jax.jit(function, compiler_options=dict(numerics.compiler_options) or None, **options)
