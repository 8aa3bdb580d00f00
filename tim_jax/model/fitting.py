"""Fits kernels to a model and a machine: blocks, row counts, refusals by name, names of kernels.

Measured on the backend at hand is how far row counts may vary without changing a row's bits.
Fixed row tiles are exact on any backend, but a small decode batch pays for padding and a large one
for small tiles. So the dots of one model are run at many row counts and their raw bits are
compared; the widest ranges over which they are equal become the `Rows` of a `Numerics`. Where the
head's product is much faster in parts, and has the same bits, decoding takes it in parts. Such a
range is measured on random data, for one backend, version and machine; it is the audit that proves
that the log-probs of a model are equal.

Whether attention may take all keys in one dot depends on how many there are: from some number on,
XLA adds them up in another order. So it is measured up to the longest sequence that there will be.

The measurement is kept in a file, so that a run that resumes need not measure again. It is only
taken from there if machine, versions of JAX, model, numerics and the row counts that were tried are
the same, and if it was made for sequences that are no shorter. The batch may differ:
ranges chosen for another batch are as exact, if perhaps slower, and a run must keep its bits when
its batch or placement changes.
"""

import math
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.core import jaxprs_in_params

from tim_jax import kernels, placement
from tim_jax.common import inputs, machine, waiting
from tim_jax.common.errors import InputError
from tim_jax.kernels import pallas, pallas_gpu, pallas_tpu
from tim_jax.model import transformer
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, jit
from tim_jax.model.files import read_json, write_json
from tim_jax.model.weights import column_parts, joined, matrices, parameter_shapes
from tim_jax.numerics import GPU_FAMILIES, MatmulTile, Numerics, Rows

# Families without products of float16 -> why, and what takes it.
_WITHOUT_FLOAT16 = {
    "pallas_mosaic_gpu": 'which is for bfloat16; family "pallas_gpu" takes any',
    "pallas_tpu": 'as TPUs have none; it takes float32 and bfloat16, and family "tiles" any',
}
_GPU_HEADS = (16, 32, 64, 128, 256)
_GPU_STATES = (*_GPU_HEADS, 512)  # of latent attention
# Compute capabilities of GPUs whose cores have 99 KB of shared memory, and what loads may take.
_SMALL_CORES = ("8.6", "8.9", "12.")
_SMALL_MEMORY = 96 * 2**10
# One and two rows beyond a multiple of 8 have kernels of their own on some processors: with AVX2
# alone 17, 18, 41 and 42 rows of attention have other bits than 16 and 48.
_PANELS = (8, 9, 10, 16, 17, 18, 24, 25, 26, 32, 33, 34, 40, 41, 42, 48)
_COUNTS = (1, 2, 3, 4, 6, *_PANELS, 49, 50, 56, 64, 96, 128, 256, 512, 1024, 2048)
_ATTENTION_COUNTS = (1, 2, 3, 4, 6, *_PANELS)
_WORTHWHILE = 32  # a learner tile of fewer rows is slow
_SPANS = 12  # numbers of keys that are compared with all keys
_MARGIN = 2  # blocks of keys that caches may have beyond the longest sequence
_MOST_BLOCKS = 64  # of keys; longer sequences are not measured, and have a dot for every block
_PADDING = 3  # how many times its own rows a decode batch may be padded to
_HEAD_COLUMNS = 4096  # of a part of the head, where decoding multiplies it in parts
_FASTER = 1.5  # times, at the least: parts cost memory, and a timing must not change its mind
_TIMINGS = 5
_DRAWS = 2**22 + 15  # a prime number, so that no row or column of a matrix repeats


def fitted(config: ModelConfig, numerics: Numerics) -> Numerics:
    """`numerics` with blocks of attention and of the vocabulary that suit the model."""
    if numerics.family in GPU_FAMILIES:
        numerics = _with_room_for_heads(config, numerics)
        return _with_room_in_small_cores(config, numerics) if _has_small_cores() else numerics
    if numerics.family == "pallas_tpu":
        most = max(pallas_tpu.LEAST, pl.next_power_of_2(config.vocab_size))
        numerics = replace(numerics, tpu=replace(numerics.tpu, lanes=min(numerics.tpu.lanes, most)))
        return _with_room_in_vector_memory(config, numerics)
    return numerics


