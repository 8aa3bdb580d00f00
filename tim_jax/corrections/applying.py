"""Corrections applied to log-ratios and a mask: coefficients, and packed batches.

In a packed batch several sequences share one row of tokens, distinguished by segment ids. A packed
row is laid out as one row for each of its sequences, corrected there, and packed again. So a
sequence's coefficients have the bits that they have in an unpacked batch.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from tim_jax.common.errors import InputError
from tim_jax.corrections.base import Correction, Reads, chain, check_shape
from tim_jax.corrections.reporting import (
    block_metrics,
    bound_metrics,
    correction_metrics,
    sequence_weight_metrics,
)
from tim_jax.numerics.strict import arithmetic_dtype, widened


class Layout(NamedTuple):
    """Where each token of a packed row [N] lies in the rows [segments, N] of its sequences."""

    row: jax.Array  # i32[N]
    column: jax.Array  # i32[N]
    segments: int


def layout_of(segment_ids: jax.Array, segments: int | None, mask: jax.Array) -> Layout:
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
    member = segment_ids[None, :] == jnp.arange(segments, dtype=jnp.int32)[:, None]
    before = jnp.cumsum(member, axis=1, dtype=jnp.int32) - 1
    row = jnp.clip(segment_ids, 0, segments - 1)
    column = jnp.take_along_axis(before, row[None, :], axis=0)[0]
    # A token of no sequence is put beyond the last column, where it is dropped.
    valid = (segment_ids >= 0) & (segment_ids < segments)
    return Layout(row, jnp.where(valid, column, segment_ids.shape[0]), segments)


def unpack(x: jax.Array, at: Layout) -> jax.Array:
    """[N] -> [segments, N], 0 where there is no token; an array [segments] stays as it is."""
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


class Applied(NamedTuple):
    """The result of a correction of a batch."""

    coefficients: jax.Array  # f32[B, R]; 0 off the mask
    kept: jax.Array  # bool[B, R], the tokens of the mask that no rejection took out
    state: Any  # of the correction, for the next batch
    normaliser: jax.Array | None = None  # f32[], what the last `normalise` divided by, if any


def normaliser_metrics(applied: Applied) -> dict[str, jax.Array]:
    """Returns `correction/normaliser`, f32[], if the correction had a `normalise`."""
    found = applied.normaliser
    return {} if found is None else {"correction/normaliser": found}


class Corrected(NamedTuple):
    """As `Applied`, with metrics."""

    coefficients: jax.Array
    kept: jax.Array
    state: Any
    metrics: dict[str, jax.Array]  # f32[] each, see `reporting`; and `normaliser`, see `Applied`


def correct(
    correction: optax.GradientTransformation,
    *,
    log_ratio: jax.Array,
    mask: jax.Array,
    state: Any = None,
    segment_ids: jax.Array | None = None,
    segments: int | None = None,
    **extra: jax.Array,
) -> Corrected:
    """Returns the coefficients of a batch's tokens, which of them are kept, and metrics.

    Args:
      correction: a recipe, a block, a chain of them, or an optax transform of your own.
      log_ratio: f32[B, R], trainer's minus rollout's log-prob. Other float dtypes are cast to
        float32, all but float64, with which the results are float64.
      mask: bool[B, R], True on response tokens. Values elsewhere are ignored.
      state: what the last batch's call returned; None for the first batch.
      segment_ids: for a packed batch, whose arrays are one row of tokens, [N]: i32[N], the sequence
        that each token belongs to, from 0 to `segments` - 1. Tokens of other ids, such as padding,
        belong to none whatever the mask says, and have coefficient 0. The results are [N] as well.
      segments: the number of packed sequences. Memory is [segments, N] for a while.
      extra: `log_probs`, `advantages`, and whatever else the chain reads.

    The loss of a token is to be multiplied by its coefficient. `kept` is for its denominator, if
    rejected tokens are to leave that too (`aggregation.token_weights`).

    Raises:
      InputError: an array that is missing, or whose shape does not fit.
    """
    chained = chain(correction)
    arrays = {"log_ratio": log_ratio, "mask": mask, **extra}
    arrays, layout = _rows(arrays, segment_ids, segments)
    applied = _applied(chained, state, arrays)
    [log_ratio] = widened(arrays["log_ratio"])
    metrics = correction_metrics(applied.coefficients, arrays["mask"], kept=applied.kept)
    log_ratios: dict[Reads, jax.Array] = {"old": log_ratio, "current": log_ratio}
    given = chained, log_ratios, arrays["mask"]
    others = {name: x for name, x in arrays.items() if name not in ("log_ratio", "mask")}
    metrics |= bound_metrics(*given)
    metrics |= block_metrics(*given, **others) | sequence_weight_metrics(*given, **others)
    if applied.normaliser is not None:
        metrics["normaliser"] = applied.normaliser
    tokens = applied.coefficients, applied.kept
    if layout is not None:
        tokens = pack(tokens[0], layout), pack(tokens[1], layout)
    return Corrected(*tokens, applied.state, metrics)


def coefficients(
    correction: optax.GradientTransformation,
    *,
    log_ratio: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array | None = None,
    segments: int | None = None,
    **extra: Any,
) -> jax.Array:
    """Returns f32[B, R], the coefficients alone; see `correct` for the arguments.

    Raises:
      InputError: as `correct`; and for a correction with state, which would be lost.
    """
    chained = chain(correction)
    if jax.tree.leaves(jax.eval_shape(chained.init, mask)):
        raise InputError(
            "coefficients(...) forgets the state of this correction; use correct(..., state=...)"
        )
    arrays = {"log_ratio": log_ratio, "mask": mask, **extra}
    arrays, layout = _rows(arrays, segment_ids, segments)
    result = _applied(chained, None, arrays).coefficients
    return result if layout is None else pack(result, layout)


def apply(correction: Correction, start: jax.Array, state: Any, **extra: Any) -> Applied:
    """Runs a correction's blocks on coefficients f32[B, R], and records which tokens are rejected.

    A rejection also takes tokens that a mask has set to 0 before: all tokens of a rejected
    sequence.
    """
    if len(state) != len(correction.blocks):
        raise InputError(
            f"the state has {len(state)} parts and the correction {len(correction.blocks)}: it is"
            " of another correction; begin with state=None"
        )
    coefficients, states, normaliser = start, [], None
    kept = mask = cast(jax.Array, extra["mask"]).astype(bool)
    for block, before in zip(correction.blocks, state, strict=True):
        if block.effect == "reject":
            alive = jnp.where(mask & (coefficients == 0.0), 1.0, coefficients)
            tried = cast(jax.Array, block.transform.update(alive, before, **extra)[0])
            kept = kept & (tried != 0.0)
        if block.divisor is not None:
            normaliser = block.divisor(jnp.where(mask, coefficients, 0.0), mask)
        coefficients, after = block.transform.update(coefficients, before, **extra)
        coefficients = cast(jax.Array, coefficients)
        states.append(after)
    return Applied(coefficients, kept, tuple(states), normaliser)


def _rows(arrays, segment_ids, segments) -> tuple[dict[str, Any], Layout | None]:
    """Returns the arrays as [B, R], the mask as bool, and the layout of a packed batch."""
    arrays = {name: x for name, x in arrays.items() if x is not None}
    layout = None
    if segment_ids is not None:
        layout = layout_of(segment_ids, segments, arrays["mask"])
        arrays = {name: unpack(x, layout) for name, x in arrays.items()}
    check_shape("log_ratio", arrays["log_ratio"].shape, arrays["mask"].shape)
    return {**arrays, "mask": arrays["mask"].astype(bool)}, layout


def _applied(correction: Correction, state: Any, arrays: dict[str, Any]) -> Applied:
    start = arrays["mask"].astype(arithmetic_dtype(*arrays.values()))
    return apply(correction, start, correction.init(start) if state is None else state, **arrays)
