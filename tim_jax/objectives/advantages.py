"""Advantages: rewards of groups in, one number per sequence or per token out. No model, no state.

Before them rewards may be shaped, by their length or by an estimate of the KL. A reward is f32[B],
one per sequence, or f32[B, R].

B sequences stand in P groups of G rows each (the samples of one prompt), in consecutive rows; R is
the longest response. Every sum over the batch has a fixed order, so that neither the sharding nor
padding changes a bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from tim_jax.common.errors import InputError, check_choice
from tim_jax.numerics import strict
from tim_jax.numerics.strict import count, row_count, running_sum, tree_sum, whole

Estimator = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_batch",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "remax",
    "pass_at_k",
    "gpg",
    "optimal_token_baseline",
    "off_policy_baseline",
]

_MEANING = {
    "mask": "the response mask, bool[B, R]",
    "greedy_rewards": "the reward of each prompt's greedy response, f32[B / samples]",
    "energies": "1 - 2 pi + sum pi^2 at each token, f32[B, R]",
}
# An impossible token has log-ratio -inf; a sum of two such must stay a number.
_LOG_RATIO_FINITE = 1e6
# verl adds it to the variance when it whitens.
_VARIANCE_FLOOR = 1e-8
# The largest relative error of the KL that the controller answers to (Ziegler et al. 2019, 2.2).
_LARGEST_ERROR = 0.2
KL = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]


def needs(estimator: Estimator) -> frozenset[str]:
    """Returns which of `mask`, `greedy_rewards`, `energies` `advantages` must be given.

    Raises:
        InputError: an unknown estimator.
    """
    check_choice("estimator", estimator, get_args(Estimator))
    return _RULES[estimator].needs


def check_samples(estimator: Estimator, samples: int) -> None:
    """Refuses sizes without a meaning: a group's baseline needs two samples of a prompt or more."""
    check_choice("estimator", estimator, get_args(Estimator))
    if samples < 1:
        raise InputError(f"samples = {samples}: must be 1 or more")
    if estimator in GROUP_BASELINES and samples == 1:
        raise InputError(
            f"samples = 1: must be 2 or more for the estimator {estimator!r}, which compares the"
            " responses to a prompt with one another; 'reinforce' needs one alone"
        )


