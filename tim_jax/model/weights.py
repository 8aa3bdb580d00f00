"""The weights of every family of models, as two tables. A new family adds its weights here.

`TABLE` has a row for every parameter: its dimensions, how they are laid on a mesh, its name in a
Hugging Face checkpoint. `JOINED` says which of them the forward multiplies by as one. Everything
else that knows of weights (initial values, checkpoints, placement, compute weights, tiles of
kernels, quantisation) reads these tables.

Parameters, the masters, are a dict of float32 arrays, matrices [in, out]. Those under "layers" are
stacked over layers: their first dimension is `num_layers`. A model whose first layers are of
another kind than the rest has these apart, under "dense_layers": see `ModelConfig.stacks`. Compute
weights are what `parameters.prepare` makes of them for the forward: of the same form, some joined.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.model.config import SIGMOID_FAMILIES, ModelConfig
from tim_jax.numerics import Numerics
from tim_jax.placement import Axes, Axis

Params = dict[str, Any]  # float32 master weights, a leaf for every row of `table(config)`
Weights = dict[str, Any]  # compute weights, from `parameters.prepare`
Kind = Literal["embedding", "matrix", "norm", "bias", "scale", "buffer"]
Condition = Callable[[ModelConfig], Any]  # true or not

# Names of dimensions: fields of `ModelConfig`, or products of them.
_QUERY, _KEY = "num_heads x query_dim", "num_kv_heads x head_dim"
_MIXED = "num_heads x value_dim"
_LAYERS, _EXPERTS, _HEADS = "num_layers", "num_experts", "num_heads"
_QUERY_RANK, _KEY_RANK = "latent.q_lora_rank", "latent.kv_lora_rank"
_STACKED_TWICE: Axes = ("whole", "expert", "in", "out")  # a matrix in every expert of every layer


def size(dimension: str, config: ModelConfig) -> int:
    """The size of a named dimension, such as "hidden_size" or "num_heads x head_dim"."""
    return math.prod(attrgetter(field)(config) for field in dimension.split(" x "))


@dataclass(frozen=True)
class Weight:
    """A parameter; one in a layer stands for those of all layers, stacked, and of all experts.

    Attributes:
      name: of the leaf in the tree of parameters, there under its stack if it is in a layer.
      kind: decides initial values and the dtype among the compute weights, see `wide`. A scale is a
        linear map to one number. A buffer is not trained.
      dims: names of its dimensions, see `size`.
      axes: their logical axes, see `placement.RULES`. What is large is split over all of fsdp and
        tensor, and experts over expert; biases are small and split over tensor alone, norms within
        heads not at all.
      tensor: its name in a checkpoint, with "{layer}" for the index of its layer, "{expert}" for
        that of its expert, and "{shared}" for the module of the shared experts.
      when: whether a stack of layers, or a model, of this configuration has it.
      stack: the layers that have it, a key of `ModelConfig.stacks`.
    """

    name: str
    kind: Kind
    dims: tuple[str, ...]
    axes: Axes
    tensor: str
    when: Condition
    stack: str = "layers"

    @property
    def layered(self) -> bool:
        """Whether every layer has one."""
        return self.dims[0] == _LAYERS

    @property
    def stacked(self) -> int:
        """How many leading dimensions count layers and experts: what a checkpoint has apart."""
        return sum(dimension in (_LAYERS, _EXPERTS) for dimension in self.dims[:-1])

    @property
    def path(self) -> str:
        """In the tree of parameters, such as "embed" or "layers.q"."""
        return f"{self.stack}.{self.name}" if self.layered else self.name

    @property
    def transposed(self) -> bool:
        """Whether a checkpoint has it as [out, in], as PyTorch keeps the matrices of its layers."""
        return self.kind in ("matrix", "scale")

    @property
    def wide(self) -> bool:
        """Whether it stays float32 among the compute weights, as it enters float32 arithmetic."""
        return self.kind not in ("embedding", "matrix")

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        """The shape in a model of this architecture, all layers stacked if they each have one."""
        own = config.stacks[self.stack] if self.layered else config
        return tuple(size(dimension, own) for dimension in self.dims)

    def of(self, params: Params) -> Any:
        """The leaf of a tree of parameters."""
        return params[self.stack][self.name] if self.layered else params[self.name]


def _always(_: ModelConfig) -> bool:
    return True


def _norm(
    name: str,
    module: str,
    dimension: str = "hidden_size",
    axis: Axis = "hidden",
    when: Condition = _always,
) -> Weight:
    """The weight of a norm in every layer; `module` is its path in a checkpoint's layer."""
    tensor = f"model.layers.{{layer}}.{module}.weight"
    return Weight(name, "norm", (_LAYERS, dimension), ("whole", axis), tensor, when)


