"""What a compiled program takes on one device: memory, operations, traffic and collectives.

Operations of products and the memory traffic of kernels are counted where the program is traced,
because there every loop has its length and every kernel its grid and blocks; a compiler's own count
takes loop bodies once and does not look into kernels. Memory is the compiler's analysis. Other
memory traffic and the collectives are read from the compiled text. `along` extrapolates figures
along a line.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from math import prod
from typing import Any, TypeVar

import jax
from jax.experimental.pallas import triton as plt
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from tim_jax.common.errors import InputError
from tim_jax.instruments.plan import hlo
from tim_jax.instruments.plan.hlo import Computation, Instruction, Module, Times, Visit
from tim_jax.instruments.plan.topology import Target
from tim_jax.instruments.plan.workload import Program
from tim_jax.kernels.pallas import PRIMITIVES


@dataclass(frozen=True)
class Tile:
    """How programs of a GPU divide a product [N, K] @ [K, M]."""

    rows: int  # N
    height: int  # rows of a program
    width: int  # columns of a program
    depth: int  # K
    stages: int  # steps of the contraction that are in flight
    weight: int  # bytes of the [K, M]
    passes: int  # over it, between which others of its columns are taken


@dataclass(frozen=True)
class Call:
    """A call of a kernel, on one device. Equal calls do equal work."""

    name: str
    programs: int  # steps of its grid
    flops: int
    loaded: int  # bytes that its programs load and store
    memory: int  # bytes of these that come from memory and not from a cache
    tile: Tile | None = None  # of a product on a GPU


@dataclass(frozen=True)
class Work:
    """Work of one device; of a program that is not local to devices, of all of them."""

    kernels: Mapping[Call, Times] = field(default_factory=dict)  # how often each is called
    products: Mapping[Call, Times] = field(default_factory=dict)  # those outside kernels

    def __add__(self, other: "Work") -> "Work":
        kernels, products = _sum(self.kernels, other.kernels), _sum(self.products, other.products)
        return Work(kernels, products)

    def times(self, count: Times) -> "Work":
        """The work of `count` repetitions."""
        both = ({call: n * count for call, n in x.items()} for x in (self.kernels, self.products))
        return Work(*both)

    @property
    def flops(self) -> Times:
        """Operations of products; a multiplication and an addition are two."""
        calls = (*self.kernels.items(), *self.products.items())
        return sum(call.flops * count for call, count in calls)

    @property
    def kernel_bytes(self) -> int:
        """Bytes between memory and the kernels."""
        return round(sum(call.memory * count for call, count in self.kernels.items()))


def _sum(left: Mapping[Call, Times], right: Mapping[Call, Times]) -> Mapping[Call, Times]:
    return {call: n for call in (*left, *right) if (n := left.get(call, 0) + right.get(call, 0))}


def _rounded(calls: Mapping[Call, Times]) -> Mapping[Call, int]:
    return {call: round(count) for call, count in calls.items()}


def count(jaxpr: Any, trips: Iterable[Times] = ()) -> Work:
    """Work of a jaxpr, inner ones included.

    A branch counts as its most expensive side; so a kernel counts all its blocks, also those that
    a causal mask lets it skip. Loops inside kernels whose length is a value are not counted: such
    kernels state their cost.

    Args:
      trips: of the loops that end by a condition, in the program's order; others count once.
    """
    jaxpr, trips = getattr(jaxpr, "jaxpr", jaxpr), iter(trips)
    return sum((_equation(one, trips) for one in jaxpr.eqns if runs(one, jaxpr)), Work())


def live(jaxpr: Any) -> Any:
    """The jaxpr without what no result needs; compilers leave that out as well."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def runs(equation, jaxpr) -> bool:
    """False of a loop that no result needs: `live` leaves some of these (jax 0.10.1)."""
    if equation.primitive.name != "while":
        return True
    read = (*jaxpr.outvars, *(atom for one in jaxpr.eqns for atom in one.invars))
    made = {id(one) for one in equation.outvars}
    return any(id(atom) in made for atom in read)


