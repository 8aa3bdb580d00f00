"""Building blocks of corrections; see `base` for what a correction is.

Extra arguments of `update`:

- `log_ratio`: f32[B, R], trainer's minus rollout's log-prob of each token
- `mask`: bool[B, R], True on response tokens; coefficients elsewhere become 0
- `log_probs` (f32[B, R], the trainer's), `advantages` (f32[B] or f32[B, R]), `divergence`
  (f32[B, R]): only where a block says so. Unknown extras are ignored

Log-probs may have any float dtype; the arithmetic is float32, or float64 where they are. Every
bound is a bound on the ratio r = pi_train / pi_rollout or on a named statistic of it, never on the
coefficient so far; so all blocks that only multiply commute. Order matters for those that read the
coefficients so far (`normalise`, `normalise_by_running_mean`). Bounds must include the on-policy
ratio, so that zero mismatch gives coefficients of exactly 1. They may be traced numbers
(`optax.inject_hyperparams`), which are not checked.

A block that reads the whole batch (`normalise`, `normalise_by_running_mean`, `mix_in_adaptively`)
must be given it whole: with micro-batches, compute the log-ratios of all of them first. Each row is
summed in a fixed order, and the rows' sums in a fixed tree (`tim_jax.numerics.strict`). So the
bits are the same on one device, on arrays sharded over many under `jit`, and inside `shard_map`, if
`axis_name` names the mesh axis that the rows are split over: their sums are then gathered.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tim_jax.common.errors import InputError, check_choice
from tim_jax.common.inputs import shown
from tim_jax.corrections import ratios
from tim_jax.corrections.base import (
    Block,
    Bounds,
    Correction,
    Sign,
    Transform,
    chain,
    checked_number,
    declared,
    known_number,
    map_coefficients,
    map_leaves,
    matching,
    outside,
    plain_number,
    take_extra,
)
from tim_jax.corrections.ratios import Level, Over, Statistic
from tim_jax.numerics import strict
from tim_jax.numerics.strict import compensated_sum, count, row_count

Bound = float | jax.Array | None


def scale_by_ratio(level: Level = "token") -> Correction:
    """Multiplies by the importance ratio at a level (see `ratios.ratio`), not truncated.

    Unbiased at level sequence (arXiv 2602.01826, eq. 4), up to the bound of e^20, and of a variance
    that grows with the length; use `scale_by_truncated_ratio` or add `mask_outside`.
    """
    check_choice("level", level, get_args(Level))

    def scale(coefficients, mask, log_ratio):
        return coefficients * ratios.ratio(log_ratio, mask, level)

    return map_coefficients(f"scale_by_ratio({level!r})", scale, needs=("log_ratio",))


def scale_by_truncated_ratio(
    level: Level = "token", *, upper: float, lower: float | None = None
) -> Correction:
    """Multiplies by `min(ratio, upper)`, or by the ratio clipped to [lower, upper] (TIS).

    Yao et al. 2025; arXiv 2602.01826, eq. 5. With `lower` it is the two-sided form of OpenRLHF and
    slime, without it that of verl and tunix.
    """
    check_choice("level", level, get_args(Level))
    lower, upper = checked_bounds(lower, upper)

    def scale(coefficients, mask, log_ratio):
        ratio = ratios.ratio(log_ratio, mask, level)
        return coefficients * jnp.clip(ratio, *(matching(bound, ratio) for bound in (lower, upper)))

    return map_coefficients(
        "scale_by_truncated_ratio", scale, needs=("log_ratio",), bounds=Bounds(level, lower, upper)
    )


def mask_outside(
    level: Level = "token", *, lower: float | None = None, upper: float | None = None
) -> Correction:
    """Zeroes the coefficients of tokens, or of sequences, whose ratio is outside [lower, upper].

    With `scale_by_ratio` at the same level this is MIS (arXiv 2602.01826, eq. 6) or, two-sided at
    level token, IcePop (arXiv 2510.18855). The bounds belong to the interval. A masked token stays
    in the loss's denominator; `reject` is the one that takes it out.
    """
    check_choice("level", level, get_args(Level))
    lower, upper = checked_bounds(lower, upper)

    def keep(coefficients, mask, log_ratio):
        inside = _inside(ratios.ratio(log_ratio, mask, level), lower, upper)
        return jnp.where(inside, coefficients, 0.0)

    return map_coefficients(
        "mask_outside",
        keep,
        needs=("log_ratio",),
        effect="mask",
        bounds=Bounds(level, lower, upper),
    )


def reject(
    statistic: Statistic, *, over: Over, lower: Bound = None, upper: Bound = None
) -> Correction:
    """Zeroes tokens (`over="token"`) or whole sequences whose statistic is outside [lower, upper].

    `over` says how the statistic of a sequence comes from its tokens': sum, mean or max (max: every
    token's). See `ratios.token_statistic` for the statistics. For k1 the bounds are bounds on the
    ratio `exp(-k1)`: over sum on the product, over mean on the geometric ratio, over max on every
    token's. For k2, k3, error, binary_kl and divergence there is an upper bound only.

    Note that verl compares `k1 = -log r` with the logarithms of its bounds: its "0.6_1.6" is
    `lower=1/1.6, upper=1/0.6` here.
    """
    check_choice("statistic", statistic, get_args(Statistic))
    check_choice("over", over, get_args(Over))
    _check_statistic_bounds(statistic, over, lower, upper)
    bounds = [plain_number(bound) for bound in (lower, upper)]
    if statistic == "k1":
        bounds = [None if bound is None else _log(bound) for bound in bounds]
    others = {"binary_kl": ("log_probs",), "divergence": ("divergence",)}
    needs = ("log_ratio", *others.get(statistic, ()))

    def values_of(mask, arrays):
        named = dict(zip(needs, arrays, strict=True))
        tokens = ratios.token_statistic(statistic, **named)
        return tokens if over in ("token", "max") else ratios.aggregate(tokens, mask, over)

    def keep(coefficients, mask, *arrays):
        inside = _inside(values_of(mask, arrays), *bounds)
        if over == "max":
            inside = jnp.all(~mask | inside, axis=-1, keepdims=True)
        return jnp.where(inside, coefficients, 0.0)

    def beyond(mask, *arrays):
        flags = outside(values_of(mask, arrays), *bounds)
        if over == "max":
            return {k: jnp.any(mask & flag, axis=-1, keepdims=True) for k, flag in flags.items()}
        return flags

    name = f"reject({statistic!r}, over={over!r})"
    return declared(map_coefficients(name, keep, needs=needs, effect="reject"), beyond=beyond)


def veto(threshold: float = 1e-4) -> Correction:
    """Zeroes every sequence with a token whose ratio is below `threshold` (verl until 2025, slime).

    The log-ratio is not clipped to ±20 here, so that thresholds down to 1e-30 work.
    """
    name, rule = "veto threshold", "lie in (0, 1)"
    limit = _log(checked_number(name, threshold, lambda x: 0.0 < x < 1.0, rule))

    def keep(coefficients, mask, log_ratio):
        fatal = jnp.any(mask & (log_ratio < matching(limit, log_ratio)), axis=-1, keepdims=True)
        return jnp.where(fatal, 0.0, coefficients)

    return map_coefficients("veto", keep, needs=("log_ratio",), effect="reject")


def mask_probability_difference(
    *, lower: float | None = None, upper: float | None = None
) -> Correction:
    """Zeroes tokens whose `pi_train - pi_rollout` is outside [lower, upper]. Needs `log_probs`.

    A difference of probabilities, unlike one of log-probs, ignores rare tokens, whose ratio may be
    large while hardly any mass moves (DPPO, arXiv 2602.04879).
    """
    if lower is None and upper is None:
        raise InputError("mask_probability_difference has no bound; give lower, upper or both")
    for name, bound, good in (("lower", lower, (-1.0, 0.0)), ("upper", upper, (0.0, 1.0))):
        number = 0.0 if bound is None else known_number(bound)
        if number is not None and not good[0] <= number <= good[1]:
            raise InputError(
                f"{name} is {shown(bound)}; as a bound on the probability difference it must lie in"
                f" [{good[0]:g}, {good[1]:g}]"
            )
    lower, upper = plain_number(lower), plain_number(upper)

    def keep(coefficients, mask, log_ratio, log_probs):
        del mask
        train, rollout = ratios.probabilities(log_probs, log_ratio)
        return jnp.where(_inside(train - rollout, lower, upper), coefficients, 0.0)

    return map_coefficients(
        "mask_probability_difference", keep, needs=("log_ratio", "log_probs"), effect="mask"
    )


def where_advantage(sign: Sign, inner: optax.GradientTransformation) -> Correction:
    """Applies `inner` where the advantage is above (or below) 0 and leaves the rest as it is.

    Needs `advantages`. Each block of `inner` sees the whole batch; a row statistic of it is over
    the whole row. It keeps its effect and the log-probs that it reads.
    """
    check_choice("sign", sign, get_args(Sign))
    return Correction(tuple(_chosen(sign, block) for block in chain(inner).blocks))


def checked_bounds(lower: Any, upper: Any) -> tuple[Any, Any]:
    """Returns both bounds on a ratio as `plain_number`s.

    Refuses bounds that are negative, in the wrong order, both absent, or exclude 1.
    """
    if lower is None and upper is None:
        raise InputError("no bound on the ratio; give lower, upper or both")
    low, high = (None if bound is None else known_number(bound) for bound in (lower, upper))
    for name, bound, number in (("lower", lower, low), ("upper", upper, high)):
        if number is not None and not number > 0.0:
            raise InputError(
                f"the {name} bound is {shown(bound)}; a bound on the ratio must be a number above 0"
            )
    if low is not None and high is not None and low > high:
        raise InputError(f"the lower bound is {lower}, above the upper one, which is {upper}")
    if low is not None and low > 1.0:
        raise InputError(f"the lower bound is {lower}; above 1 it would change on-policy tokens")
    if high is not None and not high >= 1.0:
        raise InputError(f"the upper bound is {upper}; below 1 it would change on-policy tokens")
    return plain_number(lower), plain_number(upper)


def _chosen(sign: Sign, block: Block) -> Block:
    """The block, where the advantage has the sign."""

    def choose(coefficients, mask, advantages, changed):
        del mask
        chosen = advantages > 0 if sign == "positive" else advantages < 0
        return jnp.where(chosen[:, None] if chosen.ndim == 1 else chosen, changed, coefficients)

    def update(updates, state, params=None, **extra):
        mask, advantages = (take_extra(extra, x, "where_advantage") for x in ("mask", "advantages"))
        changed, state = block.transform.update(updates, state, params, **extra)
        return map_leaves(choose, updates, mask, advantages=advantages, changed=changed), state

    return replace(
        block,
        name=f"where_advantage({sign!r}, {block.name})",
        transform=Transform(block.transform.init, update),
        bounds=None,
        beyond=None,
        sign=sign,
    )


def _check_statistic_bounds(statistic, over, lower, upper) -> None:
    if statistic in ("ratio", "k1"):
        checked_bounds(lower, upper)
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
    number = known_number(upper)
    if number is not None and not number >= least:
        raise InputError(f"upper is {shown(upper)}; for {statistic!r} it must be {least:g} or more")


def _inside(values: jax.Array, lower: Any, upper: Any) -> jax.Array:
    inside = jnp.ones(values.shape, bool)
    if lower is not None:
        inside &= values >= matching(lower, values)
    if upper is not None:
        inside &= values <= matching(upper, values)
    return inside


def _log(bound: Any) -> Any:
    """The logarithm of a `plain_number`: to float64's precision where its value is known."""
    return strict.log(bound) if isinstance(bound, jax.Array) else float(np.log(bound))


