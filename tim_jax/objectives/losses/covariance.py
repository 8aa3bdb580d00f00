"""Losses that treat tokens of large covariance differently, and the choice of these tokens.

Clip-Cov and KL-Cov (arXiv 2505.22617).
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp

from tim_jax.numerics.sums import compensated_sum, count, whole
from tim_jax.objectives.losses.base import (
    PolicyLoss,
    absolute,
    log_ratios,
    of_wide_arrays,
    token_ratio,
    unclipped,
)
from tim_jax.objectives.losses.ratio import clip


@of_wide_arrays
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
    plain = clip(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
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


@of_wide_arrays
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
    ratio = token_ratio(log_probs, old_log_probs, mask)
    penalty = coefficient * absolute(log_ratios(log_probs, old_log_probs, mask))
    loss = -advantages * ratio
    return unclipped(jnp.where(selected & mask, loss + penalty, loss), ratio, mask)


@of_wide_arrays
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
    plain = clip(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    clipped = plain.clipped_low | plain.clipped_high | plain.clipped_dual
    eligible = mask & (covariance > lower) & (covariance < upper) & ~clipped
    order = _fingerprint(log_probs, old_log_probs, advantages, mask)
    return _first(_share_of(mask, share), eligible, order)


@of_wide_arrays
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
