"""The run folder: one directory with everything about a run, which also makes it resumable.

    config.toml     the configuration
    started.json    when it began: the clock of chat templates
    metrics.jsonl   one line a step: numbers that do not depend on interruptions of the run
    timing.jsonl    one line a step: wall-clock numbers, which do
    samples.jsonl   completions
    checkpoints/    see checkpoints.py

A checkpoint records how long the three .jsonl files were when it was saved. Resuming cuts them back
to that length, so that no line is missing and none is there twice.

If there are several processes, all of them save and restore, but only process 0 locks the folder
and writes lines.
"""

import fcntl
import json
import os
import secrets
import shutil
import socket
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import tomli_w

from tim_jax import placement
from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.run import checkpoints
from tim_jax.app.run.checkpoints import Checkpoints, Restored, State
from tim_jax.app.run.loggers import JsonLines, check_offset
from tim_jax.common.errors import InputError, writing
from tim_jax.common.inputs import leaves, shown
from tim_jax.model import adapters
from tim_jax.model.adapters import Lora
from tim_jax.model.config import ModelConfig
from tim_jax.model.files import read_json, write_arrays, write_bytes, write_json, write_text
from tim_jax.model.weights import Params
from tim_jax.rl.types import TrainState

STARTED = "started.json"
_APPEARS = 20.0  # seconds in which a file of process 0 shows on another machine
_TIME = "time"


def record_start(folder: Path, time: str | None = None) -> None:
    """Writes down that the run or study in a folder began now, or at `time`, if nothing says when.

    Raises:
      InputError: it cannot be written.
    """
    path = folder / STARTED
    if path.exists():
        return
    began = datetime.now().isoformat(timespec="seconds") if time is None else time
    with writing(path):
        write_json(path, {_TIME: began})


def read_start(folder: Path) -> str | None:
    """When it began, local time as in ISO 8601; None if nothing says so.

    Raises:
      InputError: the file is damaged.
    """
    path = folder / STARTED
    if not path.exists():
        return None
    time = read_json(path).get(_TIME)
    try:
        return datetime.fromisoformat(str(time)).isoformat()
    except ValueError:
        raise InputError(
            f'{path}: "{_TIME}" must be a date and time such as "2026-03-01T12:00:00", found'
            f" {shown(time)}"
        ) from None


def start_time(folder: Path) -> datetime:
    """When a run began, as process 0 reads it in its folder; now if nothing says so."""
    began = placement.led(partial(read_start, folder))
    return datetime.now() if began is None else datetime.fromisoformat(began)


LINE_FILES = ("metrics", "timing", "samples")


