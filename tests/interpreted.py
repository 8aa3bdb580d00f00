"""The Pallas families in interpret mode, on small tiles; and what is asked of their results."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from tim_jax.common.errors import InputError
from tim_jax.model import fitting
from tim_jax.model.config import ModelConfig
from tim_jax.numerics import GpuTiles, MatmulTile, Numerics, TpuTiles

GPU_TILES = GpuTiles(
    block_k=16,
    matmul=(MatmulTile(16, 16), MatmulTile(32, 16)),
    programs=2,
    experts=MatmulTile(16, 16),
    attention_rows=16,
    gradient_own=32,
    gradient_step=16,
    row_tile=4,
    lanes=32,
)
TPU_TILES = TpuTiles(
    rows=16,
    columns=128,
    block_k=128,
    expert_rows=16,
    attention_rows=16,
    attention_blocks=2,
    heads=2,
    gradient_rows=16,
    gradient_keys=128,
    gradient_heads=2,
    row_tile=16,
    lanes=128,
)
GPU = Numerics(
    family="pallas_gpu",
    kv_block=16,
    head_rows=16,
    gpu=GPU_TILES,
    cache_write="kernel",
    interpret=True,
)
TPU = replace(GPU, family="pallas_tpu", kv_block=128, tpu=TPU_TILES)
CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=48,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_positions=256,
    tied_embeddings=True,
    qk_norm=True,
)
ERROR = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}  # of the largest value


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def f64(x):
    return np.asarray(x).astype(np.float64)


def bits(x):
    return np.asarray(x).tobytes()


def with_dtype(family, dtype):
    """Several tiles of products are there in bfloat16 alone; the others have the narrow one."""
    few = family.gpu.matmul if dtype == "bfloat16" else family.gpu.matmul[:1]
    return replace(family, compute_dtype=dtype, gpu=replace(family.gpu, matmul=few))


def near(found, exact, dtype, error=ERROR):
    np.testing.assert_allclose(f64(found), exact, atol=error[dtype] * np.abs(exact).max(), rtol=0)


def rows_alone(run, *rows):
    """The bits of every row do not depend on the rows beside it, nor on its place."""
    rows = [np.asarray(x) for x in rows]
    whole, count = np.asarray(run(*rows)), len(rows[0])
    assert count > 16
    for part in (slice(0, 1), slice(count - 1, count)):
        assert bits(run(*(x[part] for x in rows))) == bits(whole[part])
    order = np.random.default_rng(0).permutation(count)
    assert bits(run(*(x[order] for x in rows))) == bits(whole[order])
    return whole


def refused(config, numerics, message):
    with pytest.raises(InputError, match=message) as caught:
        fitting.check(config, numerics)
    assert "\n" not in str(caught.value)


def shapes(jaxpr):
    """Shapes of all values in a jaxpr, inner ones included."""
    for equation in jaxpr.eqns:
        yield from (tuple(value.aval.shape) for value in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from shapes(inner)
