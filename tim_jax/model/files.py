"""The files that models and adapters are made of: JSON, safetensors, tokenizers, whole folders.

`transformers` 5 rebuilds some tokenizers from their vocabulary alone, by the name of their class or
of the model's family: every Qwen2's, and whatever is called a LlamaTokenizer. These lose the
pre-tokenizer, normalizer and decoder of their own, and a text gets other ids, without a word. So
tokenizer.json is read here as it stands. Where a folder has none, `transformers` makes the
tokenizer of the vocabulary that there is.
"""

import importlib.util
import io
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import expanded, json_value

STORED_DTYPES = ("F32", "BF16", "F16")
_NOT_FETCHED = "a git-lfs pointer, its contents not fetched"


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
        reason = _NOT_FETCHED if _is_lfs_pointer(path) else error
        raise InputError(f"{path}: truncated or corrupt safetensors ({reason})") from None


def _is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(20).startswith(b"version https://git")


def check_dtype(name: str, tensor: Stored) -> None:
    """Raises `InputError` for a tensor whose numbers are of a kind that is not read."""
    if tensor.dtype not in STORED_DTYPES:
        raise InputError(
            f"{tensor.path}: tensor {name!r} has dtype {tensor.dtype}, only"
            f" {', '.join(STORED_DTYPES)} are supported"
        )


def check_shape(name: str, tensor: Stored, shape: tuple[int, ...]) -> None:
    """Raises `InputError` for a tensor of another shape."""
    if tensor.shape != shape:
        raise InputError(
            f"{tensor.path}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(shape)}"
        )


