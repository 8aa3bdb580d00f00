"""The policy gradient at fixed weights, exact and under each source of mismatch and each remedy.

The exact sampler gives what no other engine has: unbiased estimates of the true gradient. For every
source the sampler draws the same prompts with the same random numbers, so that a batch of it and a
batch of the exact sampler differ by the mismatch and not by luck. The gradient is that of the
learner, in the first update of a step.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import corrections, metrics
from tim_jax.common.errors import InputError
from tim_jax.common.types import Prompts, Rollout
from tim_jax.mismatch import Mismatch
from tim_jax.model import adapters
from tim_jax.model.execution import Execution, jit
from tim_jax.numerics.sums import tree_sum
from tim_jax.rl import drawing, programs
from tim_jax.rl.drawing import Text
from tim_jax.rl.experience import experience
from tim_jax.rl.training import Training
from tim_jax.rl.types import Carried, Experience, Learning
from tim_jax.tasks.base import Example, Task

BYPASS, RECOMPUTE = "bypass, uncorrected", "recompute, uncorrected"
_SIGNS = {"positive": 1.0, "negative": -1.0}
_PROJECTION = 0x9801  # the seed of its signs


@dataclass(frozen=True)
class Bench:
    """A policy at fixed weights, and what is drawn from it.

    Attributes:
        training: how it draws and learns, without a mismatch and a correction.
        params: its master weights, arrays.
        batches: how many batches; each draws a group of responses for every example.
        remedies: name -> tables of `tim_jax.corrections`, applied in recompute mode.
        projected: how many numbers a gradient is projected to (`project`); None: the whole one.
    """

    training: Training
    params: Any
    task: Task
    text: Text
    examples: tuple[Example, ...]
    batches: int
    seed: int
    remedies: Mapping[str, Sequence[Mapping[str, Any]]]
    projected: int | None = None

    @property
    def execution(self) -> Execution:
        """The policy."""
        return self.training.execution

    @property
    def group(self) -> int:
        """Responses of a prompt."""
        return self.training.learning.samples

    @cached_property
    def weights(self) -> Any:
        """The learner's compute weights."""
        return jax.jit(self.execution.prepare)(self.params)

    @cached_property
    def prompts(self) -> Prompts:
        """The examples, the same in every batch."""
        return self.text.prompts(self.examples, range(len(self.examples)))

    @cached_property
    def learnings(self) -> dict[str, Learning]:
        """How each estimator makes a gradient of a batch."""
        plain = self.training.learning
        found = {BYPASS: plain, RECOMPUTE: replace(plain, mode="recompute")}
        for name, tables in self.remedies.items():
            found[name] = replace(found[RECOMPUTE], correction=corrections.build(tables))
            if found[name].stages.update.blocks or found[name].needs_whole_update:
                raise InputError(
                    f"remedy {name!r}: reads the policy of each update, of which a measurement at"
                    " fixed weights has none; leave it out"
                )
        return found


class Batches(NamedTuple):
    """The batches of one source.

    Attributes:
        gradients: estimator -> f32[K, N], of the parameters.
        signs: "positive" and "negative" -> the part of the recompute gradient of tokens with such
            an advantage.
        metrics: name -> f64[K].
    """

    gradients: dict[str, np.ndarray]
    signs: dict[str, np.ndarray]
    metrics: dict[str, np.ndarray]


class Measuring:
    """The compiled programs of a bench. The sampler's is another one for every source."""

    def __init__(self, bench: Bench):
        self.bench = bench
        plain = bench.learnings[RECOMPUTE]
        self._policy = programs.policy(bench.execution, plain, jax.devices()[:1])
        numerics = bench.execution.numerics
        self._score = jit(lambda w, r: self._policy.score(w, r)[0], numerics)
        self._gradient = jit(self._flat_gradient, numerics)
        self._prepare = {
            name: jax.jit(partial(_prepared, learning=learning))
            for name, learning in bench.learnings.items()
        }
        self._measured = jax.jit(_measured)

    def batches(
        self,
        dial: Mismatch,
        estimators: Collection[str] | None = None,
        *,
        kept: Path | None = None,
    ) -> Batches:
        """Draws the batches of a sampler with this mismatch, and takes their gradients.

        Args:
          estimators: which of `Bench.learnings`; None: all.
          kept: a folder for each batch as it is taken; what is there already is read.
        """
        bench = self.bench
        taken = bench.learnings if estimators is None else estimators
        sample = programs.sampling_program(bench.execution, samples=bench.group, mismatch=dial)
        rows = []
        for number in range(1, bench.batches + 1):
            file = kept and kept / f"{number}.npz"
            if file is not None and file.exists():
                rows.append(_read(file))
                continue
            rows.append(self._batch(sample, number, taken))
            if file is not None:
                _write(file, rows[-1])
        gradients, signs, values = (
            {name: np.stack([row[part][name] for row in rows]) for name in rows[0][part]}
            for part in range(3)
        )
        return Batches(gradients, signs, values)

    def rollouts(self, dial: Mismatch, number: int) -> Rollout:
        """What the sampler reports in one batch."""
        bench = self.bench
        sample = programs.sampling_program(bench.execution, samples=bench.group, mismatch=dial)
        return sample(bench.weights, bench.prompts, drawing.step_key(bench.seed, number))

    def _batch(
        self, sample: Callable[..., Rollout], number: int, estimators: Collection[str]
    ) -> tuple[dict, dict, dict]:
        bench = self.bench
        rollout = sample(bench.weights, bench.prompts, drawing.step_key(bench.seed, number))
        rollout = replace(rollout, drawn_log_probs=None)
        graded, _ = drawing.graded(bench.task, bench.text, bench.examples, rollout, bench.group)
        rewards = jnp.asarray([one.reward for one in graded], jnp.float32)
        trainer = self._score(bench.weights, rollout)
        ready = {
            name: prepare(trainer, rollout, rewards) for name, prepare in self._prepare.items()
        }
        gradients = {name: self._taken(*ready[name]) for name in estimators}
        batch, weights = ready[RECOMPUTE]
        signs = {
            name: self._taken(batch, jnp.where(sign * _per_token(batch) > 0, weights, 0.0))
            for name, sign in _SIGNS.items()
        }
        found = self._measured(trainer, batch) | {"reward": jnp.mean(rewards)}
        return gradients, signs, {name: float(x) for name, x in jax.device_get(found).items()}

    def _taken(self, batch: Experience, token_weights: jax.Array) -> np.ndarray:
        bench = self.bench
        take = partial(self._gradient, bench.weights, bench.params, batch, token_weights)
        if bench.execution.numerics.compute_dtype != "float16":
            return np.asarray(take())
        # Float16 needs a scaled loss: by the largest of these scales that overflows nowhere.
        scales = (jnp.float32(2.0**power) for power in range(16, -1, -2))
        found = (np.asarray(take(scale)) for scale in scales)
        gradient = next((one for one in found if np.isfinite(one).all()), None)
        if gradient is None:
            raise InputError("study: a float16 gradient overflows; set numerics.dtype to bfloat16")
        return gradient

    def _flat_gradient(
        self, weights, params, batch: Experience, token_weights, scale: jax.Array | None = None
    ) -> jax.Array:
        """Of the objective, which is the loss with the other sign: f32[N], or projected."""
        gradient, _ = self._policy.scaled(scale).gradient(
            weights, batch, token_weights, adapters=adapters.of(params)
        )
        leaves = jax.tree.leaves(self._policy.to_masters(gradient, params))
        whole = -jnp.concatenate([leaf.astype(jnp.float32).reshape(-1) for leaf in leaves])
        whole = whole if scale is None else whole / scale
        return whole if self.bench.projected is None else project(whole, self.bench.projected)


