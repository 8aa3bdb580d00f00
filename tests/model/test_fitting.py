"""Row ranges: what is measured holds, what is chosen fits, and what differs is kept apart."""

import os
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny

from tim_jax.kernels import native, tiles
from tim_jax.model import fitting
from tim_jax.numerics import EXACT_F32, NATIVE_F32, Rows

COUNTS = (1, 2, 4, 8, 16, 17, 32, 64)
IN_USE = {name: getattr(fitting, name) for name in ("_COUNTS", "_ATTENTION_COUNTS")}
DOTS = {16: {16, 23, 32, 48}, 24: {16}}  # contraction size -> widths, by tiny.CONFIG


@pytest.fixture(autouse=True)
def few_counts(monkeypatch):
    """As in use, with fewer row counts to compile."""
    monkeypatch.setattr(fitting, "_COUNTS", COUNTS)
    monkeypatch.setattr(fitting, "_ATTENTION_COUNTS", (1, 2, 4, 8, 16))


def in_classes(*borders):
    """A dot whose bits change where the row count passes a border."""

    def dot(x, weight):
        kind = sum(x.shape[0] >= border for border in borders)
        return jnp.full((x.shape[0], weight.shape[1]), float(kind), jnp.float32)

    return dot


def calibrated(batch, monkeypatch, dot):
    """Rows by contraction, for a backend with this dot; attention is left out, to save time."""
    monkeypatch.setattr(native, "dot", dot)
    monkeypatch.setattr(fitting, "_attention", lambda *_: (False, Rows(8, 8)))
    return dict(
        fitting.calibrate(tiny.CONFIG, tiny.NUMERICS, batch=batch, longest=64).rows_by_contraction
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_the_ranges_found_a_row_has_the_same_bits_for_every_count(dtype, monkeypatch):
    # Nearly as many as in use: a border between them is looked for at every count checked below.
    monkeypatch.setattr(fitting, "_COUNTS", (1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 33, 64))
    start = replace(tiny.NUMERICS, compute_dtype=dtype)
    numerics = fitting.calibrate(tiny.CONFIG, start, batch=4, longest=64)
    assert {size for size, _ in numerics.rows_by_contraction} == DOTS.keys()
    rng = np.random.default_rng(7)  # other data than the measurement's
    for size, widths in DOTS.items():
        x = jnp.asarray(rng.standard_normal((70, size)), numerics.dtype)
        weight = jnp.asarray(rng.standard_normal((size, max(widths))), numerics.dtype)
        dot = jax.jit(lambda x, w: tiles.dot(x, w, numerics=numerics))
        whole = np.asarray(dot(x, weight))
        exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
        np.testing.assert_allclose(whole, exact, rtol=1e-4, atol=1e-4)
        for count in (1, 3, 5, 31, 33, 64):
            part = np.asarray(dot(x[-count:], weight))
            assert (part.view(np.int32) == whole[-count:].view(np.int32)).all(), (size, count)


@pytest.mark.slow
def test_between_the_counts_that_are_tried_a_row_has_the_same_bits(monkeypatch):
    """With AVX2 alone attention of 17, 18, 41 or 42 rows has bits of its own."""
    for name, counts in IN_USE.items():
        monkeypatch.setattr(fitting, name, counts)
    found = fitting.calibrate(tiny.CONFIG, EXACT_F32, batch=4, longest=64)
    rng = np.random.default_rng(7)  # other data than the measurement's
    low, high = found.attention_rows.low, found.attention_rows.high
    assert high is not None
    assert low < high
    query, key, value = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2, 1, high, 8), (2, 1, 8, 64), (2, 1, 64, 8))
    )
    attend = jax.jit(partial(tiles._attend, numerics=found))
    last = np.full((2, high), 63, np.int32)
    whole = np.asarray(attend(query, key, value, last))
    for count in range(low, high):
        part = np.asarray(attend(query[:, :, :count], key, value, last[:, :count]))
        assert part.tobytes() == whole[:, :, :count].tobytes(), count
    for size, rows in found.rows_by_contraction:
        most = min(rows.high or 100, 100)
        x = rng.standard_normal((most, size)).astype(np.float32)
        weight = rng.standard_normal((size, max(DOTS[size]))).astype(np.float32)
        dot = jax.jit(lambda x, w: tiles.fence(native.dot(*native.pin(x, w))))
        whole = np.asarray(dot(x, weight))
        for count in range(rows.low, most):
            assert np.asarray(dot(x[:count], weight)).tobytes() == whole[:count].tobytes(), count


