"""The learner's values: its state, a step's experience, and how rollouts become gradients."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import struct

from tim_jax import corrections
from tim_jax.common.errors import InputError, check_choice
from tim_jax.common.inputs import changes, check_kinds, shown
from tim_jax.common.types import Rollout
from tim_jax.corrections import Correction, Mode
from tim_jax.model.execution import Routing
from tim_jax.model.weights import Params
from tim_jax.numerics.strict import unequal_bits
from tim_jax.numerics.sums import count, tree_sum
from tim_jax.objectives import Objective, advantages
from tim_jax.rl import rules
from tim_jax.rl.rules import Credit


class Policy(NamedTuple):
    """A policy as the learner uses it: functions of its weights, on one device or a mesh.

    `sharded.policy` makes one of an execution, on its mesh.
    """

    prepare: Callable[..., Any]  # parameters -> compute weights
    to_masters: Callable[..., Any]  # gradient of the weights, parameters -> gradient of these
    score: Callable[..., tuple[jax.Array, jax.Array | None]]  # as `experience.score_rows`
    gradient: Callable[..., tuple[Any, dict[str, jax.Array]]]  # as `learner.gradient_rows`
    norm: Callable[..., jax.Array]  # gradient of the parameters -> f32[]
    experts: int = 0  # of a layer, in a mixture
    # (weights before an update, after it) -> the latter, with what has not changed of the former
    renewed: Callable[..., Any] = lambda old, new: new

    def scaled(self, scale: jax.Array | None) -> "Policy":
        """The policy whose gradients are those of `scale`, f32[], times the loss; None: itself.

        Its `norm` takes such gradients, and is that of the loss's own.
        """
        if scale is None:
            return self

        def gradient(weights, batch, token_weights, **options):
            return self.gradient(weights, batch, scale * token_weights, **options)

        return self._replace(gradient=gradient, norm=lambda scaled: self.norm(scaled) / scale)


class Carried(NamedTuple):
    """State that the preparation of a step takes from the step before and passes on."""

    correction: Any  # the corrections' state, a block each
    reward_kl: Any = None  # f32[], the adapted coefficient of the KL in the reward, if there is one


@struct.dataclass
class TrainState:
    """Everything that an update changes."""

    params: Params  # float32 master weights; with adapters these alone, without their base
    optimizer: Any  # an `optax.OptState`, of which only its optimizer knows the structure
    correction: Any  # a tuple, the corrections' state, a block each
    step: jax.Array  # i32[], RL steps done
    # i32[], updates in a row, up to now, that were not finite; those that only overflowed with a
    # scaled loss are not among them.
    skipped: jax.Array
    reward_kl: Any = None  # as `Carried` has it

    @property
    def carried(self) -> Carried:
        """Its parts that `experience.experience` reads."""
        return Carried(self.correction, self.reward_kl)


@struct.dataclass
class Experience:
    """A batch of rollouts, ready to learn from. All rows; an update takes some of them."""

    rollout: Rollout
    advantages: jax.Array  # f32[B] or f32[B, R]
    mask: jax.Array  # bool[B, R], tokens that are learnt from
    old_log_probs: jax.Array  # f32[B, R], denominators of the importance ratio
    coefficients: jax.Array  # f32[B, R], from corrections of the step
    kept: jax.Array  # bool[B, R], the tokens of the mask that these did not reject
    reference_log_probs: jax.Array | None = None  # f32[B, R], if there is a KL to a reference
    selected: jax.Array | None = None  # bool[B, R], for a loss that treats some tokens differently
    loads: jax.Array | None = None  # f32[B, L, E], for the load-balancing loss; all rows are equal


@struct.dataclass
class Exactness:
    """Raw bits of two sets of log-probs compared over all response tokens."""

    compared: jax.Array  # i32[]
    unequal: jax.Array  # i32[]
    max_difference: jax.Array  # f32[]
    mean_difference: jax.Array  # f32[]
    first: jax.Array  # i32[2], row and response position of the first unequal token
    values: jax.Array  # f32[2], its log-prob by the learner and by the rollout


class Update(NamedTuple):
    """The report of one update."""

    exactness: Exactness  # of its rows' log-probs in the gradient program against the rollout's
    metrics: dict[str, jax.Array]
    log_probs: jax.Array  # f32[rows, R], those of the gradient program


class Prepared(NamedTuple):
    """A step's experience, and what was computed on the way to it."""

    experience: Experience
    carried: Carried
    exactness: Exactness | None  # of the forward at the weights that sampled, if there was one
    trainer: jax.Array | None  # f32[B, R], its log-probs
    metrics: dict[str, jax.Array]


