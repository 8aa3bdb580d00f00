"""The next-token distribution: temperature, top-k, top-p; drawing from it, and its log-probs.

Everything is a function of one row of logits and uses only exact comparisons and fixed-order sums,
so the sampler and the learner, given the same logits, agree on the truncation, the draw and the
log-prob to the bit.
"""

from functools import partial

import jax
import jax.numpy as jnp

from tim_jax import kernels
from tim_jax.kernels import formulas
from tim_jax.model.execution import Sampling
from tim_jax.numerics import Numerics
from tim_jax.numerics.strict import clipped_to_finite, widened
from tim_jax.policy import truncation

_LANES = 128


def log_prob(
    logits: jax.Array, tokens: jax.Array, *, sampling: Sampling, numerics: Numerics
) -> jax.Array:
    """log pi(token) under `sampling`, float32 [N], of logits [N, V] and tokens i32[N].

    Logits of other float dtypes are cast to float32, which the kernels compute with.

    The token itself always counts as part of the truncated set. At the weights that drew it, it is
    in it anyway; and when the weights have moved, its log-prob stays finite.
    """
    if sampling.temperature == 0:
        return jnp.zeros(tokens.shape, jnp.float32)
    ops = kernels.family(numerics)
    scaled = _scale(logits.astype(jnp.float32), sampling, ops)
    peak = ops.fence(ops.peak(scaled))
    weights = _weights(scaled, peak, sampling, numerics, keep=tokens)
    return _log_prob_of(scaled, peak, weights, tokens, sampling, numerics)


def entropy(logits: jax.Array, *, sampling: Sampling) -> jax.Array:
    """Entropy in nats, float32 [N], of softmax(logits / temperature); truncation is ignored.

    A metric, not bound by the exactness contract. float64 where the logits are.
    """
    [logits] = widened(logits)
    scaled = logits / max(sampling.temperature, 1e-6)
    scaled = scaled - jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(scaled)
    normaliser = jnp.sum(weights, axis=-1)
    return jnp.log(normaliser) - jnp.sum(weights * scaled, axis=-1) / normaliser


def score_energy(logits: jax.Array, tokens: jax.Array, *, sampling: Sampling) -> jax.Array:
    """Squared norm of the score of i32[N] tokens with respect to their logits, float32 [N].

    `|d log pi(a) / d logits|^2 = 1 - 2 pi(a) + sum_v pi(v)^2` of softmax(logits / temperature), in
    units of 1 / temperature^2; truncation is ignored. Baselines of least variance weight with it.
    float64 where the logits are.
    """
    [logits] = widened(logits)
    scaled = logits / max(sampling.temperature, 1e-6)
    chances = jax.nn.softmax(scaled, axis=-1)
    chosen = jnp.take_along_axis(chances, tokens[:, None], axis=-1)[:, 0]
    return 1.0 - 2.0 * chosen + jnp.sum(jnp.square(chances), axis=-1)


def draw(
    logits: jax.Array, uniform: jax.Array, *, sampling: Sampling, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """Draws one token per row by inverting the cumulative distribution, and its log-prob.

    Args:
      logits: float32 [N, V]; other float dtypes are cast to it.
      uniform: float32 [N] in [0, 1); one number per draw, where Gumbel noise would take V.

    Returns:
      Tokens i32[N] and their log-probs float32 [N] under the distribution they were drawn from.
    """
    ops = kernels.family(numerics)
    if sampling.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return tokens, jnp.zeros(tokens.shape, jnp.float32)
    scaled = _scale(logits.astype(jnp.float32), sampling, ops)
    peak = ops.fence(ops.peak(scaled))
    weights = _weights(scaled, peak, sampling, numerics, keep=None)
    tokens = ops.fence(_invert(weights, uniform.astype(jnp.float32)))
    return tokens, _log_prob_of(scaled, peak, weights, tokens, sampling, numerics)


def _scale(logits, sampling, ops):
    if sampling.temperature == 1:
        return logits
    # Contracted with the subtraction of the maximum, a token's log-prob could exceed 0.
    return ops.fence(clipped_to_finite(logits * (1.0 / sampling.temperature)))


def _weights(scaled, peak, sampling, numerics, *, keep):
    """exp(logit - max), zero outside the truncated set."""
    ops = kernels.family(numerics)
    weights = ops.exponentials(scaled, peak, numerics=numerics)
    if sampling.truncated:
        fixed = jax.lax.stop_gradient((scaled, peak, weights))
        inside = truncation.kept(*fixed, sampling=sampling, numerics=numerics)
        if keep is not None:
            inside |= jnp.arange(scaled.shape[-1], dtype=keep.dtype)[None, :] == keep[:, None]
        weights = ops.fence(jnp.where(inside, weights, 0.0))
    return weights


def _log_prob_of(scaled, peak, weights, tokens, sampling, numerics):
    ops = kernels.family(numerics)
    narrowed = partial(formulas.narrowed, dtype=numerics.precision.softmax)
    if sampling.truncated:
        log_normaliser = ops.log(ops.row_sum(weights, numerics=numerics), numerics=numerics)
    else:
        log_normaliser = ops.log_normaliser(scaled, peak, weights, numerics=numerics)
    chosen = ops.fence(jnp.take_along_axis(scaled, tokens[:, None], axis=1)[:, 0])
    return ops.fence(narrowed(narrowed(chosen - peak) - log_normaliser))


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index i32[N] at which the cumulative weight passes uniform * total.

    Two levels: first the lane (token index modulo 128), then the token within the lane, so that no
    cumulative sum over the whole vocabulary is needed. A weight of zero is never drawn.
    """
    count, size = weights.shape
    by_lane = formulas.fold(weights, jnp.add, lanes=_LANES, neutral=0.0)
    lane, rest = _pass(by_lane, lambda total: clipped_to_finite(uniform * total))
    folded = jnp.pad(weights, ((0, 0), (0, -size % _LANES))).reshape(count, -1, _LANES)
    within = jnp.take_along_axis(folded, lane[:, None, None], axis=2)[..., 0]
    chunk, _ = _pass(within, lambda total: jnp.maximum(rest, 0.0))
    return (chunk * _LANES + lane).astype(jnp.int32)


def _pass(weights: jax.Array, target) -> tuple[jax.Array, jax.Array]:
    """First index whose running sum exceeds target(total), and what is left of the target there."""
    running = weights
    shift = 1
    while shift < weights.shape[1]:
        running = running + jnp.pad(running[:, :-shift], ((0, 0), (shift, 0)))
        shift *= 2
    goal = target(running[:, -1])
    passed = jnp.sum((running <= goal[:, None]).astype(jnp.int32), axis=-1)
    # Rounding can put the goal at the very end, or on a weight of zero: take the last one before.
    index = jnp.arange(weights.shape[1])[None, :]
    eligible = (weights > 0) & (index <= passed[:, None])
    chosen = jnp.max(jnp.where(eligible, index, 0), axis=-1)
    before = jnp.take_along_axis(running - weights, chosen[:, None], axis=1)[:, 0]
    return chosen, goal - before
