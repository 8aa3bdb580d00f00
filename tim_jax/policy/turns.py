"""Episodes of several turns: a sampler whose keys and values outlast its calls.

A single turn is one program (`sampler`). Between two turns an environment on the host has its say,
so here the same steps are cut into programs, and the cache goes into each and out again (donate
it). Which sequence is in which slot, and which pages are whose (`Pages`), the host says with each
call; it cannot be seen in a sequence's bits.

All keys and values that there are stay, so each position is computed once: that of the newest token
in the next step or chunk, whichever comes. Sequences have one row of the cache each, or tables of
pages (`slots.Pool`); `extend` sees rows as pages too.

N: sequences, S: slots, M: chunks of a call, E: sequences of a chunk, C: positions of a chunk, n:
pages of the longest sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from tim_jax.common.types import Names, Prompts
from tim_jax.model import transformer
from tim_jax.model.attention import Cache
from tim_jax.model.execution import Execution
from tim_jax.model.weights import Weights
from tim_jax.placement import collectives
from tim_jax.policy import sampler
from tim_jax.policy import slots as slotting
from tim_jax.policy.sampler import Decoding, Draw
from tim_jax.policy.slots import Pool, Queue, Slots, Tables

_COPIES = 64  # of pages, in a call


@struct.dataclass
class First:
    """What `begin` draws: a token of each of N sequences."""

    tokens: jax.Array  # i32[N]
    log_probs: jax.Array  # f32[N]
    ended: jax.Array  # bool[N]
    drawn: jax.Array | None  # f32[N], log-probs drawn with, if others are recorded


@struct.dataclass
class Chunks:
    """Tokens whose keys and values are to be computed. What fills a chunk up goes to one place of
    each sequence that is never read, its last."""

    tokens: jax.Array  # i32[M, E, C]
    positions: jax.Array  # i32[M, E, C]
    pages: jax.Array  # i32[M, E, n]; of a cache in rows, the row's blocks
    count: jax.Array  # i32[], chunks that hold something; the rest is not computed


@struct.dataclass
class Work:
    """What is in S slots. An idle one holds any sequence; what is computed for it is no use."""

    rows: jax.Array  # i32[S], sequences
    newest: jax.Array  # i32[S], their last tokens, whose keys and values are not there yet
    lengths: jax.Array  # i32[S], tokens after the prompts, the newest among them
    starts: jax.Array  # i32[S], lengths of the prompts
    limits: jax.Array  # i32[S], lengths at which the turns are cut
    working: jax.Array  # bool[S]
    pages: jax.Array | None  # i32[S, n]; None: slot s is row s of the cache


@struct.dataclass
class Found:
    """What the slots drew, up to `sampler.STEPS` tokens each."""

    tokens: jax.Array  # i32[S, STEPS]
    log_probs: jax.Array  # f32[S, STEPS]
    drawn: jax.Array | None  # f32[S, STEPS]
    lengths: jax.Array  # i32[S], after it
    ended: jax.Array  # bool[S], drew an end token


@dataclass(frozen=True)
class Turning:
    """The sampler of episodes: an execution, whose longest response is an episode, and a draw.

    With a placement of more than one device this runs inside `shard_map`, on this device's rows,
    slots and pages.
    """

    execution: Execution
    # Names -> a draw in place of `distribution.draw`, or None; of a sampler that differs on purpose
    drawing: Callable[[Names], Draw | None] | None = None
    reports: bool = False  # whether that draw records other log-probs than it draws with

    def begin(
        self, weights: Weights, prompts: Prompts, names: Names, *, at_a_time: int, pool: Pool | None
    ) -> tuple[Weights, Cache, First]:
        """Prefills prompts once each, `at_a_time` sequences together, and draws first tokens.

        Returns the weights as `extend` and `decode` take them too. Rows are prompts major. Without
        a `pool` every sequence has a row of the cache, with its prompt in it; else the prompts are
        in the pool's first pages.

        Raises:
          InputError: the pool does not hold one sequence.
        """
        count = names.prompts.shape[0]
        samples = count // prompts.tokens.shape[0]
        weights = sampler.whole_weights(weights, self.execution)
        one = replace(self.execution.sampling, max_tokens=1)
        decoding = self._decoding(names, replace(self.execution, sampling=one))
        of_prompts, drawn = decoding.prefill(weights, prompts, samples=samples, at_a_time=at_a_time)
        queue = Queue(
            order=jnp.arange(count, dtype=jnp.int32),
            waiting=jnp.ones((count,), bool),
            prompt_lengths=jnp.repeat(prompts.lengths, samples),
            prompts=of_prompts,
            samples=samples,
            longest=self.execution.sampling.max_tokens + 1,  # the last token's is never read
            pool=pool,
        )
        cache = slotting.empty(queue, count, numerics=self.execution.numerics).cache
        if pool is None:
            cache = slotting.with_prompts(cache, queue.waiting, queue.order, queue)
        of_token = None if drawn.drawn is None else drawn.drawn[:, 0]
        first = First(drawn.tokens[:, 0], drawn.log_probs[:, 0], drawn.ended, of_token)
        return sampler.by_layer(weights, self.execution), cache, first

    def extend(self, weights: Weights, cache: Cache, chunks: Chunks) -> Cache:
        """The cache with the keys and values of the chunks' tokens, one chunk after the other."""
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[-3:]), cache)
        execution, _ = sampler.in_loop(self.execution)

        def one(number: jax.Array, flat: Cache) -> Cache:
            of_chunk = partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False)
            arrays = chunks.tokens, chunks.positions, chunks.pages
            tokens, positions, pages = map(of_chunk, arrays)
            paged = tuple(replace(layer, pages=pages) for layer in flat)
            forward: Any = partial(transformer.forward, execution=execution)
            own = sampler.tied(weights, number, execution)
            _, after, _ = forward(own, tokens, positions, paged)
            return tuple(replace(layer, pages=None) for layer in after)

        flat = jax.lax.fori_loop(0, chunks.count, one, flat)
        return jax.tree.map(lambda x, old: x.reshape(old.shape), flat, cache)

    def decode(
        self, weights: Weights, cache: Cache, names: Names, work: Work, until: jax.Array
    ) -> tuple[Cache, Found]:
        """Draws until no more than `until` i32[] slots work, or `sampler.STEPS` tokens each.

        Devices that step together go on until that holds for each of them.
        """
        none = jnp.zeros_like(work.rows)
        slots = Slots(
            cache=cache,
            tables=None if work.pages is None else Tables(work.pages, none, none),
            sequences=work.rows,
            places=work.rows,
            newest=work.newest,
            lengths=work.lengths,
            working=work.working,
            ended=jnp.zeros_like(work.working),
        )
        decoding = self._decoding(names, self.execution)

        def going_on(now: sampler.Steps) -> jax.Array:
            busy = jnp.sum(now.slots.working) > until
            return (now.count < sampler.STEPS) & collectives.any_row(busy, decoding.rows)

        step = partial(decoding.step, weights, work.starts, decoding.uniforms(slots), work.limits)
        begin = sampler.begin_steps(slots, self.reports, None)
        end = jax.lax.while_loop(going_on, step, begin)
        after = end.slots
        drawn = None if end.drawn is None else end.drawn.T
        found = Found(end.tokens.T, end.log_probs.T, drawn, after.lengths, after.ended)
        return after.cache, found

    def _decoding(self, names: Names, execution: Execution) -> Decoding:
        draw = self.drawing and self.drawing(names)
        return Decoding.of(execution, names.streams, draw=draw)


