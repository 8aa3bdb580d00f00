"""Algorithm 1 to the letter; the detector on seeded traces, at its edges, across a resume."""

import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tim_jax import schedules
from tim_jax.errors import InputError
from tim_jax.schedules import SurgeDetector, length_decay, length_triggered_decay

SCRIPT = pathlib.Path(__file__).parent.parent / "scripts" / "length_decay_table.py"


@pytest.fixture(scope="module")
def traces():
    spec = importlib.util.spec_from_file_location("length_decay_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scales(transform, lengths, inner=None):
    """The factors on the updates over a run, and the last state."""
    chain = transform if inner is None else optax.chain(inner, transform)

    def step(state, length):
        update, state = chain.update(jnp.ones(()), state, response_length=length)
        return state, update

    state, factors = jax.lax.scan(step, chain.init(jnp.ones(())), jnp.asarray(lengths, jnp.float32))
    return np.asarray(factors), state


def feed(detector, lengths):
    def step(state, length):
        state = detector.update(state, length)
        return state, state

    return jax.lax.scan(step, detector.init(), jnp.asarray(lengths, jnp.float32))


def surge(at=110, steps=300, height=3500.0, spread=0.03, seed=0):
    t = np.arange(1, steps + 1)
    lengths = 1000 + (height - 1000) * np.clip((t - at + 1) / 4, 0, 1)
    return lengths * np.exp(spread * np.random.default_rng(seed).standard_normal(steps))


@given(period=st.integers(1, 40), floor=st.floats(0.0, 1.0), initial=st.floats(1e-7, 1.0))
@settings(deadline=None, max_examples=25)
def test_fixed_decay_is_algorithm_1(period, floor, initial):
    expected, rate = [], initial
    for t in range(1, 101):
        if t % period == 0:
            rate = max(rate / 2, floor * initial)
        expected.append(rate)
    factors, state = scales(length_decay(period, floor=floor), np.ones(100))
    np.testing.assert_allclose(initial * np.float64(factors), expected, rtol=1e-6)
    assert int(state.step) == 100


def test_default_floor_is_a_tenth_and_the_first_halving_falls_on_the_period():
    factors, _ = scales(length_decay(50), np.ones(300))
    around = factors[[0, 48, 49, 98, 99, 149, 199, 249, 299]]
    expected = [1, 1, 0.5, 0.5, 0.25, 0.125, 0.1, 0.1, 0.1]
    assert np.array_equal(around, np.float32(expected))


@pytest.mark.parametrize("at", [90, 110])
def test_the_surge_sets_the_period_and_algorithm_1_follows(at):
    factors, state = scales(length_triggered_decay(), surge(at, steps=800))
    period = int(state.decay.period)
    assert abs(period - round(1.8 * at)) <= 4
    fixed, _ = scales(length_decay(period), np.ones(800))
    assert np.array_equal(factors, fixed)
    report = schedules.decay_report((optax.EmptyState(), state))
    assert set(report) == {
        "lr_scale",
        "decay_period",
        "surge_step",
        "response_length_recent",
        "response_length_baseline",
    }
    assert int(report["decay_period"]) == period
    assert abs(int(report["surge_step"]) - at) <= 2
    assert float(report["lr_scale"]) == np.float32(0.1)
    assert float(report["response_length_recent"]) == pytest.approx(3500, rel=0.05)


@pytest.mark.parametrize(
    "inner",
    [
        optax.scale_by_schedule(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 20, 300)),
        optax.scale_by_learning_rate(3e-4),
        optax.adam(1e-3),
    ],
    ids=["warm-up and cosine", "constant", "adam"],
)
def test_schedules_compose_under_it(inner):
    lengths = surge(60, steps=300)
    # optax's own schedules and moments promote dtypes implicitly.
    with jax.numpy_dtype_promotion("standard"):
        alone, _ = scales(optax.with_extra_args_support(optax.identity()), lengths, inner)
        both, _ = scales(length_triggered_decay(), lengths, inner)
    factors, _ = scales(length_triggered_decay(), lengths)
    assert factors.min() < 0.5
    np.testing.assert_allclose(both, alone * factors, rtol=1e-6)


def test_never_fires_on_a_thousand_quiet_traces(traces):
    kinds = [lengths for lengths, longest in traces.quiet_traces().values() if longest is None]
    lengths = np.concatenate([kind[:143] for kind in kinds])
    assert len(lengths) >= 1000
    found, step, period, scale = traces.run(lengths)
    assert not np.any(found)
    assert not np.any(step)
    assert not np.any(period)
    assert np.all(scale == 1.0)


def test_fires_within_ten_steps_on_a_thousand_surges(traces):
    kinds = traces.surge_traces().values()
    lengths = np.concatenate([lengths[:334] for lengths, _ in kinds])
    onset = np.concatenate([onset[:334] for _, onset in kinds])
    assert len(lengths) >= 1000
    found, step, period, _ = traces.run(lengths)
    assert np.all(found >= onset)
    assert np.all(found - onset <= 10)
    assert np.all(np.abs(step - onset) <= 3)
    assert abs(np.median(period[onset == 110]) - 198) <= 2
    assert abs(np.median(period[onset == 90]) - 162) <= 2


