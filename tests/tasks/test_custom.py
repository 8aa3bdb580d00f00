import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import tim_jax as tim
from tim_jax.common.errors import InputError
from tim_jax.tasks import guard
from tim_jax.tasks.base import Example, Grade, Message, Packed, SharedGrader, state_of
from tim_jax.tasks.custom import (
    IsolatedReward,
    answer_rewards,
    isolated_task,
    load_reward,
    make_task,
)

SOURCE = """
import math
import sys
import numpy as np

seen = []
constant = 3

def good(prompts, completions, answers):
    seen.append((prompts, completions, answers))
    return [float(c == a) for c, a in zip(completions, answers)]

def array(prompts, completions, answers):
    return np.arange(len(prompts), dtype=np.float32)

def booleans(prompts, completions, answers):
    return (c == a for c, a in zip(completions, answers))

def few(prompts, completions, answers):
    return [1.0]

def none(prompts, completions, answers):
    return None

def number(prompts, completions, answers):
    return 1.0

def nan(prompts, completions, answers):
    return [0.0, math.nan]

def huge(prompts, completions, answers):
    return [0.0, 1e39]

def words(prompts, completions, answers):
    return ["1", "2"]

def holes(prompts, completions, answers):
    return [1.0, None]

def of_texts(completions, **columns):
    return [1.0 for _ in completions]

def raises(prompts, completions, answers):
    raise KeyError("no such thing\\nsecond line")

def long(prompts, completions, answers):
    raise ValueError("x" * 10**6)

def closes(prompts, completions, answers):
    sys.stdout.close()
    return [1.0 for _ in completions]
"""
EPISODES = """
from tim_jax.tasks.base import Example, Task, in_turns
from tim_jax.tasks.environments import Here

EXAMPLES = (Example("p", "3", {"state": {"secret": 3}}), Example("q", "4"))

def make():
    return Task("mine", EXAMPLES, EXAMPLES, in_turns)

def with_environment():
    return Task("mine", EXAMPLES, EXAMPLES, in_turns, environment=Here(print))
"""
GRADED = """
import jax.numpy as jnp
import numpy as np
from tim_jax.tasks.base import Example, Grade, Task

SCALARS = [np.float32(0.5), np.bool_(True), np.int64(2), jnp.float32(0.25)]

def grade(examples, completions):
    return [Grade(SCALARS[int(c)], "error" if c == "0" else None) for c in completions]

def make():
    return Task("mine", (Example("p", "3"),), (), grade)
"""
EXAMPLES = [Example("p", "1"), Example((Message("system", "s"), Message("user", "u")), "2")]
COMPLETIONS = ["1", "x"]


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory):
    """A current folder with the user's module, as the console script sees it: not on sys.path."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "my_rewards.py").write_text(SOURCE)
    (folder / "my_broken.py").write_text("import not_installed_anywhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(folder))])
        yield folder
        for name in ("my_rewards", "my_broken"):
            sys.modules.pop(name, None)


def test_good_reward():
    assert load_reward("my_rewards:good")(EXAMPLES, COMPLETIONS) == [Grade(1.0), Grade(0.0)]
    prompts, completions, answers = sys.modules["my_rewards"].seen[-1]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert prompts == ["p", chat]
    assert (completions, answers) == (["1", "x"], ["1", "2"])


def test_other_sequences_of_numbers():
    assert [g.reward for g in load_reward("my_rewards:array")(EXAMPLES, COMPLETIONS)] == [0.0, 1.0]
    grades = load_reward("my_rewards:booleans")(EXAMPLES, COMPLETIONS)
    assert [g.reward for g in grades] == [1.0, 0.0]
    assert all(type(grade.reward) is float for grade in grades)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("few", "my_rewards:few returned 1 rewards for 2 completions"),
        ("none", "my_rewards:none must return a sequence of 2 numbers, got None"),
        ("number", "my_rewards:number must return a sequence of 2 numbers, got 1.0"),
        ("nan", "my_rewards:nan must return finite numbers, got nan at 1"),
        ("huge", r"my_rewards:huge must return numbers of at most 1e\+15 in size, got 1e\+39 at 1"),
        ("words", "my_rewards:words must return finite numbers, got '1' at 0"),
        ("holes", "my_rewards:holes must return finite numbers, got None at 1"),
        ("raises", r"my_rewards:raises raised KeyError: .*no such thing"),
        ("long", r"my_rewards:long raised ValueError: x{497}\.\.\.$"),
    ],
)
def test_bad_returns(name, message):
    with pytest.raises(InputError, match=message) as caught:
        load_reward(f"my_rewards:{name}")(EXAMPLES, COMPLETIONS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_rewards", "must be written module:function, got 'my_rewards'"),
        (":good", "must be written module:function"),
        ("my_rewards:", "must be written module:function"),
        ("my_rewards.py:good", "write a module, not a file: 'my_rewards:good'"),
        ("./my_rewards.py:good", "write a module, not a file: 'my_rewards:good'"),
        ("my_rewads:good", "importing my_rewads raised ModuleNotFoundError: No module named"),
        ("my_broken:good", "raised ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("my_rewards:god", "my_rewards has no 'god'; did you mean 'good'"),
        ("my_rewards:constant", "not a function but int"),
        (
            "my_rewards:of_texts",
            r"my_rewards:of_texts must take three lists, \(prompts, completions, answers\);"
            r" it takes \(completions, \*\*columns\)",
        ),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(InputError, match=message):
        load_reward(name)
    with pytest.raises(InputError, match=message):
        answer_rewards({"name": name, "notes": []})


def test_a_task_made_elsewhere_keeps_the_states_of_its_episodes(here):
    (here / "my_episodes.py").write_text(EPISODES)
    task = isolated_task("my_episodes:make", {}, seconds=30.0)
    try:
        states = [state_of(task.train[i]) for i in range(2)]
    finally:
        task.close()
    assert all(type(state) is Packed for state in states)
    assert [pickle.loads(state) for state in states] == [{"secret": 3}, "4"]
    with pytest.raises(InputError, match=r"must be named as task\.environment"):
        isolated_task("my_episodes:with_environment", {}, seconds=30.0)


def test_a_reward_may_close_its_standard_output(here, capfd):
    reward = IsolatedReward("my_rewards:closes", seconds=30.0)
    try:
        for _ in range(2):
            assert reward(EXAMPLES, COMPLETIONS) == [Grade(1.0)] * 2
    finally:
        reward.close()
    assert capfd.readouterr().err == ""


def test_a_tasks_grader_may_give_scalars_of_numpy_and_jax(here):
    (here / "my_graded.py").write_text(GRADED)
    task = make_task("my_graded:make", {})
    given, expected = [str(i) for i in range(4)], [Grade(0.5, "error"), *map(Grade, (1.0, 2, 0.25))]
    grades = task.grade([*task.train] * 4, given)
    assert grades == expected
    assert all(type(grade.reward) is float for grade in grades)
    among_processes = SharedGrader(task.grade, 0, 1, lambda text: [text])
    assert among_processes([*task.train] * 4, given) == expected


def test_a_function_of_one_row_names_its_arguments_in_their_order():
    def graded(completion, prompt, answer):
        return 0.0

    def ungraded(completion, answer):
        return 0.0

    with pytest.raises(InputError, match=r"per_item: graded is given \(prompt, completion, answer"):
        tim.per_item(cast(Any, graded))
    with pytest.raises(InputError, match="per_item: ungraded must take three arguments"):
        tim.per_item(cast(Any, ungraded))


def test_current_folder_of_a_program_started_elsewhere(here, tmp_path):
    """As the console script is: its own folder is first on sys.path, not the current one."""
    program = tmp_path / "program.py"
    program.write_text(
        "from tim_jax.tasks.custom import load_reward\n"
        "from tim_jax.tasks.base import Example\n"
        "print(load_reward('my_rewards:good')([Example('p', '1')], ['1'])[0].reward)\n"
    )
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": str(root), "PATH": ""}
    done = subprocess.run(
        [sys.executable, program],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "1.0\n"


def test_a_full_folder_of_temporary_files_is_one_line(monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(guard.tempfile, "TemporaryFile", full)
    with pytest.raises(InputError, match=r"the folder of temporary files: No space left"):
        IsolatedReward("my_rewards:good", seconds=20.0)


def test_a_program_whose_standard_output_is_closed_has_a_reward_as_well(here, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from tim_jax.tasks.custom import IsolatedReward\n"
        "from tim_jax.tasks.base import Example\n"
        "reward = IsolatedReward('my_rewards:good', seconds=20.0)\n"
        "print(reward([Example('p', '1')], ['1'])[0].reward, file=open('said', 'w'))\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, str(program), ">&-"]
    subprocess.run(
        ["sh", "-c", " ".join(command)],
        cwd=here,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        check=True,
    )
    assert (here / "said").read_text() == "1.0\n"
