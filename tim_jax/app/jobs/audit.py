"""The jobs of `tim-jax audit`: the proof of exactness, and the mismatch of a sampler.

The first audits a model under several numerics, cases and placements. The second, with `--sampler`,
measures what each difference of a sampler causes, on a bench: a model, or a run with its
checkpoints.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

from tim_jax.app.config import toml
from tim_jax.app.run import assembly, folders, sources
from tim_jax.common import waiting
from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.types import Prompts
from tim_jax.instruments import auditing
from tim_jax.instruments.auditing import CaseResult, GradientResult, Sizes, ablation
from tim_jax.instruments.plan import budget
from tim_jax.model import hf
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution
from tim_jax.model.weights import Params
from tim_jax.numerics import FamilyChoice, Numerics, describe

_MOST_TOKENS = 2**26  # of a measurement; more are a slip


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


_WAYS = {"": ("--quick", "a smaller model", "fewer devices, as all are audited")}


@budget.explaining_memory(lambda: _WAYS)
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
    used = assembly.kernels_used(config, numerics)
    results = []
    cases = auditing.standard_cases(config, sizes, quick=quick)
    single = auditing.audit(params, config, numerics=numerics, sizes=sizes, cases=cases)
    both = itertools.chain(single, _audit_placements(it, quick))
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
    gradients = _check_gradients(numerics)
    summary = auditing.summarise(results, model=source, kernels=used, gradients=gradients)
    Console().print(auditing.table(results))
    for name, kernels in used.items():
        print(f"{name}: {', '.join(kernels) or 'kernels of XLA'}")
    print(auditing.verdict(summary))
    return auditing.to_json(summary), summary.passed


def _check_gradients(numerics: Sequence[Numerics]) -> list[GradientResult]:
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
        make = partial(
            assembly.make_numerics,
            it.family,
            dtype,
            it.config,
            length=length,
            column_tiles=column_tiles,
            several_tiles=it.several_tiles,
            interpret=it.interpret,
        )
        measured = make(batch=it.sizes.prompts * it.sizes.samples)
        plain = make(batch=None) if fixed else measured
        numerics += [measured, plain] if measured != plain else [measured]
    return numerics


def _audit_placements(it: _Audited, quick: bool) -> Iterator[CaseResult]:
    """Placements over the devices at hand; if `quick`, over as many of them as any takes.

    A tensor axis needs numerics with column tiles.
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


@dataclass(frozen=True)
class Bench:
    """A model, a learner and prompts, on which samplers are measured."""

    name: str
    execution: Execution  # on one device
    params: Any
    prompts: Prompts
    samples: int
    older: Callable[[int], Any] | None = None  # updates -> parameters of this many updates ago
    seed: int = 0


def make_bench(
    source: str,
    *,
    prompts: int,
    samples: int,
    dtype: str | None = None,
    arms: Sequence[ablation.Arm] = (),
) -> Bench:
    """The bench of a run folder, model or preset.

    A run folder comes with its task's prompts, held-out ones if it has some, its sampling and
    numerics and its checkpoints; for others, prompts are random and the temperature is 1.

    Raises:
      InputError: there is no such model, the sequences are too many or none, or one of the `arms`
        cannot be run on it. The machine is measured after that.
    """
    for name, value in (("prompts", prompts), ("samples", samples)):
        if value < 1:
            raise InputError(f"--{name} must be at least 1, got {value}")
    if (Path(source) / "config.toml").is_file():
        return _make_bench_of_run(source, prompts=prompts, samples=samples, dtype=dtype, arms=arms)
    config, params = named_model(source, dtype)
    dtype = dtype or "float32"
    sizes = replace(Sizes.fitting(config), prompts=prompts, samples=samples)
    length = sizes.prompt_length + sizes.response_length
    _check_tokens(prompts, samples, length)
    numerics = assembly.fitted_numerics("auto", dtype, config, length=length)
    execution = Execution(config, numerics, auditing.plain_sampling(config, sizes))
    ablation.check(arms, execution, older=False, remade=True)
    budget.check_sampling(
        execution,
        prompts=prompts,
        samples=samples,
        prompt_length=sizes.prompt_length,
        helps="fewer --prompts or --samples need less",
    )
    batch = prompts * samples
    measured = assembly.make_numerics("auto", dtype, config, length=length, batch=batch)
    execution = replace(execution, numerics=measured)
    return Bench(source, execution, _arrays(params), auditing.draw_prompts(config, sizes), samples)


