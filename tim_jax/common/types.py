"""The few structs that travel between rooms. Shapes are documented here, once.

P: prompts, B: sequences (prompts times samples), Tp: padded prompt length, R: longest response.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


def route_dtype(experts: int) -> jnp.dtype:
    """The narrowest dtype of the numbers of this many experts, for `Rollout.routes`."""
    return jnp.dtype(jnp.uint8 if experts <= 256 else jnp.uint16)


@struct.dataclass
class Prompts:
    """Prompts of different lengths, side by side, left-aligned: position 0 is the first token."""

    tokens: jax.Array  # i32[P, Tp], anything beyond `lengths`
    lengths: jax.Array  # i32[P], at least 1
    ids: jax.Array  # i32[P], names the prompt's random numbers; not its row


def make_key(seed: int) -> jax.Array:
    """The random key of a seed, by Threefry whatever JAX's default generator is.

    A draw by it is the same in every batch. "rbg" and "unsafe_rbg" draw a whole batch of `vmap` by
    the first of its keys.
    """
    return jax.random.key(seed, impl="threefry2x32")


def more_rows(x: Any, parts: int, wanted: int) -> Any:
    """Rows [n * parts, ...] as [n * wanted, ...], with zeros in those that are added."""
    x = x.reshape(-1, parts, *x.shape[1:])
    pad = jnp.pad if isinstance(x, jax.Array) else np.pad
    x = pad(x, [(0, wanted - parts if axis == 1 else 0) for axis in range(x.ndim)])
    return x.reshape(-1, *x.shape[2:])


class Names(NamedTuple):
    """What the random numbers of B rows are keyed by: not their places in the batch."""

    key: jax.Array  # a PRNG key of seed and step
    prompts: jax.Array  # i32[B]
    samples: jax.Array  # i32[B]

    @classmethod
    def of(
        cls, prompts: Prompts, key: jax.Array, samples: int, first: jax.Array | None = None
    ) -> "Names":
        """Those of `samples` rows of each prompt, prompts major.

        `first`: i32[] or i32[P], number of each prompt's first sample; None: 0.
        """
        numbers = jnp.tile(jnp.arange(samples, dtype=jnp.int32), prompts.ids.shape[0])
        if first is not None:
            numbers = numbers + jnp.repeat(jnp.broadcast_to(first, prompts.ids.shape), samples)
        return cls(key, jnp.repeat(prompts.ids, samples), numbers)

    def of_parts(self, parts: int, samples: int) -> "Names":
        """Those of episodes in `parts` rows each. A row that is not the first has the number of a
        sample beyond the `samples` of its prompt, so no two rows draw by the same numbers.
        """
        if parts == 1:
            return self
        numbers = self.samples[:, None] + samples * jnp.arange(parts, dtype=jnp.int32)[None, :]
        return Names(self.key, jnp.repeat(self.prompts, parts), numbers.reshape(-1))

    @property
    def streams(self) -> jax.Array:
        """PRNG keys [B], those of the sampler's draws."""

        def stream(prompt: jax.Array, sample: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(self.key, prompt), sample)

        return jax.vmap(stream)(self.prompts, self.samples)

    def salted(self, salt: int) -> "Names":
        """The names with other random numbers for every `salt`."""
        return self._replace(key=jax.random.fold_in(self.key, salt))


@struct.dataclass
class Rollout:
    """Sampled responses with the log-probs of the distribution that each token was drawn from.

    An episode of several turns is one response: what the policy drew and what its environment
    replied, in order, with `drawn` to tell them apart. Where a chat template rewrites what was
    said, an episode is cut and goes on in another row; then each has `parts` rows, one after the
    other, of which those that it does not need are empty. The conversation that is rendered anew
    begins in the row's prompt and goes on in its response, and counts as not drawn.

    `drawn_log_probs` and `hidden` are there only if a sampler misreports on purpose
    (`tim_jax.mismatch`), `routes` only if a mixture's sampler was asked to record them, `supports`
    only if another engine recorded them.
    """

    prompts: jax.Array  # i32[B, Tp]
    prompt_lengths: jax.Array  # i32[B]
    responses: jax.Array  # i32[B, R], stop token included
    lengths: jax.Array  # i32[B], response tokens, drawn or not; the source of masks
    log_probs: jax.Array  # f32[B, R], 0 beyond `lengths`
    finished: jax.Array  # bool[B], ends with an end token; False where a length cut the response
    drawn_log_probs: jax.Array | None = None  # f32[B, R], where `log_probs` reports others
    hidden: jax.Array | None = None  # bool[B, R], response tokens that the mask leaves out
    # u8 or u16[B, Tp + R, L, k], each position's experts in each layer, the most probable first; a
    # response's positions follow its prompt's, the last token's are not known
    routes: jax.Array | None = None
    # i32[B, R, K], the tokens that each was drawn among, then -1; of -1 alone: among all
    supports: jax.Array | None = None
    # bool[B, R], tokens of the policy; False on replies of an environment, which are only context.
    # None: every token of the response was drawn
    drawn: jax.Array | None = None
    parts: int = struct.field(pytree_node=False, default=1)  # rows of an episode; B = episodes x it

    @property
    def mask(self) -> jax.Array:
        """bool[B, R], True on drawn tokens. A sampled pad token is a token: lengths decide."""
        inside = jnp.arange(self.responses.shape[1])[None, :] < self.lengths[:, None]
        inside = inside if self.drawn is None else inside & self.drawn
        return inside if self.hidden is None else inside & ~self.hidden

    @property
    def drawn_lengths(self) -> jax.Array:
        """i32[B / parts], drawn tokens of each response or episode, hidden ones among them."""
        if self.drawn is None:
            return self.lengths
        mask = replace(self, hidden=None).mask
        return jnp.sum(self.by_episode(mask), axis=1, dtype=jnp.int32)

    @property
    def finished_episodes(self) -> jax.Array:
        """bool[B / parts], `finished` of each episode's last row, which has a prompt.

        A row may have lost its only token, an end token, in what a divergent sampler reports.
        """
        if self.parts == 1:
            return self.finished
        made = self.prompt_lengths > 0
        there, finished = (x.reshape(-1, self.parts) for x in (made, self.finished))
        last = jnp.sum(there, axis=1, keepdims=True, dtype=jnp.int32) - 1
        return jnp.take_along_axis(finished, last, axis=1)[:, 0]

    def by_episode(self, x: jax.Array) -> jax.Array:
        """[B, R] as [B / parts, parts * R]: the rows of an episode one after the other."""
        return x if self.parts == 1 else x.reshape(-1, self.parts * x.shape[1])

    def by_row(self, x: jax.Array) -> jax.Array:
        """Values [B / parts] of episodes, or what `by_episode` gives, as those of their rows."""
        if self.parts == 1:
            return x
        whole = x.ndim == 1
        return jnp.repeat(x, self.parts) if whole else x.reshape(x.shape[0] * self.parts, -1)

    def in_parts(self, parts: int) -> "Rollout":
        """The rollout with this many rows of each episode, no fewer than it has."""
        if parts == self.parts:
            return self
        wider = jax.tree.map(lambda x: more_rows(x, self.parts, parts), self)
        return replace(wider, parts=parts)
