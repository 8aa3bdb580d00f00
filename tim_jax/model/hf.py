"""Hugging Face checkpoints in and out: a folder, or a name on the hub.

A checkpoint has config.json, safetensors weights (one file or an indexed set of shards; f32, bf16
or f16) and a tokenizer.

Left out: pickled weights, quantised weights, reading or writing from several hosts. Adapters are
read and written by `peft`.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import ml_dtypes
import numpy as np
from huggingface_hub import errors as hub_errors
from huggingface_hub import snapshot_download

from tim_jax.common import waiting
from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import expanded, shown
from tim_jax.model.config import ModelConfig
from tim_jax.model.config_file import from_hf, to_hf
from tim_jax.model.files import (
    Stored,
    check_dtype,
    check_shape,
    header,
    new_folder,
    open_tensors,
    read_json,
    save_tokenizer,
    write_json,
    write_tensors,
)
from tim_jax.model.parameters import check_params
from tim_jax.model.weights import NAMED, Params, Weight, parameter_shapes, table

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

ADAPTER = "adapter_config.json"  # as PEFT calls it
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WANTED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_UNWANTED_FILES = ["consolidated*"]  # Mistral's weights once more, under their own names
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Models that come with the package; a folder of the same name goes before them.
SHIPPED = {"tiny": Path(__file__).parents[1] / "data" / "tiny"}

# Architectures by their names on the hub, so that plans need no network: of each config.json what
# the forward computes with, and the tokens. DeepSeek-V3 has a further layer that predicts the token
# after next, which is left out, as `transformers` leaves it out.
PUBLISHED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    json.loads((Path(__file__).parents[1] / "data" / "known_models.json").read_text())
)

_EMBEDDING, _HEAD = NAMED["embed"].tensor, NAMED["head"].tensor
_BUFFERS = tuple(w.tensor.rpartition(".")[2] for w in NAMED.values() if w.kind == "buffer")
_JOINS = "eh_proj.weight"  # which only a layer that predicts further tokens has
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def resolve(folder_or_hub: str | os.PathLike, *, config_only: bool = False) -> Path:
    """The local folder of a checkpoint; a name that is no folder is downloaded from the hub.

    "tiny" is a model that comes with the package (`scripts/tiny_model.sh` made it). `config_only`
    leaves the weights on the hub. Raises `InputError` if there is no such folder and the hub does
    not give one.
    """
    name, path = str(folder_or_hub), expanded(folder_or_hub)
    if name and path.is_dir():
        return path
    if name and path.exists():
        raise InputError(f"model {name!r} is a file; give the folder that holds config.json")
    if name in SHIPPED:
        return SHIPPED[name]
    if name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
        raise InputError(f"model folder {name!r} does not exist")
    try:
        wanted = ["config.json"] if config_only else _WANTED_FILES
        with waiting.during(f"downloading the model {name} from the hub"):
            return Path(
                snapshot_download(name, allow_patterns=wanted, ignore_patterns=_UNWANTED_FILES)
            )
    except Exception as error:  # whatever the transport, the hub or its cache raise
        raise InputError(
            f"model {name!r} is neither a folder, as seen from the current one, nor reachable on"
            f" the hub ({_reason(error)})"
        ) from None


def _reason(error: Exception) -> str:
    """Why the hub gives nothing, in a line."""
    if isinstance(error, hub_errors.GatedRepoError):
        return "it is gated: ask for access on its page there, then `hf auth login` or set HF_TOKEN"
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return "no repository of that name, or a private one: then `hf auth login` or set HF_TOKEN"
    reason = " ".join(str(error).split()).removeprefix("(").removeprefix("Got: ")
    return reason.partition(" An error happened")[0].partition(". ")[0][:200]


def find_architecture(name: str) -> ModelConfig:
    """The architecture of a folder, of `PUBLISHED`, or of the config.json of a hub name alone.

    Raises:
      InputError: there is none, or it is not supported.
    """
    if expanded(name).exists():
        return load_config(name)
    if name in PUBLISHED:
        return from_hf(PUBLISHED[name], where=name)
    try:
        return load_config(name, config_only=True)
    except InputError as error:
        names = ", ".join(PUBLISHED)
        raise InputError(f"{error}; known without the hub are {names}") from error


def read_architecture(file: Path, *, option: str) -> ModelConfig:
    """The architecture of a file as config.json is one.

    Args:
      option: that named the file, for the line that says that it cannot be read.

    Raises:
      InputError: there is none, or it is not supported.
    """
    try:
        values = read_json(file)
    except InputError as error:
        raise InputError(f"{option} {error}") from error
    return from_hf(values, where=str(file))


def load_config(folder_or_hub: str | os.PathLike, *, config_only: bool = False) -> ModelConfig:
    """Reads config.json. Raises `InputError` if it is missing, malformed or not supported.

    Also if an adapter is beside it, which transformers would apply to the model where PEFT is
    installed. `config_only`: of a hub name, nothing else is downloaded.
    """
    path = resolve(folder_or_hub, config_only=config_only) / "config.json"
    if not path.is_file():
        raise InputError(f"model folder {str(path.parent)!r} has no config.json")
    if (path.parent / ADAPTER).is_file():
        raise InputError(
            f"model folder {str(path.parent)!r} has an adapter beside the model ({ADAPTER}), and"
            " nothing says whether it is to be applied: put it into a folder of its own, and name"
            " that one as lora.path if it is"
        )
    return from_hf(read_json(path), where=str(path))


def load_generation_config(folder_or_hub: str | os.PathLike) -> dict[str, Any]:
    """generation_config.json, where chat models name all their stop tokens; {} if there is none.

    Raises `InputError` if it is malformed, or `eos_token_id` is no token id and no list of them.
    """
    path = resolve(folder_or_hub) / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    stops = values.get("eos_token_id")
    for token in stops if isinstance(stops, list) else [stops]:
        if token is not None and (not isinstance(token, int) or isinstance(token, bool)):
            raise InputError(
                f"{path}: eos_token_id must be a token id or a list of them, found {shown(stops)}"
            )
    return values


@waiting.during("reading the model's weights")
def load_params(
    folder_or_hub: str | os.PathLike, config: ModelConfig, *, dtype: str = "float32"
) -> Params:
    """Reads the weights as a tree of float32 NumPy arrays, laid out as in `model/weights.py`.

    Names, shapes and dtypes are checked before anything is read; then each tensor goes straight to
    its place, so that the peak is the parameters plus one tensor. Raises `InputError` naming the
    file or tensor at fault, for a value that is not finite, and for one that would be infinite in
    `dtype`, which the model computes in.
    """
    folder = resolve(folder_or_hub)
    stored = _by_expert(_stored_tensors(folder))
    if config.tied_embeddings and _EMBEDDING not in stored and _HEAD in stored:
        # Some tools keep one name of a shared tensor, the first in the alphabet.
        stored[_EMBEDDING] = replace(stored.pop(_HEAD), whole=_HEAD, part=(slice(None),))
    _check_stored(stored, config, folder)
    params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), parameter_shapes(config))
    views = dict(_views(params, config))
    wide = {name for name, weight, _ in checkpoint_tensors(config) if weight.wide}
    for path in sorted({tensor.path for tensor in stored.values()}):
        with open_tensors(path) as file:
            for name, view in views.items():
                if stored[name].path == path:
                    view[...] = _value(file, name, stored[name])
                    _check_finite(view, name, path)
                    if name not in wide:
                        _check_range(view, name, path, dtype)
    if config.tied_embeddings and _HEAD in stored:
        _check_tied(stored, params["embed"])
    return params


@waiting.during("writing the model")
def save(
    folder: str | os.PathLike,
    params: Params,
    config: ModelConfig,
    *,
    tokenizer: Any = None,
    generation: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Writes a checkpoint that `transformers` 4.57 and 5 load: all of it, or nothing.

    The files are written to a hidden folder beside `folder`, which is then renamed. `tokenizer` is
    a `transformers` tokenizer; `generation` the contents of generation_config.json (the token ids
    of `config` if None). float32 keeps the bits; the others round to nearest even.

    Raises `InputError` if `folder` exists and is not empty (nothing is ever overwritten), for an
    unknown dtype or a value beyond its range, for parameters that do not fit `config`, or if the
    disk is full.
    """
    folder = expanded(folder)
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} cannot be saved{did_you_mean(str(dtype), DTYPES)}")
    check_params(params, config)
    generation = _token_ids(config) if generation is None else generation
    with new_folder(folder) as partial:
        write_json(partial / "config.json", to_hf(config, dtype=dtype))
        write_json(partial / "generation_config.json", generation)
        _write_weights(partial, params, config, dtype, max_shard_bytes)
        if tokenizer is not None:
            save_tokenizer(tokenizer, partial)
    return folder


