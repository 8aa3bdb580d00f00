"""The sections of a run's configuration, each a frozen value that is checked when it is made.

Omitted keys have the defaults that stand here. What several sections say together is checked by
`config.RunConfig`.

The section of a run's configuration that says on which devices it runs.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tim_jax import corrections, objectives
from tim_jax.errors import InputError
from tim_jax.mismatch import Mismatch, named
from tim_jax.numerics import Family
from tim_jax.objectives import Aggregation, Denominator, Loss, Objective
from tim_jax.objectives.advantages import Estimator
from tim_jax.objectives.losses import KL
from tim_jax.placement import Placement

WandbMode = Literal["online", "offline", "disabled"]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Function = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
# TOML has arrays, not tuples; their items stay strict.
TokenIds = Annotated[tuple[Whole, ...], Field(strict=False)]
Counts = Annotated[tuple[Count, ...], Field(strict=False)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def refusal(key: str, value: Any, rule: str) -> PydanticCustomError:
    """A broken rule between keys: the dotted key to blame, its value, and what would be right."""
    return PydanticCustomError("rule", "{rule}", {"key": key, "value": value, "rule": rule})


class NumericsSection(Section):
    """How numbers are computed; see `tim_jax.numerics`."""

    family: Family = "tiles"
    """tiles: exact by construction. native: plain XLA. pallas_gpu, pallas_tpu: exact kernels."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation. The master weights are float32 in any case."""
    column_tiles: Count | None = None
    """Parts that weight matrices are multiplied in: bits are the same for every size of the tensor
    axis that divides it. Left out: the largest tensor axis of the run."""
    compiler_options: dict[str, str | bool | int] = {}
    """XLA's, for every program of the run, such as `xla_allow_excess_precision = false`."""


class SamplingSection(Section):
    """The distribution that training responses are drawn from."""

    samples_per_prompt: Count = 8
    """Group size."""
    max_prompt_length: Count = 32
    """In tokens. A longer prompt is refused."""
    max_response_length: Count = 64
    """In tokens, the end token included."""
    temperature: Positive = 1.0
    top_k: Whole = 0
    """Draw from the k most probable tokens; 0 is off."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the most probable tokens that together have this probability; 1 is off."""
    stop_tokens: TokenIds = ()
    """Token ids that end a response, besides the tokenizer's own."""


class SamplerSection(Section):
    """How a step is sampled, and what the sampler does otherwise than the learner."""

    micro_batch: Count | None = None
    """Sequences sampled at a time, over all devices; left out: all of a step. Memory only."""
    mismatch: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Entries of `tim_jax.mismatch`, in order: `{name = "kv_cache", dtype = "float8_e4m3fn"}`."""

    @property
    def dial(self) -> Mismatch:
        return named.build(self.mismatch)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for index, entry in enumerate(self.mismatch):
            try:
                named.build([entry])
            except InputError as error:
                raise refusal(f"mismatch[{index}]", entry, str(error)) from error
        return self


Preset = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_plus_plus",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "dppo",
]


class ObjectiveSection(Section):
    """Advantages and token loss: a preset of `tim_jax.objectives`, and changes to it.

    A key that is left out is as the preset has it.
    """

    preset: Preset = "grpo"
    estimator: Estimator | None = None
    loss: Loss | None = None
    clip_low: NonNegative | None = None
    """Where the loss clips its ratio, below and above; left out, and not the preset's: where the
    loss's paper does."""
    clip_high: NonNegative | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    loss_options: dict[str, float] | None = None
    """Further options of the loss, such as `{ ratio_cap = 5.0 }` of "dppo_tv"."""
    aggregation: Aggregation | None = None
    denominator: Denominator | None = None
    """What rejected tokens count in: "response" (as if kept), "survivors" (not), "verl"."""
    kl_coefficient: NonNegative | None = None
    """Above 0 a frozen copy of the first weights is kept as the reference."""
    kl_estimator: KL | None = None
    kl_cap: Positive | None = None
    """A bound on the size of a token's KL estimate."""
    entropy_coefficient: float | None = None
    """Of the policy's entropy, which is added to the objective."""
    advantage_eps: NonNegative | None = None
    drop_uninformative: bool | None = None
    """Leave out groups whose rewards are all equal."""
    drop_cut: bool | None = None
    """Leave out responses that the longest length cut off."""
    overlong_cache: Count | None = None
    """Tokens before the longest length from which on a response loses reward, down to -1."""
    reward_kl_coefficient: NonNegative | None = None
    """Of the KL to the reference that is taken off the reward."""
    reward_kl_target: Positive | None = None
    """KL in nats a response that this coefficient is steered to."""
    reward_kl_horizon: Count | None = None
    """Responses over which it is steered."""

    def value(self, max_response_length: int) -> Objective:
        """Returns the objective; `max_response_length` is the length of 'constant_length'."""
        changes = self.model_dump(exclude={"preset"}, exclude_none=True)
        return objectives.PRESETS[self.preset](max_length=max_response_length, **changes)


class Learner(Section):
    """From rollouts to a gradient."""

    prompts_per_step: Count = 8
    micro_batch: Count | None = None
    """Sequences per forward and backward; left out: a whole mini-batch. Memory only."""
    remat: bool = False
    """Recompute each layer in the backward instead of keeping its activations. Memory only."""
    length_buckets: Count = 1
    """Response lengths that the learner is compiled for: the longest, its half, its quarter, ..."""
    refills: Whole = 0
    """How often a step may draw again for groups whose rewards are all equal (DAPO)."""
    noise_scale: bool = False
    """Log the gradient's noise scale, from the gradients of the micro-batches."""
    mini_batches: Count = 1
    """Updates per pass over a step's sequences."""
    epochs: Count = 1
    """Passes over a step's sequences."""
    mode: Literal["bypass", "recompute"] = "bypass"
    """Old log-probs: the rollout's own (bypass), or those of a forward of the learner."""
    objective: ObjectiveSection = ObjectiveSection()
    max_skipped: Count = 5
    """Updates in a row with a loss or gradient that is not finite, each skipped, that end a run."""
    corrections: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Recipes and blocks of `tim_jax.corrections`, in order: `{name = "token_tis", cap = 2.0}`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for index, entry in enumerate(self.corrections):
            try:
                corrections.build([entry])
            except InputError as error:
                raise refusal(f"corrections[{index}]", entry, str(error)) from error
        return self


