"""Sequences of different lengths in one buffer of rows, without padding between them.

Products, norms and everything else that works row by row need not know where a sequence begins.
Attention does. It takes the sequences out of the buffer again and computes them by the kernel that
serves padded batches: on an accelerator a few whole sequences of about the same length at a time
(`Groups`), on a CPU a few rows of one sequence at a time (`Chunks`). A row's bits depend neither on
the rows beside it nor on padding after its sequence, so they are those of a padded batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

# (query [g, W, H, D], key [g, S, Kv, D], value [g, S, Kv, E], positions i32[g, W], window i32[] or
# None) -> [g, W, H, E]
Attend = Callable[..., jax.Array]

_SHORTEST = 128  # sequences that are shorter are computed as if they had this many tokens
_CLASSES = 8  # of lengths, at most
_WIDER = 4  # keys that are compiled grow by a chunk, and from this many chunks on by a quarter


@struct.dataclass
class Packing:
    """Where K sequences lie in a buffer of N rows: one after the other, the longest first."""

    starts: jax.Array  # i32[K], ascending
    lengths: jax.Array  # i32[K], descending; 0 where there are fewer sequences than K
    longest: int = struct.field(pytree_node=False)  # that a sequence may have


class Loop(NamedTuple):
    """One of attention's loops over a buffer."""

    times: int
    rows: int  # that one of its iterations computes
    keys: int  # that each of these rows is compared with


