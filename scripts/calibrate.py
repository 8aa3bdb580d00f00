"""Fits the times of a plan's kernels to measured calls, and leaves each out once.

    python scripts/calibrate.py     # no device: a second on a CPU

Reads docs/results/calibration.json, calls that a device timed and their work. Writes the parameters
to tim_jax/data/calibration.json and the tables to docs/results/calibration.md, between its marks.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import bench_common as common
import numpy as np
from scipy.optimize import least_squares

from tim_jax.instruments.plan import calibration, roofline
from tim_jax.instruments.plan.calibration import FORMULAS, PRODUCTS, RATES, SHOWN, Rates
from tim_jax.instruments.plan.costs import Call, Tile

ROWS = common.RESULTS / "calibration.json"
PAGE = common.RESULTS / "calibration.md"


@dataclass(frozen=True)
class Row:
    """A call that a device timed."""

    kind: str
    case: str
    seconds: float
    call: Call


def main() -> None:
    """Fits every device's classes, and writes the parameters and the page."""
    devices = json.loads(ROWS.read_text())
    fitted = {name: of_device(name, device) for name, device in devices.items()}
    calibration.FILE.write_text(json.dumps(fitted, indent=1) + "\n")
    lines = [
        line
        for name, device in devices.items()
        for line in tables(name, device, fitted[name]["classes"])
    ]
    PAGE.write_text(common.between_marks(PAGE.read_text(), "\n".join(lines)))


def of_device(name: str, device: dict[str, Any]) -> dict[str, Any]:
    """The parameters of each class, and the largest error of leaving a row out."""
    ceilings = device["ceilings"]
    rates = replace(RATES[name], **ceilings)
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
        found[one["class"]].append(Row(one["class"], one["case"], 1e-6 * one["us"], call))
    return {kind: own for kind, own in found.items() if own}


def of_class(kind: str, rows: Sequence[Row], rates: Rates) -> dict[str, Any]:
    """Parameters, the number of rows, and the largest error; None of too few rows."""
    errors = left_out(kind, rows, rates)
    return {
        "parameters": [float(f"{one:.4g}") for one in fit(kind, rows, rates)],
        "rows": len(rows),
        "error": None if errors is None else round(max(map(abs, errors)), 4),
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
    """Classes, then every row."""
    rates = replace(RATES[name], **device["ceilings"])
    rows = by_class(device)
    errors = {kind: left_out(kind, own, rates) for kind, own in rows.items()}
    yield from (f"## {device['device']}", "", device["source"], "")
    yield "| class | rows | parameters | largest error, left out | within 15% | estimate before |"
    yield "|---|--:|--:|--:|---|--:|"
    for kind, own in rows.items():
        found = classes[kind]
        error, count = found["error"], len(found["parameters"])
        verdict = "not shown" if error is None or error > SHOWN else "yes"
        shown = "too few rows" if error is None else f"{error:.0%}"
        before = [_before(row, name) / row.seconds for row in own]
        between = f"{min(before):.2f} to {max(before):.2f}" if own[1:] else f"{before[0]:.2f}"
        yield f"| {kind} | {len(own)} | {count} | {shown} | {verdict} | {between} |"
    yield from ("", "| class | call | measured, us | estimate before | estimate | left out |")
    yield "|---|---|--:|--:|--:|--:|"
    for kind, own in rows.items():
        formula = FORMULAS[kind][0]
        for index, row in enumerate(own):
            now = formula(row.call, rates, *classes[kind]["parameters"])
            error = errors[kind]
            shown = "" if error is None else f"{error[index]:+.0%}"
            times = (f"{1e6 * one:,.1f}" for one in (row.seconds, _before(row, name), now))
            yield f"| {kind} | {row.case} | {' | '.join(times)} | {shown} |"
    yield ""


def _before(row: Row, name: str) -> float:
    """Seconds by the data sheet alone, as all estimates were made at first."""
    call, rates = row.call, RATES[name]
    if row.kind.startswith("XLA"):  # which loads as it likes, and of which elements are no products
        rates = replace(rates, cores=1, cache=0.0)
        call = replace(call, flops=call.flops if row.kind == PRODUCTS else 0)
    _, seconds, overhead = roofline.bound_of(call, rates, "bfloat16")
    return seconds + overhead


if __name__ == "__main__":
    main()
