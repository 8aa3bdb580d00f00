"""The job behind `tim-jax audit`: from a model's name to a printed table and a verdict."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tim_jax import assembly, audit, calibration, kernel_choice
from tim_jax.errors import InputError, did_you_mean
from tim_jax.model import hf
from tim_jax.model.config import ModelConfig
from tim_jax.numerics import Family, Numerics


def audit_model(
    source: str, *, quick: bool = False, family: Family = "tiles", interpret: bool = False
) -> tuple[str, bool]:
    """Audits a preset, model folder, hub name or run folder; prints the table as it grows.

    The numerics are those that a training run would use, in float32 and bfloat16; for tiles with
    row ranges measured on this backend, and unless `quick` with fixed tiles as well.

    Returns:
      The result as JSON, and whether every token of every case was equal.
    """
    config, params = _audited(source)
    sizes = audit.Sizes.fitting(config)
    numerics = [
        one
        for dtype in ("float32", "bfloat16")
        for one in _audited_numerics(config, family, dtype, sizes, quick, interpret)
    ]
    used = {audit.describe(one): kernel_choice.kernels_used(config, one) for one in numerics}
    results = []
    for result in audit.audit(params, config, numerics=numerics, sizes=sizes, quick=quick):
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


def _audited_numerics(
    config: ModelConfig,
    family: Family,
    dtype: str,
    sizes: audit.Sizes,
    quick: bool,
    interpret: bool,
) -> list[Numerics]:
    """What a training run would use, and for tiles, unless `quick`, also fixed ones."""
    length = sizes.prompt_length + sizes.response_length
    fixed = assembly.fixed_numerics(family, dtype, length=length)
    fixed = kernel_choice.fitted(config, replace(fixed, interpret=interpret))
    kernel_choice.check(config, fixed)
    measured = calibration.calibrate(config, fixed, batch=sizes.prompts * sizes.samples)
    return [measured] if quick or measured == fixed else [measured, fixed]


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
