"""Worker processes for code that may hang, crash or take too much memory, with limits per request.

Every worker is a fresh interpreter, started by running `worker.py` as a script: no fork of a
threaded process, no second import of the program's main module, no JAX. A request over its limit
ends its worker, which is replaced; other requests are not affected. A request whose worker died in
another way is tried once more.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from threading import Lock
from typing import Any

from tim_jax.common.errors import InputError
from tim_jax.tasks.base import ERROR, TIMEOUT, Fault, Grade

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 120.0  # importing the grading library on a busy machine
CLOCK_FACTOR, CLOCK_EXTRA = 10.0, 10.0  # seconds by the clock allowed for CPU seconds
END_SECONDS = 5.0  # between the end of a process's socket and its exit code
STARTS = 3  # attempts in a row before a worker that dies while starting is given up

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # sets of strings in one order, so that every worker gives one answer
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


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
        super().__init__(reply["refused"])
        self.reply = reply


class Guard:
    """A pool of workers of one kind. `map` may be called from any thread; calls run one by one.

    Workers start when first needed, or by `start`. They end by `close`, with the guard, or with the
    program, however that ends: when the parent is gone, a worker reads the end of its socket.
    """

    def __init__(self, kind: str, setup: Mapping[str, Any], limits: Limits) -> None:
        self.limits = limits
        self._setup = json.dumps({"kind": kind, "setup": setup, "memory": limits.memory}).encode()
        self._workers: list[_Worker] = []
        self._lock = Lock()
        self._finalizer = weakref.finalize(self, _end_all, self._workers)

    def start(self) -> None:
        """Starts the workers without waiting, so that they import while other work goes on."""
        with self._lock:
            self._start(self.limits.workers)

    def close(self) -> None:
        """Ends the workers. A later `map` starts new ones."""
        with self._lock:
            _end_all(self._workers)

    def map(self, bodies: Sequence[Any], *, seconds: float | None = None) -> list[Outcome]:
        """Returns one outcome per request, in order. Equal requests are carried out once.

        Args:
          bodies: what the worker's handler takes, as JSON.
          seconds: CPU seconds for each, instead of the limit's.

        Raises:
          Refusal: if the workers refuse their setup.
          RuntimeError: if workers die while starting, again and again.
        """
        seconds = seconds or self.limits.seconds
        texts = [f'{{"seconds": {seconds}, "body": {json.dumps(body)}}}' for body in bodies]
        work = _Work(deque(dict.fromkeys(texts)), CLOCK_FACTOR * seconds + CLOCK_EXTRA)
        with self._lock:
            try:
                self._run(work)
            except BaseException:  # an interrupt must not leave replies for the next call
                _end_all(self._workers)
                raise
        return [work.outcomes[text] for text in texts]

    def _start(self, count: int) -> None:
        while len(self._workers) < min(count, self.limits.workers):
            self._workers.append(_Worker(self._setup))

    def _run(self, work: "_Work") -> None:
        wanted = len(work.waiting)
        while len(work.outcomes) < wanted:
            self._start(len(work.waiting))
            for worker in self._workers:
                if work.waiting and worker.idle:
                    worker.send(work.waiting.popleft(), work.clock_seconds)
            patience = min(worker.deadline for worker in self._workers) - time.monotonic()
            heard = wait([worker.link for worker in self._workers], max(0.0, patience))
            for i, worker in enumerate(self._workers):
                fine = _hear(worker, work) if worker.link in heard else not worker.late
                if not fine:
                    _bury(worker, work)
                    starts = 1 if worker.ready else worker.starts + 1
                    self._workers[i] = _Worker(self._setup, starts)


@dataclass
class _Work:
    """The requests of one `map`: those waiting, those answered, and those tried once before."""

    waiting: deque[str]
    clock_seconds: float
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    retried: set[str] = field(default_factory=set)


def _hear(worker: "_Worker", work: _Work) -> bool:
    """Takes a worker's reply. Returns False if it turns out to be dead."""
    reply = worker.receive()
    if reply is None:
        return False
    if "refused" in reply:
        raise Refusal(reply)
    if worker.request is None:
        worker.ready = True
    else:
        fault = ERROR if "error" in reply else None
        work.outcomes[worker.request] = Outcome(reply.get("value"), fault, reply.get("error", ""))
        worker.request = None
    worker.deadline = math.inf
    return True


def _bury(worker: "_Worker", work: _Work) -> None:
    """Ends a worker that is late or has died, and records or repeats its request."""
    late, request = worker.late, worker.request
    code = worker.end(patience=0.0 if late else END_SECONDS)
    if request is None:
        if not worker.ready and worker.starts >= STARTS:
            raise RuntimeError(
                f"a grading worker failed to start {STARTS} times (exit code {code})"
            )
    elif late or code == -signal.SIGPROF:
        work.outcomes[request] = Outcome(None, TIMEOUT, f"worker ended with code {code}")
    elif request in work.retried:
        work.outcomes[request] = Outcome(None, ERROR, f"worker ended with code {code}, twice")
    else:  # killed from outside, perhaps for the machine's memory: not the answer's fault
        work.retried.add(request)
        work.waiting.appendleft(request)


def spawn(
    arguments: Sequence[str], *, environment: Mapping[str, str], **options: Any
) -> subprocess.Popen:
    """Starts a fresh interpreter with `arguments` and this environment, changed by `environment`.

    `options` are those of `subprocess.Popen`.
    """
    return subprocess.Popen(
        # -P: a script's folder must not come first among the places to import from.
        [sys.executable, "-P", *arguments],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
        start_new_session=True,  # Ctrl-C is for the parent, which then ends its workers
        **options,
    )


class _Worker:
    """One process: starting, then idle or busy with `request` until `deadline` (monotonic s)."""

    def __init__(self, setup: bytes, starts: int = 1) -> None:
        self.starts = starts
        self.ready = False
        self.request: str | None = None
        self.deadline = time.monotonic() + START_SECONDS
        self.link, theirs = Pipe()
        with theirs:
            self._process = spawn(
                [str(WORKER), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                environment=ENVIRONMENT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._send(setup)

    @property
    def idle(self) -> bool:
        return self.ready and self.request is None

    @property
    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    def send(self, request: str, clock_seconds: float) -> None:
        self.request = request
        self.deadline = time.monotonic() + clock_seconds
        self._send(request.encode())

    def _send(self, data: bytes) -> None:
        with suppress(OSError):  # if it has died, the next `wait` reports the end of its socket
            self.link.send_bytes(data)

    def receive(self) -> dict[str, Any] | None:
        """Returns a reply, or None if the process has died or sent nonsense."""
        try:
            reply = json.loads(self.link.recv_bytes())
        except (EOFError, OSError, ValueError):
            return None
        return reply if isinstance(reply, dict) else None

    def end(self, patience: float = 0.0) -> int:
        """Ends the process, by force if it has not ended by itself within `patience` seconds.

        Returns its exit code, -n for signal n.
        """
        self.link.close()
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()
    workers.clear()
