"""Dynamic loss scaling: the transform by itself, and a learner in float16 that needs it."""

import tomllib
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from tim_jax import objectives, optimizers
from tim_jax.app.config import toml
from tim_jax.app.run.assembly import with_several_tiles
from tim_jax.common.errors import InputError
from tim_jax.mismatch import compute
from tim_jax.mismatch.dial import Mismatch
from tim_jax.model import fitting
from tim_jax.model.execution import Execution
from tim_jax.numerics import GPU_EXACT_F16, MOSAIC_GPU_EXACT_BF16, TPU_EXACT_BF16, Precision
from tim_jax.optimizers import AdamW, LossScale
from tim_jax.placement import SINGLE, Placement
from tim_jax.rl import programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

# optax types a state as any tree of arrays; these tests look into it.
dynamic_loss_scale: Any = optimizers.dynamic_loss_scale
loss_scale: Any = optimizers.loss_scale
PARAMS = {"a": jnp.linspace(-1.0, 1.0, 6), "b": jnp.ones((2, 3))}
F16 = Execution(tiny.CONFIG, tiny.F16, tiny.SAMPLING)
LEARNING = Learning(objectives.grpo(kl_coefficient=0.0), tiny.GROUP, micro_batch=4)
RATE = AdamW(1e-2)


def gradients(step: int, dtype=jnp.float32):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), dtype), PARAMS)


def times(scale, tree):
    return jax.tree.map(lambda x: scale * x, tree)


def jitted(optimizer):
    """Its `update`, compiled; optax mixes dtypes, which these tests otherwise refuse."""
    update = jax.jit(optimizer.update)

    def standard(*arguments):
        with jax.numpy_dtype_promotion("standard"):
            return update(*arguments)

    return standard


# --- the transform ---------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [optax.adamw(0.1), RATE.transform()], ids=["optax", "guarded"])
def test_a_scaled_optimizer_makes_the_bits_of_the_optimizer_inside(inner):
    """Powers of two round nothing: the same changes and states, whatever the scale."""
    ours = dynamic_loss_scale(inner, initial=8.0, growth_interval=2)
    state, plain, scales = ours.init(PARAMS), inner.init(PARAMS), []
    for step in range(5):
        scales.append(float(loss_scale(state)))
        gradient = gradients(step)
        with jax.numpy_dtype_promotion("standard"):  # not compiled, which could fuse otherwise
            found, state = ours.update(times(loss_scale(state), gradient), state, PARAMS)
            expected, plain = inner.update(gradient, plain, PARAMS)
        assert tiny.bits(found) == tiny.bits(expected)
        assert tiny.bits(state.inner) == tiny.bits(plain)
    assert scales == [8.0, 8.0, 16.0, 16.0, 32.0]
    assert int(state.skipped) == 0


def reference(finite, initial, interval):
    """Scale before every update, and how many were skipped, in plain Python."""
    scale, since, skipped, scales = initial, 0, 0, []
    for one in finite:
        scales.append(scale)
        if not one:
            scale, since, skipped = max(scale / 2, 1.0), 0, skipped + 1
            continue
        since += 1
        if since == interval:
            scale, since = min(2 * scale, 2.0**32), 0
    return scales, skipped


