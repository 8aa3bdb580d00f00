"""What an explanation is, and the likelihood by which all of them are compared.

An explanation predicts the log-prob that the system recorded for each token, and how likely each
draw was. Both are compared with the null's: the exact log-probs of the declared distribution were
recorded, and the tokens were drawn from it.

A recorded log-prob is the predicted one plus noise: Student's t with three degrees of freedom and
the scale `sqrt((s w_t)^2 + FLOOR^2)`. The tails are heavy because in every engine single tokens
differ much more than the others. The weight w_t is `1 - p_t` of the token's exact probability, at
least 0.02: noise on logits moves the log-prob of a likely token little. `s` is fitted and counts as
a parameter. FLOOR is the size of another order of sums in float32, so that agreement to the last
bit is not endlessly better than agreement to 1e-6. A token for which an explanation predicts
nothing has the density of a number anywhere within 20 nats.

Log-probs may be written with few decimals. What is within half a step of the recorded number is
then no difference: it has one density there, and noise is counted from the ends of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from scipy import optimize, special

from tim_jax.instruments.diagnosis.declared import UNSHAPED, Distribution
from tim_jax.instruments.diagnosis.evidence import (
    COLDEST,
    HOTTEST,
    Evidence,
    at_edge,
    chances,
)
from tim_jax.instruments.diagnosis.rollouts import Response

FLOOR = 2e-6
NOTHING = -np.log(20.0)
_FREEDOM = 3.0
_LEAST_WEIGHT = 0.02
WITHIN = 1e-5  # of what a fit looks for
_LOG_SCALES = np.log(np.geomspace(1e-7, 10.0, 17))
_CONSTANT = -special.betaln(0.5, _FREEDOM / 2) - 0.5 * np.log(_FREEDOM)

LEAST_MOVE = 1e-4  # nats; less is what interpolation makes of the same log-prob
# Decimal steps that are looked for: rounding to smaller ones is of the size of LEAST_MOVE.
_STEPS = (0.1, 0.01, 0.001, 0.0001)

DECISIVE = 10.0
# Sizes that others publish for sound engines beside dense models, see docs/mismatch.md: K3 1e-5 to
# 1e-3 (Miles), mean |d| 0.013 and the largest 1.2 of ten million tokens (RL-Kernel).
NORMAL_K3 = 1e-3
NORMAL_MEAN = 0.02
NORMAL_LARGEST = 2.0
# Below these an explanation names a cause, but of nothing that needs mending.
LEAST_EFFECT = 1e-3  # nats a token, over the tokens that it touches
LEAST_LOCAL = 0.05  # of the gap: low precision, and what touches less than half of the tokens
LEAST_WITHIN = 0.5  # of the gap at those tokens
OFF = 10.0  # times the noise's scale: by which logits may be off where a draw is at an edge
IMPOSSIBLE = 30.0  # nats that a draw costs of which an explanation says that it cannot be
_STRAYS = 0.5  # draws that cannot be and yet are, as a share of those that the null expects
_FACTOR = 0.5  # standard deviation of the logarithm of how far sizes may be off

Kind = Literal["none", "numerics", "fault"]


class Fit(NamedTuple):
    """A fitted noise model."""

    scale: float  # s
    densities: np.ndarray  # f64[N], log-density of each token's recorded log-prob

    @property
    def total(self) -> float:
        """The log-likelihood, in nats."""
        return float(self.densities.sum())


def densities(
    residual: np.ndarray, weight: np.ndarray, scale: float, step: float = 0.0
) -> np.ndarray:
    """Log-densities f64[N] of residuals (NaN where nothing is predicted) at a scale.

    Args:
      step: of what was recorded; residuals up to half of it are equally likely.
    """
    width = np.hypot(scale * weight, FLOOR)
    inner = np.log1p(np.square(beyond(residual, step) / width) / _FREEDOM)
    density = _CONSTANT - np.log(width) - (_FREEDOM + 1) / 2 * inner
    if step:
        density -= np.log1p(step * np.exp(_CONSTANT) / width)
    return np.where(np.isnan(residual), NOTHING, density)


def beyond(difference: np.ndarray, step: float) -> np.ndarray:
    """What of differences is more than rounding to a step makes."""
    if not step:
        return difference
    return np.sign(difference) * np.maximum(np.abs(difference) - step / 2, 0.0)


def decimal_step(recorded: np.ndarray, exact: np.ndarray) -> float:
    """The decimal step of which all recorded log-probs f64[N] are multiples, or 0.

    NaN is left out. Whole numbers are multiples of every step: if there are no others, as of tokens
    that are nearly certain, it is the least one that explains them by the exact log-probs.
    """
    seen = ~np.isnan(recorded)
    recorded, exact = recorded[seen], exact[seen]
    whole = bool((recorded == recorded.round()).all())
    if whole and np.array_equal(recorded, exact):
        return 0.0
    within = 2e-7 * np.abs(recorded)  # of float32
    for step in reversed(_STEPS) if whole else _STEPS:
        off = np.abs(recorded - step * np.round(recorded / step))
        far = whole and (np.abs(recorded - exact) > step / 2).any()
        if (off <= within).all() and not far:
            return step
    return 0.0


def fit_noise(residual: np.ndarray, weight: np.ndarray, step: float = 0.0) -> Fit:
    """The scale of greatest likelihood, and the densities there.

    Scales are looked for where the likelihood's slope, which costs a tenth of the likelihood,
    turns from growing to falling. There may be two: where half of the tokens agree exactly, the
    noise may be the floor, or that of the other tokens.
    """
    seen = ~np.isnan(residual)
    slope = partial(_slope, np.square(beyond(residual[seen], step)), np.square(weight[seen]), step)
    slopes = [slope(x) for x in _LOG_SCALES]
    tried = [_LOG_SCALES[0]] * (slopes[0] <= 0) + [_LOG_SCALES[-1]] * (slopes[-1] > 0)
    for place, (one, other) in enumerate(pairwise(slopes)):
        if one > 0 >= other:
            ends = _LOG_SCALES[place], _LOG_SCALES[place + 1]
            tried.append(cast(float, optimize.brentq(slope, *ends, xtol=WITHIN)))
    fits = (Fit(s, densities(residual, weight, s, step)) for s in map(float, np.exp(tried)))
    return max(fits, key=lambda fit: fit.total)


def _slope(square: np.ndarray, weight: np.ndarray, step: float, log_scale: float) -> float:
    """The derivative of the log-likelihood by the logarithm of the scale.

    Args:
      square: f64[N], squared residuals that are beyond rounding.
      weight: f64[N], squared weights.
    """
    moved = np.exp(2 * log_scale) * weight
    width = moved + FLOOR**2
    terms = _FREEDOM - (_FREEDOM + 1) * _FREEDOM * width / (square + _FREEDOM * width)
    if step:
        rounding = step * np.exp(_CONSTANT)
        terms += rounding / (np.sqrt(width) + rounding)
    return float((moved / width * terms).sum())


def minimum(loss: Callable[[float], float], grid: np.ndarray, *, within: float = WITHIN) -> float:
    """Where a loss is least, between the neighbours of the grid's best point."""
    best = int(np.argmin([loss(x) for x in grid]))
    bounds = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    how: Any = {"bounds": bounds, "method": "bounded", "options": {"xatol": within}}
    return float(cast(Any, optimize.minimize_scalar(loss, **how)).x)


