"""Episodes that others recorded: turns that did not stay as they were drawn."""

import numpy as np
import pytest
from bpe import tokenizer

from tim_jax.instruments.diagnosis.turns import Turned, find_break, find_break_of_whole

TOKENIZER = tokenizer()
START, END = "<|im_start|>user\n", "<|im_end|>"


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def appended(*drawn, first="1?"):
    """Turns of an episode that is only appended to; responses are given as tokens."""
    row, turns = encode(f"{START}{first}{END}"), []
    for response in drawn:
        turns.append(Turned(list(row), response))
        row += [*response, *encode(f"{START}no{END}")]
    return turns


AB = [*encode("a"), *encode("b")]  # two tokens, where the tokenizer would give one


def test_appended_turns_have_no_break():
    assert find_break(TOKENIZER, appended([*AB, *encode(END)], AB, encode("c"))) is None
    assert find_break(TOKENIZER, appended(AB)) is None
    assert find_break(TOKENIZER, []) is None


def test_a_turn_that_was_tokenised_again_is_named_with_its_first_token():
    turns = appended([*encode("x"), *AB, *encode(END)], encode("c"), encode("d"))
    for number in (1, 2):
        turns[number] = turns[number]._replace(
            prompt=encode(TOKENIZER.decode(list(turns[number].prompt)))
        )
    found = find_break(TOKENIZER, turns)
    assert found is not None
    assert (found.kind, found.turn, found.token) == ("retokenised", 0, 1)
    assert [found.drawn] == encode("a")
    assert [found.scored] == encode("ab")
    assert found.message.startswith("turn 0 was tokenised again: its token 1 is ")
    assert "in the prompt of turn 1" in found.message


def test_an_earlier_turn_may_show_it_later():
    turns = appended(AB, encode("c"), encode("d"))
    turns[2] = turns[2]._replace(prompt=encode(TOKENIZER.decode(list(turns[2].prompt))))
    found = find_break(TOKENIZER, turns)
    assert found is not None
    assert (found.kind, found.turn, found.token) == ("retokenised", 0, 0)
    assert "in the prompt of turn 2" in found.message


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (f"{START}1?{END}y{END}{START}no{END}", ("rewritten", 0, 0)),  # its thinking was dropped
        (f"{START}2?{END}x", ("rewritten", None, len(encode(START)))),
        (f"{START}1?{END}", ("missing", 0, 0)),
    ],
)
def test_what_is_not_the_same_text(prompt, expected):
    turns = appended(encode(f"x y{END}"), encode("c"))
    turns[1] = turns[1]._replace(prompt=encode(prompt))
    found = find_break(TOKENIZER, turns)
    assert found is not None
    assert found[:3] == expected
    assert "\n" not in found.message


def test_whole_conversations_are_compared_where_their_mask_is_set():
    responses = [[*encode("x"), *encode(END)], [*AB, *encode(END)]]
    between = encode(f"{START}no{END}")

    def whole(*kept):
        parts = [(between, False), (kept[0], True), (between, False), (kept[1], True)]
        tokens = [token for part, _ in parts for token in part]
        mask = np.array([drawn for part, drawn in parts for _ in part])
        return find_break_of_whole(TOKENIZER, tokens, mask, responses)

    assert whole(*responses) is None
    found = whole(responses[0], encode(f"ab{END}"))
    assert found is not None
    assert found[:3] == ("retokenised", 1, 0)
    assert "in the conversation" in found.message
    found = whole(responses[0], AB)  # the learner leaves the end token out
    assert found is not None
    assert found[:3] == ("missing", 1, 2)