@pytest.mark.parametrize("initial", [2.0, 2.0**31])
def test_the_scale_follows_what_is_finite(initial):
    """Against plain Python; both ends of the range are met."""
    rng = np.random.default_rng(3)
    finite = [True] * 7 + [False] * 4 + list(rng.random(40) < 0.8)
    ours = dynamic_loss_scale(optax.sgd(0.5), initial=initial, growth_interval=3)
    state, scales = ours.init(PARAMS), []
    update = jitted(ours)
    for step, one in enumerate(finite):
        scales.append(float(loss_scale(state)))
        gradient = gradients(step)
        if not one:
            gradient["b"] = gradient["b"].at[1, 1].set([jnp.inf, -jnp.inf, jnp.nan][step % 3])
        before = state
        changes, state = update(gradient, state, PARAMS)
        zero = all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(changes))
        assert zero == (not one)
        assert one or tiny.bits(state.inner) == tiny.bits(before.inner)
    assert (scales, int(state.skipped)) == reference(finite, initial, 3)
    assert {1.0, 2.0**32} & set(scales)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients_are_divided_in_float32(dtype):
    """In float16, 1e-3 over 2^16 is a subnormal number with two digits of the mantissa left."""
    ours = dynamic_loss_scale(optax.sgd(1.0))
    gradient = jax.tree.map(lambda g: (1e-3 * g).astype(dtype), gradients(0))
    changes, _ = jitted(ours)(gradient, ours.init(PARAMS), PARAMS)
    for found, given in zip(jax.tree.leaves(changes), jax.tree.leaves(gradient), strict=True):
        assert found.dtype == jnp.float32
        expected = -np.asarray(given).astype(np.float64) / 2**16
        np.testing.assert_array_equal(np.asarray(found), expected.astype(np.float32))


def test_the_state_of_float16_parameters_keeps_its_dtypes():
    """Else a loop over updates would not compile, and a donated state would not be taken."""
    ours = dynamic_loss_scale(optax.adam(0.1))
    params = {"w": jnp.ones(3, jnp.float16)}

    def step(state, _):
        with jax.numpy_dtype_promotion("standard"):
            return ours.update(params, state, params)[1], None

    first = ours.init(params)
    last, _ = jax.lax.scan(step, first, length=2)
    assert last.inner[0].mu["w"].dtype == first.inner[0].mu["w"].dtype == jnp.float32


def test_extra_arguments_go_inside():
    seen: dict[str, Any] = {}

    def update(updates, state, params=None, **extra):
        seen.update(extra)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    ours = dynamic_loss_scale(inner)
    ours.update(gradients(0), ours.init(PARAMS), PARAMS, response_length=3.0)
    assert seen == {"response_length": 3.0}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"initial": 3.0}, ["initial", "power of two", "3.0"]),
        ({"initial": 0.5}, ["initial", "from 1 to 2^32", "0.5"]),
        ({"initial": 2.0**33}, ["initial", "from 1 to 2^32"]),
        ({"initial": float("inf")}, ["initial"]),
        ({"growth_interval": 0}, ["growth_interval", "1 or more", "0"]),
        ({"growth_interval": 1.5}, ["growth_interval", "1.5"]),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(InputError) as caught:
        LossScale(**settings)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(dynamic_loss_scale(optax.sgd(0.1)), optax.scale(0.5)),
        dynamic_loss_scale(dynamic_loss_scale(optax.sgd(0.1))),
        dynamic_loss_scale(optax.chain(optax.scale(0.5), dynamic_loss_scale(optax.sgd(0.1)))),
    ],
)
def test_one_that_is_not_outermost_is_refused(optimizer):
    """Its scale would never be halved: the learner keeps the old state of what knows no better."""
    with pytest.raises(InputError, match="must be the outermost"):
        Training(tiny.EXECUTION, LEARNING, optimizer).init(PARAMS)


def test_only_float16_is_given_a_scale():
    plain = RATE.transform()
    assert optimizers.for_dtype(plain, "float32") is plain
    assert optimizers.for_dtype(plain, "bfloat16") is plain
    scaled = optimizers.for_dtype(plain, "float16")
    assert optimizers.loss_scale_report(scaled.init(PARAMS))["loss_scale"] == 2.0**16
    assert optimizers.for_dtype(scaled, "float16") is scaled
    assert loss_scale(plain.init(PARAMS)) is None
    assert optimizers.loss_scale_report(plain.init(PARAMS)) == {}


# --- a learner -------------------------------------------------------------------------------


@cache
def built(where=SINGLE, **settings):
    what = replace(F16, placement=where)
    return programs.build(
        Training(what, LEARNING, LossScale(**settings).transform(RATE.transform()))
    )


