"""Policy losses against float64 formulas, their gradients by finite differences, and identities."""

import functools
import inspect
import math
from fractions import Fraction
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tim_jax.common.errors import InputError
from tim_jax.objectives import KL, kl_estimate, losses

OPTIONS = {
    "reinforce": [{}],
    "clip": [{}, {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0}],
    "gspo": [{}, {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}],
    "gspo_token": [{}],
    "cispo": [{}, {"clip_low": 0.2, "clip_high": 0.28}],
    "sapo": [{}, {"temperature_positive": 3.0, "temperature_negative": 5.0}],
    "gmpo": [{}, {"clip_low": 0.1, "clip_high": 0.3}],
    "dppo_tv": [{}, {"clip_low": 0.05, "clip_high": 0.3, "ratio_cap": 2.0}],
    "dppo_kl": [{}, {"clip_low": 0.01, "clip_high": 0.3, "ratio_cap": 2.0}],
    "clip_cov": [{}, {"clip_low": 0.1, "clip_high": 0.4, "dual_clip": 3.0}],
    "kl_cov": [{}, {"coefficient": 0.3}],
}
CASES = [(name, given) for name, several in OPTIONS.items() for given in several]
SPREADS = (0.001, 0.3, 3.0, 60.0)


def batch(seed=0, rows=5, width=8, spread=0.3) -> tuple[Any, Any, Any, Any]:
    """Log-probs, old log-probs, advantages (one per row, both signs), mask; zeros off the mask.

    Of NumPy, which serves as well as the arrays of JAX that the library's types name.
    """
    rng = np.random.default_rng(seed)
    mask = np.arange(width)[None, :] < rng.integers(1, width + 1, size=rows)[:, None]
    log_probs = -rng.exponential(size=(rows, width)) * max(1.0, spread)
    old = np.minimum(log_probs + spread * rng.standard_normal((rows, width)), -1e-4)
    advantages = np.repeat(rng.standard_normal((rows, 1)), width, axis=1)
    log_probs, old, advantages = (
        np.where(mask, x, 0.0).astype(np.float32) for x in (log_probs, old, advantages)
    )
    return log_probs, old, advantages, mask


def some(mask, seed):
    """A third of the places, whether or not they are on the mask."""
    return np.random.default_rng(seed + 1).random(mask.shape) < 0.3


@functools.cache
def compiled(function):
    """A loss and the gradient of its sum by the log-probs, compiled once for any options."""

    def total(log_probs, *rest, options):
        found = function(log_probs, *rest, **options)
        return jnp.sum(found.loss), found

    return jax.jit(jax.grad(total, has_aux=True))


def evaluate(name, arrays, selected=None, **options):
    """(loss, gradient) of each token."""
    options = losses.options(name) | options
    if name in losses.SELECTIONS:
        options["selected"] = np.zeros_like(arrays[3]) if selected is None else selected
    gradient, found = compiled(losses.LOSSES[name])(*arrays, options=options)
    return jax.tree.map(np.asarray, (found, gradient))


def mean_of_rows(values, mask):
    total = np.where(mask, values, 0.0).sum(axis=1, keepdims=True)
    return total / np.maximum(mask.sum(axis=1, keepdims=True), 1)


def pessimistic(ratio, a, low, high, dual):
    """PPO's loss in the form of minima and maxima, as verl has it."""
    loss = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - low, 1 + high))
    return loss if dual is None else np.where(a < 0, np.minimum(loss, -a * dual), loss)


def binary_kl(q, p):
    """Of two coins in float64, the terms as they stand in the paper."""
    return q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))


def divergence(name, x, old):
    p, q = np.exp(x), np.exp(old)
    if name == "dppo_tv":
        return np.abs(p - q)
    p, q = (np.clip(v, np.exp(-100.0), 1 - 1e-8) for v in (p, q))
    return binary_kl(q, p)


