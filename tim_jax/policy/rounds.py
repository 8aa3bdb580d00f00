"""Sampling in rounds, so that memory need only hold the keys and values of some sequences.

A response depends on its prompt and its number in the group, not on the batch it is drawn in. So
the bits of a step do not depend on the number of rounds it is drawn in.
"""

from collections.abc import Callable
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp

from tim_jax.errors import InputError
from tim_jax.types import Prompts, Rollout


def split(prompts: int, samples: int, parts: int) -> tuple[int, int]:
    """(blocks of the prompts, shares of a prompt's samples) that make equal `parts` of both.

    Prompts are split as far as they go, then the samples of a prompt. `parts` must divide
    `prompts` x `samples`.
    """
    blocks = gcd(prompts, parts)
    return blocks, parts // blocks


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


def sampling(
    draw: Callable[..., Rollout], *, samples: int, micro_batch: int | None
) -> Callable[..., Rollout]:
    """Returns (weights, prompts, key, first=None, **options) -> rollout: `draw` in rounds.

    Args:
      draw: `sampler.sample`, or that of a sampler that differs.
      samples: responses per prompt.
      micro_batch: sequences of a round; None: one round.

    Raises:
      InputError: when called, if `micro_batch` does not divide the sequences.
    """

    def sample(weights, prompts: Prompts, key, first=None, **options) -> Rollout:
        count = prompts.tokens.shape[0]
        rounds = _rounds(count * samples, micro_batch)
        if rounds == 1:
            return draw(weights, prompts, key, samples=samples, first=first, **options)
        blocks, shares = split(count, samples, rounds)
        size = samples // shares
        parts = jax.tree.map(
            lambda x: x.reshape(rounds, -1, *x.shape[1:]), repeated(prompts, blocks, shares)
        )
        firsts = jnp.tile(jnp.arange(shares) * size, blocks) + (0 if first is None else first)

        def one(part) -> Rollout:
            prompts, first = part
            return draw(weights, prompts, key, samples=size, first=first, **options)

        rollouts = jax.lax.map(one, (parts, firsts))
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollouts)
        return in_order(rows, blocks, shares, size)

    return sample


def _rounds(rows: int, micro_batch: int | None) -> int:
    if micro_batch is None:
        return 1
    if micro_batch < 1 or rows % micro_batch:
        raise InputError(
            f"sampler: micro_batch = {micro_batch} must divide the {rows} sequences drawn together"
        )
    return rows // micro_batch
