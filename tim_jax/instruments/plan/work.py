"""What a traced program computes: operations of its products, and the work of its Pallas kernels.

Counted where the program is traced, because there every loop has its length and every kernel its
grid and blocks; a compiler's own count takes loop bodies once and does not look into kernels.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from jax.experimental.pallas import triton as plt
from jax.extend.core import jaxprs_in_params

from tim_jax.kernels.pallas import PRIMITIVES


@dataclass(frozen=True)
class Call:
    """A call of a kernel, on one device. Equal calls do equal work."""

    name: str
    programs: int  # steps of its grid
    flops: int
    loaded: int  # bytes that its programs load and store
    memory: int  # bytes of these that come from memory and not from a cache


@dataclass(frozen=True)
class Work:
    """Work of one device; of a program that is not local to devices, of all of them."""

    flops: int = 0  # of products, a multiplication and an addition are two
    kernels: Mapping[Call, int] = field(default_factory=dict)  # how often each is called

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, Counter(self.kernels) + Counter(other.kernels))

    def times(self, count: int) -> "Work":
        """The work of so many repetitions."""
        return Work(self.flops * count, {call: n * count for call, n in self.kernels.items()})

    @property
    def kernel_bytes(self) -> int:
        """Bytes between memory and the kernels."""
        return sum(call.memory * count for call, count in self.kernels.items())


def count(jaxpr: Any, trips: Sequence[int] = ()) -> Work:
    """Work of a jaxpr, inner ones included.

    A branch counts as its most expensive side; so a kernel counts all its blocks, also those that
    a causal mask lets it skip. Loops inside kernels whose length is a value are not counted: such
    kernels state their cost.

    Args:
      trips: iterations of the loops that end by a condition, in the program's order; further ones
        count once.
    """
    return _count(jaxpr, iter(trips))


def _count(jaxpr, trips: Iterator[int]) -> Work:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum((_equation(one, trips) for one in jaxpr.eqns), Work())


def _equation(equation, trips: Iterator[int]) -> Work:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return Work(flops=_product(equation))
    if name in PRIMITIVES:
        call = _stated(equation) if "meshes" in params else _kernel(params, equation.invars)
        return Work(call.flops, {call: 1})
    if name == "while":
        times = next(trips, 1)
        return _count(params["body_jaxpr"], trips).times(times) + _count(
            params["cond_jaxpr"], trips
        )
    if name == "cond":
        return max((_count(one, trips) for one in params["branches"]), key=lambda w: w.flops)
    inner = sum((_count(one, trips) for one in jaxprs_in_params(params)), Work())
    return inner.times(params["length"]) if name == "scan" else inner


def _product(equation) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2 * prod(equation.outvars[0].aval.shape) * prod(shape[axis] for axis in contracted)


def _kernel(params, operands: Sequence[Any]) -> Call:
    """What its author states, or all steps of its grid.

    A TPU runs the steps of a grid in order, and copies a block when another one is needed. The
    programs of a GPU each load their own, and its cache is taken to spare memory every repetition;
    of an array that is only written to in a few places, no more comes from memory than is loaded.
    """
    stated, mapping = params["cost_estimate"], params["grid_mapping"]
    programs, blocks = prod(mapping.grid), mapping.block_mappings
    on_gpu = isinstance(params["compiler_params"], plt.CompilerParams)
    if stated is not None:
        flops, loaded = stated.flops, stated.bytes_accessed
    else:
        flops = count(params["jaxpr"]).flops * programs
        copies = (programs if on_gpu else _copies(block, mapping.grid) for block in blocks)
        sizes = (_bytes(_shape(one), one) for one in blocks)
        loaded = sum(n * size for n, size in zip(copies, sizes, strict=True))
    # An array may be given twice, for two of its blocks at a time.
    names = [*map(id, operands[mapping.num_index_operands :]), *range(len(mapping.out_shapes))]
    arrays = sum(
        dict(
            zip(names, (_bytes(one.array_aval.shape, one) for one in blocks), strict=True)
        ).values()
    )
    memory = min(arrays, loaded) if on_gpu else loaded
    return Call(params["name"], programs, flops, loaded, memory)


def _stated(equation) -> Call:
    """What its author states of a Mosaic kernel for GPUs, whose loads are in its code alone."""
    (mesh,), cost = equation.params["meshes"], equation.params["cost_estimate"]
    arrays = [one.aval for one in (*equation.invars, *equation.outvars)]
    whole = sum(one.size * one.dtype.itemsize for one in arrays)
    memory = min(whole, cost.bytes_accessed)
    programs = prod(mesh.grid)
    return Call(equation.params["name"], programs, cost.flops, cost.bytes_accessed, memory)


def _shape(block) -> tuple[int, ...]:
    """A block's, without what lies beyond the array."""
    sizes = (
        one if isinstance(one, int) else getattr(one, "block_size", 1) for one in block.block_shape
    )
    return tuple(map(min, sizes, block.array_aval.shape))


def _bytes(shape: tuple[int, ...], block) -> int:
    return prod(shape) * block.array_aval.dtype.itemsize


def _copies(block, grid: tuple[int, ...]) -> int:
    """Copies of a block, one whenever its index changes, the last axis fastest."""
    innermost = max(_axes_used(block.index_map_jaxpr, len(grid)), default=-1)
    return prod(grid[: innermost + 1])


def _axes_used(index_map, count: int) -> set[int]:
    """Axes of the grid that a block's index depends on."""
    jaxpr = getattr(index_map, "jaxpr", index_map)
    behind: dict[Any, set[int]] = {var: {i} for i, var in enumerate(jaxpr.invars[:count])}

    def of(atom) -> set[int]:
        return behind.get(atom, set()) if not hasattr(atom, "val") else set()

    for equation in jaxpr.eqns:
        axes = set().union(*(of(atom) for atom in equation.invars))
        behind |= dict.fromkeys(equation.outvars, axes)
    return set().union(*(of(atom) for atom in jaxpr.outvars))
