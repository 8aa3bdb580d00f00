"""A study as a frozen value, said before anything runs: what is compared, and by which rule.

    base = "../quickstart.toml"     # the run that the arms change, beside this file
    hypothesis = "..."
    seeds = [0, 1, 2, 3, 4, 5]

    [dial.exact]                    # an axis's options are changes to the run
    [dial.fp8]
    sampler.mismatch = [{ name = "kv_cache", dtype = "float8_e4m3fn" }]
    [correction.none]
    [correction.tis]
    learner.mode = "recompute"
    learner.corrections = [{ name = "token_tis" }]

    [outcome]
    metric = "eval/reward"
    [test]
    kind = "permutation"

The arms are all combinations of the options, or those that `arms` lists, with their controls. A
divergent arm is one whose sampler has a mismatch. Its control has the same differences on both
sides: what is sampled is as good or as bad, and there is no mismatch. Only against it can an effect
be one of mismatch.

A study of gradients has one policy, and sources and remedies in place of arms: of both kinds there
are files in configs/studies.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tim_jax import corrections, mismatch
from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.config.sections import Count, Section, refusal
from tim_jax.common.errors import InputError, check_choice, did_you_mean
from tim_jax.mismatch import Mismatch

AXES = ("dial", "correction", "schedule", "objective")
CONTROL = "control"
EXACT = "exact"
WHOLE = "all"  # the one horizon of a study that names none
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
_MOST_DIVISIONS = 3_000_000  # some seconds


def check_name(name: str) -> None:
    """Refuses a name that is no part of a folder's name, or that the tool gives itself."""
    if not _NAME.fullmatch(name) or name.strip(".") == "":
        rule = "a name has letters, digits, '_', '-' and '.', at most 60 of them"
        raise refusal(name, None, rule)
    if name == CONTROL:
        raise refusal(name, None, "this name is kept for the controls, which the tool makes")


def _check_options(given: Any) -> Any:
    for name, changes in given.items() if isinstance(given, dict) else ():
        check_name(name)
        if not isinstance(changes, dict):
            raise refusal(name, changes, "must be a table of changes to the run")
    return given


Pair = Annotated[tuple[str, str], Field(strict=False)]
Tables = Annotated[tuple[dict[str, Any], ...], Field(strict=False)]
Options = Annotated[dict[str, dict[str, Any]], BeforeValidator(_check_options)]


class Outcome(Section):
    """What one run says: one number, taken from a metric of its metrics.jsonl."""

    metric: str = "eval/reward"
    take: Literal["last", "mean", "highest", "lowest"] = "last"
    """last: the mean of the last `window` values. mean, highest, lowest: of all of them, but for
    the evaluation before training, which no arm changes."""
    window: Count = 1
    """Values that `last` averages."""
    at_least: float | None = None
    """From this value on a run counts as a success, which Fisher's test compares."""
    not_finite: float | None = None
    """The outcome of a run that ended because its loss or gradient was not finite, or whose metric
    is not. Left out: such a run has none, and its arm no verdict."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.window > 1 and self.take != "last":
            raise refusal("window", self.window, f'is for take = "last"; take is {self.take!r}')
        return self


class Test(Section):
    """How arms are compared, and which."""

    kind: Literal["permutation", "paired_permutation", "sign", "fisher"] = "permutation"
    """permutation: all divisions of the runs among the two arms. paired_permutation: all exchanges
    of the two runs of a seed. sign: how many seeds are higher. fisher: how many runs succeed. All
    are exact and two-sided."""
    level: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """What the largest p-value is that counts, after Holm's correction over all comparisons."""
    compare: Annotated[tuple[Pair, ...], Field(strict=False)] = ()
    """Pairs of arms to compare besides every divergent arm with its control."""


class ArmChoice(Section):
    """One arm: an option of each axis. An axis that is left out changes nothing."""

    name: str | None = None
    dial: str | None = None
    correction: str | None = None
    schedule: str | None = None
    objective: str | None = None

    @property
    def options(self) -> dict[str, str]:
        """Axis -> option, in the order of the axes, without those left out."""
        return self.model_dump(include=set(AXES), exclude_none=True)

    @property
    def title(self) -> str:
        """The arm's own name, or those of its options."""
        return self.name or "+".join(self.options.values())


