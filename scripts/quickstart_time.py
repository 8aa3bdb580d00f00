"""Times the quickstart, its checkpoints and its resuming; writes docs/results/quickstart_time.md.

JAX_PLATFORMS=cpu python scripts/quickstart_time.py        # on an idle machine
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import bench_common as common

from tim_jax.app.config import toml
from tim_jax.app.run import assembly, folders, sources
from tim_jax.app.run.checkpoints import Checkpoints
from tim_jax.rl import programs

PAGE = common.RESULTS / "quickstart_time.md"
CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "quickstart.toml"
GOALS = {"whole": 300.0, "share": 0.02, "resume": 20.0}


def main() -> None:
    options = common.parser("times the quickstart", PAGE).parse_args()
    load = common.load_average()
    changes = ["steps=3", "warmup.steps=3"] if options.smoke else []
    config = toml.load(str(CONFIG), changes)
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder, "run")
        whole = _seconds_until_done(run, changes)
        steps = [json.loads(line)["seconds"] for line in (run / "timing.jsonl").open()]
        # One step more than is waited for: the last one of a run is evaluated before it is written.
        more = [*changes, f"steps={config.steps + 2}"]
        resume = _seconds_to_a_step(run, more, config.steps + 1)
        saves = _seconds_of_saves(config, pathlib.Path(folder, "saves"), options.repeats)
    count = 1 + -(-config.steps // config.run.checkpoint_every)
    share = count * statistics.median(saves) / whole
    rows = [
        ("the whole command, after the install, s", f"{whole:.0f}", f"< {GOALS['whole']:.0f}"),
        ("of it, a GRPO step, median, s", f"{statistics.median(steps):.2f}", ""),
        (f"all {count} checkpoints, share of it", f"{share:.2%}", f"< {GOALS['share']:.0%}"),
        (
            "from the command to the first resumed step, s",
            f"{resume:.1f}",
            f"< {GOALS['resume']:.0f}",
        ),
    ]
    lines = [
        "# The quickstart's time",
        "",
        "Written by `python scripts/quickstart_time.py`: the command in a process of its own, as"
        " `scripts/quickstart.sh` starts it; then again with two steps more, until the first"
        " of them is written. A checkpoint's time is that of saving the quickstart's state and"
        f" waiting for the disk, which a run does not wait for: median of {options.repeats}.",
        "",
        *common.machine_text(load, common.versions("jax", "orbax-checkpoint")),
        "| what | measured | goal |",
        "|---|--:|--:|",
        *(f"| {what} | {value} | {goal} |" for what, value, goal in rows),
    ]
    common.publish(lines, options, PAGE)


def _start(folder: pathlib.Path, changes: list[str]) -> subprocess.Popen:
    command = ["-m", "tim_jax", "train", str(CONFIG), f"run.folder={folder}", *changes]
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
    )


def _seconds_until_done(folder: pathlib.Path, changes: list[str]) -> float:
    started = time.monotonic()
    if _start(folder, changes).wait():
        raise SystemExit("the quickstart ended with an error")
    return time.monotonic() - started


def _seconds_to_a_step(folder: pathlib.Path, changes: list[str], step: int) -> float:
    started = time.monotonic()
    process = _start(folder, changes)
    while process.poll() is None:
        last = (folder / "metrics.jsonl").read_bytes().splitlines()[-1]
        if json.loads(last)["step"] == step:
            break
        time.sleep(0.01)
    seconds = time.monotonic() - started
    if process.poll() is not None:
        raise SystemExit(f"the quickstart ended with status {process.returncode} before {step}")
    process.kill()
    process.wait()
    return seconds


def _seconds_of_saves(config, folder: pathlib.Path, repeats: int) -> list[float]:
    model = sources.make_model(config)
    state = programs.build(
        assembly.make_training(config, assembly.make_execution(config, model))
    ).init(model.params)
    kept, seconds = Checkpoints(folder), []
    for step in range(repeats + 1):
        started = time.monotonic()
        kept.save(step, folders.saved(state, None), {})
        kept.wait()
        seconds.append(time.monotonic() - started)
    kept.close()
    return seconds[1:]  # the first one imports and starts threads


if __name__ == "__main__":
    main()
