"""An explanation, compared with the null by likelihood, and by how much of the gap it explains.

All numbers are nats.
"""

from dataclasses import dataclass

import numpy as np

from tim_jax.instruments.diagnosis import noise
from tim_jax.instruments.diagnosis.explanations import Explanation, Tokens

DECISIVE = 10.0
# Sizes that others publish for sound engines beside dense models, see docs/mismatch.md: K3 1e-5 to
# 1e-3 (Miles), mean |d| 0.013 and the largest 1.2 of ten million tokens (RL-Kernel).
NORMAL_K3 = 1e-3
NORMAL_MEAN = 0.02
NORMAL_LARGEST = 2.0
# By how much the sizes of differences may exceed those of the numerics that they are put down to.
# K3 goes with the square.
MEAN_FACTOR = 2.0
_K3_FACTOR = 8.0
_LARGEST_FACTOR = 4.0
LEAST_MOVE = 1e-4  # nats; less is what interpolation makes of the same log-prob
# Below these an explanation names a cause, but of nothing that needs mending.
LEAST_EFFECT = 1e-3  # nats a token, over the tokens that it touches
LEAST_SHARE = 0.25  # of the gap
LEAST_LOCAL = 0.05  # the same for low precision, and for what touches less than half of the tokens
LEAST_WITHIN = 0.5  # of the gap at those tokens


@dataclass(frozen=True, eq=False)
class Judged:
    """An explanation, compared with the null on `tokens` (all of them, or a panel)."""

    explanation: Explanation
    tokens: Tokens
    gain: float  # nats, for all tokens
    gains: np.ndarray  # f64[N], of each of `tokens`
    scale: float  # of the noise that remains
    gap: float  # mean |d| before
    remains: float  # mean |d| after
    effect: float  # mean |predicted - exact| over the tokens that it touches
    touched: np.ndarray  # bool[N], tokens of which it predicts another log-prob than the null
    within: float  # the share of the gap at those that it explains
    of_draws: bool  # whether it is decisively better at the draws

    @property
    def share(self) -> float:
        """The share of the gap that it explains."""
        return 1.0 - self.remains / self.gap if self.gap > 0 else 0.0

    @property
    def moves(self) -> bool:
        """Whether it is about log-probs, and not about draws or ends alone."""
        return bool(self.touched.any())

    @property
    def local(self) -> bool:
        """Whether it is about a part of the log-probs, less than half of them."""
        return self.moves and 2 * self.touched.sum() < (~self.tokens.hidden).sum()

    @property
    def residual(self) -> np.ndarray:
        """f64[N], recorded less predicted."""
        return self.tokens.recorded - self.explanation.predicted


def fit(explanation: Explanation, tokens: Tokens) -> noise.Fit:
    """The noise about what an explanation predicts."""
    weight = noise.weights(tokens.evidence.exact)
    return noise.fit(tokens.recorded - explanation.predicted, weight)


def judge(
    explanation: Explanation,
    tokens: Tokens,
    base: Explanation,
    total: int = 0,
    *,
    before: noise.Fit | None = None,
) -> Judged:
    """Compares an explanation with the null.

    Args:
      explanation: to judge.
      tokens: that it is about.
      base: the null.
      total: of how many tokens these are a panel; 0 if they are all.
      before: the fit of the null, if it is known.
    """
    recorded = tokens.recorded
    before = fit(base, tokens) if before is None else before
    residual = recorded - explanation.predicted
    if explanation.sizes is not None:
        after, odds = _by_sizes(residual, explanation.sizes)
    else:
        after, odds = fit(explanation, tokens), 0.0
    seen = ~tokens.hidden
    drawn = np.where(seen, explanation.drawn - base.drawn, 0.0)
    gains = after.densities - before.densities + drawn
    scaling = total / len(recorded) if total else 1.0
    cost = noise.penalty(len(explanation.parameters), len(recorded))
    gap = np.abs(recorded - base.predicted)
    moved = np.abs(explanation.predicted - base.predicted)
    moved = np.where(np.isnan(moved), gap, moved)
    touched = seen & (moved > LEAST_MOVE)
    return Judged(
        explanation,
        tokens,
        gain=float(gains.sum()) * scaling + explanation.structure + odds - cost,
        gains=gains,
        scale=after.scale,
        gap=_mean(gap),
        remains=_mean(np.abs(np.where(np.isnan(explanation.predicted), 0.0, residual))),
        effect=float(moved[touched].mean()) if touched.any() else 0.0,
        touched=touched,
        within=_share(np.abs(residual)[touched], gap[touched]),
        of_draws=bool(drawn.sum() > DECISIVE and _mean(drawn[seen]) > LEAST_EFFECT),
    )


