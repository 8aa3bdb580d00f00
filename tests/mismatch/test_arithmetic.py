"""Entries of the dial one by one: what they do to arrays."""

import functools
from dataclasses import replace
from functools import partial
from typing import Any, cast

import dials
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quick
import tiny
from hypothesis import given
from hypothesis import strategies as st

from tim_jax import kernels
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.instruments.auditing import PRESETS, random_params
from tim_jax.kernels import cache, formulas, native, variants
from tim_jax.mismatch import Names, dial, transfer
from tim_jax.model.execution import Execution
from tim_jax.numerics import Order, Precision
from tim_jax.rl.programs import sampling_program

FORMATS = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


def recorded(rows=6, length=5, seed=0):
    """A rollout of random log-probs; every other response has ended."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, rows).astype(np.int32)
    inside = np.arange(length)[None, :] < lengths[:, None]
    return Rollout(
        prompts=jnp.zeros((rows, 2), jnp.int32),
        prompt_lengths=jnp.ones(rows, jnp.int32),
        responses=jnp.asarray(np.where(inside, rng.integers(0, 6, (rows, length)), 0), jnp.int32),
        lengths=jnp.asarray(lengths),
        log_probs=jnp.asarray(np.where(inside, -3 * rng.random((rows, length)), 0), jnp.float32),
        finished=jnp.arange(rows) % 2 == 0,
    )


# --- formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_8_bit_floats_are_those_of_ml_dtypes(name):
    dtype = FORMATS[name]
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    middles = (every[1:] + every[:-1]) / 2  # ties, to even
    rng = np.random.default_rng(0)
    others = rng.standard_normal(4000).astype(np.float32) * np.exp2(rng.uniform(-20, 16, 4000))
    x = np.concatenate([every, middles, others.astype(np.float32)])
    largest = float(ml_dtypes.finfo(dtype).max)
    expected = np.clip(x, -largest, largest).astype(dtype).astype(np.float32)
    found = jax.jit(partial(cache.nearest, name=name))(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(found), expected)
    assert len(every) > 200


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
def test_integers_are_whole_and_bounded(name, largest):
    x = jnp.asarray([-1e9, -1.5, -0.5, 0.5, 1.4, 2.5, largest + 0.4, 1e9], jnp.float32)
    expected = [-largest, -2, 0, 0, 1, 2, largest, largest]
    assert cache.nearest(x, name).tolist() == expected


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
def test_what_is_smaller_than_any_weight_is_zero_in_a_scaled_format(name):
    x = jnp.asarray([1e-37, 0.0, -1e-38], jnp.float32)
    found = cache.scaled(x, name, largest=jnp.max(x, keepdims=True), fence=lambda y: y)
    assert (np.asarray(found) == 0.0).all()


def test_a_scaled_format_keeps_the_largest_and_zero():
    x = np.array([[0.3, -8.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    largest = np.abs(x).max(axis=1, keepdims=True)

    @jax.jit
    def scaled(x):
        names = ("int8", "int4", "float8_e4m3fn")
        return [cache.scaled(x, name, largest=largest, fence=lambda y: y) for name in names]

    for found in map(np.asarray, scaled(x)):
        np.testing.assert_allclose(found[0, 1], -8.0, rtol=1e-6)
        assert (found[:, 2] == 0).all()
        assert (found[1] == 0).all()


# --- quantised weights --------------------------------------------------------------------------


@functools.cache
def rounding(**arguments):
    return jax.jit(dials.entry("quantised_weights", **arguments).rounded)


def rounded(matrix, **arguments):
    found = rounding(**arguments)(jnp.asarray(matrix))
    assert found.dtype == matrix.dtype
    assert found.shape == matrix.shape
    return np.asarray(found)


def test_coarser_weights_are_further_off():
    rng = np.random.default_rng(0)
    columns = np.exp2(rng.integers(-3, 3, 48)).astype(np.float32)  # columns of unequal size
    matrix = rng.standard_normal((2, 64, 48), np.float32) * columns

    def error_of(**arguments):
        return np.sqrt(np.mean(np.square(rounded(matrix, **arguments) - matrix)))

    by_channel = {
        dtype: error_of(dtype=dtype) for dtype in ("int8", "float8_e4m3fn", "float8_e5m2", "int4")
    }
    errors = list(by_channel.values())
    assert errors == sorted(errors)
    assert 0 < errors[0] < 0.05
    for dtype in ("int8", "int4"):
        by_group, by_tensor = (
            error_of(dtype=dtype, **how) for how in ({"group": 16}, {"per": "tensor"})
        )
        assert by_group < by_channel[dtype] < by_tensor


def test_matrices_with_all_codes_and_a_scale_each_are_those_of_torch():
    """`quantize_dynamic` has a scale for each matrix, 127.5 steps, and -128."""
    torch = pytest.importorskip("torch")
    execution = replace(dials.EXECUTION, numerics=replace(tiny.NUMERICS, column_tiles=2))
    how = {"dtype": "int8", "per": "matrix", "codes": "full", "head": True}
    entry, params = dials.entry("quantised_weights", **how), tiny.params(dials.CONFIG)
    masters = params["layers"] | {"head": params.get("head", params["embed"].T)}
    rounded = {}
    for name, matrix in masters.items():
        if name in ("q", "k", "v", "o", "gate", "up", "down", "head"):
            matrix = np.asarray(matrix)
            scale = float(np.abs(matrix).max()) / 127.5
            theirs = torch.quantize_per_tensor(torch.tensor(matrix), scale, 0, torch.qint8)
            rounded[name] = jnp.asarray(theirs.dequantize().numpy())
    of_torch = params | {"layers": params["layers"] | rounded}
    for numerics in (dials.LEARNER, execution.numerics):
        prepare = replace(execution, numerics=numerics).prepare
        ours = jax.jit(lambda params, prepare=prepare: entry.weights(prepare(params)))(params)
        ours, theirs = jax.device_get((ours, jax.jit(prepare)(of_torch)))
        for name in ("qkv", "o", "gate_up", "down"):
            apart = np.abs(ours["layers"][name] - theirs["layers"][name]) > 1e-6
            # The largest of a matrix is half a step beyond 127: it may go to either side.
            assert apart.sum() <= 3
    head = np.moveaxis(ours["head"], 0, 1).reshape(rounded["head"].shape[0], -1)
    assert (np.abs(head[:, : rounded["head"].shape[1]] - rounded["head"]) > 1e-6).sum() <= 1


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn"])
def test_operands_have_a_scale_each_and_the_gradient_of_the_identity(name):
    x = np.random.default_rng(2).standard_normal((5, 24), np.float32)
    x *= np.exp2(np.arange(5, dtype=np.float32))[:, None]
    ops = kernels.family(tiny.NUMERICS)
    largest = 127.0 if name == "int8" else 448.0
    scale = np.abs(x).max(axis=1, keepdims=True) / largest
    wide = np.asarray(x, np.float64) / scale
    codes = np.rint(wide) if name == "int8" else wide.astype(FORMATS[name]).astype(np.float64)

    def summed(x):
        found = cache.operand(x, name, ops=ops)
        return found.sum(), found

    array = jnp.asarray(x)
    gradient, found = jax.jit(jax.grad(summed, has_aux=True))(array)
    np.testing.assert_allclose(found, codes * scale, rtol=1e-5)
    assert (gradient == 1).all()
    assert cache.operand(array, None, ops=ops) is array


def test_activations_of_a_mixture_are_refused():
    execution = Execution(PRESETS["qwen3-moe-awkward"], tiny.NUMERICS)
    with pytest.raises(InputError, match="activations = 'int8' takes no mixture of experts"):
        dials.entry("quantised_weights", dtype="int8", activations="int8").check(execution)


def test_int8_by_channel_against_numpy():
    matrix = np.random.default_rng(1).standard_normal((1, 32, 8), np.float32)
    scale = np.abs(matrix).max(axis=1, keepdims=True) / 127
    expected = np.clip(np.rint(matrix / scale), -127, 127) * scale
    found = rounded(matrix, dtype="int8")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert len(np.unique(np.rint(found / scale)[0, :, 0])) > 20


def test_a_scale_per_tensor_is_one_in_column_tiles_too():
    matrix = np.random.default_rng(1).standard_normal((2, 32, 8), np.float32)
    matrix *= np.arange(1, 9, dtype=np.float32)  # tiles of unequal size
    tiled = np.moveaxis(matrix.reshape(2, 32, 2, 4), 2, 1)
    entry = dials.entry("quantised_weights", dtype="int8", per="tensor")
    found = np.asarray(jax.jit(partial(entry.rounded, tiled=True))(jnp.asarray(tiled)))
    whole = np.moveaxis(found, 1, 2).reshape(2, 32, 8)
    assert tiny.bits(whole) == tiny.bits(rounded(matrix, dtype="int8", per="tensor"))


def before_and_after(entry, execution):
    """Compute weights of the layers, and what an entry makes of them."""

    def both(params):
        weights = execution.prepare(params)
        return weights["layers"], entry.weights(weights)["layers"]

    return jax.device_get(jax.jit(both)(random_params(execution.config, 0)))


@pytest.mark.parametrize("per", ["matrix", "tensor"])
def test_a_projection_that_is_kept_by_head_has_one_scale(per):
    """Latent attention's kv_b_proj, which is one matrix to who quantises a checkpoint."""
    config = next(config for config in PRESETS.values() if config.latent)
    execution = Execution(config, tiny.NUMERICS)
    entry = dials.entry("quantised_weights", dtype="int8", per=per)
    before, after = before_and_after(entry, execution)
    for layer in range(len(before["k_up"])):
        both = [before[name][layer] for name in ("k_up", "v_up")]
        scale = max(np.abs(x).max() for x in both) / 127
        for name, matrix in zip(("k_up", "v_up"), both, strict=True):
            expected = np.rint(matrix / scale) * scale
            np.testing.assert_allclose(after[name][layer], expected, rtol=1e-5, atol=1e-6)


