"""Responses in parts: what is drawn so far as prompts, and two parts as one rollout.

A part may be drawn by other weights than the part before. Its keys and values are all made by the
weights that draw it, of every token before it too, as in AReaL (arXiv 2505.24298). So its
log-probs are those of a forward over the whole sequence, to the bit.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from tim_jax.common.types import Prompts, Rollout


def so_far(rollout: Rollout, ids: jax.Array) -> Prompts:
    """A rollout's B sequences as prompts for their next part, names i32[B] and all.

    A prompt's tokens are followed by the response's at once, so the paddings of both come after.
    """
    width, more = rollout.prompts.shape[1], rollout.responses.shape[1]
    position = jnp.arange(width + more)[None, :]
    length = rollout.prompt_lengths[:, None]
    prompt = jnp.pad(rollout.prompts, ((0, 0), (0, more)))
    place = jnp.clip(position - length, 0, more - 1)
    response = jnp.take_along_axis(rollout.responses, place, axis=1)
    tokens = jnp.where(position < length, prompt, response)
    return Prompts(tokens, rollout.prompt_lengths + rollout.lengths, ids)


def joined(first: Rollout, second: Rollout) -> Rollout:
    """`first`, and where it did not finish the tokens that `second` drew after it.

    All responses of `first` that did not finish are as long as the rollout is wide.
    """
    goes_on = ~first.finished

    def both(one: jax.Array, other: jax.Array) -> jax.Array:
        other = jnp.where(goes_on[:, None], other, jnp.zeros_like(other))
        return jnp.concatenate([one, other], axis=1)

    drawn = None
    if first.drawn_log_probs is not None and second.drawn_log_probs is not None:
        drawn = both(first.drawn_log_probs, second.drawn_log_probs)
    return replace(
        first,
        responses=both(first.responses, second.responses),
        lengths=first.lengths + jnp.where(goes_on, second.lengths, 0),
        log_probs=both(first.log_probs, second.log_probs),
        finished=first.finished | second.finished,
        drawn_log_probs=drawn,
    )