def _matrix(name: str, module: str, inputs: str, outputs: str, when: Condition = _always) -> Weight:
    """The matrix of a linear map in every layer."""
    dims, tensor = (_LAYERS, inputs, outputs), f"model.layers.{{layer}}.{module}.weight"
    return Weight(name, "matrix", dims, ("whole", "in", "out"), tensor, when)


def _of_experts(name: str, module: str, inputs: str, outputs: str) -> Weight:
    """The matrix of a linear map in every expert of every layer."""
    dims, axes = (_LAYERS, _EXPERTS, inputs, outputs), _STACKED_TWICE
    tensor = f"model.layers.{{layer}}.mlp.experts.{{expert}}.{module}.weight"
    return Weight(name, "matrix", dims, axes, tensor, _mixture)


def _sigmoid_router(config: ModelConfig) -> bool:
    return config.num_experts > 0 and config.model_type in SIGMOID_FAMILIES


def _latent_query(config: ModelConfig) -> bool:
    return config.latent is not None and config.latent.q_lora_rank > 0


def _without(condition: Condition) -> Condition:
    return lambda config: not condition(config)


def _bias(name: str, module: str, outputs: str, when: Condition) -> Weight:
    """The bias of a linear map in every layer."""
    tensor = f"model.layers.{{layer}}.{module}.bias"
    return Weight(name, "bias", (_LAYERS, outputs), ("whole", "out"), tensor, when)


_qk_norm, _mlp_bias = attrgetter("qk_norm"), attrgetter("mlp_bias")
_attention_bias, _output_bias = attrgetter("attention_bias"), attrgetter("output_bias")
_mixture, _latent = attrgetter("num_experts"), attrgetter("latent")
_shared, _scaled = attrgetter("shared_width"), attrgetter("shared_scales")
_dense, _plain_attention = _without(_mixture), _without(_latent)

# In the order in which a checkpoint is written.
TABLE = (
    Weight(
        "embed",
        "embedding",
        ("vocab_size", "hidden_size"),
        ("whole", "hidden"),
        "model.embed_tokens.weight",
        _always,
    ),
    _norm("attn_norm", "input_layernorm"),
    _matrix("q", "self_attn.q_proj", "hidden_size", _QUERY, _without(_latent_query)),
    _matrix("k", "self_attn.k_proj", "hidden_size", _KEY, _plain_attention),
    _matrix("v", "self_attn.v_proj", "hidden_size", _KEY, _plain_attention),
    _matrix("q_down", "self_attn.q_a_proj", "hidden_size", _QUERY_RANK, _latent_query),
    _norm("q_down_norm", "self_attn.q_a_layernorm", _QUERY_RANK, "whole", _latent_query),
    _matrix("q_up", "self_attn.q_b_proj", _QUERY_RANK, _QUERY, _latent_query),
    _matrix("kv_down", "self_attn.kv_a_proj_with_mqa", "hidden_size", "latent.state_dim", _latent),
    _norm("kv_norm", "self_attn.kv_a_layernorm", _KEY_RANK, "whole", _latent),
    _matrix("kv_up", "self_attn.kv_b_proj", _KEY_RANK, "num_heads x latent.kv_head_dim", _latent),
    _matrix("o", "self_attn.o_proj", _MIXED, "hidden_size"),
    _bias("q_bias", "self_attn.q_proj", _QUERY, _attention_bias),
    _bias("k_bias", "self_attn.k_proj", _KEY, _attention_bias),
    _bias("v_bias", "self_attn.v_proj", _KEY, _attention_bias),
    _bias("o_bias", "self_attn.o_proj", "hidden_size", _output_bias),
    _norm("q_norm", "self_attn.q_norm", "head_dim", "whole", _qk_norm),
    _norm("k_norm", "self_attn.k_norm", "head_dim", "whole", _qk_norm),
    _norm("mlp_norm", "post_attention_layernorm"),
    _matrix("gate", "mlp.gate_proj", "hidden_size", "intermediate_size", _dense),
    _matrix("up", "mlp.up_proj", "hidden_size", "intermediate_size", _dense),
    _matrix("down", "mlp.down_proj", "intermediate_size", "hidden_size", _dense),
    _bias("gate_bias", "mlp.gate_proj", "intermediate_size", _mlp_bias),
    _bias("up_bias", "mlp.up_proj", "intermediate_size", _mlp_bias),
    _bias("down_bias", "mlp.down_proj", "hidden_size", _mlp_bias),
    _matrix("router", "mlp.gate", "hidden_size", _EXPERTS, _mixture),
    Weight(
        "router_bias",
        "buffer",
        (_LAYERS, _EXPERTS),
        ("whole", "whole"),
        "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        _sigmoid_router,
    ),
    _matrix("shared_gate", "mlp.{shared}.gate_proj", "hidden_size", "shared_width", _shared),
    _matrix("shared_up", "mlp.{shared}.up_proj", "hidden_size", "shared_width", _shared),
    _matrix("shared_down", "mlp.{shared}.down_proj", "shared_width", "hidden_size", _shared),
    Weight(
        "shared_scale",
        "scale",
        (_LAYERS, "hidden_size", "shared_scales"),
        ("whole", "whole", "whole"),
        "model.layers.{layer}.mlp.{shared}_gate.weight",
        _scaled,
    ),
    _of_experts("expert_gate", "gate_proj", "hidden_size", "moe_intermediate_size"),
    _of_experts("expert_up", "up_proj", "hidden_size", "moe_intermediate_size"),
    _of_experts("expert_down", "down_proj", "moe_intermediate_size", "hidden_size"),
    Weight("final_norm", "norm", ("hidden_size",), ("hidden",), "model.norm.weight", _always),
    Weight(
        "head",
        "matrix",
        ("hidden_size", "vocab_size"),
        ("hidden", "whole"),  # not its columns: a vocabulary may have any size
        "lm_head.weight",
        _without(attrgetter("tied_embeddings")),
    ),
)
NAMED = {weight.name: weight for weight in TABLE}


