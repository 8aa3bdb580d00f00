"""Small tasks with verifiable answers and room to work step by step; no download, no extras.

  running sums  `3+8+5=`      ->  `3 1 6#6`                     the sum of the digits mod 10
  sorting       `7305>`       ->  `7 37 037#0357`               insertion sort of the digits
  countdown     `3 5 2:16`    ->  `3+5=8 8*2=16#(3+5)*2`        reach 16, each number used once
  addition      `17+8=`       ->  `25`, a line break            a sum, after three that show how
  guessing      `20-31:`      ->  `#25`, is told `+`, `#28`, `-`, `#27`   a game of several turns

`addition` is for a language model that can read already; the rest is about the others. The answer
is what follows the last `#` of a completion; everything before it is working and is not graded. A
policy may answer at once (`#6`), or work first, which is longer and more often right.

Their text is over `ALPHABET`. With the default sizes a prompt has at most 24 characters and a
worked completion at most 48. Whether a problem is held out is decided by a hash of its prompt, so
training and evaluation are disjoint for every seed and size.
"""

import ast
import hashlib
import inspect
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import check_whole
from tim_jax.tasks.base import (
    EOS,
    Completion,
    Example,
    Generated,
    Grade,
    Reply,
    Task,
    below,
    check_sizes,
    in_turns,
    rng_for,
    share,
    span,
)
from tim_jax.tasks.environments import Here
from tim_jax.tasks.tools import arithmetic_value, calculator, tools

ALPHABET = "0123456789 +-*()=:>#"
MARKER = "#"
SUMS = "2+5=7\n11+3=14\n8+6=14\n"  # the examples of `addition`
HELD_OUT = 8  # one prompt in 8 belongs to the evaluation
ATTEMPTS = 1000  # draws for one item before its sizes count as too small
# Larger sizes are slips, and would keep a run busy with making problems instead of saying so.
LARGEST_PROBLEM, MOST_NUMBERS, LARGEST_NUMBER = 1000, 16, 10**9
SOLVABLE = 10_000  # draws of numbers and signs for one problem of countdown

# Of all numbers that a problem may have; the product of two such values is still a float's.
_LARGEST_PRODUCT = LARGEST_NUMBER**MOST_NUMBERS

Draw = Callable[[random.Random], Example]
Judge = Callable[[Example, str], bool]


def running_sums(
    *,
    digits: tuple[int, int] = (4, 10),
    seed: int = 0,
    train_size: int = 8192,
    eval_size: int = 256,
    format_reward: float = 0.0,
) -> Task:
    """The sum of the digits mod 10; the worked form writes every running sum mod 10.

    Args:
      digits: fewest and most digits of a problem. A prompt has 2n characters, a worked completion
        2n + 1.
      seed: names the problems; held-out prompts are never trained on, whatever the seed.
      train_size: how many problems to train on.
      eval_size: how many problems to evaluate on, all different.
      format_reward: reward for a wrong answer of the right form; 1 is for the right answer.
    """
    least, most = span("digits", digits, 1, LARGEST_PROBLEM)

    def draw(rng: random.Random) -> Example:
        terms = [below(rng, 10) for _ in range(least + below(rng, most - least + 1))]
        steps = [str(sum(terms[: i + 1]) % 10) for i in range(len(terms))]
        return _example("+".join(map(str, terms)) + "=", steps, steps[-1])

    grade = partial(_grade, _same, _as_many_digits, share("format_reward", format_reward))
    return _task("running_sums", draw, grade, seed, (train_size, eval_size))


def sorting(
    *,
    digits: tuple[int, int] = (4, 8),
    seed: int = 0,
    train_size: int = 8192,
    eval_size: int = 256,
    format_reward: float = 0.0,
) -> Task:
    """Sort digits; the worked form shows the sorted part as it grows by one digit at a time.

    The last four arguments are explained in `running_sums`.

    Args:
      digits: fewest and most digits. A prompt has n + 1 characters, a worked completion
        n (n + 3) / 2, hence at most 44 for 8 digits.
    """
    least, most = span("digits", digits, 2, LARGEST_PROBLEM)

    def draw(rng: random.Random) -> Example:
        text = "".join(str(below(rng, 10)) for _ in range(least + below(rng, most - least + 1)))
        steps = ["".join(sorted(text[: i + 1])) for i in range(len(text))]
        return _example(text + ">", steps[:-1], steps[-1])

    grade = partial(_grade, _same, _as_many_digits, share("format_reward", format_reward))
    return _task("sorting", draw, grade, seed, (train_size, eval_size))


