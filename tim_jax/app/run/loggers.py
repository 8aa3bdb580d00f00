"""Writers of metrics: JSON lines always; TensorBoard, Weights & Biases and MLflow by choice.

A sink takes `write(step, values)` and `close(outcome)`. Values are scalars (of Python, NumPy or
JAX), strings, arrays, or lists and mappings of them. Nothing here decides what is measured.
"""

import json
import math
import os
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import jax
import numpy as np

from tim_jax import placement
from tim_jax.app.config.run import RunConfig
from tim_jax.app.config.sections import WandbMode
from tim_jax.common import waiting
from tim_jax.common.errors import InputError, PreemptedError, writing
from tim_jax.common.inputs import leaves

Values = Mapping[str, Any]
Outcome = Literal["finished", "failed", "killed"]

_WANDB_ID, _MLFLOW_ID = "wandb_id", "mlflow_id"  # files in a run's folder


class Sink(Protocol):
    """Anything with these two methods."""

    def write(self, step: int, values: Values) -> None:
        """Takes the numbers of one step."""

    def close(self, outcome: Outcome = "finished") -> None:
        """Takes no more, lets go of what it writes to, and records the outcome if it can."""


def check_offset(path: Path, offset: int) -> None:
    """Refuses a file of lines that cannot be cut to so many bytes.

    Raises:
        InputError: it is shorter, or `offset` is not the end of a line.
    """
    with writing(path):
        size = path.stat().st_size if path.exists() else 0
        if size < offset:
            raise InputError(
                f"{path} has {size} bytes, but the checkpoint was saved when it had {offset};"
                " put the missing lines back or start in another folder"
            )
        if not offset:
            return
        with open(path, "rb") as file:
            file.seek(offset - 1)
            if file.read(1) != b"\n":
                raise InputError(
                    f"{path} was changed since the checkpoint: byte {offset} does not end a line;"
                    " restore the file or start in another folder"
                )


class JsonLines:
    """A file of one JSON object a line, `{"step": step, ...}`, without buffering.

    A line is written by one call on an unbuffered file, so a process that dies leaves whole lines
    and at most one cut line at the end, which opening with `offset` removes. JSON has no
    non-finite numbers: they are written as the strings "nan", "inf" and "-inf", which `float`
    reads back.

    Args:
        offset: keep that many bytes of the file and drop the rest; None keeps all of it.

    Raises:
        InputError: the file cannot be opened or written (read-only, disk full), is shorter than
            `offset`, or `offset` is not the end of a line.
    """

    def __init__(self, path: str | os.PathLike[str], *, offset: int | None = None):
        self.path = Path(path)
        self.last_step = -1
        if offset is not None:
            check_offset(self.path, offset)
        with writing(self.path):
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115
            if offset is not None:
                self._file.truncate(offset)

    def write(self, step: int, values: Values) -> None:
        if "step" in values:
            raise ValueError("'step' is the line's own key, not a value")
        record = plain({"step": int(step), **values})
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        # Half of a surrogate pair is no UTF-8, but JSON has an escape for it, which is Python's.
        data = text.encode(errors="backslashreplace") + b"\n"
        with writing(self.path):
            while data:
                data = data[self._file.write(data) :]
        self.last_step = int(step)

    def sync(self) -> None:
        """Waits until the lines are on the disk, where they survive a power cut."""
        if stat.S_ISCHR(os.fstat(self._file.fileno()).st_mode):
            return  # os.devnull has no disk
        with writing(self.path):
            os.fsync(self._file.fileno())

    def size(self) -> int:
        """Bytes in the file, all of them whole lines."""
        return os.fstat(self._file.fileno()).st_size

    def close(self, outcome: Outcome = "finished") -> None:
        self._file.close()


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file; a last line without its newline is left out.

    Raises:
        InputError: the file cannot be read, or a line is not a JSON object; names the line.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number}: {record!r} is not an object")
        yield record


