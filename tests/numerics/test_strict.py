"""Strict functions: accurate, and the same bits in any array, beside any neighbour.

Sums have the same bits under every split; a control shows that a plain sum has not.
"""

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
from scipy import special

from tim_jax.kernels import formulas, native, tiles
from tim_jax.numerics import strict

TINY = np.finfo(np.float32).tiny
RNG = np.random.default_rng(0)
EXPONENTS = np.concatenate([np.linspace(-90, 87.3, 40001), 4 * RNG.standard_normal(24000)])
EXPONENTS = EXPONENTS.astype(np.float32)
POSITIVE = np.exp(RNG.uniform(-87, 88, 60000)).astype(np.float32)
POSITIVE = np.concatenate([POSITIVE, RNG.uniform(0.9, 1.1, 5000).astype(np.float32)])


def bits(x):
    return np.asarray(x).view(np.int32)


def ulps(found, exact):
    """The largest error in units of the last place, where the exact value is a normal float32."""
    with np.errstate(over="ignore"):
        nearest = exact.astype(np.float32)
    normal = np.isfinite(nearest) & (np.abs(nearest) >= TINY)
    assert normal.sum() > 1000
    error = np.abs(np.asarray(found, np.float64) - exact)[normal]
    return np.max(error / np.spacing(np.abs(nearest[normal])))


def test_exp_is_within_an_ulp():
    exact = np.exp(EXPONENTS.astype(np.float64))
    found = np.asarray(jax.jit(strict.exp)(EXPONENTS))
    inside = np.abs(EXPONENTS) < 87.33
    assert ulps(found[inside], exact[inside]) < 1
    np.testing.assert_array_equal(found[EXPONENTS < -87.33], 0)


def test_the_normal_quantile_is_accurate():
    u = (np.concatenate([np.arange(2000), RNG.integers(0, 2**23, 60000)]) + 0.5) / 2**23
    u = np.concatenate([u, 1 - u, 10.0 ** -np.arange(8, 37)]).astype(np.float32)
    exact = special.ndtri(u.astype(np.float64))
    np.testing.assert_allclose(jax.jit(strict.normal_quantile)(u), exact, rtol=2e-6, atol=1e-7)


def test_log_is_within_an_ulp():
    assert ulps(jax.jit(strict.log)(POSITIVE), np.log(POSITIVE.astype(np.float64))) < 1


def test_sigmoid_is_accurate():
    x = EXPONENTS[np.abs(EXPONENTS) < 87.33]
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    found = jax.jit(strict.sigmoid)(EXPONENTS)
    assert ulps(found[np.abs(EXPONENTS) < 87.33], exact) < 2.5
    assert np.min(jax.jit(strict.sigmoid)(jnp.asarray([*EXPONENTS, -1e30, -jnp.inf]))) >= TINY


@pytest.mark.parametrize("compiled", quick.some([False, True], 1))
def test_at_the_edges(compiled):
    wrap = jax.jit if compiled else (lambda f: f)
    inf, nan = np.inf, np.nan
    exp = wrap(strict.exp)(jnp.asarray([0.0, -0.0, -inf, nan, -88, -1e30, -3e38]))
    np.testing.assert_array_equal(exp, [1, 1, 0, nan, 0, 0, 0])
    log = wrap(strict.log)(jnp.asarray([1.0, 0, -0.0, inf, -inf, nan, -1, 1e-40]))
    np.testing.assert_array_equal(log, [0, -inf, -inf, inf, nan, nan, nan, -inf])
    np.testing.assert_array_equal(
        wrap(strict.sigmoid)(jnp.asarray([0.0, 200, inf, nan])), [0.5, 1, 1, nan]
    )
    assert np.isfinite(wrap(strict.inverse_root)(jnp.float32(0)))


def test_gradients():
    x = np.asarray([-3.0, 0.2, 1.7], np.float32)
    for function, expected in (
        (strict.exp, np.cos(np.exp(x)) * np.exp(x)),
        (lambda x: strict.log(x * x), np.cos(np.log(x * x)) * 2 / x),
    ):
        gradient = jax.jit(jax.grad(lambda x, f=function: jnp.sum(jnp.sin(f(x)))))
        np.testing.assert_allclose(gradient(x), expected, rtol=1e-5)


