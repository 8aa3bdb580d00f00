"""Log-probs of given responses: one forward over whole sequences, then the head tile by tile.

In the forward, sequences lie in padded rows (`Padded`) or in one buffer without padding (`Packed`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from tim_jax import kernels
from tim_jax.common.types import Rollout
from tim_jax.kernels import native
from tim_jax.model import transformer
from tim_jax.model.execution import Execution
from tim_jax.model.packing import Packing
from tim_jax.model.weights import Weights, weight_axes
from tim_jax.numerics import Numerics, strict
from tim_jax.placement import Placement, collectives
from tim_jax.policy import distribution


def sequences(rollout: Rollout) -> jax.Array:
    """i32[B, Tp + R]: each prompt directly followed by its response, position 0 first."""
    prompt_size, response_size = rollout.prompts.shape[1], rollout.responses.shape[1]
    at = jnp.arange(prompt_size + response_size)[None, :]
    after = at - rollout.prompt_lengths[:, None]
    prompt = jnp.pad(rollout.prompts, ((0, 0), (0, response_size)))
    index = jnp.clip(after, 0, response_size - 1)
    response = jnp.take_along_axis(rollout.responses, index, axis=1)
    return jnp.where(after < 0, prompt, response)


def distributions(weights: Weights, rollout: Rollout, *, execution: Execution) -> jax.Array:
    """f32[B, R, V], of every response token, at the execution's temperature, not truncated."""
    tokens = sequences(rollout)
    rows, size = rollout.responses.shape
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    hidden, _, _ = transformer.forward(weights, tokens, positions, execution=execution)
    index = rollout.prompt_lengths[:, None] - 1 + jnp.arange(size)[None, :]
    before = jnp.take_along_axis(hidden, index[:, :, None], axis=1)
    logits = transformer.logits(weights, before.reshape(rows * size, -1), execution=execution)
    return jax.nn.softmax(logits / execution.sampling.temperature).reshape(rows, size, -1)


@dataclass(frozen=True)
class Padded:
    """The sequences in B rows of Tp + R tokens.

    A layout says which rows of the forward predict response tokens, and takes what is computed of
    these back to [B, R].
    """

    tokens: jax.Array  # i32[B, T]
    positions: jax.Array  # i32[B, T]
    targets: jax.Array  # i32[B, R], the response tokens
    routes: jax.Array | None  # [B, T, L, k]
    supports: jax.Array | None  # i32[B, R, K]
    prompt_lengths: jax.Array  # i32[B]
    packing: ClassVar[None] = None
    used: ClassVar[None] = None

    def predicting(self, x: jax.Array) -> jax.Array:
        """[B, R, ...] of [B, T, ...]: what predicts response token t is at position t - 1."""
        some = partial(jax.lax.dynamic_slice_in_dim, slice_size=self.targets.shape[1], axis=0)
        return jax.vmap(some)(x, self.prompt_lengths - 1)

    def by_response(self, x: jax.Array) -> jax.Array:
        """[B, R] of values of the targets."""
        return x


@dataclass(frozen=True)
class Packed:
    """B sequences one after the other in a buffer of N tokens, the longest first."""

    tokens: jax.Array  # i32[1, N]
    positions: jax.Array  # i32[1, N]
    targets: jax.Array  # i32[N], the response tokens, one after the other
    routes: jax.Array | None  # [1, N, L, k]
    supports: jax.Array | None  # i32[N, K], of the targets
    packing: Packing
    used: jax.Array  # i32[], how many targets there are
    rows: jax.Array  # i32[N], of the buffer, that predict the targets; N for none
    target: jax.Array  # i32[N], that a row of the buffer predicts; N for none
    responses: jax.Array  # i32[B, R], the places of response tokens among the targets; N for none
    place: jax.Array  # i32[N], of a target in [B * R]; B * R for none

    def predicting(self, x: jax.Array) -> jax.Array:
        """[N, ...] of [1, N, ...]: what predicts the targets; 0 beyond `used`."""
        return _taken(x[0], self.rows, self.target)

    def by_response(self, x: jax.Array) -> jax.Array:
        """[B, R] of values [N] of the targets; 0 beyond a response."""
        return _taken(x, self.responses, self.place)