def first(run, where=SINGLE):
    """(state, weights, experience) before the first update."""
    state = run.init(tiny.params())
    weights = run.prepare(state.params)
    rollout = jax.device_get(tiny.rollout(F16))
    ready = run.experience(weights, None, state.carried, rollout, tiny.rewards(), None)
    return state, weights, ready.experience


def updates(run, state, weights, batch, count):
    """Yields (state, metrics) after each update, and what the state's bits were before it."""
    for _ in range(count):
        before = jax.device_get((state.params, state.optimizer))
        state, weights, report = run.update(
            state, weights, batch, jnp.int32(0), jnp.float32(9.0), None
        )
        yield before, state, jax.device_get(report.metrics)


def norm_of_float32():
    learning, what = LEARNING, replace(F16, numerics=tiny.NUMERICS)
    run = programs.build(Training(what, learning, RATE.transform()))
    state, weights, batch = first(run)
    return float(
        run.update(state, weights, batch, jnp.int32(0), jnp.float32(9.0), None)[2].metrics[
            "gradient_norm"
        ]
    )


@pytest.mark.slow
def test_an_overflow_skips_the_update_halves_the_scale_and_is_not_counted_as_skipped():
    run = built(initial=2.0**32, growth_interval=2)
    # Fetched one by one: the next update takes the buffers of a state.
    found = [
        (before, jax.device_get(state), metrics)
        for before, state, metrics in updates(run, *first(run), 22)
    ]
    overflows = [bool(metrics["overflows"]) for _, _, metrics in found]
    fits = overflows.index(False)
    assert 4 < fits < 20
    assert not any(metrics["skipped"] for *_, metrics in found)
    assert all(int(state.skipped) == 0 for _, state, _ in found)
    assert [float(loss_scale(state.optimizer)) for _, state, _ in found[:fits]] == [
        2.0 ** (31 - n) for n in range(fits)
    ]
    for before, state, metrics in found:
        kept = tiny.bits((state.params, state.optimizer.inner)) == tiny.bits(
            (before[0], before[1].inner)
        )
        assert kept == bool(metrics["overflows"])
    last = found[-1][1].optimizer
    assert int(last.skipped) == sum(overflows)
    scales = [float(loss_scale(state.optimizer)) for _, state, _ in found[fits : fits + 2]]
    assert scales[1] == 2 * scales[0]
    norm = float(found[fits][2]["gradient_norm"])
    assert norm == pytest.approx(norm_of_float32(), rel=5e-3)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_counted_and_leaves_the_scale():
    run = built()
    state, weights, batch = first(run)
    wrong = replace(batch, advantages=jnp.full_like(batch.advantages, jnp.nan))
    ((before, after, metrics),) = updates(run, state, weights, wrong, 1)
    assert (metrics["skipped"], metrics["overflows"], int(after.skipped)) == (1.0, 0.0, 1)
    assert tiny.bits((after.params, after.optimizer)) == tiny.bits(before)


