"""Every recipe against its definition in float64, and verl's presets against verl's pipeline.

The formulas here are written from the definitions, row by row, without the library's functions.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tim_jax import corrections
from tim_jax.objectives.objective import Aggregation, Denominator, token_weights

CLOSE = 1e-5  # a statistic this close to its bound may fall on either side in float32


def held(x):
    return np.clip(x, -20.0, 20.0)


@functools.partial(jax.jit, static_argnums=0)
def applied(correction, arrays):
    """Of a first batch the coefficients, and the tokens that are kept."""
    start = arrays["mask"].astype(jnp.float32)
    return corrections.apply(correction, start, correction.init(start), **arrays)[:2]


class Row:
    """One sequence in float64: its tokens, and the decisions that were too close to call."""

    def __init__(self, d, log_probs, advantage):
        self.d, self.log_probs, self.advantage = d, log_probs, advantage
        self.close = np.zeros(len(d), bool)

    def inside(self, x, lower=None, upper=None, slack=0.0):
        x = np.asarray(x, np.float64)
        good = np.ones(x.shape, bool)
        for bound, side in ((lower, 1.0), (upper, -1.0)):
            if bound is not None:
                good &= side * (x - bound) >= 0
                self.close |= np.abs(x - bound) <= CLOSE * max(abs(bound), 1e-3) + slack
        return good.astype(np.float64)

    def token(self):
        return np.exp(held(self.d))

    def sequence(self):
        return np.exp(held(self.d.sum())) * np.ones(len(self.d))

    def geometric(self):
        return np.exp(held(self.d.sum() / max(len(self.d), 1))) * np.ones(len(self.d))

    def geometric_kept(self, lower, upper):
        mean = held(self.d).sum() / max(len(self.d), 1)
        return self.inside(np.exp(mean), lower, upper) * np.ones(len(self.d))

    def k3(self):
        x = held(self.d)
        # expm1 alone still cancels near 0; two terms of the series are enough there in float64.
        return np.where(np.abs(x) < 1e-4, x**2 / 2 + x**3 / 6, np.expm1(x) - x)

    def k3_mean_kept(self, bound):
        return self.inside(self.k3().sum() / max(len(self.d), 1), None, bound) * np.ones(
            len(self.d)
        )

    def k3_max_kept(self, bound):
        return float(np.all(self.inside(self.k3(), None, bound))) * np.ones(len(self.d))

    def probabilities(self):
        return np.exp(self.log_probs), np.exp(self.log_probs - self.d)

    def binary_kl_kept(self, bound):
        p, q = (np.clip(x, 1e-6, 1 - 1e-6) for x in self.probabilities())

        def divergence(p, q):
            return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))

        # Near 1 a float32's 1 - p is off by 6e-8, and with it the divergence.
        slack = 1.2e-7 * np.maximum((1 - p) / (1 - q), (1 - q) / (1 - p))
        return self.inside(divergence(p, q), None, bound, slack) * self.inside(
            divergence(q, p), None, bound, slack
        )

    def dppo_kept(self, bound):
        p, q = self.probabilities()
        if self.advantage > 0:
            return self.inside(p - q, None, bound)
        if self.advantage < 0:
            return self.inside(p - q, -bound, None)
        return np.ones(len(self.d))

    def off_policy_kept(self, bound):
        if self.advantage >= 0 or len(self.d) == 0:
            return np.ones(len(self.d))
        return self.inside(-held(self.d).mean(), None, bound) * np.ones(len(self.d))


def truncated(x, cap):
    return np.minimum(x, cap)


def masked(row, x, lower, upper):
    return x * row.inside(x, lower, upper)


REFERENCE = {
    "none": lambda r: np.ones(len(r.d)),
    "token_tis": lambda r: truncated(r.token(), 2.0),
    "sequence_tis": lambda r: truncated(r.sequence(), 2.0),
    "token_mis": lambda r: masked(r, r.token(), None, 2.0),
    "sequence_mis": lambda r: masked(r, r.sequence(), None, 3.0),
    "geometric_mis": lambda r: masked(r, r.geometric(), 0.999, 1.001),
    "icepop": lambda r: masked(r, r.token(), 0.5, 5.0),
    "kpop": lambda r: r.token() * r.binary_kl_kept(0.1),
    "geometric_rejection": lambda r: r.geometric_kept(0.999, 1.001),
    "geometric_rejection_token_tis": lambda r: (
        r.geometric_kept(0.999, 1.001) * truncated(r.token(), 2.0)
    ),
    "geometric_rejection_sequence_tis": lambda r: (
        r.geometric_kept(0.999, 1.001) * truncated(r.sequence(), 2.0)
    ),
    "k3_rejection": lambda r: r.k3_mean_kept(0.01),
    "k3_rejection_token_tis": lambda r: r.k3_mean_kept(0.01) * truncated(r.token(), 2.0),
    "sequence_tis_product_rejection": lambda r: (
        r.inside(np.exp(held(r.d).sum()), 0.5, 2.0) * truncated(r.sequence(), 2.0)
    ),
    "seq_mask_tis": lambda r: r.geometric_kept(0.999, 1.002) * r.token(),
    "token_tis_veto": lambda r: (
        float(np.all(r.inside(np.exp(r.d), 1e-4, None))) * truncated(r.token(), 2.0)
    ),
    "trust_region_masking": lambda r: r.k3_max_kept(0.05),
    "dppo": lambda r: r.dppo_kept(0.2),
    "off_policy_sequence_mask": lambda r: r.off_policy_kept(0.5),
    "error_rejection": lambda r: (
        r.inside(np.exp(np.abs(held(r.d))).sum() / max(len(r.d), 1), None, 2.0) * np.ones(len(r.d))
        if len(r.d)
        else np.ones(0)
    ),
    "vexact": lambda r: r.geometric_kept(0.999, 1.001) * truncated(r.token(), 2.0),
}
REQUIRED = {"trust_region_masking": {"bound": 0.05}}


def draw(seed, spread, rows=8, width=24):
    """A batch with an empty row, a full row and a one-token row, NaN in the padding."""
    rng = np.random.default_rng(seed)
    scale = spread * 10.0 ** rng.uniform(-2, 0.5, size=(rows, 1))
    d = np.float32(scale * rng.standard_normal((rows, width)))
    extreme = rng.random((rows, width)) < (0.0 if spread < 1e-2 else 0.05)
    d = np.where(extreme, rng.choice([-700, -69, -12, 12, 69, 700], size=d.shape), d)
    d = d.astype(np.float32)
    lengths = np.concatenate([[0, width, 1], rng.integers(1, width + 1, rows - 3)])
    mask = np.arange(width)[None, :] < lengths[:, None]
    log_probs = np.float32(-rng.exponential(size=d.shape) * 10.0 ** rng.uniform(-4, 1))
    advantages = np.float32(rng.choice([-1.5, 0.0, 0.7], size=rows))
    poison = np.float32(np.nan)
    return np.where(mask, d, poison), np.where(mask, log_probs, poison), advantages, mask


def reference(name, d, log_probs, advantages, mask):
    expected, close = np.zeros(d.shape), np.zeros(d.shape, bool)
    for i, length in enumerate(mask.sum(axis=1)):
        row = Row(np.float64(d[i, :length]), np.float64(log_probs[i, :length]), advantages[i])
        with np.errstate(over="ignore"):
            expected[i, :length] = REFERENCE[name](row)
        close[i, :length] = row.close
    return expected, close


# What takes a statistic of the batch has a reference of its own.
OF_THE_BATCH = {"ais"}


def test_every_recipe_has_a_reference():
    assert set(REFERENCE) | OF_THE_BATCH == set(corrections.RECIPES)
    assert not set(REFERENCE) & OF_THE_BATCH


@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 1e-6, 1e-4, 1e-2, 0.3, 3.0, 60.0]))
@settings(deadline=None, max_examples=60)
def test_recipes_match_the_definition(seed, spread):
    arrays = draw(seed, spread)
    found = correct_all(inputs(seed, spread))
    for name in REFERENCE:
        expected, close = reference(name, *arrays)
        assert close.sum() <= 0.5 * arrays[-1].sum(), name
        np.testing.assert_allclose(
            np.where(close, 0, found[name][0]), np.where(close, 0, expected), 1e-6, err_msg=name
        )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_raw_ratios_match_from_1e_minus_30_to_1e30(level):
    rng = np.random.default_rng(0)
    d = rng.uniform(-69.1, 69.1, size=(64, 33)).astype(np.float32)
    d[32:] *= 0.01
    mask = np.arange(33)[None, :] < rng.integers(1, 34, size=(64, 1))
    ours, _ = applied(corrections.scale_by_ratio(level), {"log_ratio": d, "mask": mask})
    x = np.where(mask, d.astype(np.float64), 0.0)
    if level != "token":
        x = x.sum(axis=1, keepdims=True) * np.ones_like(x)
        x = x / mask.sum(axis=1, keepdims=True) if level == "geometric" else x
    # The geometric exponent is rounded twice; from 16 on half a unit in its last place is 9.5e-7.
    np.testing.assert_allclose(
        ours, np.where(mask, np.exp(held(x)), 0), rtol=2.2e-6 if level == "geometric" else 1e-6
    )


REJECTIONS: dict[tuple[Any, Any], float] = {
    ("k2", "token"): 2.0,
    ("k2", "mean"): 2.5,
    ("k2", "sum"): 4.0,
    ("k2", "max"): 2.5,
    ("k3", "token"): 0.3,
    ("k3", "sum"): 1.0,
    ("ratio", "mean"): 1.3,
    ("ratio", "max"): 4.0,
    ("error", "token"): 1.5,
    ("error", "max"): 4.0,
}


@jax.jit
def all_rejections(arrays):
    return {
        (statistic, over): applied(corrections.reject(statistic, over=over, upper=bound), arrays)[0]
        for (statistic, over), bound in REJECTIONS.items()
    }


@pytest.mark.parametrize("spread", [0.01, 0.5, 3.0])
def test_rejections_match_the_definition(spread):
    d, _, _, mask = draw(3, spread)
    found = all_rejections({"log_ratio": d, "mask": mask})
    x = held(np.where(mask, d, 0.0).astype(np.float64))
    values = {"k2": x**2 / 2, "k3": np.expm1(x) - x, "ratio": np.exp(x), "error": np.exp(np.abs(x))}
    length = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    for (statistic, over), bound in REJECTIONS.items():
        value = np.where(mask, values[statistic], 0.0)
        value = {
            "token": value,
            "sum": value.sum(axis=1, keepdims=True),
            "mean": value.sum(axis=1, keepdims=True) / length,
            "max": value.max(axis=1, keepdims=True),
        }[over]
        assert np.min(np.abs(value - bound)) > 1e-4, "the seed puts a statistic on its bound"
        expected = (mask & (value <= bound)).astype(np.float32)
        assert np.array_equal(np.asarray(found[statistic, over]), expected), (statistic, over)


@pytest.mark.parametrize("over", ["token", "sum", "mean", "max"])
def test_k1_bounds_are_on_the_ratio_and_not_on_its_inverse(over):
    d = jnp.log(jnp.asarray([[0.55, 1.0], [0.65, 1.0], [1.55, 1.0], [1.7, 1.0]]))
    block = corrections.reject("k1", over=over, lower=0.6, upper=1.6)
    kept, _ = applied(block, {"log_ratio": d, "mask": np.ones((4, 2), bool)})
    alone = [[0, 1], [1, 1], [1, 1], [0, 1]]
    rows = [[0, 0], [1, 1], [1, 1], [0, 0]]
    mean = [[1, 1]] * 4
    assert kept.tolist() == {"token": alone, "sum": rows, "mean": mean, "max": rows}[over]


def verl(
    d, mask, *, weight=None, threshold=2.0, rejection=None, bounds: Any = None, batch_norm=False
):
    """verl's rollout correction in float64: (weights, modified response mask)."""
    log_ratio = np.where(mask, d, 0.0).astype(np.float64)
    lengths = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    weights = np.ones(d.shape)
    if weight == "token":
        weights = np.exp(held(log_ratio))
    elif weight == "sequence":
        weights = np.exp(held(log_ratio.sum(axis=1, keepdims=True))) * np.ones(d.shape)
    weights = weights * mask
    if isinstance(threshold, tuple):
        weights = np.where((weights < threshold[0]) | (weights > threshold[1]), 0.0, weights)
    elif weight is not None:
        weights = np.minimum(weights, threshold)
    if batch_norm and weight == "token":
        weights = weights / (weights.sum() / mask.sum())
    elif batch_norm:
        rows = weights.sum(axis=1) / lengths[:, 0]
        weights = weights / rows[mask.any(axis=1)].mean()
    if rejection is None:
        return weights, mask
    k1 = -held(log_ratio)
    k3 = np.exp(-k1) - 1 + k1
    if rejection == "seq_mean_k3":
        keep = (k3 * mask).sum(axis=1, keepdims=True) / lengths <= bounds
    else:
        total = (k1 * mask).sum(axis=1, keepdims=True)
        total = total / lengths if rejection == "seq_mean_k1" else total
        keep = (total >= np.log(bounds[0])) & (total <= np.log(bounds[1]))
    return weights, mask & keep


