"""The sampler and the learner on a mesh: every device runs them on its own rows.

Each function here wraps one of `sampler`, `scoring` or `learner` in `shard_map`: weights come in
and gradients go out in parts, by their logical axes, and rows are split over data, fsdp and expert.
Outside, arrays of [batch] and [batch, time] are whole on every device: they are small compared with
caches and logits, and their statistics are then computed by the same program, whatever the split.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tim_jax import placement
from tim_jax.common.errors import InputError
from tim_jax.common.types import Names, Prompts, Rollout
from tim_jax.model import adapters as low_rank
from tim_jax.model.attention import Cache
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution
from tim_jax.model.weights import weight_axes
from tim_jax.placement import Placement, collectives
from tim_jax.policy import slots, turns
from tim_jax.policy.sampler import Begun, join_parts, prompts_so_far
from tim_jax.policy.scoring import gradient_sums, score, shares_gradient
from tim_jax.policy.turns import Chunks, Turning, Work
from tim_jax.rl import learner
from tim_jax.rl.types import Experience, Learning, Policy, deal, whole_lengths

_ROWS = placement.spec(("rows",))
_WHOLE = PartitionSpec()
_EACH = PartitionSpec(placement.AXES)
_NAMES = Names(_WHOLE, _ROWS, _ROWS)  # type: ignore[arg-type]


def sampling(
    execution: Execution,
    on: Mesh,
    *,
    samples: int,
    batching: Batching = ALL_AT_ONCE,
    draw: Callable[..., Rollout],
) -> Callable[..., Rollout]:
    """(weights, prompts, key) -> rollout, as `sampler.sample`; whole on every device.

    Prompts are split over the devices as far as possible, then the samples of a prompt. `draw` runs
    on each device with its part: `sampler.sample`, or that of a sampler with mismatch.
    The slots and pages of `batching` are split over the devices; each has a queue of its own part.

    Raises:
      InputError: the devices cannot have as many sequences, slots and pages each.
    """
    where = execution.placement
    of_device = batching.of_device(where)

    def sample(weights, prompts: Prompts, key) -> Rollout:
        count = prompts.tokens.shape[0]
        check_rows(count * samples, where, f"{count} prompts x {samples} samples")
        blocks, shares = split(count, samples, where.shards)
        size = samples // shares
        drawing = partial(draw, execution=execution, samples=size, batching=of_device)

        def local(weights, prompts: Prompts, first, key) -> Rollout:
            rollout = drawing(weights, prompts, key, first=first[0])
            return collectives.whole_rows(rollout, where)

        call = _over(on, local, (_weights(execution), _ROWS, _ROWS, _WHOLE), _WHOLE)
        first = jnp.tile(jnp.arange(shares) * size, blocks)
        rows = call(weights, repeated(prompts, blocks, shares), first, key)
        return in_order(rows, blocks, shares, size)

    return sample


def going_on(
    execution: Execution,
    on: Mesh,
    *,
    batching: Batching = ALL_AT_ONCE,
    draw: Callable[..., Rollout],
) -> Callable[..., Rollout]:
    """(weights, rollout, ids, numbers, key) -> the rollout with more tokens, whole on every device.

    Responses that did not finish go on for as many tokens as `execution` allows. `ids` i32[B] are
    the names of every row's prompt, `numbers` i32[B] its sample's. `draw` as in `sampling`.
    """
    where = execution.placement
    of_device = batching.of_device(where)

    def local(weights, rows, key) -> Rollout:
        rollout, ids, numbers = rows
        more = draw(
            weights,
            prompts_so_far(rollout, ids),
            key,
            execution=execution,
            samples=1,
            batching=of_device,
            first=numbers,
            begun=Begun(rollout.responses.shape[1], rollout.finished),
        )
        return collectives.whole_rows(join_parts(rollout, more), where)

    call = _over(on, local, (_weights(execution), _ROWS, _WHOLE), _WHOLE)
    return lambda weights, rollout, ids, numbers, key: call(weights, (rollout, ids, numbers), key)


@dataclass(frozen=True)
class TurningOnMesh:
    """`Turning` on a mesh.

    Rows, slots, chunks and copies come device by device, in equal numbers, and name rows, slots and
    pages of their own device. What is drawn is whole on every device. What stays on the devices
    between calls has a first dimension of devices.
    """

    sampler: Turning
    on: Mesh

    def begin(self, weights: Any, prompts: Prompts, names: Names, *, max_turns: int, **how: Any):
        """Weights, cache and first tokens as by `Turning.begin`, and `turns.turn_keys`."""
        execution = self.sampler.execution

        def local(weights, prompts, names):
            weights, cache, first = self.sampler.begin(weights, prompts, names, **how)
            found = self._whole((first, turns.turn_keys(names, max_turns)))
            return *_kept((weights, cache)), *found

        places = (_weights(execution), _ROWS, _NAMES), (_EACH, _EACH, _WHOLE, _WHOLE)
        return _over(self.on, local, *places)(weights, prompts, names)

    def extend(self, weights: Any, cache: Cache, chunks: Chunks) -> Cache:
        """The cache with the keys and values of the chunks' tokens, as many on each device."""

        def local(weights, cache, chunks):
            return _kept(self.sampler.extend(_own(weights), _own(cache), chunks))

        chunks_in = Chunks(_ROWS, _ROWS, _ROWS, _WHOLE)  # type: ignore[arg-type]
        return _over(self.on, local, (_EACH, _EACH, chunks_in), _EACH)(weights, cache, chunks)

    def decode(self, weights: Any, cache: Cache, names: Names, work: Work, until: jax.Array):
        """The cache, and what every device's slots drew; `until` i32[shards]."""

        def local(weights, cache, names, work, until):
            own = _own(weights), _own(cache)
            cache, found = self.sampler.decode(own[0], own[1], names, work, until[0])
            return _kept(cache), self._whole(found)

        places = (_EACH, _EACH, _NAMES, _ROWS, _ROWS), (_EACH, _WHOLE)
        return _over(self.on, local, *places)(weights, cache, names, work, until)

    def copy(self, cache: Cache, sources: jax.Array, targets: jax.Array, count: jax.Array) -> Cache:
        """The cache after the first `count` of each device's pages `sources` went to `targets`."""

        def local(cache, sources, targets, count):
            own = _own(cache)
            return _kept(slots.copy_pages(own, lambda at: (sources[at], targets[at]), count))

        ins = _EACH, _ROWS, _ROWS, _WHOLE
        return _over(self.on, local, ins, _EACH)(cache, sources, targets, count)

    def _whole(self, tree: Any) -> Any:
        return collectives.whole_rows(tree, self.sampler.execution.placement)


