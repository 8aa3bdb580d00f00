"""What `import tim_jax` offers, used as its users use it: a folder in, plain Python around it."""

import inspect
import json
import logging
import re
import shutil
import string
import subprocess
import sys
import threading
import types
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
import pytest
import quick
import tiny
from several import finished, started

import tim_jax as tim
from tim_jax.api import diagnosing, rollouts, training
from tim_jax.api import model as opening
from tim_jax.api.training import settle
from tim_jax.app.run import sources
from tim_jax.common import waiting
from tim_jax.common.errors import InputError, MismatchError
from tim_jax.instruments import auditing
from tim_jax.instruments.auditing import compiler, random_params
from tim_jax.instruments.diagnosis import verdict
from tim_jax.kernels import pallas
from tim_jax.mismatch import ENTRIES
from tim_jax.model import fitting, hf
from tim_jax.model.execution import Sampling
from tim_jax.numerics import Numerics, Rows
from tim_jax.placement import Placement
from tim_jax.rl import loop, programs
from tim_jax.tasks.base import Completion, Turn
from tim_jax.tasks.text import character_tokenizer

pytestmark = pytest.mark.usefixtures("traced_once")

ROOT = Path(__file__).parents[2]
ALPHABET = string.ascii_letters + string.digits + " *+?.:=\n"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
PAIRS = [("2 + 2", 4), ("3 + 1", 4), ("9 + 9", 18)]
TRAINED: dict[str, Any] = {
    "steps": 2,
    "samples": 4,
    "prompts_per_step": 2,
    "max_tokens": 6,
    "seed": 3,
}


