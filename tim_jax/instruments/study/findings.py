"""What a study found, as tables and figures: of its records at fixed weights, and along its runs.

Two series that both rise have a high correlation whatever they have to do with each other. So each
correlation along a run is given twice: of the values, which says whether both rise or fall over the
run, and of their changes from one group of steps to the next, which says whether they move
together.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from scipy import stats

from tim_jax.common.errors import InputError
from tim_jax.common.pages import Table
from tim_jax.instruments.study.definition import CONTROL, GradientStudy
from tim_jax.instruments.study.gradient import RECOMPUTE
from tim_jax.instruments.study.measurement import Estimate, estimate, estimators

Record = Mapping[str, Any]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
_MOST_POINTS = 24_000  # of all lines of a page, which bounds its size
_HEIGHT = 190


# A metric over the steps, its title, and its unit.
PANELS = (
    ("reward", "Reward under the sampler", "mean reward"),
    ("eval/reward", "Held-out reward under the trainer's own policy", "mean reward"),
    ("response_length", "Response length", "mean tokens"),
    ("mismatch/log_ratio_abs_mean", "Mismatch: mean |d|", "nats a token"),
    ("mismatch/log_ratio_abs_max", "Mismatch: largest |d|", "nats"),
    ("mismatch/kl_k3", "Mismatch: K3", "nats a token"),
    ("mismatch/log_ppl_abs_diff_sum", "Mismatch: log_ppl_abs_diff (sum form)", "nats"),
    ("mismatch/ess_sequence", "Effective sample size", "share of the sequences"),
    ("update_skew_positive", "Update skew, positive advantages", "mean C"),
    ("update_skew_negative", "Update skew, negative advantages", "mean C"),
    ("gradient_norm", "Gradient norm", "norm of all parameters"),
    ("noise_scale", "Gradient noise scale", "sequences"),
    ("entropy", "Entropy", "nats a token"),
    ("learning_rate", "Learning rate", "a step"),
    ("exact_share", "Exact share of the tokens", "share"),
)


def altair() -> Any:
    """The library that draws, or an `InputError` that says how to install it."""
    try:
        importlib.import_module("vl_convert")
        return importlib.import_module("altair")
    except ImportError as error:
        raise InputError(
            "report: the packages altair and vl-convert-python are not installed;"
            " pip install 'tim-jax[report]'"
        ) from error


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each of the names, in their order; they repeat after seven.

    A control has the colour of its arm.
    """
    own = dict.fromkeys(name.removesuffix(f"+{CONTROL}") for name in names)
    order = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(own)}
    return {name: order[name.removesuffix(f"+{CONTROL}")] for name in names}


