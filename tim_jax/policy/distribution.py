"""The next-token distribution: temperature, top-k, top-p; drawing from it, and its log-probs.

Everything is a function of one row of logits and uses only exact comparisons and fixed-order sums,
so the sampler and the learner, given the same logits, agree on the truncation, the draw and the
log-prob to the bit.

Top-k and top-p keep the tokens whose logit is at least a threshold: the largest at which the kept
tokens still amount to enough, to `top_k` tokens or to the share `top_p` of the probability. Both
amounts are sums of whole numbers, exact in every order. So the kept set depends on the row's logits
and weights alone, not on the batch, the program or how the threshold was searched for. The search
needs neither a sort nor a rule for ties. One pass over a row adds up the amounts above 15
thresholds, and the next divides the interval that is left between two of them, until it holds a
single token: two to four passes for a language model's logits, eleven at most, which only logits
that are equal to the bit at the threshold can need.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import kernels
from tim_jax.kernels import formulas
from tim_jax.model.execution import Sampling
from tim_jax.numerics import Numerics
from tim_jax.numerics.strict import clipped_to_finite, widened

_LANES = 128
_LEFT_OUT = -1e30  # a logit whose exponential is 0


def log_prob(
    logits: jax.Array,
    tokens: jax.Array,
    *,
    sampling: Sampling,
    numerics: Numerics,
    supports: jax.Array | None = None,
) -> jax.Array:
    """log pi(token) under `sampling`, float32 [N], of logits [N, V], cast to it, and tokens i32[N].

    The token itself always counts as part of the truncated set. At the weights that drew it, it is
    in it anyway; and when the weights have moved, its log-prob stays finite.

    `supports` i32[N, K] are the tokens that another engine kept, see `Rollout.supports`: the
    distribution is renormalised over these, and not over what `sampling` would keep.
    """
    if sampling.temperature == 0:
        return jnp.zeros(tokens.shape, jnp.float32)
    ops = kernels.family(numerics)
    scaled = _scale(logits.astype(jnp.float32), sampling, ops)
    if supports is not None:
        sampling = replace(sampling, top_k=0, top_p=1.0)
        scaled = jnp.where(_members(supports, tokens, scaled.shape[1]), scaled, _LEFT_OUT)
    peak = ops.fence(ops.peak(scaled))
    weights = _weights(scaled, peak, sampling, numerics, keep=tokens)
    return _log_prob_of(scaled, peak, weights, tokens, sampling, numerics)


def _members(supports: jax.Array, tokens: jax.Array, size: int) -> jax.Array:
    """bool[N, V], whether a token is in its row's support, or is the row's own."""
    rows = jnp.arange(len(tokens))[:, None]
    places = jnp.where(supports < 0, size, supports)
    inside = jnp.zeros((len(tokens), size + 1), bool).at[rows, places].set(True)[:, :size]
    return inside.at[rows, tokens[:, None]].set(True) | jnp.all(supports < 0, axis=1)[:, None]


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
        inside = kept_tokens(*fixed, sampling=sampling, numerics=numerics)
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


# Probabilities are counted in units of 2^-30: the sum over a row stays far below 2^31, also if
# rounding (the softmax may be computed in bfloat16) takes the row's probabilities above 1.
_UNITS = 2.0**30
_PARTS = 16
_MOST_PASSES = 10  # after the first
# The first thresholds, in nats below the maximum: 15, dense where one nat holds much probability.
_BELOW = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 14.0, 18.0)
_LOWEST = -0x7F800000  # the number of minus infinity
_HIGHEST = 0x7FFFFFFF
_NEAR = 64.0


def kept_tokens(
    scaled: jax.Array,
    peak: jax.Array,
    weights: jax.Array,
    *,
    sampling: Sampling,
    numerics: Numerics,
) -> jax.Array:
    """The tokens that top-k leaves, and of these the ones that top-p leaves: bool[N, V].

    Top-k keeps the `top_k` largest logits and those equal to the least of them. Top-p keeps the
    smallest set of the largest logits, equal ones together, whose share of the probability that
    top-k left reaches `top_p`. The most likely token always stays.

    A token's probability is rounded to a multiple of 2^-30, and `top_p` times their sum to float32.
    So the share at which the set is cut may differ from `top_p` by V 2^-30 + 2^-23 at most, where V
    counts only what top-k left: by 1.4e-4 for 151,936 tokens, if every rounding errs the same way,
    and by about 3e-7 if they are independent. Tokens less likely than 2^-31 count as nothing.

    Args:
      scaled: [N, V], logits over temperature; minus infinity is allowed. All arrays are cast to
        float32, whose bits are compared.
      peak: [N], their maxima, finite.
      weights: [N, V], exp(scaled - peak) as the numerics' kernels compute it.
      numerics: of the sum over the row by which the weights become probabilities.
    """
    scaled, peak, weights = (x.astype(jnp.float32) for x in (scaled, peak, weights))
    order = _ordered(scaled)
    lowest = jnp.full_like(_ordered(peak), _LOWEST)
    if sampling.top_k:
        count = min(sampling.top_k, scaled.shape[-1])
        lowest = _threshold(order, None, peak, lowest, lambda total: jnp.full_like(total, count))
    if sampling.top_p < 1:
        units = _probabilities(weights, numerics)
        lowest = _threshold(order, units, peak, lowest, lambda total: _share(total, sampling.top_p))
    return order >= lowest[:, None]


def search_trips(sampling: Sampling) -> tuple[int, ...]:
    """Most iterations of the searches' loops, in the order of the program; see `sampler.trips`."""
    if sampling.temperature == 0:
        return ()
    return (_MOST_PASSES,) * ((sampling.top_k > 0) + (sampling.top_p < 1))


