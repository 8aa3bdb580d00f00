"""Episodes of several turns: what the policy says, what its environment replies.

A policy and an environment take turns, and write into one row of tokens that is only ever appended
to. The policy's tokens stay as they were drawn; a reply is rendered once, as tokens that follow
them. Where a chat template rewrites what was said, an episode may go on in a new row.

An environment of the user's is one function, `respond(state, completion)`, which returns its next
state and a `Reply`. Bits and resumption are promised for one that is a function of its arguments: a
state, a completion and, if it takes a third, a key of this turn alone.

A turn ends in a reply, or in a failure, which ends its episode with a reward of 0 for this turn:

  time limit   the environment did not reply in time
  crash        its process ended, or closed its files
  raised       it raised an exception
  reply        what it returned is no reply, or cannot become tokens

A failure is what a clock or a machine may cause. `Recorded` writes each down as it happens and
repeats it in a run that is resumed.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal, Protocol

import numpy as np

from tim_jax.common.errors import writing

Message = Mapping[str, Any]  # with role and content, as chat templates take it
Content = str | Sequence[Message] | Sequence[int] | np.ndarray
Failure = Literal["time limit", "crash", "raised", "reply"]
History = Literal["refuse", "keep", "cut"]  # what is done where a template rewrites earlier turns
_GRACE = 0.005  # seconds for one more reply before a caller goes on without it


@dataclass(frozen=True, eq=False)
class Completion:
    """One turn of the policy.

    Attributes:
      text: the tokens as text, without the end token.
      tokens: i32[n], as they were drawn, the end token included.
      ended: whether the policy ended its turn. False: it was cut at `max_tokens`.
      message: what the tokenizer's response template reads in it, with `tool_calls` if there are
        some. None: the tokenizer has no such template, or it reads nothing.
      thinking: whether the chat template has opened a thought ahead of it, by `<think>`.
    """

    text: str
    tokens: np.ndarray
    ended: bool
    message: Message | None = None
    thinking: bool = False


@dataclass(frozen=True)
class Reply:
    """What the environment says to a completion.

    Attributes:
      content: text, which becomes the next user's message; messages; or tokens, which follow the
        completion as they are. Nobody reads it where `done`.
      reward: of this turn, a finite number. An episode's reward is the sum over its turns.
      done: whether the episode ends here.
    """

    content: Content = ""
    reward: float | np.floating = 0.0
    done: bool = False


class Packed(bytes):
    """A state as its pickle. Only the environment's own process looks into it."""


@dataclass(frozen=True, eq=False)
class Turn:
    """A completion that waits for its environment.

    Attributes:
      prompt, sample, turn: which one it is within the step, from 0.
      state: the episode's, as the last outcome left it; before the first turn its row's.
      key: u32[2], of (seed, step, prompt, sample, turn).
      asked: the episode's prompt, text or messages; None if nobody said.
    """

    prompt: int
    sample: int
    turn: int
    completion: Completion
    state: Any
    key: np.ndarray
    asked: Any = None


@dataclass(frozen=True, eq=False)
class Answer:
    """What an environment says to a turn, before it becomes tokens. The fields are `Outcome`'s."""

    state: Any
    content: Content = ""
    reward: float = 0.0
    done: bool = False
    failure: str | None = None


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an environment makes of one turn.

    Attributes:
      state: the episode's next.
      tokens: i32[n], to append: all that stands between the completion and the next turn. Empty
        where `done`.
      failure: why the environment did not reply, beginning with a `Failure`. Then the reward is 0
        and `done` holds.
      anew: i32[m], where what was said cannot be appended to: all tokens that the next turn is
        drawn after, in a new row of the episode. None: `tokens` are appended.
    """

    state: Any
    tokens: np.ndarray
    reward: float | np.floating = 0.0
    done: bool = False
    failure: str | None = None
    anew: np.ndarray | None = None


class Answering(Protocol):
    """An environment that answers in text."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Those of the messages in a usual reply, checked before a run; none if it is tokens."""
        ...

    @property
    def tools(self) -> tuple[Any, ...]:
        """What its prompts declare, as JSON schemas."""
        ...

    @property
    def reads_calls(self) -> bool:
        """Whether it reads calls of tools by `tools.read_calls`."""
        ...

    def answers(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Answer]]:
        """Yields (index in `turns`, answer) for each, in the order in which they are there."""
        ...


class Environment(Protocol):
    """An environment that answers in tokens, which a loop asks."""

    def outcomes(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Outcome]]:
        """Yields (index in `turns`, outcome) for each, in the order in which they are there."""
        ...


def failed(state: Any, kind: Failure, what: str) -> Answer:
    """The answer of an environment that failed: its episode ends here, without a reward."""
    return Answer(state, done=True, failure=f"{kind}: {what}")


class Noted:
    """An environment whose first failure is kept.

    Attributes:
      failure: it, as of `Outcome`; None if there was none.
    """

    def __init__(self, environment: Environment) -> None:
        self.failure: str | None = None
        self._environment = environment

    def outcomes(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Outcome]]:
        """Yields outcomes as the environment does."""
        for index, outcome in self._environment.outcomes(turns):
            self.failure = self.failure or outcome.failure
            yield index, outcome


