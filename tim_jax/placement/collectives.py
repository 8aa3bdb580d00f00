"""Communication between devices inside the model: gathers forward, their transposes backward.

Everything here runs inside `shard_map` over a placement's mesh, and does nothing along a mesh axis
of one device. The forward only moves bits and adds nothing up, so a value does not depend on how
many devices it was computed on. Gradients are summed over devices in float32, whatever the compute
dtype, and in the order of the devices: parts are exchanged and then added up locally, which moves
as many bytes as a reduce-scatter. A reduction by the runtime would add in an order that is not
fixed: on a CPU it is another one as soon as there are several processes.
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
from tim_jax.placement import AXES, RULES, Axes, Placement, missing

Names = tuple[str, ...]


def _present(names: Names, placement: Placement) -> Names:
    return tuple(name for name in names if getattr(placement, name) > 1)


# Larger groups gather in stages: XLA would write a TPU's gather among 64 as an all-reduce of arrays
# that are zero but for one device's part, which moves twice the bytes.
_STAGE = 16


def _collect(x: jax.Array, names: Names, axis: int) -> jax.Array:
    """The parts of all devices along `names`, joined; x itself without names."""
    if not names:
        return x
    for groups in stages(jax.lax.axis_size(names), _STAGE):
        x = jax.lax.all_gather(x, names, axis=axis, tiled=True, axis_index_groups=groups)
    return x


def stages(count: int, most: int) -> list[list[list[int]] | None]:
    """Groups of devices for each stage of a gather among `count`, of at most `most` where possible.

    First neighbours gather, then devices of equal place in the groups before. None: all at once. A
    device receives as many bytes as without stages.
    """
    size = 1
    found: list[list[list[int]] | None] = []
    while size < count:
        rest = count // size
        factor = max(n for n in range(1, min(most, rest) + 1) if rest % n == 0)
        factor = rest if factor == 1 else factor
        blocks = range(0, count, size * factor)
        found.append(
            [[b + i + size * j for j in range(factor)] for b in blocks for i in range(size)]
        )
        size *= factor
    return found if len(found) > 1 else [None]


def _reduce(x: jax.Array, names: Names, axis: int) -> jax.Array:
    """This device's part of the sum over devices, float32; x itself without names.

    The parts are sent in their own dtype and widened where they are added.
    """
    if not names:
        return x
    x = jnp.moveaxis(x, axis, 0)
    parts = x.reshape(jax.lax.axis_size(names), -1, *x.shape[1:])
    parts = jax.lax.all_to_all(parts, names, split_axis=0, concat_axis=0)
    return jnp.moveaxis(_added(parts.astype(jnp.float32)), 0, axis)


def _added(parts: jax.Array) -> jax.Array:
    """The sum of [n, ...] over n, neighbours first, then their sums."""
    while parts.shape[0] > 1:
        pairs = parts.shape[0] // 2
        sums = parts[: 2 * pairs : 2] + parts[1 : 2 * pairs : 2]
        parts = jnp.concatenate([sums, parts[2 * pairs :]])
    return parts[0]


def total(x: jax.Array, names: Names) -> jax.Array:
    """The sum of `x` over the devices along `names`, on each of them; float32."""
    if not names:
        return x
    count = jax.lax.axis_size(names)
    flat = x.reshape(-1)
    part = _reduce(jnp.pad(flat, (0, -flat.size % count)), names, 0)
    return _collect(part, names, 0)[: flat.size].reshape(x.shape)


def _gather(x: jax.Array, names: Names, axis: int) -> jax.Array:
    """`_collect`, differentiable."""
    return _collected(x, names, axis) if names else x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _collected(x, names, axis):
    return _collect(x, names, axis)


_collected.defvjp(
    lambda x, names, axis: (_collect(x, names, axis), jnp.zeros((0,), x.dtype)),
    lambda names, axis, like, cotangent: (_reduce(cotangent, names, axis).astype(like.dtype),),
)


def gather(x: jax.Array, names: Names, placement: Placement) -> jax.Array:
    """The last axis of `x` of all devices along the mesh axes `names`, in order.

    For what every device uses differently (such as for its own columns of a product): the transpose
    sums the cotangents of all devices, and each device keeps its part.
    """
    return _gather(x, _present(names, placement), x.ndim - 1)


def gather_rows(x: jax.Array, placement: Placement) -> jax.Array:
    """The rows [N / tensor, ...] of all devices of a tensor group, [N, ...], in order.

    As in `gather`, every device uses them differently: the transpose sums over the group.
    """
    return _gather(x, _present(("tensor",), placement), 0)


def tensor_whole(x: jax.Array, placement: Placement) -> jax.Array:
    """The last axis of `x` of all devices of a tensor group, which then all do the same with it.

    Not for differentiation: their cotangents would be copies of one, not parts of a sum.
    """
    return _collect(x, _present(("tensor",), placement), x.ndim - 1)


def rows_for_columns(x: jax.Array, placement: Placement, *, axis: str = "tensor") -> jax.Array:
    """An all-to-all: [N, M / n], this device's columns of all rows, to [N / n, M].

    The result has all columns of this device's rows; n is the size of the mesh axis, and must
    divide N. Differentiable: the transpose is `columns_for_rows`.
    """
    if not _present((axis,), placement):
        return x
    return jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=1, tiled=True)


def columns_for_rows(x: jax.Array, placement: Placement, *, axis: str = "tensor") -> jax.Array:
    """The exchange back: all columns of this device's rows, [N / n, M], to [N, M / n]."""
    if not _present((axis,), placement):
        return x
    return jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=0, tiled=True)


