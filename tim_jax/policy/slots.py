"""Slots that decode a queue of sequences: what is in them, what waits, and what has been drawn.

Everything here moves values and computes none: it decides which sequence is decoded where and when,
which cannot be seen in a sequence's bits.

N: sequences of a rollout, S: slots, R: longest response, P: prompts, Tp: padded prompt length.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from tim_jax.model.transformer import Cache, LayerCache


@struct.dataclass
class Results:
    """What has been drawn for all sequences; zeros where nothing has."""

    tokens: jax.Array  # i32[N, R]
    log_probs: jax.Array  # f32[N, R]
    lengths: jax.Array  # i32[N]
    ended: jax.Array  # bool[N], drew a stop token
    drawn: jax.Array | None  # f32[N, R], log-probs drawn with, if others are recorded


@struct.dataclass
class Queue:
    """The sequences that go on after their first token, in the order in which slots take them."""

    order: jax.Array  # i32[N]; the first `count` are waiting
    count: jax.Array  # i32[]
    prompt_lengths: jax.Array  # i32[N]
    prompts: LayerCache  # of the prompts, in chunks of k: [P / k, layers, k, ...]
    samples: int = struct.field(pytree_node=False)  # sequences of a prompt, one after the other


@struct.dataclass
class Slots:
    """Sequences that are being decoded. A slot that does not work keeps its last one."""

    cache: Cache  # of all tokens but the newest
    sequences: jax.Array  # i32[S]
    newest: jax.Array  # i32[S], the last token
    lengths: jax.Array  # i32[S], response tokens drawn
    working: jax.Array  # bool[S], has not drawn its last token
    ended: jax.Array  # bool[S], drew a stop token


def empty(queue: Queue, count: int, span: int) -> Slots:
    """Idle slots with room for `span` tokens each."""

    def layer() -> LayerCache:
        _, _, _, heads, size, _ = queue.prompts.key.shape
        dtype = queue.prompts.key.dtype
        return LayerCache(
            key=jnp.zeros((count, heads, size, span), dtype),
            value=jnp.zeros((count, heads, span, size), dtype),
        )

    return Slots(
        cache=tuple(layer() for _ in range(queue.prompts.key.shape[1])),
        sequences=jnp.zeros((count,), jnp.int32),
        newest=jnp.zeros((count,), jnp.int32),
        lengths=jnp.zeros((count,), jnp.int32),
        working=jnp.zeros((count,), bool),
        ended=jnp.zeros((count,), bool),
    )


def refilled(
    slots: Slots, given: jax.Array, queue: Queue, results: Results
) -> tuple[Slots, jax.Array]:
    """Gives the next sequences of the queue to the slots that do not work.

    Args:
      given: i32[], how many sequences of the queue have been given to slots before.
      results: has the first token of every sequence.

    Returns:
      The slots, and how many sequences have been given now.
    """
    idle = ~slots.working
    place = given + jnp.cumsum(idle.astype(jnp.int32)) - 1
    takes = idle & (place < queue.count)
    waiting = queue.order[jnp.minimum(place, queue.order.shape[0] - 1)]
    sequences = jnp.where(takes, waiting, slots.sequences)
    slots = replace(
        slots,
        cache=_with_prompts(slots.cache, takes, sequences, queue),
        sequences=sequences,
        newest=jnp.where(takes, results.tokens[sequences, 0], slots.newest),
        lengths=jnp.where(takes, 1, slots.lengths),
        working=slots.working | takes,
        ended=slots.ended & ~takes,
    )
    return slots, given + jnp.sum(takes, dtype=jnp.int32)


def _with_prompts(cache: Cache, takes: jax.Array, sequences: jax.Array, queue: Queue) -> Cache:
    """Copies the prompts' keys and values into the slots that take a sequence, one by one.

    What was behind them is cleared: a number that is not finite would reach the next sequence
    through a product with zero.
    """
    slots_first = jnp.argsort(~takes, stable=True)
    chunk = queue.prompts.key.shape[2]

    def one(index: jax.Array, cache: Cache) -> Cache:
        slot = slots_first[index]
        prompt = sequences[slot] // queue.samples

        def put(old: jax.Array, prompts: jax.Array, layer: int) -> jax.Array:
            at = (prompt // chunk, layer, prompt % chunk, 0, 0, 0)
            row = jax.lax.dynamic_slice(prompts, at, (1, 1, 1, *prompts.shape[3:]))[0, 0]
            pairs = zip(old.shape[1:], row.shape[1:], strict=True)
            row = jnp.pad(row, [(0, 0), *((0, whole - part) for whole, part in pairs)])
            return jax.lax.dynamic_update_slice(old, row, (slot, 0, 0, 0))

        return tuple(
            LayerCache(
                key=put(old.key, queue.prompts.key, number),
                value=put(old.value, queue.prompts.value, number),
            )
            for number, old in enumerate(cache)
        )

    return jax.lax.fori_loop(0, jnp.sum(takes, dtype=jnp.int32), one, cache)


def advanced(slots: Slots, cache: Cache, tokens: jax.Array, stops: jax.Array, limit: int) -> Slots:
    """The slots after a step that drew `tokens` i32[S]; `stops` i32[n] end a response."""
    lengths = slots.lengths + slots.working.astype(jnp.int32)
    ended = slots.working & jnp.any(tokens[:, None] == stops[None, :], axis=1)
    return replace(
        slots,
        cache=cache,
        newest=jnp.where(slots.working, tokens, slots.newest),
        lengths=lengths,
        working=slots.working & ~ended & (lengths < limit),
        ended=slots.ended | ended,
    )


def stored(
    results: Results,
    before: Slots,
    after: Slots,
    *,
    tokens: jax.Array,
    log_probs: jax.Array,
    drawn: jax.Array | None,
) -> Results:
    """Results with what the slots drew in some steps: `tokens` i32[steps, S] and their log-probs.

    A slot that stops working before the last step draws nothing more.
    """
    nowhere = results.lengths.shape[0]
    step = jnp.arange(tokens.shape[0])[:, None]
    inside = step < (after.lengths - before.lengths)[None, :]
    rows = jnp.where(inside, before.sequences[None, :], nowhere)
    at = rows, before.lengths[None, :] + step
    own = jnp.where(before.working, before.sequences, nowhere)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[at].set(new, mode="drop")

    return Results(
        tokens=put(results.tokens, tokens),
        log_probs=put(results.log_probs, log_probs),
        lengths=results.lengths.at[own].set(after.lengths, mode="drop"),
        ended=results.ended.at[own].set(after.ended, mode="drop"),
        drawn=None if results.drawn is None or drawn is None else put(results.drawn, drawn),
    )


def narrowed(slots: Slots, count: int) -> Slots:
    """The `count` slots that work, of those; no more than that may be working."""
    kept = jnp.argsort(~slots.working, stable=True)[:count]
    return jax.tree.map(lambda x: x[kept], slots)
