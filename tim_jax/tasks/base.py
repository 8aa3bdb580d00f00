"""What a task is: prompts with answers, some of them held out, and a grader of completions.

A `Task` is a value. Nothing here knows about models or devices. The order in which training prompts
are visited is a pure function of (seed, step), so a resumed run needs no state to see the same
data.

In a task of several turns the policy and an environment take turns, and write into one row of
tokens that is only ever appended to. The policy's tokens stay as they were drawn; a reply is
rendered once, as tokens that follow them. Where a chat template rewrites what was said, an episode
may go on in a new row. A turn ends in a reply, or in a failure, which ends its episode with a
reward of 0 for this turn:

  time limit   the environment did not reply in time
  crash        its process ended, or closed its files
  raised       it raised an exception
  reply        what it returned is no reply, or cannot become tokens
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, overload

import numpy as np

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import check_whole, shown

Fault = Literal["timeout", "error"]
TIMEOUT: Fault = "timeout"
ERROR: Fault = "error"
EOS = "<eos>"  # of a tokenizer with one token per character
# Larger sizes are slips, and would keep a run busy with making problems instead of saying so.
MOST_TRAINING, MOST_HELD_OUT = 10**7, 10**5
_LONGEST_LINE = 500  # characters of an exception's message that is shown or written down


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


Prompt = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One problem.

    `solution` is a worked completion that ends in the answer, for a supervised warm start; only
    some tasks have it. `data` is what else the grader needs; it must not be changed. `where` is the
    place that it was read from, for messages, such as `train.jsonl, line 3`.
    """

    prompt: Prompt
    answer: str
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)
    solution: str | None = None
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of one completion.

    `reward` is finite. `fault` is set if the grader gave no verdict, because it ran past its limit
    (`timeout`) or failed (`error`). The reward is then 0.
    """

    reward: float
    fault: Fault | None = None


Grader = Callable[[Sequence[Example], Sequence[str]], list[Grade]]

# What takes turns with the policy.

ChatMessage = Mapping[str, Any]  # with role and content, as chat templates take it
Content = str | Sequence[ChatMessage] | Sequence[int] | np.ndarray
Failure = Literal["time limit", "crash", "raised", "reply"]
History = Literal["refuse", "keep", "cut"]  # what is done where a template rewrites earlier turns


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
    message: ChatMessage | None = None
    thinking: bool = False


@dataclass(frozen=True)
class Reply:
    """What the environment says to a completion.

    Attributes:
      content: text, which becomes the next user's message; messages; or tokens, which follow the
        completion as they are. Where `done` it is checked, and appended nowhere.
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


def failed(state: Any, kind: Failure, what: str) -> Answer:
    """The answer of an environment that failed: its episode ends here, without a reward."""
    return Answer(state, done=True, failure=f"{kind}: {what}")


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


# What a run is given.


@dataclass(frozen=True)
class Task:
    """Prompts to train on, prompts held out (no prompt is in both), and their grader.

    `train[i]` is a function of the task's parameters, its seed and i alone. `notes` are lines for
    the user about how the task was made, such as rows left out. `close` ends the grader's worker
    processes; they also end with the program.

    A task of several turns has an `environment`, whose rewards are those of the task; its grader is
    not asked. An episode's state begins as `state_of` its example.
    """

    name: str
    train: Sequence[Example]
    evaluation: Sequence[Example]
    grade: Grader
    notes: tuple[str, ...] = ()
    environment: Answering | None = None

    def close(self) -> None:
        """Ends the worker processes of grader, environment and the prompts' source, if any."""
        for part in (self.grade, self.environment, self.train):
            close(part)


def close(part: object) -> None:
    """Closes a grader or the source of prompts, if it can be closed."""
    getattr(part, "close", lambda: None)()


def in_turns(examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
    """The grader of a task of several turns, which refuses: its environment gives the rewards."""
    raise InputError(
        f"a task of several turns is graded by its environment, not by {len(completions)} of"
        f" {len(examples)} completions: set sampling.max_turns"
    )


def state_of(example: Example) -> Any:
    """What the state of an episode begins as: the example's `data["state"]`, else its answer."""
    return example.data.get("state", example.answer)


@dataclass(frozen=True)
class Lazy(Sequence[Example]):
    """`size` examples that are made whenever they are read.

    Attributes:
      made: rows, each from 0 to `size` - 1 -> their examples.
      at_a_time: so many are made together where all are read.
      source: what is closed with them, if it can be.
    """

    made: Callable[[Sequence[int]], list[Example]]
    size: int
    at_a_time: int = 1
    source: object = None

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Example, ...]: ...
    def __getitem__(self, index: int | slice) -> Example | tuple[Example, ...]:
        if isinstance(index, slice):
            return tuple(self.made(range(*index.indices(self.size))))
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return self.made([int(index) % self.size])[0]

    def __iter__(self) -> Iterator[Example]:
        for start in range(0, self.size, self.at_a_time):
            yield from self[start : start + self.at_a_time]

    def close(self) -> None:
        """Closes the examples' source."""
        close(self.source)


