"""From a workload and a target to a plan: what each program takes, what fits, what to change.

The largest batch that fits is found with few compilations, because memory is close to linear in the
number of rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from tim_jax.common.errors import InputError
from tim_jax.instruments.plan import comparison, costs
from tim_jax.instruments.plan import workload as workloads
from tim_jax.instruments.plan.comparison import Match
from tim_jax.instruments.plan.costs import Compiled, Figures
from tim_jax.instruments.plan.topology import Target
from tim_jax.instruments.plan.workload import Program, Workload
from tim_jax.model import parameters
from tim_jax.model.config import ModelConfig
from tim_jax.numerics import Numerics
from tim_jax.placement import Devices, Placement

_GIB = 2**30


def advice(workload: Workload, stage: str, devices: Devices, *, slots: int | None) -> Iterator[str]:
    """Changes that would make a step fit, a line each, those that cost least first.

    Args:
      stage: the program that does not fit.
      slots: the most sequences at a time for which the sampler fits; 0 if it never does, None
        if that is not known.
    """
    yield from _spread(workload, devices)
    if stage == "sampler":
        yield from _of_sampler(workload, slots, devices)
    else:
        yield from _of_learner(workload)
    if workload.execution.numerics.compute_dtype == "float32":
        yield 'numerics.dtype = "bfloat16": half the weights, keys and values, and activations'
    yield "a slice of more chips: a batch's rows, masters and optimiser are split over all of them"


def _spread(workload: Workload, devices: Devices) -> Iterator[str]:
    """Advice to use more of the slice's devices, and to split the state over all of them."""
    where = workload.execution.placement
    spare = len(devices) // where.devices
    wider = replace(where, fsdp=where.fsdp * spare)
    if spare > 1 and _possible(workload, wider):
        yield f"placement.fsdp = {wider.fsdp}: the slice has devices that nothing lies on"
    merged = replace(where, data=1, fsdp=where.data * where.fsdp)
    if where.data > 1 and _possible(workload, merged):
        now, then = (
            workloads.resident(workload.varied(placement=one), devices, "scoring")
            for one in (where, merged)
        )
        yield (
            f"placement.data = 1 with placement.fsdp = {merged.fsdp}: masters and optimiser take"
            f" {then / _GIB:.1f} instead of {now / _GIB:.1f} GiB a device"
        )


def _possible(workload: Workload, where: Placement) -> bool:
    execution = workload.execution
    takes = _takes(execution.config, execution.numerics, where)
    return takes and workload.sequences % where.shards == 0


def _takes(config: ModelConfig, numerics: Numerics, where: Placement) -> bool:
    try:
        parameters.check(config, numerics, where)
    except InputError:
        return False
    return True


def _of_sampler(workload: Workload, slots: int | None, devices: Devices) -> Iterator[str]:
    where = workload.training.drawing.placement
    key = "placement" if workload.sampler.placement is None else "placement.sampler"
    if slots:
        yield f"sampler.slots = {slots}: this many sequences are decoded at a time, same bits"
    yield "sampling.max_tokens: room for keys and values is made for the longest response"
    if where.decode == "whole" and where.fsdp > 1:
        whole = workloads.weight_bytes(workload) / where.tensor
        saved = whole * (1 - 1 / where.fsdp) / _GIB
        yield (
            f'{key}.decode = "sharded": {saved:.1f} GiB less a device, but all weights are gathered'
            " for every token"
        )
    wider = replace(where, tensor=2 * where.tensor)
    tiled = replace(workload.execution.numerics, column_tiles=wider.tensor)
    if wider.devices <= len(devices) and _takes(workload.execution.config, tiled, wider):
        yield f"{key}.tensor = {wider.tensor}: half the weights and key heads a device"


def _of_learner(workload: Workload) -> Iterator[str]:
    learning, shards = workload.learning, workload.execution.placement.shards
    if not learning.remat:
        yield "learner.remat = true: activations of one layer at a time, for a second forward"
    if workload.full_rows > shards:
        key, unit = workload.micro_batch
        yield f"{key} = {shards * unit}: one sequence a device at a time"


Total = Callable[[int], int]  # a count -> bytes on a chip, by compiling


