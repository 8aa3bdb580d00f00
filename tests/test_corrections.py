"""Identities that hold for every recipe, composition, state, and refusal of wrong construction."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tim_jax import corrections
from tim_jax.corrections import blocks, coefficients, ratios
from tim_jax.errors import InputError

REQUIRED = {"trust_region_masking": {"bound": 0.05}}
CASES = {
    name: corrections.build([{"name": name, **REQUIRED.get(name, {})}])
    for name in corrections.RECIPES
}
ROW_BY_ROW = list(CASES)
SHRUNK = {
    f"{name}-{aggregation}": corrections.build([{"name": name, "shrink": aggregation}])
    for name in ("vexact", "k3_rejection_token_tis")
    for aggregation in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")
}
NORMALISED = {
    f"normalised-{unit}-{among}": corrections.build(
        [
            {"name": "token_tis"},
            {"name": "reject", "statistic": "k3", "over": "mean", "upper": 0.05},
            {"name": "normalise", "unit": unit, "among": among},
        ]
    )
    for unit in ("token", "sequence")
    for among in ("response", "survivors")
}
BLOCKS = {
    **{f"ratio-{x}": corrections.scale_by_ratio(x) for x in ("token", "sequence", "geometric")},
    "two-sided": corrections.scale_by_truncated_ratio("token", lower=0.5, upper=2.0),
    "k2-token": corrections.reject("k2", over="token", upper=0.1),
    "k1-max": corrections.reject("k1", over="max", lower=0.5, upper=2.0),
}
CASES = {**CASES, **SHRUNK, **NORMALISED, **BLOCKS}
ROW_BY_ROW = ROW_BY_ROW + list(BLOCKS)


def batch(seed=0, rows=8, width=13, spread=0.2):
    rng = np.random.default_rng(seed)
    scale = spread * 10.0 ** rng.uniform(-3, 0.3, size=(rows, 1))
    lengths = rng.integers(1, width + 1, size=rows)
    lengths[-1] = 0
    return {
        "log_ratio": jnp.asarray(scale * rng.standard_normal((rows, width)), jnp.float32),
        "mask": jnp.asarray(np.arange(width)[None, :] < lengths[:, None]),
        "log_probs": jnp.asarray(-rng.exponential(size=(rows, width)), jnp.float32),
        "advantages": jnp.asarray(rng.standard_normal(rows), jnp.float32),
    }


def run(case, arrays, **extra):
    return coefficients(CASES[case], **arrays, **extra)


def run_each(arrays):
    return {case: run(case, arrays) for case in CASES}


run_all = jax.jit(run_each)


def same_bits(left, right, what=""):
    left, right = np.asarray(left), np.asarray(right)
    assert left.dtype == right.dtype == np.float32, what
    assert np.array_equal(left.view(np.int32), right.view(np.int32)), what


def all_same_bits(left, right, cases=tuple(CASES)):
    for case in cases:
        same_bits(left[case], right[case], case)


def test_zero_mismatch_gives_exact_ones():
    arrays = batch(1)
    arrays["log_ratio"] = jnp.zeros_like(arrays["log_ratio"])
    ones = arrays["mask"].astype(jnp.float32)
    for results in (run_all(arrays), run_each(arrays)):
        all_same_bits(results, dict.fromkeys(CASES, ones))


@given(seed=st.integers(0, 10**6), spread=st.floats(0, 30))
@settings(deadline=None, max_examples=30)
def test_nan_in_the_padding_changes_nothing(seed, spread):
    arrays = batch(seed, spread=spread)
    poisoned = {
        k: jnp.where(arrays["mask"], v, jnp.nan) if v.ndim == 2 and k != "mask" else v
        for k, v in arrays.items()
    }
    all_same_bits(run_all(arrays), run_all(poisoned))


@pytest.mark.parametrize("case", sorted(set(CASES) - {"none"}))
def test_nan_in_the_padding_of_the_coefficients_changes_nothing(case):
    arrays = batch(2)
    start = jnp.where(arrays["mask"], 1.0, jnp.nan)
    result, _ = CASES[case].update(start, CASES[case].init(start), **arrays)
    same_bits(result, run(case, arrays))


@pytest.mark.parametrize("size", [30.0, 300.0, 700.0, np.inf])
def test_extreme_ratios_give_numbers(size):
    arrays = batch(3)
    sign = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], size=arrays["mask"].shape)
    sign[0], sign[1] = 1.0, -1.0
    wild = np.where(sign == 0, 0.0, np.copysign(size, sign))
    arrays["log_ratio"] = jnp.asarray(wild, jnp.float32)
    for case, result in run_all(arrays).items():
        assert np.all(np.isfinite(np.asarray(result))), case
        assert np.all(np.asarray(result) >= 0), case


@pytest.mark.parametrize("statistic", ["ratio", "error", "k3", "binary_kl"])
def test_a_tokens_statistic_has_the_same_bits_among_any_number_of_tokens(statistic):
    """XLA's own exp and log do not: their bits may follow the number of elements."""
    rng = np.random.default_rng(0)
    drawn = jnp.asarray(rng.standard_normal((1, 400)) * 10 ** rng.uniform(-4, 1, 400), jnp.float32)
    log_probs = jnp.asarray(-rng.exponential(size=(1, 400)), jnp.float32)
    run = jax.jit(lambda d, t: ratios.token_statistic(statistic, d, log_probs=t))
    whole = np.asarray(run(drawn, log_probs))
    assert len(np.unique(whole)) > 300
    for count in (1, 3, 5, 7, 11, 13, 14, 15, 31):
        start = 400 - 3 * count
        part = run(drawn[:, start : start + count], log_probs[:, start : start + count])
        assert np.asarray(part).tobytes() == whole[:, start : start + count].tobytes(), count


