"""An entry of the dial: a small value that edits the sampler in one named way."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from tim_jax.common.errors import InputError
from tim_jax.common.types import Names, Rollout
from tim_jax.model.execution import Execution, Sampling
from tim_jax.numerics import Numerics


@dataclass(frozen=True)
class Entry:
    """One named edit. A method that an entry does not override changes nothing.

    The name, keyword arguments and defaults of a configuration's table are the class variable
    `name` and the fields. `imitates` says which real system behaves like this.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str] = ""  # one of `dial.GROUPS`
    imitates: ClassVar[str] = ""
    reports: ClassVar[bool] = False  # has `reported`
    repeatable: ClassVar[bool] = False  # may stand in a dial more than once
    of_mixtures: ClassVar[bool] = False  # a dense model is refused
    # A control has the entry's effect on what is sampled, but no mismatch: the learner has the
    # entry as well. These are the exceptions.
    only_reports: ClassVar[bool] = False  # changes no token, so that a control leaves it out
    no_control: ClassVar[str] = ""  # why a learner cannot have it; "": it can

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

    def need_number(self, argument: str, *, least: float, most: float | None = None) -> None:
        """Refuses an argument outside [least, most], or one that is not a finite number."""
        value = getattr(self, argument)
        if not least <= value < float("inf") or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise self.refuse(f"{argument} must be {bounds}, got {value}")

    def need_choice(self, argument: str, choices: tuple[str, ...]) -> None:
        """Refuses a value that is not one of `choices`."""
        if getattr(self, argument) not in choices:
            raise self.refuse(
                f"{argument} = {getattr(self, argument)!r}; known: {', '.join(choices)}"
            )