def countdown(
    *,
    numbers: tuple[int, int] = (3, 4),
    largest: int = 9,
    largest_target: int = 99,
    seed: int = 0,
    train_size: int = 8192,
    eval_size: int = 256,
    format_reward: float = 0.0,
) -> Task:
    """Reach a target from given numbers with +, - and *, each number used exactly once.

    Every problem has a solution with whole numbers from 1 to `largest_target` at each step. Any
    expression that uses the numbers and has the value is right, not only the one in `answer`. The
    last four arguments are explained in `running_sums`.

    Args:
      numbers: fewest and most numbers.
      largest: numbers are drawn from 1 to this.
      largest_target: targets, and all intermediate results of the worked form, are at most this.
    """
    least, most = span("numbers", numbers, 2, MOST_NUMBERS)
    largest = check_whole("largest", largest, least=1, most=LARGEST_NUMBER)
    largest_target = check_whole(
        "largest_target", largest_target, least=largest, most=LARGEST_NUMBER
    )

    def draw(rng: random.Random) -> Example:
        return _countdown(rng, least + below(rng, most - least + 1), largest, largest_target)

    def reached(example: Example, answer: str) -> bool:
        numbers, target = example.data["numbers"], example.data["target"]
        value, used = _expression(answer, numbers) or (None, [])
        return value == target and sorted(used) == sorted(numbers)

    def well_formed(example: Example, answer: str) -> bool:
        return _expression(answer, example.data["numbers"]) is not None

    grade = partial(_grade, reached, well_formed, share("format_reward", format_reward))
    return _task("countdown", draw, grade, seed, (train_size, eval_size))


def guessing(
    *,
    numbers: tuple[int, int] = (8, 15),
    largest: int = 99,
    guesses: int = 4,
    luck: bool = True,
    words: bool = False,
    halving: float = 0.0,
    seed: int = 0,
    train_size: int = 8192,
    eval_size: int = 256,
    format_reward: float = 0.0,
) -> Task:
    """Guess a number of a range; every wrong guess is told whether the number is larger or smaller.

    A game of several turns: `20-31:` -> `#25`, to which the reply is `+` (the number is larger),
    `-` (smaller) or `=` (that was no number). The reward of the right guess is 1, and halving the
    range finds each of up to 2**guesses - 1 numbers.

    The last four arguments are explained in `running_sums`.

    Args:
      numbers: fewest and most numbers of a range.
      largest: ranges end here at most.
      guesses: turns that an episode has.
      luck: whether the number is chosen before the game. Else a reply leaves as many numbers as it
        can, so that a guess is right only if no other number is left.
      words: prompts and replies in English, and the guess is the last number of a completion, for a
        model that has learned from text.
      halving: share of worked games that guess the middle of what is left; the rest do not listen.
      format_reward: reward of an episode without the right guess, times the share of its guesses
        that could have been right, after what was told before.
    """
    least, most = span("numbers", numbers, 2, LARGEST_NUMBER)
    largest = check_whole("largest", largest, least=most, most=LARGEST_NUMBER)
    guesses = check_whole("guesses", guesses, least=1, most=LARGEST_PROBLEM)
    share("halving", halving)
    rules = _Rules(guesses, luck, words, share("format_reward", format_reward))

    def draw(rng: random.Random) -> Example:
        width = least + below(rng, most - least + 1)
        low = below(rng, largest - width + 2)
        high = low + width - 1
        number = low + below(rng, width)
        state = (low, high, number, guesses, 0)
        tries = [low + below(rng, width) for _ in range(guesses)]
        tries = [] if halving and rng.random() < halving else tries
        solution = None if words else _worked(rules, state, tries)
        prompt = GUESS.format(low=low, high=high) if words else f"{low}-{high}:"
        return Example(prompt, str(number), {"state": state}, solution)

    task = _task("guessing", draw, in_turns, seed, (train_size, eval_size))
    return replace(task, environment=Here(partial(_hint, rules)))


GUESS = (
    "I think of a whole number from {low} to {high}. Guess it: say one number in each answer. I say"
    " whether mine is larger or smaller."
)
# Without and with words: to a number that is too small, one that is too large, and none.
REPLIES = ("+", "-", "="), ("Mine is larger.", "Mine is smaller.", "I see no number.")
Game = tuple[int, int, int, int, int]  # least, most, number, guesses left, proper ones so far


class _Rules(NamedTuple):
    guesses: int
    luck: bool
    words: bool
    consolation: float