@dataclass(frozen=True)
class Learning:
    """How rollouts become gradients."""

    objective: Objective = dataclasses.field(default_factory=Objective)
    samples: int = 8
    mode: Mode = "bypass"
    correction: Correction = dataclasses.field(default_factory=corrections.none)
    micro_batch: int | None = None  # sequences per forward and backward; None: all of them
    # Tokens per forward and backward, prompts included: sequences lie in it without padding.
    micro_batch_tokens: int | None = None
    remat: bool = False
    routing: Routing = "own"  # whose experts are taken, of a mixture
    # What a turn of an episode is given for: the episode's rewards, or those from this turn on.
    credit: Credit = "episode"
    noise_scale: bool = False  # also measure the gradient's noise, from its micro-batches
    max_skipped: int = 5  # updates in a row that may not be finite

    __repr__ = changes

    def __post_init__(self):
        check_kinds(self)
        objective = self.objective
        if not isinstance(objective, Objective):
            raise InputError(
                "objective must be one that tim_jax.objectives makes, such as grpo(); got"
                f" {shown(objective)}"
            )
        check_choice("Learning: credit", self.credit, get_args(Credit))
        object.__setattr__(self, "correction", corrections.chain(self.correction))
        rules.check_learning(
            objective, self.correction, mode=self.mode, samples=self.samples, updates=1
        )
        if self.micro_batch is not None and self.micro_batch < 1:
            raise InputError(f"Learning: micro_batch must be positive, got {self.micro_batch}")
        if objective.balance_coefficient and self.routing == "own":
            raise InputError(
                f"objective: balance_coefficient = {objective.balance_coefficient} needs the"
                " experts that tokens go through, of a mixture: learner.routing must be 'compared'"
                " or 'replayed', and is 'own'"
            )
        if self.micro_batch_tokens is not None:
            rules.check_counts(micro_batch_tokens=self.micro_batch_tokens)
            rules.check_packed(noise_scale=self.noise_scale)

    @property
    def stages(self) -> corrections.Stages:
        """The correction by when it is evaluated."""
        return corrections.stages(self.correction, self.mode)

    @property
    def needs_forward(self) -> bool:
        """True if a step needs the trainer's log-probs at the weights that sampled."""
        return self.mode == "recompute" or self.objective.needs_energy

    @property
    def needs_greedy(self) -> bool:
        """True if the advantages compare with the reward of a prompt's greedy response."""
        return "greedy_rewards" in advantages.needs(self.objective.estimator)

    @property
    def needs_whole_update(self) -> bool:
        """True if an update needs all its rows' log-probs before it can differentiate any of them.

        That is so if the loss depends on a statistic over all of them: of a correction, of a loss
        that selects tokens, or of a denominator that changes with the update's rejections.
        """
        update = self.stages.update
        rejects = "reject" in update.effects and self.objective.counts_kept
        return update.whole_batch or rejects or self.objective.selects


def exactness(log_probs: jax.Array, rollout: Rollout) -> Exactness:
    """Compares the learner's log-probs [B, R] with those that the rollout recorded.

    A value that is not finite counts as unequal: two NaNs do not agree.
    """
    mask, recorded = rollout.mask, rollout.log_probs
    unequal = mask & unequal_bits(log_probs, recorded)
    difference = jnp.where(mask, jnp.abs(log_probs - recorded), 0.0)
    compared = jnp.sum(mask, dtype=jnp.int32)
    at = jnp.argmax(unequal)
    row, column = at // mask.shape[1], at % mask.shape[1]
    return Exactness(
        compared=compared,
        unequal=jnp.sum(unequal, dtype=jnp.int32),
        max_difference=jnp.max(difference),
        mean_difference=tree_sum(tree_sum(difference)) / count(mask),
        first=jnp.stack([row, column]).astype(jnp.int32),
        values=jnp.stack([log_probs[row, column], recorded[row, column]]),
    )


def split_rows(tree: Any, size: int) -> Any:
    """Rows [B, ...] of every leaf as [B / size, size, ...]."""
    rows = jax.tree.leaves(tree)[0].shape[0]
    if rows % size:
        raise InputError(f"micro_batch must divide the {rows} sequences of an update, got {size}")
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), tree)


def mini_batch(batch: Experience, index: jax.Array, *, count: int) -> Experience:
    """Rows of mini-batch `index` of `count`: contiguous, so that groups stay together."""
    rows = batch.mask.shape[0]
    if rows % count:
        raise InputError(f"{count} mini-batches must divide the {rows} sequences of a step")
    size = rows // count
    take: Callable = partial(jax.lax.dynamic_slice_in_dim, slice_size=size, axis=0)
    return jax.tree.map(lambda x: take(x, index * size), batch)
