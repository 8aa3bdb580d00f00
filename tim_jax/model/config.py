"""The architecture of a model as a value, read from a checkpoint's config.json and written back.

Nothing here says how numbers are computed. Options that the forward does not implement are refused
by name.

config.json is not read by `transformers.AutoConfig`, because it imports PyTorch, which takes
seconds; fills in a size that is missing; accepts a misspelt key; and only warns of a rope type that
does not exist.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tim_jax.errors import InputError, did_you_mean
from tim_jax.inputs import whole
from tim_jax.model import latent, mixture, rope, windows
from tim_jax.model.latent import LatentConfig
from tim_jax.model.rope import RopeConfig

ARCHITECTURES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_positions",
)
_MOST = 2**31
_MOST_LAYERS = 2**16
_MOST_NUMBERS = 2**56  # of one weight of all layers
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
_PLAIN_ROPE = RopeConfig()


class AttentionShape(NamedTuple):
    """Heads of keys, the size of a key, and the size of a value."""

    key_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder: Qwen2, Qwen3, their mixtures, Llama 3, Mistral, DeepSeek-V3.

    Per layer: RMSNorm, grouped-query attention with rotary positions, RMSNorm, SwiGLU; then a final
    RMSNorm and a head, which is the embedding's transpose if `tied_embeddings`. `qk_norm` puts an
    RMSNorm over each head of q and k before the rotation; `attention_bias` adds biases to q, k and
    v, `output_bias` to the projection after attention, `mlp_bias` to all three of the SwiGLU.

    With a `sliding_window` above 0, tokens of the layers for which `window_layers` has True attend
    to so many positions: their own and those before it. Without, `window_layers` is empty.

    In a mixture of experts, whose `num_experts` is above 0, every layer has so many SwiGLUs of
    width `moe_intermediate_size` in place of one. A token's output is the sum of those
    `num_experts_per_tok` to which the router gives the largest probabilities, weighted by them;
    `norm_topk_prob` makes the weights of the chosen sum to 1. `intermediate_size` is then of no
    use; a checkpoint's configuration has it all the same. `router_aux_loss_coef` is what
    `transformers` multiplies its load-balancing loss by, kept for checkpoints.

    DeepSeek-V3 and Moonlight have `latent` attention. Their router's scores are sigmoids, not a
    softmax, and a bias for each expert, which is not trained, is added to choose by; the experts
    are in `router_groups` groups, of which a token takes those of the best
    `router_groups_per_tok`; weights are multiplied by `routed_scaling_factor`. The first
    `first_dense_layers` have a SwiGLU of `intermediate_size` in place of experts, and in the others
    every token also goes through `num_shared_experts` experts, which are joined into one. Qwen2-MoE
    has one shared expert, of `shared_expert_width`, times the sigmoid of a linear map to a number.

    A value that can be hashed. Raises `InputError` where sizes do not fit together, or where
    `model_type` as `transformers` knows it could not express the options (so that every ModelConfig
    can be saved).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = _PLAIN_ROPE
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    router_aux_loss_coef: float = 0.0
    num_shared_experts: int = 0
    shared_expert_width: int = 0
    first_dense_layers: int = 0
    router_groups: int = 1
    router_groups_per_tok: int = 1
    routed_scaling_factor: float = 1.0
    latent: LatentConfig | None = None
    sliding_window: int = 0
    window_layers: tuple[bool, ...] = ()
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.model_type not in ARCHITECTURES:
            nearest = did_you_mean(str(self.model_type), ARCHITECTURES)
            raise InputError(f"model_type {self.model_type!r} is not supported{nearest}")
        _check_sizes(self)
        _check_scalars(self)
        _check_family(self)
        mixture.check(self)
        latent.check(self)
        windows.check(self)

    @property
    def active_width(self) -> int:
        """Columns of the SwiGLU, or of all the SwiGLUs that a token goes through."""
        chosen = self.num_experts_per_tok * self.moe_intermediate_size
        return chosen + self.shared_width or self.intermediate_size

    @property
    def shared_width(self) -> int:
        """Columns of the SwiGLU that the shared experts are."""
        return self.shared_expert_width or self.num_shared_experts * self.moe_intermediate_size

    @property
    def shared_scales(self) -> int:
        """Numbers for each token that the shared expert's output is multiplied by, 0 or 1."""
        return int(self.shared_expert_width > 0)

    @property
    def expert_layers(self) -> int:
        """Layers with a mixture of experts."""
        return self.num_layers - self.first_dense_layers if self.num_experts else 0

    @property
    def query_dim(self) -> int:
        """Numbers of a head that the query's projection makes."""
        return self.latent.qk_head_dim if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Numbers of a head that the projection after attention takes."""
        return self.latent.v_head_dim if self.latent else self.head_dim

    @property
    def attention(self) -> AttentionShape:
        """What attention works with, and the cache keeps."""
        if self.latent:
            return AttentionShape(1, self.latent.state_dim, self.latent.kv_lora_rank)
        return AttentionShape(self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def stacks(self) -> "dict[str, ModelConfig]":
        """Runs of equal layers, in order, each as a model of its own.

        The keys are their places in the tree of parameters.
        """
        first = self.first_dense_layers
        if not first:
            return {"layers": self}
        dense = replace(self, num_layers=first, **mixture.NONE)
        rest = replace(self, num_layers=self.num_layers - first, first_dense_layers=0)
        return {"dense_layers": dense, "layers": rest}

    def with_layers(self, count: int) -> "ModelConfig":
        """The same architecture with another number of layers, of each kind at least one."""
        first = min(self.first_dense_layers, count - 1)
        return replace(
            self, num_layers=count, first_dense_layers=first, **windows.spread(self, count)
        )


def _check_sizes(config: ModelConfig) -> None:
    for name in _SIZES:
        value = getattr(config, name)
        if not whole(value) or not 1 <= value < _MOST:
            raise InputError(
                f"{name} must be a whole number from 1 to {_MOST - 1}, found {value!r}"
            )
    if config.num_layers > _MOST_LAYERS:
        raise InputError(f"num_layers must be at most {_MOST_LAYERS:,}, found {config.num_layers}")
    wide = max(config.num_heads, config.num_kv_heads) * config.head_dim
    widest = config.hidden_size * max(config.vocab_size, config.intermediate_size, wide)
    if config.num_layers * widest >= _MOST_NUMBERS:
        raise InputError(
            f"the sizes make a weight of {config.num_layers * widest:.0e} numbers, more than any"
            " machine holds"
        )
    if config.num_heads % config.num_kv_heads:
        raise InputError(
            f"num_heads {config.num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise InputError(f"head_dim must be even for rotary pairs, found {config.head_dim}")


def _check_scalars(config: ModelConfig) -> None:
    for name in ("rms_norm_eps", "initializer_range"):
        value = getattr(config, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise InputError(f"{name} must be a finite number above 0, found {value!r}")
    for name in ("qk_norm", "attention_bias", "output_bias", "mlp_bias", "tied_embeddings"):
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise InputError(f"{name} must be true or false, found {value!r}")
    optional = (i for i in (config.bos_token_id, config.pad_token_id) if i is not None)
    for token in (*config.eos_token_ids, *optional):
        if not whole(token):
            raise InputError(f"token ids must be whole numbers, found {token!r}")
    check_stop_tokens(config.eos_token_ids, config.vocab_size)


def check_stop_tokens(tokens: Iterable[int], vocab_size: int) -> None:
    """Refuses ids of end tokens that can never be drawn."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InputError(
                f"eos_token_id {token} is outside the vocabulary of {vocab_size} tokens, from 0 to"
                f" {vocab_size - 1}"
            )


