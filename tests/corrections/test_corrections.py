"""Identities that hold for every recipe, composition, state, and refusal of wrong construction."""

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tim_jax import corrections
from tim_jax.common.errors import InputError
from tim_jax.corrections import base, coefficients, correct, ratios

UNTYPED = cast(Any, corrections)  # takes what a type checker would refuse
REQUIRED = {"trust_region_masking": {"bound": 0.05}}
CASES = {
    name: corrections.build([{"name": name, **REQUIRED.get(name, {})}])
    for name in corrections.RECIPES
}
RECIPES = list(CASES)
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
    "ratio-turn": corrections.scale_by_ratio("turn"),
    "two-sided": corrections.scale_by_truncated_ratio("token", lower=0.5, upper=2.0),
    "k2-token": corrections.reject("k2", over="token", upper=0.1),
    "k1-max": corrections.reject("k1", over="max", lower=0.5, upper=2.0),
}
CASES = {**CASES, **NORMALISED, **BLOCKS}
NORMALISED_TIS = {
    unit: corrections.chain(corrections.token_tis(), corrections.normalise(unit))
    for unit in ("token", "sequence")
}
ROW_BY_ROW = tuple(case for case in CASES if not CASES[case].whole_batch)
# Every block and statistic once: recipes are chains of them.
CORE = (
    *("token_tis_veto", "geometric_mis", "kpop", "sequence_tis_product_rejection", "dppo"),
    *("trust_region_masking", "off_policy_sequence_mask", "error_rejection", "ais"),
    *("normalised-sequence-survivors", "ratio-turn"),
)
OF_CASES = pytest.mark.parametrize(
    "cases", [CORE, pytest.param(tuple(CASES), marks=pytest.mark.slow)], ids=["core", "all"]
)


def batch(seed=0, rows=8, width=16, spread=0.2) -> dict[str, Any]:
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


def run_each(arrays, cases=tuple(CASES)):
    return {case: run(case, arrays) for case in cases}


run_all = jax.jit(run_each, static_argnames="cases")


@functools.partial(jax.jit, static_argnums=0)
def applied_by(correction, arrays):
    """The coefficients of a first batch, and the tokens that are kept."""
    start = arrays["mask"].astype(jnp.float32)
    return corrections.apply(correction, start, correction.init(start), **arrays)[:2]


measure = jax.jit(corrections.correction_metrics)


# What a recipe reads beside the log-ratio, and a number for each of its arguments: one that is an
# integer where that is allowed.
READS = {
    "none": (),
    "kpop": ("log_ratio", "log_probs"),
    "dppo": ("log_ratio", "log_probs", "advantages"),
    "off_policy_sequence_mask": ("log_ratio", "advantages"),
}
ARGUMENTS = {
    "token_tis": {"cap": 3},
    "sequence_tis": {"cap": 3},
    "token_mis": {"cap": 1},
    "sequence_mis": {"cap": 4},
    "geometric_mis": {"lower": 0.75, "upper": 1},
    "icepop": {"lower": 1, "upper": 2},
    "kpop": {"bound": 1},
    "geometric_rejection": {"lower": 0.75, "upper": 2},
    "geometric_rejection_token_tis": {"lower": 0.75, "upper": 2, "cap": 1},
    "geometric_rejection_sequence_tis": {"lower": 0.75, "upper": 2, "cap": 4},
    "k3_rejection": {"bound": 1},
    "k3_rejection_token_tis": {"bound": 1, "cap": 2},
    "sequence_tis_product_rejection": {"cap": 4, "lower": 0.25, "upper": 8},
    "seq_mask_tis": {"lower": 1, "upper": 2},
    "token_tis_veto": {"cap": 2, "threshold": 0.5},
    "trust_region_masking": {"bound": 1},
    "dppo": {"bound": 0.25},
    "off_policy_sequence_mask": {"bound": 0.25},
    "error_rejection": {"bound": 2},
    "vexact": {"cap": 2, "bound": 0.25},
    "ais": {"cap": 2, "kl_scale": 1},
}


def assert_same_bits(left, right, what=""):
    left, right = np.asarray(left), np.asarray(right)
    assert left.dtype == right.dtype == np.float32, what
    assert np.array_equal(left.view(np.int32), right.view(np.int32)), what


def assert_all_same_bits(left, right, cases=tuple(CASES)):
    for case in cases:
        assert_same_bits(left[case], right[case], case)


def test_zero_mismatch_gives_exact_ones():
    arrays = batch(1)
    arrays["log_ratio"] = jnp.zeros_like(arrays["log_ratio"])
    ones = arrays["mask"].astype(jnp.float32)
    for results in (run_all(arrays), run_each(arrays)):
        assert_all_same_bits(results, dict.fromkeys(CASES, ones))


@given(seed=st.integers(0, 10**6), spread=st.floats(0, 30))
@settings(deadline=None, max_examples=30)
def test_nan_in_the_padding_changes_nothing(seed, spread):
    arrays = batch(seed, spread=spread)
    poisoned = {
        k: jnp.where(arrays["mask"], v, jnp.nan) if v.ndim == 2 and k != "mask" else v
        for k, v in arrays.items()
    }
    assert_all_same_bits(run_all(arrays), run_all(poisoned))


@pytest.mark.parametrize("case", sorted(set(CASES) - {"none"}))
def test_nan_in_the_padding_of_the_coefficients_changes_nothing(case):
    arrays = batch(2)
    start = jnp.where(arrays["mask"], 1.0, jnp.nan)
    result, _ = CASES[case].update(start, CASES[case].init(start), **arrays)
    assert_same_bits(result, run(case, arrays))


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


def test_no_recipe_takes_an_exponential_or_logarithm_of_xla():
    """Whose bits may follow the number of elements, on processors that this suite may not meet."""
    program = run_all.lower(batch()).as_text()
    assert "stablehlo" in program
    for name in ("exponential", "stablehlo.log", "power", "tanh"):
        assert name not in program


def test_jit_gives_the_bits_of_eager():
    arrays = batch(4)
    assert_all_same_bits(run_all(arrays), run_each(arrays))


@OF_CASES
@given(seed=st.integers(0, 10**6), spread=st.floats(0, 3))
@settings(deadline=None, max_examples=20)
def test_chunks_give_the_bits_of_the_whole(cases, seed, spread):
    arrays = batch(seed, spread=spread)
    by_row = tuple(case for case in cases if case in ROW_BY_ROW)
    parts = [run_all({k: v[i : i + 2] for k, v in arrays.items()}, by_row) for i in range(0, 8, 2)]
    joined = {case: np.concatenate([part[case] for part in parts]) for case in by_row}
    assert_all_same_bits(joined, run_all(arrays), by_row)


@OF_CASES
@given(seed=st.integers(0, 10**6), spread=st.floats(0, 3))
@settings(deadline=None, max_examples=20)
def test_longer_padding_and_empty_rows_change_no_bit(cases, seed, spread):
    arrays = batch(seed, spread=spread)
    padded = {
        k: jnp.pad(v, ((0, 3), (0, 6)) if v.ndim == 2 else ((0, 3),)) for k, v in arrays.items()
    }
    cut = {case: result[:8, :16] for case, result in run_all(padded, cases).items()}
    assert_all_same_bits(cut, run_all(arrays), cases)