@dataclass(frozen=True)
class Joined:
    """A compute weight: the columns of `parts` side by side, in column tiles if there are several.

    Parameters that are part of none are compute weights as they are.

    Attributes:
      title: of a matrix, in messages.
      dims: of a part of a parameter, head by head, what its matrices are stacked over and their
        inputs and outputs; else the dimensions are those of the parts.
      turned: whether such a part is multiplied by the other way round, from its outputs.
      gated: whether a kernel computes the same columns of all parts together, to multiply them.
      quantised: whether engines that quantise weights quantise this matrix.
    """

    name: str
    parts: tuple[str, ...]
    title: str = ""
    dims: tuple[str, ...] = ()
    turned: bool = False
    gated: bool = False
    quantised: bool = False

    @property
    def matrix(self) -> bool:
        """True for a matrix, False for a bias."""
        return NAMED[self.parts[0]].kind == "matrix"

    @property
    def layered(self) -> bool:
        """True if every layer has one."""
        return NAMED[self.parts[0]].layered

    @property
    def stacked(self) -> int:
        """How many leading dimensions count layers, and experts or heads."""
        return len(self.dims) - 2 if self.dims else NAMED[self.parts[0]].stacked

    @property
    def stacked_axes(self) -> Axes:
        """The logical axes of these leading dimensions."""
        return self.stacked * ("whole",) if self.dims else NAMED[self.parts[0]].axes[: self.stacked]

    @property
    def input(self) -> str:
        """The dimension that a matrix contracts over."""
        return self.dims[-2] if self.dims else NAMED[self.parts[0]].dims[-2]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The dimension of each part's columns."""
        return self.dims[-1:] or tuple(NAMED[part].dims[-1] for part in self.parts)


