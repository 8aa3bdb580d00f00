"""From rollouts to the next state: a step's experience, and updates by the forward's gradient.

`experience` prepares all rows of a step at once, because the statistics are of the whole batch:
advantages, old log-probs, and each token's correction. It serves one or more updates, each of a
mini-batch of its rows. Micro-batches only bound memory: their gradients are summed in float32 under
the normaliser of their mini-batch. Corrections that read the policy of each update are evaluated
there.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from tim_jax import corrections, metrics, objectives, optimizers, schedules
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.corrections import Correction
from tim_jax.model import adapters as low_rank
from tim_jax.model.adapters import Adapters
from tim_jax.model.parameters import with_buffers
from tim_jax.model.weights import Params, Weights
from tim_jax.numerics import strict
from tim_jax.numerics.strict import compensated_sum, count, tree_sum
from tim_jax.objectives import Objective, advantages
from tim_jax.policy.scoring import Scores
from tim_jax.rl.types import (
    Carried,
    Experience,
    Learning,
    Policy,
    Prepared,
    TrainState,
    Update,
    exactness,
    experience_without,
    rollout_without,
    scan,
    split_rows,
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
    in `types.scan`.
    """

    def one(_, part: Rollout):
        scores = score(weights, part, energy=energy)
        return (), (scores.log_probs, scores.energy)

    return scan(
        one,
        (),
        rollout,
        rollout,
        size=micro_batch,
        tokens=micro_batch_tokens,
        without=rollout_without,
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
    log_ratio = None if trainer is None else trainer - rollout.log_probs
    arrays = {"mask": counted, "token_rewards": of_tokens, "energies": energies}
    arrays |= {"turn_rewards": turn_rewards, "log_ratio": log_ratio}
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

    Responses that were cut off are among them, even if they are not learnt from: their reward is
    valid in their group's baseline.
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
    """Rewards f32[B / parts] less penalties of length; f32[B, R] of tokens, or None; the KL's next
    coefficient; metrics."""
    of_tokens, report = None, {}
    if objective.overlong_cache is not None:
        penalty = advantages.overlong_penalty(
            rollout.drawn_lengths,
            longest=cast(int, objective.max_length),
            cache=objective.overlong_cache,
        )
        rewards = rewards + penalty
        report["overlong_penalty"] = tree_sum(penalty) / penalty.shape[0]
    if objective.reward_kl_coefficient > 0.0:
        used = objective.reward_kl_coefficient if coefficient is None else coefficient
        penalty = partial(advantages.kl_penalty, old, reference, rollout.mask)
        of_tokens = -penalty(coefficient=used)
        sequences = rewards.shape[0]
        mean = tree_sum(tree_sum(penalty(coefficient=1.0))) / sequences
        report |= {"reward_kl": mean, "reward_kl_coefficient": jnp.asarray(used, jnp.float32)}
        if objective.controller is not None:
            coefficient = objective.controller.update(jnp.asarray(used), mean, sequences=sequences)
    return rewards, of_tokens, coefficient, report


def update(
    state: TrainState,
    weights: Weights,
    batch: Experience,
    response_length: jax.Array,
    *,
    policy: Policy,
    learning: Learning,
    optimizer: optax.GradientTransformationExtraArgs,
    base: Params | None = None,
) -> tuple[TrainState, Weights, Update]:
    """One optimiser step on the rows of `batch`, a mini-batch of experience.

    If the loss, the gradient's norm or the effective sample size is not finite, parameters and
    optimizer stay as they are, and `skipped` of state and metrics counts it. With an optimizer that
    scales the loss (`optimizers.LossScale`) the gradient is that of the scaled loss. If it alone is
    not finite and a smaller scale is left, the update overflowed: it is not made either, the scale
    is halved, and the metric `overflows` counts it in place of `skipped`.

    Args:
      state: its `params` are the masters of `weights`, or the adapters of them.
      weights: `policy.prepare` of the parameters; handed on, so that it happens once per update.
      response_length: f32[], mean response length of the step, for length-triggered decay.
      base: the parameters that are not trained, if `state.params` are adapters.
    """
    scale = optimizers.loss_scale(state.optimizer)
    policy = policy.scaled(scale)
    batch, correction, figures = _current(state, weights, batch, policy, learning)
    if learning.objective.balance_coefficient:
        batch = replace(batch, loads=_loads(batch, policy.experts))
    parts = batch.rollout.parts
    token_weights = learning.objective.token_weights(batch.mask, batch.kept, parts=parts)
    params = low_rank.whole(state.params, base)
    gradient, tokens, noise = _gradient(policy, weights, batch, token_weights, learning, params)
    gradient = policy.to_masters(gradient, state.params)
    size, share = policy.norm(gradient), _effective_sample_size(tokens["log_prob"], batch)
    report = {
        "loss": tree_sum(tree_sum(token_weights * tokens["loss"])),
        "gradient_norm": size,
        "effective_sample_size": share,
        **noise(size),
        **_token_metrics(tokens, batch, learning),
        **_routing_metrics(tokens, batch, policy.experts),
        **figures,
    }
    finite = jnp.isfinite(report["loss"]) & jnp.isfinite(size) & jnp.isfinite(share)
    report["skipped"] = 1.0 - finite.astype(jnp.float32)
    scaling = {}
    if scale is not None:
        # A smaller scale mends no loss that is not finite.
        mends = jnp.isfinite(report["loss"]) & jnp.isfinite(share) & optimizers.can_shrink(scale)
        scaling["overflow"] = ~finite & mends
        report["overflows"] = scaling["overflow"].astype(jnp.float32)
        report["skipped"] = report["skipped"] - report["overflows"]
    reported = Update(exactness(tokens["log_prob"], batch.rollout), report, tokens["log_prob"])
    params, optimizer_state = optimizers.guarded_step(
        optimizer,
        gradient,
        state.optimizer,
        state.params,
        finite=finite,
        response_length=response_length,
        gradient_norm=size,
        effective_sample_size=share,
        **scaling,
    )
    params = with_buffers(params, state.params)
    state = replace(
        state,
        params=params,
        optimizer=optimizer_state,
        correction=jax.tree.map(partial(jnp.where, finite), correction, state.correction),
        skipped=_skipped(state, finite, **scaling),
    )
    after = policy.prepare(low_rank.whole(state.params, base))
    return state, policy.renewed(weights, after), reported


def _skipped(state: TrainState, finite: jax.Array, overflow: jax.Array | None = None) -> jax.Array:
    """i32[], updates in a row that were not finite; an overflow neither counts nor ends them."""
    count = jnp.where(finite, 0, state.skipped + 1)
    return count if overflow is None else jnp.where(overflow, state.skipped, count)


def _current(
    state: TrainState, weights, batch: Experience, policy: Policy, learning: Learning
) -> tuple[Experience, Any, dict[str, jax.Array]]:
    """The batch with what depends on all its rows' log-probs; without a forward if nothing does.

    Also returns the corrections' new state, and metrics.
    """
    if not learning.needs_whole_update:
        return batch, state.correction, {}
    log_probs, _ = policy.score(weights, batch.rollout)
    of_step, of_update = corrections.split_state(
        learning.correction, learning.mode, state.correction
    )
    applied = _applied(learning.stages.update, of_update, log_probs, batch)
    joined = corrections.join_state(learning.correction, learning.mode, of_step, applied.state)
    batch = replace(batch, coefficients=applied.coefficients, kept=applied.kept & batch.kept)
    if learning.objective.selects:
        chosen = learning.objective.select(
            log_probs, batch.old_log_probs, batch.advantages, mask=batch.mask & batch.kept
        )
        batch = replace(batch, selected=chosen)
    return batch, joined, corrections.normaliser_metrics(applied)


def _applied(correction: Correction, state, log_probs, batch: Experience) -> corrections.Applied:
    """A correction on the policy's log-probs f32[B, R] at the weights of an update."""
    log_probs = jax.lax.stop_gradient(log_probs)
    return corrections.apply(
        correction,
        batch.coefficients,
        state,
        log_ratio=log_probs - batch.rollout.log_probs,
        mask=batch.mask,
        log_probs=log_probs,
        advantages=batch.advantages,
    )


def _effective_sample_size(log_probs: jax.Array, batch: Experience) -> jax.Array:
    """f32[], of the sequences' importance weights, for step sizes that depend on it."""
    log_ratio = log_probs - batch.rollout.log_probs
    sums, _ = compensated_sum(jnp.where(batch.mask, log_ratio, 0.0))
    return schedules.effective_sample_size(sums, jnp.any(batch.mask, axis=1))


def _gradient(
    policy: Policy, weights, batch: Experience, token_weights, learning: Learning, params
) -> tuple[Any, dict[str, jax.Array], Callable[[jax.Array], dict[str, jax.Array]]]:
    """The gradient, its tokens, and a function that makes metrics of the noise from its norm."""
    differentiate = policy.gradient
    if (adapters := low_rank.of(params)) is not None:
        differentiate = partial(policy.gradient, adapters=adapters)
    if not learning.noise_scale:
        return *differentiate(weights, batch, token_weights), lambda size: {}
    rows, size = batch.mask.shape[0], learning.micro_batch or batch.mask.shape[0]
    if size == rows:
        raise InputError(
            f"noise_scale needs two or more micro-batches, but micro_batch is {size}, all of the"
            f" {rows} sequences of an update"
        )

    def add(carry, part):
        total, square = carry
        gradient, tokens = differentiate(weights, *part)
        square = square + jnp.square(policy.norm(policy.to_masters(gradient, params)))
        return (jax.tree.map(jnp.add, total, gradient), square), tokens

    parts = split_rows((batch, token_weights), size)
    first = jax.tree.map(lambda x: x[0], parts)
    shapes, _ = jax.eval_shape(differentiate, weights, *first)
    zeros = jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), shapes)
    (total, square), tokens = jax.lax.scan(add, (zeros, jnp.float32(0.0)), parts)
    tokens = jax.tree.map(lambda x: x.reshape(rows, -1), tokens)
    number = rows // size

    def noise(whole: jax.Array) -> dict[str, jax.Array]:
        # A part's gradient is divided by the whole's normaliser; its mean is `number` times that.
        small = square * number
        return metrics.gradient_noise_scale(small, jnp.square(whole), small=size, big=rows)

    return total, tokens, noise