def _equation(equation, trips: Iterator[Times]) -> Work:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        summed = prod(shape[axis] for axis in contracted)
        flops, moved = 2 * prod(equation.outvars[0].aval.shape) * summed, _array_bytes(equation)
        return Work(products={Call("product", 1, flops, moved, moved): 1})
    if name in PRIMITIVES:
        call = _stated(equation) if "meshes" in params else _kernel(params, equation.invars)
        return Work({call: 1})
    if name == "while":
        times = next(trips, 1)
        return count(params["body_jaxpr"], trips).times(times) + count(params["cond_jaxpr"], trips)
    if name == "cond":
        return max((count(one, trips) for one in params["branches"]), key=lambda w: w.flops)
    inner = sum((count(one, trips) for one in jaxprs_in_params(params)), Work())
    return inner.times(params["length"]) if name == "scan" else inner


def _array_bytes(equation) -> int:
    """Of an equation's operands and results."""
    arrays = (one.aval for one in (*equation.invars, *equation.outvars))
    return sum(one.size * one.dtype.itemsize for one in arrays)


def _kernel(params, operands: Sequence[Any]) -> Call:
    """What its author states, or all steps of its grid.

    A TPU runs the steps of a grid in order, and copies a block when another one is needed. The
    programs of a GPU each load their own, and its cache is taken to spare memory every repetition;
    of an array of which only parts are read or written, no more comes from memory than these.
    """
    stated, mapping = params["cost_estimate"], params["grid_mapping"]
    programs, blocks = prod(mapping.grid), mapping.block_mappings
    on_gpu = isinstance(params["compiler_params"], plt.CompilerParams)
    # An array may be given twice, for two of its blocks at a time.
    names = [*map(id, operands[mapping.num_index_operands :]), *range(len(mapping.out_shapes))]
    wholes = {
        name: _bytes(one.array_aval.shape, one) for name, one in zip(names, blocks, strict=True)
    }
    if stated is not None:
        flops, loaded = stated.flops, stated.bytes_accessed
        memory = min(sum(wholes.values()), loaded)
    else:
        flops = round(count(params["jaxpr"]).flops * programs)
        parts = Counter[int]()
        for name, one in zip(names, blocks, strict=True):
            copies = programs
            if not on_gpu:  # a copy whenever its index changes, the last axis fastest
                used = _axes_used(one.index_map_jaxpr, len(mapping.grid))
                copies = prod(mapping.grid[: max(used, default=-1) + 1])
            # Without what lies beyond the array.
            block = tuple(map(min, _sizes(one), one.array_aval.shape))
            parts[name] += copies * _bytes(block, one)
        loaded = parts.total()
        memory = sum(min(whole, parts[name]) for name, whole in wholes.items())
    tile = _tile(params["compiler_params"], names, blocks, mapping.grid) if on_gpu else None
    return Call(params["name"], programs, flops, loaded, memory if on_gpu else loaded, tile)


def _tile(
    compiler: plt.CompilerParams,
    names: Sequence[int],
    blocks: Sequence[Any],
    grid: tuple[int, ...],
) -> Tile | None:
    """Of a kernel whose programs multiply all columns of their rows by whole columns of a matrix.

    Its first two arguments are the rows and the matrix, which may be given several times. The first
    axis of a GPU's grid is the fastest.
    """
    if len(blocks) < 3 or any(len(one.array_aval.shape) != 2 for one in blocks[:2]):
        return None
    (rows, depth), (inputs, _) = (one.array_aval.shape for one in blocks[:2])
    height, *of_rows = _sizes(blocks[0])
    parts = [_sizes(one) for name, one in zip(names, blocks, strict=True) if name == names[1]]
    if inputs != depth or of_rows != [depth] or any(one[0] != depth for one in parts):
        return None
    width, weight = sum(one[1] for one in parts), _bytes(blocks[1].array_aval.shape, blocks[1])
    used = _axes_used(blocks[1].index_map_jaxpr, len(grid))
    others = (size for axis, size in enumerate(grid) if used and axis > min(used))
    passes = prod(others) // prod(grid[axis] for axis in used if axis > min(used))
    return Tile(rows, height, width, depth, compiler.num_stages or 1, weight, passes)


