"""The rules between a run's settings, each once.

A configuration checks its `Settings` before a model is opened, `Training.check` before anything is
compiled. So rules take plain values, and name a field as `Training` does. A configuration says its
own key.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tim_jax import corrections
from tim_jax.common.errors import InputError, check_choice
from tim_jax.common.inputs import check_kinds
from tim_jax.corrections import Correction, Mode
from tim_jax.model.execution import Routing
from tim_jax.objectives import Objective, advantages
from tim_jax.placement import ROWS, Placement
from tim_jax.tasks.base import History

# From this many horizons a step on, the KL coefficient's factor could reach 0; see `AdaptiveKL`.
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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the rules of a run read; fields are those of `Training` and of the values in it."""

    objective: Objective
    correction: Correction
    mode: Mode
    samples: int
    prompts_per_step: int
    mini_batches: int
    epochs: int
    micro_batch: int | None
    micro_batch_tokens: int | None
    noise_scale: bool
    routing: Routing
    credit: Credit
    refills: int
    offload: bool
    max_staleness: int
    slots: int | None
    placement: Placement
    """The learner's."""
    sampler_placement: Placement
    truncated: bool
    """Whether top-k or top-p leaves tokens out."""
    longest: int
    """Tokens of a response, or of all that follows the prompt of an episode."""
    max_prompt_length: int | None = None
    """None: it is not known yet."""
    turns: Turns | None

    def check(self) -> None:
        """Refuses settings that contradict each other.

        Raises:
          RuleError: with the field that is wrong.
          InputError: an objective that needs the whole distribution, of a truncated one.
        """
        objective, samples, prompts = self.objective, self.samples, self.prompts_per_step
        sequences, updates = prompts * samples, self.mini_batches * self.epochs
        parts: Any = {"mini_batches": self.mini_batches, "micro_batch": self.micro_batch}
        if self.truncated:
            objective.check_whole_distribution()
        check_learning(objective, self.correction, mode=self.mode, samples=samples, updates=updates)
        check_length(objective)
        check_reward_kl(objective, sequences=sequences)
        check_rows(prompts=prompts, samples=samples, **parts)
        if self.noise_scale:
            rows = sequences // self.mini_batches
            check_noise_scale(sequences=rows, micro_batch=self.micro_batch, samples=samples)
        if self.micro_batch_tokens is not None:
            check_packed(noise_scale=self.noise_scale)
            if self.max_prompt_length is not None:
                whole = self.max_prompt_length + self.longest
                check_micro_batch_tokens(
                    self.micro_batch_tokens, longest=whole, placement=self.placement
                )
        check_refills(self.refills, objective, samples=samples)
        check_staleness(self.max_staleness, offload=self.offload)
        self._check_turns()
        check_learner_rows(self.placement, sequences=sequences, **parts)
        where = self.sampler_placement
        check_sampler_rows(
            where,
            prompts=prompts,
            sequences=sequences,
            slots=self.slots,
            greedy=objective.needs_greedy,
        )

    def _check_turns(self) -> None:
        if self.turns is None:
            rule = "needs episodes of several turns"
            _require(self.credit != "turn", "credit", self.credit, rule)
            return
        check_turns(
            max_tokens=self.turns.max_tokens,
            longest=self.longest,
            max_staleness=self.max_staleness,
            routing=self.routing,
            objective=self.objective,
        )
        check_credit(self.credit, self.objective)
        check_cut(self.turns.history, noise_scale=self.noise_scale)


def _require(holds: bool, field: str, value: object, rule: str) -> None:
    if not holds:
        raise RuleError(field, value, rule)


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
        _require(value >= 1, field, value, "must be 1 or more")


def check_learning(
    objective: Objective, correction: Correction, *, mode: Mode, samples: int, updates: int
) -> None:
    """Refuses a ratio that would count twice or not at all, and a group too small for its baseline.

    `updates` are a step's: mini-batches times epochs.
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
    rule = "must be given, as the aggregation or overlong_cache counts from it"
    _require(not objective.lacks_length, "max_length", None, rule)


def check_reward_kl(objective: Objective, *, sequences: int) -> None:
    """Refuses a horizon of the KL's coefficient that a single step could end."""
    horizon = objective.reward_kl_horizon
    if objective.controller is not None and sequences >= _STEP_OVER_HORIZON * horizon:
        least = sequences // _STEP_OVER_HORIZON
        rule = f"must be more than {least}, a fifth of the {sequences} sequences of a step"
        raise RuleError("reward_kl_horizon", horizon, f"{rule}: one step could end the penalty")


