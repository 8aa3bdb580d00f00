"""How numbers are computed: the value `Numerics`, with the sizes of the kernels' tiles.

Values only: no arrays, no devices, nothing read from the outside.

A result's bits follow from the order of its sums. So the key block, and `block_k` of a kernel, are
the same for every row count, and every sum runs over ascending blocks inside one program. The other
tile sizes only say how the work is divided among programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import changes


def _check_sizes(value, names: tuple[str, ...], *, least: int, power: bool = False) -> None:
    for name in names:
        size = getattr(value, name)
        if size < least or (power and size & (size - 1)):
            rule = f"{'a power of two, ' if power else ''}at least {least}"
            raise InputError(f"{type(value).__name__}: {name} must be {rule}, got {size}")


def _check_known(value: Any, names: tuple[str, ...], known: tuple[str | None, ...]) -> None:
    for name in names:
        if (found := getattr(value, name)) not in known:
            texts = ", ".join(filter(None, known))
            raise InputError(f"{type(value).__name__}: {name} = {found!r}; known: {texts}")


def _no_larger(tiles: Any, most: Any, names: tuple[str, ...]) -> dict[str, int]:
    return {name: min(getattr(tiles, name), getattr(most, name)) for name in names}


@dataclass(frozen=True)
class MatmulTile:
    """A program's part of a product: `rows` x `columns`, and how Triton compiles it."""

    rows: int = 64
    columns: int = 64
    warps: int = 4
    stages: int = 4  # loads in flight, of 2-byte elements; half as many in float32

    def __post_init__(self):
        _check_sizes(self, ("rows", "columns", "warps"), least=1, power=True)
        _check_sizes(self, ("stages",), least=1)


ONE_TILE = MatmulTile()


