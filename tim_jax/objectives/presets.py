"""Objectives by the names of the literature, each a function of changes to it."""

import dataclasses

from tim_jax.common.errors import check_choice
from tim_jax.objectives.objective import Objective


def grpo(**changes) -> Objective:
    """GRPO (arXiv 2402.03300): group mean and deviation, clip 0.2, mean of means, KL 0.04 by k3."""
    return _build(changes, aggregation="sequence_mean_token_mean", kl_coefficient=0.04)


def dr_grpo(**changes) -> Objective:
    """Dr. GRPO (arXiv 2503.20783): group mean only, sums over the `max_length` to be given."""
    return _build(changes, estimator="dr_grpo", aggregation="constant_length")


def rloo(**changes) -> Objective:
    """RLOO (arXiv 2402.14740): leave-one-out baseline, policy gradient of whole sequences."""
    return _build(
        changes, estimator="rloo", loss="reinforce", aggregation="sequence_mean_token_sum"
    )


def reinforce(**changes) -> Objective:
    """REINFORCE (Williams 1992): the raw reward, policy gradient of whole sequences."""
    return _build(
        changes, estimator="reinforce", loss="reinforce", aggregation="sequence_mean_token_sum"
    )


def reinforce_plus_plus(**changes) -> Objective:
    """REINFORCE++ (arXiv 2501.03262): rewards whitened over the batch, clip 0.2, token mean."""
    return _build(changes, estimator="reinforce_plus_plus")


def dapo(**changes) -> Objective:
    """DAPO (arXiv 2503.14476): GRPO's advantage, clip 0.2 / 0.28, token mean, groups dropped.

    Its dynamic sampling is the loop's (`refills`); its penalty and filter for overlong responses
    are `overlong_cache` and `drop_cut`.
    """
    return _build(changes, clip_high=0.28, drop_uninformative=True)


def gspo(**changes) -> Objective:
    """GSPO (arXiv 2507.18071): GRPO's advantage, sequence ratio clipped at 3e-4 / 4e-4."""
    return _build(changes, loss="gspo", aggregation="sequence_mean_token_mean")


def cispo(**changes) -> Objective:
    """CISPO (arXiv 2506.13585): GRPO's advantage, clipped ratio as a weight, token mean."""
    return _build(changes, loss="cispo")


def sapo(**changes) -> Objective:
    """SAPO (arXiv 2511.20347): GRPO's advantage, soft gates on the ratio, mean of means."""
    return _build(changes, loss="sapo", aggregation="sequence_mean_token_mean")


def gmpo(**changes) -> Objective:
    """GMPO (arXiv 2507.20673): GRPO's advantage, geometric mean of clipped ratios."""
    return _build(changes, loss="gmpo", aggregation="sequence_mean_token_mean")


def dppo(**changes) -> Objective:
    """DPPO (arXiv 2602.04879): GRPO's advantage, trust region of total variation, token mean."""
    return _build(changes, loss="dppo_tv")


PRESETS = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
}


def _build(changes: dict, **defaults) -> Objective:
    options = [field.name for field in dataclasses.fields(Objective)]
    for name in changes:
        check_choice("objective option", name, options)
    loss = defaults.get("loss", Objective.loss)
    if changes.get("loss", loss) != loss:
        defaults.pop("clip_high", None)  # the bound is meant for the preset's own loss
    return Objective(**{**defaults, **changes})
