"""Mosaic's products: in interpret mode against float64 and against themselves, and their code.

Interpret mode simulates the warpgroups, the shared memory and the copies of a program.
"""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
from interpreted import CONFIG, GPU, bits, f64, near, normal, refused, rows_alone

from tim_jax import kernels
from tim_jax.app.run import assembly
from tim_jax.common.errors import InputError
from tim_jax.instruments import auditing
from tim_jax.instruments.auditing.cases import plain_sampling
from tim_jax.instruments.plan import comparison, costs
from tim_jax.kernels import pallas, pallas_mosaic_gpu
from tim_jax.model import fitting
from tim_jax.numerics import (
    MOSAIC_GPU_BF16_SEVERAL_TILES,
    MOSAIC_GPU_EXACT_BF16,
    MatmulTile,
    Numerics,
    Precision,
)
from tim_jax.placement import Placement

NEW = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic's kernels need JAX 0.12")
TILE = MatmulTile(64, 64, 4, 2)
SMALL = replace(
    GPU,
    family="pallas_mosaic_gpu",
    compute_dtype="bfloat16",
    gpu=replace(GPU.gpu, block_k=64, matmul=(TILE,), experts=TILE),
)
MODEL = replace(CONFIG, vocab_size=64, hidden_size=64, intermediate_size=64)
ROWS, SIZE, WIDTH = 70, 128, 256  # two tiles of rows, two steps, four tiles of columns


@cache
def jitted(name: str, numerics: Numerics = SMALL):
    return jax.jit(partial(getattr(kernels.family(numerics), name), numerics=numerics))


@pytest.fixture(scope="module")
def operands():
    """Products with few bits, whose float32 sums are exact in any order.

    Interpret mode multiplies with NumPy, in whose BLAS a row's bits may depend on its place: with
    AVX2 alone they do, in 35 rows of 64.
    """
    x = (jnp.round(4 * normal(0, ROWS, SIZE)) / 4).astype(jnp.bfloat16)
    weight = (jnp.round(4 * normal(1, SIZE, WIDTH)) / 32).astype(jnp.bfloat16)
    return x, weight, normal(2, ROWS, WIDTH, dtype=jnp.bfloat16), normal(3, WIDTH)


@NEW
def test_dot_is_the_product_and_rows_stand_alone(operands):
    x, weight, _, _ = operands
    run = jitted("dot")
    near(rows_alone(lambda x: run(x, weight), x), f64(x) @ f64(weight), "float32")


@NEW
@pytest.mark.parametrize("biased", [False, True])
def test_dot_add_is_the_residual_sum(operands, biased):
    x, weight, residual, bias = operands
    bias = bias if biased else None
    found = rows_alone(lambda x, r: jitted("dot_add")(x, weight, r, bias), x, residual)
    exact = f64(x) @ f64(weight) + f64(residual) + (f64(bias) if biased else 0)
    near(found, exact, "bfloat16")


@NEW
@pytest.mark.parametrize("biased", [False, True])
def test_gated_dot_is_the_gated_product(operands, biased):
    x, weight, _, bias = operands
    bias = bias if biased else None
    found = rows_alone(lambda x: jitted("gated_dot")(x, weight, bias), x)
    sums = f64(x) @ f64(weight) + (f64(bias) if biased else 0)
    gate, up = np.split(sums, 2, axis=1)
    near(found, gate / (1 + np.exp(-gate)) * up, "bfloat16")


@NEW
def test_dots_are_the_products_of_each_head():
    x = normal(0, 3, 21, 64, dtype=jnp.bfloat16)
    weight = normal(1, 3, 64, 64, dtype=jnp.bfloat16)
    near(jitted("dots")(x, weight), np.einsum("hnk,hkm->hnm", f64(x), f64(weight)), "float32")


@NEW
def test_tiles_of_one_and_of_two_warpgroups_have_the_same_bits(operands):
    x, weight, _, _ = operands
    wide = replace(SMALL, gpu=replace(SMALL.gpu, matmul=(MatmulTile(128, 128, 8, 3),)))
    assert bits(jitted("dot", wide)(x, weight)) == bits(jitted("dot")(x, weight))


@NEW
def test_products_of_float32_are_not_rounded(operands):
    """Such as a head's: they are Triton's, whose sums are of float32 numbers."""
    x, weight, _, _ = (one.astype(jnp.float32) for one in operands)
    numerics = replace(SMALL, precision=Precision(head="float32")).of_head
    near(jitted("dot", numerics)(x, weight), f64(x) @ f64(weight), "float32")


@NEW
def test_sampler_and_learner_agree_to_the_bit():
    fitting.check(MODEL, SMALL)
    assert {"dot", "dot_add", "gated_dot"} < set(fitting.kernels_used(MODEL, SMALL))
    sizes = auditing.Sizes(2, 1, 5, 4)
    endless = replace(plain_sampling(MODEL, sizes), stop_tokens=())
    cases = (auditing.Case("learner", endless, auditing.Score()),)
    options = {"numerics": (SMALL,), "cases": cases, "sizes": sizes, "control": False}
    (result,) = auditing.audit(auditing.random_params(MODEL, 0), MODEL, **options)
    assert result.passed
    assert result.compared_tokens == 2 * 4


