"""The losses by name, and checks of their options."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from tim_jax.common.errors import InputError, check_choice
from tim_jax.objectives.losses.base import PolicyLoss
from tim_jax.objectives.losses.covariance import clip_cov, kl_cov, select_clip_cov, select_kl_cov
from tim_jax.objectives.losses.ratio import (
    cispo,
    clip,
    dppo_kl,
    dppo_tv,
    gmpo,
    gspo,
    reinforce,
    sapo,
)

Loss = Literal[
    "reinforce",
    "clip",
    "gspo",
    "gspo_token",
    "cispo",
    "sapo",
    "gmpo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
]

# The losses whose `clip_low` is a distance from the ratio 1, which cannot be below 0.
RATIO_CLIPPED = ("clip", "gspo", "gspo_token", "cispo", "clip_cov")

LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "reinforce": reinforce,
    "clip": clip,
    "gspo": gspo,
    "gspo_token": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}

SELECTIONS: dict[str, Callable[..., jax.Array]] = {
    "clip_cov": select_clip_cov,
    "kl_cov": select_kl_cov,
}


def policy_loss(
    name: str,
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    given: Mapping[str, Any],
    *,
    selected: jax.Array | None = None,
) -> PolicyLoss:
    """Returns the loss of a name with the options given, checked by `check_options`.

    Raises:
        InputError: the loss is one of `SELECTIONS` and there is no `selected`, bool[B, R].
    """
    arrays = log_probs, old_log_probs, advantages, mask
    if name not in SELECTIONS:
        return LOSSES[name](*arrays, **given)
    if selected is None:
        raise InputError(f"the loss {name!r} needs the tokens that `select` finds; none were given")
    return LOSSES[name](*arrays, selected=selected, **given)


def select(
    name: str,
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    given: Mapping[str, Any],
) -> jax.Array:
    """Returns bool[B, R], the tokens of the whole batch that a loss of `SELECTIONS` acts on."""
    return SELECTIONS[name](log_probs, old_log_probs, advantages, mask, **given)


def uses_ratio(name: str) -> bool:
    """Returns whether a loss depends on the old log-probs."""
    check_choice("loss", name, LOSSES)
    return name != "reinforce"


def options(name: str) -> dict[str, Any]:
    """Returns the options of a loss with their defaults."""
    check_choice("loss", name, LOSSES)
    parameters = inspect.signature(LOSSES[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def check_options(name: str, given: Mapping[str, Any]) -> None:
    """Refuses options that a loss does not have, and values that make no sense together.

    Raises:
        InputError: an unknown loss or option, or a value out of its range.
    """
    defaults = options(name)
    for option in given:
        if not defaults:
            raise InputError(f"the loss {name!r} has no options, but {option!r} was given")
        check_choice(f"the loss {name!r}: option", option, defaults)
    values = {**defaults, **given}
    if values.get("dual_clip", 0.0) is None:
        del values["dual_clip"]
    for option, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise InputError(f"{option} is {value!r}; it must be a finite number")
    for option, value in values.items():
        right, rule = _requirement(name, option, values)
        if not right:
            raise InputError(f"{option} is {value}; it must {rule}")


def _requirement(name: str, option: str, values: Mapping[str, Any]) -> tuple[bool, str]:
    """Returns whether an option's value is in its range, and the range in words."""
    value = values[option]
    if option == "clip_low" and name in RATIO_CLIPPED:
        return 0.0 <= value <= 1.0, "lie in [0, 1]"
    if option == "dual_clip":
        bound = 1.0 + values["clip_high"]
        return value > bound, f"lie above 1 + clip_high, which is {bound}"
    if option == "lower":
        return value < values["upper"], f"lie below upper, which is {values['upper']}"
    if option == "share":
        return 0.0 < value <= 1.0, "lie in (0, 1]"
    if option == "ratio_cap":
        return value >= 1.0, "be 1 or more"
    if option.startswith("temperature"):
        return value > 0.0, "be positive"
    return option == "upper" or value >= 0.0, "be 0 or more"
