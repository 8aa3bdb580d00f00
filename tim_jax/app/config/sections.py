"""The sections of a run's configuration, each a frozen value that is checked when it is made.

Where the library has the value already (`Placement`, `Sampling`, `DatasetSource`, ...), that value
is the section, with its own defaults and checks; a section that needs more keys extends it. What
several sections say together is checked by `run.RunConfig`.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, cast, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

import tim_jax
from tim_jax import corrections, objectives
from tim_jax.common import inputs
from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.model.execution import Batching, Routing, Sampling
from tim_jax.numerics import FamilyChoice
from tim_jax.objectives import Objective
from tim_jax.rl.rules import Credit
from tim_jax.tasks import environments
from tim_jax.tasks.base import History
from tim_jax.tasks.builtin import Quality
from tim_jax.tasks.dataset import DatasetSource
from tim_jax.tasks.guard import Limits

if TYPE_CHECKING:
    from tim_jax.mismatch import Mismatch

REWARD_SECONDS = 600.0  # a judge over a network may take minutes
WandbMode = Literal["online", "offline", "disabled"]
Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Function = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
# TOML has arrays, not tuples; their items stay strict.
TokenIds = Annotated[tuple[Whole, ...], Field(strict=False)]
Counts = Annotated[tuple[Count, ...], Field(strict=False)]

T = TypeVar("T")


def _as_table(source: Any, handler: Any) -> Any:
    schema = handler(source)
    handler.resolve_ref_schema(schema)["strict"] = False
    return schema


# Marks a dataclass that is a section. Strict validation would take an instance of it alone; what is
# in its table stays strict.
TABLE = GetPydanticSchema(_as_table)


class Section(BaseModel):
    """Base of sections that are no value of the library: frozen, no unknown keys, strict types.

    The settings hold for the dataclasses among its fields too.
    """

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


@contextmanager
def refused(key: str, value: Any) -> Iterator[None]:
    """A context in which what the library refuses is a broken rule of this key."""
    try:
        yield
    except InputError as error:
        raise refusal(key, value, str(error)) from error


def part(kind: Callable[..., T], section: Any, **changes: Any) -> T:
    """The value of dataclass `kind` whose fields a section has, but for those in `changes`."""
    names = [one.name for one in fields(cast(Any, kind)) if one.name not in changes]
    own = {name: getattr(section, name) for name in names}
    return kind(**{**own, **changes})


S = TypeVar("S", bound=Section)


def _changes_objective(section: type[S]) -> type[S]:
    """Class decorator: the other fields of `Objective` become keys that may be left out."""
    hints = get_type_hints(Objective)
    own = {"max_length", *section.model_fields}
    keys = {name: (hint | None, None) for name, hint in hints.items() if name not in own}
    made = create_model(
        section.__name__,
        __base__=section,
        __module__=section.__module__,
        __doc__=section.__doc__,
        **cast(Any, keys),
    )
    return cast(type[S], made)


def _options(given: Any) -> Any:
    """Refuses what Pydantic would, but in one line instead of one for each type."""
    for name, value in given.items() if isinstance(given, dict) else ():
        if not isinstance(value, str | bool | int):
            raise refusal(name, value, "must be text, true or false, or a whole number")
    return given


class NumericsSection(Section):
    """How numbers are computed; see `tim_jax.numerics`."""

    family: FamilyChoice = "auto"
    """tiles: exact by construction. native: plain XLA. pallas_gpu, pallas_tpu: exact kernels. auto:
    tiles on CPU, pallas_gpu on NVIDIA GPUs, pallas_tpu on TPUs. pallas_mosaic_gpu: the products of
    pallas_gpu for Hopper GPUs in bfloat16, by JAX's newer compiler (JAX 0.12)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the computation. The master weights are float32 in any case. float16, which families for
    TPUs and pallas_mosaic_gpu lack, scales the loss: `optimizer.loss_scale`."""
    column_tiles: Count | None = None
    """Parts that weight matrices are multiplied in: bits are the same for every size of the tensor
    axis that divides it. Left out: the smallest number that the tensor axes of the run divide."""
    several_tiles: bool = False
    """Of kernels for TPUs, and of those for GPUs in bfloat16: small products take small tiles,
    large ones large ones. As exact as one tile if the device adds up in the same order in every
    tile, which `scripts/gpu_check.sh --only kernels` compares on a GPU."""
    compiler_options: Annotated[dict[str, str | bool | int], BeforeValidator(_options)] = {}
    """XLA's, for every program of the run, such as `xla_allow_excess_precision = false`."""


