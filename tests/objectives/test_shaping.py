"""Reward shaping against float64 formulas, at its corners, and in compiled programs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tim_jax.common.errors import InputError
from tim_jax.objectives.advantages import AdaptiveKL, kl_penalty, overlong_penalty


def soft_overlong(length, longest, cache):
    if length <= longest - cache:
        return 0.0
    return (longest - cache - length) / cache if length <= longest else -1.0


@given(longest=st.integers(1, 40_000), data=st.data())
def test_overlong_penalty_matches_the_definition(longest, data):
    cache = data.draw(st.integers(1, longest))
    corners = [0, longest - cache, longest - cache + 1, longest - 1, longest, longest + 1, 50_000]
    lengths = np.asarray([*corners, data.draw(st.integers(0, 50_000))], np.int32)
    found = np.asarray(overlong_penalty(jnp.asarray(lengths), longest=longest, cache=cache))
    expected = [soft_overlong(int(n), longest, cache) for n in lengths]
    np.testing.assert_allclose(found, expected, rtol=2e-7)
    assert np.all(found[lengths >= longest] == -1.0)
    assert not np.any(found[lengths <= longest - cache])
    unsigned = overlong_penalty(jnp.asarray(lengths, jnp.uint32), longest=longest, cache=cache)
    assert np.array_equal(np.asarray(unsigned), found)


@pytest.mark.parametrize("rows", [1, 8])
def test_overlong_penalty_has_the_same_bits_compiled(rows):
    lengths = jnp.arange(rows, dtype=jnp.int32) + 92
    call = partial(overlong_penalty, longest=100, cache=41)
    assert np.array_equal(np.asarray(call(lengths)), np.asarray(jax.jit(call)(lengths)))


@pytest.mark.parametrize("cache", [0, -1, 101])
def test_overlong_penalty_refuses_a_cache_outside_the_response(cache):
    with pytest.raises(InputError, match=rf"cache is {cache}; .* \[1, 100\]"):
        overlong_penalty(jnp.ones(3, jnp.int32), longest=100, cache=cache)


def log_probs(seed, rows=6, width=9) -> tuple[Any, Any, Any]:
    """Of NumPy, which serves as well as the arrays of JAX that the library's types name."""
    rng = np.random.default_rng(seed)
    ours = -rng.exponential(size=(rows, width)).astype(np.float32)
    reference = (ours + 0.3 * rng.standard_normal((rows, width))).astype(np.float32)
    return ours, reference, np.arange(width)[None, :] < rng.integers(0, width + 1, rows)[:, None]


ESTIMATES = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(-d) - 1 + d}


@pytest.mark.parametrize("estimator", ESTIMATES)
@pytest.mark.parametrize("seed", [0, 1])
def test_kl_penalty_matches_the_definition(estimator, seed):
    ours, reference, mask = log_probs(seed)
    per_token = ESTIMATES[estimator](np.float64(ours) - reference)
    found = kl_penalty(ours, reference, mask, coefficient=0.05, estimator=estimator)
    expected = 0.05 * np.where(mask, per_token, 0.0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


def test_kl_penalty_does_not_depend_on_padding_the_program_or_what_is_off_the_mask():
    ours, reference, mask = log_probs(2)
    call: Any = partial(kl_penalty, coefficient=0.05)
    expected = np.asarray(call(ours, reference, mask))
    assert np.array_equal(np.asarray(jax.jit(call)(ours, reference, mask)), expected)
    dirty = [np.where(mask, x, np.float32(np.nan)) for x in (ours, reference)]
    padded = [np.pad(x, ((0, 0), (0, 11)), constant_values=np.nan) for x in dirty]
    longer = np.pad(mask, ((0, 0), (0, 11)))
    assert np.array_equal(np.asarray(call(*padded, longer))[:, :9], expected)
    assert not np.any(call(*padded, longer)[:, 9:])
    # Traced, as an adaptive coefficient is, and taken off a reward in the same program.
    taken_off = jax.jit(lambda r, c: r - kl_penalty(ours, reference, mask, coefficient=c))
    rewards = np.float32(np.random.default_rng(0).standard_normal((6, 9)))
    found = np.asarray(taken_off(rewards, jnp.float32(0.05)))
    assert np.array_equal(found, rewards - expected)


def test_kl_penalty_refuses_wrong_input():
    ours, reference, mask = log_probs(3)
    with pytest.raises(InputError, match=r"\(6, 9\), \(6, 8\) and \(6, 9\)"):
        kl_penalty(ours, reference[:, 1:], mask, coefficient=0.1)
    for coefficient in (-0.1, float("nan")):
        with pytest.raises(InputError, match=f"coefficient is {coefficient}"):
            kl_penalty(ours, reference, mask, coefficient=coefficient)


@given(
    coefficient=st.floats(0, 10, width=32),
    kl=st.floats(-50, 50, width=32),
    sequences=st.integers(0, 49_999),
)
def test_the_coefficient_follows_the_definition(coefficient, kl, sequences):
    control = AdaptiveKL(target=6.0)
    found = control.update(jnp.float32(coefficient), jnp.float32(kl), sequences=sequences)
    error = np.clip(kl / 6.0 - 1.0, -0.2, 0.2)
    expected = coefficient * (1.0 + error * sequences / 10_000)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * coefficient + 1e-30)
    assert found >= 0.0


def test_the_coefficient_rises_above_the_target_and_falls_below_it():
    control = AdaptiveKL(target=2.0, horizon=100)
    start = jnp.float32(0.1)
    rest, up, down = (
        float(control.update(start, jnp.float32(kl), sequences=10)) for kl in (2.0, 9.0, 0.1)
    )
    assert rest == np.float32(0.1)
    np.testing.assert_allclose([up, down], [0.102, 0.098], rtol=1e-6)


@pytest.mark.parametrize("kl", [np.nan, np.inf, -np.inf])
def test_a_divergence_that_is_not_finite_changes_nothing(kl):
    control = AdaptiveKL(target=2.0)
    assert control.update(jnp.float32(0.1), jnp.float32(kl), sequences=512) == np.float32(0.1)


def test_the_controller_has_the_same_bits_compiled():
    call = partial(AdaptiveKL(target=0.7, horizon=10_000).update, sequences=384)
    pairs = np.random.default_rng(0).uniform(0, 2, (64, 2)).astype(np.float32)
    compiled = jax.jit(call)
    for coefficient, kl in pairs:
        assert call(jnp.float32(coefficient), jnp.float32(kl)) == compiled(coefficient, kl)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, "target is 0.0"),
        ({"target": float("nan")}, "target is nan"),
        ({"target": 1.0, "horizon": 0}, "horizon is 0"),
    ],
)
def test_a_wrong_controller_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        AdaptiveKL(**options)


@pytest.mark.parametrize("sequences", [-1, 50, 1000])
def test_a_step_that_could_end_the_penalty_is_refused(sequences):
    control = AdaptiveKL(target=1.0, horizon=10)
    with pytest.raises(InputError, match=rf"sequences is {sequences}; .* \[0, 50\)"):
        control.update(jnp.float32(0.1), jnp.float32(1.0), sequences=sequences)
