"""Advantages against float64 formulas by token, identities, and the bits of other programs."""

from functools import cache, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from estimators import per_token, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tim_jax.common.errors import InputError
from tim_jax.objectives.advantages import (
    GROUP_BASELINES,
    Estimator,
    advantages,
    check_samples,
    informative_groups,
    needs,
)

ESTIMATORS = get_args(Estimator)
BY_TOKEN = "optimal_token_baseline"
WEIGHTED = (BY_TOKEN, "off_policy_baseline")
# Few shapes: each is a program of its own.
SHAPES = ((1, 2, 3), (3, 4, 7))
FIELDS = ("rewards", "mask", "token_rewards", "greedy_rewards", "energies", "log_ratio")
OF_TOKENS = ("reinforce", "reinforce_plus_plus", "remax", BY_TOKEN)


def draw(seed, prompts, size, width, dropped=True, by_token=False) -> dict[str, Any]:
    """Rewards in eighths, ragged masks with some rows empty, and energies of real softmaxes."""
    rng = np.random.default_rng(seed)
    rows = prompts * size
    lengths = rng.integers(1, width + 1, rows)
    if dropped:
        lengths *= rng.uniform(size=rows) > 0.2
    logits = 2.0 * rng.standard_normal((rows, width, 5))
    pi = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    tokens = {"token_rewards": np.float32(rng.integers(-8, 8, (rows, width)) / 8)}
    return (tokens if by_token else {}) | {
        # Rounding alone would make the advantage of two rewards that are nearly equal.
        "rewards": np.float32(rng.integers(-20, 20, rows) / 8),
        "mask": np.arange(width)[None, :] < lengths[:, None],
        "greedy_rewards": np.float32(rng.integers(-20, 20, prompts) / 8),
        "energies": np.float32(1 - 2 * pi[..., 0] + np.square(pi).sum(axis=-1)),
        "log_ratio": np.float32(0.5 * rng.standard_normal((rows, width))),
    }


def eager(data, size, estimator, **options):
    arrays = {name: x for name, x in data.items() if name != "rewards"}
    return advantages(data["rewards"], samples=size, estimator=estimator, **arrays, **options)


@cache
def program(**options):
    return jax.jit(partial(eager, **options))


def ours(data, size, estimator, **options):
    return np.asarray(program(size=size, estimator=estimator, **options)(data))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(seed=st.integers(0, 999), shape=st.sampled_from(SHAPES), by_token=st.booleans())
@settings(max_examples=40)
def test_advantages_match_the_definition(estimator, seed, shape, by_token):
    data = draw(seed, *shape, by_token=by_token)
    if data["mask"].sum() < 2:
        data["mask"][:, 0] = True
    found = ours(data, shape[1], estimator)
    of_tokens = estimator == BY_TOKEN or (by_token and estimator in OF_TOKENS)
    assert found.shape == (data["mask"].shape if of_tokens else data["rewards"].shape)
    expected = reference(data, shape[1], estimator)
    # verl's 1e-8, over the smallest deviation that it allows, is 1e-4 of a reward.
    least = 1e-4 * max(1.0, float(np.abs(data["rewards"]).max()))
    np.testing.assert_allclose(per_token(found, data["mask"]), expected, rtol=2e-4, atol=least)


