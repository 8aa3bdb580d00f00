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
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError

from tim_jax.app.config import toml
from tim_jax.app.run import folders
from tim_jax.app.run.loggers import read_lines
from tim_jax.common import errors, inputs
from tim_jax.common.errors import InputError, PreemptedError, did_you_mean, writing
from tim_jax.common.machine import Preemption
from tim_jax.instruments.study.definition import Arm, GradientStudy, Study
from tim_jax.model.files import read_json, write_json, write_text

_POLL = 0.2  # seconds
_SAY = 30.0  # seconds after which each run's last line is repeated
_AGAIN = 30.0  # seconds after which a run is tried again whose folder another process has
KEYS = ("arm", "seed", "step")  # of a row
_BUSY = "is in use by"  # what a run says whose folder another process has
_ENDED = "ended.json"  # says that a run ended early, and how

KINDS: Mapping[str, type[Study] | type[GradientStudy]] = MappingProxyType(
    {"training": Study, "gradient": GradientStudy}
)


class Planned(NamedTuple):
    """One run of a study."""

    arm: str
    seed: int
    folder: Path

    @property
    def log(self) -> Path:
        """What the run's processes say."""
        return self.folder.with_suffix(".log")

    @property
    def done(self) -> bool:
        """Whether there is nothing left to run, to export or to draw."""
        drawn = (self.folder / "chart.png").exists()  # after the export, the last that a run does
        return (self.folder / _ENDED).exists() or (drawn and folders.finished(self.folder))

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}"


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
    """Writes down what the study is, before it runs; refuses a folder that has something else."""
    said = {
        "study": study.model_dump(mode="json", exclude_none=True),
        "seeds": seeds,
        "arms": [asdict(arm) for arm in arms],
    }
    record, path = json.loads(json.dumps(said)), folder / "study.json"
    if path.exists():
        before = read_json(path)
        for key in sorted({*record, *before}):
            if record.get(key) != before.get(key):
                raise InputError(
                    f"{folder} holds a study that was stated with another {key}; give the changed"
                    " study another folder (--folder)"
                )
    else:
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            if strangers := sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")):
                raise InputError(f"{folder} is not empty and holds no study, but {strangers[0]}")
            write_json(path, record)
    folders.record_start(folder)  # at the latest now, if there was no room for it the first time
    return Stated(study, tuple(arms), folder, tuple(seeds))


def run(stated: Stated, *, jobs: int, say: Callable[[str], None]) -> None:
    """Runs what is not done yet, `jobs` processes at a time, and returns when all is.

    A run whose process fails does not stop the others; the first failure is raised at the end.

    Raises:
        InputError: runs failed; the line names the first one and its log.
        PreemptedError: the system asked this process to end; the runs were saved.
    """
    waiting = [one for one in stated.runs if not one.done]
    say(f"{len(stated.runs)} runs, {len(stated.runs) - len(waiting)} of them done")
    arms = {arm.name: arm for arm in stated.arms}
    failed: list[str] = []
    running: dict[Planned, _Running] = {}
    busy: dict[Planned, float] = {}  # until when a run is not tried again
    said = time.monotonic()
    with Preemption() as preemption:
        try:
            while waiting or running:
                free = [one for one in waiting if busy.get(one, 0.0) <= time.monotonic()]
                for one in free[: jobs - len(running)]:
                    waiting.remove(one)
                    number = len(stated.runs) - len(waiting)
                    if one not in busy:
                        say(f"{one}: begins, {number} of {len(stated.runs)}")
                    running[one] = _start(one, arms[one.arm], stated.folder)
                time.sleep(_POLL)
                for one in [one for one in running if running[one].process.poll() is not None]:
                    ended = running.pop(one)
                    ended.log.close()
                    outcome = _ended(one, ended)
                    if outcome == _BUSY:  # a process of another call works on it
                        waiting.append(one)
                        if one not in busy:
                            say(f"{one}: another process has it; tried again until that has ended")
                        busy[one] = time.monotonic() + _AGAIN
                        continue
                    if outcome:
                        failed.append(outcome)
                    say(f"{one}: {outcome or 'done'}")
                if time.monotonic() - said > _SAY:
                    said = time.monotonic()
                    for one in running:
                        say(f"{one}: {_last_line(one) or 'starting'}")
                if preemption.asked:
                    raise PreemptedError("asked to end; the same command goes on")
        finally:
            _stop(running.values())
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
    path = one.folder.with_suffix(".toml")
    try:
        one.folder.mkdir(parents=True, exist_ok=True)
        if began is not None:  # all arms have the prompts of one day
            folders.record_start(one.folder, began)
        write_text(path, toml.dump(arm.config(one.seed, one.folder)))
        log = open(one.log, "ab")  # noqa: SIM115
        before = one.log.stat().st_size
    except OSError as error:
        raise InputError(f"cannot write {error.filename}: {error.strerror}") from error
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(_command(path), stdout=log, stderr=log, stdin=quiet)
    return _Running(process, log, before)


