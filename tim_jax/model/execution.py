"""What, how, from which distribution and where: one value that sampler and learner share.

Two executions that are equal give every token the same log-prob bits; the fields in which two of
them differ describe an experiment with mismatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from tim_jax.errors import InputError
from tim_jax.model import preparing
from tim_jax.model.config import ModelConfig
from tim_jax.model.weights import Params, Weights
from tim_jax.numerics import Numerics
from tim_jax.placement import SINGLE, Placement


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from, and when a response ends.

    Order of operations: logits / temperature, then top-k, then top-p of what top-k left, then
    renormalisation. Recorded log-probs are those of this final distribution.
    """

    max_response_length: int = 64
    temperature: float = 1.0  # 0 means greedy: argmax, log-prob 0
    top_k: int = 0  # 0 means off
    top_p: float = 1.0  # 1 means off
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self):
        if self.max_response_length < 1:
            raise InputError(
                f"Sampling: max_response_length must be positive, got {self.max_response_length}"
            )
        if self.temperature < 0:
            raise InputError(f"Sampling: temperature must be >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise InputError(f"Sampling: top_k must be >= 0 (0 is off), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"Sampling: top_p must be in (0, 1] (1 is off), got {self.top_p}")

    @property
    def truncated(self) -> bool:
        """True if top-k or top-p leaves tokens out."""
        return self.top_k > 0 or self.top_p < 1


@dataclass(frozen=True)
class Execution:
    """Everything that turns weights into tokens and log-probs, but for the weights."""

    config: ModelConfig  # what is computed
    numerics: Numerics  # how numbers are computed
    sampling: Sampling = Sampling()  # the distribution that tokens are drawn from
    placement: Placement = SINGLE  # where

    def prepare(self, params: Params) -> Weights:
        """Compute weights of the master weights; see `preparing.prepare`."""
        return preparing.prepare(params, config=self.config, numerics=self.numerics)


def jit(function: Callable, numerics: Numerics, **options: Any) -> Callable:
    """`jax.jit(function, **options)`; XLA's own options are part of how numbers are computed.

    An option that this version of XLA does not know is refused by XLA, by name, when it compiles.
    """
    return jax.jit(function, compiler_options=dict(numerics.compiler_options) or None, **options)
