"""Entries that give the sampler other kernels, tiles or orders of sums; all dtypes stay."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import jax

from tim_jax.errors import InputError
from tim_jax.kernels import triton_flash
from tim_jax.mismatch.base import Entry, Setting
from tim_jax.numerics import Numerics, Rows

_TPU_LANES = 128


@dataclass(frozen=True)
class NativeKernels(Entry):
    """Plain XLA instead of exact tiles: kernels, fusions and orders as the compiler likes."""

    name: ClassVar[str] = "native_kernels"
    imitates: ClassVar[str] = (
        "one model code jitted twice, as generator and trainer (the usual JAX stack)"
    )

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, family="native")


@dataclass(frozen=True)
class TileSizes(Entry):
    """Other tiles. What is left out stays as it is.

    `rows` of dots with weights and `attention_rows` are fixed sizes; `kv_block` is the keys per
    block, over which the attention's mix is summed.
    """

    rows: int | None = None
    attention_rows: int | None = None
    kv_block: int | None = None

    name: ClassVar[str] = "tile_sizes"
    imitates: ClassVar[str] = (
        "an autotuner that gives generator and trainer other tiles (SGLang-JAX issue 1270)"
    )

    def __post_init__(self):
        for argument in ("rows", "attention_rows", "kv_block"):
            value = getattr(self, argument)
            if value is not None:
                self.need_number(argument, least=1)
        if self.kv_block is not None and self.kv_block & (self.kv_block - 1):
            raise self.refuse(f"kv_block must be a power of two, got {self.kv_block}")
        if (self.rows, self.attention_rows, self.kv_block) == (None, None, None):
            raise self.refuse("needs one of rows, attention_rows, kv_block")

    def check(self, setting: Setting) -> None:
        if setting.numerics.family != "tiles":
            family = setting.numerics.family
            raise self.refuse(f"sets the tiles of the family tiles, and the kernels are {family}")

    def numerics(self, numerics: Numerics) -> Numerics:
        if self.rows is not None:
            rows = Rows(self.rows, self.rows)
            numerics = replace(numerics, rows=rows, rows_by_contraction=())
        if self.attention_rows is not None:
            rows = Rows(self.attention_rows, self.attention_rows)
            numerics = replace(numerics, attention_rows=rows)
        if self.kv_block is not None:
            # One dot over all keys would not know of blocks.
            numerics = replace(numerics, kv_block=self.kv_block, whole_kv=False)
        return numerics


@dataclass(frozen=True)
class SumOrder(Entry):
    """Norms and the vocabulary's softmax are summed over another number of lanes."""

    lanes: int

    name: ClassVar[str] = "sum_order"
    imitates: ClassVar[str] = (
        "a normalisation kernel with another block size (vLLM's RMSNorm changes its own at 256"
        " tokens, issue 51187)"
    )

    def __post_init__(self):
        self.need_number("lanes", least=1)
        if self.lanes & (self.lanes - 1):
            raise self.refuse(f"lanes must be a power of two, got {self.lanes}")

    def check(self, setting: Setting) -> None:
        if setting.numerics.family != "tiles":
            raise self.refuse(f"{setting.numerics.family} kernels choose the order themselves")

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, order=replace(numerics.order, lanes=self.lanes))


@dataclass(frozen=True)
class SplitK(Entry):
    """Every dot with a weight matrix is cut along the contraction, and the pieces are added."""

    pieces: int

    name: ClassVar[str] = "split_k"
    imitates: ClassVar[str] = (
        "split-K matrix products, which GPU libraries choose for the few rows of a decode step;"
        " also the sum of partial products in row-parallel tensor parallelism"
    )

    def __post_init__(self):
        self.need_number("pieces", least=1)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, order=replace(numerics.order, split_k=self.pieces))


