"""The experts of a mixture: recorded by the sampler, compared with the learner's, and replayed."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from tim_jax import metrics, mismatch, objectives, optimizers
from tim_jax.app.config import toml
from tim_jax.common.errors import InputError
from tim_jax.common.types import Prompts
from tim_jax.kernels.experts import balance as balance_loss
from tim_jax.kernels.experts import choice
from tim_jax.model.execution import Batching, Execution
from tim_jax.numerics import EXACT_F32
from tim_jax.placement import SINGLE, Placement
from tim_jax.policy import scoring
from tim_jax.rl import loop, programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning, cut_rollout

CONFIG = tiny.MIXTURE
EXECUTION = Execution(CONFIG, tiny.NUMERICS, tiny.SAMPLING, routing="compared")
SHAPE = CONFIG.num_layers, CONFIG.num_experts_per_tok


def drawn(execution=EXECUTION, **batching):
    return jax.device_get(tiny.rollout(execution, **batching))


def scored(rollout, routing="compared", execution=EXECUTION):
    execution = replace(execution, routing=routing)
    score = jax.jit(lambda w, r: scoring.score(w, r, execution=execution))
    return jax.device_get(score(tiny.weights(EXECUTION), jax.tree.map(jnp.asarray, rollout)))


def used(rollout):
    """bool[B, T], the positions whose experts the sampler knows: all but the last token's."""
    at = np.arange(rollout.routes.shape[1])[None, :]
    return at < (rollout.prompt_lengths + rollout.lengths - 1)[:, None]


def same_bits(one, other):
    return np.array_equal(np.asarray(one).view(np.int32), np.asarray(other).view(np.int32))


@pytest.mark.slow
def test_what_is_recorded_are_the_learners_own_choices():
    rollout = drawn()
    width = rollout.prompts.shape[1] + rollout.responses.shape[1]
    assert rollout.routes.dtype == np.uint8
    assert rollout.routes.shape == (tiny.ROWS, width, *SHAPE)
    found = scored(rollout)
    assert rollout.mask.sum() > 50
    assert (found.agreement[rollout.mask] == 1).all()
    assert same_bits(found.log_probs[rollout.mask], rollout.log_probs[rollout.mask])
    other = replace(rollout, routes=(rollout.routes + 1) % CONFIG.num_experts)
    wrong = scored(other).agreement[rollout.mask]
    assert 0.1 < wrong.mean() < 0.9


def test_recording_changes_no_token_and_no_bit():
    plain, recording = drawn(replace(EXECUTION, routing="own")), drawn()
    assert plain.routes is None
    np.testing.assert_array_equal(plain.responses, recording.responses)
    assert same_bits(plain.log_probs, recording.log_probs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "batching", [Batching(3, 1), Batching(4, 0, 12)], ids=["slots, halved once", "pages"]
)
def test_experts_are_recorded_alike_whatever_the_slots(batching):
    rollout, other = drawn(), drawn(EXECUTION, batching=batching)
    inside = used(rollout)
    np.testing.assert_array_equal(rollout.routes[inside], other.routes[inside])


def test_replay_of_exact_choices_changes_no_bit():
    rollout = drawn()
    found = scored(rollout, "replayed")
    assert same_bits(found.log_probs[rollout.mask], rollout.log_probs[rollout.mask])
    assert (found.agreement[rollout.mask] == 1).all()


def test_replay_takes_the_experts_that_are_given():
    """Those of another model: the log-probs are others, and go with the experts alone."""
    rollout = drawn()
    turned = replace(rollout, routes=(rollout.routes + 2) % CONFIG.num_experts)
    found = scored(turned, "replayed")
    own = scored(rollout)
    assert np.abs(found.log_probs - own.log_probs)[rollout.mask].max() > 1e-3
    # What is compared is what the routers would choose, on inputs that the given experts made.
    assert found.agreement[rollout.mask].mean() < 0.9


def test_given_experts_have_their_own_weights():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((40, 7)).astype(np.float32)
    given = np.stack([rng.permutation(7)[:3] for _ in range(40)]).astype(np.int32)
    for normalised in (True, False):
        found = choice(
            jnp.asarray(logits), count=3, normalised=normalised, numerics=EXACT_F32,
            given=jnp.asarray(given),
        )  # fmt: skip
        scores = np.exp(logits.astype(np.float64))
        chosen = np.take_along_axis(scores, given, axis=1)
        whole = (chosen if normalised else scores).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found.weights, chosen / whole, rtol=1e-6)
        np.testing.assert_array_equal(found.experts, given)
        np.testing.assert_array_equal(found.own, np.argsort(-logits, axis=1)[:, :3])


