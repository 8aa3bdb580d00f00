"""The worker process of `guard`: answers requests one after another until its parent is gone.

It is run as a script by its path, so that neither this package nor JAX nor the parent's main module
is imported. Every request has a limit of CPU time, which the kernel enforces by ending the process:
code that a request runs cannot catch it, and waiting on a busy machine does not count. Requests and
replies are JSON over an inherited socket; whatever libraries print goes nowhere.
"""

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

ENTRIES_KEPT = 4096
# Names of audit events: https://docs.python.org/3/library/audit_events.html
EFFECTS = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "resource.", "fcntl.", "pty.")
HARMLESS = ("os.listdir", "os.scandir")  # importing looks into folders
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

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


HANDLERS: dict[str, Callable[[dict[str, Any]], Handler]] = {
    "math": math_handler,
    "gym": gym_handler,
}


def limit_memory(size: int) -> None:
    """Bounds the address space of this process, in bytes, and forbids core dumps."""
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
        writes = any(letter in mode for letter in "wax+") if mode else flags & WRITE_FLAGS
        refused = bool(writes)
    else:
        refused = event.startswith(EFFECTS) and event not in HARMLESS
    if refused:
        raise PermissionError(f"an answer tried {event}")


def answer(handle: Handler, request: dict[str, Any]) -> dict[str, Any]:
    """Returns {"value"}, or {"error"} for anything raised; over the limit, the process is gone."""
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # SIGPROF's default action: terminate
    try:
        return {"value": handle(request["body"])}
    except MemoryError:
        raise
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def serve(connection: Connection) -> None:
    """Makes the handler that the parent asks for, then answers its requests one by one."""
    setup = json.loads(connection.recv_bytes())
    limit_memory(setup["memory"])
    try:
        handle = HANDLERS[setup["kind"]](setup["setup"])
    except Exception as error:
        details = getattr(error, "details", {})
        reply = {"refused": f"{error}" or type(error).__name__, **details}
        connection.send_bytes(json.dumps(reply).encode())
        return
    lock_down()
    connection.send_bytes(b'{"ready": true}')
    while True:
        reply = answer(handle, json.loads(connection.recv_bytes()))
        connection.send_bytes(json.dumps(reply).encode())


def main() -> None:
    """Runs a worker on the inherited connection until the parent is gone."""
    logging.disable(logging.CRITICAL)
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):  # the parent has gone
        return


if __name__ == "__main__":
    main()
