"""A user's environment: the function `respond`, called here or in guarded processes.

    def respond(state, completion):
        return state, tim_jax.Reply("text, messages or tokens", reward=0.0, done=False)

`Here` calls it in this process, as the API does with a function; `Guarded` in processes of its own,
as a config does with a name. Both give it a copy of the state, and what it returns is looked at in
one way. What goes wrong is an answer with a `failure` (`episodes`), never an exception.

`respond` may take a third argument, the turn's key, and it may be a coroutine (`async def`). Then
the turns of a batch wait side by side, each up to its limit.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.tasks.base import TIMEOUT, Message
from tim_jax.tasks.custom import LARGEST, described, load_function, user_code
from tim_jax.tasks.episodes import Answer, Completion, Content, Packed, Reply, Turn, failed
from tim_jax.tasks.guard import START_SECONDS, Crowd, Outcome, Refusal
from tim_jax.tasks.worker import end_if_forked

SECONDS = 30.0  # for one reply
LATER = 1.0  # seconds after its limit, in which a coroutine must end
WORKERS = 4
MEMORY = 8.0  # GiB of address space
TOGETHER = 64  # turns of a coroutine that one process waits for at once
LONGEST = 1 << 20  # characters, tokens or characters of messages in a reply
LARGEST_STATE = 16 << 20  # bytes of its pickle


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


class Responder:
    """The user's function, called in this process."""

    def __init__(self, function: Callable[..., Any], *, guarded: bool = False) -> None:
        """Makes one; `guarded` if somebody else ends this process when it hangs."""
        call = getattr(function, "__call__", None)  # noqa: B004 (of an object)
        self.asynchronous = any(map(inspect.iscoroutinefunction, (function, call)))
        self._function, self._takes_key = function, _takes_key(function)
        self._guarded = guarded
        self._loop: asyncio.AbstractEventLoop | None = None

    def answers(self, turns: Sequence[Turn], seconds: float) -> Iterator[tuple[int, Answer]]:
        """Yields (index in `turns`, answer), of coroutines in the order in which they are there.

        `seconds`: limit by the clock of one coroutine; a plain function has none here.
        """
        if not self.asynchronous:
            yield from ((index, self._answer(turn)) for index, turn in enumerate(turns))
            return
        loop = self._running()
        asked = {
            asyncio.run_coroutine_threadsafe(self._awaited(turn, seconds), loop): index
            for index, turn in enumerate(turns)
        }
        try:
            for done in as_completed(asked, None if self._guarded else seconds + LATER):
                yield asked.pop(done), done.result()
        except TimeoutError:  # one holds the loop, or does not end when it is told to
            self._loop = None
            for future, index in asked.items():
                yield (
                    index,
                    future.result() if future.done() else self._alone(turns, index, seconds),
                )

    def _alone(self, turns: Sequence[Turn], index: int, seconds: float) -> Answer:
        """The answer to a turn that was late together with others, or for which it was alone."""
        if len(turns) == 1:
            return failed(turns[index].state, "time limit", _late(seconds))
        [(_, answer)] = self.answers([turns[index]], seconds)
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

    async def _awaited(self, turn: Turn, seconds: float) -> Answer:
        limit, own = asyncio.timeout(seconds), os.getpid()
        try:
            async with limit:
                result = await self._call(turn)
        except BaseException as error:  # in a thread of its own, which must not end
            if limit.expired():
                return failed(turn.state, "time limit", _late(seconds))
            return failed(turn.state, "raised", described(error))
        finally:
            end_if_forked(own)
        return read_answer(turn.state, result)

    def _call(self, turn: Turn) -> Any:
        state = turn.state if isinstance(turn.state, Packed) else pickle.dumps(turn.state)
        key = (turn.key,) if self._takes_key else ()
        return self._function(pickle.loads(state), turn.completion, *key)

    def _running(self) -> asyncio.AbstractEventLoop:
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
            content = _read_content(reply.content)
            return Answer(pack(state), content, _reward(reply.reward), _done(reply.done))
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


def _done(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"done must be True or False, got {shown(value)}")
    return bool(value)


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


class Declared(NamedTuple):
    """What a function declares; without saying so it replies as a user. See `Answering`."""

    roles: tuple[str, ...]
    tools: tuple[Any, ...]
    reads_calls: bool


def _declared(function: Callable[..., Any]) -> Declared:
    """What a function declares by its attributes `roles`, `tools()` and `reads_calls`."""
    roles, tools = getattr(function, "roles", ("user",)), getattr(function, "tools", tuple)
    return Declared(tuple(roles), tuple(tools()), getattr(function, "reads_calls", False))


@dataclass(frozen=True)
class Here:
    """An environment that is a function of this process.

    It is called for one turn after another, and has no time limit. A coroutine function is called
    for all turns of a batch side by side, with `seconds` for each.
    """

    respond: Callable[..., Any]
    seconds: float = SECONDS

    @cached_property
    def _responder(self) -> Responder:
        return Responder(self.respond)

    @cached_property
    def _declared(self) -> Declared:
        return _declared(self.respond)

    @property
    def roles(self) -> tuple[str, ...]:
        """See `episodes.Answering`."""
        return self._declared.roles

    @property
    def tools(self) -> tuple[Any, ...]:
        """See `episodes.Answering`."""
        return self._declared.tools

    @property
    def reads_calls(self) -> bool:
        """See `episodes.Answering`."""
        return self._declared.reads_calls

    def answers(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Answer]]:
        """Yields (index in `turns`, answer) for each."""
        return self._responder.answers(turns, self.seconds)


