"""Log-probs of given responses: one forward over whole sequences, then the head tile by tile."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tim_jax import kernels
from tim_jax.common.types import Rollout
from tim_jax.kernels import native
from tim_jax.model import transformer
from tim_jax.model.execution import Execution
from tim_jax.model.weights import Weights, weight_axes
from tim_jax.numerics import Numerics, masked
from tim_jax.placement import Placement, collectives
from tim_jax.policy import distribution, layout
from tim_jax.policy.layout import Layout


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

    The distribution is the execution's (temperature, truncation replayed). Differentiable in
    `weights` through the log-probs, and through the entropies only with `entropy_gradient`, which
    changes no bit of what is returned. With a placement of several devices: inside `shard_map`, on
    this device's parts of weights and rows, see `transformer.forward`.

    With `sums` (see `gradient_sums`) embedding and head have no gradient, but the gradient with
    respect to `sums` is these sums plus that gradient: the backward adds to them in their place.
    With `frozen_head` the head and the last norm have no gradient, and nothing is computed for it.
    `loads` f32[L, E]: the shares of a batch's tokens that each expert has, for `Scores.balance`.
    With `buffer` the sequences lie in a buffer of this many tokens, which must hold them, and no
    padding is computed; that changes no bit of what is returned of a response.
    """
    laid_out = layout.padded(rollout) if buffer is None else layout.packed(rollout, buffer)
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
    """f32[B, R, L], of the positions that predict the response tokens: the share of the routes'
    experts that the model's own router takes too, in each layer. On one device."""
    laid_out = layout.padded(rollout)
    _, _, routed = transformer.forward(
        weights, laid_out.tokens, laid_out.positions, execution=execution
    )
    same = _same_experts(routed, laid_out).astype(jnp.float32)
    return laid_out.predicting(jnp.mean(same, axis=3))


def _same_experts(routed: Any, laid_out: Layout) -> jax.Array:
    """bool[B, T, L, k], which of the routers' own choices the sampler made too."""
    if laid_out.routes is None:
        raise ValueError("the rollout has no routes to compare with")
    own, recorded = routed.experts, laid_out.routes.astype(jnp.int32)
    return jnp.any(own[..., :, None] == recorded[..., None, :], axis=-1)


def _routing(routed: transformer.Routed, laid_out: Layout) -> dict[str, jax.Array | None]:
    """How often sampler and learner choose the same experts, and more of the routers, [B, R]."""

    def of_responses(x: jax.Array) -> jax.Array:
        return laid_out.by_response(laid_out.predicting(x))

    same = _same_experts(routed, laid_out)
    number = jnp.asarray(same.shape[2] * same.shape[3], jnp.float32)
    agreement = masked.quotient(jnp.sum(same.astype(jnp.float32), axis=(2, 3)), number)
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
    laid_out = layout.padded(rollout)
    routes = laid_out.routes if execution.routing == "replayed" else None
    hidden, _, _ = transformer.forward(
        weights, laid_out.tokens, laid_out.positions, execution=execution, routes=routes
    )
    head = {name: weights[name] for name in ("final_norm", "head")}
    shape = rollout.responses.shape
    fence = kernels.family(execution.numerics).fence

    def tile(rows):
        hidden, tokens, *others = fence(rows)
        logits = transformer.logits_of_local_rows(head, hidden, execution=execution)
        return fence(function(logits, tokens, *others))

    rows = (laid_out.predicting(hidden), rollout.responses, *more)
    tiles = _tiled(rows, min(execution.numerics.head_rows, rollout.responses.size))
    found = jax.lax.map(tile, tiles)
    size = rollout.responses.size

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
    """True if the head's gradient is added to the embedding's: the head is the embedding
    transposed, and lies in the same parts, as it does without column tiles."""
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
    not computed. `scored` are the tokens [B, R], and the supports [B, R, K] or None.

    No array of [tokens, vocabulary] ever exists: the backward recomputes each tile's logits, and
    sums the head's gradient in float32 whatever the compute dtype: in `total`, if there is one (see
    `gradient_sums`; of the head's shape, or transposed as the tied embedding's). The devices of a
    tensor group share a tile: each multiplies its columns of the head by all rows, then has all
    columns of its own rows.
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
        tile = partial(_head_tile, whole, options=options)
        rows = hidden, scored
        _, tiles = _fold(lambda _, rows: ((), fence(tile(*fence(rows)))), (), rows, used)
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


def _head_tile(head, hidden, scored, *, options: _HeadOptions):
    """Log-prob, entropy and perhaps energy of this device's rows of the tile."""
    sampling, numerics = options.execution.sampling, options.execution.numerics
    logits = transformer.logits_of_local_rows(head, hidden, execution=options.gathered)
    tokens, supports = _local(scored, options.placement)
    how = {"sampling": sampling, "numerics": numerics, "supports": supports}
    log_probs = distribution.log_prob(logits, tokens, **how)
    entropy = distribution.entropy(logits, sampling=sampling)
    if not options.energy:
        return log_probs, entropy
    return log_probs, entropy, distribution.score_energy(logits, tokens, sampling=sampling)


def _head_backward(head, transposed, carry, rows, *, options: _HeadOptions):
    """One tile's step of the backward: adds to the sums, and returns the hidden states' cotangent.

    The logits are the forward's own. `transposed` is what `_transposed_head` returns.
    """
    (norm, sums), (hidden, scored, cotangents) = carry, rows
    execution = options.gathered
    plain = replace(execution, numerics=native.counterpart(execution.numerics))
    inputs = transformer.head_inputs(head, hidden, execution=execution, shared=True)
    columns = transformer.head_columns(head, inputs, execution=execution)
    outputs = partial(_plain_outputs, scored, execution=plain, options=options)
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


def _plain_outputs(scored, columns, *, execution: Execution, options: _HeadOptions):
    """The outputs that have a gradient, of the head's columns, in plain XLA operations."""
    logits = transformer.rows_of_columns(columns, execution=execution)
    tokens, supports = _local(scored, options.placement)
    sampling, numerics = execution.sampling, execution.numerics
    how = {"sampling": sampling, "numerics": numerics, "supports": supports}
    log_probs = distribution.log_prob(logits, tokens, **how)
    if not options.entropy_gradient:
        return (log_probs,)
    return log_probs, distribution.entropy(logits, sampling=sampling)


def _local(rows: tuple[Any, ...], where: Placement) -> tuple[Any, ...]:
    """This device's rows of a tile's arrays; None stays None."""
    return jax.tree.map(lambda x: collectives.local_rows(x, where), rows)
