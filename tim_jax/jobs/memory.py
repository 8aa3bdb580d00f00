"""Memory that ran out, as one line: while doing what, how much was asked for, and what would help.

XLA says RESOURCE_EXHAUSTED when an allocation on a device fails, NumPy raises MemoryError for the
machine's. What was being done is known from the `waiting.during` around it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from jax.errors import JaxRuntimeError

from tim_jax import waiting
from tim_jax.config.run import RunConfig
from tim_jax.errors import OutOfMemoryError
from tim_jax.rl import drawing, evaluation

Ways = Mapping[str, Sequence[str]]  # what was being done -> settings; "": anything else

_OF_XLA = "RESOURCE_EXHAUSTED"
_BYTES = re.compile(r"alloc\w* (?:of )?(\d+) bytes")
_SIZE = re.compile(r"[Aa]llocate ([\d.]+ ?[KMGTP]i?B?)\b")
_USED = re.compile(r"Used ([\d.]+[KMGTP]?) of ([\d.]+[KMGTP]?)")  # by a TPU's compiler


@contextmanager
def explained(ways: Ways) -> Iterator[None]:
    """A context of a job, in which memory that runs out becomes an `OutOfMemoryError`.

    Args:
      ways: settings that need less, as `of_run` gives them.
    """
    try:
        yield
    except (JaxRuntimeError, MemoryError) as error:
        if isinstance(error, JaxRuntimeError) and _OF_XLA not in str(error):
            raise
        doing = waiting.task_of(error)
        while_doing = "" if doing is None else f"while {doing}"
        asked = _asked(str(error))
        helps = ", ".join(ways.get(doing or "", ways[""]))
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
    """The settings of a run that need less memory, three for each stage, with their values now."""
    total, where = config.sequences_per_step, config.placement
    sampling, learner = config.sampling, config.learner
    wider = f"placement.fsdp above {where.fsdp}, with more devices"
    rows = learner.micro_batch or total // learner.mini_batches
    updating = [f"learner.micro_batch below {rows}"]
    updating += [] if learner.remat else ["learner.remat = true"]
    updating += [wider, f"sampling.max_response_length below {sampling.max_response_length}"]
    slots = f"sampler.slots below {config.sampler.slots or total}"
    return MappingProxyType(
        {
            drawing.SAMPLING: (
                slots,
                f"sampling.max_response_length below {sampling.max_response_length}",
                wider,
            ),
            evaluation.SAMPLING: (slots, f"eval.samples below {config.eval.samples}", wider),
            "": tuple(updating[:3]),
        }
    )
