"""What a compiled program moves: between chips, and between a chip's memory and its cores."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tim_jax.plan import hlo
from tim_jax.plan.hlo import Computation, Instruction, Module, Visit

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Names, tuples and views: nothing is read or written.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "after-all",
    "opt-barrier",
    "optimization-barrier",
    "partition-id",
    "replica-id",
    "custom-call",  # kernels: counted where they are traced
    "async-start",
    "async-update",
    "async-done",
}
# Groups along the axes of a mesh: mesh['data'=1,'fsdp'=4] {'fsdp'}
_MESH = re.compile(r"mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_AXIS = re.compile(r"'(\w+)'=(\d+)")
_TAKES = ("dynamic-slice", "gather", "slice")
# What writes into its first operand in place, and which operand says what is written.
_PUTS = {"dynamic-update-slice": 1, "scatter": -1}


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, per chip: how many run, and the bytes that a chip receives."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.bytes + other.bytes)


def collectives(module: Module, trips: Sequence[int] = ()) -> Mapping[str, Traffic]:
    """By kind. Bytes are those that arrive at a chip in a ring of its group of g chips: of n bytes
    that it puts in, n (g - 1) for an all-gather, n (g - 1) / g for a reduce-scatter and an
    all-to-all, twice that for an all-reduce, n for the others.

    `trips`: see `hlo.visits`.
    """
    found: dict[str, Traffic] = {}
    for visit in hlo.visits(module, trips):
        kind = visit.instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            size = _received(kind, visit, module)
            found[kind] = found.get(kind, Traffic()) + Traffic(visit.times, visit.times * size)
    return found


def _received(kind: str, visit: Visit, module: Module) -> int:
    given = sum(visit.computation[name].bytes for name in visit.instruction.operands)
    group = group_size(visit.instruction.attributes, module.partitions)
    if kind == "all-gather":
        return given * (group - 1)
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return given * (group - 1) // group
    return 2 * given * (group - 1) // group if kind == "all-reduce" else given


def group_size(attributes: str, partitions: int) -> int:
    """How many devices take part in one collective, from its `replica_groups`."""
    _, found, rest = attributes.partition("replica_groups=")
    if found and rest.startswith("{{"):
        return rest[2 : rest.index("}")].count(",") + 1
    if found and rest.startswith("["):
        return int(rest[1 : rest.index("]")].split(",")[-1])
    if mesh := _MESH.match(rest):
        sizes = {name: int(size) for name, size in _AXIS.findall(mesh[1])}
        return prod(sizes.get(name, 1) for name in re.findall(r"'(\w+)'", mesh[2]))
    return partitions


def bytes_accessed(module: Module, trips: Sequence[int] = ()) -> int:
    """Bytes that the instructions of XLA read and write in a chip's memory.

    A fusion reads its arguments and writes its results; of what it only cuts a piece from, or
    writes a piece into, the piece counts. Kernels (custom calls) are not in it. `trips`: see
    `hlo.visits`.
    """
    return sum(
        visit.times * _accessed(visit.instruction, visit.computation, module)
        for visit in hlo.visits(module, trips)
        if not visit.fused
    )


def _accessed(one: Instruction, computation: Computation, module: Module) -> int:
    if one.opcode in _FREE or one.opcode.endswith("-done"):
        return 0
    sizes = [computation[name].bytes if name in computation else 0 for name in one.operands]
    if one.opcode == "fusion":
        (name,) = one.called["calls"]
        return _fusion(module.computations[name], sizes, one.bytes)
    if one.opcode in _TAKES:
        return 2 * one.bytes
    if one.opcode in _PUTS:
        return 2 * sizes[_PUTS[one.opcode]]
    return sum(sizes) + one.bytes


def _fusion(body: Computation, sizes: list[int], result: int) -> int:
    """Reads and writes of a fusion whose arguments have these sizes."""
    users: dict[str, list[Instruction]] = {}
    for one in body.values():
        for name in dict.fromkeys(one.operands):
            users.setdefault(name, []).append(one)
    total = 0
    for one in body.values():
        if one.opcode == "parameter":
            index = int(one.arguments)
            whole = sizes[index] if index < len(sizes) else one.bytes
            total += min(whole, _read(one, users, whole))
    updates = [one for one in body.values() if one.opcode in _PUTS]
    written = sum(body[one.operands[_PUTS[one.opcode]]].bytes for one in updates)
    return total + max(result - sum(one.bytes for one in updates), 0) + written


def _read(value: Instruction, users: Mapping[str, list[Instruction]], whole: int) -> int:
    """Bytes of a value that its users look at; views of it are looked through."""
    total = 0
    for user in users.get(value.name, []):
        if user.opcode == "bitcast":
            total += _read(user, users, whole)
        elif user.opcode in _TAKES and user.operands[0] == value.name:
            total += user.bytes
        elif user.opcode not in _PUTS or user.operands[0] != value.name:
            return whole
    return total