def plain(value: Any) -> Any:
    """Returns `value` as JSON can hold it: arrays as lists, non-finite numbers as strings."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        # Python has no form of bfloat16 and the like; float32 holds their values exactly.
        array = np.asarray(value)
        return plain((array.astype(np.float32) if array.dtype.kind == "V" else array).tolist())
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON: {value!r}")


def scalars(values: Values) -> dict[str, float]:
    """The numbers among `values` (bools as 0 and 1, arrays without axes too), as floats."""
    numbers = {}
    for name, value in values.items():
        is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
        if isinstance(value, np.character) or (is_array and value.ndim):
            continue
        if is_array or isinstance(value, bool | int | float):
            numbers[name] = float(value)
    return numbers


class TensorBoard:
    """Scalars as TensorBoard events under `folder`, without strings and arrays.

    Args:
        resume_step: the last step to keep; what an earlier process wrote after it is hidden. Below
            0 for a new run.

    Raises:
        InputError: tensorboardX is not installed, or the folder cannot be written (disk full,
            read-only), here or later.
    """

    def __init__(self, folder: str | os.PathLike[str], *, resume_step: int = -1):
        try:
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            raise InputError(_missing("tensorboard", "tensorboardX")) from error
        messages: Any = event_pb2  # its names are made when it is imported
        self._events = f"TensorBoard events to {folder}"
        self._scalar, self._event = summary.scalar, messages.Event
        with writing(self._events):
            os.makedirs(folder, exist_ok=True)
            # Not the library's SummaryWriter: its thread dies of a full disk, and then it waits.
            # The step is in the name because a clock may give the same second twice.
            prefix, suffix = os.path.join(folder, "events"), f".{resume_step + 1}"
            self._file = event_file_writer.EventsWriter(prefix, suffix)
            if resume_step >= 0:
                start = messages.SessionLog(status=messages.SessionLog.START)
                self._add(resume_step + 1, session_log=start)
            self._file.flush()

    def write(self, step: int, values: Values) -> None:
        with writing(self._events):
            for name, value in scalars(values).items():
                self._add(step, summary=self._scalar(_without_at(name), value))
            self._file.flush()

    def close(self, outcome: Outcome = "finished") -> None:
        with writing(self._events):
            self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        self._file.write_event(self._event(wall_time=time.time(), step=step, **content))


# What W&B draws unasked, and which of its values the table of runs shows. The other metrics of the
# rooms below, about ninety, are logged too, for panels of one's own.
_DRAWN: Mapping[str, str] = MappingProxyType(
    {
        "reward": "last,max",
        "eval/reward": "last,max",
        "exact_share": "last,min",
        "mismatch/exact_share": "last,min",
        "mismatch/log_ratio_abs_mean": "last,max",
        "mismatch/log_ratio_abs_max": "last,max",
        "mismatch/kl_k3": "last,max",
        "mismatch/ess_sequence": "last,min",
        "mismatch/outside_1pct": "last,max",
        "mismatch/log_ppl_abs_diff_mean": "last,max",
        "correction/coefficient_mean": "last",
        "correction/zero_share": "last,max",
        "correction/rejected_share": "last,max",
        "correction/ess": "last,min",
    }
)
_ROOMS = ("mismatch/*", "correction/*")


class Wandb:
    """Scalars and strings to Weights & Biases.

    The run's id is kept in `folder`/wandb_id, so that a resumed run continues the same W&B run.
    Steps that W&B already has are skipped by it; a run that resumes to the bit repeats them.

    Args:
        mode: "online"; "offline" writes under `folder`/wandb, to be synced later; "disabled". None
            for what WANDB_MODE says, or else "online".

    Raises:
        InputError: wandb is not installed, or refuses to start (no login, no network, a wrong
            WANDB_MODE).

    If W&B's own process ends later, as after SIGTERM to all processes of a job, this is said once,
    and nothing more is sent.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        project: str,
        name: str,
        config: Values,
        mode: WandbMode | None = None,
    ):
        try:
            import wandb
        except ImportError as error:
            raise InputError(_missing("wandb", "wandb")) from error
        if not hasattr(wandb, "init"):  # only a folder of runs that is called wandb
            raise InputError(_missing("wandb", "wandb"))
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=_wandb_id(Path(folder) / _WANDB_ID),
                resume="allow",
                mode=mode,
                dir=os.fspath(folder),
                config=plain(config),
                # W&B would otherwise wrap stdout, under the live display.
                settings=wandb.Settings(console="off"),
            )
        except (wandb.Error, ValueError) as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"Weights & Biases did not start: {reason}; log in with 'wandb login',"
                " or set run.wandb_mode to 'offline'"
            ) from error
        self._teardown, self._lost = wandb.teardown, False
        for metric, summary in _DRAWN.items():
            self._run.define_metric(metric, summary=summary)
        for pattern in _ROOMS:
            self._run.define_metric(pattern, hidden=True)

    def write(self, step: int, values: Values) -> None:
        strings = {name: value for name, value in values.items() if isinstance(value, str)}
        numbers = scalars(values)
        # Without `commit`, W&B would hold a step back until the next one.
        self._send(lambda: self._run.log({**numbers, **strings}, step=step, commit=True))

    def close(self, outcome: Outcome = "finished") -> None:
        # 255 is what W&B itself takes for an interrupt.
        status = {"finished": 0, "failed": 1, "killed": 255}[outcome]
        self._send(lambda: self._run.finish(exit_code=status))
        if self._lost:
            # Otherwise W&B would print a traceback when Python ends. It may call `sys.exit`.
            with suppress(Exception, SystemExit):
                self._teardown()

    def _send(self, call: Callable[[], object]) -> None:
        if self._lost:
            return
        try:
            call()
        except Exception as error:  # each version of W&B has others
            self._lost = True
            reason = type(error).__name__  # the message may hold a key
            waiting.say(f"Weights & Biases takes no more ({reason}); the run goes on without it")


