"""A study's folder: what was stated, its runs, and what they wrote.

study.json          the study as it was stated before its first run
started.json        when that was
runs/ARM/seed-N/    an ordinary run folder
runs/ARM/seed-N.toml, seed-N.log

Each run is a process of its own, several side by side, all resumable. `load` gives the measurements
of all runs as one tidy table: a row for every step, seed and arm.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from tim_jax.app.config import toml
from tim_jax.app.run import folders
from tim_jax.app.run.loggers import read_lines
from tim_jax.app.run.signals import Preemption
from tim_jax.common import errors, inputs
from tim_jax.common.errors import InputError, PreemptedError, did_you_mean, writing
from tim_jax.instruments.study.definition import Arm, GradientStudy, Study
from tim_jax.model.files import write_json

_POLL = 0.2  # seconds
_SAY = 30.0  # seconds after which each run's last line is repeated
KEYS = ("arm", "seed", "step")  # of a row
_BUSY = "is in use by"  # what a run says whose folder another process has

KINDS: Mapping[str, type[Study] | type[GradientStudy]] = MappingProxyType(
    {"training": Study, "gradient": GradientStudy}
)

_STUDY = TypeAdapter(dict[str, Any])
_ARMS = TypeAdapter(tuple[Arm, ...])
_SEEDS = TypeAdapter(tuple[int, ...])


class Planned(NamedTuple):
    """One run of a study."""

    arm: str
    seed: int
    folder: Path

    @property
    def ended(self) -> Path:
        """The file that says that the run ended early, and how."""
        return self.folder / "ended.json"

    @property
    def done(self) -> bool:
        """Whether there is nothing left to run, to export or to draw."""
        drawn = (self.folder / "chart.png").exists()  # after the export, the last that a run does
        return self.ended.exists() or (drawn and folders.finished(self.folder))


@dataclass(frozen=True)
class Stated:
    """A study with its arms, as it is kept in its folder."""

    study: Any  # of one of `KINDS`
    arms: tuple[Arm, ...]
    folder: Path
    seeds: tuple[int, ...]

    @property
    def runs(self) -> tuple[Planned, ...]:
        """Seed by seed, so that a study that is cut short has whole comparisons."""
        return tuple(
            Planned(arm.name, seed, self.folder / "runs" / arm.name / f"seed-{seed}")
            for seed in self.seeds
            for arm in self.arms
        )


def state(study: Any, arms: Sequence[Arm], folder: Path, *, seeds: Sequence[int]) -> Stated:
    """Writes down what the study is, before it runs, or compares with what was written before.

    Raises:
        InputError: the folder has another study, or something else; it cannot be written.
    """
    stated = Stated(study, tuple(arms), folder, tuple(seeds))
    record = _record(stated)
    path = folder / "study.json"
    if path.exists():
        before = read_record(folder)
        for key in sorted({*record, *before}):
            if record.get(key) != before.get(key):
                raise InputError(
                    f"{folder} holds a study that was stated with another {key}; give the changed"
                    " study another folder (--folder)"
                )
        folders.record_start(folder)  # where there was no room for it the first time
        return stated
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        if strangers := sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")):
            raise InputError(f"{folder} is not empty and holds no study, but {strangers[0]}")
        write_json(path, record)
    folders.record_start(folder)
    return stated


def _record(stated: Stated) -> dict[str, Any]:
    study = stated.study.model_dump(mode="json", exclude_none=True)
    keys = ("name", "divergent", "control", "uncontrolled", "run")
    arms = [{key: getattr(arm, key) for key in keys} for arm in stated.arms]
    return json.loads(json.dumps({"study": study, "seeds": stated.seeds, "arms": arms}))


def read_record(folder: Path) -> dict[str, Any]:
    """Returns study.json of a study's folder.

    Raises:
        InputError: it is not there, or damaged.
    """
    path = folder / "study.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{folder} holds no study: cannot read {path}: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{path} is damaged: {inputs.shown(record)} is not an object")
    return record


def run(stated: Stated, *, jobs: int, say: Callable[[str], None]) -> None:
    """Runs what is not done yet, `jobs` processes at a time, and returns when all is.

    A run whose process fails does not stop the others; the first failure is raised at the end.

    Raises:
        InputError: runs failed; the line names the first one and its log.
        PreemptedError: the system asked this process to end; the runs were saved.
    """
    waiting = [one for one in stated.runs if not one.done]
    say(f"{len(stated.runs)} runs, {len(stated.runs) - len(waiting)} of them done")
    configs = {arm.name: arm for arm in stated.arms}
    failed: list[str] = []
    running: dict[Planned, _Running] = {}
    said = time.monotonic()
    with Preemption() as preemption:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    one = waiting.pop(0)
                    number = len(stated.runs) - len(waiting)
                    say(f"{one.arm}, seed {one.seed}: begins, {number} of {len(stated.runs)}")
                    running[one] = _start(one, configs[one.arm], stated.folder)
                time.sleep(_POLL)
                for one in [one for one in running if running[one].process.poll() is not None]:
                    ended = running.pop(one)
                    ended.log.close()
                    outcome = _ended(one, ended)
                    if outcome == _BUSY:
                        waiting.append(one)  # a process of an earlier call still works on it
                        time.sleep(_POLL * 5)
                    elif outcome:
                        failed.append(outcome)
                    say(f"{one.arm}, seed {one.seed}: {outcome or 'done'}")
                if time.monotonic() - said > _SAY:
                    said = time.monotonic()
                    for one in running:
                        say(f"{one.arm}, seed {one.seed}: {_last_line(one) or 'starting'}")
                if preemption.asked:
                    raise PreemptedError("asked to end; the same command goes on")
        finally:
            _stop(running)
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise InputError(f"study: {failed[0]}{more}; the same command tries again")


class _Running(NamedTuple):
    """The process of a run, and its log, which has `before` bytes of earlier ones."""

    process: subprocess.Popen
    log: IO
    before: int


def _start(one: Planned, arm: Arm, study: Path) -> _Running:
    began = folders.read_start(study)
    config = arm.config(one.seed, one.folder)
    path, log = one.folder.with_suffix(".toml"), one.folder.with_suffix(".log")
    try:
        one.folder.mkdir(parents=True, exist_ok=True)
        if began is not None:  # all arms have the prompts of one day
            folders.record_start(one.folder, began)
        path.write_text(toml.dump(config), encoding="utf-8")
        file = open(log, "ab")  # noqa: SIM115
        before = log.stat().st_size
    except OSError as error:
        raise InputError(f"cannot write {error.filename}: {error.strerror}") from error
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(_command(path), stdout=file, stderr=file, stdin=quiet)
    return _Running(process, file, before)


def _command(path: Path) -> list[str]:
    return [sys.executable, "-m", "tim_jax", "train", str(path)]


def _ended(one: Planned, ended: _Running) -> str:
    """ "" if the run is done, else what to say of it."""
    log, status = one.folder.with_suffix(".log"), ended.process.returncode
    if status == 0 and one.done:
        return ""
    last = _last_line(one)
    if status == errors.NOT_FINITE.status:
        with writing(one.ended):
            write_json(one.ended, {"status": status, "line": last})
        return ""
    # Not the last line alone: the process that has the folder writes to the same log.
    if _BUSY.encode() in log.read_bytes()[ended.before :]:
        return _BUSY
    return f"the run of {one.arm}, seed {one.seed}, ended with status {status}: {last} ({log})"


def _last_line(one: Planned) -> str:
    log = one.folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
    lines = log.strip().splitlines()
    return lines[-1] if lines else ""


def _stop(running: dict[Planned, _Running]) -> None:
    """Lets runs that are under way save their step and end."""
    for each in running.values():
        each.process.terminate()
    for each in running.values():
        each.process.wait()
        each.log.close()


def read(path: Path) -> Study | GradientStudy:
    """A study's file.

    Raises:
        InputError: it cannot be read; a key or a value is wrong. One line.
    """
    return _validate({"name": path.stem, **toml.read_toml(path)}, str(path))


def read_stated(folder: Path) -> Stated:
    """The study of a folder, as it was stated.

    Raises:
        InputError: there is none, it is damaged, or another version of the library wrote it.
    """
    record, source = read_record(folder), f"{folder / 'study.json'}"
    try:
        study = _validate(_STUDY.validate_python(record.get("study")), source)
        arms = _ARMS.validate_python(record.get("arms"))
        seeds = _SEEDS.validate_python(record.get("seeds"))
    except (ValidationError, InputError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise InputError(f"{source} is of another version of this library: {first}") from error
    return Stated(study, arms, folder, seeds)


def _validate(data: Mapping[str, Any], source: str) -> Study | GradientStudy:
    kind = str(data.get("kind", "training"))
    if kind not in KINDS:
        raise InputError(f"{source}: kind = {kind!r}: unknown{did_you_mean(kind, KINDS)}")
    return toml.validated(KINDS[kind], data, source=source)


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
        column = (line.get(name, "nan") for _, line in rows)
        table[name] = np.array([float(x) if _is_number(x) else np.nan for x in column], np.float64)
    return table


def read_runs(folder: Path) -> list[RunLines]:
    """The runs of a study's folder in the study's order, or the one run that a folder is.

    Raises:
        InputError: the folder holds neither.
    """
    if (folder / "study.json").is_file():
        return [_read_planned(one) for one in read_stated(folder).runs]
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder} holds neither a study (study.json) nor a run (config.toml)")
    return [_read(folder.resolve().name, 0, folder)]


def _read_planned(one: Planned) -> RunLines:
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
        lines = list(_check(read_lines(folder / "metrics.jsonl"), folder / "metrics.jsonl"))
    except InputError as error:
        return RunLines(arm, seed, folder, [], False, f"{error}")
    done = folders.finished(folder)
    last = lines[-1]["step"] if lines else 0
    note = "" if done else f"unfinished: {last} of {config.steps} steps"
    return RunLines(arm, seed, folder, lines, done, note)


def _check(lines: Iterable[dict[str, Any]], path: Path) -> Iterator[dict[str, Any]]:
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
