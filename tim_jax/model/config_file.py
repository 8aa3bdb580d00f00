"""A checkpoint's config.json as a `ModelConfig`, and back.

Options that the forward does not implement are refused by name.

config.json is not read by `transformers.AutoConfig`, because it imports PyTorch, which takes
seconds; fills in a size that is missing; accepts a misspelt key; and only warns of a rope type that
does not exist.
"""

from collections.abc import Mapping
from typing import Any

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import whole
from tim_jax.model import rope
from tim_jax.model.config import (
    ARCHITECTURES,
    LATENT_FAMILIES,
    MIXTURE_FAMILIES,
    MIXTURE_KEYS,
    MOST_LAYERS,
    SIGMOID_FAMILIES,
    WINDOW_IN_EVERY_LAYER,
    WINDOWS_BY_LAYER,
    LatentConfig,
    ModelConfig,
    check_model_type,
    check_size,
)

_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
_HEAD_DIM_DEFAULT = {"qwen3": 128}
_QKV_BIAS = ("qwen2", "qwen2_moe")  # families that always have biases of q, k and v, and no others
_ONLY = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1.0,),
    "attention_dropout": (0.0,),
    "is_encoder_decoder": (False,),
    "is_causal": (True,),
}
_ONLY_WITH_QKV_BIAS = {"qkv_bias": (True,)}  # a key that other families do not read
_NEVER = ("quantization_config", "per_layer_config", "attention_chunk_size")
# What absent keys mean.
_SPECIAL_TOKENS = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {"bos_token_id": 1, "eos_token_id": 2},
    "deepseek_v3": {"bos_token_id": 0, "eos_token_id": 1},
}
# What `transformers` takes absent keys for.
_LATENT_DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}
_QUERY_RANK = 1536
_COUNT = "num_local_experts"  # that of transformers 5
_OF_EXPERTS = ("num_experts", _COUNT, "num_experts_per_tok", "moe_intermediate_size")
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
# Of DeepSeek's mixtures, what is computed here. Written too, because vLLM and SGLang look for it.
_DEEPSEEK_ONLY = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "ep_size": 1,
}
# Which are true if absent; `transformers` takes a null for false.
_NO_NULL = ("norm_topk_prob", "rope_interleave")
_FULL, _SLIDING = "full_attention", "sliding_attention"
# What `transformers` takes absent keys for.
_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28


