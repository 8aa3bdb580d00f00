import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue

import pytest

from tim_jax.common.errors import InputError
from tim_jax.tasks.base import Example, Grade, faults
from tim_jax.tasks.dataset import MathGrader, grade_of
from tim_jax.tasks.guard import WORKER, Limits, Outcome, Pool, Refusal

ROOT = Path(__file__).parents[2]
math_verify = pytest.importorskip("math_verify")

RIGHT = [
    ("42", "so #### 42"),
    ("1,234", "The answer is 1234."),
    ("1234", "#### 1,234"),
    ("\\frac{1}{2}", "$\\boxed{0.5}$"),
    ("\\frac12", "\\boxed{\\frac{2}{4}}"),
    ("(1,2)", "\\boxed{(1,2)}"),
    ("x+1", "$1+x$"),
    ("-3", "answer: -3"),
    ("\\sqrt{2}", "\\boxed{1.41421356}"),
    ("1000000", "\\boxed{10^6}"),
    ("\\{1,2\\}", "\\boxed{\\{2,1\\}}"),
    ("C", "\\boxed{C}"),
    ("5", "$\\boxed{4}$, no: $\\boxed{5}$"),
    ("5", "\\boxed{" * 50 + "5" + "}" * 50),
    ("5", "\ud800\0 \\boxed{5}"),
]
WRONG = [
    ("42", "#### 43"),
    ("42", ""),
    ("42", "no idea"),
    ("\\frac{1}{2}", "$\\boxed{0.51}$"),
    ("5", "\\boxed{5} but then \\boxed{6}"),
    ("x+1", "$x+2$"),
    ("5", "(" * 5000 + "5" + ")" * 5000),
]
MEGABYTES = [("5", letter * 1_000_000) for letter in ("{", "$", "x", "9", "\\boxed{")]
HOSTILE = [("9", "9**9**9**9"), ("5", "$" + "(" * 5000 + "5" + ")" * 5000 + "$")]
MORE_HOSTILE = [("9", "$9^{9^{9^{9}}}$"), ("5", "$\\binom{10^{9}}{10^8}$")]


def grade(grader, pairs):
    return grader([Example("", answer) for answer, _ in pairs], [text for _, text in pairs])


def pids(grader):
    return [worker._process.pid for worker in grader._pool._workers]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def grader():
    with MathGrader(Limits(seconds=0.5, workers=1)) as made:
        yield made


@pytest.fixture(scope="module")
def patient():
    with MathGrader(Limits(workers=2)) as made:
        yield made


def test_right_and_wrong(patient):
    assert grade(patient, RIGHT + WRONG) == [Grade(1.0)] * len(RIGHT) + [Grade(0.0)] * len(WRONG)
    assert patient([], []) == []


def test_grades_are_those_of_the_library(patient):
    """The limits and the processes around it change nothing."""
    pairs = [(RIGHT[i][0], RIGHT[j - 1][1]) for i in range(len(RIGHT)) for j in (i, i + 1)]
    truths = {answer: math_verify.parse(f"\\boxed{{{answer}}}") for answer, _ in RIGHT}
    parsed = {text: math_verify.parse(text) for _, text in RIGHT}
    expected = [math_verify.verify(truths[answer], parsed[text]) for answer, text in pairs]
    assert grade(patient, pairs) == [Grade(float(right)) for right in expected]
    assert 15 <= sum(expected) < 20


@pytest.mark.parametrize("hostile", [HOSTILE, pytest.param(MORE_HOSTILE, marks=pytest.mark.slow)])
def test_hostile_answers_cost_no_one_else(grader, hostile):
    pairs = [pair for one in hostile for pair in (one, RIGHT[0], WRONG[0])]
    start = time.monotonic()
    grades = grade(grader, pairs)
    assert time.monotonic() - start < 30
    assert grades[0::3] == [Grade(0.0, "timeout")] * len(hostile)
    assert grades[1::3] == [Grade(1.0)] * len(hostile)
    assert grades[2::3] == [Grade(0.0)] * len(hostile)
    assert faults(grades) == {"timeout": len(hostile), "error": 0}


@pytest.mark.slow
def test_megabytes(grader):
    """Read, refused or given up, as the library may have it, but no one else pays for it."""
    grades = grade(grader, [*MEGABYTES, RIGHT[0]])
    assert all(g.reward == 0.0 for g in grades[:-1])
    assert grades[-1] == Grade(1.0)


def test_unreadable_ground_truth_is_an_error(grader):
    assert grade(grader, [("", "\\boxed{3}")]) == [Grade(0.0, "error")]


HUNGRY = """
import sys, importlib.util
spec = importlib.util.spec_from_file_location("worker", {path!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
worker.HANDLERS["hungry"] = lambda setup: lambda size: len(bytearray(size))
worker.main()
"""


def test_memory_is_limited(monkeypatch, tmp_path):
    """Asking for too much costs the worker, twice; the requests around it are answered."""
    script = tmp_path / "hungry.py"
    script.write_text(HUNGRY.format(path=str(WORKER)))
    monkeypatch.setattr("tim_jax.tasks.guard.WORKER", script)
    pool = Pool("hungry", "hungry", Limits(workers=1, memory=400 << 20))
    first, second, third = pool.map([1 << 20, 1 << 30, 2 << 20])
    assert (first, third) == (Outcome(1 << 20), Outcome(2 << 20))
    assert (second.fault, second.detail) == (
        "error",
        "ended its process (exit status 1) or closed its files",
    )
    pool.close()