@pytest.mark.parametrize("case", CASES)
def test_no_recipe_takes_an_exponential_or_logarithm_of_xla(case):
    """Whose bits may follow the number of elements, on processors that this suite may not meet."""
    program = jax.jit(lambda arrays: run(case, arrays)).lower(batch()).as_text()
    assert "stablehlo" in program
    for name in ("exponential", "stablehlo.log", "power", "tanh"):
        assert name not in program


def test_jit_gives_the_bits_of_eager():
    arrays = batch(4)
    all_same_bits(run_all(arrays), run_each(arrays))


@given(seed=st.integers(0, 10**6), spread=st.floats(0, 3))
@settings(deadline=None, max_examples=20)
def test_chunks_give_the_bits_of_the_whole(seed, spread):
    arrays = batch(seed, spread=spread)
    parts = [run_all({k: v[i : i + 2] for k, v in arrays.items()}) for i in range(0, 8, 2)]
    joined = {case: np.concatenate([part[case] for part in parts]) for case in ROW_BY_ROW}
    all_same_bits(joined, run_all(arrays), ROW_BY_ROW)


@given(seed=st.integers(0, 10**6), spread=st.floats(0, 3))
@settings(deadline=None, max_examples=20)
def test_longer_padding_and_empty_rows_change_no_bit(seed, spread):
    arrays = batch(seed, spread=spread)
    padded = {
        k: jnp.pad(v, ((0, 3), (0, 6)) if v.ndim == 2 else ((0, 3),)) for k, v in arrays.items()
    }
    cut = {case: result[:8, :13] for case, result in run_all(padded).items()}
    all_same_bits(cut, run_all(arrays))


