"""The processor at hand, by which XLA chooses kernels."""

import hashlib
import platform
from pathlib import Path


def processor() -> list[str]:
    """Its name and instructions, as Linux lists them; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})


def kind() -> str:
    """Twelve hexadecimal digits that name the kind of processor."""
    known = repr((platform.machine(), platform.processor(), processor()))
    return hashlib.sha256(known.encode()).hexdigest()[:12]
