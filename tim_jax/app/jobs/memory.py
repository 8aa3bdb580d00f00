"""Memory that ran out, as one line: while doing what, how much was asked for, and what would help.

XLA says RESOURCE_EXHAUSTED when an allocation on a device fails, NumPy raises MemoryError for the
machine's. What was being done is known from the `waiting.during` around it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import jax
from jax.errors import JaxRuntimeError

from tim_jax.app.config.run import RunConfig
from tim_jax.app.run import checkpoints
from tim_jax.common import waiting
from tim_jax.common.errors import InputError, OutOfMemoryError
from tim_jax.placement import host_helps
from tim_jax.rl import drawing, evaluation

Ways = Mapping[str, Sequence[str]]  # what was being done -> settings; "": anything else

_OF_XLA = "RESOURCE_EXHAUSTED"
# Of the memory inside a GPU's or a TPU's core, which a kernel's tiles must fit into.
_OF_KERNEL = ("Shared memory size limit exceeded", "CompileTimeScopedVmemOom")
_BYTES = re.compile(r"alloc\w* (?:of )?(\d+) bytes")
_SIZE = re.compile(r"[Aa]llocate ([\d.]+ ?[KMGTP]i?B?)\b")
_USED = re.compile(r"Used ([\d.]+[KMGTP]?) of ([\d.]+[KMGTP]?)")  # by a TPU's compiler


@contextmanager
def explained(ways: Callable[[], Ways]) -> Iterator[None]:
    """A context of a job, in which memory that runs out becomes an `OutOfMemoryError`.

    Args:
      ways: called once memory has run out; gives the settings that need less, as `of_run`.

    Raises:
      InputError: a kernel is too large for a core of the device, which none of them changes.
    """
    try:
        yield
    except (JaxRuntimeError, MemoryError) as error:
        if isinstance(error, JaxRuntimeError) and _OF_XLA not in str(error):
            raise
        if any(text in str(error) for text in _OF_KERNEL):
            raise InputError(
                "numerics: a kernel needs more memory than a core of this"
                f' {jax.devices()[0].device_kind} has; family "tiles" works there, slowly'
            ) from error
        doing = waiting.task_of(error)
        while_doing = "" if doing is None else f"while {doing}"
        asked = _asked(str(error))
        found = ways()
        helps = ", ".join(found.get(doing or "", found[""]))
        parts = [part for part in (while_doing, asked) if part] or ["on a device"]
        raise OutOfMemoryError(f"{': '.join(parts)}; each of these needs less: {helps}") from error


def _asked(message: str) -> str:
    """How much was asked for, as far as the message says."""
    if found := _BYTES.search(message):
        return f"{int(found[1]) / 1e9:.2f} GB could not be allocated"
    if found := _SIZE.search(message):
        return f"{found[1]} could not be allocated"
    if found := _USED.search(message):
        return f"the program needs {found[1]} of the device's {found[2]}"
    return ""


def of_run(config: RunConfig) -> Ways:
    """The settings of a run that need less memory, three for each stage, with their values now.

    If the run has checkpoints, those come first with which it goes on; the others need another
    folder, and say so.
    """
    learner = config.learner
    may = not learner.offload and not config.sampler.max_staleness
    offload = may and host_helps(jax.devices())
    if learner.micro_batch_tokens is None:
        micro_batch = {"learner.micro_batch": f"below {config.micro_batch}"}
    else:
        micro_batch = {"learner.micro_batch_tokens": f"below {learner.micro_batch_tokens}"}
    settings = {
        **micro_batch,
        **({} if learner.remat else {"learner.remat": "= true"}),
        **({"learner.offload": "= true"} if offload else {}),
        **_of_lengths(config),
        "eval.samples": f"below {config.eval.samples}",
    }
    return {stage: _three(config, settings, keys) for stage, keys in _KEYS.items()}


def _of_lengths(config: RunConfig) -> dict[str, str]:
    """Fewer keys and values on a device. Episodes that wait for replies keep theirs."""
    wider = {_WIDER: f"above {config.placement.fsdp}, with more devices"}
    if config.sampling.max_turns is None:
        slots = config.sampler.slots or config.sequences_per_step
        length = f"below {config.sampling.max_tokens}"
        return {"sampler.slots": f"below {slots}", _LENGTH: length, **wider}
    pages = "set" if config.sampler.pages is None else f"below {config.sampler.pages}"
    longest = f"below {config.sampling.longest}"
    return {"sampler.pages": pages, "sampling.max_episode_tokens": longest, **wider}


_LENGTH, _WIDER = "sampling.max_tokens", "placement.fsdp"
_OF_TURNS = "sampler.pages", "sampling.max_episode_tokens"
_KEYS = MappingProxyType(
    {
        drawing.SAMPLING: ("sampler.slots", *_OF_TURNS, "learner.offload", _LENGTH, _WIDER),
        evaluation.SAMPLING: ("sampler.slots", _OF_TURNS[0], "eval.samples", _WIDER),
        "": (
            *("learner.micro_batch", "learner.micro_batch_tokens", "learner.remat"),
            *(_WIDER, _LENGTH, _OF_TURNS[1]),
        ),
    }
)


def _three(config: RunConfig, settings: Mapping[str, str], keys: Sequence[str]) -> tuple[str, ...]:
    kept = checkpoints.list_steps(Path(config.run.folder) / "checkpoints")
    free = config.may_change()

    def bound(key: str) -> bool:
        return bool(kept) and not any(f"{key}.".startswith(f"{one}.") for one in free)

    there = sorted((key for key in keys if key in settings), key=bound)[:3]
    other = " (in another run.folder)"
    return tuple(f"{key} {settings[key]}{other if bound(key) else ''}" for key in there)