def advantages(
    rewards: jax.Array,
    *,
    samples: int,
    estimator: Estimator,
    eps: float = 1e-6,
    mask: jax.Array | None = None,
    token_rewards: jax.Array | None = None,
    turn_rewards: jax.Array | None = None,
    greedy_rewards: jax.Array | None = None,
    energies: jax.Array | None = None,
    log_ratio: jax.Array | None = None,
    weight_cap: float | None = None,
) -> jax.Array:
    """Returns the advantages of the rewards: f32[B], one a response, or f32[B, R], one a token.

    One a token for optimal_token_baseline, and with rewards of tokens or turns k for reinforce,
    reinforce_plus_plus and remax: the r of these four is then the return `r + sum(k_s of s >= t)`
    that follows token t. The others are of whole responses, and their r is `r + sum(k)`.

    Arrays of other float dtypes are cast to float32. With one that is float64 all is float64.

    With rewards r, response lengths T, and sums and means over the group:

    - grpo: `(r - mean) / (std + eps)`. The paper (arXiv 2402.03300, 4.1.2) leaves the estimator of
      std open; here it is the sample deviation (divisor G - 1) and eps is 1e-6, as in verl. TRL's
      eps is 1e-4.
    - dr_grpo: `r - mean` (arXiv 2503.20783).
    - rloo: `r_i - mean of the other G - 1` (arXiv 2402.14740).
    - reinforce: `r`, no baseline (Williams 1992). reinforce_batch: `r - mean of the batch`.
    - reinforce_plus_plus: r whitened over the tokens of the batch (arXiv 2501.03262),
      `(r - m) / sqrt(v + 1e-8)`, where each sequence counts T times in the mean m and in the
      variance v, whose divisor is the number of tokens less 1, as in verl.
    - reinforce_plus_plus_baseline: the same of `r - mean` in place of r.
    - opo: `r - sum(T r) / sum(T)` (arXiv 2505.23585).
    - remax: `r - r_greedy`, the reward of the greedy response to the same prompt (arXiv
      2310.10505).
    - pass_at_k: `(best - second best) / (std + eps)` for the group's best response, the first of
      equals, and 0 for all others (arXiv 2503.19595, scaled as in verl). A tie for best gives 0.
    - gpg: `(r - mean) B / M` with M the responses of the batch whose reward is not 0, as in verl.
      The paper (arXiv 2504.02546) divides by those in groups of unequal rewards instead.
    - optimal_token_baseline: at token t `r_i - sum(W_it r_i) / sum(W_it)`, over the rows that have
      a token t (arXiv 2602.07078, as in verl). `W_it = sum_{j<=t} rho_ij^2 e_ij` is what the
      gradient has accumulated up to t: e are the `energies`, rho the token's importance weight.
      Where a single row has a token t, its mean would be itself: there is no baseline, and the
      advantage is r_i (verl's `handle_zero_tail`).
    - off_policy_baseline: `r - sum(w^2 n r) / sum(w^2 n)` (VCPO, arXiv 2602.17616), where w is the
      sequence's importance weight and n the squared norm of its score: in the paper of the
      gradient by the parameters, here of that by the logits, `n_i = sum_t e_it`.

    A group of equal rewards gets exact zeros from every group baseline, but for the tokens of
    optimal_token_baseline that have none; reinforce_plus_plus_baseline whitens such zeros with the
    rest, and gives exact zeros where all groups are such. Where all weights are 0, the weighted
    means are plain means. NaN rewards give NaN to what is computed from them.

    Args:
        rewards: f32[B], one per sequence.
        samples: G.
        estimator: one of the above.
        eps: added to the deviations of grpo and pass_at_k.
        mask: bool[B, R], True on response tokens. If given, rows without a token count in no
            statistic and get 0, whichever the estimator. Off it only `turn_rewards` are read.
        token_rewards: f32[B, R], what each token is given besides, such as less a KL penalty.
        turn_rewards: f32[B, R], what each turn is given besides, at its end; all tokens up to there
            have it, even if the end itself is masked.
        greedy_rewards: f32[B / samples], for remax.
        energies: f32[B, R], `1 - 2 pi + sum_v pi_v^2`, of the token's and all probabilities: the
            squared norm of the gradient of log pi by the logits. Below 0, by rounding, it is 0.
        log_ratio: f32[B, R], log pi_trainer - log pi_rollout, for the importance weights of the
            last two; a token's and a sequence's sum are clipped to ±20. None: all weights are 1.
        weight_cap: upper bound on those weights. None: none but exp(20).

    Raises:
        InputError: an unknown estimator, group size 1 with a group baseline, B not a multiple of
            the group size, an array missing or of another shape, or a cap that is not positive.
    """
    check_samples(estimator, samples)
    wide = strict.widened(rewards, token_rewards, turn_rewards, greedy_rewards, energies, log_ratio)
    rewards, token_rewards, turn_rewards, greedy_rewards, energies, log_ratio = wide
    groups = _groups(rewards, samples)
    mask = None if mask is None else mask.astype(bool)
    given = {"mask": mask, "token_rewards": token_rewards, "turn_rewards": turn_rewards}
    given |= {"greedy_rewards": greedy_rewards, "energies": energies, "log_ratio": log_ratio}
    _check_given(estimator, groups.shape, given)
    if weight_cap is not None and not weight_cap > 0.0:
        raise InputError(f"weight_cap is {weight_cap}; it must be positive, or None for no cap")
    arrays: dict[str, Any] = {
        name: None if x is None else _by_group(x, 1 if name == "greedy_rewards" else samples)
        for name, x in given.items()
    }
    of_tokens, of_turns = arrays.pop("token_rewards"), arrays.pop("turn_rewards")
    if of_tokens is not None:
        of_tokens = jnp.where(arrays["mask"], of_tokens, 0.0)
    if of_turns is not None:
        of_tokens = of_turns if of_tokens is None else of_tokens + of_turns
    if of_tokens is not None:
        if estimator in OF_TOKENS:
            groups = groups[:, :, None] + running_sum(of_tokens, reverse=True)
        else:
            groups = groups + tree_sum(of_tokens)
    counted = arrays["mask"]
    if groups.ndim == 2:
        counted = jnp.ones_like(groups, bool) if counted is None else jnp.any(counted, axis=-1)
    batch = _Batch(groups, counted, **arrays, eps=eps, weight_cap=weight_cap)
    values = _RULES[estimator].advantages(batch)
    return values.reshape(rewards.shape[0], *values.shape[2:])


