"""Rotary frequencies against `transformers` and against the float64 definitions."""

import importlib
import math

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import reference_frequencies
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tim_jax.common.errors import InputError
from tim_jax.model.config import ModelConfig
from tim_jax.model.config_file import to_hf
from tim_jax.model.rope import RopeConfig, frequencies

LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_positions": 8192,
}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_positions": 32768}
ROPES = [
    RopeConfig(),
    RopeConfig(theta=1e6),
    RopeConfig(kind="linear", theta=5e5, factor=3.0),
    RopeConfig(**LLAMA3, theta=5e5),
    RopeConfig(**(LLAMA3 | {"factor": 32.0, "original_max_positions": 100})),
    RopeConfig(**YARN, theta=1e6),
    RopeConfig(**YARN, truncate=False),
    RopeConfig(**YARN, beta_fast=7.0, beta_slow=0.3, mscale=0.707, mscale_all_dim=1.2),
    RopeConfig(**YARN, attention_factor=1.5, mscale=2.0, mscale_all_dim=1.0),
    RopeConfig(**YARN, mscale=2.0),
    RopeConfig(kind="yarn", factor=2.0, original_max_positions=4),
    RopeConfig(kind="yarn", factor=1.0, original_max_positions=64),
]


def _transformers_frequencies(rope, head_dim):
    pytest.importorskip("torch")
    values = {"rope_type": rope.kind, "rope_theta": rope.theta}
    config = transformers.LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=values | _written(rope),
    )
    if rope.kind == "default":
        llama = importlib.import_module("transformers.models.llama.modeling_llama")
        return llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope.kind](config)


def _written(rope):
    """The rope part of a config.json that holds `rope`."""
    sizes = dict.fromkeys(
        ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"), 1
    )
    config = ModelConfig(
        model_type="llama", **sizes, head_dim=2, intermediate_size=1, max_positions=8, rope=rope
    )
    return to_hf(config)["rope_parameters"]


@pytest.mark.parametrize("head_dim", [2, 6, 10, 64, 128])
@pytest.mark.parametrize("rope", ROPES, ids=range(len(ROPES)))
def test_equal_to_transformers_to_the_last_bits(rope, head_dim):
    expected, scale = _transformers_frequencies(rope, head_dim)
    inv_freq, attention_scaling = frequencies(rope, head_dim)
    assert inv_freq.dtype == np.float32
    assert inv_freq.shape == (head_dim // 2,)
    # torch and NumPy may round a power differently; all else is the same steps
    np.testing.assert_array_max_ulp(inv_freq, expected.numpy(), maxulp=2)
    assert attention_scaling == pytest.approx(scale, rel=1e-15)


@pytest.mark.parametrize("rope", ROPES, ids=range(len(ROPES)))
def test_near_the_float64_definition(rope):
    inv_freq, scale = frequencies(rope, 64)
    expected, expected_scale = reference_frequencies(rope, 64)
    # rounding an exponent to float32 is worth up to ln(theta) / 2 last bits
    np.testing.assert_allclose(inv_freq, expected, rtol=1e-6 + 1e-7 * math.log(rope.theta))
    assert scale == pytest.approx(expected_scale, rel=1e-14)


@settings(max_examples=100, deadline=None)
@given(
    theta=st.floats(10.0, 1e7),
    head_dim=st.integers(1, 128).map(lambda half: 2 * half),
    factor=st.floats(1.0, 64.0),
    original=st.integers(8, 10**5),
)
def test_scaled_frequencies_lie_between_plain_and_plain_over_factor(
    theta, head_dim, factor, original
):
    plain, _ = frequencies(RopeConfig(theta=theta), head_dim)
    yarn = RopeConfig(kind="yarn", theta=theta, factor=factor, original_max_positions=original)
    llama3 = RopeConfig(
        **(LLAMA3 | {"factor": factor, "original_max_positions": original}), theta=theta
    )
    for rope in (yarn, llama3):
        scaled, _ = frequencies(rope, head_dim)
        assert (scaled <= plain * np.float32(1 + 1e-6)).all()
        assert (scaled >= plain / np.float32(factor) * np.float32(1 - 1e-6)).all()


def test_a_factor_of_one_changes_nothing():
    plain, _ = frequencies(RopeConfig(), 32)
    same, scale = frequencies(RopeConfig(kind="linear", factor=1.0), 32)
    np.testing.assert_array_equal(plain, same)
    assert scale == 1.0
    assert frequencies(RopeConfig(kind="yarn", factor=1.0, original_max_positions=9), 32)[1] == 1.0


def test_the_first_pair_turns_one_radian_per_position():
    for rope in ROPES:
        if rope.kind != "linear" and rope.original_max_positions != 4:
            assert frequencies(rope, 64)[0][0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"kind": "dynamic", "factor": 2.0}, "dynamic"),
        ({"kind": "longrope"}, "longrope"),
        ({"kind": "lama3"}, "llama3"),
        ({"kind": "linear"}, "factor"),
        ({"kind": "linear", "factor": 0.5}, "0.5"),
        ({"kind": "linear", "factor": "2"}, "'2'"),
        ({"kind": "linear", "factor": math.nan}, "nan"),
        (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor"),
        (LLAMA3 | {"original_max_positions": 8192.5}, "whole"),
        (LLAMA3 | {"original_max_positions": None}, "original_max_positions"),
        (YARN | {"factor": None}, "factor"),
        (YARN | {"beta_fast": 0.5}, "beta_fast"),
        (YARN | {"truncate": 1}, "truncate"),
        (YARN | {"attention_factor": -1.0}, "attention_factor"),
        ({"theta": 1.0}, "theta"),
        ({"theta": math.inf}, "theta"),
        ({"theta": 10**400}, "theta"),
        ({"theta": True}, "theta"),
    ],
)
def test_bad_values_are_refused_by_name(values, word):
    with pytest.raises(InputError, match=word):
        RopeConfig(**values)


@pytest.mark.parametrize("head_dim", [0, -2, 7])
def test_odd_and_empty_heads_are_refused(head_dim):
    with pytest.raises(InputError, match=str(head_dim)):
        frequencies(RopeConfig(), head_dim)
