"""How sequences lie in the forward that scores them: padded rows, or one buffer without padding.

Both say which rows of the forward predict response tokens, and take what is computed of these back
to [B, R].
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp

from tim_jax.common.types import Rollout
from tim_jax.model.packing import Packing


def sequences(rollout: Rollout) -> jax.Array:
    """i32[B, Tp + R]: each prompt directly followed by its response, position 0 first."""
    prompt_size, response_size = rollout.prompts.shape[1], rollout.responses.shape[1]
    at = jnp.arange(prompt_size + response_size)[None, :]
    after = at - rollout.prompt_lengths[:, None]
    prompt = jnp.pad(rollout.prompts, ((0, 0), (0, response_size)))
    index = jnp.clip(after, 0, response_size - 1)
    response = jnp.take_along_axis(rollout.responses, index, axis=1)
    return jnp.where(after < 0, prompt, response)


@dataclass(frozen=True)
class Padded:
    """B rows of Tp + R tokens."""

    tokens: jax.Array  # i32[B, T]
    positions: jax.Array  # i32[B, T]
    targets: jax.Array  # i32[B, R], the response tokens
    routes: jax.Array | None  # [B, T, L, k]
    supports: jax.Array | None  # i32[B, R, K]
    prompt_lengths: jax.Array  # i32[B]
    packing: ClassVar[None] = None
    used: ClassVar[None] = None

    def predicting(self, x: jax.Array) -> jax.Array:
        """[B, R, ...] of [B, T, ...]: what predicts response token t is at position t - 1."""
        some = partial(jax.lax.dynamic_slice_in_dim, slice_size=self.targets.shape[1], axis=0)
        return jax.vmap(some)(x, self.prompt_lengths - 1)

    def by_response(self, x: jax.Array) -> jax.Array:
        """[B, R] of values of the targets."""
        return x


@dataclass(frozen=True)
class Packed:
    """B sequences one after the other in a buffer of N tokens, the longest first."""

    tokens: jax.Array  # i32[1, N]
    positions: jax.Array  # i32[1, N]
    targets: jax.Array  # i32[N], the response tokens, one after the other
    routes: jax.Array | None  # [1, N, L, k]
    supports: jax.Array | None  # i32[N, K], of the targets
    packing: Packing
    used: jax.Array  # i32[], how many targets there are
    rows: jax.Array  # i32[N], of the buffer, that predict the targets; N for none
    target: jax.Array  # i32[N], that a row of the buffer predicts; N for none
    responses: jax.Array  # i32[B, R], the places of response tokens among the targets; N for none
    place: jax.Array  # i32[N], of a target in [B * R]; B * R for none

    def predicting(self, x: jax.Array) -> jax.Array:
        """[N, ...] of [1, N, ...]: what predicts the targets; 0 beyond `used`."""
        return _taken(x[0], self.rows, self.target)

    def by_response(self, x: jax.Array) -> jax.Array:
        """[B, R] of values [N] of the targets; 0 beyond a response."""
        return _taken(x, self.responses, self.place)


Layout = Padded | Packed


def padded(rollout: Rollout) -> Padded:
    """The sequences in rows of their own."""
    tokens = sequences(rollout)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    recorded, lengths = (rollout.routes, rollout.supports), rollout.prompt_lengths
    return Padded(tokens, positions, rollout.responses, *recorded, lengths)


def packed(rollout: Rollout, size: int) -> Packed:
    """The sequences in a buffer of `size` tokens, N, which must hold them all.

    A row with no response token is left out. Lengths are not known here: who chooses the rows
    checks that they fit.
    """
    (count, longest), prompts = rollout.responses.shape, rollout.prompt_lengths
    wholes = jnp.where(rollout.lengths > 0, prompts + rollout.lengths, 0)
    order = jnp.argsort(-wholes, stable=True)
    rank = jnp.argsort(order)
    wholes, lengths = wholes[order], rollout.lengths[order]
    starts, ends = _bounds(wholes)
    firsts, lasts = _bounds(lengths)  # of the sequences' responses, among all targets
    used = lasts[-1]
    at = jnp.arange(size, dtype=jnp.int32)

    # Of each row of the buffer.
    number = _owner(ends, at)
    row, inside = order[number], at < ends[-1]
    position = jnp.where(inside, at - starts[number], 0)
    after = position - prompts[row]
    prompt = rollout.prompts[row, jnp.minimum(position, rollout.prompts.shape[1] - 1)]
    response = rollout.responses[row, jnp.clip(after, 0, longest - 1)]
    token = jnp.where(inside, jnp.where(after < 0, prompt, response), 0)
    predicts = inside & (after >= -1) & (after + 1 < lengths[number])
    target = jnp.where(predicts, firsts[number] + after + 1, size)

    # Of each target.
    owner = _owner(lasts, at)
    index, there = at - firsts[owner], at < used
    rows = jnp.where(there, starts[owner] + prompts[order[owner]] - 1 + index, size)
    index = jnp.clip(index, 0, longest - 1)
    place = jnp.where(there, order[owner] * longest + index, count * longest)

    # Of each response token.
    column = jnp.arange(longest)[None, :]
    responses = jnp.where(column < rollout.lengths[:, None], firsts[rank][:, None] + column, size)
    return Packed(
        tokens=token[None],
        positions=position[None],
        targets=rollout.responses[order[owner], index],
        routes=None if rollout.routes is None else rollout.routes[row, position][None],
        supports=None if rollout.supports is None else rollout.supports[order[owner], index],
        packing=Packing(starts, wholes, min(size, rollout.prompts.shape[1] + longest)),
        used=used,
        rows=rows,
        target=target,
        responses=responses,
        place=place,
    )


def _bounds(lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Starts and ends i32[B] of pieces that lie one after the other."""
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    return ends - lengths, ends


def _owner(ends: jax.Array, at: jax.Array) -> jax.Array:
    """i32[N], which piece a place belongs to; behind all, the last."""
    number = jnp.searchsorted(ends, at, side="right").astype(jnp.int32)
    return jnp.minimum(number, ends.shape[0] - 1)


def _taken(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
    """x [n, ...] at `index` [...], 0 where that is out of bounds; each row at most once.

    `inverse` i32[n] is where a row went, in `index` flattened. The gradient is a gather by it: a
    scatter would add, in an order that a device may choose.
    """

    def take(x, index, inverse):
        del inverse
        return x.at[index].get(mode="fill", fill_value=0)

    def backward(residuals, cotangent):
        index, inverse = residuals
        flat = cotangent.reshape(-1, *cotangent.shape[index.ndim :])
        return flat.at[inverse].get(mode="fill", fill_value=0), None, None

    call = jax.custom_vjp(take)
    call.defvjp(lambda x, *where: (take(x, *where), where), backward)
    return call(x, index, inverse)
