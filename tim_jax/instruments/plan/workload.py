"""A training step to compile: its programs, and the shapes of their arguments."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import prod
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tim_jax import placement
from tim_jax.common.types import Prompts, Rollout, make_key, route_dtype
from tim_jax.instruments.plan.hlo import Times
from tim_jax.mismatch import dial
from tim_jax.model import adapters, packing
from tim_jax.model.execution import Execution
from tim_jax.model.weights import param_axes, parameter_shapes, weight_axes
from tim_jax.placement import Devices
from tim_jax.policy import sampler
from tim_jax.rl import programs
from tim_jax.rl.training import Sampler, Training
from tim_jax.rl.types import Learning, fill

Tree = Any


@dataclass(frozen=True)
class Workload:
    """One step of a run, and the length that its prompts are padded to.

    Micro-batches of tokens are planned as the buffers that the run has. How many of them a step
    fills, and how often their loops run, follows from the sequences: those of responses that are
    log-normal, of this mean, or all the longest.
    """

    training: Training
    prompt_length: int
    mean_tokens: int | None = None  # of a response

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_length + self.execution.sampling.max_tokens

    @property
    def tokens(self) -> int | None:
        """Tokens of a micro-batch over all devices, if the run has micro-batches of tokens."""
        return self.learning.micro_batch_tokens

    @property
    def micro_batch(self) -> tuple[str, int]:
        """The key of a run's micro-batches, and how many of its units a row has."""
        if self.tokens:
            return "learner.micro_batch_tokens", self.longest
        return "learner.micro_batch", 1

    @property
    def full_rows(self) -> float:
        """How many of the longest sequences a micro-batch has room for, over all devices."""
        return self.tokens / self.longest if self.tokens else self.training.micro_batch

    @property
    def part_rows(self) -> int:
        """The most sequences of a device in a micro-batch, whatever their lengths."""
        return self.training.micro_batch // self.execution.placement.shards

    @property
    def size(self) -> str:
        """How large a micro-batch is, in words."""
        return f"of {self.tokens:,} tokens" if self.tokens else str(self.training.micro_batch)

    @property
    def lengths(self) -> np.ndarray:
        """i32[B], tokens of the sequences that a device learns from in an update.

        Of responses they are quantiles of a log-normal distribution with sigma 1, cut at the
        longest, whose scale gives them `mean_tokens` on average.
        """
        count = self.training.rows // self.execution.placement.shards
        limit, mean = self.execution.sampling.max_tokens, self.mean_tokens
        if mean is None:
            return np.full(count, self.longest, np.int32)
        points = (np.arange(count) + 0.5) / count
        drawn = np.exp([NormalDist().inv_cdf(point) for point in points])
        low, high, found = 0.0, limit / drawn.min(), drawn
        for _ in range(50):
            scale = (low + high) / 2
            found = np.clip(np.round(drawn * scale), 1, limit)
            low, high = (scale, high) if found.mean() < mean else (low, scale)
        return (self.prompt_length + found).astype(np.int32)

    @property
    def execution(self) -> Execution:
        """The learner's."""
        return self.training.execution

    @property
    def learning(self) -> Learning:
        """How the step's rollouts become gradients."""
        return self.training.learning

    @property
    def sampler(self) -> Sampler:
        """What the sampler has of its own."""
        return self.training.sampler

    @property
    def sequences(self) -> int:
        """Sequences of the step: prompts times samples."""
        return self.training.sequences

    @property
    def sampler_copies(self) -> int:
        """Copies of the weights that the sampler's devices have beside the learner's.

        Steps drawn ahead have one each, and so has each age of weights that change in flight.
        """
        drawing, mismatch = self.training.drawing, self.sampler.mismatch
        merged = dial.merging(mismatch, drawing).numerics.precision.lora
        same = drawing.placement.shape == self.execution.placement.shape
        same &= merged == self.execution.numerics.precision.lora
        if same and not self.sampler.own_devices:
            return 0
        several = self.sampler.max_staleness or mismatch.in_flight is not None
        return (self.training.kept_weights if several else 0) + 1

    @property
    def has_reference(self) -> bool:
        """True if the loss or the reward has a KL to a frozen reference policy."""
        return self.learning.objective.has_reference

    def with_layers(self, layers: int) -> "Workload":
        """The same step of a model with this many layers."""
        config = self.execution.config.with_layers(layers)
        return self.varied(execution=replace(self.execution, config=config))

    def with_micro_batch(self, rows: int) -> "Workload":
        """The same step in micro-batches with room for this many of the longest sequences.

        The noise is measured only if there are several.
        """
        if self.tokens:
            return self.varied(micro_batch_tokens=rows * self.longest)
        noise = self.learning.noise_scale and rows < self.training.rows
        return self.varied(micro_batch=rows, noise_scale=noise)

    def varied(self, **changes: Any) -> "Workload":
        """The same step with other fields of its training, see `Training.varied`."""
        return replace(self, training=self.training.varied(**changes))


