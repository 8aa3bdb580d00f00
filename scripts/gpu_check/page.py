"""gpu.md and gpu.json from the records."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from records import FAILED, LEFT, Record, shown


def driver() -> str:
    """The NVIDIA driver's version, or why it is not known."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return found.stdout.strip().splitlines()[0]


def ptxas() -> str:
    """The version of the assembler that XLA finds first, beside CUDA's packages or on the path."""
    here = [str(path) for root in sys.path for path in Path(root).glob("nvidia/**/bin/ptxas")]
    found = next(iter(here), None) or shutil.which("ptxas")
    if found is None:
        return "none found"
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return said.stdout.strip().splitlines()[-1] if said.stdout.strip() else "unknown"


def write(out: Path, machine: Mapping[str, Any], records: Iterable[Record]) -> str:
    """Writes both files; returns the page."""
    parts: dict[str, list[Record]] = {}
    for record in records:
        parts.setdefault(record.part, []).append(record)
    page = "\n".join(_lines(machine, parts)) + "\n"
    rows = {name: [_row(record) for record in found] for name, found in parts.items()}
    content = {"machine": machine, "parts": rows}
    for name, text in (("gpu.md", page), ("gpu.json", json.dumps(content, indent=1) + "\n")):
        partial = out / f"{name}.partial"
        partial.write_text(text)
        partial.replace(out / name)
    return page


def _row(record: Record) -> dict[str, Any]:
    names = "name", "status", "seconds", "values", "reason"
    return {name: getattr(record, name) for name in names}


def _lines(machine: Mapping[str, Any], parts: Mapping[str, list[Record]]) -> Iterator[str]:
    yield "# GPU check"
    yield ""
    yield "Written by `bash scripts/gpu_check.sh`. " + "; ".join(
        f"{name}: {value}" for name, value in machine.items()
    )
    if machine.get("smoke"):
        yield ""
        yield "**A smoke run: small sizes on a CPU, interpreted. The speeds mean nothing.**"
    for name, records in parts.items():
        failed = sum(r.status == FAILED for r in records)
        left = sum(r.status == LEFT for r in records)
        yield ""
        yield f"## {name.capitalize()}: {len(records)} cases, {failed} failed, {left} not run"
        yield ""
        yield "| case | result | values | seconds |"
        yield "|---|---|---|--:|"
        for record in records:
            text = " ".join(f"{shown(record.values)} {record.reason}".split()).replace("|", "/")
            yield f"| {record.name} | {record.status} | {text} | {record.seconds:.1f} |"
