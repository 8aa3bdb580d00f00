"""The noise that recorded log-probs have about those that an explanation predicts."""

import numpy as np
import pytest
from scipy import integrate

from tim_jax.instruments.diagnosis import noise


def test_the_noise_model_is_a_density_and_finds_its_scale():
    one = np.ones(1)
    for scale in (1e-4, 0.3):
        area, _ = integrate.quad(
            lambda x, s=scale: float(np.exp(noise.densities(x * one, one, s))[0]),
            -400 * scale, 400 * scale, points=[0.0], limit=400,
        )  # fmt: skip
        assert area == pytest.approx(1.0, abs=1e-3)
    rng = np.random.default_rng(0)
    weight = rng.uniform(0.1, 1.0, 4000)
    residual = 0.02 * weight * rng.standard_t(3, 4000)
    assert noise.fit_noise(residual, weight).scale == pytest.approx(0.02, rel=0.1)
    assert noise.fit_noise(np.zeros(10), np.ones(10)).scale < noise.FLOOR
    assert noise.densities(np.asarray([np.nan]), one, 1.0)[0] == noise.NOTHING
