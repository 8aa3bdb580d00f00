"""Advantages, losses and normalisers against float64 formulas and identities."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tim_jax import objectives
from tim_jax.common.errors import InputError
from tim_jax.objectives import Objective, losses
from tim_jax.objectives.objective import Aggregation, Denominator, token_weights

AGGREGATIONS: dict[Aggregation, dict[str, Any]] = {
    "token_mean": {},
    "token_sum": {},
    "sequence_mean_token_mean": {},
    "sequence_mean_token_sum": {},
    "constant_length": {"max_length": 9},
}


def batch(seed=0, rows=6, width=9, spread=0.3) -> tuple[Any, Any, Any, Any]:
    """Of NumPy, which serves as well as the arrays of JAX that the library's types name."""
    rng = np.random.default_rng(seed)
    log_probs = -rng.exponential(size=(rows, width)).astype(np.float32)
    old = (log_probs + spread * rng.standard_normal((rows, width))).astype(np.float32)
    lengths = rng.integers(1, width + 1, size=rows)
    mask = np.arange(width)[None, :] < lengths[:, None]
    advantages = rng.standard_normal(rows).astype(np.float32)
    return log_probs, old, advantages, mask


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_match_the_definition_and_split_into_rows(aggregation):
    *_, mask = batch(seed=3)
    mask[2] = False
    options = AGGREGATIONS[aggregation]
    ours = token_weights(jnp.asarray(mask), aggregation=aggregation, **options)
    lengths, sequences = mask.sum(axis=1), 5
    per_row = {
        "token_mean": np.full(6, 1 / mask.sum()),
        "token_sum": np.ones(6),
        "sequence_mean_token_mean": 1 / (sequences * np.maximum(lengths, 1)),
        "sequence_mean_token_sum": np.full(6, 1 / sequences),
        "constant_length": np.full(6, 1 / (sequences * 9)),
    }[aggregation]
    np.testing.assert_allclose(ours, mask * per_row[:, None], rtol=1e-6)


def test_weights_of_nothing_are_zero():
    for aggregation, options in AGGREGATIONS.items():
        ours = token_weights(jnp.zeros((2, 3), bool), aggregation=aggregation, **options)
        assert not np.any(np.asarray(ours))


def reference_losses(objective, log_probs, old, advantages, mask):
    d = np.where(mask, np.float64(log_probs) - old, 0.0)
    if objective.loss == "reinforce":
        return np.where(mask, -advantages[:, None] * log_probs.astype(np.float64), 0.0)
    if objective.loss != "clip":
        d = np.broadcast_to(d.sum(axis=1, keepdims=True) / mask.sum(axis=1)[:, None], d.shape)
    ratio, a = np.exp(np.clip(d, -20, 20)), advantages[:, None].astype(np.float64)
    low, high = objective.options.get("clip_low", 0.2), objective.options.get("clip_high", 0.2)
    clipped = np.clip(ratio, 1 - low, 1 + high)
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


def test_gspo_is_its_sequence_form_until_coefficients_differ_within_a_row():
    """Then each token's gradient has its own coefficient; the sequence form would average them."""
    log_probs, old, advantages, mask = batch(seed=5)
    objective = Objective(
        loss="gspo", clip_low=0.9, clip_high=9.0, aggregation="sequence_mean_token_mean"
    )

    def of_sequences(x):
        lengths = mask.sum(axis=1).astype(np.float32)
        ratio = jnp.exp(jnp.sum(jnp.where(mask, x - old, 0.0), axis=1) / lengths)
        return -jnp.mean(ratio * advantages)

    def gradient(coefficients):
        def total(x):
            losses = objective.token_losses(
                x, old, jnp.asarray(advantages), mask=mask, coefficients=coefficients
            )
            return jnp.sum(objective.token_weights(jnp.asarray(mask)) * losses.loss)

        return jax.grad(total)(log_probs)

    even = jnp.ones(mask.shape)
    plain = gradient(even)
    np.testing.assert_allclose(plain, jax.grad(of_sequences)(log_probs), rtol=1e-4, atol=1e-7)
    uneven = jnp.asarray(np.random.default_rng(0).uniform(0, 2, mask.shape), jnp.float32)
    np.testing.assert_allclose(gradient(uneven), uneven * plain, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("as_numbers", [lambda mask: 2 * mask.astype(np.int32), np.float32])
def test_a_mask_of_numbers_is_one_of_bools(as_numbers):
    """Such as the numbers of turns, or what a data loader pads with floats."""
    log_probs, old, advantages, mask = batch(seed=4)
    objective = Objective(loss="clip", aggregation="sequence_mean_token_mean")

    def gradient(mask):
        def total(x):
            losses = objective.token_losses(x, old, jnp.asarray(advantages), mask=mask, kept=mask)
            return jnp.sum(objective.token_weights(mask, mask) * losses.loss)

        return np.asarray(jax.grad(total)(log_probs))

    assert np.array_equal(gradient(as_numbers(np.asarray(mask))), gradient(jnp.asarray(mask)))


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
        ({"dual_clip": 1.0}, "dual_clip is 1.0"),
        ({"kl_coefficient": -1.0}, "kl_coefficient is -1.0"),
        ({"advantage_eps": -1.0}, "advantage_eps is -1.0"),
        ({"loss": "gsp"}, "did you mean 'gspo'"),
        ({"estimator": "gae"}, "estimator 'gae' is unknown"),
        ({"aggregation": "mean"}, "aggregation 'mean' is unknown"),
        ({"aggregation": "constant_length", "max_length": 0}, "max_length is 0"),
        ({"kl_estimator": "k4"}, "kl_estimator 'k4' is unknown"),
        ({"kl_coefficient": "0.2"}, "kl_coefficient is '0.2'; it must be a number"),
        ({"max_length": 5.5}, "max_length is 5.5; it must be a whole number"),
        ({"drop_cut": "no"}, "drop_cut is 'no'; it must be true or false"),
        ({"advantage_eps": True}, "advantage_eps is True; it must be a number"),
        ({"loss_options": "ratio_cap"}, "loss_options is 'ratio_cap'; it must be a mapping"),
    ],
)
def test_wrong_construction_is_refused_in_one_line(options, message):
    with pytest.raises(InputError, match=message) as error:
        Objective(**options)
    assert "\n" not in str(error.value)


