"""The recipe for google-tunix, where that can be installed."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("tunix") is None, reason="google-tunix is not installed")
def test_a_correction_and_the_decay_work_inside_tunix():
    command = [sys.executable, "scripts/tunix_recipe.py", "--steps", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [ast.literal_eval(x) for x in done.stdout.splitlines() if x.startswith("{")]
    *steps, decay = lines
    assert len(steps) == 3
    for step in steps:  # float32 on both sides, and the same weights in every step
        assert 0.0 <= step["kl_k3"] < 1e-6
        assert abs(step["coefficient_mean"] - 1.0) < 1e-3
    assert 4.0 < decay["response_length_recent"] <= 8.0
    assert decay["lr_scale"] == 1.0
