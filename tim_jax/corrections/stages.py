"""When a correction is evaluated, on which log-probs, and which losses it may be combined with.

Three policies give a token of a rollout a probability: the rollout's own, mu; the trainer's at the
start of the step, pi_old; and the trainer's at the weights of an update, pi. A weight must bring
the loss from mu to pi exactly once:

| mode | loss's ratio | a correction reads | together |
|---|---|---|---|
| recompute | pi / pi_old | pi_old / mu, once a step | pi / mu |
| bypass | pi / mu | pi / mu, in every update | a weight would count the ratio twice: refused |
| bypass, a loss without ratio | none | pi / mu, in every update | pi / mu |
| recompute, a loss without ratio | none | pi_old / mu, once a step | one update a step |

Masks and rejections count nothing and go with every loss. What is defined on the current policy
(`Block.reads`) reads pi / mu in every update, in recompute mode too.
"""

from typing import Literal, NamedTuple

from tim_jax.corrections.base import Correction
from tim_jax.errors import InputError

Mode = Literal["bypass", "recompute"]


class Stages(NamedTuple):
    """A correction by when it is evaluated. Both parts keep the order of their blocks."""

    step: Correction  # once a step, on pi_old / mu
    update: Correction  # in every update, on pi / mu


def stages(correction: Correction, mode: Mode) -> Stages:
    """Returns the parts of a correction that a mode evaluates once a step and in every update."""
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
    step = tuple(own for block, own in pairs if block.reads == "old")
    return step, tuple(own for block, own in pairs if block.reads == "current")


def join_state(correction: Correction, mode: Mode, step: tuple, update: tuple) -> tuple:
    """Undoes `split_state`."""
    if mode == "bypass":
        return tuple(update)
    parts = {"old": iter(step), "current": iter(update)}
    return tuple(next(parts[block.reads]) for block in correction.blocks)


def check(
    correction: Correction, *, mode: Mode, loss: str, has_ratio: bool, updates: int = 1
) -> None:
    """Refuses what would count a ratio twice or not at all, or what the trainer cannot give.

    Args:
      loss: the name of the loss.
      has_ratio: whether the importance ratio to the old policy is in it.
      updates: of a step, mini-batches times epochs.

    Raises:
      InputError: one line that names the block and the ways out.
    """
    for block in correction.blocks:
        if "divergence" in block.needs:
            raise InputError(
                f"{block.name} needs a 'divergence' for every token, which the trainer does not"
                " have; take another statistic"
            )
    weights = [block for block in correction.blocks if block.effect == "weight"]
    twice = [block for block in weights if mode == "bypass" or block.reads == "current"]
    if has_ratio and twice:
        way = 'set mode = "recompute"' if mode == "bypass" else "let it read the old policy"
        raise InputError(
            f"{twice[0].name} weights by pi / pi_rollout, and so does the loss {loss!r} in {mode}"
            f' mode: the ratio would count twice; {way}, or a loss without ratio ("reinforce")'
        )
    if mode == "recompute" and not has_ratio and weights and updates > 1:
        raise InputError(
            f"{weights[0].name} weights by pi_old / pi_rollout, and the loss {loss!r} has no ratio"
            f" that would bring the {updates} updates of a step from pi_old to pi; set mode ="
            ' "bypass", which weights by pi / pi_rollout in every update, or make one update a step'
        )
    if mode == "recompute":
        _check_order(correction)


def _check_order(correction: Correction) -> None:
    """Refuses a block that looks at the coefficients so far, after one that is evaluated later."""
    seen = None
    for block in correction.blocks:
        if block.reads == "current":
            seen = block.name
        elif seen and (block.effect == "scale" or block.whole_batch):
            raise InputError(
                f"{block.name} comes after {seen}, which reads the current policy and is evaluated"
                f" later in recompute mode; put {block.name} before it"
            )
