"""Exact kernels for TPUs, in Pallas' Mosaic dialect.

As on GPUs: a sum runs over ascending blocks of a fixed size, here along the last, sequential axis
of a kernel's grid with the partial sum in vector memory; rows are padded to a tile; key blocks are
anchored at a sequence's first token. Backward passes are the plain XLA expressions.
"""

from tim_jax.kernels.pallas_family import PallasFamily
from tim_jax.kernels.pallas_tpu import attention, head, matmul, rows

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
