"""What the program is doing, for the person who waits for it, and for the error that ends it.

A wait that takes long is said on standard error, from Python as on the command line. It is a record
of the logger `tim_jax.common.waiting` instead if that takes records of level INFO, and nothing if
`logging.getLogger("tim_jax")` has a level above WARNING.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

SECONDS = 10.0  # a longer wait is said, and again when it is ten and a hundred times as long

logger = logging.getLogger(__name__)
COMPILES = "the first time, its program is compiled"

T = TypeVar("T")


@contextmanager
def during(doing: str, *, about: str = "") -> Iterator[None]:
    """A context for what may take long. After `SECONDS`, a line says what is waited for.

    Every exception that leaves it carries a note, so that whoever handles it can say where it
    happened (`task_of`).

    Args:
      doing: what is done, such as "sampling"; the same text each time that it is the same thing.
      about: what helps to judge the wait, such as its longest duration.
    """
    with _noted(doing), _watched(lambda: doing, about):
        yield


def each(
    items: Iterable[T], doing: str, *, about: str = "", total: int | None = None
) -> Iterator[T]:
    """Yields the items of an iterator that takes its time for them; all are one wait, as above.

    Args:
      total: how many there are, so that the line says how far it is.
    """
    left, number = iter(items), 0

    def so_far() -> str:
        return doing if total is None else f"{doing}, {min(number + 1, total)} of {total},"

    with _watched(so_far, about):
        while True:
            with _noted(doing):
                try:
                    item = next(left)
                except StopIteration:
                    return
            number += 1
            yield item


def say(line: str) -> None:
    """Says to whoever waits what is done."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(line)
    elif logger.getEffectiveLevel() <= logging.WARNING:
        print(f"tim_jax: {line}", file=sys.stderr, flush=True)


@contextmanager
def _watched(doing: Callable[[], str], about: str) -> Iterator[None]:
    more = f" ({about})" if about else ""
    timers: list[threading.Timer] = []
    over = False

    def arm(seconds: float, after: float) -> None:
        timers.append(threading.Timer(seconds, speak, (after,)))
        timers[-1].daemon = True
        timers[-1].start()

    def speak(after: float) -> None:
        say(f"still {doing()} after {after:g} s{more}")
        if after < 100 * SECONDS:
            arm(9 * after, 10 * after)
            if over:  # it may have ended before the new timer was there to be cancelled
                timers[-1].cancel()

    arm(SECONDS, SECONDS)
    try:
        yield
    finally:
        over = True
        timers[-1].cancel()


@contextmanager
def _noted(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"{_NOTE}{doing}")
        raise


_NOTE = "while "


def task_of(error: BaseException) -> str | None:
    """What was being done when an exception was raised: the innermost `during`; None outside."""
    notes = getattr(error, "__notes__", ())
    found = (note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE))
    return next(found, None)


@contextmanager
def shown() -> Iterator[None]:
    """A context in which every long wait is said as the command line says it, each once."""
    handler = _Lines()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # some libraries print all records
    try:
        yield
    finally:
        logger.setLevel(before[0])
        logger.propagate = before[1]
        logger.removeHandler(handler)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._said:
            self._said.add(text)
            # What standard error is now: a display may have taken its place.
            print(f"tim-jax: {text}", file=sys.stderr, flush=True)
