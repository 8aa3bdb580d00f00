"""Statistics of masked arrays: means, shares, quantiles and extremes, as f32[].

Means are compensated sums in a fixed order (`sums`), so they agree with float64 and do not depend
on padding or sharding. A mean over nothing is 0. Of float64 values, what is f32 here is float64.

A device may divide by multiplying with the rounded reciprocal, and so may a compiler that knows the
divisor: 41 * (1 / 41) is 0.99999994. Rules compare shares and means with 1, so what is 1 by
definition is 1 exactly (`quotient`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tim_jax.numerics.sums import compensated_sum, count

_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32
# In thousandths.
QUANTILES = {"p01": 10, "p25": 250, "p50": 500, "p75": 750, "p99": 990, "p999": 999}


def mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns f32[], the mean of the values [...] where the mask bool[...] is True."""
    total = jnp.where(mask, values, 0.0)
    for _ in range(total.ndim):
        total, _ = compensated_sum(total)
    return quotient(total, count(mask, total.dtype))


def share(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Returns f32[], the number of True places of `part` over that of `whole`; 1 for all of them.

    Below 1 if one is missing, however many there are. 0 if `whole` has none.
    """
    number, total = (jnp.sum(x, dtype=jnp.int32) for x in (part, whole))
    found = quotient(number.astype(jnp.float32), count(whole))
    return jnp.where(number < total, jnp.minimum(found, _BELOW_ONE), found)


def quotient(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Returns `part / whole`, of a `whole` that is not 0; exactly 1 where they are equal.

    Not for differentiation.
    """
    return jnp.where(part == whole, 1.0, part / whole)


def effective_share(
    mean: jax.Array, mean_square: jax.Array, *, least: jax.Array, most: jax.Array
) -> jax.Array:
    """Returns the effective sample size of weights as a share in [0, 1], `mean(w)^2 / mean(w^2)`.

    Exactly 1 where all weights are equal, `least` being the smallest and `most` the largest of
    them; 0 where all are 0; NaN where one is NaN.
    """
    equal = (least == most) & (least > 0.0)
    nothing = mean_square == 0.0
    share = jnp.minimum(jnp.square(mean) / jnp.where(nothing, 1.0, mean_square), 1.0)
    return jnp.where(equal, 1.0, jnp.where(nothing, 0.0, share))


def extreme(values: jax.Array, mask: jax.Array, function: Callable) -> jax.Array:
    """Returns f32[], `jnp.max` or `jnp.min` of the masked values; 0 if there are none."""
    outside = -jnp.inf if function is jnp.max else jnp.inf
    found = function(jnp.where(mask, values, outside), initial=outside)
    return jnp.where(jnp.any(mask), found, 0.0)


def quantiles(values: jax.Array, mask: jax.Array, name: str) -> dict[str, jax.Array]:
    """Returns `{name_p01: ...}`, linearly interpolated quantiles of the masked values, f32[].

    If one of them is NaN, all quantiles are NaN, as in NumPy.
    """
    if values.size == 0:
        return {f"{name}_{label}": jnp.zeros((), values.dtype) for label in QUANTILES}
    unordered = jnp.any(mask & jnp.isnan(values))
    ordered = jnp.sort(jnp.where(mask, values, jnp.inf).reshape(-1))
    last = jnp.maximum(jnp.sum(mask, dtype=jnp.int32) - 1, 0)
    result = {}
    for label, share in QUANTILES.items():
        # last * share / 1000 in integers: a float32 place is too coarse for millions of tokens.
        below = (last // 1000) * share + (last % 1000) * share // 1000
        part = ((last % 1000) * share % 1000).astype(values.dtype) / 1000.0
        left, right = ordered[below], ordered[jnp.minimum(below + 1, last)]
        quantile = left + part * (right - left)
        quantile = jnp.where(unordered, jnp.nan, quantile)
        result[f"{name}_{label}"] = jnp.where(jnp.any(mask), quantile, 0.0)
    return result
