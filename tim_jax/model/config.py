"""The architecture of a model as a value. Nothing here says how numbers are computed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import whole
from tim_jax.model import latent, mixture, windows
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

    def titled(self, dimension: str) -> str:
        """The name of a dimension in messages: without latent attention heads have one size."""
        if self.latent:
            return dimension
        return dimension.replace("query_dim", "head_dim").replace("value_dim", "head_dim")

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
