"""A run of GRPO as one value: what its configuration, `tim_jax.grpo`, a plan and a study make."""

import textwrap
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import gcd, lcm
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tim_jax import optimizers, placement
from tim_jax.common.errors import InputError, did_you_mean, ours
from tim_jax.common.inputs import changed, changes, check_kinds, shown
from tim_jax.mismatch import Mismatch, dial
from tim_jax.model.adapters import Lora, trained_shapes
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution, Sampling
from tim_jax.objectives import Objective
from tim_jax.placement import SINGLE, Devices, Placement, check_host
from tim_jax.rl import rules
from tim_jax.rl.rules import Turns
from tim_jax.rl.types import Experience, Learning, TrainState, mini_batch

# What an optimizer is told, beside gradients and parameters, and whether all is finite.
TOLD = ("response_length", "gradient_norm", "effective_sample_size")


@dataclass(frozen=True)
class Sampler:
    """What the sampler has of its own."""

    placement: Placement | None = None
    """Of its mesh; None: the learner's, with the learner's very weights. Changes no bit."""
    own_devices: bool = False
    """Its mesh is made of the devices after the learner's, not of the same ones."""
    batching: Batching = ALL_AT_ONCE
    """How sequences are decoded together, on all its devices. Changes no bit."""
    mismatch: Mismatch = dial.EXACT
    """What it does otherwise than the learner, if anything."""
    max_staleness: int = 0
    """Steps that are drawn ahead of the one that is learnt from, by weights that much older."""

    __repr__ = changes

    def __post_init__(self):
        check_kinds(self)


# At the learning rate that fine-tuning of language models by RL commonly takes.
_ADAMW = optimizers.adamw(optimizers.Rate(1e-6))


