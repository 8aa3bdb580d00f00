"""config.json to ModelConfig and back, and everything that is refused."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import transformers
from checkpoints import CASES, make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from tim_jax.common.errors import InputError
from tim_jax.model.config import ModelConfig
from tim_jax.model.config_file import from_hf, to_hf
from tim_jax.model.hf import PUBLISHED as KNOWN_MODELS
from tim_jax.model.rope import RopeConfig

# As published: older layout (transformers 4), older layout with scaling, and with nulls.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
PUBLISHED = {
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "llama": LLAMA,
    "qwen3_moe": QWEN3_MOE,
    "qwen2_moe": QWEN2_MOE,
    "mistral": MISTRAL,
}
SLIDING, FULL = "sliding_attention", "full_attention"

_LINEAR = {"rope_type": "linear", "factor": 2.0}
_NO_THETA = {key: value for key, value in QWEN2.items() if key != "rope_theta"}


def _scaled(**rope):
    return QWEN2 | {"rope_scaling": rope}


def test_published_llama_reads_as_its_card_says():
    config = from_hf(LLAMA)
    assert config == ModelConfig(
        model_type="llama",
        vocab_size=128256,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=8192,
        max_positions=131072,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            kind="llama3",
            theta=5e5,
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_positions=8192,
        ),
        tied_embeddings=True,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
    )
    assert hash(config) == hash(from_hf(copy.deepcopy(LLAMA)))


def test_families_differ_in_norms_and_biases():
    flags = ("qk_norm", "attention_bias", "output_bias", "mlp_bias")

    def read(values, **more):
        config = from_hf(values | more)
        return tuple(getattr(config, name) for name in flags)

    assert read(QWEN3) == (True, False, False, False)
    assert read(QWEN3, attention_bias=True) == (True, True, True, False)
    assert read(QWEN2) == (False, True, False, False)
    assert read(LLAMA) == (False, False, False, False)
    assert read(LLAMA, attention_bias=True, mlp_bias=True) == (False, True, True, True)
    assert read(MISTRAL) == (False, False, False, False)


def test_a_mixture_of_experts_reads_as_its_card_says():
    config = from_hf(QWEN3_MOE)
    assert (config.num_experts, config.num_experts_per_tok) == (128, 8)
    assert (config.moe_intermediate_size, config.active_width) == (768, 8 * 768)
    assert config.norm_topk_prob
    assert config.qk_norm
    newer = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert from_hf(newer | {"num_local_experts": 128}) == config
    assert from_hf(QWEN3).active_width == 3072
    # a size of heads that is given need not follow from the hidden size
    assert from_hf(QWEN3_MOE | {"hidden_size": 2040}).head_dim == 128
    with pytest.raises(InputError, match="a qwen3 model has num_experts=0, found 4"):
        dataclasses.replace(from_hf(QWEN3), num_experts=4)


def test_qkv_bias_is_a_key_of_families_that_have_such_biases():
    """Qwen3-Coder is published with it, and `transformers` does not look at it."""
    for values in (QWEN3, QWEN3_MOE, LLAMA, MISTRAL):
        assert from_hf(values | {"qkv_bias": False}) == from_hf(values)


def test_absent_values_mean_what_transformers_takes_them_to_mean():
    optional = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling")
    optional += ("tie_word_embeddings", "eos_token_id", "bos_token_id", "attention_bias")
    for family, values in PUBLISHED.items():
        less = {key: value for key, value in values.items() if key not in optional}
        # these must say it: their own default is a number
        says = family in ("qwen2_moe", "qwen3_moe", "mistral")
        less["num_key_value_heads"] = values["num_attention_heads"] if says else None
        theirs = transformers.AutoConfig.for_model(**less)
        config = from_hf(less)
        assert config.num_kv_heads == theirs.num_key_value_heads == theirs.num_attention_heads
        width = theirs.hidden_size // theirs.num_attention_heads
        assert config.head_dim == getattr(theirs, "head_dim", width)
        assert config.rms_norm_eps == theirs.rms_norm_eps
        assert config.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
        assert config.tied_embeddings == theirs.tie_word_embeddings
        assert config.bos_token_id == theirs.bos_token_id, family
        assert config.eos_token_ids == (() if theirs.eos_token_id is None else (2,))


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_writes_reads_and_is_written_back(name, tmp_path):
    theirs = make_config(name)
    theirs.architectures = [type(theirs).__name__.replace("Config", "ForCausalLM")]
    written = json.loads(theirs.to_json_string(use_diff=False))
    config = from_hf(written)
    back = to_hf(config)
    assert from_hf(json.loads(json.dumps(back))) == config
    (tmp_path / "config.json").write_text(json.dumps(back))
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    for key in back:
        if key in ("rope_theta", "rope_scaling", "torch_dtype"):  # the older names of others
            continue
        if key in ("dtype", "head_dim"):  # said aloud by us, by default or not at all by them
            continue
        if key == "num_nextn_predict_layers":  # what predicts further tokens is not kept
            assert getattr(again, key) == 0
            continue
        if key in ("scoring_func", "topk_method", "moe_layer_freq", "ep_size"):  # of other engines
            continue
        expected = getattr(theirs, key)
        if key == "rope_parameters":
            expected = {k: v for k, v in expected.items() if v is not None}
            ours = {k: v for k, v in getattr(again, key).items() if k in expected}
            assert ours == expected
        else:
            assert getattr(again, key) == expected, key


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_survive_the_round_trip(family):
    config = from_hf(PUBLISHED[family])
    assert from_hf(json.loads(json.dumps(to_hf(config, dtype="bfloat16")))) == config


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "moonshotai/Moonlight-16B-A3B"])
def test_an_exported_deepseek_says_what_its_router_computes(name):
    """vLLM looks for the router's bias only if `topk_method` is there; SGLang fails without it."""
    values = KNOWN_MODELS[name]
    written = to_hf(from_hf(values))
    for key in ("scoring_func", "topk_method"):
        assert written[key] == values[key]
    assert (written["moe_layer_freq"], written["num_nextn_predict_layers"]) == (1, 0)
    assert from_hf(written) == from_hf(values)


