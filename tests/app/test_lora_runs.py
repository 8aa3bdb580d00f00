"""Adapters in a run's configuration, in the commands, and in the API."""

import tomllib
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import optax
import pytest
import tiny
from safetensors.numpy import load_file

import tim_jax as tim
from tim_jax.api.training import settle, start
from tim_jax.app import cli
from tim_jax.app.config import toml
from tim_jax.app.jobs import models, planning
from tim_jax.app.run import checkpoints, folders, sources
from tim_jax.app.run.checkpoints import Restored
from tim_jax.app.run.loggers import read_lines
from tim_jax.common.errors import InputError
from tim_jax.instruments.auditing import random_params
from tim_jax.instruments.plan import budget
from tim_jax.model import adapters, hf
from tim_jax.model.adapters import Adapter, Lora
from tim_jax.numerics import Numerics, Precision
from tim_jax.rl import programs
from tim_jax.tasks.text import character_tokenizer

PLAIN = ("warmup.steps=0", "lora.rank=2", 'lora.targets=["q_proj", "down_proj"]')


def test_a_config_says_which_adapters_and_goes_through_its_file():
    config = toml.load(None, ["lora={}"])
    assert config.lora is not None
    assert sources.begin_model(config).lora == Lora()
    config = toml.load(None, PLAIN)
    again = toml.build(tomllib.loads(toml.dump(config)))
    assert again == config
    assert toml.build({}).lora is None
    model = sources.begin_model(config)
    assert model.lora == Lora(rank=2, targets=("q_proj", "down_proj"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (['lora.targets=["q_prj"]'], "target 'q_prj' is unknown; did you mean 'q_proj'?"),
        (["lora.rank=0"], "lora.rank"),
        (["lora.rnak=4"], "lora.rnak = 4: unknown key; did you mean 'rank'?"),
        (["lora.rank=4", 'lora.path="somewhere"'], "leave them out"),
        (["lora.rank=8", 'lora.path="somewhere"'], "leave them out"),
        (["lora.rank=4", "warmup.steps=3"], "warmup.steps = 3: must be 0 with adapters"),
    ],
)
def test_wrong_keys_are_refused_in_one_line(words, said):
    with pytest.raises(InputError) as caught:
        toml.load(None, words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_that_was_written_takes_an_adapter():
    """It has all of the defaults, which nobody has set."""
    written = tomllib.loads(toml.dump(toml.load(None, ["lora.rank=8"])))
    assert set(written["lora"]) == {"rank", "alpha", "targets"}
    written["lora"]["path"] = "adapter"
    section = toml.build(written).lora
    assert section is not None
    assert (section.path, section.rank, section.alpha, section.targets) == ("adapter", *[None] * 3)


def test_an_adapter_that_is_not_there_is_named():
    config = toml.load(None, ['lora.path="nowhere"'])
    with pytest.raises(InputError, match="adapter folder 'nowhere' does not exist"):
        sources.begin_model(config)


def test_adapters_are_not_put_on_another_base():
    base = adapters.narrowed(random_params(tiny.CONFIG, 0))
    mark = checkpoints.base_mark(base, Lora())
    before = Restored(3, {}, dict(mark))
    checkpoints.check_marks(before, mark, "run")
    base["layers"]["q"] = base["layers"]["q"] * np.float32(1.5)
    with pytest.raises(InputError, match="run: the adapters of step 3 were trained on other base"):
        checkpoints.check_marks(before, checkpoints.base_mark(base, Lora()), "run")
    assert checkpoints.base_mark(None, None) == {}


@pytest.fixture
def adapter(tmp_path):
    """The folder of an adapter of PEFT, and a config that starts from it."""
    lora, folder = Lora(2, 4.0, ("q_proj",)), tmp_path / "adapter"
    config = sources.begin_model(toml.load(None)).config
    adapters.save(folder, Adapter(lora, adapters.init(config, lora, 0)), config)
    return folder, toml.load(None, ["warmup.steps=0", f'lora.path="{folder}"'])


def test_a_run_does_not_go_on_with_another_alpha(tmp_path, adapter):
    folder, config = adapter
    model = sources.make_model(config)
    trained, base = adapters.split(model.params)
    mark = checkpoints.base_mark(base, model.lora)
    with folders.open_run(tmp_path / "run", toml.dump(config)) as run:
        run.metrics.write(1, {})
        run.save(1, {"params": trained}, mark)
    folders.read_params(tmp_path / "run", model.params, config=model.config, lora=model.lora)
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace("4.0", "64"))
    now = sources.make_model(config)
    line = r"run: the adapters of step 1 were trained with alpha = 4.0, and now it is 64.0; restore"
    with pytest.raises(InputError, match=line):
        folders.read_params(tmp_path / "run", now.params, config=now.config, lora=now.lora)
    with (
        folders.open_run(tmp_path / "run", toml.dump(config)) as run,
        pytest.raises(InputError, match=line),
    ):
        run.restore({"params": trained}, checkpoints.base_mark(base, now.lora))
    of_old_version = Restored(1, {}, {"base_crc32": mark["base_crc32"]})
    checkpoints.check_marks(of_old_version, mark, "run")


