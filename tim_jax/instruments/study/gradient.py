"""The policy gradient at fixed weights, exact and under each source of mismatch and each remedy.

The exact sampler gives what no other engine has: unbiased estimates of the true gradient. For every
source the sampler draws the same prompts with the same random numbers, so that a batch of it and a
batch of the exact sampler differ by the mismatch and not by luck. The gradient is that of the
learner, in the first update of a step.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import metrics
from tim_jax.common.errors import InputError, writing
from tim_jax.common.types import Prompts, Rollout, make_key
from tim_jax.mismatch import Mismatch
from tim_jax.model import adapters
from tim_jax.model.execution import Execution, jit
from tim_jax.model.files import write_arrays
from tim_jax.model.weights import Weights
from tim_jax.numerics.strict import tree_sum
from tim_jax.policy import scoring
from tim_jax.rl import drawing, programs
from tim_jax.rl.drawing import Text
from tim_jax.rl.learner import experience
from tim_jax.rl.types import Carried, Experience, Learning
from tim_jax.tasks.base import Example, Task

BYPASS, RECOMPUTE = "bypass, uncorrected", "recompute, uncorrected"
_SIGNS = {"positive": 1.0, "negative": -1.0}
_PROJECTION = 0x9801  # the seed of its signs


@dataclass(frozen=True)
class Bench:
    """A policy at fixed weights, and what is drawn from it.

    Attributes:
        execution: the policy, which draws without a mismatch.
        learnings: how each estimator makes a gradient of a batch, `RECOMPUTE` among them.
        params: its master weights, arrays.
        batches: how many batches; each draws a group of responses for every example.
        projected: how many numbers a gradient is projected to (`project`); None: the whole one.
    """

    execution: Execution
    learnings: Mapping[str, Learning]
    params: Any
    task: Task
    text: Text
    examples: tuple[Example, ...]
    batches: int
    seed: int
    projected: int | None = None

    @property
    def group(self) -> int:
        """Responses of a prompt."""
        return self.learnings[RECOMPUTE].samples

    @cached_property
    def weights(self) -> Any:
        """The learner's compute weights."""
        return jax.jit(self.execution.prepare)(self.params)

    @cached_property
    def prompts(self) -> Prompts:
        """The examples, the same in every batch."""
        return self.text.prompts(self.examples, range(len(self.examples)))


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
        execution, plain = bench.execution, bench.learnings[RECOMPUTE]
        self._policy = programs.policy(execution, plain, jax.devices()[:1])
        self._score = jit(lambda w, r: self._policy.score(w, r)[0], execution.numerics)
        self._gradient = jit(self._flat_gradient, execution.numerics)
        self._prepare = {
            name: jax.jit(partial(_prepared, learning=learning))
            for name, learning in bench.learnings.items()
        }

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
        taken = self.bench.learnings if estimators is None else estimators
        sample = self._sampler(dial)
        rows = []
        for number in range(1, self.bench.batches + 1):
            file = kept and kept / f"{number}.npz"
            if file is not None and file.exists():
                rows.append(_read(file))
                continue
            rows.append(self._batch(sample(number), taken))
            if file is not None:
                _write(file, rows[-1])
        gradients, signs, values = (
            {name: np.stack([row[part][name] for row in rows]) for name in rows[0][part]}
            for part in range(3)
        )
        return Batches(gradients, signs, values)

    def rollouts(self, dial: Mismatch, number: int) -> Rollout:
        """What the sampler reports in one batch."""
        return self._sampler(dial)(number)

    def _sampler(self, dial: Mismatch) -> Callable[[int], Rollout]:
        bench = self.bench
        sample = programs.sampling_program(bench.execution, samples=bench.group, mismatch=dial)
        return lambda number: sample(
            bench.weights, bench.prompts, drawing.step_key(bench.seed, number)
        )

    def _batch(self, rollout: Rollout, estimators: Collection[str]) -> tuple[dict, dict, dict]:
        bench = self.bench
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
        found = _measured(trainer, batch) | {"reward": jnp.mean(rewards)}
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
    flat = {f"{part} {name}": x for part, each in enumerate(row) for name, x in each.items()}
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(file, flat)


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
        key = jax.random.fold_in(make_key(_PROJECTION), number)
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


