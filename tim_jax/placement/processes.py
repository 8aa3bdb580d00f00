"""Several processes that run one program: how they find each other, and how they agree.

Every process runs the same job with the same config; arrays span all their devices. What is not an
array is agreed on here, as text: what process 0 found in the run folder, the rewards that each
process graded, whether one was asked to stop. Process 0 leads: it alone writes files (but for its
share of a checkpoint, which each process writes) and shows the run.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tim_jax.errors import InputError

_HEARTBEAT = 30  # seconds without a sign of life after which a process counts as lost


def join(coordinator: str | None, count: int | None, index: int | None) -> None:
    """Joins the other processes of a job; before anything else is asked of JAX.

    Args:
      coordinator: HOST:PORT of process 0; None finds all three from SLURM, Open MPI, GKE or the TPU
        pod's own metadata.

    Raises:
      InputError: nothing was found, the numbers contradict each other, or no answer in time.
    """
    given = (coordinator, count, index)
    if any(x is not None for x in given) and any(x is None for x in given):
        raise InputError("--coordinator, --processes and --process go together")
    if count is not None and index is not None and not 0 <= index < count:
        raise InputError(f"--process {index}: must be in 0..{count - 1}, below --processes")
    try:
        jax.distributed.initialize(coordinator, count, index, heartbeat_timeout_seconds=_HEARTBEAT)
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


def leads() -> bool:
    """Whether this is process 0, which writes and shows."""
    return jax.process_index() == 0


def texts(own: str) -> list[str]:
    """The text of every process, in order. All processes must call this."""
    if jax.process_count() == 1:
        return [own]
    data = own.encode()
    sizes = _gathered(np.array([len(data)], np.int32))[:, 0]
    # A power of two, so that few sizes are compiled.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = _gathered(padded)
    return [rows[i, :size].tobytes().decode() for i, size in enumerate(sizes.tolist())]


def _gathered(row: np.ndarray) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(row))


def led(action: Callable[[], Any]) -> Any:
    """What `action` returns on process 0 (a JSON value), on all; its InputError is raised on all.

    Other processes do not run it, but must call this.
    """
    if jax.process_count() == 1:
        return action()
    found: dict[str, Any] = {}
    if leads():
        try:
            found["value"] = action()
        except InputError as error:
            found["error"] = str(error)
    found = json.loads(texts(json.dumps(found))[0])
    if "error" in found:
        raise InputError(found["error"])
    return found["value"]


def agree(text: str, what: str) -> None:
    """Raises `InputError` on all processes if they do not have the same text."""
    found = texts(text)
    other = [i for i, theirs in enumerate(found) if theirs != found[0]]
    if other:
        raise InputError(
            f"process {other[0]} differs from process 0 in {what}; start all with the same command"
            " on machines of one kind"
        )


def meet() -> None:
    """Returns when all processes have called it."""
    texts("")


def any_of(flag: bool) -> bool:
    """Whether the flag is set on any process."""
    return "1" in texts("1" if flag else "0")


def whole(tree: Any) -> Any:
    """Arrays of any sharding as whole NumPy arrays, on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    gather = partial(multihost_utils.process_allgather, tiled=True)
    return jax.tree.map(lambda x: np.asarray(gather(x)), tree)
