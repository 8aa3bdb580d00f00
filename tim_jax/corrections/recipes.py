"""Corrections by the names of the literature, each one chain of blocks.

Caps and bounds are on r = pi_train / pi_rollout. `shrink` names the loss's aggregation if rejected
tokens are to leave its denominator too, as in verl and slime; None keeps it, as in NeMo-RL. In
chains the rejections come first, so that `shrink_denominator` sees them alone. The same recipe
serves bypass mode (log-ratio of the policy with gradient over the rollout's) and recompute mode
(of the recomputed old policy over the rollout's).
"""

from typing import Literal

import numpy as np
import optax

from tim_jax.corrections.batch import shrink_denominator
from tim_jax.corrections.blocks import (
    Transform,
    mask_outside,
    mask_probability_difference,
    reject,
    scale_by_ratio,
    scale_by_truncated_ratio,
    veto,
    where_advantage,
)
from tim_jax.errors import InputError
from tim_jax.objectives import Aggregation


def none() -> Transform:
    """No correction: coefficients stay the response mask (verl's `disabled`)."""
    return optax.with_extra_args_support(optax.identity())


def token_tis(*, cap: float = 2.0) -> Transform:
    """Token-level truncated importance sampling, `min(r_t, cap)` (Yao et al. 2025; 2602.01826)."""
    return optax.chain(scale_by_truncated_ratio("token", upper=cap))


def sequence_tis(*, cap: float = 2.0) -> Transform:
    """Sequence-level TIS, `min(prod_t r_t, cap)` on every token (Liu et al. 2025)."""
    return optax.chain(scale_by_truncated_ratio("sequence", upper=cap))


def token_mis(*, cap: float = 2.0) -> Transform:
    """Token-level masked importance sampling, `r_t 1[r_t <= cap]` (2602.01826, eq. 6, C = 2)."""
    return optax.chain(scale_by_ratio("token"), mask_outside("token", upper=cap))


def sequence_mis(*, cap: float = 3.0) -> Transform:
    """Sequence-level MIS, `R 1[R <= cap]`, R = prod_t r_t (Liu et al. 2025; TRL's default, 3)."""
    return optax.chain(scale_by_ratio("sequence"), mask_outside("sequence", upper=cap))


def geometric_mis(*, lower: float = 0.999, upper: float = 1.001) -> Transform:
    """MIS with the length-normalised ratio, `g 1[lower <= g <= upper]`, g = exp(mean_t d_t)."""
    return optax.chain(
        scale_by_ratio("geometric"), mask_outside("geometric", lower=lower, upper=upper)
    )


def icepop(*, lower: float = 0.5, upper: float = 5.0) -> Transform:
    """IcePop, `r_t 1[lower <= r_t <= upper]` (arXiv 2510.18855). The denominator is kept."""
    return optax.chain(scale_by_ratio("token"), mask_outside("token", lower=lower, upper=upper))


def kpop(*, bound: float = 0.1) -> Transform:
    """KPop (Ring-2.6, 2026): IcePop with a region of binary KL, both ways at most `bound`.

    Needs `log_probs`.
    """
    return optax.chain(scale_by_ratio("token"), reject("binary_kl", over="token", upper=bound))


def geometric_rejection(
    *, lower: float = 0.999, upper: float = 1.001, shrink: Aggregation | None = None
) -> Transform:
    """Keeps sequences with `lower <= exp(mean_t d_t) <= upper`, unweighted (verl's geo_rs)."""
    return optax.chain(*_rejection("k1", "mean", (lower, upper), shrink))


def geometric_rejection_token_tis(
    *,
    lower: float = 0.999,
    upper: float = 1.001,
    cap: float = 2.0,
    shrink: Aggregation | None = None,
) -> Transform:
    """`geometric_rejection` with token TIS on the survivors (verl's geo_rs_token_tis)."""
    return optax.chain(
        *_rejection("k1", "mean", (lower, upper), shrink),
        scale_by_truncated_ratio("token", upper=cap),
    )


def geometric_rejection_sequence_tis(
    *,
    lower: float = 0.999,
    upper: float = 1.001,
    cap: float = 2.0,
    shrink: Aggregation | None = None,
) -> Transform:
    """`geometric_rejection` with sequence TIS on the survivors (verl's geo_rs_seq_tis)."""
    return optax.chain(
        *_rejection("k1", "mean", (lower, upper), shrink),
        scale_by_truncated_ratio("sequence", upper=cap),
    )


def k3_rejection(*, bound: float = 0.01, shrink: Aggregation | None = None) -> Transform:
    """Keeps sequences with `mean_t (r_t - 1 - log r_t) <= bound`, unweighted (verl's k3_rs)."""
    return optax.chain(*_rejection("k3", "mean", (None, bound), shrink))