@tim.per_item
def by_length(prompt, completion, answer):
    return len(completion) / (6 + answer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of 3,000 parameters that can read, made without torch."""
    return make_folder(tmp_path_factory.mktemp("models") / "plain")


def make_folder(folder, template=None):
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = template
    # One layer, and few positions: what is compiled here is small. Many stop tokens: responses are
    # of any length.
    config = replace(
        tiny.CONFIG,
        vocab_size=len(tokenizer),
        num_layers=1,
        max_positions=32,
        eos_token_ids=(tokenizer.eos_token_id, *range(5, len(tokenizer), 8)),
    )
    return hf.save(folder, random_params(config, 0), config, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def model(folder):
    return tim.load(folder)


def bits(x):
    return np.asarray(x).tobytes()


def test_a_saved_model_keeps_what_engines_sample_with_by_default(folder, tmp_path):
    before = shutil.copytree(folder, tmp_path / "before")
    path = before / "generation_config.json"
    defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
    of_the_file = {"transformers_version": "4.51.0", "_from_model_config": True}
    ids = json.loads(path.read_text())
    path.write_text(json.dumps({**ids, **defaults, **of_the_file}))
    loaded = tim.load(before)
    stops = (*loaded.stop_tokens, 6)
    written = tim.save(replace(loaded, stop_tokens=stops), tmp_path / "after")
    found = json.loads((written / "generation_config.json").read_text())
    assert found == {**ids, **defaults, "eos_token_id": sorted(stops), "pad_token_id": 0}
    opened = sources.open_model(str(before))
    sources.write(tmp_path / "of_run", replace(opened, params=loaded.params), stops)
    assert json.loads((tmp_path / "of_run" / "generation_config.json").read_text()) == found


def test_an_objective_that_counts_from_a_length_takes_that_of_the_run(model):
    """As a configuration has it. One that is given stays."""
    for given, longest in (({}, 12), ({"max_length": 7}, 7)):
        asked = {"objective": tim.objectives.dr_grpo(**given), "max_tokens": 12}
        _, run = settle("grpo", model, None, asked)
        assert run.learning.objective == tim.objectives.dr_grpo(max_length=longest)


def test_arguments_are_checked_as_they_are_together(model):
    """Not one after the other, beside settings that they replace."""
    objective = tim.objectives.grpo(kl_coefficient=0.0, reject_before_advantages=True)
    asked = {"objective": objective, "correction": tim.corrections.geometric_rejection()}
    _, run = settle("grpo", model, model.training(mode="recompute"), asked)
    assert run.learning.objective == objective
    base = model.training(objective=tim.objectives.rloo(), correction=tim.corrections.token_tis())
    plain = tim.objectives.grpo(kl_coefficient=0.0)
    without = {"objective": plain, "correction": tim.corrections.none()}
    assert settle("grpo", model, base, without)[1].learning.mode == "bypass"
    weighed = {"objective": plain, "correction": tim.corrections.token_tis()}
    assert settle("grpo", model, base, weighed)[1].learning.mode == "recompute"


def test_the_model_of_a_step_has_the_stop_tokens_of_the_training(model):
    """With which it is drawn from, saved and served."""
    made, _ = settle("grpo", model, model.training(stop_tokens=(7,)), {})
    assert made.stop_tokens == (*model.stop_tokens, 7)


def test_a_training_keeps_the_end_token_of_its_model(model):
    own = model.training().execution.sampling.stop_tokens
    assert own
    more = model.training(stop_tokens=(7,)).execution.sampling.stop_tokens
    assert set(more) == {*own, 7}
    assert model.training(sampling=Sampling(4)).execution.sampling.stop_tokens == own
    with pytest.raises(InputError, match="stop_tokens must be a tuple of token ids"):
        model.training(stop_tokens=7)
    for never in (model.config.vocab_size, -1):
        with pytest.raises(InputError, match=f"stop token {never} is outside the vocabulary"):
            model.training(stop_tokens=(7, never))


# The names.


def test_a_dozen_documented_names_and_none_of_them_is_shadowed_by_a_room():
    import tim_jax.app.jobs.audit
    import tim_jax.instruments.auditing  # noqa: F401 (these import every room)

    assert dir(tim) == sorted(tim.__all__)
    rooms = {path.stem for path in Path(tim.__file__).parent.iterdir()}
    for name in tim.__all__:
        value = getattr(tim, name)
        assert value.__doc__, name
        assert isinstance(value, types.ModuleType) == (name in rooms), name
    with pytest.raises(AttributeError, match="no attribute 'sampel'"):
        tim.sampel  # noqa: B018
    assert tim.numerics.EXACT_F32.family == "tiles"  # rooms are reachable too


def test_import_is_cheap():
    program = (
        "import sys, tim_jax; dir(tim_jax); print([m for m in sys.modules if m in heavy])\n"
        "from tim_jax import corrections, schedules\n"
        "print([m for m in sys.modules if m.startswith(rooms)])\n"
    )
    given = "heavy = {'jax', 'numpy', 'optax', 'transformers'}\n"
    given += "rooms = ('tim_jax.api', 'tim_jax.model', 'tim_jax.rl', 'flax', 'transformers')\n"
    done = subprocess.run(
        [sys.executable, "-c", given + program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "[]"], done.stdout


def test_types_are_for_others_too():
    assert (Path(tim.__file__).parent / "py.typed").is_file()


def test_every_mismatch_has_a_constructor_by_its_name():
    for name, kind in ENTRIES.items():
        assert getattr(tim.mismatch, name) is kind
    entry = tim.mismatch.kv_cache(dtype="float8_e4m3fn")
    assert tim.mismatch.build([{"name": "kv_cache", "dtype": "float8_e4m3fn"}]).entries == (entry,)


# Loading and saving.


def test_a_model_says_what_it_is(model):
    assert repr(model) == f"Model(qwen3, {size(model):,} parameters, tiles float32, one device)"
    assert (model.dtype, model.config.model_type) == ("float32", "qwen3")


def size(model):
    return sum(leaf.size for leaf in jax.tree.leaves(model.params))


def test_a_run_folder_is_its_final_model(folder, model, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(folder)
    assert tiny.bits(tim.load(tmp_path / "run").params) == tiny.bits(model.params)


def test_the_model_of_the_package_is_loaded_on_a_gpu_too(monkeypatch):
    """Whose kernels its vocabulary does not fit."""
    monkeypatch.setattr(pallas, "platform", lambda: "gpu")
    begun = partial(opening.begin, "tiny", dtype="float32", placement=None)
    assert begun(family="auto").numerics.family == "tiles"
    with pytest.raises(InputError, match="multiple of 16, got 22"):
        begun(family="pallas_gpu")


def test_a_run_without_a_final_model_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.toml").touch()
    with pytest.raises(InputError, match="no final model yet; `tim-jax export`"):
        tim.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "/no/such/folder"}, "does not exist"),
        ({"dtype": "bfloat61"}, "dtype 'bfloat61' is unknown; did you mean 'bfloat16'"),
        ({"family": "tile"}, "family 'tile' is unknown; did you mean 'tiles'"),
        ({"decode_batch": 0}, "decode_batch must be at least 1, got 0"),
        ({"placement": tim.Placement(data=64)}, "needs 64 devices"),
    ],
)
def test_what_cannot_be_loaded(folder, changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        tim.load(**{"source": folder, **changes})


def test_measured_tiles_belong_to_the_model(folder, monkeypatch):
    def measured(config, numerics, *, batch, longest):
        assert longest == config.max_positions
        return replace(numerics, attention_rows=Rows(batch, 2 * batch))

    monkeypatch.setattr(fitting, "calibrate", measured)
    model = tim.load(folder, decode_batch=4)
    assert model.numerics.attention_rows == Rows(4, 8)
    assert model.execution(Sampling(1)).numerics is model.numerics
    assert tim.load(folder).numerics.attention_rows == Numerics().attention_rows


def test_saved_loaded_and_read_by_transformers(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    written = tim.save(model, tmp_path / "out")
    assert written == tmp_path / "out"
    again = tim.load(written)
    assert tiny.bits(again.params) == tiny.bits(model.params)
    assert again.stop_tokens == model.stop_tokens
    theirs = transformers.AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    embedding = theirs.get_input_embeddings().weight.detach().numpy()
    assert bits(embedding) == bits(model.params["embed"])
    assert transformers.AutoTokenizer.from_pretrained(written).decode([2, 3]) == ALPHABET[:2]
    with pytest.raises(InputError, match="exists already and is not overwritten"):
        tim.save(model, written)


def test_every_stop_token_is_saved(model, tmp_path):
    more = (*model.stop_tokens, 70)  # not in config.json
    folder = tim.save(replace(model, stop_tokens=more), tmp_path / "several")
    written = json.loads((folder / "generation_config.json").read_text())
    assert written["eos_token_id"] == list(more)
    assert tim.load(folder).stop_tokens == more


# Sampling and scoring.

DRAWN: dict[str, Any] = {"samples": 4, "max_tokens": 10, "seed": 0}
TRUNCATED = {"temperature": 0.7, "top_k": 9, "top_p": 0.9}


def test_a_rollout_is_plain_arrays_and_text(model):
    rollout = tim.sample(model, ["What is 7 * 8?", "b"], **DRAWN)
    rows, length = rollout.tokens.shape
    assert (rows, len(rollout), len(rollout.text)) == (8, 8, 8)
    assert length == 10
    assert rollout.lengths.shape == rollout.finished.shape == (rows,)
    assert rollout.mask.shape == rollout.log_probs.shape == (rows, length)
    assert (rollout.tokens.dtype, rollout.log_probs.dtype) == (np.int32, np.float32)
    assert rollout.mask.sum(axis=1).tolist() == rollout.lengths.tolist()
    assert len(set(rollout.lengths.tolist())) > 1  # or the mask would hide nothing
    assert (rollout.log_probs[~rollout.mask] == 0).all()
    assert (rollout.log_probs[rollout.mask] < 0).all()
    for row, text in enumerate(rollout.text):
        tokens = rollout.tokens[row, : rollout.lengths[row]]
        assert text == model.tokenizer.decode(tokens, skip_special_tokens=True)
        assert rollout.finished[row] == (tokens[-1] in model.stop_tokens)


@pytest.mark.parametrize(
    ("dtype", "sampling"),
    quick.some([("float32", {}), ("float32", TRUNCATED), ("bfloat16", {})], 0),
)
def test_the_learner_scores_the_same_bits(folder, dtype, sampling):
    model = tim.load(folder, dtype=dtype)
    rollout = tim.sample(model, ["What is 7 * 8?", "b"], **DRAWN, **sampling)
    assert rollout.mask.sum() > 20
    assert bits(tim.score(model, rollout)) == bits(rollout.log_probs)


def test_another_model_scores_other_values(model):
    rollout = tim.sample(model, ["What is 7 * 8?", "b"], **DRAWN)
    params = jax.tree.map(lambda x: np.asarray(x) * np.float32(1.1), model.params)
    other = replace(model, params=params)
    log_probs = tim.score(other, rollout)
    assert log_probs.shape == rollout.log_probs.shape
    assert (log_probs[rollout.mask] != rollout.log_probs[rollout.mask]).mean() > 0.9
    assert (log_probs[~rollout.mask] == 0).all()


def test_a_response_does_not_depend_on_the_other_prompts(model):
    both = tim.sample(model, ["What is 7 * 8?", "b"], **DRAWN)
    alone = tim.sample(model, ["What is 7 * 8?"], **DRAWN)
    assert bits(both.tokens[:4]) == bits(alone.tokens)
    assert bits(both.log_probs[:4]) == bits(alone.log_probs)
    assert both.text[:4] != both.text[4:]
    other = tim.sample(model, ["What is 7 * 8?"], **{**DRAWN, "seed": 1})
    assert other.text != alone.text


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_draws_are_the_same_whatever_jax_s_default_generator_is(model, generator):
    expected = tim.sample(model, ["What is 7 * 8?", "b"], **DRAWN)
    with jax.default_prng_impl(generator):
        found = tim.sample(model, ["What is 7 * 8?", "b"], **DRAWN)
    assert bits(found.tokens) == bits(expected.tokens)
    assert bits(found.log_probs) == bits(expected.log_probs)


def test_a_second_call_compiles_nothing(model):
    first = tim.sample(model, ["What is 7 * 8?", "b"], **DRAWN)
    tim.score(model, first)
    with tiny.compilations() as counted:
        second = tim.sample(model, ["longer", "2 + 2"], **{**DRAWN, "seed": 5})
        tim.score(model, second)
    assert not counted
    assert second.text != first.text


@pytest.mark.slow
def test_neither_devices_nor_slots_nor_micro_batches_change_a_bit(folder, model):
    spread = tim.load(folder, placement=tim.Placement(fsdp=2))
    prompts = ["What is 7 * 8?", "b", "c"]  # three rows, on two devices; a slot on each
    one = tim.sample(model, prompts, max_tokens=10)
    two = tim.sample(spread, prompts, max_tokens=10, slots=1)
    assert one.tokens.shape == two.tokens.shape == (3, 10)
    assert one.mask.sum() > 3
    assert bits(one.tokens) == bits(two.tokens)
    assert bits(one.log_probs) == bits(two.log_probs)
    assert bits(tim.score(spread, one, micro_batch=1)) == bits(one.log_probs)


def test_chat_messages_go_through_the_template(tmp_path):
    chatty = tim.load(make_folder(tmp_path / "chatty", TEMPLATE))
    messages = [{"role": "user", "content": "2 + 2"}]
    asked: dict[str, tuple[Any, bool | Literal["auto"]]] = {
        "text": ("2 + 2", "auto"),
        "messages": (messages, "auto"),
        "written out": ("user:2 + 2\na:", False),
        "plain": ("2 + 2", False),
    }
    found = {
        name: tim.sample(chatty, [prompt], chat_template=how, **DRAWN)
        for name, (prompt, how) in asked.items()
    }
    lengths = {name: int(rollout.arrays.prompt_lengths[0]) for name, rollout in found.items()}
    assert lengths == {"text": 13, "messages": 13, "written out": 13, "plain": 5}
    assert found["text"].text == found["messages"].text == found["written out"].text
    assert bits(found["text"].log_probs) == bits(found["written out"].log_probs)


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ("What?", {}, "must be a list of prompts, got 'What?'; one prompt is [prompt]"),
        ({"prompt": ["a"]}, {}, "a column of a table is [*table[name]]"),
        ([], {}, "prompts is empty"),
        ([7], {}, "prompt 0 must be text or a list of chat messages, not token ids, got 7"),
        (
            [[3, 4]],
            {},
            "prompt 0 must be text or a list of chat messages, not token ids, got [3, 4]",
        ),
        (["a", {"role": "user", "content": "b"}], {}, "prompt 1 must be text or a list"),
        ([[{"role": "user"}]], {}, "a message needs a role and a content of text, got"),
        (["a", ""], {}, "prompt 1 is empty"),
        (["ä"], {}, "characters without a token"),
        (["a" * 30], {}, "prompt 0 has 30 tokens, at most 22 are allowed"),
        (["a"], {"max_tokens": 32}, "max_tokens = 32 leaves no room for a prompt"),
        (["a"], {"samples": 0}, "samples must be at least 1, got 0"),
        (["a"], {"temperature": -1.0}, "temperature must be >= 0"),
        (["a"], {"temperature": 1e-40}, "temperature must be 0, or at least 1e-30, got 1e-40"),
        (["a"], {"chat_template": True}, "no chat template"),
        (["a"], {"chat_template": "no"}, "chat_template must be True, False or \"auto\", got 'no'"),
    ],
)
def test_what_cannot_be_sampled(model, prompts, changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        tim.sample(model, prompts, **{"max_tokens": 10, **changes})


def test_numpys_whole_numbers_are_whole_numbers(model):
    """As those of `for seed in np.arange(3)`. What is computed with them is Python's."""
    one: Any = np.int64(1)
    how: Any = {"sampling": Sampling(4), "template": "auto"}
    asked = rollouts.request(model, ["a"], samples=one, seed=one, slots=one, **how)
    given = {"prompts_per_step": one, "objective": tim.objectives.reinforce()}
    learning = settle("grpo", model, None, {**given, "samples": one})[1].learning
    values = (tim.Placement(data=one).data, tim.Lora(one).rank)
    for number in (asked.samples, asked.seed, asked.slots, learning.samples, *values):
        assert number == 1
        assert type(number) is int
    tim.grpo(model, PAIRS, reward=by_length, steps=one, seed=one)


NO_MODEL: Any = "a/model"


@pytest.mark.parametrize(
    "use",
    [
        lambda: tim.sample(NO_MODEL, ["a"]),
        lambda: tim.score(NO_MODEL, "rollout"),
        lambda: tim.audit(NO_MODEL),
        lambda: tim.save(NO_MODEL, "folder"),
        lambda: tim.diagnose(NO_MODEL, "rollouts.jsonl"),
        lambda: tim.grpo(NO_MODEL, PAIRS, reward=by_length, optimizer=optax.sgd(1e-2), **TRAINED),
    ],
)
def test_a_path_is_no_model(use):
    with pytest.raises(
        InputError, match=r"model must be what tim_jax\.load returns, got 'a/model'"
    ):
        use()


def computing(model):
    """Everything that computes a model, by name."""
    rollout = tim.sample(model, ["What is 7 * 8?", "b"], **DRAWN)
    return {
        "sample": lambda: tim.sample(model, ["What is 7 * 8?", "b"], **DRAWN),
        "score": lambda: tim.score(model, rollout),
        "audit": lambda: tim.audit(model),
        "diagnose": lambda: tim.diagnose(model, rollout),
        "grpo": lambda: trained(model),
        "learn": lambda: tim.learn(model, rollout, [0.0, 1.0] * 4),
    }


def test_64_bits_are_refused_but_for_what_is_computed_in_32(model):
    uses = computing(model)
    with jax.enable_x64(True):
        for name, use in uses.items():
            with pytest.raises(InputError, match=f"^{name}: jax_enable_x64 is True.* in 32 bits"):
                use()
        with jax.enable_x64(False):
            again = uses["sample"]()
    assert bits(again.log_probs) == bits(uses["sample"]().log_probs)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_mesh_of_the_caller_s_is_refused(model, devices):
    uses = computing(model)
    with jax.set_mesh(jax.make_mesh((devices,), ("x",))):
        for name, use in uses.items():
            with pytest.raises(InputError, match=rf"^{name}: .*set_mesh of \{{'x': {devices}\}}"):
                use()


def test_an_audit_needs_a_single_process(model, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="audit: needs a single process, there are 2; audit"):
        tim.audit(model)


@pytest.mark.slow
def test_an_audit_draws_as_many_prompts_as_a_mesh_can_split(folder, monkeypatch):
    """Its sizes by default are 16 sequences, which 3 devices cannot share."""
    monkeypatch.setattr(auditing, "check_gradients", lambda numerics: [])
    report = tim.audit(tim.load(folder, placement=Placement(data=3), decode_batch=None))
    assert [case.name for case in report.cases] == ["learner, data=3", "sampler, data=3"]
    assert report.unequal_tokens == 0 < report.compared_tokens


def test_what_is_no_source_of_a_model():
    with pytest.raises(InputError, match="source must be a folder or a name, got None"):
        tim.load(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="decode_batch must be a whole number, got '8'"):
        tim.load("model", decode_batch="8")  # pyright: ignore[reportArgumentType]


def test_what_is_no_placement_adapter_or_path(model, tmp_path):
    wrong: Any = {"data": 2}
    refused = {
        "load: placement must be a tim_jax.Placement, got {'data': 2}": lambda: tim.load(
            "tiny", placement=wrong
        ),
        "save_adapter: adapter must be that of a step, got None": lambda: tim.save_adapter(
            model.adapter, tmp_path / "new", model
        ),
        "save_adapter: model must be what tim_jax.load returns": lambda: tim.save_adapter(
            wrong, tmp_path / "new", wrong
        ),
        "load_adapter: model must be what tim_jax.load returns": lambda: tim.load_adapter(
            tmp_path, wrong
        ),
        "path must be text or a pathlib.Path, got {'data': 2}": lambda: tim.save(model, wrong),
    }
    for message, use in refused.items():
        with pytest.raises(InputError, match=re.escape(message)):
            use()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("weights", [None, 5])
def test_what_are_no_weights_to_try(model, weights):
    with pytest.raises(InputError, match=f"weights must be a model.*, got {weights}"):
        list(diagnosing._list_candidates(model, weights))


def test_only_a_rollout_can_be_scored(model):
    with pytest.raises(
        InputError,
        match=r"give what tim_jax\.sample returns, a file, or rows of another engine, got int",
    ):
        tim.score(model, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"got Frame; its rows are df\.to_dict"):
        tim.score(model, Frame([]))
    with pytest.raises(InputError, match=r"got dict; give one row as \[row\]"):
        tim.score(model, {"prompt": "1"})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("smaller", "message"),
    [
        (
            {"vocab_size": 8, "eos_token_ids": (5,)},
            r"score: the rollout has token \d+, but .* vocabulary ends at 7; give",
        ),
        ({"max_positions": 10}, r"score: .* response have \d\d tokens, but the model has 10 pos"),
    ],
)
def test_a_model_that_is_too_small_for_a_rollout_does_not_score_it(model, smaller, message):
    rollout = tim.sample(model, ["What is 7 * 8?", "b"], **DRAWN)
    with pytest.raises(InputError, match=message):
        tim.score(replace(model, config=replace(model.config, **smaller)), rollout)


