"""What `tim-jax train` refuses before it begins: by devices, memory and kernels."""

import json
import tomllib
from pathlib import Path

import jax

from tim_jax.config.run import RunConfig
from tim_jax.errors import InputError
from tim_jax.jobs import planning
from tim_jax.plan import budget
from tim_jax.run import assembly, checkpoints, folders


def check_devices(config: RunConfig) -> None:
    """Refuses meshes that do not include all devices of all processes."""
    if jax.process_count() == 1:
        return
    count = len(jax.devices())
    section = config.placement
    for name, where in (("", section.value), (".sampler", section.for_sampler)):
        if where.devices != count:
            raise InputError(
                f"placement{name} ({where}) uses {where.devices} devices, but the"
                f" {jax.process_count()} processes have {count}, and with several all must be used"
            )


def check_memory(config: RunConfig) -> None:
    """Refuses a step that the devices cannot hold, before a weight is read or drawn."""
    devices = tuple(jax.devices())
    try:
        step = planning.workload_of(config, planning.model_config(config, None), devices)
    except InputError:
        return  # a model or placement that is not possible is refused where the run needs it
    budget.check(step, devices)


def check_family(config: RunConfig) -> None:
    """Refuses to resume a run with other kernels, even if "auto" has another meaning by now."""
    folder = Path(config.run.folder)
    if not checkpoints.list_steps(folder / "checkpoints"):
        return
    before, now = _family_before(folder), assembly.family_here(config.numerics.family)
    if before not in (now, "auto"):
        raise InputError(
            f"{folder} holds a run whose numerics.family was {before!r};"
            f" {config.numerics.family!r} is {now!r} here: set numerics.family={before}, or another"
            " run.folder"
        )


def _family_before(folder: Path) -> str:
    """The family in numerics.json; runs of older versions have it in their config only."""
    try:
        return json.loads((folder / "numerics.json").read_text())["family"]
    except (OSError, ValueError, KeyError, TypeError):
        config = tomllib.loads(folders.read_config(folder))
        return config.get("numerics", {}).get("family", "auto")
