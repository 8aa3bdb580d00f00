"""Episodes of several turns: what the policy says, what its environment replies.

A policy and an environment take turns, and write into one row of tokens that is only ever appended
to. The policy's tokens stay as they were drawn; a reply is rendered once, as tokens that follow
them.

An environment of the user's is one function, `respond(state, completion)`, which returns its next
state and a `Reply`. Bits and resumption are promised for one that is a function of its arguments: a
state, a completion and, if it takes a third, a key of this turn alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Message = Mapping[str, Any]  # with role and content, as chat templates take it


@dataclass(frozen=True, eq=False)
class Completion:
    """One turn of the policy.

    Attributes:
      text: the tokens as text, without the end token.
      tokens: i32[n], as they were drawn, the end token included.
      ended: whether the policy ended its turn. False: it was cut at `max_tokens`.
    """

    text: str
    tokens: np.ndarray
    ended: bool


@dataclass(frozen=True)
class Reply:
    """What the environment says to a completion.

    Attributes:
      content: text, which becomes the next user's message; messages; or tokens, which follow the
        completion as they are. Nobody reads it where `done`.
      reward: of this turn, a finite number. An episode's reward is the sum over its turns.
      done: whether the episode ends here.
    """

    content: str | Sequence[Message] | Sequence[int] | np.ndarray = ""
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True, eq=False)
class Turn:
    """A completion that waits for its environment.

    Attributes:
      prompt, sample, turn: which one it is within the step, from 0.
      state: the episode's, as the last outcome left it; before the first turn its row's.
      key: u32[2], of (seed, step, prompt, sample, turn).
    """

    prompt: int
    sample: int
    turn: int
    completion: Completion
    state: Any
    key: np.ndarray


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an environment makes of one turn.

    Attributes:
      state: the episode's next.
      tokens: i32[n], to append: all that stands between the completion and the next turn. None
        where `done`.
      failure: why the environment ended the episode by not replying: a limit of time that passed,
        a crash, a reply that is none. Then the reward is 0 and `done` holds.
    """

    state: Any
    tokens: np.ndarray
    reward: float = 0.0
    done: bool = False
    failure: str | None = None


class Environment(Protocol):
    """What a loop asks for replies."""

    def outcomes(self, turns: Sequence[Turn]) -> Iterator[tuple[int, Outcome]]:
        """Yields (index in `turns`, outcome) for each, in the order in which they are there."""
        ...
