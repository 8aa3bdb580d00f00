"""Numerics as a value: what it says of itself."""

from dataclasses import replace

import pytest

from tim_jax.common.errors import InputError
from tim_jax.numerics import (
    EXACT_BF16,
    GPU_EXACT_BF16,
    GPU_EXACT_F16,
    GPU_F32,
    MOSAIC_GPU_EXACT_BF16,
    TPU_EXACT_BF16,
    TPU_EXACT_F32,
    TPU_F32,
    Numerics,
    Precision,
    Rows,
    describe,
)


def test_numerics_are_described_by_what_is_not_default():
    assert describe(EXACT_BF16) == "tiles bfloat16"
    wide = Numerics(rows_by_contraction=((60, Rows(2, None)),), attention_rows=Rows(3, 48))
    assert describe(replace(wide, whole_kv=True)) == (
        "tiles float32 rows_by_contraction=60:2..any attention_rows=3..48 whole_kv=True"
    )


def test_the_head_has_at_most_head_rows_rows():
    ranges = ((60, Rows(2, None)), (70, Rows(33, 2048)), (80, Rows(2, 16)))
    numerics = Numerics(rows_by_contraction=ranges, head_rows=24)
    found = [numerics.of_head.rows_for(size) for size, _ in ranges]
    assert found == [Rows(2, 24), Rows(33, 33), Rows(2, 16)]
    assert numerics.rows_for(60) == Rows(2, None)


def test_what_was_measured_of_the_head_is_of_one_dtype():
    numerics = Numerics(rows_by_contraction=((60, Rows(2, 48)),), decode_head_columns=8)
    other = replace(numerics, precision=Precision(head="bfloat16")).of_head
    assert other.decode_head_columns is None
    assert other.rows_for(60) == numerics.rows
    assert numerics.of_head.decode_head_columns == 8


@pytest.mark.parametrize("numerics", [TPU_EXACT_BF16, GPU_EXACT_BF16, GPU_EXACT_F16])
def test_products_in_float32_have_the_tiles_of_a_float32_run(numerics):
    """Those of 16 bits would be twice as large: too large for a TPU's vector memory."""
    found = replace(numerics, precision=Precision(head="float32", router="float32"))
    for wide in (found.of_head, found.of_router, numerics.in_dtype("float32")):
        if numerics.family == "pallas_tpu":
            assert wide.tpu == TPU_F32
            continue
        assert (wide.gpu.block_k, wide.gpu.matmul) == (GPU_F32.block_k, GPU_F32.matmul)
        assert wide.gpu.attention_rows == GPU_F32.attention_rows


@pytest.mark.parametrize(
    ("numerics", "dtype"),
    [
        (TPU_EXACT_F32, "bfloat16"),
        (GPU_EXACT_BF16, "float16"),
        (MOSAIC_GPU_EXACT_BF16, "bfloat16"),
        (EXACT_BF16, "float32"),
    ],
)
def test_other_operands_leave_the_tiles_as_they_are(numerics, dtype):
    changed = replace(numerics, compute_dtype=dtype)
    assert numerics.in_dtype(dtype) == changed
    found = replace(numerics, precision=Precision(head=dtype)).of_head
    assert replace(found, precision=Precision()) == changed


def test_a_head_is_cut_once():
    with pytest.raises(InputError, match="decode_head_columns = 8 cuts a head that column_tiles"):
        Numerics(column_tiles=2, decode_head_columns=8)
