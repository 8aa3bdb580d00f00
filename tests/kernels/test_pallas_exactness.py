"""The sampler and the learner on the Pallas kernels, in interpret mode: equal to the bit.

Interpreted kernels are large programs: each test has a few, which differ in several things at once.
Together they have both families, every dtype, slots, pages, windows, biases and tensor axes.
"""

from dataclasses import replace

import pytest
from interpreted import CONFIG, GPU, TPU, with_dtype

from tim_jax.instruments import auditing
from tim_jax.instruments.auditing.cases import plain_sampling
from tim_jax.model import fitting
from tim_jax.model.execution import Batching
from tim_jax.placement import Placement

SIZES = auditing.Sizes(3, 2, 6, 9)  # one key block: a decode loop less to compile
LONGER = auditing.Sizes(3, 2, 9, 30)
# Without stop tokens, so that chance ends no sequence and the counts are known.
ENDLESS = replace(plain_sampling(CONFIG, SIZES), stop_tokens=())
LEARNER = auditing.Case("learner", ENDLESS, auditing.Score())
ALONE = auditing.Case("alone", ENDLESS, auditing.Again(one_by_one=True))
# Whole tiles for a TPU.
WIDE = replace(
    CONFIG, vocab_size=128, hidden_size=128, num_heads=8, num_kv_heads=4, intermediate_size=128
)


def test_sampler_and_learner_agree_to_the_bit():
    numerics = with_dtype(GPU, "float32")
    options = {"numerics": (numerics,), "cases": (LEARNER,), "sizes": SIZES, "control": False}
    (result,) = auditing.audit(auditing.random_params(CONFIG, 0), CONFIG, **options)
    assert result.passed
    assert result.compared_tokens == 3 * 2 * 9


@pytest.mark.slow
def test_an_audit_in_interpret_mode():
    """Beyond a window in one of two layers; in float32, where the control must differ."""
    config = replace(CONFIG, num_layers=2, sliding_window=7, window_layers=(True, False))
    endless = replace(plain_sampling(CONFIG, LONGER), stop_tokens=())
    one_by_one = auditing.Score(micro_batch=1, reverse=True)
    pages = auditing.Again(samples=2, batching=Batching(slots=4, pages=14))
    cases = (
        auditing.Case("learner, one row at a time, in reverse", endless, one_by_one),
        auditing.Case("slots and pages", endless, pages),
    )
    options = {"numerics": (with_dtype(GPU, "float32"),), "cases": cases, "sizes": LONGER}
    results = list(auditing.audit(auditing.random_params(config, 1), config, **options))
    assert all(result.passed for result in results)
    assert [result.compared_tokens for result in results] == [3 * 2 * 30] * 3
    assert [result.control for result in results] == [False, False, True]
    assert results[-1].unequal_tokens > 0


@pytest.mark.slow
def test_sampler_and_learner_agree_to_the_bit_on_tpu_tiles():
    options = {"cases": (LEARNER, ALONE), "sizes": SIZES, "control": False}
    params = auditing.random_params(WIDE, 0)
    results = list(auditing.audit(params, WIDE, numerics=(with_dtype(TPU, "bfloat16"),), **options))
    assert all(result.passed for result in results)
    assert [result.compared_tokens for result in results] == [3 * 2 * 9, 3 * 9]


BIASED = replace(
    CONFIG, model_type="llama", qk_norm=False, attention_bias=True, output_bias=True, mlp_bias=True
)
ON_TPU = replace(CONFIG, hidden_size=256, num_heads=16, num_kv_heads=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config", "dtype", "where"),
    [
        (GPU, BIASED, "bfloat16", Placement(fsdp=2, tensor=2)),
        (TPU, ON_TPU, "float32", Placement(tensor=2)),
    ],
    ids=["gpu, biases", "tpu"],
)
def test_on_a_tensor_axis_sampler_and_learner_agree_to_the_bit(family, config, dtype, where):
    """The vocabulary of 48 is in no tile whole: the head is filled up."""
    config = replace(config, intermediate_size=256 if family is TPU else 64)
    numerics = replace(with_dtype(family, dtype), column_tiles=2)
    fitting.check(config, numerics)
    cases = auditing.placed_cases(config, SIZES, (where,))
    options = {"numerics": (numerics,), "cases": cases, "sizes": SIZES, "control": False}
    results = list(auditing.audit(auditing.random_params(config, 0), config, **options))
    assert len(results) == 2
    assert all(result.passed for result in results)
    assert all(result.compared_tokens > 0 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config", "dtype"),
    [(GPU, CONFIG, "float16"), (TPU, WIDE, "float32")],
    ids=["gpu", "tpu"],
)
def test_episodes_of_several_turns_agree_to_the_bit(family, config, dtype):
    """Always in pages, which these families read as they lie; replies longer than one of 16."""
    sizes = auditing.Sizes(2, 3, 9, 70)
    plain = replace(plain_sampling(config, sizes), stop_tokens=(3, 31))
    turns = auditing.Episodes(5, 9, 30, Batching(slots=4))
    options = {"numerics": (with_dtype(family, dtype),), "sizes": sizes, "control": False}
    options["cases"] = (auditing.Case("episodes", plain, turns),)
    (result,) = auditing.audit(auditing.random_params(config, 0), config, **options)
    assert result.passed
    assert result.compared_tokens > 60
