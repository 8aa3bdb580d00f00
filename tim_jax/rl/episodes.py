"""A step's episodes: the host says who decodes when, keeps what was drawn, and asks environments.

An episode is one row of tokens that is only appended to: what the policy drew, and what its
environment replied. While some rows decode, others wait for their replies. A row that waits keeps
its keys and values and no slot. Without pages there is a slot for every row. With pages a slot is
nothing but a place in a batch: any rows that have pages for their next tokens can go on, the first
ones first. Where pages do not suffice, the last rows give theirs back, and what they had is
computed once more later. None of this changes a bit.

An environment may say all that the next turn is drawn after, in place of a reply (`Outcome.anew`).
Then the episode goes on in a new row, under other random numbers. The row before it is as it was.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import kernels
from tim_jax.common.errors import InputError
from tim_jax.common.types import Names, Prompts, Rollout
from tim_jax.mismatch import Mismatch, dial
from tim_jax.model.attention import Cache
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution, jit
from tim_jax.policy import turns as turning
from tim_jax.policy.sampler import STEPS, widths
from tim_jax.policy.slots import Pool
from tim_jax.policy.turns import Chunks, First, Found, Turning, Work
from tim_jax.rl.rules import Turns
from tim_jax.tasks.episodes import Asker, Completion, Environment, Outcome, Turn

_POSITIONS, _TOGETHER, _CHUNKS = 32, 4, 8  # of a chunk, sequences of one, chunks of a call
_COPIES = 64  # of pages, in a call
# Of `_Books`, what a row of a rollout is made of.
_OF_ROWS = "starts", "sequences", "lengths", "log_probs", "drawn_with", "drawn", "rewards", "ended"


class Programs(NamedTuple):
    """The compiled programs of episodes, and what they were compiled for.

    Shapes depend on the batch alone: neither turns nor lengths compile anything.
    """

    begin: Callable[..., Any]  # weights, prompts, key -> weights, cache, keys, first tokens
    copy: Callable[..., Cache]  # see turns.copy_pages
    extend: Callable[..., Cache]  # see Turning.extend
    decode: Callable[..., tuple[Cache, Found]]  # see Turning.decode
    report: Callable[..., Rollout]  # rollout, prompts, key -> as it is reported to the learner

    execution: Execution
    turns: Turns
    samples: int
    batching: Batching

    @property
    def paged(self) -> bool:
        """Whether sequences have tables of pages, and slots are but places in a batch."""
        batching = self.batching
        wanted = batching.slots or batching.pages or batching.halvings
        return bool(wanted) or kernels.family(self.execution.numerics).takes_pages

    def pool(self, prompts: int, length: int) -> Pool | None:
        """The pages for this many prompts, padded to `length` tokens; None: rows."""
        if not self.paged:
            return None
        block = self.execution.numerics.kv_block
        longest = -(-(length + self.execution.sampling.max_tokens) // block)
        width = -(-length // block)
        free = self.batching.pages or prompts * self.samples * longest
        return Pool(prompts * width, width, free, block)


def build(
    execution: Execution,
    *,
    turns: Turns,
    samples: int,
    batching: Batching = ALL_AT_ONCE,
    mismatch: Mismatch = dial.EXACT,
) -> Programs:
    """Programs for episodes with `samples` of each prompt; `execution` is the learner's.

    Raises:
      InputError: an entry that this sampler cannot have, or two that contradict each other.
    """
    dial.check(mismatch, execution)
    other = replace(execution, numerics=mismatch.numerics(execution.numerics))

    reports = any(entry.reports for entry in mismatch.active)
    sampler = Turning(other, partial(dial.drawing, mismatch, execution=other), reports)
    report = partial(dial.report, mismatch=mismatch, samples=samples)

    def begin(weights, prompts: Prompts, key, *, pool: Pool | None):
        names = Names.of(prompts, key, samples)
        at_a_time = batching.slots or len(names.prompts)
        begun = sampler.begin(
            mismatch.weights(weights), prompts, names, at_a_time=at_a_time, pool=pool
        )
        return *begun, turning.turn_keys(names, turns.max_turns)

    compiled = partial(jit, numerics=other.numerics)
    return Programs(
        begin=compiled(begin, static_argnames="pool"),
        copy=compiled(turning.copy_pages, donate_argnums=0),
        extend=compiled(sampler.extend, donate_argnums=1),
        decode=compiled(sampler.decode, donate_argnums=1),
        report=compiled(report),
        execution=other,
        turns=turns,
        samples=samples,
        batching=batching,
    )


class Played(NamedTuple):
    """Episodes, N of them; number p * samples + s is sample s of prompt p."""

    rollout: Rollout  # of B rows: N times its `parts`
    rewards: np.ndarray  # f32[N], the sum over each one's turns
    turn_rewards: np.ndarray  # f32[B, R], each turn's at its last token
    failed: np.ndarray  # bool[N], the environment failed
    metrics: dict[str, float]
    seconds: float  # that devices stood still for the environment


def play(
    weights: Any,
    prompts: Prompts,
    key: jax.Array,
    *,
    programs: Programs,
    environment: Environment,
    states: Sequence[Any],
    text: Callable[[list[int]], str],
    asked: Sequence[Any] | None = None,
) -> Played:
    """Plays the episodes of a step to their ends.

    An episode ends when its environment says so or fails, after `turns.max_turns` turns, or where
    the longest response leaves no room for the reply and a token after it. The reply is then left
    out. The longest response is that of a row, if an episode has several.

    Args:
      states: of the environment, one for each prompt; every sample has a copy.
      text: tokens of a turn, without the end token -> its text.
      asked: the prompts as text or messages, for an environment that renders them anew.

    Raises:
      InputError: pages that do not hold one episode, or a reply that is no tokens of the model.
    """
    pool = programs.pool(*prompts.tokens.shape)
    weights, cache, first, keys = programs.begin(weights, prompts, key, pool=pool)
    books = _Books.of(prompts, states, programs, first, np.asarray(keys), asked)
    held = _Pages(books, pool, cache)
    most = min(programs.batching.slots or books.count, books.count)
    names = Names.of(prompts, key, programs.samples)
    rows = np.flatnonzero(books.ready)
    with Asker(environment) as asker:
        while not books.over.all():
            asker.ask(books.ended_turns(text))
            books.take(asker.replies(least=not rows.size))
            held.free_over(books)
            rows = held.provide(books, most)
            if not rows.size:  # all wait for replies, or for the pages of those that do
                continue
            cache = held.copied(cache, programs)
            cache = _extended(cache, weights, rows, books, held, programs)
            work = books.work(rows, held, _width(len(rows), books.count, programs))
            until = np.int32(3 * len(rows) // 4)
            cache, found = programs.decode(weights, cache, books.named(names), work, until)
            books.take(asker.replies(waited_for=False))  # devices decode meanwhile
            books.record(work, jax.device_get(found))
    rollout = programs.report(books.rollout(prompts), prompts, key)
    return Played(rollout, *books.results(), asker.seconds)


def _width(rows: int, count: int, programs: Programs) -> int:
    """The fewest slots that are compiled for and hold this many rows."""
    slots = min(programs.batching.slots or count, count)
    narrower = widths(slots, programs.batching.halvings)
    return min(width for width in (slots, *narrower) if width >= rows)


def _extended(cache, weights, rows, books: "_Books", held: "_Pages", programs: Programs) -> Cache:
    """The cache with all tokens of these rows but the newest."""
    pieces = books.pieces(rows)
    together = min(_TOGETHER, books.count)
    for start in range(0, len(pieces), _CHUNKS):
        some = pieces[start : start + _CHUNKS]
        shape = _CHUNKS, together, _POSITIONS
        tokens, positions = np.zeros(shape, np.int32), np.full(shape, books.dump, np.int32)
        pages = np.tile(held.nowhere, (*shape[:2], 1))
        for number, chunk in enumerate(some):
            for place, (row, where) in enumerate(chunk):
                at = number, place
                tokens[(*at, slice(len(where)))] = books.sequences[row, where]
                positions[(*at, slice(len(where)))] = where
                pages[at] = held.tables[row]
        chunks = Chunks(tokens, positions, pages, np.int32(len(some)))  # type: ignore[arg-type]
        cache = programs.extend(weights, cache, chunks)
    return cache


@dataclass(eq=False)
class _Books:
    """What is known of every episode. N rows, R tokens at most after the prompt, T turns."""

    samples: int  # of each prompt
    most: Turns
    room: int  # R
    starts: np.ndarray  # i32[N], lengths of the prompts
    sequences: np.ndarray  # i32[N, Tp + R], by position: each prompt, then what follows it
    states: list[Any]
    keys: np.ndarray  # u32[N, T, 2]
    vocabulary: int
    log_probs: np.ndarray  # f32[N, R]
    drawn_with: np.ndarray | None  # f32[N, R]
    drawn: np.ndarray  # bool[N, R]
    rewards: np.ndarray  # f32[N, R], of turns, at their last tokens
    lengths: np.ndarray  # i32[N], tokens after the prompt
    began: np.ndarray  # i32[N], lengths at which the turns began
    limits: np.ndarray  # i32[N], lengths at which the turns are cut
    turn: np.ndarray  # i32[N], its number
    ended: np.ndarray  # bool[N], the last turn drew its end token
    ready: np.ndarray  # bool[N], can go on
    over: np.ndarray  # bool[N]
    fits: np.ndarray  # bool[N], no reply was left out for want of room
    failed: np.ndarray  # bool[N], the environment failed
    cached: np.ndarray  # i32[N], positions whose keys and values are there
    shared: np.ndarray  # i32[N], of them those that the prompt has for all its samples
    asked_first: list[Any]  # what each episode's prompt is, if it is known
    before: list[list[dict[str, Any]]]  # of each episode its rows before this one, `_OF_ROWS`
    extended: int = 0  # positions computed in chunks
    asked: list[int] = field(default_factory=list)  # rows whose turns have ended just now

    @classmethod
    def of(
        cls, prompts: Prompts, states: Sequence[Any], programs: Programs, first: First, keys, asked
    ) -> "_Books":
        """After the first token of each."""
        tokens, starts = (np.asarray(x) for x in (prompts.tokens, prompts.lengths))
        samples, room = programs.samples, programs.execution.sampling.max_tokens
        count = len(starts) * samples
        starts = np.repeat(starts, samples).astype(np.int32)
        sequences = np.pad(np.repeat(tokens, samples, axis=0), ((0, 0), (0, room)))
        wide = partial(np.zeros, (count, room))
        none = np.zeros(count, np.int32)
        books = cls(
            samples=samples,
            most=programs.turns,
            room=room,
            starts=starts,
            sequences=sequences.astype(np.int32),
            states=[copy.deepcopy(state) for state in states for _ in range(samples)],
            keys=keys,
            vocabulary=programs.execution.config.vocab_size,
            log_probs=wide(np.float32),
            drawn_with=None if first.drawn is None else wide(np.float32),
            drawn=wide(bool),
            rewards=wide(np.float32),
            lengths=none.copy(),
            began=none.copy(),
            limits=np.full(count, min(programs.turns.max_tokens, room), np.int32),
            turn=none.copy(),
            ended=np.zeros(count, bool),
            ready=np.ones(count, bool),
            over=np.zeros(count, bool),
            fits=np.ones(count, bool),
            failed=np.zeros(count, bool),
            cached=starts.copy(),
            shared=starts.copy(),
            asked_first=[x for x in asked or [None] * len(states) for _ in range(samples)],
            before=[[] for _ in range(count)],
        )
        first = jax.device_get(first)
        drawn_with = first.log_probs if first.drawn is None else first.drawn
        for row in range(count):
            one = slice(row, row + 1)
            drew = first.tokens[one], first.log_probs[one], drawn_with[one]
            books._append(row, *drew, ended=bool(first.ended[row]))
        return books

    @property
    def count(self) -> int:
        return len(self.starts)

    @property
    def dump(self) -> int:
        """A position that is never read: the last token of the longest episode has it."""
        return self.sequences.shape[1] - 1

    def named(self, names: Names) -> Names:
        """What names the random numbers of the rows that the episodes are in now."""
        cuts = np.asarray([len(rows) for rows in self.before], np.int32)
        if not cuts.any():
            return names
        return names._replace(samples=names.samples + jnp.asarray(self.samples * cuts))

    @property
    def needed(self) -> np.ndarray:
        """i32[N], positions that a row must have places for, to draw as much as a call does."""
        return self.starts + np.minimum(self.lengths - 1 + STEPS, self.limits - 1)

    def pieces(self, rows: np.ndarray) -> list[list[tuple[int, np.ndarray]]]:
        """Chunks of (row, positions) that are to be computed before these rows can decode."""
        levels: list[list[tuple[int, np.ndarray]]] = []
        for row in rows.tolist():
            missing = np.arange(
                int(self.cached[row]), int(self.starts[row] + self.lengths[row]) - 1
            )
            for level, start in enumerate(range(0, len(missing), _POSITIONS)):
                levels += [[]] if level == len(levels) else []
                levels[level].append((row, missing[start : start + _POSITIONS]))
            self.extended += len(missing)
            self.cached[row] += len(missing)
        size = min(_TOGETHER, self.count)
        return [some[i : i + size] for some in levels for i in range(0, len(some), size)]

    def work(self, rows: np.ndarray, held: "_Pages", width: int) -> Work:
        """These rows in slots: with pages in the first ones, else each in its own."""
        slots = np.zeros(width, np.int32)
        working = np.zeros(width, bool)
        pages = None
        if held.pool is None:
            slots = np.arange(width, dtype=np.int32)
            working[rows] = True
        else:
            slots[: len(rows)] = rows
            working[: len(rows)] = True
            pages = np.where(working[:, None], held.tables[slots], held.nowhere)
        newest = self.sequences[slots, self.starts[slots] + self.lengths[slots] - 1]
        taken = (x[slots] for x in (self.lengths, self.starts, self.limits))
        return Work(slots, newest, *taken, working, pages)  # type: ignore[arg-type]

    def record(self, work: Work, found: Found) -> None:
        """Keeps what a call drew."""
        for slot in np.flatnonzero(work.working).tolist():
            row = int(work.rows[slot])
            drew = slice(int(found.lengths[slot] - self.lengths[row]))
            drawn_with = found.log_probs if found.drawn is None else found.drawn
            columns = (x[drew, slot] for x in (found.tokens, found.log_probs, drawn_with))
            self._append(row, *columns, ended=bool(found.ended[slot]))
            self.cached[row] = self.starts[row] + self.lengths[row] - 1

    def _append(self, row: int, tokens, log_probs, drawn_with, *, ended: bool) -> None:
        here = slice(self.lengths[row], self.lengths[row] + len(tokens))
        start = self.starts[row]
        self.sequences[row, start + here.start : start + here.stop] = tokens
        self.log_probs[row, here], self.drawn[row, here] = log_probs, True
        if self.drawn_with is not None:
            self.drawn_with[row, here] = drawn_with
        self.lengths[row] = here.stop
        if ended or here.stop >= self.limits[row]:
            self.ended[row], self.ready[row] = ended, False
            self.asked.append(row)

    def ended_turns(self, text: Callable[[list[int]], str]) -> list[tuple[int, Turn]]:
        """(row, turn) of those that have ended since the last call."""
        rows, self.asked = sorted(self.asked), []
        return [(row, self._turn(row, text)) for row in rows]

    def _turn(self, row: int, text: Callable[[list[int]], str]) -> Turn:
        start, number, ended = self.starts[row], int(self.turn[row]), bool(self.ended[row])
        here = slice(start + self.began[row], start + self.lengths[row])
        tokens = self.sequences[row, here].copy()
        said = tokens[:-1] if ended else tokens
        prompt, sample = divmod(row, self.samples)
        return Turn(
            prompt=prompt,
            sample=sample,
            turn=number,
            completion=Completion(text(said.tolist()), tokens, ended),
            state=self.states[row],
            key=self.keys[row, number],
            asked=self.asked_first[row],
        )

    def take(self, replies: Iterator[tuple[int, Outcome]]) -> None:
        """What environments say: a row goes on, or its episode is over."""
        for row, outcome in replies:
            self.states[row] = outcome.state
            self.rewards[row, self.lengths[row] - 1] = outcome.reward
            self.failed[row] = outcome.failure is not None
            self.turn[row] += 1
            if outcome.done or self.failed[row] or self.turn[row] == self.most.max_turns:
                self.over[row] = True
            elif outcome.anew is None:
                reply = _checked(outcome.tokens, self.vocabulary)
                if self._fits(row, self.lengths[row] + len(reply)):
                    start = self.starts[row] + self.lengths[row]
                    self.sequences[row, start : start + len(reply)] = reply
                    self._go_on(row, self.lengths[row] + len(reply))
            else:
                self._begin_row(row, _checked(outcome.anew, self.vocabulary))

    def _begin_row(self, row: int, tokens: np.ndarray) -> None:
        """Goes on in a new row, after these tokens. What it has in common with this one stays."""
        if not tokens.size:
            raise InputError("environment: a row that is begun anew must have a token")
        start = min(self.sequences.shape[1] - self.room, len(tokens))  # as much as a prompt has
        if not self._fits(row, len(tokens) - start):
            return
        columns = {name: getattr(self, name) for name in _OF_ROWS}
        self.before[row].append(
            {n: None if x is None else x[row].copy() for n, x in columns.items()}
        )
        same = self.sequences[row, : len(tokens)] == tokens
        # The newest token's keys and values are computed by the step that draws the next.
        common = min(int(np.argmin(same)) if not same.all() else len(tokens), len(tokens) - 1)
        self.cached[row], self.shared[row] = (
            min(x[row], common) for x in (self.cached, self.shared)
        )
        for name in ("log_probs", "drawn_with", "drawn", "rewards"):
            if (column := getattr(self, name)) is not None:
                column[row] = 0
        self.sequences[row, : len(tokens)], self.starts[row] = tokens, start
        self._go_on(row, len(tokens) - start)

    def _fits(self, row: int, length: int) -> bool:
        """Whether a row of this length has room for one more token; else its episode is over."""
        if length >= self.room:
            self.over[row], self.fits[row] = True, False
        return bool(self.fits[row])

    def _go_on(self, row: int, length: int) -> None:
        """Lets the policy have its next turn, after this many tokens."""
        self.lengths[row] = self.began[row] = length
        self.limits[row] = min(length + self.most.max_tokens, self.room)
        self.ready[row] = True

    @property
    def parts(self) -> int:
        """Rows of an episode in the rollout: a power of two, so that few shapes are compiled."""
        most = 1 + max(len(rows) for rows in self.before)
        return 1 << (most - 1).bit_length()

    def _rows(self) -> dict[str, Any]:
        """`_OF_ROWS` of all rows, [N * parts, ...]; an episode's rows stand together."""
        found, parts = {name: getattr(self, name) for name in _OF_ROWS}, self.parts
        for name, last in found.items():
            if parts == 1 or last is None:
                continue
            rows = np.zeros((self.count, parts, *last.shape[1:]), last.dtype)
            for number, before in enumerate(self.before):
                some = [row[name] for row in before]
                rows[number, : len(some) + 1] = [*some, last[number]]
            found[name] = rows.reshape(-1, *last.shape[1:])
        return found

    def rollout(self, prompts: Prompts) -> Rollout:
        """All episodes, as the learner takes them."""
        rows, parts = self._rows(), self.parts
        starts, sequences, lengths = (rows[name] for name in ("starts", "sequences", "lengths"))
        at = starts[:, None] + np.arange(self.room)[None, :]
        inside = np.arange(self.room)[None, :] < lengths[:, None]
        responses = np.where(inside, np.take_along_axis(sequences, at, axis=1), 0)
        asked = jnp.repeat(prompts.tokens, self.samples * parts, axis=0)
        if parts > 1:
            width = asked.shape[1]
            own = np.arange(width)[None, :] < starts[:, None]
            asked = jnp.asarray(np.where(own, sequences[:, :width], 0))
        finished = rows["ended"].reshape(-1, parts).copy()
        for number, before in enumerate(self.before):
            finished[number, len(before)] &= self.fits[number]
        return Rollout(
            prompts=asked,
            prompt_lengths=jnp.asarray(starts),
            responses=jnp.asarray(responses),
            lengths=jnp.asarray(lengths),
            log_probs=jnp.asarray(rows["log_probs"]),
            finished=jnp.asarray(finished.reshape(-1)),
            drawn_log_probs=None if self.drawn_with is None else jnp.asarray(rows["drawn_with"]),
            drawn=jnp.asarray(rows["drawn"]),
            parts=parts,
        )

    def results(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, float]]:
        """Rewards of episodes and of their turns, which episodes failed, and metrics."""
        rows = self._rows()
        drawn, tokens = rows["drawn"].sum(), rows["lengths"].sum()
        cuts = sum(len(before) for before in self.before)
        metrics = {
            "turns": float(self.turn.mean()),
            "episode_length": float(tokens / self.count),
            "reply_tokens": float(tokens - drawn),
            "extended_tokens": float(self.extended),
            "cuts": float(cuts),
            "rows": 1.0 + cuts / self.count,
        }
        rewards = rows["rewards"]
        of_episodes = rewards.reshape(self.count, -1).sum(axis=1, dtype=np.float32)
        return of_episodes, rewards, self.failed, metrics


