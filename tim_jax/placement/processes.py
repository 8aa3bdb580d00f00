"""Several processes that run one program: how they find each other, and how they agree.

Every process runs the same job with the same config; arrays span all their devices. Everything
that is not an array is exchanged here as text: what process 0 read in the run folder, the rewards
that each process graded, whether one of them was asked to stop. Process 0 leads: it alone shows the
run and writes files, except that each process writes its own share of a checkpoint.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.placement import Placement, of_process

_HEARTBEAT = 30  # seconds without a sign of life after which a process counts as lost


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
    sizes = _gathered(np.array([len(data)], np.int32))[:, 0]
    # Padded to a power of two, so that few sizes are compiled.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = _gathered(padded)
    return [rows[i, :size].tobytes().decode() for i, size in enumerate(sizes.tolist())]


def _gathered(row: np.ndarray) -> np.ndarray:
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
