import ast
import itertools
import math
import operator
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tim_jax.common.errors import InputError
from tim_jax.tasks import builtin
from tim_jax.tasks.base import Completion, Example, Task, Turn, state_of
from tim_jax.tasks.builtin import (
    ALPHABET,
    BUILTIN,
    MARKER,
    Quality,
    answer_text,
    builtin_task,
    supervised,
)

NAMES = sorted({*BUILTIN} - {"addition"})  # which has a form of its own
SMALL = {"train_size": 300, "eval_size": 64}


@pytest.fixture(scope="module", params=NAMES)
def task(request) -> Task:
    return builtin_task(request.param, SMALL)


def reward(task: Task, example: Example, completion: str) -> float:
    return task.grade([example], [completion])[0].reward


def rewards(task: Task, completions: list[str]) -> np.ndarray:
    """Of completions, one for each training problem."""
    return np.array([grade.reward for grade in task.grade(list(task.train), completions)])


def texts(example: Example) -> tuple[str, str]:
    """The prompt and the worked solution."""
    assert isinstance(example.prompt, str)
    assert example.solution is not None
    return example.prompt, example.solution


def groups(pattern: str, text: str):
    found = re.fullmatch(pattern, text)
    assert found is not None
    return found.groups()


def test_text_is_short_and_over_the_alphabet(task):
    for example in itertools.chain(task.train, task.evaluation):
        assert len(example.prompt) <= 24
        assert len(example.solution) <= 48
        assert set(example.prompt + example.solution) <= set(ALPHABET)
        assert MARKER not in example.prompt
        assert example.solution.count(MARKER) == 1


def test_solutions_and_direct_answers_are_right(task):
    assert rewards(task, [e.solution for e in task.train]).min() == 1.0
    assert rewards(task, [MARKER + e.answer for e in task.train]).min() == 1.0


def test_answers_of_other_problems_are_mostly_wrong(task):
    """Countdown answers never fit other numbers; sums fit by chance once in ten."""
    examples = list(task.train)
    shifted = [e.solution for e in examples[1:] + examples[:1]]
    assert rewards(task, shifted).mean() < 0.2


@pytest.mark.parametrize("completion", ["", MARKER, "12", "#x", "#" * 1000, "#\ud800", "#9" * 5000])
def test_nonsense_earns_nothing(task, completion):
    assert reward(task, task.train[0], completion) == 0.0


def test_the_last_marker_counts(task):
    example = task.train[0]
    assert reward(task, example, f"#0 0#{example.answer}") == 1.0
    assert reward(task, example, f"#{example.answer}#") == 0.0
    assert reward(task, example, f"# {example.answer} ") == 1.0
    assert answer_text("5") is None
    assert answer_text("a#b# c ") == "c"


def test_items_depend_on_seed_and_index_alone(task):
    again = builtin_task(task.name, SMALL | {"train_size": 1000, "eval_size": 8})
    assert list(again.train[:300]) == list(task.train)
    assert again.train[123] == task.train[123]
    other = builtin_task(task.name, SMALL | {"seed": 1})
    assert [e.prompt for e in other.train] != [e.prompt for e in task.train]


def test_evaluation_is_distinct_and_held_out_for_every_seed(task):
    many = builtin_task(task.name, {"train_size": 1, "eval_size": 256}).evaluation
    for examples, size in ((task.evaluation, 64), (many, 256)):
        assert len({example.prompt for example in examples}) == len(examples) == size
    prompts = {example.prompt for example in task.evaluation}
    for seed in range(3):
        trained = builtin_task(task.name, {"seed": seed, "train_size": 500, "eval_size": 1}).train
        assert not prompts & {example.prompt for example in trained}


def test_held_out_is_about_an_eighth():
    """Of all 1,000 problems of three digits, the split must take about 125."""
    parameters = {"digits": [3, 3], "train_size": 6000, "eval_size": 1}
    trained = {example.prompt for example in builtin_task("sorting", parameters).train}
    assert 845 <= len(trained) <= 895


