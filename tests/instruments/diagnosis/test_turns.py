"""Episodes that others recorded: turns that did not stay as they were drawn."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import recorded
from bpe import tokenizer

from tim_jax.common.errors import InputError
from tim_jax.instruments.diagnosis import readers, records
from tim_jax.instruments.diagnosis.declared import PLAIN
from tim_jax.instruments.diagnosis.reporting import find_breaks
from tim_jax.instruments.diagnosis.rollouts import Response, collect
from tim_jax.instruments.diagnosis.verdict import diagnose

TOKENIZER = tokenizer()
START, END = "<|im_start|>user\n", "<|im_end|>"


def encode(text):
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def again(tokens):
    """The same text, tokenised again."""
    return encode(TOKENIZER.decode([*tokens]))


def response(prompt, tokens, **more):
    return Response("a row", prompt, tokens, np.zeros(len(tokens), np.float32), PLAIN, **more)


def appended(*drawn):
    """Turns of an episode that is only appended to, as (prompt, response)."""
    row, turns = encode(f"{START}1?{END}"), []
    for tokens in drawn:
        turns.append((row, tokens))
        row += (*tokens, *encode(f"{START}no{END}"))
    return turns


def found_in(turns):
    """The break of an episode of these turns, or None."""
    rows = [response(*turn, episode="x", turn=i) for i, turn in enumerate(turns)]
    found = find_breaks(TOKENIZER, rows)
    assert len(found) < 2
    return found[0] if found else None


AB = (*encode("a"), *encode("b"))  # two tokens, where the tokenizer would give one


def test_appended_turns_have_no_break():
    assert found_in(appended((*AB, *encode(END)), AB, encode("c"))) is None
    assert found_in(appended(AB)) is None
    assert found_in([]) is None


def test_a_turn_that_was_tokenised_again_is_named_with_its_first_token():
    turns = appended((*encode("x"), *AB, *encode(END)), encode("c"), encode("d"))
    found = found_in([turns[0], *((again(prompt), tokens) for prompt, tokens in turns[1:])])
    assert found is not None
    assert (found.kind, found.turn, found.token) == ("retokenised", 0, 1)
    assert (found.drawn,) == encode("a")
    assert (found.scored,) == encode("ab")
    assert found.message.startswith("turn 0 was tokenised again: its token 1 is ")
    assert "in the prompt of turn 1" in found.message


def test_an_earlier_turn_may_show_it_later():
    first, second, (prompt, tokens) = appended(AB, encode("c"), encode("d"))
    found = found_in([first, second, (again(prompt), tokens)])
    assert found is not None
    assert (found.kind, found.turn, found.token) == ("retokenised", 0, 0)
    assert "in the prompt of turn 2" in found.message


def test_a_rewritten_turn_does_not_hide_a_later_one_that_was_tokenised_again():
    first = encode(f"{START}1?{END}"), encode(f"x y{END}")
    dropped = encode(f"{START}1?{END}y{END}{START}no{END}")  # its thinking
    later = encode(f"{TOKENIZER.decode([*dropped, *AB])}{START}no{END}")
    turns = [first, (dropped, AB), (later, encode("c"))]
    found = found_in(turns)
    assert found is not None
    assert (found.kind, found.turn, found.token, found.shown_by) == ("retokenised", 1, 0, 2)
    found = found_in(turns[:2])
    assert found is not None
    assert (found.kind, found.fault) == ("rewritten", False)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (f"{START}1?{END}y{END}{START}no{END}", ("rewritten", 0, 0)),  # its thinking was dropped
        (f"{START}2?{END}x", ("rewritten", None, len(encode(START)))),
        (f"{START}1?{END}x", ("missing", 0, 1)),
    ],
)
def test_what_is_not_the_same_text(prompt, expected):
    first, (_, tokens) = appended(encode(f"x y{END}"), encode("c"))
    found = found_in([first, (encode(prompt), tokens)])
    assert found is not None
    assert found[:3] == expected
    assert "\n" not in found.message


def test_whole_conversations_are_compared_where_their_mask_is_set():
    turns = (encode(f"x{END}"), (*AB, *encode(END)))
    between = encode(f"{START}no{END}")

    def whole(*kept):
        parts = [(between, False), (kept[0], True), (between, False), (kept[1], True)]
        tokens = tuple(token for part, _ in parts for token in part)
        mask = np.array([drawn for part, drawn in parts for _ in part])
        return find_breaks(TOKENIZER, [response((), tokens, mask=mask, turns=turns)])

    assert whole(*turns) == ()
    (found,) = whole(turns[0], encode(f"ab{END}"))
    assert found[:3] == ("retokenised", 1, 0)
    assert "in the conversation" in found.message
    (found,) = whole(turns[0], AB)  # the learner leaves the end token out
    assert found[:3] == ("missing", 1, 2)
    (found,) = whole(turns[0], (*turns[1], *encode("x")))  # the mask counts one more
    assert found[:5] == ("added", 1, 3, None, *encode("x"))
    assert found.fault
    assert found.message.startswith("behind turn 1, the last, more tokens of the conversation")


class Letters:
    """A text for each token of the tiny model, that of 2 in two tokens as well."""

    def decode(self, ids):
        return "".join("ab" if token == 2 else chr(ord("a") + token) for token in ids)


LETTERS = cast(Any, Letters())  # in the place of a tokenizer
FIRST = {"prompt_token_ids": [7, 8], "response_token_ids": [0, 1, 9]}
WHOLE = {"prompt_token_ids": [7, 8], "response_token_ids": [2, 9, 10, 11], "mask": [1, 1, 0, 1]}


def second(said, **more):
    return {"prompt_token_ids": [7, 8, *said, 10], "response_token_ids": [11]} | more


def collected(rows):
    """Responses, with log-probs that nothing is known of."""
    rows = [row | {"logprobs": [-1.0] * len(row["response_token_ids"])} for row in rows]
    return collect(readers.read(rows), limits=recorded.LIMITS).responses


EPISODES = [
    *(second([0, 1, 9], episode=1, turn=1), FIRST | {"episode": 1, "turn": 0}),  # sound
    *(FIRST | {"episode_id": "x"}, second([2, 9], trajectory_id="x")),  # tokenised again
    *(FIRST | {"episode": "y"}, second([9], episode="y")),  # its thinking was dropped
    WHOLE | {"turn_token_ids": [[2, 9], [11]]},  # sound
    WHOLE | {"turn_token_ids": [[0, 1, 9], [11]]},  # tokenised again
]


def test_breaks_among_rows():
    found = find_breaks(LETTERS, collected(EPISODES))
    shown = [(x.where, x.episode, x.fault, *x[:3]) for x in found]
    assert shown == [
        ("row 8", None, True, "retokenised", 0, 0),
        ("row 4", "x", True, "retokenised", 0, 0),
        # A template that drops thinking is told, and no fault where each turn is a sample.
        ("row 6", "y", False, "rewritten", 0, 0),
    ]
    assert not find_breaks(LETTERS, collected([*EPISODES[:2], EPISODES[6]]))


def test_episodes_are_read_of_lines_of_any_format():
    trl = {"prompt_ids": [7, 8], "completion_ids": [0, 1], "logprobs": [-1.0, -1.0]}
    lines = [trl | {"episode": 3, "turn": 0}, {"request": {}, "response": trl, "episode": "a"}]
    found = collect(readers.read(lines), limits=recorded.LIMITS).responses
    assert [(one.episode, one.turn) for one in found] == [("3", 0), ("a", None)]


def test_one_token_of_padding_is_no_break():
    """Of a batch that is filled up to one width, one token more than this response has."""
    filled = FIRST | {"response_token_ids": [0, 1, 9, 7], "mask": [1, 1, 1, 0]}
    episode = [row | {"episode": "z"} for row in (filled, second([0, 1, 9]))]
    assert find_breaks(TOKENIZER, collected(episode)) == ()


@pytest.mark.slow  # compiles a forward
def test_a_diagnosis_names_turns_that_were_tokenised_again():
    empty = [row | {"logprobs": [0.0] * len(row["response_token_ids"])} for row in EPISODES]
    exact = recorded.exact_log_probs(empty)
    rows = [row | {"logprobs": x.tolist()} for row, x in zip(EPISODES, exact, strict=True)]
    record = records.as_record(recorded.diagnosed(rows, tokenizer=Letters()), Letters().decode)
    assert record["sizes"]["largest"] == 0
    assert record["state"] == "fault"
    fault = "This is a fault: 2 episodes of several turns do not hold what was drawn, and: drawn at"
    assert record["verdict"].startswith(fault)  # the tokens are not the model's draws
    assert [one["where"] for one in record["turns"]] == ["row 8", "row 4", "row 6"]
    assert "row 4: turn 0 was tokenised again: its token 0 is 0 ('ab" in records.text(record)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([FIRST, FIRST], "row 2: this row and row 1 of episode 'z' have the same prompt"),
        (
            [FIRST | {"turn": 1}, second([0, 1, 9], turn=1)],
            "row 2: this row and row 1 of episode 'z' are both turn 1",
        ),
        ([FIRST | {"turn": "1"}], "row 1: turn must be a whole number, got '1'"),
        ([FIRST | {"turn_token_ids": [[0], [99]]}], r"row 1: turn 1: turn_token_ids\[0\] = 99"),
        ([FIRST | {"turn_token_ids": [0]}], "row 1: turn 0: turn_token_ids must be a list, got 0"),
    ],
)
def test_rows_that_are_no_episode_are_refused(rows, message):
    episode = [row | {"episode": "z"} for row in rows]
    with pytest.raises(InputError, match=message):
        find_breaks(TOKENIZER, collected(episode))
    no_forward: Any = SimpleNamespace(stop_tokens=())
    with pytest.raises(InputError, match=message):  # before any forward, which there is not here
        diagnose(collected(episode), no_forward, tokenizer=TOKENIZER)