def _stated(equation) -> Call:
    """What its author states of a Mosaic kernel for GPUs, whose loads are in its code alone."""
    params = equation.params
    (mesh,), cost = params["meshes"], params["cost_estimate"]
    memory = min(_array_bytes(equation), cost.bytes_accessed)
    return Call(params["name"], prod(mesh.grid), cost.flops, cost.bytes_accessed, memory)


def _sizes(block) -> list[int]:
    return [
        one if isinstance(one, int) else getattr(one, "block_size", 1) for one in block.block_shape
    ]


def _bytes(shape: tuple[int, ...], block) -> int:
    return prod(shape) * block.array_aval.dtype.itemsize


def _axes_used(index_map, count: int) -> set[int]:
    """Axes of the grid that a block's index depends on."""
    jaxpr = getattr(index_map, "jaxpr", index_map)
    behind: dict[Any, set[int]] = {var: {i} for i, var in enumerate(jaxpr.invars[:count])}

    def of(atom) -> set[int]:
        return behind.get(atom, set()) if not hasattr(atom, "val") else set()

    for equation in jaxpr.eqns:
        axes = set().union(*(of(atom) for atom in equation.invars))
        behind |= dict.fromkeys(equation.outvars, axes)
    return set().union(*(of(atom) for atom in jaxpr.outvars))


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REFUSED = re.compile(r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds")


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    arguments: int = 0
    outputs: int = 0
    temporaries: int = 0
    aliased: int = 0  # outputs that take the place of arguments
    code: int = 0
    together: int = 0  # of a program that the compiler refused: all of it, and nothing else

    @property
    def total(self) -> int:
        """Bytes that the program takes of a device's memory at its peak."""
        parts = self.arguments + self.outputs + self.temporaries - self.aliased + self.code
        return parts + self.together


def of(compiled: Any) -> Memory:
    """The memory of a compiled program; InputError if this compiler has no such analysis."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise InputError("plan: this compiler does not say how much memory a program takes")
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )


def of_refusal(message: str) -> Memory | None:
    """The memory of a program that does not fit, from the TPU compiler's message.

    It states one sum, to a hundredth of its unit, which it calls temporaries, but which includes
    arguments and outputs. None if the message is about something else.
    """
    match = _REFUSED.search(message)
    if not match:
        return None
    return Memory(together=round(float(match[1]) * _UNITS[match[2]]))


KINDS = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
# Names, tuples and views: nothing is read or written.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("while", "conditional", "call", "opt-barrier", "optimization-barrier"),
    *("partition-id", "replica-id"),
    *("custom-call", "custom-call-start"),  # kernels: counted where they are traced
    *("call-start", "async-start"),  # their computation is visited
}
# Groups along the axes of a mesh: mesh['data'=1,'fsdp'=4] {'fsdp'}
_MESH = re.compile(r"mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_AXIS = re.compile(r"'(\w+)'=(\d+)")
_TAKES = ("dynamic-slice", "gather", "slice")
# Opcodes that write into their first operand in place, and the operand that is written.
_PUTS = {"dynamic-update-slice": 1, "scatter": -1}


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, per chip: how many run, and the bytes that a chip receives."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.bytes + other.bytes)


def collectives(module: Module, trips: Sequence[Times] = ()) -> Mapping[str, Traffic]:
    """The collectives of a program by kind.

    Bytes are those that arrive at a chip in a ring of its group of g chips: of n bytes that it puts
    in, n (g - 1) for an all-gather, n (g - 1) / g for a reduce-scatter and an all-to-all, twice
    that for an all-reduce, n for the others. A ragged all-to-all has room for the least favourable
    choice of experts; counted is what every chip receives if all send as much. `trips`: see
    `hlo.visits`.
    """
    traffic: dict[str, Traffic] = {}
    for visit in hlo.visits(module, trips):
        kind = visit.instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            size = _received(kind, visit, module)
            own = Traffic(round(visit.times), round(visit.times * size))
            traffic[kind] = traffic.get(kind, Traffic()) + own
    return traffic


def _received(kind: str, visit: Visit, module: Module) -> int:
    sizes = [visit.computation[name].bytes for name in visit.instruction.operands]
    # The first two are what is sent and received, of which one is filled up.
    given = min(sizes[:2]) if kind == "ragged-all-to-all" else sum(sizes)
    group = group_size(visit.instruction.attributes, module.partitions)
    if kind == "all-gather":
        return given * (group - 1)
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return given * (group - 1) // group
    return 2 * given * (group - 1) // group if kind == "all-reduce" else given


def group_size(attributes: str, partitions: int) -> int:
    """How many devices take part in one collective, from its `replica_groups`."""
    _, named, rest = attributes.partition("replica_groups=")
    if named and rest.startswith("{{"):
        return rest[2 : rest.index("}")].count(",") + 1
    if named and rest.startswith("["):
        return int(rest[1 : rest.index("]")].split(",")[-1])
    if mesh := _MESH.match(rest):
        sizes = {name: int(size) for name, size in _AXIS.findall(mesh[1])}
        return prod(sizes.get(name, 1) for name in re.findall(r"'(\w+)'", mesh[2]))
    return partitions


_SCALARS = 1024  # bytes, more than those of a few numbers


@dataclass(frozen=True)
class Instructions:
    """What XLA's instructions do in one run of a program, on one device."""

    launches: int = 0  # that run, kernels included
    accessed: int = 0  # bytes read and written in memory, without those of kernels
    copied: int = 0  # bytes of these: of slices of stacks, and of updates in place
    filled: int = 0  # bytes of these: of arrays that are made without reading others
    made: int = 0  # elements of such arrays


def instructions(module: Module, trips: Sequence[Times] = ()) -> Instructions:
    """Counts instructions outside fusions, each as often as it runs. `trips`: see `hlo.visits`.

    A fusion reads its arguments and writes its results; of arrays that it only slices or updates in
    part, the part counts.
    """
    total: dict[str, Times] = {one.name: 0 for one in fields(Instructions)}
    for visit in hlo.visits(module, trips):
        one, times = visit.instruction, visit.times
        if visit.fused:
            continue
        kernel = one.opcode in ("custom-call", "custom-call-start")
        moved = times * _accessed(one, visit.computation, module)
        total["launches"] += times * (kernel or not _is_free(one))
        total["accessed"] += moved
        if one.opcode == "fusion-start":  # as a GPU slices a stack, or updates one in place
            total["copied"] += moved
        elif _fills(one, visit.computation):
            total["filled"] += moved
            total["made"] += times * sum(prod(made.dims) for made in one.types)
    return Instructions(**{name: round(count) for name, count in total.items()})


def _fills(one: Instruction, computation: Computation) -> bool:
    """Whether it makes an array and reads none."""
    read = sum(computation[name].bytes for name in one.operands if name in computation)
    return one.opcode == "fusion" and read < _SCALARS and one.bytes > _SCALARS


def _is_free(one: Instruction) -> bool:
    return one.opcode in _FREE or one.opcode.endswith(("-done", "-update"))


def _accessed(one: Instruction, computation: Computation, module: Module) -> int:
    if _is_free(one):
        return 0
    operands = [computation[name] for name in one.operands if name in computation]
    sizes = [_size(operand) for operand in operands]
    opcode = one.opcode.removesuffix("-start")
    results = one.types
    if len(results) > len(one.operands) and opcode != one.opcode:
        # The results of a start are its operands, what is made of them, and a flag.
        results = results[len(one.operands) :]
    written = sum(t.bytes for t in results if not t.on_chip)
    if one.is_fusion:
        (name,) = one.called["calls"]
        return _fusion(module.computations[name], sizes, written, module)
    if opcode in _TAKES:
        return written + (results[0].bytes if sizes[0] else 0)
    if opcode in _PUTS:
        update = operands[_PUTS[opcode]]
        return _size(update) + (update.bytes if sizes[0] else 0)
    if results is not one.types:
        return _size(one)  # of a copy or a collective, of which operands are results, too
    return sum(sizes) + written


def _size(one: Instruction) -> int:
    """Bytes of its results that lie in memory."""
    return sum(t.bytes for t in one.types if not t.on_chip)


def _users(body: Computation) -> dict[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = {}
    for one in body.values():
        for name in dict.fromkeys(one.operands):
            users.setdefault(name, []).append(one)
    return users


def _fusion(body: Computation, sizes: list[int], result: int, module: Module) -> int:
    """Reads and writes of a fusion whose arguments have these sizes."""
    users, total = _users(body), 0
    for one in body.values():
        if one.opcode == "parameter":
            index = int(one.arguments)
            whole = sizes[index] if index < len(sizes) else one.bytes
            total += min(whole, _read(one, users, whole, module))
    updates = [one for one in body.values() if one.opcode in _PUTS]
    written = sum(body[one.operands[_PUTS[one.opcode]]].bytes for one in updates)
    return total + max(result - sum(one.bytes for one in updates), 0) + written


def _read(
    value: Instruction, users: Mapping[str, list[Instruction]], whole: int, module: Module
) -> int:
    """Bytes of a value that its users read, views of it and fusions inside included."""
    total = 0
    for user in users.get(value.name, []):
        if user.opcode == "bitcast":
            total += _read(user, users, whole, module)
        elif user.is_fusion:
            body = module.computations[user.called["calls"][0]]
            inner = _users(body)
            total += sum(
                _read(one, inner, whole, module)
                for one in body.values()
                if one.opcode == "parameter" and user.operands[int(one.arguments)] == value.name
            )
        elif user.opcode in _TAKES and user.operands[0] == value.name:
            total += user.bytes
        elif user.opcode not in _PUTS or user.operands[0] != value.name:
            return whole
    return total


Value = TypeVar("Value")


@dataclass(frozen=True)
class Figures:
    """The figures of one run of a program, per chip."""

    memory: Memory
    flops: int  # of products
    bytes_accessed: int  # of a chip's memory
    collectives: Mapping[str, Traffic]
    kernels: Mapping[Call, int] = field(default_factory=dict)  # how often each is called
    products: Mapping[Call, int] = field(default_factory=dict)  # outside kernels
    own: Instructions = Instructions()


@dataclass(frozen=True)
class Compiled:
    """A program's figures, and its text, which is empty if the compiler refused it."""

    figures: Figures
    text: str
    seconds: float  # to trace, lower and compile


def compiled(program: Program, target: Target) -> Compiled:
    """Compiles a program for the target.

    A program that does not fit has the memory that the refusal names, and neither collectives nor
    the traffic of its instructions.

    Raises:
      InputError: the compiler fails for another reason.
    """
    start = time.perf_counter()
    with target.tracing():
        traced = program.function.trace(*program.arguments)
        lowered = traced.lower(lowering_platforms=(target.platform,))
    done = count(live(traced.jaxpr), program.trips)
    text, across, own = "", {}, Instructions()
    try:
        executable = lowered.compile(compiler_options=target.options or None)
    except jax.errors.JaxRuntimeError as error:
        memory = of_refusal(str(error))
        if memory is None:
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"plan: the compiler of {target.name} fails on the {program.name} ({reason})"
            ) from None
    else:
        memory, text = of(executable), executable.as_text() or ""
        module = hlo.parse(text)
        across, own = collectives(module, program.trips), instructions(module, program.trips)
    figures = Figures(
        memory,
        flops=round(done.flops),
        bytes_accessed=own.accessed + done.kernel_bytes,
        collectives=across,
        kernels=_rounded(done.kernels),
        products=_rounded(done.products),
        own=own,
    )
    return Compiled(figures, text, time.perf_counter() - start)


def along(first: Value, second: Value, *, at: tuple[int, int, int]) -> Value:
    """Extrapolates: the value at at[2] on the line through `first` at at[0], `second` at at[1].

    Values are whole numbers, dataclasses of values, or mappings to values.
    """
    low, high, wanted = at
    share = Fraction(wanted - low, high - low)
    return _combined(first, second, lambda a, b: max(round(a + (b - a) * share), 0))


def _combined(a: Any, b: Any, line: Callable[[int, int], int]) -> Any:
    if isinstance(a, int):
        return line(a, b)
    if isinstance(a, Mapping):
        nothing = {name: type(value)() for name, value in {**a, **b}.items()}
        a, b = {**nothing, **a}, {**nothing, **b}
        return {name: _combined(a[name], b[name], line) for name in a}
    pairs = ((f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return type(a)(**{name: _combined(x, y, line) for name, x, y in pairs})
