"""Entries that change the sampler's arithmetic: dtypes, kernels, tiles, orders of sums, experts."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from tim_jax.kernels import variants
from tim_jax.mismatch.base import POWER_OF_TWO, Count, Dtype, Entry, OneOf, Size, Whole
from tim_jax.model.execution import Execution
from tim_jax.numerics import CACHE_DTYPES, COMPUTE_DTYPES, Numerics, Rows, Scale

_STAYS = ("_norm", "_bias", "_scale")  # names of what is float32 in any compute dtype
_TPU_LANES = 128


def _with_fixed_attention_rows(numerics: Numerics) -> Numerics:
    """The same with attention in blocks, whose dots have a fixed number of rows."""
    rows = numerics.attention_rows
    fixed = rows if rows.low == rows.high else Numerics.attention_rows
    return replace(numerics, attention_rows=fixed, whole_kv=False)


@dataclass(frozen=True)
class Compute(Entry):
    """The sampler's weights and activations have another dtype; sums and logits stay float32."""

    dtype: Dtype

    name, kind = "compute", "precision"

    def numerics(self, numerics: Numerics) -> Numerics:
        if self.dtype == numerics.compute_dtype:
            return numerics
        # What was measured holds for the learner's dtype: in another, bits would follow the batch.
        return _with_fixed_attention_rows(numerics.in_dtype(self.dtype).uncalibrated)

    def weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        def cast(path, leaf: jax.Array) -> jax.Array:
            return leaf if path[-1].key.endswith(_STAYS) else leaf.astype(jnp.dtype(self.dtype))

        return jax.tree_util.tree_map_with_path(cast, weights)


@dataclass(frozen=True)
class Part(Entry):
    """One field of the numerics' `precision` is another float dtype."""

    dtype: Dtype

    kind = "precision"
    field: ClassVar[str] = ""

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, precision=replace(numerics.precision, **{self.field: self.dtype}))


class Head(Part):
    """Operands of the dot with the LM head, the last norm's result included."""

    name = "lm_head"
    field = "head"


class Logits(Part):
    """Logits are rounded to this dtype before the softmax."""

    name = field = "logits"


class Softmax(Part):
    """Every step of the vocabulary's softmax is rounded; the sum itself is taken in float32."""

    name = field = "softmax"


class AttentionSoftmax(Part):
    """Every step of the attention's softmax is rounded; the sum itself is taken in float32."""

    name = field = "attention_softmax"

    def check(self, execution: Execution) -> None:
        if self.dtype != "float32":
            _check_kernel(self, execution.numerics, why="its softmax is float32")


@dataclass(frozen=True)
class KVCache(Entry):
    """Keys and values are rounded to this dtype where they enter the cache.

    Without a scale, numbers that are too large saturate. scale "token": one scale per token and
    head, from its largest element; int8 has it by default and needs it.
    """

    dtype: Annotated[str, OneOf(CACHE_DTYPES)]
    scale: Scale | None = None

    name, kind = "kv_cache", "precision"

    def __post_init__(self):
        super().__post_init__()
        if self.dtype == "int8" and self.scale == "none":
            raise self.refuse('int8 needs scale = "token"; without one it holds whole numbers only')
        if self.dtype in COMPUTE_DTYPES and self.scale == "token":
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


@dataclass(frozen=True)
class NativeKernels(Entry):
    """Plain XLA instead of exact tiles: the compiler chooses kernels, fusions and orders."""

    name, kind = "native_kernels", "kernels"
    no_control = "plain XLA in the learner too gives other bits than in the sampler"

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, family="native", decode_head_columns=None, interpret=False)


@dataclass(frozen=True)
class TileSizes(Entry):
    """Other tiles. What is left out stays as it is.

    `rows` of dots with weights and `attention_rows` are fixed sizes; `kv_block` is the keys per
    block, over which the attention's mix is summed.
    """

    rows: Count | None = None
    attention_rows: Count | None = None
    kv_block: Annotated[Count, POWER_OF_TWO] | None = None

    name, kind = "tile_sizes", "kernels"

    def __post_init__(self):
        super().__post_init__()
        if (self.rows, self.attention_rows, self.kv_block) == (None, None, None):
            raise self.refuse("needs one of rows, attention_rows, kv_block")

    def check(self, execution: Execution) -> None:
        if execution.numerics.attention == "family":
            return
        if self.attention_rows is not None:
            raise self.refuse(
                f"attention_rows = {self.attention_rows} contradicts the attention kernel,"
                " which has row tiles of its own; leave it out"
            )
        if self.kv_block is not None and self.kv_block < variants.LEAST:
            raise self.refuse(
                f"kv_block = {self.kv_block} contradicts the attention kernel, whose blocks have"
                f" at least {variants.LEAST} keys"
            )

    def numerics(self, numerics: Numerics) -> Numerics:
        if self.rows is not None:
            rows = Rows(self.rows, self.rows)
            numerics = replace(numerics.uncalibrated, rows=rows)
        if self.attention_rows is not None:
            rows = Rows(self.attention_rows, self.attention_rows)
            # Whether one dot may take all keys was measured with other numbers of rows.
            numerics = _with_fixed_attention_rows(replace(numerics, attention_rows=rows))
        if self.kv_block is not None:
            # Row ranges were measured with other blocks; one dot over all keys would have none.
            numerics = _with_fixed_attention_rows(replace(numerics, kv_block=self.kv_block))
        return numerics


