"""Sequences of different lengths in one buffer of rows, without padding between them.

Products, norms and everything else that works row by row need not know where a sequence begins.
Attention does. It takes the sequences out of the buffer again, a few of about the same length at a
time, and computes them by the kernel that serves padded batches. A row's bits depend neither on the
rows beside it nor on padding after its sequence, so they are those of a padded batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

# (query [g, W, H, D], key [g, W, Kv, D], value [g, W, Kv, E], positions i32[g, W], window i32[] or
# None) -> [g, W, H, E]
Attend = Callable[..., jax.Array]

_SHORTEST = 128  # sequences that are shorter are computed as if they had this many tokens
_CLASSES = 11  # of lengths, at most
_RUN_TOKENS, _RUNS = 128, 4  # positions in one of the runs of a class, and how many at most


@struct.dataclass
class Packing:
    """Where K sequences lie in a buffer of N rows: one after the other, the longest first."""

    starts: jax.Array  # i32[K], ascending
    lengths: jax.Array  # i32[K], descending; 0 where there are fewer sequences than K
    longest: int = struct.field(pytree_node=False)  # that a sequence may have


@dataclass(frozen=True)
class Grouping:
    """How attention takes sequences out of a buffer: those of a class of lengths, a few at a time.

    It is part of the program and changes no bit.
    """

    rows: int  # about so many at a time, unless a sequence has more
    unit: int = 1  # lengths that are compiled are multiples of this
    halved: int = 0  # classes of fewer tokens are followed by one of half their length, not of 2/3

    def classes(self, longest: int) -> list[int]:
        """Lengths that attention is compiled for, descending from `longest`."""
        lengths = [self._whole(longest)]
        while len(lengths) < _CLASSES and lengths[-1] >= 2 * max(_SHORTEST, self.unit):
            step = Fraction(1, 2) if lengths[-1] < self.halved else Fraction(2, 3)
            shorter = self._whole(ceil(lengths[-1] * step))
            lengths.append(min(shorter, lengths[-1] - self.unit))
        return lengths

    def size(self, width: int, sequences: int) -> int:
        """How many of the sequences of a class of lengths are taken at a time."""
        return min(max(self.rows // width, 1), sequences)

    def groups(self, lengths: np.ndarray, longest: int, sequences: int) -> list[int]:
        """How many groups of each of the `classes` there are, of a buffer's lengths."""
        widths = self.classes(longest)
        bounds = pairwise([*widths, 0])
        each = [np.count_nonzero((lengths <= high) & (lengths > low)) for high, low in bounds]
        sizes = (self.size(width, sequences) for width in widths)
        return [-(-int(count) // size) for count, size in zip(each, sizes, strict=True)]

    def _whole(self, length: int) -> int:
        return -(-length // self.unit) * self.unit


# Few rows stay in a CPU's cache, and every class takes it long to compile; classes of short sequences
# that are close to each other leave its groups half empty. Many rows keep the cores of a GPU busy,
# and are fewer launches. Whole blocks of a device's kernels need not be filled up.
_GROUPINGS = {
    **dict.fromkeys(("tiles", "native"), Grouping(512, halved=512)),
    **dict.fromkeys(("pallas_gpu", "pallas_mosaic_gpu"), Grouping(4096, 128)),
    "pallas_tpu": Grouping(4096, 256),
}


def grouping(family: str) -> Grouping:
    """What the kernels of a family are best at."""
    return _GROUPINGS[family]


def runs(width: int) -> int:
    """How many runs attention cuts the rows of a class into, see `kernels.attention`.

    Every run of every class is compiled, and a class has no sequence of less than half its length.
    """
    return min(max(width // _RUN_TOKENS, 1), _RUNS)


def attended(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: jax.Array | None,
    packing: Packing,
    attend: Attend,
    grouping: Grouping,
) -> jax.Array:
    """Attention of each sequence of the buffer to itself.

    Args:
      query: [N, H, D], in the compute dtype.
      key: [N, Kv, D].
      value: [N, Kv, E].
      window: i32[], how many positions a token attends to, or None.
      attend: of whole sequences that begin at position 0; differentiable.
      grouping: see `Grouping`.

    Returns:
      [N, H, E]; of rows that belong to no sequence meaningless, but finite.
    """

    def forward(query, key, value, window, packing):
        rows = query.shape[0]

        def group(out, starts, lengths, width):
            parts = _take((query, key, value), starts, width)
            made = attend(*parts, _positions(lengths, width), window)
            return _put((out,), (made,), starts, lengths)[0]

        shape = (rows + _room(packing, grouping), query.shape[1], value.shape[2])
        empty = jnp.zeros(shape, query.dtype)
        return _by_length(group, empty, packing, rows, grouping)[:rows]

    def backward(residuals, cotangent):
        *arrays, window, packing = residuals
        rows = cotangent.shape[0]

        def group(gradients, starts, lengths, width):
            positions = _positions(lengths, width)
            *parts, own = _take((*arrays, cotangent), starts, width)
            inside = jnp.arange(width)[None, :] < lengths[:, None]
            own = jnp.where(inside[..., None, None], own, 0)
            of_parts = jax.vjp(lambda *parts: attend(*parts, positions, window), *parts)[1]
            return _put(gradients, of_parts(own), starts, lengths)

        room = _room(packing, grouping)
        empty = tuple(jnp.zeros((rows + room, *x.shape[1:]), x.dtype) for x in arrays)
        gradients = _by_length(group, empty, packing, rows, grouping)
        return (*(x[:rows] for x in gradients), None, None)

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *args: (forward(*args), args), backward)
    return call(query, key, value, window, packing)


def _by_length(group: Callable, carry, packing: Packing, nowhere: int, grouping: Grouping):
    """Folds `group` (carry, starts i32[g], lengths i32[g], width) over the sequences, in order.

    A group has sequences of one class of lengths. What is missing to g starts at `nowhere`.
    """
    widths = grouping.classes(packing.longest)
    bounds = jnp.asarray([*widths[1:], 0], jnp.int32)
    ends = jnp.sum(packing.lengths[None, :] > bounds[:, None], axis=1, dtype=jnp.int32)
    first = jnp.int32(0)
    for index, width in enumerate(widths):
        size = grouping.size(width, packing.starts.shape[0])

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


def _room(packing: Packing, grouping: Grouping) -> int:
    """Rows behind a buffer that `_put` may fill with zeros, whatever the group."""
    count = packing.starts.shape[0]
    widths = grouping.classes(packing.longest)
    return max(grouping.size(width, count) * width for width in widths)


def _positions(lengths: jax.Array, width: int) -> jax.Array:
    """i32[g, W], of the rows of sequences; 0 behind their ends, so that nothing is attended to."""
    at = jnp.arange(width, dtype=jnp.int32)[None, :]
    return jnp.where(at < lengths[:, None], at, 0)


def _take(arrays, starts: jax.Array, width: int) -> tuple[jax.Array, ...]:
    """[g, W, ...] of each array [N, ...]; behind its last row, that row."""
    at = starts[:, None] + jnp.arange(width)[None, :]
    return tuple(x.at[at].get(mode="clip") for x in arrays)


def _put(arrays, rows, starts: jax.Array, lengths: jax.Array):
    """The arrays with the rows [g, W, ...] of sequences of these lengths in their places.

    The sequences follow each other. Behind the last there are zeros, g W rows in all: later
    groups overwrite them. So a group is one slice, which a device writes in place.
    """
    size, width = rows[0].shape[:2]
    at = starts[0] + jnp.arange(size * width)
    number = jnp.searchsorted(starts, at, side="right", method="compare_all") - 1
    position = at - starts[number]
    inside = position < lengths[number]
    position = jnp.minimum(position, width - 1)

    def put(x, own):
        own = jnp.where(inside[:, None, None], own[number, position], 0)
        return jax.lax.dynamic_update_slice_in_dim(x, own, starts[0], axis=0)

    return tuple(put(x, own) for x, own in zip(arrays, rows, strict=True))
