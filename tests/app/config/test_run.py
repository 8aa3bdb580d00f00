import dataclasses
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from tim_jax import corrections
from tim_jax.app.config import run, sections, toml
from tim_jax.app.config.run import RunConfig
from tim_jax.app.config.toml import build, dump, load, parse_override
from tim_jax.app.run import assembly, folders
from tim_jax.common.errors import InputError
from tim_jax.objectives import losses
from tim_jax.rl.rules import Turns

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))


def refused(*overrides, data=None):
    """The line that a config is refused with."""
    with pytest.raises(InputError) as caught:
        load(None, overrides) if data is None else build(data, source="f.toml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_load_and_survive_a_round_trip(path):
    loaded = load(path)
    text = dump(loaded)
    assert build(tomllib.loads(text)) == loaded
    assert dump(build(tomllib.loads(text))) == text


def test_what_is_done_about_a_template_that_rewrites_history_reaches_the_run():
    path = next(path for path in CONFIGS if path.stem == "turns")
    got = load(path, ["task.history=cut"])
    assert got.sampling.max_turns is not None
    assert got.turns is not None
    assert got.turns == Turns(got.sampling.max_turns, got.sampling.max_tokens, "cut")
    assert load(path).turns == replace(got.turns, history="refuse")
    noisy = ["task.history=cut", "learner.noise_scale=true", "learner.micro_batch=8"]
    with pytest.raises(InputError, match=r'learner\.noise_scale.*history = "cut" adds some'):
        load(path, [*noisy, "learner.micro_batch_tokens=none"])
    with pytest.raises(InputError, match=r"task\.history"):
        load(path, ["task.history=drop"])


def test_the_paper_recipe_is_its_table_1():
    got = load(Path(__file__).parents[3] / "configs" / "beyond_precision.toml")
    optimizer, objective, sampling = got.optimizer, got.objective, got.sampling
    assert (optimizer.learning_rate, optimizer.weight_decay) == (1e-6, 0.01)
    assert optimizer.max_grad_norm == 1.0
    learner = got.learner
    assert (learner.prompts_per_step, learner.mini_batches, learner.epochs) == (64, 1, 1)
    assert (objective.estimator, objective.clip_low, objective.clip_high) == ("rloo", 0.2, 0.28)
    assert (objective.kl_coefficient, objective.drop_uninformative) == (0.0, True)
    assert (sampling.samples, sampling.max_tokens) == (16, 8192)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)
    assert got.numerics.dtype == "bfloat16"
    assert got.optimizer.length_decay == run.DecayFixed(kind="fixed", period=204, floor=0.1)


def test_defaults_are_a_config_and_every_default_can_be_written():
    """A field that may be None must have None as its default: TOML cannot say it."""
    assert build(tomllib.loads(dump(RunConfig()))) == RunConfig()

    def sections(section):
        yield section
        for kind in toml._keys(section).values():
            for inner in toml._sections(kind):
                yield from sections(inner)

    def defaults(section):
        if issubclass(section, BaseModel):
            return {name: field.default for name, field in section.model_fields.items()}
        return {field.name: field.default for field in dataclasses.fields(section)}

    found = set(sections(RunConfig))
    assert len(found) > 15
    for section in found:
        for name, kind in toml._keys(section).items():
            if type(None) in get_args(kind):
                assert defaults(section)[name] is None, f"{section.__name__}.{name}"


texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def as_text(config):
    return json.dumps(config.model_dump(), sort_keys=True)


@given(st.dictionaries(texts, values, max_size=4), texts, st.floats(1e-300, 1e300))
def test_any_value_survives_the_round_trip(parameters, folder, learning_rate):
    data = {
        "task": {"kind": "gym", "name": folder, "parameters": parameters},
        "optimizer": {"learning_rate": learning_rate, "length_decay": {"kind": "reactive"}},
        "learner": {"mode": "recompute", "corrections": [{"name": "token_tis", "cap": 3.5}]},
        "model": {"architecture": {"num_heads": 8}},
    }
    made = build(data)
    back = build(tomllib.loads(dump(made)))
    assert back == made
    # Equal values may differ in type (1, 1.0, true); the order of keys means nothing.
    assert as_text(back) == as_text(made)


