from pathlib import Path

import pytest

from tim_jax.common.errors import InputError
from tim_jax.tasks.base import Grade, Message
from tim_jax.tasks.dataset import SYSTEM, gym_task
from tim_jax.tasks.guard import Limits

reasoning_gym = pytest.importorskip("reasoning_gym")
LIMITS = Limits(seconds=1.0, workers=1)
SMALL = {"train_size": 40, "eval_size": 10, "limits": LIMITS}


@pytest.fixture(scope="module")
def task():
    made = gym_task("basic_arithmetic", {"max_terms": 3, "max_digits": 2}, seed=3, **SMALL)
    yield made
    made.close()


def test_items_are_the_librarys(task):
    direct = reasoning_gym.create_dataset(
        "basic_arithmetic", max_terms=3, max_digits=2, seed=3, size=50
    )
    for i in (0, 7, 39):
        assert task.train[i].prompt == (
            Message("system", SYSTEM),
            Message("user", direct[i]["question"]),
        )
        assert task.train[i].answer == direct[i]["answer"]
    assert task.evaluation[0].answer == direct[40]["answer"]
    assert task.name == "gym:basic_arithmetic"


def test_scores(task):
    example = task.train[0]
    completions = [
        f"so <answer> {example.answer}\n</answer>",
        f"<answer>0.5</answer> no, <answer>{example.answer}</answer>",
        example.answer,
        "<answer>nothing</answer>",
        "",
    ]
    assert [g.reward for g in task.grade([example] * 5, completions)] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_plain_text_without_system_prompt():
    task = gym_task("chain_sum", {"max_terms": 2}, system=None, **SMALL)
    example = task.train[0]
    assert isinstance(example.prompt, str)
    assert [g.reward for g in task.grade([example] * 2, [f" {example.answer} ", "x"])] == [1.0, 0.0]
    task.close()


def test_held_out_questions_are_not_trained_on():
    """Few different questions: most training items meet a held-out one and must give way."""
    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = gym_task("chain_sum", parameters, train_size=200, eval_size=60, limits=LIMITS)
    questions = {example.prompt for example in task.evaluation}
    assert len(questions) == len(task.evaluation) < 60
    assert task.notes == (f"{60 - len(questions)} of 60 evaluation questions left out: not new",)
    assert not questions & {example.prompt for example in task.train}
    repeated = [task.train[i] for i in range(200)]
    assert repeated == list(task.train)
    task.close()


@pytest.mark.slow
def test_items_that_depend_on_the_hash_seed_are_the_same_in_every_worker():
    """word_ladder walks over sets of words."""

    def prompts():
        task = gym_task("word_ladder", train_size=3, eval_size=2, limits=LIMITS)
        task.close()
        return [e.answer for e in (*task.train, *task.evaluation)]

    assert prompts() == prompts()


HOSTILE = [
    "9**9**9**9",
    "__import__('os').system('touch PATH')",
    "__import__('subprocess').run(['touch', 'PATH'])",
    "open('PATH', 'w').write('x')",
    "__import__('os').open('PATH', 66)",
    "__import__('pathlib').Path('PATH').write_text('x')",
    "exit()",
    "__import__('ctypes').CDLL(None)._exit(0)",
    "[0] * 10**11",
]


@pytest.mark.parametrize("name", ["n_queens", pytest.param("puzzle24", marks=pytest.mark.slow)])
def test_scorers_that_run_what_the_policy_wrote(name, tmp_path):
    """Both pass an answer to eval (puzzle24 by sympy)."""
    target = tmp_path / "touched"
    task = gym_task(name, train_size=2, eval_size=1, limits=LIMITS)
    example = task.train[0]
    texts = [text.replace("PATH", str(target)) for text in HOSTILE] + [example.answer]
    grades = task.grade([example] * len(texts), [f"<answer>{text}</answer>" for text in texts])
    assert grades[0] == Grade(0.0, "timeout")
    assert all(grade.reward <= 0.01 for grade in grades[1:-1])
    assert grades[-1] == Grade(1.0)
    assert not Path(target).exists()
    task.close()


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("basic_arithmatic", {}, "unknown name; did you mean 'basic_arithmetic'"),
        (
            "countdown",
            {"max_number": 3},
            "unknown parameter 'max_number'; did you mean 'max_numbers'",
        ),
        ("countdown", {"min_numbers": 30}, "max_numbers must be >= min_numbers"),
        ("countdown", {"seed": 1}, "'seed' is set by the task"),
        ("countdown", {"size": 1}, "'size' is set by the task"),
    ],
)
def test_bad_parameters(name, parameters, message):
    with pytest.raises(InputError, match=message):
        gym_task(name, parameters, **SMALL)


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr("tim_jax.tasks.dataset.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'tim-jax\[gym\]'"):
        gym_task("countdown")
