"""Nothing that a model, checkpoint, dataset or config brings with it is run; secrets stay secret.

Each test plants code that would leave a mark in the working folder.
"""

import json
import os
import pickle
import shutil
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import fuzzing
import pytest

from tim_jax.app.run import checkpoints, folders, loggers
from tim_jax.common.errors import InputError
from tim_jax.model import hf
from tim_jax.model.files import load_tokenizer
from tim_jax.tasks import custom
from tim_jax.tasks.builtin import ALPHABET
from tim_jax.tasks.dataset import DatasetSource, dataset_task
from tim_jax.tasks.rows import read_rows
from tim_jax.tasks.text import character_tokenizer, encode_prompt

MARK = "mark"
CODE = f"open({MARK!r}, 'w').close()\n"
COMMAND = f"touch {MARK}"
CONFIG = "seed = 0\n"


class Bomb:
    """Leaves the mark when it is unpickled."""

    def __reduce__(self):
        return os.system, (COMMAND,)


PICKLE = pickle.dumps(Bomb())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model and a run, as they should be."""
    folder = tmp_path_factory.mktemp("made")
    fuzzing.furnish(folder)
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, made):
    """Copies of them in a working folder, where no mark may be left."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")  # whoever asks is told yes
    fuzzing.stand(monkeypatch)
    yield tmp_path
    assert not Path(MARK).exists()


def test_the_bomb_is_live():
    pickle.loads(PICKLE)
    assert Path(MARK).exists()
    Path(MARK).unlink()


# In a model folder


@pytest.fixture
def evil():
    """Modules that a model folder may bring, under every name that could be looked for."""
    for name in ("evil", "modeling_evil", "tokenization_qwen3", "configuration_qwen3", "__init__"):
        Path("model", f"{name}.py").write_text(CODE)


def test_code_that_a_config_names_is_refused(evil):
    path = Path("model/config.json")
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"auto_map": {"AutoConfig": "evil.EvilConfig"}}))
    with pytest.raises(InputError, match="auto_map is not supported"):
        hf.load_config("model")
    outcome = fuzzing.run(["generate", "model", "1+2=", "--max-tokens", "4"])
    fuzzing.check(outcome)
    assert outcome.status == 2


@pytest.mark.parametrize("kind", ["EvilTokenizer", "Qwen2Tokenizer", "evil.EvilTokenizer"])
def test_code_that_a_tokenizer_names_is_not_run(evil, kind):
    path = Path("model/tokenizer_config.json")
    named = {"auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | named | {"tokenizer_class": kind}))
    for command in (["generate", "model", "1+2=", "--max-tokens", "4"], ["audit", "model"]):
        fuzzing.check(fuzzing.run(command))
    with suppress(InputError):
        load_tokenizer(Path("model"), vocab_size=100)


def test_pickled_weights_are_not_read():
    for name in ("pytorch_model.bin", "model.pt", "consolidated.pth", "training_args.bin"):
        Path("model", name).write_bytes(PICKLE)
    config = hf.load_config("model")
    hf.load_params("model", config)
    Path("model/model.safetensors").unlink()
    with pytest.raises(InputError, match="pickled weights are not read"):
        hf.load_params("model", config)
    index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    Path("model/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="truncated or corrupt safetensors"):
        hf.load_params("model", config)
    Path("model/model.safetensors.index.json").unlink()
    Path("model/model.safetensors").write_bytes(PICKLE)
    with pytest.raises(InputError, match="truncated or corrupt safetensors"):
        hf.load_params("model", config)


ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ ''|attr('__class__')|attr('__base__')|attr('__subclasses__')() }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('COMMAND').read() }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('COMMAND') }}",
    "own function": "{{ raise_exception.__globals__['__builtins__']['exec']('CODE') }}",
    "item": "{{ messages[0]['content'].__init__.__globals__ }}{{ strftime_now.__globals__ }}",
    "format": "{{ '{0.__class__.__base__.__subclasses__}'.format(messages) }}{{ 1/0 }}",
    "import": "{% import 'os' as os %}{{ os.system('COMMAND') }}",
    "include": "{% include '/etc/passwd' %}",
    "change": "{% set _ = messages.append({'role': 'system', 'content': 'x'}) %}{{ 1/0 }}",
    "large": "{{ range(10 ** 9)|list|length }}",
}


