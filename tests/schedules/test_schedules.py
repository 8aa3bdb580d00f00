"""Algorithm 1 to the letter; the detector on seeded traces, at its edges, across a resume; VCPO."""

import functools
import importlib
import pathlib
import sys
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tim_jax import corrections, metrics, schedules
from tim_jax.common.errors import InputError
from tim_jax.optimizers import AdamW, Decay, dynamic_loss_scale
from tim_jax.schedules import (
    SurgeDetector,
    effective_sample_size,
    length_decay,
    length_decay_schedule,
    length_triggered_decay,
    scale_by_root_ess,
)

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
UNTYPED = cast(Any, schedules)  # takes what a type checker would refuse
share_of = jax.jit(effective_sample_size)


@pytest.fixture(scope="module")
def traces():
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("length_decay_table")
    finally:
        sys.path.pop(0)


TRIGGERED = length_triggered_decay()


@functools.partial(jax.jit, static_argnums=0)
def run_chain(chain, lengths):
    def step(state, length):
        update, state = chain.update(jnp.ones(()), state, response_length=length)
        return state, update

    return jax.lax.scan(step, chain.init(jnp.ones(())), lengths)


def scales(transform, lengths, inner=None) -> tuple[np.ndarray, Any]:
    """The factors on the updates over a run, and the last state."""
    chain = transform if inner is None else optax.chain(inner, transform)
    state, factors = run_chain(chain, np.float32(lengths))
    return np.asarray(factors), state


@functools.partial(jax.jit, static_argnums=0)
def run_detector(detector, lengths):
    def step(state, length):
        state = detector.update(state, length)
        return state, state

    return jax.lax.scan(step, detector.init(), lengths)


def feed(detector, lengths):
    return run_detector(detector, np.float32(lengths))


def surge(at=110, steps=300, height=3500.0, spread=0.03, seed=0):
    t = np.arange(1, steps + 1)
    lengths = 1000 + (height - 1000) * np.clip((t - at + 1) / 4, 0, 1)
    return lengths * np.exp(spread * np.random.default_rng(seed).standard_normal(steps))


def steps_like(surged):
    """A surge's first step as tests may count on it: to two steps, at little noise."""
    return pytest.approx(surged, abs=2)


@jax.jit
def fixed_decay(period, floor):
    def step(state, _):
        update, state = decay.update(jnp.ones(()), state)
        return state, update

    decay = length_decay(period, floor=floor)
    state, factors = jax.lax.scan(step, decay.init(jnp.ones(())), length=100)
    return factors, state


@given(period=st.integers(1, 40), floor=st.floats(0.0, 1.0), initial=st.floats(1e-7, 1.0))
@settings(deadline=None, max_examples=25)
def test_fixed_decay_is_algorithm_1(period, floor, initial):
    expected, rate = [], initial
    for t in range(1, 101):
        if t % period == 0:
            rate = max(rate / 2, floor * initial)
        expected.append(rate)
    factors, state = fixed_decay(np.int32(period), np.float32(floor))
    np.testing.assert_allclose(initial * np.float64(factors), expected, rtol=1e-6)
    assert int(state.step) == 100


def test_default_floor_is_a_tenth_and_the_first_halving_falls_on_the_period():
    factors, _ = scales(length_decay(50), np.ones(300))
    around = factors[[0, 48, 49, 98, 99, 149, 199, 249, 299]]
    expected = [1, 1, 0.5, 0.5, 0.25, 0.125, 0.1, 0.1, 0.1]
    assert np.array_equal(around, np.asarray(expected, np.float32))


@pytest.mark.parametrize("at", [90, 110])
def test_the_surge_sets_the_period_and_algorithm_1_follows(at):
    factors, state = scales(TRIGGERED, surge(at, steps=800))
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
    assert int(report["surge_step"]) == steps_like(at)
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
    lengths = surge(60)
    # optax's own schedules and moments promote dtypes implicitly.
    with jax.numpy_dtype_promotion("standard"):
        alone, _ = scales(optax.with_extra_args_support(optax.identity()), lengths, inner)
        both, _ = scales(TRIGGERED, lengths, inner)
    factors, _ = scales(TRIGGERED, lengths)
    assert factors.min() < 0.5
    np.testing.assert_allclose(both, alone * factors, rtol=1e-6)


# The script's table has them with their counts: what a detector of levels cannot tell from a surge.
RARELY_FIRED_ON = {
    "wandering, 20%, correlation 0.9",
    "wandering, 15%, correlation 0.95",
    "sudden rise of 1.5 times, noise 20%",
    "oscillation of 50%, period 200",
    "early climb: tripling in steps 10 to 70, noise 10%",
}


