"""The one place that compiles: a run's programs, jitted, with their buffers donated."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tim_jax import metrics, placement
from tim_jax.errors import InputError
from tim_jax.mismatch import Mismatch, Setting, dial
from tim_jax.model import parameters
from tim_jax.model.execution import jit
from tim_jax.model.parameters import parameter_shapes
from tim_jax.placement import Devices, Placement
from tim_jax.policy import rounds, sampler
from tim_jax.rl import learner, sharded
from tim_jax.rl.experience import experience, score_rows
from tim_jax.rl.learning import (
    Experience,
    Learning,
    Policy,
    Score,
    TrainState,
    check_steps,
    mini_batch,
)
from tim_jax.types import Prompts, Rollout

_PARTS = ("log_ratio_abs_mean", "log_ratio_abs_max", "kl_k3")


@dataclass(frozen=True)
class Programs:
    """A run's compiled programs.

    Each compiles once: shapes do not depend on the data, but for `length_buckets` learner shapes.
    """

    prepare: Callable[..., Any]  # params -> weights
    publish: Callable[..., Any]  # params, weights -> the sampler's weights
    sample: Callable[..., Rollout]  # the sampler's weights, prompts, key -> rollout
    greedy: Callable[..., Rollout] | None  # the same, one greedy response a prompt, if needed
    merge: Callable[..., Rollout]  # rollout, another, i32[B] -> those rows of both, one after other
    experience: Callable[..., Any]  # see experience.experience
    update: Callable[..., Any]  # state, weights, experience, index of mini-batch, length
    mismatch_report: Callable[..., Any]  # see mismatch_report
    init: Callable[..., TrainState]  # params -> state
    compare: Callable[..., Any] | None  # weights, the sampler's weights, rollout -> metrics

    learning: Learning
    mini_batches: int
    epochs: int
    length_buckets: int
    mismatch: Mismatch = dial.EXACT


def build(
    policy: Policy,
    learning: Learning,
    optimizer: optax.GradientTransformationExtraArgs,
    *,
    mini_batches: int = 1,
    epochs: int = 1,
    length_buckets: int = 1,
    sampler_placement: Placement | None = None,
    sampler_micro_batch: int | None = None,
    devices: Devices | None = None,
    mismatch: Mismatch = dial.EXACT,
) -> Programs:
    """Programs of a training run.

    Args:
      policy: its placement is the learner's, and the sampler's if `sampler_placement` is None.
      sampler_micro_batch: sequences that are sampled at a time; None: all of a step.
      devices: what meshes are made of, `jax.devices()` if None.
      mismatch: what the sampler does differently, if anything.

    Raises:
      InputError: the model cannot be laid out so, or there are too few devices.
    """
    if min(mini_batches, epochs, length_buckets) < 1:
        raise InputError(
            "mini_batches, epochs and length_buckets must be positive, got"
            f" {mini_batches}, {epochs} and {length_buckets}"
        )
    check_steps(policy, learning, updates=mini_batches * epochs)
    where = _Where.of(policy, devices)
    drawing = policy if sampler_placement is None else replace(policy, placement=sampler_placement)

    update = _updating(where, learning, optimizer, mini_batches=mini_batches)
    starting = partial(init, optimizer, learning)
    preparing = partial(
        experience,
        policy=policy,
        learning=learning,
        score=where.score(learning, energy=learning.objective.needs_energy),
    )
    state, whole = where.state(starting), where.whole
    updated = None if where.mesh is None else (state, where.weights, whole)
    numerics = policy.numerics
    return Programs(
        prepare=weights_program(policy, devices),
        publish=publication(policy, drawing, devices),
        sample=where.arriving(
            sampling_program(
                drawing,
                samples=learning.group_size,
                micro_batch=sampler_micro_batch,
                devices=devices,
                mismatch=mismatch,
            ),
            drawing,
        ),
        greedy=where.greedy(drawing, devices) if learning.needs_greedy else None,
        merge=jax.jit(_merged, out_shardings=whole),
        experience=jit(preparing, numerics, out_shardings=whole),
        update=jit(update, numerics, donate_argnums=(0, 1), out_shardings=updated),
        mismatch_report=jit(mismatch_report, numerics, out_shardings=whole),
        init=where.spreading(jit(starting, numerics, out_shardings=state)),
        compare=where.comparing(learning, mismatch) if mismatch.active else None,
        learning=learning,
        mini_batches=mini_batches,
        epochs=epochs,
        length_buckets=length_buckets,
        mismatch=mismatch,
    )


def _updating(where: "_Where", learning: Learning, optimizer, *, mini_batches: int) -> Callable:
    """(state, weights, experience, index, response length) -> as `learner.update`."""

    def update(state, weights, batch: Experience, index, response_length):
        part = mini_batch(batch, index, count=mini_batches)
        return learner.update(
            state,
            weights,
            part,
            response_length,
            policy=where.policy,
            learning=learning,
            optimizer=optimizer,
            gradient=where.gradient(learning),
            score=where.score(learning),
            norm=where.norm,
        )

    return update


@dataclass(frozen=True)
class Layout:
    """Trees of shardings of a run's arrays; None on a single device."""

    state: Any
    weights: Any