def test_every_expert_is_quantised_and_the_router_is_not():
    execution = Execution(PRESETS["qwen3-moe-awkward"], tiny.NUMERICS)
    entry = dials.entry("quantised_weights", dtype="int4", per="tensor")
    entry.check(execution)
    before, after = before_and_after(entry, execution)
    changed = {name for name in before if tiny.bits(before[name]) != tiny.bits(after[name])}
    assert changed == {"qkv", "o", "expert_gate_up", "expert_down"}
    for found, own in zip(after["expert_down"][1], before["expert_down"][1], strict=True):
        assert tiny.bits(found) == tiny.bits(rounded(own[None], dtype="int4", per="tensor")[0])
    with pytest.raises(InputError, match="needs a dense model"):
        dials.entry("tensor_parallel", ranks=2).check(execution)


def test_int8_as_qwix_does_it():
    qwix = pytest.importorskip("qwix")
    matrix = jnp.asarray(np.random.default_rng(1).standard_normal((32, 8), np.float32))
    theirs = qwix.dequantize(qwix.quantize(matrix, "int8", channelwise_axes=[1]))
    ours = rounded(matrix, dtype="int8")
    step = np.abs(np.asarray(matrix)).max(axis=0) / 127
    # qwix scales to 127.5 rather than 127: less than a step apart
    assert (np.abs(np.asarray(ours - theirs)) <= 1.01 * step[None, :]).all()


