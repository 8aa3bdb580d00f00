"""From a recipe and a target to a plan: what each program takes, what fits, what to change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from tim_jax.plan import advice, figures, recipe, search, twins
from tim_jax.plan.figures import Compiled, Figures
from tim_jax.plan.recipe import Program, Recipe
from tim_jax.plan.search import Largest
from tim_jax.plan.topology import Target
from tim_jax.plan.twins import Twin

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
        for line in advice.advice(
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
    policy = what.policy
    weights = jax.eval_shape(policy.prepare, recipe.parameter_shapes(policy.config))
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
    own = what.policy.config.num_layers
    line = None if layers is None or own <= max(layers) else layers
    found = [_compiled(what.with_layers(n), target, name, say) for n in line or (own,)]
    total = found[0].figures
    if line:
        total = figures.along(total, found[1].figures, at=(*line, own))
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
    found = figures.compiled(program, target)
    say(
        f"compiled {name}: {what.policy.config.num_layers} layers, {what.sequences} sequences,"
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
    return search.largest(total, allowed, capacity=target.capacity, known=known)


def _most_drawn(what: Recipe, target: Target, stage: Stage, layers: Layers, say: Say) -> Largest:
    """Sequences at a time for which the sampler fits."""
    rows, shards = what.sequences, what.sampling_policy.placement.shards
    allowed = [n for n in range(shards, rows + 1, shards) if rows % n == 0]

    def total(size: int) -> int:
        return _stage(what.with_rows_drawn(size), target, "sampler", layers, say).total

    known = {what.rows_drawn or rows: stage.total}
    return search.largest(total, allowed, capacity=target.capacity, known=known)


def _largest_micro_batch(what: Recipe, target: Target, stage: Stage, say: Say) -> Largest:
    """Sequences per forward and backward for which the update fits."""
    rows, shards = what.sequences // what.mini_batches, what.policy.placement.shards
    allowed = [n for n in range(shards, rows + 1, shards) if rows % n == 0]

    def total(size: int) -> int:
        return _stage(what.with_micro_batch(size), target, "update", None, say).total

    known = {what.micro_batch: stage.total}
    return search.largest(total, allowed, capacity=target.capacity, known=known)
