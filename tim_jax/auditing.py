"""The job behind `tim-jax audit`: which numerics, cases and placements of which model."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console

from tim_jax import assembly, audit, calibration
from tim_jax.audit import CaseResult, Sizes
from tim_jax.errors import InputError, did_you_mean
from tim_jax.model import hf
from tim_jax.model.config import ModelConfig
from tim_jax.model.params import Params
from tim_jax.numerics import Numerics


def audit_model(source: str, *, quick: bool = False) -> tuple[str, bool]:
    """Audits a preset, model folder, hub name or run folder; prints the table as it grows.

    The numerics are those that a training run would use (row ranges measured on this backend), in
    float32 and bfloat16, and unless `quick` the fixed tiles as well. Where there are several
    devices, placements over them are compared with one device too.

    Returns:
      The result as JSON, and whether every token of every case was equal.
    """
    config, params = _audited(source)
    sizes = audit.Sizes.fitting(config)
    numerics = _numerics(config, sizes, fixed=not quick)
    results = []
    single = audit.audit(params, config, numerics=numerics, sizes=sizes, quick=quick)
    for result in itertools.chain(single, _placed(params, config, sizes)):
        results.append(result)
        done = "control" if result.control else f"{result.unequal_tokens} unequal"
        print(
            f"{result.numerics}; {result.name}: {result.compared_tokens} tokens, {done}", flush=True
        )
    summary = audit.summarise(results, model=source)
    Console().print(audit.table(results))
    print(
        f"{'exact' if summary.passed else 'NOT EXACT'}: {summary.unequal_tokens} of"
        f" {summary.compared_tokens} response tokens unequal"
    )
    return audit.to_json(summary), summary.passed


def _numerics(
    config: ModelConfig, sizes: Sizes, *, column_tiles: int = 1, fixed: bool = False
) -> list[Numerics]:
    """As a run would have them, and with `fixed` the tiles that need no fact about the backend."""
    length = sizes.prompt_length + sizes.response_length
    found: list[Numerics] = []
    for dtype in ("float32", "bfloat16"):
        plain = assembly.fixed_numerics("tiles", dtype, length=length, column_tiles=column_tiles)
        measured = calibration.calibrate(config, plain, batch=sizes.prompts * sizes.samples)
        found += [measured, plain] if fixed and measured != plain else [measured]
    return found


def _placed(params: Params, config: ModelConfig, sizes: Sizes) -> Iterator[CaseResult]:
    """Placements over the devices at hand; a tensor axis needs numerics with column tiles."""
    found = audit.placements(config, sizes, jax.device_count())
    for column_tiles, some in (
        (1, [p for p in found if p.tensor == 1]),
        (max((p.tensor for p in found), default=1), [p for p in found if p.tensor > 1]),
    ):
        if some:
            yield from audit.audit(
                params,
                config,
                numerics=_numerics(config, sizes, column_tiles=column_tiles),
                cases=audit.placed_cases(config, sizes, some),
                sizes=sizes,
                control=False,
            )


def _audited(source: str):
    if source in audit.PRESETS:
        config = audit.PRESETS[source]
        return config, audit.random_params(config, 0)
    folder = Path(source) / "model"
    source = str(folder) if folder.is_dir() else source
    if not Path(source).exists() and "/" not in source:
        hint = did_you_mean(source, audit.PRESETS)
        raise InputError(f"audit: {source!r} is neither a folder nor a preset{hint}")
    config = hf.load_config(source)
    return config, hf.load_params(source, config)