# --- orders of sums -----------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 40))
def test_split_k_adds_the_pieces(pieces, size):
    rng = np.random.default_rng(size)
    # Any, as NumPy's product takes NumPy's arrays.
    x, weight = (
        cast(Any, rng.standard_normal(shape, np.float32)) for shape in ((3, size), (size, 4))
    )
    found = formulas.split_k(np.dot, x, weight, pieces=pieces)
    np.testing.assert_allclose(found, x.astype(np.float64) @ weight, rtol=1e-4, atol=1e-5)


def test_split_kv_follows_the_batch():
    numerics = replace(tiny.NUMERICS, order=Order(split_kv=132))
    count = partial(variants.pieces, heads=8, keys=512, numerics=numerics)
    assert [count(batch) for batch in (1, 2, 4, 8, 16, 64)] == [17, 9, 5, 3, 2, 1]
    assert variants.pieces(1, 8, 64, numerics=numerics) == 8  # of 8 keys


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("batch", quick.some([1, 3], 1))
def test_split_kv_is_attention(batch, window):
    rng = np.random.default_rng(0)
    shapes = ((batch, 2, 3, 8), (batch, 2, 8, 80), (batch, 2, 80, 8))
    query, key, value = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in shapes)
    last = jnp.asarray(rng.integers(0, 80, (batch, 3)), jnp.int32)
    cut = replace(tiny.NUMERICS, order=Order(split_kv=24))
    assert variants.pieces(batch, 2, 80, numerics=cut) > 1

    @jax.jit
    def attended(*arguments):
        options = {"aligned": False, "window": window}
        whole = native.attention(*arguments, numerics=tiny.NUMERICS, **options)
        # without a split it is the family's own attention
        both = (cut, tiny.NUMERICS)
        return whole, [kernels.attention(*arguments, numerics=n, **options) for n in both]

    whole, others = attended(query, key, value, last)
    for found in others:
        np.testing.assert_allclose(np.asarray(found), np.asarray(whole), rtol=1e-5, atol=1e-5)