def _probabilities(weights, numerics):
    """int32 [N, V] in units of 2^-30."""
    ops = kernels.family(numerics)
    scale = ops.fence(_UNITS / ops.row_sum(weights, numerics=numerics))
    return ops.fence(jnp.round(weights * scale[:, None]).astype(jnp.int32))


def _share(total, top_p):
    """i32[N]: `top_p` of the total, at least one unit and at most all of them."""
    part = jnp.floor(total.astype(jnp.float32) * top_p).astype(jnp.int32)
    return jnp.clip(part, 1, total)


class _Interval(NamedTuple):
    """Of each row, i32[N]: the threshold is at least `low` and below `high`."""

    low: jax.Array
    high: jax.Array
    above_low: jax.Array  # the amount of all tokens from `low` on, which is enough
    above_high: jax.Array  # from `high` on, which is not
    single: jax.Array  # bool[N]: there is one token between the two, or room for one value only


def _threshold(
    order: jax.Array,
    units: jax.Array | None,
    peak: jax.Array,
    lowest: jax.Array,
    enough: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """i32[N]: tokens from there on are the smallest set that amounts to `enough`.

    Args:
      order: i32[N, V], the logits as ordered whole numbers.
      units: i32[N, V], what each token amounts to; None counts tokens.
      peak: float32 [N], the largest logits.
      lowest: i32[N], below which no token counts.
      enough: from the amount of all tokens from `lowest` on to what the set has to reach.
    """
    # No token has a number above the peak's. It is counted all the same: comparisons of floats, by
    # which the peak was found, may take the tiniest ones for equal.
    top = _ordered(peak)[:, None] + 1
    below = _ordered(peak[:, None] - jnp.asarray(_BELOW, jnp.float32)[None, :])
    first = jnp.concatenate([top, below], axis=1)
    sums, least = _sums(order, units, jnp.concatenate([lowest[:, None], first], 1), first[:, -1])
    total = sums[:, 0]
    needed = enough(total)
    none = jnp.zeros_like(total)
    whole = _Interval(lowest, jnp.full_like(lowest, _HIGHEST), total, none, none > 0)
    start = _narrowed(whole, first, sums[:, 1:], needed, least, first[:, -1])

    def narrow(interval):
        inner = _divided(interval.low, interval.high)
        sums, least = _sums(order, units, inner, interval.low)
        return _narrowed(interval, inner, sums, needed, least, interval.low)

    return jax.lax.while_loop(lambda i: ~jnp.all(i.single), narrow, start).low


def _sums(order, units, thresholds, floor):
    """Amounts i32[N, T] from each threshold on, and the least i32[N] of a token from `floor` on.

    A single reduction with T + 1 results: sums written one by one would be passes of their own.
    """
    columns = [order >= thresholds[:, i, None] for i in range(thresholds.shape[1])]
    if units is None:
        parts = [column.astype(jnp.int32) for column in columns]
        sums = _reduced(parts, [0] * len(parts), [jnp.add] * len(parts))
        return jnp.stack(sums, axis=1), jnp.ones_like(floor)
    parts = [jnp.where(column, units, 0) for column in columns]
    parts.append(jnp.where(order >= floor[:, None], units, _HIGHEST))
    combine = [jnp.add] * len(columns) + [jnp.minimum]
    *sums, least = _reduced(parts, [0] * len(columns) + [_HIGHEST], combine)
    return jnp.stack(sums, axis=1), least


def _reduced(parts, neutral, combine):
    """Each of `parts` [N, V] reduced over its last axis in its way, all together."""

    def both(left, right):
        return tuple(f(a, b) for f, a, b in zip(combine, left, right, strict=True))

    return jax.lax.reduce(tuple(parts), tuple(np.int32(x) for x in neutral), both, (1,))


def _narrowed(interval, thresholds, sums, needed, least, floor):
    """The interval between the thresholds where `sums` falls below what is needed.

    One token is left if what is left amounts to less than twice the least amount of a token.
    """
    held = sums >= needed[:, None]
    low = jnp.maximum(interval.low, jnp.max(jnp.where(held, thresholds, _LOWEST), axis=1))
    high = jnp.minimum(interval.high, jnp.min(jnp.where(held, _HIGHEST, thresholds), axis=1))
    above_low = jnp.minimum(interval.above_low, jnp.min(jnp.where(held, sums, _HIGHEST), axis=1))
    above_high = jnp.maximum(interval.above_high, jnp.max(jnp.where(held, 0, sums), axis=1))
    alone = (low >= floor) & (above_low - above_high - least < least)
    return _Interval(low, high, above_low, above_high, alone | (high <= low + 1))


def _divided(low, high):
    """i32[N, 15] thresholds between low and high, in any order.

    They cut the interval into 16 parts with equally many floats. Around zero nearly all floats are
    tiny: there the parts are equally wide, with zero in place of the first bound, so that the next
    interval has one sign. An interval therefore shrinks by 16 each time but for once.
    """
    number = jnp.arange(1, _PARTS, dtype=jnp.int32)[None, :]
    unsigned = (high - low).astype(jnp.uint32)  # the difference wraps around, and back here
    step = jnp.maximum(unsigned // _PARTS, 1).astype(jnp.int32)
    by_count = low[:, None] + number * step[:, None]
    start, width = _float(low), (_float(high) - _float(low)) / _PARTS
    values = start[:, None] + number.astype(jnp.float32) * width[:, None]
    values = jnp.where(number == 1, 0.0, values)
    around_zero = (low < 0) & (high > 0) & (width < _NEAR / _PARTS)
    return jnp.where(around_zero[:, None], _ordered(values), by_count)


def _ordered(x: jax.Array) -> jax.Array:
    """int32 that compare as the float32 do; 0 and -0 are equal."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, -(bits & _HIGHEST), bits)


def _float(order: jax.Array) -> jax.Array:
    """The float32 of a number that `_ordered` gave."""
    size = jax.lax.bitcast_convert_type(jnp.abs(order), jnp.float32)
    return jnp.where(order < 0, -size, size)
