"""Policy losses, token by token, of log-probs and advantages. No model, no state.

B sequences, R the longest response. Every loss is a function of

- `log_probs`: f32[B, R], the current policy's; the gradient flows through these alone
- `old_log_probs`: f32[B, R], those of the policy that the ratio is taken against
- `advantages`: f32[B, R]
- `mask`: bool[B, R], True on response tokens

and of its options, keyword-only, whose defaults are its paper's. It returns a `PolicyLoss`. The
caller has set log-probs off the mask to 0 and stopped the gradient of all but `log_probs`.
Below, `d_t = log pi_t - log pi_old_t` and `r_t = exp(d_t)`, with d clipped to ±20; A is the
advantage, sg stops the gradient. A log-prob that is NaN makes its token's loss NaN.

Losses of whole sequences (gspo, gmpo) have a token form here, so that an aggregation's weights and
a correction's coefficients act on tokens everywhere. The covariance losses (clip_cov, kl_cov) need
to know which tokens of the whole batch they act on: the functions in `SELECTIONS` find them.
"""

from tim_jax.objectives.losses.base import KL, PolicyLoss, kl_estimate
from tim_jax.objectives.losses.covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from tim_jax.objectives.losses.ratio import (
    cispo,
    clip,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    reinforce,
    sapo,
)
from tim_jax.objectives.losses.registry import (
    LOSSES,
    SELECTIONS,
    Loss,
    check_options,
    options,
    policy_loss,
    select,
    uses_ratio,
)

__all__ = [
    "KL",
    "LOSSES",
    "SELECTIONS",
    "Loss",
    "PolicyLoss",
    "check_options",
    "cispo",
    "clip",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "gmpo",
    "gspo",
    "kl_cov",
    "kl_estimate",
    "options",
    "policy_loss",
    "reinforce",
    "sapo",
    "select",
    "select_clip_cov",
    "select_kl_cov",
    "uses_ratio",
]
