"""A step's episodes: the host says who decodes when, keeps what was drawn, and asks environments.

An episode is one row of tokens that is only appended to: what the policy drew, and what its
environment replied. While some rows decode, others wait for their replies. A row that waits keeps
its keys and values and no slot. Without pages there is a slot for every row. With pages a slot is
nothing but a place in a batch: any rows that have pages for their next tokens can go on, the first
ones first. Where pages do not suffice, the last rows give theirs back, and what they had is
computed once more later. On a mesh every device has rows, slots and pages of its own, and all are
called together. None of this changes a bit.

An environment may say all that the next turn is drawn after, in place of a reply (`Outcome.anew`).
Then the episode goes on in a new row, under other random numbers. The row before it is as it was.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tim_jax import kernels, placement
from tim_jax.common.errors import InputError
from tim_jax.common.types import Names, Prompts, Rollout
from tim_jax.mismatch import Mismatch, dial
from tim_jax.model.attention import Cache
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution, jit
from tim_jax.placement import Devices
from tim_jax.policy.sampler import STEPS, widths
from tim_jax.policy.slots import Pool
from tim_jax.policy.turns import Chunks, First, Found, Pages, Turning, Work
from tim_jax.rl import sharded
from tim_jax.rl.rules import Turns
from tim_jax.tasks.base import Completion, Environment, Outcome, Turn
from tim_jax.tasks.environments import Asker, SharedAsker

_POSITIONS, _TOGETHER, _CHUNKS = 32, 4, 8  # of a chunk, sequences of one, chunks of a call
# Of `_Books`, what a row of a rollout is made of.
_OF_ROWS = "starts", "sequences", "lengths", "log_probs", "drawn_with", "drawn", "rewards", "ended"


class Programs(NamedTuple):
    """The compiled programs of episodes. Neither turns nor lengths compile anything."""

    # See `sharded.TurningOnMesh`.
    begin: Callable[..., Any]
    copy: Callable[..., Cache]
    extend: Callable[..., Cache]
    decode: Callable[..., tuple[Cache, Found]]
    report: Callable[..., Rollout]  # rollout, prompts, key -> as it is reported to the learner

    execution: Execution
    turns: Turns
    samples: int
    batching: Batching  # of a device

    @property
    def paged(self) -> bool:
        """Whether sequences have tables of pages, and slots are but places in a batch."""
        batching = self.batching
        wanted = batching.slots or batching.pages or batching.halvings
        return bool(wanted) or kernels.family(self.execution.numerics).takes_pages

    def pool(self, prompts: int, length: int) -> Pool | None:
        """A device's pages, for this many prompts in all, padded to `length` tokens; None: rows."""
        if not self.paged:
            return None
        block, shards = self.execution.numerics.kv_block, self.execution.placement.shards
        longest = -(-(length + self.execution.sampling.max_tokens) // block)
        width = -(-length // block)
        blocks, _ = sharded.split(prompts, self.samples, shards)
        free = self.batching.pages or prompts * self.samples // shards * longest
        return Pool(prompts // blocks * width, width, free, block)

    def order(self, prompts: int) -> np.ndarray:
        """i64[shards, N / shards], the rows of each device, for this many prompts.

        Raises:
          InputError: the devices cannot have as many.
        """
        where, what = self.execution.placement, f"{prompts} prompts x {self.samples} samples"
        sharded.check_rows(prompts * self.samples, where, what)
        return sharded.rows_of_parts(prompts, self.samples, where.shards)


def build(
    execution: Execution,
    *,
    turns: Turns,
    samples: int,
    batching: Batching = ALL_AT_ONCE,
    devices: Devices | None = None,
    mismatch: Mismatch = dial.EXACT,
) -> Programs:
    """Programs for episodes with `samples` of each prompt, on a mesh of `devices`, all if None.

    `execution` is the learner's, with the sampler's placement; `batching` of all devices together.

    Raises:
      InputError: an entry that this sampler cannot have, or two that contradict each other; devices
        that cannot have as many slots and pages each.
    """
    dial.check(mismatch, execution)
    other = replace(execution, numerics=mismatch.numerics(execution.numerics))
    where = other.placement
    on = placement.mesh(where, jax.devices() if devices is None else devices)
    batching = batching.of_device(where)

    reports = any(entry.reports for entry in mismatch.active)
    drawing = partial(dial.drawing, mismatch, execution=other)
    sampler = sharded.TurningOnMesh(Turning(other, drawing, reports), on)
    report = partial(dial.report, mismatch=mismatch, samples=samples)

    def begin(weights, prompts: Prompts, names: Names, *, pool: Pool | None):
        how = {"at_a_time": batching.slots or len(names.prompts) // where.shards, "pool": pool}
        weights = mismatch.weights(weights)
        return sampler.begin(weights, prompts, names, max_turns=turns.max_turns, **how)

    compiled = partial(jit, numerics=other.numerics)
    return Programs(
        begin=compiled(begin, static_argnames="pool"),
        copy=compiled(sampler.copy, donate_argnums=0),
        extend=compiled(sampler.extend, donate_argnums=1),
        decode=compiled(sampler.decode, donate_argnums=1),
        report=compiled(report, out_shardings=NamedSharding(on, PartitionSpec())),
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
    extended: int  # tokens computed in chunks: more if pages run out, which replies' times decide


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
    order, pool = programs.order(len(prompts.ids)), programs.pool(*prompts.tokens.shape)
    of_devices, names = _dealt(prompts, key, order, programs)
    weights, cache, first, keys = programs.begin(weights, of_devices, names, pool=pool)
    of_prompts = of_devices, states, asked or [None] * len(states)
    books = _Books(programs, order, *of_prompts, first=first, keys=np.asarray(keys))
    sizes = {"own": books.own, "longest": books.sequences.shape[1]}
    held = Pages(pool, cache, cached=books.cached, shared=books.shared, **sizes)
    most = min(programs.batching.slots or books.own, books.own)
    some = True
    with _asker(environment) as asker:
        while not books.over.all():
            asker.ask(books.ended_turns(text))
            books.take(asker.replies(least=not some))
            held.free(books.over)
            rows = held.provide(books.ready, books.needed, most)
            some = any(map(len, rows))
            if not some:  # all wait for replies, or for the pages of those that do
                continue
            cache = held.copied(cache, programs.copy)
            cache = _extended(cache, weights, rows, books, held, programs)
            work = books.work(rows, held, _width(max(map(len, rows)), most, programs))
            until = np.asarray([3 * len(own) // 4 for own in rows], np.int32)
            cache, found = programs.decode(weights, cache, books.named(names), work, until)
            books.take(asker.replies(waited_for=False))  # devices decode meanwhile
            books.record(work, jax.device_get(found))
    played = books.played(prompts, asker.seconds)
    return played._replace(rollout=programs.report(played.rollout, prompts, key))


def _asker(environment: Environment) -> Asker:
    """What asks the environment: of several processes the first does, and tells the others."""
    if jax.process_count() == 1:
        return Asker(environment)
    return SharedAsker(environment, placement.leads(), placement.led)


def _dealt(
    prompts: Prompts, key: jax.Array, order: np.ndarray, programs: Programs
) -> tuple[Prompts, Names]:
    """Each device's prompts, and the names of its rows, device by device."""
    rows = order.reshape(-1)
    prompt, sample = (x.astype(np.int32) for x in np.divmod(rows, programs.samples))
    _, shares = sharded.split(len(prompts.ids), programs.samples, len(order))
    own = prompt[:: programs.samples // shares]
    of_devices = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[own]), prompts)
    names = Names(key, jnp.asarray(np.asarray(prompts.ids)[prompt]), jnp.asarray(sample))
    return of_devices, names


def _width(rows: int, slots: int, programs: Programs) -> int:
    """The fewest of a device's slots that are compiled for and hold this many rows."""
    narrower = widths(slots, programs.batching.halvings)
    return min(width for width in (slots, *narrower) if width >= rows)


def _extended(cache, weights, rows, books: "_Books", held: Pages, programs: Programs) -> Cache:
    """The cache with all tokens of each device's rows but the newest."""
    pieces = [books.pieces(own) for own in rows]
    together, calls = min(_TOGETHER, books.own), max(map(len, pieces))
    for start in range(0, calls, _CHUNKS):
        shape = len(rows) * _CHUNKS, together, _POSITIONS
        tokens, positions = np.zeros(shape, np.int32), np.full(shape, books.dump, np.int32)
        pages = np.tile(held.nowhere, (*shape[:2], 1))
        for shard, own in enumerate(pieces):
            for number, chunk in enumerate(own[start : start + _CHUNKS]):
                for place, (row, where) in enumerate(chunk):
                    at = shard * _CHUNKS + number, place
                    tokens[(*at, slice(len(where)))] = books.sequences[row, where]
                    positions[(*at, slice(len(where)))] = where
                    pages[at] = held.tables[row]
        count = np.int32(min(_CHUNKS, calls - start))
        chunks = Chunks(tokens, positions, pages, count)  # type: ignore[arg-type]
        cache = programs.extend(weights, cache, chunks)
    return cache


class _Books:
    """What is known of every episode. N rows, R tokens at most after the prompt, T turns.

    Rows are device by device, as many of each. It begins after the first token of each.

    Args:
      order: i64[shards, N / shards], rows of the step.
      prompts: those of each device.
      states: the environment's, one for each prompt of the step.
      asked: each prompt of the step as text or messages, or None.
      keys: u32[N, T, 2], of turns.
    """

    def __init__(
        self, programs: Programs, order, prompts: Prompts, states, asked, *, first: First, keys
    ) -> None:
        tokens, lengths = (np.asarray(x) for x in (prompts.tokens, prompts.lengths))
        self.samples, self.order, self.keys = programs.samples, order, keys
        self.most, self.vocabulary = programs.turns, programs.execution.config.vocab_size
        self.room = room = programs.execution.sampling.max_tokens  # R
        count = order.size
        own = count // len(lengths)  # samples of a prompt on a device
        starts = np.repeat(lengths, own).astype(np.int32)
        # By position: each prompt, then what follows it. i32[N, Tp + R].
        self.sequences = np.pad(np.repeat(tokens, own, axis=0), ((0, 0), (0, room)))
        self.sequences = self.sequences.astype(np.int32)
        self.states = [copy.deepcopy(states[row // self.samples]) for row in order.flat]
        self.prompts = [asked[row // self.samples] for row in order.flat]
        # Of each episode its rows before this one, `_OF_ROWS`.
        self.before: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        # [N, R].
        self.log_probs = np.zeros((count, room), np.float32)
        self.drawn_with = None if first.drawn is None else np.zeros((count, room), np.float32)
        self.drawn = np.zeros((count, room), bool)
        self.rewards = np.zeros((count, room), np.float32)  # of turns, at their last tokens
        # i32[N].
        self.starts = starts  # lengths of the prompts
        self.lengths = np.zeros(count, np.int32)  # tokens after the prompt
        self.began = np.zeros(count, np.int32)  # lengths at which the turns began
        # Lengths at which the turns are cut.
        self.limits = np.full(count, min(self.most.max_tokens, room), np.int32)
        self.turn = np.zeros(count, np.int32)  # its number
        self.cached = starts.copy()  # positions whose keys and values are there
        self.shared = starts.copy()  # of them those that the prompt has for all its samples
        # bool[N].
        self.ended = np.zeros(count, bool)  # the last turn drew its end token
        self.ready = np.ones(count, bool)  # can go on
        self.over = np.zeros(count, bool)
        self.fits = np.ones(count, bool)  # no reply was left out for want of room
        self.failed = np.zeros(count, bool)  # the environment failed
        self.extended = 0  # positions computed in chunks
        self.asked: list[int] = []  # rows whose turns have ended just now
        first = jax.device_get(first)
        drawn_with = first.log_probs if first.drawn is None else first.drawn
        for row in range(count):
            drew = (x[row : row + 1] for x in (first.tokens, first.log_probs, drawn_with))
            self._append(row, *drew, ended=bool(first.ended[row]))

    @property
    def count(self) -> int:
        return len(self.starts)

    @property
    def own(self) -> int:
        """Rows of each device."""
        return self.order.shape[1]

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
            end = int(self.starts[row] + self.lengths[row]) - 1
            missing = np.arange(int(self.cached[row]), end)
            for level, start in enumerate(range(0, len(missing), _POSITIONS)):
                levels += [[]] if level == len(levels) else []
                levels[level].append((row, missing[start : start + _POSITIONS]))
            self.extended += len(missing)
            self.cached[row] += len(missing)
        size = min(_TOGETHER, self.own)
        return [some[i : i + size] for some in levels for i in range(0, len(some), size)]

    def work(self, rows: Sequence[np.ndarray], held: Pages, width: int) -> Work:
        """Each device's rows in its slots: with pages in the first ones, else each in its own."""
        slots = np.tile(np.arange(width, dtype=np.int32), (len(rows), 1))
        working = np.zeros(slots.shape, bool)
        for shard, own in enumerate(rows):
            local = own - shard * self.own
            if held.pool is None:
                working[shard, local] = True
            else:
                slots[shard, : len(own)] = local
                working[shard, : len(own)] = True
        slots, working = slots.reshape(-1), working.reshape(-1)
        at = self._rows(slots)
        newest = self.sequences[at, self.starts[at] + self.lengths[at] - 1]
        taken = (x[at] for x in (self.lengths, self.starts, self.limits))
        pages = None
        if held.pool is not None:
            pages = np.where(working[:, None], held.tables[at], held.nowhere)
        return Work(slots, newest, *taken, working, pages)  # type: ignore[arg-type]

    def _rows(self, slots: np.ndarray) -> np.ndarray:
        """The rows of what is in slots, which is called by its place on their device."""
        device = np.arange(len(slots)) // (len(slots) // len(self.order))
        return slots + self.own * device

    def record(self, work: Work, found: Found) -> None:
        """Keeps what a call drew."""
        rows = self._rows(np.asarray(work.rows))
        for slot in np.flatnonzero(work.working).tolist():
            row = int(rows[slot])
            drew = slice(int(found.lengths[slot] - self.lengths[row]))
            drawn_with = found.log_probs if found.drawn is None else found.drawn
            columns = (x[slot, drew] for x in (found.tokens, found.log_probs, drawn_with))
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
        prompt, sample = divmod(int(self.order.flat[row]), self.samples)
        return Turn(
            prompt=prompt,
            sample=sample,
            turn=number,
            completion=Completion(text(said.tolist()), tokens, ended),
            state=self.states[row],
            key=self.keys[row, number],
            asked=self.prompts[row],
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
                self._append_reply(row, _check_tokens(outcome.tokens, self.vocabulary))
            else:
                self._begin_row(row, _check_tokens(outcome.anew, self.vocabulary))

    def _append_reply(self, row: int, reply: np.ndarray) -> None:
        start = self.starts[row] + self.lengths[row]
        if self._fits(row, self.lengths[row] + len(reply)):
            self.sequences[row, start : start + len(reply)] = reply
            self._go_on(row, self.lengths[row] + len(reply))

    def _begin_row(self, row: int, tokens: np.ndarray) -> None:
        """Goes on in a new row, after these tokens. What it has in common with this one stays."""
        if not tokens.size:
            raise InputError("environment: a row that is begun anew must have a token")
        start = min(self.sequences.shape[1] - self.room, len(tokens))  # as much as a prompt has
        if not self._fits(row, len(tokens) - start):
            return
        columns = ((name, getattr(self, name)) for name in _OF_ROWS)
        self.before[row].append({name: x[row].copy() for name, x in columns if x is not None})
        same = self.sequences[row, : len(tokens)] == tokens
        # The newest token's keys and values are computed by the step that draws the next.
        common = min([*same.tolist(), False].index(False), len(tokens) - 1)
        self.cached[row] = min(self.cached[row], common)
        self.shared[row] = min(self.shared[row], common)
        for of_tokens in (self.log_probs, self.drawn_with, self.drawn, self.rewards):
            if of_tokens is not None:
                of_tokens[row] = 0
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

    def played(self, prompts: Prompts, seconds: float) -> Played:
        """All episodes, as the learner takes them; `prompts` are the step's."""
        rows, cuts = self._all_rows(), sum(map(len, self.before))
        tokens, rewards = rows["lengths"].sum(), rows["rewards"]
        metrics = {
            "turns": float(self.turn.mean()),
            "episode_length": float(tokens / self.count),
            "reply_tokens": float(tokens - rows["drawn"].sum()),
            "cuts": float(cuts),
            "rows": 1.0 + cuts / self.count,
        }
        of_episodes = rewards.reshape(self.count, -1).sum(axis=1, dtype=np.float32)
        failed = self._in_order(self.failed)
        own = of_episodes, rewards, failed, metrics, seconds, self.extended
        return Played(self._rollout(prompts, rows), *own)

    def _rollout(self, prompts: Prompts, rows: dict[str, np.ndarray]) -> Rollout:
        starts, sequences, lengths = (rows[name] for name in ("starts", "sequences", "lengths"))
        column = np.arange(self.room)[None, :]
        responses = np.take_along_axis(sequences, starts[:, None] + column, axis=1)
        asked = np.repeat(np.asarray(prompts.tokens), self.samples * self._parts, axis=0)
        if self._parts > 1:
            own = np.arange(asked.shape[1])[None, :] < starts[:, None]
            asked = np.where(own, sequences[:, : asked.shape[1]], 0)
        arrays: dict[str, Any] = {
            "prompts": asked,
            "prompt_lengths": starts,
            "responses": np.where(column < lengths[:, None], responses, 0),
            "lengths": lengths,
            "log_probs": rows["log_probs"],
            "finished": rows["ended"],
            "drawn_log_probs": rows.get("drawn_with"),
            "drawn": rows["drawn"],
        }
        return Rollout(**jax.tree.map(jnp.asarray, arrays), parts=self._parts)

    @property
    def _parts(self) -> int:
        """Rows of an episode in the rollout: a power of two, so that few shapes are compiled."""
        return 1 << max(map(len, self.before)).bit_length()

    def _all_rows(self) -> dict[str, np.ndarray]:
        """`_OF_ROWS` of all rows of the step, those of an episode together and then empty ones."""
        last, found = {name: getattr(self, name) for name in _OF_ROWS}, {}
        last["ended"] = self.ended & self.fits
        for name, newest in last.items():
            if newest is None:
                continue
            rows = np.zeros((self.count, self._parts, *newest.shape[1:]), newest.dtype)
            for number, before in enumerate(self.before):
                rows[number, : len(before) + 1] = [*(x[name] for x in before), newest[number]]
            found[name] = self._in_order(rows).reshape(-1, *newest.shape[1:])
        return found

    def _in_order(self, x: np.ndarray) -> np.ndarray:
        """Rows of the step, of those device by device."""
        return x[np.argsort(self.order, axis=None)]


def _check_tokens(tokens: Any, vocabulary: int) -> np.ndarray:
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