@pytest.mark.parametrize(
    ("spec", "kind", "cases"),
    [
        *(
            pytest.param(*pair.values, CORE, id=pair.id, marks=pair.marks)
            for pair in quick.pairs(
                {"x": ("x",), "xy": ("x", "y"), "y": (None, "y")},
                {"auto": AxisType.Auto, "explicit": AxisType.Explicit},
            )
        ),
        pytest.param(("x", "y"), AxisType.Explicit, tuple(CASES), id="all", marks=pytest.mark.slow),
    ],
)
def test_sharded_batches_give_the_bits_of_one_device(spec, kind, cases):
    arrays = batch(7)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    sharded = {
        k: jax.device_put(v, NamedSharding(mesh, PartitionSpec(*spec[: v.ndim])))
        for k, v in arrays.items()
    }
    assert_all_same_bits(run_all(sharded, cases), run_all(arrays), cases)


@pytest.mark.parametrize(("devices", "unit"), quick.pairs([2, 4, 8], ["token", "sequence"]))
def test_shard_map_gives_the_bits_of_one_device(devices, unit):
    arrays = batch(8)

    def chain(axis_name):
        return corrections.chain(
            corrections.reject("k3", over="mean", upper=1e-3),
            corrections.token_tis(),
            corrections.normalise(unit, axis_name=axis_name),
            corrections.mix_in_adaptively(upper=2.0, axis_name=axis_name),
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
    assert_same_bits(jax.jit(split)(arrays), whole)


def by_shard_map(step, mesh):
    rows, all_of_it = PartitionSpec("data"), PartitionSpec()
    return jax.shard_map(step, mesh=mesh, in_specs=(rows, all_of_it), out_specs=(rows, all_of_it))


def by_halves(wrap):
    """`wrap(step)` over two halves of the rows; what it gives, and the state of one of them."""

    def whole(step, mesh):
        split = wrap(step, axis_name="data", in_axes=(0, None))

        def halves(arrays, state):
            arrays = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), arrays)
            found, states = split(arrays, state)
            return found.reshape(-1, found.shape[-1]), jax.tree.map(lambda x: x[1], states)

        return halves

    return whole


SPLITS = {"shard_map": by_shard_map, "pmap": by_halves(jax.pmap), "vmap": by_halves(jax.vmap)}


@pytest.mark.parametrize("split", SPLITS)
def test_a_running_mean_of_split_rows_is_that_of_the_whole_batch(split):
    def step(axis_name):
        running = corrections.normalise_by_running_mean(decay=0.5, axis_name=axis_name)
        chain = corrections.chain(corrections.token_tis(), running)

        def update(arrays, state):
            start = arrays["mask"].astype(jnp.float32)
            applied = corrections.apply(chain, start, state, **arrays)
            return applied.coefficients, applied.state

        return chain, update

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    (chain, whole), (_, part) = step(None), step("data")
    whole, parts = jax.jit(whole), jax.jit(SPLITS[split](part, mesh))
    expected: Any = (None, chain.init(jnp.ones((1, 1))))
    found = expected
    for seed in (8, 9):
        arrays = batch(seed, spread=1.0)
        expected, found = whole(arrays, expected[1]), parts(arrays, found[1])
        jax.tree.map(assert_same_bits, found, expected)
    assert float(expected[1][1].mean) != 1.0


@pytest.mark.parametrize("unit", ["token", "sequence"])
@given(seed=st.integers(0, 10**6), spread=st.floats(0, 3))
@settings(deadline=None, max_examples=20)
def test_normalised_coefficients_average_one(unit, seed, spread):
    arrays = batch(seed, spread=spread)
    result = np.float64(applied_by(NORMALISED_TIS[unit], arrays)[0])
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
        return np.asarray(coefficients(corrections.chain(*chain), **arrays))

    assert_same_bits(of(tis, rejection), of(rejection, tis))
    rejected_last, rejected_first = of(tis, normalise, rejection), of(rejection, tis, normalise)
    assert 0 < np.count_nonzero(rejected_last) == np.count_nonzero(rejected_first)
    assert rejected_first.sum() > 1.01 * rejected_last.sum()


def test_survivors_alone_can_be_normalised():
    arrays = batch(9)
    rejection = corrections.reject("k3", over="mean", upper=1e-3)
    kept = coefficients(rejection, **arrays)
    everyone = coefficients(
        corrections.chain(rejection, corrections.normalise("sequence")), **arrays
    )
    among = corrections.normalise("sequence", among="survivors")
    survivors = coefficients(corrections.chain(rejection, among), **arrays)
    share = np.mean(np.asarray(kept)[:-1].max(axis=1))
    assert 0 < share < 1
    np.testing.assert_allclose(everyone, kept / share, rtol=1e-6)
    assert_same_bits(survivors, kept)


def test_running_mean_divides_by_the_past_and_stays_one_on_policy():
    block = corrections.chain(
        corrections.token_tis(cap=5.0), corrections.normalise_by_running_mean(decay=0.9)
    )
    first, second = batch(10), batch(11)
    start = first["mask"].astype(jnp.float32)
    state = block.init(start)
    update = jax.jit(lambda start, state, arrays: block.update(start, state, **arrays))
    one, state = update(start, state, first)
    plain = coefficients(corrections.token_tis(cap=5.0), **first)
    assert_same_bits(one, plain)
    mean = np.float64(plain).sum() / float(first["mask"].sum())
    two, _ = update(second["mask"].astype(jnp.float32), state, second)
    expected = coefficients(corrections.token_tis(cap=5.0), **second)
    np.testing.assert_allclose(two, expected / (1 + 0.1 * (mean - 1)), rtol=1e-6)
    on_policy = {**first, "log_ratio": jnp.zeros_like(first["log_ratio"])}
    state = block.init(start)
    for _ in range(3):
        ones, state = update(start, state, on_policy)
        assert_same_bits(ones, start)


def test_updates_compile_once():
    traces = []
    block = CASES["normalised-token-survivors"]

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
    parts: dict[Hashable, optax.GradientTransformation] = {
        "strict": CASES["token_mis"],
        "mild": optax.chain(CASES["vexact"], optax.scale(0.5)),
    }
    chain = optax.partition(parts, {"maths": "strict", "code": "mild"})
    result = applied(chain, start, **extra, unknown_extra=3)
    assert_same_bits(result["maths"], run("token_mis", trees[0]))
    assert_same_bits(result["code"], run("vexact", trees[1]) * 0.5)
    for block in (CASES["token_tis"], corrections.normalise_by_running_mean()):
        only = optax.masked(block, {"maths": True, "code": False})
        result = applied(only, start, **extra)
        assert_same_bits(result["code"], start["code"])
    assert_same_bits(run("token_tis", trees[0]), only_of(CASES["token_tis"], start, extra)["maths"])


def applied(transform, start, **extra) -> Any:
    """The coefficients of a first batch, an array or a dictionary of arrays."""
    return transform.update(start, transform.init(start), **extra)[0]


def only_of(block, start, extra):
    masked = optax.masked(block, {"maths": True, "code": False}, mask_compatible_extra_args=True)
    return applied(masked, start, **extra)


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
    assert_same_bits(result, expected)


def test_advantages_may_be_per_token_and_select_their_side():
    arrays = batch(15)
    per_row = run("dppo", arrays)
    per_token = jnp.broadcast_to(arrays["advantages"][:, None], arrays["mask"].shape)
    assert_same_bits(per_row, run("dppo", {**arrays, "advantages": per_token}))
    arrays["log_probs"] = jnp.full(arrays["mask"].shape, jnp.log(0.9))
    arrays["log_ratio"] = jnp.full(arrays["mask"].shape, jnp.log(0.9 / 0.5))
    kept = np.asarray(run("dppo", arrays)) != 0
    wrong_way = np.asarray(arrays["advantages"])[:, None] > 0
    assert np.array_equal(kept, np.asarray(arrays["mask"]) & ~wrong_way)


def test_exact_divergence_may_be_given():
    arrays = batch(16)
    divergence = jnp.where(jnp.arange(8)[:, None] == 3, 0.2, 0.01) * jnp.ones((8, 16))
    block = corrections.trust_region_masking(bound=0.1, statistic="divergence")
    kept = coefficients(block, **arrays, divergence=divergence)
    expected = np.asarray(arrays["mask"], np.float32)
    expected[3] = 0
    assert_same_bits(kept, expected)


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
        (lambda: corrections.token_tis(cap=-2.0), "upper bound is -2.0"),
        (lambda: corrections.token_tis(cap=0.5), "upper bound is 0.5; below 1"),
        (lambda: corrections.token_tis(cap=float("nan")), "upper bound is nan"),
        (lambda: UNTYPED.token_tis(cap="2"), "upper bound is '2'; .* must be a number above 0"),
        (lambda: UNTYPED.k3_rejection(bound="2"), "upper is '2'; for 'k3'"),
        (lambda: UNTYPED.dppo(bound="0.2"), "upper is '0.2'; as a bound"),
        (lambda: UNTYPED.normalise_by_running_mean(decay="0.5"), "decay is '0.5'; it must lie"),
        (lambda: corrections.icepop(lower=5.0, upper=2.0), "lower bound is 5.0, above the upper"),
        (lambda: corrections.mask_outside("token", lower=1.5), "lower bound is 1.5; above 1"),
        (lambda: corrections.mask_outside("token"), "no bound on the ratio"),
        (lambda: UNTYPED.scale_by_ratio("sentence"), "level 'sentence' is unknown"),
        (lambda: UNTYPED.scale_by_ratio("geometrc"), "did you mean 'geometric'"),
        (lambda: UNTYPED.reject("k4", over="mean", upper=1.0), "statistic 'k4' is unknown"),
        (lambda: UNTYPED.reject("k3", over="rows", upper=1.0), "over 'rows' is unknown"),
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
        (lambda: UNTYPED.where_advantage("up", corrections.token_tis()), "sign 'up'"),
        (lambda: corrections.vexact(bound=-0.001), "bound is -0.001"),
        (lambda: corrections.off_policy_sequence_mask(bound=-1.0), "bound is -1.0"),
        (lambda: corrections.off_policy_sequence_mask(bound=np.inf), "bound is inf; it must lie"),
        (lambda: UNTYPED.normalise("row"), "unit 'row' is unknown"),
        (lambda: UNTYPED.normalise("token", among="kept"), "among 'kept' is unknown"),
        (lambda: corrections.normalise_by_running_mean(decay=1.0), "decay is 1.0"),
        (lambda: corrections.ais(cap=0.5), "upper bound is 0.5; below 1"),
        (lambda: corrections.ais(kl_scale=0.0), "kl_scale is 0.0"),
        (lambda: UNTYPED.mix_in_adaptively("row", upper=2.0), "level 'row' is unknown"),
        (lambda: corrections.build([{"cap": 2.0}]), "has no name"),
        (lambda: UNTYPED.build(["token_tis"]), "correction 'token_tis' is no table"),
        (lambda: UNTYPED.build({"name": "token_tis"}), "corrections are a list of tables"),
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
    by_hand = corrections.chain(corrections.icepop(upper=4.0), corrections.normalise("token"))
    arrays = batch(17)
    assert_same_bits(
        coefficients(corrections.build(entries), **arrays), coefficients(by_hand, **arrays)
    )
    assert corrections.build(entries).whole_batch
    assert not corrections.build([{"name": "vexact"}, {"name": "icepop"}]).whole_batch
    assert_same_bits(
        coefficients(corrections.build([]), **arrays), arrays["mask"].astype(jnp.float32)
    )


def test_veto_reads_the_ratio_beyond_the_bound_of_20():
    d = jnp.asarray([[0.0, -30.0], [0.0, -80.0]])
    kept = coefficients(corrections.veto(1e-30), log_ratio=d, mask=jnp.ones((2, 2), bool))
    assert kept.tolist() == [[1, 1], [0, 0]]


def test_what_was_corrected_shows_itself_in_a_few_lines():
    run = jax.jit(lambda d, mask: correct(corrections.token_tis(), log_ratio=d, mask=mask))
    found = run(jnp.zeros((2, 3)), jnp.ones((2, 3)))
    lines = repr(found).splitlines()
    assert lines[0].startswith("Corrected(coefficients and kept [2, 3], state, metrics: ")
    assert (2 <= len(lines) <= 10, max(map(len, lines)) <= 98) == (True, True)
    assert all(name in repr(found) for name in found.metrics)


def test_integer_masks_and_starts_are_understood():
    arrays = batch(18)
    expected = run("vexact", arrays)
    whole = {**arrays, "mask": arrays["mask"].astype(jnp.int32)}
    result, _ = CASES["vexact"].update(whole["mask"], CASES["vexact"].init(whole["mask"]), **whole)
    assert_same_bits(result, expected)
    assert base.is_masked_node(optax.MaskedNode())


def poisoned(x, at):
    return x.at[at].set(jnp.nan)


@functools.cache
def each_recipe():
    return jax.jit(lambda arrays: {name: applied_by(CASES[name], arrays) for name in RECIPES})


def test_a_nan_on_a_response_token_shows_in_every_recipe():
    arrays = batch(20)
    mask = np.asarray(arrays["mask"])
    row, column = (int(i) for i in np.argwhere(mask)[5])
    arrays["advantages"] = jnp.asarray(np.tile(arrays["advantages"][:, None], (1, 16)))
    plain = each_recipe()(arrays)
    places = row, (row, column)
    spoilt = {
        what: [each_recipe()({**arrays, what: poisoned(arrays[what], at)}) for at in places]
        for what in ("log_ratio", "log_probs", "advantages")
    }
    for name in RECIPES:
        assert np.all(np.isfinite(np.asarray(plain[name][0])))
        for what in READS.get(name, ("log_ratio",)):
            (whole_row, _), (alone, kept) = (each[name] for each in spoilt[what])
            assert np.array_equal(np.isnan(np.asarray(whole_row[row])), mask[row]), name
            assert np.isnan(float(alone[row, column])), (name, what)
            assert not np.any(np.isnan(np.asarray(alone)[~mask])), name
            assert bool(kept[row, column]), name
            metrics = measure(alone, arrays["mask"], kept=kept)
            assert np.isnan(float(metrics["coefficient_mean"])), (name, what)
            assert np.isnan(float(metrics["ess"])), (name, what)
            if not CASES[name].whole_batch:
                left, right = (np.delete(x, row, axis=0) for x in (alone, plain[name][0]))
                assert_same_bits(left, right, name)


def test_a_nan_of_a_divergence_and_of_a_custom_blocks_argument_shows():
    arrays = batch(21)
    divergence = poisoned(jnp.zeros((8, 16)), (0, 0))
    block = corrections.trust_region_masking(bound=0.1, statistic="divergence")
    assert np.isnan(float(coefficients(block, **arrays, divergence=divergence)[0, 0]))
    own = corrections.map_coefficients("own", lambda c, mask, x: c, needs=("temperature",))
    for bad in (poisoned(jnp.zeros((8, 16)), (0, 0)), poisoned(jnp.zeros(8), 0)):
        assert np.isnan(float(coefficients(own, **arrays, temperature=bad)[0, 0]))
    start = poisoned(arrays["mask"].astype(jnp.float32), (0, 0))
    result = applied(CASES["dppo"], start, **arrays)
    assert np.isnan(float(result[0, 0]))


def test_a_nan_is_not_remembered_by_the_running_mean():
    block = corrections.chain(corrections.token_tis(), corrections.normalise_by_running_mean())
    good = batch(22, spread=1.0)
    bad = {**good, "log_ratio": poisoned(good["log_ratio"], (0, 0))}
    step = jax.jit(lambda arrays, state: correct(block, **arrays, state=state))
    before = step(good, None)
    after = step(bad, before.state)
    assert np.isnan(float(after.coefficients[0, 0]))
    assert float(after.state[1].mean) == float(before.state[1].mean) != 1.0


@pytest.mark.parametrize(
    ("dtype", "cases"),
    quick.some([("bfloat16", CORE), ("float16", tuple(CASES))], 0),
    ids=["bfloat16", "float16"],
)
def test_16_bits_give_the_bits_of_their_values_in_float32(dtype, cases):
    arrays = batch(23)
    given = {k: jnp.asarray(v).astype(dtype) for k, v in arrays.items() if k != "mask"}
    widened = {k: v.astype(jnp.float32) for k, v in given.items()}
    expected = run_all({**widened, "mask": arrays["mask"]})
    assert_all_same_bits(run_all({**given, "mask": arrays["mask"]}, cases), expected, cases)


def test_a_batch_statistic_and_a_packed_batch_stay_float32_where_float64_is_on():
    arrays = batch(24)
    chain = corrections.chain(
        corrections.token_tis(cap=np.float64(1.5)),
        corrections.normalise(),
        corrections.normalise_by_running_mean(decay=np.float64(0.5)),
    )
    ids = np.repeat(np.arange(8), 16)
    flat = {k: v.reshape(-1) for k, v in arrays.items()}
    plain, _ = applied_by(chain, arrays)
    run_flat = jax.jit(lambda given, ids: correct(chain, **given, segment_ids=ids, segments=8))
    with jax.enable_x64(True):
        for kind in (np.int64, np.uint8):
            given = {k: jnp.asarray(np.asarray(v)) for k, v in flat.items()}
            found = run_flat(given, jnp.asarray(ids, kind))
            assert_same_bits(found.coefficients.reshape(8, 16), plain)
            assert found.state[2].mean.dtype == jnp.float32
            assert {str(x.dtype) for x in found.metrics.values()} == {"float32"}


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("token_tis", {"mask": (8, 1)}),
        ("none", {"mask": (8, 1)}),
        ("none", {"mask": (8,)}),
        ("token_tis", {"log_ratio": (16,)}),
        ("token_tis", {"log_ratio": (8,)}),
        ("none", {"log_ratio": (8,)}),
        ("token_tis", {"log_ratio": (8, 1)}),
        ("token_tis", {"log_ratio": (8, 16, 1), "mask": (8, 16, 1)}),
        ("none", {"log_ratio": (8, 16, 1), "mask": (8, 16, 1)}),
        ("kpop", {"log_probs": (8,)}),
        ("dppo", {"log_probs": (8, 12)}),
        ("dppo", {"advantages": (8, 1)}),
        ("dppo", {"advantages": (16,)}),
        ("dppo", {"advantages": (1, 16)}),
        ("dppo", {"advantages": (8, 16, 1)}),
        ("off_policy_sequence_mask", {"advantages": ()}),
    ],
)
def test_arrays_that_would_broadcast_over_other_tokens_are_refused_in_one_line(case, changes):
    arrays = batch(25)
    given = {k: jnp.ones(shape, arrays[k].dtype) for k, shape in changes.items()}
    with pytest.raises(InputError, match="must both be") as error:
        run(case, {**arrays, **given})
    assert "\n" not in str(error.value)
    # Nor does a square batch hide it.
    square = {k: jnp.ones((8, 8) if v.ndim == 2 else 8, v.dtype) for k, v in arrays.items()}
    with pytest.raises(InputError, match="must both be"):
        run("token_tis", {**square, "log_ratio": jnp.ones(8)})


@pytest.mark.parametrize("kind", ["lists", "torch"])
def test_lists_and_tensors_are_read_as_arrays(kind):
    torch = pytest.importorskip("torch") if kind == "torch" else None

    def given(arrays):
        plain = {k: np.array(v) for k, v in arrays.items()}
        return {k: v.tolist() if torch is None else torch.from_numpy(v) for k, v in plain.items()}

    arrays = batch(28)
    assert_same_bits(coefficients(CASES["dppo"], **given(arrays)), run("dppo", arrays))
    _, flat, ids, _, _ = packed_batch(0, False)
    flat["segment_ids"] = ids
    weigh = functools.partial(coefficients, CASES["dppo"], segments=PACKED_ROWS)
    assert_same_bits(weigh(**flat), weigh(**given(flat)))


@pytest.mark.parametrize("missing", ["log_ratio", "mask"])
def test_a_batch_without_log_ratios_or_mask_is_refused_in_one_line(missing):
    for function in (correct, coefficients):
        with pytest.raises(InputError, match=rf"^{missing} is None; it must be an array"):
            function(CASES["none"], **{**batch(29), missing: None})


def test_a_wrong_shape_is_refused_by_update_as_well():
    arrays = batch(26)
    start = arrays["mask"].astype(jnp.float32)
    for bad in (start[0], start[:, :1], start[:, 0]):
        with pytest.raises(InputError, match="coefficients has shape"):
            CASES["token_tis"].update(bad, CASES["token_tis"].init(bad), **arrays)


def test_state_is_refused_where_it_would_be_forgotten_and_carried_where_it_is_given():
    block = corrections.chain(
        corrections.token_tis(cap=5.0), corrections.normalise_by_running_mean(decay=0.5)
    )
    scheduled = optax.inject_hyperparams(corrections.token_tis)(cap=lambda count: 2.0)
    for stateful in (block, scheduled, optax.chain(block)):
        with pytest.raises(InputError, match="forgets the state") as error:
            coefficients(stateful, **batch())
        assert "\n" not in str(error.value)
    state, by_hand = None, block.init(batch()["mask"])
    step = jax.jit(lambda arrays, state: correct(block, **arrays, state=state))
    results = []
    for seed in range(3):
        arrays = batch(seed, spread=1.0)
        found = step(arrays, state)
        expected, by_hand = block.update(arrays["mask"].astype(jnp.float32), by_hand, **arrays)
        assert_same_bits(found.coefficients, expected)
        state = found.state
        assert jax.tree.structure(state) == jax.tree.structure(by_hand)
        jax.tree.map(assert_same_bits, state, by_hand)
        results.append(found.coefficients)
    forgotten = correct(block, **batch(2, spread=1.0)).coefficients
    assert not np.array_equal(np.asarray(results[-1]), np.asarray(forgotten))


def numbers_of(name):
    return {
        argument
        for argument, parameter in inspect.signature(corrections.RECIPES[name]).parameters.items()
        if parameter.annotation is float
    }


def test_the_table_of_arguments_names_every_number_of_every_recipe():
    assert {name: set(ARGUMENTS.get(name, ())) for name in RECIPES} == {
        name: numbers_of(name) for name in RECIPES
    }


KINDS = {
    kind.__name__: kind for kind in (np.float16, np.float32, np.float64, np.int64, np.uint8)
} | {"jnp.float32": jnp.float32, "bfloat16": jnp.bfloat16}


@functools.cache
def plain_program(name):
    return program_of(corrections.RECIPES[name](**ARGUMENTS[name]), batch(27))


def program_of(correction, arrays):
    """The operations that update() is made of, whatever its parts are called in memory."""
    start = arrays["mask"].astype(jnp.float32)
    update = jax.make_jaxpr(
        lambda arrays: correction.update(start, correction.init(start), **arrays)
    )
    return re.sub("0x[0-9a-f]+", "", str(update(arrays)))


@pytest.mark.parametrize(("name", "kind"), quick.pairs(list(ARGUMENTS), KINDS))
def test_numbers_may_be_of_any_kind_and_count_by_their_value(name, kind):
    """All values of the table are exact in 16 bits, so that a kind changes nothing."""
    whole = kind in (np.int64, np.uint8)
    given = {k: v if whole and v != int(v) else kind(v) for k, v in ARGUMENTS[name].items()}
    made = corrections.build([{"name": name, **given}])
    assert program_of(made, batch(27)) == plain_program(name)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("wrong", [True, np.bool_(True), "2", "two", [2.0, 3.0], float("nan")])
def test_what_is_no_number_is_refused_for_every_argument(name, wrong):
    for argument in ARGUMENTS[name]:
        given = {**ARGUMENTS[name], argument: wrong}
        for make in (
            lambda given=given: corrections.RECIPES[name](**given),
            lambda given=given: corrections.build([{"name": name, **given}]),
        ):
            with pytest.raises(InputError) as error:
                make()
            assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "names", quick.some([list(ARGUMENTS)[i::3] for i in range(3)], 0), ids=["a", "b", "c"]
)
def test_every_number_may_be_scheduled_and_a_constant_schedule_changes_nothing(names):
    arrays = batch(28, spread=1.0)
    start = arrays["mask"].astype(jnp.float32)
    scheduled = {}
    for name in names:
        constant = {k: lambda count, v=v: v for k, v in ARGUMENTS[name].items()}
        scheduled[name] = optax.inject_hyperparams(corrections.RECIPES[name])(**constant)
    plain = jax.jit(
        lambda arrays: {
            n: coefficients(corrections.RECIPES[n](**ARGUMENTS[n]), **arrays) for n in names
        }
    )(arrays)
    step = jax.jit(
        lambda arrays, state: {
            name: transform.update(start, state[name], **arrays)
            for name, transform in scheduled.items()
        }
    )
    first = step(arrays, {name: transform.init(start) for name, transform in scheduled.items()})
    second = step(arrays, {name: state for name, (_, state) in first.items()})
    for name in names:
        assert_same_bits(first[name][0], plain[name], name)
        assert_same_bits(second[name][0], plain[name], name)
        assert np.any(np.asarray(plain[name])), name


@pytest.mark.parametrize(
    "moving",
    [
        optax.inject_hyperparams(corrections.token_tis)(cap=lambda n: 2.0 + jnp.float32(n)),
        corrections.scheduled(corrections.token_tis, cap=lambda n: 2.0 + jnp.float32(n)),
    ],
    ids=["optax", "ours"],
)
def test_a_scheduled_cap_takes_effect_at_its_call(moving):
    arrays: dict[str, Any] = {"log_ratio": jnp.full((2, 3), 3.0), "mask": jnp.ones((2, 3), bool)}
    step = jax.jit(lambda state: correct(moving, **arrays, state=state))
    state, caps = corrections.chain(moving).init(jnp.ones((2, 3))), []
    for _ in range(3):
        found = step(state)
        state = found.state
        caps.append(float(found.coefficients[0, 0]))
    assert caps == [2.0, 3.0, 4.0]


PACKED_ROWS, PACKED_WIDTH = 8, 16


def packed_batch(seed, interleaved):
    """The same tokens twice: sequences as rows, and all in one row of tokens with their ids."""
    rng = np.random.default_rng(seed)
    rows = batch(seed, rows=PACKED_ROWS, width=PACKED_WIDTH, spread=0.5)
    lengths = rng.integers(0, PACKED_WIDTH + 1, PACKED_ROWS)
    used = np.arange(PACKED_WIDTH)[None, :] < lengths[:, None]
    rows["mask"] = jnp.asarray(used & (rng.random(used.shape) < 0.8))
    own = np.repeat(np.arange(PACKED_ROWS), lengths)
    # The rest of the row belongs to no sequence, whatever its mask and its numbers.
    strange = rng.choice([-1, -7, PACKED_ROWS, 10**6], PACKED_ROWS * PACKED_WIDTH - len(own))
    ids = np.concatenate([own, strange])
    ids = rng.permutation(ids) if interleaved else ids
    columns = np.zeros(len(ids), int)
    for row in range(PACKED_ROWS):
        columns[ids == row] = np.arange(lengths[row])
    known = (ids >= 0) & (ids < PACKED_ROWS)
    at = np.where(known, ids, 0), columns
    flat = {"mask": jnp.asarray(np.where(known, np.asarray(rows["mask"])[at], True))}
    for name in ("log_ratio", "log_probs"):
        flat[name] = jnp.asarray(np.where(known, np.asarray(rows[name])[at], np.float32(np.nan)))
    return rows, {**flat, "advantages": rows["advantages"]}, jnp.asarray(ids, jnp.int32), known, at


@functools.partial(jax.jit, static_argnames="cases")
def run_packed(arrays, ids, cases):
    given = {**arrays, "segment_ids": ids, "segments": PACKED_ROWS}
    return {case: coefficients(CASES[case], **given) for case in cases}


@OF_CASES
@given(seed=st.integers(0, 10**6), interleaved=st.booleans(), per_token=st.booleans())
@settings(deadline=None, max_examples=15)
def test_a_packed_batch_gives_the_bits_of_its_sequences_as_rows(
    cases, seed, interleaved, per_token
):
    rows, flat, ids, known, at = packed_batch(seed, interleaved)
    if per_token:
        drawn = np.random.default_rng(seed).standard_normal(rows["mask"].shape)
        by_token = drawn.astype(np.float32)
        flat["advantages"] = jnp.asarray(np.where(known, by_token[at], np.float32(np.nan)))
        rows["advantages"] = jnp.asarray(by_token)
        cases = ("dppo", "off_policy_sequence_mask")  # who read them
    packed = run_packed(flat, ids, cases)
    whole = run_all(rows, cases) if per_token else run_all(rows)
    for case in cases:
        assert packed[case].shape == ids.shape
        assert_same_bits(
            packed[case], np.where(known, np.asarray(whole[case])[at], np.float32(0)), case
        )


def test_kept_state_and_metrics_of_a_packed_batch_are_those_of_its_rows():
    rows, flat, ids, known, at = packed_batch(4, True)
    chain = corrections.chain(
        corrections.icepop(),
        corrections.k3_rejection(bound=0.02),
        corrections.normalise_by_running_mean(),
    )
    whole = jax.jit(lambda rows: correct(chain, **rows))(rows)
    given = {**flat, "segment_ids": ids}
    found = jax.jit(lambda given: correct(chain, **given, segments=PACKED_ROWS))(given)
    assert np.array_equal(np.asarray(found.kept), known & np.asarray(whole.kept)[at])
    assert 0 < np.sum(np.asarray(found.kept)) < int(rows["mask"].sum())
    jax.tree.map(assert_same_bits, found.state, whole.state)
    assert set(found.metrics) == set(whole.metrics)
    for name, value in whole.metrics.items():
        assert_same_bits(found.metrics[name], value, name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segments": None}, "segments is None"),
        ({"segments": 0}, "segments is 0"),
        ({"segment_ids": jnp.zeros((2, 15), jnp.int32)}, "one row of tokens"),
        ({"segment_ids": jnp.zeros(7, jnp.int32)}, "one row of tokens"),
        ({"mask": jnp.ones((1, 30), bool)}, "one row of tokens"),
        ({"log_probs": jnp.zeros(29)}, "one number a token, or one a sequence"),
        ({"advantages": jnp.zeros(4)}, "one number a token, or one a sequence"),
        ({"advantages": jnp.zeros((8, 16))}, "one number a token, or one a sequence"),
        ({"log_ratio": jnp.zeros(8)}, "must both be"),
    ],
)
def test_wrong_packing_is_refused_in_one_line(changes, message):
    _, flat, ids, _, _ = packed_batch(0, False)
    given = {**flat, "segment_ids": ids, "segments": PACKED_ROWS, **changes}
    with pytest.raises(InputError, match=message) as error:
        correct(CASES["token_tis"], **given)
    assert "\n" not in str(error.value)


def test_the_state_of_another_correction_is_refused():
    given: dict[str, Any] = {"log_ratio": jnp.zeros((2, 3)), "mask": jnp.ones((2, 3), bool)}
    with pytest.raises(InputError, match="the state has 3 parts and the correction 1"):
        correct(corrections.chain(CASES["token_tis"]), state=(1, 2, 3), **given)
    moving = corrections.chain(corrections.normalise_by_running_mean("token"))
    with pytest.raises(InputError, match=r"normalise_by.* must be RunningMeanState, got dict"):
        correct(moving, state=[{"mean": jnp.float32(1.0)}], **given)  # restored without a template


# The effects of a recipe's blocks in their order, as first letters.
EFFECTS = {
    "none": "",
    "token_tis": "w",
    "sequence_tis": "w",
    "token_mis": "wm",
    "sequence_mis": "wm",
    "geometric_mis": "wm",
    "icepop": "wm",
    "kpop": "wr",
    "geometric_rejection": "r",
    "geometric_rejection_token_tis": "rw",
    "geometric_rejection_sequence_tis": "rw",
    "k3_rejection": "r",
    "k3_rejection_token_tis": "rw",
    "sequence_tis_product_rejection": "rw",
    "seq_mask_tis": "rw",
    "token_tis_veto": "rw",
    "trust_region_masking": "r",
    "dppo": "mm",
    "off_policy_sequence_mask": "m",
    "error_rejection": "r",
    "vexact": "rw",
    "ais": "w",
}
ON_CURRENT = {"dppo", "off_policy_sequence_mask"}


def effects_of(correction):
    return "".join(block.effect[0] for block in correction.blocks)


def test_every_recipe_says_what_it_does_and_what_it_reads():
    assert {name: effects_of(CASES[name]) for name in RECIPES} == EFFECTS
    for name in RECIPES:
        reads = {block.reads for block in CASES[name].blocks}
        assert reads <= {"current" if name in ON_CURRENT else "old"}, name
        assert CASES[name].whole_batch == (name == "ais"), name
    assert CASES["vexact"].effects == {"reject", "weight"}


def test_blocks_say_what_they_do_and_which_need_the_whole_batch():
    whole = {
        "normalise": (corrections.normalise(), "s"),
        "normalise_by_running_mean": (corrections.normalise_by_running_mean(), "s"),
        "mix_in_adaptively": (corrections.mix_in_adaptively(upper=2.0), "w"),
        "optax": (corrections.chain(optax.scale(0.5)), "w"),
        "optax.chain": (corrections.chain(optax.chain(CASES["token_mis"])), "w"),
    }
    for name, (correction, effect) in whole.items():
        assert correction.whole_batch, name
        assert effects_of(correction) == effect, name
    by_row = {
        "scale_by_ratio": (corrections.scale_by_ratio(), "w"),
        "scale_by_truncated_ratio": (corrections.scale_by_truncated_ratio(upper=2.0), "w"),
        "mask_outside": (corrections.mask_outside(upper=2.0), "m"),
        "reject": (corrections.reject("k3", over="max", upper=2.0), "r"),
        "veto": (corrections.veto(), "r"),
        "mask_probability_difference": (corrections.mask_probability_difference(upper=0.1), "m"),
    }
    for name, (correction, effect) in by_row.items():
        assert not correction.whole_batch, name
        assert effects_of(correction) == effect, name
    assert set(by_row) | set(whole) - {"optax", "optax.chain"} == set(corrections.BLOCKS)


def test_where_advantage_keeps_what_its_blocks_say():
    def traits(correction):
        return [(b.effect, b.reads, b.whole_batch) for b in correction.blocks]

    for inner in (*CASES.values(), corrections.chain(optax.scale(2.0)), corrections.normalise()):
        assert traits(corrections.where_advantage("negative", inner)) == traits(inner)


def test_where_advantage_gives_inner_on_its_side_and_counts_its_rejections():
    arrays = batch(9)
    block = corrections.where_advantage("negative", CASES["k3_rejection_token_tis"])
    inner, kept = applied_by(CASES["k3_rejection_token_tis"], arrays)
    found, still = applied_by(block, arrays)
    mask, side = np.asarray(arrays["mask"]), np.asarray(arrays["advantages"])[:, None] < 0
    assert_same_bits(found, np.where(side, inner, np.float32(mask)))
    expected = np.where(side, np.asarray(kept), mask)
    assert np.array_equal(np.asarray(still), expected)
    assert expected.sum() < mask.sum()
    per_token = {**arrays, "advantages": jnp.broadcast_to(arrays["advantages"][:, None], (8, 16))}
    assert_same_bits(applied_by(block, per_token)[0], found)


def test_chains_are_flat_and_a_chain_of_optax_is_one_transform():
    first, second = CASES["token_mis"], CASES["vexact"]
    flat = corrections.chain(first, corrections.chain(second, corrections.chain()))
    assert flat.blocks == (*first.blocks, *second.blocks)
    wrapped = corrections.chain(optax.chain(first, second))
    assert len(wrapped.blocks) == 1
    arrays = batch(30)
    assert_same_bits(coefficients(wrapped, **arrays), coefficients(flat, **arrays))
    by_optax = optax.chain(first, second)
    assert_same_bits(coefficients(by_optax, **arrays), coefficients(flat, **arrays))
    # An optax transform may hide anything: all tokens are kept, for nothing says otherwise.
    assert np.array_equal(np.asarray(correct(by_optax, **arrays).kept), np.asarray(arrays["mask"]))


@dataclasses.dataclass
class Settings:
    correction: optax.GradientTransformation


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "asdict": lambda x: dataclasses.asdict(Settings(x))["correction"],
    "tree map": lambda x: jax.tree.map(lambda leaf: leaf, x),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_a_correction_is_that_correction(kind):
    for name in ("token_tis_veto", "none"):
        copied = COPIES[kind](CASES[name])
        assert (copied, repr(copied)) == (CASES[name], repr(CASES[name]))
        assert_same_bits(coefficients(copied, **batch(5)), run(name, batch(5)))


def test_a_correction_whose_functions_are_wrapped_is_a_weight_of_ones_own():
    wrapped = jax.tree.map(jax.jit, CASES["token_tis_veto"])
    assert isinstance(wrapped, corrections.Correction)
    assert [(block.name, block.effect) for block in wrapped.blocks] == [(base.OWN, "weight")]
    assert_same_bits(coefficients(wrapped, **batch(5)), run("token_tis_veto", batch(5)))


def test_a_declaration_changes_what_is_said_and_not_what_is_done():
    arrays = batch(31)
    said = corrections.declared(CASES["k3_rejection"], reads="current", effect="mask")
    assert [(b.effect, b.reads) for b in said.blocks] == [("mask", "current")]
    found, kept = applied_by(said, arrays)
    assert_same_bits(found, applied_by(CASES["k3_rejection"], arrays)[0])
    assert np.array_equal(np.asarray(kept), np.asarray(arrays["mask"]))


MIXED = corrections.chain(
    corrections.token_tis(),
    corrections.normalise_by_running_mean(),
    corrections.dppo(),
    corrections.k3_rejection(),
    corrections.off_policy_sequence_mask(),
)


def test_stages_part_a_correction_by_what_it_reads():
    recompute = corrections.stages(MIXED, "recompute")
    assert effects_of(recompute.step) == "wsr"
    assert effects_of(recompute.update) == "mmm"
    assert recompute.step.blocks + recompute.update.blocks != MIXED.blocks
    assert set(recompute.step.blocks) | set(recompute.update.blocks) == set(MIXED.blocks)
    bypass = corrections.stages(MIXED, "bypass")
    assert bypass.step.blocks == ()
    assert bypass.update.blocks == MIXED.blocks


@pytest.mark.parametrize("mode", ["recompute", "bypass"])
def test_a_state_comes_together_again_after_its_stages(mode):
    state = tuple(f"state of block {i}" for i in range(len(MIXED.blocks)))
    parts = corrections.split_state(MIXED, mode, state)
    assert corrections.join_state(MIXED, mode, *parts) == state
    for part, stage in zip(parts, corrections.stages(MIXED, mode), strict=True):
        assert part == tuple(state[MIXED.blocks.index(block)] for block in stage.blocks)


@pytest.mark.parametrize("mode", ["recompute", "bypass"])
def test_both_stages_one_after_the_other_are_the_whole_on_the_same_log_probs(mode):
    @jax.jit
    def both(arrays):
        start = arrays["mask"].astype(jnp.float32)
        parts = corrections.stages(MIXED, mode)
        states = corrections.split_state(MIXED, mode, cast(tuple, MIXED.init(start)))
        first = corrections.apply(parts.step, start, states[0], **arrays)
        second = corrections.apply(parts.update, first.coefficients, states[1], **arrays)
        joined = corrections.join_state(MIXED, mode, first.state, second.state)
        return second.coefficients, first.kept & second.kept, joined

    arrays = batch(32)
    whole = jax.jit(lambda arrays: correct(MIXED, **arrays)[:3])(arrays)
    coefficients, kept, state = both(arrays)
    assert_same_bits(coefficients, whole[0])
    assert np.array_equal(np.asarray(kept), np.asarray(whole[1]))
    jax.tree.map(assert_same_bits, state, whole[2])


BY_EFFECT = {
    "weight": corrections.token_tis(),
    "scale": corrections.normalise(),
    "mask": corrections.mask_outside(upper=2.0),
    "reject": corrections.k3_rejection(),
}


ratio = jax.jit(ratios.ratio, static_argnums=2)


@pytest.mark.parametrize("reads", ["old", "current"])
@pytest.mark.parametrize("effect", BY_EFFECT)
@pytest.mark.parametrize("has_ratio", [True, False])
@pytest.mark.parametrize("mode", ["recompute", "bypass"])
def test_a_weight_is_refused_exactly_where_the_ratio_would_count_twice(
    mode, has_ratio, effect, reads
):
    block = corrections.declared(BY_EFFECT[effect], reads=reads)
    ask = {"mode": mode, "loss": "clip", "has_ratio": has_ratio}
    twice = mode == "bypass" or reads == "current"
    if twice and has_ratio and effect == "weight":
        for refused in (block, corrections.chain(CASES["none"], CASES["dppo"], block)):
            with pytest.raises(InputError, match="would count twice") as error:
                corrections.check(refused, **ask)
            assert "scale_by_truncated_ratio" in str(error.value)
            assert "'clip'" in str(error.value)
            assert "\n" not in str(error.value)
    else:
        corrections.check(block, **ask)


@pytest.mark.parametrize("mode", ["recompute", "bypass"])
def test_two_weights_count_the_ratio_twice(mode):
    ask = {"mode": mode, "loss": "reinforce", "has_ratio": False}
    pairs = [
        (corrections.vexact(bound=0.9), corrections.token_tis()),
        (corrections.token_tis(), corrections.sequence_tis()),
        (corrections.token_tis(), corrections.where_advantage("negative", corrections.token_tis())),
    ]
    for pair in pairs:
        with pytest.raises(InputError, match=r"and so does .*: it would count twice") as error:
            corrections.check(corrections.chain(*pair), **ask)
        assert "\n" not in str(error.value)
    own = corrections.chain(optax.scale(0.5))
    with pytest.raises(InputError, match=r"say with corrections\.declared what effect"):
        corrections.check(corrections.chain(corrections.token_tis(), own), **ask)
    scale = corrections.declared(own, effect="scale")
    corrections.check(corrections.chain(corrections.token_tis(), scale), **ask)
    both_signs = [
        corrections.where_advantage(sign, corrections.token_tis())
        for sign in ("positive", "negative")
    ]
    corrections.check(corrections.chain(*both_signs), **ask)


def test_a_scale_after_what_reads_the_current_policy_is_refused_in_recompute_mode():
    late = corrections.chain(CASES["dppo"], corrections.normalise())
    ask = {"loss": "clip", "has_ratio": True}
    with pytest.raises(InputError, match="normalise comes after where_advantage") as error:
        corrections.check(late, mode="recompute", **ask)
    assert "\n" not in str(error.value)
    corrections.check(late, mode="bypass", **ask)
    early = corrections.chain(corrections.normalise(), CASES["dppo"], CASES["k3_rejection"])
    corrections.check(early, mode="recompute", **ask)
    both = corrections.declared(late, reads="current")
    corrections.check(both, mode="recompute", **ask)


def test_a_plain_optax_transform_counts_as_a_weight():
    ask = {"mode": "bypass", "loss": "clip", "has_ratio": True}
    for transform in (optax.scale(0.5), optax.chain(CASES["k3_rejection"])):
        with pytest.raises(InputError, match="a transform of your own weights"):
            corrections.check(corrections.chain(transform), **ask)


def test_weights_without_a_ratio_in_the_loss_are_for_one_update_a_step_in_recompute_mode():
    ask = {"loss": "reinforce", "has_ratio": False}
    tis = corrections.token_tis()
    corrections.check(tis, mode="recompute", updates=1, **ask)
    corrections.check(tis, mode="bypass", updates=4, **ask)
    current = corrections.declared(tis, reads="current")
    corrections.check(current, mode="recompute", updates=4, **ask)
    corrections.check(corrections.geometric_rejection(), mode="recompute", updates=4, **ask)
    corrections.check(tis, mode="recompute", loss="clip", has_ratio=True, updates=4)
    with pytest.raises(InputError, match=r'4 updates of a step.*mode = "bypass"') as error:
        corrections.check(tis, mode="recompute", updates=4, **ask)
    assert "\n" not in str(error.value)


def test_what_the_trainer_cannot_give_is_refused():
    exact = corrections.trust_region_masking(bound=0.1, statistic="divergence")
    with pytest.raises(InputError, match="needs a 'divergence'"):
        corrections.check(exact, mode="recompute", loss="clip", has_ratio=True)
    with pytest.raises(InputError, match="no argument 'axis_name'"):
        corrections.build([{"name": "normalise", "axis_name": "data"}])


def test_a_transform_of_ones_own_may_not_stand_after_the_current_policy():
    own = corrections.chain(corrections.dppo(), optax.scale(0.5))
    with pytest.raises(InputError, match="put a transform of your own before it"):
        corrections.check(own, mode="recompute", loss="clip", has_ratio=True)


SCHEDULED = {
    "token_tis": {"cap": 1.3},
    "geometric_rejection": {"lower": 0.95, "upper": 1.05},
    "dppo": {"bound": 0.05},
    "vexact": {"cap": 1.3, "bound": 0.05},
    "token_mis": {"cap": 1.3},
    "ais": {"cap": 1.3},
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_scheduled_recipe_is_the_recipe_that_says_what_it_does(name):
    arguments = SCHEDULED[name]
    plain = corrections.RECIPES[name](**arguments)
    constant = {key: lambda _, x=x: jnp.float32(x) for key, x in arguments.items()}
    moving = corrections.scheduled(corrections.RECIPES[name], **constant)
    said = [(block.effect, block.reads, block.needs) for block in plain.blocks]
    assert [(block.effect, block.reads, block.needs) for block in moving.blocks] == said
    assert moving.whole_batch
    found, expected = (applied_by(x, batch(21)) for x in (moving, plain))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [bool, jnp.int32, jnp.bfloat16])
def test_numbers_beside_a_schedule_keep_their_values_with_a_mask_of_any_dtype(dtype):
    arrays, upper = batch(21), optax.constant_schedule(1.01)
    plain = corrections.icepop(lower=0.99, upper=1.01)
    moving = corrections.scheduled(corrections.icepop, lower=0.99, upper=upper)
    start = arrays["mask"].astype(dtype)
    found, _ = moving.update(start, moving.init(start), **arrays)
    assert 0 < np.count_nonzero(np.asarray(found)) < int(arrays["mask"].sum())
    assert_same_bits(found, coefficients(plain, **arrays))


def test_no_correction_gives_a_mask_as_coefficients():
    none, mask = corrections.none(), jnp.asarray([[True, False]])
    found, _ = none.update(mask, none.init(mask))
    assert_same_bits(found, jnp.asarray([[1.0, 0.0]]))


# --- turns of episodes -----------------------------------------------------------------------


def test_ratios_of_turns_are_those_of_sequences_of_their_own():
    rng = np.random.default_rng(0)
    mask = rng.random((6, 40)) < 0.7
    mask[0], mask[1], mask[2, 20:] = True, False, False
    log_ratio = rng.normal(0, 0.3, (6, 40)).astype(np.float32)
    log_ratio[~mask] = np.nan  # replies have none
    found = {x: np.asarray(ratio(log_ratio, mask, x)) for x in ("turn", "turn_geometric")}
    turns = 0
    for row in range(6):
        edges = np.flatnonzero(np.diff(np.pad(mask[row].astype(int), 1)))
        for start, end in edges.reshape(-1, 2):
            own = log_ratio[row, start:end].astype(np.float64)
            np.testing.assert_allclose(found["turn"][row, start:end], np.exp(own.sum()), 1e-6)
            mean = np.exp(own.mean())
            np.testing.assert_allclose(found["turn_geometric"][row, start:end], mean, 1e-6)
            turns += 1
    assert turns > 20
    for level in found:
        np.testing.assert_array_equal(found[level][~mask], 1.0)
        np.testing.assert_array_equal(ratio(np.zeros_like(log_ratio), mask, level), 1.0)


def test_padding_changes_no_bit_of_a_turn_s_ratio():
    mask = np.random.default_rng(1).random((6, 40)) < 0.8
    log_ratio = np.random.default_rng(2).normal(0, 1, (6, 40)).astype(np.float32)
    wide = ratio(*(np.pad(x, ((0, 0), (0, 70))) for x in (log_ratio, mask)), "turn")
    np.testing.assert_array_equal(ratio(log_ratio, mask, "turn"), wide[:, :40])


def test_a_bound_on_turns_masks_one_turn_and_not_its_episode():
    mask = jnp.asarray([[True, True, False, True, True, True]])
    log_ratio = jnp.asarray([[0.5, 0.5, 0.0, 0.1, 0.1, 0.1]], jnp.float32)
    block = corrections.mask_outside("turn", lower=0.5, upper=2.0)
    found, _ = applied_by(block, {"log_ratio": log_ratio, "mask": mask})
    assert found.tolist() == [[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]]


def own_token_tis():
    """An optax transform of a user's own, which neither masks nor stops the gradient."""

    def update(updates, state, params=None, *, log_ratio, **extra):
        del params, extra
        return updates * jnp.minimum(jnp.exp(log_ratio), 2.0), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, cast(Any, update))


def test_no_gradient_flows_through_a_transform_of_the_users_own():
    difference, log_probs = jnp.asarray([[0.3, -0.2, 0.1]]), jnp.asarray([[-0.5, -1.0, -2.0]])
    mask = jnp.ones((1, 3), bool)

    def loss(scale, correction):
        now = log_probs + scale * difference
        given = coefficients(correction, log_ratio=now - log_probs, mask=mask)
        return -jnp.sum(given * now)

    chained = corrections.chain(corrections.reject("k3", over="mean", upper=9.0), own_token_tis())
    given = own_token_tis(), chained, corrections.token_tis()
    own, after, ours = jax.jit(lambda scale: [jax.grad(loss)(scale, x) for x in given])(1.0)
    assert float(own) == pytest.approx(float(ours), rel=1e-6)
    assert float(after) == pytest.approx(float(ours), rel=1e-6)


def test_a_transform_of_the_users_own_is_0_off_the_mask():
    mask = jnp.asarray([[True, True, False]])
    log_ratio = jnp.asarray([[0.3, -0.2, jnp.nan]])
    found = coefficients(own_token_tis(), log_ratio=log_ratio, mask=mask)
    assert float(found[0, 2]) == 0.0


def test_masks_of_numbers_are_read_as_bools_in_metrics_too():
    weights = jnp.asarray([[1.1, 1.2, 0.0, 1.3, 0.0]])
    turns = jnp.asarray([[1, 1, 0, 2, 2]])
    ratios_of: dict[Any, jax.Array] = {"old": jnp.log(jnp.where(turns > 0, weights + 0.1, 1.0))}
    chain = corrections.geometric_rejection_token_tis(lower=0.9, upper=1.11)

    @jax.jit
    def measured(mask):
        return {
            "mean": corrections.batch_mean(weights, mask),
            **corrections.block_metrics(chain, ratios_of, mask),
            **corrections.bound_metrics(chain, ratios_of, mask),
            **corrections.sequence_weight_metrics(chain, ratios_of, mask),
        }

    by_number, by_bool = measured(turns), measured(turns > 0)
    assert len(by_bool) > 5
    assert {k: float(v) for k, v in by_number.items()} == {k: float(v) for k, v in by_bool.items()}


@pytest.mark.parametrize("shape", [(3, 0), (0, 4)])
def test_a_batch_of_nothing_has_nothing_to_correct(shape):
    run = jax.jit(lambda d, mask: correct(corrections.token_tis(), log_ratio=d, mask=mask))
    found = run(jnp.zeros(shape), jnp.ones(shape, bool))
    assert found.coefficients.shape == shape
    assert float(found.metrics["coefficient_mean"]) == 0.0


def test_a_packed_batch_on_an_explicit_mesh_has_the_bits_of_one_device():
    log_ratio = jnp.linspace(-1.0, 1.0, 8)
    arrays = {"log_ratio": log_ratio, "mask": log_ratio < 0.9}
    arrays |= {"segment_ids": jnp.repeat(jnp.arange(2), 4)}
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    placed = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec("x")))

    def weights(arrays):
        return coefficients(corrections.sequence_tis(), **arrays, segments=2)

    assert_same_bits(jax.jit(weights)(placed), jax.jit(weights)(arrays))
