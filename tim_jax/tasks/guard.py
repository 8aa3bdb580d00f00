"""Processes of their own for code that may hang, crash or take too much, with limits per request.

Each is a fresh interpreter that runs `worker.py` as a script: no fork of a threaded process, no
second import of the program's main module. They end with the program, however that ends: when the
parent is gone, a worker reads the end of its socket.

`Guard` is a pool for graders of other libraries, without JAX, with limits of CPU time and memory.
`Crowd` is a pool for an environment of the user's, with a limit by the clock. In both a request
over its limit ends its process, which is replaced; other requests are not affected. A request whose
process died in another way is tried once more.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock
from typing import Any, BinaryIO

from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.tasks.base import ERROR, TIMEOUT, Fault, Grade
from tim_jax.tasks.sandbox import ONE_THREAD
from tim_jax.tasks.worker import ALL, HEAD

WORKER = Path(__file__).with_name("worker.py")
PACKAGE = str(Path(__file__).parent.parent)
START_SECONDS = 120.0  # importing the grading library on a busy machine
CLOCK_FACTOR, CLOCK_EXTRA = 10.0, 10.0  # seconds by the clock allowed for CPU seconds
GRACE_SECONDS = 5.0  # after a limit by the clock, at which a process ends itself, until it is ended
END_SECONDS = 5.0  # between the end of a process's socket and its exit code
CLOSE_SECONDS = 1.0  # for the user's code to end by itself
LARGEST_REPLY = 1 << 28  # bytes; a longer one is nonsense that the code wrote into the socket
STARTS = 3  # attempts in a row before a worker that dies while starting is given up

# Sets of strings in one order, so that every worker gives one answer.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

Calls = tuple[Sequence[Any], Sequence[str]]  # prompts, completions


@dataclass(frozen=True)
class Limits:
    """What one request may use.

    `seconds` are CPU seconds of the worker, so that a loaded machine does not change grades; a
    worker that sleeps is ended by the clock, much later. `memory` is the worker's address space in
    bytes, `workers` the number of worker processes.
    """

    seconds: float = 5.0
    memory: int = 4 << 30
    workers: int = field(default_factory=lambda: max(1, min(8, (os.cpu_count() or 2) // 2)))

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise InputError(f"grading: seconds must be above 0, got {self.seconds}")
        if self.workers < 1:
            raise InputError(f"grading: workers must be at least 1, got {self.workers}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request's value, or its fault: `timeout`, or `error` with what was raised in `detail`."""

    value: Any = None
    fault: Fault | None = None
    detail: str = ""


def grade_of(outcome: Outcome) -> Grade:
    """Returns the grade for an outcome whose value is a reward. A fault has reward 0."""
    if outcome.fault is not None:
        return Grade(0.0, outcome.fault)
    return Grade(outcome.value) if math.isfinite(outcome.value) else Grade(0.0, ERROR)


