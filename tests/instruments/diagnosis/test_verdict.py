"""A diagnosis names the fault that was made, and finds none where there is none."""

import importlib
import json
import string
import sys
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny
from recorded import (
    LIMITS,
    SAMPLES,
    STOPS,
    SUMMARY,
    best_of,
    decode,
    diagnosed,
    drawn,
    evidence_of,
    exact_log_probs,
    forward,
    in_tens,
    sampled,
    weights,
    with_log_probs,
)
from scipy import integrate
from scipy.special import log_softmax

from tim_jax import corrections, mismatch
from tim_jax.api.diagnosing import Monitor
from tim_jax.app import cli
from tim_jax.common import pages
from tim_jax.common.errors import InputError
from tim_jax.instruments.auditing import random_params
from tim_jax.instruments.diagnosis import (
    evidence,
    explanations,
    parts,
    readers,
    records,
    reporting,
    variants,
    verdict,
)
from tim_jax.instruments.diagnosis.declared import PLAIN, Distribution, Shaping
from tim_jax.instruments.diagnosis.evidence import chances
from tim_jax.instruments.diagnosis.rollouts import Response, collect
from tim_jax.metrics import mismatch_metrics
from tim_jax.model import hf
from tim_jax.numerics import TPU_EXACT_BF16
from tim_jax.rl.programs import sampling_program
from tim_jax.tasks.text import character_tokenizer

ROOT = Path(__file__).parents[3]


# The arithmetic.


