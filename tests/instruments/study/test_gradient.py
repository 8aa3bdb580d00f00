"""Measurements at fixed weights: the gradients are the learner's, and what is done stays done."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from tim_jax import mismatch
from tim_jax.app.config import toml
from tim_jax.app.run import folders, sources
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.instruments.study import definition, gradient, measurement
from tim_jax.instruments.study.definition import GradientStudy
from tim_jax.instruments.study.gradient import (
    BYPASS,
    RECOMPUTE,
    Measuring,
    bound_constants,
    project,
)
from tim_jax.instruments.study.measurement import Trained
from tim_jax.model import adapters, fitting
from tim_jax.model.execution import Execution
from tim_jax.numerics import NATIVE_F32
from tim_jax.policy import scoring
from tim_jax.rl import drawing, programs
from tim_jax.tasks.base import Grade

INT4 = {"name": "quantised_weights", "dtype": "int4"}
REPORT = {"name": "log_prob_noise", "std": 0.3}
STUDY = {
    "kind": "gradient",
    "base": "run.toml",
    "hypothesis": "a bias",
    "batches": 4,
    "states": 3,
    "source": {"int4": {"mismatch": [INT4]}, "report": {"mismatch": [REPORT]}},
    "remedy": {"tis": {"corrections": [{"name": "token_tis"}]}},
}
CHANGES = ("learner.objective={preset = 'rloo', loss = 'clip'}", "eval.every=0")


def odd(examples, completions):
    """A reward that random weights get now and then."""
    return [Grade(float(len(text) % 2)) for _, text in zip(examples, completions, strict=True)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A policy with random weights. Samplers are traced once; nothing is measured here."""
    folder = tmp_path_factory.mktemp("policy")
    path = folder / "run.toml"
    path.write_text(tiny.RUN)
    make = sources.make_task
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "make_task", lambda config: replace(make(config), grade=odd))
        patch.setattr(fitting, "calibrate", lambda config, numerics, **_: numerics)
        patch.setattr(programs, "sampling_program", cache(programs.sampling_program))
        config = toml.load(path, [*CHANGES, f"run.folder={folder / 'run'}"])
        model = sources.make_model(config)
        yield Trained(config, model, jax.tree.map(jnp.asarray, model.params))


@pytest.fixture(scope="module")
def measuring(policy):
    """The programs of the study below, for all tests of it."""
    return Measuring(measurement._bench(study(), policy, policy.config))


@pytest.fixture(scope="module")
def exact(measuring):
    """The batches of the exact sampler."""
    return measuring.batches(mismatch.EXACT)


def study(**changes):
    return toml.validated(GradientStudy, STUDY | changes, source="study")


def reference(measuring, number):
    """The gradient of mean_i A_i log pi(y_i) in one batch of the exact sampler, by its formula."""
    bench, rollout = measuring.bench, measuring.rollouts(mismatch.EXACT, number)
    graded, _ = drawing.graded(bench.task, bench.text, bench.examples, rollout, bench.group)
    rewards = np.array([one.reward for one in graded]).reshape(-1, bench.group)
    others = (rewards.sum(1, keepdims=True) - rewards) / (bench.group - 1)
    advantages = jnp.asarray((rewards - others).reshape(-1, 1), jnp.float32)

    def objective(params):
        weights = bench.execution.prepare(params)
        log_probs = scoring.score(weights, rollout, execution=bench.execution).log_probs
        kept = jnp.where(rollout.mask, advantages * log_probs, 0.0)
        return jnp.sum(kept) / log_probs.shape[0]

    leaves = jax.tree.leaves(jax.jit(jax.grad(objective))(bench.params))
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in leaves])