# Of a generation_config.json, what is about how it was written.
_OF_THE_FILE = {"transformers_version", "_from_model_config"}


def generation_config(
    config: ModelConfig, tokenizer: Any, stop_tokens: Iterable[int], read: Mapping[str, Any]
) -> dict[str, Any]:
    """The contents of generation_config.json for a model whose responses these tokens end.

    config.json may name fewer of them: what a run was told to stop at is not in it. The rest, such
    as the defaults that an engine samples with, is as it was `read` with the model.
    """
    kept = {name: value for name, value in read.items() if name not in _OF_THE_FILE}
    own = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    known: dict[str, Any] = {name: token for name, token in own.items() if token is not None}
    if stops := sorted(map(int, stop_tokens)):
        known["eos_token_id"] = stops
    return kept | _token_ids(config) | known


def _token_ids(config: ModelConfig) -> dict[str, Any]:
    eos = to_hf(config)["eos_token_id"]
    ids = {"bos": config.bos_token_id, "eos": eos, "pad": config.pad_token_id}
    return {f"{key}_token_id": value for key, value in ids.items() if value is not None}


def checkpoint_tensors(config: ModelConfig) -> Iterator[tuple[str, Weight, tuple[int, ...]]]:
    """A checkpoint's (name, parameter, index), in the order in which it is written.

    The index is that of the layer among those of its stack, and then that of the expert, if the
    parameter is stacked so.
    """
    first, shared = 0, "shared_expert" if config.shared_scales else "shared_experts"
    for (layered, stack), rows in groupby(table(config), key=lambda w: (w.layered, w.stack)):
        together = tuple(rows)
        layers = config.stacks[stack].num_layers if layered else 1
        for layer in range(layers):
            for weight in together:
                for expert in range(config.num_experts) if weight.stacked > 1 else (0,):
                    name = weight.tensor.format(layer=first + layer, expert=expert, shared=shared)
                    yield name, weight, (layer, expert)[: weight.stacked]
        first += layers if layered else 0