class Guarded:
    """An environment that is a function of a file or module, in processes of its own.

    Each turn has `seconds` by the clock, from when a process begins with it. So a batch of n turns
    waits at most `seconds` times n / `workers`, rounded up, and some seconds for each process that
    has to be ended. Of a coroutine function, a process waits for `TOGETHER` turns at once. If it
    blocks they are asked again one by one, after one more limit.

    Attributes:
      roles, tools, reads_calls: what the function declares by attributes `roles`, `tools()` and
        `reads_calls`, see `episodes.Answering`.
    """

    def __init__(
        self,
        name: str,
        *,
        seconds: float = SECONDS,
        workers: int = WORKERS,
        memory: float = MEMORY,
    ) -> None:
        """Starts the first process and imports the function, written as for `load_respond`.

        Args:
          memory: GiB of a process's address space.

        Raises:
          InputError: it cannot be imported, or its import ends the process.
        """
        self._label = f"environment {name!r}"
        self._others = f" (each of the {workers} processes of task.environment_workers imports it)"
        with self._refusing(), waiting.during(f"starting {self._label}"):
            self._crowd = Crowd(
                f"{__name__}:{TurnsHere.__name__}",
                self._label,
                seconds=seconds,
                workers=workers,
                memory=round(memory * 2**30),
                name=name,
                limit=seconds,
            )
        try:
            self.roles, self.tools, self.reads_calls = self._declaration()
        except BaseException:
            self._crowd.close()
            raise
        self._together = TOGETHER if self._crowd.about["asynchronous"] else 1
        self.close = self._crowd.close

    @contextmanager
    def _refusing(self, more: str = "") -> Iterator[None]:
        try:
            yield
        except Refusal as refusal:
            raise InputError(f"{self._label}: {refusal}{more}") from None

    def _next(self, outcomes: Iterator[tuple[int, Outcome]]) -> tuple[int, Outcome] | None:
        with self._refusing(self._others):
            return next(outcomes, None)

    def _declaration(self) -> Declared:
        [(_, outcome)] = self._crowd.stream([None], seconds=START_SECONDS)
        found: Mapping[str, Any] = outcome.value or {
            "error": f"declaring its tools: {outcome.fault} {outcome.detail}"
        }
        if "error" in found:
            raise InputError(f"{self._label}: {found['error']}")
        return Declared(tuple(found["roles"]), tuple(found["tools"]), found["reads_calls"])

    def answers(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Answer]]:
        """Yields (index in `turns`, answer) for each, in the order in which they are there."""
        bodies = [_sent(turn) for turn in turns]
        outcomes = self._crowd.stream(bodies, together=self._together)
        while (found := self._next(outcomes)) is not None:
            index, outcome = found
            state = turns[index].state
            if outcome.fault is None:
                yield index, _received(state, outcome.value)
            elif outcome.fault == TIMEOUT:
                what = f"{_late(self._crowd.seconds)}{outcome.detail}"
                yield index, failed(state, "time limit", what)
            else:
                yield index, failed(state, "crash", f"it {outcome.detail}")


class TurnsHere:
    """What answers `Guarded` in its processes: turns -> (place, answer) for each."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._function = load_respond(setup["name"])
        self._responder = Responder(self._function, guarded=True)
        self._limit = setup["limit"]
        self.about = {"asynchronous": self._responder.asynchronous}

    def __call__(self, bodies: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Any]]:
        if bodies == [None]:
            yield 0, self._declared()
            return
        turns = [_turn(body) for body in bodies]
        for place, answer in self._responder.answers(turns, self._limit):
            state = None if answer.failure else base64.b64encode(answer.state).decode()
            yield place, (state, answer.content, answer.reward, answer.done, answer.failure)

    def _declared(self) -> Mapping[str, Any]:
        try:
            return _declared(self._function)._asdict()
        except InputError as error:
            return {"error": str(error)}


def _sent(turn: Turn) -> Mapping[str, Any]:
    state, said = turn.state, turn.completion
    others = bool(said.ended), said.message, said.thinking
    return {
        "state": base64.b64encode(state if isinstance(state, Packed) else pack(state)).decode(),
        "completion": [said.text, said.tokens.tolist(), *others],
        "key": turn.key.tolist(),
        "which": [turn.prompt, turn.sample, turn.turn],
    }


def _turn(body: Mapping[str, Any]) -> Turn:
    text, tokens, *others = body["completion"]
    completion = Completion(text, np.array(tokens, np.int32), *others)
    prompt, sample, turn = body["which"]
    state = Packed(base64.b64decode(body["state"]))
    return Turn(prompt, sample, turn, completion, state, np.array(body["key"], np.uint32))


def _received(before: Any, value: Any) -> Answer:
    state, content, reward, done, failure = value
    if failure is not None:
        return Answer(before, done=True, failure=failure)
    return Answer(Packed(base64.b64decode(state)), content, reward, done)
