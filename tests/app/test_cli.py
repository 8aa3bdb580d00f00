"""The commands, as a user calls them: what they leave, and one clear line when they cannot."""

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from transformers.utils import chat_template_utils

import tim_jax
from tim_jax.app import cli
from tim_jax.app.config import toml
from tim_jax.app.jobs import audit, models, train
from tim_jax.app.run import assembly, checkpoints, folders, sources
from tim_jax.app.run.assembly import fixed_numerics
from tim_jax.app.run.checkpoints import Restored
from tim_jax.app.run.loggers import read_lines
from tim_jax.common import machine
from tim_jax.common.errors import InputError, PreemptedError
from tim_jax.instruments import auditing
from tim_jax.instruments.auditing import compiler
from tim_jax.model import fitting, hf
from tim_jax.rl.drawing import Text
from tim_jax.tasks import builtin
from tim_jax.tasks.base import Example
from tim_jax.tasks.text import character_tokenizer

CONFIG = """
steps = 3

[model.architecture]
hidden_size = 16
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 8
intermediate_size = 24
max_positions = 24

[sampling]
samples = 4
max_prompt_length = 8
max_tokens = 8
stop_tokens = [7, 9, 11]

[learner]
prompts_per_step = 2

[learner.objective]
reward_kl_coefficient = 0.1
reward_kl_target = 1.0
reward_kl_horizon = 20

[optimizer]
learning_rate = 0.01

[task]
kind = "builtin"
name = "running_sums"
parameters = { digits = [1, 3], eval_size = 16 }
reward = "cli_rewards:by_length"
reward_in_process = true

[warmup]
steps = 2
batch = 4

# As many as a step draws: an evaluation is then the same program as a step's sampler.
[eval]
every = 2
prompts = 2
samples = 4

[run]
checkpoint_every = 1
"""

# `plan` says what happens in a call of that number; the tests change it.
REWARDS = """
import ctypes

plan = {}
calls = 0


def by_length(prompts, completions, answers):
    global calls
    calls += 1
    assert len(prompts) == len(completions) == len(answers)
    rewards = [len(completion) / 8 for completion in completions]
    return plan[calls](rewards) if calls in plan else rewards


def leave(prompts, completions, answers):
    ctypes.CDLL(None)._exit(0)


def nothing():
    return {}


def at_length(prompts, completions, answers):
    return [float(len(completion) > 7) for completion in completions]


def empty():
    from tim_jax.tasks.base import Grade, Task

    return Task("mine", (), (), lambda examples, completions: [Grade(0.0) for _ in completions])
"""


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.fixture(scope="module", autouse=True)
def folder(patch, tmp_path_factory, traced_once):
    """The working folder: a config and a module of rewards. Row ranges are not measured here."""
    path = tmp_path_factory.mktemp("work")
    (path / "tiny.toml").write_text(CONFIG)
    (path / "cli_rewards.py").write_text(REWARDS)
    patch.chdir(path)
    patch.syspath_prepend(str(path))
    patch.setattr(fitting, "calibrate", lambda config, numerics, **_: numerics)
    yield path
    sys.modules.pop("cli_rewards", None)


@pytest.fixture
def rewards():
    import cli_rewards  # pyright: ignore[reportMissingImports]

    cli_rewards.plan, cli_rewards.calls = {}, 0
    yield cli_rewards
    cli_rewards.plan = {}


@pytest.fixture
def call(capsys):
    """Runs a command: (exit status, standard output, standard error)."""

    def run(*arguments):
        capsys.readouterr()
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def finished(folder):
    """A run of three steps that came to its end."""
    assert cli.main(["train", "tiny.toml", "run.folder=finished"]) == 0
    return folder / "finished"


def metrics_of(run):
    return list(read_lines(run / "metrics.jsonl"))


# What a run leaves


def test_a_run_leaves_metrics_samples_chart_and_model(finished):
    lines = metrics_of(finished)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["exact_share"] for line in lines[1:]] == [1.0, 1.0, 1.0]
    assert all(line["compared_tokens"] > 0 == line["unequal_tokens"] for line in lines[1:])
    # Before the first step, at every second, and after the last.
    assert [line["step"] for line in lines if "eval/reward" in line] == [0, 2, 3]
    assert all({"reward", "response_length", "loss", "gradient_norm"} <= set(m) for m in lines[1:])
    # The coefficient of the KL in the reward is steered: 8 sequences of a step, horizon 20. The
    # policy begins as its own reference.
    steered = [line["reward_kl_coefficient"] for line in lines[1:]]
    assert lines[1]["reward_kl"] == 0.0
    assert steered[:2] == pytest.approx([0.1, 0.1 * (1 - 0.2 * 8 / 20)])
    assert len(set(steered)) == 3
    timing = list(read_lines(finished / "timing.jsonl"))
    assert [line["step"] for line in timing] == [1, 2, 3]
    assert all(line["tokens_per_second"] > 0 for line in timing)
    samples = list(read_lines(finished / "samples.jsonl"))
    assert [line["step"] for line in samples] == [1] * 4 + [2] * 4 + [3] * 4
    assert {"prompt", "completion", "answer", "reward"} < set(samples[0])
    assert (finished / "chart.png").read_bytes().startswith(b"\x89PNG")
    config = tomllib.loads((finished / "config.toml").read_text())
    assert (config["steps"], config["optimizer"]["b2"]) == (3, 0.95)  # defaults are written out
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == ["2", "3"]


