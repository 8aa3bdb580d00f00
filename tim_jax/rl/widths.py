"""Micro-batches that compute less padding: rows by length, each part as wide as it needs.

Responses are padded to the longest, and where lengths are skewed most of what a forward computes is
padding. Here rows are taken in the order of their lengths, and each micro-batch is cut to the
narrowest of a few widths that holds it. All widths are in one compiled program, which chooses as it
runs. Padding changes no bit of a token's log-prob, so neither does this.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tim_jax.common.types import Rollout
from tim_jax.rl.types import Experience, split_rows

# Arrays [B, R] of these, if they are there.
_OF_ROLLOUT = ("responses", "log_probs", "drawn_log_probs", "hidden", "drawn")
_OF_EXPERIENCE = (
    "mask",
    "old_log_probs",
    "coefficients",
    "kept",
    "reference_log_probs",
    "selected",
)


def ladder(longest: int, count: int) -> list[int]:
    """At most `count` widths, ascending, in equal steps up to `longest`."""
    return sorted({-(-longest * i // count) for i in range(1, count + 1)})


def cut_rollout(rollout: Rollout, width: int) -> Rollout:
    """A rollout whose responses are at most `width` tokens, without the padding beyond."""
    wide = {name: getattr(rollout, name) for name in _OF_ROLLOUT}
    cut = {k: None if x is None else x[:, :width] for k, x in wide.items()}
    if rollout.routes is not None:  # by position, the prompt's first
        cut["routes"] = rollout.routes[:, : rollout.prompts.shape[1] + width]
    return replace(rollout, **cut)


def cut_experience(batch: Experience, width: int) -> Experience:
    """The same of experience."""
    wide = {name: getattr(batch, name) for name in _OF_EXPERIENCE}
    wide = {k: None if x is None else x[:, :width] for k, x in wide.items()}
    if batch.advantages.ndim == 2:
        wide["advantages"] = batch.advantages[:, :width]
    return replace(batch, rollout=cut_rollout(batch.rollout, width), **wide)


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    rows: Any,
    lengths: jax.Array,
    *,
    size: int,
    widths: list[int],
    cut: Callable[[Any, int], Any],
    agree: Callable[[jax.Array], jax.Array],
) -> tuple[Any, Any]:
    """`lax.scan` over micro-batches of `size` rows, shortest first, each cut to a width.

    Args:
      step: (carry, rows [size, ...] cut to a width w) -> (carry, tree of arrays [size, w]).
      rows: a tree of arrays [B, ...].
      lengths: i32[B], of the responses.
      widths: ascending; the last holds every response.
      cut: (rows, width) -> rows.
      agree: i32[B / size], the longest response of each micro-batch here -> the longest of those
        that other devices have beside it: all of them must compute at one width.

    Returns:
      The carry, and the arrays as [B, R] in the order of `rows`, 0 beyond the widths.
    """
    order = jnp.argsort(lengths)
    back = jnp.argsort(order)
    parts = split_rows(jax.tree.map(lambda x: x[order], rows), size)
    longest = agree(jnp.max(lengths[order].reshape(-1, size), axis=1))
    narrowest = jnp.searchsorted(jnp.asarray(widths), longest)

    def at(width: int, carry: Any, part: Any) -> tuple[Any, Any]:
        carry, values = step(carry, cut(part, width))
        return carry, jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, widths[-1] - width))), values)

    branches = [partial(at, width) for width in widths]

    def one(carry: Any, part: Any) -> tuple[Any, Any]:
        of_part, index = part
        return jax.lax.switch(index, branches, carry, of_part)

    carry, values = jax.lax.scan(one, carry, (parts, narrowest))
    return carry, jax.tree.map(lambda x: x.reshape(len(lengths), -1)[back], values)
