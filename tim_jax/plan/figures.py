"""What a program takes on one chip, as numbers that can be drawn along a line."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, TypeVar

import jax

from tim_jax.errors import InputError
from tim_jax.plan import hlo, memory, traffic, work
from tim_jax.plan.memory import Memory
from tim_jax.plan.recipe import Program
from tim_jax.plan.topology import Target
from tim_jax.plan.traffic import Traffic

Value = TypeVar("Value")


@dataclass(frozen=True)
class Figures:
    """Per chip and run of a program."""

    memory: Memory
    flops: int  # of products
    bytes_accessed: int  # of a chip's memory
    collectives: Mapping[str, Traffic]

    @property
    def collective_bytes(self) -> int:
        return sum(one.bytes for one in self.collectives.values())


@dataclass(frozen=True)
class Compiled:
    """A program's figures, and its text; no text where it did not fit and the compiler gave up."""

    figures: Figures
    text: str
    seconds: float  # to trace, lower and compile


def compiled(program: Program, target: Target) -> Compiled:
    """Compiles for the target. A program that does not fit has the memory that its refusal names,
    and neither collectives nor the traffic of its instructions.

    Raises:
      InputError: the compiler fails on it for another reason.
    """
    start = time.perf_counter()
    with target.tracing():
        traced = program.function.trace(*program.arguments)
        lowered = traced.lower(lowering_platforms=(target.platform,))
    done = work.count(traced.jaxpr, program.trips)
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = memory.of_refusal(str(error))
        if found is None:
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"plan: the compiler of {target.name} fails on the {program.name} ({reason})"
            ) from None
        figures = Figures(found, done.flops, done.kernel_bytes, {})
        return Compiled(figures, "", time.perf_counter() - start)
    text = executable.as_text() or ""
    module = hlo.parse(text)
    figures = Figures(
        memory=memory.of(executable),
        flops=done.flops,
        bytes_accessed=traffic.bytes_accessed(module, program.trips) + done.kernel_bytes,
        collectives=traffic.collectives(module, program.trips),
    )
    return Compiled(figures, text, time.perf_counter() - start)


def along(first: Value, second: Value, *, at: tuple[int, int, int]) -> Value:
    """The value at at[2] of the line through `first` at at[0] and `second` at at[1].

    Values are whole numbers, dataclasses of values, or mappings to values.
    """
    low, high, wanted = at
    share = Fraction(wanted - low, high - low)
    return _combined(first, second, lambda a, b: max(round(a + (b - a) * share), 0))


def _combined(a: Any, b: Any, line: Callable[[int, int], int]) -> Any:
    if isinstance(a, int):
        return line(a, b)
    if isinstance(a, Mapping):
        names = dict.fromkeys([*a, *b])
        return {n: _combined(a.get(n, Traffic()), b.get(n, Traffic()), line) for n in names}
    return type(a)(
        **{f.name: _combined(getattr(a, f.name), getattr(b, f.name), line) for f in fields(a)}
    )
