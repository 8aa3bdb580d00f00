"""A minority that is wrong is found and listed, and nothing is named that explains nothing."""

from dataclasses import replace

import numpy as np
import pytest
import quick
from recorded import (
    STOPS,
    best_of,
    decode,
    diagnosed,
    drawn,
    exact_log_probs,
    forward,
    sampled,
    tokens_of,
    with_log_probs,
)

from tim_jax.common import waiting
from tim_jax.instruments.diagnosis import explanations, parts, records, variants, verdict


def noisy(scale=1e-3, seed=0):
    """Rows of a sound engine."""
    rng = np.random.default_rng(seed)
    return with_log_probs(sampled(), lambda x: x + scale * rng.standard_normal(len(x)))


def changed(rows, places, value):
    """The rows with `value(log-prob)` at (row, token) places."""
    rows = [row | {"logprobs": list(row["logprobs"])} for row in rows]
    for row, place in places:
        rows[row]["logprobs"][place] = value(rows[row]["logprobs"][place])
    return rows


def some_places(count, seed=0):
    """(row, token), in order, of tokens that are no certain ones."""
    every = [
        (row, place)
        for row, one in enumerate(sampled())
        for place, log_prob in enumerate(one["logprobs"])
        if log_prob < -0.5
    ]
    chosen = np.random.default_rng(seed).choice(len(every), count, replace=False)
    return [every[i] for i in sorted(chosen)]


def listed(record):
    """(row, token) places of the part that a record lists."""
    rows = record["part"]["rows"]
    return [(int(one["where"][4:]) - 1, place) for one in rows for place in one["positions"]]


SENTINELS = [(1, -9999.0), (20, -9999.0), (20, 0.0), (20, -100.0), (20, -1.0)]


@pytest.mark.parametrize(("count", "value"), SENTINELS, ids=str)
def test_sentinels_are_named_and_their_tokens_listed(count, value):
    places = [x for x in some_places(count) if value != -1 or not near_one(x)]
    found = diagnosed(changed(noisy(), places, lambda _: value))
    assert found.state == "fault"
    assert best_of(found).explanation.name == "sentinel"
    record = records.as_record(found, decode)
    assert listed(record) == places
    assert f"{value:g}" in record["verdict"]
    assert record["part"]["others"]["largest"] < 0.01


def near_one(place):
    """Whether the log-prob there is about that of the sentinel -1, which is then no fault."""
    row, token = place
    return abs(sampled()[row]["logprobs"][token] + 1) < 0.3


def in_decimals(rows, count):
    """The rows as a program that writes so many decimals has them."""
    return with_log_probs(rows, lambda x: x.round(count))


def test_on_a_coarse_grid_values_recur_and_are_no_sentinels():
    found = diagnosed(in_decimals(noisy(0.6), 1))
    assert found.best is None
    assert "no known cause explains" in records.sentence(found)
    places = [x for x in some_places(20) if not near_one(x)]
    found = diagnosed(in_decimals(changed(noisy(), places, lambda _: -1.0), 3))
    assert best_of(found).explanation.name == "sentinel"
    assert listed(records.as_record(found, decode)) == places


@pytest.mark.parametrize("least", quick.some([-2.0, -3.3], 1))
def test_log_probs_that_are_clipped_are_no_sentinels(least):
    found = diagnosed(with_log_probs(noisy(), lambda x: np.maximum(x, least)))
    assert best_of(found).explanation.name == "clipped"
    assert best_of(found).share > 0.9
    assert f"log-probs are clipped at {least:g}, as " in records.sentence(found)
    # A sentinel below all log-probs is none: it stands for likely tokens too.
    found = diagnosed(changed(noisy(), some_places(20), lambda _: -50.0))
    assert best_of(found).explanation.name == "sentinel"


def test_log_probs_that_are_clipped_in_some_rows_are_no_sentinels():
    clipped = with_log_probs(noisy(), lambda x: np.maximum(x, -2.0))
    rows = [pair[i % 3 > 0] for i, pair in enumerate(zip(noisy(), clipped, strict=True))]
    found = diagnosed(rows)
    assert best_of(found).explanation.name == "clipped"
    assert "log-probs are clipped at -2, as " in records.sentence(found)
    assert "of 96 rows" in records.sentence(found)


