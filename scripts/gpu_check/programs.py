"""Compiles the exact whole programs side by side, into the cache from which "speed" takes them.

Native ones are not among them: XLA chooses their kernels by time, and must be alone for it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import speed
from records import Case
from setting import Setting
from whole import Whole


def cases(setting: Setting) -> Iterator[Case]:
    """A case for each program, in the order in which they are timed."""
    seen = set()
    for timed in speed.plan(setting):
        for name, whole, program in timed.compiled():
            if whole.side != "native" and (whole, program) not in seen:
                seen.add((whole, program))
                yield Case(f"compile {name}", partial(_compile, whole, program))


def _compile(whole: Whole, program: str) -> dict[str, Any]:
    made = getattr(whole, program)
    made.function.lower(*made.arguments).compile()
    return {}
