"""The sampler, prompts -> `Rollout`: prefill once per prompt, then a decode loop of the forward."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from tim_jax.model import preparing, transformer
from tim_jax.model.execution import Execution
from tim_jax.model.weights import Weights, weight_axes
from tim_jax.placement import SINGLE, collectives
from tim_jax.policy import distribution
from tim_jax.types import Prompts, Rollout

# (logits f32[B, V], uniform f32[B], step i32[]) -> tokens i32[B], the log-probs f32[B] to record,
# and those that the tokens were drawn with where they are others, else None.
Draw = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array | None]]


@struct.dataclass
class _Decoding:
    """State of the decode loop. Row b has drawn `step` tokens or has ended."""

    step: jax.Array  # i32[]
    cache: transformer.Cache  # of all tokens but the newest
    tokens: jax.Array  # i32[R, B]
    log_probs: jax.Array  # f32[R, B]
    lengths: jax.Array  # i32[B]
    ended: jax.Array  # bool[B], drew a stop token
    drawn: jax.Array | None = None  # f32[R, B], log-probs drawn with, if others are recorded


def sample(
    weights: Weights,
    prompts: Prompts,
    key: jax.Array,
    *,
    execution: Execution,
    samples: int,
    first: jax.Array | None = None,
    draw: Draw | None = None,
    records_drawn: bool = False,
) -> Rollout:
    """Draws `samples` responses to each prompt; rows are prompts major.

    Row p * samples + s uses only random numbers keyed by (key, prompts.ids[p], s, position), so a
    response does not depend on the batch it was drawn in. `key` carries seed and step.

    Args:
      weights: compute weights, from `preparing.prepare`.
      prompts: P prompts, padded to Tp tokens.
      key: a PRNG key.
      execution: with a placement of more than one device this runs inside `shard_map`, on this
        device's parts of weights and prompts, see `transformer.forward`.
      samples: responses per prompt (the group size).
      first: i32[], number of each group's first sample here, where a group is split over devices.
      draw: in place of `policy.draw`, for a sampler that differs on purpose.
      records_drawn: `draw` returns log-probs to record that are not those it drew with.
    """
    batch = prompts.tokens.shape[0] * samples
    config, numerics, placement = execution.config, execution.numerics, execution.placement
    limit = execution.sampling.max_response_length
    uniforms = _uniforms(key, prompts.ids, samples, limit, first)
    rows = placement  # whose devices step together
    if placement.decode == "whole" or placement.shards == 1:
        rows = SINGLE
        weights = collectives.gather_fsdp(weights, weight_axes(config, numerics), placement)
        execution = replace(execution, placement=placement.gathered)
    run: Callable[..., Any] = partial(transformer.forward, execution=execution)
    hidden, cache = _prefill(partial(run, weights), prompts, samples)
    weights = preparing.unstacked(weights)
    starts = jnp.repeat(prompts.lengths, samples)
    stops = jnp.asarray(execution.sampling.stop_tokens, jnp.int32)
    draw = draw or partial(_draw, sampling=execution.sampling, numerics=numerics)

    def extended(state: _Decoding, weights: Weights, hidden: jax.Array) -> _Decoding:
        """The state with one more token per row, drawn at `hidden` [B, d]."""
        logits = transformer.logits(weights, hidden, execution=execution)
        return _recorded(state, *draw(logits, uniforms[state.step], state.step), stops)

    def step(state: _Decoding) -> _Decoding:
        """Runs the forward on the newest token of every row, and draws the next.

        A row that has ended is computed all the same: its tokens are masked by its length, its
        writes to the cache stay at its own last position, and no other row sees them.
        """
        now = weights
        if rows is not SINGLE:
            # The weights are tied to the step, or XLA could gather them before the loop and keep
            # them.
            now, _ = jax.lax.optimization_barrier((weights, state.step))
        newest, positions = state.tokens[state.step - 1], starts + state.lengths - 1
        result: Any = run(now, newest[:, None], positions[:, None], state.cache)
        hidden, cache = result
        return extended(replace(state, cache=cache), now, hidden[:, 0])

    state = extended(_beginning(cache, (limit, batch), records_drawn), weights, hidden)
    longest = jnp.max(collectives.whole_rows(starts, rows))

    def unfinished(span, state: _Decoding):
        """More tokens are wanted, and the newest one's key still fits into `span` positions."""
        wanted = (state.step < limit) & (longest + state.step <= span)
        return wanted & collectives.any_row(jnp.any(~state.ended), rows)

    for span in spans(prompts.tokens.shape[1], limit, numerics.kv_block):
        state = replace(state, cache=_grow(state.cache, span))
        state = jax.lax.while_loop(partial(unfinished, span), step, state)
    return _rollout(prompts, starts, state)