def padded(rollout: Rollout) -> Padded:
    """The sequences in rows of their own."""
    tokens = sequences(rollout)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    recorded, lengths = (rollout.routes, rollout.supports), rollout.prompt_lengths
    return Padded(tokens, positions, rollout.responses, *recorded, lengths)


def packed(rollout: Rollout, size: int) -> Packed:
    """The sequences in a buffer of `size` tokens, N, which must hold them all.

    A row with no response token is left out. Lengths are not known here: who chooses the rows
    checks that they fit.
    """
    (count, longest), prompts = rollout.responses.shape, rollout.prompt_lengths
    wholes = jnp.where(rollout.lengths > 0, prompts + rollout.lengths, 0)
    order = jnp.argsort(-wholes, stable=True)
    rank = jnp.argsort(order)
    wholes, lengths = wholes[order], rollout.lengths[order]
    starts, ends = _bounds(wholes)
    firsts, lasts = _bounds(lengths)  # of the sequences' responses, among all targets
    used = lasts[-1]
    at = jnp.arange(size, dtype=jnp.int32)

    # Of each row of the buffer.
    number = _owner(ends, at)
    row, inside = order[number], at < ends[-1]
    position = jnp.where(inside, at - starts[number], 0)
    after = position - prompts[row]
    prompt = rollout.prompts[row, jnp.minimum(position, rollout.prompts.shape[1] - 1)]
    response = rollout.responses[row, jnp.clip(after, 0, longest - 1)]
    token = jnp.where(inside, jnp.where(after < 0, prompt, response), 0)
    predicts = inside & (after >= -1) & (after + 1 < lengths[number])
    target = jnp.where(predicts, firsts[number] + after + 1, size)

    # Of each target.
    owner = _owner(lasts, at)
    index, there = at - firsts[owner], at < used
    rows = jnp.where(there, starts[owner] + prompts[order[owner]] - 1 + index, size)
    index = jnp.clip(index, 0, longest - 1)
    place = jnp.where(there, order[owner] * longest + index, count * longest)

    # Of each response token.
    column = jnp.arange(longest)[None, :]
    responses = jnp.where(column < rollout.lengths[:, None], firsts[rank][:, None] + column, size)
    return Packed(
        tokens=token[None],
        positions=position[None],
        targets=rollout.responses[order[owner], index],
        routes=None if rollout.routes is None else rollout.routes[row, position][None],
        supports=None if rollout.supports is None else rollout.supports[order[owner], index],
        packing=Packing(starts, wholes, min(size, rollout.prompts.shape[1] + longest)),
        used=used,
        rows=rows,
        target=target,
        responses=responses,
        place=place,
    )


