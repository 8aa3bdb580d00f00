"""Entries of the dial for mixtures of experts: the choice, its weights, the sum, the capacity."""

from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import dials
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from tim_jax import mismatch
from tim_jax.common.errors import InputError
from tim_jax.kernels import experts
from tim_jax.mismatch import EXACT
from tim_jax.model.execution import Batching, Execution
from tim_jax.numerics import EXACT_BF16, EXACT_F32, Order
from tim_jax.policy import scoring
from tim_jax.rl.programs import sampling_program

CONFIG = replace(
    tiny.UNTIED,
    model_type="qwen3_moe",
    num_layers=1,
    num_experts=7,
    num_experts_per_tok=3,
    moe_intermediate_size=8,
    norm_topk_prob=True,
)
EXECUTION = Execution(CONFIG, tiny.NUMERICS, tiny.SAMPLING)
ENTRIES = ("router", "expert_choice", "expert_order", "expert_capacity")


@cache
def weights(execution):
    return jax.jit(execution.prepare)(tiny.params(CONFIG))


def program(dial=EXACT, execution=EXECUTION, **batching):
    batching = Batching(**batching)
    return sampling_program(execution, samples=tiny.GROUP, mismatch=dial, batching=batching)


def drawn(dial=EXACT, execution=EXECUTION, **batching):
    found = program(dial, execution, **batching)
    return found(weights(execution), tiny.prompts(), jax.random.key(0))


def scored(rollout, execution):
    score = jax.jit(lambda w, r: scoring.score(w, r, execution=execution).log_probs)
    found = score(weights(execution), rollout)
    return np.asarray(jnp.where(rollout.mask, found, 0.0))


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_of_mixtures_need_one(name):
    dial = dials.standard(name)
    with pytest.raises(InputError, match=f"'{name}': needs a mixture of experts"):
        mismatch.check(dial, tiny.EXECUTION)
    mismatch.check(dial, EXECUTION)


SAME = [
    {"name": "router", "dtype": "float32"},
    {"name": "expert_choice", "dtype": "float32"},
    {"name": "expert_order", "order": "choice"},
    {"name": "expert_order", "order": "choice", "accumulate": "compute"},
    {"name": "expert_capacity", "factor": 7 / 3},
]


@pytest.mark.slow
def test_the_learners_own_is_the_same_program():
    def text(dial):
        sampled = cast(jax.stages.Wrapped, program(dial))
        return sampled.lower(weights(EXECUTION), tiny.prompts(), jax.random.key(0)).as_text()

    exact = text(EXACT)
    for table in SAME:
        assert text(dials.dial(table)) == exact, table
    for name in ENTRIES:
        assert text(dials.standard(name)) != exact, name


