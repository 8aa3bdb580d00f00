"""The noise model: how likely recorded log-probs are, given what an explanation predicts.

A recorded log-prob is the predicted one plus noise, Student's t with three degrees of freedom and
the scale `sqrt((s w_t)^2 + FLOOR^2)`. Heavy tails, because single tokens differ much more than the
others in every engine. The weight w_t is `1 - p_t` of the token's exact probability, at least 0.02:
noise on logits moves the log-prob of a likely token little. `s` is fitted and counts as a
parameter. FLOOR is the size of another order of sums in float32, so that agreement to the last bit
is not endlessly better than agreement to 1e-6. A token for which an explanation predicts nothing
has the density of a number anywhere within 20 nats.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from scipy import optimize, special

FLOOR = 2e-6
NOTHING = -np.log(20.0)
_FREEDOM = 3.0
_LEAST_WEIGHT = 0.02
_SCALES = np.geomspace(1e-7, 10.0, 33)
_CONSTANT = (
    special.gammaln((_FREEDOM + 1) / 2)
    - special.gammaln(_FREEDOM / 2)
    - 0.5 * np.log(_FREEDOM * np.pi)
)


class Fit(NamedTuple):
    """A fitted noise model."""

    scale: float  # s
    densities: np.ndarray  # f64[N], log-density of each token's recorded log-prob

    @property
    def total(self) -> float:
        """The log-likelihood, in nats."""
        return float(self.densities.sum())


def weights(exact: np.ndarray) -> np.ndarray:
    """w_t f64[N] of exact log-probs f32[N]."""
    return np.maximum(-np.expm1(np.minimum(exact.astype(np.float64), 0.0)), _LEAST_WEIGHT)


def densities(residual: np.ndarray, weight: np.ndarray, scale: float) -> np.ndarray:
    """Log-densities f64[N] of residuals (NaN where nothing is predicted) at a scale."""
    width = np.hypot(scale * weight, FLOOR)
    inner = np.log1p(np.square(residual / width) / _FREEDOM)
    found = _CONSTANT - np.log(width) - (_FREEDOM + 1) / 2 * inner
    return np.where(np.isnan(residual), NOTHING, found)


def fit(residual: np.ndarray, weight: np.ndarray) -> Fit:
    """The scale of greatest likelihood, and the densities there."""

    def loss(log_scale: float) -> float:
        return -float(densities(residual, weight, np.exp(log_scale)).sum())

    grid = np.log(_SCALES)
    best = int(np.argmin([loss(x) for x in grid]))
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    scale = float(np.exp(least(loss, *bounds)))
    return Fit(scale, densities(residual, weight, scale))


def least(loss: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one number is least between two."""
    found = cast(Any, optimize.minimize_scalar(loss, bounds=(low, high), method="bounded"))
    return float(found.x)


def penalty(parameters: int, count: int) -> float:
    """What fitted parameters cost, in nats: half the Bayesian information criterion's."""
    return 0.5 * parameters * float(np.log(max(count, 2)))