def test_older_and_newer_rope_layouts_mean_the_same():
    yarn = {"factor": 4.0, "original_max_position_embeddings": 1024}
    older = from_hf(QWEN2 | {"rope_scaling": {"type": "yarn", **yarn}})
    parameters = {"rope_type": "yarn", "rope_theta": 1e6, **yarn}
    newer = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
    assert from_hf(newer | {"rope_parameters": parameters}) == older
    assert from_hf(newer | {"rope_parameters": parameters, "rope_scaling": parameters}) == older
    assert older.rope.original_max_positions == 1024


def test_rope_is_written_in_both_layouts():
    """Version 4 of `transformers` reads 10,000 where the older one is missing."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    for scaling in (None, yarn):
        written = to_hf(from_hf(QWEN2 | {"rope_scaling": scaling}))
        assert written["rope_theta"] == 1e6
        assert written["rope_parameters"].pop("rope_theta") == 1e6
        if scaling is None:
            assert written["rope_scaling"] is None
            assert written["rope_parameters"] == {"rope_type": "default"}
        else:
            assert written["rope_scaling"] == written["rope_parameters"]
            assert scaling.items() <= written["rope_scaling"].items()


def test_yarn_stretches_what_a_sequence_may_have():
    """As the card of Qwen3 describes it: the file's own number of positions stays as it is."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = from_hf(QWEN3 | {"rope_scaling": scaling})
    assert config.most_positions == 131_072
    assert to_hf(config)["max_position_embeddings"] == 40960
    assert from_hf(QWEN3).most_positions == 40960
    less = from_hf(QWEN3 | {"rope_scaling": scaling | {"factor": 1.0}})
    assert less.most_positions == 40960
    assert from_hf(LLAMA).most_positions == LLAMA["max_position_embeddings"]
    vast = from_hf(QWEN3 | {"rope_scaling": scaling | {"factor": 1e30}})
    assert vast.most_positions == 2**31 - 1


