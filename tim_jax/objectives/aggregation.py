"""How token losses become one number: the weight of each token, and so the loss's denominator.

A correction says which tokens it rejects (`kept`); whether these leave the denominator is decided
here, for each update's batch.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from tim_jax.common.errors import InputError, check_choice
from tim_jax.numerics.sums import row_count

Aggregation = Literal[
    "token_mean",
    "token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant_length",
]
Denominator = Literal["response", "survivors", "verl"]


def token_weights(
    mask: jax.Array,
    *,
    aggregation: Aggregation,
    max_length: int | None = None,
    kept: jax.Array | None = None,
    denominator: Denominator = "response",
) -> jax.Array:
    """Returns f32[B, R], the weight of each token's loss in the batch's loss; 0 off the mask.

    With N sequences that have a token in the whole batch's mask bool[B, R], and T_i tokens each:

    - token_mean: `1 / sum_i T_i` (DAPO, arXiv 2503.14476, eq. 8)
    - token_sum: 1, so that a larger batch has a larger gradient (verl's `token-sum`)
    - sequence_mean_token_mean: `1 / (N T_i)` (GRPO, arXiv 2402.03300, eq. 3)
    - sequence_mean_token_sum: `1 / N` (the policy gradient of whole sequences)
    - constant_length: `1 / (N max_length)` (Dr. GRPO, arXiv 2503.20783)

    `kept` bool[B, R] are the tokens that no rejection took out (all if None). Which of them count:

    - response: N and T_i of all response tokens, rejected or not (NeMo-RL, OpenRLHF)
    - survivors: N and T_i of the kept tokens, as if the others had never been sampled (slime)
    - verl: T_i of the kept tokens, N of all sequences. So rejection shrinks the denominator of
      token_mean, but not that of sums over sequences. verl's trainer v0 divides so in decoupled
      mode; docs/corrections.md says what its other trainer and its bypass mode do

    Rows without a token (dropped groups) do not count in N. Compute the weights from a whole update
    batch and give each micro-batch its rows. Counts are integers, so sharding changes no bit.

    Raises:
        InputError: an unknown name, `max_length` missing, or shapes that differ.
    """
    check_aggregation(aggregation, max_length)
    check_choice("denominator", denominator, get_args(Denominator))
    check_tokens({"mask": mask, "kept": kept}, mask.shape)
    kept = mask if kept is None else mask & kept
    lengths = row_count(mask if denominator == "response" else kept)
    counted = row_count(kept if denominator == "survivors" else mask) > 0
    sequences = jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1).astype(jnp.float32)
    if aggregation == "token_mean":
        tokens = jnp.maximum(jnp.sum(lengths, dtype=jnp.int32), 1).astype(jnp.float32)
        per_row = jnp.full(lengths.shape, 1.0, jnp.float32) / tokens
    elif aggregation == "token_sum":
        per_row = jnp.ones(lengths.shape, jnp.float32)
    elif aggregation == "sequence_mean_token_mean":
        per_row = 1.0 / (sequences * jnp.maximum(lengths, 1).astype(jnp.float32))
    elif aggregation == "sequence_mean_token_sum":
        per_row = jnp.full(lengths.shape, 1.0, jnp.float32) / sequences
    else:
        per_row = jnp.full(lengths.shape, 1.0, jnp.float32) / (sequences * float(max_length or 1))
    return jnp.where(mask, per_row[:, None], 0.0)


def counts_kept(aggregation: Aggregation, denominator: Denominator) -> bool:
    """True if `token_weights` depend on which tokens are kept."""
    if denominator == "verl":
        return aggregation in ("token_mean", "sequence_mean_token_mean")
    return denominator == "survivors" and aggregation != "token_sum"


def check_tokens(arrays: Mapping[str, jax.Array | None], shape: tuple[int, ...]) -> None:
    """Refuses arrays that are not [B, R]: broadcasting would count them in several tokens."""
    if len(shape) != 2:
        raise InputError(f"the mask has shape {shape}; it must be [batch, tokens]")
    for name, x in arrays.items():
        if x is not None and x.shape != shape:
            raise InputError(f"{name} has shape {x.shape}; it must be that of the mask, {shape}")


def check_aggregation(aggregation: Aggregation, max_length: int | None) -> None:
    """Refuses an unknown name, and 'constant_length' without the length it divides by."""
    check_choice("aggregation", aggregation, get_args(Aggregation))
    if aggregation == "constant_length" and (max_length is None or max_length < 1):
        raise InputError(
            f"max_length is {max_length}; the aggregation 'constant_length' needs the longest"
            " response, at least 1"
        )