def from_hf(values: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """Reads the contents of a `config.json`, in the older layout or that of transformers 5.

    Absent keys mean what `transformers` takes them to mean, but for sizes, which must be given.
    `where` names the file in messages. Raises `InputError` by name for everything that the forward
    does not compute: other architectures, activations, kinds of attention, rope kinds, quantised
    weights, dropout, and options of other families.
    """
    try:
        _refuse_unsupported(values)
        return _read(values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _read(values: Mapping[str, Any]) -> ModelConfig:
    family = values["model_type"]
    sizes = {name: _required(values, key) for name, key in _REQUIRED.items()}
    heads = sizes["num_heads"]
    bias = family in _QKV_BIAS or _or_default(values, "attention_bias", False)
    kv_heads = values.get("num_key_value_heads")
    if family == "mistral":  # for which `transformers` takes an absent one for 8
        kv_heads = _required(values, "num_key_value_heads")
    head_dim = values.get("head_dim")
    if head_dim is None:
        head_dim = _HEAD_DIM_DEFAULT.get(family) or _quotient(sizes["hidden_size"], heads)
    of_latent = _read_latent(values)
    if of_latent:
        head_dim = of_latent.qk_rope_head_dim
    special = _SPECIAL_TOKENS.get(family) or {}
    return ModelConfig(
        model_type=family,
        **sizes,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_or_default(values, "rms_norm_eps", 1e-6),
        rope=rope.read(values, sizes["max_positions"]),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        attention_bias=bias,
        output_bias=bias and family not in _QKV_BIAS,
        mlp_bias=_or_default(values, "mlp_bias", False) if family == "llama" else False,
        tied_embeddings=_or_default(values, "tie_word_embeddings", False),
        **_read_mixture(values),
        latent=of_latent,
        **_read_windows(values),
        initializer_range=_or_default(values, "initializer_range", 0.02),
        eos_token_ids=_token_ids(values.get("eos_token_id", special.get("eos_token_id"))),
        bos_token_id=values.get("bos_token_id", special.get("bos_token_id")),
        pad_token_id=values.get("pad_token_id"),
    )


def to_hf(config: ModelConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """The contents of a `config.json` from which `config` reads back equal.

    `transformers` 5 and 4 read the same from it: what they look for under other names is there
    under both. `dtype` is that of the stored weights, in which they will then load them.
    """
    eos = config.eos_token_ids
    values: dict[str, Any] = {key: getattr(config, name) for name, key in _REQUIRED.items()}
    values |= {
        "architectures": [ARCHITECTURES[config.model_type]],
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else (list(eos) or None),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "initializer_range": config.initializer_range,
        "model_type": config.model_type,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
    }
    if config.model_type not in (*_QKV_BIAS, "mistral"):
        values["attention_bias"] = config.attention_bias
    values |= {"dtype": dtype, "torch_dtype": dtype}
    values |= rope.written(config.rope)
    values |= _mixture_values(config) | _latent_values(config) | _window_values(config)
    if config.model_type == "llama":
        values["mlp_bias"] = config.mlp_bias
    return dict(sorted(values.items()))


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    family = _required(values, "model_type")
    check_model_type(family)
    architectures = values.get("architectures") or [ARCHITECTURES[family]]
    if architectures != [ARCHITECTURES[family]]:
        raise InputError(
            f"architectures {architectures!r} is not supported, only {[ARCHITECTURES[family]]!r}"
        )
    only = _ONLY | (_ONLY_WITH_QKV_BIAS if family in _QKV_BIAS else {})
    for key, accepted in only.items():
        value = values.get(key)
        if value is not None and value not in accepted:
            raise InputError(f"{key} {value!r} is not supported, only {accepted[0]!r}")
    for key in _NEVER:
        if values.get(key):
            raise InputError(f"{key} is not supported; it must be absent, found {values[key]!r}")
    if family != "llama" and values.get("mlp_bias"):
        raise InputError(f"mlp_bias is not supported for model_type {family!r}")
    for key in _NO_NULL if family in LATENT_FAMILIES else ():
        if key in values and values[key] is None:
            raise InputError(f"{key} must be true or false, found null")
    _refuse_other_code(values)
    _refuse_other_experts(values)


def _required(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise InputError(f"{key!r} is missing")
    return values[key]


def _or_default(values: Mapping[str, Any], key: str, default: Any) -> Any:
    """A null means the default, as an absent key does."""
    value = values.get(key)
    return default if value is None else value


def _quotient(hidden_size: Any, heads: Any) -> Any:
    if not whole(hidden_size) or not whole(heads) or heads < 1:
        return 1  # ModelConfig names the value at fault
    if hidden_size % heads:
        raise InputError(
            f"head_dim is missing and hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {heads}"
        )
    return hidden_size // heads


def _token_ids(value: Any) -> tuple[int, ...]:
    several = value if isinstance(value, (list, tuple)) else (value,)
    return () if value is None else tuple(several)


def _refuse_other_code(values: Mapping[str, Any]) -> None:
    """Raises `InputError` for code that comes with a checkpoint, unless it is known.

    Moonlight brings DeepSeek-V3's classes, from before `transformers` had them.
    """
    remote = values.get("auto_map") or {}
    names = remote.values() if isinstance(remote, Mapping) else [remote]
    known = all(str(name).split(".")[-1].startswith("DeepseekV3") for name in names)
    if remote and not (known and values["model_type"] in LATENT_FAMILIES):
        raise InputError(f"auto_map is not supported; it must be absent, found {remote!r}")


def _read_latent(values: Mapping[str, Any]) -> LatentConfig | None:
    """From the contents of a config.json; None for other attention."""
    if values["model_type"] not in LATENT_FAMILIES:
        return None
    given = {name: _or_default(values, name, own) for name, own in _LATENT_DEFAULTS.items()}
    rank = values.get("q_lora_rank", _QUERY_RANK)
    return LatentConfig(**given, q_lora_rank=0 if rank is None else rank)


def _latent_values(config: ModelConfig) -> dict[str, Any]:
    """What a config.json has of latent attention; nothing for other attention."""
    latent = config.latent
    if latent is None:
        return {}
    sizes = {name: getattr(latent, name) for name in _LATENT_DEFAULTS}
    return sizes | {"q_lora_rank": latent.q_lora_rank or None, "qk_head_dim": latent.qk_head_dim}


def _read_mixture(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a mixture in the contents of a config.json; none for a dense family."""
    family = values["model_type"]
    if family not in MIXTURE_FAMILIES:
        return {}
    keys = MIXTURE_KEYS[family]
    name = keys["num_experts"][0]
    counts = [values[key] for key in (name, _COUNT) if values.get(key) is not None]
    if counts[1:] and counts[0] != counts[1]:
        raise InputError(f"{name} and {_COUNT} are both given and differ")
    given = {**values, name: counts[0] if counts else None}
    fields = {field: _or_default(given, *of_file) for field, of_file in keys.items()}
    first, layers = fields.get("first_dense_layers", 0), values["num_hidden_layers"]
    if whole(first) and whole(layers) and first >= layers:  # no layer has experts
        return {}
    return fields


def _mixture_values(config: ModelConfig) -> dict[str, Any]:
    """What a config.json has of experts; nothing for a dense family."""
    if config.model_type not in MIXTURE_FAMILIES:
        return {}
    keys = MIXTURE_KEYS[config.model_type]
    if config.num_experts == 0:
        return {keys["first_dense_layers"][0]: config.num_layers}
    fields = {key: getattr(config, field) for field, (key, _) in keys.items()}
    if config.model_type in SIGMOID_FAMILIES:
        return fields | _DEEPSEEK_ONLY | {"num_nextn_predict_layers": 0}
    return fields | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _refuse_other_experts(values: Mapping[str, Any]) -> None:
    """Raises `InputError` for experts in a dense family, and for what no forward here computes."""
    family = values["model_type"]
    if family in SIGMOID_FAMILIES:
        for key, only in _DEEPSEEK_ONLY.items():
            if values.get(key) not in (None, only):
                raise InputError(f"{key} {values[key]!r} is not supported, only {only!r}")
        return
    dense = family not in MIXTURE_FAMILIES
    own = () if dense else {key for key, _ in MIXTURE_KEYS[family].values()}
    for key in (*_OF_EXPERTS, *_OTHERS) if dense else _OTHERS:
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
    _required(values, "num_key_value_heads")  # of which `transformers` takes no null


def _read_windows(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of windows in the contents of a config.json; none where no layer has a window.

    Raises `InputError` for kinds of attention that no forward here computes, and for keys that
    contradict each other.
    """
    window, kinds = _window(values), _kinds(values)
    family, layers = values["model_type"], values["num_hidden_layers"]
    if window is None:
        if kinds is not None and any(kinds):
            needed = "a sliding_window"
            needed += "" if family == "mistral" else " and use_sliding_window true"
            raise InputError(f"layer_types with {_SLIDING!r} needs {needed}")
        return {}
    if not whole(layers) or layers > MOST_LAYERS:
        return {}  # ModelConfig names the number of layers
    if kinds is None:
        full = _full_layers(values) if family in WINDOWS_BY_LAYER else 0
        kinds = tuple(index >= full for index in range(layers))
    elif family in WINDOW_IN_EVERY_LAYER and not all(kinds):
        raise InputError(
            f"layer_types with {_FULL!r} contradicts the sliding_window {window}, which a {family}"
            " model has in every layer"
        )
    return {"sliding_window": window, "window_layers": kinds} if any(kinds) else {}


def _window(values: Mapping[str, Any]) -> int | None:
    """The window that some layers may have, None for none."""
    family, window = values["model_type"], values.get("sliding_window", _WINDOW)
    if family == "llama":
        if values.get("sliding_window") is not None:
            raise InputError(f"sliding_window {window!r} is not supported for model_type 'llama'")
        return None
    used = values.get("use_sliding_window")
    if used is not None and not isinstance(used, bool):
        raise InputError(f"use_sliding_window must be true or false, found {used!r}")
    if window is None or (family != "mistral" and not used):
        return None
    check_size("sliding_window", window)
    return window


def _kinds(values: Mapping[str, Any]) -> tuple[bool, ...] | None:
    """For every layer whether layer_types says that it has a window; None: it says nothing."""
    kinds, layers = values.get("layer_types"), values["num_hidden_layers"]
    if kinds is None:
        return None
    if not isinstance(kinds, list):
        raise InputError(f"layer_types must be a list, found {kinds!r}")
    known = (_FULL,) if values["model_type"] == "llama" else (_FULL, _SLIDING)
    other = sorted(set(map(str, kinds)) - set(known))
    if other:
        raise InputError(
            f"layer_types with {other[0]!r} is not supported, only {' and '.join(map(repr, known))}"
        )
    if len(kinds) != layers:
        raise InputError(f"layer_types has {len(kinds)} entries for {layers!r} layers")
    return tuple(kind == _SLIDING for kind in kinds)


def _full_layers(values: Mapping[str, Any]) -> int:
    """How many layers come before the first one with a window."""
    full = values.get("max_window_layers")
    if full is None:
        return _MAX_WINDOW_LAYERS
    if not whole(full):
        raise InputError(f"max_window_layers must be a whole number, found {full!r}")
    return full


def _window_values(config: ModelConfig) -> dict[str, Any]:
    """What a config.json has of windows."""
    family, window = config.model_type, config.sliding_window
    if family not in (*WINDOWS_BY_LAYER, *WINDOW_IN_EVERY_LAYER):
        return {}
    if family == "mistral":
        return {"sliding_window": window or None}
    if not window:
        return {"use_sliding_window": False}
    values: dict[str, Any] = {"sliding_window": window, "use_sliding_window": True}
    if family in WINDOWS_BY_LAYER:
        values["layer_types"] = [_SLIDING if own else _FULL for own in config.window_layers]
    return values