def test_presets_are_their_papers():
    built = {name: make() for name, make in objectives.PRESETS.items()}
    assert built["dapo"].clip_high == 0.28
    assert built["dapo"].drop_uninformative
    assert losses.options(built["gspo"].loss) | built["gspo"].options == {
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
    }
    assert built["grpo"].kl_coefficient == 0.04
    assert built["dr_grpo"].estimator == "dr_grpo"
    assert objectives.rloo(loss="clip", clip_high=0.28).clip_high == 0.28
    with pytest.raises(InputError, match="did you mean 'clip_high'"):
        objectives.rloo(clip_hihg=0.28)


@pytest.mark.parametrize("loss", ["reinforce", "clip", "gspo"])
def test_advantages_may_be_per_token_and_no_shape_is_broadcast(loss):
    log_probs, old, advantages, mask = batch(seed=9)
    objective = Objective(loss=loss)
    per_row = objective.token_losses(log_probs, old, jnp.asarray(advantages), mask=mask)
    per_token = jnp.broadcast_to(jnp.asarray(advantages)[:, None], mask.shape)
    same = objective.token_losses(log_probs, old, per_token, mask=mask)
    assert per_row.loss.shape == same.loss.shape == mask.shape
    np.testing.assert_array_equal(per_row.loss, same.loss)
    uneven = per_token.at[:, 0].set(0.0)
    changed = objective.token_losses(log_probs, old, uneven, mask=mask)
    assert not np.any(np.asarray(changed.loss)[:, 0])
    wrong = {
        "advantages have shape": [
            {"advantages": jnp.asarray(advantages)[:, None]},
            {"advantages": jnp.ones(mask.shape[1])},
            {"advantages": jnp.ones((1, *mask.shape))},
        ],
        "has shape": [
            {"mask": jnp.asarray(mask)[:, :1]},
            {"mask": jnp.asarray(mask)[:, 0]},
            {"coefficients": jnp.ones((mask.shape[0], 1))},
            {"kept": jnp.ones((1, mask.shape[1]), bool)},
            {"log_probs": jnp.asarray(log_probs)[:1]},
            {"old_log_probs": jnp.asarray(old)[:, :1]},
            {"reference_log_probs": jnp.asarray(old)[:, :1]},
            {"entropy": jnp.ones((1, 1))},
        ],
    }
    right = {"log_probs": log_probs, "old_log_probs": old, "mask": jnp.asarray(mask)}
    right["advantages"] = jnp.asarray(advantages)
    for message, cases in wrong.items():
        for case in cases:
            with pytest.raises(InputError, match=message) as error:
                objective.token_losses(**{**right, **case})
            assert "\n" not in str(error.value)