def test_the_model_is_one_of_transformers(finished):
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    config = AutoConfig.from_pretrained(finished / "model")
    assert (config.model_type, config.vocab_size) == ("qwen3", len(tokenizer))
    assert tokenizer.decode(tokenizer.encode("1+2=")) == "1+2="
    assert config.eos_token_id == tokenizer.eos_token_id
    stored = load_file(finished / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype("float32")}


def test_the_model_is_that_of_the_last_step(finished):
    folder = finished / "model"
    params = hf.load_params(folder, hf.load_config(folder))
    restored = programs_state(finished)
    assert tiny.bits(params) == tiny.bits(restored)


def test_the_model_stops_where_the_run_did(finished, call):
    """Not only at the model's own end token, but at those of the config too."""
    assert call("export", finished, "stopping")[0] == 0
    for folder in (finished / "model", "stopping"):
        assert sources.open_model(str(folder)).stop_tokens == (1, 7, 9, 11)
        assert hf.load_generation_config(folder)["pad_token_id"] == 0


def test_a_model_is_never_that_of_an_earlier_end(finished, folder, call):
    """A step more without a model, and then the same command with one."""
    run = shutil.copytree(finished, folder / "further")
    arguments = ("train", "tiny.toml", "run.folder=further", "steps=4", "eval.every=0")
    old = (run / "model" / "model.safetensors").read_bytes()
    status, out, _ = call(*arguments, "run.export=false")
    assert status == 0
    assert out.endswith("metrics, samples and chart: further\n")
    for command in (("generate", run, "1+2="), ("audit", run, "--quick")):
        err = refused(call, *command)
        assert f"the run '{run}' went on to step 4, its final model is of step 3;" in err
    with pytest.raises(InputError, match="went on to step 4"):
        tim_jax.load(run)
    assert (run / "model" / "model.safetensors").read_bytes() == old
    status, out, _ = call(*arguments)
    assert status == 0
    assert out.endswith("metrics, samples, chart and model: further\n")
    assert tiny.bits(tim_jax.load(run).params) == tiny.bits(programs_state(run))
    assert (run / "model" / "model.safetensors").read_bytes() != old
    assert sources.final_step(run) == 4


def programs_state(run):
    """The parameters of a run's newest checkpoint."""
    config = toml.load(run / "config.toml")
    start = sources.make_model(config).params
    return folders.read_checkpoint(run, {"params": start}).state["params"]


def test_a_finished_run_does_nothing_more(finished, call):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*.safetensors")}
    lines = (finished / "metrics.jsonl").read_bytes()
    status, out, _ = call("train", "tiny.toml", "run.folder=finished")
    assert status == 0
    assert "resumed after step 3" in out
    assert (finished / "metrics.jsonl").read_bytes() == lines
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*.safetensors")}


def test_a_run_in_two_parts_is_the_run_in_one(finished, folder, call):
    """Two steps, then the third: the same lines and samples, and the model of three steps."""
    parts = folder / "parts"
    assert call("train", "tiny.toml", "run.folder=parts", "steps=2", "eval.every=0")[0] == 0
    short = (parts / "model" / "model.safetensors").read_bytes()
    assert call("train", "tiny.toml", "run.folder=parts")[0] == 0
    assert (parts / "samples.jsonl").read_bytes() == (finished / "samples.jsonl").read_bytes()
    for ours, theirs in zip(metrics_of(parts), metrics_of(finished), strict=True):
        kept = {k: v for k, v in theirs.items() if not k.startswith("eval/") or k in ours}
        assert ours == kept
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        ours, theirs = parts / "model" / name, finished / "model" / name
        assert ours.read_bytes() == theirs.read_bytes()
    assert (parts / "model" / "model.safetensors").read_bytes() != short
    assert not [p for p in parts.iterdir() if p.name.startswith(".model")]


SCORES = {
    *("mean@4", "pass@1", "pass@1_error", "reward", "reward_error"),
    *("prompts", "length", "grader/timeout", "grader/error"),
}


def test_eval_of_a_run_is_its_last_evaluation(finished, folder, call):
    out_file = folder / "scores.json"
    status, out, _ = call("eval", "finished", "--json", out_file)
    assert status == 0
    scores = json.loads(out_file.read_text())
    last = metrics_of(finished)[-1]
    assert scores == {name: last[f"eval/{name}"] for name in scores}
    assert set(scores) == SCORES
    assert all(name in out for name in SCORES if not name.endswith("_error"))
    assert out.count("(95%)") == 3  # of mean@4, pass@1 and reward
    config = "tiny.toml", "run.folder=elsewhere"
    assert call("eval", *config, "--model", finished / "model", "--json", out_file)[0] == 0
    assert json.loads(out_file.read_text()) == scores


def test_eval_without_a_run_is_of_the_configs_own_model(finished, folder, call):
    out_file = folder / "first.json"
    status, out, _ = call("eval", "tiny.toml", "run.folder=nowhere", "--json", out_file)
    assert status == 0
    assert "evaluated the config's own model, as nowhere has no checkpoint" in out
    assert json.loads(out_file.read_text()).keys() == SCORES
    assert not (folder / "nowhere").exists()


# The same each time, so that one program draws them.
GENERATED = ("1+2=", "7=", "--samples", 3, "--max-tokens", 6)