def test_a_hole_between_row_counts_ends_a_range(monkeypatch):
    """As 17, 18, 41 and 42 rows are one with AVX2 alone."""
    monkeypatch.setattr(fitting, "_ATTENTION_COUNTS", IN_USE["_ATTENTION_COUNTS"])

    def attend(query, key, value, last):
        rows = query.shape[2]
        return jnp.full(query.shape, float(rows < 16) + 2.0 * (rows in (17, 18, 41, 42)))

    query = np.zeros((1, 1, 48, 2), np.float32)
    found = fitting._attention_rows(attend, query, None, None, np.zeros((1, 48), np.int32))
    assert found == Rows(24, 40)


def test_a_decode_batch_gets_the_class_that_it_falls_in(monkeypatch):
    dot = in_classes(2, 32)
    assert calibrated(4, monkeypatch, dot) == dict.fromkeys(DOTS, Rows(2, 17))
    assert calibrated(48, monkeypatch, dot) == dict.fromkeys(DOTS, Rows(32, 64))


def test_one_class_for_all_counts_is_one_range(monkeypatch):
    assert calibrated(4, monkeypatch, in_classes()) == dict.fromkeys(DOTS, Rows(1, 64))


def test_without_two_equal_counts_the_fixed_tile_stays(monkeypatch):
    everywhere = in_classes(*COUNTS)
    assert calibrated(4, monkeypatch, everywhere) == dict.fromkeys(DOTS, tiny.NUMERICS.rows)


@pytest.mark.slow
def test_a_range_must_hold_for_every_width_of_its_contraction(monkeypatch):
    def dot(x, weight):
        borders = (8,) if weight.shape[1] == 23 else (32,)
        return in_classes(*borders)(x, weight)

    assert calibrated(4, monkeypatch, dot) == {16: Rows(1, 4), 24: Rows(1, 17)}


def test_a_row_counts_wherever_it_stands(monkeypatch):
    """A kernel that treats the last row of a matrix in another way has no ranges at all."""

    def dot(x, weight):
        place = jnp.arange(x.shape[0])[:, None] == x.shape[0] - 1
        return jnp.where(place, x[:, :1] * 3.0, x[:, :1]) + jnp.zeros_like(weight[:1])

    assert set(calibrated(4, monkeypatch, dot).values()) == {tiny.NUMERICS.rows}


@pytest.mark.slow
def test_keys_are_weighed_at_once_only_where_that_changes_nothing(monkeypatch):
    found = fitting.calibrate(tiny.CONFIG, tiny.NUMERICS, batch=4, longest=64)
    if found.whole_kv:
        assert found.attention_rows.high == 16
    true_mix = native.mix

    def mix(weights, value):
        return true_mix(weights, value) + float(value.shape[2])

    monkeypatch.setattr(native, "mix", mix)
    found = fitting.calibrate(tiny.CONFIG, tiny.NUMERICS, batch=4, longest=64)
    assert not found.whole_kv


@pytest.mark.parametrize(("size", "longest"), quick.some([(16, 200), (128, 500)], 1))
def test_fewer_keys_have_the_bits_of_all_up_to_the_longest_sequence(size, longest):
    """With heads of 128 XLA's sums over 500 keys have another order than those over 256."""
    config = replace(tiny.CONFIG, head_dim=size)
    whole, rows = fitting._attention(config, EXACT_F32, longest)
    numerics, block = replace(EXACT_F32, whole_kv=whole, attention_rows=rows), EXACT_F32.kv_block
    span = -(-longest // block) * block
    rng = np.random.default_rng(3)
    query, key, value = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((2, 1, 16, size), (2, 1, size, span), (2, 1, span, size))
    )
    attend = jax.jit(partial(tiles.attention, numerics=numerics, aligned=False))
    for keys in range(2 * block, span, 3 * block):
        last = np.full((2, 16), keys - 3, np.int32)
        fewer = attend(query, key[..., :keys], value[:, :, :keys], last)
        found = np.asarray(fewer), np.asarray(attend(query, key, value, last))
        assert found[0].tobytes() == found[1].tobytes(), keys


