"""What the program is doing, for the person who waits for it, and for the error that ends it.

A wait that takes long is a record of the logger `tim_jax.common.waiting`. Nothing is printed unless
somebody listens, as the command line does with `shown`.
"""

import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

SECONDS = 30.0  # a longer wait is said

logger = logging.getLogger(__name__)
COMPILES = "the first time, its program is compiled"

T = TypeVar("T")


@contextmanager
def during(doing: str, *, about: str = "") -> Iterator[None]:
    """A context for what may take long. After `SECONDS`, a record says what is waited for.

    Every exception that leaves it carries a note, so that whoever handles it can say where it
    happened (`task_of`).

    Args:
      doing: what is done, such as "sampling"; the same text each time that it is the same thing.
      about: what helps to judge the wait, such as its longest duration.
    """
    more = f" ({about})" if about else ""
    line = f"still {doing} after {SECONDS:g} s{more}"
    timer = threading.Timer(SECONDS, logger.info, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        error.add_note(f"{_NOTE}{doing}")
        raise
    finally:
        timer.cancel()


def each(items: Iterable[T], doing: str, *, about: str = "") -> Iterator[T]:
    """Yields the items of an iterator that takes its time for every one, each `during` as above."""
    left = iter(items)
    while True:
        with during(doing, about=about):
            try:
                item = next(left)
            except StopIteration:
                return
        yield item


_NOTE = "while "


def task_of(error: BaseException) -> str | None:
    """What was being done when an exception was raised: the innermost `during`; None outside."""
    notes = getattr(error, "__notes__", ())
    found = (note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE))
    return next(found, None)


@contextmanager
def shown() -> Iterator[None]:
    """A context in which every long wait is said on standard error, each once."""
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