def run_together(traces, kinds):
    """Runs kinds without a maximum length as one batch; name -> what was found."""
    kinds = {name: kind for name, kind in kinds.items() if kind.max_length is None}
    found = traces.run(traces.Traces(np.concatenate([kind.lengths for kind in kinds.values()])))
    number = len(found.at) // len(kinds)
    return {
        name: traces.Found(*(part[i * number : (i + 1) * number] for part in found))
        for i, name in enumerate(kinds)
    }


@pytest.mark.slow
def test_never_fires_on_quiet_traces(traces):
    kinds = traces.tuned_quiet(8) | traces.held_out_quiet(8)
    results = run_together(traces, kinds)
    assert results.keys() > RARELY_FIRED_ON
    for name, found in results.items():
        if name not in RARELY_FIRED_ON:
            assert not np.any(found.at), name
            assert not np.any(found.onset), name
            assert not np.any(found.period), name
            assert np.all(found.scale == 1.0), name


def test_finds_sudden_surges_soon_and_dates_all_to_five_steps(traces):
    """By the median of a kind, and one by one where noise is no more than 5%."""
    kinds = traces.tuned_surges(8) | traces.held_out_surges(8)
    for name, found in run_together(traces, kinds).items():
        onset = kinds[name].onset
        assert np.all(found.at > onset), name
        assert abs(np.median(found.onset - onset)) <= 5, name
        if name.endswith((" 2%", " 5%")) and "growth" not in name:
            assert np.all(np.abs(found.onset - onset) <= 5), name
        if "within 1-10 steps" in name or "paper" in name:
            late = 28 if "30%" in name else 16
            assert np.all(found.at - onset <= late), name
            assert np.all(np.abs(found.onset - onset) <= 12), name
            assert abs(np.median(found.period / (1.8 * onset)) - 1) <= 0.02, name


@pytest.mark.parametrize("window", [6, 7, 8, 12])
def test_a_jump_is_dated_to_its_step_by_the_shortest_windows(window):
    """Six is the shortest that there is. Eight jumps of three times, without noise and with 2%."""
    detector = SurgeDetector(window=window, gap=5, hold=5, recent=2, minimum=1)
    at = np.repeat(np.arange(8, 16), 2)[:, None]
    noise = np.random.default_rng(0).normal(0.0, 0.02, (at.size, 26))
    noise[::2] = 0.0
    lengths = np.where(np.arange(1, 27) < at, 10.0, 30.0) * np.exp(noise)

    def dated(lengths):
        return jax.lax.scan(lambda s, x: (detector.update(s, x), None), detector.init(), lengths)

    state, _ = jax.jit(jax.vmap(dated))(lengths.astype(np.float32))
    assert np.array_equal(state.surge_step, at[:, 0])


def test_no_window_is_shorter_than_six():
    for window in range(1, 6):
        with pytest.raises(InputError, match="must lie in"):
            SurgeDetector(window=window, gap=5, hold=5, recent=2, minimum=1)


def test_growth_that_was_none_is_not_taken_for_the_start_of_a_surge(traces):
    """20 shapes: growth of 1.2 to 1.7 times, level up to 60 steps, then three times as long."""
    drawn = traces.Maker(2000, 20).after_growth(1, 10, 0.1)
    found = traces.run(drawn)
    assert np.all(found.at > drawn.onset)
    assert np.all(np.abs(found.onset - drawn.onset) <= 5)


@pytest.mark.parametrize(("minimum", "period"), [(30, 0), (10, 29)])
def test_a_rise_before_the_minimum_is_how_a_run_begins(minimum, period):
    """15 steps at half the length: taken as a surge, the rate would be at its floor by step 116."""
    lengths = np.where(np.arange(300) < 15, 500.0, 1100.0)
    detector = SurgeDetector(minimum=minimum)
    _, state = scales(length_triggered_decay(detector=detector), lengths)
    assert int(state.decay.period) == period


@pytest.mark.parametrize(("steps", "onset"), [(6, 0), (10, 0), (11, 0), (12, 101)])
def test_a_burst_is_no_surge_until_it_has_held(steps, onset):
    lengths = np.full(300, 1000.0)
    lengths[100 : 100 + steps] = 3000.0
    assert int(feed(SurgeDetector(), lengths)[0].surge_step) == onset