@dataclass(frozen=True, kw_only=True)
class SamplingSection(Sampling):
    """The distribution that training responses are drawn from."""

    samples: Count = 8
    """Group size."""
    max_prompt_length: Count = 32
    """In tokens. A longer prompt is refused."""
    stop_tokens: TokenIds = ()
    """Token ids that end a response, besides the tokenizer's own."""
    max_turns: Count | None = None
    """Of an episode with the task's environment, of whose turns each has `max_tokens`; left out: a
    response is one turn."""
    max_episode_tokens: Count | None = None
    """Of all an episode's turns and replies, which ends before a reply that does not fit; left out:
    twice max_turns times max_tokens."""

    @property
    def longest(self) -> int:
        """Tokens after the prompt: of a response, or of an episode."""
        if self.max_turns is None:
            return self.max_tokens
        return self.max_episode_tokens or 2 * self.max_turns * self.max_tokens

    @property
    def limit(self) -> str:
        """The key that says so."""
        if self.max_turns is None:
            return "max_tokens"
        return "max_turns" if self.max_episode_tokens is None else "max_episode_tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_episode_tokens is not None and self.max_turns is None:
            raise InputError(
                f"max_episode_tokens = {self.max_episode_tokens} is for episodes; set max_turns too"
            )
        if self.temperature == 0:
            raise InputError("temperature must be greater than 0 in training, got 0.0")


class SamplerSection(Section):
    """How a step is sampled, and what the sampler does otherwise than the learner."""

    slots: Count | None = None
    """Sequences decoded at a time, over all devices; when one ends, its slot takes the next. Left
    out: all of a step. Memory and speed only."""
    halvings: Annotated[int, Field(ge=0, le=31)] = 0
    """How often the slots become half as many, once no sequence waits and half of them are idle.
    Each compiles the decode step once more. Speed only."""
    pages: Count | None = None
    """Pages for keys and values of responses, over all devices, each of a key block of the kernels;
    left out: every slot has room for the longest response. Memory and speed only."""
    max_staleness: Annotated[int, Field(ge=0, le=64)] = 0
    """Steps that are drawn ahead of the one that is learnt from, which is then learnt from by
    weights this many steps newer than those that drew it. 0: every step is drawn by the newest."""
    mismatch: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Entries of `tim_jax.mismatch`, in order: `{name = "kv_cache", dtype = "float8_e4m3fn"}`."""
    both_sides: bool = False
    """The learner has these entries as well: what is sampled is the same, and there is no mismatch.
    That is the control of a run that has them in its sampler alone."""

    @property
    def batching(self) -> Batching:
        """How a step's sequences are decoded together."""
        return Batching(self.slots, self.halvings, self.pages)

    @property
    def dial(self) -> "Mismatch":
        """The entries as a dial, whichever side has them."""
        return tim_jax.mismatch.build(self.mismatch)

    @property
    def own_dial(self) -> "Mismatch":
        """What the sampler alone has."""
        return tim_jax.mismatch.build(() if self.both_sides else self.mismatch)

    @property
    def shared_dial(self) -> "Mismatch":
        """What sampler and learner both have."""
        return tim_jax.mismatch.build(self.mismatch if self.both_sides else ())

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Imported only where there are entries: with the room come the kernels and the sampler, and
        # the errors about all other keys would have to wait for them.
        for index, entry in enumerate(self.mismatch):
            with refused(f"mismatch[{index}]", entry):
                tim_jax.mismatch.build([entry])
        if self.both_sides and not self.mismatch:
            raise refusal("both_sides", True, "is for entries of sampler.mismatch; set that too")
        if self.both_sides:
            with refused("both_sides", True):
                self.dial.check_shared()
        elif self.max_staleness and self.mismatch:
            with refused("max_staleness", self.max_staleness):
                tim_jax.mismatch.refuse_ahead(self.dial)
        return self