class Generated(Lazy):
    """A sequence whose item i is `make(i)`."""

    def __init__(self, make: Callable[[int], Example], size: int, source: object = None) -> None:
        super().__init__(lambda rows: [make(row) for row in rows], size, source=source)


def faults(grades: Sequence[Grade]) -> dict[str, int]:
    """Returns how many grades were cut off (`timeout`) and how many failed (`error`)."""
    return {kind: sum(grade.fault == kind for grade in grades) for kind in (TIMEOUT, ERROR)}


def order(seed: int, step: int, batch: int, size: int) -> np.ndarray:
    """Returns the rows of `size` that step `step` visits, i64[batch].

    Position p of the run reads entry p mod size of the permutation of epoch p div size, so every
    row is visited once per epoch, and a batch that crosses an epoch's border takes the tail of one
    permutation and the head of the next. A pure function: resuming needs no iterator state. The
    permutation sorts 64-bit hashes made here, so that it does not depend on a library's version.

    Raises:
      InputError: if `step` is negative, or `batch` or `size` is not positive.
    """
    if step < 0 or batch < 1 or size < 1:
        raise InputError(
            f"data order: step must be >= 0, batch and size >= 1; got {step=}, {batch=}, {size=}"
        )
    position = step * batch + np.arange(batch, dtype=np.int64)
    epoch = position // size
    rows = np.empty(batch, np.int64)
    for number in range(int(epoch[0]), int(epoch[-1]) + 1):
        here = epoch == number
        rows[here] = _permutation(seed, number, size)[position[here] % size]
    return rows


def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    mask = (1 << 64) - 1
    key = _mix(np.array([seed & mask], np.uint64))
    key = _mix(key ^ np.array([epoch & mask], np.uint64))
    return np.argsort(_mix(key + np.arange(size, dtype=np.uint64)), kind="stable")


def _mix(z: np.ndarray) -> np.ndarray:
    """The SplitMix64 step on u64[...] (Steele, Lea and Flood, 2014, figure 14)."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def rng_for(*key: object) -> random.Random:
    """Returns a generator that depends on `key` alone (values with a stable repr)."""
    return random.Random(repr(key))


def below(rng: random.Random, n: int) -> int:
    """Returns a whole number in 0..n-1, by `random()`, the only method that Python keeps stable."""
    return int(rng.random() * n)


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, cut if long, or its type if it has none."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."


def is_json(text: str) -> bool:
    """Whether a text is a value of JSON."""
    with suppress(ValueError, RecursionError):
        json.loads(text)
        return True
    return False


def span(name: str, value: object, least: int, largest: int) -> tuple[int, int]:
    """Returns `value`, checked to be two whole numbers in order, from `least` to `largest`."""
    match value:
        case (int(fewest), int(most)) if least <= fewest <= most <= largest:
            return fewest, most
    raise InputError(
        f"{name} must be two whole numbers (fewest, most), the first at least {least} and"
        f" not above the second, which is at most {largest}; got {shown(value)}"
    )


def check_sizes(train_size: object, eval_size: object) -> None:
    """Refuses sizes of a task's parts that are below 1, or too large to be meant."""
    check_whole("train_size", train_size, least=1, most=MOST_TRAINING)
    check_whole("eval_size", eval_size, least=1, most=MOST_HELD_OUT)


def check_open(prompt: Prompt, where: str) -> None:
    """Refuses messages that the assistant has answered already."""
    if not isinstance(prompt, str) and prompt and prompt[-1].role == "assistant":
        raise InputError(
            f"{where} ends with the assistant's turn, {shown(prompt[-1].content)}, so that the"
            " prompt has its answer in it; leave that message out"
        )


def last_text(prompt: str | Sequence[Message]) -> str:
    """Returns a prompt's text, or that of its last message."""
    return prompt if isinstance(prompt, str) else prompt[-1].content if prompt else ""


def share(name: str, value: object) -> float:
    """Returns `value` as a float, checked to be a number from 0 to 1."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"{name} must be a number from 0 to 1, got {value!r}")
    return float(value)


@dataclass(frozen=True)
class SharedGrader:
    """A grader that grades a part of the rows on each process and returns all grades on all.

    So every completion is graded once. If each process graded all of them, one might hit a time
    limit where another does not, and they would train on different rewards.

    Attributes:
      grade: the grader of the task.
      index: the number of this process, from 0.
      count: how many processes there are.
      exchange: this process's text -> the texts of all processes, in order.
    """

    grade: Grader
    index: int
    count: int
    exchange: Callable[[str], list[str]]

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        size = -(-len(completions) // self.count)
        rows = slice(self.index * size, (self.index + 1) * size)
        grades = self.grade(examples[rows], completions[rows]) if completions[rows] else []
        # JSON keeps every bit of a float.
        parts = self.exchange(json.dumps([[grade.reward, grade.fault] for grade in grades]))
        return [Grade(reward, fault) for part in parts for reward, fault in json.loads(part)]

    def close(self) -> None:
        """Ends the worker processes of the grader, if it has some."""
        close(self.grade)
