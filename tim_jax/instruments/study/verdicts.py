"""From runs to verdicts, by the rule that the study stated: outcomes, exact tests, Holm."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from typing import Any, cast

import numpy as np
from scipy import stats

from tim_jax.common.errors import did_you_mean
from tim_jax.instruments.study.definition import Outcome, Test
from tim_jax.instruments.study.running import RunLines, Stated, read_runs, values

_SEEDS = 60  # the most that is asked for: exact tests of more take too long
_ROUNDING = 64 * np.finfo(np.float64).eps  # of a sum, as a share of the sum of its terms' sizes


@dataclass(frozen=True)
class Verdict:
    """What a study says of two arms.

    Attributes:
        first, second: outcomes of the seeds that both arms have finished, in the order of seeds.
        missing: seeds that one of them lacks; with any of them there is no p-value.
        lost: which runs of these have ended without an outcome, and why; "" if none has.
        lead: above 0 if the arm is higher by the test's own statistic, not always a mean.
        p: two-sided, of this comparison alone; None without a test.
        corrected: after Holm's correction over all comparisons of the study, those without a
            p-value so far among them.
        least: the smallest corrected p that a comparison can have with this many seeds.
        note: why nothing is said about mismatch; "" otherwise.
    """

    arm: str
    against: str
    first: tuple[float, ...]
    second: tuple[float, ...]
    missing: tuple[int, ...] = ()
    lost: str = ""
    lead: float = 0.0
    p: float | None = None
    corrected: float | None = None
    least: float = 1.0
    note: str = ""

    @property
    def difference(self) -> float:
        """Mean outcome of the arm less that of the other; NaN without outcomes."""
        return float(np.mean(self.first) - np.mean(self.second)) if self.first else math.nan

    def line(self, test: Test) -> str:
        """The verdict in one sentence."""
        if self.note:
            return f"{self.arm}: no verdict on mismatch: {self.note}"
        pair = f"{self.arm} against {self.against}"
        if self.lost:
            return f"{pair}: no verdict: {self.lost}"
        if self.missing or self.corrected is None:
            seeds = ", ".join(map(str, self.missing)) or "all"
            return f"{pair}: no verdict yet: without an outcome of seeds {seeds}"
        numbers = (
            f"{np.mean(self.first):.4g} against {np.mean(self.second):.4g}, p = {self.p:.3g},"
            f" {self.corrected:.3g} after Holm"
        )
        if self.corrected <= test.level:
            result = "higher" if self.lead > 0 else "lower"
        elif self.least > test.level:
            result = f"cannot be decided: so few seeds give no p after Holm below {self.least:.3g}"
        else:
            result = "no difference shown"
        count = len(self.first)
        return f"{pair}: {result} ({numbers}, {count} seed{'s' * (count > 1)})"


def outcome(run: RunLines, rule: Outcome) -> float | None:
    """The outcome of a run by the study's rule, which is finite; None if it has none (yet)."""
    if run.note.startswith("ended"):
        return rule.not_finite
    series = values([line for line in run.lines if line.get("step")], rule.metric)
    if not run.finished or not len(series):
        return None
    series = series[-rule.window :] if rule.take == "last" else series
    take = {"last": np.mean, "mean": np.mean, "highest": np.max, "lowest": np.min}
    value = float(take[rule.take](series))
    return value if np.isfinite(value) else rule.not_finite


def _why_lost(run: RunLines, rule: Outcome) -> str:
    """Why a run that has ended has no outcome; "" if it has one, or has not ended."""
    ended = run.note.startswith("ended")
    if outcome(run, rule) is not None or not (ended or run.finished):
        return ""
    if not ended and not len(values(run.lines, rule.metric)):
        known = {name for line in run.lines for name in line}
        return f"no metric {rule.metric!r}{did_you_mean(rule.metric, known)}"
    what = "ended as" if ended else rule.metric
    return f"{what} not finite, for which outcome.not_finite would give an outcome"


def outcomes(
    stated: Stated, runs: Sequence[RunLines] | None = None
) -> dict[tuple[str, int], float]:
    """(arm, seed) -> outcome, of the runs that have one."""
    lines = read_runs(stated.folder) if runs is None else runs
    planned = zip(stated.runs, lines, strict=True)
    pairs = (((one.arm, one.seed), outcome(run, stated.study.outcome)) for one, run in planned)
    return {key: value for key, value in pairs if value is not None}


def verdicts(stated: Stated, runs: Sequence[RunLines] | None = None) -> list[Verdict]:
    """Every divergent arm against its control, and the comparisons that the study names."""
    runs = read_runs(stated.folder) if runs is None else runs
    known = outcomes(stated, runs)
    planned = zip(stated.runs, runs, strict=True)
    lost = {(one.arm, one.seed): _why_lost(run, stated.study.outcome) for one, run in planned}
    compared = [_compare(stated, known, *pair) for pair in _pairs(stated)]
    compared = [replace(v, lost=_say_lost(v, lost)) for v in compared]
    family = [v for v in compared if not v.note]
    # What is still open counts as if it found nothing: a difference that is shown stays so.
    corrected = iter(holm([1.0 if v.p is None else v.p for v in family]))

    def correct(verdict: Verdict) -> Verdict:
        p, least = next(corrected), min(1.0, len(family) * verdict.least)
        return replace(verdict, corrected=None if verdict.p is None else p, least=least)

    return [v if v.note else correct(v) for v in compared]


