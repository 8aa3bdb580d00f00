"""Log-probs of tokens under any temperature, top-k and top-p, from `evidence`, on the host."""

from typing import NamedTuple

import numpy as np

from tim_jax.instruments.diagnosis.declared import Distribution
from tim_jax.instruments.diagnosis.evidence import BETAS, Evidence

COLDEST, HOTTEST = 1.0 / BETAS[-1], 1.0 / BETAS[0]
# A share of draws that no distribution explains: such as a tie at a threshold, or a rounding.
_STRAY = 1e-5


class Chances(NamedTuple):
    """Log-probs f64[N] of the tokens under a distribution, three ways."""

    renormalised: np.ndarray  # over what the truncation keeps; a token outside counts as kept
    whole: np.ndarray  # over the whole vocabulary: the truncation is left out
    drawn: np.ndarray  # of the draw itself: nearly impossible outside of what is kept


def chances(evidence: Evidence, distribution: Distribution) -> Chances:
    """The tokens' log-probs under `distribution`.

    The log-normaliser between the inverse temperatures of the grid is a polynomial of degree 5 that
    has its value and two derivatives at both sides: good to about 1e-6 nats. A top-p set that is
    larger than the stored logits is taken to hold `top_p` of the mass; it has the tokens above
    which there is less than that. At temperature 0 the draw is the likeliest token, and the
    log-probs are those at temperature 1.
    """
    if distribution.temperature == 0:
        plain = chances(evidence, Distribution())
        greedy = np.where(evidence.above == 0, 0.0, np.log(_STRAY))
        return plain._replace(drawn=greedy)
    beta = float(np.clip(1.0 / distribution.temperature, BETAS[0], BETAS[-1]))
    normaliser = log_normaliser(evidence.moments, beta)
    scaled = beta * evidence.logit.astype(np.float64)
    whole = scaled - normaliser
    if not distribution.truncated:
        return Chances(whole, whole, whole)
    kept, inside = _kept(evidence, distribution, beta, normaliser)
    drawn = np.where(inside, whole - kept, whole + np.log(_STRAY))
    outside = np.where(inside, 0.0, np.exp(whole))
    return Chances(whole - np.log(np.exp(kept) + outside), whole, drawn)


def log_normaliser(moments: np.ndarray, beta: float) -> np.ndarray:
    """log sum_v exp(beta z_v), f64[N], by Hermite interpolation of degree 5."""
    place, x = _between(beta)
    width = BETAS[place + 1] - BETAS[place]
    at = moments[:, place : place + 2].astype(np.float64)
    (f0, g0, h0), (f1, g1, h1) = (
        (at[:, i, 0], at[:, i, 1] * width, at[:, i, 2] * width**2) for i in (0, 1)
    )
    # f0 + x g0 + x^2 h0 / 2, and what is missing from it at x = 1.
    value, slope, curve = f1 - f0 - g0 - h0 / 2, g1 - g0 - h0, h1 - h0
    c3 = 10 * value - 4 * slope + curve / 2
    c4 = -15 * value + 7 * slope - curve
    c5 = 6 * value - 3 * slope + curve / 2
    return f0 + x * g0 + x**2 * h0 / 2 + x**3 * (c3 + x * (c4 + x * c5))


def _between(beta: float) -> tuple[int, float]:
    """The place in BETAS before `beta`, and how far it is from there to the next, from 0 to 1."""
    place = int(np.clip(np.searchsorted(BETAS, beta, side="right") - 1, 0, len(BETAS) - 2))
    low, high = BETAS[place], BETAS[place + 1]
    return place, (beta - low) / (high - low)


def _kept(evidence, distribution, beta, normaliser) -> tuple[np.ndarray, np.ndarray]:
    """Log of the mass f64[N] that the truncation keeps, and whether the token is kept."""
    top = evidence.top.astype(np.float64)
    mass = np.exp(beta * top - normaliser[:, None])
    running = np.cumsum(mass, axis=1)
    count = top.shape[1]
    of_k, last = np.ones(len(top)), np.full(len(top), count)
    inside = np.ones(len(top), bool)
    if 0 < distribution.top_k <= count:
        last = np.full(len(top), distribution.top_k)
        of_k = running[:, distribution.top_k - 1]
        inside = evidence.logit >= evidence.top[:, distribution.top_k - 1]
    elif distribution.top_k:
        inside = evidence.above < distribution.top_k
    if distribution.top_p == 1:
        return np.log(of_k), inside
    reached = running >= distribution.top_p * of_k[:, None] - 1e-7
    found = reached.any(axis=1)
    place = np.where(found, np.minimum(np.argmax(reached, axis=1), last - 1), last - 1)
    rows = np.arange(len(top))
    held = np.where(found, running[rows, place], distribution.top_p * of_k)
    in_set = mass_above(evidence.mass_above, beta) < distribution.top_p * of_k
    inside &= np.where(found, evidence.logit >= evidence.top[rows, place], in_set)
    return np.log(held), inside


def mass_above(masses: np.ndarray, beta: float) -> np.ndarray:
    """Probability f64[N] of the logits above a token's, from that at BETAS, by straight lines."""
    place, x = _between(beta)
    return (1 - x) * masses[:, place].astype(np.float64) + x * masses[:, place + 1]
