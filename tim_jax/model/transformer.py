"""THE forward: one pure function for the sampler's prefill and decode and for the learner.

Weights flow in, hidden states and keys and values flow out. What is computed, how and where comes
from an `Execution`; nothing here knows who is calling.

Shapes: B sequences, T tokens each, d hidden size, V vocabulary; those of attention are in its own
module.
"""

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from tim_jax import kernels
from tim_jax.kernels import experts, formulas
from tim_jax.model import adapters, attention, rope
from tim_jax.model.attention import Cache, LayerCache
from tim_jax.model.execution import Execution
from tim_jax.model.packing import Packing
from tim_jax.model.weights import Weights
from tim_jax.numerics import Numerics
from tim_jax.placement import Placement, collectives


class Routed(NamedTuple):
    """The experts that the router of each layer would take, and how sure it is."""

    experts: jax.Array  # i32[B, T, L, k], the most probable first
    entropy: jax.Array  # f32[B, T], nats, the mean over layers
    balance: jax.Array | None  # f32[B, T], of `experts.balance` the mean over layers, if asked for


def forward(
    weights: Weights,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache | None = None,
    *,
    execution: Execution,
    packing: Packing | None = None,
    remat: bool = False,
    embeddings: jax.Array | None = None,
    routes: jax.Array | None = None,
    loads: jax.Array | None = None,
) -> tuple[jax.Array, LayerCache | Cache, Routed | None]:
    """Hidden states of `tokens`, each attending to its sequence's tokens up to itself.

    Args:
      weights: from `parameters.prepare`, and with a cache from `parameters.unstacked`. Adapters
        among those of the layers have a gradient, and the matrices that they belong to have none.
      tokens: i32[B, T].
      positions: i32[B, T]. Without cache and packing they must be 0..T-1 in every row.
      cache: keys and values of the positions before; the tokens' own are written into it.
      execution: with a placement of more than one device this runs inside `shard_map` over its
        mesh, and arguments and results are this device's parts: of the weights by their logical
        axes, of the batch its rows, of the hidden states its columns, of the cache its key heads.
      packing: the sequences that lie one after the other in the tokens of one row, B = 1; their
        positions begin at 0 each. Without a cache.
      remat: recompute each layer in the backward instead of keeping its activations.
      embeddings: rows [B * T, d] of the tokens, from `embedded`; None: looked up here.
      routes: integers [B, T, L, k], experts of every token and layer to take in place of those that
        the routers choose; without a cache.
      loads: f32[L, E], for the load-balancing loss; without a cache.

    Returns:
      Hidden states [B, T, d] before the final norm, in the compute dtype; the keys and values, the
      updated cache, or without one a `LayerCache` stacked over layers, [L, B, ...]; and what the
      routers choose by themselves, or None if the execution's `routing` is "own".
    """
    batch, length = tokens.shape
    x = embedded(weights, tokens, execution=execution)[0] if embeddings is None else embeddings
    span = length if cache is None else cache[0].span
    span = span if packing is None else packing.longest
    table = rope.table(execution.config.rope, execution.config.head_dim, positions=span)
    rows = positions.reshape(-1)
    angles = tuple(jnp.asarray(part)[rows] for part in table)
    layer = partial(_layer, execution=execution, shape=(batch, length), packing=packing)
    sizes = execution.config.window_sizes
    if cache is None:
        if routes is not None:  # i32[L, B * T, k]
            by_row = routes.reshape(-1, *routes.shape[2:]).astype(jnp.int32)
            routes = jnp.moveaxis(by_row, 1, 0)
        lora, of_routing = execution.lora, (routes, loads)

        def body(x, of_layer):
            layer_weights, window, of_routing = of_layer
            if lora is not None and adapters.of(layer_weights) is not None:
                layer_weights = adapters.attached(layer_weights, config=execution.config, lora=lora)
            x, *made = layer(x, layer_weights, angles, positions, None, window, of_routing)
            return x, tuple(made)

        body = jax.checkpoint(body) if remat else body
        stacks = []
        for name, stack in execution.config.stacks.items():
            own = of_routing if stack.num_experts else (None, None)
            x, made = jax.lax.scan(body, x, (weights[name], sizes, own))
            stacks.append(cast(tuple[LayerCache, Any], made))
        keys_values, chosen = stacks[-1]
        if stacks[1:]:  # the first layers, which have no experts
            both = stacks[0][0], keys_values
            keys_values = jax.tree.map(lambda *of_stacks: jnp.concatenate(of_stacks), *both)
    else:
        updated, found = [], []
        layers = [own for name in execution.config.stacks for own in weights[name]]
        sizes = [None] * len(cache) if sizes is None else sizes
        for layer_weights, old, window in zip(layers, cache, sizes, strict=True):
            x, new, choice = layer(x, layer_weights, angles, positions, old, window, (None, None))
            updated.append(new)
            found += [] if choice is None else [choice]
        keys_values, chosen = tuple(updated), None
        if found:
            chosen = jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *found)
    return x.reshape(batch, length, -1), keys_values, _routed(chosen, (batch, length))


