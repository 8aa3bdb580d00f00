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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tim_jax import kernels
from tim_jax.kernels import Kernels, native
from tim_jax.kernels.experts import ALONE, Exchange
from tim_jax.kernels.families import Composed
from tim_jax.numerics import Numerics
from tim_jax.placement import AXES, ROWS, RULES, Axes, Placement, missing

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


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _collected(x, names, axis):
    """`_collect`, differentiable: the transpose sums over devices, and each keeps its part."""
    return _collect(x, names, axis)


_collected.defvjp(
    lambda x, names, axis: (_collect(x, names, axis), jnp.zeros((0,), x.dtype)),
    lambda names, axis, like, cotangent: (_reduce(cotangent, names, axis).astype(like.dtype),),
)


def _gather(x: jax.Array, names: Names, placement: Placement, axis: int) -> jax.Array:
    names = _present(names, placement)
    return _collected(x, names, axis) if names else x


def gather(x: jax.Array, names: Names, placement: Placement) -> jax.Array:
    """The last axis of `x` of all devices along the mesh axes `names`, in order.

    For what every device uses differently (such as for its own columns of a product): the transpose
    sums the cotangents of all devices, and each device keeps its part.
    """
    return _gather(x, names, placement, x.ndim - 1)


def gather_rows(x: jax.Array, placement: Placement) -> jax.Array:
    """As `gather`, the rows [N / tensor, ...] of all devices of a tensor group, [N, ...]."""
    return _gather(x, ("tensor",), placement, 0)


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
    return _gather(weight, RULES["in"], placement, weight.ndim - 2)


def whole_matrix(weight: jax.Array, placement: Placement) -> jax.Array:
    """The matrices [..., K, M] of this device's rows, [..., K / fsdp, M]. Not differentiable."""
    return _collect(weight, _present(RULES["in"], placement), weight.ndim - 2)


def own_rows(sums: jax.Array, placement: Placement) -> jax.Array:
    """The transpose of `whole_matrix`: this device's rows of sums over fsdp, float32."""
    return _reduce(sums, _present(RULES["in"], placement), sums.ndim - 2)


def group_rows(x: jax.Array, placement: Placement, *, axis: str = "expert") -> jax.Array:
    """The rows x [N, ...] of all devices along a mesh axis, in order. Not differentiable."""
    return _collect(x, _present((axis,), placement), 0)


def _dot(dot: Callable, placement: Placement, x, weight, *, numerics: Numerics) -> jax.Array:
    """x [N, K] @ weight -> float32 [N, M], the rows of `weight` gathered over fsdp just before use.

    `weight` is this device's part, [K / fsdp, M] or column tiles [T, K / fsdp, M / T]. The backward
    gathers it again: no whole weight is kept from the forward.
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
    names = _present(ROWS, placement)
    if not names:
        return flag
    flags = jax.lax.all_gather(flag.astype(jnp.int32), names)
    return jnp.any(flags.reshape(-1, *flag.shape) > 0, axis=0)


def whole_rows(tree: Any, placement: Placement) -> Any:
    """Arrays [B / shards, ...] of every device's rows as the whole [B, ...]."""
    names = _present(ROWS, placement)

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


# --- rows to the devices that have their experts -----------------------------------------------
#
# The devices along the mesh axis `expert` have as many of a mixture's experts each, and rows of
# their own. Each gathers the rows of all and what they chose, so it knows what everyone needs. It
# computes what its own experts make of the rows that chose them, and sends each output to the
# device that has the row. This adds nothing up: a row's experts are summed where the row lies, in
# the order of its choices, as on one device. There is room for the least favourable choice: no row
# is dropped. The backward sends the cotangents of the outputs the other way.
#
# e: devices of a group; N: rows of each; k: experts of a row; d: hidden size. A pair is a row with
# one of its experts.


def exchange(placement: Placement, *, count: int) -> Exchange:
    """The exchange of rows among the devices that have parts of `count` experts."""
    if placement.expert == 1:
        return ALONE
    return Exchange(
        placement.expert,
        partial(_exchanged, count=count, placement=placement),
        partial(_exchanged_back, count=count, placement=placement),
    )


class _Pairs(NamedTuple):
    """Who has the experts of all pairs of a group."""

    own: jax.Array  # i32[e N, k], this device's experts by their number here; others are one more
    owners: jax.Array  # i32[e, N k], devices that have the expert of each pair of each device
    counts: jax.Array  # i32[e, e], pairs of a device with experts of another