# Matrices in the order in which the forward multiplies by them, then biases.
JOINED = (
    Joined("qkv", ("q", "k", "v"), "the query, key and value projection", quantised=True),
    Joined("q", ("q",), "the query projection", quantised=True),
    Joined("q_down", ("q_down",), "the projection to the query's state", quantised=True),
    Joined("q_up", ("q_up",), "the projection from the query's state", quantised=True),
    Joined("kv_down", ("kv_down",), "the projection to the compressed state", quantised=True),
    Joined(
        "k_up",
        ("kv_up",),
        "the projection of a head's query to the compressed state",
        (_LAYERS, _HEADS, "latent.qk_nope_head_dim", _KEY_RANK),
        turned=True,
        quantised=True,
    ),
    Joined(
        "v_up",
        ("kv_up",),
        "the projection of the compressed state to a head's values",
        (_LAYERS, _HEADS, _KEY_RANK, "latent.v_head_dim"),
        quantised=True,
    ),
    Joined("o", ("o",), "the output projection", quantised=True),
    Joined("gate_up", ("gate", "up"), "the gate and up projection", gated=True, quantised=True),
    Joined("down", ("down",), "the down projection", quantised=True),
    Joined("router", ("router",), "the router"),
    Joined(
        "expert_gate_up",
        ("expert_gate", "expert_up"),
        "the experts' gate and up projection",
        gated=True,
        quantised=True,
    ),
    Joined("expert_down", ("expert_down",), "the experts' down projection", quantised=True),
    Joined(
        "shared_gate_up",
        ("shared_gate", "shared_up"),
        "the shared experts' gate and up projection",
        gated=True,
        quantised=True,
    ),
    Joined("shared_down", ("shared_down",), "the shared experts' down projection", quantised=True),
    Joined("head", ("head",), "the head (vocabulary)"),
    Joined("qkv_bias", ("q_bias", "k_bias", "v_bias")),
    Joined("gate_up_bias", ("gate_bias", "up_bias")),
)


def table(config: ModelConfig) -> tuple[Weight, ...]:
    """The parameters that a model has, those of its first layers before those of the others."""
    rows = []
    for layered, together in groupby(TABLE, key=lambda weight: weight.layered):
        same = tuple(together)
        if not layered:
            rows += [weight for weight in same if weight.when(config)]
            continue
        for name, stack in config.stacks.items():
            rows += [replace(weight, stack=name) for weight in same if weight.when(stack)]
    return tuple(rows)


def joined(config: ModelConfig) -> tuple[Joined, ...]:
    """The joined compute weights that a model has; a tied head is the embedding's transpose."""
    names = {weight.name for weight in table(config)} | {"head"}
    rows = tuple(row for row in JOINED if names.issuperset(row.parts))
    together = {part for row in rows if len(row.parts) > 1 for part in row.parts}
    return tuple(row for row in rows if len(row.parts) > 1 or not together.issuperset(row.parts))


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every matrix that the forward multiplies by, columns of all parts."""
    return {
        row.name: (size(row.input, config), sum(size(part, config) for part in row.outputs))
        for row in joined(config)
        if row.matrix
    }


def tree(config: ModelConfig, leaf: Callable[[Weight], Any]) -> dict[str, Any]:
    """The tree of parameters with `leaf(weight)` for each."""
    made: dict[str, Any] = {}
    for weight in table(config):
        beside = made.setdefault(weight.stack, {}) if weight.layered else made
        beside[weight.name] = leaf(weight)
    return made


def parameter_shapes(config: ModelConfig) -> Params:
    """The tree of parameters, each leaf a float32 `jax.ShapeDtypeStruct`."""
    return tree(config, lambda weight: jax.ShapeDtypeStruct(weight.shape(config), np.float32))


def param_axes(config: ModelConfig) -> dict[str, Any]:
    """The tree of parameters with each leaf's logical axes."""
    return tree(config, lambda weight: weight.axes)


def weight_axes(config: ModelConfig, numerics: Numerics) -> dict[str, Any]:
    """The tree of `parameters.prepare`'s compute weights with each leaf's logical axes."""
    axes = param_axes(config)
    tiled: Axes = ("tile",) if numerics.column_tiles > 1 else ()

    def put(beside: dict[str, Any], row: Joined) -> None:
        inputs = row.matrix * ("in",)
        beside[row.name] = (*row.stacked_axes, *tiled, *inputs, "whole")

    for name, stack in config.stacks.items():
        rows = [row for row in joined(stack) if row.layered]
        for part in {part for row in rows for part in row.parts}:
            axes[name].pop(part)
        for row in rows:
            put(axes[name], row)
    put(axes, next(row for row in JOINED if row.name == "head"))
    return axes


def column_parts(weight: jax.Array, columns: int) -> tuple[jax.Array, ...]:
    """The matrix [K, M] cut into matrices of `columns` columns, the last of them with the rest.

    The rest by itself could be narrow, and products of few columns have other bits.
    """
    cuts = [*range(0, weight.shape[1] - columns + 1, columns)][1:]
    return tuple(jnp.split(weight, cuts, axis=1))
