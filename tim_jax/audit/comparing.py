"""Raw bits against raw bits, on the host."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from tim_jax.numerics import Numerics, Rows
from tim_jax.types import Rollout


class Unequal(NamedTuple):
    """Where two computations of a log-prob first part, in order of sequences and positions."""

    sequence: int
    position: int  # of the response
    tokens: tuple[int, int]  # drawn, and found by the other computation
    values: tuple[float, float]  # their log-probs


@dataclass(frozen=True)
class CaseResult:
    """What a case found."""

    name: str
    numerics: str
    compared_tokens: int
    unequal_tokens: int
    max_abs_diff: float
    first_unequal: Unequal | None
    control: bool = False  # unequal tokens are expected, and no failure
    seconds: float = 0.0  # compilation included

    @property
    def passed(self) -> bool:
        """Zero compared tokens is a failure."""
        return self.control or (self.compared_tokens > 0 and self.unequal_tokens == 0)


def compare(
    recorded: Rollout, tokens: ArrayLike, mask: ArrayLike, log_probs: ArrayLike
) -> tuple[int, int, float, Unequal | None]:
    """(tokens compared, unequal, largest |difference|, first unequal) against arrays [B, R].

    Compared are all places that are a response token on either side. Unequal are those that are
    one on one side only, hold another token, or whose log-probs are not the same finite bits.
    """
    drawn, ours = np.asarray(recorded.responses), np.asarray(recorded.log_probs)
    tokens, mask, log_probs = (np.asarray(x) for x in (tokens, mask, log_probs))
    theirs = np.asarray(recorded.mask)
    either, both = theirs | mask, theirs & mask
    same = both & (drawn == tokens) & (ours.view(np.int32) == log_probs.view(np.int32))
    unequal = either & ~(same & np.isfinite(ours))
    with np.errstate(invalid="ignore"):
        difference = np.abs(ours.astype(np.float64) - log_probs)
    largest = float(np.max(difference, where=both, initial=0.0))
    if not unequal.any():
        return int(either.sum()), 0, largest, None
    row, column = (int(i) for i in np.argwhere(unequal)[0])
    first = Unequal(
        row,
        column,
        (int(drawn[row, column]), int(tokens[row, column])),
        (float(ours[row, column]), float(log_probs[row, column])),
    )
    return int(either.sum()), int(unequal.sum()), largest, first


def describe(numerics: Numerics) -> str:
    """Short text: family, dtype, and what differs from the default of both."""
    plain = Numerics(family=numerics.family, compute_dtype=numerics.compute_dtype)
    words = [numerics.family, numerics.compute_dtype]
    for field in dataclasses.fields(numerics):
        value = getattr(numerics, field.name)
        if value != getattr(plain, field.name):
            words.append(f"{field.name}={_short(value)}")
    return " ".join(words)


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{key}:{_short(part)}" for key, part in value)
    if isinstance(value, Rows):
        return f"{value.low}..{'any' if value.high is None else value.high}"
    if dataclasses.is_dataclass(value):
        parts = (_short(getattr(value, field.name)) for field in dataclasses.fields(value))
        return f"({' '.join(parts)})"
    return str(value)
