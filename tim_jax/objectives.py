"""Advantages and token losses: rewards and log-probs in, arrays out. No model, no state.

B sequences stand in groups of equal size (samples of one prompt), in consecutive rows; R is the
longest response. A batch's loss is `sum(weights * losses)`, where the weights hold the one
normaliser of the whole batch: a micro-batch takes its rows of both and adds up, and the gradient is
the same but for rounding.
"""

import dataclasses
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from tim_jax.errors import InputError, did_you_mean
from tim_jax.sums import row_count, tree_sum

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce", "reinforce_batch"]
Loss = Literal["reinforce", "clip", "gspo", "gspo_token"]
Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length"
]
KL = Literal["k1", "k2", "k3"]

GROUP_BASELINES = ("grpo", "dr_grpo", "rloo")

# exp(20) = 4.9e8: beyond it a ratio carries no information, only overflow. verl's bound as well.
LOG_RATIO_BOUND = 20.0


def check_group_size(estimator: Estimator, group_size: int) -> None:
    """Refuses what has no meaning: a group's baseline needs at least two samples of a prompt."""
    _choice("estimator", estimator, get_args(Estimator))
    if group_size < 1:
        raise InputError(f"group_size is {group_size}; it must be at least 1")
    if estimator in GROUP_BASELINES and group_size == 1:
        raise InputError(
            f"group_size is 1, but the estimator {estimator!r} takes its baseline from the group;"
            " use group_size 2 or more, or 'reinforce'"
        )


def advantages(
    rewards: jax.Array, *, group_size: int, estimator: Estimator, eps: float = 1e-6
) -> jax.Array:
    """Returns the advantages f32[B] of the rewards f32[B].

    - grpo: `(r - mean) / (std + eps)` within the group. The paper (arXiv 2402.03300, 4.1.2) leaves
      the estimator of std open; here it is the sample deviation (divisor G - 1) and eps is 1e-6, as
      in verl. TRL's eps is 1e-4.
    - dr_grpo: `r - mean` (arXiv 2503.20783).
    - rloo: `r_i - mean of the other G - 1` (arXiv 2402.14740).
    - reinforce: `r`, no baseline (Williams 1992). reinforce_batch: `r - mean of the batch`.

    A group whose rewards are all equal gets exact zeros from every group baseline.

    Raises:
        InputError: group size 1 with a group baseline, or B not a multiple of the group size.
    """
    check_group_size(estimator, group_size)
    groups = _groups(rewards, group_size)
    if estimator == "reinforce":
        return groups.reshape(-1)
    if estimator == "reinforce_batch":
        return rewards - tree_sum(rewards) / rewards.shape[0]
    total = tree_sum(groups)[:, None]
    if estimator == "rloo":
        values = groups - (total - groups) / (group_size - 1)
    else:
        values = groups - total / group_size
    if estimator == "grpo":
        deviation = jnp.sqrt(tree_sum(jnp.square(values)) / (group_size - 1))[:, None]
        values = values / (deviation + eps)
    # Without this the rounding of the mean, divided by a deviation of the same size, is a signal.
    return jnp.where(_differing(groups), values, 0.0).reshape(-1)


def informative_groups(rewards: jax.Array, group_size: int) -> jax.Array:
    """Returns bool[B], False for every row of a group whose rewards f32[B] are all equal."""
    groups = _groups(rewards, group_size)
    return jnp.broadcast_to(_differing(groups), groups.shape).reshape(-1)


