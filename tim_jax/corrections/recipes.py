"""Corrections by the names of the literature, each one a chain of blocks; and `build`.

Caps and bounds are on r = pi_train / pi_rollout. Each recipe says which pi_train that is: the
trainer's policy at the weights that sampled ("old"), which makes the ratio the mismatch alone, or
the policy at the weights of each update ("current"). In bypass mode there is no old policy, and all
of them read the current one (`base`). Whether a rejected token leaves the loss's denominator is
decided by `Objective.denominator`.

`build` makes a chain of a configuration's tables, each the name of a recipe or block and its
keyword arguments:

corrections = [
  { name = "reject", statistic = "k1", over = "mean", lower = 0.999, upper = 1.001 },
  { name = "token_tis", cap = 2.0 },
]
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from tim_jax.common.errors import InputError, check_choice, did_you_mean
from tim_jax.common.inputs import shown
from tim_jax.corrections.base import (
    Correction,
    chain,
    checked_number,
    declared,
    known_number,
    plain_number,
)
from tim_jax.corrections.blocks import (
    Bound,
    mask_outside,
    mask_probability_difference,
    mix_in_adaptively,
    normalise,
    normalise_by_running_mean,
    reject,
    scale_by_ratio,
    scale_by_truncated_ratio,
    veto,
    where_advantage,
)
from tim_jax.numerics import strict


def none() -> Correction:
    """No correction: coefficients stay the response mask (verl's `disabled`)."""
    return chain()


def token_tis(*, cap: float = 2.0) -> Correction:
    """Token-level truncated importance sampling, `min(r_t, cap)` (Yao et al. 2025; 2602.01826)."""
    return scale_by_truncated_ratio("token", upper=cap)


def sequence_tis(*, cap: float = 2.0) -> Correction:
    """Sequence-level TIS, `min(prod_t r_t, cap)` on every token (Liu et al. 2025)."""
    return scale_by_truncated_ratio("sequence", upper=cap)


def token_mis(*, cap: float = 2.0) -> Correction:
    """Token-level masked importance sampling, `r_t 1[r_t <= cap]` (2602.01826, eq. 6, C = 2)."""
    return chain(scale_by_ratio("token"), mask_outside("token", upper=cap))


def sequence_mis(*, cap: float = 3.0) -> Correction:
    """Sequence-level MIS, `R 1[R <= cap]`, R = prod_t r_t (Liu et al. 2025; TRL's default, 3)."""
    return chain(scale_by_ratio("sequence"), mask_outside("sequence", upper=cap))


def geometric_mis(*, lower: float = 0.999, upper: float = 1.001) -> Correction:
    """MIS with the length-normalised ratio, `g 1[lower <= g <= upper]`, g = exp(mean_t d_t)."""
    return chain(scale_by_ratio("geometric"), mask_outside("geometric", lower=lower, upper=upper))


def icepop(*, lower: float = 0.5, upper: float = 5.0) -> Correction:
    """IcePop, `r_t 1[lower <= r_t <= upper]` (arXiv 2510.18855). The denominator is kept."""
    return chain(scale_by_ratio("token"), mask_outside("token", lower=lower, upper=upper))


def kpop(*, bound: float = 0.1) -> Correction:
    """KPop (Ring-2.6, 2026): IcePop with a region of binary KL, both ways at most `bound`.

    Needs `log_probs`.
    """
    return chain(scale_by_ratio("token"), reject("binary_kl", over="token", upper=bound))


def geometric_rejection(*, lower: float = 0.999, upper: float = 1.001) -> Correction:
    """Keeps sequences with `lower <= exp(mean_t d_t) <= upper`, unweighted (verl's geo_rs)."""
    return reject("k1", over="mean", lower=lower, upper=upper)


def geometric_rejection_token_tis(
    *, lower: float = 0.999, upper: float = 1.001, cap: float = 2.0
) -> Correction:
    """`geometric_rejection` with token TIS on the survivors (verl's geo_rs_token_tis)."""
    return chain(geometric_rejection(lower=lower, upper=upper), token_tis(cap=cap))


def geometric_rejection_sequence_tis(
    *, lower: float = 0.999, upper: float = 1.001, cap: float = 2.0
) -> Correction:
    """`geometric_rejection` with sequence TIS on the survivors (verl's geo_rs_seq_tis)."""
    return chain(geometric_rejection(lower=lower, upper=upper), sequence_tis(cap=cap))


def k3_rejection(*, bound: float = 0.01) -> Correction:
    """Keeps sequences with `mean_t (r_t - 1 - log r_t) <= bound`, unweighted (verl's k3_rs)."""
    return reject("k3", over="mean", upper=bound)


def k3_rejection_token_tis(*, bound: float = 0.01, cap: float = 2.0) -> Correction:
    """`k3_rejection` with token TIS on the survivors (verl's k3_rs_token_tis)."""
    return chain(k3_rejection(bound=bound), token_tis(cap=cap))


def sequence_tis_product_rejection(
    *, cap: float = 2.0, lower: float = 0.5, upper: float = 2.0
) -> Correction:
    """Sequence TIS on sequences whose product ratio is in [lower, upper] (verl's seq_is_rs)."""
    return chain(reject("k1", over="sum", lower=lower, upper=upper), sequence_tis(cap=cap))


def seq_mask_tis(*, lower: float = 0.999, upper: float = 1.002) -> Correction:
    """Geometric filter; survivors keep the raw, untruncated token ratio (NeMo-RL, OpenRLHF)."""
    return chain(reject("k1", over="mean", lower=lower, upper=upper), scale_by_ratio("token"))


def token_tis_veto(*, cap: float = 2.0, threshold: float = 1e-4) -> Correction:
    """Token TIS; a token with `r_t < threshold` rejects its sequence (verl until 2025, slime)."""
    return chain(veto(threshold), token_tis(cap=cap))


def trust_region_masking(
    *, bound: float, statistic: Literal["k3", "divergence"] = "k3"
) -> Correction:
    """Keeps sequences with `max_t D_t <= bound`, unweighted (TRM, arXiv 2512.23075).

    D_t is the k3 surrogate, or with statistic "divergence" the exact KL per token that the caller
    passes as `divergence`. The paper has no one default for the bound.
    """
    return reject(statistic, over="max", upper=bound)


def dppo(*, bound: float = 0.2) -> Correction:
    """DPPO's mask (arXiv 2602.04879; prime-rl): drops a token when the update would widen the gap,

    `A > 0 and pi_train - pi_rollout > bound`, or `A < 0 and pi_train - pi_rollout < -bound`.
    Unweighted, on the policy of each update ("current"). Needs `log_probs` and `advantages`. The
    paper's whole objective, with the ratio as its weight, is the loss `dppo_tv`.
    """
    masks = chain(
        where_advantage("positive", mask_probability_difference(upper=bound)),
        where_advantage("negative", mask_probability_difference(lower=-plain_number(bound))),
    )
    return declared(masks, reads="current")


def off_policy_sequence_mask(*, bound: float = 0.5) -> Correction:
    """DeepSeek-V3.2's off-policy mask: drops a sequence with `A < 0` and `-mean_t d_t > bound`.

    Unweighted, on the policy of each update ("current"); what it drops stays in the denominator.
    Needs `advantages`.
    """
    # exp(-bound) is 0 from 104 on, where nothing would be dropped.
    bound = checked_number("bound", bound, lambda x: 0.0 <= x <= 100.0, "lie in [0, 100]")
    lower = strict.exp(-bound) if isinstance(bound, jax.Array) else np.exp(-bound)
    below = where_advantage("negative", reject("k1", over="mean", lower=lower))
    return declared(below, reads="current", effect="mask")


def error_rejection(*, bound: float = 2.0) -> Correction:
    """Keeps sequences with `mean_t exp|d_t| <= bound` (NeMo-RL's seq_logprob_error_threshold)."""
    return reject("error", over="mean", upper=bound)


def vexact(
    *, cap: float = 2.0, bound: float = 0.001, statistic: Literal["k1", "k3"] = "k1"
) -> Correction:
    """The VeXact paper's best remedy (arXiv 2605.14220, 4.2): token TIS and sequence rejection.

    Truncation at `cap` with rejection at `bound`: for k1 the geometric ratio must lie within
    1 ± bound, for k3 its mean must be at most `bound`. The ratio is trainer over rollout at the
    same weights; on the PPO ratio the paper found it to work less well.
    """
    bound = checked_number("bound", bound, lambda x: 0.0 <= x < 1.0, "lie in [0, 1)")
    lower, upper = (1.0 - bound, 1.0 + bound) if statistic == "k1" else (None, bound)
    rejection = reject(statistic, over="mean", lower=lower, upper=upper)
    return chain(rejection, token_tis(cap=cap))


def ais(*, cap: float = 2.0, kl_scale: float = 0.01) -> Correction:
    """AIS (arXiv 2605.13907): token TIS, mixed in as far as the batch calls for it.

    See `mix_in_adaptively` for the mixture, and for what of it is ours.
    """
    return mix_in_adaptively("token", upper=cap, kl_scale=kl_scale)


# Every function so far is a recipe.
RECIPES: dict[str, Callable[..., Correction]] = {
    name: made
    for name, made in list(vars().items())
    if inspect.isfunction(made) and made.__module__ == __name__
}
BLOCKS: dict[str, Callable[..., Correction]] = {
    block.__name__: block
    for block in (
        *(scale_by_ratio, scale_by_truncated_ratio, mask_outside, reject, veto),
        *(mask_probability_difference, normalise, normalise_by_running_mean, mix_in_adaptively),
    )
}


def build(entries: Iterable[Mapping[str, Any]]) -> Correction:
    """Returns the chain of recipes and blocks named by the entries, in their order.

    An entry is a table with `name` and the keyword arguments of that function. No entries: no
    correction.

    Raises:
        InputError: unknown name or argument, a missing one, or a value that the function refuses.
    """
    return chain(*(_build_one(entry) for entry in entries))


def _build_one(entry: Mapping[str, Any]) -> Correction:
    functions = {**RECIPES, **BLOCKS}
    if not isinstance(entry, Mapping):
        raise InputError(
            f"correction {shown(entry)} is no table; corrections are a list of tables, such as"
            ' [{"name": "token_tis", "cap": 2.0}]'
        )
    if "name" not in entry:
        raise InputError(
            f"correction {dict(entry)!r} has no name; known: {', '.join(sorted(functions))}"
        )
    name, arguments = entry["name"], {k: v for k, v in entry.items() if k != "name"}
    check_choice("correction", name, functions)
    parameters = dict(inspect.signature(functions[name]).parameters)
    parameters.pop("axis_name", None)  # of a mesh axis inside `shard_map`: not for configurations
    for argument in arguments:
        if argument not in parameters:
            hint = did_you_mean(argument, parameters) if parameters else "; it takes none"
            raise InputError(f"correction {name!r} has no argument {argument!r}{hint}")
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument not in arguments:
            raise InputError(f"correction {name!r} needs the argument {argument!r}")
        value = arguments.get(argument)
        numeric = value is not None and parameter.annotation in (float, float | None, Bound)
        number = known_number(value) if numeric else None
        if number is not None and math.isnan(number):
            raise InputError(f"correction {name!r}: {argument} is {value!r}; it must be a number")
    return functions[name](**arguments)