@dataclass(frozen=True)
class Largest:
    """The largest of the counts that may be chosen."""

    count: int  # 0: not even the smallest fits
    total: int  # bytes on a chip at that count, or at the smallest
    bounded: bool  # False: all counts that were allowed fit


def largest(
    total: Total, allowed: Sequence[int], *, capacity: int, known: dict[float, int]
) -> Largest:
    """The largest of `allowed`, ascending, whose total is within `capacity`.

    The line through the two totals nearest to the capacity predicts it; a compilation confirms this
    or improves the line.

    Args:
      total: computes the total of a count, by compiling.
      known: totals that are already known, by count; new ones are added.
    """

    def at(count: int) -> int:
        if count not in known:
            known[count] = total(count)
        return known[count]

    if len(known) < 2:
        at(next((count for count in allowed if count not in known), allowed[0]))
    low, high = 0, len(allowed)  # allowed[:low] fit, allowed[high:] do not
    while low < high:
        guess = min(_guess(known, allowed, capacity), high - 1)
        if low and guess < low:
            break  # by the line, no larger one fits
        if at(allowed[max(guess, low)]) <= capacity:
            low = max(guess, low) + 1
        else:
            high = max(guess, low)
    if low == 0:
        return Largest(0, at(allowed[0]), True)
    return Largest(allowed[low - 1], at(allowed[low - 1]), low < len(allowed))


def _guess(known: dict[float, int], allowed: Sequence[int], capacity: int) -> int:
    """Index of the largest count that should fit, by the line through the two nearest totals."""
    near = sorted(known, key=lambda count: abs(known[count] - capacity))[:2]
    if len(near) < 2:
        return len(allowed) - 1
    first, second = sorted(near)
    slope = (known[second] - known[first]) / (second - first)
    if slope <= 0:
        return len(allowed) - 1
    limit = first + (capacity - known[first]) / slope
    return max(sum(count <= limit for count in allowed) - 1, 0)


Layers = tuple[int, int] | None  # the two numbers of layers to draw a line through; None: all
Say = Callable[[str], None]

_MOST_PROMPTS = 64  # times as many as the config's are looked at


@dataclass(frozen=True)
class Stage:
    """One program of a step, on one chip."""

    name: str
    figures: Figures
    resident: int  # bytes on the chip beside the program's own
    capacity: int
    seconds: float  # spent compiling
    layers: tuple[int, ...]  # of the models that were compiled
    texts: tuple[str, ...] = ()  # of the compiled programs

    @property
    def total(self) -> int:
        """Bytes of the program and of what else of the run lies in memory meanwhile."""
        return self.figures.memory.total + self.resident

    @property
    def fits(self) -> bool:
        """True if that is no more than a device's memory."""
        return self.total <= self.capacity


@dataclass(frozen=True)
class Plan:
    """The plan of a step on a slice."""

    workload: Workload
    target: Target
    stages: tuple[Stage, ...]
    largest: Mapping[str, Largest]  # by key of the config
    advice: tuple[str, ...]
    audit: tuple[Match, ...]

    @property
    def fits(self) -> bool:
        """True if every stage of the step fits."""
        return all(stage.fits for stage in self.stages)


def make(
    workload: Workload,
    target: Target,
    *,
    layers: Layers,
    searching: bool = True,
    say: Say = lambda text: None,
) -> Plan:
    """Compiles a step's programs, searches for the largest batch, and audits.

    Args:
      layers: the sampler, whose decode loops contain every layer separately, is compiled with these
        two numbers of layers and extrapolated linearly; None compiles all. The learner loops over
        layers, and is always compiled whole.
      searching: whether to search for the largest batch.
      say: is called with a line about each program that was compiled.
    """
    stages = [compile_stage(workload, target, "sampler", layers, say)]
    if workload.scores:
        stages.append(compile_stage(workload, target, "scoring", None, say))
    stages.append(compile_stage(workload, target, "update", None, say))
    searched = dict(_searches(workload, target, stages, layers, say)) if searching else {}
    slots = searched["sampler.slots"].count if "sampler.slots" in searched else None
    lines = [
        line
        for stage in stages
        if not stage.fits
        for line in advice(workload, stage.name, target.devices, slots=slots)
    ]
    return Plan(
        workload=workload,
        target=target,
        stages=tuple(stages),
        largest=searched,
        advice=tuple(dict.fromkeys(lines)),
        audit=audit(workload, stages),
    )