def test_very_long_sequences_have_a_product_for_every_block():
    """And the rows that were found for it have the bits of any other number of rows and keys."""
    whole, rows = fitting._attention(tiny.CONFIG, tiny.NUMERICS, 10**6)
    assert not whole
    assert rows.low < 16
    numerics = replace(tiny.NUMERICS, attention_rows=rows)
    rng = np.random.default_rng(3)
    query, key, value = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((3, 1, 16, 8), (3, 1, 8, 96), (3, 1, 96, 8))
    )
    attend = jax.jit(partial(tiles.attention, numerics=numerics, aligned=False))
    last = np.full((3, 16), 40, np.int32)
    reference = np.asarray(attend(query, key, value, last))
    for count in (1, 3, 5, 16):
        fewer = attend(
            query[:1, :, -count:], key[:1, :, :, :50], value[:1, :, :50], last[:1, :count]
        )
        assert np.asarray(fewer).tobytes() == reference[:1, :, -count:].tobytes(), count


def test_native_numerics_and_other_backends_are_left_alone(monkeypatch):
    assert fitting.calibrate(tiny.CONFIG, NATIVE_F32, batch=4, longest=64) == NATIVE_F32
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert fitting.calibrate(tiny.CONFIG, tiny.NUMERICS, batch=4, longest=64) == tiny.NUMERICS


# --- the head in parts -------------------------------------------------------------------------


def ones(x, weight):
    return jnp.ones((x.shape[0], weight.shape[1]))


def head_columns(monkeypatch, seconds, dot=ones, **changes):
    """The columns chosen for a head of 23, if it takes these seconds whole, and in parts of 8."""
    monkeypatch.setattr(fitting, "_HEAD_COLUMNS", 8)
    monkeypatch.setattr(fitting, "_seconds", lambda _: seconds)
    monkeypatch.setattr(native, "dot", dot)
    numerics = replace(tiny.NUMERICS, rows_by_contraction=((16, Rows(2, 64)),), **changes)
    return fitting._head_columns(tiny.CONFIG, numerics, 6)


def test_the_head_is_cut_where_that_is_much_faster(monkeypatch):
    assert head_columns(monkeypatch, [3.0, 1.0]) == 8
    assert head_columns(monkeypatch, [1.4, 1.0]) is None
    assert head_columns(monkeypatch, [3.0, 1.0], column_tiles=2) is None


def test_the_head_stays_whole_where_parts_have_other_bits(monkeypatch):
    def dot(x, weight):
        return jnp.full((x.shape[0], weight.shape[1]), float(weight.shape[1]))

    assert head_columns(monkeypatch, [3.0, 1.0], dot) is None


