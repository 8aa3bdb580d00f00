"""Placements in a run's configuration and in the commands."""

from functools import cache

import pytest
import tiny

from tim_jax.app import cli
from tim_jax.app.config.toml import load
from tim_jax.app.jobs import train
from tim_jax.app.run import assembly, sources
from tim_jax.app.run.loggers import read_lines
from tim_jax.common.errors import InputError
from tim_jax.model import fitting
from tim_jax.placement import SINGLE, Placement

REFUSED = {
    "placement.fsdp=3": "placement.fsdp = 3: data x fsdp = 3 must divide the 64 sequences of a"
    " step",
    "placement.data=3": "placement.data = 3: data x fsdp = 3 must divide the 64 sequences of a"
    " step",
    "placement={data=3, fsdp=2}": "placement.data = 3: data x fsdp = 6 must divide the 64 sequences"
    " of a step",
    "placement={data=2, fsdp=3}": "placement.fsdp = 3: data x fsdp = 6 must divide the 64 sequences"
    " of a step",
    "placement.data=4 sampler.slots=6": "placement.data = 4: data x fsdp = 4 must divide the 6"
    " slots",
    "placement={data=4, expert=4} learner.micro_batch=8": "placement.data = 4: data x fsdp x expert"
    " = 16 must divide the 8 sequences of a micro-batch",
    "placement.sampler={data=5}": "placement.sampler.data = 5: data x fsdp = 5 must divide the 64"
    " sequences of a step",
    "placement={fsdp=8, data=2} learner.mini_batches=8": "placement.fsdp = 8: data x fsdp = 16 must"
    " divide the 8 sequences of a mini-batch",
    "placement.fsdp=4 learner.micro_batch=2": "placement.fsdp = 4: data x fsdp = 4 must divide the"
    " 2 sequences of a micro-batch",
    "placement.sampler={fsdp=5}": "placement.sampler.fsdp = 5: data x fsdp = 5 must divide the 64"
    " sequences of a step",
    "placement.tensor=2 numerics.column_tiles=3": "placement.tensor = 2: must divide"
    " numerics.column_tiles = 3",
    "placement.data=0": "placement.data = 0: must be a positive integer",
    "placement.tensr=2": "placement.tensr = 2: unknown key; did you mean 'tensor'?",
    'placement.decode="hole"': "placement.decode = \"hole\": unknown value; did you mean 'whole'?",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_a_bad_placement_is_refused(overrides):
    words = overrides.replace(", ", ",").split(" ")
    with pytest.raises(InputError) as caught:
        load(None, [word.replace(",", ", ") for word in words])
    assert REFUSED[overrides] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_placements_of_a_config():
    assert load(None, []).placement.value == SINGLE
    config = load(None, ["placement.fsdp=4", "placement.sampler.tensor=2"])
    assert config.placement.value == Placement(fsdp=4)
    assert config.placement.for_sampler == Placement(tensor=2)
    assert config.column_tiles == 2
    assert load(None, ["placement.tensor=2"]).placement.for_sampler == Placement(tensor=2)
    assert load(None, ["placement.tensor=2", "numerics.column_tiles=4"]).column_tiles == 4
    assert "placement" in config.may_change()


@pytest.fixture
def measured_once(monkeypatch):
    """The machine is measured once for each model and its tiles, for all lengths and batches."""
    calibrate = fitting.calibrate

    @cache
    def once(config, numerics):
        return calibrate(config, numerics, batch=4, longest=config.max_positions)

    monkeypatch.setattr(fitting, "calibrate", lambda config, numerics, **_: once(config, numerics))


@pytest.mark.slow
def test_an_evaluation_has_slots_for_its_own_mesh(unmeasured):
    """The sampler's mesh of two devices takes six slots, the learner's of four takes eight."""
    words = ["placement.fsdp=4", "placement.sampler.fsdp=2", "sampler.slots=6", "sampler.pages=6"]
    job = train.assemble(load(None, words))
    try:
        assert job.evaluate is not None
    finally:
        job.task.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement.fsdp=16"], "fsdp 16 x expert 1 x tensor 1 needs 16 devices, but there are 8"),
        (["placement.tensor=4"], "column_tiles must divide the model's num_kv_heads = 2, got 4"),
        (["numerics.column_tiles=3"], "must divide the model's num_kv_heads = 2, got 3"),
        (["numerics.several_tiles=true"], 'several tiles, got "tiles" in float32'),
    ],
)
def test_what_a_model_or_machine_cannot_be_is_refused_before_compiling(overrides, message):
    config = load(None, overrides)
    with pytest.raises(InputError, match=message):
        assembly.make_execution(config, sources.make_model(config))


