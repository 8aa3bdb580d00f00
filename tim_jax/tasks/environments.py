"""A user's environment: the function `respond`, called here or in guarded processes.

    def respond(state, completion):
        return state, tim_jax.Reply("text, messages or tokens", reward=0.0, done=False)

It returns the episode's next state and a reply. Bits and resumption are promised for one that is a
function of its arguments: a state, a completion and, if it takes a third, a key of this turn alone.
It may be a coroutine (`async def`). Then the turns of a batch wait side by side, each up to its
limit.

`Here` calls it in this process, as the API does with a function; `Guarded` in processes of its own,
as a config does with a name. Both give it a copy of the state, and what it returns is looked at in
one way. What goes wrong is an answer with a `failure` (`base`), never an exception.

A failure is what a clock or a machine may cause. `Recorded` writes each down as it happens and
repeats it in a run that is resumed. `Asker` asks an environment while the devices go on.
"""

import asyncio
import base64
import importlib.util
import inspect
import json
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from tim_jax.common import waiting
from tim_jax.common.errors import InputError, writing
from tim_jax.common.inputs import shown
from tim_jax.tasks import base
from tim_jax.tasks.base import (
    Answer,
    Content,
    Environment,
    Message,
    Outcome,
    Packed,
    Reply,
    Turn,
    failed,
)
from tim_jax.tasks.custom import LARGEST, described, load_function, user_code
from tim_jax.tasks.guard import START_SECONDS, Limits, Pool, Refusal
from tim_jax.tasks.worker import end_if_forked

SECONDS = 30.0  # for one reply
LATER = 1.0  # seconds after its limit, in which a coroutine must end
WORKERS = 4
MEMORY = 8.0  # GiB of address space
TOGETHER = 64  # turns of a coroutine that one process waits for at once
LONGEST = 1 << 20  # characters, tokens or characters of messages in a reply
LARGEST_STATE = 16 << 20  # bytes of its pickle
_GRACE = 0.005  # seconds for one more reply before a caller goes on without it


def load_respond(name: str) -> Callable[..., Any]:
    """Imports what `file.py:function` or `module:function` names.

    Raises:
      InputError: there is no such file, module or function, or the import fails.
    """
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        return load_function(name)
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise InputError(f"environment {name!r}: no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # because the name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that states with its classes can be pickled
    sys.path.insert(0, str(path.parent))  # as for a script
    with user_code(f"environment {name}: running {path.name}"):
        spec.loader.exec_module(module)
    respond = getattr(module, function, None)
    if not callable(respond):
        raise InputError(f"environment {name!r}: {path.name} has no function {function!r}")
    return respond


class Here:
    """An environment that is a function of this process.

    It is called for one turn after another, and has no time limit. A coroutine function is called
    for all turns of a batch side by side, with a limit by the clock for each.

    Attributes:
      roles, tools, reads_calls: what the function declares by attributes `roles`, `tools()` and
        `reads_calls`, see `base.Answering`. Without them it replies as a user.
    """

    def __init__(
        self, respond: Callable[..., Any], seconds: float = SECONDS, *, guarded: bool = False
    ) -> None:
        """Makes one; `guarded` if somebody else ends this process when it hangs."""
        call = getattr(respond, "__call__", None)  # noqa: B004 (of an object)
        self.asynchronous = any(map(inspect.iscoroutinefunction, (respond, call)))
        self.roles: tuple[str, ...] = tuple(getattr(respond, "roles", ("user",)))
        self.reads_calls: bool = getattr(respond, "reads_calls", False)
        self._respond, self._takes_key = respond, _takes_key(respond)
        self._seconds, self._guarded = seconds, guarded
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def tools(self) -> tuple[Any, ...]:
        """See `base.Answering`."""
        return tuple(getattr(self._respond, "tools", tuple)())

    def answers(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Answer]]:
        """Yields (index in `turns`, answer), of coroutines in the order in which they are there."""
        if not self.asynchronous:
            yield from ((index, self._answer(turn)) for index, turn in enumerate(turns))
            return
        loop = self._start_loop()
        asked = {
            asyncio.run_coroutine_threadsafe(self._awaited(turn), loop): index
            for index, turn in enumerate(turns)
        }
        try:
            for done in as_completed(asked, None if self._guarded else self._seconds + LATER):
                yield asked.pop(done), done.result()
        except TimeoutError:  # one holds the loop, or does not end when it is told to
            self._loop = None
            for future, index in asked.items():
                yield index, future.result() if future.done() else self._ask_alone(turns, index)

    def _ask_alone(self, turns: Sequence[Turn], index: int) -> Answer:
        """The answer to a turn that was late together with others, or for which it was alone."""
        if len(turns) == 1:
            return failed(turns[index].state, "time limit", _late(self._seconds))
        [(_, answer)] = self.answers([turns[index]])
        return answer

    def _answer(self, turn: Turn) -> Answer:
        try:
            with user_code("respond"):
                result = self._call(turn)
        except InputError as error:
            return failed(turn.state, "raised", str(error).removeprefix("respond raised "))
        except KeyboardInterrupt as error:
            if not self._guarded:
                raise
            return failed(turn.state, "raised", described(error))
        return read_answer(turn.state, result)

    async def _awaited(self, turn: Turn) -> Answer:
        limit, own = asyncio.timeout(self._seconds), os.getpid()
        try:
            async with limit:
                result = await self._call(turn)
        except BaseException as error:  # in a thread of its own, which must not end
            if limit.expired():
                return failed(turn.state, "time limit", _late(self._seconds))
            return failed(turn.state, "raised", described(error))
        finally:
            end_if_forked(own)
        return read_answer(turn.state, result)

    def _call(self, turn: Turn) -> Any:
        state = turn.state if isinstance(turn.state, Packed) else pickle.dumps(turn.state)
        key = (turn.key,) if self._takes_key else ()
        return self._respond(pickle.loads(state), turn.completion, *key)

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        """A loop in a thread of its own, because a notebook has one already in its main thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return self._loop


def _takes_key(function: Callable[..., Any]) -> bool:
    """Whether a third argument is to be the turn's key, not an option with a default of its own."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    third = [one for one in parameters if one.kind in kinds][2:3]
    return any(one.default is one.empty or one.name == "key" for one in third)


