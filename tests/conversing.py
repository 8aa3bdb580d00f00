"""Environments in tokens whose replies follow from a turn's key."""

import time
from dataclasses import dataclass

import numpy as np

from tim_jax.tasks.episodes import Outcome


@dataclass
class Replying:
    """Random replies of up to `longest` tokens; an episode ends after a turn with this chance.

    `asked` has the turns of every call.
    """

    longest: int = 40
    vocabulary: int = 23
    ending: float = 0.1
    shuffled: bool = False  # replies come late, and in another order
    seed: int = 0

    def __post_init__(self):
        self.asked = []

    def outcomes(self, turns):
        self.asked.append(list(turns))
        order = np.arange(len(turns))
        if self.shuffled:
            order = np.random.default_rng(len(turns)).permutation(len(turns))
        for index in order.tolist():
            if self.shuffled:
                time.sleep(0.002)
            yield index, self.outcome(turns[index])

    def outcome(self, turn):
        rng = np.random.default_rng([self.seed, *(int(part) for part in turn.key)])
        tokens = rng.integers(0, self.vocabulary, rng.integers(0, self.longest + 1))
        said = [*turn.state, len(turn.completion.tokens)]
        return Outcome(
            said, tokens.astype(np.int32), float(rng.random()), rng.random() < self.ending
        )
