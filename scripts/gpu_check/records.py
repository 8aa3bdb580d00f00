"""A part's cases, run one by one within a time budget, each recorded as soon as it is done."""

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, MEASURED, RUNNING, LEFT = "passed", "FAILED", "measured", "running", "not run"


@dataclass(frozen=True)
class Case:
    """One thing to look at. `run` returns values to show; its "passed" is the verdict, if any."""

    name: str
    run: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """What came of a case."""

    name: str
    status: str
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


class Ledger:
    """A part's records, in a file that is whole after every case."""

    def __init__(self, path: Path):
        self.path = path
        self.records: dict[str, Record] = {}
        if path.exists():
            rows = json.loads(path.read_text())
            self.records = {row["name"]: Record(**row) for row in rows}

    def put(self, record: Record) -> None:
        self.records[record.name] = record
        self._write()

    def _write(self) -> None:
        partial = self.path.with_suffix(".partial")
        rows = [asdict(r) for r in self.records.values()]
        partial.write_text(json.dumps(rows, indent=1, default=str))
        partial.replace(self.path)

    def forget(self, *statuses: str) -> None:
        """Drops the records of these statuses: another call is to try them again."""
        kept = {name: r for name, r in self.records.items() if r.status not in statuses}
        if kept != self.records:
            self.records = kept
            self._write()

    def bury_the_dead(self) -> list[str]:
        """A case that was running when its process ended has failed. Returns their names."""
        dead = [r for r in self.records.values() if r.status == RUNNING]
        for record in dead:
            self.put(Record(record.name, FAILED, reason="the process ended while it ran"))
        return [record.name for record in dead]


def run_cases(cases: Iterable[Case], ledger: Ledger, *, seconds: float) -> Iterator[Record]:
    """Runs what has no record yet, until `seconds` are over; what is left is recorded as such.

    A case that raises is a failed case, with its reason; the next one runs all the same. Yields the
    records of what was run.
    """
    start = time.perf_counter()
    cases = list(cases)
    for case in cases:  # so that a process that is killed leaves no case without a record
        if case.name not in ledger.records:
            ledger.put(Record(case.name, LEFT, reason="the part ended before it"))
    for case in cases:
        known = ledger.records.get(case.name)
        if known is not None and known.status not in (LEFT, RUNNING):
            continue
        if time.perf_counter() - start > seconds:
            ledger.put(Record(case.name, LEFT, reason=f"the part's {seconds:.0f} s were over"))
            continue
        ledger.put(Record(case.name, RUNNING))
        began = time.perf_counter()
        try:
            values = dict(case.run())
            verdict = values.pop("passed", None)
            status = MEASURED if verdict is None else PASSED if verdict else FAILED
            record = Record(case.name, status, values=values)
        except Exception as error:  # whatever goes wrong belongs in the table
            record = Record(case.name, FAILED, reason=_reason(error))
        seconds_taken = time.perf_counter() - began
        record = Record(record.name, record.status, seconds_taken, record.values, record.reason)
        ledger.put(record)
        yield record


def _reason(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {where}: {' '.join(str(error).split())[:400]}"


def line(record: Record) -> str:
    """A record on one line."""
    shown = "; ".join(f"{name} {show(value)}" for name, value in record.values.items())
    return f"{record.status:>9}  {record.name}  {shown}{record.reason}  ({record.seconds:.1f} s)"


def show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