# Training.


BY_NAME = inspect.signature(tim.grpo).parameters


ADAMW = optax.adamw(1e-2)


def trained(model, data=PAIRS, *, reward=by_length, optimizer=ADAMW, **changes):
    """Steps of `grpo`; what is no argument of it goes into its `training`."""
    named = {name: value for name, value in {**TRAINED, **changes}.items() if name in BY_NAME}
    rest = {name: value for name, value in changes.items() if name not in BY_NAME}
    if rest:
        named["training"] = model.training(**rest)
    return tim.grpo(model, data, reward=reward, optimizer=optimizer, **named)


def test_every_step_is_proved_and_the_model_moves(model):
    before = tiny.bits(model.params)
    steps, models = [], []
    for step in trained(model):
        steps.append(step)
        models.append(step.model)
    assert [step.number for step in steps] == [1, 2]
    for step in steps:
        assert step.metrics["exact_share"] == 1.0
        assert step.metrics["compared_tokens"] > 0
        assert step.metrics["reward"] == pytest.approx(np.mean([s.reward for s in step.samples]))
        assert len(step.samples) == 8
        assert step.timing["seconds"] > 0
    assert tiny.bits(model.params) == before
    moved = [tiny.bits(one.params)[0] for one in models]
    assert len({before[0], *moved}) == 3
    # What was taken in time stays, whatever training did to the buffers afterwards.
    for one in models:
        rollout = tim.sample(one, ["2 + 2", "b"], **DRAWN)
        assert bits(tim.score(one, rollout)) == bits(rollout.log_probs)