def test_yarn_context_defaults():
    rope = from_hf(_scaled(rope_type="yarn", factor=4.0)).rope
    assert rope.original_max_positions == QWEN2["max_position_embeddings"]
    rope = from_hf(
        _scaled(rope_type="yarn", factor=None, original_max_position_embeddings=8192)
    ).rope
    assert rope.factor == 4.0
    zeros = {"mscale": 0, "mscale_all_dim": 0.0, "beta_fast": 0, "beta_slow": None}
    assert from_hf(_scaled(type="yarn", factor=4.0, **zeros)).rope == dataclasses.replace(
        rope, original_max_positions=32768
    )
    beside = _scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192)
    beside["original_max_position_embeddings"] = 4096
    assert from_hf(beside).rope.original_max_positions == 4096


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {**QWEN3, "model_type": "qwen4_moe"},
            ["'qwen4_moe' is not supported; known: deepseek_v3,"],
        ),
        ({**QWEN3, "model_type": "mixtral"}, ["'mixtral' is not supported; known: deepseek_v3,"]),
        ({**QWEN3, "model_type": "olmo"}, ["'olmo'", "llama, mistral, qwen2, qwen2_moe, qwen3"]),
        ({**QWEN3, "num_experts": 8}, ["num_experts", "'qwen3'", "8"]),
        ({**QWEN3_MOE, "num_experts": 0}, ["num_experts", "0"]),
        ({**QWEN3_MOE, "num_experts": 7}, ["num_experts_per_tok", "7", "8"]),
        ({**QWEN3_MOE, "num_local_experts": 64}, ["num_experts", "num_local_experts", "differ"]),
        ({**QWEN3_MOE, "num_experts_per_tok": 1.5}, ["num_experts_per_tok", "1.5"]),
        ({**QWEN3_MOE, "moe_intermediate_size": "768"}, ["moe_intermediate_size", "'768'"]),
        ({**QWEN3_MOE, "num_experts": 2**31}, ["num_experts", "2147483648"]),
        ({**QWEN3_MOE, "num_experts": 2**30}, ["experts", "more than any machine"]),
        ({**QWEN3_MOE, "num_hidden_layers": 10**9}, ["num_layers", "65,536", "1000000000"]),
        ({**QWEN3_MOE, "norm_topk_prob": 1}, ["norm_topk_prob", "1"]),
        ({**QWEN3_MOE, "router_aux_loss_coef": -1.0}, ["router_aux_loss_coef", "-1.0"]),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, ["decoder_sparse_step", "2"]),
        ({**QWEN3_MOE, "mlp_only_layers": [0, 3]}, ["mlp_only_layers", "[0, 3]"]),
        ({**QWEN3_MOE, "num_key_value_heads": None}, ["num_key_value_heads", "missing"]),
        ({**QWEN3_MOE, "n_shared_experts": 1}, ["n_shared_experts", "1"]),
        ({**QWEN3_MOE, "scoring_func": "sigmoid"}, ["scoring_func", "'sigmoid'"]),
        (
            {**QWEN3_MOE, "shared_expert_intermediate_size": 768},
            ["shared_expert_intermediate_size", "768", "'qwen3_moe'"],
        ),
        (
            {**QWEN2_MOE, "shared_expert_intermediate_size": 0},
            ["shared_expert_width", "from 1", "0"],
        ),
        ({**QWEN2_MOE, "shared_expert_intermediate_size": 2**31}, ["shared_expert_width"]),
        *(
            ({**KNOWN_MODELS["deepseek-ai/DeepSeek-V3"], key: None}, [key, "found null"])
            for key in ("norm_topk_prob", "rope_interleave")
        ),
        ({**QWEN2_MOE, "decoder_sparse_step": 2}, ["decoder_sparse_step", "2"]),
        ({**QWEN2_MOE, "mlp_only_layers": [0]}, ["mlp_only_layers", "[0]"]),
        ({**QWEN2_MOE, "n_shared_experts": 1}, ["n_shared_experts", "'qwen2_moe'"]),
        ({**QWEN2_MOE, "qkv_bias": False}, ["qkv_bias"]),
        ({**QWEN2_MOE, "use_sliding_window": True}, ["qwen2_moe", "sliding_window=0", "32768"]),
        ({**QWEN3, "model_type": "gemma3"}, ["'gemma3'"]),
        ({**QWEN3, "model_type": None}, ["model_type", "missing"]),
        ({**QWEN3, "model_type": ["qwen3"]}, ["model_type"]),
        ({**QWEN3, "architectures": ["Qwen3ForSequenceClassification"]}, ["SequenceClass"]),
        ({**QWEN3, "architectures": ["Qwen3Model"]}, ["Qwen3Model", "Qwen3ForCausalLM"]),
        ({**QWEN3, "hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ({**QWEN3, "attention_dropout": 0.1}, ["attention_dropout", "0.1"]),
        ({**QWEN3, "is_causal": False}, ["is_causal False", "only True"]),
        ({**QWEN3, "quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({**QWEN3, "auto_map": {"AutoModelForCausalLM": "modeling.X"}}, ["auto_map"]),
        ({**QWEN3, "per_layer_config": {"0": {"head_dim": 2}}}, ["per_layer_config"]),
        ({**QWEN3, "mlp_bias": True}, ["mlp_bias", "qwen3"]),
        ({**QWEN2, "qkv_bias": False}, ["qkv_bias"]),
        ({**LLAMA, "pretraining_tp": 2}, ["pretraining_tp", "2"]),
        ({**LLAMA, "partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({**LLAMA, "sliding_window": 4096}, ["sliding_window", "4096"]),
        ({**LLAMA, "attention_chunk_size": 64}, ["attention_chunk_size"]),
        ({**LLAMA, "layer_types": [SLIDING] * 16}, [SLIDING, "only 'full_attention'"]),
        ({**QWEN2, "layer_types": [FULL] * 23 + [SLIDING]}, [SLIDING, "use_sliding_window true"]),
        ({**QWEN2, "layer_types": ["chunked_attention"] * 24}, ["chunked_attention", SLIDING]),
        ({**QWEN2, "layer_types": [FULL] * 23}, ["layer_types", "23", "24"]),
        ({**QWEN2, "layer_types": FULL}, ["layer_types", "list"]),
        ({**QWEN2, "use_sliding_window": "yes"}, ["use_sliding_window", "'yes'"]),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 0}, ["sliding_window", "0"]),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 2.5}, ["max_window", "2.5"]),
        ({**QWEN2, "use_sliding_window": True, "num_hidden_layers": 10**9}, ["num_layers"]),
        (
            {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 9}
            | {"layer_types": [SLIDING, FULL] * 24},
            ["layer_types", FULL, "qwen3_moe", "every layer"],
        ),
        ({**MISTRAL, "sliding_window": 4096.0}, ["sliding_window", "4096.0"]),
        ({**MISTRAL, "sliding_window": -1}, ["sliding_window", "-1"]),
        ({**MISTRAL, "sliding_window": None, "layer_types": [SLIDING] * 32}, ["needs a sliding"]),
        ({**MISTRAL, "attention_bias": True}, ["a mistral model has attention_bias=False"]),
        ({**MISTRAL, "num_key_value_heads": None}, ["num_key_value_heads", "missing"]),
        (_scaled(rope_type="dynamic", factor=2.0), ["dynamic"]),
        (_scaled(rope_type="longrope", factor=2.0), ["longrope"]),
        (_scaled(type="mrope", mrope_section=[1, 2, 3]), ["mrope"]),
        (_scaled(rope_type="default", mrope_section=[1, 2, 3]), ["mrope_section"]),
        (_scaled(rope_type="linear", factor=2.0, partial_rotary_factor=0.5), ["partial_rotary"]),
        (_scaled(rope_type="linear"), ["factor"]),
        (_scaled(rope_type="yarn", factor=2.0, beta_quick=3), ["beta_quick"]),
        (
            _scaled(rope_type="yarn", factor=4.0, attn_factor=0.878),
            ["'attn_factor', which transformers ignores: remove it", "attention_factor"],
        ),
        (_scaled(rope_type="yarn", original_max_position_embeddings="8k"), ["8k"]),
        (_scaled(rope_type="llama3", factor=2.0, low_freq_factor=1.0), ["high_freq_factor"]),
        (_scaled(full_attention={"rope_type": "default"}), ["full_attention"]),
        (QWEN2 | {"rope_scaling": "yarn"}, ["rope_scaling"]),
        (
            _scaled(type="linear", factor=2.0)
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            ["rope_scaling", "rope_parameters", "differ"],
        ),
        *(  # transformers would take theta for 10,000
            (
                _NO_THETA | {"rope_scaling": _LINEAR, "rope_parameters": {"rope_theta": 1e6} | one},
                ["rope_scaling", "rope_parameters", "differ"],
            )
            for one in (_LINEAR, {})
        ),
        (
            QWEN2 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            ["rope_theta", "1000000", "10000.0"],
        ),
        ({**QWEN3, "num_attention_heads": 15}, ["15", "8"]),
        ({**QWEN3, "head_dim": 127}, ["head_dim", "127"]),
        ({**QWEN3, "hidden_size": 0}, ["hidden_size", "0"]),
        ({**QWEN3, "num_hidden_layers": 2.5}, ["num_layers", "2.5"]),
        ({**QWEN3, "rms_norm_eps": -1.0}, ["rms_norm_eps", "-1.0"]),
        ({**QWEN3, "tie_word_embeddings": "yes"}, ["tied_embeddings", "'yes'"]),
        ({**QWEN3, "eos_token_id": ["<end>"]}, ["<end>"]),
        ({**QWEN2, "hidden_size": 897}, ["head_dim", "897", "14"]),
        ({**LLAMA, "hidden_size": 2049}, ["2049", "32"]),
        ({key: QWEN3[key] for key in QWEN3 if key != "vocab_size"}, ["vocab_size", "missing"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_refused_by_name_in_one_line(values, words):
    with pytest.raises(InputError) as caught:
        from_hf(values, where="folder/config.json")
    message = str(caught.value)
    assert message.startswith("folder/config.json: ")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_window_that_no_layer_uses_is_none():
    assert from_hf(QWEN2 | {"use_sliding_window": True, "max_window_layers": 24}) == from_hf(QWEN2)
    assert from_hf(QWEN2 | {"layer_types": [FULL] * 24}) == from_hf(QWEN2)
    assert from_hf(QWEN2).window_sizes is None


def test_windows_are_those_of_some_layers_or_of_all():
    def read(values, **more):
        config = from_hf(values | more)
        return config.sliding_window, config.window_layers

    assert read(MISTRAL) == (4096, (True,) * 32)
    assert read(MISTRAL, sliding_window=None) == (0, ())
    del (absent := dict(MISTRAL))["sliding_window"]
    assert read(absent) == (4096, (True,) * 32)
    used = {"use_sliding_window": True, "sliding_window": 7}
    assert read(QWEN2, **used) == (7, (False,) * 21 + (True,) * 3)
    assert read(QWEN2, **used, layer_types=[SLIDING, FULL] * 12) == (7, (True, False) * 12)
    assert read(QWEN3_MOE, **used) == (7, (True,) * 48)
    alternating = from_hf(QWEN2 | used | {"layer_types": [FULL, SLIDING] * 12})
    np.testing.assert_array_equal(alternating.window_sizes, [2**31 - 1, 7] * 12)
    assert alternating.with_layers(4).window_layers == (True,) * 4
    assert alternating.with_layers(48).window_layers == (False, False, True, True) * 12
    assert from_hf(QWEN2 | used).with_layers(4).window_layers == (False, False, False, True)
    first = dataclasses.replace(alternating, window_layers=(True,) + (False,) * 23)
    assert first.with_layers(2) == from_hf(QWEN2).with_layers(2)
    assert hash(first) != hash(alternating)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": True}, "sliding_window must be .* found True"),
        ({"sliding_window": 2**31}, "sliding_window must be .* found 2147483648"),
        ({"sliding_window": 0}, r"window_layers must be \(\) without a sliding_window"),
        ({"window_layers": [True] * 32}, "window_layers must be a tuple"),
        ({"window_layers": (1,) * 32}, "window_layers must be a tuple"),
        ({"window_layers": (True,) * 31}, "31 entries for 32 layers"),
        ({"window_layers": (False,) * 32}, "no layer for sliding_window 4096"),
        ({"window_layers": (True, False) * 16}, "a mistral model has its sliding_window in every"),
        ({"model_type": "llama"}, "a llama model has sliding_window=0, found 4096"),
    ],
)
def test_windows_that_do_not_fit_are_refused_by_name(change, words):
    with pytest.raises(InputError, match=words):
        dataclasses.replace(from_hf(MISTRAL), **change)


@st.composite
def windowed(draw):
    """The contents of a config.json, most of them with a window."""
    layers = draw(st.integers(1, 6))
    families = sorted(PUBLISHED.keys() - {"llama", "qwen2_moe"})  # which have none here
    values = PUBLISHED[draw(st.sampled_from(families))] | {"num_hidden_layers": layers}
    choices = {
        "sliding_window": st.none() | st.integers(1, 2**31 - 1),
        "use_sliding_window": st.sampled_from([True, True, False]),
        "max_window_layers": st.integers(-1, 7),
        "layer_types": st.lists(st.sampled_from([FULL, SLIDING]), min_size=layers, max_size=layers),
    }
    for key in draw(st.sets(st.sampled_from(sorted(choices)))):
        values[key] = draw(choices[key])
    absent = draw(st.sets(st.sampled_from(["sliding_window", "max_window_layers"])))
    return {key: value for key, value in values.items() if key not in absent}


@settings(max_examples=300, deadline=None)
@given(values=windowed())
def test_windows_mean_what_transformers_takes_them_to_mean(values):

    def sizes(theirs):
        every = [theirs.sliding_window or 0] * theirs.num_hidden_layers
        if theirs.model_type not in ("qwen2", "qwen3"):
            return every
        return [n * (kind == SLIDING) for n, kind in zip(every, theirs.layer_types, strict=True)]

    theirs = transformers.AutoConfig.for_model(**values)
    kinds = [SLIDING if n else FULL for n in sizes(theirs)]
    # one would fail in their forward, the other is not looked at
    if values.get("layer_types") not in (None, kinds):
        with pytest.raises(InputError, match="layer_types"):
            from_hf(values)
        return
    config = from_hf(values)
    ours = config.window_layers or (False,) * config.num_layers
    assert [config.sliding_window * own for own in ours] == sizes(theirs)
    written = json.loads(json.dumps(to_hf(config)))
    assert from_hf(written) == config
    assert sizes(transformers.AutoConfig.for_model(**written)) == sizes(theirs)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2"},
        {"model_type": "llama"},
        {"mlp_bias": True},
        {"output_bias": True},
        {"model_type": "gpt2"},
    ],
)
def test_a_value_that_could_not_be_saved_cannot_be_made(change):
    with pytest.raises(InputError, match=r"qwen2|qwen3|llama"):
        dataclasses.replace(from_hf(QWEN3), **change)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None)
@given(family=st.sampled_from(sorted(PUBLISHED)), data=st.data(), value=_JSON)
def test_any_value_is_read_or_refused(family, data, value):
    values = copy.deepcopy(PUBLISHED[family])
    more = ("rope_parameters", "layer_types", "auto_map", "mlp_bias", "sliding_window")
    keys = [*sorted(values), *more, "use_sliding_window", "max_window_layers"]
    inside = values.get("rope_scaling")
    if inside and data.draw(st.booleans()):
        inside[data.draw(st.sampled_from(sorted(inside)))] = value
    else:
        values[data.draw(st.sampled_from(keys))] = value
    try:
        config = from_hf(values)
    except InputError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert from_hf(to_hf(config)) == config
    assert "\n" not in refusal


def test_models_compute_alike_whatever_is_only_recorded():
    config = from_hf(QWEN3)
    recorded = {"max_positions": 7, "initializer_range": 0.5, "eos_token_ids": (3,)}
    assert config.computes_as(
        dataclasses.replace(config, pad_token_id=1, bos_token_id=2, **recorded)
    )
    assert not config.computes_as(dataclasses.replace(config, rms_norm_eps=1e-3))
