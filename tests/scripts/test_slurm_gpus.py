"""The batch script of several GPU nodes, with commands of SLURM's names in place of SLURM."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm_gpus.sbatch"


def run(folder: Path, status: int, restarts: int) -> tuple[int, bool]:
    """(status of the script, whether the job is put in the queue again)."""
    for name, line in (("srun", f"exit {status}"), ("scontrol", f'echo "$@" >{folder}/asked')):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    own = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(SCRIPT), "config.toml"], env={**os.environ, **own, "PATH": path}, check=False
    )
    asked = folder / "asked"
    assert not asked.exists() or asked.read_text() == "requeue 7\n"
    return done.returncode, asked.exists()


@pytest.mark.parametrize(
    ("status", "restarts", "again"),
    [
        (0, 0, False),
        (2, 0, False),
        (143, 50, True),
        (5, 50, True),
        (134, 9, True),
        (137, 0, True),
        (137, 10, False),
    ],
)
def test_a_job_goes_on_after_what_was_not_its_own_fault(tmp_path, status, restarts, again):
    assert run(tmp_path, status, restarts) == (status, again)