def _bounds(lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Starts and ends i32[B] of pieces that lie one after the other."""
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    return ends - lengths, ends


def _owner(ends: jax.Array, at: jax.Array) -> jax.Array:
    """i32[N], which piece a place belongs to; behind all, the last."""
    number = jnp.searchsorted(ends, at, side="right").astype(jnp.int32)
    return jnp.minimum(number, ends.shape[0] - 1)


def _taken(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """x [n, ...] at `index` [...], 0 where that is out of bounds; each row at most once.

    `inverse` i32[n] is where a row went, in `index` flattened. The gradient is a gather by it: a
    scatter would add, in an order that a device may choose.
    """

    def take(x, index, inverse):
        del inverse
        return x.at[index].get(mode="fill", fill_value=0)

    def backward(residuals, cotangent):
        index, inverse = residuals
        flat = cotangent.reshape(-1, *cotangent.shape[index.ndim :])
        return flat.at[inverse].get(mode="fill", fill_value=0), None, None

    call = jax.custom_vjp(take)
    call.defvjp(lambda x, *where: (take(x, *where), where), backward)
    return call(x, index, inverse)


class Scores(NamedTuple):
    """Scores of given responses, float32 [B, R]; beyond a response finite, but meaningless."""

    log_probs: jax.Array  # log pi(response token)
    entropy: jax.Array  # of the token's distribution, nats
    energy: jax.Array | None = None  # see `distribution.score_energy`, if asked for
    # Of the forward that predicts a token, if the rollout's experts are compared or replayed:
    agreement: jax.Array | None = None  # share of the routers' choices that the sampler made too
    router_entropy: jax.Array | None = None  # nats, the mean over layers
    balance: jax.Array | None = None  # the load-balancing loss, with its gradient, if asked for


def score(
    weights: Weights,
    rollout: Rollout,
    *,
    execution: Execution,
    remat: bool = False,
    entropy_gradient: bool = False,
    energy: bool = False,
    sums: Weights | None = None,
    frozen_head: bool = False,
    loads: jax.Array | None = None,
    buffer: int | None = None,
) -> Scores:
    """Log-probs of the response tokens, and the entropies of their distributions.

    The distribution is the execution's (temperature, truncation replayed). With a placement of
    several devices: inside `shard_map`, on this device's parts of weights and rows, see
    `transformer.forward`.

    Args:
      entropy_gradient: whether it is differentiable through the entropies too, and not only through
        the log-probs. It changes no bit of what is returned, nor does `buffer`.
      sums: see `gradient_sums`. Embedding and head then have no gradient, but the gradient with
        respect to these is these plus that gradient: the backward adds to them in their place.
      frozen_head: the head and the last norm have no gradient, and nothing is computed for it.
      loads: f32[L, E], shares of a batch's tokens that each expert has, for `Scores.balance`.
      buffer: its tokens, which must hold the sequences: no padding is computed. None: padded rows.
    """
    laid_out = padded(rollout) if buffer is None else packed(rollout, buffer)
    total = None if sums is None else sums["embed"]
    transposed = sums is not None and "head" not in sums
    embeddings, total = transformer.embedded(
        weights, laid_out.tokens, execution=execution, total=total, handed_on=transposed
    )
    hidden, _, routed = transformer.forward(
        weights,
        laid_out.tokens,
        laid_out.positions,
        execution=execution,
        packing=laid_out.packing,
        remat=remat,
        embeddings=embeddings,
        routes=laid_out.routes if execution.routing == "replayed" else None,
        loads=loads,
    )
    rows = laid_out.predicting(hidden)
    head = {name: weights[name] for name in ("final_norm", "head")}
    if sums is not None:  # a tied head adds to the embedding's, before the embedding does
        total = sums.get("head", total)
    options = _HeadOptions(execution, entropy_gradient, energy, transposed, frozen_head)
    scored = laid_out.targets, laid_out.supports
    values = _head(head, rows, scored, total, laid_out.used, options)
    scores = Scores(*(laid_out.by_response(x) for x in values))
    if routed is not None:
        scores = scores._replace(**_routing(routed, laid_out))
    if entropy_gradient:
        return scores
    return scores._replace(entropy=jax.lax.stop_gradient(scores.entropy))


def chosen_alike(weights: Weights, rollout: Rollout, *, execution: Execution) -> jax.Array:
    """f32[B, R, L], of the positions that predict the response tokens, on one device.

    The share of the routes' experts that the model's own router takes too, in each layer.
    """
    laid_out = padded(rollout)
    _, _, routed = transformer.forward(
        weights, laid_out.tokens, laid_out.positions, execution=execution
    )
    same = _same_experts(routed, laid_out).astype(jnp.float32)
    return laid_out.predicting(jnp.mean(same, axis=3))


def _same_experts(routed: Any, laid_out: Padded | Packed) -> jax.Array:
    """bool[B, T, L, k], which of the routers' own choices the sampler made too."""
    if laid_out.routes is None:
        raise ValueError("the rollout has no routes to compare with")
    own, recorded = routed.experts, laid_out.routes.astype(jnp.int32)
    return jnp.any(own[..., :, None] == recorded[..., None, :], axis=-1)


def _routing(routed: transformer.Routed, laid_out: Padded | Packed) -> dict[str, jax.Array | None]:
    """How often sampler and learner choose the same experts, and more of the routers, [B, R]."""

    def of_responses(x: jax.Array) -> jax.Array:
        return laid_out.by_response(laid_out.predicting(x))

    same = _same_experts(routed, laid_out)
    number = jnp.asarray(same.shape[2] * same.shape[3], jnp.float32)
    agreement = strict.quotient(jnp.sum(same.astype(jnp.float32), axis=(2, 3)), number)
    return {
        "agreement": of_responses(agreement),
        "router_entropy": of_responses(routed.entropy),
        "balance": None if routed.balance is None else of_responses(routed.balance),
    }


def of_logits(
    weights: Weights,
    rollout: Rollout,
    function: Callable[..., Any],
    *,
    execution: Execution,
    more: Sequence[jax.Array | None] = (),
) -> Any:
    """A function of the logits that predict each response token, by the same forward as `score`.

    Args:
      function: (logits f32[N, V], tokens i32[N], *more) -> a tree of arrays [N, ...]. It is given
        `head_rows` rows at a time, as in `score`, so that no array of [tokens, vocabulary] exists.
      execution: on one device.
      more: arrays [B, R, ...], of which the function is given the same rows; None stays None.

    Returns:
      The tree, of arrays [B, R, ...]; beyond a response meaningless.
    """
    laid_out = padded(rollout)
    routes = laid_out.routes if execution.routing == "replayed" else None
    hidden, _, _ = transformer.forward(
        weights, laid_out.tokens, laid_out.positions, execution=execution, routes=routes
    )
    head = {name: weights[name] for name in ("final_norm", "head")}
    shape, size = rollout.responses.shape, rollout.responses.size
    fence = kernels.family(execution.numerics).fence

    def tile(rows):
        hidden, tokens, *others = fence(rows)
        logits = transformer.logits_of_local_rows(head, hidden, execution=execution)
        return fence(function(logits, tokens, *others))

    rows = (laid_out.predicting(hidden), rollout.responses, *more)
    found = jax.lax.map(tile, _tiled(rows, min(execution.numerics.head_rows, size)))

    def whole(x):  # without -1, which an array of no elements cannot have
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])[:size].reshape(*shape, *x.shape[2:])

    return jax.tree.map(whole, found)