class Run:
    """A run folder, locked by this process or, if `lock` is None, by process 0. A context manager.

    Made by `open_run`.

    In every step the lines are written first, then the checkpoint. A folder that already has
    checkpoints must be restored before anything is written.

    Attributes:
        resumed: whether the folder had this run before.
        changed: in what its config differs from the one before, as far as this process knows.
    """

    def __init__(
        self,
        folder: Path,
        *,
        lock: "Lock | None",
        keep: int,
        resumed: bool,
        changed: Sequence["Difference"] = (),
        config: str = "",
        new: bool = False,
    ):
        self.folder = folder.absolute()  # code of the user's may change the current one
        self._given = folder  # as messages name it
        self.resumed = resumed
        self.changed = tuple(changed)
        self._config = config
        self._new = new  # the folder was not there before
        self._lock = lock
        kept = self.folder / "checkpoints"
        self._checkpoints = Checkpoints(kept, keep=keep, owner=lock is not None)
        self._lines: dict[str, JsonLines] = {}
        if not checkpoints.list_steps(kept):
            self._open_lines({})

    def restore(self, like: State, marks: checkpoints.Marks | None = None) -> Restored | None:
        """Restores the newest good checkpoint and cuts the line files back to it.

        Returns None for a run without a checkpoint. Damaged ones that were skipped are named in the
        result. A checkpoint that is refused leaves the lines and config.toml as they are.

        Args:
            like: see `checkpoints.restore`.
            marks: what the checkpoint's `extra` must have; see `checkpoints.check_marks`.

        Raises:
            InputError: as `checkpoints.restore` and `checkpoints.check_marks`.
        """
        restored = self._checkpoints.restore(like)
        if restored is None:
            return None
        found = replace(restored, extra=restored.extra["extra"])
        checkpoints.check_marks(found, marks or {}, self._given)
        sizes = restored.extra["lines"]
        if self._lock is not None:
            for name in LINE_FILES:
                check_offset(self.folder / f"{name}.jsonl", sizes.get(name, 0))
            _write_config(self.folder, self._config)
        self._open_lines(sizes)
        self.metrics.last_step = restored.step
        return found

    @property
    def metrics(self) -> JsonLines:
        """metrics.jsonl: what a step computed, one line a step."""
        return self._line_file("metrics")

    @property
    def timing(self) -> JsonLines:
        """timing.jsonl: seconds and rates, one line a step."""
        return self._line_file("timing")

    @property
    def samples(self) -> JsonLines:
        """samples.jsonl: completions, any number of lines a step."""
        return self._line_file("samples")

    def save(self, step: int, state: State, extra: Mapping[str, Any] | None = None) -> None:
        """Saves a checkpoint in the background; see `Checkpoints.save` for what may be raised.

        Raises:
            ValueError: the metrics of `step` have not been written yet.
        """
        if 0 < step != self.metrics.last_step:
            raise ValueError(
                f"write the metrics of step {step} before its checkpoint; the last line is of step"
                f" {self.metrics.last_step}"
            )
        self._new = False  # it has something to keep, such as a model after its warm start
        for name in LINE_FILES:
            self._line_file(name).sync()
        sizes = {name: self._line_file(name).size() for name in LINE_FILES}
        self._checkpoints.save(step, state, {"lines": sizes, "extra": dict(extra or {})})

    def save_arrays(self, name: str, arrays: Mapping[str, Any]) -> Path:
        """Writes arrays as `model.files.write_arrays`; returns the path, as messages name it.

        Raises:
            InputError: it cannot be written.
        """
        if self._lock is not None:
            path = self.folder / name
            with writing(path):
                write_arrays(path, arrays)
        return self._given / name

    def wait(self) -> None:
        """Returns when the last save is on disk."""
        self._checkpoints.wait()

    def close(self) -> None:
        """Waits for the last save, closes the files and unlocks the folder."""
        try:
            self._checkpoints.close()
        finally:
            for lines in self._lines.values():
                lines.close()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        refused = self._new and isinstance(error, InputError) and not self.metrics.size()
        try:
            self.close()
        except InputError:
            # A full disk fails again here; the first error is the one to show.
            if error is None:
                raise
        if refused:  # before the first line: a run that has done nothing leaves nothing
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open_lines(self, sizes: Mapping[str, int]) -> None:
        for name in LINE_FILES:
            if self._lock is None:
                self._lines[name] = JsonLines(os.devnull)
            else:
                path = self.folder / f"{name}.jsonl"
                self._lines[name] = JsonLines(path, offset=sizes.get(name, 0))

    def _line_file(self, name: str) -> JsonLines:
        if name not in self._lines:
            raise ValueError(f"{self.folder} holds a run: call restore before writing to it")
        return self._lines[name]


def open_run(
    folder: str | os.PathLike[str],
    config: str,
    *,
    may_change: Iterable[str] = (),
    keep: int = 2,
) -> Run:
    """Opens a run folder, new or from before, for this process, or for process 0 of several.

    Args:
        config: the run's configuration as TOML text, kept in the folder as config.toml.
        may_change: keys ("steps") and tables ("eval") in which a resumed run may differ.
        keep: how many checkpoints stay.

    Raises:
        InputError: another process uses the folder; it has a run with another config (the keys are
            named), or one whose checkpoints were removed, other files or a link that leads out of
            it; it cannot be written; of several processes, one does not see it.
    """
    folder, opened = Path(folder), []
    new = not folder.exists()
    if jax.process_count() > 1:
        _check_shared(folder, new=new)

    def lock_and_open() -> bool:
        opened.append(_open_locked(folder, config, tuple(may_change), keep=keep, new=new))
        return opened[0].resumed

    resumed = placement.led(lock_and_open)
    return opened[0] if opened else Run(folder, lock=None, keep=keep, resumed=resumed)


def _check_shared(folder: Path, *, new: bool) -> None:
    """Refuses a folder that other processes do not have as process 0 has it.

    Else all would wait for each other's parts of the first checkpoint, and then fail. The file that
    they look for has a new name, so that no cache of a file system can know it as missing.
    """

    def left() -> list[str]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            token = folder / f".shared-{secrets.token_hex(8)}"
            token.touch(exist_ok=False)
        except OSError as error:
            raise InputError(f"cannot use the run folder {folder}: {error.strerror}") from error
        return [token.name, str(folder.absolute())]

    name, of_leader = placement.led(left)
    try:
        seen = placement.texts("" if _wait_for(folder / name) else str(folder.absolute()))
    finally:
        if placement.leads():
            (folder / name).unlink(missing_ok=True)
    blind = next((number for number, where in enumerate(seen) if where), None)
    if blind is not None:
        if new and placement.leads():
            with suppress(OSError):
                folder.rmdir()
        raise InputError(
            f"run.folder = {str(folder)!r}: process {blind} does not see in {seen[blind]} what"
            f" process 0 wrote to {of_leader}; it must be on a file system that all processes share"
        )