@cache
def synthetic(vocabulary=300, count=40, seed=0, spread=3.0):
    """Logits f32[N, V], tokens drawn from them, and their evidence without a model."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((count, vocabulary))).astype(np.float32)
    tokens = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1).astype(np.int32)
    return logits.astype(np.float64), tokens, evidence_of(logits, tokens)


DISTRIBUTIONS = [
    Distribution(1.0),
    Distribution(0.31),
    Distribution(0.6, 20),
    Distribution(1.7, 0, 0.8),
    Distribution(1.0, 50, 0.9),
    Distribution(3.9),
    Distribution(0.1),
    Distribution(0.035),
    Distribution(0.1, 0, 0.8),
    Distribution(shaping=Shaping(min_p=0.1)),
    Distribution(0.7, 10, 0.9, shaping=Shaping(min_p=0.05)),
]


FLAT = {"vocabulary": 2000, "count": 300, "spread": 0.5}  # its likeliest 128 have a sixth
FLAT_DISTRIBUTIONS = [
    Distribution(1.0, 0, 0.7),
    Distribution(0.9, 0, 0.95),
    Distribution(1.3),
    Distribution(shaping=Shaping(min_p=0.6)),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=str)
def test_log_probs_of_any_distribution_follow_from_the_evidence(distribution):
    check_chances(distribution, *synthetic(), atol=3e-5)


@pytest.mark.parametrize("distribution", FLAT_DISTRIBUTIONS, ids=str)
def test_sets_that_are_larger_than_the_stored_logits_leave_tokens_out(distribution):
    # The mass that such a set has beyond top_p is less than that of a token, and not known.
    check_chances(distribution, *synthetic(**FLAT), atol=5e-3)


def check_chances(distribution, logits, tokens, found, atol):
    rows = np.arange(len(tokens))
    scaled = logits / distribution.temperature
    whole = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    order = np.argsort(-whole, axis=1)
    mass = np.exp(np.take_along_axis(whole, order, axis=1))
    mass[mass < distribution.shaping.min_p * mass[:, :1]] = 0.0
    mass[:, distribution.top_k or len(mass[0]) :] = 0.0
    running = np.cumsum(mass, axis=1)
    if distribution.top_p < 1:
        mass[running - mass >= distribution.top_p * running[:, -1:]] = 0.0
    kept = np.zeros_like(mass)
    np.put_along_axis(kept, order, mass, axis=1)
    inside = kept[rows, tokens] > 0
    given = chances(found, distribution)
    untruncated = chances(found, Distribution(distribution.temperature)).renormalised
    np.testing.assert_allclose(untruncated, whole[rows, tokens], atol=2e-5)
    total = np.log(kept.sum(axis=1))
    np.testing.assert_allclose(
        given.renormalised[inside], (whole[rows, tokens] - total)[inside], atol=atol
    )
    assert (given.drawn[~inside] < whole[rows, tokens][~inside] - 10).all()
    assert inside.all() or distribution.truncated or distribution.shaped


def test_the_noise_model_is_a_density_and_finds_its_scale():
    one = np.ones(1)
    for scale, step in ((1e-4, 0.0), (0.3, 0.0), (0.01, 0.1), (0.3, 0.1)):
        area, _ = integrate.quad(
            lambda x, s=scale, h=step: float(np.exp(explanations.densities(x * one, one, s, h))[0]),
            -400 * scale, 400 * scale, points=[-step / 2, 0.0, step / 2], limit=400,
        )  # fmt: skip
        assert area == pytest.approx(1.0, abs=1e-3)
    rng = np.random.default_rng(0)
    weight = rng.uniform(0.1, 1.0, 4000)
    residual = 0.02 * weight * rng.standard_t(3, 4000)
    assert explanations.fit_noise(residual, weight).scale == pytest.approx(0.02, rel=0.1)
    assert explanations.fit_noise(np.zeros(10), np.ones(10)).scale < explanations.FLOOR
    nothing = explanations.densities(np.asarray([np.nan]), one, 1.0)
    assert nothing[0] == explanations.NOTHING


@pytest.mark.parametrize("agreeing", [0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("step", [0.0, 0.01])
def test_the_noise_that_is_fitted_is_the_likeliest_of_all_scales(agreeing, step):
    """Where many tokens agree to the last bit the likelihood has two maxima."""
    rng = np.random.default_rng(3)
    residual = 0.3 * rng.standard_t(3, 60) * (np.arange(60) >= 60 * agreeing)
    residual[::20] = np.nan
    weight = rng.uniform(0.02, 1.0, 60)
    every = [
        explanations.densities(residual, weight, scale, step).sum()
        for scale in np.geomspace(1e-7, 10.0, 3000)
    ]
    fitted = explanations.fit_noise(residual, weight, step)
    assert max(every) - 1e-6 < fitted.total < max(every) + 1e-2


# What is found.


def test_nothing_to_compare_is_refused_and_no_pass(monkeypatch):
    monkeypatch.setattr(verdict, "gather", None)  # refused before the forward
    rows = [row | {"mask": [0] * len(row["logprobs"])} for row in sampled()[:3]]
    count = sum(len(row["mask"]) for row in rows)
    with pytest.raises(InputError, match=f"mask is 0 at all {count} response tokens, from row 1"):
        diagnosed(rows)


COUNT = 2000  # tokens of a synthetic file: few shapes, so that few programs are compiled
LENGTHS = 7 + np.arange(64) % 4  # of the responses of a synthetic file


def masked(strangers, temperature=1.0):
    """Responses drawn at a temperature, but for every third token, which a loss mask hides.

    Recorded are the log-probs at temperature 1. Hidden tokens and their logits are of the seed
    `strangers`.
    """
    count, rng, other = LENGTHS.sum(), np.random.default_rng(0), np.random.default_rng(strangers)
    hidden = np.arange(count) % 3 == 0
    size = (count, 64)
    logits = np.where(hidden[:, None], 3 * other.normal(size=size), 2 * rng.normal(size=size))
    own = np.argmax(logits / temperature + rng.gumbel(size=size), axis=1)
    ids = np.where(hidden, other.integers(6, 64, count), own).astype(np.int32)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    seen = evidence_of(logits.astype(np.float32), ids)
    seen = seen._replace(exact=logits[np.arange(count), ids].astype(np.float32))
    lasts = np.cumsum(LENGTHS) - 1
    end_stop = -np.where(hidden[lasts], *(x.exponential(size=len(lasts)) for x in (other, rng)))
    parts = (np.split(x, lasts[:-1] + 1) for x in (ids, seen.exact, ~hidden))
    responses = tuple(
        Response("row", (1,), tuple(own), log_probs, Distribution(), mask=mask)
        for own, log_probs, mask in zip(*parts, strict=True)
    )
    return explanations.Tokens(responses, seen._replace(end_stop=end_stop), (1, 2), 64, 64)


def all_judged(tokens):
    tried = (*reporting.reporting(tokens), *parts.ending(tokens))
    return {one.name: verdict.judge(one, tokens) for one in tried}


def test_a_temperature_is_fitted_on_the_tokens_that_the_model_drew():
    found = all_judged(masked(1, temperature=0.7))["drawn_temperature"]
    assert found.explanation.parameters["temperature"] == pytest.approx(0.7, rel=0.1)
    assert found.gain > verdict.DECISIVE
    assert verdict.material(found)


def test_a_softmax_over_the_tokenizers_tokens_alone_is_named():
    rng = np.random.default_rng(0)
    logits = (2 * rng.standard_normal((300, 64))).astype(np.float32)
    ids = np.argmax(logits[:, :50] + rng.gumbel(size=(300, 50)), axis=1).astype(np.int32)
    recorded = log_softmax(logits[:, :50], axis=1)[np.arange(300), ids]
    seen = evidence_of(logits, ids, size=50)
    seen = seen._replace(exact=log_softmax(logits, axis=1)[np.arange(300), ids])
    found = all_judged(in_tens(ids, recorded, seen, 50))
    best = max(found.values(), key=lambda one: one.gain)
    assert best.explanation.name == "cut_vocabulary"
    assert best.share > 0.99
    assert verdict.material(best)


@pytest.mark.parametrize(("count", "drawn"), [(300, 0.6), (COUNT, 0.8), (COUNT, 1.25)])
def test_a_temperature_of_draws_and_log_probs_is_told_from_one_of_log_probs_alone(count, drawn):
    """Log-probs agree to rounding, so both have to be fitted as closely, or chance decides."""
    rng = np.random.default_rng(count)
    logits = (2 * rng.standard_normal((count, 64))).astype(np.float32)
    ids = np.argmax(logits / drawn + rng.gumbel(size=logits.shape), axis=1).astype(np.int32)
    at = np.arange(count), ids
    recorded, exact = (log_softmax(logits / t, axis=1)[at] for t in (np.float32(drawn), 1))
    tokens = in_tens(ids, recorded, evidence_of(logits, ids)._replace(exact=exact), 64)
    tried = reporting._temperatures(tokens, tokens)
    found = {one.name: verdict.judge(one, tokens) for one in tried}
    both, one = found["temperature"], found["recorded_temperature"]
    for judged in (both, one):
        fitted = judged.explanation.parameters["temperature"]
        assert fitted == pytest.approx(drawn, rel=1e-7)
    assert both.gain > one.gain + verdict.DECISIVE


@pytest.mark.parametrize("renormalised", [True, False])
def test_an_undeclared_min_p_is_named(renormalised):
    rng, count = np.random.default_rng(0), COUNT
    logits = (2 * rng.standard_normal((count, 64))).astype(np.float32)
    kept = np.where(logits >= logits.max(axis=1, keepdims=True) + np.log(0.05), logits, -np.inf)
    ids = np.argmax(kept + rng.gumbel(size=logits.shape), axis=1).astype(np.int32)
    at = np.arange(count), ids
    recorded, exact = (
        log_softmax(x, axis=1)[at] for x in (kept if renormalised else logits, logits)
    )
    seen = evidence_of(logits, ids)._replace(exact=exact, raw=exact)
    found = all_judged(in_tens(ids, recorded, seen, 64))
    best = max(found.values(), key=lambda one: one.gain)
    assert best.explanation.name == ("min_p" if renormalised else "min_p_ignored")
    assert best.explanation.parameters == {"min_p": 0.05}
    assert verdict.material(best)


def drawn_raw(temperature, declared):
    """Drawn at a temperature that is declared or not, under the log-probs of the raw logits."""
    rng, count = np.random.default_rng(0), COUNT
    logits = rng.standard_normal((count, 64)).astype(np.float32)
    ids = np.argmax(logits / temperature + rng.gumbel(size=logits.shape), axis=1).astype(np.int32)
    exact = log_softmax(logits, axis=1)[np.arange(count), ids]
    seen = evidence_of(logits, ids)._replace(exact=exact, raw=exact)
    return in_tens(ids, exact, seen, 64, declared)


@pytest.mark.parametrize("temperature", quick.some([0.1, 0.04, 0.01, 9.0], 1, 3))
def test_declared_draws_at_any_temperature_are_no_fault(temperature):
    found = all_judged(drawn_raw(temperature, Distribution(temperature, raw=True)))
    assert not [one for one in found.values() if one.gain > verdict.DECISIVE]


@pytest.mark.parametrize(
    ("temperature", "text", "parameter"),
    [
        (0.1, "temperature 0.09", "temperature"),
        (0.01, "a temperature of 0.0312 or less", "temperature_at_most"),
        (9.0, "a temperature of 4.76 or more", "temperature_at_least"),
    ],
)
def test_a_temperature_beyond_those_that_are_fitted_is_no_number(temperature, text, parameter):
    tokens = drawn_raw(temperature, PLAIN)
    _, _, tried = reporting._temperatures(tokens, tokens)
    found = verdict.judge(tried, tokens)
    assert found.gain > verdict.DECISIVE
    assert found.explanation.text.startswith(f"drawn at {text}")
    assert [*found.explanation.parameters] == [parameter]


def drawn_by_rounded(drawn, declared):
    """Drawn by logits that are off by a little, so that draws at an edge are of another set."""
    rng, count = np.random.default_rng(0), COUNT
    logits = 1.5 * rng.standard_normal((count, 64)).astype(np.float32)
    engine = logits + 0.03 * rng.standard_normal(logits.shape)
    log_probs, exact = (log_softmax(x, axis=1) for x in (engine, logits))
    ranked = np.sort(engine, axis=1)[:, ::-1]
    kept = engine >= ranked[:, (drawn.top_k or 64) - 1, None]
    mass = np.sort(np.exp(log_probs), axis=1)[:, ::-1]
    edge = np.argmax(np.cumsum(mass, axis=1) >= drawn.top_p - 1e-6, axis=1)
    kept &= engine >= ranked[np.arange(count), edge][:, None]
    chance = engine + drawn.temperature * rng.gumbel(size=engine.shape)
    ids = np.argmax(np.where(kept, chance, -np.inf), axis=1).astype(np.int32)
    at = np.arange(count), ids
    seen = evidence_of(logits, ids)._replace(exact=exact[at], raw=exact[at])
    return in_tens(ids, log_probs[at], seen, 64, declared)


NARROW = [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 1}]


@pytest.mark.parametrize("how", quick.some(NARROW, 0, 1), ids=str)
def test_a_draw_at_an_edge_that_rounding_moves_is_no_fault(how):
    declared = Distribution(**how, raw=True)
    found = all_judged(drawn_by_rounded(declared, declared)).values()
    assert not [one for one in found if one.gain > verdict.DECISIVE and verdict.material(one)]
    found = all_judged(drawn_by_rounded(PLAIN, declared)).values()
    assert [one for one in found if one.gain > 100 and one.of_draws]


def test_what_a_loss_mask_hides_decides_nothing():
    one, two = (all_judged(masked(seed)) for seed in (1, 2))
    assert one.keys() == two.keys()
    assert {"top_p", "end_token_stripped"} <= one.keys()
    for name in one.keys() - {"shifted"}:  # whose log-probs are those of tokens next to hidden ones
        first, second = one[name], two[name]
        assert first.explanation.parameters == pytest.approx(second.explanation.parameters), name
        assert first.gain == pytest.approx(second.gain, abs=1e-4), name
        assert verdict.material(first) == verdict.material(second)


def test_a_temperature_of_some_rows_is_fitted_on_these():
    """The others have the declared one: a fit to all would find neither."""
    rows = with_log_probs(sampled(), lambda x: x + 1e-3 * np.cos(np.arange(len(x))))
    other = drawn(0.6)
    found = diagnosed([other[i] if i % 12 == 0 else row for i, row in enumerate(rows)])
    best = best_of(found).explanation
    assert best.name in ("temperature", "recorded_temperature")
    assert best.parameters["temperature"] == pytest.approx(0.6, rel=0.01)
    assert best.rows is not None
    assert set(best.rows) <= {*range(0, 96, 12)}


@pytest.mark.slow
def test_the_output_of_tools_does_not_hide_a_temperature():
    rng = np.random.default_rng(0)

    def with_output(row):
        ids, output = row["response_token_ids"], rng.integers(6, tiny.CONFIG.vocab_size, 6).tolist()
        return {
            "prompt_token_ids": row["prompt_token_ids"],
            "response_token_ids": ids + output,
            "logprobs": row["logprobs"] + [-1.0] * len(output),
            "mask": [1] * len(ids) + [0] * len(output),
        }

    found = diagnosed([with_output(row) for row in raw(drawn(0.6), temperature=1.0)])
    assert found.state == "fault"
    assert best_of(found).explanation.name == "drawn_temperature"
    assert best_of(found).explanation.parameters["temperature"] == pytest.approx(0.6, rel=0.15)


def test_a_table_of_explanations_has_each_once_in_eighty_columns():
    long = {"name": " ".join(["quantised_weights(int4)"] * 4), "gain": 12.5, "share": 0.5}
    long |= {"moves": True, "matches": "tokens"}
    shown = records._first_of_each_name([long, long | {"gain": 3.0}, long | {"name": "x"}])
    assert [(one["name"], one["gain"]) for one in shown] == [(long["name"], 12.5), ("x", 12.5)]
    lines = records._row(long).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[1].split()) == "quantised_weights(int4) quantised_weights(int4)"


def test_exact_rollouts_have_no_fault_and_equal_bits():
    found = diagnosed(sampled())
    count = len(found.tokens.sequence)
    assert repr(found).startswith(f"Verdict(exact, {count} tokens, best nothing, mean 0, ")
    assert found.state == "exact"
    assert found.normal
    exact = found.tokens.evidence.exact
    recorded = np.concatenate([np.float32(row["logprobs"]) for row in sampled()])
    assert len(exact) > 300
    assert exact.tobytes() == recorded.tobytes()


@pytest.mark.slow
def test_numerics_of_a_normal_size_are_no_fault():
    rng = np.random.default_rng(0)
    noisy = with_log_probs(sampled(), lambda x: x + 0.005 * rng.standard_normal(len(x)))
    found = diagnosed(noisy)
    assert found.state == "numerics"
    assert found.normal
    assert found.first is None


def test_a_dtype_that_the_kernels_lack_is_no_explanation():
    """So that a diagnosis on a TPU goes on without it."""
    forward = evidence.Forward(weights(), replace(tiny.EXECUTION, numerics=TPU_EXACT_BF16), 23, ())
    found = [variant.name for variant in variants.of_numerics(forward, variants.SOURCES[:4])]
    assert found == ["compute(bfloat16)", "lm_head(bfloat16)", "logits(bfloat16)"]


def noisy_of(rows, total, off=0.0):
    """Rows of this many tokens with noise of sound engines; each fiftieth is `off` besides."""
    rng = np.random.default_rng(0)
    count = sum(len(row["logprobs"]) for row in rows)
    many = with_log_probs(
        rows * (total // count + 1), lambda x: x + 0.003 * rng.normal(size=len(x))
    )
    shift = with_log_probs(many, lambda x: x - off * rng.uniform(0.2, 1, len(x)))
    return [
        two if i % 50 == 0 else one for i, (one, two) in enumerate(zip(many, shift, strict=True))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("off", "most"), [(0.0, 2.2), (3.0, 4.0)], ids=["normal", "fault"])
def test_a_diagnosis_of_many_tokens_costs_few_forwards(monkeypatch, off, most):
    """Of 102,400 tokens. Three kinds of low precision, to save time: ten more cost 0.03."""
    scored, plain = [], evidence._of_responses

    def counted(other, responses, **how):
        """As it scores; what comes again is scored once, to save time."""
        scored.append(sum(map(len, responses)))
        keys = [(tuple(r.prompt), tuple(r.tokens)) for r in responses]
        once = dict(zip(keys, responses, strict=True))
        found = dict(zip(once, plain(other, list(once.values()), **how), strict=True))
        return [found[key] for key in keys]

    monkeypatch.setattr(evidence, "_of_responses", counted)
    others = [variants.Candidate("before", jax.tree.map(lambda x: 0.98 * x, weights()))]
    rows = noisy_of(sampled(), 102_400, off)
    found = diagnosed(rows, sources=variants.SOURCES[:3], others=others)
    assert explanations.abnormal(found.sizes) == (off > 0)
    assert scored[0] >= 102_400
    assert 6 < len(scored) < 30
    assert 1 < sum(scored) / scored[0] <= most


def test_the_summary_of_a_forward_does_not_sort_the_vocabulary():
    logits, tokens, _ = synthetic()
    arrays = jnp.asarray(logits, jnp.float32), jnp.asarray(tokens)
    text = SUMMARY.lower(*arrays, 300, (1, 2)).compile().as_text()
    assert text is not None
    assert "TopK" in text
    assert " sort(" not in text


@pytest.mark.slow
def test_a_model_without_end_tokens_is_diagnosed():
    found = collect(readers.read(sampled()), limits=LIMITS)
    endless = forward()._replace(stop_tokens=())
    assert verdict.diagnose(found.responses, endless, sources=()).state == "exact"


def shifted(rows):
    return [row | {"logprobs": [*row["logprobs"][1:], -1.0]} for row in rows]


def replaced(rows):
    def change(row):
        ids = row["response_token_ids"]
        return row | {"response_token_ids": [*ids[:-1], 0] if ids[-1] in STOPS else ids}

    return [change(row) for row in rows]


def stripped(rows):
    def change(row):
        ended = row["response_token_ids"][-1] in STOPS and len(row["logprobs"]) > 1
        cut = {name: row[name][:-1] for name in ("response_token_ids", "logprobs")}
        return row | cut if ended else row

    return [change(row) for row in rows]


def padded(rows, pad=7):
    return [row | {"mask": [int(t != pad) for t in row["response_token_ids"]]} for row in rows]


def zeroed(rows, pad=7):
    def change(row):
        pairs = zip(row["response_token_ids"], row["logprobs"], strict=True)
        return row | {"logprobs": [0.0 if t == pad else x for t, x in pairs]}

    return [change(row) for row in rows]


def firsts(rows):
    return [row | {"logprobs": [row["logprobs"][0] - 6.0, *row["logprobs"][1:]]} for row in rows]


def test_first_tokens_are_not_said_to_be_wrong_where_second_ones_are_as_well():
    def change(x):
        return x - np.asarray([6.0, 3.0, *[0.0] * len(x)])[: len(x)]

    found = diagnosed(with_log_probs(sampled(), change))
    assert found.state == "fault"
    assert found.best is None or found.best.explanation.name != "first_tokens"


def test_pad_tokens_before_prompts_are_named():
    tokenizer = character_tokenizer(string.ascii_letters[: tiny.CONFIG.vocab_size - 2])
    pads = [tokenizer.pad_token_id] * 3
    rows = [row | {"prompt_token_ids": [*pads, *row["prompt_token_ids"]]} for row in sampled()]
    found = diagnosed(rows, tokenizer=tokenizer)
    assert best_of(found).explanation.name == "prompt_padded"
    assert best_of(found).share > 0.99


def of_wider_vocabulary(rows, count=9):
    """The softmax taken over `count` more rows, whose logits are 0."""
    found = collect(readers.read(rows), limits=LIMITS).responses
    seen = evidence.gather(forward(), found)
    normaliser = seen.moments[:, evidence.AT_ONE, 0].astype(np.float64)
    moved = normaliser - np.logaddexp(normaliser, np.log(count) - seen.peak)
    parts = np.split(moved, np.cumsum([len(r) for r in found])[:-1])
    return [
        row | {"logprobs": (np.asarray(row["logprobs"]) + part).tolist()}
        for row, part in zip(rows, parts, strict=True)
    ]


FAULTS = [
    ("temperature", lambda: drawn(0.6), {"temperature": 0.6}),
    ("raw_log_probs", lambda: raw(drawn(0.6)), {}),
    ("top_k", lambda: drawn(1.0, 5), {"top_k": 5}),
    ("shifted", lambda: shifted(sampled()), {}),
    ("end_token_replaced", lambda: replaced(sampled()), {}),
    ("end_token_stripped", lambda: stripped(sampled()), {}),
    ("pad_mask", lambda: padded(sampled()), {}),
    ("pad_mask", lambda: zeroed(sampled()), {}),
    ("first_tokens", lambda: firsts(sampled()), {}),
    ("log_base", lambda: with_log_probs(sampled(), lambda x: x / np.log(10)), {}),
    ("padded_vocabulary", lambda: of_wider_vocabulary(sampled()), {"rows": 9}),
]


def raw(rows, temperature=0.6):
    """Drawn at a declared temperature, recorded without it."""
    return [
        row | {"logprobs": part.tolist(), "temperature": temperature}
        for row, part in zip(rows, exact_log_probs(rows), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "rows", "parameters"),
    [
        pytest.param(*one, marks=[pytest.mark.slow] if i % 2 else [], id=f"{i}-{one[0]}")
        for i, one in enumerate(FAULTS)
    ],
)
def test_one_fault_is_named_first(name, rows, parameters):
    found = diagnosed(rows())
    assert found.state == "fault"
    best = best_of(found).explanation
    assert best.name == name
    for key, value in parameters.items():
        assert best.parameters[key] == pytest.approx(value, rel=0.01)
    assert found.first is not None
    (response,) = (r for r in found.tokens.responses if r.where == found.first.where)
    assert response.tokens[found.first.position] == found.first.token


def filled(rows, pad=7):
    """Arrays of one width, as trainers dump them: tokens, log-probs and mask are filled up."""
    return [filled_row(row, pad, 15 - len(row["logprobs"])) for row in rows]  # others' shape


def filled_row(row, pad, more):
    return row | {
        "response_token_ids": [*row["response_token_ids"], *[pad] * more],
        "logprobs": [*row["logprobs"], *[0.0] * more],
        "mask": [1] * len(row["logprobs"]) + [0] * more,
    }


def test_padding_behind_a_response_that_a_mask_hides_is_no_fault():
    noisy = with_log_probs(sampled(), lambda x: x + 1e-3 * np.cos(np.arange(len(x))))
    rows = filled([row for row in noisy if 7 not in row["response_token_ids"]])
    rows = rows[:64]  # a full batch, as that of the others
    assert len(rows) > 8
    assert any(len(row["mask"]) > sum(row["mask"]) for row in rows)
    found = diagnosed(rows)
    assert found.state != "fault"


def test_padding_hides_no_end_token_that_was_stripped():
    rows = filled(stripped(sampled()))
    assert best_of(diagnosed(rows)).explanation.name == "end_token_stripped"


def test_unexplained_and_larger_than_numerics_is_a_fault_at_its_first_token():
    rows = [dict(row) for row in sampled()]
    rows[20]["logprobs"] = [-9.0, *rows[20]["logprobs"][1:]]
    found = diagnosed(rows)
    assert found.state == "fault"
    assert found.best is None
    assert found.first is not None
    assert (found.first.where, found.first.position) == ("row 21", 0)


def test_a_few_tokens_of_a_gap_are_undecided_and_fit_no_parameter():
    longer = (row for row in sampled() if len(row["logprobs"]) > 2)
    uncertain = [row for row in longer if row["logprobs"][0] < -0.3]

    def first(row, count):
        cut = {name: row[name][:count] for name in ("response_token_ids", "logprobs")}
        return row | cut | {"finish_reason": "length"}

    for count, said in ((1, "1 token is"), (2, "2 tokens are"), (3, "3 tokens are")):
        for row in uncertain[:4]:
            found = diagnosed(with_log_probs([first(row, count)], lambda x: x + 0.04))
            assert (found.state, found.best) == ("undecided", None), records.sentence(found)
            assert not found.normal
            assert f"Undecided: {said} too few to tell" in records.sentence(found)
    far = diagnosed([first(uncertain[0], 3) | {"logprobs": [-9.0] * 3}])
    assert far.state == "fault"  # the largest of a few tokens is not above the normal by chance
    one = diagnosed([uncertain[0] | {"response_token_ids": [7], "logprobs": [0.0]}])
    assert "pad_mask" not in {x.explanation.name for x in one.judged}
    assert diagnosed(drawn(0.6)[:8]).state == "fault"  # some fifty tokens are enough


def test_what_leaves_more_than_numerics_is_said_to_be_nearest():
    rng = np.random.default_rng(0)

    def off(x):
        return x + 0.15 * rng.standard_normal(len(x))

    found = diagnosed(with_log_probs(drawn(0.6), off))
    assert best_of(found).explanation.name in ("temperature", "recorded_temperature")
    assert found.nearest
    sentence = records.sentence(found)
    assert sentence.startswith("This is a fault that no known cause explains; nearest is: ")
    assert sentence.endswith(f"explains {100 * best_of(found).share:.0f}% of the gap.")
    sound = diagnosed(with_log_probs(drawn(0.6), lambda x: x + 0.01 * rng.normal(size=len(x))))
    assert not sound.nearest
    # Half precision that makes as much as is left.
    name, left = verdict.HALF_PRECISION[0], best_of(found).residual
    exact = found.tokens.evidence.exact
    half = explanations.Explanation(name, name, "numerics", exact + left, np.zeros(len(left)))
    half = verdict.judge(half, found.tokens)
    assert not verdict._is_nearest(best_of(found), [half])
    # A fault of a part explains nothing of the others, and is no less the cause there.
    part = with_log_probs(sampled(), off)
    for i, row in enumerate(part):
        row["logprobs"] = [-9999.0 if i % 9 == 0 else row["logprobs"][0], *row["logprobs"][1:]]
    sentence = records.sentence(diagnosed(part))
    assert "a sentinel, where none was recorded. Other tokens differ by more than" in sentence


@pytest.mark.slow
def test_draws_alone_do_not_explain_a_gap_that_is_not_normal():
    rng = np.random.default_rng(0)
    rows = raw(drawn(0.6), temperature=1.0)
    found = diagnosed(with_log_probs(rows, lambda x: x + 0.5 * rng.standard_normal(len(x))))
    assert "drawn_temperature" in {x.explanation.name for x in found.judged if x.of_draws}
    assert found.best is None
    assert "a difference of this size that no known cause explains" in records.sentence(found)


def test_other_weights_and_other_prompts_are_named():
    def recorded_by(made):
        seen = evidence.gather(forward()._replace(weights=made), found)
        parts = np.split(seen.exact, np.cumsum([len(r) for r in found])[:-1])
        return [row | {"logprobs": x.tolist()} for row, x in zip(drawn, parts, strict=True)]

    drawn = sampled()
    found = collect(readers.read(drawn), limits=LIMITS).responses
    old = jax.jit(tiny.EXECUTION.prepare)(tiny.moved(tiny.params(), 0.02))
    own = jax.device_get(weights())  # so that no operation is compiled for each shape
    less = jax.tree.map(lambda x: np.float32(0.99) * x, own)
    others = [variants.Candidate("step 1", less), variants.Candidate("step 2", old)]
    average = jax.tree.map(lambda x, y: (x + y) / 2, own, jax.device_get(old))
    coarse = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), own)
    for name, made in (
        ("weights of step 2", old),
        ("weights half way to step 2", average),
        ("weights on a bfloat16 grid", coarse),
    ):
        named = diagnosed(recorded_by(made), others=others)
        assert best_of(named).explanation.name == name
        assert best_of(named).share > 0.99
    # The trainer lost the prompts' last token.
    shorter = [row | {"prompt_token_ids": [4, *row["prompt_token_ids"]]} for row in drawn]
    longer = [row | {"prompt_token_ids": [*row["prompt_token_ids"], 4]} for row in drawn]
    assert best_of(diagnosed(longer)).explanation.name == "prompt_longer"
    assert diagnosed(shorter).state == "fault"


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry",
    [
        mismatch.compute(dtype="bfloat16"),
        mismatch.kv_cache(dtype="float8_e4m3fn"),
        mismatch.quantised_weights(dtype="int4"),
        mismatch.quantised_weights(dtype="int8", activations="int8"),
        mismatch.logits(dtype="bfloat16"),
    ],
    ids=mismatch.label,
)
def test_low_precision_is_named_by_its_entry(entry):
    dial = mismatch.Mismatch((entry,))
    program = sampling_program(tiny.EXECUTION, samples=SAMPLES, mismatch=dial.drawing)
    found = jax.device_get(program(dial.weights(weights()), tiny.prompts(), jax.random.key(3)))
    rows = [
        {
            "prompt_token_ids": found.prompts[i, : found.prompt_lengths[i]].tolist(),
            "response_token_ids": found.responses[i, :length].tolist(),
            "logprobs": np.minimum(found.log_probs[i, :length], 0).tolist(),
        }
        for i, length in enumerate(found.lengths)
    ]
    others = (mismatch.compute(dtype="float16"), mismatch.softmax(dtype="bfloat16"))
    alone = variants.EIGHT_BITS.get(entry)
    named = diagnosed(rows, sources=(*others, *([alone] if alone else []), entry))
    assert best_of(named).explanation.name == mismatch.label(entry)
    assert best_of(named).share > 0.99
    usual = named.sizes["k3"] < explanations.NORMAL_K3 and named.sizes["mean"] < 0.02
    assert named.normal == (usual or named.half is not None)
    assert named.normal or not alone
    if mismatch.label(entry) in verdict.HALF_PRECISION:
        assert named.half is not None
        assert 0.5 < named.half.scale < 2


def judgement(
    name, gain, *, kind: explanations.Kind = "fault", parameters=(), sizes=None, scale=1.0
):
    nothing, no_tokens = np.zeros(1), cast(Any, None)
    found = explanations.Explanation(
        name, name, kind, nothing, nothing, parameters=dict.fromkeys(parameters, 1.0), sizes=sizes
    )
    options: dict[str, Any] = {"scale": scale, "gap": 1.0, "remains": 0.0, "effect": 1.0}
    options["within"] = 1.0
    touched = np.ones(1, bool)
    return verdict.Judged(
        found, no_tokens, gain, nothing, **options, touched=touched, of_draws=False
    )


def test_of_two_faults_that_are_equally_likely_the_simpler_is_named():
    fitted, raw = judgement("temperature", 50.0, parameters=["t"]), judgement("raw_log_probs", 45.0)
    other = judgement("compute(bfloat16)", 45.0, kind="numerics")
    # An end token that was stripped moves no log-prob, and low precision does not explain it.
    stripped = replace(judgement("end_token_stripped", 20.0), touched=np.zeros(1, bool))
    assert verdict._best([other, stripped]) is stripped
    assert verdict._best([fitted, other, raw]) is raw
    assert verdict._best([fitted, other]) is fitted
    assert verdict._best([fitted, judgement("raw_log_probs", 39.0)]) is fitted
    assert verdict._best([]) is None


@pytest.mark.parametrize("kind", ["fault", "numerics"])
@pytest.mark.parametrize("local", [False, True])
def test_what_explains_less_than_a_twentieth_of_the_gap_is_never_named(kind, local):
    one = judgement("any", 1e6, kind=kind)
    few = one.explanation.predicted.repeat(4)
    tokens = low_precision("any", few, scale=1.0)[0].tokens
    touched = np.asarray([True, *[not local] * 3])
    one = replace(one, tokens=tokens, touched=touched, of_draws=True)
    assert one.local == local
    assert verdict.material(replace(one, remains=0.7))
    assert not verdict.material(replace(one, remains=0.951))


def test_k3_is_never_negative_and_as_defined_where_ratios_are_small():
    for d in (-1e30, -9999.0, -20.0, -1.0, -3e-8, 0.0, 1e-8, 3.0, 50.0, 1e30):
        assert explanations.sizes_of(np.asarray([d]))["k3"] >= 0
    d = np.asarray([-3.0, 0.1, 30.0])
    wanted = (np.exp(-d) - 1 + d).mean()
    assert explanations.sizes_of(d)["k3"] == pytest.approx(wanted, rel=1e-12)


def low_precision(name, made, *, scale):
    """Low precision judged by the sizes of its differences, and by the differences themselves."""
    count = len(made)
    seen = masked(1).evidence.take(np.arange(count))._replace(exact=np.full(count, -1.0))
    response = Response("row", (1,), (2,) * count, np.full(count, -1.0), Distribution())
    tokens = explanations.Tokens((response,), seen, (1, 2), 64, 64)
    own = explanations.Explanation(name, name, "numerics", made - 1.0, np.zeros(count))
    by_size = replace(own, predicted=np.full(count, -1.0), sizes=np.abs(made))
    rest = {"gap": 1.0, "remains": 1.0, "effect": 0.0, "within": 1.0, "of_draws": False}
    rest["touched"] = made != 0
    return [verdict.Judged(one, tokens, 1.0, made, scale=scale, **rest) for one in (own, by_size)]


def test_half_precision_is_tried_where_few_tokens_differ():
    """The median of all is 0 there, far below what half precision makes."""
    smallest, _ = low_precision(verdict.HALF_PRECISION[1], np.full(8, 0.01), scale=1.0)
    recorded = np.where(np.arange(8) == 3, -1.1, -1.0)
    responses = tuple(replace(r, log_probs=recorded) for r in smallest.tokens.responses)
    some = replace(smallest.tokens, responses=responses)
    for name, worth in ((verdict.HALF_PRECISION[0], True), ("kv_cache(int8)", False)):
        other = variants.Variant(name, name, "numerics", cast(Any, None))
        assert verdict._worth_trying(other, [smallest], some) is worth


def test_half_precision_of_the_model_itself_is_normal_up_to_twice_its_size():
    made, name = np.full(8, 0.1), verdict.HALF_PRECISION[0]
    normal = verdict.sizes_of(1.9 * made)

    def found(sizes=normal, name=name, scale=1.9):
        return verdict._half_precision(low_precision(name, made, scale=scale), sizes, 8)

    half = found()
    assert half is not None
    assert half.scale == 1.9
    assert found(scale=2.1) is None
    assert found(name="quantised_weights(int4)") is None
    # A fit of the bulk does not see the tails: mean, K3 and the largest must go with it.
    assert found(verdict.sizes_of(2.1 * made)) is None
    assert found(normal | {"k3": 1e3 * normal["k3"]}) is None
    assert found(normal | {"largest": 3.0}) is None


def test_8_bits_are_normal_if_the_rounding_of_their_weights_is_found():
    both, alone = map(mismatch.label, next(iter(variants.EIGHT_BITS.items())))
    made = np.full(8, 0.1)
    normal = verdict.sizes_of(2.9 * made)
    own, by_size = low_precision(both, made, scale=2.9)
    weights = replace(low_precision(alone, made, scale=9.0)[0], remains=0.9, gain=20.0)

    def found(weights):
        return verdict._half_precision([own, by_size, weights], normal, 8)

    assert found(weights) is by_size
    assert found(replace(weights, gain=5.0)) is None
    assert found(replace(weights, gains=0.1 * made)) is None
    assert verdict._half_precision([own, by_size], normal, 8) is None


def test_low_precision_of_the_bulk_does_not_excuse_a_part():
    name, made = verdict.HALF_PRECISION[0], np.full(8, 0.01)
    own, _ = low_precision(name, made, scale=1.0)
    recorded = np.where(np.arange(8) == 3, 0.0, made - 1.0)
    responses = tuple(replace(r, log_probs=recorded) for r in own.tokens.responses)
    tokens = replace(own.tokens, responses=responses)
    own = replace(own, tokens=tokens, gain=100.0)
    for place, best in ((3, "sentinel"), (2, name)):  # at 2 it has the recorded log-prob
        fault = replace(judgement("sentinel", 50.0), tokens=tokens, touched=np.arange(8) == place)
        found = verdict._best([own, fault])
        assert found is not None
        assert found.explanation.name == best


def script(name):
    """A module of scripts/."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.mark.slow