def test_overrides_win_over_the_file_and_need_no_quotes(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('seed = 1\n[run]\nfolder = "a"\nkeep = 5\n')
    got = load(path, ["run.folder=runs/b-1", "seed=7", "eval.k = [1, 2]", "eval.samples=2"])
    assert (got.run.folder, got.run.keep, got.seed, got.eval.k) == ("runs/b-1", 5, 7, (1, 2))
    masked = load(
        path, ['learner.corrections=[{name="k3_rejection", bound=0.2}]']
    ).learner.corrections
    assert masked == ({"name": "k3_rejection", "bound": 0.2},)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1", (("a", "b"), 1)),
        ("a=1.5e-6", (("a",), 1.5e-6)),
        ("a=true", (("a",), True)),
        ("a='1'", (("a",), "1")),
        ("a=x=y", (("a",), "x=y")),
        ("a=Qwen/Qwen3-0.6B", (("a",), "Qwen/Qwen3-0.6B")),
        ("a=1\nb=2", (("a",), "1\nb=2")),
        ("a={k=1}", (("a",), {"k": 1})),
    ],
)
def test_parse_override(text, expected):
    assert parse_override(text) == expected


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("steps", "command line: 'steps': write section.key=value"),
        ("a b=1", "command line: 'a b=1': write section.key=value"),
        ("a..b=1", "command line: 'a..b=1': write section.key=value"),
        (
            "seed=",
            "command line: 'seed=': no value; write seed=none to leave the key out, or"
            " seed='\"\"' for an empty text",
        ),
    ],
)
def test_a_malformed_override_is_refused(text, line):
    assert refused(text) == line


def test_an_unclosed_override_is_refused():
    assert refused("eval.k=[1").startswith("command line: 'eval.k=[1': not TOML: ")


def test_an_override_inside_a_value_is_refused():
    line = refused("seed=1", "seed.x=2")
    assert line == "command line: 'seed.x=2': seed = 1 is no table and has no keys"