def _tiled(rows: Any, size: int, axes: int = 2) -> Any:
    """Arrays [B, R, ...], or with other leading `axes`, in tiles [n, size, ...]; zeros last."""

    def leaf(x):
        x = x.reshape(-1, *x.shape[axes:])
        x = jnp.pad(x, [(0, -x.shape[0] % size)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, size, *x.shape[1:])

    return jax.tree.map(leaf, rows)


def gradient_sums(weights: Weights, *, execution: Execution) -> Weights:
    """Zeros that `score` adds the gradients of the embedding and of the head to, float32.

    In the parts of these weights. At a large vocabulary they are most of a gradient's bytes.
    """
    names = ("embed",) if shares_gradient(execution) else ("embed", "head")
    return {name: jnp.zeros(weights[name].shape, jnp.float32) for name in names}


def shares_gradient(execution: Execution) -> bool:
    """True if the head's gradient is added to the embedding's.

    It is where the head is the embedding transposed, and lies in the same parts.
    """
    return execution.config.tied_embeddings and execution.numerics.column_tiles == 1


class _HeadOptions(NamedTuple):
    """How the head computes, and what else than log-probs."""

    execution: Execution
    entropy_gradient: bool
    energy: bool
    transposed: bool  # the sums of the head's gradient are those of the embedding that it is
    frozen: bool  # the head has no gradient, only its inputs have

    @property
    def placement(self) -> Placement:
        return self.execution.placement

    @property
    def gathered(self) -> Execution:
        """The execution for weights that are gathered over fsdp."""
        return replace(self.execution, placement=self.placement.gathered)


def _head(head, hidden, scored, total, used, options: _HeadOptions):
    """Log-probs and entropies [B, R] of hidden states [B, R, d], `head_rows` rows at a time.

    Or [N] of [N, d]. If only the first `used` i32[] of these are wanted, the tiles behind them are
    not computed. `scored` are the tokens [B, R], and the supports [B, R, K] or None. No array of
    [tokens, vocabulary] ever exists: the backward recomputes each tile's logits, and sums the
    head's gradient in float32: in `total`, if there is one (of the head's shape, or transposed as
    the tied embedding's). The devices of a tensor group share a tile: each multiplies its columns
    of the head by all rows, then has all columns of its own rows.
    """
    shape, size = scored[0].shape, scored[0].size
    tile_rows = min(options.execution.numerics.head_rows, size)
    tile_rows += -tile_rows % options.placement.tensor
    fence = kernels.family(options.execution.numerics).fence
    all_axes = weight_axes(options.execution.config, options.execution.numerics)
    head_axes = {name: all_axes[name] for name in head}
    sum_axes = all_axes["final_norm"], all_axes["embed" if options.transposed else "head"]

    def forward(head, hidden, scored, total, used):
        del total
        whole = collectives.gather_fsdp(head, head_axes, options.placement)

        def tile(_, rows):
            hidden, scored = fence(rows)
            logits = transformer.logits_of_local_rows(whole, hidden, execution=options.gathered)
            how = {"entropy": True, "energy": options.energy}
            return (), fence(_outputs(logits, scored, options.execution, **how))

        _, tiles = _fold(tile, (), (hidden, scored), used)
        return tuple(collectives.tensor_whole(x, options.placement) for x in tiles)

    def backward(residuals, cotangents):
        head, hidden, scored, total, used = residuals
        whole = collectives.gather_fsdp(head, head_axes, options.placement)
        # Over fsdp these are sums of whole weights, of which this device keeps its part.
        in_place = total is not None and options.placement.fsdp == 1
        shape = whole["head"].shape
        zeros = jnp.zeros(shape[::-1] if options.transposed else shape, jnp.float32)
        norm = jnp.zeros(whole["final_norm"].shape, jnp.float32)
        wanted = tuple(cotangents[: 2 if options.entropy_gradient else 1])
        transposed = _transposed_head(whole["head"], options.execution.numerics)
        step = partial(_head_backward, whole, transposed, options=options)
        sums = total if in_place else zeros
        start = norm, None if options.frozen else sums
        (norm, sums), dhidden = _fold(step, start, (hidden, scored, wanted), used)
        if options.frozen:
            return None, dhidden, None, None, None
        norm, sums = collectives.reduce_scatter_fsdp((norm, sums), sum_axes, options.placement)
        norm = norm.astype(head["final_norm"].dtype)
        if total is None:
            own = {"final_norm": norm, "head": sums.astype(head["head"].dtype)}
            return own, dhidden, None, None, None
        sums = sums if in_place else total + sums
        return {"final_norm": norm, "head": None}, dhidden, None, sums, None

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *args: (forward(*args), args), backward)
    tiles = None if used is None else -(-used // tile_rows)
    results = call(head, *_tiled((hidden, scored), tile_rows, len(shape)), total, tiles)
    return tuple(x.reshape(-1)[:size].reshape(shape) for x in results)


def _fold(step: Callable, carry: Any, rows: Any, used: jax.Array | None) -> tuple[Any, Any]:
    """`lax.scan` of the first `used` i32[] rows, or of all; zeros for the others."""
    if used is None:
        return jax.lax.scan(step, carry, rows)
    first = jax.tree.map(lambda x: x[0], rows)
    shapes = jax.eval_shape(step, carry, first)[1]
    count = jax.tree.leaves(rows)[0].shape[0]
    made = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)

    def one(index, state):
        carry, made = state
        carry, new = step(carry, jax.tree.map(lambda x: x[index], rows))
        put = partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        return carry, jax.tree.map(put, made, new)

    return jax.lax.fori_loop(0, used, one, (carry, made))


