"""Entries that change the sampler's arithmetic: dtypes, kernels, tiles, orders of sums, experts."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from tim_jax.common.errors import InputError
from tim_jax.kernels import variants
from tim_jax.mismatch.base import Entry
from tim_jax.model.execution import Execution
from tim_jax.numerics import CACHE_DTYPES, Numerics, Rows, Scale

FLOATS = ("float32", "bfloat16", "float16")
_STAYS = ("_norm", "_bias", "_scale")  # names of what is float32 in any compute dtype


@dataclass(frozen=True)
class Compute(Entry):
    """The sampler's weights and activations have another dtype; sums and logits stay float32."""

    dtype: str

    name, kind = "compute", "precision"
    imitates = (
        "a bfloat16 or float16 engine beside a float32 trainer (arXiv 2510.26788 has float16 on"
        " both sides as the remedy)"
    )

    def __post_init__(self):
        self.need_choice("dtype", FLOATS)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics.in_dtype(self.dtype), decode_head_columns=None)

    def weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        return recast(weights, jnp.dtype(self.dtype))


def recast(weights: dict[str, Any], dtype: jnp.dtype) -> dict[str, Any]:
    """Compute weights in another compute dtype; norms, biases and scales are float32 in any."""

    def cast(path, leaf: jax.Array) -> jax.Array:
        return leaf if path[-1].key.endswith(_STAYS) else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, weights)


@dataclass(frozen=True)
class Part(Entry):
    """One field of the numerics' `precision` is another float dtype."""

    dtype: str

    kind = "precision"
    field: ClassVar[str] = ""

    def __post_init__(self):
        self.need_choice("dtype", FLOATS)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, precision=replace(numerics.precision, **{self.field: self.dtype}))


class Head(Part):
    """Operands of the dot with the LM head, the last norm's result included."""

    name = "lm_head"
    field = "head"
    imitates = "a float32 head in one engine alone (ScaleRL, MiniMax; TRL issue 4303)"


class Logits(Part):
    """Logits are rounded to this dtype before the softmax."""

    name = "logits"
    field = "logits"
    imitates = "bfloat16 logits, whose step is 0.03 at 8 (MaxText pull request 5231)"


class Softmax(Part):
    """Every step of the vocabulary's softmax is rounded; the sum itself is taken in float32."""

    name = "softmax"
    field = "softmax"
    imitates = "a log-softmax in the compute dtype, the framework's default on logits"


class AttentionSoftmax(Part):
    """Every step of the attention's softmax is rounded; the sum itself is taken in float32."""

    name = "attention_softmax"
    field = "attention_softmax"
    imitates = "attention weights normalised in the compute dtype"


@dataclass(frozen=True)
class KVCache(Entry):
    """Keys and values are rounded to this dtype where they enter the cache.

    Without a scale, numbers that are too large saturate. scale "token": one scale per token and
    head, from its largest element; int8 has it by default and needs it.
    """

    dtype: str
    scale: Scale | None = None

    name, kind = "kv_cache", "precision"
    imitates = (
        'vLLM\'s kv_cache_dtype="fp8" with its default scale of 1; int8 with a scale per token and'
        " head (LMDeploy)"
    )

    def __post_init__(self):
        self.need_choice("dtype", CACHE_DTYPES)
        if self.scale is not None:
            self.need_choice("scale", ("none", "token"))
        if self.dtype == "int8" and self.scale == "none":
            raise self.refuse('int8 needs scale = "token"; without one it holds whole numbers only')
        if self.dtype in FLOATS and self.scale == "token":
            raise self.refuse(f"{self.dtype} is stored as it is; leave scale out")

    def numerics(self, numerics: Numerics) -> Numerics:
        scale = self.scale or ("token" if self.dtype == "int8" else "none")
        precision = replace(numerics.precision, cache=self.dtype, cache_scale=scale)
        return replace(numerics, precision=precision)

    def check(self, execution: Execution) -> None:
        wide = execution.numerics.compute_dtype
        if self.dtype == "float32" and wide != "float32":
            raise self.refuse(
                f"float32 is wider than the sampler's {wide}, whose keys and values it would hold"
                " as they are; narrower: " + ", ".join(CACHE_DTYPES[1:])
            )


_TPU_LANES = 128


@dataclass(frozen=True)
class NativeKernels(Entry):
    """Plain XLA instead of exact tiles: the compiler chooses kernels, fusions and orders."""

    name, kind = "native_kernels", "kernels"
    imitates = "one model code jitted twice, as generator and trainer (the usual JAX stack)"
    no_control = "plain XLA in the learner too gives other bits than in the sampler"

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, family="native", decode_head_columns=None)


