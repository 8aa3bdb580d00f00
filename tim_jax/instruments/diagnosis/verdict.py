"""Scores rollouts, tries the explanations, and says which one explains how much.

All numbers are nats. An explanation's `gain` is its log-likelihood less the null's (recorded are
the exact log-probs of the declared distribution but for noise), less what its fitted parameters
cost. A gain of `DECISIVE` is odds of 22,000 to 1.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tim_jax import mismatch
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.instruments.diagnosis import parts, variants
from tim_jax.instruments.diagnosis.evidence import Forward, chosen_alike, gather
from tim_jax.instruments.diagnosis.explanations import (
    LEAST_MOVE,
    Explanation,
    Fit,
    Tokens,
    fit_noise,
    noise_weights,
    null,
    penalty,
    reporting,
)
from tim_jax.instruments.diagnosis.parts import Part
from tim_jax.instruments.diagnosis.rollouts import Response
from tim_jax.instruments.diagnosis.turns import Broken, find_breaks
from tim_jax.instruments.diagnosis.variants import Variant
from tim_jax.mismatch import Entry
from tim_jax.model.weights import Weights

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
# Below these an explanation names a cause, but of nothing that needs mending.
LEAST_EFFECT = 1e-3  # nats a token, over the tokens that it touches
LEAST_SHARE = 0.25  # of the gap
LEAST_LOCAL = 0.05  # the same for low precision, and for what touches less than half of the tokens
LEAST_WITHIN = 0.5  # of the gap at those tokens
# Sizes that are normal on the model at hand, if its logits make half precision cost more than the
# published ones.
HALF_PRECISION = tuple(
    mismatch.label(mismatch.compute(dtype=dtype)) for dtype in ("bfloat16", "float16")
)
_ROUNDING = 1e-5  # differences of another order of sums in float32: nothing else is tried
_NOTHING_LEFT = 1e-4  # nats; about what another order of sums and interpolation leave
_SHOWING = 3.0  # nats of gain by which a single token shows an explanation
_PANEL = 2048  # tokens that other forwards are tried on, or about as many, at least
_MOST = 0.9  # of the gap: what explains more of it needs no layers looked at
_FACTOR = 0.5  # standard deviation of the logarithm of how far sizes may be off


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


def fit(explanation: Explanation, tokens: Tokens) -> Fit:
    """The noise about what an explanation predicts."""
    return fit_noise(tokens.recorded - explanation.predicted, noise_weights(tokens.evidence.exact))


def judge(
    explanation: Explanation,
    tokens: Tokens,
    base: Explanation,
    total: int = 0,
    *,
    before: Fit | None = None,
) -> Judged:
    """Compares an explanation of `tokens` with the null, `base`.

    Args:
      total: of how many tokens these are a panel; 0 if they are all.
      before: the fit of the null, if it is known.
    """
    recorded = tokens.recorded
    before = fit(base, tokens) if before is None else before
    residual = recorded - explanation.predicted
    if explanation.sizes is None:
        after, odds = fit(explanation, tokens), 0.0
    else:
        # The sizes may be off by a factor near 1, which has odds of its own. Student's t with 3
        # degrees of freedom has the mean size 1.103 s.
        after = fit_noise(residual, explanation.sizes / 1.103)
        off = float(np.log(after.scale)) / _FACTOR
        odds = -0.5 * off**2 - float(np.log(_FACTOR * np.sqrt(2 * np.pi)))
    seen = ~tokens.hidden
    drawn = np.where(seen, explanation.drawn - base.drawn, 0.0)
    gains = after.densities - before.densities + drawn
    scaling = total / len(recorded) if total else 1.0
    cost = penalty(len(explanation.parameters), len(recorded))
    gap = np.abs(recorded - base.predicted)
    moved = np.abs(explanation.predicted - base.predicted)
    moved = np.where(np.isnan(moved), gap, moved)
    touched = seen & (moved > LEAST_MOVE)
    left, whole = np.abs(residual)[touched], _mean(gap[touched])  # unpredicted: nothing is left
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
        within=1.0 - float(np.nan_to_num(left).mean()) / whole if whole > 0 else 0.0,
        of_draws=bool(drawn.sum() > DECISIVE and _mean(drawn[seen]) > LEAST_EFFECT),
    )


def _mean(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else 0.0


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
    the noise model's grows with the cube root of n, and is three times as large by chance once in
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


State = Literal["exact", "numerics", "fault"]


@dataclass(frozen=True)
class Place:
    """A token that shows something."""

    where: str  # file and line
    position: int
    token: int
    recorded: float
    exact: float
    predicted: float | None


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a diagnosis found.

    Attributes:
        state: "exact", "numerics" (differences of a normal size) or "fault".
        judged: the explanations that were tried, the most likely first; the null is not among them.
        best: the one that is taken, or None.
        second: what explains most of what it leaves, or None.
        first: the first token that shows it, or None.
        half: half precision, of which the differences have about the sizes, or None. Its `scale` is
            by how much they are larger.
        part: the bad part of the tokens of a fault, if the others are another matter, or None.
        agreement: f64[L], the share of the recorded experts of each layer that the model takes as
            well, if they are recorded.
        breaks: the episodes of several turns that do not hold what was drawn.
    """

    state: State
    tokens: Tokens
    judged: tuple[Judged, ...]
    best: Judged | None
    second: Judged | None
    first: Place | None
    sizes: dict[str, float]
    half: Judged | None = None
    part: Part | None = None
    agreement: np.ndarray | None = None
    breaks: tuple[Broken, ...] = ()

    @property
    def normal(self) -> bool:
        """False for a fault."""
        return self.state != "fault"