def audit(workload: Workload, stages: Sequence[Stage]) -> tuple[Match, ...]:
    """Compares the sampler's smallest program with the learner's; () if one did not compile."""
    sampler, *learner = stages
    texts = [text for stage in learner for text in stage.texts if text]
    drawn = next((text for text in sampler.texts if text), "")
    if not drawn or not texts:
        return ()
    return comparison.compare(drawn, texts, weights=_weight_shapes(workload))


def _weight_shapes(workload: Workload) -> frozenset[tuple[int, ...]]:
    """Shapes of the model's weights as its products and norms take them, tile by tile."""
    execution = workload.execution
    weights = jax.eval_shape(execution.prepare, workloads.parameter_shapes(execution.config))
    stacks = [weights[name] for name in execution.config.stacks]
    layers = [leaf.shape[1:] for leaf in jax.tree.leaves(stacks)]
    shapes = [*layers, weights["head"].shape, weights["final_norm"].shape]
    parts = [(1, *shape) if len(shape) == 1 else shape[-2:] for shape in shapes]
    return frozenset([*shapes, *parts])


PROGRAMS = {
    "sampler": workloads.sampling,
    "scoring": workloads.scoring,
    "update": workloads.updating,
}


def compile_stage(workload: Workload, target: Target, name: str, layers: Layers, say: Say) -> Stage:
    """Compiles a program with all layers, or with two numbers of layers and extrapolates."""
    config = workload.execution.config
    all_layers, first = config.num_layers, config.first_dense_layers
    line = None if layers is None else (layers[0] + first, layers[1] + first)  # all of the first
    line = None if line is None or all_layers <= max(line) else line
    compiled = [
        _compiled(workload.with_layers(n), target, name, say) for n in line or (all_layers,)
    ]
    total = compiled[0].figures
    if line:
        total = costs.along(total, compiled[1].figures, at=(*line, all_layers))
    return Stage(
        name=name,
        figures=total,
        resident=workloads.resident(workload, target.devices, name),
        capacity=target.capacity,
        seconds=sum(one.seconds for one in compiled),
        layers=line or (all_layers,),
        texts=tuple(one.text for one in compiled),
    )


def _compiled(workload: Workload, target: Target, name: str, say: Say) -> Compiled:
    with target.tracing():
        program: Program = PROGRAMS[name](workload, target.devices)
    compiled = costs.compiled(program, target)
    say(
        f"compiled {name}: {workload.execution.config.num_layers} layers,"
        f" {workload.sequences} sequences, micro-batch {workload.size},"
        f" {compiled.seconds:.0f} s"
    )
    return compiled


def _searches(
    workload: Workload, target: Target, stages: Sequence[Stage], layers: Layers, say: Say
) -> Iterator[tuple[str, Largest]]:
    """By key: prompts or slots for which the sampler fits, micro-batches for which the update does.

    Slots are searched where they are set, or where all sequences at once do not fit.
    """
    training, batching = workload.training, workload.sampler.batching

    def search(
        stage: Stage, allowed: Sequence[int], now: float, varied: Callable[[int], Workload]
    ) -> Largest:
        own = layers if stage.name == "sampler" else None

        def total(count: int) -> int:
            return compile_stage(varied(count), target, stage.name, own, say).total

        return largest(total, allowed, capacity=target.capacity, known={now: stage.total})

    if batching.slots is None and stages[0].fits:
        now, step = training.prompts_per_step, training.least_prompts
        allowed = range(step, _MOST_PROMPTS * now + 1, step)
        found = search(stages[0], allowed, now, lambda n: workload.varied(prompts_per_step=n))
        yield "learner.prompts_per_step", found
    else:
        now = batching.slots or workload.sequences
        allowed = _divisors(workload.sequences, training.drawing.placement.shards)
        yield "sampler.slots", search(stages[0], allowed, now, lambda n: workload.varied(slots=n))
    key, unit = workload.micro_batch
    allowed = _divisors(training.rows, workload.execution.placement.shards)
    rows = search(stages[-1], allowed, workload.full_rows, workload.with_micro_batch)
    yield key, replace(rows, count=rows.count * unit)


def _divisors(count: int, step: int) -> list[int]:
    return [n for n in range(step, count + 1, step) if count % n == 0]
