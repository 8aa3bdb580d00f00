"""What a correction did to a batch, as named numbers f32[]."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from tim_jax.corrections.base import Block, Bounds, Correction, Reads, matching
from tim_jax.corrections.ratios import ratio
from tim_jax.numerics import masked
from tim_jax.numerics.strict import arithmetic_dtype, widened
from tim_jax.numerics.sums import compensated_sum, row_count, whole


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
    mask = whole(mask)
    coefficients = jnp.where(mask, coefficients, 0.0)
    zero = mask & (coefficients == 0.0)
    full = jnp.any(mask, axis=1)
    rejected = full & ~jnp.any(mask & ~zero, axis=1)
    mean = masked.mean(coefficients, mask)
    spread = masked.mean(jnp.square(coefficients - mean), mask)
    removed = {} if kept is None else {"removed_share": masked.share(mask & ~whole(kept), mask)}
    least, most = (masked.extreme(coefficients, mask, f) for f in (jnp.min, jnp.max))
    return {
        "zero_share": masked.share(zero, mask),
        "masked_share": masked.share(zero & ~rejected[:, None], mask),
        "rejected_share": masked.share(rejected, full),
        **removed,
        "coefficient_mean": mean,
        "coefficient_std": jnp.sqrt(spread),
        "coefficient_min": least,
        "coefficient_max": most,
        **masked.quantiles(coefficients, mask, "coefficient"),
        "ess": masked.effective_share(mean, spread + jnp.square(mean), least=least, most=most),
    }


def clipped_shares(
    bounds: Bounds, log_ratio: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns bool[B, R] twice: the tokens whose ratio is below and above the bounds."""
    log_ratio, mask = whole(log_ratio), whole(mask)
    at_level = jnp.broadcast_to(ratio(log_ratio, mask, bounds.level), mask.shape)
    never = jnp.zeros(mask.shape, bool)
    lower, upper = (matching(bound, at_level) for bound in (bounds.lower, bounds.upper))
    low = never if lower is None else mask & (at_level < lower)
    high = never if upper is None else mask & (at_level > upper)
    return low, high


def bound_metrics(
    correction: Correction, log_ratios: Mapping[Reads, jax.Array], mask: jax.Array
) -> dict[str, jax.Array]:
    """Returns `clipped_low_share` and `clipped_high_share`, f32[]: tokens beyond a block's bound.

    `log_ratios` holds the f32[B, R] that the blocks read, by what they read; a token counts once
    however many blocks bound it. Empty if no block has bounds.
    """
    beyond: dict[str, Any] = {}
    for block in correction.blocks:
        if block.bounds is not None:
            flags = clipped_shares(block.bounds, log_ratios[block.reads], mask)
            for name, flag in zip(("clipped_low_share", "clipped_high_share"), flags, strict=True):
                beyond[name] = beyond.get(name, False) | flag
    return {name: masked.share(flag, mask) for name, flag in beyond.items()}


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
    mask, found = whole(mask), {}
    full = jnp.any(mask, axis=1)
    for label, block in _labelled(correction):
        arrays = _arrays(block, log_ratios, mask, extra)
        if arrays is None:
            continue
        for side, flag in _beyond(block, arrays, mask).items():
            one_each = flag.shape[1] == 1 and mask.shape[1] > 1
            unit = full[:, None] if one_each else mask
            found[f"{side}_share/{label}"] = masked.share(unit & flag, unit)
        if block.effect == "reject":
            kept = _updated(block, mask.astype(arithmetic_dtype(*arrays.values())), arrays)
            out = mask & (kept == 0.0)
            found[f"rejected_tokens/{label}"] = masked.share(out, mask)
            found[f"rejected_sequences/{label}"] = masked.share(jnp.any(out, axis=1), full)
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
    mask = whole(mask)
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
    weights = masked.quotient(compensated_sum(jnp.where(mask, tokens, 0.0))[0], lengths)
    mean = masked.mean(weights, full)
    number = jnp.sum(full, dtype=jnp.int32).astype(tokens.dtype)
    spread = masked.mean(jnp.square(weights - mean), full)
    return {
        "sequence_weight_mean": mean,
        "sequence_weight_std": jnp.sqrt(spread * number / jnp.maximum(number - 1.0, 1.0)),
        "sequence_weight_min": masked.extreme(weights, full, jnp.min),
        "sequence_weight_max": masked.extreme(weights, full, jnp.max),
        "sequence_weight_max_deviation": masked.extreme(jnp.abs(weights - 1.0), full, jnp.max),
    }


def _labelled(correction: Correction) -> Iterator[tuple[str, Block]]:
    seen: dict[str, int] = {}
    for block in correction.blocks:
        seen[block.label] = seen.get(block.label, 0) + 1
        yield block.label + (f"_{seen[block.label]}" if seen[block.label] > 1 else ""), block


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
    value = ratio(arrays["log_ratio"], mask, block.bounds.level)
    lower, upper = (matching(bound, value) for bound in (block.bounds.lower, block.bounds.upper))
    flags = {} if lower is None else {"below": value < lower}
    return flags if upper is None else flags | {"above": value > upper}
