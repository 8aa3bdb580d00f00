"""Advantages against float64 formulas by token, identities, and the bits of other programs."""

from functools import cache, partial
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from estimators import per_token, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tim_jax.common.errors import InputError
from tim_jax.objectives.advantages import (
    GROUP_BASELINES,
    Estimator,
    advantages,
    check_samples,
    informative_groups,
    needs,
)
from tim_jax.objectives.objective import token_weights

ESTIMATORS = get_args(Estimator)
BY_TOKEN = "optimal_token_baseline"
WEIGHTED = (BY_TOKEN, "off_policy_baseline")
OF_TOKENS = ("reinforce", "reinforce_plus_plus", "remax", BY_TOKEN)
# What only rewards are needed for.
PLAIN = ("grpo", "dr_grpo", "rloo", "reinforce_batch", "pass_at_k")
# Few shapes: each is a program of its own.
SHAPES = ((1, 2, 3), (2, 7, 9))
FIELDS = ("rewards", "mask", "token_rewards", "greedy_rewards", "energies", "log_ratio")
CLOSE = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def draw(seed, prompts=2, size=7, width=9, dropped=True) -> dict[str, Any]:
    """Rewards in eighths, ragged masks with some rows empty, and energies of real softmaxes."""
    rng = np.random.default_rng(seed)
    rows = prompts * size
    lengths = rng.integers(1, width + 1, rows)
    if dropped:
        lengths *= rng.uniform(size=rows) > 0.2
    logits = 2.0 * rng.standard_normal((rows, width, 5))
    pi = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return {
        "token_rewards": np.float32(rng.integers(-8, 8, (rows, width)) / 8),
        # Rounding alone would make the advantage of two rewards that are nearly equal.
        "rewards": np.float32(rng.integers(-20, 20, rows) / 8),
        "mask": np.arange(width)[None, :] < lengths[:, None],
        "greedy_rewards": np.float32(rng.integers(-20, 20, prompts) / 8),
        "energies": np.float32(1 - 2 * pi[..., 0] + np.square(pi).sum(axis=-1)),
        "log_ratio": np.float32(0.5 * rng.standard_normal((rows, width))),
    }


def eager(data, size, estimator, *names, **options):
    """The advantages of the rewards and the arrays of these names, of all if there are none."""
    arrays = {name: data[name] for name in names or data if name != "rewards"}
    return advantages(data["rewards"], samples=size, estimator=estimator, **arrays, **options)


@cache
def program(size, estimators, **options):
    return jax.jit(lambda data: {name: eager(data, size, name, **options) for name in estimators})


@cache
def whole_program(size, estimators):
    """Of every estimator without rewards of tokens, and of those that read them `by token`."""
    rest = [name for name in FIELDS if name != "token_rewards"]

    def both(data):
        found = {name: eager(data, size, name, *rest) for name in estimators}
        by_token = set(OF_TOKENS) & set(estimators)
        return found | {f"{name} by token": eager(data, size, name) for name in by_token}

    return jax.jit(both)


def ours(data, size=7, estimators=ESTIMATORS, **options) -> dict[str, np.ndarray]:
    of_all = not options and set(data) == set(FIELDS)
    compiled = whole_program if of_all else program
    return jax.tree.map(np.asarray, compiled(size, estimators, **options)(data))


@given(seed=st.integers(0, 9999), shape=st.sampled_from(SHAPES))
@settings(max_examples=60)
def test_advantages_match_the_definition(seed, shape):
    data = draw(seed, *shape)
    if data["mask"].sum() < 2:
        data["mask"][:, 0] = True
    # verl's 1e-8, over the smallest deviation that it allows, is 1e-4 of a reward.
    least = 1e-4 * max(1.0, float(np.abs(data["rewards"]).max()))
    for name, found in ours(data, shape[1]).items():
        estimator = name.removesuffix(" by token")
        read = data if name != estimator else {k: x for k, x in data.items() if "token" not in k}
        of_tokens = name != estimator or estimator == BY_TOKEN
        assert found.shape == (data["mask"].shape if of_tokens else data["rewards"].shape), name
        expected = reference(read, shape[1], estimator)
        np.testing.assert_allclose(
            per_token(found, data["mask"]), expected, rtol=2e-4, atol=least, err_msg=name
        )