def layout(policy: Policy, starting: Callable[..., TrainState], devices: Devices) -> Layout:
    """Where a run's state, as `starting` makes it of parameters, and its weights lie."""
    where = _Where.of(policy, devices)
    return Layout(where.state(starting), where.weights)


def init(optimizer, learning: Learning, params) -> TrainState:
    with jax.numpy_dtype_promotion("standard"):
        opt_state = optimizer.init(params)
    objective = learning.objective
    adapted = objective.controller is not None
    return TrainState(
        params=params,
        optimizer=opt_state,
        correction=cast(tuple, learning.correction.init(params)),
        step=jnp.int32(0),
        skipped=jnp.int32(0),
        reward_kl=jnp.float32(objective.reward_kl_coefficient) if adapted else None,
    )


def sampling_program(
    policy: Policy,
    *,
    samples: int,
    micro_batch: int | None = None,
    devices: Devices | None = None,
    mismatch: Mismatch = dial.EXACT,
) -> Callable[..., Rollout]:
    """Jitted (weights, prompts, key) -> rollout, `samples` responses per prompt.

    `micro_batch` sequences are drawn at a time, all if None: see `rounds`.

    `weights` and `policy` are the learner's; the sampler differs from it as `mismatch` says.

    Raises:
      InputError: an entry that this sampler cannot have, or two that contradict each other.
    """
    where = _Where.of(policy, devices)
    dial.check(mismatch, Setting(policy.config, policy.numerics, policy.sampling, policy.placement))
    if not mismatch.active:
        draw, own, told = sampler.sample, _as_it_is, _as_it_is
    else:
        draw, own = partial(dial.draw, mismatch=mismatch), mismatch.weights
        told = partial(dial.report, mismatch=mismatch, samples=samples)
    if where.mesh is None:
        how = {"config": policy.config, "numerics": policy.numerics, "sampling": policy.sampling}
        drawn = partial(rounds.sampling(draw, samples=samples, micro_batch=micro_batch), **how)
    else:
        drawn = sharded.sampling(
            policy, where.mesh, samples=samples, micro_batch=micro_batch, draw=draw
        )

    def sample(weights, prompts: Prompts, key):
        return told(drawn(own(weights), prompts, key), prompts, key)

    return jit(sample, policy.numerics, out_shardings=where.whole)


def _as_it_is(x: Any, *_: Any) -> Any:
    return x


def weights_program(policy: Policy, devices: Devices | None = None) -> Callable[..., Any]:
    """Jitted params -> compute weights, where and as `policy` has them."""
    where = _Where.of(policy, devices)
    return where.spreading(jit(policy.prepare, policy.numerics, out_shardings=where.weights))


def publication(policy: Policy, to: Policy, devices: Devices | None = None) -> Callable[..., Any]:
    """(params, weights of `policy`) -> weights of `to`.

    The very same arrays if they lie in the same place and are prepared in the same way. Otherwise
    they are cast from the masters where these are, if `to` computes in another way, and then moved,
    if it computes in another place; moving changes no bit.
    """
    same = (policy.numerics.dtype, policy.numerics.column_tiles) == (
        to.numerics.dtype,
        to.numerics.column_tiles,
    )
    cast = None if same else weights_program(replace(to, placement=policy.placement), devices)
    target = _Where.of(to, devices).weights or jax.devices()[0]
    stay = policy.placement.shape == to.placement.shape

    def publish(params, weights):
        weights = weights if cast is None else cast(params)
        return weights if stay else jax.device_put(weights, target)

    return publish


