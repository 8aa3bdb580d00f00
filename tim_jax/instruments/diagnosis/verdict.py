"""Scores rollouts, tries the explanations, and says which one explains how much.

All numbers are nats. An explanation's `gain` is its log-likelihood less the null's (recorded are
the exact log-probs of the declared distribution but for noise), less what its fitted parameters
cost. A gain of `DECISIVE` is odds of 22,000 to 1.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from tim_jax import mismatch
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.instruments.diagnosis import parts, variants
from tim_jax.instruments.diagnosis.evidence import Forward, chosen_alike, gather
from tim_jax.instruments.diagnosis.explanations import (
    DECISIVE,
    LEAST_EFFECT,
    LEAST_LOCAL,
    LEAST_WITHIN,
    NORMAL_LARGEST,
    Explanation,
    Judged,
    Tokens,
    abnormal,
    judge,
    sizes_of,
)
from tim_jax.instruments.diagnosis.parts import Part
from tim_jax.instruments.diagnosis.reporting import Break, find_breaks, reporting
from tim_jax.instruments.diagnosis.rollouts import Response
from tim_jax.instruments.diagnosis.variants import Candidate, Variant
from tim_jax.mismatch import Entry

# By how much the sizes of differences may exceed those of the numerics that they are put down to.
# K3 goes with the square.
MEAN_FACTOR = 2.0
_K3_FACTOR = 8.0
_LARGEST_FACTOR = 4.0
# Sizes that are normal on the model at hand, if its logits make half precision cost more than the
# published ones.
_SMALLEST = mismatch.label(variants.SOURCES[0])
HALF_PRECISION = tuple(
    mismatch.label(mismatch.compute(dtype=dtype)) for dtype in ("bfloat16", "float16")
)
# Of what is multiplied in 8 bits: here by a scale per token, which is the finest. In torch it has
# seven bits, and one scale for all tokens of a forward, which makes 1.9 times that.
_OPERANDS_FACTOR = 3.0
# 8 bits -> the weights alone, whose rounding must be found: it says which weights they are.
_ALONE = {
    mismatch.label(entry): mismatch.label(alone)
    for both, alone in variants.EIGHT_BITS.items()
    for entry in (both, alone)
}
_GOES_WITH = 0.02  # nats a token: of two normal variables with a correlation of 0.2
_ROUNDING = 1e-5  # differences of another order of sums in float32: nothing else is tried
_NOTHING_LEFT = 1e-4  # nats; about what another order of sums and interpolation leave
_SHOWING = 3.0  # nats of gain by which a single token shows an explanation
_FEW = 256  # tokens that every other forward is tried on
_MANY = 2048  # and those that are promising there: about as many tokens, or a 50th of all
_PROMISING = 3  # faults, or kinds of low precision, that are tried on many
_NEAR = 0.5  # of the likeliest one's gain: less on a few rows is not promising
_LEAST_SHARE = 0.25  # of the gap, that a fault explains; less is not named
_MOST = 0.9  # of the gap: what explains more of it leaves nothing to other low precision
# A gap this many times smaller than that of float16 is of no low precision that is known here.
_SMALLER = 20.0
# Fewer tokens may have sizes above the normal by chance: those of one row of a sound engine do.
_ENOUGH = 32
_OF_A_PARAMETER = 8  # tokens that a fitted number needs: it explains as many by itself
_WEIGHTS = [x for x in variants.SOURCES if x.kind == "weights" and not x.draws]
_OF_ALL_LAYERS = 0.3  # of the gap, explained by all layers: less does not tell some of them
_OF_A_LAYER = 20  # tokens by which it is told, at least
_HIDDEN = 2  # roundings of all layers that are tried in some, though they do not go with the gap


State = Literal["exact", "numerics", "undecided", "fault"]


class Place(NamedTuple):
    """A token that shows something."""

    where: str  # file and line
    position: int
    token: int
    recorded: float
    exact: float
    predicted: float | None


@dataclass(frozen=True, eq=False, repr=False)
class Verdict:
    """What a diagnosis found.

    Attributes:
        state: "exact", "numerics" (differences of a normal size), "fault", or "undecided" (larger
            ones, of too few tokens to tell).
        judged: the explanations that were tried, the most likely first; the null is not among them.
        best: the one that is taken, or None.
        second: what explains most of what it leaves, or None.
        first: the first token that shows it, or None.
        half: half precision, of which the differences have about the sizes, or None. Its `scale` is
            by how much they are larger.
        nearest: whether the fault that is taken leaves a difference that is no numerics either. It
            is then not the cause, or not the only one.
        more: the sizes of what remains at the tokens that the fault does not touch, if that is no
            numerics, or None. There is then another fault.
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
    nearest: bool = False
    more: dict[str, float] | None = None
    part: Part | None = None
    agreement: np.ndarray | None = None
    breaks: tuple[Break, ...] = ()

    @property
    def normal(self) -> bool:
        """False for a fault, and where too few tokens leave it undecided."""
        return self.state in ("exact", "numerics")

    def __repr__(self) -> str:
        best = "nothing" if self.best is None else self.best.name
        sizes = ", ".join(f"{name} {value:.3g}" for name, value in self.sizes.items())
        return f"Verdict({self.state}, {len(self.tokens.sequence)} tokens, best {best}, {sizes})"


