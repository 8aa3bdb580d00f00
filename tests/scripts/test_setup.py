"""scripts/setup.sh makes an environment that works, or says why there is none."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def called(command, **variables):
    """What bash did, with the package index out of reach."""
    outside = {k: x for k, x in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    outside |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run(
        ["bash", "-c", command],
        env=outside | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_an_environment_that_was_left_without_pip_gets_it(tmp_path):
    made = tmp_path / "venv"
    venv.create(made, with_pip=False, symlinks=True)
    (made / "kept").touch()
    command = f"set -euo pipefail; source '{SCRIPTS}/setup.sh'; setup"
    done = called(command, VENV=str(made), PYTHON=sys.executable)
    assert "No module named pip" not in done.stderr
    pip = [made / "bin" / "python", "-m", "pip", "--version"]
    assert subprocess.run(pip, capture_output=True, check=False).returncode == 0
    assert (made / "kept").exists()
