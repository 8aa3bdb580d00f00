"""The optimiser chain against AdamW by the book, and the shape of its schedules."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tabular
import tiny

from tim_jax import optimizers, schedules
from tim_jax.app.config.run import DecayFixed, DecayReactive, Optimizer
from tim_jax.common.errors import InputError
from tim_jax.objectives import Objective
from tim_jax.optimizers import Decay, Rate
from tim_jax.rl import learner
from tim_jax.rl.learner import experience
from tim_jax.rl.types import Carried, Learning, TrainState


def rates(rate, steps):
    schedule = rate.schedule_fn()
    with jax.numpy_dtype_promotion("standard"):
        return [float(schedule(step)) for step in range(steps)]


def run(transform, params, gradients, **extra):
    """Parameters after each gradient."""
    state, path = transform.init(params), []
    with jax.numpy_dtype_promotion("standard"):
        for gradient in gradients:
            changes, state = transform.update(gradient, state, params, **extra)
            params = optax.apply_updates(params, changes)
            path.append(params)
    return path, state


def adamw64(params, gradients, *, rates, b1, b2, eps, weight_decay, max_norm):
    """Loshchilov and Hutter (arXiv:1711.05101), algorithm 2, after clipping by the global norm."""
    first, second, path = 0.0, 0.0, []
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = np.sqrt((gradient**2).sum())
        gradient = gradient * min(1.0, max_norm / norm) if max_norm else gradient
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * gradient**2
        direction = (first / (1 - b1**step)) / (np.sqrt(second / (1 - b2**step)) + eps)
        params = params - rate * (direction + weight_decay * params)
        path.append(params)
    return path


GRADIENTS = np.random.default_rng(0).standard_normal((5, 7)) * np.array([3, 3, 0.01, 1, 5])[:, None]
START = np.linspace(-1.0, 1.0, 7)


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_adamw_is_the_books(max_norm):
    rate = Rate(0.03, warmup_steps=3)
    options: Any = {"b1": 0.8, "b2": 0.9, "eps": 1e-6, "weight_decay": 0.2}
    ours = optimizers.adamw(rate, max_grad_norm=max_norm, **options)
    gradients = [jnp.asarray(g, jnp.float32) for g in GRADIENTS]
    path, _ = run(ours, jnp.asarray(START, jnp.float32), gradients, response_length=3.0)
    expected = adamw64(
        START, GRADIENTS, rates=[0.01, 0.02, 0.03, 0.03, 0.03], max_norm=max_norm, **options
    )
    np.testing.assert_allclose(path, expected, rtol=1e-5, atol=1e-6)


def test_clipping_counts_all_parameters_together():
    params = {"a": jnp.zeros(1, jnp.float32), "b": jnp.zeros(1, jnp.float32)}
    gradient = {"a": jnp.full(1, 3.0, jnp.float32), "b": jnp.full(1, 4.0, jnp.float32)}
    transform = optimizers.adamw(Rate(1.0), max_grad_norm=1.0)
    _, state = run(transform, params, [gradient])
    (adam,) = (s for s in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(s))
    np.testing.assert_allclose([adam.mu["a"][0], adam.mu["b"][0]], [0.06, 0.08], rtol=1e-6)


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def test_rise_then_constant():
    np.testing.assert_allclose(rates(Rate(0.6, warmup_steps=3), 6), [0.2, 0.4] + [0.6] * 4)
    np.testing.assert_allclose(rates(Rate(0.6), 3), [0.6] * 3)


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_fall_ends_at_its_share(schedule, warmup):
    total, final = 24, 0.1
    found = rates(Rate(0.5, warmup, schedule, total, final), 2 * total)
    rest = total - warmup
    # The first update after the rise has all of the rate, and the last one some: none is wasted.
    done = np.clip((np.arange(2 * total) - warmup) / rest, 0, 1)
    shape = 1 - done if schedule == "linear" else 0.5 * (1 + np.cos(np.pi * done))
    expected = 0.5 * (final + (1 - final) * shape)
    if warmup:
        expected[:warmup] = 0.5 * (np.arange(warmup) + 1) / warmup
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(found[total:], 0.05, rtol=1e-5)
    assert found[0] > 0


def test_length_decay_scales_the_finished_update():
    """Last in the chain: it scales the weight decay too, and AdamW's moments do not see it."""
    params, gradients = jnp.ones(3, jnp.float32), [jnp.full(3, 0.5, jnp.float32)] * 7
    options: Any = {"weight_decay": 0.1, "max_grad_norm": 0.0}
    plain, _ = run(optimizers.adamw(Rate(1e-3), **options), params, gradients)
    decayed, state = run(
        optimizers.adamw(Rate(1e-3), decay=Decay(period=2, floor=0.2), **options),
        params,
        gradients,
        response_length=jnp.float32(9.0),
    )

    def changes(path):
        return -np.diff(np.stack([params, *path]).astype(np.float64)[:, 0])

    scales = np.array([1, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2])
    np.testing.assert_allclose(changes(decayed) / changes(plain), scales, rtol=2e-3)
    assert float(schedules.decay_report(state)["lr_scale"]) == pytest.approx(0.2)


