"""Training-inference mismatch in RL for language models: removed, injected, corrected, shown.

    import tim_jax as tim

    model = tim.load("Qwen/Qwen3-0.6B", dtype="bfloat16")
    rollout = tim.sample(model, ["What is 7 * 8?"], samples=8)
    assert (tim.score(model, rollout) == rollout.log_probs).all()

`load`, `sample`, `score`, `audit`, `grpo`, `diagnose` and `save` are the verbs, `load_adapter` and
`save_adapter` those of LoRA. `capture` writes down what another engine draws, `learn` makes a step
from it, and `named_arrays` gives the weights back to the engine; `per_item` makes a reward of a
function of one completion. `Model`, `Placement`, `Lora` and `Turns` are the values that they take;
`objectives`, `corrections`, `mismatch`, `schedules` and `metrics` the parts that experiments are
put together from. All other rooms are imported by name, such as `from tim_jax.rl import loop`.

Names are looked up when they are first used: `import tim_jax` alone imports nothing else, and the
corrections do not import a model.
"""

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tim_jax import corrections, metrics, mismatch, objectives, schedules
    from tim_jax.api import (
        Model,
        audit,
        diagnose,
        grpo,
        learn,
        load,
        load_adapter,
        named_arrays,
        sample,
        save,
        save_adapter,
        score,
    )
    from tim_jax.model.adapters import Lora
    from tim_jax.placement import Placement
    from tim_jax.recording import capture
    from tim_jax.rl.rules import Turns
    from tim_jax.tasks.base import Reply
    from tim_jax.tasks.custom import per_item

__all__ = [
    "Lora",
    "Model",
    "Placement",
    "Reply",
    "Turns",
    "audit",
    "capture",
    "corrections",
    "diagnose",
    "grpo",
    "learn",
    "load",
    "load_adapter",
    "metrics",
    "mismatch",
    "named_arrays",
    "objectives",
    "per_item",
    "sample",
    "save",
    "save_adapter",
    "schedules",
    "score",
]

_API = ("Model", "audit", "diagnose", "grpo", "learn", "load", "sample", "save", "score")
_HOMES = {
    **dict.fromkeys((*_API, "load_adapter", "named_arrays", "save_adapter"), "api"),
    "Lora": "model.adapters",
    "Turns": "rl.rules",
    "Placement": "placement",
    "Reply": "tasks.base",
    "capture": "recording",
    "per_item": "tasks.custom",
}


def __getattr__(name: str) -> Any:
    """A name of `__all__`, or any room of the package."""
    if name == "__version__":
        return metadata.version("tim-jax")
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
