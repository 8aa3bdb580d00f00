"""Plans for a pod that is not here: what each program takes, what fits, what to change.

`make` compiles a run's programs for a TPU slice or for GPUs: a workload and a target make a plan.

The largest batch that fits is found with few compilations, because memory is close to linear in the
number of rows. A plan is also made lines of text, and plain values for JSON.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from tim_jax.instruments.plan import budget, comparison, costs, roofline
from tim_jax.instruments.plan import workload as workloads
from tim_jax.instruments.plan.comparison import Match
from tim_jax.instruments.plan.costs import Compiled, Figures
from tim_jax.instruments.plan.topology import Target
from tim_jax.instruments.plan.workload import Program, Workload

Layers = tuple[int, int] | None  # the two numbers of layers to draw a line through; None: all
Say = Callable[[str], None]
Total = Callable[[int], int]  # a count -> bytes on a chip, by compiling

_MOST_PROMPTS = 64  # times as many as the config's are looked at
_SLOWEST = 4  # kernels that are named
_LEFT_OUT = {
    "pick": "slices and gathers that the compiler wrote as sums of zeros",
    "move": "calls of kernels that move values and compute none",
}


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


PROGRAMS = {
    "sampler": workloads.sampling,
    "scoring": workloads.scoring,
    "update": workloads.updating,
}


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
      layers: see `compile_stage`.
      searching: whether to search for the largest batch.
      say: is called with a line about each program that was compiled.
    """
    scores = workload.learning.needs_forward or workload.has_reference
    names = [name for name in PROGRAMS if name != "scoring" or scores]
    stages = [compile_stage(workload, target, name, layers, say) for name in names]
    searched = dict(_searches(workload, target, stages, layers, say)) if searching else {}
    slots = searched["sampler.slots"].count if "sampler.slots" in searched else None
    lines = [
        line
        for stage in stages
        if not stage.fits
        for line in budget.advice(workload, stage.name, target.devices, slots=slots)
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
    drawn = next(filter(None, sampler.texts), "")
    if not drawn or not texts:
        return ()
    return comparison.compare(drawn, texts, weights=_weight_shapes(workload))


def _weight_shapes(workload: Workload) -> frozenset[tuple[int, ...]]:
    """Shapes of the model's weights as its products and norms take them, tile by tile."""
    execution = workload.execution
    weights = workloads.weight_shapes(execution)
    stacks = [weights[name] for name in execution.config.stacks]
    layers = [leaf.shape[1:] for leaf in jax.tree.leaves(stacks)]
    shapes = [*layers, weights["head"].shape, weights["final_norm"].shape]
    parts = [(1, *shape) if len(shape) == 1 else shape[-2:] for shape in shapes]
    return frozenset([*shapes, *parts])


def compile_stage(workload: Workload, target: Target, name: str, layers: Layers, say: Say) -> Stage:
    """Compiles a program of `PROGRAMS`.

    Args:
      layers: the sampler, whose decode loops contain every layer separately, is compiled with these
        two numbers of layers and extrapolated linearly; None compiles all. The learner loops over
        layers, and is always compiled whole.
    """
    config = workload.execution.config
    line = (config.num_layers,)
    if name == "sampler" and layers is not None:
        some = tuple(count + config.first_dense_layers for count in layers)
        line = some if max(some) < config.num_layers else line
    compiled = [_compiled(workload.with_layers(count), target, name, say) for count in line]
    total = compiled[0].figures
    if len(line) == 2:
        total = costs.along(total, compiled[1].figures, at=(*line, config.num_layers))
    return Stage(
        name=name,
        figures=total,
        resident=workloads.resident(workload, target.devices, name),
        capacity=target.capacity,
        seconds=sum(one.seconds for one in compiled),
        layers=line,
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
        def total(count: int) -> int:
            return compile_stage(varied(count), target, stage.name, layers, say).total

        return largest(total, allowed, capacity=target.capacity, known={now: stage.total})

    if batching.slots is None and stages[0].fits:
        now, step = training.prompts_per_step, training.least_prompts
        allowed = range(step, _MOST_PROMPTS * now + 1, step)
        found = search(stages[0], allowed, now, lambda n: workload.varied(prompts_per_step=n))
        yield "learner.prompts_per_step", found
    else:
        now = batching.slots or workload.sequences
        allowed = budget.divisors(workload.sequences, training.drawing.placement.shards)
        yield "sampler.slots", search(stages[0], allowed, now, lambda n: workload.varied(slots=n))
    key, unit = workload.micro_batch
    allowed = budget.divisors(training.rows, workload.execution.placement.shards)
    rows = search(stages[-1], allowed, workload.full_rows, workload.with_micro_batch)
    yield key, replace(rows, count=rows.count * unit)


def text(plan: Plan) -> str:
    """The plan as lines of text."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    execution, target = plan.workload.execution, plan.target
    numerics, sampler = execution.numerics, plan.workload.sampler.placement
    yield (
        f"{target.name}: {target.chips} chips, {len(target.devices)} devices of"
        f" {_gib(target.capacity)}; placement {execution.placement}"
        f"{'' if sampler is None else f' (sampler: {sampler})'};"
        f" kernels {numerics.family}, {numerics.compute_dtype}"
    )
    if target.platform == "tpu" and numerics.family in ("tiles", "native"):
        yield f"  {numerics.family} is plain XLA, slow on a TPU; a pod should run pallas_tpu"
    slots, training = plan.workload.sampler.batching.slots, plan.workload.training
    yield (
        f"  {training.prompts_per_step} prompts x {training.learning.samples} samples,"
        f" up to {plan.workload.prompt_length} + {execution.sampling.max_tokens} tokens,"
        f" {f'{slots} slots, ' if slots else ''}micro-batch {plan.workload.size},"
        f" remat {'on' if plan.workload.learning.remat else 'off'}"
    )
    for stage in plan.stages:
        yield from _stage(stage)
        yield from _times(stage, plan)
    for key, largest in plan.largest.items():
        if not largest.count:
            yield f"largest {key}: none fits; the smallest takes {_gib(largest.total)}"
            continue
        of, more = _gib(target.capacity), "" if largest.bounded else ", the most that was looked at"
        yield f"largest {key}: {largest.count} ({_gib(largest.total)} of {of}){more}"
    if plan.advice:
        yield "what to change:"
    yield from (f"  {line}" for line in plan.advice)
    yield from _audit(plan.audit)


def _stage(stage: Stage) -> Iterator[str]:
    figures, memory = stage.figures, stage.figures.memory
    layers = f", from {stage.layers[0]} and {stage.layers[1]} layers" if stage.layers[1:] else ""
    yield f"{stage.name}, per device{layers}, compiled in {stage.seconds:.0f} s"
    parts = (
        ("arguments", memory.arguments),
        ("outputs", memory.outputs),
        ("temporaries", memory.temporaries),
        ("aliased", -memory.aliased),
        ("code and reserved", memory.code),
        ("the program, refused", memory.together),
        ("elsewhere in the run", stage.resident),
    )
    written = ", ".join(f"{name} {_gib(size)}" for name, size in parts if size)
    verdict = "fits" if stage.fits else "DOES NOT FIT"
    yield f"  memory     {_gib(stage.total)} of {_gib(stage.capacity)}, {verdict}: {written}"
    yield f"  products   {figures.flops / 1e12:,.1f} TFLOP"
    yield f"  memory traffic  {figures.bytes_accessed / 1e9:,.1f} GB"
    if not figures.collectives and not any(stage.texts):
        yield "  collectives unknown: the program did not fit"
    for kind, one in sorted(figures.collectives.items()):
        yield f"  {kind:<18} {one.count:>10,} times, {one.bytes / 1e9:,.2f} GB received"


def _times(stage: Stage, plan: Plan) -> Iterator[str]:
    """The time that the program should take, of what, and its share for the least work."""
    made = _estimate(stage, plan)
    if made is None:
        return
    estimate, least = made
    yield (
        f"  estimate   {estimate.total:,.2f} s, {_trust(estimate, plan)}: kernels"
        f" {estimate.of_kernels:,.2f}, other work"
        f" {estimate.others:,.2f}, links {estimate.links:,.2f}, launches {estimate.launches:,.2f};"
        f" the least work takes {least:,.2f} s, {least / estimate.total:.0%} of it"
    )
    if plan.workload.tokens and stage.name != "sampler":
        yield f"    {_lengths(plan.workload)}"
    for name, one in list(estimate.kernels.items())[:_SLOWEST]:
        yield f"    {name:<24} {one.seconds:>10,.2f} s, {one.calls:,} calls, most in {one.bound}"


def _lengths(workload: Workload) -> str:
    """Of which sequences the learner's time is, where micro-batches are of tokens."""
    if workload.mean_tokens is None:
        return "if every sequence is the longest; it falls with the tokens that there are"
    return (
        f"if responses have {workload.mean_tokens:,} tokens on average:"
        f" {int(workload.lengths.sum()):,} tokens a device in"
        f" {len(workloads.parts(workload))} micro-batches"
    )


def _estimate(stage: Stage, plan: Plan) -> tuple[roofline.Estimate, float] | None:
    """The estimate, and seconds of the least work; None if the program was refused."""
    rates, dtype = plan.target.rates, plan.workload.execution.numerics.compute_dtype
    if rates is None or not any(stage.texts):
        return None
    least = roofline.least(plan.workload, stage.name).seconds(rates, dtype)
    measured, shares = _measured(plan), roofline.shares(plan.workload, stage.name)
    return roofline.estimate(stage.figures, rates, dtype, **shares, measured=measured), least


def _measured(plan: Plan) -> roofline.Calibration | None:
    numerics = plan.workload.execution.numerics
    if (numerics.family, numerics.compute_dtype) != ("pallas_gpu", "bfloat16"):
        return None
    return roofline.calibration(plan.target)


def _trust(estimate: roofline.Estimate, plan: Plan) -> str:
    """Whether such a device was measured, and how well its kernels are predicted."""
    measured = _measured(plan)
    if measured is None:
        return "not calibrated"
    but = f", but for {estimate.unshown:.0%} of it" if estimate.unshown > 0.005 else ""
    return f"calibrated on an {measured.device} within {measured.error:.0%}{but}"


def _audit(matches: tuple[Match, ...]) -> Iterator[str]:
    if not matches:
        yield "static audit: not done, as a program did not compile"
        return
    compared = [match for match in matches if match.operation.kind in comparison.COMPARED]
    different = [match for match in compared if match.differences]
    layouts = sum(match.in_layout_alone for match in compared)
    counts = [
        (sum(match.operation.kind == kind for match in compared), kind) for kind in comparison.KINDS
    ]
    yield (
        f"static audit: {len(compared)} different operations in the sampler's program"
        f" ({', '.join(f'{n} {kind}s' for n, kind in counts if n)});"
        f" {len(compared) - len(different)} have a counterpart in the learner's forward,"
        f" {len(different)} differ{f', {layouts} of them in layouts alone' if layouts else ''}"
    )
    for match in different:
        operation = match.operation
        differences = "; ".join(match.differences)
        yield f"  {operation.kind} {operation.name} x {match.count}: {differences}"
        yield f"    at {operation.place or 'no place given'}"
    for kind, what in _LEFT_OUT.items():
        count = sum(match.count for match in matches if match.operation.kind == kind)
        if count:
            yield f"  not compared: {count} {what}"


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values; sizes in bytes."""
    workload, execution = plan.workload, plan.workload.execution
    return {
        "topology": plan.target.name,
        "chips": plan.target.chips,
        "devices": len(plan.target.devices),
        "capacity": plan.target.capacity,
        "placement": asdict(execution.placement),
        "sampler_placement": asdict(workload.training.drawing.placement),
        "family": execution.numerics.family,
        "dtype": execution.numerics.compute_dtype,
        "prompts_per_step": workload.training.prompts_per_step,
        "samples": workload.learning.samples,
        "sampler_slots": workload.sampler.batching.slots or workload.sequences,
        "micro_batch": workload.training.micro_batch,
        "micro_batch_tokens": workload.tokens,
        "fits": plan.fits,
        "stages": {stage.name: _stage_values(stage, plan) for stage in plan.stages},
        "largest": {key: asdict(one) for key, one in plan.largest.items()},
        "advice": list(plan.advice),
        "audit": [_match_values(match) for match in plan.audit],
    }


def _stage_values(stage: Stage, plan: Plan) -> dict[str, Any]:
    figures, estimated = stage.figures, None
    if (made := _estimate(stage, plan)) is not None:
        estimate, least = made
        how = {"total": estimate.total, "least": least, "calibrated": _trust(estimate, plan)}
        estimated = how | asdict(estimate)
    return {
        "layers_compiled": list(stage.layers),
        "seconds": round(stage.seconds, 1),
        "fits": stage.fits,
        "memory": asdict(figures.memory) | {"resident": stage.resident, "total": stage.total},
        "flops": figures.flops,
        "bytes_accessed": figures.bytes_accessed,
        "collectives": {kind: asdict(one) for kind, one in figures.collectives.items()},
        "estimate": estimated,
    }


def _match_values(match: Match) -> dict[str, Any]:
    return {
        "kind": match.operation.kind,
        "name": match.operation.name,
        "count": match.count,
        "operands": [str(one) for one in match.operation.operands],
        "place": match.operation.place,
        "learner_place": match.counterpart.place if match.counterpart else None,
        "differences": list(match.differences),
        "in_layout_alone": match.in_layout_alone,
        "row_sizes": list(match.sizes),
    }


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
