"""The one place that compiles: a run's programs, jitted, with their buffers donated."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tim_jax import learner, metrics, sampler
from tim_jax.errors import InputError
from tim_jax.learner import Experience, Learning, Policy, TrainState
from tim_jax.mismatch import Mismatch, Setting, dial
from tim_jax.types import Prompts, Rollout

_PARTS = ("log_ratio_abs_mean", "log_ratio_abs_max", "kl_k3")


@dataclass(frozen=True)
class Programs:
    """A run's compiled programs.

    Each compiles once: shapes do not depend on the data, but for `length_buckets` learner shapes.
    """

    prepare: Callable[..., Any]  # params -> weights
    sample: Callable[..., Rollout]  # weights, prompts, key -> rollout
    experience: Callable[..., Any]  # see learner.experience
    update: Callable[..., Any]  # state, weights, experience, index of mini-batch, length
    init: Callable[..., TrainState]  # params -> state
    compare: Callable[..., Any] | None  # weights, the sampler's weights, rollout -> metrics

    learning: Learning
    mini_batches: int
    epochs: int
    length_buckets: int
    mismatch: Mismatch = dial.EXACT


def build(
    policy: Policy,
    learning: Learning,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    correction: optax.GradientTransformationExtraArgs | None = None,
    mini_batches: int = 1,
    epochs: int = 1,
    length_buckets: int = 1,
    mismatch: Mismatch = dial.EXACT,
) -> Programs:
    """Programs of a training run; `mismatch` is what its sampler does differently, if anything."""
    if min(mini_batches, epochs, length_buckets) < 1:
        raise InputError(
            "mini_batches, epochs and length_buckets must be positive, got"
            f" {mini_batches}, {epochs} and {length_buckets}"
        )

    def update(state, weights, batch: Experience, index, response_length):
        part = learner.mini_batch(batch, index, count=mini_batches)
        return learner.update(
            state,
            weights,
            part,
            response_length,
            policy=policy,
            learning=learning,
            optimizer=optimizer,
        )

    def init(params) -> TrainState:
        with jax.numpy_dtype_promotion("standard"):
            opt_state = optimizer.init(params)
        return TrainState(
            params=params,
            optimizer=opt_state,
            correction=optax.EmptyState() if correction is None else correction.init(params),
            step=jnp.int32(0),
        )

    prepare = partial(learner.experience, policy=policy, learning=learning, correction=correction)
    return Programs(
        prepare=jax.jit(policy.prepare),
        sample=sampling_program(policy, samples=learning.group_size, mismatch=mismatch),
        experience=jax.jit(prepare),
        update=jax.jit(update, donate_argnums=(0, 1)),
        init=jax.jit(init),
        compare=comparing_program(policy, learning, mismatch) if mismatch.active else None,
        learning=learning,
        mini_batches=mini_batches,
        epochs=epochs,
        length_buckets=length_buckets,
        mismatch=mismatch,
    )


def sampling_program(
    policy: Policy, *, samples: int, mismatch: Mismatch = dial.EXACT
) -> Callable[..., Rollout]:
    """Jitted (weights, prompts, key) -> rollout, `samples` responses per prompt.

    `weights` and `policy` are the learner's; the sampler differs from it as `mismatch` says.

    Raises:
      InputError: an entry that this sampler cannot have, or two that contradict each other.
    """
    dial.check(mismatch, Setting(policy.config, policy.numerics, policy.sampling))

    differs = partial(dial.sample, mismatch=mismatch) if mismatch.active else sampler.sample

    def sample(weights, prompts: Prompts, key):
        return differs(
            weights,
            prompts,
            key,
            samples=samples,
            config=policy.config,
            numerics=policy.numerics,
            sampling=policy.sampling,
        )

    return jax.jit(sample)


def comparing_program(
    policy: Policy, learning: Learning, mismatch: Mismatch
) -> Callable[..., dict[str, jax.Array]]:
    """Jitted (weights, sampler's weights, rollout) -> what the sampler's mismatch is.

    `mismatch/*` are `metrics.mismatch_metrics` of the learner's log-probs, by a forward of its own,
    against the recorded ones. Its parts, where there are any, in mean |d|, largest |d| and k3:
    `drift/*` is the learner against itself at the sampler's weights, `numerical/*` that against
    the recorded ones, and `reporting/*` the log-probs drawn with against the recorded ones.
    """

    def compare(weights, source, rollout: Rollout):
        score = partial(
            learner.score_rows, policy, rollout=rollout, micro_batch=learning.micro_batch
        )
        recorded, mask = rollout.log_probs, rollout.mask
        trainer = score(weights=weights)
        pairs = {}
        if mismatch.stale_updates:
            there = score(weights=source)
            pairs |= {"drift": (trainer, there), "numerical": (there, recorded)}
        if rollout.drawn_log_probs is not None:
            pairs["reporting"] = rollout.drawn_log_probs, recorded
        found = metrics.mismatch_metrics(trainer, recorded, mask)
        report = {f"mismatch/{name}": value for name, value in found.items()}
        for part, (first, second) in pairs.items():
            found = metrics.mismatch_metrics(first, second, mask)
            report |= {f"{part}/{name}": found[name] for name in _PARTS}
        return report

    return jax.jit(compare)
