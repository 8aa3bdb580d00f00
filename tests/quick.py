"""Parameters of which the quick tests take a few, and the slow ones the others."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def some(values: Sequence[Any], *which: int) -> list[Any]:
    """`values` for `pytest.mark.parametrize`, all but those at the places `which` marked slow."""
    return [
        value if place in which else _slow(value if isinstance(value, tuple) else (value,))
        for place, value in enumerate(values)
    ]


def pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Any]:
    """Every pair of the named values; marked slow but for a few in which each value occurs.

    `second` has at most as many values as `first`, of which each occurs in one quick pair.
    """
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


def _slow(values: tuple[Any, ...]):
    return pytest.param(*values, marks=pytest.mark.slow)
