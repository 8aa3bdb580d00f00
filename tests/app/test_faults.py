"""Faults on purpose: the disk is full, the process is killed, the clock goes back, two at a time.

After each of them the command says what happened in one line with a status of the documented table,
and the same command then goes on to the bytes of a run that met no fault.
"""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import fuzzing
import jax
import pytest
import tiny

from tim_jax.app.config import toml
from tim_jax.app.jobs import assembling, train
from tim_jax.app.run import checkpoints, folders
from tim_jax.app.run.loggers import read_lines
from tim_jax.common.errors import InputError
from tim_jax.model import calibration

SCRIPTS = Path(__file__).parents[2] / "scripts"
FILES = ("metrics.jsonl", "samples.jsonl", "model/model.safetensors")
STEPS = 3
CHANGES = (
    "warmup.steps=0",
    f"steps={STEPS}",
    "run.checkpoint_every=1",
    "run.sinks=['tensorboard']",
)


@pytest.fixture(scope="module", autouse=True)
def work(tmp_path_factory):
    """The working folder. A run in this process is assembled and compiled once for all tests."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "tiny.toml").write_text(tiny.RUN)
    made = {}

    def assemble(config, *, measured):
        key = repr(config.model_copy(update={"run": None}))
        if key not in made:
            made[key] = assembling.assemble(config, measured=measured)
        return replace(made[key], config=config)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(calibration, "calibrate", lambda config, numerics, **_: numerics)
        patch.setattr(train, "assemble", assemble)
        yield folder


def start(run, *changes):
    """`tim-jax train` in this process, to its end: status and standard error."""
    return fuzzing.run(["train", "tiny.toml", *CHANGES, *changes, f"run.folder={run}"])


@pytest.fixture(scope="module")
def whole(work):
    """The bytes of a run that met no fault."""
    assert start("whole") == (0, "")
    return contents(work / "whole")


def contents(run):
    return {name: (run / name).read_bytes() for name in FILES}


def goes_on(run, whole):
    """The same command comes to the same end.

    It is given a copy of the folder: a save that failed may have threads of orbax's in this process
    that wait for what never comes, and a new process would be without them.
    """
    copy = f"{run}-again"
    shutil.move(run, copy)
    outcome = start(copy)
    assert outcome == (0, ""), outcome
    assert contents(Path(copy)) == whole
    steps = [line["step"] for line in read_lines(f"{copy}/timing.jsonl")]
    assert steps == list(range(1, STEPS + 1))
    shutil.rmtree(copy)


def refused(outcome, *words):
    """One line of status 2."""
    fuzzing.check(outcome)
    assert outcome.status == 2, outcome
    assert any(word in outcome.err for word in words), outcome.err


# A disk that is full: by Python's own report of every file that is made, named or opened to be
# written, of which one fails; and by the kernel's limit on the size of files, which every program
# in every language meets.


class Disk:
    """Sees everything that Python makes below a folder, and fails at one of them."""

    def __init__(self):
        self.folder, self.fails, self.seen = None, None, []
        sys.addaudithook(self.hook)  # for ever; it does nothing while there is no folder

    @contextmanager
    def watched(self, folder, fails=None):
        self.folder, self.fails, self.seen = str(folder.resolve()), fails, []
        try:
            yield self.seen
        finally:
            self.folder = None

    def hook(self, event, arguments):
        if self.folder is None or event not in ("open", "os.mkdir", "os.rename"):
            return
        path, mode, flags = (*arguments, None, None)[:3]
        if (event == "open" and not writes(mode, flags)) or not isinstance(path, str | os.PathLike):
            return
        place = os.path.abspath(path)
        if place.startswith(f"{self.folder}/"):
            self.seen.append(f"{event} {place.removeprefix(self.folder)}")
            if len(self.seen) - 1 == self.fails:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)


def writes(mode, flags):
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)


@pytest.fixture(scope="module")
def disk():
    return Disk()


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_file_is_one_line_and_harms_nothing(work, whole, disk):
    run = work / "full"
    with disk.watched(run) as events:
        assert start("full") == (0, "")
    names = Counter(event.partition(" ")[0] for event in events)
    assert names["open"] > 20
    assert names["os.mkdir"] > 5
    assert names["os.rename"] > STEPS
    kinds = {}  # of every kind of file one: those of all steps are alike
    for number, event in enumerate(events):
        kinds.setdefault(re.sub(r"[0-9a-f]{8}|\d+", "N", event), []).append(number)
    endings = Counter()
    for number in sorted(numbers[len(numbers) // 2] for numbers in kinds.values()):
        with disk.watched(work / f"full-{number}", number) as seen:
            outcome = start(f"full-{number}")
        what = seen[number] if number < len(seen) else "nothing"
        if outcome.status == 2:
            refused(outcome, "No space left on device")
        else:  # what failed is not needed, such as the file that a lock is in
            assert outcome == (0, ""), (what, outcome)
        endings[outcome.status] += 1
        goes_on(f"full-{number}", whole)
    assert endings[2] > len(kinds) / 2, endings


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_middle_of_any_file_is_one_line(work, whole):
    sizes = {p.stat().st_size for p in (work / "whole").rglob("*") if p.is_file()}
    failed = set()
    for size in sorted(size for size in sizes if size > 200):
        with limited(size - 1):
            outcome = start(f"short-{size}")
        refused(outcome, "File too large")
        failed.add(outcome.err.partition(":")[2][:40])
        goes_on(f"short-{size}", whole)
    assert len(failed) > 3, failed  # config, lines, checkpoints, model, chart


@contextmanager
def limited(size):
    """No file can be written beyond that size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.slow
