"""The architecture of a model as a value. Nothing here says how numbers are computed."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import changes, whole
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
LATENT_FAMILIES = ("deepseek_v3",)
MIXTURE_FAMILIES = ("qwen3_moe", "qwen2_moe", "deepseek_v3")
SIGMOID_FAMILIES = ("deepseek_v3",)  # whose router's scores are sigmoids, with a bias to choose by
WINDOWS_BY_LAYER = ("qwen2", "qwen3")  # families in which some layers may have the window
WINDOW_IN_EVERY_LAYER = ("mistral", "qwen3_moe")
# Family -> field -> its key in config.json, and what `transformers` takes an absent key for.
MIXTURE_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
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
_MOST = 2**31
MOST_LAYERS = 2**16
_MOST_NUMBERS = 2**56  # of one weight of all layers
_PLAIN_ROPE = RopeConfig()
# Of a ModelConfig: what the forward does not depend on.
_NOT_COMPUTED = {
    "max_positions",
    "initializer_range",
    "router_aux_loss_coef",
    "eos_token_ids",
    "bos_token_id",
    "pad_token_id",
}


class AttentionShape(NamedTuple):
    """Heads of keys, the size of a key, and the size of a value."""

    key_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention, under the names that config.json has for them.

    A head's query and key have `qk_nope_head_dim` numbers without and `qk_rope_head_dim` with
    rotation, its value `v_head_dim`. With a `q_lora_rank` above 0 queries too are made of a
    compressed state. With `rope_interleave` the rotated pairs are neighbours (2 i, 2 i + 1), as
    DeepSeek has them, and not (i, i + half).

    Raises `InputError` naming the field at fault.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "rope_interleave":
                _check_bool(name, value)
            else:
                check_size(name, value, least=0 if name == "q_lora_rank" else 1)
        if self.qk_rope_head_dim % 2:
            raise InputError(
                f"qk_rope_head_dim must be even for rotary pairs, found {self.qk_rope_head_dim}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def state_dim(self) -> int:
        """Numbers of a token in the cache: the compressed state and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kv_head_dim(self) -> int:
        """Numbers that a head's key and value take from the compressed state."""
        return self.qk_nope_head_dim + self.v_head_dim


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder: Qwen2, Qwen3, their mixtures, Llama 3, Mistral, DeepSeek-V3.

    Per layer: RMSNorm, grouped-query attention with rotary positions, RMSNorm, SwiGLU; then a final
    RMSNorm and a head, which is the embedding's transpose if `tied_embeddings`. `qk_norm` puts an
    RMSNorm over each head of q and k before the rotation; `attention_bias` adds biases to q, k and
    v, `output_bias` to the projection after attention, `mlp_bias` to all three of the SwiGLU.

    With a `sliding_window` W above 0, a token at position p attends to positions
    max(0, p - W + 1)..p in the layers for which `window_layers` has True. Without, `window_layers`
    is empty.

    In a mixture of experts, whose `num_experts` is above 0, every layer has that many SwiGLUs of
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

    __repr__ = changes

    def __post_init__(self) -> None:
        check_model_type(self.model_type)
        _check_sizes(self)
        _check_scalars(self)
        _check_family(self)
        _check_mixture(self)
        _check_latent(self)
        _check_windows(self)

    def computes_as(self, other: "ModelConfig") -> bool:
        """Whether equal weights give equal log-probs under both."""
        return self.computed == other.computed

    @property
    def computed(self) -> dict[str, Any]:
        """The fields that log-probs depend on, nested ones as dicts."""
        return {name: x for name, x in asdict(self).items() if name not in _NOT_COMPUTED}

    @property
    def most_positions(self) -> int:
        """The most tokens of a sequence: `max_positions`, or as many as YaRN stretches it to."""
        return min(max(self.max_positions, self.rope.stretched_positions), _MOST - 1)

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
        dense = replace(self, num_layers=first, **DENSE)
        rest = replace(self, num_layers=self.num_layers - first, first_dense_layers=0)
        return {"dense_layers": dense, "layers": rest}

    @property
    def window_sizes(self) -> np.ndarray | None:
        """i32[L], how many positions a token attends to; None if no layer has a window.

        A layer without one gets a number that no sequence reaches, so that all layers are one
        program. A window changes which keys are masked, and nothing else: blocks of keys stay
        anchored at a sequence's first token, and what is masked adds exact zeros in its place in
        the sums. So their order is the same for every length, batch and padding.
        """
        if not self.sliding_window:
            return None
        return np.where(self.window_layers, self.sliding_window, _MOST - 1).astype(np.int32)

    def with_layers(self, count: int) -> "ModelConfig":
        """The same architecture with another number of layers, of each kind at least one."""
        first = min(self.first_dense_layers, count - 1)
        return replace(
            self, num_layers=count, first_dense_layers=first, **_spread_windows(self, count)
        )


# The fields that mixtures alone have, as they are in a model without experts.
_OF_MIXTURES = {field for keys in MIXTURE_KEYS.values() for field in keys}
DENSE = {one.name: one.default for one in fields(ModelConfig) if one.name in _OF_MIXTURES}


def check_model_type(value: Any) -> None:
    """Raises `InputError` for what is no family that is computed here."""
    if not isinstance(value, str) or value not in ARCHITECTURES:
        # The nearest name would be no help: families with names alike are different ones.
        known = ", ".join(sorted(ARCHITECTURES))
        raise InputError(f"model_type {value!r} is not supported; known: {known}")


