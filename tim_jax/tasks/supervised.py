"""Supervised pairs of a chosen quality from a task's worked solutions, for a warm start."""

import random
from dataclasses import dataclass

from tim_jax.errors import InputError
from tim_jax.tasks.base import Task
from tim_jax.tasks.builtin import MARKER
from tim_jax.tasks.draws import below, rng_for, share


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
