"""Numerics as a value: what it says of itself."""

from dataclasses import replace

from tim_jax.numerics import EXACT_BF16, Numerics, Rows, describe


def test_numerics_are_described_by_what_is_not_default():
    assert describe(EXACT_BF16) == "tiles bfloat16"
    wide = Numerics(rows_by_contraction=((60, Rows(2, None)),), attention_rows=Rows(3, 48))
    assert describe(replace(wide, whole_kv=True)) == (
        "tiles float32 rows_by_contraction=60:2..any attention_rows=3..48 whole_kv=True"
    )
