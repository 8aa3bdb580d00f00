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

from tim_jax.kernels.pallas_family import PallasFamily
from tim_jax.kernels.pallas_gpu import attention, head, matmul, rows

KERNELS = PallasFamily(
    product=matmul.product,
    attend=attention.attend,
    normed=rows.normed,
    rotated=rows.rotated,
    exponentials_kernel=head.exponentials,
    row_sum_kernel=head.row_sum,
    log_kernel=head.log,
    log_normaliser_kernel=head.log_normaliser,
)