def diagnose(
    responses: Sequence[Response],
    forward: Forward,
    *,
    others: Sequence[Candidate] = (),
    tokenizer: Any = None,
    sources: Sequence[Entry] = variants.SOURCES,
) -> Verdict:
    """Says what is wrong with recorded log-probs, if anything.

    Args:
      responses: of `rollouts.collect`.
      forward: the model that is said to have drawn them.
      others: weights that may have drawn them instead: earlier checkpoints, or a base model without
        its adapter.
      tokenizer: for other prompts, and for the turns of episodes.
      sources: of low precision that are tried, the smallest first; most compile a forward.

    Raises:
      InputError: the loss masks leave no token to compare, or the rows of an episode are no turns.
    """
    _check_masks(responses)
    responses = [one.without_padding(forward.stop_tokens) for one in responses]
    breaks = () if tokenizer is None else find_breaks(tokenizer, responses)
    tokens = Tokens(
        tuple(responses),
        gather(forward, responses),
        forward.stop_tokens,
        forward.vocabulary,
        forward.tokenizer_size,
    )
    first = (*reporting(tokens), *parts.ending(tokens), *parts.of_tokens(tokens))
    judged = _judge_all(first, tokens)
    sizes = sizes_of(tokens.gap)
    if sizes["largest"] > _ROUNDING and not any(map(_leaves_nothing, judged)):
        tried = variants.of_all(forward, others, tokenizer, tokens, sources)
        most = len(sources) + 4 * len(others) + variants.OTHERS
        judged += _by_forwards(_announced(tried, most), tokens, judged)
        judged += _in_some_layers(judged, tokens, forward)
    found = _decide(tokens, sorted(judged, key=lambda one: -one.gain), sizes)
    state = "fault" if any(one.fault for one in breaks) else found.state
    return replace(found, agreement=_agreement(tokens, forward), breaks=breaks, state=state)


