"""The optimiser's section of a run's configuration: AdamW, its schedule, what scales its steps."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tim_jax.app.config.sections import TABLE, Count, Positive, Section, Share, part
from tim_jax.optimizers import AdamW, Decay, LossScale
from tim_jax.schedules import SurgeDetector


class DecayOff(Section):
    """No length-triggered decay."""

    kind: Literal["off"] = "off"

    def value(self, max_tokens: int | None) -> None:
        """None: an optimiser without a decay."""
        del max_tokens


_OFF = DecayOff()


class DecayFixed(Section):
    """The learning rate is halved every `period` updates (Beyond Precision, algorithm 1).

    A step makes epochs x mini-batches of them.
    """

    kind: Literal["fixed"]
    period: Count
    floor: Share = Decay.floor
    """The lowest share of the first learning rate."""

    def value(self, max_tokens: int | None) -> Decay:
        """The decay as the optimiser takes it; the longest response does not matter to it."""
        del max_tokens
        return Decay(period=self.period, floor=self.floor)


@dataclass(frozen=True, kw_only=True)
class DecayReactive(SurgeDetector):
    """As fixed, with the period found from the surge of the mean response length.

    The other keys are the detector's, in lengths: one a step. `max_length`, if left out, is the
    run's max_tokens.
    """

    kind: Literal["reactive"]
    multiplier: Positive = Decay.multiple
    """Period over the step of the surge."""
    floor: Share = Decay.floor
    """The lowest share of the first learning rate."""

    def value(self, max_tokens: int | None) -> Decay:
        """The decay of a run whose longest response has this many tokens."""
        longest = self.max_length or max_tokens
        detector = part(SurgeDetector, self, max_length=longest)
        return Decay(multiple=self.multiplier, floor=self.floor, detector=detector)


@dataclass(frozen=True, kw_only=True)
class Optimizer(AdamW):
    """AdamW, its schedule, and the factors on its steps that come on top.

    `total_steps`, if left out, are the run's updates: steps x epochs x mini-batches.
    """

    learning_rate: float = 1e-3
    length_decay: Annotated[
        DecayOff | DecayFixed | Annotated[DecayReactive, TABLE], Field(discriminator="kind")
    ] = _OFF
    loss_scale: Annotated[LossScale, TABLE] | None = None
    """Dynamic loss scaling, of runs whose learner computes in float16. Left out: with its defaults
    in float16, and none otherwise."""
