"""The sampler and the learner on the Pallas kernels, in interpret mode: equal to the bit."""

from dataclasses import replace

import pytest
import quick
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


@pytest.mark.parametrize("dtype", quick.some(["float32", "bfloat16", "float16"], 0))
def test_sampler_and_learner_agree_to_the_bit(dtype):
    numerics = with_dtype(GPU, dtype)
    options = {"numerics": (numerics,), "cases": (LEARNER,), "sizes": SIZES, "control": False}
    (result,) = auditing.audit(auditing.random_params(CONFIG, 0), CONFIG, **options)
    assert result.passed
    assert result.compared_tokens == 3 * 2 * 9


@pytest.mark.slow
def test_beyond_a_window_sampler_and_learner_agree_to_the_bit():
    config = replace(CONFIG, num_layers=2, sliding_window=7, window_layers=(True, False))
    endless = replace(plain_sampling(CONFIG, LONGER), stop_tokens=())
    pages = auditing.Again(samples=2, batching=Batching(slots=4, pages=14))
    cases = (
        auditing.Case("learner", endless, auditing.Score()),
        auditing.Case("slots and pages", endless, pages),
    )
    options = {"numerics": (with_dtype(GPU, "bfloat16"),), "cases": cases, "sizes": LONGER}
    params = auditing.random_params(config, 0)
    results = list(auditing.audit(params, config, control=False, **options))
    assert all(result.passed for result in results)
    assert [result.compared_tokens for result in results] == [3 * 2 * 30] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"), [(LEARNER, "bfloat16"), (ALONE, "float32")], ids=["learner", "alone"]
)
def test_sampler_and_learner_agree_to_the_bit_on_tpu_tiles(case, dtype):
    config = replace(CONFIG, vocab_size=128, hidden_size=128, num_heads=8, intermediate_size=128)
    config = replace(config, num_kv_heads=4)
    options = {"cases": (case,), "sizes": SIZES, "control": False}
    params = auditing.random_params(config, 0)
    (result,) = auditing.audit(params, config, numerics=(with_dtype(TPU, dtype),), **options)
    assert result.passed
    assert result.compared_tokens == (3 * 2 * 9 if case is LEARNER else 3 * 9)


BIASED = replace(
    CONFIG,
    model_type="llama",
    qk_norm=False,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
)
TENSOR = (Placement(tensor=2), Placement(fsdp=2, tensor=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "config", "dtype"),
    [(GPU, CONFIG, "bfloat16"), (GPU, BIASED, "float32"), (TPU, CONFIG, "bfloat16")],
    ids=["gpu", "gpu, biases", "tpu"],
)
def test_on_a_tensor_axis_sampler_and_learner_agree_to_the_bit(family, config, dtype):
    """The vocabulary of 48 is in no tile whole: the head is filled up."""
    config = replace(config, intermediate_size=64)
    if family is TPU:
        config = replace(config, hidden_size=256, intermediate_size=256)
        config = replace(config, num_heads=16, num_kv_heads=8)
    numerics = replace(with_dtype(family, dtype), column_tiles=2)
    fitting.check(config, numerics)
    cases = auditing.placed_cases(config, SIZES, TENSOR)
    options = {"numerics": (numerics,), "cases": cases, "sizes": SIZES, "control": False}
    results = list(auditing.audit(auditing.random_params(config, 0), config, **options))
    assert len(results) == 4
    assert all(result.passed for result in results)
    assert all(result.compared_tokens > 0 for result in results)


@pytest.mark.slow
def test_an_audit_in_interpret_mode():
    """In float32, where the control must differ; a whole one is in the GPU check's small run."""
    cases = auditing.standard_cases(CONFIG, LONGER)[:4]
    options = {"numerics": (with_dtype(GPU, "float32"),), "sizes": LONGER, "cases": cases}
    results = list(auditing.audit(auditing.random_params(CONFIG, 1), CONFIG, **options))
    assert all(result.passed for result in results)
    controls = [result for result in results if result.control]
    assert controls
    assert all(result.compared_tokens > 0 for result in results)
    assert sum(result.unequal_tokens for result in controls) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [(GPU, "bfloat16"), (TPU, "float32")])
def test_episodes_of_several_turns_agree_to_the_bit(family, dtype):
    """Always in pages, which these families read as they lie; replies longer than one of 16."""
    config = replace(CONFIG, vocab_size=128, hidden_size=128, num_heads=8, intermediate_size=128)
    config = replace(config, num_kv_heads=4)
    sizes = auditing.Sizes(2, 3, 9, 70)
    plain = replace(plain_sampling(config, sizes), stop_tokens=(3, 51, 99))
    turns = auditing.Episodes(5, 9, 30, Batching(slots=4))
    options = {"numerics": (with_dtype(family, dtype),), "sizes": sizes, "control": False}
    options["cases"] = (auditing.Case("episodes", plain, turns),)
    (result,) = auditing.audit(auditing.random_params(config, 0), config, **options)
    assert result.passed
    assert result.compared_tokens > 60
