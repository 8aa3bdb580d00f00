"""A writer of rollouts for any engine's process: it imports the standard library alone.

    with tim_jax.capture("rollouts.jsonl") as rows:
        rows.write(prompt_token_ids=[5, 6], response_token_ids=[8, 9], logprobs=[-0.5, -1.2])

The lines are those that `tim_jax.diagnose` and `tim_jax.instruments.diagnosis.readers` read.
"""

import fcntl
import json
import math
import numbers
import operator
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tim_jax.common.errors import InputError
from tim_jax.common.inputs import expanded, shown

_ABOVE_ZERO = 1e-4  # what rounding makes of the log-prob of a certain token


class Capture:
    """Appends rows to a file of JSON lines; several processes may append to one file.

    Each row is one write of one line, so that an engine that is killed leaves whole lines. Of a row
    that the disk has no room for, nothing stays.
    """

    def __init__(self, path: str | Path):
        self.path = expanded(path)
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise InputError(f"capture: cannot write {self.path}: {error.strerror}") from error

    def write(
        self,
        *,
        prompt_token_ids: Any,
        response_token_ids: Any,
        logprobs: Any,
        mask: Any = None,
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        weights_version: str | int | None = None,
        sampling: Mapping[str, Any] | None = None,
        supports: Any = None,
        kept_log_mass: Any = None,
        routes: Any = None,
        episode: str | int | None = None,
        turn: int | None = None,
        turn_token_ids: Any = None,
    ) -> None:
        """Appends one response.

        Args:
          prompt_token_ids: list, array or tensor of p ids, as the engine was given them.
          response_token_ids: n ids, the end token included, if one was drawn.
          logprobs: n numbers, of the response tokens; what a mask leaves out may be anything.
          mask: n times 0 or 1; 0 where the model did not draw the token, as in a tool's output.
          finish_reason: "stop", "length", "abort", ...
          stop_reason: the stop string or the end token that ended it, if the engine says it.
          weights_version: of the weights that drew it.
          sampling: the options of the request under their usual names: `temperature`, `top_k`,
            `top_p`, `repetition_penalty`, `logprobs_mode`, ...
          supports: n lists of ids, the tokens that top-k and top-p kept at each place, of which the
            drawn one is one; an empty list stands for all.
          kept_log_mass: in place of supports n numbers, the log-probability of what was kept.
          routes: [p + n - 1, layers, experts of a token], the experts of each position but the last
            in each layer of a mixture.
          episode: of an episode of several turns: its name, if each turn is a row.
          turn: the number of this turn in it.
          turn_token_ids: if the row is a whole conversation: for each turn the ids that were drawn.

        Raises:
          InputError: one of them is of another kind, the lists differ in length, or a log-prob is
            not finite where the mask is 1; the row cannot be written, because the disk is full, for
            one, or the file is closed.
        """
        if self._file < 0:
            raise InputError(f"capture: {self.path} is closed; write within `with`")
        prompt = _ids("prompt_token_ids", prompt_token_ids)
        tokens = _ids("response_token_ids", response_token_ids)
        kept_ids = _rows("supports", supports)
        mass = None if kept_log_mass is None else _numbers("kept_log_mass", kept_log_mass)
        for name, places in (("supports", kept_ids), ("kept_log_mass", mass)):
            if places is not None and len(places) != len(tokens):
                raise InputError(
                    f"capture: {len(tokens)} response tokens, but {len(places)} places of {name};"
                    " there must be as many"
                )
        _check_kinds(turn, sampling)
        numbers = _numbers("logprobs", logprobs)
        own = [1] * len(tokens) if mask is None else _whole("mask", mask)
        if not {*own} <= {0, 1}:
            raise InputError(f"capture: mask must be of 0 and 1, got {shown(mask)}")
        if not len(tokens) == len(numbers) == len(own):
            raise InputError(
                f"capture: {len(tokens)} response tokens, but {len(numbers)} logprobs and"
                f" {len(own)} places of the mask; there must be as many"
            )
        _check_log_probs("logprobs", numbers, own)
        _check_kept(kept_ids, mass, tokens, own)
        if mass is not None:
            _check_log_probs("kept_log_mass", mass, own)
        row = {
            "prompt_token_ids": prompt,
            "response_token_ids": tokens,
            "logprobs": numbers,
            "mask": None if mask is None else own,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "weights_version": weights_version,
            "sampling_params": None if sampling is None else dict(sampling),
            "supports": kept_ids,
            "kept_log_mass": mass,
            "routes": routes,
            "episode": episode,
            "turn": turn,
            "turn_token_ids": _rows("turn_token_ids", turn_token_ids),
        }
        self._append({name: value for name, value in row.items() if value is not None})

    def _append(self, row: dict[str, Any]) -> None:
        """Appends the row as a line, or nothing."""
        try:
            line = f"{json.dumps(row, allow_nan=False, default=_as_list)}\n".encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"capture: the row cannot be written as JSON: {error}") from error
        # Without a lock, another process's row could come between, and what is cut would be its.
        # Some shared file systems have no locks; there that may happen, on a full disk.
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
        except OSError as error:
            raise InputError(f"capture: cannot write {self.path}: {error.strerror}") from error
        finally:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
        if written < len(line):
            raise InputError(
                f"capture: cannot write {self.path}: no room for a row of {len(line):,} bytes; the"
                " rows before it are whole"
            )

    def close(self) -> None:
        """Closes the file; nothing may be written afterwards."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> "Capture":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def capture(path: str | Path) -> Capture:
    """Opens a file of JSON lines that rollouts are appended to; see `Capture.write`.

    Raises:
      InputError: the file cannot be written.
    """
    return Capture(path)


def _check_kinds(turn: Any, sampling: Any) -> None:
    if turn is not None and (isinstance(turn, bool) or turn != _whole_number(turn)):
        raise InputError(f"capture: turn must be a whole number, got {shown(turn)}")
    if not isinstance(sampling, Mapping | None):
        raise InputError(
            'capture: sampling must be a mapping, such as {"temperature": 0.7}, got'
            f" {shown(sampling)}"
        )
    temperature = (sampling or {}).get("temperature")
    if temperature is None:
        return
    if not isinstance(temperature, numbers.Real) or isinstance(temperature, bool):
        raise InputError(f"capture: temperature must be a number, got {shown(temperature)}")
    if temperature < 0:
        raise InputError(f"capture: temperature must be 0 or more, got {temperature}")


def _check_log_probs(what: str, numbers: list[float | None], mask: list[int]) -> None:
    for place, (number, kept) in enumerate(zip(numbers, mask, strict=True)):
        if kept and number is None:
            raise InputError(f"capture: {what}[{place}] is no finite number; mask it or mend it")
        if kept and number is not None and number > _ABOVE_ZERO:
            raise InputError(
                f"capture: {what}[{place}] = {number:.6g} is positive; a log-probability is"
                " at most 0"
            )


def _check_kept(
    supports: list[list[int]] | None, mass: Any, tokens: list[int], mask: list[int]
) -> None:
    """Refuses what says twice, or wrongly, what a truncation kept."""
    if supports is not None and mass is not None:
        raise InputError("capture: supports and kept_log_mass are given; leave the latter out")
    for place, (kept, token) in enumerate(zip(supports or (), tokens, strict=False)):
        if mask[place] and {*kept} - {-1} and token not in kept:
            raise InputError(
                f"capture: response_token_ids[{place}] = {token} was drawn, but is not in"
                f" supports[{place}]; one of the two is shifted"
            )


def _as_list(values: Any) -> Any:
    """A list of a list, a tuple, an array or a tensor."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _listed(what: str, values: Any) -> Any:
    try:
        return _as_list(values)
    except TypeError:
        raise InputError(f"capture: {what} must be a list, got {shown(values)}") from None


def _ids(what: str, values: Any) -> list[int]:
    ids = _whole(what, values)
    if not ids or min(ids) < 0 or any(isinstance(x, bool) for x in _listed(what, values)):
        raise InputError(f"capture: {what} must be token ids, one or more, got {shown(values)}")
    return ids


def _rows(what: str, values: Any) -> list[list[int]] | None:
    if values is None:
        return None
    return [_whole(f"{what}[{i}]", one) for i, one in enumerate(_listed(what, values))]


def _whole_number(value: Any) -> int | None:
    """The whole number that this is; None for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def _whole(what: str, values: Any) -> list[int]:
    given = _listed(what, values)
    try:
        whole = [int(x) for x in given]
    except (TypeError, ValueError, OverflowError):
        whole = []
    if whole != [*given]:  # 1.0 and True are 1
        raise InputError(f"capture: {what} must be a list of whole numbers, got {shown(values)}")
    return whole


def _numbers(what: str, values: Any) -> list[float | None]:
    return [_number(x) for x in _listed(what, values)]


def _number(value: Any) -> float | None:
    """A log-prob, or None for what is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
