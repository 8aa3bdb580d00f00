"""What a traced program computes: floating-point operations of products, and traffic of kernels.

Counted where the program is traced, because there every loop has its length and every kernel its
grid and blocks; a compiler's own count takes loop bodies once, and does not look into kernels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from jax.extend.core import jaxprs_in_params


@dataclass(frozen=True)
class Work:
    """Of one device; where a program is not local to devices, of all of it."""

    flops: int = 0  # a multiplication and an addition are two
    kernel_bytes: int = 0  # between memory and Pallas kernels

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.kernel_bytes + other.kernel_bytes)

    def times(self, count: int) -> "Work":
        return Work(self.flops * count, self.kernel_bytes * count)


def count(jaxpr: Any, trips: Sequence[int] = ()) -> Work:
    """Work of a jaxpr, inner ones included.

    A branch counts as its most expensive side; so a kernel counts all its blocks, also those that
    a causal mask lets it skip.

    Args:
      trips: of loops that end by a condition, in the program's order; beyond these, one each.
    """
    return _count(jaxpr, iter(trips))


def _count(jaxpr, trips: Iterator[int]) -> Work:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum((_equation(one, trips) for one in jaxpr.eqns), Work())


def _equation(equation, trips: Iterator[int]) -> Work:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return Work(flops=_product(equation))
    if name == "pallas_call":
        return _kernel(params, trips)
    if name == "while":
        body = _count(params["body_jaxpr"], trips)
        return body.times(next(trips, 1)) + _count(params["cond_jaxpr"], trips)
    if name == "cond":
        return max((_count(one, trips) for one in params["branches"]), key=lambda w: w.flops)
    inner = sum((_count(one, trips) for one in jaxprs_in_params(params)), Work())
    return inner.times(params["length"]) if name == "scan" else inner


def _product(equation) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * prod(equation.outvars[0].aval.shape) * prod(shape[axis] for axis in contracted)


def _kernel(params, trips: Iterator[int]) -> Work:
    mapping = params["grid_mapping"]
    steps = prod(mapping.grid)
    moved = sum(_moved(block, mapping.grid) for block in mapping.block_mappings)
    return _count(params["jaxpr"], trips).times(steps) + Work(kernel_bytes=moved)


def _moved(block, grid: tuple[int, ...]) -> int:
    """Bytes of all copies of a block: one whenever its place changes, the last axis fastest."""
    innermost = max(_axes_used(block.index_map_jaxpr, len(grid)), default=-1)
    copies = prod(grid[: innermost + 1])
    size = prod(block.transformed_block_aval.shape) * block.array_aval.dtype.itemsize
    return copies * size


def _axes_used(index_map, count: int) -> set[int]:
    """Axes of the grid that a block's place depends on."""
    jaxpr = getattr(index_map, "jaxpr", index_map)
    behind: dict[Any, set[int]] = {var: {i} for i, var in enumerate(jaxpr.invars[:count])}

    def of(atom) -> set[int]:
        return behind.get(atom, set()) if not hasattr(atom, "val") else set()

    for equation in jaxpr.eqns:
        found = set().union(*(of(atom) for atom in equation.invars))
        behind |= dict.fromkeys(equation.outvars, found)
    return set().union(*(of(atom) for atom in jaxpr.outvars))
