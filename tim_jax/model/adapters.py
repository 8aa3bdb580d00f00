"""Low-rank adapters (LoRA, arXiv 2106.09685): what is trained in place of all weights, and the rule
that merges them.

    W = round(base + (alpha / rank) A B),    A [in, rank], B [rank, out]

The sum is float32 and is rounded once, to the compute dtype. It is made once an update, before
anything is computed: the sampler, the learner and every kernel are then given ordinary weights, the
same ones. Products are added up in the order of the rank, each operation rounded by itself, so that
the bits depend neither on the mesh nor on the program. Where A B is 0, W has the bits of the base.

A model's parameters with adapters are those of the base, which stay as they are and may have a
narrower dtype, and under "lora" a tree {target: {"a": f32[layers, in, rank], "b": f32[layers, rank,
out]}}. The adapters alone are differentiated, moved, kept in checkpoints and given an optimiser
state.

Left out: adapters of embedding, head and experts; dropout; a rank for each target.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import check_whole, expanded, shown
from tim_jax.model import weights
from tim_jax.model.config import ModelConfig
from tim_jax.model.files import (
    Stored,
    check_dtype,
    check_shape,
    header,
    new_folder,
    open_tensors,
    read_json,
    write_json,
    write_tensors,
)
from tim_jax.model.parameters import join
from tim_jax.model.weights import TABLE, Joined, Params, Weight
from tim_jax.numerics import Numerics, strict


def _module(weight: Weight) -> str:
    """The name of a matrix as users know it, such as "q_proj"."""
    return weight.tensor.split(".")[-2]


_ADAPTED = ("q", "k", "v", "o", "gate", "up", "down")
KNOWN = {_module(row): row for row in TABLE if row.name in _ADAPTED}
OF_EXPERTS = {_module(row) for row in TABLE if row.kind == "matrix" and row.stacked > 1}


@dataclass(frozen=True)
class Lora:
    """Which matrices have adapters, and how large these are. Raises `InputError` for bad values."""

    rank: int = 8
    """Columns of A and rows of B."""
    alpha: float = 16.0
    """A B is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of matrices such as "q_proj"; none: all of attention and MLP."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", check_whole("Lora: rank", self.rank, least=1))
        if not 0 < self.alpha < math.inf:
            raise InputError(f"Lora: alpha must be greater than 0 and finite, got {self.alpha}")
        if isinstance(self.targets, str):
            raise InputError(f"Lora: targets must be a list of names, got {self.targets!r}")
        object.__setattr__(self, "targets", tuple(self.targets))
        for name in self.targets:
            if name not in KNOWN:
                raise InputError(
                    f"Lora: target {name!r} is unknown{did_you_mean(str(name), KNOWN)}"
                )
        if len(set(self.targets)) < len(self.targets):
            raise InputError(f"Lora: targets has a name twice: {', '.join(self.targets)}")

    @property
    def scale(self) -> float:
        """What A B is multiplied by."""
        return self.alpha / self.rank


ADAPTERS = "lora"  # their place among the parameters, and among the weights of a layer
Adapters = dict[str, dict[str, Any]]

_TERMS = 8  # of a product that are added before the sum goes back to memory
_NARROWER = (ml_dtypes.bfloat16, np.float16)


@dataclass(frozen=True, eq=False)
class Adapter:
    """Trained adapters as one value, to be saved or to go on from."""

    lora: Lora
    arrays: Adapters


def targets(config: ModelConfig, lora: Lora) -> dict[str, Weight]:
    """The matrices that have adapters, by the names that users know, in the model's order.

    Raises:
      InputError: the model does not have one.
    """
    if config.latent:
        raise InputError(f"Lora: a {config.model_type} model, with latent attention, takes none")
    present = {name: row for name, row in KNOWN.items() if row.when(config)}
    for name in lora.targets:
        if name in present:
            continue
        if config.num_experts and name in OF_EXPERTS:
            raise InputError(
                f"Lora: {name!r} is a matrix of every expert, which cannot have adapters; in a"
                f" mixture of experts {', '.join(present)} can"
            )
        raise InputError(f"Lora: a {config.model_type} model has no {name!r}")
    return {name: row for name, row in present.items() if name in (lora.targets or present)}


