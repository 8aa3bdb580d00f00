"""Rejections before advantages: what they do to the expected gradient, by enumeration.

A batch of all pairs of sentences, each pair weighted by the chance that the sampler draws it, makes
the gradient of a step an expectation. It is compared with closed forms in float64, and their
difference with the bias that docs/corrections.md states.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tabular

from tim_jax import corrections
from tim_jax.app.config import toml
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.objectives import Objective
from tim_jax.rl.learner import experience, gradient_rows
from tim_jax.rl.types import Carried, Learning

SAMPLER = tabular.table(0)
TRAINER = (SAMPLER + 0.5 * tabular.table(1)).astype(np.float32)
NUMBER = len(tabular.sentences())
WORTH = np.random.default_rng(5).standard_normal(NUMBER)
PAIRS = np.array(list(itertools.product(range(NUMBER), repeat=2)))
REJECTING = [{"name": "geometric_rejection", "lower": 0.9, "upper": 1.1}]


def of_sentences(logits):
    """f64[S, R] log-probs and bool[S, R], without the filler of `tabular`."""
    return tabular.log_probs_of(logits)[:NUMBER], tabular.mask()[:NUMBER]


def all_pairs() -> Rollout:
    """Every pair of sentences, one after the other."""
    alone, rows = tabular.rollout(SAMPLER), PAIRS.reshape(-1)
    return jax.tree.map(lambda x: x[rows], alone)


def learning_of(early: bool) -> Learning:
    objective = Objective(
        "dr_grpo",
        loss="reinforce",
        aggregation="sequence_mean_token_sum",
        reject_before_advantages=early,
    )
    return Learning(objective, 2, mode="recompute", correction=corrections.build(REJECTING))


def our_gradient(early: bool):
    """The expected gradient of a step's first update."""
    learning, params = learning_of(early), {"table": jnp.asarray(TRAINER)}
    policy, rollout = tabular.policy(learning), all_pairs()
    log_probs, mask = of_sentences(SAMPLER)
    drawn = np.exp(np.where(mask, log_probs, 0.0).sum(axis=1))
    weight = drawn[PAIRS[:, 0]] * drawn[PAIRS[:, 1]] * len(PAIRS)
    rewards = jnp.asarray((WORTH[PAIRS] * weight[:, None]).reshape(-1), jnp.float32)
    state = Carried(learning.correction.init(params))

    @jax.jit
    def step(params, rollout, rewards):
        batch = experience(
            params, None, state, rollout, rewards, score=policy.score, learning=learning
        ).experience
        weights = learning.objective.token_weights(batch.mask, batch.kept)
        gradient, _ = gradient_rows(tabular.score, params, batch, weights, learning=learning)
        return gradient["table"], batch.kept[::2].any(axis=1)

    return jax.tree.map(np.asarray, step(params, rollout, rewards))


def expectation(values):
    """The derivative of `E[values log pi]` at the trainer's weights, by the sampler's chances."""
    log_probs, mask = of_sentences(SAMPLER)
    drawn = np.exp(np.where(mask, log_probs, 0.0).sum(axis=1))

    def total(logits):
        sums = np.where(mask, of_sentences(logits)[0], 0.0).sum(axis=1)
        return (drawn * values * sums).sum()

    return tabular.derivative(total, TRAINER)


def test_the_baseline_of_kept_responses_is_another_bias():
    log_probs, mask = of_sentences(SAMPLER)
    drawn = np.exp(np.where(mask, log_probs, 0.0).sum(axis=1))
    d = np.where(mask, of_sentences(TRAINER)[0] - log_probs, 0.0).sum(axis=1) / mask.sum(axis=1)
    kept = (np.exp(d) >= 0.9) & (np.exp(d) <= 1.1)
    share, mean = (drawn * kept).sum(), (drawn * WORTH).sum()
    mean_kept = (drawn * kept * WORTH).sum() / share
    assert 0.2 < share < 0.8
    assert abs(mean_kept - mean) > 0.05
    push, pull = expectation(kept * WORTH), expectation(kept * 1.0)
    late = -0.5 * (push - mean * pull)
    early = -0.5 * share * (push - mean_kept * pull)
    for when, expected in ((False, late), (True, early)):
        found, survived = our_gradient(when)
        assert np.array_equal(survived.reshape(NUMBER, NUMBER)[:, 0], kept)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    # What rejecting first leaves out: a pull towards, or away from, all that is kept.
    bias = 0.5 * (mean_kept - mean) * pull
    np.testing.assert_allclose(early / share - late, bias, atol=1e-9)
    assert np.abs(bias).max() > 1e-3 * np.abs(late).max()


def test_rejecting_first_is_without_effect_where_nothing_is_rejected():
    rewards = jnp.asarray(WORTH[PAIRS].reshape(-1), jnp.float32)
    same = tabular.score({"table": jnp.asarray(SAMPLER)}, all_pairs()).log_probs
    rollout = Rollout(**{**vars(all_pairs()), "log_probs": same})
    found = []
    for early in (False, True):
        learning, params = learning_of(early), {"table": jnp.asarray(SAMPLER)}
        score = tabular.policy(learning).score
        state = Carried(learning.correction.init(params))
        ready = experience(params, None, state, rollout, rewards, score=score, learning=learning)
        found.append(np.asarray(ready.experience.advantages))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "bypass"}, "reject_before_advantages.*in bypass mode rejections read the policy"),
        ({"corrections": [{"name": "token_tis"}]}, "needs a correction that rejects"),
        (
            {"corrections": [{"name": "off_policy_sequence_mask"}]},
            "needs a correction that rejects",
        ),
    ],
)
def test_rejecting_first_is_refused_where_it_has_no_meaning(changes, message):
    section = {"mode": "recompute", "corrections": REJECTING, **changes}
    section["objective"] = {"reject_before_advantages": True}
    with pytest.raises(InputError, match=message) as refused:
        toml.build({"learner": section})
    assert "learner.objective.reject_before_advantages" in str(refused.value)


def test_a_rejection_that_reads_advantages_cannot_come_before_them():
    correction = corrections.where_advantage("negative", corrections.k3_rejection())
    objective = Objective(reject_before_advantages=True)
    with pytest.raises(InputError, match="reads the advantages, which come after it"):
        Learning(objective, 4, mode="recompute", correction=correction)
