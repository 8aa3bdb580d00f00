"""Which matrices have low-rank adapters, and of what size: a value that configurations can read
without the kernels that `adapters` computes with."""

import math
from dataclasses import dataclass

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.model.weights import TABLE, Weight


def _module(weight: Weight) -> str:
    """The name of a matrix as users know it, such as "q_proj"."""
    return weight.tensor.split(".")[-2]


_ADAPTED = ("q", "k", "v", "o", "gate", "up", "down")
KNOWN = {_module(row): row for row in TABLE if row.name in _ADAPTED}
OF_EXPERTS = {_module(row) for row in TABLE if row.kind == "matrix" and row.stacked > 1}


@dataclass(frozen=True)
class Lora:
    """Which matrices have adapters, and how large these are. Raises `InputError` for bad values."""

    rank: int = 8
    """Columns of A and rows of B."""
    alpha: float = 16.0
    """A B is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of matrices such as "q_proj"; none: all of attention and MLP."""

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise InputError(f"Lora: rank must be a whole number of at least 1, got {self.rank!r}")
        if not 0 < self.alpha < math.inf:
            raise InputError(f"Lora: alpha must be greater than 0 and finite, got {self.alpha}")
        if isinstance(self.targets, str):
            raise InputError(f"Lora: targets must be a list of names, got {self.targets!r}")
        object.__setattr__(self, "targets", tuple(self.targets))
        for name in self.targets:
            if name not in KNOWN:
                raise InputError(
                    f"Lora: target {name!r} is unknown{did_you_mean(str(name), KNOWN)}"
                )
        if len(set(self.targets)) < len(self.targets):
            raise InputError(f"Lora: targets has a name twice: {', '.join(self.targets)}")

    @property
    def scale(self) -> float:
        """What A B is multiplied by."""
        return self.alpha / self.rank
