"""What crosses devices inside the model: gathers on the way forward, their transposes back.

Everything here runs inside `shard_map` over a placement's mesh, and does nothing along a mesh axis
of one device. The forward only gathers: bits are moved, and nothing is added up, so that a value
does not depend on how many devices it was computed on. Gradients are summed over devices in
float32, whatever the compute dtype.

Two kinds of gather differ in what follows them, and so in their transposes:

- after `gather`, every device does something else with the whole (its own columns of the next
  product), so that the cotangents of all devices are summed, each device keeping its part;
- after `gather_same`, every device does the same, so that a device's own part of its cotangent is
  already the whole truth.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tim_jax import kernels
from tim_jax.kernels import Kernels, native
from tim_jax.kernels.composed import Composed
from tim_jax.numerics import Numerics
from tim_jax.placement import RULES, Axes, Placement, missing

Names = tuple[str, ...]


def _present(names: Names, placement: Placement) -> Names:
    return tuple(name for name in names if getattr(placement, name) > 1)


def _collect(x: jax.Array, names: Names, axis: int) -> jax.Array:
    return jax.lax.all_gather(x, names, axis=axis, tiled=True)


def _reduce(x: jax.Array, names: Names, axis: int) -> jax.Array:
    """This device's part of the sum over devices, float32."""
    x = x.astype(jnp.float32)
    return jax.lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x, names, axis):
    return _collect(x, names, axis)


def _gather_backward(names, axis, dtype, cotangent):
    return (_reduce(cotangent, names, axis).astype(dtype.dtype),)


_gather.defvjp(
    lambda x, names, axis: (_collect(x, names, axis), jnp.zeros((0,), x.dtype)), _gather_backward
)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_same(x, names, axis):
    return _collect(x, names, axis)


def _gather_same_backward(names, axis, like, cotangent):
    size = like.shape[0]
    start = jax.lax.axis_index(names) * size
    return (jax.lax.dynamic_slice_in_dim(cotangent, start, size, axis=axis),)


_gather_same.defvjp(
    lambda x, names, axis: (_collect(x, names, axis), jnp.zeros((x.shape[axis], 0))),
    _gather_same_backward,
)


def gather(x: jax.Array, names: Names, placement: Placement) -> jax.Array:
    """The last axis of `x` of all devices along the mesh axes `names`, in order."""
    names = _present(names, placement)
    return _gather(x, names, x.ndim - 1) if names else x


def gather_same(x: jax.Array, names: Names, placement: Placement) -> jax.Array:
    """The same, where all devices along `names` go on to do the same with the result."""
    names = _present(names, placement)
    return _gather_same(x, names, x.ndim - 1) if names else x


def family(numerics: Numerics, placement: Placement) -> Kernels:
    """The kernels of these numerics for weights that are split over fsdp, where they are composed.

    Their dot gathers the rows of its weight just before use. Kernels that are not composed of a
    dot take what `matrix` gives.
    """
    ops = kernels.family(numerics)
    if not isinstance(ops, Composed) or not _present(RULES["in"], placement):
        return ops
    return replace(ops, dot=partial(_dot, ops.dot, placement))


def matrix(weight: jax.Array, *, numerics: Numerics, placement: Placement) -> jax.Array:
    """The weight as the dots of `family` take it: this device's part, or gathered over fsdp.

    What is gathered here is kept for the backward, unless the layer is recomputed (`remat`).
    """
    names = _present(RULES["in"], placement)
    if isinstance(kernels.family(numerics), Composed) or not names:
        return weight
    return _gather(weight, names, weight.ndim - 2)


def _dot(
    dot: Callable,
    placement: Placement,
    x: jax.Array,
    weight: jax.Array,
    *,
    numerics: Numerics,
) -> jax.Array:
    """x [N, K] @ weight -> float32 [N, M], the rows of `weight` gathered over fsdp just before use.

    Args:
      weight: this device's part, [K / fsdp, M] or column tiles [T, K / fsdp, M / T].

    The backward gathers the weight again: no whole weight is kept from the forward.
    """
    plain = partial(dot, numerics=numerics)
    names = _present(RULES["in"], placement)
    axis = weight.ndim - 2

    def forward(x, weight):
        return plain(x, _collect(weight, names, axis))

    def backward(residuals, cotangent):
        x, weight = residuals
        dx, dweight = native.dot_gradients(x, _collect(weight, names, axis), cotangent)
        return dx.astype(x.dtype), _reduce(dweight, names, axis).astype(weight.dtype)

    call = jax.custom_vjp(forward)
    call.defvjp(lambda x, w: (forward(x, w), (x, w)), backward)
    return call(x, weight)


def hold(weights: Any, axes: Any, placement: Placement) -> Any:
    """Weights whole along fsdp, as a placement's `held` expects them. Not for differentiation."""
    return _along_fsdp(_collect, weights, axes, placement)


def release(sums: Any, axes: Any, placement: Placement) -> Any:
    """The transpose of `hold`: this device's part of the sums over fsdp, float32."""
    return _along_fsdp(_reduce, sums, axes, placement)


def _along_fsdp(move: Callable, tree: Any, axes: Any, placement: Placement) -> Any:
    def leaf(x: jax.Array, axes: Axes) -> jax.Array:
        for index, axis in enumerate(axes):
            if "fsdp" in RULES[axis]:
                return move(x, ("fsdp",), index)
        return x

    return jax.tree.map(leaf, tree, axes) if placement.fsdp > 1 else tree


def sum_copies(gradients: Any, axes: Any, placement: Placement) -> Any:
    """Gradients summed over the mesh axes along which their weights are copies of each other."""

    def leaf(x: jax.Array, axes: Axes) -> jax.Array:
        names = _present(missing(axes), placement)
        return jax.lax.psum(x, names) if names else x

    return jax.tree.map(leaf, gradients, axes)


def any_row(flag: jax.Array, placement: Placement) -> jax.Array:
    """bool[], whether `flag` bool[] holds on a device of any rows. A gather, not a sum."""
    names = _present(RULES["rows"], placement)
    if not names:
        return flag
    flags = jax.lax.all_gather(flag.astype(jnp.int32), names)
    return jnp.any(flags.reshape(-1) > 0)


def whole_rows(tree: Any, placement: Placement) -> Any:
    """Arrays [B / shards, ...] of every device's rows as the whole [B, ...]."""
    names = _present(RULES["rows"], placement)

    def leaf(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return _collect(x.astype(jnp.int8), names, 0) > 0
        return _collect(x, names, 0)

    return jax.tree.map(leaf, tree) if names else tree
