"""The largest batch that fits: memory is close to linear in rows, so few programs are compiled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Total = Callable[[int], int]  # a count -> bytes on a chip, by compiling


@dataclass(frozen=True)
class Largest:
    """The largest of the counts that may be chosen."""

    count: int  # 0: not even the smallest fits
    total: int  # bytes on a chip at that count, or at the smallest
    bounded: bool  # False: all counts that were allowed fit


def largest(
    total: Total, allowed: Sequence[int], *, capacity: int, known: dict[int, int]
) -> Largest:
    """The largest of `allowed`, ascending, that is found to be within `capacity`.

    The line through the two totals nearest to the capacity says which; a compilation confirms it or
    makes the line better.

    Args:
      total: compiles.
      known: totals already found, by count; those that are asked for are added.
    """

    def at(count: int) -> int:
        if count not in known:
            known[count] = total(count)
        return known[count]

    if len(known) < 2:
        at(next((count for count in allowed if count not in known), allowed[0]))
    low, high = 0, len(allowed)  # allowed[:low] fit, allowed[high:] do not
    while low < high:
        guess = min(_guess(known, allowed, capacity), high - 1)
        if low and guess < low:
            break  # by the line, no larger one fits
        if at(allowed[max(guess, low)]) <= capacity:
            low = max(guess, low) + 1
        else:
            high = max(guess, low)
    if low == 0:
        return Largest(0, at(allowed[0]), True)
    return Largest(allowed[low - 1], at(allowed[low - 1]), low < len(allowed))


def _guess(known: dict[int, int], allowed: Sequence[int], capacity: int) -> int:
    """Index of the largest count that should fit, by the line through the two nearest totals."""
    near = sorted(known, key=lambda count: abs(known[count] - capacity))[:2]
    if len(near) < 2:
        return len(allowed) - 1
    first, second = sorted(near)
    slope = (known[second] - known[first]) / (second - first)
    if slope <= 0:
        return len(allowed) - 1
    limit = first + (capacity - known[first]) / slope
    return max(sum(count <= limit for count in allowed) - 1, 0)