@pytest.mark.parametrize("spec", [("x",), ("x", "y"), (None, "y")], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_batches_give_the_bits_of_one_device(spec, kind):
    arrays = batch(7, width=16)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    sharded = {
        k: jax.device_put(v, NamedSharding(mesh, PartitionSpec(*spec[: v.ndim])))
        for k, v in arrays.items()
    }
    all_same_bits(run_all(sharded), run_all(arrays))


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_shard_map_gives_the_bits_of_one_device(devices, unit):
    arrays = batch(8)

    def chain(axis_name):
        return optax.chain(
            corrections.reject("k3", over="mean", upper=1e-3),
            corrections.shrink_denominator("sequence_mean_token_mean", axis_name=axis_name),
            corrections.token_tis(),
            corrections.normalise(unit, axis_name=axis_name),
        )

    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(
        lambda x: coefficients(chain("data"), **x),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    whole = coefficients(chain(None), **arrays)
    assert 0 < np.count_nonzero(np.asarray(whole)) < int(arrays["mask"].sum())
    same_bits(jax.jit(split)(arrays), whole)


@pytest.mark.parametrize("unit", ["token", "sequence"])
@given(seed=st.integers(0, 10**6), spread=st.floats(0, 3))
@settings(deadline=None, max_examples=20)
def test_normalised_coefficients_average_one(unit, seed, spread):
    arrays = batch(seed, spread=spread)
    chain = optax.chain(corrections.token_tis(), corrections.normalise(unit))
    result = np.float64(coefficients(chain, **arrays))
    lengths = np.asarray(arrays["mask"]).sum(axis=1)[:-1]
    rows_mean = result.sum(axis=1)[:-1] / lengths
    mean = result.sum() / lengths.sum() if unit == "token" else rows_mean.mean()
    assert mean == pytest.approx(1.0, rel=1e-6)


def test_multiplying_blocks_commute_and_batch_statistics_do_not():
    arrays = batch(9)
    tis = corrections.scale_by_truncated_ratio("token", upper=1.2)
    rejection = corrections.reject("k3", over="mean", upper=1e-3)
    normalise = corrections.normalise("token")

    def of(*chain):
        return np.asarray(coefficients(optax.chain(*chain), **arrays))

    same_bits(of(tis, rejection), of(rejection, tis))
    rejected_last, rejected_first = of(tis, normalise, rejection), of(rejection, tis, normalise)
    assert 0 < np.count_nonzero(rejected_last) == np.count_nonzero(rejected_first)
    assert rejected_first.sum() > 1.01 * rejected_last.sum()
    shrink = corrections.shrink_denominator("token_mean")
    assert of(rejection, shrink).sum() == pytest.approx(float(arrays["mask"].sum()))
    assert of(shrink, rejection).sum() == of(rejection).sum() < int(arrays["mask"].sum())


def test_survivors_alone_can_be_normalised():
    arrays = batch(9)
    rejection = corrections.reject("k3", over="mean", upper=1e-3)
    kept = coefficients(rejection, **arrays)
    everyone = coefficients(optax.chain(rejection, corrections.normalise("sequence")), **arrays)
    among = corrections.normalise("sequence", among="survivors")
    survivors = coefficients(optax.chain(rejection, among), **arrays)
    share = np.mean(np.asarray(kept)[:-1].max(axis=1))
    assert 0 < share < 1
    np.testing.assert_allclose(everyone, kept / share, rtol=1e-6)
    same_bits(survivors, kept)


def test_running_mean_divides_by_the_past_and_stays_one_on_policy():
    block = optax.chain(
        corrections.token_tis(cap=5.0), corrections.normalise_by_running_mean(decay=0.9)
    )
    first, second = batch(10), batch(11)
    start = first["mask"].astype(jnp.float32)
    state = block.init(start)
    update = jax.jit(lambda start, state, arrays: block.update(start, state, **arrays))
    one, state = update(start, state, first)
    plain = coefficients(corrections.token_tis(cap=5.0), **first)
    same_bits(one, plain)
    mean = np.float64(plain).sum() / float(first["mask"].sum())
    two, _ = update(second["mask"].astype(jnp.float32), state, second)
    expected = coefficients(corrections.token_tis(cap=5.0), **second)
    np.testing.assert_allclose(two, expected / (1 + 0.1 * (mean - 1)), rtol=1e-6)
    on_policy = {**first, "log_ratio": jnp.zeros_like(first["log_ratio"])}
    state = block.init(start)
    for _ in range(3):
        ones, state = update(start, state, on_policy)
        same_bits(ones, start)


def test_updates_compile_once():
    traces = []
    block = CASES["vexact-token_mean"]

    @jax.jit
    def update(arrays):
        traces.append(None)
        return coefficients(block, **arrays)

    update(batch(0))
    update(batch(1))
    assert len(traces) == 1


def test_partition_masked_and_users_transforms_compose():
    trees = [batch(12), batch(13)]
    extra = {k: {"maths": trees[0][k], "code": trees[1][k]} for k in trees[0]}
    start = jax.tree.map(lambda m: m.astype(jnp.float32), extra["mask"])
    parts = {"strict": CASES["token_mis"], "mild": optax.chain(CASES["vexact"], optax.scale(0.5))}
    chain = optax.partition(parts, {"maths": "strict", "code": "mild"})
    result, _ = chain.update(start, chain.init(start), **extra, unknown_extra=3)
    same_bits(result["maths"], run("token_mis", trees[0]))
    same_bits(result["code"], run("vexact", trees[1]) * 0.5)
    for block in (CASES["token_tis"], corrections.normalise_by_running_mean()):
        only = optax.masked(block, {"maths": True, "code": False})
        result, _ = only.update(start, only.init(start), **extra)
        same_bits(result["code"], start["code"])
    same_bits(run("token_tis", trees[0]), only_of(CASES["token_tis"], start, extra)["maths"])


def only_of(block, start, extra):
    masked = optax.masked(block, {"maths": True, "code": False}, mask_compatible_extra_args=True)
    return masked.update(start, masked.init(start), **extra)[0]


def test_a_block_of_ones_own():
    def halve_late(coefficients, mask, log_ratio):
        del mask, log_ratio
        late = jnp.arange(coefficients.shape[1])[None, :] >= 4
        return jnp.where(late, 0.5 * coefficients, coefficients)

    block = corrections.map_coefficients("halve_late", halve_late, needs=("log_ratio",))
    arrays = batch(14)
    result = coefficients(optax.chain(CASES["token_tis"], block), **arrays)
    expected = np.array(run("token_tis", arrays))
    expected[:, 4:] *= 0.5
    same_bits(result, expected)


def test_advantages_may_be_per_token_and_select_their_side():
    arrays = batch(15)
    per_row = run("dppo", arrays)
    per_token = jnp.broadcast_to(arrays["advantages"][:, None], arrays["mask"].shape)
    same_bits(per_row, run("dppo", {**arrays, "advantages": per_token}))
    arrays["log_probs"] = jnp.full(arrays["mask"].shape, jnp.log(0.9))
    arrays["log_ratio"] = jnp.full(arrays["mask"].shape, jnp.log(0.9 / 0.5))
    kept = np.asarray(run("dppo", arrays)) != 0
    wrong_way = np.asarray(arrays["advantages"])[:, None] > 0
    assert np.array_equal(kept, np.asarray(arrays["mask"]) & ~wrong_way)


def test_exact_divergence_may_be_given():
    arrays = batch(16)
    divergence = jnp.where(jnp.arange(8)[:, None] == 3, 0.2, 0.01) * jnp.ones((8, 13))
    block = corrections.trust_region_masking(bound=0.1, statistic="divergence")
    kept = coefficients(block, **arrays, divergence=divergence)
    expected = np.asarray(arrays["mask"], np.float32)
    expected[3] = 0
    same_bits(kept, expected)


@pytest.mark.parametrize(
    ("case", "missing"),
    [("kpop", "log_probs"), ("dppo", "advantages"), ("token_tis", "log_ratio"), ("vexact", "mask")],
)
def test_a_missing_extra_argument_is_named(case, missing):
    arrays = batch()
    start = arrays["mask"].astype(jnp.float32)
    del arrays[missing]
    with pytest.raises(InputError, match=f"needs the extra argument '{missing}'"):
        CASES[case].update(start, CASES[case].init(start), **arrays)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: corrections.token_tis(cap=-2.0), "upper is -2.0"),
        (lambda: corrections.token_tis(cap=0.5), "upper is 0.5; below 1"),
        (lambda: corrections.token_tis(cap=float("nan")), "upper is nan"),
        (lambda: corrections.icepop(lower=5.0, upper=2.0), "lower is 5.0, above upper"),
        (lambda: corrections.mask_outside("token", lower=1.5), "lower is 1.5; above 1"),
        (lambda: corrections.mask_outside("token"), "no bound on the ratio"),
        (lambda: corrections.scale_by_ratio("sentence"), "level 'sentence' is unknown"),
        (lambda: corrections.scale_by_ratio("geometrc"), "did you mean 'geometric'"),
        (lambda: corrections.reject("k4", over="mean", upper=1.0), "statistic 'k4' is unknown"),
        (lambda: corrections.reject("k3", over="rows", upper=1.0), "over 'rows' is unknown"),
        (lambda: corrections.reject("k3", over="mean"), "upper is None"),
        (lambda: corrections.reject("k3", over="mean", upper=-1.0), "upper is -1.0"),
        (lambda: corrections.reject("k3", over="mean", lower=0.1, upper=1.0), "upper bound only"),
        (lambda: corrections.reject("error", over="mean", upper=0.9), "upper is 0.9"),
        (lambda: corrections.reject("error", over="sum", upper=2.0), "grows with length"),
        (lambda: corrections.reject("ratio", over="sum", upper=2.0), "grows with length"),
        (lambda: corrections.veto(0.0), "threshold is 0.0"),
        (lambda: corrections.veto(2.0), "threshold is 2.0"),
        (lambda: corrections.dppo(bound=-0.1), "upper is -0.1"),
        (lambda: corrections.mask_probability_difference(), "no bound"),
        (lambda: corrections.where_advantage("up", corrections.token_tis()), "sign 'up'"),
        (lambda: corrections.vexact(bound=-0.001), "bound is -0.001"),
        (lambda: corrections.off_policy_sequence_mask(bound=-1.0), "bound is -1.0"),
        (lambda: corrections.normalise("row"), "unit 'row' is unknown"),
        (lambda: corrections.normalise("token", among="kept"), "among 'kept' is unknown"),
        (lambda: corrections.normalise_by_running_mean(decay=1.0), "decay is 1.0"),
        (lambda: corrections.shrink_denominator("mean"), "aggregation 'mean' is unknown"),
        (lambda: corrections.vexact(shrink="mean"), "aggregation 'mean' is unknown"),
        (lambda: corrections.build([{"cap": 2.0}]), "has no name"),
        (lambda: corrections.build([{"name": "token_ti"}]), "did you mean 'token_tis'"),
        (lambda: corrections.build([{"name": "token_tis", "cup": 2}]), "did you mean 'cap'"),
        (lambda: corrections.build([{"name": "token_tis", "cap": "2"}]), "must be a number"),
        (lambda: corrections.build([{"name": "trust_region_masking"}]), "needs the argument"),
    ],
)
def test_wrong_construction_is_refused_in_one_line(make, message):
    with pytest.raises(InputError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_named_entries_chain_in_order():
    entries = [{"name": "icepop", "upper": 4.0}, {"name": "normalise", "unit": "token"}]
    by_hand = optax.chain(corrections.icepop(upper=4.0), corrections.normalise("token"))
    arrays = batch(17)
    same_bits(coefficients(corrections.build(entries), **arrays), coefficients(by_hand, **arrays))
    assert corrections.needs_whole_batch(entries)
    assert corrections.needs_whole_batch([{"name": "vexact", "shrink": "token_mean"}])
    assert not corrections.needs_whole_batch([{"name": "vexact"}, {"name": "icepop"}])
    same_bits(coefficients(corrections.build([]), **arrays), arrays["mask"].astype(jnp.float32))


def test_veto_reads_the_ratio_beyond_the_bound_of_20():
    d = jnp.asarray([[0.0, -30.0], [0.0, -80.0]])
    kept = coefficients(corrections.veto(1e-30), log_ratio=d, mask=jnp.ones((2, 2), bool))
    assert kept.tolist() == [[1, 1], [0, 0]]


def test_integer_masks_and_starts_are_understood():
    arrays = batch(18)
    expected = run("vexact", arrays)
    whole = {**arrays, "mask": arrays["mask"].astype(jnp.int32)}
    result, _ = CASES["vexact"].update(whole["mask"], CASES["vexact"].init(whole["mask"]), **whole)
    same_bits(result, expected)
    assert blocks.is_masked_node(optax.MaskedNode())
