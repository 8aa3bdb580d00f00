"""Step sizes that follow the responses: their length, or their importance weights."""

from tim_jax.schedules.step_sizes import (
    LengthDecayState,
    TriggeredDecayState,
    decay_report,
    effective_sample_size,
    length_decay,
    length_decay_schedule,
    length_triggered_decay,
    scale_by_root_ess,
)
from tim_jax.schedules.surges import SurgeDetector, SurgeState

__all__ = [
    "LengthDecayState",
    "SurgeDetector",
    "SurgeState",
    "TriggeredDecayState",
    "decay_report",
    "effective_sample_size",
    "length_decay",
    "length_decay_schedule",
    "length_triggered_decay",
    "scale_by_root_ess",
]