def informative_groups(rewards: jax.Array, samples: int) -> jax.Array:
    """Returns bool[B], False for every row of a group whose rewards f32[B] are all equal."""
    groups = _groups(rewards, samples)
    differing = _differing(groups, jnp.ones_like(groups, bool))
    return jnp.broadcast_to(differing, groups.shape).reshape(-1)


class _Batch(NamedTuple):
    """What the estimators read, by group. An array that was not given is None."""

    rewards: jax.Array  # f32[P, G]; f32[P, G, R] of what follows a token, for `OF_TOKENS` alone
    counted: jax.Array  # bool, of the same shape: the row has a token, or it is one
    mask: Any  # bool[P, G, R]
    greedy_rewards: Any  # f32[P, 1]
    energies: Any  # f32[P, G, R]
    log_ratio: Any  # f32[P, G, R]
    eps: float
    weight_cap: float | None


def _grpo(batch: _Batch) -> jax.Array:
    centred = _centred(batch)
    return _informative(batch, centred / (_deviation(batch, centred) + batch.eps))


def _dr_grpo(batch: _Batch) -> jax.Array:
    return _informative(batch, _centred(batch))


def _rloo(batch: _Batch) -> jax.Array:
    others = _group_sum(batch) - batch.rewards
    return _informative(batch, batch.rewards - _quotient(others, _one_less(_number(batch))))


def _reinforce(batch: _Batch) -> jax.Array:
    return jnp.where(batch.counted, batch.rewards, 0.0)


def _reinforce_batch(batch: _Batch) -> jax.Array:
    total = tree_sum(_reinforce(batch).reshape(-1))
    number = count(batch.counted, total.dtype)
    return jnp.where(batch.counted, batch.rewards - _quotient(total, number), 0.0)


def _opo(batch: _Batch) -> jax.Array:
    lengths = row_count(batch.mask).astype(batch.rewards.dtype)
    baseline = _weighted_mean(batch.rewards, lengths, batch.counted)
    return _informative(batch, batch.rewards - baseline)


def _remax(batch: _Batch) -> jax.Array:
    greedy = batch.greedy_rewards.reshape(-1, *[1] * (batch.rewards.ndim - 1))
    return jnp.where(batch.counted, batch.rewards - greedy, 0.0)


def _pass_at_k(batch: _Batch) -> jax.Array:
    rewards = jnp.where(batch.counted, batch.rewards, -jnp.inf)
    place = jnp.arange(rewards.shape[1])[None, :]
    best = place == jnp.argmax(rewards, axis=1, keepdims=True)
    second = jnp.max(jnp.where(best, -jnp.inf, rewards), axis=1, keepdims=True)
    scale = _deviation(batch, _centred(batch)) + batch.eps
    return _informative(batch, jnp.where(best, (rewards - second) / scale, 0.0))


def _gpg(batch: _Batch) -> jax.Array:
    rewarded = jnp.sum(batch.counted & (batch.rewards != 0.0), dtype=jnp.int32)
    number = jnp.sum(batch.counted, dtype=jnp.int32).astype(batch.rewards.dtype)
    scale = number / jnp.maximum(rewarded, 1).astype(batch.rewards.dtype)
    return _informative(batch, strict.uncontracted(scale * _centred(batch)))


def _optimal_token_baseline(batch: _Batch) -> jax.Array:
    gathered = _energies(batch)
    if batch.log_ratio is not None:
        log_ratio = jnp.where(batch.mask, batch.log_ratio, 0.0)
        gathered = gathered * jnp.square(_weights(batch, log_ratio))
    returns = batch.rewards if batch.rewards.ndim == 3 else batch.rewards[:, :, None]
    baseline = _weighted_mean(returns, running_sum(gathered), batch.mask)
    compared = jnp.where(_differing(returns, batch.mask), returns - baseline, 0.0)
    alone = jnp.sum(batch.mask, axis=1, keepdims=True, dtype=jnp.int32) == 1
    return jnp.where(batch.mask, jnp.where(alone, returns, compared), 0.0)


