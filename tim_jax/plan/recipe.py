"""A training step as something to compile: its programs, and the shapes of what goes into them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, lcm
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tim_jax import placement
from tim_jax.mismatch import Mismatch, dial
from tim_jax.model.execution import Execution
from tim_jax.model.weights import parameter_shapes
from tim_jax.placement import Devices, Placement
from tim_jax.policy import sampler
from tim_jax.rl import programs
from tim_jax.rl.learning import Learning
from tim_jax.types import Prompts, Rollout

Tree = Any


@dataclass(frozen=True)
class Recipe:
    """One step of a run."""

    execution: Execution  # the learner's
    learning: Learning
    optimizer: optax.GradientTransformationExtraArgs
    prompts: int
    prompt_length: int
    mini_batches: int = 1
    drawing: Placement | None = None  # the sampler's, if it has its own
    rows_drawn: int | None = None  # sequences sampled at a time, over all devices; None: all
    mismatch: Mismatch = dial.EXACT

    @property
    def drawn_by(self) -> Execution:
        if self.drawing is None:
            return self.execution
        return replace(self.execution, placement=self.drawing)

    @property
    def sequences(self) -> int:
        return self.prompts * self.learning.group_size

    @property
    def micro_batch(self) -> int:
        """Sequences of one forward and backward, over all devices."""
        return self.learning.micro_batch or self.sequences // self.mini_batches

    @property
    def scores(self) -> bool:
        """Whether a step has a forward of the learner before its updates."""
        return self.learning.needs_forward or self.has_reference

    @property
    def has_reference(self) -> bool:
        return self.learning.objective.has_reference

    @property
    def least_prompts(self) -> int:
        """Of what the number of prompts must be a multiple, as it is laid out."""
        drawing = self.drawn_by.placement.shards
        shards = max(self.execution.placement.shards, drawing)
        rows = self.mini_batches * max(self.learning.micro_batch or 1, shards)
        rows = lcm(rows, self.rows_drawn or 1)
        prompts = rows // gcd(rows, self.learning.group_size)
        return lcm(prompts, drawing) if self.learning.needs_greedy else prompts

    def with_layers(self, layers: int) -> "Recipe":
        config = replace(self.execution.config, num_layers=layers)
        return replace(self, execution=replace(self.execution, config=config))

    def with_micro_batch(self, rows: int) -> "Recipe":
        """The gradient's noise is measured only where there are several micro-batches."""
        noise = self.learning.noise_scale and rows < self.sequences // self.mini_batches
        return replace(self, learning=replace(self.learning, micro_batch=rows, noise_scale=noise))

    def with_rows_drawn(self, rows: int) -> "Recipe":
        return replace(self, rows_drawn=rows)

    def with_placement(self, where: Placement) -> "Recipe":
        return replace(self, execution=replace(self.execution, placement=where))


