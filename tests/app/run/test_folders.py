import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from several import lines_in, wait_until

from tim_jax.app.config import toml
from tim_jax.app.jobs import audit
from tim_jax.app.run import checkpoints, folders, sources
from tim_jax.app.run.checkpoints import Checkpoints, list_steps, restore
from tim_jax.app.run.loggers import read_lines
from tim_jax.common.errors import InputError

CONFIG = 'seed = 0\nsteps = 10\n\n[optimizer]\nlearning_rate = 0.001\n\n[run]\nfolder = "x"\n'
TRANSFORM = optax.chain(optax.clip(1.0), optax.adamw(1e-2))


def first_state():
    params = {
        "w": jnp.asarray(np.linspace(-1.0, 1.0, 600, dtype=np.float32).reshape(20, 30)),
        "half": jnp.asarray(np.ones(7, jnp.bfloat16)),
    }
    # -0.0, a denormal, -inf and two NaNs that differ in their payload.
    odd = np.array([0x80000000, 1, 0xFF800000, 0x7FC00001, 0xFFC12345], np.uint32)
    return {
        "params": params,
        "optimizer": TRANSFORM.init(params),
        "rest": {
            "step": jnp.asarray(np.int32(0)),
            "key": jax.random.key(7),
            "odd": jnp.asarray(odd.view(np.float32)),
            "nothing": (),
        },
    }


@jax.jit
def next_state(state):
    gradients = jax.tree.map(jnp.cos, state["params"])
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        updates, optimizer = TRANSFORM.update(gradients, state["optimizer"], state["params"])
    return {
        "params": optax.apply_updates(state["params"], updates),
        "optimizer": optimizer,
        "rest": {**state["rest"], "step": state["rest"]["step"] + jnp.int32(1)},
    }