def gradient_rows(
    score: Callable[..., Scores],
    weights: Any,
    batch: Experience,
    token_weights: jax.Array,
    *,
    learning: Learning,
    sums: Weights | None = None,
    adapters: Adapters | None = None,
    agree: Callable[[jax.Array], jax.Array] = lambda parts: parts,
) -> tuple[Any, dict[str, jax.Array]]:
    """Gradient of the loss's sum over rows with respect to the compute weights, in float32.

    Args:
      score: `scoring.score` of an execution; with micro-batches of tokens, in such a buffer.
      token_weights: f32[B, R], each token's weight in the loss, the normaliser included.
      sums: see `scoring.gradient_sums`: they stand in the gradient for embedding and head. None:
        the gradients of these are made and added as all others are.
      adapters: that `weights` were merged of: the gradient is with respect to these alone.
      agree: as in `types.scan`.

    Returns:
      The gradient, and values of every token by name, each [B, R].
    """
    trained, put = _trained(weights, sums, adapters)

    def loss(trained, sums, *part):
        forward = score if sums is None else partial(score, sums=sums)
        forward = forward if adapters is None else partial(score, frozen_head=True)
        return _loss(put(trained), *part, score=forward, learning=learning)

    call = jax.value_and_grad(loss, argnums=0 if sums is None else (0, 1), has_aux=True)

    def add(carry, part):
        total, sums = carry
        (_, tokens), gradient = call(trained, sums, *part)
        gradient, sums = (gradient, None) if sums is None else gradient
        total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, gradient)
        return (total, sums), tokens

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), trained)
    (total, sums), tokens = scan(
        add,
        (zeros, sums),
        (batch, token_weights),
        batch.rollout,
        size=learning.micro_batch,
        tokens=learning.micro_batch_tokens,
        without=lambda part, there: (
            experience_without(part[0], there),
            jnp.where(there[:, None], part[1], 0.0),
        ),
        agree=agree,
    )
    return total | (sums or {}), tokens


