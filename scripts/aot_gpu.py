"""Compiles the GPU kernels and whole programs for a GPU that is not here, and looks at the result.

    python scripts/aot_gpu.py [h200] [--family pallas_mosaic_gpu] [--layers 1] [--kernels-only]
        [--named gradient] [--table]

Needs no GPU and no driver, but the CUDA compiler and JAX's plugin: pip install "tim-jax[cuda]".

Prints, for every tile and program: registers and spills by ptxas, the float operations that XLA
kept for itself, and whether programs of few and of many rows run the same float instructions.
`--table` prints the rows of docs/results/gpu_kernels.md instead: the kernels of Qwen3-1.7B.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
os.environ.setdefault("AOT_GPU_DUMP", tempfile.mkdtemp(prefix="aot_gpu_"))
os.environ.update(
    JAX_PLATFORMS="cpu",
    XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={os.environ['AOT_GPU_DUMP']}"
    " --xla_gpu_dump_llvmir=true --xla_dump_emitter_re=.*",
    MOSAIC_GPU_DUMP_TO=os.environ["AOT_GPU_DUMP"],
)

import jax
import jax.numpy as jnp
import lowering
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tim_jax import kernels
from tim_jax.instruments.plan import topology
from tim_jax.instruments.plan.topology import COMPILER_OPTIONS
from tim_jax.numerics import (
    GPU_EXACT_BF16,
    GPU_EXACT_F16,
    GPU_EXACT_F32,
    GPU_FAMILIES,
    MOSAIC_GPU_BF16_SEVERAL_TILES,
    MOSAIC_GPU_EXACT_BF16,
    Numerics,
)

DUMP = Path(os.environ["AOT_GPU_DUMP"])
_FLOAT = re.compile(
    r"\b(wgmma\.mma_async[\w.]*|mma\.sync[\w.]*|cvt\.rn[\w.]*"
    r"|(?:add|sub|mul|fma|max|min|div|ex2|lg2|rsqrt|sqrt)\.[\w.]*(?:f32|bf16x?2?|f16x?2?))"
)
_XLA_MATHS = frozenset(
    (
        *("add", "subtract", "multiply", "divide", "power", "convert", "scatter"),
        *("exponential", "log", "rsqrt", "sqrt", "tanh", "logistic"),
        *("dot", "convolution", "reduce", "reduce-window"),
    )
)


def compiled(function: Callable, shapes, sharding):
    """The executable, and the PTX files it left, with those of the programs before it forgotten."""
    for file in DUMP.iterdir():
        file.unlink()
    low = lowering.lower("pallas_gpu", function, shapes, sharding=sharding)
    executable = low.compile(compiler_options=dict(COMPILER_OPTIONS))
    return executable, sorted(DUMP.glob("*.ptx"))


def left_to_xla(executable) -> str:
    """Float operations in the optimised module outside of our kernels, by kind."""
    found = Counter()
    for text in executable.as_text().splitlines():
        match = re.search(r"= \(?(?:f32|bf16|f16)\[[^=]*? ([a-z][a-z0-9\-]*)\(", text)
        if match and match[1] in _XLA_MATHS:
            found[match[1]] += 1
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items())) or "none"


def resources(ptx: list[Path]) -> str:
    """Registers, spilled bytes and shared memory of the hungriest kernels of a program."""
    assembler = next(Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu13/bin/ptxas"), None)
    if assembler is None:
        return "no ptxas"
    text = ""
    for file in ptx:
        command = [assembler, "-arch=sm_90a", "-v", file, "-o", "/dev/null"]
        text += subprocess.run(command, capture_output=True, text=True, check=False).stderr
    registers = max(map(int, re.findall(r"Used (\d+) registers", text)), default=0)
    spills = max(map(int, re.findall(r"(\d+) bytes spill stores", text)), default=0)
    return f"{registers} registers, {spills} bytes spilled"


def reason(error: Exception) -> str:
    """Why a program does not compile, in one line."""
    return " ".join(str(error).split())[:200]


def fingerprint(ptx: list[Path]) -> dict[str, int]:
    """How often each float instruction stands in the program."""
    found: Counter[str] = Counter()
    for file in ptx:
        found.update(_FLOAT.findall(file.read_text()))
    return dict(sorted(found.items()))


def kinds(instructions: Collection[str]) -> set[str]:
    """Kinds of instructions, those of the tensor cores without the width of a tile."""
    return {re.sub(r"(m64)n\d+", r"\1", name) for name in instructions}


def look_at_tiles(families: Collection[str], sharding) -> None:
    shape = jax.ShapeDtypeStruct
    shapes = shape((4096, 2048), jnp.bfloat16), shape((2048, 4096), jnp.bfloat16)
    tiles = [(GPU_EXACT_BF16, tile) for tile in GPU_EXACT_BF16.gpu.matmul]
    tiles += [(MOSAIC_GPU_EXACT_BF16, tile) for tile in MOSAIC_GPU_BF16_SEVERAL_TILES.matmul]
    for exact, tile in tiles:
        if exact.family not in families:
            continue
        numerics = replace(exact, gpu=replace(exact.gpu, matmul=(tile,)))
        dot = partial(kernels.family(numerics).dot, numerics=numerics)
        label = f"{numerics.family} dot, tile {tile}"
        try:
            _, ptx = compiled(dot, shapes, sharding)
            print(f"{label}: {resources(ptx)}", flush=True)
        except jax.errors.JaxRuntimeError as error:
            print(f"{label}: {reason(error)}", flush=True)


_LABEL = re.compile(r"^(\$L\w+):")
_BACK = re.compile(r"\bbra(?:\.uni)?\s+(\$L\w+)")
_THUNK = re.compile(r"(\w+) grid: \[([\d, ]+)\] threads: \[(\d+).*shared_memory: (\d+)")
_PER_CORE = {"registers": 65_536, "shared": 233_472, "threads": 2048}


def loops(text: str) -> list[list[str]]:
    """The lines of the loops of a kernel's code, the longest last."""
    lines, labels, found = text.splitlines(), {}, []
    for at, line in enumerate(lines):
        if match := _LABEL.match(line):
            labels[match[1]] = at
        elif (match := _BACK.search(line)) and match[1] in labels:
            found.append(lines[labels[match[1]] : at])
    return sorted(found, key=len)


