"""scripts/gpu_check: its bookkeeping, and slowly all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def records(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS / "gpu_check"))
    import records

    return records


def test_a_case_that_raises_is_one_failed_case_with_its_reason(records, tmp_path):
    def broken():
        raise RuntimeError("no such\nkernel")

    ledger = records.Ledger(tmp_path / "part.json")
    cases = [
        records.Case("good", lambda: {"passed": True, "tokens": 3}),
        records.Case("broken", broken),
        records.Case("unequal", lambda: {"passed": False}),
        records.Case("rate", lambda: {"tokens/s": 5.0}),
    ]
    list(records.run_cases(cases, ledger, seconds=60))
    found = {r.name: r for r in records.Ledger(tmp_path / "part.json").records.values()}
    statuses = {name: record.status for name, record in found.items()}
    assert statuses == {
        "good": "passed",
        "broken": "FAILED",
        "unequal": "FAILED",
        "rate": "measured",
    }
    assert "RuntimeError at test_gpu_check.py" in found["broken"].reason
    assert "no such kernel" in found["broken"].reason
    assert found["good"].values == {"tokens": 3}


def test_a_second_call_runs_only_what_is_left(records, tmp_path):
    ran = []

    def case(name):
        return records.Case(name, lambda: ran.append(name) or {"passed": True})

    cases = [case("a"), case("b"), case("c")]
    path = tmp_path / "part.json"
    list(records.run_cases(cases[:1], records.Ledger(path), seconds=60))
    list(records.run_cases(cases, records.Ledger(path), seconds=-1))
    assert ran == ["a"]
    left = [r.status for r in records.Ledger(path).records.values()]
    assert left == ["passed", "not run", "not run"]
    list(records.run_cases(cases, records.Ledger(path), seconds=60))
    assert ran == ["a", "b", "c"]


def test_a_case_whose_process_died_has_failed_and_is_not_run_again(records, tmp_path):
    ledger = records.Ledger(tmp_path / "part.json")
    ledger.put(records.Record("crash", records.RUNNING))
    again = records.Ledger(tmp_path / "part.json")
    assert again.bury_the_dead() == ["crash"]
    ran = []
    cases = [records.Case("crash", lambda: ran.append(1) or {}), records.Case("next", dict)]
    list(records.run_cases(cases, again, seconds=60))
    assert ran == []
    statuses = [r.status for r in records.Ledger(tmp_path / "part.json").records.values()]
    assert statuses == ["FAILED", "measured"]


def check(*arguments, seconds):
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(SCRIPTS / "gpu_check.sh"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=seconds, check=False
    )


def test_an_unknown_part_is_refused(tmp_path):
    found = check("--smoke", "--only", "kernel", "--out", str(tmp_path), seconds=120)
    assert found.returncode == 2
    assert "'kernel'" in found.stdout
    assert "exactness, accuracy, kernels, speed" in found.stdout


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_at_small_sizes(tmp_path):
    found = check("--smoke", "--out", str(tmp_path), seconds=3600)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert set(content["parts"]) == {"exactness", "accuracy", "kernels", "speed", "torch"}
    for name, rows in content["parts"].items():
        assert rows, name
        assert not [r for r in rows if r["status"] not in ("passed", "measured")], name
    assert sum(r["status"] == "passed" for r in content["parts"]["exactness"]) >= 4
    assert len(list(tmp_path.iterdir())) <= 8  # which are carried from the machine
    page = (tmp_path / "gpu.md").read_text()
    assert found.stdout.rstrip().endswith(page.rstrip())
    assert "smoke run" in page
