"""Explanations that need no further forward, compared by the model of `noise`.

An explanation predicts the log-prob that the system recorded for each token, and how likely each
draw was. Both are compared with the null's: the exact log-probs of the declared distribution were
recorded, and the tokens were drawn from it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from tim_jax.instruments.diagnosis.declared import UNSHAPED, Distribution
from tim_jax.instruments.diagnosis.evidence import (
    AT_ONE,
    COLDEST,
    HOTTEST,
    LIKELIEST,
    Evidence,
    at_edge,
    chances,
)
from tim_jax.instruments.diagnosis.noise import (
    Fit,
    fit_noise,
    grid_minimum,
    minimum,
    noise_weights,
    penalty,
)
from tim_jax.instruments.diagnosis.rollouts import Response

# Of a log-temperature. Where log-probs agree to 1e-7, a coarser fit would decide what is named.
_TEMPERATURE_WITHIN = 1e-9
_AT_END = 1e-4  # of a log-temperature: at an end of what is fitted, it may lie beyond
_FITTED = 4096  # tokens that parameters are fitted on
_ODD, _LEAST_ODD = 5.0, 0.01  # times the median row's mean |d|, and nats, of a row that is odd
_LEAST_LEFT_OUT = 3  # tokens that are all that equal one, and left out
_MOST_PADDING = 4096  # rows of padding in a vocabulary
LEAST_MOVE = 1e-4  # nats; less is what interpolation makes of the same log-prob
_TOP_K = (1, 2, 3, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128)
_TOP_P = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995)
_MIN_P = (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5)

DECISIVE = 10.0
# Sizes that others publish for sound engines beside dense models, see docs/mismatch.md: K3 1e-5 to
# 1e-3 (Miles), mean |d| 0.013 and the largest 1.2 of ten million tokens (RL-Kernel).
NORMAL_K3 = 1e-3
NORMAL_MEAN = 0.02
NORMAL_LARGEST = 2.0
# Below these an explanation names a cause, but of nothing that needs mending.
LEAST_EFFECT = 1e-3  # nats a token, over the tokens that it touches
LEAST_SHARE = 0.25  # of the gap
LEAST_LOCAL = 0.05  # the same for low precision, and for what touches less than half of the tokens
LEAST_WITHIN = 0.5  # of the gap at those tokens
_OFF = 10.0  # times the noise's scale: by which logits may be off where a draw is at an edge
_FACTOR = 0.5  # standard deviation of the logarithm of how far sizes may be off

Kind = Literal["none", "numerics", "fault"]


@dataclass(frozen=True, eq=False)
class Explanation:
    """One account of the recorded log-probs of N tokens.

    Attributes:
        name: short, as in tables; one for all strengths of a fault.
        text: a clause for people: "the log-probs are ...".
        kind: "fault" is a mistake to mend, "numerics" another precision or order of sums.
        predicted: f64[N], the log-probs that the system would have recorded; NaN: no prediction.
        drawn: f64[N], log-probs of the draws.
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
    """N recorded tokens of S responses, side by side, with the evidence of one forward."""

    responses: tuple[Response, ...]
    evidence: Evidence
    stop_tokens: tuple[int, ...]
    vocabulary: int
    tokenizer_size: int

    @cached_property
    def hidden(self) -> np.ndarray:
        """bool[N], left out by a loss mask, as the output of a tool is.

        What is recorded there means nothing, and the model may not have drawn the token.
        """
        return np.concatenate(
            [np.zeros(len(r), bool) if r.mask is None else ~r.mask for r in self.responses]
        )

    @cached_property
    def recorded(self) -> np.ndarray:
        """f64[N], NaN where a loss mask hides the token."""
        log_probs = np.concatenate([r.log_probs for r in self.responses]).astype(np.float64)
        return np.where(self.hidden, np.nan, log_probs)

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
        each = [(x, own) for x, own in _by_declared(self) if x.truncated or x.temperature == 0]
        if each:
            off = _OFF * fit(null(self), self).scale
            for declared, own in each:
                # Log-probs of scaled logits are off by more, or less, than the logits.
                scaling = 1.0 if declared.raw else declared.temperature or 1.0
                found[own] = at_edge(self.evidence.take(own), declared, off * scaling)
        return found

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

    def take(self, numbers: Sequence[int]) -> "Tokens":
        """Some of the responses."""
        inside = np.isin(self.sequence, np.asarray(numbers))
        evidence = self.evidence.take(inside)._replace(
            end_stop=self.evidence.end_stop[np.asarray(numbers)]
        )
        return replace(self, responses=tuple(self.responses[i] for i in numbers), evidence=evidence)


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
    drawn = np.where(tokens.shows_draw, explanation.drawn - base.drawn, 0.0)
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
    for declared, own in _by_declared(tokens):
        evidence = tokens.evidence if own.all() else tokens.evidence.take(own)
        said = declared if reported is None else reported(declared)
        of_draw = declared if drawn is None else drawn(declared)
        at_report = chances(evidence, said)
        raw = declared.raw and reported is None
        predicted[own] = evidence.raw if raw else at_report.renormalised
        draws[own] = (at_report if of_draw == said else chances(evidence, of_draw)).drawn
    return predicted, draws


