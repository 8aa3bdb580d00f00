"""The job of `tim-jax generate`: `api.load` and `api.sample`, with what is wrong said early."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tim_jax.api import model as opening
from tim_jax.api import rollouts
from tim_jax.app.jobs import checks, memory
from tim_jax.common import inputs
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Sampling
from tim_jax.numerics import FamilyChoice
from tim_jax.placement import Placement

_MOST_TOKENS = 64  # of a response if nothing is said: a look, not a rollout


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
        `calibration.calibrate_once`; a run's own measurement serves as well.
    """
    ways = {"": ("--samples", "--max-tokens", "--dtype bfloat16, or --fsdp with more devices")}
    with memory.explained(lambda: ways):
        model = opening.begin(source, dtype=dtype, family=family, placement=where)
        sampling = Sampling(max_tokens or min(_MOST_TOKENS, model.most_tokens), **shape)
        request = rollouts.request(
            model, prompts, samples=samples, sampling=sampling, seed=seed, template=chat_template
        )
        checks.check_sampling(
            model.execution(request.sampling),
            prompts=len(request.prompts),
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
    name = hashlib.sha256(inputs.all_fields((model, dtype)).encode()).hexdigest()[:16]
    file, of_run = folder / f"{name}.json", Path(source) / "calibration.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if of_run.is_file() and not file.exists():
            shutil.copyfile(of_run, file)
    except OSError:  # nothing can be kept there
        return None
    return file
