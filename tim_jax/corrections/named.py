"""From a configuration's plain tables to a chain: a name and its keyword arguments, nothing more.

corrections = [
  { name = "reject", statistic = "k1", over = "mean", lower = 0.999, upper = 1.001 },
  { name = "token_tis", cap = 2.0 },
]
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tim_jax.corrections import base, batch, blocks, recipes
from tim_jax.errors import InputError, did_you_mean

RECIPES: dict[str, Callable[..., base.Correction]] = {
    "none": recipes.none,
    "token_tis": recipes.token_tis,
    "sequence_tis": recipes.sequence_tis,
    "token_mis": recipes.token_mis,
    "sequence_mis": recipes.sequence_mis,
    "geometric_mis": recipes.geometric_mis,
    "icepop": recipes.icepop,
    "kpop": recipes.kpop,
    "geometric_rejection": recipes.geometric_rejection,
    "geometric_rejection_token_tis": recipes.geometric_rejection_token_tis,
    "geometric_rejection_sequence_tis": recipes.geometric_rejection_sequence_tis,
    "k3_rejection": recipes.k3_rejection,
    "k3_rejection_token_tis": recipes.k3_rejection_token_tis,
    "sequence_tis_product_rejection": recipes.sequence_tis_product_rejection,
    "seq_mask_tis": recipes.seq_mask_tis,
    "token_tis_veto": recipes.token_tis_veto,
    "trust_region_masking": recipes.trust_region_masking,
    "dppo": recipes.dppo,
    "off_policy_sequence_mask": recipes.off_policy_sequence_mask,
    "error_rejection": recipes.error_rejection,
    "vexact": recipes.vexact,
    "ais": recipes.ais,
}

BLOCKS: dict[str, Callable[..., base.Correction]] = {
    "scale_by_ratio": blocks.scale_by_ratio,
    "scale_by_truncated_ratio": blocks.scale_by_truncated_ratio,
    "mask_outside": blocks.mask_outside,
    "reject": blocks.reject,
    "veto": blocks.veto,
    "mask_probability_difference": blocks.mask_probability_difference,
    "normalise": batch.normalise,
    "normalise_by_running_mean": batch.normalise_by_running_mean,
    "mix_in_adaptively": batch.mix_in_adaptively,
}


def build(entries: Iterable[Mapping[str, Any]]) -> base.Correction:
    """Returns the chain of recipes and blocks named by the entries, in their order.

    An entry is a table with `name` and the keyword arguments of that function. No entries: no
    correction.

    Raises:
        InputError: unknown name or argument, a missing one, or a value that the function refuses.
    """
    return base.chain(*(_build_one(entry) for entry in entries))


def _build_one(entry: Mapping[str, Any]) -> base.Correction:
    known = {**RECIPES, **BLOCKS}
    if "name" not in entry:
        raise InputError(
            f"correction {dict(entry)!r} has no name; known: {', '.join(sorted(known))}"
        )
    name, arguments = entry["name"], {k: v for k, v in entry.items() if k != "name"}
    if name not in known:
        raise InputError(f"correction {name!r} is unknown{did_you_mean(str(name), known)}")
    parameters = dict(inspect.signature(known[name]).parameters)
    parameters.pop("axis_name", None)  # of a mesh axis inside `shard_map`: not for configurations
    for argument in arguments:
        if argument not in parameters:
            hint = did_you_mean(argument, parameters) if parameters else "; it takes none"
            raise InputError(f"correction {name!r} has no argument {argument!r}{hint}")
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument not in arguments:
            raise InputError(f"correction {name!r} needs the argument {argument!r}")
        _check_number(name, argument, parameter.annotation, arguments.get(argument))
    return known[name](**arguments)


def _check_number(name: str, argument: str, annotation: object, value: object) -> None:
    if annotation not in (float, float | None, blocks.Bound) or value is None:
        return
    known = base.known_number(value)
    if known is not None and known != known:
        raise InputError(f"correction {name!r}: {argument} is {value!r}; it must be a number")
