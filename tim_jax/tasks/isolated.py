"""A user's reward or task in a process of its own, with a time limit.

Whatever the function does there (it hangs, exits, crashes, closes files) ends that process and not
the run, which says in one line what happened, and at which completion. What it prints is shown, and
what it keeps in its module stays from call to call, because one process makes all calls in order.
"""

import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.tasks import guard
from tim_jax.tasks.base import Example, Grade, Lazy, Message, Task
from tim_jax.tasks.custom import plain

GRACE_SECONDS = 5.0  # after the limit, at which the process ends itself, until it is ended
END_SECONDS = 1.0  # for the process to end by itself
ALL = -1  # in place of the completion that was read last: the function has read all, or none
HEAD = 8  # bytes of the notes file for the number of that completion; a stack follows
PACKAGE = str(Path(__file__).parent.parent)
# The process imports from where this one does, whatever changed that.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {0} import main; main()"
_LABELS = {"reward": "reward", "task": "task.factory"}
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


Calls = tuple[Sequence[Any], Sequence[str]]  # prompts, completions


class Isolated:
    """Code of the user's in a process of its own, which makes all calls in order.

    The process ends by `close`, with this object or with the program; a later call starts another.

    Attributes:
      label: what the code is called in messages, such as `reward rewards:brief`.
      seconds: limit of a call by the clock, and of the start.
      made: what the start gave, see `reward_process`.
    """

    def __init__(self, kind: str, name: str, *, seconds: float, **setup: Any) -> None:
        """Starts the process: imports `name`, written `module:function`, and for a task makes it.

        Raises:
          InputError: as `custom.load_function`, or that ends the process or takes too long.
        """
        self.label, self.seconds = f"{_LABELS[kind]} {name}", seconds
        self._setup = {"kind": kind, "name": name, "label": self.label, "seconds": seconds, **setup}
        self._process: _Process | None = None
        self.made = self._ready()[1]

    def call(self, message: Any, *, doing: str = "a call", of: Calls | None = None) -> Any:
        """Returns the reply to a message.

        Args:
          doing: what it is called in errors.
          of: the prompts and completions that it is about.

        Raises:
          InputError: the code raises, takes longer than the limit, or ends its process.
        """
        process, _ = self._ready()
        try:
            return self._reply(process, message, doing, of)
        except BaseException:  # an interrupt must not leave a reply for the next call
            self.close()
            raise

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _ready(self) -> "tuple[_Process, Any]":
        """The process, and what it made if it was started now."""
        if self._process is not None:
            return self._process, None
        self._process = process = _Process()
        try:
            return process, self._reply(process, self._setup, "importing it", None)
        except BaseException:
            self.close()
            raise

    def _reply(self, process: "_Process", message: Any, doing: str, of: Calls | None) -> Any:
        with suppress(OSError):  # if it has died, the end of its reply says so
            process.link.send_bytes(json.dumps(message, default=str).encode())  # dates of TOML
        limit = f"at most task.reward_time_limit, {self.seconds:g} s"
        with waiting.during(f"waiting for {self.label}: {doing}", about=limit):
            reply = process.receive() if process.heard(self.seconds + GRACE_SECONDS) else None
        if reply is not None and "value" in reply:
            return reply["value"]
        if reply is not None:
            raise InputError(str(reply.get("refused")))
        place, stack = process.notes()
        code = process.end()
        if stack or code is None:
            what = f"took longer than task.reward_time_limit = {self.seconds:g} s{stack}"
        elif code < 0:
            what = f"was killed by signal {-code}"
        else:
            what = f"ended its process (exit status {code}) or closed its files"
        raise InputError(f"{self.label}: {doing} {what}{_named(of, place)}")


class IsolatedReward:
    """The grader that calls the function `name`, written `module:function`, in its own process.

    It is called as `custom.load_reward` says.
    """

    def __init__(self, name: str, *, seconds: float) -> None:
        """Starts the process and imports the function; arguments and errors as of `Isolated`."""
        self._there = Isolated("reward", name, seconds=seconds)

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        """Returns the rewards as grades.

        Raises:
          InputError: the function raises, returns anything but as many finite numbers, takes longer
            than the limit, or ends its process.
        """
        prompts, texts = [plain(example.prompt) for example in examples], list(completions)
        answers = [example.answer for example in examples]
        values = self._there.call([prompts, texts, answers], of=(prompts, texts))
        return [Grade(value) for value in values]

    def close(self) -> None:
        """Ends the process."""
        self._there.close()


