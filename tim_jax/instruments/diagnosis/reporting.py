"""What is found without a further forward: how log-probs are reported, and turns that changed.

Explanations are of temperatures, truncations, bases, shifts and vocabularies: all follow from the
evidence of the first forward.

Of an episode that another system recorded, it is asked whether each turn went on from what was
drawn. Systems that render and tokenise an episode anew for every turn score tokens that nobody
drew. This shows where a system records one sample for each turn: the prompt of a turn must begin
with the prompt and the response of the turn before it, token for token. Where it records whole
conversations, their drawn tokens must be those of the responses.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.instruments.diagnosis.declared import UNSHAPED, Distribution
from tim_jax.instruments.diagnosis.evidence import AT_ONE, COLDEST, HOTTEST, LIKELIEST, at_edge
from tim_jax.instruments.diagnosis.explanations import (
    OFF,
    WITHIN,
    Change,
    Explanation,
    Tokens,
    by_distribution,
    mean_of,
    minimum,
)
from tim_jax.instruments.diagnosis.rollouts import Response

# Of a log-temperature. Where log-probs agree to 1e-7, a coarser fit would decide what is named.
_TEMPERATURE_WITHIN = 1e-9
_AT_END = 1e-4  # of a log-temperature: at an end of what is fitted, it may lie beyond
_FITTED = 4096  # tokens that parameters are fitted on
_ODD, _LEAST_ODD = 5.0, 0.01  # times the median row's mean |d|, and nats, of a row that is odd
_MOST_PADDING = 4096  # rows of padding in a vocabulary
_TRUNCATIONS = {
    "top_k": (1, 2, 3, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128),
    "top_p": (0.1, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995),
    "min_p": (0.001, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5),
}
_DRAWN_AT = (
    "drawn at {}, but recorded without it; banned tokens, penalties and a selection of responses"
    " look alike"
)
_PROMISING = 0.5  # of the gain of the likeliest truncation: what has more is fitted closely
_CLOSER = 4  # times, each a fourth as wide: a top-p to some 2e-4
_EXCLUDED = 5.0  # nats less of a draw: it is left out, and not by what is declared
_NEAR = 2.0  # nats less for a round value
Kind = Literal["retokenised", "rewritten", "missing", "added"]
_WAS = {"retokenised": "tokenised again", "rewritten": "rewritten", "missing": "cut short"}
_AROUND = 8  # tokens of the text in a message


def reporting(tokens: Tokens) -> Iterator[Explanation]:
    """Every explanation that needs this evidence alone, but those of `parts`."""
    base = tokens.null
    yield from _of_declared(tokens)
    for some in (_fitting_part(tokens), _odd_rows(tokens)):
        if some is not None:
            yield from _temperatures(tokens, some)
            yield from _truncations(tokens, some)
            yield from _padded(tokens, some)
    for number in (2, 10):
        predicted = base.predicted / np.log(number)
        text = f"the log-probs are logarithms to base {number}, not natural ones"
        yield base.as_fault("log_base", text, predicted=predicted)
    same = np.diff(tokens.sequence) == 0
    for which, moved, inside in (
        ("after", np.roll(base.predicted, -1), np.append(same, False)),
        ("before", np.roll(base.predicted, 1), np.insert(same, 0, False)),
    ):
        text = f"each token has the log-prob of the token {which} it"
        yield base.as_fault("shifted", text, predicted=np.where(inside, moved, np.nan))
    yield from _cut(tokens)
    first, gap = tokens.position == 0, np.abs(tokens.gap) / tokens.weights
    # Other weights are off at the others too; those up to some token, at the second.
    others = max(mean_of(gap[~first]), mean_of(gap[tokens.position == 1]))
    if mean_of(gap[first]) > _ODD * others:
        text = "the first token of each response is of another context: another prompt or template"
        predicted = np.where(first, np.nan, base.predicted)
        yield base.as_fault("first_tokens", text, predicted=predicted)


def _fault(name: str, text: str, arrays: tuple[np.ndarray, np.ndarray], **given) -> Explanation:
    return Explanation(name, text, "fault", *arrays, **given)


def _of_declared(tokens: Tokens) -> Iterator[Explanation]:
    """What is declared of draws but not in the log-probs, or the reverse: nothing is fitted."""
    declared = {r.declared for r in tokens.responses}
    drawn = tokens.null.drawn
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


def _changed(tokens: Tokens, which: str, change: Change) -> tuple[np.ndarray, np.ndarray]:
    """`by_distribution` with one change of the log-probs, of the draws, or of "both"."""
    reported, drawn = (change if which in (one, "both") else None for one in ("reported", "drawn"))
    return by_distribution(tokens, reported, drawn)


def _likelihood(tokens: Tokens, which: str, change: Change) -> float:
    predicted, drawn = _changed(tokens, which, change)
    of_draws = float(drawn[tokens.shows_draw].sum())
    return of_draws if which == "drawn" else tokens.fit(predicted).total + of_draws


def _at_temperature(log_temperature: float) -> Change:
    temperature = float(np.exp(log_temperature))
    return lambda declared: replace(declared, temperature=temperature)


def _temperatures(tokens: Tokens, some: Tokens) -> Iterator[Explanation]:
    """Other temperatures, fitted to `some` of the responses."""
    grid = np.log(np.geomspace(COLDEST, HOTTEST, 37))
    for which, name, text in (
        ("both", "temperature", "drawn and recorded at {}"),
        ("reported", "recorded_temperature", "the log-probs are those at {}"),
        ("drawn", "drawn_temperature", _DRAWN_AT),
    ):

        def loss(x: float, which: str = which) -> float:
            return -_likelihood(some, which, _at_temperature(x))

        within = WITHIN if which == "drawn" else _TEMPERATURE_WITHIN
        x = minimum(loss, grid, within=within)
        words, parameters = _named_temperature(x)
        arrays = _changed(tokens, which, _at_temperature(x))
        yield _fault(name, text.format(words), arrays, parameters=parameters)


def _named_temperature(log_temperature: float) -> tuple[str, dict[str, float]]:
    """A fitted temperature in words and as a parameter, or the end of what is fitted."""
    if log_temperature - np.log(COLDEST) < _AT_END:
        return f"a temperature of {COLDEST:.3g} or less", {"temperature_at_most": COLDEST}
    if np.log(HOTTEST) - log_temperature < _AT_END:
        return f"a temperature of {HOTTEST:.3g} or more", {"temperature_at_least": HOTTEST}
    fitted = float(np.exp(log_temperature))
    return f"temperature {fitted:.4g}", {"temperature": fitted}


def _truncated(name: str, value: float) -> Change:
    if name == "min_p":
        return lambda declared: replace(declared, shaping=replace(UNSHAPED, min_p=value))
    value = int(value) if name == "top_k" else value
    return lambda declared: replace(declared, **{name: value})


def _truncations(tokens: Tokens, some: Tokens) -> Iterator[Explanation]:
    """A truncation that is neither declared nor recorded, renormalised in the log-probs or not.

    It is fitted to `some` of the responses: among usual values, and then between them if another
    truncation is not much likelier.
    """
    if tokens.replays.any():
        return
    # The mass that a declared top-k keeps is not known where it is beyond the stored logits.
    unknown = any(r.declared.top_k > LIKELIEST for r in tokens.responses)
    for which, suffix, words in (("both", "", ""), ("drawn", "_ignored", "not ")):
        fits: dict[str, dict[float, float]] = {}
        for name, values in _TRUNCATIONS.items():
            if name == "top_k" or not unknown:
                most = min(tokens.vocabulary, LIKELIEST + 1)
                fit = partial(_truncated_fit, some, which, name)
                fits[name] = {x: fit(x) for x in values if x < most}
        least = float(some.null.drawn[some.shows_draw].sum())
        least += some.null_fit.total if which == "both" else 0.0
        highest = max(max(own.values()) for own in fits.values()) - least
        for name, own in fits.items():
            if max(own.values()) - least > max(_PROMISING * highest, 0.0):
                fit = partial(_truncated_fit, some, which, name)
                own = _closer(own, fit, digits=0 if name == "top_k" else 3)
            value = float(f"{_roundest(own):.4g}")
            yield _fault(
                f"{name}{suffix}",
                f"drawn with {name} = {value:g}, the log-probs {words}renormalised over it",
                _without_impossible(tokens, which, _truncated(name, value)),
                parameters={name: float(value)},
            )


def _without_impossible(
    tokens: Tokens, which: str, change: Change
) -> tuple[np.ndarray, np.ndarray]:
    """`_changed` by a truncation; what it leaves out cannot have been drawn.

    But for tokens at its edge, where numerics of the size that log-probs show decide.
    """
    predicted, drawn = _changed(tokens, which, change)
    fit = tokens.null_fit if which == "drawn" else tokens.fit(predicted)
    far = drawn < tokens.null.drawn - _EXCLUDED
    for declared, own in tokens.by_declared:
        if far[own].any():
            scaling = 1.0 if declared.raw else declared.temperature or 1.0
            off = OFF * fit.scale * scaling
            far[own] &= ~at_edge(tokens.evidence.take(own), change(declared), off)
    return predicted, np.where(far, -np.inf, drawn)


def _truncated_fit(tokens: Tokens, which: str, name: str, value: float) -> float:
    return _likelihood(tokens, which, _truncated(name, value))


def _closer(
    fits: dict[float, float], fit: Callable[[float], float], *, digits: int
) -> dict[float, float]:
    """Value -> fit, of more values about the best one, and of it with at most so many digits."""
    for _ in range(_CLOSER):
        tried = sorted(fits)
        place = tried.index(max(tried, key=fits.__getitem__))
        ends = tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)]
        between = np.linspace(*ends, 9)
        between = between if digits else np.unique(between.round())
        fits = fits | {x: fit(x) for x in between.tolist() if x not in fits}
    best = max(fits, key=fits.__getitem__)
    rounded = {round(best, count) for count in range(1, digits + 1)} - {*fits, 0.0, 1.0}
    return fits | {x: fit(x) for x in rounded}


def _roundest(fits: dict[float, float]) -> float:
    """The value of fewest digits among those that fit nearly best: people set round ones."""
    best = max(fits.values())
    near = [x for x, found in fits.items() if found >= best - _NEAR]
    return min(near, key=lambda x: (len(f"{x:.6g}"), -fits[x]))


def _fitting_part(tokens: Tokens) -> Tokens:
    """Whole responses, evenly chosen, of about as many tokens as parameters are fitted on."""
    count, stride = len(tokens.responses), max(1, round(len(tokens.sequence) / _FITTED))
    return tokens if stride == 1 else tokens.take(range(0, count, min(stride, count)))


def _odd_rows(tokens: Tokens) -> Tokens | None:
    """The minority of responses whose gap is much larger than that of the others, if there is one.

    What is fitted to all of them would not show what is wrong with these.
    """
    gap = np.nan_to_num(np.abs(tokens.gap))
    counts = np.bincount(tokens.sequence[~tokens.hidden], minlength=len(tokens.responses))
    means = np.bincount(tokens.sequence, gap, len(tokens.responses)) / np.maximum(counts, 1)
    odd = np.flatnonzero(means > max(_ODD * float(np.median(means)), _LEAST_ODD))
    return tokens.take(odd.tolist()) if 0 < 2 * len(odd) < len(tokens.responses) else None


def _padded(tokens: Tokens, some: Tokens) -> Iterator[Explanation]:
    """A log-normaliser over more rows of the head than the model has, as many as fit `some`."""
    if any(r.declared != Distribution() for r in tokens.responses):
        return

    def padded(log_rows: float, tokens: Tokens) -> np.ndarray:
        normaliser = tokens.evidence.moments[:, AT_ONE, 0].astype(np.float64)
        extra = log_rows - tokens.evidence.peak.astype(np.float64)  # a padded row's logit is 0
        return tokens.exact + normaliser - np.logaddexp(normaliser, extra)

    def loss(log_rows: float) -> float:
        return -some.fit(padded(log_rows, some)).total

    most = minimum(loss, np.asarray([0.0, np.log(_MOST_PADDING)]))
    rows = max(1, round(float(np.exp(most))))
    yield tokens.null.as_fault(
        "padded_vocabulary",
        f"the softmax takes in {rows} padded rows of the vocabulary, whose logits are 0",
        predicted=padded(np.log(rows), tokens),
        parameters={"rows": float(rows)},
    )


def _cut(tokens: Tokens) -> Iterator[Explanation]:
    """A log-normaliser over the tokenizer's tokens alone."""
    plain = all(r.declared == Distribution() for r in tokens.responses)
    if plain and tokens.tokenizer_size < tokens.vocabulary:
        normaliser = tokens.evidence.moments[:, AT_ONE, 0].astype(np.float64)
        yield tokens.null.as_fault(
            "cut_vocabulary",
            f"the softmax is over the tokenizer's {tokens.tokenizer_size} tokens alone",
            predicted=tokens.exact + normaliser - tokens.evidence.inside,
        )


