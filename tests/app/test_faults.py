"""Faults on purpose: the disk is full, the process is killed, the clock goes back, two at a time.

After each of them the command says what happened in one line with a status of the documented table,
and the same command then goes on to the bytes of a run that met no fault. Where one run can meet
several faults one after the other, each start of it goes on from what the fault before has left.
"""

import errno
import itertools
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
from pathlib import Path
from typing import Any

import fuzzing
import jax
import pytest
from app.test_cli import CONFIG

from tim_jax.app.config import toml
from tim_jax.app.jobs import train
from tim_jax.app.run import charts, checkpoints, folders
from tim_jax.app.run.loggers import read_lines
from tim_jax.common.errors import InputError
from tim_jax.model import fitting, hf
from tim_jax.model.files import write_json
from tim_jax.rl import drawing

SCRIPTS = Path(__file__).parents[2] / "scripts"
FILES = ("metrics.jsonl", "samples.jsonl", "model/model.safetensors")
STEPS = 3
CHANGES = (
    "warmup.steps=0",
    f"steps={STEPS}",
    "task.reward=faults_rewards:by_length",
    "run.checkpoint_every=1",
    "run.sinks=['tensorboard']",
)
# One that a model without training gets some of, so that every step moves the weights.
REWARDS = """
def by_length(prompts, completions, answers):
    return [len(completion) / 8 for completion in completions]
"""


@pytest.fixture(scope="module", autouse=True)
def work(tmp_path_factory, traced_once):
    """The working folder. What runs in this process is traced once for all tests.

    Its programs are those of test_cli.py, whose quick tests have compiled them. Nothing is measured
    of the machine; what would be, is in calibration.json.
    """
    folder = tmp_path_factory.mktemp("faults")
    (folder / "tiny.toml").write_text(CONFIG)
    (folder / "faults_rewards.py").write_text(REWARDS)

    def unmeasured(config, numerics, *, longest, **_):
        found = {"longest": longest, "found": fitting._to_record(numerics)}
        found["of"] = fitting._describe_setting(config, numerics)
        if not (folder / "calibration.json").exists():
            write_json(folder / "calibration.json", found)
        return numerics

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setattr(fitting, "calibrate_once", unmeasured)
        yield folder
    sys.modules.pop("faults_rewards", None)


def start(run, *changes):
    """`tim-jax train` in this process, to its end: status and standard error."""
    return fuzzing.run(["train", "tiny.toml", *CHANGES, *changes, f"run.folder={run}"])


@pytest.fixture(scope="module")
def whole(work, disk):
    """The bytes of a run that met no fault. The disk remembers what was made of it."""
    with disk.watched(work / "whole") as disk.whole:
        assert start("whole") == (0, "")
    shutil.copy("calibration.json", "whole")  # for child processes that go on with it
    steps = [line for line in read_lines("whole/metrics.jsonl") if line["step"]]
    assert any(line["gradient_norm"] > 0 for line in steps)
    return contents(work / "whole")


def contents(run):
    return {name: (run / name).read_bytes() for name in FILES}


def cut(run):
    """The run without a fault as if it had ended in its last step, with this step's lines."""
    shutil.copytree("whole", run)
    shutil.rmtree(f"{run}/checkpoints/{STEPS}")
    shutil.rmtree(f"{run}/model")
    Path(run, "chart.png").unlink()


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
    """Sees everything that Python makes below a folder, and fails once at a kind of it."""

    def __init__(self):
        self.folder, self.fails, self.seen, self.whole = None, None, [], []
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
            what = f"{event} {place.removeprefix(self.folder)}"
            self.seen.append(what)
            if kind_of(what) == self.fails:
                self.fails = None
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)


def writes(mode, flags):
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)


def kind_of(event):
    """Files of all steps, and of all items of a checkpoint, are alike."""
    item = re.sub(r"/(params|rest|reference)\b", "/ITEM", event)
    return re.sub(r"[0-9a-f]{8}|\d+", "N", item)


def kinds_of(events):
    return list(dict.fromkeys(map(kind_of, events)))


