"""What a study found, as tables and figures: of its records at fixed weights, and along its runs.

Two series that both rise have a high correlation whatever they have to do with each other. So each
correlation along a run is given twice: of the values, which says whether both rise or fall over the
run, and of their changes from one group of steps to the next, which says whether they move
together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from scipy import stats

from tim_jax.common.pages import Table
from tim_jax.instruments.study import charts
from tim_jax.instruments.study.estimates import Estimate
from tim_jax.instruments.study.gradient import RECOMPUTE
from tim_jax.instruments.study.measurement import GradientStudy, estimate, estimators

Record = Mapping[str, Any]
# Every metric, and which mode's ratio it is taken of: the first ones compare trainer and rollout.
METRICS = {
    "log_ratio_abs_mean": "mean abs d",
    "kl_k1": "K1",
    "kl_k3": "K3",
    "log_ppl_abs_diff_sum": "log_ppl_abs_diff, sum",
    "log_ppl_abs_diff_mean": "log_ppl_abs_diff, mean",
    "ess_sequence": "ESS, sequences",
    "bypass/k3": "K3 of the loss's ratio, bypass",
    "recompute/k3": "K3 of the loss's ratio, recompute",
    "bypass/update_skew_positive": "skew A>0, bypass",
    "bypass/update_skew_negative": "skew A<0, bypass",
    "recompute/update_skew_positive": "skew A>0, recompute",
    "recompute/update_skew_negative": "skew A<0, recompute",
}

MISMATCH = "mismatch/kl_k3"
COMPANIONS = {
    "entropy": "entropy",
    "gradient_norm": "gradient norm",
    "noise_scale": "gradient noise scale",
    "response_length": "response length",
    "reward": "reward",
}
_GROUPS = 40  # of consecutive steps, whose means are compared
_LEAST = 5  # steps in a group


class Findings(NamedTuple):
    """What a report shows of a study."""

    sentences: list[str]
    tables: list[Table]
    figures: dict[str, Any]


def of_records(study: GradientStudy, records: Sequence[Record]) -> Findings:
    """The findings of the records that are there."""
    if not records:
        return Findings([], [], {})
    if study.horizon:
        return _horizons(records)
    tables = [_biases(records), _remedies(records), _signs(records), _metrics(records)]
    return Findings(_sentences(records), tables, _figures(records))


def _sentences(records: Sequence[Record]) -> list[str]:
    signal, noise = (estimate(records[0], RECOMPUTE, x) for x in ("signal", "exact_variance"))
    seen = [r["source"] for r in records if estimate(r, RECOMPUTE, "bias").seen]
    unseen = [r["source"] for r in records if r["source"] not in seen]
    return [
        f"The exact gradient's norm is {signal.value:.3g} (standard error {signal.error:.1g}); the"
        f" noise of one exact batch has {noise.value:.3g} times its square.",
        "A bias counts as seen where its square is more than two standard errors above 0.",
        f"Bias of the uncorrected gradient is seen under: {', '.join(seen) or 'no source'}.",
        f"It is not seen under: {', '.join(unseen) or 'none'}.",
    ]


def _biases(records: Sequence[Record]) -> Table:
    rows = []
    for record in records:
        bias, cosine = (estimate(record, RECOMPUTE, name) for name in ("bias", "cosine"))
        k3, reward = Estimate(*record["metrics"]["kl_k3"]), Estimate(*record["reward_difference"])
        norm = f"{np.sqrt(bias.value):.3g}" if bias.seen else "not seen"
        rows.append([record["source"], _pm(k3), _pm(bias), norm, _pm(cosine), _pm(reward)])
    head = ["source", "K3, nats a token", "squared bias / exact square", "bias / exact norm"]
    return Table(
        "Bias of the uncorrected gradient, by source",
        [*head, "cosine with the exact gradient", "reward less the exact sampler's"],
        rows,
    )


def _remedies(records: Sequence[Record]) -> Table:
    rows = []
    for record in records:
        for name in estimators(record):
            bias, variance, exact = (
                estimate(record, name, kind) for kind in ("bias", "variance", "exact_variance")
            )
            share = variance.value / exact.value if exact.value > 0 else np.nan
            rows.append([record["source"], name, _pm(bias), f"{share:.4g}"])
    head = ["source", "mode and remedy", "squared bias / exact square"]
    return Table(
        "What each remedy does to bias and variance", [*head, "variance / exact variance"], rows
    )


def _signs(records: Sequence[Record]) -> Table:
    rows = []
    for record in records:
        biases = (record["signs"][sign]["bias"] for sign in ("positive", "negative"))
        rows.append([record["source"], *(_pm(Estimate(*bias)) for bias in biases)])
    return Table(
        "Bias by the sign of the advantage, each over its own part's square",
        ["source", "A > 0", "A < 0"],
        rows,
    )


def _metrics(records: Sequence[Record]) -> Table:
    """Values, and blind where a source with a seen bias leaves a metric at its exact value."""
    rows = []
    for record in records:
        cells = [record["source"]]
        for name in METRICS:
            value = Estimate(*record["metrics"][name])
            exact = Estimate(*record["exact_metrics"][name])
            apart = abs(value.value - exact.value) > 2.0 * np.hypot(value.error, exact.error)
            cells.append(f"{value.value:.2e}{'' if apart else ' (as exact)'}")
        rows.append(cells)
    return Table("Which metric sees what", ["source", *METRICS.values()], rows)


def _figures(records: Sequence[Record]) -> dict[str, Any]:
    names = estimators(records[0])
    bias = "Squared bias by source and remedy"
    signs = "Squared bias by the sign of the advantage"
    both = "Bias and variance of every remedy"
    return {
        bias: charts.intervals(
            [_interval(r["source"], n, estimate(r, n, "bias")) for r in records for n in names],
            title=bias,
            x="squared bias / square of the exact gradient, two standard errors",
            y="source",
            names=names,
        ),
        signs: charts.intervals(
            [
                _interval(r["source"], sign, Estimate(*r["signs"][sign]["bias"]))
                for r in records
                for sign in ("positive", "negative")
            ],
            title=signs,
            x="squared bias / square of the part, two standard errors",
            y="source",
            names=["positive", "negative"],
        ),
        both: charts.plane(
            [row for r in records for row in _plane_rows(r, names)],
            title=both,
            x="squared bias / exact square (what is below its error is drawn there)",
            y="variance / exact square, of one batch",
            names=names,
        ),
    }


def _interval(place: str, arm: str, of: Estimate) -> dict[str, Any]:
    ends = {"low": of.value - 2.0 * of.error, "high": of.value + 2.0 * of.error}
    return {"y": place, "arm": arm, "value": of.value} | ends


def _plane_rows(record: Record, names: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        bias, variance = estimate(record, name, "bias"), estimate(record, name, "variance")
        x = max(bias.value, bias.error)
        if x > 0 and variance.value > 0:
            rows.append({"x": x, "y": variance.value, "arm": name, "label": record["source"]})
    return rows


def _horizons(records: Sequence[Record]) -> Findings:
    rows, points = [], []
    for record in records:
        bias, signal = (estimate(record, RECOMPUTE, name) for name in ("bias", "signal"))
        size = float(np.sqrt(max(bias.value, 0.0))) * signal.value
        bound = record.get("bound")
        cells = [record["horizon"], record["source"], f"{record['longest']:.0f}", _pm(bias)]
        cells += [f"{size:.3g}" if bias.seen else "not seen", f"{record['score_norm']:.3g}"]
        cells += [f"{record[k]:.2e}" if k in record else "" for k in ("variation_largest", "bound")]
        rows.append(cells)
        place = {"x": record["longest"], "arm": record["source"]}
        if bias.seen:
            points.append(place | {"y": size, "kind": "measured"})
        if bound:
            points.append(place | {"y": bound, "kind": "Theorem 3.1"})
    names = list(dict.fromkeys(r["source"] for r in records))
    head = ["horizon", "source", "T", "squared bias / exact square", "bias, norm"]
    head += ["B, largest score", "D, largest variation", "2 B D T^2"]
    title = "The gradient's error against the length"
    figure = charts.growth(
        points, title=title, x="longest response T, tokens", y="norm of the bias", names=names
    )
    tables = [Table("The gradient's error and the bound", head, rows)]
    return Findings([_slopes(records, names)], tables, {title: figure} if points else {})


def _slopes(records: Sequence[Record], names: Sequence[str]) -> str:
    said = []
    for name in names:
        own = [r for r in records if r["source"] == name]
        seen = {r["horizon"]: estimate(r, RECOMPUTE, "bias") for r in own}
        sizes = {
            r["horizon"]: float(np.sqrt(seen[r["horizon"]].value))
            * estimate(r, RECOMPUTE, "signal").value
            for r in own
            if seen[r["horizon"]].seen
        }
        power = slope({r["horizon"]: r["longest"] for r in own}, sizes)
        text = f"T to the power {power:.2f}" if np.isfinite(power) else "too few lengths to say"
        said.append(f"{name}: {text} ({len(sizes)} of {len(own)} lengths with a bias that is seen)")
    return "Growth of the measured bias, least squares of logarithms: " + "; ".join(said) + "."


def slope(lengths: Mapping[str, float], sizes: Mapping[str, float]) -> float:
    """The exponent k of size = c T^k, by least squares of logarithms; NaN for under 2 points."""
    names = [name for name in lengths if sizes.get(name, 0.0) > 0.0]
    if len(names) < 2:
        return float("nan")
    x = np.log([lengths[name] for name in names])
    return float(np.polyfit(x, np.log([sizes[name] for name in names]), 1)[0])


def _pm(of: Estimate) -> str:
    return f"{of.value:.3g} ± {of.error:.1g}"


def dynamics(table: Mapping[str, np.ndarray]) -> list[Table]:
    """Two tables of the arms that have a mismatch and enough steps; none if there is no such arm.

    Args:
        table: from `study.load`.
    """
    if MISMATCH not in table:
        return []
    changed, together = [], []
    for arm in dict.fromkeys(table["arm"].tolist()):
        runs = [_groups(table, rows) for rows in _runs(table, arm)]
        runs = [run for run in runs if run is not None]
        if not runs:
            continue
        changed.append([arm, str(len(runs)), *_change(runs)])
        names = [name for name in COMPANIONS if all(name in run for run in runs)]
        for name in names:
            values = [_correlation(run[MISMATCH], run[name]) for run in runs]
            moves = [_correlation(*(np.diff(run[m]) for m in (MISMATCH, name))) for run in runs]
            together.append([arm, COMPANIONS[name], _spread(values), _spread(moves)])
    if not changed:
        return []
    k3 = "K3, nats a token"
    return [
        Table(
            "How the mismatch changes along a run (mean of the seeds, lowest to highest)",
            ["arm", "seeds", f"{k3}: first tenth", "last tenth", "last / first", "highest / first"],
            changed,
        ),
        Table(
            "What changes with it: Spearman's rank correlation with K3, by run",
            ["arm", "metric", "of the values", "of the changes"],
            together,
        ),
    ]


def _runs(table: Mapping[str, np.ndarray], arm: str) -> list[np.ndarray]:
    """The rows of each of an arm's runs, in the order of steps."""
    runs = []
    for seed in dict.fromkeys(table["seed"][table["arm"] == arm].tolist()):
        rows = np.flatnonzero((table["arm"] == arm) & (table["seed"] == seed))
        runs.append(rows[np.argsort(table["step"][rows], kind="stable")])
    return runs


