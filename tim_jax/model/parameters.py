"""The parameters of a model: their names and shapes, and random initial values.

A dict of float32 arrays; weight matrices are [in, out]. Every leaf under "layers" is stacked over
layers, its leading axis L. V vocabulary, d hidden size, H and K query and key-value heads of size
D, f intermediate size:

    embed [V, d]   final_norm [d]   head [d, V] unless tied
    layers: attn_norm [L, d]   q [L, d, H D]   k, v [L, d, K D]   o [L, H D, d]
            mlp_norm [L, d]    gate, up [L, d, f]   down [L, f, d]
            q_norm, k_norm [L, D] with qk_norm
            q_bias [L, H D]   k_bias, v_bias [L, K D] with attention_bias   o_bias [L, d]
            with output_bias   gate_bias, up_bias [L, f]   down_bias [L, d] with mlp_bias

Logical axes of a model's arrays, by which they are laid on a mesh; see `placement.RULES`.
"""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tim_jax.errors import InputError
from tim_jax.model.config import ModelConfig
from tim_jax.numerics import Numerics
from tim_jax.placement import Axes, Placement

Params = dict[str, Any]


def parameter_shapes(config: ModelConfig) -> Params:
    """The tree of parameters, each leaf a float32 `jax.ShapeDtypeStruct`."""
    hidden, layers = config.hidden_size, config.num_layers
    shapes: Params = {
        "embed": (config.vocab_size, hidden),
        "final_norm": (hidden,),
        "layers": {name: (layers, *shape) for name, shape in _layer_shapes(config).items()},
    }
    if not config.tied_embeddings:
        shapes["head"] = (hidden, config.vocab_size)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, np.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, middle, size = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * size, config.num_kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (hidden, query),
        "k": (hidden, key),
        "v": (hidden, key),
        "o": (query, hidden),
        "mlp_norm": (hidden,),
        "gate": (hidden, middle),
        "up": (hidden, middle),
        "down": (middle, hidden),
    }
    if config.qk_norm:
        shapes |= {"q_norm": (size,), "k_norm": (size,)}
    if config.attention_bias:
        shapes |= {"q_bias": (query,), "k_bias": (key,), "v_bias": (key,)}
    if config.output_bias:
        shapes |= {"o_bias": (hidden,)}
    if config.mlp_bias:
        shapes |= {"gate_bias": (middle,), "up_bias": (middle,), "down_bias": (hidden,)}
    return shapes


def check_params(params: Mapping[str, Any], config: ModelConfig) -> None:
    """Raises `InputError` naming the first parameter that `config` does not have, or lacks."""
    expected, found = _by_name(parameter_shapes(config)), _by_name(params)
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise InputError(f"parameter {name!r} is missing")
        if name not in expected:
            raise InputError(f"parameter {name!r} is not one of a {config.model_type} model's")
        if np.shape(found[name]) != expected[name].shape:
            raise InputError(
                f"parameter {name!r} has shape {np.shape(found[name])}, expected "
                f"{expected[name].shape}"
            )


def init_params(config: ModelConfig, seed: int) -> Params:
    """Random parameters, float32 NumPy arrays, distributed as `transformers` initialises them.

    Matrices are normal with standard deviation `config.initializer_range`, norms 1, biases 0, the
    embedding of the pad token 0. A leaf's values are a function of (seed, its name, its shape), and
    the same on every machine and backend. Raises `InputError` for a negative seed.
    """
    if seed < 0:
        raise InputError(f"the seed of the initial parameters must be at least 0, found {seed}")

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        leaf = name.rsplit(".", 1)[-1]
        if leaf.endswith("_norm"):
            return np.ones(shape, np.float32)
        if leaf.endswith("_bias"):
            return np.zeros(shape, np.float32)
        generator = np.random.Generator(np.random.Philox([seed, zlib.crc32(name.encode())]))
        values = generator.standard_normal(shape, np.float32)
        values *= np.float32(config.initializer_range)
        return values

    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: draw(_name(path), leaf.shape), parameter_shapes(config)
    )
    pad = config.pad_token_id
    if pad is not None and 0 <= pad < config.vocab_size:
        params["embed"][pad] = 0
    return params


