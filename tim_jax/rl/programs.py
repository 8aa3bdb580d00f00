"""A run's programs: jitted, laid out on the mesh of their execution, with buffers donated."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tim_jax import corrections, metrics, placement
from tim_jax.common.types import Prompts, Rollout
from tim_jax.mismatch import dial
from tim_jax.model import adapters, parameters
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution, jit, lean
from tim_jax.model.weights import param_axes, weight_axes
from tim_jax.numerics import Numerics, Precision
from tim_jax.placement import Devices
from tim_jax.rl import episodes, learner, sharded
from tim_jax.rl.training import Training
from tim_jax.rl.types import Exactness, Experience, Learning, Policy, TrainState, exactness

# Metrics of each part of the mismatch.
_PARTS = ("log_ratio_abs_mean", "log_ratio_abs_max", "kl_k3")


@dataclass(frozen=True)
class Programs:
    """A run's compiled programs. Each compiles once, but for `length_buckets` learner shapes."""

    prepare: Callable[..., Any]  # params -> weights
    publish: Callable[..., Any]  # params, weights -> the sampler's weights
    sample: Callable[..., Rollout]  # the sampler's weights, prompts, key -> rollout
    episodes: episodes.Programs | None  # of the sampler, where an environment takes part
    greedy: Callable[..., Rollout] | None  # the same, one greedy response a prompt, if needed
    merge: Callable[..., Rollout]  # rollout, another, i32[B] -> those rows of both, one after other
    experience: Callable[..., Any]  # see `learner.experience`
    update: Callable[..., Any]  # state, weights, experience, index of mini-batch, length, base
    mismatch_report: Callable[..., Any]  # see `mismatch_report`
    init: Callable[..., TrainState]  # what is trained -> state
    place: Callable[..., Any]  # the base of adapters -> the same, where the learner is
    merged: Callable[..., Any] | None  # params with adapters -> float32 params without
    compare: Callable[..., Any] | None  # see `comparison`

    training: Training

    def source(self, older: Sequence[Any], weights: Any) -> Any:
        """What a step is drawn by, of the kept weights, oldest first, and the newest.

        A tuple, oldest first, where the weights change within a response.
        """
        if self.training.sampler.mismatch.in_flight is not None:
            return (*older, weights)
        return older[0] if older else weights

    def compiling(self, doing: Literal["sampling", "updating"]) -> str:
        """For who waits in the first step: which of a step's long programs are compiled."""
        learning, buckets = self.training.learning, self.training.length_buckets
        lengths = f" for up to {buckets} lengths" if buckets > 1 else ""
        first = ["the sampler", *(["the greedy sampler"] if self.greedy else [])]
        then = ["the learner's forward"] if learning.needs_forward else []
        then += ["the comparison"] if self.compare else []
        then.append(f"the update{lengths}")
        own, before = (first, 0) if doing == "sampling" else (then, len(first))
        numbers = " and ".join(str(before + i) for i, _ in enumerate(own, 1))
        few = "program" if len(own) == 1 else "programs"
        verb = "is" if len(own) == 1 else "are"
        total = len(first) + len(then)
        return f"the first time, {few} {numbers} of {total} {verb} compiled: {', '.join(own)}"


