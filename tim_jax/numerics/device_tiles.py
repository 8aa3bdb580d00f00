"""Sizes of the kernels' tiles on accelerators.

A result's bits follow from the order of its sums. So `block_k` of a kernel is the same for every
row count, and every sum runs over ascending blocks inside one program. The other tile sizes only
say how the work is divided among programs.
"""

from dataclasses import dataclass, fields, replace

from tim_jax.common.errors import InputError


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
    """Tiles of `pallas_gpu` and `pallas_mosaic_gpu`.

    One matmul tile for every product is exact on any device. Several, by the product's size, are
    exact only where the tensor cores add up a contraction in the same order whatever the tile,
    which `scripts/gpu_check.sh --only kernels` checks.
    """

    block_k: int = 128  # elements of a contraction per step
    matmul: tuple[MatmulTile, ...] = (ONE_TILE,)  # of products, the narrowest first; see `tile`
    # That a product should have at least, if there are several tiles: about half of the cores of a
    # Hopper GPU draw all that its cache can give.
    programs: int = 64
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
        _check(self, ("attention_stages", "gradient_stages", "programs"), least=1)
        sizes = [tile.rows * tile.columns for tile in self.matmul]
        if not sizes or sizes != sorted(set(sizes)):
            raise InputError(
                "GpuTiles: matmul needs one tile or several of rising size, got tiles of"
                f" {', '.join(map(str, sizes)) or 'none'} elements"
            )
        for tile in (self.experts, *self.matmul):
            _check(tile, ("rows", "columns"), least=16)

    def tile(self, rows: int, columns: int) -> MatmulTile:
        """The tile for products of this size.

        It is the widest of which there are `programs`, or else the narrowest. One that has more
        rows than the narrowest is passed over where half of its rows would do.
        """
        narrowest, *others = self.matmul
        for tile in reversed(others):
            count = -(-rows // tile.rows) * -(-columns // tile.columns)
            fits = tile.rows == narrowest.rows or tile.rows < 2 * rows
            if count >= self.programs and fits:
                return tile
        return narrowest


@dataclass(frozen=True)
class TpuTiles:
    """Tiles of `pallas_tpu`, in elements.

    They are large because every step of a grid costs a fixed time
    (`tim_jax.instruments.plan.roofline`).
    """

    rows: int = 256
    # Of products that have no more rows; 0: these have `rows` as well. Two tiles are exact where
    # the matrix unit adds up a contraction in the same order whatever the tile.
    few_rows: int = 0
    columns: int = 1024
    block_k: int = 1024
    expert_rows: int = 128  # of products of experts, which have few rows each
    attention_rows: int = 64
    attention_blocks: int = 4  # of `kv_block` keys, of a step of attention
    heads: int = 8  # of a step of attention (key heads) and of the rotation, at most
    gradient_rows: int = 256  # of attention's gradient
    gradient_keys: int = 512
    gradient_heads: int = 4  # of a step, at most
    row_tile: int = 64  # rows per step of the elementwise kernels
    lanes: int = 16384  # elements of a vocabulary row per step

    def __post_init__(self):
        sizes = tuple(f.name for f in fields(self) if f.name != "few_rows" or self.few_rows)
        _check(self, sizes, least=1, power=True)
        if 0 < self.few_rows < 16:
            raise InputError(f"TpuTiles: few_rows must be 0 or at least 16, got {self.few_rows}")
        rows = ("rows", "expert_rows", "attention_rows", "gradient_rows", "row_tile")
        _check(self, rows, least=16)
        _check(self, ("columns", "block_k", "gradient_keys", "lanes"), least=128)

    def tile(self, rows: int) -> int:
        """Rows of a tile of products of so many rows."""
        return self.few_rows if rows <= self.few_rows else self.rows


# Float32 products run on the plain cores: shorter steps, and tiles whose sums fit in registers.
GPU_F32 = GpuTiles(
    block_k=32, attention_rows=32, gradient_rows=16, gradient_keys=16, gradient_stages=1
)
GPU_BF16 = GpuTiles(
    matmul=(MatmulTile(rows=128, columns=128, warps=8, stages=3),),
    experts=MatmulTile(rows=64, columns=128, warps=4, stages=3),
)
# For Hopper: narrow tiles keep all cores busy at the few rows of a decode step, and wide ones load
# fewer bytes from the cache where there are many.
GPU_BF16_SEVERAL_TILES = replace(
    GPU_BF16,
    matmul=(
        MatmulTile(rows=64, columns=32, warps=4, stages=5),
        MatmulTile(rows=64, columns=64, warps=4, stages=4),
        MatmulTile(rows=64, columns=128, warps=4, stages=3),
        MatmulTile(rows=128, columns=128, warps=8, stages=3),
        MatmulTile(rows=128, columns=256, warps=8, stages=2),
    ),
)
# Steps of half the length leave room in shared memory for the tile of the result.
MOSAIC_GPU_BF16 = replace(
    GPU_BF16, block_k=64, matmul=(MatmulTile(rows=128, columns=128, warps=8, stages=4),)
)
MOSAIC_GPU_BF16_SEVERAL_TILES = replace(
    MOSAIC_GPU_BF16,
    matmul=(
        MatmulTile(rows=64, columns=64, warps=4, stages=6),
        MatmulTile(rows=64, columns=128, warps=4, stages=5),
        *MOSAIC_GPU_BF16.matmul,
    ),
)
TPU_FEW_ROWS = 64  # `few_rows`, where there are several tiles
TPU_BF16 = TpuTiles(attention_rows=128, row_tile=128)
TPU_F32 = TpuTiles(block_k=512, attention_blocks=2)  # elements have twice the bytes
