"""The sampler's and the learner's local programs, run by every device of a mesh on its own rows.

Each function here wraps one of `sampler` or `learner` in `shard_map`: weights come in and gradients
go out in parts, by their logical axes, and rows are split over data and fsdp. Arrays of [batch] and
[batch, time] stay whole on every device outside: they are small beside caches and logits, and
statistics of them are then one and the same program, whatever the split.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tim_jax import collectives, learner, placement, sampler
from tim_jax.errors import InputError
from tim_jax.learner import Experience, Learning, Policy
from tim_jax.model import axes
from tim_jax.placement import Placement
from tim_jax.types import Prompts, Rollout

_ROWS = placement.spec(("rows",))
_WHOLE = PartitionSpec()


def sampling(policy: Policy, on: Mesh, *, samples: int) -> Callable[..., Rollout]:
    """(weights, prompts, key) -> rollout, as `sampler.sample`; whole on every device.

    Prompts are split over the devices as far as they go, then the samples of a prompt.
    """
    where = policy.placement

    def sample(weights, prompts: Prompts, key) -> Rollout:
        count = prompts.tokens.shape[0]
        check_rows(count * samples, where.shards, f"{count} prompts x {samples} samples")
        blocks = gcd(count, where.shards)
        parts = where.shards // blocks
        size = samples // parts

        def local(weights, prompts: Prompts, first, key) -> Rollout:
            rollout = sampler.sample(
                weights,
                prompts,
                key,
                samples=size,
                config=policy.config,
                numerics=policy.numerics,
                sampling=policy.sampling,
                placement=where,
                first=first[0],
            )
            return collectives.whole_rows(rollout, where)

        call = _over(on, local, (_weights(policy), _ROWS, _ROWS, _WHOLE), _WHOLE)
        first = jnp.tile(jnp.arange(parts) * size, blocks)
        rows = call(weights, _repeated(prompts, blocks, parts), first, key)
        return jax.tree.map(lambda x: _in_order(x, blocks, parts, size), rows)

    return sample


def _repeated(tree: Any, blocks: int, parts: int) -> Any:
    """Every block of rows `parts` times: what each device samples from."""

    def leaf(x):
        x = x.reshape(blocks, 1, -1, *x.shape[1:])
        x = jnp.broadcast_to(x, (blocks, parts, *x.shape[2:]))
        return x.reshape(-1, *x.shape[3:])

    return jax.tree.map(leaf, tree)


def _in_order(x: jax.Array, blocks: int, parts: int, size: int) -> jax.Array:
    """Rows of (block, part, prompt, sample) as prompts major."""
    rest = x.shape[1:]
    x = x.reshape(blocks, parts, -1, size, *rest)
    return jnp.swapaxes(x, 1, 2).reshape(-1, *rest)


def scoring(policy: Policy, on: Mesh, *, micro_batch: int | None) -> learner.Score:
    """(weights, rollout) -> log-probs f32[B, R], as `learner.score_rows`; whole on every device."""
    where = policy.placement

    def local(weights, rollout: Rollout, micro: int | None):
        log_probs = learner.score_rows(policy, weights, rollout, micro_batch=micro)
        return collectives.whole_rows(log_probs, where)

    def score(weights, rollout: Rollout) -> jax.Array:
        micro = _own_micro_batch(micro_batch, rollout.lengths.shape[0], where.shards)
        call = _over(on, partial(local, micro=micro), (_weights(policy), _ROWS), _WHOLE)
        return call(weights, rollout)

    return score


def gradient(policy: Policy, on: Mesh, *, learning: Learning) -> learner.Gradient:
    """(weights, experience, token weights) -> as `learner.gradient_rows`.

    The gradient in the same parts as the weights, summed over all devices; tokens whole.
    """

    def differentiate(weights, batch: Experience, token_weights):
        rows = batch.advantages.shape[0]
        micro = _own_micro_batch(learning.micro_batch, rows, policy.placement.shards)
        own = replace(learning, micro_batch=micro)

        def local(weights, rows):
            found, tokens = learner.gradient_rows(policy, weights, *rows, learning=own)
            return tokens, found

        tokens, found = differentiating(policy, on, local)(weights, (batch, token_weights))
        return found, tokens

    return differentiate


def differentiating(policy: Policy, on: Mesh, local: Callable) -> Callable:
    """(weights, rows) -> what is known of every row, whole, and the gradient, in parts.

    `local` does the same for a device's own rows; its gradient is that of a sum over rows.
    """
    where = policy.placement
    leaf_axes = axes.weight_axes(policy.config, policy.numerics)

    def summed(weights, rows):
        known, found = local(weights, rows)
        found = collectives.sum_copies(found, leaf_axes, where)
        return collectives.whole_rows(known, where), found

    return _over(on, summed, (_weights(policy), _ROWS), (_WHOLE, _weights(policy)))


def check_rows(rows: int, shards: int, what: str) -> None:
    """Raises `InputError` if rows cannot be split evenly over the devices."""
    if rows % shards:
        raise InputError(
            f"placement: data x fsdp = {shards} must divide the {rows} sequences of a batch"
            f" ({what})"
        )


def prompts_multiple(where: Placement, samples: int) -> int:
    """Of what the number of prompts must be a multiple, so that every device has as many rows."""
    return where.shards // gcd(where.shards, samples)


def _own_micro_batch(micro_batch: int | None, rows: int, shards: int) -> int | None:
    """A device's rows of each micro-batch."""
    check_rows(rows, shards, "of the learner")
    if micro_batch is None:
        return None
    check_rows(micro_batch, shards, "micro_batch")
    return micro_batch // shards


def _weights(policy: Policy) -> Any:
    return placement.specs(axes.weight_axes(policy.config, policy.numerics))


def _over(on: Mesh, local: Callable, ins: tuple, outs: Any) -> Callable:
    # What is whole is whole by gathers of ours, which JAX cannot see to be: no check of it.
    return cast(
        Callable, jax.shard_map(local, mesh=on, in_specs=ins, out_specs=outs, check_vma=False)
    )
