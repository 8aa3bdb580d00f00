"""What to change where a step does not fit.

The largest batch that fits: memory is close to linear in rows, so few programs are compiled.

From a recipe and a target to a plan: what each program takes, what fits, what to change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from tim_jax.errors import InputError
from tim_jax.model import parameters
from tim_jax.placement import Devices, Placement
from tim_jax.plan import costs, recipe, twins
from tim_jax.plan import recipe as shapes
from tim_jax.plan.costs import Compiled, Figures
from tim_jax.plan.recipe import Program, Recipe
from tim_jax.plan.topology import Target
from tim_jax.plan.twins import Twin

_GIB = 2**30


def advice(
    recipe: Recipe, stage: str, devices: Devices, *, rows_drawn: int | None
) -> Iterator[str]:
    """One line per change, those that cost least first.

    Args:
      stage: the program that does not fit.
      rows_drawn: the most sequences at a time for which the sampler fits, if that is known; 0 if
        it never does.
    """
    yield from _spread(recipe, devices)
    if stage == "sampler":
        yield from _of_sampler(recipe, rows_drawn)
    else:
        yield from _of_learner(recipe)
    if recipe.execution.numerics.compute_dtype == "float32":
        yield 'numerics.dtype = "bfloat16": half the weights, keys and values, and activations'
    yield "a slice of more chips: a batch's rows, masters and optimiser are split over all of them"


def _spread(recipe: Recipe, devices: Devices) -> Iterator[str]:
    """More of the slice's devices, and state on all of them."""
    where = recipe.execution.placement
    spare = len(devices) // where.devices
    wider = replace(where, fsdp=where.fsdp * spare)
    if spare > 1 and _possible(recipe, wider):
        yield f"placement.fsdp = {wider.fsdp}: the slice has devices that nothing lies on"
    merged = replace(where, data=1, fsdp=where.data * where.fsdp)
    if where.data > 1 and _possible(recipe, merged):
        now, then = (_state(recipe.with_placement(one), devices) for one in (where, merged))
        yield (
            f"placement.data = 1 with placement.fsdp = {merged.fsdp}: masters and optimiser take"
            f" {then / _GIB:.1f} instead of {now / _GIB:.1f} GiB a device"
        )


def _possible(recipe: Recipe, where: Placement) -> bool:
    try:
        parameters.check(recipe.execution.config, recipe.execution.numerics, where)
    except InputError:
        return False
    return recipe.sequences % where.shards == 0


def _state(recipe: Recipe, devices: Devices) -> int:
    return shapes.resident(recipe, devices, "scoring")


def _of_sampler(recipe: Recipe, rows_drawn: int | None) -> Iterator[str]:
    where = recipe.drawn_by.placement
    key = "placement" if recipe.drawing is None else "placement.sampler"
    if rows_drawn:
        rounds = recipe.sequences // rows_drawn
        yield f"sampler.micro_batch = {rows_drawn}: a step is sampled in {rounds} rounds, same bits"
    yield "sampling.max_response_length: room for keys and values is made for the longest response"
    if where.decode == "whole" and where.fsdp > 1:
        whole = shapes.weight_bytes(recipe) / where.tensor
        saved = whole * (1 - 1 / where.fsdp) / _GIB
        yield (
            f'{key}.decode = "sharded": {saved:.1f} GiB less a device, but all weights are gathered'
            " for every token"
        )
    if recipe.execution.numerics.family in ("tiles", "native"):
        yield f"{key}.tensor = {2 * where.tensor}: half the weights and key heads a device"


def _of_learner(recipe: Recipe) -> Iterator[str]:
    learning, shards = recipe.learning, recipe.execution.placement.shards
    if not learning.remat:
        yield "learner.remat = true: activations of one layer at a time, for a second forward"
    if recipe.micro_batch > shards:
        yield f"learner.micro_batch = {shards}: one sequence a device at a time"


Total = Callable[[int], int]  # a count -> bytes on a chip, by compiling


@dataclass(frozen=True)
class Largest:
    """The largest of the counts that may be chosen."""

    count: int  # 0: not even the smallest fits
    total: int  # bytes on a chip at that count, or at the smallest
    bounded: bool  # False: all counts that were allowed fit