def _hint(rules: _Rules, state: Game, completion: Completion) -> tuple[Game, Reply]:
    low, high, number, left, proper = state
    guess = _guess(completion.text, rules.words)
    if guess == number if rules.luck else guess == low == high:
        return state, Reply(reward=1.0, done=True)
    larger, smaller, hint = REPLIES[rules.words]
    if guess is not None:
        proper += low <= guess <= high
        # Without luck the number is where more numbers are left.
        above, below_it = high - max(guess, low - 1), min(guess, high + 1) - low
        by_number = rules.luck or above == below_it
        is_larger = guess < number if by_number else above > below_it
        hint = larger if is_larger else smaller
        low, high = (max(low, guess + 1), high) if is_larger else (low, min(high, guess - 1))
    if left == 1:
        return state, Reply(reward=rules.consolation * proper / rules.guesses, done=True)
    return (low, high, number, left - 1, proper), Reply(hint)


def _worked(rules: _Rules, state: Game, tries: Sequence[int]) -> str:
    """A whole game with these guesses, or if there are none, with the middle of what is left."""
    game = ""
    for number in range(rules.guesses):
        text = f"{MARKER}{tries[number] if tries else (state[0] + state[1]) // 2}"
        state, reply = _hint(rules, state, Completion(text, np.zeros(0, np.int32), ended=True))
        game += text if reply.done else f"{text}{EOS}{reply.content}"
        if reply.done:
            break
    return game


def _guess(text: str, words: bool) -> int | None:
    numbers = re.findall(r"[0-9]+", text) if words else [answer_text(text) or ""]
    is_one = numbers and re.fullmatch(r"[0-9]{1,18}", numbers[-1])
    return int(numbers[-1]) if is_one else None


def arithmetic(
    *,
    numbers: tuple[int, int] = (2, 4),
    largest: int = 999,
    role: Literal["tool", "user"] = "tool",
    explain: bool = True,
    seed: int = 0,
    train_size: int = 8192,
    eval_size: int = 256,
) -> Task:
    """Sums and products of whole numbers in words, with a calculator as a tool.

    An answer is a turn without a call of the tool. Its reward is 1 if its last number is right,
    else 0. The last three arguments are explained in `running_sums`.

    Args:
      numbers: fewest and most numbers of a problem.
      largest: numbers are drawn from 1 to this.
      role: of the tool's messages; `user` for chat templates that know no tools.
      explain: whether prompts say how the tool is called, for models whose chat template does not.
    """
    least, most = span("numbers", numbers, 2, MOST_NUMBERS)
    largest = check_whole("largest", largest, least=9, most=LARGEST_NUMBER)

    def draw(rng: random.Random) -> Example:
        terms = [str(1 + below(rng, largest)) for _ in range(least + below(rng, most - least + 1))]
        signs = ["+-*"[below(rng, 3)] for _ in terms[1:]]
        text = terms[0] + "".join(f" {s} {t}" for s, t in zip(signs, terms[1:], strict=True))
        how = f" {CALLED}" if explain else ""
        value = arithmetic_value(ast.parse(text, mode="eval").body, largest=_LARGEST_PRODUCT)
        return Example(f"What is {text}?{how} {ANSWERED}", str(value))

    task = _task("arithmetic", draw, in_turns, seed, (train_size, eval_size))
    respond = tools([calculator], reward=_last_number, role=role)
    return replace(task, environment=Here(respond))


CALLED = (
    'Compute with <tool_call>{"name": "calculator", "arguments": {"expression": "2*3+4"}}'
    "</tool_call>."
)
ANSWERED = "Then answer with the number alone."


def _last_number(answer: str, completion: Completion) -> float:
    found = re.findall(r"-?[0-9]+", completion.text.replace(",", ""))
    return float(bool(found) and found[-1] == answer)


def addition(
    *, largest: int = 24, seed: int = 0, train_size: int = 8192, eval_size: int = 256
) -> Task:
    """Add two numbers, after three sums that show how: for a model that can read already.

    A prompt is `2+5=7`, two more such lines, and `17+8=`. The answer is the completion's first
    line; what follows is not graded, so that a line break may be a stop token. Half of the sums
    are held out. The last three arguments are explained in `running_sums`.

    Args:
      largest: numbers are drawn from 0 to this.
    """
    largest = check_whole("largest", largest, least=1, most=LARGEST_NUMBER)

    def draw(rng: random.Random) -> Example:
        a, b = below(rng, largest + 1), below(rng, largest + 1)
        return Example(f"{SUMS}{a}+{b}=", str(a + b))

    def grade(examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        pairs = zip(examples, completions, strict=True)
        return [Grade(float(c.partition("\n")[0].strip() == e.answer)) for e, c in pairs]

    return _task("addition", draw, grade, seed, (train_size, eval_size), held_out=2)


BUILTIN: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {make.__name__: make for make in (running_sums, sorting, countdown, addition)}
)
GAMES: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {make.__name__: make for make in (guessing, arithmetic)}
)