@dataclass(frozen=True)
class TensorParallel(Entry):
    """The attention's and the MLP's last products are sums of one partial product a rank.

    `exchange` is the dtype that they are sent and added up in: the compute dtype, or float32. The
    ranks are played by each device in turn, so that any number of them works anywhere. 1 rank
    changes nothing.
    """

    ranks: int
    exchange: Literal["compute", "float32"] = "compute"

    name: ClassVar[str] = "tensor_parallel"
    imitates: ClassVar[str] = (
        "a sampler under tensor parallelism with all-reduce (vLLM, SGLang, Megatron) beside a"
        " learner without, or with another number of ranks"
    )

    def __post_init__(self):
        self.need_number("ranks", least=1)
        self.need_choice("exchange", ("compute", "float32"))

    @property
    def inert(self) -> bool:
        return self.ranks == 1

    def check(self, setting: Setting) -> None:
        where = setting.placement
        if where.decode == "sharded" and where.fsdp > 1:
            raise self.refuse('needs whole rows of the weights: placement.decode = "whole"')
        sizes = {
            "num_heads": setting.config.num_heads,
            "intermediate_size": setting.config.intermediate_size,
        }
        for name, size in sizes.items():
            if size % self.ranks:
                raise self.refuse(f"ranks = {self.ranks} must divide the model's {name} = {size}")

    def numerics(self, numerics: Numerics) -> Numerics:
        order = replace(numerics.order, ranks=self.ranks, exchange=self.exchange)
        return replace(numerics, order=order)


@dataclass(frozen=True)
class PallasAttention(Entry):
    """Prefill and decoding attention by a Pallas flash-attention kernel, on a GPU or TPU.

    `interpret` runs the kernel's operations one by one on any backend, slowly.
    """

    interpret: bool = False

    name: ClassVar[str] = "pallas_attention"
    imitates: ClassVar[str] = (
        "an engine's own attention kernel, with an online softmax, beside the trainer's"
    )

    def check(self, setting: Setting) -> None:
        backend = jax.default_backend()
        if not self.interpret and backend not in ("gpu", "tpu"):
            raise self.refuse(
                f"needs a GPU or TPU, this backend is {backend}; interpret = true runs it anyway"
            )
        size, block = setting.config.head_dim, setting.numerics.kv_block
        if backend == "gpu" and size & (size - 1):
            raise self.refuse(f"takes heads of a power of two on a GPU, the model's have {size}")
        if backend == "tpu" and block % _TPU_LANES:
            raise self.refuse(f"needs a kv_block of at least {_TPU_LANES} on a TPU, got {block}")
        _check_alone(self, setting.numerics)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, attention="flash_interpreted" if self.interpret else "flash")


@dataclass(frozen=True)
class TritonAttention(Entry):
    """Prefill and decoding attention by a Triton flash-attention kernel, on an NVIDIA GPU."""

    name: ClassVar[str] = "triton_attention"
    imitates: ClassVar[str] = "the Triton attention that vLLM and SGLang fall back to"

    def check(self, setting: Setting) -> None:
        backend = jax.default_backend()
        if backend != "gpu":
            raise self.refuse(
                f"needs an NVIDIA GPU, this backend is {backend}; 'pallas_attention' with"
                " interpret = true runs anywhere"
            )
        try:
            triton_flash.check()
        except InputError as error:
            raise self.refuse(str(error)) from error
        _check_alone(self, setting.numerics)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, attention="triton")


def _check_alone(entry: Entry, numerics: Numerics) -> None:
    """Refuses what also decides how attention is computed."""
    if numerics.order.split_kv:
        raise entry.refuse("contradicts 'split_kv': both decide how decoding attends")
    if numerics.precision.attention_softmax != "float32":
        raise entry.refuse("contradicts 'attention_softmax': its softmax is float32")
    if numerics.attention not in ("family", entry.numerics(numerics).attention):
        raise entry.refuse(_contradicts_kernel(numerics))


def _contradicts_kernel(numerics: Numerics) -> str:
    name = TritonAttention.name if numerics.attention == "triton" else PallasAttention.name
    return f"contradicts {name!r}: both decide how decoding attends"


@dataclass(frozen=True)
class SplitKV(Entry):
    """Decoding attention is cut along the keys into as many pieces as fill `programs` programs.

    So a smaller batch is cut more, and a sequence's bits depend on its batch. 0 does not cut.
    """

    programs: int = 132

    name: ClassVar[str] = "split_kv"
    imitates: ClassVar[str] = (
        "FlashDecoding as vLLM and SGLang use it unless told to be batch-invariant; 132 is the"
        " number of multiprocessors of an H100"
    )

    def __post_init__(self):
        self.need_number("programs", least=0)

    def check(self, setting: Setting) -> None:
        if setting.numerics.attention != "family":
            raise self.refuse(_contradicts_kernel(setting.numerics))

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, order=replace(numerics.order, split_kv=self.programs))