def _trained(
    weights: Weights, sums: Weights | None, adapters: Adapters | None
) -> tuple[Any, Callable[[Any], Weights]]:
    """What is differentiated, and a function that puts it back among the weights."""
    if adapters is not None:
        layers = weights["layers"]
        return adapters, lambda own: weights | {"layers": {**layers, low_rank.ADAPTERS: own}}
    summed = () if sums is None else ("embed", "head")
    others = {name: weight for name, weight in weights.items() if name not in summed}
    return others, lambda others: weights | others


def _loss(weights, batch: Experience, token_weights, *, score, learning: Learning):
    objective = learning.objective
    scores = score(
        weights,
        batch.rollout,
        remat=learning.remat,
        entropy_gradient=bool(objective.entropy_coefficient),
        **({} if batch.loads is None else {"loads": batch.loads[0]}),
    )
    log_probs = scores.log_probs
    coefficients, kept = batch.coefficients, batch.kept
    update = learning.stages.update
    if update.blocks and not learning.needs_whole_update:
        nothing = update.init(batch.coefficients)  # what works row by row has no state
        applied = _applied(update, nothing, log_probs, batch)
        coefficients, kept = applied.coefficients, applied.kept & kept
    losses = objective.token_losses(
        log_probs,
        batch.old_log_probs,
        batch.advantages,
        mask=batch.mask,
        coefficients=coefficients,
        kept=kept,
        reference_log_probs=batch.reference_log_probs,
        entropy=scores.entropy,
        selected=batch.selected,
        balance=scores.balance,
    )
    tokens = {
        "loss": losses.loss,
        "log_prob": log_probs,
        "entropy": scores.entropy,
        "coefficient": coefficients,
        "kept": kept,
        **{f"loss/{name}": x for name, x in losses._asdict().items() if name != "loss"},
    }
    if scores.agreement is not None:
        tokens |= {"agreement": scores.agreement, "router_entropy": scores.router_entropy}
    if scores.balance is not None:
        tokens["balance"] = scores.balance
    return jnp.sum(token_weights * losses.loss), jax.lax.stop_gradient(tokens)


