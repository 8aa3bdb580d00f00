"""The few structs that travel between rooms. Shapes are documented here, once.

P: prompts, B: sequences (prompts times samples), Tp: padded prompt length, R: longest response.
"""

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


@struct.dataclass
class Rollout:
    """Sampled responses with the log-probs of the distribution that each token was drawn from.

    `drawn_log_probs` and `hidden` are there only if a sampler misreports on purpose
    (`tim_jax.mismatch`), `routes` only if a mixture's sampler was asked to record them, `supports`
    only if another engine recorded them.
    """

    prompts: jax.Array  # i32[B, Tp]
    prompt_lengths: jax.Array  # i32[B]
    responses: jax.Array  # i32[B, R], stop token included
    lengths: jax.Array  # i32[B], response tokens; the source of masks
    log_probs: jax.Array  # f32[B, R], 0 beyond `lengths`
    finished: jax.Array  # bool[B], False where the maximum length cut the response
    drawn_log_probs: jax.Array | None = None  # f32[B, R], where `log_probs` reports others
    hidden: jax.Array | None = None  # bool[B, R], response tokens that the mask leaves out
    # u8 or u16[B, Tp + R, L, k], each position's experts in each layer, the most probable first; a
    # response's positions follow its prompt's, the last token's are not known
    routes: jax.Array | None = None
    # i32[B, R, K], the tokens that each was drawn among, then -1; of -1 alone: among all
    supports: jax.Array | None = None

    @property
    def mask(self) -> jax.Array:
        """bool[B, R], True on response tokens. A sampled pad token is a token: lengths decide."""
        inside = jnp.arange(self.responses.shape[1])[None, :] < self.lengths[:, None]
        return inside if self.hidden is None else inside & ~self.hidden
