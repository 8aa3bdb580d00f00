"""The arms of a study: every combination of its options as a run's configuration, with controls.

A divergent arm is one whose sampler has a mismatch. Its control has the same differences on both
sides: what is sampled is as good or as bad, and there is no mismatch. Only against it can an effect
be one of mismatch.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.common.errors import InputError, check_choice
from tim_jax.instruments.study.definition import AXES, CONTROL, ArmChoice, Study
from tim_jax.mismatch import Mismatch


@dataclass(frozen=True)
class Arm:
    """One arm of a study.

    Attributes:
        run: the changed configuration as a nested dict, without seed and run folder.
        control: of a divergent arm, the name of the arm without mismatch that it is compared with.
        uncontrolled: why a divergent arm has none; "" if it has one or needs none.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]{1,255}$")]
    run: dict[str, Any]
    divergent: bool = False
    control: str = ""
    uncontrolled: str = ""

    def config(self, seed: int, folder: Path) -> RunConfig:
        """The configuration of the arm's run of one seed."""
        own = {"seed": seed, "run": {"folder": str(folder)}}
        return toml.build(merged(self.run, own), source=f"arm {self.name}")


def arms(study: Study, base: Mapping[str, Any], *, source: str) -> tuple[Arm, ...]:
    """The arms of a study in their order, and after them the controls.

    Args:
        base: the base's nested dict.
        source: the study's file, in messages.

    Raises:
        InputError: a change is none that a run knows, two arms are the same run, a control cannot
            be made and the study does not say `controls = "where_possible"`, or a comparison
            names no arm.
    """
    start = merged(base, study.common)
    choices = list(_choices(study))
    chosen = [_arm(study, choice, start, source) for choice in choices]
    _refuse_twins(chosen, source)
    known = list(chosen)
    for index, (arm, choice) in enumerate(zip(chosen, choices, strict=True)):
        if arm.divergent:
            controlled = arm
            if study.controls == "uncorrected":
                controlled = _arm(study, _uncorrected(choice), start, source)
            chosen[index] = _with_control(study, arm, controlled, known, source)
    found = (*chosen, *known[len(chosen) :])
    _check_comparisons(study, found, source)
    return found


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Tables joined key by key. One with a `kind` stands alone: other kinds have other keys."""
    both = dict(base)
    for key, value in change.items():
        below = both.get(key)
        alone = not isinstance(value, Mapping) or "kind" in value
        both[key] = merged(below, value) if isinstance(below, Mapping) and not alone else value
    return both


def _choices(study: Study) -> Iterator[ArmChoice]:
    if study.arms:
        yield from study.arms
        return
    options = {axis: list(getattr(study, axis)) for axis in AXES if getattr(study, axis)}
    if not options:
        yield ArmChoice(name="base")
        return
    for names in itertools.product(*options.values()):
        yield ArmChoice(**dict(zip(options, names, strict=True)))


def _uncorrected(choice: ArmChoice) -> ArmChoice:
    plain = choice.model_copy(update={"name": None, "correction": None})
    return plain if plain.options else ArmChoice(name="uncorrected")


def _check_outcome(study: Study, config: RunConfig, arm: str) -> None:
    """Refuses an outcome of evaluations that a run will not have: it would be found out at its end.

    Other metrics are known to a step alone.
    """
    metric, section = study.outcome.metric, config.eval
    if not metric.startswith("eval/"):
        return
    if not section.every:
        raise InputError(
            f"{arm}: outcome.metric is {metric!r}, and eval.every = 0 is no evaluation"
        )
    names = ["reward", "length", "prompts", "grader/timeout", "grader/error"]
    names += [f"mean@{section.samples}", *(f"pass@{k}" for k in section.k)]
    check_choice(f"{arm}: outcome.metric", metric, [f"eval/{name}" for name in names])


def _arm(study: Study, choice: ArmChoice, start: Mapping[str, Any], source: str) -> Arm:
    run = dict(start)
    for axis, option in choice.options.items():
        run = merged(run, getattr(study, axis)[option])
    # A divergent run cannot be exact, which it has to say; to say it for every arm is no use.
    sampler = run.get("sampler")
    mismatch = isinstance(sampler, Mapping) and sampler.get("mismatch")
    relaxed = merged(run, {"exact": "report"}) if mismatch else run
    config = toml.build(relaxed, source=f"{source}: arm {choice.title}")
    _check_outcome(study, config, f"{source}: arm {choice.title}")
    divergent = bool(_dial(config).active) and not config.sampler.both_sides
    return Arm(choice.title, relaxed if divergent else run, divergent)


def _dial(config: RunConfig) -> Mismatch:
    return config.sampler.dial if config.sampler.mismatch else Mismatch()


def _refuse_twins(found: Sequence[Arm], source: str) -> None:
    for index, arm in enumerate(found):
        for other in found[:index]:
            if other.run == arm.run:
                raise InputError(
                    f"{source}: the arms {other.name!r} and {arm.name!r} are the same run;"
                    " leave one out"
                )


def _with_control(study: Study, arm: Arm, controlled: Arm, known: list[Arm], source: str) -> Arm:
    """The arm with the name of `controlled`'s control, which is added to `known` if it is new."""
    if study.controls == "none":
        return replace(arm, uncontrolled="the study makes none")
    try:
        run = control_of(controlled.run)
    except InputError as error:
        if study.controls == "where_possible":
            return replace(arm, uncontrolled=str(error))
        raise InputError(
            f"{source}: arm {arm.name!r} has no matched control: {error}; leave the arm out, or set"
            ' controls = "where_possible"'
        ) from error
    for other in known:
        if _same_run(other.run, run):
            return replace(arm, control=other.name)
    control = Arm(f"{controlled.name}+{CONTROL}", run)
    toml.build(run, source=f"{source}: the control of {controlled.name}")
    known.append(control)
    return replace(arm, control=control.name)


def control_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """A divergent run's control: the same differences on both sides, and every token exact.

    What changes no token, but only what is reported of it, is left out.

    Raises:
        InputError: a difference that a learner cannot have.
    """
    config = toml.build(run, source="arm")
    kept = {entry.name for entry in config.sampler.dial.shared.entries}
    tables = [table for table in config.sampler.mismatch if table["name"] in kept]
    sampler = {**run["sampler"], "mismatch": tables, "both_sides": bool(tables)}
    return {**run, "sampler": sampler, "exact": "required"}


def _same_run(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    one, other = (toml.build(run, source="arm") for run in (first, second))
    return one == other


def _check_comparisons(study: Study, found: Sequence[Arm], source: str) -> None:
    names = {arm.name for arm in found}
    for pair in study.test.compare:
        for name in pair:
            if name not in names:
                listed = ", ".join(sorted(names))
                raise InputError(f"{source}: test.compare: {name!r} is no arm; known: {listed}")