@pytest.mark.parametrize("steps", [20, 60, 110])
def test_a_return_from_a_dip_is_no_surge_and_a_rise_beyond_it_is(steps):
    lengths = np.full(300, 2000.0)
    lengths[130 : 130 + steps] = 700.0
    assert int(feed(SurgeDetector(), lengths)[0].surge_step) == 0
    lengths[130 + steps :] = 4000.0
    assert int(feed(SurgeDetector(), lengths)[0].surge_step) == 131 + steps


def test_a_slow_surge_is_dated_to_its_beginning_not_to_its_finding():
    lengths = 1000 + 2000 * np.clip((np.arange(300) - 120) / 60, 0, 1)
    _, states = feed(SurgeDetector(), lengths)
    found = np.argmax(np.asarray(states.surge_step) > 0)
    assert found > 140
    assert abs(int(states.surge_step[-1]) - 121) <= 5


def test_a_map_over_runs_finds_what_each_finds():
    lengths = np.stack([surge(60, seed=1), surge(150, seed=2), np.full(300, 700.0)])
    mapped = jax.vmap(lambda x: run_detector(SurgeDetector(), x)[0])(np.float32(lengths))
    for i, line in enumerate(lengths):
        alone, _ = feed(SurgeDetector(), line)
        for left, right in zip(jax.tree.leaves(mapped), jax.tree.leaves(alone), strict=True):
            assert np.array_equal(np.asarray(left)[i], np.asarray(right))


def test_it_does_not_look_ahead():
    lengths = surge(110)
    detector = SurgeDetector()
    _, whole = feed(detector, lengths)
    _, cut = feed(detector, np.concatenate([lengths[:120], np.full(180, 50.0)]))
    for left, right in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        assert np.array_equal(np.asarray(left)[:120], np.asarray(right)[:120])


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped():
    lengths = surge(60, steps=200)
    transform = TRIGGERED
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
    lengths = np.concatenate([surge(80, steps=150), 3.2 * surge(60, steps=150)])
    _, state = scales(TRIGGERED, lengths)
    _, first = scales(TRIGGERED, np.where(np.arange(300) < 150, lengths, np.nan))
    assert int(first.decay.period) > 0
    assert int(state.decay.period) == int(first.decay.period)
    assert float(state.surge.recent) > 3 * float(first.surge.recent) * 0.9


def test_without_a_surge_the_scale_stays_one():
    factors, state = scales(TRIGGERED, np.full(300, 700.0))
    assert np.all(factors == 1.0)
    assert int(state.decay.period) == int(state.surge.surge_step) == 0


def test_lengths_pinned_at_the_maximum():
    pinned = np.full(300, 8192.0)
    half = np.concatenate([np.full(100, 5200.0), pinned[100:]])
    with_limit = SurgeDetector(max_length=8192)
    assert int(feed(with_limit, pinned)[0].surge_step) == 0
    assert int(feed(with_limit, half)[0].surge_step) == 101
    assert int(feed(SurgeDetector(), half)[0].surge_step) == 0, "1.58 times is no surge by itself"
    below = np.concatenate([np.full(100, 3800.0), np.full(200, 6000.0)])
    assert int(feed(with_limit, below)[0].surge_step) == 0


def test_missing_lengths_are_passed_over():
    lengths = surge(110)
    lengths[[20, 50, 51, 112]] = [np.nan, 0.0, np.inf, np.nan]
    state, _ = feed(SurgeDetector(), lengths)
    assert int(state.surge_step) == steps_like(110)
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
    step = jax.jit(lambda state, x: TRIGGERED.update(jnp.ones(()), state, response_length=x)[1])
    state = step(TRIGGERED.init(jnp.ones(())), jnp.asarray([10, 20, 60]))
    assert isinstance(state, schedules.TriggeredDecayState)
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


def test_complex_updates_keep_their_imaginary_part():
    decay, updates = length_decay(1), jnp.asarray([2 + 4j])
    halved, _ = decay.update(updates, decay.init(updates))
    np.testing.assert_array_equal(np.asarray(halved), [1 + 2j])


WITH_STATE = {
    "length_triggered_decay": length_triggered_decay(),
    "length_decay": length_decay(3),
    "scheduled triggered decay": optax.inject_hyperparams(length_triggered_decay)(multiple=1.8),
    "scheduled decay": optax.inject_hyperparams(length_decay)(period=lambda _: jnp.int32(3)),
    "dynamic_loss_scale": dynamic_loss_scale(optax.chain(optax.adam(0.1), length_decay(3))),
    "AdamW": AdamW(0.1, ess_reference=0.5).transform(Decay()),
    "normalise_by_running_mean": corrections.normalise_by_running_mean(),
    "scheduled": corrections.scheduled(corrections.vexact, cap=optax.constant_schedule(2.0)),
}


