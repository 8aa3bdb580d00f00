"""scripts/gpu_check: its bookkeeping and its reference; slowly all of it. What benchmarks time."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.syspath_prepend(str(SCRIPTS / "gpu_check"))


@pytest.fixture
def records():
    import records

    return records


@pytest.fixture
def ledger(records, tmp_path):
    return records.Ledger(tmp_path / "ledger.jsonl")


def run(records, ledger, cases, seconds=60.0):
    return list(records.run_cases(cases, ledger, until=time.monotonic() + seconds))


def statuses(ledger):
    return {name: record.status for (_, name), record in ledger.records().items()}


def test_it_starts_where_there_is_no_more_than_it_asks_for():
    """An interpreter that has what the script's head names, and what these packages need."""
    text = " ".join((SCRIPTS / "gpu_check.sh").read_text().replace("#", "").split())
    [asked] = re.findall(r"an interpreter that has ([^;]+);", text)
    page = " ".join((SCRIPTS.parent / "docs" / "kernels.md").read_text().split())
    assert f"Python that has {asked}: `PYTHON=python3`" in page
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text())["project"]
    names = {re.split("[>=]", one)[0].replace("-", "_") for one in project["dependencies"]}
    needed = {"ml_dtypes", "orbax_checkpoint", "pyyaml", "scipy"}
    absent = names - set(re.split(r", | and ", asked)) - needed
    assert "transformers" in absent
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({absent}))  # to import one of them is an error
sys.path[:0] = ["scripts", "scripts/gpu_check"]
import accuracy, exactness, speed, whole
sys.argv = ["gpu_check", "--help"]
runpy.run_path("scripts/gpu_check", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=SCRIPTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--minutes" in done.stdout


def test_a_case_that_raises_is_one_failed_case_with_its_reason(records, ledger):
    def broken():
        raise RuntimeError("no such\nkernel")

    cases = [
        records.Case("good", lambda: {"passed": True, "tokens": 3}),
        records.Case("broken", broken),
        records.Case("unequal", lambda: {"passed": False}),
        records.Case("rate", lambda: {"tokens/s": 5.0}),
    ]
    run(records, ledger, cases)
    assert statuses(ledger) == {
        "good": "passed",
        "broken": "FAILED",
        "unequal": "FAILED",
        "rate": "measured",
    }
    found = ledger.records()
    assert "RuntimeError at test_gpu_check.py" in found["", "broken"].reason
    assert "no such kernel" in found["", "broken"].reason
    assert found["", "good"].values == {"tokens": 3}


def test_what_does_not_fit_is_left_out_and_no_failure(records, ledger):
    def large():
        raise MemoryError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")

    run(records, ledger, [records.Case("large", large)])
    (found,) = ledger.records().values()
    assert found.status == "measured"
    assert "too little memory: RESOURCE_EXHAUSTED" in found.values["left out"]


def test_a_second_call_runs_only_what_is_left(records, ledger):
    ran = []

    def case(name):
        return records.Case(name, lambda: ran.append(name) or {"passed": True})

    cases = [case("a"), case("b"), case("c")]
    run(records, ledger, cases[:1])
    run(records, ledger, cases, seconds=-1)
    assert ran == ["a"]
    assert list(statuses(ledger).values()) == ["passed", "not run", "not run"]
    run(records, ledger, cases)
    assert ran == ["a", "b", "c"]


def test_a_case_whose_process_died_has_failed_and_is_not_run_again(records, ledger):
    ran = []
    cases = [records.Case("crash", lambda: ran.append(1) or {}), records.Case("next", dict)]
    assert ledger.claim(cases).name == "crash"
    assert ledger.close(os.getpid() + 1, records.FAILED, "another's") == []
    assert ledger.close(os.getpid(), records.FAILED, "ended") == ["crash"]
    run(records, ledger, cases)
    assert ran == []
    assert statuses(ledger) == {"crash": "FAILED", "next": "measured"}
    assert ledger.forget([""], records.FAILED) == {""}
    assert ledger.forget([""], records.FAILED) == set()
    run(records, ledger, cases)
    assert ran == [1]


def test_a_stage_with_a_case_to_try_again_is_not_done(tmp_path):
    code = """
import runpy, sys
from pathlib import Path
sys.path[:0] = ["scripts", "scripts/gpu_check"]
import records
check = runpy.run_path("scripts/gpu_check")["Check"](Path(sys.argv[1]), True, 0.0, 1.0)
check.ledger.put(records.Record("kernels", "one", "passed"))
check.ledger.put(records.Record("kernels", "two", records.FAILED))
assert check._is_done(("kernels",))
check.again = check.ledger.forget(["kernels"], records.FAILED)
assert not check._is_done(("kernels",))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, cwd=SCRIPTS.parent, check=True)


def test_processes_share_cases_and_keep_to_a_group(records, ledger):
    cases = [records.Case(name, dict, group=name[0]) for name in ("a1", "a2", "b1", "b2")]
    assert ledger.claim(cases).name == "a1"
    assert ledger.claim(cases).name == "b1"  # another process: nobody works at b
    assert ledger.claim(cases, "b").name == "b2"
    assert ledger.claim(cases, "b").name == "a2"  # nothing else is left
    assert ledger.claim(cases) is None


def test_no_case_is_run_twice_by_two_processes(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[1]); import records\n"
        "cases = [records.Case(str(i), lambda: time.sleep(0.002) or {}) for i in range(40)]\n"
        "ledger = records.Ledger(Path(sys.argv[2]))\n"
        "print(len(list(records.run_cases(cases, ledger, until=time.monotonic() + 60))))"
    )
    command = [sys.executable, "-c", code, str(SCRIPTS / "gpu_check"), str(tmp_path / "ledger")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    counts = [int(process.communicate(timeout=60)[0]) for process in both]
    assert sum(counts) == 40


def test_what_compiles_while_it_is_timed_is_refused():
    import bench_common
    import setting

    program = jax.jit(lambda x: x * 3)
    inputs = itertools.chain([1.0], itertools.repeat(jnp.float32(1.0)))
    # The first value is weakly typed, and the second is not: another program.
    with pytest.raises(bench_common.CompiledError, match=r"timed while JAX compiled .*lambda"):
        setting.seconds(lambda: program(next(inputs)))
    assert setting.seconds(lambda: program(jnp.float32(1.0)), most=2) > 0
    fresh = jax.jit(lambda x: x * 5)
    calls = {"side": lambda: setting.once(lambda: fresh(2.0))}
    with pytest.raises(bench_common.CompiledError, match="side was timed"):
        bench_common.interleaved(calls, 2)
    assert len(bench_common.interleaved(calls, 2)["side"]) == 2


def test_parameters_made_on_a_device_are_those_of_an_update():
    import setting

    config = setting.Setting(smoke=True, out=Path()).small_model()
    params = setting.device_params(jax.random.key(0), config)
    assert {(leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(params)} == {
        (jnp.dtype("float32"), False)
    }


@pytest.mark.parametrize("smoke", [True, False])
def test_every_family_of_the_check_has_whole_tiles(smoke):
    import setting

    every = setting.Setting(smoke=smoke, out=Path())
    for config in every.families().values():
        for dtype in ("bfloat16", "float32"):
            every.fitted(config, replace(every.exact(dtype), interpret=True))


def test_kernels_of_a_profile_are_those_of_the_devices_streams():
    import profiles

    def line(name, *events):
        rows = [SimpleNamespace(name=n, duration_ns=1e6 * ms) for n, ms in events]
        return SimpleNamespace(name=name, events=rows)

    host = SimpleNamespace(name="/host:CPU", lines=[line("tf_XLA", ("Execute", 9.0))])
    streams = [
        line("Stream #13(Compute)", ("dot", 2.0), ("norm", 0.5), ("dot", 1.0)),
        line("Stream #14(MemcpyD2D)", ("MemcpyD2D", 1.0)),
        line("XLA Modules", ("jit_update", 7.0)),
    ]
    device = SimpleNamespace(name="/device:GPU:0", lines=streams)
    assert profiles.kernels([host, device]) == [
        {"name": "dot", "ms": 3.0, "calls": 2},
        {"name": "MemcpyD2D", "ms": 1.0, "calls": 1},
        {"name": "norm", "ms": 0.5, "calls": 1},
    ]


def test_whole_programs_are_named_once_and_exact_ones_compiled_ahead():
    import setting
    import speed

    full = setting.Setting(smoke=False, out=Path())
    names = [timed.name for timed in speed.plan(full)]
    assert len(set(names)) == len(names)
    assert names[0] == "sampler 1.7B exact, batch 64, 1,024 new tokens"
    ahead = [case.name for case in speed.programs(full)]
    assert len(set(ahead)) == len(ahead) > 10
    assert not [name for name in ahead if "native" in name]
    assert f"compile {names[0]}" in ahead


def test_predictions_are_of_the_programs_that_the_check_times():
    import calibrate
    import setting
    import speed

    full = setting.Setting(smoke=False, out=Path())
    names = {timed.name for timed in speed.plan(full) if timed.whole.side == "exact"}
    predicted = json.loads(calibrate.PREDICTED.read_text())["h200"]
    measured = json.loads(calibrate.ROWS.read_text())["h200"]["programs"]
    for found in predicted.values():
        assert set(found["cases"]) - set(measured) <= names
    cases = predicted[calibrate.MEASURED]["cases"]
    assert len(names - set(cases)) == 2  # profiles
    for name, seconds in measured.items():  # none of which is in a fit as a whole
        assert abs(sum(cases[name]["seconds"].values()) / seconds - 1) < 0.15, name


def test_the_page_of_devices_is_what_its_files_say():
    import gpu_page

    text = gpu_page.PAGE.read_text()
    measured = gpu_page.measured(sorted(gpu_page.FILES.glob("*.json")))
    assert gpu_page.common.between_marks(text, measured) == text
    assert "**0 of 97,810 tokens unequal**" in measured
    assert "| 19,265 | 15,525 | 1.24 |" in measured
    assert "| 18,807 | 11,852 | 1.59 |" in measured


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


@pytest.mark.slow(minutes=15)
def test_every_part_runs_on_a_cpu_at_small_sizes(tmp_path):
    found = check("--smoke", "--out", str(tmp_path), seconds=3600)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    content = json.loads((tmp_path / "gpu.json").read_text())
    parts = "programs", "exactness", "speed", "accuracy", "kernels", "controls", "products", "torch"
    assert tuple(content["parts"]) == parts
    for name, rows in content["parts"].items():
        assert rows, name
        assert not [r for r in rows if r["status"] not in ("passed", "measured")], name
    assert sum(r["status"] == "passed" for r in content["parts"]["exactness"]) >= 6
    assert len(list(tmp_path.iterdir())) <= 6  # which are carried from the machine
    page = (tmp_path / "gpu.md").read_text()
    assert found.stdout.rstrip().endswith(page.rstrip())
    assert "smoke run" in page
