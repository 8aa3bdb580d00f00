"""Explanations of where responses end: an end token that was stripped, or replaced by another.

A response ends by an end token, by something else (a stop string, a tool call, an abort), or it is
cut. What is said to have ended by something else needs no end token.

A response whose last token a loss mask hides ends with something that the model did not draw, such
as the output of a tool. It says nothing here.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tim_jax.instruments.diagnosis import noise
from tim_jax.instruments.diagnosis.evidence import AT_ONE
from tim_jax.instruments.diagnosis.explanations import Explanation, Tokens, null


def ending(tokens: Tokens) -> Iterator[Explanation]:
    """An end token that was stripped, or replaced by another under its log-prob."""
    if not tokens.stop_tokens and all(r.end is None for r in tokens.responses):
        return
    suspect = _suspect(tokens)
    if suspect.any():
        base = null(tokens)
        if tokens.stop_tokens:
            yield from _replaced(tokens, base, suspect)
        yield from _stripped(tokens, base, suspect)


def _suspect(tokens: Tokens) -> np.ndarray:
    """bool[S], responses that may have lost an end token.

    They end in another token, and are not said to have been cut, or ended by something else.
    """
    otherwise = np.asarray([r.ended in ("cut", "other") for r in tokens.responses])
    return ~_has_end(tokens) & ~otherwise & ~tokens.hidden[tokens.lasts]


def _replaced(tokens: Tokens, base: Explanation, suspect: np.ndarray) -> Iterator[Explanation]:
    """Last tokens that are no end tokens, but have the log-prob of one."""
    suspects = tokens.lasts[suspect]
    stops = tokens.evidence.stops[suspects].astype(np.float64)
    own = tokens.evidence.logit[suspects].astype(np.float64)
    temperature = np.asarray([r.declared.temperature or 1.0 for r in tokens.responses])
    moved = (stops - own[:, None]) / temperature[suspect][:, None]
    of_stop = base.predicted[suspects][:, None] + moved
    gap = np.abs(tokens.recorded[suspects][:, None] - of_stop)
    predicted = base.predicted.copy()
    # The end token where its log-prob is the one that was recorded, the token itself elsewhere.
    nearest = of_stop[np.arange(len(gap)), np.argmin(gap, axis=1)]
    own_gap = np.abs(tokens.recorded[suspects] - predicted[suspects])
    replaced = gap.min(axis=1) < own_gap
    predicted[suspects] = np.where(replaced, nearest, predicted[suspects])
    if replaced.any():
        yield replace(
            base,
            name="end_token_replaced",
            text="another token stands where the end token stood, under the end token's log-prob",
            kind="fault",
            predicted=predicted,
            structure=-float(replaced.sum()) * np.log(len(tokens.stop_tokens) + 1),
            shows=suspects[replaced],
        )


def _stripped(tokens: Tokens, base: Explanation, suspect: np.ndarray) -> Iterator[Explanation]:
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
    gain, lost = _mixed(odds + np.where(named[stripped], _NAMED, 0.0))
    yield replace(
        base,
        name="end_token_stripped",
        text="the end token was stripped: responses end where one was due, and have none",
        kind="fault",
        structure=rest + gain,
        shows=tokens.lasts[stripped][lost],
    )


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
    cost = noise.penalty(1, int(stripped.sum() + kept.sum()))
    return odds[stripped] + np.log(share), rest - cost


def _has_end(tokens: Tokens) -> np.ndarray:
    """bool[S], responses whose last token is an end token, of the model or of the request."""
    last = np.asarray([r.tokens[-1] for r in tokens.responses])
    named = np.asarray([r.end == r.tokens[-1] for r in tokens.responses])
    return (np.isin(last, tokens.stop_tokens) | named) & ~tokens.hidden[tokens.lasts]


# Nats by which an end token that is named but not there speaks for one that was stripped.
_NAMED = 7.0
_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def _mixed(odds: np.ndarray) -> tuple[float, np.ndarray]:
    """Nats that a mixture gains whose parts differ by `odds` f64[M], and which are of the part.

    The share of the others is the likeliest; one that is not 0 costs a fitted parameter.
    """
    found = []
    for share in _SHARES:
        with np.errstate(divide="ignore"):
            both = np.logaddexp(np.log1p(-share) + odds, np.log(share))
        cost = noise.penalty(1, len(odds)) if share else 0.0
        found.append((float(both.sum()) - cost, share))
    gain, share = max(found)
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
