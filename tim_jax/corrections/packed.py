"""Packed batches: several sequences in one row of tokens, told apart by segment ids.

A packed row is laid out as one row for each of its sequences, corrected there, and brought back. So
a sequence's coefficients have the bits that they have in an unpacked batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tim_jax.errors import InputError


class Layout(NamedTuple):
    """Where each token of a packed row [N] lies in the rows [segments, N] of its sequences."""

    row: jax.Array  # i32[N]
    column: jax.Array  # i32[N]
    segments: int


def layout(segment_ids: jax.Array, segments: int | None, mask: jax.Array) -> Layout:
    """Returns the layout of i32[N] ids; tokens of a sequence keep their order."""
    if segments is None or segments < 1:
        raise InputError(
            f"segments is {segments}; with segment_ids it must be the number of sequences"
        )
    if segment_ids.ndim != 1 or segment_ids.shape != mask.shape:
        raise InputError(
            f"segment_ids have shape {segment_ids.shape} and the mask {mask.shape}; a packed batch"
            " is one row of tokens, and they must both have its length"
        )
    segment_ids = jnp.asarray(segment_ids).astype(jnp.int32)
    own = segment_ids[None, :] == jnp.arange(segments, dtype=jnp.int32)[:, None]
    before = jnp.cumsum(own, axis=1, dtype=jnp.int32) - 1
    row = jnp.clip(segment_ids, 0, segments - 1)
    column = jnp.take_along_axis(before, row[None, :], axis=0)[0]
    # A token of no sequence is put nowhere: beyond the last column.
    known = (segment_ids >= 0) & (segment_ids < segments)
    return Layout(row, jnp.where(known, column, segment_ids.shape[0]), segments)


def unpack(x: jax.Array, at: Layout) -> jax.Array:
    """[N] -> [segments, N], zeros where no token is; [segments], if it is not N, stays as it is."""
    if x.shape == (at.segments,) and x.shape != at.row.shape:
        return x
    if x.shape != at.row.shape:
        raise InputError(
            f"an array of shape {x.shape} in a packed batch of {at.row.shape[0]} tokens and"
            f" {at.segments} sequences; it must have one number a token, or one a sequence"
        )
    rows = jnp.zeros((at.segments, x.shape[0]), x.dtype)
    return rows.at[at.row, at.column].set(x, mode="drop")


def pack(x: jax.Array, at: Layout) -> jax.Array:
    """[segments, N] -> [N]; 0 for a token of no sequence."""
    return x.at[at.row, at.column].get(mode="fill", fill_value=0)
