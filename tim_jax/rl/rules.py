"""The rules between a run's settings, each once.

A configuration has them before a model is opened, `Training.check` before anything is compiled. So
they take plain values, and name a field as `Training` does. A configuration says its own key.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from tim_jax import corrections
from tim_jax.common.errors import InputError, check_choice
from tim_jax.common.inputs import check_kinds
from tim_jax.corrections import Correction, Mode
from tim_jax.objectives import Objective, advantages
from tim_jax.placement import ROWS, Placement
from tim_jax.tasks.episodes import History

# From this many horizons a step on, the KL coefficient's factor could reach 0; see `shaping`.
_STEP_OVER_HORIZON = 5

Credit = Literal["episode", "turn"]


@dataclass(frozen=True)
class Turns:
    """How an episode goes on, beside its tokens (`Sampling.max_tokens`)."""

    max_turns: int = 8
    """Turns of the policy."""
    max_tokens: int = 64
    """Tokens of one of them."""
    history: History = "refuse"
    """What is done about a chat template that rewrites earlier turns: refuse it, keep them as they
    were drawn, or cut the episode there, so that it goes on in a new row."""

    def __post_init__(self):
        check_kinds(self)
        check_choice("Turns: history", self.history, get_args(History))
        for name in ("max_turns", "max_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"Turns: {name} must be positive, got {getattr(self, name)}")


class RuleError(InputError):
    """A setting that does not go with the others: its field, its value, and what would be right.

    `axis` is the one of a placement that is to blame, if it is a placement.
    """

    def __init__(self, field: str, value: object, rule: str, *, axis: str | None = None):
        super().__init__(f"{field} = {value!r}: {rule}")
        self.field, self.value, self.rule, self.axis = field, value, rule, axis


@contextmanager
def _breaks(field: str, value: object) -> Iterator[None]:
    """A context in which what is refused breaks a rule of a field."""
    try:
        yield
    except InputError as error:
        raise RuleError(field, value, str(error)) from error


def check_counts(**counts: int) -> None:
    """Refuses counts below 1."""
    for field, value in counts.items():
        if value < 1:
            raise RuleError(field, value, "must be 1 or more")


def check_learning(
    objective: Objective, correction: Correction, *, mode: Mode, samples: int, updates: int
) -> None:
    """Refuses a ratio that would count twice or not at all, and a group too small for its baseline.

    Args:
      updates: of a step, mini-batches times epochs.
    """
    loss, has_ratio = objective.loss, objective.has_ratio
    with _breaks("correction", [block.name for block in correction.blocks]):
        corrections.check(correction, mode=mode, loss=loss, has_ratio=has_ratio, updates=updates)
    if objective.reject_before_advantages:
        with _breaks("reject_before_advantages", True):
            corrections.check_rejecting_first(correction, mode)
    try:
        advantages.check_samples(objective.estimator, samples)
    except InputError as error:
        raise RuleError("samples", samples, str(error).partition(": ")[2]) from error


def check_length(objective: Objective) -> None:
    """Refuses an objective that counts from a longest response that it does not know."""
    if objective.lacks_length:
        rule = "must be given, as the aggregation or overlong_cache counts from it"
        raise RuleError("max_length", None, rule)


def check_reward_kl(objective: Objective, *, sequences: int) -> None:
    """Refuses a horizon of the KL's coefficient that a single step could end."""
    horizon = objective.reward_kl_horizon
    if objective.controller is not None and sequences >= _STEP_OVER_HORIZON * horizon:
        raise RuleError(
            "reward_kl_horizon",
            horizon,
            f"must be more than {sequences // _STEP_OVER_HORIZON}, a fifth of the {sequences}"
            " sequences of a step: one step could end the penalty",
        )


