"""Small checkpoints with awkward shapes, made by `transformers`, one for every branch of the model.

The values of `CASES` are what `transformers`' configuration classes take, beyond `_SIZES`.
"""

import pytest
import transformers

_SIZES = {
    "vocab_size": 101,
    "num_hidden_layers": 3,
    "intermediate_size": 52,
    "max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

CASES = {
    "qwen3-tied": {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3-bias-yarn": {
        "hidden_size": 40,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "attention_bias": True,
        "rope_parameters": _YARN,
    },
    "qwen3-linear": {
        "hidden_size": 36,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 6,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    },
    "qwen2": {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1},
    "qwen2-tied-yarn": {
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "tie_word_embeddings": True,
        "rope_parameters": _YARN
        | {"mscale": 1.3, "mscale_all_dim": 0.7, "truncate": False, "beta_fast": 4.0},
    },
    "llama-llama3": {
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "rope_parameters": _LLAMA3,
        "eos_token_id": [7, 9],
    },
    "llama-tied-biases": {
        "hidden_size": 30,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    "llama-yarn": {
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "rope_parameters": _YARN | {"attention_factor": 1.25, "beta_slow": 0.5},
        "mlp_bias": True,
    },
    "qwen3_moe": {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,  # torch takes multiples of 16 bytes
        "norm_topk_prob": True,
    },
    "qwen3_moe-tied-unnormalised": {
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 28,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _YARN,
        "use_sliding_window": True,
        "sliding_window": 12,
    },
    "qwen2_moe": {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 44,
    },
    "deepseek_v3": {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 12,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "n_routed_experts": 9,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _YARN | {"mscale": 1.3, "mscale_all_dim": 0.7},
    },
    "deepseek_v3-whole_query-unnormalised": {  # as Moonlight
        "hidden_size": 36,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "q_lora_rank": None,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 10,
        "v_head_dim": 5,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 28,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "tie_word_embeddings": True,
    },
    "deepseek_v3-dense": {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "q_lora_rank": 12,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "first_k_dense_replace": 3,
    },
    "mistral": {
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "sliding_window": 5,
        "rms_norm_eps": 1e-5,
    },
    "qwen2-window": {
        "hidden_size": 36,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 17,
        "max_window_layers": 1,
    },
    "qwen3-window": {
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def make_config(name):
    """The `transformers` configuration of a case."""
    classes = {
        "qwen3": transformers.Qwen3Config,
        "qwen2": transformers.Qwen2Config,
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2_moe": transformers.Qwen2MoeConfig,
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "deepseek_v3": transformers.DeepseekV3Config,
    }
    return classes[name.split("-")[0]](**_SIZES, **CASES[name])


def make_model(name, *, seed=0):
    """A float32 torch model of a case; every parameter and bias of a router is random."""
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_config(
        make_config(name), attn_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if "norm" in parameter_name:
                parameter += 1.0
        for buffer_name, buffer in model.named_buffers():
            if "e_score_correction_bias" in buffer_name:
                buffer.normal_(0.0, 0.2, generator=generator)
    return model.eval()


def torch_logits(model, tokens):
    """NumPy [T, V] of one sequence."""
    torch = pytest.importorskip("torch")
    if any(getattr(model.config, key, 0) for key in ("num_experts", "n_routed_experts")):
        model.set_experts_implementation("eager")  # of any width and dtype
    with torch.no_grad():
        return model(torch.as_tensor(tokens)[None]).logits[0].numpy()
