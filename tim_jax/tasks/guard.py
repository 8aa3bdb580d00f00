"""Processes of their own for code that may hang, crash or take too much, with limits per request.

Each is a fresh interpreter that runs `worker.py` as a script: no fork of a threaded process, no
second import of the program's main module. They end with the program, however that ends: when the
parent is gone, a worker reads the end of its socket.

`Pool` has several, for graders of other libraries, without JAX, or for an environment of the
user's. A request over its limit ends its process, which is replaced; other requests are not
affected. A request whose process died in another way is tried once more.

`Isolated` is one process for code of the user's, with a limit by the clock. Whatever the code does
there (it hangs, exits, crashes, closes files) ends that process and not the run, which says in one
line what happened, and at which completion. What it prints is shown, and what it keeps in its
module stays from call to call.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, BinaryIO

from tim_jax.common import waiting
from tim_jax.common.errors import InputError, writing
from tim_jax.common.inputs import shown
from tim_jax.tasks.base import ERROR, TIMEOUT, Fault
from tim_jax.tasks.sandbox import ONE_THREAD
from tim_jax.tasks.worker import ALL, HEAD

WORKER = Path(__file__).with_name("worker.py")
PACKAGE = str(Path(__file__).parent.parent)
START_SECONDS = 120.0  # importing the grading library on a busy machine
CLOCK_FACTOR, CLOCK_EXTRA = 10.0, 10.0  # seconds by the clock allowed for CPU seconds
GRACE_SECONDS = 5.0  # after a limit by the clock, at which a process ends itself, until it is ended
END_SECONDS = 5.0  # between the end of a grader's socket and its exit code
CLOSE_SECONDS = 1.0  # for the user's code to end by itself
LARGEST_REPLY = 1 << 28  # bytes; a longer one is nonsense that the code wrote into the socket
STARTS = 3  # attempts in a row before a worker that dies while starting is given up

# Sets of strings in one order, so that every worker gives one answer.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

Calls = tuple[Sequence[Any], Sequence[str]]  # prompts, completions


@dataclass(frozen=True)
class Limits:
    """What one request may use.

    `seconds` are CPU seconds of a grader, so that a loaded machine does not change grades; one that
    sleeps is ended by the clock, much later. For code of the user's they are by the clock.
    `memory` is a process's address space in bytes, `workers` the number of processes.
    """

    seconds: float = 5.0
    memory: int = 4 << 30
    workers: int = field(default_factory=lambda: max(1, min(8, (os.cpu_count() or 2) // 2)))

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise InputError(f"limits: seconds must be above 0, got {self.seconds}")
        if self.workers < 1:
            raise InputError(f"limits: workers must be at least 1, got {self.workers}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request's value, or its fault: `timeout`, or `error` with what happened in `detail`."""

    value: Any = None
    fault: Fault | None = None
    detail: str = ""