def raw(tree):
    """Leaf path -> dtype, shape and bytes."""

    def bits(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        return str(array.dtype), array.shape, array.tobytes()

    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return structure, {jax.tree_util.keystr(path): bits(leaf) for path, leaf in leaves}


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def train(folder, *, stop, every=2, keep=2, pause=0.0, opened=lambda: None):
    """A run without a model: a state, two lines a step, a checkpoint every few steps."""
    with folders.open_run(folder, CONFIG, keep=keep) as run:
        opened()
        state, step = first_state(), 0
        if restored := run.restore(state):
            state, step = restored.state, restored.step
        while step < stop:
            step, state = step + 1, next_state(state)
            run.metrics.write(step, {"w": state["params"]["w"][3, 5], "nan": jnp.float32(jnp.nan)})
            run.samples.write(step, {"text": f"sample {step}"})
            run.timing.write(step, {"seconds": time.monotonic()})
            if step % every == 0:
                run.save(step, state, {"cursor": step * 10})
            time.sleep(pause)
    return state


def test_a_run_that_recorded_unread_keys_goes_on(tmp_path, monkeypatch):
    """Older versions took the end of a constant rate, and an environment's, and others."""

    def read(config):
        raise InputError("the config was read")

    text = before = toml.dump(toml.load(None))
    for now, then in {
        "final_share = 0.0": "final_share = 0.1\ntotal_steps = 100",
        'history = "refuse"': 'history = "keep"',
        "environment_workers = 4": "environment_workers = 2",
        "both_sides = false": "both_sides = true",
        "reward_in_process = false": "reward_in_process = true",
        "reward_time_limit = 600.0": "reward_time_limit = 9.0",
    }.items():
        assert now in before
        before = before.replace(now, then)
    (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text(before)
    with folders.open_run(tmp_path / "run", text) as run:
        assert run.changed == ()
    assert toml.load(tmp_path / "run").optimizer.final_share == 0.0
    (tmp_path / "run" / "config.toml").write_text(before)
    monkeypatch.setattr(sources, "make_model", read)
    with pytest.raises(InputError, match=r"^the config was read"):
        audit.make_bench(str(tmp_path / "run"), prompts=1, samples=1, dtype=None)


@pytest.mark.parametrize("before", ["new", "there", "begun", "saved"])
def test_only_a_run_that_is_refused_with_nothing_done_leaves_no_folder(tmp_path, before):
    folder = tmp_path / "run"
    if before == "there":
        folder.mkdir()
    with suppress(InputError), folders.open_run(folder, CONFIG) as run:
        if before == "begun":
            run.metrics.write(0, {})
        if before == "saved":
            run.save(0, {"params": {"x": np.ones(2)}})
        raise InputError("no model")
    assert folder.exists() == (before != "new")


def test_a_run_and_its_resumption_are_the_same_bits(tmp_path):
    whole = train(tmp_path / "a", stop=7)
    train(tmp_path / "b", stop=5)
    assert list_steps(tmp_path / "b" / "checkpoints") == [2, 4]
    resumed = train(tmp_path / "b", stop=7)
    assert raw(resumed) == raw(whole)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert [line["step"] for line in read_lines(tmp_path / "b" / "timing.jsonl")] == [*range(1, 8)]


def test_restored_bits_structure_and_extra(tmp_path):
    state = train(tmp_path, stop=6)
    for like in (first_state(), abstract(first_state())):
        found = folders.read_checkpoint(tmp_path, like)
        assert (found.step, found.extra, found.damaged) == (6, {"cursor": 60}, ())
        assert raw(found.state) == raw(state)
    only = folders.read_checkpoint(tmp_path, {"params": first_state()["params"]}, step=4)
    assert only.step == 4
    assert set(only.state) == {"params"}
    assert raw(only.state["params"]) != raw(state["params"])
    assert folders.read_config(tmp_path) == CONFIG


def test_restore_onto_other_devices(tmp_path):
    devices = jax.devices()
    if len(devices) < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.sharding.Mesh(np.array(devices[:4]), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    value = jax.random.normal(jax.random.key(0), (8, 6))
    saver = Checkpoints(tmp_path)
    saver.save(1, {"a": jax.device_put(value, split), "b": np.arange(3)}, {})
    saver.close()
    back = restore(tmp_path, {"a": value, "b": np.arange(3)}).state
    assert np.array_equal(back["a"], value)
    assert back["a"].sharding == value.sharding
    assert isinstance(back["b"], np.ndarray)
    assert back["b"].tolist() == [0, 1, 2]
    like = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=split)
    assert restore(tmp_path, {"a": like}).state["a"].sharding == split


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    saver = Checkpoints(tmp_path)
    overwrite = jax.jit(lambda x: x * 0.0 - 1.0, donate_argnums=0)
    expected = np.arange(3_000_000, dtype=np.float32)
    state = jnp.asarray(expected.copy())
    saver.save(1, {"x": state}, {})
    jax.block_until_ready(overwrite(state))
    saver.close()
    found = restore(tmp_path, {"x": jax.ShapeDtypeStruct(expected.shape, jnp.float32)})
    assert np.array_equal(found.state["x"], expected)


def test_retention_and_saving_a_step_twice(tmp_path):
    train(tmp_path, stop=5, every=1, keep=3)
    assert list_steps(tmp_path / "checkpoints") == [3, 4, 5]
    saver = Checkpoints(tmp_path / "checkpoints", keep=3)
    saver.save(5, {"other": jnp.zeros((1,))}, {})
    saver.close()
    assert folders.read_checkpoint(tmp_path, first_state()).step == 5
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "4", "5"]
    with pytest.raises(InputError, match="keep is 0"):
        Checkpoints(tmp_path / "c", keep=0)


@pytest.mark.parametrize(("name", "character"), [("sweep[lr=1e-5]", "["), ("a\\b", "\\")])
def test_a_path_under_which_arrays_would_be_lost_is_refused(tmp_path, name, character):
    for folder in (tmp_path / name, tmp_path / name / "run"):
        with pytest.raises(InputError) as refused:
            folders.open_run(folder, CONFIG)
        assert str(refused.value) == (
            f"{folder / 'checkpoints'}: no checkpoint can be kept under a path with a {character}"
            " in it; use a folder without one, for a run another run.folder"
        )
        assert not (folder / "checkpoints").exists()


def test_a_checkpoint_whose_arrays_are_in_parts_is_not_sealed(tmp_path):
    saver = Checkpoints(tmp_path)
    saver.folder = tmp_path / "a[1]"  # orbax takes it for a pattern and finds no part to merge
    saver.folder.mkdir()
    saver.save(1, {"params": {"a": jnp.arange(8)}}, {})
    with pytest.raises(InputError, match="orbax has not merged the arrays of params"):
        saver.close()
    assert not [*saver.folder.iterdir()]


@pytest.mark.parametrize(
    ("name", "words"),
    [("kept", "kept: it was moved or removed"), ("kept/.saving-1", r"\.saving-1 was removed")],
)
def test_a_folder_that_is_moved_while_it_is_written_is_one_line(tmp_path, monkeypatch, name, words):
    saver = Checkpoints(tmp_path / "kept")
    check, end = checkpoints._check_merged, saver._writer.close

    def moved(*what):
        os.rename(tmp_path / name, tmp_path / "elsewhere")
        check(*what)

    def close():  # as it does if what it still writes has no place
        end()
        raise FileNotFoundError(tmp_path / name)

    monkeypatch.setattr(checkpoints, "_check_merged", moved)
    saver.save(1, {"params": {"a": jnp.arange(8)}}, {})
    with pytest.raises(InputError, match=words):
        saver.wait()
    monkeypatch.setattr(saver._writer, "close", close)
    saver.close()


def _largest(step_folder):
    files = [path for path in (step_folder / "state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def _truncate(step_folder):
    file = _largest(step_folder)
    os.truncate(file, file.stat().st_size // 2)
    return r"has \d+ bytes instead of \d+"


def _flip(step_folder):
    file = _largest(step_folder)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    return "was changed"


def _delete(step_folder):
    _largest(step_folder).unlink()
    return "No such file"


def _cut_manifest(step_folder):
    os.truncate(step_folder / "manifest.json", 40)
    return "manifest.json is cut short"


def _edit_manifest(step_folder):
    path = step_folder / "manifest.json"
    path.write_text(path.read_text().replace('"cursor": 60', '"cursor": 61'))
    return "manifest.json was changed"


def _delete_manifest(step_folder):
    (step_folder / "manifest.json").unlink()
    return "manifest.json: No such file"


@pytest.fixture(scope="module")
def at_6(tmp_path_factory):
    """The folder of a run after six steps, to be copied, and the state of one that went on to 8."""
    folder = tmp_path_factory.mktemp("at_6")
    train(folder / "run", stop=6)
    return folder / "run", train(folder / "on", stop=8)


@pytest.mark.parametrize(
    "damage", [_truncate, _flip, _delete, _cut_manifest, _edit_manifest, _delete_manifest]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(at_6, tmp_path, damage):
    run, whole = at_6
    folder = shutil.copytree(run, tmp_path / "b")
    what = damage(folder / "checkpoints" / "6")
    with folders.open_run(folder, CONFIG) as run:
        found = run.restore(first_state())
        assert found is not None
        assert found.step == 4
        ((step, reason),) = found.damaged
        assert step == 6
        assert re.search(what, reason), reason
        assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (folder / "checkpoints" / "damaged-6").is_dir()
    if damage is _truncate:  # for all others it is the same
        assert raw(train(folder, stop=8)) == raw(whole)
        assert list_steps(folder / "checkpoints") == [6, 8]


def test_a_checkpoint_that_may_not_be_read_is_refused_and_stays(at_6, tmp_path, monkeypatch):
    folder = shutil.copytree(at_6[0], tmp_path / "b")
    newest = folder / "checkpoints" / "6"
    may_read = checkpoints._crc

    def crc(path):
        if path.is_relative_to(newest):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return may_read(path)

    monkeypatch.setattr(checkpoints, "_crc", crc)
    with (
        folders.open_run(folder, CONFIG) as run,
        pytest.raises(InputError, match=rf"cannot read checkpoint {newest}: state/.*: Permission"),
    ):
        run.restore(first_state())
    assert list_steps(folder / "checkpoints") == [4, 6]


def test_no_whole_checkpoint_is_refused_and_nothing_is_touched(tmp_path):
    train(tmp_path, stop=5)
    for step in (2, 4):
        _truncate(tmp_path / "checkpoints" / str(step))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    with (
        folders.open_run(tmp_path, CONFIG) as run,
        pytest.raises(InputError, match=r"is whole: step 4: state/.*; step 2: state/"),
    ):
        run.restore(first_state())
    assert list_steps(tmp_path / "checkpoints") == [2, 4]
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.jsonl")}


def test_a_checkpoint_of_other_rows_is_refused_and_nothing_is_touched(tmp_path):
    train(tmp_path, stop=3)
    with folders.open_run(tmp_path, CONFIG) as run:
        assert run.restore(first_state()) is not None
        run.metrics.write(3, {})
        run.save(3, first_state(), {"rows": 5, "rows_crc32": 1})
        run.metrics.write(4, {})
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    before.pop(tmp_path / ".lock")
    other = CONFIG.replace("steps = 10", "steps = 20")
    with folders.open_run(tmp_path, other, may_change=("steps",)) as run:
        with pytest.raises(InputError, match="the dataset to train on has changed since step 3"):
            run.restore(first_state(), {"rows": 5, "rows_crc32": 2})
        with pytest.raises(ValueError, match="call restore before writing"):
            run.metrics.write(4, {})
        assert before == {path: path.read_bytes() for path in before}
        found = run.restore(first_state(), {"rows": 5, "rows_crc32": 1})
    assert found is not None
    assert found.step == 3
    assert folders.read_config(tmp_path) == other
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_model_with_another_config_or_other_end_tokens_is_refused():
    def refused(was, now):
        marks = [checkpoints.model_mark(*each) for each in (was, now)]
        before = checkpoints.Restored(3, {}, json.loads(json.dumps(marks[0])), ())
        with pytest.raises(InputError) as found:
            checkpoints.check_marks(before, marks[1], "runs/x")
        checkpoints.check_marks(before, marks[0], "runs/x")
        checkpoints.check_marks(replace(before, extra={}), marks[1], "runs/x")  # of an old version
        return str(found.value)

    base, stops = tiny.CONFIG, (1,)
    theta = base.rope.theta
    rope = replace(base, rope=replace(base.rope, theta=50.0), max_positions=7)
    rope = replace(rope, pad_token_id=3)  # of no log-prob
    found = refused((base, stops), (rope, (7, 1)))
    assert found == (
        f"runs/x: the model is another than at step 3: rope.theta was {theta!r}, now 50.0;"
        " the tokens that end a response were [1], now [1, 7]; restore it, or train in another"
        " run.folder"
    )


def test_lines_that_cannot_be_cut_are_refused_before_any_is(tmp_path):
    train(tmp_path, stop=3)
    (tmp_path / "samples.jsonl").unlink()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    other = CONFIG.replace("steps = 10", "steps = 20")
    with (
        folders.open_run(tmp_path, other, may_change=("steps",)) as run,
        pytest.raises(InputError, match=r"samples.jsonl has 0 bytes, but the checkpoint"),
    ):
        run.restore(first_state())
    before.pop(tmp_path / ".lock")
    assert before == {path: path.read_bytes() for path in before}
    assert not (tmp_path / "samples.jsonl").exists()


def test_a_checkpoint_that_cannot_be_deleted_stops_nothing(tmp_path, monkeypatch):
    delete = shutil.rmtree

    def busy(path, ignore_errors=False):  # such as a file on NFS that somebody reads
        if ".deleting-" in str(path):
            if not ignore_errors:
                raise OSError(39, "Directory not empty")
            return
        delete(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", busy)
    train(tmp_path, stop=6, keep=1)
    train(tmp_path, stop=8, keep=1)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [".deleting-2", ".deleting-4", ".deleting-6", "8"]
    monkeypatch.undo()
    train(tmp_path, stop=8, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["8"]


def test_a_run_stays_in_its_folder_if_code_moves_to_another(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with folders.open_run("run", CONFIG) as run:
        os.chdir("elsewhere")
        assert run.folder == tmp_path / "run"
        run.metrics.write(0, {})
        run.save(0, first_state())
    assert list_steps(tmp_path / "run" / "checkpoints") == [0]


def test_another_state_is_refused_by_leaf(tmp_path):
    train(tmp_path, stop=2)
    other = first_state()
    other["params"]["w"] = jnp.zeros((20, 31))
    with pytest.raises(
        InputError, match=r"params\['w'\] is float32\[20,30\] in it, float32\[20,31"
    ):
        folders.read_checkpoint(tmp_path, other)
    with pytest.raises(InputError, match=r"params\['half'\] is bfloat16\[7\] in it, absent here"):
        folders.read_checkpoint(tmp_path, {"params": {}})
    with pytest.raises(InputError, match=r"holds no 'adapter'; it has \['optimizer'"):
        folders.read_checkpoint(tmp_path, {"adapter": {}})
    with pytest.raises(InputError, match=r"holds no checkpoint of step 3; it has \[2\]"):
        folders.read_checkpoint(tmp_path, first_state(), step=3)
    with pytest.raises(InputError, match="holds no checkpoint"):
        folders.read_checkpoint(tmp_path / "absent", first_state())


def test_order_of_calls_is_checked(tmp_path):
    train(tmp_path, stop=2)
    with folders.open_run(tmp_path, CONFIG) as run:
        assert run.resumed
        with pytest.raises(ValueError, match="call restore before writing"):
            run.metrics.write(3, {})
        run.restore(first_state())
        with pytest.raises(ValueError, match="write the metrics of step 3 before"):
            run.save(3, first_state())
        run.save(2, first_state())  # already there: a run that has nothing left to do


def test_a_run_without_a_checkpoint_starts_over(tmp_path):
    train(tmp_path, stop=1)
    assert (tmp_path / "metrics.jsonl").stat().st_size > 0
    with folders.open_run(tmp_path, CONFIG) as run:
        assert run.restore(first_state()) is None
        assert run.metrics.size() == run.samples.size() == run.timing.size() == 0


@pytest.mark.parametrize("left", ["lines", "lines and an empty folder", "model"])
def test_a_run_whose_checkpoints_were_removed_keeps_its_lines(tmp_path, left):
    train(tmp_path, stop=2)
    shutil.rmtree(tmp_path / "checkpoints")
    if left != "lines":
        (tmp_path / "checkpoints").mkdir()
    if left == "model":
        (tmp_path / "model").mkdir()
        (tmp_path / "metrics.jsonl").write_text("")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    with pytest.raises(InputError, match=r"^\S+ holds a run whose checkpoints are gone, and .*put"):
        folders.open_run(tmp_path, CONFIG.replace("10", "20"), may_change=("steps",))
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*.*")}


def test_a_run_that_died_as_it_wrote_its_first_checkpoint_starts_over(tmp_path):
    train(tmp_path, stop=2)
    (tmp_path / "checkpoints" / "2").rename(tmp_path / "checkpoints" / "2.partial")
    with folders.open_run(tmp_path, CONFIG) as run:
        assert run.metrics.size() == 0


def test_a_run_that_died_before_its_first_checkpoint_may_lose_their_folder(tmp_path):
    with folders.open_run(tmp_path, CONFIG) as run:
        run.metrics.write(0, {"eval/reward": 0.5})
    (tmp_path / "checkpoints").rmdir()
    with folders.open_run(tmp_path, CONFIG) as run:
        assert run.metrics.size() == 0


def test_another_config_is_refused_by_key(tmp_path):
    folders.open_run(tmp_path, CONFIG).close()
    other = CONFIG.replace("0.001", "0.002").replace("steps = 10", "steps = 20")
    with pytest.raises(InputError) as caught:
        folders.open_run(tmp_path, other, may_change=("steps",))
    assert "optimizer.learning_rate was 0.001, now 0.002" in str(caught.value)
    assert "steps was" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert folders.read_config(tmp_path) == CONFIG
    folders.open_run(tmp_path, other, may_change=("steps", "optimizer")).close()
    assert folders.read_config(tmp_path) == other


def test_a_run_that_its_reward_ended_goes_on_with_a_higher_limit(tmp_path):
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    before = ["task.kind=builtin", "task.reward=rewards:mine", f"run.folder={tmp_path}"]
    (tmp_path / "config.toml").write_text(toml.dump(toml.load(None, before)))
    config = toml.load(None, [*before, "task.reward_time_limit=1800.0"])
    with folders.open_run(
        tmp_path, toml.dump(config), may_change=folders.changeable(config)
    ) as run:
        (change,) = run.changed
        assert str(change) == "task.reward_time_limit was 600.0, now 1800.0"


def test_config_differences_tell_types_and_absence():
    found = folders.config_differences("a = 1\n[t]\nb = true\n", "a = 1.0\n[t]\nc = 'x'\n")
    assert [str(difference) for difference in found] == [
        "a was 1, now 1.0",
        "t.b was true, now not set",
        't.c was not set, now "x"',
    ]


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"holds no run \(no config.toml, but thesis.tex\)"):
        folders.open_run(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir() if path.name[0] != "."] == ["thesis.tex"]
    with pytest.raises(InputError, match="holds no run: cannot read"):
        folders.read_config(tmp_path)
    with pytest.raises(InputError, match=r"cannot use the run folder .*thesis\.tex"):
        folders.open_run(tmp_path / "thesis.tex" / "run", CONFIG)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"steps = [\n", "is damaged: Invalid value"),
        (b'a = "\xe4"\n', r"is damaged: not UTF-8 text \(byte 5\)"),
    ],
)
def test_a_damaged_config_is_one_line(tmp_path, text, words):
    (tmp_path / "config.toml").write_bytes(text)
    for use in (folders.read_config, lambda folder: folders.open_run(folder, CONFIG)):
        with pytest.raises(InputError, match=rf"config\.toml {words}") as caught:
            use(tmp_path)
        assert "\n" not in str(caught.value)
    assert not folders.finished(tmp_path)


def _unwritable(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    if not os.access(folder, os.W_OK):
        return folder / "run"
    return Path("/sys/kernel/tim_jax_run")  # root may write anywhere but there


def test_a_read_only_folder_is_one_line(tmp_path):
    with pytest.raises(InputError, match="cannot use the run folder") as caught:
        folders.open_run(_unwritable(tmp_path), CONFIG)
    assert "\n" not in str(caught.value)


# --- processes -------------------------------------------------------------------------------

CHILD = """
import sys
sys.path.insert(0, {tests!r})
import app.run.test_folders as test_runs
"""


def child(code, *arguments, **options):
    source = CHILD.format(tests=str(Path(__file__).parents[2])) + code
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def fork_a_worker():
    """Leaves a process that outlives this one, as a grader's may, once its own fork is done."""
    mine, its = os.pipe()
    if os.fork() == 0:
        os.write(its, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(mine, 1)


TRAINING_CHILD = """
stop, opened = int(sys.argv[2]), test_runs.fork_a_worker
test_runs.train(sys.argv[1], stop=stop, every=1, pause=0.01, opened=opened)
"""


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_kill_at_any_moment_loses_and_doubles_nothing(tmp_path, kills):
    """SIGKILL in the middle, restart, compare with a run that was never stopped.

    A start takes seconds. Each number of kills has moments of its own. The folder is locked by a
    live process, and by none of those that a dead one has left.
    """
    stop = 8 * kills + 2
    whole = train(tmp_path / "a", stop=stop, every=1)
    folder, rng = tmp_path / "b", random.Random(kills)
    for _ in range(kills):
        if lines_in(folder / "metrics.jsonl") >= stop:
            break
        process = child(TRAINING_CHILD, folder, stop, start_new_session=True)
        try:
            target = rng.randint(1, 4) + max([0, *list_steps(folder / "checkpoints")])
            wait_until(lambda t=target: lines_in(folder / "timing.jsonl") >= t, process)
            with pytest.raises(InputError, match=rf"in use by process {process.pid} on .*; wait"):
                folders.open_run(folder, CONFIG)
            time.sleep(rng.uniform(0.0, 0.03))
            process.kill()
            assert process.wait() == -signal.SIGKILL
            folders.open_run(folder, CONFIG).close()
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the worker
            process.communicate()
    assert raw(train(folder, stop=stop, every=1)) == raw(whole)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (folder / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    assert [line["step"] for line in read_lines(folder / "timing.jsonl")] == [*range(1, stop + 1)]
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {str(stop - 1), str(stop)}


def test_the_same_process_cannot_open_a_run_twice(tmp_path):
    match = f"in use by process {os.getpid()}"
    with folders.open_run(tmp_path, CONFIG), pytest.raises(InputError, match=match):
        folders.open_run(tmp_path, CONFIG)
    folders.open_run(tmp_path, CONFIG).close()


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on file sizes")
def test_a_checkpoint_that_does_not_fit_is_one_line_and_harms_nothing(tmp_path, capfd):
    state = train(tmp_path, stop=2)
    big = {"x": jnp.asarray(np.random.default_rng(0).normal(size=200_000).astype(np.float32))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    line = "cannot write checkpoints to .*: File too large; earlier checkpoints are unharmed"

    def save(run):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            run.save(3, big)
            run.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with folders.open_run(tmp_path, CONFIG) as run:
        run.restore(first_state())
        run.metrics.write(3, {})
        with pytest.raises(InputError) as caught:
            save(run)
    assert re.fullmatch(line, str(caught.value))
    assert capfd.readouterr().err == ""
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["2"]
    with folders.open_run(tmp_path, CONFIG) as run:
        found = run.restore(first_state())
    assert found is not None
    assert raw(found.state) == raw(state)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
