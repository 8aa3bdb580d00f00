"""Rows to the devices that have their experts, and what is made of them back.

Runs inside `shard_map`. The devices along the mesh axis `expert` have as many of a mixture's
experts each, and rows of their own.

Every device gathers the rows of all and what they chose, so each knows what everyone needs. It
computes what its own experts make of the rows that chose them, and sends each output to the device
that has the row. This moves values and adds none up: the sum over a row's experts is made where the
row lies, in the order of its choices, as on one device. There is no capacity: room is made for the
least favourable choice, and no row is dropped.

The backward sends the cotangents of the outputs the other way. Gradients of rows are summed over
devices in their order, as everywhere in `collectives`.

e: devices of a group; N: rows of each; k: experts of a row; d: hidden size. A pair is a row with
one of its experts.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tim_jax.kernels.experts import ALONE, Exchange
from tim_jax.placement import Placement, collectives

_AXIS = "expert"


def over(placement: Placement, *, count: int) -> Exchange:
    """The exchange among the devices that have parts of `count` experts."""
    if placement.expert == 1:
        return ALONE
    return Exchange(
        placement.expert,
        partial(_forward, count=count, placement=placement),
        partial(_backward, count=count, placement=placement),
    )


class _Pairs(NamedTuple):
    """Who has the experts of all pairs of a group."""

    own: jax.Array  # i32[e N, k], this device's experts by their number here; others are one more
    owners: jax.Array  # i32[e, N k], devices that have the expert of each pair of each device
    counts: jax.Array  # i32[e, e], pairs of a device with experts of another


def _forward(make: Callable, x, experts, *, count: int, placement: Placement) -> jax.Array:
    """float32 [N, k, d] of rows x [N, d]; `make` does the same for a device's experts and rows."""
    pairs = _pairs(experts, count, placement)
    made = make(collectives.group_rows(x, placement), pairs.own)
    first = jnp.argsort(pairs.owners.reshape(-1) != jax.lax.axis_index(_AXIS), stable=True)
    sent = made.reshape(first.size, -1)[first]
    came = _moved(sent, pairs.counts.T, most=experts.size, block=experts.size)
    return came[jnp.argsort(_by_owner(pairs))].reshape(*experts.shape, -1)


def _backward(
    differentiate: Callable, x, experts, cotangent, *, count: int, placement: Placement
) -> tuple[jax.Array, ...]:
    """As `differentiate` for a device's experts and rows: the gradient of x, and of the weights."""
    pairs = _pairs(experts, count, placement)
    sent = cotangent.reshape(experts.size, -1)[_by_owner(pairs)]
    came = _moved(sent, pairs.counts, most=pairs.owners.size, block=experts.size)
    # A pair of others has some other's cotangent here, which is not looked at.
    mine = pairs.owners.reshape(-1) == jax.lax.axis_index(_AXIS)
    cotangents = came[jnp.maximum(jnp.cumsum(mine) - 1, 0)].reshape(*pairs.own.shape, -1)
    dx, *sums = differentiate(collectives.group_rows(x, placement), pairs.own, cotangents)
    return collectives.own_group_rows(dx, placement), *sums


def _pairs(experts: jax.Array, count: int, placement: Placement) -> _Pairs:
    devices, device = placement.expert, jax.lax.axis_index(_AXIS)
    here = count // devices
    chosen = collectives.group_rows(experts, placement)
    owners = (chosen // here).reshape(devices, -1)
    everyone = jnp.arange(devices)[None, None, :]
    counts = jnp.sum(owners[:, :, None] == everyone, axis=1, dtype=jnp.int32)
    own = jnp.where(chosen // here == device, chosen - device * here, here)
    return _Pairs(own, owners, counts)


def _by_owner(pairs: _Pairs) -> jax.Array:
    """i32[N k], this device's pairs in the order in which they leave and come back."""
    return jnp.argsort(pairs.owners[jax.lax.axis_index(_AXIS)], stable=True)


def _moved(x: jax.Array, counts: jax.Array, *, most: int, block: int) -> jax.Array:
    """Rows from all devices: [most, d], those of the first one first, and then any.

    Args:
      x: [S, d], what goes to the first device first.
      counts: i32[e, e], rows from each device to each, the same on all.
      block: at least every one of these.
    """
    ways = partial(_ragged, most=most), partial(_dense, most=most, block=block)
    ragged, dense = ways
    return jax.lax.platform_dependent(x, counts, tpu=ragged, cuda=ragged, default=dense)


def _ragged(x: jax.Array, counts: jax.Array, *, most: int) -> jax.Array:
    """`_moved`, of the rows alone."""
    device = jax.lax.axis_index(_AXIS)
    sent, received = counts[device], counts[:, device]
    return jax.lax.ragged_all_to_all(
        x,
        jnp.zeros((most, x.shape[1]), x.dtype),
        jnp.cumsum(sent) - sent,
        sent,
        (jnp.cumsum(counts, axis=0) - counts)[device],
        received,
        axis_name=_AXIS,
    )


def _dense(x: jax.Array, counts: jax.Array, *, most: int, block: int) -> jax.Array:
    """`_moved` where nothing ragged can be: a block to every device, filled up with other rows."""
    device = jax.lax.axis_index(_AXIS)
    sent, received = counts[device], counts[:, device]
    starts = jnp.cumsum(sent) - sent
    rows = starts[:, None] + jnp.arange(block)[None, :]
    blocks = jax.lax.all_to_all(x[jnp.minimum(rows, x.shape[0] - 1)], _AXIS, 0, 0)
    number, ends = jnp.arange(most), jnp.cumsum(received)
    source = jnp.minimum(jnp.searchsorted(ends, number, side="right"), received.size - 1)
    within = number - (ends - received)[source]
    return blocks[source, jnp.clip(within, 0, block - 1)]
