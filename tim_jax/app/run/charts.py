"""The chart of a run, from its metrics.jsonl: reward, response length, exact share, by step."""

import io
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tim_jax.app.run.loggers import read_lines
from tim_jax.common import pages
from tim_jax.common.errors import InputError
from tim_jax.model.files import write_bytes

_REWARD, _LENGTH, _EXACT, _UNEQUAL, _EVAL = "#1f6fb4", "#7b4fa3", "#2a8f4f", "#c0392b", "#e07b00"
_INK, _FAINT = "#222222", "#d9d9d9"


def training_chart(metrics: str | os.PathLike[str], image: str | os.PathLike[str]) -> Path:
    """Draws the metrics file of a run to a PNG (or PDF or SVG, by the ending); returns its path.

    Raises:
        InputError: the file is missing, damaged or holds no step; the image cannot be written.
    """
    records = list(read_lines(metrics))
    if not records:
        raise InputError(f"{metrics} holds no step yet; there is nothing to draw")
    figure = Figure(figsize=(9.0, 7.6), dpi=150, layout="constrained", facecolor="white")
    run = Path(metrics).resolve().parent.name
    _write_title(figure, run, size=14)
    sign(figure, f"tim-jax train, run {run}")
    reward, length, exact = figure.subplots(3, 1, sharex=True, height_ratios=(4, 3, 2))
    _draw_reward(reward, records)
    _draw_trend(length, records, "response_length", color=_LENGTH)
    _finish(length, "Response length", "mean tokens")
    length.set_ylim(bottom=0)
    _draw_exact(exact, records)
    figure.align_ylabels()
    exact.set_xlabel("training step")
    exact.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _save(figure, image)


def _save(figure: Figure, image: str | os.PathLike[str]) -> Path:
    path, data = Path(image), io.BytesIO()
    try:
        figure.savefig(data, format=path.suffix.removeprefix(".") or None)
        write_bytes(path, data.getvalue())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot write the chart {image}: {reason}") from error
    return path


def _write_title(figure: Figure, title: str, *, size: float) -> None:
    # Names of folders stand in it, where a "$" begins no formula.
    figure.suptitle(title, fontsize=size, color=_INK, parse_math=False)


def sign(figure: Figure, command: str, *, jax: str | None = None, size: float = 7) -> None:
    """Writes `pages.made_by` at the figure's foot, in letters of `size` points."""
    text = pages.made_by(command, jax=jax)
    figure.text(0.995, 0.004, text, ha="right", fontsize=size, color="#777777", parse_math=False)
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0.0, 0.02, 1.0, 0.98))  # pyright: ignore[reportCallIssue]