@pytest.mark.parametrize("name", WITH_STATE)
def test_every_state_of_the_library_can_be_donated(name):
    transform, start = WITH_STATE[name], jnp.ones((2, 3))
    given = {"mask": jnp.ones((2, 3), bool), "log_ratio": jnp.zeros((2, 3))}
    given |= {"response_length": jnp.float32(3.0), "effective_sample_size": jnp.float32(0.5)}

    def update(state):
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam promotes dtypes implicitly
            return transform.update(start, state, start, **given)[1]

    donated = jax.jit(update, donate_argnums=0)
    state = donated(donated(transform.init(start)))
    plain = jax.jit(update)
    expected = plain(plain(transform.init(start)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: length_decay(0), "period is 0"),
        (lambda: UNTYPED.length_decay(10.5), "period is 10.5"),
        (lambda: length_decay(True), "period is True"),
        (lambda: UNTYPED.length_decay(np.bool_(True)), "period is np.True_"),
        (lambda: length_decay(2**31), "period is 2147483648"),
        (lambda: UNTYPED.length_decay(jnp.asarray(-3)), "must be a whole number of steps"),
        (lambda: UNTYPED.length_decay_schedule(1e-3, 2.0), "period is 2.0"),
        (lambda: length_decay_schedule(1e-3, 2, floor=-1.0), "floor is -1.0"),
        (lambda: scale_by_root_ess(reference=0.0), "reference is 0.0"),
        (lambda: scale_by_root_ess(reference=1.5), "reference is 1.5"),
        (lambda: length_decay(10, floor=-0.1), "floor is -0.1"),
        (lambda: length_decay(10, floor=2.0), "floor is 2.0"),
        (lambda: length_decay(10, factor=1.0), "factor is 1.0"),
        (lambda: length_triggered_decay(multiple=0.0), "multiple is 0.0"),
        (lambda: length_triggered_decay(factor=0.0), "factor is 0.0"),
        (
            lambda: UNTYPED.length_triggered_decay(detector={"rise": 2.0}),
            "detector is {'rise': 2.0}",
        ),
        (lambda: UNTYPED.length_triggered_decay(detector=SurgeDetector), "must be a SurgeDetector"),
        (lambda: SurgeDetector(rise=1.0), "rise is 1.0"),
        (lambda: SurgeDetector(noise=-1.0), "noise is -1.0"),
        (lambda: SurgeDetector(recent=20), "recent is 20"),
        (lambda: SurgeDetector(hold=4), "hold is 4"),
        (lambda: SurgeDetector(hold=25), "hold is 25"),
        (lambda: SurgeDetector(minimum=137), "minimum is 137; it must lie in .* which is 136"),
        (lambda: SurgeDetector(max_length=0), "max_length is 0"),
        (lambda: UNTYPED.SurgeDetector(rise="2"), "rise is '2'; it must be a number"),
        (lambda: UNTYPED.SurgeDetector(window=100.5), "window is 100.5; it must be a whole number"),
        (lambda: UNTYPED.length_decay(5, floor="0.1"), "floor is '0.1'; it must be a number"),
        (
            lambda: UNTYPED.length_triggered_decay(multiple="2"),
            "multiple is '2'; it must be a number",
        ),
        (lambda: UNTYPED.scale_by_root_ess(reference="1"), "reference is '1'; it must be a number"),
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


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, jnp.asarray])
def test_any_integer_is_a_period(kind):
    factors, _ = scales(length_decay(kind(50)), np.ones(120))
    expected, _ = scales(length_decay(50), np.ones(120))
    assert np.array_equal(factors, expected)