class Break(NamedTuple):
    """The first token of an episode that shows that a turn did not stay as it was drawn.

    Attributes:
      kind: `retokenised`: the same text in other tokens; `rewritten`: another text; `missing`: what
        follows is shorter; `added`: it is longer than what was drawn in a whole conversation.
      turn: the number of the turn that did not stay, from 0; None if it is the first prompt.
      token: its place in the turn's response, or in the first prompt.
      drawn, scored: the ids there, as drawn and as they stand later; None where nothing stands.
      message: all this in a line.
      where: the row that shows it.
      episode: the name of the episode; None if it has none.
      fault: whether it is a fault: in a whole conversation tokens are scored that nobody drew, and
        a turn that was tokenised again does not come of a template. Those that drop thinking
        rewrite turns on purpose, and a sample of its own for each turn is scored as it was drawn.
      shown_by: the number of the turn whose prompt shows it; 0 for a whole conversation.
    """

    kind: Kind
    turn: int | None
    token: int
    drawn: int | None
    scored: int | None
    message: str
    where: str
    episode: str | None
    fault: bool
    shown_by: int = 0


def find_breaks(
    tokenizer: PreTrainedTokenizerFast, responses: Sequence[Response]
) -> tuple[Break, ...]:
    """The breaks of all episodes: rows of one `episode`, and rows with `turn_token_ids`.

    Of an episode the first; a turn that was tokenised again comes before others, which a template
    may rewrite on purpose.

    Raises:
      InputError: rows of one episode that cannot be turns of one sample.
    """
    found: list[Break] = []
    episodes: dict[str, list[Response]] = {}
    for one in responses:
        if one.turns is not None:
            found += _break_of_whole(tokenizer, one, one.turns)
        elif one.episode is not None:
            episodes.setdefault(one.episode, []).append(one)
    for name, rows in episodes.items():
        if all(one.turn is not None for one in rows):
            rows.sort(key=lambda one: one.turn or 0)
        _check_one_sample(name, rows)
        breaks = list(_breaks_of_prompts(tokenizer, rows))
        found += sorted(breaks, key=lambda one: not one.fault)[:1]
    return tuple(found)