# The others each alone, as in a run: if two share a divisor, XLA may divide by it in another way.
SOME = ("rloo", "reinforce_plus_plus", "opo", "pass_at_k", *WEIGHTED)
REST = [(name,) for name in ESTIMATORS if name not in SOME]


@pytest.mark.parametrize(
    "estimators",
    [SOME, *(pytest.param(one, marks=pytest.mark.slow) for one in REST)],
    ids=["some", *(name for (name,) in REST)],
)
def test_bits_do_not_depend_on_the_program(estimators):
    """A longer axis, groups without a token, and a device for each group."""
    data = draw(1)
    expected = ours(data)
    rows = {"greedy_rewards": 2}  # as many more as there are groups more
    larger = {
        name: np.pad(x, [(0, rows.get(name, 14)), (0, 12)][: x.ndim]) for name, x in data.items()
    }
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    split = jax.device_put(data, NamedSharding(mesh, PartitionSpec("x")))
    sharded = ours(split, estimators=estimators)
    for name, found in ours(larger, estimators=estimators).items():
        cut = found[:14, :9] if found.ndim == 2 else found[:14]
        assert np.array_equal(cut, expected[name]), name
        assert not np.any(found[14:]), name
        assert np.array_equal(sharded[name], expected[name]), name


def test_devices_may_have_parts_of_groups():
    """As on the meshes that `jax.make_mesh` makes unless it is told otherwise."""
    data, names = draw(1), ("rewards", "mask")
    mesh = jax.make_mesh((7,), ("x",), devices=jax.devices()[:7], axis_types=(AxisType.Explicit,))
    placed = NamedSharding(mesh, PartitionSpec("x"))
    split = {name: jax.device_put(data[name], placed) for name in names}
    found, expected = eager(split, 7, "rloo", "mask"), eager(data, 7, "rloo", "mask")
    assert np.array_equal(found, expected)
    kept = informative_groups(split["rewards"], 7)
    assert np.array_equal(kept, informative_groups(jnp.asarray(data["rewards"]), 7))
    weights = partial(token_weights, aggregation="sequence_mean_token_mean", parts=7)
    assert np.array_equal(weights(split["mask"]), weights(data["mask"]))


def test_a_device_may_have_groups_of_its_own_in_shard_map():
    data, rows = draw(1), PartitionSpec("x")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2], axis_types=(AxisType.Explicit,))
    split = [jax.device_put(data[name], NamedSharding(mesh, rows)) for name in ("rewards", "mask")]

    def of_one(rewards, mask):
        return eager({"rewards": rewards, "mask": mask}, 7, "rloo", "mask")

    found = jax.jit(jax.shard_map(of_one, mesh=mesh, in_specs=rows, out_specs=rows))(*split)
    assert np.array_equal(found, eager(data, 7, "rloo", "mask"))


@pytest.mark.parametrize("estimator", quick.thirds(ESTIMATORS))
def test_bits_are_the_same_if_it_is_not_compiled(estimator):
    data = draw(1)
    found = eager(data, 7, estimator, *(name for name in FIELDS if name != "token_rewards"))
    assert np.array_equal(np.asarray(found), ours(data)[estimator])


def test_what_stands_off_the_mask_is_not_read():
    data = draw(2)
    data["mask"][::2, 0] = False  # off the mask before a token, not only after
    dirty = dict(data)
    for name in ("token_rewards", "energies", "log_ratio"):
        dirty[name] = np.where(data["mask"], data[name], np.nan)
    dirty["rewards"] = np.where(data["mask"].any(axis=1), data["rewards"], np.float32(np.nan))
    jax.tree.map(np.testing.assert_array_equal, ours(dirty), ours(data))


def test_a_mask_in_which_all_rows_have_tokens_changes_no_bit():
    data = draw(3, dropped=False)
    whole = ours(data)
    for name, plain in ours({"rewards": data["rewards"]}, 7, PLAIN).items():
        assert np.array_equal(plain, whole[name]), name


def test_equal_rewards_give_exact_zeros():
    # 0.1 is not a binary fraction: the mean of seven of them need not be the same float.
    data = draw(4)
    data["mask"][::3] = True  # a token of one row alone has no baseline
    data["rewards"] = np.full(14, 0.1, np.float32)
    found = ours(data)
    assert not any(np.any(found[estimator]) for estimator in GROUP_BASELINES)
    scaled = ours({"rewards": data["rewards"]}, 7, ("grpo", "pass_at_k"), eps=0.0)
    assert not any(np.any(x) for x in scaled.values())


