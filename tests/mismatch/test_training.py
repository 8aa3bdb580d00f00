"""A divergent sampler in a run: what it samples with, what is measured, what is refused."""

import tomllib
from dataclasses import replace
from types import SimpleNamespace

import dials
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from tim_jax import mismatch, objectives, optimizers
from tim_jax.app.config import toml
from tim_jax.app.run import assembly
from tim_jax.common.errors import InputError
from tim_jax.rl import loop, programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

LEARNING = Learning(objectives.rloo(), tiny.GROUP)


# --- stale weights --------------------------------------------------------------------------------


@pytest.mark.parametrize(("stale", "per_step"), [(0, 1), (1, 1), (3, 1), (2, 2), (3, 2)])
def test_the_sampler_has_the_weights_of_that_many_updates_ago(stale, per_step):
    dial = mismatch.build([{"name": "stale_weights", "updates": stale}])
    built = build(mismatch=dial, mini_batches=per_step)
    older = loop.first_history(jnp.int32(0), built, ())
    weights = 0
    for _ in range(5):
        expected = max(0, weights - stale)
        assert int(older[0] if older else weights) == expected
        for _ in range(per_step):
            loop.remember(older, jnp.int32(weights))
            weights += 1
    assert len(older) == stale
    # a resumed loop goes on from there
    again = loop.first_history(jnp.int32(weights), built, list(older))
    assert [int(w) for w in again] == [int(w) for w in older]


@pytest.fixture(scope="module")
def moved():
    """The learner's weights some updates later."""
    return jax.jit(dials.EXECUTION.prepare)(tiny.moved(tiny.params(dials.CONFIG)))


def compared(tables, weights, trainer=None):
    dial = mismatch.build(tables)
    score = tiny.policy(dials.EXECUTION, LEARNING).score
    compare = jax.jit(programs.comparison(score, dial, aged=dial.stale_updates > 0))
    rollout = dials.rollout(dial)  # by the older weights
    metrics, _ = compare(weights, dials.weights(), rollout, trainer)
    return {k: float(v) for k, v in metrics.items()}


@pytest.mark.slow
def test_drift_is_told_apart_from_mismatch(moved):
    found = compared([{"name": "stale_weights", "updates": 1}], moved)
    assert found["numerical/log_ratio_abs_max"] == 0
    assert found["drift/log_ratio_abs_mean"] == found["mismatch/log_ratio_abs_mean"] > 0.01
    assert found["mismatch/tokens"] > 20


def test_errors_of_reporting_are_told_apart():
    """By a learner that computes what the sampler drew with, as `test_dial.py` shows of it."""
    tables = [{"name": "ignored_truncation"}]
    drawn = dials.rollout(mismatch.build(tables)).drawn_log_probs
    found = compared(tables, dials.weights(), trainer=drawn)
    assert found["reporting/log_ratio_abs_mean"] == found["mismatch/log_ratio_abs_mean"] > 0
    assert not any(name.startswith("drift") for name in found)


# --- the loop and its programs ----------------------------------------------------------------


OPTIMIZER = optimizers.adamw(optimizers.Rate(1e-2))


def build(**options):
    return programs.build(Training(dials.EXECUTION, LEARNING, OPTIMIZER).varied(**options))


def test_an_exact_run_has_no_more_programs():
    assert build().compare is None
    assert build(mismatch=mismatch.build([{"name": "logit_noise"}])).compare is None
    assert build(mismatch=dials.standard("logits")).compare is not None


@pytest.mark.slow
def test_a_step_reports_the_mismatch():
    dial = dials.dial({"name": "log_prob_noise", "std": 0.1}, {"name": "pad_mask", "pad": 3})
    built = build(mismatch=dial, length_buckets=2)
    state = built.init(jax.tree.map(jnp.array, tiny.params(dials.CONFIG)))
    weights = built.prepare(state.params)
    rollout = built.sample(weights, tiny.prompts(), jax.random.key(0))
    kept, shown = int(rollout.mask.sum()), np.asarray(rollout.mask)
    assert 20 < kept < int(rollout.lengths.sum())
    assert not (np.asarray(rollout.responses)[shown] == 3).any()
    _, _, found, metrics = loop.learn(state, weights, rollout, tiny.rewards(), programs=built)
    assert int(found.compared) == kept
    assert int(found.unequal) > 0.9 * kept
    assert 0.05 < metrics["mismatch/log_ratio_abs_mean"] < 0.12
    assert metrics["mismatch/tokens"] == kept
    np.testing.assert_allclose(
        metrics["reporting/log_ratio_abs_mean"], metrics["mismatch/log_ratio_abs_mean"], rtol=1e-6
    )


# --- configuration ------------------------------------------------------------------------------

NOISE = {"name": "logit_noise", "std": 0.1}


def test_a_dial_in_a_config_and_back():
    data = {"exact": "report", "sampler": {"mismatch": [{"name": "kv_cache", "dtype": "int8"}]}}
    config = toml.build(data)
    assert config.sampler.dial.entries == (dials.entry("kv_cache", dtype="int8"),)
    assert toml.build(tomllib.loads(toml.dump(config))) == config
    assert "sampler" not in config.may_change()


def test_overrides_name_the_dial_too():
    text = 'sampler.mismatch=[{name = "logit_noise", std = 0.1}]'
    config = toml.load(None, ["exact=report", text])
    assert config.sampler.dial.entries == (dials.entry(**NOISE),)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"sampler": {"mismatch": [NOISE]}}, ["exact", "'logit_noise'", 'set "report"']),
        (
            {"exact": "report", "sampler": {"mismatch": [NOISE, {"name": "logit_noize"}]}},
            ["sampler.mismatch[1]", "did you mean 'logit_noise'"],
        ),
        ({"exact": "report", "sampler": {"mismatsch": []}}, ["sampler.mismatsch", "unknown key"]),
    ],
)
def test_a_bad_dial_is_refused(data, words):
    with pytest.raises(InputError) as error:
        toml.build(data)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_dial_of_strength_0_may_be_exact():
    config = toml.build({"sampler": {"mismatch": [{"name": "logit_noise", "std": 0.0}]}})
    assert config.exact == "required"
    assert config.sampler.dial.entries != ()
    assert config.sampler.dial.active == ()


def test_a_dial_that_the_model_cannot_have_is_refused_before_compiling():
    data = {"exact": "report", "sampler": {"mismatch": [{"name": "pad_mask", "pad": 4000}]}}
    config = toml.build(data)
    model = SimpleNamespace(config=dials.CONFIG)
    execution = replace(dials.EXECUTION, config=model.config)
    with tiny.compilations() as counted, pytest.raises(InputError, match="pad = 4000"):
        programs.build(assembly.make_training(config, execution))
    assert not counted
