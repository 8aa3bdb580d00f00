"""A study as a frozen value: what is compared, and by which rule, said before anything runs.

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

The arms are all combinations of the options, or those that `arms` lists.
"""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tim_jax.app.config.sections import Count, Section, refusal
from tim_jax.common.errors import did_you_mean

AXES = ("dial", "correction", "schedule", "objective")
CONTROL = "control"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
_MOST_DIVISIONS = 3_000_000  # some seconds
_RULE = "a name has letters, digits, '_', '-' and '.', at most 60 of them"


def _options(given: Any) -> Any:
    for name, changes in given.items() if isinstance(given, dict) else ():
        check_name(name)
        if not isinstance(changes, dict):
            raise refusal(name, changes, "must be a table of changes to the run")
    return given


def check_name(name: str) -> None:
    """Refuses a name that is no part of a folder's name, or that the tool gives itself."""
    if not _NAME.fullmatch(name) or name.strip(".") == "":
        raise refusal(name, None, _RULE)
    if name == CONTROL:
        raise refusal(name, None, "this name is kept for the controls, which the tool makes")


Pair = Annotated[tuple[str, str], Field(strict=False)]
Options = Annotated[dict[str, dict[str, Any]], BeforeValidator(_options)]


class Outcome(Section):
    """What one run says: one number, taken from a metric of its metrics.jsonl."""

    metric: str = "eval/reward"
    take: Literal["last", "mean", "highest", "lowest"] = "last"
    """last: the mean of the last `window` values. mean, highest, lowest: of all of them."""
    window: Count = 1
    """Values that `last` averages."""
    at_least: float | None = None
    """From this value on a run counts as a success, which Fisher's test compares."""
    not_finite: float | None = None
    """The outcome of a run that ended because its loss or gradient was not finite, or whose metric
    is not. Left out: such a run has none, and its arm no verdict."""


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
        named = {axis: getattr(self, axis) for axis in AXES}
        return {axis: option for axis, option in named.items() if option is not None}

    @property
    def title(self) -> str:
        """The arm's own name, or those of its options."""
        return self.name or "+".join(self.options.values())


class Study(Section):
    """A matrix of training runs over one base, with the rule by which it is judged."""

    kind: Literal["training"] = "training"
    name: str = ""
    base: str
    """A run's TOML file, relative to the study's."""
    hypothesis: Annotated[str, Field(min_length=1)]
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**32)], ...], Field(strict=False)]
    common: dict[str, Any] = Field(default_factory=dict)
    """Changes to the base for all arms."""
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
        for index, arm in enumerate(self.arms):
            self._check_arm(f"arms[{index}]", arm)
        titles = [arm.title for arm in self.arms]
        for index, title in enumerate(titles):
            if title in titles[:index]:
                raise refusal(f"arms[{index}]", None, f"two arms have the name {title!r}")
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