def _late(seconds: float) -> str:
    return f"no reply within {seconds:g} s"


def read_answer(before: Any, result: Any) -> Answer:
    """Returns what the user's function returned as an answer, or how it is none.

    Args:
      before: the state that it was given.
    """
    match result:
        case (state, Reply() as reply):
            pass
        case _:
            expected = "respond must return (state, tim_jax.Reply)"
            return failed(before, "reply", f"{expected}, got {shown(result)}")
    try:
        with user_code("reading the reply"):  # whatever a type of the user's does
            content, reward = _read_content(reply.content), _reward(reply.reward)
            if not isinstance(reply.done, bool | np.bool_):
                raise InputError(f"done must be True or False, got {shown(reply.done)}")
            return Answer(pack(state), content, reward, bool(reply.done))
    except InputError as error:
        return failed(before, "reply", str(error))


def pack(state: Any) -> Packed:
    """Returns the pickle of a state.

    Raises:
      InputError: it has none, or a larger one than an episode may keep.
    """
    try:
        packed = Packed(pickle.dumps(state))
    except Exception as error:
        raise InputError(f"the state cannot be pickled: {described(error)}") from error
    if len(packed) > LARGEST_STATE:
        raise InputError(
            f"the state's pickle has {len(packed):,} bytes, at most {LARGEST_STATE:,} are allowed"
        )
    return packed


def _reward(value: Any) -> float:
    number = math.nan if isinstance(value, str | bytes) else float(value)
    if not abs(number) <= LARGEST:
        raise InputError(
            f"reward must be a finite number of at most {LARGEST:g} in size, got {shown(value)}"
        )
    return number


def _read_content(value: Any) -> Content:
    """Text, messages or token ids, of a size that is no slip."""
    if isinstance(value, str):
        return _text(value)
    items = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(items, list | tuple):
        raise InputError(f"content must be text, messages or tokens, got {shown(value)}")
    if len(items) > LONGEST:
        raise InputError(f"content has {len(items):,} tokens, at most {LONGEST:,} are allowed")
    if items and all(isinstance(item, Mapping | Message) for item in items):
        return _messages(items)
    if not all(isinstance(item, int | np.integer) and 0 <= item < 1 << 31 for item in items):
        raise InputError(f"content must be text, messages or tokens, got {shown(value)}")
    return [int(item) for item in items]


