"""The kernels against float64, and the invariances that exactness stands on."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from hypothesis import given
from hypothesis import strategies as st
from interpreted import f64, normal

from tim_jax import kernels
from tim_jax.app.run.assembly import fixed_numerics
from tim_jax.common.errors import InputError
from tim_jax.instruments.plan import hlo
from tim_jax.kernels import formulas, native, tiles
from tim_jax.numerics import (
    EXACT_BF16,
    EXACT_F16,
    EXACT_F32,
    NATIVE_BF16,
    NATIVE_F16,
    NATIVE_F32,
    Numerics,
    Rows,
    strict,
)

F32_ULP, BF16_ULP, F16_ULP = 2.0**-23, 2.0**-8, 2.0**-11
# What kernels may be off by, with a few roundings to float32 or one to the compute dtype.
ROUNDING = {"float32": 8 * F32_ULP, "bfloat16": BF16_ULP, "float16": F16_ULP}
ALL = pytest.mark.parametrize(
    "numerics",
    quick.some([EXACT_F32, EXACT_BF16, NATIVE_F32, NATIVE_BF16, EXACT_F16, NATIVE_F16], 0, 1, 2, 3),
    ids=lambda n: f"{n.family}-{n.compute_dtype}",
)
EACH_ALIGNED = pytest.mark.parametrize(
    ("numerics", "aligned"),
    quick.pairs(
        {
            "tiles-float32": EXACT_F32,
            "tiles-bfloat16": EXACT_BF16,
            "native-float32": NATIVE_F32,
            "native-bfloat16": NATIVE_BF16,
            "tiles-float16": EXACT_F16,
            "native-float16": NATIVE_F16,
        },
        {"aligned": True, "not": False},
    ),
)
EXACT = pytest.mark.parametrize(
    "numerics",
    quick.some([EXACT_F32, EXACT_BF16, EXACT_F16], 1),
    ids=["float32", "bfloat16", "float16"],
)
FAMILIES = {"tiles": tiles, "native": native}


def bits(x):
    return np.asarray(x.astype(jnp.float32)).view(np.int32)


# --- sums ------------------------------------------------------------------------------------


total = jax.jit(tiles.total, static_argnames="lanes")
peak = jax.jit(tiles.peak, static_argnames="lanes")


@pytest.mark.parametrize("size", [1, 2, 5, 31, 32, 127, 128, 129, 700, 9_000])
@pytest.mark.parametrize("lanes", [32, 128])
def test_total_and_peak_against_numpy(size, lanes):
    x = normal(size, 50, size)
    magnitude = np.abs(f64(x)).sum(-1)
    error = np.abs(f64(total(x, lanes=lanes)) - f64(x).sum(-1))
    assert (error <= magnitude * F32_ULP * (8 + size / lanes) ** 0.5).all()
    np.testing.assert_array_equal(peak(x, lanes=lanes), np.asarray(x).max(-1))


def test_many_lanes_are_as_many_partial_sums():
    """Chunks in sequence, then halves, as with few."""
    x = np.random.default_rng(0).standard_normal(9_000).astype(np.float32)
    acc, *chunks = np.pad(x, (0, 3 * 4_096 - len(x))).reshape(3, 4_096)
    for chunk in chunks:
        acc = acc + chunk
    while len(acc) > 1:
        acc = acc[: len(acc) // 2] + acc[len(acc) // 2 :]
    assert float(total(jnp.asarray(x), lanes=4_096)) == acc[0]


# From 8,192 elements on the tree of adds has one more level.
@pytest.mark.parametrize("size", [128, 129, 300, 8_191, 8_192, 8_193, 20_000])
@pytest.mark.parametrize("zeros", [1, 200, 8_192])
def test_appended_zeros_change_no_bit_of_a_total(size, zeros):
    x = normal(size, 20, size) ** 2
    longer = jnp.asarray(np.pad(np.asarray(x), ((0, 0), (0, zeros))))
    np.testing.assert_array_equal(bits(total(x)), bits(total(longer)))


def test_a_total_has_the_documented_order():
    """Chunks of 128 lanes in sequence, then halves: NumPy's float32 adds have the same bits."""
    x = np.random.default_rng(0).standard_normal(1_000).astype(np.float32)
    lanes = np.pad(x, (0, 24)).reshape(8, 128)
    acc = lanes[0]
    for chunk in lanes[1:]:
        acc = acc + chunk
    while len(acc) > 1:
        acc = acc[: len(acc) // 2] + acc[len(acc) // 2 :]
    assert float(total(jnp.asarray(x))) == acc[0]


# --- rows ------------------------------------------------------------------------------------


@given(low=st.integers(1, 64), more=st.none() | st.integers(0, 64), count=st.integers(1, 2_000))
def test_rows_split_covers_the_count_within_the_range(low, more, count):
    rows = Rows(low, None if more is None else low + more)
    number, size = rows.split(count)
    assert number * size >= count
    assert low <= size <= (rows.high or max(low, count))
    fewest = 1 if rows.high is None else -(-count // rows.high)
    assert number == fewest or (number < 2 * fewest and number * size == count)


def test_rows_are_split_without_padding_where_few_more_tiles_allow_it():
    assert Rows(2, 49).split(1280) == (32, 40)
    assert Rows(2, 2048).split(5120) == (4, 1280)
    assert Rows(2, 49).split(47) == (1, 47)
    assert Rows(2, 49).split(53) == (2, 27)
    assert Rows(16, 16).split(40) == (3, 16)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rows(0, 3), "low=0"),
        (lambda: Rows(8, 4), "high=4"),
        (lambda: Numerics(family="tile"), "'tile'"),  # pyright: ignore[reportArgumentType]
        (lambda: Numerics(compute_dtype="float64"), "'float64'"),
        (lambda: Numerics(kv_block=48), "48"),
        (lambda: Numerics(head_rows=0), "0"),
        (lambda: Numerics(cache_write="scater"), "scater"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_impossible_numerics_are_refused(build, message):
    with pytest.raises(InputError, match=message):
        build()


@given(
    rows=st.integers(1, 3_000),
    group=st.sampled_from([1, 3, 5]),
    tile=st.sampled_from([16, 48, 128]),
    block=st.sampled_from([16, 32]),
)
def test_segments_cover_all_rows_with_all_the_keys_they_may_see(rows, group, tile, block):
    length = -(-rows // group)
    rows = length * group
    runs = native.segments(rows, length, tile, block)
    assert len(runs) <= 8
    assert [start for start, _, _ in runs] == [0, *(stop for _, stop, _ in runs[:-1])]
    assert runs[-1][1] == rows
    for start, stop, keys in runs:
        assert (stop - 1) // group + 1 <= keys
        assert start % tile == 0
        assert keys % block == 0


# --- dots ------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize(("rows", "size", "width"), [(1, 20, 7), (37, 60, 101), (130, 256, 33)])
def test_dot_is_within_rounding_of_float64(numerics, rows, size, width):
    x, weight = normal(0, rows, size, dtype=numerics.dtype), normal(1, size, width)
    weight = weight.astype(numerics.dtype)
    found = FAMILIES[numerics.family].dot(x, weight, numerics=numerics)
    assert found.dtype == jnp.float32
    # Operands are exact in float64 and sums are float32, whatever the compute dtype.
    magnitude = np.abs(f64(x)) @ np.abs(f64(weight))
    assert (np.abs(f64(found) - f64(x) @ f64(weight)) <= magnitude * F32_ULP * size**0.5).all()


@EXACT
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(numerics):
    x, weight = normal(0, 70, 60, dtype=numerics.dtype), normal(1, 60, 101, dtype=numerics.dtype)
    dot = jax.jit(partial(tiles.dot, numerics=numerics))
    whole = bits(dot(x, weight))
    for count in (1, 15, 17, 48):
        np.testing.assert_array_equal(bits(dot(x[:count], weight)), whole[:count])
        np.testing.assert_array_equal(bits(dot(x[-count:], weight)), whole[-count:])


@EXACT
def test_gradients_of_dot(numerics):
    x, weight = normal(0, 21, 60, dtype=numerics.dtype), normal(1, 60, 33, dtype=numerics.dtype)
    cotangent = normal(2, 21, 33)
    _, pull = jax.vjp(partial(tiles.dot, numerics=numerics), x, weight)
    dx, dweight = pull(cotangent)
    ulp = ROUNDING[numerics.compute_dtype]
    for found, exact in (
        (dx, f64(cotangent) @ f64(weight).T),
        (dweight, f64(x).T @ f64(cotangent)),
    ):
        assert found.dtype == numerics.dtype
        assert np.abs(f64(found) - exact).max() <= 2 * ulp * np.abs(exact).max()


def factors(function, *arrays):
    """The dtypes of the left factors of a compiled function's products."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    assert text is not None
    module = hlo.parse(text)
    return [
        of[one.operands[0]].types[0].dtype
        for of in module.computations.values()
        for one in of.values()
        if one.opcode == "dot"
    ]


def test_products_of_a_bfloat16_gradient_are_as_fast_as_the_forwards():
    """Where the processor multiplies bfloat16, XLA widens no factor of the gradient's either."""
    draw = partial(normal, dtype=jnp.bfloat16)
    x, weight, cotangent = draw(0, 64, 96), draw(1, 96, 128), normal(2, 64, 128)

    def gradient(x, weight, cotangent):
        dx, dweight = native.dot_gradients(x, weight, cotangent)
        return dx, dweight.T  # as the head's gradient goes to the embedding

    (forward,) = factors(native.product, x, weight)
    assert factors(gradient, x, weight, cotangent) == [forward] * 2


# --- attention -------------------------------------------------------------------------------


def attention_inputs(numerics, *, batch=2, kv_heads=3, group=5, size=20, length=70, seed=0):
    """query [B, Kv, T G, D], key [B, Kv, D, T], value [B, Kv, T, D], positions [B, T G]."""
    draw = partial(normal, dtype=numerics.dtype)
    query = draw(seed, batch, kv_heads, length * group, size) * jnp.asarray(0.3, numerics.dtype)
    key = draw(seed + 1, batch, kv_heads, size, length)
    value = draw(seed + 2, batch, kv_heads, length, size)
    positions = jnp.repeat(jnp.arange(length, dtype=jnp.int32), group)
    return query, key, value, jnp.broadcast_to(positions, (batch, length * group))


def reference_attention(query, key, value, positions, window=None):
    scores = np.einsum("bkmd,bkds->bkms", f64(query), f64(key))
    ages = np.asarray(positions)[:, None, :, None] - np.arange(key.shape[3])[None, None, None, :]
    hidden = (ages < 0) | (ages >= (key.shape[3] if window is None else window))
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bkms,bksd->bkmd", weights, f64(value))


@cache
def attend(numerics, *, aligned):
    return jax.jit(partial(FAMILIES[numerics.family].attention, numerics=numerics, aligned=aligned))


@EACH_ALIGNED
@pytest.mark.parametrize(
    ("kv_heads", "group", "length"), quick.some([(3, 5, 70), (1, 1, 33), (2, 4, 7)], 0), ids=str
)
def test_attention_is_within_rounding_of_float64(numerics, kv_heads, group, length, aligned):
    inputs = attention_inputs(numerics, kv_heads=kv_heads, group=group, length=length)
    found = attend(numerics, aligned=aligned)(*inputs)
    assert found.dtype == jnp.float32
    # In 16 bits only the weights of the values are rounded: relative to the largest value.
    ulp = ROUNDING[numerics.compute_dtype]
    assert np.abs(f64(found) - reference_attention(*inputs)).max() <= 4 * ulp


@EXACT
def test_attention_of_a_few_rows_has_the_bits_of_whole_sequences(numerics):
    """Any rows at any positions, over a cache of any length, with anything in its unused part."""
    query, key, value, positions = attention_inputs(numerics)
    whole = bits(attend(numerics, aligned=True)(query, key, value, positions))
    rng = np.random.default_rng(0)
    for spare, count in ((0, 5), (58, 20)):
        rows = rng.integers(0, query.shape[2], count)
        garbage = normal(9, *key.shape[:3], spare, dtype=numerics.dtype)
        longer = jnp.concatenate([key, garbage], 3)
        values = jnp.concatenate([value, garbage.transpose(0, 1, 3, 2)], 2)
        found = attend(numerics, aligned=False)(
            query[:, :, rows], longer, values, positions[:, rows]
        )
        np.testing.assert_array_equal(bits(found), whole[:, :, rows])


@EXACT
def test_attention_of_one_sequence_has_the_bits_of_a_batch(numerics):
    inputs = attention_inputs(numerics, batch=4)
    run = attend(numerics, aligned=True)
    np.testing.assert_array_equal(bits(run(*inputs))[2:3], bits(run(*(x[2:3] for x in inputs))))


@EXACT
def test_attention_cut_short_has_the_bits_of_the_longer_sequence(numerics):
    inputs = attention_inputs(numerics, length=70)
    whole = bits(attend(numerics, aligned=True)(*inputs))
    for length in (1, 33):
        query, key, value, positions = inputs
        short = query[:, :, : 5 * length], key[..., :length], value[:, :, :length]
        found = attend(numerics, aligned=True)(*short, positions[:, : 5 * length])
        np.testing.assert_array_equal(bits(found), whole[:, :, : 5 * length])


@EACH_ALIGNED
@pytest.mark.parametrize("window", quick.some([1, 13, 64], 1))
def test_attention_within_a_window_is_within_rounding_of_float64(numerics, window, aligned):
    """70 keys in blocks of 32: of a late row's, the first block or two are masked as a whole."""
    inputs = attention_inputs(numerics)
    found = attend(numerics, aligned=aligned)(*inputs, window=jnp.int32(window))
    ulp = ROUNDING[numerics.compute_dtype]
    assert np.abs(f64(found) - reference_attention(*inputs, window)).max() <= 4 * ulp


@EXACT
def test_a_window_keeps_the_bits(numerics):
    """Of any rows over a cache of any length, with anything outside of what they see; and those of
    no window, where all keys are inside."""
    window, run = jnp.int32(13), attend(numerics, aligned=False)
    query, key, value, positions = attention_inputs(numerics)
    aligned = attend(numerics, aligned=True)
    whole = bits(aligned(query, key, value, positions, window=window))
    for rows, spare in ((slice(40, 45), 0), (slice(335, 350), 58), (slice(150, 300), 7)):
        first, last = max(0, rows.start // 5 - 12), (rows.stop - 1) // 5
        junk = normal(9, *key.shape[:3], 70 + spare, dtype=numerics.dtype)
        seen = (jnp.arange(70) >= first) & (jnp.arange(70) <= last)
        mixed = jnp.where(seen[None, None, None, :], key, junk[..., :70])
        keys = jnp.concatenate([mixed, junk[..., 70:]], 3)
        other = jnp.where(seen[None, None, :, None], value, 100 * junk.swapaxes(2, 3)[:, :, :70])
        values = jnp.concatenate([other, junk.swapaxes(2, 3)[:, :, 70:]], 2)
        found = run(query[:, :, rows], keys, values, positions[:, rows], window=window)
        np.testing.assert_array_equal(bits(found), whole[:, :, rows])
    without = bits(aligned(query, key, value, positions))
    found = aligned(query, key, value, positions, window=jnp.int32(70))
    np.testing.assert_array_equal(bits(found), without)
    assert (whole != without).mean() > 0.5


@pytest.mark.parametrize(
    ("numerics", "aligned"),
    quick.pairs({"tiles": EXACT_F32, "native": NATIVE_F32}, {"aligned": True, "not": False}),
)
def test_gradients_of_attention_within_a_window(numerics, aligned):
    """Against JAX's own gradient of the definition."""
    query, key, value, positions = attention_inputs(numerics, length=40, group=4)
    cotangent, window = normal(7, *query.shape), 9

    def plain(query, key, value):
        ages = positions[:, None, :, None] - jnp.arange(40)[None, None, None, :]
        scores = jnp.einsum("bkmd,bkds->bkms", query, key)
        inside = (ages >= 0) & (ages < window)
        weights = jax.nn.softmax(scores, axis=-1, where=inside)
        return jnp.sum(jnp.einsum("bkms,bksd->bkmd", weights, value) * cotangent)

    def loss(query, key, value):
        run = attend(numerics, aligned=aligned)
        return jnp.sum(run(query, key, value, positions, window=jnp.int32(window)) * cotangent)

    found, expected = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2)))(query, key, value) for f in (loss, plain)
    )
    for ours, theirs in zip(found, expected, strict=True):
        scale = float(np.abs(theirs).max())
        assert scale > 0
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("aligned", [True, False])
def test_gradients_of_attention(aligned):
    query, key, value, positions = attention_inputs(EXACT_F32, length=40, group=4)
    cotangent = normal(7, *query.shape)

    def loss(arrays):
        mixed = attend(EXACT_F32, aligned=aligned)(*arrays, positions)
        return jnp.sum(mixed * cotangent)

    found = jax.grad(loss)((query, key, value))
    for index, gradient in enumerate(found):
        arrays, step = [query, key, value], 1e-6
        direction = f64(normal(11 + index, *gradient.shape))

        def moved(sign, i=index, arrays=arrays, direction=direction, step=step):
            shifted = [f64(x) for x in arrays]
            shifted[i] += sign * step * direction
            return (reference_attention(*shifted, positions=positions) * f64(cotangent)).sum()

        slope = (moved(1) - moved(-1)) / (2 * step)
        assert (f64(gradient) * direction).sum() == pytest.approx(slope, rel=2e-5, abs=2e-4)


