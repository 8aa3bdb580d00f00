"""Fits the times of a plan's kernels to measured calls, and leaves each out once.

    python scripts/calibrate.py     # no device: a second on a CPU

Reads docs/results/calibration.json, calls that a device timed and their work. Writes the parameters
to tim_jax/data/calibration.json and the tables to docs/results/calibration.md, between its marks.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import bench_common as common
import numpy as np
from scipy.optimize import least_squares

from tim_jax.instruments.plan import roofline
from tim_jax.instruments.plan.costs import Call, Tile
from tim_jax.instruments.plan.roofline import FORMULAS, PRODUCTS, SHOWN
from tim_jax.instruments.plan.topology import GENERATIONS, Rates

ROWS = common.RESULTS / "calibration.json"
PREDICTED = common.RESULTS / "predicted.json"
MEASURED, TODAYS = "the measured", "today's"  # kernels of predictions
PAGE = common.RESULTS / "calibration.md"


@dataclass(frozen=True)
class Row:
    """A call that a device timed."""

    kind: str
    case: str
    seconds: float
    call: Call
    of: str  # what it was measured in: "update", "sampler" or "products"
    calls: int  # of one run of that


def main() -> None:
    """Fits every device's classes, and writes the parameters and the page."""
    devices = json.loads(ROWS.read_text())
    fitted = {name: of_device(name, device) for name, device in devices.items()}
    roofline.FILE.write_text(_by_line(fitted))
    predicted = json.loads(PREDICTED.read_text()) if PREDICTED.exists() else {}
    lines = [
        line
        for name, device in devices.items()
        for line in (
            *tables(name, device, fitted[name]["classes"]),
            *predictions(device, predicted.get(name, {})),
        )
    ]
    PAGE.write_text(common.between_marks(PAGE.read_text(), "\n".join(lines)))


def _by_line(fitted: dict[str, Any]) -> str:
    """JSON with a line for each class."""
    text = json.dumps(fitted, indent=1)
    return re.sub(r"\n {4,}|\n {3}(?=[}\]])", " ", text) + "\n"


def of_device(name: str, device: dict[str, Any]) -> dict[str, Any]:
    """The parameters of each class, and the largest error of leaving a row out."""
    ceilings = device["ceilings"]
    rates = replace(GENERATIONS[name].rates, **ceilings)
    return {
        "device": device["device"],
        "ceilings": ceilings,
        "classes": {kind: of_class(kind, own, rates) for kind, own in by_class(device).items()},
    }


def by_class(device: dict[str, Any]) -> dict[str, list[Row]]:
    """The rows of each class that has any."""
    found: dict[str, list[Row]] = {kind: [] for kind in FORMULAS}
    for one in device["rows"]:
        work = dict(one["call"])
        tile = work.pop("tile", None)
        call = Call(**work, tile=None if tile is None else Tile(**tile))
        row = Row(one["class"], one["case"], 1e-6 * one["us"], call, one["of"], one["calls"])
        found[one["class"]].append(row)
    return {kind: own for kind, own in found.items() if own}


def of_class(kind: str, rows: Sequence[Row], rates: Rates) -> dict[str, Any]:
    """Parameters, the number of rows, and the largest error; None of too few rows."""
    errors = left_out(kind, rows, rates)
    return {
        "parameters": [float(f"{one:.4g}") for one in fit(kind, rows, rates)],
        "rows": len(rows),
        "error": None if errors is None else round(max(map(abs, errors)), 4),
        "shapes": sorted({shape for row in rows if (shape := roofline.shape_of(row.call))}),
    }


def fit(kind: str, rows: Sequence[Row], rates: Rates) -> tuple[float, ...]:
    """Parameters with the least squares of the logarithms of predicted over measured."""
    formula, start = FORMULAS[kind]

    def residuals(logs):
        return [math.log(formula(r.call, rates, *np.exp(logs)) / r.seconds) for r in rows]

    return tuple(map(float, np.exp(least_squares(residuals, np.log(start)).x)))


def left_out(kind: str, rows: Sequence[Row], rates: Rates) -> list[float] | None:
    """The error of each row by the fit to the others; None if these are fewer than parameters."""
    formula, start = FORMULAS[kind]
    if len(rows) <= len(start):
        return None
    errors = []
    for index, row in enumerate(rows):
        parameters = fit(kind, [*rows[:index], *rows[index + 1 :]], rates)
        errors.append(formula(row.call, rates, *parameters) / row.seconds - 1)
    return errors