class Refusal(Exception):
    """A worker refused its setup; `reply` says why."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        super().__init__(reply["error"] or reply["type"])
        self.reply = reply


class _Pool:
    """Workers of one kind: those that are idle or starting, and those that are at work."""

    def __init__(self, label: str, make: "Callable[[], _Worker]") -> None:
        self._label, self._make = label, make
        self._workers: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._stopped = False
        self._turn = Lock()

    def _ready(self, *, fresh: bool) -> "_Worker":
        """A worker that has started, for one request; `fresh`: a new one.

        Raises:
          Refusal: its handler refuses its setup.
          InputError: workers end while they start, or take too long, again and again.
        """
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

    def _stop(self, threads: ThreadPoolExecutor) -> None:
        """Ends the threads of a call that is given up, and all workers."""
        with self._turn:
            self._stopped = True
        for worker in tuple(self._busy):
            worker.kill()  # so that its thread hears of it
        threads.shutdown(cancel_futures=True)
        self._stopped = False
        self._end()

    def _end(self) -> None:
        for worker in (*self._workers, *self._busy):
            worker.end()
        self._workers.clear()
        self._busy.clear()


class Guard(_Pool):
    """A pool of workers of one kind. `map` may be called from any thread; calls run one by one.

    Workers start when first needed, or by `start`. They end by `close`, with the guard, or with the
    program.
    """

    def __init__(self, kind: str, setup: Mapping[str, Any], limits: Limits) -> None:
        whole = {"kind": kind, "memory": limits.memory, "seconds": 0, "body": setup}
        super().__init__(f"grading with {kind}", partial(_Worker, json.dumps(whole), START_SECONDS))
        self.limits = limits
        self._call = Lock()

    def start(self) -> None:
        """Starts the workers without waiting, so that they import while other work goes on."""
        with self._call:
            while len(self._workers) < self.limits.workers:
                self._workers.append(self._make())

    def close(self) -> None:
        """Ends the workers. A later `map` starts new ones."""
        with self._call:
            self._end()

    def map(self, bodies: Sequence[Any], *, seconds: float | None = None) -> list[Outcome]:
        """Returns one outcome per request, in order. Equal requests are carried out once.

        Args:
          bodies: what the worker's handler takes, as JSON.
          seconds: CPU seconds for each, instead of the limit's.

        Raises:
          Refusal: if the workers refuse their setup.
          InputError: if workers end while they start, again and again.
        """
        seconds = seconds or self.limits.seconds
        texts = [json.dumps({"seconds": seconds, "body": body}) for body in bodies]
        answer = partial(self._answer, CLOCK_FACTOR * seconds + CLOCK_EXTRA)
        # A thread for each worker, which waits for it.
        with self._call, ThreadPoolExecutor(self.limits.workers) as threads:
            answers = {text: threads.submit(answer, text) for text in dict.fromkeys(texts)}
            try:
                wait(answers.values(), return_when=FIRST_EXCEPTION)
                return [answers[text].result() for text in texts]
            except BaseException:  # an interrupt must not leave replies for the next call
                self._stop(threads)
                raise

    def _answer(self, clock_seconds: float, request: str) -> Outcome:
        """What a worker makes of a request; if it is killed, what another one does."""
        end = ""
        # It may have been killed from outside, perhaps for the machine's memory.
        for again in (False, True):
            worker = self._ready(fresh=again)
            worker.send(request, clock_seconds)
            reply = worker.hear()
            self._busy.discard(worker)
            if reply is not None:
                self._workers.append(worker)
                error = f"{reply['type']}: {reply['error']}"[:500] if "error" in reply else ""
                return Outcome(reply.get("value"), ERROR if error else None, error)
            late, code = worker.late, worker.end(END_SECONDS)
            end = f"worker ended with code {code}"
            if late or code == -signal.SIGPROF:
                return Outcome(None, TIMEOUT, end)
        return Outcome(None, ERROR, f"{end}, twice")


class Crowd(_Pool):
    """Processes for an environment of the user's, which answer the requests of a batch together.

    They end by `close`, with this object or with the program; a later call starts others.

    Attributes:
      seconds: limit of one request by the clock, from when a process begins with it.
      about: what the handler says of itself.
    """

    def __init__(
        self,
        handler: str,
        label: str,
        *,
        seconds: float,
        workers: int,
        memory: int,
        **setup: Any,
    ) -> None:
        """Starts the first process, in which the function `handler` makes what answers.

        Args:
          label: what the code is called in messages.
          handler: written `module:function`. It answers a list of requests with an iterator over
            (place in the list, value), in any order.
          memory: bytes of a process's address space.

        Raises:
          Refusal: the handler refuses its setup.
          InputError: the processes end while they start, again and again.
        """
        whole = {"kind": handler, "memory": memory, "seconds": START_SECONDS, "body": setup}
        text = json.dumps({**whole, "path": sys.path}, default=str)
        super().__init__(label, partial(_Worker, text, START_SECONDS + GRACE_SECONDS, quiet=False))
        self.seconds, self.workers = seconds, workers
        self._threads: ThreadPoolExecutor | None = None
        worker = self._ready(fresh=False)
        self.about: Any = (worker.started or {}).get("value")
        self._free(worker)

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
        """
        self._threads = threads = self._threads or ThreadPoolExecutor(self.workers)
        outcomes: SimpleQueue[tuple[int, Outcome] | BaseException] = SimpleQueue()
        limit = (seconds or self.seconds) + (GRACE_SECONDS / 2 if together > 1 else 0.0)
        tasks: list[Future[None]] = []
        left = Event()

        def begin(part: dict[int, Any]) -> None:
            if not left.is_set():
                tasks.append(threads.submit(self._serve, limit, outcomes, begin, part))

        numbered = list(enumerate(bodies))
        for start in range(0, len(numbered), together):
            begin(dict(numbered[start : start + together]))
        try:
            for _ in bodies:
                outcome = outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        except GeneratorExit:
            raise
        except BaseException:  # an interrupt must not wait for a process that hangs
            self.close()
            raise
        finally:
            left.set()
            for task in tuple(tasks):
                task.cancel()

    def close(self) -> None:
        """Ends the processes."""
        threads, self._threads = self._threads, None
        if threads is None:
            self._end()
        else:
            self._stop(threads)

    def _serve(
        self,
        seconds: float,
        outcomes: SimpleQueue,
        begin: Callable[[dict[int, Any]], None],
        bodies: dict[int, Any],
    ) -> None:
        """Puts the outcomes of requests there, by number; `begin` has others served."""
        try:
            end = self._ask(seconds, outcomes, bodies, fresh=False)
            if len(bodies) > 1:  # one of them ended the process: each has one of its own
                for index in tuple(bodies):
                    begin({index: bodies.pop(index)})
            elif bodies and end.fault == ERROR:  # it may have been killed from outside
                end = self._ask(seconds, outcomes, bodies, fresh=True)
            for index in bodies:
                outcomes.put((index, end))
        except BaseException as error:
            outcomes.put(error)

    def _ask(
        self, seconds: float, outcomes: SimpleQueue, bodies: dict[int, Any], *, fresh: bool
    ) -> Outcome:
        """Has a process answer requests, and takes those answered away; how it ended if not all."""
        worker, order = self._ready(fresh=fresh), list(bodies)
        request = json.dumps({"seconds": seconds, "body": list(bodies.values())})
        worker.send(request, seconds + GRACE_SECONDS)
        while bodies:
            try:
                place, value = (worker.hear(last=len(bodies) == 1) or {})["value"]
                del bodies[order[place]]
            except (KeyError, TypeError, ValueError, IndexError):  # it has ended, or sent nonsense
                self._busy.discard(worker)
                end = _ended(worker)
                with suppress(OSError):  # programs that it has started
                    os.killpg(worker.pid, signal.SIGKILL)
                return end
            outcomes.put((order[place], Outcome(value)))
        self._free(worker)
        return Outcome()


