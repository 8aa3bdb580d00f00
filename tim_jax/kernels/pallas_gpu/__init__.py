"""Exact kernels for GPUs, in Pallas' Triton dialect.

What makes them exact, whatever the batch, the padding and the program around them:

- A sum lives in one program and runs over ascending blocks from 0. Block sizes are constants of the
  numerics, never of the row count or the sequence length; nothing is split among programs.
- Rows are padded to a tile; a single row takes the same path as a thousand.
- Key blocks are anchored at a sequence's first token. Blocks after a row's own position add exact
  zeros, so a tile may run as far as its longest row needs.
- What is not elementwise, and every exp, log and rsqrt, is inside a kernel, where XLA cannot choose
  another order or another approximation. Elementwise sums in XLA are rounded to nearest on GPUs.

Backward passes are the plain XLA expressions at the same inputs.
"""

from tim_jax.kernels.pallas import fence
from tim_jax.kernels.pallas_gpu.attention import attention
from tim_jax.kernels.pallas_gpu.head import (
    exponentials,
    log,
    log_normaliser,
    peak,
    row_sum,
)
from tim_jax.kernels.pallas_gpu.matmul import dot, dot_add, gated_dot
from tim_jax.kernels.pallas_gpu.rows import norm, project

__all__ = [
    "attention",
    "dot",
    "dot_add",
    "exponentials",
    "fence",
    "gated_dot",
    "log",
    "log_normaliser",
    "norm",
    "peak",
    "project",
    "row_sum",
]