def test_metrics_of_routing_against_numpy():
    rng = np.random.default_rng(1)
    routes = np.stack([rng.permutation(7)[:3] for _ in range(6 * 9 * 2)]).reshape(6, 9, 2, 3)
    routes[..., 0] = np.where(routes[..., 0] == 5, 0, routes[..., 0])
    inside, mask = rng.random((6, 9)) < 0.7, rng.random((6, 4)) < 0.5
    agreement, entropy = rng.random((2, 6, 4), np.float32)
    counted = metrics.expert_loads(
        jnp.asarray(routes.astype(np.uint8)), jnp.asarray(inside), experts=7
    )
    found = metrics.routing_metrics(*map(jnp.asarray, (agreement, entropy, mask)), loads=counted)
    loads = np.stack([np.bincount(routes[inside][:, i].reshape(-1), minlength=7) for i in (0, 1)])
    np.testing.assert_array_equal(counted, loads)
    assert float(found["load_max"]) == pytest.approx(loads.max() / (loads.sum() / 14), rel=1e-6)
    assert float(found["idle_share"]) == (loads == 0).mean()
    assert float(found["agreement"]) == pytest.approx(agreement[mask].mean(), rel=1e-6)
    assert float(found["entropy"]) == pytest.approx(entropy[mask].mean(), rel=1e-6)


def prompts_of(count):
    """Prompts of 1 to 6 tokens, the same ones again under other names."""
    few = tiny.prompts(count=4)
    times = count // 4
    return Prompts(
        tokens=jnp.tile(few.tokens, (times, 1)),
        lengths=jnp.tile(few.lengths, times),
        ids=jnp.arange(count, dtype=jnp.int32),
    )


def step_of(routing, dial=mismatch.EXACT, where=SINGLE, balance=0.0, count=4, **options):
    """(state, exactness, metrics) of a step that learns from the sampler's rollouts."""
    objective = objectives.rloo(balance_coefficient=balance)
    learning = Learning(objective, tiny.GROUP, routing=routing, **options)
    plain = replace(EXECUTION, routing="own", placement=where)
    run = programs.build(
        Training(
            plain, learning, optimizers.adamw(optimizers.Rate(1e-3)), prompts_per_step=count
        ).varied(mismatch=dial, length_buckets=2)
    )
    state = run.init(jax.tree.map(jnp.copy, tiny.params(CONFIG)))
    weights = run.prepare(state.params)
    published = run.publish(state.params, weights)
    rollout = run.sample(published, prompts_of(count), jax.random.key(0))
    rewards = tiny.rewards(rows=count * tiny.GROUP)
    state, _, exactness, found = loop.learn(state, weights, rollout, rewards, programs=run)
    return state, exactness, found


@pytest.mark.slow
def test_a_step_of_exact_numerics_is_the_same_whatever_the_routing():
    states, reports = [], []
    for routing in ("own", "compared", "replayed"):
        state, exactness, found = step_of(routing, micro_batch_tokens=64)
        assert int(exactness.unequal) == 0 < int(exactness.compared)
        states.append(state.params)
        reports.append(found)
    for other in states[1:]:
        for one, two in zip(*map(jax.tree.leaves, (states[0], other)), strict=True):
            np.testing.assert_allclose(one, two, atol=1e-6)
    assert not any("routing/" in name for name in reports[0])
    for report in reports[1:]:
        assert report["routing/agreement"] == 1
        assert 1 < report["routing/load_max"] <= CONFIG.num_experts
        assert 0 < report["routing/entropy"] <= np.log(CONFIG.num_experts) + 1e-6


def sizes(report, what):
    names = ("log_ratio_abs_mean", "log_ratio_abs_max", "kl_k3")
    return {name: report[f"{what}/{name}"] for name in names}


@pytest.mark.slow
def test_replay_tells_apart_which_experts_from_what_is_made_of_them():
    """All of the mismatch where only the choice differs, none of it where only their sum does."""
    choice = mismatch.build([{"name": "expert_choice", "dtype": "bfloat16"}])
    _, _, found = step_of("compared", choice, count=40)
    assert found["routing/agreement"] < 1
    assert found["mismatch/log_ratio_abs_max"] > 1e-3
    assert not any(sizes(found, "replayed").values())
    order = mismatch.build([{"name": "expert_order", "order": "index"}])
    _, _, found = step_of("compared", order, count=40)
    assert found["routing/agreement"] == 1
    assert 0 < found["mismatch/log_ratio_abs_max"] < 1e-4
    assert sizes(found, "replayed") == sizes(found, "mismatch")


@pytest.mark.slow
def test_replay_takes_away_the_mismatch_that_is_routing():
    dial = mismatch.build([{"name": "router", "dtype": "bfloat16"}])
    _, _, own = step_of("compared", dial, count=40)
    assert own["routing/agreement"] < 1
    assert 0 < own["replayed/kl_k3"] < 0.5 * own["mismatch/kl_k3"]
    _, _, replayed = step_of("replayed", dial, count=40)
    assert replayed["mismatch/kl_k3"] == pytest.approx(own["replayed/kl_k3"], rel=1e-5)
    assert replayed["routing/agreement"] < 1  # of the routers' own choices, still