def test_generate_says_prompt_completion_and_log_prob(finished, call):
    arguments = ("generate", finished, *GENERATED)
    status, out, _ = call(*arguments)
    assert status == 0
    assert out.count("1+2=\n") == out.count("7=\n") == 3
    assert out.count("(log-prob -") == 6
    assert call(*arguments) == (0, out, "")
    assert call(*arguments, "--seed", 1)[1] != out


def test_no_completion_is_too_odd_to_be_printed(finished, folder, call, monkeypatch):
    """An output without the characters has others in their place; escapes are not obeyed."""
    bare = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", bare)
        arguments = ("tiny.toml", "run.folder=finished", "--json", "bare.json")
        assert cli.main(["eval", *arguments]) == 0
    assert b" ? " in bare.buffer.getvalue()  # an arrow, between prompt and completion
    assert json.loads((folder / "bare.json").read_text())["prompts"] == 2.0

    rows, asked = [("1\n2", "a\x1b[2J\r\n\tb\ud800", -1.0)], []

    def generate(*args, **options):
        asked.append(options)
        return iter(rows)

    monkeypatch.setattr(models, "generate", generate)
    shown = "1\n2\n  -> a<1b>[2J\n b<d800>   (log-prob -1.000)\n"
    given = ("--temperature", 0, "--top-k", 3, "--plain", "--fsdp", 2)
    assert call("generate", finished, "x", *given) == (0, shown, "")
    assert asked[0]["shape"] == {"temperature": 0.0, "top_k": 3, "top_p": 1.0}
    assert (asked[0]["chat_template"], asked[0]["where"]) == (False, tim_jax.Placement(fsdp=2))


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_stream_that_a_shell_closed_takes_what_is_printed(monkeypatch, capsys, closed):
    monkeypatch.setattr(sys, closed, None)
    assert cli.main(["study", "--list"]) == 0
    assert cli.main(["study"]) == 2
    captured = capsys.readouterr()
    assert ("tim-jax: study: name a file" in captured.err) == (closed != "stderr")
    assert "study: name a file" not in captured.out


def gradients_of_a_norm(numerics):
    """`auditing.check_gradients` of the first unit alone."""
    extent = compiler.Extent()
    return [*compiler._check(compiler.units(numerics, extent)[0], numerics, extent)]


def test_a_run_on_a_mesh_is_audited_on_one_device():
    """Of which there may be no more; the numerics are those of the run."""
    run = toml.load(None, ["placement={fsdp = 8, tensor = 2}"])
    alone = assembly.on_one_device(run)
    assert alone.placement.value.single
    assert alone.column_tiles == run.column_tiles == 2


@pytest.mark.slow
def test_audit_of_a_run(finished, folder, call, few_cases, monkeypatch):
    """All that the command does, of a few cases: those of an audit have tests of their own."""
    placed = auditing.placed_cases
    monkeypatch.setattr(auditing, "placed_cases", lambda *given: placed(*given)[:1])
    monkeypatch.setattr(auditing, "placed_episodes", lambda *given: ())
    monkeypatch.setattr(auditing, "check_gradients", gradients_of_a_norm)
    out_file = folder / "audit.json"
    status, out, _ = call("audit", finished, "--quick", "--json", out_file)
    report = json.loads(out_file.read_text())
    assert status == 0
    assert report["unequal_tokens"] == 0 < report["compared_tokens"]
    assert len(report["cases"]) > 5
    assert [one["name"] for one in report["cases"]].count("learner, fsdp=2") == 2
    assert "exact: 0 of" in out
    assert all(one["passed"] for one in report["gradients"])
    assert {one["numerics"] for one in report["gradients"]} == {"native float32", "native bfloat16"}
    assert "right gradients: all" in out


# Stopped on the way


def test_a_mismatch_ends_the_run_with_its_own_status(call, folder, monkeypatch):
    true = train.assemble

    def assemble(*args, **options):
        job = true(*args, **options)

        def sample(*inputs):
            rollout = job.programs.sample(*inputs)
            return replace(rollout, log_probs=rollout.log_probs.at[3, 0].add(-1e-6))

        return replace(job, programs=replace(job.programs, sample=sample))

    monkeypatch.setattr(train, "assemble", assemble)
    status, _, err = call("train", "tiny.toml", "run.folder=mismatch", "eval.every=0")
    assert status == 3
    assert err.startswith("tim-jax: not exact: step 1: 1 of ")
    assert "sequence 3, response position 0" in err
    assert err.count("\n") == 1
    assert [line["step"] for line in metrics_of(folder / "mismatch")] == [0]


def test_any_checkpoint_is_exported_as_a_model(folder, finished, call):
    assert call("export", finished, "exported")[0] == 0
    newest = load_file(folder / "exported" / "model.safetensors")
    last = load_file(finished / "model" / "model.safetensors")
    assert {k: v.tobytes() for k, v in newest.items()} == {k: v.tobytes() for k, v in last.items()}
    status, out, _ = call("export", finished, "exported-2", "--step", "2")
    assert status == 0
    assert "step 2" in out
    earlier = load_file(folder / "exported-2" / "model.safetensors")
    assert any(earlier[name].tobytes() != last[name].tobytes() for name in last)
    assert call("generate", "exported-2", *GENERATED)[0] == 0


