"""Where a computation runs: a mesh's axes, and which dimension of an array goes on which axis.

Values and pure functions: no devices until `mesh` is given some.

Axes of the mesh:

- `data`: rows of the batch. Every slice holds the whole model, so gradients are summed over it.
- `fsdp`: rows of the batch as well, and the inputs of every weight matrix: a device keeps a part of
  each and gathers the rest just before use.
- `expert`: rows of the batch as well, and the experts of a mixture: a device keeps some of them
  whole, and rows are exchanged with the devices that have theirs.
- `tensor`: columns of every weight matrix, and the heads. Its devices work on the same rows.

Arrays that are not needed for a while can wait in the host's memory (`to_host`, `to_devices`).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tim_jax.common.errors import InputError

AXES = ("data", "fsdp", "expert", "tensor")
ROWS = ("data", "fsdp", "expert")  # what the rows of a batch are split over

Axis = Literal["rows", "in", "out", "tile", "hidden", "expert", "whole"]
Devices = Sequence[Any]  # of `jax.Device`, which no version of JAX declares as a type
Axes = tuple[Axis, ...]  # of an array's dimensions, in order

# Logical axis -> mesh axes.
RULES: dict[Axis, tuple[str, ...]] = {
    "rows": ROWS,
    "in": ("fsdp",),  # what a weight matrix contracts over
    "out": ("tensor",),  # columns of a weight matrix
    "tile": ("tensor",),  # column tiles of a weight matrix
    "hidden": ("tensor", "fsdp"),  # the hidden size in embedding and norms
    "expert": ("expert",),  # what a mixture's matrices are stacked over
    "whole": (),
}


@dataclass(frozen=True)
class Placement:
    """How many devices each mesh axis has.

    decode: where the sampler's weights are during the decode loop. "whole": gathered over fsdp once
      before it, so that a device holds 1 / tensor of the model's compute weights, of experts
      1 / expert; a group along expert and tensor stops when its own rows have ended. "sharded":
      gathered layer by layer at every token, so that a device never holds more than its share and
      one layer; all devices go on until the last row has ended.
    """

    data: int = 1
    fsdp: int = 1
    expert: int = 1
    tensor: int = 1
    decode: Literal["whole", "sharded"] = "whole"

    def __post_init__(self):
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 1:
                raise InputError(f"Placement: {axis} must be a positive integer, got {size!r}")
        if self.decode not in ("whole", "sharded"):
            raise InputError(f"Placement: decode must be 'whole' or 'sharded', got {self.decode!r}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return prod(self.shape)

    @property
    def shards(self) -> int:
        """Parts that the rows of a batch are split into."""
        return prod(getattr(self, axis) for axis in ROWS)

    @property
    def shards_text(self) -> str:
        """`shards` as messages name it, such as "data x fsdp = 8"."""
        named = ROWS if self.expert > 1 else ROWS[:-1]
        return f"{' x '.join(named)} = {self.shards}"

    def prompts_multiple(self, samples: int) -> int:
        """What a number of prompts must be a multiple of, so that all devices have as many rows."""
        return self.shards // gcd(self.shards, samples)

    @property
    def single(self) -> bool:
        """True for one device."""
        return self.devices == 1

    @property
    def gathered(self) -> "Placement":
        """The placement of weights that have been gathered over fsdp."""
        return dataclasses.replace(self, fsdp=1)

    def __str__(self) -> str:
        sizes = [f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) > 1]
        if self.decode != "whole":
            sizes.append(f"decode={self.decode}")
        return " ".join(sizes) or "one device"


SINGLE = Placement()


def mesh(placement: Placement, devices: Devices) -> Mesh:
    """The mesh of the first `placement.devices` of `devices`; tensor neighbours stand together.

    Raises:
      InputError: there are fewer devices.
    """
    wanted = placement.devices
    if len(devices) < wanted:
        sizes = " x ".join(f"{name} {getattr(placement, name)}" for name in AXES)
        raise InputError(
            f"placement: a mesh of {sizes} needs {wanted} devices, but there are {len(devices)}"
        )
    chosen = np.array(list(devices[:wanted])).reshape(placement.shape)
    return Mesh(chosen, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def split(learner: Placement, sampler: Placement, devices: Devices) -> Devices:
    """The devices after the learner's, for a sampler that has its own.

    Raises:
      InputError: there are fewer than both need, or they belong to several processes.
    """
    if len({device.process_index for device in devices}) > 1:
        raise InputError(
            "placement: a sampler on devices of its own needs all devices in one process"
        )
    if learner.devices + sampler.devices > len(devices):
        raise InputError(
            f"placement: learner and sampler need {learner.devices} + {sampler.devices} devices,"
            f" but there are {len(devices)}"
        )
    return devices[learner.devices :]


def spec(axes: Axes) -> PartitionSpec:
    """How an array with these logical axes lies on a mesh."""
    return PartitionSpec(*(RULES[axis] or None for axis in axes))


def specs(tree: Any) -> Any:
    """`spec` of every leaf of a tree of logical axes."""
    return jax.tree.map(spec, tree, is_leaf=_is_axes)


def shardings(tree: Any, on: Mesh | AbstractMesh) -> Any:
    """`NamedSharding`s on a mesh, of a tree of logical axes."""
    return jax.tree.map(lambda axes: NamedSharding(on, spec(axes)), tree, is_leaf=_is_axes)


def put(tree: Any, target: Any) -> Any:
    """A tree of arrays with these shardings; no device ever holds more than its part.

    With several processes each fills its own devices, from its own copy, which must be the same.
    """

    def leaf(x: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable or not of_process(x):
            return jax.device_put(x, sharding)
        # JAX's own way from one process's array has every device hold a copy of each process's.
        own = np.asarray(x)
        return jax.make_array_from_callback(own.shape, sharding, lambda index: own[index])

    return jax.tree.map(leaf, tree, target)


def of_process(x: Any) -> bool:
    """Whether this process has all of an array, such as one that is about to be spread."""
    return isinstance(x, np.ndarray) or getattr(x, "is_fully_addressable", False)


def missing(axes: Axes) -> tuple[str, ...]:
    """Mesh axes over which an array with these logical axes is replicated."""
    used = {name for axis in axes for name in RULES[axis]}
    return tuple(name for name in AXES if name not in used)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)


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
    """The same arrays with the same shardings in the host's memory; those of `tree` are deleted.

    Arrays that are there already stay as they are, as in `to_devices`.
    """
    return _sent(tree, _HOST)


def to_devices(tree: Any) -> Any:
    """The opposite of `to_host`."""
    return _sent(tree, "device")


def _sent(tree: Any, kind: str) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    elsewhere = [leaf for leaf in leaves if _memory(leaf) != kind]
    shardings = [leaf.sharding.with_memory_kind(kind) for leaf in elsewhere]
    moved = iter(jax.block_until_ready(jax.device_put(elsewhere, shardings)))
    found = [leaf if _memory(leaf) == kind else next(moved) for leaf in leaves]
    # JAX does not donate from one memory to another.
    for leaf in elsewhere:
        leaf.delete()
    return jax.tree.unflatten(structure, found)


def _memory(leaf: jax.Array) -> str:
    """The kind of memory that an array lies in."""
    device = next(iter(leaf.sharding.device_set))
    return leaf.sharding.memory_kind or device.default_memory().kind