def tables(name: str, device: dict[str, Any], classes: dict[str, Any]) -> Iterator[str]:
    """Classes, what they take of an update and of a sampler, then every row."""
    rates = replace(GENERATIONS[name].rates, **device["ceilings"])
    rows = by_class(device)
    yield from (f"## {device['device']}", "", device["source"], "")
    yield "| class | calls measured | parameters | largest error, left out | within 15% |"
    yield "|---|--:|--:|--:|---|"
    for kind, own in rows.items():
        found = classes[kind]
        error = found["error"]
        verdict = "not shown" if error is None or error > SHOWN else "yes"
        shown = "too few" if error is None else f"{error:.0%}"
        yield f"| {kind} | {len(own)} | {len(found['parameters'])} | {shown} | {verdict} |"
    for of, what in (("update", device["update"]), ("sampler", device["sampler"])):
        yield from ("", f"### {what}", "")
        yield "| class | measured, ms | by the data sheet | factor | calibrated |"
        yield "|---|--:|--:|--:|--:|"
        for kind, own in rows.items():
            calls = [row for row in own if row.of == of]
            if calls:
                yield _shares(kind, calls, name, partial(_now, classes=classes, rates=rates))
    yield from ("", "### Every call", "")
    yield "| class | call | measured, us | by the data sheet | calibrated | left out |"
    yield "|---|---|--:|--:|--:|--:|"
    for kind, own in rows.items():
        errors = left_out(kind, own, rates)
        for index, row in enumerate(own):
            now = _now(row, classes=classes, rates=rates)
            error = "" if errors is None else f"{errors[index]:+.0%}"
            times = (f"{1e6 * one:,.1f}" for one in (row.seconds, _before(row, name), now))
            yield f"| {kind} | {row.case} | {' | '.join(times)} | {error} |"
    yield ""


def _shares(kind: str, rows: Sequence[Row], name: str, now: Callable[[Row], float]) -> str:
    """What a program's calls of a class take together."""
    measured, before, after = (
        sum(1e3 * row.calls * seconds(row) for row in rows)
        for seconds in (lambda row: row.seconds, partial(_before, name=name), now)
    )
    return f"| {kind} | {measured:.1f} | {before:.1f} | {measured / before:.1f} | {after:.1f} |"


def _now(row: Row, classes: dict[str, Any], rates: Rates) -> float:
    return FORMULAS[row.kind][0](row.call, rates, *classes[row.kind]["parameters"])


# What a step is to reach, and the cases and their figure that say so.
GOALS = (
    (
        "decoding, 70% of the memory",
        "share of memory roofline",
        0.7,
        r"sampler 1\.7B exact, batch (64|128|256), (1,024|from)",
    ),
    (
        "updates, 45% of the products",
        "share of matmul peak",
        0.45,
        r"learner (1\.7B|4B) exact, .* (2,048|512) tokens",
    ),
    ("512 responses of 200 tokens in 12 s", "s/step", 12.0, "GRPO step 0.6B exact, 64 x 8"),
)


def predictions(device: dict[str, Any], predicted: dict[str, Any]) -> Iterator[str]:
    """Whole programs as predicted, beside what was measured, and the goals that they meet.

    Args:
      predicted: by whose kernels: those that were measured, or those of a later tree.
    """
    yield from ("## Whole programs", "")
    for kernels, found in predicted.items():
        yield from _programs(kernels, found, device["programs"])
    yield from (
        "## Goals",
        "",
        "| goal | case | kernels | predicted | met |",
        "|---|---|---|--:|---|",
    )
    for goal, figure, limit, pattern in GOALS:
        for kernels, found in predicted.items():
            for name, case in found["cases"].items():
                if re.match(pattern, name):
                    met = case[figure] <= limit if figure == "s/step" else case[figure] >= limit
                    cells = kernels, _figure(figure, case[figure]), "yes" if met else "no"
                    yield f"| {goal} | {name} | {' | '.join(cells)} |"
    yield ""


def _programs(kernels: str, found: dict[str, Any], measured: dict[str, float]) -> Iterator[str]:
    """A row for each program. Measured times are of the measured kernels."""
    yield from (f"### By {kernels} kernels", "")
    yield f"Compiled by jax {found['jax']}."
    head = "program", "predicted", "not shown", "by the data sheet", "measured", "most of it in"
    yield from ("", f"| {' | '.join(head)} | tree |", "|---|---|--:|--:|--:|---|---|")
    for name, case in found["cases"].items():
        total = sum(case["seconds"].values())
        figures = [_figure(key, case[key]) for key in case if key in _FIGURES]
        seconds = measured.get(name) if kernels == MEASURED else None
        beside = f"{seconds:,.3f} s ({total / seconds - 1:+.1%})" if seconds else ""
        classes = [f"{kind} {share:.0%}" for kind, share in case["classes"].items()]
        cells = (
            "; ".join([f"{total:,.3f} s", *figures]),
            f"{case['not shown']:.0%}",
            f"{case['by the data sheet']:,.3f} s",
            beside,
            "; ".join(classes),
            case["tree"],
        )
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


_FIGURES = {
    "ms/step": "{:.3g} ms a step",
    "s/step": "{:.2f} s a step",
    "tokens/s": "{:,} tokens/s",
    "share of memory roofline": "{:.1%} of the memory",
    "share of matmul peak": "{:.1%} of the products",
}


def _figure(key: str, value: float) -> str:
    return _FIGURES[key].format(value)


def _before(row: Row, name: str) -> float:
    """Seconds by the data sheet alone, as all estimates were made at first."""
    call, rates = row.call, GENERATIONS[name].rates
    if row.kind.startswith("XLA"):  # which loads as it likes, and of which elements are no products
        rates = replace(rates, cores=1, cache=0.0)
        call = replace(call, flops=call.flops if row.kind == PRODUCTS else 0)
    _, seconds, overhead = roofline.bound_of(call, rates, "bfloat16")
    return seconds + overhead


if __name__ == "__main__":
    main()