@dataclass(frozen=True)
class TileSizes(Entry):
    """Other tiles. What is left out stays as it is.

    `rows` of dots with weights and `attention_rows` are fixed sizes; `kv_block` is the keys per
    block, over which the attention's mix is summed.
    """

    rows: int | None = None
    attention_rows: int | None = None
    kv_block: int | None = None

    name, kind = "tile_sizes", "kernels"
    imitates = "an autotuner that gives generator and trainer other tiles (SGLang-JAX issue 1270)"

    def __post_init__(self):
        for argument in ("rows", "attention_rows", "kv_block"):
            value = getattr(self, argument)
            if value is not None:
                self.need_number(argument, least=1)
        if self.kv_block is not None and self.kv_block & (self.kv_block - 1):
            raise self.refuse(f"kv_block must be a power of two, got {self.kv_block}")
        if (self.rows, self.attention_rows, self.kv_block) == (None, None, None):
            raise self.refuse("needs one of rows, attention_rows, kv_block")

    def check(self, execution: Execution) -> None:
        if execution.numerics.family != "tiles":
            family = execution.numerics.family
            raise self.refuse(f"sets the tiles of the family tiles, and the kernels are {family}")

    def numerics(self, numerics: Numerics) -> Numerics:
        if self.rows is not None:
            rows = Rows(self.rows, self.rows)
            numerics = replace(numerics.uncalibrated, rows=rows)
        if self.attention_rows is not None:
            rows = Rows(self.attention_rows, self.attention_rows)
            numerics = replace(numerics, attention_rows=rows)
        if self.kv_block is not None:
            # One dot over all keys would have no blocks.
            numerics = replace(numerics, kv_block=self.kv_block, whole_kv=False)
        return numerics


@dataclass(frozen=True)
class SumOrder(Entry):
    """Norms and the vocabulary's softmax are summed over another number of lanes."""

    lanes: int

    name, kind = "sum_order", "kernels"
    imitates = (
        "a normalisation kernel with another block size (vLLM's RMSNorm changes its own at 256"
        " tokens, issue 51187)"
    )

    def __post_init__(self):
        self.need_number("lanes", least=1)
        if self.lanes & (self.lanes - 1):
            raise self.refuse(f"lanes must be a power of two, got {self.lanes}")

    def check(self, execution: Execution) -> None:
        if execution.numerics.family != "tiles":
            raise self.refuse(f"{execution.numerics.family} kernels choose the order themselves")

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, order=replace(numerics.order, lanes=self.lanes))


