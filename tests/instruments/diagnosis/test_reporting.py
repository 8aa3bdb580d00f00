"""What is said of the log-probs and draws of models that are known whole, without a forward."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import quick
from recorded import best_of, evidence_of, in_tens
from scipy.special import log_softmax

from tim_jax.instruments.diagnosis import explanations, parts, records, reporting, verdict
from tim_jax.instruments.diagnosis.explanations import decimal_step

COUNT, VOCABULARY = 1000, 64


def logits(kind, rng):
    """f64[N, V] of a model that is sure of nothing, of all, or of some positions more."""
    z = rng.standard_normal((COUNT, VOCABULARY))
    likeliest = np.arange(COUNT), rng.integers(0, VOCABULARY, COUNT)
    if kind == "flat":
        return 0.7 * z
    if kind == "mixed":
        return rng.uniform(0.5, 4.0, COUNT)[:, None] * z
    z *= 2.0
    if kind in ("confident", "sure"):
        z[likeliest] += rng.exponential(5.0, COUNT) + (11 if kind == "sure" else 4)
    return z


def kept(z, how):
    """bool[N, V], what a truncation leaves."""
    chance = np.exp(log_softmax(z, axis=1))
    ranked = np.sort(chance, axis=1)[:, ::-1]
    least = how.get("min_p", 0.0) * ranked[:, :1]
    if "top_k" in how:
        least = ranked[:, how["top_k"] - 1, None]
    if "top_p" in how:
        place = np.argmax(np.cumsum(ranked, axis=1) >= how["top_p"], axis=1)
        least = ranked[np.arange(len(z)), place][:, None]
    return chance >= least


def recorded(kind, seed, how, *, renormalised=True, noise=1e-6, decimals=None):
    """Tokens of an engine whose logits are off by `noise`."""
    rng = np.random.default_rng([seed, COUNT, VOCABULARY])
    z = logits(kind, rng)
    engine = z + noise * rng.standard_normal(z.shape)
    inside = np.where(kept(engine, how), engine, -np.inf)
    ids = np.argmax(inside + rng.gumbel(size=z.shape), axis=1).astype(np.int32)
    at = np.arange(COUNT), ids
    exact, found = (log_softmax(x, axis=1)[at] for x in (z, inside if renormalised else engine))
    found = np.minimum(found if decimals is None else found.round(decimals), 0.0)
    seen = evidence_of(z, ids)._replace(exact=exact.astype(np.float32))
    return in_tens(ids, found.astype(np.float32), seen._replace(raw=seen.exact), VOCABULARY)


def decided(tokens):
    """What is said where no other forward is tried."""
    tried = (*reporting.reporting(tokens), *parts.of_tokens(tokens))
    judged = sorted(verdict._judge_all(tried, tokens), key=lambda one: -one.gain)
    return verdict._decide(tokens, judged, explanations.sizes_of(tokens.gap))


@pytest.mark.parametrize(
    ("seed", "noise", "decimals"),
    quick.some([(0, 1e-6, 1), (1, 0.02, 1), (1, 1e-6, 1), (0, 0.02, 1), (0, 0.02, 2)], 0, 1),
)
@pytest.mark.parametrize("kind", quick.some(["sure", "mixed", "flat", "confident"], 0, 1))
def test_log_probs_of_few_decimals_are_numerics(kind, seed, noise, decimals):
    """Of a model that is sure of most tokens, they are as those of top-p 0.95, renormalised."""
    found = decided(recorded(kind, seed, {}, noise=noise, decimals=decimals))
    step = 10.0**-decimals
    assert (found.state, found.best) == ("numerics", None)
    assert found.tokens.step == step
    record = records.as_record(found, str)
    assert f"rounded to {step:g}" in records.text(record)
    assert record["rounded_to"] == step


def test_a_truncation_that_leaves_drawn_tokens_out_is_not_named():
    """Log-probs on another grid than of decimals, as a softmax in bfloat16 makes."""
    tokens = recorded("sure", 0, {})
    coarse = [replace(r, log_probs=np.round(8 * r.log_probs) / 8) for r in tokens.responses]
    found = decided(replace(tokens, responses=tuple(coarse)))
    nearest = max((x for x in found.judged if x.name == "top_p"), key=lambda one: one.gain)
    assert nearest.gain > 100
    assert nearest.refuted
    assert found.normal
    assert "  top_p\n" not in records.text(records.as_record(found, str)) + "\n"


TRUNCATIONS = [
    ("confident", {"top_p": 0.93}, True, 0.01, 2),
    ("spread", {"top_p": 0.87}, False, 0.01, None),
    ("mixed", {"min_p": 0.05}, True, 0.01, 1),
    ("flat", {"top_k": 20}, True, 1e-6, None),
    ("spread", {"top_p": 0.93}, True, 0.01, None),
    ("confident", {"top_p": 0.87}, True, 1e-6, 1),
    ("flat", {"top_p": 0.97}, True, 0.01, None),
    ("mixed", {"top_p": 0.5}, True, 0.01, 1),
    ("spread", {"min_p": 0.1}, False, 0.01, None),
    ("sure", {"min_p": 0.05}, True, 0.01, None),
]


@pytest.mark.parametrize(
    ("kind", "how", "renormalised", "noise", "decimals"), quick.some(TRUNCATIONS, 0, 1, 2, 3)
)
def test_a_truncation_is_named_with_its_value(kind, how, renormalised, noise, decimals):
    """Also with one between the usual values, which was said to be another kind of truncation."""
    given = {"renormalised": renormalised, "noise": noise, "decimals": decimals}
    found = decided(recorded(kind, 0, how, **given))
    ((name, value),) = how.items()
    best = best_of(found).explanation
    assert best.name == (name if renormalised else f"{name}_ignored")
    assert best.parameters[name] == pytest.approx(value, rel=0.05)
    assert found.state == "fault"
    assert not found.nearest


EVERY = [{"top_p": 0.93}, {"top_p": 0.5}, {"min_p": 0.05}, {"top_k": 20}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "mixed", "sure"])
@pytest.mark.parametrize("how", EVERY, ids=str)
def test_every_truncation_is_named_or_too_small_to_tell(kind, how):
    sizes = (1e-6, None), (1e-6, 1), (0.01, 2)
    for renormalised, (noise, decimals) in itertools.product((True, False), sizes):
        given = {"renormalised": renormalised, "noise": noise, "decimals": decimals}
        found = decided(recorded(kind, 0, how, **given))
        right = "".join(how) + ("" if renormalised else "_ignored")
        likelier = [x for x in found.judged if x.name == right and x.gain > verdict.DECISIVE]
        if found.best is None:
            assert found.normal, given
            assert not any(map(verdict.material, likelier)), given
        else:
            assert found.best.name == right, given


def test_a_step_is_that_of_decimals_in_float32():
    rng = np.random.default_rng(0)
    exact = -rng.exponential(2.0, 500)
    for decimals in (1, 2, 3, 4):
        found = decimal_step(exact.round(decimals).astype(np.float32), exact)
        assert found == pytest.approx(10.0**-decimals)
    assert decimal_step(exact.astype(np.float32), exact) == 0
    assert decimal_step(np.asarray([np.nan, -0.1, -0.3, 0.0], np.float32), exact[:4]) == 0.1
    # Whole numbers alone: of tokens that are nearly certain, or sentinels.
    for recorded, truth, step in (
        ([0.0, 0.0], [-0.02, -0.01], 0.1),
        ([0.0, 0.0], [-0.002, -0.0], 0.01),
        ([0.0, -9999.0], [-0.02, -0.5], 0.0),
        ([-1.0, -1.0], [-0.9, -1.2], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
    ):
        assert decimal_step(np.asarray(recorded), np.asarray(truth)) == step


@pytest.mark.parametrize("seed", quick.some([0, 1, 2], 0))
def test_ten_tokens_of_zeros_are_no_temperature(seed):
    """All are nearly certain, and rounded to 0; which a temperature near 0 makes as well."""
    few = recorded("sure", seed, {}, decimals=1)
    likely = np.flatnonzero([r.log_probs.max() == r.log_probs.min() == 0 for r in few.responses])
    some = few.take(likely[:1].tolist())
    found = decided(replace(some, known_step=None))
    assert found.normal
    assert found.best is None
