"""What the jobs of mismatch measure samplers on: a model, or a run with its checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.jobs import checks
from tim_jax.app.jobs.audit import named_model
from tim_jax.app.run import assembly, checkpoints, folders, grading, sources
from tim_jax.app.run import numerics as run_numerics
from tim_jax.common.errors import InputError
from tim_jax.common.types import Prompts
from tim_jax.instruments import auditing
from tim_jax.model.execution import Execution
from tim_jax.placement import SINGLE

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
    execution = replace(assembly.make_execution(config, model), placement=SINGLE)
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

    def older(updates: int) -> Any:
        return _checkpoint(source, config, model.params, steps, updates)

    return Bench(source, execution, older(0), chosen, samples, older, config.seed)


def _checkpoint(source: str, config: RunConfig, like: Any, steps: Sequence[int], updates: int):
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
    return _arrays(folders.read_params(source, like, step=wanted).state["params"])


def _arrays(params: Any) -> Any:
    return jax.tree.map(jnp.asarray, params)