# --- units -----------------------------------------------------------------------------------

EXACT_NORM, PLAIN_NORM = (
    partial(formulas.rms_norm, eps=1e-6, lanes=128, maths=family.MATHS)
    for family in (tiles, native)
)


def test_a_unit_has_the_gradient_of_its_plain_form():
    x = normal(0, 5, 12)
    weight = 1.0 + normal(1, 12)
    unit = tiles.unit(EXACT_NORM, PLAIN_NORM)
    exact = jax.grad(lambda x, w: jnp.sum(jnp.sin(unit(x, w))), argnums=(0, 1))(x, weight)
    plain = jax.grad(lambda x, w: jnp.sum(jnp.sin(PLAIN_NORM(x, w))), argnums=(0, 1))(x, weight)
    for found, expected in zip(exact, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", quick.some([20, 60, 128, 300], 1))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_units_rows_do_not_depend_on_the_rows_beside_it(size, dtype):
    """Elementwise code and written-out sums: in any number of rows, and inside a loop."""
    x, weight = normal(0, 70, size, dtype=dtype), 1.0 + normal(1, size)
    unit = tiles.unit(EXACT_NORM, PLAIN_NORM)
    run = jax.jit(unit)
    whole = bits(run(x, weight))
    for count in (1, 7, 16):
        np.testing.assert_array_equal(bits(run(x[:count], weight)), whole[:count])
    looped = jax.jit(lambda x, w: jax.lax.map(lambda rows: unit(rows, w), x.reshape(7, 10, -1)))
    np.testing.assert_array_equal(bits(looped(x, weight)).reshape(whole.shape), whole)
    squares = jax.jit(lambda x, w: (unit(x + x, w), jnp.sum((x + x) ** 2)))
    np.testing.assert_array_equal(bits(squares(x / 2, weight)[0]), whole)


def test_rms_norm_against_float64():
    x, weight = normal(0, 9, 60), normal(1, 60)
    exact = f64(x) / np.sqrt((f64(x) ** 2).mean(-1, keepdims=True) + 1e-6) * f64(weight)
    np.testing.assert_allclose(EXACT_NORM(x, weight), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("heads", quick.some([2, 8], 0))
@pytest.mark.parametrize("size", quick.some([8, 36, 128], 1))
def test_the_norm_of_any_number_of_rows_is_ieee_arithmetic(size, heads):
    """Bit for bit NumPy's: no fused multiply-add, and no root that is guessed and improved, which
    XLA:CPU does in another way for another width of vectors, and so for another number of rows."""
    x = normal(0, 96, heads, size)
    squares = np.asarray(x) ** 2
    lanes = 1 << (size - 1).bit_length()
    total = np.pad(squares, ((0, 0), (0, 0), (0, lanes - size)))
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    mean = total[..., 0] * np.float32(1 / size)
    expected = np.asarray(x) * (np.float32(1) / np.sqrt(mean + np.float32(1e-6)))[..., None]
    run = jax.jit(lambda x: EXACT_NORM(x, jnp.ones(size)))
    for count in (1, 2, 3, 5, 8, 12, 16, 33, 96):
        np.testing.assert_array_equal(bits(run(x[:count])), bits(expected[:count]))


def test_rounded_is_the_cast_to_bfloat16():
    """Over random bits of every exponent, and ties; some backends flush subnormals."""
    rng = np.random.default_rng(0)
    x = rng.integers(-(2**31), 2**31, 100_000, np.int64).astype(np.int32).view(np.float32)
    ties = rng.integers(-(2**15), 2**15, 10_000).astype(np.int32) * 2**16 + 2**15
    x = np.concatenate([x, ties.view(np.float32)])
    x = x[np.isfinite(x) & (np.abs(x) > 1e-37) & (np.abs(x) < 3e38)]
    found = strict.rounded(jnp.asarray(x), jnp.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(found), x.astype(jnp.bfloat16))


# --- cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    ("span", "first"), [(9, [0, 6, 3, 5, 1]), (300, [0, 126, 14, 255, 297])], ids=["one", "many"]
)
def test_rows_land_at_their_own_positions_of_the_cache(length, span, first):
    """In one block of the kernel that writes blocks, and in and across several; also of heads whose
    size is no power of two, and where keys and values have other sizes."""
    batch, heads, size, width = 5, 2, 12, 4
    caches = normal(0, batch, heads, size, span), normal(2, batch, heads, span, width)
    rows = normal(1, batch, length, heads, size), normal(3, batch, length, heads, width)
    positions = np.asarray(first)[:, None] + np.arange(length)
    expected = np.array(caches[0]), np.array(caches[1])
    for b, t in np.ndindex(batch, length):
        expected[0][b, :, :, positions[b, t]] = rows[0][b, t]
        expected[1][b, :, positions[b, t]] = rows[1][b, t]
    on_gpu = Numerics(family="pallas_gpu", cache_write="kernel", interpret=True)
    for numerics in (
        Numerics(cache_write="rows"),
        Numerics(cache_write="scatter"),
        on_gpu,
        replace(on_gpu, family="pallas_tpu"),
    ):
        write = jax.jit(partial(kernels.written, numerics=numerics))
        for found, exact in zip(write(caches, rows, positions), expected, strict=True):
            message = f"{numerics.family} {numerics.cache_write}"
            np.testing.assert_array_equal(bits(found), bits(exact), err_msg=message)


@pytest.mark.parametrize("family", ["tiles", "pallas_gpu", "pallas_tpu"])
def test_rows_land_in_pages_of_any_order_and_what_is_idle_in_the_sink(family):
    """Rows 1 and 3 are idle: they write to one place of the last page, which nobody reads."""
    block, heads, size, pages = 128, 2, 16, 6
    caches = normal(0, pages, heads, size, block), normal(2, pages, heads, block, size)
    rows = normal(1, 4, 1, heads, size), normal(3, 4, 1, heads, size)
    table = np.array([[4, 2], [5, 5], [0, 3], [5, 5]], np.int32)
    positions = np.array([[block + 7], [0], [127], [0]], np.int32)
    expected = np.array(caches[0]), np.array(caches[1])
    for row, page, at in ((0, 2, 7), (2, 0, 127)):
        expected[0][page, :, :, at] = rows[0][row, 0]
        expected[1][page, :, at] = rows[1][row, 0]
    numerics = Numerics(family=family, kv_block=block)
    if family != "tiles":
        numerics = replace(numerics, cache_write="kernel", interpret=True)
    write = jax.jit(partial(kernels.written, numerics=numerics))
    for found, exact in zip(write(caches, rows, positions, pages=table), expected, strict=True):
        np.testing.assert_array_equal(bits(found[:5]), bits(exact[:5]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exponential_of_attention_is_computed_once(dtype):
    """Where XLA fuses across barriers, it computes it again in the sum, far more slowly."""
    numerics = replace(fixed_numerics("tiles", dtype, length=64), whole_kv=True)
    shapes = (3, 4, 48, 32), (3, 4, 32, 160), (3, 4, 160, 32)
    given = [jax.ShapeDtypeStruct(shape, numerics.dtype) for shape in shapes]
    last = jax.ShapeDtypeStruct((3, 48), jnp.int32)
    options: Any = dict(numerics.compiler_options) or None
    program = jax.jit(partial(tiles._attend, numerics=numerics), compiler_options=options)
    text = program.lower(*given, last).compile().as_text()
    assert str(text).count("constant(1.44269502)") == 1  # log2(e)
