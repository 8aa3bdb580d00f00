"""The picture of an ablation: mismatch by source, and by position, probability and length."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tim_jax.common.errors import InputError

_COLOURS = {
    "precision": "#1f6fb4",
    "weights": "#7b4fa3",
    "kernels": "#2a8f4f",
    "semantics": "#c0392b",
    "synthetic": "#e07b00",
    "": "#444444",
}
_INK, _FAINT = "#222222", "#d9d9d9"
_PANELS = {
    "by_position": "by position in the response",
    "by_probability": "by probability under the learner",
    "by_length": "by length of the response",
}
_LINES = 6  # curves in a panel


def source_chart(
    record: Mapping[str, Any], image: str | os.PathLike[str], *, title: str = ""
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
    FigureCanvasAgg(figure)
    figure.suptitle(title or f"Mismatch by source: {record['model']}", fontsize=13, color=_INK)
    halves: Any = figure.subfigures(1, 2, width_ratios=(3, 2))
    left, right = halves
    _bars(left.subplots(), cases, len(record["cases"]) - len(cases))
    shown = _spread(cases)
    panels = right.subplots(len(_PANELS), 1)
    for axes, (name, heading) in zip(panels, _PANELS.items(), strict=True):
        _lines(axes, shown, name)
        axes.set_title(heading, loc="left", fontsize=9, color=_INK)
    panels[0].legend(frameon=False, fontsize=6.5, loc="best")
    try:
        figure.savefig(image)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot write the chart {image}: {reason}") from error
    return Path(image)


def _bars(axes: Axes, cases: Sequence[Mapping[str, Any]], zeros: int) -> None:
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
    axes.margins(y=0.01)
    _tidy(axes, "x")


def _spread(cases: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A few cases from the largest mismatch to the smallest."""
    ordered = sorted(cases, key=lambda case: -case["metrics"]["log_ratio_abs_mean"])
    if len(ordered) <= _LINES:
        return ordered
    return [ordered[i * (len(ordered) - 1) // (_LINES - 1)] for i in range(_LINES)]


def _lines(axes: Axes, cases: Sequence[Mapping[str, Any]], profile: str) -> None:
    for index, case in enumerate(cases):
        bins = [b for b in case["profiles"][profile] if b[2] and b[3] > 0]
        middles = [(b[0] + b[1]) / 2 for b in bins]
        style = ("o-", "s-", "^-", "v--", "D--", "x--")[index % 6]
        axes.plot(middles, [b[3] for b in bins], style, ms=3, lw=1.1, label=case["case"])
    axes.set_yscale("log")
    axes.set_ylabel("mean |d|", fontsize=8)
    axes.tick_params(labelsize=7)
    _tidy(axes, "y")


def _tidy(axes: Axes, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x" if grid == "x" else "y", color=_FAINT, lw=0.7)
    axes.set_axisbelow(True)