def write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file that everyone may read, in PyTorch's format."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # it was made private


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `InputError` if there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    values = json_value(text, str(path), checked=True)
    if not isinstance(values, dict):
        raise InputError(f"{path}: must hold a JSON object")
    return values


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a whole file, or leaves what was there, whether the process or the power ends.

    A link stays one. A device or a pipe is written to as it is.
    """
    named, path = path, Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    partial = path.with_name(f".{path.name}")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, partial)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(named)  # not the one beside it
        raise


def write_text(path: Path, text: str, *, errors: str = "strict") -> None:
    """Writes a file of UTF-8, as `write_bytes`. `errors`: as of `str.encode`."""
    write_bytes(path, text.encode("utf-8", errors))


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes an .npz file, as `write_bytes`."""
    data = io.BytesIO()
    np.savez(data, **arrays)
    write_bytes(path, data.getvalue())


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes an object, indented, as `write_text`."""
    write_text(path, json.dumps(values, indent=2) + "\n")


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A hidden folder to write into, which becomes `folder` if no error is raised, else nothing.

    Raises:
      InputError: `folder` exists and is not empty (nothing is ever overwritten), is where a volume
        is mounted (nothing can be renamed to it), or cannot be made or written.
    """
    given = expanded(folder)
    folder = Path(os.path.realpath(given))  # a link stays one
    if os.path.ismount(folder):
        raise InputError(f"{str(given)!r} is a mount point; name a new folder inside it")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise InputError(f"{str(given)!r} exists already and is not overwritten; name a new folder")
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{str(given)!r} cannot be made ({error})") from None
    try:
        yield partial
        partial.rename(folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # What writes tokenizers is in Rust, and raises a bare Exception for a full disk.
        if isinstance(error, OSError | SafetensorError) or "(os error " in str(error):
            raise InputError(f"{str(given)!r} cannot be written ({error})") from None
        raise


_WHOLE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_VOCABULARIES = (_WHOLE, "tokenizer.model", "vocab.json")
_TIKTOKEN = "tiktoken.model"  # how it splits words and which tokens are special is not in it
_FILES = (
    *_VOCABULARIES,
    _SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_READ_FROM = "_tim_jax_read_from"  # where a tokenizer keeps the files that it was read from


class _ReadFrom(NamedTuple):
    files: dict[str, bytes]  # by their names in the folder
    state: str  # of the tokenizer that they say


def load_tokenizer(folder: Path, *, vocab_size: int) -> Any:
    """The folder's `transformers` tokenizer, chat template included.

    A text begins with the bos token if `add_bos_token` of tokenizer_config.json says so, and if it
    says nothing, if tokenizer.json has it so.

    Args:
      vocab_size: of the model, whose embeddings the ids must be among.

    Raises:
      InputError: there is none, it cannot be read, its ids are drawn, or it has ids that the model
        has no embedding for.
    """
    # without them some classes quietly make a tokenizer that knows no word
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        hint = ""
        if (folder / _TIKTOKEN).is_file():
            hint = (
                f"; {_TIKTOKEN} needs the repository's own code, which is not run: make a {_WHOLE}"
            )
        raise InputError(
            f"model folder {str(folder)!r} has no tokenizer ({', '.join(_VOCABULARIES)}){hint}"
        )
    for path in (folder / name for name in _VOCABULARIES):
        if path.is_file() and _is_lfs_pointer(path):  # which `transformers` calls unreadable
            raise InputError(f"{path}: {_NOT_FETCHED}; run `git lfs pull` in its folder")
    try:
        tokenizer = _read_tokenizer(folder)
        tokenizer.encode("")  # settings of a wrong type are not looked at before
    except Exception as error:  # whatever its many backends raise on a bad file
        reason = " ".join(str(error).split())[:200]
        alone = not any((folder / name).is_file() for name in (_WHOLE, "vocab.json"))
        if alone and importlib.util.find_spec("sentencepiece") is None:
            reason = "tokenizer.model alone is read by `pip install sentencepiece protobuf`"
        raise InputError(
            f"model folder {str(folder)!r} has no usable tokenizer ({reason})"
        ) from None
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise InputError(
            f"model folder {str(folder)!r}: the tokenizer's largest id {largest} is outside the "
            f"model's vocabulary of {vocab_size}"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if dropout := getattr(getattr(backend, "model", None), "dropout", None):
        raise InputError(
            f"{folder / _WHOLE}: dropout {dropout:g} gives a text other ids each time; set it to"
            " null"
        )
    settings = _settings(folder)
    _check_added(tokenizer, settings, folder / _SETTINGS)
    _begin_as_declared(tokenizer, settings, folder / _SETTINGS)
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for pattern in _FILES
        for path in sorted(folder.glob(pattern))
    }
    setattr(tokenizer, _READ_FROM, _ReadFrom(files, _state(tokenizer)))
    return tokenizer


def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # seconds to import

    if (folder / _WHOLE).is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    # False, because the default asks the user whether to run code that the folder brings.
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / _SETTINGS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _check_added(tokenizer: Any, settings: Mapping[str, Any], where: Path) -> None:
    """Refuses tokens that the settings give other ids than they have: `transformers` does not."""
    for number, token in settings.get("added_tokens_decoder", {}).items():
        content = token["content"]
        if (found := tokenizer.convert_tokens_to_ids(content)) != int(number):
            raise InputError(f"{where}: token {content!r} is {number}, but {found} in {_WHOLE}")


def _begin_as_declared(tokenizer: Any, settings: Mapping[str, Any], where: Path) -> None:
    """Has texts begin with the bos token, or not, as the settings say: `transformers` 5 forgets.

    Raises `InputError` for one that no setting names: prompts would not have it.
    """
    around = tokenizer.encode("", add_special_tokens=True)
    if tokenizer.bos_token_id is None and around not in ([], [tokenizer.eos_token_id]):
        first = tokenizer.convert_ids_to_tokens(around[0])
        raise InputError(
            f"{where}: {_WHOLE} adds {first!r} to every text, but there is no bos_token; if texts"
            " begin with it, give it as bos_token"
        )
    declared = settings.get("add_bos_token")
    if not isinstance(declared, bool):
        return
    if declared and tokenizer.bos_token_id is None:
        raise InputError(f"{where}: add_bos_token is true, but there is no bos_token")
    if declared != (around[:1] == [tokenizer.bos_token_id]):
        tokenizer.add_bos_token = declared


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes a tokenizer so that `transformers` 4 and 5 read it.

    One that `load_tokenizer` gave is written byte for byte as it was read, unless it was changed
    since. Only names that `transformers` 4 does not know are replaced in tokenizer_config.json.
    """
    kept = getattr(tokenizer, _READ_FROM, None)
    if kept is not None and kept.state == _state(tokenizer):
        for name, contents in kept.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(contents)
    else:
        tokenizer.save_pretrained(folder)
    settings = _settings(folder)
    known = _known_to_both(settings, whole=(folder / _WHOLE).is_file())
    if known != settings:
        write_json(folder / _SETTINGS, known)


def _known_to_both(settings: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """The settings by names that `transformers` 4 knows too. `whole`: beside a tokenizer.json."""
    known = dict(settings)
    if known.get("tokenizer_class") == "TokenizersBackend":
        known["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(known.get("extra_special_tokens"), list):  # `transformers` 4 takes an object
        known["additional_special_tokens"] = known.pop("extra_special_tokens")
    # Moonlight's names code of its repository, which is not copied; tokenizer.json needs none.
    if "auto_map" in known and whole:
        del known["auto_map"]
        known["tokenizer_class"] = "PreTrainedTokenizerFast"
    return known


def _state(tokenizer: Any) -> str:
    """What a user may have changed of a tokenizer since it was read."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
    own = [getattr(backend, part, None) for part in parts]
    return repr(
        (
            len(tokenizer),
            tokenizer.added_tokens_decoder,
            tokenizer.special_tokens_map,
            tokenizer.chat_template,
            tokenizer.model_max_length,
            tokenizer.padding_side,
            [None if part is None else part.__getstate__() for part in own],
        )
    )
