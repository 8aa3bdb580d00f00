"""Plain XLA kernels: fast, accurate, and free to change their bits with program and shape.

They are the learner's and sampler's kernels under native numerics, and the backward of the exact
family.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from tim_jax.kernels import formulas
from tim_jax.numerics import Numerics

MASKED = -1e30
RUNS = 8  # that aligned rows are cut into, unless fewer are asked for
_BACKWARD_ROWS = 128


def fence(x):
    """No fence: XLA may fuse and move as it likes."""
    return x


def total(x: jax.Array, *, lanes: int = 0) -> jax.Array:
    """Sum over the last axis, in whatever order XLA finds best."""
    del lanes
    return jnp.sum(x, axis=-1)


MATHS = formulas.Maths(total, jnp.exp, jnp.log, jax.nn.sigmoid, jax.lax.rsqrt, lambda x: x)


def peak(x: jax.Array, *, lanes: int = 0) -> jax.Array:
    """Maximum over the last axis."""
    del lanes
    return jnp.max(x, axis=-1)


def unit(forward: Callable, plain: Callable) -> Callable:
    """The plain formula, whose own gradient XLA derives."""
    del forward
    return plain


def precise(x: jax.Array) -> dict[str, Any]:
    """The options of a dot of `x`: sums in float32, and products too where `x` is float32.

    By default GPUs would round float32 operands to TF32, and TPUs to bfloat16. Narrower operands
    have a precision too, or they would take a user's `jax_default_matmul_precision`.
    """
    highest = x.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if highest else jax.lax.Precision.DEFAULT
    return {"precision": precision, "preferred_element_type": jnp.float32}


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [N, K] @ weight [K, M] -> float32 [N, M]."""
    return jnp.dot(x, weight, **precise(x))


def joined(weight: jax.Array) -> jax.Array:
    """The weight matrix [K, M] of column tiles [T, K, M / T]; a matrix itself."""
    if weight.ndim == 2:
        return weight
    return jnp.moveaxis(weight, 0, 1).reshape(weight.shape[1], -1)