@pytest.mark.slow
def test_gradients_are_those_of_the_objective_and_records_are_kept(
    policy, measuring, exact, tmp_path, monkeypatch
):
    """Also: reported noise changes no gradient without a ratio, and the same lines come again."""
    monkeypatch.setattr(measurement, "Measuring", lambda bench: measuring)
    one = study()
    found = exact.gradients[RECOMPUTE]
    np.testing.assert_array_equal(found, exact.gradients[BYPASS])
    np.testing.assert_array_equal(found, exact.gradients["tis"])
    np.testing.assert_allclose(found[1], reference(measuring, 2), rtol=1e-4, atol=1e-4)
    parts = exact.signs["positive"] + exact.signs["negative"]
    np.testing.assert_allclose(parts, found, rtol=1e-5, atol=1e-4)
    assert set(exact.metrics["unequal_tokens"]) == {0.0}

    configs = measurement.horizons(one, policy.config.model_dump(exclude_none=True))
    records = {r["source"]: r for r in measurement.measure(one, policy, configs, tmp_path)}
    report = records["report"]["estimators"]
    assert report[RECOMPUTE]["bias"] == [0.0, 0.0]
    assert report[BYPASS]["bias"][0] != 0.0
    assert report["tis"]["bias"][0] != 0.0
    assert records["int4"]["estimators"][RECOMPUTE]["bias"][0] != 0.0
    assert records["int4"]["metrics"]["recompute/k3"] == [0.0, 0.0]
    assert records["int4"]["metrics"]["bypass/k3"][0] > 0.0

    path = tmp_path / "measured.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + 9])
    again = list(measurement.measure(one, policy, configs, tmp_path))
    assert [r["source"] for r in again] == ["report"]
    assert path.read_bytes() == whole
    assert not list(measurement.measure(one, policy, configs, tmp_path))


def test_a_bias_without_an_error_is_seen():
    """As that of a sampler that is never rewarded."""
    assert measurement.Estimate(1.0, 0.0).seen
    assert not measurement.Estimate(0.0, 0.0).seen
    assert not measurement.Estimate(1.0, 0.6).seen
    assert not measurement.Estimate(float("nan"), float("nan")).seen


@pytest.mark.slow
def test_a_projection_keeps_inner_products():
    """Exactly where there is a number for each, else in the mean, as far off as is said."""
    one, other = np.random.default_rng(0).standard_normal((2, 3000)).astype(np.float32)
    whole = [np.asarray(project(jnp.asarray(x), 3000), np.float64) for x in (one, other)]
    np.testing.assert_allclose(np.dot(*whole), np.dot(one, other), rtol=1e-5)
    np.testing.assert_allclose(np.dot(whole[0], whole[0]), np.dot(one, one), rtol=1e-5)

    vectors = np.random.default_rng(1).standard_normal((40, 3000)).astype(np.float32)
    fewer = jax.jit(partial(project, size=200))
    few = np.stack([fewer(x) for x in vectors]).astype(np.float64)
    off = (few @ few.T - vectors @ vectors.T) / 3000  # in |a| |b|, about
    assert few.shape == (40, 200)
    assert 0.5 < off[~np.eye(40, dtype=bool)].std() / (1 / 200) ** 0.5 < 1.5
    assert abs(off.mean()) < 0.01


@pytest.mark.slow
def test_a_projected_gradient_in_small_batches_is_that_of_the_whole(policy, exact, tmp_path):
    """And its batches are read back as they were kept."""
    section = policy.config.learner.model_copy(update={"micro_batch": 2, "remat": True})
    config = policy.config.model_copy(update={"learner": section})
    size = sum(leaf.size for leaf in jax.tree.leaves(policy.params))
    bench = measurement._bench(study(projected=size), policy, config)
    assert bench.learnings["tis"].micro_batch == 2
    assert bench.learnings["tis"].remat
    expected = exact.gradients["tis"]
    measuring = Measuring(bench)
    kept = measuring.batches(mismatch.EXACT, ("tis",), kept=tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = measuring.batches(mismatch.EXACT, ("tis",), kept=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again._asdict(), kept._asdict())
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    found = kept.gradients["tis"]
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=1e-3, atol=1e-4)


def test_a_batch_that_cannot_be_kept_is_one_line(tmp_path):
    (tmp_path / "batches").touch()
    with pytest.raises(InputError, match=r"cannot write .*batches/1\.npz: File exists"):
        gradient._write(tmp_path / "batches" / "1.npz", ({"tis": np.ones(2)},))


