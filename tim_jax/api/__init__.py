"""The library in a few functions over plain Python values: what `import tim_jax` offers.

`model` loads, audits and saves; `rollouts` samples and scores; `training` is the loop; `data` reads
what users give as prompts, answers and rewards.
"""

from tim_jax.api.model import Audit, Model, audit, load, save
from tim_jax.api.rollouts import Rollout, sample, score
from tim_jax.api.training import Step, grpo

__all__ = ["Audit", "Model", "Rollout", "Step", "audit", "grpo", "load", "sample", "save", "score"]
