"""Weights of tokens against their definition; what an objective adds to its loss; refusals."""

import dataclasses
import functools
import itertools
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tim_jax import objectives
from tim_jax.common.errors import InputError
from tim_jax.objectives import Objective, losses
from tim_jax.objectives.objective import Aggregation, Denominator

AGGREGATIONS, DENOMINATORS = get_args(Aggregation), get_args(Denominator)
GRID = list(itertools.product(AGGREGATIONS, DENOMINATORS))


def batch(seed=0, rows=6, width=9, spread=0.3) -> tuple[Any, Any, Any, Any]:
    """Of NumPy, which serves as well as the arrays of JAX that the library's types name."""
    rng = np.random.default_rng(seed)
    log_probs = -rng.exponential(size=(rows, width)).astype(np.float32)
    old = (log_probs + spread * rng.standard_normal((rows, width))).astype(np.float32)
    lengths = rng.integers(1, width + 1, size=rows)
    mask = np.arange(width)[None, :] < lengths[:, None]
    advantages = rng.standard_normal(rows).astype(np.float32)
    return log_probs, old, advantages, mask


@functools.cache
def program(objective):
    """What `token_losses` returns, and the gradient of its weighted sum by the log-probs."""

    def total(log_probs, old, advantages, mask, **given):
        found = objective.token_losses(log_probs, old, advantages, mask=mask, **given)
        weights = objective.token_weights(mask, given.get("kept"))
        return jnp.sum(weights * found.loss), found

    compiled = jax.jit(jax.grad(total, has_aux=True))

    def run(*arrays, **given) -> Any:
        gradient, found = jax.tree.map(np.asarray, compiled(*arrays, **given))
        return found, gradient

    return run


@jax.jit
def all_weights(mask, kept):
    """By aggregation and denominator: with rejected tokens, and without."""
    return {
        how: (objective.token_weights(mask, kept), objective.token_weights(mask))
        for how in GRID
        for objective in [Objective(aggregation=how[0], denominator=how[1], max_length=9)]
    }


def defined_weights(mask, kept, aggregation, denominator):
    lengths = (mask if denominator == "response" else kept).sum(axis=1)
    counted = (kept if denominator == "survivors" else mask).any(axis=1).sum()
    per_row = {
        "token_mean": np.full(6, 1 / max(lengths.sum(), 1)),
        "token_sum": np.ones(6),
        "sequence_mean_token_mean": 1 / (max(counted, 1) * np.maximum(lengths, 1)),
        "sequence_mean_token_sum": np.full(6, 1 / max(counted, 1)),
        "constant_length": np.full(6, 1 / (max(counted, 1) * 9)),
    }[aggregation]
    return mask * per_row[:, None]


def test_weights_match_the_definition():
    *_, mask = batch(seed=3)
    mask[2] = False
    kept = mask & (np.random.default_rng(0).random(mask.shape) < 0.7)
    kept[4] = False
    found = jax.tree.map(np.asarray, all_weights(mask, kept))
    for how in GRID:
        partly, whole = found[how]
        np.testing.assert_allclose(
            partly, defined_weights(mask, kept, *how), 1e-6, err_msg=str(how)
        )
        np.testing.assert_allclose(whole, defined_weights(mask, mask, *how), 1e-6, err_msg=str(how))
        assert np.array_equal(whole, found[how[0], "response"][1])
    assert len({found[how][0].tobytes() for how in GRID}) == 10


def test_weights_of_nothing_are_zero():
    nothing = np.zeros((6, 9), bool)
    assert not any(np.any(x) for x in jax.tree.leaves(all_weights(nothing, nothing)))


@pytest.mark.parametrize(
    "objective",
    [
        Objective(clip_low=0.1, clip_high=0.28, dual_clip=3.0),
        Objective(loss="reinforce"),
        Objective(loss="gspo", clip_low=0.03, clip_high=0.04),
        Objective(loss="dppo_tv", loss_options={"ratio_cap": 2.0}),
    ],
    ids=lambda o: o.loss,
)
def test_losses_are_those_of_the_options_wherever_the_mask_is_and_no_others(objective):
    log_probs, old, advantages, mask = batch(seed=1, spread=3.0)
    found, _ = program(objective)(log_probs, old, advantages, mask)
    wide = np.broadcast_to(advantages[:, None], mask.shape)
    arrays = *(np.where(mask, x, np.float32(0)) for x in (log_probs, old)), wide, mask
    of_loss = jax.jit(functools.partial(losses.LOSSES[objective.loss], **objective.options))
    for name, value in of_loss(*arrays)._asdict().items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-6, err_msg=name)
    assert not np.any(found.kl)


