"""Rollouts of two parts: a clean bulk, and a minority of tokens or rows that is wrong.

The noise model is of the bulk, and hardly sees a minority. So what is known to go wrong in a part
is looked for by itself: sentinels in place of missing log-probs, log-probs of another row, and any
explanation that holds in some rows alone. `outside` finds a part that nothing explains.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.spatial import KDTree

from tim_jax.instruments.diagnosis import noise
from tim_jax.instruments.diagnosis.explanations import Explanation, Tokens
from tim_jax.instruments.diagnosis.judged import LEAST_MOVE
from tim_jax.instruments.diagnosis.rows import Response

_ZERO_BELOW = -0.25  # exact log-prob of a token that no sound engine calls certain
_NO_LOG_PROB = -20.0  # whole numbers up to here are sentinels
_APART = 0.25  # nats between a value that recurs and the exact one, to count
_RECURS = 5  # times, at tokens of different exact log-probs
_HEAD = 8  # tokens by which the row is looked for whose log-probs stand in another
_LEAST_ROW = 3  # tokens of a row that can be told from another
_LEAST_GAP = 0.01  # mean |d| of a row that is looked for among others
_NEAREST = 4  # rows that are compared as a whole
_BAD, _RARE = 0.1, 0.01  # nats and share of tokens that are taken for outside of the noise


@dataclass(frozen=True)
class Part:
    """The bad part of N tokens.

    Attributes:
        tokens: of which it is a part: all, or those on which an explanation was tried.
        places: i64[M], its tokens among them.
        rows: (response, how many of its tokens), of each response that has any.
    """

    tokens: Tokens
    places: np.ndarray
    rows: tuple[tuple[Response, int], ...]


def part_of(tokens: Tokens, inside: np.ndarray) -> Part | None:
    """A part bool[N], unless it is nothing or more than half of what is compared."""
    inside = inside & ~tokens.hidden
    count = int(inside.sum())
    if not count or 2 * count > int((~tokens.hidden).sum()):
        return None
    numbers, counts = np.unique(tokens.sequence[inside], return_counts=True)
    rows = tuple((tokens.responses[i], int(n)) for i, n in zip(numbers, counts, strict=True))
    return Part(tokens, np.flatnonzero(inside), rows)


def outside(tokens: Tokens, predicted: np.ndarray) -> np.ndarray:
    """bool[N], tokens that are no noise about f64[N] predictions: more likely anywhere in 20 nats.

    Of which a hundredth are taken to be.
    """
    residual = tokens.recorded - predicted
    weight = noise.weights(tokens.evidence.exact)
    fitted = noise.fit(residual, weight)
    far = fitted.densities + np.log1p(-_RARE) < noise.NOTHING + np.log(_RARE)
    return far & (np.abs(np.nan_to_num(residual)) > _BAD)


def of_tokens(tokens: Tokens, base: Explanation) -> list[Explanation]:
    """What goes wrong in a part of the tokens or rows, and needs no other forward."""
    found = [_sentinels(tokens, base), _other_rows(tokens, base)]
    return [one for one in found if one is not None]


def _sentinels(tokens: Tokens, base: Explanation) -> Explanation | None:
    """Numbers in place of log-probs that are missing: 0, -9999, or any that recurs."""
    recorded, exact = tokens.recorded, base.predicted
    wrong = ((recorded == 0) & (exact < _ZERO_BELOW)) | (
        (recorded == np.round(recorded)) & (recorded <= _NO_LOG_PROB) & (exact - recorded > 2)
    )
    apart = np.flatnonzero((np.abs(recorded - exact) > _APART) & ~wrong)
    values, which = np.unique(recorded[apart], return_inverse=True)
    for number in np.flatnonzero(np.bincount(which, minlength=len(values)) >= _RECURS):
        same = apart[which == number]
        if len(np.unique(exact[same].round(4))) >= _RECURS:
            wrong[same] = True
    if not wrong.any():
        return None
    values, counts = np.unique(recorded[wrong], return_counts=True)
    named = [f"{x:.7g}" for x in values[np.argsort(-counts)][:3]]
    text = f"{wrong.sum()} log-probs are {' or '.join(named)}: a sentinel, where none was recorded"
    if not values.any():
        text = f"{wrong.sum()} log-probs of uncertain tokens are exactly 0: none was recorded there"
    return replace(
        base,
        name="sentinel",
        text=text,
        kind="fault",
        predicted=np.where(wrong, recorded, exact),
        structure=_choice(wrong[~tokens.hidden]) - float(np.log(len(values)) * len(values)),
        shows=np.flatnonzero(wrong),
    )


def _choice(chosen: np.ndarray) -> float:
    """Nats that it costs to say which bool[M] are chosen: the entropy of the share, times M."""
    count, size = int(chosen.sum()), len(chosen)
    return sum(n * float(np.log(n / size)) for n in (count, size - count) if n)


def _other_rows(tokens: Tokens, base: Explanation) -> Explanation | None:
    """Rows whose log-probs are those of another row.

    The row is looked for among those that have the nearest first log-probs.
    """
    places = np.split(np.arange(len(tokens.sequence)), tokens.lasts[:-1] + 1)
    seen = [own[~tokens.hidden[own]] for own in places]
    exact, recorded = base.predicted, tokens.recorded
    heads = np.stack([_head(exact[own]) for own in seen])
    near = min(_NEAREST, len(seen))
    wanted = np.stack([_head(recorded[own]) for own in seen])
    found = np.reshape(KDTree(heads).query(wanted, k=near, p=1)[1], (len(seen), near))
    predicted, pairs = exact.copy(), []
    for row, own in enumerate(seen):
        gap = np.abs(recorded[own] - exact[own])
        if len(own) < _LEAST_ROW or gap.mean() < _LEAST_GAP:
            continue
        others = [exact[seen[other]] for other in found[row]]
        gaps = [np.abs(recorded[own][: len(x)] - x[: len(own)]).mean() for x in others]
        best = int(np.argmin(gaps))
        if gaps[best] < gap.mean() / 5 and 2 * len(others[best]) > len(own):
            size = min(len(own), len(others[best]))
            predicted[own], predicted[own[:size]] = np.nan, others[best][:size]
            pairs.append((row, int(found[row, best])))
    if not pairs:
        return None
    chosen = np.isin(np.arange(len(seen)), [row for row, _ in pairs])
    first, second = (tokens.responses[i].where for i in pairs[0])
    return replace(
        base,
        name="other_row",
        text=f"{len(pairs)} of {len(seen)} rows hold the log-probs of another row, as {first} holds"
        f" those of {second}",
        kind="fault",
        predicted=predicted,
        structure=_choice(chosen) - len(pairs) * float(np.log(len(seen))),
        shows=np.flatnonzero(np.abs(np.nan_to_num(predicted, nan=np.inf) - exact) > _BAD),
    )


def _head(log_probs: np.ndarray) -> np.ndarray:
    head = log_probs[:_HEAD]
    return np.pad(head, (0, _HEAD - len(head)))


def in_some_rows(
    explanation: Explanation, tokens: Tokens, base: Explanation, gains: np.ndarray
) -> Explanation | None:
    """An explanation that holds in those rows alone where it is likelier than the null.

    Args:
      gains: f64[N], nats by which it is likelier at each token.

    Returns:
      None if it holds in all rows or in none, or says nothing of log-probs.
    """
    moved = np.abs(explanation.predicted - base.predicted)
    whole = explanation.structure or explanation.sizes is not None
    if whole or not (np.nan_to_num(moved) > LEAST_MOVE)[~tokens.hidden].any():
        return None
    by_row = np.bincount(tokens.sequence, gains, minlength=len(tokens.responses))
    chosen = by_row > 0
    for _ in range(3):  # the share and the rows, in turn
        share = min(max(chosen.mean(), 1 / len(chosen)), 1 - 1e-9)
        chosen = by_row > np.log1p(-share) - np.log(share)
    if chosen.all() or not chosen.any():
        return None
    inside = chosen[tokens.sequence]
    return replace(
        explanation,
        text=f"{explanation.text}, in {chosen.sum()} of {len(chosen)} rows",
        predicted=np.where(inside, explanation.predicted, base.predicted),
        drawn=np.where(inside, explanation.drawn, base.drawn),
        structure=_choice(chosen),
        rows=np.flatnonzero(chosen),
    )
