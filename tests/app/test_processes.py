"""Several real processes on this machine, over loopback, against one."""

import itertools
import shutil
import signal
import time

import jax
import numpy as np
import pytest
import tiny
from several import finished, lines_in, started, wait_until

from tim_jax import placement
from tim_jax.app.config import toml
from tim_jax.app.jobs import planning
from tim_jax.app.run import checkpoints
from tim_jax.app.run.loggers import read_lines
from tim_jax.common.errors import InputError
from tim_jax.instruments.plan import budget
from tim_jax.tasks.base import Example, Grade, SharedGrader

# What two processes do one after the other, until one of them is killed while they wait.
TOGETHER = """
import os, sys, time
from contextlib import suppress
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tim_jax import placement
from tim_jax.app.run import checkpoints, folders
from tim_jax.common import machine
from tim_jax.common.errors import InputError


def agree(index, folder):
    assert placement.leads() == (index == 0)
    assert placement.texts("é" * (1 + 40 * index)) == ["é", "é" * 41]
    assert placement.texts("") == ["", ""]
    assert placement.led(lambda: [index, 0.1]) == [0, 0.1]
    assert placement.any_of(index == 1) and not placement.any_of(False)
    placement.agree("same", "nothing")

    def refuse():
        raise InputError("no such folder")

    for what in (lambda: placement.agree(str(index), "its number"), lambda: placement.led(refuse)):
        try:
            what()
        except InputError as error:
            print(error)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))
    x = placement.put({"x": jax.numpy.arange(8.0)}, {"x": split})
    assert placement.whole(x)["x"].tolist() == list(range(8))
    assert placement.whole({"x": np.arange(4)})["x"].tolist() == list(range(4))
    kept = checkpoints.Checkpoints(folder, owner=index == 0)
    kept.save(1, {"state": x}, {"note": "two"})
    kept.save(2, {"state": jax.tree.map(lambda x: x + 1, x)}, {})
    kept.save(2, {"state": x}, {})
    kept.wait()
    found = kept.restore({"state": x})
    assert found.step == 2, found
    assert placement.whole(found.state["state"])["x"].tolist() == list(range(1, 9))
    kept.close()


def open_folders(index):
    folders._APPEARS = 1.0
    folders.open_run("shared", "seed = 0\\n").close()
    print(sorted(os.listdir("shared")))
    with suppress(InputError), folders.open_run("refused", "seed = 0\\n"):
        raise InputError("such as a task that cannot be made")
    placement.meet()
    os.makedirs(f"own-{index}", exist_ok=True)
    os.chdir(f"own-{index}")
    try:
        folders.open_run("run", "seed = 0\\n")
    except InputError as error:
        print(error)


index, address, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
placement._HEARTBEAT = 10  # of 30 seconds, which the test would wait for
with machine.print_if_aborted("the others are gone"):
    placement.join(address, 2, index)
    agree(index, folder)
    open_folders(index)
    print("waiting", flush=True)
    time.sleep(100)
"""


def together(folder, dead):
    """What two processes print until they wait, and how they end when `dead` is killed then."""
    running = started(
        lambda index, address: ["-c", TOGETHER, str(index), address, str(folder / "checkpoints")],
        count=2,
        devices=2,
        folder=folder,
    )
    outputs = []
    for process in running:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        outputs.append([*itertools.takewhile(lambda line: line != "waiting\n", lines)])
    running[dead].kill()
    return outputs, finished(running, 60)


@pytest.fixture(scope="module")
def work_of_two(tmp_path_factory):
    """The folder of two processes of which the first was killed, what they printed, their ends."""
    folder = tmp_path_factory.mktemp("two")
    return folder, *together(folder, dead=0)


def test_two_processes_agree_and_share_a_checkpoint(work_of_two):
    """What each found is what both know; a checkpoint that both wrote is read by one process."""
    folder, outputs, _ = work_of_two
    for lines in outputs:
        assert any("process 1 differs from process 0 in its number" in line for line in lines)
        assert "no such folder\n" in lines
    like = {"state": {"x": jax.ShapeDtypeStruct((8,), np.float32)}}
    one = checkpoints.restore(folder / "checkpoints", like, step=1)
    assert one.extra == {"note": "two"}
    assert one.state["state"]["x"].tolist() == list(range(8))


def test_a_run_folder_that_processes_do_not_share_is_refused(work_of_two):
    folder, outputs, _ = work_of_two
    for lines in outputs:
        *_, shared, refused = lines  # a library may say that it has connected
        assert ".shared" not in shared
        assert "config.toml" in shared
        assert refused == (
            f"run.folder = 'run': process 1 does not see in {folder}/own-1/run what process 0"
            f" wrote to {folder}/own-0/run; it must be on a file system that all processes share\n"
        )
    assert not list(folder.glob("own-*/*"))
    assert not (folder / "refused").exists()