def k3_rejection_token_tis(
    *, bound: float = 0.01, cap: float = 2.0, shrink: Aggregation | None = None
) -> Transform:
    """`k3_rejection` with token TIS on the survivors (verl's k3_rs_token_tis)."""
    return optax.chain(
        *_rejection("k3", "mean", (None, bound), shrink),
        scale_by_truncated_ratio("token", upper=cap),
    )


def sequence_tis_product_rejection(
    *,
    cap: float = 2.0,
    lower: float = 0.5,
    upper: float = 2.0,
    shrink: Aggregation | None = None,
) -> Transform:
    """Sequence TIS on sequences whose product ratio is in [lower, upper] (verl's seq_is_rs)."""
    return optax.chain(
        *_rejection("k1", "sum", (lower, upper), shrink),
        scale_by_truncated_ratio("sequence", upper=cap),
    )


def seq_mask_tis(
    *, lower: float = 0.999, upper: float = 1.002, shrink: Aggregation | None = None
) -> Transform:
    """Geometric filter; survivors keep the raw, untruncated token ratio (NeMo-RL, OpenRLHF)."""
    return optax.chain(*_rejection("k1", "mean", (lower, upper), shrink), scale_by_ratio("token"))


def token_tis_veto(
    *, cap: float = 2.0, threshold: float = 1e-4, shrink: Aggregation | None = None
) -> Transform:
    """Token TIS; a token with `r_t < threshold` rejects its sequence (verl until 2025, slime)."""
    return optax.chain(
        veto(threshold), *_shrink(shrink), scale_by_truncated_ratio("token", upper=cap)
    )


def trust_region_masking(
    *,
    bound: float,
    statistic: Literal["k3", "divergence"] = "k3",
    shrink: Aggregation | None = None,
) -> Transform:
    """Keeps sequences with `max_t D_t <= bound`, unweighted (TRM, arXiv 2512.23075).

    D_t is the k3 surrogate, or with statistic "divergence" the exact KL per token that the caller
    passes as `divergence`. The paper has no one default for the bound.
    """
    return optax.chain(*_rejection(statistic, "max", (None, bound), shrink))


def dppo(*, bound: float = 0.2) -> Transform:
    """DPPO's mask (arXiv 2602.04879; prime-rl): drops a token when the update would widen the gap,

    `A > 0 and pi_train - pi_rollout > bound`, or `A < 0 and pi_train - pi_rollout < -bound`.
    Unweighted. Needs `log_probs` and `advantages`.
    """
    return optax.chain(
        where_advantage("positive", mask_probability_difference(upper=bound)),
        where_advantage("negative", mask_probability_difference(lower=-bound)),
    )


def off_policy_sequence_mask(*, bound: float = 0.5, shrink: Aggregation | None = None) -> Transform:
    """DeepSeek-V3.2's off-policy mask: drops a sequence with `A < 0` and `-mean_t d_t > bound`.

    Unweighted. Needs `advantages`.
    """
    if not bound >= 0.0:
        raise InputError(f"bound is {bound}; it must be 0 or more")
    lower = float(np.exp(-bound))
    return optax.chain(
        where_advantage("negative", reject("k1", over="mean", lower=lower)), *_shrink(shrink)
    )


def error_rejection(*, bound: float = 2.0, shrink: Aggregation | None = None) -> Transform:
    """Keeps sequences with `mean_t exp|d_t| <= bound` (NeMo-RL's seq_logprob_error_threshold)."""
    return optax.chain(*_rejection("error", "mean", (None, bound), shrink))


def vexact(
    *,
    cap: float = 2.0,
    bound: float = 0.001,
    statistic: Literal["k1", "k3"] = "k1",
    shrink: Aggregation | None = None,
) -> Transform:
    """The VeXact paper's best remedy (arXiv 2605.14220, 4.2): token TIS and sequence rejection.

    Truncation at `cap` with rejection at `bound`: for k1 the geometric ratio must lie within
    1 ± bound, for k3 its mean must be at most `bound`. The ratio is trainer over rollout at the
    same weights; on the PPO ratio the paper found it to work less well.
    """
    if not 0.0 <= bound < 1.0:
        raise InputError(f"bound is {bound}; it must lie in [0, 1)")
    bounds = (1.0 - bound, 1.0 + bound) if statistic == "k1" else (None, bound)
    return optax.chain(
        *_rejection(statistic, "mean", bounds, shrink),
        scale_by_truncated_ratio("token", upper=cap),
    )


def _rejection(statistic, over, bounds, shrink) -> tuple[Transform, ...]:
    lower, upper = bounds
    return (reject(statistic, over=over, lower=lower, upper=upper), *_shrink(shrink))


def _shrink(aggregation: Aggregation | None) -> tuple[Transform, ...]:
    return () if aggregation is None else (shrink_denominator(aggregation),)