# verl compares -log r with the logarithms of its bounds, so ours are their inverses, swapped.
GEO = (0.999, 1.001)
OURS = {"lower": 1 / 1.001, "upper": 1 / 0.999}
DENOMINATORS = ("response", "survivors", "verl")
VERL_PRESETS = {
    "token_is": ("token_tis", {}, {"weight": "token"}),
    "seq_is": ("sequence_tis", {}, {"weight": "sequence"}),
    "token_icepop": ("icepop", {}, {"weight": "token", "threshold": (0.5, 5.0)}),
    "seq_is_rs": (
        "sequence_tis_product_rejection",
        {},
        {"weight": "sequence", "rejection": "seq_sum_k1", "bounds": (0.5, 2.0)},
    ),
    "geo_rs": ("geometric_rejection", OURS, {"rejection": "seq_mean_k1", "bounds": GEO}),
    "geo_rs_token_tis": (
        "geometric_rejection_token_tis",
        OURS,
        {"weight": "token", "rejection": "seq_mean_k1", "bounds": GEO},
    ),
    "geo_rs_seq_tis": (
        "geometric_rejection_sequence_tis",
        OURS,
        {"weight": "sequence", "rejection": "seq_mean_k1", "bounds": GEO},
    ),
    "k3_rs": ("k3_rejection", {}, {"rejection": "seq_mean_k3", "bounds": 0.01}),
    "k3_rs_token_tis": (
        "k3_rejection_token_tis",
        {},
        {"weight": "token", "rejection": "seq_mean_k3", "bounds": 0.01},
    ),
    "disabled": ("none", {}, {}),
}


