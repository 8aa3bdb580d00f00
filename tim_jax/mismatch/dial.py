"""The dial: entries that apply together, checks against a learner, and the sampler that results.

`build` makes it of a configuration's tables, each the name of an entry and its arguments:

mismatch = [
  { name = "kv_cache", dtype = "float8_e4m3fn" },
  { name = "log_prob_noise", std = 0.01, by = "probability" },
]
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import jax
import numpy as np

from tim_jax.common import inputs
from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.types import Names, Prompts, Rollout
from tim_jax.mismatch import arithmetic, transfer
from tim_jax.mismatch.arithmetic import Compute, NativeKernels
from tim_jax.mismatch.base import Entry
from tim_jax.mismatch.transfer import (
    DroppedEnd,
    InFlightUpdates,
    LoraMerge,
    PadMask,
    StaleWeights,
)
from tim_jax.model import fitting
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution
from tim_jax.model.weights import Weights
from tim_jax.numerics import Numerics, Order, Precision
from tim_jax.policy import distribution, sampler


@dataclass(frozen=True)
class Mismatch:
    """How a sampler differs from its learner: entries, applied in order; none, no difference."""

    entries: tuple[Entry, ...] = ()

    @property
    def active(self) -> tuple[Entry, ...]:
        """The entries with a strength above 0."""
        return tuple(entry for entry in self.entries if not entry.inert)

    @property
    def drawing(self) -> "Mismatch":
        """The entries that change the sampler's program, and not only its weights or its report.

        With one that edits weights too are all that do, as the order of these edits counts.
        """
        edits = self.edits if any(entry.draws for entry in self.edits) else ()
        return Mismatch(tuple(entry for entry in self.active if entry.draws or entry in edits))

    @property
    def stale_updates(self) -> int:
        """How many updates ago the sampler's weights are from."""
        return sum(e.updates for e in self.entries if isinstance(e, StaleWeights))

    @property
    def in_flight(self) -> InFlightUpdates | None:
        """The entry by which the sampler's weights change within a response, if there is one."""
        return next((e for e in self.active if isinstance(e, InFlightUpdates)), None)

    @property
    def shared(self) -> "Mismatch":
        """The entries that a control has on both sides: those that change what is sampled.

        Raises:
          InputError: an entry that a learner cannot have, so that there is no control.
        """
        for entry in self.active:
            if entry.no_control:
                raise entry.refuse(f"cannot be on both sides: {entry.no_control}")
        return Mismatch(tuple(entry for entry in self.active if not entry.only_reports))

    def check_shared(self) -> None:
        """Raises InputError, naming an entry, if these are not what a control has on both sides."""
        for entry in self.active:
            if entry not in self.shared.entries:
                raise entry.refuse("changes no token; leave it out of what both sides have")

    @property
    def edits(self) -> tuple[Entry, ...]:
        """The entries that change the sampler's weights, in the order in which they do.

        Another dtype comes first, whatever the order of the entries: a learner that has it too
        casts its weights before it edits them.
        """
        edits = [entry for entry in self.active if type(entry).weights is not Entry.weights]
        return tuple(sorted(edits, key=lambda entry: not isinstance(entry, Compute)))

    def numerics(self, numerics: Numerics) -> Numerics:
        """The sampler's numerics, whatever the order of the entries."""
        for entry in _in_order_of_editing(self.active):
            numerics = entry.numerics(numerics)
        return numerics

    def weights(self, weights: Weights) -> Weights:
        """The sampler's weights, of the learner's compute weights."""
        for entry in self.edits:
            weights = entry.weights(weights)
        return weights


EXACT = Mismatch()


def _in_order_of_editing(entries: Sequence[Entry]) -> list[Entry]:
    """The entries in the order in which they edit the numerics, whatever theirs is.

    Kernels come first, since they may take what the learner's cannot. Another dtype comes last: it
    ends what was measured, but not the tiles of another entry.
    """
    kernels = [entry for entry in entries if isinstance(entry, NativeKernels)]
    dtypes = [entry for entry in entries if isinstance(entry, Compute)]
    others = [entry for entry in entries if not isinstance(entry, NativeKernels | Compute)]
    return [*kernels, *others, *dtypes]


