"""Several real processes on this machine, over loopback, against one."""

import signal
import time

import jax
import numpy as np
import pytest
import tiny
from several import finished, started

from tim_jax.app.run import checkpoints
from tim_jax.app.run.loggers import read_lines
from tim_jax.common.errors import InputError
from tim_jax.placement import processes
from tim_jax.tasks.base import Example, Grade, SharedGrader

AGREE = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tim_jax import placement
from tim_jax.common.errors import InputError
from tim_jax.placement import processes
from tim_jax.app.run import checkpoints

index, address, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
processes.join(address, 2, index)
assert processes.leads() == (index == 0)
assert processes.texts("é" * (1 + 40 * index)) == ["é", "é" * 41]
assert processes.texts("") == ["", ""]
assert processes.led(lambda: [index, 0.1]) == [0, 0.1]
assert processes.any_of(index == 1) and not processes.any_of(False)
processes.agree("same", "nothing")
for what in (lambda: processes.agree(str(index), "its number"), lambda: processes.led(refuse)):
    def refuse():
        raise InputError("no such folder")
    try:
        what()
    except InputError as error:
        print(error)
mesh = Mesh(np.array(jax.devices()), ("x",))
split = NamedSharding(mesh, PartitionSpec("x"))
x = placement.put({"x": jax.numpy.arange(8.0)}, {"x": split})
assert processes.whole(x)["x"].tolist() == list(range(8))
kept = checkpoints.Checkpoints(folder, owner=index == 0)
kept.save(1, {"state": x}, {"note": "two"})
kept.save(2, {"state": jax.tree.map(lambda x: x + 1, x)}, {})
kept.save(2, {"state": x}, {})
kept.wait()
found = kept.restore({"state": x})
assert found.step == 2, found
assert processes.whole(found.state["state"])["x"].tolist() == list(range(1, 9))
kept.close()
"""


def test_two_processes_agree_and_share_a_checkpoint(tmp_path):
    """What each found is what both know; a checkpoint that both wrote is read by one process."""
    folder = tmp_path / "checkpoints"
    running = started(
        lambda index, address: ["-c", AGREE, str(index), address, str(folder)],
        count=2,
        devices=2,
        folder=tmp_path,
    )
    for status, out, err in finished(running, 120):
        assert status == 0, err
        assert "process 1 differs from process 0 in its number" in out
        assert "no such folder" in out
    like = {"state": {"x": jax.ShapeDtypeStruct((8,), np.float32)}}
    one = checkpoints.restore(folder, like, step=1)
    assert one.extra == {"note": "two"}
    assert one.state["state"]["x"].tolist() == list(range(8))


WAIT = """
import sys, time
from tim_jax.placement import processes
from tim_jax.app.run import signals

index, address = int(sys.argv[1]), sys.argv[2]
with signals.print_if_aborted("the others are gone"):
    processes.join(address, 2, index)
    print("joined", flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("dead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_only_waits_says_so_when_another_dies(tmp_path, dead):
    """JAX's coordination aborts it: at once when process 0 is gone, else when heartbeats stop."""
    running = started(
        lambda index, address: ["-c", WAIT, str(index), address],
        count=2,
        devices=1,
        folder=tmp_path,
    )
    for process in running:
        assert process.stdout.readline() == "joined\n"
    running[dead].kill()
    found = finished(running, 60)
    assert found[dead][0] == -signal.SIGKILL
    assert "the others are gone" not in found[dead][2]
    status, _, err = found[1 - dead]
    assert status == -signal.SIGABRT
    assert err.splitlines()[-1] == "the others are gone"
    assert "Fatal Python error: Aborted" in err


def test_only_an_abort_prints_the_line(tmp_path):
    for end, status in (("os._exit(3)", 3), ("sys.exit()", 0), ("os.kill(os.getpid(), 9)", -9)):
        code = f"""
import os, sys
from tim_jax.app.run import signals
with signals.print_if_aborted("the others are gone"):
    {end}
"""
        [(found, out, err)] = finished(
            started(lambda *_, code=code: ["-c", code], count=1, devices=1, folder=tmp_path)
        )
        assert (found, out, err) == (status, "", "")


def test_one_process_agrees_with_itself():
    assert processes.leads()
    assert processes.texts("x") == ["x"]
    assert processes.led(lambda: 3) == 3
    assert processes.any_of(True)
    assert not processes.any_of(False)
    processes.agree("x", "what")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:1", 2, None), "--coordinator, --processes and --process go together"),
        (("localhost:1", 2, 2), r"--process 2: must be in 0\.\.1"),
    ],
)
def test_bad_numbers_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        processes.join(*arguments)


@pytest.mark.parametrize("rows", [1, 4, 5, 7])
def test_graders_of_three_processes_grade_every_row_once(rows):
    seen = []

    def grade(examples, completions):
        seen.extend(completions)
        return [Grade(int(c) / 3, "error" if c == "2" else None) for c in completions]

    examples, completions = [Example("", "")] * rows, [str(i) for i in range(rows)]
    parts = []
    for index in range(3):
        SharedGrader(grade, index, 3, lambda text: parts.append(text) or [])(examples, completions)
    assert seen == completions
    whole = SharedGrader(lambda e, c: [], 0, 3, lambda _: parts)(examples, completions)
    assert whole == grade(examples, completions)


