"""Compute weights: the master weights cast to the compute dtype and joined for the forward."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tim_jax.model.config import ModelConfig
from tim_jax.model.weights import Joined, Params, Weights, joined, size
from tim_jax.numerics import Numerics

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


def unstacked(weights: Weights) -> Weights:
    """`weights` with a dictionary per layer, as the forward with a cache takes them.

    To be called before a decode loop: inside it, slicing the stack would copy weights at every
    step.
    """
    return {
        name: _unstacked(leaf) if isinstance(leaf, dict) else leaf for name, leaf in weights.items()
    }


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
