"""Studies from their files and from their folders, whichever kind they are."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tim_jax.app.config import toml
from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.instruments.study.arms import Arm
from tim_jax.instruments.study.definition import Study
from tim_jax.instruments.study.measurement import GradientStudy
from tim_jax.instruments.study.running import Stated, read_record

KINDS: Mapping[str, type[Study] | type[GradientStudy]] = MappingProxyType(
    {"training": Study, "gradient": GradientStudy}
)

_STUDY = TypeAdapter(dict[str, Any])
_ARMS = TypeAdapter(tuple[Arm, ...])
_SEEDS = TypeAdapter(tuple[int, ...])


def read(path: Path) -> Study | GradientStudy:
    """A study's file.

    Raises:
        InputError: it cannot be read; a key or a value is wrong. One line.
    """
    return _checked({"name": path.stem, **toml.read_toml(path)}, str(path))


def read_stated(folder: Path) -> Stated:
    """The study of a folder, as it was stated.

    Raises:
        InputError: there is none, it is damaged, or another version of the library wrote it.
    """
    record, source = read_record(folder), f"{folder / 'study.json'}"
    try:
        study = _checked(_STUDY.validate_python(record.get("study")), source)
        arms = _ARMS.validate_python(record.get("arms"))
        seeds = _SEEDS.validate_python(record.get("seeds"))
    except (ValidationError, InputError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise InputError(f"{source} is of another version of this library: {first}") from error
    return Stated(study, arms, folder, seeds)


def _checked(data: Mapping[str, Any], source: str) -> Study | GradientStudy:
    kind = str(data.get("kind", "training"))
    if kind not in KINDS:
        raise InputError(f"{source}: kind = {kind!r}: unknown{did_you_mean(kind, KINDS)}")
    return toml.validated(KINDS[kind], data, source=source)
