"""Graders and tasks of other libraries: math-verify (extra `math`), reasoning-gym (extra `gym`).

Both work in guarded worker processes (`guard`): answers may hang a grader, five datasets of
reasoning-gym depend on Python's hash seed, which is fixed there, and some of its scorers evaluate
what the policy wrote.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import check_whole
from tim_jax.tasks.base import Example, Generated, Grade, Message, Task
from tim_jax.tasks.guard import Guard, Limits, Outcome, Refusal, grade_of

SYSTEM = (
    "Solve the problem. Think step by step first if that helps, then give the final answer alone"
    " between <answer> and </answer>, in the form that the problem asks for."
)
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MOST_TRAINING, MOST_HELD_OUT = 10**7, 10**5  # larger sizes are slips, and take hours
KEPT = 4096  # problems that a task keeps in memory
ITEM_SECONDS = 60.0  # CPU seconds to make one problem; some datasets search for a good one


class MathGrader:
    """Reward 1 for a completion whose final answer equals the example's answer, else 0.

    The answer is what `math_verify.parse` finds in the completion: a final-answer phrase, a
    `\\boxed{}`, mathematics in dollars or a plain number, usually the last one. `1/2`, `0.5` and
    `\\frac{2}{4}` are equal. Two boxes close to each other are read as a set, so that a corrected
    answer is wrong; letters are read as a product, in any order. A grade depends only on (answer,
    completion): not on the batch, the number of workers or what they graded before.

    Raises:
      InputError: when made, if `math-verify` is not installed.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        if find_spec("math_verify") is None:
            raise InputError("grading mathematics needs math-verify: pip install 'tim-jax[math]'")
        self._guard = Guard("math", {}, limits or Limits())
        self._guard.start()

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        pairs = zip(examples, completions, strict=True)
        bodies = [{"answer": example.answer, "completion": text} for example, text in pairs]
        return [grade_of(outcome) for outcome in self._guard.map(bodies)]

    def close(self) -> None:
        """Ends the workers; a later call starts new ones."""
        self._guard.close()

    def __enter__(self) -> "MathGrader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def gym_task(
    name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    train_size: int = 4096,
    eval_size: int = 128,
    system: str | None = SYSTEM,
    limits: Limits | None = None,
) -> Task:
    """Returns the reasoning-gym dataset `name` as a task.

    Items 0 to train_size - 1 of the dataset are for training, the next eval_size for evaluation,
    without repeated questions. A training item whose question is held out is replaced by the next
    one that is not.

    The answer is the text of the last `<answer>...</answer>`, or the whole completion without a
    system prompt; rewards are the dataset's own, from 0 to 1.

    Args:
      parameters: the dataset's own, without `seed` and `size`.
      system: system prompt of a chat; None gives the bare question as plain text.

    Raises:
      InputError: if reasoning-gym is missing, for an unknown name or parameter (the nearest is
        named) or a value that the dataset refuses, and if it has too few different questions.
    """
    if find_spec("reasoning_gym") is None:
        raise InputError(f"task {name!r} needs reasoning-gym: pip install 'tim-jax[gym]'")
    for key in ("seed", "size"):
        if key in (parameters or {}):
            raise InputError(f"reasoning-gym task {name!r}: {key!r} is set by the task, not here")
    check_whole("seed", seed, least=0)
    check_whole("train_size", train_size, least=1, most=MOST_TRAINING)
    check_whole("eval_size", eval_size, least=1, most=MOST_HELD_OUT)
    given = {**(parameters or {}), "seed": seed, "size": train_size + eval_size}
    guard = Guard("gym", {"name": name, "parameters": given}, limits or Limits())
    source = _Source(name, guard, system)
    evaluation = _distinct(source.examples(range(train_size, train_size + eval_size)))
    held_out = frozenset(_question(example) for example in evaluation)

    @lru_cache(maxsize=KEPT)
    def train_item(index: int) -> Example:
        for step in range(train_size):
            example = source.examples([(index + step) % train_size])[0]
            if _question(example) not in held_out:
                return example
        raise InputError(f"reasoning-gym task {name!r}: all training questions are held out")

    train_item(0)
    lacking = eval_size - len(evaluation)
    notes = (f"{lacking} of {eval_size} evaluation questions left out: not new",) if lacking else ()
    grader = GymGrader(guard, tagged=system is not None)
    return Task(f"gym:{name}", Generated(train_item, train_size), evaluation, grader, notes)


class GymGrader:
    """The dataset's own score of an answer, 0 to 1. A score that is not finite is a fault."""

    def __init__(self, guard: Guard, *, tagged: bool) -> None:
        self._guard, self._tagged = guard, tagged
        self.close = guard.close

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        pairs = zip(examples, map(self._answer, completions), strict=True)
        bodies = [{"index": example.data["index"], "answer": text} for example, text in pairs]
        return [grade_of(outcome) for outcome in self._guard.map(bodies)]

    def _answer(self, completion: str) -> str | None:
        answers = TAGGED.findall(completion) if self._tagged else [completion]
        return answers[-1].strip() if answers else None


@dataclass(frozen=True)
class _Source:
    """Makes examples of one dataset in the workers."""

    name: str
    guard: Guard
    system: str | None

    def examples(self, indices: Sequence[int]) -> list[Example]:
        bodies = [{"index": int(index)} for index in indices]
        try:
            outcomes = self.guard.map(bodies, seconds=ITEM_SECONDS)
        except Refusal as refusal:
            raise InputError(self._refused(refusal)) from None
        return [self._example(i, outcome) for i, outcome in zip(indices, outcomes, strict=True)]

    def _example(self, index: int, outcome: Outcome) -> Example:
        if outcome.fault is not None:
            raise InputError(
                f"reasoning-gym task {self.name!r}: item {index} could not be made:"
                f" {outcome.fault} {outcome.detail}"
            )
        question = outcome.value["question"]
        prompt = question
        if self.system is not None:
            prompt = (Message("system", self.system), Message("user", question))
        return Example(prompt, str(outcome.value["answer"] or ""), {"index": index})

    def _refused(self, refusal: Refusal) -> str:
        names = refusal.reply.get("known")
        hint = did_you_mean(refusal.reply.get("parameter", self.name), names) if names else ""
        return f"reasoning-gym task {self.name!r}: {refusal}{hint}"


def _question(example: Example) -> str:
    return example.prompt if isinstance(example.prompt, str) else example.prompt[-1].content


def _distinct(examples: Sequence[Example]) -> tuple[Example, ...]:
    return tuple({_question(example): example for example in reversed(examples)}.values())[::-1]
