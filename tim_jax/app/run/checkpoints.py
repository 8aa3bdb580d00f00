"""Checkpoints that are complete or absent: orbax writes the arrays, a manifest seals them.

    checkpoints/40/state/...       the items, written by orbax
    checkpoints/40/manifest.json   step, extra, shapes of the leaves, size and CRC-32 of every file

A checkpoint is written under a hidden name, sealed by its manifest, and renamed: whenever a process
dies, a directory named by a step is complete. Later damage (a truncated or changed file) is
detected by the manifest, before an array is read; orbax itself would restore an array with flipped
bits without an error.

If there are several processes, each writes and reads the parts on its devices, in one folder that
all can reach; the first of them, the owner, does everything else.
"""

import errno
import json
import logging
import os
import re
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp

from tim_jax import placement
from tim_jax.common import inputs, waiting
from tim_jax.common.errors import InputError
from tim_jax.model import adapters
from tim_jax.model.adapters import Lora
from tim_jax.model.config import ModelConfig
from tim_jax.model.files import write_text
from tim_jax.model.weights import Params
from tim_jax.rl.drawing import Text
from tim_jax.tasks.base import Example

State = Mapping[str, Any]  # item name -> pytree of arrays

_SAVING, _DELETING, _DAMAGED = ".saving-", ".deleting-", "damaged-"
_FORMAT = 1
# A file that is missing, or that the disk has lost. Others, such as one of another user, are whole.
_BROKEN = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)


@dataclass(frozen=True)
class Restored:
    """The contents of a checkpoint.

    Attributes:
        step: the checkpoint's step.
        state: item name -> pytree, of the structure of `like`.
        extra: the dict of JSON values that was saved with it.
        damaged: later checkpoints that were skipped: (step, what is wrong with it).
    """

    step: int
    state: dict[str, Any]
    extra: dict[str, Any]
    damaged: tuple[tuple[int, str], ...] = ()

    def warn(self) -> None:
        """Says on standard error which checkpoints were skipped, a line each."""
        for step, what in self.damaged:
            line = f"checkpoint of step {step} is damaged: {what}; taking step {self.step}"
            print(line, file=sys.stderr)


