"""Slots that decode a queue of sequences, and the pages that their keys and values may lie in.

Everything here moves values and computes none: it decides which sequence is decoded where and when,
which cannot be seen in a sequence's bits.

With pages, the cache's memory follows the tokens in use, not slots times the longest response. The
keys and values of a layer lie in a pool of pages of `kv_block` positions, the very blocks that
attention reads. A slot's table names its pages in the order of positions. Pages that a prompt fills
are shared by its samples; the page that it fills in part is copied for each of them; all further
pages come from the free ones, shortly before they are needed. Where these do not suffice, the slots
with the latest sequences of the queue give theirs back and their sequences wait again. A sequence
that starts anew draws the same tokens, so this costs time and changes no bit.

N: sequences of a rollout, S: slots, R: longest response, P: prompts, Tp: padded prompt length,
n: pages of the longest sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import struct

from tim_jax import kernels
from tim_jax.common.errors import InputError
from tim_jax.kernels import tiles
from tim_jax.model.attention import Cache, LayerCache
from tim_jax.numerics import Numerics


@struct.dataclass
class Tables:
    """Which pages the slots have."""

    pages: jax.Array  # i32[S, n], numbers of pages; the sink where there is none
    held: jax.Array  # i32[S], how many of a slot's pages it has, those of its prompt included
    shared: jax.Array  # i32[S], how many of them are its prompt's


@dataclass(frozen=True)
class Pool:
    """The pages of a layer: those of the prompts, free ones, one of zeros, and a sink.

    The sink takes what slots without a sequence write.
    """

    prompts: int  # pages of all prompts
    width: int  # pages of one prompt, filled or not
    free: int
    block: int  # positions of a page

    @property
    def zeros(self) -> int:
        """The page that stays zero."""
        return self.prompts + self.free

    @property
    def sink(self) -> int:
        """The page that nobody reads from for a sequence."""
        return self.zeros + 1

    def check(self, longest: int) -> None:
        """Raises InputError if one sequence of `longest` positions does not fit."""
        needed = -(-longest // self.block)
        if self.free < needed:
            raise InputError(
                f"sampler: pages = {self.free} on each device do not hold the longest sequence of"
                f" {longest} tokens; it needs {needed} pages of {self.block} (numerics.kv_block)"
            )

    def filled(self, prompts: LayerCache) -> Cache:
        """The pools of all layers, with the prompts [P / k, L, k, ...] in their pages."""

        def paged(x: jax.Array, axis: int) -> jax.Array:
            x = x.reshape(-1, *x.shape[2:])
            missing = self.width * self.block - x.shape[axis]
            x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(4)])
            x = x.reshape(*x.shape[:axis], self.width, self.block, *x.shape[axis + 1 :])
            x = jnp.moveaxis(x, axis, 1)
            x = x.reshape(-1, *x.shape[2:])
            return jnp.pad(x, [(0, self.free + 2), (0, 0), (0, 0), (0, 0)])

        return tuple(
            LayerCache(key=paged(prompts.key[:, i], 3), value=paged(prompts.value[:, i], 2))
            for i in range(prompts.key.shape[1])
        )

    def empty(self, slots: int, longest: int) -> Tables:
        """Tables of slots without a sequence."""
        none = jnp.zeros((slots,), jnp.int32)
        pages = jnp.full((slots, -(-longest // self.block)), self.sink, jnp.int32)
        return Tables(pages=pages, held=none, shared=none)


def _holding(tables: Tables, slots: jax.Array, pages: jax.Array | int, count) -> Tables:
    """The tables after the slots that are True in bool[S] hold these pages alone.

    The first `count` are pages, all of a prompt. With the sink and 0 the slots give theirs back.
    """
    return Tables(
        pages=jnp.where(slots[:, None], pages, tables.pages),
        held=jnp.where(slots, count, tables.held),
        shared=jnp.where(slots, count, tables.shared),
    )


def slots_that_fit(tables: Tables, needed: jax.Array, age: jax.Array, pool: Pool) -> jax.Array:
    """bool[S], the slots whose pages are there: the oldest first, as long as there are enough.

    Args:
      needed: i32[S], pages that each slot must have; 0 for one without a sequence.
      age: i32[S], smaller for older.
    """
    own = jnp.maximum(needed - tables.shared, 0)
    order = jnp.argsort(age, stable=True)
    sums = jnp.zeros_like(own).at[order].set(jnp.cumsum(own[order]))
    return sums <= pool.free


def provide_pages(
    cache: Cache, tables: Tables, needed: jax.Array, prompts: jax.Array, pool: Pool
) -> tuple[Cache, Tables]:
    """Gives every slot the pages up to `needed` i32[S], which must be free.

    A new page is a copy of its prompt's last page, if that is filled in part, or of zeros: a number
    that is not finite would reach another sequence through a product with zero.
    """
    count = tables.pages.shape[1]
    index = jnp.arange(count)[None, :]
    wanted = ((index >= tables.held[:, None]) & (index < needed[:, None])).reshape(-1)
    own = (index >= tables.shared[:, None]) & (index < tables.held[:, None])
    used = jnp.zeros((pool.free,), bool)
    used = used.at[jnp.where(own, tables.pages - pool.prompts, pool.free)].set(True, mode="drop")
    free = pool.prompts + jnp.argsort(used, stable=True).astype(jnp.int32)
    rank = jnp.cumsum(wanted.astype(jnp.int32)) - 1
    pages = jnp.where(wanted, free[jnp.clip(rank, 0, pool.free - 1)], tables.pages.reshape(-1))
    from_prompt = (index == tables.shared[:, None]) & (index < pool.width)
    source = jnp.where(from_prompt, prompts[:, None] * pool.width + index, pool.zeros)
    (new,) = jnp.nonzero(wanted, size=pool.free, fill_value=0)

    def move(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = new[number]
        return source.reshape(-1)[at], pages[at]

    cache = copy_pages(cache, move, jnp.sum(wanted, dtype=jnp.int32))
    pages = pages.reshape(tables.pages.shape)
    return cache, replace(tables, pages=pages, held=jnp.maximum(tables.held, needed))


def copy_pages(
    cache: Cache, move: Callable[[jax.Array], tuple[jax.Array, jax.Array]], count: jax.Array
) -> Cache:
    """The cache after `count` i32[] copies of pages: `move` of each number is (source, target)."""

    def one(number: jax.Array, cache: Cache) -> Cache:
        start, end = move(number)

        def put(x: jax.Array) -> jax.Array:
            page = jax.lax.dynamic_slice_in_dim(x, start, 1)
            return jax.lax.dynamic_update_slice_in_dim(x, page, end, axis=0)

        return jax.tree.map(put, cache)

    return jax.lax.fori_loop(0, count, one, cache)


@struct.dataclass
class Results:
    """What has been drawn for all sequences; zeros where nothing has."""

    tokens: jax.Array  # i32[N, R]
    log_probs: jax.Array  # f32[N, R]
    lengths: jax.Array  # i32[N]
    ended: jax.Array  # bool[N], drew a stop token
    drawn: jax.Array | None  # f32[N, R], log-probs drawn with, if others are recorded
    routes: jax.Array | None  # [N, Tp + R, L, k], experts by position, if they are recorded


@struct.dataclass
class Queue:
    """The sequences that go on after their first token, in the order in which slots take them."""

    order: jax.Array  # i32[N]; the first ones wait, see `waiting`
    waiting: jax.Array  # bool[N], by place in `order`
    prompt_lengths: jax.Array  # i32[N]
    prompts: LayerCache  # of the prompts, in chunks of k: [P / k, layers, k, ...]
    samples: int = struct.field(pytree_node=False)  # sequences of a prompt, one after the other
    longest: int = struct.field(pytree_node=False)  # R
    pool: Pool | None = struct.field(pytree_node=False)  # None: a slot has room for the longest


@struct.dataclass
class Slots:
    """Sequences that are being decoded. A slot that does not work keeps its last one."""

    cache: Cache  # of all tokens but the newest; with a pool, its pages
    tables: Tables | None  # with a pool
    sequences: jax.Array  # i32[S]
    places: jax.Array  # i32[S], of the sequences in the queue
    newest: jax.Array  # i32[S], the last token
    lengths: jax.Array  # i32[S], response tokens drawn
    working: jax.Array  # bool[S], has not drawn its last token
    ended: jax.Array  # bool[S], drew a stop token


def empty(queue: Queue, count: int, *, numerics: Numerics) -> Slots:
    """Idle slots, with a cache as attention by `numerics` reads it.

    Raises:
      InputError: the pool does not hold one sequence.
    """
    # The last token that is drawn needs no place.
    longest = queue.prompts.key.shape[5] + queue.longest - 1
    if queue.pool is None:
        blocks = -(-longest // numerics.kv_block)
        cache, tables = _rows(queue.prompts, count, blocks, numerics), None
    else:
        queue.pool.check(longest)
        cache, tables = queue.pool.filled(queue.prompts), queue.pool.empty(count, longest)
    none = jnp.zeros((count,), jnp.int32)
    return Slots(
        cache=cache,
        tables=tables,
        sequences=none,
        places=none,
        newest=none,
        lengths=none,
        working=jnp.zeros((count,), bool),
        ended=jnp.zeros((count,), bool),
    )


def _rows(prompts: LayerCache, count: int, blocks: int, numerics: Numerics) -> Cache:
    """An empty cache with room for some blocks of positions in every slot."""
    _, layers, _, heads, size, _ = prompts.key.shape
    width, dtypes = prompts.value.shape[-1], (prompts.key.dtype, prompts.value.dtype)
    lead, span = (count, heads), blocks * numerics.kv_block
    if kernels.in_blocks(numerics):
        lead, span = (count, blocks, heads), numerics.kv_block
    shapes = (*lead, size, span), (*lead, span, width)
    return tuple(LayerCache(*map(jnp.zeros, shapes, dtypes)) for _ in range(layers))


def refill(
    slots: Slots, waiting: jax.Array, queue: Queue, results: Results, *, steps: int
) -> tuple[Slots, jax.Array]:
    """Gives the next sequences of the queue to the slots that do not work.

    With a pool, every working slot then has the pages for `steps` more tokens; slots for which
    there are none no longer work, and their sequences wait again.

    Args:
      waiting: bool[N], the places of the queue whose sequences wait.
      results: has the first token of every sequence.

    Returns:
      The slots, and which places of the queue wait now.
    """
    count, nowhere = slots.working.shape[0], waiting.shape[0]
    idle = ~slots.working
    (next_places,) = jnp.nonzero(waiting, size=count, fill_value=nowhere)
    rank = jnp.cumsum(idle.astype(jnp.int32)) - 1
    places = next_places.astype(jnp.int32)[jnp.maximum(rank, 0)]
    takes = idle & (places < nowhere)
    sequences = queue.order[jnp.minimum(places, nowhere - 1)]
    sequences = jnp.where(takes, sequences, slots.sequences)
    slots = replace(
        slots,
        sequences=sequences,
        places=jnp.where(takes, places, slots.places),
        newest=jnp.where(takes, results.tokens[sequences, 0], slots.newest),
        lengths=jnp.where(takes, 1, slots.lengths),
        working=slots.working | takes,
        ended=slots.ended & ~takes,
    )
    waiting = waiting.at[jnp.where(takes, places, nowhere)].set(False, mode="drop")
    if slots.tables is None or queue.pool is None:
        return replace(slots, cache=with_prompts(slots.cache, takes, sequences, queue)), waiting
    return _with_pages(slots, waiting, queue, queue.pool, idle, takes, steps)


def _with_pages(slots: Slots, waiting, queue: Queue, pool: Pool, idle, takes, steps: int):
    """Slots that have the pages for `steps` more tokens, and the places that wait now."""
    assert slots.tables is not None
    prompts = slots.sequences // queue.samples
    starts = queue.prompt_lengths[slots.sequences]
    tables = _holding(slots.tables, idle, pool.sink, 0)
    index, full = jnp.arange(tables.pages.shape[1])[None, :], starts // pool.block
    of_prompt = jnp.where(index < full[:, None], prompts[:, None] * pool.width + index, pool.sink)
    tables = _holding(tables, takes, of_prompt, full)
    tokens = jnp.minimum(starts + slots.lengths - 1 + steps, starts + queue.longest - 1)
    needed = jnp.where(slots.working, -(-tokens // pool.block), 0)
    fits = slots_that_fit(tables, needed, slots.places, pool)
    stopped = slots.working & ~fits
    waiting = waiting.at[jnp.where(stopped, slots.places, waiting.shape[0])].set(True, mode="drop")
    tables = _holding(tables, stopped, pool.sink, 0)
    needed = jnp.where(fits, needed, 0)
    cache, tables = provide_pages(slots.cache, tables, needed, prompts, pool)
    return replace(slots, cache=cache, tables=tables, working=slots.working & fits), waiting


def with_prompts(cache: Cache, takes: jax.Array, sequences: jax.Array, queue: Queue) -> Cache:
    """Copies the prompts' keys and values into the slots that take a sequence, one by one.

    What was behind them is cleared: a number that is not finite would reach the next sequence
    through a product with zero.
    """
    slots_first = jnp.argsort(~takes, stable=True)
    chunk = queue.prompts.key.shape[2]

    def one(index: jax.Array, cache: Cache) -> Cache:
        slot = slots_first[index]
        prompt = sequences[slot] // queue.samples

        def of_prompt(prompts: jax.Array, layer: int) -> jax.Array:
            at = (prompt // chunk, layer, prompt % chunk, 0, 0, 0)
            return jax.lax.dynamic_slice(prompts, at, (1, 1, 1, *prompts.shape[3:]))[0, 0]

        def put(old: jax.Array, row: jax.Array) -> jax.Array:
            pairs = zip(old.shape[1:], row.shape[1:], strict=True)
            row = jnp.pad(row, [(0, 0), *((0, whole - part) for whole, part in pairs)])
            return jax.lax.dynamic_update_slice(old, row, (slot, *(0,) * (old.ndim - 1)))

        layers = []
        for number, old in enumerate(cache):
            key, value = (of_prompt(x, number) for x in (queue.prompts.key, queue.prompts.value))
            if old.key.ndim == 5:
                key, value = tiles.in_blocks(key, value, old.key.shape[-1])
            layers.append(LayerCache(key=put(old.key, key), value=put(old.value, value)))
        return tuple(layers)

    return jax.lax.fori_loop(0, jnp.sum(takes, dtype=jnp.int32), one, cache)


def readable_cache(slots: Slots) -> Cache:
    """The cache as the forward takes it."""
    if slots.tables is None:
        return slots.cache
    return tuple(replace(layer, pages=slots.tables.pages) for layer in slots.cache)


def advance(
    slots: Slots, cache: Cache, tokens: jax.Array, stops: jax.Array, limit: int | jax.Array
) -> Slots:
    """The slots after a step that drew `tokens` i32[S]; `stops` i32[n] end a response."""
    lengths = slots.lengths + slots.working.astype(jnp.int32)
    ended = slots.working & jnp.any(tokens[:, None] == stops[None, :], axis=1)
    return replace(
        slots,
        cache=tuple(replace(layer, pages=None) for layer in cache),
        newest=jnp.where(slots.working, tokens, slots.newest),
        lengths=lengths,
        working=slots.working & ~ended & (lengths < limit),
        ended=slots.ended | ended,
    )


def store(
    results: Results,
    before: Slots,
    after: Slots,
    *,
    tokens: jax.Array,
    log_probs: jax.Array,
    drawn: jax.Array | None,
    routes: jax.Array | None,
    starts: jax.Array,
) -> Results:
    """Results with what the slots drew in some steps: `tokens` i32[steps, S] and their log-probs.

    A slot that stops working before the last step draws nothing more. `routes` [steps, S, L, k] are
    the experts of the token before each; `starts` i32[S] are lengths of prompts.
    """
    nowhere = results.lengths.shape[0]
    step = jnp.arange(tokens.shape[0])[:, None]
    inside = step < (after.lengths - before.lengths)[None, :]
    rows = jnp.where(inside, before.sequences[None, :], nowhere)
    at = rows, before.lengths[None, :] + step
    own = jnp.where(before.working, before.sequences, nowhere)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[at].set(new, mode="drop")

    if results.routes is not None and routes is not None:
        before_it = rows, starts[None, :] + at[1] - 1
        routes = results.routes.at[before_it].set(routes, mode="drop")

    return Results(
        tokens=put(results.tokens, tokens),
        log_probs=put(results.log_probs, log_probs),
        lengths=results.lengths.at[own].set(after.lengths, mode="drop"),
        ended=results.ended.at[own].set(after.ended, mode="drop"),
        drawn=None if results.drawn is None or drawn is None else put(results.drawn, drawn),
        routes=routes,
    )


def narrow(slots: Slots, count: int) -> Slots:
    """`count` of the slots, among them all that work; no more than that may be working."""
    kept = jnp.argsort(~slots.working, stable=True)[:count]
    if slots.tables is None:
        return jax.tree.map(lambda x: x[kept], slots)
    rest = jax.tree.map(lambda x: x[kept], replace(slots, cache=()))
    return replace(rest, cache=slots.cache)
