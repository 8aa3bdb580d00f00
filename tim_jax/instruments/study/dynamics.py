"""How a mismatch changes along a training run, and what changes with it.

Two series that both rise have a high correlation whatever they have to do with each other. So each
correlation is given twice: of the values, which says whether both rise or fall over the run, and of
their changes from one group of steps to the next, which says whether they move together.
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from scipy import stats

from tim_jax.instruments.study.findings import Table

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


def tables(table: Mapping[str, np.ndarray]) -> list[Table]:
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
    found = []
    for seed in dict.fromkeys(table["seed"][table["arm"] == arm].tolist()):
        rows = np.flatnonzero((table["arm"] == arm) & (table["seed"] == seed))
        found.append(rows[np.argsort(table["step"][rows], kind="stable")])
    return found


def _groups(table: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray] | None:
    """Metric -> means of groups of steps, of a run with a mismatch in every group."""
    rows = rows[np.isfinite(table[MISMATCH][rows])]
    count = min(_GROUPS, len(rows) // _LEAST)
    if count < 3:
        return None
    parts = np.array_split(rows, count)
    found = {}
    for name in (MISMATCH, *COMPANIONS):
        if name in table and all(np.isfinite(table[name][part]).any() for part in parts):
            found[name] = np.array([np.nanmean(_finite(table[name][part])) for part in parts])
    return found if (found[MISMATCH] > 0).all() else None


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)


def _change(runs: list[dict[str, np.ndarray]]) -> list[str]:
    tenth = [max(1, len(run[MISMATCH]) // 10) for run in runs]
    first = np.array([run[MISMATCH][:n].mean() for run, n in zip(runs, tenth, strict=True)])
    last = np.array([run[MISMATCH][-n:].mean() for run, n in zip(runs, tenth, strict=True)])
    highest = np.array([run[MISMATCH].max() for run in runs])
    return [
        f"{first.mean():.3g}",
        f"{last.mean():.3g}",
        _spread(list(last / first)),
        _spread(list(highest / first)),
    ]


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