class Refusal(Exception):
    """A worker refused its setup; `reply` says why."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        super().__init__(reply["error"] or reply["type"])
        self.reply = reply


@dataclass
class _Call:
    """Requests that are carried out together."""

    seconds: float  # limit of one, as its worker counts it
    clock_seconds: float  # after which the worker is ended from here
    threads: ThreadPoolExecutor  # each waits for a worker
    outcomes: SimpleQueue[tuple[int, Outcome] | BaseException]
    tasks: list[Future[None]] = field(default_factory=list)
    left: bool = False  # nobody waits for what has not begun


class Pool:
    """Processes of one kind, which answer requests side by side.

    They start when first needed, or by `start`. They end by `close`, with this object or with the
    program; a later request starts others.
    """

    def __init__(self, kind: str, label: str, limits: Limits, **setup: Any) -> None:
        """Starts nothing yet.

        Args:
          kind: what answers. A grader of `worker` takes a request. Code of the user's is a function
            written `module:function`; what it makes of `setup` answers a list of requests with an
            iterator over (place in the list, value), in any order.
          label: what it is called in messages.
        """
        self.limits, self._label, self._users = limits, label, ":" in kind
        seconds, patience = (START_SECONDS, GRACE_SECONDS) if self._users else (0, 0.0)
        whole = {"kind": kind, "memory": limits.memory, "seconds": seconds, "body": setup}
        default = str if self._users else None  # dates of TOML
        text = json.dumps({**whole, "path": sys.path}, default=default)
        self._make = partial(_Worker, text, START_SECONDS + patience, quiet=not self._users)
        self._workers: list[_Worker] = []  # that are idle or starting
        self._busy: set[_Worker] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._stopped = False
        self._turn, self._mapping = Lock(), Lock()

    def start(self) -> None:
        """Starts the workers without waiting, so that they import while other work goes on."""
        with self._mapping:
            while len(self._workers) < self.limits.workers:
                self._workers.append(self._make())

    def about(self) -> Any:
        """What the handler says of itself, once a process has started.

        Raises:
          Refusal: it refuses its setup.
          InputError: processes end while they start, or take too long, again and again.
        """
        worker = self._ready(fresh=False)
        self._free(worker)
        return (worker.started or {}).get("value")

    def close(self) -> None:
        """Ends the processes."""
        with self._mapping:
            self._end()

    def map(self, bodies: Sequence[Any], *, seconds: float | None = None) -> list[Outcome]:
        """Returns one outcome per request, in order. Equal requests are carried out once.

        May be called from any thread; calls run one by one.

        Args:
          seconds: in place of the usual limit.

        Raises:
          Refusal, InputError: as `about`.
        """
        texts = [json.dumps(body) for body in bodies]
        different = dict(zip(texts, bodies, strict=True))
        with self._mapping:
            found = dict(self.stream([*different.values()], seconds=seconds))
        outcomes = {text: found[index] for index, text in enumerate(different)}
        return [outcomes[text] for text in texts]

    def stream(
        self, bodies: Sequence[Any], *, together: int = 1, seconds: float | None = None
    ) -> Iterator[tuple[int, Outcome]]:
        """Yields (index, outcome) for each request, as soon as it is there.

        The processes go on while the caller is at something else. What a caller leaves is not
        begun.

        Args:
          together: this many requests are given to a process at once. With more than one, the
            handler watches the limit of each.
          seconds: in place of the usual limit.

        Raises:
          Refusal, InputError: as `about`.
        """
        self._threads = self._threads or ThreadPoolExecutor(self.limits.workers)
        limit = seconds or self.limits.seconds
        if self._users:
            limit += GRACE_SECONDS / 2 if together > 1 else 0.0
            clock_seconds = limit + GRACE_SECONDS
        else:
            clock_seconds = CLOCK_FACTOR * limit + CLOCK_EXTRA
        call = _Call(limit, clock_seconds, self._threads, SimpleQueue())
        numbered = list(enumerate(bodies))
        try:
            for start in range(0, len(numbered), together):
                self._begin(call, dict(numbered[start : start + together]))
            for _ in bodies:
                outcome = call.outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        except GeneratorExit:
            raise
        except BaseException:  # an interrupt must not wait for a process that hangs
            self._end()
            raise
        finally:
            call.left = True
            for task in tuple(call.tasks):
                task.cancel()

    def _begin(self, call: _Call, bodies: dict[int, Any]) -> None:
        if not call.left:
            call.tasks.append(call.threads.submit(self._serve, call, bodies))

    def _serve(self, call: _Call, bodies: dict[int, Any]) -> None:
        """Puts the outcomes of requests there, by number."""
        try:
            end = self._ask(call, bodies, fresh=False)
            if len(bodies) > 1:  # one of them ended the process: each has one of its own
                for index in tuple(bodies):
                    self._begin(call, {index: bodies.pop(index)})
            elif bodies and end.fault == ERROR:
                # It may have been killed from outside, perhaps for the machine's memory.
                end = self._ask(call, bodies, fresh=True)
            for index in bodies:
                call.outcomes.put((index, end))
        except BaseException as error:
            call.outcomes.put(error)

    def _ask(self, call: _Call, bodies: dict[int, Any], *, fresh: bool) -> Outcome:
        """Has a process answer requests, and takes those answered away; how it ended if not all."""
        worker, order = self._ready(fresh=fresh), list(bodies)
        body = list(bodies.values()) if self._users else bodies[order[0]]
        worker.send(json.dumps({"seconds": call.seconds, "body": body}), call.clock_seconds)
        while bodies:
            try:
                place, outcome = self._read(worker.hear(last=len(bodies) == 1) or {})
                del bodies[order[place]]
            except (KeyError, TypeError, ValueError, IndexError):  # it has ended, or sent nonsense
                self._busy.discard(worker)
                return _ended(worker)
            if not bodies:
                self._free(worker)
            call.outcomes.put((order[place], outcome))
        return Outcome()

    def _read(self, reply: Mapping[str, Any]) -> tuple[int, Outcome]:
        """The place of the request that a reply is to, and its outcome."""
        if self._users:
            place, value = reply["value"]
            return place, Outcome(value)
        if "error" in reply:
            return 0, Outcome(None, ERROR, f"{reply['type']}: {reply['error']}"[:500])
        return 0, Outcome(reply["value"])

    def _ready(self, *, fresh: bool) -> "_Worker":
        """A worker that has started, for one request; `fresh`: a new one. Errors as of `about`."""
        end = ""
        for _ in range(STARTS):
            with self._turn:
                if self._stopped:
                    raise CancelledError
                idle = self._workers and not fresh
                worker = self._workers.pop() if idle else self._make()
                self._busy.add(worker)
            reply = worker.started or worker.hear()
            if reply is not None and "error" in reply:
                raise Refusal(reply)
            if reply is not None:
                worker.started = reply
                return worker
            self._busy.discard(worker)
            late = worker.late or bool(worker.notes()[1])
            code, fresh = worker.end(END_SECONDS), True
            end = f"took longer than {START_SECONDS:g} s" if late else f"ended with code {code}"
        raise InputError(
            f"{self._label}: {STARTS} processes in a row did not start; the last one {end}"
        )

    def _free(self, worker: "_Worker") -> None:
        """Takes back a worker that has answered."""
        self._busy.discard(worker)
        self._workers.append(worker)

    def _end(self) -> None:
        """Ends the threads of calls that are given up, and all workers."""
        threads, self._threads = self._threads, None
        if threads is not None:  # else another thread is ending them already
            with self._turn:
                self._stopped = True
            for worker in tuple(self._busy):
                worker.kill()  # so that its thread hears of it
            threads.shutdown(cancel_futures=True)
            self._stopped = False
        for worker in (*self._workers, *self._busy):
            worker.end()
        self._workers.clear()
        self._busy.clear()


def _ended(worker: "_Worker") -> Outcome:
    """Ends a worker that gave no answer, and the programs it has started; says what it did."""
    (_, stack), late = worker.notes(), worker.late
    code = worker.end(END_SECONDS if worker.quiet else CLOSE_SECONDS)
    with suppress(OSError):
        os.killpg(worker.pid, signal.SIGKILL)
    if stack or late or (worker.quiet and code == -signal.SIGPROF):
        return Outcome(None, TIMEOUT, stack)
    if worker.forced:  # it hangs, but nothing can be heard of it
        return Outcome(None, ERROR, "closed its files and went on, or wrote into them")
    if code < 0:
        return Outcome(None, ERROR, f"was killed by signal {-code}")
    return Outcome(None, ERROR, f"ended its process (exit status {code}) or closed its files")


class Isolated:
    """Code of the user's in a process of its own, which ends and starts again as those of `Pool`.

    Attributes:
      label: what the code is called in messages, such as `reward rewards:brief`.
      seconds: limit of a call by the clock, and of the start.
      made: the handler's `about`, of the last start.
    """

    def __init__(self, handler: str, label: str, *, seconds: float, **setup: Any) -> None:
        """Starts the process, in which the function `handler` makes what answers the calls.

        Args:
          handler: written `module:function`; it is given `setup`, with `notes` for `Watched`.

        Raises:
          InputError: as the handler does, or that it ends the process or takes too long.
        """
        self.label, self.seconds, self._patience = label, seconds, seconds + GRACE_SECONDS
        self._setup = {"kind": handler, "memory": None, "seconds": seconds, "body": setup}
        self._worker: _Worker | None = None
        self._start()

    def call(self, body: Any, *, doing: str = "a call", of: Calls | None = None) -> Any:
        """Returns the handler's answer.

        Args:
          doing: what the call is called in errors.
          of: the prompts and completions that it is about.

        Raises:
          InputError: the code raises, takes longer than the limit, or ends its process.
        """
        worker = self._worker or self._start()
        request = json.dumps({"seconds": self.seconds, "body": body})
        return self._reply(worker, request, doing, of)

    def close(self) -> None:
        """Ends the process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end(CLOSE_SECONDS)

    def _start(self) -> "_Worker":
        setup = json.dumps({**self._setup, "path": sys.path}, default=str)  # dates of TOML
        self._worker = worker = _Worker(setup, self._patience, quiet=False)
        self.made = self._reply(worker, None, "importing it", None)
        return worker

    def _reply(self, worker: "_Worker", request: str | None, doing: str, of: Calls | None) -> Any:
        limit = f"at most task.reward_time_limit, {self.seconds:g} s"
        try:
            with waiting.during(f"waiting for {self.label}: {doing}", about=limit):
                if request is not None:
                    worker.send(request, self._patience)
                reply = worker.hear()
            if reply is None:
                raise InputError(f"{self.label}: {doing} {self._end_of(worker, of)}")
            if "value" in reply:
                return reply["value"]
            if reply["type"] == InputError.__name__:
                raise InputError(reply["error"])
            first = reply["error"].strip().splitlines()[:1]
            raise InputError(f"{self.label} raised {': '.join([reply['type'], *first])}")
        except BaseException:  # an interrupt must not leave a reply for the next call
            self.close()
            raise

    def _end_of(self, worker: "_Worker", of: Calls | None) -> str:
        """Ends a worker that gave no answer, and says what it did and at which completion."""
        place, _ = worker.notes()
        end = _ended(worker)
        what = end.detail
        if end.fault == TIMEOUT:
            what = f"took longer than task.reward_time_limit = {self.seconds:g} s{end.detail}"
        if of is None:
            return what
        prompts, texts = of
        if not 0 <= place < len(texts):
            return f"{what}; {len(texts)} completions, the first for prompt {shown(prompts[0])}"
        prompt, text = shown(prompts[place]), shown(texts[place])
        return f"{what}; at {place}: prompt {prompt}, completion {text}"


