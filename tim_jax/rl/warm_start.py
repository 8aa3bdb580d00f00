"""Supervised steps on a task's worked solutions, for a model that cannot solve anything yet."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tim_jax import optimizers
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.model.execution import Execution, jit
from tim_jax.model.parameters import with_buffers
from tim_jax.policy import scoring
from tim_jax.rl.drawing import Text
from tim_jax.tasks.base import Example


def demonstrations(pairs: Sequence[tuple[str, str]], text: Text, *, response_size: int) -> Rollout:
    """(prompt, completion) pairs as a rollout, the end token appended, log-probs zero.

    Raises:
      InputError: a prompt or a completion is too long; to learn from a part would teach the wrong
        thing.
    """
    prompts = text.prompts([Example(prompt, "") for prompt, _ in pairs], range(len(pairs)))
    responses = np.zeros((len(pairs), response_size), np.int32)
    lengths = np.zeros((len(pairs),), np.int32)
    for row, (_, completion) in enumerate(pairs):
        tokens = text.tokenizer.encode(completion, add_special_tokens=False)
        tokens = [*tokens, text.tokenizer.eos_token_id]
        if len(tokens) > response_size:
            raise InputError(
                f"a worked completion has {len(tokens)} tokens, more than"
                f" max_tokens = {response_size}: {completion!r}"
            )
        responses[row, : len(tokens)], lengths[row] = tokens, len(tokens)
    return Rollout(
        prompts=prompts.tokens,
        prompt_lengths=prompts.lengths,
        responses=jnp.asarray(responses),
        lengths=jnp.asarray(lengths),
        log_probs=jnp.zeros(responses.shape, jnp.float32),
        finished=jnp.ones((len(pairs),), bool),
    )


def warm_start(
    params: Any,
    batches: Iterator[Rollout],
    *,
    execution: Execution,
    learning_rate: float,
    steps: int,
) -> Iterator[tuple[Any, float]]:
    """Yields (params, mean negative log-likelihood per token) after each of `steps` AdamW steps."""
    rise = min(max(steps // 10, 1), steps - 1)
    rate = optimizers.Rate(learning_rate, rise, "cosine", steps)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate.schedule_fn(), b2=0.98))
    optimizer = optimizers.for_dtype(chain, execution.numerics.compute_dtype)

    def loss(params, batch: Rollout):
        weights = execution.prepare(params)
        log_probs = scoring.score(weights, batch, execution=execution).log_probs
        mask = batch.mask
        return -jnp.sum(jnp.where(mask, log_probs, 0.0)) / jnp.sum(mask, dtype=jnp.float32)

    @partial(jit, numerics=execution.numerics, donate_argnums=(0, 1))
    def step(params, state, batch):
        scale = optimizers.loss_scale(state)

        def scaled(params, batch):
            value = loss(params, batch)
            return (value if scale is None else scale * value), value

        (_, value), gradient = jax.value_and_grad(scaled, has_aux=True)(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(gradient, state, params)
            moved = with_buffers(optax.apply_updates(params, changes), params)
            return moved, state, value

    params = jax.tree.map(jnp.array, params)
    state = optimizer.init(params)
    for _ in range(steps):
        params, state, value = step(params, state, next(batches))
        yield params, float(value)