@NEW
def test_interpret_mode_on_several_devices_is_refused():
    """JAX's interpreter keeps one state for all of them, and ends in an error of its own."""
    sizes = auditing.Sizes(2, 1, 5, 4)
    cases = auditing.placed_cases(MODEL, sizes, (Placement(fsdp=2),))
    options = {"numerics": (SMALL,), "cases": cases, "sizes": sizes, "control": False}
    with pytest.raises(InputError, match="is interpreted on one device"):
        list(auditing.audit(auditing.random_params(MODEL, 0), MODEL, **options))


# Lowered for the device.

PRODUCTS = ("dot", "dot_add", "dot_add, bias", "dots", "gated_dot", "gated_dot, bias")


@cache
def lowered(operation: str, rows: int, numerics: Numerics = MOSAIC_GPU_EXACT_BF16) -> str:
    function, shapes = lowering.operations(numerics, rows)[operation]
    return lowering.lower("pallas_gpu", function, shapes).as_text()


@NEW
@pytest.mark.parametrize("operation", PRODUCTS)
def test_a_products_code_is_the_same_for_few_and_many_rows(operation):
    few, many = (comparison.kernel_code(lowered(operation, rows)) for rows in (5, 700))
    assert "wgmma.mma_async" in few
    assert "stable_mosaic_gpu.scf.for" in few
    assert comparison.computes(few)
    assert few == many


@NEW
def test_products_that_differ_have_other_code():
    names = [name for name in PRODUCTS if name != "dots"]  # which are those of `dot`
    assert len({comparison.kernel_code(lowered(name, 70)) for name in names}) == len(names)


@NEW
def test_sampler_and_learner_lower_for_the_device():
    numerics = replace(MOSAIC_GPU_EXACT_BF16, gpu=MOSAIC_GPU_BF16_SEVERAL_TILES)
    for name, (function, shapes) in lowering.programs(
        numerics, config=lowering.one_layer()
    ).items():
        text = lowering.lower("pallas_gpu", function, shapes).as_text()
        assert text.count("mosaic_gpu_v2") > 4, name
        assert text.count("triton") > 4, name


@NEW
def test_a_product_states_its_work():
    gpu = MOSAIC_GPU_EXACT_BF16.gpu
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((200, 256), (256, 384))]
    numerics = replace(MOSAIC_GPU_EXACT_BF16, interpret=True)
    run = jax.jit(partial(kernels.family(numerics).dot, numerics=numerics))
    found = costs.count(run.trace(*shapes).jaxpr)
    (call,) = found.kernels
    (tile,) = gpu.matmul
    assert call.name == "dot"
    assert call.programs == 2 * 3  # tiles of 128 x 128 of [200, 384]
    assert call.flops == 2 * 256 * 256 * 384
    operands = 2 * 6 * 256 * (tile.rows + tile.columns)
    assert call.loaded == operands + 4 * 256 * 384
    assert call.memory == 2 * (256 * 256 + 256 * 384) + 4 * 256 * 384


# What is refused, on every version of JAX.


def test_an_older_jax_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    refused(MODEL, SMALL, r"'pallas_mosaic_gpu' needs JAX 0.12 or newer, here is ")


def test_float32_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12))
    refused(MODEL, replace(SMALL, compute_dtype="float32"), "is for bfloat16, got float32")


def test_another_device_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12))
    refused(MODEL, replace(SMALL, interpret=False), "needs a GPU, the default device is")
    monkeypatch.setattr(pallas, "platform", lambda: "gpu")
    monkeypatch.setattr(pallas_mosaic_gpu, "compute_capability", lambda: "8.0")
    refused(MODEL, replace(SMALL, interpret=False), r"Hopper GPUs .* here is 8.0")


def test_a_matrix_that_is_not_in_whole_blocks_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12))
    refused(replace(MODEL, intermediate_size=96), SMALL, "to be a multiple of 64, got 96")


@pytest.mark.parametrize(
    "tile", [MatmulTile(64, 64, 8, 2), MatmulTile(128, 64, 4, 2), MatmulTile(64, 64, 4, 1)]
)
def test_a_tile_without_64_rows_for_a_warpgroup_is_refused(tile, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12))
    numerics = replace(SMALL, gpu=replace(SMALL.gpu, matmul=(tile,)))
    with pytest.raises(InputError, match="has 64 rows for every 4 warps"):
        kernels.family(numerics).dot(
            jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((64, 64), jnp.bfloat16), numerics=numerics
        )


def test_several_tiles_of_a_run():
    several = assembly.with_several_tiles(MOSAIC_GPU_EXACT_BF16)
    assert several.gpu == MOSAIC_GPU_BF16_SEVERAL_TILES
    assert several.gpu.block_k == MOSAIC_GPU_EXACT_BF16.gpu.block_k
