"""A plan as lines of text, and as plain values for JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tim_jax.instruments.plan import calibration, comparison, roofline
from tim_jax.instruments.plan import workload as workloads
from tim_jax.instruments.plan.comparison import Match
from tim_jax.instruments.plan.planning import Plan, Stage
from tim_jax.instruments.plan.workload import Workload

_GIB = 2**30
_SLOWEST = 4  # kernels that are named
_LEFT_OUT = {
    "pick": "slices and gathers that the compiler wrote as sums of zeros",
    "move": "calls of kernels that move values and compute none",
}


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
    of_kernels = sum(one.seconds for one in estimate.kernels.values())
    yield (
        f"  estimate   {estimate.total:,.2f} s, {_trust(estimate, plan)}: kernels"
        f" {of_kernels:,.2f}, other work"
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


def _trust(estimate: roofline.Estimate, plan: Plan) -> str:
    """Whether such a device was measured, and how well its kernels are predicted."""
    measured = _measured(plan)
    if measured is None:
        return "not calibrated"
    but = f", but for {estimate.unshown:.0%} of it" if estimate.unshown > 0.005 else ""
    return f"calibrated on an {measured.device} within {measured.error:.0%}{but}"


def _measured(plan: Plan) -> calibration.Calibration | None:
    numerics = plan.workload.execution.numerics
    if (numerics.family, numerics.compute_dtype) != ("pallas_gpu", "bfloat16"):
        return None
    return calibration.calibration(plan.target)


def _estimate(stage: Stage, plan: Plan) -> tuple[roofline.Estimate, float] | None:
    """The estimate, and seconds of the least work; None if the program was refused."""
    rates, dtype = calibration.rates(plan.target), plan.workload.execution.numerics.compute_dtype
    if rates is None or not any(stage.texts):
        return None
    least = roofline.least(plan.workload, stage.name).seconds(rates, dtype)
    measured = _measured(plan)
    shares = roofline.shares(plan.workload, stage.name)
    return roofline.estimate(stage.figures, rates, dtype, **shares, measured=measured), least


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
        "stages": {
            stage.name: _stage_values(stage) | _time_values(stage, plan) for stage in plan.stages
        },
        "largest": {key: asdict(one) for key, one in plan.largest.items()},
        "advice": list(plan.advice),
        "audit": [_match_values(match) for match in plan.audit],
    }


def _stage_values(stage: Stage) -> dict[str, Any]:
    figures = stage.figures
    return {
        "layers_compiled": list(stage.layers),
        "seconds": round(stage.seconds, 1),
        "fits": stage.fits,
        "memory": asdict(figures.memory) | {"resident": stage.resident, "total": stage.total},
        "flops": figures.flops,
        "bytes_accessed": figures.bytes_accessed,
        "collectives": {kind: asdict(one) for kind, one in figures.collectives.items()},
    }


def _time_values(stage: Stage, plan: Plan) -> dict[str, Any]:
    made = _estimate(stage, plan)
    if made is None:
        return {"estimate": None}
    estimate, least = made
    how = {"total": estimate.total, "least": least, "calibrated": _trust(estimate, plan)}
    return {"estimate": how | asdict(estimate)}


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
    return f"{size / _GIB:,.2f} GiB"