@dataclass(frozen=True)
class Program:
    """A jitted function, the shapes of its arguments, and trip counts of its unbounded loops."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    trips: tuple[Times, ...] = ()


def sampling(workload: Workload, devices: Devices) -> Program:
    """The sampler's program: prefill and decode of a step's prompts."""
    execution = workload.training.drawing
    laid = _Laid(workload, execution, devices)
    program = programs.sampling_program(
        execution,
        samples=workload.learning.samples,
        batching=workload.sampler.batching,
        devices=laid.devices,
        mismatch=workload.sampler.mismatch,
    )
    count = workload.training.prompts_per_step
    prompts = Prompts(
        tokens=_shape((count, workload.prompt_length), jnp.int32),
        lengths=_shape((count,), jnp.int32),
        ids=_shape((count,), jnp.int32),
    )
    key = jax.eval_shape(lambda: make_key(0))
    arguments = (laid.weights, *laid.whole((prompts, key)))
    return Program("sampler", program, arguments, decode_steps(workload))


def decode_steps(workload: Workload) -> tuple[int, ...]:
    """Iterations of a device's decode loops, if every response is the longest."""
    where = workload.training.drawing.placement
    return sampler.trips(
        workload.sequences // where.shards,
        workload.execution.sampling,
        workload.sampler.batching.of_device(where),
    )


def scoring(workload: Workload, devices: Devices) -> Program:
    """The learner's forward over a step's sequences, with advantages and corrections."""
    laid = _Laid(workload, workload.execution, devices)
    trips = learner_trips(workload.varied(mini_batches=1), "scoring")  # of all the sequences
    return Program("scoring", laid.built.experience, laid.for_experience, trips)


def updating(workload: Workload, devices: Devices) -> Program:
    """One update: forward, backward and optimiser."""
    laid = _Laid(workload, workload.execution, devices)
    batch = jax.eval_shape(laid.built.experience, *laid.for_experience).experience
    index, length = _shape((), jnp.int32), _shape((), jnp.float32)
    arguments = (laid.state, laid.weights, *laid.whole((batch, index, length)), laid.base)
    return Program("update", laid.built.update, arguments, learner_trips(workload, "update"))


def parts(workload: Workload) -> list[np.ndarray]:
    """The lengths of the sequences of each of a device's micro-batches of tokens."""
    assert workload.tokens is not None
    lengths, shards = workload.lengths, workload.execution.placement.shards
    own = workload.tokens // shards
    filled = partial(fill, tokens=own, rows=workload.part_rows)
    part_of = np.asarray(jax.jit(filled)(jnp.asarray(lengths)))
    return [lengths[part_of == number] for number in range(part_of.max() + 1)]