def test_programs_of_several_processes_follow_no_timing(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert head_columns(monkeypatch, [3.0, 1.0]) is None


def test_the_head_is_tried_with_no_more_rows_than_it_has(monkeypatch):
    """With more its logits would be the largest arrays of all."""
    widest = []

    def dot(x, weight):
        if weight.shape[1] == tiny.CONFIG.vocab_size:
            widest.append(x.shape[0])
        return jnp.zeros((x.shape[0], weight.shape[1]))

    ranges = calibrated(4, monkeypatch, dot)
    assert max(widest) == tiny.NUMERICS.head_rows
    assert ranges == dict.fromkeys(DOTS, Rows(1, 64))


# --- kept in a file ----------------------------------------------------------------------------

FOUND = replace(
    tiny.NUMERICS,
    rows_by_contraction=((16, Rows(2, 49)), (24, Rows(1, None))),
    attention_rows=Rows(1, 48),
    whole_kv=True,
    decode_head_columns=4096,
)


@pytest.fixture
def measuring(monkeypatch):
    """How often something was measured; FOUND is what is found."""
    calls = []

    def calibrate(config, numerics, *, batch, longest):
        calls.append((numerics, batch))
        return replace(FOUND, kv_block=numerics.kv_block)

    monkeypatch.setattr(fitting, "calibrate", calibrate)
    return calls


def kept(file, numerics=tiny.NUMERICS, batch=8, config=tiny.CONFIG, longest=64):
    return fitting.calibrate_once(config, numerics, batch=batch, longest=longest, file=file)


def test_what_was_measured_is_not_measured_again(tmp_path, measuring):
    file = tmp_path / "calibration.json"
    assert kept(file) == kept(file) == FOUND
    assert len(measuring) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"numerics": replace(tiny.NUMERICS, kv_block=32)},
        {"config": replace(tiny.CONFIG, num_layers=3)},
    ],
)
def test_something_else_is_measured_anew(tmp_path, measuring, change):
    file = tmp_path / "calibration.json"
    kept(file)
    kept(file, **change)
    assert len(measuring) == 2
    kept(file, **change)
    assert len(measuring) == 2


def test_another_batch_or_placement_keeps_the_bits_of_a_run(tmp_path, measuring):
    file = tmp_path / "calibration.json"
    assert kept(file) == kept(file, batch=9) == FOUND
    assert len(measuring) == 1


def test_longer_sequences_are_measured_anew_and_shorter_ones_are_not(tmp_path, measuring):
    file = tmp_path / "calibration.json"
    kept(file)
    kept(file, longest=32)
    assert len(measuring) == 1
    kept(file, longest=65)
    kept(file, longest=64)
    assert len(measuring) == 2


def test_another_machine_measures_for_itself(tmp_path, measuring, monkeypatch):
    file = tmp_path / "calibration.json"
    kept(file)
    monkeypatch.setattr(fitting.machine, "processor", lambda: ["another"])
    kept(file)
    assert len(measuring) == 2


def test_another_number_of_cores_measures_for_itself(tmp_path, measuring, monkeypatch):
    """By which XLA chooses kernels: those that this process may use."""
    file = tmp_path / "calibration.json"
    kept(file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(99)), raising=False)
    kept(file)
    assert len(measuring) == 2


def test_what_was_measured_at_fewer_row_counts_is_measured_again(tmp_path, measuring, monkeypatch):
    """Such as before those were tried that differ with AVX2 alone."""
    file = tmp_path / "calibration.json"
    kept(file)
    monkeypatch.setattr(fitting, "_ATTENTION_COUNTS", (*fitting._ATTENTION_COUNTS, 49))
    kept(file)
    assert len(measuring) == 2


@pytest.mark.parametrize("text", ["", "[]", "{", '{"of": 1}', "half", "low"])
def test_a_damaged_file_is_measured_anew(tmp_path, measuring, text):
    file = tmp_path / "calibration.json"
    kept(file)
    whole = file.read_text()
    half, low = whole.replace('"rows_by', '"rows_of'), whole.replace("49", "1")
    file.write_text({"half": half, "low": low}.get(text, text))
    assert kept(file) == FOUND
    assert len(measuring) == 2
    assert file.read_text() == whole


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path, measuring):
    assert kept(tmp_path / "absent" / "calibration.json") == FOUND
    assert not list(tmp_path.iterdir())


def test_what_a_measurement_is_kept_for_has_every_field():
    """The text of a value may leave defaults out; files of earlier versions have them."""
    kept = fitting._describe_setting(tiny.CONFIG, tiny.NUMERICS)
    assert "rope=RopeConfig(kind='default', theta=" in kept["model"]
    assert "router_groups_per_tok=1, " in kept["model"]
    assert "rows=Rows(low=" in kept["numerics"]
    assert "row_sums='scatter'" in kept["numerics"]
