"""How much mismatch each difference of a sampler causes, alone and together, by where it occurs.

For every case a sampler draws from the same prompts with the same random numbers, and the learner
scores what it drew, inside a value-and-gradient program. The baseline is a sampler with the
learner's own execution: every difference of it is exactly 0. The results are also made JSON and
Markdown tables here.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tim_jax import metrics, mismatch
from tim_jax.common import pages
from tim_jax.common.types import Prompts, Rollout, make_key
from tim_jax.instruments.auditing.cases import Score, learner_log_probs
from tim_jax.mismatch import Mismatch, dial
from tim_jax.model.execution import Execution
from tim_jax.model.weights import Weights
from tim_jax.rl import programs

BASELINE = "the learner's own"
TOGETHER = "all together"
_LENGTH_BINS = 6
_POSITION_BINS = 8
# Columns of the first table: the metric, its heading.
MAIN = {
    "tokens": "tokens",
    "unequal_tokens": "unequal",
    "log_ratio_abs_mean": "mean \\|d\\|",
    "log_ratio_abs_max": "max \\|d\\|",
    "kl_k3": "k3",
    "chi2_token": "chi2",
    "ratio_min": "min r",
    "ratio_max": "max r",
    "outside_1pct": "r outside 1%",
    "log_ppl_abs_diff_sum": "mean \\|sum d\\|",
    "prob_diff_max": "max \\|dp\\|",
}
PROFILES = {
    "by_position": "position in the response",
    "by_probability": "probability under the learner",
    "by_length": "length of the response",
    "by_difference": "\\|d\\| itself",
}


class Bin(NamedTuple):
    """Tokens of one bin: low <= key < high, how many, and their mean |d| in nats."""

    low: float
    high: float
    tokens: int
    mean: float


@dataclass(frozen=True)
class ArmResult:
    """The result of one arm. d is the learner's log-prob minus the recorded one."""

    case: str
    group: str  # of the entry; "" for the baseline and for several entries
    entries: tuple[str, ...]
    differences: dict[str, str]  # of the sampler's numerics
    metrics: dict[str, float]  # every one of `metrics.mismatch_metrics`; `tokens` counts
    reporting: dict[str, float] | None  # of what was drawn with against what was recorded
    profiles: dict[str, tuple[Bin, ...]]  # by_position, by_probability, by_difference, by_length


class Arm(NamedTuple):
    """One sampler of the comparison: a dial with a name."""

    name: str
    mismatch: Mismatch


def alone_and_together(whole: Mismatch) -> list[Arm]:
    """The baseline, each entry of the dial alone, and the whole dial."""
    alone = [Arm(mismatch.label(entry), Mismatch((entry,))) for entry in whole.entries]
    together = [Arm(TOGETHER, whole)] if len(alone) > 1 else []
    return [Arm(BASELINE, Mismatch()), *alone, *together]


def check(arms: Sequence[Arm], execution: Execution, *, older: bool, remade: bool = False) -> None:
    """Raises InputError for an arm that cannot be run, before anything is compiled."""
    for arm in arms:
        mismatch.check(arm.mismatch, execution)
        if (changing := arm.mismatch.in_flight) is not None:
            raise changing.refuse("is for runs; here the weights of a response are one version")
        if arm.mismatch.stale_updates and not older:
            mismatch.refuse_stale(
                arm.mismatch, "there are no older weights here; audit a run folder that has them"
            )
        if not remade:
            mismatch.refuse_merge(arm.mismatch, execution, "there are only merged weights here")


def ablate(
    weights: Weights,
    prompts: Prompts,
    arms: Sequence[Arm],
    *,
    execution: Execution,
    samples: int,
    seed: int = 0,
    older: Callable[[int], Weights] | None = None,
    remade: Callable[[Execution], Weights] | None = None,
) -> Iterator[ArmResult]:
    """Runs the arms and yields the result of each.

    Args:
      weights: the learner's compute weights.
      execution: of the learner.
      samples: responses per prompt.
      older: number of updates -> the compute weights of that many updates ago.
      remade: an execution that merges adapters by another rule -> the same weights by that rule.

    Raises:
      InputError: as `check`.
    """
    check(arms, execution, older=older is not None, remade=remade is not None)
    key = make_key(seed)
    learn = learner_log_probs(execution, Score())
    compare = jax.jit(_compare)
    samplers: dict[Mismatch, Callable[..., Rollout]] = {}  # each is compiled once
    for arm in arms:
        stale = arm.mismatch.stale_updates
        source = older(stale) if stale and older is not None else weights
        merging = mismatch.merging(arm.mismatch, execution)
        source = remade(merging) if remade is not None and merging != execution else source
        drawing = arm.mismatch.drawing
        if drawing not in samplers:
            samplers[drawing] = programs.sampling_program(
                execution, samples=samples, mismatch=drawing
            )
        # The program edits weights and reports by its own entries.
        rest = Mismatch(tuple(e for e in arm.mismatch.active if e not in drawing.entries))
        rollout = samplers[drawing](jax.jit(rest.weights)(source), prompts, key)
        report = partial(dial.report, mismatch=rest, samples=samples)
        rollout = jax.jit(report)(rollout, prompts, key)
        log_probs, _ = learn(weights, replace(rollout, drawn_log_probs=None, hidden=None))
        yield _result(arm, rollout, compare(log_probs, rollout), execution)


