"""Compiles the studies for GPUs (configs/studies/*_gpu.toml) for one, and says whether they fit.

    JAX_PLATFORMS=cpu python scripts/studies_fit.py            # needs pip install "tim-jax[cuda]"

Writes docs/results/studies_gpu.md. No GPU and no network are needed; architectures are known by
name. Programs that several arms share are compiled once.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import bench_common as common

from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.jobs import planning
from tim_jax.instruments.plan import Plan
from tim_jax.instruments.plan.comparison import COMPARED
from tim_jax.instruments.study import definition, measurement, running
from tim_jax.instruments.study.definition import Study

PAGE = common.RESULTS / "studies_gpu.md"
STUDIES = Path(__file__).parent.parent / "configs" / "studies"
GIB = 2**30
HEADER = (
    "| study | arms, sources | sampler, GiB | scoring, GiB | update, GiB |"
    " kernels of the sampler's forward that the learner's has |",
    "|---|---|---|---|---|---|",
)


class Wanted(NamedTuple):
    """A run whose programs are compiled."""

    study: str
    name: str
    config: RunConfig

    @property
    def key(self) -> str:
        """Equal for runs with the same programs, but for losses, corrections and schedules."""
        config = self.config
        learner = config.learner.model_dump(mode="json", exclude={"corrections", "objective"})
        return repr((config.sampler.model_dump(mode="json"), config.sampling, learner))


def runs(path: Path) -> Iterator[Wanted]:
    """The arms of a study of runs; of one at fixed weights, every source at the longest horizon."""
    one = running.read(path)
    base = toml.read_toml(path.parent / one.base)
    if isinstance(one, Study):
        for arm in definition.arms(one, base, source=path.name):
            yield Wanted(path.stem, arm.name, arm.config(0, Path("unused")))
        return
    plain = definition.merged(base, one.common)
    configs = measurement.horizons(one, plain).values()
    longest = max(configs, key=lambda config: config.sampling.max_tokens)
    sampling = {"sampling": {"max_tokens": longest.sampling.max_tokens}}
    for name, source in one.source.items():
        change = {"sampler": {"mismatch": list(source.mismatch)}, "exact": "report"} | sampling
        run = definition.merged(plain, change)
        yield Wanted(path.stem, name, toml.build(run, source=path.name))


def row(study: str, names: list[str], plan: Plan) -> str:
    """A line of the table."""
    sizes = {stage.name: f"{stage.total / GIB:.1f}" for stage in plan.stages}
    compared = [match for match in plan.audit if match.operation.kind in COMPARED]
    equal = sum(not match.differences for match in compared)
    numbers = [sizes.get(name, "") for name in ("sampler", "scoring", "update")]
    fits = "" if plan.fits else " (DOES NOT FIT)"
    return (
        f"| {study} | {', '.join(names)}{fits} | {' | '.join(numbers)} | {equal} of"
        f" {len(compared)} |"
    )


def page(topology: str) -> Iterator[str]:
    """The page's lines."""
    plans: dict[str, Plan] = {}
    rows: dict[tuple[str, str], list[str]] = {}
    for path in sorted(STUDIES.glob("*_gpu.toml")):
        for one in runs(path):
            rows.setdefault((one.study, one.key), []).append(one.name)
            if one.key not in plans:
                print(f"{one.study}: {one.name}", flush=True)
                plans[one.key] = planning.plan_run(
                    one.config, topology, layers=(2, 4), searching=False, say=print
                )
    target = next(iter(plans.values())).target
    yield "# Studies for one GPU, compiled ahead of time"
    yield ""
    yield f"    JAX_PLATFORMS=cpu python scripts/studies_fit.py --topology {topology}"
    yield ""
    yield (
        f"Programs of every arm, compiled for {target.name} on a machine without a GPU, and not run"
        " ([what a GPU has run](gpu.md)); the sampler with 2 and 4 layers and extrapolated, the"
        " learner whole. Sizes are all that lies in a"
        f" device's memory meanwhile, of the {target.capacity / GIB:.1f} GiB that JAX takes of it."
        " Arms in one row have the same programs, but for losses, corrections and schedules. In"
        " every row one kernel is without a counterpart, `exponentials`, which is part of the draw"
        " and not of a log-prob; more are where the arm's sampler differs in its kernels."
    )
    yield ""
    yield from common.machine_text(
        common.load_average(), common.versions("jax", "jaxlib"), timed=False
    )
    yield ""
    yield from HEADER
    for (study, key), names in rows.items():
        yield row(study, names, plans[key])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="h100:1")
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    text = "\n".join(page(options.topology)) + "\n"
    print(text)
    options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