def _has_small_cores() -> bool:
    return str(pallas.compute_capability()).startswith(_SMALL_CORES)


def _with_room_for_heads(config: ModelConfig, numerics: Numerics) -> Numerics:
    """Smaller blocks of attention on a GPU for wide heads and for the states of latent attention.

    Chosen by compiling for the H200: more do not fit into shared memory or registers.
    """
    gpu, width = numerics.gpu, config.attention.value_dim
    if width <= _GPU_HEADS[-2]:
        return numerics
    if width <= _GPU_HEADS[-1]:
        own, step = min(gpu.gradient_own, 64), min(gpu.gradient_step, 32)
        gpu = replace(gpu, gradient_own=own, gradient_step=step, gradient_stages=1)
        gpu = replace(gpu, attention_stages=min(gpu.attention_stages, 2))
        return replace(numerics, gpu=gpu)
    most = 32 if numerics.dtype.itemsize == 2 else 16
    gpu = replace(
        gpu,
        attention_rows=min(gpu.attention_rows, most),
        attention_warps=8,
        attention_stages=1,
        gradient_own=16,
        gradient_step=min(gpu.gradient_step, most),
        gradient_stages=1,
    )
    return replace(numerics, kv_block=min(numerics.kv_block, most), gpu=gpu)


def _with_room_in_small_cores(config: ModelConfig, numerics: Numerics) -> Numerics:
    """Fewer loads in flight, and smaller parts of attention where heads are wide.

    None decides bits, but for the step of latent attention's gradient. Chosen by compiling for
    compute capability 8.9.
    """
    gpu, width = numerics.gpu, config.attention.value_dim
    wide = width > _GPU_HEADS[-2]
    latent = wide and config.latent is not None

    def fewer(tile: MatmulTile) -> MatmulTile:
        loaded = 2 * gpu.block_k * (tile.rows + tile.columns)  # bytes; see `MatmulTile.stages`
        return replace(tile, stages=min(tile.stages, max(1, _SMALL_MEMORY // loaded)))

    gpu = replace(
        gpu,
        matmul=tuple(map(fewer, gpu.matmul)),
        experts=fewer(gpu.experts),
        attention_rows=min(gpu.attention_rows, 16) if latent else gpu.attention_rows,
        attention_stages=min(gpu.attention_stages, 1 if wide else 2),
        gradient_own=min(gpu.gradient_own, 32 if wide else 64),
        gradient_step=min(gpu.gradient_step, 16) if latent else gpu.gradient_step,
        gradient_stages=min(gpu.gradient_stages, 2),
    )
    return replace(numerics, gpu=gpu)


def _with_room_in_vector_memory(config: ModelConfig, numerics: Numerics) -> Numerics:
    """Fewer heads and blocks in a step of attention on a TPU for heads wider than 128.

    Chosen by compiling for the v5e, heads of 256 and 512. Latent attention has a single key head.
    """
    width, tpu = max(config.attention[1:]), numerics.tpu
    if config.latent is not None or width <= 128:
        return numerics
    times = pl.next_power_of_2(width) // 128
    tpu = replace(
        tpu,
        heads=max(tpu.heads // times, 1),
        attention_blocks=max(tpu.attention_blocks // times, 1),
        gradient_heads=max(tpu.gradient_heads // times**2, 1),
        gradient_keys=max(2 * tpu.gradient_keys // times, 128),
    )
    return replace(numerics, tpu=tpu)


def check(config: ModelConfig, numerics: Numerics) -> None:
    """Raises InputError if these numerics cannot run this model on the default device.

    Before anything is compiled: the wrong device, a head size or key block that a kernel cannot
    take, a matrix that is not in whole blocks.
    """
    kernels.check(numerics)
    if numerics.family not in pallas.PLATFORMS:
        return
    check_dtypes(numerics)
    if numerics.family in GPU_FAMILIES:
        _check_gpu_heads(config, numerics)
    for size in config.attention[1:] if numerics.family == "pallas_tpu" else ():
        if size % 16:
            raise InputError(
                f"numerics: pallas_tpu cannot take heads of {size}; it takes multiples of 16, and"
                ' family "tiles" any'
            )
    kernels.check_blocks(_weights(config, numerics), numerics)


def check_dtypes(numerics: Numerics) -> None:
    """Raises InputError if operands of a product have a dtype that the family's kernels lack."""
    precision = numerics.precision
    operands = numerics.compute_dtype, precision.head, precision.router, precision.choice
    if "float16" in operands and numerics.family in _WITHOUT_FLOAT16:
        raise InputError(
            f"numerics: {numerics.family} has no products of float16,"
            f" {_WITHOUT_FLOAT16[numerics.family]}"
        )


def _check_gpu_heads(config: ModelConfig, numerics: Numerics) -> None:
    """Arrays of Triton have powers of two; keys may be of several, values may not."""
    (_, key, value), family = config.attention, numerics.family
    if config.latent is None and value not in _GPU_HEADS:
        raise InputError(
            f"numerics: {family} cannot take heads of {value}; it takes"
            f' {", ".join(map(str, _GPU_HEADS))}, and family "tiles" any'
        )
    if value not in _GPU_STATES or key % pallas_gpu.LEAST:
        raise InputError(
            f"numerics: {family} cannot take a compressed state of {value} numbers and a rotated"
            f" key of {config.head_dim}; it takes {', '.join(map(str, _GPU_STATES))} and multiples"
            f' of {pallas_gpu.LEAST}, and family "tiles" any'
        )
    large = value > _GPU_HEADS[-1] and numerics.dtype.itemsize == 4
    if large and _has_small_cores() and not numerics.interpret:
        raise InputError(
            f"numerics: {family} cannot take a compressed state of {value} numbers in float32 on a"
            f" GPU of compute capability {pallas.compute_capability()}; it takes bfloat16 there,"
            ' and family "tiles" any'
        )


def _weights(config: ModelConfig, numerics: Numerics) -> Iterator[tuple[str, int, int, int]]:
    """(name, inputs, outputs of each part, parts that share a program) of what a program multiplies
    by: the model's matrices, or their column tiles."""
    sizes, tiles = matrices(config), numerics.column_tiles
    for row in joined(config):
        if row.matrix:
            inputs, outputs = sizes[row.name]
            if row.name == "head":
                outputs = numerics.head_columns(outputs)
            together = len(row.parts) if row.gated else 1
            name = row.title if tiles == 1 else f"one of {tiles} column tiles of {row.title}"
            yield name, inputs, outputs // tiles // together, together


def kernels_used(config: ModelConfig, numerics: Numerics) -> tuple[str, ...]:
    """Names of the Pallas kernels in the forward and the head, found by tracing them.

    Empty for families of plain XLA: there the compiler chooses.
    """
    one = config.with_layers(1)
    execution = Execution(one, numerics)
    weights = jax.eval_shape(execution.prepare, parameter_shapes(one))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def run(weights, tokens):
        hidden, _, _ = transformer.forward(weights, tokens, tokens, execution=execution)
        logits = transformer.logits(weights, hidden[:, 0], execution=execution)
        ops = kernels.family(numerics)
        peak = ops.peak(logits)
        exponentials = ops.exponentials(logits, peak, numerics=numerics)
        total = ops.log(ops.row_sum(exponentials, numerics=numerics), numerics=numerics)
        return total, ops.log_normaliser(logits, peak, exponentials, numerics=numerics)

    return tuple(sorted(set(_pallas_calls(jax.make_jaxpr(run)(weights, tokens).jaxpr))))


def _pallas_calls(jaxpr) -> Iterator[str]:
    """Names of the kernels that a jaxpr calls, inner jaxprs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in pallas.PRIMITIVES:
            yield equation.params["name"]
            continue
        for inner in jaxprs_in_params(equation.params):
            yield from _pallas_calls(inner)


@waiting.during("measuring which tiles keep the bits on this machine")
def calibrate(config: ModelConfig, numerics: Numerics, *, batch: int, longest: int) -> Numerics:
    """Widens the row ranges of tile numerics for this model, on the default backend.

    Args:
      batch: rows of the sampler's decode step, which the ranges should hold without much padding.
      longest: tokens of the longest sequence, prompt and response, that they are to be exact for.

    Returns:
      `numerics` with `rows_by_contraction`, `attention_rows`, `whole_kv` and `decode_head_columns`
      as measured; unchanged for native numerics and off the CPU, where the tiles are only a slow
      reference.
    """
    if numerics.family != "tiles" or jax.default_backend() != "cpu":
        return numerics
    by_contraction = []
    for contraction, most in sorted(_dots(config, numerics).items()):
        holds = [_same_rows((contraction, width), numerics, most[width]) for width in most]
        ranges = _common_ranges(holds, _COUNTS)
        by_contraction.append((contraction, _choose(ranges, batch, numerics.rows)))
    whole_kv, attention_rows = _attention(config, numerics, longest)
    found = replace(
        numerics,
        rows_by_contraction=tuple(by_contraction),
        attention_rows=attention_rows,
        whole_kv=whole_kv,
    )
    return replace(found, decode_head_columns=_head_columns(config, found, batch))


def _dots(config: ModelConfig, numerics: Numerics) -> dict[int, dict[int, int]]:
    """Contraction size -> width of a weight matrix's column tile -> the most rows it is given."""
    dots: dict[int, dict[int, int]] = {}
    for name, (contraction, width) in matrices(config).items():
        widths = dots.setdefault(contraction, {})
        tile = -(-width // numerics.column_tiles)
        most = numerics.head_rows if name == "head" else _COUNTS[-1]
        widths[tile] = max(most, widths.get(tile, 0))
    return dots


def _same_rows(shape: tuple[int, int], numerics: Numerics, most: int) -> list[bool]:
    """`_equal_neighbours` of a product with a matrix of this shape, which has at most `most` rows.

    Counts beyond that hold: they do not occur.
    """
    counts = _COUNTS[: bisect_left(_COUNTS, most) + 1]
    x = _random(0, (counts[-1], shape[0]), numerics)
    weight = jnp.asarray(_random(1, shape, numerics))
    dot = jit(lambda x, weight: _product(x, weight), numerics)  # its programs go with it
    found = _equal_neighbours(lambda rows: _bits(dot(x[rows], weight)), counts)
    return found + [True] * (len(_COUNTS) - len(counts))


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x @ weight as the family "tiles" computes it of one tile of rows."""
    return kernels.tiles.fence(kernels.native.dot(*kernels.native.pin(x, weight)))


def _equal_neighbours(bits: Callable[[slice], np.ndarray], counts: Sequence[int]) -> list[bool]:
    """For each count but the first: whether its rows have the bits they have at the count before.

    Rows are taken from the start and from the end, because a row's bits must not depend on its
    place either. `bits` computes some rows, which are the first axis of its result.
    """

    def both(count: int) -> tuple[np.ndarray, np.ndarray]:
        return bits(slice(count)), bits(slice(-count, None))

    found, (head, tail) = [], both(counts[0])
    for small, count in pairwise(counts):
        longer_head, longer_tail = both(count)
        same = np.array_equal(head, longer_head[:small])
        found.append(same and np.array_equal(tail, longer_tail[-small:]))
        head, tail = longer_head, longer_tail
    return found


def _common_ranges(holds: list[list[bool]], counts: Sequence[int]) -> list[Rows]:
    """The longest ranges of counts over which everything keeps its bits."""
    together = [all(column) for column in zip(*holds, strict=True)]
    ranges, start = [], 0
    for index in range(len(counts)):
        if index == len(together) or not together[index]:
            ranges.append(Rows(counts[start], counts[index]))
            start = index + 1
    return ranges


def _choose(ranges: list[Rows], batch: int, fixed: Rows) -> Rows:
    """The range that serves a decode batch and the learner's many rows best."""

    def cost(rows: Rows) -> tuple[bool, int, int]:
        high = rows.high or _COUNTS[-1]
        padded = rows.split(batch)[0] * rows.split(batch)[1]
        return padded > _PADDING * batch, padded if high >= _WORTHWHILE else 10 * padded, -high

    wide = [rows for rows in ranges if rows.high != rows.low]
    return min(wide, key=cost) if wide else fixed


def _head_columns(config: ModelConfig, numerics: Numerics, batch: int) -> int | None:
    """Columns of the head that a decode step should multiply at a time; None: all.

    XLA:CPU of JAX 0.10 multiplies up to 64 bfloat16 rows by a wide matrix three to five times more
    slowly than by its parts.
    """
    contraction, width = config.hidden_size, config.vocab_size
    several = jax.process_count() > 1  # whose timings could differ, and their programs with them
    if several or numerics.column_tiles > 1 or width < 2 * _HEAD_COLUMNS:
        return None
    rows = numerics.of_head.rows_for(contraction)
    size = rows.split(batch)[1]
    counts = [count for count in _COUNTS if rows.low <= count <= (rows.high or count)]
    x = _random(0, (max(size, *counts), contraction), numerics)
    head = jnp.asarray(_random(1, (contraction, width), numerics))
    whole, parts = (head,), column_parts(head, _HEAD_COLUMNS)

    @partial(jit, numerics=numerics)
    def product(x, parts):
        return jnp.concatenate([_product(x, part) for part in parts], axis=1)

    calls = [partial(product, x[:size], whole), partial(product, x[:size], parts)]
    seconds = _seconds(calls)
    if seconds[0] <= _FASTER * seconds[1]:
        return None
    for count in sorted({size, *counts}):  # of any batch that decodes by these numerics
        if not np.array_equal(_bits(product(x[:count], whole)), _bits(product(x[:count], parts))):
            return None
    return _HEAD_COLUMNS


def _seconds(calls: Sequence[Callable[[], jax.Array]]) -> list[float]:
    """The median time of each call, in turns, after a first one that compiles."""
    jax.block_until_ready([call() for call in calls])
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_TIMINGS):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            taken.append(time.perf_counter() - start)
    return [float(np.median(taken)) for taken in times]


def _attention(config: ModelConfig, numerics: Numerics, longest: int) -> tuple[bool, Rows]:
    """Whether one dot over all keys has the bits of dots over fewer, and for which row counts."""
    block, most = numerics.kv_block, _ATTENTION_COUNTS[-1]
    blocks = -(-longest // block) + _MARGIN
    heads, key_dim, value_dim = config.attention
    shape = (2, heads)
    query = _random(2, (*shape, most, key_dim), numerics)

    def keys_values(count: int) -> tuple[np.ndarray, np.ndarray]:
        key = _random(3, (*shape, key_dim, count * block), numerics)
        return key, _random(4, (*shape, count * block, value_dim), numerics)

    if blocks <= _MOST_BLOCKS:
        key, value = keys_values(blocks)
        in_one = partial(kernels.tiles._attend, numerics=replace(numerics, whole_kv=True))
        attend = jit(in_one, numerics)
        rows = _attention_rows(attend, query, key, value, _last(shape[0], most, blocks * block))

        def same_with(keys: int, count: int) -> bool:
            some, last = query[:, :, :count], _last(shape[0], count, keys)
            fewer = attend(some, key[..., :keys], value[:, :, :keys], last)
            return np.array_equal(_bits(fewer), _bits(attend(some, key, value, last)))

        spans = np.linspace(1, blocks - 1, min(blocks - 1, _SPANS)).round().astype(int)
        counts = {rows.low, rows.high or most}  # a decode step has few rows, the learner many
        if all(same_with(int(span) * block, count) for span in spans for count in counts):
            return True, rows
    # A dot for every block: the number of blocks is that of equal products, so two stand for all.
    in_blocks = partial(kernels.tiles._attend, numerics=replace(numerics, whole_kv=False))
    attend = jit(in_blocks, numerics)
    key, value = (jnp.asarray(x) for x in keys_values(2))
    key, value = kernels.tiles.in_blocks(key, value, block)
    rows = _attention_rows(attend, query, key, value, _last(shape[0], most, 2 * block))
    return False, rows if rows.low != rows.high else numerics.attention_rows


def _attention_rows(attend, query, key, value, last) -> Rows:
    """The range that fills up a decode step least, of those in which a tile may be large."""

    def bits(rows: slice) -> np.ndarray:
        return np.moveaxis(_bits(attend(query[:, :, rows], key, value, last[:, rows])), 2, 0)

    def cost(rows: Rows) -> tuple[bool, int]:
        high = rows.high or _ATTENTION_COUNTS[-1]
        return high < _WORTHWHILE, rows.low if high >= _WORTHWHILE else -high

    ranges = _common_ranges([_equal_neighbours(bits, _ATTENTION_COUNTS)], _ATTENTION_COUNTS)
    wide = [rows for rows in ranges if rows.high != rows.low]
    return min(wide or ranges, key=cost)


def _last(batch: int, rows: int, keys: int) -> np.ndarray:
    """i32[batch, rows]: every other row sees all keys, those between them any number."""
    last = np.random.Generator(np.random.Philox(5)).integers(0, keys, (batch, rows), np.int32)
    last[:, ::2] = keys - 1
    return last


def _random(seed: int, shape: tuple[int, ...], numerics: Numerics) -> np.ndarray:
    """Random numbers, on the host, where slices need no compilation; those of a head repeat."""
    size = min(math.prod(shape), _DRAWS)
    draws = np.random.Generator(np.random.Philox(seed)).standard_normal(size, np.float32)
    return np.resize(draws.astype(numerics.dtype), shape)


def _bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.int32)


def calibrate_once(
    config: ModelConfig, numerics: Numerics, *, batch: int, longest: int, file: Path | None
) -> Numerics:
    """`calibrate`, or its earlier result if `file` has it, for sequences as long or longer.

    A file that is missing, damaged or from another setting is written anew. If it cannot be
    written, nothing is saved.
    """
    if file is None:
        return calibrate(config, numerics, batch=batch, longest=longest)
    valid_for = _describe_setting(config, numerics)
    try:
        saved = read_json(file)
        if saved["of"] == valid_for and saved["longest"] >= longest:
            return replace(numerics, **_from_record(saved["found"]))
    except (KeyError, TypeError, ValueError):
        pass  # there is none, or it is damaged: measure again
    calibrated = calibrate(config, numerics, batch=batch, longest=longest)
    if calibrated != numerics and placement.leads():
        with suppress(OSError):
            write_json(file, {"of": valid_for, "longest": longest, "found": _to_record(calibrated)})
    return calibrated


def _cores() -> int:
    """How many cores XLA has threads for: those that this process may use."""
    ours = getattr(os, "sched_getaffinity", None)
    return len(ours(0)) if ours else os.cpu_count() or 1


def _describe_setting(config: ModelConfig, numerics: Numerics) -> dict[str, Any]:
    return {
        "jax": f"{jax.__version__}, jaxlib {jaxlib.version.__version__}",
        # The CPU's instructions and number of cores, by which XLA chooses kernels.
        "machine": "; ".join([platform.machine(), f"{_cores()} cores", *machine.processor()]),
        "model": inputs.all_fields(config),
        "numerics": inputs.all_fields(numerics),
        "counts": [list(_COUNTS), list(_ATTENTION_COUNTS)],
    }


def _to_record(calibrated: Numerics) -> dict[str, Any]:
    return {
        "rows_by_contraction": [
            [size, rows.low, rows.high] for size, rows in calibrated.rows_by_contraction
        ],
        "attention_rows": [calibrated.attention_rows.low, calibrated.attention_rows.high],
        "whole_kv": calibrated.whole_kv,
        "decode_head_columns": calibrated.decode_head_columns,
    }


def _from_record(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rows_by_contraction": tuple(
            (size, Rows(low, high)) for size, low, high in record["rows_by_contraction"]
        ),
        "attention_rows": Rows(*record["attention_rows"]),
        "whole_kv": bool(record["whole_kv"]),
        "decode_head_columns": record["decode_head_columns"],
    }