def test_rollouts_of_transformers_are_numerics_and_a_mistake_in_them_is_named(tmp_path):
    pytest.importorskip("torch")
    table, made = script("diagnose_table"), script("diagnose_faults")
    hf.save(tmp_path / "m", jax.device_get(table.params()), table.CONFIG, tokenizer=table.TOKENIZER)
    for dtype in ("float32", "bfloat16", "int8"):
        rows = table.by_transformers(tmp_path / "m", table.Engine(dtype))
        found = table.diagnosed(rows)
        assert found.state == "numerics", records.sentence(found)
        assert (found.sizes["largest"] < 1e-4) == (dtype == "float32")
    assert "int8 weights and activations" in records.sentence(found)
    # Other weights make a gap of that size, but none that goes with the rounding.
    stale = table.diagnosed(made.changed(rows, made.by_engine(made.engine(0.01))))
    assert 0.5 < stale.sizes["mean"] / found.sizes["mean"] < 2
    assert stale.state == "fault"
    assert stale.best is None
    engine = table.Engine("bfloat16", temperature=0.6, raw=True)
    raw = table.by_transformers(tmp_path / "m", engine)
    assert best_of(table.diagnosed(raw)).explanation.name == "raw_log_probs"


CASES = {  # of docs/diagnose.md: exit status, and the explanation that is named
    "temperature": (1, "raw_log_probs"),
    "end_token": (1, "end_token_replaced"),
    "bfloat16": (0, "compute(bfloat16)"),
    "checkpoint": (1, "weights of"),
}