def reference(name, x, at, old, a, mask, selected, **options):
    """Losses in float64 at log-probs x, what has its gradient stopped taken at `at`."""
    o = {**losses.options(name), **options}
    d, frozen = np.clip(x - old, -20, 20), np.clip(at - old, -20, 20)
    ratio, constant = np.exp(d), np.exp(frozen)
    if name == "reinforce":
        return -a * x
    if name == "cispo":
        return -np.clip(constant, 1 - o["clip_low"], 1 + o["clip_high"]) * a * x
    if name == "sapo":
        tau = np.where(a > 0, o["temperature_positive"], o["temperature_negative"])
        return -a / (1 + np.exp(-tau * (ratio - 1))) * 4 / tau
    if name == "gmpo":
        signed = [
            np.minimum(np.sign(a) * v, np.sign(a) * np.clip(v, -o["clip_low"], o["clip_high"]))
            for v in (d, frozen)
        ]
        now, then = (np.sign(a) * v for v in signed)
        return -a * np.exp(mean_of_rows(then, mask)) * np.exp(now - then)
    if name.startswith("dppo"):
        far = divergence(name, at, old)
        outside = np.where(
            a > 0, (far > o["clip_high"]) & (at > old), (far > o["clip_low"]) & (at < old)
        )
        return -a * np.minimum(constant, o["ratio_cap"]) * ~outside * x
    if name == "kl_cov":
        return -a * ratio + selected * o["coefficient"] * np.abs(x - old)
    if name.startswith("gspo"):
        ratio = np.exp(np.clip(mean_of_rows(at - old, mask), -20, 20) + x - at)
    loss = pessimistic(ratio, a, o["clip_low"], o["clip_high"], o["dual_clip"])
    return np.where(selected, 0.0, loss) if name == "clip_cov" else loss


def slope(function, x, step=1e-6):
    return (function(x + step) - function(x - step)) / (2 * step)


@pytest.mark.parametrize(("name", "options"), CASES)
@given(seed=st.integers(0, 9999), spread=st.sampled_from(SPREADS))
@settings(max_examples=12)
def test_value_and_gradient_are_those_of_the_formula(name, options, seed, spread):
    arrays = batch(seed, spread=spread)
    selected = some(arrays[3], seed)
    found, gradient = evaluate(name, arrays, selected, **options)
    x, old, a = (v.astype(np.float64) for v in arrays[:3])
    mask = arrays[3]

    def loss(x, at):
        return reference(name, x, at, old, a, mask, selected, **options)

    def derivative(at):
        return slope(lambda x: loss(x, at), at)

    # Float32 may fall on the other side of a corner that is nearer than this.
    smooth = mask & np.isclose(derivative(x - 2e-5), derivative(x + 2e-5), rtol=1e-2, atol=1e-5)
    assert smooth.sum() >= 0.5 * mask.sum()
    value = loss(x, x)
    np.testing.assert_allclose(found.loss[smooth], value[smooth], rtol=5e-5, atol=2e-6)
    # A difference of float64 over 2e-6 knows the slope no better, nor does float32 sapo's tail.
    bound = 2e-5 + 5e-5 * np.abs(derivative(x)) + 1e-9 * np.abs(value)
    assert np.all(np.abs(gradient - derivative(x))[smooth] <= bound[smooth])
    assert not np.any(found.loss[~mask])
    assert not np.any(gradient[~mask])


def test_every_loss_has_a_test_and_a_name():
    assert set(OPTIONS) == set(losses.LOSSES) == set(get_args(losses.Loss))
    assert set(losses.SELECTIONS) <= set(losses.LOSSES)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_equal_policies_have_ratio_one_and_the_plain_gradient(name):
    log_probs, _, advantages, mask = batch(1)
    selected = np.ones_like(mask) if name == "kl_cov" else None
    found, gradient = evaluate(name, (log_probs, log_probs, advantages, mask), selected)
    np.testing.assert_array_equal(found.ratio, mask.astype(np.float32))
    np.testing.assert_allclose(gradient, np.where(mask, -advantages, 0.0), rtol=1e-6)
    assert found.loss.dtype == found.ratio.dtype == jnp.float32
    assert not any(np.any(flag) for flag in found[2:])


@pytest.mark.parametrize("name", losses.LOSSES)
def test_padding_changes_no_bit_and_says_nothing(name):
    arrays = batch(2, spread=1.0)
    wider = [np.pad(x, ((0, 2), (0, 3))) for x in arrays]
    plain, _ = evaluate(name, arrays)
    padded, gradient = evaluate(name, wider)
    mask = wider[3]
    for one, other in zip(plain, padded, strict=True):
        np.testing.assert_array_equal(one, other[:5, :8])
        assert not np.any(other[~mask])
    assert not np.any(gradient[~mask])