def test_standard_output_that_takes_nothing_is_one_line(work, whole):
    for make, words in ((full, "No space left"), (closed_pipe, "")):
        shutil.rmtree("unheard", ignore_errors=True)
        with make() as output:
            process = child("none", 1, "unheard", stdout=output)
            _, err = process.communicate()
        refused(
            fuzzing.Outcome(process.returncode, fuzzing.WAIT.sub("", err)),
            f"to standard output: {words}",
        )
        goes_on("unheard", whole)


def full():
    return open("/dev/full", "w")


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


# Killed


def child(stage, times, run, *changes, **options):
    """`tim-jax train` in a process of its own, killed when the stage comes for that time."""
    command = ["train", "tiny.toml", *CHANGES, *changes, f"run.folder={run}"]
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / "stages.py"), stage, str(times), *command],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        stderr=subprocess.PIPE,
        text=True,
        **{"stdout": subprocess.DEVNULL, **options},
    )


@pytest.fixture(scope="module")
def stages():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import stages

        yield stages.STAGES


# Forks for every start, so that what takes long to import is imported once.
STARTS = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import stages
for stage, times, *command in json.loads(sys.argv[2]):
    child = os.fork()
    if not child:
        sys.argv[1:] = [stage, times, *command]
        os._exit(stages.main())
    print(json.dumps([stage, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]), flush=True)
"""


@pytest.mark.slow
def test_a_kill_in_any_stage_loses_and_doubles_nothing(work, stages):
    """One run that is left alone, and one that is killed in each stage and goes on."""
    last = [stage for stage in stages if stage.startswith(("export", "the chart"))]
    many = f"steps={len(stages)}"  # no start comes to the end before the last stages do
    starts = [("none", "alone"), *((one, "killed") for one in stages), ("none", "killed")]
    command = ["train", "tiny.toml", *CHANGES, many]
    given = [
        [stage, str(1 if stage in last else 2), *command, f"run.folder={run}"]
        for stage, run in starts
    ]
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(SCRIPTS), json.dumps(given)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    ends = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    wanted = [[stage, 0 if stage == "none" else -signal.SIGKILL] for stage, _ in starts]
    assert ends == wanted, done.stderr
    assert contents(work / "killed") == contents(work / "alone")
    steps = [line["step"] for line in read_lines("killed/timing.jsonl")]
    assert steps == list(range(1, len(stages) + 1))


@pytest.mark.slow
def test_an_export_that_is_killed_can_be_done_again(work, whole):
    command = ["export", "whole", "exported"]
    for stage in ("export, its weights", "none"):
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "stages.py"), stage, "1", *command],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == (0 if stage == "none" else -signal.SIGKILL), done.stderr
        assert Path("exported").exists() == (stage == "none")
    assert Path("exported/model.safetensors").read_bytes() == whole[FILES[2]]


# Two commands on one folder


@pytest.mark.slow
def test_a_second_command_on_a_folder_reads_it_but_does_not_run_it(work, whole):
    del whole
    config = toml.dump(toml.load("tiny.toml", [*CHANGES, "run.folder=whole"]))
    before = contents(work / "whole")
    with folders.open_run("whole", config):
        refused(start("whole"), f"whole is in use by process {os.getpid()}")
        assert fuzzing.run(["export", "whole", "meanwhile"]) == (0, "")
    assert contents(work / "whole") == before
    assert Path("meanwhile/model.safetensors").read_bytes() == before[FILES[2]]


def test_a_checkpoint_that_a_run_removes_while_it_is_read_is_not_missed(tmp_path, monkeypatch):
    """The run keeps one; while its checkpoint is read it makes the next and removes this."""
    with closing(checkpoints.Checkpoints(tmp_path, keep=1)) as saver:
        saver.save(1, {"x": jax.numpy.ones(3)}, {})
        saver.wait()
        read = checkpoints._read_state

        def slowly(path, like):
            if path.parent.name == "1":
                saver.save(2, {"x": jax.numpy.zeros(3)}, {})
                saver.wait()
            return read(path, like)

        monkeypatch.setattr(checkpoints, "_read_state", slowly)
        found = checkpoints.restore(tmp_path, {"x": jax.numpy.ones(3)})
        assert (found.step, found.state["x"].tolist()) == (2, [0.0, 0.0, 0.0])
        with pytest.raises(InputError, match=r"no checkpoint of step 1; it has \[2\]"):
            checkpoints.restore(tmp_path, {"x": jax.numpy.ones(3)}, step=1)


# Clocks


@pytest.mark.slow
def test_a_clock_that_goes_back_changes_nothing(work, whole, monkeypatch):
    """Each look at the clock is an hour before the last, and what was written is of tomorrow."""
    assert start("clock") == (0, "")
    shutil.rmtree(f"clock/checkpoints/{STEPS}")  # as if it had ended before
    shutil.rmtree("clock/model")
    for path in [*Path("clock").rglob("*"), Path("clock")]:
        os.utime(path, (time.time() + 86_400,) * 2)
    now = [time.time()]

    def back():
        now[0] -= 3600.0
        return now[0]

    monkeypatch.setattr(time, "time", back)
    monkeypatch.setattr(time, "time_ns", lambda: int(back() * 1e9))
    before = now[0]
    goes_on("clock", whole)
    assert now[0] < before  # it was looked at


def test_what_the_documentation_says_of_faults_is_shown_by_tests_that_exist(request):
    root = request.config.rootpath
    page = (root / "docs" / "runs.md").read_text()
    table = page.partition("| what happens |")[2].partition("\n\n")[0]
    rows = table.splitlines()[2:]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.rpartition(" | ")[2])
        assert named, row
        for file, name in named:
            assert f"\ndef {name}(" in (root / file).read_text(), name
