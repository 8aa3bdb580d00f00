"""Sums and exponentials over the vocabulary, in blocks of `lanes`, ascending.

Lane i of a sum takes elements i, i + lanes, ...; what a block has beyond the row's end counts as
nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels.pallas import padded
from tim_jax.kernels.pallas_tpu.call import call
from tim_jax.numerics import Numerics

_ROWS = 8


def exponentials(x: jax.Array, peak: jax.Array, *, numerics: Numerics) -> jax.Array:
    """exp(x - peak), elementwise."""

    def kernel(x_ref, peak_ref, out_ref):
        out_ref[...] = jnp.exp(x_ref[...] - jnp.broadcast_to(peak_ref[...], x_ref.shape))

    rows, lanes = padded(x, _ROWS), numerics.tpu.lanes
    tile = pl.BlockSpec((_ROWS, lanes), lambda i, j: (i, j))
    return call(
        kernel,
        numerics=numerics,
        name="exponentials",
        grid=(rows.shape[0] // _ROWS, -(-x.shape[1] // lanes)),
        in_specs=[tile, pl.BlockSpec((_ROWS, 1), lambda i, j: (i, 0))],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
    )(rows, padded(peak[:, None], _ROWS))[: x.shape[0]]


def row_sum(x: jax.Array, *, numerics: Numerics) -> jax.Array:
    """Sum over the last axis."""
    return _folded(lambda x: x, lambda total: total, (x,), numerics, name="row_sum")


def log_normaliser(x: jax.Array, peak: jax.Array, *, numerics: Numerics) -> jax.Array:
    """log(sum(exp(x - peak))), in one pass."""

    def weight(x, peak):
        return jnp.exp(x - jnp.broadcast_to(peak, x.shape))

    inputs = x, peak[:, None]
    return _folded(weight, jnp.log, inputs, numerics, name="log_normaliser")


def log(x: jax.Array, *, numerics: Numerics) -> jax.Array:
    """Natural logarithm, elementwise."""

    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.log(x_ref[...])

    rows = padded(x[:, None], _ROWS, value=1.0)
    block = pl.BlockSpec((_ROWS, 1), lambda i: (i, 0))
    return call(
        kernel,
        numerics=numerics,
        name="log",
        grid=(rows.shape[0] // _ROWS,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
    )(rows)[: x.shape[0], 0]


def _folded(f, finish, inputs, numerics, *, name):
    """finish(sum of f(x)) per row, of x [N, V] and further numbers per row [N, 1]."""
    count, width = inputs[0].shape
    inputs = [padded(x, _ROWS) for x in inputs]
    lanes = numerics.tpu.lanes
    one = pl.BlockSpec((_ROWS, 1), lambda i, j: (i, 0))
    return call(
        partial(_fold, f=f, finish=finish, width=width),
        numerics=numerics,
        name=name,
        grid=(inputs[0].shape[0] // _ROWS, -(-width // lanes)),
        scratch=[(_ROWS, lanes)],
        in_specs=[
            pl.BlockSpec((_ROWS, lanes), lambda i, j: (i, j)),
            *(one,) * (len(inputs) - 1),
        ],
        out_specs=one,
        out_shape=jax.ShapeDtypeStruct((inputs[0].shape[0], 1), jnp.float32),
    )(*inputs)[:count, 0]


def _fold(x_ref, *refs, f, finish, width: int):
    numbers, out_ref, total = refs[:-2], refs[-2], refs[-1]
    index = pl.program_id(1)

    @pl.when(index == 0)
    def _start():
        total[...] = jnp.zeros_like(total)

    x = x_ref[...]
    at = index * x.shape[1] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    total[...] += jnp.where(at < width, f(x, *(ref[...] for ref in numbers)), 0.0)

    @pl.when(index == pl.num_programs(1) - 1)
    def _finish():
        out_ref[...] = finish(jnp.sum(total[...], axis=1, keepdims=True))
