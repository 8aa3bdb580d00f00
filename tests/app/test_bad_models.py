"""Models that should be refused, what is said before weights are read, long waits, and memory."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.errors import JaxRuntimeError
from safetensors.numpy import load_file, save_file

from tim_jax import api
from tim_jax.app import cli
from tim_jax.app.config import toml
from tim_jax.app.config.run import Architecture
from tim_jax.app.jobs import planning, train
from tim_jax.app.run import checkpoints, sources
from tim_jax.common import waiting
from tim_jax.common.errors import InputError, OutOfMemoryError
from tim_jax.instruments.plan import budget
from tim_jax.model import fitting, hf
from tim_jax.tasks import text
from tim_jax.tasks.rows import read_rows

SMALL = Architecture(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=24,
    max_positions=32,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model folder."""
    model = sources.random_model(SMALL, seed=0)
    folder = tmp_path_factory.mktemp("models") / "whole"
    return hf.save(folder, model.params, model.config, tokenizer=model.tokenizer)


@pytest.fixture
def folder(whole, tmp_path):
    """A copy to be spoilt."""
    return shutil.copytree(whole, tmp_path / "model")


def change(path, **values):
    known = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (known | values).items() if v is not None}))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(value, folder):
    file = folder / "model.safetensors"
    tensors = {name: np.array(tensor) for name, tensor in load_file(file).items()}
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = value
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 3e38  # as large as float32 is
    save_file(tensors, file)
    found = hf.load_config(folder)
    with pytest.raises(InputError) as caught:
        hf.load_params(folder, found)
    assert str(caught.value) == (
        f"{file}: tensor 'model.layers.0.mlp.down_proj.weight' has 1 of 384 values that are NaN or"
        " infinite"
    )
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = -3e38
    save_file(tensors, file)
    hf.load_params(folder, found)