def local_rows(x: jax.Array, placement: Placement) -> jax.Array:
    """This device's rows [N / tensor, ...], those of `rows_for_columns`, of [N, ...]."""
    if placement.tensor == 1:
        return x
    size = x.shape[0] // placement.tensor
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("tensor") * size, size)


def family(numerics: Numerics, placement: Placement) -> Kernels:
    """The kernels of these numerics, for weights that are split over fsdp.

    In a family that is composed of a dot (`Composed`), the dot gathers the rows of its weight just
    before use. Other families are given weights that `matrix` has gathered.
    """
    ops = kernels.family(numerics)
    if not isinstance(ops, Composed) or not _present(RULES["in"], placement):
        return ops
    return replace(ops, dot=partial(_dot, ops.dot, placement))


def matrix(weight: jax.Array, *, numerics: Numerics, placement: Placement) -> jax.Array:
    """The weight as the kernels of `family` take it: this device's part, or its `stack`."""
    return weight if isinstance(kernels.family(numerics), Composed) else stack(weight, placement)


def stack(weight: jax.Array, placement: Placement) -> jax.Array:
    """The whole of a layer's matrices [..., K, M], of this device's rows of each.

    Kept for the backward, unless the layer is recomputed (`remat`).
    """
    return _gather(weight, _present(RULES["in"], placement), weight.ndim - 2)


def whole_matrix(weight: jax.Array, placement: Placement) -> jax.Array:
    """The matrices [..., K, M] of this device's rows, [..., K / fsdp, M]. Not differentiable."""
    return _collect(weight, _present(RULES["in"], placement), weight.ndim - 2)


def own_rows(sums: jax.Array, placement: Placement) -> jax.Array:
    """The transpose of `whole_matrix`: this device's rows of sums over fsdp, float32."""
    return _reduce(sums, _present(RULES["in"], placement), sums.ndim - 2)


def group_rows(x: jax.Array, placement: Placement, *, axis: str = "expert") -> jax.Array:
    """The rows x [N, ...] of all devices along a mesh axis, in order. Not differentiable."""
    return _collect(x, _present((axis,), placement), 0)


def own_group_rows(sums: jax.Array, placement: Placement) -> jax.Array:
    """The transpose of `group_rows` over experts: this device's rows of the sums, float32."""
    return _reduce(sums, _present(("expert",), placement), 0)


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


def gather_fsdp(weights: Any, axes: Any, placement: Placement) -> Any:
    """Weights gathered over fsdp, as `Placement.gathered` says. Not for differentiation."""
    return _along_fsdp(_collect, weights, axes, placement)


def reduce_scatter_fsdp(sums: Any, axes: Any, placement: Placement) -> Any:
    """The transpose of `gather_fsdp`: this device's part of the sums over fsdp, float32."""
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
        return total(x, _present(missing(axes), placement))

    return jax.tree.map(leaf, gradients, axes)


def any_row(flag: jax.Array, placement: Placement) -> jax.Array:
    """Whether `flag` bool[...] is True on a device of any rows, element by element."""
    names = _present(RULES["rows"], placement)
    if not names:
        return flag
    flags = jax.lax.all_gather(flag.astype(jnp.int32), names)
    return jnp.any(flags.reshape(-1, *flag.shape) > 0, axis=0)


def whole_rows(tree: Any, placement: Placement) -> Any:
    """Arrays [B / shards, ...] of every device's rows as the whole [B, ...]."""
    names = _present(RULES["rows"], placement)

    def leaf(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            return _collect(x.astype(jnp.int8), names, 0) > 0
        return _collect(x, names, 0)

    return jax.tree.map(leaf, tree) if names else tree


def norm(tree: Any, axes: Any, placement: Placement) -> jax.Array:
    """f32[], the Euclidean norm of arrays that lie on the mesh by these logical axes."""

    def squares(x: jax.Array, axes: Axes) -> jax.Array:
        square = jnp.sum(jnp.square(x.astype(jnp.float32)))
        copies = [jax.lax.axis_index(name) for name in _present(missing(axes), placement)]
        return jnp.where(sum(copies) == 0, square, 0.0) if copies else square

    part: Any = sum(jax.tree.leaves(jax.tree.map(squares, tree, axes)), jnp.float32(0))
    return jnp.sqrt(total(part[None], _present(AXES, placement))[0])