REFUSED = [
    # typos
    ("learner.micro_bach=8", "learner.micro_bach = 8: unknown key; did you mean 'micro_batch'?"),
    ("modl.path=x", "modl: unknown key; did you mean 'model'?"),
    # keys of another section, under their own names and those of other libraries
    ("samples=3", "samples = 3: unknown key; did you mean 'sampling.samples'?"),
    ("learner.samples=3", "learner.samples = 3: unknown key; did you mean 'sampling.samples'?"),
    ("num_generations=4", "num_generations = 4: unknown key; did you mean 'sampling.samples'?"),
    (
        "sampling.num_generations=4",
        "sampling.num_generations = 4: unknown key; did you mean 'samples'?",
    ),
    (
        "learner.ppo_mini_batch_size=256",
        "learner.ppo_mini_batch_size = 256: unknown key; did you mean 'mini_batches' (how many, not"
        " their size)?",
    ),
    (
        "ppo_mini_batch_size=256",
        "ppo_mini_batch_size = 256: unknown key; did you mean 'learner.mini_batches' (how many, not"
        " their size)?",
    ),
    (
        "learner.mini_batch_size=64",
        "learner.mini_batch_size = 64: unknown key; did you mean 'mini_batches' (how many, not"
        " their size)?",
    ),
    ("lr=1e-6", "lr = 1e-06: unknown key; did you mean 'optimizer.learning_rate'?"),
    (
        "learner.beta=0",
        "learner.beta = 0: unknown key; did you mean 'learner.objective.kl_coefficient'?",
    ),
    ("task={kind='gym', name='x', sead=1}", "task.sead = 1: unknown key; did you mean 'seed'?"),
    ("learner.mode=bypas", "learner.mode = \"bypas\": unknown value; did you mean 'bypass'?"),
    ("task={kind='dataste'}", "task.kind = \"dataste\": unknown value; did you mean 'dataset'?"),
    ("run.sinks=['wanb']", "run.sinks[0] = \"wanb\": unknown value; did you mean 'wandb'?"),
    (
        "optimizer.length_decay={kind='fixed', perod=3, period=2}",
        "optimizer.length_decay.perod = 3: unknown key; did you mean 'period'?",
    ),
    (
        "optimizer.length_decay={kind='reactive', rise=1.0}",
        "optimizer.length_decay.rise = 1.0: must be above 1",
    ),
    (
        "optimizer.length_decay={kind='reactive', hold=30}",
        "optimizer.length_decay.hold = 30: must lie in [5, gap], gap is 24",
    ),
    (
        "optimizer.length_decay={kind='reactive', window=60.0}",
        "optimizer.length_decay.window = 60.0: must be a whole number",
    ),
    (
        "learner.objective.estimator=rlo",
        "learner.objective.estimator = \"rlo\": unknown value; did you mean 'rloo'?",
    ),
    ("numerics.family=tile", "numerics.family = \"tile\": unknown value; did you mean 'tiles'?"),
    ("placement.dcode=x", "placement.dcode = \"x\": unknown key; did you mean 'decode'?"),
    # types
    ("seed=1.5", "seed = 1.5: must be a whole number"),
    ("seed=true", "seed = true: must be a whole number"),
    ("optimizer.learning_rate=abc", 'optimizer.learning_rate = "abc": must be a number'),
    ("optimizer.learning_rate=inf", "optimizer.learning_rate = inf: must be finite"),
    ("model.path=1", 'model.path = 1: must be text in quotes, "like this"'),
    ("sampling=3", "sampling = 3: must be a table of keys and values"),
    ("eval.k=3", "eval.k = 3: must be a list, [like, this]"),
    ("eval.k=[1.5]", "eval.k[0] = 1.5: must be a whole number"),
    ("task={kind='gym'}", "task.name: is missing"),
    ("task.name='x'", "task: needs the key 'kind', one of builtin, custom, dataset, gym"),
    (
        "task={kind='builtin', reward='f.py'}",
        'task.reward = "f.py": must be written "module:function"',
    ),
    (
        "task={kind='builtin', environment='f.py'}",
        'task.environment = "f.py": must be written "file.py:function" or "module:function"',
    ),
    (
        "task={kind='builtin', history='x'}",
        'task.history = "x": unknown value; known: cut, keep, refuse',
    ),
    # ranges
    ("sampling.top_p=1.5", "sampling.top_p = 1.5: must be in (0, 1] (1 is off)"),
    ("sampling.top_p=0.0", "sampling.top_p = 0.0: must be in (0, 1] (1 is off)"),
    ("sampling.temperature=0.0", "sampling.temperature = 0.0: must be greater than 0 in training"),
    ("sampling.top_k=-1", "sampling.top_k = -1: must be >= 0 (0 is off)"),
    (
        "model.architecture={head_dim=33}",
        "model.architecture.head_dim = 33: must be a multiple of 2",
    ),
    ("placement={sampler={data=0}}", "placement.sampler.data = 0: must be a positive integer"),
    ("optimizer.b1=1.0", "optimizer.b1 = 1.0: must be in [0, 1)"),
    ("optimizer.total_steps=0", "optimizer.total_steps = 0: must be 1 or more"),
    (
        "optimizer.total_steps=50",
        "optimizer.total_steps = 50: has no effect on a constant learning rate; set"
        " optimizer.schedule too",
    ),
    (
        "optimizer.final_share=0.1",
        "optimizer.final_share = 0.1: has no effect on a constant learning rate; set"
        " optimizer.schedule too",
    ),
    (
        "task={kind='dataset', path='x', eval_share=2.0}",
        "task.eval_share = 2.0: must be a number from 0 to 1",
    ),
    ("task={kind='dataset', path='x', seed=-1}", "task.seed = -1: must be at least 0"),
    ("sampling.stop_tokens=[-1]", "sampling.stop_tokens[0] = -1: must be 0 or more"),
    # keys that nothing would read
    (
        "sampler.both_sides=true",
        "sampler.both_sides = true: is for entries of sampler.mismatch; set that too",
    ),
    (
        "task={kind='builtin', history='keep'}",
        'task.history = "keep": is for episodes of several turns; set sampling.max_turns too',
    ),
    (
        "task={kind='builtin', environment_workers=2}",
        "task.environment_workers = 2: is for task.environment; set that too",
    ),
    (
        "task={kind='dataset', path='x', reward_in_process=true}",
        "task.reward_in_process = true: is for a reward or a task of your own; set task.reward too",
    ),
    (
        "task={kind='builtin', reward_time_limit=9.0}",
        "task.reward_time_limit = 9.0: is for a reward or a task of your own; set task.reward too",
    ),
    (
        "task={kind='custom', factory='a:b', reward_in_process=true, reward_time_limit=9.0}",
        "task.reward_time_limit = 9.0: must be left out: with reward_in_process there is none",
    ),
    (
        "task={kind='dataset', path='x', reward='a:b', time_limit=9.0}",
        "task.time_limit = 9.0: must be left out: task.reward gives the rewards",
    ),
    (
        "run={sinks=['tensorboard'], wandb_project='x'}",
        'run.wandb_project = "x": is for a logger that is not used; set run.sinks = ["wandb"] too',
    ),
    (
        "run.mlflow_uri=x",
        'run.mlflow_uri = "x": is for a logger that is not used; set run.sinks = ["mlflow"] too',
    ),
    # rules between keys
    (
        "sampling.samples=1",
        "sampling.samples = 1: must be 2 or more for the estimator 'grpo', which compares the"
        " responses to a prompt with one another; 'reinforce' needs one alone",
    ),
    (
        "learner.micro_batch=7",
        "learner.micro_batch = 7: must divide the 64 sequences of a mini-batch"
        " (8 prompts x 8 samples, mini_batches = 1)",
    ),
    ("sampler.slots=0", "sampler.slots = 0: must be 1 or more"),
    ("sampler.halvings=-1", "sampler.halvings = -1: must be 0 or more"),
    ("sampler.pages=0", "sampler.pages = 0: must be 1 or more"),
    (
        "learner.mini_batches=5",
        "learner.mini_batches = 5: must divide the 64 sequences of a step (8 prompts x 8 samples)",
    ),
    (
        "sampling.max_tokens=1000",
        "sampling.max_tokens = 1000: with max_prompt_length = 32 is 1032, more than the"
        " model's 256 positions",
    ),
    (
        "sampling={max_turns=2, max_tokens=8, max_episode_tokens=1000}",
        "sampling.max_episode_tokens = 1000: with max_prompt_length = 32 is 1032, more than the"
        " model's 256 positions",
    ),
    (
        "model.architecture={num_heads=3}",
        "model.architecture.num_kv_heads = 2: must divide num_heads = 3",
    ),
    ("eval.k=[1, 2]", "eval.k = [1, 2]: must not exceed samples = 1"),
    (
        "eval={samples=2, temperature=0.0}",
        "eval.samples = 2: must be 1 at temperature 0: all are the same",
    ),
    (
        "warmup={worked=0.7, partial=0.5}",
        "warmup: worked + partial must be at most 1, got 0.7 + 0.5",
    ),
    (
        "learner.corrections=[{name='token_ti'}]",
        "learner.corrections[0]: correction 'token_ti' is unknown; did you mean 'token_tis'?",
    ),
    (
        "learner.corrections=[{name='token_tis'}, {name='token_tis', cup=1}]",
        "learner.corrections[1]: correction 'token_tis' has no argument 'cup'; did you mean 'cap'?",
    ),
    ("learner.objective.dual_clip=1.0", "learner.objective.dual_clip = 1.0: must lie above 1"),
    ("optimizer.ess_reference=1.5", "optimizer.ess_reference = 1.5: must be in (0, 1]"),
    ("optimizer.ess_reference=0.0", "optimizer.ess_reference = 0.0: must be in (0, 1]"),
    (
        "optimizer.length_decay={kind='reactive', max_length=0}",
        "optimizer.length_decay.max_length = 0: must be at least 1",
    ),
    (
        "optimizer={schedule='cosine', warmup_steps=100}",
        "optimizer.warmup_steps = 100: must be less than the schedule's 100 updates",
    ),
]