def _check_family(config: ModelConfig) -> None:
    family = config.model_type
    without = dict.fromkeys(("qk_norm", "attention_bias", "output_bias", "mlp_bias"), False)
    of_qwen3 = {"qk_norm": True, "output_bias": config.attention_bias, "mlp_bias": False}
    wanted = {
        "deepseek_v3": without,
        "llama": {"qk_norm": False, "output_bias": config.attention_bias},
        "mistral": without,
        "qwen2": without | {"attention_bias": True},
        "qwen2_moe": without | {"attention_bias": True},
        "qwen3": of_qwen3,
        "qwen3_moe": of_qwen3,
    }[family]
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise InputError(f"a {family} model has {name}={value}, found {getattr(config, name)}")
    if family == "llama" and config.hidden_size % config.num_heads:
        raise InputError(
            f"a llama model's hidden_size {config.hidden_size} must be a multiple of num_heads "
            f"{config.num_heads}"
        )


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
    """The contents of a `config.json` (transformers 5 layout) from which `config` reads back equal.

    `dtype` is that of the stored weights, in which `transformers` will then load them.
    """
    eos = config.eos_token_ids
    values: dict[str, Any] = {key: getattr(config, name) for name, key in _REQUIRED.items()}
    values |= {
        "architectures": [ARCHITECTURES[config.model_type]],
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "dtype": dtype,
        "eos_token_id": eos[0] if len(eos) == 1 else (list(eos) or None),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "initializer_range": config.initializer_range,
        "model_type": config.model_type,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope.written(config.rope),
        "tie_word_embeddings": config.tied_embeddings,
        "use_cache": True,
    }
    if config.model_type not in (*_QKV_BIAS, "mistral"):
        values["attention_bias"] = config.attention_bias
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
