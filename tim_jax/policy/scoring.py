"""Log-probs of given responses: one forward over whole sequences, then the head tile by tile."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tim_jax import kernels
from tim_jax.kernels import native
from tim_jax.model import transformer
from tim_jax.model.execution import Execution
from tim_jax.model.weights import Weights, weight_axes
from tim_jax.placement import Placement, collectives
from tim_jax.policy import distribution
from tim_jax.types import Rollout


def sequences(rollout: Rollout) -> jax.Array:
    """i32[B, Tp + R]: each prompt directly followed by its response, position 0 first."""
    prompt_size, response_size = rollout.prompts.shape[1], rollout.responses.shape[1]
    at = jnp.arange(prompt_size + response_size)[None, :]
    after = at - rollout.prompt_lengths[:, None]
    prompt = jnp.pad(rollout.prompts, ((0, 0), (0, response_size)))
    index = jnp.clip(after, 0, response_size - 1)
    response = jnp.take_along_axis(rollout.responses, index, axis=1)
    return jnp.where(after < 0, prompt, response)


class Scores(NamedTuple):
    """Scores of given responses, float32 [B, R]; beyond a response finite, but meaningless."""

    log_probs: jax.Array  # log pi(response token)
    entropy: jax.Array  # of the token's distribution, nats
    energy: jax.Array | None = None  # see `policy.score_energy`, if asked for


def score(
    weights: Weights,
    rollout: Rollout,
    *,
    execution: Execution,
    remat: bool = False,
    entropy_gradient: bool = False,
    energy: bool = False,
) -> Scores:
    """Log-probs of the response tokens, and the entropies of their distributions.

    The distribution is the execution's (temperature, truncation replayed). Differentiable in
    `weights` through the log-probs, and through the entropies only with `entropy_gradient`, which
    changes no bit of what is returned. With a placement of several devices: inside `shard_map`, on
    this device's parts of weights and rows, see `transformer.forward`.
    """
    tokens = sequences(rollout)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    hidden, _ = transformer.forward(
        weights,
        tokens,
        positions,
        execution=execution,
        remat=remat,
    )
    # The token at position t is predicted by the hidden state at t - 1.
    size = rollout.responses.shape[1]
    rows = jax.vmap(partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=0))(
        hidden, rollout.prompt_lengths - 1
    )
    head = {name: weights[name] for name in ("final_norm", "head")}
    options = _HeadOptions(execution, entropy_gradient, energy)
    scores = Scores(*_head(head, rows, rollout.responses, options))
    if entropy_gradient:
        return scores
    return scores._replace(entropy=jax.lax.stop_gradient(scores.entropy))


class _HeadOptions(NamedTuple):
    """How the head computes, and what else than log-probs."""

    execution: Execution
    entropy_gradient: bool
    energy: bool

    @property
    def placement(self) -> Placement:
        return self.execution.placement


def _head(head, hidden, tokens, options: _HeadOptions):
    """Log-probs and entropies [B, R] of hidden states [B, R, d], `head_rows` rows at a time.

    No array of [tokens, vocabulary] ever exists: the backward recomputes each tile's logits, and
    sums the head's gradient in float32 whatever the compute dtype. The devices of a tensor group
    share a tile: each multiplies its columns of the head by all rows, then has all columns of its
    own rows.
    """
    shape = tokens.shape
    tile_rows = min(options.execution.numerics.head_rows, tokens.size)
    tile_rows += -tile_rows % options.placement.tensor
    padding = -tokens.size % tile_rows

    def tiled(x):
        x = x.reshape(tokens.size, *x.shape[2:])
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, tile_rows, *x.shape[1:])

    fence = kernels.family(options.execution.numerics).fence
    all_axes = weight_axes(options.execution.config, options.execution.numerics)
    head_axes = {name: all_axes[name] for name in head}

    def forward(head, hidden, tokens):
        whole = collectives.gather_fsdp(head, head_axes, options.placement)
        tile = partial(_head_tile, whole, options=options)
        tiles = jax.lax.map(lambda rows: fence(tile(*fence(rows))), (hidden, tokens))
        return tuple(collectives.tensor_whole(x, options.placement) for x in tiles)

    def backward(residuals, cotangents):
        head, hidden, tokens = residuals
        whole = collectives.gather_fsdp(head, head_axes, options.placement)

        def step(sums, rows):
            hidden, tokens, cotangent = rows
            plain = partial(_plain_head_tile, tokens, options=options)
            local = tuple(collectives.local_rows(x, options.placement) for x in cotangent)
            dhead, dhidden = jax.vjp(plain, whole, hidden)[1](local)
            sums = jax.tree.map(lambda s, d: s + d.astype(jnp.float32), sums, dhead)
            return sums, dhidden

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), whole)
        wanted = tuple(cotangents[: 2 if options.entropy_gradient else 1])
        sums, dhidden = jax.lax.scan(step, zeros, (hidden, tokens, wanted))
        sums = collectives.reduce_scatter_fsdp(sums, head_axes, options.placement)
        return jax.tree.map(lambda s, w: s.astype(w.dtype), sums, head), dhidden, None

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *args: (forward(*args), args), backward)
    results = call(head, tiled(hidden), tiled(tokens))
    return tuple(x.reshape(-1)[: tokens.size].reshape(shape) for x in results)


def _head_tile(head, hidden, tokens, *, options: _HeadOptions):
    """Log-prob, entropy and perhaps energy of this device's rows of the tile."""
    sampling, numerics = options.execution.sampling, options.execution.numerics
    logits = _logits(head, hidden, options.execution)
    tokens = collectives.local_rows(tokens, options.placement)
    log_probs = distribution.log_prob(logits, tokens, sampling=sampling, numerics=numerics)
    entropy = distribution.entropy(logits, sampling=sampling)
    if not options.energy:
        return log_probs, entropy
    return log_probs, entropy, distribution.score_energy(logits, tokens, sampling=sampling)


def _plain_head_tile(tokens, head, hidden, *, options: _HeadOptions):
    """The outputs that have a gradient, in plain XLA operations."""
    sampling, plain = options.execution.sampling, native.counterpart(options.execution.numerics)
    logits = _logits(head, hidden, replace(options.execution, numerics=plain))
    tokens = collectives.local_rows(tokens, options.placement)
    log_probs = distribution.log_prob(logits, tokens, sampling=sampling, numerics=plain)
    if not options.entropy_gradient:
        return (log_probs,)
    return log_probs, distribution.entropy(logits, sampling=sampling)


def _logits(head, hidden, execution: Execution):
    gathered = replace(execution, placement=execution.placement.gathered)
    return transformer.logits_of_local_rows(head, hidden, execution=gathered)