def _by_forwards(tried: Iterable[Variant], tokens: Tokens, known: Sequence[Judged]) -> list[Judged]:
    """What other forwards explain: each is tried on a few rows, the promising ones on many.

    Low precision comes last, and as long as enough is left to it.
    """
    total = len(tokens.sequence)
    few, many = _some_rows(tokens, _FEW), _some_rows(tokens, max(_MANY, total // 50))
    found: list[tuple[Variant, list[Judged]]] = []
    for variant in tried:
        before = [*known, *(one for _, each in found for one in each)]
        if variant.kind == "fault" or _worth_trying(variant, before, few):
            found.append((variant, _try(variant, few, total)))
    if len(many.responses) > len(few.responses):
        # Half precision may be twice in it.
        again = dict.fromkeys(_promising(found, known, sizes_of(tokens.gap)))
        more = {v: _try(v, many, total) for v in _announced(again, len(again), more=True)}
        found = [(v, more.get(v, each)) for v, each in found]
    return [one for _, each in found for one in each]


def _try(variant: Variant, some: Tokens, total: int) -> list[Judged]:
    return _judge_all(variants.explanations(variant, some), some, total)


def _worth_trying(numerics: Variant, judged: Sequence[Judged], few: Tokens) -> bool:
    """Whether enough of the gap is left for this low precision.

    Where a fault explains most, half precision alone is looked for in the rest.
    """
    if numerics.after and not _goes_with_gap(numerics.after, judged):
        return False
    known = [one for one in judged if one.gain > DECISIVE and not one.by_sizes]
    most = {one.kind for one in known if one.moves and one.share > _MOST}
    if "numerics" in most or (most and numerics.name not in HALF_PRECISION):
        return False
    smallest = [one for one in _low_precision(judged) if one.name == _SMALLEST]
    made = [np.abs(x.explanation.predicted - few.exact)[~few.hidden].mean() for x in smallest]
    left = [np.abs(x) for x in (few.gap, *(one.residual for one in known))]
    if numerics.name in HALF_PRECISION:  # of those that differ, as few rows of an engine may
        left = [x[x > _ROUNDING] for x in left]
    medians = [float(np.nanmedian(x)) for x in left if not np.isnan(x).all()]
    return not made or bool(min(medians, default=0.0) > made[0] / _SMALLER)


def _goes_with_gap(name: str, judged: Iterable[Judged]) -> bool:
    """Whether what is recorded goes with low precision of this name: with a correlation of 0.2."""
    own = (one for one in _low_precision(judged) if one.name == name)
    return any(one.gain > DECISIVE and one.gains.mean() > _GOES_WITH for one in own)


def _promising(
    found: Sequence[tuple[Variant, list[Judged]]],
    known: Sequence[Judged],
    sizes: dict[str, float],
) -> list[Variant]:
    """Variants that more rows are worth: low precision only if the gap is above the normal."""
    gains = {v: max((one.gain for one in each), default=0.0) for v, each in found}
    faults = [v for v, _ in found if v.kind == "fault"]
    numerics = [v for v, _ in found if v.kind == "numerics"] if abnormal(sizes) else []
    least = max((one.gain for one in known), default=0.0)
    again = [v for v in numerics if v.name in HALF_PRECISION]
    for some, floor in ((faults, least), (numerics, 0.0)):
        floor = _NEAR * max([floor, *(gains[v] for v in some)])
        near = [v for v in some if gains[v] > 0 and gains[v] >= floor]
        again += sorted(near, key=lambda v: -gains[v])[:_PROMISING]
    return again


def _agreement(tokens: Tokens, forward: Forward) -> np.ndarray | None:
    some = _some_rows(tokens, max(_MANY, len(tokens.sequence) // 50))
    routed = [r for r in some.responses if r.routes is not None]
    return chosen_alike(forward, routed).mean(axis=0) if routed else None


def _in_some_layers(judged: Sequence[Judged], tokens: Tokens, forward: Forward) -> list[Judged]:
    """Quantised weights in some layers, if there is a gap that nothing explains most of."""
    known = any(one.gain > DECISIVE and one.moves and one.share > _MOST for one in judged)
    sizes, total = sizes_of(tokens.gap), len(tokens.sequence)
    if known or sizes["mean"] < LEAST_EFFECT:
        return []
    quantised = {mismatch.label(x): x for x in _WEIGHTS}
    wholes = [one for one in _low_precision(judged) if one.name in quantised]
    near = _nearest(wholes)
    if not near and abnormal(sizes):
        # The rounding of the other layers may hide that of some, and is then larger than the gap.
        larger = (one for one in wholes if one.effect > sizes["mean"])
        near = sorted(larger, key=lambda one: one.effect)[:_HIDDEN]
    # What an 8-bit engine does with activations hides which layers have its weights.
    half = _half_precision(judged, sizes, total)
    near = [one for one in near if one.share >= _OF_ALL_LAYERS or not half]
    if not near:
        return []
    layers = forward.execution.config.num_layers
    some = _some_rows(tokens, max(_FEW, _OF_A_LAYER * layers, total // (layers + 2)))
    found = (variants.in_some_layers(forward, some, quantised[one.name]) for one in near)
    return [judge(one, some, total=total) for one in found if one is not None]


def _nearest(wholes: Sequence[Judged]) -> list[Judged]:
    """The quantised weights that go best with what is recorded, if any do."""
    fitting = {one: variants.goes_with(one.tokens, one.explanation) for one in wholes}
    best = sorted(fitting, key=lambda one: -fitting[one])[:1]
    return [one for one in best if fitting[one] >= variants.LEAST_Z]


def _check_masks(responses: Sequence[Response]) -> None:
    """Refuses responses that are hidden as a whole: nothing compared is not a pass."""
    if any(r.mask is None or r.mask.any() for r in responses):
        return
    raise InputError(
        f"rollouts: mask is 0 at all {sum(map(len, responses))} response tokens, from"
        f" {responses[0].where} on, so there is nothing to compare; it must be 1 at tokens that the"
        " model drew"
    )


def _judge_all(tried: Iterable[Explanation], tokens: Tokens, total: int = 0) -> list[Judged]:
    """Explanations as they are, and as they hold in some rows alone."""
    whole = [judge(one, tokens, total=total) for one in tried]
    faults = [one for one in whole if one.kind == "fault"]
    some = [
        parts.in_some_rows(one.explanation, tokens, one.gains, few=one.refuted) for one in faults
    ]
    some += [
        parts.up_to_some_token(one.explanation, tokens, one.gains)
        for one in faults
        if one.name.startswith(variants.OF_WEIGHTS)
    ]
    return [*whole, *(judge(one, tokens, total=total) for one in some if one is not None)]


def _decide(tokens: Tokens, judged: Sequence[Judged], sizes: dict[str, float]) -> Verdict:
    coarse = abnormal(sizes)
    half = _half_precision(judged, sizes, len(tokens.sequence))
    unusual = coarse and half is None
    known = [x for x in judged if x.gain > DECISIVE and material(x) and _has_enough_tokens(x)]
    if unusual:  # draws do not explain the gap, and what does may move them
        known = [one for one in known if one.moves or not one.of_draws]
    best = _best(known, coarse=coarse)
    fault = best is not None and best.kind == "fault"
    state: State = "numerics" if sizes["largest"] > 0 or tokens.step else "exact"
    if fault or unusual:
        # By chance, sizes of few tokens are large; the largest of few is not.
        few = int((~tokens.hidden).sum()) < _ENOUGH and sizes["largest"] <= NORMAL_LARGEST
        state = "fault" if fault or not few else "undecided"
    second = _rest_of_gap(best, judged) if best is not None and fault else None
    part = None
    if best is not None and fault:
        part = parts.part_of(best.tokens, best.touched) if best.local else None
    elif state == "fault":
        part = _bad_part(tokens, judged)
    elif best is None or best.share < _MOST:
        part = _odd_rows(tokens, judged)
        state, best = (state, best) if part is None else ("fault", None)
    first = _first_token(best, tokens, part) if state == "fault" else None
    nearest = best is not None and fault and _is_nearest(best, judged)
    more = _sizes_elsewhere(best, judged) if best is not None and fault and second is None else None
    return Verdict(
        state, tokens, tuple(judged), best, second, first, sizes, half, nearest, more, part
    )


def _is_nearest(fault: Judged, judged: Sequence[Judged]) -> bool:
    """Whether a fault leaves more than a tenth of the gap at its tokens, and that no numerics."""
    left, total = sizes_of(fault.residual[fault.touched]), int(fault.touched.sum())
    if not fault.moves or fault.within > _MOST:
        return False
    return not _is_half_precision(left, total, judged)


def _sizes_elsewhere(fault: Judged, judged: Sequence[Judged]) -> dict[str, float] | None:
    """The sizes of what remains where a fault changes nothing, if they are of no numerics."""
    others = ~fault.touched & ~fault.tokens.hidden
    left, total = sizes_of(fault.residual[others]), int(others.sum())
    if _is_half_precision(left, total, judged) or _half_precision(judged, left, total) is not None:
        return None
    return left


def _is_half_precision(sizes: dict[str, float], total: int, judged: Sequence[Judged]) -> bool:
    """Whether differences are of a normal size, or of that of half precision on this model."""
    half = (x for x in _low_precision(judged) if x.name in HALF_PRECISION)
    return not abnormal(sizes) or any(_makes(one, sizes, total, MEAN_FACTOR) for one in half)


def _has_enough_tokens(judged: Judged) -> bool:
    """Whether an explanation is of many more tokens than the numbers that it fits."""
    shown = judged.touched if judged.moves else judged.tokens.shows_draw
    return int(shown.sum()) >= _OF_A_PARAMETER * len(judged.explanation.parameters)


def _bad_part(tokens: Tokens, judged: Sequence[Judged]) -> Part | None:
    """The tokens outside of the noise, if the others are as those of a sound engine.

    Where all are off, the noise is fitted to them, and only the tail of the gap is outside of it.
    """
    part = parts.part_of(tokens, parts.outside(tokens))
    if part is None:
        return None
    sizes = sizes_of(np.delete(tokens.gap, part.places))
    total = len(tokens.sequence) - len(part.places)
    sound = not abnormal(sizes) or _half_precision(judged, sizes, total) is not None
    return part if sound else None


def _odd_rows(tokens: Tokens, judged: Sequence[Judged]) -> Part | None:
    """A few rows that differ by more than numerics, where the others agree to 1e-5."""
    part = parts.of_few_rows(tokens, _ROUNDING)
    if part is None or len(part.places) < _ENOUGH:
        return None
    sizes = sizes_of(tokens.gap[part.places])
    return None if _is_half_precision(sizes, len(part.places), judged) else part


def _best(judged: Sequence[Judged], *, coarse: bool = False) -> Judged | None:
    """The most likely, or one of its kind that is not decidedly less likely and fits fewer numbers.

    A fitted temperature of 0.998 follows rounding a little better than raw log-probs do. Where the
    gap is `coarse`, as int4 weights make it, draws differ from the exact ones by low precision
    alone, and tell nothing more.
    """
    if not judged:
        return None
    top = judged[0]
    if top.kind == "numerics":
        # Low precision of the bulk is likelier than a fault of a part, of draws or of ends, and
        # does not excuse it.
        faults = (x for x in judged if x.kind == "fault")
        faults = (x for x in faults if not (coarse and x.of_draws and not x.moves))
        apart = (x for x in faults if not x.moves or (x.local and not _covers(top, x)))
        top = next(apart, top)
    near = (one for one in judged if one.gain > top.gain - DECISIVE and one.kind == top.kind)
    return min(near, key=_count_fitted)


def _covers(numerics: Judged, fault: Judged) -> bool:
    """Whether low precision explains most of the gap at the tokens that a fault touches."""
    inside = np.isin(fault.tokens.sequence, _numbers(fault.tokens, numerics.tokens))
    if inside.sum() != len(numerics.tokens.sequence):
        return False
    own = fault.touched[inside]
    gap = np.abs(numerics.tokens.gap[own])
    left = np.abs(numerics.residual[own])
    return not own.any() or bool(left.mean() < gap.mean() * (1 - LEAST_WITHIN))


def _count_fitted(judged: Judged) -> tuple[int, float]:
    """How many numbers it fits, and then how unlikely it is. The choice of rows is one of them."""
    one = judged.explanation
    return len(one.parameters) + (one.rows is not None), -judged.gain


def _half_precision(judged: Sequence[Judged], sizes: dict[str, float], total: int) -> Judged | None:
    """Half precision on this model, or 8 bits that are found, if these make hardly less.

    By the scale of the bulk, and by mean, largest and K3 of all.
    """
    most = dict.fromkeys(HALF_PRECISION, MEAN_FACTOR)
    for name, alone in _ALONE.items():
        if _goes_with_gap(alone, judged):
            most[name] = MEAN_FACTOR if name == alone else _OPERANDS_FACTOR
    own = {one.name: one for one in _low_precision(judged)}

    def fits(one: Judged) -> bool:
        if not one.by_sizes or one.scale > most.get(one.name, 0.0):
            return False
        return _makes(own[one.name], sizes, total, most[one.name])

    return max(filter(fits, judged), key=lambda one: one.gain, default=None)


def material(judged: Judged) -> bool:
    """Whether an explanation is of something that matters, and not of a trifle in the noise.

    One of log-probs must explain a share of the gap, whatever else speaks for it. One of the draws
    alone, or of where responses end, leaves the gap as it is.
    """
    if judged.refuted:
        return False
    if not judged.moves:
        return judged.explanation.structure > DECISIVE or judged.of_draws
    if judged.kind != "fault":
        return judged.share >= LEAST_LOCAL
    if judged.local and judged.within < LEAST_WITHIN:
        return False
    least = LEAST_LOCAL if judged.local else _LEAST_SHARE
    return judged.share >= least and judged.effect > LEAST_EFFECT


def _low_precision(judged: Iterable[Judged]) -> list[Judged]:
    """Low precision judged by the differences that it makes, not by their sizes."""
    return [one for one in judged if one.kind == "numerics" and not one.by_sizes]


def _makes(one: Judged, sizes: dict[str, float], total: int, factor: float) -> bool:
    """Whether the mean, K3 and largest of `total` differences are hardly above those of its own."""
    own = one.explanation.predicted - one.tokens.exact
    made = sizes_of(own[~one.tokens.hidden])
    # The largest of n draws from tails such as the noise model's grows with the cube root of n, and
    # is three times as large by chance once in thirty.
    larger = (total / len(one.tokens.sequence)) ** (1 / 3)
    return (
        sizes["mean"] <= factor * made["mean"]
        and sizes["k3"] <= _K3_FACTOR * made["k3"]
        and sizes["largest"] <= max(_LARGEST_FACTOR * made["largest"] * larger, NORMAL_LARGEST)
    )


def _some_rows(tokens: Tokens, wanted: int) -> Tokens:
    """Responses of about as many tokens: a quarter with the largest gaps, others evenly.

    In fours, so that programs have few shapes.
    """
    total, rows = len(tokens.sequence), len(tokens.responses)
    count = max(2, rows * wanted // total)
    count += -count % 4
    if count >= rows:
        return tokens
    worst = [np.nan_to_num(np.abs(own)).max() for own in tokens.by_response(tokens.gap)]
    chosen = dict.fromkeys(np.argsort(-np.asarray(worst))[: count // 4].tolist())
    for i in _spread(rows):
        chosen[i] = None
        if len(chosen) == count:
            break
    return tokens.take(sorted(chosen))


def _spread(count: int) -> Iterator[int]:
    """All numbers below `count`, any first ones of them evenly: by their bits in reverse."""
    bits = (count - 1).bit_length()
    for i in range(1 << bits):
        if (number := int(f"{i:0{bits}b}"[::-1] or "0", 2)) < count:
            yield number


def _leaves_nothing(judged: Judged) -> bool:
    """Whether nothing is left to explain, so that no other forward is needed."""
    left = judged.residual[~judged.tokens.hidden]
    return bool(judged.gain > DECISIVE and np.abs(left).max(initial=0.0) < _NOTHING_LEFT)


def _announced(tried: Iterable[Variant], most: int, *, more: bool = False) -> Iterator[Variant]:
    """The variants, each said to whoever waits if nothing was said for a while.

    Args:
      more: they were tried before, and now on more rows.
    """
    where = " on more rows" if more else ""
    before = time.monotonic()
    for number, variant in enumerate(tried, 1):
        if time.monotonic() - before > waiting.SECONDS:
            before = time.monotonic()
            waiting.say(
                f"trying {variant.name}{where}, alternative {number} of at most {most}"
                f" ({waiting.COMPILES})"
            )
        yield variant


def _rest_of_gap(best: Judged, judged: Sequence[Judged]) -> Judged | None:
    """The low precision that explains most of what a fault leaves, if any does."""
    own = {*map(id, best.tokens.responses)}
    sources = [x for x in _low_precision(judged) if {*map(id, x.tokens.responses)} <= own]
    if not sources:
        return None
    panel = max((one.tokens for one in sources), key=lambda some: len(some.responses))
    sources = [one for one in sources if len(one.tokens.responses) == len(panel.responses)]
    inside = np.isin(best.tokens.sequence, _numbers(best.tokens, panel))
    arrays = {x: getattr(best.explanation, x)[inside] for x in ("predicted", "drawn")}
    start = replace(best.explanation, **arrays, structure=0.0, parameters={})
    candidates = (
        replace(
            one.explanation,
            predicted=start.predicted + one.explanation.predicted - panel.exact,
            drawn=start.drawn,
        )
        for one in sources
    )
    top = max((judge(one, panel, base=start) for one in candidates), key=lambda one: one.gain)
    return top if top.gain > DECISIVE and material(top) else None


def _numbers(tokens: Tokens, panel: Tokens) -> list[int]:
    """Which of the responses the panel's are."""
    kept = {id(response) for response in panel.responses}
    return [i for i, response in enumerate(tokens.responses) if id(response) in kept]


def _first_token(best: Judged | None, tokens: Tokens, part: Part | None) -> Place:
    """The first token that shows the verdict; the one with the largest gap if none does alone."""
    gap = np.nan_to_num(np.abs(tokens.gap))
    if best is None or (part is not None and best.kind == "numerics"):
        shows = np.flatnonzero(gap > NORMAL_LARGEST) if part is None else part.places
        return place(tokens, int(shows[0]) if shows.size else int(np.argmax(gap)), None)
    shows = best.explanation.shows
    if shows is None:
        shows = np.flatnonzero(best.gains > _SHOWING)
    index = int(shows[0]) if shows.size else int(np.argmax(best.gains))
    return place(best.tokens, index, best.explanation)


def place(tokens: Tokens, index: int, explanation: Explanation | None) -> Place:
    """A token by its index among all of `tokens`."""
    response, position = tokens.responses[tokens.sequence[index]], int(tokens.position[index])
    predicted = None if explanation is None else float(explanation.predicted[index])
    return Place(
        where=response.where,
        position=position,
        token=response.tokens[position],
        recorded=float(response.log_probs[position]),
        exact=float(tokens.evidence.exact[index]),
        predicted=None if predicted is None or np.isnan(predicted) else predicted,
    )
