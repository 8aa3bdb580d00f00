"""What a correction is, and when it is evaluated.

A correction is a chain of blocks over token coefficients, and an optax transform. With a policy
loss `L = sum_t w_t c_t l_t`, where `l_t` depends on `log pi(a_t)` and no gradient flows through the
coefficient `c_t`, the gradient with respect to `log pi(a_t)` is linear in `c_t`. So a correction
maps coefficients to coefficients: `updates` is the f32[B, R] array of them (to begin with, the
response mask) or a pytree of such arrays, each a batch of its own. A `Correction` also says of each
block what it does to a token and which log-probs it reads, because both decide which losses it may
be combined with (`check`) and when it is evaluated (`stages`).

Three policies give a token of a rollout a probability: the rollout's, mu; the trainer's at the
start of the step, pi_old; and the trainer's at the weights of an update, pi. A weight must bring
the loss from mu to pi exactly once:

| mode | loss's ratio | a correction reads | together |
|---|---|---|---|
| recompute | pi / pi_old | pi_old / mu, once a step | pi / mu |
| bypass | pi / mu | pi / mu, in every update | a weight would count the ratio twice: refused |
| bypass, a loss without ratio | none | pi / mu, in every update | pi / mu |
| recompute, a loss without ratio | none | pi_old / mu, once a step | one update a step |

Masks and rejections are no weights, so they go with every loss. A block that is defined on the
current policy (`Block.reads`) reads pi / mu in every update, in recompute mode too.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import combinations
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from tim_jax.common.errors import InputError, check_choice
from tim_jax.common.inputs import shown
from tim_jax.corrections.ratios import Level
from tim_jax.numerics.strict import arithmetic_dtype, widened

Effect = Literal["weight", "scale", "mask", "reject"]
Reads = Literal["old", "current"]
Sign = Literal["positive", "negative"]
Transform = optax.GradientTransformationExtraArgs

OWN = "a transform of your own"
# Arguments with a number for every token; others may have one for every sequence instead.
_OF_TOKENS = ("coefficients", "log_ratio", "log_probs", "divergence")


class Bounds(NamedTuple):
    """Bounds on the importance ratio at a level, for reports of how often they are exceeded."""

    level: Level
    lower: Any  # None, a number, or a traced f32[]
    upper: Any


@dataclass(frozen=True)
class Block:
    """One link of a correction."""

    name: str
    transform: Transform
    effect: Effect = "weight"
    """weight: multiplies by an importance ratio. scale: multiplies all by a number. mask: zeroes
    tokens, which stay in the loss's denominator. reject: zeroes tokens as if they had never been
    sampled: `Objective.denominator` says what becomes of the denominator, and KL and entropy terms
    leave them out."""
    reads: Reads = "old"
    """old: the mismatch, the trainer's policy at the start of a step against the rollout's.
    current: the trainer's policy at the weights of each update against the rollout's."""
    whole_batch: bool = False
    """True if it takes a statistic of the batch, which would differ on part of the rows."""
    bounds: Bounds | None = None
    needs: tuple[str, ...] = ()
    """Extra arguments that it reads beside `mask`."""
    sign: Sign | None = None
    """Of the advantages where it applies; None: everywhere."""
    beyond: Callable[..., dict[str, jax.Array]] | None = None
    """(mask, *needs) -> what is "below" and "above" its bounds, for reports; bool[B, R] or [B, 1].
    None: `bounds` say it, if there are any."""
    divisor: Callable[..., jax.Array] | None = None
    """(coefficients, mask) -> f32[], the mean that it divides by, for reports."""

    @property
    def label(self) -> str:
        """Its name as a word, for the names of metrics."""
        return "_".join(re.findall(r"\w+", self.name))

    @property
    def has_state(self) -> bool:
        """True if it remembers something from batch to batch."""
        return bool(jax.tree.leaves(jax.eval_shape(self.transform.init, jnp.zeros((1, 1)))))


class Correction(optax.GradientTransformationExtraArgs):
    """An optax transform of token coefficients that knows its blocks.

    Its state is the tuple of its blocks' states. Made by `chain`, by the recipes and by the blocks.
    """

    blocks: tuple[Block, ...]

    def __repr__(self) -> str:
        return f"Correction({', '.join(map(_with_bounds, self.blocks))})"

    def __new__(cls, *parts: Any) -> "Correction":
        # Of its blocks; or of init and update, by which a named tuple is copied.
        blocks = tuple(parts[0]) if len(parts) == 1 else _blocks_of(*parts)
        correction = super().__new__(cls, partial(_init, blocks), partial(_update, blocks))
        correction.blocks = blocks
        return correction

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Correction) and self.blocks == other.blocks

    def __hash__(self) -> int:
        return hash(self.blocks)

    @property
    def whole_batch(self) -> bool:
        """True if `update` must see all rows of a batch at once: a batch statistic, or state."""
        return any(block.whole_batch or block.has_state for block in self.blocks)

    @property
    def effects(self) -> frozenset[Effect]:
        """What its blocks do to tokens."""
        return frozenset(block.effect for block in self.blocks)


def _init(blocks: tuple[Block, ...], params: Any) -> tuple[Any, ...]:
    params = jax.tree.map(_widened_leaf, params)
    return tuple(block.transform.init(params) for block in blocks)


def _update(blocks: tuple[Block, ...], updates: Any, state: Any, params: Any = None, **extra: Any):
    updates, states = jax.tree.map(_widened_leaf, updates), []
    for block, block_state in zip(blocks, state, strict=True):
        updates, block_state = block.transform.update(updates, block_state, params, **extra)
        states.append(block_state)
    return updates, tuple(states)


def _blocks_of(init: Any, update: Any) -> tuple[Block, ...]:
    """The blocks of a correction's two functions; other functions are one block of their own."""
    if getattr(init, "func", None) is _init and getattr(update, "func", None) is _update:
        return init.args[0]
    return chain(Transform(init, update)).blocks


