"""Corrections applied to log-ratios and a mask: coefficients, reports as named numbers f32[], and
packed batches.

In a packed batch several sequences share one row of tokens, distinguished by segment ids. A packed
row is laid out as one row for each of its sequences, corrected there, and packed again. So a
sequence's coefficients have the bits that they have in an unpacked batch.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from tim_jax.common.errors import InputError
from tim_jax.corrections.base import Block, Bounds, Correction, Reads, chain, check_shape, outside
from tim_jax.corrections.ratios import ratio
from tim_jax.numerics import strict
from tim_jax.numerics.strict import arithmetic_dtype, compensated_sum, row_count, whole, widened

# Arguments that are arrays. A transform of the user's own may read others, of any kind.
_ARRAYS = ("log_ratio", "mask", "log_probs", "advantages", "divergence")


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
    segment_ids = whole(segment_ids).astype(jnp.int32)
    member = segment_ids[None, :] == jnp.arange(segments, dtype=jnp.int32)[:, None]
    before = jnp.cumsum(member, axis=1, dtype=jnp.int32) - 1
    row = jnp.clip(segment_ids, 0, segments - 1)
    column = jnp.take_along_axis(before, row[None, :], axis=0)[0]
    # A token of no sequence is put beyond the last column, where it is dropped.
    valid = (segment_ids >= 0) & (segment_ids < segments)
    return Layout(row, jnp.where(valid, column, segment_ids.shape[0]), segments)


def unpack(x: jax.Array, at: Layout) -> jax.Array:
    """[N] -> [segments, N], 0 where there is no token; an array [segments] stays as it is.

    Where `segments` is N, an array [N] has one number a token.
    """
    if x.shape == (at.segments,) and x.shape != at.row.shape:
        return x
    if x.shape != at.row.shape:
        raise InputError(
            f"an array of shape {x.shape} in a packed batch of {at.row.shape[0]} tokens and"
            f" {at.segments} sequences; it must have one number a token, or one a sequence"
        )
    rows = jnp.zeros((at.segments, x.shape[0]), x.dtype)
    return rows.at[at.row, at.column].set(whole(x), mode="drop")


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
    """The result of a correction of a batch, with metrics of what it did."""

    coefficients: jax.Array  # f32[B, R]; 0 off the mask
    kept: jax.Array  # bool[B, R], the tokens of the mask that no rejection took out
    state: Any  # of the correction, for the next batch
    metrics: dict[str, jax.Array]  # f32[] each, of the functions below; and `normaliser`

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.coefficients.shape))
        names = ", ".join(sorted(self.metrics))
        text = f"Corrected(coefficients and kept [{shape}], state, metrics: {names})"
        return textwrap.fill(text, 98, subsequent_indent="  ", break_on_hyphens=False)


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
    rejected tokens are to leave that too (`objectives.objective.token_weights`).

    Raises:
      InputError: an array that is missing, or whose shape does not fit.
    """
    chained = chain(correction)
    arrays = {"log_ratio": log_ratio, "mask": mask, **extra}
    applied, arrays, layout = _applied(chained, state, arrays, segment_ids, segments)
    mask, [log_ratio] = arrays.pop("mask"), widened(arrays.pop("log_ratio"))
    metrics = correction_metrics(applied.coefficients, mask, kept=applied.kept)
    log_ratios: dict[Reads, jax.Array] = {"old": log_ratio, "current": log_ratio}
    given = chained, log_ratios, mask
    metrics |= bound_metrics(*given)
    metrics |= block_metrics(*given, **arrays) | sequence_weight_metrics(*given, **arrays)
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
    arrays = {"log_ratio": log_ratio, "mask": mask, **extra}
    applied, _, layout = _applied(chain(correction), None, arrays, segment_ids, segments)
    if jax.tree.leaves(applied.state):
        raise InputError(
            "coefficients(...) forgets the state of this correction; use correct(..., state=...)"
        )
    return applied.coefficients if layout is None else pack(applied.coefficients, layout)


def apply(correction: Correction, start: jax.Array, state: Any, **extra: Any) -> Applied:
    """Runs a correction's blocks on coefficients f32[B, R], and records which tokens are rejected.

    A rejection also takes tokens that a mask has set to 0 before: all tokens of a rejected
    sequence.
    """
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
    # A transform of the user's own may do neither.
    coefficients = jax.lax.stop_gradient(jnp.where(mask, coefficients, 0.0))
    return Applied(coefficients, kept, tuple(states), normaliser)


