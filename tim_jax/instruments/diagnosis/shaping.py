"""Logits as a request shapes them: bias, penalties, and tokens that are left out."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.common.types import Rollout
from tim_jax.instruments.diagnosis.declared import Distribution
from tim_jax.policy import scoring

LEFT_OUT = -1e5  # a logit that no temperature makes likely, and of which products are finite


class Shapes(NamedTuple):
    """`declared.Shaping`s of B responses."""

    repetition: jax.Array  # f32[B]
    presence: jax.Array  # f32[B]
    frequency: jax.Array  # f32[B]
    margin: jax.Array  # f32[B], logits this far below the largest are left out: -T log(min-p)
    min_tokens: jax.Array  # i32[B]
    bias: jax.Array  # f32[B, V], or f32[B, 1] if there is none; LEFT_OUT for tokens not allowed


def arrays(declared: Sequence[Distribution], rows: int, vocabulary: int) -> Shapes:
    """The shapes of `rows` responses; the last one's are repeated."""
    filled = [*declared, *[declared[-1]] * (rows - len(declared))]
    all_of = [one.shaping for one in filled]
    temperatures = np.asarray([one.temperature or 1.0 for one in filled], np.float32)
    biased = any(one.bias or one.allowed for one in all_of)
    bias = np.zeros((rows, vocabulary if biased else 1), np.float32)
    for row, one in enumerate(all_of):
        if one.allowed:
            bias[row] = LEFT_OUT
            bias[row, list(one.allowed)] = 0.0
        for token, value in one.bias:
            bias[row, token] += value

    def column(name: str, dtype: type = np.float32) -> np.ndarray:
        return np.asarray([getattr(one, name) for one in all_of], dtype)

    with np.errstate(divide="ignore"):
        margin = np.minimum(-np.log(column("min_p")) * temperatures, -LEFT_OUT)
    found = (column("repetition"), column("presence"), column("frequency"), margin)
    return Shapes(*map(jnp.asarray, (*found, column("min_tokens", np.int32), bias)))


def shape(
    logits: jax.Array,
    tokens: jax.Array,
    places: jax.Array,
    *,
    rollout: Rollout,
    shapes: Shapes,
    stop_tokens: tuple[int, ...],
) -> jax.Array:
    """The logits f32[N, V] that i32[N] tokens at `places` b R + t of a rollout [B, R] are drawn by.

    The token itself is never left out, as in `policy.distribution`.
    """
    row, place = places // rollout.responses.shape[1], places % rollout.responses.shape[1]
    before, inside = _counts(logits.shape, row, place, rollout)
    z = logits + shapes.bias[row]
    factor = jnp.where(before, shapes.repetition[row][:, None], 1.0)
    z = jnp.where(z > 0, z / factor, z * factor)
    z -= shapes.frequency[row][:, None] * inside
    z -= shapes.presence[row][:, None] * (inside > 0).astype(jnp.float32)
    early = place < shapes.min_tokens[row]
    stops = jnp.isin(jnp.arange(logits.shape[1]), jnp.asarray(stop_tokens, jnp.int32))
    own = jnp.arange(logits.shape[1])[None, :] == tokens[:, None]
    z = jnp.where(early[:, None] & stops[None, :] & ~own, LEFT_OUT, z)
    rare = z < jnp.max(z, axis=-1, keepdims=True) - shapes.margin[row][:, None]
    return jnp.where(rare & ~own, jnp.minimum(z, LEFT_OUT), z)


def _counts(
    size: tuple[int, ...], row: jax.Array, place: jax.Array, rollout: Rollout
) -> tuple[jax.Array, jax.Array]:
    """[N, V]: whether a token stands before the place, and how often in the response."""
    history = scoring.sequences(rollout)[row]
    at = jnp.arange(history.shape[1])[None, :] - rollout.prompt_lengths[row][:, None]
    past = at < place[:, None]
    numbers = jnp.arange(size[0])[:, None]
    zeros = jnp.zeros(size, jnp.float32)
    before = zeros.at[numbers, history].add(past.astype(jnp.float32)) > 0
    return before, zeros.at[numbers, history].add((past & (at >= 0)).astype(jnp.float32))