def _wait_for(path: Path) -> bool:
    """Whether a file is there, or soon: another machine's write may take some seconds to show."""
    until = time.monotonic() + _APPEARS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
        # NFS may know the folder itself as missing, until one above it is opened anew.
        for above in reversed(path.parents):
            with suppress(OSError), os.scandir(above):
                pass
    return True


def _open_locked(
    folder: Path, config: str, may_change: tuple[str, ...], *, keep: int, new: bool
) -> Run:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_links(folder)
        _refuse_lost_checkpoints(folder)
        lock = Lock(folder)
    except OSError as error:
        raise InputError(f"cannot use the run folder {folder}: {error.strerror}") from error
    try:
        resumed, changed = _claim(folder, config, may_change)
        how: Any = {"resumed": resumed, "changed": changed, "config": config, "new": new}
        return Run(folder, lock=lock, keep=keep, **how)
    except BaseException:
        lock.release()
        raise


@contextmanager
def as_it_was(path: Path) -> Iterator[None]:
    """A context in which a file of the run may be written anew, but not if an exception leaves it.

    Such as what is measured of the machine before a checkpoint is read, which may refuse the run.
    """
    before = None
    with suppress(OSError):
        before = path.read_bytes()
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the exception says more
            now = path.read_bytes() if path.exists() else None
            if before is not None and placement.leads() and now != before:
                write_bytes(path, before)
        raise


def read_config(folder: str | os.PathLike[str], *, say: bool = False) -> str:
    """Returns the TOML text of a run folder's config, by the keys of today.

    Args:
        say: of a key of an older version, in a line, what it is called now.

    Raises:
        InputError: the folder holds no run, or the file is damaged.
    """
    path = Path(folder) / "config.toml"
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{folder} holds no run: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is damaged: not UTF-8 text (byte {error.start})") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {error}") from error
    new = toml.drop_unread(toml.with_new_keys(data, str(path) if say else None))
    return text if new == data else tomli_w.dumps(new)


def finished(folder: str | os.PathLike[str]) -> bool:
    """Whether the run in a folder has the checkpoint of its last step. False if there is no run."""
    try:
        steps = tomllib.loads(read_config(folder)).get("steps")
    except InputError:
        return False
    done = checkpoints.list_steps(Path(folder) / "checkpoints")
    return bool(done) and isinstance(steps, int) and max(done) >= steps


def list_steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of a run's checkpoints, ascending."""
    return checkpoints.list_steps(Path(folder) / "checkpoints")


def read_checkpoint(
    folder: str | os.PathLike[str], like: State, *, step: int | None = None
) -> Restored:
    """Restores from a run folder without opening the run, for evaluation and export.

    Otherwise as `checkpoints.restore`.
    """
    restored = checkpoints.restore(Path(folder) / "checkpoints", like, step=step)
    return replace(restored, extra=restored.extra["extra"])


def read_params(
    folder: str | os.PathLike[str],
    params: Params,
    *,
    config: ModelConfig,
    stop_tokens: Iterable[int] | None = None,
    lora: Lora | None = None,
    step: int | None = None,
) -> Restored:
    """A checkpoint's parameters as its item "params". Otherwise as `read_checkpoint`.

    Of a run that trains adapters, they are those of the checkpoint on the base of `params`.

    Raises:
        InputError: that is not the base that they were trained on, not the alpha of `lora`, or a
          model of another `config`; with `stop_tokens`, one whose responses end by others.
    """
    trained, base = adapters.split(params)
    restored = read_checkpoint(folder, {"params": trained}, step=step)
    marks = checkpoints.model_mark(config, stop_tokens)
    checkpoints.check_marks(restored, {**checkpoints.base_mark(base, lora), **marks}, folder)
    whole = adapters.whole(restored.state["params"], base)
    return replace(restored, state={"params": whole})


def saved(state: TrainState, reference: Any, history: Sequence[Any] = ()) -> State:
    """The items of a training run's checkpoint.

    `reference` are the parameters of the KL term's policy, if there is one, and `history` the
    weights of a sampler that is stale on purpose.
    """
    rest = {"optimizer": state.optimizer, "correction": state.correction}
    rest |= {"step": state.step, "skipped": state.skipped}
    if state.reward_kl is not None:
        rest |= {"reward_kl": state.reward_kl}
    items: dict[str, Any] = {"params": state.params, "rest": rest}
    if reference is not None:
        items["reference"] = reference
    if history:
        items["history"] = list(history)
    return items