def penalty(parameters: int, count: int) -> float:
    """What fitted parameters cost, in nats: half the Bayesian information criterion's."""
    return 0.5 * parameters * float(np.log(max(count, 2)))


@dataclass(frozen=True, eq=False)
class Explanation:
    """One account of the recorded log-probs of N tokens.

    Attributes:
        name: short, as in tables; one for all strengths of a fault.
        text: a clause for people: "the log-probs are ...".
        kind: "fault" is a mistake to mend, "numerics" another precision or order of sums.
        predicted: f64[N], the log-probs that the system would have recorded; NaN: no prediction.
        drawn: f64[N], log-probs of the draws; minus infinity: it cannot have been drawn.
        parameters: name -> fitted value.
        structure: nats of further evidence, such as where responses end, against the null.
        shows: i64[M], tokens that show it where log-probs do not.
        rows: i64[R], the responses in which it holds, if not in all.
        sizes: f64[N] if only the sizes of the differences are predicted, not themselves.
    """

    name: str
    text: str
    kind: Kind
    predicted: np.ndarray
    drawn: np.ndarray
    parameters: dict[str, float] = field(default_factory=dict)
    structure: float = 0.0
    shows: np.ndarray | None = None
    rows: np.ndarray | None = None
    sizes: np.ndarray | None = None

    def as_fault(self, name: str, text: str, **changes: Any) -> "Explanation":
        """The mistake that changes these fields and no other."""
        return replace(self, name=name, text=text, kind="fault", **changes)