def _views(params: Params, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a checkpoint, in the order in which it is written: a view into `params`."""
    for name, weight, index in checkpoint_tensors(config):
        array = weight.of(params)
        array = array[index] if weight.layered else array
        yield name, array.T if weight.transposed else array


def named_arrays(
    params: Params, config: ModelConfig, *, dtype: str = "float32"
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that `save` would write, under their names, one after the other on the host.

    Raises `InputError` for an unknown dtype, or for a value beyond its range.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown{did_you_mean(str(dtype), DTYPES)}")
    for name, weight, index in checkpoint_tensors(config):
        array = np.asarray(weight.of(params)[index])
        yield name, _converted(name, array.T if weight.transposed else array, dtype)


def _stored_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names of `config`'s tensors, and their shapes as a checkpoint stores them."""
    # a zero-stride view has a shape and needs no memory
    blank = jax.tree.map(
        lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), parameter_shapes(config)
    )
    return ((name, view.shape) for name, view in _views(blank, config))


def _stored_tensors(folder: Path) -> dict[str, Stored]:
    """Headers of the single file, else of the shards that the index names."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        return header(single)
    if not index.is_file():
        raise InputError(
            f"model folder {str(folder)!r} has neither {_SINGLE} nor {_INDEX}; pickled weights are"
            " not read, nor downloaded from the hub"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: 'weight_map' is missing or empty")
    stored: dict[str, Stored] = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise InputError(f"{index}: names {shard!r}, which is not in the folder")
        found = header(folder / shard)
        # Another shard may have a copy; the index says which is read.
        stored |= {name: x for name, x in found.items() if weight_map.get(name, shard) == shard}
    for name, shard in weight_map.items():
        if name not in stored or stored[name].path.name != shard:
            raise InputError(f"{index}: tensor {name!r} is not in {shard!r}")
    return stored


def _by_expert(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """`stored`, with every expert's own tensors in place of those that hold all of a layer's."""
    return {
        own: tensor
        for name, given in stored.items()
        for own, tensor in _of_each_expert(name, given) or ((name, given),)
    }


def _of_each_expert(name: str, fused: Stored) -> list[tuple[str, Stored]]:
    """The tensors of single experts in one of all of a layer's, as transformers 5 can write it.

    `mlp.experts.gate_up_proj` is [experts, 2 x width, hidden], `down_proj` [experts, hidden,
    width]. Empty for every other tensor.
    """
    module, _, projection = name.rpartition(".")
    parts = _FUSED.get(projection)
    if parts is None or not module.endswith(".mlp.experts") or len(fused.shape) != 3:
        return []
    count, rows, columns = fused.shape
    size = rows // len(parts)
    return [
        (
            f"{module}.{expert}.{part}.weight",
            Stored(fused.path, fused.dtype, (size, columns), name, (expert, slice(start, stop))),
        )
        for expert in range(count)
        for index, part in enumerate(parts)
        for start, stop in [(index * size, (index + 1) * size)]
    ]


def _value(file: Any, name: str, tensor: Stored) -> np.ndarray:
    """A tensor of an open file."""
    return file.get_slice(tensor.whole)[tensor.part] if tensor.whole else file.get_tensor(name)


def _check_stored(stored: dict[str, Stored], config: ModelConfig, folder: Path) -> None:
    expected = set()
    # DeepSeek's layer after the last predicts the token after next; `transformers` too passes it by
    further = f"model.layers.{config.num_layers}.{_JOINS}"
    for name, shape in _stored_shapes(config):  # one by one: a config may name a billion layers
        expected.add(name)
        if name not in stored:
            hint = " (tie_word_embeddings is false)" if name == _HEAD else ""
            raise InputError(f"{folder}: tensor {name!r} is missing{hint}")
        check_shape(name, stored[name], shape)
    for name, tensor in stored.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue  # a buffer that old checkpoints carry; it follows from config.json
        if further in stored and name.startswith(further.removesuffix(_JOINS)):
            continue
        if name not in expected and not (config.tied_embeddings and name == _HEAD):
            raise InputError(f"{tensor.path}: tensor {name!r} is not one of this architecture's")
        check_dtype(name, tensor)


def _check_finite(view: np.ndarray, name: str, path: Path) -> None:
    # The extremes are not finite if one value is not, and need no memory.
    if np.isfinite(view.min()) and np.isfinite(view.max()):
        return
    wrong = np.count_nonzero(~np.isfinite(view))
    raise InputError(
        f"{path}: tensor {name!r} has {wrong} of {view.size} values that are NaN or infinite"
    )


def _check_range(view: np.ndarray, name: str, path: Path, dtype: str) -> None:
    largest = max(view.min(), view.max(), key=abs)
    with np.errstate(over="ignore"):
        fitting = [one for one, cast in DTYPES.items() if np.isfinite(largest.astype(cast))]
        if dtype in fitting:
            return
        beyond = np.count_nonzero(~np.isfinite(view.astype(DTYPES[dtype])))
    raise InputError(
        f"{path}: tensor {name!r} has {beyond} of {view.size} values that would be infinite in"
        f" {dtype}, such as {largest:g}; compute in {' or '.join(fitting)}"
    )


def _check_tied(stored: dict[str, Stored], embed: np.ndarray) -> None:
    path = stored[_HEAD].path
    with open_tensors(path) as file:
        head = file.get_tensor(_HEAD)
    if head.shape != embed.shape or not np.array_equal(head.astype(np.float32), embed):
        raise InputError(
            f"{path}: tie_word_embeddings is true, but {_HEAD!r} differs from the embedding"
        )


def _write_weights(
    folder: Path, params: Params, config: ModelConfig, dtype: str, max_shard_bytes: int
) -> None:
    shards: list[list[tuple[str, np.ndarray]]] = [[]]
    total = filled = 0
    for name, view in _views(jax.tree.map(np.asarray, params), config):
        size = view.size * np.dtype(DTYPES[_stored_dtype(name, dtype)]).itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, view))
        filled, total = filled + size, total + size
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = _SINGLE if len(shards) == 1 else file
        tensors = {name: _converted(name, view, dtype) for name, view in shard}
        write_tensors(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(folder / _INDEX, index)


def _stored_dtype(name: str, dtype: str) -> str:
    """float32 of a buffer, as engines have it: a router's rounded bias chooses other experts."""
    return "float32" if name.endswith(_BUFFERS) else dtype


def _converted(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(array.astype(DTYPES[_stored_dtype(name, dtype)]))
    if not np.array_equal(np.isfinite(converted), np.isfinite(array)):
        raise InputError(f"tensor {name!r} has values beyond the range of {dtype}; save as float32")
    return converted
