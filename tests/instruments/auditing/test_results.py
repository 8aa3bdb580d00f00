"""The comparison sees a difference of one bit, says where it is, and counts what it compared."""

import io
import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from tim_jax.common.types import Rollout
from tim_jax.instruments import auditing
from tim_jax.instruments.auditing import CaseResult


def rollout(lengths=(3, 1), size=4):
    rng = np.random.default_rng(0)
    count = len(lengths)
    arrays: dict[str, Any] = {  # of NumPy, which stands for JAX's
        "prompts": np.zeros((count, 2), np.int32),
        "prompt_lengths": np.ones(count, np.int32),
        "responses": rng.integers(0, 9, (count, size)).astype(np.int32),
        "lengths": np.asarray(lengths, np.int32),
        "log_probs": -rng.random((count, size), np.float32),
        "finished": np.ones(count, bool),
    }
    return Rollout(**arrays)


def compared(recorded, *, tokens=None, mask=None, log_probs=None):
    return auditing.compare(
        recorded,
        np.asarray(recorded.responses) if tokens is None else tokens,
        np.asarray(recorded.mask) if mask is None else mask,
        np.asarray(recorded.log_probs) if log_probs is None else log_probs,
    )


def changed(array, place, value):
    array = np.array(array)
    array[place] = value
    return array


def test_equal_arrays_have_no_unequal_token():
    assert compared(rollout()) == (4, 0, 0.0, None)


def test_one_ulp_is_seen_and_placed():
    recorded = rollout()
    value = recorded.log_probs[0, 2]
    moved = np.nextafter(value, np.float32(0))
    found = compared(recorded, log_probs=changed(recorded.log_probs, (0, 2), moved))
    token = int(recorded.responses[0, 2])
    place = auditing.Unequal(0, 2, (token, token), (float(value), float(moved)))
    assert found == (4, 1, float(moved) - float(value), place)


def test_beyond_the_lengths_nothing_is_compared():
    recorded = rollout()
    for place in ((0, 3), (1, 1)):
        assert compared(recorded, log_probs=changed(recorded.log_probs, place, 9.0))[1] == 0
        assert compared(recorded, tokens=changed(recorded.responses, place, 99))[1] == 0


def test_other_tokens_and_lengths_are_unequal():
    recorded = rollout()
    assert compared(recorded, tokens=changed(recorded.responses, (1, 0), 99))[:2] == (4, 1)
    longer = compared(recorded, mask=changed(recorded.mask, (1, 1), True))
    assert longer[:2] == (5, 1)
    assert longer[3] is not None
    assert longer[3][:2] == (1, 1)
    assert compared(recorded, mask=changed(recorded.mask, (0, 2), False))[:2] == (4, 1)


def test_zeros_of_either_sign_are_not_the_same_bits():
    recorded = rollout()
    recorded = replace(recorded, log_probs=changed(recorded.log_probs, (0, 0), 0.0))
    found = compared(recorded, log_probs=changed(recorded.log_probs, (0, 0), -0.0))
    assert found[1:3] == (1, 0.0)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_not_finite_is_unequal_even_to_itself(value):
    recorded = rollout()
    recorded = replace(recorded, log_probs=changed(recorded.log_probs, (0, 1), value))
    assert compared(recorded)[1] == 1


EQUAL = CaseResult("equal", "tiles float32", 10, 0, 0.0, None, seconds=1.25)
PLACE = auditing.Unequal(3, 5, (8, 8), (-1.5, -1.25))
UNEQUAL = CaseResult("unequal", "tiles float32", 20, 2, 0.25, PLACE)
EMPTY = CaseResult("empty", "tiles float32", 0, 0, 0.0, None)
CONTROL = CaseResult("control", "native float32", 7, 6, 1e-6, PLACE, control=True)


@pytest.mark.parametrize(
    ("results", "passed"),
    [
        ([EQUAL], True),
        ([EQUAL, CONTROL], True),
        ([EQUAL, UNEQUAL], False),
        ([EQUAL, EMPTY], False),
        ([CONTROL], False),
        ([], False),
    ],
)
def test_a_summary_passes_only_if_something_was_compared_and_all_of_it_equal(results, passed):
    assert auditing.summarise(results).passed is passed


def test_json_has_the_counts_without_the_controls():
    text = auditing.to_json(auditing.summarise([EQUAL, UNEQUAL, CONTROL], model="some/folder"))
    values = json.loads(text)
    assert values["compared_tokens"] == 30
    assert values["unequal_tokens"] == 2
    assert values["max_abs_diff"] == 0.25
    assert values["control_unequal_tokens"] == 6
    assert values["passed"] is False
    assert values["model"] == "some/folder"
    assert set(values["versions"]) == {"jax", "jaxlib", "python"}
    assert values["platform"] == jax.devices()[0].platform
    assert values["device_kind"]
    assert [case["name"] for case in values["cases"]] == ["equal", "unequal", "control"]
    assert [case["passed"] for case in values["cases"]] == [True, False, True]
    assert values["cases"][1]["first_unequal"] == {
        "sequence": 3,
        "position": 5,
        "tokens": [8, 8],
        "values": [-1.5, -1.25],
    }


def test_json_stays_json_where_a_log_prob_is_not_a_number():
    place = PLACE._replace(values=(float("nan"), -1.0))
    broken = replace(UNEQUAL, max_abs_diff=float("nan"), first_unequal=place)
    values = json.loads(auditing.to_json(auditing.summarise([broken])))
    assert values["cases"][0]["max_abs_diff"] is None
    assert values["cases"][0]["first_unequal"]["values"] == [None, -1.0]


def test_the_table_shows_verdicts_and_places():
    other = replace(UNEQUAL, first_unequal=PLACE._replace(tokens=(8, 2)))
    file = io.StringIO()
    Console(file=file, width=160).print(auditing.table([EQUAL, UNEQUAL, other, EMPTY, CONTROL]))
    text = file.getvalue()
    for part in (
        "UNEQUAL",
        "NOTHING COMPARED",
        "control",
        "sequence 3, position 5: -1.5 and -1.25",
    ):
        assert part in text
    assert "token 8 and 2" in text
