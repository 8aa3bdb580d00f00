"""The measurements of runs as one tidy table: a row for every step, seed and arm."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tim_jax.app.config import toml
from tim_jax.app.run import folders
from tim_jax.app.run.loggers import read_lines
from tim_jax.common import inputs
from tim_jax.common.errors import InputError
from tim_jax.instruments.study import running

KEYS = ("arm", "seed", "step")


class RunLines(NamedTuple):
    """What one run has written so far."""

    arm: str
    seed: int
    folder: Path
    lines: list[dict[str, Any]]  # of metrics.jsonl
    finished: bool
    note: str = ""  # why there is nothing, or not all


def load(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """A study's or a run's table as columns of one length, for `pandas.DataFrame` or `polars`.

    `arm` (text), `seed` and `step` (i64) name a row; every metric of metrics.jsonl is a column
    f64, NaN where a step has none. Unfinished runs are there as far as they came. A run folder by
    itself is an arm named like the folder.

    Raises:
        InputError: the folder holds neither a study nor a run.
    """
    runs = read_runs(Path(folder))
    rows = [(run, line) for run in runs for line in run.lines]
    names = dict.fromkeys(
        name for _, line in rows for name in line if name not in KEYS and _is_number(line[name])
    )
    table: dict[str, np.ndarray] = {
        "arm": np.array([run.arm for run, _ in rows], dtype=str),
        "seed": np.array([run.seed for run, _ in rows], np.int64),
        "step": np.array([line["step"] for _, line in rows], np.int64),
    }
    for name in names:
        values = (line.get(name, "nan") for _, line in rows)
        table[name] = np.array([float(v) if _is_number(v) else np.nan for v in values], np.float64)
    return table


def read_runs(folder: Path) -> list[RunLines]:
    """The runs of a study's folder in the study's order, or the one run that a folder is.

    Raises:
        InputError: the folder holds neither.
    """
    if (folder / "study.json").is_file():
        return [_of_study(one) for one in running.read_stated(folder).runs]
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder} holds neither a study (study.json) nor a run (config.toml)")
    return [_read(folder.resolve().name, 0, folder)]


def _of_study(one: running.Planned) -> RunLines:
    if not (one.folder / "config.toml").is_file():
        return RunLines(one.arm, one.seed, one.folder, [], False, "not begun")
    read = _read(one.arm, one.seed, one.folder)
    return read._replace(note="ended: not finite") if one.ended.exists() else read


def _read(arm: str, seed: int, folder: Path) -> RunLines:
    """A run that cannot be read is there without lines; its note says why."""
    try:
        config = toml.load(folder / "config.toml")
    except InputError as error:
        return RunLines(arm, seed, folder, [], False, f"of another version: {error}")
    seed = config.seed
    try:
        lines = list(_checked(read_lines(folder / "metrics.jsonl"), folder / "metrics.jsonl"))
    except InputError as error:
        return RunLines(arm, seed, folder, [], False, f"{error}")
    done = folders.finished(folder)
    last = lines[-1]["step"] if lines else 0
    note = "" if done else f"unfinished: {last} of {config.steps} steps"
    return RunLines(arm, seed, folder, lines, done, note)


def _checked(lines: Iterable[dict[str, Any]], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        step = line.get("step")
        long = any(isinstance(x, int) and inputs.wrong_number(x) for x in line.values())
        if long or not isinstance(step, int) or step < 0:
            said = inputs.shown(line)
            raise InputError(f"{path}, line {number}: not what a run writes of a step: {said}")
        yield line


def _is_number(value: Any) -> bool:
    """Non-finite numbers are written as text, see `loggers.JsonLines`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number or value in ("nan", "inf", "-inf")


def values(lines: Sequence[dict[str, Any]], metric: str) -> np.ndarray:
    """f64[N], a metric's values of the steps that have it, in their order."""
    return np.array([float(x[metric]) for x in lines if _is_number(x.get(metric))], np.float64)
