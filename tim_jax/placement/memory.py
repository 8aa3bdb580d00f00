"""The host's memory beside a device's: where arrays wait that are not needed for a while."""

from typing import Any

import jax

from tim_jax.common.errors import InputError
from tim_jax.placement.layout import Devices

_HOST = "pinned_host"


def host_helps(devices: Devices) -> bool:
    """Whether the host has memory beside the devices' own, in which arrays can wait."""
    kinds = [memory.kind for memory in devices[0].addressable_memories()]
    return devices[0].platform != "cpu" and _HOST in kinds


def check_host(devices: Devices) -> None:
    """Raises InputError if arrays of these devices cannot wait in the host's memory."""
    kinds = [memory.kind for memory in devices[0].addressable_memories()]
    if _HOST not in kinds:
        raise InputError(
            f"offload: arrays of a {devices[0].device_kind} cannot wait in the host's memory; it"
            f" has {', '.join(kinds)}"
        )


def to_host(tree: Any) -> Any:
    """The same arrays with the same shardings in the host's memory; `tree` itself is deleted."""
    return _moved(tree, _HOST)


def to_devices(tree: Any) -> Any:
    """The opposite of `to_host`."""
    return _moved(tree, "device")


def _moved(tree: Any, kind: str) -> Any:
    shardings = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(kind), tree)
    moved = jax.block_until_ready(jax.device_put(tree, shardings))
    # JAX does not donate from one memory to another.
    for leaf in jax.tree.leaves(tree):
        leaf.delete()
    return moved