def check(mismatch: Mismatch, execution: Execution) -> None:
    """Raises InputError for an entry that this learner's sampler cannot have, or two that clash.

    Two entries clash if they are the same (noise: with the same seed), if both set one field of the
    numerics, or if both decide what is reported.
    """
    names, setters = set(), {}
    reporter, numerics = None, execution.numerics
    for entry in _in_order_of_editing(mismatch.entries):
        mark = entry.name, getattr(entry, "seed", None) if entry.repeatable else None
        if mark in names:
            same = " with one seed, and would be the same noise; give each a seed of its own"
            how = same if entry.repeatable else "; give it once"
            raise entry.refuse(f"stands there twice{how}")
        names.add(mark)
        with entry.named():
            edited = numerics if entry.inert else entry.numerics(numerics)
        for field in difference(numerics, edited):
            if field in setters:
                raise entry.refuse(f"contradicts {setters[field]!r}: both set {field}")
            setters[field] = entry.name
        numerics = edited
        if entry.reports and reporter is not None:
            raise entry.refuse(f"contradicts {reporter!r}: both decide what is reported")
        reporter = entry.name if entry.reports else reporter
    # By what the sampler has in the end. Of two that clash, the later one is named.
    for entry in reversed(mismatch.active):
        entry.check(replace(execution, numerics=numerics))
    _check_together(mismatch, numerics, stop_tokens=execution.sampling.stop_tokens)
    # With the kernels that the sampler has in the end, which may lack a dtype.
    kernels = Mismatch(tuple(e for e in mismatch.active if isinstance(e, NativeKernels)))
    for entry in mismatch.active:
        with entry.named():
            fitting.check_dtypes(entry.numerics(kernels.numerics(execution.numerics)))


def without_replaced_ends(
    rollout: Rollout, *, mismatch: Mismatch, stop_tokens: Sequence[int]
) -> Rollout:
    """A reported rollout as the engine's text has it, which rewards are given for.

    Where `dropped_end` has put another token in the end token's place, the response ends before it.
    """
    entries = [entry for entry in mismatch.active if isinstance(entry, DroppedEnd)]
    if all(entry.replacement is None for entry in entries):
        return rollout
    responses, lengths, finished = jax.device_get(
        (rollout.responses, rollout.lengths, rollout.finished)
    )
    last = responses[np.arange(len(lengths)), np.maximum(lengths - 1, 0)]
    replaced = finished & ~np.isin(last, stop_tokens)
    return replace(rollout, lengths=np.where(replaced, lengths - 1, lengths))


def _check_together(mismatch: Mismatch, numerics: Numerics, *, stop_tokens: Sequence[int]) -> None:
    if numerics.family != "tiles":
        for entry in mismatch.entries:
            if entry.name in ("tile_sizes", "sum_order"):
                raise entry.refuse(f"contradicts {numerics.family!r} kernels, which choose it")
    aged = _aged(mismatch)
    if len(aged) > 1:
        raise aged[1].refuse(f"contradicts {aged[0].name!r}: both say how old the weights are")
    if aged and any(isinstance(e, LoraMerge) for e in mismatch.active):
        raise InputError(
            f"mismatch 'lora_merge': contradicts {aged[0].name!r}, which keeps weights that are"
            " merged already"
        )
    ends = [entry for entry in mismatch.active if isinstance(entry, DroppedEnd)]
    pads = [entry for entry in mismatch.active if isinstance(entry, PadMask)]
    if not ends or not pads or ends[0].replacement is None:
        return
    pad = pads[0].pad
    if pad == ends[0].replacement:
        raise pads[0].refuse("contradicts 'dropped_end': it hides the very token that is put there")
    if pad in stop_tokens:
        raise pads[0].refuse(
            f"contradicts 'dropped_end': one hides the end token {pad}, the other puts"
            f" {ends[0].replacement} in its place; leave out one of them, or dropped_end's"
            " replacement"
        )


def _aged(mismatch: Mismatch) -> list[StaleWeights]:
    return [entry for entry in mismatch.active if isinstance(entry, StaleWeights)]