@pytest.mark.slow
def test_the_cases_of_the_page_end_as_it_says(tmp_path, monkeypatch):
    cases = script("diagnose_cases")
    cases.write_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, (status, explanation) in CASES.items():
        file = ROOT / "docs" / "diagnose" / f"{name}.jsonl"
        options = ["--json", "r.json", "--candidate-weights", "before"]
        assert cli.main(["diagnose", "model", str(file), *options]) == status
        record = json.loads((tmp_path / "r.json").read_text())
        assert record["explanation"]["name"].startswith(explanation)
        assert file.name in (ROOT / "docs" / "diagnose.md").read_text()


# Reports, and the monitor.


def test_a_report_says_it_all_in_text_json_and_html():
    found = diagnosed(drawn(0.6))
    record = records.as_record(found, decode)
    text = records.text(record)
    assert "fault: drawn and recorded at temperature 0.6" in text
    assert "The first token that shows it: row " in text
    parsed = json.loads(pages.as_json(record))
    assert parsed["explanations"][0]["name"] == "temperature"
    assert parsed["metrics"]["tokens"] == parsed["tokens"]
    assert parsed["remains"]["mean"] < 1e-4
    for name in ("by_position", "by_probability", "by_difference", "by_length"):
        assert sum(one["tokens"] for one in parsed["profiles"][name]) == parsed["tokens"]
    assert len(parsed["worst"]) == records.WORST
    page = records.as_html(record | {"verdict": "<script>"}, "a & b")
    assert "<script>" not in page
    assert "http" not in page


