"""The worker process of `guard`: answers requests one after another until its parent is gone.

It is run as a script by its path, so that neither this package nor JAX nor the parent's main module
is imported, but by code of the user's that asks for them. Requests and replies are JSON over an
inherited socket. The first request makes the handler that answers the others.

A request's limit ends the process, so that code which it runs cannot catch it. For a grader it is
CPU time, which the kernel counts: waiting on a busy machine does not count. For the user's code it
is the clock, watched by a thread of the interpreter's own, which writes where the code was.
"""

import faulthandler
import importlib
import json
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

ENTRIES_KEPT = 4096
# Names of audit events: https://docs.python.org/3/library/audit_events.html
EFFECTS = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "resource.", "fcntl.", "pty.")
HARMLESS = ("os.listdir", "os.scandir")  # importing looks into folders
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
HEAD = 8  # bytes of the notes file for the number of the completion read last; a stack follows
ALL = -1  # in its place: the code has read all, or none

Handler = Callable[[Any], Any]


# The imports are inside the functions because both libraries are extras, and a worker needs one.


def math_handler(setup: dict[str, Any]) -> Handler:
    """Grades mathematics: {"answer", "completion"} -> 1.0 or 0.0."""
    from math_verify import parse, verify

    # The library's own limits, off here, are SIGALRM handlers, which long-running C code ignores.
    options: dict[str, Any] = {"parsing_timeout": None, "raise_on_error": True}

    @lru_cache(maxsize=ENTRIES_KEPT)
    def truth(answer: str) -> list[Any]:
        parsed = parse(f"\\boxed{{{answer}}}", **options)
        if not parsed:
            raise ValueError(f"cannot read the ground truth {answer!r}")
        return parsed

    def handle(request: dict[str, str]) -> float:
        gold = truth(request["answer"])
        parsed = parse(request["completion"], **options)
        return float(verify(gold, parsed, timeout_seconds=None, raise_on_error=False))

    del setup
    return handle


def gym_handler(setup: dict[str, Any]) -> Handler:
    """Makes and scores items of a reasoning-gym dataset: {"index"} and {"index", "answer"}."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name, parameters = setup["name"], setup["parameters"]
    if name not in DATASETS:
        raise Refused("unknown name", known=sorted(DATASETS))
    fields = DATASETS[name][1].__dataclass_fields__
    for key in parameters:
        if key not in fields:
            raise Refused(f"unknown parameter {key!r}", parameter=key, known=sorted(fields))
    try:
        dataset = reasoning_gym.create_dataset(name, **parameters)
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    entry = lru_cache(maxsize=ENTRIES_KEPT)(dataset.__getitem__)

    def handle(request: dict[str, Any]) -> Any:
        item = entry(request["index"])
        if "answer" in request:
            return float(dataset.score_answer(request["answer"], item))
        return {"question": item["question"], "answer": item["answer"]}

    return handle


class Refused(Exception):
    """The setup is wrong; `details` say how, for a message made by the parent."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


HANDLERS: dict[str, Callable[..., Handler]] = {"math": math_handler, "gym": gym_handler}


def limit_memory(size: int) -> None:
    """Bounds the address space of this process, in bytes, and forbids core dumps.

    macOS has no such bound, and refuses one.
    """
    if sys.platform != "darwin":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        size = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def lock_down() -> None:
    """Makes Python refuse to write files, start processes, open sockets or call foreign code.

    Some scorers pass what the policy wrote to `eval`. This stops a policy that stumbles on code; it
    is no sandbox against an attacker.
    """
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sys.addaudithook(refuse_effects)


