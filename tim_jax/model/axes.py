"""Logical axes of a model's arrays, by which they are laid on a mesh; see `placement.RULES`."""

from typing import Any

from tim_jax.errors import InputError
from tim_jax.model.config import ModelConfig
from tim_jax.model.params import parameter_shapes
from tim_jax.numerics import Numerics
from tim_jax.placement import Axes, Placement

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