def _rollout(prompts: Prompts, starts: jax.Array, state: _Decoding) -> Rollout:
    samples = starts.shape[0] // prompts.tokens.shape[0]
    return Rollout(
        prompts=jnp.repeat(prompts.tokens, samples, axis=0),
        prompt_lengths=starts,
        responses=state.tokens.T,
        lengths=state.lengths,
        log_probs=state.log_probs.T,
        finished=state.ended,
        drawn_log_probs=None if state.drawn is None else state.drawn.T,
    )


def _beginning(cache, shape: tuple[int, int], records_drawn: bool) -> _Decoding:
    """The state before anything is drawn; `shape` is (most tokens, rows)."""
    return _Decoding(
        step=jnp.int32(0),
        cache=cache,
        tokens=jnp.zeros(shape, jnp.int32),
        log_probs=jnp.zeros(shape, jnp.float32),
        lengths=jnp.zeros(shape[1:], jnp.int32),
        ended=jnp.zeros(shape[1:], bool),
        drawn=jnp.zeros(shape, jnp.float32) if records_drawn else None,
    )


def _draw(logits, uniform, step, *, sampling, numerics):
    del step
    return (*distribution.draw(logits, uniform, sampling=sampling, numerics=numerics), None)


def _recorded(state: _Decoding, token, log_prob, drawn, stops: jax.Array) -> _Decoding:
    """The state with the tokens just drawn, in the rows that have not ended."""
    active = ~state.ended

    def put(values, new):
        return values.at[state.step].set(jnp.where(active, new, jnp.zeros_like(new)))

    return replace(
        state,
        step=state.step + 1,
        tokens=put(state.tokens, token),
        log_probs=put(state.log_probs, log_prob),
        lengths=state.lengths + active.astype(jnp.int32),
        ended=state.ended | jnp.any(token[:, None] == stops[None, :], axis=1),
        drawn=None if state.drawn is None else put(state.drawn, drawn),
    )


def _prefill(run: Callable, prompts: Prompts, samples: int) -> tuple[jax.Array, transformer.Cache]:
    """Hidden state at each prompt's last token and the cache, repeated for the group."""
    count, length = prompts.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length)[None, :], (count, length))
    hidden, stacked = run(prompts.tokens, positions)
    last = jnp.take_along_axis(hidden, (prompts.lengths - 1)[:, None, None], axis=1)[:, 0]
    layers = stacked.key.shape[0]
    cache = tuple(
        jax.tree.map(lambda x, i=index: jnp.repeat(x[i], samples, axis=0), stacked)
        for index in range(layers)
    )
    return jnp.repeat(last, samples, axis=0), cache


def spans(prompt: int, response: int, block: int) -> list[int]:
    """Cache lengths of the decode loops, doubling, so that attention covers what is in use.

    Positions beyond the tokens in use change no bit, but cost time. A loop per span, each over a
    shorter cache, skips most of them. The last token drawn needs no place.
    """
    blocks = -(-(prompt + response - 1) // block)
    span = -(-(prompt + 1) // block)
    spans = []
    while span < blocks:
        spans.append(span * block)
        span *= 2
    return [*spans, blocks * block]


def _grow(cache: transformer.Cache, span: int) -> transformer.Cache:
    """Appends empty positions up to `span`."""

    def grow(layer: transformer.LayerCache) -> transformer.LayerCache:
        more = span - layer.key.shape[3]
        return transformer.LayerCache(
            key=jnp.pad(layer.key, ((0, 0), (0, 0), (0, 0), (0, more))),
            value=jnp.pad(layer.value, ((0, 0), (0, 0), (0, more), (0, 0))),
        )

    return tuple(grow(layer) for layer in cache)


def _uniforms(
    key: jax.Array, ids: jax.Array, samples: int, length: int, first: jax.Array | None
) -> jax.Array:
    """float32 [R, B] in [0, 1), keyed by (key, prompt id, sample, position)."""
    numbers = jnp.arange(samples)
    if first is not None:
        numbers = numbers + first

    def sequence(prompt, sample):
        stream = jax.random.fold_in(jax.random.fold_in(key, prompt), sample)
        at = jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(stream, position)))
        return at(jnp.arange(length))

    of_group = jax.vmap(jax.vmap(sequence, in_axes=(None, 0)), in_axes=(0, None))
    return of_group(ids, numbers).reshape(-1, length).T