def _kept(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def _own(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def split(prompts: int, samples: int, parts: int) -> tuple[int, int]:
    """(blocks of the prompts, shares of a prompt's samples) that make equal `parts` of both.

    Prompts are split as far as they go. `parts` must divide `prompts` x `samples`.
    """
    blocks = gcd(prompts, parts)
    return blocks, parts // blocks


def rows_of_parts(prompts: int, samples: int, parts: int) -> np.ndarray:
    """i64[parts, prompts x samples / parts], the rows that `split` gives to each part."""
    blocks, shares = split(prompts, samples, parts)
    rows = np.arange(prompts * samples).reshape(blocks, prompts // blocks, shares, -1)
    return rows.swapaxes(1, 2).reshape(parts, -1)


def repeated(tree: Any, blocks: int, shares: int) -> Any:
    """Repeats every block of rows `shares` times: the prompts of each part, part by part."""

    def leaf(x):
        x = x.reshape(blocks, 1, -1, *x.shape[1:])
        x = jnp.broadcast_to(x, (blocks, shares, *x.shape[2:]))
        return x.reshape(-1, *x.shape[3:])

    return jax.tree.map(leaf, tree)


def in_order(tree: Any, blocks: int, shares: int, size: int) -> Any:
    """Reorders rows of (block, share, prompt, one of `size` samples) to prompts major."""

    def leaf(x):
        rest = x.shape[1:]
        x = x.reshape(blocks, shares, -1, size, *rest)
        return jnp.swapaxes(x, 1, 2).reshape(-1, *rest)

    return jax.tree.map(leaf, tree)


def policy(execution: Execution, on: Mesh, *, learning: Learning) -> Policy:
    """The policy that an execution computes, on its mesh."""
    size = {"micro_batch": learning.micro_batch, "micro_batch_tokens": learning.micro_batch_tokens}
    return Policy(
        prepare=execution.prepare,
        to_masters=partial(_to_masters, execution),
        score=scoring(execution, on, **size),
        gradient=gradient(execution, on, learning=learning),
        norm=gradient_norm(execution, on),
        experts=execution.config.num_experts,
        renewed=partial(low_rank.renewed, config=execution.config, lora=execution.lora),
    )


def _to_masters(execution: Execution, gradient, params):
    """The gradient with respect to the masters, by the transpose of `prepare` in float32.

    That of adapters is theirs already.
    """
    if execution.lora is not None:
        return gradient
    numerics = replace(execution.numerics, compute_dtype="float32")
    wide = replace(execution, numerics=numerics, edits=())

    def prepared(params):
        weights = wide.prepare(params)
        return {name: weights[name] for name in gradient}  # a tied head's may be the embedding's

    _, transpose = jax.vjp(prepared, params)
    return transpose(gradient)[0]


def scoring(
    execution: Execution,
    on: Mesh,
    *,
    micro_batch: int | None,
    micro_batch_tokens: int | None = None,
) -> Callable[..., Any]:
    """(weights, rollout, energy=False) -> as `learner.score_rows`; whole on every device."""
    where = execution.placement
    tokens = micro_batch_tokens and micro_batch_tokens // where.shards  # of a device

    def local(weights, rollout: Rollout, micro: int | None, energy: bool):
        forward = partial(score, execution=execution, buffer=tokens)
        scores = learner.score_rows(
            forward,
            weights,
            rollout,
            micro_batch=micro,
            micro_batch_tokens=tokens,
            energy=energy,
            agree=partial(_largest, where),
        )
        return collectives.whole_rows(scores, where)

    def scored(weights, rollout: Rollout, *, energy: bool = False):
        micro = _local_micro_batch(micro_batch, rollout.lengths.shape[0], where)
        on_rows = partial(local, micro=micro, energy=energy)
        call = _over(on, on_rows, (_weights(execution), _ROWS), _WHOLE)
        deal, back = _dealing(rollout, where, tokens)
        return back(call(weights, deal(rollout)))

    return scored


def gradient(execution: Execution, on: Mesh, *, learning: Learning) -> Callable[..., Any]:
    """(weights, experience, token weights) -> as `learner.gradient_rows`.

    The gradient in the same parts as the weights, summed over all devices; tokens whole. Given
    `adapters`, theirs, in their parts.
    """
    where = execution.placement
    tokens_here = learning.micro_batch_tokens and learning.micro_batch_tokens // where.shards

    def differentiate(weights, batch: Experience, token_weights, *, adapters=None):
        micro = _local_micro_batch(learning.micro_batch, batch.mask.shape[0], where)
        # For this device's rows; the noise is measured between micro-batches of all devices.
        here = {"micro_batch": micro, "micro_batch_tokens": tokens_here}
        local_learning = replace(learning, noise_scale=False, **here)

        def local(weights, rows, adapters=None):
            forward = partial(score, execution=execution, buffer=tokens_here)
            sums = None if adapters else gradient_sums(weights, execution=execution)
            gradients, tokens = learner.gradient_rows(
                forward,
                weights,
                *rows,
                learning=local_learning,
                sums=sums,
                adapters=adapters,
                agree=partial(_largest, where),
            )
            return tokens, gradients

        trained = () if adapters is None else (adapters,)
        call = differentiating(execution, on, local)
        deal, back = _dealing(batch.rollout, where, tokens_here)
        tokens, gradients = call(weights, deal((batch, token_weights)), *trained)
        return gradients, back(tokens)

    return differentiate


def _largest(where: Placement, number: jax.Array) -> jax.Array:
    """i32[], the largest of every device's."""
    return jnp.max(collectives.whole_rows(number[None], where))


def _dealing(
    rollout: Rollout, where: Placement, tokens: int | None
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """What orders trees of rows so that every device has about as many tokens, and the way back."""
    if tokens is None or where.shards == 1:
        return lambda tree: tree, lambda tree: tree

    def at(order: jax.Array, tree: Any) -> Any:
        return jax.tree.map(lambda x: x[order], tree)

    order = deal(whole_lengths(rollout), where.shards)
    return partial(at, order), partial(at, jnp.argsort(order))


def differentiating(execution: Execution, on: Mesh, local: Callable) -> Callable:
    """(weights, rows) -> the arrays of every row, whole, and the gradient, in parts.

    `local` does the same for a device's own rows; its gradient is that of a sum over rows. With
    adapters as a third argument, it is theirs.
    """
    where = execution.placement

    def differentiate(weights, rows, *adapters):
        if adapters and execution.lora is not None:
            leaf_axes = low_rank.axes(execution.config, execution.lora)
        else:
            leaf_axes = weight_axes(execution.config, execution.numerics)
            if shares_gradient(execution):
                del leaf_axes["head"]

        def summed(*args):
            tokens, gradients = local(*args)
            gradients = collectives.sum_copies(gradients, leaf_axes, where)
            return collectives.whole_rows(tokens, where), gradients

        in_parts = placement.specs(leaf_axes)
        ins = (_weights(execution), _ROWS, *(in_parts for _ in adapters))
        return _over(on, summed, ins, (_WHOLE, in_parts))(weights, rows, *adapters)

    return differentiate


def gradient_norm(execution: Execution, on: Mesh) -> Callable[..., jax.Array]:
    """(gradient of what is trained) -> f32[], its norm, summed in a fixed order."""
    leaf_axes = low_rank.trained_axes(execution.config, execution.lora)
    local = partial(collectives.norm, axes=leaf_axes, placement=execution.placement)
    return _over(on, local, (placement.specs(leaf_axes),), _WHOLE)


def check_rows(rows: int, where: Placement, what: str) -> None:
    """Raises `InputError` if rows cannot be split evenly over the devices."""
    if rows % where.shards:
        raise InputError(
            f"placement: {where.shards_text} must divide the {rows} sequences of a batch ({what})"
        )


def _local_micro_batch(micro_batch: int | None, rows: int, where: Placement) -> int | None:
    """A device's rows of each micro-batch of the learner, which has at most `rows`."""
    check_rows(rows, where, "of the learner")
    if micro_batch is None:
        return None
    micro_batch = min(micro_batch, rows)
    check_rows(micro_batch, where, "learner.micro_batch")
    return micro_batch // where.shards


def _weights(execution: Execution) -> Any:
    return placement.specs(weight_axes(execution.config, execution.numerics))


def _over(on: Mesh, local: Callable, ins: tuple, outs: Any) -> Callable:
    # JAX cannot see that our gathers make an array whole, so its check is off.
    call = cast(
        Callable, jax.shard_map(local, mesh=on, in_specs=ins, out_specs=outs, check_vma=False)
    )
    whole = NamedSharding(on, _WHOLE)

    def apply(*args):
        # Rows are whole up to here. Without the constraint the partitioner would also split what
        # they are computed from, and gather for every statistic of it.
        constrained = (
            jax.lax.with_sharding_constraint(arg, whole) if spec is _ROWS else arg
            for arg, spec in zip(args, ins, strict=True)
        )
        return call(*constrained)

    return apply