@pytest.mark.parametrize("name", losses.LOSSES)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_what_is_not_a_number_shows(name, advantage):
    log_probs, old, _, mask = batch(3)
    log_probs[1, 0] = np.nan
    arrays = log_probs, old, np.full_like(old, advantage), mask
    found, _ = evaluate(name, arrays, np.ones_like(mask))
    assert np.isnan(found.loss[1, 0])
    others = np.arange(5) != 1
    assert np.all(np.isfinite(found.loss[others]))
    if name in losses.SELECTIONS:
        assert select(name, arrays).sum() <= 1


@pytest.mark.parametrize("name", quick.some(["clip", "gspo", "gmpo", "dppo_kl", "kl_cov"], 1))
def test_compiled_and_eager_agree(name):
    arrays = batch(4, spread=1.0)
    given = {"selected": np.zeros_like(arrays[3])} if name in losses.SELECTIONS else {}
    eager = losses.LOSSES[name](*map(jnp.asarray, arrays), **given)
    for one, other in zip(eager, evaluate(name, arrays)[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def flags(name, ratio, advantage, old=0.5, **options):
    """(low, high, dual, gradient) of one token whose probability was `old`."""
    arrays = *(np.zeros((5, 8), np.float32) for _ in range(3)), np.zeros((5, 8), bool)
    for x, value in zip(arrays, (math.log(old * ratio), math.log(old), advantage, 1), strict=True):
        x[0, 0] = value
    found, gradient = evaluate(name, arrays, **options)
    return (*(bool(flag[0, 0]) for flag in found[2:]), float(gradient[0, 0]))


@pytest.mark.parametrize("name", ["clip", "gspo", "clip_cov"])
def test_a_ratio_is_clipped_where_the_advantage_pulls_outwards(name):
    clip = functools.partial(flags, name, old=0.1, clip_low=0.2, clip_high=0.3)
    assert clip(1.5, 1.0) == (False, True, False, 0.0)
    assert clip(0.5, -1.0) == (True, False, False, 0.0)
    assert clip(1.5, -1.0) == (False, False, False, pytest.approx(1.5, rel=1e-5))
    assert clip(0.5, 1.0) == (False, False, False, pytest.approx(-0.5, rel=1e-5))
    assert clip(5.0, -1.0, dual_clip=3.0) == (False, False, True, 0.0)
    assert clip(2.0, -1.0, dual_clip=3.0)[2] is False


def test_cispo_says_where_it_clipped_and_keeps_the_gradient():
    for advantage in (-2.0, 2.0):
        high = flags("cispo", 4.0, advantage, old=0.1, clip_low=0.2, clip_high=0.5)
        low = flags("cispo", 0.5, advantage, old=0.1, clip_low=0.2, clip_high=0.5)
        assert high == (False, True, False, pytest.approx(-1.5 * advantage))
        assert low == (True, False, False, pytest.approx(-0.8 * advantage))


def test_gmpo_clips_the_log_ratio():
    assert flags("gmpo", math.exp(0.5), 1.0) == (False, True, False, 0.0)
    assert flags("gmpo", math.exp(-0.5), -1.0) == (True, False, False, 0.0)
    assert flags("gmpo", math.exp(0.5), -1.0)[:2] == (False, False)
    assert flags("gmpo", math.exp(0.3), 1.0)[:2] == (False, False)


def test_clip_cov_counts_what_it_removes_as_clipped():
    log_probs, old, advantages, mask = batch(5, spread=0.01)
    selected = some(mask, 5)
    found, gradient = evaluate("clip_cov", (log_probs, old, advantages, mask), selected)
    removed = selected & mask
    assert 0 < removed.sum() < mask.sum()
    np.testing.assert_array_equal(found.clipped_high, removed & (advantages > 0))
    np.testing.assert_array_equal(found.clipped_low, removed & (advantages < 0))
    assert not np.any(gradient[removed])
    assert np.all(gradient[mask & ~selected])


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("bound", [1e-3, 0.15])
def test_the_trust_region_is_exact_near_certainty_and_impossibility(name, bound):
    ends = np.concatenate([-np.geomspace(1e-7, 0.5, 24), -np.geomspace(0.6, 95.0, 24)])
    current, old = (x.astype(np.float32) for x in np.meshgrid(ends, ends))
    x, y = current.astype(np.float64), old.astype(np.float64)
    p, q = np.exp(x), np.exp(y)
    rest = (np.expm1(y), np.expm1(x))
    far = np.abs(p - q)
    if name == "dppo_kl":
        far = q * (y - x) - rest[0] * np.log(rest[0] / rest[1])
    for advantage in (-1.0, 1.0):
        arrays = current, old, np.full_like(old, advantage), np.ones(old.shape, bool)
        found, _ = evaluate(name, arrays, clip_low=bound, clip_high=bound)
        moved = current > old if advantage > 0 else current < old
        clear = np.abs(far - bound) > 1e-5 * (0.1 + far)
        flag = found.clipped_high if advantage > 0 else found.clipped_low
        np.testing.assert_array_equal(flag[clear], (moved & (far > bound))[clear])
        assert clear.mean() > 0.95


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_certainty_is_taken_as_rounded(name):
    log_probs = np.asarray([[0.0, 0.0, -1e-7, 0.0, -1e-3]], np.float32)
    old = np.asarray([[0.0, -1e-7, 0.0, -1e-3, 0.0]], np.float32)
    found, gradient = evaluate(name, (log_probs, old, np.ones_like(old), np.ones((1, 5), bool)))
    assert not np.any(found.clipped_high)
    np.testing.assert_allclose(gradient, -np.exp(log_probs - old), rtol=1e-6)


@given(seed=st.integers(0, 999), spread=st.sampled_from(SPREADS[:3]))
@settings(max_examples=20)
def test_gmpo_sums_to_the_loss_of_the_sequences(seed, spread):
    log_probs, old, advantages, mask = batch(seed, spread=spread)
    found, gradient = evaluate("gmpo", (log_probs, old, advantages, mask))
    weights = mask / (5 * mask.sum(axis=1, keepdims=True))
    a = advantages[:, 0].astype(np.float64)

    def paper(x):
        d = np.clip(x - old, -20, 20)
        sign = np.sign(advantages)
        used = sign * np.minimum(sign * d, sign * np.clip(d, -0.4, 0.4))
        return np.mean(-a * np.exp(mean_of_rows(used, mask)[:, 0]))

    x = log_probs.astype(np.float64)
    np.testing.assert_allclose((weights * found.loss).sum(), paper(x), rtol=1e-5, atol=1e-6)
    for place in zip(*np.nonzero(mask), strict=True):
        step = np.zeros_like(x)
        step[place] = 1e-6
        expected = (paper(x + step) - paper(x - step)) / 2e-6
        assert (weights * gradient)[place] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_gspo_has_the_gradient_of_the_sequence_and_of_each_token():
    log_probs, old, advantages, mask = batch(7, spread=0.01)
    options = {"clip_low": 0.2, "clip_high": 0.2}
    coefficients = np.random.default_rng(0).random(mask.shape).astype(np.float32)

    def token_form(x, c):
        found = losses.gspo(x, old, advantages, mask, **options)
        return jnp.sum(c * found.loss / mask.sum(axis=1, keepdims=True).astype(np.float32))

    def sequence_form(x, c):
        lengths = mask.sum(axis=1).astype(np.float32)
        ratio = jnp.exp(jnp.sum(jnp.where(mask, x - old, 0.0), axis=1) / lengths)
        return jnp.sum(c * -advantages[:, 0] * ratio)

    whole = jax.jit(jax.grad(sequence_form))(log_probs, np.ones(5, np.float32))
    by_tokens = jax.jit(jax.grad(token_form))
    np.testing.assert_allclose(by_tokens(log_probs, np.ones_like(coefficients)), whole, rtol=1e-5)
    own = by_tokens(log_probs, coefficients)
    np.testing.assert_allclose(own, coefficients * whole, rtol=1e-5)
    assert losses.LOSSES["gspo"] is losses.LOSSES["gspo_token"]


def covariance(log_probs, advantages, mask):
    x, a = log_probs.astype(np.float64), advantages.astype(np.float64)
    return (a - a[mask].mean()) * (x - x[mask].mean())


def spread_out(seed, rows=12, width=40):
    """A batch with covariances well beyond 1."""
    return batch(seed, rows=rows, width=width, spread=2.0)


@functools.cache
def selecting(name, options):
    return jax.jit(lambda *arrays: losses.SELECTIONS[name](*arrays, **dict(options)))


def select(name, arrays, **options):
    return np.asarray(selecting(name, tuple(sorted(options.items())))(*arrays))


@pytest.mark.parametrize("share", [2e-4, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_selects_the_largest_covariances(seed, share):
    arrays = spread_out(seed)
    log_probs, _, advantages, mask = arrays
    number = max(1, math.floor(Fraction(str(share)) * int(mask.sum())))
    chosen = select("kl_cov", arrays, share=share)
    values = np.where(mask, covariance(log_probs, advantages, mask), -np.inf)
    expected = np.zeros(mask.size, bool)
    expected[np.argsort(-values.ravel())[:number]] = True
    np.testing.assert_array_equal(chosen, expected.reshape(mask.shape))


@pytest.mark.parametrize("share", [2e-4, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_selects_a_share_of_the_eligible(seed, share):
    arrays = spread_out(seed)
    log_probs, old, advantages, mask = arrays
    chosen = select("clip_cov", arrays, share=share)
    ratio = np.exp(log_probs.astype(np.float64) - old)
    outwards = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    values = covariance(log_probs, advantages, mask)
    eligible = mask & (values > 1.0) & (values < 5.0) & ~outwards
    assert not np.any(chosen & ~eligible)
    number = max(1, math.floor(Fraction(str(share)) * int(mask.sum())))
    assert 0 < chosen.sum() == min(number, eligible.sum())


def test_clip_cov_takes_all_of_few_and_none_of_none():
    arrays = spread_out(4)
    assert select("clip_cov", arrays, share=1.0).sum() > select("clip_cov", arrays).sum() == 1
    assert not np.any(select("clip_cov", arrays, lower=1e6, upper=2e6))


def test_clip_cov_leaves_alone_what_dual_clip_has_cut():
    log_probs, _, advantages, mask = spread_out(5)
    arrays = log_probs, log_probs - np.float32(2.0) * mask, advantages, mask
    negative = select("clip_cov", arrays, share=1.0) & (advantages < 0)
    assert np.any(negative)
    dual = select("clip_cov", arrays, share=1.0, dual_clip=3.0)
    assert not np.any(dual & (advantages < 0))


def test_the_choice_of_clip_cov_has_no_preference():
    # Rows alike but for their log-probs: early and late, likely and unlikely tokens come up.
    rng = np.random.default_rng(0)
    log_probs = -rng.uniform(1.0, 2.0, (16, 64)).astype(np.float32)
    log_probs[8:] -= 20.0
    advantages = np.full_like(log_probs, 0.15)
    advantages[8:] = -0.15
    arrays = log_probs, log_probs, advantages, np.ones_like(log_probs, bool)
    chosen = select("clip_cov", arrays, share=0.25)
    assert chosen.sum() == 256
    halves = [chosen[:, :32], chosen[:8], chosen[::2], log_probs[chosen] > np.median(log_probs)]
    assert all(96 <= half.sum() <= 160 for half in halves)


@pytest.mark.parametrize("name", losses.SELECTIONS)
@given(seed=st.integers(0, 999))
@settings(max_examples=10)
def test_selections_follow_the_tokens_wherever_they_stand(name, seed):
    arrays = spread_out(seed)
    # Values that repeat: ties in the covariance, and tokens alike but for their rows.
    arrays = (*(np.round(x * 2) / 2 for x in arrays[:3]), arrays[3])
    chosen = select(name, arrays, share=0.1)
    order = np.random.default_rng(seed).permutation(12)
    moved = select(name, [x[order] for x in arrays], share=0.1)
    np.testing.assert_array_equal(moved, chosen[order])
    padded = select(name, [np.pad(x, ((0, 1), (0, 9))) for x in arrays], share=0.1)
    np.testing.assert_array_equal(padded[:12, :40], chosen)
    assert padded.sum() == chosen.sum()


@pytest.mark.parametrize("name", losses.SELECTIONS)
def test_what_stands_off_the_mask_is_never_selected(name):
    arrays = spread_out(6)
    mask = arrays[3]
    other = [np.where(mask, x, np.float32(7.5)) for x in arrays[:3]]
    chosen = select(name, arrays, share=0.1)
    np.testing.assert_array_equal(select(name, (*other, mask), share=0.1), chosen)
    assert not np.any(select(name, (*arrays[:3], np.zeros_like(mask)), share=0.1))


def test_alike_tokens_are_counted_all_the_same():
    same = np.full((4, 8), -1.0, np.float32)
    chosen = select("kl_cov", (same, same, same, np.ones_like(same, bool)), share=0.25)
    assert chosen.sum() == 8


@pytest.mark.parametrize("share", [2.5e-3, 1 / 3, 0.7, 1e-9])
def test_the_share_is_exact_in_integers(share):
    values = np.zeros((1, 2400), np.float32)
    exact = Fraction(1, 3) if share == 1 / 3 else Fraction(str(share))
    for number in (1, 3, 399, 400, 401, 799, 1000, 1999, 2000, 2400):
        mask = np.arange(2400)[None, :] < number
        chosen = select("kl_cov", (values, values, values, mask), share=share)
        assert chosen.sum() == max(1, math.floor(exact * number))


@pytest.mark.parametrize(
    ("name", "axis"),
    quick.pairs(list(losses.SELECTIONS), {"auto": AxisType.Auto, "explicit": AxisType.Explicit}),
)
def test_sharding_changes_no_choice(name, axis):
    arrays = spread_out(8, rows=16)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(axis,) * 2)
    expected, options = select(name, arrays, share=0.05), {"share": 0.05}

    @jax.jit
    def both(*arrays):
        chosen = losses.SELECTIONS[name](*arrays, **options)
        return chosen, losses.policy_loss(name, *arrays, given=options, selected=chosen).loss

    with jax.set_mesh(mesh):
        placed = NamedSharding(mesh, PartitionSpec("data", "tensor"))
        chosen, loss = both(*(jax.device_put(x, placed) for x in arrays))
    np.testing.assert_array_equal(chosen, expected)
    plain = evaluate(name, arrays, expected, share=0.05)[0].loss
    np.testing.assert_allclose(loss, plain, rtol=1e-6)


def test_policy_loss_calls_by_name():
    arrays = [jnp.asarray(x) for x in batch(9)]
    expected = losses.clip(*arrays, clip_low=0.1)
    found = losses.policy_loss("clip", *arrays, given={"clip_low": 0.1})
    np.testing.assert_array_equal(found.loss, expected.loss)
    with pytest.raises(InputError, match="'kl_cov' needs the tokens that `select` finds"):
        losses.policy_loss("kl_cov", *arrays, given={})


def test_options_are_those_of_the_signatures():
    assert losses.options("reinforce") == {}
    assert losses.options("clip") == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert losses.options("gspo") == {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}
    for name in losses.LOSSES:
        losses.check_options(name, {})
        losses.check_options(name, losses.options(name))
        assert losses.uses_ratio(name) == (name != "reinforce")
    for name, function in losses.SELECTIONS.items():
        parameters = inspect.signature(function).parameters.values()
        chosen = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert chosen == losses.options(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("clipp", {}, "loss 'clipp' is unknown; did you mean 'clip'?"),
        ("reinforce", {"clip_low": 0.1}, "'reinforce' has no options, but 'clip_low' was given"),
        ("clip", {"clip_hi": 0.1}, "'clip_hi' is unknown; did you mean 'clip_high'?"),
        ("cispo", {"dual_clip": 3.0}, "the loss 'cispo': option 'dual_clip' is unknown; known: "),
        ("clip", {"clip_low": 1.5}, r"clip_low is 1.5; it must lie in \[0, 1\]"),
        ("cispo", {"clip_low": -0.1}, r"clip_low is -0.1; it must lie in \[0, 1\]"),
        ("gmpo", {"clip_low": -0.1}, "clip_low is -0.1; it must be 0 or more"),
        ("clip", {"clip_high": -0.1}, "clip_high is -0.1; it must be 0 or more"),
        ("clip", {"dual_clip": 1.0}, "dual_clip is 1.0; it must lie above 1$"),
        ("clip", {"clip_high": None}, "clip_high is None; it must be a finite number"),
        ("clip", {"clip_low": math.nan}, "clip_low is nan; it must be a finite number"),
        ("dppo_tv", {"ratio_cap": math.inf}, "ratio_cap is inf; it must be a finite number"),
        ("dppo_kl", {"ratio_cap": 0.9}, "ratio_cap is 0.9; it must be 1 or more"),
        ("sapo", {"temperature_negative": 0}, "temperature_negative is 0; it must be positive"),
        ("kl_cov", {"share": 0.0}, r"share is 0.0; it must lie in \(0, 1\]"),
        ("kl_cov", {"share": "few"}, "share is 'few'; it must be a finite number"),
        ("kl_cov", {"coefficient": -1.0}, "coefficient is -1.0; it must be 0 or more"),
        ("clip_cov", {"lower": 6.0}, "lower is 6.0; it must lie below upper, which is 5.0"),
        ("clip_cov", {"upper": True}, "upper is True; it must be a finite number"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, options, message):
    with pytest.raises(InputError, match=message) as refused:
        losses.check_options(name, options)
    assert "\n" not in str(refused.value)


def test_wide_options_are_taken():
    losses.check_options("gmpo", {"clip_low": 2.0})
    losses.check_options("clip_cov", {"lower": -2.0, "upper": -1, "share": 1.0, "dual_clip": 1.3})
    losses.check_options("clip", {"clip_high": 1000.0, "dual_clip": 3.0})


@functools.partial(jax.jit, static_argnums=2)
def kl_estimates(x, y, cap):
    """By estimator: the gradient of the sum, and the values."""

    def total(x, estimator):
        value = kl_estimate(x, y, estimator=estimator, cap=cap)
        return jnp.sum(value), value

    return {name: jax.grad(total, has_aux=True)(x, name) for name in get_args(KL)}


def verl_kl(d, estimator, cap):
    held = np.clip(-d, -20, 20)
    k3 = np.exp(held) - held - 1
    value = {"k1": d, "k2": 0.5 * d**2, "abs": np.abs(d), "k3": k3}[estimator]
    return value if cap is None else np.clip(value, -cap, cap)


@given(
    seed=st.integers(0, 999),
    spread=st.sampled_from([0.1, 2.0, 30.0]),
    cap=st.sampled_from([None, 10]),
)
@settings(max_examples=16)
def test_kl_estimates_match_the_formulas_and_their_gradients(seed, spread, cap):
    x, y, *_ = batch(seed, spread=spread)
    d = x.astype(np.float64) - y
    for name, (gradient, value) in kl_estimates(x, y, cap).items():
        plain = name.removesuffix("+")
        expected = verl_kl(d, plain, cap)
        np.testing.assert_allclose(value, expected, rtol=2e-4, atol=1e-5, err_msg=name)
        smooth = (np.abs(np.abs(d) - 20) > 1e-3) & (d != 0)
        smooth &= np.abs(np.abs(verl_kl(d, plain, None)) - 10) > 1e-3
        rising = d if name.endswith("+") else slope(lambda d, k=plain: verl_kl(d, k, cap), d)
        np.testing.assert_allclose(
            gradient[smooth], rising[smooth], rtol=2e-4, atol=1e-5, err_msg=name
        )


def test_a_cap_holds_every_estimate_and_equal_policies_have_none():
    x, y = np.zeros((2, 5, 8), np.float32)
    x[0, :2], y[0, :2] = (-30.0, -1.0), (-1.0, -30.0)
    for name, (gradient, value) in kl_estimates(x, y, 10).items():
        assert np.all(np.abs(value) <= 10.0), name
        assert not np.any(value[1:]), name
        expected = [-29.0, 29.0, 0.0] if name.endswith("+") else [0.0, 0.0, name == "k1"]
        np.testing.assert_allclose(gradient[0, :3], np.asarray(expected, np.float32), err_msg=name)


def test_k3_is_as_exact_for_small_differences_as_for_large_ones():
    """Against float64, in which the series serves near 0; both signs."""
    sizes = np.append(np.logspace(-8, 1, 400), 1.0)
    d = np.concatenate([-sizes, sizes]).astype(np.float32)
    wide = d.astype(np.float64)
    series = sum((-wide) ** n / math.factorial(n) for n in range(2, 25))
    value = np.where(np.abs(wide) < 1.0, series, np.expm1(-wide) + wide)
    for name in ("k3", "k3+"):
        gradient, found = kl_estimates(d, np.zeros_like(d), None)[name]
        np.testing.assert_allclose(found, value, rtol=1e-6, err_msg=name)
        rising = -np.expm1(-wide) if name == "k3" else wide
        np.testing.assert_allclose(gradient, rising, rtol=1e-6, err_msg=name)


def test_kl_estimate_refuses_what_it_does_not_know():
    x = jnp.zeros(2)
    with pytest.raises(InputError, match=r"'k3\+\+' is unknown; did you mean 'k3\+'"):
        kl_estimate(x, x, estimator="k3++")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"cap is 0\.0; it must be positive"):
        kl_estimate(x, x, estimator="k1", cap=0.0)
