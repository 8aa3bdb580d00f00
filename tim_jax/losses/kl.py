"""Estimates of the KL divergence from a reference policy, token by token."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from tim_jax.errors import InputError, check_choice
from tim_jax.losses.base import absolute
from tim_jax.strict import LOG_RATIO_BOUND

KL = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]


def kl_estimate(
    log_probs: jax.Array, reference: jax.Array, *, estimator: KL, cap: float | None = None
) -> jax.Array:
    """Returns per-token estimates f32[B, R] of KL(pi || reference) from tokens drawn from pi.

    With `d = log pi - log reference` (Schulman, "Approximating KL divergence", 2020):
    k1 `d`; k2 `d^2 / 2`; k3 `exp(-d) - 1 + d`, with d held within ±20; abs `|d|`. As a loss, k2 is
    the one whose gradient is the divergence's in expectation; k1's has expectation 0; k3 is GRPO's
    choice. `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2.

    `cap` holds the estimate within ±cap: verl's k3 has a cap of 10. Beyond it there is no gradient,
    but for k1+ and k3+, whose gradient it leaves alone.

    Raises:
        InputError: an unknown estimator, or a cap that is not positive.
    """
    check_choice("estimator", estimator, get_args(KL))
    if cap is not None and not cap > 0.0:
        raise InputError(f"cap is {cap}; it must be positive, or None for no cap")
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
    held = jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return jnp.expm1(-held) + held