def learner_trips(workload: Workload, stage: str) -> tuple[Times, ...]:
    """Iterations of the loops over micro-batches of tokens, and on average of those inside them.

    Inside are attention's loops over the sequences of a buffer, once more in the backward and if
    the layers are computed anew, and the head's over tiles of targets.
    """
    if workload.tokens is None:
        return ()
    of_parts = parts(workload)
    count, prompt = workload.part_rows, workload.prompt_length
    grouping = packing.grouping(workload.execution.numerics.family)
    loops = [grouping.loops(part, workload.longest, count) for part in of_parts]
    groups = [
        Fraction(sum(loop.times for loop in column), len(of_parts))
        for column in zip(*loops, strict=True)
    ]
    size = min(workload.execution.numerics.head_rows, workload.tokens)
    targets = [int(np.sum(part - prompt)) for part in of_parts]
    head = Fraction(sum(-(-one // size) for one in targets), len(of_parts))
    if stage == "scoring":
        return len(of_parts), *groups, head
    again = groups if workload.learning.remat else []
    return len(of_parts), *groups, head, head, *again, *groups


def held(workload: Workload, state: Tree, weights: Tree, base: Tree) -> dict[str, int]:
    """Bytes of what a run keeps on a device, by what it is; the trees are those of `laid_out`."""
    masters, computed = bytes_per_device(state.params), bytes_per_device(weights)
    return {
        "masters": masters,
        "the adapters' base": bytes_per_device(base),
        "optimiser": bytes_per_device(state) - masters,
        "weights": computed,
        "reference": workload.has_reference * (masters + computed),
        "older weights": workload.training.kept_weights * computed,
    }


def resident(workload: Workload, devices: Devices, stage: str) -> int:
    """Bytes on a device during a stage that are not arguments of its program.

    These are what else the run keeps, but for a state that waits on the host while sampling, and
    further copies of the weights of a sampler that has its own. On devices of its own it has
    these alone. Padding by layouts is not counted.
    """
    laid = _Laid(workload, workload.execution, devices)
    kept = held(workload, laid.state, laid.weights, laid.base)
    if stage == "sampler":
        copies = workload.sampler_copies
        own = max(0, copies - 1) * bytes_per_device(drawing_weights(workload)[0])
        if workload.sampler.own_devices:
            return own
        waiting = kept["masters"] + kept["optimiser"] if offloaded(workload, devices) else 0
        return sum(kept.values()) + own - waiting - (0 if copies else kept["weights"])
    if stage == "scoring":  # whose arguments the reference's weights are
        return sum(kept.values()) - (1 + workload.has_reference) * kept["weights"]
    return kept["reference"] + kept["older weights"] + laid.unread_base


def offloaded(workload: Workload, devices: Devices) -> bool:
    """Whether the state leaves room on the device while a step is sampled."""
    return workload.training.offload and devices[0].platform != "cpu"


def laid_out(workload: Workload, devices: Devices) -> tuple[Tree, Tree, Tree]:
    """Shapes of the learner's state and weights, and of its adapters' base, with their shardings.

    The base is None without adapters, and taken to be in the compute dtype.
    """
    laid = _Laid(workload, workload.execution, devices)
    return laid.state, laid.weights, laid.base


def weight_shapes(execution: Execution) -> Tree:
    """Shapes of the compute weights."""
    return jax.eval_shape(execution.prepare, parameter_shapes(execution.config))


def weight_bytes(workload: Workload) -> int:
    """Bytes of all compute weights."""
    leaves = jax.tree.leaves(weight_shapes(workload.execution))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def drawing_weights(workload: Workload) -> tuple[Tree, Tree]:
    """Shapes of the sampler's weights, with their shardings: as it gets them, and as it decodes.

    Whatever devices there are.
    """

    def laid(execution: Execution) -> Tree:
        on = AbstractMesh(execution.placement.shape, placement.AXES)
        axes = weight_axes(execution.config, execution.numerics)
        return _on(weight_shapes(execution), placement.shardings(axes, on))

    given = workload.training.drawing
    return laid(given), laid(sampler.in_loop(given)[0])


def bytes_per_device(tree: Tree) -> int:
    """Bytes of the parts of all arrays that lie on one device."""

    def of(leaf) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape)
        return prod(shape) * leaf.dtype.itemsize

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))


