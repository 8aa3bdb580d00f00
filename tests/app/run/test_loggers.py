import json
import math
import os
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tim_jax.app.config import toml
from tim_jax.app.jobs import train
from tim_jax.app.run import loggers
from tim_jax.app.run.loggers import (
    JsonLines,
    MLflow,
    Tee,
    TensorBoard,
    Wandb,
    extra_sinks,
    plain,
    read_lines,
    scalars,
)
from tim_jax.common.errors import InputError, PreemptedError


def test_lines_are_on_disk_after_every_write(tmp_path):
    path = tmp_path / "m.jsonl"
    sink = JsonLines(path)
    sink.write(1, {"reward": 0.25})
    assert path.read_text() == '{"step": 1, "reward": 0.25}\n'
    sink.write(2, {"text": "π ≈ 3\n"})
    sink.sync()
    assert path.stat().st_size == sink.size()
    assert list(read_lines(path)) == [{"step": 1, "reward": 0.25}, {"step": 2, "text": "π ≈ 3\n"}]
    sink.close()


@given(st.floats(width=32) | st.floats() | st.integers() | st.booleans() | st.text())
def test_any_scalar_survives_strict_json(value):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    back = json.loads(json.dumps(plain(value), allow_nan=False), parse_constant=refuse)
    if isinstance(value, float):
        assert float(back) == value or (math.isnan(value) and math.isnan(float(back)))
    else:
        assert back == value
        assert type(back) is type(value)


def test_arrays_become_numbers_and_lists():
    values = {
        "jax": jnp.float32(0.1),
        "bf16": jnp.bfloat16(1.5),
        "scalar": ml_dtypes.bfloat16(2.5),
        "int": np.int32(7),
        "list": np.array([[1.0, np.nan], [-np.inf, 2.0]], np.float32),
        "path": Path("a/b"),
        "nested": [{"x": (1, None)}],
    }
    assert plain(values) == {
        "jax": float(np.float32(0.1)),
        "bf16": 1.5,
        "scalar": 2.5,
        "int": 7,
        "list": [[1.0, "nan"], ["-inf", 2.0]],
        "path": "a/b",
        "nested": [{"x": [1, None]}],
    }
    with pytest.raises(TypeError, match="set cannot be written"):
        plain({1, 2})


def test_scalars_leave_the_rest_out():
    values = {
        "a": 1,
        "b": True,
        "c": np.float32(2),
        "d": jnp.ones((2,)),
        "e": "x",
        "f": np.str_("y"),
    }
    assert scalars({**values, "g": jnp.int32(3), "h": np.ones((1,))}) == {
        "a": 1.0,
        "b": 1.0,
        "c": 2.0,
        "g": 3.0,
    }


def test_step_is_not_a_value(tmp_path):
    sink = JsonLines(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="own key"):
        sink.write(1, {"step": 2})


def test_offset_cuts_whole_and_half_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    first = JsonLines(path)
    first.write(1, {"a": 1})
    size = first.size()
    first.write(2, {"a": 2})
    with path.open("ab") as file:
        file.write(b'{"step": 3, "a"')
    assert [line["step"] for line in read_lines(path)] == [1, 2]

    again = JsonLines(path, offset=size)
    assert again.size() == size
    again.write(2, {"a": 20})
    assert list(read_lines(path)) == [{"step": 1, "a": 1}, {"step": 2, "a": 20}]
    assert JsonLines(path, offset=0).size() == 0