def _write(file: Path, row: tuple[dict, ...]) -> None:
    """Keeps the parts of a batch."""
    file.parent.mkdir(parents=True, exist_ok=True)
    flat = {f"{part} {name}": x for part, each in enumerate(row) for name, x in each.items()}
    partial = file.with_suffix(".partial")
    with partial.open("wb") as stream:
        np.savez(stream, **flat)
    partial.replace(file)


def _read(file: Path) -> tuple[dict, dict, dict]:
    """What `_write` kept."""
    row: tuple[dict, dict, dict] = ({}, {}, {})
    with np.load(file) as flat:
        for key in flat.files:
            part, _, name = key.partition(" ")
            row[int(part)][name] = flat[key]
    return row


def project(vector: jax.Array, size: int) -> jax.Array:
    """f32[N] -> f32[size], by a fixed random matrix that keeps inner products in the mean.

    Every number is added, with a random sign of its own, to one of the result (a count sketch,
    Charikar, Chen and Farach-Colton 2002). Two numbers meet in one of the result with a probability
    of at most 1 / size, so that the inner product of two projections has a standard deviation of at
    most sqrt(2 / size) |a| |b|; where size >= N it is that of the vectors.
    """
    rows = -(-vector.size // size)
    padded = jnp.pad(vector, (0, rows * size - vector.size)).reshape(rows, size)

    def add(total: jax.Array, numbered: tuple[jax.Array, jax.Array]):
        number, row = numbered
        key = jax.random.fold_in(jax.random.key(_PROJECTION), number)
        signs, place = jax.random.split(key)
        signed = row * jax.random.rademacher(signs, (size,), jnp.float32)
        return total + jnp.roll(signed, jax.random.randint(place, (), 0, size)), None

    total, _ = jax.lax.scan(add, jnp.zeros(size, jnp.float32), (jnp.arange(rows), padded))
    return total


def _prepared(trainer, rollout: Rollout, rewards, *, learning: Learning):
    """A batch's experience, of log-probs that are there already, and its tokens' weights."""
    state = Carried(cast(tuple, learning.correction.init(())))
    batch = experience(
        trainer,
        None,
        state,
        rollout,
        rewards,
        score=lambda there, rollout, energy=False: (there, None),
        learning=learning,
    ).experience
    return batch, learning.objective.token_weights(batch.mask, batch.kept)


def _per_token(batch: Experience) -> jax.Array:
    advantages = batch.advantages
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages
    return jnp.broadcast_to(advantages, batch.mask.shape)


def _measured(trainer: jax.Array, batch: Experience) -> dict[str, jax.Array]:
    """Every metric of the mismatch, and those of the loss's own ratio in both modes."""
    rollout, mask = batch.rollout, batch.mask
    found = metrics.mismatch_metrics(trainer, rollout.log_probs, rollout.mask)
    old = {"bypass": rollout.log_probs, "recompute": trainer}
    for mode, denominator in old.items():
        ratio = jnp.where(mask, trainer - denominator, 0.0)
        kinds = {"k1": -ratio, "k3": jnp.expm1(ratio) - ratio}
        tokens = jnp.maximum(jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32), 1.0)
        found |= {f"{mode}/{k}": tree_sum(tree_sum(x)) / tokens for k, x in kinds.items()}
        skew = metrics.update_skew(jnp.exp(ratio), batch.advantages, mask)
        found |= {f"{mode}/{name}": value for name, value in skew.items()}
    return found