def build(training: Training, devices: Devices | None = None, *, foreign: bool = False) -> Programs:
    """Programs of a training run, on meshes of `devices`, all if None.

    `foreign`: whether it learns from rollouts of another engine, whose experts may be others.

    Raises:
      InputError: settings contradict each other, the model cannot be laid out so, or there are too
        few devices.
    """
    training.check()
    there = jax.devices() if devices is None else devices
    training.check_devices(there)
    execution, learning, sampler = training.execution, training.learning, training.sampler
    mismatch = sampler.mismatch
    where = _Where.of(execution, there)
    policy, numerics, whole = where.policy(learning), execution.numerics, where.whole
    of_base = param_axes(execution.config)
    starting = partial(Training.init, training)
    state = where.state(starting)
    preparing = partial(learner.experience, score=policy.score, learning=learning)
    how: Any = {"policy": policy, "learning": learning, "optimizer": training.scaled_optimizer}

    def update(state, weights, batch: Experience, index, response_length, base=None):
        part = training.mini_batch(batch, index)
        return learner.update(state, weights, part, response_length, base=base, **how)

    updated = state, where.weights, whole
    aged = training.kept_weights > 0
    differs = aged or mismatch.active or (foreign and learning.routing == "compared")
    replayed = None  # the forward with the sampler's experts, if it could be the learner's
    if learning.routing == "compared":
        replaying = replace(where, execution=replace(execution, routing="replayed"))
        replayed = replaying.policy(learning).score
    compare = comparison(policy.score, mismatch, aged=aged, replayed=replayed)
    return Programs(
        **_of_sampler(where, training, there),
        prepare=weights_program(execution, there),
        merge=jax.jit(_merged, out_shardings=whole),
        experience=jit(preparing, numerics, out_shardings=whole),
        update=jit(update, lean(numerics), donate_argnums=(0, 1), out_shardings=updated),
        mismatch_report=jit(mismatch_report, numerics, out_shardings=whole),
        init=_spreading(jit(starting, numerics, out_shardings=state), where.trained),
        place=partial(_put, target=placement.shardings(of_base, where.mesh)),
        merged=None if execution.lora is None else merged_program(execution, there),
        compare=jit(compare, numerics, out_shardings=whole) if differs else None,
        training=training,
    )


@dataclass(frozen=True)
class _Asked:
    """A training, equal to any other that has the same programs."""

    settings: tuple[Any, ...]
    optimizer: Any  # its code: two that do the same are not the same functions
    correction: Any  # its code
    training: Training = field(compare=False)


def build_once(training: Training, *, foreign: bool = False) -> Programs:
    """Returns what `build` does. Keeps the last two, for a call with another seed, for example."""
    settings = (
        *_without(training, "optimizer", "learning"),
        *_without(training.learning, "correction"),
    )
    code = _code(*training.trace_optimizer()), _code_of_correction(training)
    return _kept(_Asked(settings, *code, training), foreign)


@lru_cache(maxsize=2)
def _kept(asked: _Asked, foreign: bool) -> Programs:
    return build(asked.training, foreign=foreign)


def _without(value: Any, *names: str) -> tuple[Any, ...]:
    """The fields of a value, except those named, which are functions and compare by identity."""
    return tuple(getattr(value, one.name) for one in fields(value) if one.name not in names)


def _code(first: Any, step: Any) -> Any:
    """A value that is equal for two traced pairs of a first state and a step that compute the same.

    If they call back into Python, it is equal to nothing else.
    """
    texts = [one.lower().as_text() for one in (first, step)]
    if any("callback" in text or "host_transfer" in text for text in texts):
        return object()  # Python functions, which the text does not tell from others
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return (*digests, jax.tree.structure(first.out_info))


def _code_of_correction(run: Training) -> Any:
    """`_code` of a run's correction, and what the learner reads of its blocks."""
    correction = run.learning.correction
    if not correction.blocks:
        return ()
    tokens = run.sequences, run.execution.sampling.max_tokens
    of_token, of_row = (jax.ShapeDtypeStruct(x, jnp.float32) for x in (tokens, tokens[:1]))
    given = {"log_ratio": of_token, "log_probs": of_token, "advantages": of_row}
    given["mask"] = jax.ShapeDtypeStruct(tokens, jnp.bool_)
    trained = adapters.trained_shapes(run.execution.config, run.execution.lora)
    try:
        first = jax.jit(correction.init).trace(trained)
        made = jax.jit(partial(corrections.correct, correction))
        code = _code(first, made.trace(state=first.out_info, **given))
    except Exception:  # of a transform of the user's own; the first step will say it
        return object()
    names = "name", "effect", "reads", "whole_batch", "needs", "sign"
    return code, repr([[getattr(one, name) for name in names] for one in correction.blocks])


def _put(params: Any, target: Any) -> Any:
    """`placement.put` of parameters, of which all processes must have the same.

    Raises:
      InputError: they do not.
    """
    if jax.process_count() > 1 and all(map(placement.of_process, jax.tree.leaves(params))):
        placement.agree(str(adapters.fingerprint(params)), "its weights")
    return placement.put(params, target)


def _spreading(program: Callable, target: Any) -> Callable:
    """A program that first puts its params in place: no device ever holds all of them."""
    return lambda params: program(_put(params, target))