def _check_one_sample(name: str, rows: Sequence[Response]) -> None:
    for before, after in pairwise(rows):
        numbered = before.turn is not None and before.turn == after.turn
        if numbered or before.prompt == after.prompt:
            what = f"are both turn {after.turn}" if numbered else "have the same prompt"
            raise InputError(
                f"{after.where}: this row and {before.where} of episode {shown(name)} {what}; the"
                " rows of an episode must be the turns of one sample"
            )


def _breaks_of_prompts(
    tokenizer: PreTrainedTokenizerFast, turns: Sequence[Response]
) -> Iterator[Break]:
    """The first break that each prompt shows, of one sample a turn, in order."""
    starts = [len(turn.prompt) for turn in turns]
    for number, (last, turn) in enumerate(pairwise(turns), 1):
        before = (*last.prompt, *last.tokens)
        place = _first_difference(before, turn.prompt)
        if place is None or (place == len(before) - 1 and not last.kept[-1]):
            continue  # a last token that nobody drew may be padding
        own = max((i for i in range(number) if starts[i] <= place), default=None)
        token = place if own is None else place - starts[own]
        later = f"the prompt of turn {number}"
        found = _break(tokenizer, before, turn.prompt, place, (own, token, later), turn)
        yield found._replace(fault=found.kind == "retokenised", shown_by=number)


