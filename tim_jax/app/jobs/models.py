"""The jobs of `tim-jax eval` and `export`."""

import sys
import tomllib
from functools import partial
from pathlib import Path

import jax

from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.jobs import checks, memory
from tim_jax.app.jobs.assembling import SHOWN, assemble, evaluator
from tim_jax.app.run import assembly, checkpoints, folders, sources
from tim_jax.app.run.checkpoints import Restored
from tim_jax.app.run.display import completion_line
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import expanded
from tim_jax.model import adapters
from tim_jax.model.adapters import Adapter
from tim_jax.model.execution import Execution
from tim_jax.numerics import Numerics
from tim_jax.rl import programs


def evaluate_run(config: RunConfig, *, model: str | None = None) -> dict[str, float]:
    """Evaluates a model on the held-out problems of `config`.

    The model is the folder or hub name `model`, else the newest checkpoint of the config's run
    folder, else the config's own model.
    """
    if model is not None:
        section = config.model.model_copy(
            update={"path": model, "preset": None, "architecture": None}
        )
        config = config.model_copy(update={"model": section, "lora": None})
    with memory.explained(partial(memory.of_run, config)):
        return _evaluated(config, of_run=model is None)


def _evaluated(config: RunConfig, *, of_run: bool) -> dict[str, float]:
    checks.check_evaluation(config)
    job = assemble(config, training=False)
    try:
        evaluate = job.evaluate or evaluator(
            config, job.execution, job.task, job.text, job.environment
        )
        params, which = job.model.params, ""
        if of_run and checkpoints.list_steps(Path(config.run.folder) / "checkpoints"):
            restored = folders.read_params(
                config.run.folder, params, config=job.model.config, lora=job.model.lora
            )
            _warn_of_damage(restored)
            params = restored.state["params"]
            which = f"step {restored.step} of {config.run.folder}"
        elif of_run:
            which = f"the config's own model, as {config.run.folder} has no checkpoint"
        metrics, samples = evaluate(job.programs.prepare(params))
        if which:
            print(f"evaluated {which}")
        for row in samples[:SHOWN]:
            print(completion_line(row, width=160))
        return metrics
    finally:
        job.task.close()


def export(
    run: str,
    folder: str,
    *,
    step: int | None = None,
    dtype: str | None = None,
    adapter: bool = False,
) -> int:
    """Writes a run's checkpoint (the newest if `step` is None) as a Hugging Face folder.

    Adapters are merged, or with `adapter` written alone, as PEFT loads them. Returns the
    checkpoint's step.

    Raises:
      InputError: no such run or checkpoint, a damaged one, one of another model, or `folder` exists
        and is not empty, or is where the run writes its own model.
    """
    if expanded(folder).resolve() == (expanded(run) / "model").resolve():
        raise InputError(
            f"export: {folder} is where the run {run!r} writes its final model; name another folder"
        )
    config = toml.build(
        tomllib.loads(folders.read_config(run, say=True)), source=f"{run}/config.toml"
    )
    model = sources.make_model(config)
    if adapter and model.lora is None:
        raise InputError(f"export: the run {run!r} trains all weights and has no adapter")
    if adapter and dtype is not None:
        raise InputError("export: an adapter is written in float32; leave the dtype out")
    stops = assembly.stop_tokens(config, model)
    expected = {"config": model.config, "stop_tokens": stops, "lora": model.lora}
    restored = folders.read_params(run, model.params, step=step, **expected)
    _warn_of_damage(restored)
    params = restored.state["params"]
    if adapter and model.lora is not None:
        alone = Adapter(model.lora, jax.device_get(params[adapters.ADAPTERS]))
        adapters.save(folder, alone, model.config, base=config.model.path)
        return restored.step
    if model.lora is not None:
        execution = Execution(model.config, Numerics(), lora=model.lora)
        params = programs.merged_program(execution)(params)
    sources.write(folder, jax.device_get(params), model, stops, dtype=dtype or "float32")
    return restored.step


def _warn_of_damage(restored: Restored) -> None:
    for step, what in restored.damaged:
        line = f"checkpoint of step {step} is damaged: {what}; taking step {restored.step}"
        print(line, file=sys.stderr)