def _by_declared(tokens: Tokens) -> Iterator[tuple[Distribution, np.ndarray]]:
    """Each declared distribution, without what is in the logits, and its tokens bool[N]."""
    each = [replace(r.declared, shaping=UNSHAPED) for r in tokens.responses]
    kinds = sorted(set(each), key=repr)
    of_response = np.asarray([kinds.index(one) for one in each])
    for number, declared in enumerate(kinds):
        yield declared, of_response[tokens.sequence] == number


def null(tokens: Tokens) -> Explanation:
    """Recorded are the exact log-probs, and the draws are those declared, or recorded."""
    _, drawn = by_distribution(tokens)
    exact = tokens.evidence.exact.astype(np.float64)
    drawn = np.where(tokens.replays, exact, drawn)
    return Explanation("none", "the log-probs are the declared ones", "none", exact, drawn)


def reporting(tokens: Tokens) -> Iterator[Explanation]:
    """Every explanation that needs this evidence alone, but those of `parts`."""
    base = null(tokens)
    yield from _of_declared(tokens)
    for some in (_fitting_part(tokens), _odd_rows(tokens, base)):
        if some is not None:
            yield from _temperatures(tokens, some)
            yield from _truncations(tokens, some)
            yield from _padded(tokens, some)
    for number in (2, 10):
        predicted = base.predicted / np.log(number)
        text = f"the log-probs are logarithms to base {number}, not natural ones"
        yield base.as_fault("log_base", text, predicted=predicted)
    yield from _shifted(tokens, base)
    yield from _masks(tokens, base)
    yield from _cut(tokens, base)
    first, gap = tokens.position == 0, np.abs(tokens.recorded - base.predicted)
    if _mean(gap[first]) > _ODD * _mean(gap[~first]):  # other weights are off at the others too
        text = "the first token of each response is of another context: another prompt or template"
        predicted = np.where(first, np.nan, base.predicted)
        yield base.as_fault("first_tokens", text, predicted=predicted)


def _fault(name: str, text: str, arrays: tuple[np.ndarray, np.ndarray], **given) -> Explanation:
    return Explanation(name, text, "fault", *arrays, **given)


def _of_declared(tokens: Tokens) -> Iterator[Explanation]:
    """What is declared of draws but not in the log-probs, or the reverse: nothing is fitted."""
    declared = {r.declared for r in tokens.responses}
    drawn = null(tokens).drawn
    if any(d.shaped or d.temperature not in (0, 1) for d in declared if not d.raw):
        yield _fault(
            "raw_log_probs",
            "the log-probs are those of the raw logits, without temperature, top-k and top-p"
            + (", and without what else was asked for" if any(d.shaped for d in declared) else ""),
            (tokens.evidence.raw.astype(np.float64), drawn),
        )
    if any(d.raw for d in declared):
        yield _fault(
            "processed_log_probs",
            "the log-probs are those that the tokens were drawn by, not those of the raw logits",
            (by_distribution(tokens, lambda declared: replace(declared, raw=False))[0], drawn),
        )
    replays = tokens.replays.any()
    if replays or any(d.truncated for d in declared if not d.raw):
        predicted, _ = by_distribution(tokens, lambda declared: Distribution(declared.temperature))
        yield _fault(
            "ignored_truncation",
            "the log-probs are over the whole vocabulary, not renormalised over what top-k and"
            f" top-p keep{', which is recorded' if replays else ''}",
            (predicted, drawn),
        )