class Tensor:
    """What torch asks for before an array can be had."""

    def __init__(self, array):
        self.array = array

    def __getattr__(self, name):
        assert name in ("detach", "float", "cpu")
        return lambda: self

    def numpy(self):
        return self.array


def of_torch(array):
    return pytest.importorskip("torch").tensor(array, requires_grad=array.dtype != bool)


@pytest.mark.parametrize(
    "of", [Tensor, jnp.asarray, pytest.param(of_torch, marks=pytest.mark.slow)]
)
def test_a_monitor_takes_arrays_of_any_library(of):
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(size=(3, 5)).astype(np.float32)
    trainer = rollout + 0.5 * rng.standard_normal((3, 5)).astype(np.float32)
    mask = np.arange(5)[None, :] < np.asarray([5, 2, 4])[:, None]
    monitor = Monitor(corrections.token_tis(cap=1.2))
    seen = monitor(trainer, rollout, mask)
    wanted = jax.jit(mismatch_metrics)(trainer, rollout, mask)
    assert seen.metrics["mismatch/kl_k3"] == pytest.approx(float(wanted["kl_k3"]), rel=1e-6)
    np.testing.assert_allclose(
        seen.coefficients, np.where(mask, np.minimum(np.exp(trainer - rollout), 1.2), 0), rtol=1e-5
    )
    assert seen.kept.tolist() == mask.tolist()
    again = monitor(*map(of, (trainer, rollout, mask)))
    assert again.metrics == seen.metrics
    assert again.coefficients.tobytes() == seen.coefficients.tobytes()
    assert Monitor()(trainer, rollout, mask).coefficients.tolist() == mask.tolist()
    with pytest.raises(InputError, match=r"rollout has shape \(3, 4\); it must be the mask's"):
        monitor(trainer, rollout[:, :4], mask)
    with pytest.raises(jax.errors.TracerArrayConversionError):  # JAX says what it is
        jax.jit(lambda traced: monitor(traced, rollout, mask))(jnp.asarray(trainer, jnp.float32))
    listed = monitor([*map(of, trainer)], [*map(of, rollout)], mask.tolist())
    assert listed.metrics == seen.metrics
    for wrong in ([[-1.0], [-1.0, -2.0]], [["a"]]):
        with pytest.raises(InputError, match=r"rollout must be numbers .*; got \[\["):
            monitor(trainer, wrong, mask)


