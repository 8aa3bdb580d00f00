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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tim_jax import placement
from tim_jax.errors import InputError
from tim_jax.model import parameters
from tim_jax.placement import Placement, collectives
from tim_jax.policy import rounds, sampler
from tim_jax.rl import learner
from tim_jax.rl.experience import score_rows
from tim_jax.rl.learning import Experience, Learning, Policy, Score
from tim_jax.types import Prompts, Rollout

_ROWS = placement.spec(("rows",))
_WHOLE = PartitionSpec()


def sampling(
    policy: Policy,
    on: Mesh,
    *,
    samples: int,
    micro_batch: int | None = None,
    draw: Callable[..., Rollout] = sampler.sample,
) -> Callable[..., Rollout]:
    """(weights, prompts, key) -> rollout, as `sampler.sample`; whole on every device.

    Prompts are split over the devices as far as they go, then the samples of a prompt. `draw` is
    what a device does with its own: `sampler.sample`, or that of a sampler that differs; with
    `micro_batch` sequences at a time over all devices, see `rounds.sampling`.
    """
    where = policy.placement

    def sample(weights, prompts: Prompts, key) -> Rollout:
        count = prompts.tokens.shape[0]
        check_rows(count * samples, where.shards, f"{count} prompts x {samples} samples")
        blocks, shares = rounds.split(count, samples, where.shards)
        size = samples // shares
        own = _own_rows(micro_batch, where.shards, "sampler.micro_batch")
        drawing = rounds.sampling(draw, samples=size, micro_batch=own)

        def local(weights, prompts: Prompts, first, key) -> Rollout:
            rollout = drawing(
                weights,
                prompts,
                key,
                config=policy.config,
                numerics=policy.numerics,
                sampling=policy.sampling,
                placement=where,
                first=first[0],
            )
            return collectives.whole_rows(rollout, where)

        call = _over(on, local, (_weights(policy), _ROWS, _ROWS, _WHOLE), _WHOLE)
        first = jnp.tile(jnp.arange(shares) * size, blocks)
        rows = call(weights, rounds.repeated(prompts, blocks, shares), first, key)
        return rounds.in_order(rows, blocks, shares, size)

    return sample


def scoring(policy: Policy, on: Mesh, *, micro_batch: int | None, energy: bool = False) -> Score:
    """(weights, rollout) -> as `experience.score_rows`, f32[B, R]; whole on every device."""
    where = policy.placement

    def local(weights, rollout: Rollout, micro: int | None):
        found = score_rows(policy, weights, rollout, micro_batch=micro, energy=energy)
        return collectives.whole_rows(found, where)

    def score(weights, rollout: Rollout) -> tuple[jax.Array, jax.Array | None]:
        rows = rollout.lengths.shape[0]
        own = None if micro_batch is None else min(micro_batch, rows)
        micro = _own_micro_batch(own, rows, where.shards)
        call = _over(on, partial(local, micro=micro), (_weights(policy), _ROWS), _WHOLE)
        return call(weights, rollout)

    return score


def gradient(policy: Policy, on: Mesh, *, learning: Learning) -> learner.Gradient:
    """(weights, experience, token weights) -> as `learner.gradient_rows`.

    The gradient in the same parts as the weights, summed over all devices; tokens whole.
    """

    def differentiate(weights, batch: Experience, token_weights):
        rows = batch.mask.shape[0]
        micro_batch = None if learning.micro_batch is None else min(learning.micro_batch, rows)
        micro = _own_micro_batch(micro_batch, rows, policy.placement.shards)
        # A device's own rows. The noise is measured between micro-batches of all devices' rows.
        own = replace(learning, micro_batch=micro, noise_scale=False)

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
    leaf_axes = parameters.weight_axes(policy.config, policy.numerics)

    def summed(weights, rows):
        known, found = local(weights, rows)
        found = collectives.sum_copies(found, leaf_axes, where)
        return collectives.whole_rows(known, where), found

    return _over(on, summed, (_weights(policy), _ROWS), (_WHOLE, _weights(policy)))


def gradient_norm(policy: Policy, on: Mesh) -> Callable[..., jax.Array]:
    """(gradient with respect to the parameters) -> f32[], its norm, summed in a fixed order."""
    leaf_axes = parameters.param_axes(policy.config)
    local = partial(collectives.norm, axes=leaf_axes, placement=policy.placement)
    return _over(on, local, (placement.specs(leaf_axes),), _WHOLE)


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
    """A device's rows of each micro-batch of the learner."""
    check_rows(rows, shards, "of the learner")
    return _own_rows(micro_batch, shards, "learner.micro_batch")


def _own_rows(micro_batch: int | None, shards: int, what: str) -> int | None:
    if micro_batch is None:
        return None
    check_rows(micro_batch, shards, what)
    return micro_batch // shards


def _weights(policy: Policy) -> Any:
    return placement.specs(parameters.weight_axes(policy.config, policy.numerics))


def _over(on: Mesh, local: Callable, ins: tuple, outs: Any) -> Callable:
    # What is whole is whole by gathers of ours, which JAX cannot see to be: no check of it.
    call = cast(
        Callable, jax.shard_map(local, mesh=on, in_specs=ins, out_specs=outs, check_vma=False)
    )
    whole = NamedSharding(on, _WHOLE)

    def apply(*args):
        # Rows are whole up to here. Left to itself, the partitioner would split what they are made
        # of as well, and gather every statistic of them again.
        held = (
            jax.lax.with_sharding_constraint(arg, whole) if spec is _ROWS else arg
            for arg, spec in zip(args, ins, strict=True)
        )
        return call(*held)

    return apply
