"""The options of a mixture of experts in `ModelConfig` and in a checkpoint's config.json."""

import math
from collections.abc import Mapping
from typing import Any

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import whole

FAMILIES = ("qwen3_moe", "qwen2_moe", "deepseek_v3")
SIGMOID_FAMILIES = ("deepseek_v3",)  # whose router's scores are sigmoids, with a bias to choose by

# Family -> field -> its key in config.json, and what `transformers` takes an absent key for.
_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
    "qwen3_moe": {
        "num_experts": ("num_experts", 128),
        "num_experts_per_tok": ("num_experts_per_tok", 8),
        "moe_intermediate_size": ("moe_intermediate_size", 768),
        "norm_topk_prob": ("norm_topk_prob", False),
        "router_aux_loss_coef": ("router_aux_loss_coef", 0.001),
    },
    "qwen2_moe": {
        "num_experts": ("num_experts", 60),
        "num_experts_per_tok": ("num_experts_per_tok", 4),
        "moe_intermediate_size": ("moe_intermediate_size", 1408),
        "norm_topk_prob": ("norm_topk_prob", False),
        "router_aux_loss_coef": ("router_aux_loss_coef", 0.001),
        "shared_expert_width": ("shared_expert_intermediate_size", 5632),
    },
    "deepseek_v3": {
        "num_experts": ("n_routed_experts", 256),
        "num_experts_per_tok": ("num_experts_per_tok", 8),
        "moe_intermediate_size": ("moe_intermediate_size", 2048),
        "norm_topk_prob": ("norm_topk_prob", True),
        "num_shared_experts": ("n_shared_experts", 1),
        "first_dense_layers": ("first_k_dense_replace", 3),
        "router_groups": ("n_group", 8),
        "router_groups_per_tok": ("topk_group", 4),
        "routed_scaling_factor": ("routed_scaling_factor", 2.5),
    },
}
# The fields of a model without experts.
NONE = {
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "moe_intermediate_size": 0,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.0,
    "num_shared_experts": 0,
    "shared_expert_width": 0,
    "first_dense_layers": 0,
    "router_groups": 1,
    "router_groups_per_tok": 1,
    "routed_scaling_factor": 1.0,
}
_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_COUNTED = (
    "num_shared_experts",
    "shared_expert_width",
    "first_dense_layers",
    "router_groups",
    "router_groups_per_tok",
)
_MOST = 2**31
_MOST_NUMBERS = 2**56  # of one weight of all layers and experts
_COUNT = "num_local_experts"  # that of transformers 5
# Of other mixtures: experts that every token goes through, other scores, groups of experts.
_OTHERS = (
    "n_shared_experts",
    "n_routed_experts",
    "shared_expert_intermediate_size",
    "scoring_func",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "first_k_dense_replace",
)
# Of DeepSeek's mixtures, what is computed here.
_DEEPSEEK_ONLY = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "ep_size": 1,
}


def check(config: Any) -> None:
    """Checks the fields of a `ModelConfig`: in a mixture all sizes are above 0.

    Raises `InputError` naming the field at fault.
    """
    family = config.model_type
    without = family not in FAMILIES or (family in SIGMOID_FAMILIES and config.num_experts == 0)
    for name, value in NONE.items():
        if (without or name not in _KEYS[family]) and getattr(config, name) != value:
            found = getattr(config, name)
            raise InputError(f"a {family} model has {name}={value}, found {found!r}")
    if without:
        return
    for name in (*_SIZES, *_COUNTED):
        value = getattr(config, name)
        least = 0 if name == "first_dense_layers" or name not in _KEYS[family] else 1
        if not whole(value) or not least <= value < _MOST:
            raise InputError(
                f"{name} must be a whole number from {least} to {_MOST - 1}, found {value!r}"
            )
    widest = max(config.num_experts * config.moe_intermediate_size, config.shared_width)
    numbers = config.num_layers * config.hidden_size * widest
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
    for name in ("router_aux_loss_coef", "routed_scaling_factor"):
        value = getattr(config, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise InputError(f"{name} must be a finite number of at least 0, found {value!r}")
    _check_groups(config)
    if config.first_dense_layers >= config.num_layers:
        raise InputError(
            f"first_dense_layers must be less than num_layers {config.num_layers}, found"
            f" {config.first_dense_layers}"
        )


def _check_groups(config: Any) -> None:
    """The router's top 2 of every group, and enough experts in the groups that are taken."""
    groups, taken, experts = config.router_groups, config.router_groups_per_tok, config.num_experts
    if config.model_type not in SIGMOID_FAMILIES:
        return
    if experts % groups or experts // groups < 2:
        raise InputError(
            f"router_groups {groups} must divide num_experts {experts} into groups of at least 2"
        )
    if taken > groups:
        raise InputError(
            f"router_groups_per_tok must be at most router_groups {groups}, found {taken}"
        )
    if taken * (experts // groups) < config.num_experts_per_tok:
        raise InputError(
            f"{taken} groups of {experts // groups} experts are fewer than num_experts_per_tok"
            f" {config.num_experts_per_tok}"
        )


def read(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in the contents of a config.json; none for a dense family."""
    family = values["model_type"]
    if family not in FAMILIES:
        return {}
    keys = _KEYS[family]
    name = keys["num_experts"][0]
    counts = [values[key] for key in (name, _COUNT) if values.get(key) is not None]
    if counts[1:] and counts[0] != counts[1]:
        raise InputError(f"{name} and {_COUNT} are both given and differ")
    given = {**values, name: counts[0] if counts else None}
    fields = {
        field: default if given.get(key) is None else given[key]
        for field, (key, default) in keys.items()
    }
    first, layers = fields.get("first_dense_layers", 0), values["num_hidden_layers"]
    if whole(first) and whole(layers) and first >= layers:  # no layer has experts
        return {}
    return fields


def written(config: Any) -> dict[str, Any]:
    """What a config.json has of them; nothing for a dense family."""
    if config.model_type not in FAMILIES:
        return {}
    keys = _KEYS[config.model_type]
    if config.num_experts == 0:
        return {keys["first_dense_layers"][0]: config.num_layers}
    fields = {key: getattr(config, field) for field, (key, _) in keys.items()}
    if config.model_type in SIGMOID_FAMILIES:
        return fields | {"num_nextn_predict_layers": 0}
    return fields | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Raises `InputError` for experts in a dense family, and for what no forward here computes."""
    family = values["model_type"]
    if family in SIGMOID_FAMILIES:
        for key, only in _DEEPSEEK_ONLY.items():
            if values.get(key) not in (None, only):
                raise InputError(f"{key} {values[key]!r} is not supported, only {only!r}")
        return
    dense = family not in FAMILIES
    own = () if dense else {key for key, _ in _KEYS[family].values()}
    for key in ("num_experts", _COUNT, *_SIZES, *_OTHERS) if dense else _OTHERS:
        if values.get(key) and key not in own:
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
