"""The files that models and adapters are made of: JSON, safetensors, and folders made at once."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import expanded, json_value

STORED_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Stored:
    """What a safetensors header says of a tensor."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    whole: str = ""  # the tensor that has it as a part, if it is none itself
    part: tuple[int | slice, ...] = ()


def header(path: Path) -> dict[str, Stored]:
    """Name -> tensor, of a safetensors file. Raises `InputError` if it is truncated or corrupt."""
    with open_tensors(path) as file:
        views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return {
            name: Stored(path, view.get_dtype(), tuple(view.get_shape()))
            for name, view in views.items()
        }


def open_tensors(path: Path) -> safe_open:
    """An open safetensors file. Raises `InputError` if it is truncated or corrupt."""
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        with path.open("rb") as file:
            pointer = file.read(20).startswith(b"version https://git")
        reason = "a git-lfs pointer, its contents not fetched" if pointer else error
        raise InputError(f"{path}: truncated or corrupt safetensors ({reason})") from None


def check_dtype(name: str, tensor: Stored) -> None:
    """Raises `InputError` for a tensor whose numbers are of a kind that is not read."""
    if tensor.dtype not in STORED_DTYPES:
        raise InputError(
            f"{tensor.path}: tensor {name!r} has dtype {tensor.dtype}, only"
            f" {', '.join(STORED_DTYPES)} are supported"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `InputError` if there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    values = json_value(text, str(path), checked=True)
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold a JSON object")
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes an object, indented."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A hidden folder to write into, which becomes `folder` if no error is raised, else nothing.

    Raises:
      InputError: `folder` exists and is not empty (nothing is ever overwritten), or cannot be made
        or written.
    """
    folder = expanded(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise InputError(
            f"{str(folder)!r} exists already and is not overwritten; name a new folder"
        )
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{str(folder)!r} cannot be made ({error})") from None
    try:
        yield partial
        partial.rename(folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # What writes tokenizers is in Rust, and raises a bare Exception for a full disk.
        if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
            raise InputError(f"{str(folder)!r} cannot be written ({error})") from None
        raise
