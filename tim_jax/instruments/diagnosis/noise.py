"""The noise model by which explanations of recorded log-probs are compared.

A recorded log-prob is the predicted one plus noise: Student's t with three degrees of freedom and
the scale `sqrt((s w_t)^2 + FLOOR^2)`. The tails are heavy because in every engine single tokens
differ much more than the others. The weight w_t is `1 - p_t` of the token's exact probability, at
least 0.02: noise on logits moves the log-prob of a likely token little. `s` is fitted and counts as
a parameter. FLOOR is the size of another order of sums in float32, so that agreement to the last
bit is not endlessly better than agreement to 1e-6. A token for which an explanation predicts
nothing has the density of a number anywhere within 20 nats.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from scipy import optimize, special

FLOOR = 2e-6
NOTHING = -np.log(20.0)
_FREEDOM = 3.0
_LEAST_WEIGHT = 0.02
_WITHIN = 1e-5  # of what a fit looks for
_SCALES = np.geomspace(1e-7, 10.0, 33)
_CONSTANT = -special.betaln(0.5, _FREEDOM / 2) - 0.5 * np.log(_FREEDOM)
_Loss = Callable[[float], float]


class Fit(NamedTuple):
    """A fitted noise model."""

    scale: float  # s
    densities: np.ndarray  # f64[N], log-density of each token's recorded log-prob

    @property
    def total(self) -> float:
        """The log-likelihood, in nats."""
        return float(self.densities.sum())


def noise_weights(exact: np.ndarray) -> np.ndarray:
    """w_t f64[N] of exact log-probs f32[N]."""
    return np.maximum(-np.expm1(np.minimum(exact.astype(np.float64), 0.0)), _LEAST_WEIGHT)


def densities(residual: np.ndarray, weight: np.ndarray, scale: float) -> np.ndarray:
    """Log-densities f64[N] of residuals (NaN where nothing is predicted) at a scale."""
    width = np.hypot(scale * weight, FLOOR)
    inner = np.log1p(np.square(residual / width) / _FREEDOM)
    density = _CONSTANT - np.log(width) - (_FREEDOM + 1) / 2 * inner
    return np.where(np.isnan(residual), NOTHING, density)


def fit_noise(residual: np.ndarray, weight: np.ndarray) -> Fit:
    """The scale of greatest likelihood, and the densities there."""

    def loss(log_scale: float) -> float:
        return -float(densities(residual, weight, np.exp(log_scale)).sum())

    scale = float(np.exp(grid_minimum(loss, np.log(_SCALES))))
    return Fit(scale, densities(residual, weight, scale))


def grid_minimum(loss: _Loss, grid: np.ndarray, *, within: float = _WITHIN) -> float:
    """Where a loss is least, between the neighbours of the grid's best point."""
    best = int(np.argmin([loss(x) for x in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    return minimum(loss, low, high, within=within)


def minimum(loss: _Loss, low: float, high: float, *, within: float = _WITHIN) -> float:
    """Where a loss is least between two places."""
    how: Any = {"bounds": (low, high), "method": "bounded", "options": {"xatol": within}}
    return float(cast(Any, optimize.minimize_scalar(loss, **how)).x)


def penalty(parameters: int, count: int) -> float:
    """What fitted parameters cost, in nats: half the Bayesian information criterion's."""
    return 0.5 * parameters * float(np.log(max(count, 2)))
