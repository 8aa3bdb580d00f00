"""Takes the gradients of one batch of a gradient study, and compares them over versions of JAX.

The first call trains the study's policy in FOLDER. The second, in an environment with another
version of JAX, takes that policy, draws the same batch and takes the same gradients:

    python scripts/gradient_batch.py configs/studies/gradient.toml runs/batch/old
    python scripts/gradient_batch.py configs/studies/gradient.toml runs/batch/new \
        --like runs/batch/old

Of a study with horizons it is the last one, and the constants of its bound are compared too.
`--source NAME`, which may be repeated, adds sources to the exact sampler.
"""

import argparse
import dataclasses
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tim_jax import mismatch
from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.common.inputs import expanded
from tim_jax.instruments.study import definition, measurement, running
from tim_jax.instruments.study.gradient import Measuring, bound_constants

_BATCH = "batch.npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--like", type=Path, help="folder whose policy and batch are taken")
    parser.add_argument("--source", action="append", default=[])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    found = gradients(options.study, options.like or options.folder, options.source)
    np.savez(options.folder / _BATCH, versions=f"jaxlib {version('jaxlib')}", **found)
    if options.like is not None:
        compare(found, np.load(options.like / _BATCH))


def gradients(path: Path, folder: Path, sources: list[str]) -> dict[str, np.ndarray]:
    """ "source/estimator" -> gradient, "source/tokens" -> draws; by horizon, "source/constant"."""
    study = running.read(path)
    plain = definition.merged(toml.read_toml(path.parent / expanded(study.base)), study.common)
    run = definition.Arm(definition.EXACT, plain)
    seed = int(plain.get("seed", RunConfig().seed))
    one = running.state(study, [run], folder, seeds=[seed])
    running.run(one, jobs=1, say=print)
    policy = measurement.trained(run.config(seed, one.runs[0].folder))
    *_, config = measurement.horizons(study, plain).values()
    bench = measurement._bench(study, policy, config)
    measuring = Measuring(dataclasses.replace(bench, batches=1))
    found = {}
    for source in (definition.EXACT, *sources):
        dial = mismatch.EXACT if source == definition.EXACT else study.dial(source)
        for name, gradient in measuring.batches(dial).gradients.items():
            found[f"{source}/{name}"] = gradient[0]
        found[f"{source}/tokens"] = np.asarray(measuring.rollouts(dial, 1).responses)
        if study.horizon:
            of_bound = bound_constants(measuring, dial, states=study.states)
            found |= {f"{source}/{name}": np.atleast_1d(value) for name, value in of_bound.items()}
    return found


def compare(found: dict[str, np.ndarray], before: np.lib.npyio.NpzFile) -> None:
    print(f"jaxlib {version('jaxlib')} beside {before['versions']}:")
    for name, values in found.items():
        if name.endswith("/tokens"):
            print(f"  {name}: {np.sum(values != before[name])} of {values.size} unequal")
            continue
        difference = np.linalg.norm(values.astype(np.float64) - before[name])
        size = np.linalg.norm(before[name].astype(np.float64))
        relative = difference / size if size else difference  # equal policies differ in no state
        print(f"  {name}: relative difference {relative:.1e} of {values.size} numbers")


if __name__ == "__main__":
    main()
