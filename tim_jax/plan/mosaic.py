"""What a Pallas kernel does, read back from a compiled TPU program."""

import base64
import re

from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

_BODY = re.compile(r'"body":\s*"([^"]*)"')
_BOUNDS = re.compile(r"iteration_bounds = array<i64: ([\d, ]*)>")
_COMPARED = re.compile(r'arith\.cmpi"\(%arg(\d+), (%\d+)\)')


def body(attributes: str) -> str:
    """The kernel's code as text, without what follows from the sizes of its arrays: how often its
    steps run, and which one is the last. As it is stored, if it cannot be read."""
    found = _BODY.search(attributes)
    if not found:
        return attributes
    stored = found[1]
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    try:
        with context:
            text = str(ir.Module.parse(base64.b64decode(stored)))
    except (ir.MLIRError, ValueError):
        return stored
    return without_bounds(text)


def without_bounds(text: str) -> str:
    """The code of a kernel for a grid of any sizes.

    `pl.num_programs(axis) - 1` is a number in the code, which the step's index is compared with
    after all other comparisons of it.
    """
    found = _BOUNDS.search(text)
    if not found:
        return text
    bounds = [int(n) for n in found[1].split(",") if n.strip()]
    last = {int(one[1]): one for one in _COMPARED.finditer(text)}
    # From the end, so that earlier places stay where they are.
    for axis, one in sorted(last.items(), key=lambda pair: -pair[1].start()):
        if axis < len(bounds):
            made = f'{one[2]} = "stable_mosaic.arith.constant"() {{value = '
            at = text.rfind(f"{made}{bounds[axis] - 1} : i32", 0, one.start())
            if at >= 0:
                stop = text.index(" : i32", at)
                text = f"{text[:at]}{made}last{text[stop:]}"
    return _BOUNDS.sub("", text)