def _break_of_whole(
    tokenizer: PreTrainedTokenizerFast, response: Response, turns: Sequence[Sequence[int]]
) -> Iterator[Break]:
    """The first token of a whole conversation that is not as it was drawn, turn by turn."""
    pairs = zip(response.tokens, response.kept, strict=True)
    kept = [token for token, drawn in pairs if drawn]
    before = [token for turn in turns for token in turn]
    place = _first_difference(before, kept)
    if place is None and turns and len(kept) > len(before):
        place, last = len(before), len(turns) - 1
        message = (
            f"behind turn {last}, the last, more tokens of the conversation count as drawn: the"
            f" first is {kept[place]} ({_quoted(tokenizer, kept, place)})"
        )
        about = (None, kept[place], message, response.where, response.episode, True)
        yield Break("added", last, len(turns[last]), *about)
    elif place is not None:
        number, token = 0, place
        while token >= len(turns[number]):
            token -= len(turns[number])
            number += 1
        where = number, token, "the conversation"
        yield _break(tokenizer, before, kept, place, where, response)


def _first_difference(before: Sequence[int], after: Sequence[int]) -> int | None:
    same = (i for i, token in enumerate(before) if i >= len(after) or after[i] != token)
    return next(same, None)


def _break(
    tokenizer: PreTrainedTokenizerFast,
    before: Sequence[int],
    after: Sequence[int],
    place: int,
    where: tuple[int | None, int, str],
    row: Response,
) -> Break:
    turn, token, later = where
    drawn, scored = before[place], after[place] if place < len(after) else None
    # The end of what was drawn may be cut in the middle of a character.
    texts = [str(tokenizer.decode(list(ids[place:]))).rstrip("\ufffd") for ids in (before, after)]
    kind: Kind = "rewritten"
    if scored is None:
        kind = "missing"
    elif texts[1].startswith(texts[0]) or texts[0].startswith(texts[1]):
        kind = "retokenised"
    owner = "the first prompt" if turn is None else f"turn {turn}"
    there = "nothing" if scored is None else f"{scored} ({_quoted(tokenizer, after, place)})"
    message = (
        f"{owner} was {_WAS[kind]}: its token {token} is {drawn}"
        f" ({_quoted(tokenizer, before, place)}), in {later} {there}"
    )
    return Break(kind, turn, token, drawn, scored, message, row.where, row.episode, fault=True)


def _quoted(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], place: int) -> str:
    return shown(tokenizer.decode(list(ids[place : place + _AROUND])))