def _tree(config: ModelConfig, lora: Lora, leaf: Callable[[Weight, str], Any]) -> Adapters:
    rows = targets(config, lora)
    return {name: {part: leaf(row, part) for part in "ab"} for name, row in rows.items()}


def shapes(config: ModelConfig, lora: Lora) -> Adapters:
    """The tree of adapters, each leaf a float32 `jax.ShapeDtypeStruct`."""

    def leaf(row: Weight, part: str) -> jax.ShapeDtypeStruct:
        layers, inputs, outputs = row.shape(config)
        size = (inputs, lora.rank) if part == "a" else (lora.rank, outputs)
        return jax.ShapeDtypeStruct((layers, *size), np.float32)

    return _tree(config, lora, leaf)


def axes(config: ModelConfig, lora: Lora) -> Adapters:
    """The tree of adapters with each leaf's logical axes: those of the matrix's rows or columns."""

    def leaf(row: Weight, part: str) -> Any:
        layers, inputs, outputs = row.axes
        return (layers, inputs, "whole") if part == "a" else (layers, "whole", outputs)

    return _tree(config, lora, leaf)


def trained_shapes(config: ModelConfig, lora: Lora | None) -> Any:
    """Shapes of what is trained: the adapters, or without any all parameters."""
    return weights.parameter_shapes(config) if lora is None else shapes(config, lora)


def trained_axes(config: ModelConfig, lora: Lora | None) -> Any:
    """Logical axes of what is trained."""
    return weights.param_axes(config) if lora is None else axes(config, lora)


def whole_axes(config: ModelConfig, lora: Lora | None) -> Any:
    """Logical axes of all parameters, those of the base and the adapters."""
    of_base = weights.param_axes(config)
    return of_base if lora is None else {**of_base, ADAPTERS: axes(config, lora)}


def init(config: ModelConfig, lora: Lora, seed: int) -> Adapters:
    """Adapters that change nothing yet, float32 NumPy arrays, drawn as PEFT draws them.

    A is uniform in [-1, 1] / sqrt(inputs) (the Kaiming rule with a slope of sqrt 5), B is 0. Values
    are a function of (seed, name, shape). Raises `InputError` as `targets`.
    """

    def leaf(row: Weight, part: str) -> np.ndarray:
        layers, inputs, outputs = row.shape(config)
        if part == "b":
            return np.zeros((layers, lora.rank, outputs), np.float32)
        stream = zlib.crc32(f"{ADAPTERS}.{_module(row)}".encode())
        generator = np.random.Generator(np.random.Philox([seed, stream]))
        unit = generator.random((layers, inputs, lora.rank), np.float32)
        return (2 * unit - 1) * np.float32(1 / math.sqrt(inputs))

    return _tree(config, lora, leaf)


def describe(config: ModelConfig, lora: Lora) -> str:
    """A line about what is trained."""
    count, other = (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
        for tree in (shapes(config, lora), weights.parameter_shapes(config))
    )
    return (
        f"adapters of rank {lora.rank}, alpha {lora.alpha:g} on {', '.join(targets(config, lora))}:"
        f" {count:,} numbers are trained, {other:,} stay as they are"
    )


def whole(trained: Any, base: Params | None) -> Params:
    """All parameters, of what is trained and of the base that is not, if there is one."""
    return trained if base is None else {**base, ADAPTERS: trained}


def split(params: Params) -> tuple[Any, Params | None]:
    """(what is trained, the base or None): the opposite of `whole`."""
    if ADAPTERS not in params:
        return params, None
    return params[ADAPTERS], {name: leaf for name, leaf in params.items() if name != ADAPTERS}


