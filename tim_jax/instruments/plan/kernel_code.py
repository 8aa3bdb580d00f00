"""The code of Pallas kernels in the text of a compiled program, in a form that can be compared.

What does not decide how numbers are computed is left out: on a TPU the sizes of the grid and of
tables of integers, on a GPU everything about places in memory, so that the order of the operations
on floats remains.
"""

import base64
import re
from collections.abc import Iterator
from typing import Any

from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mosaic.python import mosaic_gpu, tpu
from jaxlib.triton import dialect as triton

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


def body(attributes: str) -> str:
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
    stored = match[1]
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    try:
        with context:
            text = str(ir.Module.parse(base64.b64decode(stored)))
    except (ir.MLIRError, ValueError):
        return stored
    return _TABLE.sub("memref<i32, #tpu.memory_space<smem>>", without_bounds(text))


def computes(body: str) -> bool:
    """Whether a kernel's code makes floats, as one that could not be read is taken to do."""
    readable = "stable_mosaic." in body or "tt." in body or "stable_mosaic_gpu." in body
    return not readable or _ARITHMETIC.search(body) is not None


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
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    dialect.register_dialect(context)
    try:
        with context:
            code = ir.Module.parse(_bytes(stored))
            return "\n".join(_on_floats(code.operation, {}))
    except (ir.MLIRError, ValueError):
        return stored


def _bytes(stored: str) -> bytes:
    def byte(match: re.Match[bytes]) -> bytes:
        text = match[1]
        return text if len(text) == 1 else bytes([int(text, 16)])

    return _ESCAPED.sub(byte, stored.encode())


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
                settings = " ".join(sorted(_settings(inner)))
                yield f"{inner.name} [{taken}] {settings} -> {kinds}"
                yield from (f"  {line}" for line in held)


def _number(values: Any, numbers: dict[Any, int]) -> None:
    for value in values:
        if _is_float(value):
            numbers[value] = len(numbers)


def _is_float(value: Any) -> bool:
    return _FLOAT.fullmatch(str(value.type)) is not None


def _settings(operation: Any) -> Iterator[str]:
    for name in operation.attributes:
        if "divisibility" not in str(name):
            yield f"{name} {operation.attributes[name]}"