def _preset(name: str) -> str:
    if name not in objectives.PRESETS:
        raise refusal("", name, f"unknown value{did_you_mean(name, objectives.PRESETS)}")
    return name


@_changes_objective
class ObjectiveSection(Section):
    """Advantages and token loss: a preset of `tim_jax.objectives`, and changes to it.

    Every key of `Objective` may be given; one that is left out is as the preset has it. Where the
    loss clips its ratio is the preset's for the preset's own loss, else where the loss's paper has
    it.
    """

    preset: Annotated[str, AfterValidator(_preset)] = "grpo"
    loss_options: dict[str, float] | None = None
    """Further options of the loss, such as `{ ratio_cap = 5.0 }` of "dppo_tv"."""
    # What steers the coefficient has other names for these two, which its check would say.
    reward_kl_target: Positive | None = None
    reward_kl_horizon: Count | None = None

    def value(self, max_tokens: int) -> Objective:
        """Returns the objective; `max_tokens` is the length of 'constant_length'."""
        changes = self.model_dump(exclude={"preset"}, exclude_none=True)
        return objectives.PRESETS[self.preset](max_length=max_tokens, **changes)


class Learner(Section):
    """From rollouts to a gradient."""

    prompts_per_step: Count = 8
    micro_batch: Count | None = None
    """Sequences per forward and backward; left out: a whole mini-batch. Memory only."""
    remat: bool = False
    """Recompute each layer in the backward instead of keeping its activations. Memory only."""
    offload: bool = False
    """Master weights and optimizer wait in the host's memory while a step is sampled. Memory only,
    for the time of moving them there and back."""
    length_buckets: Annotated[int, Field(ge=1, le=32)] = 1
    """Response lengths that the learner is compiled for: the longest, its half, its quarter, ..."""
    micro_batch_tokens: Count | None = None
    """Tokens per forward and backward, over all devices, in place of whole rows: sequences of
    different lengths lie in it one after the other, and no padding is computed. It must hold the
    longest sequence on each device. `micro_batch` is then the most sequences in one."""
    routing: Routing = "own"
    """The experts that the learner takes in a mixture: its "own", its own with those of the sampler
    recorded and "compared", or the sampler's, "replayed" (R3)."""
    refills: Annotated[int, Field(ge=0, le=1000)] = 0
    """How often a step may draw again for groups whose rewards are all equal (DAPO)."""
    noise_scale: bool = False
    """Log the gradient's noise scale, from the gradients of the micro-batches."""
    mini_batches: Count = 1
    """Updates per pass over a step's sequences."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 1
    """Passes over a step's sequences."""
    mode: Literal["bypass", "recompute"] = "bypass"
    """Old log-probs: the rollout's own (bypass), or those of a forward of the learner."""
    objective: ObjectiveSection = ObjectiveSection()
    credit: Credit = "episode"
    """What a turn of an episode is given for: all rewards of the "episode", or those from this
    "turn" on, with an estimator of what follows each token (reinforce, reinforce_plus_plus,
    optimal_token_baseline)."""
    max_skipped: Count = 5
    """Updates in a row with a loss or gradient that is not finite, each skipped, that end a run."""
    corrections: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Recipes and blocks of `tim_jax.corrections`, in order: `{name = "token_tis", cap = 2.0}`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for index, entry in enumerate(self.corrections):
            with refused(f"corrections[{index}]", entry):
                corrections.build([entry])
        return self