@pytest.mark.parametrize(("override", "line"), REFUSED, ids=[row[0][:40] for row in REFUSED])
def test_every_mistake_is_one_line(override, line):
    assert refused(override) == f"command line: {line}"
    path, value = parse_override(override)
    data = value
    for part in reversed(path):
        data = {part: data}
    data.setdefault("model", {"preset": "tiny"})
    assert refused(data=data) == f"f.toml: {line}"


def test_rules_that_need_two_sections():
    line = 'exact = "required": native numerics are not exact; set "report", or family tiles'
    assert refused(data={"numerics": {"family": "native"}}) == f"f.toml: {line}"
    build({"numerics": {"family": "native"}, "exact": "report"})
    gym = {"kind": "gym", "name": "chain_sum"}
    line = refused(data={"warmup": {"steps": 1}, "task": gym})
    assert line == "f.toml: warmup.steps = 1: only built-in tasks have solutions to learn from"
    line = refused(data={"model": {"path": "a", "preset": "tiny"}})
    assert (
        line
        == "f.toml: model: needs exactly one of path, preset, architecture; has path and preset"
    )
    assert refused(data={"model": {}}).endswith("has none")
    build({"sampling": {"samples": 1}, "learner": {"objective": {"preset": "reinforce"}}})
    # The length of a checkpoint's positions is not known here.
    build({"model": {"path": "a"}, "sampling": {"max_tokens": 10**6}})