def test_a_softmax_that_is_cut_is_rounded_at_every_step_as_one_that_is_not():
    """Its exponents too, whose rounding is most of the error where scores are far apart."""
    rng = np.random.default_rng(0)
    shapes = ((1, 1, 64, 8), (1, 1, 8, 64), (1, 1, 64, 8))
    query, key, value = (jnp.asarray(3 * rng.standard_normal(s, np.float32)) for s in shapes)
    last = jnp.full((1, 64), 63, jnp.int32)

    def attended(dtype, programs):
        precision, order = Precision(attention_softmax=dtype), Order(split_kv=programs)
        numerics = replace(tiny.NUMERICS, precision=precision, order=order)
        return np.asarray(
            kernels.attention(query, key, value, last, numerics=numerics, aligned=False)
        )

    exact = attended("float32", 0)
    cut, whole = (np.abs(attended("bfloat16", n) - exact).mean() for n in (4, 0))
    assert 0.5 < cut / whole < 2


@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize(("rows", "keys"), quick.some([(3, 80), (90, 45)], 0))
def test_flash_attention_is_attention(rows, keys, window):
    """Decoding rows at ragged lengths, and whole sequences of 45 tokens with groups of 2."""
    rng = np.random.default_rng(0)
    shapes = ((2, 2, rows, 8), (2, 2, 8, keys), (2, 2, keys, 8))
    query, key, value = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in shapes)
    last = rng.integers(0, keys, (2, 3)) if rows == 3 else np.arange(90)[None, :] // 2 + [[0], [0]]
    last = jnp.asarray(last, jnp.int32)
    numerics = replace(tiny.NUMERICS, attention="flash_interpreted")
    attend = partial(kernels.attention, aligned=False, window=window)
    flash, plain = (jax.jit(partial(attend, numerics=n)) for n in (numerics, tiny.NUMERICS))
    found, whole = (attention(query, key, value, last) for attention in (flash, plain))
    np.testing.assert_allclose(np.asarray(found), np.asarray(whole), rtol=1e-5, atol=1e-5)
    # what lies beyond a row's position does not count
    at = jnp.arange(keys)[None, None, :, None]
    unseen = (at > jnp.max(last)) | (at <= jnp.min(last) - (window or keys))
    again = flash(query, key, jnp.where(unseen, 1e4, value), last)
    assert tiny.bits(again) == tiny.bits(found)


def test_triton_attention_refuses_a_window_before_anything_is_compiled():
    config = replace(dials.CONFIG, sliding_window=5, window_layers=(True,))
    execution = replace(dials.EXECUTION, config=config)
    with (
        tiny.compilations() as counted,
        pytest.raises(InputError, match="'triton_attention': takes no sliding window"),
    ):
        sampling_program(execution, samples=2, mismatch=dials.standard("triton_attention"))
    assert not counted
    zeros, numerics = jnp.zeros((1, 1, 16, 16)), tiny.NUMERICS
    with pytest.raises(InputError, match="no sliding window"):
        kernels.attention(
            zeros,
            zeros,
            zeros,
            jnp.zeros((1, 16), jnp.int32),
            numerics=replace(numerics, attention="triton"),
            aligned=False,
            window=jnp.int32(5),
        )


# --- noise --------------------------------------------------------------------------------------


def test_students_t_has_unit_variance_and_heavy_tails():
    keys = jax.random.split(jax.random.key(0), 2)
    gauss, student = (
        np.asarray(jax.jit(transfer.draw, static_argnums=(1, 2))(key, (200_000,), kind))
        for key, kind in zip(keys, ("gaussian", "student"), strict=True)
    )
    for draws in (gauss, student):
        assert abs(draws.mean()) < 0.01
        assert np.isfinite(draws).all()
        assert abs(draws.std() - 1) < 0.03
    # P(|t_4| > 5 sqrt 2) is 0.0021; of a normal at 5, 6e-7
    assert 0.0015 < np.mean(np.abs(student) > 5) < 0.0028
    assert np.mean(np.abs(gauss) > 5) < 1e-4


