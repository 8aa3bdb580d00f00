"""Checkpoints in and out: against `transformers`, and every broken folder."""

import importlib.util
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
import transformers
from checkpoints import CASES, make_config, make_model, torch_logits
from huggingface_hub import errors
from reference import reference_log_probs, reference_logits
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from tim_jax.common.errors import InputError
from tim_jax.model import hf
from tim_jax.model.config import ModelConfig
from tim_jax.model.files import load_tokenizer
from tim_jax.model.parameters import check_params, init_params
from tim_jax.model.weights import parameter_shapes

TINY = ModelConfig(
    model_type="qwen3",
    vocab_size=11,
    hidden_size=6,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=10,
    max_positions=16,
    qk_norm=True,
)
TOKENS = np.random.default_rng(0).integers(0, 101, 40)


def _error(old, new):
    """Largest difference relative to the largest logit."""
    return np.abs(old - new).max() / np.abs(old).max()


@pytest.fixture
def tiny(tmp_path):
    """A folder with two layers of random weights, saved by us."""
    return hf.save(tmp_path / "tiny", init_params(TINY, 0), TINY)


def _edit(folder, change):
    """Rewrites the folder's tensors as `change(tensors)` says."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(words):
    """A tokenizer of whole words."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("name", CASES)
def test_reference_on_loaded_parameters_equals_torch(name, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path)
    config = hf.load_config(tmp_path)
    params = hf.load_params(tmp_path, config)
    logits = reference_logits(params, TOKENS, config)
    assert _error(logits, torch_logits(model, TOKENS)) < 1e-5
    # torch keeps its angles in float32; nothing else is rounded there
    assert _error(logits, torch_logits(model.double(), TOKENS)) < 5e-6


def test_reference_log_probs_are_those_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    model = make_model("llama-llama3")
    model.save_pretrained(tmp_path)
    config = hf.load_config(tmp_path)
    ours = reference_log_probs(hf.load_params(tmp_path, config), TOKENS, config, temperature=0.7)
    logits = torch.as_tensor(torch_logits(model, TOKENS)) / 0.7
    theirs = torch.log_softmax(logits, dim=-1)[np.arange(39), TOKENS[1:]]
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4)


@pytest.mark.parametrize("shards", [None, "20KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_are_those_of_transformers(dtype, shards, tmp_path):
    torch = pytest.importorskip("torch")
    for name in ("qwen3-bias-yarn", "qwen2-tied-yarn", "llama-tied-biases"):
        model, folder = make_model(name).to(getattr(torch, dtype)), tmp_path / name
        model.save_pretrained(folder, **({"max_shard_size": shards} if shards else {}))
        assert (folder / "model.safetensors.index.json").exists() == bool(shards)
        config = hf.load_config(folder)
        params = hf.load_params(folder, config)
        check_params(params, config)
        state = {key: value.float().numpy() for key, value in model.state_dict().items()}
        layers = params["layers"]
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}."
            np.testing.assert_array_equal(
                layers["q"][index], state[prefix + "self_attn.q_proj.weight"].T
            )
            np.testing.assert_array_equal(
                layers["down"][index], state[prefix + "mlp.down_proj.weight"].T
            )
            np.testing.assert_array_equal(
                layers["k_bias"][index], state[prefix + "self_attn.k_proj.bias"]
            )
        np.testing.assert_array_equal(params["embed"], state["model.embed_tokens.weight"])
        stored = 0 if config.tied_embeddings else state["lm_head.weight"].size
        total = sum(value.size for key, value in state.items() if key != "lm_head.weight")
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == total + stored
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("name", CASES)
def test_saved_checkpoint_gives_transformers_the_same_bits(name, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path / "theirs")
    config = hf.load_config(tmp_path / "theirs")
    params = hf.load_params(tmp_path / "theirs", config)
    for max_shard_bytes, files in ((10**9, 1), (40_000, None)):
        folder = tmp_path / f"ours{files}"
        hf.save(folder, params, config, max_shard_bytes=max_shard_bytes)
        assert files is None or len(list(folder.glob("*.safetensors"))) == files
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True
        )
        again, report = loaded
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys"))
        np.testing.assert_array_equal(torch_logits(model, TOKENS), torch_logits(again, TOKENS))
        ids = ("eos_token_id", "bos_token_id", "pad_token_id")
        for key in ids:
            assert getattr(again.generation_config, key) == getattr(model.generation_config, key)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
