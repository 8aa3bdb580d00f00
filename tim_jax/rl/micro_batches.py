"""The rows of an update in parts that bound its memory: as many rows each, or as many tokens.

Parts of rows are padded to the longest. Parts of tokens are filled by sequences of different
lengths, see `policy.layout`, so that what is computed follows the tokens that there are. Which
sequences share a part depends on the lengths alone, and changes no bit of a token's log-prob.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tim_jax.common.types import Rollout
from tim_jax.rl.types import Experience, split_rows

_ANY_NUMBER = 2**31 - 1  # of tokens


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    rows: Any,
    rollout: Rollout,
    *,
    size: int | None,
    tokens: int | None,
    without: Callable[[Any, jax.Array], Any],
    agree: Callable[[jax.Array], jax.Array],
) -> tuple[Any, Any]:
    """`lax.scan` over parts of at most `size` rows, or of at most `tokens` tokens too.

    Args:
      step: (carry, rows [size, ...]) -> (carry, tree of arrays [size, R]).
      rows: a tree of arrays [B, ...].
      rollout: the sequences of the rows. Where an episode has several rows, the empty ones are not
        computed.
      size: None: as many as there are sequences, or episodes.
      tokens: no sequence has more, its prompt included.
      without: (rows [size, ...], bool[size]) -> these without the rows that are False, which stand
        in where a part has fewer.
      agree: i32[], the number of parts here -> the largest that a device beside it has: all of them
        must compute as many.

    Returns:
      The carry, and the arrays as [B, R].
    """
    count = rollout.lengths.shape[0]
    size = min(size or count // rollout.parts, count)
    if tokens is None and rollout.parts == 1:
        return _scan_rows(step, carry, rows, size=size)
    lengths = whole_lengths(rollout)
    part_of = fill(lengths, tokens=tokens or _ANY_NUMBER, rows=size)
    there = part_of if rollout.parts == 1 else jnp.where(rollout.lengths > 0, part_of, 0)
    parts = agree(jnp.max(there) + 1)

    def part(number: jax.Array) -> tuple[jax.Array, Any]:
        (chosen,) = jnp.nonzero(part_of == number, size=size, fill_value=count)
        own = jax.tree.map(lambda x: x.at[chosen].get(mode="clip"), rows)
        return chosen, without(own, chosen < count)

    def one(number: jax.Array, state: Any) -> Any:
        carry, made = state
        chosen, own = part(number)
        carry, new = step(carry, own)
        put = partial(jax.tree.map, lambda x, y: x.at[chosen].set(y, mode="drop"))
        return carry, put(made, new)

    shapes = jax.eval_shape(lambda carry: step(carry, part(jnp.int32(0))[1])[1], carry)
    made = jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), shapes)
    return jax.lax.fori_loop(0, parts, one, (carry, made))


def _scan_rows(step, carry: Any, rows: Any, *, size: int) -> tuple[Any, Any]:
    count = jax.tree.leaves(rows)[0].shape[0]
    if size >= count:
        return step(carry, rows)
    carry, made = jax.lax.scan(step, carry, split_rows(rows, size))
    return carry, jax.tree.map(lambda x: x.reshape(count, -1), made)


def fill(lengths: jax.Array, *, tokens: int, rows: int) -> jax.Array:
    """i32[B], the part of each sequence: the longest first, each to the first part with room.

    First-fit decreasing needs at most 11 parts for every 9 of the best filling (Johnson 1973), and
    the parts are numbered 0, 1, ... without a gap.
    """
    count = lengths.shape[0]

    def one(state: tuple[jax.Array, jax.Array], length: jax.Array):
        held, number = state
        fits = (held + length <= tokens) & (number < rows)
        part = jnp.argmax(fits)
        return (held.at[part].add(length), number.at[part].add(1)), part

    order = jnp.argsort(-lengths, stable=True)
    empty = jnp.zeros((count,), jnp.int32)
    _, parts = jax.lax.scan(one, (empty, empty), lengths[order].astype(jnp.int32))
    return jnp.zeros((count,), jnp.int32).at[order].set(parts.astype(jnp.int32))


def deal(lengths: jax.Array, shares: int) -> jax.Array:
    """i32[B], an order of the rows whose equal `shares` have about as many tokens each.

    Rows are dealt by length, there and back: 1, 2, 3, 3, 2, 1, ...
    """
    order = jnp.argsort(-lengths, stable=True)
    dealt = order.reshape(-1, shares)
    back = (jnp.arange(dealt.shape[0]) % 2 == 1)[:, None]
    return jnp.where(back, dealt[:, ::-1], dealt).T.reshape(-1)


def whole_lengths(rollout: Rollout) -> jax.Array:
    """i32[B], tokens of the sequences, prompts included."""
    return rollout.prompt_lengths + rollout.lengths


def rollout_without(rollout: Rollout, there: jax.Array) -> Rollout:
    """The rollout, of which the rows that are False in bool[B] have no token."""
    return replace(rollout, lengths=jnp.where(there, rollout.lengths, 0))


def experience_without(batch: Experience, there: jax.Array) -> Experience:
    """The same of experience."""
    return replace(
        batch,
        rollout=rollout_without(batch.rollout, there),
        mask=batch.mask & there[:, None],
        kept=batch.kept & there[:, None],
    )


def cut_rollout(rollout: Rollout, width: int) -> Rollout:
    """A rollout whose responses are at most `width` tokens, without the padding beyond."""
    wide = ("responses", "log_probs", "drawn_log_probs", "hidden", "supports", "drawn")
    cut = {name: getattr(rollout, name) for name in wide}
    cut = {name: None if x is None else x[:, :width] for name, x in cut.items()}
    if rollout.routes is not None:  # by position, the prompt's first
        cut["routes"] = rollout.routes[:, : rollout.prompts.shape[1] + width]
    return replace(rollout, **cut)