@dataclass(frozen=True)
class Training:
    """How every step of a run is drawn and learnt from. `programs.build` compiles it."""

    execution: Execution
    """The policy; its placement is the learner's. Its routing is that of `learning`."""
    learning: Learning = field(default_factory=Learning)
    """How rollouts become gradients."""
    optimizer: optax.GradientTransformation = _ADAMW
    """In float16 its loss is scaled, unless it scales the loss already; see `scaled_optimizer`."""
    prompts_per_step: int = 8
    mini_batches: int = 1
    """Updates of a pass over a step's sequences."""
    epochs: int = 1
    """Passes over a step's sequences."""
    length_buckets: int = 1
    """Response lengths that the learner is compiled for: the longest, its half, its quarter, ..."""
    turns: Turns | None = None
    """Of an episode with the task's environment; None: a response is one turn, and is graded."""
    refills: int = 0
    """How often a step may draw again for groups whose rewards are all equal."""
    offload: bool = False
    """Master weights and optimizer wait in the host's memory while a step is sampled."""
    sampler: Sampler = Sampler()
    exact: bool | None = None
    """Stop at the first token whose log-probs by sampler and learner are not the same bits. None:
    yes, unless the sampler differs on purpose."""

    def __post_init__(self):
        check_kinds(self)
        self._check_values()
        # There is one routing: the learner's experts are what the forward records or takes.
        routed = replace(self.execution, routing=self.learning.routing)
        object.__setattr__(self, "execution", routed)

    def __repr__(self) -> str:
        """In a few lines: a step's size, then the fields that are not at their defaults."""
        size = f"{self.prompts_per_step} prompts x {self.learning.samples} samples a step"
        own = changed(self) | {"optimizer": type(self.optimizer).__name__}
        texts = (f"{name}={text}" for name, text in own.items())
        lines = (textwrap.fill(text, 98, subsequent_indent="  ") for text in texts)
        return f"Training of {size}:\n" + textwrap.indent("\n".join(lines), "  ")

    def _check_values(self) -> None:
        """Refuses what is no value of its kind; `check_kinds` knows the plain kinds alone."""
        if not isinstance(self.sampler, Sampler):
            got = shown(self.sampler)
            raise InputError(f"sampler must be a tim_jax.rl.training.Sampler, got {got}")
        for name, value, kind in (
            ("placement", self.execution.placement, Placement),
            ("sampler_placement", self.sampler.placement or SINGLE, Placement),
            ("lora", Lora() if self.execution.lora is None else self.execution.lora, Lora),
            ("turns", Turns() if self.turns is None else self.turns, Turns),
        ):
            if not isinstance(value, kind):
                raise InputError(f"{name} must be a tim_jax.{kind.__name__}, got {shown(value)}")

    @property
    def stops_unless_exact(self) -> bool:
        """Whether a token with two log-probs ends the run."""
        return not self.sampler.mismatch.active if self.exact is None else self.exact

    @property
    def scaled_optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer, for gradients of the dtype that the learner computes in."""
        return optimizers.for_dtype(self.optimizer, self.execution.numerics.compute_dtype)

    @property
    def drawing(self) -> Execution:
        """The sampler's execution, but for its mismatch."""
        own = self.sampler.placement
        return self.execution if own is None else replace(self.execution, placement=own)

    @property
    def sequences(self) -> int:
        """Sequences of a step: prompts times samples."""
        return self.prompts_per_step * self.learning.samples

    @property
    def rows(self) -> int:
        """Sequences of an update: those of a mini-batch."""
        return self.sequences // self.mini_batches

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward and backward, over all devices."""
        return self.learning.micro_batch or self.rows

    @property
    def order(self) -> tuple[int, ...]:
        """The number of the mini-batch that each update of a step takes, from 0."""
        return tuple(range(self.mini_batches)) * self.epochs

    def init(self, params: Any) -> TrainState:
        """Returns the state before the first step; `params` are all parameters, or adapters."""
        objective = self.learning.objective
        adapted = objective.controller is not None
        return TrainState(
            params=params,
            optimizer=optimizers.first_state(self.scaled_optimizer, params),
            correction=self.learning.correction.init(params),
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            reward_kl=jnp.float32(objective.reward_kl_coefficient) if adapted else None,
        )

    def mini_batch(self, batch: Experience, index: jax.Array) -> Experience:
        """Returns the rows of a step's experience that mini-batch `index` of `order` has."""
        return mini_batch(batch, index, count=self.mini_batches)

    @property
    def updates(self) -> int:
        """Updates of a step."""
        return self.mini_batches * self.epochs

    @property
    def kept_weights(self) -> int:
        """Older weights that are kept, of steps drawn ahead or for the entries of the dial."""
        return self.sampler.max_staleness or self.sampler.mismatch.stale_updates

    @property
    def least_prompts(self) -> int:
        """What the number of prompts must be a multiple of, for these placements."""
        learning, drawing = self.learning, self.drawing.placement
        rows = self.mini_batches * (learning.micro_batch or self.execution.placement.shards)
        prompts = rows // gcd(rows, learning.samples)
        greedy = learning.objective.needs_greedy
        drawn = drawing.shards if greedy else drawing.prompts_multiple(learning.samples)
        return lcm(prompts, drawn)

    def sampler_devices(self, devices: Devices) -> Devices:
        """What the sampler's mesh is made of; raises `InputError` where these are too few."""
        if not self.sampler.own_devices:
            return devices
        return placement.split(self.execution.placement, self.drawing.placement, devices)

    def check(self) -> None:
        """Refuses settings that contradict each other.

        Raises:
          RuleError: with the field that is wrong.
          InputError: entries of the dial that the sampler cannot have.
        """
        sampler = self.sampler
        counts = "prompts_per_step", "mini_batches", "epochs", "length_buckets"
        rules.check_counts(**{name: getattr(self, name) for name in counts})
        self._settings().check()
        if sampler.max_staleness:
            dial.refuse_ahead(sampler.mismatch)
        if self.turns is not None and sampler.mismatch.in_flight is not None:
            raise sampler.mismatch.in_flight.refuse("is for responses of one turn")

    def check_sampler(self) -> None:
        """Refuses entries of the dial that this sampler cannot have; compiles nothing."""
        dial.check(self.sampler.mismatch, self.drawing)

    def describe_sampler(self) -> list[str]:
        """Lines on what the sampler does otherwise than the learner."""
        ahead = self.sampler.max_staleness
        early = [f"the sampler draws ahead: max_staleness {ahead}"] if ahead else []
        lines = dial.describe(self.sampler.mismatch, self.execution.numerics)
        return early + [f"the sampler differs: {line}" for line in lines]

    def check_longest(self, longest: int) -> None:
        """Refuses micro-batches of tokens that do not hold a sequence of `longest` tokens.

        Raises:
          RuleError: naming `micro_batch_tokens`.
        """
        if (tokens := self.learning.micro_batch_tokens) is not None:
            where = self.execution.placement
            rules.check_micro_batch_tokens(tokens, longest=longest, placement=where)

    def _settings(self) -> rules.Settings:
        names = {one.name for one in fields(rules.Settings)} & _PLACES.keys()
        names -= {"sampler_placement"}  # of which None stands for the learner's
        own = {name: attrgetter(".".join((*_PLACES[name][0], name)))(self) for name in names}
        sampling = self.execution.sampling
        own |= {"sampler_placement": self.drawing.placement, "truncated": sampling.truncated}
        return rules.Settings(**own, longest=sampling.max_tokens)

    def check_devices(self, devices: Devices) -> None:
        """Refuses devices that cannot hold the meshes, or cannot send their state to the host."""
        self.sampler_devices(devices)
        if self.offload:
            check_host(devices)

    def trace_optimizer(self) -> tuple[Any, Any]:
        """The optimizer's first state and its step, traced as a run calls them."""
        trained = trained_shapes(self.execution.config, self.execution.lora)
        extra = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in TOLD}
        extra["finite"] = jax.ShapeDtypeStruct((), jnp.bool_)
        first = jax.jit(partial(optimizers.first_state, self.optimizer)).trace(trained)
        own = optax.with_extra_args_support(self.optimizer)
        step = jax.jit(partial(optimizers.guarded_step, own))
        return first, step.trace(trained, first.out_info, trained, **extra)

    def at_rest(self, state: TrainState) -> TrainState:
        """A state as it waits while nothing is learnt: with `offload` in the host's memory."""
        return placement.to_host(state) if self.offload else state

    def at_work(self, state: TrainState) -> TrainState:
        """The opposite of `at_rest`."""
        return placement.to_devices(state) if self.offload else state

    def varied(self, **changes: Any) -> "Training":
        """Returns this run with other fields, wherever in it they are nested.

        `training.varied(micro_batch=4, slots=16, temperature=0.9)` changes `learning.micro_batch`,
        `sampler.batching.slots` and `execution.sampling.temperature`. `placement` is the learner's,
        `sampler_placement` the sampler's.

        Raises:
          InputError: there is no such field, or a value that is refused.
        """
        for name in changes:
            if name not in _PLACES:
                hint, meant = did_you_mean(name, _PLACES), ours(name)
                if meant in _OF_OBJECTIVE - _PLACES.keys():
                    hint = f"; write objective=tim_jax.objectives.Objective({meant}=...)"
                raise InputError(f"Training has no field {name!r}{hint}")
        changed: Any = self
        for path in sorted({_PLACES[name][0] for name in changes}, key=len):  # the outermost first
            own = {_PLACES[name][1]: v for name, v in changes.items() if _PLACES[name][0] == path}
            changed = _replaced(changed, path, own)
        return changed


def _replaced(value: Any, path: tuple[str, ...], changes: dict[str, Any]) -> Any:
    """`value` with fields of what lies at the path in it replaced."""
    if not path:
        return replace(value, **changes)
    inner = _replaced(getattr(value, path[0]), path[1:], changes)
    return replace(value, **{path[0]: inner})


def _places() -> dict[str, tuple[tuple[str, ...], str]]:
    """Field -> the path of the value that has it, and its name there."""
    rooms: dict[tuple[str, ...], type] = {
        ("execution", "sampling"): Sampling,
        ("sampler", "batching"): Batching,
        ("sampler",): Sampler,
        ("learning",): Learning,
        (): Training,
    }
    found = {one.name: (path, one.name) for path, kind in rooms.items() for one in fields(kind)}
    own = "placement", "numerics", "sampling", "lora"
    found |= {name: (("execution",), name) for name in own}
    return found | {"sampler_placement": (("sampler",), "placement")}


_PLACES = _places()
_OF_OBJECTIVE = {field.name for field in fields(Objective)}
FIELDS = tuple(sorted(_PLACES))
"""Names that `Training.varied` takes."""
