"""Time on the device by kernel, as JAX's profiler records it."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import bench_common as common
import jax
from setting import once

LISTED = 60  # kernels, those that take longest


def by_kernel(call: Callable[[], Any]) -> dict[str, Any]:
    """One call of a compiled program: ms by the clock and of its kernels, and the longest ones."""
    jax.block_until_ready(call())
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with common.warm("a profile"), jax.profiler.trace(folder, profiler_options=options):
            seconds = once(call)
        (file,) = Path(folder).rglob("*.xplane.pb")
        found = kernels(jax.profiler.ProfileData.from_file(str(file)).planes)
    if not found:
        raise RuntimeError("the profiler recorded no kernels")
    total = sum(row["ms"] for row in found)
    return {"ms": 1e3 * seconds, "kernels ms": total, "kernels": found[:LISTED]}


def kernels(planes: Iterable[Any]) -> list[dict[str, Any]]:
    """Kernels by name, the longest first: {"name", "ms", "calls"}.

    On a GPU those of its streams; where there is none, what XLA's threads ran.
    """
    planes = list(planes)
    on_gpu = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    beginning = "Stream" if on_gpu else "tf_XLA"
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for plane in on_gpu or planes:
        for line in plane.lines:
            for event in line.events if line.name.startswith(beginning) else ():
                spent[event.name][0] += event.duration_ns / 1e6
                spent[event.name][1] += 1
    rows = [{"name": name, "ms": ms, "calls": calls} for name, (ms, calls) in spent.items()]
    return sorted(rows, key=lambda row: -row["ms"])