def series(records: Sequence[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps i64[N] and values f64[N] of one metric, where it is there and finite."""
    points = []
    for record in records:
        try:
            value = float(record[name])
        except (KeyError, TypeError, ValueError):
            continue
        if math.isfinite(value):
            points.append((record["step"], value))
    steps = np.array([step for step, _ in points], np.int64)
    return steps, np.array([value for _, value in points], np.float64)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the centred mean f64[N] over `window` values (odd), fewer at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    first = np.maximum(at - window // 2, 0)
    end = np.minimum(at + window // 2 + 1, len(values))
    return (sums[end] - sums[first]) / (end - first)


def _draw_reward(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    _draw_trend(axes, records, "reward", color=_REWARD, label="training samples")
    steps, values = series(records, "eval/reward")
    if len(steps):
        marked: dict[str, Any] = {"fmt": "o-", "color": _EVAL, "ms": 5, "lw": 1.4, "capsize": 3}
        at, errors = series(records, "eval/reward_error")  # not in runs of before it
        within = 1.96 * errors if len(at) == len(steps) else None
        label = "held-out problems" + ("" if within is None else ", 95% interval over problems")
        axes.errorbar(steps, values, within, label=label, **marked)
    _finish(axes, "Reward", "mean reward")


def _draw_exact(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    steps, share = series(records, "exact_share")
    percent = 100.0 * share
    axes.plot(steps, percent, color=_EXACT, lw=2.0)
    unequal = share < 1.0
    axes.plot(steps[unequal], percent[unequal], "o", color=_UNEQUAL, ms=4)
    title = "Exact share: sampler's and learner's log-probs equal to the bit"
    _finish(axes, title, "of tokens")
    axes.set_ylim(-4, 104)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
    compared = int(series(records, "compared_tokens")[1].sum())
    different = int(series(records, "unequal_tokens")[1].sum())
    if compared:
        text = f"{compared:,} tokens compared, {different:,} unequal"
        color = _UNEQUAL if different else _EXACT
        axes.text(0.01, 0.12, text, transform=axes.transAxes, color=color, fontsize=10)


def _draw_trend(
    axes: Axes, records: Sequence[dict[str, Any]], name: str, *, color: str, label: str = ""
) -> None:
    """The values of a metric, and where there are enough, their running mean on top."""
    steps, values = series(records, name)
    if not len(steps):
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#888888")
        return
    window = max(len(values) // 20, 1) | 1
    if window == 1:
        axes.plot(steps, values, color=color, lw=2.0, label=label or None, marker="o", ms=3)
        return
    of = f"{label}, " if label else ""
    axes.plot(steps, values, color=color, lw=0.9, alpha=0.3, label=f"{of}each step")
    mean = f"{of}mean of {window} steps"
    axes.plot(steps, smooth(values, window), color=color, lw=2.2, label=mean)


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_ylabel(unit)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, loc="best")
    _style(axes, "y")
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors="#555555", labelcolor=_INK)
    axes.margins(x=0.01)


_COLOURS = {
    "precision": "#1f6fb4",
    "weights": "#7b4fa3",
    "kernels": "#2a8f4f",
    "semantics": "#c0392b",
    "synthetic": "#e07b00",
    "": "#444444",
}
_PANELS = {
    "by_position": "position in the response, tokens",
    "by_probability": "probability under the learner",
    "by_length": "length of the response, tokens",
}
_LINES = 6  # curves in a panel


def source_chart(
    record: Mapping[str, Any],
    image: str | os.PathLike[str],
    *,
    title: str = "",
    command: str = "tim-jax audit --sampler",
) -> Path:
    """Draws the record of an ablation (`auditing.ablation.to_record`); returns the path.

    Raises:
        InputError: no case differs from the baseline, or the image cannot be written.
    """
    cases = [c for c in record["cases"] if c["metrics"]["log_ratio_abs_mean"]]
    if not cases:
        raise InputError("no sampler differs from the learner; there is nothing to draw")
    height = max(6.4, 2.2 + 0.27 * len(cases))
    figure = Figure(figsize=(12.5, height), dpi=130, layout="constrained", facecolor="white")
    _write_title(figure, title or f"Mismatch by source: {record['model']}", size=13)
    halves: Any = figure.subfigures(1, 2, width_ratios=(3, 2))
    left, right = halves
    _draw_bars(left.subplots(), cases, len(record["cases"]) - len(cases))
    shown = _pick_spread(cases)
    panels = right.subplots(len(_PANELS), 1)
    for axes, (name, unit) in zip(panels, _PANELS.items(), strict=True):
        _draw_lines(axes, shown, name)
        axes.set_xlabel(unit, fontsize=8)
    # Above the panels, where no line can be.
    panels[0].legend(frameon=False, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    sign(figure, command, jax=record["jax"])
    return _save(figure, image)


def _draw_bars(axes: Axes, cases: Sequence[Mapping[str, Any]], zeros: int) -> None:
    """Mean |d| as bars, the largest |d| as points, the largest mean at the top."""
    ordered = sorted(cases, key=lambda case: case["metrics"]["log_ratio_abs_mean"])
    places = range(len(ordered))
    colours = [_COLOURS[case["group"]] for case in ordered]
    means = [case["metrics"]["log_ratio_abs_mean"] for case in ordered]
    axes.barh(places, means, color=colours, height=0.7, label="mean |d|")
    largest = [case["metrics"]["log_ratio_abs_max"] for case in ordered]
    axes.plot(largest, places, "|", color=_INK, ms=9, mew=1.6, label="largest |d|")
    axes.set_xscale("log")
    axes.set_yticks(list(places), [case["case"] for case in ordered], fontsize=7.5)
    axes.set_xlabel("|log-prob of the learner - log-prob recorded|, nats; log scale")
    note = f"{zeros} with exactly 0 not shown" if zeros else ""
    axes.set_title(f"mean (bar) and largest (mark)   {note}", loc="left", fontsize=9, color=_INK)
    groups = [name for name in _COLOURS if any(case["group"] == name for case in ordered)]
    marks = [Patch(color=_COLOURS[name], label=name or "several") for name in groups]
    axes.legend(handles=marks, frameon=False, fontsize=7.5, loc="lower right")
    axes.margins(y=0.01)
    _style(axes, "x")


def _pick_spread(cases: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A few cases from the largest mismatch to the smallest."""
    ordered = sorted(cases, key=lambda case: -case["metrics"]["log_ratio_abs_mean"])
    if len(ordered) <= _LINES:
        return ordered
    return [ordered[i * (len(ordered) - 1) // (_LINES - 1)] for i in range(_LINES)]


def _draw_lines(axes: Axes, cases: Sequence[Mapping[str, Any]], profile: str) -> None:
    for index, case in enumerate(cases):
        bins = [b for b in case["profiles"][profile] if b[2] and b[3] > 0]
        middles = [(b[0] + b[1]) / 2 for b in bins]
        style = ("o-", "s-", "^-", "v--", "D--", "x--")[index % 6]
        named: dict[str, Any] = {
            "color": _COLOURS[case["group"]],
            "label": textwrap.shorten(case["case"], 34),
        }
        axes.plot(middles, [b[3] for b in bins], style, ms=3, lw=1.1, **named)
    axes.set_yscale("log")
    axes.set_ylabel("mean |d|", fontsize=8)
    axes.tick_params(labelsize=7)
    _style(axes, "y")


def _style(axes: Axes, grid: Literal["x", "y"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=_FAINT, lw=0.7)
    axes.set_axisbelow(True)