def agg_loss(losses, mask, mode, sequences):
    """verl's agg_loss over the last two axes, with its number of sequences in the mini-batch."""
    if mode == "token_mean":
        return (losses * mask).sum(axis=(-2, -1)) / mask.sum()
    rows = (losses * mask).sum(axis=-1)
    if mode == "sequence_mean_token_mean":
        rows = rows / (mask.sum(axis=-1) + 1e-8)
    return (rows * (mask.sum(axis=-1) > 0)).sum(axis=-1) / sequences


def loss_weights(mask, mode, sequences):
    """The derivative of agg_loss, which is linear, with respect to each token's loss."""
    units = np.eye(mask.size).reshape(mask.size, *mask.shape)
    return agg_loss(units, mask, mode, sequences).reshape(mask.shape)


@jax.jit
def weighted_presets(d, mask):
    """By preset the kept tokens, and its coefficients times the weights of tokens."""
    found = {}
    for preset, (name, options, _) in VERL_PRESETS.items():
        correction = corrections.build([{"name": name, **options}])
        coefficients, kept = applied(correction, {"log_ratio": d, "mask": mask})
        found[preset] = (
            kept,
            {
                (how, denominator): coefficients
                * token_weights(mask, aggregation=how, kept=kept, denominator=denominator)
                for how in AGGREGATIONS
                for denominator in DENOMINATORS
            },
        )
    return found


