"""Programs of the Pallas families, to be lowered or compiled for devices that are not here."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from tim_jax import kernels
from tim_jax.model import fitting
from tim_jax.model.config import ModelConfig
from tim_jax.model.config_file import from_hf
from tim_jax.model.execution import Execution, Sampling
from tim_jax.model.weights import parameter_shapes
from tim_jax.numerics import GPU_EXACT_BF16, GPU_EXACT_F32, TPU_EXACT_BF16, TPU_EXACT_F32, Numerics
from tim_jax.plan.known_models import PUBLISHED
from tim_jax.policy import sampler, scoring
from tim_jax.types import Prompts, Rollout

NUMERICS = {
    "pallas_gpu": {"float32": GPU_EXACT_F32, "bfloat16": GPU_EXACT_BF16},
    "pallas_tpu": {"float32": TPU_EXACT_F32, "bfloat16": TPU_EXACT_BF16},
}
DEVICES = {
    "pallas_gpu": ("cuda", AbstractDevice("NVIDIA H200", 132, "cuda")),
    "pallas_tpu": ("tpu", AbstractDevice("TPU v5 lite", 1, "tpu")),
}
# Real proportions, few layers: heads of 128, groups of 2, a vocabulary that is no power of two, and
# sizes that the tiles of the numerics divide.
CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=640,
    hidden_size=1024,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=3072,
    max_positions=512,
    tied_embeddings=True,
    qk_norm=True,
)

LATENT = from_hf(PUBLISHED["moonshotai/Moonlight-16B-A3B"])


def operations(numerics: Numerics, rows: int = 70):
    """Name -> (function, shapes) of every kernel, with every option that makes it another one.

    With `rows`, attention has other numbers of queries, keys, pages and sequences as well.
    """
    ops, dtype, f32 = kernels.family(numerics), numerics.dtype, jnp.float32
    heads = kernels.Heads(4, 2, 128)
    shape = jax.ShapeDtypeStruct
    wide = 2048  # columns; of which half are summed over
    x, weight = shape((rows, wide // 2), dtype), shape((wide // 2, wide), dtype)
    y, angle = shape((rows, 8 * 128), f32), shape((rows, 64), f32)
    one, logits = shape((rows,), f32), shape((rows, 5000), f32)
    extras = {name: shape((128,), f32) for name in ("q_norm", "k_norm")}
    extras["bias"] = shape((8 * 128,), f32)
    count, length, block = 1 + rows // 30, 60 + 2 * rows, numerics.kv_block
    query = shape((count, 8, 2 * rows, 128), dtype)
    key, value = shape((count, 8, 128, length), dtype), shape((count, 8, length, 128), dtype)
    positions = shape((count, 2 * rows), jnp.int32)
    pages = shape((count, -(-length // block)), jnp.int32)
    paged = shape((20, 8, 128, block), dtype), shape((20, 8, block, 128), dtype)
    # Latent attention: a compressed state of 512 numbers, and beside it a rotated key of 64.
    latent_query = shape((count, 1, 2 * rows, 576), dtype)
    latent_key = shape((count, 1, 576, length), dtype)
    state = shape((count, 1, length, 512), dtype)
    of_states = {"numerics": fitting.fitted(LATENT, numerics)}
    page = of_states["numerics"].kv_block
    paged_states = shape((20, 1, 576, page), dtype), shape((20, 1, page, 512), dtype)
    latent_pages = shape((count, -(-length // page)), jnp.int32)
    use = {"numerics": numerics}
    writes = {}
    if numerics.cache_write == "kernel":
        row, at = shape((count, 1, 8, 128), dtype), shape((count, 1), jnp.int32)
        writes = {
            "cache_write": (partial(kernels.written, **use), ((key, value), (row, row), at)),
            "cache_write, pages": (
                lambda caches, rows, at, pages: kernels.written(
                    caches, rows, at, pages=pages, **use
                ),
                (paged, (row, row), at, pages),
            ),
        }

    def gradient(query, key, value, positions, cotangent, window=None, numerics=numerics):
        def attend(*arrays):
            options = {"window": window, "numerics": numerics}
            return ops.attention(*arrays, positions, aligned=True, **options)

        return jax.vjp(attend, query, key, value)[1](cotangent)

    project = partial(ops.project, heads=heads, eps=1e-6, **use)
    return writes | {
        "dot": (partial(ops.dot, **use), (x, weight)),
        "dot_add": (
            lambda x, w, r: ops.dot_add(x, w, r, None, **use),
            (x, weight, shape((rows, wide), dtype)),
        ),
        "dot_add, bias": (
            partial(ops.dot_add, **use),
            (x, weight, shape((rows, wide), dtype), shape((wide,), f32)),
        ),
        "dot, 1152 columns": (partial(ops.dot, **use), (x, shape((wide // 2, 1152), dtype))),
        "dots": (
            partial(ops.dots, **use),
            (shape((4, rows, wide // 2), dtype), shape((4, wide // 2, 512), dtype)),
        ),
        "gated_dot": (lambda x, w: ops.gated_dot(x, w, None, **use), (x, weight)),
        "gated_dot, bias": (partial(ops.gated_dot, **use), (x, weight, shape((wide,), f32))),
        "grouped": (
            partial(ops.grouped, **use),
            (
                shape((6, rows, wide // 2), dtype),
                shape((4, wide // 2, wide), dtype),
                shape((4, wide // 2, wide // 2), dtype),
                shape((6,), jnp.int32),
                shape((), jnp.int32),
            ),
        ),
        "norm": (partial(ops.norm, eps=1e-6, **use), (x, shape((wide // 2,), f32))),
        "project": (project, (y, angle, angle, extras)),
        "project, bare": (project, (y, angle, angle, {})),
        "attention": (
            partial(ops.attention, aligned=False, **use),
            (query, key, value, positions),
        ),
        "attention, pages": (
            lambda q, k, v, at, pages: ops.attention(
                q, k, v, at, aligned=False, pages=pages, **use
            ),
            (query, *paged, positions, pages),
        ),
        "attention, window": (
            lambda q, k, v, at, window: ops.attention(
                q, k, v, at, aligned=False, window=window, **use
            ),
            (query, key, value, positions, shape((), jnp.int32)),
        ),
        "attention, window and pages": (
            lambda q, k, v, at, window, pages: ops.attention(
                q, k, v, at, aligned=False, window=window, pages=pages, **use
            ),
            (query, *paged, positions, shape((), jnp.int32), pages),
        ),
        "attention, latent": (
            partial(ops.attention, aligned=False, **of_states),
            (latent_query, latent_key, state, positions),
        ),
        "attention, latent and pages": (
            lambda q, k, v, at, pages: ops.attention(
                q, k, v, at, aligned=False, pages=pages, **of_states
            ),
            (latent_query, *paged_states, positions, latent_pages),
        ),
        "attention, gradient": (gradient, (query, key, value, positions, query)),
        "attention, window and gradient": (
            gradient,
            (query, key, value, positions, query, shape((), jnp.int32)),
        ),
        "attention, latent and gradient": (
            partial(gradient, **of_states),
            (
                *(latent_query, latent_key, state, positions),
                shape((count, 1, 2 * rows, 512), dtype),
            ),
        ),
        "exponentials": (partial(ops.exponentials, **use), (logits, one)),
        "row_sum": (partial(ops.row_sum, **use), (logits,)),
        "log": (partial(ops.log, **use), (one,)),
        "log_normaliser": (lambda x, p: ops.log_normaliser(x, p, x, **use), (logits, one)),
    }


def programs(numerics: Numerics, *, config: ModelConfig = CONFIG, batch: int = 3):
    """Name -> (function, shapes) of a whole sampler and of a learner's gradient."""
    shape = jax.ShapeDtypeStruct
    fitted = fitting.fitted(config, numerics)
    execution = Execution(config, fitted, Sampling(96, top_p=0.9))
    weights = jax.eval_shape(execution.prepare, parameter_shapes(config))
    prompts = Prompts(
        tokens=shape((batch, 40), jnp.int32),
        lengths=shape((batch,), jnp.int32),
        ids=shape((batch,), jnp.int32),
    )
    rollout = Rollout(
        prompts=shape((batch, 40), jnp.int32),
        prompt_lengths=shape((batch,), jnp.int32),
        responses=shape((batch, 96), jnp.int32),
        lengths=shape((batch,), jnp.int32),
        log_probs=shape((batch, 96), jnp.float32),
        finished=shape((batch,), jnp.bool_),
    )

    def sample(weights, prompts, seed):
        key = jax.random.key(seed)
        return sampler.sample(weights, prompts, key, execution=execution, samples=1)

    def learn(weights, rollout):
        def loss(weights):
            log_probs = scoring.score(weights, rollout, execution=execution).log_probs
            return jnp.sum(jnp.where(rollout.mask, log_probs, 0.0))

        return jax.value_and_grad(loss)(weights)

    return {
        "sampler": (sample, (weights, prompts, shape((), jnp.uint32))),
        "learner": (learn, (weights, rollout)),
    }


def lower(family: str, function, shapes, *, sharding=None):
    """Lowered for the family's device, none of which need be here."""
    platform, device = DEVICES[family]
    if sharding is not None:
        shapes = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes
        )
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,))


def one_layer() -> ModelConfig:
    return replace(CONFIG, num_layers=1)
