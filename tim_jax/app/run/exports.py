"""The final model of a run: the folder `model/` in it, which says of which step it is."""

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from tim_jax.app.run import checkpoints, folders
from tim_jax.app.run.sources import Model
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import expanded
from tim_jax.model import hf
from tim_jax.model.files import read_json, write_json
from tim_jax.model.weights import Params

_FOLDER, _STEP = "model", "training_step.json"  # the second beside the model's own files


def write(run: Path, params: Params, model: Model, stops: Iterable[int], *, step: int) -> Path:
    """Writes the final model, and then removes that of an earlier end of the run.

    Args:
      params: its weights, on the host.
      stops: tokens that end a response.
      step: that the weights are of.

    Raises:
      InputError: it cannot be written.
    """
    final, new, old = run / _FOLDER, run / ".model.new", run / ".model.old"
    for left in (new, old, *run.glob(f".{new.name}.*")):  # the last: of a save that was killed
        shutil.rmtree(left, ignore_errors=True)
    generation = hf.generation_config(model.config, model.tokenizer, stops)
    hf.save(new, params, model.config, tokenizer=model.tokenizer, generation=generation)
    try:
        write_json(new / _STEP, {"step": step})
        if final.exists():
            final.rename(old)
        new.rename(final)
    except OSError as error:
        raise InputError(f"cannot write {final}: {error.strerror}") from error
    shutil.rmtree(old, ignore_errors=True)
    return final


def step_of(run: str | os.PathLike[str]) -> int | None:
    """The step that the final model is of; None if there is none, or it does not say."""
    try:
        step = read_json(Path(run, _FOLDER, _STEP)).get("step")
    except InputError:
        return None
    return step if isinstance(step, int) else None


def model_of(source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The folder of a run's final model, if `source` is a run; else `source`.

    Raises:
      InputError: the run has none yet, or went on since, so that a checkpoint is newer.
    """
    run = expanded(source)
    model, steps = run / _FOLDER, checkpoints.list_steps(run / "checkpoints")
    if not model.is_dir():
        if (run / "config.toml").is_file() and (run / "checkpoints").is_dir():
            raise InputError(
                f"the run {str(source)!r} has no final model yet; `tim-jax export` writes that of"
                " a checkpoint"
            )
        return source
    step = step_of(run)
    if _left_behind(run, step, steps):
        of = "an earlier end" if step is None else f"step {step}"
        raise InputError(
            f"the run {str(source)!r} went on to step {steps[-1]}, its final model is of {of};"
            f" `tim-jax export` writes that of a checkpoint, and {str(model)!r} names the old one"
        )
    return model


def _left_behind(run: Path, step: int | None, steps: Sequence[int]) -> bool:
    """Whether a run has a checkpoint that is newer than its final model."""
    if step is not None:
        return step < max(steps, default=step)
    # Runs of before models said their step: their model is that of the end, once they are there.
    return bool(steps) and (run / "config.toml").is_file() and not folders.finished(run)
