"""What a run can be asked for: one frozen value, checked when it is made.

`config.toml.load` makes a `RunConfig` from a TOML file and the command line, and
`config.toml.dump` writes it out, defaults included. It is built once, at the edge; nothing below
the command line reads one.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from math import lcm, prod
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

import optax
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from tim_jax import corrections, placement
from tim_jax.app.config.sections import (
    TABLE,
    BuiltinTask,
    Count,
    CustomTask,
    DatasetTask,
    Evaluation,
    GymTask,
    Learner,
    NumericsSection,
    Positive,
    RunSection,
    SamplerSection,
    SamplingSection,
    Section,
    Share,
    Warmup,
    part,
    refusal,
)
from tim_jax.common.errors import InputError
from tim_jax.corrections import Correction
from tim_jax.model.adapters import Lora
from tim_jax.objectives import Objective
from tim_jax.optimizers import AdamW, Decay, LossScale
from tim_jax.placement import Devices, Placement
from tim_jax.rl import rules
from tim_jax.rl.rules import Turns
from tim_jax.schedules import SurgeDetector


class Architecture(Section):
    """A Qwen3 to be initialised at random; its vocabulary is that of the task's tokenizer."""

    hidden_size: Count = 128
    num_layers: Count = 4
    num_heads: Count = 4
    num_kv_heads: Count = 2
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 32
    intermediate_size: Count = 512
    max_positions: Count = 256
    """Longest prompt and response together, in tokens."""
    tied: bool = True
    """The head is the transpose of the embedding."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            rule = f"must divide num_heads = {self.num_heads}"
            raise refusal("num_kv_heads", self.num_kv_heads, rule)
        return self


PRESETS: Mapping[str, Architecture] = {
    "tiny": Architecture(),  # about 1M parameters
    "small": Architecture(
        hidden_size=256,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=768,
        max_positions=1024,
    ),
}


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """Adapters are trained in place of all weights, which stay as they are.

    Without `path`, keys that are left out have the defaults of `Lora`.
    """

    rank: int | None = None
    """Columns of A and rows of B."""
    alpha: float | None = None
    """A B is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Names of matrices such as "q_proj"; none: all of attention and MLP."""
    path: str | None = None
    """A folder with an adapter of PEFT to start from, which says rank, alpha and targets."""

    def __post_init__(self) -> None:
        keys = {one.name: getattr(self, one.name) for one in fields(Lora)}
        given = {name: value for name, value in keys.items() if value is not None}
        values = asdict(Lora(**given)) if self.path is None else dict.fromkeys(keys)
        # A config that was written without a path has all defaults, which nobody has set.
        if self.path is not None and given and given != asdict(Lora()):
            raise InputError("Lora: path has a rank, alpha and targets of its own; leave them out")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def value(self) -> Lora:
        """The adapters of a section without `path`."""
        return part(Lora, self)


class Model(Section):
    """Where the model comes from: exactly one of `path`, `preset` and `architecture`."""

    path: str | None = None
    """Checkpoint folder, or a name on the Hugging Face hub."""
    preset: Literal["tiny", "small"] | None = None
    """A random-initialised architecture by name."""
    architecture: Architecture | None = None
    """A random-initialised architecture, spelt out."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """Whether text prompts are put into the tokenizer's chat template; auto: if it has one."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template, such as `enable_thinking = false` for Qwen3."""

    @property
    def random_architecture(self) -> Architecture | None:
        """The architecture to initialise at random; None if the model comes from `path`."""
        return PRESETS[self.preset] if self.preset else self.architecture

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("path", "preset", "architecture") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise refusal("", None, f"needs exactly one of path, preset, architecture; has {found}")
        return self


class DecayOff(Section):
    """No length-triggered decay."""

    kind: Literal["off"] = "off"


_OFF = DecayOff()


class DecayFixed(Section):
    """The learning rate is halved every `period` updates (Beyond Precision, algorithm 1).

    A step makes epochs x mini-batches of them.
    """

    kind: Literal["fixed"]
    period: Count
    floor: Share = Decay.floor
    """The lowest share of the first learning rate."""


