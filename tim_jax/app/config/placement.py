"""Where a run's learner and sampler are."""

from dataclasses import dataclass
from typing import Annotated

from tim_jax import placement
from tim_jax.app.config.sections import TABLE, part
from tim_jax.placement import Devices, Placement


@dataclass(frozen=True, kw_only=True)
class PlacementSection(Placement):
    """Where the learner runs, and the sampler."""

    sampler: Annotated[Placement, TABLE] | None = None
    """Left out: on the learner's mesh, with its very weights. Else they are moved every step."""
    split: bool = False
    """The sampler has devices of its own, those after the learner's. With `sampler.max_staleness`
    it draws the next steps on them while the learner learns."""

    @property
    def value(self) -> Placement:
        """The learner's."""
        return part(Placement, self)

    @property
    def for_sampler(self) -> Placement:
        """The sampler's placement: its own, or the learner's where it has none."""
        return self.sampler or self.value

    @property
    def all_devices(self) -> int:
        """How many devices learner and sampler take together."""
        learner, sampler = self.devices, self.for_sampler.devices
        return learner + sampler if self.split else max(learner, sampler)

    def of_sampler(self, devices: Devices) -> Devices:
        """What the sampler's mesh is made of, where there are `devices`.

        Raises:
            InputError: as `placement.split`.
        """
        if not self.split:
            return devices
        return placement.split(self.value, self.for_sampler, devices)
