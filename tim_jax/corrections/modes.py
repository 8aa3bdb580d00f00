"""The two modes of training: when a correction is evaluated, and which combinations are refused.

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

from itertools import combinations
from typing import Literal, NamedTuple, get_args

from tim_jax.common.errors import InputError, check_choice
from tim_jax.corrections.base import OWN, Block, Correction, rejections

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
    if mode == "bypass":
        return Stages(Correction(()), correction)
    step = tuple(block for block in correction.blocks if block.reads == "old")
    update = tuple(block for block in correction.blocks if block.reads == "current")
    return Stages(Correction(step), Correction(update))


def split_state(correction: Correction, mode: Mode, state: tuple) -> tuple[tuple, tuple]:
    """Returns the states of both stages."""
    if mode == "bypass":
        return (), tuple(state)
    pairs = list(zip(correction.blocks, state, strict=True))
    step = tuple(part for block, part in pairs if block.reads == "old")
    return step, tuple(part for block, part in pairs if block.reads == "current")


def join_state(correction: Correction, mode: Mode, step: tuple, update: tuple) -> tuple:
    """Undoes `split_state`."""
    if mode == "bypass":
        return tuple(update)
    parts = {"old": iter(step), "current": iter(update)}
    return tuple(next(parts[block.reads]) for block in correction.blocks)


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
            raise InputError(
                f"{second.name} weights by a ratio to pi_rollout, and so does {first.name}: it"
                f" would count twice; leave one of them out{_if_own(first, second)}"
            )
    twice = [block for block in weights if mode == "bypass" or block.reads == "current"]
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


def _if_own(*blocks: Block) -> str:
    own = any(block.name == OWN for block in blocks)
    return f", or say with corrections.declared what effect {OWN} has" if own else ""


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
