"""Corrections of the mismatch between trainer and rollout policy: functions and optax transforms.

`correct` is the plain function: it takes log-ratios and a mask, and returns coefficients and
metrics (`applying`). `recipes` are the corrections that the literature names, and builds them from
a configuration; `blocks` are what they are made of. `base` says what a correction is, and when it
is evaluated.
"""

from tim_jax.common import inputs
from tim_jax.corrections.applying import (
    Applied as Applied,
    Corrected as Corrected,
    apply as apply,
    block_metrics as block_metrics,
    bound_metrics as bound_metrics,
    clipped_shares as clipped_shares,
    coefficients as coefficients,
    correct as correct,
    correction_metrics as correction_metrics,
    normaliser_metrics as normaliser_metrics,
    sequence_weight_metrics as sequence_weight_metrics,
)
from tim_jax.corrections.base import (
    Block as Block,
    Bounds as Bounds,
    Correction as Correction,
    Effect as Effect,
    Mode as Mode,
    Reads as Reads,
    Stages as Stages,
    chain as chain,
    check as check,
    check_rejecting_first as check_rejecting_first,
    declared as declared,
    join_state as join_state,
    map_coefficients as map_coefficients,
    rejections as rejections,
    scheduled as scheduled,
    split_state as split_state,
    stages as stages,
)
from tim_jax.corrections.blocks import (
    batch_mean as batch_mean,
    mask_outside as mask_outside,
    mask_probability_difference as mask_probability_difference,
    mix_in_adaptively as mix_in_adaptively,
    normalise as normalise,
    normalise_by_running_mean as normalise_by_running_mean,
    reject as reject,
    scale_by_ratio as scale_by_ratio,
    scale_by_truncated_ratio as scale_by_truncated_ratio,
    veto as veto,
    where_advantage as where_advantage,
)
from tim_jax.corrections.recipes import (
    BLOCKS as BLOCKS,
    RECIPES as RECIPES,
    ais as ais,
    build as build,
    dppo as dppo,
    error_rejection as error_rejection,
    geometric_mis as geometric_mis,
    geometric_rejection as geometric_rejection,
    geometric_rejection_sequence_tis as geometric_rejection_sequence_tis,
    geometric_rejection_token_tis as geometric_rejection_token_tis,
    icepop as icepop,
    k3_rejection as k3_rejection,
    k3_rejection_token_tis as k3_rejection_token_tis,
    kpop as kpop,
    none as none,
    off_policy_sequence_mask as off_policy_sequence_mask,
    seq_mask_tis as seq_mask_tis,
    sequence_mis as sequence_mis,
    sequence_tis as sequence_tis,
    sequence_tis_product_rejection as sequence_tis_product_rejection,
    token_mis as token_mis,
    token_tis as token_tis,
    token_tis_veto as token_tis_veto,
    trust_region_masking as trust_region_masking,
    vexact as vexact,
)


def __dir__() -> list[str]:
    return inputs.public(globals())