def test_reactive_decay_waits_for_a_surge():
    transform = optimizers.adamw(Rate(1e-3), decay=Decay(multiple=1.0, floor=0.5))
    params, gradient = jnp.ones(2, jnp.float32), jnp.ones(2, jnp.float32)
    state = transform.init(params)

    @jax.jit
    def step(state, length):
        with jax.numpy_dtype_promotion("standard"):
            return transform.update(gradient, state, params, response_length=length)[1]

    reports = []
    for number in range(100):
        state = step(state, jnp.float32(10.0 if number < 40 else 80.0))
        reports.append({k: float(v) for k, v in schedules.decay_report(state).items()})
    assert reports[39]["decay_period"] == 0
    assert {report["lr_scale"] for report in reports[:79]} == {1.0}
    assert reports[-1]["decay_period"] == reports[-1]["surge_step"] == 41
    assert reports[-1]["lr_scale"] == 0.5


def test_reactive_decay_takes_its_detector_from_the_configuration():
    keys = {"rise": 1.5, "window": 40, "gap": 12, "hold": 8, "minimum": 10, "max_length": 64}
    section = Optimizer(length_decay=DecayReactive(kind="reactive", multiplier=2.0, **keys))
    transform = section.chain(steps=1, max_tokens=9)
    params = jnp.ones(2, jnp.float32)
    state = transform.init(params)
    update = jax.jit(lambda state, x: transform.update(params, state, params, response_length=x)[1])
    with jax.numpy_dtype_promotion("standard"):
        for number in range(40):
            state = update(state, jnp.float32(10.0 if number < 20 else 17.0))
    report = schedules.decay_report(state)
    assert (int(report["surge_step"]), int(report["decay_period"])) == (21, 42)


def test_lengths_are_pinned_at_the_runs_longest_response_if_nothing_else_is_said(monkeypatch):
    made = []

    def transform(**how):
        made.append(how)
        return optax.with_extra_args_support(optax.identity())

    monkeypatch.setattr(schedules, "length_triggered_decay", transform)
    for keys in ({}, {"max_length": 20}):
        decay = DecayReactive(kind="reactive", **keys)
        section = Optimizer(length_decay=decay)
        section.chain(steps=1, max_tokens=32)
    assert [how["detector"].max_length for how in made] == [32, 20]


def test_root_of_the_effective_sample_size_scales_the_finished_update():
    """The very last: AdamW would divide it out, and it scales weight and length decay too."""
    params, gradients = jnp.ones(3, jnp.float32), [jnp.full(3, 0.5, jnp.float32)] * 3
    decay = DecayFixed(kind="fixed", period=2)

    def changes(share, **options):
        section = Optimizer(weight_decay=0.1, length_decay=decay, **options)
        transform = section.chain(steps=1, max_tokens=8)
        known = {"response_length": jnp.float32(5.0), "effective_sample_size": share}
        path, state = run(transform, params, gradients, **known)
        moments = [x for x in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(x)]
        return np.diff(np.stack([params, *path]).astype(np.float64)[:, 0]), moments

    plain, moments = changes(jnp.float32(0.25))
    half, same = changes(jnp.float32(0.25), ess_reference=1.0)
    np.testing.assert_allclose(half[0] / plain[0], 0.5, rtol=1e-4)
    np.testing.assert_array_equal(same[0].mu, moments[0].mu)
    full, _ = changes(jnp.float32(0.5), ess_reference=0.5)
    np.testing.assert_array_equal(full, plain)
    with pytest.raises(InputError, match="effective_sample_size"):
        changes(None, ess_reference=1.0)


