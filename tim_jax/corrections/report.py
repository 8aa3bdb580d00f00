"""What a correction did to a batch, as numbers to log."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tim_jax import masked
from tim_jax.corrections.base import Bounds, Correction, Reads
from tim_jax.corrections.ratios import ratio
from tim_jax.sums import whole


def correction_metrics(
    coefficients: jax.Array, mask: jax.Array, *, kept: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Returns f32[] of the coefficients f32[B, R] that a correction gave to the tokens of `mask`.

    `coefficient_{mean,std,min,max,p01,...}` over response tokens and their `ess` (mean(c)^2 /
    mean(c^2)); `zero_share` of tokens; `rejected_share` of sequences (no token left) and
    `masked_share` of tokens (0 in a sequence that is not rejected). With `kept` (bool[B, R], see
    `Corrected`) also `removed_share`, the tokens that rejections took out of the loss.
    """
    coefficients, mask = whole(coefficients), whole(mask)
    coefficients = jnp.where(mask, coefficients, 0.0)
    zero = mask & (coefficients == 0.0)
    full = jnp.any(mask, axis=1)
    rejected = full & ~jnp.any(mask & ~zero, axis=1)
    mean = masked.mean(coefficients, mask)
    spread = masked.mean(jnp.square(coefficients - mean), mask)
    removed = {} if kept is None else {"removed_share": masked.share(mask & ~whole(kept), mask)}
    return {
        "zero_share": masked.share(zero, mask),
        "masked_share": masked.share(zero & ~rejected[:, None], mask),
        "rejected_share": masked.share(rejected, full),
        **removed,
        "coefficient_mean": mean,
        "coefficient_std": jnp.sqrt(spread),
        "coefficient_min": masked.extreme(coefficients, mask, jnp.min),
        "coefficient_max": masked.extreme(coefficients, mask, jnp.max),
        **masked.quantiles(coefficients, mask, "coefficient"),
        "ess": masked.effective_share(mean, spread + jnp.square(mean)),
    }


def clipped_shares(
    bounds: Bounds, log_ratio: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns bool[B, R] twice: the tokens whose ratio is below and above the bounds."""
    log_ratio, mask = whole(log_ratio), whole(mask)
    at_level = jnp.broadcast_to(ratio(log_ratio, mask, bounds.level), mask.shape)
    never = jnp.zeros(mask.shape, bool)
    low = never if bounds.lower is None else mask & (at_level < bounds.lower)
    high = never if bounds.upper is None else mask & (at_level > bounds.upper)
    return low, high


def bound_metrics(
    correction: Correction, log_ratios: Mapping[Reads, jax.Array], mask: jax.Array
) -> dict[str, jax.Array]:
    """Returns `clipped_low_share` and `clipped_high_share`, f32[]: tokens beyond a block's bound.

    `log_ratios` holds the f32[B, R] that the blocks read, by what they read; a token counts once
    however many blocks bound it. Empty if no block has bounds.
    """
    found: dict[str, Any] = {}
    for block in correction.blocks:
        if block.bounds is not None:
            flags = clipped_shares(block.bounds, log_ratios[block.reads], mask)
            for name, flag in zip(("clipped_low_share", "clipped_high_share"), flags, strict=True):
                found[name] = found.get(name, False) | flag
    return {name: masked.share(flag, mask) for name, flag in found.items()}