def test_the_fused_layout_of_transformers_5_is_read_too(name, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path / "apart")
    model.save_pretrained(tmp_path / "fused", save_original_format=False, max_shard_size="20KB")
    index = json.loads((tmp_path / "fused" / "model.safetensors.index.json").read_text())
    assert "model.layers.1.mlp.experts.gate_up_proj" in index["weight_map"]
    config = hf.load_config(tmp_path / "apart")
    apart, fused = (hf.load_params(tmp_path / name, config) for name in ("apart", "fused"))
    jax.tree.map(np.testing.assert_array_equal, apart, fused)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    joint = state["model.layers.2.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(apart["layers"]["expert_up"][2, 4], joint[4, 20:].T)
    np.testing.assert_array_equal(
        apart["layers"]["router"][1], state["model.layers.1.mlp.gate.weight"].T
    )


def test_a_missing_expert_is_named(tmp_path):
    make_model("qwen3_moe").save_pretrained(tmp_path / "apart")
    make_model("qwen3_moe").save_pretrained(tmp_path / "fused", save_original_format=False)
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    _edit(tmp_path / "apart", lambda old: {k: v for k, v in old.items() if k != name.format(5)})
    _refused(tmp_path / "apart", name.format(5), "missing")
    joint = "model.layers.1.mlp.experts.gate_up_proj"
    _edit(tmp_path / "fused", lambda old: old | {joint: old[joint][:6].copy()})
    _refused(tmp_path / "fused", "layers.1.mlp.experts.6.gate_proj", "missing")
    _edit(tmp_path / "fused", lambda old: {k: v for k, v in old.items() if k != joint})
    _refused(tmp_path / "fused", "layers.1.mlp.experts.0.gate_proj", "missing")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_survives_the_round_trip(dtype, tmp_path):
    torch = pytest.importorskip("torch")

    model = make_model("qwen3-tied").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs")
    config = hf.load_config(tmp_path / "theirs")
    params = hf.load_params(tmp_path / "theirs", config)
    hf.save(tmp_path / "ours", params, config, dtype=dtype)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
        assert again.state_dict()[key].dtype == getattr(torch, dtype)


def test_a_bias_that_chooses_experts_stays_float32(tmp_path):
    """As engines have it: rounded, other experts are chosen."""
    config = hf.from_hf(json.loads(make_config("deepseek_v3").to_json_string(use_diff=False)))
    params = init_params(config, 0)
    bias = [
        name for name, *_ in hf.checkpoint_tensors(config) if name.endswith("score_correction_bias")
    ]
    params["layers"]["router_bias"] = params["layers"]["router_bias"] + np.float32(7.01)
    hf.save(tmp_path / "ours", params, config, dtype="bfloat16")
    again = hf.load_params(tmp_path / "ours", config)
    np.testing.assert_array_equal(again["layers"]["router_bias"], params["layers"]["router_bias"])
    dtypes = {
        name: array.dtype for name, array in hf.named_arrays(params, config, dtype="bfloat16")
    }
    assert bias
    assert {dtypes.pop(name) for name in bias} == {np.dtype(np.float32)}
    assert np.dtype(np.float32) not in dtypes.values()


def test_every_case_initialises_as_transformers_does():
    for name in CASES:
        theirs = make_config(name)
        theirs.pad_token_id = 5
        values = json.loads(theirs.to_json_string(use_diff=False)) | {"architectures": None}
        config = hf.from_hf(values)
        params = init_params(config, 3)
        check_params(params, config)
        assert not params["embed"][5].any()
        assert params["embed"][6].any()
        for leaf, values in params["layers"].items():
            if leaf.endswith("_norm"):
                assert (values == 1).all()
            elif leaf.endswith("_bias"):
                assert not values.any()
            else:
                spread = max(0.1, 3 * values.size**-0.5)
                assert values.std() == pytest.approx(0.02, rel=spread)
                assert abs(values.mean()) < 0.02 * spread


def test_initial_values_are_functions_of_seed_and_name():
    one, same, other = init_params(TINY, 1), init_params(TINY, 1), init_params(TINY, 2)
    for a, b, c in zip(*map(jax.tree.leaves, (one, same, other)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.std() == 0 or (a != c).all()
    assert (one["layers"]["gate"] != one["layers"]["up"]).all()
    tied = init_params(hf.from_hf(hf.to_hf(TINY) | {"tie_word_embeddings": True}), 1)
    np.testing.assert_array_equal(tied["layers"]["q"], one["layers"]["q"])
    with pytest.raises(InputError, match="-1"):
        init_params(TINY, -1)


def test_shapes_are_float32_structs_of_the_documented_tree():
    shapes = parameter_shapes(TINY)
    assert set(shapes) == {"embed", "final_norm", "head", "layers"}
    assert shapes["layers"]["q"] == jax.ShapeDtypeStruct((2, 6, 12), jnp.float32)
    assert shapes["layers"]["o"].shape == (2, 12, 6)
    assert shapes["layers"]["q_norm"].shape == (2, 4)
    assert shapes["head"].shape == (6, 11)


def test_device_arrays_save_and_load_to_the_same_bits(tmp_path):
    params = jax.tree.map(jnp.asarray, init_params(TINY, 0))
    folder = hf.save(tmp_path / "a" / "b", params, TINY, max_shard_bytes=300)
    assert len(list(folder.glob("*.safetensors"))) > 3
    again = hf.load_params(folder, hf.load_config(folder))
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_save_rounds_to_nearest_even(tmp_path):
    params = init_params(TINY, 0)
    params["final_norm"][:2] = 1 + 2**-8, 1 + 3 * 2**-8
    folder = hf.save(tmp_path / "m", params, TINY, dtype="bfloat16")
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        norm = file.get_tensor("model.norm.weight")
        assert file.metadata() == {"format": "pt"}
    assert norm.dtype == ml_dtypes.bfloat16
    assert norm.astype(np.float32)[:2].tolist() == [1.0, 1 + 2**-6]


def test_tokenizer_and_generation_config_travel(tmp_path):
    tokenizer = _tokenizer({"[UNK]": 0, "a": 1, "b": 2})
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    generation = {"eos_token_id": [3, 4], "temperature": 0.6, "do_sample": True}
    folder = hf.save(
        tmp_path / "m", init_params(TINY, 0), TINY, tokenizer=tokenizer, generation=generation
    )
    again = load_tokenizer(folder, vocab_size=TINY.vocab_size)
    assert again("b a b")["input_ids"] == [2, 1, 2]
    assert again.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False) == "a b"
    assert hf.load_generation_config(folder) == generation


def test_save_never_overwrites_and_leaves_nothing_half_written(tiny, tmp_path, monkeypatch):
    params = init_params(TINY, 0)
    with pytest.raises(InputError, match="not overwritten"):
        hf.save(tiny, params, TINY)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="not overwritten"):
        hf.save(tmp_path / "file", params, TINY)
    with pytest.raises(InputError, match="cannot be made"):
        hf.save(tmp_path / "file" / "below", params, TINY)
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "ismount", lambda path: Path(path).name == "volume")
        with pytest.raises(InputError, match="is a mount point; name a new folder inside it"):
            hf.save(tmp_path / "volume", params, TINY)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    hf.save(tmp_path / "link", params, TINY)
    assert (tmp_path / "empty" / "config.json").is_file()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="loop' cannot be"):
        hf.save(tmp_path / "loop", params, TINY)
    before = sorted(tmp_path.iterdir())

    class Broken:
        def save_pretrained(self, folder):
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        hf.save(tmp_path / "new", params, TINY, tokenizer=Broken())
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_disk_that_fills_while_saving_is_one_line(tmp_path, monkeypatch, kind):
    def full(*args, **options):
        raise kind("No space left on device")

    monkeypatch.setattr("tim_jax.model.files.save_file", full)
    with pytest.raises(InputError, match=r"new' cannot be written \(.*No space left on device"):
        hf.save(tmp_path / "new", init_params(TINY, 0), TINY)
    assert not list(tmp_path.iterdir())


