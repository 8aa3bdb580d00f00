"""The job behind `tim-jax audit`: which numerics, cases and placements of which model."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
from rich.console import Console

from tim_jax import assembly, audit, calibration, kernel_choice
from tim_jax.audit import CaseResult, Sizes
from tim_jax.model.config import ModelConfig
from tim_jax.model.params import Params
from tim_jax.numerics import Family, Numerics


@dataclass(frozen=True)
class _Audited:
    """A model, and the kernels that it is audited with."""

    params: Params
    config: ModelConfig
    sizes: Sizes
    family: Family
    interpret: bool


def audit_model(
    source: str, *, quick: bool = False, family: Family = "tiles", interpret: bool = False
) -> tuple[str, bool]:
    """Audits a preset, model folder, hub name or run folder; prints the table as it grows.

    The numerics are those that a training run would use, in float32 and bfloat16; for tiles with
    row ranges measured on this backend, and unless `quick` with fixed tiles as well. Where there
    are several devices, placements over them are compared with one device too (if `quick`, those
    over the most).

    Returns:
      The result as JSON, and whether every token of every case was equal.
    """
    config, params = assembly.audited(source)
    it = _Audited(params, config, Sizes.fitting(config), family, interpret)
    numerics = _numerics(it, fixed=not quick)
    used = {audit.describe(one): kernel_choice.kernels_used(config, one) for one in numerics}
    results = []
    single = audit.audit(params, config, numerics=numerics, sizes=it.sizes, quick=quick)
    for result in itertools.chain(single, _placed(it, quick)):
        results.append(result)
        done = "control" if result.control else f"{result.unequal_tokens} unequal"
        print(
            f"{result.numerics}; {result.name}: {result.compared_tokens} tokens, {done}", flush=True
        )
    summary = audit.summarise(results, model=source, kernels=used)
    Console().print(audit.table(results))
    for name, kernels in used.items():
        print(f"{name}: {', '.join(kernels) or 'kernels of XLA'}")
    print(
        f"{'exact' if summary.passed else 'NOT EXACT'}: {summary.unequal_tokens} of"
        f" {summary.compared_tokens} response tokens unequal"
    )
    return audit.to_json(summary), summary.passed


def _numerics(it: _Audited, *, column_tiles: int = 1, fixed: bool = False) -> list[Numerics]:
    """As a run would have them, and with `fixed` the tiles that need no fact about the backend."""
    length = it.sizes.prompt_length + it.sizes.response_length
    found: list[Numerics] = []
    for dtype in ("float32", "bfloat16"):
        plain = assembly.fixed_numerics(it.family, dtype, length=length, column_tiles=column_tiles)
        plain = kernel_choice.fitted(it.config, replace(plain, interpret=it.interpret))
        kernel_choice.check(it.config, plain)
        batch = it.sizes.prompts * it.sizes.samples
        measured = calibration.calibrate(it.config, plain, batch=batch)
        found += [measured, plain] if fixed and measured != plain else [measured]
    return found


def _placed(it: _Audited, quick: bool) -> Iterator[CaseResult]:
    """Placements over the devices at hand; a tensor axis needs numerics with column tiles.

    If `quick`, only those that take as many devices as any does.
    """
    found = audit.placements(it.config, it.sizes, jax.device_count())
    most = max((p.devices for p in found), default=0)
    found = tuple(p for p in found if p.devices == most or not quick)
    for column_tiles, some in (
        (1, [p for p in found if p.tensor == 1]),
        (max((p.tensor for p in found), default=1), [p for p in found if p.tensor > 1]),
    ):
        if some and (column_tiles == 1 or it.family in ("tiles", "native")):
            yield from audit.audit(
                it.params,
                it.config,
                numerics=_numerics(it, column_tiles=column_tiles),
                cases=audit.placed_cases(it.config, it.sizes, some),
                sizes=it.sizes,
                control=False,
            )