@dataclass(frozen=True)
class Recorded:
    """An environment whose failures are written down, and repeated where they are known.

    So a run that is resumed from a checkpoint goes the way that it went before, whatever the clock
    says this time.

    Attributes:
      path: lines of JSON, one for each failure, found by the key of its turn.
    """

    environment: Environment
    path: Path

    def outcomes(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Outcome]]:
        """Yields outcomes as the environment does, those that are known first.

        Raises:
          InputError: a failure cannot be written down.
        """
        known = self._known()
        asked = []
        for index, turn in enumerate(turns):
            if (failure := known.get(_name(turn))) is None:
                asked.append(index)
            else:
                yield index, Outcome(turn.state, np.zeros(0, np.int32), done=True, failure=failure)
        for place, outcome in self.environment.outcomes([turns[index] for index in asked]):
            if outcome.failure is not None:
                self._keep(_name(turns[asked[place]]), outcome.failure)
            yield asked[place], outcome

    def _known(self) -> dict[str, str]:
        if not self.path.exists():
            return {}
        known = {}
        for line in self.path.read_text(encoding="utf-8").split("\n"):
            with suppress(ValueError):  # one that the end of a run cut
                entry = json.loads(line)
                known[entry["turn"]] = entry["failure"]
        return known

    def _keep(self, turn: str, failure: str) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps({'turn': turn, 'failure': failure})}\n")
            file.flush()
            os.fsync(file.fileno())


def _name(turn: Turn) -> str:
    return "".join(f"{int(part):08x}" for part in turn.key)


class Asker:
    """Asks an environment from a thread of its own, so that devices go on meanwhile.

    Attributes:
      seconds: that the caller waited for replies while it had nothing else to do.
    """

    def __init__(self, environment: Environment) -> None:
        self.seconds = 0.0
        self._environment, self._left = environment, 0
        self._asked: SimpleQueue[list[tuple[int, Turn]] | None] = SimpleQueue()
        self._replies: SimpleQueue[tuple[int, Outcome] | BaseException] = SimpleQueue()

    def __enter__(self) -> "Asker":
        Thread(target=self._run, daemon=True, name="environment").start()
        return self

    def __exit__(self, *error: object) -> None:
        self._asked.put(None)

    def ask(self, turns: list[tuple[int, Turn]]) -> None:
        """Has turns answered; each is known by its row."""
        if turns:
            self._left += len(turns)
            self._asked.put(turns)

    def replies(
        self, *, least: bool = False, waited_for: bool = True
    ) -> Iterator[tuple[int, Outcome]]:
        """Yields (row, reply) of those that are there, and those that follow at once.

        Args:
          least: wait for one at least.
          waited_for: nothing else is at work meanwhile.
        """
        while self._left:
            started = time.perf_counter()
            try:
                reply = self._replies.get(timeout=None if least else _GRACE)
            except Empty:
                return
            finally:
                self.seconds += waited_for * (time.perf_counter() - started)
            if isinstance(reply, BaseException):
                raise reply
            self._left, least = self._left - 1, False
            yield reply

    def _run(self) -> None:
        while (turns := self._asked.get()) is not None:
            try:
                self._answer(turns)
            except BaseException as error:
                self._replies.put(error)
                return

    def _answer(self, turns: list[tuple[int, Turn]]) -> None:
        rows = {index: row for index, (row, _) in enumerate(turns)}
        for index, outcome in self._environment.outcomes([turn for _, turn in turns]):
            self._replies.put((rows.pop(index), outcome))
        if rows:
            raise RuntimeError(f"the environment left {len(rows)} of {len(turns)} turns unanswered")


class SharedAsker(Asker):
    """Asks in one of several processes; all of them have the same replies at the same time.

    All processes must call `ask` and `replies` together, with the same arguments. Those that do not
    lead are told everything but states, which stay where the environment is asked. `led` runs a
    function in the process that leads, and returns its result, a JSON value, in all.
    """

    def __init__(
        self, environment: Environment, leads: bool, led: Callable[[Callable[[], Any]], Any]
    ) -> None:
        super().__init__(environment)
        self._leads, self._led, self._asked_of_all = leads, led, 0

    def ask(self, turns: list[tuple[int, Turn]]) -> None:
        """Has turns answered, see `Asker.ask`."""
        self._asked_of_all += len(turns)
        if self._leads:
            super().ask(turns)

    def replies(
        self, *, least: bool = False, waited_for: bool = True
    ) -> Iterator[tuple[int, Outcome]]:
        """Yields replies as `Asker.replies` does; none while the devices work, which tell them."""
        if not self._asked_of_all or not waited_for:
            return
        own: list[tuple[int, Outcome]] = []
        there = partial(super().replies, least=least)

        def told() -> list[Any]:
            own.extend(there())
            return [(row, _to_json(outcome)) for row, outcome in own]

        heard = self._led(told)
        self._asked_of_all -= len(heard)
        yield from own if self._leads else ((row, _from_json(fields)) for row, fields in heard)


def _to_json(outcome: Outcome) -> dict[str, Any]:
    """All of an outcome but its state."""
    fields = {name: x for name, x in vars(outcome).items() if name != "state"}
    arrays = (np.ndarray, np.generic)
    return {name: x.tolist() if isinstance(x, arrays) else x for name, x in fields.items()}


def _from_json(fields: dict[str, Any]) -> Outcome:
    own: dict[str, Any] = {
        name: np.asarray(x) if isinstance(x, list) else x for name, x in fields.items()
    }
    return Outcome(None, **own)