def test_running_sums_by_hand():
    for example in builtin_task("running_sums", SMALL).train:
        prompt, solution = texts(example)
        digits = [int(d) for d in re.findall(r"\d", prompt)]
        assert example.answer == str(sum(digits) % 10)
        running = itertools.accumulate(digits, lambda a, b: (a + b) % 10)
        assert solution == " ".join(map(str, running)) + "#" + example.answer


def test_sorting_by_hand():
    for example in builtin_task("sorting", SMALL).train:
        prompt, solution = texts(example)
        digits = prompt.removesuffix(">")
        assert example.answer == "".join(sorted(digits))
        for length, step in enumerate(solution.split(MARKER)[0].split(" "), 1):
            assert step == "".join(sorted(digits[:length]))


def test_addition_grades_the_first_line():
    task = builtin_task("addition", {"largest": 9, "train_size": 1000, "eval_size": 40})
    for example in itertools.chain(task.train, task.evaluation):
        assert isinstance(example.prompt, str)
        shown, line = example.prompt.rsplit("\n", 1)
        a, b = map(int, line.removesuffix("=").split("+"))
        assert example.answer == str(a + b)
        assert 0 <= a <= 9
        assert 0 <= b <= 9
        for left, right in (shown_sum.split("=") for shown_sum in shown.split()):
            assert eval(left) == int(right)
    assert not {e.prompt for e in task.train} & {e.prompt for e in task.evaluation}
    answer, example = task.train[0].answer, task.train[0]
    graded = {answer: 1, f" {answer}\n7+1": 1, answer + "0": 0, f"\n{answer}": 0, "": 0}
    assert {text: reward(task, example, text) for text in graded} == graded
    with pytest.raises(InputError, match="no worked solutions"):
        supervised(task, Quality(), seed=0, count=1)


def test_sizes_are_obeyed():
    lengths = {len(e.prompt) - 1 for e in builtin_task("sorting", SMALL | {"digits": [2, 5]}).train}
    assert lengths == {2, 3, 4, 5}
    for example in builtin_task("countdown", SMALL | {"numbers": [2, 5], "largest": 12}).train:
        assert 2 <= len(example.data["numbers"]) <= 5
        assert max(example.data["numbers"]) <= 12
        assert 1 <= example.data["target"] <= 99


def test_countdown_steps_are_true_equations():
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    for example in builtin_task("countdown", SMALL).train:
        prompt, solution = texts(example)
        numbers, target = groups(r"([\d ]+):(\d+)", prompt)
        left = [int(n) for n in numbers.split()]
        assert tuple(left) == example.data["numbers"]
        for step in solution.split(MARKER)[0].split(" "):
            a, sign, b, c = groups(r"(\d+)([-+*])(\d+)=(\d+)", step)
            assert signs[sign](int(a), int(b)) == int(c)
            left.remove(int(a))
            left.remove(int(b))
            left.append(int(c))
        assert left == [int(target)] == [example.data["target"]]


PROBLEM = Example("3 5 2:16", "", {"numbers": (3, 5, 2), "target": 16})
COUNTDOWN = builtin_task("countdown", SMALL)


def test_countdown_of_many_large_numbers_takes_its_own_answers():
    sizes = {"numbers": [7, 7], "largest": 10**9, "largest_target": 10**9}
    task = builtin_task("countdown", sizes | {"train_size": 20, "eval_size": 1})
    assert max(len(example.answer) for example in task.train) > 64
    for example in task.train:
        spaced = re.sub(r"([-+*])", r" \1 ", example.answer)
        assert reward(task, example, "#" + spaced) == 1.0


