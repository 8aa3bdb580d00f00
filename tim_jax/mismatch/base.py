"""An entry of the dial: a small value that edits the sampler in one named way."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import inf
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import jax

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import check_kinds
from tim_jax.common.types import Names, Rollout
from tim_jax.model.execution import Execution, Sampling
from tim_jax.numerics import COMPUTE_DTYPES, Numerics


class Between(NamedTuple):
    """Marks a number that is refused outside these bounds, or if it is not finite."""

    least: float
    most: float = inf


class OneOf(NamedTuple):
    """Marks a text that is refused if it is none of these, as that of a `Literal` is."""

    known: tuple[str, ...]


POWER_OF_TWO = "a power of two"  # marks a number that is refused if it is none
Dtype = Annotated[str, OneOf(COMPUTE_DTYPES)]
Count = Annotated[int, Between(1)]
Whole = Annotated[int, Between(0)]
Seed = Annotated[int, Between(0, 2**31 - 1)]
Size = Annotated[float, Between(0.0)]


@dataclass(frozen=True)
class Entry:
    """One named edit. A method that an entry does not override changes nothing.

    The name, keyword arguments and defaults of a configuration's table are the class variable
    `name` and the fields, whose annotations say what they may be. docs/mismatch.md says
    which real system behaves like this.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str] = ""  # one of `dial.GROUPS`
    reports: ClassVar[bool] = False  # has `reported`
    repeatable: ClassVar[bool] = False  # may stand in a dial more than once
    of_mixtures: ClassVar[bool] = False  # a dense model is refused
    # A control has the entry's effect on what is sampled, but no mismatch: the learner has the
    # entry as well. These are the exceptions.
    only_reports: ClassVar[bool] = False  # changes no token, so that a control leaves it out
    no_control: ClassVar[str] = ""  # why a learner cannot have it; "": it can

    def __post_init__(self):
        with self.named():
            check_kinds(self)
        for field in fields(self):
            value = getattr(self, field.name)
            rule = "" if value is None else _broken(field.type, value)
            if rule:
                raise self.refuse(f"{field.name} {rule}")

    @property
    def inert(self) -> bool:
        """Strength 0: the entry changes nothing, and adds nothing to the program."""
        return False

    @property
    def draws(self) -> bool:
        """Whether it changes the sampler's program, and not only its weights or its report."""
        edits = type(self).numerics, type(self).logits
        return self.reports or edits != (Entry.numerics, Entry.logits)

    def check(self, execution: Execution) -> None:
        """Raises InputError, naming this entry, if a sampler of this execution cannot have it."""
        if self.of_mixtures and not execution.config.num_experts:
            raise self.refuse("needs a mixture of experts; this model has none")

    def numerics(self, numerics: Numerics) -> Numerics:
        """The sampler's numerics."""
        return numerics

    def weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """The sampler's weights, of the learner's compute weights (`parameters.prepare`)."""
        return weights

    def logits(self, logits: jax.Array, positions: jax.Array, names: Names) -> jax.Array:
        """Logits f32[B, V] to draw from, at i32[B] positions in the responses."""
        del positions, names
        return logits

    def reported(
        self, logits: jax.Array, tokens: jax.Array, *, sampling: Sampling, numerics: Numerics
    ) -> jax.Array:
        """Log-probs f32[B] to record in place of those drawn with."""
        raise AssertionError(f"{self.name} reports nothing")

    def rollout(self, rollout: Rollout, names: Names) -> Rollout:
        """The rollout that the learner is given."""
        del names
        return rollout

    def refuse(self, rule: str) -> InputError:
        """An error that names this entry."""
        return InputError(f"mismatch {self.name!r}: {rule}")

    @contextmanager
    def named(self) -> Iterator[None]:
        """A context whose `InputError` names this entry."""
        try:
            yield
        except InputError as error:
            raise self.refuse(str(error)) from error


def _broken(kind: Any, value: Any) -> str:
    """What is wrong with an argument by a mark of its type; "" if nothing is."""
    mark = OneOf(get_args(kind)) if get_origin(kind) is Literal else kind
    if isinstance(mark, OneOf) and value not in mark.known:
        return f"= {value!r}; known: {', '.join(mark.known)}"
    if isinstance(mark, Between) and not (mark.least <= value <= mark.most and value < inf):
        bounds = f"at least {mark.least}"
        bounds = bounds if mark.most == inf else f"between {mark.least} and {mark.most}"
        return f"must be {bounds}, got {value}"
    if mark == POWER_OF_TWO and value & (value - 1):
        return f"must be {POWER_OF_TWO}, got {value}"
    return next(filter(None, (_broken(part, value) for part in get_args(kind))), "")