def _share(remains: np.ndarray, gap: np.ndarray) -> float:
    """The share of a gap that is gone; what is not predicted counts as gone."""
    whole = _mean(gap)
    return 1.0 - float(np.nan_to_num(remains).mean()) / whole if whole > 0 else 0.0


def _mean(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else 0.0


_FACTOR = 0.5  # standard deviation of the logarithm of how far sizes may be off


def _by_sizes(residual: np.ndarray, sizes: np.ndarray) -> tuple[noise.Fit, float]:
    """The fit of noise whose size is predicted up to a factor near 1, and the factor's odds."""
    # Student's t with 3 degrees of freedom has the mean size 1.103 s.
    fitted = noise.fit(residual, sizes / 1.103)
    off = float(np.log(fitted.scale)) / _FACTOR
    return fitted, -0.5 * off**2 - float(np.log(_FACTOR * np.sqrt(2 * np.pi)))


def material(judged: Judged) -> bool:
    """Whether an explanation is of something that matters, and not of a trifle in the noise.

    One of log-probs must explain a share of the gap, whatever else speaks for it. One of the draws
    alone, or of where responses end, leaves the gap as it is.
    """
    if not judged.moves:
        return judged.explanation.structure > DECISIVE or judged.of_draws
    if judged.explanation.kind != "fault":
        return judged.share >= LEAST_LOCAL
    if judged.local and judged.within < LEAST_WITHIN:
        return False
    least = LEAST_LOCAL if judged.local else LEAST_SHARE
    return judged.share >= least and judged.effect > LEAST_EFFECT


def sizes_of(d: np.ndarray) -> dict[str, float]:
    """Mean and largest |d|, and K3, of recorded less exact log-probs; NaN is left out."""
    d = d[~np.isnan(d)]
    if not d.size:
        return {"mean": 0.0, "largest": 0.0, "k3": 0.0}
    ratio = np.exp(np.clip(-d, -20, 20))
    return {
        "mean": float(np.abs(d).mean()),
        "largest": float(np.abs(d).max()),
        "k3": float((ratio - 1 + d).mean()),
    }


def alike(sizes: dict[str, float], made: dict[str, float], *, larger: float = 1.0) -> bool:
    """Whether differences have the sizes that some numerics make: mean, K3 and the largest.

    `larger`: of how many times as many tokens they are. The largest of n draws from tails such as
    those of `noise` grows with the cube root of n, and is three times as large by chance once in
    thirty.
    """
    most = _LARGEST_FACTOR * made["largest"] * larger ** (1 / 3)
    return (
        sizes["mean"] <= MEAN_FACTOR * made["mean"]
        and sizes["k3"] <= _K3_FACTOR * made["k3"]
        and sizes["largest"] <= max(most, NORMAL_LARGEST)
    )


def abnormal(sizes: dict[str, float]) -> bool:
    """Whether `sizes_of` differences are larger than those of sound engines."""
    return (
        sizes["k3"] > NORMAL_K3 or sizes["mean"] > NORMAL_MEAN or sizes["largest"] > NORMAL_LARGEST
    )