@functools.cache
def verl_batch():
    """Log-ratios of 16 sequences, from quiet to wild; one is empty."""
    rng = np.random.default_rng(11)
    scale = np.array([1e-5, 3e-4, 1e-3, 5e-3, 0.05, 0.1, 0.2, 2.0] * 2)[:, None]
    d = np.float32(scale * rng.standard_normal((16, 40)))
    lengths = rng.integers(5, 41, size=(16, 1))
    lengths[5] = 0
    return d, np.arange(40)[None, :] < lengths


@jax.jit
def all_weights(mask, kept):
    """By aggregation and denominator; under "" without a word of what is kept."""
    how: dict[str, Any] = {"max_length": 40}
    return {
        (aggregation, denominator): token_weights(
            mask, aggregation=aggregation, denominator=denominator, kept=kept, **how
        )
        for aggregation in (*AGGREGATIONS, "constant_length")
        for denominator in DENOMINATORS
    } | {
        (aggregation, ""): token_weights(mask, aggregation=aggregation, **how)
        for aggregation in (*AGGREGATIONS, "constant_length")
    }


AGGREGATIONS: list[Aggregation] = [
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
]


@pytest.mark.parametrize("preset", VERL_PRESETS)
def test_verl_presets_give_verl_its_loss_weights(preset):
    d, mask = verl_batch()
    kept, ours = weighted_presets(d, mask)[preset]
    verl_options = VERL_PRESETS[preset][2]
    weights, modified = verl(d, mask, **verl_options)
    assert np.array_equal(np.asarray(kept), modified)
    if "rejection" in verl_options:
        assert 0 < modified.any(axis=1).sum() < 15, "the case must keep some and reject some"
    sequences = mask.any(axis=1).sum()
    theirs_of: dict[Denominator, Any] = {
        "verl": (modified, sequences),
        "survivors": (modified, modified.any(axis=1).sum()),
        "response": (mask, sequences),
    }
    for (how, denominator), found in ours.items():
        their_mask, their_sequences = theirs_of[denominator]
        theirs = weights * modified * loss_weights(their_mask, how, their_sequences)
        np.testing.assert_allclose(
            found, theirs, rtol=2e-6, atol=1e-12, err_msg=f"{how} {denominator}"
        )


