"""Sizes of the kernels' tiles on accelerators.

A result's bits follow from the order of its sums. So `block_k` of a kernel is the same for every
row count, and every sum runs over ascending blocks inside one program. The other tile sizes only
say how the work is divided among programs.
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

    One matmul tile for every row count is exact on any device. Several, by row count, are exact
    only where the tensor cores add up a contraction in the same order whatever the tile, which
    `scripts/gpu_check.sh --only kernels` checks.
    """

    block_k: int = 128  # elements of a contraction per step
    matmul: tuple[tuple[int | None, MatmulTile], ...] = ((None, ONE_TILE),)  # (up to rows, tile)
    experts: MatmulTile = ONE_TILE  # of products of experts, which have few rows each
    attention_rows: int = 64  # query rows (token times head of its group) per program
    attention_warps: int = 4
    attention_stages: int = 2
    # A program of attention's gradient: rows and keys of a step, and how Triton compiles it.
    gradient_rows: int = 64
    gradient_keys: int = 64
    gradient_warps: int = 8
    gradient_stages: int = 2
    row_tile: int = 16  # rows per program of the elementwise kernels
    lanes: int = 4096  # elements of a vocabulary row per step

    def __post_init__(self):
        products = ("block_k", "attention_rows", "gradient_rows", "gradient_keys")
        _check(self, products, least=16, power=True)
        powers = ("attention_warps", "gradient_warps", "row_tile", "lanes")
        _check(self, powers, least=1, power=True)
        _check(self, ("attention_stages", "gradient_stages"), least=1)
        limits = [limit for limit, _ in self.matmul]
        finite = [limit for limit in limits[:-1] if limit is not None]
        if not limits or limits[-1] is not None or limits != [*sorted(set(finite)), None]:
            raise InputError(
                f"GpuTiles: matmul needs rising row limits that end with None, got {limits}"
            )
        for tile in (self.experts, *(tile for _, tile in self.matmul)):
            _check(tile, ("rows", "columns"), least=16)

    def tile(self, rows: int) -> MatmulTile:
        """The matmul tile for products of `rows` rows."""
        return next(tile for limit, tile in self.matmul if limit is None or rows <= limit)


@dataclass(frozen=True)
class TpuTiles:
    """Tiles of `pallas_tpu`, in elements.

    They are large because every step of a grid costs a fixed time (`tim_jax.plan.roofline`).
    """

    rows: int = 256
    columns: int = 1024
    block_k: int = 1024
    expert_rows: int = 128  # of products of experts, which have few rows each
    attention_rows: int = 64
    heads: int = 8  # of a step of attention (key heads) and of the rotation, at most
    gradient_rows: int = 256  # of attention's gradient
    gradient_keys: int = 512
    row_tile: int = 64  # rows per step of the elementwise kernels
    lanes: int = 16384  # elements of a vocabulary row per step

    def __post_init__(self):
        _check(self, tuple(f.name for f in fields(self)), least=1, power=True)
        rows = ("rows", "expert_rows", "attention_rows", "gradient_rows", "row_tile")
        _check(self, rows, least=16)
        _check(self, ("columns", "block_k", "gradient_keys", "lanes"), least=128)


# Float32 products run on the plain cores: shorter steps, and tiles whose sums fit in registers.
GPU_F32 = GpuTiles(
    block_k=32, attention_rows=32, gradient_rows=16, gradient_keys=16, gradient_stages=1
)
GPU_BF16 = GpuTiles(
    matmul=((None, MatmulTile(rows=128, columns=128, warps=8, stages=3)),),
    experts=MatmulTile(rows=64, columns=128, warps=4, stages=3),
)
# By row count, for Hopper: narrow tiles keep all cores busy at the few rows of a decode step.
GPU_BF16_BY_ROWS = GpuTiles(
    matmul=(
        (128, MatmulTile(rows=64, columns=32, warps=4, stages=5)),
        (1024, MatmulTile(rows=64, columns=64, warps=4, stages=4)),
        (None, MatmulTile(rows=128, columns=128, warps=8, stages=3)),
    )
)
TPU_BF16 = TpuTiles()
TPU_F32 = TpuTiles(block_k=512)  # elements have twice the bytes
