"""Mismatch and training metrics: arrays in, named scalars and profiles out. Pure, no state.

Throughout, `train` and `rollout` are the two log-probs of each token f32[B, R], `mask` bool[B, R]
is True on response tokens and what stands elsewhere is never read; `d = train - rollout` and
`r = exp(d)`, the exponent clipped to ±20; a probability is at most 1. B is the whole batch: pass
the log-probs of all its micro-batches together. Means are compensated sums in a fixed order
(`tim_jax.numerics.strict`): they agree with float64 and do not depend on sharding. A mean over
nothing is 0. docs/health.md says which values are normal, which are alarming, and what a metric
cannot see.

Arrays may have any float dtype. The arithmetic is float32, or float64 if one of them is float64;
then the results are float64 as well. What "exact" means for a metric in docs/health.md, such as a
share of 1, is exact on every device (`tim_jax.numerics.strict`).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.common.errors import InputError
from tim_jax.corrections.ratios import k3
from tim_jax.numerics import strict
from tim_jax.numerics.strict import (
    LOG_RATIO_BOUND,
    compensated_sum,
    count,
    row_count,
    unequal_bits,
    whole,
    widened,
)
from tim_jax.objectives import TokenLosses

__all__ = [
    "BANDS",
    "DIFFERENCE_EDGES",
    "PROBABILITY_EDGES",
    "Profile",
    "entropy",
    "expert_loads",
    "gradient_noise_scale",
    "jensen_shannon",
    "loss_metrics",
    "mismatch_metrics",
    "mismatch_profiles",
    "routing_metrics",
    "update_skew",
]

# Tokens whose ratio is outside these bands are counted: NeMo-RL's sequence band, 1% and 5%
# (MaxText).
BANDS = {"0.999_1.002": (0.999, 1.002), "1pct": (0.99, 1.01), "5pct": (0.95, 1.05)}
PROBABILITY_EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_LARGEST_LOG_PERPLEXITY = 80.0  # whose exponential float32 can still add up
DIFFERENCE_EDGES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


def __dir__() -> list[str]:
    return __all__


def mismatch_metrics(train: jax.Array, rollout: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Returns every scalar that the two log-probs alone give; f32[], counts i32[].

    Exactness: `tokens`, `unequal_tokens` (other bits, or not finite), `exact_share` (0 without
    tokens).
    Difference: `log_ratio_{mean,abs_mean,abs_max}`; `mult_error`, mean exp|d| (NeMo-RL).
    Indicator of arXiv 2602.01826, eq. 7 and 8: `log_ppl_abs_diff_sum`, over sequences the mean
    |sum_t d_t|, as printed; `log_ppl_abs_diff_mean`, the mean |mean_t d_t|, as verl reports it.
    Also `log_ppl_{train,rollout}` and `log_ppl_diff`, means over sequences of per-token means, with
    `log_ppl_diff_{min,max}`; and as in verl `ppl_{train,rollout}` and `ppl_ratio`, means over
    sequences of perplexities and of those of train over rollout.
    KL(rollout || train) from the rollout's tokens: `kl_k1` = mean(-d), `kl_k3` = mean(r - 1 - d).
    Chi-squared: `chi2_token` = mean(r^2) - 1, `chi2_sequence` the same for products over sequences.
    Ratio: `ratio_{mean,std,min,max,p01,p25,p50,p75,p99,p999}`; `ess_token` and `ess_sequence`,
    mean(r)^2 / mean(r^2) of tokens and of products; `sequence_log_ratio_{min,max}`;
    `outside_0.999_1.002`, `outside_1pct`, `outside_5pct` and `extreme_share` (|d| > ln 2), shares
    of tokens. Probabilities: `prob_diff_{mean,std,max}` of |pi_train - pi_rollout| and
    `prob_correlation` (Pearson). `entropy_estimate` = mean(-train), good where d is small.
    """
    train, rollout, mask = _prepared(train, rollout, mask)
    d = jnp.clip(train - rollout, -1e6, 1e6)
    clipped = jnp.clip(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    r, p, q = jnp.exp(clipped), *(jnp.exp(jnp.minimum(x, 0.0)) for x in (train, rollout))
    columns = {
        "d": d,
        "abs_d": jnp.abs(d),
        "k3": k3(clipped),
        "r": r,
        "r2": jnp.exp(2.0 * clipped),
        "r_less_1": jnp.expm1(clipped),
        "r2_less_1": jnp.expm1(2.0 * clipped),
        "error": jnp.exp(jnp.abs(clipped)),
        "train": train,
        "rollout": rollout,
        "p": p,
        "q": q,
        "abs_p": jnp.abs(p - q),
    }
    rows = _row_sums(columns, mask)
    mean = {name: _over_tokens(x, mask) for name, x in rows.items()}
    least, most = (strict.extreme(r, mask, function) for function in (jnp.min, jnp.max))
    unequal = mask & unequal_bits(train, rollout)
    return {
        "tokens": jnp.sum(mask, dtype=jnp.int32),
        "unequal_tokens": jnp.sum(unequal, dtype=jnp.int32),
        "exact_share": strict.share(mask & ~unequal, mask),
        "log_ratio_mean": mean["d"],
        "log_ratio_abs_mean": mean["abs_d"],
        "log_ratio_abs_max": strict.extreme(jnp.abs(d), mask, jnp.max),
        "mult_error": mean["error"],
        **_perplexities(rows, mask),
        "kl_k1": -mean["d"],
        "kl_k3": mean["k3"],
        "chi2_token": mean["r2_less_1"],
        "ratio_mean": mean["r"],
        # Not by 1 + mean(r^2 - 1), which cancels where all ratios are small.
        "ess_token": strict.effective_share(mean["r"], mean["r2"], least=least, most=most),
        "ratio_min": least,
        "ratio_max": most,
        **strict.quantiles(r, mask, "ratio"),
        **_sequence_ratios(rows["d"], mask),
        **_bands(d, mask),
        "entropy_estimate": -mean["train"],
        "prob_diff_mean": mean["abs_p"],
        "prob_diff_max": strict.extreme(jnp.abs(p - q), mask, jnp.max),
        **_second_moments(jnp.expm1(clipped), p, q, mean, mask),
    }


def loss_metrics(losses: TokenLosses, mask: jax.Array) -> dict[str, jax.Array]:
    """Returns f32[] of the token losses: shares clipped, the PPO ratio, KL to the reference."""
    ratio, kl = widened(losses.ratio, losses.kl)
    mask = mask.astype(bool)
    return {
        "clipped_low_share": strict.share(losses.clipped_low, mask),
        "clipped_high_share": strict.share(losses.clipped_high, mask),
        "clipped_dual_share": strict.share(losses.clipped_dual, mask),
        "ppo_ratio_mean": strict.mean(ratio, mask),
        "ppo_ratio_max": strict.extreme(ratio, mask, jnp.max),
        "ppo_ratio_min": strict.extreme(ratio, mask, jnp.min),
        "reference_kl": strict.mean(kl, mask),
    }


def expert_loads(routes: jax.Array, inside: jax.Array, *, experts: int) -> jax.Array:
    """Returns i32[L, E], how many of the positions `inside` bool[B, T] go through each expert.

    `routes` are integers [B, T, L, k], numbers of `experts` experts a layer. Row by row, so that no
    wider array of that shape exists.
    """
    layers = routes.shape[2]
    starts = experts * jnp.arange(layers, dtype=jnp.int32)[None, :, None]

    routes, inside = whole(routes), whole(inside)

    def add(loads: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        of_row, inside = row
        places = of_row.astype(jnp.int32) + starts
        counted = jnp.broadcast_to(inside[:, None, None], places.shape).astype(jnp.int32)
        return loads.at[places.reshape(-1)].add(counted.reshape(-1)), None

    # Made of the input, so that it varies over the axes of a `shard_map` as what is added does.
    nothing = jnp.zeros((layers * experts,), jnp.int32) + 0 * jnp.sum(inside, dtype=jnp.int32)
    loads, _ = jax.lax.scan(add, nothing, (routes, inside))
    return loads.reshape(layers, experts)


def routing_metrics(
    agreement: jax.Array, entropy: jax.Array, mask: jax.Array, loads: jax.Array
) -> dict[str, jax.Array]:
    """Returns f32[] of a mixture's routing.

    `agreement`, the share of the experts that the learner's routers choose that the sampler chose
    too: exactly 1 where both are exact. `entropy` of the routers, nats. `load_max`, the load of a
    layer's busiest expert over an even one, the largest of all layers; `idle_share`, the share of
    all layers' experts without a token.

    Args:
      agreement: f32[B, R], of the positions that predict a token.
      entropy: f32[B, R], the same.
      mask: bool[B, R].
      loads: i32[L, E], as `expert_loads` of the sampler's choices.
    """
    agreement, entropy = widened(agreement, entropy)
    busiest = jnp.max(loads)
    # By layer, which all have the same total: that of all layers does not fit 32 bits in long runs.
    even = jnp.max(jnp.sum(loads, axis=1)).astype(jnp.float32) / loads.shape[1]
    even = jnp.where(even == 0.0, 1.0, even)
    balanced = (busiest == jnp.min(loads)) & (busiest > 0)
    return {
        "agreement": strict.mean(agreement, mask),
        "entropy": strict.mean(entropy, mask),
        "load_max": jnp.where(balanced, 1.0, busiest.astype(jnp.float32) / even),
        "idle_share": strict.share(loads == 0, jnp.ones(loads.shape, bool)),
    }


def update_skew(
    ppo_ratio: jax.Array, advantages: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
    """Returns the skew of the update, `C_t = -(r_t - 1) A_t` (VeXact, arXiv 2605.14220, eq. 5).

    `update_skew` is its mean over tokens, `update_skew_positive` and `_negative` over tokens with
    A > 0 and A < 0 alone. `ppo_ratio` f32[B, R] is the ratio of the loss, `advantages` f32[B] or
    f32[B, R]. At the weights of the rollout it is 0 without mismatch; one that depends on the
    advantage's sign biases the update even where KL estimates are flat.
    """
    if ppo_ratio.shape != mask.shape or advantages.shape not in (mask.shape, mask.shape[:1]):
        raise InputError(
            f"ppo_ratio has shape {ppo_ratio.shape} and advantages {advantages.shape}; with a mask"
            f" of {mask.shape} they must be {mask.shape}, and advantages may be {mask.shape[:1]}"
        )
    ppo_ratio, advantages = widened(ppo_ratio, advantages)
    mask = mask.astype(bool)
    per_token = advantages[:, None] if advantages.ndim == 1 else advantages
    signed = jnp.broadcast_to(per_token, mask.shape)
    contribution = jnp.where(mask, (1.0 - ppo_ratio) * signed, 0.0)
    return {
        "update_skew": strict.mean(contribution, mask),
        "update_skew_positive": strict.mean(contribution, mask & (signed > 0.0)),
        "update_skew_negative": strict.mean(contribution, mask & (signed < 0.0)),
    }


class Profile(NamedTuple):
    """Tokens by bins: `edges` f32[K+1], `counts` i32[K], `means` f32[K] of |d| (0 where empty)."""

    edges: jax.Array
    counts: jax.Array
    means: jax.Array


def mismatch_profiles(
    train: jax.Array, rollout: jax.Array, mask: jax.Array, *, bins: int = 16
) -> dict[str, Profile]:
    """Returns |d| `by_position` (equal bins of the response), `by_probability` and `by_difference`.

    by_probability bins by pi_train (rare tokens differ most), by_difference by |d| itself: a
    histogram with an underflow bin, which holds the exact zeros, and an overflow bin.
    """
    train, rollout, mask = _prepared(train, rollout, mask)
    difference = jnp.abs(train - rollout)
    position = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=train.dtype), mask.shape)
    keys = {
        "by_position": (position, np.linspace(0.0, max(mask.shape[1], 1), bins + 1)),
        "by_probability": (jnp.exp(train), np.asarray(PROBABILITY_EDGES)),
        "by_difference": (difference, np.asarray((0.0, *DIFFERENCE_EDGES, np.inf))),
    }
    return {
        name: _profile(key, difference, mask, jnp.asarray(edges, train.dtype))
        for name, (key, edges) in keys.items()
    }


def entropy(log_distribution: jax.Array) -> jax.Array:
    """Returns f32[...], `-sum_v p log p` (nats) of log-distributions f32[..., V]; -inf is p = 0."""
    [log_distribution] = widened(log_distribution)
    p = jnp.exp(log_distribution)
    # Selected before it is multiplied: the gradient of 0 times -inf is NaN.
    return -jnp.sum(p * jnp.where(p > 0.0, log_distribution, 0.0), axis=-1)


def jensen_shannon(train: jax.Array, rollout: jax.Array) -> jax.Array:
    """Returns f32[...], the Jensen-Shannon divergence in nats of log-distributions f32[..., V].

    `(KL(p||m) + KL(q||m)) / 2` with `m = (p + q) / 2`: symmetric, at most ln 2, defined where one
    side has no mass (a truncated sampler). 0 exactly for equal bits.
    """
    train, rollout = widened(train, rollout)
    middle = jnp.logaddexp(train, rollout) - math.log(2.0)
    terms = [
        jnp.where(x > -jnp.inf, jnp.exp(x) * (x - jnp.where(x > -jnp.inf, middle, 0.0)), 0.0)
        for x in (train, rollout)
    ]
    same = jnp.where(train == rollout, 0.0, 0.5 * (terms[0] + terms[1]))
    return jnp.maximum(jnp.sum(same, axis=-1), 0.0)


def gradient_noise_scale(
    small_square: jax.Array, big_square: jax.Array, *, small: int, big: int
) -> dict[str, jax.Array]:
    """Returns the simple noise scale of McCandlish et al. (arXiv 1812.06162, appendix A.1).

    From the squared norms f32[] of the mean gradient over `small` samples (averaged over
    micro-batches) and over `big`: `gradient_signal` = |G|^2 and `gradient_noise` = tr(Sigma), both
    unbiased, and `noise_scale` = tr(Sigma) / |G|^2, inf where the signal is not above 0.

    Raises `InputError` unless 0 < small < big.
    """
    if not 0 < small < big:
        raise InputError(f"small = {small} must be at least 1, and below big = {big}")
    small_square, big_square = widened(small_square, big_square)
    signal = (big * big_square - small * small_square) / (big - small)
    noise = (small_square - big_square) / (1.0 / small - 1.0 / big)
    scale = jnp.where(signal > 0.0, noise / jnp.where(signal > 0.0, signal, 1.0), jnp.inf)
    return {"gradient_signal": signal, "gradient_noise": noise, "noise_scale": scale}


def _prepared(train, rollout, mask) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the log-probs `widened`, 0 where the mask is False, and the bool mask; unsharded."""
    train, rollout, mask = (jnp.asarray(x) for x in (train, rollout, mask))
    for name, x in (("train", train), ("rollout", rollout)):
        if x.shape != mask.shape:
            raise InputError(f"{name} has shape {x.shape}; it must be the mask's, {mask.shape}")
    if mask.ndim != 2:
        raise InputError(f"the mask has shape {mask.shape}; it must be [batch, tokens]")
    train, rollout, mask = (whole(x) for x in (train, rollout, mask))
    mask = mask.astype(bool)
    train, rollout = (jnp.where(mask, x, 0.0) for x in widened(train, rollout))
    return train, rollout, mask


def _perplexities(rows, mask) -> dict[str, jax.Array]:
    full = jnp.any(mask, axis=1)
    lengths = jnp.maximum(row_count(mask), 1).astype(rows["d"].dtype)
    per_token = {name: rows[name] / lengths for name in ("d", "train", "rollout")}

    def perplexity(mean: jax.Array) -> jax.Array:
        return strict.mean(jnp.exp(jnp.minimum(-mean, _LARGEST_LOG_PERPLEXITY)), full)

    return {
        "log_ppl_train": -strict.mean(per_token["train"], full),
        "log_ppl_rollout": -strict.mean(per_token["rollout"], full),
        "log_ppl_diff": -strict.mean(per_token["d"], full),
        "log_ppl_diff_min": strict.extreme(-per_token["d"], full, jnp.min),
        "log_ppl_diff_max": strict.extreme(-per_token["d"], full, jnp.max),
        "ppl_train": perplexity(per_token["train"]),
        "ppl_rollout": perplexity(per_token["rollout"]),
        "ppl_ratio": perplexity(per_token["d"]),
        "log_ppl_abs_diff_sum": strict.mean(jnp.abs(rows["d"]), full),
        "log_ppl_abs_diff_mean": strict.mean(jnp.abs(per_token["d"]), full),
    }


def _sequence_ratios(sums, mask) -> dict[str, jax.Array]:
    full = jnp.any(mask, axis=1)
    clipped = jnp.clip(sums, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    products, squares = jnp.exp(clipped), jnp.exp(2.0 * clipped)
    least, most = (strict.extreme(products, full, function) for function in (jnp.min, jnp.max))
    return {
        "chi2_sequence": strict.mean(jnp.expm1(2.0 * clipped), full),
        "ess_sequence": strict.effective_share(
            strict.mean(products, full), strict.mean(squares, full), least=least, most=most
        ),
        "sequence_log_ratio_min": strict.extreme(sums, full, jnp.min),
        "sequence_log_ratio_max": strict.extreme(sums, full, jnp.max),
    }


def _bands(d, mask) -> dict[str, jax.Array]:
    """Shares of tokens outside the bands; a NaN is outside all of them."""

    def outside(low, high):
        inside = (d >= math.log(low)) & (d <= math.log(high))
        return strict.share(mask & ~inside, mask)

    shares = {f"outside_{name}": outside(*band) for name, band in BANDS.items()}
    return {**shares, "extreme_share": outside(0.5, 2.0)}


def _second_moments(excess, p, q, mean, mask) -> dict[str, jax.Array]:
    x, y, distance = p - mean["p"], q - mean["q"], jnp.abs(p - q) - mean["abs_p"]
    products = {
        "rr": jnp.square(excess - mean["r_less_1"]),
        "xx": jnp.square(x),
        "yy": jnp.square(y),
        "xy": x * y,
        "dd": jnp.square(distance),
    }
    moment = {n: _over_tokens(s, mask) for n, s in _row_sums(products, mask).items()}
    scale = jnp.sqrt(moment["xx"]) * jnp.sqrt(moment["yy"])
    correlation = moment["xy"] / jnp.where(scale == 0.0, 1.0, scale)
    equal = jnp.all(~mask | (p == q))  # a root is rounded, and its square need not be the number
    return {
        "ratio_std": jnp.sqrt(moment["rr"]),
        "prob_diff_std": jnp.sqrt(moment["dd"]),
        "prob_correlation": jnp.where(scale == 0.0, 0.0, jnp.where(equal, 1.0, correlation)),
    }


def _profile(key, difference, mask, edges) -> Profile:
    bins = edges.shape[0] - 1
    place = jnp.clip(jnp.searchsorted(edges, key, side="right") - 1, 0, bins - 1)
    inside = mask[None] & (place[None] == jnp.arange(bins, dtype=place.dtype)[:, None, None])
    counts = jnp.sum(inside, axis=(1, 2), dtype=jnp.int32)
    totals = jnp.sum(jnp.where(inside, difference[None], 0.0), axis=(1, 2))
    return Profile(edges, counts, totals / jnp.maximum(counts, 1).astype(totals.dtype))


def _row_sums(columns: dict[str, jax.Array], mask: jax.Array) -> dict[str, jax.Array]:
    """Sums each f32[B, R] over its rows' tokens, all in one tree: {name: f32[B]}."""
    stacked = jnp.stack([jnp.where(mask, x, 0.0) for x in columns.values()])
    return dict(zip(columns, compensated_sum(stacked)[0], strict=True))


def _over_tokens(row_sums: jax.Array, mask: jax.Array) -> jax.Array:
    return strict.quotient(compensated_sum(row_sums)[0], count(mask, row_sums.dtype))