def diagnose(
    responses: Sequence[Response],
    forward: Forward,
    *,
    others: Sequence[tuple[str, Weights]] = (),
    tokenizer: Any = None,
    sources: Sequence[Entry] = variants.SOURCES,
) -> Verdict:
    """Says what is wrong with recorded log-probs, if anything.

    Args:
      responses: of `rollouts.collect`.
      forward: the model that is said to have drawn them.
      others: named weights that may have drawn them instead: earlier checkpoints, or a base model
        without its adapter.
      tokenizer: for other prompts, and for the turns of episodes.
      sources: of low precision that are tried; each compiles a forward.

    Raises:
      InputError: the loss masks leave no token to compare.
    """
    _check_masks(responses)
    tokens = Tokens(
        tuple(responses),
        gather(forward, responses),
        forward.stop_tokens,
        forward.execution.config.vocab_size,
        forward.tokenizer_size,
    )
    base = null(tokens)
    first = (*reporting(tokens), *parts.ending(tokens), *parts.of_tokens(tokens, base))
    judged = _judge_all(first, tokens, base)
    sizes = sizes_of(tokens.recorded - base.predicted)
    if sizes["largest"] > _ROUNDING and not any(map(_leaves_nothing, judged)):
        panel = _panel(tokens)
        most = len(sources) + 3 * len(others) + variants.OTHERS
        tried = _announced(_variants(panel, forward, others, tokenizer, sources), most)
        more = (one for variant in tried for one in variants.explanations(variant, panel))
        judged += _judge_all(more, panel, null(panel), len(tokens.sequence))
        judged += _in_some_layers(judged, panel, forward, sizes, len(tokens.sequence))
    found = _decide(tokens, base, sorted(judged, key=lambda one: -one.gain), sizes)
    breaks = () if tokenizer is None else find_breaks(tokenizer, responses)
    state = "fault" if any(one.fault for one in breaks) else found.state
    return replace(found, agreement=_agreement(tokens, forward), breaks=breaks, state=state)


def _agreement(tokens: Tokens, forward: Forward) -> np.ndarray | None:
    routed = [r for r in _panel(tokens).responses if r.routes is not None]
    return chosen_alike(forward, routed).mean(axis=0) if routed else None


def _in_some_layers(
    judged: Sequence[Judged],
    panel: Tokens,
    forward: Forward,
    sizes: dict[str, float],
    total: int,
) -> list[Judged]:
    """Quantised weights in some layers, if there is a gap that nothing explains most of."""
    known = any(one.gain > DECISIVE and one.moves and one.share > _MOST for one in judged)
    if known or sizes["mean"] < LEAST_EFFECT:
        return []
    named = [mismatch.label(entry) for entry in variants.SOURCES if entry.kind == "weights"]
    wholes = [
        one.explanation
        for one in judged
        if one.explanation.name in named and one.explanation.sizes is None
    ]
    if not wholes:
        return []
    nearest = max(wholes, key=lambda one: variants.goes_with(panel, one))
    found = variants.in_some_layers(forward, panel, nearest)
    return [] if found is None else [judge(found, panel, null(panel), total)]


def _check_masks(responses: Sequence[Response]) -> None:
    """Refuses responses that are hidden as a whole: nothing compared is not a pass."""
    if any(r.mask is None or r.mask.any() for r in responses):
        return
    raise InputError(
        f"rollouts: mask is 0 at all {sum(map(len, responses))} response tokens, from"
        f" {responses[0].where} on, so there is nothing to compare; it must be 1 at tokens that the"
        " model drew"
    )


