"""Building blocks of corrections, each an optax transform over the token coefficients.

With a policy loss `L = sum_t w_t c_t l_t`, where `l_t` depends on `log pi(a_t)` and no gradient
flows through the coefficient `c_t`, the gradient with respect to `log pi(a_t)` is linear in `c_t`.
So a correction maps coefficients to coefficients: `updates` is the f32[B, R] array of them (to
begin with, the response mask) or a pytree of such arrays, each a batch of its own. Extra arguments:

- `log_ratio`: f32[B, R], trainer's minus rollout's log-prob of each token
- `mask`: bool[B, R], True on response tokens; coefficients elsewhere become 0
- `log_probs` (f32[B, R], the trainer's), `advantages` (f32[B] or f32[B, R]), `divergence`
  (f32[B, R]): only where a block says so. Unknown extras are ignored

Every bound is a bound on the ratio r = pi_train / pi_rollout or on a named statistic of it, never
on the running coefficient; so all blocks that only multiply commute. Order matters for three:
`normalise`, `normalise_by_running_mean` and `shrink_denominator` look at the coefficients so far.
Bounds must leave the on-policy ratio alone, so that zero mismatch gives coefficients of exactly 1.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tim_jax.corrections import ratios
from tim_jax.corrections.ratios import Level, Over, Statistic, check_choice
from tim_jax.errors import InputError

Sign = Literal["positive", "negative"]
Transform = optax.GradientTransformationExtraArgs


def scale_by_ratio(level: Level = "token") -> Transform:
    """Multiplies by the importance ratio at a level (see `ratios.ratio`), not truncated.

    Unbiased at level sequence (arXiv 2602.01826, eq. 4), up to the bound of e^20, and of a variance
    that grows with the length; use `scale_by_truncated_ratio` or add `mask_outside`.
    """
    check_choice("level", level, Level)

    def scale(coefficients, mask, log_ratio):
        return coefficients * ratios.ratio(log_ratio, mask, level)

    return map_coefficients(f"scale_by_ratio({level!r})", scale, needs=("log_ratio",))


def scale_by_truncated_ratio(
    level: Level = "token", *, upper: float, lower: float | None = None
) -> Transform:
    """Multiplies by `min(ratio, upper)`, or by the ratio clipped to [lower, upper] (TIS).

    Yao et al. 2025; arXiv 2602.01826, eq. 5. With `lower` it is the two-sided form of OpenRLHF and
    slime, without it that of verl and tunix.
    """
    check_choice("level", level, Level)
    check_bounds(lower, upper, what="the ratio")

    def scale(coefficients, mask, log_ratio):
        return coefficients * jnp.clip(ratios.ratio(log_ratio, mask, level), lower, upper)

    return map_coefficients("scale_by_truncated_ratio", scale, needs=("log_ratio",))


def mask_outside(
    level: Level = "token", *, lower: float | None = None, upper: float | None = None
) -> Transform:
    """Zeroes the coefficients of tokens, or of sequences, whose ratio is outside [lower, upper].

    With `scale_by_ratio` at the same level this is MIS (arXiv 2602.01826, eq. 6) or, two-sided at
    level token, IcePop (arXiv 2510.18855). The bounds belong to the interval.
    """
    check_choice("level", level, Level)
    check_bounds(lower, upper, what="the ratio")

    def keep(coefficients, mask, log_ratio):
        inside = _inside(ratios.ratio(log_ratio, mask, level), lower, upper)
        return jnp.where(inside, coefficients, 0.0)

    return map_coefficients("mask_outside", keep, needs=("log_ratio",))


def reject(
    statistic: Statistic,
    *,
    over: Over,
    lower: float | None = None,
    upper: float | None = None,
) -> Transform:
    """Zeroes tokens (`over="token"`) or whole sequences whose statistic is outside [lower, upper].

    `over` says how the statistic of a sequence comes from its tokens': sum, mean or max (max: every
    token's). See `ratios.token_statistic` for the statistics. For k1 the bounds are bounds on the
    ratio `exp(-k1)`: over sum on the product, over mean on the geometric ratio, over max on every
    token's. For k2, k3, error, binary_kl and divergence there is an upper bound only.

    Note that verl compares `k1 = -log r` with the logarithms of its bounds: its "0.6_1.6" is
    `lower=1/1.6, upper=1/0.6` here.
    """
    check_choice("statistic", statistic, Statistic)
    check_choice("over", over, Over)
    _check_statistic_bounds(statistic, over, lower, upper)
    needs = {"binary_kl": ("log_ratio", "log_probs"), "divergence": ("log_ratio", "divergence")}

    def keep(coefficients, mask, log_ratio, other=None):
        extra = {statistic: other} if statistic == "divergence" else {"log_probs": other}
        tokens = ratios.token_statistic(statistic, log_ratio, **extra)
        inside = _inside_statistic(tokens, mask, statistic, over, (lower, upper))
        return jnp.where(inside, coefficients, 0.0)

    return map_coefficients(
        f"reject({statistic!r})", keep, needs=needs.get(statistic, ("log_ratio",))
    )


def veto(threshold: float = 1e-4) -> Transform:
    """Zeroes every sequence with a token whose ratio is below `threshold` (verl until 2025, slime).

    The ratio is not held within ±20 here: thresholds down to 1e-30 mean what they say.
    """
    if not 0.0 < _number(threshold) < 1.0:
        raise InputError(f"veto threshold is {threshold}; it must lie in (0, 1)")
    limit = float(np.log(threshold))

    def keep(coefficients, mask, log_ratio):
        fatal = jnp.any(mask & (log_ratio < limit), axis=-1, keepdims=True)
        return jnp.where(fatal, 0.0, coefficients)

    return map_coefficients("veto", keep, needs=("log_ratio",))


def mask_probability_difference(
    *, lower: float | None = None, upper: float | None = None
) -> Transform:
    """Zeroes tokens whose `pi_train - pi_rollout` is outside [lower, upper]. Needs `log_probs`.

    A difference of probabilities, not of their logarithms: blind to rare tokens, whose ratio may be
    large while hardly any mass moves (DPPO, arXiv 2602.04879).
    """
    if lower is None and upper is None:
        raise InputError("mask_probability_difference has no bound; give lower, upper or both")
    for name, bound, good in (("lower", lower, (-1.0, 0.0)), ("upper", upper, (0.0, 1.0))):
        if bound is not None and not good[0] <= _number(bound) <= good[1]:
            raise InputError(
                f"{name} is {bound}; as a bound on the probability difference it must lie in"
                f" [{good[0]:g}, {good[1]:g}]"
            )

    def keep(coefficients, mask, log_ratio, log_probs):
        del mask
        train, rollout = ratios.probabilities(log_probs, log_ratio)
        return jnp.where(_inside(train - rollout, lower, upper), coefficients, 0.0)

    return map_coefficients("mask_probability_difference", keep, needs=("log_ratio", "log_probs"))


def where_advantage(sign: Sign, inner: optax.GradientTransformation) -> Transform:
    """Applies `inner` where the advantage is above (or below) 0 and leaves the rest as it is.

    Needs `advantages`. `inner` sees the whole batch; a row statistic of it is over the whole row.
    """
    check_choice("sign", sign, Sign)
    inner = optax.with_extra_args_support(inner)

    def choose(coefficients, mask, advantages, changed):
        del mask
        chosen = advantages > 0.0 if sign == "positive" else advantages < 0.0
        return jnp.where(chosen[:, None] if chosen.ndim == 1 else chosen, changed, coefficients)

    def update(updates, state, params=None, **extra):
        mask, advantages = (take_extra(extra, x, "where_advantage") for x in ("mask", "advantages"))
        changed, state = inner.update(updates, state, params, **extra)
        return map_leaves(choose, updates, mask, advantages, changed), state

    return Transform(inner.init, update)


def map_coefficients(
    what: str, function: Callable[..., jax.Array], *, needs: tuple[str, ...]
) -> Transform:
    """Makes a stateless block from `function(coefficients, mask, *needs) -> coefficients`.

    The way to write a block of one's own: `function` sees one f32[B, R] array at a time, `mask` as
    bool and the named extra arguments; the result is cut to the mask and carries no gradient.
    `what` names the block when an extra argument is missing (InputError).
    """

    def update(updates, state, params=None, **extra):
        del params
        arguments = [take_extra(extra, name, what) for name in ("mask", *needs)]
        return map_leaves(function, updates, *arguments), state

    return Transform(lambda params: optax.EmptyState(), update)


def map_leaves(function: Callable[..., jax.Array], updates: Any, *trees: Any) -> Any:
    """Applies `function(coefficients, mask, ...)` to each array, leaving optax's masked nodes."""

    def one(coefficients, mask, *arguments):
        if is_masked_node(coefficients):
            return coefficients
        mask = mask.astype(bool)
        coefficients = jnp.where(mask, coefficients.astype(jnp.float32), 0.0)
        result = function(coefficients, mask, *arguments)
        return jax.lax.stop_gradient(jnp.where(mask, result, 0.0))

    return jax.tree.map(one, updates, *trees, is_leaf=is_masked_node)