def test_a_monitor_gives_a_correction_the_log_probs_that_it_reads():
    rng = np.random.default_rng(0)
    rollout = -rng.exponential(size=(3, 5)).astype(np.float32)
    trainer = np.minimum(rollout + 0.5 * rng.standard_normal((3, 5)), 0).astype(np.float32)
    mask = np.ones((3, 5), bool)
    recipe = corrections.kpop()
    arrays = {"log_ratio": trainer - rollout, "mask": mask, "log_probs": trainer}
    wanted = jax.jit(partial(corrections.coefficients, recipe))(**arrays)
    monitor = Monitor(recipe)
    np.testing.assert_array_equal(monitor(trainer, rollout, mask).coefficients, wanted)
    for name in ("log_probs", "log_ratio"):
        with pytest.raises(InputError, match=f"{name} follows from trainer and rollout; leave it"):
            monitor(trainer, rollout, mask, **{name: trainer})


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = character_tokenizer(string.ascii_lowercase)
    config = replace(
        tiny.CONFIG, vocab_size=len(tokenizer), num_layers=1, max_positions=32, eos_token_ids=(1, 9)
    )
    path = tmp_path_factory.mktemp("diagnosed") / "model"
    return hf.save(path, random_params(config, 0), config, tokenizer=tokenizer)


