"""Parameters of which the quick tests take a few, and the slow ones the others."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Values = Mapping[str, Any] | Sequence[Any]


def some(values: Sequence[Any], *which: int) -> list[Any]:
    """`values` for `pytest.mark.parametrize`, all but those at the places `which` marked slow."""
    return [
        value if place in which else _slow(value if isinstance(value, tuple) else (value,))
        for place, value in enumerate(values)
    ]


def thirds(values: Iterable[Any]) -> list[Any]:
    """`values` for `pytest.mark.parametrize`, of which every third is quick."""
    values = list(values)
    return some(values, *range(0, len(values), 3))


def pairs(first: Values, second: Values) -> list[Any]:
    """Every pair of values, by name where they have one; marked slow but for a few.

    Each value of `first` occurs in one quick pair, and each of `second`, which has at most as many
    values, in one at least.
    """
    first, second = _named(first), _named(second)
    assert len(second) <= len(first)
    return [
        pytest.param(
            one,
            other,
            id=f"{name}-{other_name}",
            marks=() if place % len(second) == other_place else pytest.mark.slow,
        )
        for place, (name, one) in enumerate(first.items())
        for other_place, (other_name, other) in enumerate(second.items())
    ]


def _named(values: Values) -> Mapping[str, Any]:
    return values if isinstance(values, Mapping) else {str(value): value for value in values}


def _slow(values: tuple[Any, ...]):
    return pytest.param(*values, marks=pytest.mark.slow)
