"""Exceptions with a message for users: what they can mend, and how a run may end early."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class InputError(ValueError):
    """Bad input. The message is one line: what, where, the offending value, what would be right.

    The command line prints it without a traceback and exits non-zero; every other exception is a
    fault of the library and keeps its traceback.
    """


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'x'?"` for the nearest of `known`, or all if none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"


def check_choice(what: str, value: object, known: Iterable[str]) -> None:
    """Refuses a value that is not among the known ones, naming the nearest."""
    if value not in (known := tuple(known)):
        raise InputError(f"{what} {value!r} is unknown{did_you_mean(str(value), known)}")


class MismatchError(Exception):
    """An exact run met a token whose log-probs differ. The message says which, in one line."""


class NonFiniteError(Exception):
    """Too many updates in a row had a loss or a gradient that is not finite.

    Attributes:
        batch: name -> NumPy array, what the last of them was computed from.
    """

    def __init__(self, message: str, batch: Mapping[str, Any]):
        super().__init__(message)
        self.batch = batch


class PreemptedError(Exception):
    """The system asked the process to end, and the run was saved. The message says where."""
