"""Studies: arms with matched controls, stated before they run, and what they show.

from tim_jax.instruments import study
table = study.load("runs/studies/smoke")     # columns, for pandas.DataFrame or polars.DataFrame
"""

from pathlib import Path
from typing import Any

from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.run import folders
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import expanded
from tim_jax.common.inputs import shipped as shipped_path
from tim_jax.instruments.study import definition, measurement, report, running
from tim_jax.instruments.study.definition import GradientStudy, Study
from tim_jax.instruments.study.running import load

__all__ = ["Study", "load", "run", "say_shipped", "shipped", "stated"]

_SHIPPED = Path("configs", "studies")


def shipped() -> list[tuple[Path, str]]:
    """The studies in ./configs/studies, or those of the package: files and hypotheses."""
    names = sorted(path.name for path in shipped_path(_SHIPPED).glob("*.toml"))
    return [(_SHIPPED / name, running.read(_SHIPPED / name).hypothesis) for name in names]


def say_shipped() -> None:
    """Prints the shipped studies, and where they lie."""
    for path, hypothesis in shipped():
        print(f"{path}\n    {hypothesis}")
    print(f"The files lie in {shipped_path(_SHIPPED).resolve()}; copy one to make your own.")


def run(path: Path, *, folder: Path | None, jobs: int) -> None:
    """Runs or resumes a study, and says what it found."""
    study = running.read(path)
    base = expanded(study.base)
    beside = path.parent / base
    if base.parts[:1] != ("configs",) or beside.exists():  # else one of the shipped `configs/...`
        base = beside
    base = toml.read_toml(base)
    where = Path("runs/studies") / study.name if folder is None else folder
    _say(f"{study.name}: {study.hypothesis}")
    if isinstance(study, GradientStudy):
        _measure(study, base, where, source=str(path))
    else:
        one = stated(study, base, where, source=str(path))
        _say(f"arms: {', '.join(arm.name for arm in one.arms)}; seeds {list(study.seeds)}")
        if warning := report.too_few_seeds(one):
            _say(f"note: {warning}")
        running.run(one, jobs=jobs, say=_say)
        for verdict in report.verdicts(one):
            _say(verdict.line(study.test))
    print(f"study.json and results: {where}")


def stated(study: Study, base: dict[str, Any], folder: Path, *, source: str) -> running.Stated:
    """A study with its arms and controls, written down in its folder.

    Raises:
        InputError: as `definition.arms`; the folder holds something else.
    """
    found = definition.arms(study, base, source=source)
    return running.state(study, found, folder, seeds=study.seeds)


def _measure(study: GradientStudy, base: dict[str, Any], folder: Path, *, source: str) -> None:
    plain = definition.merged(base, study.common)
    configs = measurement.horizons(study, plain)
    measurement.check(study, configs)
    run = definition.Arm(definition.EXACT, plain)
    seed = int(plain.get("seed", RunConfig().seed))
    one = running.state(study, [run], folder, seeds=[seed])
    running.run(one, jobs=1, say=_say)
    (planned,) = one.runs
    if not folders.finished(planned.folder):
        raise InputError(
            f"study: {planned}: the run ended before its last step ({planned.log}), so there is no"
            " policy to measure; change its settings, and give the study another folder (--folder)"
        )
    policy = measurement.trained(run.config(seed, planned.folder))
    records = measurement.measure(study, policy, configs, folder)
    for record in waiting.each(records, "measuring gradients", about=waiting.COMPILES):
        bias = measurement.estimate(record, measurement.RECOMPUTE, "bias")
        _say(
            f"{record['horizon']}, {record['source']}: squared bias {bias.value:.3g}"
            f" +- {bias.error:.1g} of the exact gradient's square"
        )


def _say(text: str) -> None:
    print(text, flush=True)
