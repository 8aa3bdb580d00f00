"""How numbers are computed. Values only: no arrays, no devices, nothing read from the outside."""

from dataclasses import dataclass
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

from tim_jax.errors import InputError

Family = Literal["tiles", "native"]
Scale = Literal["none", "token"]
Attention = Literal["family", "flash", "flash_interpreted"]
_COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
CACHE_DTYPES = (*_COMPUTE_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")


@dataclass(frozen=True)
class Rows:
    """How many rows a dot may have: fewer than `low` are padded, more than `high` are split.

    `low == high` is a fixed tile, whose bits need no fact about the backend. A wider range says
    that on this backend a row's bits do not depend on the row count inside it (calibration.py
    measures such ranges). `high=None`: any number.
    """

    low: int
    high: int | None

    def __post_init__(self):
        if self.low < 1 or (self.high is not None and self.high < self.low):
            raise InputError(f"Rows: need 1 <= low <= high, got low={self.low}, high={self.high}")

    def split(self, count: int) -> tuple[int, int]:
        """(tiles, rows per tile) that cover `count` rows with the fewest tiles."""
        tiles = 1 if self.high is None else -(-count // self.high)
        return tiles, max(self.low, -(-count // tiles))


@dataclass(frozen=True)
class Precision:
    """Dtypes beside the compute dtype. The defaults round nothing and add no operation."""

    head: str | None = None  # operands of the dot with the head; None: the compute dtype
    logits: str = "float32"  # what logits are rounded to
    softmax: str = "float32"  # of the vocabulary: every step of it is rounded to this
    attention_softmax: str = "float32"  # of the attention: likewise
    cache: str | None = None  # of cached keys and values; None: the compute dtype
    cache_scale: Scale = "none"  # token: a scale per token and head, from its largest element

    def __post_init__(self):
        for name in ("head", "logits", "softmax", "attention_softmax"):
            value = getattr(self, name)
            if value not in (*_COMPUTE_DTYPES, None) or (value is None and name != "head"):
                known = ", ".join(_COMPUTE_DTYPES)
                raise InputError(f"Precision: {name} = {value!r}; known: {known}")
        if self.cache not in (*CACHE_DTYPES, None):
            known = ", ".join(CACHE_DTYPES)
            raise InputError(f"Precision: cache = {self.cache!r}; known: {known}")
        if self.cache_scale not in ("none", "token"):
            raise InputError(f"Precision: cache_scale = {self.cache_scale!r}; known: none, token")
        if self.cache == "int8" and self.cache_scale == "none":
            raise InputError(
                'Precision: an int8 cache needs cache_scale "token"; without a scale it would hold'
                " whole numbers only"
            )


@dataclass(frozen=True)
class Order:
    """The order in which sums are taken, where it is not that of the kernels."""

    lanes: int = 128  # partial sums of norms and of the vocabulary's softmax, a power of two
    split_k: int = 1  # pieces that a contraction with a weight matrix is cut into
    split_kv: int = 0  # programs that decoding attention is cut to fill; 0: it is not cut

    def __post_init__(self):
        if self.lanes < 1 or self.lanes & (self.lanes - 1):
            raise InputError(f"Order: lanes must be a power of two, got {self.lanes}")
        if self.split_k < 1:
            raise InputError(f"Order: split_k must be at least 1, got {self.split_k}")
        if self.split_kv < 0:
            raise InputError(f"Order: split_kv must not be negative, got {self.split_kv}")


@dataclass(frozen=True)
class Numerics:
    """Two executions with equal `Numerics` give every token the same log-prob, to the bit.

    With family "tiles" that is by construction; "native" is plain XLA, where kernels, fusions and
    reduction orders follow the program and its shapes.
    """

    family: Family = "tiles"
    compute_dtype: str = "float32"  # dtype of weights and activations; sums and logits are float32
    rows: Rows = Rows(16, 16)  # rows of every dot with a weight matrix
    rows_by_contraction: tuple[tuple[int, Rows], ...] = ()  # exceptions, by contraction size
    attention_rows: Rows = Rows(16, 16)  # rows (query times head of its group) of attention dots
    kv_block: int = 32  # keys per block, anchored at the sequence's first token
    whole_kv: bool = False  # weigh all value blocks in one dot; needs calibration's leave
    head_rows: int = 256  # rows whose logits exist at one time
    precision: Precision = Precision()
    order: Order = Order()
    attention: Attention = "family"  # the family's own, or a kernel in its place (samplers only)

    def __post_init__(self):
        if self.attention not in get_args(Attention):
            raise InputError(
                f"Numerics: attention = {self.attention!r}; known: {', '.join(get_args(Attention))}"
            )
        if self.family not in ("tiles", "native"):
            raise InputError(
                f"Numerics: unknown kernel family {self.family!r}; known: tiles, native"
            )
        if self.compute_dtype not in _COMPUTE_DTYPES:
            raise InputError(
                f"Numerics: compute dtype {self.compute_dtype!r}; known: "
                + ", ".join(_COMPUTE_DTYPES)
            )
        if self.kv_block < 1 or self.kv_block & (self.kv_block - 1):
            raise InputError(f"Numerics: kv_block must be a power of two, got {self.kv_block}")
        if self.head_rows < 1:
            raise InputError(f"Numerics: head_rows must be positive, got {self.head_rows}")

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(_COMPUTE_DTYPES[self.compute_dtype])

    @property
    def head_dtype(self) -> np.dtype:
        return jnp.dtype(self.precision.head or self.compute_dtype)

    def rows_for(self, contraction: int) -> Rows:
        """The row range of dots that contract over `contraction` elements."""
        return dict(self.rows_by_contraction).get(contraction, self.rows)


EXACT_F32 = Numerics()
EXACT_BF16 = Numerics(compute_dtype="bfloat16")
NATIVE_F32 = Numerics(family="native")
NATIVE_BF16 = Numerics(family="native", compute_dtype="bfloat16")