@pytest.mark.parametrize("command", ["export", pytest.param("eval", marks=pytest.mark.slow)])
def test_a_run_whose_model_has_changed_is_refused(command, folder, finished, call, monkeypatch):
    true = sources.random_config
    monkeypatch.setattr(sources, "random_config", lambda x: replace(true(x), rms_norm_eps=1e-3))
    config = ("tiny.toml", f"run.folder={finished.name}")
    status, _, err = call(command, *(config if command == "eval" else (finished, "exported-other")))
    assert status == 2
    assert "the model is another than at step 3: rms_norm_eps was 1e-06, now 0.001" in err
    assert not (folder / "exported-other").exists()


@pytest.mark.parametrize("command", ["export", pytest.param("eval", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_named_by_what_reads_it(command, folder, finished, call):
    run = folder / f"damaged-{command}"
    shutil.copytree(finished, run)
    with (run / "checkpoints" / "3" / "manifest.json").open("ab") as manifest:
        manifest.truncate(10)
    config = ("tiny.toml", f"run.folder={run.name}")
    arguments = (run.name, f"{run.name}-model") if command == "export" else config
    status, _, err = call(command, *arguments)
    assert status == 0
    assert "checkpoint of step 3 is damaged: manifest.json is cut short" in err
    assert "taking step 2" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("finished", "exported-9", "--step", "9"), "no checkpoint of step 9; it has [2, 3]"),
        (("finished", "finished"), "exists already and is not overwritten"),
        (("nowhere", "exported-9"), "nowhere holds no run"),
        (("finished", "finished/model"), "is where the run 'finished' writes its final model"),
    ],
)
def test_an_export_that_cannot_be_is_refused(arguments, words, finished, call):
    del finished
    status, _, err = call("export", *arguments)
    assert status == 2
    assert err.startswith("tim-jax: ")
    assert words in err
    assert err.count("\n") == 1


def interrupt(rewards):
    del rewards
    raise KeyboardInterrupt


def fail(rewards):
    del rewards
    raise ValueError("no such\nanswer")


def terminate(rewards):
    os.kill(os.getpid(), signal.SIGTERM)
    return rewards


@pytest.mark.parametrize(("backend", "waits"), [("cpu", [0, 1]), ("gpu", [0])])
def test_the_first_checkpoint_is_waited_for(monkeypatch, backend, waits):
    """Else a folder may have two lines and no checkpoint, which is taken for one that lost it."""
    waited, steps = [], []
    run = SimpleNamespace(
        save=lambda step, *_: steps.append(step), wait=lambda: waited.append(steps[-1])
    )
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(folders, "saved", lambda *_: {})
    start = train.Start({}, -1, [], None, {})
    for step in (0, 1):
        start.save(cast(Any, run), step, cast(Any, None), None, ())
    assert waited == waits


