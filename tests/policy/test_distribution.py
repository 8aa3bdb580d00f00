"""The next-token distribution against NumPy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tim_jax import kernels
from tim_jax.common.errors import InputError
from tim_jax.model.execution import Sampling
from tim_jax.numerics import EXACT_F32, NATIVE_F32
from tim_jax.policy import distribution

FAMILIES = {"tiles": EXACT_F32, "native": NATIVE_F32}
BOTH = pytest.mark.parametrize("numerics", FAMILIES.values(), ids=list(FAMILIES))
STATIC = ("sampling", "numerics")
draw = jax.jit(distribution.draw, static_argnames=STATIC)
log_prob = jax.jit(distribution.log_prob, static_argnames=STATIC)
entropy = jax.jit(distribution.entropy, static_argnames="sampling")

VOCABULARY = 301
LOGITS = np.random.default_rng(0).normal(0, 2.5, (4, VOCABULARY)).astype(np.float32)
SAMPLINGS = [
    Sampling(1),
    Sampling(1, temperature=0.6),
    Sampling(1, temperature=1.7, top_k=17),
    Sampling(1, top_p=0.8),
    Sampling(1, temperature=0.9, top_k=40, top_p=0.7),
]
EACH = partial(pytest.mark.parametrize, ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}")
ALL_SAMPLINGS = EACH("sampling", SAMPLINGS)
SOME_SAMPLINGS = EACH("sampling", quick.some(SAMPLINGS, 4))  # all three ways at once


def kept(logits, sampling):
    """bool[V]: the tokens of the truncated distribution. NumPy float64, by sorting."""
    logits = logits.astype(np.float64)
    inside = np.ones(len(logits), bool)
    if sampling.top_k:
        least = np.sort(logits)[::-1][min(sampling.top_k, len(logits)) - 1]
        inside = logits >= least
    if sampling.top_p < 1:
        weights = np.where(inside, np.exp((logits - logits.max()) / sampling.temperature), 0.0)
        order = np.argsort(-logits, kind="stable")
        enough = np.argmax(np.cumsum(weights[order]) >= sampling.top_p * weights.sum())
        inside &= logits >= logits[order[enough]]
    return inside


def mass_around_the_cut(logits, sampling):
    """How far top-p is from keeping one token more or less, as a share of the mass."""
    wide = Sampling(1, temperature=sampling.temperature, top_k=sampling.top_k)
    logits = logits.astype(np.float64)
    weights = np.where(kept(logits, wide), np.exp((logits - logits.max()) / wide.temperature), 0)
    sums = np.cumsum(np.sort(weights)[::-1]) / weights.sum()
    return np.abs(sums - sampling.top_p).min()


def reference(logits, sampling, *, also=None):
    """f64[V] log-probs; -inf outside the truncated set, to which the token `also` is added."""
    inside = kept(logits, sampling)
    if also is not None:
        inside[also] = True
    scaled = np.where(inside, logits.astype(np.float64) / sampling.temperature, -np.inf)
    scaled = scaled - scaled.max()
    return scaled - np.log(np.exp(scaled).sum())


def every_log_prob(logits, sampling, numerics=EXACT_F32):
    """f32[V] of log_prob for each token of one row of logits."""
    size = len(logits)
    rows, tokens = np.broadcast_to(logits[None, :], (size, size)), np.arange(size, dtype=np.int32)
    return log_prob(rows, tokens, sampling=sampling, numerics=numerics)


# --- log-probs and truncation ----------------------------------------------------------------


@pytest.mark.parametrize(("sampling", "numerics"), quick.pairs(SAMPLINGS, FAMILIES))
def test_log_probs_against_float64(sampling, numerics):
    for row in LOGITS:
        found = every_log_prob(row, sampling, numerics)
        exact = [reference(row, sampling, also=token)[token] for token in range(len(row))]
        np.testing.assert_allclose(found, exact, rtol=2e-6, atol=2e-6)


_small_logits = st.lists(st.integers(-6, 6), min_size=2, max_size=12)


@given(
    values=_small_logits,
    truncation=st.sampled_from([(1, 1.0), (3, 1.0), (30, 0.95), (2, 0.5), (0, 0.01), (0, 0.5)]),
)
@settings(max_examples=60)
def test_the_truncated_set_with_ties_against_numpy(values, truncation):
    top_k, top_p = truncation  # each is compiled
    sampling = Sampling(1, top_k=top_k, top_p=top_p, temperature=0.5)
    logits = np.full(12, -40.0, np.float32)  # one compilation for all lengths
    logits[: len(values)] = np.asarray(values, np.float32) * 0.75
    assume(top_p == 1 or mass_around_the_cut(logits, sampling) > 1e-5)
    found = np.asarray(every_log_prob(logits, sampling))
    expected = reference(logits, sampling)
    inside = kept(logits, sampling)
    np.testing.assert_allclose(found[inside], expected[inside], rtol=1e-5, atol=1e-5)
    # A token outside is scored as if it belonged: together with it, the others would lose mass.
    for token in np.flatnonzero(~inside):
        alone = reference(logits, sampling, also=token)[token]
        assert found[token] == pytest.approx(alone, rel=1e-5, abs=1e-5)


def test_equal_logits_are_kept_together():
    logits = np.asarray([2.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    third = np.exp(1.0) * 3 + np.exp(2.0)
    for sampling in (Sampling(1, top_k=2), Sampling(1, top_p=0.6)):
        found = np.asarray(every_log_prob(logits, sampling))
        np.testing.assert_allclose(np.exp(found[1:4]), np.exp(1.0) / third, rtol=1e-6)


def test_top_k_beyond_the_vocabulary_keeps_everything():
    wide, off = Sampling(1, top_k=10_000), Sampling(1)
    np.testing.assert_array_equal(every_log_prob(LOGITS[0], wide), every_log_prob(LOGITS[0], off))


# --- the kept set ----------------------------------------------------------------------------

ROWS, ODD = 12, 331  # as many as `drawn_rows`, and a vocabulary that is a multiple of nothing
TRUNCATIONS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50, "top_p": 0.95},
    {"top_k": ODD},
    {"top_k": 10_000, "top_p": 0.5},
    {"top_p": 1e-9},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 1 - 1e-7},
]
EACH_TRUNCATION = pytest.mark.parametrize(
    ("options", "numerics"),
    quick.pairs({"-".join(f"{k}={v}" for k, v in o.items()): o for o in TRUNCATIONS}, FAMILIES),
)


@partial(jax.jit, static_argnames=STATIC)
def kept_set(logits, *, sampling, numerics):
    """The kept set, the weights and their sum."""
    ops = kernels.family(numerics)
    peak = ops.peak(logits)
    weights = ops.exponentials(logits, peak, numerics=numerics)
    inside = distribution.kept_tokens(logits, peak, weights, sampling=sampling, numerics=numerics)
    return inside, weights, ops.row_sum(weights, numerics=numerics)


def smallest_set(logits, units, target):
    """bool[V]: the fewest of the largest logits whose units reach the target, ties together."""
    levels = np.unique(logits)[::-1]
    reached = [units[logits >= level].sum() >= target for level in levels]
    return logits >= levels[np.argmax(reached)]


def kept_by_counting(logits, weights, total, sampling):
    """bool[V]: what `kept_tokens` promises, in whole numbers of 64 bits, level by level."""
    inside = np.ones(len(logits), bool)
    if sampling.top_k:
        inside = smallest_set(logits, np.ones(len(logits), np.int64), min(sampling.top_k, ODD))
    if sampling.top_p < 1:
        units = np.rint(weights * (np.float32(2**30) / total)).astype(np.int64) * inside
        part = np.floor(np.float32(units.sum()) * np.float32(sampling.top_p))
        inside &= smallest_set(logits, units, np.clip(int(part), 1, units.sum()))
    return inside


def drawn_rows():
    """One row of each kind that a model, a mask, low precision or a fault might make."""
    rng = np.random.default_rng(5)
    wide = rng.normal(0, 3, ODD)
    rows = {
        "wide": wide,
        "narrow, far from zero": rng.normal(1000, 0.01, ODD),
        "equal": np.full(ODD, -0.7),
        "one far above": np.where(np.arange(ODD) == 100, 1e9, wide),
        "mostly masked": np.where(np.arange(ODD) % 100, -np.inf, wide),
        "few values": np.round(wide),
        "zeros of both signs": np.where(np.arange(ODD) % 2, 0.0, -0.0),
        "tiny around zero": wide * 1e-38,
        "one value repeated among others": np.where(np.arange(ODD) % 2, 0.0, wide),
        "very negative": wide * 1e8 - 1e30,
        "all orders of magnitude": np.sign(wide) * 10.0 ** rng.uniform(-37, 37, ODD),
        "steep": -0.5 * np.arange(ODD),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


@EACH_TRUNCATION
def test_the_kept_set_is_the_smallest_by_exact_counting(options, numerics):
    sampling, rows = Sampling(1, **options), drawn_rows()
    found = kept_set(np.stack(list(rows.values())), sampling=sampling, numerics=numerics)
    for name, row, inside, weights, total in zip(rows, rows.values(), *found, strict=True):
        expected = kept_by_counting(row, np.asarray(weights), np.asarray(total), sampling)
        np.testing.assert_array_equal(inside, expected, err_msg=name)
        assert inside[np.argmax(row)], name


_any_logit = st.one_of(
    st.floats(-30, 30, width=32),
    st.sampled_from([-np.inf, -0.0, 0.0, 1e-45, -1e-45, 1e-38, 1e30, -1e30, 0.5]),
)


@given(
    logits=hnp.arrays(np.float32, (ROWS, ODD), elements=_any_logit, fill=_any_logit),
    options=st.sampled_from(TRUNCATIONS),
)
@settings(max_examples=150, deadline=None)
def test_the_kept_set_of_any_logits(logits, options):
    assume(np.isfinite(logits).any(axis=1).all())
    sampling = Sampling(1, **options)
    inside, weights, total = map(
        np.asarray, kept_set(logits, sampling=sampling, numerics=EXACT_F32)
    )
    for row in range(ROWS):
        expected = kept_by_counting(logits[row], weights[row], total[row], sampling)
        np.testing.assert_array_equal(inside[row], expected)
        assert inside[row, np.argmax(logits[row])]


@pytest.mark.parametrize("top_p", quick.some([1e-9, 0.3, 0.95, 0.9999, 1 - 1e-7], 1, 3))
def test_the_kept_share_is_top_p_to_the_documented_resolution(top_p):
    """In float64, also at the threshold: with the least likely kept tokens, but not without."""
    size = 20_011
    spreads = np.repeat([0.0, 0.05, 2.5, 10.0], 3)[:, None]
    logits = (spreads * np.random.default_rng(7).normal(0, 1, (12, size))).astype(np.float32)
    inside, _, _ = kept_set(logits, sampling=Sampling(1, top_p=top_p), numerics=EXACT_F32)
    resolution = size * 2.0**-30 + 2.0**-23
    for row, kept_tokens in zip(logits.astype(np.float64), np.asarray(inside), strict=True):
        shares = np.exp(row - row.max())
        shares /= shares.sum()
        assert shares[kept_tokens].sum() >= top_p - resolution
        least = row[kept_tokens].min()
        assert not kept_tokens[row < least].any()
        assert kept_tokens[row >= least].all()
        assert shares[row > least].sum() < top_p + resolution


@pytest.mark.parametrize(
    "options", quick.some([{"top_k": 7}, {"top_p": 0.95}, {"top_k": 50, "top_p": 0.95}], 2), ids=str
)
def test_the_kept_set_does_not_depend_on_the_program(options):
    """Rows alone, in batches, and inside a gradient, a loop over tiles and recomputation."""
    sampling, rows = Sampling(1, **options), jnp.asarray(np.stack(list(drawn_rows().values())))
    whole = np.asarray(kept_set(rows, sampling=sampling, numerics=EXACT_F32)[0])
    for start, stop in ((3, 4), (4, 9)):
        part = kept_set(rows[start:stop], sampling=sampling, numerics=EXACT_F32)[0]
        np.testing.assert_array_equal(part, whole[start:stop])

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def learner(bias, rows):
        @jax.checkpoint
        def tile(rows):
            inside, weights, _ = kept_set(rows, sampling=sampling, numerics=EXACT_F32)
            likeliest = jnp.argmax(weights, -1)
            score = log_prob(rows + bias, likeliest, sampling=sampling, numerics=NATIVE_F32)
            return jnp.sum(score), inside

        scores, inside = jax.lax.map(tile, rows.reshape(4, 3, ODD))
        return jnp.sum(scores), inside.reshape(rows.shape)

    gradient, inside = learner(jnp.zeros(()), rows)
    assert np.isfinite(gradient)
    np.testing.assert_array_equal(inside, whole)


def test_masked_logits_of_minus_infinity_have_no_share():
    logits = np.where(np.arange(VOCABULARY) % 3 == 0, -np.inf, LOGITS[0]).astype(np.float32)
    finite = np.isfinite(logits)
    found = np.asarray(every_log_prob(logits, Sampling(1)))
    np.testing.assert_allclose(np.exp(found[finite].astype(np.float64)).sum(), 1, rtol=1e-5)
    assert (found[~finite] == -np.inf).all()


@ALL_SAMPLINGS
def test_entropy_is_that_of_the_tempered_distribution(sampling):
    whole = Sampling(1, temperature=sampling.temperature)
    for row in LOGITS:
        exact = reference(row, whole)
        found = entropy(jnp.asarray(row)[None, :], sampling=sampling)[0]
        assert float(found) == pytest.approx(-(np.exp(exact) * exact).sum(), rel=1e-5)


@SOME_SAMPLINGS
def test_the_gradient_of_a_log_prob(sampling):
    """(one-hot - probabilities of the truncated distribution) / temperature."""
    tokens = np.asarray([np.flatnonzero(kept(row, sampling))[0] for row in LOGITS], np.int32)

    @jax.jit
    @jax.grad
    def gradient(logits):
        return jnp.sum(log_prob(logits, tokens, sampling=sampling, numerics=NATIVE_F32))

    found = gradient(LOGITS)
    for row, token, slopes in zip(LOGITS, tokens, found, strict=True):
        expected = -np.exp(reference(row, sampling))
        expected[token] += 1
        np.testing.assert_allclose(slopes, expected / sampling.temperature, atol=2e-6)


# --- drawing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", quick.some(list(FAMILIES.values()), 0), ids=list(FAMILIES))
@SOME_SAMPLINGS
def test_draws_over_a_grid_of_uniforms_have_the_right_frequencies(sampling, numerics):
    """A token whose share is p takes p * n of n evenly spaced uniforms, but for the edges."""
    count = 8_192
    uniforms = (jnp.arange(count, dtype=jnp.float32) + 0.5) / count
    for row in LOGITS:
        rows = jnp.broadcast_to(jnp.asarray(row)[None, :], (count, VOCABULARY))
        tokens, _ = draw(rows, uniforms, sampling=sampling, numerics=numerics)
        drawn = np.bincount(np.asarray(tokens), minlength=VOCABULARY)
        assert np.abs(drawn - count * np.exp(reference(row, sampling))).max() < 1.1


@SOME_SAMPLINGS
def test_a_draw_inverts_the_cumulative_distribution(sampling):
    """In the order of (index modulo 128, index), the token whose interval holds the uniform."""
    order = np.lexsort((np.arange(VOCABULARY), np.arange(VOCABULARY) % 128))
    uniforms = np.random.default_rng(1).random(500, np.float32)
    for row in LOGITS:
        rows = jnp.broadcast_to(jnp.asarray(row)[None, :], (500, VOCABULARY))
        tokens, _ = draw(rows, jnp.asarray(uniforms), sampling=sampling, numerics=EXACT_F32)
        edges = np.cumsum(np.exp(reference(row, sampling))[order])
        expected = order[np.searchsorted(edges, uniforms, side="right")]
        clear = np.abs(edges[:, None] - uniforms[None, :]).min(0) > 1e-6
        assert clear.mean() > 0.99
        np.testing.assert_array_equal(np.asarray(tokens)[clear], expected[clear])


_EXTREME = [-np.inf, -1e37, -1e4, -104.0, -88.0, -1.0, 0.0, 1e-30, 3.0, 88.0, 1e4, 1e30, 1e37]


@given(
    values=st.lists(st.sampled_from(_EXTREME), min_size=1, max_size=200),
    uniform=st.sampled_from([0.0, 2.0**-24, 0.3, 0.5, 1 - 2.0**-23, 1 - 2.0**-24]),
    sampling=st.sampled_from(SAMPLINGS),
)
@settings(max_examples=200)
def test_a_token_without_probability_is_never_drawn(values, uniform, sampling):
    logits = np.full(200, -np.inf, np.float32)
    logits[: len(values)] = values
    assume(np.isfinite(logits).any())
    scaled = logits * np.float32(1 / sampling.temperature)
    tokens, log_probs = draw(
        jnp.asarray(logits)[None, :],
        jnp.asarray([uniform], jnp.float32),
        sampling=sampling,
        numerics=EXACT_F32,
    )
    token = int(tokens[0])
    assert 0 <= token < len(values)
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.exp(scaled[token] - scaled.max(), dtype=np.float32) > 0
    assert np.isfinite(log_probs[0])
    assert log_probs[0] <= 0


@BOTH
def test_the_likeliest_of_tempered_logits_is_not_above_probability_one(numerics):
    """logits / temperature is rounded before the maximum is taken off: no fma of the two."""
    logits = np.random.default_rng(3).uniform(-1e4, 1e4, (200, 1)).astype(np.float32)
    logits = np.where(np.arange(50)[None, :] == 7, logits, np.float32(-1e9))
    found = log_prob(
        jnp.asarray(logits),
        jnp.full((200,), 7, jnp.int32),
        sampling=Sampling(1, temperature=0.6),
        numerics=numerics,
    )
    np.testing.assert_array_equal(found, 0)


@BOTH
def test_one_certain_token_is_always_drawn(numerics):
    logits = np.full((3, VOCABULARY), -1e9, np.float32)
    logits[0, 0] = logits[1, 137] = logits[2, VOCABULARY - 1] = 1e9
    for uniform in (0.0, 0.5, 1 - 2.0**-24):
        tokens, log_probs = draw(
            jnp.asarray(logits),
            jnp.full((3,), uniform, jnp.float32),
            sampling=Sampling(1),
            numerics=numerics,
        )
        assert tokens.tolist() == [0, 137, VOCABULARY - 1]
        assert log_probs.tolist() == [0, 0, 0]


def test_equal_logits_are_drawn_equally_often_and_no_others():
    """A vocabulary that fills no whole number of lanes: the padding is never drawn."""
    count = 101 * 64
    uniforms = (jnp.arange(count, dtype=jnp.float32) + 0.5) / count
    logits = jnp.zeros((count, 101), jnp.float32)
    tokens, log_probs = draw(logits, uniforms, sampling=Sampling(1), numerics=EXACT_F32)
    drawn = np.bincount(np.asarray(tokens), minlength=101)
    assert len(drawn) == 101
    assert np.abs(drawn - 64).max() <= 1
    np.testing.assert_allclose(log_probs, -np.log(101), rtol=1e-6)


@SOME_SAMPLINGS
def test_the_recorded_log_prob_is_that_of_log_prob_to_the_bit(sampling):
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (257, 1_000)).astype(np.float32)
    uniforms = rng.random(257, np.float32)
    tokens, recorded = draw(logits, uniforms, sampling=sampling, numerics=EXACT_F32)
    again = log_prob(logits, tokens, sampling=sampling, numerics=EXACT_F32)
    tokens, recorded, again = (np.asarray(x).view(np.int32) for x in (tokens, recorded, again))
    np.testing.assert_array_equal(recorded, again)
    # ... in any number of rows
    part = draw(logits[5:12], uniforms[5:12], sampling=sampling, numerics=EXACT_F32)
    np.testing.assert_array_equal(part[0], tokens[5:12])
    np.testing.assert_array_equal(np.asarray(part[1]).view(np.int32), recorded[5:12])


@pytest.mark.parametrize(("sampling", "numerics"), quick.pairs(SAMPLINGS[2:], FAMILIES))
def test_recorded_supports_give_the_bits_of_the_truncation_that_made_them(sampling, numerics):
    tokens, drawn = draw(LOGITS, np.full(4, 0.4, np.float32), sampling=sampling, numerics=numerics)
    inside = [np.flatnonzero(kept(row, sampling)) for row in LOGITS]
    supports = np.full((4, max(map(len, inside)) + 3), -1, np.int32)
    for row, own in zip(supports, inside, strict=True):
        row[: len(own)] = np.random.default_rng(0).permutation(own)
    plain = Sampling(1, temperature=sampling.temperature)
    how = {"numerics": numerics, "supports": supports}
    for under in (plain, sampling):  # the support stands in for a truncation of one's own
        found = log_prob(LOGITS, tokens, sampling=under, **how)
        assert np.array_equal(found, drawn)
    none = {"numerics": numerics, "supports": np.full_like(supports, -1)}
    whole = log_prob(LOGITS, tokens, sampling=plain, numerics=numerics)
    assert np.array_equal(log_prob(LOGITS, tokens, sampling=plain, **none), whole)
    assert (np.asarray(drawn) > np.asarray(whole)).all()


def test_the_gradient_under_a_support_is_that_of_its_logits_alone():
    supports = np.asarray([[7, 2, 30, -1]] * 4, np.int32)
    tokens = np.asarray([2, 7, 30, 9], np.int32)  # the last is not among them, and counts as kept
    how = {"sampling": Sampling(1, temperature=0.5), "numerics": EXACT_F32, "supports": supports}
    gradient = jax.jit(jax.grad(lambda x: log_prob(x, tokens, **how).sum()))(LOGITS)
    for row, token, found in zip(LOGITS.astype(np.float64), tokens, gradient, strict=True):
        kept_ids = [2, 7, 30, *([token] if token == 9 else [])]
        shares = np.exp(row[kept_ids] / 0.5 - np.logaddexp.reduce(row[kept_ids] / 0.5))
        right = np.zeros(VOCABULARY)
        right[kept_ids] = -shares
        right[token] += 1
        np.testing.assert_allclose(found, right / 0.5, atol=1e-5)


def test_temperature_zero_is_the_most_likely_token_without_chance():
    uniforms = jnp.asarray([0.0, 0.3, 0.6, 0.99], jnp.float32)
    greedy = Sampling(1, temperature=0.0)
    tokens, log_probs = draw(jnp.asarray(LOGITS), uniforms, sampling=greedy, numerics=EXACT_F32)
    assert tokens.tolist() == LOGITS.argmax(1).tolist()
    assert tokens.dtype == jnp.int32
    assert log_probs.tolist() == [0, 0, 0, 0]
    again = log_prob(jnp.asarray(LOGITS), tokens, sampling=greedy, numerics=EXACT_F32)
    assert again.tolist() == [0, 0, 0, 0]


# --- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Sampling(**({"max_tokens": 4} | options))


def test_compiles_once_for_all_contents():
    traces = []

    @partial(jax.jit, static_argnames="sampling")
    def run(logits, uniforms, *, sampling):
        traces.append(1)
        return distribution.draw(logits, uniforms, sampling=sampling, numerics=EXACT_F32)

    for seed in range(3):
        rng = np.random.default_rng(seed)
        logits, uniforms = rng.normal(size=(4, 50)), rng.random(4)
        run(
            jnp.asarray(logits, jnp.float32),
            jnp.asarray(uniforms, jnp.float32),
            sampling=Sampling(7, top_k=5, stop_tokens=(1, 2)),
        )
    assert len(traces) == 1