def _routed(chosen, shape: tuple[int, int]) -> Routed | None:
    """Of each layer's experts i32[L, B * T, k], and entropies and losses f32[L, B * T]."""
    if chosen is None:
        return None
    own, entropy, balance = chosen
    own = jnp.moveaxis(own, 0, 1).reshape(*shape, own.shape[0], own.shape[2])
    entropy = jnp.mean(entropy, axis=0).reshape(shape)
    if balance is not None:
        balance = jnp.mean(balance, axis=0).reshape(shape)
    return Routed(own, entropy, balance)


def logits(weights: Weights, hidden: jax.Array, *, execution: Execution) -> jax.Array:
    """Vocabulary logits float32 [N, V] of hidden states [N, d], all of them on every device.

    Not for differentiation across a tensor axis, see `collectives.tensor_whole`.
    """
    normed = head_inputs(weights, hidden, execution=execution)
    columns = head_columns(weights, normed, execution=execution)
    own = formulas.narrowed(columns, execution.numerics.precision.logits)
    return _without_padding(collectives.tensor_whole(own, execution.placement), execution.config)


def logits_of_local_rows(weights: Weights, hidden: jax.Array, *, execution: Execution) -> jax.Array:
    """The same logits for this device's rows (`collectives.local_rows`), [N / tensor, V].

    Differentiable. Row-by-row work on the logits is then shared among the devices of a tensor
    group.
    """
    normed = head_inputs(weights, hidden, execution=execution, shared=True)
    return rows_of_columns(head_columns(weights, normed, execution=execution), execution=execution)


def head_inputs(
    weights: Weights, hidden: jax.Array, *, execution: Execution, shared: bool = False
) -> jax.Array:
    """Hidden states [N, d] after the final norm, in the head's compute dtype.

    `shared`: the devices of a tensor group share the norm's rows.
    """
    numerics = execution.numerics.of_head
    of_head = replace(execution, numerics=numerics)
    normed = _norm(hidden, weights["final_norm"], of_head, shared=shared)
    return kernels.operand(normed, numerics.precision.head_activations, numerics=numerics)


def head_columns(weights: Weights, normed: jax.Array, *, execution: Execution) -> jax.Array:
    """This device's columns of the products with the head, f32[N, V / tensor], padding included."""
    placement, of_head = execution.placement, execution.numerics.of_head
    ops = collectives.family(of_head, placement)

    def product(head):
        head = collectives.matrix(head.astype(of_head.dtype), numerics=of_head, placement=placement)
        return ops.dot(normed, head, numerics=of_head)

    head = weights["head"]
    if isinstance(head, tuple):  # `parameters.unstacked` has cut it
        return jnp.concatenate([product(part) for part in head], axis=1)
    return product(head)


def rows_of_columns(columns: jax.Array, *, execution: Execution) -> jax.Array:
    """`logits_of_local_rows` of what `head_columns` returns."""
    logits = formulas.narrowed(columns, execution.numerics.precision.logits)
    rows = collectives.rows_for_columns(logits, execution.placement)
    return _without_padding(rows, execution.config)


def _without_padding(logits, config):
    return logits if logits.shape[1] == config.vocab_size else logits[:, : config.vocab_size]


