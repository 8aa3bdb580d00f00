"""Where a computation runs: axes of a mesh, what of an array goes on which, several processes.

Placements are values: no devices until `mesh` is given some.

Axes of the mesh:

- `data`: rows of the batch. Every slice holds the whole model, so gradients are summed over it.
- `fsdp`: rows of the batch as well, and the inputs of every weight matrix: a device keeps a part of
  each and gathers the rest just before use.
- `expert`: rows of the batch as well, and the experts of a mixture: a device keeps some of them
  whole, and rows are exchanged with the devices that have theirs.
- `tensor`: columns of every weight matrix, and the heads. Its devices work on the same rows.

Arrays that are not needed for a while can wait in the host's memory (`to_host`, `to_devices`).

Where there are several processes, every one runs the same job with the same config; arrays span all
their devices. What is not an array is exchanged here as text. Process 0 leads: it alone shows the
run and writes files, except that each process writes its own share of a checkpoint.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd, prod
from numbers import Integral
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tim_jax.common import waiting
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
_HEARTBEAT = 30  # seconds without a sign of life after which a process counts as lost


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
            if not isinstance(size, Integral) or size < 1:
                raise InputError(f"Placement: {axis} must be a positive integer, got {size!r}")
            object.__setattr__(self, axis, int(size))
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
    return jax.tree.map(spec, tree, is_leaf=lambda node: isinstance(node, tuple))


def shardings(tree: Any, on: Mesh | AbstractMesh) -> Any:
    """`NamedSharding`s on a mesh, of a tree of logical axes."""
    return jax.tree.map(partial(NamedSharding, on), specs(tree))


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


_HOST = "pinned_host"


def _memory_kinds(devices: Devices) -> list[str]:
    return [memory.kind for memory in devices[0].addressable_memories()]


def host_helps(devices: Devices) -> bool:
    """Whether the host has memory beside the devices' own, in which arrays can wait."""
    return devices[0].platform != "cpu" and _HOST in _memory_kinds(devices)


def check_host(devices: Devices) -> None:
    """Raises InputError if arrays of these devices cannot wait in the host's memory."""
    if _HOST not in _memory_kinds(devices):
        raise InputError(
            f"offload: arrays of a {devices[0].device_kind} cannot wait in the host's memory; it"
            f" has {', '.join(_memory_kinds(devices))}"
        )


def to_host(tree: Any) -> Any:
    """The same arrays with the same shardings in the host's memory; those of `tree` are deleted.

    Arrays that are there already stay as they are, as in `to_devices`.
    """
    return _send(tree, _HOST)


def to_devices(tree: Any) -> Any:
    """The opposite of `to_host`."""
    return _send(tree, "device")


def _send(tree: Any, kind: str) -> Any:
    elsewhere = [leaf for leaf in jax.tree.leaves(tree) if _memory_kind(leaf) != kind]
    targets = [leaf.sharding.with_memory_kind(kind) for leaf in elsewhere]
    moved = iter(jax.block_until_ready(jax.device_put(elsewhere, targets)))
    found = jax.tree.map(lambda leaf: leaf if _memory_kind(leaf) == kind else next(moved), tree)
    # JAX does not donate from one memory to another.
    for leaf in elsewhere:
        leaf.delete()
    return found


def _memory_kind(leaf: jax.Array) -> str:
    """The kind of memory that an array lies in."""
    device = next(iter(leaf.sharding.device_set))
    return leaf.sharding.memory_kind or device.default_memory().kind


def join(coordinator: str | None, count: int | None, index: int | None) -> None:
    """Joins the other processes of a job. To be called before any other use of JAX.

    Args:
      coordinator: HOST:PORT of process 0; None takes all three from SLURM, Open MPI, GKE or the TPU
        pod's metadata.
      count: how many processes there are.
      index: the number of this one, from 0.

    Raises:
      InputError: there is no such environment, the numbers contradict each other, or the other
        processes do not answer in time.
    """
    given = (coordinator, count, index)
    if any(x is not None for x in given) and any(x is None for x in given):
        raise InputError("--coordinator, --processes and --process go together")
    if count is not None and index is not None and not 0 <= index < count:
        raise InputError(f"--process {index}: must be in 0..{count - 1}, below --processes")
    # It catches SIGTERM for who asks it, which nobody does: before a run looks, one would be lost.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with waiting.during("waiting for the other processes"):
            jax.distributed.initialize(
                coordinator, count, index, heartbeat_timeout_seconds=_HEARTBEAT
            )
    except ValueError as error:
        raise InputError(
            f"--distributed: no SLURM, Open MPI, GKE or TPU pod job was found here ({error}); give"
            " --coordinator HOST:PORT, --processes and --process"
        ) from error
    except RuntimeError as error:
        raise InputError(
            f"could not join the other processes at {coordinator or 'the coordinator'}:"
            f" {str(error).splitlines()[0]}; start all of them, with the same address"
        ) from error


def check_all_used(where: Placement, name: str = "placement") -> None:
    """Refuses a mesh that leaves out devices of several processes: each must have a part of it."""
    count, several = jax.device_count(), jax.process_count()
    if several > 1 and where.devices != count:
        raise InputError(
            f"{name} ({where}) uses {where.devices} devices, but the {several} processes have"
            f" {count}, and with several all must be used"
        )


def leads() -> bool:
    """Whether this is process 0, which writes files and shows the run."""
    return jax.process_index() == 0


def texts(text: str) -> list[str]:
    """The text of every process, in order. All processes must call this."""
    if jax.process_count() == 1:
        return [text]
    data = text.encode()
    sizes = _gather(np.array([len(data)], np.int32))[:, 0]
    # Padded to a power of two, so that few sizes are compiled.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = _gather(padded)
    return [rows[i, :size].tobytes().decode() for i, size in enumerate(sizes.tolist())]


def _gather(row: np.ndarray) -> np.ndarray:
    with waiting.during("waiting for the other processes"):
        return np.asarray(multihost_utils.process_allgather(row))


def led(action: Callable[[], Any]) -> Any:
    """Runs `action` on process 0 and returns its result, a JSON value, on all processes.

    Its InputError is raised on all of them. All processes must call this.
    """
    if jax.process_count() == 1:
        return action()
    outcome: dict[str, Any] = {}
    if leads():
        try:
            outcome["value"] = action()
        except InputError as error:
            outcome["error"] = str(error)
    outcome = json.loads(texts(json.dumps(outcome))[0])
    if "error" in outcome:
        raise InputError(outcome["error"])
    return outcome["value"]


def agree(text: str, what: str) -> None:
    """Raises `InputError` on all processes if they do not have the same text."""
    received = texts(text)
    other = [i for i, theirs in enumerate(received) if theirs != received[0]]
    if other:
        raise InputError(
            f"process {other[0]} differs from process 0 in {what}; start all with the same command"
            " on machines of one kind"
        )


def meet() -> None:
    """Waits until all processes have called it."""
    texts("")


def any_of(flag: bool) -> bool:
    """Whether the flag is set on any process."""
    return "1" in texts("1" if flag else "0")


def whole(tree: Any) -> Any:
    """Arrays of any sharding as whole NumPy arrays, on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def leaf(x: Any) -> np.ndarray:
        if of_process(x):  # a gather would put every process's beside one another
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(leaf, tree)