@dataclass(frozen=True, kw_only=True)
class DecayReactive(SurgeDetector):
    """As fixed, with the period found from the surge of the mean response length.

    The other keys are the detector's, in lengths: one a step. `max_length`, if left out, is the
    run's max_tokens.
    """

    kind: Literal["reactive"]
    multiplier: Positive = Decay.multiple
    """Period over the step of the surge."""
    floor: Share = Decay.floor
    """The lowest share of the first learning rate."""


@dataclass(frozen=True, kw_only=True)
class Optimizer(AdamW):
    """AdamW, its schedule, and the factors on its steps that come on top.

    `total_steps`, if left out, are the run's updates: steps x epochs x mini-batches.
    """

    learning_rate: float = 1e-3
    length_decay: Annotated[
        DecayOff | DecayFixed | Annotated[DecayReactive, TABLE], Field(discriminator="kind")
    ] = _OFF
    loss_scale: Annotated[LossScale, TABLE] | None = None
    """Dynamic loss scaling, of runs whose learner computes in float16. Left out: with its defaults
    in float16, and none otherwise."""

    def decay(self, max_tokens: int | None) -> Decay | None:
        """The decay of a run whose longest response has this many tokens, if it has one."""
        match self.length_decay:
            case DecayFixed(period=period, floor=floor):
                return Decay(period=period, floor=floor)
            case DecayReactive(multiplier=multiple, floor=floor) as own:
                detector = part(SurgeDetector, own, max_length=own.max_length or max_tokens)
                return Decay(multiple=multiple, floor=floor, detector=detector)
        return None

    def chain(self, *, steps: int, max_tokens: int) -> optax.GradientTransformationExtraArgs:
        """The optimizer of a run with this many updates and responses of at most this length."""
        end = None if self.schedule == "constant" else self.total_steps or steps
        chain = part(AdamW, self, total_steps=end).transform(self.decay(max_tokens))
        return chain if self.loss_scale is None else self.loss_scale.transform(chain)


@dataclass(frozen=True, kw_only=True)
class PlacementSection(Placement):
    """Where the learner runs, and the sampler."""

    sampler: Annotated[Placement, TABLE] | None = None
    """Left out: on the learner's mesh, with its very weights. Else they are moved every step."""
    split: bool = False
    """The sampler has devices of its own, those after the learner's. With `sampler.max_staleness`
    it draws the next steps on them while the learner learns."""

    @property
    def value(self) -> Placement:
        """The learner's."""
        return part(Placement, self)

    @property
    def for_sampler(self) -> Placement:
        """The sampler's placement: its own, or the learner's where it has none."""
        return self.sampler or self.value

    @property
    def all_devices(self) -> int:
        """How many devices learner and sampler take together."""
        learner, sampler = self.devices, self.for_sampler.devices
        return learner + sampler if self.split else max(learner, sampler)

    def of_sampler(self, devices: Devices) -> Devices:
        """What the sampler's mesh is made of, where there are `devices`.

        Raises:
            InputError: as `placement.split`.
        """
        return placement.split(self.value, self.for_sampler, devices) if self.split else devices


# The keys of what `Training` calls otherwise; the other fields of the learner keep their names.
_KEYS = {
    "samples": "sampling.samples",
    "max_tokens": "sampling.max_tokens",
    "estimator": "learner.objective.estimator",
    "correction": "learner.corrections",
    "reject_before_advantages": "learner.objective.reject_before_advantages",
    "reward_kl_horizon": "learner.objective.reward_kl_horizon",
    "max_staleness": "sampler.max_staleness",
}
_MOST_TOKENS = 2**31  # of one array: their places are numbers of 32 bits


@contextmanager
def _refused_by_key(config: "RunConfig") -> Iterator[None]:
    """A context in which a broken rule is said of the key that sets the field."""
    try:
        yield
    except rules.RuleError as error:
        field = error.field
        key, value = _KEYS.get(field, f"learner.{field}"), error.value
        if field == "correction":
            value = list(config.learner.corrections)
        if error.axis is not None:  # of a placement
            own = field == "sampler_placement" and config.placement.sampler is not None
            key = f"placement.{'sampler.' if own else ''}{error.axis}"
            value = attrgetter(key)(config)
        raise refusal(key, value, error.rule) from error
    except InputError as error:
        raise refusal("learner.objective", None, str(error)) from error