Unit = Literal["token", "sequence"]
Among = Literal["response", "survivors"]


def normalise(
    unit: Unit = "token", *, among: Among = "response", axis_name: str | None = None
) -> Correction:
    """Divides the coefficients by their mean over the batch, so that they average 1.

    - unit token: the mean over tokens; unit sequence: the mean over sequences of each one's mean
    - among response: over all response tokens, rejected ones counting as 0; among survivors: over
      tokens (sequences) with a coefficient that is not 0

    verl's `rollout_is_batch_normalize` is `scale_by_truncated_ratio, normalise`, then `reject`.
    Put it after the ratio in the chain; blocks after it do not count in the mean.
    A batch without survivors stays 0.
    """
    check_choice("unit", unit, get_args(Unit))
    check_choice("among", among, get_args(Among))

    def divisor(coefficients, mask):
        mean = batch_mean(coefficients, mask, unit=unit, among=among, axis_name=axis_name)
        return jnp.where(mean != 0.0, mean, 1.0)

    def divide(coefficients, mask):
        # XLA makes a product of a quotient by one number in some programs only; so one is written.
        return coefficients * strict.uncontracted(1.0 / divisor(coefficients, mask))

    made = map_coefficients("normalise", divide, needs=(), effect="scale", whole_batch=True)
    return declared(made, divisor=divisor)


