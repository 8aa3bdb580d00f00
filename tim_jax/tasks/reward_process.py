"""The process that `isolated` starts: calls a user's reward until its parent is gone.

A call that takes too long ends the process: a thread of the interpreter's own, which no code in
Python can hold up, writes where the code was and exits.
"""

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from tim_jax.errors import InputError
from tim_jax.tasks.base import Example, Grader, Message
from tim_jax.tasks.custom import as_grader, described, load_function
from tim_jax.tasks.isolated import ALL, HEAD

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
    with suppress(EOFError, OSError):  # the parent has gone
        serve(link, notes)


def serve(link: Connection, notes: int) -> None:
    """Imports what the first message names, then answers calls."""

    def note(place: int) -> None:
        with suppress(OSError):  # closed by the reward
            os.pwrite(notes, place.to_bytes(HEAD, "little", signed=True), 0)

    os.lseek(notes, HEAD, os.SEEK_SET)
    setup = json.loads(link.recv_bytes())

    def limited(make: Callable[[], Any]) -> dict[str, Any]:
        faulthandler.dump_traceback_later(setup["seconds"], exit=True, file=notes)
        try:
            return {"value": make()}
        except InputError as error:
            return {"refused": f"{error}"}
        except BaseException as error:
            return {"refused": f"reward {setup['name']} raised {described(error)}"}
        finally:
            faulthandler.cancel_dump_traceback_later()

    made: list[Grader] = []

    def load() -> None:
        function = load_function(setup["name"])

        def watched(*lists: list[Any]) -> Any:
            return function(*(Watched(items, note) for items in lists))

        made.append(as_grader(watched, setup["name"]))

    link.send_bytes(json.dumps(limited(load)).encode())
    while made:
        prompts, completions, answers = json.loads(link.recv_bytes())
        note(ALL)
        reply = limited(lambda: _rewards(made[0], prompts, completions, answers))  # noqa: B023
        sys.stdout.flush()
        link.send_bytes(json.dumps(reply).encode())


def _rewards(grade: Grader, prompts: list[Any], completions: list[str], answers: list[str]):
    examples = [Example(_prompt(p), a) for p, a in zip(prompts, answers, strict=True)]
    return [grade.reward for grade in grade(examples, completions)]


def _prompt(prompt: Any) -> str | tuple[Message, ...]:
    return prompt if isinstance(prompt, str) else tuple(Message(**message) for message in prompt)