@pytest.mark.parametrize("kind", ESCAPES)
def test_a_chat_template_does_not_get_out_of_its_sandbox(kind):
    tokenizer = character_tokenizer(ALPHABET)
    template = ESCAPES[kind].replace("COMMAND", COMMAND).replace("CODE", CODE.strip())
    tokenizer.chat_template = template.replace("open('", 'open("').replace("', '", '", "')
    with pytest.raises(InputError, match="the chat template refused it") as caught:
        encode_prompt(tokenizer, "1+2=")
    assert "\n" not in str(caught.value)


def test_a_chat_template_of_a_model_folder_does_not_either():
    Path("model/chat_template.jinja").write_text(ESCAPES["globals"].replace("COMMAND", COMMAND))
    outcome = fuzzing.run(["generate", "model", "1+2=", "--max-tokens", "4"])
    fuzzing.check(outcome)
    assert "the chat template refused it" in outcome.err


# In a checkpoint, which is sealed again after code was planted: its checksums are no signature


def sealed(step):
    manifest = json.loads((step / "manifest.json").read_bytes())["manifest"]
    files = sorted(path for path in (step / "state").rglob("*") if path.is_file())
    manifest["files"] = {
        path.relative_to(step).as_posix(): [path.stat().st_size, checkpoints._crc(path)]
        for path in files
    }
    (step / "manifest.json").write_bytes(checkpoints._sealed(manifest))


def test_a_checkpoint_with_pickles_in_it_is_not_unpickled(here):
    step = Path("run/checkpoints/0")
    names = sorted(path for path in (step / "state").rglob("*") if path.is_file())
    assert len(names) > 5
    sealed(step)
    assert fuzzing.run(["export", "run", "good"]) == (0, "")
    for number, name in enumerate(names):
        data = name.read_bytes()
        name.write_bytes(PICKLE)
        sealed(step)
        outcome = fuzzing.run(["export", "run", f"exported-{number}"])
        fuzzing.check(outcome)
        name.write_bytes(data)
    (step / "state" / "params" / "extra.npz").write_bytes(PICKLE)
    (step / "state" / "extra.pkl").write_bytes(PICKLE)
    sealed(step)
    assert fuzzing.run(["export", "run", "last"]) == (0, "")
    for name in ("calibration.json", "numerics.json"):
        Path("run", name).write_bytes(PICKLE)
    fuzzing.check(fuzzing.run(["train", "good.toml", "run.folder=run"]))


# In a dataset


def no_grade(examples, completions):
    raise NotImplementedError


def test_a_script_in_a_dataset_folder_is_not_run():
    folder = Path("data")
    folder.mkdir()
    for name in ("data.py", "train.py", "dataset.py", "__init__.py"):
        (folder / name).write_text(CODE)
    with pytest.raises(InputError, match="no file for split 'train'"):
        read_rows("data")
    for name in ("data/data.py", "data/train.py"):
        with pytest.raises(InputError, match="unknown file type"):
            read_rows(name)
    (folder / "train.pkl").write_bytes(PICKLE)
    shutil.copy("rows.jsonl", folder / "train.jsonl")
    assert len(read_rows("data")) == 8
    (folder / "dataset_info.json").write_text(json.dumps({"builder_name": "data"}))
    with pytest.raises(InputError):  # not one that `datasets` saved
        read_rows("data")


def test_a_pickle_in_a_parquet_files_schema_is_not_unpickled():
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    marks = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": PICKLE,
    }
    fields = [
        pyarrow.field("prompt", pyarrow.string(), metadata=marks),
        pyarrow.field("answer", pyarrow.string()),
    ]
    table = pyarrow.table([["1+2="], ["3"]], schema=pyarrow.schema(fields))
    parquet.write_table(table, "rows.parquet")
    written = parquet.read_schema("rows.parquet").field("prompt").metadata
    assert written[b"ARROW:extension:name"] == b"arrow.py_extension_type"
    assert [row.values["answer"] for row in read_rows("rows.parquet")] == ["3"]
    Path("pickle.parquet").write_bytes(PICKLE)
    with pytest.raises(InputError, match="not readable as Parquet"):
        read_rows("pickle.parquet")