def largest(
    total: Total, allowed: Sequence[int], *, capacity: int, known: dict[int, int]
) -> Largest:
    """The largest of `allowed`, ascending, that is found to be within `capacity`.

    The line through the two totals nearest to the capacity says which; a compilation confirms it or
    makes the line better.

    Args:
      total: compiles.
      known: totals already found, by count; those that are asked for are added.
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


def _guess(known: dict[int, int], allowed: Sequence[int], capacity: int) -> int:
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
        return self.figures.memory.total + self.resident

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


@dataclass(frozen=True)
class Plan:
    """All that is known of a step on a slice."""

    recipe: Recipe
    target: Target
    stages: tuple[Stage, ...]
    largest: Mapping[str, Largest]  # by key of the config
    advice: tuple[str, ...]
    audit: tuple[Twin, ...]

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)


def make(
    what: Recipe,
    target: Target,
    *,
    layers: Layers,
    searching: bool = True,
    say: Say = lambda text: None,
) -> Plan:
    """Compiles a step's programs, searches for the largest batch, and audits.

    Args:
      layers: the sampler, whose decode loops hold every layer by itself, is compiled with these
        numbers of layers and continued along the line; the learner loops over layers, and is
        compiled whole.
      say: gets a line about each program that was compiled.
    """
    stages = [_stage(what, target, "sampler", layers, say)]
    if what.scores:
        stages.append(_stage(what, target, "scoring", None, say))
    stages.append(_stage(what, target, "update", None, say))
    found: dict[str, Largest] = {}
    if searching:
        drawn = what.rows_drawn is None and stages[0].fits
        key = "learner.prompts_per_step" if drawn else "sampler.micro_batch"
        look = _most_prompts if drawn else _most_drawn
        found[key] = look(what, target, stages[0], layers, say)
        found["learner.micro_batch"] = _largest_micro_batch(what, target, stages[-1], say)
    drawn_at_a_time = found.get("sampler.micro_batch")
    lines = [
        line
        for stage in stages
        if not stage.fits
        for line in advice(
            what,
            stage.name,
            target.devices,
            rows_drawn=drawn_at_a_time.count if drawn_at_a_time else None,
        )
    ]
    return Plan(
        recipe=what,
        target=target,
        stages=tuple(stages),
        largest=found,
        advice=tuple(dict.fromkeys(lines)),
        audit=audit(what, stages),
    )


def audit(what: Recipe, stages: Sequence[Stage]) -> tuple[Twin, ...]:
    """The sampler's smallest program against all of the learner's; none if one did not compile."""
    sampler, *learner = stages
    texts = [text for stage in learner for text in stage.texts if text]
    drawn = next((text for text in sampler.texts if text), "")
    if not drawn or not texts:
        return ()
    return twins.audit(drawn, texts, weights=_weight_shapes(what))


def _weight_shapes(what: Recipe) -> frozenset[tuple[int, ...]]:
    """Of the model's weights as its products and norms take them, tile by tile."""
    execution = what.execution
    weights = jax.eval_shape(execution.prepare, recipe.parameter_shapes(execution.config))
    layers = [leaf.shape[1:] for leaf in jax.tree.leaves(weights["layers"])]
    shapes = [*layers, weights["head"].shape, weights["final_norm"].shape]
    parts = [(1, *shape) if len(shape) == 1 else shape[-2:] for shape in shapes]
    return frozenset([*shapes, *parts])


PROGRAMS = {
    "sampler": recipe.sampling,
    "scoring": recipe.scoring,
    "update": recipe.updating,
}


def _stage(what: Recipe, target: Target, name: str, layers: Layers, say: Say) -> Stage:
    """Compiled whole, or for two numbers of layers and continued to the model's own."""
    own = what.execution.config.num_layers
    line = None if layers is None or own <= max(layers) else layers
    found = [_compiled(what.with_layers(n), target, name, say) for n in line or (own,)]
    total = found[0].figures
    if line:
        total = costs.along(total, found[1].figures, at=(*line, own))
    return Stage(
        name=name,
        figures=total,
        resident=recipe.resident(what, target.devices, name),
        capacity=target.capacity,
        seconds=sum(one.seconds for one in found),
        layers=line or (own,),
        texts=tuple(one.text for one in found),
    )


def _compiled(what: Recipe, target: Target, name: str, say: Say) -> Compiled:
    with target.tracing():
        program: Program = PROGRAMS[name](what, target.devices)
    found = costs.compiled(program, target)
    say(
        f"compiled {name}: {what.execution.config.num_layers} layers, {what.sequences} sequences,"
        f" micro-batch {what.micro_batch}, {found.seconds:.0f} s"
    )
    return found


def _most_prompts(what: Recipe, target: Target, stage: Stage, layers: Layers, say: Say) -> Largest:
    """Prompts per step for which the sampler fits."""
    step = what.least_prompts
    allowed = range(step, _MOST_PROMPTS * what.prompts + 1, step)

    def total(prompts: int) -> int:
        return _stage(replace(what, prompts=prompts), target, "sampler", layers, say).total

    known = {what.prompts: stage.total}
    return largest(total, allowed, capacity=target.capacity, known=known)


def _most_drawn(what: Recipe, target: Target, stage: Stage, layers: Layers, say: Say) -> Largest:
    """Sequences at a time for which the sampler fits."""
    rows, shards = what.sequences, what.drawn_by.placement.shards
    allowed = [n for n in range(shards, rows + 1, shards) if rows % n == 0]

    def total(size: int) -> int:
        return _stage(what.with_rows_drawn(size), target, "sampler", layers, say).total

    known = {what.rows_drawn or rows: stage.total}
    return largest(total, allowed, capacity=target.capacity, known=known)


def _largest_micro_batch(what: Recipe, target: Target, stage: Stage, say: Say) -> Largest:
    """Sequences per forward and backward for which the update fits."""
    rows, shards = what.sequences // what.mini_batches, what.execution.placement.shards
    allowed = [n for n in range(shards, rows + 1, shards) if rows % n == 0]

    def total(size: int) -> int:
        return _stage(what.with_micro_batch(size), target, "update", None, say).total

    known = {what.micro_batch: stage.total}
    return largest(total, allowed, capacity=target.capacity, known=known)
