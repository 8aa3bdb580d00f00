"""Rows of a dataset from where it lies: JSON, JSON lines, Parquet, a folder of them, or the hub."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tim_jax.errors import InputError

SUFFIXES = (".jsonl", ".json", ".parquet")
SAVED = ("dataset_dict.json", "dataset_info.json")  # written by `datasets`' save_to_disk
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and where it was: `train.jsonl, line 3`."""

    values: Mapping[str, Any]
    where: str


def read_rows(source: str, *, split: str = "train", subset: str | None = None) -> list[Row]:
    """Returns the rows of `split` of `source`, in their order.

    Args:
      source: a `.jsonl`, `.json` (one array, or lines) or `.parquet` file, which is all of it one
        split; a folder with such files, those of a split named by it (`train.jsonl`,
        `data/train-00000-of-00002.parquet`); a folder saved by `datasets`; or a hub name.
      split: ignored for a file.
      subset: configuration of a hub dataset (`main` of openai/gsm8k).

    Raises:
      InputError: if there is no such file, folder, split or hub dataset, if a package is missing
        that it needs, for a row that cannot be read (file and line), and if there are no rows.
    """
    path = Path(source).expanduser()
    if path.is_file():
        rows = _file(path)
    elif path.is_dir():
        rows = _folder(path, split)
    elif path.suffix in SUFFIXES or HUB_NAME.fullmatch(source) is None:
        raise InputError(f"dataset {source!r}: no such file or folder")
    else:
        rows = _hub(source, split, subset)
    rows = list(rows)
    if not rows:
        raise InputError(f"dataset {source!r} is empty (split {split!r} has no rows)")
    return rows


def _file(path: Path) -> Iterator[Row]:
    if path.suffix not in SUFFIXES:
        raise InputError(f"dataset {str(path)!r}: unknown file type; known: {', '.join(SUFFIXES)}")
    return _parquet(path) if path.suffix == ".parquet" else _json(path)


def _json(path: Path) -> Iterator[Row]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"dataset {path}: cannot be read: {error}") from error
    if text.lstrip().startswith("[") and path.suffix == ".json":
        return _array(path, text)
    # Not splitlines(): U+2028 and its like may stand unescaped inside a JSON string.
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return (_line(path, number, line) for number, line in lines)


def _array(path: Path, text: str) -> Iterator[Row]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InputError(f"dataset {path}: not JSON: {error}") from error
    for number, value in enumerate(values, 1):
        yield _row(value, f"{path}, row {number}")


def _line(path: Path, number: int, line: str) -> Row:
    where = f"{path}, line {number}"
    try:
        return _row(json.loads(line), where)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"dataset {where}: not JSON: {error}") from error


def _row(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        raise InputError(f"dataset {where}: expected an object, got {type(value).__name__}")
    return Row(value, where)


def _parquet(path: Path) -> Iterator[Row]:
    if find_spec("pyarrow") is None:
        raise InputError(f"dataset {path}: Parquet needs pyarrow: pip install 'tim-jax[math]'")
    from pyarrow import ArrowException, parquet  # an extra

    try:
        values = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise InputError(
            f"dataset {path}: not readable as Parquet: {_first_line(error)}"
        ) from error
    return (_row(value, f"{path}, row {number}") for number, value in enumerate(values, 1))


def _folder(path: Path, split: str) -> Iterable[Row]:
    if any((path / name).is_file() for name in SAVED):
        return _saved(path, split)
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    named = re.compile(rf"{re.escape(split)}([-_.].*)?")
    chosen = [file for file in files if named.fullmatch(file.stem)]
    if not chosen:
        found = ", ".join(str(file.relative_to(path)) for file in files[:10]) or "no data files"
        raise InputError(f"dataset {str(path)!r}: no file for split {split!r}; found: {found}")
    if len({file.suffix for file in chosen}) > 1:
        raise InputError(
            f"dataset {str(path)!r}: files of several types for split {split!r}:"
            f" {', '.join(file.name for file in chosen[:10])}; name one file"
        )
    return (row for file in chosen for row in _file(file))


def _saved(path: Path, split: str) -> Iterator[Row]:
    _need_datasets(str(path))
    import datasets  # an extra

    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:
        raise InputError(f"dataset {str(path)!r}: {_first_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            has = ", ".join(map(str, found))
            raise InputError(f"dataset {str(path)!r}: no split {split!r}; it has: {has}")
        found = found[split]
    return (_row(row, f"{path}, row {i}") for i, row in enumerate(found, 1))


def _hub(name: str, split: str, subset: str | None) -> Iterator[Row]:
    _need_datasets(name)
    import datasets  # an extra

    try:
        found = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the hub's clients raise dozens of types
        raise InputError(
            f"dataset {name!r}: no such file or folder here, and the hub has no split {split!r} of"
            f" it to give: {type(error).__name__}: {_first_line(error)}"
        ) from error
    return (_row(row, f"{name} {split}, row {i}") for i, row in enumerate(found, 1))


def _need_datasets(source: str) -> None:
    if find_spec("datasets") is None:
        raise InputError(f"dataset {source!r} needs `datasets`: pip install 'tim-jax[math]'")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