def _outputs(logits, scored, execution: Execution, *, entropy: bool, energy: bool = False):
    """Of this device's rows of a tile, by its logits of them."""
    sampling = execution.sampling
    tokens, supports = _local(scored, execution.placement)
    how = {"sampling": sampling, "numerics": execution.numerics, "supports": supports}
    found = (distribution.log_prob(logits, tokens, **how),)
    if entropy:
        found += (distribution.entropy(logits, sampling=sampling),)
    if energy:
        found += (distribution.score_energy(logits, tokens, sampling=sampling),)
    return found


def _head_backward(head, transposed, carry, rows, *, options: _HeadOptions):
    """One tile's step of the backward: adds to the sums, and returns the hidden states' cotangent.

    `transposed` is what `_transposed_head` returns.
    """
    (norm, sums), (hidden, scored, cotangents) = carry, rows
    execution = options.gathered
    plain = replace(execution, numerics=native.counterpart(execution.numerics))
    inputs = transformer.head_inputs(head, hidden, execution=execution, shared=True)
    columns = transformer.head_columns(head, inputs, execution=execution)

    def outputs(columns):  # those that have a gradient, in plain XLA operations
        logits = transformer.rows_of_columns(columns, execution=plain)
        return _outputs(logits, scored, plain, entropy=options.entropy_gradient)

    local = _local(cotangents, options.placement)
    (dcolumns,) = jax.vjp(outputs, columns)[1](local)
    dcolumns = dcolumns.astype(inputs.dtype)
    if transposed is None:
        transposed = native.joined(head["head"].astype(inputs.dtype)).T
    dinputs = native.product(dcolumns, transposed).astype(inputs.dtype)
    if not options.frozen:
        sums = _head_gradient(sums, inputs, dcolumns, options=options)
    normed = partial(transformer.head_inputs, execution=plain, shared=True)
    dhead, dhidden = jax.vjp(normed, {"final_norm": head["final_norm"]}, hidden)[1](dinputs)
    return (norm + dhead["final_norm"].astype(jnp.float32), sums), dhidden