@pytest.mark.parametrize("distribution", ["gaussian", "student"])
@pytest.mark.parametrize("std", quick.some([0.01, 0.1, 1.0], 1))
def test_noise_on_reports_has_the_size_that_was_asked_for(std, distribution):
    entry = dials.entry("log_prob_noise", std=std, bias=0.5, distribution=distribution)
    rollout = recorded(rows=400, length=20)
    noisy = jax.jit(entry.rollout)(rollout, dials.names(400))
    added = np.asarray(noisy.log_probs - rollout.log_probs)[np.asarray(rollout.mask)]
    assert added.size > 2000
    assert abs(added.std() / std - 1) < 0.15
    assert abs(added.mean() - 0.5) < 5 * std / added.size**0.5
    assert (np.asarray(noisy.log_probs)[~np.asarray(rollout.mask)] == 0).all()
    assert tiny.bits(noisy.drawn_log_probs) == tiny.bits(rollout.log_probs)


def test_noise_by_probability_and_by_position():
    rollout = recorded(rows=400, length=20)
    mask, p = np.asarray(rollout.mask), np.exp(np.asarray(rollout.log_probs, np.float64))
    position = np.broadcast_to(np.arange(1, 21)[None, :], mask.shape)
    kinds = ("flat", "probability", "position")
    entries = {by: dials.entry("log_prob_noise", std=0.1, by=by, reach=10) for by in kinds}

    @jax.jit
    def noisy(*given):
        return {by: entry.rollout(*given).log_probs for by, entry in entries.items()}

    found = jax.device_get(noisy(rollout, dials.names(400)))
    exact = np.asarray(rollout.log_probs)
    added = {by: (found[by] - exact).astype(np.float64) for by in kinds}
    np.testing.assert_allclose(
        added["probability"][mask], (added["flat"] * (1 - p))[mask], atol=2e-6
    )
    np.testing.assert_allclose(
        added["position"][mask], (added["flat"] * position / 10)[mask], atol=2e-6
    )


def test_noise_on_logits_has_a_part_per_position_and_a_part_per_token():
    @jax.jit
    def all_added(names):
        def added(position, **arguments):
            entry, positions = dials.entry("logit_noise", **arguments), jnp.full(6, position)
            return entry.logits(jnp.zeros((6, 1000)), positions, names)

        noises = added(0, std=0.5), added(1, std=0.5), added(0, std=0.5, seed=1)
        return noises, (added(0, bias=0.5), added(3, bias=0.5))

    (first, second, seeded), bias = jax.device_get(all_added(dials.names()))
    assert abs(first.std() - 0.5) < 0.03
    assert np.abs(np.corrcoef(first[0], first[1])[0, 1]) < 0.15
    assert np.abs(np.corrcoef(first[0], second[0])[0, 1]) < 0.15
    assert tiny.bits(bias[0]) == tiny.bits(bias[1])
    assert (bias[0] == bias[0][:1]).all()
    assert abs(bias[0][0].std() - 0.5) < 0.05
    assert tiny.bits(seeded) != tiny.bits(first)


def _make_six_rows():
    """Logits, their positions, a rollout, and the names of the rows, without their key."""
    logits = np.random.default_rng(0).standard_normal((6, 37), np.float32)
    named = dials.names().prompts, dials.names().samples
    return jax.tree.map(np.asarray, (logits, np.arange(3, 9), recorded(), *named))


@partial(jax.jit, static_argnames=("distribution", "by"))
def _add_noise(key, logits, positions, rollout, prompts, samples, *, distribution, by):
    """What the noises make of some rows, in one program: to compile is most of the time."""
    names, how = Names(key, prompts, samples), {"std": 0.1, "distribution": distribution}
    on_logits = dials.entry("logit_noise", **how)
    on_reports = dials.entry("log_prob_noise", bias=-0.01, by=by, **how)
    return {
        "lost": dials.entry("dropped_end", share=0.5).rollout(rollout, names).lengths,
        "logits": on_logits.logits(logits, positions, names),
        "reports": on_reports.rollout(rollout, names).log_probs,
    }


