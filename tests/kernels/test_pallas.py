"""The Pallas kernels in interpret mode: against float64, and against themselves, bit by bit."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from interpreted import (
    CONFIG,
    ERROR,
    GPU,
    TPU,
    bits,
    f64,
    near,
    normal,
    refused,
    rows_alone,
    shapes,
    with_dtype,
)

from tim_jax import kernels
from tim_jax.common.errors import InputError
from tim_jax.instruments import auditing
from tim_jax.kernels import experts, pallas, pallas_gpu, pallas_tpu
from tim_jax.kernels.families import NATIVE
from tim_jax.kernels.pallas_attention import block_of_step
from tim_jax.model import fitting
from tim_jax.model.config_file import from_hf
from tim_jax.model.hf import PUBLISHED
from tim_jax.numerics import (
    GPU_EXACT_BF16,
    GPU_EXACT_F16,
    GPU_EXACT_F32,
    TPU_EXACT_BF16,
    TPU_EXACT_F32,
    GpuTiles,
    MatmulTile,
    Numerics,
    TpuTiles,
)

FAMILIES = pytest.mark.parametrize("family", [GPU, TPU], ids=["gpu", "tpu"])
EACH = pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *quick.pairs({"gpu": GPU, "tpu": TPU}, ["float32", "bfloat16"]),
        pytest.param(GPU, "float16", id="gpu-float16", marks=pytest.mark.slow),
    ],
)
# Large programs: each family once, each dtype once. What a GPU has in bfloat16 alone are several
# tiles of products, which have tests of their own.
FEW = [
    pytest.param(GPU, "float32", id="gpu-float32"),
    pytest.param(TPU, "bfloat16", id="tpu-bfloat16"),
    pytest.param(GPU, "float16", id="gpu-float16", marks=pytest.mark.slow),
]
EACH_OF_FEW = pytest.mark.parametrize(("family", "dtype"), FEW)
HEADS = kernels.Heads(query=4, key=2, size=16)
ROWS = 21


@cache
def jitted(numerics, name, **options):
    return jax.jit(partial(getattr(kernels.family(numerics), name), numerics=numerics, **options))


# --- products --------------------------------------------------------------------------------


def operands(numerics, family_is_gpu):
    """x, weight, residual and bias: two steps of the contraction, two tiles of columns."""
    size, width = (48, 32) if family_is_gpu else (256, 256)
    x = normal(0, ROWS, size, dtype=numerics.dtype)
    weight = (normal(1, size, width) * size**-0.5).astype(numerics.dtype)
    return x, weight, normal(2, ROWS, width, dtype=numerics.dtype), normal(3, width)


@EACH
def test_dot_is_the_product_and_rows_stand_alone(family, dtype):
    numerics = with_dtype(family, dtype)
    x, weight, _, _ = operands(numerics, family is GPU)
    run = jitted(numerics, "dot")
    near(rows_alone(lambda x: run(x, weight), x), f64(x) @ f64(weight), "float32")


@EACH
def test_dot_add_is_the_residual_sum(family, dtype):
    numerics = with_dtype(family, dtype)
    x, weight, residual, bias = operands(numerics, family is GPU)
    found = jitted(numerics, "dot_add")(x, weight, residual, bias)
    near(found, f64(residual) + f64(x) @ f64(weight) + f64(bias), dtype)
    run = jitted(numerics, "dot_add")
    rows_alone(lambda x, r: run(x, weight, r, None), x, residual)


@EACH
def test_gated_dot_is_silu_of_the_gate_times_up(family, dtype):
    numerics = with_dtype(family, dtype)
    x, weight, _, bias = operands(numerics, family is GPU)
    gate, up = np.split(f64(x) @ f64(weight) + f64(bias), 2, axis=1)
    run = jitted(numerics, "gated_dot")
    near(run(x, weight, bias), gate / (1 + np.exp(-gate)) * up, dtype)
    rows_alone(lambda x: run(x, weight, None), x)


def in_tiles(parts):
    """Columns [.., M] of several parts as two column tiles beside each other, [2, .., M / 2]."""
    tiles = [jnp.split(part, 2, axis=-1) for part in parts]
    return jnp.stack([jnp.concatenate(tile, axis=-1) for tile in zip(*tiles, strict=True)])


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*FEW[:2], pytest.param(GPU, "bfloat16", id="gpu-bfloat16", marks=pytest.mark.slow)],
)
def test_column_tiles_have_the_bits_of_whole_matrices(family, dtype):
    whole = with_dtype(family, dtype)
    tiled = replace(whole, column_tiles=2)
    x, gate, residual, _ = operands(whole, family is GPU)
    up = (normal(4, *gate.shape) * len(gate) ** -0.5).astype(whole.dtype)
    biases = normal(5, gate.shape[1]), normal(6, gate.shape[1])
    one, two = gate, in_tiles([gate])
    assert bits(jitted(tiled, "dot")(x, two)) == bits(jitted(whole, "dot")(x, one))
    for bias in (None, biases[0]):
        found = jitted(tiled, "dot_add")(x, two, residual, bias)
        assert bits(found) == bits(jitted(whole, "dot_add")(x, one, residual, bias))
    one, two = jnp.concatenate([gate, up], axis=1), in_tiles([gate, up])
    for bias in (None, jnp.concatenate(biases)):
        columns = None if bias is None else in_tiles(biases)
        found = jitted(tiled, "gated_dot")(x, two, columns)
        assert bits(found) == bits(jitted(whole, "gated_dot")(x, one, bias))


def test_gpu_tiles_change_with_the_row_count_and_the_bits_do_not():
    """16 rows take the first of the tiles, 21 the second."""
    numerics = with_dtype(GPU, "bfloat16")
    x, weight, _, _ = operands(numerics, True)
    assert GPU.gpu.tile(16, weight.shape[1]) != GPU.gpu.tile(ROWS, weight.shape[1])
    run = jitted(numerics, "dot")
    assert bits(run(x, weight)[:16]) == bits(run(x[:16], weight))


def test_the_last_group_of_row_tiles_need_not_be_full():
    """19 tiles of rows in two groups of 10."""
    x, (_, weight, residual, _) = normal(8, 293, 48), operands(GPU, True)
    residual = jnp.tile(residual, (14, 1))[:293]
    whole = jitted(GPU, "dot_add")(x, weight, residual, None)
    near(whole, f64(residual) + f64(x) @ f64(weight), "float32")
    last = jitted(GPU, "dot_add")(x[-7:], weight, residual[-7:], None)
    assert bits(last) == bits(whole[-7:])


def test_few_rows_may_have_a_tile_of_their_own_on_a_tpu_and_the_bits_are_the_same():
    numerics = replace(TPU, tpu=replace(TPU.tpu, rows=32, few_rows=16))
    x, weight, residual, bias = operands(TPU, False)
    for name, *others in (("dot",), ("dot_add", residual, bias)):
        run = jitted(numerics, name)
        extras = [part if part.ndim == 1 else part[:16] for part in others]
        assert bits(run(x, weight, *others)[:16]) == bits(run(x[:16], weight, *extras))


@FAMILIES
def test_experts_are_products_of_tiles_of_the_family(family):
    size = 128 if family is TPU else 32
    x, gate_up, down = normal(1, ROWS, size), normal(2, 3, size, 2 * size), normal(3, 3, size, size)
    chosen = jnp.asarray(np.random.default_rng(0).permuted(np.tile([0, 1, 2], (ROWS, 1)), axis=1))
    ops = kernels.family(family)
    run = jax.jit(partial(experts.outputs, ops=ops, numerics=family))
    found = rows_alone(lambda x, chosen: run(x, gate_up, down, chosen), x, chosen[:, :2])
    for index in (0, 1):
        own = np.asarray(chosen)[:, index]
        gate, up = np.split(np.einsum("nd,ndm->nm", f64(x), f64(gate_up)[own]), 2, axis=1)
        exact = np.einsum("nm,nmd->nd", gate / (1 + np.exp(-gate)) * up, f64(down)[own])
        near(found[:, index], exact, "float32", {"float32": 1e-5})


@EACH_OF_FEW
def test_grouped_products_have_the_bits_of_each_tile_alone(family, dtype):
    """Experts with no tile, one and many, rows that fill up no block, and tiles that are not used,
    whose rows nothing may read."""
    numerics = with_dtype(family, dtype)
    size, rows, width = (48, 21, 32) if family is GPU else (256, 21, 128)
    x = normal(1, 6, rows, size).at[5].set(jnp.nan).astype(numerics.dtype)
    gate_up = (normal(2, 4, size, 2 * width) * size**-0.5).astype(numerics.dtype)
    down = (normal(3, 4, width, size) * width**-0.5).astype(numerics.dtype)
    ops, run = kernels.family(numerics), jitted(numerics, "grouped")

    @jax.jit
    def alone(tile, gate_up, down):
        hidden = ops.gated_dot(tile, gate_up, None, numerics=numerics)
        return ops.dot(hidden, down, numerics=numerics)

    for experts_, used in (([0, 2, 2, 2, 3, 3], 5), ([1] * 6, 5), ([3, 0, 0, 0, 0, 0], 1)):
        filled = jnp.where(jnp.arange(6) < used, rows, 0)
        found = run(x, gate_up, down, jnp.asarray(experts_), filled)
        assert (found.shape, found.dtype) == ((6, rows, size), jnp.float32)
        for tile, expert in enumerate(experts_[:used]):
            assert bits(found[tile]) == bits(alone(x[tile], gate_up[expert], down[expert]))


@FAMILIES
def test_experts_are_two_kernels_for_all_tiles_and_no_array_of_all_pairs(family):
    rows, count, size = 512, 64, 128
    x, chosen = jnp.zeros((rows, size)), jnp.zeros((rows, 2), jnp.int32)
    gate_up, down = jnp.zeros((count, size, 2 * size)), jnp.zeros((count, size, size))
    run = partial(experts.outputs, ops=kernels.family(family), numerics=family)
    jaxpr = jax.make_jaxpr(run)(x, gate_up, down, chosen)
    found = set(shapes(jaxpr.jaxpr)) - {gate_up.shape, down.shape}
    assert (rows, 2, size) in found
    assert max(np.prod(shape) for shape in found) < rows * count * size / 4
    assert str(jaxpr).count("pallas_call[") == 2


@pytest.mark.parametrize("numerics", [GPU_EXACT_BF16, TPU_EXACT_BF16], ids=["gpu", "tpu"])
def test_the_published_mixture_of_experts_has_kernels(numerics):
    config = from_hf(PUBLISHED["Qwen/Qwen3-30B-A3B"])
    numerics = fitting.fitted(config, replace(numerics, interpret=True))
    fitting.check(config, numerics)
    names = {"dot", "dot_add", "grouped_dot", "grouped_gated_dot"}
    assert names <= set(fitting.kernels_used(config, numerics))
    seven = replace(config, num_experts=7, num_experts_per_tok=3)
    if numerics.family == "pallas_tpu":  # the last block of columns may be a part of one
        fitting.check(seven, numerics)
        return
    with pytest.raises(InputError, match="columns of the router to be a multiple of 16, got 7"):
        fitting.check(seven, numerics)


# --- row functions ---------------------------------------------------------------------------


@EACH
def test_norm_is_rms_norm(family, dtype):
    numerics = with_dtype(family, dtype)
    x, weight = normal(0, ROWS, 48, dtype=numerics.dtype), normal(1, 48)
    run = jitted(numerics, "norm", eps=1e-6)
    found = rows_alone(lambda x: run(x, weight), x)
    exact = f64(x) / np.sqrt((f64(x) ** 2).mean(-1, keepdims=True) + 1e-6) * f64(weight)
    near(found, exact, dtype)


def project_inputs():
    size = HEADS.size
    y = normal(0, ROWS, (HEADS.query + 2 * HEADS.key) * size)
    angle = np.random.default_rng(1).uniform(0, 6, (ROWS, size // 2))
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    optional = {"bias": normal(2, y.shape[1]), "q_norm": normal(3, size), "k_norm": normal(4, size)}
    return y, cos, sin, optional


def reference_head(part, cos, sin, weight, scale):
    """One head [N, D] in float64: normed if there is a weight, rotated, scaled."""
    if weight is not None:
        part = part / np.sqrt((part**2).mean(-1, keepdims=True) + 1e-6) * weight
    first, second = np.split(part, 2, axis=1)
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
    return turned * scale


@pytest.mark.parametrize(
    ("kind", "family"),
    quick.pairs(
        {
            "float32": ("float32", True),
            "bfloat16": ("bfloat16", True),
            "float32-plain": ("float32", False),
        },
        {"gpu": GPU, "tpu": TPU},
    ),
)
def test_project_norms_rotates_and_scales(kind, family):
    dtype, extras = kind
    numerics = with_dtype(family, dtype)
    y, cos, sin, optional = project_inputs()
    optional = optional if extras else {}
    run = jitted(numerics, "project", heads=HEADS, eps=1e-6)
    query, key, value = run(y, cos, sin, optional)
    parts = f64(y) + (f64(optional["bias"]) if extras else 0)
    parts = parts.reshape(ROWS, -1, HEADS.size)
    weights = [f64(optional[name]) if extras else None for name in ("q_norm", "k_norm")]
    for head in range(HEADS.query):
        args = parts[:, head], f64(cos), f64(sin), weights[0], HEADS.size**-0.5
        near(query[:, head], reference_head(*args), dtype)
    for head in range(HEADS.key):
        args = parts[:, HEADS.query + head], f64(cos), f64(sin), weights[1], 1.0
        near(key[:, head], reference_head(*args), dtype)
    near(value, parts[:, HEADS.query + HEADS.key :], dtype)
    for index in range(3):
        rows_alone(lambda *rows, i=index: run(*rows, optional)[i], y, cos, sin)


@EACH_OF_FEW
def test_project_takes_what_column_tiles_make(family, dtype):
    whole = with_dtype(family, dtype)
    y, cos, sin, optional = project_inputs()
    ends = np.cumsum([HEADS.query, HEADS.key]) * HEADS.size
    columns = jnp.concatenate(list(in_tiles(jnp.split(y, ends, axis=1))), axis=1)
    biases = in_tiles(jnp.split(optional["bias"].reshape(-1), ends))
    options = {"heads": HEADS, "eps": 1e-6}
    tiled = jitted(replace(whole, column_tiles=2), "project", **options)
    found = tiled(columns, cos, sin, optional | {"bias": biases})
    expected = jitted(whole, "project", **options)(y, cos, sin, optional)
    assert list(map(bits, found)) == list(map(bits, expected))


@pytest.mark.parametrize(
    ("pages", "dtype"), quick.pairs({"rows": False, "pages": True}, ["float32", "bfloat16"])
)
def test_a_projection_into_the_cache_is_one_that_is_then_written(pages, dtype):
    """Of several tokens of a sequence; the last rows of a tile are missing."""
    numerics = with_dtype(GPU, dtype)
    size, block, tokens = HEADS.size, numerics.kv_block, 2
    y, cos, sin, optional = project_inputs()
    batch = ROWS // tokens
    y, cos, sin = (x[: batch * tokens] for x in (y, cos, sin))
    positions = jnp.arange(batch)[:, None] * 3 % (2 * block - 1) + jnp.arange(tokens)[None]
    table = None
    if pages:
        table = jnp.asarray(np.random.default_rng(7).permutation(2 * batch).reshape(batch, 2))
    count, span = (2 * batch, block) if pages else (batch, 2 * block)
    shapes = (count, HEADS.key, size, span), (count, HEADS.key, span, size)
    caches = tuple(normal(8, *shape, dtype=numerics.dtype) for shape in shapes)
    options = {"heads": HEADS, "eps": 1e-6, "numerics": numerics}
    given = y, cos, sin, optional
    found = jax.jit(partial(kernels.project_into, **options))(caches, positions, table, *given)
    query, *rows = jax.jit(partial(kernels.family(numerics).project, **options))(*given)
    rows = tuple(x.reshape(batch, tokens, HEADS.key, size) for x in rows)
    write = jax.jit(partial(kernels.written, numerics=numerics))
    expected = query, *write(caches, rows, positions, pages=table)
    assert list(map(bits, found)) == list(map(bits, expected))


# --- attention -------------------------------------------------------------------------------


def attention_inputs(numerics, length) -> tuple[Any, ...]:
    """Query, key, value and positions, of NumPy where the library's types name JAX's arrays."""
    batch, heads, group, size = 2, 2, 2, 16
    query = normal(0, batch, heads, length * group, size) * size**-0.5
    key, value = normal(1, batch, heads, size, length), normal(2, batch, heads, length, size)
    at = jnp.repeat(jnp.broadcast_to(jnp.arange(length)[None], (batch, length)), group, axis=1)
    # On the host, where slicing compiles nothing.
    return *(np.asarray(x.astype(numerics.dtype)) for x in (query, key, value)), np.asarray(at)


def reference_attention(query, key, value, at, window=None):
    scores = np.einsum("bkmd,bkds->bkms", f64(query), f64(key))
    ages = np.asarray(at)[:, :, None] - np.arange(key.shape[3])[None, None, :]
    hidden = (ages < 0) | (ages >= (key.shape[3] if window is None else window))
    scores = np.where(hidden[:, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bkms,bksd->bkmd", weights / weights.sum(-1, keepdims=True), f64(value))


@EACH_OF_FEW
def test_attention_is_causal_softmax(family, dtype):
    """And one token at a time, over a longer cache with anything in its unused places, has the bits
    of the whole sequence."""
    numerics = with_dtype(family, dtype)
    length = 37 if family is GPU else 137
    query, key, value, at = attention_inputs(numerics, length)
    run = jitted(numerics, "attention", aligned=False)
    whole = np.asarray(run(query, key, value, at))
    near(whole, reference_attention(query, key, value, at), dtype)
    more = 2 * numerics.kv_block
    junk = np.asarray((100 * normal(9, *key.shape[:3], more)).astype(numerics.dtype))
    longer_key = np.concatenate([key, junk], axis=3)
    longer_value = np.concatenate([value, junk.swapaxes(2, 3)], axis=2)
    for token in (0, 1, 15, 16, length - 1):
        rows = slice(2 * token, 2 * token + 2)
        one = run(query[:, :, rows], longer_key, longer_value, at[:, rows])
        assert bits(one) == bits(whole[:, :, rows])
    assert bits(run(query[1:], key[1:], value[1:], at[1:])) == bits(whole[1:])


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(GPU, "float32", id="gpu-float32"),
        pytest.param(TPU, "float32", id="tpu-float32"),
        pytest.param(GPU, "bfloat16", id="gpu-bfloat16", marks=pytest.mark.slow),
    ],
)
def test_attention_within_a_window_is_causal_softmax(family, dtype):
    """One token at a time, with anything in the places that it does not see, has the bits of the
    whole sequence: also where others of its tile see a block that it does not, and it alone passes
    over. Where all keys are inside, the bits are those of no window."""
    numerics = with_dtype(family, dtype)
    block = numerics.kv_block
    length, window = 3 * block - 11, block // 2 + 3
    query, key, value, at = attention_inputs(numerics, length)
    run = jitted(numerics, "attention", aligned=False)
    whole = np.asarray(run(query, key, value, at, window=np.int32(window)))
    near(whole, reference_attention(query, key, value, at, window), dtype)
    junk = np.asarray((100 * normal(9, *key.shape)).astype(numerics.dtype))
    for token in (0, block + window - 1, length - 1):
        rows, seen = slice(2 * token, 2 * token + 2), np.arange(length) <= token
        seen &= np.arange(length) > token - window
        keys = np.where(seen, key, junk)
        values = np.where(seen[:, None], value, junk.swapaxes(2, 3))
        one = run(query[:, :, rows], keys, values, at[:, rows], window=np.int32(window))
        assert bits(one) == bits(whole[:, :, rows])
    assert bits(run(query[1:], key[1:], value[1:], at[1:], window=np.int32(window))) == bits(
        whole[1:]
    )
    inside = run(query, key, value, at, window=np.int32(length))
    assert bits(inside) == bits(run(query, key, value, at)) != bits(whole)


def reference_gradients(query, key, value, at, window, cotangent):
    """Of attention with respect to its first three arguments, float64."""
    query, key, value, cotangent = map(f64, (query, key, value, cotangent))
    ages = np.asarray(at)[:, None, :, None] - np.arange(key.shape[3])
    visible = (ages >= 0) & (ages < (key.shape[3] if window is None else window))
    scores = np.where(visible, query @ key, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    dweights = cotangent @ value.swapaxes(2, 3)
    dscores = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True))
    dkey = query.swapaxes(2, 3) @ dscores
    return dscores @ key.swapaxes(2, 3), dkey, weights.swapaxes(2, 3) @ cotangent


@pytest.mark.parametrize(
    ("family", "dtype", "window"),
    [
        *(
            pytest.param(*one.values, window, id=f"{one.id}-{window}", marks=marks)
            for one, quickly in zip(FEW[:2], (None, 9), strict=True)
            for window in (None, 9)
            for marks in [() if window == quickly else pytest.mark.slow]
        ),
        pytest.param(GPU, "float16", 9, id="gpu-float16-9", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_attention(family, dtype, window):
    """Of several tiles of rows and blocks of keys, the last of which are not full."""
    numerics = with_dtype(family, dtype)
    query, key, value, at = attention_inputs(numerics, 37 if family is GPU else 150)
    cotangent = normal(7, *query.shape, dtype=numerics.dtype)
    attend = partial(kernels.attention, numerics=numerics, aligned=True)

    def loss(arrays):
        inside: Any = None if window is None else np.int32(window)
        mixed = attend(*arrays, positions=at, window=inside)
        return jnp.sum((mixed * cotangent).astype(jnp.float32))

    found = jax.jit(jax.grad(loss))((query, key, value))
    expected = reference_gradients(query, key, value, at, window, cotangent)
    for one, exact in zip(found, expected, strict=True):
        assert one.dtype == numerics.dtype
        near(one, exact, dtype, {"float32": 2e-6, "bfloat16": 2**-6, "float16": 2**-9})
        assert np.abs(exact).max() > 0


@FAMILIES
def test_gradients_of_attention_with_keys_wider_than_values(family):
    """As in latent attention; and heads of a size that is no power of two, in parts."""
    query, key, value, at = attention_inputs(family, 37)
    query, key = np.concatenate([query] * 3, axis=3), np.concatenate([key] * 3, axis=2)
    cotangent = normal(7, *query.shape[:3], value.shape[3])
    attend = partial(kernels.attention, numerics=family, aligned=True)
    loss = jax.jit(jax.grad(lambda arrays: jnp.sum(attend(*arrays, positions=at) * cotangent)))
    expected = reference_gradients(query, key, value, at, None, cotangent)
    for one, exact in zip(loss((query, key, value)), expected, strict=True):
        near(one, exact, "float32")


@FAMILIES
def test_gradients_of_attention_are_those_of_each_sequence_alone(family):
    """To the bit: no sum is shared among sequences, and what fills up tiles adds nothing."""
    query, key, value, at = attention_inputs(family, 37)
    cotangent = normal(7, *query.shape)

    @jax.jit
    def gradients(arrays, at, cotangent):
        attend = partial(kernels.attention, numerics=family, aligned=True)
        return jax.grad(lambda arrays: jnp.sum(attend(*arrays, positions=at) * cotangent))(arrays)

    whole = gradients((query, key, value), at, cotangent)
    alone = gradients(tuple(x[1:] for x in (query, key, value)), at[1:], cotangent[1:])
    assert [bits(x[1:]) for x in whole] == list(map(bits, alone))


@pytest.mark.parametrize(
    ("family", "kind"),
    quick.pairs(
        {"gpu": GPU, "tpu": TPU},
        {"float32": ("float32", False), "bfloat16-windowed": ("bfloat16", True)},
    ),
)
def test_attention_reads_pages_in_any_order_to_the_same_bits(family, kind):
    dtype, windowed = kind
    numerics = with_dtype(family, dtype)
    block, count = numerics.kv_block, 3
    query, key, value, at = attention_inputs(numerics, count * block - 5)
    key = np.pad(np.asarray(key), ((0, 0), (0, 0), (0, 0), (0, 5)))
    value = np.pad(np.asarray(value), ((0, 0), (0, 0), (0, 5), (0, 0)))
    window: Any = np.int32(block + 5) if windowed else None
    whole = jitted(numerics, "attention", aligned=False)(query, key, value, at, window=window)
    batch, heads, size = key.shape[:3]
    total = batch * count + 2
    pages = np.random.default_rng(0).permutation(total)[: batch * count].reshape(batch, count)
    shape = (total, heads, size, block)
    key_pages = np.full(shape, 7.0).astype(key.dtype)  # what belongs to nobody
    value_pages = key_pages.swapaxes(2, 3).copy()
    for row, numbers in enumerate(pages):
        for index, page in enumerate(numbers):
            positions = slice(index * block, (index + 1) * block)
            key_pages[page], value_pages[page] = key[row, :, :, positions], value[row, :, positions]
    attention = partial(kernels.attention, numerics=numerics, aligned=False, window=window)
    run = jax.jit(lambda *args, pages: attention(*args, pages=pages))
    paged = run(query, key_pages, value_pages, at, pages=jnp.asarray(pages, jnp.int32))
    assert bits(paged) == bits(whole)


@pytest.mark.slow
def test_heads_and_blocks_of_a_step_on_a_tpu_decide_no_bit():
    """Also where the last step is not full, and where a step has blocks before the first seen."""
    block = TPU.kv_block
    query, key, value, at = attention_inputs(TPU, 5 * block - 11)
    cotangent = normal(7, *query.shape)

    def found(window, **tiles):
        numerics = replace(TPU, tpu=replace(TPU.tpu, **tiles))
        attend = partial(kernels.attention, numerics=numerics, aligned=True, window=window)

        @jax.jit
        def run(*arrays):
            mixed, backward = jax.vjp(lambda *arrays: attend(*arrays, positions=at), *arrays)
            return mixed, *backward(cotangent)

        return list(map(bits, run(query, key, value)))

    for window in (None, np.int32(block + 9)):
        one = found(window, heads=1, attention_blocks=1, gradient_heads=1)
        assert found(window, heads=2, attention_blocks=2, gradient_heads=2) == one
        assert found(window, heads=1, attention_blocks=4, gradient_heads=8) == one


@pytest.mark.parametrize("taken", [1, 2, 4, 8])
def test_a_step_of_attention_on_a_tpu_copies_each_block_that_is_seen_once(taken):
    """It has them at their places, and a place keeps the block that it has where it needs none."""
    most_blocks = 11
    blocks = np.arange(most_blocks)
    steps, places = np.arange(-(-most_blocks // taken)), np.arange(taken)
    grid: Any = np.meshgrid(steps, places, blocks, blocks, indexing="ij")
    step, place, least, most = grid
    found = np.asarray(block_of_step(step, place, taken, least, most))
    own, some = step * taken + place, least <= most
    seen = (least <= own) & (own <= most)
    assert (found == own)[seen].all()
    assert ((least <= found) & (found <= most) | (found == -1))[some].all()
    copies = 1 + (np.diff(found, axis=0) != 0).sum(axis=0)
    nothing = (found == -1).all(axis=0)  # and so in one place alike in every row
    assert (np.where(nothing, 0, copies) == seen.sum(axis=0))[some[0]].all()


# --- the head --------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "width"), quick.pairs({"gpu": GPU, "tpu": TPU}, [300, 23]))
def test_sums_over_the_vocabulary(family, width):
    """300 elements are several blocks, the last one cut; 23 are less than one."""
    x = 5 * normal(0, ROWS, width)
    peak = jnp.max(x, axis=1)
    exact = np.exp(f64(x) - f64(peak)[:, None])
    weights = rows_alone(jitted(family, "exponentials"), x, peak)
    near(weights, exact, "float32")
    near(rows_alone(jitted(family, "row_sum"), weights), exact.sum(-1), "float32")
    run = jitted(family, "log_normaliser")
    near(rows_alone(lambda x, p: run(x, p, x), x, peak), np.log(exact.sum(-1)), "float32")
    shifted = weights[:, 0] + 1
    near(rows_alone(jitted(family, "log"), shifted), np.log(f64(shifted)), "float32")


# --- gradients -------------------------------------------------------------------------------


@EACH_OF_FEW
def test_gradients_are_those_of_the_plain_expressions(family, dtype):
    """Which are held to float64 elsewhere: a chain of a norm, both products and a rotation."""
    numerics = with_dtype(family, dtype)
    size = 128
    x = normal(0, 17, size, dtype=numerics.dtype)
    weights = normal(1, size), normal(2, size, 2 * size), normal(3, size, size), normal(4, size)
    cast = [w.astype(numerics.dtype) for w in weights[1:3]]
    arguments = (x, weights[0], cast[0] * 0.1, cast[1] * 0.1, weights[3])

    def loss(ops, x, norm, gate_up, down, bias):
        hidden = ops.gated_dot(
            ops.norm(x, norm, eps=1e-6, numerics=numerics), gate_up, None, numerics=numerics
        )
        y = ops.dot_add(hidden, down, x, bias, numerics=numerics)
        return jnp.sum(jnp.sin(ops.dot(y, down, numerics=numerics)))

    ours, plain = (
        jax.jit(jax.grad(partial(loss, ops), argnums=(0, 1, 2, 3, 4)))(*arguments)
        for ops in (kernels.family(numerics), NATIVE)
    )
    # Both sides round to 16 bits: where one goes the other way, by its unit, 2^-7 or 2^-10.
    error = {**ERROR, "bfloat16": 2**-6, "float16": 2**-9}
    for found, expected in zip(ours, plain, strict=True):
        near(found, f64(expected), dtype, error)
        assert np.abs(f64(found)).max() > 0


@FAMILIES
def test_gradients_of_column_tiles_are_those_of_the_whole(family):
    tiled, size = replace(family, column_tiles=2), 256
    x, gate, up, down = normal(0, 17, size), *(normal(i, size, size) / 16 for i in (1, 2, 3))
    residual, bias = normal(4, 17, size), normal(5, size)

    def loss(numerics, x, gate_up, down, residual, bias):
        ops = kernels.family(numerics)
        hidden = ops.gated_dot(x, gate_up, None, numerics=numerics)
        y = ops.dot_add(hidden, down, residual, bias, numerics=numerics)
        return jnp.sum(jnp.sin(ops.dot(y, down, numerics=numerics)))

    def gradients(numerics, *arguments):
        return jax.jit(jax.grad(partial(loss, numerics), argnums=tuple(range(5))))(*arguments)

    whole = gradients(family, x, jnp.concatenate([gate, up], axis=1), down, residual, bias)
    found = gradients(tiled, x, in_tiles([gate, up]), in_tiles([down]), residual, bias)
    of_whole = (whole[0], in_tiles(jnp.split(whole[1], 2, axis=1)), in_tiles([whole[2]]))
    for one, expected in zip(found, (*of_whole, *whole[3:]), strict=True):
        near(one, f64(expected), "float32", {"float32": 1e-5})
        assert np.abs(f64(one)).max() > 0


# --- refusals and records --------------------------------------------------------------------


def test_the_wrong_device_is_refused_by_name():
    for numerics, device in ((GPU_EXACT_F32, "GPU"), (TPU_EXACT_F32, "TPU")):
        refused(CONFIG, numerics, f"needs a {device}.*'cpu'.*tiles")
        with pytest.raises(InputError, match=f"needs a {device}"):
            next(auditing.audit({}, CONFIG, numerics=(numerics,), sizes=auditing.Sizes(1, 1, 1, 1)))
        ops = kernels.family(numerics)
        with pytest.raises(InputError, match=f"needs a {device}"):
            ops.dot(jnp.ones((4, 1024)), jnp.ones((1024, 1024)), numerics=numerics)


def test_what_a_kernel_cannot_take_is_refused_by_name():
    refused(replace(CONFIG, head_dim=20), GPU, "heads of 20.*16, 32, 64, 128, 256")
    refused(replace(CONFIG, head_dim=20), TPU, "heads of 20.*multiples of 16")
    refused(CONFIG, replace(GPU, kv_block=8), "kv_block of at least 16, got 8")
    refused(CONFIG, replace(TPU, kv_block=64), "kv_block of at least 128, got 64")
    refused(replace(CONFIG, vocab_size=23), GPU, "vocabulary.* multiple of 16, got 23.*tiles")
    refused(CONFIG, TPU, "rows of the query, key and .* multiple of 128, got 32.*tiles")
    gated = replace(CONFIG, hidden_size=128, num_heads=8, intermediate_size=192)
    refused(gated, TPU, "columns of each part of the gate and up .* multiple of 128, got 192")


def test_a_step_of_attention_on_a_tpu_has_fewer_wide_heads():
    """As many of 256 would not fit into vector memory; tests/tpu_compile.py compiles them."""
    narrow, wide = (
        fitting.fitted(replace(CONFIG, head_dim=size), TPU_EXACT_BF16).tpu for size in (128, 256)
    )
    assert (narrow.heads, narrow.attention_blocks, narrow.gradient_heads) == (8, 4, 4)
    assert (wide.heads, wide.attention_blocks, wide.gradient_heads) == (4, 2, 1)


@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [
        (5, 2048, (64, 32)),
        (5, 151_936, (64, 128)),
        (64, 4096, (64, 32)),
        (64, 151_936, (64, 128)),
        (1024, 151_936, (256, 128)),
        (16_384, 2048, (128, 256)),
    ],
)
def test_a_product_takes_the_widest_tile_that_leaves_enough_programs(rows, columns, tile):
    """And of few rows none taller than the narrowest. In other dtypes there is one."""
    tiles = GPU_EXACT_BF16.gpu
    found = tiles.tile(rows, columns)
    assert (found.rows, found.columns) == tile
    assert tiles.tile(rows, columns, parts=2).columns >= 64
    assert tiles.tile(rows, columns, jnp.dtype("float32")) == MatmulTile()
    (one,) = GPU_EXACT_F16.gpu.matmul
    assert GPU_EXACT_F16.gpu.tile(rows, columns, jnp.dtype("float16")) == one


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GpuTiles(block_k=48), "block_k must be a power of two, at least 16, got 48"),
        (lambda: GpuTiles(block_k=8), "at least 16, got 8"),
        (lambda: GpuTiles(matmul=()), "one tile or several of rising size, got tiles of none"),
        (lambda: GpuTiles(matmul=(MatmulTile(), MatmulTile())), "got tiles of 4096, 4096 elem"),
        (lambda: GpuTiles(programs=0), "programs must be at least 1, got 0"),
        (lambda: MatmulTile(rows=40), "rows must be a power of two, at least 1, got 40"),
        (lambda: TpuTiles(few_rows=8), "few_rows must be 0 or at least 16, got 8"),
        (lambda: TpuTiles(columns=64), "columns must be at least 128, got 64"),
        (lambda: Numerics(interpret=True), "interpret is for the Pallas families"),
        (
            lambda: Numerics(family="palas_gpu"),  # pyright: ignore[reportArgumentType]
            "did you mean 'pallas_gpu'",
        ),
        (lambda: Numerics(kv_block=1), "kv_block must be a power of two, at least 2, got 1"),
    ],
)
def test_impossible_tiles_are_refused(build, message):
    with pytest.raises(InputError, match=message):
        build()


@pytest.mark.parametrize(
    ("blocks", "weight", "found"),
    [
        (lambda w: pallas_gpu.blocks(w, 1, 128, GPU_EXACT_BF16), (4096, 151_936), (128, 64)),
        (lambda w: pallas_gpu.blocks(w, 2, 128, GPU_EXACT_BF16), (4096, 2 * 768), (64, 64)),
        (lambda w: pallas_gpu.blocks(w, 1, 128, GPU_EXACT_BF16), (48, 576), (64, 16)),
        (lambda w: pallas_tpu.blocks(w, 1, TPU_EXACT_BF16), (4096, 151_936), (1024, 1024)),
        (lambda w: pallas_tpu.blocks(w, 2, TPU_EXACT_BF16), (3584, 2 * 768), (256, 512)),
        (lambda w: pallas_tpu.blocks(w, 1, TPU_EXACT_BF16), (2048, 640), (640, 1024)),
    ],
)
def test_blocks_are_the_largest_that_a_weight_has(blocks, weight, found):
    """Each weight by itself, up to the sizes in the numerics."""
    assert blocks(weight) == found


def test_wide_states_get_small_blocks_of_attention_on_a_gpu():
    """Larger ones do not compile: `scripts/aot_gpu.py` shows it."""
    wide = from_hf(PUBLISHED["moonshotai/Moonlight-16B-A3B"])
    for numerics, most in ((GPU_EXACT_BF16, 32), (GPU_EXACT_F32, 16)):
        fitted = fitting.fitted(wide, replace(numerics, interpret=True))
        assert (fitted.kv_block, fitted.gpu.attention_rows) == (most, most)
        assert fitted.gpu.attention_stages == fitted.gpu.gradient_stages == 1
        assert (fitted.gpu.gradient_own, fitted.gpu.gradient_step) == (16, most)
        fitting.check(wide, fitted)
        heads = fitting.fitted(from_hf(PUBLISHED["Qwen/Qwen3-8B"]), numerics)
        assert (heads.kv_block, heads.gpu) == (numerics.kv_block, numerics.gpu)
    heads_of_256 = fitting.fitted(replace(CONFIG, head_dim=256), GPU_EXACT_BF16)
    assert (heads_of_256.kv_block, heads_of_256.gpu.gradient_step) == (64, 32)


@pytest.mark.parametrize("numerics", [GPU_EXACT_BF16, GPU_EXACT_F16, GPU_EXACT_F32])
@pytest.mark.parametrize("size", [128, 256])
def test_kernels_have_fewer_loads_in_flight_on_gpus_with_small_cores(monkeypatch, numerics, size):
    """A core of an H200 has 227 KB of shared memory, one of an RTX 4090 has 99."""
    config = replace(CONFIG, head_dim=size)
    large = fitting.fitted(config, numerics)
    for other in ("9.0", "8.0", "10.0"):
        monkeypatch.setattr(pallas, "compute_capability", lambda found=other: found)
        assert fitting.fitted(config, numerics) == large
    for small in ("8.6", "8.9", "12.0", "12.1"):
        monkeypatch.setattr(pallas, "compute_capability", lambda found=small: found)
        gpu = fitting.fitted(config, numerics).gpu
        for tile in (*gpu.matmul, gpu.experts):
            loaded = 2 * gpu.block_k * (tile.rows + tile.columns)
            assert tile.stages * loaded <= 96 * 2**10
        for name in ("attention_stages", "gradient_stages", "gradient_own"):
            assert getattr(gpu, name) <= getattr(large.gpu, name)
        # What decides bits is as on other GPUs.
        tiles = [tuple((t.rows, t.columns) for t in one.matmul) for one in (gpu, large.gpu)]
        assert tiles[0] == tiles[1]
        assert (gpu.block_k, gpu.attention_rows) == (large.gpu.block_k, large.gpu.attention_rows)


@pytest.mark.parametrize(("capability", "taken"), [("7.5", False), ("8.0", True)])
def test_gpus_that_triton_does_not_compile_for_are_refused(monkeypatch, capability, taken):
    monkeypatch.setattr(pallas, "platform", lambda: "gpu")
    monkeypatch.setattr(pallas, "compute_capability", lambda: capability)
    refusal = pytest.raises(InputError, match=r"capability 8\.0 or more.* has 7\.5; use family")
    with nullcontext() if taken else refusal:
        pallas.check_platform(GPU_EXACT_BF16)


def test_latent_attention_on_gpus_with_small_cores(monkeypatch):
    """Of a state of 512: larger blocks do not compile for them, and in float32 none do."""
    config = from_hf(PUBLISHED["moonshotai/Moonlight-16B-A3B"])
    monkeypatch.setattr(pallas, "platform", lambda: "gpu")
    monkeypatch.setattr(pallas, "compute_capability", lambda: "8.9")
    fitted = fitting.fitted(config, GPU_EXACT_BF16)
    assert (fitted.kv_block, fitted.gpu.attention_rows) == (32, 16)
    assert (fitted.gpu.gradient_own, fitted.gpu.gradient_step) == (16, 16)
    fitting.check(config, fitted)
    message = r"state of 512 numbers in float32 .* capability 8\.9; it takes bfloat16 there"
    refused(config, fitting.fitted(config, GPU_EXACT_F32), message)
    monkeypatch.setattr(pallas, "compute_capability", lambda: "9.0")
    fitting.check(config, fitting.fitted(config, GPU_EXACT_F32))


@pytest.mark.parametrize("family", ["pallas_gpu", "pallas_tpu"])
def test_the_preset_of_whole_tiles_is_taken(family):
    config = auditing.PRESETS["qwen3-blocks"]
    numerics = replace({"pallas_gpu": GPU_EXACT_BF16, "pallas_tpu": TPU}[family], interpret=True)
    fitted = fitting.fitted(config, numerics)
    fitting.check(config, fitted)
    assert fitting.kernels_used(config, fitted)


def test_the_kernels_that_run_are_known_by_name():
    assert fitting.kernels_used(CONFIG, Numerics()) == ()
    names = ("attention", "dot", "dot_add", "exponentials", "gated_dot", "log", "log_normaliser")
    expected = {*names, "norm", "row_sum", "turn"}
    assert set(fitting.kernels_used(CONFIG, GPU)) == expected
    tpu = replace(CONFIG, vocab_size=128, hidden_size=128, head_dim=32, intermediate_size=128)
    assert set(fitting.kernels_used(tpu, TPU)) == expected