def _ended(worker: "_Worker") -> Outcome:
    """Ends a worker for the user's code that gave no answer, and says what it did."""
    _, stack = worker.notes()
    code = worker.end(CLOSE_SECONDS)
    if stack or worker.forced:
        return Outcome(None, TIMEOUT, stack)
    if code < 0:
        return Outcome(None, ERROR, f"was killed by signal {-code}")
    return Outcome(None, ERROR, f"ended its process (exit status {code}) or closed its files")


class Isolated:
    """Code of the user's in a process of its own, which makes all calls in order.

    It ends by `close`, with this object or with the program; a later call starts another.

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
        """Starts it, without waiting.

        Args:
          seconds: from now on, to be late after.
          quiet: without output, and in one thread.
        """
        self.started: dict[str, Any] | None = None
        self.forced = False  # ended by `end`
        self._link, theirs = Pipe()
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
        """Returns a reply, or None if the process is late, has died or sent nonsense.

        `last`: no other reply follows to the same request.
        """
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
        """Ends the process, by force if it is late or has not ended itself within `patience` s.

        Returns its exit code, -n for signal n.
        """
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
    """The first line of the threads' stacks that is no library's, as `, in FILE, line N`.

    The main thread's comes first. It stands last in what is written.
    """
    threads = reversed(stack.split("most recent call first")[1:])
    lines = [line.strip() for thread in threads for line in thread.splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    inside = [line for line in files if "lib/python" not in line and PACKAGE not in line]
    if not files:
        return ""
    file, _, line = (inside or files)[0].removeprefix("File ").partition(", line ")
    return f", in {file.strip(chr(34))}, line {line.partition(' ')[0]}"