def test_responses_that_are_filled_up_without_a_mask_are_said_to_be():
    def filled(row):
        fill = 15 - len(row["logprobs"])
        ids, log_probs = [*row["response_token_ids"]], [*row["logprobs"]]
        return row | {"response_token_ids": ids + [7] * fill, "logprobs": log_probs + [0.0] * fill}

    ended = [row for row in sampled() if row["finish_reason"] == "stop"]
    found = diagnosed([filled(row) for row in ended if 7 not in row["response_token_ids"]])
    assert best_of(found).explanation.name == "pad_mask"
    assert records.sentence(found) == (
        "This is a fault: responses are filled up with token 7 behind their end, without a mask."
    )


def test_a_row_with_equal_first_log_probs_is_no_other_row_that_stands_here():
    """A response and its beginning have equal log-probs; the rest, which is off, has no others."""
    long = [row for row in noisy() if len(row["logprobs"]) == 10][:8]
    short = [
        row | {key: row[key][:7] for key in ("response_token_ids", "logprobs")} for row in long
    ]
    off = with_log_probs(long, lambda x: x - 3.0 * (np.arange(len(x)) > 6))
    found = diagnosed([*off, *short])
    assert found.state == "fault"
    assert found.best is None


def test_rows_that_hold_the_log_probs_of_another_row_are_named_and_listed():
    rows = noisy()
    lengths = [len(row["logprobs"]) for row in rows]
    size = max(set(lengths), key=lengths.count)
    own = [i for i, n in enumerate(lengths) if n == size][:6]
    swapped = list(rows)
    for i, j in zip(own, [*own[1:], own[0]], strict=True):
        swapped[i] = rows[i] | {"logprobs": rows[j]["logprobs"]}
    found = diagnosed(swapped)
    assert best_of(found).explanation.name == "other_row"
    record = records.as_record(found, decode)
    assert sorted({row for row, _ in listed(record)}) == own
    assert f"as row {own[0] + 1} holds those of row {own[1] + 1}" in record["verdict"]


def test_a_version_whose_tokens_are_all_hidden_does_not_hide_another():
    rows = [
        (other if i % 2 else own) | {"weights_version": 6 + i % 2}
        for i, (own, other) in enumerate(zip(sampled(), noisy(0.5), strict=True))
    ]
    rows[3] = sampled()[3] | {"weights_version": 5, "mask": [0] * len(sampled()[3]["logprobs"])}
    found = diagnosed(rows)
    assert best_of(found).explanation.name == "other_version"
    assert records.sentence(found) == (
        "This is a fault: the rows of weights_version '7' are of other weights than those of '6'."
    )


def test_a_fault_does_not_hide_that_other_tokens_are_off_too():
    rng = np.random.default_rng(0)
    based = with_log_probs(noisy(), lambda x: x / np.log(10))
    off = with_log_probs(noisy(), lambda x: x + 0.3 * rng.standard_normal(len(x)))
    for others, said in ((noisy(), False), (off, True)):
        rows = [pair[i % 2] for i, pair in enumerate(zip(others, based, strict=True))]
        found = diagnosed(rows)
        assert best_of(found).explanation.name == "log_base"
        assert (found.more is not None) is said
        assert ("Other tokens differ by more than numerics" in records.sentence(found)) is said


@pytest.mark.slow
def test_a_fault_of_some_rows_is_named_with_them():
    rows = noisy()
    for row in (8, 40, 41):
        rows[row] = rows[row] | {"logprobs": [*rows[row]["logprobs"][1:], -1.0]}
    found = diagnosed(rows)
    assert best_of(found).explanation.name == "shifted"
    rows = best_of(found).explanation.rows
    assert rows is not None
    assert rows.tolist() == [8, 40, 41]
    assert "in 3 of 96 rows" in records.sentence(found)
    assert {row for row, _ in listed(records.as_record(found, decode))} == {8, 40, 41}


