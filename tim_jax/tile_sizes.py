"""Tile sizes of the accelerator kernels. Values only; they belong to `Numerics`.

A result's bits follow from the order of its sum alone: `block_k` and the key block are the same for
every row count, and every sum runs over ascending blocks inside one program. What else stands here
says how work is cut up among programs.
"""

from dataclasses import dataclass, fields

from tim_jax.errors import InputError


def _check(value, names: tuple[str, ...], *, least: int, power: bool = False) -> None:
    for name in names:
        size = getattr(value, name)
        if size < least or (power and size & (size - 1)):
            rule = f"{'a power of two, ' if power else ''}at least {least}"
            raise InputError(f"{type(value).__name__}: {name} must be {rule}, got {size}")


@dataclass(frozen=True)
class MatmulTile:
    """A program's part of a product: `rows` x `columns`, and how Triton compiles it."""

    rows: int = 64
    columns: int = 64
    warps: int = 4
    stages: int = 4  # loads in flight, of 2-byte elements; half as many in float32

    def __post_init__(self):
        _check(self, ("rows", "columns", "warps"), least=1, power=True)
        _check(self, ("stages",), least=1)


ONE_TILE = MatmulTile()


@dataclass(frozen=True)
class GpuTiles:
    """Tiles of `pallas_gpu`.

    One matmul tile for every row count needs no fact about the device. Several, by row count, are
    as exact only where the tensor cores add up a contraction in the same order whatever the tile:
    `scripts/gpu_check.sh --only kernels` looks.
    """

    block_k: int = 128  # elements of a contraction per step
    matmul: tuple[tuple[int | None, MatmulTile], ...] = ((None, ONE_TILE),)  # (up to rows, tile)
    attention_rows: int = 64  # query rows (token times head of its group) per program
    attention_warps: int = 4
    attention_stages: int = 2
    row_tile: int = 16  # rows per program of the elementwise kernels
    lanes: int = 4096  # elements of a vocabulary row per step

    def __post_init__(self):
        _check(self, ("block_k", "attention_rows"), least=16, power=True)
        _check(self, ("attention_warps", "row_tile", "lanes"), least=1, power=True)
        _check(self, ("attention_stages",), least=1)
        limits = [limit for limit, _ in self.matmul]
        finite = [limit for limit in limits[:-1] if limit is not None]
        if not limits or limits[-1] is not None or limits != [*sorted(set(finite)), None]:
            raise InputError(
                f"GpuTiles: matmul needs rising row limits that end with None, got {limits}"
            )
        for _, tile in self.matmul:
            _check(tile, ("rows", "columns"), least=16)

    def tile(self, rows: int) -> MatmulTile:
        """The matmul tile for products of `rows` rows."""
        return next(tile for limit, tile in self.matmul if limit is None or rows <= limit)


@dataclass(frozen=True)
class TpuTiles:
    """Tiles of `pallas_tpu`, in elements."""

    rows: int = 64
    columns: int = 128
    block_k: int = 128
    attention_rows: int = 64
    lanes: int = 2048  # elements of a vocabulary row per step

    def __post_init__(self):
        _check(self, tuple(f.name for f in fields(self)), least=8, power=True)
        _check(self, ("rows", "attention_rows"), least=16)
        _check(self, ("columns", "block_k", "lanes"), least=128)


# Float32 products run on the plain cores: shorter steps, and tiles whose sums fit in registers.
GPU_F32 = GpuTiles(block_k=32)
GPU_BF16 = GpuTiles()
# By row count, for Hopper: narrow tiles keep all cores busy at the few rows of a decode step.
GPU_BF16_BY_ROWS = GpuTiles(
    matmul=(
        (128, MatmulTile(rows=64, columns=32, warps=4, stages=5)),
        (1024, MatmulTile(rows=64, columns=64, warps=4, stages=4)),
        (None, MatmulTile(rows=128, columns=128, warps=8, stages=3)),
    )
)
TPU = TpuTiles()
