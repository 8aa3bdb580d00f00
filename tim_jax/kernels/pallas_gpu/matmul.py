"""Products with weight matrices: one chain of multiply-adds per element, in the order of K.

A program owns a tile of the result and runs over all of K in steps of `block_k`. Float32 products
are true float32 (no TF32).
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels import formulas, native
from tim_jax.kernels.composed import NATIVE
from tim_jax.kernels.pallas import LOG2_E, divides, fence, padded, with_gradient
from tim_jax.kernels.pallas_gpu.call import call
from tim_jax.numerics import Numerics


def dot(x: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
    """x [N, K] @ weight [K, M] -> float32 [N, M]."""

    def forward(x, weight):
        return fence(_product(fence((x, weight)), [], _plain, jnp.float32, numerics, name="dot"))

    product = jax.custom_vjp(forward)
    product.defvjp(lambda x, w: (forward(x, w), (x, w)), native.dot_backward)
    return product(x, weight)


def dot_add(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array,
    bias: jax.Array | None,
    *,
    numerics: Numerics,
) -> jax.Array:
    """residual + (x @ weight + bias), rounded once."""

    def kernel(x, weight, residual, *bias):
        extras = [("tile", residual), *(("columns", b) for b in bias)]
        return _product((x, weight), extras, _residual_sum, numerics.dtype, numerics, name="dot_add")

    def plain(x, weight, residual, *bias):
        return NATIVE.dot_add(x, weight, residual, bias[0] if bias else None, numerics=numerics)

    biases = () if bias is None else (bias,)
    return with_gradient(kernel, plain)(x, weight, residual, *biases)


def gated_dot(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, numerics: Numerics
) -> jax.Array:
    """silu(gate) * up of x @ weight, weight [K, 2 M] = (gate, up): the products never leave the
    program."""

    def kernel(x, weight, *bias):
        extras = [("halves", b.reshape(2, -1)) for b in bias]
        return _product(
            (x, weight), extras, _gated, numerics.dtype, numerics, name="gated_dot", halves=2
        )

    def plain(x, weight, *bias):
        return NATIVE.gated_dot(x, weight, bias[0] if bias else None, numerics=numerics)

    biases = () if bias is None else (bias,)
    return with_gradient(kernel, plain)(x, weight, *biases)


# --- epilogues: sums float32 [rows, columns], then what was loaded beside them ------------------


def _plain(sums: Sequence[jax.Array]) -> jax.Array:
    return sums[0]


def _residual_sum(sums: Sequence[jax.Array], residual, bias=None) -> jax.Array:
    y = sums[0] if bias is None else sums[0] + jnp.broadcast_to(bias[None, :], sums[0].shape)
    return residual.astype(jnp.float32) + y


def _gated(sums: Sequence[jax.Array], bias=None) -> jax.Array:
    gate, up = sums
    if bias is not None:
        gate = gate + jnp.broadcast_to(bias[0][None, :], gate.shape)
        up = up + jnp.broadcast_to(bias[1][None, :], up.shape)
    return gate / (1.0 + jnp.exp2(-gate * LOG2_E)) * up


def _kernel(x_ref, *refs, halves: int, block_k: int, epilogue: Callable):
    """Sums over K for each of `halves` weight tiles, then the epilogue."""
    weight_refs, extra_refs, out_ref = refs[:halves], refs[halves:-1], refs[-1]
    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def step(index, sums):
        at = pl.ds(index * block_k, block_k)
        x = x_ref[:, at]
        return tuple(
            total + jnp.dot(x, ref[at, :], precision=precision, preferred_element_type=jnp.float32)
            for total, ref in zip(sums, weight_refs, strict=True)
        )

    zeros = (jnp.zeros(out_ref.shape, jnp.float32),) * halves
    sums = jax.lax.fori_loop(0, x_ref.shape[1] // block_k, step, zeros)
    out_ref[...] = epilogue(sums, *(ref[...] for ref in extra_refs)).astype(out_ref.dtype)


def _product(operands, extras, epilogue, dtype, numerics: Numerics, *, name: str, halves: int = 1):
    """The epilogue of x [N, K] @ weight [K, halves * M], in `dtype` [N, M].

    Extras are loaded by their kind: "tile" of [N, M], "columns" of [M], "halves" of [halves, M].
    """
    x, weight = operands
    rows, width = x.shape[0], weight.shape[1] // halves
    tile, block_k = numerics.gpu.tile(rows), numerics.gpu.block_k
    columns = max(16, tile.columns // halves)
    shape = f"a weight of shape {weight.shape[0]} x {weight.shape[1]}"
    divides(block_k, weight.shape[0], f"the rows of {shape},", "gpu.block_k")
    divides(columns, width, f"the columns of {shape}, in {halves} parts", "the gpu tile's columns")
    x = padded(x, tile.rows)
    extras = [(kind, padded(e, tile.rows) if kind == "tile" else e) for kind, e in extras]
    steps = width // columns

    def columns_of(half: int) -> pl.BlockSpec:
        return pl.BlockSpec((weight.shape[0], columns), lambda j, i: (0, j + half * steps))

    specs = {
        "tile": pl.BlockSpec((tile.rows, columns), lambda j, i: (i, j)),
        "columns": pl.BlockSpec((columns,), lambda j, i: (j,)),
        "halves": pl.BlockSpec((halves, columns), lambda j, i: (0, j)),
    }
    result = call(
        partial(_kernel, halves=halves, block_k=block_k, epilogue=epilogue),
        numerics=numerics,
        name=name,
        warps=tile.warps,
        stages=max(1, tile.stages * 2 // x.dtype.itemsize),
        grid=(steps, x.shape[0] // tile.rows),
        in_specs=[
            pl.BlockSpec((tile.rows, x.shape[1]), lambda j, i: (i, 0)),
            *(columns_of(half) for half in range(halves)),
            *(specs[kind] for kind, _ in extras),
        ],
        out_specs=specs["tile"],
        out_shape=jax.ShapeDtypeStruct((x.shape[0], width), dtype),
    )(x, *(weight,) * halves, *(extra for _, extra in extras))
    return result[:rows]
