"""Sampling in rounds: the same rollout to the bit, in less memory."""

import dials
import jax
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from tim_jax.errors import InputError
from tim_jax.policy import rounds
from tim_jax.rl.programs import sampling_program


def program(micro_batch, **options):
    return sampling_program(tiny.EXECUTION, samples=tiny.GROUP, micro_batch=micro_batch, **options)


def drawn(run):
    weights = jax.jit(tiny.EXECUTION.prepare)(tiny.params())
    return run(weights, tiny.prompts(), jax.random.key(0))


# Of 3 prompts x 4 samples: by prompts, by samples, and by both.
@pytest.mark.parametrize("micro_batch", [4, 6, 2])
def test_rounds_change_no_bit(micro_batch):
    assert int(tiny.rollout().mask.sum()) > 50
    assert tiny.bits(drawn(program(micro_batch))) == tiny.bits(tiny.rollout())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log_prob_noise", "logit_noise"])
def test_noise_is_that_of_one_round(name):
    noisy = dials.standard(name)
    found = drawn(program(6, mismatch=noisy))
    assert tiny.bits(found) == tiny.bits(drawn(program(None, mismatch=noisy)))
    assert tiny.bits(found) != tiny.bits(tiny.rollout())


def test_a_round_takes_the_memory_of_its_own_rows():
    weights = jax.eval_shape(tiny.EXECUTION.prepare, tiny.params())
    arguments = weights, tiny.prompts(), jax.random.key(0)

    def temporaries(micro_batch):
        compiled = program(micro_batch).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2) < temporaries(None)


@pytest.mark.parametrize("micro_batch", [5, 24])
def test_a_round_that_does_not_divide_the_sequences_is_refused(micro_batch):
    with pytest.raises(InputError, match=f"micro_batch = {micro_batch} must divide the 12 seq"):
        drawn(program(micro_batch))


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_any_divisor_makes_equal_parts_that_come_back_in_order(prompts, samples, data):
    total = prompts * samples
    parts = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    blocks, shares = rounds.split(prompts, samples, parts)
    assert blocks * shares == parts
    assert prompts % blocks == 0
    assert samples % shares == 0
    size = samples // shares
    ids = np.arange(prompts)
    of_part = np.asarray(rounds.repeated(ids, blocks, shares)).reshape(parts, -1)
    first = np.tile(np.arange(shares) * size, blocks)
    rows = of_part[:, :, None] * samples + first[:, None, None] + np.arange(size)
    found = rounds.in_order(rows.reshape(-1), blocks, shares, size)
    np.testing.assert_array_equal(found, np.arange(total))