class _Stated(Section):
    """What studies of every kind say."""

    name: str = ""
    base: str
    """A run's TOML file, relative to the study's."""
    hypothesis: Annotated[str, Field(min_length=1)]
    common: dict[str, Any] = Field(default_factory=dict)
    """Changes to the base, for all arms."""


class Study(_Stated):
    """A matrix of training runs over one base, with the rule by which it is judged."""

    kind: Literal["training"] = "training"
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**32)], ...], Field(strict=False)]
    dial: Options = Field(default_factory=dict)
    correction: Options = Field(default_factory=dict)
    schedule: Options = Field(default_factory=dict)
    objective: Options = Field(default_factory=dict)
    arms: Annotated[tuple[ArmChoice, ...], Field(strict=False)] = ()
    """Left out: all combinations."""
    controls: Literal["required", "where_possible", "uncorrected", "none"] = "required"
    """required: an arm whose control cannot be made is refused. where_possible: it is said to have
    none. uncorrected: as required, and the control of an arm with a correction is that of the arm
    without it: what a remedy has to restore, once for all remedies. none: no controls are made, for
    a study that measures the mismatch and not its effect."""
    outcome: Outcome = Outcome()
    test: Test = Test()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise refusal("seeds", list(self.seeds), "must be one or more different numbers")
        titles: set[str] = set()
        for index, arm in enumerate(self.arms):
            self._check_arm(f"arms[{index}]", arm)
            if arm.title in titles:
                raise refusal(f"arms[{index}]", None, f"two arms have the name {arm.title!r}")
            titles.add(arm.title)
        self._check_divisions()
        if self.test.kind == "fisher" and self.outcome.at_least is None:
            raise refusal("outcome.at_least", None, "Fisher's test needs it: what a success is")
        return self

    def _check_divisions(self) -> None:
        """An exact test counts them all, and would neither end nor fit into memory."""
        count = len(self.seeds)
        ways = {"permutation": math.comb(2 * count, count), "paired_permutation": 2**count}
        if ways.get(self.test.kind, 0) > _MOST_DIVISIONS:
            rule = f"an exact test of {count} seeds has {ways[self.test.kind]:.1e} divisions to"
            rule += f" count, more than {_MOST_DIVISIONS:.0e}; take fewer seeds, or kind = 'sign'"
            raise refusal("test.kind", self.test.kind, rule)

    def _check_arm(self, key: str, arm: ArmChoice) -> None:
        if arm.name is not None:
            check_name(arm.name)
        if not arm.title:
            raise refusal(key, None, "needs a name, or an option of an axis")
        for axis, option in arm.options.items():
            known = getattr(self, axis)
            if option not in known:
                hint = did_you_mean(option, known) if known else f"; there is no [{axis}.NAME]"
                raise refusal(f"{key}.{axis}", option, f"is no option of {axis}{hint}")


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
    _refuse_own(study, source)
    start = merged(base, study.common)
    choices = list(_choices(study))
    chosen = [_arm(study, choice, start, source) for choice in choices]
    known: dict[str, RunConfig] = {}
    for arm in chosen:
        config = toml.build(arm.run, source=f"arm {arm.name}")
        if twin := _find_same(config, known):
            raise InputError(
                f"{source}: the arms {twin!r} and {arm.name!r} are the same run; leave one out"
            )
        known[arm.name] = config
    controls: list[Arm] = []
    for index, (arm, choice) in enumerate(zip(chosen, choices, strict=True)):
        if arm.divergent:
            controlled = arm
            if study.controls == "uncorrected":
                plain = choice.model_copy(update={"name": None, "correction": None})
                plain = plain if plain.options else ArmChoice(name="uncorrected")
                controlled = _arm(study, plain, start, source)
            chosen[index] = _with_control(study, arm, controlled, known, controls, source)
    for pair in study.test.compare:
        for name in pair:
            if name not in known:
                listed = ", ".join(sorted(known))
                raise InputError(f"{source}: test.compare: {name!r} is no arm; known: {listed}")
        if pair[0] == pair[1]:
            raise InputError(f"{source}: test.compare: {pair[0]!r} is compared with itself")
    return (*chosen, *controls)


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Joins tables key by key. One with a `kind` stands alone: other kinds have other keys."""
    both = dict(base)
    for key, value in change.items():
        below = both.get(key)
        alone = not isinstance(value, Mapping) or "kind" in value
        both[key] = merged(below, value) if isinstance(below, Mapping) and not alone else value
    return both


def _refuse_own(study: Study, source: str) -> None:
    """Refuses changes of what a study gives each run itself."""
    options = {f"{axis}.{name}": of for axis in AXES for name, of in getattr(study, axis).items()}
    for table, change in {"common": study.common, **options}.items():
        if "seed" in change:
            rule = "a study gives its runs their seeds, by the key `seeds`"
            raise InputError(f"{source}: {table}.seed = {change['seed']!r}: {rule}")
        if "folder" in change.get("run", {}):
            rule = "a study gives its runs their folders; leave it out"
            raise InputError(f"{source}: {table}.run.folder = {change['run']['folder']!r}: {rule}")


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


def _find_same(config: RunConfig, known: Mapping[str, RunConfig]) -> str | None:
    """The name of the run with this configuration, if one is known."""
    return next((name for name, other in known.items() if other == config), None)


def _check_outcome(study: Study, config: RunConfig, arm: str) -> None:
    """Refuses an outcome of evaluations that a run will not have: it would be found out at its end.

    Other metrics are known to a step alone.
    """
    metric, section, window = study.outcome.metric, config.eval, study.outcome.window
    evaluated = metric.startswith("eval/")
    values = -(-config.steps // section.every) if evaluated and section.every else config.steps
    if window > values:
        raise InputError(
            f"{arm}: outcome.window = {window}: a run of {config.steps} steps has {values} values"
            f" of {metric!r} after its start"
        )
    if evaluated and not section.every:
        raise InputError(
            f"{arm}: outcome.metric is {metric!r}, and eval.every = 0 is no evaluation"
        )
    if evaluated:
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
    divergent = bool(mismatch and config.sampler.own_dial.active)
    return Arm(choice.title, relaxed if divergent else run, divergent)


def _with_control(
    study: Study,
    arm: Arm,
    controlled: Arm,
    known: dict[str, RunConfig],
    controls: list[Arm],
    source: str,
) -> Arm:
    """The arm with the name of `controlled`'s control, which is added to both if it is new."""
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
    config = toml.build(run, source=f"{source}: the control of {controlled.name}")
    name = _find_same(config, known)
    if name is None:
        name = f"{controlled.name}+{CONTROL}"
        if name in known:
            raise InputError(
                f"{source}: two controls, which differ, have the name {name!r}; give the options in"
                f" {controlled.name!r} names that no other axis has"
            )
        known[name] = config
        controls.append(Arm(name, run))
    return replace(arm, control=name)


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