def _check_tokens(prompts: int, samples: int, length: int) -> None:
    if prompts * samples * length >= _MOST_TOKENS:
        raise InputError(
            f"--prompts {prompts} and --samples {samples} are {prompts * samples} sequences of"
            f" {length} tokens; at most {_MOST_TOKENS} tokens"
        )


def _make_bench_of_run(
    source: str, *, prompts: int, samples: int, dtype: str | None, arms: Sequence[ablation.Arm]
) -> Bench:
    changes = [f"numerics.dtype={dtype}"] if dtype else []
    config = toml.load(source, changes)
    sampling = config.sampling
    _check_tokens(prompts, samples, sampling.max_prompt_length + sampling.longest)
    model = sources.make_model(config)
    alone = assembly.on_one_device(config)
    unmeasured = assembly.make_execution(alone, model, devices=tuple(jax.devices()))
    ablation.check(arms, unmeasured, older=True, remade=True)
    execution = assembly.make_execution(alone, model)
    task = sources.make_task(config)
    try:
        # A run that holds nothing out is measured on what it trains on.
        examples = list(task.evaluation[:prompts] or task.train[:prompts])
        text = sources.make_text(config, model, run=Path(source)).declaring(task.environment)
        chosen = text.prompts(examples, range(len(examples)))
    finally:
        task.close()
    steps = folders.list_steps(source)
    if not steps:
        raise InputError(f"audit: the run {source} has no checkpoint yet")
    older = partial(_read_older, source, model, steps, config.updates_per_step)
    return Bench(source, execution, older(0), chosen, samples, older, config.seed)


def _read_older(
    source: str, model: sources.Model, steps: Sequence[int], per_step: int, updates: int
):
    """Parameters of the checkpoint `updates` updates before the newest; a step has `per_step`."""
    newest = max(steps)
    wanted, rest = newest - updates // per_step, updates % per_step
    if rest or wanted not in steps:
        ages = sorted((newest - step) * per_step for step in steps if step != newest)
        listed = ", ".join(map(str, ages)) or "none"
        raise InputError(
            f"mismatch 'stale_weights': the run {source} has no checkpoint of {updates} updates"
            f" ago; it has those of: {listed}"
        )
    read = folders.read_params(
        source, model.params, config=model.config, lora=model.lora, step=wanted
    )
    return _arrays(read.state["params"])


def _arrays(params: Any) -> Any:
    return jax.tree.map(jnp.asarray, params)


class Result(NamedTuple):
    """A measurement as a record, JSON and Markdown; `exact` if the baseline has no difference."""

    record: dict[str, Any]
    json: str
    markdown: str
    exact: bool

    @property
    def differs(self) -> bool:
        """Whether a token differs in some case."""
        return any(case["metrics"]["unequal_tokens"] for case in self.record["cases"])


def report(bench: Bench, arms: Sequence[ablation.Arm]) -> Result:
    """Measures the arms, of which the first must be the baseline, and prints a line for each.

    Raises:
      InputError: an entry that this learner's sampler cannot have, before anything is compiled.
    """
    older, prepare = bench.older, jax.jit(bench.execution.prepare)
    ablation.check(arms, bench.execution, older=older is not None, remade=True)
    stale = {
        updates: prepare(older(updates))
        for updates in {arm.mismatch.stale_updates for arm in arms} - {0}
        if older is not None
    }
    results, doing = [], "measuring a sampler"
    measured = ablation.ablate(
        prepare(bench.params),
        bench.prompts,
        arms,
        execution=bench.execution,
        samples=bench.samples,
        seed=bench.seed,
        older=stale.__getitem__ if older else None,
        remade=lambda execution: jax.jit(execution.prepare)(bench.params),
    )
    for one in waiting.each(measured, doing, about=waiting.COMPILES, total=len(arms)):
        results.append(one)
        print(_describe_arm(one), flush=True)
    sampling = bench.execution.sampling
    about = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    about = {"learner": describe(bench.execution.numerics), **about}
    record = ablation.to_record(results, model=bench.name, about=about)
    baseline = results[0].metrics
    exact = baseline["tokens"] > 0 and baseline["unequal_tokens"] == 0
    print(f"{'exact' if exact else 'NOT EXACT'} where the sampler is the learner's own")
    return Result(record, ablation.to_json(record), ablation.to_markdown(record), exact)


def _describe_arm(result: ablation.ArmResult) -> str:
    values = result.metrics
    return (
        f"{result.case}\n  {int(values['tokens']):,} tokens, {int(values['unequal_tokens']):,}"
        f" unequal, mean |d| {values['log_ratio_abs_mean']:.2e},"
        f" largest {values['log_ratio_abs_max']:.2e}, K3 {values['kl_k3']:.2e}"
    )