def of(params: Params) -> Adapters | None:
    """The adapters among the parameters, if there are any."""
    return params.get(ADAPTERS)


def narrowed(params: Params) -> Params:
    """NumPy arrays in the narrowest dtype that keeps every value, such as their checkpoint's.

    Nothing is lost, as the rule widens them again; a base in bfloat16 takes half the memory.
    """

    def leaf(x: Any) -> np.ndarray:
        wide = np.asarray(x)
        for dtype in _NARROWER:
            with np.errstate(over="ignore"):
                narrow = wide.astype(dtype)
            if np.array_equal(narrow.astype(np.float32).view(np.int32), wide.view(np.int32)):
                return narrow
        return wide

    return jax.tree.map(leaf, params)


def fingerprint(base: Params) -> int:
    """CRC-32 of the bytes of a base on the host, by which another one is told from it."""
    crc = 0
    for leaf in jax.tree.leaves(base):
        crc = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data, crc)
    return crc


def merged(params: Params, *, config: ModelConfig, lora: Lora, numerics: Numerics) -> Params:
    """Parameters without adapters, these merged by the rule, matrices in the compute dtype.

    One layer of a matrix at a time, so that no float32 copy of the model exists.
    `numerics.precision.lora` rounds base, product and sum: a rule that no learner should have.
    """
    adapters, names = params[ADAPTERS], {r.name: n for n, r in targets(config, lora).items()}
    rule = partial(_merged, scale=lora.scale, numerics=numerics)

    def leaf(weight: Weight) -> jax.Array:
        base = params["layers"][weight.name] if weight.layered else params[weight.name]
        if weight.name in names:
            own = adapters[names[weight.name]]
            return jax.lax.map(lambda layer: rule(*layer), (base, own["a"], own["b"]))
        return jnp.asarray(base).astype(jnp.float32 if weight.wide else numerics.dtype)

    return weights.tree(config, leaf)


