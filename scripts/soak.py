"""A run of many steps: does anything grow? Writes docs/results/soak.md.

    JAX_PLATFORMS=cpu python scripts/soak.py [--steps 10000]

`tim-jax train` runs as its users call it, with a tiny model, a reward of the user's in its own
process, evaluations and checkpoints. From outside, through /proc, it is looked at all the time: its
memory, open files and threads, and those of the reward's process. The status is 1 if one of them,
or the time of a step, grows, or if a step is missing from metrics.jsonl.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import bench_common as common

PAGE = common.RESULTS / "soak.md"
CONFIG = """
[model.architecture]
hidden_size = 16
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 8
intermediate_size = 16
max_positions = 16

[sampling]
samples = 2
max_prompt_length = 8
max_tokens = 4

[learner]
prompts_per_step = 2

[task]
kind = "builtin"
name = "running_sums"
parameters = { digits = [1, 3], eval_size = 16 }
reward = "soak:brief"

[eval]
every = 500
prompts = 4
"""
_SAVES = 40  # checkpoints of a run
_FEW_SAVES = 2  # and of another one
# What may be between one row and a later one without being called growth.
_MEMORY = 1.03, 8  # times, and MiB more
_MORE = {"files": 2, "threads": 4, "processes": 0}  # pools of threads come and go
_SLOWER = 1.25


def brief(prompts: list, completions: list[str], answers: list[str]) -> list[float]:
    """The run's reward: short completions."""
    del prompts, answers
    return [1.0 / (1 + len(completion)) for completion in completions]


class Look(NamedTuple):
    """The run and the processes that it started, at one moment."""

    step: int
    megabytes: float
    files: int
    threads: int
    processes: int


class Row(NamedTuple):
    """What was seen in some hundred steps: memory in the middle, the fewest files and threads."""

    first: int
    last: int
    megabytes: float
    files: int
    threads: int
    processes: int
    best: float  # ms, the 10th percentile of the steps
    median: float