def test_a_second_training_compiles_nothing_if_its_optimizer_does_the_same(model):
    first = [dict(step.metrics) for step in trained(model, optimizer=optax.adamw(1e-2))]
    with tiny.compilations() as counted:
        again = [dict(step.metrics) for step in trained(model, optimizer=optax.adamw(1e-2))]
        *_, other = trained(model, optimizer=optax.adamw(1e-2), seed=4)
    assert not counted
    assert again == first
    assert other.metrics["reward"] != first[-1]["reward"]


def test_programs_are_kept_for_what_the_optimizer_does(model):
    build, run = programs.build_once, model.training(samples=4)
    kept = build(run.varied(optimizer=optax.adam(1e-3)))
    assert build(run.varied(optimizer=optax.adam(1e-3))) is kept
    for other in (optax.named_chain(("adam", optax.adam(1e-3))), optax.adam(2e-3)):
        changed = build(run.varied(optimizer=other))
        assert changed.training.optimizer is other
    assert build(run.varied(optimizer=optax.adam(1e-3), epochs=2)) is not kept


def test_programs_are_kept_for_what_the_correction_does(model, monkeypatch):
    monkeypatch.setattr(programs, "_kept", lru_cache(maxsize=2)(lambda asked, foreign: asked))
    build, run = programs.build_once, model.training(samples=4, mode="recompute")
    corrections = tim.corrections
    made, bounds = corrections.token_tis, corrections.Bounds("token", None, np.array(2.0))
    kept = build(run.varied(correction=made()))
    assert build(run.varied(correction=made())) is kept
    for other in (made(cap=3.0), corrections.declared(made(), effect="mask")):
        assert build(run.varied(correction=other)).training.learning.correction == other
    factor = 1.0
    own = corrections.map_coefficients(
        "own", lambda c, mask: c * factor, needs=(), effect="scale", bounds=bounds
    )
    before = build(run.varied(correction=own))
    assert build(run.varied(correction=own)) is before
    factor = 2.0  # as in a notebook, where the function reads a name that is set anew
    assert build(run.varied(correction=own)) is not before