# Each beside an operation that XLA:CPU was seen to change it with.
BESIDE = {
    "exp": strict.exp,
    "log": lambda x: strict.log(jnp.abs(x)),
    "sigmoid": strict.sigmoid,
    "inverse_root": lambda x: strict.inverse_root(jnp.abs(x)),
    "gated": lambda x: formulas.gated_silu(x, 1 - x, maths=tiles.MATHS),
    "quotient": lambda x: 1 / strict.exp(x),
    "sum": lambda x: x + strict.exp(x),
    "difference": lambda x: x - strict.log(jnp.abs(x)),
    "quantile": lambda x: strict.normal_quantile(strict.exp(-jnp.abs(x) - 1)),
    "products": lambda x: strict.uncontracted(x * x) - strict.uncontracted((x + 1) * (x - 1)),
}
SIZES = (1, 2, 3, 5, 6, 7, 8, 12, 17, 33, 100)


@pytest.mark.parametrize("name", quick.some(list(BESIDE), 2, 7, 9))
def test_a_number_has_the_bits_of_ieee_arithmetic_in_any_array(name):
    """Operation by operation, uncompiled, each is rounded by itself: that is the reference."""
    x, run = RNG.permutation(EXPONENTS)[:20000], jax.jit(BESIDE[name])
    expected = bits(BESIDE[name](x))
    np.testing.assert_array_equal(bits(run(x)), expected)
    for size in SIZES:
        for start in range(0, 20 * size, size):
            found = bits(run(x[start : start + size]))
            np.testing.assert_array_equal(found, expected[start : start + size])
        rows = x[: 16 * size].reshape(16, size)
        np.testing.assert_array_equal(bits(run(rows)).reshape(-1), expected[: 16 * size])
        across = bits(jax.jit(lambda x: BESIDE[name](x.T).T)(rows))
        np.testing.assert_array_equal(across.reshape(-1), expected[: 16 * size])


def test_rotation_has_the_bits_of_ieee_arithmetic_for_any_number_of_rows():
    x, angles = RNG.standard_normal((64, 3, 8)), RNG.uniform(0, 6, (64, 4))
    x, cos, sin = (a.astype(np.float32) for a in (x, np.cos(angles), np.sin(angles)))
    first, second = x[..., :4], x[..., 4:]
    c, s = cos[:, None], sin[:, None]
    expected = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    run = jax.jit(lambda *args: formulas.rotate(*args, maths=tiles.MATHS))
    for count in (1, 2, 3, 5, 8, 12, 64):
        found = run(x[:count], cos[:count], sin[:count])
        np.testing.assert_array_equal(bits(found), bits(expected[:count]))


def test_native_maths_are_plain_xla():
    """What is measured as native must not be the exact family in disguise."""

    def program(maths):
        gated = jax.jit(lambda x: formulas.gated_silu(x, x, maths=maths))
        return gated.lower(EXPONENTS).as_text()

    assert "exponential" in program(native.MATHS)
    assert "exponential" not in program(tiles.MATHS)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_rounded_number_is_the_formats_nearest(name):
    """NumPy's: subnormal numbers and ties are among them, and what is too large is infinite."""
    dtype = jnp.dtype(name)
    rng = np.random.default_rng(0)
    sizes = 2.0 ** rng.integers(-30, 17, 4_000)
    ties = (np.arange(64) + 0.5) * 2.0**-24
    x = np.concatenate([rng.standard_normal(4_000) * sizes, ties, -ties, [0.0, -0.0, np.inf]])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(dtype)
    found = jax.jit(lambda x: strict.rounded(x, dtype).astype(jnp.float32))(x)
    assert np.array_equal(bits(found), bits(expected.astype(np.float32)))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_the_derivative_of_rounding_is_that_of_a_cast(name):
    """Of subnormal results too: an activation near 0 is not cut off from the gradient."""
    dtype = jnp.dtype(name)
    x = jnp.asarray([0.0, 1e-30, -3e-6, 5.9e-5, 0.3, -7.0], jnp.float32)
    slopes = jnp.asarray([1.0, -2.0, 3.0, 2.0**-8, 2.0**-12, 2.0**-14], jnp.float32)
    (found,) = jax.vjp(lambda x: strict.rounded(x, dtype), x)[1](slopes.astype(dtype))
    np.testing.assert_array_equal(found, slopes)


def draw(rows, seed=0):
    rng = np.random.default_rng(seed)
    return np.float32(rng.standard_normal((rows, 301)) * 10.0 ** rng.uniform(-4, 4, (rows, 301)))


