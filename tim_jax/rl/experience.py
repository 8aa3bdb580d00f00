"""From rollouts to experience: advantages, old log-probs, and each token's correction.

All rows of a step are prepared at once, because the statistics are of the whole batch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from tim_jax import corrections
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.model.weights import Weights
from tim_jax.numerics.sums import tree_sum
from tim_jax.objectives import Objective, advantages, shaping
from tim_jax.policy.scoring import Scores
from tim_jax.rl import micro_batches
from tim_jax.rl.types import (
    Carried,
    Experience,
    Learning,
    Prepared,
    exactness,
)


def score_rows(
    score: Callable[..., Scores],
    weights: Any,
    rollout: Rollout,
    *,
    micro_batch: int | None,
    micro_batch_tokens: int | None = None,
    energy: bool = False,
    agree: Callable[[jax.Array], jax.Array] = lambda parts: parts,
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probs float32 [B, R] by a forward without gradient, a micro-batch at a time.

    `score` is `scoring.score` of an execution; with micro-batches of tokens, in such a buffer.
    With `energy` also the score's energies, see `distribution.score_energy`; else None. `agree` as
    in `micro_batches.scan`.
    """

    def one(_, part: Rollout):
        scores = score(weights, part, energy=energy)
        return (), (scores.log_probs, scores.energy)

    return micro_batches.scan(
        one,
        (),
        rollout,
        rollout,
        size=micro_batch,
        tokens=micro_batch_tokens,
        without=micro_batches.rollout_without,
        agree=agree,
    )[1]


def experience(
    weights: Weights,
    reference: Weights | None,
    carried: Carried,
    rollout: Rollout,
    rewards: jax.Array,
    greedy_rewards: jax.Array | None = None,
    turn_rewards: jax.Array | None = None,
    *,
    score: Callable[..., tuple[jax.Array, jax.Array | None]],
    learning: Learning,
) -> Prepared:
    """Prepares a step's rollouts, with every statistic taken over the whole batch.

    In recompute mode a forward of the learner gives pi_old, the trainer's log-probs at the weights
    that sampled; corrections that read the mismatch see log pi_old - log pi_rollout.

    Args:
      carried: from the step before.
      rewards: f32[B], or one for each episode that has several rows, B / parts.
      greedy_rewards: f32[B / group size], of each prompt's greedy response, for ReMax.
      turn_rewards: f32[B, R], of which `rewards` are the sums, if each turn is given those from it
        on.
      score: the forward, that of a `Policy`.
    """
    objective = learning.objective
    if objective.has_reference and reference is None:
        raise InputError("the objective has a KL to a reference policy, but reference is None")
    counted = _counted(rollout, rewards, learning)
    finished = rollout.by_row(rollout.finished_episodes)
    mask = counted & finished[:, None] if objective.drop_cut else counted
    trainer, energies, checked = None, None, None
    if learning.needs_forward:
        trainer, energies = score(weights, rollout, energy=objective.needs_energy)
        checked = exactness(trainer, rollout)
    old = trainer if learning.mode == "recompute" else rollout.log_probs
    old = cast(jax.Array, old)
    of_reference = None if reference is None else score(reference, rollout)[0]
    at_end = rewards if turn_rewards is None else jnp.zeros_like(rewards)
    rewards, of_tokens, reward_kl, report = _shaped(
        at_end, rollout, old, of_reference, carried.reward_kl, objective
    )
    of_step, of_update = corrections.split_state(
        learning.correction, learning.mode, carried.correction
    )
    if objective.reject_before_advantages:
        counted = _kept(counted, old, rollout, learning, of_step)
    arrays = {"mask": counted, "token_rewards": of_tokens, "energies": energies}
    arrays["turn_rewards"] = turn_rewards
    arrays["log_ratio"] = None if trainer is None else trainer - rollout.log_probs
    estimated = objective.advantages(
        rewards,
        samples=learning.samples,
        greedy_rewards=greedy_rewards,
        **jax.tree.map(rollout.by_episode, arrays),
    )
    estimated = rollout.by_row(estimated)
    applied = corrections.apply(
        learning.stages.step,
        mask.astype(jnp.float32),
        of_step,
        log_ratio=old - rollout.log_probs,
        mask=mask,
        log_probs=old,
        advantages=estimated,
    )
    report |= corrections.normaliser_metrics(applied)
    ready = Experience(
        rollout=rollout,
        advantages=estimated,
        mask=mask,
        old_log_probs=old,
        coefficients=applied.coefficients,
        kept=applied.kept,
        reference_log_probs=of_reference,
    )
    joined = corrections.join_state(learning.correction, learning.mode, applied.state, of_update)
    return Prepared(ready, Carried(joined, reward_kl), checked, trainer, report)


def _counted(rollout: Rollout, rewards: jax.Array, learning: Learning) -> jax.Array:
    """bool[B, R], the response tokens of groups that are not left out.

    Responses that were cut off count in their group's baseline even if they are not learnt from,
    because their reward is valid.
    """
    if not learning.objective.drop_uninformative:
        return rollout.mask
    informative = advantages.informative_groups(rewards, learning.samples)
    return rollout.mask & rollout.by_row(informative)[:, None]


def _kept(counted, old, rollout: Rollout, learning: Learning, state: tuple) -> jax.Array:
    """bool[B, R], the tokens of `counted` that the rejections of the step leave."""
    step = learning.stages.step
    pairs = zip(step.blocks, state, strict=True)
    applied = corrections.apply(
        corrections.rejections(step),
        counted.astype(jnp.float32),
        tuple(part for block, part in pairs if block.effect == "reject"),
        log_ratio=old - rollout.log_probs,
        mask=counted,
        log_probs=old,
    )
    return applied.kept


def _shaped(rewards, rollout: Rollout, old, reference, coefficient, objective: Objective):
    """Rewards f32[B / parts] less penalties of length, f32[B, R] of tokens less those of the KL.

    None where tokens are not rewarded. Also the KL's next coefficient, and metrics.
    """
    of_tokens, report = None, {}
    if objective.overlong_cache is not None:
        penalty = shaping.overlong_penalty(
            rollout.drawn_lengths,
            longest=cast(int, objective.max_length),
            cache=objective.overlong_cache,
        )
        rewards = rewards + penalty
        report["overlong_penalty"] = tree_sum(penalty) / penalty.shape[0]
    if objective.reward_kl_coefficient > 0.0:
        used = objective.reward_kl_coefficient if coefficient is None else coefficient
        penalty = partial(shaping.kl_penalty, old, reference, rollout.mask)
        of_tokens = -penalty(coefficient=used)
        sequences = rewards.shape[0]
        mean = tree_sum(tree_sum(penalty(coefficient=1.0))) / sequences
        report |= {"reward_kl": mean, "reward_kl_coefficient": jnp.asarray(used, jnp.float32)}
        if objective.controller is not None:
            coefficient = objective.controller.update(jnp.asarray(used), mean, sequences=sequences)
    return rewards, of_tokens, coefficient, report
