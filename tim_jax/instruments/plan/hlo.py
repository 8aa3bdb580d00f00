"""Reads the text of a compiled program into instructions."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

_TYPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
# Opcodes whose computation works on single numbers, not on arrays.
_APPLIES = (
    *("reduce", "reduce-window", "reduce-scatter", "all-reduce", "all-reduce-start"),
    *("scatter", "select-and-scatter", "sort", "map"),
)


@dataclass(frozen=True)
class Type:
    """An array's element type, sizes and layout; the layout as XLA writes it, tiles included."""

    dtype: str
    dims: tuple[int, ...]
    layout: str

    @property
    def bytes(self) -> int:
        """Bytes of its elements, without the padding of its layout."""
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        bits = int(digits[1]) if digits else 0  # of tokens and the like
        return prod(self.dims) * (8 if self.dtype == "pred" else bits) // 8

    @property
    def on_chip(self) -> bool:
        """Whether it lies in a TPU's vector memory: space 1, in the layout of tiles."""
        return "S(1)" in self.layout and "T(" in self.layout

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]{self.layout}"


@dataclass(frozen=True)
class Instruction:
    """One line. `attributes` is all text after the operands."""

    name: str
    types: tuple[Type, ...]  # several for a tuple
    opcode: str
    operands: tuple[str, ...]
    arguments: str  # the operands as they are written
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        """Bytes of all its results."""
        return sum(one.bytes for one in self.types)

    @property
    def is_fusion(self) -> bool:
        """Whether it runs a computation at once, also if its end is an instruction of its own."""
        return self.opcode in ("fusion", "fusion-start")

    @property
    def op_name(self) -> str:
        """Its origin in the traced program; "" if it has none."""
        match = _OP_NAME.search(self.attributes)
        return match[1] if match else ""

    @property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations that it calls, by role."""
        return {
            role: tuple(name.strip(" %") for name in names.strip("{}").split(","))
            for role, names in _CALLED.findall(self.attributes)
        }


Computation = Mapping[str, Instruction]


@dataclass(frozen=True)
class Module:
    """A program: computations by name, instructions by name and in order within each."""

    computations: Mapping[str, Computation]
    entry: str
    partitions: int  # devices that run it together


Times = int | Fraction  # how often a loop turns, perhaps on average


@dataclass(frozen=True)
class Visit:
    """An instruction and how often a run of the program executes it."""

    instruction: Instruction
    computation: Computation
    times: Times
    fused: bool  # inside a fusion: it reads and writes no memory of its own


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and current is not None:
            instruction = _instruction(match[2], match[3], bool(match[1]))
            current[instruction.name] = instruction
        elif header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
    partitions = _PARTITIONS.search(text[: text.find("\n")])
    return Module(computations, entry, int(partitions[1]) if partitions else 1)


def visits(module: Module, trips: Sequence[Times] = ()) -> Iterator[Visit]:
    """All instructions that run, and how often.

    Args:
      trips: iterations of the loops whose number the compiler does not know, in the program's
        order. Further ones count once.
    """
    yield from _visits(module, module.entry, 1, False, iter(trips))


def _visits(module, name, times, fused, trips) -> Iterator[Visit]:
    computation = module.computations[name]
    for instruction in computation.values():
        yield Visit(instruction, computation, times, fused)
        inside = fused or instruction.is_fusion
        called = instruction.called
        if instruction.opcode == "while":
            known = _trips(instruction, module)
            count = next(trips, 1) if known is None else known
            for body in called.pop("body"):
                yield from _visits(module, body, times * count, inside, trips)
            for condition in called.pop("condition"):
                yield from _visits(module, condition, times * (count + 1), inside, trips)
        elif instruction.opcode in _APPLIES:
            called.pop("to_apply", None)
        for names in called.values():
            for one in names:
                if one in module.computations:
                    yield from _visits(module, one, times, inside, trips)


def _trips(loop: Instruction, module: Module) -> int | None:
    """How often a loop's body runs, or None if that is not in the text.

    It is the number that the compiler states, or else the one that the loop's condition compares a
    counter with (JAX counts from 0 by 1).
    """
    if match := _TRIPS.search(loop.attributes):
        return int(match[1])
    (name,) = loop.called["condition"]
    condition = module.computations[name]
    ends = next(one for one in condition.values() if one.root)
    limit = condition.get(ends.operands[-1]) if ends.opcode == "compare" else None
    if limit is None or limit.opcode != "constant" or "direction=LT" not in ends.attributes:
        return None
    return int(limit.arguments)


def _instruction(name: str, rest: str, root: bool) -> Instruction:
    end = _balanced(rest) if rest.startswith("(") else rest.index(" ")
    types = tuple(
        Type(dtype, tuple(int(n.strip("<=")) for n in dims.split(",") if n), layout)
        for dtype, dims, layout in _TYPE.findall(rest[:end])
    )
    opcode, paren, _ = rest[end:].strip().partition("(")
    start = rest.index("(", end) if paren else len(rest)
    stop = start + _balanced(rest[start:])
    arguments = rest[start + 1 : stop - 1]
    return Instruction(
        name=name,
        types=types,
        opcode=opcode,
        operands=tuple(_OPERAND.findall(arguments)),
        arguments=arguments,
        attributes=rest[stop:],
        root=root,
    )


def _balanced(text: str) -> int:
    """Length of the parenthesis that `text` begins with."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    return len(text)
