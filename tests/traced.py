"""Runs that compute the same share their programs, so that each is traced and compiled once."""

from typing import Any

from tim_jax.app.config.run import Optimizer
from tim_jax.rl import programs


def once(patch):
    """Has it so while the patch lasts. What is made of a run is known by its `Training`.

    A program that was made before does not see what a test puts in the place of a part of it: the
    test changes the programs of the job that `assemble` returns instead.
    """
    make, optimizers = Optimizer.chain, {}

    def of_section(section, *, steps, max_tokens):
        end = None if section.schedule == "constant" else steps
        key = repr(section), end, max_tokens
        if key not in optimizers:
            optimizers[key] = make(section, steps=steps, max_tokens=max_tokens)
        return optimizers[key]  # the same functions, so that runs which have them are equal

    patch.setattr(Optimizer, "chain", of_section)
    for name in ("build", "sampling_program", "merged_program"):
        patch.setattr(programs, name, _kept(getattr(programs, name)))


def _kept(make):
    made: dict[Any, Any] = {}

    def once(*args, **options):
        key = tuple(map(_fixed, args)), tuple((k, _fixed(x)) for k, x in sorted(options.items()))
        if key not in made:
            made[key] = make(*args, **options)
        return made[key]

    return once


def _fixed(value):
    return tuple(value) if isinstance(value, list) else value  # of devices