class MLflow:
    """Scalars, and the config as parameters, to MLflow: files, or a server of one's own.

    The run's id is kept in `folder`/mlflow_id, so that a resumed run continues the same MLflow run.
    Steps that it has already are not sent again, since MLflow would keep both points.

    Args:
        uri: of the server, or `sqlite:///FILE`; "" for what MLFLOW_TRACKING_URI says.

    Raises:
        InputError: mlflow is not installed, or does not take what is written.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, project: str, name: str, config: Values, uri: str
    ):
        try:
            from mlflow import MlflowClient, MlflowException
            from mlflow.entities import Metric, Param
        except ImportError as error:
            raise InputError(_missing("mlflow", "mlflow")) from error
        self._metric, self._refused = Metric, MlflowException
        self._last: int | None = -1  # step that it has; None: not yet asked for
        path = Path(folder) / _MLFLOW_ID
        with self._told():
            self._client = MlflowClient(uri or None)
        if stored := _stored(path):
            with self._told(f" ({path} names its run; without this file a new one is begun)"):
                self._client.update_run(stored, status="RUNNING")
            self._run, self._last = stored, None
            return
        with self._told():
            found = self._client.get_experiment_by_name(project)
            where = found.experiment_id if found else self._client.create_experiment(project)
            self._run = self._client.create_run(where, run_name=name).info.run_id
            params = [Param(key, str(value)[:500]) for key, value in leaves(plain(config))]
            for start in range(0, len(params), 100):  # as many as a server takes
                self._client.log_batch(self._run, params=params[start : start + 100])
            path.write_text(self._run + "\n")

    def write(self, step: int, values: Values) -> None:
        now = int(1000 * time.time())
        numbers = {_without_at(name): value for name, value in scalars(values).items()}
        points = [self._metric(name, value, now, step) for name, value in numbers.items()]
        with self._told():
            if self._last is None and numbers:
                known = self._client.get_metric_history(self._run, next(iter(numbers)))
                self._last = max((point.step for point in known), default=-1)
            if self._last is not None and step <= self._last:
                return
            for start in range(0, len(points), 1000):
                self._client.log_batch(self._run, metrics=points[start : start + 1000])

    def close(self, outcome: Outcome = "finished") -> None:
        with self._told():
            self._client.set_terminated(self._run, outcome.upper())

    @contextmanager
    def _told(self, hint: str = "") -> Iterator[None]:
        try:
            yield
        except (self._refused, OSError) as error:
            raise InputError(f"MLflow: {' '.join(str(error).split())[:300]}{hint}") from error


@dataclass(frozen=True)
class Tee:
    """One sink that hands every write to all of `sinks`, in order.

    As a context manager it closes them with the outcome that an exception stands for.
    """

    sinks: tuple[Sink, ...]

    def write(self, step: int, values: Values) -> None:
        for sink in self.sinks:
            sink.write(step, values)

    def close(self, outcome: Outcome = "finished") -> None:
        with ExitStack() as stack:  # which closes the others if one raises
            for sink in reversed(self.sinks):
                stack.callback(sink.close, outcome)

    def __enter__(self) -> "Tee":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        killed = isinstance(error, KeyboardInterrupt | PreemptedError)
        failed = "killed" if killed else "failed"
        self.close("finished" if error is None else failed)


def _stored(path: Path) -> str:
    """The id in a file; "" if there is none, or the disk was full."""
    return path.read_text().strip() if path.exists() else ""


def _wandb_id(path: Path) -> str:
    try:
        if not (found := _stored(path)):
            found = uuid.uuid4().hex[:12]
            path.write_text(found + "\n")
    except OSError as error:
        raise InputError(f"cannot use {path}: {error.strerror}") from error
    return found


def _without_at(name: str) -> str:
    """The name of a metric, for what takes no @ in one."""
    return name.replace("@", "_at_")


def _missing(sink: str, package: str) -> str:
    return (
        f"run.sinks names {sink!r}, but the package {package} is not installed;"
        f" pip install 'tim-jax[{sink}]'"
    )


def check_installed(sinks: Iterable[str]) -> None:
    """Refuses a name in `run.sinks` whose package is not there, before the run has any work."""
    for sink in sinks:
        package = "tensorboardX" if sink == "tensorboard" else sink
        if package not in sys.modules and find_spec(package) is None:
            raise InputError(_missing(sink, package))


def extra_sinks(config: RunConfig, folder: Path, start: int) -> Tee:
    """TensorBoard, Weights & Biases and MLflow as `run.sinks` names them, on process 0 alone.

    Args:
      folder: the run's.
      start: the step that the run goes on after; below 0 for a new one.
    """
    section = config.run
    extra: list[Sink] = []
    if not placement.leads():
        return Tee(())
    project, values = section.wandb_project, config.model_dump()
    named: dict[str, Any] = {"project": project, "name": folder.name, "config": values}
    if start < 0:
        # A run that ended before its first checkpoint may have had other settings.
        for kept in (_WANDB_ID, _MLFLOW_ID):
            (folder / kept).unlink(missing_ok=True)
    try:
        if "tensorboard" in section.sinks:
            extra.append(TensorBoard(folder / "tensorboard", resume_step=start))
        if "wandb" in section.sinks:
            with waiting.during("starting Weights & Biases"):
                extra.append(Wandb(folder, mode=section.wandb_mode, **named))
        if "mlflow" in section.sinks:
            with waiting.during("starting MLflow"):
                extra.append(MLflow(folder, uri=section.mlflow_uri, **named))
    except BaseException:
        Tee(tuple(extra)).close("failed")
        raise
    return Tee(tuple(extra))
