"""Metrics against float64 NumPy, on quiet, wild and empty batches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tim_jax import corrections, metrics
from tim_jax.common.errors import InputError
from tim_jax.numerics import strict
from tim_jax.objectives import Objective

mismatch_metrics = jax.jit(metrics.mismatch_metrics)
TIS = corrections.scale_by_truncated_ratio("token", lower=0.5, upper=2.0)
described: Any = jax.jit(corrections.correction_metrics)
update_skew: Any = jax.jit(metrics.update_skew)
bounded = jax.jit(lambda log_ratio, mask: corrections.bound_metrics(TIS, {"old": log_ratio}, mask))
profiles = jax.jit(functools.partial(metrics.mismatch_profiles, bins=5))


def f32(x) -> Any:
    return np.asarray(x, np.float32)


def wide(x) -> Any:
    """In the upper left of zeros f32[12, 37], or of False: the shape of `draw`, compiled once."""
    x = np.asarray(x)
    x = x if x.dtype == bool else x.astype(np.float32)
    return np.pad(x, [(0, 12 - x.shape[0]), (0, 37 - x.shape[-1])][: x.ndim])


def draw(seed, spread, rows=12, width=37, empty=True) -> tuple[Any, Any, Any]:
    """Log-probs of trainer and rollout, and their mask, of NumPy, which stands for JAX's arrays."""
    rng = np.random.default_rng(seed)
    train = f32(-rng.exponential(size=(rows, width)) * rng.choice([0.01, 1, 6], (rows, 1)))
    rollout = np.float32(train + spread * rng.standard_normal((rows, width)))
    rollout = np.where(rng.random((rows, width)) < 0.3, train, rollout)
    lengths = rng.integers(1, width + 1, rows)
    lengths[0] = 0 if empty else lengths[0]
    mask = np.arange(width)[None, :] < lengths[:, None]
    return np.where(mask, train, np.nan), np.where(mask, rollout, np.nan), mask


