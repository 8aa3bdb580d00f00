"""Where a run's metrics go besides its own files."""

from pathlib import Path

from tim_jax import waiting
from tim_jax.config.run import RunConfig
from tim_jax.placement import processes
from tim_jax.run import loggers


def extra_sinks(config: RunConfig, folder: Path, start: int) -> loggers.Tee:
    """TensorBoard and Weights & Biases as `run.sinks` names them, on process 0 alone.

    Args:
      folder: the run's.
      start: the step that the run goes on after; below 0 for a new one.
    """
    section = config.run
    extra: list[loggers.Sink] = []
    if not processes.leads():
        return loggers.Tee(())
    if "tensorboard" in section.sinks:
        own = folder / "tensorboard"
        extra.append(loggers.TensorBoard(own, resume_step=max(start, 0)))
    if "wandb" in section.sinks:
        with waiting.during("starting Weights & Biases"):
            sink = loggers.Wandb(
                folder,
                project=section.wandb_project,
                name=folder.name,
                config=config.model_dump(),
                mode=section.wandb_mode,
            )
        extra.append(sink)
    return loggers.Tee(tuple(extra))