def _merged(
    base: jax.Array, a: jax.Array, b: jax.Array, *, scale: float, numerics: Numerics
) -> jax.Array:
    """A layer's matrix [in, out] with the product of a [in, rank] and b [rank, out] added."""
    fence, dtype = jax.lax.optimization_barrier, jnp.dtype(numerics.precision.lora)

    def rounded(x: jax.Array) -> jax.Array:
        return strict.rounded(x, dtype).astype(jnp.float32)

    base, change = fence((base.astype(jnp.float32), _product(*fence((a, b)))))
    base, change = rounded(base), rounded(strict.clipped_to_finite(change * scale))
    # A sum with 0 would turn -0 into 0.
    total = jnp.where(change == 0, base, rounded(base + change))
    return fence(strict.rounded(total, numerics.dtype))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b in float32, the products added in the order of the contraction.

    Not by a dot, whose order may depend on the shape of a device's part.
    """

    def add(total: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        column, row = pair
        return total + strict.clipped_to_finite(column[:, None] * row[None, :]), None

    zeros = jnp.zeros((a.shape[0], b.shape[1]), jnp.float32)
    return jax.lax.scan(add, zeros, (a.T, b), unroll=min(_TERMS, a.shape[1]))[0]


def changed(config: ModelConfig, lora: Lora) -> tuple[str, ...]:
    """Names of the compute weights of a layer that adapters change."""
    adapted = {row.name for row in targets(config, lora).values()}
    return tuple(row.name for row in weights.joined(config) if adapted.intersection(row.parts))


def renewed(old: Any, new: Any, *, config: ModelConfig, lora: Lora | None) -> Any:
    """Compute weights `new`, but for those that no adapter changes: these are the `old` arrays.

    They have the same bits. So nothing is computed for them, and no memory is taken.
    """
    if lora is None:
        return new
    names = changed(config, lora)
    layers = {name: new["layers"][name] for name in names}
    return {**old, "layers": {**old["layers"], **layers}}


def attached(layer: dict[str, Any], *, config: ModelConfig, lora: Lora) -> dict[str, Any]:
    """The compute weights of a layer, the very same, with a gradient for the adapters among them.

    `layer` has this device's parts of the merged weights, and under "lora" those of the layer's
    adapters. The rule's rounding has the gradient 1 (straight-through). A matrix's own gradient
    exists for one layer at a time.
    """
    rest = {name: weight for name, weight in layer.items() if name != ADAPTERS}
    names = {row.name: name for name, row in targets(config, lora).items()}
    for row in weights.joined(config):
        own = {part: layer[ADAPTERS][names[part]] for part in row.parts if part in names}
        if own:
            change = partial(_joined_change, row=row, config=config, scale=lora.scale)
            rest[row.name] = _with_gradient(rest[row.name], own, change)
    return rest


def _with_gradient(weight: jax.Array, own: Adapters, change: Callable) -> jax.Array:
    """`weight`, whose cotangent goes on to the adapters as if it were `change` of them."""

    def forward(own: Adapters, weight: jax.Array) -> jax.Array:
        del own
        return weight

    def backward(own: Adapters, cotangent: jax.Array) -> tuple[Any, None]:
        made = partial(change, shape=cotangent.shape)
        return jax.vjp(made, own)[1](cotangent.astype(jnp.float32))[0], None

    call = jax.custom_vjp(forward)
    call.defvjp(lambda own, weight: (weight, own), backward)
    return call(own, weight)


def _joined_change(
    own: Adapters, *, shape: tuple[int, ...], row: Joined, config: ModelConfig, scale: float
) -> jax.Array:
    """What adapters add to a joined weight of this shape, in plain float32 products."""
    inputs, columns = shape[-2], math.prod(shape) // shape[-2]
    sizes = [weights.size(dimension, config) for dimension in row.outputs]
    parts = []
    for part, size in zip(row.parts, sizes, strict=True):
        if part in own:
            a, b = own[part]["a"], own[part]["b"]
            parts.append(jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST) * scale)
        else:
            parts.append(jnp.zeros((inputs, size * columns // sum(sizes)), jnp.float32))
    tiles = shape[0] if len(shape) == 3 else 1
    return join(parts, tiles, axis=-2).reshape(shape)  # one tile of several has its axis too


def check(adapters: Any, config: ModelConfig, lora: Lora) -> None:
    """Raises `InputError` naming the first array of adapters that has not the shape it must."""
    for name, parts in shapes(config, lora).items():
        for part, expected in parts.items():
            found = np.shape(adapters.get(name, {}).get(part))
            if found != expected.shape:
                raise InputError(
                    f"Lora: {part!r} of {name!r} has the shape {found}, expected {expected.shape}:"
                    " the adapter is of another model"
                )


_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_BEFORE, _PARTS = "base_model.model.", {"a": "lora_A", "b": "lora_B"}
# Settings that change nothing here: what was trained on, and dropout.
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",  # which modules have tensors is seen in the file
    "inference_mode",
    "lora_dropout",
    "peft_version",
    "qalora_group_size",  # of use_qalora alone
    "megatron_core",  # of megatron_config alone
    "revision",
    "runtime_config",
    "task_type",
}
_READ = {"peft_type", "r", "lora_alpha", "target_modules", "bias", "init_lora_weights"}
# Values of init_lora_weights with which PEFT leaves the base as it is.
_BASE_KEPT = ("none", "true", "false", "gaussian", "orthogonal", "eva", "mica")


def load_config(folder: str | os.PathLike[str]) -> Lora:
    """Rank, alpha and targets of the adapter in a folder.

    Raises:
      InputError: there is none, or it has what is not supported.
    """
    path = expanded(folder)
    if not path.is_dir():
        raise InputError(f"adapter folder {str(path)!r} does not exist")
    if not (path / _CONFIG).is_file() or not (path / _TENSORS).is_file():
        raise InputError(f"adapter folder {str(path)!r} lacks {_CONFIG} or {_TENSORS}")
    values = read_json(path / _CONFIG)
    _check_supported(values, path / _CONFIG)
    found = {name.split(".")[-3] for name in header(path / _TENSORS) if ".lora_" in name}
    try:
        names = tuple(name for name in KNOWN if name in found)
        return Lora(values.get("r", 8), float(values.get("lora_alpha", 8)), names)
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"{path / _CONFIG}: {error}") from None


def load(folder: str | os.PathLike[str], config: ModelConfig) -> Adapter:
    """The adapter in a folder, float32 NumPy arrays.

    Raises:
      InputError: as `load_config`; it is of another model, or has a value that is not finite.
    """
    lora, path = load_config(folder), expanded(folder) / _TENSORS
    stored = header(path)
    arrays: Adapters = {
        name: {part: np.empty(leaf.shape, np.float32) for part, leaf in parts.items()}
        for name, parts in shapes(config, lora).items()
    }
    views = dict(_views(arrays, config, lora))
    _check_stored(stored, views, path)
    with open_tensors(path) as file:
        for name, view in views.items():
            view[...] = file.get_tensor(name)
            if not np.isfinite(view).all():
                raise InputError(f"{path}: tensor {name!r} has values that are NaN or infinite")
    return Adapter(lora, arrays)


def save(
    folder: str | os.PathLike[str],
    adapter: Adapter,
    config: ModelConfig,
    *,
    base: str | None = None,
) -> Path:
    """Writes an adapter as PEFT loads it, float32: all of it, or nothing.

    Args:
      base: folder or name of the model that it was trained on, for the adapter's config.

    Raises:
      InputError: it is not of this model, or `folder` exists and is not empty, or cannot be
        written.
    """
    lora = adapter.lora
    check(adapter.arrays, config, lora)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(targets(config, lora)),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    views = _views(adapter.arrays, config, lora)
    with new_folder(folder) as partial:
        write_json(partial / _CONFIG, values)
        tensors = {name: np.ascontiguousarray(view, np.float32) for name, view in views}
        write_tensors(partial / _TENSORS, tensors)
    return expanded(folder)


def _views(arrays: Adapters, config: ModelConfig, lora: Lora) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the file: its name, and a view into the arrays."""
    for name, row in targets(config, lora).items():
        for part, title in _PARTS.items():
            for layer in range(config.num_layers):
                module = row.tensor.format(layer=layer).removesuffix(".weight")
                yield f"{_BEFORE}{module}.{title}.weight", arrays[name][part][layer].T


