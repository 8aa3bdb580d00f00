"""The gradient of causal attention, as kernels for GPUs and TPUs.

The equations are those of FlashAttention-2 (Dao 2023, section 3.1.2). For a row with the scores
s_j, the weights p_j = exp(s_j - log sum_i exp(s_i)), the output o = sum_j p_j v_j and the cotangent
do of that:

    dv_j = p_j do,    ds_j = p_j (do . v_j - do . o),    dq = sum_j ds_j k_j,    dk_j = ds_j q

Two kernels, and no sum that is shared among programs, so that a gradient repeats to the bit:

- by rows: a tile of rows runs over the key blocks that it sees, twice: first for the logarithm of
  the normaliser, then for dq. The forward keeps no normaliser: its kernel is the one of decoding.
- by keys: a block of keys runs over the tiles of rows that see it, ascending, for dk and dv.

Products have the compute dtype's operands and float32 sums, as those of the forward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tim_jax.kernels.pallas import padded
from tim_jax.kernels.pallas_attention import seen

BY_ROWS, BY_KEYS = "attention_gradient_rows", "attention_gradient_keys"


class Arrays(NamedTuple):
    """Arguments of `kernels.attention`, what it returned, and the cotangent of that."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    positions: jax.Array
    window: jax.Array | None
    out: jax.Array
    cotangent: jax.Array


class Sizes(NamedTuple):
    """Of a call."""

    batch: int
    heads: int
    rows: int  # of a tile
    keys: int  # of a block
    size: int  # of a query and a key
    width: int  # of a value
    tiles: int
    blocks: int


class OfRows(NamedTuple):
    """What the kernel by rows finds for the kernel by keys, float32 [B, Kv, N] each."""

    product: jax.Array  # cotangent . output
    normaliser: jax.Array  # the logarithm of the sum of the weights


class Inputs(NamedTuple):
    """In whole tiles and blocks. `first` is None where there is no window."""

    query: jax.Array  # [B, Kv, N, D]
    cotangent: jax.Array  # [B, Kv, N, E], in the compute dtype
    out: jax.Array  # [B, Kv, N, E], what attention returned
    key: jax.Array  # [B, Kv, D, S]
    value: jax.Array  # [B, Kv, S, E]
    last: jax.Array  # i32[B, N]
    first: jax.Array | None


def gradients(by_rows: Callable, by_keys: Callable, arrays: Arrays, *, rows: int, keys: int):
    """Gradients of query, key and value in their dtypes, of a device's two kernels.

    Args:
      by_rows: inputs, sizes -> the gradient of the query, and `OfRows`.
      by_keys: inputs, sizes, that -> the gradients of key and value.
      arrays: see `Arrays`.
      rows: of a tile.
      keys: of a block.
    """
    inputs, sizes = _filled(arrays, rows=rows, keys=keys)
    dquery, of_rows = by_rows(inputs, sizes)
    dkey, dvalue = by_keys(inputs, sizes, of_rows)
    count, length = arrays.query.shape[2], arrays.key.shape[3]
    return dquery[:, :, :count], dkey[..., :length], dvalue[:, :, :length]


def _filled(arrays: Arrays, *, rows: int, keys: int) -> tuple[Inputs, Sizes]:
    query, key, value, positions, window, out, cotangent = arrays
    batch, heads, _, size = query.shape
    last, first = seen(positions, window, rows)
    inputs = Inputs(
        query=padded(query, rows, axis=2),
        cotangent=padded(cotangent.astype(query.dtype), rows, axis=2),
        out=padded(out.astype(query.dtype), rows, axis=2),
        key=padded(key, keys, axis=3),
        value=padded(value, keys, axis=2),
        last=last,
        first=first,
    )
    counts = inputs.query.shape[2] // rows, inputs.key.shape[3] // keys
    sizes = Sizes(batch, heads, rows, keys, size, value.shape[3], *counts)
    return inputs, sizes


def tiles_that_see(inputs: Inputs, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """The first tile of rows that sees each block of keys, and the one after the last.

    Each i32[B, blocks]. A block that no tile sees has the last tile, and none.
    """

    def of_tiles(rows):
        return rows.reshape(sizes.batch, 1, sizes.tiles, sizes.rows)

    start = (jnp.arange(sizes.blocks, dtype=jnp.int32) * sizes.keys)[None, :, None]
    sees = jnp.max(of_tiles(inputs.last), axis=3) >= start
    if inputs.first is not None:
        sees &= jnp.min(of_tiles(inputs.first), axis=3) < start + sizes.keys
    tile = jnp.arange(sizes.tiles, dtype=jnp.int32)
    first = jnp.min(jnp.where(sees, tile, sizes.tiles - 1), axis=2)
    return first, jnp.max(jnp.where(sees, tile + 1, 0), axis=2)


def dot_along(x: jax.Array, y: jax.Array, axes: tuple[int, int], precise: dict[str, Any]):
    """Sums over axis axes[0] of x and axes[1] of y, float32."""
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(x, y, numbers, **precise)


def row_products(cotangent: jax.Array, out: jax.Array) -> jax.Array:
    """cotangent . output of each row [rows, E], float32 [rows, 1]."""
    terms = cotangent.astype(jnp.float32) * out.astype(jnp.float32)
    return jnp.sum(terms, axis=1, keepdims=True)


def dots_along(xs: list[jax.Array], ys: list[jax.Array], axes: tuple[int, int], precise):
    """The `dot_along` of what comes in parts."""
    first, *others = (dot_along(x, y, axes, precise) for x, y in zip(xs, ys, strict=True))
    return sum(others, first)