def token_weights(
    mask: jax.Array, *, aggregation: Aggregation, max_length: int | None = None
) -> jax.Array:
    """Returns f32[B, R], the share of each token's loss in the batch's loss; 0 off the mask.

    With N sequences that have a token in the whole batch's mask bool[B, R], and T_i tokens each:

    - token_mean: `1 / sum_i T_i` (DAPO, arXiv 2503.14476, eq. 8)
    - sequence_mean_token_mean: `1 / (N T_i)` (GRPO, arXiv 2402.03300, eq. 3)
    - sequence_mean_token_sum: `1 / N` (the policy gradient of whole sequences)
    - constant_length: `1 / (N max_length)` (Dr. GRPO, arXiv 2503.20783)

    Rows without a token (dropped groups) do not count in N. Compute the weights from the whole
    batch and give each micro-batch its rows. Counts are integers, so sharding changes no bit.
    """
    _check_aggregation(aggregation, max_length)
    lengths = row_count(mask)
    sequences = jnp.maximum(jnp.sum(lengths > 0, dtype=jnp.int32), 1).astype(jnp.float32)
    if aggregation == "token_mean":
        tokens = jnp.maximum(jnp.sum(lengths, dtype=jnp.int32), 1).astype(jnp.float32)
        per_row = jnp.full(lengths.shape, 1.0, jnp.float32) / tokens
    elif aggregation == "sequence_mean_token_mean":
        per_row = 1.0 / (sequences * jnp.maximum(lengths, 1).astype(jnp.float32))
    elif aggregation == "sequence_mean_token_sum":
        per_row = jnp.full(lengths.shape, 1.0, jnp.float32) / sequences
    else:
        per_row = jnp.full(lengths.shape, 1.0, jnp.float32) / (sequences * float(max_length or 1))
    return jnp.where(mask, per_row[:, None], 0.0)


class TokenLosses(NamedTuple):
    """A token's contribution, and what a report wants to know. [B, R]; 0 or False off the mask."""

    loss: jax.Array  # f32, to be weighted by `token_weights` and summed
    ratio: jax.Array  # f32, importance ratio pi / pi_old that the loss used; 1.0 for 'reinforce'
    clipped_low: jax.Array  # bool, ratio below 1 - clip_low with a negative advantage: no gradient
    clipped_high: (
        jax.Array
    )  # bool, ratio above 1 + clip_high with a positive advantage: no gradient
    clipped_dual: jax.Array  # bool, ratio above dual_clip with a negative advantage: no gradient
    kl: jax.Array  # f32, the KL estimate to the reference policy; 0 without one