@dataclass(frozen=True, eq=False)
class Tokens:
    """N recorded tokens of S responses, side by side, with the evidence of one forward.

    Attributes:
        known_step: `step` of the tokens that these are a part of; None if they are all.
    """

    responses: tuple[Response, ...]
    evidence: Evidence
    stop_tokens: tuple[int, ...]
    vocabulary: int
    tokenizer_size: int
    known_step: float | None = None

    @cached_property
    def hidden(self) -> np.ndarray:
        """bool[N], left out by a loss mask, as the output of a tool is.

        What is recorded there means nothing, and the model may not have drawn the token.
        """
        return ~np.concatenate([r.kept for r in self.responses])

    @cached_property
    def recorded(self) -> np.ndarray:
        """f64[N], NaN where a loss mask hides the token."""
        log_probs = np.concatenate([r.log_probs for r in self.responses]).astype(np.float64)
        return np.where(self.hidden, np.nan, log_probs)

    @cached_property
    def exact(self) -> np.ndarray:
        """f64[N], what is to be recorded."""
        return self.evidence.exact.astype(np.float64)

    @cached_property
    def step(self) -> float:
        """The decimal step that log-probs were rounded to, such as 0.1; 0 if they were not."""
        if self.known_step is not None:
            return self.known_step
        return decimal_step(self.recorded, self.exact)

    @cached_property
    def gap(self) -> np.ndarray:
        """f64[N], recorded less exact, as far as it is more than rounding makes."""
        return self.beside(self.exact)

    def beside(self, predicted: np.ndarray) -> np.ndarray:
        """f64[N], recorded less predicted, as far as it is more than rounding makes."""
        return beyond(self.recorded - predicted, self.step)

    @cached_property
    def null(self) -> Explanation:
        """Recorded are the exact log-probs, and the draws are those declared, or recorded."""
        _, declared = by_distribution(self)
        drawn = np.where(self.replays, self.exact, declared)
        text = "the log-probs are the declared ones"
        return Explanation("none", text, "none", self.exact, drawn)

    @cached_property
    def null_fit(self) -> Fit:
        """The noise of what is recorded about the exact log-probs."""
        return self.fit(self.exact)

    def fit(self, predicted: np.ndarray) -> Fit:
        """The noise of what is recorded about predictions f64[N]."""
        return fit_noise(self.recorded - predicted, self.weights, self.step)

    @cached_property
    def weights(self) -> np.ndarray:
        """f64[N], by which noise goes."""
        return np.maximum(-np.expm1(np.minimum(self.exact, 0.0)), _LEAST_WEIGHT)

    @cached_property
    def shows_draw(self) -> np.ndarray:
        """bool[N], tokens whose draws are evidence: at a temperature that `chances` computes."""
        declared = np.asarray([r.declared.temperature for r in self.responses])
        computed = (declared == 0) | ((declared >= COLDEST) & (declared <= HOTTEST))
        return computed[self.sequence] & ~self.hidden & ~self._at_edge

    @cached_property
    def _at_edge(self) -> np.ndarray:
        """bool[N], draws that rounding of the size that log-probs show may have let in."""
        found = np.zeros(len(self.sequence), bool)
        for declared, own in self.by_declared:
            if declared.truncated or declared.temperature == 0:
                # Log-probs of scaled logits are off by more, or less, than the logits.
                scaling = 1.0 if declared.raw else declared.temperature or 1.0
                off = OFF * self.null_fit.scale * scaling
                found[own] = at_edge(self.evidence.take(own), declared, off)
        return found

    @cached_property
    def by_declared(self) -> tuple[tuple[Distribution, np.ndarray], ...]:
        """Each declared distribution, without what is in the logits, and its tokens bool[N]."""
        each = [replace(r.declared, shaping=UNSHAPED) for r in self.responses]
        kinds = sorted(set(each), key=repr)
        of_token = np.asarray([kinds.index(one) for one in each])[self.sequence]
        return tuple((declared, of_token == number) for number, declared in enumerate(kinds))

    @cached_property
    def sequence(self) -> np.ndarray:
        """i64[N], the response of each token."""
        return np.repeat(np.arange(len(self.responses)), [len(r) for r in self.responses])

    @cached_property
    def position(self) -> np.ndarray:
        """i64[N], the place in the response."""
        return np.concatenate([np.arange(len(r)) for r in self.responses])

    @cached_property
    def lasts(self) -> np.ndarray:
        """i64[S], the last token of each response."""
        return np.cumsum([len(r) for r in self.responses]) - 1

    @cached_property
    def replays(self) -> np.ndarray:
        """bool[N], whether it is recorded what the token was drawn among."""
        return np.asarray([r.replays for r in self.responses])[self.sequence]

    def by_response(self, values: np.ndarray) -> list[np.ndarray]:
        """Values [N, ...] of the tokens of each response."""
        return np.split(values, self.lasts[:-1] + 1)

    def take(self, numbers: Sequence[int]) -> "Tokens":
        """Some of the responses."""
        inside = np.isin(self.sequence, np.asarray(numbers))
        evidence = self.evidence.take(inside)._replace(
            end_stop=self.evidence.end_stop[np.asarray(numbers)]
        )
        responses = tuple(self.responses[i] for i in numbers)
        return replace(self, responses=responses, evidence=evidence, known_step=self.step)


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
    refuted: bool = False  # whether tokens were drawn that it leaves out, as often as by the null

    @property
    def name(self) -> str:
        """The name of the explanation."""
        return self.explanation.name

    @property
    def kind(self) -> Kind:
        """The kind of the explanation."""
        return self.explanation.kind

    @property
    def by_sizes(self) -> bool:
        """Whether the sizes of the differences alone are predicted, not themselves."""
        return self.explanation.sizes is not None

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
        """f64[N], recorded less predicted, as far as it is more than rounding makes."""
        return self.tokens.beside(self.explanation.predicted)