def test_a_denominator_counts_what_it_says():
    mask = jnp.asarray([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
    kept = mask & jnp.asarray([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]], bool)
    first: dict[tuple[Aggregation, Denominator], float] = {
        ("token_mean", "response"): 1 / 9,
        ("token_mean", "survivors"): 1 / 6,
        ("token_mean", "verl"): 1 / 6,
        ("token_sum", "response"): 1.0,
        ("token_sum", "survivors"): 1.0,
        ("token_sum", "verl"): 1.0,
        ("sequence_mean_token_mean", "response"): 1 / (3 * 3),
        ("sequence_mean_token_mean", "survivors"): 1 / (2 * 2),
        ("sequence_mean_token_mean", "verl"): 1 / (3 * 2),
        ("sequence_mean_token_sum", "response"): 1 / 3,
        ("sequence_mean_token_sum", "survivors"): 1 / 2,
        ("sequence_mean_token_sum", "verl"): 1 / 3,
        ("constant_length", "response"): 1 / (3 * 5),
        ("constant_length", "survivors"): 1 / (2 * 5),
        ("constant_length", "verl"): 1 / (3 * 5),
    }
    for (aggregation, denominator), expected in first.items():
        objective = Objective(aggregation=aggregation, denominator=denominator, max_length=5)
        weights = objective.token_weights(mask, kept)
        assert float(weights[0, 0]) == pytest.approx(expected), (aggregation, denominator)
        assert not np.any(np.asarray(weights)[~np.asarray(mask)])
        whole = objective.token_weights(mask)
        np.testing.assert_array_equal(
            whole, Objective(aggregation=aggregation, max_length=5).token_weights(mask)
        )


def test_a_nan_log_prob_shows_and_padding_does_not():
    log_probs, old, advantages, mask = batch(seed=4)
    for name in ("reinforce", "clip", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl"):
        objective = Objective(loss=name)
        bad: Any = np.where(mask, log_probs, np.nan)
        fine = objective.token_losses(bad, old, jnp.asarray(advantages), mask=jnp.asarray(mask))
        assert np.all(np.isfinite(fine.loss)), name
        bad[2, 0] = np.nan
        shown = objective.token_losses(bad, old, jnp.asarray(advantages), mask=jnp.asarray(mask))
        assert np.isnan(np.asarray(shown.loss)[2, 0]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_options": {"ratio_cup": 2.0}, "loss": "dppo_tv"}, "did you mean 'ratio_cap'"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ({"loss": "reinforce", "clip_low": 0.2}, "clip_low"),
        ({"kl_cap": -1.0}, "kl_cap is -1.0"),
        ({"kl_coefficient": float("nan")}, "kl_coefficient is nan"),
        ({"entropy_coefficient": float("inf")}, "entropy_coefficient is inf"),
        ({"overlong_cache": 0}, "overlong_cache is 0; it must lie in"),
        ({"overlong_cache": 9, "max_length": 8}, "max_length\\], which is 8"),
        ({"reward_kl_target": 3.0}, "reward_kl_coefficient, which it would steer, is 0"),
        ({"denominator": "survivor"}, "did you mean 'survivors'"),
    ],
)
def test_options_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(InputError, match=message) as error:
        Objective(**changes)
    assert "\n" not in str(error.value)


def test_a_length_that_is_counted_from_is_the_runs_longest_if_none_is_given():
    for lacking in (objectives.dr_grpo(), objectives.dapo(overlong_cache=3)):
        assert lacking.lacks_length
        assert lacking.with_length(8) == dataclasses.replace(lacking, max_length=8)
    for needless in (objectives.grpo(), objectives.dr_grpo(max_length=5)):
        assert needless.with_length(8) is needless
    with pytest.raises(InputError, match=r"overlong_cache is 3; .* which is 2"):
        objectives.dapo(overlong_cache=3).with_length(2)


def test_rejected_tokens_keep_their_terms_where_they_are_asked_to():
    log_probs, old, advantages, mask = batch(seed=6)
    kept = np.arange(6)[:, None] % 2 == np.zeros((1, 9))
    given = {
        "mask": mask,
        "kept": jnp.asarray(mask & kept),
        "coefficients": jnp.asarray(kept * 1.0),
    }
    given |= {"reference_log_probs": jnp.asarray(old), "entropy": jnp.full(mask.shape, 0.5)}
    settings = {"loss": "reinforce", "kl_coefficient": 0.1, "kl_estimator": "k1"}
    settings |= {"entropy_coefficient": 0.2}
    left, stay = (
        Objective(**settings, regularise_rejected=stays).token_losses(
            log_probs, old, advantages, **given
        )
        for stays in (False, True)
    )
    terms = 0.1 * (np.float64(log_probs) - old) - 0.2 * 0.5
    np.testing.assert_array_equal(left.loss[mask & kept], stay.loss[mask & kept])
    assert not np.any(np.asarray(left.loss)[mask & ~kept])
    np.testing.assert_allclose(stay.loss[mask & ~kept], terms[mask & ~kept], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"regularise_rejected": True, "denominator": "survivors"},
            "denominator is 'survivors', which does not count the rejected tokens",
        ),
        ({"reject_before_advantages": True, "estimator": "remax"}, "'remax' has none of other"),
    ],
)
def test_what_says_nothing_about_rejected_tokens_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        Objective(**options)
    Objective(regularise_rejected=True, denominator="verl", aggregation="token_sum")