@pytest.mark.slow
@pytest.mark.parametrize("where", [Placement(data=2, fsdp=2)], ids=str)
def test_experts_are_recorded_and_replayed_on_meshes(where):
    _, exactness, found = step_of("replayed", where=where)
    _, _, alone = step_of("replayed")
    assert int(exactness.unequal) == 0 < int(exactness.compared)
    assert found["routing/agreement"] == 1
    for name in ("load_max", "entropy", "idle_share"):
        assert found[f"routing/{name}"] == pytest.approx(alone[f"routing/{name}"], rel=1e-6)


@pytest.mark.slow
def test_the_load_balancing_loss_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_moe import modeling_qwen3_moe as theirs

    logits = np.random.default_rng(0).standard_normal((50, 7)).astype(np.float32)
    expected = theirs.load_balancing_loss_func((torch.tensor(logits),), 7, 3)
    chosen = np.argsort(-logits, axis=1)[:, :3]
    loads = np.bincount(chosen.reshape(-1), minlength=7) / 50
    found = balance_loss(jnp.asarray(logits), jnp.asarray(loads, jnp.float32))
    assert float(found.mean()) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.slow
def test_the_load_balancing_loss_is_learnt_whatever_the_micro_batches_and_devices():
    ends = [
        step_of("compared", balance=0.5, **options)
        for options in (
            {},
            {"micro_batch_tokens": 50, "remat": True},
            {"where": Placement(fsdp=2), "micro_batch": 8},
        )
    ]
    plain, _, _ = step_of("compared")
    apart = plain.params["layers"]["router"] - ends[0][0].params["layers"]["router"]
    assert np.abs(apart).max() > 1e-4
    for state, exactness, found in ends:
        assert int(exactness.unequal) == 0 < int(exactness.compared)
        assert found["routing/balance"] == pytest.approx(ends[0][2]["routing/balance"], rel=1e-5)
        for one, two in zip(*map(jax.tree.leaves, (state.params, ends[0][0].params)), strict=True):
            np.testing.assert_allclose(one, two, atol=2e-5)


@pytest.mark.slow
def test_the_load_balancing_loss_evens_the_load():
    """Without any reward it is all that is learnt: from one favourite expert towards even loads."""
    params = jax.tree.map(jnp.copy, tiny.params(CONFIG))
    objective = objectives.rloo(balance_coefficient=1.0)
    learning = Learning(objective, tiny.GROUP, routing="compared")
    run = programs.build(
        Training(
            replace(EXECUTION, routing="own"), learning, optimizers.adamw(optimizers.Rate(3e-2))
        )
    )
    state, seen = run.init(params), []
    weights = run.prepare(state.params)
    for number in range(8):
        published = run.publish(state.params, weights)
        rollout = run.sample(published, tiny.prompts(count=4), jax.random.key(number))
        rewards = jnp.zeros(4 * tiny.GROUP, jnp.float32)
        state, weights, _, found = loop.learn(state, weights, rollout, rewards, programs=run)
        seen.append(found["routing/balance"])
    even = CONFIG.num_experts_per_tok
    assert seen[0] > even
    assert seen[-1] - even < 0.5 * (seen[0] - even)


def test_the_load_balancing_loss_needs_recorded_experts():
    with pytest.raises(InputError, match=r"balance_coefficient = 0\.1 needs the experts"):
        Learning(objectives.rloo(balance_coefficient=0.1), tiny.GROUP)


def test_a_rollout_is_cut_with_its_experts():
    rollout = drawn()
    cut = cut_rollout(rollout, 4)
    assert cut.routes is not None
    assert rollout.routes is not None
    assert cut.routes.shape[1] == rollout.prompts.shape[1] + 4
    np.testing.assert_array_equal(cut.routes, rollout.routes[:, : cut.routes.shape[1]])


def test_a_dense_model_has_no_routing():
    with pytest.raises(InputError, match="routing 'replay' is unknown"):
        replace(EXECUTION, routing="replay")
    with pytest.raises(InputError, match="routing = 'replayed' needs a mixture of experts"):
        replace(tiny.EXECUTION, routing="replayed")
    with pytest.raises(InputError, match=r"learner\.routing"):
        toml.load(None, ['learner.routing="replay"'])


def test_responses_in_parts_are_not_recorded():
    dial = mismatch.build([{"name": "in_flight_updates", "updates": 1, "every": 3}])
    with pytest.raises(InputError, match=r"goes only with learner\.routing = 'own'"):
        mismatch.check(dial, EXECUTION)
    mismatch.check(dial, replace(EXECUTION, routing="own"))


def test_a_rollout_without_experts_is_not_compared():
    with pytest.raises(ValueError, match="no routes"):
        scored(replace(drawn(), routes=None))
