"""A checkpoint's config.json as a `ModelConfig`, and back.

Options that the forward does not implement are refused by name.

config.json is not read by `transformers.AutoConfig`, because it imports PyTorch, which takes
seconds; fills in a size that is missing; accepts a misspelt key; and only warns of a rope type that
does not exist.
"""

from collections.abc import Mapping
from typing import Any

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import whole
from tim_jax.model import latent, mixture, rope, windows
from tim_jax.model.config import ARCHITECTURES, ModelConfig

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
    "qkv_bias": (True,),
}
_NEVER = ("quantization_config", "per_layer_config", "attention_chunk_size")
# What absent keys mean.
_SPECIAL_TOKENS = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2},
    "mistral": {"bos_token_id": 1, "eos_token_id": 2},
    "deepseek_v3": {"bos_token_id": 0, "eos_token_id": 1},
}


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
    of_latent = latent.read(values)
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
        **mixture.read(values),
        latent=of_latent,
        **windows.read(values),
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
    values |= mixture.written(config) | latent.written(config) | windows.written(config)
    if config.model_type == "llama":
        values["mlp_bias"] = config.mlp_bias
    return dict(sorted(values.items()))


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    family = _required(values, "model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        nearest = did_you_mean(str(family), ARCHITECTURES)
        raise InputError(f"model_type {family!r} is not supported{nearest}")
    architectures = values.get("architectures") or [ARCHITECTURES[family]]
    if architectures != [ARCHITECTURES[family]]:
        raise InputError(
            f"architectures {architectures!r} is not supported, only {[ARCHITECTURES[family]]!r}"
        )
    for key, accepted in _ONLY.items():
        value = values.get(key)
        if value is not None and value not in accepted:
            raise InputError(f"{key} {value!r} is not supported, only {accepted[0]!r}")
    for key in _NEVER:
        if values.get(key):
            raise InputError(f"{key} is not supported; it must be absent, found {values[key]!r}")
    if family != "llama" and values.get("mlp_bias"):
        raise InputError(f"mlp_bias is not supported for model_type {family!r}")
    latent.refuse_other_code(values)
    mixture.refuse_unsupported(values)


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