def builtin_task(name: str, parameters: Mapping[str, Any] | None = None) -> Task:
    """Returns the built-in task `name` with `parameters`, the keywords of its function.

    Raises:
      InputError: for an unknown name or parameter (the nearest is named), or a value out of range.
    """
    known = {**BUILTIN, **GAMES}
    if name not in known:
        raise InputError(f"unknown built-in task {name!r}{did_you_mean(name, known)}")
    allowed = inspect.signature(known[name]).parameters
    parameters = dict(parameters or {})
    for key in parameters:
        if key not in allowed:
            raise InputError(f"task {name}: unknown parameter {key!r}{did_you_mean(key, allowed)}")
    return known[name](**parameters)


def answer_text(completion: str) -> str | None:
    """Returns the text after the last `#`, stripped, or None if there is no `#`."""
    _, marker, answer = completion.rpartition(MARKER)
    return answer.strip() if marker else None


def _example(
    prompt: str, steps: Sequence[str], answer: str, data: Mapping[str, Any] | None = None
) -> Example:
    return Example(prompt, answer, data or {}, solution=" ".join(steps) + MARKER + answer)


def _task(
    name: str,
    draw: Draw,
    grade: Callable[[Sequence[Example], Sequence[str]], list[Grade]],
    seed: int,
    sizes: tuple[int, int],
    held_out: int = HELD_OUT,
) -> Task:
    """A task of which one problem in `held_out` belongs to the evaluation."""
    train_size, eval_size = sizes
    seed = check_whole("seed", seed)
    check_sizes(train_size, eval_size)
    train = Generated(partial(_train_item, name, draw, seed, held_out), train_size)
    train[0]  # too few problems is an error of the parameters: say so now, not in the first step
    return Task(name, train, _evaluation(name, draw, seed, held_out, eval_size), grade)


def _train_item(name: str, draw: Draw, seed: int, held_out: int, index: int) -> Example:
    rng = rng_for(name, seed, index)
    for _ in range(ATTEMPTS):
        example = draw(rng)
        if not _held_out(example, held_out):
            return example
    raise InputError(f"task {name}: these sizes allow too few different problems to hold some out")


def _evaluation(name: str, draw: Draw, seed: int, held_out: int, size: int) -> tuple[Example, ...]:
    rng = rng_for(name, seed, "evaluation")
    problems: dict[Any, Example] = {}
    for _ in range(ATTEMPTS + 10 * held_out * size):
        example = draw(rng)
        if _held_out(example, held_out):
            # A state may tell apart what has one prompt; another worked answer does not.
            problems.setdefault((example.prompt, example.data.get("state")), example)
        if len(problems) == size:
            return tuple(problems.values())
    raise InputError(
        f"task {name}: these sizes allow too few different problems for eval_size={size}"
        f" (found {len(problems)}); take a smaller eval_size or larger problems"
    )


