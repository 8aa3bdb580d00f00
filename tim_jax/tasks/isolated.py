"""A user's reward in a process of its own, with a time limit.

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
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, BinaryIO

from tim_jax.errors import InputError
from tim_jax.inputs import shown
from tim_jax.tasks import guard
from tim_jax.tasks.base import Example, Grade
from tim_jax.tasks.custom import plain

SILENT_SECONDS = 30.0  # a longer wait says what it waits for
GRACE_SECONDS = 5.0  # after the limit, at which the process ends itself, until it is ended
END_SECONDS = 1.0  # for the process to end by itself
ALL = -1  # in place of the completion that was read last: the function has read all, or none
HEAD = 8  # bytes of the notes file for the number of that completion; a stack follows
PACKAGE = str(Path(__file__).parent.parent)
# The process imports from where this one does, whatever changed that.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {0} import main; main()"
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class IsolatedReward:
    """The grader that calls the function `name`, written `module:function`, in its own process.

    It is called as `custom.load_reward` says. The process ends by `close`, with this object or with
    the program; a later call starts another.

    Attributes:
      name: `module:function`.
      seconds: limit of a call by the clock, and of the import.
    """

    def __init__(self, name: str, *, seconds: float) -> None:
        """Starts the process and imports the function.

        Raises:
          InputError: as `custom.load_function`, or the import ends the process or takes too long.
        """
        self.name, self.seconds = name, seconds
        self._process: _Process | None = None
        self._ready()

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        """Returns the rewards as grades.

        Raises:
          InputError: the function raises, returns anything but as many finite numbers, takes longer
            than the limit, or ends its process.
        """
        prompts = [plain(example.prompt) for example in examples]
        request = [prompts, list(completions), [example.answer for example in examples]]
        process = self._ready()
        try:
            return [Grade(value) for value in self._reply(process, request, request)]
        except BaseException:  # an interrupt must not leave a reply for the next call
            self.close()
            raise

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _ready(self) -> "_Process":
        if self._process is None:
            self._process = _Process()
            try:
                setup = {"name": self.name, "seconds": self.seconds}
                self._reply(self._process, setup, None)
            except BaseException:
                self.close()
                raise
        return self._process

    def _reply(self, process: "_Process", message: Any, request: list[Any] | None) -> Any:
        """Sends a message; returns the value of the reply. `request`: None while importing."""
        with suppress(OSError):  # if it has died, the end of its reply says so
            process.link.send_bytes(json.dumps(message).encode())
        doing = "importing it" if request is None else "a call"
        if not process.heard(min(SILENT_SECONDS, self.seconds)) and self.seconds > SILENT_SECONDS:
            print(
                f"tim-jax: waiting for reward {self.name}: {doing} takes more than"
                f" {SILENT_SECONDS:g} s (at most task.reward_time_limit, {self.seconds:g} s)",
                file=sys.stderr,
            )
            process.heard(self.seconds - SILENT_SECONDS)
        reply = process.receive() if process.heard(GRACE_SECONDS) else None
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
        raise InputError(f"reward {self.name}: {doing} {what}{_named(request, place)}")


def _named(request: list[Any] | None, place: int) -> str:
    """The completion that the function read last, or the first of them all."""
    if request is None:
        return ""
    prompts, completions, _ = request
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