def _say_lost(verdict: Verdict, lost: Mapping[tuple[str, int], str]) -> str:
    """The runs of a comparison that have ended without an outcome, by arm and reason."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for arm, seed in product((verdict.arm, verdict.against), verdict.missing):
        if why := lost[arm, seed]:
            seeds.setdefault((arm, why), []).append(f"{seed}")
    numbered = {key: f"seed{'s' * (len(of) > 1)} {', '.join(of)}" for key, of in seeds.items()}
    return "; ".join(f"{arm}, {of}: {why}" for (arm, why), of in numbered.items())


def too_few_seeds(stated: Stated) -> str:
    """Why the study as it stands can show no difference, whatever its runs find; "" if it can."""
    test, seeds = stated.study.test, len(stated.seeds)
    count = sum(not uncontrolled for _, _, uncontrolled in _pairs(stated))
    needed = next((n for n in range(1, _SEEDS) if count * least_p(test.kind, n) <= test.level), 0)
    if not count or not needed or needed <= seeds:
        return ""
    least = min(1.0, count * least_p(test.kind, seeds))
    of = f"{seeds} seed{'s' * (seeds > 1)}"
    return (
        f"{count} comparisons of {of} give no p after Holm's correction below"
        f" {least:.3g}, and the level is {test.level:g}: no difference can be shown; with"
        f" {needed} seeds one could"
    )


def _pairs(stated: Stated) -> list[tuple[str, str, str]]:
    """What is compared: an arm, another, and why the arm has no control where it has none."""
    arms = [(arm.name, arm.control, arm.uncontrolled) for arm in stated.arms if arm.divergent]
    named = [(first, second, "") for first, second in stated.study.test.compare]
    pairs: dict[frozenset[str], tuple[str, str, str]] = {}
    for pair in (*arms, *named):  # one counts once, whichever of the two is named first
        pairs.setdefault(frozenset(pair[:2]), pair)
    return list(pairs.values())


def _compare(stated: Stated, known, arm: str, against: str, uncontrolled: str) -> Verdict:
    seeds, test = stated.seeds, stated.study.test
    if uncontrolled:
        return Verdict(arm, "", (), (), note=f"no matched control: {uncontrolled}")
    both = [s for s in seeds if (arm, s) in known and (against, s) in known]
    first, second = (tuple(known[name, s] for s in both) for name in (arm, against))
    missing = tuple(s for s in seeds if s not in both)
    verdict = Verdict(arm, against, first, second, missing)
    if missing or not both:
        return verdict
    at_least = stated.study.outcome.at_least
    return replace(
        verdict,
        p=p_value(first, second, test.kind, at_least=at_least),
        lead=lead(first, second, test.kind, at_least=at_least),
        least=least_p(test.kind, len(both)),
    )


def p_value(
    first: Sequence[float], second: Sequence[float], kind: str, *, at_least: float | None = None
) -> float:
    """The exact two-sided p-value of a test of `Test.kind` between outcomes f64[N] of two arms.

    The same place in both is the same seed. The permutation tests compare means; `sign` leaves
    equal pairs out; `fisher` counts outcomes of `at_least` or more.
    """
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if kind == "fisher":
        assert at_least is not None  # the study's file was refused without
        wins = [int(np.sum(x >= at_least)) for x in (one, other)]
        table = [[wins[0], len(one) - wins[0]], [wins[1], len(other) - wins[1]]]
        return float(cast(Any, stats.fisher_exact(table)).pvalue)
    if kind == "sign":
        higher, lower = int(np.sum(one > other)), int(np.sum(one < other))
        return float(stats.binomtest(higher, higher + lower).pvalue) if higher + lower else 1.0
    found = _exchanged(one, other) if kind == "paired_permutation" else _divided(one, other)
    # Equal sums of decimal outcomes differ by rounding, which grows with the outcomes themselves.
    rounding = _ROUNDING * float(np.sum(np.abs(one)) + np.sum(np.abs(other)))
    return float(np.mean(np.abs(found) >= abs(np.sum(one - other)) - rounding))


def lead(
    first: Sequence[float], second: Sequence[float], kind: str, *, at_least: float | None = None
) -> float:
    """The statistic whose sign is the direction of `p_value`: above 0 if `first` is higher.

    The permutation tests compare means, `sign` counts seeds, and `fisher` outcomes of `at_least` or
    more.
    """
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if kind == "fisher":
        assert at_least is not None  # as in `p_value`
        return float(np.sum(one >= at_least)) - float(np.sum(other >= at_least))
    if kind == "sign":
        return float(np.sum(np.sign(one - other)))
    return float(np.mean(one) - np.mean(other))


def _exchanged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """f64[2^N], sums of one arm less the other's, for all exchanges within pairs."""
    count = len(one)
    signs = 1 - 2 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
    return signs @ (one - other)


def _divided(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The same for all divisions of the outcomes into two arms of N: f64[2 N over N]."""
    values = np.concatenate([one, other])
    values = values - np.mean(values)
    divisions = combinations(range(len(values)), len(one))
    places = np.fromiter(chain.from_iterable(divisions), np.uint8).reshape(-1, len(one))
    sums = np.zeros(len(places))
    for column in places.T:
        sums += values[column]
    return 2.0 * sums - np.sum(values)


def least_p(kind: str, seeds: int) -> float:
    """The smallest p-value that a test can give with `seeds` in each arm."""
    if kind in ("sign", "paired_permutation"):
        return min(1.0, 2.0 / 2**seeds)
    return min(1.0, 2.0 / math.comb(2 * seeds, seeds))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for several comparisons (Holm 1979): the family's error rate holds."""
    order = np.argsort(p_values, kind="stable")
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected
