"""The dial: each entry changes what it names and nothing else, and strength 0 changes nothing."""

import itertools
from dataclasses import replace
from typing import cast

import dials
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny

from tim_jax import metrics, mismatch, placement
from tim_jax.common.errors import InputError
from tim_jax.instruments.auditing import PRESETS
from tim_jax.mismatch import Mismatch
from tim_jax.model.execution import Execution, Sampling
from tim_jax.numerics import (
    GPU_EXACT_BF16,
    GPU_EXACT_F32,
    MOSAIC_GPU_EXACT_BF16,
    TPU_EXACT_BF16,
    Rows,
)
from tim_jax.policy import sampler, scoring
from tim_jax.rl import sharded
from tim_jax.rl.programs import sampling_program

NAMES = list(dials.ENTRIES)
CHANGES_WEIGHTS = ("compute", "quantised_weights")


def lowered(dial):
    program = sampling_program(dials.EXECUTION, samples=2, mismatch=dial)
    program = cast(jax.stages.Wrapped, program)
    return program.lower(dials.weights(), tiny.prompts(), jax.random.key(0)).as_text()


measured = jax.jit(metrics.mismatch_metrics)


def found(rollout, execution=dials.EXECUTION):
    log_probs = dials.scored(rollout, execution)
    values = measured(log_probs, rollout.log_probs, rollout.mask)
    assert int(values["tokens"]) > 20
    return {name: float(value) for name, value in values.items()}


def test_the_table_has_every_entry():
    assert set(NAMES) == set(mismatch.ENTRIES)
    assert {kind.name for kinds in mismatch.GROUPS.values() for kind in kinds} == set(NAMES)
    assert all(kind.__doc__ for kind in mismatch.ENTRIES.values())


# --- nothing, or the learner's own ------------------------------------------------------------


@pytest.fixture(scope="module")
def exact_text():
    """A program of `sampler.sample` itself, which knows of no dial."""
    on = placement.mesh(dials.EXECUTION.placement, jax.devices())
    drawn = sharded.sampling(dials.EXECUTION, on, samples=2, draw=sampler.sample)
    whole = jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec())

    def sample(weights, prompts, key):
        return drawn(weights, prompts, key)

    args = dials.weights(), tiny.prompts(), jax.random.key(0)
    return jax.jit(sample, out_shardings=whole).lower(*args).as_text()


def test_no_dial_is_the_sampler_itself(exact_text):
    assert lowered(Mismatch()) == exact_text
    assert len(exact_text) > 10_000


def test_strength_0_or_the_learners_own_is_the_same_program(exact_text):
    """Of all entries at once, as each of them leaves the program as it is."""
    same = {name: dials.ENTRIES[name][2] for name in NAMES}
    tables = [{"name": name, **own} for name, own in same.items() if own is not None]
    assert len(tables) > 15
    assert lowered(dials.dial(*tables)) == exact_text


@pytest.mark.parametrize(
    "name", quick.some(["logit_noise", "quantised_weights", "logits", "split_k"], 0)
)
def test_entries_do_change_the_program(name, exact_text):
    assert lowered(dials.standard(name)) != exact_text


@pytest.mark.slow
def test_raw_log_probs_of_an_unchanged_distribution_are_those_drawn_with():
    execution = replace(dials.EXECUTION, sampling=Sampling(8, stop_tokens=(3, 5, 7)))
    rollout = dials.rollout(dials.dial({"name": "raw_log_probs"}), execution)
    assert int(rollout.mask.sum()) > 20
    assert tiny.bits(rollout.log_probs) == tiny.bits(rollout.drawn_log_probs)


# --- what is named, and nothing else ------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_only_the_named_numerics_change(name):
    dial, fields = dials.standard(name), dials.ENTRIES[name][1]
    changed = mismatch.difference(dials.LEARNER, dial.numerics(dials.LEARNER))
    assert set(changed) == fields
    lines = mismatch.describe(dial, dials.LEARNER)
    assert len(lines) == 1 + len(fields)
    assert lines[0].startswith(name)


def test_nothing_is_said_of_an_entry_without_strength():
    dial = dials.dial({"name": "logit_noise"}, {"name": "dropped_end", "share": 0.0})
    assert mismatch.describe(dial, dials.LEARNER) == []


@pytest.mark.parametrize("name", NAMES)
def test_only_entries_about_weights_change_the_weights(name):
    before, change = dials.weights(), dials.standard(name).weights
    after = (jax.jit(change) if name in CHANGES_WEIGHTS else change)(before)
    unchanged = [
        path
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
        )
        if a.dtype == b.dtype and tiny.bits(a) == tiny.bits(b)
    ]
    every = len(jax.tree.leaves(before))
    if name not in CHANGES_WEIGHTS:
        assert len(unchanged) == every
    else:
        kept = {jax.tree_util.keystr(path) for path in unchanged}
        assert {"['final_norm']", "['layers']['attn_norm']"} <= kept
        assert not kept & {f"['layers']['{n}']" for n in ("qkv", "o", "gate_up", "down")}
        assert ("['embed']" in kept) == (name == "quantised_weights")


def test_compute_casts_what_prepare_casts():
    dial = dials.standard("compute")
    numerics = dial.numerics(dials.LEARNER)
    direct = jax.jit(replace(dials.EXECUTION, numerics=numerics).prepare)(tiny.params(dials.CONFIG))
    assert tiny.bits(dial.weights(dials.weights())) == tiny.bits(direct)


def test_a_control_has_the_weights_of_the_sampler_that_it_controls():
    """Whatever the order of the entries: a learner casts to its dtype before it edits."""
    for tables in itertools.permutations((TO_BF16, {"name": "quantised_weights", "dtype": "int8"})):
        dial = dials.dial(*tables)
        control = replace(dials.EXECUTION, numerics=dial.numerics(dials.LEARNER), edits=dial.edits)
        expected = jax.jit(control.prepare)(tiny.params(dials.CONFIG))
        assert tiny.bits(jax.jit(dial.weights)(dials.weights())) == tiny.bits(expected)


def test_edits_of_the_weights_stay_together():
    """An audit's program has all of them or none: the rest is done before."""
    quantised, compute = {"name": "quantised_weights", "dtype": "int8"}, TO_BF16
    for tables in itertools.permutations((quantised, compute, {"name": "raw_log_probs"})):
        dial = dials.dial(*tables)
        assert dial.drawing == dial
    assert dials.dial(quantised, {"name": "split_k", "pieces": 2}).drawing.edits == ()


@pytest.mark.parametrize("name", quick.some(["ignored_truncation", "raw_log_probs"], 0))
def test_a_misreporting_sampler_draws_as_the_exact_one(name):
    exact, other = dials.rollout(), dials.rollout(dials.standard(name))
    assert tiny.bits(other.responses) == tiny.bits(exact.responses)
    assert tiny.bits(other.lengths) == tiny.bits(exact.lengths)
    assert tiny.bits(other.drawn_log_probs) == tiny.bits(exact.log_probs)
    assert found(other)["unequal_tokens"] > 0


@pytest.mark.slow
def test_hidden_tokens_and_lost_ends_are_those_of_the_exact_sampler():
    exact = dials.rollout()
    tables = {"name": "pad_mask", "pad": 4}, {"name": "dropped_end", "replacement": 0}
    other = dials.rollout(dials.dial(*tables))
    hidden = np.asarray(exact.mask & (exact.responses == 4))
    np.testing.assert_array_equal(other.mask, np.asarray(exact.mask) & ~hidden)
    assert 0 < hidden.sum() < int(exact.lengths.sum()) - 20
    lost = np.argwhere(np.asarray(other.responses != exact.responses)).tolist()
    ends = np.flatnonzero(np.asarray(exact.finished))
    assert lost == [[row, int(exact.lengths[row]) - 1] for row in ends] != []
    for name in ("lengths", "log_probs", "finished"):
        assert tiny.bits(getattr(other, name)) == tiny.bits(getattr(exact, name))
    assert other.drawn_log_probs is None


def test_the_baseline_is_exactly_0():
    values = found(dials.rollout())
    assert values["unequal_tokens"] == values["log_ratio_abs_max"] == 0
    assert values["exact_share"] == 1


# Of attention, which decoding computes in its own way, and of the draw.
DECODING = ["kv_cache", "split_kv", "pallas_attention", "logit_noise"]


@pytest.mark.parametrize("name", quick.some(DECODING, 0))
def test_a_divergent_sampler_is_seen_by_the_learner(name):
    rollout = dials.rollout(dials.standard(name))
    values = found(rollout)
    assert 0 < values["log_ratio_abs_mean"] < 0.5
    assert rollout.drawn_log_probs is None
    assert rollout.hidden is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["compute", "quantised_weights", "native_kernels", "tensor_parallel"]
)
def test_a_divergent_forward_gives_the_same_tokens_other_log_probs(name):
    """Entries that are the same in every forward, by one of whole sequences."""
    dial, rollout = dials.standard(name), dials.rollout()
    mismatch.check(dial, dials.EXECUTION)
    other = replace(dials.EXECUTION, numerics=dial.numerics(dials.LEARNER))

    @jax.jit
    def score(weights, rollout):
        return scoring.score(dial.weights(weights), rollout, execution=other).log_probs

    values = measured(rollout.log_probs, score(dials.weights(), rollout), rollout.mask)
    assert int(values["tokens"]) > 20
    assert 0 < float(values["log_ratio_abs_mean"]) < 0.5


def test_ignored_truncation_is_the_log_of_the_kept_mass():
    rollout = dials.rollout(dials.standard("ignored_truncation"))
    assert rollout.drawn_log_probs is not None
    kept = np.exp(np.asarray(rollout.log_probs - rollout.drawn_log_probs))[np.asarray(rollout.mask)]
    assert ((kept > 0.89) & (kept <= 1.000001)).all()  # top_p is 0.9
    assert kept.min() < 0.99


@pytest.mark.slow
def test_a_learner_with_the_samplers_numerics_agrees_to_the_bit():
    """A divergent execution is an execution: the contract holds for it too, and so its recorded
    log-probs are those it drew with."""
    dial = dials.dial(
        {"name": "lm_head", "dtype": "bfloat16"},
        {"name": "logits", "dtype": "bfloat16"},
        {"name": "softmax", "dtype": "bfloat16"},
        {"name": "attention_softmax", "dtype": "bfloat16"},
        {"name": "kv_cache", "dtype": "float8_e5m2", "scale": "token"},
        {"name": "sum_order", "lanes": 2},
        {"name": "split_k", "pieces": 3},
        {"name": "tensor_parallel", "ranks": 2},
        {"name": "quantised_weights", "dtype": "int8", "head": True, "activations": "int8"},
    )
    rollout = dials.rollout(dial)
    same = replace(dials.EXECUTION, numerics=dial.numerics(dials.LEARNER))
    assert int(rollout.mask.sum()) > 20
    ours, theirs = dials.scored(rollout, same, dial), rollout.log_probs
    assert tiny.bits(jnp.where(rollout.mask, ours, 0.0)) == tiny.bits(theirs)
    assert found(rollout)["log_ratio_abs_mean"] > 1e-4


@pytest.mark.slow
def test_strengths_of_the_cache_go_up():
    """From bfloat16's 7 bits of mantissa over 3 to 2, each mean at least 1.5 times the last."""
    rollout = dials.rollout()
    exact = dials.scored(rollout)
    means = []
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        dial = dials.dial({"name": "kv_cache", "dtype": dtype})
        execution = replace(dials.EXECUTION, numerics=dial.numerics(dials.LEARNER))
        there = dials.scored(rollout, execution)
        values = measured(exact, there, rollout.mask)
        means.append(float(values["log_ratio_abs_mean"]))
    assert means[0] == 0
    assert all(b > 1.5 * a for a, b in itertools.pairwise(means)), means
    assert means[1] > 0


# --- refusals -----------------------------------------------------------------------------------

BAD = [
    ({"nam": "logits"}, ["no table with a name", "kv_cache"]),
    ({"name": "kv_cash", "dtype": "int8"}, ["'kv_cash' is unknown", "did you mean 'kv_cache'"]),
    ({"name": "kv_cache"}, ["'kv_cache' needs the argument 'dtype'"]),
    ({"name": "kv_cache", "dtype": "fp8"}, ["dtype = 'fp8'", "float8_e4m3fn", "int8"]),
    ({"name": "kv_cache", "dtype": "int8", "scale": "none"}, ["int8", "token"]),
    ({"name": "kv_cache", "dtype": "bfloat16", "scale": "token"}, ["bfloat16", "leave scale out"]),
    ({"name": "kv_cache", "type": "int8"}, ["no argument 'type'", "did you mean 'dtype'"]),
    ({"name": "native_kernels", "x": 1}, ["no argument 'x'", "takes none"]),
    ({"name": "compute", "dtype": "float64"}, ["'float64'", "float16"]),
    ({"name": "quantised_weights", "dtype": "int3"}, ["'int3'", "int4"]),
    ({"name": "quantised_weights", "dtype": "int4", "per": "row"}, ["per = 'row'", "channel"]),
    (
        {"name": "quantised_weights", "dtype": "int4", "per": "tensor", "group": 8},
        ["group = 8 contradicts"],
    ),
    (
        {"name": "quantised_weights", "dtype": "float8_e5m2", "codes": "full"},
        ['codes = "full" is of int8 and int4; float8_e5m2 has one range'],
    ),
    (
        {"name": "quantised_weights", "dtype": "int8", "activations": "int4"},
        ["activations = 'int4'", "float8_e4m3fn"],
    ),
    ({"name": "tile_sizes"}, ["needs one of rows"]),
    ({"name": "tile_sizes", "kv_block": 24}, ["power of two", "24"]),
    ({"name": "tile_sizes", "rows": 0}, ["rows must be at least 1", "0"]),
    ({"name": "sum_order", "lanes": 3}, ["power of two", "3"]),
    ({"name": "split_k", "pieces": 1.5}, ["pieces is 1.5", "whole number"]),
    ({"name": "split_k", "pieces": True}, ["pieces is True", "whole number"]),
    ({"name": "split_kv", "programs": -1}, ["at least 0", "-1"]),
    ({"name": "expert_order", "order": "last"}, ["'last'", "choice, index"]),
    (
        {"name": "expert_order", "order": "index", "accumulate": "bfloat16"},
        ["'bfloat16'", "compute"],
    ),
    ({"name": "expert_choice", "dtype": "int8"}, ["'int8'", "bfloat16"]),
    ({"name": "expert_capacity", "factor": 0}, ["factor must be above 0"]),
    ({"name": "dropped_end", "share": 1.5}, ["between 0.0 and 1.0", "1.5"]),
    ({"name": "stale_weights", "updates": -1}, ["at least 0", "-1"]),
    ({"name": "logit_noise", "std": -0.1}, ["std must be at least 0.0", "-0.1"]),
    ({"name": "logit_noise", "std": float("nan")}, ["std must be", "nan"]),
    ({"name": "logit_noise", "std": "much"}, ["std is 'much'", "a number"]),
    ({"name": "log_prob_noise", "by": "token"}, ["by = 'token'", "probability"]),
    ({"name": "log_prob_noise", "distribution": "cauchy"}, ["'cauchy'", "student"]),
    ({"name": "placement"}, ["not available", "placement.sampler", "tensor_parallel"]),
    ({"name": "tensor_parallel", "ranks": 0}, ["at least 1", "0"]),
    ({"name": "tensor_parallel", "ranks": 2, "exchange": "half"}, ["'half'", "compute", "float32"]),
]


@pytest.mark.parametrize(("table", "words"), BAD)
def test_a_bad_entry_is_refused_by_name(table, words):
    with pytest.raises(InputError) as error:
        mismatch.build([table])
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


