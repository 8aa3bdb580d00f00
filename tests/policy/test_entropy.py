"""Entropies with a gradient, and energies: what objectives ask of a forward beside log-probs."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from tim_jax import objectives
from tim_jax.policy import scoring
from tim_jax.rl.learner import experience, gradient_rows
from tim_jax.rl.types import Carried, Learning, exactness

BF16 = replace(tiny.EXECUTION, numerics=tiny.BF16)


def weights_of(execution):
    return tiny.weights(execution)


def score_of(execution):
    return partial(scoring.score, execution=execution)


def entropy_gradient(execution, weights, rollout):
    """Of the mean entropy of the response tokens, as the head's own backward makes it."""

    def mean(weights):
        scores = score_of(execution)(weights, rollout, entropy_gradient=True)
        return jnp.mean(jnp.where(rollout.mask, scores.entropy, 0.0)), scores.log_probs

    return jax.jit(jax.grad(mean, has_aux=True))(weights)


@pytest.mark.parametrize(
    "execution",
    [
        pytest.param(tiny.EXECUTION, id="float32"),
        pytest.param(BF16, id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_bits_of_the_log_probs_do_not_know_of_an_entropy_bonus(execution):
    rollout, weights = tiny.rollout(execution), weights_of(execution)
    learning = Learning(objectives.rloo(entropy_coefficient=0.1), tiny.GROUP, micro_batch=4)
    forward = tiny.policy(execution, learning).score
    prepare = partial(experience, score=forward, learning=learning)
    given = weights, None, Carried(()), rollout, tiny.rewards()
    batch = jax.jit(prepare)(*given).experience
    shares = jax.jit(learning.objective.token_weights)(batch.mask)
    score = score_of(execution)
    run = jax.jit(partial(gradient_rows, score, learning=learning))
    gradient, tokens = run(weights, batch, shares)
    found = jax.jit(exactness)(tokens["log_prob"], rollout)
    assert (int(found.compared), int(found.unequal)) == (int(rollout.lengths.sum()), 0)
    without = replace(learning, objective=objectives.rloo())
    plain, _ = jax.jit(partial(gradient_rows, score, learning=without))(weights, batch, shares)
    assert tiny.bits(plain) != tiny.bits(gradient)


def test_the_entropys_gradient_is_the_slope_of_the_entropy():
    rollout, weights = tiny.rollout(), weights_of(tiny.EXECUTION)
    gradient, _ = entropy_gradient(tiny.EXECUTION, weights, rollout)
    gradient = jax.device_get(gradient)
    direction = jax.tree.map(lambda g: g / max(np.linalg.norm(g), np.float32(1e-9)), gradient)

    @jax.jit
    def mean(step):
        moved = jax.tree.map(lambda w, d: w + step * d, weights, direction)
        entropy = score_of(tiny.EXECUTION)(moved, rollout).entropy
        return jnp.mean(jnp.where(rollout.mask, entropy, 0.0))

    slope = (mean(3e-3) - mean(-3e-3)) / 6e-3
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    expected = sum(float(np.sum(g * d)) for g, d in pairs)
    assert expected > 0
    assert float(slope) == pytest.approx(expected, rel=0.02)


def test_no_gradient_flows_through_an_entropy_that_was_not_asked_for():
    rollout, weights = tiny.rollout(), weights_of(tiny.EXECUTION)

    def total(weights):
        return jnp.sum(score_of(tiny.EXECUTION)(weights, rollout).entropy)

    assert all(not np.any(leaf) for leaf in jax.tree.leaves(jax.jit(jax.grad(total))(weights)))


def test_energies_are_the_squared_norm_of_the_score():
    rollout, weights = tiny.rollout(), weights_of(tiny.EXECUTION)
    score = score_of(tiny.EXECUTION)
    scores = jax.jit(partial(score, energy=True))(weights, rollout)
    plain = jax.jit(score)(weights, rollout)
    assert tiny.bits(scores.log_probs) == tiny.bits(plain.log_probs)
    assert plain.energy is None
    chosen, mask = np.exp(np.float64(scores.log_probs)), np.asarray(rollout.mask)
    energy = np.asarray(scores.energy, np.float64)
    # 1 - 2 p + sum of squares, the sum lying between p^2 and p^2 + (1 - p)^2.
    assert (energy >= (1 - chosen) ** 2 - 1e-6)[mask].all()
    assert (energy <= 2 * (1 - chosen) ** 2 + 1e-6)[mask].all()
    assert np.ptp(energy[mask]) > 0.1