def test_a_url_is_no_folder_to_save_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"path 'gs://bucket/model': is a URL, not a path"):
        hf.save("gs://bucket/model", init_params(TINY, 0), TINY)
    assert not list(tmp_path.iterdir())


def test_save_refuses_what_does_not_fit(tmp_path):
    params = init_params(TINY, 0)
    with pytest.raises(InputError, match=r"'bfloat61'.*did you mean 'bfloat16'"):
        hf.save(tmp_path / "m", params, TINY, dtype="bfloat61")
    with pytest.raises(InputError, match=r"'layers.q'.*\(2, 6, 10\).*\(2, 6, 12\)"):
        hf.save(
            tmp_path / "m",
            params | {"layers": params["layers"] | {"q": np.zeros((2, 6, 10))}},
            TINY,
        )
    with pytest.raises(InputError, match="'head' is missing"):
        hf.save(tmp_path / "m", {k: v for k, v in params.items() if k != "head"}, TINY)
    with pytest.raises(InputError, match="'extra'"):
        hf.save(tmp_path / "m", params | {"extra": np.zeros(1)}, TINY)
    params["embed"][0, 0] = 1e5
    with pytest.raises(InputError, match=r"embed_tokens.*float16"):
        hf.save(tmp_path / "m", params, TINY, dtype="float16")
    assert not list(tmp_path.iterdir())


