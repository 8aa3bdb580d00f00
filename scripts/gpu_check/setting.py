"""What the parts share: sizes, models, numerics, timing. One value says if it is a smoke run."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bench_common as common
import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.common.errors import InputError
from tim_jax.kernels import pallas_mosaic_gpu
from tim_jax.model import fitting
from tim_jax.model.config import LatentConfig, ModelConfig
from tim_jax.model.weights import TABLE, Weight, matrices, tree
from tim_jax.numerics import (
    GPU_EXACT_BF16,
    GPU_EXACT_F32,
    GPU_PINNED_OPTIONS,
    MOSAIC_GPU_BF16_SEVERAL_TILES,
    MOSAIC_GPU_EXACT_BF16,
    GpuTiles,
    MatmulTile,
    Numerics,
    Rows,
)

SMOKE_TILES = GpuTiles(
    block_k=16,
    matmul=(MatmulTile(16, 16), MatmulTile(32, 16)),
    programs=4,
    attention_rows=16,
    row_tile=4,
    lanes=32,
)
ONE_TILE = MatmulTile(128, 128, 8, 6)
SMOKE_MOSAIC = MatmulTile(64, 64, 4, 2)
# Qwen3: hidden and intermediate size, layers, heads.
QWEN3 = {
    "0.6B": (1024, 3072, 28, 16),
    "1.7B": (2048, 6144, 28, 16),
    "4B": (2560, 9728, 36, 32),
}


@dataclass(frozen=True)
class Setting:
    """How large everything is."""

    smoke: bool
    out: Path

    def exact(self, dtype: str, *, tuned: bool = False) -> Numerics:
        """`pallas_gpu`: one tile for all products or, `tuned`, a tile by their size."""
        numerics = GPU_EXACT_BF16 if dtype == "bfloat16" else GPU_EXACT_F32
        if self.smoke:
            tiles = SMOKE_TILES if tuned else replace(SMOKE_TILES, matmul=(MatmulTile(16, 16),))
            return replace(numerics, gpu=tiles, kv_block=16, head_rows=32, interpret=True)
        if tuned or dtype != "bfloat16":
            return numerics
        return replace(numerics, gpu=replace(numerics.gpu, matmul=(ONE_TILE,)))

    def mosaic(self, *, tuned: bool = False) -> Numerics:
        """`pallas_mosaic_gpu`, in bfloat16, which is all that it has."""
        if self.smoke:
            tiles = replace(SMOKE_TILES, block_k=64, matmul=(SMOKE_MOSAIC,), experts=SMOKE_MOSAIC)
            small = {"gpu": tiles, "kv_block": 16, "head_rows": 32, "interpret": True}
            return replace(MOSAIC_GPU_EXACT_BF16, **small)
        if tuned:
            return replace(MOSAIC_GPU_EXACT_BF16, gpu=MOSAIC_GPU_BF16_SEVERAL_TILES)
        return MOSAIC_GPU_EXACT_BF16

    @property
    def without_mosaic(self) -> str:
        """Why `mosaic` cannot run here; nothing if it can."""
        try:
            pallas_mosaic_gpu.check(self.mosaic())
        except InputError as error:
            return str(error)
        return ""

    def tiles(self, dtype: str) -> Numerics:
        """The slow reference: fenced XLA operations on fixed tiles."""
        rows = Rows(16, 16) if self.smoke else Rows(64, 64)
        return Numerics(
            compute_dtype=dtype, rows=rows, attention_rows=rows, kv_block=32, **self._on_a_gpu
        )

    def native(self, dtype: str, *, pinned: bool = False) -> Numerics:
        """Plain XLA; `pinned` with the options under which it may be reproducible on a GPU."""
        options = GPU_PINNED_OPTIONS if pinned and not self.smoke else ()
        return Numerics(
            family="native",
            compute_dtype=dtype,
            kv_block=64,
            compiler_options=options,
            **self._on_a_gpu,
        )

    @property
    def _on_a_gpu(self) -> dict[str, Any]:
        """What a run would choose there, as for the exact side: no handicap in the comparison."""
        exact = GPU_EXACT_BF16
        if self.smoke:
            return {}
        names = "cache_write", "head_rows", "head_gradient_columns", "row_sums"
        return {name: getattr(exact, name) for name in names}

    def small_model(self, layers: int = 2) -> ModelConfig:
        """A model that compiles fast and yet has full tiles."""
        size = 32 if self.smoke else 512
        return ModelConfig(
            model_type="qwen3",
            vocab_size=48 if self.smoke else 2048,
            hidden_size=size,
            num_layers=1 if self.smoke else layers,
            num_heads=4 if self.smoke else 8,
            num_kv_heads=2 if self.smoke else 4,
            head_dim=16 if self.smoke else 128,
            intermediate_size=size + 16 if self.smoke else 1536,
            max_positions=16384,
            tied_embeddings=True,
            qk_norm=True,
        )

    def families(self) -> dict[str, ModelConfig]:
        """The small model as other families have it: experts, latent attention, windows."""
        plain = self.small_model()
        width = plain.intermediate_size // 3 // 16 * 16
        experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": width}
        head = plain.head_dim
        latent = LatentConfig(
            kv_lora_rank=plain.hidden_size,
            qk_nope_head_dim=head,
            qk_rope_head_dim=head // 2 if head > 16 else head,
            v_head_dim=head,
        )
        other = {"qk_norm": False, "tied_embeddings": False}
        return {
            "Qwen3-MoE": replace(plain, model_type="qwen3_moe", norm_topk_prob=True, **experts),
            "latent attention": replace(
                plain,
                model_type="deepseek_v3",
                num_kv_heads=plain.num_heads,
                head_dim=latent.qk_rope_head_dim,
                norm_topk_prob=True,
                num_shared_experts=1,
                latent=latent,
                **experts,
                **other,
            ),
            "windows": replace(
                plain, sliding_window=5 if self.smoke else 50, window_layers=_every_second(plain)
            ),
            "Qwen2": replace(plain, model_type="qwen2", attention_bias=True, **other),
            "Llama": replace(plain, model_type="llama", **other),
        }

    def mosaic_model(self) -> ModelConfig:
        """The small model, with matrices in whole blocks of `mosaic`."""
        config = self.small_model()
        sizes = ("vocab_size", "hidden_size", "intermediate_size")
        return replace(config, **dict.fromkeys(sizes, 64)) if self.smoke else config

    def model(self, name: str) -> ModelConfig:
        """Qwen3 of 0.6B, 1.7B or 4B parameters; in a smoke run the small model."""
        if self.smoke:
            return self.small_model()
        hidden, intermediate, layers, heads = QWEN3[name]
        return ModelConfig(
            model_type="qwen3",
            vocab_size=151936,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=intermediate,
            max_positions=40960,
            tied_embeddings=True,
            qk_norm=True,
        )

    def fitted(self, config: ModelConfig, numerics: Numerics) -> Numerics:
        """Tiles that fit the model; refused by name where none does."""
        fitted = fitting.fitted(config, numerics)
        fitting.check(config, fitted)
        return fitted


def _every_second(config: ModelConfig) -> tuple[bool, ...]:
    return tuple(index % 2 == 0 for index in range(config.num_layers))


def parameters(config: ModelConfig) -> int:
    """Weights that a token meets: matrices of all layers and the head, once."""
    sizes = {name: inputs * outputs for name, (inputs, outputs) in matrices(config).items()}
    head = sizes.pop("head")
    return config.num_layers * sum(sizes.values()) + head


@functools.partial(jax.jit, static_argnames="config")
def device_params(key: jax.Array, config: ModelConfig) -> dict[str, Any]:
    """Random float32 parameters made on the device: the host would take minutes."""
    keys = iter(jax.random.split(key, len(TABLE)))

    def draw(weight: Weight) -> jax.Array:
        shape = weight.shape(config)
        if weight.kind in ("norm", "bias"):
            # Without a dtype their type is weak: an update's is not, and its second call compiles.
            return jnp.full(shape, float(weight.kind == "norm"), jnp.float32)
        inputs = shape[-2] if weight.kind == "matrix" else config.hidden_size
        return jax.random.normal(next(keys), shape) * inputs**-0.5

    return tree(config, draw)


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def same_bits(a: jax.Array, b: jax.Array) -> bool:
    """Raw bits; nothing compared is no agreement."""
    a, b = np.asarray(a), np.asarray(b)
    return a.size > 0 and a.shape == b.shape and a.tobytes() == b.tobytes()


def once(call: Callable[[], Any]) -> float:
    """Seconds of one call, results waited for."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def seconds(call: Callable[[], Any], *, least: float = 0.2, most: int = 20) -> float:
    """Seconds per call, compiled: the mean over enough calls to fill `least` seconds.

    Raises `CompiledError` if a later call than the first compiles.
    """
    jax.block_until_ready(call())
    with common.warm("a program"):
        count = max(1, min(most, int(least / max(once(call), 1e-6))))
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count
