"""Rows added at their places: the sums are right, and on a GPU their order is fixed."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
import quick
from hypothesis import given, settings
from hypothesis import strategies as st

from tim_jax.common.errors import InputError
from tim_jax.kernels import formulas
from tim_jax.numerics import GPU_EXACT_BF16, GPU_EXACT_F32, Numerics

SORTED = Numerics(row_sums="sorted")
PLACES, WIDTH = 9, 5


def added(table, places, rows, numerics=SORTED):
    call = jax.jit(formulas.add_rows, static_argnames="numerics")
    return np.asarray(call(jnp.asarray(table), jnp.asarray(places), rows, numerics=numerics))


@given(places=st.lists(st.integers(0, PLACES - 1), min_size=1, max_size=40), seed=st.integers(0, 9))
@settings(max_examples=40)
def test_the_sums_are_those_of_float64(places, seed):
    random = np.random.default_rng(seed)
    table = random.standard_normal((PLACES, WIDTH), np.float32)
    rows = random.standard_normal((len(places), WIDTH), np.float32)
    right = table.astype(np.float64)
    np.add.at(right, places, rows)
    for numerics in (SORTED, Numerics()):
        found = added(table, np.array(places, np.int32), rows, numerics)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def test_one_or_two_rows_at_a_place_have_the_bits_of_a_scatter():
    """Of two numbers there is only one sum."""
    random = np.random.default_rng(0)
    places = random.permutation(np.r_[np.arange(PLACES), np.arange(0, PLACES, 2)]).astype(np.int32)
    rows = random.standard_normal((len(places), WIDTH), np.float32)
    zeros = np.zeros((PLACES, WIDTH), np.float32)
    one, other = (added(zeros, places, rows, n).view(np.int32) for n in (SORTED, Numerics()))
    np.testing.assert_array_equal(one, other)


def test_a_frequent_token_loses_no_small_rows():
    """A tree adds ten thousand small rows without dropping them, as one after another would."""
    rows = np.full((10_000, 1), 1e-4, np.float32)
    rows[0] = 1e4
    found = added(np.zeros((2, 1), np.float32), np.ones(len(rows), np.int32), rows)
    assert found[0, 0] == 0
    assert found[1, 0] == pytest.approx(rows.astype(np.float64).sum(), rel=1e-6)


def unordered(text: str) -> int:
    """Scatters of a program that add to what is there, and whose places may come twice.

    Where every row of a batch has one place of its own, as the token's logit has, none does.
    """
    found = re.findall(r'"stablehlo\.scatter".*?\}\) :[^\n]*', text, flags=re.DOTALL)
    adding = [one for one in found if "stablehlo.add" in one and "unique_indices = true" not in one]
    batched = r"scatter_indices_batching_dims = \[0\].*, tensor<\d+x1x1xi32>, "
    return sum(re.search(batched, one, flags=re.DOTALL) is None for one in adding)


@pytest.mark.parametrize(
    "numerics", quick.some([GPU_EXACT_F32, GPU_EXACT_BF16], 1), ids=["f32", "bf16"]
)
def test_a_gradient_on_a_gpu_has_no_sum_without_an_order(numerics):
    config = lowering.one_layer()

    def text(numerics):
        made = lowering.programs(numerics, config=config)["learner"]
        return lowering.lower("pallas_gpu", *made).as_text()

    assert unordered(text(numerics)) == 0
    assert unordered(text(replace(numerics, row_sums="scatter"))) == 1


def test_a_gpu_compiles_repeatable_programs_unless_it_is_told_otherwise():
    option = "xla_gpu_deterministic_ops"
    for numerics in (GPU_EXACT_F32, GPU_EXACT_BF16):
        assert dict(numerics.with_options({"a": 1}).compiler_options) == {option: True, "a": 1}
        told = numerics.with_options({option: False})
        assert told.compiler_options == ((option, False),)
    assert Numerics().with_options({}) == Numerics()


def test_an_unknown_way_is_named():
    with pytest.raises(InputError, match="row_sums = 'sort'; known: scatter, sorted"):
        Numerics(row_sums="sort")  # pyright: ignore[reportArgumentType]