def test_a_source_that_the_model_cannot_have_is_refused_before_training(policy):
    ranks = [{"name": "tensor_parallel", "ranks": 3, "exchange": "compute"}]
    one = study(source={"ranks": {"mismatch": ranks}})
    configs = measurement.horizons(one, policy.config.model_dump(exclude_none=True))
    with pytest.raises(InputError, match="ranks = 3 must divide the model's num_heads"):
        measurement.check(one, configs)


@pytest.mark.parametrize("change", [{"steps": 5}, {"model": {"preset": "small"}}], ids=str)
def test_a_horizon_changes_nothing_that_trains_the_policy(policy, change):
    one = study(name="one", horizon={"early": change})
    with pytest.raises(InputError, match=r"one: horizon\.early\.(steps|model\.preset): all horizo"):
        measurement.horizons(one, policy.config.model_dump(exclude_none=True))


def test_two_measurements_in_one_folder_are_refused(policy, tmp_path):
    held = folders.Lock(tmp_path)
    with pytest.raises(InputError, match=f"{tmp_path} is in use by process"):
        next(measurement.measure(study(), policy, {}, tmp_path))
    held.release()
    assert list(measurement.measure(study(), policy, {}, tmp_path)) == []


def checked(policy, changes, **of_study):
    """What is done before a policy is trained, of a study whose base has these changes."""
    run = definition.merged(policy.config.model_dump(exclude_none=True), {"learner": changes})
    one = study(name="one", **of_study)
    measurement.check(one, measurement.horizons(one, run))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"refills": 2}, "one: learner.refills = 2: a measurement draws every batch once; set it"),
        ({"routing": "replayed"}, "one: learner.routing = 'replayed': a measurement records no"),
        ({"routing": "compared"}, 'records no experts; set it to "own"'),
        ({"mini_batches": 2}, "one: learner.mini_batches = 2: a measurement takes the"),
        (
            {"epochs": 2},
            "gradient of a step's one update; set it to 1",
        ),
        ({"prompts_per_step": 10**6}, "needs as many different prompts, and the task has"),
    ],
)
def test_what_a_measurement_would_not_heed_is_refused(policy, changes, words):
    with pytest.raises(InputError) as error:
        checked(policy, changes)
    assert words in f"{error.value}"


def test_a_base_with_mismatch_is_refused(policy):
    noise = {"sampler": {"mismatch": [{"name": "logit_noise", "std": 0.1}]}, "exact": "report"}
    run = definition.merged(policy.config.model_dump(exclude_none=True), noise)
    one = study(name="one")
    with pytest.raises(InputError, match=r"trains its policy in an exact run, and has its sources"):
        measurement.check(one, measurement.horizons(one, run))


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"preset": "grpo", "kl_coefficient": 0.04}, "kl_coefficient = 0.04: a measurement has no"),
        ({"reward_kl_coefficient": 0.1}, "reward_kl_coefficient = 0.1: a measurement has no ref"),
        ({"estimator": "remax"}, "estimator = 'remax': a measurement has neither greedy responses"),
        (
            {"estimator": "off_policy_baseline"},
            "nor sizes of scores, and this needs one of them; take another",
        ),
        ({"loss": "kl_cov"}, "loss = 'kl_cov': a measurement has no updates, of which this loss"),
    ],
)
def test_a_base_that_cannot_be_measured_is_refused_before_training(policy, objective, words):
    with pytest.raises(InputError) as error:
        checked(policy, {"objective": objective})
    assert f"{error.value}".startswith("one: learner.objective.")
    assert words in f"{error.value}"