@pytest.mark.parametrize("name", ["geometric_rejection", "k3_rejection_token_tis", "kpop"])
def test_survivors_weigh_as_if_the_rejected_had_never_been_sampled(name):
    d, mask = verl_batch()
    options = {"bound": 0.01} if name == "kpop" else {}
    correction = corrections.build([{"name": name, **options}])
    log_probs = np.full(d.shape, -0.7, np.float32)
    _, kept = applied(correction, {"log_ratio": d, "mask": mask, "log_probs": log_probs})
    assert 0 < int(kept.sum()) < int(mask.sum())
    whole, among = all_weights(mask, mask), all_weights(mask, kept)
    alone = all_weights(kept, kept)
    for how in (*AGGREGATIONS, "constant_length"):
        ours = np.where(kept, among[how, "survivors"], 0.0)
        np.testing.assert_array_equal(ours, alone[how, ""], how)
        # And where no token is rejected, the denominators are one.
        for denominator in DENOMINATORS:
            np.testing.assert_array_equal(whole[how, denominator], whole[how, ""], how)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_verl_batch_normalisation(level):
    d, _, _, mask = draw(5, 0.3)
    chain = corrections.build(
        [
            {"name": f"{level}_tis"},
            {"name": "normalise", "unit": level},
            {"name": "reject", "statistic": "k1", "over": "sum", "lower": 0.5, "upper": 2.0},
        ]
    )
    ours, _ = applied(chain, {"log_ratio": d, "mask": mask})
    weights, kept = verl(
        np.nan_to_num(d),
        mask,
        weight=level,
        batch_norm=True,
        rejection="seq_sum_k1",
        bounds=(0.5, 2.0),
    )
    np.testing.assert_allclose(ours, weights * kept, rtol=1e-6)


def ais(d, mask, cap=2.0, kl_scale=0.01, level="token"):
    """The documented mixture in float64: (coefficients, m)."""
    d = np.where(mask, np.float64(d), 0.0)
    ratio = np.exp(held(d))
    if level != "token":
        total = d.sum(axis=1, keepdims=True) * np.ones(d.shape)
        length = 1 if level == "sequence" else np.maximum(mask.sum(axis=1, keepdims=True), 1)
        ratio = np.exp(held(total / length))
    w = np.minimum(ratio, cap)
    x = held(d[mask])
    k3 = np.where(np.abs(x) < 1e-4, x**2 / 2 + x**3 / 6, np.expm1(x) - x).mean()
    reliability = w[mask].mean() ** 2 / (w[mask] ** 2).mean()
    severity = 1 - np.exp(-k3 / kl_scale)
    v = w[mask].std() / w[mask].mean()
    m = reliability * max(severity, v / (1 + v))
    return np.where(mask, 1 + m * (w - 1), 0.0), m