def _refused(folder, *words):
    """Loading the folder fails in one line that holds all the words."""
    with pytest.raises(InputError) as caught:
        hf.load_params(folder, hf.load_config(folder))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_wrong_folders(tmp_path, monkeypatch):
    _refused(tmp_path / "nowhere", "nowhere", "does not exist")
    _refused("./nowhere", "nowhere", "does not exist")
    _refused("a/b/c", "a/b/c", "does not exist")
    _refused("", "does not exist")
    _refused(tmp_path, str(tmp_path), "config.json")
    (tmp_path / "config.json").write_text("{")
    _refused(tmp_path / "config.json", "is a file")
    _refused(tmp_path, "config.json", "JSON")
    (tmp_path / "config.json").write_text("[1]")
    _refused(tmp_path, "config.json", "object")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    _refused(tmp_path, "config.json", "JSON")


def test_hub_names_are_downloaded_or_refused(tiny, monkeypatch):
    asked = []

    def download(name, *, allow_patterns, ignore_patterns):
        asked.append(name)
        if name != "owner/model":
            raise FileNotFoundError("no such repository\nsecond line")
        return str(tiny)

    monkeypatch.setattr(hf, "snapshot_download", download)
    assert hf.resolve("owner/model") == tiny
    assert hf.load_config("owner/model") == TINY
    assert asked == ["owner/model", "owner/model"]
    _refused("owner/modell", "owner/modell", "neither a folder", "no such repository second line")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.GatedRepoError, "it is gated: ask for access on its page there"),
        (errors.RepositoryNotFoundError, "no repository of that name, or a private one"),
    ],
)
def test_the_hub_says_no_in_words_that_help(monkeypatch, error, said):
    class Refusal(error):
        def __init__(self):  # without a response, whose kind differs by the hub's version
            Exception.__init__(self, "401 Client Error. (Request ID: 1)")

    def refuse(*_, **__):
        raise Refusal

    monkeypatch.setattr(hf, "snapshot_download", refuse)
    _refused("owner/model", said, "hf auth login")