class Checkpoints:
    """Writes checkpoints into one folder, in the background, keeping the newest `keep`.

    One job writes at a time (`folders.open_run` has the lock); unfinished files of an earlier one
    are removed on opening. Errors of a save are raised by the next `save`, `wait` or `close`.

    Args:
      owner: False in every process of a job but the first.

    Raises:
      InputError: `keep` is 0, the folder cannot be made, or its path has a "[" or a backslash.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2, owner: bool = True):
        if keep < 1:
            raise InputError(f"keep is {keep}; at least 1 checkpoint must be kept")
        self.folder = Path(folder).resolve()
        _refuse_path(self.folder)
        self._keep = keep
        self._owner = owner
        self._pending: Future[None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        logging.getLogger("absl").addFilter(_not_reraised)
        if owner:
            self._prepare()

    def _prepare(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(f"{_DELETING}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            for leftover in self.folder.glob(f"{_SAVING}*"):
                shutil.rmtree(leftover)
        except OSError as error:
            raise InputError(_cannot_write(self.folder, error.strerror or str(error))) from error

    @waiting.during("writing a checkpoint")
    def save(self, step: int, state: State, extra: Mapping[str, Any]) -> None:
        """Copies `state` off the devices and writes it in the background.

        The arrays may be donated or deleted as soon as this returns. A step that is already there
        is left as it is. `extra` is a small dict of JSON values.

        Raises:
            InputError: this or the save before could not be written (disk full, read-only).
        """
        self.wait()
        final, saving = self.folder / str(step), self.folder / f"{_SAVING}{step}"
        if not placement.led(lambda: self._begin(saving, final)):
            return
        manifest = {
            "format": _FORMAT,
            "step": int(step),
            "extra": json.loads(json.dumps(extra, allow_nan=False)),
            "leaves": {name: _describe_leaves(item) for name, item in state.items()},
        }
        items = {name: ocp.args.StandardSave({"tree": item}) for name, item in state.items()}
        try:
            self._writer.save(saving / "state", args=ocp.args.Composite(**items))
        except (OSError, ValueError) as error:
            self._give_up(saving, error)
        self._pending = self._worker.submit(self._seal, saving, final, manifest)

    def _begin(self, saving: Path, final: Path) -> bool:
        """Makes the folder to save into; False if the step is there already."""
        if final.exists():
            return False
        try:
            saving.mkdir()
        except OSError as error:
            self._give_up(saving, error)
        return True

    def _seal(self, saving: Path, final: Path, manifest: dict[str, Any]) -> None:
        try:
            self._writer.wait_until_finished()  # for the parts of all processes
            if not self._owner:
                return
            _check_merged(saving / "state", manifest["leaves"])
            files = sorted(path for path in (saving / "state").rglob("*") if path.is_file())
            manifest["files"] = {
                path.relative_to(saving).as_posix(): [path.stat().st_size, _crc(path)]
                for path in files
            }
            write_text(saving / "manifest.json", _sealed(manifest).decode())
            _sync_folder(saving)
            saving.rename(final)
            _sync_folder(self.folder)
            self._remove_old()
        except (OSError, ValueError) as error:
            self._give_up(saving, error)

    def _remove_old(self) -> None:
        for old in list_steps(self.folder)[: -self._keep]:
            doomed = self.folder / f"{_DELETING}{old}"
            # What somebody has open or has protected is in nobody's way.
            with suppress(OSError):
                (self.folder / str(old)).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _give_up(self, saving: Path, error: Exception) -> NoReturn:
        reason = _os_reason(error)
        if not self.folder.exists():
            what = f"cannot write checkpoints to {self.folder}: it was moved or removed"
            raise InputError(what) from error
        if reason is None and not saving.exists():
            reason = f"{saving.name} was removed"
        if self._owner:
            shutil.rmtree(saving, ignore_errors=True)
        if reason is None:
            raise error
        raise InputError(_cannot_write(self.folder, reason)) from error

    @waiting.during("reading a checkpoint")
    def restore(self, like: State) -> Restored | None:
        """Restores the newest good checkpoint; None if there is no checkpoint.

        Damaged ones that are newer than it are renamed to `damaged-STEP`. Otherwise as the function
        `restore`.
        """
        self.wait()
        newest = placement.led(lambda: self._newest(like))
        return None if newest is None else _read(self.folder, like, *newest)

    def _newest(self, like: State) -> tuple[dict[str, Any], list[tuple[int, str]]] | None:
        if not list_steps(self.folder):
            return None
        manifest, damaged = _newest_whole(self.folder, like, list_steps(self.folder))
        for step, _ in damaged:
            aside = self.folder / f"{_DAMAGED}{step}"
            shutil.rmtree(aside, ignore_errors=True)
            (self.folder / str(step)).rename(aside)
        return manifest, damaged

    @waiting.during("waiting for the last checkpoint to be on the disk")
    def wait(self) -> None:
        """Waits until the last save is on disk; raises its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the last save. Nothing can be saved afterwards."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            with suppress(OSError, ValueError):  # of a save that has failed, which has been raised
                self._writer.close()
            logging.getLogger("absl").removeFilter(_not_reraised)


