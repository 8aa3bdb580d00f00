"""Rows of a dataset: of JSON, JSON lines or Parquet files, of a folder of them, or of the hub.

What the rows mean is a matter of `tim_jax.tasks.dataset`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import expanded, json_value
from tim_jax.tasks.base import first_line

SUFFIXES = (".jsonl", ".json", ".parquet")
SAVED = ("dataset_dict.json", "dataset_info.json")  # written by `datasets`' save_to_disk
PART = re.compile(r"[-_.](part)?(?P<number>\d+)(-of-(?P<count>\d+)(-[0-9a-f]+)?)?$")  # of a split
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and its place, such as `train.jsonl, line 3`."""

    values: Mapping[str, Any]
    where: str


def read_rows(source: str, *, split: str = "train", subset: str | None = None) -> list[Row]:
    """Returns the rows of `split` of `source`, in their order.

    Args:
      source: a `.jsonl`, `.json` (one array, or lines) or `.parquet` file, which is all of it one
        split; a folder with such files, a split's named by it (`train.jsonl`, or in parts
        `data/train-00000-of-00002.parquet`); a folder saved by `datasets`; or a hub name.
      split: ignored for a file.
      subset: configuration of a hub dataset (`main` of openai/gsm8k), or the name of a folder in
        the folder or of itself; ignored for a file and for what `datasets` saved.

    Raises:
      InputError: if there is no such file, folder, split, subset or hub dataset, or several that
        fit, if a package is missing that it needs, for a row that cannot be read (file and line),
        and if there are no rows.
    """
    with waiting.during(f"reading the dataset {source}"):
        rows = list(_rows(source, split, subset))
    if not rows:
        raise InputError(f"dataset {source!r} is empty (split {split!r} has no rows)")
    return rows


def _rows(source: str, split: str, subset: str | None) -> Iterable[Row]:
    path = expanded(source)
    if not source:
        raise InputError("dataset '': name a file, a folder or a data set of the hub")
    if path.is_file():
        return _file(path)
    if path.is_dir():
        return _folder(path, split, subset)
    if path.suffix in SUFFIXES or HUB_NAME.fullmatch(source) is None:
        raise InputError(f"dataset {source!r}: no such file or folder")
    return _hub(source, split, subset)


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
        for number, value in enumerate(json_value(text, f"dataset {path}"), 1):
            yield _row(value, f"{path}, row {number}")
        return
    # Not splitlines(): U+2028 and its like may stand unescaped inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _row(json_value(line, f"dataset {where}"), where)


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
        raise InputError(f"dataset {path}: not readable as Parquet: {first_line(error)}") from error
    return (_row(value, f"{path}, row {number}") for number, value in enumerate(values, 1))


def _folder(path: Path, split: str, subset: str | None) -> Iterable[Row]:
    if any((path / name).is_file() for name in SAVED):
        return _saved(path, split)
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if subset is not None:
        files = _of_subset(path, files, subset)
    named = re.compile(rf"{re.escape(split)}([-_.].*)?")
    chosen = [file for file in files if named.fullmatch(file.stem)]
    if not chosen:
        names = ", ".join(str(file.relative_to(path)) for file in files[:10]) or "no data files"
        raise InputError(f"dataset {str(path)!r}: no file for split {split!r}; found: {names}")
    if len({file.suffix for file in chosen}) > 1:
        raise InputError(
            f"dataset {str(path)!r}: files of several types for split {split!r}:"
            f" {', '.join(file.name for file in chosen[:10])}; name one file"
        )
    return (row for file in _of_split(path, chosen, split) for row in _file(file))


def _of_subset(path: Path, files: Sequence[Path], subset: str) -> list[Path]:
    """The files below a folder of this name; all of a folder that has no others."""
    own = path.resolve().name
    chosen = [file for file in files if subset in (own, *file.relative_to(path).parent.parts)]
    if not chosen and {file.parent for file in files} <= {path, path / "data"}:
        return [*files]
    if not chosen:
        raise InputError(
            f"dataset {str(path)!r}: no folder {subset!r} (task.subset, task.eval_subset) has data"
            f" files; folders that have some: {_folders(path, files)}; name one of them, or none"
        )
    return chosen


def _of_split(path: Path, files: Sequence[Path], split: str) -> Sequence[Path]:
    """Of files whose names begin with a split's: the one that is named so, else its parts."""
    where = f"dataset {str(path)!r}"
    if len({file.parent for file in files}) > 1:
        raise InputError(
            f"{where}: files for split {split!r} in several folders: {_folders(path, files)};"
            " name one folder as task.subset (task.eval_subset for task.eval_path), or one file"
        )
    whole = [file for file in files if file.stem == split]
    parts = [file for file in files if PART.sub("", file.stem) == split]
    if whole:
        return whole
    if not parts and len({PART.sub("", file.stem) for file in files}) > 1:
        names = ", ".join(file.name for file in files[:10])
        raise InputError(f"{where}: several sets for split {split!r}: {names}; name one file")
    _check_parts(parts or files, f"{where}: split {split!r}")
    return parts or files


def _check_parts(files: Sequence[Path], where: str) -> None:
    """Refuses files whose names say that a part is missing or that they are of several sets."""
    parts = [part for file in files if (part := PART.search(file.stem)) and part["count"]]
    if not parts:
        return
    count, numbers = int(parts[0]["count"]), {int(part["number"]) for part in parts}
    one_set = len(numbers) == len(files) and {int(part["count"]) for part in parts} == {count}
    first = int(count in numbers)  # some count from 1
    missing = [*islice((i for i in range(first, first + count) if i not in numbers), 10)]
    names = ", ".join(file.name for file in files[:10])
    if not one_set or (len(files) != count and not missing):
        raise InputError(f"{where} has files of several sets of parts: {names}; leave one set")
    if missing:
        raise InputError(
            f"{where} lacks the parts {', '.join(map(str, missing))} of {count}; found: {names};"
            " fetch what is missing, or name one file"
        )


def _folders(path: Path, files: Sequence[Path]) -> str:
    folders = dict.fromkeys(str(file.parent.relative_to(path)) for file in files)
    return ", ".join([*folders][:10])


def _saved(path: Path, split: str) -> Iterator[Row]:
    datasets = _datasets(str(path))
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:
        raise InputError(f"dataset {str(path)!r}: {first_line(error)}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            has = ", ".join(map(str, dataset))
            raise InputError(f"dataset {str(path)!r}: no split {split!r}; it has: {has}")
        dataset = dataset[split]
    return (_row(row, f"{path}, row {i}") for i, row in enumerate(dataset, 1))


def _hub(name: str, split: str, subset: str | None) -> Iterator[Row]:
    datasets = _datasets(name)
    try:
        dataset = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the hub's clients raise dozens of types
        raise InputError(
            f"dataset {name!r}: no such file or folder here, and the hub has no split {split!r} of"
            f" it to give: {type(error).__name__}: {first_line(error)}"
        ) from error
    return (_row(row, f"{name} {split}, row {i}") for i, row in enumerate(dataset, 1))


def _datasets(source: str) -> Any:
    if find_spec("datasets") is None:
        raise InputError(f"dataset {source!r} needs `datasets`: pip install 'tim-jax[math]'")
    import datasets  # an extra

    return datasets
