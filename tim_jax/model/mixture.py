"""The options of a mixture of experts in `ModelConfig` and in a checkpoint's config.json."""

import math
from collections.abc import Mapping
from typing import Any

from tim_jax.errors import InputError

FAMILIES = ("qwen3_moe",)

# Fields, which are keys of config.json too -> what `transformers` takes an absent key for.
_DEFAULTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}
_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_MOST = 2**31
_MOST_NUMBERS = 2**56  # of one weight of all layers and experts
_COUNTS = ("num_experts", "num_local_experts")  # the latter is that of transformers 5
# Of other mixtures: experts that every token goes through, other scores, groups of experts.
_OTHERS = (
    "n_shared_experts",
    "n_routed_experts",
    "shared_expert_intermediate_size",
    "scoring_func",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
)


def check(config: Any) -> None:
    """Checks the fields of a `ModelConfig`: in a mixture all sizes are above 0, else all are 0.

    Raises `InputError` naming the field at fault.
    """
    for name in _SIZES:
        value = getattr(config, name)
        if config.model_type not in FAMILIES:
            if value != 0:
                raise InputError(f"a {config.model_type} model has {name}=0, found {value!r}")
        elif not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < _MOST:
            raise InputError(
                f"{name} must be a whole number from 1 to {_MOST - 1}, found {value!r}"
            )
    numbers = config.num_layers * config.num_experts * config.hidden_size
    numbers *= config.moe_intermediate_size
    if numbers >= _MOST_NUMBERS:
        raise InputError(
            f"the sizes make experts of {numbers:.0e} numbers, more than any machine holds"
        )
    if config.num_experts_per_tok > config.num_experts:
        raise InputError(
            f"num_experts_per_tok must be at most num_experts {config.num_experts}, found"
            f" {config.num_experts_per_tok}"
        )
    if not isinstance(config.norm_topk_prob, bool):
        raise InputError(f"norm_topk_prob must be true or false, found {config.norm_topk_prob!r}")
    coefficient = config.router_aux_loss_coef
    number = isinstance(coefficient, (int, float)) and not isinstance(coefficient, bool)
    if not number or not 0 <= coefficient < math.inf:
        raise InputError(
            f"router_aux_loss_coef must be a finite number of at least 0, found {coefficient!r}"
        )


def read(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in the contents of a config.json; none for a dense family."""
    if values["model_type"] not in FAMILIES:
        return {}
    counts = [values[key] for key in _COUNTS if values.get(key) is not None]
    if counts[1:] and counts[0] != counts[1]:
        raise InputError("num_experts and num_local_experts are both given and differ")
    given = {**values, "num_experts": counts[0] if counts else None}
    return {
        name: default if given.get(name) is None else given[name]
        for name, default in _DEFAULTS.items()
    }


def written(config: Any) -> dict[str, Any]:
    """What a config.json has of them; nothing for a dense family."""
    if config.model_type not in FAMILIES:
        return {}
    fields = {name: getattr(config, name) for name in _DEFAULTS}
    return fields | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Raises `InputError` for experts in a dense family, and for what no forward here computes."""
    family = values["model_type"]
    dense = family not in FAMILIES
    for key in (*_COUNTS, *_SIZES, *_OTHERS) if dense else _OTHERS:
        if values.get(key):
            what = ", a dense model" if dense else ""
            raise InputError(
                f"{key} {values[key]!r} is not supported for model_type {family!r}{what}"
            )
    if dense:
        return
    step, without = values.get("decoder_sparse_step"), values.get("mlp_only_layers")
    if step not in (None, 1):
        raise InputError(f"decoder_sparse_step {step!r} is not supported, only 1")
    if without:
        raise InputError(
            f"mlp_only_layers {without!r} is not supported, only []: every layer must have experts"
        )
    if values.get("num_key_value_heads") is None:  # of which `transformers` takes no null
        raise InputError("'num_key_value_heads' is missing")
