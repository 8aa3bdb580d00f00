"""The process that `isolated` starts: calls a user's reward or task until its parent is gone.

A call that takes too long ends the process: a thread of the interpreter's own, which no code in
Python can hold up, writes where the code was and exits.
"""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

from tim_jax.common.errors import InputError
from tim_jax.tasks.base import Example
from tim_jax.tasks.custom import as_grader, described, load_function, make_task, plain
from tim_jax.tasks.isolated import ALL, HEAD, as_prompt

Note = Callable[[int], None]


class Watched(list):
    """A list that notes which of its items was read last, until all have been."""

    def __init__(self, items: list[Any], note: Note) -> None:
        super().__init__(items)
        self._note = note

    def __iter__(self) -> Iterator[Any]:
        for i, item in enumerate(super().__iter__()):
            self._note(i)
            yield item
        self._note(ALL)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            self._note(index % max(1, len(self)))
        return super().__getitem__(index)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(super().__iter__()),)


def main() -> None:
    """Runs the process on the socket and the notes file whose numbers are its last arguments."""
    link, notes = Connection(int(sys.argv[-2])), int(sys.argv[-1])
    # A scheduler may send SIGTERM to all processes of a job; the parent says when to end. Not
    # ignored, because programs that the reward starts would then ignore it too.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    try:
        with suppress(EOFError):  # the parent has gone
            serve(link, notes)
    except OSError:  # or the code has closed our files, which Python would complain about
        os._exit(1)


def serve(link: Connection, notes: int) -> None:
    """Makes what the first message says, then answers calls."""

    def note(place: int) -> None:
        with suppress(OSError):  # closed by the reward
            os.pwrite(notes, place.to_bytes(HEAD, "little", signed=True), 0)

    os.lseek(notes, HEAD, os.SEEK_SET)
    setup = json.loads(link.recv_bytes())

    def limited(make: Callable[[], Any]) -> bytes:
        faulthandler.dump_traceback_later(setup["seconds"], exit=True, file=notes)
        try:
            reply = {"value": make()}
            return json.dumps(reply).encode()
        except InputError as error:
            reply = {"refused": f"{error}"}
        except BaseException as error:
            reply = {"refused": f"{setup['label']} raised {described(error)}"}
        finally:
            faulthandler.cancel_dump_traceback_later()
        return json.dumps(reply).encode()

    made: list[_Answers] = []

    def start() -> Any:
        made.append({"reward": _Reward, "task": _Task}[setup["kind"]](setup, note))
        return made[0].about

    link.send_bytes(limited(start))
    while made:
        message = json.loads(link.recv_bytes())
        note(ALL)
        reply = limited(lambda: made[0].answer(message))  # noqa: B023
        sys.stdout.flush()
        link.send_bytes(reply)


class _Answers(Protocol):
    """What answers messages; `about` is the first reply."""

    about: Any

    def answer(self, message: Any) -> Any: ...


class _Reward:
    """Answers [prompts, completions, answers] with rewards."""

    about = None

    def __init__(self, setup: Mapping[str, Any], note: Note) -> None:
        function = load_function(setup["name"])

        def watched(*lists: list[Any]) -> Any:
            return function(*(Watched(items, note) for items in lists))

        self._grade = as_grader(watched, setup["name"])

    def answer(self, message: Any) -> list[float]:
        prompts, completions, answers = message
        examples = [Example(as_prompt(p), a) for p, a in zip(prompts, answers, strict=True)]
        return [grade.reward for grade in self._grade(examples, completions)]


class _Task:
    """Answers {"part", "rows"} with those examples, {"graded", "completions"} with grades."""

    def __init__(self, setup: Mapping[str, Any], note: Note) -> None:
        self._note = note
        self._task = task = make_task(setup["name"], setup["parameters"])
        sizes = {"train": len(task.train), "evaluation": len(task.evaluation)}
        self.about = {"name": str(task.name), "notes": [str(x) for x in task.notes], **sizes}

    def answer(self, message: Any) -> list[Any]:
        if "rows" in message:
            part = getattr(self._task, message["part"])
            return [
                [plain(e.prompt), e.answer, e.solution]
                for e in map(part.__getitem__, message["rows"])
            ]
        examples = [getattr(self._task, part)[row] for part, row in message["graded"]]
        completions = message["completions"]
        grades = self._task.grade(Watched(examples, self._note), Watched(completions, self._note))
        return [[float(grade.reward), grade.fault] for grade in grades]