@dataclass(frozen=True)
class SumOrder(Entry):
    """Norms and the vocabulary's softmax are summed over another number of lanes."""

    lanes: Annotated[Count, POWER_OF_TWO]

    name, kind = "sum_order", "kernels"

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, order=replace(numerics.order, lanes=self.lanes))


@dataclass(frozen=True)
class SplitK(Entry):
    """Every dot with a weight matrix is cut along the contraction, and the pieces are added."""

    pieces: Count

    name, kind = "split_k", "kernels"

    @property
    def inert(self) -> bool:
        return self.pieces == 1

    def numerics(self, numerics: Numerics) -> Numerics:
        order = replace(numerics.order, split_k=self.pieces)
        return replace(numerics.uncalibrated, order=order)  # measured were whole contractions


@dataclass(frozen=True)
class TensorParallel(Entry):
    """The attention's and the MLP's last products are sums of one partial product a rank.

    `exchange` is the dtype that they are sent and added up in: the compute dtype, or float32. Each
    device computes the parts of all ranks in turn, so that any number of ranks works anywhere. 1
    rank changes nothing.
    """

    ranks: Count
    exchange: Literal["compute", "float32"] = "compute"

    name, kind = "tensor_parallel", "kernels"

    @property
    def inert(self) -> bool:
        return self.ranks == 1

    def check(self, execution: Execution) -> None:
        where, config = execution.placement, execution.config
        if where.decode == "sharded" and where.fsdp > 1:
            raise self.refuse('needs whole rows of the weights: placement.decode = "whole"')
        if config.num_experts:
            raise self.refuse("needs a dense model; products of experts are not cut into ranks")
        if config.latent:
            raise self.refuse(
                "needs a model without latent attention, whose heads share their keys"
            )
        for name in ("num_heads", "intermediate_size"):
            if (size := getattr(config, name)) % self.ranks:
                raise self.refuse(f"ranks = {self.ranks} must divide the model's {name} = {size}")

    def numerics(self, numerics: Numerics) -> Numerics:
        order = replace(numerics.order, ranks=self.ranks, exchange=self.exchange)
        return replace(numerics.uncalibrated, order=order)  # as in `SplitK`


@dataclass(frozen=True)
class PallasAttention(Entry):
    """Prefill and decoding attention by a Pallas flash-attention kernel, on a GPU or TPU.

    `interpret` runs the kernel's operations one by one on any backend, slowly.
    """

    interpret: bool = False

    name, kind = "pallas_attention", "kernels"
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
    no_control = PallasAttention.no_control

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
        with self.named():
            variants.check()
        _check_attention(self, execution.numerics)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, attention="triton")


def _check_attention(entry: Entry, numerics: Numerics) -> None:
    """Refuses numerics that already choose how attention is computed."""
    if numerics.order.split_kv:
        raise entry.refuse("contradicts 'split_kv': both decide how decoding attends")
    if numerics.precision.attention_softmax != "float32":
        raise entry.refuse("contradicts 'attention_softmax': its softmax is float32")
    _check_kernel(entry, numerics, own=entry.numerics(numerics).attention)


def _check_kernel(
    entry: Entry,
    numerics: Numerics,
    *,
    own: str = "family",
    why: str = "both decide how decoding attends",
) -> None:
    if numerics.attention not in ("family", own):
        name = TritonAttention.name if numerics.attention == "triton" else PallasAttention.name
        raise entry.refuse(f"contradicts {name!r}: {why}")


@dataclass(frozen=True)
class SplitKV(Entry):
    """Decoding attention is cut along the keys into as many pieces as fill `programs` programs.

    So a smaller batch is cut more, and a sequence's bits depend on its batch. 0 does not cut.
    """

    programs: Whole = 132

    name, kind = "split_kv", "kernels"
    no_control = "only decoding is cut: a learner's forward has all keys at once"

    def check(self, execution: Execution) -> None:
        if self.programs:
            _check_kernel(self, execution.numerics)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, order=replace(numerics.order, split_kv=self.programs))


class Router(Part):
    """Operands of the dot with the routers of a mixture of experts, which then may choose others.

    The weights of the chosen are by the same logits.
    """

    name = field = "router"
    of_mixtures = True


class ExpertChoice(Part):
    """Experts are chosen by the logits of a router of another dtype, and weighted as before.

    So a choice may be another, and nothing else is: a learner that replays the choices is exact.
    """

    name = "expert_choice"
    field = "choice"
    of_mixtures = True


@dataclass(frozen=True)
class ExpertOrder(Entry):
    """The outputs of a token's experts are added in another order, or in another dtype.

    order "choice": from the most probable to the least; "index": by the experts' numbers.
    accumulate "compute": every weighted output and every sum is rounded to the compute dtype.
    """

    order: Literal["choice", "index"]
    accumulate: Literal["float32", "compute"] = "float32"

    name, kind = "expert_order", "kernels"
    of_mixtures = True

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

    factor: Size

    name, kind = "expert_capacity", "kernels"
    no_control = (
        "what an expert leaves out depends on the rows of a forward, and a learner's has others"
    )
    of_mixtures = True

    def __post_init__(self):
        super().__post_init__()
        if self.factor == 0:
            raise self.refuse("factor must be above 0; large ones leave nothing out")

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, expert_capacity=self.factor)