@pytest.fixture(scope="module")
def disk():
    return Disk()


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_file_is_one_line_and_harms_nothing(work, whole, disk):
    """At every kind of file: of a run that begins, and of one that has a checkpoint already."""
    names = Counter(event.partition(" ")[0] for event in disk.whole)
    assert names["open"] > 20
    assert names["os.mkdir"] > 5
    assert names["os.rename"] > STEPS
    first = kinds_of(itertools.takewhile(lambda event: ".saving-" not in event, disk.whole))
    cut("later")
    with disk.watched(work / "later") as events:
        assert start("later", "run.keep=1") == (0, "")
    later = [kind for kind in kinds_of(events) if kind not in first]
    assert set(kinds_of(disk.whole)) <= {*first, *later}
    endings = full_at(disk, first, "new", whole, begun=lambda run: None)
    endings += full_at(disk, later, "full", whole, "run.keep=1", begun=cut)
    assert endings[2] > len([*first, *later]) / 2, endings


def full_at(disk, kinds, run, whole, *changes, begun):
    """How the starts of one run end, each of which has no room for another kind of file."""
    endings = Counter()
    for number, kind in enumerate(kinds):
        at, after = Path(f"{run}-{number}"), f"{run}-{number + 1}"
        ended = STEPS in checkpoints.list_steps(at / "checkpoints")
        if ended and Path(at, "model").exists():  # which is written last
            assert contents(at) == whole
            shutil.rmtree(at)
        if not at.exists():
            begun(at)
        with disk.watched(at, kind):
            outcome = start(at, *changes)
        if outcome.status == 2:
            refused(outcome, "No space left on device")
        else:  # what failed is not needed, such as a folder that is there
            assert outcome == (0, ""), (kind, outcome)
        endings[outcome.status] += 1
        if STEPS - 1 in checkpoints.list_steps(at / "checkpoints"):  # the one of `cut`
            kept = f"checkpoints/{STEPS - 1}"
            assert begun is not cut or files(at / kept) == files(Path("whole", kept)), kind
        shutil.move(at, after)  # see `goes_on`
    goes_on(f"{run}-{len(kinds)}", whole)
    return endings


def files(folder):
    """What is in all files below a folder, by their places there."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple((str(path.relative_to(folder)), path.read_bytes()) for path in found)


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_middle_of_any_file_is_one_line(work, whole):
    """Starts of a run that begins, and of one that has its last checkpoint but one.

    orbax cuts the arrays of a checkpoint into files by chance, so that one may be larger than a
    model. The run that lacks its model has its last checkpoint.
    """
    cases = too_small()
    for number, (name, size) in enumerate(cases.items()):
        run = f"short-{number}"
        if name == ".model.new":
            shutil.rmtree(run)
            shutil.copytree("whole", run)
            shutil.rmtree(f"{run}/model")
        if name == "metrics.jsonl":
            shutil.rmtree(run)
            cut(run)
        with limited(size):
            outcome = start(run)
        refused(outcome, "File too large")
        assert name in outcome.err
        shutil.move(run, f"short-{number + 1}")  # see `goes_on`
    last = f"short-{len(cases)}"
    assert checkpoints.list_steps(Path(last, "checkpoints"))[-1] == STEPS
    goes_on(last, whole)


def too_small():
    """What a line says, and the size that is too small for that file, but not for those before."""

    def size(pattern):
        return max(path.stat().st_size for path in Path("whole").glob(pattern))

    return {
        "config.toml": size("config.toml") - 1,
        "cannot write checkpoints": size("checkpoints/*/state/rest/_METADATA") // 2,
        ".model.new": size("model/model.safetensors") - 1,
        "metrics.jsonl": size("metrics.jsonl") - 1,
        "chart.png": size("chart.png") // 2,
    }


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
    """That of a run which goes on, and says so first."""
    cut("unheard")
    for make, words in ((full, "No space left"), (closed_pipe, "")):
        with make() as output:
            process = child("none", 1, "unheard", stdout=output)
            _, err = process.communicate()
        refused(
            fuzzing.Outcome(process.returncode, fuzzing.WAIT.sub("", err)),
            f"to standard output: {words}",
        )
    goes_on("unheard", whole)


NO_FOLDERS = """
import os, sys
from tim_jax.app import cli
make = os.mkdir
def mkdir(path, *args, **options):
    if str(path).endswith("params.orbax-checkpoint-tmp"):
        raise OSError(28, os.strerror(28), str(path))
    make(path, *args, **options)
