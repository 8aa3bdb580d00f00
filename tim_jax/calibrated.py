"""What calibration measured, kept in a file: a run that resumes need not measure again.

A measurement holds for one machine, version of JAX, model and numerics; it is only taken from the
file if all of them are the same. The batch is not among them: what was chosen for another one is
as exact, if not as fast, and a run keeps its bits when its batch or placement changes.
"""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jaxlib

from tim_jax import calibration, processes
from tim_jax.errors import InputError
from tim_jax.model.config import ModelConfig
from tim_jax.numerics import Numerics, Rows


def calibrate(
    config: ModelConfig, numerics: Numerics, *, batch: int, file: Path | None
) -> Numerics:
    """`calibration.calibrate`, or what it found before, if there is a `file` that has it.

    A file that is missing, damaged or of something else is written anew; one that cannot be written
    is left alone.
    """
    if file is None:
        return calibration.calibrate(config, numerics, batch=batch)
    of = _of(config, numerics)
    kept = _read(file)
    if kept is not None and kept.get("of") == of:
        try:
            return replace(numerics, **_values(kept["found"]))
        except (KeyError, TypeError, ValueError, InputError):
            pass  # damaged: measured again
    found = calibration.calibrate(config, numerics, batch=batch)
    if found != numerics and processes.leads():
        _write(file, {"of": of, "found": _plain(found)})
    return found


def _of(config: ModelConfig, numerics: Numerics) -> dict[str, Any]:
    return {
        "jax": f"{jax.__version__}, jaxlib {jaxlib.version.__version__}",
        "machine": _machine(),
        "model": repr(config),
        "numerics": repr(numerics),
    }


def _machine() -> str:
    """The instructions that the CPU has, and how many cores: what XLA chooses kernels by."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    known = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return "; ".join([platform.machine(), f"{os.cpu_count()} cores", *known])


def _plain(found: Numerics) -> dict[str, Any]:
    return {
        "rows_by_contraction": [
            [size, rows.low, rows.high] for size, rows in found.rows_by_contraction
        ],
        "attention_rows": [found.attention_rows.low, found.attention_rows.high],
        "whole_kv": found.whole_kv,
    }


def _values(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rows_by_contraction": tuple(
            (size, Rows(low, high)) for size, low, high in found["rows_by_contraction"]
        ),
        "attention_rows": Rows(*found["attention_rows"]),
        "whole_kv": bool(found["whole_kv"]),
    }


def _read(file: Path) -> dict[str, Any] | None:
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept if isinstance(kept, dict) else None


def _write(file: Path, kept: dict[str, Any]) -> None:
    partial = file.with_name(f".{file.name}")
    try:
        partial.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
