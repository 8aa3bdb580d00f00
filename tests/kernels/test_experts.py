"""A mixture of experts: which are chosen, in which tiles their rows lie, and what they make."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from hypothesis import given
from hypothesis import strategies as st
from interpreted import f64, shapes

from tim_jax import kernels
from tim_jax.instruments.plan import costs
from tim_jax.kernels import experts
from tim_jax.numerics import EXACT_BF16, EXACT_F16, EXACT_F32, NATIVE_F32

ALL = pytest.mark.parametrize(
    "numerics",
    quick.some([EXACT_F32, EXACT_BF16, NATIVE_F32, EXACT_F16], 0, 1, 2),
    ids=["tiles", "tiles-bfloat16", "native", "tiles-float16"],
)
ROWS, EXPERTS, HIDDEN, WIDTH, CHOSEN = 29, 7, 20, 12, 3


def normal(seed, *shape, dtype=jnp.float32):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jnp.asarray(values).astype(dtype)


def bits(x):
    return np.asarray(x.astype(jnp.float32)).view(np.int32)


@partial(jax.jit, static_argnames=("count", "normalised", "numerics"))
def choose(logits, *, count=CHOSEN, normalised=True, numerics=EXACT_F32):
    return experts.choice(logits, count=count, normalised=normalised, numerics=numerics)


# --- which experts ---------------------------------------------------------------------------


def test_the_largest_logits_are_chosen_and_of_equal_ones_the_first():
    logits = np.random.default_rng(0).integers(-3, 4, (200, EXPERTS)).astype(np.float32)
    logits[::2] /= 8  # many ties; and zeros of both signs, which are equal
    logits = np.where((logits == 0) & (np.arange(EXPERTS) % 2 == 0), np.float32(-0.0), logits)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :CHOSEN]
    np.testing.assert_array_equal(choose(jnp.asarray(logits)).experts, expected)


@ALL
@pytest.mark.parametrize("normalised", [True, False])
def test_weights_are_the_softmax_of_the_chosen(numerics, normalised):
    logits = 4 * normal(1, ROWS, EXPERTS)
    found = choose(logits, normalised=normalised, numerics=numerics)
    scores = np.exp(f64(logits))
    chosen = np.take_along_axis(scores, np.asarray(found.experts), axis=1)
    whole = (chosen if normalised else scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.weights, chosen / whole, rtol=1e-6)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_routers_gradient_is_that_of_the_plain_formula(normalised):
    logits, cotangent = normal(2, ROWS, EXPERTS), normal(3, ROWS, CHOSEN)

    def ours(logits):
        return jnp.vdot(choose(logits, normalised=normalised).weights, cotangent)

    def plain(logits):
        values, _ = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), CHOSEN)
        return jnp.vdot(values / values.sum(-1, keepdims=True) if normalised else values, cotangent)

    np.testing.assert_allclose(jax.grad(ours)(logits), jax.grad(plain)(logits), atol=1e-6)


def test_a_rows_choice_and_weights_do_not_depend_on_the_other_rows():
    logits = normal(4, 300, EXPERTS)
    whole = choose(logits)
    for part in (slice(0, 1), slice(3, 8), slice(100, 300)):
        alone = choose(logits[part])
        np.testing.assert_array_equal(alone.experts, whole.experts[part])
        np.testing.assert_array_equal(bits(alone.weights), bits(whole.weights[part]))


# --- tiles -----------------------------------------------------------------------------------


SHAPES = [(40, 3, 7, 8), (1, 2, 4, 8), (33, 1, 9, 1), (64, 4, 4, 16), (5, 2, 30, 2)]
in_tiles = jax.jit(experts.in_tiles, static_argnames=("count", "rows"))


@pytest.mark.parametrize(("rows", "chosen", "count", "size"), SHAPES)
@given(seed=st.integers(0, 2**16), favourite=st.booleans())
def test_every_pair_has_its_own_place_in_a_tile_of_its_expert(
    rows, chosen, count, size, favourite, seed
):
    rng = np.random.default_rng(seed)
    picked = np.stack([rng.permutation(count)[:chosen] for _ in range(rows)]).astype(np.int32)
    if favourite:  # all tokens choose the same: no capacity drops one
        picked[:] = picked[0]
    laid = in_tiles(jnp.asarray(picked), count=count, rows=size)
    place, pair = np.asarray(laid.place), np.asarray(laid.pair)
    np.testing.assert_array_equal(pair[place], np.arange(picked.size))
    assert (pair == picked.size).sum() == pair.size - picked.size
    np.testing.assert_array_equal(np.asarray(laid.expert)[place // size], picked.reshape(-1))
    groups = np.bincount(picked.reshape(-1), minlength=count)
    used = (-(-groups // size)).sum()
    assert np.count_nonzero(laid.filled) == used <= laid.expert.size
    assert place.max() < used * size
    np.testing.assert_array_equal(
        pair.reshape(-1, size) < picked.size, np.arange(size) < np.asarray(laid.filled)[:, None]
    )


@pytest.mark.parametrize(("pairs", "count"), [(1, 9), (64, 16), (2560, 16), (4096, 128), (99, 7)])
def test_a_tile_has_room_for_an_experts_share_within_bounds(pairs, count):
    for least in (1, 16, 56, 200):
        size = experts.tile_rows(pairs, count, least)
        assert least <= size <= max(least, 128)
        assert size >= min(pairs // count, 128)


# --- what they make --------------------------------------------------------------------------


def made(dtype=jnp.float32, rows=ROWS, seed=5):
    """(x, gate and up, down, experts, weights) of a mixture."""
    x = normal(seed, rows, HIDDEN, dtype=dtype)
    gate_up = normal(6, EXPERTS, HIDDEN, 2 * WIDTH, dtype=dtype)
    down = normal(7, EXPERTS, WIDTH, HIDDEN, dtype=dtype)
    found = choose(normal(8 + seed, rows, EXPERTS))
    return x, gate_up, down, found.experts, found.weights


@partial(jax.jit, static_argnames="numerics")
def run(x, gate_up, down, chosen, *, numerics):
    ops = kernels.family(numerics)
    return experts.outputs(x, gate_up, down, chosen, ops=ops, numerics=numerics)


def reference(x, gate_up, down, chosen):
    """The same in NumPy float64, one pair at a time."""
    x, gate_up, down = f64(x), f64(gate_up), f64(down)
    found = np.zeros((*chosen.shape, HIDDEN))
    for (row, index), expert in np.ndenumerate(np.asarray(chosen)):
        gate, up = np.split(x[row] @ gate_up[expert], 2)
        found[row, index] = (gate / (1 + np.exp(-gate)) * up) @ down[expert]
    return found


@ALL
def test_outputs_against_float64(numerics):
    *given_, _ = made(numerics.dtype)
    found, exact = f64(run(*given_, numerics=numerics)), reference(*given_)
    error = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(numerics.compute_dtype, 2.0**-20)
    assert np.abs(found - exact).max() < error * np.abs(exact).max()


@ALL
def test_the_sum_of_the_chosen_against_float64(numerics):
    residual = normal(9, ROWS, HIDDEN, dtype=numerics.dtype)
    outputs, weights = normal(10, ROWS, CHOSEN, HIDDEN), normal(11, ROWS, CHOSEN)
    found = jax.jit(partial(experts.combined, numerics=numerics))(residual, outputs, weights)
    exact = f64(residual) + (f64(outputs) * f64(weights)[..., None]).sum(axis=1)
    error = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(numerics.compute_dtype, 2.0**-21)
    assert np.abs(f64(found) - exact).max() < error * np.abs(exact).max()


@pytest.mark.parametrize("numerics", [EXACT_F32, NATIVE_F32], ids=["tiles", "native"])
def test_gradients_are_those_of_a_plain_implementation(numerics):
    x, gate_up, down, chosen, weights = made()
    residual, cotangent = normal(12, ROWS, HIDDEN), normal(13, ROWS, HIDDEN)

    def ours(x, gate_up, down, weights):
        outputs = run(x, gate_up, down, chosen, numerics=numerics)
        return jnp.vdot(experts.combined(residual, outputs, weights, numerics=numerics), cotangent)

    def plain(x, gate_up, down, weights):
        with jax.default_matmul_precision("highest"):
            gate, up = jnp.split(jnp.einsum("nd,edm->nem", x, gate_up), 2, axis=-1)
            every = jnp.einsum("nem,emd->ned", gate * jax.nn.sigmoid(gate) * up, down)
        shares = jnp.zeros(every.shape[:2]).at[jnp.arange(ROWS)[:, None], chosen].set(weights)
        return jnp.vdot(residual + jnp.einsum("ned,ne->nd", every, shares), cotangent)

    given_ = x, gate_up, down, weights
    wanted = jax.jit(jax.grad(plain, argnums=(0, 1, 2, 3)))(*given_)
    found = jax.jit(jax.grad(ours, argnums=(0, 1, 2, 3)))(*given_)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6 * float(jnp.abs(other).max()))


@pytest.mark.parametrize("numerics", [EXACT_F32, NATIVE_F32], ids=["tiles", "native"])
def test_a_scaled_shared_expert_has_the_gradients_of_the_plain_formula(numerics):
    given_ = normal(14, ROWS, HIDDEN), normal(15, ROWS, HIDDEN), normal(16, HIDDEN, 1)
    cotangent = normal(17, ROWS, HIDDEN)

    def ours(*args):
        return jnp.vdot(experts.scaled(*args, numerics=numerics), cotangent)

    def plain(outputs, x, weight):
        share = jax.nn.sigmoid(jnp.dot(x, weight, precision="highest"))
        return jnp.vdot(outputs * jnp.broadcast_to(share, outputs.shape), cotangent)

    assert float(ours(*given_)) == pytest.approx(float(plain(*given_)), rel=1e-5)
    wanted = jax.grad(plain, argnums=(0, 1, 2))(*given_)
    for one, other in zip(jax.grad(ours, argnums=(0, 1, 2))(*given_), wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6 * float(jnp.abs(other).max()))


@pytest.mark.parametrize(
    "numerics",
    quick.some([EXACT_F32, EXACT_BF16, EXACT_F16], 1),
    ids=["float32", "bfloat16", "float16"],
)
def test_a_tokens_bits_depend_neither_on_its_neighbours_nor_on_its_place(numerics):
    x, gate_up, down, chosen, _ = made(numerics.dtype, rows=90)
    whole = bits(run(x, gate_up, down, chosen, numerics=numerics))
    order = np.random.default_rng(0).permutation(90)
    for rows in (order, order[:1], order[5:22], np.flatnonzero(np.asarray(chosen)[:, 0] == 2)):
        part = run(x[rows], gate_up, down, chosen[rows], numerics=numerics)
        np.testing.assert_array_equal(bits(part), whole[rows])
    # A token's experts are the same; those of all others are not.
    others = jnp.roll(chosen, 1, axis=0).at[17].set(chosen[17])
    np.testing.assert_array_equal(
        bits(run(x, gate_up, down, others, numerics=numerics))[17], whole[17]
    )


def test_the_forward_inside_a_gradient_has_the_bits_of_the_forward():
    x, gate_up, down, chosen, _ = made()

    @jax.jit
    def differentiated(x, gate_up, down):
        def loss(x, gate_up, down):
            found = run(x, gate_up, down, chosen, numerics=EXACT_F32)
            return jnp.sum(found * found), found

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, gate_up, down)

    plain = run(x, gate_up, down, chosen, numerics=EXACT_F32)
    _, found = differentiated(x, gate_up, down)  # XLA would leave out gradients nobody asks for
    np.testing.assert_array_equal(bits(found), bits(plain))


def test_no_array_has_every_token_at_every_expert():
    rows, count = 512, 64
    x, chosen = normal(0, rows, HIDDEN), jnp.zeros((rows, 2), jnp.int32)
    gate_up, down = normal(1, count, HIDDEN, 2 * WIDTH), normal(2, count, WIDTH, HIDDEN)

    def loss(x, gate_up, down):
        return jnp.sum(run(x, gate_up, down, chosen, numerics=EXACT_F32))

    found = set(shapes(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(x, gate_up, down).jaxpr))
    largest = max(np.prod(shape) for shape in found)
    assert (rows, 2, HIDDEN) in found
    assert largest < rows * count * WIDTH / 4


@pytest.mark.parametrize(("rows", "count"), [(29, 7), (600, 64)])
def test_planned_products_are_those_of_the_chosen_experts(rows, count):
    """Of the rows of all tiles: those of the pairs, and what fills the tiles up."""
    given_ = (
        jnp.zeros((rows, HIDDEN)),
        jnp.zeros((count, HIDDEN, 2 * WIDTH)),
        jnp.zeros((count, WIDTH, HIDDEN)),
        jnp.zeros((rows, CHOSEN), jnp.int32),
    )
    found = costs.count(jax.make_jaxpr(partial(run, numerics=EXACT_F32))(*given_)).flops
    size = experts.tile_rows(rows * CHOSEN, count, 16)
    tiles = count + (rows * CHOSEN - count) // size
    assert found == 2 * tiles * size * 3 * HIDDEN * WIDTH
    # All tokens through all experts would be many times as much, once there are many tokens.
    assert rows < 100 or 5 * found < 2 * rows * count * 3 * HIDDEN * WIDTH