@dataclass(frozen=True)
class Groups:
    """Attention takes out whole sequences, a few of one class of lengths at a time.

    It is part of the program and changes no bit.
    """

    rows: int  # about so many at a time, unless a sequence has more
    unit: int  # lengths that are compiled are multiples of this

    def classes(self, longest: int) -> list[int]:
        """Lengths that attention is compiled for, from `longest` on, each a third shorter."""
        lengths = [self._whole(longest)]
        while len(lengths) < _CLASSES and lengths[-1] >= 2 * max(_SHORTEST, self.unit):
            shorter = self._whole(ceil(lengths[-1] * Fraction(2, 3)))
            lengths.append(min(shorter, lengths[-1] - self.unit))
        return lengths

    def size(self, width: int, sequences: int) -> int:
        """How many of the sequences of a class of lengths are taken at a time."""
        return min(max(self.rows // width, 1), sequences)

    def loops(self, lengths: np.ndarray, longest: int, sequences: int) -> list[Loop]:
        """The loops over a buffer that has room for this many sequences, and has these lengths."""
        widths = self.classes(longest)
        bounds = pairwise([*widths, 0])
        each = [np.count_nonzero((lengths <= high) & (lengths > low)) for high, low in bounds]
        sizes = [self.size(width, sequences) for width in widths]
        return [
            Loop(-(-int(count) // size), size * width, width)
            for count, size, width in zip(each, sizes, widths, strict=True)
        ]

    def fold(self, one: Callable, carry: Any, packing: Packing, nowhere: int) -> Any:
        """Folds `one` (carry, `_Group`) over the sequences, in order.

        What is missing to a whole group starts at `nowhere`.
        """
        widths = self.classes(packing.longest)
        bounds = jnp.asarray([*widths[1:], 0], jnp.int32)
        ends = jnp.sum(packing.lengths[None, :] > bounds[:, None], axis=1, dtype=jnp.int32)
        first = jnp.int32(0)
        for index, width in enumerate(widths):
            size = self.size(width, packing.starts.shape[0])

            def some(number, carry, first=first, end=ends[index], width=width, size=size):
                at = first + number * size + jnp.arange(size)
                there = at < end
                starts = jnp.where(there, packing.starts.at[at].get(mode="clip"), nowhere)
                lengths = jnp.where(there, packing.lengths.at[at].get(mode="clip"), 0)
                return one(carry, _Group(starts, lengths, width))

            groups = (ends[index] - first + size - 1) // size
            carry = jax.lax.fori_loop(0, groups, some, carry)
            first = ends[index]
        return carry

    def room(self, packing: Packing) -> int:
        """Rows behind a buffer that are written too."""
        count = packing.starts.shape[0]
        return max(self.size(width, count) * width for width in self.classes(packing.longest))

    def sums(self, dtype: Any) -> Any:
        """What gradients of keys are kept in: each key has all of its own from one group."""
        return dtype

    def _whole(self, length: int) -> int:
        return -(-length // self.unit) * self.unit


@dataclass(frozen=True)
class Chunks:
    """Attention takes out this many rows of one sequence at a time, and the keys that they see.

    So little is computed that is masked, whatever the lengths. It is part of the program and
    changes no bit of a row.
    """

    rows: int

    def spans(self, longest: int) -> list[tuple[int, int, int]]:
        """(first chunk, last chunk + 1, keys that suffice), each compiled once."""
        count, spans, first = -(-longest // self.rows), [], 0
        while first < count:
            stop = min(first + max((first + 1) // _WIDER, 1), count)
            spans.append((first, stop, min(stop * self.rows, longest)))
            first = stop
        return spans

    def loops(self, lengths: np.ndarray, longest: int, sequences: int) -> list[Loop]:
        """The loops over a buffer whose sequences have these lengths."""
        del sequences
        chunks = -(-lengths // self.rows)
        return [
            Loop(int(np.sum(np.clip(chunks, first, stop) - first)), self.rows, keys)
            for first, stop, keys in self.spans(longest)
        ]

    def fold(self, one: Callable, carry: Any, packing: Packing, nowhere: int) -> Any:
        """Folds `one` (carry, `_Chunk`) over the first chunks of all sequences, the second, ..."""
        del nowhere
        for first, stop, keys in self.spans(packing.longest):
            behind = jnp.arange(first, stop, dtype=jnp.int32) * self.rows
            # The longest sequences are first, so those that have a chunk are the first so many.
            counts = jnp.sum(packing.lengths[None, :] > behind[:, None], axis=1, dtype=jnp.int32)
            ends = jnp.cumsum(counts)

            def some(number, carry, first=first, keys=keys, counts=counts, ends=ends):
                chunk = jnp.sum(ends <= number, dtype=jnp.int32)
                sequence = number - (ends[chunk] - counts[chunk])
                start, length = packing.starts[sequence], packing.lengths[sequence]
                return one(
                    carry, _Chunk(start, length, (first + chunk) * self.rows, self.rows, keys)
                )

            carry = jax.lax.fori_loop(0, ends[-1], some, carry)
        return carry

    def room(self, packing: Packing) -> int:
        """Rows behind a buffer that are written too."""
        return -(-packing.longest // self.rows) * self.rows

    def sums(self, dtype: Any) -> Any:
        """What gradients of keys are added up in, over the chunks that see them."""
        del dtype
        return jnp.float32


Grouping = Groups | Chunks
# One sequence's chunk stays in a CPU's cache. Many rows keep the cores of a GPU busy, and are fewer
# launches; its kernels skip keys that no row sees. Whole blocks of theirs need not be filled up.
_GROUPINGS: dict[str, Grouping] = {
    **dict.fromkeys(("tiles", "native"), Chunks(64)),
    **dict.fromkeys(("pallas_gpu", "pallas_mosaic_gpu"), Groups(4096, 128)),
    "pallas_tpu": Groups(4096, 256),
}


def grouping(family: str) -> Grouping:
    """What the kernels of a family are best at."""
    return _GROUPINGS[family]


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
      attend: of rows at these positions of sequences whose keys begin at position 0;
        differentiable. The rows of `Groups` are whole sequences.
      grouping: what `attend` is given at a time.

    Returns:
      [N, H, E]; of rows that belong to no sequence meaningless, but finite.
    """

    def forward(query, key, value, window, packing):
        def one(out, part):
            arrays = part.rows_of(query), part.keys_of(key), part.keys_of(value)
            return part.put(out, attend(*arrays, part.positions, window))

        rows = query.shape[0]
        shape = (rows + grouping.room(packing), query.shape[1], value.shape[2])
        return grouping.fold(one, jnp.zeros(shape, query.dtype), packing, rows)[:rows]

    def backward(residuals, cotangent):
        query, key, value, window, packing = residuals

        def one(gradients, part):
            arrays = part.rows_of(query), part.keys_of(key), part.keys_of(value)
            own = jnp.where(part.inside[..., None, None], part.rows_of(cotangent), 0)
            of_arrays = jax.vjp(lambda *arrays: attend(*arrays, part.positions, window), *arrays)[1]
            of_query, *of_keys = of_arrays(own)
            sums = [part.add(x, y) for x, y in zip(gradients[1:], of_keys, strict=True)]
            return part.put(gradients[0], of_query), *sums

        rows, room = query.shape[0], grouping.room(packing)
        kinds = query.dtype, grouping.sums(key.dtype), grouping.sums(value.dtype)
        empty = tuple(
            jnp.zeros((rows + room, *x.shape[1:]), dtype)
            for x, dtype in zip((query, key, value), kinds, strict=True)
        )
        gradients = grouping.fold(one, empty, packing, rows)
        given = zip(gradients, (query, key, value), strict=True)
        return *(x[:rows].astype(y.dtype) for x, y in given), None, None

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *args: (forward(*args), args), backward)
    return call(query, key, value, window, packing)


class _Group(NamedTuple):
    """Whole sequences that follow each other in the buffer, each as `width` rows."""

    starts: jax.Array  # i32[g]
    lengths: jax.Array  # i32[g]
    width: int

    @property
    def inside(self) -> jax.Array:
        """bool[g, W], whether a row is of the sequence."""
        return jnp.arange(self.width)[None, :] < self.lengths[:, None]

    @property
    def positions(self) -> jax.Array:
        """i32[g, W], of the rows; 0 behind a sequence's end, so that nothing is attended to."""
        return jnp.where(self.inside, jnp.arange(self.width, dtype=jnp.int32)[None, :], 0)

    def rows_of(self, x: jax.Array) -> jax.Array:
        """[g, W, ...] of an array [N, ...]."""
        return _take(x, self.starts, self.width)

    keys_of = rows_of

    def put(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """The array with the rows [g, W, ...] in their places.

        Behind the last there are zeros, g W rows in all: later groups overwrite them. So a group is
        one slice, which a device writes in place.
        """
        at = self.starts[0] + jnp.arange(self.lengths.shape[0] * self.width)
        number = jnp.searchsorted(self.starts, at, side="right", method="compare_all") - 1
        position = at - self.starts[number]
        inside = position < self.lengths[number]
        own = rows[number, jnp.minimum(position, self.width - 1)]
        own = jnp.where(inside[:, None, None], own, 0)
        return jax.lax.dynamic_update_slice_in_dim(x, own, self.starts[0], axis=0)

    add = put  # a key is seen by the rows of its own group alone


class _Chunk(NamedTuple):
    """Rows of one sequence, from its position `first` on, and the keys that they see."""

    start: jax.Array  # i32[]
    length: jax.Array  # i32[]
    first: jax.Array  # i32[]
    size: int
    keys: int

    @property
    def inside(self) -> jax.Array:
        """bool[1, W], whether a row is of the sequence."""
        return (self.first + jnp.arange(self.size) < self.length)[None, :]

    @property
    def positions(self) -> jax.Array:
        """i32[1, W], of the rows; 0 behind the sequence's end, so that nothing is attended to."""
        at = self.first + jnp.arange(self.size, dtype=jnp.int32)
        return jnp.where(self.inside, at[None, :], 0)

    def rows_of(self, x: jax.Array) -> jax.Array:
        """[1, W, ...] of an array [N, ...]."""
        return _take(x, (self.start + self.first)[None], self.size)

    def keys_of(self, x: jax.Array) -> jax.Array:
        """[1, S, ...] of an array [N, ...]."""
        return _take(x, self.start[None], self.keys)

    def put(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """The array with the rows [1, W, ...] in their places."""
        at = self.start + self.first
        before = jax.lax.dynamic_slice_in_dim(x, at, self.size, axis=0)
        own = jnp.where(self.inside[0][:, None, None], rows[0], before)
        return jax.lax.dynamic_update_slice_in_dim(x, own, at, axis=0)

    def add(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """The array with gradients [1, S, ...] of the keys added; they are 0 of those not seen."""
        before = jax.lax.dynamic_slice_in_dim(x, self.start, self.keys, axis=0)
        return jax.lax.dynamic_update_slice_in_dim(
            x, before + rows[0].astype(x.dtype), self.start, axis=0
        )


def _take(x: jax.Array, starts: jax.Array, width: int) -> jax.Array:
    """[g, W, ...] of an array [N, ...]; behind its last row, that row."""
    return x.at[starts[:, None] + jnp.arange(width)[None, :]].get(mode="clip")