class RunningMeanState(NamedTuple):
    """State of `normalise_by_running_mean`."""

    mean: jax.Array  # f32[] or f64[], over all arrays of coefficients together


def normalise_by_running_mean(
    unit: Unit = "token", *, decay: float = 0.99, axis_name: str | None = None
) -> Correction:
    """Divides by a running mean of the batches' means: `m <- m + (1 - decay) (mean - m)`, m_0 = 1.

    A batch is divided by the mean of the batches before it. `update` must still be given a whole
    batch at a time, or the state would change once for every part of it. A batch without tokens, or
    with a NaN, leaves the mean as it is.
    """
    check_choice("unit", unit, get_args(Unit))
    decay = checked_number("decay", decay, lambda x: 0.0 <= x < 1.0, "lie in [0, 1)")

    def init(params):
        return RunningMeanState(jnp.ones((), strict.arithmetic_dtype(*jax.tree.leaves(params))))

    def update(updates, state, params=None, **extra):
        del params
        mask = take_extra(extra, "mask", "normalise_by_running_mean")
        safe = jnp.where(state.mean > 0.0, state.mean, 1.0)
        rows = []

        def divide(coefficients, mask):
            rows.append(_row_totals(coefficients, mask, unit, "response"))
            return coefficients / safe.astype(coefficients.dtype)

        divided = map_leaves(divide, updates, mask)
        if not rows:
            return divided, state
        sums, counts = (jnp.concatenate(parts) for parts in zip(*rows, strict=True))
        new = _mean_of(sums, counts, axis_name).astype(state.mean.dtype)
        part = 1.0 - matching(decay, new)
        mean = jax.lax.stop_gradient(state.mean + part * (new - state.mean))
        empty = jnp.sum(_gathered(counts, axis_name), dtype=jnp.int32) == 0
        mean = jnp.where(empty | jnp.isnan(new), state.mean, mean)
        if axis_name is not None:
            # Equal on every device already: so `shard_map` knows it too.
            mean = jax.lax.pmax(mean, axis_name)
        return divided, RunningMeanState(mean)

    name = "normalise_by_running_mean"
    block = Block(name, Transform(init, update), effect="scale", whole_batch=True)
    return Correction((block,))