def embedded(
    weights: Weights,
    tokens: jax.Array,
    *,
    execution: Execution,
    total: jax.Array | None = None,
    handed_on: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Rows [B * T, d] of the embedding table for tokens [B, T], and `total`.

    Each device looks its columns up for the rows of its whole fsdp group, and rows are exchanged:
    no device ever has the whole table, or the whole of its gradient.

    The backward sums the rows of a frequent token in float32. Without `total` the sum is rounded
    once, to the table's dtype. With `total`, float32 and in the table's parts, it is added to that,
    in its place: whoever differentiates with respect to `total` needs no table of gradients beside
    it, and the table itself has no gradient. If the `total` that is returned is `handed_on` to
    another that adds to it so, the sum is added to its cotangent, which has the other's sum.
    """
    where = execution.placement
    add = partial(formulas.add_rows, numerics=execution.numerics)
    of_group = partial(collectives.group_rows, placement=where, axis="fsdp")

    def rows(table, tokens, total):
        return collectives.rows_for_columns(table[of_group(tokens)], where, axis="fsdp"), total

    def backward(residuals, cotangents):
        table, tokens, total = residuals
        total = cotangents[1] if handed_on else total
        columns = collectives.columns_for_rows(cotangents[0], where, axis="fsdp")
        sums = jnp.zeros(table.shape, jnp.float32) if total is None else total
        sums = add(sums, of_group(tokens), columns.astype(jnp.float32))
        return (sums.astype(table.dtype), None, None) if total is None else (None, None, sums)

    call = jax.custom_vjp(rows)
    call.defvjp(lambda *args: (rows(*args), args), backward)
    return call(weights["embed"], tokens.reshape(-1), total)


def whole_norms(weights: Weights, *, execution: Execution) -> Weights:
    """`weights` with the norms' own whole on every device, by one gather.

    For loops of the forward: gathered inside, they would be moved again for every token. And where
    a compiler takes such gathers out of a loop, nothing orders them after what came before, which
    XLA's collectives on a CPU need.
    """
    names, stacks = ("attn_norm", "mlp_norm"), tuple(execution.config.stacks)
    parts = [weights[stack][name] for stack in stacks for name in names]
    parts.append(weights["final_norm"][None])
    whole = collectives.gather(jnp.concatenate(parts), ("tensor", "fsdp"), execution.placement)
    ends = list(accumulate(len(part) for part in parts[:-1]))
    *of_layers, last = jnp.split(whole, ends)
    rows = iter(of_layers)
    norms = {stack: weights[stack] | {name: next(rows) for name in names} for stack in stacks}
    return {**weights, **norms, "final_norm": last[0]}


def _layer(
    x, w, angles, positions, cache, window, of_routing, *, execution: Execution, shape, packing
):
    """One decoder layer on rows x [B * T, d]; with a tensor axis, on this device's columns of x.

    Returns the rows, the keys and values, and what the router chose if that is asked for.
    """
    numerics, placement = execution.numerics, execution.placement
    local = replace(numerics, column_tiles=numerics.column_tiles // placement.tensor)
    ops = collectives.family(local, placement)
    matrix = partial(collectives.matrix, numerics=local, placement=placement)
    whole = partial(collectives.gather, names=("tensor",), placement=placement)
    norm = partial(_norm, execution=execution, shared=cache is None)
    operand = partial(kernels.operand, name=numerics.precision.activations, numerics=local)
    mixed, keys_values = attention.attended(
        operand(norm(x, w["attn_norm"])),
        w,
        angles,
        positions,
        cache,
        window,
        execution=replace(execution, numerics=local),
        shape=shape,
        packing=packing,
    )
    mixed = operand(whole(mixed))
    x = ops.dot_add(mixed, matrix(w["o"]), x, w.get("o_bias"), numerics=local)
    normed = norm(x, w["mlp_norm"])
    if "router" in w:
        x, chosen = _experts(x, normed, w, of_routing, execution)
        return x, keys_values, chosen
    bias = w.get("gate_up_bias")
    hidden = ops.gated_dot(operand(normed), matrix(w["gate_up"]), bias, numerics=local)
    hidden = operand(whole(hidden))
    x = ops.dot_add(hidden, matrix(w["down"]), x, w.get("down_bias"), numerics=local)
    return x, keys_values, None


def _experts(x, normed, w, of_routing, execution: Execution):
    """x [N, d] + what the experts that each of its rows goes through make of `normed` [N, d].

    `of_routing` are the experts i32[N, k] to take or None, and loads f32[E] or None. Also returns,
    if the execution asks for it, the router's own experts i32[N, k], its entropy f32[N], and with
    loads each row's load-balancing loss f32[N].
    """
    routes, loads = of_routing
    config, numerics, placement = execution.config, execution.numerics, execution.placement
    logits = _router_logits(normed, w["router"], placement, numerics.of_router)
    chooser = None  # the logits by which experts are chosen, if they are others
    if numerics.of_choice != numerics.of_router:
        chooser = _router_logits(normed, w["router"], placement, numerics.of_choice)
    choice = experts.choice(
        logits,
        count=config.num_experts_per_tok,
        normalised=config.norm_topk_prob,
        numerics=numerics,
        given=routes,
        sigmoid=_sigmoid(w, config),
        chooser=chooser,
    )
    made = experts.outputs(
        normed,
        w["expert_gate_up"],
        w["expert_down"],
        choice.experts,
        ops=kernels.family(numerics),
        numerics=numerics,
        gather=partial(collectives.whole_matrix, placement=placement),
        scatter=partial(collectives.own_rows, placement=placement),
        exchange=collectives.exchange(placement, count=config.num_experts),
    )
    shared = _shared_experts(normed, w, execution) if config.shared_width else None
    x = experts.combined(x, made, choice.weights, numerics=numerics, shared=shared)
    if execution.routing == "own":
        return x, None
    sigmoid = "router_bias" in w
    loss = None if loads is None else experts.balance(logits, loads, sigmoid=sigmoid)
    return x, (choice.own, experts.entropy(logits, sigmoid=sigmoid), loss)


def _sigmoid(w, config) -> experts.Sigmoid | None:
    """How experts are chosen by sigmoids, if this model does so."""
    if "router_bias" not in w:
        return None
    return experts.Sigmoid(
        w["router_bias"],
        groups=config.router_groups,
        taken=config.router_groups_per_tok,
        scale=config.routed_scaling_factor,
    )


def _shared_experts(normed, w, execution: Execution):
    """float32 [N, d], what the experts that every token goes through make of `normed`."""
    numerics, placement = execution.numerics, execution.placement
    ops = collectives.family(numerics, placement)
    matrix = partial(collectives.matrix, numerics=numerics, placement=placement)
    hidden = ops.gated_dot(normed, matrix(w["shared_gate_up"]), None, numerics=numerics)
    made = ops.dot(hidden, matrix(w["shared_down"]), numerics=numerics)
    if "shared_scale" not in w:
        return made
    return experts.scaled(made, normed, w["shared_scale"], numerics=numerics)


def _router_logits(normed, router, placement: Placement, numerics: Numerics):
    """float32 [N, E], of the numerics' compute dtype."""
    ops = collectives.family(numerics, placement)
    router = collectives.matrix(
        router.astype(numerics.dtype), numerics=numerics, placement=placement
    )
    return ops.dot(normed.astype(numerics.dtype), router, numerics=numerics)


def _norm(x, weight, execution: Execution, *, shared: bool):
    """RMSNorm of whole rows [N, d] of this device's columns, rounded to the compute dtype.

    With `shared` each device of a tensor group computes its part of the rows. That takes one more
    exchange, so a step of the decode loop, which has few rows, does without.
    """
    numerics, placement = execution.numerics, execution.placement
    if weight.shape[0] < execution.config.hidden_size:  # unless `whole_norms` has gathered it
        weight = collectives.gather(weight, ("tensor", "fsdp"), placement)
    norm = partial(kernels.family(numerics).norm, eps=execution.config.rms_norm_eps)
    if not shared:
        return norm(collectives.gather(x, ("tensor",), placement), weight, numerics=numerics)
    rows = x.shape[0]
    x = jnp.pad(x, ((0, -rows % placement.tensor), (0, 0)))
    own = norm(collectives.rows_for_columns(x, placement), weight, numerics=numerics)
    return collectives.gather_rows(own, placement)[:rows]
