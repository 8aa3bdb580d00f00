"""From rewards and log-probs to a loss: advantages, token losses, aggregation, presets."""

from tim_jax.objectives.aggregation import Aggregation, Denominator
from tim_jax.objectives.losses.base import KL, kl_estimate
from tim_jax.objectives.losses.registry import Loss
from tim_jax.objectives.objective import Objective, TokenLosses
from tim_jax.objectives.presets import (
    PRESETS,
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
