"""A mixture of experts: which experts a token goes through, what they make of it, and their sum.

N rows (tokens), E experts of width M, of which each token goes through k; d hidden size.

A token's bits depend neither on who else chose its experts nor on its place among them, but under a
capacity of the dial, which does so on purpose:

- Its experts are those of the largest logits, compared as whole numbers; of equal ones the first.
  Their weights are sums and quotients in a fixed order. The sum over a token's experts runs from
  the most probable to the least.
- The N k pairs of a token and a chosen expert are sorted by expert, and each expert's are filled up
  to whole tiles. A tile's rows so belong to one expert, whose matrices are taken by index, and the
  products of a tile are the family's own, in which a row's bits do not depend on their number.
  There are as many tiles as the least favourable choice needs, so no token is ever dropped, and
  those that stay empty are passed over.

The backward is plain XLA, in larger tiles: it recomputes the products with gate and up.

Experts may lie on several devices. Each then computes, for the rows of all, what its own experts
make of those that chose them; an `Exchange` says how rows and outputs get there and back.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tim_jax.kernels import native, tiles
from tim_jax.kernels.families import Kernels, elementwise, gated
from tim_jax.kernels.formulas import narrowed
from tim_jax.numerics import Numerics, strict

_MOST_ROWS = 128  # of a tile
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
        largest = jax.lax.top_k(_ordered(of_groups), 2)[1]
        best = jnp.sum(jnp.take_along_axis(of_groups, largest, axis=-1), axis=-1)
        taken = jax.lax.top_k(_ordered(best), sigmoid.taken)[1]
        numbers = jnp.arange(sigmoid.groups)[None, None, :]
        inside = jnp.any(taken[:, :, None] == numbers, axis=1)
        scores = jnp.where(inside[:, :, None], of_groups, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(_ordered(scores), count)[1]


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


class Tiles(NamedTuple):
    """Pairs of a row and a chosen expert in tiles of one expert each; P = N k pairs, T tiles.

    A place is a row of a tile, counted over all tiles; there are T x (rows of a tile).
    """

    expert: jax.Array  # i32[T], of each tile
    filled: jax.Array  # i32[T], rows of each tile that have a pair: its first ones; 0 in the last
    pair: jax.Array  # i32[places], or P where there is none
    place: jax.Array  # i32[P], of each pair


class Exchange(NamedTuple):
    """How rows get to the devices that have their experts, and what is made of them back.

    `forward` and `backward` are given a function of a device's experts, and call it with rows of
    all devices. Pairs with experts of other devices have the number of experts here as theirs.
    """

    devices: int  # that have as many experts each
    # (function of x [M, d] and experts [M, k] -> [M, k, d]; x [N, d], experts [N, k]) -> [N, k, d]
    forward: Callable
    # (function of the same and a cotangent -> the gradients of x and of weights; x, experts and
    # cotangent [N, k, d]) -> the gradients of x [N, d] and of weights
    backward: Callable


ALONE = Exchange(1, lambda call, *args: call(*args), lambda call, *args: call(*args))


def combined(
    residual: jax.Array,
    outputs: jax.Array,
    weights: jax.Array,
    *,
    numerics: Numerics,
    shared: jax.Array | None = None,
) -> jax.Array:
    """residual [N, d] + the sum of outputs [N, k, d] x weights [N, k], rounded to compute.

    Summed in float32, in the order of the choices, and then `shared` float32 [N, d]; or every term
    and sum is rounded to compute, see `Order.experts_sum`.
    """
    dtype = numerics.compute_dtype if numerics.order.experts_sum == "compute" else "float32"
    rounded = partial(narrowed, dtype=dtype)

    def formula(residual, outputs, weights, *shared, maths):
        terms = [
            maths.uncontracted(outputs[:, i] * jnp.broadcast_to(weights[:, i, None], shape))
            for i, shape in enumerate([residual.shape] * weights.shape[1])
        ]
        total = rounded(terms[0])
        for term in (*terms[1:], *shared):
            total = rounded(total + rounded(term))
        return strict.rounded(residual.astype(jnp.float32) + total, numerics.dtype)

    more = () if shared is None else (shared,)
    return elementwise(formula, numerics)(residual, outputs, weights, *more)


def scaled(outputs: jax.Array, x: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
    """outputs float32 [N, d] x sigmoid(x [N, d] @ weight float32 [d, 1]), for a shared expert.

    The product is a sum in a fixed order: one column is too few for a kernel.
    """

    def formula(outputs, x, weight, maths):
        factors = x.astype(jnp.float32) * jnp.broadcast_to(weight[:, 0], x.shape)
        share = maths.sigmoid(maths.total(maths.uncontracted(factors), lanes=numerics.order.lanes))
        return outputs * share[:, None]

    return elementwise(formula, numerics)(outputs, x, weight)


def in_tiles(experts: jax.Array, *, count: int, rows: int) -> Tiles:
    """Sorts the pairs of experts i32[N, k], of `count` experts, into tiles of this many rows.

    Pairs whose expert is `count` are in no tile, and have a place after all of them.
    """
    chosen = experts.reshape(-1)
    pairs = chosen.size
    nonempty = min(count, pairs)
    most = nonempty + (pairs - nonempty) // rows
    number = jnp.arange(pairs, dtype=jnp.int32)
    ordered, order = jax.lax.sort_key_val(chosen, number, is_stable=True)
    ends = _places(ordered, jnp.arange(count))
    loads = jnp.diff(ends, prepend=0)
    starts = ends - loads
    last_tiles = jnp.cumsum(-(-loads // rows))
    first_tiles = last_tiles - (-(-loads // rows))
    ordered_place = first_tiles[ordered] * rows + number - starts[ordered]
    ordered_place = jnp.where(ordered < count, ordered_place, most * rows)
    tile = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.minimum(_places(last_tiles, tile), count - 1)
    return Tiles(
        expert=expert,
        filled=jnp.clip(loads[expert] - (tile - first_tiles[expert]) * rows, 0, rows),
        pair=jnp.full((most * rows,), pairs, jnp.int32).at[ordered_place].set(order, mode="drop"),
        place=jnp.zeros((pairs,), jnp.int32).at[order].set(ordered_place),
    )


def _places(ordered: jax.Array, values: jax.Array) -> jax.Array:
    """i32, how many of the ascending `ordered` are at most each value; all are compared at once."""
    found = jnp.searchsorted(ordered, values, side="right", method="compare_all")
    return found.astype(jnp.int32)


def tile_rows(pairs: int, count: int, least: int = 1) -> int:
    """Rows of a tile: room for twice an expert's even share of the pairs, within bounds.

    To take an expert's matrices costs as much as to multiply some rows by them, so an expert should
    have one tile where few rows are decoded, and should not fill up a large one where there are
    many. Kernels cut a tile into as many rows as they take.
    """
    wanted = 1 << max(2 * pairs // count - 1, 0).bit_length()
    return max(least, min(wanted, _MOST_ROWS))


def outputs(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    experts: jax.Array,
    *,
    ops: Kernels,
    numerics: Numerics,
    gather: Callable[[jax.Array], jax.Array] = lambda weight: weight,
    scatter: Callable[[jax.Array], jax.Array] = lambda gradient: gradient,
    exchange: Exchange = ALONE,
) -> jax.Array:
    """What each of a row's experts makes of it: (silu(x gate) * x up) down, float32 [N, k, d].

    Args:
      x: [N, d], in the compute dtype.
      gate_up, down: [E, d, 2 M] and [E, M, d], with an `exchange` of this device's experts; with
        `gather` parts of them, see there.
      experts: i32[N, k].
      ops: the kernels of the numerics, for whole matrices.
      gather, scatter: make the whole of a device's part of a weight, and the part of the sum over
        devices of a whole gradient, float32.
      exchange: with the devices that have the other experts.
    """
    devices = exchange.devices

    def forward(x, gate_up, down, experts):
        whole = gather(gate_up), gather(down)

        def make(x, experts):
            return _forward(x, *whole, experts, ops=ops, numerics=numerics, devices=devices)

        return exchange.forward(make, x, experts)

    def backward(residuals, cotangent):
        x, gate_up, down, experts = residuals
        whole = gather(gate_up), gather(down)

        def differentiate(x, experts, cotangent):
            return _backward(x, *whole, experts, cotangent, numerics=numerics, devices=devices)

        dx, dgate_up, ddown = exchange.backward(differentiate, x, experts, cotangent)
        return (
            dx.astype(x.dtype),
            scatter(dgate_up).astype(gate_up.dtype),
            scatter(ddown).astype(down.dtype),
            None,
        )

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *args: (forward(*args), args), backward)
    return call(x, gate_up, down, experts)


def _forward(x, gate_up, down, experts, *, ops: Kernels, numerics: Numerics, devices: int):
    count, (rows, chosen) = gate_up.shape[0], experts.shape
    size = tile_rows(experts.size, count * devices, numerics.expert_rows(gate_up.shape[1]))
    laid = ops.fence(in_tiles(experts, count=count, rows=size))
    x, gate_up, down = ops.fence((x, gate_up, down))
    of_tiles = x[jnp.minimum(laid.pair, experts.size - 1) // chosen].reshape(-1, size, x.shape[1])
    made = ops.grouped(of_tiles, gate_up, down, laid.expert, laid.filled, numerics=numerics)
    made = ops.fence(made).reshape(-1, down.shape[-1])
    return ops.fence(made[laid.place].reshape(rows, chosen, -1))


def _at(weights: jax.Array, expert: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)


def _backward(x, gate_up, down, experts, cotangent, *, numerics: Numerics, devices: int):
    """Gradients of `_forward` in float32; products of a tile as in `native.dot_gradients`."""
    count, (rows, chosen) = gate_up.shape[0], experts.shape
    size = tile_rows(experts.size, count * devices)
    laid = in_tiles(experts, count=count, rows=size)
    of_tiles = x[jnp.minimum(laid.pair, experts.size - 1) // chosen].reshape(-1, size, x.shape[1])
    cotangents = cotangent.reshape(experts.size, -1).at[laid.pair].get(mode="fill", fill_value=0)
    cotangents = cotangents.reshape(*of_tiles.shape[:2], -1)
    gating = partial(gated, numerics=numerics, maths=native.MATHS)

    def products(sums, tile, dmade, expert):
        own = _at(gate_up, expert), _at(down, expert)
        hidden, gradient = jax.vjp(gating, native.product(tile, own[0]))
        dhidden, ddown = native.dot_gradients(hidden, own[1], dmade)
        (dproduct,) = gradient(dhidden.astype(hidden.dtype))
        dtile, dgate_up = native.dot_gradients(tile, own[0], dproduct)
        parts = dgate_up, ddown
        sums = tuple(
            jax.lax.dynamic_update_index_in_dim(s, _at(s, expert) + part, expert, 0)
            for s, part in zip(sums, parts, strict=True)
        )
        return sums, dtile

    def nothing(sums, tile, dmade, expert):
        del dmade, expert
        return sums, jnp.zeros(tile.shape, jnp.float32)

    def step(sums, of_tile):
        *tile, used = of_tile
        return jax.lax.cond(used, products, nothing, sums, *tile)

    zeros = tuple(jnp.zeros(weight.shape, jnp.float32) for weight in (gate_up, down))
    of_steps = of_tiles, cotangents, laid.expert, laid.filled > 0
    sums, dtiles = jax.lax.scan(step, zeros, of_steps)
    # Of pairs with experts of other devices nothing.
    dtiles = dtiles.reshape(-1, x.shape[1])
    dpairs = dtiles.at[laid.place].get(mode="fill", fill_value=0)
    return jnp.sum(dpairs.reshape(rows, chosen, -1), axis=1), *sums