def _token_metrics(tokens, batch: Experience, learning: Learning) -> dict[str, jax.Array]:
    """Metrics of the tokens that are learnt from; those of the loss without the rejected ones."""
    mask, rollout = batch.mask, batch.rollout
    fields = {name.removeprefix("loss/"): x for name, x in tokens.items() if "loss/" in name}
    losses = objectives.TokenLosses(loss=tokens["loss"], **fields)
    left = mask & tokens["kept"]
    report = {f"loss/{name}": x for name, x in metrics.loss_metrics(losses, left).items()}
    current = tokens["log_prob"] - rollout.log_probs
    to_rollout = jnp.exp(jnp.clip(current, -20.0, 20.0))
    used = losses.ratio if learning.objective.has_ratio else to_rollout
    report |= metrics.update_skew(used, batch.advantages, left)
    if learning.mode == "recompute":
        # The loss's own ratio is 1 in a step's first update, whatever the sampler did.
        skew = metrics.update_skew(to_rollout, batch.advantages, left)
        report |= {name.replace("skew", "skew_rollout"): x for name, x in skew.items()}
    if learning.correction.blocks:
        mismatch = batch.old_log_probs - rollout.log_probs
        old = current if learning.mode == "bypass" else mismatch
        log_ratios: dict[corrections.Reads, jax.Array] = {"old": old, "current": current}
        figures = corrections.correction_metrics(tokens["coefficient"], mask, kept=tokens["kept"])
        figures |= corrections.bound_metrics(learning.correction, log_ratios, mask)
        scored = tokens["log_prob"] if learning.mode == "bypass" else batch.old_log_probs
        by_reading = {"old": scored, "current": tokens["log_prob"]}
        given = {"log_probs": by_reading, "advantages": batch.advantages}
        for of in (corrections.block_metrics, corrections.sequence_weight_metrics):
            figures |= of(learning.correction, log_ratios, mask, **given)
        report |= {f"correction/{name}": x for name, x in figures.items()}
    entropy = tree_sum(tree_sum(jnp.where(mask, tokens["entropy"], 0.0))) / count(mask)
    tokens_learnt = jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)
    return {"entropy": entropy, "tokens": tokens_learnt, **report}


def _expert_loads(rollout: Rollout, mask: jax.Array, experts: int) -> jax.Array:
    """i32[L, E], of the positions that predict the tokens of the mask.

    By the sampler's choices, so that they are known before the gradient of any micro-batch.
    """
    routes = cast(jax.Array, rollout.routes)
    at = jnp.arange(routes.shape[1])[None, :] - (rollout.prompt_lengths - 1)[:, None]
    inside = jnp.take_along_axis(mask, jnp.clip(at, 0, mask.shape[1] - 1), axis=1)
    inside &= (at >= 0) & (at < mask.shape[1])
    return metrics.expert_loads(routes, inside, experts=experts)


def _loads(batch: Experience, experts: int) -> jax.Array:
    """f32[B, L, E], of all these rows: the shares of the tokens that go through each expert."""
    loads = _expert_loads(batch.rollout, batch.mask, experts)
    shares = loads.astype(jnp.float32) / count(batch.mask)
    return jnp.broadcast_to(shares, (batch.mask.shape[0], *shares.shape))


def _routing_metrics(tokens, batch: Experience, experts: int) -> dict[str, jax.Array]:
    """`routing/*` of response tokens, if experts are recorded; the balance of those learnt from."""
    rollout = batch.rollout
    if rollout.routes is None:
        return {}
    loads = _expert_loads(rollout, rollout.mask, experts)
    figures = tokens["agreement"], tokens["router_entropy"]
    found = metrics.routing_metrics(*figures, rollout.mask, loads)
    if "balance" in tokens:
        found["balance"] = strict.mean(tokens["balance"], batch.mask)
    return {f"routing/{name}": value for name, value in found.items()}