OLD = """
[sampling]
samples_per_prompt = 4
max_response_length = 9
[model]
preset = "tiny"
"""


def test_keys_of_older_versions_are_read_and_their_new_names_said(tmp_path, caplog):
    path = tmp_path / "old.toml"
    path.write_text(OLD)
    sampling = load(path).sampling
    assert (sampling.samples, sampling.max_tokens) == (4, 9)
    assert sorted(caplog.messages) == [
        f"{path}: sampling.max_response_length is called sampling.max_tokens now",
        f"{path}: sampling.samples_per_prompt is called sampling.samples now",
    ]
    caplog.clear()
    changes = "sampling.samples_per_prompt=6", "sampling={max_response_length = 7}"
    assert load(None, changes[:1]).sampling.samples == 6
    assert load(None, changes[1:]).sampling.max_tokens == 7
    assert caplog.messages == [
        "command line: sampling.samples_per_prompt is called sampling.samples now",
        "command line: sampling.max_response_length is called sampling.max_tokens now",
    ]
    path.write_text(OLD.replace("[model]", "samples = 4\n[model]"))
    with pytest.raises(InputError, match=r"samples_per_prompt is the older name of .*give one"):
        load(path)


def test_a_run_folder_of_an_older_version_is_the_same_run(tmp_path, caplog):
    new = OLD.replace("samples_per_prompt", "samples").replace("max_response_length", "max_tokens")
    now = dump(build(tomllib.loads(new)))
    before = now.replace("\nsamples = 4", "\nsamples_per_prompt = 4")
    before = before.replace("\nmax_tokens", "\nmax_response_length")
    assert before.count("samples_per_prompt") == before.count("max_response_length") == 1
    (tmp_path / "config.toml").write_text(before)
    assert folders.config_differences(folders.read_config(tmp_path), now) == []
    assert not caplog.messages
    assert folders.config_differences(folders.read_config(tmp_path, say=True), now) == []
    assert len(caplog.messages) == 2


def test_the_first_of_several_is_reported_with_their_number():
    line = refused("learner.mode=x", "sampling.top_q=1")
    assert line.startswith("command line: sampling.top_q = 1: unknown key")
    assert line.endswith("(and 1 more)")


