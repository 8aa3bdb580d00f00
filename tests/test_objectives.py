"""Advantages, losses and normalisers against float64 formulas and identities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tim_jax import objectives
from tim_jax.errors import InputError
from tim_jax.objectives import Objective

AGGREGATIONS = {
    "token_mean": {},
    "sequence_mean_token_mean": {},
    "sequence_mean_token_sum": {},
    "constant_length": {"max_length": 9},
}


def batch(seed=0, rows=6, width=9, spread=0.3):
    rng = np.random.default_rng(seed)
    log_probs = -rng.exponential(size=(rows, width)).astype(np.float32)
    old = (log_probs + spread * rng.standard_normal((rows, width))).astype(np.float32)
    lengths = rng.integers(1, width + 1, size=rows)
    mask = np.arange(width)[None, :] < lengths[:, None]
    advantages = rng.standard_normal(rows).astype(np.float32)
    return log_probs, old, advantages, mask


def reference_advantages(rewards, size, estimator, eps=1e-6):
    groups = rewards.astype(np.float64).reshape(-1, size)
    mean = groups.mean(axis=1, keepdims=True)
    if estimator == "reinforce":
        result = groups
    elif estimator == "reinforce_batch":
        result = groups - groups.mean()
    elif estimator == "rloo":
        others = [[np.delete(g, i).mean() for i in range(size)] for g in groups]
        result = groups - np.array(others)
    else:
        result = groups - mean
        if estimator == "grpo":
            result = result / (groups.std(axis=1, ddof=1, keepdims=True) + eps)
    return result.reshape(-1)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce", "reinforce_batch"])
@given(seed=st.integers(0, 999), groups=st.integers(1, 4), size=st.integers(2, 7))
@settings(deadline=None, max_examples=15)
def test_advantages_match_the_definition(estimator, seed, groups, size):
    # Multiples of 1/8: rounding alone would make the advantage of two that are nearly equal.
    drawn = np.random.default_rng(seed).integers(-20, 20, groups * size)
    rewards = (drawn / 8).astype(np.float32)
    ours = objectives.advantages(jnp.asarray(rewards), group_size=size, estimator=estimator)
    np.testing.assert_allclose(
        ours, reference_advantages(rewards, size, estimator), rtol=2e-4, atol=1e-5
    )


@pytest.mark.parametrize("estimator", objectives.GROUP_BASELINES)
def test_equal_rewards_give_exact_zeros(estimator):
    # 0.1 is not a binary fraction: the mean of seven of them need not be the same float.
    rewards = jnp.full((14,), 0.1, jnp.float32)
    ours = objectives.advantages(rewards, group_size=7, estimator=estimator)
    assert not np.any(np.asarray(ours))


def test_informative_groups_are_those_with_two_values():
    rewards = jnp.asarray([0.1, 0.1, 0.1, 0.0, 0.1, 0.1, 1.0, 1.0, 1.0], jnp.float32)
    kept = objectives.informative_groups(rewards, 3)
    assert kept.tolist() == [False] * 3 + [True] * 3 + [False] * 3


@pytest.mark.parametrize("estimator", objectives.GROUP_BASELINES)
def test_a_group_baseline_refuses_groups_of_one(estimator):
    with pytest.raises(InputError, match="group_size is 1"):
        objectives.check_group_size(estimator, 1)
    with pytest.raises(InputError, match="group_size is 1"):
        objectives.advantages(jnp.ones(4), group_size=1, estimator=estimator)
    objectives.check_group_size("reinforce", 1)


def test_rewards_must_fill_their_groups():
    with pytest.raises(InputError, match=r"shape \(7,\)"):
        objectives.advantages(jnp.ones(7), group_size=2, estimator="rloo")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_match_the_definition_and_split_into_rows(aggregation):
    *_, mask = batch(seed=3)
    mask[2] = False
    options = AGGREGATIONS[aggregation]
    ours = objectives.token_weights(jnp.asarray(mask), aggregation=aggregation, **options)
    lengths, sequences = mask.sum(axis=1), 5
    per_row = {
        "token_mean": np.full(6, 1 / mask.sum()),
        "sequence_mean_token_mean": 1 / (sequences * np.maximum(lengths, 1)),
        "sequence_mean_token_sum": np.full(6, 1 / sequences),
        "constant_length": np.full(6, 1 / (sequences * 9)),
    }[aggregation]
    np.testing.assert_allclose(ours, mask * per_row[:, None], rtol=1e-6)


def test_weights_of_nothing_are_zero():
    for aggregation, options in AGGREGATIONS.items():
        ours = objectives.token_weights(jnp.zeros((2, 3), bool), aggregation=aggregation, **options)
        assert not np.any(np.asarray(ours))


def reference_losses(objective, log_probs, old, advantages, mask):
    d = np.where(mask, np.float64(log_probs) - old, 0.0)
    if objective.loss == "reinforce":
        return np.where(mask, -advantages[:, None] * log_probs.astype(np.float64), 0.0)
    if objective.loss != "clip":
        d = np.broadcast_to(d.sum(axis=1, keepdims=True) / mask.sum(axis=1)[:, None], d.shape)
    ratio, a = np.exp(np.clip(d, -20, 20)), advantages[:, None].astype(np.float64)
    clipped = np.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
    surrogate = np.minimum(ratio * a, clipped * a)
    if objective.dual_clip is not None:
        surrogate = np.where(a < 0, np.maximum(surrogate, objective.dual_clip * a), surrogate)
    return np.where(mask, -surrogate, 0.0)


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(clip_low=0.1, clip_high=0.28, dual_clip=3.0),
        Objective(loss="reinforce"),
        Objective(loss="gspo", clip_low=0.03, clip_high=0.04),
        Objective(loss="gspo_token", clip_low=0.03, clip_high=0.04),
    ],
    ids=lambda o: f"{o.loss}-{o.dual_clip}",
)
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 300.0])
def test_losses_match_the_definition(objective, spread):
    log_probs, old, advantages, mask = batch(seed=1, spread=spread)
    ours = objective.token_losses(log_probs, old, jnp.asarray(advantages), mask=jnp.asarray(mask))
    expected = reference_losses(objective, log_probs, old, advantages, mask)
    np.testing.assert_allclose(ours.loss, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["reinforce", "clip", "gspo", "gspo_token"])
def test_on_policy_ratio_is_one_and_gradient_is_reinforce(loss):
    log_probs, _, advantages, mask = batch(seed=2)
    objective = Objective(loss=loss, aggregation="sequence_mean_token_mean")
    weights = objective.token_weights(jnp.asarray(mask))

    def total(x):
        losses = objective.token_losses(x, log_probs, jnp.asarray(advantages), mask=mask)
        return jnp.sum(weights * losses.loss), losses

    (_, losses), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(log_probs)
    assert np.array_equal(np.asarray(losses.ratio), mask.astype(np.float32))
    assert not np.any(losses.clipped_low | losses.clipped_high | losses.clipped_dual)
    expected = -np.asarray(weights) * advantages[:, None]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-8)


def test_clipped_tokens_have_no_gradient_and_are_counted():
    objective = Objective(clip_low=0.2, clip_high=0.3, dual_clip=4.0)
    old = jnp.zeros((2, 4))
    ratio = jnp.asarray([[0.5, 0.9, 1.2, 1.5], [0.5, 0.9, 1.2, 5.0]])
    advantages = jnp.asarray([1.0, -1.0])
    mask = jnp.ones((2, 4), bool)

    def total(x):
        losses = objective.token_losses(x, old, advantages, mask=mask)
        return jnp.sum(losses.loss), losses

    gradient, losses = jax.grad(total, has_aux=True)(jnp.log(ratio))
    moving = [[True, True, True, False], [False, True, True, False]]
    assert (np.asarray(gradient) != 0).tolist() == moving
    assert losses.clipped_high.tolist() == [[False, False, False, True], [False] * 4]
    assert losses.clipped_low.tolist() == [[False] * 4, [True, False, False, False]]
    assert losses.clipped_dual.tolist() == [[False] * 4, [False, False, False, True]]


def test_gspo_forms_agree_until_coefficients_differ_within_a_row():
    log_probs, old, advantages, mask = batch(seed=5)
    forms = [
        Objective(loss=loss, clip_low=0.9, clip_high=9.0, aggregation="sequence_mean_token_mean")
        for loss in ("gspo", "gspo_token")
    ]

    def gradient(objective, coefficients):
        def total(x):
            losses = objective.token_losses(
                x, old, jnp.asarray(advantages), mask=mask, coefficients=coefficients
            )
            return jnp.sum(objective.token_weights(jnp.asarray(mask)) * losses.loss)

        return jax.grad(total)(log_probs)

    even = jnp.ones(mask.shape)
    np.testing.assert_allclose(
        gradient(forms[0], even), gradient(forms[1], even), rtol=1e-5, atol=1e-7
    )
    first = even.at[:, 0].set(0.0)
    long = mask.sum(axis=1) > 1
    assert np.all(np.asarray(gradient(forms[0], first))[long, 0] != 0)
    assert np.all(np.asarray(gradient(forms[1], first))[:, 0] == 0)


@pytest.mark.parametrize("loss", ["reinforce", "clip", "gspo", "gspo_token"])
def test_nan_off_the_mask_changes_nothing(loss):
    log_probs, old, advantages, mask = batch(seed=4)
    objective = Objective(loss=loss, kl_coefficient=0.1)

    def run(fill):
        def total(x):
            poisoned = [jnp.where(mask, v, fill) for v in (old, old - 0.1, jnp.ones_like(old))]
            losses = objective.token_losses(
                x,
                poisoned[0],
                jnp.asarray(advantages),
                mask=mask,
                reference_log_probs=poisoned[1],
                coefficients=poisoned[2],
            )
            return jnp.sum(objective.token_weights(jnp.asarray(mask)) * losses.loss), losses

        return jax.value_and_grad(total, has_aux=True)(jnp.where(mask, log_probs, fill))

    clean, dirty = run(0.0), run(jnp.nan)
    for left, right in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert np.array_equal(np.asarray(left), np.asarray(right))


def test_micro_batches_add_up_to_the_whole():
    log_probs, old, advantages, mask = batch(seed=6, rows=8)
    for aggregation, options in AGGREGATIONS.items():
        objective = Objective(aggregation=aggregation, **options)
        weights = objective.token_weights(jnp.asarray(mask))

        def total(x, rows, objective=objective, weights=weights):
            losses = objective.token_losses(
                x, old[rows], jnp.asarray(advantages[rows]), mask=mask[rows]
            )
            return jnp.sum(weights[rows] * losses.loss)

        whole = jax.grad(total)(log_probs, slice(None))
        parts = [jax.grad(total)(log_probs[i : i + 2], slice(i, i + 2)) for i in range(0, 8, 2)]
        assert np.array_equal(np.asarray(whole), np.concatenate(parts))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_match_the_definition_and_enter_the_loss(estimator):
    log_probs, reference, advantages, mask = batch(seed=7)
    d = np.float64(log_probs) - reference
    expected = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator]
    ours = objectives.kl_estimate(log_probs, reference, estimator=estimator)
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)
    plain = Objective(kl_estimator=estimator)
    taxed = Objective(kl_estimator=estimator, kl_coefficient=0.5)
    arguments = (log_probs, log_probs, jnp.asarray(advantages))
    bare = plain.token_losses(*arguments, mask=mask, reference_log_probs=reference)
    full = taxed.token_losses(*arguments, mask=mask, reference_log_probs=reference)
    np.testing.assert_allclose(
        full.loss - bare.loss, np.where(mask, 0.5 * expected, 0.0), rtol=1e-4, atol=1e-6
    )
    assert np.array_equal(np.asarray(bare.kl), np.asarray(full.kl))
    with pytest.raises(InputError, match="no reference log-probs"):
        taxed.token_losses(*arguments, mask=mask)


def test_coefficients_scale_the_gradient_and_receive_none():
    log_probs, old, advantages, mask = batch(seed=8)
    coefficients = np.random.default_rng(0).uniform(0, 2, mask.shape).astype(np.float32)

    def total(x, c):
        losses = Objective().token_losses(
            x, old, jnp.asarray(advantages), mask=mask, coefficients=c
        )
        return jnp.sum(losses.loss)

    by_log_probs, by_coefficients = jax.grad(total, argnums=(0, 1))(log_probs, coefficients)
    plain = jax.grad(total)(log_probs, np.ones_like(coefficients))
    np.testing.assert_allclose(by_log_probs, coefficients * np.asarray(plain), rtol=1e-6)
    assert not np.any(np.asarray(by_coefficients))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, "clip_low is -0.1"),
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_high": -1.0}, "clip_high is -1.0"),
        ({"clip_high": float("nan")}, "clip_high is nan"),
        ({"dual_clip": 1.1}, "dual_clip is 1.1"),
        ({"kl_coefficient": -1.0}, "kl_coefficient is -1.0"),
        ({"advantage_eps": -1.0}, "advantage_eps is -1.0"),
        ({"loss": "gsp"}, "did you mean 'gspo'"),
        ({"estimator": "gae"}, "estimator 'gae' is unknown"),
        ({"aggregation": "mean"}, "aggregation 'mean' is unknown"),
        ({"aggregation": "constant_length"}, "max_length is None"),
        ({"kl_estimator": "k4"}, "kl_estimator 'k4' is unknown"),
    ],
)
def test_wrong_construction_is_refused_in_one_line(options, message):
    with pytest.raises(InputError, match=message) as error:
        Objective(**options)
    assert "\n" not in str(error.value)


def test_presets_are_their_papers():
    built = {
        name: make(max_length=64) if name == "dr_grpo" else make()
        for name, make in objectives.PRESETS.items()
    }
    assert built["dapo"].clip_high == 0.28
    assert built["dapo"].drop_uninformative
    assert (built["gspo"].clip_low, built["gspo"].clip_high) == (3e-4, 4e-4)
    assert built["grpo"].kl_coefficient == 0.04
    assert built["dr_grpo"].estimator == "dr_grpo"
    assert objectives.rloo(loss="clip", clip_high=0.28).clip_high == 0.28
    with pytest.raises(InputError, match="did you mean 'clip_high'"):
        objectives.rloo(clip_hihg=0.28)
    with pytest.raises(InputError, match="max_length is None"):
        objectives.dr_grpo()