def _check_supported(values: Mapping[str, Any], path: Path) -> None:
    if values.get("peft_type") != "LORA":
        raise InputError(
            f"{path}: peft_type = {shown(values.get('peft_type'))} is not supported, only LORA"
        )
    if values.get("bias", "none") != "none":
        raise InputError(f'{path}: bias = {shown(values["bias"])} is not supported, only "none"')
    begun = values.get("init_lora_weights")
    if str(begun).lower() not in _BASE_KEPT:
        raise InputError(
            f"{path}: init_lora_weights = {shown(begun)} is not supported, because PEFT may change"
            " the base's weights for it; save the adapter with PEFT's"
            " path_initial_model_for_weight_conversion"
        )
    for name, value in values.items():
        if value and name not in _WITHOUT_EFFECT | _READ:
            raise InputError(f"{path}: {name} = {shown(value)} is not supported")


def _check_stored(
    stored: Mapping[str, Stored], views: Mapping[str, np.ndarray], path: Path
) -> None:
    for name, tensor in stored.items():
        if name not in views:
            raise InputError(f"{path}: tensor {name!r} is not one of an adapter of this model")
        check_dtype(name, tensor)
        check_shape(name, tensor, views[name].shape)
    for name in views:
        if name not in stored:
            raise InputError(f"{path}: tensor {name!r} is missing: every layer must have it")
