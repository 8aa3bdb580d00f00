"""The job of `tim-jax diagnose`: is it numerics or a bug?"""

import argparse
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tim_jax import api
from tim_jax.common.errors import InputError, writing
from tim_jax.instruments.diagnosis.rollouts import RolloutsError, by_kind


@dataclass(frozen=True)
class Order:
    """What is to be diagnosed, and where the result goes; see `api.diagnose`."""

    model: str
    rollouts: Path
    format: str = "auto"
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    log_probs: str = "processed"
    dtype: str = "float32"
    candidate_weights: tuple[str, ...] = ()
    skip_bad: bool = False
    json: Path | None = None
    html: Path | None = None


def named(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the command line that an `Order` has."""
    return {field.name: getattr(arguments, field.name) for field in fields(Order)}


def diagnose(order: Order) -> int:
    """Diagnoses, prints the verdict, writes the files, and returns the exit status: 1 for a fault.

    Bad lines are named on standard error, those of one kind in one line.
    """
    model = api.load(order.model, dtype=order.dtype)
    try:
        found = api.diagnose(
            model,
            order.rollouts,
            format=order.format,
            temperature=order.temperature,
            top_k=order.top_k,
            top_p=order.top_p,
            log_probs=order.log_probs,
            weights=order.candidate_weights,
            skip_bad=order.skip_bad,
        )
    except RolloutsError as error:
        if error.total == 1:
            raise
        for line in error.lines:
            print(line, file=sys.stderr)
        raise InputError(error.summary) from error
    for line in by_kind(found.problems):
        print(f"skipped: {line}", file=sys.stderr)
    print(found)
    _write(order.json, found.json)
    _write(order.html, found.html)
    return 0 if found.normal else 1


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    with writing(path):
        path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