def judge(
    explanation: Explanation, tokens: Tokens, *, total: int = 0, base: Explanation | None = None
) -> Judged:
    """Compares an explanation of `tokens` with another, which is the null if none is given.

    Args:
      total: of how many tokens these are a panel; 0 if they are all.
    """
    recorded = tokens.recorded
    before = tokens.null_fit if base is None else tokens.fit(base.predicted)
    base = base or tokens.null
    residual = tokens.beside(explanation.predicted)
    if explanation.sizes is None:
        after, odds = tokens.fit(explanation.predicted), 0.0
    else:
        # The sizes may be off by a factor near 1, which has odds of its own. Student's t with 3
        # degrees of freedom has the mean size 1.103 s.
        apart = recorded - explanation.predicted
        after = fit_noise(apart, explanation.sizes / 1.103, tokens.step)
        off = float(np.log(after.scale)) / _FACTOR
        odds = -0.5 * off**2 - float(np.log(_FACTOR * np.sqrt(2 * np.pi)))
    seen = ~tokens.hidden
    drawn = _gains_of_draws(explanation.drawn, base.drawn, tokens.shows_draw)
    gains = after.densities - before.densities + drawn
    scaling = total / len(recorded) if total else 1.0
    cost = penalty(len(explanation.parameters), len(recorded))
    gap = np.abs(tokens.beside(base.predicted))
    moved = np.abs(explanation.predicted - base.predicted)
    moved = np.where(np.isnan(moved), gap, moved)
    touched = seen & (moved > LEAST_MOVE)
    left, whole = np.abs(residual)[touched], mean_of(gap[touched])  # unpredicted: nothing is left
    return Judged(
        explanation,
        tokens,
        gain=float(gains.sum()) * scaling + explanation.structure + odds - cost,
        gains=gains,
        scale=after.scale,
        gap=mean_of(gap),
        remains=mean_of(np.abs(np.where(np.isnan(explanation.predicted), 0.0, residual))),
        effect=float(moved[touched].mean()) if touched.any() else 0.0,
        touched=touched,
        within=1.0 - float(np.nan_to_num(left).mean()) / whole if whole > 0 else 0.0,
        refuted=_is_refuted(np.isneginf(explanation.drawn) & tokens.shows_draw, drawn),
        of_draws=bool(drawn.sum() > DECISIVE and mean_of(drawn[seen]) > LEAST_EFFECT),
    )


