"""A contraction cut into pieces: split-K, as GPU libraries choose for few rows."""

from collections.abc import Callable

import jax


def split_k(product: Callable, x: jax.Array, weight: jax.Array, *, pieces: int) -> jax.Array:
    """x [N, K] @ weight [K, M] as a sum of `pieces` products over parts of K, ascending.

    `product` makes the float32 [N, M] of one piece. More pieces than K are K pieces.
    """
    size = -(-weight.shape[0] // pieces)
    found = None
    for start in range(0, weight.shape[0], size):
        part = product(x[:, start : start + size], weight[start : start + size])
        found = part if found is None else found + part
    assert found is not None  # K is at least 1
    return found