def _applied(
    correction: Correction, state: Any, arrays: dict[str, Any], segment_ids, segments
) -> tuple[Applied, dict[str, Any], Layout | None]:
    """Also returns the arrays as [B, R], the mask as bool, and the layout of a packed batch."""
    for name in ("log_ratio", "mask"):
        if arrays[name] is None:
            raise InputError(f"{name} is None; it must be an array [batch, tokens]")
    # Lists and torch's tensors become arrays.
    arrays = {
        name: jnp.asarray(x) if name in _ARRAYS else x
        for name, x in arrays.items()
        if x is not None
    }
    layout = None
    if segment_ids is not None:
        layout = layout_of(jnp.asarray(segment_ids), segments, arrays["mask"])
        arrays = {name: unpack(x, layout) for name, x in arrays.items()}
    check_shape("log_ratio", arrays["log_ratio"].shape, arrays["mask"].shape)
    arrays["mask"] = arrays["mask"].astype(bool)
    start = arrays["mask"].astype(arithmetic_dtype(*arrays.values()))
    first: Any = correction.init(start)
    state = first if state is None else state
    if len(state) != len(correction.blocks):
        raise InputError(
            f"the state has {len(state)} parts and the correction {len(correction.blocks)}: it is"
            " of another correction; begin with state=None"
        )
    for block, given, right in zip(correction.blocks, state, first, strict=True):
        if jax.tree.structure(given) != jax.tree.structure(right):
            raise InputError(
                f"the state of {block.name} must be {type(right).__name__}, got"
                f" {type(given).__name__}; restore a checkpoint into what the correction's"
                " init returns, or begin with state=None"
            )
    return apply(correction, start, state, **arrays), arrays, layout