def _shape(shape, dtype, sharding=None) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _on(tree: Tree, shardings: Tree) -> Tree:
    return jax.tree.map(lambda x, s: _shape(x.shape, x.dtype, s), tree, shardings)


@dataclass(frozen=True)
class _Laid:
    """Shapes of a workload's arrays, laid out on devices for the learner or the sampler."""

    workload: Workload
    execution: Execution
    slice_devices: Devices

    @property
    def devices(self) -> Devices:
        """The devices of the slice that the placement uses."""
        return tuple(self.slice_devices[: self.execution.placement.devices])

    @property
    def mesh(self) -> Mesh:
        return placement.mesh(self.execution.placement, self.devices)

    def whole(self, tree: Tree) -> Tree:
        """The shapes with a sharding by which every device has all of the array."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: _shape(leaf.shape, leaf.dtype, everywhere), tree)

    @property
    def built(self) -> programs.Programs:
        """The learner's programs: its sampler is compiled by itself."""
        training = self.workload.training.varied(sampler=Sampler(), offload=False)
        return programs.build(training, self.devices)

    @property
    def base(self) -> Tree:
        """Of adapters. Its dtype is that of the checkpoint, which is not read here."""
        if self.execution.lora is None:
            return None
        config, dtype = self.execution.config, self.execution.numerics.dtype
        shapes = jax.tree.map(lambda x: _shape(x.shape, dtype), parameter_shapes(config))
        return _on(shapes, placement.shardings(param_axes(config), self.mesh))

    @property
    def unread_base(self) -> int:
        """Bytes of the base that an update does not read: what has no adapters."""
        config, lora = self.execution.config, self.execution.lora
        if lora is None:
            return 0
        read = {row.name for row in adapters.targets(config, lora).values()}
        of_layers = self.base["layers"]
        adapted = bytes_per_device({name: of_layers[name] for name in read})
        return bytes_per_device(self.base) - adapted

    @property
    def _layout(self) -> programs.Layout:
        return programs.layout(self.execution, self.workload.training.init, self.devices)

    @property
    def weights(self) -> Tree:
        return _on(weight_shapes(self.execution), self._layout.weights)

    @property
    def state(self) -> Tree:
        trained = adapters.trained_shapes(self.execution.config, self.execution.lora)
        return _on(jax.eval_shape(self.workload.training.init, trained), self._layout.state)

    @property
    def for_experience(self) -> tuple[Any, ...]:
        weights = self.weights
        reference = weights if self.workload.has_reference else None
        rewards = _shape((self.workload.sequences,), jnp.float32)
        given = [self._rollout, rewards]
        if self.workload.learning.objective.needs_greedy:
            given.append(_shape((self.workload.training.prompts_per_step,), jnp.float32))
        return weights, reference, self.state.carried, *self.whole(tuple(given))

    @property
    def _rollout(self) -> Rollout:
        rows, length = self.workload.sequences, self.execution.sampling.max_tokens
        config, prompt_length = self.execution.config, self.workload.prompt_length
        routes = None
        if self.execution.routing != "own":
            of_token = config.expert_layers, config.num_experts_per_tok
            routes = _shape(
                (rows, prompt_length + length, *of_token), route_dtype(config.num_experts)
            )
        return Rollout(
            prompts=_shape((rows, prompt_length), jnp.int32),
            prompt_lengths=_shape((rows,), jnp.int32),
            responses=_shape((rows, length), jnp.int32),
            lengths=_shape((rows,), jnp.int32),
            log_probs=_shape((rows, length), jnp.float32),
            finished=_shape((rows,), jnp.bool_),
            routes=routes,
        )