def _judge_all(
    tried: Iterable[Explanation], tokens: Tokens, base: Explanation, total: int = 0
) -> list[Judged]:
    """Explanations as they are, and as they hold in some rows alone."""
    before = fit(base, tokens)
    whole = [judge(one, tokens, base, total, before=before) for one in tried]
    faults = [one for one in whole if one.explanation.kind == "fault"]
    some = [parts.in_some_rows(one.explanation, tokens, base, one.gains) for one in faults]
    some += [
        parts.up_to_some_token(one.explanation, tokens, base, one.gains)
        for one in faults
        if one.explanation.name.startswith(variants.OF_WEIGHTS)
    ]
    more = (judge(one, tokens, base, total, before=before) for one in some if one is not None)
    return [*whole, *more]


def _decide(
    tokens: Tokens, base: Explanation, judged: Sequence[Judged], sizes: dict[str, float]
) -> Verdict:
    best = _best([one for one in judged if one.gain > DECISIVE and material(one)])
    fault = best is not None and best.explanation.kind == "fault"
    state: State = "numerics" if sizes["largest"] > 0 else "exact"
    half = _half_precision(judged, sizes, len(tokens.sequence))
    if fault or (abnormal(sizes) and half is None):
        state = "fault"
    second = _second(best, judged, tokens) if best is not None and fault else None
    part = None
    if best is not None and fault:
        part = parts.part_of(best.tokens, best.touched) if best.local else None
    elif state == "fault":
        part = parts.part_of(tokens, parts.outside(tokens, base.predicted))
    first = _first(best, tokens, base, part) if state == "fault" else None
    return Verdict(state, tokens, tuple(judged), best, second, first, sizes, half, part)


def _best(judged: Sequence[Judged]) -> Judged | None:
    """The most likely, or one of its kind that is not decidedly less likely and fits fewer numbers.

    A fitted temperature of 0.998 follows rounding a little better than raw log-probs do.
    """
    if not judged:
        return None
    top = judged[0]
    if top.explanation.kind == "numerics":
        # Low precision of the bulk is likelier than a fault of a part, and does not excuse it.
        faults = [one for one in judged if one.explanation.kind == "fault" and one.local]
        top = next((one for one in faults if not _covers(top, one)), top)
    near = [
        one
        for one in judged
        if one.gain > top.gain - DECISIVE and one.explanation.kind == top.explanation.kind
    ]
    return min(near, key=_count_fitted)


def _covers(numerics: Judged, fault: Judged) -> bool:
    """Whether low precision explains most of the gap at the tokens that a fault touches."""
    inside = np.isin(fault.tokens.sequence, _numbers(fault.tokens, numerics.tokens))
    if inside.sum() != len(numerics.tokens.sequence):
        return False
    own = fault.touched[inside]
    gap = np.abs(numerics.tokens.recorded - numerics.tokens.evidence.exact)[own]
    left = np.abs(numerics.residual[own])
    return not own.any() or bool(left.mean() < gap.mean() * (1 - LEAST_WITHIN))


def _count_fitted(judged: Judged) -> tuple[int, float]:
    """How many numbers it fits, and then how unlikely it is. The choice of rows is one of them."""
    one = judged.explanation
    return len(one.parameters) + (one.rows is not None), -judged.gain


def _half_precision(judged: Sequence[Judged], sizes: dict[str, float], total: int) -> Judged | None:
    """Half precision on this model, if the differences are hardly larger than what it makes.

    By the scale of the bulk, and by mean, largest and K3 of all.
    """
    made = {
        one.explanation.name: sizes_of(
            np.where(
                one.tokens.hidden, np.nan, one.explanation.predicted - one.tokens.evidence.exact
            )
        )
        for one in judged
        if one.explanation.kind == "numerics" and one.explanation.sizes is None
    }
    fitting = (
        one
        for one in judged
        if one.explanation.sizes is not None
        and one.explanation.name in HALF_PRECISION
        and one.scale <= MEAN_FACTOR
        and alike(sizes, made[one.explanation.name], larger=total / len(one.tokens.sequence))
    )
    return max(fitting, key=lambda one: one.gain, default=None)