def test_missing_weights(tiny):
    """A folder from the hub is told of pickled weights too, though it has no trace of them."""
    (tiny / "model.safetensors").unlink()
    neither = "neither model.safetensors nor model.safetensors.index.json"
    _refused(tiny, neither, "pickled weights are not read, nor downloaded")
    (tiny / "pytorch_model.bin").write_bytes(b"")
    _refused(tiny, neither, "pickled weights are not read")


@pytest.mark.parametrize("size", [0, 4, 100, -1, -1000])
def test_truncated_weights(tiny, size):
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    _refused(tiny, str(path), "truncated or corrupt")


def test_corrupt_weights(tiny):
    path = tiny / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    _refused(tiny, str(path), "truncated or corrupt")
    path.write_bytes(b"\xff" * 8 + whole[8:])
    _refused(tiny, str(path), "truncated or corrupt")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    _refused(tiny, str(path), "git-lfs")


def test_a_tied_model_is_read_of_its_head_alone(tmp_path):
    """`safetensors.torch.save_model` keeps one name of a shared tensor."""
    config = replace(TINY, tied_embeddings=True)
    params = init_params(config, 0)
    folder = hf.save(tmp_path / "m", params, config)
    embedding = "model.embed_tokens.weight"
    _edit(folder, lambda old: {"lm_head.weight": old.pop(embedding)} | old)
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(folder, config), params)


def test_missing_unexpected_and_misshapen_tensors(tiny, tmp_path):
    def edited(change):
        folder = tmp_path / "edited"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny, folder)
        _edit(folder, change)
        return folder

    norm = "model.layers.1.self_attn.q_norm.weight"
    _refused(edited(lambda t: {k: t[k] for k in t if k != norm}), norm, "missing")
    head = "lm_head.weight"
    _refused(edited(lambda t: {k: t[k] for k in t if k != head}), head, "tie_word_embeddings")
    extra = {"model.layers.0.self_attn.q_proj.bias": np.zeros(12, np.float32)}
    _refused(edited(lambda t: t | extra), "q_proj.bias", "not one of")
    extra = {"model.layers.2.mlp.up_proj.weight": np.zeros((10, 6), np.float32)}
    _refused(edited(lambda t: t | extra), "layers.2.mlp.up_proj", "not one of")
    wrong = {"model.layers.0.self_attn.o_proj.weight": np.zeros((12, 6), np.float32)}
    _refused(edited(lambda t: t | wrong), "o_proj", "[12, 6]", "[6, 12]")
    for bad, name in ((ml_dtypes.float8_e4m3fn, "F8_E4M3"), (np.int8, "I8"), (np.float64, "F64")):
        _refused(edited(lambda t, bad=bad: t | {norm: np.ones(4, bad)}), norm, name, "BF16")


def test_rotary_buffers_are_ignored(tiny):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    before = hf.load_params(tiny, TINY)
    _edit(tiny, lambda tensors: tensors | buffer)
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(tiny, TINY), before)


def test_the_layer_that_predicts_the_token_after_next_is_passed_by(tmp_path):
    """As DeepSeek publishes one; without its own projection it would be a layer too many."""
    make_model("deepseek_v3").save_pretrained(tmp_path)
    config = hf.load_config(tmp_path)
    before = hf.load_params(tmp_path, config)
    layer = {
        f"model.layers.3.{name}.weight": np.ones(4, np.float32) for name in ("enorm", "eh_proj")
    }
    _edit(tmp_path, lambda tensors: tensors | layer)
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(tmp_path, config), before)
    _edit(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if "eh_proj" not in k})
    with pytest.raises(InputError, match=r"layers.3.enorm.weight' is not one of"):
        hf.load_params(tmp_path, config)


def test_a_missing_expert_of_a_model_with_latent_attention_is_named(tmp_path):
    make_model("deepseek_v3").save_pretrained(tmp_path)
    config, lost = hf.load_config(tmp_path), "model.layers.2.mlp.experts.4.up_proj.weight"
    _edit(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != lost})
    with pytest.raises(InputError, match=lost):
        hf.load_params(tmp_path, config)