@jax.jit
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


def bound_constants(measuring: Measuring, dial: Mismatch, *, states: int) -> dict[str, float]:
    """The constants of a bound on how far mismatch can turn the gradient, and the bound.

    They are those of Theorem 3.1 of Beyond Precision (arXiv 2602.01826). For rewards in [0, 1] the
    gradient under a sampler mu differs from that under the policy pi by at most 2 B D T^2: T is the
    longest response, B the largest norm of a token's score, and D the largest total variation
    between the two distributions of a next token. The largest over all states cannot be measured;
    taken are the largest over states that the first batch of the exact sampler visits.

    A sampler that adds noise to logits has another distribution at every draw; for those D is
    left out, as is the bound.
    """
    bench = measuring.bench
    rollout = measuring.rollouts(Mismatch(), 1)
    scores = score_norms(bench.weights, bench.params, rollout, bench.execution, states=states)
    longest = int(np.max(np.asarray(rollout.lengths)))
    measured = {"longest": float(longest), "score_norm": float(np.max(scores))}
    if any(entry.no_control or entry.only_reports for entry in dial.active):
        return measured
    other = replace(bench.execution, numerics=dial.numerics(bench.execution.numerics))
    edited = jax.jit(dial.weights)(bench.weights)
    varied = total_variation(bench.weights, edited, rollout, bench.execution, other)
    largest, mean = float(np.max(varied)), float(np.mean(varied))
    bound = 2.0 * measured["score_norm"] * largest * longest**2
    return measured | {"variation_largest": largest, "variation_mean": mean, "bound": bound}


def total_variation(
    weights: Weights, edited: Weights, rollout: Rollout, execution: Execution, other: Execution
) -> np.ndarray:
    """f32[N], half the L1 distance of the two next-token distributions at N visited states."""
    # Sequence by sequence, because a whole batch's distributions are large: R V numbers each.
    policies = [
        (jit(lambda w, r, e=e: scoring.distributions(w, r, execution=e), e.numerics), w)
        for w, e in ((weights, execution), (edited, other))
    ]
    distances = []
    for index in range(rollout.mask.shape[0]):
        sequence = jax.tree.map(lambda leaf, i=index: leaf[i : i + 1], rollout)
        one, two = (np.asarray(distribution(w, sequence)) for distribution, w in policies)
        distances.append(0.5 * np.abs(one - two).sum(axis=-1))
    return np.concatenate(distances)[np.asarray(rollout.mask)]


def score_norms(
    weights: Weights, params: Any, rollout: Rollout, execution: Execution, *, states: int
) -> np.ndarray:
    """f32[`states`], norms of the gradient of a token's log-prob, at states spread over a batch.

    The gradient is by what is trained: by the adapters alone, if there are some.
    """
    at = np.argwhere(np.asarray(rollout.mask))
    chosen = at[np.linspace(0, len(at) - 1, min(states, len(at))).astype(int)]

    trained, prepare = _trained(weights, params, execution)

    def log_prob(trained, row, column):
        one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), rollout)
        scores = scoring.score(prepare(trained), one, execution=execution)
        return scores.log_probs[0, column]

    def norm(place):
        gradient = jax.grad(log_prob)(trained, place[0], place[1])
        squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)]
        return jnp.sqrt(sum(squares, start=jnp.float32(0.0)))

    each = jit(lambda places: jax.lax.map(norm, places), execution.numerics)
    return np.asarray(each(jnp.asarray(chosen, jnp.int32)))


def _trained(
    weights: Weights, params: Any, execution: Execution
) -> tuple[Any, Callable[[Any], Weights]]:
    """What is trained, and how compute weights are made of it."""
    own = adapters.of(params)
    if own is None:
        return params, execution.prepare
    # Not by the rule of merging, whose derivative is 0 where an adapter changes nothing yet.
    return own, lambda own: weights | {"layers": weights["layers"] | {adapters.ADAPTERS: own}}
