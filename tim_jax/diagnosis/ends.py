"""Explanations of where responses end: an end token that was stripped, or replaced by another.

A response whose last token a loss mask hides ends with something that the model did not draw, such
as the output of a tool. It says nothing here.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tim_jax.diagnosis.evidence import AT_ONE
from tim_jax.diagnosis.explanations import Explanation, Tokens, null


def ending(tokens: Tokens) -> Iterator[Explanation]:
    """An end token that was stripped, or replaced by another under its log-prob."""
    if not tokens.stop_tokens:
        return
    ids = np.asarray([r.tokens[-1] for r in tokens.responses])
    cut = np.asarray([r.finished is False for r in tokens.responses])
    suspect = ~np.isin(ids, tokens.stop_tokens) & ~cut & ~tokens.hidden[tokens.lasts]
    if suspect.any():
        base = null(tokens)
        yield from _replaced(tokens, base, suspect)
        yield from _stripped(tokens, base, suspect)


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
    there. Responses that were cut, or may have been because they are as long as the longest, went
    on until then.
    """
    lengths = np.asarray([len(r) for r in tokens.responses])
    longest = lengths == lengths.max()
    cut = longest & suspect if longest.sum() > 1 else np.zeros(len(lengths), bool)
    stripped = suspect & ~cut
    going = stripped | cut | np.asarray([r.finished is False for r in tokens.responses])
    if not stripped.any():
        return
    drawn = np.bincount(tokens.sequence[~tokens.hidden], minlength=len(lengths))[going].sum()
    hazard = stripped.sum() / (drawn + stripped.sum())
    by_chance = stripped.sum() * np.log(hazard) + drawn * np.log1p(-hazard)
    stop = np.minimum(tokens.evidence.end_stop[stripped].astype(np.float64), -1e-6)
    by_model = stop.sum() + _inner_stops(tokens)[going].sum()
    yield replace(
        base,
        name="end_token_stripped",
        text="the end token was stripped: responses end where one was due, and have none",
        kind="fault",
        structure=float(by_model - by_chance),
        shows=tokens.lasts[stripped],
    )


def _inner_stops(tokens: Tokens) -> np.ndarray:
    """f64[S], log of the chance that no end token was drawn inside of a response."""
    evidence = tokens.evidence
    at_one = evidence.moments[:, AT_ONE, 0].astype(np.float64)
    stops = evidence.stops.astype(np.float64)
    chance = np.clip(np.exp(stops - at_one[:, None]).sum(axis=1), 0.0, 1 - 1e-9)
    inner = np.zeros(len(tokens.responses))
    np.add.at(inner, tokens.sequence, np.where(tokens.hidden, 0.0, np.log1p(-chance)))
    return inner