def _widened_leaf(leaf: Any) -> jax.Array:
    """A mask as numbers: in its own dtype a scheduled bound, which takes it, would be 0 or True."""
    return widened(leaf)[0]


def _with_bounds(block: Block) -> str:
    """`mask_outside (token ratio up to 2.0)`."""
    if block.bounds is None:
        return block.name
    level, lower, upper = block.bounds
    within = f"up to {upper}" if lower is None else f"from {lower}"
    within += f" to {upper}" if None not in (lower, upper) else ""
    return f"{block.name} ({level} ratio {within})"


def chain(*transforms: optax.GradientTransformation) -> Correction:
    """Returns the correction that applies the transforms in their order, as `optax.chain`.

    A transform that is not a `Correction` (one of your own, or of optax) is taken for a weight with
    a statistic of the whole batch: the assumption that restricts its use most. `map_coefficients`
    makes one that states what it does.

    Raises:
      InputError: one of them is no optax transform.
    """
    blocks: list[Block] = []
    for transform in transforms:
        if not isinstance(transform, optax.GradientTransformation):
            raise InputError(
                "a correction must be one that tim_jax.corrections makes, such as token_tis(), or"
                f" an optax transform; got {shown(transform)}"
            )
        if isinstance(transform, Correction):
            blocks += transform.blocks
        else:
            extended = optax.with_extra_args_support(transform)
            blocks.append(Block(OWN, extended, whole_batch=True))
    return Correction(tuple(blocks))


def declared(correction: Correction, **changes: Any) -> Correction:
    """Returns the same arithmetic, with other fields of its blocks (`effect`, `reads`, ...)."""
    return Correction(tuple(replace(block, **changes) for block in correction.blocks))


def rejections(correction: Correction) -> Correction:
    """Returns the blocks that reject, in their order."""
    return Correction(tuple(block for block in correction.blocks if block.effect == "reject"))


def scheduled(make: Callable[..., Correction], **arguments: Any) -> Correction:
    """Returns `make(**arguments)`, in which arguments may be schedules: functions of the batch.

    `scheduled(token_tis, cap=optax.linear_schedule(2.0, 1.2, 100))` counts its updates. It is
    `optax.inject_hyperparams` of every block. The blocks keep their fields, but have no `bounds` to
    report, because these change.
    """
    first = {name: x(0) if callable(x) else x for name, x in arguments.items()}

    def one(number: int, block: Block) -> Block:
        @wraps(make)
        def transform(*positional, **named):
            return make(*positional, **named).blocks[number].transform

        injected = optax.inject_hyperparams(transform)(**arguments)
        return replace(block, transform=injected, bounds=None, beyond=None)

    return Correction(tuple(one(i, block) for i, block in enumerate(make(**first).blocks)))


def map_coefficients(
    name: str,
    function: Callable[..., jax.Array],
    *,
    needs: tuple[str, ...],
    effect: Effect = "weight",
    whole_batch: bool = False,
    bounds: Bounds | None = None,
) -> Correction:
    """Makes a stateless block from `function(coefficients, mask, *needs) -> coefficients`.

    This is the way to write a block of one's own. `function` is given one f32[B, R] array at a
    time, `mask` as bool and the named extra arguments in the coefficients' dtype, which is float32
    or, if one of the arrays is float64, float64; its result is set to 0 off the mask and carries no
    gradient. If one of its arguments is NaN at a response token, so is the
    result, whatever it returns. `name` says which block it is when an extra argument is missing
    (InputError); see `Block` for the other arguments.
    """

    def update(updates, state, params=None, **extra):
        del params
        mask, *arguments = (take_extra(extra, need, name) for need in ("mask", *needs))
        return map_leaves(
            function, updates, mask, **dict(zip(needs, arguments, strict=True))
        ), state

    transform = Transform(lambda params: optax.EmptyState(), update)
    block = Block(name, transform, effect, whole_batch=whole_batch, bounds=bounds, needs=needs)
    return Correction((block,))


