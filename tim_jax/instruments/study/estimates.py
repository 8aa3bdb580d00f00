"""What two sets of gradient estimates say of each other, without the bias of squared noise.

A mean of K noisy vectors is longer than its expectation. So every square here is a mean of products
of *different* estimates (a U-statistic), whose expectation is that of the true vectors; it may come
out below 0 where there is nothing but noise. All of it follows from the inner products of the
vectors, and so do the standard errors, by the jackknife over the K pairs.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A number with its standard error."""

    value: float
    error: float

    @property
    def seen(self) -> bool:
        """Whether the number is more than two standard errors above 0."""
        return self.value > 2.0 * self.error > 0.0


class Compared(NamedTuple):
    """A gradient estimator against the exact one, in squares of the exact gradient's norm.

    Attributes:
        bias: |E m - E p|^2 / |E p|^2, of the other estimates m and the exact ones p.
        cosine: of the angle between E m and E p.
        variance: tr Cov(m) / |E p|^2, of one batch.
        exact_variance: tr Cov(p) / |E p|^2.
        signal: |E p|, the norm of the exact gradient.
    """

    bias: Estimate
    cosine: Estimate
    variance: Estimate
    exact_variance: Estimate
    signal: Estimate


def compare(exact: np.ndarray, other: np.ndarray) -> Compared:
    """Compares estimates f32[K, N] with exact ones f32[K, N]; row k of both has the same noise.

    The closer the noise of a pair, the smaller the error of the bias: common random numbers.
    """
    products = inner_products(np.concatenate([exact, other]))
    pairs = len(exact)
    one, both = slice(0, pairs), slice(pairs, 2 * pairs)
    pp, mm, mp = products[one, one], products[both, both], products[both, one]
    dd = mm - mp - mp.T + pp

    def ratio(first: np.ndarray, second: np.ndarray) -> Callable[[np.ndarray], float]:
        return lambda kept: _share(_square(first, kept), _square(second, kept))

    def cosine(kept: np.ndarray) -> float:
        size = _square(mm, kept) * _square(pp, kept)
        return float(_square(mp, kept) / np.sqrt(size)) if size > 0 else np.nan

    def variance(of: np.ndarray) -> Callable[[np.ndarray], float]:
        def share(kept: np.ndarray) -> float:
            mean = float(np.mean(np.diag(of)[kept]))
            return _share(mean - _square(of, kept), _square(pp, kept))

        return share

    def signal(kept: np.ndarray) -> float:
        return float(np.sqrt(max(_square(pp, kept), 0.0)))

    return Compared(
        bias=jackknife(ratio(dd, pp), pairs),
        cosine=jackknife(cosine, pairs),
        variance=jackknife(variance(mm), pairs),
        exact_variance=jackknife(variance(pp), pairs),
        signal=jackknife(signal, pairs),
    )


def inner_products(vectors: np.ndarray) -> np.ndarray:
    """f64[K, K] of f32[K, N], in blocks so that no float64 copy of all is made."""
    total = np.zeros((len(vectors), len(vectors)))
    for start in range(0, vectors.shape[1], 1 << 16):
        block = vectors[:, start : start + (1 << 16)].astype(np.float64)
        total += block @ block.T
    return total


def _square(products: np.ndarray, kept: np.ndarray) -> float:
    """The mean of the products of different estimates, f64[], of the rows that are kept."""
    inside = products[np.ix_(kept, kept)]
    count = len(kept)
    return float((inside.sum() - np.trace(inside)) / (count * (count - 1)))


def _share(part: float, whole: float) -> float:
    """NaN of nothing: without a baseline, say, no token has a negative advantage."""
    return part / whole if whole else np.nan


def jackknife(statistic: Callable[[np.ndarray], float], count: int) -> Estimate:
    """A statistic of rows 0..count-1 with its standard error (Quenouille, Tukey)."""
    every = np.arange(count)
    without = np.array([statistic(np.delete(every, k)) for k in every])
    spread = np.sum((without - without.mean()) ** 2) * (count - 1) / count
    return Estimate(float(statistic(every)), float(np.sqrt(spread)))


def mean(values: np.ndarray) -> Estimate:
    """The mean of f64[K] independent values with its standard error."""
    return Estimate(float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))))
