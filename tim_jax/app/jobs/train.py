"""The training job: checks, opens or resumes the run, and follows its steps.

If there are several processes, each runs this with the same config; see `processes`.
"""

from functools import partial
from pathlib import Path

import jax

from tim_jax.app.config import toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.jobs import checks, following, memory, resuming
from tim_jax.app.jobs.assembling import assemble
from tim_jax.app.run import charts, folders
from tim_jax.common import waiting
from tim_jax.common.errors import MismatchError, NonFiniteError, PreemptedError
from tim_jax.placement import processes


def train_run(config: RunConfig) -> Path:
    """Runs (or resumes) the training job of `config`; returns the run folder.

    Raises:
      InputError, MismatchError, NonFiniteError, PreemptedError, OutOfMemoryError: one clear line
        each; what was written stays.
    """
    with memory.explained(partial(memory.of_run, config)):
        return _train_run(config)


def _train_run(config: RunConfig) -> Path:
    section = config.run
    text = toml.dump(config)
    processes.agree(f"jax {jax.__version__}, config {text}", "its config or version of JAX")
    checks.check_devices(config)
    processes.led(partial(checks.check_resumed, config))
    with folders.open_run(
        section.folder, text, may_change=folders.changeable(config), keep=section.keep
    ) as run:
        processes.led(partial(folders.record_start, run.folder))
        checks.check_memory(config)
        job, start = resuming.begun(assemble(config, measured=run.folder / "calibration.json"), run)
        try:
            following.follow(job, run, start)
        except (MismatchError, NonFiniteError, PreemptedError):
            # These errors end all processes. A launcher kills the others as soon as one has ended,
            # so all wait until process 0 has completed the last checkpoint.
            run.wait()
            processes.meet()
            raise
        finally:
            job.task.close()
    folder = Path(section.folder)
    if processes.leads():
        with waiting.during("drawing the chart"):
            charts.training_chart(folder / "metrics.jsonl", folder / "chart.png")
    return folder