@pytest.mark.parametrize("dead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_only_waits_says_so_when_another_dies(request, tmp_path, dead):
    """JAX's coordination aborts it: at once when process 0 is gone, else when heartbeats stop."""
    *_, found = together(tmp_path, 1) if dead else request.getfixturevalue("work_of_two")
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
from tim_jax.common import machine
with machine.print_if_aborted("the others are gone"):
    {end}
"""
        [(found, out, err)] = finished(
            started(lambda *_, code=code: ["-c", code], count=1, devices=1, folder=tmp_path)
        )
        assert (found, out, err) == (status, "", "")


def test_an_abort_after_the_loss_was_said_is_said_last(tmp_path):
    code = """
import os
from jax.errors import JaxRuntimeError
from tim_jax.app import cli

def lost(arguments):
    raise JaxRuntimeError("Gloo AllGather failed")

cli._run, cli._leave = lost, lambda status: os.abort()
several = ["--coordinator", "localhost:1", "--processes", "2", "--process", "0"]
cli.main(["train", "run.toml", *several])
"""
    running = started(lambda *_: ["-c", code], count=1, devices=1, folder=tmp_path)
    [(status, _, err)] = finished(running)
    assert status == -signal.SIGABRT
    gone = "tim-jax: another process of this job is gone; start all again with the same command"
    said = [line for line in err.splitlines() if line.startswith("tim-jax: ")]
    assert said == [
        f"{gone} (Gloo AllGather failed)",
        f"{gone} (most likely: JAX's runtime aborted this one)",
    ]
    assert err.splitlines()[-1] == said[-1]


def test_sigterm_ends_a_process_that_looks_for_none(tmp_path):
    code = """
import os, sys, time
from tim_jax import placement
placement.join(sys.argv[1], 1, 0)
os.kill(os.getpid(), 15)
time.sleep(1)
"""
    running = started(lambda _, at: ["-c", code, at], count=1, devices=1, folder=tmp_path)
    [(status, _, err)] = finished(running)
    assert (status, err) == (-signal.SIGTERM, "")


def test_one_process_agrees_with_itself():
    assert placement.leads()
    assert placement.texts("x") == ["x"]
    assert placement.led(lambda: 3) == 3
    assert placement.any_of(True)
    assert not placement.any_of(False)
    placement.agree("x", "what")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:1", 2, None), "--coordinator, --processes and --process go together"),
        (("localhost:1", 2, 2), r"--process 2: must be in 0\.\.1"),
    ],
)
def test_bad_numbers_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        placement.join(*arguments)


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
    "model.architecture.num_layers=1",
    "placement={fsdp = 2, tensor = 2}",
    "task.reward=shared_rewards:by_length",
    "task.reward_in_process=true",  # so that SLOW_SEAL is the run's
    "run.checkpoint_every=2",
)
# A process that grades leaves a mark.
REWARDS = """
import os
import pathlib
import time


def by_length(prompts, completions, answers):
    pathlib.Path(f"grading-{{os.getpid()}}").touch()
    time.sleep({pause})
    return [len(completion) / 7 for completion in completions]
"""
# Put before REWARDS: process 0 takes seconds to read what it seals a checkpoint with.
SLOW_SEAL = """
import time
from tim_jax.app.run import checkpoints


def slowly(path, read=checkpoints._crc):
    time.sleep(0.1)
    return read(path)


checkpoints._crc = slowly
"""
SAME = ("metrics.jsonl", "samples.jsonl", "model/model.safetensors")


def training(folder, run, *, count, rewards):
    """`count` processes of one run over four devices, one of it if `count` is 1."""
    (folder / "shared_rewards.py").write_text(rewards)

    def arguments(index, address):
        words = ["-m", "tim_jax", "train", "run.toml", f"run.folder={run}", *CHANGES]
        if count == 1:
            return words
        several = ["--coordinator", address, "--processes", str(count), "--process", str(index)]
        return [*words, *several]

    return started(arguments, count=count, devices=4 // count, folder=folder)


@pytest.fixture
def work(tmp_path):
    (tmp_path / "run.toml").write_text(tiny.RUN)
    return tmp_path


@pytest.mark.slow(minutes=12)
def test_several_processes_have_the_bits_of_one_whatever_ends_them(work):
    """One run by two processes, twice; then by one, to its last step; then its end, by four.

    Against a run of one process alone. All are on the same mesh of four devices. Programs of
    several processes are compiled by each of them, every time: so the second time none comes to its
    update, and the four only make of the last checkpoint what is made at the end.
    """
    last = asked_to_end(work)
    reference_of_one(work)
    for name in SAME[:2]:
        begun = (work / "run" / name).read_bytes()
        assert begun
        assert (work / "alone" / name).read_bytes().startswith(begun), name

    one_dies(work)
    [(status, out, err)] = finished(training(work, "run", count=1, rewards=REWARDS.format(pause=0)))
    assert status == 0, err
    assert f"resumed after step {last}" in out
    same_files(work / "run", work / "alone")

    four_end_it(work)
    same_files(work / "run", work / "alone")


def asked_to_end(work):
    """SIGTERM to one of two is heeded by both, after a whole checkpoint, whose step is returned."""
    rewards = SLOW_SEAL + REWARDS.format(pause=0.5)
    running = training(work, "run", count=2, rewards=rewards)
    kept, lines = work / "run" / "checkpoints", work / "run" / "metrics.jsonl"
    wait_until(lambda: lines_in(lines) >= 2, *running)  # step 1 is written
    running[1].send_signal(signal.SIGTERM)
    running[1].wait(100)
    # A launcher may kill process 0 from here on: its part must be done.
    steps, last = checkpoints.list_steps(kept), lines_in(lines) - 1
    for index, (status, out, err) in enumerate(finished(running, 100)):
        assert status == 143, err
        assert f"saved after step {last}" in err
        assert ("held-out reward before training" in out) == (index == 0)
    assert steps[-1] == last
    return last


def reference_of_one(work):
    """The run of one process, which meets nothing.

    It takes what the two have measured of the machine, on which they had to agree.
    """
    (work / "alone").mkdir()
    for name in ("config.toml", "calibration.json"):
        if (work / "run" / name).exists():
            shutil.copy(work / "run" / name, work / "alone")
    [(status, _, err)] = finished(training(work, "alone", count=1, rewards=REWARDS.format(pause=0)))
    assert status == 0, err
    lines = [line for line in read_lines(work / "alone" / "metrics.jsonl") if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["exact_share"] == 1.0 and line["compared_tokens"] > 0 for line in lines)
    assert any(line["gradient_norm"] > 0 for line in lines)


def one_dies(work):
    """One of two that go on is killed while both grade; the other says so within a minute."""
    for mark in work.glob("grading-*"):
        mark.unlink()
    running = training(work, "run", count=2, rewards=REWARDS.format(pause=3))
    marks = [work / f"grading-{process.pid}" for process in running]
    wait_until(lambda: all(mark.exists() for mark in marks), *running)
    running[1].send_signal(signal.SIGKILL)
    at = time.monotonic()
    (status, _, err), _ = finished(running, 100)
    assert time.monotonic() - at < 60
    assert status not in (0, 1)
    assert "another process of this job is gone" in err


def four_end_it(work):
    """The final model and the chart of a run with its last checkpoint; process 0 alone speaks."""
    shutil.rmtree(work / "run" / "model")
    (work / "run" / "chart.png").unlink()
    running = training(work, "run", count=4, rewards=REWARDS.format(pause=0))
    for index, (status, out, err) in enumerate(finished(running)):
        assert status == 0, err
        assert ("resumed after step 4" in out) == (index == 0)
    assert (work / "run" / "chart.png").exists()


def same_files(one, other):
    for name in SAME:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


# Put before REWARDS: process 1 has other rows, or other weights.
OTHER_ROWS = """
import sys
from tim_jax.app.run import checkpoints

if sys.argv[-1] == "1":
    checkpoints.rows_mark = lambda train: {"rows": len(train), "rows_crc32": 0}
"""
OTHER_WEIGHTS = """
import sys
import jax
from tim_jax.rl import programs


def other(params, target, put=programs._put):
    return put(jax.tree.map(lambda x: x + 1, params), target)


if sys.argv[-1] == "1":
    programs._put = other
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "before", "what"),
    [
        (["seed={index}"], "", "its config"),
        ([], OTHER_ROWS, "its model, its dataset, its prompts or its base weights"),
        ([], OTHER_WEIGHTS, "its weights"),
    ],
)
def test_processes_that_differ_are_refused(work, changes, before, what):
    (work / "shared_rewards.py").write_text(before + REWARDS.format(pause=0))
    running = started(
        lambda index, address: [
            *("-m", "tim_jax", "train", "run.toml", "run.folder=differ", *CHANGES),
            *(change.format(index=index) for change in changes),
            *("--coordinator", address, "--processes", "2", "--process", str(index)),
        ],
        count=2,
        devices=2,
        folder=work,
    )
    for status, _, err in finished(running):
        assert status == 2, err
        assert f"process 1 differs from process 0 in {what}" in err
        assert "Traceback" not in err


def test_one_process_tells_all_whether_the_memory_suffices(monkeypatch):
    """A process cannot ask another one's devices how much they have."""
    config, asked = toml.load(None, []), []
    monkeypatch.setattr(budget, "_shared_capacity", lambda used: asked.append(used))
    monkeypatch.setattr(placement, "led", lambda action: None)  # as on any process but 0
    planning.check_memory(config)
    planning.check_evaluation(config)
    assert not asked
    monkeypatch.setattr(placement, "led", lambda action: action())
    planning.check_memory(config)
    planning.check_evaluation(config)
    assert len(asked) == 2
