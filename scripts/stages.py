"""`tim-jax train` that kills itself in a stage of its work.

    python scripts/stages.py STAGE TIMES train CONFIG [KEY=VALUE ...]

When the stage comes for the TIMES-th time, the process gets SIGKILL: nothing in it can take notice.
With the stage `none` it is `tim-jax` itself. `kill_test.py` and the tests use this.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tim_jax.app import cli
from tim_jax.app.jobs import train
from tim_jax.app.run import charts, checkpoints
from tim_jax.model import hf
from tim_jax.rl import drawing

Kill = Callable[[], None]


def main() -> int:
    """Runs the command, with the kill put in its place."""
    stage, times = sys.argv[1], int(sys.argv[2])
    if stage != "none":
        STAGES[stage](_killer(times))
    return cli.main(sys.argv[3:])


def _killer(times: int) -> Kill:
    counter = itertools.count(1)

    def kill() -> None:
        if next(counter) == times:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def _before(owner: Any, name: str, kill: Kill) -> None:
    """Kills when `owner.name` is called."""
    true = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        kill()
        return true(*args, **options)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, kill: Kill) -> None:
    """Kills when `owner.name` has been done."""
    true = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        result = true(*args, **options)
        kill()
        return result

    setattr(owner, name, wrapped)


def _program(name: str) -> Callable[[Kill], None]:
    """Kills when a compiled program of the run has been started and is computing."""

    def install(kill: Kill) -> None:
        true = train.assemble

        def assemble(*args: Any, **options: Any) -> Any:
            job = true(*args, **options)
            program = getattr(job.programs, name)

            def started(*inputs: Any) -> Any:
                result = program(*inputs)
                kill()
                return result

            return replace(job, programs=replace(job.programs, **{name: started}))

        train.assemble = assemble

    return install


def _grading(kill: Kill) -> None:
    """Kills when the completions of a step are about to be graded."""
    true = drawing.graded

    def graded(task: Any, *args: Any) -> Any:
        def grade(*inputs: Any) -> Any:
            kill()
            return task.grade(*inputs)

        return true(replace(task, grade=grade), *args)

    drawing.graded = graded


# In the order of a step, and of the end of a run.
STAGES: dict[str, Callable[[Kill], None]] = {
    "sampling": _program("sample"),
    "grading": _grading,
    "update": _program("update"),
    "before the lines of a step": lambda kill: _before(train, "_record", kill),
    "after the lines of a step": lambda kill: _after(train, "_record", kill),
    "a checkpoint's arrays": lambda kill: _after(checkpoints.ocp.AsyncCheckpointer, "save", kill),
    "a checkpoint's manifest": lambda kill: _before(checkpoints, "write_text", kill),
    "a checkpoint's name": lambda kill: _after(checkpoints, "write_text", kill),
    "an old checkpoint's end": lambda kill: _before(checkpoints.Checkpoints, "_remove_old", kill),
    "export, its weights": lambda kill: _before(hf, "_write_weights", kill),
    "export, its name": lambda kill: _after(hf, "save", kill),
    "the chart": lambda kill: _before(charts, "write_bytes", kill),
}

if __name__ == "__main__":
    sys.exit(main())