def test_signals_that_come_together_are_one(monkeypatch):
    """As from a scheduler that tells every process, and from a study that then tells its runs."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with machine.Preemption() as preemption:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            assert preemption.asked
            assert heard == []
            monkeypatch.setattr(machine, "_TOGETHER", 0.0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_user_without_a_home_is_not_stopped(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    folder = cli._kept_folder()
    assert folder == cli._kept_folder()
    assert folder.parents[1].is_dir()
    folder.parents[1].rmdir()


def test_no_folder_for_temporary_files_is_one_line(monkeypatch, capsys):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert cli.main(["translate", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err == (
        "tim-jax: No usable temporary directory found in ['/tmp']; set TMPDIR to a folder that can"
        " be written\n"
    )


FAILURES = {
    "raises": (fail, "reward cli_rewards:by_length raised ValueError: no such"),
    "nan": (lambda r: [*r[:-1], float("nan")], "finite numbers, got nan at 7"),
}


def test_a_warm_start_ends_before_its_last_step_if_it_is_asked_to():
    preemption = machine.Preemption()
    steps = train._unless_asked(iter("abc"), 3, preemption)
    assert next(steps) == "a"
    preemption.asked = True
    with pytest.raises(PreemptedError, match="asked to end in step 2 of 3 of the warm start"):
        next(steps)
    assert list(train._unless_asked("a", 1, preemption)) == ["a"]  # the checkpoint follows


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_saves_and_goes_on_to_the_same_bits(
    folder, finished, rewards, call
):
    arguments = ("train", "tiny.toml", "run.folder=ended", "run.checkpoint_every=3")
    rewards.plan = {4: terminate}  # in step 2: the first two calls are of the evaluation
    before = signal.getsignal(signal.SIGTERM)
    status, _, err = call(*arguments)
    assert status == 143
    assert err == "tim-jax: asked to end, saved after step 2; the same command goes on\n"
    assert signal.getsignal(signal.SIGTERM) is before
    run = folder / "ended"
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2]
    rewards.plan = {}
    status, out, _ = call(*arguments)
    assert status == 0
    assert "resumed after step 2" in out
    for name in ("metrics.jsonl", "samples.jsonl", "model/model.safetensors"):
        assert (run / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.slow
def test_what_is_drawn_again_and_what_corrections_remember_survive_a_resume(folder, call):
    """Three steps in one, and one step and then two: the same lines."""
    changes = (
        "learner.refills=2",
        'learner.mode="recompute"',
        'learner.corrections=[{name="token_tis"}, {name="normalise_by_running_mean"}]',
        "task.reward=cli_rewards:at_length",
        "optimizer.ess_reference=0.5",
        "eval.every=0",
    )
    call("train", "tiny.toml", "run.folder=one", *changes)
    call("train", "tiny.toml", "run.folder=two", "steps=1", *changes)
    assert "resumed after step 1" in call("train", "tiny.toml", "run.folder=two", *changes)[1]
    whole, parts = metrics_of(folder / "one"), metrics_of(folder / "two")
    assert whole == parts
    assert sum(line["refill/rounds"] for line in whole[1:]) > 0
    assert {line["correction/clipped_high_share"] for line in whole[1:]} == {0.0}
    samples = [(folder / run / "samples.jsonl").read_bytes() for run in ("one", "two")]
    assert samples[0] == samples[1]


@pytest.mark.slow
def test_a_float16_run_says_its_overflows_and_resumes_to_the_bit(folder, call):
    """One step and then two, against three in one; the scale of 2^24 is too large at first."""
    changes = (
        "numerics.dtype=float16",
        "optimizer.loss_scale={ initial = 16777216.0, growth_interval = 2 }",
        "learner.mini_batches=2",
        "learner.epochs=2",
        "warmup.steps=0",
        "eval.every=0",
    )
    out = call("train", "tiny.toml", "run.folder=whole16", *changes)[1]
    call("train", "tiny.toml", "run.folder=parts16", "steps=1", *changes)
    assert "resumed after step 1" in call("train", "tiny.toml", "run.folder=parts16", *changes)[1]
    whole, parts = metrics_of(folder / "whole16"), metrics_of(folder / "parts16")
    assert whole == parts
    lines = [line for line in whole if line["step"]]
    overflows = [line["overflows"] for line in lines]
    assert overflows[0] > 0
    assert f"step 1: a float16 gradient overflowed in {int(overflows[0])} updates" in out
    assert lines[-1]["loss_scale_skips"] == sum(overflows)
    assert not any(line["skipped"] for line in lines)
    assert all(line["exact_share"] == 1.0 for line in lines)
    bits = [tiny.bits(programs_state(folder / run)) for run in ("whole16", "parts16")]
    assert bits[0] == bits[1]


@pytest.mark.slow
def test_a_run_that_is_no_longer_finite_ends_with_its_batch(folder, call):
    """At this learning rate the first update leaves weights whose logits overflow."""
    run = folder / "overflow"
    changes = ("optimizer.learning_rate=1e38", "exact=report", "learner.max_skipped=2")
    changes += ("warmup.steps=0", "eval.every=0")
    status, _, err = call("train", "tiny.toml", f"run.folder={run.name}", "steps=9", *changes)
    assert status == 4
    assert "the loss or gradient of 2 updates in a row was not finite" in err
    assert err.count("\n") == 1
    assert f"batch is in {run.name}/non_finite.npz" in err
    with np.load(run / "non_finite.npz") as batch:
        assert batch["rollout.responses"].shape == (8, 8)
    skipped = [line["skipped"] for line in metrics_of(run) if line["step"]]
    assert skipped == [0.0] * (len(skipped) - 1) + [1.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_under_way_keeps_what_was_written_and_can_be_resumed(
    kind, finished, folder, rewards, call
):
    what, words = FAILURES[kind]
    run = folder / f"failed-{kind}"
    arguments = ("train", "tiny.toml", f"run.folder={run.name}", "eval.every=0")
    rewards.plan = {3: what}
    assert words in refused(call, *arguments)
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2]
    assert len(list(read_lines(run / "samples.jsonl"))) == 8
    if kind != "raises":
        return
    rewards.plan = {}
    status, out, _ = call(*arguments)
    assert status == 0
    assert "resumed after step 2" in out
    assert (run / "samples.jsonl").read_bytes() == (finished / "samples.jsonl").read_bytes()


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits_with_other_settings_of_memory(
    finished, folder, rewards, call
):
    run = folder / "other-memory"
    arguments = ("train", "tiny.toml", f"run.folder={run.name}", "eval.every=0")
    rewards.plan = {3: interrupt}
    assert call(*arguments)[0] == 130
    rewards.plan = {}
    status, _, err = call(*arguments, "learner.micro_batch=4")
    assert status == 2
    assert "learner.micro_batch was not set, now 4" in err
    changes = {"learner.offload": "true", "learner.remat": "true", "sampler.halvings": "1"}
    changes["sampler.slots"] = "4"
    status, out, _ = call(*arguments, *(f"{key}={value}" for key, value in changes.items()))
    assert status == 0
    (said,) = [line for line in out.splitlines() if "resumed after step 2" in line]
    before = {"learner.offload": "false", "learner.remat": "false", "sampler.halvings": "0"}
    words = [f"{k} was {before.get(k, 'not set')}, now {v}" for k, v in changes.items()]
    assert said.endswith(f"resumed after step 2 with other settings: {'; '.join(words)}")
    for name in ("samples.jsonl", "model/model.safetensors"):
        assert (run / name).read_bytes() == (finished / name).read_bytes(), name
    whole = [
        {k: v for k, v in m.items() if not k.startswith("eval/")} for m in metrics_of(finished)
    ]
    assert metrics_of(run) == whole


def test_a_reward_that_leaves_with_status_0_does_not_end_the_run_with_it(call, folder):
    status, out, err = call(
        "train",
        "tiny.toml",
        "run.folder=left",
        "eval.every=0",
        "warmup.steps=0",
        "task.reward=cli_rewards:leave",
        "task.reward_in_process=false",
    )
    assert (status, err.count("\n")) == (2, 1)
    assert "cli_rewards:leave: a call ended its process (exit status 0)" in err
    assert "Traceback" not in out + err
    assert [line["step"] for line in metrics_of(folder / "left")] == [0]
    assert not (folder / "left" / "model").exists()


@pytest.mark.slow
def test_a_mistake_found_before_the_first_checkpoint_can_be_mended_in_place(call, folder):
    wrong = (
        "train",
        "tiny.toml",
        "run.folder=mended",
        "sampling.max_prompt_length=1",
        "warmup.steps=0",
    )
    status, _, err = call(*wrong)
    assert (status, err.count("\n")) == (2, 1)
    assert "at most 1 are allowed" in err
    fixed = ("train", "tiny.toml", "run.folder=mended", "steps=1", "eval.every=0")
    assert call(*fixed)[0] == 0
    # From the first checkpoint on the config stands.
    status, _, err = call(*fixed, "seed=1")
    assert status == 2
    assert "seed was 0, now 1" in err
    assert [line["step"] for line in metrics_of(folder / "mended")] == [0, 1]


# Bad input


def save_model(folder, template=None):
    """A model as the config has it, whose chat template, if any, may print the day."""
    tokenizer = character_tokenizer(builtin.ALPHABET)
    tokenizer.chat_template = template
    architecture = toml.load("tiny.toml").model.architecture
    assert architecture is not None
    model = sources.random_model(architecture, seed=0)
    return hf.save(folder, model.params, model.config, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def checkpoint(folder):
    """A model folder that is whole, in a folder of models, whose names are no run's."""
    return save_model(folder / "models" / "whole")


