"""Every recipe against its definition in float64, and verl's presets against verl's pipeline.

The formulas here are written from the definitions, row by row, without the library's functions.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tim_jax import corrections
from tim_jax.aggregation import token_weights

CLOSE = 1e-5  # a statistic this close to its bound may fall on either side in float32


def held(x):
    return np.clip(x, -20.0, 20.0)


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


def test_every_recipe_has_a_reference():
    assert set(REFERENCE) == set(corrections.RECIPES)


@pytest.mark.parametrize("name", REFERENCE)
@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 1e-6, 1e-4, 1e-2, 0.3, 3.0, 60.0]),
)
@settings(deadline=None, max_examples=20)
def test_recipes_match_the_definition(name, seed, spread):
    d, log_probs, advantages, mask = draw(seed, spread)
    ours = corrections.coefficients(
        corrections.build([{"name": name, **REQUIRED.get(name, {})}]),
        log_ratio=jnp.asarray(d),
        mask=jnp.asarray(mask),
        log_probs=jnp.asarray(log_probs),
        advantages=jnp.asarray(advantages),
    )
    expected, close = reference(name, d, log_probs, advantages, mask)
    assert close.sum() <= 0.5 * mask.sum()
    np.testing.assert_allclose(np.where(close, 0, ours), np.where(close, 0, expected), rtol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_raw_ratios_match_from_1e_minus_30_to_1e30(level):
    rng = np.random.default_rng(0)
    d = np.float32(rng.uniform(-69.1, 69.1, size=(64, 33)))
    d[32:] *= 0.01
    mask = np.arange(33)[None, :] < rng.integers(1, 34, size=(64, 1))
    ours = corrections.coefficients(
        corrections.scale_by_ratio(level), log_ratio=jnp.asarray(d), mask=jnp.asarray(mask)
    )
    x = np.where(mask, d.astype(np.float64), 0.0)
    if level != "token":
        x = x.sum(axis=1, keepdims=True) * np.ones_like(x)
        x = x / mask.sum(axis=1, keepdims=True) if level == "geometric" else x
    # The geometric exponent is rounded twice; from 16 on half a unit in its last place is 9.5e-7.
    np.testing.assert_allclose(
        ours, np.where(mask, np.exp(held(x)), 0), rtol=2.2e-6 if level == "geometric" else 1e-6
    )


@pytest.mark.parametrize(
    ("statistic", "over", "bound"),
    [
        ("k2", "token", 2.0),
        ("k2", "mean", 2.5),
        ("k2", "sum", 4.0),
        ("k2", "max", 2.5),
        ("k3", "token", 0.3),
        ("k3", "sum", 1.0),
        ("ratio", "mean", 1.3),
        ("ratio", "max", 4.0),
        ("error", "token", 1.5),
        ("error", "max", 4.0),
    ],
)
@pytest.mark.parametrize("spread", [0.01, 0.5, 3.0])
def test_rejections_match_the_definition(statistic, over, bound, spread):
    d, _, _, mask = draw(3, spread)
    ours = corrections.coefficients(
        corrections.reject(statistic, over=over, upper=bound),
        log_ratio=jnp.asarray(d),
        mask=jnp.asarray(mask),
    )
    x = held(np.where(mask, d, 0.0).astype(np.float64))
    value = {
        "k2": x**2 / 2,
        "k3": np.expm1(x) - x,
        "ratio": np.exp(x),
        "error": np.exp(np.abs(x)),
    }[statistic]
    value = np.where(mask, value, 0.0)
    length = np.maximum(mask.sum(axis=1, keepdims=True), 1)
    value = {
        "token": value,
        "sum": value.sum(axis=1, keepdims=True),
        "mean": value.sum(axis=1, keepdims=True) / length,
        "max": value.max(axis=1, keepdims=True),
    }[over]
    assert np.min(np.abs(value - bound)) > 1e-4, "the seed puts a statistic on its bound"
    assert np.array_equal(np.asarray(ours), (mask & (value <= bound)).astype(np.float32))


@pytest.mark.parametrize("over", ["token", "sum", "mean", "max"])
def test_k1_bounds_are_on_the_ratio_and_not_on_its_inverse(over):
    d = jnp.log(jnp.asarray([[0.55, 1.0], [0.65, 1.0], [1.55, 1.0], [1.7, 1.0]]))
    block = corrections.reject("k1", over=over, lower=0.6, upper=1.6)
    kept = corrections.coefficients(block, log_ratio=d, mask=jnp.ones((4, 2), bool))
    alone = [[0, 1], [1, 1], [1, 1], [0, 1]]
    rows = [[0, 0], [1, 1], [1, 1], [0, 0]]
    mean = [[1, 1]] * 4
    assert kept.tolist() == {"token": alone, "sum": rows, "mean": mean, "max": rows}[over]


def verl(d, mask, *, weight=None, threshold=2.0, rejection=None, bounds=None, batch_norm=False):
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


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
@pytest.mark.parametrize("preset", VERL_PRESETS)
def test_verl_presets_give_verl_its_loss_weights(preset, aggregation):
    name, options, verl_options = VERL_PRESETS[preset]
    rng = np.random.default_rng(11)
    scale = np.array([1e-5, 3e-4, 1e-3, 5e-3, 0.05, 0.1, 0.2, 2.0] * 2)[:, None]
    d = np.float32(scale * rng.standard_normal((16, 40)))
    mask = np.arange(40)[None, :] < rng.integers(5, 41, size=(16, 1))
    if "rejection" in verl_options:
        options = {**options, "shrink": aggregation}
    ours = corrections.coefficients(
        corrections.build([{"name": name, **options}]),
        log_ratio=jnp.asarray(d),
        mask=jnp.asarray(mask),
    ) * token_weights(jnp.asarray(mask), aggregation=aggregation)
    weights, kept = verl(d, mask, **verl_options)
    rows = kept.sum(axis=1, keepdims=True)
    per_token = kept / kept.sum()
    if aggregation == "sequence_mean_token_mean":
        per_token = kept / np.maximum(rows, 1) / (rows > 0).sum()
    np.testing.assert_allclose(ours, weights * per_token, rtol=2e-6, atol=1e-12)
    if "rejection" in verl_options:
        assert 0 < kept.any(axis=1).sum() < 16, "the case must keep some and reject some"


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
    ours = corrections.coefficients(chain, log_ratio=jnp.asarray(d), mask=jnp.asarray(mask))
    weights, kept = verl(
        np.nan_to_num(d),
        mask,
        weight=level,
        batch_norm=True,
        rejection="seq_sum_k1",
        bounds=(0.5, 2.0),
    )
    np.testing.assert_allclose(ours, weights * kept, rtol=1e-6)
