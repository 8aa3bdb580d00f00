"""A study of two dials and two corrections, as its file states it, and runs as they stand."""

import json

import tiny

from tim_jax.app.config import toml
from tim_jax.instruments import study as studies
from tim_jax.instruments.study import running
from tim_jax.instruments.study.definition import Study

CACHE = '{ name = "kv_cache", dtype = "float8_e4m3fn" }'
FILE = f"""
base = "run.toml"
hypothesis = "an fp8 cache lowers the reward"
seeds = [3, 4]

[dial.exact]
[dial.fp8]
sampler.mismatch = [{CACHE}]
[correction.none]
[correction.tis]
learner.mode = "recompute"
learner.corrections = [{{ name = "token_tis" }}]
"""


def make_file(folder):
    """A study's file, beside its run's."""
    (folder / "run.toml").write_text(tiny.RUN)
    path = folder / "one.toml"
    path.write_text(FILE)
    return path


def stated(file, text=None):
    if text is not None:
        file.write_text(text)
    one = running.read(file)
    assert isinstance(one, Study)
    base = toml.read_toml(file.parent / one.base)
    return studies.stated(one, base, file.parent / "study", source=str(file))


def write_run(one, values, *, metric="eval/reward", steps=2, finished=True):
    """A run as it stands in its folder, with these values of its metric."""
    arm = next(arm for arm in one_study(one).arms if arm.name == one.arm)
    one.folder.mkdir(parents=True, exist_ok=True)
    (one.folder / "config.toml").write_text(toml.dump(arm.config(one.seed, one.folder)))
    lines = [{"step": step, metric: value} for step, value in enumerate(values)]
    (one.folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    if finished:
        (one.folder / "checkpoints" / str(steps)).mkdir(parents=True)
        (one.folder / "chart.png").touch()


def one_study(one):
    return running.read_stated(one.folder.parents[2])