def _command(path: Path) -> list[str]:
    return [sys.executable, "-m", "tim_jax", "train", str(path)]


def _ended(one: Planned, ended: _Running) -> str:
    """ "" if the run is done, else what to say of it."""
    status = ended.process.returncode
    # Another call's process may write to the same log: the one that has the folder, or one that is
    # refused because this process has it.
    lines = one.log.read_bytes()[ended.before :].decode(errors="replace").splitlines()
    lines = [line for line in lines if f"process {ended.process.pid} on " not in line]
    last = lines[-1] if lines else ""
    if status == 0 and one.done:
        return ""
    if status == errors.NOT_FINITE.status:
        path = one.folder / _ENDED
        with writing(path):
            write_json(path, {"status": status, "line": last})
        return ""
    if any(_BUSY in line for line in lines):
        return _BUSY
    how = f"ended with status {status}"
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
        how += ", as where memory is short" if status == -signal.SIGKILL else ""
    return f"the run of {one}, {how}: {last} ({one.log})"


def _last_line(one: Planned) -> str:
    lines = one.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _stop(running: Iterable[_Running]) -> None:
    """Lets runs that are under way save their step and end."""
    for each in running:
        each.process.terminate()
    for each in running:
        each.process.wait()
        each.log.close()


def read(path: Path) -> Study | GradientStudy:
    """A study's file, or an `InputError` of one line about what is wrong with it."""
    return _validate({"name": path.stem, **toml.read_toml(path)}, str(path))


class _Record(BaseModel):
    """What study.json holds."""

    study: dict[str, Any]
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]


def read_stated(folder: Path) -> Stated:
    """The study of a folder, as it was stated; refuses what another version has written."""
    path = folder / "study.json"
    record = read_json(path)
    try:
        kept = _Record.model_validate(record)
        study = _validate(kept.study, str(path))
    except (ValidationError, InputError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise InputError(f"{path} is of another version of this library: {first}") from error
    return Stated(study, kept.arms, folder, kept.seeds)


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
    lines: Sequence[dict[str, Any]] = ()  # of metrics.jsonl
    finished: bool = False
    note: str = ""  # why there is nothing, or not all


def load(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """A study's or a run's table as columns of one length, for `pandas.DataFrame` or `polars`.

    `arm` (text), `seed` and `step` (i64) name a row; every metric of metrics.jsonl is a column
    f64, NaN where a step has none. Unfinished runs are there as far as they came. A run folder by
    itself is an arm named like the folder.

    Raises:
        InputError: the folder holds neither a study nor a run.
    """
    return as_table(read_runs(Path(folder)))


def as_table(runs: Iterable[RunLines]) -> dict[str, np.ndarray]:
    """The table of these runs, as `load` gives it."""
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
    """The runs of a study's folder in its order, or the one that it is; refuses other folders."""
    if (folder / "study.json").is_file():
        return [_read(RunLines(*one)) for one in read_stated(folder).runs]
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder} holds neither a study (study.json) nor a run (config.toml)")
    return [_read(RunLines(folder.resolve().name, 0, folder))]


def _read(run: RunLines) -> RunLines:
    """The run with its lines. One that cannot be read has none, and a note that says why."""
    path = run.folder / "metrics.jsonl"
    if not (run.folder / "config.toml").is_file():
        return run._replace(note="not begun")
    try:
        config = toml.load(run.folder)
    except InputError as error:
        return run._replace(note=f"of another version: {error}")
    run = run._replace(seed=config.seed)
    try:
        lines = list(_check(read_lines(path), path))
    except InputError as error:
        return run._replace(note=str(error))
    done = folders.finished(run.folder)
    last = lines[-1]["step"] if lines else 0
    note = "" if done else f"unfinished: {last} of {config.steps} steps"
    note = "ended: not finite" if (run.folder / _ENDED).exists() else note
    return run._replace(lines=lines, finished=done, note=note)


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
