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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tim_jax.kernels.pallas import padded
from tim_jax.kernels.pallas_attention import seen

BY_ROWS, BY_KEYS = "attention_gradient_rows", "attention_gradient_keys"
Gradients = tuple[jax.Array, jax.Array, jax.Array]


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


class Inputs(NamedTuple):
    """In whole tiles and blocks. `first` is None where there is no window."""

    query: jax.Array  # [B, Kv, N, D]
    cotangent: jax.Array  # [B, Kv, N, E], in the compute dtype
    product: jax.Array  # float32 [B, Kv, N]: cotangent . output
    key: jax.Array  # [B, Kv, D, S]
    value: jax.Array  # [B, Kv, S, E]
    last: jax.Array  # i32[B, N]
    first: jax.Array | None


def filled(query, key, value, positions, window, out, cotangent, *, rows: int, keys: int):
    """The arguments of a gradient in tiles of `rows` and blocks of `keys`, and their sizes."""
    batch, heads, _, size = query.shape
    product = jnp.sum(cotangent.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    last, first = seen(positions, window, rows)
    inputs = Inputs(
        query=padded(query, rows, axis=2),
        cotangent=padded(cotangent.astype(query.dtype), rows, axis=2),
        product=padded(product, rows, axis=2),
        key=padded(key, keys, axis=3),
        value=padded(value, keys, axis=2),
        last=last,
        first=first,
    )
    tiles, blocks = inputs.query.shape[2] // rows, inputs.key.shape[3] // keys
    sizes = Sizes(batch, heads, rows, keys, size, value.shape[3], tiles, blocks)
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


def dots_along(xs: list[jax.Array], ys: list[jax.Array], axes: tuple[int, int], precise):
    """The `dot_along` of what comes in parts."""
    first, *others = (dot_along(x, y, axes, precise) for x, y in zip(xs, ys, strict=True))
    return sum(others, first)


def visible(index, keys: int, last, first):
    """Which keys of block `index` rows see, bool[rows, keys], of their last and first [rows, 1]."""
    shape = last.shape[0], keys
    at = index * keys + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    found = at <= jnp.broadcast_to(last, shape)
    return found if first is None else found & (at >= jnp.broadcast_to(first, shape))