def check_rows(*, prompts: int, samples: int, mini_batches: int, micro_batch: int | None) -> None:
    """Refuses parts that do not divide a step's prompts x samples sequences."""
    total, product = prompts * samples, f"{prompts} prompts x {samples} samples"
    rule = f"must divide the {total} sequences of a step ({product})"
    _require(total % mini_batches == 0, "mini_batches", mini_batches, rule)
    rows = total // mini_batches
    rule = f"must divide the {rows} sequences of a mini-batch ({product},"
    rule += f" mini_batches = {mini_batches})"
    _require(not micro_batch or rows % micro_batch == 0, "micro_batch", micro_batch, rule)


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

    `greedy`: whether it also draws one greedy response a prompt.
    """
    _check_spread("sampler_placement", where, sequences, f"the {sequences} sequences of a step")
    if slots:
        _check_spread("sampler_placement", where, slots, f"the {slots} slots")
    rule = f"must be a multiple of the sampler's {where.shards_text}: the estimator draws one"
    rule += " greedy response a prompt"
    _require(not greedy or prompts % where.shards == 0, "prompts_per_step", prompts, rule)


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

    `sequences` are a mini-batch's.
    """
    micro = micro_batch or sequences
    rule = f"needs a micro_batch below the {sequences} sequences of a mini-batch, and a multiple"
    rule += f" of the {samples} samples of a prompt: groups stay together"
    _require(micro < sequences and micro % samples == 0, "noise_scale", True, rule)


def check_packed(*, noise_scale: bool) -> None:
    """Refuses to measure the gradient's noise between micro-batches of unequal numbers of rows."""
    rule = "needs micro-batches of equally many sequences: leave out micro_batch_tokens"
    _require(not noise_scale, "noise_scale", True, rule)


def check_micro_batch_tokens(tokens: int, *, longest: int, placement: Placement) -> None:
    """Refuses a micro-batch of tokens whose part on a device does not hold the longest sequence.

    `longest`: tokens of a prompt and its response.
    """
    shards, least = placement.shards, longest * placement.shards
    multiple, devices = "", ""
    if shards > 1:
        multiple, devices = f"a multiple of {shards}, ", f" on each of {shards} devices"
    rule = f"must be {multiple}at least {least}: it holds a sequence of up to {longest} tokens"
    holds = tokens >= least and tokens % shards == 0
    _require(holds, "micro_batch_tokens", tokens, f"{rule}{devices}")


def check_refills(refills: int, objective: Objective, *, samples: int) -> None:
    """Refuses to draw again where no reward says that a group has no signal."""
    _require(refills >= 0, "refills", refills, "must be 0 or more")
    if not refills:
        return
    rule = f"the estimator {objective.estimator!r} learns from groups of equal rewards too"
    compares = objective.estimator in advantages.GROUP_BASELINES
    _require(compares, "refills", refills, f"must be 0: {rule}")
    rule = "must be 0 with one sample a prompt: no group of one has unequal rewards"
    _require(samples > 1, "refills", refills, rule)


def check_turns(
    *, max_tokens: int, longest: int, max_staleness: int, routing: str, objective: Objective
) -> None:
    """Refuses what there is not for episodes of several turns.

    `max_tokens` are a turn's, `longest` an episode's.
    """
    rule = f"must be at most the {longest} tokens of an episode, but is {max_tokens}"
    _require(max_tokens <= longest, "max_tokens", max_tokens, rule)
    for field, value, only in (("max_staleness", max_staleness, 0), ("routing", routing, "own")):
        rule = f"must be {only!r} for episodes of several turns"
        _require(value == only, field, value, rule)
    rule = "needs greedy responses, which there are not for episodes of several turns"
    _require(not objective.needs_greedy, "estimator", objective.estimator, rule)


def check_credit(credit: str, objective: Objective) -> None:
    """Refuses rewards of turns where an estimator only takes those of whole responses."""
    known, of_tokens = ", ".join(sorted(advantages.OF_TOKENS)), advantages.OF_TOKENS
    rule = f"needs an estimator of what follows each token: {known}"
    _require(credit != "turn" or objective.estimator in of_tokens, "credit", credit, rule)


def check_cut(history: str, *, noise_scale: bool) -> None:
    """Refuses to measure the gradient's noise between rows of one episode."""
    rule = 'needs equally many sequences in a micro-batch, and history = "cut" adds some'
    _require(history != "cut" or not noise_scale, "noise_scale", True, rule)


def check_staleness(max_staleness: int, *, offload: bool) -> None:
    """Refuses to draw ahead while the state is to leave the devices."""
    _require(max_staleness >= 0, "max_staleness", max_staleness, "must be 0 or more")
    rule = "must be 0 with offload, which takes the state away while a step is drawn"
    _require(not (max_staleness and offload), "max_staleness", max_staleness, rule)