class RunConfig(Section):
    """A whole run."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of everything random. Samples are named by (seed, step, prompt, sample, position)."""
    steps: Annotated[int, Field(ge=1, lt=2**31)] = 100
    exact: Literal["required", "report"] = "required"
    """required: stop at the first token whose two log-probs differ. report: only count them."""
    model: Model = Model(preset="tiny")
    lora: Annotated[LoraSection, TABLE] | None = None
    """Left out: all weights are trained."""
    numerics: NumericsSection = NumericsSection()
    placement: Annotated[PlacementSection, TABLE] = PlacementSection()
    sampling: Annotated[SamplingSection, TABLE] = SamplingSection()
    sampler: SamplerSection = SamplerSection()
    learner: Learner = Learner()
    optimizer: Annotated[Optimizer, TABLE] = Optimizer()
    task: Annotated[
        Annotated[BuiltinTask, TABLE]
        | Annotated[GymTask, TABLE]
        | Annotated[DatasetTask, TABLE]
        | Annotated[CustomTask, TABLE],
        Field(discriminator="kind"),
    ] = BuiltinTask()
    warmup: Annotated[Warmup, TABLE] = Warmup()
    eval: Evaluation = Evaluation()
    run: RunSection = RunSection()

    @property
    def objective(self) -> Objective:
        """The objective: the preset and its changes, with the longest response filled in."""
        return self.learner.objective.value(self.sampling.longest)

    @property
    def correction(self) -> Correction:
        """The chain of the learner's corrections."""
        return corrections.build(self.learner.corrections)

    @property
    def turns(self) -> Turns | None:
        """How episodes of several turns go on, if there are some."""
        turns, tokens = self.sampling.max_turns, self.sampling.max_tokens
        return None if turns is None else Turns(turns, tokens, self.task.history)

    @property
    def sequences_per_step(self) -> int:
        """Sequences that one step draws: prompts times samples."""
        return self.learner.prompts_per_step * self.sampling.samples

    @property
    def update_counts(self) -> dict[str, int]:
        """The keys of the learner that a step's updates are the product of."""
        learner = self.learner
        return {"mini_batches": learner.mini_batches, "epochs": learner.epochs}

    @property
    def updates_per_step(self) -> int:
        """Updates of a step."""
        return prod(self.update_counts.values())

    @property
    def updates(self) -> int:
        """Updates of the whole run."""
        return self.steps * self.updates_per_step

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward and backward."""
        return self.learner.micro_batch or self.sequences_per_step // self.learner.mini_batches

    @property
    def column_tiles(self) -> int:
        """Parts that weight matrices are multiplied in."""
        tensor = self.placement.tensor, self.placement.for_sampler.tensor
        return self.numerics.column_tiles or lcm(*tensor)

    def may_change(self) -> tuple[str, ...]:
        """Keys in which a resumed run may differ from what it was: none that changes past steps.

        What matters of `numerics.family` is the family that "auto" stood for, which the job checks.
        """
        batching = "sampler.slots", "sampler.halvings", "sampler.pages"
        memory = "learner.remat", "learner.offload"  # not micro_batch, which orders the sums
        # A reward's limit ends the run and changes no grade; an environment's ends an episode.
        calls = "task.reward_time_limit", "task.environment_workers"
        held_out = "eval", "task.eval_subset"
        # What was moved and has marks in checkpoints: all of the rows, and of the base of adapters.
        # Other weights have none, and a run would go on with those of its checkpoint.
        moved = "task.path", "task.eval_path", *(() if self.lora is None else ("model.path",))
        alone = "exact", "run", "placement", "numerics.family"
        free = *alone, *held_out, *moved, *batching, *memory, *calls
        bound = self.optimizer.schedule != "constant" and self.optimizer.total_steps is None
        return free if bound else ("steps", *free)

    def _refusal(self, key: str, rule: str) -> PydanticCustomError:
        return refusal(key, attrgetter(key)(self), rule)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_tokens()
        self._check_rules()
        self._check_lengths()
        self._check_optimizer()
        if self.exact == "required":
            if self.numerics.family == "native":
                rule = 'native numerics are not exact; set "report", or family tiles'
                raise self._refusal("exact", rule)
            active = self.sampler.own_dial.active if self.sampler.mismatch else ()
            if active:
                rule = f'sampler.mismatch has {active[0].name!r}, which is not exact; set "report"'
                raise self._refusal("exact", rule)
        if self.warmup.steps and self.task.kind != "builtin":
            raise self._refusal("warmup.steps", "only built-in tasks have solutions to learn from")
        if self.task.environment is not None and self.sampling.max_turns is None:
            rule = "is for episodes of several turns; set sampling.max_turns too"
            raise self._refusal("task.environment", rule)
        for name, rule in self.task.unread():
            raise self._refusal(f"task.{name}", rule)
        if self.sampling.max_turns is None and self.task.history != "refuse":
            rule = "is for episodes of several turns; set sampling.max_turns too"
            raise self._refusal("task.history", rule)
        if self.task.environment is not None and self.task.reward is not None:
            rule = "must be left out: task.environment gives rewards"
            raise self._refusal("task.reward", rule)
        if self.warmup.steps and self.lora is not None:
            raise self._refusal(
                "warmup.steps",
                "must be 0 with adapters, whose base stays as it is; train one run with the warm"
                " start and name its model in model.path",
            )
        return self

    def _check_tokens(self) -> None:
        length = self.sampling.max_prompt_length + self.sampling.longest
        for key, sequences in (
            ("sampling.max_tokens", 1),
            ("sampling.max_prompt_length", 1),
            ("sampling.samples", self.sampling.samples),
            ("learner.prompts_per_step", self.sequences_per_step),
            ("eval.samples", self.eval.samples),
            ("warmup.batch", self.warmup.batch),
        ):
            if sequences * length >= _MOST_TOKENS:
                rule = f"makes {sequences} sequences of {length} tokens, over 2**31 tokens"
                raise self._refusal(key, rule)

    def _check_rules(self) -> None:
        """The rules that any run has, by the names of this configuration's keys."""
        sampling, where = self.sampling, self.placement
        with _refused_by_key(self):
            part(
                rules.Settings,
                self.learner,
                objective=self.objective,
                correction=self.correction,
                samples=sampling.samples,
                max_staleness=self.sampler.max_staleness,
                slots=self.sampler.slots,
                placement=where.value,
                sampler_placement=where.for_sampler,
                truncated=sampling.truncated,
                longest=sampling.longest,
                max_prompt_length=sampling.max_prompt_length,
                turns=self.turns,
            ).check()
        for key, own in (("tensor", where.value), ("sampler.tensor", where.for_sampler)):
            if self.column_tiles % own.tensor:
                rule = f"must divide numerics.column_tiles = {self.column_tiles}"
                raise refusal(f"placement.{key}", own.tensor, rule)

    def _check_lengths(self) -> None:
        architecture, sampling = self.model.random_architecture, self.sampling
        longest = sampling.max_prompt_length + sampling.longest
        if architecture and longest > architecture.max_positions:
            raise self._refusal(
                f"sampling.{sampling.limit}",
                f"with max_prompt_length = {sampling.max_prompt_length} is {longest}, more than"
                f" the model's {architecture.max_positions} positions",
            )

    def _check_optimizer(self) -> None:
        own, sampler, dtype = self.optimizer, self.sampler, self.numerics.dtype
        shared = sampler.mismatch if sampler.both_sides else ()
        learner = next((e.get("dtype") for e in shared if e.get("name") == "compute"), dtype)
        if own.loss_scale is not None and learner != "float16":
            raise self._refusal(
                "optimizer.loss_scale.initial",
                f"is for a learner in float16, and this one computes in {learner!r}, whose"
                " gradients need no scale; leave optimizer.loss_scale out",
            )
        if own.schedule == "constant":
            for key in ("optimizer.total_steps", "optimizer.final_share"):
                if attrgetter(key)(self):
                    rule = "has no effect on a constant learning rate; set optimizer.schedule too"
                    raise self._refusal(key, rule)
        elif own.warmup_steps >= (end := own.total_steps or self.updates):
            rule = f"must be less than the schedule's {end} updates"
            raise self._refusal("optimizer.warmup_steps", rule)
