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

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from tim_jax.common.errors import InputError, check_choice
from tim_jax.numerics.strict import (
    LOG_RATIO_BOUND,
    compensated_sum,
    count,
    row_count,
    tree_sum,
    whole,
    widened,
)
from tim_jax.objectives.advantages import absolute


class PolicyLoss(NamedTuple):
    """A loss's result for each token. [B, R]; 0 or False off the mask."""

    loss: jax.Array  # f32, to be weighted and summed
    ratio: jax.Array  # f32 without gradient, the importance ratio before it is clipped
    clipped_low: jax.Array  # bool, cut off where the loss would lower the token's probability
    clipped_high: jax.Array  # bool, cut off where the loss would raise it
    clipped_dual: jax.Array  # bool, cut off by `dual_clip`


def _of_wide_arrays(function: Callable) -> Callable:
    """Decorates a loss or selection, which is then given log-probs and advantages `widened`.

    So log-probs of 16 bits have ratios of float32, and those of float64 have float64's. A mask of
    numbers becomes one of bools.
    """

    @functools.wraps(function)
    def of_any(log_probs, old_log_probs, advantages, mask, **options):
        wide = widened(log_probs, old_log_probs, advantages)
        return function(*wide, mask.astype(bool), **options)

    return of_any


def _log_ratios(log_probs: jax.Array, old_log_probs: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns f32[B, R], new minus old log-probs; 0 off the mask, whatever stands there."""
    return jnp.where(mask, log_probs - old_log_probs, 0.0)


def _token_ratio(log_probs: jax.Array, old_log_probs: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns f32[B, R], the importance ratio pi / pi_old, its exponent clipped to ±20."""
    difference = _log_ratios(log_probs, old_log_probs, mask)
    return jnp.exp(jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def _row_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[B, 1], the mean over each row's tokens of values that are 0 off the mask."""
    lengths = jnp.maximum(row_count(mask), 1).astype(values.dtype)
    return (tree_sum(values) / lengths)[:, None]


def _clipped(ratio, advantages, mask, clip_low, clip_high, dual_clip) -> PolicyLoss:
    """`-min(r A, clip(r) A)`, by cases: `jnp.min` would halve the gradient where both are equal."""
    low, high = 1.0 - clip_low, 1.0 + clip_high
    clipped_low = mask & (advantages < 0.0) & (ratio < low)
    clipped_high = mask & (advantages > 0.0) & (ratio > high)
    used = jnp.where(clipped_low, low, jnp.where(clipped_high, high, ratio))
    clipped_dual = jnp.zeros_like(clipped_low)
    if dual_clip is not None:
        clipped_dual = mask & (advantages < 0.0) & (ratio > dual_clip)
        used = jnp.where(clipped_dual, dual_clip, used)
    loss = -used * advantages
    return _result(loss, ratio, mask, low=clipped_low, high=clipped_high, dual=clipped_dual)


def _trust_region(
    log_probs, old_log_probs, advantages, mask, divergence, bounds, ratio_cap
) -> PolicyLoss:
    """DPPO: the policy gradient, without tokens that would leave the trust region.

    A token has no gradient if its step would widen the difference of the two policies further and
    `divergence` f32[B, R] is beyond `bounds` (for negative and for positive advantages). The ratio
    weights the others, at most `ratio_cap`, and carries no gradient.
    """
    ratio = jax.lax.stop_gradient(_token_ratio(log_probs, old_log_probs, mask))
    low = (advantages <= 0.0) & (log_probs < old_log_probs) & (divergence > bounds[0])
    high = (advantages > 0.0) & (log_probs > old_log_probs) & (divergence > bounds[1])
    loss = -advantages * jnp.minimum(ratio, ratio_cap) * log_probs
    return _result(jnp.where(low | high, 0.0, loss), ratio, mask, low=low, high=high)


def _unclipped(loss: jax.Array, ratio: jax.Array, mask: jax.Array) -> PolicyLoss:
    """Returns the result of a loss that cuts no ratio off."""
    never = jnp.zeros_like(mask)
    return _result(loss, ratio, mask, low=never, high=never)


def _result(loss, ratio, mask, *, low, high, dual=None) -> PolicyLoss:
    """Returns what a loss reports, with 0 or False off the mask and no gradient in the ratio."""
    ratio = jax.lax.stop_gradient(jnp.where(mask, ratio, 0.0))
    dual = jnp.zeros_like(mask) if dual is None else dual
    return PolicyLoss(jnp.where(mask, loss, 0.0), ratio, mask & low, mask & high, mask & dual)


# Bounds on log-probs in the divergence of two coins. A float32 log-prob of 0 has been rounded;
# taken literally, any other policy would be infinitely far from it. DPPO's authors use the same
# 1e-8.
_COIN_BOUNDS = (-100.0, -1e-8)


@_of_wide_arrays
def reinforce(
    log_probs: jax.Array, old_log_probs: jax.Array, advantages: jax.Array, mask: jax.Array
) -> PolicyLoss:
    """`-A log pi` (Williams 1992). Nothing is clipped and the ratio is 1 by definition."""
    del old_log_probs
    return _unclipped(-advantages * log_probs, mask.astype(log_probs.dtype), mask)


@_of_wide_arrays
def clip(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`: PPO (arXiv 1707.06347, eq. 7).

    With `dual_clip` the ratio of a token with a negative advantage counts as that at most (arXiv
    1912.09729). Two bounds instead of one are DAPO's (arXiv 2503.14476, eq. 8).
    """
    ratio = _token_ratio(log_probs, old_log_probs, mask)
    return _clipped(ratio, advantages, mask, clip_low, clip_high, dual_clip)


@_of_wide_arrays
def gspo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's loss on the ratio of the sequence, `s = exp(mean_t d_t)` (arXiv 2507.18071, eq. 7).

    For both names, 'gspo' and 'gspo_token', the ratio of token t is the paper's token form
    `sg(s) pi_t / sg(pi_t)` (eq. 14): it has the value of s and token t's gradient. Where all tokens
    of a row have the same weight, coefficient and advantage, the gradient is that of the sequence
    form (eq. 5). Where they do not, only this form is right: in the sequence form each token's
    gradient flows through the mean, so all tokens would share the average of the coefficients.
    """
    mean = _row_mean(_log_ratios(log_probs, old_log_probs, mask), mask)
    sequence = jnp.clip(mean, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # 0 in value, with the token's gradient.
    token = jnp.where(mask, log_probs - jax.lax.stop_gradient(log_probs), 0.0)
    ratio = jnp.exp(jax.lax.stop_gradient(sequence) + token)
    return _clipped(ratio, advantages, mask, clip_low, clip_high, dual_clip)


@_of_wide_arrays
def cispo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> PolicyLoss:
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi` (arXiv 2506.13585, eq. 4 and 5).

    Every token keeps its gradient. The flags say where its weight was clipped, for either sign of
    the advantage. The paper sets no lower bound (clip_low 1) and names no upper one; the ratio of
    at most 5 is ScaleRL's (arXiv 2510.13786).
    """
    ratio = jax.lax.stop_gradient(_token_ratio(log_probs, old_log_probs, mask))
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss = -jnp.clip(ratio, low, high) * advantages * log_probs
    return _result(loss, ratio, mask, low=ratio < low, high=ratio > high)


@_of_wide_arrays
def sapo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> PolicyLoss:
    """`-A sigmoid(tau (r - 1)) 4 / tau`, a soft gate instead of a clip (SAPO, arXiv 2511.20347).

    tau is `temperature_positive` where A > 0, else `temperature_negative`. The gate's slope is 1 at
    a ratio of 1 and falls off on both sides, so nothing is cut off.
    """
    ratio = _token_ratio(log_probs, old_log_probs, mask)
    tau = jnp.where(advantages > 0.0, temperature_positive, temperature_negative)
    gate = jax.nn.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return _unclipped(-advantages * gate, ratio, mask)


@_of_wide_arrays
def gmpo(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> PolicyLoss:
    """`-A sg(s) exp(x_t - sg(x_t))` with `s = exp(mean_t x_t)`: GMPO (arXiv 2507.20673).

    x is the log-ratio clipped where the advantage pulls it outwards: at `clip_high` from above
    where A > 0, at `-clip_low` from below where A < 0. The paper's loss of a sequence is `-A s`;
    with weights of 1 / (N T) on the T tokens of each of N rows, and one advantage per row, the sum
    of these losses and its gradient are those of the paper's mean. The ratio returned is s.
    """
    difference = _log_ratios(log_probs, old_log_probs, mask)
    log_ratio = jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    low = (advantages < 0.0) & (log_ratio < -clip_low)
    high = (advantages > 0.0) & (log_ratio > clip_high)
    used = jnp.where(low, -clip_low, jnp.where(high, clip_high, log_ratio))
    ratio = jnp.exp(jax.lax.stop_gradient(_row_mean(jnp.where(mask, used, 0.0), mask)))
    loss = -advantages * ratio * jnp.exp(used - jax.lax.stop_gradient(used))
    return _result(loss, jnp.broadcast_to(ratio, loss.shape), mask, low=low, high=high)


@_of_wide_arrays
def dppo_tv(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 0.15,
    clip_high: float = 0.15,
    ratio_cap: float = 20.0,
) -> PolicyLoss:
    """`-A sg(min(r, ratio_cap)) log pi` in a trust region, 0 outside: DPPO (arXiv 2602.04879).

    A token is outside where the divergence D of the two policies is above `clip_high` and A > 0 has
    already raised its probability, or above `clip_low` and A <= 0 has lowered it. Here D is the
    binary total variation `|pi - pi_old|`. The defaults are those of the authors' example in verl.
    """
    # The larger probability times one minus the quotient: no cancellation, and no overflow.
    larger = jnp.exp(jnp.maximum(log_probs, old_log_probs))
    divergence = -larger * jnp.expm1(-jnp.abs(log_probs - old_log_probs))
    bounds = clip_low, clip_high
    return _trust_region(log_probs, old_log_probs, advantages, mask, divergence, bounds, ratio_cap)


@_of_wide_arrays
def dppo_kl(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    ratio_cap: float = 20.0,
) -> PolicyLoss:
    """As `dppo_tv`, with the binary divergence `KL(old || current)` (arXiv 2602.04879).

    `D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))` with p = pi and q = pi_old, of log-probs
    clipped to [-100, -1e-8].
    """
    p, q = (jnp.clip(x, *_COIN_BOUNDS) for x in (log_probs, old_log_probs))
    others = jax.nn.log1mexp(-q) - jax.nn.log1mexp(-p)
    divergence = jnp.exp(q) * (q - p) - jnp.expm1(q) * others
    bounds = clip_low, clip_high
    return _trust_region(log_probs, old_log_probs, advantages, mask, divergence, bounds, ratio_cap)


@_of_wide_arrays
def clip_cov(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    selected: jax.Array,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    share: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
) -> PolicyLoss:
    """PPO's loss, but 0 on the tokens bool[B, R] that are selected: Clip-Cov (arXiv 2505.22617).

    They come from `select_clip_cov`, which `share`, `lower` and `upper` belong to. They count as
    clipped: high where A > 0, else low.
    """
    del share, lower, upper
    ratio = _token_ratio(log_probs, old_log_probs, mask)
    plain = _clipped(ratio, advantages, mask, clip_low, clip_high, dual_clip)
    # A NaN must stay visible, even where the token was selected.
    removed = selected & mask & ~jnp.isnan(plain.loss)
    raised = advantages > 0.0
    return PolicyLoss(
        jnp.where(removed, 0.0, plain.loss),
        plain.ratio,
        plain.clipped_low | (removed & ~raised),
        plain.clipped_high | (removed & raised),
        plain.clipped_dual & ~removed,
    )


@_of_wide_arrays
def kl_cov(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    selected: jax.Array,
    share: float = 2e-4,
    coefficient: float = 1.0,
) -> PolicyLoss:
    """`-A r`, plus `coefficient |d|` on the tokens bool[B, R] that are selected: KL-Cov.

    arXiv 2505.22617. They come from `select_kl_cov`, which `share` belongs to. Nothing is clipped.
    """
    del share
    ratio = _token_ratio(log_probs, old_log_probs, mask)
    penalty = coefficient * absolute(_log_ratios(log_probs, old_log_probs, mask))
    loss = -advantages * ratio
    return _unclipped(jnp.where(selected & mask, loss + penalty, loss), ratio, mask)


@_of_wide_arrays
def select_clip_cov(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    share: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> jax.Array:
    """Returns bool[B, R], the tokens of the whole batch whose gradient `clip_cov` cuts off.

    Of the tokens with `lower < (A - mean A)(log pi - mean log pi) < upper` that the ratio does not
    already clip, `share` of all response tokens (rounded down, 1 at least) is taken; all of them if
    they are fewer. The choice is pseudo-random but a function of the tokens alone: order of the
    rows, padding and sharding do not change it. Takes the options of `clip_cov`, and no gradient.
    """
    covariance = _covariance(log_probs, advantages, mask)
    ratio = _token_ratio(log_probs, old_log_probs, mask)
    plain = _clipped(ratio, advantages, mask, clip_low, clip_high, dual_clip)
    clipped = plain.clipped_low | plain.clipped_high | plain.clipped_dual
    eligible = mask & (covariance > lower) & (covariance < upper) & ~clipped
    order = _fingerprint(log_probs, old_log_probs, advantages, mask)
    return _first(_share_of(mask, share), eligible, order)


@_of_wide_arrays
def select_kl_cov(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    share: float = 2e-4,
    coefficient: float = 1.0,
) -> jax.Array:
    """Returns bool[B, R], the tokens of the whole batch that `kl_cov` ties to the old policy.

    They are the `share` of the response tokens (rounded down, 1 at least) with the largest
    covariance `(A - mean A)(log pi - mean log pi)`. Ties are broken by the tokens alone, as in
    `select_clip_cov`. Takes the options of `kl_cov`, and no gradient.
    """
    del coefficient
    covariance = _covariance(log_probs, advantages, mask)
    order = _fingerprint(log_probs, old_log_probs, advantages, mask)
    return _first(_share_of(mask, share), mask, -covariance, order)


def _covariance(log_probs: jax.Array, advantages: jax.Array, mask: jax.Array) -> jax.Array:
    centred = [_centred(jax.lax.stop_gradient(x), mask) for x in (advantages, log_probs)]
    return centred[0] * centred[1]


def _centred(values: jax.Array, mask: jax.Array) -> jax.Array:
    # Compensated, so that the order of the rows does not change the last bit of the mean.
    flat = whole(jnp.where(mask, values, 0.0)).reshape(-1)
    return values - compensated_sum(flat)[0] / count(mask, flat.dtype)


def _fingerprint(log_probs, old_log_probs, advantages, mask) -> jax.Array:
    """u32[B, R], a hash of each token: its three numbers, its place in the row and its whole row.

    The row is part of it so that only copies of a whole sequence have equal hashes, and these are
    interchangeable. Integer sums, so exact in any order; tokens off the mask do not count.
    """
    place = jax.lax.broadcasted_iota(jnp.uint32, mask.shape, 1)
    hashed = _mixed(place)
    for values in (log_probs, old_log_probs, advantages):
        bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(values), jnp.uint32)
        for word in (bits,) if bits.ndim == values.ndim else (bits[..., 0], bits[..., 1]):
            hashed = _mixed(hashed ^ word)
    row = jnp.sum(jnp.where(mask, hashed, jnp.uint32(0)), axis=1, keepdims=True, dtype=jnp.uint32)
    return _mixed(hashed ^ _mixed(row))


def _mixed(words: jax.Array) -> jax.Array:
    """MurmurHash3's finaliser: a bijection of u32; each input bit influences each output bit."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> jnp.uint32(shift))) * jnp.uint32(factor)
    return words ^ (words >> jnp.uint32(16))


def _share_of(mask: jax.Array, share: float) -> jax.Array:
    """i32[], `share` of the True places, rounded down and at least 1, in integer arithmetic.

    The share is read as a fraction a / b whose terms are small enough for 32 bits: exactly for
    decimal shares such as 2e-4 = 1/5000; for any other the result is off by one at most.
    """
    bound = min(math.isqrt(int(2**30 / share)), 2**31 - 1)
    fraction = Fraction(share).limit_denominator(bound)
    a, b = fraction.numerator, fraction.denominator
    total = jnp.sum(mask, dtype=jnp.int32)
    return jnp.maximum(total // b * a + total % b * a // b, 1)


def _first(number: jax.Array, eligible: jax.Array, *keys: jax.Array) -> jax.Array:
    """bool[B, R], the `number` eligible places that come first by the keys, or all if fewer."""
    flat = [whole(x).reshape(-1) for x in (~eligible, *keys)]
    places = jax.lax.iota(jnp.int32, eligible.size)
    beyond, *_, order = jax.lax.sort((*flat, places), num_keys=len(flat))
    chosen = ~beyond & (places < number)
    return jnp.zeros_like(chosen).at[order].set(chosen).reshape(eligible.shape)


# fmt: off
Loss = Literal[
    "reinforce", "clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl",
    "clip_cov", "kl_cov",
]
# fmt: on

# The losses whose `clip_low` is a distance from the ratio 1, which cannot be below 0.
_RATIO_CLIPPED = ("clip", "gspo", "gspo_token", "cispo", "clip_cov")

LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    name: globals()[name.removesuffix("_token")] for name in get_args(Loss)
}

SELECTIONS: dict[str, Callable[..., jax.Array]] = {
    "clip_cov": select_clip_cov,
    "kl_cov": select_kl_cov,
}


def policy_loss(
    name: str,
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    given: Mapping[str, Any],
    *,
    selected: jax.Array | None = None,
) -> PolicyLoss:
    """Returns the loss of a name with the options given, checked by `check_options`.

    Raises:
        InputError: the loss is one of `SELECTIONS` and there is no `selected`, bool[B, R].
    """
    arrays = log_probs, old_log_probs, advantages, mask
    if name not in SELECTIONS:
        return LOSSES[name](*arrays, **given)
    if selected is None:
        raise InputError(f"the loss {name!r} needs the tokens that `select` finds; none were given")
    return LOSSES[name](*arrays, selected=selected, **given)


def uses_ratio(name: str) -> bool:
    """Returns whether a loss depends on the old log-probs."""
    check_choice("loss", name, LOSSES)
    return name != "reinforce"


def options(name: str) -> dict[str, Any]:
    """Returns the options of a loss with their defaults."""
    check_choice("loss", name, LOSSES)
    parameters = inspect.signature(LOSSES[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def check_options(name: str, given: Mapping[str, Any]) -> None:
    """Refuses options that a loss does not have, and values that make no sense together.

    Raises:
        InputError: an unknown loss or option, or a value out of its range.
    """
    defaults = options(name)
    for option in given:
        if not defaults:
            raise InputError(f"the loss {name!r} has no options, but {option!r} was given")
        check_choice(f"the loss {name!r}: option", option, defaults)
    values = {**defaults, **given}
    if values.get("dual_clip", 0.0) is None:
        del values["dual_clip"]
    for option, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise InputError(f"{option} is {value!r}; it must be a finite number")
    for option, value in values.items():
        right, rule = _requirement(name, option, values)
        if not right:
            raise InputError(f"{option} is {value}; it must {rule}")


def _requirement(name: str, option: str, values: Mapping[str, Any]) -> tuple[bool, str]:
    """Returns whether an option's value is in its range, and the range in words."""
    value = values[option]
    if option == "clip_low" and name in _RATIO_CLIPPED:
        return 0.0 <= value <= 1.0, "lie in [0, 1]"
    if option == "dual_clip":
        return value > 1.0, "lie above 1"
    if option == "lower":
        return value < values["upper"], f"lie below upper, which is {values['upper']}"
    if option == "share":
        return 0.0 < value <= 1.0, "lie in (0, 1]"
    if option == "ratio_cap":
        return value >= 1.0, "be 1 or more"
    if option.startswith("temperature"):
        return value > 0.0, "be positive"
    return option == "upper" or value >= 0.0, "be 0 or more"
