"""Programs of the Pallas families, to be lowered or compiled for devices that are not here."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from tim_jax import kernels, mismatch
from tim_jax.common.types import Prompts, Rollout
from tim_jax.model import fitting
from tim_jax.model.config import ModelConfig
from tim_jax.model.config_file import from_hf
from tim_jax.model.execution import Execution, Sampling
from tim_jax.model.hf import PUBLISHED
from tim_jax.model.weights import parameter_shapes
from tim_jax.numerics import (
    GPU_EXACT_BF16,
    GPU_EXACT_F16,
    GPU_EXACT_F32,
    TPU_EXACT_BF16,
    TPU_EXACT_F32,
    Numerics,
    Precision,
)
from tim_jax.policy import sampler, scoring

NUMERICS = {
    "pallas_gpu": {
        "float32": GPU_EXACT_F32,
        "bfloat16": GPU_EXACT_BF16,
        "float16": GPU_EXACT_F16,
    },
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

SHAPE = jax.ShapeDtypeStruct
LATENT = from_hf(PUBLISHED["moonshotai/Moonlight-16B-A3B"])


def operations(numerics: Numerics, rows: int = 70):
    """Name -> (function, shapes) of every kernel, with every option that makes it another one.

    With `rows`, attention has other numbers of queries, keys, pages and sequences as well.
    """
    wide = fitting.fitted(replace(CONFIG, head_dim=256), numerics)
    latent = fitting.fitted(LATENT, numerics)
    windows = [("window",), ("window", "pages"), ("window", "gradient")]
    sizes = _Attention(numerics, rows)
    # Latent attention: a compressed state of 512 numbers, and beside it a rotated key of 64.
    return {
        **_writes(sizes),
        **_products(numerics, rows),
        **_rows(numerics, rows),
        **_attention(sizes, (), [(), ("pages",), ("gradient",), *windows]),
        **_attention(
            _Attention(latent, rows, heads=1, key=576, value=512),
            ("latent",),
            [(), ("pages",), ("gradient",)],
        ),
        **_attention(
            _Attention(wide, rows, key=256, value=256), ("heads of 256",), [(), ("gradient",)]
        ),
    }


def _products(numerics: Numerics, rows: int):
    ops, dtype, f32 = kernels.family(numerics), numerics.dtype, jnp.float32
    use = {"numerics": numerics}
    wide = 2048  # columns; of which half are summed over
    x, weight = SHAPE((rows, wide // 2), dtype), SHAPE((wide // 2, wide), dtype)
    residual = SHAPE((rows, wide), dtype)
    return {
        "dot": (partial(ops.dot, **use), (x, weight)),
        "dot_add": (lambda x, w, r: ops.dot_add(x, w, r, None, **use), (x, weight, residual)),
        "dot_add, bias": (partial(ops.dot_add, **use), (x, weight, residual, SHAPE((wide,), f32))),
        "dot, 1152 columns": (partial(ops.dot, **use), (x, SHAPE((wide // 2, 1152), dtype))),
        "dots": (
            partial(ops.dots, **use),
            (SHAPE((4, rows, wide // 2), dtype), SHAPE((4, wide // 2, 512), dtype)),
        ),
        "gated_dot": (lambda x, w: ops.gated_dot(x, w, None, **use), (x, weight)),
        "gated_dot, bias": (partial(ops.gated_dot, **use), (x, weight, SHAPE((wide,), f32))),
        "grouped": (
            partial(ops.grouped, **use),
            (
                SHAPE((6, rows, wide // 2), dtype),
                SHAPE((4, wide // 2, wide), dtype),
                SHAPE((4, wide // 2, wide // 2), dtype),
                SHAPE((6,), jnp.int32),
                SHAPE((), jnp.int32),
            ),
        ),
    }


def _rows(numerics: Numerics, rows: int):
    """Norms, the rotation, and what is done along the vocabulary."""
    ops, f32 = kernels.family(numerics), jnp.float32
    use = {"numerics": numerics}
    heads = kernels.Heads(4, 2, 128)
    y, angle = SHAPE((rows, 8 * 128), f32), SHAPE((rows, 64), f32)
    one, logits = SHAPE((rows,), f32), SHAPE((rows, 5000), f32)
    extras = {name: SHAPE((128,), f32) for name in ("q_norm", "k_norm")}
    extras["bias"] = SHAPE((8 * 128,), f32)
    project = partial(ops.project, heads=heads, eps=1e-6, **use)
    return {
        "norm": (
            partial(ops.norm, eps=1e-6, **use),
            (SHAPE((rows, 1024), numerics.dtype), SHAPE((1024,), f32)),
        ),
        "project": (project, (y, angle, angle, extras)),
        "project, bare": (project, (y, angle, angle, {})),
        "exponentials": (partial(ops.exponentials, **use), (logits, one)),
        "row_sum": (partial(ops.row_sum, **use), (logits,)),
        "log": (partial(ops.log, **use), (one,)),
        "log_normaliser": (lambda x, p: ops.log_normaliser(x, p, x, **use), (logits, one)),
    }


@dataclass(frozen=True)
class _Attention:
    """Shapes of attention's arguments."""

    numerics: Numerics
    rows: int
    heads: int = 8
    key: int = 128  # size of a query and a key
    value: int = 128

    @property
    def queries(self):
        """Queries [B, Kv, N, D] and their positions."""
        count, rows = 1 + self.rows // 30, 2 * self.rows
        query = SHAPE((count, self.heads, rows, self.key), self.numerics.dtype)
        return query, SHAPE((count, rows), jnp.int32)

    @property
    def caches(self):
        """Keys and values in rows."""
        count, length, dtype = 1 + self.rows // 30, 60 + 2 * self.rows, self.numerics.dtype
        key = SHAPE((count, self.heads, self.key, length), dtype)
        return key, SHAPE((count, self.heads, length, self.value), dtype)

    @property
    def paged(self):
        """Keys and values in pages, and the pages of rows."""
        block, dtype = self.numerics.kv_block, self.numerics.dtype
        key = SHAPE((20, self.heads, self.key, block), dtype)
        value = SHAPE((20, self.heads, block, self.value), dtype)
        blocks = -(-self.caches[0].shape[3] // block)
        return (key, value), SHAPE((self.caches[0].shape[0], blocks), jnp.int32)

    def __call__(self, query, key, value, positions, *, aligned=False, **options):
        ops = kernels.family(self.numerics)
        options["numerics"] = self.numerics
        return ops.attention(query, key, value, positions, aligned=aligned, **options)

    def gradient(self, query, key, value, positions, *, cotangent, **options):
        """Of queries, keys and values."""

        def attend(query, key, value):
            return self(query, key, value, positions, aligned=True, **options)

        return jax.vjp(attend, query, key, value)[1](cotangent)


def _attention(sizes: _Attention, words: tuple[str, ...], variants):
    """The variants, which are named by `words` and by their own."""
    programs = {}
    for variant in variants:
        (query, positions), caches, options = sizes.queries, sizes.caches, {}
        if "pages" in variant:
            caches, options["pages"] = sizes.paged
        if "window" in variant:
            options["window"] = SHAPE((), jnp.int32)
        if "gradient" in variant:
            shape = (*query.shape[:3], sizes.value)
            options["cotangent"] = SHAPE(shape, sizes.numerics.dtype)
        call = sizes.gradient if "gradient" in variant else sizes
        name = ", ".join(filter(None, ["attention", " and ".join((*words, *variant))]))
        names = tuple(options)
        programs[name] = (
            lambda *args, call=call, names=names: call(
                *args[:4], **dict(zip(names, args[4:], strict=True))
            ),
            (query, *caches, positions, *options.values()),
        )
    return programs


def products_in_float32(numerics: Numerics):
    """Name -> (function, shapes) of products in float32 beside those of these numerics."""
    head = replace(numerics, precision=Precision(head="float32")).of_head
    shapes = SHAPE((64, 2048), head.dtype), SHAPE((2048, 151936), head.dtype)
    others = operations(mismatch.compute("float32").numerics(numerics))
    return {
        "a head in float32": (partial(kernels.family(head).dot, numerics=head), shapes),
        **{f"float32 {name}": others[name] for name in ("gated_dot", "grouped")},
    }


def flash(numerics: Numerics, rows: int = 300):
    """The function and the shapes of the dial's `pallas_attention`."""
    sizes = _Attention(replace(numerics, attention="flash"), rows)
    attend = partial(kernels.attention, numerics=sizes.numerics, aligned=False)
    (query, positions), caches = sizes.queries, sizes.caches
    return attend, (query, *caches, positions)


def _writes(sizes: _Attention):
    """Of the cache, where a kernel does it."""
    if sizes.numerics.cache_write != "kernel":
        return {}
    count = sizes.caches[0].shape[0]
    row = SHAPE((count, 1, sizes.heads, sizes.key), sizes.numerics.dtype)
    at = SHAPE((count, 1), jnp.int32)
    paged, pages = sizes.paged

    def write(caches, rows, at, pages=None):
        return kernels.written(caches, rows, at, pages=pages, numerics=sizes.numerics)

    return {
        "cache_write": (write, (sizes.caches, (row, row), at)),
        "cache_write, pages": (write, (paged, (row, row), at, pages)),
        **_projections(sizes),
    }


def _projections(sizes: _Attention):
    """Into the cache, where one kernel does it."""
    numerics, size = sizes.numerics, sizes.key
    if not kernels.projects_into_cache(numerics):
        return {}
    heads, f32 = kernels.Heads(2 * sizes.heads, sizes.heads, size), jnp.float32
    count, (paged, pages) = sizes.caches[0].shape[0], sizes.paged
    y, angle = SHAPE((count, 4 * sizes.heads * size), f32), SHAPE((count, size // 2), f32)
    extras = {name: SHAPE((size,), f32) for name in ("q_norm", "k_norm")}
    given = y, angle, angle, {"bias": SHAPE(y.shape[1:], f32), **extras}
    at = SHAPE((count, 1), jnp.int32)
    project = partial(kernels.project_into, heads=heads, eps=1e-6, numerics=numerics)
    return {
        "project into": (
            lambda *args: project(*args[:2], None, *args[2:]),
            (sizes.caches, at, *given),
        ),
        "project into, pages": (project, (paged, at, pages, *given)),
    }


def programs(numerics: Numerics, *, config: ModelConfig = CONFIG, batch: int = 3):
    """Name -> (function, shapes) of a whole sampler and of a learner's gradient."""

    def shape(*of) -> Any:  # in the place of an array
        return SHAPE(*of)

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
