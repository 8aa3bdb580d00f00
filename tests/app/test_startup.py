"""What a command does before any work: the checks of its config, kernels and architecture."""

import json
import os
import resource
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import tiny
from jax.sharding import AbstractDevice, AbstractMesh

from tim_jax import mismatch
from tim_jax.app import cli
from tim_jax.app.config import toml
from tim_jax.app.jobs import audit, planning, train
from tim_jax.app.run import assembly, checkpoints, folders
from tim_jax.common.errors import InputError, NonFiniteError
from tim_jax.instruments.auditing import ablation
from tim_jax.kernels import pallas
from tim_jax.model import fitting, hf
from tim_jax.model.config_file import from_hf
from tim_jax.model.execution import lean
from tim_jax.model.hf import PUBLISHED
from tim_jax.model.weights import parameter_shapes
from tim_jax.numerics import Rows

ROOT = Path(__file__).parents[2]
# What takes long to import and is not needed to check a config.
HEAVY = {"datasets", "flax", "huggingface_hub", "matplotlib", "orbax", "torch", "transformers"}

REPORT = """
import contextlib, io, json, sys
from tim_jax.app import cli
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            status = cli.main(arguments)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, error.getvalue(), list(sys.modules)]))
"""


def imported(*commands):
    """Exit status, error and imported modules of each, one after the other in a new process."""
    found = subprocess.run(
        [sys.executable, "-c", REPORT, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("[")]
    return [(status, error, set(names)) for status, error, names in lines]


def test_the_package_is_the_command_too():
    """For environments whose scripts are not on the path."""
    found = subprocess.run(
        [sys.executable, "-m", "tim_jax", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("tim-jax ")


def packages(modules):
    return {name.partition(".")[0] for name in modules}


# What is said before JAX is imported; then what is said before anything else that is heavy.
MISSING = {
    ("diagnose", "tiny", "gone.jsonl"): "rollouts gone.jsonl: no such file",
    ("report", "gone"): "gone: no such folder",
    ("generate", "tiny", ""): "the prompt is empty",
}
MISTAKEN = (
    ("train", "configs/quickstart.toml", "learner.mode=foo"),
    ("eval", "configs/quickstart.toml", "learner.mode=foo"),
    ("plan", "configs/quickstart.toml", "--topology", "v5e:2x2", "learner.mode=foo"),
)


def test_mistakes_and_help_wait_for_nothing_heavy():
    helped, *others = imported(["--help"], *MISSING, *MISTAKEN)
    assert helped[0] == 0
    assert {status for status, *_ in others} == {2}
    early, late = others[: len(MISSING)], others[len(MISSING) :]
    for modules in (helped[-1], *(modules for *_, modules in early)):
        assert packages(modules).isdisjoint({*HEAVY, "jax", "numpy", "pydantic"})
    assert len(early) == len(MISSING)
    for what, (_, error, _) in zip(MISSING.values(), early, strict=True):
        assert what in error
    assert len(late) == len(MISTAKEN)
    for _, error, modules in late:
        assert error.startswith('tim-jax: command line: learner.mode = "foo": unknown value')
        assert packages(modules).isdisjoint(HEAVY)
        assert modules.isdisjoint(
            {"jax.experimental.pallas", "tim_jax.kernels", "tim_jax.policy.sampler"}
        )


@pytest.mark.slow
def test_a_mistake_in_a_config_takes_less_than_importing_jax_twice():
    """Of CPU time: about a second on an idle machine. Other jobs stretch both alike."""

    def seconds(run):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def mistaken():
        [(status, *_)] = imported(["train", "configs/quickstart.toml", "lerner.mode=bypass"])
        assert status == 2

    def jax_alone():
        subprocess.run([sys.executable, "-c", "import jax"], check=True)

    taken, jaxs = zip(*((seconds(mistaken), seconds(jax_alone)) for _ in range(3)), strict=True)
    assert min(taken) < 2 * min(jaxs)


# Kernels by platform

LARGE = from_hf(PUBLISHED["Qwen/Qwen3-0.6B"])


def numerics(model=LARGE, **options):
    return assembly.make_numerics("auto", "bfloat16", model, length=128, batch=None, **options)


@pytest.mark.parametrize(
    ("platform", "family"), [("cpu", "tiles"), ("gpu", "pallas_gpu"), ("tpu", "pallas_tpu")]
)
def test_auto_is_the_exact_family_of_the_platform(platform, family, monkeypatch):
    monkeypatch.setattr(pallas, "platform", lambda: platform)
    assert numerics().family == family
    assert numerics() == assembly.make_numerics(family, "bfloat16", LARGE, length=128, batch=None)


def test_tile_sizes_on_both_sides_are_those_of_the_arm(monkeypatch):
    """What is measured must not overwrite what the dial says: else the control is another run."""

    def measured(config, numerics, **_):
        wide = ((16, Rows(2, 49)), (24, Rows(1, 8)))
        return replace(numerics, rows_by_contraction=wide, whole_kv=True)

    monkeypatch.setattr(fitting, "calibrate", measured)
    options = {"length": 40, "batch": 4}
    make = partial(assembly.make_numerics, "tiles", "float32", tiny.CONFIG, **options)
    for changes in ({"rows": 4}, {"attention_rows": 8}, {"kv_block": 16}):
        dial = mismatch.build([{"name": "tile_sizes", **changes}])
        assert make(shared=dial) == dial.numerics(make())
    assert make(shared=mismatch.build([{"name": "tile_sizes", "rows": 4}])).rows == Rows(4, 4)
    tables = [{"name": "compute", "dtype": "bfloat16"}, {"name": "tile_sizes", "rows": 4}]
    found = make(shared=mismatch.build(tables))
    assert (found.compute_dtype, found.rows_for(16), found.whole_kv) == ("bfloat16", Rows(4, 4), 1)


def test_auto_is_the_default_of_a_config():
    config = toml.load(ROOT / "configs" / "gsm8k_qwen3_0.6b.toml")
    assert config.numerics.family == "auto"
    assert 'family = "auto"' in toml.dump(config)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (replace(LARGE, head_dim=24), {}, "pallas_gpu cannot take heads of 24"),
        (replace(LARGE, intermediate_size=3024), {"column_tiles": 2}, "one of 2 column tiles of"),
        (tiny.CONFIG, {}, "heads of"),
    ],
    ids=["head size", "column tiles", "tiny model"],
)
def test_auto_does_not_fall_back_to_slow_kernels(model, options, words, monkeypatch):
    monkeypatch.setattr(pallas, "platform", lambda: "gpu")
    with pytest.raises(InputError) as caught:
        numerics(model, **options)
    line = str(caught.value)
    assert line.startswith("kernel family \"auto\" is 'pallas_gpu' on this GPU: ")
    assert words in line
    assert line.endswith(
        'set the family to "tiles" (numerics.family, or --family), which is slower'
    )
    with pytest.raises(InputError, match=r"^[Nn]umerics: "):
        assembly.make_numerics("pallas_gpu", "float32", model, length=128, batch=None, **options)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_several_tiles_change_how_products_are_divided_and_nothing_else(platform, monkeypatch):
    monkeypatch.setattr(pallas, "platform", lambda: platform)
    one = numerics()
    several = numerics(several_tiles=True)
    if platform == "gpu":  # which has them without being asked
        assert several.gpu.tile(64, 2048) != several.gpu.tile(10_000, 2048)
        back = several
    else:
        assert several.tpu.tile(64) != several.tpu.tile(65) == one.tpu.tile(65) == one.tpu.tile(64)
        back = replace(several, tpu=replace(several.tpu, few_rows=0))
    assert back == one


@pytest.mark.parametrize("changed", [{"family": "tiles"}, {"compute_dtype": "float32"}])
def test_several_tiles_are_refused_where_there_are_none(changed, monkeypatch):
    monkeypatch.setattr(pallas, "platform", lambda: "gpu")
    with pytest.raises(InputError, match=r"numerics\.several_tiles: only the families of kernels"):
        assembly.with_several_tiles(replace(numerics(), **changed))


def test_auto_knows_no_kernels_for_other_platforms(monkeypatch):
    monkeypatch.setattr(pallas, "platform", lambda: "metal")
    with pytest.raises(InputError, match='there are no kernels for metal; set the family to "til'):
        numerics()


class TestResume:
    """A run with a checkpoint goes on with the family of its past steps, or not at all."""

    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        monkeypatch.setattr(checkpoints, "list_steps", lambda folder: [1])
        config = toml.build({"run": {"folder": str(tmp_path)}})
        (tmp_path / "config.toml").write_text(toml.dump(config))
        (tmp_path / "numerics.json").write_text('{"family": "pallas_gpu"}')
        return config

    def test_elsewhere_it_is_refused_by_name(self, run):
        with pytest.raises(InputError) as caught:
            train.check_resumed(run)
        assert str(caught.value) == (
            f"{run.run.folder} holds a run whose numerics.family was 'pallas_gpu'; 'auto' is"
            " 'tiles' here: set numerics.family=pallas_gpu, or another run.folder"
        )

    def test_the_family_by_name_is_the_same_run(self, run, monkeypatch):
        section = run.numerics.model_copy(update={"family": "pallas_gpu"})
        named = run.model_copy(update={"numerics": section})
        train.check_resumed(named)
        assert "numerics.family" in folders.changeable(named)
        monkeypatch.setattr(pallas, "platform", lambda: "gpu")
        train.check_resumed(run)

    def test_a_run_of_an_older_version_has_it_in_its_config(self, run):
        folder = Path(run.run.folder)
        (folder / "numerics.json").write_text('{"numerics": "native float32"}')
        train.check_resumed(run)  # what "auto" stood for is not known
        text = (folder / "config.toml").read_text().replace('"auto"', '"native"')
        (folder / "config.toml").write_text(text)
        with pytest.raises(InputError, match=r"numerics\.family was 'native'"):
            train.check_resumed(run)

    def test_steps_that_are_behind_it_are_refused(self, run, monkeypatch):
        monkeypatch.setattr(checkpoints, "list_steps", lambda folder: [20, 30])
        monkeypatch.setattr(pallas, "platform", lambda: "gpu")
        at = run.run.folder
        train.check_resumed(run.model_copy(update={"steps": 30}))
        with pytest.raises(InputError) as caught:
            train.check_resumed(run.model_copy(update={"steps": 29}))
        assert str(caught.value) == (
            f"steps = 29: the run in {at} is at step 30 already; set steps to 30 or more, or"
            " another run.folder"
        )

    def test_older_weights_are_read_in_their_own_tiles_alone(self, run, monkeypatch):
        monkeypatch.setattr(pallas, "platform", lambda: "gpu")
        wide = {"placement": {"tensor": 2, "data": 2}, "run": {"folder": run.run.folder}}
        train.check_resumed(toml.build(wide))
        with pytest.raises(
            InputError, match=r"column_tiles = 1, and placement\.tensor makes them 2"
        ):
            train.check_resumed(toml.build({**wide, "sampler": {"max_staleness": 1}}))

    def test_before_the_first_checkpoint_anything_goes(self, run, monkeypatch):
        monkeypatch.setattr(checkpoints, "list_steps", lambda folder: [])
        train.check_resumed(run)


@pytest.mark.parametrize("training", [True, False])
def test_worked_solutions_that_are_too_long_are_named_before_the_machine_is_measured(
    training, monkeypatch
):
    def measuring(*_, **__):
        raise RuntimeError("the machine is measured")

    monkeypatch.setattr(assembly, "make_execution", measuring)
    task = {"kind": "builtin", "name": "sorting", "parameters": {"digits": [4, 5]}}
    long = {"sampling": {"max_tokens": 16}, "task": task, "warmup": {"steps": 20}}
    wanted = InputError if training else RuntimeError  # an evaluation needs no worked solutions
    with pytest.raises(wanted) as caught:
        train.assemble(toml.build(long), training=training)
    if training:
        assert "has 20 tokens, more than max_tokens = 16: '" in str(caught.value)
    at_once = {**long, "warmup": {"steps": 20, "worked": 0.0}}
    with pytest.raises(RuntimeError):
        train.assemble(toml.build(at_once), training=training)


def test_a_run_that_goes_on_with_another_jax_says_so(tmp_path):
    (tmp_path / "numerics.json").write_text('{"jax": "0.12.0", "device": "cpu"}')
    run: Any = SimpleNamespace(folder=tmp_path, changed=())
    kept = checkpoints.Restored(2, {}, {})
    before = {"jax": "0.10.1", "device": "cpu"}
    assert train._describe_resumption(run, kept, before) == [
        "resumed after step 2",
        "bits may differ from those of an uninterrupted run: jax was 0.10.1, now 0.12.0",
    ]
    assert train._describe_resumption(run, kept, {"device": "cpu"}) == ["resumed after step 2"]


@pytest.mark.parametrize("refused", [True, False])
def test_a_refused_resumption_leaves_what_was_measured(refused, tmp_path, monkeypatch):
    """Or the next, good one would have other row ranges, and so other bits."""
    config = toml.build({"run": {"folder": str(tmp_path)}})
    measured = tmp_path / "calibration.json"
    (tmp_path / "config.toml").write_text(toml.dump(config))
    measured.write_text("of the run")

    def begun(*_):
        if refused:
            raise InputError("its rows have changed")
        return SimpleNamespace(task=SimpleNamespace(close=lambda: None)), None

    def follow(*_):
        raise NonFiniteError("of a step")

    monkeypatch.setattr(train, "assemble", lambda _, measured: measured.write_text("of another"))
    monkeypatch.setattr(train, "begun", begun)
    monkeypatch.setattr(train, "follow", follow)
    with pytest.raises(InputError if refused else NonFiniteError):
        train.train_run(config)
    assert measured.read_text() == ("of the run" if refused else "of another")


def test_configs_written_by_the_writer_before_are_the_same_runs():
    """It kept free-form tables and lists on one line, and keys in another order."""
    before = """
seed = 0
[sampling]
samples = 8
max_prompt_length = 32
max_tokens = 64
temperature = 1.0
top_k = 0
top_p = 1.0
stop_tokens = [7, 9]
[task]
kind = "builtin"
name = "sorting"
parameters = {digits = [4, 6]}
[warmup]
steps = 2
batch = 64
learning_rate = 0.003
worked = 0.5
partial = 0.0
errors = 0.0
[placement]
data = 1
fsdp = 2
tensor = 1
decode = "whole"
[placement.sampler]
data = 2
fsdp = 1
tensor = 1
decode = "sharded"
"""
    now = toml.dump(toml.build(tomllib.loads(before)))
    changed = folders.config_differences(before, now)
    assert [one for one in changed if one.before is not None] == []


# Architectures by name


def test_published_names_need_no_network(monkeypatch):
    monkeypatch.setattr(hf, "load_config", lambda *_, **__: pytest.fail("asked the hub"))
    config = toml.load(ROOT / "configs" / "gsm8k_qwen3_0.6b.toml")
    found = planning.model_config(config, None)
    assert (found.model_type, found.num_layers, found.head_dim) == ("qwen3", 28, 128)
    for path in sorted((ROOT / "configs").glob("*.toml")):
        # whose weights a script makes, and whose architecture the hub's model has too
        local = path.stem == "smollm2"
        changes = ["model.path=HuggingFaceTB/SmolLM2-135M-Instruct"] if local else []
        planning.model_config(toml.load(path, changes), None)


# Parameters in all, as the models' own pages and weights have them.
PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_sizes_make_the_published_number_of_parameters(name):
    shapes = parameter_shapes(from_hf(PUBLISHED[name]))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == PARAMETERS[name]


def test_an_unknown_name_is_told_which_are_known(monkeypatch):
    def unreachable(*_, **__):
        raise InputError("model 'Qwen/Qwen3-0.7B' is not reachable")

    monkeypatch.setattr(hf, "load_config", unreachable)
    with pytest.raises(InputError) as caught:
        planning.model_config(toml.load(None, ["model={path='Qwen/Qwen3-0.7B'}"]), None)
    line = str(caught.value)
    assert (
        "not reachable; known without the hub are HuggingFaceTB/SmolLM2-135M-Instruct, Qwen/"
        in line
    )
    assert "\n" not in line


PROGRAM = """
from tim_jax.app import cli

cli._keep_programs()
import jax
import jax.numpy as jnp

print(float(jax.jit(lambda x: jnp.sin(x).sum())(jnp.arange(8.0))))
"""


def test_compiled_programs_are_kept_and_a_damaged_one_is_compiled_again(tmp_path):
    """In the user's cache folder, by kind of processor."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {
        "XDG_CACHE_HOME": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def printed():
        command = [sys.executable, "-c", PROGRAM]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return ended.stdout

    first = printed()
    kept = list(tmp_path.glob("tim_jax/*/programs/*-cache"))
    assert kept
    for file in kept:
        file.write_bytes(file.read_bytes()[:40])
    assert printed() == first


def test_programs_that_were_cut_off_are_removed(tmp_path, monkeypatch):
    """JAX would neither write them anew nor, before 0.12, keep others beside one without a time."""
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})
    folder = cli._kept_folder() / "programs"
    folder.mkdir(parents=True)
    for name, size in {"whole": 9, "empty": 0, "untimed": 9}.items():
        (folder / f"{name}-cache").write_bytes(bytes(size))
        if name != "untimed":
            (folder / f"{name}-atime").write_bytes(bytes(8))
    cli._keep_programs()
    assert [path.name for path in folder.glob("*-cache")] == ["whole-cache"]


def test_where_jax_was_told_to_keep_programs_they_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in ("JAX_COMPILATION_CACHE_MAX_SIZE", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    cli._keep_programs()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "elsewhere"
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ


@pytest.mark.parametrize(("version", "told"), [((0, 10, 1), True), ((0, 11, 2), False)])
def test_xla_updates_bfloat16_in_place_before_and_after_it_learnt_to(version, told, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    numerics = assembly.fixed_numerics("tiles", "bfloat16", length=64)
    option = "xla_disable_hlo_passes"
    assert (option in dict(numerics.compiler_options)) == told
    # A user's list is joined with it, and so is that of an update.
    joined = numerics.with_options({option: "mine"})
    ours = ["float-normalization-bf16", "cse_barrier_expander"] if told else []
    wanted = [*ours, "mine"]
    assert str(dict(joined.compiler_options)[option]).split(",") == wanted
    of_update = str(dict(lean(joined).compiler_options)[option]).split(",")
    assert of_update[: len(wanted)] == wanted
    assert len(of_update) > len(wanted)
    other = AbstractDevice("TPU v5 lite", 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=other)):
        assert assembly.fixed_numerics("tiles", "bfloat16", length=64).compiler_options == ()


def test_a_dial_that_clashes_is_refused_before_the_machine_is_measured(tmp_path, monkeypatch):
    """Of a run, of its evaluation, and of an audit of a run's folder or of a model."""
    monkeypatch.setattr(fitting, "calibrate_once", pytest.fail)
    path = tmp_path / "config.toml"
    path.write_text(tiny.RUN)
    dial = 'sampler.mismatch=[{name="native_kernels"}, {name="sum_order", lanes=8}]'
    config = toml.load(path, ["exact=report", dial])
    arms = ablation.alone_and_together(config.sampler.dial)
    for refused in (
        partial(train.assemble, config),
        partial(train.assemble, config, training=False),
        partial(audit.make_bench, str(tmp_path), prompts=3, samples=2, arms=arms),
        partial(audit.make_bench, "qwen3", prompts=3, samples=2, arms=arms),
    ):
        with pytest.raises(InputError, match="'sum_order': contradicts 'native' kernels"):
            refused()