def test_it_does_not_look_ahead():
    lengths = surge(110)
    detector = SurgeDetector()
    _, whole = feed(detector, lengths)
    _, cut = feed(detector, np.concatenate([lengths[:120], np.full(180, 50.0)]))
    for left, right in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        assert np.array_equal(np.asarray(left)[:120], np.asarray(right)[:120])


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped():
    lengths = surge(60, steps=200)
    transform = length_triggered_decay()
    update = jax.jit(lambda state, x: transform.update(jnp.ones(()), state, response_length=x))
    for stop in (40, 63, 150):
        state = transform.init(jnp.ones(()))
        for t, length in enumerate(lengths.astype(np.float32)):
            if t == stop:
                saved = [np.asarray(x) for x in jax.tree.leaves(state)]
                state = jax.tree.unflatten(jax.tree.structure(state), map(jnp.asarray, saved))
            _, state = update(state, length)
        _, whole = scales(transform, lengths)
        for left, right in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
            assert np.array_equal(np.asarray(left), np.asarray(right))


def test_a_second_surge_does_not_move_the_period():
    lengths = np.concatenate([surge(80, steps=200), 3.2 * surge(60, steps=200)])
    _, state = scales(length_triggered_decay(), lengths)
    _, first = scales(length_triggered_decay(), lengths[:200])
    assert int(first.decay.period) > 0
    assert int(state.decay.period) == int(first.decay.period)
    assert float(state.surge.recent) > 3 * float(first.surge.recent) * 0.9


def test_without_a_surge_the_scale_stays_one():
    factors, state = scales(length_triggered_decay(), np.full(500, 700.0))
    assert np.all(factors == 1.0)
    assert int(state.decay.period) == int(state.surge.surge_step) == 0


def test_lengths_pinned_at_the_maximum():
    pinned = np.full(200, 8192.0)
    half = np.concatenate([np.full(100, 5200.0), pinned])
    with_limit = SurgeDetector(max_length=8192)
    assert int(feed(with_limit, pinned)[0].surge_step) == 0
    assert int(feed(with_limit, half)[0].surge_step) == 101
    assert int(feed(SurgeDetector(), half)[0].surge_step) == 0, "1.58 times is no surge by itself"
    below = np.concatenate([np.full(100, 3800.0), np.full(100, 6000.0)])
    assert int(feed(with_limit, below)[0].surge_step) == 0


def test_missing_lengths_are_passed_over():
    lengths = surge(110)
    lengths[[20, 50, 51, 112]] = [np.nan, 0.0, np.inf, np.nan]
    state, _ = feed(SurgeDetector(), lengths)
    assert abs(int(state.surge_step) - 110) <= 2
    assert int(state.step) == len(lengths)
    assert np.all(np.isfinite(np.asarray(state.history)))


def test_a_length_every_fourth_update_is_a_step_of_four_updates():
    lengths = surge(110)
    once, _ = feed(SurgeDetector(), lengths)
    updates = np.full((len(lengths), 4), np.nan)
    updates[:, 3] = lengths
    state, _ = feed(SurgeDetector(), updates.reshape(-1))
    assert int(state.surge_step) == 4 * int(once.surge_step) > 0


def test_lengths_may_come_as_an_array_of_integers():
    transform = length_triggered_decay()
    state = transform.init(jnp.ones(()))
    _, state = transform.update(jnp.ones(()), state, response_length=jnp.asarray([10, 20, 60]))
    assert float(state.surge.recent) == pytest.approx(30.0)


def test_updates_keep_their_dtypes_and_it_compiles_once():
    transform = optax.chain(optax.sgd(0.1), length_triggered_decay())
    params = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones(4)}
    traced = []

    @jax.jit
    def update(state, length):
        traced.append(None)
        return transform.update(params, state, params, response_length=length, unknown=1)

    updates, state = update(transform.init(params), jnp.float32(10))
    update(state, jnp.float32(20))
    assert len(traced) == 1
    assert updates["a"].dtype == jnp.bfloat16
    assert updates["b"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: length_decay(0), "period is 0"),
        (lambda: length_decay(10.5), "period is 10.5"),
        (lambda: length_decay(10, floor=-0.1), "floor is -0.1"),
        (lambda: length_decay(10, floor=2.0), "floor is 2.0"),
        (lambda: length_decay(10, factor=1.0), "factor is 1.0"),
        (lambda: length_triggered_decay(multiple=0.0), "multiple is 0.0"),
        (lambda: length_triggered_decay(factor=0.0), "factor is 0.0"),
        (lambda: SurgeDetector(rise=1.0), "rise is 1.0"),
        (lambda: SurgeDetector(noise=-1.0), "noise is -1.0"),
        (lambda: SurgeDetector(recent=20), "recent is 20"),
        (lambda: SurgeDetector(minimum=60), "minimum is 60"),
        (lambda: SurgeDetector(max_length=0), "max_length is 0"),
    ],
)
def test_wrong_construction_is_refused_in_one_line(make, message):
    with pytest.raises(InputError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_missing_length_argument_is_named_and_reports_of_other_states_are_empty():
    transform = length_triggered_decay()
    with pytest.raises(InputError, match="needs the extra argument 'response_length'"):
        transform.update(jnp.ones(()), transform.init(jnp.ones(())))
    assert schedules.decay_report(optax.adam(1e-3).init(jnp.ones(3))) == {}
    assert int(schedules.decay_report(length_decay(7).init(jnp.ones(3)))["decay_period"]) == 7