def _by_name(tree: Any) -> dict[str, Any]:
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: tuple[Any, ...]) -> str:
    """ "layers.q" and the like."""
    return ".".join(str(getattr(key, "key", key)) for key in path)


_COLUMNS = ("q_bias", "k_bias", "v_bias", "gate_bias", "up_bias", "o_bias", "down_bias")


def param_axes(config: ModelConfig) -> dict[str, Any]:
    """The tree of parameters with each leaf's logical axes.

    Everything is split over all of fsdp and tensor, but for biases (over tensor alone) and the
    norms within heads (not at all), which are small.
    """
    axes: dict[str, Any] = {
        "embed": ("whole", "hidden"),
        "final_norm": ("hidden",),
        "layers": {name: _layer_axes(name) for name in parameter_shapes(config)["layers"]},
    }
    if not config.tied_embeddings:
        # Not its columns: a vocabulary may have any size.
        axes["head"] = ("hidden", "whole")
    return axes


def _layer_axes(name: str) -> Axes:
    if name in ("q_norm", "k_norm"):
        return ("whole", "whole")
    if name.endswith("_norm"):
        return ("whole", "hidden")
    if name in _COLUMNS:
        return ("whole", "out")
    return ("whole", "in", "out")


def weight_axes(config: ModelConfig, numerics: Numerics) -> dict[str, Any]:
    """The tree of `transformer.prepare`'s compute weights with each leaf's logical axes."""
    names = {"attn_norm", "mlp_norm", "qkv", "o", "gate_up", "down"}
    names |= {"q_norm", "k_norm"} if config.qk_norm else set()
    names |= {"qkv_bias"} if config.attention_bias else set()
    names |= {"o_bias"} if config.output_bias else set()
    names |= {"gate_up_bias", "down_bias"} if config.mlp_bias else set()
    tiled: Axes = ("tile",) if numerics.column_tiles > 1 else ()

    def layer(name: str) -> Axes:
        if name in ("qkv", "o", "gate_up", "down"):
            return ("whole", *tiled, "in", "whole")
        if name in ("qkv_bias", "gate_up_bias"):
            return ("whole", *tiled, "whole")
        return _layer_axes(name)

    return {
        "embed": ("whole", "hidden"),
        "layers": {name: layer(name) for name in names},
        "final_norm": ("hidden",),
        "head": (*tiled, "in", "whole"),
    }


def check(config: ModelConfig, numerics: Numerics, placement: Placement) -> None:
    """Raises `InputError` if the model or its numerics cannot be laid out so."""
    tiles, tensor = numerics.column_tiles, placement.tensor
    if tiles % tensor:
        raise InputError(
            f"placement: tensor = {tensor} needs numerics whose column_tiles are a multiple of it"
            f", got column_tiles = {tiles}"
        )
    sizes = {
        "num_kv_heads": config.num_kv_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
    }
    for name, size in sizes.items():
        if size % tiles:
            raise InputError(
                f"numerics: column_tiles must divide the model's {name} = {size}, got {tiles}"
            )
    both = placement.fsdp * tensor
    if config.hidden_size % both:
        raise InputError(
            f"placement: fsdp x tensor = {both} must divide the model's hidden_size ="
            f" {config.hidden_size}"
        )
    sizes = {
        "num_heads x head_dim": config.num_heads * config.head_dim,
        "intermediate_size": config.intermediate_size,
    }
    for name, size in sizes.items():
        if size % placement.fsdp:
            raise InputError(
                f"placement: fsdp = {placement.fsdp} must divide the model's {name} = {size}"
            )