@dataclass(frozen=True)
class Program:
    """A jitted function, the shapes of its arguments, and how often its open loops turn."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    trips: tuple[int, ...] = ()


def sampling(recipe: Recipe, devices: Devices) -> Program:
    """The sampler's program: prefill and decode of a step's prompts."""
    execution = recipe.drawn_by
    laid = _Laid(recipe, execution, devices)
    program = programs.sampling_program(
        execution,
        samples=recipe.learning.group_size,
        micro_batch=recipe.rows_drawn,
        devices=laid.devices,
        mismatch=recipe.mismatch,
    )
    arguments = (laid.weights, laid.prompts, laid.key)
    return Program("sampler", program, arguments, decode_steps(recipe))


def decode_steps(recipe: Recipe) -> tuple[int, ...]:
    """Tokens drawn in each of the sampler's loops, if every prompt and response is the longest.

    All but the first, which is drawn at the prompt's end.
    """
    limit, block = recipe.execution.sampling.max_response_length, recipe.execution.numerics.kv_block
    done, steps = 1, []
    for span in sampler.spans(recipe.prompt_length, limit, block):
        upto = min(limit, span - recipe.prompt_length + 1)
        steps.append(upto - done)
        done = upto
    return tuple(steps)


def scoring(recipe: Recipe, devices: Devices) -> Program:
    """The learner's forward over a step's sequences, with advantages and corrections."""
    laid = _Laid(recipe, recipe.execution, devices)
    return Program("scoring", laid.built.experience, laid.for_experience)


def updating(recipe: Recipe, devices: Devices) -> Program:
    """One update: forward, backward and optimiser."""
    laid = _Laid(recipe, recipe.execution, devices)
    batch = jax.eval_shape(laid.built.experience, *laid.for_experience).experience
    index, length = _shape((), jnp.int32), _shape((), jnp.float32)
    arguments = (laid.state, laid.weights, *laid.whole((batch, index, length)))
    return Program("update", laid.built.update, arguments)


def resident(recipe: Recipe, devices: Devices, stage: str) -> int:
    """Bytes on a device during a stage that are not arguments of its program.

    Optimiser and masters while sampling; weights of a sampler with a placement of its own; those
    of a reference policy, and its masters, which checkpoints hold. As arrays are, without what
    layouts pad.
    """
    laid = _Laid(recipe, recipe.execution, devices)
    weights, state = bytes_per_device(laid.weights), bytes_per_device(laid.state)
    masters = bytes_per_device(laid.state.params)
    reference = weights + masters if recipe.has_reference else 0
    if stage == "sampler":
        own = recipe.drawn_by.placement.shape == recipe.execution.placement.shape
        return state + reference + (0 if own else weights)
    if stage == "scoring":  # whose arguments the reference's weights are
        return state + (masters if recipe.has_reference else 0)
    return reference


def weight_bytes(recipe: Recipe) -> int:
    """Of all compute weights."""
    execution = recipe.execution
    shapes = jax.eval_shape(execution.prepare, parameter_shapes(execution.config))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def bytes_per_device(tree: Tree) -> int:
    """Of the part of every array that lies on one device."""

    def of(leaf) -> int:
        shape = leaf.sharding.shard_shape(leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype).size * leaf.dtype.itemsize

    return sum(of(leaf) for leaf in jax.tree.leaves(tree))


@dataclass(frozen=True)
class _Laid:
    """Shapes of a recipe's arrays, laid out on devices for a policy: the learner's or sampler's."""

    recipe: Recipe
    execution: Execution
    slice_devices: Devices

    @property
    def devices(self) -> Devices:
        """Those of the slice that something lies on."""
        return tuple(self.slice_devices[: self.execution.placement.devices])

    def whole(self, tree: Tree) -> Tree:
        """Every device has all of it."""
        on = placement.mesh(self.execution.placement, self.devices)
        everywhere = NamedSharding(on, PartitionSpec())
        return jax.tree.map(lambda leaf: _shape(leaf.shape, leaf.dtype, everywhere), tree)

    def _on(self, tree: Tree, shardings: Tree) -> Tree:
        return jax.tree.map(lambda x, s: _shape(x.shape, x.dtype, s), tree, shardings)

    @property
    def built(self) -> programs.Programs:
        recipe = self.recipe
        return programs.build(
            self.execution,
            recipe.learning,
            recipe.optimizer,
            mini_batches=recipe.mini_batches,
            devices=self.devices,
        )

    @property
    def params(self) -> Tree:
        return parameter_shapes(self.execution.config)

    @property
    def _layout(self) -> programs.Layout:
        start = partial(programs.init, self.recipe.optimizer, self.recipe.learning)
        return programs.layout(self.execution, start, self.devices)

    @property
    def weights(self) -> Tree:
        return self._on(jax.eval_shape(self.execution.prepare, self.params), self._layout.weights)

    @property
    def state(self) -> Tree:
        start: Callable = partial(programs.init, self.recipe.optimizer, self.recipe.learning)
        return self._on(jax.eval_shape(start, self.params), self._layout.state)

    @property
    def key(self) -> Tree:
        return self.whole(jax.eval_shape(lambda: jax.random.key(0)))

    @property
    def prompts(self) -> Prompts:
        count, length = self.recipe.prompts, self.recipe.prompt_length
        shapes = Prompts(
            tokens=_shape((count, length), jnp.int32),
            lengths=_shape((count,), jnp.int32),
            ids=_shape((count,), jnp.int32),
        )
        return self.whole(shapes)

    @property
    def for_experience(self) -> tuple[Any, ...]:
        weights = self.weights
        reference = weights if self.recipe.has_reference else None
        rewards = _shape((self.recipe.sequences,), jnp.float32)
        given = [self._rollout, rewards]
        if self.recipe.learning.needs_greedy:
            given.append(_shape((self.recipe.prompts,), jnp.float32))
        return weights, reference, self.state.carried, *self.whole(tuple(given))

    @property
    def _rollout(self) -> Rollout:
        rows, length = self.recipe.sequences, self.execution.sampling.max_response_length
        return Rollout(
            prompts=_shape((rows, self.recipe.prompt_length), jnp.int32),
            prompt_lengths=_shape((rows,), jnp.int32),
            responses=_shape((rows, length), jnp.int32),
            lengths=_shape((rows,), jnp.int32),
            log_probs=_shape((rows, length), jnp.float32),
            finished=_shape((rows,), jnp.bool_),
        )


def _shape(shape, dtype, sharding=None) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