def test_the_default_objective_is_refused_by_the_key_that_mends_it(policy):
    base = toml.load(None, ["eval.every=0"])
    with pytest.raises(InputError, match=r"one: learner.objective.kl_coefficient = 0.04: .* to 0"):
        measurement.check(study(name="one"), {"all": base})


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["token_tis", "token_tis"], "it would count twice"),
        (["dppo"], "reads the policy of each update"),
    ],
)
def test_a_remedy_that_cannot_be_measured_is_refused_before_training(policy, entries, words):
    remedy = {"bad": {"corrections": [{"name": name} for name in entries]}}
    with pytest.raises(InputError) as error:
        checked(policy, {}, remedy=remedy)
    assert f"{error.value}".startswith("remedy 'bad': ")
    assert words in f"{error.value}"


def test_a_policy_of_a_mesh_is_measured_on_one_device(policy):
    meshed = policy.config.placement.__class__(fsdp=2, tensor=2)
    config = policy.config.model_copy(update={"placement": meshed})
    measurement.check(study(), {"all": config})
    bench = measurement._bench(study(), policy, config)
    assert bench.execution.placement.single
    assert bench.execution.numerics.column_tiles == 2
    Measuring(bench)  # it is laid out for the devices that it takes


@pytest.mark.slow
def test_the_constants_of_the_theorem(measuring, monkeypatch):
    found = bound_constants(measuring, mismatch.build([INT4]), states=3)
    assert 0.0 < found["variation_mean"] <= found["variation_largest"] < 1.0
    expected = 2.0 * found["score_norm"] * found["variation_largest"] * found["longest"] ** 2
    assert found["bound"] == pytest.approx(expected)
    # The norms are of the exact sampler's states, whatever it is compared with.
    norms = np.array([found["score_norm"]])
    monkeypatch.setattr(gradient, "score_norms", lambda *_, **__: norms)
    assert "bound" not in bound_constants(measuring, mismatch.build([REPORT]), states=3)
    same = bound_constants(measuring, mismatch.EXACT, states=3)
    assert same["variation_largest"] == same["bound"] == 0.0


def one_response():
    tokens = np.random.default_rng(0).integers(0, tiny.CONFIG.vocab_size, (2, 1, 6))
    prompts, responses = jnp.asarray(tokens, jnp.int32)
    lengths = jnp.full(1, 6, jnp.int32)
    ended = jnp.ones(1, bool)
    return Rollout(prompts, lengths, responses, lengths, jnp.zeros((1, 6)), ended)


def test_the_score_of_adapters_is_by_these_alone():
    """Also of those that change nothing yet, whose second factor is 0."""
    lora = adapters.Lora(rank=2, alpha=4.0, targets=("o_proj",))
    config = replace(tiny.CONFIG, num_layers=1)
    plain = Execution(config, NATIVE_F32, tiny.SAMPLING)
    execution = replace(plain, lora=lora)
    base, own = tiny.params(config), adapters.init(config, lora, 0)
    params, rollout = adapters.whole(own, base), one_response()
    weights = jax.jit(execution.prepare)(params)
    (found,) = gradient.score_norms(weights, params, rollout, execution, states=1)

    def log_prob(own):  # of the first state
        change = lora.scale * own["o_proj"]["a"] @ own["o_proj"]["b"]
        layers = base["layers"] | {"o": base["layers"]["o"] + change}
        merged = plain.prepare(base | {"layers": layers})
        return scoring.score(merged, rollout, execution=plain).log_probs[0, 0]

    leaves = jax.tree.leaves(jax.jit(jax.grad(log_prob))(own))
    expected = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in leaves))
    assert expected > 0
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": {"exact": {"mismatch": []}}}, "kept for the exact sampler"),
        ({"source": {"a": {"mismatch": [{"name": "int4"}]}}}, "mismatch 'int4' is unknown"),
        ({"remedy": {"a": {"corrections": [{"name": "tis"}]}}}, "remedy.a.corrections: "),
        ({"batches": 3}, "batches = 3: must be 4 or more"),
        ({"sources": {}}, "did you mean 'source'"),
    ],
)
def test_bad_studies_are_refused(change, message):
    with pytest.raises(InputError) as error:
        study(**change)
    assert message in f"{error.value}"
    assert "\n" not in f"{error.value}"