def reference(train, rollout, mask):
    """The definitions of mismatch_metrics, in float64."""
    # The log-ratio is the float32 difference of float32 log-probs: that is the quantity defined.
    d = (train - rollout)[mask].astype(np.float64)
    t, q = train[mask].astype(np.float64), rollout[mask].astype(np.float64)
    held = np.clip(d, -20, 20)
    r, p_train, p_rollout = np.exp(held), np.exp(np.minimum(t, 0)), np.exp(np.minimum(q, 0))
    rows = [(train - rollout)[i, m].astype(np.float64) for i, m in enumerate(mask) if m.any()]
    sums, means = np.array([x.sum() for x in rows]), np.array([x.mean() for x in rows])
    product = np.exp(np.clip(sums, -20, 20))
    difference = np.abs(p_train - p_rollout)
    log_ppl = [
        np.array([-x[i, m].astype(np.float64).mean() for i, m in enumerate(mask) if m.any()])
        for x in (train, rollout)
    ]
    ppl = [x.mean() for x in log_ppl]
    perplexities = [np.exp(np.minimum(x, 80)) for x in log_ppl]
    quantiles = {"p01": 0.01, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p99": 0.99, "p999": 0.999}
    return {
        "tokens": mask.sum(),
        "unequal_tokens": np.sum(train[mask] != rollout[mask]),
        "exact_share": np.mean(train[mask] == rollout[mask]),
        "log_ratio_mean": d.mean(),
        "log_ratio_abs_mean": np.abs(d).mean(),
        "log_ratio_abs_max": np.abs(d).max(),
        "mult_error": np.exp(np.abs(held)).mean(),
        "log_ppl_train": ppl[0],
        "log_ppl_rollout": ppl[1],
        "log_ppl_diff": -means.mean(),
        "log_ppl_diff_min": (-means).min(),
        "log_ppl_diff_max": (-means).max(),
        "ppl_train": perplexities[0].mean(),
        "ppl_rollout": perplexities[1].mean(),
        "ppl_ratio": np.exp(np.minimum(-means, 80)).mean(),
        "log_ppl_abs_diff_sum": np.abs(sums).mean(),
        "log_ppl_abs_diff_mean": np.abs(means).mean(),
        "kl_k1": -d.mean(),
        "kl_k3": (np.expm1(held) - held).mean(),
        "chi2_token": (r**2).mean() - 1,
        "chi2_sequence": (product**2).mean() - 1,
        "ratio_mean": r.mean(),
        "ratio_std": r.std(),
        "ratio_min": r.min(),
        "ratio_max": r.max(),
        **{f"ratio_{k}": np.quantile(r, v) for k, v in quantiles.items()},
        "ess_token": r.mean() ** 2 / (r**2).mean(),
        "ess_sequence": product.mean() ** 2 / (product**2).mean(),
        "sequence_log_ratio_min": sums.min(),
        "sequence_log_ratio_max": sums.max(),
        "outside_0.999_1.002": np.mean((r < 0.999) | (r > 1.002)),
        "outside_1pct": np.mean((r < 0.99) | (r > 1.01)),
        "outside_5pct": np.mean((r < 0.95) | (r > 1.05)),
        "extreme_share": np.mean(np.abs(d) > np.log(2)),
        "entropy_estimate": -t.mean(),
        "prob_diff_mean": difference.mean(),
        "prob_diff_std": difference.std(),
        "prob_diff_max": difference.max(),
        "prob_correlation": np.corrcoef(p_train, p_rollout)[0, 1],
    }


@pytest.mark.parametrize("spread", [1e-5, 1e-3, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("seed", range(3))
def test_scalars_match_the_definitions(seed, spread):
    train, rollout, mask = draw(seed, spread)
    ours = mismatch_metrics(train, rollout, mask)
    expected = reference(train, rollout, mask)
    assert set(ours) == set(expected)
    # Rounded inputs to a difference: |p - q| is known no better than an ulp of p.
    loose = {"prob_diff_mean": 1e-7, "prob_diff_max": 1e-7, "prob_diff_std": 1e-7}
    # The exponential of a rounded sum is known no better than the sum; near 16 its ulp is 1e-6.
    near = {"chi2_sequence": 3e-6, "ess_sequence": 3e-6}
    near |= dict.fromkeys(("ppl_train", "ppl_rollout", "ppl_ratio"), 3e-6)
    for name, value in expected.items():
        close = pytest.approx(value, rel=near.get(name, 1e-6), abs=loose.get(name, 1e-9))
        assert float(ours[name]) == close, name


def test_the_indicator_of_the_paper_and_of_verl_differ_by_the_length():
    train = np.full((12, 37), -1.0, np.float32)
    mask = np.broadcast_to(np.arange(37) < 30, (12, 37))
    ours = mismatch_metrics(train, train - np.float32(0.01), mask)
    assert float(ours["log_ppl_abs_diff_sum"]) == pytest.approx(0.3, rel=1e-4)
    assert float(ours["log_ppl_abs_diff_mean"]) == pytest.approx(0.01, rel=1e-4)


def test_equal_bits_read_as_no_mismatch():
    train, _, mask = draw(0, 1.0)
    ours = mismatch_metrics(train, train, mask)
    zero = ["kl_k1", "kl_k3", "chi2_token", "chi2_sequence", "ratio_std", "prob_diff_max"]
    zero += ["unequal_tokens", "log_ppl_abs_diff_sum", "extreme_share", "outside_0.999_1.002"]
    assert all(float(ours[name]) == 0.0 for name in zero)
    one = ["exact_share", "ratio_mean", "ratio_min", "ratio_max", "ess_token", "mult_error"]
    assert all(float(ours[name]) == 1.0 for name in one)
    assert float(ours["prob_correlation"]) == pytest.approx(1.0, abs=1e-6)


def test_one_ulp_is_an_unequal_token():
    train = wide(np.full((1, 4), -0.5))
    rollout = train.copy()
    rollout[0, 2] = np.nextafter(f32(-0.5), np.float32(0))
    ours = mismatch_metrics(train, rollout, wide(np.ones((1, 4), bool)))
    assert int(ours["unequal_tokens"]) == 1
    assert float(ours["exact_share"]) == 0.75


@pytest.mark.parametrize("spread", [0.0, 800.0])
def test_nothing_is_nan_for_empty_or_wild_batches(spread):
    train, rollout, mask = draw(1, spread)
    log_ratio = train - rollout
    for kept in (mask, np.zeros_like(mask)):
        found = [
            mismatch_metrics(train, rollout, kept),
            described(f32(kept), kept, kept=kept),
            bounded(log_ratio, kept),
            update_skew(np.exp(np.clip(log_ratio, -20, 20)), np.ones(12, np.float32), kept),
            profiles(train, rollout, kept),
        ]
        assert all(not np.any(np.isnan(x)) for x in jax.tree.leaves(found))
    assert float(mismatch_metrics(train, rollout, 0 * mask > 0)["exact_share"]) == 0.0


@jax.jit
def measure_all(train, rollout, mask):
    weights = jnp.exp(train - rollout)
    return {
        **metrics.mismatch_metrics(train, rollout, mask),
        **corrections.correction_metrics(weights, mask, kept=weights < 2.0),
        **corrections.bound_metrics(TIS, {"old": train - rollout}, mask),
        **metrics.update_skew(weights, jnp.linspace(-1.0, 1.0, 16), mask),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharding_changes_no_bit(kind):
    train, rollout, mask = draw(2, 0.1, rows=16, width=40)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    place = NamedSharding(mesh, PartitionSpec("x", "y"))
    alone = measure_all(train, rollout, mask)
    split = measure_all(*(jax.device_put(x, place) for x in (train, rollout, mask)))
    for name, value in alone.items():
        assert np.asarray(value).tobytes() == np.asarray(split[name]).tobytes(), name


def test_correction_metrics_tell_masking_from_rejection():
    log_ratio = wide(np.log([[1.0, 3.0, 0.4], [1.0, 1.0, 9.0], [1.2, 1.0, 1.0]]))
    mask = wide([[True] * 3, [True] * 3, [True, True, False]])
    coefficients = wide([[1.0, 0.0, 0.4], [0.0, 0.0, 0.0], [1.2, 1.0, 7.0]])
    rejected = wide([[True] * 3, [False] * 3, [True, True, False]])
    ours = described(coefficients, mask, kept=rejected)
    assert "removed_share" not in described(coefficients, mask)
    ours |= bounded(log_ratio, mask)
    kept = np.asarray([1.0, 0.0, 0.4, 0, 0, 0, 1.2, 1.0])
    expected = {
        "zero_share": 4 / 8,
        "masked_share": 1 / 8,
        "rejected_share": 1 / 3,
        "removed_share": 3 / 8,
        "clipped_high_share": 2 / 8,
        "clipped_low_share": 1 / 8,
        "coefficient_mean": kept.mean(),
        "coefficient_std": kept.std(),
        "coefficient_min": 0.0,
        "coefficient_max": 1.2,
        "coefficient_p50": np.median(kept),
        "coefficient_p99": np.quantile(kept, 0.99),
        "ess": kept.mean() ** 2 / (kept**2).mean(),
    }
    for name, value in expected.items():
        assert float(ours[name]) == pytest.approx(value, rel=1e-6), name


def test_effective_sample_size_of_a_recipe_is_verls():
    train, rollout, mask = draw(3, 0.5)
    weigh = jax.jit(functools.partial(corrections.coefficients, corrections.sequence_tis()))
    weights = weigh(log_ratio=train - rollout, mask=mask)
    ours = described(weights, mask)
    w = np.asarray(weights)[mask].astype(np.float64)
    assert float(ours["ess"]) == pytest.approx(1 / ((w / w.mean()) ** 2).mean(), rel=1e-6)


def test_bounds_at_any_level_count_a_token_once():
    log_ratio = jnp.log(jnp.asarray([[3.0, 1.0, 1.0], [1.5, 1.5, 1.5], [0.1, 1.0, 1.0]]))
    mask = jnp.asarray([[True] * 3, [True] * 3, [True, True, False]])

    def shares(*blocks):
        log_ratios: dict[corrections.Reads, jax.Array] = {"old": log_ratio, "current": -log_ratio}
        return corrections.bound_metrics(corrections.chain(*blocks), log_ratios, mask)

    low, high = "clipped_low_share", "clipped_high_share"
    token, sequence = corrections.token_tis(), corrections.sequence_tis()
    assert shares() == shares(corrections.k3_rejection()) == {}
    geometric = corrections.geometric_mis(lower=0.5, upper=1.45)
    current = corrections.declared(token, reads="current")
    icepop = corrections.icepop(lower=0.2, upper=2.0)
    cases = {
        (token,): {low: 0.0, high: 1 / 8},
        (sequence,): {low: 0.0, high: 6 / 8},
        (token, sequence, corrections.token_mis()): {low: 0.0, high: 6 / 8},
        (geometric,): {low: 2 / 8, high: 3 / 8},
        (current,): {low: 0.0, high: 1 / 8},
        (icepop, current): {low: 1 / 8, high: 2 / 8},
    }
    found = jax.jit(lambda: [shares(*blocks) for blocks in cases])()
    for ours, expected in zip(found, cases.values(), strict=True):
        assert {k: float(x) for k, x in ours.items()} == pytest.approx(expected)


def test_each_block_says_what_it_does_alone():
    ratios = np.asarray([[3.0, 0.2, 1.0], [1.0, 1.1, 0.9], [0.4, 1.0, 1.0]])
    mask = jnp.asarray([[True] * 3, [True] * 3, [True, True, False]])
    chain = corrections.build(
        [
            {"name": "token_tis", "cap": 2.0},
            {"name": "normalise", "unit": "sequence"},
            {"name": "reject", "statistic": "k1", "over": "token", "lower": 0.5, "upper": 2.5},
            {"name": "reject", "statistic": "k1", "over": "token", "upper": 2.5},
            {"name": "reject", "statistic": "k3", "over": "mean", "upper": 0.1},
            {"name": "veto", "threshold": 0.3},
        ]
    )
    run = jax.jit(functools.partial(corrections.correct, chain))
    found = run(log_ratio=f32(np.log(ratios)), mask=mask).metrics
    weights = np.asarray([(2.0 + 0.2 + 1.0) / 3, 1.0, 0.7])
    expected = {
        "above_share/scale_by_truncated_ratio": 1 / 8,
        "below_share/reject_k1_over_token": 2 / 8,
        "above_share/reject_k1_over_token": 1 / 8,
        "rejected_tokens/reject_k1_over_token": 3 / 8,
        "rejected_sequences/reject_k1_over_token": 2 / 3,
        "above_share/reject_k1_over_token_2": 1 / 8,
        "rejected_tokens/reject_k1_over_token_2": 1 / 8,
        "rejected_sequences/reject_k1_over_token_2": 1 / 3,
        "above_share/reject_k3_over_mean": 2 / 3,  # 0.90 and 0.16
        "rejected_tokens/reject_k3_over_mean": 5 / 8,
        "rejected_sequences/reject_k3_over_mean": 2 / 3,
        "rejected_tokens/veto": 3 / 8,
        "rejected_sequences/veto": 1 / 3,
        "sequence_weight_mean": weights.mean(),
        "sequence_weight_std": weights.std(ddof=1),
        "sequence_weight_min": 0.7,
        "sequence_weight_max": weights.max(),
        "sequence_weight_max_deviation": 0.3,
        "normaliser": weights.mean(),
    }
    by_block = {name for name in found if "/" in name}
    assert by_block == {name for name in expected if "/" in name}
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, rel=1e-6), name


def test_a_block_whose_bound_moves_or_that_lacks_an_array_is_not_reported():
    moving = corrections.scheduled(corrections.token_tis, cap=lambda count: 2.0)
    log_ratio, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
    found = jax.eval_shape(
        functools.partial(corrections.correct, moving), log_ratio=log_ratio, mask=mask
    )
    assert not any("/" in name or "sequence_weight" in name for name in found.metrics)
    log_ratios: dict[corrections.Reads, Any] = {"old": log_ratio, "current": log_ratio}
    assert corrections.block_metrics(corrections.kpop(), log_ratios, mask) == {}
    given = {"log_probs": {"old": log_ratio - 1.0, "current": log_ratio - 1.0}}
    found = jax.jit(
        lambda given: corrections.block_metrics(corrections.kpop(), log_ratios, mask, **given)
    )(given)
    assert float(found["rejected_tokens/reject_binary_kl_over_token"]) == 0.0


def test_a_nan_shows_in_every_figure_of_the_coefficients():
    coefficients = wide([[1.0, np.nan, 0.5, 7.0], [0.0, 2.0, 7.0, np.nan]])
    mask = wide([[True, True, True, False], [True, True, False, False]])
    ours = described(coefficients, mask)
    for name, value in ours.items():
        shown = name.startswith("coefficient") or name == "ess"
        assert np.isnan(float(value)) == shown, name
    clean = described(np.nan_to_num(coefficients), mask)
    assert np.all(np.isfinite([float(value) for value in clean.values()]))
    train, rollout, tokens = draw(8, 0.1)
    row, column = np.argwhere(tokens)[3]
    train[row, column] = np.nan
    found = mismatch_metrics(train, rollout, tokens)
    for name in (
        "kl_k3",
        "log_ratio_abs_max",
        "ratio_max",
        "ratio_p50",
        "ess_token",
        "ess_sequence",
    ):
        assert np.isnan(float(found[name])), name


@pytest.mark.parametrize("dtype", quick.some(["bfloat16", "float16"], 0))
def test_16_bits_give_the_bits_of_their_values_in_float32(dtype):
    train, rollout, mask = draw(9, 0.1)
    # The differences are taken of the cast values: those of 16 bits would be rounded once more.
    given = [jnp.asarray(x).astype(dtype) for x in (train, rollout)]
    cast = [np.asarray(x.astype(jnp.float32)) for x in given]
    for measure in (mismatch_metrics, profiles):
        jax.tree.map(np.testing.assert_array_equal, measure(*given, mask), measure(*cast, mask))
    rounding = {"bfloat16": 0.12, "float16": 2e-3}[dtype]
    ours, expected = (update_skew(jnp.exp(x[0] - x[1]), x[1], mask) for x in (given, cast))
    for name, value in expected.items():
        assert ours[name].dtype == jnp.float32
        assert float(ours[name]) == pytest.approx(float(value), rel=rounding), name


def test_integer_masks_are_understood():
    train, rollout, mask = draw(9, 0.1)
    both = [profiles(train, rollout, m) for m in (mask, mask.astype(np.int32))]
    jax.tree.map(np.testing.assert_array_equal, *both)
    shapes = [jax.eval_shape(mismatch_metrics, train, rollout, m) for m in (mask, np.int32(mask))]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("train", "rollout", "mask"),
    [
        ((4, 3), (4, 3), (4, 1)),
        ((4, 3), (4, 3), (3,)),
        ((4, 1), (4, 3), (4, 3)),
        ((4, 3), (3,), (4, 3)),
        ((1, 3), (4, 3), (4, 3)),
    ],
)
def test_log_probs_that_would_broadcast_are_refused_in_one_line(train, rollout, mask):
    given = jnp.zeros(train), jnp.zeros(rollout), jnp.ones(mask, bool)
    for measure in (metrics.mismatch_metrics, metrics.mismatch_profiles):
        with pytest.raises(InputError, match="it must be the mask's") as error:
            measure(*given)
        assert "\n" not in str(error.value)


def test_lists_are_read_as_arrays():
    given: Any = [[-0.5, -1.25]], [[-0.5, -1.0]], [[1, 1]]
    found = jax.jit(lambda: metrics.mismatch_metrics(*given))()
    assert int(found["tokens"]) == 2
    assert float(found["log_ratio_abs_max"]) == 0.25


def test_a_packed_row_is_refused_by_its_shape():
    row = jnp.zeros(3)
    for measure in (metrics.mismatch_metrics, metrics.mismatch_profiles):
        with pytest.raises(InputError, match=r"mask has shape \(3,\); it must be \[batch, tokens"):
            measure(row, row, jnp.ones(3, bool))


@pytest.mark.parametrize("shape", [(3,), (4, 1), (1, 3), ()])
def test_advantages_of_the_skew_are_by_sequence_or_by_token(shape):
    ratio, mask = f32(np.full((4, 3), 1.5)), jnp.ones((4, 3), bool)
    with pytest.raises(InputError, match="advantages may be"):
        metrics.update_skew(ratio, f32(np.ones(shape)), mask)


def test_the_skew_is_the_same_of_advantages_by_sequence_and_by_token():
    ratio, mask = wide(np.full((4, 3), 1.5)), wide(np.ones((4, 3), bool))
    advantages = np.pad(f32([1.0, -2.0, 3.0, 0.0]), (0, 8))
    by_sequence = update_skew(ratio, advantages, mask)
    by_token = np.tile(advantages[:, None], (1, 37))
    assert by_sequence == update_skew(ratio, by_token, mask)
    assert float(by_sequence["update_skew"]) == pytest.approx(-0.25)


def test_update_skew_is_equation_5():
    rng = np.random.default_rng(4)
    r = np.float32(np.exp(0.3 * rng.standard_normal((12, 37))))
    advantages = f32(np.tile([1.0, -1.0, 0.5, -0.5, 0.0, 2.0], 2))
    mask = rng.random((12, 37)) < 0.7
    ours = update_skew(r, advantages, mask)
    c = -(r.astype(np.float64) - 1) * advantages[:, None]
    side = np.broadcast_to(advantages[:, None], mask.shape)
    assert float(ours["update_skew"]) == pytest.approx(c[mask].mean(), rel=1e-5)
    positive = c[mask & (side > 0)].mean()
    assert float(ours["update_skew_positive"]) == pytest.approx(positive, rel=1e-5)
    negative = c[mask & (side < 0)].mean()
    assert float(ours["update_skew_negative"]) == pytest.approx(negative, rel=1e-5)


def test_recompute_mode_is_blind_where_bypass_mode_sees():
    """Recompute mode's PPO ratio says nothing of the sampler; the ratio to the rollout does."""
    train, rollout, mask = draw(5, 0.5)
    old = train
    seen = mismatch_metrics(train, rollout, mask)
    blind = mismatch_metrics(train, old, mask)
    assert float(seen["kl_k3"]) > 0.05
    assert float(blind["kl_k3"]) == 0.0


def test_profiles_count_every_token_once():
    train, rollout, mask = draw(6, 0.3)
    found = jax.tree.map(np.asarray, profiles(train, rollout, mask))
    d = np.abs(train - rollout)
    for profile in found.values():
        assert int(profile.counts.sum()) == mask.sum()
        total = (profile.counts * np.float64(profile.means)).sum()
        assert total == pytest.approx(d[mask].sum(), rel=1e-5)
    position = np.minimum(np.arange(37) * 5 // 37, 4)[None, :] * np.ones_like(mask, int)
    for k in range(5):
        chosen = d[mask & (position == k)]
        assert int(found["by_position"].counts[k]) == len(chosen)
        assert float(found["by_position"].means[k]) == pytest.approx(chosen.mean(), rel=1e-5)
    assert int(found["by_difference"].counts[0]) == np.sum(d[mask] < 1e-8)
    rare = mask & (np.exp(train) < 1e-4)
    assert int(found["by_probability"].counts[0]) == rare.sum()


def test_loss_metrics_are_shares_of_tokens():
    log_probs = np.log(f32([[0.5, 0.9, 1.5, 9.0], [0.5, 0.9, 1.5, 9.0]]))
    mask = jnp.asarray([[True, True, True, False]] * 2)
    given = jnp.zeros((2, 4)), f32([1.0, -1.0])

    @jax.jit
    def measured(log_probs):
        return metrics.loss_metrics(Objective().token_losses(log_probs, *given, mask=mask), mask)

    ours = measured(log_probs)
    assert float(ours["clipped_low_share"]) == pytest.approx(1 / 6)
    assert float(ours["clipped_high_share"]) == pytest.approx(1 / 6)
    assert float(ours["ppo_ratio_max"]) == pytest.approx(1.5)
    assert float(ours["ppo_ratio_mean"]) == pytest.approx(2.9 / 3)


def test_divergences_of_distributions():
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((2, 4, 11))
    p, q = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    q[0, :5] = 0.0
    q /= q.sum(axis=-1, keepdims=True)
    m = (p + q) / 2

    def kl(a, b):
        return np.sum(np.where(a > 0, a * np.log(np.where(a > 0, a, 1) / b), 0), axis=-1)

    with np.errstate(divide="ignore"):
        log_p, log_q = f32(np.log(p)), f32(np.log(q))
    divergence = jax.jit(metrics.jensen_shannon)
    np.testing.assert_allclose(divergence(log_p, log_q), (kl(p, m) + kl(q, m)) / 2, rtol=2e-5)
    assert np.all(np.asarray(divergence(log_q, log_q)) == 0.0)
    expected = -np.sum(np.where(q > 0, q * np.log(np.where(q > 0, q, 1)), 0), axis=-1)
    np.testing.assert_allclose(jax.jit(metrics.entropy)(log_q), expected, rtol=1e-5)


def test_noise_scale_of_a_known_gradient():
    signal, noise = 0.7, 12.0
    ours = metrics.gradient_noise_scale(
        jnp.float32(signal + noise / 8), jnp.float32(signal + noise / 64), small=8, big=64
    )
    assert float(ours["gradient_signal"]) == pytest.approx(signal, rel=1e-4)
    assert float(ours["gradient_noise"]) == pytest.approx(noise, rel=1e-4)
    assert float(ours["noise_scale"]) == pytest.approx(noise / signal, rel=1e-4)
    none = metrics.gradient_noise_scale(jnp.float32(10.0), jnp.float32(1.0), small=8, big=64)
    assert np.isinf(float(none["noise_scale"]))
    with pytest.raises(InputError, match="small = 8 must be at least 1, and below big = 8"):
        metrics.gradient_noise_scale(jnp.float32(1.0), jnp.float32(1.0), small=8, big=8)


def test_entropy_has_a_gradient_where_a_token_is_impossible():
    gradient = jax.jit(jax.grad(lambda x: metrics.entropy(jax.nn.log_softmax(x))))
    found = gradient(f32([1.0, 2.0, -np.inf]))
    # Of two tokens alone: -p_i (log p_i + H).
    p = np.exp([1.0, 2.0]) / np.exp([1.0, 2.0]).sum()
    expected = -p * (np.log(p) - (p * np.log(p)).sum())
    np.testing.assert_allclose(found[:2], expected, rtol=1e-5)
    assert found[2] == 0.0


@pytest.mark.parametrize("low", [-8.0, -19.0])
def test_the_effective_sample_size_of_small_ratios_is_float64_s(low):
    sums = np.linspace(low, low + 1.5, 8)
    d = np.repeat(sums[:, None] / 10, 10, axis=1).astype(np.float32)
    found = mismatch_metrics(wide(d), wide(0 * d), wide(np.ones(d.shape, bool)))
    weights = np.exp(np.asarray(d, np.float64).sum(axis=1))
    expected = np.mean(weights) ** 2 / np.mean(weights**2)
    assert float(found["ess_sequence"]) == pytest.approx(expected, rel=1e-5)
    row = wide(sums[None])
    alone = mismatch_metrics(row, 0 * row, wide(np.ones((1, 8), bool)))
    assert float(alone["ess_token"]) == pytest.approx(expected, rel=1e-5)


def test_a_correction_that_rejects_all_divides_by_no_zero():
    ones = jnp.ones((2, 3), jnp.float32)
    with jax.debug_nans(True):
        made = corrections.correct(
            corrections.geometric_rejection(), log_ratio=ones, mask=ones.astype(bool)
        )
    assert not np.asarray(made.kept).any()


def test_a_nan_log_prob_is_seen_by_every_share_and_moment():
    rng = np.random.default_rng(0)
    train = wide(-rng.exponential(size=(4, 6)))
    spoilt = train.copy()
    spoilt[1, 2] = np.nan
    found = mismatch_metrics(spoilt, train, wide(np.ones((4, 6), bool)))
    counts = ("tokens", "log_ppl_rollout", "ppl_rollout")  # of the mask and of the rollout alone
    shares = {"unequal_tokens": 1, "exact_share": 23 / 24, "extreme_share": 1 / 24}
    shares |= {f"outside_{band}": 1 / 24 for band in metrics.BANDS}
    for name, value in found.items():
        if name in shares:
            assert float(value) == pytest.approx(shares[name]), name
        elif name not in counts:
            assert np.isnan(float(value)), name


def test_a_share_is_below_1_if_one_of_many_is_missing():
    whole = jnp.ones(20_000_000, bool)
    assert float(strict.share(whole, whole)) == 1.0
    assert float(strict.share(whole.at[5].set(False), whole)) == np.nextafter(np.float32(1), 0)


@pytest.mark.parametrize("shape", [(3, 0), (0, 4)])
def test_metrics_of_no_tokens_are_those_of_nothing(shape):
    nothing = np.zeros(shape, np.float32)
    found = mismatch_metrics(nothing, nothing, np.ones(shape, bool))
    masked_out = mismatch_metrics(*(wide(np.zeros((1, 1), x)) for x in (float, float, bool)))
    assert {k: float(v) for k, v in found.items()} == {k: float(v) for k, v in masked_out.items()}


def test_the_load_of_long_runs_fits_its_counter():
    """5.7 million positions of 48 layers of 128 experts, 8 of them a token."""
    loads = np.full((48, 128), 356_250, np.int32)
    loads[:, 0] += 1000
    loads[:, 1] -= 1000
    one = jnp.ones((1, 2))
    found = metrics.routing_metrics(one, one, one > 0, jnp.asarray(loads))["load_max"]
    assert float(found) == pytest.approx(loads.max() / loads.mean(), rel=1e-6)


@pytest.mark.parametrize("how", ["explicit", "shard_map"])
def test_expert_loads_of_rows_on_several_devices(how):
    rng = np.random.default_rng(0)
    routes = rng.integers(0, 4, (4, 5, 2, 2)).astype(np.int32)
    inside = rng.random((4, 5)) < 0.7
    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    rows = PartitionSpec("x")
    count = functools.partial(metrics.expert_loads, experts=4)
    split = count
    if how == "shard_map":
        split = jax.shard_map(
            lambda *each: jax.lax.psum(count(*each), "x"),
            mesh=mesh,
            in_specs=rows,
            out_specs=PartitionSpec(),
        )
    placed = jax.device_put((routes, inside), NamedSharding(mesh, rows))
    np.testing.assert_array_equal(
        jax.jit(split)(*placed), count(jnp.asarray(routes), jnp.asarray(inside))
    )