def _compare(log_probs, rollout: Rollout) -> dict[str, Any]:
    recorded, mask = rollout.log_probs, rollout.mask
    comparison = {
        "metrics": metrics.mismatch_metrics(log_probs, recorded, mask),
        "profiles": metrics.mismatch_profiles(log_probs, recorded, mask, bins=_POSITION_BINS),
        "difference": jnp.where(mask, jnp.abs(log_probs - recorded), 0.0),
    }
    if rollout.drawn_log_probs is not None:
        comparison["reporting"] = metrics.mismatch_metrics(rollout.drawn_log_probs, recorded, mask)
    return comparison


def _result(arm: Arm, rollout: Rollout, compared: Any, execution: Execution) -> ArmResult:
    compared, entries = jax.device_get(compared), arm.mismatch.entries
    alone = len(entries) == 1
    groups = [g for g, kinds in mismatch.GROUPS.items() if alone and isinstance(entries[0], kinds)]
    changed = mismatch.difference(execution.numerics, arm.mismatch.numerics(execution.numerics))
    profiles = {name: _bins(*profile) for name, profile in compared["profiles"].items()}
    profiles["by_length"] = _by_length(compared["difference"], rollout)
    reporting = compared.get("reporting")
    return ArmResult(
        case=arm.name,
        group=groups[0] if groups else "",
        entries=tuple(mismatch.label(entry) for entry in entries),
        differences={name: f"{a} -> {b}" for name, (a, b) in changed.items()},
        metrics={name: float(value) for name, value in compared["metrics"].items()},
        reporting=None if reporting is None else {k: float(v) for k, v in reporting.items()},
        profiles=profiles,
    )


def _bins(*profile: ArrayLike) -> tuple[Bin, ...]:
    """Of a `metrics.Profile`."""
    edges, counts, means = (np.asarray(x, np.float64).tolist() for x in profile)
    return tuple(
        Bin(low, high, int(count), mean)
        for low, high, count, mean in zip(edges, edges[1:], counts, means, strict=False)
    )


def _by_length(difference: np.ndarray, rollout: Rollout) -> tuple[Bin, ...]:
    """Tokens by the length of their response, in bins of equal width."""
    mask, longest = np.asarray(rollout.mask), rollout.responses.shape[1]
    lengths = np.broadcast_to(np.asarray(rollout.lengths)[:, None], mask.shape)[mask]
    edges = np.linspace(1, longest + 1, min(_LENGTH_BINS, longest) + 1)
    counts, _ = np.histogram(lengths, edges)
    sums, _ = np.histogram(lengths, edges, weights=np.asarray(difference)[mask])
    return _bins(edges, counts, sums / np.maximum(counts, 1))


def to_record(
    results: Sequence[ArmResult], *, model: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The ablation as plain values, with what it was made from."""
    device = jax.devices()[0]
    return {
        "model": model,
        **about,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": f"{device.platform} {device.device_kind}",
        "cases": [pages.finite(asdict(case)) for case in results],
    }


def to_json(record: Mapping[str, Any]) -> str:
    """The record as JSON; what is not finite is null."""
    return pages.as_json(record, indent=1)


def to_markdown(record: Mapping[str, Any], *, whole: bool = True) -> str:
    """Tables of a record: the main metrics by case, and with `whole` profiles and all metrics."""
    cases = record["cases"]
    rows = [[_name(case), *(_short(case["metrics"][name]) for name in MAIN)] for case in cases]
    lines = pages.markdown(["sampler", *MAIN.values()], rows, numbers=True)
    for profile, title in PROFILES.items() if whole else ():
        lines += ["", f"Mean |d| by {title}; under each bin, the baseline's tokens:", ""]
        lines += _profile(cases, profile)
    if whole:
        lines += ["", "Every metric (`tim_jax.metrics.mismatch_metrics`):", ""]
        names = list(cases[0]["metrics"])
        rows = [[f"`{n}`", *(_short(case["metrics"][n]) for case in cases)] for n in names]
        lines += pages.markdown(["metric", *map(_name, cases)], rows, numbers=True)
    return "\n".join(lines) + "\n"


def _profile(cases: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    bins = cases[0]["profiles"][name]
    heads = [f"{_edge(b[0])} to {_edge(b[1])} ({b[2]:,})" for b in bins]
    rows = [
        [_name(case), *(_short(b[3]) if b[2] else "" for b in case["profiles"][name])]
        for case in cases
    ]
    return pages.markdown(["sampler", *heads], rows, numbers=True)


def _name(case: Mapping[str, Any]) -> str:
    return f"`{case['case']}`" if case["entries"] else case["case"]


def _edge(value: float | None) -> str:
    return "inf" if value is None else f"{value:.3g}"


def _short(value: float | None) -> str:
    """Three figures; an exact 0 as 0."""
    if value is None:
        return "not finite"
    if float(value).is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.2e}" if abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:.4g}"