def test_no_program_is_kept_for_another_function_that_an_optimizer_calls_back(model):
    def calling(function):
        call = partial(jax.pure_callback, function)
        return optax.stateless(lambda u, params: jax.tree.map(lambda x: call(x, x), u))

    run = model.training()
    kept = programs.build_once(run.varied(optimizer=calling(lambda x: x)))
    assert programs.build_once(run.varied(optimizer=calling(lambda x: 2 * x))) is not kept


@pytest.mark.slow
def test_a_sound_step_has_nothing_that_jax_takes_for_a_fault(model):
    with jax.debug_nans(True):
        (step,) = trained(model, steps=1, mini_batches=2)
    assert step.metrics["exact_share"] == 1.0


@pytest.mark.slow
def test_steps_that_are_drawn_ahead_are_proved_too(model):
    """On devices of the sampler's own; app/test_placed_runs.py compares with the learner's."""
    where = {"sampler_placement": tim.Placement(data=2), "own_devices": True}
    steps = list(trained(model, max_staleness=1, **where))
    for step in steps:
        assert step.metrics["exact_share"] == 1.0
        assert step.metrics["compared_tokens"] > 0
        assert step.metrics["numerical/log_ratio_abs_max"] == 0.0
    drifts = [step.metrics["drift/log_ratio_abs_mean"] for step in steps]
    assert drifts[0] == 0.0 < drifts[1]


def test_a_model_that_was_not_taken_in_time_is_refused(model):
    steps = list(trained(model))
    assert steps[-1].model.config == model.config
    with pytest.raises(InputError, match="the model of step 1 is gone"):
        _ = steps[0].model
    with pytest.raises(InputError, match=r"the model of step 1 is gone.* take step\.model before"):
        _ = steps[0].weights
    assert steps[-1].weights
    with pytest.raises(InputError, match="there is no adapter"):
        _ = steps[-1].adapter


def test_every_form_of_data_and_reward_is_the_same_training(model):
    seen = []

    def of_lists(prompts, completions, answers):
        seen.append((prompts, answers))
        return np.array(by_length(prompts, completions, answers))

    rows = ({"prompt": prompt, "answer": answer, "source": "x"} for prompt, answer in PAIRS)
    pairs = list(trained(model))
    listed = list(trained(model, rows, reward=of_lists))
    assert [step.metrics for step in listed] == [step.metrics for step in pairs]
    assert tiny.bits(listed[-1].model.params) == tiny.bits(pairs[-1].model.params)
    assert [len(prompts) for prompts, _ in seen] == [1, 8, 8]  # the first was to try it
    for prompts, answers in seen:
        assert set(zip(prompts, answers, strict=True)) <= set(PAIRS)  # numbers stay numbers


def test_a_reward_is_given_chat_messages_as_they_were(model):
    messages, seen = [{"role": "user", "content": "2 + 2"}], []

    def reward(prompts, completions, answers):
        seen.extend(zip(prompts, answers, strict=True))
        return list(map(len, completions))

    plain = replace(model, chat_template=False)
    (step,) = trained(plain, [(messages, None)], reward=reward, steps=1)
    assert seen == [(messages, None)] * 9
    assert step.samples[0].prompt == "user: 2 + 2"
    assert step.metrics["exact_share"] == 1.0


@pytest.mark.slow
def test_a_trained_model_is_trained_on_against_a_reference(model):
    *_, step = trained(model)
    middle = step.model
    before = tiny.bits(middle.params)
    objective = tim.objectives.grpo(kl_coefficient=0.5)
    found = [step.metrics["loss/reference_kl"] for step in trained(middle, objective=objective)]
    assert found[0] == 0.0  # the reference is what it starts from
    assert found[1] > 0.0
    assert tiny.bits(middle.params) == before


@pytest.mark.slow
def test_a_sampler_that_differs_is_refused_where_bits_are_asked_for(model):
    table = {"name": "log_prob_noise", "std": 0.01}
    (step,) = trained(model, mismatch=[tim.mismatch.log_prob_noise(std=0.01)], steps=1)
    assert step.metrics["exact_share"] < 0.5
    with pytest.raises(MismatchError, match="response tokens have unequal log-probs"):
        next(trained(model, mismatch=[table], exact=True))


def of_one(prompt, completion, answer):
    return float(completion.endswith(answer))


class Frame(list):
    """Iterates over its columns' names, as a DataFrame."""

    columns = ("prompt", "answer")


def unlisted(prompt, completion, answer):
    return 1.0


def broken(prompts, completions, answers):
    raise KeyError("lost")