def test_grades_do_not_depend_on_order_or_workers(patient):
    pairs = list(itertools.product([a for a, _ in RIGHT[:5]], [text for _, text in RIGHT[:9]]))
    expected = dict(zip(pairs, grade(patient, pairs), strict=True))
    assert set(expected.values()) == {Grade(0.0), Grade(1.0)}
    random.Random(0).shuffle(pairs)
    with MathGrader(Limits(workers=1)) as one:
        assert grade(one, pairs) == [expected[pair] for pair in pairs]


def test_a_killed_worker_is_replaced(grader):
    grade(grader, RIGHT[:4])
    before = pids(grader)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    assert grade(grader, RIGHT) == [Grade(1.0)] * len(RIGHT)
    assert not set(before) & set(pids(grader))


def test_a_sleeping_worker_is_ended_by_the_clock(grader, monkeypatch):
    """CPU time does not pass for a stopped process: only the clock can tell."""
    until = time.monotonic() + 60
    grade(grader, RIGHT[:4])  # one that is still starting has longer
    while not pids(grader):
        assert time.monotonic() < until
        grade(grader, RIGHT[:4])
    with monkeypatch.context() as patch:
        patch.setattr("tim_jax.tasks.guard.CLOCK_EXTRA", 0.5)
        patch.setattr("tim_jax.tasks.guard.CLOCK_FACTOR", 1.0)
        for pid in pids(grader):
            os.kill(pid, signal.SIGSTOP)
        assert grade(grader, RIGHT[:2]) == [Grade(0.0, "timeout"), Grade(1.0)]
    assert grade(grader, RIGHT[:2]) == [Grade(1.0)] * 2


def test_close_ends_the_workers_and_allows_a_new_start():
    made = MathGrader(Limits(workers=1))
    grade(made, RIGHT[:2])
    before = pids(made)
    made.close()
    made.close()
    assert not any(alive(pid) for pid in before)
    assert grade(made, RIGHT[:1]) == [Grade(1.0)]
    after = pids(made)
    del made
    assert all(gone(pid, 5) for pid in after)


def test_an_interrupt_leaves_no_stale_replies(grader, monkeypatch):
    class Interrupted(SimpleQueue):
        def get(self, block=True, timeout=None):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tim_jax.tasks.guard.SimpleQueue", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            grade(grader, RIGHT[:2])
    assert pids(grader) == []
    assert grade(grader, WRONG[:2]) == [Grade(0.0)] * 2


PROGRAM = """
import os, sys
{before}
from tim_jax.tasks.base import Example
from tim_jax.tasks.guard import Limits
from tim_jax.tasks.dataset import MathGrader
grader = MathGrader(Limits(seconds={seconds}, workers=1))
print(grader([Example("", "9")], ["9"])[0].reward, flush=True)
print(grader._pool._workers[0]._process.pid, flush=True)
{after}
"""


def start(before="", after="", seconds=5.0):
    text = PROGRAM.format(before=before, after=after, seconds=seconds)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", text],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def gone(pid, seconds):
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_program_without_main_guard_and_close_ends_cleanly():
    """Its workers have no JAX, even if it has."""
    maps = "Path(f'/proc/{grader._pool._workers[0]._process.pid}/maps').read_text()"
    program = start(
        before="import jax\nfrom pathlib import Path",
        after=f"print('python' in {maps}, 'jaxlib' in {maps})",
    )
    out, err = program.communicate(timeout=60)
    reward, pid, *has = out.split()
    assert (program.returncode, reward, err, has) == (0, "1.0", "", ["True", "False"])
    assert gone(int(pid), 5)


def test_workers_of_a_killed_program_end():
    """Even in the middle of an answer that never ends: the limit is the worker's own."""
    program = start(after="grader([Example('', '9')], ['9**9**9**9'])", seconds=1.0)
    assert program.stdout is not None
    assert program.stdout.readline() == "1.0\n"
    pid = int(program.stdout.readline())
    program.kill()
    program.communicate()
    assert gone(pid, 20)


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr("tim_jax.tasks.dataset.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'tim-jax\[math\]'"):
        MathGrader()


def test_limits_are_checked():
    with pytest.raises(InputError, match="seconds must be above 0, got 0"):
        Limits(seconds=0)
    with pytest.raises(InputError, match="workers must be at least 1, got 0"):
        Limits(workers=0)


def test_refusals_and_starts_that_fail(monkeypatch, tmp_path):
    with pytest.raises(Refusal, match="no_such_kind"):
        Pool("no_such_kind", "a pool", Limits(workers=1)).map([1])
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(3)")
    monkeypatch.setattr("tim_jax.tasks.guard.WORKER", broken)
    with pytest.raises(InputError, match=r"grading with math: 3 processes .* ended with code 3"):
        Pool("math", "grading with math", Limits(workers=1)).map([1])


def test_a_reward_that_is_not_finite_is_a_fault():
    assert grade_of(Outcome(float("nan"))) == Grade(0.0, "error")
    assert grade_of(Outcome(0.25)) == Grade(0.25)
    assert grade_of(Outcome(None, "timeout")) == Grade(0.0, "timeout")
