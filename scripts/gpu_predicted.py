"""Predicts what `scripts/gpu_check.sh` will time, before anybody runs it.

    JAX_PLATFORMS=cpu python scripts/gpu_predicted.py     # needs pip install -e ".[cuda]", no GPU

Compiles every exact program of the check for an H200, about a minute each on two idle cores, and
estimates its time. Writes docs/results/predicted.json, and the tables of
docs/results/calibration.md. `--keep FOLDER` keeps (and takes again) what was compiled; `--only
sampler` predicts the cases with this in their names, and leaves the others. Predictions of the
kernels that were measured stay as they are: they are of tree 5a1e30c.
"""

import argparse
import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parent / "gpu_check"))

import calibrate
import speed
from setting import Setting, parameters
from whole import Whole

from tim_jax.instruments import plan
from tim_jax.instruments.plan import roofline, topology
from tim_jax.instruments.plan.costs import Figures
from tim_jax.instruments.plan.topology import Target

DEVICE = "h200"
STAGES = {"sampling": "sampler", "scoring": "scoring", "updating": "update"}
_LARGEST = 4  # classes that are named
LAYERS = (2, 4)  # of the samplers that are compiled, and extrapolated


@dataclass(frozen=True)
class Compiled:
    """A program's figures, and shares of keys that its rows see."""

    figures: Figures
    shares: dict[str, float]


def main() -> None:
    """Predicts every case, and draws the page."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--keep", type=Path, help="folder of what was compiled")
    options.add_argument("--only", default="", help="cases with this in their names")
    chosen = options.parse_args()
    target = topology.target(f"{DEVICE}:1")
    setting = Setting(smoke=False, out=Path("."))
    cases = {
        timed.name: {**predicted(timed, target, chosen.keep), "tree": _tree()}
        for timed in speed.plan(setting)
        if timed.whole.side == "exact"
        and not timed.name.startswith("profile")
        and chosen.only in timed.name
    }
    write(cases)


def write(cases: dict[str, Any]) -> None:
    """Keeps predictions of this tree's kernels, beside those of the measured ones, and draws."""
    content = json.loads(calibrate.PREDICTED.read_text())
    older = content[DEVICE].get(calibrate.TODAYS, {}).get("cases", {})
    found = {"jax": jax.__version__, "cases": older | cases}
    content[DEVICE][calibrate.TODAYS] = found
    calibrate.PREDICTED.write_text(json.dumps(content, indent=1) + "\n")
    calibrate.main()


def predicted(timed: speed.Timed, target: Target, folder: Path | None) -> dict[str, Any]:
    """Seconds of the case's programs, and what the check would say of them."""
    measured, rates = roofline.calibration(target), topology.GENERATIONS[DEVICE].rates
    assert measured is not None
    seconds, by_sheet, unshown = {}, 0.0, 0.0
    classes = Counter[str]()
    for name, whole, program in timed.compiled():
        made = compiled(name, whole, program, target, folder)
        found, sheet = (
            roofline.estimate(made.figures, rates, "bfloat16", measured=one, **made.shares)
            for one in (measured, None)
        )
        seconds[f"{program}, {whole.amount.new} new tokens"] = found.total
        by_sheet += sheet.total
        unshown += found.total * found.unshown
        classes.update(found.classes)
    total = sum(seconds.values())
    return {
        **_values(timed, list(seconds.values()), measured.rates),
        "seconds": {name: round(one, 5) for name, one in seconds.items()},
        "by the data sheet": round(by_sheet, 5),
        "not shown": round(unshown / total, 3),
        "classes": {kind: round(one / total, 3) for kind, one in classes.most_common(_LARGEST)},
    }


def _values(timed: speed.Timed, seconds: list[float], ceilings: Any) -> dict[str, float]:
    """The check's own figures: a rate, and a share of what the device can do."""
    amount, config = timed.whole.amount, timed.whole.config
    if timed.kind is speed.STEP:
        step = sum(seconds)
        return {"s/step": round(step, 3), "tokens/s": round(amount.rows * amount.new / step)}
    if timed.kind is speed.UPDATE:
        tokens = amount.rows * (amount.prompt + amount.new)
        done = 6 * parameters(config) * tokens / seconds[0]
        share = round(done / ceilings.bfloat16, 3)
        return {"tokens/s": round(tokens / seconds[0]), "share of matmul peak": share}
    between = timed.kind is speed.BETWEEN
    left = speed.SHORT if between else 0
    step = (seconds[-1] - between * seconds[0]) / (amount.new - left)
    context = amount.prompt + (amount.new + left) / 2
    kept = 4 * config.num_layers * config.num_kv_heads * config.head_dim
    moved = 2 * parameters(config) + amount.rows * context * kept
    return {
        "ms/step": round(1e3 * step, 3),
        "tokens/s": round(amount.rows / step),
        "share of memory roofline": round(moved / ceilings.memory / step, 3),
    }


def compiled(
    name: str, whole: Whole, program: str, target: Target, folder: Path | None
) -> Compiled:
    """Of a program of the check, compiled for the target unless the folder has it."""
    file = folder and folder / f"{re.sub(r'[^A-Za-z0-9.+]+', '_', name)}.pickle"
    if file and file.exists():
        return pickle.loads(file.read_bytes())
    with target.tracing():
        work = whole.workload
    stage = plan.compile_stage(work, target, STAGES[program], LAYERS, print)
    made = Compiled(stage.figures, roofline.shares(work, stage.name))
    if file:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(pickle.dumps(made))
    return made


def _tree() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