class Source(Section):
    """How a sampler differs from the learner."""

    mismatch: Tables


class Remedy(Section):
    """A correction, applied in recompute mode."""

    corrections: Tables


class GradientStudy(_Stated):
    """The gradient of a policy at fixed weights, exact and under every source and remedy."""

    kind: Literal["gradient"]
    batches: Annotated[int, Field(ge=4)] = 32
    """Batches of a source: each is a step of the base, with the same prompts."""
    projected: Count | None = None
    """Numbers that a gradient is projected to, for models of whose gradients a few hundred have no
    room. Inner products are then right in the mean, to about sqrt(2 / projected). Left out: the
    whole gradient."""
    states: Count = 64
    """Visited states that the largest token score is taken of, where there are horizons."""
    source: dict[str, Source]
    remedy: dict[str, Remedy] = Field(default_factory=dict)
    horizon: Options = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in (*self.source, *self.remedy):
            check_name(name)
        if EXACT in self.source:
            raise refusal(f"source.{EXACT}", None, "this name is kept for the exact sampler")
        for name, source in self.source.items():
            _check_built(f"source.{name}.mismatch", mismatch.build, source.mismatch)
        for name, remedy in self.remedy.items():
            _check_built(f"remedy.{name}.corrections", corrections.build, remedy.corrections)
        return self

    def dial(self, source: str) -> Mismatch:
        """The sampler's differences of a source."""
        return mismatch.build(self.source[source].mismatch)


def _check_built(key: str, build: Any, tables: Any) -> None:
    try:
        build(tables)
    except InputError as error:
        raise refusal(key, None, str(error)) from error