def isolated_task(factory: str, parameters: Mapping[str, Any], *, seconds: float) -> Task:
    """Returns the task that `custom.make_task` makes, in a process of its own.

    The examples stay there: here they have prompt, answer and solution, and their `data` says which
    of them they are.

    Args:
      seconds: limit by the clock of making it, and of each call of its grader.

    Raises:
      InputError: as `custom.make_task`, or the code takes too long or ends its process; so when
        made, when examples are read, and when grading.
    """
    there = Isolated("task", factory, seconds=seconds, parameters=dict(parameters))
    train, evaluation = (_There(there, part, there.made[part]) for part in ("train", "evaluation"))
    notes = tuple(there.made["notes"])
    return Task(there.made["name"], train, evaluation, _GraderThere(there), notes)


@dataclass(frozen=True)
class _There(Lazy):
    """The examples of a part of a task in another process."""

    there: Isolated
    part: str
    size: int
    at_a_time: ClassVar[int] = 256

    def made(self, rows: Sequence[int]) -> list[Example]:
        doing = f"making its {self.part} examples"
        found = self.there.call({"part": self.part, "rows": list(rows)}, doing=doing)
        return [
            Example(as_prompt(prompt), answer, {"part": self.part, "row": row}, solution)
            for row, (prompt, answer, solution) in zip(rows, found, strict=True)
        ]

    def close(self) -> None:
        self.there.close()


@dataclass(frozen=True)
class _GraderThere:
    """The grader of a task in another process."""

    there: Isolated

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        rows = [[example.data["part"], example.data["row"]] for example in examples]
        message = {"graded": rows, "completions": list(completions)}
        of = [plain(example.prompt) for example in examples], list(completions)
        return [Grade(*grade) for grade in self.there.call(message, doing="its grader", of=of)]

    def close(self) -> None:
        self.there.close()


def as_prompt(prompt: Any) -> str | tuple[Message, ...]:
    """A prompt of what `custom.plain` made of it."""
    return prompt if isinstance(prompt, str) else tuple(Message(**message) for message in prompt)


def _named(of: Calls | None, place: int) -> str:
    """The completion that the function read last, or the first of them all."""
    if of is None:
        return ""
    prompts, completions = of
    if not 0 <= place < len(completions):
        return f"; {len(completions)} completions, the first for prompt {shown(prompts[0])}"
    return f"; at {place}: prompt {shown(prompts[place])}, completion {shown(completions[place])}"


class _Process:
    """The process, its socket, and the file in which it notes where it is."""

    def __init__(self) -> None:
        self.link, theirs = Pipe()
        self._notes = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `_end`)
        self._notes.write(ALL.to_bytes(HEAD, "little", signed=True))
        self._notes.flush()
        fds = theirs.fileno(), self._notes.fileno()
        start = _START.format("tim_jax.tasks.reward_process")
        with theirs:
            self._child = guard.spawn(
                ["-c", start, json.dumps(sys.path), *map(str, fds)],
                environment=_ENVIRONMENT,
                pass_fds=fds,
            )
        self._finalizer = weakref.finalize(self, _end, self.link, self._child, self._notes)

    def heard(self, seconds: float) -> bool:
        return self.link.poll(seconds)

    def receive(self) -> dict[str, Any] | None:
        """A reply, or None if the process is gone."""
        try:
            return json.loads(self.link.recv_bytes())
        except (EOFError, OSError, ValueError):
            return None

    def notes(self) -> tuple[int, str]:
        """The completion that was read last, and where the code was when its time was over."""
        text = os.pread(self._notes.fileno(), 1 << 16, 0)
        place = int.from_bytes(text[:HEAD], "little", signed=True)
        return place, _innermost(text[HEAD:].decode(errors="replace"))

    def end(self) -> int | None:
        """Ends it. Returns its exit status, -n for signal n, or None if it had to be ended."""
        self.link.close()
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._child.wait(END_SECONDS)
        self._finalizer()
        return code


def _end(link: Connection, child: subprocess.Popen, notes: BinaryIO) -> None:
    link.close()
    notes.close()
    child.kill()
    child.wait()


def _innermost(stack: str) -> str:
    """The first line of the main thread's stack that is no library's, as `, in FILE, line N`."""
    own = [line for line in stack.rpartition("most recent call first")[2].splitlines() if line]
    files = [line.strip() for line in own if line.lstrip().startswith("File ")]
    inside = [line for line in files if "lib/python" not in line and PACKAGE not in line]
    if not files:
        return ""
    file, _, line = (inside or files)[0].removeprefix("File ").partition(", line ")
    return f", in {file.strip(chr(34))}, line {line.partition(' ')[0]}"