def check_rows(*, prompts: int, samples: int, mini_batches: int, micro_batch: int | None) -> None:
    """Refuses parts that do not divide a step's prompts x samples sequences."""
    total, product = prompts * samples, f"{prompts} prompts x {samples} samples"
    if total % mini_batches:
        rule = f"must divide the {total} sequences of a step ({product})"
        raise RuleError("mini_batches", mini_batches, rule)
    if micro_batch and (total // mini_batches) % micro_batch:
        raise RuleError(
            "micro_batch",
            micro_batch,
            f"must divide the {total // mini_batches} sequences of a mini-batch ({product},"
            f" mini_batches = {mini_batches})",
        )


def check_learner_rows(
    where: Placement, *, sequences: int, mini_batches: int, micro_batch: int | None
) -> None:
    """Refuses a placement of the learner whose devices could not have equally many rows."""
    rows = {"a step": sequences, "a mini-batch": sequences // mini_batches}
    if micro_batch:
        rows["a micro-batch"] = micro_batch
    for what, count in rows.items():
        _check_spread("placement", where, count, f"the {count} sequences of {what}")


def check_sampler_rows(
    where: Placement, *, prompts: int, sequences: int, slots: int | None, greedy: bool
) -> None:
    """Refuses a placement of the sampler whose devices could not have equally many rows.

    Args:
      greedy: whether it also draws one greedy response a prompt.
    """
    _check_spread("sampler_placement", where, sequences, f"the {sequences} sequences of a step")
    if slots:
        _check_spread("sampler_placement", where, slots, f"the {slots} slots")
    if greedy and prompts % where.shards:
        raise RuleError(
            "prompts_per_step",
            prompts,
            f"must be a multiple of the sampler's {where.shards_text}: the estimator draws one"
            " greedy response a prompt",
        )


def _check_spread(field: str, where: Placement, count: int, what: str) -> None:
    if count % where.shards:
        sizes = {axis: getattr(where, axis) for axis in ROWS}
        # One that alone does not divide them, or else the largest, so that it is one that was set.
        largest = max(sizes, key=sizes.__getitem__)
        axis = next((axis for axis, size in sizes.items() if count % size), largest)
        rule = f"{where.shards_text} must divide {what}"
        raise RuleError(field, str(where), rule, axis=axis)


def check_noise_scale(*, sequences: int, micro_batch: int | None, samples: int) -> None:
    """Refuses to measure the gradient's noise from micro-batches that are not independent.

    Args:
      sequences: of a mini-batch.
    """
    micro = micro_batch or sequences
    if micro >= sequences or micro % samples:
        raise RuleError(
            "noise_scale",
            True,
            f"needs a micro_batch below the {sequences} sequences of a mini-batch, and a multiple"
            f" of the {samples} samples of a prompt: groups stay together",
        )


def check_packed(*, noise_scale: bool) -> None:
    """Refuses to measure the gradient's noise between micro-batches of unequal numbers of rows."""
    if noise_scale:
        rule = "needs micro-batches of equally many sequences: leave out micro_batch_tokens"
        raise RuleError("noise_scale", True, rule)


def check_micro_batch_tokens(tokens: int, *, longest: int, placement: Placement) -> None:
    """Refuses a micro-batch of tokens that a device's part of does not hold the longest sequence.

    Args:
      longest: tokens of a prompt and its response.
    """
    least = longest * placement.shards
    if tokens < least or tokens % placement.shards:
        devices = f" on each of {placement.shards} devices" if placement.shards > 1 else ""
        multiple = f"a multiple of {placement.shards}, " if placement.shards > 1 else ""
        raise RuleError(
            "micro_batch_tokens",
            tokens,
            f"must be {multiple}at least {least}: it holds a sequence of up to {longest}"
            f" tokens{devices}",
        )


def check_refills(refills: int, objective: Objective, *, samples: int) -> None:
    """Refuses to draw again where no reward says that a group has no signal."""
    if refills < 0:
        raise RuleError("refills", refills, "must be 0 or more")
    if not refills:
        return
    if objective.estimator not in advantages.GROUP_BASELINES:
        rule = f"the estimator {objective.estimator!r} learns from groups of equal rewards too"
        raise RuleError("refills", refills, f"must be 0: {rule}")
    if samples == 1:
        rule = "must be 0 with one sample a prompt: no group of one has unequal rewards"
        raise RuleError("refills", refills, rule)


def check_turns(
    *, max_tokens: int, longest: int, max_staleness: int, routing: str, objective: Objective
) -> None:
    """Refuses what there is not for episodes of several turns.

    Args:
      max_tokens: of a turn.
      longest: an episode's tokens.
    """
    if max_tokens > longest:
        rule = f"must be at most the {longest} tokens of an episode, but is {max_tokens}"
        raise RuleError("max_tokens", max_tokens, rule)
    for field, value, only in (("max_staleness", max_staleness, 0), ("routing", routing, "own")):
        if value != only:
            raise RuleError(field, value, f"must be {only!r} for episodes of several turns")
    if "greedy_rewards" in advantages.needs(objective.estimator):
        rule = "needs greedy responses, which there are not for episodes of several turns"
        raise RuleError("estimator", objective.estimator, rule)


def check_credit(credit: str, objective: Objective) -> None:
    """Refuses rewards of turns where an estimator only takes those of whole responses."""
    if credit == "turn" and objective.estimator not in advantages.OF_TOKENS:
        known = ", ".join(sorted(advantages.OF_TOKENS))
        raise RuleError("credit", credit, f"needs an estimator of what follows each token: {known}")


def check_cut(history: str, *, noise_scale: bool) -> None:
    """Refuses to measure the gradient's noise between rows of one episode."""
    if history == "cut" and noise_scale:
        rule = 'needs equally many sequences in a micro-batch, and history = "cut" adds some'
        raise RuleError("noise_scale", True, rule)


def check_staleness(max_staleness: int, *, offload: bool) -> None:
    """Refuses to draw ahead while the state is to leave the devices."""
    if max_staleness < 0:
        raise RuleError("max_staleness", max_staleness, "must be 0 or more")
    if max_staleness and offload:
        rule = "must be 0 with offload, which takes the state away while a step is drawn"
        raise RuleError("max_staleness", max_staleness, rule)