def _transposed_head(head: jax.Array, numerics: Numerics) -> jax.Array | None:
    """The head's transpose [V, d], copied once for all tiles, for products of bfloat16 on a CPU.

    None for float32 and for the kernels of accelerators: a product there needs no copy.
    """
    dtype = numerics.of_head.dtype
    if dtype != jnp.bfloat16 or numerics.family.startswith("pallas"):
        return None
    return native.row_major(native.joined(head.astype(dtype)).T, dtype)


def _head_gradient(sums, inputs, dcolumns, *, options: _HeadOptions):
    """Adds one tile's gradient of the head to `sums`, f32 of the head's shape or transposed.

    Some columns at a time, unless the numerics say all: a gradient of the whole head, beside its
    sum, would be the largest array of an update.
    """
    if sums.ndim == 3:  # column tiles, one after the other
        of_tiles = dcolumns.reshape(inputs.shape[0], sums.shape[0], -1)

        def tile(index, sums):
            dweight = native.dot_weight_gradient(inputs, of_tiles[:, index])
            return sums.at[index].add(dweight)

        return jax.lax.fori_loop(0, sums.shape[0], tile, sums)
    axis, width = (0 if options.transposed else 1), dcolumns.shape[1]
    size = min(options.execution.numerics.head_gradient_columns or width, width)

    def part(index, sums):
        # The last part begins earlier, to be as wide as the others: what was added before is zero.
        start = jnp.minimum(index * size, width - size)
        some = jax.lax.dynamic_slice_in_dim(dcolumns, start, size, axis=1)
        if width % size:
            some = jnp.where(start + jnp.arange(size) >= index * size, some, jnp.zeros_like(some))
        pair = (some, inputs) if options.transposed else (inputs, some)
        before = jax.lax.dynamic_slice_in_dim(sums, start, size, axis)
        after = before + native.dot_weight_gradient(*pair)
        return jax.lax.dynamic_update_slice_in_dim(sums, after, start, axis)

    return jax.lax.fori_loop(0, -(-width // size), part, sums)


def _local(rows: tuple[Any, ...], where: Placement) -> tuple[Any, ...]:
    """This device's rows of a tile's arrays; None stays None."""
    return jax.tree.map(lambda x: collectives.local_rows(x, where), rows)
