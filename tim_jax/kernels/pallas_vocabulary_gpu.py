"""Sums and exponentials over the vocabulary, as kernels for GPUs.

One program has a row, or a block of one. A row is read in blocks of `lanes`, ascending: lane i of
the sum takes elements i, i + lanes, ...
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from tim_jax.kernels.pallas import LOG2_E, padded
from tim_jax.kernels.pallas_calls import gpu_call as call
from tim_jax.numerics import Numerics

_WARPS = 8


def exponentials(x: jax.Array, peak: jax.Array, *, numerics: Numerics) -> jax.Array:
    """exp(x - peak), elementwise."""
    lanes = _lanes(x, numerics)
    row = pl.BlockSpec((None, x.shape[1]), lambda i, j: (i, 0))
    return call(
        partial(_exponentials, lanes=lanes, width=x.shape[1]),
        numerics=numerics,
        warps=_WARPS,
        name="exponentials",
        cost_estimate=pl.CostEstimate(  # of a row that it is given, a program reads `lanes`
            flops=0, transcendentals=x.size, bytes_accessed=2 * x.size * x.dtype.itemsize
        ),
        grid=(x.shape[0], -(-x.shape[1] // lanes)),
        in_specs=[row, pl.BlockSpec((None,), lambda i, j: (i,))],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
    )(x, peak)


def row_sum(x: jax.Array, *, numerics: Numerics) -> jax.Array:
    """Sum over the last axis."""
    kernel = partial(_row_sum, lanes=_lanes(x, numerics), width=x.shape[1])
    return _by_row(kernel, (x,), numerics, name="row_sum")


def log_normaliser(x: jax.Array, peak: jax.Array, *, numerics: Numerics) -> jax.Array:
    """log(sum(exp(x - peak))), in one pass."""
    kernel = partial(_log_normaliser, lanes=_lanes(x, numerics), width=x.shape[1])
    return _by_row(kernel, (x, peak), numerics, name="log_normaliser")


def log(x: jax.Array, *, numerics: Numerics) -> jax.Array:
    """Natural logarithm, elementwise."""
    tile = numerics.gpu.row_tile
    block = pl.BlockSpec((tile,), lambda i: (i,))
    rows = padded(x, tile, value=1.0)
    return call(
        _log,
        numerics=numerics,
        warps=_WARPS,
        name="log",
        grid=(rows.shape[0] // tile,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
    )(rows)[: x.shape[0]]


def _lanes(x, numerics: Numerics) -> int:
    return min(numerics.gpu.lanes, pl.next_power_of_2(x.shape[1]))


def _by_row(kernel, inputs, numerics, *, name):
    """One number per row, of x [N, V] and further numbers per row."""
    rows, width = inputs[0].shape
    one = pl.BlockSpec((None,), lambda i: (i,))
    return call(
        kernel,
        numerics=numerics,
        warps=_WARPS,
        name=name,
        grid=(rows,),
        in_specs=[pl.BlockSpec((None, width), lambda i: (i, 0)), *(one,) * (len(inputs) - 1)],
        out_specs=one,
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
    )(*inputs)


def _exponentials(x_ref, peak_ref, out_ref, *, lanes: int, width: int):
    at = pl.program_id(1) * lanes + jnp.arange(lanes)
    x = plt.load(x_ref.at[at], mask=at < width, other=0.0)
    plt.store(out_ref.at[at], jnp.exp2((x - peak_ref[...]) * LOG2_E), mask=at < width)


def _row_sum(x_ref, out_ref, *, lanes: int, width: int):
    out_ref[...] = jnp.sum(_folded(lambda x: x, x_ref, lanes, width, neutral=0.0))


def _log_normaliser(x_ref, peak_ref, out_ref, *, lanes: int, width: int):
    peak = peak_ref[...]
    weights = _folded(
        lambda x: jnp.exp2((x - peak) * LOG2_E), x_ref, lanes, width, neutral=-jnp.inf
    )
    out_ref[...] = jnp.log(jnp.sum(weights))


def _folded(f, x_ref, lanes, width, *, neutral):
    """f(x) [lanes], summed over the blocks of a row; `neutral` stands beyond its end."""

    def step(index, total):
        at = index * lanes + jnp.arange(lanes)
        return total + f(plt.load(x_ref.at[at], mask=at < width, other=neutral))

    return jax.lax.fori_loop(0, -(-width // lanes), step, jnp.zeros((lanes,), jnp.float32))


def _log(x_ref, out_ref):
    out_ref[...] = jnp.log(x_ref[...])
