"""Means of groups, of rewards that stand by group; their bits do not depend on the program.

Arrays are [P, G] or [P, G, R]: P groups of G responses, of R tokens at most.
"""

import jax
import jax.numpy as jnp

from tim_jax.numerics import strict
from tim_jax.numerics.sums import tree_sum


def one_less(number: jax.Array) -> jax.Array:
    """The divisor of a sample variance, at least 1."""
    return jnp.maximum(number - 1.0, 1.0)


def quotient(total: jax.Array, number: jax.Array) -> jax.Array:
    """total / number as XLA compiles it for a constant number: times the rounded reciprocal.

    So a constant and a count give the same bits. `uncontracted`, because with the subtraction that
    follows it would become a fused multiply-add in some programs and not in others.
    """
    return strict.uncontracted(total * (1.0 / number))


def total(values: jax.Array) -> jax.Array:
    """The sum of f32[P, G] or f32[P, G, R]; by rows first, so that a longer R changes no bit."""
    return tree_sum((tree_sum(values) if values.ndim == 3 else values).reshape(-1))


def weighted_mean(values: jax.Array, weights: jax.Array, counted: jax.Array) -> jax.Array:
    """Means over axis 1, which stays with size 1; plain ones where all weights are 0.

    `values` and `weights` broadcast to the shape of `counted`; the weights are 0 or more.
    """
    weights = jnp.where(counted, weights, 0.0)
    weightless = jnp.max(weights, axis=1, keepdims=True) == 0.0
    weights = jnp.where(weightless, counted.astype(weights.dtype), weights)
    values = jnp.where(counted, values, 0.0)
    total = jnp.expand_dims(tree_sum(weights, axis=1), 1)
    weighted = jnp.expand_dims(tree_sum(weights * values, axis=1), 1)
    return weighted / jnp.where(total == 0.0, 1.0, total)


def differing(
    groups: jax.Array, counted: jax.Array | None = None, *, axis: int | None = 1
) -> jax.Array:
    """True where `axis` (kept with size 1; None: all) has more than one value. No arithmetic."""
    if counted is None:
        counted = jnp.ones_like(groups, dtype=bool)
    largest = jnp.max(jnp.where(counted, groups, -jnp.inf), axis=axis, keepdims=True)
    return jnp.any(counted & (groups != largest), axis=axis, keepdims=True)