@pytest.mark.parametrize("answer", ["(3+5)*2", "2*(5+3)", "((3)+5) * 2"])
def test_countdown_accepts_any_right_expression(answer):
    assert reward(COUNTDOWN, PROBLEM, "#" + answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "16",  # not the numbers
        "3*5+1",
        "(3+5)*2*2",  # one twice
        "(3+5)*2+0",
        "3+5+2",  # not the value
        "--3+5*2",
        "-2*(-3-5)",  # signs are no operators here
        "2**(3+1)",
        "2**4",
        "32/2",
        "(3+5)*2=16",
        "(3+5)*02",
        "0x3+5",
        "(3+5)(2)",
        "(3+5,2)",
        "3+5)*2",
        "9**9**9**9",
        "(" * 30 + "3" + ")" * 30,
        "(" * 40 + "3+5" + ")" * 40 + "*2",  # too long
        "__import__('os')",
        "٣+5",  # a digit, but not ASCII
        "3+5\n*2",
    ],
)
def test_countdown_refuses(answer):
    assert reward(COUNTDOWN, PROBLEM, "#" + answer) == 0.0


@given(st.text("0123456789+-* ()", max_size=16))
def test_countdown_value_agrees_with_exact_arithmetic(text):
    """Whatever is accepted has, by an independent evaluation, the value of the target."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", text))
    try:
        tree = ast.parse(text.strip(), mode="eval")
        simple = not any(
            isinstance(n, ast.UnaryOp | ast.Call | ast.Pow | ast.FloorDiv) for n in ast.walk(tree)
        )
        value = eval(compile(tree, "", "eval"), {}, {}) if simple else None
    except (SyntaxError, TypeError, ValueError):
        value = None
    value = value if isinstance(value, int) else None
    target = -1 if value is None else value
    example = Example("", "", {"numbers": numbers, "target": target})
    assert reward(COUNTDOWN, example, "#" + text) == float(value is not None)


def test_format_reward():
    task = builtin_task("countdown", SMALL | {"format_reward": 0.25})
    assert reward(task, PROBLEM, "#3+5*2") == 0.25
    assert reward(task, PROBLEM, "#3+*2") == 0.0
    assert reward(task, PROBLEM, "3+5*2") == 0.0
    assert reward(task, PROBLEM, "#(3+5)*2") == 1.0
    sums = builtin_task("running_sums", SMALL | {"format_reward": 0.25})
    wrong = str((int(sums.train[0].answer) + 1) % 10)
    assert reward(sums, sums.train[0], "#" + wrong) == 0.25
    assert reward(sums, sums.train[0], "#" + wrong * 2) == 0.0
    sort = builtin_task("sorting", SMALL | {"format_reward": 0.25})
    example = Example("21>", "12")
    assert [reward(sort, example, c) for c in ("#12", "#21", "#121")] == [1.0, 0.25, 0.0]


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("sorted", {}, "unknown built-in task 'sorted'; did you mean 'sorting'"),
        ("sorting", {"digit": [1, 2]}, "unknown parameter 'digit'; did you mean 'digits'"),
        ("sorting", {"digits": [5, 2]}, r"digits must be two whole numbers .* got \[5, 2\]"),
        ("sorting", {"digits": 5}, "digits must be two whole numbers"),
        ("sorting", {"digits": "45"}, "digits must be two whole numbers"),
        ("running_sums", {"digits": [0, 2]}, "at least 1"),
        ("running_sums", {"train_size": 0}, "train_size must be at least 1, got 0"),
        ("running_sums", {"eval_size": 2.5}, "eval_size must be a whole number, got 2.5"),
        ("running_sums", {"format_reward": 2}, "format_reward must be a number from 0 to 1, got 2"),
        ("running_sums", {"digits": [1, 1], "eval_size": 10}, "too few different problems"),
        ("countdown", {"numbers": [1, 3]}, "at least 2"),
        ("addition", {"largest": 0}, "largest must be at least 1, got 0"),
        ("countdown", {"largest": 100}, "largest_target must be at least 100"),
    ],
)
def test_bad_parameters(name, parameters, message):
    with pytest.raises(InputError, match=message):
        builtin_task(name, SMALL | parameters)


def test_supervised_is_worked_by_default(task):
    pairs = supervised(task, Quality(), seed=0, count=400)
    assert pairs == [(task.train[i % 300].prompt, task.train[i % 300].solution) for i in range(400)]


def test_supervised_pairs_depend_on_their_number_alone(task):
    quality = Quality(worked=0.3, partial=0.3, errors=0.4)
    whole = supervised(task, quality, seed=5, count=50)
    assert supervised(task, quality, seed=5, start=20, count=10) == whole[20:30]
    assert supervised(task, quality, seed=6, count=50) != whole


def test_supervised_shares(task):
    def styles(quality: Quality) -> np.ndarray:
        pairs = supervised(task, quality, seed=1, count=600)
        found = []
        for i, (prompt, completion) in enumerate(pairs):
            example = task.train[i % 300]
            assert prompt == example.prompt
            assert completion.split(MARKER)[1] == example.answer
            assert example.solution.startswith(completion.split(MARKER)[0])
            found.append((completion == example.solution, completion.startswith(MARKER)))
        return np.mean(found, axis=0)

    worked, direct = styles(Quality(worked=0.3, partial=0.0))
    assert abs(worked - 0.3) < 0.08
    assert abs(direct - 0.7) < 0.08
    worked, direct = styles(Quality(worked=0.2, partial=0.6))
    assert abs(worked - 0.2) < 0.08
    assert 0.2 < direct < 0.7  # a partial one may stop before the first step
    assert styles(Quality(worked=0.0)).tolist() == [0.0, 1.0]


def test_supervised_errors(task):
    pairs = supervised(task, Quality(errors=1.0), seed=1, count=300)
    for example, (_, completion) in zip(task.train, pairs, strict=True):
        differing = [a != b for a, b in zip(example.solution, completion, strict=True)]
        assert sum(differing) == 1
    some = supervised(task, Quality(errors=0.5), seed=1, count=300)
    wrong = np.mean([c != e.solution for e, (_, c) in zip(task.train, some, strict=True)])
    assert abs(wrong - 0.5) < 0.12


def test_quality_is_checked(task):
    with pytest.raises(InputError, match="worked \\+ partial must be at most 1"):
        Quality(worked=0.7, partial=0.7)
    with pytest.raises(InputError, match="errors must be a number from 0 to 1, got -1"):
        Quality(errors=-1)
    plain = Task("plain", (Example("q", "a"),), (), task.grade)
    with pytest.raises(InputError, match="plain has no worked solutions"):
        supervised(plain, Quality(), seed=0, count=1)


# Games of several turns.


def play(task, example, strategy):
    """The reward of an episode in which `strategy(low, high, replies)` says the turns."""
    low, high, *_ = example.data["state"]
    state, replies, reward = state_of(example), [], 0.0
    while True:
        said = Completion(strategy(low, high, replies), np.zeros(1, np.int32), ended=True)
        turn = Turn(0, 0, len(replies), said, state, np.zeros(2, np.uint32))
        [(_, answer)] = task.environment.answers([turn])
        assert answer.failure is None
        state, reward = answer.state, reward + answer.reward
        if answer.done:
            return reward
        replies.append(answer.content)


def halve(low, high, replies, larger="+"):
    for reply in replies:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if reply == larger else (low, middle - 1)
    return (low + high) // 2


def test_halving_wins_every_guessing_game():
    task = builtin_task("guessing")
    assert all(play(task, e, lambda *a: f"#{halve(*a)}") == 1.0 for e in task.evaluation)
    task = builtin_task("guessing", {"words": True, "eval_size": 32})
    larger = "Mine is larger."
    for example in task.evaluation:
        said = play(task, example, lambda *a: f"Not 3, but {halve(*a, larger=larger)}.")
        assert said == 1.0


def test_guessing_that_does_not_listen_wins_about_a_third():
    task = builtin_task("guessing")
    rng = random.Random(0)
    rewards = [
        play(task, example, lambda low, high, _: f"#{rng.randint(low, high)}")
        for example in task.evaluation
    ]
    assert set(rewards) == {0.0, 1.0}
    assert 0.2 < sum(rewards) / len(rewards) < 0.45


def test_without_luck_a_guess_is_right_when_no_other_number_is_left():
    task = builtin_task("guessing", {"luck": False})
    rng = random.Random(0)
    wins = {"halving": 0.0, "random": 0.0, "the number": 0.0}
    for example in task.evaluation:
        number = example.data["state"][2]
        wins["halving"] += play(task, example, lambda *a: f"#{halve(*a)}")
        wins["random"] += play(task, example, lambda low, high, _: f"#{rng.randint(low, high)}")
        wins["the number"] += play(task, example, lambda *_, number=number: f"#{number}")
    assert wins["halving"] == len(task.evaluation)
    assert wins["random"] < 0.05 * len(task.evaluation)
    assert wins["the number"] == 0


@pytest.mark.parametrize("luck", [True, False])
def test_worked_games_may_halve_the_range(luck):
    task = builtin_task("guessing", {"luck": luck, "halving": 1.0})
    for index in range(50):
        guesses = re.findall(r"#\d+", texts(task.train[index])[1])
        assert play(task, task.train[index], lambda *a, g=guesses: g[len(a[2])]) == 1.0
    some = builtin_task("guessing", {"luck": luck, "halving": 0.5})
    middle = [
        texts(some.train[index])[1].startswith(f"#{(low + high) // 2}")
        for index in range(200)
        for low, high in [some.train[index].data["state"][:2]]
    ]
    assert 90 < sum(middle) < 140


def test_a_lost_game_is_paid_for_guesses_that_could_have_been_right():
    task = builtin_task("guessing", {"format_reward": 0.5, "numbers": [15, 15], "eval_size": 32})
    example = next(e for e in task.evaluation if e.data["state"][2] - e.data["state"][0] > 8)
    low = example.data["state"][0]
    for tries, share in (((0, 1, 2, 3), 1.0), ((3, 2, 1, 4), 0.5), ((-1, 3, 3, 3), 0.25)):
        reward = play(task, example, lambda *a, tries=tries: f"#{low + tries[len(a[2])]}")
        assert reward == 0.5 * share


@pytest.mark.parametrize("said", ["", "#", "12", "#x", "#-1", "#" + "9" * 5000, "#1 2"])
def test_what_is_no_guess_is_told_so(said):
    task = builtin_task("guessing", {"eval_size": 4})
    replies = []

    def strategy(low, high, so_far):
        replies[:] = so_far
        return said

    assert play(task, task.evaluation[0], strategy) == 0.0
    assert replies == ["="] * 3


def test_games_are_held_out_and_encodable():
    task = builtin_task("guessing", {"eval_size": 200})
    held_out = {example.prompt for example in task.evaluation}
    assert len({(e.prompt, e.answer) for e in task.evaluation}) == 200
    assert not held_out & {task.train[i].prompt for i in range(500)}
    for prompt, completion in supervised(task, Quality(), seed=0, count=100):
        assert set(prompt + completion.replace("<eos>", "").replace("+", "")) <= set(ALPHABET)
        assert completion.count("#") <= 4
    with pytest.raises(InputError, match=r"set sampling\.max_turns"):
        task.grade(task.evaluation[:1], ["#1"])


def test_products_of_the_largest_numbers_have_an_answer(monkeypatch):
    """They are larger than what the calculator gives."""
    below = builtin.below
    monkeypatch.setattr(builtin, "below", lambda rng, n: 2 if n == 3 else below(rng, n))
    task = builtin.arithmetic(numbers=(16, 16), largest=10**9, train_size=2, eval_size=2)
    for example in task.train:
        question = str(example.prompt).partition("?")[0]
        assert example.answer == str(math.prod(map(int, re.findall("[0-9]+", question))))
        assert int(example.answer) > 10**100
