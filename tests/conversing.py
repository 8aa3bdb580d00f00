"""An environment in tokens whose replies follow from a turn's key."""

import time
from dataclasses import replace

import numpy as np

from tim_jax.instruments.auditing import Replies


class Replying:
    """Random replies, with `shuffled` late and in another order. A state has the turns' lengths.

    `asked` has the turns of every call.
    """

    def __init__(self, longest=40, vocabulary=23, ending=0.1, *, shuffled=False):
        self.replies, self.shuffled = Replies(longest, vocabulary, ending), shuffled
        self.asked = []

    def outcomes(self, turns):
        self.asked.append(list(turns))
        order = np.arange(len(turns))
        if self.shuffled:
            order = np.random.default_rng(len(turns)).permutation(len(turns))
        for index in order.tolist():
            if self.shuffled:
                time.sleep(0.002)
            said = [*turns[index].state, len(turns[index].completion.tokens)]
            yield index, replace(self.replies.outcome(turns[index]), state=said)
