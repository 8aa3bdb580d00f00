"""What policy losses share: their result, the importance ratio, clipping, estimates of the KL."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from tim_jax.common.errors import InputError, check_choice
from tim_jax.numerics.strict import LOG_RATIO_BOUND, widened
from tim_jax.numerics.sums import row_count, tree_sum


class PolicyLoss(NamedTuple):
    """A loss's result for each token. [B, R]; 0 or False off the mask."""

    loss: jax.Array  # f32, to be weighted and summed
    ratio: jax.Array  # f32 without gradient, the importance ratio before it is clipped
    clipped_low: jax.Array  # bool, cut off where the loss would lower the token's probability
    clipped_high: jax.Array  # bool, cut off where the loss would raise it
    clipped_dual: jax.Array  # bool, cut off by `dual_clip`


def of_wide_arrays(function: Callable) -> Callable:
    """Decorates a loss or selection, which is then given log-probs and advantages `widened`.

    So log-probs of 16 bits have ratios of float32, and those of float64 have float64's.
    """

    @functools.wraps(function)
    def of_any(log_probs, old_log_probs, advantages, mask, **options):
        wide = widened(log_probs, old_log_probs, advantages)
        return function(*wide, mask, **options)

    return of_any


def log_ratios(log_probs: jax.Array, old_log_probs: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns f32[B, R], new minus old log-probs; 0 off the mask, whatever stands there."""
    return jnp.where(mask, log_probs - old_log_probs, 0.0)


def token_ratio(log_probs: jax.Array, old_log_probs: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns f32[B, R], the importance ratio pi / pi_old, its exponent clipped to ±20."""
    difference = log_ratios(log_probs, old_log_probs, mask)
    return jnp.exp(jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def row_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[B, 1], the mean over each row's tokens of values that are 0 off the mask."""
    lengths = jnp.maximum(row_count(mask), 1).astype(values.dtype)
    return (tree_sum(values) / lengths)[:, None]


def clipped(ratio, advantages, mask, clip_low, clip_high, dual_clip) -> PolicyLoss:
    """`-min(r A, clip(r) A)`, by cases: `jnp.min` would halve the gradient where both are equal."""
    low, high = 1.0 - clip_low, 1.0 + clip_high
    clipped_low = mask & (advantages < 0.0) & (ratio < low)
    clipped_high = mask & (advantages > 0.0) & (ratio > high)
    used = jnp.where(clipped_low, low, jnp.where(clipped_high, high, ratio))
    clipped_dual = jnp.zeros_like(clipped_low)
    if dual_clip is not None:
        clipped_dual = mask & (advantages < 0.0) & (ratio > dual_clip)
        used = jnp.where(clipped_dual, dual_clip, used)
    loss = -used * advantages
    return result(loss, ratio, mask, low=clipped_low, high=clipped_high, dual=clipped_dual)


def trust_region(
    log_probs, old_log_probs, advantages, mask, divergence, bounds, ratio_cap
) -> PolicyLoss:
    """DPPO: the policy gradient, without tokens that would leave the trust region.

    A token has no gradient if its step would widen the difference of the two policies further and
    `divergence` f32[B, R] is beyond `bounds` (for negative and for positive advantages). The ratio
    weights the others, at most `ratio_cap`, and carries no gradient.
    """
    ratio = jax.lax.stop_gradient(token_ratio(log_probs, old_log_probs, mask))
    low = (advantages <= 0.0) & (log_probs < old_log_probs) & (divergence > bounds[0])
    high = (advantages > 0.0) & (log_probs > old_log_probs) & (divergence > bounds[1])
    loss = -advantages * jnp.minimum(ratio, ratio_cap) * log_probs
    return result(jnp.where(low | high, 0.0, loss), ratio, mask, low=low, high=high)


def unclipped(loss: jax.Array, ratio: jax.Array, mask: jax.Array) -> PolicyLoss:
    """Returns the result of a loss that cuts no ratio off."""
    never = jnp.zeros_like(mask)
    return result(loss, ratio, mask, low=never, high=never)


def result(loss, ratio, mask, *, low, high, dual=None) -> PolicyLoss:
    """Returns what a loss reports, with 0 or False off the mask and no gradient in the ratio."""
    ratio = jax.lax.stop_gradient(jnp.where(mask, ratio, 0.0))
    dual = jnp.zeros_like(mask) if dual is None else dual
    return PolicyLoss(jnp.where(mask, loss, 0.0), ratio, mask & low, mask & high, mask & dual)


def absolute(values: jax.Array) -> jax.Array:
    """`|x|` with gradient 0 at 0 (`jnp.abs` has 1): equal policies must not be pushed apart."""
    return values * jax.lax.stop_gradient(jnp.sign(values))


KL = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]


def kl_estimate(
    log_probs: jax.Array, reference: jax.Array, *, estimator: KL, cap: float | None = None
) -> jax.Array:
    """Returns per-token estimates f32[B, R] of KL(pi || reference) from tokens drawn from pi.

    With `d = log pi - log reference` (Schulman, "Approximating KL divergence", 2020):
    k1 `d`; k2 `d^2 / 2`; k3 `exp(-d) - 1 + d`, with d clipped to ±20; abs `|d|`. As a loss, k2 is
    the one whose gradient is the divergence's in expectation; k1's has expectation 0; k3 is GRPO's
    choice. `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2.

    `cap` clips the estimate to ±cap: verl's k3 has a cap of 10. Beyond it there is no gradient,
    except for k1+ and k3+, whose gradient is not clipped.

    Raises:
        InputError: an unknown estimator, or a cap that is not positive.
    """
    check_choice("estimator", estimator, get_args(KL))
    if cap is not None and not cap > 0.0:
        raise InputError(f"cap is {cap}; it must be positive, or None for no cap")
    log_probs, reference = widened(log_probs, reference)
    difference = log_probs - reference
    value = _divergence_estimate(difference, estimator.removesuffix("+"))
    if cap is not None:
        value = jnp.clip(value, -cap, cap)
    if not estimator.endswith("+"):
        return value
    # Zero, with the gradient of k2, which is d.
    constant = jax.lax.stop_gradient(difference)
    return jax.lax.stop_gradient(value) + constant * (difference - constant)


def _divergence_estimate(difference: jax.Array, estimator: str) -> jax.Array:
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return absolute(difference)
    if estimator == "k2":
        return 0.5 * jnp.square(difference)
    d = jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return jnp.expm1(-d) + d
