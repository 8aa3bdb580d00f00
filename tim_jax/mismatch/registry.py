"""Builds a dial from a configuration's tables, each the name of an entry and its arguments:

mismatch = [
  { name = "kv_cache", dtype = "float8_e4m3fn" },
  { name = "log_prob_noise", std = 0.01, by = "probability" },
]
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.mismatch.arithmetic import (
    AttentionSoftmax,
    Compute,
    Head,
    KVCache,
    Logits,
    NativeKernels,
    PallasAttention,
    Softmax,
    SplitK,
    SplitKV,
    SumOrder,
    TensorParallel,
    TileSizes,
    TritonAttention,
)
from tim_jax.mismatch.base import Entry
from tim_jax.mismatch.dial import Mismatch
from tim_jax.mismatch.mixtures import ExpertCapacity, ExpertChoice, ExpertOrder, Router
from tim_jax.mismatch.reporting import (
    DroppedEnd,
    IgnoredTruncation,
    LogitNoise,
    LogProbNoise,
    PadMask,
    RawLogProbs,
)
from tim_jax.mismatch.weights import InFlightUpdates, LoraMerge, QuantisedWeights, StaleWeights

GROUPS: dict[str, tuple[type[Entry], ...]] = {
    "precision": (Compute, Head, Router, ExpertChoice, Logits, Softmax, AttentionSoftmax, KVCache),
    "weights": (QuantisedWeights, LoraMerge, StaleWeights, InFlightUpdates),
    "kernels": (
        NativeKernels,
        TileSizes,
        SumOrder,
        SplitK,
        SplitKV,
        TensorParallel,
        ExpertOrder,
        ExpertCapacity,
        PallasAttention,
        TritonAttention,
    ),
    "semantics": (RawLogProbs, IgnoredTruncation, DroppedEnd, PadMask),
    "synthetic": (LogitNoise, LogProbNoise),
}
ENTRIES: dict[str, type[Entry]] = {kind.name: kind for kinds in GROUPS.values() for kind in kinds}
# What might be looked for here, but is not an entry, and what to use in its place.
_ABSENT = {
    "placement": "set placement.sampler; a mesh changes no bit of exact kernels, and"
    " 'tensor_parallel' adds up as a mesh with all-reduce does",
}


def build(entries: Iterable[Mapping[str, Any]]) -> Mismatch:
    """Returns the dial of the entries, in their order.

    An entry is a table with `name` and the arguments of that entry. No entries: no mismatch.

    Raises:
        InputError: unknown name or argument, a missing one, a wrong type or value.
    """
    return Mismatch(tuple(_build_one(entry) for entry in entries))


def _build_one(table: Mapping[str, Any]) -> Entry:
    if not isinstance(table, Mapping) or "name" not in table:
        raise InputError(
            f"mismatch {table!r} is no table with a name; known: {', '.join(sorted(ENTRIES))}"
        )
    name, arguments = str(table["name"]), {k: v for k, v in table.items() if k != "name"}
    if name in _ABSENT:
        raise InputError(f"mismatch {name!r} is not available: {_ABSENT[name]}")
    if name not in ENTRIES:
        raise InputError(f"mismatch {name!r} is unknown{did_you_mean(name, ENTRIES)}")
    fields = {field.name: field for field in dataclasses.fields(ENTRIES[name])}
    for argument in arguments:
        if argument not in fields:
            hint = did_you_mean(argument, fields) if fields else "; it takes none"
            raise InputError(f"mismatch {name!r} has no argument {argument!r}{hint}")
    for argument, field in fields.items():
        if field.default is dataclasses.MISSING and argument not in arguments:
            raise InputError(f"mismatch {name!r} needs the argument {argument!r}")
        if argument in arguments:
            arguments[argument] = _typed(name, field, arguments[argument])
    return ENTRIES[name](**arguments)


def _typed(name: str, field: dataclasses.Field, value: Any) -> Any:
    """The value, if it has the field's type; a whole number will do for a number."""
    wanted = str(getattr(field.type, "__name__", field.type))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted == "float" and number:
        return float(value)
    rules = {
        "float": (number, "a number"),
        "int": (number and isinstance(value, int), "a whole number"),
        "bool": (isinstance(value, bool), "true or false"),
    }
    kind = wanted.split(" ")[0]
    holds, what = rules.get(kind, (isinstance(value, str), "text"))
    if not holds:
        raise InputError(f"mismatch {name!r}: {field.name} is {value!r}; it must be {what}")
    return value
