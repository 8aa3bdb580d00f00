"""Estimates of the KL, and reward shaping: what is added to rewards before advantages.

B sequences; R is the longest response. A reward is f32[B], one per sequence, or f32[B, R].
"""

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from tim_jax.common.errors import InputError, check_choice
from tim_jax.numerics.strict import LOG_RATIO_BOUND, widened

# The largest relative error of the KL that the controller answers to (Ziegler et al. 2019, 2.2).
_LARGEST_ERROR = 0.2
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


def absolute(values: jax.Array) -> jax.Array:
    """`|x|` with gradient 0 at 0 (`jnp.abs` has 1): equal policies must not be pushed apart."""
    return values * jax.lax.stop_gradient(jnp.sign(values))


def overlong_penalty(lengths: jax.Array, *, longest: int, cache: int) -> jax.Array:
    """Returns f32[B] in [-1, 0], to be added to the rewards: DAPO's soft overlong punishment.

    0 up to `longest - cache` tokens, `(longest - cache - length) / cache` from there to `longest`,
    -1 beyond (arXiv 2503.14476, eq. 13).

    Args:
        lengths: i32[B], tokens of each response, the end-of-sequence token included.
        longest: the length at which the penalty is complete, in tokens.
        cache: over how many tokens before that it grows.

    Raises:
        InputError: `cache` is not in [1, longest].
    """
    if not 1 <= cache <= longest:
        raise InputError(f"cache is {cache}; it must lie in [1, longest], which is [1, {longest}]")
    lengths = lengths.astype(jnp.int32)  # unsigned ones would not go below 0
    beyond = (longest - cache - lengths).astype(jnp.float32)
    # Most programs compile a quotient by a constant as this product, but not all. The select at the
    # end keeps the product from fusing with the reward's sum, and makes -1 exact.
    penalty = jnp.clip(beyond * (1.0 / cache), -1.0, 0.0)
    return jnp.where(lengths >= longest, -1.0, penalty)


def kl_penalty(
    log_probs: jax.Array,
    reference_log_probs: jax.Array,
    mask: jax.Array,
    *,
    coefficient: float | jax.Array,
    estimator: KL = "k1",
) -> jax.Array:
    """Returns f32[B, R], to be subtracted from the tokens' rewards: `coefficient * kl_t`.

    The estimated KL from the reference (Ouyang et al. 2022, arXiv 2203.02155, eq. 2, with
    `estimator` k1). See `kl_estimate`. 0 off the mask.

    Args:
        log_probs: f32[B, R], of the policy that sampled.
        reference_log_probs: f32[B, R], of the reference policy.
        mask: bool[B, R], True on response tokens. What stands elsewhere, NaN too, is not read.
        coefficient: in units of reward per nat; a float or an f32[], such as `AdaptiveKL` gives.
        estimator: of the KL at a token.

    Raises:
        InputError: arrays of different shapes, or a coefficient below 0 that is a Python number.
    """
    if not log_probs.shape == reference_log_probs.shape == mask.shape:
        raise InputError(
            f"log_probs, reference_log_probs and mask have shapes {log_probs.shape},"
            f" {reference_log_probs.shape} and {mask.shape}; they must be the same"
        )
    if isinstance(coefficient, float | int) and not coefficient >= 0.0:
        raise InputError(f"coefficient is {coefficient}; it must be 0 or more")
    ours, theirs, factor = widened(log_probs, reference_log_probs, coefficient)
    ours, theirs = (jnp.where(mask, x, 0.0) for x in (ours, theirs))
    estimates = kl_estimate(ours, theirs, estimator=estimator)
    # Selected after it is multiplied, so that the product cannot fuse with the caller's sum.
    return jnp.where(mask, factor * estimates, 0.0)


@dataclass(frozen=True)
class AdaptiveKL:
    """A controller of the KL penalty's coefficient. Checked when built.

    `target` is the KL to be kept, in nats per sequence or per token, as the measured one is.
    `horizon` is the number of sequences over which a KL that is 20% or more off changes the
    coefficient by about 20%. The coefficient itself is the caller's state.
    """

    target: float
    horizon: int = 10_000

    def __post_init__(self) -> None:
        if not self.target > 0.0:
            raise InputError(f"target is {self.target}; the KL to be held must be positive")
        if not self.horizon >= 1:
            raise InputError(f"horizon is {self.horizon}; it must be at least 1 sequence")

    def update(self, coefficient: jax.Array, kl: jax.Array, *, sequences: int) -> jax.Array:
        """Returns f32[], the coefficient after a step on `sequences` sequences of divergence `kl`.

        `coefficient * (1 + clip((kl - target) / target, -0.2, 0.2) * sequences / horizon)`, the
        log-space proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section 2.2),
        whose K_beta of 0.1 per step is `sequences / horizon`. A coefficient of 0 stays 0.

        A `kl` that is not finite leaves the coefficient unchanged: the coefficient is kept from
        step to step, and would stay NaN for ever.

        Args:
            coefficient: f32[], 0 or more.
            kl: f32[], measured in the unit of `target`.
            sequences: of this step; below `5 * horizon`, where the factor could reach 0.

        Raises:
            InputError: `sequences` is below 0, or `5 * horizon` or more.
        """
        if not 0 <= sequences < self.horizon / _LARGEST_ERROR:
            raise InputError(
                f"sequences is {sequences}; with horizon {self.horizon} it must lie in"
                f" [0, {self.horizon / _LARGEST_ERROR:g}), or one step could end the penalty"
            )
        coefficient, kl = widened(coefficient, kl)
        # Each factor is inside a clip or a select, so that no sum becomes a fused multiply-add.
        gain = sequences / self.horizon
        limit = _LARGEST_ERROR * gain
        change = jnp.clip((kl - self.target) / self.target * gain, -limit, limit)
        return jnp.where(jnp.isfinite(kl), coefficient * (1.0 + change), coefficient)