def test_one_group_of_equal_rewards_gives_zeros_beside_another():
    data = draw(5)
    data["mask"][::3] = True
    data["rewards"][:7] = 0.1
    found = ours(data)
    for estimator in set(GROUP_BASELINES) - {"reinforce_plus_plus_baseline"}:
        assert not np.any(found[estimator][:7]), estimator
        assert np.any(found[estimator][7:]), estimator


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_finds_no_signal_in_equal_rewards_or_in_one_token(estimator):
    data = draw(6, dropped=False)
    assert np.any(ours(data)[estimator])
    assert not np.any(ours({**data, "rewards": np.full(14, 0.1, np.float32)})[estimator])
    data["mask"][:] = False
    data["mask"][0, 0] = True
    assert not np.any(ours(data)[estimator])


def test_a_batch_without_a_token_gives_zeros():
    data = draw(7)
    data["mask"][:] = False
    assert not any(np.any(found) for found in ours(data).values())  # nor is any of them NaN


def test_a_tie_for_the_best_gives_zero_and_only_the_best_is_rewarded():
    rewards = np.asarray([3, 3, 1, 0, 0, 1, 0, 0], np.float32)
    found = ours({"rewards": rewards}, 4, ("pass_at_k",))["pass_at_k"]
    np.testing.assert_allclose(found, [0, 0, 0, 0, 0, 2, 0, 0], rtol=1e-5)


def test_on_policy_weights_give_the_unweighted_form():
    data = draw(8)
    zeros = ours({**data, "log_ratio": np.zeros_like(data["log_ratio"])})
    del data["log_ratio"], data["token_rewards"]
    for name, found in ours(data, 7, WEIGHTED).items():
        assert np.array_equal(zeros[name], found), name


def test_weights_are_capped_and_held_finite():
    data = draw(9)
    data["token_rewards"][:] = 0.0
    even = ours({**data, "log_ratio": np.zeros_like(data["log_ratio"])})
    far = {**data, "log_ratio": np.full((14, 9), 50, np.float32)}
    for name, capped in ours(far, 7, WEIGHTED, weight_cap=0.5).items():
        CLOSE(capped, even[name])
    for extreme in (-np.inf, -1e30, 1e30, np.inf):
        far["log_ratio"][:6] = extreme
        found = ours(far)
        assert all(np.all(np.isfinite(found[name])) for name in WEIGHTED)


def test_weighted_baselines_reduce_to_simpler_ones():
    data = draw(10, dropped=False)
    even = {**data, "energies": np.full((14, 9), 0.3, np.float32)}
    even["log_ratio"] = np.zeros_like(data["log_ratio"])
    plain = ours(data)
    CLOSE(ours(even)["off_policy_baseline"], plain["opo"])
    full = {**even, "mask": np.ones((14, 9), bool)}
    mean = plain["dr_grpo"]
    CLOSE(ours(full)["opo"], mean)
    # One token, the same for all: its baseline is the group's mean. Also if nothing has energy.
    for energy in (0.3, 0.0, -1e-7):
        found = ours({**full, "energies": np.full((14, 9), energy, np.float32)})[BY_TOKEN]
        CLOSE(found, np.broadcast_to(mean[:, None], found.shape))


def test_a_token_baseline_uses_only_the_rows_that_have_the_token():
    data = draw(11)
    data["mask"] = np.arange(9)[None, :] < np.asarray([2, 5, 5, 7, 2, 2, 2] * 2)[:, None]
    data["rewards"][:7] = [4, 1, 0, 3, 1, 1, 1]
    found = ours(data)[BY_TOKEN]
    data["rewards"][0] = 9
    changed = ours(data)[BY_TOKEN]
    assert np.array_equal(found[:, 2:], changed[:, 2:])
    assert np.all(found[1:7, :2] != changed[1:7, :2])
    # Alone at its tail, a row has no baseline, whatever the others' rewards.
    assert np.all(found[3, 5:7] == 3.0)
    assert not np.any(found[~data["mask"]])


