import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tim_jax.common.errors import InputError
from tim_jax.rl.evaluation import (
    mean_and_pass,
    pass_at_k,
    pass_errors,
    standard_error,
)


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_by_brute_force(samples):
    for correct, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        solved = [i < correct for i in range(samples)]
        subsets = list(itertools.combinations(solved, k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(np.array(correct), samples, k) == pytest.approx(expected, abs=1e-14)


@given(st.integers(1, 2000), st.data())
def test_pass_at_k_against_exact_binomials(samples, data):
    correct = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    # Integers divided at the end: exact up to the last rounding, however large they are.
    ways = math.comb(samples, k)
    expected = (ways - math.comb(samples - correct, k)) / ways
    assert pass_at_k(np.array([correct]), samples, k)[0] == pytest.approx(expected, abs=1e-12)


def test_errors_of_pass_at_k_are_those_over_prompts():
    rewards = np.array([[1, 0], [1, 1], [0, 0], [1, 1]], np.float32)
    found = pass_errors(rewards, [1, 2])
    assert found["pass@1_error"] == pytest.approx(standard_error(rewards))
    assert found["pass@2_error"] == pytest.approx(np.std([1, 1, 0, 1], ddof=1) / 2)
    assert pass_errors(rewards[:1], [1]) == {"pass@1_error": 0.0}


def test_evaluate():
    rewards = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], np.float32)
    found = mean_and_pass(rewards)
    assert list(found) == ["mean@4", "pass@1", "pass@2", "pass@4", "prompts"]
    assert found["mean@4"] == found["pass@1"] == 7 / 16
    assert found["pass@2"] == pytest.approx((1 / 2 + 5 / 6 + 0 + 1) / 4)
    assert found["pass@4"] == 3 / 4
    assert found["prompts"] == 4


def test_partial_rewards_do_not_count_as_solved():
    rewards = np.array([[0.5, 0.5]])
    assert mean_and_pass(rewards)["pass@1"] == 0.0
    assert mean_and_pass(rewards, solved=0.5)["pass@2"] == 1.0
    assert mean_and_pass(rewards)["mean@2"] == 0.5


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 8])
def test_default_ks(samples):
    ks = [key for key in mean_and_pass(np.zeros((1, samples))) if key.startswith("pass@")]
    expected = {1: [1], 2: [1, 2], 3: [1, 2, 3], 5: [1, 2, 4, 5], 8: [1, 2, 4, 8]}[samples]
    assert ks == [f"pass@{k}" for k in expected]


def test_the_interval_of_a_score_is_right_in_95_of_100_draws():
    rng = np.random.default_rng(0)
    chances = rng.uniform(size=(2000, 64, 1))  # a chance for each prompt; their mean is 1/2
    rewards = (rng.uniform(size=(2000, 64, 4)) < chances).astype(float)
    inside = [abs(x.mean() - 0.5) < 1.96 * standard_error(x) for x in rewards]
    assert 0.93 < np.mean(inside) < 0.97
    assert standard_error(np.array([[1.0, 0.0]])) == 0.0


def test_refusals():
    with pytest.raises(InputError, match=r"k must be in 1..4 .*, got 5"):
        mean_and_pass(np.zeros((2, 4)), ks=[5])
    with pytest.raises(InputError, match="k must be"):
        pass_at_k(np.array([1]), 4, 0)
    with pytest.raises(InputError, match=r"counts must be in 0..4, got 1..5"):
        pass_at_k(np.array([1, 5]), 4, 2)
    with pytest.raises(InputError, match="prompt 1, sample 0 has nan"):
        mean_and_pass(np.array([[1.0], [np.nan]]))
    with pytest.raises(InputError, match=r"not empty, got shape \(0, 4\)"):
        mean_and_pass(np.zeros((0, 4)))
    with pytest.raises(InputError, match=r"got shape \(4,\)"):
        mean_and_pass(np.zeros(4))