def dashes(names: Sequence[str], dashed: Sequence[str] = ()) -> dict[str, list[int]]:
    """Solid lines; dashed for `dashed`; other dashes where the colours repeat."""
    return {
        name: _DASHES[(index // len(COLOURS) * 2 + (name in dashed)) % len(_DASHES)]
        for index, name in enumerate(names)
    }


def _scales(alt: Any, names: Sequence[str], dashed: Sequence[str] = ()) -> dict[str, Any]:
    """The encodings by which lines are told apart, with one legend below."""
    legend = alt.Legend(
        title=None, orient="bottom", columns=2, labelLimit=320, symbolSize=300, symbolOpacity=1
    )
    legend.symbolType = "stroke"  # a line, as in the figure

    def encoding(kind: Any, values: Mapping[str, Any]) -> Any:
        scale = alt.Scale(domain=list(values), range=list(values.values()))
        return kind("arm:N", scale=scale, legend=legend)

    return {
        "color": encoding(alt.Color, colours(names)),
        "strokeDash": encoding(alt.StrokeDash, dashes(names, dashed)),
    }


def training_panels(
    table: Mapping[str, np.ndarray], *, controls: Sequence[str] = (), surges: Sequence[int] = ()
) -> dict[str, Any]:
    """Title -> chart, of the metrics that the table has.

    Args:
        table: from `study.load`.
        controls: arms that are drawn dashed.
        surges: steps at which response lengths surge, marked by vertical rules.
    """
    alt = altair()
    names = list(dict.fromkeys(table["arm"].tolist()))
    lines = len({*zip(table["arm"].tolist(), table["seed"].tolist(), strict=True)})
    there = [one for one in PANELS if one[0] in table and np.isfinite(table[one[0]]).any()]
    points = int(np.clip(_MOST_POINTS // max(1, lines * len(there)), 12, 200))
    drawn = {}
    for metric, title, unit in there:
        rows = thinned(table, metric, points)
        chart = _lines(alt, rows, unit, _scales(alt, names, controls))
        if metric == "response_length" and surges:
            chart = alt.layer(chart, _rules(alt, surges))
        drawn[title] = _finished(chart, title)
    return drawn


def thinned(table: Mapping[str, np.ndarray], metric: str, points: int) -> list[dict[str, Any]]:
    """Rows {arm, seed, step, value} with at most `points` a line, each the mean of its steps.

    Bins of steps are the same for all lines, so that means over seeds are of the same steps.
    """
    steps, values = table["step"], table[metric]
    kept = np.isfinite(values)
    if not kept.any():
        return []
    width = -(-(int(steps[kept].max()) + 1) // points)
    rows: dict[tuple[str, int, int], list[float]] = {}
    lines = zip(table["arm"][kept], table["seed"][kept], steps[kept], values[kept], strict=True)
    for arm, seed, step, value in lines:
        rows.setdefault((str(arm), int(seed), int(step) // width * width), []).append(float(value))
    return [
        {"arm": arm, "seed": seed, "step": step, "value": float(f"{np.mean(of):.5g}")}
        for (arm, seed, step), of in rows.items()
    ]


def _lines(alt: Any, rows: list[dict[str, Any]], unit: str, scales: dict[str, Any]) -> Any:
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, grid=False)), **scales
    )
    y = alt.Y("value:Q", title=unit, scale=alt.Scale(zero=False))
    thin = base.mark_line(strokeWidth=0.8, opacity=0.4).encode(y=y, detail="seed:N")
    mean = alt.Y("mean(value):Q", title=unit, scale=alt.Scale(zero=False))
    thick = base.mark_line(strokeWidth=2.6, point={"size": 12}).encode(y=mean)
    seeds = {(row["arm"], row["seed"]) for row in rows}
    if len(seeds) == len({arm for arm, _ in seeds}):
        return alt.layer(thick)
    band = base.mark_errorband(extent="stdev", opacity=0.15).encode(y=y)
    return alt.layer(band, thin, thick)


def _rules(alt: Any, surges: Sequence[int]) -> Any:
    marks = [{"step": step, "label": f"surge at {step}"} for step in surges]
    base = alt.Chart(alt.Data(values=marks)).encode(x="step:Q")
    text = base.mark_text(align="left", dx=4, y=8).encode(text="label:N")
    return alt.layer(base.mark_rule(strokeDash=[4, 4]), text)


def _finished(chart: Any, title: str) -> Any:
    return (
        chart.properties(title=title, width="container", height=_HEIGHT, background="transparent")
        .configure_view(strokeWidth=0)
        .configure_title(anchor="start", fontSize=14)
        .configure_axis(gridOpacity=0.35, labelFontSize=11, titleFontSize=11)
        .configure_legend(labelFontSize=11)
    )


def intervals(
    found: Sequence[tuple[str, str, Estimate]], *, title: str, x: str, names: list[str]
) -> Any:
    """Estimates by source and arm, with bars of two standard errors; `names`: the arms in order."""
    alt = altair()
    rows = [
        {"y": source, "arm": arm, "value": of.value}
        | {"low": of.value - 2.0 * of.error, "high": of.value + 2.0 * of.error}
        for source, arm, of in found
    ]
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("y:N", title="source", sort=None),
        yOffset=alt.YOffset("arm:N", sort=names),
        color=_scales(alt, names)["color"],
    )
    at = alt.X("value:Q", title=x)
    points = base.mark_point(filled=True, size=45).encode(
        x=at, shape=alt.Shape("arm:N", scale=alt.Scale(domain=names), legend=None)
    )
    bars = base.mark_rule(strokeWidth=1.4).encode(x=alt.X("low:Q", title=x), x2="high:Q")
    height = max(_HEIGHT, 16 * len({(row["y"], row["arm"]) for row in rows}))
    return _finished(alt.layer(bars, points), title).properties(height=height)


def plane(records: Sequence[Record], names: list[str], *, title: str) -> Any:
    """Bias and variance of every remedy under every source, on logarithmic axes."""
    alt, rows = altair(), []
    for record in records:
        for name in names:
            bias, variance = estimate(record, name, "bias"), estimate(record, name, "variance")
            x = max(bias.value, bias.error)
            if x > 0 and variance.value > 0:
                rows.append({"x": x, "y": variance.value, "arm": name, "label": record["source"]})
    axes = (
        "squared bias / exact square (what is below its error is drawn there)",
        "variance / exact square, of one batch",
    )
    points = _logarithmic(alt, rows, *axes, names).mark_point(filled=True, size=70)
    shape = alt.Shape("arm:N", scale=alt.Scale(domain=names), legend=None)
    return _finished(points.encode(shape=shape), title).properties(height=2 * _HEIGHT)


def _logarithmic(alt: Any, rows: list[dict[str, Any]], x: str, y: str, names: list[str]) -> Any:
    return alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("x:Q", title=x, scale=alt.Scale(type="log")),
        y=alt.Y("y:Q", title=y, scale=alt.Scale(type="log")),
        color=_scales(alt, names)["color"],
    )


def growth(rows: list[dict[str, Any]], names: list[str], *, title: str) -> Any:
    """Lines {x, y, arm, kind} on logarithmic axes; what is not "measured" is dashed."""
    alt, axes = altair(), ("longest response T, tokens", "norm of the bias")
    kinds = sorted({row["kind"] for row in rows}, key=lambda kind: kind != "measured")
    dash = alt.StrokeDash(
        "kind:N",
        scale=alt.Scale(domain=kinds, range=list(_DASHES[: len(kinds)])),
        legend=alt.Legend(title=None, orient="bottom"),
    )
    chart = _logarithmic(alt, rows, *axes, names).mark_line(point=True).encode(strokeDash=dash)
    return _finished(alt.layer(chart), title).properties(height=2 * _HEIGHT)


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
_FEWEST = 10  # groups, of which the first is the first tenth


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
    square = "squared bias / exact square"
    of_bias = ["source", "K3, nats a token", square, "bias / exact norm"]
    of_bias += ["cosine with the exact gradient", "reward less the exact sampler's"]
    of_remedies = ["source", "mode and remedy", square, "variance / exact variance"]
    signs = "Bias by the sign of the advantage, each over its own part's square"
    biases = [*map(_bias, records)]
    remedies = [_remedy(r, name) for r in records for name in estimators(r)]
    tables = [
        Table("Bias of the uncorrected gradient, by source", of_bias, biases),
        Table("What each remedy does to bias and variance", of_remedies, remedies),
        Table(signs, ["source", "A > 0", "A < 0"], [*map(_signs, records)]),
        Table("Which metric sees what", ["source", *METRICS.values()], [*map(_metrics, records)]),
    ]
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


def _bias(record: Record) -> list[str]:
    bias, cosine = (estimate(record, RECOMPUTE, name) for name in ("bias", "cosine"))
    k3, reward = record["metrics"]["kl_k3"], record["reward_difference"]
    norm = f"{np.sqrt(bias.value):.3g}" if bias.seen else "not seen"
    return [record["source"], _pm(k3), _pm(bias), norm, _pm(cosine), _pm(reward)]


def _remedy(record: Record, name: str) -> list[str]:
    kinds = ("bias", "variance", "exact_variance")
    bias, variance, exact = (estimate(record, name, kind) for kind in kinds)
    share = variance.value / exact.value if exact.value > 0 else np.nan
    return [record["source"], name, _pm(bias), f"{share:.4g}"]


def _signs(record: Record) -> list[str]:
    biases = (record["signs"][sign]["bias"] for sign in ("positive", "negative"))
    return [record["source"], *map(_pm, biases)]


def _metrics(record: Record) -> list[str]:
    """Values, and blind where a source with a seen bias leaves a metric at its exact value."""
    cells = [record["source"]]
    for name in METRICS:
        value = Estimate(*record["metrics"][name])
        exact = Estimate(*record["exact_metrics"][name])
        apart = abs(value.value - exact.value) > 2.0 * np.hypot(value.error, exact.error)
        cells.append(f"{value.value:.2e}{'' if apart else ' (as exact)'}")
    return cells


def _figures(records: Sequence[Record]) -> dict[str, Any]:
    names = estimators(records[0])
    bias = "Squared bias by source and remedy"
    signs = "Squared bias by the sign of the advantage"
    both = "Bias and variance of every remedy"
    return {
        bias: intervals(
            [(r["source"], name, estimate(r, name, "bias")) for r in records for name in names],
            title=bias,
            x="squared bias / square of the exact gradient, two standard errors",
            names=names,
        ),
        signs: intervals(
            [
                (r["source"], sign, Estimate(*r["signs"][sign]["bias"]))
                for r in records
                for sign in ("positive", "negative")
            ],
            title=signs,
            x="squared bias / square of the part, two standard errors",
            names=["positive", "negative"],
        ),
        both: plane(records, names, title=both),
    }


def _horizons(records: Sequence[Record]) -> Findings:
    rows, points = [], []
    for record in records:
        bias, size, bound = estimate(record, RECOMPUTE, "bias"), _size(record), record.get("bound")
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
    figure = growth(points, names, title=title)
    tables = [Table("The gradient's error and the bound", head, rows)]
    return Findings([_slopes(records, names)], tables, {title: figure} if points else {})


def _size(record: Record) -> float:
    """The norm of the bias; 0 where it is not seen."""
    bias, signal = (estimate(record, RECOMPUTE, name) for name in ("bias", "signal"))
    return float(np.sqrt(bias.value)) * signal.value if bias.seen else 0.0


def _slopes(records: Sequence[Record], names: Sequence[str]) -> str:
    said = []
    for name in names:
        own = [(r["longest"], _size(r)) for r in records if r["source"] == name]
        seen = [point for point in own if point[1] > 0.0]
        power = slope(seen)
        text = f"T to the power {power:.2f}" if np.isfinite(power) else "too few lengths to say"
        said.append(f"{name}: {text} ({len(seen)} of {len(own)} lengths with a bias that is seen)")
    return "Growth of the measured bias, least squares of logarithms: " + "; ".join(said) + "."


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The exponent k of y = c x^k at (x, y), by least squares of logarithms; of one x, NaN."""
    if len({x for x, _ in points}) < 2:
        return float("nan")
    x, y = np.log(points).T
    return float(np.polyfit(x, y, 1)[0])


def _pm(of: Sequence[float]) -> str:
    """An estimate and its standard error."""
    value, error = of
    return f"{value:.3g} ± {error:.1g}"


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
    if count < _FEWEST:
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