def _at_temperature(log_temperature: float) -> Change:
    temperature = float(np.exp(log_temperature))
    return lambda declared: replace(declared, temperature=temperature)


def _temperatures(tokens: Tokens, some: Tokens) -> Iterator[Explanation]:
    """Other temperatures, fitted to `some` of the responses."""
    grid = np.log(np.geomspace(COLDEST, HOTTEST, 37))
    for name, text, both in (
        ("temperature", "drawn and recorded at {}", True),
        ("recorded_temperature", "the log-probs are those at {}", False),
    ):

        def of(x: float, tokens: Tokens, both: bool = both):
            change = _at_temperature(x)
            return by_distribution(tokens, change, change if both else None)

        x = grid_minimum(
            lambda x: -_likelihood(some, *of(x, some)), grid, within=_TEMPERATURE_WITHIN
        )
        words, parameters = _named_temperature(x)
        yield _fault(name, text.format(words), of(x, tokens), parameters=parameters)

    def drawn(x: float, tokens: Tokens):
        return by_distribution(tokens, drawn=_at_temperature(x))

    x = grid_minimum(lambda x: -float(drawn(x, some)[1][some.shows_draw].sum()), grid)
    words, parameters = _named_temperature(x)
    text = f"drawn at {words}, but recorded without it"
    yield _fault("drawn_temperature", text, drawn(x, tokens), parameters=parameters)


def _named_temperature(log_temperature: float) -> tuple[str, dict[str, float]]:
    """A fitted temperature in words and as a parameter, or the end of what is fitted."""
    if log_temperature - np.log(COLDEST) < _AT_END:
        return f"a temperature of {COLDEST:.3g} or less", {"temperature_at_most": COLDEST}
    if np.log(HOTTEST) - log_temperature < _AT_END:
        return f"a temperature of {HOTTEST:.3g} or more", {"temperature_at_least": HOTTEST}
    fitted = float(np.exp(log_temperature))
    return f"temperature {fitted:.4g}", {"temperature": fitted}


def _likelihood(tokens: Tokens, predicted: np.ndarray, drawn: np.ndarray) -> float:
    fit = fit_noise(tokens.recorded - predicted, noise_weights(tokens.evidence.exact))
    return fit.total + float(drawn[tokens.shows_draw].sum())


def _fitting_part(tokens: Tokens) -> Tokens:
    """Whole responses, evenly chosen, of about as many tokens as parameters are fitted on."""
    count, stride = len(tokens.responses), max(1, round(len(tokens.sequence) / _FITTED))
    return tokens if stride == 1 else tokens.take(range(0, count, min(stride, count)))


def _odd_rows(tokens: Tokens, base: Explanation) -> Tokens | None:
    """The minority of responses whose gap is much larger than that of the others, if there is one.

    What is fitted to all of them would not show what is wrong with these.
    """
    gap = np.nan_to_num(np.abs(tokens.recorded - base.predicted))
    counts = np.bincount(tokens.sequence[~tokens.hidden], minlength=len(tokens.responses))
    means = np.bincount(tokens.sequence, gap, len(tokens.responses)) / np.maximum(counts, 1)
    odd = np.flatnonzero(means > max(_ODD * float(np.median(means)), _LEAST_ODD))
    return tokens.take(odd.tolist()) if 0 < 2 * len(odd) < len(tokens.responses) else None


def _truncations(tokens: Tokens, some: Tokens) -> Iterator[Explanation]:
    """A truncation that is neither declared nor recorded, renormalised in the log-probs or not."""
    if tokens.replays.any():
        return
    # The mass that a declared top-k keeps is not known where it is beyond the stored logits.
    unknown = any(r.declared.top_k > LIKELIEST for r in tokens.responses)
    for name, values in (("top_k", _TOP_K), ("top_p", _TOP_P), ("min_p", _MIN_P)):
        if name != "top_k" and unknown:
            continue
        values = [x for x in values if x < min(tokens.vocabulary, LIKELIEST + 1)]
        for renormalised in (True, False):
            value = max(
                values, key=lambda x: _likelihood(some, *_truncated(some, name, x, renormalised))
            )
            words = "renormalised over it" if renormalised else "not renormalised over it"
            yield _fault(
                name if renormalised else f"{name}_ignored",
                f"drawn with {name} = {value:g}, the log-probs {words}",
                _truncated(tokens, name, value, renormalised),
                parameters={name: float(value)},
            )


