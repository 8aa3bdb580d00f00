"""The learner's values: its state, a step's experience, and how rollouts become gradients.

The rows of an update are computed in micro-batches, parts that bound its memory (`scan`). All have
as many rows, padded to the longest, or as many tokens. Those of tokens are filled by sequences of
different lengths (`scoring.Packed`), so that what is computed follows the tokens that there are.
Which sequences share a micro-batch depends on the lengths alone, and changes no bit of a log-prob.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from tim_jax.numerics.strict import count, tree_sum, unequal_bits
from tim_jax.objectives import Objective
from tim_jax.rl import rules
from tim_jax.rl.rules import Credit

_ANY_NUMBER = 2**31 - 1  # of tokens


class Policy(NamedTuple):
    """A policy as the learner uses it, see `sharded.policy`: functions of its weights."""

    prepare: Callable[..., Any]  # parameters -> compute weights
    to_masters: Callable[..., Any]  # gradient of the weights, parameters -> gradient of these
    score: Callable[..., tuple[jax.Array, jax.Array | None]]  # as `learner.score_rows`
    gradient: Callable[..., tuple[Any, dict[str, jax.Array]]]  # as `learner.gradient_rows`
    norm: Callable[..., jax.Array]  # gradient of the parameters -> f32[]
    experts: int = 0  # of a layer, in a mixture
    # (weights before an update, after it) -> the latter, with what has not changed of the former
    renewed: Callable[..., Any] = lambda old, new: new

    def scaled(self, scale: jax.Array | None) -> "Policy":
        """The policy whose gradients, but not their norms, are of `scale` f32[] times the loss."""
        if scale is None:
            return self

        def gradient(weights, batch, token_weights, **options):
            return self.gradient(weights, batch, scale * token_weights, **options)

        return self._replace(gradient=gradient, norm=lambda scaled: self.norm(scaled) / scale)


class Carried(NamedTuple):
    """State that the preparation of a step takes from the step before."""

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
        """Its parts that `learner.experience` reads."""
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

    objective: Objective = field(default_factory=Objective)
    samples: int = 8
    mode: Mode = "bypass"
    correction: Correction = field(default_factory=corrections.none)
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
        for name, kind in (("mode", Mode), ("routing", Routing), ("credit", Credit)):
            check_choice(f"Learning: {name}", getattr(self, name), get_args(kind))
        object.__setattr__(self, "correction", corrections.chain(self.correction))
        rules.check_learning(
            objective, self.correction, mode=self.mode, samples=self.samples, updates=1
        )
        rules.check_counts(max_skipped=self.max_skipped)
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
    def needs_whole_update(self) -> bool:
        """True if an update needs all its rows' log-probs before it can differentiate any of them.

        Then the loss depends on a statistic over all of them: of a correction, of a loss that
        selects tokens, or of a denominator that changes with the update's rejections.
        """
        update = self.stages.update
        rejects = "reject" in update.effects and self.objective.counts_kept
        return update.whole_batch or rejects or self.objective.selects


def exactness(log_probs: jax.Array, rollout: Rollout) -> Exactness:
    """Compares log-probs [B, R] with the recorded ones; two NaNs do not agree."""
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


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    rows: Any,
    rollout: Rollout,
    *,
    size: int | None,
    tokens: int | None,
    without: Callable[[Any, jax.Array], Any],
    agree: Callable[[jax.Array], jax.Array],
) -> tuple[Any, Any]:
    """`lax.scan` over micro-batches of at most `size` rows, or of at most `tokens` tokens too.

    Args:
      step: (carry, rows [size, ...]) -> (carry, tree of arrays [size, R]).
      rows: a tree of arrays [B, ...].
      rollout: the sequences of the rows. Where an episode has several rows, the empty ones are not
        computed.
      size: None: as many as there are sequences, or episodes.
      tokens: no sequence has more, its prompt included.
      without: (rows [size, ...], bool[size]) -> these without the rows that are False, which stand
        in where a part has fewer.
      agree: i32[], the number of parts here -> the largest that a device beside it has: all of them
        must compute as many.

    Returns:
      The carry, and the arrays as [B, R].
    """
    count = rollout.lengths.shape[0]
    size = min(size or count // rollout.parts, count)
    if tokens is None and rollout.parts == 1:
        if size == count:
            return step(carry, rows)
        carry, made = jax.lax.scan(step, carry, split_rows(rows, size))
        return carry, jax.tree.map(lambda x: x.reshape(count, -1), made)
    part_of = fill(whole_lengths(rollout), tokens=tokens or _ANY_NUMBER, rows=size)
    there = part_of if rollout.parts == 1 else jnp.where(rollout.lengths > 0, part_of, 0)
    parts = agree(jnp.max(there) + 1)

    def part(number: jax.Array) -> tuple[jax.Array, Any]:
        (chosen,) = jnp.nonzero(part_of == number, size=size, fill_value=count)
        own = jax.tree.map(lambda x: x.at[chosen].get(mode="clip"), rows)
        return chosen, without(own, chosen < count)

    def one(number: jax.Array, state: Any) -> Any:
        carry, made = state
        chosen, own = part(number)
        carry, new = step(carry, own)
        put = partial(jax.tree.map, lambda x, y: x.at[chosen].set(y, mode="drop"))
        return carry, put(made, new)

    shapes = jax.eval_shape(lambda carry: step(carry, part(jnp.int32(0))[1])[1], carry)
    made = jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), shapes)
    return jax.lax.fori_loop(0, parts, one, (carry, made))


def fill(lengths: jax.Array, *, tokens: int, rows: int) -> jax.Array:
    """i32[B], the part of each sequence, from 0: the longest first, each to the first with room.

    First-fit decreasing needs at most 11 parts for every 9 of the best filling (Johnson 1973).
    """
    count = lengths.shape[0]

    def one(state: tuple[jax.Array, jax.Array], length: jax.Array):
        held, number = state
        fits = (held + length <= tokens) & (number < rows)
        part = jnp.argmax(fits)
        return (held.at[part].add(length), number.at[part].add(1)), part

    order = jnp.argsort(-lengths, stable=True)
    empty = jnp.zeros((count,), jnp.int32)
    _, parts = jax.lax.scan(one, (empty, empty), lengths[order].astype(jnp.int32))
    return jnp.zeros((count,), jnp.int32).at[order].set(parts.astype(jnp.int32))


def deal(lengths: jax.Array, shares: int) -> jax.Array:
    """i32[B], an order of the rows whose equal `shares` have about as many tokens each.

    Rows are dealt by length, there and back: 1, 2, 3, 3, 2, 1, ...
    """
    order = jnp.argsort(-lengths, stable=True)
    dealt = order.reshape(-1, shares)
    back = (jnp.arange(dealt.shape[0]) % 2 == 1)[:, None]
    return jnp.where(back, dealt[:, ::-1], dealt).T.reshape(-1)


def whole_lengths(rollout: Rollout) -> jax.Array:
    """i32[B], tokens of the sequences, prompts included."""
    return rollout.prompt_lengths + rollout.lengths


def rollout_without(rollout: Rollout, there: jax.Array) -> Rollout:
    """The rollout, of which the rows that are False in bool[B] have no token."""
    return replace(rollout, lengths=jnp.where(there, rollout.lengths, 0))


def experience_without(batch: Experience, there: jax.Array) -> Experience:
    """The same of experience."""
    rollout = rollout_without(batch.rollout, there)
    mask, kept = batch.mask & there[:, None], batch.kept & there[:, None]
    return replace(batch, rollout=rollout, mask=mask, kept=kept)


def cut_rollout(rollout: Rollout, width: int) -> Rollout:
    """A rollout whose responses are at most `width` tokens, without the padding beyond."""
    wide = ("responses", "log_probs", "drawn_log_probs", "hidden", "supports", "drawn")
    cut = {name: getattr(rollout, name) for name in wide}
    cut = {name: None if x is None else x[:, :width] for name, x in cut.items()}
    if rollout.routes is not None:  # by position, the prompt's first
        cut["routes"] = rollout.routes[:, : rollout.prompts.shape[1] + width]
    return replace(rollout, **cut)