def _off_policy_baseline(batch: _Batch) -> jax.Array:
    norms = tree_sum(_energies(batch))
    if batch.log_ratio is not None:
        finite = jnp.clip(batch.log_ratio, -_LOG_RATIO_FINITE, _LOG_RATIO_FINITE)
        norms = norms * jnp.square(_weights(batch, tree_sum(jnp.where(batch.mask, finite, 0.0))))
    baseline = _weighted_mean(batch.rewards, norms, batch.counted)
    return _informative(batch, batch.rewards - baseline)


class _Rule(NamedTuple):
    """An estimator."""

    advantages: Callable[[_Batch], jax.Array]
    needs: frozenset[str] = frozenset()  # of `_MEANING`
    of_group: bool = False  # compares the responses to a prompt with one another
    # Where tokens are rewarded, their advantage is of what follows them, not of the whole response.
    of_tokens: bool = False


_MASK, _ENERGIES = frozenset({"mask"}), frozenset({"mask", "energies"})
_RULES: dict[Estimator, _Rule] = {
    "grpo": _Rule(_grpo, of_group=True),
    "dr_grpo": _Rule(_dr_grpo, of_group=True),
    "rloo": _Rule(_rloo, of_group=True),
    "reinforce": _Rule(_reinforce, of_tokens=True),
    "reinforce_batch": _Rule(_reinforce_batch),
    "reinforce_plus_plus": _Rule(lambda b: _whitened(b, _reinforce(b)), _MASK, of_tokens=True),
    "reinforce_plus_plus_baseline": _Rule(
        lambda b: _whitened(b, _dr_grpo(b)), _MASK, of_group=True
    ),
    "opo": _Rule(_opo, _MASK, of_group=True),
    "remax": _Rule(_remax, frozenset({"greedy_rewards"}), of_tokens=True),
    "pass_at_k": _Rule(_pass_at_k, of_group=True),
    "gpg": _Rule(_gpg, of_group=True),
    "optimal_token_baseline": _Rule(
        _optimal_token_baseline, _ENERGIES, of_group=True, of_tokens=True
    ),
    "off_policy_baseline": _Rule(_off_policy_baseline, _ENERGIES, of_group=True),
}
GROUP_BASELINES = tuple(name for name, rule in _RULES.items() if rule.of_group)
OF_TOKENS = frozenset(name for name, rule in _RULES.items() if rule.of_tokens)


def _group_sum(batch: _Batch) -> jax.Array:
    return tree_sum(jnp.where(batch.counted, batch.rewards, 0.0))[:, None]


def _number(batch: _Batch) -> jax.Array:
    """f32[P, 1], the rows of a group that count, at least 1."""
    return jnp.maximum(row_count(batch.counted), 1).astype(batch.rewards.dtype)[:, None]


def _centred(batch: _Batch) -> jax.Array:
    """f32[P, G], rewards less the group's mean; 0 in rows that do not count."""
    mean = _quotient(_group_sum(batch), _number(batch))
    return jnp.where(batch.counted, batch.rewards - mean, 0.0)


def _deviation(batch: _Batch, centred: jax.Array) -> jax.Array:
    """f32[P, 1], the sample deviation of what `_centred` returned."""
    scale = _scale(centred, axis=1)
    total = tree_sum(jnp.square(centred * scale))[:, None]
    return jnp.sqrt(_quotient(total, _one_less(_number(batch)))) / scale


def _scale(values: jax.Array, *, axis: int | None = None) -> jax.Array:
    """2^-80 where a square would overflow, else 1: products with either round nothing."""
    large = jnp.max(jnp.abs(values), axis=axis, keepdims=True) > 2.0**50
    return jnp.where(large, 2.0**-80, 1.0).astype(values.dtype)


def _informative(batch: _Batch, values: jax.Array) -> jax.Array:
    """The values of rows that count in groups with more than one reward; exact zeros elsewhere.

    Otherwise the rounding of a mean, divided by a deviation of the same size, would be a signal.
    """
    return jnp.where(batch.counted & _differing(batch.rewards, batch.counted), values, 0.0)


