"""What a run can be asked for: one frozen value, checked when it is made.

`config.toml.load` makes a `RunConfig` from a TOML file and the command line, and
`config.toml.dump` writes it out, defaults included. It is built once, at the edge; nothing below
the command line reads one.
"""

from math import lcm
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tim_jax import corrections
from tim_jax.app.config.model import LoraSection, Model
from tim_jax.app.config.optimization import Optimizer
from tim_jax.app.config.placement import PlacementSection
from tim_jax.app.config.sections import (
    TABLE,
    BuiltinTask,
    CustomTask,
    DatasetTask,
    Evaluation,
    GymTask,
    Learner,
    NumericsSection,
    RunSection,
    SamplerSection,
    SamplingSection,
    Section,
    Warmup,
    refusal,
)
from tim_jax.common.errors import InputError
from tim_jax.objectives import Objective, advantages

# From so many horizons a step on, the KL coefficient's factor could reach 0; see `shaping`.
_STEP_OVER_HORIZON = 5
_MOST_TOKENS = 2**31  # of one array: their places are numbers of 32 bits


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
        BuiltinTask | GymTask | Annotated[DatasetTask, TABLE] | CustomTask,
        Field(discriminator="kind"),
    ] = BuiltinTask()
    warmup: Annotated[Warmup, TABLE] = Warmup()
    eval: Evaluation = Evaluation()
    run: RunSection = RunSection()

    @property
    def objective(self) -> Objective:
        """The objective: the preset and its changes, with the longest response filled in."""
        return self.learner.objective.value(self.sampling.max_response_length)

    @property
    def sequences_per_step(self) -> int:
        """Sequences that one step draws: prompts times samples."""
        return self.learner.prompts_per_step * self.sampling.samples_per_prompt

    @property
    def updates(self) -> int:
        """Of the whole run."""
        return self.steps * self.learner.mini_batches * self.learner.epochs

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
        free = ("exact", "eval", "run", "placement", *batching, *memory, "numerics.family")
        bound = self.optimizer.schedule != "constant" and self.optimizer.total_steps is None
        return free if bound else ("steps", *free)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_objective()
        self._check_correction()
        self._check_tokens()
        self._check_batches()
        self._check_drawing()
        self._check_noise_scale()
        self._check_lengths()
        self._check_staleness()
        self._check_loss_scale()
        if self.exact == "required" and self.numerics.family == "native":
            raise refusal(
                "exact", self.exact, 'native numerics are not exact; set "report", or family tiles'
            )
        alone = self.sampler.mismatch and not self.sampler.both_sides
        active = self.sampler.dial.active if alone else ()
        if self.exact == "required" and active:
            raise refusal(
                "exact",
                self.exact,
                f'sampler.mismatch has {active[0].name!r}, which is not exact; set "report"',
            )
        if self.warmup.steps and self.task.kind != "builtin":
            raise refusal(
                "warmup.steps",
                self.warmup.steps,
                "only built-in tasks have solutions to learn from",
            )
        if self.warmup.steps and self.lora is not None:
            raise refusal(
                "warmup.steps",
                self.warmup.steps,
                "must be 0 with adapters, whose base stays as it is; train one run with the warm"
                " start and name its model in model.path",
            )
        end = self.optimizer.total_steps or self.updates
        if self.optimizer.schedule != "constant" and self.optimizer.warmup_steps >= end:
            raise refusal(
                "optimizer.warmup_steps",
                self.optimizer.warmup_steps,
                f"must be less than the schedule's {end} updates",
            )
        return self

    def _check_objective(self) -> None:
        group = self.sampling.samples_per_prompt
        try:
            objective = self.objective
            if self.sampling.top_k or self.sampling.top_p < 1:
                objective.check_whole_distribution()
        except InputError as error:
            raise refusal("learner.objective", None, str(error)) from error
        try:
            advantages.check_group_size(objective.estimator, group)
        except InputError as error:
            raise refusal("sampling.samples_per_prompt", group, str(error)) from error
        horizon, sequences = objective.reward_kl_horizon, self.sequences_per_step
        if objective.controller is not None and sequences >= _STEP_OVER_HORIZON * horizon:
            raise refusal(
                "learner.objective.reward_kl_horizon",
                horizon,
                f"must be more than {sequences // _STEP_OVER_HORIZON}, a fifth of the {sequences}"
                " sequences of a step: one step could end the penalty",
            )

    def _check_correction(self) -> None:
        section, objective = self.learner, self.objective
        correction = corrections.build(section.corrections)
        try:
            corrections.check(
                correction,
                mode=section.mode,
                loss=objective.loss,
                has_ratio=objective.has_ratio,
                updates=section.mini_batches * section.epochs,
            )
        except InputError as error:
            raise refusal("learner.corrections", list(section.corrections), str(error)) from error
        try:
            if objective.reject_before_advantages:
                corrections.check_rejecting_first(correction, section.mode)
        except InputError as error:
            raise refusal("learner.objective.reject_before_advantages", True, str(error)) from error

    def _check_drawing(self) -> None:
        prompts, where = self.learner.prompts_per_step, self.placement.for_sampler
        greedy = "greedy_rewards" in advantages.needs(self.objective.estimator)
        if greedy and prompts % where.shards:
            raise refusal(
                "learner.prompts_per_step",
                prompts,
                f"must be a multiple of the sampler's {where.shards_text}: the estimator"
                f" {self.objective.estimator!r} draws one greedy response a prompt",
            )
        if not self.learner.refills:
            return
        if rule := advantages.why_no_refills(self.objective.estimator):
            raise refusal("learner.refills", self.learner.refills, rule)
        if self.sampling.samples_per_prompt == 1:
            raise refusal(
                "learner.refills",
                self.learner.refills,
                "must be 0 with samples_per_prompt = 1: no group of one has unequal rewards",
            )

    def _check_staleness(self) -> None:
        steps = self.sampler.max_staleness
        if steps and self.learner.offload:
            raise refusal(
                "sampler.max_staleness",
                steps,
                "must be 0 with learner.offload, which takes the state away while a step is drawn",
            )

    def _check_loss_scale(self) -> None:
        dtype, sampler = self.numerics.dtype, self.sampler
        if self.optimizer.loss_scale is None or dtype == "float16":
            return
        shared = [entry for entry in sampler.mismatch if sampler.both_sides]
        if not any(e.get("name") == "compute" and e.get("dtype") == "float16" for e in shared):
            raise refusal(
                "optimizer.loss_scale.initial",
                self.optimizer.loss_scale.initial,
                f"is for a learner in float16, and numerics.dtype is {dtype!r}, whose gradients"
                " need no scale; leave optimizer.loss_scale out",
            )

    def _check_noise_scale(self) -> None:
        section = self.learner
        rows = self.sequences_per_step // section.mini_batches
        if not section.noise_scale:
            return
        group, micro = self.sampling.samples_per_prompt, section.micro_batch or rows
        if micro >= rows or micro % group:
            raise refusal(
                "learner.noise_scale",
                True,
                f"needs a micro_batch below the {rows} sequences of a mini-batch, and a multiple"
                f" of samples_per_prompt = {group}: groups stay together",
            )

    def _check_batches(self) -> None:
        total, minis = self.sequences_per_step, self.learner.mini_batches
        product = f"{self.learner.prompts_per_step} prompts x {self.sampling.samples_per_prompt}"
        if total % minis:
            raise refusal(
                "learner.mini_batches", minis, f"must divide the {total} sequences ({product})"
            )
        micro = self.learner.micro_batch
        if micro and (total // minis) % micro:
            raise refusal(
                "learner.micro_batch",
                micro,
                f"must divide the {total // minis} sequences of a mini-batch"
                f" ({product} samples / {minis})",
            )
        self._check_placement(total, total // minis, micro)

    def _check_tokens(self) -> None:
        length = self.sampling.max_prompt_length + self.sampling.max_response_length
        prompts, samples = self.learner.prompts_per_step, self.sampling.samples_per_prompt
        sizes = {
            "sampling.max_response_length": (self.sampling.max_response_length, 1),
            "sampling.max_prompt_length": (self.sampling.max_prompt_length, 1),
            "sampling.samples_per_prompt": (samples, samples),
            "learner.prompts_per_step": (prompts, prompts * samples),
            "eval.samples": (self.eval.samples, self.eval.samples),
            "warmup.batch": (self.warmup.batch, self.warmup.batch),
        }
        for key, (value, sequences) in sizes.items():
            if sequences * length >= _MOST_TOKENS:
                raise refusal(
                    key, value, f"makes {sequences} sequences of {length} tokens, over 2**31 tokens"
                )

    def _check_placement(self, total: int, mini_batch: int, micro: int | None) -> None:
        learner, sampler = self.placement.value, self.placement.for_sampler
        rows = {"a step": total, "a mini-batch": mini_batch}
        if micro:
            rows["a micro-batch"] = micro
        for what, count in rows.items():
            if count % learner.shards:
                raise refusal(
                    "placement.fsdp",
                    self.placement.fsdp,
                    f"{learner.shards_text} must divide the {count} sequences of {what}",
                )
        for count, what in ((total, "a step"), (self.sampler.slots, "sampler.slots")):
            if count and count % sampler.shards:
                raise refusal(
                    "placement.sampler.fsdp",
                    sampler.fsdp,
                    f"{sampler.shards_text} must divide the {count} sequences of {what}",
                )
        for key, where in (("placement.tensor", learner), ("placement.sampler.tensor", sampler)):
            if self.column_tiles % where.tensor:
                raise refusal(
                    key, where.tensor, f"must divide numerics.column_tiles = {self.column_tiles}"
                )

    def _check_lengths(self) -> None:
        architecture, sampling = self.model.random_architecture, self.sampling
        longest = sampling.max_prompt_length + sampling.max_response_length
        if architecture and longest > architecture.max_positions:
            raise refusal(
                "sampling.max_response_length",
                sampling.max_response_length,
                f"with max_prompt_length = {sampling.max_prompt_length} is {longest}, more than"
                f" the model's {architecture.max_positions} positions",
            )
