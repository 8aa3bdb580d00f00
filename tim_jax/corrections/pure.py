"""Corrections as plain functions: log-ratios and a mask in, coefficients and metrics out."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from tim_jax.corrections import packed
from tim_jax.corrections.base import Correction, chain, check_shape
from tim_jax.corrections.report import bound_metrics, correction_metrics
from tim_jax.errors import InputError


class Applied(NamedTuple):
    """What a correction made of a batch."""

    coefficients: jax.Array  # f32[B, R]; 0 off the mask
    kept: jax.Array  # bool[B, R], the tokens of the mask that no rejection took out
    state: Any  # of the correction, for the next batch


class Corrected(NamedTuple):
    """`Applied`, and what there is to log of it."""

    coefficients: jax.Array
    kept: jax.Array
    state: Any
    metrics: dict[str, jax.Array]  # f32[] each, see `correction_metrics` and `bound_metrics`


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
      log_ratio: f32[B, R], trainer's minus rollout's log-prob; other float dtypes are cast.
      mask: bool[B, R], True on response tokens. A token in no response may hold anything.
      state: what the last batch's call returned; None for the first batch.
      segment_ids: for a packed batch, whose arrays are one row of tokens, [N]: i32[N], the sequence
        that each token belongs to, from 0 to `segments` - 1. The results are [N] as well.
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
    log_ratio = jnp.asarray(arrays["log_ratio"]).astype(jnp.float32)
    metrics = correction_metrics(applied.coefficients, arrays["mask"], kept=applied.kept)
    metrics |= bound_metrics(chained, {"old": log_ratio, "current": log_ratio}, arrays["mask"])
    found = applied.coefficients, applied.kept
    if layout is not None:
        found = packed.pack(found[0], layout), packed.pack(found[1], layout)
    return Corrected(*found, applied.state, metrics)


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
      InputError: as `correct`; and a correction with state, which this would start anew every time.
    """
    chained = chain(correction)
    if jax.tree.leaves(jax.eval_shape(chained.init, mask)):
        raise InputError(
            "coefficients(...) forgets the state of this correction; use correct(..., state=...)"
        )
    arrays = {"log_ratio": log_ratio, "mask": mask, **extra}
    arrays, layout = _rows(arrays, segment_ids, segments)
    found = _applied(chained, None, arrays).coefficients
    return found if layout is None else packed.pack(found, layout)


def apply(correction: Correction, start: jax.Array, state: Any, **extra: Any) -> Applied:
    """Runs a correction's blocks on coefficients f32[B, R], minding which tokens are rejected.

    That does not depend on what is 0 already: a sequence goes with those of its tokens that a mask
    zeroed before.
    """
    coefficients, states = start, []
    kept = mask = cast(jax.Array, extra["mask"]).astype(bool)
    for block, own in zip(correction.blocks, state, strict=True):
        if block.effect == "reject":
            alive = jnp.where(mask & (coefficients == 0.0), 1.0, coefficients)
            kept = kept & (cast(jax.Array, block.transform.update(alive, own, **extra)[0]) != 0.0)
        coefficients, own = block.transform.update(coefficients, own, **extra)
        coefficients = cast(jax.Array, coefficients)
        states.append(own)
    return Applied(coefficients, kept, tuple(states))


def _rows(arrays, segment_ids, segments) -> tuple[dict[str, Any], packed.Layout | None]:
    """The arrays [B, R], the mask as bool, and where the tokens of a packed batch lie in them."""
    arrays = {name: x for name, x in arrays.items() if x is not None}
    layout = None
    if segment_ids is not None:
        layout = packed.layout(segment_ids, segments, arrays["mask"])
        arrays = {name: packed.unpack(x, layout) for name, x in arrays.items()}
    check_shape("log_ratio", arrays["log_ratio"].shape, arrays["mask"].shape)
    return {**arrays, "mask": arrays["mask"].astype(bool)}, layout


def _applied(correction: Correction, state: Any, arrays: dict[str, Any]) -> Applied:
    start = arrays["mask"].astype(jnp.float32)
    return apply(correction, start, correction.init(start) if state is None else state, **arrays)
