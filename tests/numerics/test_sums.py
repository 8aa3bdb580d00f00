"""The fixed-order sums: same bits under every split, and a control that a plain sum fails."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tim_jax.numerics import sums


def draw(rows, seed=0):
    rng = np.random.default_rng(seed)
    return np.float32(rng.standard_normal((rows, 301)) * 10.0 ** rng.uniform(-4, 4, (rows, 301)))


def plain(values):
    return jnp.sum(jnp.square(values), axis=(0, 1))


def ours(values):
    return sums.compensated_sum(sums.compensated_sum(jnp.square(values))[0])[0]


def tree(values):
    return sums.tree_sum(sums.tree_sum(jnp.square(values)))


def layouts(values, function):
    """The function's value on one device, padded, and over meshes of several shapes and kinds."""
    found = [function(values), jax.jit(function)(values)]
    found.append(jax.jit(function)(np.pad(values, ((0, 9), (0, 87)))))
    for shape in ((8, 1), (4, 2), (2, 4)):
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(kind, kind))
            wide = np.pad(values, ((0, 0), (0, 3)))
            placed = jax.device_put(wide, NamedSharding(mesh, PartitionSpec("x", "y")))
            found.append(jax.jit(function)(placed))
    return np.asarray([float(x) for x in found], np.float32)


@pytest.mark.parametrize(
    ("seed", "function"),
    quick.pairs([0, 1, 2], {"compensated": ours, "tree": tree}),
)
def test_bits_do_not_depend_on_the_layout(function, seed):
    assert len(set(layouts(draw(64, seed), function).tolist())) == 1


@pytest.mark.parametrize("shape", [(2,), (64,), (8, 16)], ids=str)
def test_products_that_feed_a_sum_are_rounded_first(shape):
    """A product fused into the first addition (fma) would change bits with the fusion."""
    x, y = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    rounded = jnp.asarray(x * y)
    for total in (sums.tree_sum, lambda v: jnp.stack(sums.compensated_sum(v))):
        fused = jax.jit(lambda x, y, total=total: total(x * y))(x, y)
        assert np.array_equal(np.asarray(fused), np.asarray(total(rounded)))


def test_a_plain_sum_does_depend_on_the_layout():
    different = [len(set(layouts(draw(64, seed), plain).tolist())) for seed in range(3)]
    assert max(different) > 1


@given(seed=st.integers(0, 10**6), scale=st.floats(-8, 8))
@settings(deadline=None, max_examples=30)
def test_compensated_sum_is_the_float64_sum(seed, scale):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(200) * 10.0 ** (scale * rng.random(200))).astype(np.float32)
    values[100:] = -values[:100] * np.float32(1 + 1e-6)
    high, low = sums.compensated_sum(jnp.asarray(values))
    exact, found = math.fsum(values.astype(np.float64)), float(high) + float(low)
    assert abs(found - exact) <= 1e-6 * abs(exact) + 1e-12 * float(np.abs(values).max())


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=30)
def test_two_sum_loses_nothing(seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((2, 50)) * 10.0 ** rng.uniform(-12, 12, (2, 50))
    a, b = values.astype(np.float32)
    total, error = (np.asarray(x) for x in jax.jit(sums.two_sum)(a, b))
    for parts, whole in zip(zip(total, error, strict=True), zip(a, b, strict=True), strict=True):
        assert sum(map(Fraction, map(float, parts))) == sum(map(Fraction, map(float, whole)))


def test_tree_sum_has_the_gradient_of_a_sum():
    values = jnp.asarray(draw(3))
    gradient = jax.jit(jax.grad(lambda x: sums.tree_sum(sums.tree_sum(x))))(values)
    assert np.array_equal(np.asarray(gradient), np.ones_like(values))


def test_empty_axes_sum_to_zero_and_counts_divide_safely():
    assert float(sums.tree_sum(jnp.zeros((0,)))) == 0.0
    assert sums.compensated_sum(jnp.zeros((3, 0)))[0].tolist() == [0.0] * 3
    assert sums.row_count(jnp.asarray([[True, False], [True, True]])).tolist() == [1, 2]
    assert float(sums.count(jnp.zeros((2, 2), bool))) == 1.0


@pytest.mark.parametrize("function", [sums.tree_sum, sums.compensated_sum])
def test_a_sum_is_one_program_by_itself_and_none_within_another(function):
    values = draw(37, 0)  # a shape that no other test has
    with tiny.compilations() as compiled:
        alone = function(values)
    assert compiled == {function.__name__: 1}
    calls = [e.params.get("name") for e in jax.make_jaxpr(function.__wrapped__)(values).eqns]
    within = [e.params.get("name") for e in jax.make_jaxpr(lambda x: function(x))(values).eqns]
    assert within == calls
    assert tiny.bits(alone) == tiny.bits(jax.jit(lambda x: function(x))(values))


def test_a_running_sum_has_the_same_bits_on_an_explicit_mesh():
    values = np.asarray(draw(16, 3))
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    place = NamedSharding(mesh, PartitionSpec(None, "y"))
    values = values[:, : values.shape[1] // 4 * 4]
    found = jax.jit(sums.running_sum)(jax.device_put(values, place))
    assert found.sharding.spec == place.spec
    assert np.array_equal(np.asarray(found), np.asarray(jax.jit(sums.running_sum)(values)))