def _checked(tokens: Any, vocabulary: int) -> np.ndarray:
    reply = np.asarray(tokens)
    if not reply.size:
        return np.zeros(0, np.int32)
    if reply.ndim != 1 or not np.issubdtype(reply.dtype, np.integer):
        raise InputError(f"environment: a reply must be i32[n] tokens, got {reply!r:.80}")
    if reply.min() < 0 or reply.max() >= vocabulary:
        raise InputError(
            f"environment: a reply has tokens from {reply.min()} to {reply.max()}; the model's are"
            f" 0 to {vocabulary - 1}"
        )
    return reply.astype(np.int32)


class _Pages:
    """Which pages the rows have. Without a pool, each has those of its row of the cache, always."""

    def __init__(self, books: _Books, pool: Pool | None, cache: Cache) -> None:
        count, key = books.count, cache[0].key
        self.pool, self._samples = pool, books.samples
        if pool is None:
            width = key.shape[1] if key.ndim == 5 else 1  # a row of one piece is one page
            self.tables = np.arange(count * width, dtype=np.int32).reshape(count, width)
            self.nowhere = self.tables[0]  # whose last place is never read
            return
        width = -(-books.sequences.shape[1] // pool.block)
        self.nowhere = np.full(width, pool.sink, np.int32)
        self.tables = np.tile(self.nowhere, (count, 1))
        self._held = np.zeros(count, np.int32)  # pages of each row, its prompt's among them
        self._of_prompt = np.zeros(count, np.int32)  # the latter, which nobody writes to
        self._free = list(range(pool.prompts, pool.zeros))[::-1]
        self._copies: list[tuple[int, int]] = []

    def provide(self, books: _Books, most: int) -> np.ndarray:
        """The rows that go on now, at most this many: those ready, with pages for a call."""
        ready = np.flatnonzero(books.ready)
        if self.pool is None:
            return ready
        chosen: list[int] = []
        needed = -(-books.needed // self.pool.block)
        for row in ready.tolist():
            if len(chosen) == most or not self._give(row, int(needed[row]), books):
                break
            chosen.append(row)
        return np.asarray(chosen, np.int32)

    def _give(self, row: int, needed: int, books: _Books) -> bool:
        """Gives a row pages up to `needed`, those of later rows if it must; False: too few."""
        assert self.pool is not None
        full = int(books.shared[row]) // self.pool.block  # shared with the prompt's other samples
        if full < self._of_prompt[row]:
            self._take_back(row, books)
        missing = needed - max(self._held[row], full)
        later = np.flatnonzero(self._held[row + 1 :])[::-1] + row + 1
        for victim in later.tolist():
            if missing <= len(self._free):
                break
            self._take_back(victim, books)
        if missing > len(self._free):
            return False
        of_prompt = row // self._samples * self.pool.width
        if not self._held[row]:
            self.tables[row, :full] = of_prompt + np.arange(full)
            self._held[row] = self._of_prompt[row] = full
        for index in range(self._held[row], needed):
            begun = index == full and books.shared[row] % self.pool.block
            page = self._free.pop()
            self._copies.append((of_prompt + full if begun else self.pool.zeros, page))
            self.tables[row, index] = page
        self._held[row] = max(needed, self._held[row])
        return True

    def _take_back(self, row: int, books: _Books) -> None:
        """Frees the pages of a row, whose keys and values but the prompt's are computed anew."""
        assert self.pool is not None
        own = self.tables[row, self._of_prompt[row] : self._held[row]]
        self._free += own.tolist()
        self.tables[row], self._held[row], self._of_prompt[row] = self.pool.sink, 0, 0
        books.cached[row] = books.shared[row]

    def free_over(self, books: _Books) -> None:
        """Frees the pages of episodes that are over."""
        if self.pool is not None:
            for row in np.flatnonzero(books.over & (self._held > 0)).tolist():
                self._take_back(row, books)

    def copied(self, cache: Cache, programs: Programs) -> Cache:
        """The cache with what new pages begin with: the prompt's last page, or zeros.

        A number that is not finite would reach another row through a product with zero.
        """
        if self.pool is None:
            return cache
        moves, self._copies = self._copies, []
        for start in range(0, len(moves), _COPIES):
            some = moves[start : start + _COPIES]
            ends = np.zeros((2, _COPIES), np.int32)
            ends[:, : len(some)] = np.asarray(some, np.int32).T
            cache = programs.copy(cache, *ends, np.int32(len(some)))
        return cache