@dataclass(frozen=True)
class Difference:
    """One key in which two configs differ; None stands for an absent key."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = (
            "not set" if value is None else json.dumps(value, default=str)
            for value in (self.before, self.now)
        )
        return f"{self.key} was {before}, now {now}"


def config_differences(before: str, now: str) -> list[Difference]:
    """Returns the dotted keys whose values differ between two TOML texts, in the order of names.

    Of runs' configs, a key that is left out has its default: an older version may not have had it.
    """
    with suppress(InputError):  # the texts as they stand say more of what is wrong
        before, now = (toml.dump(toml.build(tomllib.loads(text))) for text in (before, now))
    old, new = (dict(leaves(tomllib.loads(text))) for text in (before, now))
    # repr tells 1 from 1.0 and from true, which == does not.
    return [
        Difference(key, old.get(key), new.get(key))
        for key in sorted({*old, *new})
        if repr(old.get(key)) != repr(new.get(key))
    ]


def changeable(config: RunConfig) -> tuple[str, ...]:
    """Keys in which a run in this folder may differ from the one before.

    All keys, if that one left no checkpoint, so that a mistake in the config that stopped it can be
    corrected in place.
    """
    if checkpoints.list_steps(Path(config.run.folder) / "checkpoints"):
        return config.may_change()
    return tuple(RunConfig.model_fields)


def _refuse_links(folder: Path) -> None:
    """Refuses a run folder with a link that leads out of it: it would be written through.

    W&B's own folder has such links, to what W&B alone writes. The run folder may be one itself.
    """
    inside = folder.resolve()
    for at, folders, files in os.walk(inside):
        if Path(at) == inside and "wandb" in folders and not (inside / "wandb").is_symlink():
            folders.remove("wandb")
        for name in (*folders, *files):
            path = Path(at, name)
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                raise InputError(
                    f"{path} is a link out of the run folder, to {os.readlink(path)}; remove it, or"
                    " set another run.folder"
                )


def _refuse_lost_checkpoints(folder: Path) -> None:
    """Refuses a run whose checkpoints were removed: to begin anew would delete its lines.

    A run begins to write one before its second line, and has one of them before its model.
    """
    kept, lines = folder / "checkpoints", folder / "metrics.jsonl"
    if checkpoints.list_steps(kept) or not (folder / "config.toml").exists():
        return
    empty = not (kept.exists() and any(kept.iterdir()))  # half a checkpoint is of a run that died
    removed = empty and lines.exists() and lines.read_bytes().count(b"\n") > 1
    if removed or (folder / "model").exists():
        raise InputError(
            f"{folder} holds a run whose checkpoints are gone, and to begin anew would delete what"
            " it has written; put them back, or set another run.folder"
        )


def _claim(folder: Path, config: str, may_change: tuple[str, ...]) -> tuple[bool, list[Difference]]:
    """Compares config.toml, and writes it if there is no checkpoint that `Run.restore` may refuse.

    Returns whether the folder had this run, and what changed.
    """
    exists, changed = (folder / "config.toml").exists(), []
    names = sorted(path.name for path in folder.iterdir())
    # A study says when it began before it has a run.
    strangers = [name for name in names if not name.startswith(".") and name != STARTED]
    if exists:
        changed = config_differences(read_config(folder, say=True), config)
        free = tuple(f"{key}." for key in may_change)
        refused = [str(one) for one in changed if not f"{one.key}.".startswith(free)]
        if refused:
            raise InputError(
                f"{folder} holds a run with another config: {'; '.join(refused)};"
                " use the old values or another run.folder"
            )
    elif strangers:
        raise InputError(
            f"{folder} is not empty and holds no run (no config.toml, but {strangers[0]});"
            " set another run.folder"
        )
    if not checkpoints.list_steps(folder / "checkpoints"):
        _write_config(folder, config)
    return exists, changed


def _write_config(folder: Path, config: str) -> None:
    path = folder / "config.toml"
    with writing(path):
        write_text(path, config)


class Lock:
    """The kernel's lock on a folder, which ends with the process, however that ends.

    Raises:
      InputError: another process has it.
    """

    def __init__(self, folder: Path):
        self._file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
            os.write(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except BlockingIOError as error:
            owner = os.read(self._file, 200).decode(errors="replace").strip()
            self.release()
            raise InputError(
                f"{folder} is in use by {owner or 'another process'}; wait for it to end"
                " or take another folder"
            ) from error
        except OSError:
            self.release()
            raise
        # A forked child (a worker that outlives us) would otherwise keep the lock alive.
        os.register_at_fork(after_in_child=self.release)

    def release(self) -> None:
        """Lets others have the folder; a second call does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