@dataclass(frozen=True)
class GpuTiles:
    """Tiles of `pallas_gpu` and `pallas_mosaic_gpu`.

    One matmul tile for every product is exact on any device. Several, by the product's size, are
    exact only where the tensor cores add up a contraction in the same order whatever the tile.
    An H200 did in bfloat16 with `pallas_gpu` (docs/results/gpu.md): six tiles of 32 to 256 columns
    with a `block_k` of 128 gave the same bits. In compiled code an element is one chain of
    multiply-adds of 16 terms each, in the order of the contraction, whatever the tile and
    `block_k`; no device has compared 256 x 128 or a `block_k` of 64 yet (docs/kernels.md).
    `scripts/gpu_check.sh --only kernels` does.
    """

    block_k: int = 128  # elements of a contraction per step
    matmul: tuple[MatmulTile, ...] = (ONE_TILE,)  # of products, the narrowest first; see `tile`
    # That a product should have at least, if there are several tiles: a core of a Hopper GPU draws
    # no more than 80 GB a second from its cache, so that most cores must take part.
    programs: int = 96
    experts: MatmulTile = ONE_TILE  # of products of experts, which have few rows each
    attention_rows: int = 64  # query rows (token times head of its group) per program
    attention_warps: int = 4
    attention_stages: int = 2
    # A program of attention's gradient: rows of its dq or keys of its dk and dv, how many of the
    # others it takes at a time, and how Triton compiles it.
    gradient_own: int = 128
    gradient_step: int = 64
    gradient_warps: int = 8
    gradient_stages: int = 3
    row_tile: int = 16  # rows per program of the elementwise kernels
    lanes: int = 4096  # elements of a vocabulary row per step

    __repr__ = changes

    def __post_init__(self):
        products = ("block_k", "attention_rows", "gradient_own", "gradient_step")
        _check_sizes(self, products, least=16, power=True)
        powers = ("attention_warps", "gradient_warps", "row_tile", "lanes")
        _check_sizes(self, powers, least=1, power=True)
        _check_sizes(self, ("attention_stages", "gradient_stages", "programs"), least=1)
        sizes = [tile.rows * tile.columns for tile in self.matmul]
        if not sizes or sizes != sorted(sizes) or len(set(self.matmul)) < len(sizes):
            raise InputError(
                "GpuTiles: matmul needs one tile or several of rising size, got tiles of"
                f" {', '.join(map(str, sizes)) or 'none'} elements"
            )
        for tile in (self.experts, *self.matmul):
            _check_sizes(tile, ("rows", "columns"), least=16)

    def tile(
        self, rows: int, columns: int, dtype: Any = jnp.bfloat16, *, parts: int = 1
    ) -> MatmulTile:
        """The tile for products of this size, whose columns are those of several `parts`.

        No kernel is chosen by the shape of its arguments: this is the exception, and only because
        tiles do not decide bits, which is known of bfloat16 alone. Other operands have one.

        It is the last in the order of `matmul` of which there are `programs`, or else the
        narrowest. One that does not divide the columns is passed over, and one that has more rows
        than the narrowest where half of its rows would do. A part has as many columns as the
        narrowest, if there are such tiles: a device has compared no fewer.
        """
        tiles = list(self.matmul)
        if len(tiles) > 1 and dtype != jnp.bfloat16:
            return ONE_TILE
        least = parts * tiles[0].columns
        narrowest, *others = [tile for tile in tiles if tile.columns >= least] or tiles
        for tile in reversed(others):
            count = -(-rows // tile.rows) * (columns // tile.columns)
            fits = tile.rows == narrowest.rows or tile.rows < 2 * rows
            if count >= self.programs and fits and columns % tile.columns == 0:
                return tile
        return narrowest

    def for_float32(self) -> "GpuTiles":
        """For operands with twice the bytes that these are made for: none larger than a float32
        run's."""
        names = "block_k", "attention_rows", "attention_stages"
        names += "gradient_own", "gradient_step", "gradient_stages"
        sizes = _no_larger(self, GPU_F32, names)
        return replace(self, matmul=GPU_F32.matmul, experts=GPU_F32.experts, **sizes)


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

    __repr__ = changes

    def __post_init__(self):
        sizes = tuple(f.name for f in fields(self) if f.name != "few_rows" or self.few_rows)
        _check_sizes(self, sizes, least=1, power=True)
        if 0 < self.few_rows < 16:
            raise InputError(f"TpuTiles: few_rows must be 0 or at least 16, got {self.few_rows}")
        rows = ("rows", "expert_rows", "attention_rows", "gradient_rows", "row_tile")
        _check_sizes(self, rows, least=16)
        _check_sizes(self, ("columns", "block_k", "gradient_keys", "lanes"), least=128)

    def tile(self, rows: int) -> int:
        """Rows of a tile of products of this many rows."""
        return self.few_rows if rows <= self.few_rows else self.rows

    def for_float32(self) -> "TpuTiles":
        """See `GpuTiles.for_float32`."""
        names = "block_k", "attention_rows", "attention_blocks", "row_tile"
        return replace(self, **_no_larger(self, TPU_F32, names))


# Float32 products run on the plain cores: shorter steps, and tiles whose sums fit in registers.
GPU_F32 = GpuTiles(
    block_k=32, attention_rows=32, gradient_own=16, gradient_step=16, gradient_stages=1
)
# For Hopper: narrow tiles keep all cores busy at the few rows of a decode step, and wide ones load
# fewer bytes from the cache where there are many.
GPU_BF16 = GpuTiles(
    block_k=64,
    matmul=(
        MatmulTile(rows=64, columns=32, warps=4, stages=10),
        MatmulTile(rows=64, columns=64, warps=4, stages=8),
        MatmulTile(rows=64, columns=128, warps=4, stages=6),
        MatmulTile(rows=128, columns=128, warps=8, stages=6),
        MatmulTile(rows=256, columns=128, warps=8, stages=4),
        MatmulTile(rows=128, columns=256, warps=8, stages=4),
    ),
    experts=MatmulTile(rows=64, columns=128, warps=4, stages=6),
    attention_stages=3,  # as many programs of heads up to 128 fit on a core as with 2
)
# No device has compared tiles in float16.
GPU_F16 = replace(GPU_BF16, matmul=(MatmulTile(rows=128, columns=128, warps=8, stages=6),))
MOSAIC_GPU_BF16 = replace(
    GPU_BF16, matmul=(MatmulTile(rows=128, columns=128, warps=8, stages=4),), programs=64
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


Family = Literal["tiles", "native", "pallas_gpu", "pallas_mosaic_gpu", "pallas_tpu"]
FAMILIES: tuple[Family, ...] = get_args(Family)
FamilyChoice = Literal["auto", Family]  # "auto": the one that is exact on the devices at hand
GPU_FAMILIES = ("pallas_gpu", "pallas_mosaic_gpu")  # of kernels for GPUs
Scale = Literal["none", "token"]
Attention = Literal["family", "flash", "flash_interpreted", "triton"]
CacheWrite = Literal["rows", "scatter", "kernel"]
RowSums = Literal["scatter", "sorted"]
_HEAD_BLOCK = 128  # columns
_COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
_LISTS = ("xla_disable_hlo_passes",)  # options of XLA that are comma-separated lists
COMPUTE_DTYPES = tuple(_COMPUTE_DTYPES)
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "int8")
CACHE_DTYPES = (*_COMPUTE_DTYPES, *EIGHT_BITS)


@dataclass(frozen=True)
class Rows:
    """How many rows a dot may have: fewer than `low` are padded, more than `high` are split.

    With `low == high` every dot has the same row count, so exactness assumes nothing about the
    backend. A wider range claims that on this backend a row's bits do not depend on the row count
    inside it (`model/fitting.py` measures such ranges). `high=None`: any number.
    """

    low: int
    high: int | None

    def __post_init__(self):
        if self.low < 1 or (self.high is not None and self.high < self.low):
            raise InputError(f"Rows: need 1 <= low <= high, got low={self.low}, high={self.high}")

    def at_most(self, count: int) -> "Rows":
        """The part of the range up to `count`; its lowest count if that is more."""
        high = count if self.high is None else min(self.high, count)
        return Rows(self.low, max(self.low, high))

    def split(self, count: int) -> tuple[int, int]:
        """(tiles, rows per tile) that cover `count` rows.

        The fewest tiles, or up to twice as many if these need no padding: to pad many rows and to
        cut them back costs more than smaller tiles do.
        """
        fewest = 1 if self.high is None else -(-count // self.high)
        for tiles in range(fewest, 2 * fewest):
            if count % tiles == 0 and count // tiles >= self.low:
                return tiles, count // tiles
        return fewest, max(self.low, -(-count // fewest))


@dataclass(frozen=True)
class Precision:
    """Further dtypes than the compute dtype. The defaults round nothing and add no operation."""

    head: str | None = None  # operands of the dot with the head; None: the compute dtype
    router: str | None = None  # operands of the dot with a router of experts; None: compute dtype
    choice: str | None = None  # of that by which experts are chosen; None: the same dot
    logits: str = "float32"  # what logits are rounded to
    softmax: str = "float32"  # what every step of the vocabulary's softmax is rounded to
    attention_softmax: str = "float32"  # what every step of the attention's softmax is rounded to
    cache: str | None = None  # of cached keys and values; None: the compute dtype
    cache_scale: Scale = "none"  # token: a scale per token and head, from its largest element
    # Of what the layers' matrices, and the head, are multiplied by, with a scale per token; None:
    # the compute dtype.
    activations: str | None = None
    head_activations: str | None = None
    lora: str = "float32"  # what base, product and sum are rounded to when adapters are merged

    __repr__ = changes

    def __post_init__(self):
        _check_known(self, ("head", "router", "choice"), (*COMPUTE_DTYPES, None))
        _check_known(self, ("logits", "softmax", "attention_softmax", "lora"), COMPUTE_DTYPES)
        _check_known(self, ("cache",), (*CACHE_DTYPES, None))
        _check_known(self, ("activations", "head_activations"), (*EIGHT_BITS, None))
        _check_known(self, ("cache_scale",), get_args(Scale))
        if self.cache == "int8" and self.cache_scale == "none":
            raise InputError(
                'Precision: an int8 cache needs cache_scale "token"; without a scale it would hold'
                " whole numbers only"
            )


@dataclass(frozen=True)
class Order:
    """Orders of sums that differ from those of the kernels."""

    lanes: int = 128  # partial sums of norms and of the vocabulary's softmax, a power of two
    split_k: int = 1  # pieces that a contraction with a weight matrix is cut into
    split_kv: int = 0  # decoding attention is cut to fill this many programs; 0: it is not cut
    # Ranks of tensor parallelism: the last products of attention and MLP are sums of this many
    # partial products, added up in the dtype `exchange`, as by an all-reduce.
    ranks: int = 1
    exchange: Literal["compute", "float32"] = "compute"
    # The outputs of a token's experts are added from the most probable to the least, or by the
    # experts' numbers; every term and sum is rounded to the dtype `experts_sum`.
    experts: Literal["choice", "index"] = "choice"
    experts_sum: Literal["compute", "float32"] = "float32"

    __repr__ = changes

    def __post_init__(self):
        _check_sizes(self, ("ranks", "split_k"), least=1)
        for name in ("exchange", "experts_sum"):
            if getattr(self, name) not in ("compute", "float32"):
                raise InputError(
                    f"Order: {name} must be 'compute' or 'float32', got {getattr(self, name)!r}"
                )
        if self.experts not in ("choice", "index"):
            raise InputError(f"Order: experts must be 'choice' or 'index', got {self.experts!r}")
        if self.lanes < 1 or self.lanes & (self.lanes - 1):
            raise InputError(f"Order: lanes must be a power of two, got {self.lanes}")

        if self.split_kv < 0:
            raise InputError(f"Order: split_kv must not be negative, got {self.split_kv}")

    @property
    def of_kernels(self) -> "Order":
        """Without what no kernel computes: the sums over a token's experts."""
        return replace(self, experts="choice", experts_sum="float32")


@dataclass(frozen=True)
class Numerics:
    """Two executions with equal `Numerics` give every token the same log-prob, to the bit.

    With every family but "native" that is by construction: "tiles" fences plain XLA operations of
    fixed shapes, and those whose names begin with "pallas" are kernels of our own. "native" is
    plain XLA, where kernels, fusions and reduction orders follow the program and its shapes.
    """

    family: Family = "tiles"
    compute_dtype: str = "float32"  # dtype of weights and activations; sums and logits are float32
    rows: Rows = Rows(16, 16)  # rows of every dot with a weight matrix
    rows_by_contraction: tuple[tuple[int, Rows], ...] = ()  # exceptions, by contraction size
    attention_rows: Rows = Rows(16, 16)  # rows (query times head of its group) of attention dots
    kv_block: int = 32  # keys per block, anchored at the sequence's first token
    whole_kv: bool = False  # one dot over all key blocks; only where calibration found equal bits
    head_rows: int = 256  # rows whose logits exist at one time
    # Columns of the head whose gradient is computed at a time, beside the sum to which it is added;
    # None: all, where the compiler has a product that adds to an array in place, as GPUs have. With
    # column tiles: those of one tile.
    head_gradient_columns: int | None = 4096
    # Width of the parts of the head that a decode step multiplies one after the other; None: it is
    # whole. Calibration sets it where XLA:CPU is slow with a wide matrix and few rows, and the bits
    # are the same.
    decode_head_columns: int | None = None
    # Every weight matrix is multiplied in this many equal groups of columns. A dot's bits depend on
    # its column count, so they are the same for every tensor axis that divides this number, no
    # other.
    column_tiles: int = 1
    gpu: GpuTiles = GPU_BF16  # of the families for GPUs
    tpu: TpuTiles = TPU_BF16  # of pallas_tpu
    # How new keys and values are written into the cache; the bits are the same. "rows" is a write
    # per row: in place on a CPU, but slow on an accelerator. "scatter" writes all rows at once.
    # "kernel" is one of the Pallas families, as a scatter would cost a copy of the whole cache on a
    # TPU and several launches on a GPU. For other families it is a scatter.
    cache_write: CacheWrite = "rows"
    # How rows of the embedding's gradient are added. "scatter" leaves the order to XLA, which has
    # none on a GPU; "sorted" has one, and takes a sort and a scan more.
    row_sums: RowSums = "scatter"
    interpret: bool = False  # run the Pallas kernels without their device, slowly: for tests
    compiler_options: tuple[tuple[str, str | bool | int], ...] = ()  # XLA's, for every program
    precision: Precision = Precision()
    order: Order = Order()
    attention: Attention = "family"  # the family's own, or a kernel in its place (samplers only)
    # An expert takes at most this many times its even share of a forward's rows; None: all. For
    # samplers only, as what is left out depends on the batch.
    expert_capacity: float | None = None

    __repr__ = changes

    def __post_init__(self):
        _check_known(self, ("attention",), get_args(Attention))
        _check_known(self, ("cache_write",), get_args(CacheWrite))
        _check_known(self, ("row_sums",), get_args(RowSums))
        if self.family not in FAMILIES:
            hint = did_you_mean(self.family, FAMILIES)
            raise InputError(f"Numerics: unknown kernel family {self.family!r}{hint}")
        if self.interpret and not self.family.startswith("pallas"):
            raise InputError(
                f"Numerics: interpret is for the Pallas families, got family {self.family!r}"
            )
        narrow = {self.precision.softmax, self.precision.attention_softmax} != {"float32"}
        if self.family.startswith("pallas") and (narrow or self.order.of_kernels != Order()):
            raise InputError(
                "Numerics: other softmax dtypes and orders of sums are for the families tiles and"
                f" native, got family {self.family!r}"
            )
        if self.compute_dtype not in _COMPUTE_DTYPES:
            raise InputError(
                f"Numerics: compute dtype {self.compute_dtype!r}; known: "
                + ", ".join(_COMPUTE_DTYPES)
            )
        # A dot over a single key is a product, which XLA would join with the sum that follows.
        if self.kv_block < 2 or self.kv_block & (self.kv_block - 1):
            raise InputError(
                f"Numerics: kv_block must be a power of two, at least 2, got {self.kv_block}"
            )
        sizes = "head_rows", "head_gradient_columns", "decode_head_columns", "column_tiles"
        for name in sizes:
            count = getattr(self, name)
            if count is not None and count < 1:
                raise InputError(f"Numerics: {name} must be positive, got {count}")
        if self.decode_head_columns is not None and self.column_tiles > 1:
            raise InputError(
                f"Numerics: decode_head_columns = {self.decode_head_columns} cuts a head that"
                f" column_tiles = {self.column_tiles} has cut already; leave out one of them"
            )
        if self.expert_capacity is not None and not 0 < self.expert_capacity < float("inf"):
            raise InputError(
                f"Numerics: expert_capacity must be above 0 and finite, got {self.expert_capacity}"
            )

    def with_options(self, options: Mapping[str, str | bool | int]) -> "Numerics":
        """The same with XLA's `options` beside those it has, and in place of those it has.

        An option that lists compiler passes is joined with the list that is there.
        """
        joined = dict(self.compiler_options)
        for name, value in options.items():
            if name in _LISTS and name in joined:
                both = f"{joined[name]},{value}".split(",")
                value = ",".join(dict.fromkeys(both))
            joined[name] = value
        return replace(self, compiler_options=tuple(sorted(joined.items())))

    @property
    def dtype(self) -> np.dtype:
        """The compute dtype as a NumPy dtype."""
        return jnp.dtype(_COMPUTE_DTYPES[self.compute_dtype])

    def in_dtype(self, dtype: str) -> "Numerics":
        """The same in another compute dtype; of the kernels, with tiles that have room for it."""
        found = replace(self, compute_dtype=dtype)
        if found.dtype.itemsize <= self.dtype.itemsize:
            return found
        if self.family in GPU_FAMILIES:
            return replace(found, gpu=self.gpu.for_float32())
        return replace(found, tpu=self.tpu.for_float32()) if self.family == "pallas_tpu" else found

    @property
    def of_head(self) -> "Numerics":
        """The numerics of the product with the head, whose operands may have another dtype.

        It has at most `head_rows` rows at a time, so calibration need not try more with the widest
        matrix of a model.
        """
        ranges = [(size, rows.at_most(self.head_rows)) for size, rows in self.rows_by_contraction]
        capped = replace(self, rows_by_contraction=tuple(ranges))
        return capped._in_dtype(self.precision.head)

    @property
    def of_router(self) -> "Numerics":
        """The numerics of the product with a router, whose operands may have another dtype."""
        return self._in_dtype(self.precision.router)

    @property
    def of_choice(self) -> "Numerics":
        """The numerics of the product by which experts are chosen; the router's unless given."""
        return self._in_dtype(self.precision.choice or self.precision.router)

    def _in_dtype(self, dtype: str | None) -> "Numerics":
        """For products of operands of `dtype`."""
        if dtype in (None, self.compute_dtype):
            return self
        return self.in_dtype(dtype).uncalibrated

    @property
    def uncalibrated(self) -> "Numerics":
        """The same without what calibration measured, which holds for its rows and dtype alone.

        Products then have the row tiles `rows`, which are exact for any dtype.
        """
        return replace(self, rows_by_contraction=(), decode_head_columns=None)

    def head_columns(self, vocabulary: int) -> int:
        """The head's columns with those of zeros that fill it up to whole column tiles.

        Those of kernels are made of whole blocks, so that blocks need not divide a vocabulary.
        """
        if self.column_tiles == 1:
            return vocabulary
        unit = self.column_tiles * (_HEAD_BLOCK if self.family.startswith("pallas") else 1)
        return -(-vocabulary // unit) * unit

    def rows_for(self, contraction: int) -> Rows:
        """The row range of dots of plain XLA that contract over `contraction` elements."""
        if self.family == "native":
            return Rows(1, None)
        return dict(self.rows_by_contraction).get(contraction, self.rows)

    def expert_rows(self, contraction: int) -> int:
        """The fewest rows of a product of an expert that contracts over `contraction` elements."""
        if self.family in GPU_FAMILIES:
            return self.gpu.experts.rows
        if self.family == "pallas_tpu":
            return self.tpu.expert_rows
        return self.rows_for(contraction).low


def describe(numerics: Numerics) -> str:
    """Short text: family, dtype, and what differs from the default of both."""
    plain = Numerics(family=numerics.family, compute_dtype=numerics.compute_dtype)
    words = [numerics.family, numerics.compute_dtype]
    for field in fields(numerics):
        value = getattr(numerics, field.name)
        if value != getattr(plain, field.name):
            words.append(f"{field.name}={_short(value)}")
    return " ".join(words)


def _short(value: Any) -> str:
    if isinstance(value, tuple):  # of pairs, or of values
        pairs = (part if isinstance(part, tuple) else (part,) for part in value)
        return ",".join(":".join(map(_short, pair)) for pair in pairs)
    if isinstance(value, Rows):
        return f"{value.low}..{'any' if value.high is None else value.high}"
    if is_dataclass(value):
        parts = (_short(getattr(value, field.name)) for field in fields(value))
        return f"({' '.join(parts)})"
    return str(value)


EXACT_F32 = Numerics()
EXACT_BF16 = Numerics(compute_dtype="bfloat16")
EXACT_F16 = Numerics(compute_dtype="float16")
NATIVE_F32 = Numerics(family="native")
NATIVE_BF16 = Numerics(family="native", compute_dtype="bfloat16")
NATIVE_F16 = Numerics(family="native", compute_dtype="float16")
# Gradients have products and sums that are XLA's own. With this option it chooses none of them by
# time and leaves none without an order, so that a run resumes to the same bits.
_REPEATABLE = (("xla_gpu_deterministic_ops", True),)
GPU_EXACT_F32 = Numerics(
    family="pallas_gpu",
    kv_block=16,
    head_rows=1024,
    head_gradient_columns=None,
    gpu=GPU_F32,
    cache_write="kernel",
    row_sums="sorted",
    compiler_options=_REPEATABLE,
)
GPU_EXACT_BF16 = replace(GPU_EXACT_F32, compute_dtype="bfloat16", kv_block=64, gpu=GPU_BF16)
GPU_EXACT_F16 = replace(GPU_EXACT_BF16, compute_dtype="float16", gpu=GPU_F16)
MOSAIC_GPU_EXACT_BF16 = replace(GPU_EXACT_BF16, family="pallas_mosaic_gpu", gpu=MOSAIC_GPU_BF16)
TPU_EXACT_F32 = Numerics(
    family="pallas_tpu", kv_block=256, head_rows=1024, tpu=TPU_F32, cache_write="kernel"
)
TPU_EXACT_BF16 = replace(TPU_EXACT_F32, compute_dtype="bfloat16", tpu=TPU_BF16)

# Plain XLA on GPUs: no split sums, one tile for every Triton product, no timing-based choice, no
# roundings left out. These are candidates; `scripts/gpu_check.sh` measures what they achieve.
GPU_PINNED_OPTIONS: tuple[tuple[str, str | bool | int], ...] = (
    ("xla_allow_excess_precision", False),
    ("xla_gpu_autotune_level", 0),
    ("xla_gpu_cublas_fallback", False),
    ("xla_gpu_experimental_force_split_k", 1),
    (
        "xla_gpu_override_gemm_autotuner",
        "block_m: 64 block_n: 128 block_k: 64 num_stages: 3 num_warps: 4 num_ctas: 1",
    ),
)