@pytest.mark.parametrize(("floor", "factor"), [(0.1, 0.5), (0.0, 0.5), (0.3, 0.5), (0.05, 0.7)])
def test_the_schedule_is_the_transform(floor, factor):
    """Bit for bit while the scale is a power of two, else to the rounding of the products."""
    rate = length_decay_schedule(3e-4, 37, floor=floor, factor=factor)
    gradients = jax.random.normal(jax.random.key(0), (400, 5))

    def path(transform):
        def step(state, gradient):
            update, state = transform.update(gradient, state)
            return state, update

        return np.asarray(jax.lax.scan(step, transform.init(gradients[0]), gradients)[1])

    with jax.numpy_dtype_promotion("standard"):
        got = path(optax.sgd(rate))
        expected = path(optax.chain(optax.sgd(3e-4), length_decay(37, floor=floor, factor=factor)))
    ulps = 1 if factor == 0.5 else 6
    np.testing.assert_array_max_ulp(got, expected, maxulp=ulps)
    scale, _ = scales(length_decay(37, floor=floor, factor=factor), np.ones(400))
    exact = np.log2(scale) % 1 == 0
    assert np.array_equal(got[exact], expected[exact])


def test_the_schedule_takes_numbers_and_arrays_and_compiles():
    rate = length_decay_schedule(1.0, cast(Any, np.int64(10)), floor=0.1)
    steps = jnp.arange(60)
    expected = scales(length_decay(10), np.ones(60))[0]
    assert np.array_equal(rate(steps), expected)
    assert np.array_equal(jax.jit(rate)(steps), expected)
    assert [float(rate(t)) for t in range(60)] == expected.tolist()
    assert rate(8).dtype == jnp.float32


def test_decay_arguments_may_be_scheduled():
    def period(step):
        return jnp.where(step < 6, 3, 100)

    with jax.numpy_dtype_promotion("standard"):
        fixed = optax.inject_hyperparams(length_decay)(period=4, floor=0.2)
        moved = optax.inject_hyperparams(length_decay)(
            period=period, floor=lambda t: 0.1 + 0.02 * t
        )
        assert np.array_equal(
            scales(fixed, np.ones(20))[0], scales(length_decay(4, floor=0.2), np.ones(20))[0]
        )
        factors, _ = scales(moved, np.ones(20))
        np.testing.assert_allclose(factors, [1, 1] + [0.5] * 3 + [0.25] * 15)
        with pytest.raises(InputError, match="must be a whole number"):
            scales(optax.inject_hyperparams(length_decay)(period=lambda t: 0.5 * t), np.ones(3))


def test_arguments_of_the_reactive_decay_may_be_scheduled():
    lengths = surge(60)
    with jax.numpy_dtype_promotion("standard"):
        make = optax.inject_hyperparams(length_triggered_decay)
        got, _ = scales(make(multiple=lambda t: 1.5, floor=lambda t: 0.2), lengths)
    expected, _ = scales(length_triggered_decay(multiple=1.5, floor=0.2), lengths)
    assert expected.min() < 0.5
    assert np.array_equal(got, expected)


def test_several_decays_are_reported_apart():
    both = optax.partition(
        {
            "actor": optax.chain(optax.sgd(1e-2), length_decay(3)),
            "critic": optax.chain(optax.adam(1e-2), length_triggered_decay()),
        },
        {"a": "actor", "c": "critic"},
    )
    params = {"a": jnp.ones(2), "c": jnp.ones(2)}
    report = schedules.decay_report((optax.EmptyState(), both.init(params)))
    assert set(report) == {
        "lr_scale/actor",
        "decay_period/actor",
        "lr_scale/critic",
        "decay_period/critic",
        "surge_step/critic",
        "response_length_recent/critic",
        "response_length_baseline/critic",
    }
    assert (int(report["decay_period/actor"]), int(report["decay_period/critic"])) == (3, 0)
    chain = optax.chain(length_decay(5), optax.identity(), length_decay(7)).init(params)
    periods = {k: int(v) for k, v in schedules.decay_report(chain).items() if "period" in k}
    assert periods == {"decay_period/0": 5, "decay_period/2": 7}


def test_the_report_of_a_flax_optimizer_is_made_of_arrays():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, length_decay(3), wrt=nnx.Param)
    report = schedules.decay_report(optimizer.opt_state)
    assert {name: float(x) for name, x in report.items()} == {"lr_scale": 1.0, "decay_period": 3.0}
    assert all(type(x) is type(jnp.ones(())) for x in report.values())


def test_the_step_is_scaled_by_the_root_of_the_effective_sample_size():
    params = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones(4)}
    transform = scale_by_root_ess(reference=0.5)

    @jax.jit
    def factor(share):
        updates, _ = transform.update(
            params, transform.init(params), params, effective_sample_size=share, other=1
        )
        return updates

    for share, expected in ((0.5, 1.0), (0.9, 1.0), (0.125, 0.5), (0.0, 0.0)):
        updates = factor(jnp.float32(share))
        assert updates["a"].dtype == jnp.bfloat16
        assert np.all(np.float32(updates["a"]) == expected)
        assert np.all(np.asarray(updates["b"]) == expected)
    assert np.all(np.isnan(factor(jnp.float32(np.nan))["b"]))
    with pytest.raises(InputError, match="needs the extra argument 'effective_sample_size'"):
        transform.update(params, transform.init(params))
    with pytest.raises(InputError, match=r"has shape \(3,\); it must be one number"):
        factor(jnp.ones(3))  # of which each column of "a" would take one