def test_a_tied_model_may_store_its_head_only_if_it_equals_the_embedding(tmp_path):
    config = hf.from_hf(hf.to_hf(TINY) | {"tie_word_embeddings": True})
    folder = hf.save(tmp_path / "m", init_params(config, 0), config)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _edit(folder, lambda tensors: tensors | {"lm_head.weight": embed})
    assert "head" not in hf.load_params(folder, config)
    embed[3, 2] = np.nextafter(embed[3, 2], np.float32(1))
    _edit(folder, lambda tensors: tensors | {"lm_head.weight": embed})
    _refused(folder, "lm_head.weight", "tie_word_embeddings")
    _edit(folder, lambda tensors: tensors | {"lm_head.weight": embed[:5]})
    _refused(folder, "lm_head.weight", "tie_word_embeddings")


def test_broken_indexes(tmp_path):
    folder = hf.save(tmp_path / "m", init_params(TINY, 0), TINY, max_shard_bytes=1000)
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    weight_map = whole["weight_map"]
    names = list(weight_map)

    def rewritten(change):
        index.write_text(json.dumps(whole | {"weight_map": change}))
        return folder

    _refused(rewritten(weight_map | {names[0]: "model-9.safetensors"}), "model-9.safetensors")
    _refused(rewritten(weight_map | {names[0]: "../m/config.json"}), "../m/config.json")
    _refused(rewritten(weight_map | {names[0]: 3}), "3")
    _refused(rewritten(weight_map | {"ghost": weight_map[names[0]]}), "ghost")
    _refused(rewritten(weight_map | {names[0]: weight_map[names[-1]]}), names[0])
    _refused(rewritten({}), "weight_map")
    _refused(rewritten(None), "weight_map")
    hf.load_params(rewritten(weight_map), TINY)
    # A copy of a tensor in a later shard is not read, whatever it holds.
    last = folder / max(weight_map.values())
    before, tensors = last.read_bytes(), load_file(last)
    first = min(weight_map, key=weight_map.get)
    save_file(tensors | {first: np.zeros_like(load_file(folder / weight_map[first])[first])}, last)
    expected = init_params(TINY, 0)
    read = hf.load_params(folder, TINY)
    jax.tree.map(np.testing.assert_array_equal, read, expected)
    last.write_bytes(before)
    shard = folder / weight_map[names[-1]]
    shard.write_bytes(shard.read_bytes()[:-1])
    _refused(folder, str(shard), "truncated")
    shard.unlink()
    _refused(folder, shard.name)


def test_missing_broken_and_oversized_tokenizers(tiny):
    with pytest.raises(InputError, match="has no tokenizer"):
        load_tokenizer(tiny, vocab_size=TINY.vocab_size)
    (tiny / "tiktoken.model").write_text("AA== 0\n")  # as Moonlight is published
    with pytest.raises(InputError, match=r"no tokenizer .*tiktoken.model needs .*own code, which"):
        load_tokenizer(tiny, vocab_size=TINY.vocab_size)
    (tiny / "tokenizer.model").write_bytes(b"")
    if importlib.util.find_spec("sentencepiece") is None:
        with pytest.raises(InputError, match="pip install sentencepiece"):
            load_tokenizer(tiny, vocab_size=TINY.vocab_size)
    (tiny / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid")
    with pytest.raises(InputError, match=r"tokenizer.json: a git-lfs pointer.* `git lfs pull`"):
        load_tokenizer(tiny, vocab_size=TINY.vocab_size)
    (tiny / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="no usable tokenizer") as caught:
        load_tokenizer(tiny, vocab_size=TINY.vocab_size)
    assert "\n" not in str(caught.value)
    _tokenizer({f"w{index}": index for index in range(12)}).save_pretrained(tiny)
    with pytest.raises(InputError, match=r"largest id 11 .* vocabulary of 11"):
        load_tokenizer(tiny, vocab_size=TINY.vocab_size)
