"""The rules between a run's settings, each once.

A configuration checks its `Settings` before a model is opened, `Training.check` before anything is
compiled. So rules take plain values, and name a field as `Training` does. A configuration says its
own key.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

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
        objective, updates = self.objective, self.mini_batches * self.epochs
        if self.truncated:
            objective.check_whole_distribution()
        check_learning(
            objective, self.correction, mode=self.mode, samples=self.samples, updates=updates
        )
        rule = "must be given, as the aggregation or overlong_cache counts from it"
        _require(not objective.lacks_length, "max_length", None, rule)
        self._check_reward_kl()
        self._check_parts()
        if self.noise_scale:
            self._check_noise_scale()
        if self.micro_batch_tokens is not None:
            check_packed(noise_scale=self.noise_scale)
            if self.max_prompt_length is not None:
                whole = self.max_prompt_length + self.longest
                check_micro_batch_tokens(
                    self.micro_batch_tokens, longest=whole, placement=self.placement
                )
        self._check_refills()
        self._check_staleness()
        if self.turns is None:
            rule = "needs episodes of several turns"
            _require(self.credit != "turn", "credit", self.credit, rule)
        else:
            self._check_turns(self.turns)
        self._check_learner_rows()
        self._check_sampler_rows()

    @property
    def _sequences(self) -> int:
        """A step's."""
        return self.prompts_per_step * self.samples

    def _check_reward_kl(self) -> None:
        """Refuses a horizon of the KL's coefficient that a single step could end."""
        horizon, sequences = self.objective.reward_kl_horizon, self._sequences
        if self.objective.controller is not None and sequences >= _STEP_OVER_HORIZON * horizon:
            least = sequences // _STEP_OVER_HORIZON
            rule = f"must be more than {least}, a fifth of the {sequences} sequences of a step"
            raise RuleError("reward_kl_horizon", horizon, f"{rule}: one step could end the penalty")

    def _check_parts(self) -> None:
        """Refuses parts that do not divide a step's prompts x samples sequences."""
        total, parts, micro = self._sequences, self.mini_batches, self.micro_batch
        product = f"{self.prompts_per_step} prompts x {self.samples} samples"
        rule = f"must divide the {total} sequences of a step ({product})"
        _require(total % parts == 0, "mini_batches", parts, rule)
        rows = total // parts
        rule = f"must divide the {rows} sequences of a mini-batch ({product},"
        rule += f" mini_batches = {parts})"
        _require(not micro or rows % micro == 0, "micro_batch", micro, rule)

    def _check_noise_scale(self) -> None:
        """Refuses to measure the gradient's noise from micro-batches that are not independent."""
        rows = self._sequences // self.mini_batches
        micro = self.micro_batch or rows
        rule = f"needs a micro_batch below the {rows} sequences of a mini-batch, and a multiple"
        rule += f" of the {self.samples} samples of a prompt: groups stay together"
        _require(micro < rows and micro % self.samples == 0, "noise_scale", True, rule)

    def _check_refills(self) -> None:
        """Refuses to draw again where no reward says that a group has no signal."""
        refills, estimator = self.refills, self.objective.estimator
        _require(refills >= 0, "refills", refills, "must be 0 or more")
        if not refills:
            return
        rule = f"must be 0: the estimator {estimator!r} learns from groups of equal rewards too"
        _require(estimator in advantages.GROUP_BASELINES, "refills", refills, rule)
        rule = "must be 0 with one sample a prompt: no group of one has unequal rewards"
        _require(self.samples > 1, "refills", refills, rule)

    def _check_staleness(self) -> None:
        """Refuses to draw ahead while the state is to leave the devices."""
        ahead = self.max_staleness
        _require(ahead >= 0, "max_staleness", ahead, "must be 0 or more")
        rule = "must be 0 with offload, which takes the state away while a step is drawn"
        _require(not (ahead and self.offload), "max_staleness", ahead, rule)

    def _check_turns(self, turns: Turns) -> None:
        """Refuses what there is not for episodes of several turns."""
        rule = f"must be at most the {self.longest} tokens of an episode, but is {turns.max_tokens}"
        _require(turns.max_tokens <= self.longest, "max_tokens", turns.max_tokens, rule)
        for field, only in (("max_staleness", 0), ("routing", "own")):
            rule = f"must be {only!r} for episodes of several turns"
            _require(getattr(self, field) == only, field, getattr(self, field), rule)
        estimator, of_tokens = self.objective.estimator, advantages.OF_TOKENS
        rule = "needs greedy responses, which there are not for episodes of several turns"
        _require(not self.objective.needs_greedy, "estimator", estimator, rule)
        rule = f"needs an estimator of what follows each token: {', '.join(sorted(of_tokens))}"
        _require(self.credit != "turn" or estimator in of_tokens, "credit", self.credit, rule)
        # Rows of one episode are not independent.
        rule = 'needs equally many sequences in a micro-batch, and history = "cut" adds some'
        cuts = turns.history == "cut"
        _require(not (cuts and self.noise_scale), "noise_scale", True, rule)

    def _check_learner_rows(self) -> None:
        """Refuses a placement of the learner whose devices could not have equally many rows."""
        rows = {"a step": self._sequences, "a mini-batch": self._sequences // self.mini_batches}
        if self.micro_batch:
            rows["a micro-batch"] = self.micro_batch
        for what, count in rows.items():
            _check_spread("placement", self.placement, count, f"the {count} sequences of {what}")

    def _check_sampler_rows(self) -> None:
        """Refuses a placement of the sampler whose devices could not have equally many rows."""
        where, prompts, count = self.sampler_placement, self.prompts_per_step, self._sequences
        _check_spread("sampler_placement", where, count, f"the {count} sequences of a step")
        if self.slots:
            _check_spread("sampler_placement", where, self.slots, f"the {self.slots} slots")
        rule = f"must be a multiple of the sampler's {where.shards_text}: the estimator draws one"
        rule += " greedy response a prompt"
        spread = not self.objective.needs_greedy or prompts % where.shards == 0
        _require(spread, "prompts_per_step", prompts, rule)


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


def _check_spread(field: str, where: Placement, count: int, what: str) -> None:
    if count % where.shards:
        sizes = {axis: getattr(where, axis) for axis in ROWS}
        # One that alone does not divide them, or else the largest, so that it is one that was set.
        largest = max(sizes, key=sizes.__getitem__)
        axis = next((axis for axis, size in sizes.items() if count % size), largest)
        rule = f"{where.shards_text} must divide {what}"
        raise RuleError(field, str(where), rule, axis=axis)


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
