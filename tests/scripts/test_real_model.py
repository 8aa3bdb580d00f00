"""scripts/real_model.sh says in one line what is wrong, with the status of docs/real_model.md."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def main(monkeypatch, tmp_path):
    """The script's `main` on a folder. What it reads a downloaded package with is not needed."""
    gguf = ModuleType("gguf")
    vars(gguf)["GGUFReader"] = object
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import real_model

    monkeypatch.setattr(sys, "argv", ["real_model.py", str(tmp_path)])
    yield real_model.main
    del sys.modules["real_model"]


@pytest.mark.parametrize("damage", ["truncated", "unreadable"])
def test_a_second_call_on_damaged_weights_is_one_line(main, damage, tmp_path, capsys):
    weights = tmp_path / "model.safetensors"
    if damage == "truncated":
        save_file({"x": np.ones(100, np.float32)}, weights)
        os.truncate(weights, weights.stat().st_size // 2)
    else:
        weights.symlink_to("/proc/self/mem")  # which even root cannot read from its start
    assert main() == 2
    line = capsys.readouterr().err
    assert line.startswith(f"real_model: {weights} cannot be read (")
    assert line.endswith("); remove its folder, and it is made again\n")
    assert line.count("\n") == 1


def test_a_second_call_looks_at_more_than_the_weights(main, tmp_path, monkeypatch, capsys):
    save_file({"x": np.ones(100, np.float32)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(sys.modules["real_model"], "check", lambda *_: None)
    assert main() == 2
    assert capsys.readouterr().err == f"real_model: model folder '{tmp_path}' has no config.json\n"


def test_no_python_has_a_status_of_its_own(tmp_path):
    """There is none where only what the script itself calls is found."""
    for name in ("bash", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        ["bash", str(SCRIPTS / "real_model.sh"), str(tmp_path / "model")],
        env={"PATH": str(tmp_path), "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "tim_jax needs Python 3.11 or newer; set PYTHON to one\n"