def test_options_may_be_numbers_of_numpy():
    bounds: Any = {"clip_low": np.float32(0.25), "clip_high": np.int64(1)}
    given = Objective(**bounds, dual_clip=cast(Any, np.float16(3)))
    assert given.options == {"clip_low": 0.25, "clip_high": 1, "dual_clip": 3.0}
    assert {type(value) for value in given.options.values()} == {float, int}


@pytest.mark.parametrize("as_numbers", [lambda mask: 2 * mask.astype(np.int32), np.float32])
def test_a_mask_of_numbers_is_one_of_bools(as_numbers):
    """Such as the numbers of turns, or what a data loader pads with floats."""
    *arrays, mask = batch(seed=4)
    run = program(Objective(aggregation="sequence_mean_token_mean"))
    numbers = as_numbers(mask)
    _, expected = run(*arrays, mask, kept=mask)
    assert np.array_equal(run(*arrays, numbers, kept=numbers)[1], expected)


@pytest.mark.parametrize("loss", ["reinforce", "clip", "gspo"])
def test_nan_off_the_mask_changes_nothing_and_on_it_shows(loss):
    log_probs, old, advantages, mask = batch(seed=4)
    run = program(Objective(loss=loss, kl_coefficient=0.1))

    def filled(x, fill):
        return np.where(mask, x, np.float32(fill))

    def given(fill):
        coefficients = filled(np.ones_like(old), fill)
        return {"reference_log_probs": filled(old - 0.1, fill), "coefficients": coefficients}

    clean, dirty = (
        run(filled(log_probs, x), filled(old, x), advantages, mask, **given(x))
        for x in (0.0, np.nan)
    )
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert np.all(np.isfinite(clean[0].loss))
    log_probs[2, 0] = np.nan
    shown, _ = run(log_probs, old, advantages, mask, **given(0.0))
    assert np.isnan(shown.loss[2, 0])


def test_micro_batches_add_up_to_the_whole():
    log_probs, old, advantages, mask = batch(seed=6, rows=8)

    @jax.jit
    @jax.grad
    def gradient(x, old, advantages, mask, weights):
        return jnp.sum(weights * Objective().token_losses(x, old, advantages, mask=mask).loss)

    weights = np.random.default_rng(0).random(mask.shape).astype(np.float32)
    arrays = log_probs, old, advantages, mask, weights
    parts = [gradient(*(x[i : i + 2] for x in arrays)) for i in range(0, 8, 2)]
    assert np.array_equal(np.asarray(gradient(*arrays)), np.concatenate(parts))


def test_a_kl_to_the_reference_enters_the_loss_and_is_reported_without_a_coefficient():
    log_probs, reference, advantages, mask = batch(seed=7)
    d = np.float64(log_probs) - reference
    arrays = log_probs, log_probs, advantages, mask
    taxed = Objective(kl_coefficient=0.5)
    bare, _ = program(Objective())(*arrays, reference_log_probs=reference)
    full, _ = program(taxed)(*arrays, reference_log_probs=reference)
    expected = np.where(mask, np.exp(-d) - 1 + d, 0.0)
    np.testing.assert_allclose(bare.kl, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(full.loss - bare.loss, 0.5 * expected, rtol=1e-4, atol=1e-6)
    assert np.array_equal(bare.kl, full.kl)
    with pytest.raises(InputError, match="no reference log-probs"):
        taxed.token_losses(*arrays[:3], mask=mask)


def test_coefficients_scale_the_gradient_of_each_token_and_receive_none():
    *arrays, mask = batch(seed=8)
    drawn = np.random.default_rng(0).uniform(0, 2, mask.shape).astype(np.float32)

    @jax.jit
    def gradients(x, c):
        def total(x, c):
            losses = Objective(loss="gspo").token_losses(x, *arrays[1:], mask=mask, coefficients=c)
            return jnp.sum(losses.loss)

        return jax.grad(total, argnums=(0, 1))(x, c)

    by_log_probs, by_coefficients = gradients(arrays[0], drawn)
    plain, _ = gradients(arrays[0], np.ones_like(drawn))
    np.testing.assert_allclose(by_log_probs, drawn * np.asarray(plain), rtol=1e-6)
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
        ({"kl_coefficient": float("nan")}, "kl_coefficient is nan"),
        ({"kl_cap": -1.0}, "kl_cap is -1.0"),
        ({"entropy_coefficient": float("inf")}, "entropy_coefficient is inf"),
        ({"advantage_eps": -1.0}, "advantage_eps is -1.0"),
        ({"loss": "gsp"}, "did you mean 'gspo'"),
        ({"estimator": "gae"}, "estimator 'gae' is unknown"),
        ({"aggregation": "mean"}, "aggregation 'mean' is unknown"),
        ({"aggregation": "constant_length", "max_length": 0}, "max_length is 0"),
        ({"denominator": "survivor"}, "did you mean 'survivors'"),
        ({"kl_estimator": "k4"}, "kl_estimator 'k4' is unknown"),
        ({"kl_coefficient": "0.2"}, "kl_coefficient is '0.2'; it must be a number"),
        ({"max_length": 5.5}, "max_length is 5.5; it must be a whole number"),
        ({"drop_cut": "no"}, "drop_cut is 'no'; it must be true or false"),
        ({"advantage_eps": True}, "advantage_eps is True; it must be a number"),
        ({"loss_options": "ratio_cap"}, "loss_options is 'ratio_cap'; it must be a mapping"),
        ({"loss_options": {"ratio_cup": 2.0}, "loss": "dppo_tv"}, "did you mean 'ratio_cap'"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ({"loss": "reinforce", "clip_low": 0.2}, "clip_low"),
        ({"overlong_cache": 0}, "overlong_cache is 0; it must lie in"),
        ({"overlong_cache": 9, "max_length": 8}, "max_length\\], which is 8"),
        (
            {"reward_kl_target": float("inf"), "reward_kl_coefficient": 0.1},
            "target is inf; the KL held must be positive and finite",
        ),
        ({"reward_kl_target": 3.0}, "reward_kl_coefficient, which it would steer, is 0"),
        (
            {"regularise_rejected": True, "denominator": "survivors"},
            "denominator is 'survivors', which does not count the rejected tokens",
        ),
        ({"reject_before_advantages": True, "estimator": "remax"}, "'remax' has none of other"),
    ],
)
def test_options_that_are_wrong_or_mean_nothing_are_refused_in_one_line(options, message):
    with pytest.raises(InputError, match=message) as error:
        Objective(**options)
    assert "\n" not in str(error.value)