def turn_keys(names: Names, turns: int) -> jax.Array:
    """u32[N, turns, 2], a key for the environment of each turn.

    The number it is folded with is no position's, so that no draw has it.
    """

    def of_sequence(stream: jax.Array) -> jax.Array:
        apart = jax.random.fold_in(stream, 2**31 - 1)
        keys = jax.vmap(partial(jax.random.fold_in, apart))(jnp.arange(turns))
        return jax.random.key_data(keys)

    return jax.vmap(of_sequence)(names.streams)


class Pages:
    """Which pages of their device the rows have. Without a pool, those of a row of the cache.

    Args:
      cache: of all devices.
      own: rows of each device.
      longest: positions of a row.
      cached: i32[N], positions of each row whose keys and values are there; who has them changes
        it, as this does where pages are taken back.
      shared: i32[N], of them those that it shares with the other samples of its prompt; likewise.
    """

    def __init__(
        self,
        pool: Pool | None,
        cache: Cache,
        *,
        own: int,
        longest: int,
        cached: np.ndarray,
        shared: np.ndarray,
    ) -> None:
        count, key = len(cached), cache[0].key
        self.pool, self._own, self._cached, self._shared = pool, own, cached, shared
        self._shards = count // own
        if pool is None:
            width = key.shape[2] if key.ndim == 6 else 1  # a row of one piece is one page
            rows = np.arange(own * width, dtype=np.int32).reshape(own, width)
            self.tables = np.tile(rows, (self._shards, 1))
            self.nowhere = self.tables[0]  # whose last place is never read
            return
        self._samples = own // (pool.prompts // pool.width)  # of a prompt, on a device
        self.nowhere = np.full(-(-longest // pool.block), pool.sink, np.int32)
        self.tables = np.tile(self.nowhere, (count, 1))
        self._held = np.zeros(count, np.int32)  # pages of each row, its prompt's among them
        self._of_prompt = np.zeros(count, np.int32)  # those of its prompt, never written to
        self._free = [list(range(pool.prompts, pool.zeros))[::-1] for _ in range(self._shards)]
        self._copies: list[list[tuple[int, int]]] = [[] for _ in range(self._shards)]

    def provide(self, ready: np.ndarray, needed: np.ndarray, most: int) -> list[np.ndarray]:
        """The rows of each device that go on now, at most this many: the ready ones, bool[N].

        They get pages for the positions `needed`, i32[N], the first ones first, if there are any.
        """
        rows = np.flatnonzero(ready)
        of_devices = [rows[rows // self._own == shard] for shard in range(self._shards)]
        if self.pool is None:
            return of_devices
        needed = -(-needed // self.pool.block)

        def gets_pages(row: int) -> bool:
            return self._give(row, int(needed[row]))

        chosen = [takewhile(gets_pages, own[:most].tolist()) for own in of_devices]
        return [np.asarray([*rows], np.int32) for rows in chosen]

    def _give(self, row: int, needed: int) -> bool:
        """Gives a row pages up to `needed`, those of later rows if it must; False: too few."""
        assert self.pool is not None
        device, local = divmod(row, self._own)
        free, end = self._free[device], (device + 1) * self._own
        full, part = divmod(int(self._shared[row]), self.pool.block)
        if full < self._of_prompt[row]:  # it goes on otherwise than its prompt now
            self._take_back(row)
        missing = needed - max(self._held[row], full)
        later = np.flatnonzero(self._held[row + 1 : end])[::-1] + row + 1
        for victim in later.tolist():
            if missing <= len(free):
                break
            self._take_back(victim)
        if missing > len(free):
            return False
        of_prompt = local // self._samples * self.pool.width
        if not self._held[row]:
            self.tables[row, :full] = of_prompt + np.arange(full)
            self._held[row] = self._of_prompt[row] = full
        for index in range(self._held[row], needed):
            begun = index == full and part
            page = free.pop()
            self._copies[device].append((of_prompt + full if begun else self.pool.zeros, page))
            self.tables[row, index] = page
        self._held[row] = max(needed, self._held[row])
        return True

    def _take_back(self, row: int) -> None:
        """Frees the pages of a row, whose keys and values but the prompt's are computed anew."""
        assert self.pool is not None
        own = self.tables[row, self._of_prompt[row] : self._held[row]]
        self._free[row // self._own] += own.tolist()
        self.tables[row], self._held[row], self._of_prompt[row] = self.pool.sink, 0, 0
        self._cached[row] = self._shared[row]

    def free(self, over: np.ndarray) -> None:
        """Frees the pages of rows that are over, bool[N]."""
        if self.pool is not None:
            for row in np.flatnonzero(over & (self._held > 0)).tolist():
                self._take_back(row)

    def copied(self, cache: Cache, copy: Callable[..., Cache]) -> Cache:
        """The cache with what new pages begin with: the prompt's last page, or zeros.

        `copy` is that of the mesh. A number that is not finite would reach another row through a
        product with zero.
        """
        if self.pool is None:
            return cache
        moves, self._copies = self._copies, [[] for _ in self._copies]
        most = max(map(len, moves))
        for start in range(0, most, _COPIES):
            ends = np.zeros((2, len(moves), _COPIES), np.int32)  # the rest: a page to itself
            for device, own in enumerate(moves):
                some = np.asarray(own[start : start + _COPIES], np.int32).reshape(-1, 2)
                ends[:, device, : len(some)] = some.T
            count = np.int32(min(_COPIES, most - start))
            cache = copy(cache, *ends.reshape(2, -1), count)
        return cache
