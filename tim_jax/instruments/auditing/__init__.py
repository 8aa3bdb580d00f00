"""Proves on the machine at hand that sampler and learner give every token the same log-prob bits.

One set of sequences is drawn per distribution; its log-probs are then computed again by learners
and samplers in other batches, micro-batches, paddings and orders, and compared as raw bits over all
response tokens. The learner's log-probs are those inside a value-and-gradient program. Native
numerics run as a control: the comparison must be able to see a difference. `check_gradients` looks
at the compiler, on whose errors sampler and learner may agree.

    results = []
    for result in audit(params, config):
        results.append(result)
    print(to_json(summarise(results, gradients=check_gradients(of_backward(EXACT_F32)))))
"""

from tim_jax.instruments.auditing.cases import (
    PRESETS,
    Again,
    Case,
    Episodes,
    Replies,
    Score,
    Sizes,
    placed_cases,
    placed_episodes,
    placements,
    plain_sampling,
    random_params,
    standard_cases,
)
from tim_jax.instruments.auditing.compiler import GradientResult, check_gradients, of_backward
from tim_jax.instruments.auditing.results import (
    CaseResult,
    Summary,
    Unequal,
    compare,
    summarise,
    table,
    to_json,
    verdict,
)
from tim_jax.instruments.auditing.running import audit, draw_prompts

__all__ = [
    "PRESETS",
    "Again",
    "Case",
    "CaseResult",
    "Episodes",
    "GradientResult",
    "Replies",
    "Score",
    "Sizes",
    "Summary",
    "Unequal",
    "audit",
    "check_gradients",
    "compare",
    "draw_prompts",
    "of_backward",
    "placed_cases",
    "placed_episodes",
    "placements",
    "plain_sampling",
    "random_params",
    "standard_cases",
    "summarise",
    "table",
    "to_json",
    "verdict",
]