class BuiltinTask(Section):
    """A small task of `tim_jax.tasks.builtin`."""

    kind: Literal["builtin"] = "builtin"
    name: Literal["running_sums", "sorting", "countdown"] = "running_sums"
    parameters: dict[str, Any] = {}
    """Keywords of the task's function, such as `digits = [4, 10]`."""
    reward: Function | None = None
    """A reward of your own, `module:function`, in place of the task's."""


class GymTask(Section):
    """A reasoning-gym dataset (extra `gym`)."""

    kind: Literal["gym"]
    name: str
    parameters: dict[str, Any] = {}
    """The dataset's own, without `seed` and `size`."""
    train_size: Count = 4096
    eval_size: Count = 128
    seed: Whole = 0
    time_limit: Positive = 5.0
    """CPU seconds that scoring one answer may take."""
    reward: Function | None = None
    """A reward of your own, `module:function`, in place of the dataset's."""


class DatasetTask(Section):
    """Rows of JSON lines, Parquet or the hub (extra `math` for its grader)."""

    kind: Literal["dataset"]
    path: str
    """File, folder or hub name."""
    split: str = "train"
    subset: str | None = None
    """Configuration of a hub dataset."""
    prompt_column: str | None = None
    """Left out: found from the columns, as is `answer_column`."""
    answer_column: str | None = None
    template: str | None = None
    """Text around each prompt, with `{prompt}` in it."""
    system: str | None = None
    """System prompt; makes a text prompt a chat."""
    eval_path: str | None = None
    eval_split: str | None = None
    eval_share: Share = 0.05
    """Held out if there is neither an `eval_path` nor an `eval_split`."""
    eval_limit: Count | None = None
    seed: Whole = 0
    """Of the share that is held out."""
    time_limit: Positive = 5.0
    """CPU seconds that grading one answer may take."""
    reward: Function | None = None
    """A reward of your own, `module:function`; left out: math-verify."""


class CustomTask(Section):
    """A task made by a function of yours."""

    kind: Literal["custom"]
    factory: Function
    """`module:function`; returns a `tim_jax.tasks.base.Task`."""
    parameters: dict[str, Any] = {}
    """Its keywords."""
    reward: Function | None = None
    """A reward of your own, `module:function`, in place of the task's."""


class Warmup(Section):
    """Supervised steps before the first RL step, for a model that knows nothing yet."""

    steps: Whole = 0
    """0 is off."""
    batch: Count = 64
    """Prompts with completions per step."""
    learning_rate: Positive = 3e-3
    worked: Share = 1.0
    """Share of completions with every step of the working."""
    partial: Share = 0.0
    """Share that stops working after some steps and then answers; the rest answers at once."""
    errors: Share = 0.0
    """Share of all completions with one wrong digit."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.worked + self.partial > 1:
            raise refusal("partial", self.partial, f"with worked = {self.worked} is more than 1")
        return self


class Evaluation(Section):
    """Held-out problems, every now and then."""

    every: Whole = 20
    """Steps between evaluations, one before the first and one after the last included; 0 is off."""
    prompts: Count = 64
    samples: Count = 1
    """Per prompt; their mean reward is mean@samples."""
    k: Counts = (1,)
    """The k of pass@k, none above `samples`."""
    temperature: NonNegative = 1.0
    """0 is greedy."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(k > self.samples for k in self.k):
            raise refusal("k", list(self.k), f"must not exceed samples = {self.samples}")
        if self.temperature == 0 and self.samples > 1:
            raise refusal("samples", self.samples, "must be 1 at temperature 0: all are the same")
        return self


class RunSection(Section):
    """The run folder and what is written."""

    folder: str = "runs/default"
    checkpoint_every: Whole = 20
    """Steps between checkpoints; 0: only one, at the end."""
    keep: Count = 2
    """Checkpoints that stay."""
    sinks: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)] = ()
    """Where metrics go besides metrics.jsonl."""
    wandb_project: str = "tim-jax"
    wandb_mode: WandbMode = "online"
    samples_logged: Whole = 4
    """Completions per step written to samples.jsonl."""
    export: bool = True
    """Write the final model to the run folder, as `transformers` loads it."""


class Mesh(Section):
    """Devices by mesh axis; see `tim_jax.placement`."""

    data: Count = 1
    """Rows of the batch; every slice of devices holds the whole model."""
    fsdp: Count = 1
    """Rows of the batch, with parameters and optimizer state split over them."""
    tensor: Count = 1
    """Columns of every weight matrix, and the attention heads."""
    decode: Literal["whole", "sharded"] = "whole"
    """The sampler's weights: gathered over fsdp before the decode loop, or at every token."""

    @property
    def value(self) -> Placement:
        return Placement(self.data, self.fsdp, self.tensor, self.decode)


class PlacementSection(Mesh):
    """Where the learner runs, and the sampler."""

    sampler: Mesh | None = None
    """Left out: on the learner's mesh, with its very weights. Else they are moved every step."""

    @property
    def for_sampler(self) -> Placement:
        return self.value if self.sampler is None else self.sampler.value