def in_time(prompts, completions, answers):
    return [1.0] * (len(prompts) if len(prompts) == 1 else 3)


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        ({"prompt": ["a"], "answer": ["b"]}, {}, 'zip(table["prompt"], table["answer"]) gives'),
        (Frame(["prompt", "answer"]), {}, "must be rows, got a table of columns (Frame)"),
        ([], {}, "prompts_and_answers is empty"),
        (iter(()), {}, "a generator that was read before has nothing left"),
        ("text", {}, "must be a list of (prompt, answer)"),
        (7, {}, "must be a list of (prompt, answer)"),
        ([("a", 1), ("b",)], {}, "row 1 must be a pair (prompt, answer)"),
        ([("a", 1, 2)], {}, "row 0 must be a pair (prompt, answer)"),
        (["ab"], {}, "row 0 must be a pair (prompt, answer)"),
        ([{"prompt": "a", "anwser": 1}], {}, "row 0 has no 'answer'; did you mean 'anwser'?"),
        (
            [(7, 1)],
            {},
            "row 0: prompt must be text or a list of chat messages, not token ids, got 7",
        ),
        ([("a" * 30, 1)], {}, "prompt 0 has 30 tokens, at most 26 are allowed"),
        (PAIRS, {"reward": 1.0}, "reward must be a function"),
        (
            PAIRS,
            {"reward": of_one},
            "reward of_one raised AttributeError: 'list' object has no attribute 'endswith'; is it"
            " a function of one completion? reward=tim_jax.per_item(of_one)",
        ),
        (PAIRS, {"reward": unlisted}, "must return a sequence of 1 numbers, got 1.0; is it a"),
        (
            PAIRS,
            {"reward": lambda completions, prompts, answers: [0.0] * len(prompts)},
            "is given (prompts, completions, answers) in this order; it takes (completions,",
        ),
        (PAIRS, {"reward": broken}, "grpo: reward broken raised KeyError: 'lost'"),
        (
            PAIRS,
            {"reward": tim.per_item(lambda *one: None)},
            "reward <lambda> must return finite numbers, got None at 0",
        ),
        (PAIRS, {"optimizer": "adamw"}, "optimizer must be of optax"),
        (
            PAIRS,
            {"optimizer": optax.MultiSteps(optax.adam(1e-3), 2)},
            "got MultiSteps; give its .gradient_transformation()",
        ),
        (
            PAIRS,
            {"optimizer": optax.chain(optax.clip(1.0), optax.contrib.muon(1e-3))},
            "Muon would take layers.attn_norm [1, 16], a vector of each layer, for a matrix",
        ),
        (
            PAIRS,
            {"optimizer": optax.chain(optax.sgd(1e-3), optax.contrib.reduce_on_plateau())},
            "effective_sample_size, but no loss, raised TypeError",
        ),
        (
            PAIRS,
            {"optimizer": optax.lbfgs()},
            "effective_sample_size, but no loss, raised TypeError",
        ),
        (PAIRS, {"steps": 0}, "steps must be at least 1, got 0"),
        (PAIRS, {"samples": 1}, "samples = 1: must be 2 or more for the estimator"),
        (PAIRS, {"objective": "grpo"}, "objective must be one of tim_jax.objectives, got str"),
        (
            PAIRS,
            {"mini_batches": 3},
            "grpo: mini_batches = 3: must divide the 8 sequences of a step",
        ),
        (
            PAIRS,
            {"micro_batch": 3},
            "grpo: micro_batch = 3: must divide the 8 sequences of a mini-batch",
        ),
        (PAIRS, {"mismatch": [{"name": "kvcache"}]}, "'kvcache' is unknown; did you mean"),
        (PAIRS, {"mismatch": ENTRIES["native_kernels"]()}, "mismatch must be a list of entries"),
        (PAIRS, {"mode": "Bypass"}, "Learning: mode 'Bypass' is unknown; did you mean 'bypass'?"),
        (
            PAIRS,
            {"correction": [tim.corrections.token_mis()]},
            "a correction must be one that tim_jax.corrections makes",
        ),
        (PAIRS, {"temperature": "1"}, "temperature must be a number, got '1'"),
        (PAIRS, {"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        (PAIRS, {"temperature": 0.0}, "temperature must be greater than 0, got 0"),
        (PAIRS, {"seed": 1.5}, "seed must be a whole number"),
        (PAIRS, {"seed": 2**32}, "seed must be at most 4294967295"),
        (PAIRS, {"refills": -1}, "refills = -1: must be 0 or more"),
        (
            PAIRS,
            {"refills": 1, "objective": tim.objectives.reinforce()},
            "refills = 1: must be 0: the estimator 'reinforce' learns from groups of equal rewards",
        ),
        (PAIRS, {"max_staleness": -1}, "max_staleness = -1: must be 0 or more"),
        (
            PAIRS,
            {"max_staleness": 1, "mismatch": [{"name": "stale_weights", "updates": 1}]},
            "contradicts max_staleness",
        ),
        (
            PAIRS,
            {"sampler_placement": tim.Placement(data=8), "own_devices": True},
            "learner and sampler need 1 + 8 devices",
        ),
        (PAIRS, {"sampler_placement": tim.Placement(data=3)}, "must divide the 8 sequences"),
        (PAIRS, {"epochs": 2.0}, "epochs is 2.0; it must be a whole number"),
        (PAIRS, {"micro_batch": "4"}, "micro_batch is '4'; it must be a whole number"),
        (PAIRS, {"micro_batch": True}, "micro_batch is True; it must be a whole number"),
        (PAIRS, {"exact": "report"}, "exact is 'report'; it must be "),
        (PAIRS, {"remat": "no"}, "remat is 'no'; it must be "),
        (PAIRS, {"placement": "fsdp=2"}, "placement must be a tim_jax.Placement, got 'fsdp=2'"),
        (PAIRS, {"lora": 8}, "lora must be a tim_jax.Lora, got 8"),
        (PAIRS, {"turns": 0}, "turns must be a tim_jax.Turns, got 0"),
        (PAIRS, {"sampler": []}, "sampler must be a tim_jax.rl.training.Sampler"),
        (
            PAIRS,
            {"beta": 0.1},
            "no field 'beta'; write objective=tim_jax.objectives.Objective(kl_coef",
        ),
        (PAIRS, {"num_generations": 2}, "no field 'num_generations'; did you mean 'samples'?"),
        (PAIRS, {"mini_batch": 2}, "Training has no field 'mini_batch'; did you mean"),
        (PAIRS, {"training": {"mini_batches": 2}}, "training must be a value such as"),
        (
            PAIRS,
            {"placement": tim.Placement(data=8), "mini_batches": 2},
            "4 sequences of a mini-batch",
        ),
        (
            PAIRS,
            {"placement": tim.Placement(data=8), "micro_batch": 4},
            "4 sequences of a micro-batch",
        ),
        (
            PAIRS,
            {
                "placement": tim.Placement(data=8),
                "objective": tim.objectives.Objective(estimator="remax"),
            },
            "grpo: prompts_per_step = 2: must be a multiple of the sampler's data x fsdp = 8",
        ),
        (
            PAIRS,
            {
                "objective": tim.objectives.Objective(
                    reward_kl_coefficient=0.1, reward_kl_target=1.0, reward_kl_horizon=1
                )
            },
            "reward_kl_horizon = 1: must be more than 1, a fifth of the 8 sequences",
        ),
        (
            PAIRS,
            {
                "correction": tim.corrections.chain(
                    tim.corrections.vexact(bound=0.9), tim.corrections.token_tis()
                )
            },
            "weights by a ratio to pi_rollout, and so does",
        ),
    ],
)
def test_what_cannot_be_trained_is_said_before_the_first_step(model, data, changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        trained(model, data, **changes)


def test_a_reward_that_becomes_nonsense_ends_the_step(model):
    with pytest.raises(InputError, match="reward in_time returned 3 rewards for 8 completions"):
        next(trained(model, reward=in_time))


def test_arguments_are_known_by_what_other_libraries_call_them(model):
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_generations": 4}, "no argument 'num_generations'; did you mean 'samples'"),
        ({"lr": 1e-4}, "did you mean 'optimizer'"),
        ({"micro_batch": 4}, r"training=model.training\(micro_batch="),
        ({"beta": 0.1}, r"objective=tim_jax.objectives.Objective\(kl_coefficient="),
    ]
    for elsewhere, right in cases:
        with pytest.raises(InputError, match=right):
            tim.grpo(model, PAIRS, reward=by_length, steps=1, **elsewhere)
    with pytest.raises(InputError, match="no argument 'max_new_tokens'; did you mean 'max_tokens'"):
        tim.sample(model, ["2"], max_new_tokens=4)  # pyright: ignore[reportCallIssue]
    for verb, wrong, right in (
        (tim.save, "dtpye", "dtype"),
        (tim.score, "formt", "format"),
        (tim.audit, "quikc", "quick"),
    ):
        options: dict[str, Any] = {wrong: 1}
        with pytest.raises(InputError, match=f"no argument '{wrong}'; did you mean '{right}'"):
            verb(model, **options)