def test_a_line_file_changed_behind_our_back_is_refused(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n')
    with pytest.raises(InputError, match=r"has 12 bytes.*when it had 100"):
        JsonLines(path, offset=100)
    with pytest.raises(InputError, match="byte 5 does not end a line"):
        JsonLines(path, offset=5)
    assert path.read_bytes() == b'{"step": 1}\n'


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_one_line(tmp_path):
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    sink = JsonLines(tmp_path / "m.jsonl")
    with pytest.raises(InputError, match=r"^cannot write .*m\.jsonl: No space left on device$"):
        sink.write(1, {"a": 1})


def test_unreadable_and_unwritable_files_are_one_line(tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*: No such file"):
        JsonLines(tmp_path / "absent" / "m.jsonl")
    with pytest.raises(InputError, match="cannot read"):
        list(read_lines(tmp_path / "absent.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(InputError, match=r"bad\.jsonl, line 2: not JSON"):
        list(read_lines(tmp_path / "bad.jsonl"))
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    with pytest.raises(InputError, match=r"line 1: \[1\] is not an object"):
        list(read_lines(tmp_path / "bad.jsonl"))


def test_tensorboard_holds_the_scalars(tmp_path):
    def events(folder):
        found = []
        for file in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
            for record in _records(file):
                for value in record.summary.value:
                    found.append((record.step, value.tag, value.simple_value))
        return found

    sink = TensorBoard(tmp_path / "tb")
    sink.write(3, {"reward": 0.5, "text": "x", "bins": np.ones((4,)), "bad": float("nan")})
    sink.write(4, {"eval/pass@1": 0.25})
    sink.close()
    got = events(tmp_path / "tb")
    assert (3, "reward", 0.5) in got
    assert (4, "eval/pass_at_1", 0.25) in got
    assert {tag for _, tag, _ in got} == {"reward", "bad", "eval/pass_at_1"}


@pytest.mark.parametrize(("resumed", "expected"), [(-1, []), (0, [1]), (7, [8])])
def test_tensorboard_resume_hides_later_steps(tmp_path, resumed, expected):
    sink = TensorBoard(tmp_path / "tb", resume_step=resumed)
    sink.close()
    (file,) = (tmp_path / "tb").iterdir()
    start = _events().SessionLog.START
    starts = [record for record in _records(file) if record.session_log.status == start]
    assert [record.step for record in starts] == expected


def _events() -> Any:
    """The module of TensorBoard's messages, whose classes are made as it is imported."""
    from tensorboardX.proto import event_pb2

    return event_pb2


def _records(file):
    """Reads TFRecords by their definition: u64 length, u32 crc, data, u32 crc."""
    data, at = file.read_bytes(), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        yield _events().Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length


@pytest.fixture
def wandb(monkeypatch):
    """W&B, as far as a sink calls it, and `calls`, what it was told.

    Without `commit`, the values of a step are not sent yet.
    """
    module: Any = types.ModuleType("wandb")
    calls = module.calls = []

    class Run:
        def log(self, values, step, commit=None):
            if commit:
                calls.append(("log", step, values))

        def define_metric(self, name, *, summary=None, hidden=None):
            calls.append(("define", name, summary, hidden))

        def finish(self, exit_code=None):
            calls.append(("finish", exit_code))

    def init(**options):
        calls.append(("init", options))
        return Run()

    module.Error, module.init, module.Run = type("Error", (Exception,), {}), init, Run
    module.teardown = lambda: calls.append(("teardown",))
    module.Settings = lambda **options: options
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_resumes_under_the_same_id(tmp_path, wandb):
    for _ in range(2):
        sink = Wandb(tmp_path, project="p", name="n", config={"seed": 1}, mode="offline")
        sink.write(4, {"reward": np.float32(0.5), "note": "x", "bins": np.ones((3,))})
        sink.close()
    calls = wandb.calls
    first, second = (options for kind, *rest in calls if kind == "init" for options in rest)
    assert first["id"] == second["id"] == (tmp_path / "wandb_id").read_text().strip()
    assert first["resume"] == "allow"
    assert first["mode"] == "offline"
    assert first["config"] == {"seed": 1}
    assert ("log", 4, {"reward": 0.5, "note": "x"}) in calls
    # A panel for what is looked at; the rest of both rooms is there, but not drawn.
    defined = [call[1:] for call in calls if call[0] == "define"]
    assert ("mismatch/kl_k3", "last,max", None) in defined
    assert ("mismatch/*", None, True) in defined
    assert calls[-1] == ("finish", 0)


def test_wandb_s_own_variable_counts_unless_the_config_says_another(tmp_path, wandb):
    for changes in ([], ["run.wandb_mode='online'"]):
        config = toml.load("configs/quickstart.toml", ["run.sinks=['wandb']", *changes])
        extra_sinks(config, tmp_path, -1)
    modes = [options["mode"] for kind, *rest in wandb.calls if kind == "init" for options in rest]
    assert modes == [None, "online"]  # None: W&B reads WANDB_MODE


@pytest.mark.parametrize("own", [True, False])
def test_what_wandb_refuses_is_one_line(tmp_path, wandb, own):
    """By its own error, or as of WANDB_MODE=no by one of the settings."""

    def init(**options):
        raise (wandb.Error if own else ValueError)("no\nAPI key")

    wandb.init = init
    with pytest.raises(InputError, match="did not start: no API key; log in") as caught:
        Wandb(tmp_path, project="p", name="n", config={})
    assert "\n" not in str(caught.value)


def test_a_run_goes_on_without_wandb_s_own_process(tmp_path, wandb, capsys):
    def lose(*args, **named):
        wandb.calls.append(("lost",))
        raise ConnectionResetError("Connection of 0123456789 lost")

    sink = Wandb(tmp_path, project="p", name="n", config={})
    sink.write(1, {"reward": 0.5})
    wandb.Run.log = lose
    for step in (2, 3):
        sink.write(step, {"reward": 0.5})
    sink.close()
    # Nothing is asked of it any more, and nothing is left for W&B to do when Python ends.
    assert wandb.calls[-3:] == [("log", 1, {"reward": 0.5}), ("lost",), ("teardown",)]
    assert capsys.readouterr().err == (
        "tim_jax: Weights & Biases takes no more (ConnectionResetError); the run goes on"
        " without it\n"
    )


def test_wandb_s_process_may_end_as_the_run_closes(tmp_path, wandb, capsys):
    def lose(*args, **named):
        raise RuntimeError("no answer\nfrom wandb-core")

    wandb.Run.finish, wandb.teardown = lose, lambda: sys.exit(-15)
    Wandb(tmp_path, project="p", name="n", config={}).close()
    assert "takes no more (RuntimeError);" in capsys.readouterr().err


class Client:
    """MLflow's client, as far as a sink calls it; `scripts/extras.py` tries the real one."""

    said: ClassVar[list] = []

    def __init__(self, uri):
        self.said.append(uri)

    def get_metric_history(self, run, key):
        batches = [call[2].get("metrics", ()) for call in self.said if call]
        points = [point for batch in batches for point in batch if point[0] == key]
        return [SimpleNamespace(step=step) for *_, step in points]

    def __getattr__(self, name):
        def answer(*args, **named):
            self.said.append((name, args, named))
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"), experiment_id="e1")

        return answer


@pytest.fixture
def fake_mlflow(monkeypatch):
    entities = SimpleNamespace(Metric=lambda *point: point, Param=lambda *pair: pair)
    package = SimpleNamespace(MlflowClient=Client, MlflowException=OSError, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", package)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr(Client, "said", [])


@pytest.mark.usefixtures("fake_mlflow")
def test_mlflow_is_given_parameters_and_metrics_and_resumes(tmp_path):
    """The second time from step 3, so that step 4 is done again."""
    config = {"seed": 1, "learner": {"mode": "bypass"}}
    for steps in ([4], [4, 5]):
        sink = MLflow(tmp_path, project="p", name="n", config=config, uri="")
        for step in steps:
            sink.write(step, {"reward": np.float32(0.5), "pass@1": 1.0, "note": "x"})
        sink.close()
    calls = [call for call in Client.said if call]
    names = [name for name, *_ in calls]
    assert names.count("create_run") == names.count("update_run") == 1
    batches = [named for name, _, named in calls if name == "log_batch"]
    assert batches[0]["params"] == [("seed", "1"), ("learner.mode", "bypass")]
    points = [point for batch in batches[1:] for point in batch["metrics"]]
    assert [(name, value, step) for name, value, _, step in points] == [
        ("reward", 0.5, 4),
        ("pass_at_1", 1.0, 4),
        ("reward", 0.5, 5),
        ("pass_at_1", 1.0, 5),
    ]


@pytest.mark.usefixtures("fake_mlflow")
def test_an_mlflow_run_that_was_deleted_is_named_by_its_file(tmp_path, monkeypatch):
    def refuse(*_, **named):
        raise OSError("the run r1 must be in the 'active' state")

    (tmp_path / "mlflow_id").write_text("r1\n")
    monkeypatch.setattr(Client, "update_run", refuse, raising=False)
    with pytest.raises(InputError, match=r"'active' state \(.*mlflow_id names its run; without"):
        MLflow(tmp_path, project="p", name="n", config={}, uri="")


@pytest.mark.usefixtures("fake_mlflow")
def test_an_empty_mlflow_id_of_a_full_disk_is_none(tmp_path):
    (tmp_path / "mlflow_id").touch()
    MLflow(tmp_path, project="p", name="n", config={}, uri="")
    assert (tmp_path / "mlflow_id").read_text() == "r1\n"


@pytest.mark.usefixtures("fake_mlflow")
def test_what_ended_before_its_first_checkpoint_is_another_run(tmp_path, wandb):
    """Which may have had other settings; what goes on after a checkpoint is the same one."""
    config = toml.load("configs/quickstart.toml", ["run.sinks=['wandb', 'mlflow']"])
    known = []
    for start in (-1, -1, 0):
        Client.said.clear()
        extra_sinks(config, tmp_path, start).close()
        begun = any(call and call[0] == "create_run" for call in Client.said)
        known.append(((tmp_path / "wandb_id").read_text(), begun))
    (first, _), (second, _), (third, _) = known
    assert first != second == third
    assert [begun for _, begun in known] == [True, True, False]


@pytest.mark.usefixtures("fake_mlflow")
@pytest.mark.parametrize(
    ("error", "status", "exit_code"),
    [
        (None, "FINISHED", 0),
        (InputError("bad reward"), "FAILED", 1),
        (ZeroDivisionError(), "FAILED", 1),
        (PreemptedError("asked to end"), "KILLED", 255),
        (KeyboardInterrupt(), "KILLED", 255),
    ],
)
def test_loggers_record_how_a_run_ended(tmp_path, wandb, error, status, exit_code):
    changes = ["run.sinks=['tensorboard', 'wandb', 'mlflow']"]
    config = toml.load("configs/quickstart.toml", changes)
    raised = pytest.raises(type(error)) if error else nullcontext()
    with raised, extra_sinks(config, tmp_path, -1):
        if error:
            raise error
    assert wandb.calls[-1] == ("finish", exit_code)
    assert Client.said[-1] == ("set_terminated", ("r1", status), {})


@pytest.mark.parametrize("extra", ["mlflow", "tensorboard", "wandb"])
def test_a_missing_package_names_its_extra(tmp_path, monkeypatch, extra):
    package = {"tensorboard": "tensorboardX"}.get(extra, extra)
    monkeypatch.setitem(sys.modules, package, None)
    config = toml.load("configs/quickstart.toml", [f"run.sinks=['{extra}']"])
    with pytest.raises(InputError, match=rf"{package} is not installed; .*tim-jax\[{extra}\]"):
        extra_sinks(config, tmp_path, -1)


def test_a_folder_called_wandb_is_not_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    with pytest.raises(InputError, match="wandb is not installed"):
        Wandb(tmp_path, project="p", name="n", config={})


def test_tee_writes_to_all(tmp_path):
    tee = Tee((JsonLines(tmp_path / "a"), JsonLines(tmp_path / "b")))
    tee.write(1, {"x": 1})
    tee.close()
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == '{"step": 1, "x": 1}\n'


@pytest.mark.usefixtures("fake_mlflow")
def test_loggers_that_cannot_be_closed_or_started_leave_none_open(tmp_path, monkeypatch, wandb):
    """As TensorBoard's on a full disk, and MLflow where there is none."""

    def fails(self, *_, **options):
        raise InputError("cannot write")

    changes = ["run.sinks=['tensorboard', 'wandb', 'mlflow']"]
    config = toml.load("configs/quickstart.toml", changes)
    with monkeypatch.context() as patch:
        patch.setattr(TensorBoard, "close", fails)
        with pytest.raises(InputError, match="cannot write"), extra_sinks(config, tmp_path, -1):
            raise InputError("first")
    assert wandb.calls.pop() == ("finish", 1)
    assert Client.said[-1] == ("set_terminated", ("r1", "FAILED"), {})
    monkeypatch.setattr(MLflow, "__init__", fails)
    with pytest.raises(InputError, match="cannot write"):
        extra_sinks(config, tmp_path, -1)
    assert wandb.calls.pop() == ("finish", 1)


def test_a_package_that_is_missing_is_named_before_the_run_has_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda package: None)
    folder = tmp_path / "run"
    changes = [f"run.folder={folder}", "run.sinks=['mlflow']"]
    with pytest.raises(InputError, match="the package mlflow is not installed"):
        train.train_run(toml.load("configs/quickstart.toml", changes))
    assert not folder.exists()


def test_a_disk_that_fails_when_lines_are_synced_is_one_line(tmp_path, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    lines = JsonLines(tmp_path / "a.jsonl")
    lines.sync()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot write .*a\.jsonl: No space left"):
        lines.sync()
    JsonLines(os.devnull).sync()