def map_leaves(function: Callable[..., jax.Array], updates: Any, mask: Any, /, **named: Any) -> Any:
    """Applies `function(coefficients, mask, ...)` to each array, leaving optax's masked nodes."""
    names = ("coefficients", *named)

    def one(coefficients, mask, *arguments):
        if is_masked_node(coefficients):
            return coefficients
        mask = jnp.asarray(mask).astype(bool)
        coefficients, *arguments = _widened(coefficients, *arguments)
        for name, x in zip(names, (coefficients, *arguments), strict=True):
            check_shape(name, x.shape, mask.shape)
        coefficients = jnp.where(mask, coefficients, 0.0)
        result = function(coefficients, mask, *arguments)
        for x in (coefficients, *arguments):
            if jnp.issubdtype(x.dtype, jnp.floating):
                result = jnp.where(jnp.isnan(x[:, None] if x.ndim == 1 else x), jnp.nan, result)
        return jax.lax.stop_gradient(jnp.where(mask, result, 0.0))

    return jax.tree.map(one, updates, mask, *named.values(), is_leaf=is_masked_node)


def is_masked_node(leaf: Any) -> bool:
    """True for a leaf that `optax.masked` or `optax.partition` leaves to another transform."""
    return isinstance(leaf, optax.MaskedNode)


def take_extra(extra: dict[str, Any], name: str, what: str) -> Any:
    """Returns an extra argument of `update`. Raises `InputError` if it is missing."""
    if extra.get(name) is None:
        raise InputError(f"{what} needs the extra argument {name!r}")
    return extra[name]


def known_number(value: object) -> float | None:
    """Returns a value as a float; NaN if it is no number, None if it is traced.

    Under `optax.inject_hyperparams` a bound is a traced array whose value is known only when the
    program runs, so it cannot be checked.
    """
    if isinstance(value, Tracer):
        return None
    if isinstance(value, bool | np.bool_ | str) or value is None:
        return float("nan")
    try:
        return float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return float("nan")


def plain_number(value: Any) -> Any:
    """Returns a bound as a Python float, or as f32[] (f64[] of float64) if it is traced.

    A NumPy scalar would be compared with float32 in its own dtype.
    """
    if value is None:
        return None
    number = known_number(value)
    return widened(value)[0] if number is None else number


def checked_number(name: str, value: Any, holds: Callable[[float], bool], rule: str) -> Any:
    """Returns a `plain_number`. Refuses one that is known and does not hold; NaN never should."""
    number = known_number(value)
    if number is not None and not holds(number):
        raise InputError(f"{name} is {shown(value)}; it must {rule}")
    return plain_number(value)


def matching(number: Any, values: jax.Array) -> Any:
    """Returns a `plain_number` as it is, or in the dtype of the values if it is traced."""
    return number.astype(values.dtype) if isinstance(number, jax.Array) else number


def outside(values: jax.Array, lower: Any, upper: Any) -> dict[str, jax.Array]:
    """Which values are "below" and "above" the bounds that there are, `plain_number`s."""
    flags = {} if lower is None else {"below": values < matching(lower, values)}
    return flags if upper is None else flags | {"above": values > matching(upper, values)}


def check_shape(name: str, shape: tuple[int, ...], of_mask: tuple[int, ...]) -> None:
    """Refuses shapes other than the mask's, or, where it makes sense, one number a sequence."""
    of_sequences = () if name in _OF_TOKENS else (of_mask[:1],)
    if len(of_mask) != 2 or shape not in (of_mask, *of_sequences):
        raise InputError(
            f"{name} has shape {shape} and the mask {of_mask}; they must both be [batch, tokens]"
            " (advantages may be [batch])"
        )


def _widened(coefficients: Any, *arguments: Any) -> list[Any]:
    """As `strict.widened`; arguments that are not of floats (a bool mask) stay as they are."""
    dtype = arithmetic_dtype(coefficients, *arguments)
    floats = [x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in arguments]
    return [coefficients.astype(dtype), *floats]


Mode = Literal["bypass", "recompute"]