def test_the_command_names_bad_lines_and_ends_with_2(folder, tmp_path, capsys):
    good = {"prompt_token_ids": [2], "response_token_ids": [3], "logprobs": [-1.0]}
    file = tmp_path / "r.jsonl"
    rows = [good, good | {"logprobs": [1.0]}, good | {"response_token_ids": [99]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert cli.main(["diagnose", str(folder), str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{file}, line 2: logprobs[0] = 1 is positive")
    assert lines[1].startswith(f"{file}, line 3: response_token_ids[0] = 99 is outside")
    assert lines[2] == "tim-jax: 2 of 3 rows are bad; --skip-bad diagnoses the other 1"
    assert cli.main(["diagnose", str(folder), str(tmp_path / "no.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err
    file.write_text(json.dumps(good | {"mask": [0]}))
    assert cli.main(["diagnose", str(folder), str(file)]) == 2
    assert "mask is 0 at all 1 response tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_and_the_function_diagnose(folder, tmp_path, capsys):
    import tim_jax as tim

    model = tim.load(folder)
    rollout = tim.sample(model, ["abc", "q"], samples=16, max_tokens=12, temperature=0.7)
    assert tim.diagnose(model, rollout).verdict.state == "exact"
    assert tim.diagnose.Monitor is Monitor
    rows = [
        {
            "prompt": "abc" if i < 16 else "q",
            "prompt_token_ids": [2, 3, 4] if i < 16 else [18],
            "response_token_ids": rollout.tokens[i, :n].tolist(),
            "logprobs": rollout.log_probs[i, :n].tolist(),
        }
        for i, n in enumerate(rollout.lengths)
    ]
    file, page, record = (tmp_path / name for name in ("r.jsonl", "r.html", "r.json"))
    file.write_text("\n".join(map(json.dumps, [*rows, {"logprobs": []}])))
    options = ["--skip-bad", "--html", str(page), "--json", str(record)]
    assert cli.main(["diagnose", str(folder), str(file), *options]) == 1
    out = capsys.readouterr()
    assert "drawn and recorded at temperature 0.7" in out.out
    assert f"skipped: {file}, line 33" in out.err
    assert json.loads(record.read_text())["state"] == "fault"
    assert "temperature 0.7" in page.read_text()
    options = ["--skip-bad", "--temperature", "0.7"]
    assert cli.main(["diagnose", str(folder), str(file), *options]) == 0
    assert "Exact" in capsys.readouterr().out