class _Worker:
    """One process, and the reply to its setup once it has started."""

    def __init__(self, setup: str, seconds: float, *, quiet: bool = True) -> None:
        """Starts it, to be late after `seconds`; `quiet`: without output, and in one thread."""
        self.started: dict[str, Any] | None = None
        self.quiet = quiet
        self.forced = False  # ended by `end`
        self._link, theirs = Pipe()
        with writing(f"to {tempfile.gettempdir()}, the folder of temporary files"):
            self._notes = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `_end`)
            self._notes.write(ALL.to_bytes(HEAD, "little", signed=True))
            self._notes.flush()  # a stack comes after it
        fds = theirs.fileno(), self._notes.fileno()
        output = subprocess.DEVNULL if quiet else None
        with theirs:
            self._process = subprocess.Popen(
                # -P: a script's folder must not come first among the places to import from.
                [sys.executable, "-P", str(WORKER), *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **ENVIRONMENT, **(ONE_THREAD if quiet else {})},
                start_new_session=True,  # Ctrl-C is for the parent, which then ends its workers
            )
        self.kill, self.pid = self._process.kill, self._process.pid
        self._finalizer = weakref.finalize(self, _end, self._link, self._process, self._notes)
        self.send(setup, seconds)

    @property
    def late(self) -> bool:
        return time.monotonic() >= self._deadline

    def send(self, request: str, seconds: float) -> None:
        """Sends a request, to be answered within `seconds`."""
        self._deadline = time.monotonic() + seconds
        with suppress(OSError):  # if it has died, the end of its socket says so
            self._link.send_bytes(request.encode())

    def hear(self, *, last: bool = True) -> dict[str, Any] | None:
        """A reply, `last` to its request; None if the process is late, dead or says nonsense."""
        try:
            if not self._link.poll(max(0.0, self._deadline - time.monotonic())):
                return None
            reply = json.loads(self._link.recv_bytes(LARGEST_REPLY))
        except (EOFError, OSError, ValueError):
            return None
        if last:
            self._deadline = math.inf
        return reply if isinstance(reply, dict) else None

    def notes(self) -> tuple[int, str]:
        """The completion that was read last, and where the code was when its time was over."""
        text = os.pread(self._notes.fileno(), 1 << 16, 0)
        place = int.from_bytes(text[:HEAD], "little", signed=True)
        return place, _innermost(text[HEAD:].decode(errors="replace"))

    def end(self, patience: float = 0.0) -> int:
        """Ends the process, by force after `patience` s, at once if it is late; its exit code."""
        self._link.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self.late else patience)
        self.forced = self._process.returncode is None
        self._finalizer()
        return self._process.returncode


def _end(link: Connection, process: subprocess.Popen, notes: BinaryIO) -> None:
    link.close()
    notes.close()
    process.kill()
    process.wait()


def _innermost(stack: str) -> str:
    """The first line of the threads' stacks that is no library's, as `, in FILE, line N`."""
    # The main thread's comes first. It stands last in what is written.
    threads = reversed(stack.split("most recent call first")[1:])
    lines = [line.strip() for thread in threads for line in thread.splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    inside = [line for line in files if "lib/python" not in line and PACKAGE not in line]
    if not files:
        return ""
    file, _, line = (inside or files)[0].removeprefix("File ").partition(", line ")
    return f", in {file.strip(chr(34))}, line {line.partition(' ')[0]}"
