"""Fits kernels to a model: blocks that suit it, refusals by name, names of kernels."""

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend.core import jaxprs_in_params

from tim_jax import kernels
from tim_jax.common.errors import InputError
from tim_jax.kernels import pallas, pallas_gpu, pallas_mosaic_gpu, pallas_tpu
from tim_jax.model import transformer
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution
from tim_jax.model.weights import joined, matrices, parameter_shapes
from tim_jax.numerics import GPU_FAMILIES, MatmulTile, Numerics

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
    pallas.check_platform(numerics)
    if numerics.family in GPU_FAMILIES:
        _check_gpu(config, numerics)
    elif numerics.family == "pallas_tpu":
        _check_tpu(config, numerics)


def check_dtypes(numerics: Numerics) -> None:
    """Raises InputError if operands of a product have a dtype that the family's kernels lack."""
    precision = numerics.precision
    operands = numerics.compute_dtype, precision.head, precision.router, precision.choice
    if "float16" in operands and numerics.family in _WITHOUT_FLOAT16:
        raise InputError(
            f"numerics: {numerics.family} has no products of float16,"
            f" {_WITHOUT_FLOAT16[numerics.family]}"
        )


def _check_gpu(config: ModelConfig, numerics: Numerics) -> None:
    mosaic = numerics.family == "pallas_mosaic_gpu"
    if mosaic:
        pallas_mosaic_gpu.check(numerics)
    check_dtypes(numerics)
    _check_gpu_heads(config, numerics)
    if numerics.kv_block < pallas_gpu.LEAST:
        raise InputError(
            f"numerics: {numerics.family} needs a kv_block of at least {pallas_gpu.LEAST}, got"
            f" {numerics.kv_block}"
        )
    for name, size, width, parts in _weights(config, numerics):
        least = pallas_mosaic_gpu.LEAST if mosaic else pallas_gpu.LEAST
        for tile in (numerics.gpu.experts, *numerics.gpu.matmul):
            shape = size, width * parts
            pallas_gpu.blocks(shape, parts, tile.columns, numerics, name, least=least)


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


def _check_tpu(config: ModelConfig, numerics: Numerics) -> None:
    check_dtypes(numerics)
    for size in config.attention[1:]:
        if size % 16:
            raise InputError(
                f"numerics: pallas_tpu cannot take heads of {size}; it takes multiples of 16, and"
                ' family "tiles" any'
            )
    if numerics.kv_block < pallas_tpu.LEAST:
        raise InputError(
            f"numerics: pallas_tpu needs a kv_block of at least {pallas_tpu.LEAST}, got"
            f" {numerics.kv_block}"
        )
    for name, size, width, parts in _weights(config, numerics):
        pallas_tpu.blocks((size, width * parts), parts, numerics, name)


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