@dataclass(frozen=True)
class _Where:
    """A policy's mesh and what lies where on it; all None on a single device."""

    policy: Policy
    mesh: Mesh | None

    @classmethod
    def of(cls, policy: Policy, devices: Devices | None) -> "_Where":
        parameters.check(policy.config, policy.numerics, policy.placement)
        if policy.placement.single:
            return cls(policy, None)
        devices = jax.devices() if devices is None else devices
        return cls(policy, placement.mesh(policy.placement, devices))

    @property
    def whole(self) -> Any:
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    @property
    def weights(self) -> Any:
        return self._laid(parameters.weight_axes(self.policy.config, self.policy.numerics))

    @property
    def params(self) -> Any:
        return self._laid(parameters.param_axes(self.policy.config))

    def _laid(self, leaf_axes: Any) -> Any:
        return None if self.mesh is None else placement.shardings(leaf_axes, self.mesh)

    def spreading(self, program: Callable) -> Callable:
        """A program of params that are put in place first: no device ever holds all of them."""
        if self.mesh is None:
            return program
        return lambda params: program(placement.put(params, self.params))

    def arriving(self, program: Callable, drawing: Policy) -> Callable:
        """A sampler's program whose rollouts come to this policy's devices."""
        if drawing.placement.shape == self.policy.placement.shape:
            return program
        here = self.whole or jax.devices()[0]
        return lambda *args: jax.device_put(program(*args), here)

    def greedy(self, drawing: Policy, devices: Devices | None) -> Callable:
        """One greedy response a prompt, by the sampler's own numbers and without its mismatch."""
        best = replace(drawing.sampling, temperature=0.0, top_k=0, top_p=1.0)
        program = sampling_program(replace(drawing, sampling=best), samples=1, devices=devices)
        return self.arriving(program, drawing)

    def state(self, init: Callable[..., TrainState]) -> Any:
        """Shardings of a state: what belongs to a parameter lies where the parameter does."""
        if self.mesh is None:
            return None
        shapes = parameter_shapes(self.policy.config)
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        by_path = {
            path: (shape.shape, sharding)
            for (path, shape), sharding in zip(leaves, jax.tree.leaves(self.params), strict=True)
        }

        def leaf(path, shape):
            for start in range(len(path)):
                found = by_path.get(path[start:])
                if found is not None and found[0] == shape.shape:
                    return found[1]
            return self.whole

        return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(init, shapes))

    def score(self, learning: Learning, *, energy: bool = False) -> Score | None:
        if self.mesh is None:
            return None
        micro = learning.micro_batch
        return sharded.scoring(self.policy, self.mesh, micro_batch=micro, energy=energy)

    @property
    def norm(self) -> Callable[..., jax.Array]:
        return (
            optax.tree.norm if self.mesh is None else sharded.gradient_norm(self.policy, self.mesh)
        )

    def comparing(self, learning: Learning, mismatch: Mismatch) -> Callable[..., Any]:
        own = partial(score_rows, self.policy, micro_batch=learning.micro_batch)
        compare = comparison(self.score(learning) or own, mismatch)
        return jit(compare, self.policy.numerics, out_shardings=self.whole)

    def gradient(self, learning: Learning) -> learner.Gradient | None:
        if self.mesh is None:
            return None
        return sharded.gradient(self.policy, self.mesh, learning=learning)


def _merged(rollout: Rollout, other: Rollout, rows: jax.Array) -> Rollout:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y])[rows], rollout, other)


def mismatch_report(log_probs: jax.Array, rollout: Rollout) -> dict[str, jax.Array]:
    """`mismatch/*`: `metrics.mismatch_metrics` of log-probs [b, R] of a rollout's first b rows."""
    rows = log_probs.shape[0]
    found = metrics.mismatch_metrics(log_probs, rollout.log_probs[:rows], rollout.mask[:rows])
    return {f"mismatch/{name}": value for name, value in found.items()}


def comparison(score: Score, mismatch: Mismatch) -> Callable[..., dict[str, jax.Array]]:
    """(weights, sampler's weights, rollout) -> what the sampler's mismatch is.

    `mismatch/*` are `metrics.mismatch_metrics` of the learner's log-probs, by a forward of its own,
    against the recorded ones. Its parts, where there are any, in mean |d|, largest |d| and k3:
    `drift/*` is the learner against itself at the sampler's weights, `numerical/*` that against
    the recorded ones, and `reporting/*` the log-probs drawn with against the recorded ones.
    """

    def compare(weights, source, rollout: Rollout):
        recorded, mask = rollout.log_probs, rollout.mask
        trainer = score(weights, rollout)[0]
        pairs = {}
        if mismatch.stale_updates:
            there = score(source, rollout)[0]
            pairs |= {"drift": (trainer, there), "numerical": (there, recorded)}
        if rollout.drawn_log_probs is not None:
            pairs["reporting"] = rollout.drawn_log_probs, recorded
        report = mismatch_report(trainer, rollout)
        for part, (first, second) in pairs.items():
            found = metrics.mismatch_metrics(first, second, mask)
            report |= {f"{part}/{name}": found[name] for name in _PARTS}
        return report

    return compare