FLASH = {"name": "pallas_attention", "interpret": True}
CLASHES = [
    (
        [{"name": "logits", "dtype": "bfloat16"}, {"name": "logits", "dtype": "float16"}],
        ["'logits'", "twice"],
    ),
    ([{"name": "native_kernels"}, {"name": "sum_order", "lanes": 8}], ["'sum_order'", "native"]),
    ([{"name": "tile_sizes", "rows": 4}, {"name": "native_kernels"}], ["'tile_sizes'", "native"]),
    ([{"name": "raw_log_probs"}, {"name": "ignored_truncation"}], ["contradicts 'raw_log_probs'"]),
    ([{"name": "pallas_attention"}], ["'pallas_attention'", "GPU or TPU", "cpu"]),
    ([{"name": "triton_attention"}], ["'triton_attention'", "NVIDIA GPU", "cpu"]),
    (
        [{"name": "split_kv"}, {"name": "pallas_attention", "interpret": True}],
        ["'pallas_attention'", "contradicts 'split_kv'"],
    ),
    (
        [{"name": "pallas_attention", "interpret": True}, {"name": "split_kv"}],
        ["'split_kv'", "contradicts 'pallas_attention'"],
    ),
    (
        [{"name": "attention_softmax", "dtype": "bfloat16"}, FLASH],
        ["'pallas_attention'", "contradicts 'attention_softmax': its softmax is float32"],
    ),
    (
        [FLASH, {"name": "attention_softmax", "dtype": "bfloat16"}],
        ["'attention_softmax'", "contradicts 'pallas_attention': its softmax is float32"],
    ),
    (
        [{"name": "tile_sizes", "attention_rows": 4}, FLASH],
        ["'tile_sizes'", "attention_rows = 4 contradicts the attention kernel"],
    ),
    ([{"name": "pad_mask", "pad": 23}], ["pad = 23", "vocabulary of 23"]),
    ([{"name": "dropped_end", "replacement": 99}], ["replacement = 99", "vocabulary of 23"]),
    (
        [{"name": "dropped_end", "replacement": 0}, {"name": "pad_mask", "pad": 0}],
        ["'pad_mask'", "contradicts 'dropped_end'"],
    ),
    *(
        (tables, ["'pad_mask'", "hides the end token 5", "puts 0 in its place"])
        for tables in itertools.permutations(
            ({"name": "dropped_end", "replacement": 0}, {"name": "pad_mask", "pad": 5})
        )
    ),
    (
        [{"name": "quantised_weights", "dtype": "int4", "group": 5}],
        ["group = 5 does not divide", "hidden_size 16"],
    ),
    (
        [{"name": "compute", "dtype": "bfloat16"}, {"name": "kv_cache", "dtype": "float32"}],
        ["'kv_cache'", "wider than the sampler's bfloat16"],
    ),
    (
        [{"name": "kv_cache", "dtype": "float32"}, {"name": "compute", "dtype": "bfloat16"}],
        ["'kv_cache'", "wider than the sampler's bfloat16"],
    ),
    (
        [FLASH, {"name": "tile_sizes", "kv_block": 8}],
        ["'tile_sizes'", "kv_block = 8 contradicts the attention kernel", "at least 16"],
    ),
]


@pytest.mark.parametrize(("tables", "words"), CLASHES)
def test_contradictions_are_refused_before_compiling(tables, words):
    with tiny.compilations() as counted, pytest.raises(InputError) as error:
        sampling_program(dials.EXECUTION, samples=2, mismatch=mismatch.build(tables))
    assert not counted
    for word in words:
        assert word in str(error.value), str(error.value)


def test_entries_that_change_nothing_contradict_nothing():
    idle = [{"name": "split_kv", "programs": 0}, {"name": "attention_softmax", "dtype": "float32"}]
    for tables in ([FLASH, *idle], [*idle, FLASH]):
        mismatch.check(mismatch.build(tables), dials.EXECUTION)
    for end in ({"replacement": 0, "share": 0.0}, {"share": 0.5}):
        tables = {"name": "dropped_end", **end}, {"name": "pad_mask", "pad": 5}
        mismatch.check(dials.dial(*tables), dials.EXECUTION)


# As calibration leaves them, of float32 on one machine.
MEASURED = replace(
    tiny.NUMERICS,
    rows_by_contraction=((16, Rows(1, 2048)),),
    attention_rows=Rows(1, 48),
    whole_kv=True,
    decode_head_columns=8,
)
TO_BF16 = {"name": "compute", "dtype": "bfloat16"}
RANKS = {"name": "tensor_parallel", "ranks": 2, "exchange": "compute"}
INTERPRETED = replace(GPU_EXACT_F32, interpret=True)


@pytest.mark.parametrize("numerics", [MEASURED, INTERPRETED], ids=["tiles", "pallas"])
@pytest.mark.parametrize(
    "table",
    [
        TO_BF16,
        {"name": "softmax", "dtype": "bfloat16"},
        {"name": "attention_softmax", "dtype": "bfloat16"},
        {"name": "split_k", "pieces": 2},
        {"name": "kv_cache", "dtype": "int8"},
    ],
)
def test_the_order_of_entries_decides_nothing(table, numerics):
    """Not even where the learner's kernels have no such thing, but the sampler's do."""
    execution = replace(dials.EXECUTION, numerics=numerics)
    other = {"name": "native_kernels"}
    if numerics is MEASURED:
        other = {"name": "tile_sizes", "rows": 4, "attention_rows": 4, "kv_block": 8}
    both = [dials.dial(*tables) for tables in itertools.permutations((table, other))]
    for dial in both:
        mismatch.check(dial, execution)
    first, second = (dial.numerics(numerics) for dial in both)
    assert first == second
    assert set(mismatch.difference(numerics, first)) > dials.ENTRIES[table["name"]][1]


