"""Estimates of bias, angle and variance from pairs of noisy gradients."""

import numpy as np
import pytest

from tim_jax.instruments.study import findings
from tim_jax.instruments.study.measurement import compare, inner_products, jackknife, mean

SIZE, PAIRS = 40, 24


def drawn(rng, *, bias=0.3, noise=1.0, own=0.2):
    """Exact estimates and others with a known bias, most of whose noise they have in common."""
    truth, away = np.zeros(SIZE), np.zeros(SIZE)
    truth[0], away[1] = 2.0, bias
    shared = noise * rng.standard_normal((PAIRS, SIZE))
    exact = truth + shared
    other = truth + away + shared + own * rng.standard_normal((PAIRS, SIZE))
    return exact.astype(np.float32), other.astype(np.float32)


def test_estimates_are_right_on_average_and_their_errors_too():
    """Of 300 repetitions: bias 0.3^2 / 4, cosine 2 / |(2, 0.3)|, variances over 4."""
    found = [compare(*drawn(np.random.default_rng(seed))) for seed in range(300)]
    expected = {"signal": 2.0, "bias": 0.0225, "cosine": 2.0 / np.hypot(2.0, 0.3)}
    expected |= {"exact_variance": SIZE / 4.0, "variance": 1.04 * SIZE / 4.0}
    for name, value in expected.items():
        values = np.array([getattr(one, name).value for one in found])
        errors = np.array([getattr(one, name).error for one in found])
        # A quotient of estimates is off by what its denominator's noise does to it: some percent.
        assert values.mean() == pytest.approx(value, rel=0.06), name
        assert np.median(errors) == pytest.approx(values.std(), rel=0.35), name


def test_pure_noise_is_not_seen_as_bias():
    seen = [compare(*drawn(np.random.default_rng(s), bias=0.0)).bias.seen for s in range(200)]
    assert np.mean(seen) < 0.1
    assert all(compare(*drawn(np.random.default_rng(s), bias=1.0)).bias.seen for s in range(20))


def test_the_same_estimates_have_no_bias_at_all():
    exact, _ = drawn(np.random.default_rng(0))
    found = compare(exact, exact)
    assert found.bias == (0.0, 0.0)
    assert not found.bias.seen
    assert found.cosine.value == 1.0
    assert found.variance == found.exact_variance


def test_inner_products_are_those_of_float64():
    vectors = np.random.default_rng(1).standard_normal((3, 70_000)).astype(np.float32)
    expected = vectors.astype(np.float64) @ vectors.astype(np.float64).T
    np.testing.assert_allclose(inner_products(vectors), expected, rtol=1e-12)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(2).standard_normal(30)
    (found,) = jackknife(lambda kept: [float(values[kept].mean())], 30)
    assert found == pytest.approx(mean(values))


def test_the_slope_is_the_exponent():
    points = [(length, 0.5 * length**1.5) for length in (4.0, 8.0, 32.0)]
    assert findings.slope(points) == pytest.approx(1.5)
    assert np.isnan(findings.slope(points[:1]))
    assert np.isnan(findings.slope([points[0]] * 2))  # of two horizons, but one length


def test_a_share_of_nothing_is_no_number():
    """No token of an objective without a baseline has a negative advantage."""
    nothing = np.zeros((5, 3), np.float32)
    found = compare(nothing, nothing)
    assert all(np.isnan(one.value) for one in (found.bias, found.variance, found.exact_variance))
    assert found.signal.value == 0.0
