"""Supervised steps on a task's own solutions, for a model that knows nothing yet."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tim_jax.learner import Policy
from tim_jax.types import Rollout


def demonstrations(
    pairs: Sequence[tuple[str, str]], tokenizer: Any, *, prompt_size: int, response_size: int
) -> Rollout:
    """(prompt, completion) pairs as a rollout, the end token appended, log-probs zero."""
    count = len(pairs)
    prompts = np.zeros((count, prompt_size), np.int32)
    responses = np.zeros((count, response_size), np.int32)
    sizes = np.zeros((2, count), np.int32)
    for row, (prompt, completion) in enumerate(pairs):
        before = tokenizer.encode(prompt, add_special_tokens=False)[:prompt_size]
        after = tokenizer.encode(completion, add_special_tokens=False)
        after = [*after, tokenizer.eos_token_id][:response_size]
        prompts[row, : len(before)], responses[row, : len(after)] = before, after
        sizes[:, row] = len(before), len(after)
    return Rollout(
        prompts=jnp.asarray(prompts),
        prompt_lengths=jnp.asarray(sizes[0]),
        responses=jnp.asarray(responses),
        lengths=jnp.asarray(sizes[1]),
        log_probs=jnp.zeros(responses.shape, jnp.float32),
        finished=jnp.ones((count,), bool),
    )


def warm_start(
    params: Any, batches: Iterator[Rollout], *, policy: Policy, learning_rate: float, steps: int
) -> Iterator[tuple[Any, float]]:
    """Yields (params, mean negative log-likelihood per token) after each of `steps` AdamW steps."""
    rate = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(steps // 10, 1), steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98))

    def loss(params, batch: Rollout):
        log_probs, _ = policy.score(policy.prepare(params), batch)
        mask = batch.mask
        return -jnp.sum(jnp.where(mask, log_probs, 0.0)) / jnp.sum(mask, dtype=jnp.float32)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, changes), state, value

    params = jax.tree.map(jnp.array, params)
    state = optimizer.init(params)
    for _ in range(steps):
        params, state, value = step(params, state, next(batches))
        yield params, float(value)
