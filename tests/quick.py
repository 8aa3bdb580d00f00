"""Parameters of which the quick tests take a few, and the slow ones the others."""

from collections.abc import Sequence
from typing import Any

import pytest


def some(values: Sequence[Any], *which: int) -> list[Any]:
    """`values` for `pytest.mark.parametrize`, all but those at the places `which` marked slow."""
    return [
        value if place in which else _slow(value if isinstance(value, tuple) else (value,))
        for place, value in enumerate(values)
    ]


def _slow(values: tuple[Any, ...]):
    return pytest.param(*values, marks=pytest.mark.slow)