def test_a_dtype_may_be_one_of_jax(folder):
    assert tim.load(folder, dtype=jax.numpy.bfloat16).dtype == "bfloat16"
    with pytest.raises(InputError, match="load: dtype 'int8' is unknown"):
        tim.load(folder, dtype=np.int8)
    with pytest.raises(InputError, match="'None' is unknown; known: bfloat16, float16, float32"):
        tim.load(folder, dtype=None)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_the_package_brings_a_model_that_half_knows_a_task():
    model = tim.load("tiny")
    assert model.most_tokens == 32
    prompts = [f"{number:05}>" for number in range(0, 100_000, 3000)]
    rollout = tim.sample(model, prompts, samples=4)
    right = [
        text.endswith("#" + "".join(sorted(prompts[i // 4][:-1])))
        for i, text in enumerate(rollout.text)
    ]
    assert 0.4 < np.mean(right) < 0.75
    assert repr(rollout).startswith("Rollout(136 responses, ")
    assert (len(repr(rollout).splitlines()), len(str(rollout).splitlines())) == (5, 137)


def test_what_objects_print_is_short_and_says_what_they_are(model):
    (step,) = trained(model, steps=1)
    assert re.match(r"step 1  reward 0\.\d+  length \d+\.\d  exact 100% \(\d+ tokens\)", str(step))
    assert len(repr(step).splitlines()) == 5
    assert step._repr_html_().count("<tr>") == 9
    training = model.training(micro_batch=4, objective=tim.objectives.dapo())
    ones = np.ones((2, 3), np.float32)
    correct = jax.jit(partial(tim.corrections.correct, tim.corrections.vexact()))
    corrected = correct(log_ratio=ones, mask=ones > 0)
    values = (step, model, model.config, model.numerics, training, training.learning.objective)
    for value in (*values, tim.corrections.vexact(), corrected):
        assert len(repr(value)) < 900, repr(value)
        assert len(repr(value).splitlines()) <= 10
    assert repr(training).startswith("Training of 8 prompts x 8 samples a step:\n")
    assert "micro_batch=4" in repr(training)
    assert repr(tim.corrections.token_tis(cap=3.0)) == (
        "Correction(scale_by_truncated_ratio (token ratio up to 3.0))"
    )
    for room in (tim.metrics, tim.schedules):
        assert all(
            getattr(room, name).__module__ == room.__name__
            for name in dir(room)
            if not name.isupper()
        )
    for room in (tim.corrections, tim.mismatch, tim.objectives):
        assert not any(inspect.ismodule(getattr(room, name)) for name in dir(room))
        assert "__file__" not in dir(room)


def test_nobody_is_told_that_pytorch_is_missing():
    said = logging.LogRecord(
        "transformers", 30, "", 0, "PyTorch was not found. Models ...", (), None
    )
    assert not logging.getLogger("transformers").filter(said)


def test_nothing_is_written(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tim.sample(model, ["2 + 2", "b"], **DRAWN)
    list(trained(model, steps=1))
    assert not list(tmp_path.iterdir())


# What one process and each of several do, in the folder at hand with the model in `folder`. The
# shapes are those of other tests here, so that for one process nearly nothing is compiled.
SCRIPT = """
import jax, optax
import tim_jax as tim

model = tim.load(folder)
rollout = tim.sample(model, ["What is 7 * 8?", "b"], samples=4, max_tokens=10)
assert tim.score(model, rollout).tobytes() == rollout.log_probs.tobytes()
graded = []
def reward(prompts, completions, answers):
    graded.extend(completions)
    return [len(text) / 6 for text in completions]
for step in tim.grpo(model, [("2 + 2", 4), ("3 + 1", 4)], reward=reward, steps=2, samples=4,
                     prompts_per_step=2, max_tokens=6, optimizer=optax.adamw(1e-2)):
    print("said", rollout.text, step.metrics["reward"], step.metrics["exact_share"])
assert len(graded) == 1 + 2 * 8 // jax.process_count()  # one is a trial
tim.save(step.model, "out")
"""
PROCESS = f"""
import sys
import jax
index, address, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(address, 2, index)
{SCRIPT}
"""


@pytest.mark.slow
def test_two_processes_do_what_one_does(folder, tmp_path, monkeypatch, capsys):
    """One is that of the tests, on one of its devices."""
    for where in ("one", "two"):
        (tmp_path / where).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    exec(SCRIPT, {"folder": str(folder)})
    said = [said_in(capsys.readouterr().out)]
    running = started(
        lambda index, address: ["-c", PROCESS, str(index), address, str(folder)],
        count=2,
        devices=1,
        folder=tmp_path / "two",
    )
    for status, out, err in finished(running, 300):
        assert status == 0, err
        said.append(said_in(out))
    assert len(said[0]) == 2
    assert said[0] == said[1] == said[2]
    # Gradients of two devices are added in another order; log-probs are not touched by it.
    weights = [tim.load(tmp_path / where / "out").params for where in ("one", "two")]
    for one, two in zip(*map(jax.tree.leaves, weights), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-3)


def said_in(out):
    return [line for line in out.splitlines() if line.startswith("said")]


# What the README and the scripts show.


def test_the_optimizers_of_the_page_tell_matrices_from_vectors(model):
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    section = page.split("\n## Optimizers\n")[1]
    (example,) = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {"optax": optax}
    exec(compile(example, "python.md", "exec"), names)
    for lora in (None, tim.Lora(2)):
        for optimizer in (names["adamw"], names["muon"]):
            settle("grpo", model, model.training(lora=lora), {"optimizer": optimizer})
    state = jax.eval_shape(names["muon"].init, model.params).inner_states["muon"]
    taken = jax.tree.leaves(state.inner_state[0].mu)
    layers = [leaf for leaf in model.params["layers"].values() if leaf.ndim == 3]
    assert [leaf.shape for leaf in taken] == [leaf.shape for leaf in layers]
    decayed = names["decayed"](model.params)
    assert decayed["embed"]
    assert {name for name, asked in decayed["layers"].items() if not asked} == {
        name for name, leaf in model.params["layers"].items() if leaf.ndim == 2
    }


@pytest.mark.slow
def test_the_example_of_a_whole_script_runs(folder, tmp_path, few_cases, monkeypatch, capsys):
    """Its audit has two cases, its control, and the gradients of one unit."""
    monkeypatch.setattr(compiler, "units", lambda *given, true=compiler.units: true(*given)[:1])
    monkeypatch.setattr(auditing, "check_gradients", compiler.check_gradients.__wrapped__)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page.split("\n## ")[1], re.DOTALL)
    for shown, used in {
        '"Qwen/Qwen3-0.6B"': repr(str(folder)),
        "max_tokens=256": "max_tokens=6",
        "steps=100, samples=8": "steps=1, samples=4, max_tokens=6",
    }.items():
        assert example.count(shown) == 1, shown
        example = example.replace(shown, used)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, "python.md", "exec"), names)
    rollout, report = names["rollout"], names["report"]
    assert bits(names["log_probs"]) == bits(rollout.log_probs)
    assert report.passed
    assert len(report.cases) == 3  # and the control
    assert (report.compared_tokens > 100, report.unequal_tokens) == (True, 0)
    assert "learner, whole batch" in str(report)
    assert {one.unit for one in report.gradients} == {"norm"}
    assert len(report.gradients) > 2
    reward, share = map(float, capsys.readouterr().out.split())
    assert 0 <= reward <= 1
    assert share < 1  # its cache is of float8
    assert names["step"].metrics["correction/masked_share"] <= 1
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.slow
def test_grpo_in_a_hundred_lines():
    path = ROOT / "scripts" / "minimal_grpo.py"
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 100
    names: dict[str, Any] = {"__name__": "minimal_grpo"}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(source, str(path), "exec"), names)
        history = names["train"](steps=12)
    assert all(compared > 0 and unequal == 0 for _, compared, unequal in history)
    assert np.mean([reward for reward, *_ in history[-3:]]) > 4 * history[0][0]


# --- episodes of several turns ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give reward, or for episodes of several turns respond"),
        ({"reward": len, "max_turns": 3}, "max_turns = 3 is for episodes; give respond too"),
        ({"respond": "guess"}, "respond must be a function"),
        ({"reward": len, "respond": min}, "give reward or respond, not both"),
        ({"respond": min, "max_turns": 0}, "max_turns must be at least 1, got 0"),
        ({"respond": min, "max_tokens": 9, "longest": 8}, "at most the 8 tokens"),
        ({"respond": min, "of_episodes": 8}, "training has max_tokens = 8, of an episode, but no"),
        ({"respond": min, "state": threading.Lock()}, "grpo: row 0: the state cannot be pickled"),
        ({"max_episode_tokens": 8}, r"write training=model.training\(turns=tim_jax.Turns\("),
        ({"respond": min, "sampler": []}, r"write training=model.training\(mismatch="),
        (
            {"respond": min, "history": "cut"},
            r"write training=model.training\(turns=tim_jax.Turns\(",
        ),
    ],
)
def test_what_episodes_need_is_said_at_once(model, options, message):
    options = dict(options)
    if longest := options.pop("longest", None):
        options["training"] = model.training(turns=tim.Turns(), max_tokens=longest)
    if tokens := options.pop("of_episodes", None):
        options["training"] = model.training(max_tokens=tokens)
    state = options.pop("state", 2)
    with pytest.raises(InputError, match=message):
        tim.grpo(model, [("1+1=", state)], steps=1, **options)


