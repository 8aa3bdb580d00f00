"""The recipe for google-tunix, where that can be installed."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


INSTALLED = pytest.mark.skipif(find_spec("tunix") is None, reason="google-tunix is not installed")
# One step of SGD, by what the sampler's log-probs are off: the largest change of a weight, and the
# decay's scale.
STEP = """
import sys

import jax
import numpy as np
import optax
from flax import nnx

sys.path.insert(0, "scripts")
import tunix_recipe as recipe
from tim_jax import schedules


def step(*transforms, off):
    cluster = recipe.make_cluster()
    generate = cluster.generate

    def shifted(*args, **named):
        found = generate(*args, **named)
        found.logprobs = [np.asarray(x) + off for x in found.logprobs]
        return found

    cluster.generate = shifted
    model = cluster.actor_trainer.model
    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    learner = recipe.train(cluster, 1, optax.chain(optax.sgd(1.0), *transforms))
    after = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    apart = jax.tree.map(lambda x, y: float(abs(x - y).max()), before, after)
    report = schedules.decay_report(learner.rl_cluster.actor_trainer.optimizer.opt_state)
    print({"moved": max(jax.tree.leaves(apart)), "scale": float(report.get("lr_scale", 1.0))})


step(schedules.length_triggered_decay(), off=0.0)
step(schedules.length_triggered_decay(), off=-3.0)
step(schedules.length_decay(1), off=0.0)
"""


@pytest.mark.slow
@INSTALLED
def test_tunix_heeds_the_coefficient_and_the_decay():
    """Ratios of e^3 are all masked, so nothing is learnt; a smaller scale makes a smaller step."""
    done = subprocess.run(
        [sys.executable, "-c", STEP], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [ast.literal_eval(x) for x in done.stdout.splitlines() if x.startswith("{'moved'")]
    whole, masked, less = lines
    assert whole["moved"] > 1e-4
    assert masked["moved"] == 0.0
    assert 0.0 < less["scale"] < 1.0
    assert less["moved"] == pytest.approx(less["scale"] * whole["moved"], rel=1e-4)


@pytest.mark.slow
@INSTALLED
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