def _whitened(batch: _Batch, values: jax.Array) -> jax.Array:
    """The values, of `counted`'s shape, less their mean, over their deviation; by tokens."""
    share = row_count(batch.mask) if values.ndim == 2 else batch.mask.astype(jnp.int32)
    tokens = jnp.maximum(jnp.sum(share, dtype=jnp.int32), 1).astype(values.dtype)
    share = share.astype(values.dtype)
    scale = _scale(jnp.where(batch.counted, values, 0.0))
    values = values * scale
    centred = values - _total(share * values) / tokens
    centred = jnp.where(batch.counted, centred, 0.0)
    variance = _total(share * jnp.square(centred)) / _one_less(tokens)
    whitened = centred * strict.inverse_root(variance + _VARIANCE_FLOOR * jnp.square(scale))
    # As in `_informative`: equal values are no signal.
    return jnp.where(_differing(values, batch.counted, axis=None), whitened, 0.0)


def _energies(batch: _Batch) -> jax.Array:
    return jnp.where(batch.mask, jnp.maximum(batch.energies, 0.0), 0.0)


def _weights(batch: _Batch, log_weights: jax.Array) -> jax.Array:
    clipped = jnp.clip(log_weights, -strict.LOG_RATIO_BOUND, strict.LOG_RATIO_BOUND)
    weights = strict.exp(clipped)
    return weights if batch.weight_cap is None else jnp.minimum(weights, batch.weight_cap)


def _groups(rewards: jax.Array, samples: int) -> jax.Array:
    if rewards.ndim != 1 or samples < 1 or rewards.shape[0] % samples:
        raise InputError(
            f"rewards have shape {rewards.shape}; they must be one row of groups of {samples}"
        )
    return _by_group(rewards, samples)


def _by_group(x: jax.Array, rows: int) -> jax.Array:
    """[P, rows, ...] of [P * rows, ...]; gathered first where an explicit mesh divides groups."""
    sharding = jax.typeof(x).sharding
    axes = jax.tree.leaves(tuple(sharding.spec[:1]))
    devices = math.prod(sharding.mesh.shape[axis] for axis in axes)
    divided = x.shape[0] % (devices * rows)
    return (whole(x) if divided else x).reshape(-1, rows, *x.shape[1:])


def _check_given(estimator: Estimator, groups: tuple[int, ...], given: dict[str, Any]) -> None:
    needed = dict.fromkeys(sorted(needs(estimator)), f"the estimator {estimator!r} needs it")
    for name in ("token_rewards", "turn_rewards"):
        if given[name] is not None:
            needed.setdefault("mask", f"{name} need it")
    for name, why in needed.items():
        if given[name] is None:
            raise InputError(f"{name} is None, but {why}: {_MEANING[name]}")
    prompts, size = groups
    names = ("mask", "token_rewards", "turn_rewards", "energies", "log_ratio")
    by_token = [given[name] for name in names]
    width = next((x.shape[-1:] for x in by_token if x is not None), ())
    for name, array in given.items():
        right = (prompts,) if name == "greedy_rewards" else (prompts * size, *width)
        if array is not None and array.shape != right:
            raise InputError(
                f"{name} has shape {array.shape}; for {prompts} groups of {size} it must be {right}"
            )


def _one_less(number: jax.Array) -> jax.Array:
    """The divisor of a sample variance, at least 1."""
    return jnp.maximum(number - 1.0, 1.0)


def _quotient(total: jax.Array, number: jax.Array) -> jax.Array:
    """total / number as XLA compiles it for a constant number: times the rounded reciprocal.

    So a constant and a count give the same bits. `uncontracted`, because with the subtraction that
    follows it would become a fused multiply-add in some programs and not in others.
    """
    return strict.uncontracted(total * (1.0 / number))


def _total(values: jax.Array) -> jax.Array:
    """The sum of f32[P, G] or f32[P, G, R]; by rows first, so that a longer R changes no bit."""
    return tree_sum((tree_sum(values) if values.ndim == 3 else values).reshape(-1))