def main() -> int:
    """Runs, prints and writes the page; 1 if something grows."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=10_000)
    options.add_argument("--out", type=pathlib.Path, default=PAGE)
    arguments = options.parse_args()
    load, started = common.load_average(), time.monotonic()
    parts, wrong = [], []
    for saves in (_SAVES, _FEW_SAVES):
        with tempfile.TemporaryDirectory() as folder:
            rows, grown = soak(pathlib.Path(folder), arguments.steps, parts=10, saves=saves)
        wrong += grown
        parts.append(_part(rows, grown, saves))
    minutes = (time.monotonic() - started) / 60
    page = "\n".join([*_head(arguments.steps, minutes, load), *parts, ""])
    arguments.out.write_text(page)
    print(page)
    return 1 if wrong else 0


def soak(
    folder: pathlib.Path,
    steps: int,
    *,
    parts: int,
    saves: int = _SAVES,
    changes: Sequence[str] = (),
) -> tuple[list[Row], list[str]]:
    """Runs `steps` steps in a new folder, with `changes` to the config as on the command line.

    Returns `parts` rows, and what is wrong with them.
    """
    config, run = folder / "soak.toml", folder / "run"
    config.write_text(f"steps = {steps}\n{CONFIG}\n[run]\ncheckpoint_every = {steps // saves}\n")
    with (folder / "output").open("w+") as output:
        process = _start(config, run, output, changes)
        looks = list(_looks(process, run))
        output.seek(0)
        if process.returncode:
            raise SystemExit(f"the run ended with {process.returncode}:\n{output.read()[-2000:]}")
    seconds = [json.loads(line)["seconds"] for line in (run / "timing.jsonl").open()]
    rows = _rows(looks, seconds, steps // parts)
    numbers = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    missing = [] if numbers == list(range(steps + 1)) else ["metrics.jsonl has not one line a step"]
    return rows, [*missing, *growth(rows)]


def _start(
    config: pathlib.Path, run: pathlib.Path, output, changes: Sequence[str]
) -> subprocess.Popen:
    own = pathlib.Path(__file__).parent
    paths = [str(own), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", "tim_jax", "train", str(config), f"run.folder={run}", *changes],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)},
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def _looks(process: subprocess.Popen, run: pathlib.Path):
    """Looks at it until it ends, about five times a second."""
    size, step = 0, 0
    while process.poll() is None:
        path = run / "timing.jsonl"
        if path.exists() and path.stat().st_size > size:
            with path.open("rb") as file:
                file.seek(size)
                new = file.read()
            size, step = size + len(new), step + new.count(b"\n")
            try:
                yield _look(process.pid, step)
            except (OSError, ValueError):  # it ends just now
                continue
        time.sleep(0.2)


def _look(pid: int, step: int) -> Look:
    family = [pid, *_children(pid)]
    status = [_status(one) for one in family]
    return Look(
        step,
        sum(float(one["VmRSS"].split()[0]) for one in status) / 1024,
        sum(len(os.listdir(f"/proc/{one}/fd")) for one in family),
        sum(int(one["Threads"]) for one in status),
        len(family),
    )


def _children(pid: int) -> list[int]:
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    own = [int(child) for task in tasks for child in task.read_text().split()]
    return [one for child in own for one in (child, *_children(child))]


def _status(pid: int) -> dict[str, str]:
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _rows(looks: Sequence[Look], seconds: Sequence[float], size: int) -> list[Row]:
    rows = []
    for first in range(1, len(seconds) + 1, size):
        last = first + size - 1
        here = [look for look in looks if first <= look.step <= last]
        times = sorted(1000 * one for one in seconds[first - 1 : last])
        rows.append(
            Row(
                first,
                last,
                statistics.median(look.megabytes for look in here),
                min(look.files for look in here),
                min(look.threads for look in here),
                min(look.processes for look in here),
                times[len(times) // 10],
                statistics.median(times),
            )
        )
    return rows


def growth(rows: Sequence[Row]) -> list[str]:
    """What is more in the last rows than in the second; the first has the compilations.

    The time of a step is that of the best tenth of the steps, which another program on the machine
    disturbs least; of the last two rows the better one counts.
    """
    base, end = rows[1], rows[-2:]
    wrong = []
    most = _MEMORY[0] * base.megabytes + _MEMORY[1]
    if rows[-1].megabytes > most:
        wrong.append(f"memory grows: {base.megabytes:.0f} to {rows[-1].megabytes:.0f} MiB")
    for name, more in _MORE.items():
        before, after = getattr(base, name), min(getattr(row, name) for row in end)
        if after > before + more:
            wrong.append(f"{name} grow: {before} to {after}")
    if min(row.best for row in end) > _SLOWER * base.best:
        wrong.append(f"a step takes longer: {base.best:.1f} to {end[-1].best:.1f} ms")
    return wrong


def _within(rows: Sequence[Row]) -> str:
    """What changed although no limit was passed, and the limits."""
    base, end = rows[1], rows[-1]
    return (
        f"From the second row to the last, memory went from {base.megabytes:.0f} to"
        f" {end.megabytes:.0f} MiB and threads from {base.threads} to {end.threads}. The check"
        f" calls it growth beyond {_MEMORY[0] - 1:.0%} and {_MEMORY[1]} MiB of memory,"
        f" {_MORE['files']} open files, {_MORE['threads']} threads, or {_SLOWER - 1:.0%} of a"
        " step's time."
    )


def _head(steps: int, minutes: float, load: float) -> list[str]:
    return [
        "# A run of many steps",
        "",
        f"Written by `python scripts/soak.py`. Two runs of {steps:,} steps, {minutes:.0f} minutes:"
        f" a tiny model, a reward of the user's in a process of its own, evaluations, and {_SAVES}"
        f" checkpoints in the first and {_FEW_SAVES} in the second, which tells what steps leave"
        " behind from what checkpoints do. They were looked at from outside, through `/proc`,"
        " about five times a second, together with the process of the reward.",
        "",
        *common.machine_text(load, common.versions("jax", "orbax-checkpoint"), timed=False),
        "Memory is the median of the resident memory. Of open files, threads and processes the"
        " fewest that were seen are shown, which a checkpoint that is just being written does not"
        " raise; some threads are those of pools, which come and go. The time of a step is"
        " wall-clock; the best tenth is what other work on the machine disturbs least.",
    ]


def _part(rows: Sequence[Row], wrong: Sequence[str], saves: int) -> str:
    steps = rows[-1].last
    whole = f"metrics.jsonl has one line for each of the {steps:,} steps, and one for the start."
    lines = [
        "",
        f"## {saves} checkpoints",
        "",
        "| steps | memory (MiB) | open files | threads | processes | a step, best tenth (ms) |"
        " median (ms) |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(
            f"| {row.first:,} to {row.last:,} | {row.megabytes:.0f} | {row.files} | {row.threads} |"
            f" {row.processes} | {row.best:.1f} | {row.median:.1f} |"
            for row in rows
        ),
        "",
        "**metrics.jsonl is not complete.**" if any("metrics" in one for one in wrong) else whole,
        "",
        f"**{'; '.join(wrong)}**" if wrong else _within(rows),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
