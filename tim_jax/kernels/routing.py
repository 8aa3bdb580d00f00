"""A mixture of experts: which experts a token goes through, with which weights.

N rows (tokens), E experts, of which each token goes through k.

The experts of a token are those of the largest logits, compared as whole numbers; of equal ones the
first. Their weights are sums and quotients in a fixed order. So nothing depends on other tokens,
but under a capacity of the dial, which does so on purpose.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tim_jax.kernels import native, tiles
from tim_jax.kernels.composed import elementwise
from tim_jax.numerics import Numerics

_SIGN = 0x7FFFFFFF
_LEAST_SUM = 1e-20  # of scores that are divided by


class Choice(NamedTuple):
    """The experts that every row goes through, in the order of their sum, and their weights."""

    experts: jax.Array  # i32[N, k], the most probable first but under another order of sums
    weights: jax.Array  # f32[N, k]
    own: jax.Array  # i32[N, k], those of the largest logits, the most probable first


class Sigmoid(NamedTuple):
    """A router whose scores are sigmoids (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    To choose by, `bias` f32[E] is added to the scores. Experts are in `groups` equal groups; only
    the `taken` groups are chosen from whose two best experts have the largest sums. The weights of
    the chosen are multiplied by `scale`.
    """

    bias: jax.Array
    groups: int = 1
    taken: int = 1
    scale: float = 1.0


def choice(
    logits: jax.Array,
    *,
    count: int,
    normalised: bool,
    numerics: Numerics,
    given: jax.Array | None = None,
    sigmoid: Sigmoid | None = None,
    chooser: jax.Array | None = None,
) -> Choice:
    """Each row's `count` experts of the largest router logits float32 [N, E], and their weights.

    The weights are softmax(logits) of the chosen, in float32, and `normalised` divided by their
    sum. They are differentiable with respect to the logits; which experts are chosen is not. With
    `given` i32[N, k] these experts are taken, and have their weights by the same logits. With a
    `sigmoid` the scores are sigmoid(logits), see there. With a `chooser` the experts are those of
    its logits, [N, E] too, and the weights are still by `logits`.
    """
    fence = native.fence if numerics.family == "native" else tiles.fence
    fixed = fence(jax.lax.stop_gradient(logits))
    chosen_by = fixed if chooser is None else fence(jax.lax.stop_gradient(chooser))
    if sigmoid is not None:
        own = _chosen_by_groups(chosen_by, sigmoid, count=count, numerics=numerics)
        experts = own if given is None else given
        weigh = partial(_sigmoid_weights, normalised=normalised, scale=sigmoid.scale)
        weigh = partial(weigh, lanes=numerics.order.lanes)
        weights = elementwise(weigh, numerics)(logits, fence(experts))
        return _rearranged(Choice(experts, weights, own), logits.shape[1], numerics)
    own = jax.lax.top_k(_ordered(chosen_by), count)[1]
    experts, first = (own, None) if given is None else (given, own[:, :1])
    if chooser is not None:
        first = jax.lax.top_k(_ordered(fixed), 1)[1]

    def formula(logits, experts, first, maths):
        first = experts[:, :1] if first is None else first
        largest = jnp.take_along_axis(logits, first, axis=1)
        chosen = maths.exp(jnp.take_along_axis(logits, experts, axis=1) - largest)
        whole = chosen if normalised else maths.exp(logits - largest)
        return chosen * (1.0 / maths.total(whole, lanes=numerics.order.lanes))[:, None]

    weights = elementwise(formula, numerics)(logits, *fence((experts, first)))
    return _rearranged(Choice(experts, weights, own), logits.shape[1], numerics)


def _rearranged(choice: Choice, count: int, numerics: Numerics) -> Choice:
    """Without the weights beyond the experts' capacity, and in the order of the sum."""
    experts, weights, own = choice
    if numerics.expert_capacity is not None:
        most = math.ceil(numerics.expert_capacity * experts.size / count)
        if most < len(experts):
            weights = jnp.where(within_capacity(experts, count=count, most=most), weights, 0.0)
    if numerics.order.experts == "index":
        order = jnp.argsort(experts, axis=1)
        experts, weights = (jnp.take_along_axis(x, order, axis=1) for x in (experts, weights))
    return Choice(experts, weights, own)


def within_capacity(experts: jax.Array, *, count: int, most: int) -> jax.Array:
    """bool[N, k], whether a choice is among the first `most` of its expert, of `count` experts.

    All rows' first choices come before all second ones, and rows in their order (GShard, arXiv
    2006.16668, algorithm 1; with one choice the Switch Transformer, arXiv 2101.03961, eq. 3).
    """
    chosen = experts.T.reshape(-1)
    number = jnp.arange(chosen.size, dtype=jnp.int32)
    ordered, order = jax.lax.sort_key_val(chosen, number, is_stable=True)
    starts = jnp.searchsorted(ordered, jnp.arange(count)).astype(jnp.int32)
    kept = jnp.zeros(chosen.shape, bool).at[order].set(number - starts[ordered] < most)
    return kept.reshape(experts.shape[::-1]).T


def _chosen_by_groups(logits, sigmoid: Sigmoid, *, count: int, numerics: Numerics) -> jax.Array:
    """i32[N, k], the experts of the largest scores with bias, of the best groups."""

    def biased(logits, bias, maths):
        return maths.sigmoid(logits) + jnp.broadcast_to(bias[None, :], logits.shape)

    scores = elementwise(biased, numerics)(logits, jax.lax.stop_gradient(sigmoid.bias))
    if sigmoid.taken < sigmoid.groups:
        of_groups = scores.reshape(scores.shape[0], sigmoid.groups, -1)
        best = jnp.sum(_largest_two(of_groups), axis=-1)
        taken = jax.lax.top_k(_ordered(best), sigmoid.taken)[1]
        numbers = jnp.arange(sigmoid.groups)[None, None, :]
        inside = jnp.any(taken[:, :, None] == numbers, axis=1)
        scores = jnp.where(inside[:, :, None], of_groups, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(_ordered(scores), count)[1]


def _largest_two(x: jax.Array) -> jax.Array:
    """The two largest of the last axis."""
    return jnp.take_along_axis(x, jax.lax.top_k(_ordered(x), 2)[1], axis=-1)


def _sigmoid_weights(logits, experts, maths, *, normalised: bool, scale: float, lanes: int):
    """sigmoid(logits) of the chosen, times `scale`, `normalised` divided by their sum."""
    chosen = maths.sigmoid(jnp.take_along_axis(logits, experts, axis=1))
    if normalised:
        chosen = chosen * (1.0 / (maths.total(chosen, lanes=lanes) + _LEAST_SUM))[:, None]
    return chosen * scale


def _probabilities(logits: jax.Array, sigmoid: bool) -> jax.Array:
    """The router's distribution over all experts; of sigmoids, each divided by the sum."""
    if not sigmoid:
        return jax.nn.softmax(logits, axis=-1)
    scores = jax.nn.sigmoid(logits)
    return scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), _LEAST_SUM)


def balance(logits: jax.Array, loads: jax.Array, *, sigmoid: bool = False) -> jax.Array:
    """f32[N], E sum_e f_e p_e of the router's probabilities p: the load-balancing loss of a row.

    `loads` f32[E] are the shares f of a batch's rows that go through each expert. The mean over
    these rows is the loss of the Switch Transformer (arXiv 2101.03961, eq. 4 to 6) with k experts a
    row, as `transformers` has it: k where all experts are equally probable. Scores that are
    sigmoids are divided by their sum (DeepSeek-V3, arXiv 2412.19437, eq. 19). Plain XLA.
    """
    return logits.shape[1] * jnp.sum(_probabilities(logits, sigmoid) * loads[None, :], axis=-1)


def entropy(logits: jax.Array, *, sigmoid: bool = False) -> jax.Array:
    """f32[N], of the router's distribution over all experts, nats; a figure, without a gradient."""
    probabilities = _probabilities(jax.lax.stop_gradient(logits), sigmoid)
    return jnp.sum(jax.scipy.special.entr(probabilities), axis=-1)


def _ordered(x: jax.Array) -> jax.Array:
    """i32 of float32 numbers, in the same order; 0 and -0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ _SIGN, bits)