AHEAD = ["sampler.max_staleness=2", "placement.split=true", "placement.sampler.data=2"]
SMALL = "model.architecture.num_layers=1"
PLAIN = ["warmup.steps=0", "eval.every=0", SMALL]


def test_too_few_devices_for_a_sampler_of_its_own_are_refused(tmp_path, capsys):
    config = tmp_path / "run.toml"
    config.write_text(f'{tiny.RUN}\n[run]\nfolder = "{tmp_path / "run"}"\n')
    words = ["placement.split=true", "placement.data=4", "placement.sampler.data=8"]
    assert cli.main(["train", str(config), *words]) == 2
    assert "learner and sampler need 4 + 8 devices, but there are 8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_draws_ahead_is_resumed_and_may_be_placed_otherwise(
    tmp_path, unmeasured, traced_once
):
    """A run that ends and goes on, on devices of the sampler's own, and one that never stopped."""
    lines, models = [], []
    for name, stops in (("whole", ([*AHEAD, "steps=5"],)), ("parts", (AHEAD, AHEAD[:1]))):
        config, folder = tmp_path / f"{name}.toml", tmp_path / name
        # The decay moves the weights even where no reward does.
        decay = "[optimizer]\nlearning_rate = 0.1\nweight_decay = 0.5"
        config.write_text(f'{tiny.RUN}\n{decay}\n[run]\nfolder = "{folder}"\n')
        for words in stops:
            more = ["steps=5"] if words == AHEAD[:1] else []
            assert cli.main(["train", str(config), *PLAIN, *words, *more]) == 0
        lines.append((folder / "metrics.jsonl").read_text())
        models.append((folder / "model" / "model.safetensors").read_bytes())
    assert lines[0] == lines[1]
    assert models[0] == models[1]
    steps = [line for line in read_lines(tmp_path / "whole" / "metrics.jsonl") if line["step"]]
    assert [line["exact_share"] for line in steps] == [1.0] * 5
    assert all(line["compared_tokens"] > 0 for line in steps)
    assert steps[-1]["drift/log_ratio_abs_mean"] > steps[0]["drift/log_ratio_abs_mean"] == 0.0


@pytest.mark.slow(minutes=8)
def test_a_run_on_a_mesh_goes_on_on_another(tmp_path, capsys, measured_once):
    """Trains under fsdp and tensor, resumes under data, evaluates, and samples from the result."""
    config, folder = tmp_path / "run.toml", tmp_path / "run"
    config.write_text(f'{tiny.RUN}\n[run]\nfolder = "{folder}"\n')
    meshed = ["placement.fsdp=2", "placement.tensor=2"]
    assert cli.main(["train", str(config), *PLAIN, *meshed]) == 0
    assert cli.main(["train", str(config), *PLAIN, "placement.data=4", "steps=3"]) == 0
    lines = [line for line in read_lines(folder / "metrics.jsonl") if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["exact_share"] == 1.0 and line["compared_tokens"] > 0 for line in lines)
    # As many as a step draws: the same program as its sampler.
    evaluated = [SMALL, "placement.data=4", "eval.prompts=2", "eval.samples=4"]
    assert cli.main(["eval", str(config), *evaluated]) == 0
    assert "evaluated step 3" in capsys.readouterr().out
    outputs = []
    for axes in (["--tensor", "2"], ["--fsdp", "2", "--tensor", "2"]):
        capsys.readouterr()
        assert cli.main(["generate", str(folder), "12>", "3>", "--max-tokens", "8", *axes]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert "log-prob" in outputs[0]