def is_masked_node(leaf: Any) -> bool:
    """True for the place that `optax.masked` or `optax.partition` leaves for another transform."""
    return isinstance(leaf, optax.MaskedNode)


def take_extra(extra: dict[str, Any], name: str, what: str) -> Any:
    """Returns an extra argument of `update`, or says in one line which one is missing."""
    if extra.get(name) is None:
        raise InputError(f"{what} needs the extra argument {name!r} in update(...)")
    return extra[name]


def check_bounds(lower: float | None, upper: float | None, *, what: str) -> None:
    """Refuses bounds on a ratio that are negative, crossed, absent, or that exclude 1."""
    if lower is None and upper is None:
        raise InputError(f"no bound on {what}; give lower, upper or both")
    for name, bound in (("lower", lower), ("upper", upper)):
        if bound is not None and not _number(bound) > 0.0:
            raise InputError(f"{name} is {bound}; a bound on {what} must be above 0")
    if lower is not None and upper is not None and lower > upper:
        raise InputError(f"lower is {lower}, above upper, which is {upper}")
    if lower is not None and lower > 1.0:
        raise InputError(f"lower is {lower}; above 1 it would change on-policy tokens")
    if upper is not None and not upper >= 1.0:
        raise InputError(f"upper is {upper}; below 1 it would change on-policy tokens")