def _weighted_mean(values: jax.Array, weights: jax.Array, counted: jax.Array) -> jax.Array:
    """Means over axis 1, which stays with size 1; plain ones where all weights are 0.

    `values` and `weights` broadcast to the shape of `counted`; the weights are 0 or more.
    """
    weights = jnp.where(counted, weights, 0.0)
    weightless = jnp.max(weights, axis=1, keepdims=True) == 0.0
    weights = jnp.where(weightless, counted.astype(weights.dtype), weights)
    values = jnp.where(counted, values, 0.0)
    total = jnp.expand_dims(tree_sum(weights, axis=1), 1)
    weighted = jnp.expand_dims(tree_sum(weights * values, axis=1), 1)
    return weighted / jnp.where(total == 0.0, 1.0, total)


def _differing(groups: jax.Array, counted: jax.Array, *, axis: int | None = 1) -> jax.Array:
    """True where `axis` (kept with size 1; None: all) has more than one value. No arithmetic."""
    largest = jnp.max(jnp.where(counted, groups, -jnp.inf), axis=axis, keepdims=True)
    return jnp.any(counted & (groups != largest), axis=axis, keepdims=True)


def kl_estimate(
    log_probs: jax.Array, reference: jax.Array, *, estimator: KL, cap: float | None = None
) -> jax.Array:
    """Returns per-token estimates f32[B, R] of KL(pi || reference) from tokens drawn from pi.

    With `d = log pi - log reference` (Schulman, "Approximating KL divergence", 2020):
    k1 `d`; k2 `d^2 / 2`; k3 `exp(-d) - 1 + d`, with d clipped to ±20; abs `|d|`. As a loss, k2 is
    the one whose gradient is the divergence's in expectation; k1's has expectation 0; k3 is GRPO's
    choice. `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2.

    `cap` clips the estimate to ±cap: verl's k3 has a cap of 10. Beyond it there is no gradient,
    except for k1+ and k3+, whose gradient is not clipped.

    Raises:
        InputError: an unknown estimator, or a cap that is not positive.
    """
    check_choice("estimator", estimator, get_args(KL))
    if cap is not None and not cap > 0.0:
        raise InputError(f"cap is {cap}; it must be positive, or None for no cap")
    log_probs, reference = strict.widened(log_probs, reference)
    difference = log_probs - reference
    value = _divergence_estimate(difference, estimator.removesuffix("+"))
    if cap is not None:
        value = jnp.clip(value, -cap, cap)
    if not estimator.endswith("+"):
        return value
    # Zero, with the gradient of k2, which is d.
    constant = jax.lax.stop_gradient(difference)
    return jax.lax.stop_gradient(value) + constant * (difference - constant)


def _divergence_estimate(difference: jax.Array, estimator: str) -> jax.Array:
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return absolute(difference)
    if estimator == "k2":
        return 0.5 * jnp.square(difference)
    d = jnp.clip(difference, -strict.LOG_RATIO_BOUND, strict.LOG_RATIO_BOUND)
    return strict.exp_above_tangent(-d)


def absolute(values: jax.Array) -> jax.Array:
    """`|x|` with gradient 0 at 0 (`jnp.abs` has 1): equal policies must not be pushed apart."""
    return values * jax.lax.stop_gradient(jnp.sign(values))


def overlong_penalty(lengths: jax.Array, *, longest: int, cache: int) -> jax.Array:
    """Returns f32[B] in [-1, 0], to be added to the rewards: DAPO's soft overlong punishment.

    0 up to `longest - cache` tokens, `(longest - cache - length) / cache` from there to `longest`,
    -1 beyond (arXiv 2503.14476, eq. 13).

    Args:
        lengths: i32[B], tokens of each response, the end-of-sequence token included.
        longest: the length at which the penalty is complete, in tokens.
        cache: over how many tokens before that it grows.

    Raises:
        InputError: `cache` is not in [1, longest].
    """
    if not 1 <= cache <= longest:
        raise InputError(f"cache is {cache}; it must lie in [1, longest], which is [1, {longest}]")
    lengths = lengths.astype(jnp.int32)  # unsigned ones would not go below 0
    beyond = (longest - cache - lengths).astype(jnp.float32)
    # Most programs compile a quotient by a constant as this product, but not all. The select at the
    # end keeps the product from fusing with the reward's sum, and makes -1 exact.
    penalty = jnp.clip(beyond * (1.0 / cache), -1.0, 0.0)
    return jnp.where(lengths >= longest, -1.0, penalty)