def correction_metrics(
    coefficients: jax.Array, mask: jax.Array, *, kept: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Returns f32[] of the coefficients f32[B, R] that a correction gave to the tokens of `mask`.

    `coefficient_{mean,std,min,max,p01,...}` over response tokens and their `ess` (mean(c)^2 /
    mean(c^2)); `zero_share` of tokens; `rejected_share` of sequences (no token left) and
    `masked_share` of tokens (0 in a sequence that is not rejected). With `kept` (bool[B, R], see
    `Corrected`) also `removed_share`, the tokens that rejections took out of the loss.
    """
    [coefficients] = widened(whole(coefficients))
    mask = whole(mask).astype(bool)
    coefficients = jnp.where(mask, coefficients, 0.0)
    zero = mask & (coefficients == 0.0)
    full = jnp.any(mask, axis=1)
    rejected = full & ~jnp.any(mask & ~zero, axis=1)
    mean = strict.mean(coefficients, mask)
    spread = strict.mean(jnp.square(coefficients - mean), mask)
    lost = None if kept is None else mask & ~whole(kept).astype(bool)
    removed = {} if lost is None else {"removed_share": strict.share(lost, mask)}
    least, most = (strict.extreme(coefficients, mask, f) for f in (jnp.min, jnp.max))
    return {
        "zero_share": strict.share(zero, mask),
        "masked_share": strict.share(zero & ~rejected[:, None], mask),
        "rejected_share": strict.share(rejected, full),
        **removed,
        "coefficient_mean": mean,
        "coefficient_std": jnp.sqrt(spread),
        "coefficient_min": least,
        "coefficient_max": most,
        **strict.quantiles(coefficients, mask, "coefficient"),
        "ess": strict.effective_share(mean, spread + jnp.square(mean), least=least, most=most),
    }


def clipped_shares(
    bounds: Bounds, log_ratio: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns bool[B, R] twice: the tokens whose ratio is below and above the bounds."""
    log_ratio, mask = whole(log_ratio), whole(mask).astype(bool)
    at_level = jnp.broadcast_to(ratio(log_ratio, mask, bounds.level), mask.shape)
    flags = outside(at_level, bounds.lower, bounds.upper)
    flags = {side: mask & flag for side, flag in flags.items()}
    never = jnp.zeros(mask.shape, bool)
    return flags.get("below", never), flags.get("above", never)


def bound_metrics(
    correction: Correction, log_ratios: Mapping[Reads, jax.Array], mask: jax.Array
) -> dict[str, jax.Array]:
    """Returns `clipped_low_share` and `clipped_high_share`, f32[]: tokens beyond a block's bound.

    `log_ratios` holds the f32[B, R] that the blocks read, by what they read; a token counts once
    however many blocks bound it. Empty if no block has bounds.
    """
    beyond, mask = cast(dict[str, Any], {}), mask.astype(bool)
    for block in correction.blocks:
        if block.bounds is not None:
            flags = clipped_shares(block.bounds, log_ratios[block.reads], mask)
            for name, flag in zip(("clipped_low_share", "clipped_high_share"), flags, strict=True):
                beyond[name] = beyond.get(name, False) | flag
    return {name: strict.share(flag, mask) for name, flag in beyond.items()}


def block_metrics(
    correction: Correction, log_ratios: Mapping[Reads, jax.Array], mask: jax.Array, **extra: Any
) -> dict[str, jax.Array]:
    """Returns f32[] of each block by itself, whatever the others do, by its label.

    For a block with bounds `below_share/LABEL` and `above_share/LABEL`: of the tokens, or of the
    sequences where a sequence has one number. For one that rejects `rejected_tokens/LABEL` and
    `rejected_sequences/LABEL`, the share of the sequences that lose a token. A label is the block's
    name, such as `reject_k3_over_mean`, with a number from the second of one name on.

    Args:
      log_ratios: f32[B, R] by what the blocks read, as for `bound_metrics`.
      mask: bool[B, R].
      extra: `log_probs` by what the blocks read too, and `advantages`. A block without what it
        needs, or with a state (`scheduled`), is left out.
    """
    mask, found, seen = whole(mask).astype(bool), {}, Counter()
    full = jnp.any(mask, axis=1)
    for block in correction.blocks:
        seen[block.label] += 1
        number = seen[block.label]
        label = block.label if number == 1 else f"{block.label}_{number}"
        arrays = _arrays(block, log_ratios, mask, extra)
        if arrays is None:
            continue
        for side, flag in _beyond(block, arrays, mask).items():
            one_each = flag.shape[1] == 1 and mask.shape[1] > 1
            unit = full[:, None] if one_each else mask
            found[f"{side}_share/{label}"] = strict.share(unit & flag, unit)
        if block.effect == "reject":
            kept = _updated(block, mask.astype(arithmetic_dtype(*arrays.values())), arrays)
            out = mask & (kept == 0.0)
            found[f"rejected_tokens/{label}"] = strict.share(out, mask)
            found[f"rejected_sequences/{label}"] = strict.share(jnp.any(out, axis=1), full)
    return found


def sequence_weight_metrics(
    correction: Correction, log_ratios: Mapping[Reads, jax.Array], mask: jax.Array, **extra: Any
) -> dict[str, jax.Array]:
    """Returns f32[] of the sequences' weights, `sequence_weight_{mean,std,min,max,max_deviation}`.

    The weight of a sequence is the mean over its tokens of what the blocks that weight or mask give
    them, before any normalisation or rejection (verl's `rollout_is_seq_*`). `std` is the sample
    deviation, 0 for one sequence; `max_deviation` the largest distance from 1. Empty if no block
    weights, or one has a state. For the arguments see `block_metrics`.
    """
    mask = whole(mask).astype(bool)
    blocks = [block for block in correction.blocks if block.effect in ("weight", "mask")]
    if not any(block.effect == "weight" for block in blocks):
        return {}
    tokens = mask.astype(arithmetic_dtype(*log_ratios.values()))
    for block in blocks:
        arrays = _arrays(block, log_ratios, mask, extra)
        if arrays is None:
            return {}
        tokens = _updated(block, tokens, arrays)
    full, lengths = jnp.any(mask, axis=1), jnp.maximum(row_count(mask), 1).astype(tokens.dtype)
    weights = strict.quotient(compensated_sum(jnp.where(mask, tokens, 0.0))[0], lengths)
    mean = strict.mean(weights, full)
    number = jnp.sum(full, dtype=jnp.int32).astype(tokens.dtype)
    spread = strict.mean(jnp.square(weights - mean), full)
    return {
        "sequence_weight_mean": mean,
        "sequence_weight_std": jnp.sqrt(spread * number / jnp.maximum(number - 1.0, 1.0)),
        "sequence_weight_min": strict.extreme(weights, full, jnp.min),
        "sequence_weight_max": strict.extreme(weights, full, jnp.max),
        "sequence_weight_max_deviation": strict.extreme(jnp.abs(weights - 1.0), full, jnp.max),
    }


def _arrays(block: Block, log_ratios, mask, extra) -> dict[str, Any] | None:
    """What the block's `update` reads; None if not all of it is there, or if it has a state."""
    given = {name: x for name, x in extra.items() if x is not None}
    given = {n: x[block.reads] if isinstance(x, Mapping) else x for n, x in given.items()}
    arrays = {"log_ratio": log_ratios[block.reads], **given}
    needed = (*block.needs, *(("advantages",) if block.sign is not None else ()))
    if block.has_state or not block.needs or not set(needed) <= set(arrays):
        return None
    return {"mask": mask, **{name: whole(arrays[name]) for name in needed}}


def _updated(block: Block, coefficients: jax.Array, arrays: dict[str, Any]) -> jax.Array:
    state = block.transform.init(coefficients)
    return cast(jax.Array, block.transform.update(coefficients, state, **arrays)[0])


def _beyond(block: Block, arrays: dict[str, Any], mask: jax.Array) -> dict[str, jax.Array]:
    """bool[B, R] or [B, 1] by side: what is below the lower bound and above the upper one."""
    if block.beyond is not None:
        return block.beyond(mask, *widened(*(arrays[name] for name in block.needs)))
    if block.bounds is None:
        return {}
    level, lower, upper = block.bounds
    return outside(ratio(arrays["log_ratio"], mask, level), lower, upper)
