"""Files of rollouts and rows in memory, line by line: JSON lines, JSON arrays, Parquet, tables."""

from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import DEEPEST, expanded, json_value, shown

_SUFFIXES = (".jsonl", ".json", ".parquet")


class Row(NamedTuple):
    """One row of a file, and its place, such as `rollouts.jsonl, line 3`."""

    values: Any
    where: str


def read_lines(source: Any) -> Iterator[Row | InputError]:
    """Yields what a file or a sequence of mappings holds, line by line, as it stands there.

    A line that is no JSON is yielded as the `InputError` that says so.

    Raises:
      InputError: there is no such file, or it cannot be read at all.
    """
    if not isinstance(source, str | Path):
        yield from (Row(values, f"row {i}") for i, values in enumerate(source, 1))
        return
    path = expanded(source)
    if path.suffix not in _SUFFIXES:
        raise InputError(f"rollouts {path}: unknown file type; known: {', '.join(_SUFFIXES)}")
    if not path.is_file():
        raise InputError(f"rollouts {path}: no such file")
    yield from _parquet(path) if path.suffix == ".parquet" else _json(path)


def _json(path: Path) -> Iterator[Row | InputError]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"rollouts {path}: cannot be read: {error}") from error
    if path.suffix == ".json":
        values = json_value(text, f"rollouts {path}")
        several = isinstance(values, list)
        for number, value in enumerate(values if several else [values], 1):
            yield Row(value, f"{path}, row {number}" if several else f"{path}")
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield Row(json_value(line, f"{path}, line {number}"), f"{path}, line {number}")
            except InputError as error:
                yield error


def _parquet(path: Path) -> Iterator[Row]:
    if find_spec("pyarrow") is None:
        raise InputError(f"rollouts {path}: Parquet needs pyarrow: pip install 'tim-jax[math]'")
    from pyarrow import ArrowException, parquet  # an extra

    try:
        values = parquet.read_table(path).to_pylist(maps_as_pydicts="strict")
    except (OSError, ArrowException, KeyError) as error:  # KeyError: a map has a key twice
        reason = shown(f"{error}")
        raise InputError(f"rollouts {path}: not readable as Parquet: {reason}") from error
    yield from (Row(row, f"{path}, row {number}") for number, row in enumerate(values, 1))


def plain_values(values: Mapping[str, Any], *, whole: Collection[str]) -> dict[str, Any]:
    """The values of a row, arrays as lists, and None where a table has a gap.

    Args:
      values: of a line, or of a row in memory.
      whole: the keys of whole numbers: a table's column of them with gaps is one of floats.
    """
    return {key: _said(x, whole=key in whole) for key, x in _listed(values).items()}


def _said(value: Any, *, whole: bool) -> Any:
    """A value; None for a gap, such as pandas' NaN."""
    if type(value).__name__ in ("NAType", "NaTType") or value != value:
        return None
    return int(value) if whole and isinstance(value, float) and value.is_integer() else value


def _listed(value: Any, depth: int = DEEPEST) -> Any:
    """Arrays and tensors as lists, wherever they stand in a row."""
    if not depth or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {key: _listed(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(inner, depth - 1) for inner in value]
    return _listed(value.tolist(), depth - 1) if hasattr(value, "tolist") else value
