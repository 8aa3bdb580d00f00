"""A contraction cut into pieces, whose products are added up: by one device, or as by several."""

from collections.abc import Callable

import jax


def split_k(product: Callable, x: jax.Array, weight: jax.Array, *, pieces: int) -> jax.Array:
    """x [N, K] @ weight [..., K, M] as a sum of `pieces` products over parts of K, ascending.

    `product` makes the float32 [N, M] of one piece. More pieces than K are K pieces. That is
    split-K, as GPU libraries choose for few rows.
    """
    return _added(product, x, weight, pieces, lambda total: total)


def all_reduced(
    product: Callable, x: jax.Array, weight: jax.Array, *, ranks: int, rounded: Callable
) -> jax.Array:
    """The same with `rounded` applied to every product and every partial sum, as they travel.

    That is the row-parallel product of tensor parallelism (Shoeybi et al. 2019, section 3): each
    rank multiplies its part of K, and a ring adds up in the dtype of what is sent.
    """
    return _added(product, x, weight, ranks, rounded)


def _added(product: Callable, x: jax.Array, weight: jax.Array, pieces: int, rounded: Callable):
    size = -(-x.shape[1] // pieces)
    found = None
    for start in range(0, x.shape[1], size):
        rows = slice(start, start + size)
        part = rounded(product(x[:, rows], weight[..., rows, :]))
        found = part if found is None else rounded(found + part)
    assert found is not None  # K is at least 1
    return found