def list_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder of them, ascending."""
    names = [path.name for path in Path(folder).iterdir()] if Path(folder).is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


@waiting.during("reading a checkpoint")
def restore(folder: str | os.PathLike[str], like: State, *, step: int | None = None) -> Restored:
    """Restores the bits that were saved, from the newest good checkpoint or from one step's.

    Args:
        like: item name -> pytree of arrays or `jax.ShapeDtypeStruct`; may name fewer items than
            were saved. Arrays come back with the sharding of its leaves (default: first device),
            NumPy arrays as NumPy arrays.
        step: that checkpoint only.

    Raises:
        InputError: nothing there; no checkpoint is whole (each is named, with its damage); a leaf
            of `like` has another name, shape or dtype than the saved one.
    """
    folder = Path(folder).resolve()
    while True:
        steps = list_steps(folder)
        if not steps:
            raise InputError(f"{folder} holds no checkpoint")
        if step is not None and step not in steps:
            raise InputError(f"{folder} holds no checkpoint of step {step}; it has {steps}")
        chosen = steps if step is None else [step]
        try:
            return _read(folder, like, *_newest_whole(folder, like, chosen))
        except Exception:
            if set(chosen) <= set(list_steps(folder)):
                raise
        # A run that goes on has removed one, because it has newer ones.


def _refuse_path(folder: Path) -> None:
    # Orbax takes the path for a pattern when it merges an item's parts, and TensorStore takes a
    # backslash for a slash: arrays would be lost.
    for character in "[\\":
        if character in str(folder):
            raise InputError(
                f"{folder}: no checkpoint can be kept under a path with a {character} in it; use"
                " a folder without one, for a run another run.folder"
            )


def _check_merged(state: Path, leaves: Mapping[str, Mapping[str, str]]) -> None:
    """Refuses items whose arrays orbax has left in parts, which it says in a warning alone."""
    for item, arrays in leaves.items():
        if arrays and not (state / item / "manifest.ocdbt").is_file():
            reason = f"orbax has not merged the arrays of {item}"
            raise InputError(_cannot_write(state.parent.parent, reason))


def _newest_whole(
    folder: Path, like: State, steps: Sequence[int]
) -> tuple[dict[str, Any], list[tuple[int, str]]]:
    """The manifest of the last of `steps` that is whole and fits, and the damaged ones after it."""
    damaged = []
    for candidate in reversed(steps):
        path = folder / str(candidate)
        try:
            manifest = _read_manifest(path)
            _verify_files(path, manifest["files"])
        except _Damage as damage:
            damaged.append((candidate, str(damage)))
            continue
        _check_fit(path, like, manifest["leaves"])
        return manifest, damaged
    list_of_damage = "; ".join(f"step {number}: {what}" for number, what in damaged)
    raise InputError(f"no checkpoint in {folder} is whole: {list_of_damage}")


class _Damage(Exception):
    """Damage of one checkpoint, described in half a line."""


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        sealed = json.loads((path / "manifest.json").read_bytes())
        body = sealed["manifest"]
        if sealed["crc32"] != zlib.crc32(_canonical(body)) or body["format"] != _FORMAT:
            raise _Damage("manifest.json was changed")
    except OSError as error:
        raise _error_of_reading(path, "manifest.json", error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _Damage("manifest.json is cut short or not ours") from error
    return body


def _verify_files(path: Path, files: Mapping[str, tuple[int, int]]) -> None:
    for name, (size, crc) in files.items():
        try:
            actual = (path / name).stat().st_size
            if actual != size:
                raise _Damage(f"{name} has {actual} bytes instead of {size}")
            if _crc(path / name) != crc:
                raise _Damage(f"{name} was changed (checksum differs)")
        except OSError as error:
            raise _error_of_reading(path, name, error) from error


def _error_of_reading(path: Path, name: str, error: OSError) -> Exception:
    """What is raised of a file that cannot be read: only one that is gone or broken is damage."""
    if error.errno in _BROKEN:
        return _Damage(f"{name}: {error.strerror}")
    return InputError(f"cannot read checkpoint {path}: {name}: {error.strerror}")


def _check_fit(path: Path, like: State, saved: Mapping[str, Mapping[str, str]]) -> None:
    for item, tree in like.items():
        if item not in saved:
            raise InputError(f"checkpoint {path} holds no {item!r}; it has {sorted(saved)}")
        wanted, present = _describe_leaves(tree), saved[item]
        for leaf in sorted({*wanted, *present}):
            here, there = wanted.get(leaf, "absent"), present.get(leaf, "absent")
            if here != there:
                raise InputError(
                    f"checkpoint {path} does not fit: {item}{leaf} is {there} in it, {here} here"
                )


def _read(
    folder: Path, like: State, manifest: dict[str, Any], damaged: Iterable[Sequence[Any]]
) -> Restored:
    """A checkpoint that is whole; `damaged` are the step of each later one and what it has."""
    state = _read_state(folder / str(manifest["step"]) / "state", like)
    skipped = tuple((step, what) for step, what in damaged)
    return Restored(manifest["step"], state, manifest["extra"], skipped)


def _read_state(path: Path, like: State) -> dict[str, Any]:
    targets = {
        name: ocp.args.StandardRestore({"tree": jax.tree.map(_make_target, tree)})
        for name, tree in like.items()
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        try:
            read = reader.restore(path, args=ocp.args.Composite(**targets))
        except (OSError, ValueError, KeyError, TypeError) as error:  # of files that are not orbax's
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise InputError(f"checkpoint {path.parent} cannot be read: {reason}") from error
    # Rebuilt on like's own structure: orbax may give other containers for empty ones.
    return {
        name: jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(read[name]["tree"]))
        for name, tree in like.items()
    }


def _not_reraised(record: logging.LogRecord) -> bool:
    """False for errors that orbax's threads log with long tracebacks; they are raised anyway."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _make_target(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _describe_leaves(tree: Any) -> dict[str, str]:
    """Leaf path -> dtype and shape, as text."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): _describe_leaf(leaf) for path, leaf in leaves}


def _describe_leaf(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return type(leaf).__name__
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _sealed(manifest: dict[str, Any]) -> bytes:
    return json.dumps({"crc32": zlib.crc32(_canonical(manifest)), "manifest": manifest}).encode()


def _sync_folder(path: Path) -> None:
    """Writes the names in a folder to the disk, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _os_reason(error: Exception) -> str | None:
    """The operating system's reason behind an error of a save; None if there is none."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # TensorStore reports a failed system call as a ValueError that ends in [os_error_code='28'].
    code = re.search(r"os_error_code='(\d+)'|OS error (\d+)", str(error))
    return os.strerror(int(code.group(1) or code.group(2))) if code else None


def _cannot_write(folder: Path, reason: str) -> str:
    return f"cannot write checkpoints to {folder}: {reason}; earlier checkpoints are unharmed"


Marks = Mapping[str, Any]  # JSON values

_SOME = 64  # prompts whose tokens are looked at, or up to twice as many


def base_mark(base: Params | None, lora: Lora | None) -> Marks:
    """The mark of the parameters that adapters are trained on, and of what they are scaled by.

    Rank and targets need none: they are the shapes of what is trained.
    """
    of_lora = {} if lora is None else {"lora_alpha": lora.alpha}
    return of_lora if base is None else {"base_crc32": adapters.fingerprint(base), **of_lora}


def model_mark(config: ModelConfig, stop_tokens: Iterable[int] | None = None) -> Marks:
    """The marks of what a model is besides its weights, and of the tokens that end a response."""
    mark = {"model": dict(inputs.leaves(config.computed))}
    return mark if stop_tokens is None else {**mark, "stop_tokens": sorted(stop_tokens)}


def rows_mark(train: Sequence[Example]) -> Marks:
    """The mark of what is trained on, if it is at hand; what is made row by row has none."""
    if not isinstance(train, tuple):
        return {}
    checksum = 0
    for example in train:
        checksum = zlib.crc32(f"{example.prompt!r}\n{example.answer!r}\n".encode(), checksum)
    return {"rows": len(train), "rows_crc32": checksum}


def prompts_mark(text: Text, train: Sequence[Example]) -> Marks:
    """The mark of the token ids of some prompts from everywhere among them."""
    rows = range(0, len(train), max(1, len(train) // _SOME))
    checksum = 0
    for row in rows:
        checksum = zlib.crc32(repr(text.encoded([train[row]], [row])).encode(), checksum)
    dated = "strftime_now" in str(text.tokenizer.chat_template)
    return {"prompts_crc32": checksum, "prompts_dated": int(dated)}


def check_marks(restored: Restored, marks: Marks, folder: str | os.PathLike[str]) -> None:
    """Refuses a checkpoint whose `extra` has other marks; an old one lacks all but the base's.

    Raises:
      InputError: the base, the adapters' alpha, the model's config, the end tokens, the rows or the
        prompts are others.
    """
    changed = next(_list_changes(restored.extra, marks, f"step {restored.step}"), None)
    if changed is not None:
        raise InputError(f"{folder}: {changed}")


def _list_changes(before: Marks, now: Marks, step: str) -> Iterator[str]:
    """What is another than at a step. What another version did not have is not compared."""
    way_out = "restore it, or train in another run.folder"

    def differs(key: str) -> bool:
        return None not in (before.get(key), now.get(key)) and before[key] != now[key]

    had, has = before.get("model", {}), json.loads(json.dumps(now.get("model", {})))
    of_model = [
        f"{name} was {had[name]!r}, now {has[name]!r}"
        for name in has
        if name in had and had[name] != has[name]
    ]
    if differs("stop_tokens"):
        ends = f"were {before['stop_tokens']}, now {now['stop_tokens']}"
        of_model.append(f"the tokens that end a response {ends}")
    if of_model:
        yield f"the model is another than at {step}: {'; '.join(of_model)}; {way_out}"
    if "base_crc32" in now and before.get("base_crc32") != now["base_crc32"]:
        yield f"the adapters of {step} were trained on other base weights than the model has now"
    if differs("lora_alpha"):
        yield (
            f"the adapters of {step} were trained with alpha = {before['lora_alpha']}, and now it"
            f" is {now['lora_alpha']}; restore it in the config, or in lora.path's"
            " adapter_config.json"
        )
    if differs("rows_crc32"):
        count = now["rows"]
        others = f"{count} rows where it had {before['rows']}"
        if count == before["rows"]:
            others = f"other rows among its {count}"
        yield (
            f"the dataset to train on has changed since {step}: it has {others}, and prompts would"
            f" come in another order; {way_out}"
        )
    if before.get("prompts_crc32") is None and now.get("prompts_dated"):
        yield (
            "the chat template prints the date (strftime_now), and the run was begun by a version"
            " of tim_jax that did not keep it: prompts would be others than before; train in"
            " another run.folder"
        )
    if differs("prompts_crc32"):
        yield (
            f"prompts have other tokens than they had at {step}: the tokenizer, its chat template"
            f" or the task has changed; {way_out}"
        )
