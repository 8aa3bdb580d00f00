"""Compares the sampler's compiled forward with the learner's, operation by operation.

Each product, float sum, kernel and sum over devices in the text of the sampler's program is matched
with its counterpart in the learner's programs: the same operation, types, layouts and code. Of a
Pallas kernel's code what does not decide how numbers are computed is left out: on a TPU the sizes
of the grid and of tables of integers, on a GPU everything about places in memory, so that the order
of the operations on floats remains. Of a bfloat16 product by Triton the tile is left out as well.
A kernel may write its results into arrays that it is given, such as a cache, where its counterpart
makes new ones: that is no difference either.
"""

import base64
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mosaic.python import mosaic_gpu, tpu
from jaxlib.triton import dialect as triton

from tim_jax.instruments.plan import hlo
from tim_jax.instruments.plan.hlo import Computation, Instruction, Module, Type
from tim_jax.kernels.pallas import PRIMITIVES

# Of the custom calls that are kernels.
TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2")

# Text in which every byte that is no letter stands as a backslash and two digits.
_TRITON = re.compile(r'\bir = "((?:[^"\\]|\\.)*)"')
_MOSAIC_GPU = re.compile(r'\bmodule = "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(rb'\\([0-9A-Fa-f]{2}|["\\])')
# A float, several of them, and the accumulators of a warpgroup's products.
_FLOAT = re.compile(
    r"(?:(?:tensor|vector)<(?:\d+x)*)?(?:bf|f)\d\w*>?|!llvm\.struct<\((?:f32(?:, )?)+\)>"
)
_BODY = re.compile(r'"body":\s*"([^"]*)"')
_BOUNDS = re.compile(r"iteration_bounds = array<i64: ([\d, ]*)>")
# A table of integers that index maps read: its sizes follow the rows of a batch.
_TABLE = re.compile(r"memref<(?:\d+x)+i32, #tpu.memory_space<smem>>")
# Operations that make floats of floats, and do not only move or widen them.
_ARITHMETIC = re.compile(
    r"arith\.(?:add|sub|mul|div|max|min|rem)\w*f\b|math\.|matmul|contract|tt\.dot|wgmma|reduc|tt\.extern"
)
_COMPARED = re.compile(r'arith\.cmpi"\(%arg(\d+), (%\d+)\)')
_PRODUCTS = ("dot", "convolution", "ragged-dot")
_LIBRARY = '"__cublas'  # a product that the compiler leaves to cuBLAS
_ACROSS = ("all-reduce", "all-reduce-start", "reduce-scatter")
_SUMS = ("reduce", "reduce-window", "scatter", "select-and-scatter", *_ACROSS)
# Beginnings of JAX's primitives that add up; a sum elsewhere is the compiler's.
_ADDS = ("reduce_", "cum", "psum", "scatter", "dot_general", "conv_general", "add")
_BACKWARD = re.compile(r"transpose\(|rematted|/backward")
# Sizes of Triton's arrays, its sums along one, and what is read in a loop, that is multiplied.
_ARRAY = re.compile(r"(?<=tensor<)(?:\d+x)+")
_TRITON_SUM = re.compile(r"tt\.(?:reduce|scan)\b")
_LOADS = re.compile(r"^ {4,}tt\.load .*-> tensor<\d+x\d+x(\w+)>", re.MULTILINE)
# Not part of what is computed.
_IGNORED = re.compile(
    r"metadata=\{[^}]*\}|frontend_attributes=\{[^}]*\}|sharding=\{[^}]*\}|origin=\{[^}]*\}"
    r"|backend_config=.*$|(calls|to_apply|body|condition)=%?[\w.\-]+|control-predecessors=\{[^}]*\}"
)
_SIZES = re.compile(r"(slice|padding|window|dynamic_slice_sizes|slice_sizes)=(\{[^}]*\}|[\d_x\-]+)")
_MEMORY = re.compile(r"S\(\d+\)")
_IN_PLACE = re.compile(r"\{(\d+)\}: \((\d+), \{\}")  # a result, and the operand that it replaces
_INTEGERS = ("s", "u", "pred")
_TILING = re.compile(r'"window_config":(\{[^}]*\})|\b(num_(?:warps|stages) = \d+)')


# A crossing is a sum over devices. A pick is a sum that the compiler wrote where the traced program
# slices or gathers: all values but one are zero. A move is a kernel that computes no float.
KINDS = ("kernel", "product", "sum", "crossing", "pick", "move")
COMPARED = KINDS[:4]  # by their order; the others have none


@dataclass(frozen=True)
class Operation:
    """A product, a sum of floats or a kernel, by itself or with the fusion that it is part of.

    Two of them with the same fields, but for the number of rows of their arrays, compute every row
    in the same way and order, as far as the text of a program tells.
    """

    kind: str  # one of KINDS
    name: str  # the opcode, or the kernel's name
    operands: tuple[Type, ...]
    results: tuple[Type, ...]
    summed: tuple[int, ...]  # sizes that are summed over, where the text has them
    body: str = field(repr=False)  # its code, without sizes
    tiling: str = ""  # the compiler's tiles, where the text has them
    # Results that a kernel writes into arrays which it is given. They lie as these do, and the
    # arrays are not among the operands.
    in_place: tuple[int, ...] = ()
    place: str = field(default="", compare=False)  # of one such operation in the traced program


def operations(module: Module) -> Iterator[Operation]:
    """All operations of a program, each once."""
    for visit in hlo.visits(module):
        if not visit.fused and (found := _operation(visit.instruction, visit.computation, module)):
            yield found


def layout(one: Type) -> str:
    """An array's layout, without the memory that it is in."""
    return _MEMORY.sub("", one.layout)


def backward(operation: Operation) -> bool:
    """Whether it belongs to a gradient, by its place in the traced program."""
    return bool(_BACKWARD.search(operation.place))


def _operation(one: Instruction, computation: Computation, module: Module) -> Operation | None:
    inner = list(_inside(one, computation, module))
    products = [(i, c) for i, c in inner if i.opcode in _PRODUCTS or _LIBRARY in i.attributes]
    sums = [(i, c) for i, c in inner if _adds_floats(i, module)]
    kernel = one.opcode.removesuffix("-start") == "custom-call" and any(
        f'custom_call_target="{target}"' in one.attributes for target in TARGETS
    )
    if not (products or sums or kernel):
        return None
    place = next((i.op_name for i, _ in (*products, *sums) if i.op_name), one.op_name)
    body = kernel_code(one.attributes) if kernel else _written(one, computation, module)
    untiled = without_tile(body) if kernel else body
    tiling = filter(None, chain(*_TILING.findall(one.attributes)))
    if kernel:  # by the name that it was given; the compiler may have changed the instruction's
        parts = one.op_name.split("/")
        kind = "kernel" if computes(body) else "move"
        name = parts[-2] if parts[-1] in PRIMITIVES and len(parts) > 1 else one.name
        written = {int(i): int(operand) for i, operand in _IN_PLACE.findall(one.attributes)}
    else:
        kind, name = "product" if products else _kind(sums), (products or sums)[0][0].opcode
        written = {}
    read = [name for i, name in enumerate(one.operands) if i not in written.values()]
    return Operation(
        kind=kind,
        name=name,
        # Integers tell a kernel where it reads and writes.
        operands=tuple(
            one
            for name in read
            for one in computation[name].types
            if not (kernel and one.dtype.startswith(_INTEGERS))
        ),
        results=one.types,
        summed=tuple(sorted(n for i, c in (*products, *sums) for n in _summed(i, c))),
        body=untiled,
        tiling=", ".join(tiling) if untiled == body else "",
        place=place,
        in_place=tuple(written),
    )


def _kind(sums: list[tuple[Instruction, Computation]]) -> str:
    """A pick if the traced program has no sum here; assumed is one if its text does not say."""
    places = [one.op_name for one, _ in sums]
    if not any(not place or place.rpartition("/")[2].startswith(_ADDS) for place in places):
        return "pick"
    return "crossing" if any(one.opcode in _ACROSS for one, _ in sums) else "sum"


def _inside(one: Instruction, computation: Computation, module: Module):
    """The instruction itself, or all of a fusion's, inner fusions included."""
    if not one.is_fusion:
        yield one, computation
        return
    body = module.computations[one.called["calls"][0]]
    for inner in body.values():
        yield from _inside(inner, body, module)


def _adds_floats(one: Instruction, module: Module) -> bool:
    """Whether it is a sum whose order matters, unlike a maximum or a sum of integers."""
    if one.opcode not in _SUMS or not any(t.dtype.startswith(("f", "bf")) for t in one.types):
        return False
    (applied,) = one.called["to_apply"]
    codes = {inner.opcode for inner in module.computations[applied].values()}
    return bool(codes & {"add", "multiply", "fusion"})


def _summed(one: Instruction, computation: Computation) -> list[int]:
    if one.opcode in _ACROSS:
        return []
    dims = computation[one.operands[0]].types[0].dims
    axes = {"reduce": "dimensions", "dot": "lhs_contracting_dims"}.get(one.opcode)
    if axes:
        match = re.search(rf"\b{axes}=\{{([\d,]*)\}}", one.attributes)
        return [dims[int(axis)] for axis in match[1].split(",") if axis] if match else []
    labels = re.search(r"dim_labels=([\w?]+)_", one.attributes)
    return [dims[labels[1].index("f")]] if labels else []


def _written(one: Instruction, computation: Computation, module: Module) -> str:
    """An instruction's code as text, without names and sizes."""
    numbers: dict[tuple[int, str], int] = {}
    lines: list[str] = []

    def line(value: Instruction, within: Computation, top: bool) -> int:
        key = (id(within), value.name)
        if key in numbers:
            return numbers[key]
        ins = [] if top and within is computation else value.operands
        given = [line(within[name], within, False) for name in ins if name in within]
        called = [
            _written(next(i for i in body.values() if i.root), body, module)
            for names in value.called.values()
            for body in (module.computations[name] for name in names)
        ]
        # A scalar constant is part of the code; the values of arguments are not.
        literal = value.arguments if value.opcode == "constant" else ""
        types = ",".join(f"{t.dtype}/{len(t.dims)}{layout(t)}" for t in value.types)
        attributes = _SIZES.sub(r"\1", _IGNORED.sub("", value.attributes))
        lines.append(f"{types} {value.opcode}{given}{literal}{attributes.strip(' ,')}{called}")
        numbers[key] = len(numbers)
        return numbers[key]

    line(one, computation, True)
    return "\n".join(lines)


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """An operation of the sampler, and the nearest one of the learner."""

    operation: Operation
    count: int  # how often the sampler's program has it
    counterpart: Operation | None  # None: the learner has none of the kind
    differences: tuple[str, ...]  # empty: the operations are the same
    sizes: tuple[str, ...]  # row counts and the like that may differ: "64 and 10240"

    @property
    def in_layout_alone(self) -> bool:
        """Whether they differ, but only in how arrays lie in memory, as arrays of few rows may."""
        return bool(self.differences) and all(": layout " in text for text in self.differences)


def compare(
    sampler: str, learner: Iterable[str], *, weights: Collection[Shape]
) -> tuple[Match, ...]:
    """Compares the texts of compiled programs; operations that differ come first.

    Args:
      sampler: the text of the sampler's program.
      learner: texts of programs that contain the learner's forward; their gradients are left out.
      weights: shapes of the model's weights. These must be the same in both programs; other arrays
        may have different numbers of rows.
    """
    counts = Counter(operations(hlo.parse(sampler)))
    # In their order, so that among equally near ones the first is named.
    candidates = dict.fromkeys(
        other for text in learner for other in operations(hlo.parse(text)) if not backward(other)
    )
    matches = [_nearest(one, count, candidates, weights) for one, count in counts.items()]
    return tuple(sorted(matches, key=lambda match: (not match.differences, match.operation.name)))


def _nearest(
    operation: Operation, count: int, candidates: Collection[Operation], weights: Collection[Shape]
) -> Match:
    same = [other for other in candidates if other.kind == operation.kind]
    if not same:
        return Match(operation, count, None, (f"the learner has no {operation.kind}",), ())
    compared = [(differences(operation, other, weights=weights), other) for other in same]
    # The same operation on other arrays is nearer than another operation on the same.
    differing, nearest = min(
        compared,
        key=lambda pair: (
            pair[1].name != operation.name,
            pair[1].body != operation.body,
            len(pair[0]),
        ),
    )
    sizes = () if differing else _sizes(operation, nearest)
    return Match(operation, count, nearest, differing, sizes)


def differences(
    operation: Operation, other: Operation, *, weights: Collection[Shape]
) -> tuple[str, ...]:
    """The differences of two operations in words, the sampler's first."""
    lines = []
    rows = _rows(operation, other, weights)
    for what in ("name", "summed", "tiling", "body"):
        ours, theirs = getattr(operation, what), getattr(other, what)
        if ours != theirs:
            lines.append(what if what == "body" else f"{what} {_text(ours)} / {_text(theirs)}")
    for what in ("operands", "results"):
        ours, theirs = getattr(operation, what), getattr(other, what)
        if len(ours) != len(theirs):
            lines.append(f"{len(ours)} / {len(theirs)} {what}")
            continue
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if what == "results" and index in operation.in_place and a.dtype == b.dtype:
                continue
            lines += [f"{what[:-1]} {index}: {text}" for text in _types(a, b, weights, rows)]
    return tuple(lines)


def _types(
    a: Type, b: Type, weights: Collection[Shape], rows: Collection[tuple[int, int]]
) -> list[str]:
    if (a.dtype, len(a.dims)) != (b.dtype, len(b.dims)):
        return [f"{a} / {b}"]
    if a.dtype.startswith(_INTEGERS):
        return []  # a table of integers follows the numbers of rows and keys, and is never summed
    ours, theirs = layout(a), layout(b)
    lines = [] if ours == theirs else [f"layout {ours} / {theirs}"]
    if a.dims != b.dims and not _only_rows(a.dims, b.dims, weights, rows):
        lines.append(f"sizes {list(a.dims)} / {list(b.dims)}")
    return lines


def _only_rows(
    a: Shape, b: Shape, weights: Collection[Shape], rows: Collection[tuple[int, int]]
) -> bool:
    """Whether two shapes differ in nothing but a number of rows, though weights have such shapes.

    One of them may have a weight's shape by chance, and a vector of a value for each row two: 128
    rows and 1024 are also the sizes of Qwen3-0.6B's norms.
    """
    shaped = (a in weights) + (b in weights)
    if a[1:] != b[1:]:
        return not shaped
    return shaped < 2 or (a[0], b[0]) in rows


def _rows(
    operation: Operation, other: Operation, weights: Collection[Shape]
) -> set[tuple[int, int]]:
    """The two operations' numbers of rows, by their matrices that are no weights."""
    ours, theirs = ((*one.operands, *one.results) for one in (operation, other))
    return {
        (a.dims[0], b.dims[0])
        for a, b in zip(ours, theirs, strict=False)
        if len(a.dims) == len(b.dims) > 1
        and a.dims[1:] == b.dims[1:]
        and not (a.dims in weights and b.dims in weights)
    }


def _sizes(operation: Operation, other: Operation) -> tuple[str, ...]:
    """Pairs of sizes in which the arrays of two operations differ."""
    free = [i for i in range(len(operation.results)) if i not in operation.in_place]
    ours, theirs = ((*x.operands, *(x.results[i] for i in free)) for x in (operation, other))
    pairs = [
        (x, y)
        for a, b in zip(ours, theirs, strict=True)
        for x, y in zip(a.dims, b.dims, strict=True)
        if x != y
    ]
    return tuple(f"{x} and {y}" for x, y in dict.fromkeys(pairs))


def _text(value: object) -> str:
    text = str(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def kernel_code(attributes: str) -> str:
    """The code of a custom call's kernel as text, by its attributes.

    If it cannot be read, the text as it is stored.
    """
    if match := _TRITON.search(attributes):
        return _in_order(match[1], triton)
    if match := _MOSAIC_GPU.search(attributes):
        return _in_order(match[1], mosaic_gpu)
    match = _BODY.search(attributes)
    if not match:
        return attributes
    try:
        with _context(tpu):
            text = str(ir.Module.parse(base64.b64decode(match[1])))
    except (ir.MLIRError, ValueError):
        return match[1]
    return _TABLE.sub("memref<i32, #tpu.memory_space<smem>>", without_bounds(text))


def computes(body: str) -> bool:
    """Whether a kernel's code makes floats, as one that could not be read is taken to do."""
    readable = "stable_mosaic." in body or "tt." in body or "stable_mosaic_gpu." in body
    return not readable or _ARITHMETIC.search(body) is not None


def without_tile(body: str) -> str:
    """The code of one of Triton's bfloat16 products without the sizes of its arrays; other code.

    There a tile decides no bits: an element is one chain of multiply-adds in every tile, see
    `numerics.GpuTiles`, and nothing but elementwise operations follow.
    """
    free = "tt.dot" in body and not _TRITON_SUM.search(body)
    return _ARRAY.sub("", body) if free and set(_LOADS.findall(body)) == {"bf16"} else body


def without_bounds(text: str) -> str:
    """The code of a kernel for a grid of any sizes.

    `pl.num_programs(axis) - 1` is a number in the code. The last comparison of the step's index is
    the one with this number.
    """
    match = _BOUNDS.search(text)
    if not match:
        return text
    bounds = [int(n) for n in match[1].split(",") if n.strip()]
    last = {int(one[1]): one for one in _COMPARED.finditer(text)}
    # From the end, so that earlier places stay where they are.
    for axis, one in sorted(last.items(), key=lambda pair: -pair[1].start()):
        if axis < len(bounds):
            prefix = f'{one[2]} = "stable_mosaic.arith.constant"() {{value = '
            at = text.rfind(f"{prefix}{bounds[axis] - 1} : i32", 0, one.start())
            if at >= 0:
                stop = text.index(" : i32", at)
                text = f"{text[:at]}{prefix}last{text[stop:]}"
    return _BOUNDS.sub("", text)


def _in_order(stored: str, dialect: Any) -> str:
    """Of a kernel for GPUs, by its stored form: its operations on floats.

    Mosaic's has its products as text of machine instructions.
    """

    def byte(match: re.Match[bytes]) -> bytes:
        text = match[1]
        return text if len(text) == 1 else bytes([int(text, 16)])

    try:
        with _context(dialect):
            code = ir.Module.parse(_ESCAPED.sub(byte, stored.encode()))
            return "\n".join(_on_floats(code.operation, {}))
    except (ir.MLIRError, ValueError):
        return stored


def _context(dialect: Any) -> Any:
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    dialect.register_dialect(context)
    return context


def _on_floats(operation: Any, numbers: dict[Any, int]) -> Iterator[str]:
    """The operations that read or write floats, in their order, and the loops that hold them.

    Args:
      numbers: numbers of the floats so far, in the order in which they are defined.
    """
    for region in operation.regions:
        for block in region.blocks:
            _number(block.arguments, numbers)
            for one in block.operations:
                inner = one.operation
                floats = [value for value in (*inner.operands, *inner.results) if _is_float(value)]
                held = list(_on_floats(inner, numbers))
                if not (floats or held):
                    continue
                taken = " ".join(str(numbers.get(value, "_")) for value in inner.operands)
                _number(inner.results, numbers)
                kinds = " ".join(str(value.type) for value in inner.results)
                names = (name for name in inner.attributes if "divisibility" not in str(name))
                settings = " ".join(sorted(f"{name} {inner.attributes[name]}" for name in names))
                # Of a whole function these are its name and its arguments, which say where.
                settings = "" if inner.name == "tt.func" else settings
                yield f"{inner.name} [{taken}] {settings} -> {kinds}"
                yield from (f"  {line}" for line in held)


def _number(values: Any, numbers: dict[Any, int]) -> None:
    for value in values:
        if _is_float(value):
            numbers[value] = len(numbers)


def _is_float(value: Any) -> bool:
    return _FLOAT.fullmatch(str(value.type)) is not None