SHARED = {
    "float32": (
        EXECUTION,
        [
            {"name": "expert_choice", "dtype": "bfloat16"},
            {"name": "expert_order", "order": "index"},
        ],
    ),
    "bfloat16": (
        replace(EXECUTION, numerics=tiny.BF16),
        [
            {"name": "expert_choice", "dtype": "float32"},
            {"name": "expert_order", "order": "index", "accumulate": "compute"},
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SHARED)
def test_on_both_sides_choice_and_order_are_exact(dtype):
    """A learner without them sees a mismatch; one with them has the sampler's bits: a control."""
    execution, tables = SHARED[dtype]
    dial = dials.dial(*tables)
    rollout = drawn(dial, execution)
    recorded = np.asarray(rollout.log_probs)
    assert int(rollout.mask.sum()) > 50
    assert (scored(rollout, execution) != recorded).any()
    same = replace(execution, numerics=dial.numerics(execution.numerics))
    np.testing.assert_array_equal(scored(rollout, same).view(np.int32), recorded.view(np.int32))
    assert dial.shared == dial


# --- the choice -------------------------------------------------------------------------------


def choice(logits, chooser=None, *, numerics=EXACT_F32, sigmoid=None):
    """Three experts for every row, by one program."""
    options = {"count": 3, "normalised": True, "numerics": numerics, "sigmoid": sigmoid}
    choose = jax.jit(lambda logits, chooser: experts.choice(logits, chooser=chooser, **options))
    return jax.device_get(choose(logits, chooser))


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_chooser_chooses_and_does_not_weigh(sigmoid):
    rng = np.random.default_rng(0)
    logits, chooser = rng.standard_normal((2, 40, 8), np.float32)
    rule = experts.Sigmoid(jnp.zeros(8)) if sigmoid else None
    found = choice(logits, chooser, sigmoid=rule)
    expected = np.argsort(-chooser, axis=1, kind="stable")[:, :3]
    np.testing.assert_array_equal(found.experts, expected)
    np.testing.assert_array_equal(found.own, expected)
    scores = np.exp(logits.astype(np.float64))
    scores = scores / (1 + scores) if sigmoid else scores
    chosen = np.take_along_axis(scores, expected, axis=1)
    np.testing.assert_allclose(found.weights, chosen / chosen.sum(1, keepdims=True), rtol=1e-6)


# --- the sum ----------------------------------------------------------------------------------


def test_by_index_experts_and_weights_go_together():
    logits = np.random.default_rng(0).standard_normal((40, 7), np.float32)
    by_index = replace(EXACT_F32, order=Order(experts="index"))
    plain, found = (choice(logits, numerics=numerics) for numerics in (EXACT_F32, by_index))
    order = np.argsort(plain.experts, axis=1)
    np.testing.assert_array_equal(found.own, plain.own)
    for one, other in zip(found[:2], plain[:2], strict=True):
        np.testing.assert_array_equal(one, np.take_along_axis(other, order, axis=1))


def test_a_sum_in_compute_is_rounded_after_every_step():
    rng = np.random.default_rng(0)
    residual, shared, outputs = (
        rng.standard_normal(shape, np.float32) for shape in ((9, 20), (9, 20), (9, 3, 20))
    )
    shares, low = rng.random((9, 3), np.float32), ml_dtypes.bfloat16
    numerics = replace(EXACT_BF16, order=Order(experts_sum="compute"))
    combined = jax.jit(partial(experts.combined, numerics=numerics))
    found = combined(residual.astype(low), outputs, shares, shared=shared)
    terms = cast(Any, (outputs * shares[..., None]).astype(low))  # of a dtype that is not NumPy's
    total = terms[:, 0]
    for term in (terms[:, 1], terms[:, 2], shared.astype(low)):
        total = total + term
    np.testing.assert_array_equal(np.asarray(found), residual.astype(low) + total)


# --- the capacity -----------------------------------------------------------------------------


@given(most=st.integers(1, 12), seed=st.integers(0, 2**16))
def test_first_choices_come_before_second_ones_and_rows_in_their_order(most, seed):
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.permutation(5)[:3] for _ in range(20)]).astype(np.int32)
    taken, expected = np.zeros(5, int), np.zeros(chosen.shape, bool)
    for rank in range(3):
        for row in range(20):
            expected[row, rank] = taken[chosen[row, rank]] < most
            taken[chosen[row, rank]] += 1
    found = jax.jit(experts.within_capacity, static_argnames="count")(chosen, count=5, most=most)
    np.testing.assert_array_equal(found, expected)


def test_beyond_the_capacity_a_weight_is_0_and_the_others_stay():
    logits = np.random.default_rng(0).standard_normal((40, 7), np.float32)
    scarce = replace(EXACT_F32, expert_capacity=0.9)
    plain, found = (choice(logits, numerics=numerics) for numerics in (EXACT_F32, scarce))
    kept = found.weights > 0
    np.testing.assert_array_equal(found.experts, plain.experts)
    np.testing.assert_array_equal(found.weights, np.where(kept, plain.weights, 0))
    loads = np.bincount(found.experts[kept], minlength=7)
    assert loads.max() == -(-0.9 * 40 * 3 // 7)
    assert (~kept).sum() > 10


@pytest.mark.slow
def test_a_capacity_makes_a_token_depend_on_its_batch():
    dial = dials.standard("expert_capacity")
    whole, slots = drawn(dial), drawn(dial, slots=5)
    assert tiny.bits(whole.log_probs) != tiny.bits(slots.log_probs)
    unequal = scored(whole, EXECUTION) != np.asarray(whole.log_probs)
    assert unequal[np.asarray(whole.mask)].mean() > 0.5