def difference(first: Any, second: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Fields in which two values of one dataclass differ, dotted: the experiment's description."""
    fields: dict[str, tuple[Any, Any]] = {}
    for field in dataclasses.fields(first):
        one, other = getattr(first, field.name), getattr(second, field.name)
        name = f"{prefix}{field.name}"
        if one == other:
            continue
        if isinstance(one, Precision | Order):
            fields |= difference(one, other, f"{name}.")
        else:
            fields[name] = (one, other)
    return fields


def merging(mismatch: Mismatch, execution: Execution) -> Execution:
    """`execution` with the sampler's rule of merging adapters, by which its weights are made."""
    numerics = execution.numerics
    rule = mismatch.numerics(numerics).precision.lora
    precision = replace(numerics.precision, lora=rule)
    return replace(execution, numerics=replace(numerics, precision=precision))


def describe(mismatch: Mismatch, numerics: Numerics) -> list[str]:
    """One line per active entry, and the differences of the sampler's numerics from `numerics`."""
    lines = [label(entry) for entry in mismatch.active]
    changed = difference(numerics, mismatch.numerics(numerics))
    return [*lines, *(f"numerics.{k}: {a} -> {b}" for k, (a, b) in changed.items())]


def label(entry: Entry) -> str:
    """Name and arguments that are not the defaults: `kv_cache(float8_e4m3fn)`."""
    words = []
    for index, field in enumerate(dataclasses.fields(entry)):
        value = getattr(entry, field.name)
        if field.default is dataclasses.MISSING and index == 0:
            words.append(str(value))
        elif value != field.default:
            words.append(f"{field.name}={value}")
    return f"{entry.name}({', '.join(words)})" if words else entry.name


def draw(
    weights: Weights,
    prompts: Prompts,
    key: jax.Array,
    *,
    mismatch: Mismatch,
    execution: Execution,
    samples: int,
    first: jax.Array | None = None,
    batching: Batching = ALL_AT_ONCE,
    begun: sampler.Begun | None = None,
) -> Rollout:
    """`sampler.sample` with another execution: the second of a divergent sampler's three steps.

    The first step is `Mismatch.weights` of the learner's compute weights (of older ones with the
    entry `stale_weights`; the caller keeps them), the last is `report`. On a mesh, this step runs
    on each device with its parts of the arrays; the other two get whole arrays. `execution` is the
    learner's, with the sampler's placement. Only the entries of `mismatch.drawing` matter here;
    without one this is `sampler.sample`, as `batching` and `begun` have it.
    """
    other = replace(execution, numerics=mismatch.numerics(execution.numerics))
    names = Names.of(prompts, key, samples, first)
    return sampler.sample(
        weights,
        prompts,
        key,
        execution=other,
        samples=samples,
        first=first,
        draw=drawing(mismatch, names, other),
        batching=batching,
        begun=begun,
    )


def report(
    rollout: Rollout, prompts: Prompts, key: jax.Array, *, mismatch: Mismatch, samples: int
) -> Rollout:
    """The last step: the rollout as it is reported to the learner."""
    names = Names.of(prompts, key, samples).of_parts(rollout.parts, samples)
    for entry in mismatch.active:
        rollout = entry.rollout(rollout, names)
    return rollout


def drawing(mismatch: Mismatch, names: Names, execution: Execution) -> sampler.Draw | None:
    """A draw with the entries' logits and reports; None if none has any.

    `execution` is the sampler's, `names` those of all its rows.
    """
    entries = mismatch.active
    sampling, numerics = execution.sampling, execution.numerics
    noisy = [e for e in entries if type(e).logits is not Entry.logits]
    reporter = next((entry for entry in entries if entry.reports), None)
    if not noisy and reporter is None:
        return None

    def drawn(logits, uniform, positions, sequences):
        of_rows = Names(names.key, names.prompts[sequences], names.samples[sequences])
        for entry in noisy:
            logits = entry.logits(logits, positions, of_rows)
        token, log_prob = distribution.draw(logits, uniform, sampling=sampling, numerics=numerics)
        if reporter is None:
            return token, log_prob, None
        reported = reporter.reported(logits, token, sampling=sampling, numerics=numerics)
        return token, reported, log_prob

    return drawn


def refuse_merge(mismatch: Mismatch, execution: Execution, where: str) -> None:
    """Raises InputError if the sampler merges adapters by another rule, which `where` cannot."""
    if merging(mismatch, execution) != execution:
        raise InputError(f"mismatch 'lora_merge': {where}")


def refuse_ahead(mismatch: Mismatch) -> None:
    """Raises InputError for entries whose sampler cannot draw ahead of the learner."""
    if mismatch.stale_updates:
        raise InputError(
            f"mismatch {_aged(mismatch)[0].name!r}: contradicts max_staleness, by which the"
            " sampler's weights are old already; set one of them"
        )
    for entry in mismatch.active:
        if isinstance(entry, LoraMerge):
            raise entry.refuse("contradicts max_staleness, which keeps weights that are merged")


def refuse_stale(mismatch: Mismatch, where: str) -> None:
    """Raises InputError if the sampler needs old weights, which `where` does not have."""
    for entry in _aged(mismatch):
        raise entry.refuse(where)


ENTRIES: dict[str, type[Entry]] = {
    kind.name: kind
    for module in (arithmetic, transfer)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Entry) and kind.name
}
GROUPS: dict[str, tuple[type[Entry], ...]] = {
    group: tuple(entry for entry in ENTRIES.values() if entry.kind == group)
    for group in ("precision", "weights", "kernels", "semantics", "synthetic")
}
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
    kind = ENTRIES[name]
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    for argument in arguments:
        if argument not in fields:
            hint = did_you_mean(argument, fields) if fields else "; it takes none"
            raise InputError(f"mismatch {name!r} has no argument {argument!r}{hint}")
    for argument, default in fields.items():
        if default is dataclasses.MISSING and argument not in arguments:
            raise InputError(f"mismatch {name!r} needs the argument {argument!r}")
    hints = get_type_hints(kind)
    # A whole number will do for a number.
    given = {
        argument: float(value) if hints[argument] is float and inputs.whole(value) else value
        for argument, value in arguments.items()
    }
    return kind(**given)