def _truncated(tokens: Tokens, name: str, value: float, renormalised: bool):
    def change(declared: Distribution) -> Distribution:
        if name == "min_p":
            return replace(declared, shaping=replace(UNSHAPED, min_p=value))
        return replace(declared, **{name: value})

    return by_distribution(tokens, change if renormalised else None, change)


def _shifted(tokens: Tokens, base: Explanation) -> Iterator[Explanation]:
    """Log-probs that stand one place beside their tokens."""
    same = np.diff(tokens.sequence) == 0
    for text, moved, inside in (
        ("of the token after it", np.roll(base.predicted, -1), np.append(same, False)),
        ("of the token before it", np.roll(base.predicted, 1), np.insert(same, 0, False)),
    ):
        yield base.as_fault(
            "shifted",
            f"each token has the log-prob {text}",
            predicted=np.where(inside, moved, np.nan),
        )


def _masks(tokens: Tokens, base: Explanation) -> Iterator[Explanation]:
    """Tokens that were left out because they equal one token, the pad token.

    Left out are those that a loss mask hides, or that have a log-prob of exactly 0.
    """
    ids = np.concatenate([r.tokens for r in tokens.responses])
    zero = (tokens.recorded == 0) & (base.predicted < -1e-3)
    padding = _padding(tokens)
    for left_out in (tokens.hidden & ~padding, zero):
        if left_out.sum() < _LEAST_LEFT_OUT:
            continue
        names, counts = np.unique(ids[left_out], return_counts=True)
        token = names[np.argmax(counts)]
        if (ids[left_out] != token).any() or not left_out[(ids == token) & ~padding].all():
            continue
        share = max((ids == token).mean(), 1 / len(ids))
        yield base.as_fault(
            "pad_mask",
            f"every token {token} is left out, as by a mask made as `token != pad`",
            predicted=np.where(left_out, 0.0, base.predicted),
            structure=-float(left_out.sum()) * np.log(share),
            shows=np.flatnonzero(left_out),
        )


def _padding(tokens: Tokens) -> np.ndarray:
    """bool[N], what a loss mask hides behind a response: nothing that was drawn.

    But for a first token there that ends the response.
    """
    behind = []
    for response in tokens.responses:
        kept = np.ones(len(response), bool) if response.mask is None else response.mask
        start = np.flatnonzero(kept)[-1] + 1 if kept.any() else 0
        ended = start > 0 and response.tokens[start - 1] in tokens.stop_tokens
        if start < len(kept) and not ended and response.tokens[start] in tokens.stop_tokens:
            start += 1
        behind.append(np.arange(len(kept)) >= start)
    return np.concatenate(behind)


def _padded(tokens: Tokens, some: Tokens) -> Iterator[Explanation]:
    """A log-normaliser over more rows of the head than the model has, as many as fit `some`."""
    if any(r.declared != Distribution() for r in tokens.responses):
        return

    def padded(log_rows: float, tokens: Tokens) -> np.ndarray:
        evidence = tokens.evidence
        normaliser = evidence.moments[:, AT_ONE, 0].astype(np.float64)
        extra = log_rows - evidence.peak.astype(np.float64)  # a padded row's logit is 0
        return evidence.exact + normaliser - np.logaddexp(normaliser, extra)

    weight = noise_weights(some.evidence.exact)

    def loss(log_rows: float) -> float:
        return -fit_noise(some.recorded - padded(log_rows, some), weight).total

    rows = max(1, round(float(np.exp(minimum(loss, 0.0, np.log(_MOST_PADDING))))))
    yield null(tokens).as_fault(
        "padded_vocabulary",
        f"the softmax takes in {rows} padded rows of the vocabulary, whose logits are 0",
        predicted=padded(np.log(rows), tokens),
        parameters={"rows": float(rows)},
    )


def _cut(tokens: Tokens, base: Explanation) -> Iterator[Explanation]:
    """A log-normaliser over the tokenizer's tokens alone."""
    plain = all(r.declared == Distribution() for r in tokens.responses)
    if plain and tokens.tokenizer_size < tokens.vocabulary:
        normaliser = tokens.evidence.moments[:, AT_ONE, 0].astype(np.float64)
        yield base.as_fault(
            "cut_vocabulary",
            f"the softmax is over the tokenizer's {tokens.tokenizer_size} tokens alone",
            predicted=base.predicted + normaliser - tokens.evidence.inside,
        )
