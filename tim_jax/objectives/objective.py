"""Objectives: from rewards and log-probs to each token's loss and its weight. No model.

An `Objective` joins an advantage estimator (`advantages`), a policy loss (`losses`), KL and entropy
terms and an aggregation of token losses to one number. B sequences stand in groups of equal size
(samples of one prompt), in consecutive rows; R is the longest response. A batch's loss is
`sum(weights * losses)`, where the weights contain the normaliser of the whole batch. So
micro-batches may each take their rows of both and add up: the gradient is the same but for
rounding.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.common.errors import InputError, check_choice
from tim_jax.common.inputs import changes, check_kinds
from tim_jax.numerics.strict import row_count, whole, widened
from tim_jax.objectives import losses
from tim_jax.objectives.advantages import (
    GROUP_BASELINES,
    KL,
    AdaptiveKL,
    Estimator,
    advantages,
    kl_estimate,
    needs,
)
from tim_jax.objectives.losses import Loss

Aggregation = Literal[
    "token_mean",
    "token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant_length",
]
Denominator = Literal["response", "survivors", "verl"]


def token_weights(
    mask: jax.Array,
    *,
    aggregation: Aggregation,
    max_length: int | None = None,
    kept: jax.Array | None = None,
    denominator: Denominator = "response",
    parts: int = 1,
) -> jax.Array:
    """Returns f32[B, R], the weight of each token's loss in the batch's loss; 0 off the mask.

    With N sequences that have a token in the whole batch's mask bool[B, R], and T_i tokens each:

    - token_mean: `1 / sum_i T_i` (DAPO, arXiv 2503.14476, eq. 8)
    - token_sum: 1, so that a larger batch has a larger gradient (verl's `token-sum`)
    - sequence_mean_token_mean: `1 / (N T_i)` (GRPO, arXiv 2402.03300, eq. 3)
    - sequence_mean_token_sum: `1 / N` (the policy gradient of whole sequences)
    - constant_length: `1 / (N max_length)` (Dr. GRPO, arXiv 2503.20783)

    `kept` bool[B, R] are the tokens that no rejection took out (all if None). Which of them count:

    - response: N and T_i of all response tokens, rejected or not (OpenRLHF, slime)
    - survivors: N and T_i of the kept tokens, as if the others had never been sampled (NeMo-RL's
      seq_logprob_error_threshold)
    - verl: T_i of the kept tokens, N of all sequences. So rejection shrinks the denominator of
      token_mean, but not that of sums over sequences. verl's trainer v0 divides so in decoupled
      mode; docs/corrections.md says what its other trainer and its bypass mode do

    With `parts` a sequence is an episode in this many rows, one after the other. It weighs as much
    as one in a single row, and its tokens share that.

    Sequences without a token (dropped groups) do not count in N. Compute the weights from a whole
    update batch and give each micro-batch its rows. Counts are integers, so sharding changes no
    bit.

    Raises:
        InputError: an unknown name, `max_length` missing, or shapes that differ.
    """
    check_aggregation(aggregation, max_length)
    check_choice("denominator", denominator, get_args(Denominator))
    check_tokens({"mask": mask, "kept": kept}, mask.shape)
    mask = mask.astype(bool)
    kept = mask if kept is None else mask & kept.astype(bool)

    def lengths_of(mask: jax.Array) -> jax.Array:
        lengths = row_count(mask)
        if parts == 1:
            return lengths
        return jnp.sum(whole(lengths).reshape(-1, parts), axis=1, dtype=jnp.int32)

    lengths = lengths_of(mask if denominator == "response" else kept)
    counted = lengths_of(kept if denominator == "survivors" else mask) > 0
    sequences = jnp.maximum(jnp.sum(counted, dtype=jnp.int32), 1).astype(jnp.float32)
    if aggregation == "token_mean":
        tokens = jnp.maximum(jnp.sum(lengths, dtype=jnp.int32), 1).astype(jnp.float32)
        per_row = jnp.full(lengths.shape, 1.0, jnp.float32) / tokens
    elif aggregation == "token_sum":
        per_row = jnp.ones(lengths.shape, jnp.float32)
    elif aggregation == "sequence_mean_token_mean":
        per_row = 1.0 / (sequences * jnp.maximum(lengths, 1).astype(jnp.float32))
    elif aggregation == "sequence_mean_token_sum":
        per_row = jnp.full(lengths.shape, 1.0, jnp.float32) / sequences
    else:
        per_row = jnp.full(lengths.shape, 1.0, jnp.float32) / (sequences * float(max_length or 1))
    per_row = per_row if parts == 1 else jnp.repeat(per_row, parts)
    return jnp.where(mask, per_row[:, None], 0.0)


def counts_kept(aggregation: Aggregation, denominator: Denominator) -> bool:
    """True if `token_weights` depend on which tokens are kept."""
    if denominator == "verl":
        return aggregation in ("token_mean", "sequence_mean_token_mean")
    return denominator == "survivors" and aggregation != "token_sum"


def check_tokens(arrays: Mapping[str, jax.Array | None], shape: tuple[int, ...]) -> None:
    """Refuses arrays that are not [B, R]: broadcasting would count them in several tokens."""
    if len(shape) != 2:
        raise InputError(f"the mask has shape {shape}; it must be [batch, tokens]")
    for name, x in arrays.items():
        if x is not None and x.shape != shape:
            raise InputError(f"{name} has shape {x.shape}; it must be that of the mask, {shape}")


def check_aggregation(aggregation: Aggregation, max_length: int | None) -> None:
    """Refuses an unknown name, and 'constant_length' without the length it divides by."""
    check_choice("aggregation", aggregation, get_args(Aggregation))
    if aggregation == "constant_length" and (max_length is None or max_length < 1):
        raise InputError(
            f"max_length is {max_length}; the aggregation 'constant_length' needs the longest"
            " response, at least 1"
        )


# They compare a response with no other one of the batch.
_NO_BASELINE: tuple[Estimator, ...] = ("reinforce", "remax")


class TokenLosses(NamedTuple):
    """Each token's contribution, and values to report. [B, R]; 0 or False off the mask."""

    loss: jax.Array  # f32, to be weighted by `token_weights` and summed
    ratio: jax.Array  # f32, importance ratio pi / pi_old that the loss used; 1.0 for 'reinforce'
    clipped_low: jax.Array  # bool, the loss cut its ratio off from below; see the loss
    clipped_high: jax.Array  # bool, from above
    clipped_dual: jax.Array  # bool, ratio above dual_clip with a negative advantage: no gradient
    kl: jax.Array  # f32, the KL estimate to the reference policy; 0 without one


@dataclasses.dataclass(frozen=True)
class Objective:
    """A policy-gradient objective as a value. Checked when built."""

    estimator: Estimator = "grpo"
    loss: Loss = "clip"
    clip_low: float | None = None
    """Where the loss clips its ratio from below, as a distance from 1; None: the loss's own."""
    clip_high: float | None = None
    """Where the loss clips its ratio from above, as a distance from 1 (DAPO's eps_high); None: the
    loss's own."""
    dual_clip: float | None = None
    """A bound above 1 on the ratio for negative advantages; None: none."""
    loss_options: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    """Further options of the loss, such as `{"ratio_cap": 5.0}`; see `losses.options`."""
    aggregation: Aggregation = "token_mean"
    max_length: int | None = None
    """The length that 'constant_length' divides by, and `overlong_cache` counts from. None: the
    run's longest response, which `grpo` and configurations fill in by `with_length`; `learn`, whose
    rows do not say how long a response may be, wants it."""
    denominator: Denominator = "response"
    """What rejections do to the weights; see `token_weights`."""
    reject_before_advantages: bool = False
    """Compute the advantages as if rejected tokens had never been sampled; in recompute mode."""
    regularise_rejected: bool = False
    """Rejected tokens keep their KL, entropy and load-balancing terms (verl's bypass mode)."""
    kl_coefficient: float = 0.0
    """Of the KL term to the reference policy in the loss."""
    kl_estimator: KL = "k3"
    kl_cap: float | None = None
    """A bound on the size of a token's KL estimate (verl: 10); None: none."""
    entropy_coefficient: float = 0.0
    """Of the entropy, which is added to the objective to keep it from falling."""
    balance_coefficient: float = 0.0
    """Of the load-balancing loss of a mixture of experts (arXiv 2101.03961, eq. 4)."""
    advantage_eps: float = 1e-6
    drop_uninformative: bool = False
    """Leave out groups whose rewards are all equal."""
    drop_cut: bool = False
    """Leave out responses that the longest length cut off (DAPO's overlong filtering)."""
    overlong_cache: int | None = None
    """Tokens before `max_length` from which on a response loses reward (DAPO, eq. 13)."""
    reward_kl_coefficient: float = 0.0
    """Of the KL to the reference policy, subtracted from the reward; adapted with a target."""
    reward_kl_target: float | None = None
    """KL in nats a sequence that the coefficient is steered to; None: the coefficient stays."""
    reward_kl_horizon: int = 10_000
    """Sequences over which the coefficient is steered."""

    __repr__ = changes

    def __post_init__(self) -> None:
        check_kinds(self)
        if isinstance(self.loss_options, str):
            raise InputError(f"loss_options is {self.loss_options!r}; it must be a mapping")
        object.__setattr__(self, "loss_options", tuple(sorted(dict(self.loss_options).items())))
        check_choice("estimator", self.estimator, get_args(Estimator))
        check_choice("denominator", self.denominator, get_args(Denominator))
        check_choice("kl_estimator", self.kl_estimator, get_args(KL))
        check_aggregation(self.aggregation, 1 if self.max_length is None else self.max_length)
        for name, value in self.loss_options:
            if getattr(self, name, None) is not None:
                raise InputError(
                    f"{name} is given twice, as {getattr(self, name)} and in loss_options as"
                    f" {value}"
                )
        losses.check_options(self.loss, self.options)
        coefficients = "kl_coefficient", "balance_coefficient", "reward_kl_coefficient"
        for name in ("advantage_eps", *coefficients):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise InputError(f"{name} is {value}; it must be 0 or more")
        if not math.isfinite(value := self.entropy_coefficient):
            raise InputError(f"entropy_coefficient is {value}; it must be finite")
        if self.kl_cap is not None and not self.kl_cap > 0.0:
            raise InputError(f"kl_cap is {self.kl_cap}; it must be above 0")
        self._check_together()

    def _check_together(self) -> None:
        if self.regularise_rejected and self.counts_kept:
            raise InputError(
                f"denominator is {self.denominator!r}, which does not count the rejected tokens"
                " that regularise_rejected keeps terms of; set it to 'response'"
            )
        if self.reject_before_advantages and self.estimator in _NO_BASELINE:
            raise InputError(
                f"reject_before_advantages takes rejected responses out of the baseline, but the"
                f" estimator {self.estimator!r} has none of other responses; leave it out"
            )
        if self.drop_uninformative and self.estimator not in GROUP_BASELINES:
            raise InputError(
                f"drop_uninformative leaves out groups of equal rewards, but the estimator"
                f" {self.estimator!r} learns from them; use one with a baseline of the group"
            )
        cache, longest = self.overlong_cache, self.max_length
        if cache is not None and not 1 <= cache <= (cache if longest is None else longest):
            known = "" if longest is None else f", which is {longest}"
            raise InputError(f"overlong_cache is {cache}; it must lie in [1, max_length]{known}")
        if self.reward_kl_target is not None and not self.reward_kl_coefficient > 0.0:
            raise InputError(
                f"reward_kl_target is {self.reward_kl_target}, but reward_kl_coefficient, which it"
                " would steer, is 0"
            )
        _ = self.controller

    @property
    def lacks_length(self) -> bool:
        """Whether something counts from `max_length`, which is not given."""
        counts = self.aggregation == "constant_length" or self.overlong_cache is not None
        return counts and self.max_length is None

    def with_length(self, longest: int) -> "Objective":
        """The objective of a run with responses of at most `longest` tokens."""
        return dataclasses.replace(self, max_length=longest) if self.lacks_length else self

    def check_whole_distribution(self) -> None:
        """Refuses terms of the whole distribution; to be called if the sampler truncates it.

        Raises:
            InputError: an entropy term, or an estimator that weights by the size of the score.
        """
        for what, asked in (
            (f"entropy_coefficient = {self.entropy_coefficient}", self.entropy_coefficient),
            (f"the estimator {self.estimator!r}", self.needs_energy),
        ):
            if asked:
                raise InputError(
                    f"{what} is about the whole distribution, which top_k or top_p cut off; set"
                    " top_k = 0 and top_p = 1"
                )

    @property
    def options(self) -> dict[str, float]:
        """The options of the loss that differ from its own defaults."""
        named = {name: getattr(self, name) for name in ("clip_low", "clip_high", "dual_clip")}
        given = {name: value for name, value in named.items() if value is not None}
        given |= dict(self.loss_options)
        # NumPy's numbers would be computed with in their own dtype.
        return {n: x.item() if isinstance(x, np.generic) else x for n, x in given.items()}

    @property
    def controller(self) -> AdaptiveKL | None:
        """The controller of the KL coefficient in the reward; None if it is constant."""
        if self.reward_kl_target is None:
            return None
        return AdaptiveKL(target=self.reward_kl_target, horizon=self.reward_kl_horizon)

    @property
    def has_reference(self) -> bool:
        """True if there is a KL to a reference policy, in the loss or in the reward."""
        return self.kl_coefficient > 0.0 or self.reward_kl_coefficient > 0.0

    @property
    def shapes_rewards(self) -> bool:
        """True if more than the task decides what a response is rewarded with."""
        return self.overlong_cache is not None or self.reward_kl_coefficient > 0.0

    @property
    def has_ratio(self) -> bool:
        """True if the loss holds the importance ratio of the policy to the old one."""
        return losses.uses_ratio(self.loss)

    @property
    def needs_energy(self) -> bool:
        """True if the advantages weight tokens by the size of their score."""
        return "energies" in needs(self.estimator)

    @property
    def needs_greedy(self) -> bool:
        """True if the advantages compare with the reward of a prompt's greedy response."""
        return "greedy_rewards" in needs(self.estimator)

    @property
    def counts_kept(self) -> bool:
        """True if rejected tokens change the other tokens' weights."""
        return counts_kept(self.aggregation, self.denominator)

    @property
    def selects(self) -> bool:
        """True if the loss chooses tokens by a statistic of the whole batch."""
        return self.loss in losses.SELECTIONS

    def advantages(self, rewards: jax.Array, *, samples: int, **arrays: Any) -> jax.Array:
        """Returns f32[B] or f32[B, R]; see `advantages.advantages`, also for the arrays."""
        own: Any = {"estimator": self.estimator, "eps": self.advantage_eps}
        return advantages(rewards, samples=samples, **own, **arrays)

    def token_weights(
        self, mask: jax.Array, kept: jax.Array | None = None, *, parts: int = 1
    ) -> jax.Array:
        """Returns f32[B, R]; see `token_weights`."""
        return token_weights(
            mask,
            aggregation=self.aggregation,
            max_length=self.max_length,
            kept=kept,
            denominator=self.denominator,
            parts=parts,
        )

    def select(
        self,
        log_probs: jax.Array,
        old_log_probs: jax.Array,
        advantages: jax.Array,
        *,
        mask: jax.Array,
    ) -> jax.Array:
        """Returns bool[B, R], the tokens that a loss which `selects` treats differently.

        The arrays must be those of the whole update batch.
        """
        advantages, mask = _token_advantages(advantages, mask.shape), mask.astype(bool)
        log_probs, old = (jnp.where(mask, x, 0.0) for x in (log_probs, old_log_probs))
        return losses.SELECTIONS[self.loss](log_probs, old, advantages, mask, **self.options)

    def token_losses(
        self,
        log_probs: jax.Array,
        old_log_probs: jax.Array,
        advantages: jax.Array,
        *,
        mask: jax.Array,
        coefficients: jax.Array | None = None,
        kept: jax.Array | None = None,
        reference_log_probs: jax.Array | None = None,
        entropy: jax.Array | None = None,
        selected: jax.Array | None = None,
        balance: jax.Array | None = None,
    ) -> TokenLosses:
        """Returns the losses of f32[B, R] log-probs, advantages f32[B] or [B, R], mask bool[B, R].

        `loss_t = c_t * policy_loss_t + kept_t (kl_coefficient * kl_t - entropy_coefficient * H_t
        + balance_coefficient * b_t)`, without kept_t if `regularise_rejected`.
        A loss's statistics of a row (GSPO's mean) or of the batch are over the kept tokens.
        The coefficients c (f32[B, R], ones if None) and `kept` (bool[B, R], all if None) come from
        `tim_jax.corrections`; `selected` (bool[B, R]) from `select`, for losses that need it;
        `entropy` (f32[B, R]) is that of the policy and `balance` (f32[B, R]) the load-balancing
        loss of its routers, both with their gradients. No gradient flows into
        `old_log_probs`, `advantages`, `coefficients` or `reference_log_probs`; equal log-probs give
        ratios of exactly 1. Values off the mask, NaN too, are ignored, also by the gradient; a NaN
        on it makes the token's loss NaN. One array of float64 makes all of them float64.

        Raises:
            InputError: a shape that does not fit, or an array that the objective needs is missing.
        """
        self._check_given(reference_log_probs, entropy, balance)
        tokens = {"log_probs": log_probs, "old_log_probs": old_log_probs, "kept": kept}
        tokens |= {"coefficients": coefficients, "reference_log_probs": reference_log_probs}
        check_tokens(
            tokens | {"entropy": entropy, "selected": selected, "balance": balance}, mask.shape
        )
        rest = coefficients, reference_log_probs, entropy, balance
        log_probs, old, advantages, *rest = widened(log_probs, old_log_probs, advantages, *rest)
        coefficients, reference_log_probs, entropy, balance = rest
        mask = mask.astype(bool)
        advantages = jax.lax.stop_gradient(_token_advantages(advantages, mask.shape))
        log_probs = jnp.where(mask, log_probs, 0.0)
        old = jax.lax.stop_gradient(jnp.where(mask, old, 0.0))
        counted = mask if kept is None else mask & kept.astype(bool)
        policy = losses.policy_loss(
            self.loss, log_probs, old, advantages, counted, self.options, selected=selected
        )
        loss = policy.loss
        if coefficients is not None:
            loss = loss * jax.lax.stop_gradient(jnp.where(mask, coefficients, 0.0))
        kl = terms = jnp.zeros_like(loss)
        if reference_log_probs is not None:
            reference = jax.lax.stop_gradient(jnp.where(mask, reference_log_probs, 0.0))
            kl = kl_estimate(log_probs, reference, estimator=self.kl_estimator, cap=self.kl_cap)
        if self.kl_coefficient > 0.0:  # without a coefficient the estimate is only reported
            terms = terms + self.kl_coefficient * kl
        if self.entropy_coefficient and entropy is not None:
            terms = terms - self.entropy_coefficient * jnp.where(mask, entropy, 0.0)
        if self.balance_coefficient and balance is not None:
            terms = terms + self.balance_coefficient * jnp.where(mask, balance, 0.0)
        if kept is not None and not self.regularise_rejected:
            terms = jnp.where(kept, terms, 0.0)
        loss = loss + terms
        policy = policy._replace(loss=jnp.where(mask, loss, 0.0))
        return TokenLosses(*policy, kl=jax.lax.stop_gradient(jnp.where(mask, kl, 0.0)))

    def _check_given(self, reference_log_probs: Any, entropy: Any, balance: Any) -> None:
        for name, what, given in (
            ("balance_coefficient", "load-balancing losses", balance),
            ("kl_coefficient", "reference log-probs", reference_log_probs),
            ("entropy_coefficient", "entropies", entropy),
        ):
            if getattr(self, name) and given is None:
                raise InputError(f"{name} is {getattr(self, name)}, but no {what} were given")


def _token_advantages(advantages: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[B, R] of advantages [B] or [B, R], and of nothing else."""
    if advantages.shape not in (shape, shape[:1]):
        raise InputError(
            f"advantages have shape {advantages.shape}; with a mask of {shape} they must be"
            f" {shape[:1]}, one a sequence, or {shape}, one a token"
        )
    return jnp.broadcast_to(advantages[:, None] if advantages.ndim == 1 else advantages, shape)


def grpo(**changes) -> Objective:
    """GRPO (arXiv 2402.03300): group mean and deviation, clip 0.2, mean of means, KL 0.04 by k3."""
    return _build(changes, aggregation="sequence_mean_token_mean", kl_coefficient=0.04)


def dr_grpo(**changes) -> Objective:
    """Dr. GRPO (arXiv 2503.20783): group mean only, sums over `max_length`."""
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


_MADE = (grpo, dr_grpo, rloo, reinforce, reinforce_plus_plus, dapo, gspo, cispo, sapo, gmpo, dppo)
PRESETS = {preset.__name__: preset for preset in _MADE}


def _build(changes: dict, **defaults) -> Objective:
    options = [field.name for field in dataclasses.fields(Objective)]
    for name in changes:
        check_choice("objective option", name, options)
    loss = defaults.get("loss", Objective.loss)
    if changes.get("loss", loss) != loss:
        defaults.pop("clip_high", None)  # the bound is meant for the preset's own loss
    return Objective(**{**defaults, **changes})