@functools.partial(jax.jit, static_argnums=4)
def run_ais(d, mask, cap, kl_scale, level):
    mixing = corrections.mix_in_adaptively(level, upper=cap, kl_scale=kl_scale)
    return corrections.coefficients(mixing, log_ratio=d, mask=mask)


@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 1e-5, 1e-3, 1e-2, 0.1, 1.0, 60.0]),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    numbers=st.sampled_from([(2.0, 0.01), (1.2, 1.0)]),
)
@settings(deadline=None, max_examples=40)
def test_ais_matches_its_formula(seed, spread, level, numbers):
    d, _, _, mask = draw(seed, spread)
    cap, kl_scale = numbers
    expected, m = ais(d, mask, cap, kl_scale, level)
    found = run_ais(jnp.asarray(d), jnp.asarray(mask), cap, kl_scale, level)
    ours = np.asarray(found, np.float64)
    # 1 + m (w - 1) cancels where w is near 0.
    np.testing.assert_allclose(ours, expected, rtol=3e-6, atol=5e-7)
    assert 0.0 <= m <= 1.0
    # One m for all tokens, between none of the correction and all of it.
    full = np.where(mask, expected - 1, 0.0) / max(m, 1e-300)
    clear = mask & (np.abs(full) > 0.1)
    shares = (ours[clear] - 1) / full[clear]
    assert np.all((shares > -2e-6) & (shares < 1 + 2e-6))
    np.testing.assert_allclose(shares, m, atol=2e-5)


def test_ais_is_nothing_without_mismatch_and_moves_towards_tis_with_it():
    rng = np.random.default_rng(4)
    noise, mask = np.float32(rng.standard_normal((8, 24))), np.ones((8, 24), bool)

    def moved(d, kl_scale=0.01):
        """The share of the way to TIS, by least squares."""
        d = np.float32(d)
        mixed = np.float64(run_ais(d, mask, 2.0, kl_scale, "token")) - 1
        tis = np.minimum(np.exp(np.float64(d)), 2.0) - 1
        return (mixed * tis).sum() / (tis**2).sum()

    ones = run_ais(np.zeros_like(noise), mask, 2.0, 0.01, "token")
    assert np.all(np.asarray(ones) == 1.0)
    shares = [moved(scale * noise) for scale in (1e-3, 1e-2, 0.03, 0.1)]
    assert shares == sorted(shares)
    assert shares[0] < 0.01 < 0.3 < shares[-1]
    assert moved(0.03 * noise, kl_scale=1e-4) > 0.9 > 0.1 > moved(0.03 * noise, kl_scale=10.0)
    # The same large ratio everywhere: as reliable as severe, and so all of TIS.
    assert moved(np.full((8, 24), 3.0)) == pytest.approx(1.0, abs=1e-6)
    # And where few tokens would carry everything, less of it.
    lonely = np.where(np.arange(24) == 0, 1.0, -6.0) * np.ones((8, 1))
    assert moved(lonely) < 0.1


def case(name):
    return corrections.build([{"name": name, **REQUIRED.get(name, {})}])


@jax.jit
def correct_all(arrays):
    """Of each recipe the coefficients and the kept tokens."""
    return {name: applied(case(name), arrays) for name in corrections.RECIPES}


def inputs(seed, spread):
    names = ("log_ratio", "log_probs", "advantages", "mask")
    return dict(zip(names, map(jnp.asarray, draw(seed, spread)), strict=True))


# The recipes whose zeros stay in the denominator, and those that take them out.
MASKING = {"token_mis", "sequence_mis", "geometric_mis", "icepop", "dppo"}
MASKING |= {"off_policy_sequence_mask"}
WEIGHTING = {"none", "token_tis", "sequence_tis", "ais"}


@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 1e-3, 0.1, 1.0]))
@settings(deadline=None, max_examples=15)
def test_correct_keeps_all_but_what_a_rejecting_block_zeroed(seed, spread):
    arrays = inputs(seed, spread)
    mask = np.asarray(arrays["mask"])
    for name, (coefficients, kept) in correct_all(arrays).items():
        zeroed = np.asarray(coefficients) == 0.0
        expected = mask if name in MASKING | WEIGHTING else mask & ~zeroed
        assert np.array_equal(np.asarray(kept), expected), name


