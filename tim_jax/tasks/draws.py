"""Random draws that do not change between versions, and checks of the numbers that shape them."""

import random

from tim_jax.errors import InputError


def rng_for(*key: object) -> random.Random:
    """Returns a generator that depends on `key` alone (values with a stable repr)."""
    return random.Random(repr(key))


def below(rng: random.Random, n: int) -> int:
    """Returns a whole number in 0..n-1. Of `random`, only `random()` is promised to stay."""
    return int(rng.random() * n)


def whole(name: str, value: object, *, least: int | None = None) -> int:
    """Returns `value`, checked to be a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} must be a whole number, got {value!r}")
    if least is not None and value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")
    return value


def span(name: str, value: object, least: int) -> tuple[int, int]:
    """Returns `value`, checked to be two whole numbers in order, the first at least `least`."""
    match value:
        case (int(fewest), int(most)) if least <= fewest <= most:
            return fewest, most
    raise InputError(
        f"{name} must be two whole numbers (fewest, most), the first at least {least} and"
        f" not above the second; got {value!r}"
    )


def share(name: str, value: object) -> float:
    """Returns `value` as a float, checked to be a number from 0 to 1."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"{name} must be a number from 0 to 1, got {value!r}")
    return float(value)
