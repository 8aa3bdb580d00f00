"""From rewards and log-probs to a loss: advantages, token losses, aggregation, presets."""

from tim_jax.objectives.advantages import KL, kl_estimate
from tim_jax.objectives.losses import Loss
from tim_jax.objectives.objective import (
    PRESETS,
    Aggregation,
    Denominator,
    Objective,
    TokenLosses,
    cispo,
    dapo,
    dppo,
    dr_grpo,
    gmpo,
    grpo,
    gspo,
    reinforce,
    reinforce_plus_plus,
    rloo,
    sapo,
)

__all__ = [
    "KL",
    "PRESETS",
    "Aggregation",
    "Denominator",
    "Loss",
    "Objective",
    "TokenLosses",
    "cispo",
    "dapo",
    "dppo",
    "dr_grpo",
    "gmpo",
    "grpo",
    "gspo",
    "kl_estimate",
    "reinforce",
    "reinforce_plus_plus",
    "rloo",
    "sapo",
]


def __dir__() -> list[str]:
    return __all__
