"""Parameters: random initial values, checks that they fit, and the compute weights made of them."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.model import weights
from tim_jax.model.config import ModelConfig
from tim_jax.model.weights import Joined, Params, Weight, Weights, column_parts, joined, size
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
    # What is cut out of a parameter head by head is split over fsdp as its own inputs.
    for row in rows:
        size = weights.size(row.input, config) if row.dims else 0
        if size % placement.fsdp:
            raise InputError(
                f"placement: fsdp = {placement.fsdp} must divide the model's {row.input} = {size}"
            )
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


# Latent attention's matrices with columns that are rotated -> columns of a head, the rotated last.
_ROTATED = {"q": "query_dim", "q_up": "query_dim", "kv_down": "latent.state_dim"}


def prepare(params: Params, *, config: ModelConfig, numerics: Numerics) -> Weights:
    """Casts the master weights to the compute dtype and joins those that are multiplied together.

    Done once per update, outside every loop; sampler and learner use the same result, and the
    gradient flows through it to the float32 masters. Norm weights and biases stay float32, as they
    enter float32 arithmetic.

    With T column tiles a matrix is [T, K, M / T], and tile i of what is joined holds the i-th part
    of each; the head's columns are filled up with zeros (`Numerics.head_columns`).
    """
    dtype = numerics.dtype
    stacks = {
        name: _combined(params[name], stack, numerics) for name, stack in config.stacks.items()
    }
    head = params["embed"].T if config.tied_embeddings else params["head"]
    return {
        "embed": params["embed"].astype(dtype),
        **stacks,
        "final_norm": params["final_norm"],
        "head": _tiled_head(head.astype(dtype), numerics),
    }


def _combined(layers: Params, config: ModelConfig, numerics: Numerics) -> Weights:
    """The compute weights of a stack of layers."""
    rows = [row for row in joined(config) if row.layered]
    parts = {part for row in rows for part in row.parts}
    combined = {}
    for row in sorted(rows, key=_place):
        axis = -2 if row.matrix else -1
        whole = join(_parts(layers, row, config), numerics.column_tiles, axis=axis)
        combined[row.name] = whole.astype(numerics.dtype) if row.matrix else whole
    return combined | {name: w for name, w in layers.items() if name not in parts}


def _parts(layers: Params, row: Joined, config: ModelConfig) -> list[jax.Array]:
    """What is joined to a compute weight; of latent attention, what is cut out by heads."""
    parts = [layers[part] for part in row.parts]
    if config.latent is None:
        return parts
    if row.name in _ROTATED and config.latent.rope_interleave:
        return [_in_halves(parts[0], size(_ROTATED[row.name], config), config.head_dim)]
    if not row.dims:
        return parts
    of_heads = parts[0].reshape(*parts[0].shape[:-1], config.num_heads, -1)
    of_heads = jnp.moveaxis(of_heads, -2, -3)
    key, value = jnp.split(of_heads, [config.latent.qk_nope_head_dim], axis=-1)
    return [jnp.swapaxes(key, -1, -2) if row.turned else value]


def _in_halves(matrix: jax.Array, width: int, rotated: int) -> jax.Array:
    """Columns whose last `rotated` of every `width` are rotated pairs of neighbours (2 i, 2 i + 1).

    These become pairs (i, i + rotated / 2), as in every other model. Columns of a product are moved
    here, once for an update, and not what the product makes, in every forward.
    """
    heads = matrix.reshape(*matrix.shape[:-1], -1, width)
    plain, turned = jnp.split(heads, [width - rotated], axis=-1)
    moved = jnp.concatenate([plain, turned[..., ::2], turned[..., 1::2]], axis=-1)
    return moved.reshape(matrix.shape)


def unstacked(weights: Weights, *, head_columns: int | None = None) -> Weights:
    """`weights` with a dictionary per layer, as the forward with a cache takes them.

    To be called before a decode loop: inside it, slicing the stack would copy weights at every
    step.

    Args:
      head_columns: the head [d, V] becomes the tuple of its `column_parts` of this width;
        None: it stays as it is.
    """
    layers = {
        name: _unstacked(leaf) if isinstance(leaf, dict) else leaf for name, leaf in weights.items()
    }
    if head_columns is None:
        return layers
    return {**layers, "head": column_parts(weights["head"], head_columns)}


def _unstacked(layers: Weights) -> tuple[Weights, ...]:
    count = jax.tree.leaves(layers)[0].shape[0]
    return tuple(jax.tree.map(lambda w, i=index: w[i], layers) for index in range(count))


def _place(row: Joined) -> tuple[bool, int]:
    """Sorts joined weights: matrices before biases, those of most parts first.

    Any order computes the same; this one is kept because a program whose text changes is no longer
    found in the compile cache.
    """
    return not row.matrix, -len(row.parts)


def join(parts: Sequence[jax.Array], tiles: int, axis: int) -> jax.Array:
    """Joins columns side by side; several column tiles are along a new axis before `axis`."""
    if tiles > 1:
        parts = [part.reshape(*part.shape[:-1], tiles, -1) for part in parts]
    whole = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    return jnp.moveaxis(whole, -2, axis - 1) if tiles > 1 else whole


def _tiled_head(head: jax.Array, numerics: Numerics) -> jax.Array:
    if numerics.column_tiles == 1:
        return head
    size, vocabulary = head.shape
    head = jnp.pad(head, ((0, 0), (0, numerics.head_columns(vocabulary) - vocabulary)))
    return jnp.moveaxis(head.reshape(size, numerics.column_tiles, -1), 1, 0)
