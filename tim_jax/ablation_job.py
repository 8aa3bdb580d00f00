"""The job behind `tim-jax audit --sampler`: what mismatch a sampler's differences really cause."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tim_jax import assembly, audit, checkpoints, config_io, mismatch, runs, source_charts
from tim_jax.audit import ablation, ablation_report
from tim_jax.audit.cases import Sizes, plain_sampling
from tim_jax.config import RunConfig
from tim_jax.errors import InputError
from tim_jax.learning import Policy
from tim_jax.mismatch import Mismatch, Setting
from tim_jax.types import Prompts


@dataclass(frozen=True)
class Bench:
    """A model, a learner and prompts, on which samplers are measured."""

    name: str
    policy: Policy
    params: Any
    prompts: Prompts
    samples: int
    older: Callable[[int], Any] | None = None  # updates -> parameters of so many updates ago
    seed: int = 0

    @property
    def setting(self) -> Setting:
        return Setting(self.policy.config, self.policy.numerics, self.policy.sampling)


class Result(NamedTuple):
    """What a measurement says, in every form; `exact`: nothing of the baseline differs."""

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
        _, entries = config_io.parse_override(f"mismatch={text.strip()}")
    else:
        data = config_io.read_toml(text)
        entries = data.get("mismatch", data.get("sampler", {}).get("mismatch"))
        if entries is None:
            raise InputError(f"{text}: no list `mismatch`, nor one in a table [sampler]")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"--sampler: {text!r} is no list of entries: [{{name = ...}}, ...]")
    return mismatch.build(entries)


def make_bench(source: str, *, prompts: int, samples: int, dtype: str | None = None) -> Bench:
    """What `tim-jax audit` can name: a run folder, with its own task's prompts, its sampling and
    numerics and its checkpoints; else a model or preset, with random prompts at temperature 1.

    Raises:
      InputError: there is no such model, or a number is not positive.
    """
    for name, value in (("prompts", prompts), ("samples", samples)):
        if value < 1:
            raise InputError(f"--{name} must be at least 1, got {value}")
    if (Path(source) / "config.toml").is_file():
        return _bench_of_run(source, prompts=prompts, samples=samples, dtype=dtype)
    config, params = assembly.audited(source)
    fitting = Sizes.fitting(config)
    sizes = Sizes(prompts, samples, fitting.prompt_length, fitting.response_length)
    length = sizes.prompt_length + sizes.response_length
    numerics = assembly.make_numerics(
        "tiles", dtype or "float32", config, length=length, batch=prompts * samples
    )
    policy = Policy(config, numerics, plain_sampling(config, sizes))
    return Bench(source, policy, _arrays(params), audit.draw_prompts(config, sizes), samples)


def _bench_of_run(source: str, *, prompts: int, samples: int, dtype: str | None) -> Bench:
    changes = [f"numerics.dtype={dtype}"] if dtype else []
    config = config_io.load(Path(source) / "config.toml", changes)
    model = assembly.make_model(config)
    policy = assembly.make_policy(config, model)
    task = assembly.make_task(config)
    try:
        examples = list(task.evaluation[:prompts])
        found = assembly.make_text(config, model).prompts(examples, range(len(examples)))
    finally:
        task.close()
    steps = checkpoints.list_steps(Path(source) / "checkpoints")
    if not steps:
        raise InputError(f"audit: the run {source} has no checkpoint yet")

    def older(updates: int) -> Any:
        return _checkpoint(source, config, model.params, steps, updates)

    return Bench(source, policy, older(0), found, samples, older, config.seed)


def _checkpoint(source: str, config: RunConfig, like: Any, steps: Sequence[int], updates: int):
    """Parameters of the newest checkpoint but for `updates` updates."""
    per_step = config.learner.mini_batches * config.learner.epochs
    newest = max(steps)
    wanted, rest = newest - updates // per_step, updates % per_step
    if rest or wanted not in steps:
        ages = sorted((newest - step) * per_step for step in steps if step != newest)
        known = ", ".join(map(str, ages)) or "none"
        raise InputError(
            f"mismatch 'stale_weights': the run {source} has no checkpoint of {updates} updates"
            f" ago; it has those of: {known}"
        )
    return _arrays(runs.read_checkpoint(source, {"params": like}, step=wanted).state["params"])


def _arrays(params: Any) -> Any:
    return jax.tree.map(jnp.asarray, params)


def measure(bench: Bench, dial: Mismatch, *, chart: str | os.PathLike[str] | None = None) -> Result:
    """Runs the baseline, every entry alone and all together; prints a line for each as it is there.

    Raises:
      InputError: an entry that this learner's sampler cannot have, before anything is compiled.
    """
    return report(bench, ablation.alone_and_together(dial), chart=chart)


def report(
    bench: Bench, cases: Sequence[ablation.Case], *, chart: str | os.PathLike[str] | None = None
) -> Result:
    """As `measure`, of cases of your own; the first is to be the baseline."""
    older, prepare = bench.older, jax.jit(bench.policy.prepare)
    ablation.check(cases, bench.setting, older=older is not None)
    stale = {
        updates: prepare(older(updates))
        for updates in {case.mismatch.stale_updates for case in cases} - {0}
        if older is not None
    }
    found = []
    for one in ablation.ablate(
        prepare(bench.params),
        bench.prompts,
        cases,
        setting=bench.setting,
        samples=bench.samples,
        seed=bench.seed,
        older=stale.__getitem__ if older else None,
    ):
        found.append(one)
        print(_line(one), flush=True)
    sampling, numerics = bench.policy.sampling, audit.describe(bench.policy.numerics)
    about = {
        "learner": numerics,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    record = ablation_report.to_record(found, model=bench.name, about=about)
    baseline = found[0].metrics
    exact = baseline["tokens"] > 0 and baseline["unequal_tokens"] == 0
    print(f"{'exact' if exact else 'NOT EXACT'} where the sampler is the learner's own")
    if chart is not None and any(case.metrics["unequal_tokens"] for case in found):
        source_charts.source_chart(record, chart)
    text = ablation_report.to_markdown(record)
    return Result(record, ablation_report.to_json(record), text, exact)


def _line(found: ablation.Found) -> str:
    values = found.metrics
    return (
        f"{found.case:<44} {int(values['tokens']):>7,} tokens {int(values['unequal_tokens']):>7,}"
        f" unequal  mean |d| {values['log_ratio_abs_mean']:.2e}"
        f"  max {values['log_ratio_abs_max']:.2e}  k3 {values['kl_k3']:.2e}"
    )
