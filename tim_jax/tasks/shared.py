"""Grading shared among processes: each grades its part, and all get the same verdicts.

Every completion is graded once. Were each process to grade all of them, a time limit could be hit
on one and not on another, and they would go on to train on different rewards.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tim_jax.tasks.base import Example, Grade, Grader


@dataclass(frozen=True)
class SharedGrader:
    """A grader of every process's own part of the rows.

    exchange: this process's text -> the texts of all processes, in order.
    """

    grade: Grader
    index: int
    count: int
    exchange: Callable[[str], list[str]]

    def __call__(self, examples: Sequence[Example], completions: Sequence[str]) -> list[Grade]:
        size = -(-len(completions) // self.count)
        own = slice(self.index * size, (self.index + 1) * size)
        grades = self.grade(examples[own], completions[own]) if completions[own] else []
        # As JSON, a float comes back to the bit.
        parts = self.exchange(json.dumps([[grade.reward, grade.fault] for grade in grades]))
        return [Grade(reward, fault) for part in parts for reward, fault in json.loads(part)]

    def close(self) -> None:
        close = getattr(self.grade, "close", None)
        if close is not None:
            close()