def _of_sampler(where: "_Where", training: Training, devices: Devices) -> dict[str, Any]:
    """The programs of the sampler."""
    drawing, own = training.drawing, training.sampler_devices(devices)
    mismatch = training.sampler.mismatch
    how: dict[str, Any] = {"devices": own, "mismatch": mismatch}
    how |= {"samples": training.learning.samples, "batching": training.sampler.batching}
    program = in_flight_program if mismatch.in_flight else sampling_program
    sample = program(drawing, **how)
    publish = publication(where.execution, dial.merging(mismatch, drawing), devices, own)
    best = where.greedy(drawing, own) if training.learning.objective.needs_greedy else None
    if mismatch.in_flight is not None:
        publish, best = _of_each(publish), best and _of_newest(best)
    played = None
    if training.turns is not None:
        played = episodes.build(drawing, turns=training.turns, **how)
        played = played._replace(report=where.arriving(played.report, drawing, own))
    sample = where.arriving(sample, drawing, own)
    return {"publish": publish, "sample": sample, "episodes": played, "greedy": best}


def _of_each(publish: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, weights: tuple(publish(params, own) for own in weights)


def _of_newest(program: Callable[..., Any]) -> Callable[..., Any]:
    return lambda weights, *arguments: program(weights[-1], *arguments)


@dataclass(frozen=True)
class Layout:
    """Trees of shardings of a run's arrays."""

    state: Any
    weights: Any


def layout(execution: Execution, starting: Callable[..., TrainState], devices: Devices) -> Layout:
    """Where a run's state, as `starting` makes it of parameters, and its weights lie."""
    where = _Where.of(execution, devices)
    return Layout(where.state(starting), where.weights)


def sampling_program(
    execution: Execution,
    *,
    samples: int,
    batching: Batching = ALL_AT_ONCE,
    devices: Devices | None = None,
    mismatch: dial.Mismatch = dial.EXACT,
) -> Callable[..., Rollout]:
    """Jitted (weights, prompts, key) -> rollout, `samples` responses per prompt.

    `weights` and `execution` are the learner's; the sampler differs from it as `mismatch` says.
    `batching` is that of all devices together.

    Raises:
      InputError: an entry that this sampler cannot have, or two that contradict each other.
    """
    dial.check(mismatch, execution)
    where = _Where.of(execution, devices)
    drawn = sharded.sampling(
        execution,
        where.mesh,
        samples=samples,
        batching=batching,
        draw=partial(dial.draw, mismatch=mismatch),
    )

    def sample(weights, prompts: Prompts, key):
        rollout = drawn(mismatch.weights(weights), prompts, key)
        return dial.report(rollout, prompts, key, mismatch=mismatch, samples=samples)

    return jit(sample, execution.numerics, out_shardings=where.whole)


def in_flight_program(
    execution: Execution,
    *,
    samples: int,
    batching: Batching = ALL_AT_ONCE,
    devices: Devices | None = None,
    mismatch: dial.Mismatch,
) -> Callable[..., Rollout]:
    """The same of several weights, oldest first, for a `mismatch` with `in_flight_updates`.

    Raises:
      InputError: as `sampling_program`.
    """
    dial.check(mismatch, execution)
    assert mismatch.in_flight is not None
    where, sampling = _Where.of(execution, devices), execution.sampling
    draw = partial(dial.draw, mismatch=mismatch)
    parts = [
        replace(execution, sampling=replace(sampling, max_tokens=tokens))
        for tokens in mismatch.in_flight.parts(sampling.max_tokens)
    ]
    begin = sharded.sampling(parts[0], where.mesh, samples=samples, batching=batching, draw=draw)
    others = [sharded.going_on(p, where.mesh, batching=batching, draw=draw) for p in parts[1:]]

    def sample(weights: Sequence[Any], prompts: Prompts, key):
        ids = jnp.repeat(prompts.ids, samples)
        numbers = jnp.tile(jnp.arange(samples, dtype=jnp.int32), prompts.ids.shape[0])
        rollout = begin(mismatch.weights(weights[0]), prompts, key)
        for go_on, own in zip(others, weights[1:], strict=False):  # fewer, if responses are short
            rollout = go_on(mismatch.weights(own), rollout, ids, numbers, key)
        return dial.report(rollout, prompts, key, mismatch=mismatch, samples=samples)

    return jit(sample, execution.numerics, out_shardings=where.whole)


def scoring_program(execution: Execution, *, micro_batch: int | None) -> Callable[..., jax.Array]:
    """Jitted (weights, rollout) -> log-probs f32[B, R] by the learner's forward."""
    where = _Where.of(execution, None)
    scored = sharded.scoring(execution, where.mesh, micro_batch=micro_batch)

    def score(weights, rollout):
        return scored(weights, rollout)[0]

    return jit(score, execution.numerics, out_shardings=where.whole)


def policy(execution: Execution, learning: Learning, devices: Devices | None = None) -> Policy:
    """The policy that an execution computes, on its mesh, for programs beside a run's."""
    return _Where.of(execution, devices).policy(learning)


def weights_program(execution: Execution, devices: Devices | None = None) -> Callable[..., Any]:
    """Jitted params -> compute weights, where and as `execution` has them."""
    where = _Where.of(execution, devices)
    program = jit(execution.prepare, execution.numerics, out_shardings=where.weights)
    return _spreading(program, where.params)


def merged_program(execution: Execution, devices: Devices | None = None) -> Callable[..., Any]:
    """Jitted params with adapters, which `execution` must have -> float32 params without any.

    `prepare` makes the same bits of both.
    """
    assert execution.lora is not None
    rule = Precision(lora=execution.numerics.precision.lora)
    wide = Numerics(precision=rule)
    merge = partial(adapters.merged, config=execution.config, lora=execution.lora, numerics=wide)
    target = _Where.of(replace(execution, lora=None), devices).params
    program = jit(merge, execution.numerics, out_shardings=target)
    return _spreading(program, _Where.of(execution, devices).params)


def publication(
    execution: Execution,
    to: Execution,
    devices: Devices | None = None,
    to_devices: Devices | None = None,
) -> Callable[..., Any]:
    """(params, weights of `execution`) -> weights of `to`, on devices of its own if there are any.

    They are the same arrays if both are prepared in the same way and lie in the same place. If `to`
    has another dtype or other tiles, its weights are cast from the masters, where these are; if it
    has another placement, they are then moved, which changes no bit.
    """
    made = [(n.dtype, n.column_tiles, n.precision.lora) for n in (execution.numerics, to.numerics)]
    same = made[0] == made[1]
    cast = None if same else weights_program(replace(to, placement=execution.placement), devices)
    there = _Where.of(to, devices if to_devices is None else to_devices)
    target, stay = there.weights, there.mesh == _Where.of(execution, devices).mesh

    def publish(params, weights):
        weights = weights if cast is None else cast(params)
        return weights if stay else jax.device_put(weights, target)

    return publish


def check_placement(execution: Execution, devices: Devices | None = None) -> None:
    """Raises `InputError` if the model cannot lie so, or there are too few devices."""
    _Where.of(execution, devices)


@dataclass(frozen=True)
class _Where:
    """An execution's mesh, of one device or many, and what lies where on it."""

    execution: Execution
    mesh: Mesh

    @classmethod
    def of(cls, execution: Execution, devices: Devices | None) -> "_Where":
        parameters.check(execution.config, execution.numerics, execution.placement)
        devices = jax.devices() if devices is None else devices
        return cls(execution, placement.mesh(execution.placement, devices))

    @property
    def whole(self) -> Any:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def weights(self) -> Any:
        return self._at(weight_axes(self.execution.config, self.execution.numerics))

    @property
    def params(self) -> Any:
        return self._at(adapters.whole_axes(self.execution.config, self.execution.lora))

    @property
    def trained(self) -> Any:
        return self._at(adapters.trained_axes(self.execution.config, self.execution.lora))

    def _at(self, leaf_axes: Any) -> Any:
        return placement.shardings(leaf_axes, self.mesh)

    def policy(self, learning: Learning) -> Policy:
        return sharded.policy(self.execution, self.mesh, learning=learning)

    def arriving(self, program: Callable, drawing: Execution, devices: Devices | None) -> Callable:
        """A sampler's program, with its rollouts moved to this execution's devices."""
        if _Where.of(drawing, devices).mesh == self.mesh:
            return program
        return lambda *args: jax.device_put(program(*args), self.whole)

    def greedy(self, drawing: Execution, devices: Devices | None) -> Callable:
        """A program for one greedy response per prompt, by the sampler without its mismatch.

        But for its weights: they are as old, and merged, as those that the others are drawn by.
        """
        best = replace(drawing.sampling, temperature=0.0, top_k=0, top_p=1.0)
        drawing = replace(drawing, sampling=best, routing="own")
        program = sampling_program(drawing, samples=1, devices=devices)
        return self.arriving(program, drawing, devices)

    def state(self, init: Callable[..., TrainState]) -> Any:
        """Shardings of a state: arrays that belong to a parameter lie where the parameter does."""
        shapes = adapters.trained_shapes(self.execution.config, self.execution.lora)
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        by_path = {
            path: (shape.shape, sharding)
            for (path, shape), sharding in zip(leaves, jax.tree.leaves(self.trained), strict=True)
        }

        def leaf(path, shape):
            for start in range(len(path)):
                placed = by_path.get(path[start:])
                if placed is not None and placed[0] == shape.shape:
                    return placed[1]
            return self.whole

        return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(init, shapes))