@functools.cache
def _add_noise_to_all(**how):
    return jax.device_get(_add_noise(dials.names().key, *_make_six_rows(), **how))


@pytest.mark.parametrize(
    ("distribution", "by"), quick.some([("student", "probability"), ("gaussian", "position")], 0)
)
@pytest.mark.parametrize("rows", quick.some([[5, 2], [0], [1, 2, 3], [4, 3, 2, 1, 0]], 0))
def test_noise_does_not_know_its_batch(rows, distribution, by):
    how = {"distribution": distribution, "by": by}
    whole, some = _add_noise_to_all(**how), jax.tree.map(lambda x: x[rows], _make_six_rows())
    part = _add_noise(dials.names().key, *some, **how)
    assert len({found.tobytes() for found in whole.values()}) == 3
    for entry, found in whole.items():
        assert tiny.bits(part[entry]) == tiny.bits(found[rows]), entry
    assert whole["lost"].tolist() != recorded().lengths.tolist()


# --- mistakes of reporting ----------------------------------------------------------------------


def reported(rollout, name="dropped_end", **arguments: Any):
    return jax.device_get(jax.jit(dials.entry(name, **arguments).rollout)(rollout, dials.names()))


def test_a_dropped_end_is_gone_where_a_response_has_ended():
    before = recorded()
    after = reported(before)
    ended = np.asarray(before.finished)
    lengths = np.asarray(before.lengths)
    np.testing.assert_array_equal(after.lengths, lengths - ended)
    for row in range(6):
        kept = lengths[row] - ended[row]
        assert after.responses[row, :kept].tolist() == before.responses[row, :kept].tolist()
        assert after.log_probs[row, :kept].tolist() == before.log_probs[row, :kept].tolist()
        assert not after.log_probs[row, kept:].any()


def test_a_replaced_end_stands_under_the_ends_log_prob():
    before = recorded()
    after = reported(before, replacement=9)
    assert tiny.bits((after.lengths, after.log_probs)) == tiny.bits(
        (before.lengths, before.log_probs)
    )
    changed = np.argwhere(np.asarray(after.responses != before.responses)).tolist()
    assert changed == [[row, int(before.lengths[row]) - 1] for row in range(0, 6, 2)]
    assert {int(after.responses[tuple(place)]) for place in changed} == {9}


def test_rewards_are_given_for_the_text_without_what_replaces_its_end():
    before = recorded()
    lengths, ended = np.asarray(before.lengths), np.asarray(before.finished)
    last = jnp.arange(before.responses.shape[1])[None, :] == (before.lengths - 1)[:, None]
    before = replace(before, responses=jnp.where(last & before.finished[:, None], 1, 9))
    for table, expected in (
        ({"replacement": 7}, lengths - ended),
        ({"replacement": 7, "share": 0.0}, lengths),
        ({}, lengths - ended),  # what is reported is a token shorter itself
    ):
        one = dials.dial({"name": "dropped_end", **table})
        after = reported(before, "dropped_end", **table)
        said = dial.without_replaced_ends(after, mismatch=one, stop_tokens=(1,))
        np.testing.assert_array_equal(said.lengths, expected)


def test_more_ends_are_lost_at_a_higher_share():
    rollout = recorded(rows=400)
    entries = [dials.entry("dropped_end", share=share) for share in (0.0, 0.25, 0.75, 1.0)]

    @jax.jit
    def lengths(*given):
        return [entry.rollout(*given).lengths for entry in entries]

    after = jax.device_get(lengths(rollout, dials.names(400)))
    lost = [int(np.sum(np.asarray(rollout.lengths) - found)) for found in after]
    assert lost[0] == 0
    assert lost[3] == int(rollout.finished.sum()) == 200
    assert 30 < lost[1] < 70
    assert 130 < lost[2] < 170


def test_a_pad_mask_hides_tokens_wherever_they_are():
    before = recorded()
    pad = int(before.responses[0, 0])
    after = reported(before, name="pad_mask", pad=pad)
    np.testing.assert_array_equal(after.mask, before.mask & (before.responses != pad))
    assert int(before.mask.sum()) > int(after.mask.sum()) > 0
    assert after.lengths.tolist() == before.lengths.tolist()