def mix_in_adaptively(
    level: Level = "token", *, upper: float, kl_scale: float = 0.01, axis_name: str | None = None
) -> Correction:
    """Multiplies by `1 + m (min(ratio, upper) - 1)`, with one m in [0, 1] for the whole batch.

    m = 0 leaves the gradient as it is, m = 1 is truncated importance sampling. m comes from three
    figures of the batch, after AIS (Zhou et al., arXiv 2605.13907):

    - reliability: the effective sample size of the truncated weights w over the number of tokens,
      `mean(w)^2 / mean(w^2)`
    - severity: `1 - exp(-K3 / kl_scale)`, K3 = mean(r - 1 - log r), nats a token
    - amplification: `v / (1 + v)`, v the weights' standard deviation over their mean

    and `m = reliability * max(severity, amplification)`: correct more where the policies differ
    more, and less where few tokens would carry the correction. The paper's abstract names the three
    figures and the mixture; how they are joined here is ours.
    """
    check_choice("level", level, get_args(Level))
    _, upper = checked_bounds(None, upper)
    kl_scale = checked_number("kl_scale", kl_scale, lambda x: x > 0.0, "be above 0")

    def mixed(coefficients, mask, log_ratio):
        def mean(values):
            return batch_mean(jnp.where(mask, values, 0.0), mask, axis_name=axis_name)

        ratio = jnp.broadcast_to(ratios.ratio(log_ratio, mask, level), mask.shape)
        weights = jnp.minimum(ratio, matching(upper, ratio))
        square, centre = mean(jnp.square(weights)), mean(weights)
        reliability = jnp.square(centre) / jnp.where(square > 0.0, square, 1.0)
        spread = jnp.sqrt(mean(jnp.square(weights - centre)))
        amplification = spread / jnp.where(spread + centre > 0.0, spread + centre, 1.0)
        divergence = mean(ratios.token_statistic("k3", log_ratio))
        severity = 1.0 - strict.exp(-divergence / matching(kl_scale, divergence))
        share = reliability * jnp.maximum(severity, amplification)
        return coefficients * (1.0 + strict.uncontracted(share * (weights - 1.0)))

    return map_coefficients(
        "mix_in_adaptively",
        mixed,
        needs=("log_ratio",),
        whole_batch=True,
        bounds=Bounds(level, None, upper),
    )


def batch_mean(
    coefficients: jax.Array,
    mask: jax.Array,
    *,
    unit: Unit = "token",
    among: Among = "response",
    axis_name: str | None = None,
) -> jax.Array:
    """Returns f32[], the mean coefficient of the whole batch (see `normalise`); 0 if it is empty.

    `coefficients` f32[B, R] are 0 off `mask`. Same bits however the batch is split.
    """
    [coefficients] = strict.widened(coefficients)
    return _mean_of(*_row_totals(coefficients, mask.astype(bool), unit, among), axis_name)


def _row_totals(coefficients, mask, unit: Unit, among: Among) -> tuple[jax.Array, jax.Array]:
    """f32[B] and i32[B]: what each row adds to the mean's numerator and denominator."""
    counted = mask if among == "response" else mask & (coefficients != 0.0)
    sums, counts = compensated_sum(coefficients)[0], row_count(counted)
    if unit == "token":
        return sums, counts
    means = strict.quotient(sums, jnp.maximum(counts, 1).astype(sums.dtype))
    return means, (counts > 0).astype(jnp.int32)


def _mean_of(sums: jax.Array, counts: jax.Array, axis_name: str | None) -> jax.Array:
    total = compensated_sum(_gathered(sums, axis_name))[0]
    return strict.quotient(total, count(_gathered(counts, axis_name), total.dtype))


def _gathered(rows: jax.Array, axis_name: str | None) -> jax.Array:
    if axis_name is None:
        return rows
    return jax.lax.all_gather(rows, axis_name, tiled=True)
