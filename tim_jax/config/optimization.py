"""The optimiser's section of a run's configuration: AdamW, its schedule, what scales its steps."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tim_jax.config.sections import Count, NonNegative, Positive, Section, Share, Whole, refusal
from tim_jax.errors import InputError
from tim_jax.schedules import SurgeDetector


class DecayOff(Section):
    """No length-triggered decay."""

    kind: Literal["off"] = "off"


class DecayFixed(Section):
    """The learning rate is halved every `period` updates (Beyond Precision, algorithm 1).

    A step makes epochs x mini-batches of them.
    """

    kind: Literal["fixed"]
    period: Count
    floor: Share = 0.1
    """The lowest share of the first learning rate."""


class DecayReactive(Section):
    """As fixed, with the period found from the surge of the mean response length.

    The keys from `rise` on are those of `tim_jax.schedules.SurgeDetector`, in lengths: one a step.
    """

    kind: Literal["reactive"]
    multiplier: Positive = 1.8
    """Period over the step of the surge."""
    floor: Share = 0.1
    """The lowest share of the first learning rate."""
    rise: float = SurgeDetector.rise
    """Factor over the baseline from which on a rise is a surge."""
    window: int = SurgeDetector.window
    """Lengths that are remembered."""
    gap: int = SurgeDetector.gap
    """The newest of them, which the baseline leaves out."""
    recent: int = SurgeDetector.recent
    """Newest lengths whose median is compared with the baseline."""
    hold: int = SurgeDetector.hold
    """Newest lengths of which all but one must be raised; longer than any burst to be ignored."""
    minimum: int = SurgeDetector.minimum
    """Lengths before a surge; an earlier rise is how a run begins."""
    noise: float = SurgeDetector.noise
    """Standard deviations of the baseline's lengths that a surge must exceed it by."""
    max_length: Count | None = None
    """Lengths pinned at it count as cut off: a rise by sqrt(rise) up to it is then enough. Left
    out: the run's max_response_length."""

    def detector(self, max_response_length: int | None = None) -> SurgeDetector:
        """The detector of a run with this longest response."""
        own = self.model_dump(exclude={"kind", "multiplier", "floor", "max_length"})
        return SurgeDetector(max_length=self.max_length or max_response_length, **own)

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self.detector()
        except InputError as error:
            raise refusal("", None, str(error)) from error
        return self


class Optimizer(Section):
    """AdamW, its schedule, and the factors on its steps that come on top."""

    learning_rate: Positive = 1e-3
    """At its highest."""
    warmup_steps: Whole = 0
    """Updates (epochs x mini-batches a step) of linear rise from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """After the rise."""
    total_steps: Count | None = None
    """Updates after which a cosine or linear schedule ends; left out: the run's last."""
    final_share: Share = 0.0
    """Share of the learning rate that a cosine or linear schedule ends with."""
    weight_decay: NonNegative = 0.0
    b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    b2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Positive = 1e-8
    max_grad_norm: NonNegative = 1.0
    """Global norm that gradients are scaled down to; 0 is off."""
    ess_reference: Annotated[float, Field(gt=0, le=1)] | None = None
    """Steps times sqrt(min(e / this, 1)), e the effective sample size of the update's importance
    weights as a share (VCPO): 1.0 for single-turn tasks. Left out: off."""
    length_decay: Annotated[DecayOff | DecayFixed | DecayReactive, Field(discriminator="kind")] = (
        DecayOff()
    )
