"""A finished step of training as one value, and what all steps of a training have in common."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax

from tim_jax.api.model import Model
from tim_jax.app.run import display
from tim_jax.common import pages, waiting
from tim_jax.common.errors import InputError
from tim_jax.model import adapters
from tim_jax.model.adapters import Adapter
from tim_jax.placement import processes
from tim_jax.rl import loop
from tim_jax.rl.drawing import Sample
from tim_jax.rl.programs import Programs
from tim_jax.rl.types import TrainState


@dataclass(frozen=True, repr=False)
class Step:
    """One finished step of training; `print` shows it as a line."""

    number: int
    """From 1."""
    metrics: dict[str, float]
    """What was measured: `reward`, `exact_share`, `response_length`, `loss` and many more."""
    timing: dict[str, float]
    """Seconds and tokens per second."""
    samples: list[Sample]
    """Each completion with its prompt, answer and reward."""
    state: TrainState
    """All that an update changes; the next step takes its memory."""
    weights: Any
    """The parameters as they are computed with."""
    started: "Started"
    """What all steps have in common."""

    def __str__(self) -> str:
        fields = display.step_fields(self.metrics | self.timing)
        return f"step {self.number}  " + "  ".join(f"{label} {text}" for label, text in fields)

    def __repr__(self) -> str:
        """The line, and the first completions with their rewards."""
        lines = (display.completion_line(sample, width=100) for sample in self.samples[:4])
        return "\n".join([str(self), *lines])

    def _repr_html_(self) -> str:
        rows = [(f"{x.reward:g}", x.prompt, x.completion, x.answer) for x in self.samples[:8]]
        head = ("reward", "prompt", "completion", "answer")
        return pages.paragraphs([str(self)]) + pages.html_table(pages.Table("", head, rows))

    @cached_property
    def model(self) -> Model:
        """The model after this step.

        A copy of its own if training goes on, as that takes the step's buffers: ask for it before
        the next step, and only at steps where you need it. Adapters are merged; it computes the
        bits that training had.

        Raises:
          InputError: training has gone on, and the step's weights are gone.
        """
        self.check_there()
        started = self.started
        return replace(started.model, params=started.merged(self.state.params), adapter=None)

    @cached_property
    def adapter(self) -> Adapter:
        """The adapter after this step, to save it (`save_adapter`) or go on from it; a copy too.

        Raises:
          InputError: none is trained, or as `model`.
        """
        lora = self.started.programs.training.execution.lora
        if lora is None:
            raise InputError(
                "there is no adapter; training=model.training(lora=tim_jax.Lora(8)) trains one"
            )
        self.check_there()
        return Adapter(lora, loop.copied(self.state.params))

    def check_there(self) -> None:
        """Raises `InputError` if training has gone on, and the step's weights are gone."""
        leaves = jax.tree.leaves(self.state.params)
        if any(leaf.is_deleted() for leaf in leaves):
            raise InputError(
                f"the model of step {self.number} is gone, its memory was taken by the next step;"
                " take step.model before going on"
            )


class Started(NamedTuple):
    """What a training started from, and computes with: the same at each of its steps."""

    model: Model
    programs: Programs
    base: Any  # the parameters that stay as they are, if adapters are trained
    reference: Any  # compute weights of the KL term's reference policy, if there is one

    def prepared(self, state: TrainState) -> Any:
        """The parameters of a state as they are computed with."""
        return self.programs.prepare(adapters.whole(state.params, self.base))

    def merged(self, trained: Any) -> Any:
        """The parameters of a model of what is trained, in buffers of their own."""
        merge = self.programs.merged
        return loop.copied(trained) if merge is None else merge(adapters.whole(trained, self.base))


@waiting.during("putting the model on the devices", about=waiting.COMPILES)
def start(model: Model, built: Programs, seed: int) -> tuple[TrainState, Started]:
    """The state before the first step, and what stays; `seed` names the values of new adapters."""
    lora, trained, base = built.training.execution.lora, model.params, None
    if lora is not None:
        given = model.adapter
        trained = adapters.init(model.config, lora, seed) if given is None else given.arrays
        base = built.place(adapters.narrowed(processes.whole(model.params)))
    # Training takes the buffers of what it starts from: the model keeps its own.
    state = built.init(_apart(trained))
    reference = None
    if built.training.learning.objective.has_reference:
        reference = built.prepare(adapters.whole(_apart(trained), base))
    return state, Started(model, built, base, reference)


def _apart(params: Any) -> Any:
    """Parameters in buffers of their own; those on the host are copied by being moved."""
    on_device = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    return loop.copied(params) if on_device else params