def plain(values):
    return jnp.sum(jnp.square(values), axis=(0, 1))


def ours(values):
    return strict.compensated_sum(strict.compensated_sum(jnp.square(values))[0])[0]


def tree(values):
    return strict.tree_sum(strict.tree_sum(jnp.square(values)))


def layouts(values, function):
    """The function's value on one device, padded, and over meshes of several shapes and kinds."""
    found = [function(values), jax.jit(function)(values)]
    found.append(jax.jit(function)(np.pad(values, ((0, 9), (0, 87)))))
    auto, explicit = AxisType.Auto, AxisType.Explicit
    for shape, kind in (((8, 1), auto), ((4, 2), explicit), ((2, 4), auto), ((2, 4), explicit)):
        mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(kind, kind))
        wide = np.pad(values, ((0, 0), (0, 3)))
        placed = jax.device_put(wide, NamedSharding(mesh, PartitionSpec("x", "y")))
        found.append(jax.jit(function)(placed))
    return np.asarray([float(x) for x in found], np.float32)


@pytest.mark.parametrize(
    ("seed", "function"), quick.pairs([0, 1, 2], {"compensated": ours, "tree": tree})
)
def test_bits_do_not_depend_on_the_layout(function, seed):
    assert len(set(layouts(draw(64, seed), function).tolist())) == 1


@pytest.mark.parametrize("shape", [(2,), (64,), (8, 16)], ids=str)
def test_products_that_feed_a_sum_are_rounded_first(shape):
    """A product fused into the first addition (fma) would change bits with the fusion."""
    x, y = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    rounded = jnp.asarray(x * y)
    for total in (strict.tree_sum, lambda v: jnp.stack(strict.compensated_sum(v))):
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
    high, low = strict.compensated_sum(jnp.asarray(values))
    exact, found = math.fsum(values.astype(np.float64)), float(high) + float(low)
    assert abs(found - exact) <= 1e-6 * abs(exact) + 1e-12 * float(np.abs(values).max())


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=30)
def test_two_sum_loses_nothing(seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((2, 50)) * 10.0 ** rng.uniform(-12, 12, (2, 50))
    a, b = values.astype(np.float32)
    total, error = (np.asarray(x) for x in jax.jit(strict.two_sum)(a, b))
    for parts, whole in zip(zip(total, error, strict=True), zip(a, b, strict=True), strict=True):
        assert sum(map(Fraction, map(float, parts))) == sum(map(Fraction, map(float, whole)))


def test_tree_sum_has_the_gradient_of_a_sum():
    values = jnp.asarray(draw(3))
    gradient = jax.jit(jax.grad(lambda x: strict.tree_sum(strict.tree_sum(x))))(values)
    assert np.array_equal(np.asarray(gradient), np.ones_like(values))


def test_empty_axes_sum_to_zero_and_counts_divide_safely():
    assert float(strict.tree_sum(jnp.zeros((0,)))) == 0.0
    assert strict.compensated_sum(jnp.zeros((3, 0)))[0].tolist() == [0.0] * 3
    assert strict.row_count(jnp.asarray([[True, False], [True, True]])).tolist() == [1, 2]
    assert float(strict.count(jnp.zeros((2, 2), bool))) == 1.0


@pytest.mark.parametrize("function", [strict.tree_sum, strict.compensated_sum])
def test_a_sum_is_one_program_by_itself_and_none_within_another(function):
    values = draw(37, 0)  # a shape that no other test has
    with tiny.compilations() as compiled:
        alone = function(values)
    assert compiled == {function.__name__: 1}
    # What XLA is given: the newest JAX writes operations out when it lowers, not when it traces.
    within, written_out = (
        jax.jit(lambda x, f=f: f(x)).lower(values).as_text()
        for f in (function, function.__wrapped__)
    )
    assert within == written_out
    assert tiny.bits(alone) == tiny.bits(jax.jit(lambda x: function(x))(values))


def test_a_running_sum_has_the_same_bits_on_an_explicit_mesh():
    values = np.asarray(draw(16, 3))
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    place = NamedSharding(mesh, PartitionSpec(None, "y"))
    values = values[:, : values.shape[1] // 4 * 4]
    found = jax.jit(strict.running_sum)(jax.device_put(values, place))
    assert found.sharding.spec == place.spec
    assert np.array_equal(np.asarray(found), np.asarray(jax.jit(strict.running_sum)(values)))