def test_every_recipe_that_zeroes_does_so_somewhere():
    """So that the test above says something of each."""
    found = [correct_all(inputs(seed, spread)) for seed in range(3) for spread in (0.1, 1.0)]
    masks = [inputs(seed, 1.0)["mask"] for seed in range(3) for _ in range(2)]
    for name in set(corrections.RECIPES) - WEIGHTING:
        zeros = sum(
            np.sum(np.asarray(mask) & (np.asarray(result[name][0]) == 0.0))
            for result, mask in zip(found, masks, strict=True)
        )
        assert zeros > 0, name


def test_kept_does_not_depend_on_what_was_masked_before():
    arrays = inputs(1, 0.3)
    mask, rejection = (
        corrections.icepop(lower=0.99, upper=1.01),
        corrections.k3_rejection(bound=0.02),
    )
    _, alone = applied(rejection, arrays)
    assert 0 < int(alone.sum()) < int(arrays["mask"].sum())
    for chain in (corrections.chain(mask, rejection), corrections.chain(rejection, mask)):
        found, kept = applied(chain, arrays)
        assert np.array_equal(np.asarray(kept), np.asarray(alone))
        survivors = np.asarray(arrays["mask"]) & (np.asarray(found) != 0.0)
        assert int(survivors.sum()) < int(alone.sum())
    # A stage that starts from masked coefficients finds the same.
    masked, _ = applied(mask, arrays)
    later = corrections.apply(rejection, masked, rejection.init(masked), **arrays)
    assert np.array_equal(np.asarray(later.kept), np.asarray(alone))


def figures(coefficients, mask, kept):
    """correction_metrics in float64."""
    c, kept = np.asarray(coefficients, np.float64)[mask], np.asarray(kept)
    zero = mask & (np.asarray(coefficients) == 0.0)
    full = mask.any(axis=1)
    rejected = full & ~(mask & ~zero).any(axis=1)
    shares = {"p01": 0.01, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p99": 0.99, "p999": 0.999}
    return {
        "zero_share": zero.sum() / mask.sum(),
        "masked_share": (zero & ~rejected[:, None]).sum() / mask.sum(),
        "rejected_share": rejected.sum() / full.sum(),
        "removed_share": (mask & ~kept).sum() / mask.sum(),
        "coefficient_mean": c.mean(),
        "coefficient_std": c.std(),
        "coefficient_min": c.min(),
        "coefficient_max": c.max(),
        **{f"coefficient_{k}": np.quantile(c, v) for k, v in shares.items()},
        "ess": c.mean() ** 2 / (c**2).mean(),
    }


@functools.cache
def measured(name):
    """What `correct` says of a recipe, and `coefficients`."""
    return jax.jit(
        lambda arrays: (
            corrections.correct(case(name), **arrays),
            corrections.coefficients(case(name), **arrays),
        )
    )


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("token_tis", None, 2.0),
        ("icepop", 0.5, 5.0),
        ("k3_rejection_token_tis", None, 2.0),
        ("dppo", None, None),
        ("ais", None, 2.0),
    ],
)
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_correct_counts_what_it_did(name, low, high, spread):
    arrays = inputs(2, spread)
    found, alone = measured(name)(arrays)
    assert np.array_equal(np.asarray(found.coefficients), np.asarray(alone))
    for ours, same in zip(found, correct_all(arrays)[name], strict=False):
        assert np.array_equal(np.asarray(ours), np.asarray(same))
    mask = np.asarray(arrays["mask"])
    expected = figures(found.coefficients, mask, found.kept)
    r = np.exp(held(np.asarray(arrays["log_ratio"], np.float64)[mask]))
    if high is not None:
        expected["clipped_high_share"] = np.mean(r > high)
        expected["clipped_low_share"] = 0.0 if low is None else np.mean(r < low)
        assert spread < 1.0 or expected["clipped_high_share"] > 0.0
    # Those of single blocks and of sequences' weights are held to references of their own.
    of_blocks = r"(below|above)_share/|rejected_(tokens|sequences)/|sequence_weight_|normaliser$"
    rest = {metric for metric in found.metrics if not re.match(of_blocks, metric)}
    assert rest == set(expected)
    for metric, value in expected.items():
        assert float(found.metrics[metric]) == pytest.approx(value, rel=2e-6, abs=1e-7), metric
        assert found.metrics[metric].dtype == jnp.float32
