"""Explanations of a part of the rollouts: a minority of tokens or rows, or where responses end.

The noise model is of the bulk, and hardly sees a minority. So what is known to go wrong in a part
is looked for by itself: sentinels in place of missing log-probs, log-probs of another row, and any
explanation that holds in some rows alone. `outside` finds a part that nothing explains.

A response ends by an end token, by something else (a stop string, a tool call, an abort), or it is
cut. One that is said to have ended by something else needs no end token. One whose last token a
loss mask hides ends with something that the model did not draw, such as the output of a tool, and
says nothing about end tokens. Padding is cut off before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from scipy.spatial import KDTree

from tim_jax.instruments.diagnosis.evidence import AT_ONE
from tim_jax.instruments.diagnosis.explanations import (
    LEAST_MOVE,
    NOTHING,
    Explanation,
    Tokens,
    penalty,
)

_ZERO_BELOW = -0.25  # exact log-prob of a token that no sound engine calls certain
_NO_LOG_PROB = -20.0  # whole numbers up to here are sentinels
_APART = 0.25  # nats between a value that recurs and the exact one, to count
_RECURS = 5  # times, at tokens of different exact log-probs
_BESIDE = 8  # recorded values on each side of it, with which it is compared
_OFTENER = 5  # times as often as these it recurs; on a coarse grid every value recurs
_MOST_VALUES = 3  # that recur in place of missing log-probs
_LEAST_LEFT_OUT = 3  # tokens that are all that equal one, and left out
_HEAD = 8  # tokens by which the row is looked for whose log-probs stand in another
_LEAST_ROW = 3  # tokens of a row that can be told from another
_LEAST_GAP = 0.01  # mean |d| of a row that is looked for among others
_NEAREST = 4  # rows that are compared as a whole
_BAD, _RARE = 0.1, 0.01  # nats and share of tokens that are taken for outside of the noise
# Nats by which an end token that is named but not there speaks for one that was stripped.
_NAMED = 7.0
_GOES_ON = 7.0  # and by which an end token that did not end a response speaks against it
_MOST_ODD = 0.1  # of the tokens, in rows that differ while the others agree to within 1e-5
_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Part:
    """The bad part of N tokens.

    Attributes:
        tokens: of which it is a part: all, or those on which an explanation was tried.
        places: i64[M], its tokens among them.
    """

    tokens: Tokens
    places: np.ndarray


def part_of(tokens: Tokens, inside: np.ndarray) -> Part | None:
    """A part bool[N], unless it is nothing or more than half of what is compared."""
    inside = inside & ~tokens.hidden
    count = int(inside.sum())
    if not count or 2 * count > int((~tokens.hidden).sum()):
        return None
    return Part(tokens, np.flatnonzero(inside))


def outside(tokens: Tokens) -> np.ndarray:
    """bool[N], tokens that are no noise about the exact log-probs: likelier anywhere in 20 nats.

    The prior share of such tokens is a hundredth.
    """
    far = tokens.null_fit.densities + np.log1p(-_RARE) < NOTHING + np.log(_RARE)
    return far & (np.abs(np.nan_to_num(tokens.gap)) > _BAD)


def of_few_rows(tokens: Tokens, rounding: float) -> Part | None:
    """The rows that differ by more than `rounding`, if nearly all tokens are of others.

    Sound engines may have other sums in some rows, such as those that they scored anew: these then
    differ as half precision does.
    """
    gap = np.nan_to_num(np.abs(tokens.gap))
    odd = np.asarray([own.max() > rounding for own in tokens.by_response(gap)])
    part = part_of(tokens, odd[tokens.sequence])
    few = part is not None and len(part.places) <= _MOST_ODD * int((~tokens.hidden).sum())
    return part if few and not tokens.step else None


def of_tokens(tokens: Tokens) -> Iterator[Explanation]:
    """What goes wrong in a part of the tokens or rows, and needs no other forward."""
    yield from _sentinels(tokens)
    yield from _clipped(tokens)
    yield from _masks(tokens)
    yield from _other_rows(tokens)
    yield from _version(tokens)


def _version(tokens: Tokens) -> Iterator[Explanation]:
    """Rows whose recorded version of the weights is another one than those of the model.

    The version whose rows are nearest to the model's log-probs is the model's.
    """
    names = [r.version for r in tokens.responses]
    if None in names:
        return
    versions, of_row = np.unique(np.asarray(names), return_inverse=True)
    own = of_row[tokens.sequence]
    compared = np.unique(own[~tokens.hidden])  # a mask may hide all rows of a version
    if len(compared) < 2:
        return
    gap = np.abs(tokens.gap)
    sizes = [float(np.nanmedian(gap[own == i])) for i in compared]
    nearest = compared[np.argmin(sizes)]
    different = compared[compared != nearest]
    others = np.isin(own, different)
    named = " or ".join(repr(str(x)) for x in versions[different])
    yield tokens.null.as_fault(
        "other_version",
        f"the rows of weights_version {named} are of other weights than those of"
        f" {str(versions[nearest])!r}",
        predicted=np.where(others, np.nan, tokens.exact),
        structure=-float(np.log(len(compared))),
        shows=np.flatnonzero(others & (gap > _BAD)),
        rows=np.flatnonzero(np.isin(of_row, different)),
    )


def up_to_some_token(
    explanation: Explanation, tokens: Tokens, gains: np.ndarray
) -> Explanation | None:
    """Weights that drew the first tokens of responses, until they were replaced in flight.

    In each row they hold as far as it is likeliest, at the price of choosing the place.

    Args:
      gains: f64[N], nats by which the explanation is likelier at each token.
    """
    inside = np.zeros(len(gains), bool)
    cost, rows = 0.0, 0
    for own in tokens.by_response(np.arange(len(gains))):
        running = np.cumsum(gains[own])
        place = int(np.argmax(running))
        price = float(np.log(len(own) + 1))
        if running[place] > price:
            inside[own[: place + 1]] = True
            cost, rows = cost + price, rows + 1
    ends = inside[tokens.lasts]
    if not rows or ends.all() or not (inside & ~ends[tokens.sequence]).any():
        return None
    where = f"up to some token of {rows} of {len(ends)} rows"
    return _limit(explanation, tokens, inside, where, structure=-cost)


def in_some_rows(
    explanation: Explanation, tokens: Tokens, gains: np.ndarray, *, few: bool = False
) -> Explanation | None:
    """An explanation that holds in those rows alone where it is likelier than the null.

    Args:
      gains: f64[N], nats by which it is likelier at each token.
      few: None if it holds in most rows. Draws refute it in others, and most rows of a sound engine
        have no such draw.

    Returns:
      None if it holds in all rows or in none, or says nothing of log-probs.
    """
    moved = np.abs(explanation.predicted - tokens.exact)
    whole = explanation.structure or explanation.sizes is not None
    if whole or not (np.nan_to_num(moved) > LEAST_MOVE)[~tokens.hidden].any():
        return None
    by_row = np.bincount(tokens.sequence, gains, minlength=len(tokens.responses))
    chosen = by_row > 0
    for _ in range(3):  # the share and the rows, in turn
        share = min(max(chosen.mean(), 1 / len(chosen)), 1 - 1e-9)
        chosen = by_row > np.log1p(-share) - np.log(share)
    if chosen.all() or not chosen.any() or (few and 2 * chosen.sum() > len(chosen)):
        return None
    where = f"in {chosen.sum()} of {len(chosen)} rows"
    return _limit(explanation, tokens, chosen[tokens.sequence], where, structure=_choice(chosen))


def _limit(
    explanation: Explanation, tokens: Tokens, inside: np.ndarray, where: str, *, structure: float
) -> Explanation:
    """The explanation inside, bool[N], and the null elsewhere."""
    return replace(
        explanation,
        text=f"{explanation.text}, {where}",
        predicted=np.where(inside, explanation.predicted, tokens.exact),
        drawn=np.where(inside, explanation.drawn, tokens.null.drawn),
        structure=structure,
        rows=np.unique(tokens.sequence[inside]),
    )


def _sentinels(tokens: Tokens) -> Iterator[Explanation]:
    """Numbers in place of log-probs that are missing: 0, -9999, or any that recurs."""
    recorded, exact = tokens.recorded, tokens.exact
    wrong = ((recorded == 0) & (exact < _ZERO_BELOW)) | (
        (recorded == np.round(recorded)) & (recorded <= _NO_LOG_PROB) & (exact - recorded > 2)
    )
    wrong |= _recurring(recorded, exact, (np.abs(tokens.gap) > _APART) & ~wrong)
    if not wrong.any():
        return
    values, counts = np.unique(recorded[wrong], return_counts=True)
    named = [f"{x:.7g}" for x in values[np.argsort(-counts)][:3]]
    text = f"{wrong.sum()} log-probs are {' or '.join(named)}: a sentinel, where none was recorded"
    if not values.any():
        text = f"{wrong.sum()} log-probs of uncertain tokens are exactly 0: none was recorded there"
    yield tokens.null.as_fault(
        "sentinel",
        text,
        predicted=np.where(wrong, recorded, exact),
        structure=_choice(wrong[~tokens.hidden]) - float(np.log(len(values)) * len(values)),
        shows=np.flatnonzero(wrong),
    )


def _clipped(tokens: Tokens) -> Iterator[Explanation]:
    """Log-probs of which none is below some number, at which all recur that would be.

    It is the least one of more rows than any other number is, as some rows alone may be clipped.
    """
    recorded, exact = tokens.recorded, tokens.exact
    lows = [np.fmin.reduce(own) for own in tokens.by_response(recorded)]
    values, counts = np.unique(lows, return_counts=True, equal_nan=False)
    least = float(values[np.argmax(counts)])
    same = recorded == least
    if least > _ZERO_BELOW or same.sum() < _RECURS or (exact[same] > least + _APART).any():
        return  # at zero none was recorded
    yield tokens.null.as_fault(
        "clipped",
        f"log-probs are clipped at {least:.7g}, as {same.sum()} of them are",
        predicted=np.maximum(exact, least),
        parameters={"least": least},
        shows=np.flatnonzero(same & (exact < least - _APART)),
    )


def _recurring(recorded: np.ndarray, exact: np.ndarray, apart: np.ndarray) -> np.ndarray:
    """bool[N], which of those `apart` have a value that recurs far more often than those near it.

    None, if that is more than a few values. Of the values near it the most frequent may be other
    sentinels, and are not compared.
    """
    values, which, counts = np.unique(recorded, return_inverse=True, return_counts=True)
    own = np.bincount(which[apart], minlength=len(values))
    found = []
    for number in np.flatnonzero(own >= _RECURS):
        same = apart & (which == number)
        beside = np.r_[counts[max(number - _BESIDE, 0) : number], counts[number + 1 :][:_BESIDE]]
        usual = np.sort(beside)[: 1 - _MOST_VALUES].max(initial=0)
        if len(np.unique(exact[same].round(4))) >= _RECURS and own[number] >= _OFTENER * usual:
            found.append(number)
    return apart & np.isin(which, found if len(found) <= _MOST_VALUES else [])


def _choice(chosen: np.ndarray) -> float:
    """Nats that it costs to say which bool[M] are chosen: the entropy of the share, times M."""
    count, size = int(chosen.sum()), len(chosen)
    return sum(n * float(np.log(n / size)) for n in (count, size - count) if n)


def _masks(tokens: Tokens) -> Iterator[Explanation]:
    """Tokens that were left out because they equal one token, the pad token.

    Left out are those that a loss mask hides, or that have a log-prob of exactly 0.
    """
    ids = np.concatenate([r.tokens for r in tokens.responses])
    zero = (tokens.recorded == 0) & (tokens.gap > 1e-3)
    padding = _padding(tokens)
    for left_out in (tokens.hidden & ~padding, zero):
        if left_out.sum() < _LEAST_LEFT_OUT:
            continue
        names, counts = np.unique(ids[left_out], return_counts=True)
        token = names[np.argmax(counts)]
        if (ids[left_out] != token).any() or not left_out[(ids == token) & ~padding].all():
            continue
        share = max((ids == token).mean(), 1 / len(ids))
        text = f"every token {token} is left out, as by a mask made as `token != pad`"
        if _behind_an_end(tokens)[left_out].all():
            text = f"responses are filled up with token {token} behind their end, without a mask"
        yield tokens.null.as_fault(
            "pad_mask",
            text,
            predicted=np.where(left_out, 0.0, tokens.exact),
            structure=-float(left_out.sum()) * np.log(share),
            shows=np.flatnonzero(left_out),
        )


def _behind_an_end(tokens: Tokens) -> np.ndarray:
    """bool[N], tokens that stand somewhere behind an end token of their response."""
    ends = (np.isin(r.tokens, tokens.stop_tokens) for r in tokens.responses)
    return np.concatenate([np.cumsum(own) > own for own in ends])


def _padding(tokens: Tokens) -> np.ndarray:
    """bool[N], what a loss mask hides behind a response: nothing that was drawn.

    But for a first token there that ends the response.
    """
    sizes = [r.drawn_size(tokens.stop_tokens) for r in tokens.responses]
    return tokens.position >= np.repeat(sizes, [len(r) for r in tokens.responses])


def _other_rows(tokens: Tokens) -> Iterator[Explanation]:
    """Rows whose log-probs are those of another row.

    The row is looked for among those that have the nearest first log-probs.
    """
    places = tokens.by_response(np.arange(len(tokens.sequence)))
    seen = [own[~tokens.hidden[own]] for own in places]
    exact, recorded = tokens.exact, tokens.recorded
    heads, wanted = (np.stack([_head(x[own]) for own in seen]) for x in (exact, recorded))
    near = min(_NEAREST, len(seen))
    nearest = np.reshape(KDTree(heads).query(wanted, k=near, p=1)[1], (len(seen), near))
    predicted, pairs = exact.copy(), []
    for row, own in enumerate(seen):
        gap = np.abs(tokens.gap[own])
        if len(own) < _LEAST_ROW or gap.mean() < _LEAST_GAP:
            continue
        others = [exact[seen[other]] for other in nearest[row]]
        gaps = [np.abs(recorded[own][: len(x)] - x[: len(own)]).mean() for x in others]
        best = int(np.argmin(gaps))
        size = min(len(own), len(others[best]))
        if gaps[best] < gap[:size].mean() / 5 and 2 * size > len(own):
            predicted[own], predicted[own[:size]] = np.nan, others[best][:size]
            pairs.append((row, int(nearest[row, best])))
    if not pairs:
        return
    chosen = np.isin(np.arange(len(seen)), [row for row, _ in pairs])
    first, second = (tokens.responses[i].where for i in pairs[0])
    yield tokens.null.as_fault(
        "other_row",
        f"{len(pairs)} of {len(seen)} rows hold the log-probs of another row, as {first} holds"
        f" those of {second}",
        predicted=predicted,
        structure=_choice(chosen) - len(pairs) * float(np.log(len(seen))),
        shows=np.flatnonzero(np.abs(np.nan_to_num(predicted, nan=np.inf) - exact) > _BAD),
    )


def _head(log_probs: np.ndarray) -> np.ndarray:
    head = log_probs[:_HEAD]
    return np.pad(head, (0, _HEAD - len(head)))


def ending(tokens: Tokens) -> Iterator[Explanation]:
    """An end token that was stripped, or replaced by another under its log-prob."""
    if not tokens.stop_tokens and all(r.end is None for r in tokens.responses):
        return
    # They end in another token, and are not said to have been cut, or ended by something else.
    otherwise = np.asarray([r.ended in ("cut", "other") for r in tokens.responses])
    suspect = ~_has_end(tokens) & ~otherwise & ~tokens.hidden[tokens.lasts]
    if suspect.any():
        yield from _other_end(tokens, suspect)
        if tokens.stop_tokens:
            yield from _replaced(tokens, suspect)
        yield from _stripped(tokens, suspect)


def _other_end(tokens: Tokens, suspect: np.ndarray) -> Iterator[Explanation]:
    """A token that ends responses though it is no end token of the model.

    Under the null a response ends after any token with the same chance; if this one ends it, then
    after this one for certain, and it stands nowhere else.
    """
    lengths = np.asarray([len(r) for r in tokens.responses])
    suspect = suspect & (lengths < lengths.max())  # the longest may have been cut
    if not suspect.any():
        return
    last = np.asarray([r.tokens[-1] for r in tokens.responses])
    names, counts = np.unique(last[suspect], return_counts=True)
    token, count = int(names[np.argmax(counts)]), int(counts.max())
    ids = np.concatenate([r.tokens for r in tokens.responses])
    inside = int(((ids == token) & ~tokens.hidden).sum()) - int((last == token).sum())
    if 2 * count <= suspect.sum() or inside:
        return
    hazard = suspect.sum() / (~tokens.hidden).sum()
    yield tokens.null.as_fault(
        "other_end_token",
        f"the engine ends responses at token {token}, as it did {count} of {suspect.sum()}"
        " times, which is no end token of the model",
        structure=-count * float(np.log(hazard)) - float(np.log(tokens.vocabulary)),
        shows=tokens.lasts[suspect & (last == token)],
    )


def _replaced(tokens: Tokens, suspect: np.ndarray) -> Iterator[Explanation]:
    """Last tokens that are no end tokens, but have the log-prob of one."""
    suspects = tokens.lasts[suspect]
    stops = tokens.evidence.stops[suspects].astype(np.float64)
    own = tokens.evidence.logit[suspects].astype(np.float64)
    temperature = np.asarray([r.declared.temperature or 1.0 for r in tokens.responses])
    moved = (stops - own[:, None]) / temperature[suspect][:, None]
    raw = np.asarray([r.declared.raw for r in tokens.responses])[suspect][:, None]
    processed = tokens.exact[suspects][:, None] + moved
    of_stop = np.where(raw, tokens.evidence.raw_stops[suspects].astype(np.float64), processed)
    gap = np.abs(tokens.recorded[suspects][:, None] - of_stop)
    # The end token where its log-prob is the one that was recorded, the token itself elsewhere.
    nearest = of_stop[np.arange(len(gap)), np.argmin(gap, axis=1)]
    replaced = gap.min(axis=1) < np.abs(tokens.gap[suspects])
    predicted = tokens.exact.copy()
    predicted[suspects[replaced]] = nearest[replaced]
    if replaced.any():
        yield tokens.null.as_fault(
            "end_token_replaced",
            "another token stands where the end token stood, under the end token's log-prob",
            predicted=predicted,
            structure=-float(replaced.sum()) * np.log(len(tokens.stop_tokens) + 1),
            shows=suspects[replaced],
        )


def _stripped(tokens: Tokens, suspect: np.ndarray) -> Iterator[Explanation]:
    """Responses that end where the model draws an end token, without one.

    Under the null a response ends for a reason of its own, with the same chance after every token
    that the model drew; if its end token was stripped, with the model's chance of an end token
    there. Of the suspects a share, which is fitted, may still have ended for a reason of its own:
    such as an abort that nobody wrote down. Responses that were cut, or may have been because they
    are as long as the longest, went on until then. One that is said to have ended by an end token,
    which is named, but has another one last, is evidence by itself.
    """
    lengths = np.asarray([len(r) for r in tokens.responses])
    longest = lengths == lengths.max()
    named = suspect & np.asarray([r.end is not None for r in tokens.responses])
    cut = longest & suspect & ~named if longest.sum() > 1 else np.zeros(len(lengths), bool)
    stripped = suspect & ~cut
    going = cut | np.asarray([r.ended == "cut" for r in tokens.responses])
    if not stripped.any():
        return
    odds, rest = _odds(tokens, stripped, going)
    rest -= _GOES_ON * _stops_inside(tokens)
    gain, lost = _fit_mixture(odds + np.where(named[stripped], _NAMED, 0.0))
    yield tokens.null.as_fault(
        "end_token_stripped",
        "the end token was stripped: responses end where one was due, and have none",
        structure=rest + gain,
        shows=tokens.lasts[stripped][lost],
    )


def _stops_inside(tokens: Tokens) -> int:
    """How many end tokens stand inside of responses, where the system went on."""
    inside = np.isin(np.concatenate([r.tokens for r in tokens.responses]), tokens.stop_tokens)
    inside[tokens.lasts] = False
    return int((inside & ~tokens.hidden).sum())


def _odds(tokens: Tokens, stripped: np.ndarray, going: np.ndarray) -> tuple[np.ndarray, float]:
    """Nats by which each stripped response speaks for it, f64[M], and all the others together.

    If some end tokens are there, a share of them was stripped. If none is, the system may have
    drawn none, which is likelier than the model by the chances of those that were not drawn.
    """
    kept = _has_end(tokens)
    drawn = np.bincount(tokens.sequence[~tokens.hidden], minlength=len(tokens.responses))
    risk = drawn[stripped | going | kept].sum()
    hazard = stripped.sum() / (risk + stripped.sum())
    stop = np.minimum(tokens.evidence.end_stop.astype(np.float64), -1e-6)
    own = -drawn * np.log1p(-hazard)
    odds = own + stop - np.log(hazard)
    if not kept.any():
        inner = _inner_stops(tokens)
        return (odds + inner)[stripped], float((own + inner)[going].sum())
    share = stripped.sum() / (stripped.sum() + kept.sum())
    rest = float(own[going | kept].sum() + kept.sum() * np.log1p(-share))
    cost = penalty(1, int(stripped.sum() + kept.sum()))
    return odds[stripped] + np.log(share), rest - cost


def _has_end(tokens: Tokens) -> np.ndarray:
    """bool[S], responses whose last token is an end token, of the model or of the request."""
    last = np.asarray([r.tokens[-1] for r in tokens.responses])
    named = np.asarray([r.tokens[-1] in (r.end, *r.stops) for r in tokens.responses])
    return (np.isin(last, tokens.stop_tokens) | named) & ~tokens.hidden[tokens.lasts]


def _fit_mixture(odds: np.ndarray) -> tuple[float, np.ndarray]:
    """Nats that a mixture gains whose parts differ by `odds` f64[M], and which are of the part.

    The share of the others is the likeliest; one that is not 0 costs a fitted parameter.
    """
    gains = []
    for share in _SHARES:
        with np.errstate(divide="ignore"):
            both = np.logaddexp(np.log1p(-share) + odds, np.log(share))
        cost = penalty(1, len(odds)) if share else 0.0
        gains.append((float(both.sum()) - cost, share))
    gain, share = max(gains)
    with np.errstate(divide="ignore"):
        return gain, odds + np.log1p(-share) > np.log(share)


def _inner_stops(tokens: Tokens) -> np.ndarray:
    """f64[S], log of the chance that no end token was drawn inside of a response."""
    evidence = tokens.evidence
    if not tokens.stop_tokens:
        return np.zeros(len(tokens.responses))
    at_one = evidence.moments[:, AT_ONE, 0].astype(np.float64)
    stops = evidence.stops.astype(np.float64)
    chance = np.clip(np.exp(stops - at_one[:, None]).sum(axis=1), 0.0, 1 - 1e-9)
    inner = np.zeros(len(tokens.responses))
    np.add.at(inner, tokens.sequence, np.where(tokens.hidden, 0.0, np.log1p(-chance)))
    return inner