def _respond(text: str) -> str:
    if not re.fullmatch(r"[^:]+:\w+", text):
        raise refusal("", text, 'must be written "file.py:function" or "module:function"')
    return text


Respond = Annotated[str, AfterValidator(_respond)]


@dataclass(frozen=True, kw_only=True)
class _Graded:
    """What every task has: a reward or an environment of the user's."""

    reward: Function | None = None
    """A reward of your own, `module:function`, in place of the task's or of math-verify."""
    reward_time_limit: Seconds = REWARD_SECONDS
    """Seconds by the clock that a call of your reward, or of your task's grader, may take, and its
    import."""
    reward_in_process: bool = False
    """Call your reward, or make your task, in the run's own process, such as one that needs its
    devices: without a time limit, and what it breaks there ends the run. Else it has a process of
    its own."""
    environment: Respond | None = None
    """Of episodes of several turns: `file.py:respond` or `module:respond`, in processes of its own.
    Its rewards are those of the task; with a dataset, its state begins as the row's answer."""
    environment_time_limit: Seconds = environments.SECONDS
    """Seconds by the clock until a reply; an episode that gets none ends there."""
    environment_workers: Count = environments.WORKERS
    """Processes of the environment."""
    environment_memory: Annotated[float, Field(gt=0, le=1e6)] = environments.MEMORY
    """GiB of address space that each of them may take; CUDA's libraries alone need more."""
    history: History = "refuse"
    """What is done about a chat template that rewrites earlier turns: refuse it, keep them as they
    were drawn, or cut the episode there, so that it goes on in a new row."""

    def unread(self) -> Iterator[tuple[str, str]]:
        """Yields each setting that has no effect beside the others, and what would be right."""
        given = inputs.changed(self)
        if self.environment is None:
            for name in (name for name in given if name.startswith("environment_")):
                yield name, "is for task.environment; set that too"
        if self.reward is None and not isinstance(self, CustomTask):
            for name in ("reward_in_process", "reward_time_limit"):
                if name in given:
                    yield name, "is for a reward or a task of your own; set task.reward too"
        elif self.reward_in_process and "reward_time_limit" in given:
            yield "reward_time_limit", "must be left out: with reward_in_process there is none"
        if "time_limit" in given and (self.reward or self.environment):
            other = "reward" if self.reward else "environment"
            yield "time_limit", f"must be left out: task.{other} gives the rewards"

    def open_environment(self) -> environments.Guarded | None:
        """The user's environment, in processes of its own, if there is one; its task closes it."""
        if self.environment is None:
            return None
        return environments.Guarded(
            self.environment,
            seconds=self.environment_time_limit,
            workers=self.environment_workers,
            memory=self.environment_memory,
        )


@dataclass(frozen=True, kw_only=True)
class BuiltinTask(_Graded):
    """A small task of `tim_jax.tasks.builtin`."""

    kind: Literal["builtin"] = "builtin"
    name: Literal["running_sums", "sorting", "countdown", "addition", "guessing", "arithmetic"] = (
        "running_sums"
    )
    parameters: dict[str, Any] = field(default_factory=dict)
    """Keywords of the task's function, such as `digits = [4, 10]`."""


@dataclass(frozen=True, kw_only=True)
class GymTask(_Graded):
    """A reasoning-gym dataset (extra `gym`)."""

    kind: Literal["gym"]
    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    """The dataset's own, without `seed` and `size`."""
    train_size: Count = 4096
    eval_size: Count = 128
    seed: Whole = 0
    time_limit: Seconds = 5.0
    """CPU seconds that scoring one answer may take."""

    @property
    def limits(self) -> Limits:
        """Of the processes that score."""
        return Limits(self.time_limit)


