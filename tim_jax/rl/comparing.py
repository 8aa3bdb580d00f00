"""How much a step's recorded log-probs differ from the learner's, and what of it is due to age."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from tim_jax import metrics
from tim_jax.common.types import Rollout
from tim_jax.mismatch import Mismatch
from tim_jax.rl.types import Exactness, exactness

_PARTS = ("log_ratio_abs_mean", "log_ratio_abs_max", "kl_k3")


def mismatch_report(log_probs: jax.Array, rollout: Rollout) -> dict[str, jax.Array]:
    """`mismatch/*`: `metrics.mismatch_metrics` of log-probs [b, R] of a rollout's first b rows."""
    rows = log_probs.shape[0]
    values = metrics.mismatch_metrics(log_probs, rollout.log_probs[:rows], rollout.mask[:rows])
    return {f"mismatch/{name}": value for name, value in values.items()}


def _by_source(
    score: Callable[..., Any], source: Any, rollout: Rollout, mismatch: Mismatch
) -> jax.Array:
    """Log-probs f32[B, R] of every token by the weights that drew it."""
    if mismatch.in_flight is None:
        return score(source, rollout)[0]
    position = jnp.arange(rollout.responses.shape[1])[None, :]
    values, start = score(source[0], rollout)[0], 0
    parts = mismatch.in_flight.parts(position.shape[1])
    for tokens, own in zip(parts, source[1:], strict=False):
        start += tokens
        values = jnp.where(position >= start, score(own, rollout)[0], values)
    return values


def comparison(
    score: Callable[..., Any],
    mismatch: Mismatch,
    *,
    aged: bool,
    replayed: Callable[..., Any] | None = None,
) -> Callable[..., tuple[dict[str, jax.Array], Exactness]]:
    """(weights, sampler's weights, rollout, trainer) -> metrics of the mismatch and its parts.

    `trainer` are the learner's log-probs, or None, which takes one more forward. `mismatch/*` are
    `metrics.mismatch_metrics` of them against the recorded ones. The parts, where there are any,
    are in mean |d|, largest |d| and k3: `drift/*` compares the learner with itself at the sampler's
    weights, `numerical/*` the latter with the recorded ones, and `reporting/*` the log-probs drawn
    with with the recorded ones. `replayed/*`, for a mixture whose learner takes its own experts, is
    what of `mismatch/*` would be left if it took the sampler's, by one more forward.

    The second result compares bits: of the learner at the sampler's weights, where these may be
    `aged`, with what was recorded.
    """

    def compare(weights, source, rollout: Rollout, trainer: jax.Array | None):
        recorded, mask = rollout.log_probs, rollout.mask
        trainer = cast(jax.Array, score(weights, rollout)[0] if trainer is None else trainer)
        there = _by_source(score, source, rollout, mismatch) if aged else trainer
        pairs = {}
        if aged:
            pairs |= {"drift": (trainer, there), "numerical": (there, recorded)}
        if rollout.drawn_log_probs is not None:
            pairs["reporting"] = rollout.drawn_log_probs, recorded
        if replayed is not None:
            pairs["replayed"] = replayed(weights, rollout)[0], recorded
        report = mismatch_report(trainer, rollout)
        for part, (first, second) in pairs.items():
            values = metrics.mismatch_metrics(first, second, mask)
            report |= {f"{part}/{name}": values[name] for name in _PARTS}
        return report, exactness(there, rollout)

    return compare
