"""The expected gradient of a step is the definition's for every estimator, over all groups of two.

A step of the learner runs on each pair of sentences of the tabular policy, and its gradients are
added up, each by the chance that the sampler draws the pair. The definitions are of `tabular` and
of the tests of the estimators, in float64. Also, which of these expectations are the gradient of
the expected reward.
"""

import itertools
import pathlib
import re
from dataclasses import replace
from functools import cache
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tabular
from estimators import reference
from tabular import CORRECTIONS, LOSSES, REFERENCE, SAMPLER, TRAINER, Batch, keeping

from tim_jax import corrections
from tim_jax.objectives import Objective
from tim_jax.objectives.advantages import Estimator
from tim_jax.objectives.objective import Aggregation
from tim_jax.rl import learner
from tim_jax.rl.learner import experience
from tim_jax.rl.types import Learning, TrainState

ESTIMATORS, AGGREGATIONS = get_args(Estimator), get_args(Aggregation)
NUMBER = len(tabular.sentences())
PAIRS = np.asarray(list(itertools.product(range(NUMBER), repeat=2)))
# In quarters, so that no difference is rounded, and some of them equal.
REWARDS = np.random.default_rng(5).integers(-4, 5, tabular.ROWS).astype(np.float32) / 4
GREEDY, KL = np.float32(0.25), 0.25


def learning_of(estimator, mode, loss, correction, **options) -> Learning:
    objective = Objective(estimator, loss, max_length=tabular.LONGEST, **options)
    return Learning(objective, 2, mode=mode, correction=corrections.build(correction))


def gradient(learning: Learning) -> np.ndarray:
    """f64 of the table's shape: the learner's, in expectation over pairs."""
    params, policy = {"table": jnp.asarray(TRAINER)}, tabular.policy(learning)
    optimizer, rollout = keeping(0.0), tabular.rollout(SAMPLER)
    known = {"table": jnp.asarray(REFERENCE)} if learning.objective.has_reference else None
    greedy = jnp.full(1, GREEDY) if learning.objective.needs_greedy else None

    def of_pair(rows):
        first = TrainState(
            params,
            optimizer.init(params),
            learning.correction.init(params),
            jnp.int32(0),
            jnp.int32(0),
        )
        ready = experience(
            params,
            known,
            first.carried,
            jax.tree.map(lambda x: x[rows], rollout),
            jnp.asarray(REWARDS)[rows],
            greedy,
            score=policy.score,
            learning=learning,
        )
        after, _, _ = learner.update(
            first,
            params,
            ready.experience,
            jnp.float32(1.0),
            policy=policy,
            learning=learning,
            optimizer=optimizer,
        )
        return after.optimizer["table"]

    found = np.asarray(jax.vmap(of_pair)(jnp.asarray(PAIRS, jnp.int32)), np.float64)
    return np.tensordot(chances(), found, axes=1)


@cache
def chances() -> np.ndarray:
    """f64[pairs], of each pair under the sampler."""
    return tabular.chances(tabular.log_probs_of(SAMPLER))[PAIRS].prod(axis=1)


@cache
def estimated(estimator: str, by_token: bool) -> np.ndarray:
    """f64[pairs, 2, R], the advantages by the definition; with `by_token` less a KL at each one.

    Without what verl adds to counts: with equal rewards it is all that is left to be whitened.
    """
    mask, old = tabular.mask(), tabular.log_probs_of(TRAINER)
    data = {
        "mask": mask,
        "rewards": REWARDS,
        "energies": tabular.energies_of(TRAINER),
        "log_ratio": old - np.asarray(tabular.rollout(SAMPLER).log_probs, np.float64),
    }
    if by_token:
        data["token_rewards"] = np.where(mask, KL * (tabular.log_probs_of(REFERENCE) - old), 0.0)
    greedy = {"greedy_rewards": np.full(1, GREEDY)}
    return np.stack(
        [
            reference({name: x[pair] for name, x in data.items()} | greedy, 2, estimator, tiny=0.0)
            for pair in PAIRS
        ]
    )


