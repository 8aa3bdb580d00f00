"""The section of a run's configuration that says on which devices it runs."""

from typing import Literal

from tim_jax.config_sections import Count, Section
from tim_jax.placement import Placement


class Mesh(Section):
    """Devices by mesh axis; see `tim_jax.placement`."""

    data: Count = 1
    """Rows of the batch; every slice of devices holds the whole model."""
    fsdp: Count = 1
    """Rows of the batch, with parameters and optimizer state split over them."""
    tensor: Count = 1
    """Columns of every weight matrix, and the attention heads."""
    decode: Literal["whole", "sharded"] = "whole"
    """The sampler's weights: gathered over fsdp before the decode loop, or at every token."""

    @property
    def value(self) -> Placement:
        return Placement(self.data, self.fsdp, self.tensor, self.decode)


class PlacementSection(Mesh):
    """Where the learner runs, and the sampler."""

    sampler: Mesh | None = None
    """Left out: on the learner's mesh, with its very weights. Else they are moved every step."""

    @property
    def for_sampler(self) -> Placement:
        return self.value if self.sampler is None else self.sampler.value
