"""Adapters in the layout of PEFT: adapter_config.json and adapter_model.safetensors.

A tensor's name is that of the matrix in the checkpoint, between "base_model.model." and
".lora_A.weight" [rank, in] or ".lora_B.weight" [out, rank], one for each layer.

What PEFT has and this library has not is refused by name: DoRA, rank-stabilised scales, biases,
modules that are trained as a whole, other ranks or scales for some matrices, adapters of some
layers only, and every setting that is unknown and not off. Dropout is not applied.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import expanded, shown
from tim_jax.model import adapters
from tim_jax.model.adapters import KNOWN, Adapter, Adapters, Lora
from tim_jax.model.config import ModelConfig
from tim_jax.model.files import (
    Stored,
    check_dtype,
    header,
    new_folder,
    open_tensors,
    read_json,
    write_json,
)

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_BEFORE, _PARTS = "base_model.model.", {"a": "lora_A", "b": "lora_B"}
# Settings that change nothing here: what was trained on, how it began, and dropout.
_WITHOUT_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "lora_dropout",
    "peft_version",
    "qalora_group_size",  # of use_qalora alone
    "megatron_core",  # of megatron_config alone
    "revision",
    "runtime_config",
    "task_type",
}
_READ = {"peft_type", "r", "lora_alpha", "target_modules", "bias"}


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
        for name, parts in adapters.shapes(config, lora).items()
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
    adapters.check(adapter.arrays, config, lora)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(adapters.targets(config, lora)),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    views = _views(adapter.arrays, config, lora)
    with new_folder(folder) as partial:
        write_json(partial / _CONFIG, values)
        tensors = {name: np.ascontiguousarray(view, np.float32) for name, view in views}
        save_file(tensors, partial / _TENSORS, metadata={"format": "pt"})
        (partial / _TENSORS).chmod(0o644)  # it was made private
    return expanded(folder)


def _views(arrays: Adapters, config: ModelConfig, lora: Lora) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of the file: its name, and a view into the arrays."""
    for name, row in adapters.targets(config, lora).items():
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
        if tensor.shape != views[name].shape:
            raise InputError(
                f"{path}: tensor {name!r} has shape {list(tensor.shape)}, expected"
                f" {list(views[name].shape)}"
            )
    for name in views:
        if name not in stored:
            raise InputError(f"{path}: tensor {name!r} is missing: every layer must have it")
