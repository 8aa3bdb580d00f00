"""The figures of a report, as Vega-Lite by altair: thin lines are seeds, thick ones their mean.

Colours are those of Okabe and Ito, which the colour-blind tell apart; controls are dashed as well.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tim_jax.common.errors import InputError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C")
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3])
_MOST_POINTS = 24_000  # of all lines of a page, which bounds its size
_HEIGHT = 190


class Panel(NamedTuple):
    """One metric over the steps."""

    metric: str
    title: str
    unit: str


PANELS = (
    Panel("reward", "Reward under the sampler", "mean reward"),
    Panel("eval/reward", "Held-out reward under the trainer's own policy", "mean reward"),
    Panel("response_length", "Response length", "mean tokens"),
    Panel("mismatch/log_ratio_abs_mean", "Mismatch: mean |d|", "nats a token"),
    Panel("mismatch/log_ratio_abs_max", "Mismatch: largest |d|", "nats"),
    Panel("mismatch/kl_k3", "Mismatch: K3", "nats a token"),
    Panel("mismatch/log_ppl_abs_diff_sum", "Mismatch: log_ppl_abs_diff (sum form)", "nats"),
    Panel("mismatch/ess_sequence", "Effective sample size", "share of the sequences"),
    Panel("update_skew_positive", "Update skew, positive advantages", "mean C"),
    Panel("update_skew_negative", "Update skew, negative advantages", "mean C"),
    Panel("gradient_norm", "Gradient norm", ""),
    Panel("noise_scale", "Gradient noise scale", "sequences"),
    Panel("entropy", "Entropy", "nats a token"),
    Panel("learning_rate", "Learning rate", ""),
    Panel("exact_share", "Exact share of the tokens", ""),
)


def altair() -> Any:
    """The library that draws.

    Raises:
        InputError: it is not installed.
    """
    try:
        importlib.import_module("vl_convert")
        return importlib.import_module("altair")
    except ImportError as error:
        raise InputError(
            "report: the packages altair and vl-convert-python are not installed;"
            " pip install 'tim-jax[report]'"
        ) from error


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each of the names, in their order; they repeat after seven."""
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def dashes(names: Sequence[str], dashed: Sequence[str] = ()) -> dict[str, list[int]]:
    """Solid lines; dashed for `dashed`; other dashes where the colours repeat."""
    return {
        name: _DASHES[(index // len(COLOURS) * 2 + (name in dashed)) % len(_DASHES)]
        for index, name in enumerate(names)
    }


def _scales(alt: Any, names: Sequence[str], dashed: Sequence[str] = ()) -> dict[str, Any]:
    """The encodings by which lines are told apart, with one legend below."""
    legend = alt.Legend(title=None, orient="bottom", columns=2, labelLimit=320, symbolSize=300)

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
    there = [p for p in PANELS if p.metric in table and np.isfinite(table[p.metric]).any()]
    points = int(np.clip(_MOST_POINTS // max(1, lines * len(there)), 12, 200))
    drawn = {}
    for panel in there:
        rows = thinned(table, panel.metric, points)
        chart = _lines(alt, rows, panel, _scales(alt, names, controls))
        if panel.metric == "response_length" and surges:
            chart = alt.layer(chart, _rules(alt, surges))
        drawn[panel.title] = _finished(chart, panel.title)
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


def _lines(alt: Any, rows: list[dict[str, Any]], panel: Panel, scales: dict[str, Any]) -> Any:
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, grid=False)), **scales
    )
    y = alt.Y("value:Q", title=panel.unit or None, scale=alt.Scale(zero=False))
    thin = base.mark_line(strokeWidth=0.8, opacity=0.4).encode(y=y, detail="seed:N")
    mean = alt.Y("mean(value):Q", title=panel.unit or None, scale=alt.Scale(zero=False))
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


def intervals(rows: list[dict[str, Any]], *, title: str, x: str, y: str, names: list[str]) -> Any:
    """Points with error bars: rows {y, arm, value, low, high}, `names` the arms in their order."""
    alt = altair()
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("y:N", title=y, sort=None),
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


def plane(rows: list[dict[str, Any]], *, title: str, x: str, y: str, names: list[str]) -> Any:
    """Points {x, y, arm, label} on logarithmic axes; all must be above 0."""
    alt = altair()
    points = _logarithmic(alt, rows, x, y, names).mark_point(filled=True, size=70)
    shape = alt.Shape("arm:N", scale=alt.Scale(domain=names), legend=None)
    return _finished(points.encode(shape=shape), title).properties(height=2 * _HEIGHT)


def _logarithmic(alt: Any, rows: list[dict[str, Any]], x: str, y: str, names: list[str]) -> Any:
    return alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("x:Q", title=x, scale=alt.Scale(type="log")),
        y=alt.Y("y:Q", title=y, scale=alt.Scale(type="log")),
        color=_scales(alt, names)["color"],
    )


def growth(rows: list[dict[str, Any]], *, title: str, x: str, y: str, names: list[str]) -> Any:
    """Lines {x, y, arm, kind} on logarithmic axes; what is not "measured" is dashed."""
    alt = altair()
    kinds = sorted({row["kind"] for row in rows}, key=lambda kind: kind != "measured")
    dash = alt.StrokeDash(
        "kind:N",
        scale=alt.Scale(domain=kinds, range=list(_DASHES[: len(kinds)])),
        legend=alt.Legend(title=None, orient="bottom"),
    )
    chart = _logarithmic(alt, rows, x, y, names).mark_line(point=True).encode(strokeDash=dash)
    return _finished(alt.layer(chart), title).properties(height=2 * _HEIGHT)