@pytest.mark.slow
def test_at_the_smallest_scale_an_overflow_is_counted_as_skipped():
    """No smaller scale is left to try: the run is to end after `max_skipped`."""
    run = built(initial=1.0)
    state, weights, batch = first(run)
    steep = replace(batch, advantages=batch.advantages * 2.0**40)
    ((_, after, metrics),) = updates(run, state, weights, steep, 1)
    assert np.isfinite(metrics["loss"])
    assert (metrics["skipped"], metrics["overflows"], int(after.skipped)) == (1.0, 0.0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("where", [Placement(data=2), Placement(fsdp=2)], ids=str)
def test_an_overflow_of_one_device_skips_the_update_on_all(where):
    """Only the first row's gradient overflows, which is the first device's."""
    run = built(where)
    state, weights, batch = first(run, where)
    steep = replace(batch, advantages=batch.advantages.at[0].set(2.0**20))
    ((before, after, metrics),) = updates(run, state, weights, steep, 1)
    assert (metrics["overflows"], metrics["skipped"]) == (1.0, 0.0)
    assert tiny.bits(after.params) == tiny.bits(before[0])
    assert float(loss_scale(after.optimizer)) == 2.0**15
    for leaf in jax.tree.leaves((after.params, after.optimizer)):
        index = {}
        for shard in leaf.addressable_shards:
            known = index.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(known, np.asarray(shard.data))


@pytest.mark.slow
def test_scaled_gradients_of_float16_are_nearer_than_those_of_bfloat16():
    """Relative to float32; with weights of tokens as small as those of a million tokens, too.

    Without a scale, float16 then loses most of the gradient.
    """
    learning = Learning(objectives.rloo(), tiny.GROUP)
    batch = first(built())[2]
    shares = learning.objective.token_weights(batch.mask, batch.kept)
    start = jax.tree.map(lambda p: (0.5 * p).astype(jnp.bfloat16), tiny.params())
    start = jax.tree.map(lambda p: p.astype(jnp.float16).astype(jnp.float32), start)

    def program(numerics):
        policy = tiny.policy(replace(F16, numerics=numerics), learning)

        @jax.jit
        def taken(shares, scale):
            gradient, _ = policy.scaled(scale).gradient(policy.prepare(start), batch, shares)
            return jnp.concatenate([g.reshape(-1) for g in jax.tree.leaves(gradient)]) / scale

        return lambda size, scale: np.asarray(taken(size * shares, jnp.float32(scale)), np.float64)

    exact, bfloat16, float16 = map(program, (tiny.NUMERICS, tiny.BF16, tiny.F16))
    for size, scale in ((1.0, 2.0**10), (1e-6, 2.0**30)):
        right = exact(size, 1.0)
        found = bfloat16(size, 1.0), float16(size, scale), float16(size, 1.0)
        coarse, fine, lost = (np.linalg.norm(x - right) / np.linalg.norm(right) for x in found)
        assert fine < coarse / 5
        assert fine < 1e-3
        assert size == 1.0 or lost > 0.1


def test_a_learner_that_the_dial_puts_in_float16_scales_its_loss():
    shared = Mismatch((compute(dtype="float16"),))
    what = replace(F16, numerics=shared.numerics(tiny.NUMERICS))
    run = programs.build(Training(what, LEARNING, RATE.transform()))
    assert float(loss_scale(run.init(tiny.params()).optimizer)) == 2.0**16


# --- where there is no float16 ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("numerics", "said"),
    [
        (replace(TPU_EXACT_BF16, compute_dtype="float16"), "pallas_tpu has no products of float16"),
        (
            replace(TPU_EXACT_BF16, precision=Precision(head="float16")),
            "pallas_tpu has no products of float16",
        ),
        # An older JAX is named first.
        (
            replace(MOSAIC_GPU_EXACT_BF16, compute_dtype="float16"),
            "bfloat16, got float16|needs JAX",
        ),
    ],
)
def test_families_without_float16_refuse_it(numerics, said):
    with pytest.raises(InputError, match=said):
        fitting.check(tiny.CONFIG, replace(numerics, interpret=True))


def test_no_tiles_by_size_are_known_for_float16():
    with pytest.raises(InputError, match="in float16"):
        with_several_tiles(GPU_EXACT_F16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_in_another_dtype_has_no_loss_to_scale(dtype):
    text = f'numerics.dtype = "{dtype}"\noptimizer.loss_scale = {{ initial = 4.0 }}\n'
    with pytest.raises(InputError, match=r"optimizer\.loss_scale.*float16") as caught:
        toml.build(tomllib.loads(text))
    assert dtype in str(caught.value)
    both = """
exact = "required"
optimizer.loss_scale = { initial = 4.0 }
sampler.both_sides = true
sampler.mismatch = [{ name = "compute", dtype = "float16" }]
"""
    assert toml.build(tomllib.loads(both)).optimizer.loss_scale == LossScale(4.0)
    out_of_it = both.replace("float16", dtype) + 'numerics.dtype = "float16"'
    with pytest.raises(InputError, match=rf"loss_scale.*computes in '{dtype}'"):
        toml.build(tomllib.loads(out_of_it))
