"""Whether the turns of an episode that another system recorded went on from what was drawn.

Systems that render and tokenise an episode anew for every turn score tokens that nobody drew. It
shows where a system records one sample for each turn: the prompt of a turn must begin with the
prompt and the response of the turn before it, token for token. Where it records whole
conversations, their drawn tokens must be those of the responses.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerFast

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.instruments.diagnosis.rollouts import Response

Kind = Literal["retokenised", "rewritten", "missing", "added"]
_WAS = {"retokenised": "tokenised again", "rewritten": "rewritten", "missing": "cut short"}
_AROUND = 8  # tokens of the text in a message


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
        if (place := _first_difference(before, turn.prompt)) is None:
            continue
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