def test_terms_of_rejected_tokens_go_with_a_denominator_that_counts_them():
    Objective(regularise_rejected=True, denominator="verl", aggregation="token_sum")


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


def test_advantages_may_be_per_token_and_no_shape_is_broadcast():
    log_probs, old, advantages, mask = batch(seed=9)
    objective = Objective(loss="gspo", kl_coefficient=0.1)
    run = program(objective)
    given = {"reference_log_probs": old, "coefficients": np.ones_like(old)}
    per_row, _ = run(log_probs, old, advantages, mask, **given)
    per_token = np.array(np.broadcast_to(advantages[:, None], mask.shape))
    same, _ = run(log_probs, old, per_token, mask, **given)
    np.testing.assert_array_equal(per_row.loss, same.loss)
    per_token[:, 0] = 0.0
    changed, _ = run(log_probs, old, per_token, mask, **given)
    np.testing.assert_allclose(changed.loss[:, 0], 0.1 * changed.kl[:, 0], rtol=1e-6)
    wrong = {
        "advantages have shape": [
            {"advantages": advantages[:, None]},
            {"advantages": np.ones(mask.shape[1])},
            {"advantages": np.ones((1, *mask.shape))},
        ],
        "has shape": [
            {"mask": mask[:, :1]},
            {"mask": mask[:, 0]},
            {"coefficients": np.ones((mask.shape[0], 1))},
            {"kept": np.ones((1, mask.shape[1]), bool)},
            {"log_probs": log_probs[:1]},
            {"old_log_probs": old[:, :1]},
            {"reference_log_probs": old[:, :1]},
            {"entropy": np.ones((1, 1))},
        ],
    }
    right = {"log_probs": log_probs, "old_log_probs": old, "mask": mask}
    right |= {"advantages": advantages, "reference_log_probs": old}
    for message, cases in wrong.items():
        for case in cases:
            with pytest.raises(InputError, match=message) as error:
                objective.token_losses(**{**right, **case})
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
    kept = np.broadcast_to(np.arange(6)[:, None] % 2 == 0, mask.shape)
    given = {"kept": mask & kept, "coefficients": np.float32(kept)}
    given |= {"reference_log_probs": old, "entropy": np.full(mask.shape, 0.5, np.float32)}
    settings = {"loss": "reinforce", "kl_coefficient": 0.1, "kl_estimator": "k1"}
    settings |= {"entropy_coefficient": 0.2}
    left, stay = (
        program(Objective(**settings, regularise_rejected=stays))(
            log_probs, old, advantages, mask, **given
        )[0]
        for stays in (False, True)
    )
    terms = 0.1 * (np.float64(log_probs) - old) - 0.2 * 0.5
    np.testing.assert_array_equal(left.loss[mask & kept], stay.loss[mask & kept])
    assert not np.any(left.loss[mask & ~kept])
    np.testing.assert_allclose(stay.loss[mask & ~kept], terms[mask & ~kept], rtol=1e-5, atol=1e-6)