@dataclasses.dataclass(frozen=True)
class Objective:
    """A policy-gradient objective as a value. Checked when built.

    `clip_low`, `clip_high` are the distances from 1 at which the ratio is clipped (eps_low and
    eps_high in DAPO); `dual_clip` is a bound above 1 on the ratio for negative advantages, or None.
    `max_length` belongs to `constant_length` only. `drop_uninformative` says whether the caller
    should leave out groups with all-equal rewards.
    """

    estimator: Estimator = "grpo"
    loss: Loss = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "token_mean"
    max_length: int | None = None
    kl_coefficient: float = 0.0
    kl_estimator: KL = "k3"
    advantage_eps: float = 1e-6
    drop_uninformative: bool = False

    def __post_init__(self) -> None:
        _choice("estimator", self.estimator, get_args(Estimator))
        _choice("loss", self.loss, get_args(Loss))
        _choice("aggregation", self.aggregation, get_args(Aggregation))
        _choice("kl_estimator", self.kl_estimator, get_args(KL))
        _check_aggregation(self.aggregation, self.max_length)
        if not 0.0 <= self.clip_low <= 1.0:
            raise InputError(f"clip_low is {self.clip_low}; it must lie in [0, 1]")
        if not self.clip_high >= 0.0:
            raise InputError(f"clip_high is {self.clip_high}; it must be 0 or more")
        if self.dual_clip is not None and not self.dual_clip > 1.0 + self.clip_high:
            raise InputError(
                f"dual_clip is {self.dual_clip}; it must lie above 1 + clip_high, which is"
                f" {1.0 + self.clip_high}"
            )
        if not self.kl_coefficient >= 0.0:
            raise InputError(f"kl_coefficient is {self.kl_coefficient}; it must be 0 or more")
        if not self.advantage_eps >= 0.0:
            raise InputError(f"advantage_eps is {self.advantage_eps}; it must be 0 or more")

    def advantages(self, rewards: jax.Array, *, group_size: int) -> jax.Array:
        """Returns f32[B]; see `advantages`."""
        return advantages(
            rewards, group_size=group_size, estimator=self.estimator, eps=self.advantage_eps
        )

    def token_weights(self, mask: jax.Array) -> jax.Array:
        """Returns f32[B, R]; see `token_weights`."""
        return token_weights(mask, aggregation=self.aggregation, max_length=self.max_length)

    def token_losses(
        self,
        log_probs: jax.Array,
        old_log_probs: jax.Array,
        advantages: jax.Array,
        *,
        mask: jax.Array,
        coefficients: jax.Array | None = None,
        reference_log_probs: jax.Array | None = None,
    ) -> TokenLosses:
        """Returns the losses of f32[B, R] log-probs, advantages f32[B] and mask bool[B, R].

        `loss_t = c_t * policy_loss_t + kl_coefficient * kl_t`. The coefficients c (f32[B, R], ones
        if None) come from `tim_jax.corrections`. No gradient flows into `old_log_probs`,
        `advantages`, `coefficients` or `reference_log_probs`; equal log-probs give ratios of
        exactly 1. Whatever stands off the mask, NaN too, is ignored, by the gradient as well.

        Raises:
            InputError: `kl_coefficient` is positive and there are no `reference_log_probs`.
        """
        if self.kl_coefficient > 0.0 and reference_log_probs is None:
            raise InputError(
                f"kl_coefficient is {self.kl_coefficient}, but no reference log-probs were given"
            )
        log_probs = jnp.where(mask, log_probs, 0.0)
        old = jax.lax.stop_gradient(jnp.where(mask, old_log_probs, 0.0))
        advantage = jax.lax.stop_gradient(advantages)[:, None]
        losses = self._policy_losses(log_probs, old, advantage, mask)
        loss = losses.loss
        if coefficients is not None:
            loss = loss * jax.lax.stop_gradient(jnp.where(mask, coefficients, 0.0))
        kl = losses.kl
        if reference_log_probs is not None:
            reference = jax.lax.stop_gradient(jnp.where(mask, reference_log_probs, 0.0))
            kl = kl_estimate(log_probs, reference, estimator=self.kl_estimator)
            # Without a coefficient the estimate is only reported.
            loss = loss + self.kl_coefficient * kl if self.kl_coefficient > 0.0 else loss
        return losses._replace(loss=jnp.where(mask, loss, 0.0), kl=jax.lax.stop_gradient(kl))

    def _policy_losses(self, log_probs, old, advantage, mask) -> TokenLosses:
        if self.loss == "reinforce":
            never = jnp.zeros_like(mask)
            ones = mask.astype(log_probs.dtype)
            return TokenLosses(
                -advantage * log_probs, ones, never, never, never, jnp.zeros_like(log_probs)
            )
        ratio = importance_ratio(log_probs, old, mask, level=self.loss)
        return self._clipped_losses(ratio, advantage, mask)

    def _clipped_losses(self, ratio, advantage, mask) -> TokenLosses:
        """`-min(r A, clip(r, 1 - low, 1 + high) A)`, and not below `-dual_clip |A|` where A < 0.

        Written by cases, so that a tie between the two arms of min leaves the gradient whole.
        """
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        clipped_low = mask & (advantage < 0.0) & (ratio < low)
        clipped_high = mask & (advantage > 0.0) & (ratio > high)
        used = jnp.where(clipped_low, low, jnp.where(clipped_high, high, ratio))
        clipped_dual = jnp.zeros_like(clipped_low)
        if self.dual_clip is not None:
            clipped_dual = mask & (advantage < 0.0) & (ratio > self.dual_clip)
            used = jnp.where(clipped_dual, self.dual_clip, used)
        ratio = jax.lax.stop_gradient(jnp.where(mask, ratio, 0.0))
        return TokenLosses(
            -used * advantage, ratio, clipped_low, clipped_high, clipped_dual, jnp.zeros_like(ratio)
        )