class Stages(NamedTuple):
    """A correction by when it is evaluated. Both parts keep the order of their blocks."""

    step: Correction  # once a step, on pi_old / mu
    update: Correction  # in every update, on pi / mu


def stages(correction: Correction, mode: Mode) -> Stages:
    """Returns the parts of a correction that a mode evaluates once a step and in every update.

    Raises:
      InputError: there is no such mode.
    """
    check_choice("mode", mode, get_args(Mode))
    return Stages(*map(Correction, split_state(correction, mode, correction.blocks)))


def split_state(correction: Correction, mode: Mode, state: tuple) -> tuple[tuple, tuple]:
    """Returns the states of both stages, or what else there is one of for every block."""
    pairs = list(zip(correction.blocks, state, strict=True))
    step, update = (
        tuple(part for block, part in pairs if _late(block, mode) == late) for late in (False, True)
    )
    return step, update


def join_state(correction: Correction, mode: Mode, step: tuple, update: tuple) -> tuple:
    """Undoes `split_state`."""
    parts = iter(step), iter(update)
    return tuple(next(parts[_late(block, mode)]) for block in correction.blocks)


def _late(block: Block, mode: Mode) -> bool:
    """True if a mode evaluates the block in every update."""
    return mode == "bypass" or block.reads == "current"


def check(
    correction: Correction, *, mode: Mode, loss: str, has_ratio: bool, updates: int = 1
) -> None:
    """Refuses a combination that counts a ratio twice or not at all, or that lacks an input.

    Two weights count it twice, whether they read the same policy or not: pi / pi_rollout has
    pi_old / pi_rollout in it.

    Args:
      loss: the name of the loss.
      has_ratio: whether the importance ratio to the old policy is in it.
      updates: of a step, mini-batches times epochs.

    Raises:
      InputError: one line that names the block and the ways out.
    """
    check_choice("mode", mode, get_args(Mode))
    for block in correction.blocks:
        if "divergence" in block.needs:
            raise InputError(
                f"{block.name} needs a 'divergence' for every token, which the trainer does not"
                " have; take another statistic"
            )
    weights = [block for block in correction.blocks if block.effect == "weight"]
    for first, second in combinations(weights, 2):
        if None in (first.sign, second.sign) or first.sign == second.sign:
            own = OWN in (first.name, second.name)
            declare = f", or say with corrections.declared what effect {OWN} has" if own else ""
            raise InputError(
                f"{second.name} weights by a ratio to pi_rollout, and so does {first.name}: it"
                f" would count twice; leave one of them out{declare}"
            )
    twice = [block for block in weights if _late(block, mode)]
    if has_ratio and twice:
        way = 'set mode = "recompute"' if mode == "bypass" else "let it read the old policy"
        raise InputError(
            f"{twice[0].name} weights by pi / pi_rollout, and so does the loss {loss!r} in {mode}"
            f' mode: the ratio would count twice; {way}, or a loss without ratio ("reinforce")'
        )
    once = [block for block in weights if block.reads == "old"]
    if mode == "recompute" and not has_ratio and once and updates > 1:
        raise InputError(
            f"{once[0].name} weights by pi_old / pi_rollout, and the loss {loss!r} has no ratio"
            f" that would bring the {updates} updates of a step from pi_old to pi; set mode ="
            ' "bypass", which weights by pi / pi_rollout in every update, let it read the current'
            " policy, or make one update a step"
        )
    if mode == "recompute":
        _check_order(correction)


def check_rejecting_first(correction: Correction, mode: Mode) -> None:
    """Refuses `Objective.reject_before_advantages` where no rejection is known before advantages.

    Raises:
      InputError: bypass mode, no rejection that reads the old policy, or one that reads advantages.
    """
    what = "reject_before_advantages"
    if mode == "bypass":
        raise InputError(
            f'{what} is for mode = "recompute": in bypass mode rejections read the policy of each'
            " update, and advantages are computed before all of them"
        )
    rejecting = rejections(stages(correction, mode).step).blocks
    if not rejecting:
        raise InputError(f"{what} needs a correction that rejects, such as geometric_rejection")
    for block in rejecting:
        if "advantages" in block.needs or block.sign is not None:
            raise InputError(f"{what}: {block.name} reads the advantages, which come after it")


def _check_order(correction: Correction) -> None:
    """Refuses a block that reads the coefficients so far after one that is evaluated later."""
    seen = None
    for block in correction.blocks:
        if block.reads == "current":
            seen = block.name
        elif seen and (block.effect == "scale" or block.whole_batch):
            raise InputError(
                f"{block.name} comes after {seen}, which reads the current policy and is evaluated"
                f" later in recompute mode; put {block.name} before it"
            )