def test_text_of_a_dataset_is_text():
    rows = [{"prompt": text, "answer": text} for text in ESCAPES.values()]
    rows = [
        {"prompt": f"{i} {row['prompt']}", "answer": row["answer"]} for i, row in enumerate(rows)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = dataset_task(DatasetSource(path="rows.jsonl", template="a {prompt} b"), no_grade)
    assert "__class__" in str(task.train) + str(task.evaluation)


# In a config


def test_text_of_a_config_is_text():
    values = (f"__import__('os').system('{COMMAND}')", f"$({COMMAND})", f"`{COMMAND}`", "${HOME}")
    for value in values:
        for key in ("run.wandb_project", "model.template_options.x", "task.parameters.x"):
            quoted = f'{key}="""{value}"""'
            given = [quoted, "run.folder=made", "run.sinks=[]"]
            fuzzing.check(fuzzing.run(["train", "good.toml", *given]))


@pytest.mark.parametrize(
    "function", ["os:system", "subprocess:getoutput", "builtins:exec", "shutil:rmtree", "os.path:x"]
)
def test_a_config_cannot_name_a_function_of_python_itself(function):
    with pytest.raises(InputError, match="is a module of Python; name one of your own"):
        custom.load_function(function)
    task = f"task={{kind = 'custom', factory = '{function}', parameters = {{command = 'x'}}}}"
    outcome = fuzzing.run(["train", "good.toml", task, "run.folder=made"])
    fuzzing.check(outcome)
    assert "is a module of Python" in outcome.err


def test_a_run_that_is_exported_does_not_call_the_functions_that_its_config_names():
    Path("evil_rewards.py").write_text(CODE)
    path = Path("run/config.toml")
    path.write_text(path.read_text().replace("[task]", '[task]\nreward = "evil_rewards:f"'))
    assert 'reward = "evil_rewards:f"' in path.read_text()
    assert fuzzing.run(["export", "run", "exported"]) == (0, "")


# Links


NAMES = (
    *("config.toml", ".config.toml", "metrics.jsonl", "timing.jsonl", "samples.jsonl", ".lock"),
    *(
        "numerics.json",
        "calibration.json",
        "started.json",
        "chart.png",
        "non_finite.npz",
        "wandb_id",
    ),
    *("checkpoints", "checkpoints/5", "tensorboard", "model", "wandb"),
)


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_link_out_of_the_run_folder_is_refused(name, dangling, tmp_path):
    outside = tmp_path / "outside"
    if not dangling:
        outside.write_text("precious")
    link = tmp_path / "linked" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with pytest.raises(InputError, match="is a link out of the run folder, to ") as caught:
        folders.open_run(tmp_path / "linked", CONFIG)
    assert str(link) in str(caught.value)
    assert outside.exists() != dangling
    if not dangling:
        assert outside.read_text() == "precious"


def test_links_within_the_run_folder_and_to_it_are_followed(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    (real / "lines").mkdir()
    (real / "metrics.jsonl").symlink_to("lines/metrics.jsonl")
    with pytest.raises(InputError, match="is not empty and holds no run"):
        folders.open_run(tmp_path / "link", CONFIG)
    (real / "config.toml").write_text(CONFIG)
    with folders.open_run(tmp_path / "link", CONFIG) as run:
        run.metrics.write(1, {"x": 1.0})
    assert (real / "lines" / "metrics.jsonl").read_text() == '{"step": 1, "x": 1.0}\n'


# Secrets


SECRET = "0123456789abcdef0123456789abcdef01234567"


def test_a_key_of_the_environment_is_in_no_message_and_no_file(monkeypatch):
    """A library that says the key it was given, as some of W&B's errors do."""
    wandb: Any = types.ModuleType("wandb")
    wandb.Error = type("Error", (Exception,), {})
    wandb.Settings = dict

    def init(**options):
        assert SECRET not in repr(options)
        raise wandb.Error(f"user {os.environ['WANDB_API_KEY']} is not logged in")

    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)

    def begun(job, run):
        loggers.Wandb(run.folder, project="p", name="n", config=job.config.model_dump())

    monkeypatch.setattr("tim_jax.app.jobs.train.begun", begun)
    Path("made").mkdir()  # a folder that was there stays, with what was written
    outcome = fuzzing.run(["train", "good.toml", "run.folder=made", "run.sinks=['wandb']"])
    fuzzing.check(outcome)
    assert "Weights & Biases did not start: user $WANDB_API_KEY is not logged in" in outcome.err
    assert (Path("made") / "wandb_id").exists()
    for path in Path("made").rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


@pytest.mark.parametrize("key", ["run.wandb_api_key", "run.api_key", "hf_token", "run.password"])
def test_a_key_in_a_config_is_refused_without_being_shown(key):
    outcome = fuzzing.run(["train", "good.toml", f"{key}={SECRET}"])
    fuzzing.check(outcome)
    assert f"{key}: unknown key" in outcome.err
    assert SECRET not in outcome.err
