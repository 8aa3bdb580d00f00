"""The one place that compiles: a run's programs, jitted, with their buffers donated."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tim_jax import learner, sampler
from tim_jax.compiled import jit
from tim_jax.errors import InputError
from tim_jax.learner import Experience, Learning, Policy, TrainState
from tim_jax.types import Prompts, Rollout


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

    learning: Learning
    mini_batches: int
    epochs: int
    length_buckets: int


def build(
    policy: Policy,
    learning: Learning,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    correction: optax.GradientTransformationExtraArgs | None = None,
    mini_batches: int = 1,
    epochs: int = 1,
    length_buckets: int = 1,
) -> Programs:
    """Programs of a training run."""
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
    numerics = policy.numerics
    return Programs(
        prepare=jit(policy.prepare, numerics),
        sample=sampling_program(policy, samples=learning.group_size),
        experience=jit(prepare, numerics),
        update=jit(update, numerics, donate_argnums=(0, 1)),
        init=jit(init, numerics),
        learning=learning,
        mini_batches=mini_batches,
        epochs=epochs,
        length_buckets=length_buckets,
    )


def sampling_program(policy: Policy, *, samples: int) -> Callable[..., Rollout]:
    """Jitted (weights, prompts, key) -> rollout, `samples` responses per prompt."""

    def sample(weights, prompts: Prompts, key):
        return sampler.sample(
            weights,
            prompts,
            key,
            samples=samples,
            config=policy.config,
            numerics=policy.numerics,
            sampling=policy.sampling,
        )

    return jit(sample, policy.numerics)
