"""What a checkpoint keeps of what is not in it, so that a run goes on from nothing else.

These are the weights that adapters are trained on, the rows of a dataset, and what prompts become:
they depend on the files of the tokenizer, the chat template and the day.
"""

import os
import zlib
from collections.abc import Mapping, Sequence

from tim_jax.app.run.checkpoints import Restored
from tim_jax.common.errors import InputError
from tim_jax.model import adapters
from tim_jax.model.weights import Params
from tim_jax.rl.drawing import Text
from tim_jax.tasks.base import Example

Marks = Mapping[str, int]

_SOME = 64  # prompts whose tokens are looked at, or up to twice as many


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


def of_prompts(text: Text, train: Sequence[Example]) -> Marks:
    """The mark of the token ids of some prompts from everywhere among them."""
    rows = range(0, len(train), max(1, len(train) // _SOME))
    checksum = 0
    for row in rows:
        checksum = zlib.crc32(repr(text.encoded([train[row]], [row])).encode(), checksum)
    return {"prompts_crc32": checksum, "prompts_dated": int(_reads_clock(text))}


def _reads_clock(text: Text) -> bool:
    return "strftime_now" in str(text.tokenizer.chat_template)


def check(restored: Restored, marks: Marks, folder: str | os.PathLike[str]) -> None:
    """Refuses a checkpoint whose `extra` has other marks; an old one has none of rows and prompts.

    Raises:
      InputError: the base, the rows or the prompts are others.
    """
    before = restored.extra
    if "base_crc32" in marks and before.get("base_crc32") != marks["base_crc32"]:
        raise InputError(
            f"{folder}: the adapters of step {restored.step} were trained on other base weights"
            " than the model has now"
        )
    if "rows_crc32" in before and "rows_crc32" in marks:
        _check_rows(restored, marks, folder)
    _check_prompts(restored, marks, folder)


def _check_rows(restored: Restored, marks: Marks, folder: str | os.PathLike[str]) -> None:
    before = restored.extra
    if marks["rows_crc32"] != before["rows_crc32"]:
        had, has = before["rows"], marks["rows"]
        number = f"{has} rows where it had {had}" if has != had else f"other rows among its {has}"
        raise InputError(
            f"{folder}: the dataset to train on has changed since step {restored.step}: it has"
            f" {number}, and prompts would come in another order; restore it, or train in another"
            " run.folder"
        )


def _check_prompts(restored: Restored, marks: Marks, folder: str | os.PathLike[str]) -> None:
    now, before = marks.get("prompts_crc32"), restored.extra.get("prompts_crc32")
    if before is None and marks.get("prompts_dated"):
        raise InputError(
            f"{folder}: the chat template prints the date (strftime_now), and the run was begun by"
            " a version of tim_jax that did not keep it: prompts would be others than before;"
            " train in another run.folder"
        )
    if None not in (now, before) and now != before:
        raise InputError(
            f"{folder}: prompts have other tokens than they had at step {restored.step}: the"
            " tokenizer, its chat template or the task has changed; restore it, or train in another"
            " run.folder"
        )