@pytest.mark.parametrize("count", [1, 20])
def test_a_part_that_nothing_explains_is_a_fault_and_listed(count):
    places, rng = some_places(count), np.random.default_rng(1)
    found = diagnosed(changed(noisy(), places, lambda x: x - rng.uniform(3, 9)))
    assert found.state == "fault"
    assert found.best is None
    record = records.as_record(found, decode)
    assert listed(record) == places
    text = records.text(record)
    assert "differ by what no known cause explains" in record["verdict"]
    (tried,) = (line for line in text.split("\n") if line.startswith("Tried: "))
    assert {"temperature", "shifted", "padded_vocabulary"} <= set(tried[7:].split(", "))
    assert f"of {count} token{'s' * (count > 1)}" in text


def test_a_tail_of_tokens_that_are_all_off_is_no_part():
    places = some_places(5)
    found = diagnosed(changed(noisy(0.3), places, lambda x: x - 9))
    assert parts.outside(found.tokens).any()
    assert (found.state, found.best, found.part) == ("fault", None, None)
    sentence = records.sentence(found)
    assert "a difference of this size that no known cause explains" in sentence
    others = diagnosed(changed(noisy(), places, lambda x: x - 9)).part
    assert others is not None
    assert len(others.places) == 5


@pytest.mark.parametrize(("scale", "state"), quick.some([(0.08, "fault"), (0.01, "numerics")], 0))
def test_few_rows_that_differ_where_the_others_agree_to_the_bit(scale, state):
    """Less than a tenth of the tokens, so that all together have sizes of numerics."""
    rng, rows = np.random.default_rng(0), list(sampled())
    own = [i for i, row in enumerate(rows) if len(row["logprobs"]) == 10][:5]
    off = with_log_probs(
        [rows[i] for i in own],
        lambda x: x + scale * rng.choice([-1, 1], len(x)) * rng.uniform(0.5, 1.5, len(x)),
    )
    for i, row in zip(own, off, strict=True):
        rows[i] = row
    found = diagnosed(rows)
    assert not verdict.abnormal(found.sizes)
    assert found.state == state
    if state == "fault":
        record = records.as_record(found, decode)
        assert sorted({row for row, _ in listed(record)}) == own
        assert "in 5 of 96 rows, differ by what no known cause explains" in record["verdict"]
        assert record["part"]["others"]["largest"] == 0
    # Half precision of this model that makes as much excuses them.
    name = verdict.HALF_PRECISION[0]
    made = found.tokens.exact + scale
    half = explanations.Explanation(name, name, "numerics", made, np.zeros(len(made)))
    assert verdict._odd_rows(found.tokens, [verdict.judge(half, found.tokens)]) is None


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.02, 0.3])
def test_noise_of_no_known_cause_is_never_explained(scale):
    found = diagnosed(noisy(scale))
    assert found.best is None
    assert found.state == ("fault" if scale > 0.1 else "numerics")
    shown = records.text(records.as_record(found, decode))
    assert (
        "explanation " not in shown.partition("Tried")[2].partition("\n\n")[2] or "draws" in shown
    )
    if scale > 0.1:
        assert "a difference of this size that no known cause explains" in shown


def ended(rows, **how):
    """Rows whose end token is gone, and what is said of how they ended."""
    return [
        row | how | {name: row[name][:-1] for name in ("response_token_ids", "logprobs")}
        for row in rows
        if row["response_token_ids"][-1] in STOPS and len(row["logprobs"]) > 1
    ]


def aborted(rows, **how):
    """The first half of each response, whatever would have come."""
    found = []
    for row in rows:
        half = len(row["logprobs"]) // 2
        if half:
            part = {name: row[name][:half] for name in ("response_token_ids", "logprobs")}
            found.append(row | part | how)
    return found


def test_what_ended_by_something_else_needs_no_end_token():
    by_string = {"finish_reason": "stop", "stop_reason": "</search>"}
    for how in (by_string, {"finish_reason": {"type": "abort"}}, {"finish_reason": "tool_calls"}):
        found = diagnosed([*sampled()[:40], *ended(sampled()[40:], **how)])
        assert found.state == "exact"
        assert found.best is None


def test_aborted_rows_do_not_hide_a_stripped_end_token():
    rows = sampled()
    abort = {"finish_reason": {"type": "abort"}}
    found = diagnosed([*ended(rows, finish_reason=None), *aborted(rows[:30], **abort)])
    assert best_of(found).explanation.name == "end_token_stripped"
    assert found.first is not None
    (response,) = (r for r in found.tokens.responses if r.where == found.first.where)
    assert found.first.position == len(response) - 1