@pytest.mark.parametrize("estimator", sorted(set(OF_TOKENS) - {BY_TOKEN}))
def test_rewards_of_tokens_that_are_zero_change_no_value_and_later_ones_none_before(estimator):
    data, by_token = draw(16), f"{estimator} by token"
    zeros = ours({**data, "token_rewards": np.zeros((14, 9), np.float32)})
    whole = per_token(zeros[estimator], data["mask"])
    np.testing.assert_allclose(zeros[by_token], whole, rtol=1e-6)
    earlier = {**data, "token_rewards": data["token_rewards"].copy()}
    earlier["token_rewards"][:, 0] += 1.0
    if estimator != "reinforce_plus_plus":  # whose mean and deviation are of the batch
        found, before = ours(data)[by_token], ours(earlier)[by_token]
        assert np.array_equal(found[:, 1:], before[:, 1:])
        assert np.all((found != before)[:, 0] == data["mask"][:, 0])


def test_what_an_estimator_needs_is_enough_and_is_missed_by_name():
    data = draw(12)
    wanted = {estimator: needs(estimator) for estimator in ESTIMATORS}
    assert set().union(*wanted.values()) == {"mask", "greedy_rewards", "energies"}
    enough = {e: {name: data[name] for name in ("rewards", *wanted[e])} for e in ESTIMATORS}
    run = jax.jit(lambda given: {name: eager(x, 7, name) for name, x in given.items()})
    for estimator, found in run(enough).items():
        assert np.all(np.isfinite(found)), estimator
        for name in wanted[estimator]:
            message = f"{name} is None, but the estimator '{estimator}'"
            with pytest.raises(InputError, match=message):
                eager({**enough[estimator], name: None}, 7, estimator)


@pytest.mark.parametrize("name", FIELDS[1:])
def test_arrays_of_another_shape_are_refused(name):
    data = draw(13)
    data[name] = data[name][:-1]
    with pytest.raises(InputError, match=f"{name} has shape") as error:
        eager(data, 7, "off_policy_baseline")
    assert "\n" not in str(error.value)


def test_other_wrong_input_is_refused():
    data = draw(14)
    with pytest.raises(InputError, match=r"energies has shape \(14, 8\).* must be \(14, 9\)"):
        eager({**data, "energies": data["energies"][:, 1:]}, 7, BY_TOKEN)
    for cap in (0.0, -1.0, float("nan")):
        with pytest.raises(InputError, match=f"weight_cap is {cap}"):
            eager(data, 7, BY_TOKEN, weight_cap=cap)
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


def test_other_estimators_take_groups_of_one():
    others = tuple(name for name in ESTIMATORS if name not in GROUP_BASELINES)
    for name, found in ours(draw(15, 5, 1, 4, dropped=False), 1, others).items():
        check_samples(cast(Any, name.removesuffix(" by token")), 1)
        assert np.all(np.isfinite(found)), name


def test_informative_groups_are_those_with_two_values():
    rewards = jnp.asarray([0.1, 0.1, 0.1, 0.0, 0.1, 0.1, 1.0, 1.0, 1.0], jnp.float32)
    kept = informative_groups(rewards, 3)
    assert kept.tolist() == [False] * 3 + [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    "estimator", ["grpo", "pass_at_k", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_deviations_of_large_rewards_do_not_overflow(estimator):
    """Their squares would, from 2e19 on; those of small ones keep their bits."""
    rewards, mask = jnp.asarray([0.0, 1.0, 2.0, 3.5]), jnp.ones((4, 3), bool)
    of = partial(advantages, samples=2, estimator=estimator, mask=mask, eps=0.0)
    for size in (2.0**49, 2.0**70, 2.0**120):
        np.testing.assert_allclose(of(rewards * size), of(rewards), rtol=1e-6, atol=1e-6)


def test_nan_rewards_are_seen_not_swallowed():
    rewards = jnp.asarray([1.0, np.nan, 0.0, 1.0], jnp.float32)
    assert informative_groups(rewards, 2).tolist() == [True] * 4
    for found in ours({"rewards": rewards}, 2, ("grpo", "dr_grpo", "rloo", "pass_at_k")).values():
        assert np.isnan(found[:2]).any()
        assert np.all(np.isfinite(found[2:]))