def _text(text: str) -> str:
    if len(text) > LONGEST:
        raise InputError(f"content has {len(text):,} characters, at most {LONGEST:,} are allowed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"content is no text: {described(error)}") from error
    return str(text)


def _messages(items: Sequence[Any]) -> list[Mapping[str, Any]]:
    messages: list[Mapping[str, Any]] = [
        asdict(item) if isinstance(item, Message) else dict(item) for item in items
    ]
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise InputError(f"a message needs a role and a content of text, got {shown(message)}")
    try:
        _text(json.dumps(messages, ensure_ascii=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"messages must be values of JSON: {described(error)}") from error
    return messages


class Guarded:
    """An environment that is a function of a file or module, in processes of its own.

    Each turn has `seconds` by the clock, from when a process begins with it. So a batch of n turns
    waits at most `seconds` times n / `workers`, rounded up, and some seconds for each process that
    has to be ended. Of a coroutine function, a process waits for `TOGETHER` turns at once. If it
    blocks they are asked again one by one, after one more limit.

    Attributes:
      roles, tools, reads_calls: as of `Here`.
    """

    def __init__(
        self, name: str, *, seconds: float = SECONDS, workers: int = WORKERS, memory: float = MEMORY
    ) -> None:
        """Starts the first process and imports the function, written as for `load_respond`.

        Args:
          memory: GiB of a process's address space.

        Raises:
          InputError: it cannot be imported, or its import ends the process.
        """
        self._label = f"environment {name!r}"
        self._limits = Limits(seconds, round(memory * 2**30), workers)
        kind = f"{__name__}:{TurnsHere.__name__}"
        self._pool = Pool(kind, self._label, self._limits, name=name, limit=seconds)
        self.close = self._pool.close
        with self._refusing(), waiting.during(f"starting {self._label}"):
            self._together = TOGETHER if self._pool.about()["asynchronous"] else 1
        try:
            self._declare()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _refusing(self, more: str = "") -> Iterator[None]:
        try:
            yield
        except Refusal as refusal:
            raise InputError(f"{self._label}: {refusal}{more}") from None

    def _declare(self) -> None:
        [(_, outcome)] = self._pool.stream([None], seconds=START_SECONDS)
        found: Mapping[str, Any] = outcome.value or {
            "error": f"declaring its tools: {outcome.fault} {outcome.detail}"
        }
        if "error" in found:
            raise InputError(f"{self._label}: {found['error']}")
        self.roles: tuple[str, ...] = tuple(found["roles"])
        self.tools: tuple[Any, ...] = tuple(found["tools"])
        self.reads_calls: bool = found["reads_calls"]

    def answers(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Answer]]:
        """Yields (index in `turns`, answer) for each, in the order in which they are there."""
        bodies = [_pack_turn(turn) for turn in turns]
        workers = self._limits.workers
        others = f" (each of the {workers} processes of task.environment_workers imports it)"
        with self._refusing(others):
            for index, outcome in self._pool.stream(bodies, together=self._together):
                state = turns[index].state
                if outcome.fault is None:
                    yield index, _unpack_answer(state, outcome.value)
                elif outcome.fault == base.TIMEOUT:
                    what = f"{_late(self._limits.seconds)}{outcome.detail}"
                    yield index, failed(state, "time limit", what)
                else:
                    yield index, failed(state, "crash", f"it {outcome.detail}")


class TurnsHere:
    """What answers `Guarded` in its processes: turns -> (place, answer) for each."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._here = Here(load_respond(setup["name"]), setup["limit"], guarded=True)
        self.about = {"asynchronous": self._here.asynchronous}

    def __call__(self, bodies: Sequence[str | None]) -> Iterator[tuple[int, Any]]:
        if bodies == [None]:
            yield 0, self._declared()
            return
        turns = [pickle.loads(base64.b64decode(body)) for body in bodies if body is not None]
        for place, answer in self._here.answers(turns):
            state = None if answer.failure else base64.b64encode(answer.state).decode()
            yield place, (state, answer.content, answer.reward, answer.done, answer.failure)

    def _declared(self) -> Mapping[str, Any]:
        try:
            return {name: getattr(self._here, name) for name in ("roles", "tools", "reads_calls")}
        except InputError as error:
            return {"error": str(error)}


def _pack_turn(turn: Turn) -> str:
    state = turn.state if isinstance(turn.state, Packed) else pack(turn.state)
    sent = replace(turn, state=state, key=np.asarray(turn.key, np.uint32), asked=None)
    return base64.b64encode(pickle.dumps(sent)).decode()


def _unpack_answer(before: Any, value: Any) -> Answer:
    """What a process says, which is no pickle: the user's code may have written it."""
    state, content, reward, done, failure = value
    if failure is not None:
        return Answer(before, done=True, failure=failure)
    return Answer(Packed(base64.b64decode(state)), content, reward, done)


# Asking an environment in tokens.


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
            if (failure := known.get(_render_key(turn))) is None:
                asked.append(index)
            else:
                yield index, Outcome(turn.state, np.zeros(0, np.int32), done=True, failure=failure)
        for place, outcome in self.environment.outcomes([turns[index] for index in asked]):
            if outcome.failure is not None:
                entry = {"turn": _render_key(turns[asked[place]]), "failure": outcome.failure}
                with writing(self.path), self.path.open("a", encoding="utf-8") as file:
                    file.write(f"\n{json.dumps(entry)}\n")
                    file.flush()
                    os.fsync(file.fileno())
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


def _render_key(turn: Turn) -> str:
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
        threading.Thread(target=self._run, daemon=True, name="environment").start()
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
        try:
            while (turns := self._asked.get()) is not None:
                rows = {index: row for index, (row, _) in enumerate(turns)}
                for index, outcome in self._environment.outcomes([turn for _, turn in turns]):
                    self._replies.put((rows.pop(index), outcome))
                if rows:
                    left = f"{len(rows)} of {len(turns)}"
                    raise RuntimeError(f"the environment left {left} turns unanswered")
        except BaseException as error:
            self._replies.put(error)


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