def refuse_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook that refuses what an answer must not do: write files, start processes, connect.

    Raises:
      PermissionError: for such an event.
    """
    if event == "open":
        _, mode, flags = arguments
        refused = any(letter in mode for letter in "wax+") if mode else flags & WRITE_FLAGS
    else:
        refused = event.startswith(EFFECTS) and event not in HARMLESS
    if refused:
        raise PermissionError(f"an answer tried {event}")


def end_if_forked(own: int) -> None:
    """Ends this process as Python would, if it is no longer `own`: the user's code has forked it.

    It would answer in its parent's place, and wait for a thread that a fork does not copy.
    """
    if os.getpid() == own:
        return
    status, error = 0, sys.exc_info()[1]
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        status = 1
        traceback.print_exception(error)
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(status)


@contextmanager
def limit(seconds: float, notes: int | None) -> Iterator[None]:
    """A context that may take `seconds`, by the clock if there is a file for the stack's notes.

    Else they are of CPU time, and 0 is no limit. A process that was forked inside ends here.
    """
    own = os.getpid()
    if notes is None:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF's default action: terminate
    else:
        faulthandler.dump_traceback_later(seconds, exit=True, file=notes)
    try:
        yield
    finally:
        end_if_forked(own)
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()


def note(notes: int, place: int) -> None:
    """Writes the number of the completion that is read now into the notes file."""
    with suppress(OSError):  # closed by the user's code
        os.pwrite(notes, place.to_bytes(HEAD, "little", signed=True), 0)


class Watched(list):
    """A list that notes which of its items was read last, until all have been."""

    def __init__(self, items: list[Any], notes: int) -> None:
        super().__init__(items)
        self._notes = notes
        note(notes, ALL)

    def __iter__(self) -> Iterator[Any]:
        for i, item in enumerate(super().__iter__()):
            note(self._notes, i)
            yield item
        note(self._notes, ALL)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            note(self._notes, index % max(1, len(self)))
        return super().__getitem__(index)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(super().__iter__()),)


def serve(link: Connection, notes: int) -> None:
    """Makes the handler that the first request asks for, which then answers the others."""
    setup = json.loads(link.recv_bytes())
    trusted = ":" in setup["kind"]  # code of the user's
    if trusted:  # it imports from where the parent does, whatever changed that
        sys.path[:] = setup["path"]
    else:
        logging.disable(logging.CRITICAL)
    if setup["memory"]:
        limit_memory(setup["memory"])
    handlers: list[Handler] = []
    own = os.getpid()

    def send(reply: str) -> None:
        end_if_forked(own)
        with suppress(Exception):  # a full disk under what was printed, or the code has closed it
            sys.stdout.flush()
        link.send_bytes(reply.encode())

    def answer(handle: Handler, request: dict[str, Any]) -> None:
        try:
            with limit(request["seconds"], notes if trusted else None):
                value = handle(request["body"])
                if isinstance(value, Iterator):  # each as soon as it is there
                    for part in value:
                        send(json.dumps({"value": part}))
                    return
                reply = json.dumps({"value": value})
        except BaseException as error:
            if isinstance(error, MemoryError) and not trusted:
                raise
            details = getattr(error, "details", {})
            reply = json.dumps({"error": str(error), "type": type(error).__name__, **details})
        send(reply)

    def make(body: dict[str, Any]) -> Any:
        module, _, name = setup["kind"].rpartition(":")
        made = getattr(importlib.import_module(module), name) if module else HANDLERS[name]
        handlers.append(made({**body, "notes": notes}))
        return getattr(handlers[0], "about", None)

    answer(make, setup)
    if not trusted:
        lock_down()
    while handlers:
        answer(handlers[0], json.loads(link.recv_bytes()))


def main() -> None:
    """Runs a worker on the inherited socket and notes file, until the parent is gone."""
    # A scheduler may send SIGTERM to all processes of a job; the parent says when to end. Not
    # ignored, because programs that the reward starts would then ignore it too.
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started the program
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        with suppress(EOFError):  # the parent has gone
            serve(Connection(int(sys.argv[-2])), int(sys.argv[-1]))
    except OSError:  # or the code has closed our files, which Python would complain about
        os._exit(1)


if __name__ == "__main__":
    main()