def test_a_config_does_not_say_what_the_adapter_says(adapter):
    folder, config = adapter
    assert tomllib.loads(toml.dump(config))["lora"] == {"path": str(folder)}
    assert sources.begin_model(config).lora == Lora(2, 4.0, ("q_proj",))


def test_a_run_that_recorded_defaults_beside_its_adapter_goes_on(tmp_path, adapter):
    folder, config = adapter
    text = toml.dump(config)
    before = f'[lora]\nrank = 8\nalpha = 16.0\ntargets = []\npath = "{folder}"'
    old = text.replace(f'[lora]\npath = "{folder}"', before)
    assert old != text
    (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text(old)
    with folders.open_run(tmp_path / "run", text) as run:
        assert run.changed == ()
    assert toml.load(tmp_path / "run").lora == config.lora


def test_an_export_merges_as_the_runs_learner_did(tmp_path, monkeypatch):
    """By the dial's rule, where the run is a control that has it on both sides."""
    path = tmp_path / "config.toml"
    path.write_text(tiny.RUN)
    rule = 'sampler.mismatch=[{name="lora_merge", dtype="bfloat16"}]', "sampler.both_sides=true"
    config = toml.load(path, [*PLAIN, *rule])
    path.write_text(toml.dump(config))
    model, written = sources.make_model(config), []
    assert model.lora is not None
    own = jax.tree.map(lambda x: x + np.float32(0.1), adapters.of(model.params))
    params = {**model.params, adapters.ADAPTERS: own}
    restored = Restored(step=1, state={"params": params}, extra={}, damaged=())
    monkeypatch.setattr(folders, "read_params", lambda *_, **__: restored)
    monkeypatch.setattr(sources, "write", lambda _, made, *__, **___: written.append(made.params))
    models.export(str(tmp_path), str(tmp_path / "out"))
    numerics = Numerics(precision=Precision(lora="bfloat16"))
    how = {"config": model.config, "lora": model.lora, "numerics": numerics}
    expected = jax.jit(partial(adapters.merged, **how))(params)
    assert tiny.bits(written[0]) == tiny.bits(expected)


def test_the_estimate_of_memory_has_an_optimiser_for_the_adapters_alone():
    needs = {}
    for name, words in {"all": ["warmup.steps=0"], "lora": PLAIN}.items():
        config = toml.load(None, words)
        model = sources.begin_model(config)
        devices = tuple(jax.devices()[:1])
        workload = planning.workload_of(config, model.config, devices)
        needs[name] = budget.needs(workload, devices)[1].parts
    whole, own = needs["all"], needs["lora"]
    assert own["masters"] < whole["masters"] / 50
    assert own["optimiser"] < whole["optimiser"] / 50
    assert own["gradient"] < whole["gradient"] / 50
    assert own["the adapters' base"] == whole["masters"]  # float32, as is the computation
    assert whole["the adapters' base"] == 0


@pytest.mark.slow
def test_a_run_with_adapters_resumes_to_the_same_bits_and_exports_both(
    tmp_path, monkeypatch, traced_once, unmeasured
):
    path = tmp_path / "run.toml"
    path.write_text(tiny.RUN)
    (tmp_path / "lora_rewards.py").write_text(
        "def by_text(prompts, completions, answers):\n"
        "    return [sum(map(ord, text)) % 7 for text in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["run.checkpoint_every=1", "optimizer.learning_rate=0.05", *PLAIN]
    own += ["task.reward=lora_rewards:by_text", "task.reward_in_process=true", "eval.every=0"]

    def train(folder, *words):
        return cli.main(["train", str(path), f"run.folder={tmp_path / folder}", *own, *words])

    assert train("whole") == 0
    assert train("parts", "steps=1") == 0
    assert train("parts", "steps=2", "placement.fsdp=1") == 0
    for name in ("samples.jsonl", "model/model.safetensors"):
        ours, theirs = tmp_path / "parts" / name, tmp_path / "whole" / name
        assert ours.read_bytes() == theirs.read_bytes()
    lines = [line for line in read_lines(tmp_path / "parts" / "metrics.jsonl") if line["step"]]
    assert [line["exact_share"] for line in lines] == [1.0, 1.0]
    assert all(line["compared_tokens"] > 0 for line in lines)
    # A checkpoint has the adapters and their moments, and not the base.
    model = sources.make_model(toml.load(tmp_path / "whole" / "config.toml"))
    trained, base = adapters.split(model.params)
    restored = folders.read_checkpoint(tmp_path / "whole", {"params": trained})
    assert set(restored.state["params"]) == {"q_proj", "down_proj"}
    assert tiny.bits(restored.state["params"]) != tiny.bits(trained)
    # The merged model is the same; the adapter alone is read and gives the model.
    assert cli.main(["export", str(tmp_path / "whole"), str(tmp_path / "merged")]) == 0
    ours, theirs = (
        load_file(tmp_path / f / "model.safetensors") for f in ("merged", "whole/model")
    )
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    folder = tmp_path / "adapter"
    assert cli.main(["export", str(tmp_path / "whole"), str(folder), "--adapter"]) == 0
    alone = adapters.load(folder, model.config)
    assert tiny.bits(alone.arrays) == tiny.bits(restored.state["params"])
    # What starts from it begins as that run ended.
    words = ["warmup.steps=0", f'lora.path="{folder}"']
    started = sources.make_model(toml.load(path, words))
    assert started.lora == model.lora
    assert tiny.bits(adapters.of(started.params)) == tiny.bits(alone.arrays)
    assert tiny.bits(adapters.split(started.params)[1]) == tiny.bits(base)


@pytest.mark.slow
def test_adapters_through_the_api(tmp_path):
    tokenizer = character_tokenizer("0123456789 +=?")
    config = replace(
        tiny.CONFIG, vocab_size=len(tokenizer), max_positions=32, num_layers=1, eos_token_ids=(4, 7)
    )
    hf.save(tmp_path / "base", random_params(config, 0), config, tokenizer=tokenizer)
    model = tim.load(tmp_path / "base", dtype="bfloat16")
    before = tiny.bits(model.params)
    how = {
        "reward": lambda prompts, completions, answers: [len(text) / 8 for text in completions],
        "samples": 4,
        "prompts_per_step": 2,
        "max_tokens": 6,
        "optimizer": optax.sgd(1.0),
    }
    pairs = [("2 + 2", 4), ("3 + 1", 4)]
    steps = []
    for step in tim.grpo(
        model, pairs, steps=2, training=model.training(lora=tim.Lora(rank=2)), **how
    ):
        steps.append((step.model, step.adapter, step.metrics["exact_share"]))
    assert [share for *_, share in steps] == [1.0, 1.0]
    assert tiny.bits(model.params) == before
    trained, adapter, _ = steps[-1]
    assert tiny.bits(trained.params) != before
    rollout = tim.sample(trained, ["1 + 1"], samples=4, max_tokens=6, seed=0)
    assert np.array_equal(tim.score(trained, rollout), rollout.log_probs)
    tim.save_adapter(adapter, tmp_path / "adapter", model)
    found = tim.load_adapter(tmp_path / "adapter", model)
    assert tiny.bits(found.arrays) == tiny.bits(adapter.arrays)
    # The model with the loaded adapter is the trained one, and training would go on from there.
    adapted = replace(model, adapter=found)
    asked = {name: how[name] for name in ("samples", "prompts_per_step", "max_tokens", "optimizer")}
    state, started = start(adapted, programs.build(settle("grpo", adapted, None, asked)[1]), seed=0)
    assert tiny.bits(state.params) == tiny.bits(found.arrays)
    assert tiny.bits(started.merged(state.params)) == tiny.bits(trained.params)
    assert tiny.bits(adapted.weights) == tiny.bits(trained.weights)
    assert np.array_equal(tim.score(adapted, rollout), rollout.log_probs)
    saved = tim.load(tim.save(adapted, tmp_path / "merged"), dtype="bfloat16")
    assert tiny.bits(saved.weights) == tiny.bits(trained.weights)
    with pytest.raises(InputError, match="training has lora = None"):
        tim.grpo(adapted, pairs, steps=1, training=model.training(), **how)
    with pytest.raises(InputError, match=r"write training=model\.training\(lora=\.\.\.\)"):
        tim.grpo(model, pairs, steps=1, lora=tim.Lora(8), **how)  # pyright: ignore[reportCallIssue]