def _groups(table: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray] | None:
    """Metric -> means of groups of steps, of a run with a mismatch in every group."""
    rows = rows[np.isfinite(table[MISMATCH][rows])]
    count = min(_GROUPS, len(rows) // _LEAST)
    if count < 3:
        return None
    parts = np.array_split(rows, count)
    means = {}
    for name in (MISMATCH, *COMPANIONS):
        if name in table:
            values = np.where(np.isfinite(table[name]), table[name], np.nan)
            if all(np.isfinite(values[part]).any() for part in parts):
                means[name] = np.array([np.nanmean(values[part]) for part in parts])
    return means if (means[MISMATCH] > 0).all() else None


def _change(runs: list[dict[str, np.ndarray]]) -> list[str]:
    series = [(run[MISMATCH], max(1, len(run[MISMATCH]) // 10)) for run in runs]
    first = np.array([values[:tenth].mean() for values, tenth in series])
    last = np.array([values[-tenth:].mean() for values, tenth in series])
    highest = np.array([values.max() for values, _ in series])
    ratios = (_spread(list(one / first)) for one in (last, highest))
    return [f"{first.mean():.3g}", f"{last.mean():.3g}", *ratios]


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's, NaN where one of the two never changes."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(cast(Any, stats.spearmanr(first, second)).statistic)


def _spread(values: list[float]) -> str:
    """Mean, lowest and highest of the values that are numbers."""
    numbers = [value for value in values if np.isfinite(value)]
    if not numbers:
        return "-"
    if len(numbers) == 1:
        return f"{numbers[0]:.2f}"
    return f"{np.mean(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"