def _merged(rollout: Rollout, other: Rollout, rows: jax.Array) -> Rollout:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y])[rows], rollout, other)


def mismatch_report(log_probs: jax.Array, rollout: Rollout) -> dict[str, jax.Array]:
    """`mismatch/*`: `metrics.mismatch_metrics` of log-probs [b, R] of a rollout's first b rows."""
    rows = log_probs.shape[0]
    values = metrics.mismatch_metrics(log_probs, rollout.log_probs[:rows], rollout.mask[:rows])
    return {f"mismatch/{name}": value for name, value in values.items()}


def _by_source(
    score: Callable[..., Any], source: Any, rollout: Rollout, mismatch: dial.Mismatch
) -> jax.Array:
    """Log-probs f32[B, R] of every token by the weights that drew it."""
    if mismatch.in_flight is None:
        return score(source, rollout)[0]
    position = jnp.arange(rollout.responses.shape[1])[None, :]
    values, start = score(source[0], rollout)[0], 0
    parts = mismatch.in_flight.parts(position.shape[1])
    for tokens, own in zip(parts, source[1:], strict=False):
        start += tokens
        values = jnp.where(position >= start, score(own, rollout)[0], values)
    return values


def comparison(
    score: Callable[..., Any],
    mismatch: dial.Mismatch,
    *,
    aged: bool,
    replayed: Callable[..., Any] | None = None,
) -> Callable[..., tuple[dict[str, jax.Array], Exactness]]:
    """(weights, sampler's weights, rollout, trainer) -> metrics of the mismatch and its parts.

    `trainer` are the learner's log-probs, or None, which takes one more forward. `mismatch/*` are
    `metrics.mismatch_metrics` of them against the recorded ones. The parts, where there are any,
    are in mean |d|, largest |d| and k3: `drift/*` compares the learner with itself at the sampler's
    weights, `numerical/*` the latter with the recorded ones, and `reporting/*` the log-probs drawn
    with with the recorded ones. `replayed/*`, for a mixture whose learner takes its own experts, is
    what of `mismatch/*` would be left if it took the sampler's, by one more forward. The second
    result compares the bits of the learner at the sampler's weights with the recorded ones.
    """

    def compare(weights, source, rollout: Rollout, trainer: jax.Array | None):
        recorded, mask = rollout.log_probs, rollout.mask
        trainer = cast(jax.Array, score(weights, rollout)[0] if trainer is None else trainer)
        there = _by_source(score, source, rollout, mismatch) if aged else trainer
        pairs = {}
        if aged:
            pairs |= {"drift": (trainer, there), "numerical": (there, recorded)}
        if rollout.drawn_log_probs is not None:
            pairs["reporting"] = rollout.drawn_log_probs, recorded
        if replayed is not None:
            pairs["replayed"] = replayed(weights, rollout)[0], recorded
        report = mismatch_report(trainer, rollout)
        for part, (first, second) in pairs.items():
            values = metrics.mismatch_metrics(first, second, mask)
            report |= {f"{part}/{name}": values[name] for name in _PARTS}
        return report, exactness(there, rollout)

    return compare