CHANGES = (
    "steps=4",
    "placement={fsdp = 2, tensor = 2}",
    "task.reward=shared_rewards:by_length",
    "run.checkpoint_every=2",
)
REWARDS = """
import time


def by_length(prompts, completions, answers):
    time.sleep({pause})
    return [len(completion) / 7 for completion in completions]
"""
# Put before REWARDS: process 0 takes so long to read what it seals a checkpoint with.
SLOW_SEAL = """
import time
from tim_jax.app.run import checkpoints


def slowly(path, read=checkpoints._crc):
    time.sleep(0.2)
    return read(path)


checkpoints._crc = slowly
"""
SAME = ("metrics.jsonl", "samples.jsonl", "model/model.safetensors")


def training(folder, run, *, count):
    """`count` processes of one run over four devices, one of it if `count` is 1."""

    def arguments(index, address):
        words = ["-m", "tim_jax", "train", "run.toml", f"run.folder={run}", *CHANGES]
        if count == 1:
            return words
        several = ["--coordinator", address, "--processes", str(count), "--process", str(index)]
        return [*words, *several]

    return started(arguments, count=count, devices=4 // count, folder=folder)


def prepared(folder):
    (folder / "run.toml").write_text(tiny.RUN)
    (folder / "shared_rewards.py").write_text(REWARDS.format(pause=0))
    return folder


@pytest.fixture
def work(tmp_path):
    return prepared(tmp_path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process, which met nothing."""
    folder = prepared(tmp_path_factory.mktemp("alone"))
    [(status, out, err)] = finished(training(folder, "run", count=1))
    assert status == 0, err
    assert "held-out reward before training" in out
    return folder / "run"


def lines_in(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def same_files(one, other):
    for name in SAME:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.slow
def test_a_run_of_four_processes_has_the_bits_of_one(work, alone):
    """The same mesh of four devices: metrics, samples and the final model are the same files."""
    for index, (status, out, err) in enumerate(finished(training(work, "run", count=4))):
        assert status == 0, err
        assert ("held-out reward before training" in out) == (index == 0)
    lines = [line for line in read_lines(alone / "metrics.jsonl") if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["exact_share"] == 1.0 and line["compared_tokens"] > 0 for line in lines)
    same_files(work / "run", alone)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_and_the_run_resumes(work, alone):
    """One of two is killed; the other says so within a minute; a run of another count goes on."""
    (work / "shared_rewards.py").write_text(REWARDS.format(pause=0.5))
    running = training(work, "killed", count=2)
    until = time.monotonic() + 900
    killed = work / "killed"
    # Step 3 is written, and the checkpoint of step 2 has its seal.
    while lines_in(killed / "metrics.jsonl") < 4 or 2 not in checkpoints.list_steps(
        killed / "checkpoints"
    ):
        assert time.monotonic() < until
        assert all(process.poll() is None for process in running), finished(running)
        time.sleep(0.05)
    running[1].send_signal(signal.SIGKILL)
    at = time.monotonic()
    (status, _, err), _ = finished(running, 100)
    assert time.monotonic() - at < 60
    assert status not in (0, 1)
    assert "another process of this job is gone" in err
    (work / "shared_rewards.py").write_text(REWARDS.format(pause=0))
    [(status, out, err)] = finished(training(work, "killed", count=1))
    assert status == 0, err
    assert "resumed after step 2" in out
    same_files(work / "killed", alone)


@pytest.mark.slow
def test_sigterm_to_one_of_two_is_heeded_by_both_after_a_whole_checkpoint(work):
    (work / "shared_rewards.py").write_text(SLOW_SEAL + REWARDS.format(pause=0.5))
    running = training(work, "asked", count=2)
    until = time.monotonic() + 900
    while lines_in(work / "asked" / "metrics.jsonl") < 2:  # step 1 is written
        assert time.monotonic() < until
        assert all(process.poll() is None for process in running), finished(running)
        time.sleep(0.05)
    running[1].send_signal(signal.SIGTERM)
    running[1].wait(100)
    # A launcher may kill process 0 from here on: its part must be done.
    kept = work / "asked" / "checkpoints"
    steps, last = checkpoints.list_steps(kept), lines_in(work / "asked" / "metrics.jsonl") - 1
    for status, _, err in finished(running, 100):
        assert status == 143, err
        assert f"saved after step {last}" in err
    assert steps[-1] == last


@pytest.mark.slow
def test_processes_that_differ_are_refused(work):
    running = started(
        lambda index, address: [
            *("-m", "tim_jax", "train", "run.toml", "run.folder=differ", *CHANGES, f"seed={index}"),
            *("--coordinator", address, "--processes", "2", "--process", str(index)),
        ],
        count=2,
        devices=2,
        folder=work,
    )
    for status, _, err in finished(running):
        assert status == 2
        assert "process 1 differs from process 0 in its config" in err
        assert "Traceback" not in err