def _number(value: object) -> float:
    """The value if it is a number, else NaN: that fails every check, whose message names it."""
    return float(value) if isinstance(value, int | float) else float("nan")


def _check_statistic_bounds(statistic, over, lower, upper) -> None:
    if statistic in ("ratio", "k1"):
        check_bounds(lower, upper, what="the ratio")
        if statistic == "ratio" and over == "sum":
            raise InputError(
                "reject('ratio', over='sum') grows with length; 'k1' bounds the product"
            )
        return
    if lower is not None:
        raise InputError(f"lower is {lower}; the statistic {statistic!r} has an upper bound only")
    least = 1.0 if statistic == "error" else 0.0
    if statistic == "error" and over == "sum":
        raise InputError("reject('error', over='sum') grows with length; use over='mean'")
    if upper is None or not _number(upper) >= least:
        raise InputError(f"upper is {upper}; for {statistic!r} it must be {least:g} or more")


def _inside_statistic(tokens, mask, statistic, over, bounds) -> jax.Array:
    lower, upper = bounds
    if statistic == "k1":
        lower = None if lower is None else float(np.log(lower))
        upper = None if upper is None else float(np.log(upper))
    if over == "max":
        return jnp.all(~mask | _inside(tokens, lower, upper), axis=-1, keepdims=True)
    if over != "token":
        tokens = ratios.aggregate(tokens, mask, over)
    return _inside(tokens, lower, upper)


def _inside(values: jax.Array, lower: float | None, upper: float | None) -> jax.Array:
    inside = jnp.ones(values.shape, bool)
    if lower is not None:
        inside &= values >= lower
    if upper is not None:
        inside &= values <= upper
    return inside
