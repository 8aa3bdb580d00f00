"""Rollout -> updated state: value-and-grad around the one forward.

A step's rollouts first become an `Experience` (advantages, old log-probs, coefficients, all from
statistics of the whole batch), then one or more updates of mini-batches of its rows. Micro-batches
only bound memory: their gradients are summed in float32 under one normaliser.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct

from tim_jax import objectives, scoring
from tim_jax.errors import InputError
from tim_jax.model import transformer
from tim_jax.model.config import ModelConfig
from tim_jax.numerics import Numerics
from tim_jax.objectives import Objective
from tim_jax.placement import SINGLE, Placement
from tim_jax.policy import Sampling
from tim_jax.sums import count, tree_sum
from tim_jax.types import Rollout

Mode = Literal["bypass", "recompute"]
Score = Callable[..., jax.Array]  # weights, rollout -> log-probs f32[B, R]
Gradient = Callable[..., Any]  # weights, experience, token weights -> as `gradient_rows`


@struct.dataclass
class TrainState:
    """Everything that an update changes."""

    params: transformer.Params  # float32 master weights
    optimizer: optax.OptState
    correction: optax.OptState
    step: jax.Array  # i32[], RL steps done
    skipped: jax.Array  # i32[], updates in a row, up to now, that were not finite


@struct.dataclass
class Experience:
    """A batch of rollouts, ready to learn from. All rows; an update takes some of them."""

    rollout: Rollout
    advantages: jax.Array  # f32[B]
    mask: jax.Array  # bool[B, R], tokens that are learnt from
    old_log_probs: jax.Array  # f32[B, R], denominators of the importance ratio
    coefficients: jax.Array  # f32[B, R], from the corrections
    reference_log_probs: jax.Array | None = None  # f32[B, R], if there is a KL term


@struct.dataclass
class Exactness:
    """Raw bits of two sets of log-probs compared over all response tokens."""

    compared: jax.Array  # i32[]
    unequal: jax.Array  # i32[]
    max_difference: jax.Array  # f32[]
    mean_difference: jax.Array  # f32[]
    first: jax.Array  # i32[2], row and response position of the first unequal token
    values: jax.Array  # f32[2], its log-prob by the learner and by the rollout


class Update(NamedTuple):
    """What one update reports."""

    exactness: Exactness  # of its rows' log-probs in the gradient program against the rollout's
    metrics: dict[str, jax.Array]


@dataclass(frozen=True)
class Learning:
    """How rollouts become gradients."""

    objective: Objective
    group_size: int
    mode: Mode = "bypass"
    micro_batch: int | None = None  # sequences per forward and backward; None: all of them
    remat: bool = False
    max_skipped: int = 5  # updates in a row that may not be finite

    def __post_init__(self):
        objectives.check_group_size(self.objective.estimator, self.group_size)
        if self.micro_batch is not None and self.micro_batch < 1:
            raise InputError(f"Learning: micro_batch must be positive, got {self.micro_batch}")


@dataclass(frozen=True)
class Policy:
    """What turns weights into log-probs: the same value for sampler and learner, if exact."""

    config: ModelConfig
    numerics: Numerics
    sampling: Sampling
    placement: Placement = SINGLE

    def score(self, weights, rollout: Rollout, *, remat: bool = False):
        """Log-probs and entropies, float32 [B, R]; see `scoring.score`."""
        return scoring.score(
            weights,
            rollout,
            config=self.config,
            numerics=self.numerics,
            sampling=self.sampling,
            placement=self.placement,
            remat=remat,
        )

    def prepare(self, params: transformer.Params) -> transformer.Weights:
        """Compute weights of the master weights; see `transformer.prepare`."""
        return transformer.prepare(params, config=self.config, numerics=self.numerics)


def exactness(log_probs: jax.Array, rollout: Rollout) -> Exactness:
    """Compares the learner's log-probs [B, R] with those that the rollout recorded.

    A value that is not finite counts as unequal: two NaNs are no agreement.
    """
    mask, recorded = rollout.mask, rollout.log_probs
    bits = partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    unequal = mask & ((bits(log_probs) != bits(recorded)) | ~jnp.isfinite(log_probs))
    difference = jnp.where(mask, jnp.abs(log_probs - recorded), 0.0)
    compared = jnp.sum(mask, dtype=jnp.int32)
    at = jnp.argmax(unequal)
    row, column = at // mask.shape[1], at % mask.shape[1]
    return Exactness(
        compared=compared,
        unequal=jnp.sum(unequal, dtype=jnp.int32),
        max_difference=jnp.max(difference),
        mean_difference=tree_sum(tree_sum(difference)) / count(mask),
        first=jnp.stack([row, column]).astype(jnp.int32),
        values=jnp.stack([log_probs[row, column], recorded[row, column]]),
    )


def score_rows(
    policy: Policy, weights: transformer.Weights, rollout: Rollout, *, micro_batch: int | None
) -> jax.Array:
    """Log-probs float32 [B, R] by a forward without gradient, `micro_batch` rows at a time."""
    rows = rollout.lengths.shape[0]
    if micro_batch is None or micro_batch == rows:
        return policy.score(weights, rollout)[0]
    parts = jax.lax.map(lambda part: policy.score(weights, part)[0], _split(rollout, micro_batch))
    return parts.reshape(rows, -1)


def experience(
    weights: transformer.Weights,
    reference: transformer.Weights | None,
    correction_state: optax.OptState,
    rollout: Rollout,
    rewards: jax.Array,
    *,
    policy: Policy,
    learning: Learning,
    correction: optax.GradientTransformationExtraArgs | None,
    score: Score | None = None,
) -> tuple[Experience, optax.OptState, Exactness | None]:
    """Prepares a step's rollouts, with every statistic taken over the whole batch.

    In recompute mode, and for corrections, a forward of the learner gives the trainer's log-probs
    at the weights that sampled. Corrections see log pi_trainer - log pi_rollout at those weights.

    `score` is that forward, `score_rows` if it is None; across devices it is a program of its own
    kind (`sharded.scoring`).

    Returns:
      The experience, the corrections' new state, and the forward's exactness if there was one.
    """
    objective = learning.objective
    if score is None:
        score = partial(score_rows, policy, micro_batch=learning.micro_batch)
    mask = rollout.mask
    if objective.drop_uninformative:
        informative = objectives.informative_groups(rewards, learning.group_size)
        mask = mask & informative[:, None]
    advantages = objective.advantages(rewards, group_size=learning.group_size)
    old, checked = rollout.log_probs, None
    coefficients = mask.astype(jnp.float32)
    if learning.mode == "recompute" or correction is not None:
        trainer = score(weights, rollout)
        checked = exactness(trainer, rollout)
        old = trainer if learning.mode == "recompute" else old
        if correction is not None:
            updates, correction_state = correction.update(
                coefficients,
                correction_state,
                log_ratio=trainer - rollout.log_probs,
                mask=mask,
                log_probs=trainer,
                advantages=advantages,
            )
            coefficients = jnp.asarray(updates)
    ready = Experience(
        rollout=rollout,
        advantages=advantages,
        mask=mask,
        old_log_probs=old,
        coefficients=coefficients,
        reference_log_probs=None if reference is None else score(reference, rollout),
    )
    return ready, correction_state, checked


def update(
    state: TrainState,
    weights: transformer.Weights,
    batch: Experience,
    response_length: jax.Array,
    *,
    policy: Policy,
    learning: Learning,
    optimizer: optax.GradientTransformationExtraArgs,
    gradient: Gradient | None = None,
    norm: Callable[..., jax.Array] = optax.tree.norm,
) -> tuple[TrainState, transformer.Weights, Update]:
    """One optimiser step on the rows of `batch`.

    If the loss or the gradient's norm is not finite, parameters and optimizer stay as they are, and
    `skipped` of state and metrics counts it.

    Args:
      state: its `params` are the masters of `weights`.
      weights: `policy.prepare(state.params)`; handed on, so that the cast happens once per update.
      batch: a mini-batch of experience.
      response_length: f32[], mean response length of the step, for length-triggered decay.
      gradient: what differentiates, `gradient_rows` if None; across devices `sharded.gradient`.
      norm: of the gradient; across devices `sharded.gradient_norm`.
    """
    if gradient is None:
        gradient = partial(gradient_rows, policy, learning=learning)
    token_weights = learning.objective.token_weights(batch.mask)
    found, tokens = gradient(weights, batch, token_weights)
    found = _to_masters(found, state.params, policy)
    # optax computes with mixed dtypes (int steps, float decays) on purpose.
    size = norm(found)
    with jax.numpy_dtype_promotion("standard"):
        changes, optimizer_state = optimizer.update(
            found,
            state.optimizer,
            state.params,
            response_length=response_length,
            gradient_norm=size,
        )
        params = cast(transformer.Params, optax.apply_updates(state.params, changes))
    metrics = {
        "loss": tree_sum(tree_sum(token_weights * tokens["loss"])),
        "gradient_norm": size,
        **_token_metrics(tokens, batch.mask),
    }
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
    metrics["skipped"] = 1.0 - finite.astype(jnp.float32)
    report = Update(exactness(tokens["log_prob"], batch.rollout), metrics)
    changed = replace(state, params=params, optimizer=optimizer_state)
    state = jax.tree.map(partial(jnp.where, finite), changed, state)
    state = replace(state, skipped=jnp.where(finite, 0, state.skipped + 1))
    return state, policy.prepare(state.params), report


def gradient_rows(
    policy: Policy,
    weights: transformer.Weights,
    batch: Experience,
    token_weights: jax.Array,
    *,
    learning: Learning,
) -> tuple[transformer.Weights, dict[str, jax.Array]]:
    """Gradient of the loss's sum over rows with respect to the compute weights, in float32.

    Args:
      token_weights: f32[B, R], each token's share in the loss; they carry the one normaliser.

    Returns:
      The gradient, and what is known of every token, each [B, R].
    """
    rows = batch.advantages.shape[0]
    size = learning.micro_batch or rows
    call = jax.value_and_grad(partial(_loss, policy=policy, learning=learning), has_aux=True)

    def add(total, part):
        (_, tokens), gradient = call(weights, *part)
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, gradient), tokens

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    if size == rows:
        return add(zeros, (batch, token_weights))
    parts = _split((batch, token_weights), size)
    gradient, tokens = jax.lax.scan(add, zeros, parts)
    return gradient, jax.tree.map(lambda x: x.reshape(rows, -1), tokens)


def _loss(weights, batch: Experience, token_weights, *, policy: Policy, learning: Learning):
    log_probs, entropy = policy.score(weights, batch.rollout, remat=learning.remat)
    losses = learning.objective.token_losses(
        log_probs,
        batch.old_log_probs,
        batch.advantages,
        mask=batch.mask,
        coefficients=batch.coefficients,
        reference_log_probs=batch.reference_log_probs,
    )
    tokens = {
        "loss": losses.loss,
        "log_prob": log_probs,
        "entropy": entropy,
        "ratio": losses.ratio,
        "clipped_low": losses.clipped_low.astype(jnp.float32),
        "clipped_high": losses.clipped_high.astype(jnp.float32),
        "reference_kl": losses.kl,
    }
    return jnp.sum(token_weights * losses.loss), tokens


def _to_masters(gradient, params, policy: Policy):
    """Gradient with respect to the masters: `prepare` is linear, its transpose is taken in f32."""
    in_f32 = replace(policy, numerics=replace(policy.numerics, compute_dtype="float32"))
    _, transpose = jax.vjp(in_f32.prepare, params)
    return transpose(gradient)[0]


def _token_metrics(tokens: dict[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    """Means over the tokens that are learnt from; 0 if there are none."""

    def mean(x):
        return tree_sum(tree_sum(jnp.where(mask, x, 0.0))) / count(mask)

    names = ("entropy", "ratio", "clipped_low", "clipped_high", "reference_kl")
    metrics = {name: mean(tokens[name]) for name in names}
    metrics["ratio_max"] = jnp.max(jnp.where(mask, tokens["ratio"], 0.0))
    metrics["tokens"] = jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)
    return metrics


def _split(tree: Any, size: int) -> Any:
    """Rows [B, ...] of every leaf as [B / size, size, ...]."""
    rows = jax.tree.leaves(tree)[0].shape[0]
    if rows % size:
        raise InputError(f"micro_batch must divide the {rows} sequences of an update, got {size}")
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), tree)


def mini_batch(batch: Experience, index: jax.Array, *, count: int) -> Experience:
    """Rows of mini-batch `index` of `count`: contiguous, so that groups stay together."""
    rows = batch.advantages.shape[0]
    if rows % count:
        raise InputError(f"mini_batches must divide the {rows} sequences of a step, got {count}")
    size = rows // count
    take: Callable = partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=0)
    return jax.tree.map(lambda x: take(x, index * size), batch)
