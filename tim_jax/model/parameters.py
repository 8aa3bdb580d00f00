"""Parameters: random initial values, which are not trained, and checks that they fit."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.model import weights
from tim_jax.model.config import ModelConfig
from tim_jax.model.weights import Params, Weight
from tim_jax.numerics import Numerics
from tim_jax.placement import AXES, RULES, Placement


def check_params(params: Mapping[str, Any], config: ModelConfig) -> None:
    """Raises `InputError` naming the first parameter that `config` does not have, or lacks."""
    expected, actual = _by_path(weights.parameter_shapes(config)), _by_path(params)
    for name in sorted(expected.keys() | actual.keys()):
        if name not in actual:
            raise InputError(f"parameter {name!r} is missing")
        if name not in expected:
            raise InputError(f"parameter {name!r} is not one of a {config.model_type} model's")
        if np.shape(actual[name]) != expected[name].shape:
            raise InputError(
                f"parameter {name!r} has shape {np.shape(actual[name])}, expected "
                f"{expected[name].shape}"
            )


def _by_path(tree: Any) -> dict[str, Any]:
    """Leaves by paths such as "layers.q"."""
    return {
        ".".join(str(getattr(key, "key", key)) for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@waiting.during("drawing the initial weights")
def init_params(config: ModelConfig, seed: int) -> Params:
    """Random parameters, float32 NumPy arrays, distributed as `transformers` initialises them.

    Matrices are normal with standard deviation `config.initializer_range`, norms 1, biases 0, the
    embedding of the pad token 0. A leaf's values are a function of (seed, its name, its shape), and
    the same on every machine and backend. Raises `InputError` for a negative seed.
    """
    if seed < 0:
        raise InputError(f"the seed of the initial parameters must be at least 0, found {seed}")

    def draw(weight: Weight) -> np.ndarray:
        shape = weight.shape(config)
        if weight.kind == "norm":
            return np.ones(shape, np.float32)
        if weight.kind in ("bias", "buffer"):
            return np.zeros(shape, np.float32)
        stream = zlib.crc32(weight.path.encode())
        generator = np.random.Generator(np.random.Philox([seed, stream]))
        values = generator.standard_normal(shape, np.float32)
        values *= np.float32(config.initializer_range)
        return values

    params = weights.tree(config, draw)
    pad = config.pad_token_id
    if pad is not None and 0 <= pad < config.vocab_size:
        params["embed"][pad] = 0
    return params


def with_buffers(new: Any, old: Params) -> Params:
    """`new` parameters, but for the buffers, which are not trained: those of `old`.

    A zero gradient would not keep them: an optimiser's weight decay moves them all the same.
    """

    buffers = {weight.name for weight in weights.TABLE if weight.kind == "buffer"}

    def kept(new: Any, old: Any) -> Any:
        if not isinstance(new, dict):
            return new
        return {
            name: old[name] if name in buffers else kept(leaf, old[name])
            for name, leaf in new.items()
        }

    return kept(new, old)


def check(config: ModelConfig, numerics: Numerics, placement: Placement) -> None:
    """Raises `InputError` if the model or its numerics cannot be laid out so."""
    tiles, tensor = numerics.column_tiles, placement.tensor
    if (config.num_experts or config.latent) and max(tiles, tensor) > 1:
        what = "a mixture of experts" if config.num_experts else "latent attention"
        raise InputError(
            f"placement: {what} takes no tensor axis, got tensor = {tensor} and column_tiles ="
            f" {tiles}; use fsdp, data{' and expert' * (config.num_experts > 0)}"
        )
    if placement.expert > 1 and not config.num_experts:
        raise InputError(
            f"placement: expert = {placement.expert} needs a mixture of experts, and a"
            f" {config.model_type} model has none; use fsdp and data"
        )
    if tiles % tensor:
        raise InputError(
            f"placement: tensor = {tensor} needs numerics whose column_tiles are a multiple of it"
            f", got column_tiles = {tiles}"
        )
    # Every tile has whole heads, and as many columns of every part. The head is padded to whole
    # tiles.
    rows = [row for row in weights.joined(config) if row.layered]
    for dimension in ("num_kv_heads", *(part for row in rows for part in row.outputs)):
        size = weights.size(dimension, config)
        if size % tiles:
            raise InputError(
                f"numerics: column_tiles must divide the model's {config.titled(dimension)} ="
                f" {size}, got {tiles}"
            )
    _check_heads(config, placement)
    for weight in weights.table(config):
        for dimension, axis in zip(weight.dims, weight.axes, strict=True):
            names = [name for name in AXES if name in RULES[axis]]
            devices = math.prod(getattr(placement, name) for name in names)
            size = weights.size(dimension, config)
            if size % devices:
                raise InputError(
                    f"placement: {' x '.join(names)} = {devices} must divide the model's"
                    f" {config.titled(dimension)} = {size}"
                )


def _check_heads(config: ModelConfig, placement: Placement) -> None:
    """What is cut out of a parameter head by head is split over fsdp as its own inputs."""
    for row in weights.joined(config):
        if row.dims and weights.size(row.input, config) % placement.fsdp:
            raise InputError(
                f"placement: fsdp = {placement.fsdp} must divide the model's {row.input} ="
                f" {weights.size(row.input, config)}"
            )