def test_a_template_that_rewrites_history_is_refused_unless_somebody_says_what_to_do(model):
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content[-6:] }}{% endfor %}"
    model = replace(model, tokenizer=tokenizer)
    begin = partial(tim.grpo, model, [("1+1=", "2")], steps=1, respond=min, max_turns=3)
    with pytest.raises(InputError, match=r'leaves out or changes what .*; history = "cut"'):
        begin()
    begin(training=model.training(turns=tim.Turns(max_tokens=2, history="cut"), max_tokens=20))
    with pytest.raises(InputError, match="Turns: history 'drop' is unknown"):
        tim.Turns(history="drop")  # pyright: ignore[reportArgumentType]


def test_a_respond_that_fails_in_all_episodes_of_the_first_step_is_an_error(model, monkeypatch):
    def asked(state, task, text, *, environment, **how):
        """A step that asks the environment for its first turns, and learns nothing."""
        completion = Completion("1", np.array([2], np.int32), True)
        key = np.zeros(2, np.uint32)
        turns = [Turn(0, sample, 0, completion, 4, key, "2 + 2") for sample in range(2)]
        failures = [outcome.failure for _, outcome in environment.outcomes(turns)]
        metrics = {"environment/failures": float(len(failures))}
        samples: Any = failures
        yield loop.Step(1, state, None, metrics, {}, samples)

    nothing: Any = None
    started = training.Started(nothing, nothing, None, None)
    monkeypatch.setattr(loop, "train", asked)
    monkeypatch.setattr(training, "start", lambda *_: (None, started))
    few: Any = {"samples": 2, "prompts_per_step": 1, "max_turns": 2, "max_tokens": 4}
    steps = tim.grpo(model, PAIRS, respond=lambda state, said: {}["key"], steps=1, **few)
    with pytest.raises(InputError) as caught:
        next(steps)
    assert f"{caught.value}" == (
        "grpo: respond failed in all 2 episodes of step 1, the first time by raised: KeyError:"
        " 'key'"
    )


def test_grpo_is_small():
    assert len(BY_NAME) <= 14


def test_who_waits_for_a_diagnosis_is_told_so(model, monkeypatch):
    def broken(*_, **__):
        raise KeyError("lost")

    monkeypatch.setattr(verdict, "diagnose", broken)
    row = {"prompt_token_ids": [1], "response_token_ids": [2], "logprobs": [-1.0]}
    with pytest.raises(KeyError) as caught:
        tim.diagnose(model, [row])
    assert waiting.task_of(caught.value) == "diagnosing"


def test_weights_of_another_end_token_are_candidates(model, monkeypatch):
    """Trainers write a padding token of their own beside the weights."""

    class Diagnosed(Exception):
        pass

    def diagnosed(responses, forward, *, others, tokenizer):
        raise Diagnosed([other.name for other in others])

    monkeypatch.setattr(verdict, "diagnose", diagnosed)
    row = {"prompt_token_ids": [1], "response_token_ids": [2], "logprobs": [-1.0]}
    base = replace(model, config=replace(model.config, pad_token_id=3, eos_token_ids=(4,)))
    with pytest.raises(Diagnosed, match=r"\['base'\]"):
        tim.diagnose(model, [row], weights={"base": base})
    other = replace(model, config=replace(model.config, rms_norm_eps=1e-3))
    with pytest.raises(InputError, match="the weights of other are of another architecture"):
        tim.diagnose(model, [row], weights={"other": other})