def test_an_update_whose_sample_size_is_not_a_number_is_skipped():
    """The loss never looks at the rollout's log-probs; what scales the step does."""
    section = Optimizer(ess_reference=1.0)
    optimizer = section.chain(steps=1, max_tokens=8)
    learning = Learning(Objective(estimator="reinforce", loss="reinforce"), 1)
    params = {"table": jnp.asarray(tabular.table(1), jnp.float32)}
    zero = jnp.int32(0)
    state = TrainState(params, optimizer.init(params), (), zero, zero)
    policy = tabular.policy(learning)
    rewards = jnp.arange(tabular.ROWS, dtype=jnp.float32)

    def step(rollout):
        ready = experience(
            params, None, Carried(()), rollout, rewards, score=policy.score, learning=learning
        ).experience
        return learner.update(
            state,
            params,
            ready,
            jnp.float32(1),
            optimizer=optimizer,
            policy=policy,
            learning=learning,
        )

    rollout = tabular.rollout(tabular.table(0))
    moved, _, known = step(rollout)
    assert (float(known.metrics["skipped"]), int(moved.skipped)) == (0.0, 0)
    assert 0.0 < known.metrics["effective_sample_size"] < 1.0
    log_probs = rollout.log_probs.at[0, 0].set(jnp.nan)
    kept, _, known = step(replace(rollout, log_probs=log_probs))
    assert np.isfinite(known.metrics["loss"])
    assert np.isfinite(known.metrics["gradient_norm"])
    assert (float(known.metrics["skipped"]), int(kept.skipped)) == (1.0, 1)
    assert tiny.bits((kept.params, kept.optimizer)) == tiny.bits((params, state.optimizer))
    assert tiny.bits(moved.params) != tiny.bits(params)


def test_reactive_decay_needs_the_length():
    transform = optimizers.adamw(Rate(1e-3), decay=Decay())
    params = jnp.ones(2, jnp.float32)
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(InputError, match="response_length"),
    ):
        transform.update(params, transform.init(params), params)


@pytest.mark.parametrize("decay", [None, Decay(period=3), Decay()])
def test_one_trace_serves_all_steps(decay):
    transform = optimizers.adamw(Rate(1e-3, 2, "cosine", 9), decay=decay)
    params = {"w": jnp.ones((2, 3), jnp.float32)}
    traces = []

    @jax.jit
    def step(params, state, length):
        traces.append(None)
        with jax.numpy_dtype_promotion("standard"):
            changes, state = transform.update(params, state, params, response_length=length)
            return optax.apply_updates(params, changes), state

    state = jax.jit(transform.init)(params)
    for _ in range(3):
        params, state = step(params, state, jnp.float32(4.0))
    assert len(traces) == 1


def test_a_norm_that_is_known_is_the_one_that_clips():
    """As optax clips by a norm of its own; another norm clips otherwise."""
    gradient = {"a": jnp.asarray([3.0, -1.0]), "b": jnp.asarray([[2.0]])}
    clip, reference = optimizers.clip_by_norm(1.5), optax.clip_by_global_norm(1.5)

    def clipped(norm) -> Any:
        return clip.update(gradient, clip.init(gradient), gradient_norm=norm)[0]

    expected, _ = reference.update(gradient, reference.init(gradient))
    for known in (None, optax.tree.norm(gradient)):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=3e-7), clipped(known), expected)
    np.testing.assert_allclose(clipped(jnp.float32(3.0))["a"], gradient["a"] / 2, rtol=1e-6)
    assert jnp.array_equal(clipped(jnp.float32(1.0))["a"], gradient["a"])


UNTYPED = cast(Any, optimizers)  # takes what a type checker would refuse


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UNTYPED.Rate("1e-3"), "learning_rate is '1e-3'; it must be a number"),
        (
            lambda: UNTYPED.Rate(1e-3, warmup_steps=0.5),
            "warmup_steps is 0.5; it must be a whole number",
        ),
        (lambda: UNTYPED.Rate(1e-3, schedule="cosin", total_steps=9), "did you mean 'cosine'"),
        (
            lambda: UNTYPED.AdamW(1e-3, weight_decay="0.1"),
            "weight_decay is '0.1'; it must be a number",
        ),
        (lambda: UNTYPED.Decay(multiple="2"), "multiple is '2'; it must be a number"),
        (lambda: UNTYPED.Decay(period=9, multiple=3.0), "period = 9 is given, so multiple and det"),
        (
            lambda: UNTYPED.Rate(1e-3, total_steps=9).schedule_fn(),
            "have no effect on a constant learning rate",
        ),
        (
            lambda: UNTYPED.Rate(1e-3, 9, "cosine", total_steps=9).schedule_fn(),
            "warmup_steps = 9 must be below total_steps = 9",
        ),
    ],
)
def test_values_of_another_kind_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
    assert UNTYPED.Rate(np.float32(1e-3), warmup_steps=np.int64(3)).warmup_steps == 3
