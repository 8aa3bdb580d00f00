"""The job of `tim-jax audit --sampler`: the mismatch that each difference of a sampler causes.

It is measured on a bench: a model, or a run with its checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tim_jax import mismatch
from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.jobs import checks
from tim_jax.app.jobs.audit import named_model
from tim_jax.app.run import assembly, charts, checkpoints, folders, grading, sources
from tim_jax.app.run import numerics as run_numerics
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import wrong_number
from tim_jax.common.types import Prompts
from tim_jax.instruments import auditing
from tim_jax.instruments.auditing import ablation
from tim_jax.mismatch import Mismatch
from tim_jax.model.execution import Execution
from tim_jax.numerics import describe

_MOST_TOKENS = 2**26  # more are a slip


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


def make_bench(source: str, *, prompts: int, samples: int, dtype: str | None = None) -> Bench:
    """The bench of a run folder, model or preset.

    A run folder comes with its task's prompts, held-out ones if it has some, its sampling and
    numerics and its checkpoints; for others, prompts are random and the temperature is 1.

    Raises:
      InputError: there is no such model, or a number is not positive.
    """
    for name, value in (("prompts", prompts), ("samples", samples)):
        if value < 1:
            raise InputError(f"--{name} must be at least 1, got {value}")
    if (Path(source) / "config.toml").is_file():
        return _of_run(source, prompts=prompts, samples=samples, dtype=dtype)
    config, params = named_model(source, dtype)
    sizes = replace(auditing.Sizes.fitting(config), prompts=prompts, samples=samples)
    length = sizes.prompt_length + sizes.response_length
    _check_tokens(prompts, samples, length)
    numerics = run_numerics.fitted_numerics("auto", dtype or "float32", config, length=length)
    execution = Execution(config, numerics, auditing.plain_sampling(config, sizes))
    checks.check_sampling(
        execution,
        prompts=prompts,
        samples=samples,
        prompt_length=sizes.prompt_length,
        helps="fewer --prompts or --samples need less",
    )
    measured = run_numerics.make_numerics(
        "auto", dtype or "float32", config, length=length, batch=prompts * samples
    )
    execution = replace(execution, numerics=measured)
    return Bench(source, execution, _arrays(params), auditing.draw_prompts(config, sizes), samples)


def _check_tokens(prompts: int, samples: int, length: int) -> None:
    if prompts * samples * length >= _MOST_TOKENS:
        raise InputError(
            f"--prompts {prompts} and --samples {samples} are {prompts * samples} sequences of"
            f" {length} tokens; at most {_MOST_TOKENS} tokens"
        )


def _of_run(source: str, *, prompts: int, samples: int, dtype: str | None) -> Bench:
    changes = [f"numerics.dtype={dtype}"] if dtype else []
    config = toml.load(Path(source) / "config.toml", changes)
    sampling = config.sampling
    _check_tokens(prompts, samples, sampling.max_prompt_length + sampling.longest)
    model = sources.make_model(config)
    execution = assembly.make_execution(assembly.on_one_device(config), model)
    task = grading.make_task(config)
    try:
        # A run that holds nothing out is measured on what it trains on.
        examples = list(task.evaluation[:prompts] or task.train[:prompts])
        text = grading.make_text(config, model, run=Path(source)).declaring(task.environment)
        chosen = text.prompts(examples, range(len(examples)))
    finally:
        task.close()
    steps = checkpoints.list_steps(Path(source) / "checkpoints")
    if not steps:
        raise InputError(f"audit: the run {source} has no checkpoint yet")
    older = partial(_checkpoint, source, config, model, steps)
    return Bench(source, execution, older(0), chosen, samples, older, config.seed)


def _checkpoint(
    source: str, config: RunConfig, model: sources.Model, steps: Sequence[int], updates: int
):
    """Parameters of the checkpoint that is `updates` updates older than the newest."""
    per_step = config.updates_per_step
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


def read_dial(text: str) -> Mismatch:
    """A dial from a TOML file with `mismatch = [...]` or `[sampler] mismatch = [...]`, or a list.

    Raises:
      InputError: it is neither, or an entry is wrong.
    """
    if text.strip().startswith("["):
        _, entries = toml.parse_override(f"mismatch={text.strip()}")
    else:
        data = toml.read_toml(text)
        section = data.get("sampler", {})
        entries = section.get("mismatch") if isinstance(section, dict) else None
        entries = data.get("mismatch", entries)
        if entries is None:
            raise InputError(f"{text}: no list `mismatch`, nor one in a table [sampler]")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"--sampler: {text!r} is no list of entries: [{{name = ...}}, ...]")
    wrong = wrong_number(entries)
    if wrong is not None:
        raise InputError(f"--sampler: mismatch{'.'.join(wrong[0])} = {wrong[1]}: {wrong[2]}")
    return mismatch.build(entries)


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
    results = []
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
    for one in waiting.each(
        measured, "measuring a sampler", about=waiting.COMPILES, total=len(arms)
    ):
        results.append(one)
        print(_line(one), flush=True)
    sampling, numerics = bench.execution.sampling, describe(bench.execution.numerics)
    about = {
        "learner": numerics,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    record = ablation.to_record(results, model=bench.name, about=about)
    baseline = results[0].metrics
    exact = baseline["tokens"] > 0 and baseline["unequal_tokens"] == 0
    print(f"{'exact' if exact else 'NOT EXACT'} where the sampler is the learner's own")
    text = ablation.to_markdown(record)
    return Result(record, ablation.to_json(record), text, exact)


def draw(result: Result, chart: Path) -> None:
    """Draws a measurement's chart, or says why there is none."""
    if any(case["metrics"]["unequal_tokens"] for case in result.record["cases"]):
        charts.source_chart(result.record, chart)
    else:
        print(f"{chart} was not drawn: no token differs")


def _line(result: ablation.ArmResult) -> str:
    values = result.metrics
    return (
        f"{result.case}\n  {int(values['tokens']):,} tokens, {int(values['unequal_tokens']):,}"
        f" unequal, mean |d| {values['log_ratio_abs_mean']:.2e},"
        f" largest {values['log_ratio_abs_max']:.2e}, K3 {values['kl_k3']:.2e}"
    )