def _panel(tokens: Tokens) -> Tokens:
    """Responses that other forwards are tried on: some with the largest gaps, others evenly.

    All forwards on them together cost at most about as much as the first one did.
    """
    total = len(tokens.sequence)
    wanted = max(_PANEL, total // (2 * len(variants.SOURCES) + 24))
    if wanted >= total:
        return tokens
    gap = np.abs(tokens.recorded - null(tokens).predicted)
    worst = np.zeros(len(tokens.responses))
    np.maximum.at(worst, tokens.sequence, np.nan_to_num(gap))
    count = max(2, len(tokens.responses) * wanted // total)
    even = np.linspace(0, len(tokens.responses) - 1, count - count // 4).round().astype(int)
    return tokens.take(sorted({*even.tolist(), *np.argsort(-worst)[: count // 4].tolist()}))


def _leaves_nothing(judged: Judged) -> bool:
    """Whether nothing is left to explain, so that no other forward is needed."""
    left = judged.residual[~judged.tokens.hidden]
    return bool(judged.gain > DECISIVE and np.abs(left).max(initial=0.0) < _NOTHING_LEFT)


def _variants(
    panel: Tokens, forward: Forward, others: Any, tokenizer: Any, sources: Sequence[Entry]
) -> Iterator[Variant]:
    yield from variants.of_numerics(forward, sources)
    yield from variants.of_requests(forward)
    yield from variants.of_routes(forward)
    yield from variants.of_weights(forward, others)
    yield from variants.of_prompts(forward, tokenizer, variants.likeliest_first(panel))


def _announced(tried: Iterable[Variant], most: int) -> Iterator[Variant]:
    """The variants, each said to whoever waits if nothing was said for a while."""
    before = time.monotonic()
    for number, variant in enumerate(tried, 1):
        if time.monotonic() - before > waiting.SECONDS:
            before = time.monotonic()
            waiting.say(
                f"trying {variant.name}, alternative {number} of at most {most}"
                f" ({waiting.COMPILES})"
            )
        yield variant


def _second(best: Judged, judged: Sequence[Judged], tokens: Tokens) -> Judged | None:
    """The low precision that explains most of what a fault leaves, if any does."""
    sources = [
        one
        for one in judged
        if one.tokens is not tokens
        and one.explanation.kind == "numerics"
        and one.explanation.sizes is None
    ]
    if not sources:
        return None
    panel = sources[0].tokens
    start = best.explanation
    if best.tokens is tokens:
        inside = np.isin(tokens.sequence, _numbers(tokens, panel))
        start = replace(start, predicted=start.predicted[inside], drawn=start.drawn[inside])
    start = replace(start, structure=0.0, parameters={})
    exact = panel.evidence.exact.astype(np.float64)
    moved = (start.predicted + one.explanation.predicted - exact for one in sources)
    candidates = (
        replace(one.explanation, predicted=predicted, drawn=start.drawn)
        for one, predicted in zip(sources, moved, strict=True)
    )
    top = max((judge(one, panel, start) for one in candidates), key=lambda one: one.gain)
    return top if top.gain > DECISIVE and material(top) else None


def _numbers(tokens: Tokens, panel: Tokens) -> list[int]:
    """Which of the responses the panel's are."""
    kept = {id(response) for response in panel.responses}
    return [i for i, response in enumerate(tokens.responses) if id(response) in kept]


def _first(best: Judged | None, tokens: Tokens, base: Explanation, part: Part | None) -> Place:
    """The first token that shows the verdict; the one with the largest gap if none does alone."""
    gap = np.nan_to_num(np.abs(tokens.recorded - base.predicted))
    if best is None or (part is not None and best.explanation.kind == "numerics"):
        shows = np.flatnonzero(gap > NORMAL_LARGEST) if part is None else part.places
        return place(tokens, int(shows[0]) if shows.size else int(np.argmax(gap)), None)
    shows = best.explanation.shows
    if shows is None:
        shows = np.flatnonzero(best.gains > _SHOWING)
    index = int(shows[0]) if shows.size else int(np.argmax(best.gains))
    return place(best.tokens, index, best.explanation)


def place(tokens: Tokens, index: int, explanation: Explanation | None) -> Place:
    """A token by its index among all of `tokens`."""
    response = tokens.responses[tokens.sequence[index]]
    predicted = None if explanation is None else float(explanation.predicted[index])
    return Place(
        where=response.where,
        position=int(tokens.position[index]),
        token=int(response.tokens[tokens.position[index]]),
        recorded=float(response.log_probs[tokens.position[index]]),
        exact=float(tokens.evidence.exact[index]),
        predicted=None if predicted is None or np.isnan(predicted) else predicted,
    )
