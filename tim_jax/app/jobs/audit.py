"""The job of `tim-jax audit`: exactness of a model under several numerics, cases, placements."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from tim_jax.app.jobs import memory
from tim_jax.app.run import numerics as run_numerics
from tim_jax.app.run import sources
from tim_jax.common import waiting
from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.instruments import auditing
from tim_jax.instruments.auditing import CaseResult, GradientResult, Sizes
from tim_jax.model import calibration, fitting, hf
from tim_jax.model.config import ModelConfig
from tim_jax.model.weights import Params
from tim_jax.numerics import FamilyChoice, Numerics, describe


@dataclass(frozen=True)
class _Audited:
    """A model, and the kernels that it is audited with."""

    params: Params
    config: ModelConfig
    sizes: Sizes
    family: FamilyChoice
    interpret: bool
    dtypes: tuple[str, ...]
    several_tiles: bool


@memory.explained(lambda: {"": ("--quick", "a smaller model", "fewer devices, as all are audited")})
def audit_model(
    source: str,
    *,
    quick: bool,
    family: FamilyChoice,
    interpret: bool,
    dtype: str | None,
    several_tiles: bool,
) -> tuple[str, bool]:
    """Audits a preset, model folder, hub name or run folder, and prints a line for each case.

    The numerics are those that a training run would use, in `dtype` or, where that is None, in
    float32 and in bfloat16; for tiles with row ranges measured on this backend, and unless `quick`
    with fixed tiles as well. `several_tiles` is `numerics.several_tiles`, which is not taken from a
    run folder. Where there are several devices, placements over them are compared with one device
    too (if `quick`, those over the most). At the end the compiler's gradients are checked.

    Returns:
      The result as JSON, and whether every token of every case was equal and all gradients right.
    """
    config, params = named_model(source, dtype)
    dtypes = (dtype,) if dtype else ("float32", "bfloat16")
    sizes = Sizes.fitting(config)
    it = _Audited(params, config, sizes, family, interpret, dtypes, several_tiles)
    numerics = _numerics(it, fixed=not quick)
    used = {describe(one): fitting.kernels_used(it.config, one) for one in numerics}
    results = []
    cases = auditing.standard_cases(it.config, it.sizes, quick=quick)
    single = auditing.audit(it.params, it.config, numerics=numerics, sizes=it.sizes, cases=cases)
    both = itertools.chain(single, _placed(it, quick))
    controls = len({one.compute_dtype for one in numerics if one.family != "native"})
    total = len(numerics) * len(cases) + controls if jax.device_count() == 1 else None
    said = ""
    for result in waiting.each(both, "auditing a case", about=waiting.COMPILES, total=total):
        results.append(result)
        if result.numerics != said:
            said = result.numerics
            print(said)
        done = "control" if result.control else f"{result.unequal_tokens} unequal"
        print(f"  {result.name}: {result.compared_tokens} tokens, {done}", flush=True)
    gradients = _gradients(numerics)
    summary = auditing.summarise(results, model=source, kernels=used, gradients=gradients)
    Console().print(auditing.table(results))
    for name, kernels in used.items():
        print(f"{name}: {', '.join(kernels) or 'kernels of XLA'}")
    print(auditing.verdict(summary))
    return auditing.to_json(summary), summary.passed


def _gradients(numerics: Sequence[Numerics]) -> list[GradientResult]:
    """The gradients that the compiler makes, in each dtype that is audited."""
    each = dict.fromkeys(map(auditing.of_backward, numerics))
    checked = map(auditing.check_gradients, each)
    doing, total = "checking the compiler's gradients", len(each)
    results = waiting.each(checked, doing, about=waiting.COMPILES, total=total)
    return list(itertools.chain.from_iterable(results))


def _numerics(it: _Audited, *, column_tiles: int = 1, fixed: bool = False) -> list[Numerics]:
    """The numerics of a training run, and with `fixed` those with fixed tiles as well."""
    length = it.sizes.prompt_length + it.sizes.response_length
    numerics: list[Numerics] = []
    for dtype in it.dtypes:
        plain = run_numerics.fitted_numerics(
            it.family,
            dtype,
            it.config,
            length=length,
            column_tiles=column_tiles,
            interpret=it.interpret,
        )
        if it.several_tiles:
            plain = run_numerics.with_several_tiles(plain)
        batch = it.sizes.prompts * it.sizes.samples
        measured = calibration.calibrate(it.config, plain, batch=batch, longest=length)
        numerics += [measured, plain] if fixed and measured != plain else [measured]
    return numerics


def _placed(it: _Audited, quick: bool) -> Iterator[CaseResult]:
    """Placements over the devices at hand; a tensor axis needs numerics with column tiles.

    If `quick`, only those that take as many devices as any does.
    """
    devices = jax.device_count()
    if devices & (devices - 1):
        print(
            f"left out: placements over all {devices} devices, which are no power of two; tim.audit"
            " compares the one that a model is loaded with",
            flush=True,
        )
    placements = auditing.placements(it.config, devices)
    it = replace(it, sizes=it.sizes.rounded(placements))
    most = max((p.devices for p in placements), default=0)
    placements = tuple(p for p in placements if p.devices == most or not quick)
    for column_tiles, some in (
        (1, [p for p in placements if p.tensor == 1]),
        (max((p.tensor for p in placements), default=1), [p for p in placements if p.tensor > 1]),
    ):
        if not some:
            continue
        try:
            numerics = _numerics(it, column_tiles=column_tiles)
        except InputError as error:  # kernels take the model's matrices, but not tiles of them
            print(f"left out: {len(some)} placements with a tensor axis. {error}", flush=True)
            continue
        placed = auditing.placed_cases(it.config, it.sizes, some)
        yield from auditing.audit(
            it.params,
            it.config,
            numerics=numerics,
            cases=(*placed, *auditing.placed_episodes(it.config, it.sizes, some[0])),
            sizes=it.sizes,
            control=False,
        )


def named_model(source: str, dtype: str | None) -> tuple[ModelConfig, Any]:
    """Config and parameters of what an audit names: a preset, a folder, a hub name or a run."""
    if source in auditing.PRESETS:
        config = auditing.PRESETS[source]
        return config, auditing.random_params(config, 0)
    source = str(sources.final_model(source))
    if not Path(source).exists() and "/" not in source and source not in hf.SHIPPED:
        hint = did_you_mean(source, (*hf.SHIPPED, *auditing.PRESETS))
        raise InputError(f"audit: {source!r} is neither a folder nor a preset{hint}")
    config = hf.load_config(source)
    return config, hf.load_params(source, config, dtype=dtype or "float32")
