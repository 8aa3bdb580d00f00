"""Corrections of the mismatch between trainer and rollout policy, as optax transforms.

See `blocks` for what a correction is, `recipes` for the named ones, `named` for configurations.
"""

from typing import cast

import jax
import jax.numpy as jnp

from tim_jax.corrections.batch import (
    batch_mean,
    normalise,
    normalise_by_running_mean,
    shrink_denominator,
)
from tim_jax.corrections.blocks import (
    Transform,
    map_coefficients,
    mask_outside,
    mask_probability_difference,
    reject,
    scale_by_ratio,
    scale_by_truncated_ratio,
    veto,
    where_advantage,
)
from tim_jax.corrections.named import BLOCKS, RECIPES, build, needs_whole_batch
from tim_jax.corrections.recipes import (
    dppo,
    error_rejection,
    geometric_mis,
    geometric_rejection,
    geometric_rejection_sequence_tis,
    geometric_rejection_token_tis,
    icepop,
    k3_rejection,
    k3_rejection_token_tis,
    kpop,
    none,
    off_policy_sequence_mask,
    seq_mask_tis,
    sequence_mis,
    sequence_tis,
    sequence_tis_product_rejection,
    token_mis,
    token_tis,
    token_tis_veto,
    trust_region_masking,
    vexact,
)


def coefficients(
    correction: Transform, *, log_ratio: jax.Array, mask: jax.Array, **extra: jax.Array
) -> jax.Array:
    """Returns f32[B, R], the coefficients of a correction without state, from the response mask on.

    `log_ratio` f32[B, R] and `mask` bool[B, R] as in `blocks`; `extra` holds `log_probs`,
    `advantages` and whatever else the chain reads. For a chain with state use `init` and `update`.
    """
    start = mask.astype(jnp.float32)
    result, _ = correction.update(
        start, correction.init(start), log_ratio=log_ratio, mask=mask, **extra
    )
    return cast(jax.Array, result)


__all__ = [
    "BLOCKS",
    "RECIPES",
    "Transform",
    "batch_mean",
    "build",
    "coefficients",
    "dppo",
    "error_rejection",
    "geometric_mis",
    "geometric_rejection",
    "geometric_rejection_sequence_tis",
    "geometric_rejection_token_tis",
    "icepop",
    "k3_rejection",
    "k3_rejection_token_tis",
    "kpop",
    "map_coefficients",
    "mask_outside",
    "mask_probability_difference",
    "needs_whole_batch",
    "none",
    "normalise",
    "normalise_by_running_mean",
    "off_policy_sequence_mask",
    "reject",
    "scale_by_ratio",
    "scale_by_truncated_ratio",
    "seq_mask_tis",
    "sequence_mis",
    "sequence_tis",
    "sequence_tis_product_rejection",
    "shrink_denominator",
    "token_mis",
    "token_tis",
    "token_tis_veto",
    "trust_region_masking",
    "veto",
    "vexact",
    "where_advantage",
]
