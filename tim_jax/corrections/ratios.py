"""The importance ratio and its statistics. One definition each, used by every block and metric.

`log_ratio` is always `d_t = log pi_train(a_t) - log pi_rollout(a_t)`, f32[B, R], and the ratio
`r_t = exp(d_t)`: trainer over rollout, never the inverse. `mask` is bool[B, R], True on response
tokens; values elsewhere are never read. Every exponent is clipped to ±20 (exp(20) = 4.9e8), as in
verl. Exponentials and logarithms are those of `strict`, so that a token's value has the same bits
in a whole batch, in a chunk of it, and on one of many devices.

Other float dtypes are computed in float32. float64 stays float64: then exponentials are XLA's own,
and the bits are not promised.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from tim_jax.common.errors import InputError
from tim_jax.numerics import strict
from tim_jax.numerics.strict import compensated_sum, row_count, run_sum

Level = Literal["token", "sequence", "geometric", "turn", "turn_geometric"]
Statistic = Literal["ratio", "k1", "k2", "k3", "error", "binary_kl", "divergence"]
Over = Literal["token", "sum", "mean", "max"]

PROBABILITY_FLOOR = 1e-6


def ratio(log_ratio: jax.Array, mask: jax.Array, level: Level) -> jax.Array:
    """Returns the ratio at a level: f32[B, 1] for sequence and geometric, else f32[B, R].

    - token: `r_t = exp(d_t)`
    - sequence: `prod_t r_t = exp(sum_t d_t)`; the sum, not its terms, is clipped to ±20
    - geometric: `(prod_t r_t)^(1/T) = exp(mean_t d_t)`, the length-normalised ratio
    - turn, turn_geometric: the product and its root over the token's own turn: an unbroken run of
      the mask, with replies of an environment before and after it

    Equal log-probs give exactly 1; a row without tokens has ratio 1.
    """
    [log_ratio] = strict.widened(log_ratio)
    differences = jnp.where(mask, log_ratio, 0.0)
    if level == "token":
        return _exp(_clipped(differences))
    if level in ("turn", "turn_geometric"):
        total = run_sum(_finite(differences), mask)
        if level == "turn_geometric":
            length = run_sum(mask.astype(total.dtype), mask)
            total = strict.quotient(total, jnp.maximum(length, 1.0))
        return _exp(_clipped(total))
    if level == "sequence":
        high, low = compensated_sum(_finite(differences))
        clipped = _clipped(high)
        # exp(high + low) for a low far below one unit in the last place of high.
        return (_exp(clipped) * (1.0 + jnp.where(clipped == high, low, 0.0)))[:, None]
    return _exp(_clipped(_row_mean(_finite(differences), mask)))[:, None]


def token_statistic(
    statistic: Statistic,
    log_ratio: jax.Array,
    *,
    log_probs: jax.Array | None = None,
    divergence: jax.Array | None = None,
) -> jax.Array:
    """Returns the statistic of each token, f32[B, R], each `d_t` clipped to ±20.

    - ratio: `r`; k1: `d = log r`, so that bounds on it are bounds on r; k2: `d^2 / 2`
    - k3: `r - 1 - log r` (Schulman 2020), at least 0; error: `exp|d|`, at least 1
    - binary_kl: the larger of `D(p||q)` and `D(q||p)`, where p = pi_train and q = pi_rollout, both
      clipped to [1e-6, 1 - 1e-6], and `D(p||q) = p log(p/q) + (1-p) log((1-p)/(1-q))` (KPop);
      needs `log_probs`, the trainer's
    - divergence: what the caller gives, such as an exact KL per token
    """
    log_ratio, log_probs, divergence = strict.widened(log_ratio, log_probs, divergence)
    d = _clipped(log_ratio)
    if statistic == "k1":
        return d
    if statistic == "ratio":
        return _exp(d)
    if statistic == "error":
        return _exp(jnp.abs(d))
    if statistic == "k2":
        return 0.5 * jnp.square(d)
    if statistic == "k3":
        return k3(d)
    if statistic == "divergence":
        if divergence is None:
            raise InputError("the statistic 'divergence' needs the extra argument 'divergence'")
        return divergence
    if log_probs is None:
        raise InputError("the statistic 'binary_kl' needs the extra argument 'log_probs'")
    return _binary_kl(log_probs, log_ratio)


def k3(log_ratio: jax.Array) -> jax.Array:
    """Returns `exp(d) - 1 - d` to full relative precision."""
    [log_ratio] = strict.widened(log_ratio)
    return strict.exp_above_tangent(log_ratio)


def aggregate(values: jax.Array, mask: jax.Array, over: Literal["sum", "mean"]) -> jax.Array:
    """Returns f32[B, 1], the sum or mean over each row's tokens; 0 for a row without tokens."""
    [values] = strict.widened(values)
    values = jnp.where(mask, values, 0.0)
    if over == "sum":
        return compensated_sum(values)[0][:, None]
    return _row_mean(values, mask)[:, None]


def probabilities(log_probs: jax.Array, log_ratio: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `(pi_train, pi_rollout)`, f32[B, R] each, from the trainer's log-probs."""
    log_probs, log_ratio = strict.widened(log_probs, log_ratio)
    train = strict.exp(log_probs)
    rollout = strict.exp(jnp.minimum(log_probs - log_ratio, strict.LOG_RATIO_BOUND))
    return train, jnp.where(log_ratio == 0.0, train, rollout)


def _binary_kl(log_probs: jax.Array, log_ratio: jax.Array) -> jax.Array:
    p, q = (
        jnp.clip(x, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
        for x in probabilities(log_probs, log_ratio)
    )
    log_odds = strict.log(p / q), strict.log((1.0 - p) / (1.0 - q))

    def divergence(x):
        return strict.uncontracted(x * log_odds[0]) + strict.uncontracted((1.0 - x) * log_odds[1])

    return jnp.maximum(divergence(p), -divergence(q))


def _row_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    high, low = compensated_sum(values)
    lengths = jnp.maximum(row_count(mask), 1).astype(values.dtype)
    return strict.quotient(high, lengths) + low / lengths


def _clipped(exponent: jax.Array) -> jax.Array:
    return jnp.clip(exponent, -strict.LOG_RATIO_BOUND, strict.LOG_RATIO_BOUND)


def _finite(log_ratio: jax.Array) -> jax.Array:
    # An impossible token has log-ratio -inf; a sum of two such must stay a number.
    return jnp.clip(log_ratio, -1e6, 1e6)


def _exp(exponent: jax.Array) -> jax.Array:
    # On-policy coefficients must be exactly 1, however an exponential rounds.
    return jnp.where(exponent == 0.0, 1.0, strict.exp(exponent))