def test_weights_that_float16_has_no_number_for(folder, capsys):
    file = folder / "model.safetensors"
    tensors = {name: np.array(tensor) for name, tensor in load_file(file).items()}
    tensors["model.norm.weight"][2] = 1e5  # enters float32 arithmetic in any dtype
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 65519.0  # rounds to the largest, 65504
    save_file(tensors, file)
    model = api.load(folder, dtype="float16")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(model.weights))

    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] = -7e4
    tensors["model.layers.0.mlp.down_proj.weight"][4, 5] = 65520.0  # rounds to infinity
    save_file(tensors, file)
    message = (
        f"{file}: tensor 'model.layers.0.mlp.down_proj.weight' has 2 of 384 values that would be"
        " infinite in float16, such as -70000; compute in float32 or bfloat16"
    )
    with pytest.raises(InputError) as caught:
        api.load(folder, dtype="float16")
    assert str(caught.value) == message
    api.load(folder, dtype="bfloat16")

    config = toml.load(None, [f"model.path={folder}", "numerics.dtype=float16"])
    with pytest.raises(InputError) as caught:
        sources.make_model(config)
    assert str(caught.value) == message
    assert cli.main(["audit", str(folder), "--dtype", "float16"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("token", [-1, 22, [1, 22], [1, -7]])
def test_end_tokens_that_no_vocabulary_has(token, folder):
    change(folder / "generation_config.json", eos_token_id=token)
    with pytest.raises(InputError, match=r"generation_config.json: eos_token_id .* is outside the"):
        sources.open_model(str(folder))
    change(folder / "generation_config.json", eos_token_id=[1, 21])
    assert sources.open_model(str(folder)).stop_tokens == (1, 21)
    change(folder / "config.json", eos_token_id=token)
    with pytest.raises(InputError, match=r"/config.json: eos_token_id .* vocabulary of 22 tokens"):
        hf.load_config(folder)


def test_a_model_whose_responses_nothing_ends(folder):
    change(folder / "tokenizer_config.json", eos_token=None)
    assert sources.open_model(str(folder)).stop_tokens == (1,)  # config.json has it
    change(folder / "config.json", eos_token_id=None)
    change(folder / "generation_config.json", eos_token_id=None)
    with pytest.raises(
        InputError, match="no token ends a response: its tokenizer has no eos token"
    ):
        sources.open_model(str(folder))


EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


@pytest.mark.parametrize("key", EXPERTS)
def test_experts_in_the_config_of_a_dense_model(key, folder):
    change(folder / "config.json", **{key: 0})
    hf.load_config(folder)
    change(folder / "config.json", **{key: 8})
    with pytest.raises(InputError, match=f"{key} 8 is not supported for model_type 'qwen3', a den"):
        hf.load_config(folder)


SIZES = {
    "hidden_size": (2**60, "hidden_size must be a whole number from 1 to 2147483647"),
    "max_position_embeddings": (2**31, "max_positions must be a whole number from 1 to 21474836"),
    "num_hidden_layers": (10**7, "num_layers must be at most 65,536"),
    "intermediate_size": (10**7, "has shape [24, 16], expected [10000000, 16]"),
}


@pytest.mark.parametrize("key", SIZES)
def test_a_size_that_no_model_has(key, folder):
    size, words = SIZES[key]
    change(folder / "config.json", **{key: size})
    with pytest.raises(InputError) as caught:
        hf.load_params(folder, hf.load_config(folder))
    assert words in str(caught.value)


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"


def test_a_chat_template_without_an_end(folder, monkeypatch):
    tokenizer = cast(Any, sources.open_model(str(folder)).tokenizer)
    tokenizer.chat_template = LOOP
    with pytest.raises(InputError, match=r"it runs without an end \(more than 3,000,000 lines"):
        text.encode_prompt(tokenizer, "12>")
    # What real templates do is far from the limit, and traced as a debugger would see it.
    tokenizer.chat_template = (
        "{% for m in messages %}{% for i in range(9) %}1{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(text, "MOST_LINES", 100_000)
    assert len(text.encode_prompt(tokenizer, "12>")) == 9


WRONG_PROMPTS = {"prompt": "1" * 30 + ">", "character": "ab"}
# What is wrong in a command -> what the line says.
GENERATE = {
    "top-k": (["--top-k", "23"], "top_k must be at most the vocabulary's 22 tokens"),
    "top-p": (["--top-p", "0"], "top_p must be in (0, 1]"),
    "temperature": (["--temperature", "-1"], "temperature must be >= 0"),
    "prompt": ([], "prompt 1 has 31 tokens, at most 24 are allowed"),
    "character": ([], "prompt 1 has characters without a token"),
    "tokens": (["--max-tokens", "40"], "max_tokens = 40 leaves no room for a prompt in the"),
    "memory": (["--samples", "60000000"], "memory: sampling needs about "),
    "rows": (["--samples", "1000000000"], "over 2**31 tokens"),
    "devices": (["--data", "16"], "needs 16 devices, but there are 8"),
    "tensor": (["--tensor", "2"], "must divide the model's num_kv_heads = 1, got 2"),
    "family": (["--family", "pallas_tpu"], "family 'pallas_tpu' needs a TPU"),
    "nothing": ([], "truncated or corrupt safetensors"),
}
TRAIN = {
    "top-k": ("sampling.top_k=23", "top_k must be at most the vocabulary's 22 tokens"),
    "stop token": ("sampling.stop_tokens=[22]", "22 is outside the model's vocabulary of 22"),
    "length": ("sampling.max_tokens=25", "more than the model's 32 positions"),
    "episode": (
        "sampling={max_prompt_length=8, max_tokens=8, max_turns=2, max_episode_tokens=25}",
        "sampling.max_episode_tokens: 25 after a prompt of 8 is 33 tokens, more than the model's",
    ),
    "prompt": ("task.parameters={digits=[20,20]}", "are allowed"),
}


class TestBeforeWeights:
    """What the config, tokenizer and machine tell: no weight is read, and nothing is measured."""

    @pytest.fixture(autouse=True)
    def nothing_is_read(self, monkeypatch, folder):
        (folder / "model.safetensors").write_bytes(b"no weights")
        monkeypatch.setattr(fitting, "calibrate", lambda *_, **__: pytest.fail("measured"))

    def refused(self, words, capsys, *arguments):
        assert cli.main([*map(str, arguments)]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1

    @pytest.mark.parametrize("what", GENERATE)
    def test_generate(self, what, folder, capsys, monkeypatch):
        options, words = GENERATE[what]
        prompts = ["12>", WRONG_PROMPTS[what]] if what in WRONG_PROMPTS else ["12>"]
        if what == "nothing":  # the first step that may read
            monkeypatch.setattr(fitting, "calibrate", lambda config, numerics, **_: numerics)
        self.refused(words, capsys, "generate", folder, *prompts, "--max-tokens", 8, *options)

    @pytest.mark.parametrize("what", TRAIN)
    def test_train(self, what, folder, capsys, tmp_path):
        change, words = TRAIN[what]
        (tmp_path / "run.toml").write_text(
            tiny.RUN.partition("[model.architecture]")[0]
            + f'[model]\npath = "{folder}"\n[sampling]'
            + tiny.RUN.partition("[sampling]")[2]
        )
        run = f"run.folder={tmp_path / 'run'}"
        self.refused(words, capsys, "train", tmp_path / "run.toml", run, change)


class Soon:
    """A timer whose time is over at once."""

    def __init__(self, seconds, function, arguments):
        self.start = lambda: function(*arguments)
        self.cancel = lambda: None


@pytest.fixture
def every_wait_is_long(monkeypatch):
    monkeypatch.setattr(waiting, "SECONDS", 10.0)
    monkeypatch.setattr(waiting, "threading", SimpleNamespace(Timer=Soon))


def test_every_wait_says_what_it_is_for_and_says_so_once(
    whole, tmp_path, every_wait_is_long, capsys
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "2"}')
    with waiting.shown():
        model = api.load(whole)
        api.load(whole)
        api.save(model, tmp_path / "copy")
        read_rows(str(rows))
        saved = checkpoints.Checkpoints(tmp_path / "checkpoints")
        saved.save(1, {"x": {"y": jnp.ones(3)}}, {})
        saved.close()
        # Which native kernels need not.
        fitting.calibrate(
            model.config, replace(tiny.NUMERICS, family="native"), batch=1, longest=64
        )
    checkpoints.restore(tmp_path / "checkpoints", {"x": {"y": jnp.ones(3)}})  # in Python
    said = capsys.readouterr().err.splitlines()
    assert said[-3:] == [
        f"tim_jax: still reading a checkpoint after {seconds} s" for seconds in (10, 100, 1000)
    ]
    assert said[:-3] == [
        f"tim-jax: still {doing} after {seconds} s"
        for doing in (
            "reading the model's weights",
            "writing the model",
            f"reading the dataset {rows}",
            "writing a checkpoint",
            "waiting for the last checkpoint to be on the disk",
            "measuring which tiles keep the bits on this machine",
        )
        for seconds in (10, 100, 1000)
    ]


def test_an_error_knows_the_innermost_task():
    assert list(waiting.each(range(3), "counting")) == [0, 1, 2]

    def fail():
        with waiting.during("training"), waiting.during("adding"):
            raise ValueError("why")

    with pytest.raises(ValueError, match="why") as caught:
        fail()
    assert waiting.task_of(caught.value) == "adding"
    assert waiting.task_of(ValueError()) is None


# Memory

WAYS = {"sampling": ("a", "b", "c"), "": ("d", "e", "f")}


def allocated():
    """XLA's own error of a program that needs 4 TB."""
    return jax.jit(lambda: jnp.zeros((10**6, 10**6)))()


def explained(fail, doing):
    with (
        pytest.raises(OutOfMemoryError) as caught,
        budget.explaining_memory(lambda: WAYS),
        waiting.during(doing),
    ):
        fail()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_memory_that_runs_out_is_one_line():
    assert explained(allocated, "sampling") == (
        "while sampling: 4000.00 GB could not be allocated; each of these needs less: a, b, c"
    )
    line = explained(lambda: np.empty(10**15), "updating")
    assert line.startswith("while updating: ")
    assert line.endswith("each of these needs less: d, e, f")


MESSAGES = {
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.": "17.18 GB c",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.00GiB.": "16.00GiB could not be",
    "RESOURCE_EXHAUSTED: Attempting to allocate 3.05G. That was not possible.": "3.05G could not",
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.53G of 15.75G hbm.": (
        "the program needs 20.53G of the device's 15.75G"
    ),
    "RESOURCE_EXHAUSTED: something else": "while sampling; each of",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_how_much_was_asked_for(message):
    def fail():
        raise JaxRuntimeError(message)

    assert MESSAGES[message] in explained(fail, "sampling")


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 122880, available: 1",
        "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory in memory space v",
    ],
)
def test_a_kernel_that_does_not_fit_is_helped_by_no_setting(message):
    with (
        pytest.raises(InputError, match="kernel needs more memory") as error,
        budget.explaining_memory(lambda: WAYS),
    ):
        raise JaxRuntimeError(message)
    assert "\n" not in str(error.value)


def test_other_errors_of_the_runtime_keep_their_traceback():
    with pytest.raises(JaxRuntimeError, match="INTERNAL"), budget.explaining_memory(lambda: WAYS):
        raise JaxRuntimeError("INTERNAL: a fault")


def test_three_settings_of_a_run_for_each_stage():
    found = planning.less_memory(toml.load(None, ["learner.micro_batch=8", "sampler.slots=16"]))
    assert all(len(ways) == 3 for ways in found.values())
    assert found["sampling"][0] == "sampler.slots below 16"
    assert found[""][:2] == ("learner.micro_batch below 8", "learner.remat = true")
    of_turns = planning.less_memory(toml.load("configs/turns.toml", ["sampler.pages=40"]))
    longest = "sampling.max_episode_tokens below 32"
    assert of_turns["sampling"][:2] == ("sampler.pages below 40", longest)
    assert of_turns[""][1:] == ("learner.remat = true", found[""][2])


def test_a_run_with_checkpoints_is_told_what_it_may_change_first(tmp_path, monkeypatch):
    """On an accelerator, whose state may wait in the host's memory."""
    chip = SimpleNamespace(kind="pinned_host")
    chip = SimpleNamespace(platform="gpu", addressable_memories=lambda kind=chip: [kind])
    monkeypatch.setattr(planning.jax, "devices", lambda: [chip])
    config = toml.load(None, [f"run.folder={tmp_path}", "sampler.slots=16"])
    length = f"sampling.max_tokens below {config.sampling.max_tokens}"
    before = planning.less_memory(config)
    assert before["sampling"] == ("sampler.slots below 16", "learner.offload = true", length)
    ahead = toml.load(None, [f"run.folder={tmp_path}", "sampler.max_staleness=1"])
    assert "learner.offload = true" not in planning.less_memory(ahead)["sampling"]
    assert before[""][0].startswith("learner.micro_batch below ")
    (tmp_path / "checkpoints" / "0").mkdir(parents=True)
    after = planning.less_memory(config)
    wider = "placement.fsdp above 1, with more devices"
    assert after["sampling"] == ("sampler.slots below 16", "learner.offload = true", wider)
    assert after[""][:2] == ("learner.remat = true", wider)
    assert after[""][2] == f"{before[''][0]} (in another run.folder)"
    for way in (*after["sampling"], *after[""][:2]):
        key = way.partition(" ")[0]
        assert any(f"{key}.".startswith(f"{free}.") for free in config.may_change()), key


@pytest.mark.slow
def test_a_run_whose_memory_runs_out_goes_on_from_its_checkpoint(
    tmp_path, monkeypatch, capsys, every_wait_is_long, traced_once, unmeasured
):
    """A program that fails as XLA does ends the run with its own status."""
    (tmp_path / "run.toml").write_text(tiny.RUN)
    # The sampler of the evaluation is that of a step, and compiled with it.
    changes = "model.architecture.num_layers=1", "eval.prompts=2", "eval.samples=4"
    arguments = ["train", str(tmp_path / "run.toml"), "run.checkpoint_every=1", *changes]
    assert cli.main([*arguments, f"run.folder={tmp_path / 'whole'}"]) == 0
    said = {line.partition(" (")[0] for line in capsys.readouterr().err.splitlines()}
    tasks = (
        "sampling",
        "grading",
        "updating",
        "starting warm, 1 of 2,",
        "sampling for the evaluation",
        "putting the model on the devices",
        "drawing the initial weights",
        "writing a checkpoint",
        "writing the model",
    )
    assert {f"tim-jax: still {task} after 10 s" for task in tasks} <= said
    steps, assemble = [], train.assemble

    def failing(config, **options):
        job = assemble(config, **options)

        def update(*operands):
            steps.append(1)
            return job.programs.update(*operands) if len(steps) < 2 else allocated()

        return replace(job, programs=replace(job.programs, update=update))

    folder = f"run.folder={tmp_path / 'run'}"
    with monkeypatch.context() as patch:
        patch.setattr(train, "assemble", failing)
        assert cli.main([*arguments, folder]) == 6
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "tim-jax: out of memory while updating: 4000.00 GB could not be allocated; each of these"
        " needs less: learner.remat = true, placement.fsdp above 1, with more devices,"
        " learner.micro_batch below 8 (in another run.folder)"
    )
    assert checkpoints.list_steps(tmp_path / "run" / "checkpoints") == [0, 1]
    assert cli.main([*arguments, folder]) == 0
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