@pytest.mark.parametrize("kept", [0, 20])
def test_aborts_that_nobody_wrote_down_do_not_hide_it_either(kept):
    """An end token was due after 30 of the rows, and after 20 it was not."""
    rows = ended(sampled(), finish_reason=None)[:50]
    end = {"finish_reason": "stop"}
    rows += [row | end for row in sampled() if row["response_token_ids"][-1] in STOPS][:kept]
    tokens = tokens_of([*rows, *sampled()[:14]]).take(range(len(rows)))  # of a full batch
    due = np.arange(len(rows)) < 30
    seen = tokens.evidence._replace(
        end_stop=np.where(due, -0.1, -9.0), stops=np.full((len(tokens.position), 2), -20.0)
    )
    tokens = replace(tokens, evidence=seen)
    (found,) = (one for one in parts.ending(tokens) if one.name == "end_token_stripped")
    assert found.structure > verdict.DECISIVE
    lengths = np.asarray([len(r) for r in tokens.responses])
    cut = (lengths == lengths.max()) & (kept == 0)  # may have been, as long as the longest are
    assert found.shows is not None
    assert found.shows.tolist() == tokens.lasts[due & ~cut].tolist()
    nowhere = replace(tokens, evidence=seen._replace(end_stop=np.full(len(rows), -9.0)))
    (found,) = (one for one in parts.ending(nowhere) if one.name == "end_token_stripped")
    assert found.structure < verdict.DECISIVE


def test_an_end_token_that_is_named_but_not_there_was_stripped():
    named = ended(sampled()[:24], finish_reason={"type": "stop", "matched": STOPS[0]})
    rows = [*named, *sampled()[24:], *sampled()[24:]][:96]  # as many as others have
    found = diagnosed(rows)
    assert best_of(found).explanation.name == "end_token_stripped"
    assert "about draws or ends, not about the gap" in records.text(
        records.as_record(found, decode)
    )
    # Another end token, of the request: it is there.
    other = [
        row | {"finish_reason": "stop", "stop_reason": row["response_token_ids"][-1]}
        for row in ended(sampled()[:24])
    ]
    assert diagnosed([*sampled()[24:], *other]).state == "exact"


def raw_without_ends(**options):
    """Drawn at temperature 0.6, raw log-probs, and the pad token 0 in the place of end tokens."""
    rows, asked = drawn(0.6), {"temperature": 0.6, "logprobs_mode": "raw_logprobs"} | options
    for row, log_probs in zip(rows, exact_log_probs(rows), strict=True):
        *others, last = row["response_token_ids"]
        tokens = [*others, 0 if last in STOPS else last]
        yield row | asked | {"response_token_ids": tokens, "logprobs": log_probs.tolist()}


def test_a_replaced_end_token_is_named_where_log_probs_are_raw():
    found = diagnosed([*raw_without_ends()])
    assert best_of(found).explanation.name == "end_token_replaced"
    assert best_of(found).remains < 1e-5
    # Neither the bias of the end token nor that of the other is in raw log-probs.
    biased = [*raw_without_ends(logit_bias={**dict.fromkeys(map(str, STOPS), 3.0), "0": -2.0})]
    tokens = tokens_of(biased)
    (found,) = (one for one in parts.ending(tokens) if one.name == "end_token_replaced")
    np.testing.assert_allclose(found.predicted, tokens.recorded, atol=1e-5)


def test_a_single_row_has_no_other():
    tokens = tokens_of(noisy()).take([7])
    assert [*parts.of_tokens(tokens)] == []
    assert not parts.outside(tokens).any()


def test_who_waits_is_told_what_is_tried(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "SECONDS", 0.0)
    tried = [variants.Variant(name, name, "fault", forward()) for name in ("a", "b")]
    with caplog.at_level("INFO", logger="tim_jax.common.waiting"):
        assert list(verdict._announced(tried, 9)) == tried
    assert caplog.messages[1].startswith("trying b, alternative 2 of at most 9")
