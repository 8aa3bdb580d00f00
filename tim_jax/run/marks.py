"""What a checkpoint keeps of what is not in it, so that a run goes on from nothing else.

These are the weights that adapters are trained on, and the rows of a dataset.
"""

import os
import zlib
from collections.abc import Mapping, Sequence

from tim_jax.errors import InputError
from tim_jax.model import adapters
from tim_jax.model.weights import Params
from tim_jax.run.checkpoints import Restored
from tim_jax.tasks.base import Example

Marks = Mapping[str, int]


def of_base(base: Params | None) -> Marks:
    """The mark of the parameters that adapters are trained on."""
    return {} if base is None else {"base_crc32": adapters.fingerprint(base)}


def of_rows(train: Sequence[Example]) -> Marks:
    """The mark of what is trained on, if it is at hand; what is made row by row has none."""
    if not isinstance(train, tuple):
        return {}
    checksum = 0
    for example in train:
        checksum = zlib.crc32(f"{example.prompt!r}\n{example.answer!r}\n".encode(), checksum)
    return {"rows": len(train), "rows_crc32": checksum}


def check(restored: Restored, marks: Marks, folder: str | os.PathLike[str]) -> None:
    """Refuses a checkpoint whose `extra` has other marks; an old one has none of rows.

    Raises:
      InputError: the base or the rows are others.
    """
    before = restored.extra
    if "base_crc32" in marks and before.get("base_crc32") != marks["base_crc32"]:
        raise InputError(
            f"{folder}: the adapters of step {restored.step} were trained on other base weights"
            " than the model has now"
        )
    if "rows_crc32" not in before or "rows_crc32" not in marks:
        return
    if marks["rows_crc32"] != before["rows_crc32"]:
        had, has = before["rows"], marks["rows"]
        number = f"{has} rows where it had {had}" if has != had else f"other rows among its {has}"
        raise InputError(
            f"{folder}: the dataset to train on has changed since step {restored.step}: it has"
            f" {number}, and prompts would come in another order; restore it, or train in another"
            " run.folder"
        )