def definition(learning: Learning, loss: str, name: str) -> np.ndarray:
    """The expected gradient in float64, of central differences."""
    objective, mode, rows = learning.objective, learning.mode, PAIRS.reshape(-1)
    of_rollout = np.asarray(tabular.rollout(SAMPLER).log_probs, np.float64)
    now = tabular.log_probs_of(TRAINER)
    old = now if mode == "recompute" else of_rollout
    mask = tabular.mask()[rows]
    advantages = estimated(objective.estimator, objective.reward_kl_coefficient > 0.0)
    batch = Batch(mask, now[rows], old[rows], of_rollout[rows], advantages.reshape(mask.shape))
    of_mismatch = old if mode == "recompute" else now
    coefficients, kept = CORRECTIONS[name][1](
        (of_mismatch - of_rollout)[rows], of_mismatch[rows], batch
    )
    weights = np.concatenate(
        [
            tabular.token_weights(
                batch.rows(pair), kept[pair], objective.aggregation, objective.denominator
            )
            for pair in np.arange(len(rows)).reshape(-1, 2)
        ]
    )
    weights = weights * np.repeat(chances(), 2)[:, None]
    left = replace(batch, mask=mask & kept)

    def surrogate(moved):
        tokens = coefficients * LOSSES[loss](tabular.log_probs_of(moved)[rows], left, None)
        return np.where(mask, weights * tokens, 0.0).sum()

    return tabular.derivative(surrogate, TRAINER)


# A mode, a loss, a correction, how losses are added up, and whether the reward is less a KL.
STEPS = (
    ("bypass", "reinforce", "token_tis", "sequence_mean_token_sum", False),
    ("bypass", "clip", "geometric_rejection", "token_mean", False),
    ("recompute", "gspo", "vexact", "sequence_mean_token_mean", False),
    ("recompute", "cispo", "sequence_tis", "constant_length", True),
    ("recompute", "reinforce", "token_k3", "token_mean", True),
)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=lambda step: " ".join(step[:3]))
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_expected_gradient_is_the_definitions(estimator, step):
    mode, loss, name, aggregation, by_token = step
    options = {"aggregation": aggregation, "clip_high": 0.3 if loss == "cispo" else None}
    if by_token:
        options["reward_kl_coefficient"] = KL
    learning = learning_of(estimator, mode, loss, CORRECTIONS[name][0], **options)
    expected = definition(learning, loss, name)
    scale = np.abs(expected).max()
    assert scale > 1e-3
    np.testing.assert_allclose(gradient(learning), expected, rtol=0.0, atol=1e-6 * scale)


# What the expected gradient is of the expected reward's, per `sequence_mean_token_sum`.
SHARES = {"reinforce": 1.0, "remax": 1.0, "rloo": 1.0, "reinforce_batch": 0.5, "dr_grpo": 0.5}
UNITS = {
    "sequence_mean_token_sum": 1.0,
    "constant_length": 1 / tabular.LONGEST,
    "token_sum": 2.0,  # the responses of a batch
}


WEIGHTS = [{"name": "scale_by_ratio", "level": "sequence"}]


def expected(rewards) -> np.ndarray:
    """The gradient, to be descended, of the expectation of rewards f64[B]."""

    def loss(logits):
        return -(tabular.chances(tabular.log_probs_of(logits)) * rewards).sum()

    return tabular.derivative(loss, TRAINER)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_which_estimators_give_the_gradient_of_the_expected_reward(estimator, aggregation):
    """With weights of whole sequences: exactly, to a known factor, or in another direction."""
    learning = learning_of(estimator, "recompute", "clip", WEIGHTS, aggregation=aggregation)
    found, wanted = gradient(learning), expected(REWARDS)
    share = SHARES.get(estimator, 0.0) * UNITS.get(aggregation, 0.0)
    if share:
        np.testing.assert_allclose(
            found, share * wanted, rtol=0.0, atol=1e-6 * np.abs(wanted).max()
        )
    else:
        cosine = (found * wanted).sum() / np.sqrt((found**2).sum() * (wanted**2).sum())
        assert cosine < 1 - 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("estimator", SHARES)
def test_a_divergence_in_the_reward_is_part_of_what_is_expected(estimator):
    """Of whole responses or of what follows each token: the expectation is the same."""
    options = {"aggregation": "sequence_mean_token_sum", "reward_kl_coefficient": KL}
    found = gradient(learning_of(estimator, "recompute", "clip", WEIGHTS, **options))
    gap = tabular.log_probs_of(TRAINER) - tabular.log_probs_of(REFERENCE)
    wanted = expected(REWARDS - KL * np.where(tabular.mask(), gap, 0.0).sum(axis=1))
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(found, SHARES[estimator] * wanted, rtol=0.0, atol=1e-6 * scale)


def test_the_docs_say_which_estimators_these_are():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "corrections.md").read_text()
    text = text.partition("### When the gradient is")[2].partition("\n## ")[0]
    rows = re.findall(r"^ *\| (.*) \| (1|\(G - 1\) / G|\(N - 1\) / N) \|", text, re.MULTILINE)
    said = {name: share for names, share in rows for name in re.findall("`(.*?)`", names)}
    assert {name: 1.0 if share == "1" else 0.5 for name, share in said.items()} == SHARES
