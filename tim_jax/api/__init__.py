"""The library in a few functions over plain Python values: what `import tim_jax` offers.

`model` loads and saves; `rollouts` samples and scores; `training` is the loop; `learning` makes
steps from rows of another engine; `diagnosing` proves exactness, and says what is wrong with rows.
"""

from tim_jax.api.diagnosing import Audit, Diagnosis, audit, diagnose
from tim_jax.api.learning import learn
from tim_jax.api.model import Model, load, load_adapter, named_arrays, save, save_adapter
from tim_jax.api.rollouts import Rollout, sample, score
from tim_jax.api.training import Step, grpo

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
