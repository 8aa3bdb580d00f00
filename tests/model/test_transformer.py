"""The forward against torch `transformers` and the float64 reference, for every family and rope."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from checkpoints import CASES, make_model, torch_logits
from reference import reference_logits

from tim_jax.model import hf, rope, transformer
from tim_jax.model.execution import Execution
from tim_jax.numerics import EXACT_BF16, EXACT_F16, EXACT_F32, NATIVE_F32

TOKENS = np.random.default_rng(1).integers(0, 101, 43)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Of a case: its logits by torch in float32, its configuration and its parameters."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = make_model(name)
            model.save_pretrained(folder)
            config = hf.load_config(folder)
            made[name] = torch_logits(model, TOKENS), config, hf.load_params(folder, config)
        return made[name]

    return get


@partial(jax.jit, static_argnames="execution")
def _logits(params, tokens, *, execution):
    """f32[B, T, V] of i32[B, T], without a cache."""
    weights = execution.prepare(params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _, _ = transformer.forward(weights, tokens, positions, execution=execution)
    rows = hidden.reshape(-1, hidden.shape[-1])
    logits = transformer.logits(weights, rows, execution=execution)
    return logits.reshape(*tokens.shape, -1)


def _one(params, config, numerics):
    """[T, V] of TOKENS, computed beside a row of other tokens."""
    batch = jnp.asarray(np.stack([TOKENS[::-1], TOKENS]), jnp.int32)
    return np.asarray(_logits(params, batch, execution=Execution(config, numerics)))[1]


def _error(found, expected):
    """Largest difference relative to the largest logit."""
    return np.abs(found - expected).max() / np.abs(expected).max()


EACH = pytest.mark.parametrize(
    ("name", "numerics"), quick.pairs(list(CASES), {"tiles": EXACT_F32, "native": NATIVE_F32})
)


@EACH
def test_logits_equal_those_of_torch(name, numerics, loaded):
    theirs, config, params = loaded(name)
    assert _error(_one(params, config, numerics), theirs) < 1e-5


@EACH
def test_logits_are_within_rounding_of_float64(name, numerics, loaded):
    _, config, params = loaded(name)
    inv_freq, _ = rope.frequencies(config.rope, config.head_dim)
    exact = reference_logits(params, TOKENS, config, inv_freq=inv_freq)
    assert _error(_one(params, config, numerics), exact) < 5e-6


@pytest.mark.parametrize("name", ["qwen3-bias-yarn", "qwen2", "llama-tied-biases"])
def test_16_bits_stay_within_their_rounding_of_float64(name, loaded):
    _, config, params = loaded(name)
    exact = reference_logits(params, TOKENS, config)

    def error(numerics):
        found = _one(params, config, numerics)
        return np.sqrt(np.mean((found - exact) ** 2)) / np.std(exact)

    # 2^-8 per rounding, through three layers; a wrong term would show at order one
    coarse, fine = error(EXACT_BF16), error(EXACT_F16)
    assert coarse < 0.03
    assert 6 < coarse / fine < 11  # float16 has three more bits
