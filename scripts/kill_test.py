"""Kills a training run in every stage and at random moments, and writes docs/results/kills.md.

    JAX_PLATFORMS=cpu python scripts/kill_test.py [--kills 20]

One run is left alone. A second, of the same config, is ended by SIGKILL again and again: in each
stage of a step (`stages.py`), then at moments drawn at random and while a checkpoint is being
written, until it ends or was killed often enough. A third is killed in each stage of a run's end.
Each is started again by the same command. All must end with the same metrics, samples and
parameters, to the byte.
"""

import argparse
import hashlib
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import bench_common as common
import stages

PAGE = common.RESULTS / "kills.md"
_CONFIG = pathlib.Path(__file__).parent.parent / "configs" / "quickstart.toml"
# The quickstart's model and task; a checkpoint a step, so that many moments are within a save.
_CHANGES = (
    "steps=24",
    "warmup.steps=5",
    "learner.prompts_per_step=8",
    "eval.every=6",
    "eval.prompts=16",
    "run.checkpoint_every=1",
)
_FILES = ("metrics.jsonl", "samples.jsonl", "model/model.safetensors")
_SEED = 0
_AT_THE_END = [name for name in stages.STAGES if name.startswith(("export", "the chart"))]
_OF_A_STEP = [name for name in stages.STAGES if name not in _AT_THE_END]


class Kill(NamedTuple):
    """What one kill met."""

    moment: str
    step: int  # the last line of metrics.jsonl; -1: none
    saving: bool


def main() -> int:
    """Runs both, compares them, writes the page; 1 if a byte differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    load = common.load_average()
    with tempfile.TemporaryDirectory() as folder:
        whole, killed, late = (pathlib.Path(folder, x) for x in ("whole", "killed", "late"))
        started = time.monotonic()
        _finish(_start(whole))
        seconds = time.monotonic() - started
        rng = random.Random(_SEED)
        kills = [_kill_in_stage(killed, stage, times=2) for stage in _OF_A_STEP]
        drawn = (_kill(killed, number, rng, seconds) for number in range(arguments.kills))
        kills += itertools.takewhile(lambda kill: kill is not None, drawn)
        kills += [_kill_in_stage(late, stage, times=1) for stage in _AT_THE_END]
        for run in (killed, late):
            _finish(_start(run))
        same = {
            name: all(_digest(whole / name) == _digest(run / name) for run in (killed, late))
            for name in _FILES
        }
        steps = [json.loads(line)["step"] for line in (killed / "metrics.jsonl").open()]
    PAGE.write_text(_page(kills, same, steps, load))
    print(PAGE.read_text())
    return 0 if all(same.values()) else 1


def _start(folder: pathlib.Path, stage: str = "none", times: int = 1) -> subprocess.Popen:
    command = ["train", str(_CONFIG), *_CHANGES, f"run.folder={folder}"]
    return subprocess.Popen(
        [sys.executable, stages.__file__, stage, str(times), *command],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode}:\n{output}")


def _kill_in_stage(folder: pathlib.Path, stage: str, *, times: int) -> Kill:
    """Starts the run, which kills itself when the stage comes for the `times`-th time."""
    process = _start(folder, stage, times)
    output, _ = process.communicate()
    if process.returncode != -signal.SIGKILL:
        status = process.returncode
        raise SystemExit(f"no kill in {stage!r}: the run ended with status {status}:\n{output}")
    return _killed(folder, stage)


def _kill(folder: pathlib.Path, number: int, rng: random.Random, seconds: float) -> Kill | None:
    """Starts the run and kills it: every third time in a save, else at any time of a whole run.

    None if the run ended before.
    """
    process = _start(folder)
    in_save = number % 3 == 0
    at, skipped = time.monotonic() + rng.uniform(0, 0.8 * seconds), rng.randrange(3)
    seen: set[str] = set()
    while process.poll() is None:
        saving = sorted(path.name for path in (folder / "checkpoints").glob(".saving-*"))
        seen.update(saving)
        if saving and len(seen) > skipped if in_save else time.monotonic() > at:
            break
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        _finish(process)
        return None
    process.communicate()
    return _killed(folder, "in a save" if in_save else "at random")


def _killed(folder: pathlib.Path, moment: str) -> Kill:
    left = list((folder / "checkpoints").glob(".saving-*"))
    return Kill(moment, _last_step(folder), bool(left))


def _last_step(folder: pathlib.Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else -1


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _page(kills: list[Kill], same: dict[str, bool], steps: list[int], load: float) -> str:
    within = sum(kill.saving for kill in kills)
    lines = [
        "# A run that is killed",
        "",
        "Written by `python scripts/kill_test.py`. One run is left alone; two others of the same"
        f" config get SIGKILL {len(kills)} times ({within} times with a checkpoint half written),"
        " in every stage of their work and at random moments, and are started again by the same"
        " command. The quickstart's model and task, shorter:"
        f" `{' '.join(_CHANGES)}`.",
        "",
        *common.machine_text(load, common.versions("jax", "orbax-checkpoint"), timed=False),
        "| file | same bytes as of the run left alone |",
        "|---|---|",
        *(f"| {name} | {'yes' if equal else 'NO'} |" for name, equal in same.items()),
        "",
        f"Steps in metrics.jsonl: {len(steps)} lines, {len(set(steps))} different, up to"
        f" {max(steps)}.",
        "",
        "| kill | moment | last step on disk | checkpoint half written |",
        "|--:|---|--:|---|",
        *(
            f"| {n} | {kill.moment} | {kill.step if kill.step >= 0 else 'none'} |"
            f" {'yes' if kill.saving else 'no'} |"
            for n, kill in enumerate(kills, 1)
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