def test_another_dtype_has_nothing_of_what_was_measured_of_the_learners():
    """Else a token's bits would follow the batch, as one row may have a kernel of its own."""
    unmeasured = replace(tiny.NUMERICS, attention_rows=Rows(16, 16))
    there = dials.dial(TO_BF16).numerics(MEASURED)
    assert there == replace(unmeasured, compute_dtype="bfloat16")
    own = dials.dial({"name": "compute", "dtype": "float32"})
    assert own.numerics(MEASURED) == MEASURED


def test_other_blocks_of_keys_have_no_row_range_that_was_measured_of_the_learners():
    blocks = {"name": "tile_sizes", "kv_block": 8}
    there = dials.dial(blocks).numerics(MEASURED)
    fixed = {"attention_rows": Rows(16, 16), "whole_kv": False}
    assert there == replace(MEASURED, kv_block=8, **fixed)
    there = dials.dial(blocks | {"attention_rows": 4}).numerics(MEASURED)
    assert there.attention_rows == Rows(4, 4)
    rows = dials.dial({"name": "tile_sizes", "attention_rows": 64}).numerics(MEASURED)
    assert (rows.attention_rows, rows.whole_kv) == (Rows(64, 64), False)


@pytest.mark.parametrize("changes", [{"name": "split_k", "pieces": 2}, RANKS], ids=str)
def test_parts_of_products_have_nothing_that_was_measured_of_whole_ones(changes):
    found = dials.dial(changes).numerics(MEASURED)
    assert found.rows_by_contraction == ()
    assert found.decode_head_columns is None
    whole = changes | {"pieces" if "pieces" in changes else "ranks": 1}
    assert dials.dial(whole).numerics(MEASURED) == MEASURED


def test_a_strength_of_0_is_taken_by_every_model():
    """A study's axis may begin at it."""
    mixture = replace(dials.EXECUTION, config=PRESETS["qwen3-moe-awkward"])
    mismatch.check(dials.dial(RANKS | {"ranks": 1}), mixture)
    late = {"name": "in_flight_updates", "updates": 0, "every": 3}
    mismatch.check(dials.dial(late), replace(mixture, routing="compared"))


@pytest.mark.parametrize("name", ["compute", "lm_head", "router", "expert_choice"])
@pytest.mark.parametrize("numerics", [TPU_EXACT_BF16, MOSAIC_GPU_EXACT_BF16])
def test_float16_is_refused_where_the_kernels_have_no_products_of_it(numerics, name):
    execution = Execution(PRESETS["qwen3-moe-awkward"], numerics)
    table = {"name": name, "dtype": "float16"}
    with pytest.raises(InputError, match=f"'{name}'.* {numerics.family} has no products of float"):
        mismatch.check(dials.dial(table), execution)
    for fine in (
        {"name": name, "dtype": "float32"},
        {"name": "logits", "dtype": "float16"},
        {"name": "kv_cache", "dtype": "float16"},
    ):
        mismatch.check(dials.dial(fine), execution)
    mismatch.check(dials.dial(table, {"name": "native_kernels"}), execution)
    mismatch.check(dials.dial(table), replace(execution, numerics=GPU_EXACT_BF16))


def test_a_lost_end_needs_something_that_ends():
    execution = replace(dials.EXECUTION, sampling=Sampling(8))
    with pytest.raises(InputError, match="stop_tokens"):
        sampling_program(execution, samples=2, mismatch=dials.standard("dropped_end"))


def test_noise_may_stand_there_twice():
    dial = dials.dial(
        {"name": "log_prob_noise", "std": 0.1},
        {"name": "log_prob_noise", "std": 0.1, "by": "position", "seed": 1},
    )
    mismatch.check(dial, dials.EXECUTION)