os.mkdir = mkdir
cli.run_and_exit()
"""


@pytest.mark.slow
def test_a_process_whose_save_fails_ends_at_once(work, whole):
    """Threads of orbax's would wait for ten minutes; the arrays being written would say much."""
    cut("unsaved")
    done = subprocess.run(
        [sys.executable, "-c", NO_FOLDERS, "train", "tiny.toml", *CHANGES, "run.folder=unsaved"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    outcome = fuzzing.Outcome(done.returncode, fuzzing.WAIT.sub("", done.stderr))
    refused(outcome, "cannot write checkpoints to")
    goes_on("unsaved", whole)


def full():
    return open("/dev/full", "w")


def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


# Killed


def child(stage, times, run, **options):
    """`tim-jax train` in a process of its own, killed when the stage comes for that time."""
    command = ["train", "tiny.toml", *CHANGES, f"run.folder={run}"]
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / "stages.py"), stage, str(times), *command],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        **{"stdout": subprocess.DEVNULL, **options},
    )


def environment():
    """Of children, which take the programs that this process has compiled, and keep none."""
    settings: Any = jax.config  # its options are attributes that are made as JAX is imported
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(jax.device_count()),
        "JAX_COMPILATION_CACHE_DIR": str(settings.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9",  # one half written would stay so
    }


@pytest.fixture(scope="module")
def stages():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import stages

        yield stages.STAGES


ARRAYS = "a checkpoint's arrays"  # written by threads that a copy of the folder would not stop
# For which time a stage must come to have something new on the disk, if not for the second.
TIMES = {
    "an old checkpoint's end": 3,
    "export, its weights": 1,
    "export, its name": 1,
    "the chart": 1,
}
# What the stages put themselves in place of.
CALLED = (
    (train, "assemble"),
    (drawing, "graded"),
    (train, "_record"),
    (checkpoints, "write_text"),
    (checkpoints.Checkpoints, "_remove_old"),
    (hf, "_write_weights"),
    (hf, "save"),
    (charts, "write_bytes"),
)


@pytest.mark.slow
def test_a_kill_in_any_stage_loses_and_doubles_nothing(work, whole, stages):
    """What SIGKILL would leave in each stage of a run goes on, and a run that SIGKILL has ended."""
    copies = copied_in(stages, "looked-at")
    assert contents(work / "looked-at") == whole
    different = {files(copy): copy for copy in copies}
    # The first four stages have nothing new on the disk, so that one of them stands for all.
    assert len(different) == len(copies) - 3
    for copy in different.values():
        goes_on(copy, whole)

    cut("killed")
    process = child(ARRAYS, 1, "killed")
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    assert checkpoints.list_steps("killed/checkpoints") == [STEPS - 1]
    assert list(Path("killed/checkpoints").glob(".saving-*"))
    goes_on("killed", whole)


def copied_in(stages, run):
    """A run, and copies of its folder in the stages: nothing else is writing into it there."""
    copies = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in CALLED:
            patch.setattr(owner, name, getattr(owner, name))  # so that it is put back
        for stage, install in stages.items():
            if stage != ARRAYS:
                copies.append(Path(f"{run}-{len(copies)}"))
                install(copying(run, copies[-1], TIMES.get(stage, 2)))
        assert start(run) == (0, "")
    return copies


def copying(run, copy, times):
    """Makes the copy when it is called for that time."""
    counter = itertools.count(1)

    def called():
        if next(counter) == times:
            shutil.copytree(run, copy)

    return called


@pytest.mark.slow
def test_an_export_that_is_killed_can_be_done_again(work, whole):
    command = ["export", "whole", "exported"]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "stages.py"), "export, its weights", "1", *command],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(Path().glob(".exported.*"))
    assert not Path("exported").exists()
    assert fuzzing.run(command) == (0, "")
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
    cut("clock")
    tomorrow = time.time() + 86_400
    for path in [*Path("clock").rglob("*"), Path("clock")]:
        os.utime(path, (tomorrow, tomorrow))
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