def kl_penalty(
    log_probs: jax.Array,
    reference_log_probs: jax.Array,
    mask: jax.Array,
    *,
    coefficient: float | jax.Array,
    estimator: KL = "k1",
) -> jax.Array:
    """Returns f32[B, R], to be subtracted from the tokens' rewards: `coefficient * kl_t`.

    The estimated KL from the reference (Ouyang et al. 2022, arXiv 2203.02155, eq. 2, with
    `estimator` k1). See `kl_estimate`. 0 off the mask.

    Args:
        log_probs: f32[B, R], of the policy that sampled.
        reference_log_probs: f32[B, R], of the reference policy.
        mask: bool[B, R], True on response tokens. What stands elsewhere, NaN too, is not read.
        coefficient: in units of reward per nat; a float or an f32[], such as `AdaptiveKL` gives.
        estimator: of the KL at a token.

    Raises:
        InputError: arrays of different shapes, or a coefficient below 0 that is a Python number.
    """
    if not log_probs.shape == reference_log_probs.shape == mask.shape:
        raise InputError(
            f"log_probs, reference_log_probs and mask have shapes {log_probs.shape},"
            f" {reference_log_probs.shape} and {mask.shape}; they must be the same"
        )
    if isinstance(coefficient, float | int) and not coefficient >= 0.0:
        raise InputError(f"coefficient is {coefficient}; it must be 0 or more")
    ours, theirs, factor = strict.widened(log_probs, reference_log_probs, coefficient)
    ours, theirs = (jnp.where(mask, x, 0.0) for x in (ours, theirs))
    estimates = kl_estimate(ours, theirs, estimator=estimator)
    # Selected after it is multiplied, so that the product cannot fuse with the caller's sum.
    return jnp.where(mask, factor * estimates, 0.0)


@dataclass(frozen=True)
class AdaptiveKL:
    """A controller of the KL penalty's coefficient. Checked when built.

    `target` is the KL to be kept, in nats per sequence or per token, as the measured one is.
    `horizon` is the number of sequences over which a KL that is 20% or more off changes the
    coefficient by about 20%. The coefficient itself is the caller's state.
    """

    target: float
    horizon: int = 10_000

    def __post_init__(self) -> None:
        if not 0.0 < self.target < math.inf:
            raise InputError(f"target is {self.target}; the KL held must be positive and finite")
        if not self.horizon >= 1:
            raise InputError(f"horizon is {self.horizon}; it must be at least 1 sequence")

    def update(self, coefficient: jax.Array, kl: jax.Array, *, sequences: int) -> jax.Array:
        """Returns f32[], the coefficient after a step on `sequences` sequences of divergence `kl`.

        `coefficient * (1 + clip((kl - target) / target, -0.2, 0.2) * sequences / horizon)`, the
        log-space proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section 2.2),
        whose K_beta of 0.1 per step is `sequences / horizon`. A coefficient of 0 stays 0.

        A `kl` that is not finite leaves the coefficient unchanged: the coefficient is kept from
        step to step, and would stay NaN for ever.

        Args:
            coefficient: f32[], 0 or more.
            kl: f32[], measured in the unit of `target`.
            sequences: of this step; below `5 * horizon`, where the factor could reach 0.

        Raises:
            InputError: `sequences` is below 0, or `5 * horizon` or more.
        """
        if not 0 <= sequences < self.horizon / _LARGEST_ERROR:
            raise InputError(
                f"sequences is {sequences}; with horizon {self.horizon} it must lie in"
                f" [0, {self.horizon / _LARGEST_ERROR:g}), or one step could end the penalty"
            )
        coefficient, kl = strict.widened(coefficient, kl)
        # Each factor is inside a clip or a select, so that no sum becomes a fused multiply-add.
        gain = sequences / self.horizon
        limit = _LARGEST_ERROR * gain
        change = jnp.clip((kl - self.target) / self.target * gain, -limit, limit)
        return jnp.where(jnp.isfinite(kl), coefficient * (1.0 + change), coefficient)
