"""Whether the turns of an episode that another system recorded went on from what was drawn.

Systems that render and tokenise an episode anew for every turn score tokens that nobody drew. It
shows where a system records one sample for each turn: the prompt of a turn must begin with the
prompt and the response of the turn before it, token for token. Where it records whole
conversations, their drawn tokens must be those of the responses.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.instruments.diagnosis.rollouts import Response

Kind = Literal["retokenised", "rewritten", "missing", "added"]
_AROUND = 8  # tokens of the text in a message


class Turned(NamedTuple):
    """One recorded turn: the token ids that it was drawn after, and those that were drawn."""

    prompt: Sequence[int]
    response: Sequence[int]


class Break(NamedTuple):
    """The first token of an episode that shows that a turn did not stay as it was drawn.

    Attributes:
      kind: `retokenised`: the same text in other tokens; `rewritten`: another text; `missing`: what
        follows is shorter; `added`: it is longer than what was drawn in a whole conversation.
      turn: the number of the turn that did not stay, from 0; None if it is the first prompt.
      token: its place in the turn's response, or in the first prompt.
      drawn, scored: the ids there, as drawn and as they stand later; None where nothing stands.
      message: all this in a line.
      shown_by: the number of the turn whose prompt shows it; 0 for a whole conversation.
    """

    kind: Kind
    turn: int | None
    token: int
    drawn: int | None
    scored: int | None
    message: str
    shown_by: int = 0


class Broken(NamedTuple):
    """An episode among recorded responses that has a break.

    Attributes:
      where: the row that shows it.
      episode: its name; None if it has none.
      fault: whether it is a fault: in a whole conversation tokens are scored that nobody drew, and
        a turn that was tokenised again does not come of a template. Those that drop thinking
        rewrite turns on purpose, and a sample of its own for each turn is scored as it was drawn.
    """

    where: str
    episode: str | None
    found: Break
    fault: bool


def find_breaks(
    tokenizer: PreTrainedTokenizerFast, responses: Sequence[Response]
) -> tuple[Broken, ...]:
    """The breaks of all episodes: rows of one `episode`, and rows with `turn_token_ids`.

    Raises:
      InputError: rows of one episode that cannot be turns of one sample.
    """
    return tuple(_breaks(tokenizer, responses))


def _breaks(tokenizer: PreTrainedTokenizerFast, responses: Sequence[Response]) -> Iterator[Broken]:
    episodes: dict[str, list[Response]] = {}
    for one in responses:
        if one.turns is not None:
            mask = np.ones(len(one), bool) if one.mask is None else one.mask
            if (found := find_break_of_whole(tokenizer, one.tokens, mask, one.turns)) is not None:
                yield Broken(one.where, one.episode, found, fault=True)
        elif one.episode is not None:
            episodes.setdefault(one.episode, []).append(one)
    for name, rows in episodes.items():
        if all(one.turn is not None for one in rows):
            rows.sort(key=lambda one: one.turn or 0)
        _check_one_sample(name, rows)
        turns = [Turned(one.prompt, one.tokens) for one in rows]
        if (found := find_break(tokenizer, turns)) is not None:
            fault = found.kind == "retokenised"
            yield Broken(rows[found.shown_by].where, name, found, fault)


def _check_one_sample(name: str, rows: Sequence[Response]) -> None:
    for before, after in pairwise(rows):
        numbered = before.turn is not None and before.turn == after.turn
        if numbered or before.prompt == after.prompt:
            what = f"are both turn {after.turn}" if numbered else "have the same prompt"
            raise InputError(
                f"{after.where}: this row and {before.where} of episode {shown(name)} {what}; the"
                " rows of an episode must be the turns of one sample"
            )


def find_break(tokenizer: PreTrainedTokenizerFast, turns: Sequence[Turned]) -> Break | None:
    """Returns the first token that shows that an episode was not appended to; None if it was.

    A turn that was tokenised again comes before others, which a template may rewrite on purpose.

    Args:
      turns: one sample a turn, in order.
    """
    found = list(_breaks_of_prompts(tokenizer, turns))
    retokenised = (one for one in found if one.kind == "retokenised")
    return next(retokenised, next(iter(found), None))


def _breaks_of_prompts(
    tokenizer: PreTrainedTokenizerFast, turns: Sequence[Turned]
) -> Iterator[Break]:
    """The first break that each prompt shows."""
    starts = [len(turn.prompt) for turn in turns]
    for number in range(1, len(turns)):
        before = [*turns[number - 1].prompt, *turns[number - 1].response]
        after = list(turns[number].prompt)
        if (place := _first_difference(before, after)) is None:
            continue
        own = max((i for i in range(number) if starts[i] <= place), default=None)
        token = place if own is None else place - starts[own]
        where = own, token, f"the prompt of turn {number}"
        yield _break(tokenizer, before, after, place, where)._replace(shown_by=number)


def find_break_of_whole(
    tokenizer: PreTrainedTokenizerFast,
    tokens: Sequence[int],
    mask: np.ndarray,
    responses: Sequence[Sequence[int]],
) -> Break | None:
    """Returns the first token of a whole conversation that is not as it was drawn.

    Args:
      tokens: of the conversation, n of them, as the learner scored them.
      mask: bool[n], those that count as drawn.
      responses: what was drawn, turn by turn.
    """
    kept = [token for token, drawn in zip(tokens, mask, strict=True) if drawn]
    before = [token for response in responses for token in response]
    if (place := _first_difference(before, kept)) is None:
        longer = bool(responses) and len(kept) > len(before)
        return _added(tokenizer, kept, responses) if longer else None
    number, token = 0, place
    while token >= len(responses[number]):
        token -= len(responses[number])
        number += 1
    return _break(tokenizer, before, kept, place, (number, token, "the conversation"))


def _added(
    tokenizer: PreTrainedTokenizerFast, kept: Sequence[int], responses: Sequence[Sequence[int]]
) -> Break:
    """The first token that counts as drawn behind all that was."""
    place, turn = sum(map(len, responses)), len(responses) - 1
    message = (
        f"behind turn {turn}, the last, more tokens of the conversation count as drawn: the first"
        f" is {kept[place]} ({_quoted(tokenizer, kept, place)})"
    )
    return Break("added", turn, len(responses[turn]), None, kept[place], message)


def _first_difference(before: Sequence[int], after: Sequence[int]) -> int | None:
    same = (i for i, token in enumerate(before) if i >= len(after) or after[i] != token)
    return next(same, None)


def _break(
    tokenizer: PreTrainedTokenizerFast,
    before: Sequence[int],
    after: Sequence[int],
    place: int,
    where: tuple[int | None, int, str],
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
    was = {"retokenised": "tokenised again", "rewritten": "rewritten", "missing": "cut short"}[kind]
    there = "nothing" if scored is None else f"{scored} ({_quoted(tokenizer, after, place)})"
    message = (
        f"{owner} was {was}: its token {token} is {drawn} ({_quoted(tokenizer, before, place)}), in"
        f" {later} {there}"
    )
    return Break(kind, turn, token, drawn, scored, message)


def _quoted(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], place: int) -> str:
    return shown(tokenizer.decode(list(ids[place : place + _AROUND])))
