"""The library in a few functions over plain Python values: what `import tim_jax` offers.

`model` loads and saves; `rollouts` samples and scores; `auditing` proves; `training` is the loop;
`learning` makes steps from rollouts of another engine; `diagnosing` says what is wrong with such;
`foreign` reads these; `data` reads what users give as prompts, answers and rewards.
"""

from tim_jax.api.auditing import Audit, audit
from tim_jax.api.diagnosing import Diagnosis, diagnose
from tim_jax.api.learning import learn
from tim_jax.api.model import (
    Model,
    load,
    load_adapter,
    named_arrays,
    save,
    save_adapter,
)
from tim_jax.api.rollouts import Rollout, sample, score
from tim_jax.api.steps import Step
from tim_jax.api.training import grpo

__all__ = [
    "Audit",
    "Diagnosis",
    "Model",
    "Rollout",
    "Step",
    "audit",
    "diagnose",
    "grpo",
    "learn",
    "load",
    "load_adapter",
    "named_arrays",
    "sample",
    "save",
    "save_adapter",
    "score",
]
