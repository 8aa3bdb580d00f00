"""Long waits as lines on standard error, for the person at a terminal."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tim_jax import waiting


@contextmanager
def shown() -> Iterator[None]:
    """A context in which every long wait is said, each once."""
    logger, handler = waiting.logger, _Lines()
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