def step(text: str) -> str:
    """What a step of a kernel's longest loop does: products, other float instructions, all."""
    lines = (loops(text) or [[]])[-1]
    counts = Counter(one for line in lines for one in _FLOAT.findall(line))
    widths = Counter[str]()
    for name in [name for name in counts if "mma" in name]:
        widths[re.search(r"n\d+", name)[0]] += counts.pop(name)
    products = ", ".join(f"{count} {width}" for width, count in widths.items()) or "none"
    exponentials = sum(count for name, count in counts.items() if name.startswith("ex2"))
    barriers = sum("bar.sync" in line for line in lines)
    code = sum(line.rstrip().endswith(";") for line in lines)
    others = sum(counts.values()) - exponentials
    return f"{products} | {exponentials} | {others} | {barriers} | {code}"


def look_at_model(sharding, named: str) -> None:
    """Rows of a table: the kernels of Qwen3-1.7B at the sizes that a device has timed."""
    ops, use = kernels.family(GPU_EXACT_BF16), {"numerics": GPU_EXACT_BF16}
    for name, function, shapes in _of_model(ops, use):
        if named not in name:
            continue
        _, files = compiled(function, shapes, sharding)
        (sequence,) = DUMP.glob("*thunk_sequence.txt")
        for kernel, grid, threads, shared in _THUNK.findall(sequence.read_text()):
            code = next((f for f in files if re.search(rf"entry {kernel}\b", f.read_text())), None)
            if code is None or not re.match("dot|gated|attention|turn|log", kernel):
                continue
            used = resources([code])
            registers = -(-int(used.split()[0]) // 8) * 8 * int(threads)
            fits = (
                _PER_CORE["registers"] // registers,
                _PER_CORE["shared"] // (int(shared) + 1024),
                _PER_CORE["threads"] // int(threads),
            )
            print(
                f"| {name}: `{kernel}` | {grid.replace(', ', ' x ')} | {threads}"
                f" | {used.split()[0]} | {used.split()[2]} | {int(shared):,} | {min(fits)}"
                f" | {step(code.read_text())} |",
                flush=True,
            )


def _of_model(ops, use):
    """(name, function, shapes) of products of a step of decoding and of an update, attention, and
    the step's heads and normaliser."""
    of, dtype, hidden = jax.ShapeDtypeStruct, jnp.bfloat16, 2048
    matrices = {
        "qkv": (ops.dot, hidden, 4096),
        "o": (ops.dot_add, hidden, hidden),
        "gate and up": (ops.gated_dot, hidden, 12_288),
        "down": (ops.dot_add, 6144, hidden),
        "head": (ops.dot, hidden, 151_936),
    }
    for rows in (64, 256, 4096):
        for name, (operation, size, width) in matrices.items():
            count = 1024 if name == "head" and rows > 1024 else rows
            shapes = [of((count, size), dtype), of((size, width), dtype)]
            if operation == ops.dot_add:
                shapes.append(of((count, width), dtype))
            bias = () if operation == ops.dot else (None,)
            call = partial(
                lambda *args, run, bias: run(*args, *bias, **use), run=operation, bias=bias
            )
            yield f"{name}, {count:,} rows", call, shapes
    heads, size = 8, 128
    for batch, rows, length in ((64, 2, 2048), (1, 8192, 4096)):
        query, at = of((batch, heads, rows, size), dtype), of((batch, rows), jnp.int32)
        key = of((batch, heads, size, length), dtype)
        value = of((batch, heads, length, size), dtype)
        attend = partial(ops.attention, aligned=False, **use)
        yield f"{batch} x {rows // 2:,} tokens", attend, [query, key, value, at]

    def gradient(query, key, value, at, cotangent):
        return jax.vjp(lambda *arrays: attend(*arrays, at), query, key, value)[1](cotangent)

    yield "its gradient, 1 x 4,096 tokens", gradient, [query, key, value, at, query]
    rows, f32 = 64, jnp.float32
    parts, angle = (of((rows, n), f32) for n in (4 * heads * size, size // 2))
    optional = dict.fromkeys(("q_norm", "k_norm"), of((size,), f32))
    given = parts, angle, angle, optional
    options = {"heads": kernels.Heads(2 * heads, heads, size), "eps": 1e-6, **use}
    caches = [of((rows, heads, *last), dtype) for last in ((size, 2048), (2048, size))]
    into = partial(kernels.project_into, **options)
    yield "heads, 64 rows", partial(ops.project, **options), given
    yield (
        "heads into the cache, 64 rows",
        lambda caches, at, *given: into(caches, at, None, *given),
        (caches, of((rows, 1), jnp.int32), *given),
    )
    logits = of((rows, 151_936), f32), of((rows,), f32)
    yield "normaliser, 64 rows", lambda x, peak: ops.log_normaliser(x, peak, x, **use), logits


def look_at_kernels(numerics: Numerics, sharding, named: str) -> None:
    """Each kernel at 5 and at 700 rows: the same float instructions?"""
    label = f"{numerics.family} {numerics.compute_dtype}"
    few, many = lowering.operations(numerics, 5), lowering.operations(numerics, 700)
    for name, (function, shapes) in few.items():
        if named not in name:
            continue
        try:
            executable, ptx = compiled(function, shapes, sharding)
            one, used = fingerprint(ptx), resources(ptx)
            _, ptx = compiled(*many[name], sharding)
        except jax.errors.JaxRuntimeError as error:
            print(f"{label} {name}: {reason(error)}", flush=True)
            continue
        other = fingerprint(ptx)
        same = (
            "same"
            if other == one
            else "same, in other tiles"
            if kinds(other) == kinds(one)
            else "OTHER"
        )
        kept = left_to_xla(executable)
        print(
            f"{label} {name}: {used}; 5 and 700 rows: {same} instructions; XLA: {kept}",
            flush=True,
        )


def look_at_programs(numerics: Numerics, sharding, layers: int) -> None:
    config = replace(lowering.CONFIG, num_layers=layers)
    for name, (function, shapes) in lowering.programs(numerics, config=config).items():
        executable, ptx = compiled(function, shapes, sharding)
        memory = executable.memory_analysis()
        print(
            f"{numerics.family} {numerics.compute_dtype} {name}, {layers} layers: {resources(ptx)};"
            f" {memory.temp_size_in_bytes:,} bytes of temporaries; XLA: {left_to_xla(executable)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("device", nargs="?", default="h200", choices=("h100", "h200"))
    parser.add_argument("--family", choices=GPU_FAMILIES, help="without it, both")
    parser.add_argument("--layers", type=int, default=1, help="of the whole programs")
    parser.add_argument("--kernels-only", action="store_true")
    parser.add_argument("--table", action="store_true", help="of the kernels of Qwen3-1.7B alone")
    parser.add_argument("--named", default="", help="kernels with this in their names alone")
    options = parser.parse_args()
    devices = topology.target(f"{options.device}:1").devices
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec())
    if options.table:
        look_at_model(sharding, options.named)
        return
    families = [options.family] if options.family else GPU_FAMILIES
    if not options.named:
        look_at_tiles(families, sharding)
    for numerics in (GPU_EXACT_BF16, GPU_EXACT_F16, GPU_EXACT_F32, MOSAIC_GPU_EXACT_BF16):
        if numerics.family in families:
            look_at_kernels(numerics, sharding, options.named)
    if not (options.kernels_only or options.named):
        several = (
            GPU_EXACT_BF16,
            replace(MOSAIC_GPU_EXACT_BF16, gpu=MOSAIC_GPU_BF16_SEVERAL_TILES),
        )
        for numerics in several:
            if numerics.family in families:
                look_at_programs(numerics, sharding, options.layers)


if __name__ == "__main__":
    main()
