"""The formulas of the model that all kernel families share, in float32.

The elementwise maths (norm, rotation, gated silu), rounding, sums in a fixed order, products whose
contraction is cut into pieces, as split-K and tensor parallelism cut it, and rows added to a table
where several may go to one place: the gradient of an embedding.

The elementwise functions work on rows: the leading axes are free, sums run over the last axis.
Their inputs are of the compute dtype or float32, and the caller rounds the result.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tim_jax.numerics import Numerics, strict

Elementwise = Callable[[jax.Array], jax.Array]


class Maths(NamedTuple):
    """The sum and the elementary functions that a kernel family's formulas are made of."""

    total: Callable[..., jax.Array]  # over the last axis; `lanes` of its order
    exp: Elementwise
    log: Elementwise
    sigmoid: Elementwise
    inverse_root: Elementwise  # 1 / sqrt(x)
    uncontracted: Elementwise  # x, which is not fused with the sum that it goes into


def visible(at: jax.Array, last: jax.Array, window: jax.Array | None) -> jax.Array:
    """Whether a row at position `last` attends to the key at position `at`."""
    seen = at <= last
    return seen if window is None else seen & (at > last - window)


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, lanes: int, maths: Maths) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 (Zhang and Sennrich 2019, eq. 4)."""
    x = x.astype(jnp.float32)
    mean_square = maths.uncontracted(
        maths.total(maths.uncontracted(x * x), lanes=lanes) * (1.0 / x.shape[-1])
    )
    factor = maths.inverse_root(mean_square + eps)
    return x * factor[..., None] * jnp.broadcast_to(weight, x.shape)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, maths: Maths) -> jax.Array:
    """Rotary embedding of x [N, heads, head_dim] by angles [N, head_dim / 2], halves paired."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    halves = (
        maths.uncontracted(first * cos) - maths.uncontracted(second * sin),
        maths.uncontracted(second * cos) + maths.uncontracted(first * sin),
    )
    return jnp.concatenate(halves, axis=-1)


def narrowed(x: jax.Array, dtype: str) -> jax.Array:
    """float32 that holds the values of `dtype`; x itself, and no operation, for "float32"."""
    return x if dtype == "float32" else strict.rounded(x, jnp.dtype(dtype)).astype(jnp.float32)


def gated_silu(gate: jax.Array, up: jax.Array, *, maths: Maths) -> jax.Array:
    """silu(gate) * up."""
    return gate * maths.sigmoid(gate) * up


def fold(
    x: jax.Array, combine: Callable, *, lanes: int, neutral: float, fan: int = 64
) -> jax.Array:
    """Combines x [..., n] down to [..., lanes], in a fixed order written out as elementwise code.

    Index i goes to lane i modulo `lanes`; chunks of `lanes` are taken in ascending order, `fan` of
    them at a time. Neutral elements after the end change no bit, so a sum over 100 keys equals that
    over 200 of which 100 are masked.
    """
    padding = -x.shape[-1] % lanes
    chunks = (x.shape[-1] + padding) // lanes
    if chunks > fan:
        padding += -chunks % fan * lanes
    if padding:
        widths = [(0, 0)] * (x.ndim - 1) + [(0, padding)]
        x = jnp.pad(x, widths, constant_values=neutral)
    if chunks > fan:
        again = partial(fold, combine=combine, lanes=lanes, neutral=neutral, fan=fan)
        groups = again(x.reshape(*x.shape[:-1], -1, fan * lanes))
        return again(groups.reshape(*x.shape[:-1], -1))
    acc = x[..., :lanes]
    for start in range(lanes, x.shape[-1], lanes):
        acc = combine(acc, x[..., start : start + lanes])
    return acc


def halve(x: jax.Array, combine: Callable) -> jax.Array:
    """Combines the last axis, a power of two, to one element by halving."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = combine(x[..., :half], x[..., half:])
    return x[..., 0]


def split_k(
    product: Callable, x: jax.Array, weight: jax.Array, *, pieces: int, dtype: str = "float32"
) -> jax.Array:
    """x [N, K] @ weight [..., K, M] as a sum of `pieces` products over parts of K, ascending.

    `product` makes the float32 [N, M] of one piece. More pieces than K are K pieces. That is
    split-K, as GPU libraries choose for few rows.

    Every product and partial sum is rounded to `dtype`. In that of what is sent it is the
    row-parallel product of tensor parallelism (Shoeybi et al. 2019, section 3): each rank
    multiplies its part of K, and a ring all-reduce adds up.
    """
    size = -(-x.shape[1] // pieces)
    total = None
    for start in range(0, x.shape[1], size):
        rows = slice(start, start + size)
        part = narrowed(product(x[:, rows], weight[..., rows, :]), dtype)
        total = part if total is None else narrowed(total + part, dtype)
    assert total is not None  # K is at least 1
    return total


def add_rows(
    table: jax.Array, places: jax.Array, rows: jax.Array, *, numerics: Numerics
) -> jax.Array:
    """`table` f32[V, d] with every one of `rows` f32[N, d] added at its place i32[N] below V.

    Where `numerics.row_sums` is "sorted", the rows of one place are added in a tree that the order
    of the rows alone determines, so that the same rows give the same bits every time. A plain
    scatter does so on a CPU and a TPU. On a GPU it adds by atomic operations, in the order in which
    they happen to come.
    """
    if numerics.row_sums == "scatter":
        return table.at[places].add(rows)
    order = jnp.argsort(places, stable=True)
    places = places[order]
    changes = places[1:] != places[:-1]
    first = jnp.pad(changes, (1, 0), constant_values=True)
    last = jnp.pad(changes, (0, 1), constant_values=True)
    _, sums = jax.lax.associative_scan(_added_stretches, (first[:, None], rows[order]))
    # Only the last row of a place has its whole sum. The others go to places that there are not,
    # each to one of its own, so that no place comes twice and nothing need be atomic.
    beyond = table.shape[0] + jnp.arange(len(places), dtype=places.dtype)
    return table.at[jnp.where(last, places, beyond)].add(sums, mode="drop", unique_indices=True)


def _added_stretches(before: tuple[jax.Array, jax.Array], after: tuple[jax.Array, jax.Array]):
    """Two stretches of sorted rows: whether a place begins there, and the sum since it began."""
    (begun, earlier), (begins, later) = before, after
    return begun | begins, jnp.where(begins, later, earlier + later)