def check_size(name: str, value: Any, *, least: int = 1) -> None:
    """Raises `InputError` for what is no whole number from `least` to 2^31 - 1."""
    if not whole(value) or not least <= value < _MOST:
        raise InputError(
            f"{name} must be a whole number from {least} to {_MOST - 1}, found {value!r}"
        )


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, found {value!r}")


def _check_number(name: str, value: Any, rule: str, fits: Callable[[float], bool]) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not fits(value) or not value < math.inf:
        raise InputError(f"{name} must be a finite number {rule}, found {value!r}")


def _check_sizes(config: ModelConfig) -> None:
    for name in _SIZES:
        check_size(name, getattr(config, name))
    if config.num_layers > MOST_LAYERS:
        raise InputError(f"num_layers must be at most {MOST_LAYERS:,}, found {config.num_layers}")
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
        _check_number(name, getattr(config, name), "above 0", lambda value: value > 0)
    for name in ("qk_norm", "attention_bias", "output_bias", "mlp_bias", "tied_embeddings"):
        _check_bool(name, getattr(config, name))
    optional = (i for i in (config.bos_token_id, config.pad_token_id) if i is not None)
    for token in (*config.eos_token_ids, *optional):
        if not whole(token):
            raise InputError(f"token ids must be whole numbers, found {token!r}")
    check_stop_tokens(config.eos_token_ids, config.vocab_size)


def check_stop_tokens(
    tokens: Iterable[int], vocab_size: int, *, name: str = "eos_token_id"
) -> None:
    """Refuses ids of end tokens that can never be drawn."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InputError(
                f"{name} {token} is outside the vocabulary of {vocab_size} tokens, from 0 to"
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


def _check_latent(config: ModelConfig) -> None:
    latent, family = config.latent, config.model_type
    if (latent is not None) != (family in LATENT_FAMILIES):
        has = "has" if family in LATENT_FAMILIES else "has no"
        raise InputError(f"a {family} model {has} latent attention, found latent={latent!r}")
    if latent is None:
        return
    if config.num_kv_heads != config.num_heads:
        raise InputError(
            f"latent attention has as many key heads as heads, {config.num_heads}, found"
            f" num_kv_heads {config.num_kv_heads}"
        )
    if config.head_dim != latent.qk_rope_head_dim:
        raise InputError(
            f"a {family} model's head_dim is its qk_rope_head_dim {latent.qk_rope_head_dim}, found"
            f" {config.head_dim}"
        )


def _check_mixture(config: ModelConfig) -> None:
    """In a mixture all sizes are above 0."""
    family = config.model_type
    without = family not in MIXTURE_FAMILIES or (
        family in SIGMOID_FAMILIES and config.num_experts == 0
    )
    for name, value in DENSE.items():
        if (without or name not in MIXTURE_KEYS[family]) and getattr(config, name) != value:
            found = getattr(config, name)
            raise InputError(f"a {family} model has {name}={value}, found {found!r}")
    if without:
        return
    for name, value in DENSE.items():
        if whole(value):
            least = 0 if name == "first_dense_layers" or name not in MIXTURE_KEYS[family] else 1
            check_size(name, getattr(config, name), least=least)
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
    _check_bool("norm_topk_prob", config.norm_topk_prob)
    for name in ("router_aux_loss_coef", "routed_scaling_factor"):
        _check_number(name, getattr(config, name), "of at least 0", lambda value: value >= 0)
    _check_groups(config)
    if config.first_dense_layers >= config.num_layers:
        raise InputError(
            f"first_dense_layers must be less than num_layers {config.num_layers}, found"
            f" {config.first_dense_layers}"
        )


def _check_groups(config: ModelConfig) -> None:
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


def _check_windows(config: ModelConfig) -> None:
    family, window, layers = config.model_type, config.sliding_window, config.window_layers
    if not whole(window) or not 0 <= window < _MOST:
        raise InputError(
            f"sliding_window must be a whole number from 0 (none) to {_MOST - 1}, found {window!r}"
        )
    if not isinstance(layers, tuple) or not all(isinstance(own, bool) for own in layers):
        raise InputError(f"window_layers must be a tuple of True and False, found {layers!r}")
    if not window:
        if layers:
            raise InputError(f"window_layers must be () without a sliding_window, found {layers}")
        return
    if family not in (*WINDOWS_BY_LAYER, *WINDOW_IN_EVERY_LAYER):
        raise InputError(f"a {family} model has sliding_window=0, found {window}")
    if len(layers) != config.num_layers:
        raise InputError(f"window_layers has {len(layers)} entries for {config.num_layers} layers")
    if not any(layers):
        raise InputError(f"window_layers has no layer for sliding_window {window}")
    if family in WINDOW_IN_EVERY_LAYER and not all(layers):
        raise InputError(
            f"a {family} model has its sliding_window in every layer, found window_layers {layers}"
        )


def _spread_windows(config: ModelConfig, layers: int) -> dict[str, Any]:
    """The fields for another number of layers, windows in about the same share of them.

    Of that many equal runs of layers, each gives its last one's kind.
    """
    count = config.num_layers
    if not config.sliding_window:
        return {}
    kinds = tuple(config.window_layers[((i + 1) * count - 1) // layers] for i in range(layers))
    return {"window_layers": kinds} if any(kinds) else {"sliding_window": 0, "window_layers": ()}
