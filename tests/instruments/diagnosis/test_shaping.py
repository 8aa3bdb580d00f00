"""Penalties, biases and masks that a request asks for are in the log-probs, or it is said."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from recorded import LIMITS, STOPS, best_of, diagnosed, forward, logits_of, sampled

from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.instruments.diagnosis import declared, evidence, readers
from tim_jax.instruments.diagnosis.declared import Distribution, Shaping
from tim_jax.instruments.diagnosis.rollouts import collect

VOCABULARY = tiny.CONFIG.vocab_size
OPTIONS = {
    "repetition": {"repetition_penalty": 1.7},
    "presence and frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {"4": 3.0, "7": -5.0}},
    "min-p": {"min_p": 0.03},
    "min-tokens": {"min_tokens": 4},
    "min-tokens and end tokens of the request": {"min_tokens": 4, "stop_token_ids": [9, 11]},
}
WARM = {"temperature": 0.7, "repetition_penalty": 1.3, "min_p": 0.01, "top_k": 9}


@cache
def logits():
    return logits_of(sampled())


def reference(z, row, place, options):
    """Log-probs f64[V] of one place, step by step as the options are documented."""
    prompt, before = row["prompt_token_ids"], row["response_token_ids"][:place]
    own = row["response_token_ids"][place]
    z = z.copy()
    for token, value in options.get("logit_bias", {}).items():
        z[int(token)] += value
    penalty = options.get("repetition_penalty", 1.0)
    for token in {*prompt, *before}:
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
    for token in set(before):
        z[token] -= options.get("frequency_penalty", 0.0) * before.count(token)
        z[token] -= options.get("presence_penalty", 0.0)
    keep = np.ones(len(z), bool)
    if place < options.get("min_tokens", 0):
        keep[[*STOPS, *options.get("stop_token_ids", ())]] = False
    keep[own] = True
    temperature = options.get("temperature", 1.0)
    z = np.where(keep, z / temperature, -np.inf)
    chance = np.exp(z - z.max())
    keep &= (chance >= options.get("min_p", 0.0)) | (np.arange(len(z)) == own)
    z = np.where(keep, z, -np.inf)
    if "top_k" in options:
        least = np.sort(z)[-options["top_k"]]
        z = np.where((z >= least) | (np.arange(len(z)) == own), z, -np.inf)
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


def rows(asked, recorded):
    """Rows of `sampled` that declare options in turn, and are recorded under others or the same."""
    found = []
    for i, (row, z) in enumerate(zip(sampled(), logits(), strict=True)):
        ids, options = row["response_token_ids"], recorded[i % len(recorded)]
        log_probs = [float(reference(z[t], row, t, options)[token]) for t, token in enumerate(ids)]
        said = asked[i % len(asked)] | {"logprobs": np.minimum(log_probs, 0.0).tolist()}
        found.append(row | said)
    return found


@pytest.mark.parametrize("asked", [[*OPTIONS.values()], [WARM]], ids=["in turn", "warm"])
def test_log_probs_under_options_are_those_of_their_definition(asked):
    responses = collect(readers.read(rows(asked, asked)), limits=LIMITS).responses
    found = np.split(
        evidence.log_probs(forward(), responses), np.cumsum([len(r) for r in responses])[:-1]
    )
    apart = dict.fromkeys(range(len(asked)), 0.0)
    for i, (response, exact, row) in enumerate(zip(responses, found, sampled(), strict=True)):
        np.testing.assert_allclose(exact, response.log_probs, atol=2e-5)
        own = np.abs(exact - row["logprobs"]).max()
        apart[i % len(asked)] = max(apart[i % len(asked)], own)
    assert min(apart.values()) > 0.01  # each option changes something


def test_tokens_that_are_not_allowed_have_no_share():
    allowed = tuple(range(4, VOCABULARY))
    shapes = declared.shape_arrays([Distribution(shaping=Shaping(allowed=allowed))], 2, VOCABULARY)
    ids, lengths = jnp.full((2, 6), 4, jnp.int32), jnp.full((2,), 6, jnp.int32)
    log_probs, finished = jnp.zeros((2, 6)), jnp.ones((2,), bool)
    rollout = Rollout(ids, lengths, ids, lengths, log_probs, finished)
    z = jnp.asarray(np.random.default_rng(0).normal(size=(3, VOCABULARY)), jnp.float32)

    @jax.jit
    def shaped(z, tokens, places):
        how = {"rollout": rollout, "shapes": shapes, "stop_tokens": STOPS}
        return declared.shape_logits(z, tokens, places, **how)

    found = np.asarray(shaped(z, jnp.asarray([5, 6, 7]), jnp.asarray([0, 1, 6])))
    np.testing.assert_array_equal(found[:, 4:], np.asarray(z)[:, 4:])
    assert (found[:, :4] < -9e4).all()


def test_a_bias_of_minus_infinity_leaves_a_token_out():
    said = declared.read(
        {"logit_bias": {"3": -math.inf, "4": 1.0}}, default=Distribution(), vocabulary=VOCABULARY
    )
    assert said.shaping.bias == ((3, declared.LEFT_OUT), (4, 1.0))
    row = {"prompt_token_ids": [1], "response_token_ids": [4, 3], "logprobs": [-1.0, -1.0]}
    for bias, message in (
        (-math.inf, r"response_token_ids\[1\] = 3 was drawn, but logit_bias leaves it out"),
        (math.inf, "logit_bias must map ids of the model's 23 tokens to numbers"),
    ):
        with pytest.raises(InputError, match=message):
            collect(readers.read([row | {"logit_bias": {"3": bias}}]), limits=LIMITS)
    # The output of a tool was not drawn.
    for asked in ({"logit_bias": {"3": -math.inf}}, {"allowed_token_ids": [4]}):
        hidden = [row | asked | {"mask": [1, 0]}]
        assert len(collect(readers.read(hidden), limits=LIMITS).responses) == 1


def test_log_probs_before_and_after_a_penalty_are_told_apart():
    asked = {"repetition_penalty": 1.7}
    found = diagnosed(rows([asked], [asked]))
    assert found.state == "numerics"
    assert found.sizes["largest"] < 1e-4
    raw = rows([asked], [{}])
    named = best_of(diagnosed(raw)).explanation.name
    assert named in ("raw_log_probs", "shaping_ignored")
    declared = diagnosed(raw, default=Distribution(raw=True))
    assert declared.sizes["largest"] < 1e-4
    # Drawn without the penalty, as these are: which only the draws can tell.
    assert declared.best is None or declared.best.explanation.name == "shaping_ignored"


@pytest.mark.slow
def test_processed_log_probs_that_are_said_to_be_raw_are_named():
    found = diagnosed(
        rows([{"temperature": 0.7}], [{"temperature": 0.7}]), default=Distribution(raw=True)
    )
    assert best_of(found).explanation.name == "processed_log_probs"
    assert best_of(found).share > 0.99


def test_what_is_assumed_is_said_with_its_option():
    collected = collect(readers.read(sampled()), limits=LIMITS)
    line = collected.assumed(Distribution())
    assert line == (
        "Assumed, where rows do not say it: temperature 1 (--temperature), top-k off (--top-k),"
        " top-p off (--top-p), processed log-probs (--log-probs)"
    )
    known = {"temperature": 0.7, "top_k": -1, "top_p": 1.0, "logprobs_mode": "raw_logprobs"}
    some = [*sampled()[:2], *(row | known for row in sampled()[2:])]
    collected = collect(readers.read(some), limits=LIMITS)
    line = collected.assumed(Distribution(0.5, 20, 0.9, raw=True))
    assert "temperature 0.5 in 2 rows (--temperature), top-k 20 in 2 rows" in line
    assert "raw log-probs in 2 rows (--log-probs)" in line
    assert not collect(readers.read(some[2:]), limits=LIMITS).assumed(Distribution())