def importance_ratio(
    log_probs: jax.Array, old_log_probs: jax.Array, mask: jax.Array, *, level: Loss
) -> jax.Array:
    """Returns the ratio pi / pi_old f32[B, R] of a loss, with the log-ratio held within ±20.

    - clip: `exp(log pi_t - log pi_old_t)`.
    - gspo: `s = exp(mean_t (log pi_t - log pi_old_t))`, one value for all tokens of a row, with the
      gradient through the mean (arXiv 2507.18071, eq. 7).
    - gspo_token: the same value, but token t's gradient is its own: `sg[s] * pi_t / sg[pi_t]`
      (eq. 14). Equal to gspo in value and gradient while a row's coefficients and weights are
      equal; with a token-level correction only this one scales each token by its own coefficient.
    """
    difference = jnp.where(mask, log_probs - old_log_probs, 0.0)
    if level == "clip":
        return jnp.exp(jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    lengths = jnp.maximum(row_count(mask), 1).astype(difference.dtype)
    mean = jnp.clip(tree_sum(difference) / lengths, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)[:, None]
    if level == "gspo_token":
        own = jnp.where(mask, log_probs - jax.lax.stop_gradient(log_probs), 0.0)
        return jnp.exp(jax.lax.stop_gradient(mean) + own)
    return jnp.exp(jnp.broadcast_to(mean, difference.shape))


def kl_estimate(log_probs: jax.Array, reference: jax.Array, *, estimator: KL) -> jax.Array:
    """Returns per-token estimates f32[B, R] of KL(pi || reference) from tokens drawn from pi.

    With `d = log pi - log reference` (Schulman, "Approximating KL divergence", 2020):
    k1 `d`; k2 `d^2 / 2`; k3 `exp(-d) - 1 + d`, with d held within ±20. As a loss, k2 is the one
    whose gradient is the divergence's in expectation; k1's has expectation 0; k3 is GRPO's choice.
    """
    difference = log_probs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * jnp.square(difference)
    difference = jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return jnp.expm1(-difference) + difference


def grpo(**changes) -> Objective:
    """GRPO (arXiv 2402.03300): group mean and deviation, clip 0.2, mean of means, KL 0.04 by k3."""
    return _build(changes, aggregation="sequence_mean_token_mean", kl_coefficient=0.04)


def dr_grpo(**changes) -> Objective:
    """Dr. GRPO (arXiv 2503.20783): group mean only, sums over the `max_length` to be given."""
    return _build(changes, estimator="dr_grpo", aggregation="constant_length")


def rloo(**changes) -> Objective:
    """RLOO (arXiv 2402.14740): leave-one-out baseline, policy gradient of whole sequences."""
    return _build(
        changes, estimator="rloo", loss="reinforce", aggregation="sequence_mean_token_sum"
    )


def reinforce(**changes) -> Objective:
    """REINFORCE (Williams 1992): the raw reward, policy gradient of whole sequences."""
    return _build(
        changes, estimator="reinforce", loss="reinforce", aggregation="sequence_mean_token_sum"
    )


def dapo(**changes) -> Objective:
    """DAPO (arXiv 2503.14476): GRPO's advantage, clip 0.2 / 0.28, token mean, groups dropped."""
    return _build(changes, clip_high=0.28, drop_uninformative=True)


def gspo(**changes) -> Objective:
    """GSPO (arXiv 2507.18071): GRPO's advantage, sequence ratio clipped at 3e-4 / 4e-4."""
    return _build(
        changes,
        loss="gspo",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="sequence_mean_token_mean",
    )


PRESETS = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "dapo": dapo,
    "gspo": gspo,
}


def _build(changes: dict, **defaults) -> Objective:
    known = [field.name for field in dataclasses.fields(Objective)]
    for name in changes:
        _choice("objective option", name, known)
    return Objective(**{**defaults, **changes})


def _groups(rewards: jax.Array, group_size: int) -> jax.Array:
    if rewards.ndim != 1 or group_size < 1 or rewards.shape[0] % group_size:
        raise InputError(
            f"rewards have shape {rewards.shape}; they must be one row of groups of {group_size}"
        )
    return rewards.reshape(-1, group_size)


def _differing(groups: jax.Array) -> jax.Array:
    """bool[P, 1], True for groups f32[P, G] with more than one value. Exact: no arithmetic."""
    return jnp.any(groups != groups[:, :1], axis=1, keepdims=True)


def _check_aggregation(aggregation: Aggregation, max_length: int | None) -> None:
    _choice("aggregation", aggregation, get_args(Aggregation))
    if aggregation == "constant_length" and (max_length is None or max_length < 1):
        raise InputError(
            f"max_length is {max_length}; the aggregation 'constant_length' needs the longest"
            " response, at least 1"
        )


def _choice(what: str, value: str, known) -> None:
    if value not in known:
        raise InputError(f"{what} {value!r} is unknown{did_you_mean(str(value), known)}")