@dataclass(frozen=True, kw_only=True)
class DatasetTask(DatasetSource, _Graded):
    """Rows of JSON lines, Parquet or the hub (extra `math` for its grader)."""

    kind: Literal["dataset"]
    time_limit: Seconds = 5.0
    """CPU seconds that grading one answer may take."""

    @property
    def rows(self) -> DatasetSource:
        """What is read, and from where."""
        return part(DatasetSource, self)

    @property
    def limits(self) -> Limits:
        """Of the processes that grade."""
        return Limits(self.time_limit)


@dataclass(frozen=True, kw_only=True)
class CustomTask(_Graded):
    """A task made by a function of yours."""

    kind: Literal["custom"]
    factory: Function
    """`module:function`; returns a `tim_jax.tasks.base.Task`."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Its keywords."""


@dataclass(frozen=True, kw_only=True)
class Warmup(Quality):
    """Supervised steps before the first RL step, for a model that knows nothing yet."""

    steps: Whole = 0
    """0 is off."""
    batch: Count = 64
    """Prompts with completions per step."""
    learning_rate: Positive = 3e-3

    @property
    def quality(self) -> Quality:
        """Of the completions."""
        return part(Quality, self)


class Evaluation(Section):
    """Held-out problems, every now and then."""

    every: Whole = 20
    """Steps between evaluations, one before the first and one after the last included; 0 is off."""
    prompts: Count = 64
    """The first held-out ones, in their order. Of a sorted file that is one end: there
    `task.eval_limit` chooses them by a hash, in whose order they then are."""
    samples: Count = 1
    """Per prompt; their mean reward is mean@samples."""
    k: Counts = (1,)
    """The k of pass@k, none above `samples`."""
    solved: float = 1.0
    """A response counts as right for pass@k from this reward on."""
    temperature: NonNegative = 1.0
    """0 is greedy. `sampling.top_k` and `sampling.top_p` are for training alone."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(k > self.samples for k in self.k):
            raise refusal("k", list(self.k), f"must not exceed samples = {self.samples}")
        if self.temperature == 0 and self.samples > 1:
            raise refusal("samples", self.samples, "must be 1 at temperature 0: all are the same")
        return self


# Settings of loggers, and the sinks that read them.
_OF_SINKS = {
    "wandb_project": ("wandb", "mlflow"),
    "wandb_mode": ("wandb",),
    "mlflow_uri": ("mlflow",),
}


def _folder(text: str) -> str:
    try:
        return str(inputs.expanded(text)) if text else text
    except InputError as error:
        raise refusal("", text, str(error).rpartition(": ")[2]) from error


class RunSection(Section):
    """The run folder and what is written."""

    folder: Annotated[str, AfterValidator(_folder)] = "runs/default"
    checkpoint_every: Whole = 20
    """Steps between checkpoints; 0: only the one before the first step and the one at the end."""
    keep: Count = 2
    """Checkpoints that stay."""
    sinks: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...], Field(strict=False)
    ] = ()
    """Where metrics go besides metrics.jsonl."""
    wandb_project: str = "tim-jax"
    """Also the name of the experiment in MLflow."""
    wandb_mode: WandbMode | None = None
    """By default what WANDB_MODE says, or else online."""
    mlflow_uri: str = ""
    """Of a server, or `sqlite:///FILE`; by default what MLFLOW_TRACKING_URI says."""
    samples_logged: Whole = 4
    """Completions per step written to samples.jsonl."""
    export: bool = True
    """Write the final model to the run folder, as `transformers` loads it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "sinks" in self.model_fields_set and not self.sinks:
            return self  # loggers are off, by the user's own word
        for name, readers in _OF_SINKS.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and not {*readers} & {*self.sinks}:
                rule = f'is for a logger that is not used; set run.sinks = ["{readers[0]}"] too'
                raise refusal(name, value, rule)
        return self
