"""The jobs of `tim-jax export` and `generate`, which take a model that is there."""

import hashlib
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax

from tim_jax.api import model as opening
from tim_jax.api import rollouts
from tim_jax.app.config import toml
from tim_jax.app.run import assembly, folders, sources
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import all_fields, expanded
from tim_jax.instruments.plan import budget
from tim_jax.model import adapters
from tim_jax.model.adapters import Adapter
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling
from tim_jax.numerics import FamilyChoice, Numerics
from tim_jax.placement import Placement
from tim_jax.rl import programs

_MOST_TOKENS = 64  # of a response if nothing is said: a look, not a rollout


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
    restored.warn()
    params = restored.state["params"]
    if adapter and model.lora is not None:
        alone = Adapter(model.lora, jax.device_get(params[adapters.ADAPTERS]))
        adapters.save(folder, alone, model.config, base=config.model.path)
        return restored.step
    if model.lora is not None:
        # A control may merge by another rule, that of its learner.
        numerics = config.sampler.shared_dial.numerics(Numerics())
        execution = Execution(model.config, numerics, lora=model.lora)
        params = programs.merged_program(execution)(params)
    made = replace(model, params=jax.device_get(params))
    sources.write(folder, made, stops, dtype=dtype or "float32")
    return restored.step


def generate(
    source: str,
    prompts: Sequence[str],
    *,
    max_tokens: int | None,
    shape: Mapping[str, Any],
    samples: int,
    seed: int,
    chat_template: bool | Literal["auto"],
    dtype: str,
    family: FamilyChoice,
    where: Placement,
    measured: Path,
) -> Iterator[tuple[str, str, float]]:
    """Yields (prompt, completion, log-prob of the completion) from a model folder, hub or run.

    As `api.load` and `api.sample`; what the model's config and the machine cannot have is refused
    before the machine is measured and weights are read.

    Args:
      max_tokens: of a response; None: 64, or half of the model's positions if that is less.
      shape: temperature, top-k and top-p, as `Sampling` has them.
      measured: a folder that keeps what is measured of this machine, see
        `fitting.calibrate_once`; a run's own measurement serves as well.
    """
    ways = {"": ("--samples", "--max-tokens", "--dtype bfloat16, or --fsdp with more devices")}
    with budget.explaining_memory(lambda: ways):
        model = opening.begin(source, dtype=dtype, family=family, placement=where)
        sampling = Sampling(max_tokens or min(_MOST_TOKENS, model.most_tokens), **shape)
        request = rollouts.request(
            model, prompts, samples=samples, sampling=sampling, seed=seed, template=chat_template
        )
        budget.check_sampling(
            model.execution(request.sampling),
            prompts=len(request.examples),
            samples=samples,
            prompt_length=request.text.max_prompt_length,
            helps="fewer --samples or --max-tokens, or --fsdp with more devices, need less",
            offload=True,
        )
        file = _measurement(source, model.config, dtype, measured)
        model = opening.complete(model, source, decode_batch=request.rows, file=file)
        rollout = rollouts.draw(model, request)
    for row, completion in enumerate(rollout.text):
        yield prompts[row // samples], completion, float(rollout.log_probs[row].sum())


def _measurement(source: str, model: ModelConfig, dtype: str, folder: Path) -> Path | None:
    """The file that keeps a model's measurement, begun with that of its run if there is one."""
    name = hashlib.sha256(all_fields((model, dtype)).encode()).hexdigest()[:16]
    file, of_run = folder / f"{name}.json", Path(source) / "calibration.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if of_run.is_file() and not file.exists():
            shutil.copyfile(of_run, file)
    except OSError:  # nothing can be kept there
        return None
    return file
