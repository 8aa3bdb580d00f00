"""Cases, run one by one until the time is over, each recorded as soon as it is done.

Several processes may work on the same cases: each takes the next one that nobody has.
"""

import fcntl
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

PASSED, FAILED, MEASURED, RUNNING, LEFT = "passed", "FAILED", "measured", "running", "not run"


@dataclass(frozen=True)
class Case:
    """One thing to look at. `run` returns values to show; its "passed" is the verdict, if any.

    Cases of a group share compiled programs, so that one process does well to run them all.
    """

    name: str
    run: Callable[[], dict[str, Any]]
    group: str = ""
    part: str = ""


@dataclass(frozen=True)
class Record:
    """What came of a case."""

    part: str
    name: str
    status: str
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    process: int = 0  # that runs it, or did


Key = tuple[str, str]  # part and name


class Ledger:
    """Records of all parts, a line each in one file: the last line of a case is what is known."""

    def __init__(self, path: Path):
        self.path = path

    def records(self) -> dict[Key, Record]:
        """What is known of each case, in the order in which they were first named."""
        if not self.path.exists():
            return {}
        with self._locked() as file:
            return _read(file)

    def put(self, record: Record) -> None:
        with self._locked() as file:
            _write(file, record)

    def announce(self, cases: Sequence[Case]) -> None:
        """Names what is to come, so that a process that is killed leaves no case unknown."""
        with self._locked() as file:
            known = _read(file)
            for case in cases:
                if (case.part, case.name) not in known:
                    _write(file, Record(case.part, case.name, LEFT, reason="time was over before"))

    def claim(self, cases: Sequence[Case], group: str = "") -> Case | None:
        """Takes the next case that has no result, if any: one of `group` if there is one.

        Otherwise the first of a group at which no other process works, or else the first.
        """
        with self._locked() as file:
            known = _read(file)
            by_key = {(case.part, case.name): case for case in cases}
            free = [case for key, case in by_key.items() if _is_free(known.get(key))]
            busy = {by_key[key].group for key, r in known.items() if _is_busy(r) and key in by_key}
            kinds = (
                [case for case in free if group and case.group == group],
                [case for case in free if not case.group or case.group not in busy],
                free,
            )
            chosen = next((some[0] for some in kinds if some), None)
            if chosen is not None:
                _write(file, Record(chosen.part, chosen.name, RUNNING, process=os.getpid()))
            return chosen

    def forget(self, parts: Sequence[str], *statuses: str) -> set[str]:
        """Drops records of these parts and statuses, to be tried again; the parts that had some."""
        with self._locked() as file:
            found = list(_read(file).values())
            dropped = [r for r in found if r.part in parts and r.status in statuses]
            file.truncate(0)
            for record in found:
                if record not in dropped:
                    _write(file, record)
            return {record.part for record in dropped}

    def close(self, process: int, status: str, reason: str) -> list[str]:
        """Gives this status to what was running when the process ended. Returns the names."""
        running = [r for r in self.records().values() if _is_busy(r) and r.process == process]
        for record in running:
            self.put(replace(record, status=status, reason=reason))
        return [record.name for record in running]

    @contextmanager
    def _locked(self) -> Iterator[TextIO]:
        """The file, at its end for writing, and nobody else in it."""
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


def _read(file: TextIO) -> dict[Key, Record]:
    file.seek(0)
    rows = [Record(**json.loads(line)) for line in file if line.endswith("\n")]
    return {(row.part, row.name): row for row in rows}


def _write(file: TextIO, record: Record) -> None:
    file.write(json.dumps(asdict(record), default=str) + "\n")
    file.flush()


def _is_free(record: Record | None) -> bool:
    return record is None or record.status == LEFT


def _is_busy(record: Record) -> bool:
    return record.status == RUNNING


def run_cases(cases: Sequence[Case], ledger: Ledger, *, until: float) -> Iterator[Record]:
    """Runs cases that have no result, the first ones first, and begins none after `until`.

    `until` is a reading of `time.monotonic`. A case that raises is a failed case, with its reason;
    the next one runs all the same. Yields the records of what was run.
    """
    ledger.announce(cases)
    group = ""
    while time.monotonic() < until and (case := ledger.claim(cases, group)) is not None:
        group = case.group
        began = time.perf_counter()
        found = Record(case.part, case.name, MEASURED, process=os.getpid())
        try:
            values = dict(case.run())
            verdict = values.pop("passed", None)
            status = MEASURED if verdict is None else PASSED if verdict else FAILED
            found = replace(found, status=status, values=values)
        except Exception as error:  # whatever goes wrong belongs in the table
            found = _of_error(found, error)
        found = replace(found, seconds=round(time.perf_counter() - began, 2))
        ledger.put(found)
        yield found


def _of_error(record: Record, error: Exception) -> Record:
    """Failed, but for what is too large for this device: that is left out, and says so."""
    if "RESOURCE_EXHAUSTED" in str(error):
        return replace(record, values={"left out": f"too little memory: {str(error)[:200]}"})
    return replace(record, status=FAILED, reason=_reason(error))


def _reason(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:400]}"


def line(record: Record) -> str:
    """A record on one line."""
    text = f"{shown(record.values)}{record.reason}"
    return f"{record.status:>9}  {record.name}  {text}  ({record.seconds:.1f} s)"


def shown(values: Mapping[str, Any]) -> str:
    """Values by name; of a profile the kernels that take longest."""
    return "; ".join(f"{name}: {_show(value)}" for name, value in values.items())


def _show(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ", ".join(f"{row['name']} {row['ms']:.1f} ms" for row in value[:5])
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