def _gains_of_draws(drawn: np.ndarray, base: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Nats f64[N] by which draws that are `seen` are likelier than by another explanation."""
    with np.errstate(invalid="ignore"):  # what can be by neither
        gains = np.nan_to_num(drawn - base, neginf=-IMPOSSIBLE, posinf=IMPOSSIBLE)
    return np.where(seen, gains, 0.0)


def _is_refuted(impossible: np.ndarray, gains: np.ndarray) -> bool:
    """Whether of N draws about as many cannot be as were expected without a truncation.

    Where it keeps a share, the draws that it keeps gain minus its logarithm.
    """
    expected = -np.expm1(-np.maximum(gains, 0.0)).sum()
    return bool(impossible.any() and impossible.sum() >= _STRAYS * expected)


def mean_of(values: np.ndarray) -> float:
    """The mean of numbers, NaN left out; 0 of none."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else 0.0


def sizes_of(d: np.ndarray) -> dict[str, float]:
    """Mean and largest |d|, and K3, of recorded less exact log-probs; NaN is left out."""
    d = d[~np.isnan(d)]
    if not d.size:
        return {"mean": 0.0, "largest": 0.0, "k3": 0.0}
    inside = np.maximum(d, -20)  # in both terms, as K3 is else negative where the ratio is cut
    return {
        "mean": float(np.abs(d).mean()),
        "largest": float(np.abs(d).max()),
        "k3": float((np.expm1(-inside) + inside).mean()),
    }


def abnormal(sizes: dict[str, float]) -> bool:
    """Whether `sizes_of` differences are larger than those of sound engines."""
    return (
        sizes["k3"] > NORMAL_K3 or sizes["mean"] > NORMAL_MEAN or sizes["largest"] > NORMAL_LARGEST
    )


Change = Callable[[Distribution], Distribution]


def by_distribution(
    tokens: Tokens, reported: Change | None = None, drawn: Change | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(predicted, drawn), f64[N] both: recorded under one change of what is declared, drawn under
    another."""
    predicted, draws = np.empty(len(tokens.sequence)), np.empty(len(tokens.sequence))
    for declared, own in tokens.by_declared:
        evidence = tokens.evidence if own.all() else tokens.evidence.take(own)
        said = declared if reported is None else reported(declared)
        of_draw = declared if drawn is None else drawn(declared)
        at_report = chances(evidence, said)
        raw = declared.raw and reported is None
        predicted[own] = evidence.raw if raw else at_report.renormalised
        draws[own] = (at_report if of_draw == said else chances(evidence, of_draw)).drawn
    return predicted, draws
