"""Uses the optional extras once each, by the feature that needs them, and names each on a line.

`scripts/extras.sh` installs them. What it leaves out: `test` and `reference` are what the tests
import, `docs` builds the site (`scripts/docs.sh`), `gguf` is for `scripts/real_model.sh`, and
`triton` has an environment of its own in CI. `cuda` is JAX's own extra, which pins its plugin to
JAX's version, and gigabytes of NVIDIA's libraries, for which CI has no GPU.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import datasets
from mlflow import MlflowClient

from tim_jax.app.config import toml
from tim_jax.app.run.loggers import JsonLines, extra_sinks
from tim_jax.instruments import auditing
from tim_jax.model.config_file import to_hf
from tim_jax.tasks.base import Example
from tim_jax.tasks.dataset import MathGrader, gym_task
from tim_jax.tasks.guard import Limits

CONFIG = "configs/quickstart.toml"


def math(folder: Path) -> None:
    row = {"question": "1 + 1 / 2", "answer": "3/2"}
    datasets.Dataset.from_list([row]).save_to_disk(folder / "rows")
    read = datasets.load_from_disk(folder / "rows")[0]
    example = Example(read["question"], read["answer"])
    with MathGrader(Limits(workers=1)) as grade:
        grades = grade([example] * 2, ["\\boxed{1.5}", "\\boxed{2}"])
    assert [one.reward for one in grades] == [1.0, 0.0]


def gym(folder: Path) -> None:
    del folder
    task = gym_task("basic_arithmetic", train_size=4, eval_size=2, limits=Limits(workers=1))
    try:
        first = task.train[0]
        (grade,) = task.grade([first], [f"<answer>{first.answer}</answer>"])
    finally:
        task.close()
    assert grade.reward == 1.0


def tensorboard(folder: Path) -> None:
    assert list(_logged(folder, "tensorboard").glob("tensorboard/events*"))


def wandb(folder: Path) -> None:
    mode = "run.wandb_mode='offline'"
    assert list(_logged(folder, "wandb", mode).glob("wandb/offline-run-*/run-*.wandb"))


def mlflow(folder: Path) -> None:
    uri = f"sqlite:///{folder}/mlflow.db"
    run = (_logged(folder, "mlflow", f"run.mlflow_uri='{uri}'") / "mlflow_id").read_text().strip()
    client = MlflowClient(uri)
    points = client.get_metric_history(run, "reward")
    assert [(one.step, one.value) for one in points] == [(1, 0.5), (2, 1.0)]
    assert client.get_run(run).data.params["learner.mode"] == "bypass"


def _logged(folder: Path, sink: str, *changes: str) -> Path:
    """A folder in which a run's sink has written two steps."""
    where = folder / sink
    where.mkdir()
    config = toml.load(CONFIG, [f"run.sinks=['{sink}']", *changes])
    sinks = extra_sinks(config, where, -1)
    for step in (1, 2):
        sinks.write(step, {"reward": 0.5 * step})
    sinks.close()
    return where


def report(folder: Path) -> None:
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text(Path(CONFIG).read_text())
    lines = JsonLines(run / "metrics.jsonl")
    for step in (1, 2, 3):
        lines.write(step, {"reward": 0.1 * step})
    lines.close()
    _command("report", run, "--out", folder / "page.html")
    assert list(folder.glob("page-*.png"))


def plan(folder: Path) -> None:
    """Of the smallest programs: what is used is the TPU's compiler, and what it writes is read."""
    one_layer = replace(auditing.PRESETS["qwen3-blocks"], num_layers=1)
    (folder / "config.json").write_text(json.dumps(to_hf(one_layer)))
    words = "--quick", "--topology", "v5e:2x2", "--json", folder / "plan.json"
    words += "--architecture", folder / "config.json"
    small = "sampling.max_tokens=4", "learner.prompts_per_step=4"
    _command("plan", CONFIG, *words, "numerics.family=pallas_tpu", *small)
    assert (folder / "plan.json").stat().st_size


def _command(*words: object) -> None:
    command = [sys.executable, "-m", "tim_jax", *map(str, words)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr[-2000:]


USES: tuple[Callable[[Path], None], ...] = (
    math,
    gym,
    tensorboard,
    wandb,
    mlflow,
    report,
    plan,
)


def main() -> None:
    print(f"Python {sys.version.split()[0]}, jax {version('jax')}, libtpu {version('libtpu')}")
    for use in USES:
        with tempfile.TemporaryDirectory() as folder:
            use(Path(folder))
        print(f"extra {use.__name__}: works", flush=True)


if __name__ == "__main__":
    main()
