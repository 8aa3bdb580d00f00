"""Sequences of different lengths in one buffer of rows, without padding between them.

Products, norms and everything else that works row by row need not know where a sequence begins.
Attention does. It takes the sequences out of the buffer again, a few of about the same length at a
time, and computes them by the kernel that serves padded batches. A row's bits depend neither on the
rows beside it nor on padding after its sequence, so they are those of a padded batch.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

# (query [g, W, H, D], key [g, W, Kv, D], value [g, W, Kv, E], positions i32[g, W], window i32[] or
# None) -> [g, W, H, E]
Attend = Callable[..., jax.Array]

_GROUP_ROWS = 512  # that attention takes out of the buffer at a time, unless a sequence has more
_SHORTEST = 64  # sequences that are shorter are computed as if they had this many tokens
_CLASSES = 8  # of lengths, at most


@struct.dataclass
class Packing:
    """Where K sequences lie in a buffer of N rows: one after the other, the longest first."""

    starts: jax.Array  # i32[K], ascending
    lengths: jax.Array  # i32[K], descending; 0 where there are fewer sequences than K
    longest: int = struct.field(pytree_node=False)  # that a sequence may have


def classes(longest: int) -> list[int]:
    """Lengths that attention is compiled for, descending from `longest` by halves."""
    lengths = [longest]
    while len(lengths) < _CLASSES and lengths[-1] >= 2 * _SHORTEST:
        lengths.append(-(-lengths[-1] // 2))
    return lengths


def attended(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: jax.Array | None,
    packing: Packing,
    attend: Attend,
) -> jax.Array:
    """Attention of each sequence of the buffer to itself.

    Args:
      query: [N, H, D], in the compute dtype.
      key: [N, Kv, D].
      value: [N, Kv, E].
      window: i32[], how many positions a token attends to, or None.
      attend: of whole sequences that begin at position 0; differentiable.

    Returns:
      [N, H, E]; of rows that belong to no sequence meaningless, but finite.
    """

    def forward(query, key, value, window, packing):
        rows = query.shape[0]
        arrays = _with_room((query, key, value), packing)

        def group(out, starts, lengths, width):
            parts = (_take(x, starts, width) for x in arrays)
            return _put(out, attend(*parts, _positions(lengths, width), window), starts)

        shape = (rows + packing.longest, query.shape[1], value.shape[2])
        empty = jnp.zeros(shape, query.dtype)
        return _by_length(group, empty, packing, rows)[:rows]

    def backward(residuals, cotangent):
        *arrays, window, packing = residuals
        rows = cotangent.shape[0]
        arrays = _with_room(arrays, packing)
        (cotangent,) = _with_room((cotangent,), packing)

        def group(gradients, starts, lengths, width):
            positions = _positions(lengths, width)
            parts = [_take(x, starts, width) for x in arrays]
            inside = jnp.arange(width)[None, :] < lengths[:, None]
            own = jnp.where(inside[..., None, None], _take(cotangent, starts, width), 0)
            of_parts = jax.vjp(lambda *parts: attend(*parts, positions, window), *parts)[1]
            made = of_parts(own)
            return tuple(_put(x, g, starts) for x, g in zip(gradients, made, strict=True))

        empty = tuple(jnp.zeros_like(x) for x in arrays)
        gradients = _by_length(group, empty, packing, rows)
        return (*(x[:rows] for x in gradients), None, None)

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *args: (forward(*args), args), backward)
    return call(query, key, value, window, packing)


def _by_length(group: Callable, carry, packing: Packing, nowhere: int):
    """Folds `group` (carry, starts i32[g], lengths i32[g], width) over the sequences, in order.

    A group has sequences of one class of lengths. What is missing to g starts at `nowhere`.
    """
    widths = classes(packing.longest)
    bounds = jnp.asarray([*widths[1:], 0], jnp.int32)
    ends = jnp.sum(packing.lengths[None, :] > bounds[:, None], axis=1, dtype=jnp.int32)
    first = jnp.int32(0)
    for index, width in enumerate(widths):
        size = min(max(_GROUP_ROWS // width, 1), packing.starts.shape[0])

        def some(number, carry, first=first, end=ends[index], width=width, size=size):
            at = first + number * size + jnp.arange(size)
            there = at < end
            starts = jnp.where(there, packing.starts.at[at].get(mode="clip"), nowhere)
            lengths = jnp.where(there, packing.lengths.at[at].get(mode="clip"), 0)
            return group(carry, starts, lengths, width)

        groups = (ends[index] - first + size - 1) // size
        carry = jax.lax.fori_loop(0, groups, some, carry)
        first = ends[index]
    return carry


def _with_room(arrays, packing: Packing) -> list[jax.Array]:
    """Arrays [N, ...] with rows behind the last, so that every slice of the longest fits."""
    return [
        jnp.pad(x, ((0, packing.longest), *((0, 0) for _ in range(x.ndim - 1)))) for x in arrays
    ]


def _positions(lengths: jax.Array, width: int) -> jax.Array:
    """i32[g, W], of the rows of sequences; 0 behind their ends, so that nothing is attended to."""
    at = jnp.arange(width, dtype=jnp.int32)[None, :]
    return jnp.where(at < lengths[:, None], at, 0)


def _take(x: jax.Array, starts: jax.Array, width: int) -> jax.Array:
    """[g, W, ...] of [N, ...]."""
    some = partial(jax.lax.dynamic_slice_in_dim, slice_size=width, axis=0)
    return jnp.stack([some(x, start) for start in starts])


def _put(x: jax.Array, rows: jax.Array, starts: jax.Array) -> jax.Array:
    """`x` with [g, W, ...] in the places that `_take` takes.

    One after the other: what is behind a sequence's end is overwritten by the next.
    """
    for own, start in zip(rows, starts, strict=True):
        x = jax.lax.dynamic_update_slice_in_dim(x, own, start, axis=0)
    return x
