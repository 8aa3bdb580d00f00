"""Small architectures with awkward shapes, for audits and tests. Random parameters."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from tim_jax.model.config import ModelConfig
from tim_jax.model.params import Params, init_params
from tim_jax.model.rope import RopeConfig

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "qwen3": ModelConfig(
            model_type="qwen3",
            vocab_size=1000,
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            intermediate_size=160,
            max_positions=512,
            qk_norm=True,
            tied_embeddings=True,
        ),
        # 3 key heads, groups of 5, heads of 20, a prime vocabulary
        "qwen3-awkward": ModelConfig(
            model_type="qwen3",
            vocab_size=101,
            hidden_size=52,
            num_layers=2,
            num_heads=15,
            num_kv_heads=3,
            head_dim=20,
            intermediate_size=76,
            max_positions=512,
            qk_norm=True,
        ),
        # a head of its own for every query
        "llama": ModelConfig(
            model_type="llama",
            vocab_size=1000,
            hidden_size=60,
            num_layers=2,
            num_heads=5,
            num_kv_heads=5,
            head_dim=12,
            intermediate_size=100,
            max_positions=512,
            rope=RopeConfig(
                kind="llama3",
                theta=500.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_positions=32,
            ),
        ),
        # one key head for all queries, biases
        "qwen2": ModelConfig(
            model_type="qwen2",
            vocab_size=257,
            hidden_size=48,
            num_layers=3,
            num_heads=6,
            num_kv_heads=1,
            head_dim=8,
            intermediate_size=90,
            max_positions=512,
            attention_bias=True,
            tied_embeddings=True,
        ),
        # whole tiles everywhere: what the Pallas families can take
        "qwen3-blocks": ModelConfig(
            model_type="qwen3",
            vocab_size=256,
            hidden_size=128,
            num_layers=1,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            intermediate_size=128,
            max_positions=512,
            qk_norm=True,
            tied_embeddings=True,
        ),
    }
)


def random_params(config: ModelConfig, seed: int) -> Params:
    """Random parameters, float32, with everything at work.

    `init_params`, but with matrices wide enough that the logits spread as a trained model's do
    (a standard deviation of about 2), and norm weights and biases that are not all ones and zeros.
    """
    rng = np.random.default_rng(seed)
    widening = np.float32(2 / (config.initializer_range * config.hidden_size**0.5))

    def stirred(name: str, leaf: Any) -> Any:
        if isinstance(leaf, dict):
            return {key: stirred(key, value) for key, value in leaf.items()}
        noise = np.float32(0.2) * rng.standard_normal(leaf.shape, np.float32)
        if name.endswith("_norm"):
            return leaf + noise
        return noise if name.endswith("_bias") else leaf * widening

    return stirred("", init_params(config, seed))
