"""Losses of the importance ratio, token by token, and the plain policy gradient."""

import jax
import jax.numpy as jnp

from tim_jax.numerics.strict import LOG_RATIO_BOUND
from tim_jax.objectives.losses.base import (
    PolicyLoss,
    clipped,
    log_ratios,
    of_wide_arrays,
    result,
    row_mean,
    token_ratio,
    trust_region,
    unclipped,
)

# Bounds on log-probs in the divergence of two coins. A float32 log-prob of 0 has been rounded;
# taken literally, any other policy would be infinitely far from it. DPPO's authors use the same
# 1e-8.
COIN_BOUNDS = (-100.0, -1e-8)


@of_wide_arrays
def reinforce(
    log_probs: jax.Array, old_log_probs: jax.Array, advantages: jax.Array, mask: jax.Array
) -> PolicyLoss:
    """`-A log pi` (Williams 1992). Nothing is clipped and the ratio is 1 by definition."""
    del old_log_probs
    return unclipped(-advantages * log_probs, mask.astype(log_probs.dtype), mask)


@of_wide_arrays
def clip(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`: PPO (arXiv 1707.06347, eq. 7).

    With `dual_clip` the ratio of a token with a negative advantage counts as that at most (arXiv
    1912.09729). Two bounds instead of one are DAPO's (arXiv 2503.14476, eq. 8).
    """
    ratio = token_ratio(log_probs, old_log_probs, mask)
    return clipped(ratio, advantages, mask, clip_low, clip_high, dual_clip)


@of_wide_arrays
def gspo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's loss on the ratio of the sequence, `s = exp(mean_t d_t)` (arXiv 2507.18071, eq. 7).

    For both names, 'gspo' and 'gspo_token', the ratio of token t is the paper's token form
    `sg(s) pi_t / sg(pi_t)` (eq. 14): it has the value of s and token t's gradient. Where all tokens
    of a row have the same weight, coefficient and advantage, the gradient is that of the sequence
    form (eq. 5). Where they do not, only this form is right: in the sequence form each token's
    gradient flows through the mean, so all tokens would share the average of the coefficients.
    """
    mean = row_mean(log_ratios(log_probs, old_log_probs, mask), mask)
    sequence = jnp.clip(mean, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # 0 in value, with the token's gradient.
    token = jnp.where(mask, log_probs - jax.lax.stop_gradient(log_probs), 0.0)
    ratio = jnp.exp(jax.lax.stop_gradient(sequence) + token)
    return clipped(ratio, advantages, mask, clip_low, clip_high, dual_clip)


@of_wide_arrays
def cispo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> PolicyLoss:
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi` (arXiv 2506.13585, eq. 4 and 5).

    Every token keeps its gradient. The flags say where its weight was clipped, for either sign of
    the advantage. The paper sets no lower bound (clip_low 1) and names no upper one; the ratio of
    at most 5 is ScaleRL's (arXiv 2510.13786).
    """
    ratio = jax.lax.stop_gradient(token_ratio(log_probs, old_log_probs, mask))
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = -jnp.clip(ratio, low, high) * advantages * log_probs
    return result(loss, ratio, mask, low=ratio < low, high=ratio > high)


@of_wide_arrays
def sapo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> PolicyLoss:
    """`-A sigmoid(tau (r - 1)) 4 / tau`, a soft gate instead of a clip (SAPO, arXiv 2511.20347).

    tau is `temperature_positive` where A > 0, else `temperature_negative`. The gate's slope is 1 at
    a ratio of 1 and falls off on both sides, so nothing is cut off.
    """
    ratio = token_ratio(log_probs, old_log_probs, mask)
    tau = jnp.where(advantages > 0.0, temperature_positive, temperature_negative)
    gate = jax.nn.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return unclipped(-advantages * gate, ratio, mask)


@of_wide_arrays
def gmpo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> PolicyLoss:
    """`-A sg(s) exp(x_t - sg(x_t))` with `s = exp(mean_t x_t)`: GMPO (arXiv 2507.20673).

    x is the log-ratio clipped where the advantage pulls it outwards: at `clip_high` from above
    where A > 0, at `-clip_low` from below where A < 0. The paper's loss of a sequence is `-A s`;
    with weights of 1 / (N T) on the T tokens of each of N rows, and one advantage per row, the sum
    of these losses and its gradient are those of the paper's mean. The ratio returned is s.
    """
    difference = log_ratios(log_probs, old_log_probs, mask)
    log_ratio = jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    low = (advantages < 0.0) & (log_ratio < -clip_low)
    high = (advantages > 0.0) & (log_ratio > clip_high)
    used = jnp.where(low, -clip_low, jnp.where(high, clip_high, log_ratio))
    ratio = jnp.exp(jax.lax.stop_gradient(row_mean(jnp.where(mask, used, 0.0), mask)))
    loss = -advantages * ratio * jnp.exp(used - jax.lax.stop_gradient(used))
    return result(loss, jnp.broadcast_to(ratio, loss.shape), mask, low=low, high=high)


@of_wide_arrays
def dppo_tv(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    ratio_cap: float = 20.0,
) -> PolicyLoss:
    """`-A sg(min(r, ratio_cap)) log pi` in a trust region, 0 outside: DPPO (arXiv 2602.04879).

    A token is outside where the divergence D of the two policies is above `clip_high` and A > 0 has
    already raised its probability, or above `clip_low` and A <= 0 has lowered it. Here D is the
    binary total variation `|pi - pi_old|`. The defaults are those of the authors' example in verl.
    """
    # The larger probability times one minus the quotient: no cancellation, and no overflow.
    larger = jnp.exp(jnp.maximum(log_probs, old_log_probs))
    divergence = -larger * jnp.expm1(-jnp.abs(log_probs - old_log_probs))
    bounds = clip_low, clip_high
    return trust_region(log_probs, old_log_probs, advantages, mask, divergence, bounds, ratio_cap)


@of_wide_arrays
def dppo_kl(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    ratio_cap: float = 20.0,
) -> PolicyLoss:
    """As `dppo_tv`, with the binary divergence `KL(old || current)` (arXiv 2602.04879).

    `D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))` with p = pi and q = pi_old, of log-probs
    clipped to [-100, -1e-8].
    """
    p, q = (jnp.clip(x, *COIN_BOUNDS) for x in (log_probs, old_log_probs))
    others = jax.nn.log1mexp(-q) - jax.nn.log1mexp(-p)
    divergence = jnp.exp(q) * (q - p) - jnp.expm1(q) * others
    bounds = clip_low, clip_high
    return trust_region(log_probs, old_log_probs, advantages, mask, divergence, bounds, ratio_cap)