@pytest.mark.parametrize(
    ("estimator", "by_token"),
    quick.thirds([(e, False) for e in ESTIMATORS] + [(e, True) for e in OF_TOKENS]),
)
def test_bits_do_not_depend_on_the_program(estimator, by_token):
    """Eager and compiled, a longer axis, groups without a token, and eight devices."""
    size, data = 7, draw(1, 8, 7, 9, by_token=by_token)
    expected = ours(data, size, estimator)
    assert np.array_equal(np.asarray(eager(data, size, estimator)), expected)
    rows = {"greedy_rewards": 2}  # as many more as there are groups more
    larger = {
        name: np.pad(x, [(0, rows.get(name, 14)), (0, 12)][: x.ndim]) for name, x in data.items()
    }
    found = ours(larger, size, estimator)
    assert np.array_equal(found[:56, :9] if found.ndim == 2 else found[:56], expected)
    assert not np.any(found[56:])
    place = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    assert np.array_equal(ours(jax.device_put(data, place), size, estimator), expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_stands_off_the_mask_is_not_read(estimator):
    data = draw(2, 3, 4, 7, by_token=True)
    data["mask"][::2, 0] = False  # off the mask before a token, not only after
    dirty = dict(data)
    for name in ("token_rewards", "energies", "log_ratio"):
        dirty[name] = np.where(data["mask"], data[name], np.nan)
    dirty["rewards"] = np.where(data["mask"].any(axis=1), data["rewards"], np.float32(np.nan))
    assert np.array_equal(ours(dirty, 4, estimator), ours(data, 4, estimator))


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_batch", "pass_at_k"])
def test_a_mask_in_which_all_rows_have_tokens_changes_no_bit(estimator):
    data = draw(3, 2, 7, 9, dropped=False)
    plain = ours({"rewards": data["rewards"]}, 7, estimator)
    assert np.array_equal(plain, ours(data, 7, estimator))


@pytest.mark.parametrize("estimator", GROUP_BASELINES)
def test_equal_rewards_give_exact_zeros(estimator):
    # 0.1 is not a binary fraction: the mean of seven of them need not be the same float.
    data = draw(4, 2, 7, 9)
    data["mask"][::3] = True  # a token of one row alone has no baseline
    data["rewards"] = np.full(14, 0.1, np.float32)
    assert not np.any(ours(data, 7, estimator))


@pytest.mark.parametrize("estimator", ["grpo", "pass_at_k"])
def test_equal_rewards_give_exact_zeros_without_eps(estimator):
    rewards = np.full(14, 0.1, np.float32)
    assert not np.any(ours({"rewards": rewards}, 7, estimator, eps=0.0))


@pytest.mark.parametrize(
    "estimator", [e for e in GROUP_BASELINES if e != "reinforce_plus_plus_baseline"]
)
def test_one_group_of_equal_rewards_gives_zeros_beside_another(estimator):
    data = draw(5, 2, 7, 9)
    data["mask"][::3] = True
    data["rewards"][:7] = 0.1
    found = ours(data, 7, estimator)
    assert not np.any(found[:7])
    assert np.any(found[7:])


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_finds_no_signal_in_equal_rewards_or_in_one_token(estimator):
    data = draw(6, 3, 4, 7, dropped=False)
    assert np.any(ours(data, 4, estimator))
    assert not np.any(ours({**data, "rewards": np.full(12, 0.1, np.float32)}, 4, estimator))
    data["mask"][:] = False
    data["mask"][0, 0] = True
    assert not np.any(ours(data, 4, estimator))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_batch_without_a_token_gives_zeros(estimator):
    data = draw(7, 3, 4, 7)
    data["mask"][:] = False
    with jax.debug_nans(True):
        assert not np.any(ours(data, 4, estimator))


def test_a_tie_for_the_best_gives_zero_and_only_the_best_is_rewarded():
    rewards = jnp.asarray([3, 3, 1, 0, 0, 1, 0, 0], jnp.float32)
    found = ours({"rewards": rewards}, 4, "pass_at_k")
    np.testing.assert_allclose(found, [0, 0, 0, 0, 0, 2, 0, 0], rtol=1e-5)


@pytest.mark.parametrize("estimator", WEIGHTED)
def test_on_policy_weights_give_the_unweighted_form(estimator):
    data = draw(8, 3, 4, 7)
    zeros = ours({**data, "log_ratio": np.zeros_like(data["log_ratio"])}, 4, estimator)
    data.pop("log_ratio")
    assert np.array_equal(zeros, ours(data, 4, estimator))


@pytest.mark.parametrize("estimator", WEIGHTED)
def test_weights_are_capped_and_held_finite(estimator):
    data = draw(9, 3, 4, 7)
    even = {**data, "log_ratio": np.zeros_like(data["log_ratio"])}
    far = {**data, "log_ratio": np.full((12, 7), 50, np.float32)}
    capped = ours(far, 4, estimator, weight_cap=0.5)
    np.testing.assert_allclose(capped, ours(even, 4, estimator), rtol=1e-5, atol=1e-6)
    for extreme in (-np.inf, -1e30, 1e30, np.inf):
        far["log_ratio"][:6] = extreme
        assert np.all(np.isfinite(ours(far, 4, estimator)))


def test_weighted_baselines_reduce_to_simpler_ones():
    data = draw(10, 3, 4, 7, dropped=False)
    even = {**data, "energies": np.full((12, 7), 0.3, np.float32)}
    even["log_ratio"] = np.zeros_like(data["log_ratio"])
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(ours(even, 4, "off_policy_baseline"), ours(data, 4, "opo"))
    full = {**even, "mask": np.ones((12, 7), bool)}
    mean = ours(data, 4, "dr_grpo")
    close(ours(full, 4, "opo"), mean)
    # One token, the same for all: its baseline is the group's mean. Also if nothing has energy.
    for energy in (0.3, 0.0, -1e-7):
        first = {**full, "energies": np.full((12, 7), energy, np.float32)}
        found = ours(first, 4, BY_TOKEN)
        close(found, np.broadcast_to(mean[:, None], found.shape))


def test_a_token_baseline_uses_only_the_rows_that_have_the_token():
    data = draw(11, 1, 4, 7)
    data["mask"] = np.arange(7)[None, :] < np.asarray([2, 5, 5, 7])[:, None]
    data["rewards"] = np.asarray([4, 1, 0, 3], np.float32)
    found = ours(data, 4, BY_TOKEN)
    changed = ours({**data, "rewards": np.asarray([9, 1, 0, 3], np.float32)}, 4, BY_TOKEN)
    assert np.array_equal(found[:, 2:], changed[:, 2:])
    assert np.all(found[1:, :2] != changed[1:, :2])
    # Alone at its tail, a row has no baseline, whatever the others' rewards.
    assert np.all(found[3, 5:] == 3.0)
    assert not np.any(found[~data["mask"]])


@pytest.mark.parametrize("estimator", sorted(set(OF_TOKENS) - {BY_TOKEN}))
def test_rewards_of_tokens_that_are_zero_change_no_value_and_later_ones_none_before(estimator):
    data = draw(16, 3, 4, 7, by_token=True)
    zeros = ours({**data, "token_rewards": np.zeros((12, 7), np.float32)}, 4, estimator)
    plain = {name: x for name, x in data.items() if name != "token_rewards"}
    whole = ours(plain, 4, estimator)
    np.testing.assert_allclose(zeros, per_token(whole, data["mask"]), rtol=1e-6)
    earlier = {**data, "token_rewards": data["token_rewards"].copy()}
    earlier["token_rewards"][:, 0] += 1.0
    if estimator != "reinforce_plus_plus":  # whose mean and deviation are of the batch
        found, before = ours(data, 4, estimator), ours(earlier, 4, estimator)
        assert np.array_equal(found[:, 1:], before[:, 1:])
        assert np.all((found != before)[:, 0] == data["mask"][:, 0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_an_estimator_needs_is_enough_and_is_missed_by_name(estimator):
    data = draw(12, 3, 4, 7)
    wanted = needs(estimator)
    assert wanted <= {"mask", "greedy_rewards", "energies"}
    enough = {name: data[name] for name in ("rewards", *wanted)}
    assert np.all(np.isfinite(ours(enough, 4, estimator)))
    for name in wanted:
        with pytest.raises(InputError, match=f"{name} is None, but the estimator '{estimator}'"):
            eager({**enough, name: None}, 4, estimator)


@pytest.mark.parametrize("name", FIELDS[1:])
def test_arrays_of_another_shape_are_refused(name):
    data = draw(13, 3, 4, 7, by_token=True)
    data[name] = data[name][:-1]
    with pytest.raises(InputError, match=f"{name} has shape") as error:
        eager(data, 4, "off_policy_baseline")
    assert "\n" not in str(error.value)


def test_other_wrong_input_is_refused():
    data = draw(14, 3, 4, 7)
    with pytest.raises(InputError, match=r"energies has shape \(12, 6\).* must be \(12, 7\)"):
        eager({**data, "energies": data["energies"][:, 1:]}, 4, BY_TOKEN)
    for cap in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match=f"weight_cap is {cap}"):
            eager(data, 4, BY_TOKEN, weight_cap=cap)
    with pytest.raises(InputError, match="mask is None, but token_rewards need it"):
        eager({"rewards": jnp.ones(4), "token_rewards": jnp.ones((4, 7))}, 2, "rloo")
    with pytest.raises(InputError, match=r"shape \(7,\)"):
        advantages(jnp.ones(7), samples=2, estimator="rloo")
    for call in (needs, partial(check_samples, samples=2)):
        with pytest.raises(InputError, match="did you mean 'dr_grpo'"):
            call("dr_grp")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="samples = 0: must be 1 or more"):
        check_samples("remax", 0)


@pytest.mark.parametrize("estimator", GROUP_BASELINES)
def test_a_group_baseline_refuses_groups_of_one(estimator):
    with pytest.raises(InputError, match="samples = 1: must be 2 or more"):
        check_samples(estimator, 1)
    with pytest.raises(InputError, match="samples = 1: must be 2 or more"):
        advantages(jnp.ones(4), samples=1, estimator=estimator)


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - set(GROUP_BASELINES)))
def test_other_estimators_take_groups_of_one(estimator):
    check_samples(estimator, 1)
    data = draw(15, 5, 1, 4, dropped=False)
    assert np.all(np.isfinite(ours(data, 1, estimator)))


def test_informative_groups_are_those_with_two_values():
    rewards = jnp.asarray([0.1, 0.1, 0.1, 0.0, 0.1, 0.1, 1.0, 1.0, 1.0], jnp.float32)
    kept = informative_groups(rewards, 3)
    assert kept.tolist() == [False] * 3 + [True] * 3 + [False] * 3


def test_nan_rewards_are_seen_not_swallowed():
    rewards = jnp.asarray([1.0, np.nan, 0.0, 1.0], jnp.float32)
    assert informative_groups(rewards, 2).tolist() == [True] * 4
    for estimator in ("grpo", "dr_grpo", "rloo", "pass_at_k"):
        found = ours({"rewards": rewards}, 2, estimator)
        assert np.isnan(found[:2]).any()
        assert np.all(np.isfinite(found[2:]))
