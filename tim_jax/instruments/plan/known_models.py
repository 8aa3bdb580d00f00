"""Published architectures by their name on the Hugging Face hub, so that plans need no network.

The values are those of each model's config.json: what the forward computes with, and the tokens.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": 151643,
}
_QWEN2_5 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "bos_token_id": 151643}
_LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "bos_token_id": 128000,
}
_MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Size -> `_SIZES`, and whether the head is the embedding.
_QWEN3_SIZES = {
    "0.6B": ((1024, 3072, 28, 16), True),
    "1.7B": ((2048, 6144, 28, 16), True),
    "4B": ((2560, 9728, 36, 32), True),
    "8B": ((4096, 12288, 36, 32), False),
    "14B": ((5120, 17408, 40, 40), False),
    "32B": ((5120, 25600, 64, 64), False),
}
# Also the key-value heads, the vocabulary, and the positions of the base model.
_QWEN2_5_SIZES = {
    "0.5B": ((896, 4864, 24, 14), True, 2, 151936, 32768),
    "1.5B": ((1536, 8960, 28, 12), True, 2, 151936, 131072),
    "3B": ((2048, 11008, 36, 16), True, 2, 151936, 32768),
    "7B": ((3584, 18944, 28, 28), False, 4, 152064, 131072),
}
# Also the factor by which positions are stretched.
_LLAMA3_SIZES = {
    "3.2-1B": ((2048, 8192, 16, 32), True, 32.0),
    "3.2-3B": ((3072, 8192, 28, 24), True, 32.0),
    "3.1-8B": ((4096, 14336, 32, 32), False, 8.0),
}
_SMOLLM2 = {
    **dict(zip(_SIZES, (576, 1536, 30, 9), strict=True)),
    "model_type": "llama",
    "vocab_size": 49152,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
# Version -> the vocabulary, the base of the rotary frequencies, the window.
_MISTRAL_7B = {"v0.1": (32000, 1e4, 4096), "v0.3": (32768, 1e6, None)}
_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
# DeepSeek-V3 and Moonlight-16B-A3B. Both publish float8 or bfloat16 weights; a further layer that
# predicts the token after next is left out, as `transformers` leaves it out.
_LATENT_VALUES = {
    "vocab_size": (129280, 163840),
    "hidden_size": (7168, 2048),
    "intermediate_size": (18432, 11264),
    "moe_intermediate_size": (2048, 1408),
    "num_hidden_layers": (61, 27),
    "num_attention_heads": (128, 16),
    "num_key_value_heads": (128, 16),
    "q_lora_rank": (1536, None),
    "n_routed_experts": (256, 64),
    "n_shared_experts": (1, 2),
    "num_experts_per_tok": (8, 6),
    "n_group": (8, 1),
    "topk_group": (4, 1),
    "routed_scaling_factor": (2.5, 2.446),
    "first_k_dense_replace": (3, 1),
    "max_position_embeddings": (163840, 8192),
    "rms_norm_eps": (1e-6, 1e-5),
    "rope_theta": (10000.0, 50000.0),
    "bos_token_id": (0, 163584),
    "eos_token_id": (1, 163585),
}
_V3, _MOONLIGHT = (
    _DEEPSEEK | {key: values[model] for key, values in _LATENT_VALUES.items()} for model in (0, 1)
)
_V3_ROPE = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_LATENT = {
    "deepseek-ai/DeepSeek-V3": _V3 | {"rope_scaling": _V3_ROPE},
    "moonshotai/Moonlight-16B-A3B": _MOONLIGHT,
}
# `_SIZES`, of which the width of a dense MLP is not used; experts, those of a token, their width.
_QWEN3_MOE_SIZES = {"30B-A3B": ((2048, 6144, 48, 32), (128, 8, 768))}


def _published() -> dict[str, dict[str, Any]]:
    """Name -> config.json, of base models and those tuned to follow instructions."""
    configs: dict[str, dict[str, Any]] = {"HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2}
    tuned = {"max_position_embeddings": 40960, "eos_token_id": 151645}
    base = {"max_position_embeddings": 32768, "eos_token_id": 151643}
    for size, (sizes, tied) in _QWEN3_SIZES.items():
        shared = {**_QWEN3, **dict(zip(_SIZES, sizes, strict=True)), "tie_word_embeddings": tied}
        configs[f"Qwen/Qwen3-{size}"] = shared | tuned
        if size != "32B":  # whose base model is not published
            configs[f"Qwen/Qwen3-{size}-Base"] = shared | base
    for size, (sizes, (experts, chosen, width)) in _QWEN3_MOE_SIZES.items():
        shared = {**_QWEN3, **dict(zip(_SIZES, sizes, strict=True)), "tie_word_embeddings": False}
        shared |= {"model_type": "qwen3_moe", "num_key_value_heads": 4, "norm_topk_prob": True}
        shared |= {"num_experts": experts, "num_experts_per_tok": chosen}
        shared |= {"moe_intermediate_size": width, "router_aux_loss_coef": 0.001}
        configs[f"Qwen/Qwen3-{size}"] = shared | tuned
    for size, (sizes, tied, heads, vocabulary, positions) in _QWEN2_5_SIZES.items():
        shared = {**_QWEN2_5, **dict(zip(_SIZES, sizes, strict=True)), "tie_word_embeddings": tied}
        shared |= {"num_key_value_heads": heads, "vocab_size": vocabulary}
        base = {"max_position_embeddings": positions, "eos_token_id": 151643}
        tuned = {"max_position_embeddings": 32768, "eos_token_id": 151645}
        configs[f"Qwen/Qwen2.5-{size}"] = shared | base
        configs[f"Qwen/Qwen2.5-{size}-Instruct"] = shared | tuned
    for size, (sizes, tied, factor) in _LLAMA3_SIZES.items():
        shared = {**_LLAMA3, **dict(zip(_SIZES, sizes, strict=True)), "tie_word_embeddings": tied}
        shared["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        configs[f"meta-llama/Llama-{size}"] = shared | {"eos_token_id": 128001}
        tuned = {"eos_token_id": [128001, 128008, 128009]}
        configs[f"meta-llama/Llama-{size}-Instruct"] = shared | tuned
    for name, (vocabulary, theta, window) in _MISTRAL_7B.items():
        shared = {**_MISTRAL, "vocab_size": vocabulary, "rope_theta": theta}
        for kind in ("", "Instruct-"):
            configs[f"mistralai/Mistral-7B-{kind}{name}"] = shared | {"sliding_window": window}
    return configs | _LATENT


PUBLISHED: Mapping[str, Mapping[str, Any]] = MappingProxyType(_published())