def pin(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Fenced operands of a dot, in row-major layout.

    Otherwise a transpose nearby may reach the dot as a layout of its operand, and with it another
    kernel: XLA:CPU then computes a bfloat16 dot in float32.
    """
    fence = jax.lax.optimization_barrier
    return fence(
        tuple(with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in fence(arrays))
    )


def _transposed_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`product` where one of the two was transposed just before."""
    dtype = x.dtype
    return row_major(product(row_major(x, dtype), row_major(weight, dtype)), dtype)


def row_major(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in row-major memory, if products of `dtype` need it; else as XLA likes.

    XLA:CPU has fast bfloat16 products of row-major operands only, so there a transpose is made.
    """
    if dtype != jnp.bfloat16:
        return x
    return jax.lax.platform_dependent(x, cpu=lambda x: pin(x)[0], default=lambda x: x)


def dot_weight_gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The gradient f32[K, M] of `dot` by a weight in one piece, both in the compute dtype."""
    return _transposed_product(x.T, cotangent)


def dot_gradients(x, weight, cotangent):
    """Gradients of `dot` in float32, with the cotangent rounded to the compute dtype."""
    cotangent = cotangent.astype(x.dtype)
    dx = _transposed_product(cotangent, joined(weight).T)
    dweight = dot_weight_gradient(x, cotangent)
    if weight.ndim == 3:
        tiles, contraction, width = weight.shape
        dweight = jnp.moveaxis(dweight.reshape(contraction, tiles, width), 1, 0)
    return dx, dweight


def dot_backward(residuals, cotangent):
    """`dot_gradients`, each rounded to the dtype of what it is the gradient of."""
    x, weight = residuals
    dx, dweight = dot_gradients(x, weight, cotangent)
    return dx.astype(x.dtype), dweight.astype(weight.dtype)


def _whole_dot(x, weight):
    return product(x, joined(weight))


# JAX's own gradient would multiply the float32 cotangent in float32, whatever the compute dtype.
_dot = jax.custom_vjp(_whole_dot)
_dot.defvjp(lambda x, weight: (_whole_dot(x, weight), (x, weight)), dot_backward)


def dot(x: jax.Array, weight: jax.Array, *, numerics: Numerics | None = None) -> jax.Array:
    """x [N, K] @ weight [K, M] -> float32 [N, M], with `dot_backward` as its gradient.

    `weight` may come in column tiles [T, K, M / T].
    """
    if numerics is not None and numerics.order.split_k > 1:
        return formulas.split_k(_dot, x, joined(weight), pieces=numerics.order.split_k)
    return _dot(x, weight)


def dots(x: jax.Array, weight: jax.Array, *, numerics: Numerics | None = None) -> jax.Array:
    """x [H, N, K] @ weight [H, K, M] -> float32 [H, N, M], as one batched product."""
    return jax.vmap(partial(dot, numerics=numerics))(x, weight)


def scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """query [B, Kv, M, D] @ key [B, Kv, D, S] -> float32 [B, Kv, M, S]."""
    return jnp.einsum("bkmd,bkds->bkms", query, key, **precise(query))


def mix(weights: jax.Array, value: jax.Array) -> jax.Array:
    """weights [B, Kv, M, S] @ value [B, Kv, S, D] -> float32 [B, Kv, M, D]."""
    return jnp.einsum("bkms,bksd->bkmd", weights, value, **precise(value))


def segments(
    rows: int, length: int, tile: int, block: int, runs: int = RUNS
) -> list[tuple[int, int, int]]:
    """Cuts the rows of whole sequences into at most `runs` (start, stop, keys that suffice).

    A run's rows are a multiple of `tile`; keys are a multiple of `block`. Static, so that causal
    skipping costs no branch; bounded, so that long sequences do not unroll.
    """
    tiles = -(-rows // tile)
    per_run = -(-tiles // runs) * tile
    found = []
    for start in range(0, rows, per_run):
        stop = min(start + per_run, rows)
        tokens = -(-stop * length // rows)
        found.append((start, stop, -(-tokens // block) * block))
    return found


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
    aligned: bool,
    window: jax.Array | None = None,
    runs: int = RUNS,
) -> jax.Array:
    """As `tiles.attention`: same arguments, same result up to rounding."""
    softmax = numerics.precision.attention_softmax
    attend = partial(_attend, window=window, softmax=softmax)
    if not aligned:
        return attend(query, key, value, positions)
    count, length = query.shape[2], key.shape[3]
    pieces = []
    for start, stop, keys in segments(count, length, _BACKWARD_ROWS, numerics.kv_block, runs):
        args = query[:, :, start:stop], key[..., :keys], value[:, :, :keys]
        pieces.append(_in_tiles(attend, *args, positions[:, start:stop]))
    return jnp.concatenate(pieces, axis=2)


def _in_tiles(attend, query, key, value, positions):
    """Rows in tiles whose scores are recomputed in the backward: no [S, S] array is kept."""
    count = query.shape[2]
    attend = jax.checkpoint(attend)
    if count <= _BACKWARD_ROWS:
        return attend(query, key, value, positions)
    tiles = count // _BACKWARD_ROWS
    body = tiles * _BACKWARD_ROWS

    def split(x, axis):
        x = jax.lax.slice_in_dim(x, 0, body, axis=axis)
        shape = (*x.shape[:axis], tiles, _BACKWARD_ROWS, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    out = jax.lax.map(
        lambda t: attend(t[0], key, value, t[1]), (split(query, 2), split(positions, 1))
    )
    out = jnp.moveaxis(out, 0, 2)
    out = out.reshape(*out.shape[:2], body, out.shape[-1])
    if body == count:
        return out
    rest = attend(query[:, :, body:], key, value, positions[:, body:])
    return jnp.concatenate([out, rest], axis=2)


def _attend(query, key, value, last, window, softmax):
    visible = formulas.visible(jnp.arange(key.shape[3])[None, None, :], last[:, :, None], window)
    masked = jnp.where(visible[:, None], scores(query, key), MASKED)
    weights = jax.nn.softmax(formulas.narrowed(masked, softmax), axis=-1)
    weights = formulas.narrowed(weights, softmax)
    return mix(weights.astype(value.dtype), value)


def counterpart(numerics: Numerics) -> Numerics:
    """The native numerics of the same dtypes: what backward passes are computed with."""
    return replace(numerics, family="native", interpret=False)
