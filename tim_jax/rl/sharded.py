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
from tim_jax.model.execution import Execution
from tim_jax.model.weights import param_axes, weight_axes
from tim_jax.placement import Placement, collectives
from tim_jax.policy import rounds
from tim_jax.policy.scoring import score
from tim_jax.rl import learner
from tim_jax.rl.experience import score_rows
from tim_jax.rl.learning import Experience, Learning, Policy
from tim_jax.types import Prompts, Rollout

_ROWS = placement.spec(("rows",))
_WHOLE = PartitionSpec()


def sampling(
    execution: Execution,
    on: Mesh,
    *,
    samples: int,
    micro_batch: int | None = None,
    draw: Callable[..., Rollout],
) -> Callable[..., Rollout]:
    """(weights, prompts, key) -> rollout, as `sampler.sample`; whole on every device.

    Prompts are split over the devices as far as they go, then the samples of a prompt. `draw` is
    what a device does with its own: `sampler.sample`, or that of a sampler that differs; with
    `micro_batch` sequences at a time over all devices, see `rounds.sampling`.
    """
    where = execution.placement

    def sample(weights, prompts: Prompts, key) -> Rollout:
        count = prompts.tokens.shape[0]
        check_rows(count * samples, where.shards, f"{count} prompts x {samples} samples")
        blocks, shares = rounds.split(count, samples, where.shards)
        size = samples // shares
        own = _own_rows(micro_batch, where.shards, "sampler.micro_batch")
        drawing = rounds.sampling(draw, samples=size, micro_batch=own)

        def local(weights, prompts: Prompts, first, key) -> Rollout:
            rollout = drawing(weights, prompts, key, execution=execution, first=first[0])
            return collectives.whole_rows(rollout, where)

        call = _over(on, local, (_weights(execution), _ROWS, _ROWS, _WHOLE), _WHOLE)
        first = jnp.tile(jnp.arange(shares) * size, blocks)
        rows = call(weights, rounds.repeated(prompts, blocks, shares), first, key)
        return rounds.in_order(rows, blocks, shares, size)

    return sample


def policy(execution: Execution, on: Mesh, *, learning: Learning) -> Policy:
    """The policy that an execution computes, on its mesh."""
    return Policy(
        prepare=execution.prepare,
        to_masters=partial(_to_masters, execution),
        score=scoring(execution, on, micro_batch=learning.micro_batch),
        gradient=gradient(execution, on, learning=learning),
        norm=gradient_norm(execution, on),
    )


def _to_masters(execution: Execution, gradient, params):
    """Gradient with respect to the masters: `prepare` is linear, its transpose is taken in f32."""
    wide = replace(execution, numerics=replace(execution.numerics, compute_dtype="float32"))
    _, transpose = jax.vjp(wide.prepare, params)
    return transpose(gradient)[0]


def scoring(execution: Execution, on: Mesh, *, micro_batch: int | None) -> Callable[..., Any]:
    """(weights, rollout, energy=False) -> as `experience.score_rows`; whole on every device."""
    where = execution.placement

    def local(weights, rollout: Rollout, micro: int | None, energy: bool):
        own = partial(score, execution=execution)
        found = score_rows(own, weights, rollout, micro_batch=micro, energy=energy)
        return collectives.whole_rows(found, where)

    def scored(weights, rollout: Rollout, *, energy: bool = False):
        rows = rollout.lengths.shape[0]
        own = None if micro_batch is None else min(micro_batch, rows)
        micro = _own_micro_batch(own, rows, where.shards)
        own_rows = partial(local, micro=micro, energy=energy)
        call = _over(on, own_rows, (_weights(execution), _ROWS), _WHOLE)
        return call(weights, rollout)

    return scored


def gradient(execution: Execution, on: Mesh, *, learning: Learning) -> Callable[..., Any]:
    """(weights, experience, token weights) -> as `learner.gradient_rows`.

    The gradient in the same parts as the weights, summed over all devices; tokens whole.
    """

    def differentiate(weights, batch: Experience, token_weights):
        rows = batch.mask.shape[0]
        micro_batch = None if learning.micro_batch is None else min(learning.micro_batch, rows)
        micro = _own_micro_batch(micro_batch, rows, execution.placement.shards)
        # A device's own rows. The noise is measured between micro-batches of all devices' rows.
        own = replace(learning, micro_batch=micro, noise_scale=False)

        def local(weights, rows):
            forward = partial(score, execution=execution)
            found, tokens = learner.gradient_rows(forward, weights, *rows, learning=own)
            return tokens, found

        tokens, found = differentiating(execution, on, local)(weights, (batch, token_weights))
        return found, tokens

    return differentiate


def differentiating(execution: Execution, on: Mesh, local: Callable) -> Callable:
    """(weights, rows) -> what is known of every row, whole, and the gradient, in parts.

    `local` does the same for a device's own rows; its gradient is that of a sum over rows.
    """
    where = execution.placement
    leaf_axes = weight_axes(execution.config, execution.numerics)

    def summed(weights, rows):
        known, found = local(weights, rows)
        found = collectives.sum_copies(found, leaf_axes, where)
        return collectives.whole_rows(known, where), found

    return _over(on, summed, (_weights(execution), _ROWS), (_WHOLE, _weights(execution)))


def gradient_norm(execution: Execution, on: Mesh) -> Callable[..., jax.Array]:
    """(gradient with respect to the parameters) -> f32[], its norm, summed in a fixed order."""
    leaf_axes = param_axes(execution.config)
    local = partial(collectives.norm, axes=leaf_axes, placement=execution.placement)
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


def _weights(execution: Execution) -> Any:
    return placement.specs(weight_axes(execution.config, execution.numerics))


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