def test_after_adam_it_scales_the_step_and_before_it_does_not():
    def step(*parts) -> Any:
        chain = optax.chain(*parts)
        with jax.numpy_dtype_promotion("standard"):
            gradient = jnp.asarray([0.3, -2.0])
            state = chain.init(gradient)
            return chain.update(gradient, state, effective_sample_size=jnp.float32(0.25))[0]

    adam, scale = optax.adam(1e-2), scale_by_root_ess()
    np.testing.assert_allclose(step(adam, scale), [-0.005, 0.005], rtol=1e-5)
    np.testing.assert_allclose(step(scale, adam), [-0.01, 0.01], rtol=1e-5)


def test_effective_sample_size_is_the_share_of_the_metric():
    rng = np.random.default_rng(3)
    rollout, mask = rng.normal(-2, 0.5, (7, 5)), rng.random((7, 5)) < 0.8
    mask[:, 0] = True
    train = np.where(mask, rollout + rng.normal(0, 0.4, (7, 5)), np.nan)
    train, rollout = (jnp.asarray(x, jnp.float32) for x in (train, rollout))
    sums = jnp.sum(jnp.where(mask, train - rollout, 0.0), axis=1)
    padded = jnp.append(sums, jnp.nan)
    valid = jnp.asarray([True] * 7 + [False])
    weights = np.exp(np.float64(sums))
    share = float(share_of(padded, valid))
    assert share == pytest.approx(weights.sum() ** 2 / (7 * (weights**2).sum()), rel=1e-5)
    metric = jax.jit(lambda *batch: metrics.mismatch_metrics(*batch)["ess_sequence"])
    assert share == pytest.approx(float(metric(train, rollout, jnp.asarray(mask))), rel=1e-5)


@pytest.mark.parametrize(
    ("log_weights", "share"),
    [([0.7] * 4, 1.0), ([0, -60, -60, -60], 0.25), ([60.0] * 4, 1.0), ([0, np.nan, 0, 0], np.nan)],
)
def test_effective_sample_size_at_its_edges(log_weights, share):
    values, valid = np.float32(log_weights), np.ones(4, bool)
    np.testing.assert_allclose(share_of(values, valid), share, rtol=1e-6)
    assert float(share_of(values, ~valid)) == 1.0


@pytest.mark.parametrize("shapes", [((3, 3), (3, 3)), ((3,), (2, 3)), ((3, 1), (3,))])
def test_the_effective_sample_size_of_tokens_is_refused(shapes):
    with pytest.raises(InputError, match=r"must both be \[batch\]"):
        effective_sample_size(*(jnp.ones(shape) for shape in shapes))


def test_a_decay_of_each_device_has_a_state_of_its_own():
    """As many seeds as devices, each with its lengths, in `shard_map`."""
    decay = schedules.length_triggered_decay()
    mesh = jax.make_mesh((2,), ("seed",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("seed")

    def step(state, length):
        state = jax.tree.map(lambda x: x[0], state)
        _, state = decay.update(jnp.ones(2), state, None, response_length=length[0])
        return jax.tree.map(lambda x: x[None], state)

    states = jax.vmap(lambda _: decay.init(jnp.ones(2)))(jnp.arange(2))
    lengths = jnp.asarray([3.0, 9.0])
    split = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=rows, out_specs=rows))(states, lengths)
    alone = jax.vmap(lambda state, length: step(*jax.tree.map(lambda x: x[None], (state, length))))
    joined = jax.tree.map(lambda x: x[:, 0], jax.jit(alone)(states, lengths))
    jax.tree.map(np.testing.assert_array_equal, split, joined)


def test_the_effective_sample_size_reads_valid_as_bools():
    weights, lengths = jnp.asarray([0.0, 0.2, -1.5, 0.0]), jnp.asarray([3, 9, 5, 0])
    assert float(share_of(weights, lengths)) == float(share_of(weights, lengths > 0))
    assert float(share_of(np.zeros(0, np.float32), np.ones(0, bool))) == 1.0
