"""The few structs that travel between rooms. Shapes are documented here, once.

P: prompts, B: sequences (prompts times samples), Tp: padded prompt length, R: longest response.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
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
    replied, in order, with `drawn` to tell them apart.

    `drawn_log_probs` and `hidden` are there only if a sampler misreports on purpose
    (`tim_jax.mismatch`), `routes` only if a mixture's sampler was asked to record them, `supports`
    only if another engine recorded them.
    """

    prompts: jax.Array  # i32[B, Tp]
    prompt_lengths: jax.Array  # i32[B]
    responses: jax.Array  # i32[B, R], stop token included
    lengths: jax.Array  # i32[B], response tokens, drawn or not; the source of masks
    log_probs: jax.Array  # f32[B, R], 0 beyond `lengths`
    finished: jax.Array  # bool[B], False where the maximum length cut the response
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

    @property
    def mask(self) -> jax.Array:
        """bool[B, R], True on drawn tokens. A sampled pad token is a token: lengths decide."""
        inside = jnp.arange(self.responses.shape[1])[None, :] < self.lengths[:, None]
        inside = inside if self.drawn is None else inside & self.drawn
        return inside if self.hidden is None else inside & ~self.hidden

    @property
    def drawn_lengths(self) -> jax.Array:
        """i32[B], drawn tokens of each response, hidden ones among them."""
        if self.drawn is None:
            return self.lengths
        return jnp.sum(replace(self, hidden=None).mask, axis=1, dtype=jnp.int32)