def test_the_blame_goes_where_it_was_said(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[sampling]\ntop_p = 2.0\n")
    with pytest.raises(InputError, match=rf"^{path}: sampling.top_p = 2.0"):
        load(path, ["seed=1"])
    with pytest.raises(InputError, match=r"^command line: sampling.top_p = 3.0"):
        load(path, ["sampling.top_p=3.0"])


def test_files_that_say_nothing_or_nonsense(tmp_path):
    def line(path):
        with pytest.raises(InputError) as caught:
            load(path)
        return str(caught.value)

    good = tmp_path / "quickstart.toml"
    good.write_text("seed = 1\n")
    assert "no such file; did you mean" in line(tmp_path / "quikstart.toml")
    assert line(tmp_path / "absent" / "a.toml").endswith("no such file")
    assert line(tmp_path).endswith("Is a directory")
    (tmp_path / "config.json").write_text("{}")
    assert "is the folder of a model" in line(tmp_path)
    (tmp_path / "empty.toml").write_text("# nothing\n")
    assert line(tmp_path / "empty.toml").endswith("is empty; it must set at least one key")
    (tmp_path / "bad.toml").write_text("seed = 1\nseed = 2\n")
    assert "not TOML: Cannot overwrite a value (at line 2" in line(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe4'\n")
    assert "not UTF-8 text (byte 5)" in line(tmp_path / "latin.toml")


def test_sections_are_frozen_and_documented():
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().seed = 1  # pyright: ignore[reportAttributeAccessIssue]
    modules = (sections, run)
    for name, section in (pair for module in modules for pair in vars(module).items()):
        if (
            isinstance(section, type)
            and issubclass(section, BaseModel)
            and section is not BaseModel
        ):
            assert section.__doc__, name


def test_what_a_resumed_run_may_change():
    assert "steps" in RunConfig().may_change()
    assert {"learner.remat", "learner.offload", "sampler.slots"} <= {*RunConfig().may_change()}
    assert not {"learner", "learner.micro_batch", "sampling"} & {*RunConfig().may_change()}
    calls = {"task.reward_time_limit", "task.environment_workers"}
    calls |= {"task.eval_subset", "task.path", "task.eval_path"}
    assert "model.path" not in RunConfig().may_change()
    assert "model.path" in build({"lora": {}, "warmup": {"steps": 0}}).may_change()
    assert calls == {key for key in RunConfig().may_change() if key.startswith("task")}
    cosine = build({"optimizer": {"schedule": "cosine"}})
    assert "steps" not in cosine.may_change()
    fixed = build({"optimizer": {"schedule": "cosine", "total_steps": 50}})
    assert "steps" in fixed.may_change()


OBJECTIVE_REFUSED = [
    # Options that the loss does not have.
    (
        {"loss": "dppo_tv", "loss_options": {"ratio_cup": 5.0}},
        ": the loss 'dppo_tv': option 'ratio_cup' is unknown; did you mean 'ratio_cap'?",
    ),
    ({"clip_low": 1.5}, ".clip_low = 1.5: must lie in [0, 1]"),
    ({"clip_high": -0.1}, ".clip_high = -0.1: must be 0 or more"),
    ({"loss": "gspo", "dual_clip": 1.0}, ".dual_clip = 1.0: must lie above 1"),
    (
        {"loss": "dppo_tv", "loss_options": {"ratio_cap": 0.5}},
        ": ratio_cap is 0.5; it must be 1 or more",
    ),
    ({"loss": "kl_cov", "loss_options": {"share": 0}}, ": share is 0.0; it must lie in (0, 1]"),
    ({"loss_options": {"clip_low": "x"}}, '.loss_options.clip_low = "x": must be a number'),
    ({"loss_options": {"clip_low": float("nan")}}, ".loss_options.clip_low = nan: must be finite"),
    (
        {"loss_options": {"clip_high": float("inf")}},
        ".loss_options.clip_high = inf: must be finite",
    ),
    (
        {"clip_low": 0.1, "loss_options": {"clip_low": 0.3}},
        ": clip_low is given twice, as 0.1 and in loss_options as 0.3",
    ),
    # KL and entropy.
    ({"kl_estimator": "k4"}, '.kl_estimator = "k4": unknown value; known: abs, k1, k1+, k2, k3'),
    ({"kl_cap": 0.0}, ".kl_cap = 0.0: must be above 0"),
    ({"kl_coefficient": -1.0}, ".kl_coefficient = -1.0: must be 0 or more"),
    ({"entropy_coefficient": float("inf")}, ".entropy_coefficient = inf: must be finite"),
    ({"denominator": "survivor"}, '.denominator = "survivor": unknown value; did you mean'),
    # What changes rewards and masks.
    ({"drop_cut": 1}, ".drop_cut = 1: must be true or false"),
    ({"overlong_cache": 65}, ".overlong_cache = 65: must lie in [1, max_length], which is 64"),
    ({"overlong_cache": 0}, ".overlong_cache = 0: must lie in [1, max_length], which is 64"),
    (
        {"reward_kl_target": 6.0},
        ": reward_kl_target is 6.0, but reward_kl_coefficient, which it would steer, is 0",
    ),
    (
        {"reward_kl_coefficient": 0.1, "reward_kl_target": 0.0},
        ".reward_kl_target = 0.0: must be greater than 0.0",
    ),
    (
        {"reward_kl_coefficient": 0.1, "reward_kl_target": 6.0, "reward_kl_horizon": 12},
        ".reward_kl_horizon = 12: must be more than 12, a fifth of the 64 sequences of a step:"
        " one step could end the penalty",
    ),
    ({"estimator": "remacs"}, ".estimator = \"remacs\": unknown value; did you mean 'remax'?"),
    ({"preset": "dpo"}, '.preset = "dpo": unknown value; did you mean'),
]


@pytest.mark.parametrize(
    ("changes", "line"), OBJECTIVE_REFUSED, ids=[r[1][:44] for r in OBJECTIVE_REFUSED]
)
def test_an_objective_that_makes_no_sense_is_one_line(changes, line):
    found = refused(data={"learner": {"objective": changes}})
    assert found.startswith(f"f.toml: learner.objective{line}")


NOISE = (
    "learner.noise_scale = true: needs a micro_batch below the {} sequences of a mini-batch, and a"
    " multiple of the 8 samples of a prompt: groups stay together"
)
REMAX = {"prompts_per_step": 2, "objective": {"estimator": "remax"}}
GREEDY = (
    "learner.prompts_per_step = 2: must be a multiple of the sampler's data x fsdp = 4: the"
    " estimator draws one greedy response a prompt"
)
LEARNER_REFUSED = [
    (
        {"credit": "turn", "objective": {"preset": "reinforce"}},
        {},
        'learner.credit = "turn": needs episodes of several turns',
    ),
    ({"refills": -1}, {}, "learner.refills = -1: must be 0 or more"),
    (
        {"refills": 2, "objective": {"preset": "reinforce"}},
        {},
        "learner.refills = 2: must be 0: the estimator 'reinforce' learns from groups of equal"
        " rewards too",
    ),
    ({"noise_scale": True}, {}, NOISE.format(64)),
    ({"noise_scale": True, "micro_batch": 4}, {}, NOISE.format(64)),
    ({"noise_scale": True, "mini_batches": 4, "micro_batch": 16}, {}, NOISE.format(16)),
    (
        {"objective": {"preset": "rloo", "entropy_coefficient": 0.1}},
        {"sampling": {"top_k": 5}},
        "learner.objective: entropy_coefficient = 0.1 is about the whole distribution, which top_k"
        " or top_p cut off; set top_k = 0 and top_p = 1",
    ),
    (
        {"objective": {"estimator": "optimal_token_baseline"}},
        {"sampling": {"top_p": 0.9}},
        "learner.objective: the estimator 'optimal_token_baseline' is about the whole distribution,"
        " which top_k or top_p cut off; set top_k = 0 and top_p = 1",
    ),
    (
        {"objective": {"estimator": "remax", "drop_uninformative": True}},
        {},
        "learner.objective: drop_uninformative leaves out groups of equal rewards, but the"
        " estimator 'remax' learns from them; use one with a baseline of the group",
    ),
    (
        {
            "mode": "recompute",
            "mini_batches": 2,
            "objective": {"preset": "rloo"},
            "corrections": [{"name": "token_tis"}],
        },
        {},
        'learner.corrections = [{name = "token_tis"}]: scale_by_truncated_ratio weights by pi_old /'
        " pi_rollout, and the loss 'reinforce' has no ratio that would bring the 2 updates of a"
        ' step from pi_old to pi; set mode = "bypass", which weights by pi / pi_rollout in every'
        " update, let it read the current policy, or make one update a step",
    ),
    (REMAX, {"placement": {"fsdp": 4}}, GREEDY),
    (REMAX, {"placement": {"sampler": {"data": 4}}}, GREEDY),
]


@pytest.mark.parametrize(
    ("learner", "more", "line"), LEARNER_REFUSED, ids=[r[2][:44] for r in LEARNER_REFUSED]
)
def test_a_learner_that_makes_no_sense_is_one_line(learner, more, line):
    assert refused(data={"learner": learner, **more}) == f"f.toml: {line}"


def made(*, mode="bypass", fixes=(), more=None, **objective):
    """A config's objective, or with `more` its whole learner section and others."""
    learner = {"mode": mode, "corrections": list(fixes), "objective": objective}
    return build({"learner": learner, **(more or {})})


def test_objective_follows_preset_and_changes():
    found = made(preset="dr_grpo", clip_high=0.3).objective
    assert (found.estimator, found.aggregation, found.max_length) == (
        "dr_grpo",
        "constant_length",
        64,
    )
    assert (found.clip_low, found.options) == (None, {"clip_high": 0.3})


@pytest.mark.parametrize("preset", ["grpo", "dapo"])
def test_a_loss_clips_where_its_own_paper_does(preset):
    """A preset's bounds are those of its own loss: with another they are that one's."""
    assert losses.options("gspo")["clip_low"] == 3e-4
    assert made(preset=preset, loss="gspo").objective.options == {}
    assert made(preset=preset, loss="reinforce").objective.options == {}
    given = made(preset=preset, loss="gspo", clip_high=0.1).objective
    assert {**losses.options("gspo"), **given.options}["clip_low"] == 3e-4
    assert given.options == {"clip_high": 0.1}
    assert made(preset="dapo").objective.options == {"clip_high": 0.28}
    assert made(preset="dapo", loss="clip").objective.options == {"clip_high": 0.28}


def test_every_key_of_an_objective_reaches_it():
    keys = {
        "loss": "dppo_tv",
        "loss_options": {"ratio_cap": 5},
        "denominator": "survivors",
        "kl_coefficient": 0.1,
        "kl_estimator": "k3+",
        "kl_cap": 10.0,
        "entropy_coefficient": -0.01,
        "drop_cut": True,
        "overlong_cache": 16,
        "reward_kl_coefficient": 0.2,
        "reward_kl_target": 6.0,
        "reward_kl_horizon": 13,
    }
    found = made(more={"sampling": {"max_tokens": 16}}, **keys).objective
    options = found.loss_options
    assert options == (("ratio_cap", 5.0),)
    plain = {name: value for name, value in keys.items() if name != "loss_options"}
    assert {name: getattr(found, name) for name in plain} == plain
    assert found.max_length == 16
    assert found.has_reference
    assert found.controller is not None
    assert (found.controller.target, found.controller.horizon) == (6.0, 13)
    assert made(reward_kl_coefficient=0.2, kl_coefficient=0.0).objective.has_reference


def test_a_config_with_tables_in_its_objective_survives_the_round_trip():
    config = made(loss="dppo_tv", loss_options={"ratio_cap": 5})
    assert build(tomllib.loads(dump(config))) == config
    assert "[learner.objective.loss_options]\nratio_cap = 5.0\n" in dump(config)


def test_what_the_learner_is_told():
    data = {
        "learner": {"noise_scale": True, "micro_batch": 8, "refills": 3, "mode": "recompute"},
        "placement": {"sampler": {"data": 4}},
    }
    config = build(data)
    learning = assembly.make_learning(config)
    assert (learning.noise_scale, learning.mode, learning.micro_batch) == (True, "recompute", 8)
    assert config.learner.refills == 3
    remax = build({"learner": {"objective": {"estimator": "remax"}}, **{"placement": {"data": 8}}})
    assert assembly.make_learning(remax).objective.needs_greedy
    assert not learning.objective.needs_greedy


# What may be combined

WEIGHT = [{"name": "token_tis", "cap": 2.0}]


@pytest.mark.parametrize("loss", [name for name in losses.LOSSES if name != "reinforce"])
def test_a_weight_beside_a_ratio_of_bypass_mode_is_refused_with_the_ways_out(loss):
    given = {"loss": loss}
    data = {"learner": {"corrections": WEIGHT, "objective": given}}
    line = (
        'f.toml: learner.corrections = [{name = "token_tis", cap = 2.0}]: scale_by_truncated_ratio'
        f" weights by pi / pi_rollout, and so does the loss {loss!r} in bypass mode: the ratio"
        ' would count twice; set mode = "recompute", or a loss without ratio ("reinforce")'
    )
    assert refused(data=data) == line
    made(mode="recompute", fixes=WEIGHT, loss=loss)
    made(fixes=WEIGHT, loss="reinforce")


WEIGHTS = [
    "token_tis",
    "sequence_tis",
    "icepop",
    "kpop",
    "scale_by_ratio",
    "k3_rejection_token_tis",
]
ANYWHERE = [
    "dppo",
    "off_policy_sequence_mask",
    "geometric_rejection",
    "k3_rejection",
    "error_rejection",
]


@pytest.mark.parametrize("name", [*WEIGHTS, *ANYWHERE])
@pytest.mark.parametrize("mode", ["bypass", "recompute"])
def test_masks_and_rejections_go_with_every_mode_and_loss(name, mode):
    effects = corrections.build([{"name": name}]).effects
    assert ("weight" in effects) == (name in WEIGHTS)
    for loss in ("clip", "gspo", "cispo", "reinforce"):
        if name in WEIGHTS and mode == "bypass" and loss != "reinforce":
            assert "twice" in refused(
                data={
                    "learner": {
                        "mode": mode,
                        "corrections": [{"name": name}],
                        "objective": {"loss": loss},
                    }
                }
            )
        else:
            made(mode=mode, fixes=[{"name": name}], loss=loss)


@pytest.mark.parametrize("arm", ["token_tis", "token_mis"])
def test_the_arms_of_the_paper_are_one_line_away(arm):
    path = Path(__file__).parents[3] / "configs" / "beyond_precision.toml"
    config = load(path, [f'learner.corrections=[{{name="{arm}", cap=2.0}}]'])
    assert assembly.make_learning(config).correction.blocks


def test_a_run_of_an_older_version_goes_on_where_new_keys_have_their_defaults():
    config = build({})
    older = "\n".join(line for line in dump(config).splitlines() if "refills" not in line)
    assert folders.config_differences(older, dump(config)) == []
    learner = config.learner.model_copy(update={"refills": 2})
    now = dump(config.model_copy(update={"learner": learner}))
    (found,) = folders.config_differences(older, now)
    assert str(found) == "learner.refills was 0, now 2"