def refused(call, *arguments):
    """The one line on standard error."""
    status, out, err = call(*arguments)
    assert status == 2, (out, err)
    assert err.startswith("tim-jax: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in out + err
    return err


def change_tensors(model, change):
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def truncate(model):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove_a_tensor(model):
    change_tensors(model, lambda t: t.pop("model.layers.0.mlp.up_proj.weight"))


def cut_a_tensor(model):
    name = "model.layers.0.self_attn.o_proj.weight"
    change_tensors(model, lambda t: t.update({name: np.ascontiguousarray(t[name][:, :-1])}))


def remove_tokenizer(model):
    for path in model.glob("tokenizer*"):
        path.unlink()


def name_another_architecture(model):
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"model_type": "mamba"}))


# What is done to a whole folder, and what every command then says.
MODELS = {
    "truncated": (truncate, "truncated or corrupt safetensors"),
    "missing tensor": (remove_a_tensor, "layers.0.mlp.up_proj.weight' is missing"),
    "wrong shape": (cut_a_tensor, "o_proj.weight' has shape [16, 15], expected [16, 16]"),
    "no tokenizer": (remove_tokenizer, "has no tokenizer"),
    "no config": (lambda model: (model / "config.json").unlink(), "has no config.json"),
    "adapter": (
        lambda model: (model / "adapter_config.json").write_text("{}"),
        "has an adapter beside the model (adapter_config.json)",
    ),
    "architecture": (name_another_architecture, "mamba"),
    "missing folder": (shutil.rmtree, "does not exist"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_folder_that_is_not_right(kind, checkpoint, folder, call):
    spoil, words = MODELS[kind]
    model = shutil.copytree(checkpoint, checkpoint.with_name(kind.replace(" ", "-")))
    spoil(model)
    run = folder / f"model-{kind.replace(' ', '-')}"
    for arguments in (
        ("train", "tiny.toml", f"run.folder={run.name}", f"model={{path='{model}'}}"),
        ("eval", "tiny.toml", f"run.folder={run.name}", "--model", model),
        ("generate", model, "1+2=", "--max-tokens", 8),
        ("audit", model),
    ):
        if kind == "no tokenizer" and arguments[0] == "audit":
            continue  # an audit draws token ids and needs none
        err = refused(call, *arguments)
        assert words in err
        assert str(model) in err
    # The mistake mended, the same command works: the folder holds nothing that stands in its way.
    assert not (run / "metrics.jsonl").exists() or not metrics_of(run)


# What a config, a reward or a built-in task alone shows is in their own tests.
BAD_CONFIGS = {
    "unknown key": (["sampling.temprature=1.0"], "did you mean 'temperature'"),
    "task too small": (["task.parameters={digits=[1,1]}"], "eval_size=256"),
    "no task function": (
        ["task={kind='custom', factory='cli_rewards:make'}", "warmup.steps=0"],
        "no 'make'",
    ),
    "not a task": (
        ["task={kind='custom', factory='cli_rewards:nothing'}", "warmup.steps=0"],
        "got dict",
    ),
    "failing task": (
        ["task={kind='custom', factory='cli_rewards:leave', parameters={x=1}}", "warmup.steps=0"],
        "task.factory cli_rewards:leave raised TypeError",
    ),
    "no prompts": (
        ["task={kind='custom', factory='cli_rewards:empty'}", "warmup.steps=0"],
        "task mine has no prompts to train on",
    ),
}


@pytest.mark.parametrize("kind", BAD_CONFIGS)
def test_a_config_that_is_not_right(kind, call, folder):
    overrides, words = BAD_CONFIGS[kind]
    name = f"run.folder=config-{kind.replace(' ', '-')}"
    assert words in refused(call, "train", "tiny.toml", name, *overrides)


DATASETS = {
    "blank lines": ("\n\n", "is empty"),
    "all held out": ('{"question": "1+1", "answer": "2"}\n', "none left to train on"),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_a_dataset_that_is_not_right(kind, call, folder):
    text, words = DATASETS[kind]
    path = folder / f"{kind.replace(' ', '-')}.jsonl"
    path.write_text(text)
    share = 1.0 if kind == "all held out" else 0.0
    task = (
        f"task={{kind='dataset', path='{path}', reward='cli_rewards:by_length',"
        f" eval_share={share}}}"
    )
    arguments = ("train", "tiny.toml", f"run.folder=data-{path.stem}", task, "warmup.steps=0")
    assert words in refused(call, *arguments)


def sums(path, long=()):
    """A dataset of sums; rows `long` have a prompt that is too long."""
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]
    for row in long:
        rows[row]["question"] = "1" * 13 + "="
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("part", ["", "held-out "])
def test_a_row_that_is_too_long_is_named_before_a_weight_is_made(part, call, folder, monkeypatch):
    """Wherever it stands: it would end the run at the step that draws it."""
    train = sums(folder / "sums.jsonl", long=[] if part else [7])
    held_out = sums(folder / "held-out.jsonl", long=[7])
    held_out = f", eval_path='{held_out}'" if part else ", eval_share=0.0"
    task = f"task={{kind='dataset', path='{train}', reward='cli_rewards:by_length'{held_out}}}"
    monkeypatch.setattr(sources, "with_params", pytest.fail)
    name = f"run.folder=long-{part.strip()}"
    err = refused(call, "train", "tiny.toml", name, task, "warmup.steps=0", "eval.every=0")
    file = "held-out.jsonl" if part else "sums.jsonl"
    line = f"{part}prompt 7 ({folder / file}, line 8) has 14 tokens, at most 8 are allowed: '1111"
    assert err.startswith(f"tim-jax: {line}")


def test_a_missing_dataset(call):
    task = "task={kind='dataset', path='gone.jsonl', reward='cli_rewards:by_length'}"
    err = refused(call, "train", "tiny.toml", "run.folder=gone", task, "warmup.steps=0")
    assert "'gone.jsonl': no such file or folder" in err


@pytest.mark.slow
def test_a_run_that_holds_nothing_out_is_measured_on_what_it_trains_on(call, folder):
    path = sums(folder / "all.jsonl")
    task = f"task={{kind='dataset', path='{path}', reward='cli_rewards:by_length', eval_share=0.0}}"
    arguments = ("tiny.toml", "run.folder=all", task, "warmup.steps=0", "steps=1")
    assert call("train", *arguments)[0] == 0
    assert not any(key.startswith("eval/") for line in metrics_of(folder / "all") for key in line)
    assert "no held-out problems" in refused(call, "eval", *arguments)
    dial = '[{name = "log_prob_noise", std = 0.01}]'
    status, out, _ = call("audit", "all", "--sampler", dial, "--prompts", 3, "--samples", 2)
    assert status == 0
    assert out.endswith("exact where the sampler is the learner's own\n")
    drawn = audit.make_bench("all", prompts=3, samples=2).prompts
    assert drawn.lengths.tolist() == [4, 4, 4]  # a number of one digit, "+1="


def test_a_refused_resumption_leaves_the_run_as_it_was(call, folder):
    path, run = sums(folder / "killed.jsonl"), folder / "killed"
    task = f"task={{kind='dataset', path='{path}', reward='cli_rewards:by_length', eval_share=0.0}}"
    arguments = ("tiny.toml", "run.folder=killed", task, "warmup.steps=0")
    assert call("train", *arguments, "steps=1")[0] == 0
    shutil.rmtree(run / "checkpoints" / "1")  # as if killed before it was saved
    (run / "numerics.json").write_text('{"family": "tiles"}')
    (run / "started.json").unlink()  # as older versions have none
    before = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    before.pop(run / ".lock")
    assert before[run / "metrics.jsonl"].count(b"\n") == 2
    rows = path.read_text()
    for changed, what in (
        (rows + '{"question": "7+2=", "answer": "9"}\n', "10 rows where it had 9"),
        (rows.replace("0+1=", "9+1="), "other rows among its 9"),
    ):
        path.write_text(changed)
        line = refused(call, "train", *arguments, "steps=2")
        assert f"has changed since step 0: it has {what}" in line
    after = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    after.pop(run / ".lock")
    assert before == after


def on_day(monkeypatch, day):
    """Has every clock say so."""

    class Then(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 3, day, 12, tzinfo=tz)

    for module in (chat_template_utils, folders):
        monkeypatch.setattr(module, "datetime", Then)


@pytest.mark.slow
def test_a_run_has_the_prompts_of_its_first_day(call, folder, monkeypatch):
    template = "{{ strftime_now('%d') }}{{ messages[0].content }}"
    model = save_model(folder / "dated", template)
    arguments = (
        "train",
        "tiny.toml",
        f"model={{path='{model}'}}",
        "warmup.steps=0",
        "eval.every=0",
    )
    day_11 = [2 + builtin.ALPHABET.index(digit) for digit in "11"]
    for name, days in {"one_day": (11, 11), "two_days": (11, 24)}.items():
        for day, steps in zip(days, (1, 2), strict=True):
            on_day(monkeypatch, day)
            assert call(*arguments, f"run.folder={name}", f"steps={steps}")[0] == 0
        drawn = audit.make_bench(name, prompts=3, samples=2).prompts
        assert np.asarray(drawn.tokens)[:, :2].tolist() == [day_11] * 3
    assert metrics_of(folder / "two_days") == metrics_of(folder / "one_day")
    monkeypatch.undo()
    (model / "chat_template.jinja").write_text(template.replace("%d", "%m"))
    line = refused(call, *arguments, "run.folder=one_day", "steps=3")
    assert "prompts have other tokens than they had at step 2" in line


def test_a_dated_run_from_before_its_day_was_kept_is_refused(folder):
    tokenizer = character_tokenizer(builtin.ALPHABET)
    before = Restored(3, {}, {"rows": 1, "rows_crc32": 2})
    for template in (None, "{{ messages[0].content }}", "{{ strftime_now('%d') }}"):
        tokenizer.chat_template = template
        mark = checkpoints.prompts_mark(Text(tokenizer, 8), [Example("1", "2")] * 200)
        checkpoints.check_marks(Restored(3, {}, dict(mark)), mark, "run")
        if template is None or "now" not in template:
            checkpoints.check_marks(before, mark, "run")
        else:
            with pytest.raises(InputError, match=r"run: the chat template prints the date"):
                checkpoints.check_marks(before, mark, "run")


def test_audit_of_nothing_known(call):
    assert "did you mean 'qwen3'" in refused(call, "audit", "qwen33")


def test_a_full_disk_leaves_the_result_before(tmp_path, monkeypatch):
    """Every `--json`, `--markdown`, `--html` and `--out` is written so."""

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "result.json"
    path.write_text("good")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        InputError, match=r"^cannot write .*/result\.json: No space left on device$"
    ):
        cli._write(path, "new")
    assert path.read_text() == "good"


USAGE = {
    "nothing": ([], "the following arguments are required: COMMAND; see tim-jax --help"),
    "no config": (["train"], "train: the following arguments are required: config; see"),
    "unknown": (["fly", "me"], "argument COMMAND: invalid choice: 'fly' (choose from "),
    "no prompt": (["generate", "x"], "generate: the following arguments are required: prompt"),
    "option": (["train", "x", "--fast"], "unrecognized arguments: --fast; see tim-jax --help"),
}


@pytest.mark.parametrize("kind", USAGE)
def test_usage_errors_name_what_is_wanted(kind, call):
    arguments, words = USAGE[kind]
    assert words in refused(call, *arguments)


COMMANDS = ("train", "eval", "generate", "export", "audit", "diagnose", "plan", "study", "report")


@pytest.mark.parametrize("command", [*COMMANDS, "translate"])
def test_the_page_of_a_command_says_what_it_does_in_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    pages = {}
    for arguments in (["--help"], [command, "--help"]):
        with pytest.raises(SystemExit, match="0"):
            cli.main(arguments)
        pages[len(arguments)] = capsys.readouterr().out
    listed = re.search(rf"^    {command}\s+(.*)$", pages[1], re.MULTILINE)
    assert listed is not None
    what = listed[1]
    assert f"\n\n{what[0].upper()}{what[1:]}.\n\n" in pages[2]
    assert max(map(len, pages[2].splitlines())) <= 80


# The installed command

COMMAND = Path(sys.executable).with_name("tim-jax")


@pytest.mark.skipif(not COMMAND.exists(), reason="the package is not installed")
def test_the_installed_command_refuses_and_helps(folder):
    help_text = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, check=True)
    for name in ("train", "eval", "generate", "audit"):
        assert name in help_text.stdout
    found = subprocess.run(
        [COMMAND, "train", "tiny.toml", "stepz=1"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert found.stderr == "tim-jax: command line: stepz = 1: unknown key; did you mean 'steps'?\n"


def test_no_option_takes_the_default_numerics():
    """Every test above ran with fixed tiles; so does the fixture promise."""
    config = toml.load("tiny.toml")
    execution = assembly.make_execution(config, sources.make_model(config))
    length = config.sampling.max_prompt_length + config.sampling.max_tokens
    assert execution.numerics == fixed_numerics("tiles", "float32", length=length)


def test_the_machine_is_measured_with_the_compiler_options_of_the_run(folder, monkeypatch):
    """A range of rows that holds in programs of other options need not hold in the run's."""
    given = 'numerics.compiler_options={xla_disable_hlo_passes="cse_barrier_expander"}'
    config, measured = toml.load("tiny.toml", [given]), []

    def calibrate(model, numerics, **_):
        measured.append(numerics)
        return numerics

    monkeypatch.setattr(fitting, "calibrate", calibrate)
    execution = assembly.make_execution(config, sources.make_model(config))
    assert measured == [execution.numerics]
    passes = dict(execution.numerics.compiler_options)["xla_disable_hlo_passes"]
    assert "cse_barrier_expander" in str(passes)


def test_configs_of_the_package_are_found_from_anywhere(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    assert toml.load("configs/quickstart.toml", ["steps=7"]).steps == 7
    assert "configs/studies/smoke.toml" in call("study", "--list")[1]
    status, _, err = call("train", "configs/quikstart.toml")
    assert (status, "did you mean 'configs/quickstart.toml'?" in err) == (2, True)


def test_the_version_is_that_of_the_installed_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    said = capsys.readouterr().out
    assert said.startswith(f"tim-jax {tim_jax.__version__}, jax {jax.__version__}")


def test_64_bits_are_refused_before_anything_is_computed(monkeypatch, capsys):
    monkeypatch.setenv("JAX_ENABLE_X64", "True")
    assert cli.main(["generate", "tiny", "1+1>"]) == 2
    line = "JAX_ENABLE_X64 = True in the environment: models are computed in 32 bits; unset it\n"
    assert capsys.readouterr().err == f"tim-jax: {line}"