def _held_out(example: Example, one_in: int) -> bool:
    digest = hashlib.blake2b(str(example.prompt).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % one_in == 0


def _grade(
    right: Judge,
    well_formed: Judge,
    format_reward: float,
    examples: Sequence[Example],
    completions: Sequence[str],
) -> list[Grade]:
    def reward(example: Example, completion: str) -> float:
        answer = answer_text(completion)
        if answer is None:
            return 0.0
        if right(example, answer):
            return 1.0
        return format_reward if well_formed(example, answer) else 0.0

    return [Grade(reward(e, c)) for e, c in zip(examples, completions, strict=True)]


def _same(example: Example, answer: str) -> bool:
    return answer == example.answer


def _as_many_digits(example: Example, answer: str) -> bool:
    return re.fullmatch(r"[0-9]+", answer) is not None and len(answer) == len(example.answer)


OPERATORS = MappingProxyType({"+": operator.add, "-": operator.sub, "*": operator.mul})
LONGEST = 64  # characters of an expression of few numbers


def _countdown(rng: random.Random, count: int, largest: int, largest_target: int) -> Example:
    """Joins two of the numbers at random until one is left; draws again on leaving the range."""
    for _ in range(SOLVABLE):
        numbers = tuple(1 + below(rng, largest) for _ in range(count))
        # Terms are (value, text, binding strength of the outermost operator).
        terms = [(n, str(n), 3) for n in numbers]
        steps = []
        while len(terms) > 1:
            a = terms.pop(below(rng, len(terms)))
            b = terms.pop(below(rng, len(terms)))
            sign = "+-*"[below(rng, 3)]
            value = OPERATORS[sign](a[0], b[0])
            if not 1 <= value <= largest_target:
                break
            steps.append(f"{a[0]}{sign}{b[0]}={value}")
            terms.append((value, _join(a, sign, b), 2 if sign == "*" else 1))
        else:
            prompt = f"{' '.join(map(str, numbers))}:{terms[0][0]}"
            data = {"numbers": numbers, "target": terms[0][0]}
            return _example(prompt, steps, terms[0][1], data)
    raise InputError(
        f"task countdown: {count} numbers up to {largest} hardly ever stay within"
        f" largest_target={largest_target}; take fewer or smaller numbers, or a larger target"
    )


def _join(a: tuple[int, str, int], sign: str, b: tuple[int, str, int]) -> str:
    strength = 2 if sign == "*" else 1
    left = a[1] if a[2] >= strength else f"({a[1]})"
    right = b[1] if b[2] > strength or (b[2] == strength and sign != "-") else f"({b[1]})"
    return f"{left}{sign}{right}"


def _expression(text: str, numbers: Sequence[int]) -> tuple[float, list[int]] | None:
    """Returns the value of an expression of numbers, +, -, * and parentheses, and its numbers.

    Returns None for everything else: signs (`-3`), powers, leading zeros, other characters, and
    what is longer than any expression of `numbers` needs. The text is parsed, never run.
    """
    # Each number may have a pair of parentheses, an operator and spaces around both. The depth of
    # the syntax tree is bounded too.
    longest = max(LONGEST, sum(len(str(number)) + 6 for number in numbers))
    if len(text) > longest or re.fullmatch(r"[0-9 +\-*()]+", text) is None:
        return None
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        if any(isinstance(node, ast.UnaryOp | ast.Pow) for node in ast.walk(parsed)):
            return None
        value = arithmetic_value(parsed, largest=_LARGEST_PRODUCT)
        return value, [int(digits) for digits in re.findall("[0-9]+", text)]
    except (SyntaxError, ValueError):
        return None


@dataclass(frozen=True)
class Quality:
    """How good supervised completions are, as shares of them.

    `worked` have every step; `partial` stop after some of the steps and then answer; the rest
    answer at once. Of all of them, `errors` have one digit replaced by a wrong one.
    """

    worked: float = 1.0
    partial: float = 0.0
    errors: float = 0.0

    def __post_init__(self) -> None:
        for name in ("worked", "partial", "errors"):
            share(name, getattr(self, name))
        if self.worked + self.partial > 1:
            raise InputError(
                f"quality: worked + partial must be at most 1, got {self.worked} + {self.partial}"
            )


def supervised(
    task: Task, quality: Quality, *, seed: int, start: int = 0, count: int
) -> list[tuple[str, str]]:
    """Returns `count` (prompt, completion) pairs for a warm start, from pair number `start`.

    Pair i uses training problem i mod len(task.train), and is a function of (task, quality, seed,
    i) alone, so batches can be taken in any order.

    Raises:
      InputError: if the task has no worked solutions.
    """
    return [_pair(task, quality, seed, i) for i in range(start, start + count)]


def _pair(task: Task, quality: Quality, seed: int, index: int) -> tuple[str, str]:
    example = task.train[index % len(task.train)]
    if example.solution is None or not isinstance(example.prompt, str):
        raise InputError(f"task {task.name} has no worked solutions to learn from")
    rng = rng_for("supervised", seed, index)
    steps, _, answer = example.solution.rpartition(MARKER)
    style = rng.random()
    if style >= quality.worked:
        whole = steps.split(" ")
        kept = below(rng, len(whole)) if style < quality.worked + quality.partial else 0
        steps = " ".join(whole[:kept])
    completion = steps + MARKER + answer
    if rng.random() < quality.errors:
        completion = _with_error(rng, completion)
    return example.prompt, completion


def _with_error(rng: random.Random, text: str) -> str:
    places = [i for i, letter in enumerate(text) if letter.isdigit()]
    i = places[below(rng, len(places))]
    wrong = (int(text[i]) + 1 + below(rng, 9)) % 10
    return f"{text[:i]}{wrong}{text[i + 1 :]}"