@dataclass(frozen=True)
class SplitK(Entry):
    """Every dot with a weight matrix is cut along the contraction, and the pieces are added."""

    pieces: int

    name, kind = "split_k", "kernels"
    imitates = (
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

    `exchange` is the dtype that they are sent and added up in: the compute dtype, or float32. Each
    device computes the parts of all ranks in turn, so that any number of ranks works anywhere. 1
    rank changes nothing.
    """

    ranks: int
    exchange: Literal["compute", "float32"] = "compute"

    name, kind = "tensor_parallel", "kernels"
    imitates = (
        "a sampler under tensor parallelism with all-reduce (vLLM, SGLang, Megatron) beside a"
        " learner without, or with another number of ranks"
    )

    def __post_init__(self):
        self.need_number("ranks", least=1)
        self.need_choice("exchange", ("compute", "float32"))

    @property
    def inert(self) -> bool:
        return self.ranks == 1

    def check(self, execution: Execution) -> None:
        where = execution.placement
        if where.decode == "sharded" and where.fsdp > 1:
            raise self.refuse('needs whole rows of the weights: placement.decode = "whole"')
        if execution.config.num_experts:
            raise self.refuse("needs a dense model; products of experts are not cut into ranks")
        if execution.config.latent:
            raise self.refuse(
                "needs a model without latent attention, whose heads share their keys"
            )
        sizes = {
            "num_heads": execution.config.num_heads,
            "intermediate_size": execution.config.intermediate_size,
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

    name, kind = "pallas_attention", "kernels"
    imitates = "an engine's own attention kernel, with an online softmax, beside the trainer's"
    no_control = "the kernel is a sampler's: it has no gradient"

    def check(self, execution: Execution) -> None:
        backend = jax.default_backend()
        if not self.interpret and backend not in ("gpu", "tpu"):
            raise self.refuse(
                f"needs a GPU or TPU, this backend is {backend}; interpret = true runs it anyway"
            )
        size, block = execution.config.attention.key_dim, execution.numerics.kv_block
        if backend == "gpu" and size & (size - 1):
            raise self.refuse(f"takes heads of a power of two on a GPU, the model's have {size}")
        if backend == "tpu" and block % _TPU_LANES:
            raise self.refuse(f"needs a kv_block of at least {_TPU_LANES} on a TPU, got {block}")
        _check_attention(self, execution.numerics)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, attention="flash_interpreted" if self.interpret else "flash")


@dataclass(frozen=True)
class TritonAttention(Entry):
    """Prefill and decoding attention by a Triton flash-attention kernel, on an NVIDIA GPU."""

    name, kind = "triton_attention", "kernels"
    imitates = "the Triton attention that vLLM and SGLang fall back to"
    no_control = "the kernel is a sampler's: it has no gradient"

    def check(self, execution: Execution) -> None:
        if execution.config.sliding_window:
            raise self.refuse(
                "takes no sliding window, which the model has; 'pallas_attention' takes it"
            )
        if execution.config.latent:
            raise self.refuse("takes no latent attention, which the model has")
        backend = jax.default_backend()
        if backend != "gpu":
            raise self.refuse(
                f"needs an NVIDIA GPU, this backend is {backend}; 'pallas_attention' with"
                " interpret = true runs anywhere"
            )
        try:
            variants.check()
        except InputError as error:
            raise self.refuse(str(error)) from error
        _check_attention(self, execution.numerics)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, attention="triton")


def _check_attention(entry: Entry, numerics: Numerics) -> None:
    """Refuses numerics that already choose how attention is computed."""
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

    name, kind = "split_kv", "kernels"
    imitates = (
        "FlashDecoding as vLLM and SGLang use it unless told to be batch-invariant; 132 is the"
        " number of multiprocessors of an H100"
    )
    no_control = "only decoding is cut: a learner's forward has all keys at once"

    def __post_init__(self):
        self.need_number("programs", least=0)

    def check(self, execution: Execution) -> None:
        if execution.numerics.attention != "family":
            raise self.refuse(_contradicts_kernel(execution.numerics))

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, order=replace(numerics.order, split_kv=self.programs))


class Router(Part):
    """Operands of the dot with the routers of a mixture of experts, which then may choose others.

    The weights of the chosen are by the same logits.
    """

    name = "router"
    field = "router"
    of_mixtures = True
    imitates = "a router in float32 in one engine, and in the compute dtype in the other"


class ExpertChoice(Part):
    """Experts are chosen by the logits of a router of another dtype, and weighted as before.

    So a choice may be another, and nothing else is: a learner that replays the choices is exact.
    """

    name = "expert_choice"
    field = "choice"
    of_mixtures = True
    imitates = "no system: of a router in another dtype, the part that is the choice"


@dataclass(frozen=True)
class ExpertOrder(Entry):
    """The outputs of a token's experts are added in another order, or in another dtype.

    order "choice": from the most probable to the least; "index": by the experts' numbers.
    accumulate "compute": every weighted output and every sum is rounded to the compute dtype.
    """

    order: Literal["choice", "index"]
    accumulate: Literal["float32", "compute"] = "float32"

    name, kind = "expert_order", "kernels"
    imitates = (
        "index, compute: the eager loop over experts of `transformers`; choice, compute: vLLM's"
        " kernel moe_sum (SGLang's adds up in float32, as here)"
    )
    of_mixtures = True

    def __post_init__(self):
        self.need_choice("order", ("choice", "index"))
        self.need_choice("accumulate", ("float32", "compute"))

    def numerics(self, numerics: Numerics) -> Numerics:
        order = replace(numerics.order, experts=self.order, experts_sum=self.accumulate)
        return replace(numerics, order=order)


@dataclass(frozen=True)
class ExpertCapacity(Entry):
    """An expert takes at most ceil(factor x N k / E) of the N k choices of a forward's N rows.

    The others add nothing to their tokens, and the weights of a token's other experts stay. First
    choices come before second ones, and rows in their order. A prefill's rows are the positions of
    its padded prompts, a decode step's are the slots, idle ones included; so a token's log-prob
    depends on what is decoded beside it.
    """

    factor: float

    name, kind = "expert_capacity", "kernels"
    imitates = (
        "token dropping in one engine alone: GShard (arXiv 2006.16668, algorithm 1), the Switch"
        " Transformer, Megatron's moe_expert_capacity_factor"
    )
    no_control = (
        "what an expert leaves out depends on the rows of a forward, and a learner's has others"
    )
    of_mixtures = True

    def __post_init__(self):
        self.need_number("factor", least=0.0)
        if self.factor == 0:
            raise self.refuse("factor must be above 0; large ones leave nothing out")

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, expert_capacity=self.factor)
