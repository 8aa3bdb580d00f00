"""The job of `tim-jax audit --sampler`: the mismatch that each difference of a sampler causes."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from tim_jax import mismatch
from tim_jax.app.config import toml
from tim_jax.app.jobs.benches import Bench
from tim_jax.app.run import charts
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import wrong_number
from tim_jax.instruments.auditing import ablation
from tim_jax.mismatch import Mismatch
from tim_jax.numerics import describe


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


def measure(bench: Bench, dial: Mismatch, *, chart: str | os.PathLike[str] | None = None) -> Result:
    """Measures the baseline, every entry alone and all together, and prints a line for each.

    Raises:
      InputError: an entry that this learner's sampler cannot have, before anything is compiled.
    """
    return report(bench, ablation.alone_and_together(dial), chart=chart)


def report(
    bench: Bench, arms: Sequence[ablation.Arm], *, chart: str | os.PathLike[str] | None = None
) -> Result:
    """As `measure`, with arms of your own; the first must be the baseline."""
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
    if chart is not None and any(case.metrics["unequal_tokens"] for case in results):
        charts.source_chart(record, chart)
    elif chart is not None:
        print(f"{chart} was not drawn: no token differs")
    text = ablation.to_markdown(record)
    return Result(record, ablation.to_json(record), text, exact)


def _line(result: ablation.ArmResult) -> str:
    values = result.metrics
    return (
        f"{result.case}\n  {int(values['tokens']):,} tokens, {int(values['unequal_tokens']):,}"
        f" unequal, mean |d| {values['log_ratio_abs_mean']:.2e},"
        f" largest {values['log_ratio_abs_max']:.2e}, K3 {values['kl_k3']:.2e}"
    )