def _exchanged(make: Callable, x, experts, *, count: int, placement: Placement) -> jax.Array:
    """float32 [N, k, d] of rows x [N, d]; `make` does the same for a device's experts and rows."""
    pairs = _pairs(experts, count, placement)
    made = make(group_rows(x, placement), pairs.own)
    first = jnp.argsort(pairs.owners.reshape(-1) != jax.lax.axis_index("expert"), stable=True)
    sent = made.reshape(first.size, -1)[first]
    came = _moved(sent, pairs.counts.T, most=experts.size, block=experts.size)
    return came[jnp.argsort(_by_owner(pairs))].reshape(*experts.shape, -1)


def _exchanged_back(
    differentiate: Callable, x, experts, cotangent, *, count: int, placement: Placement
) -> tuple[jax.Array, ...]:
    """As `differentiate` for a device's experts and rows: the gradient of x, and of the weights."""
    pairs = _pairs(experts, count, placement)
    sent = cotangent.reshape(experts.size, -1)[_by_owner(pairs)]
    came = _moved(sent, pairs.counts, most=pairs.owners.size, block=experts.size)
    # A pair of others has some other's cotangent here, which is not looked at.
    mine = pairs.owners.reshape(-1) == jax.lax.axis_index("expert")
    cotangents = came[jnp.maximum(jnp.cumsum(mine) - 1, 0)].reshape(*pairs.own.shape, -1)
    dx, *sums = differentiate(group_rows(x, placement), pairs.own, cotangents)
    return _reduce(dx, _present(("expert",), placement), 0), *sums


def _pairs(experts: jax.Array, count: int, placement: Placement) -> _Pairs:
    devices, device = placement.expert, jax.lax.axis_index("expert")
    here = count // devices
    chosen = group_rows(experts, placement)
    owners = (chosen // here).reshape(devices, -1)
    everyone = jnp.arange(devices)[None, None, :]
    counts = jnp.sum(owners[:, :, None] == everyone, axis=1, dtype=jnp.int32)
    own = jnp.where(chosen // here == device, chosen - device * here, here)
    return _Pairs(own, owners, counts)


def _by_owner(pairs: _Pairs) -> jax.Array:
    """i32[N k], this device's pairs in the order in which they leave and come back."""
    return jnp.argsort(pairs.owners[jax.lax.axis_index("expert")], stable=True)


def _moved(x: jax.Array, counts: jax.Array, *, most: int, block: int) -> jax.Array:
    """Rows from all devices: [most, d], those of the first one first, and then any.

    Args:
      x: [S, d], what goes to the first device first.
      counts: i32[e, e], rows from each device to each, the same on all.
      block: at least every one of these.
    """
    ragged, dense = partial(_ragged, most=most), partial(_dense, most=most, block=block)
    return jax.lax.platform_dependent(x, counts, tpu=ragged, cuda=ragged, default=dense)


def _ragged(x: jax.Array, counts: jax.Array, *, most: int) -> jax.Array:
    """`_moved`, of the rows alone."""
    device = jax.lax.axis_index("expert")
    sent, received = counts[device], counts[:, device]
    return jax.lax.ragged_all_to_all(
        x,
        jnp.zeros((most, x.shape[1]), x.dtype),
        jnp.cumsum(sent) - sent,
        sent,
        (jnp.cumsum(counts, axis=0) - counts)[device],
        received,
        axis_name="expert",
    )


def _dense(x: jax.Array, counts: jax.Array, *, most: int, block: int) -> jax.Array:
    """`_moved` where nothing ragged can be: a block to every device, filled up with other rows."""
    device = jax.lax.axis_index("expert")
    sent, received = counts[device], counts[:, device]
    starts = jnp.cumsum(sent) - sent
    rows = starts[:, None] + jnp.arange(block)[None, :]
    blocks = jax.lax.all_to_all(x[jnp.minimum(rows, x.shape[0] - 1)], "expert", 0, 0)
    number, ends = jnp.arange(most), jnp.cumsum(received)
    source = jnp.minimum(jnp.searchsorted(ends, number, side="right"), received.size - 1)
    within = number - (ends - received)[source]
    return blocks[source, jnp.clip(within, 0, block - 1)]
