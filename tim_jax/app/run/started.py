"""When a run or a study began, which is what the clock of a chat template says in all of it.

Some templates print the date (`strftime_now`). A run that is resumed on another day, the arms of a
study that takes days, and an evaluation of a run all have the prompts of the first day.
"""

from datetime import datetime
from pathlib import Path

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import shown
from tim_jax.model.files import read_json, write_json

FILE = "started.json"
_KEY = "time"


def record(folder: Path, time: str | None = None) -> None:
    """Writes down that the run or study in a folder began now, or at `time`, if nothing says when.

    Raises:
      InputError: it cannot be written.
    """
    path = folder / FILE
    if path.exists():
        return
    began = datetime.now().isoformat(timespec="seconds") if time is None else time
    partial = folder / f".{FILE}"
    try:
        write_json(partial, {_KEY: began})
        partial.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def time_of(folder: Path) -> str | None:
    """When it began, local time as in ISO 8601; None if nothing says so.

    Raises:
      InputError: the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    time = read_json(path).get(_KEY)
    try:
        return datetime.fromisoformat(str(time)).isoformat()
    except ValueError:
        raise InputError(
            f'{path}: "{_KEY}" must be a date and time such as "2026-03-01T12:00:00", found'
            f" {shown(time)}"
        ) from None
