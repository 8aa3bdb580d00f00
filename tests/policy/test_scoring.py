"""Log-probs of responses and their gradients, against float64; memory of the compiled learner."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny
from reference import reference_log_probs
from reference import reference_logits as logits_in_float64

from tim_jax.common.types import Rollout
from tim_jax.instruments.auditing import PRESETS, random_params
from tim_jax.model.execution import Execution, Sampling
from tim_jax.model.weights import parameter_shapes
from tim_jax.numerics import EXACT_F32, NATIVE_F32, Numerics, Rows
from tim_jax.policy import layout, scoring

STATIC = ("execution", "remat")
score = jax.jit(scoring.score, static_argnames=STATIC)

# one layer fewer than its preset, to compile sooner
CONFIGS = {
    name: replace(PRESETS[name], num_layers=1, vocab_size=41)
    for name in ("qwen3-awkward", "qwen2", "llama")
}
LENGTHS = (1, 9, 4)
RESPONSES = (7, 3, 1)
SAMPLING = Sampling(7, temperature=0.8)


def rollout_of(config, *, seed=0, prompt_size=9, response_size=7):
    """Three sequences of random tokens, ragged on both sides."""
    rng = np.random.default_rng(seed)
    return Rollout(
        prompts=jnp.asarray(rng.integers(0, config.vocab_size, (3, prompt_size)), jnp.int32),
        prompt_lengths=jnp.asarray(LENGTHS, jnp.int32),
        responses=jnp.asarray(rng.integers(0, config.vocab_size, (3, response_size)), jnp.int32),
        lengths=jnp.asarray(RESPONSES, jnp.int32),
        log_probs=jnp.zeros((3, response_size), jnp.float32),
        finished=jnp.ones(3, bool),
    )


def tokens_of(rollout, row):
    """The tokens of a sequence, NumPy, and how many are the prompt's."""
    prompt, response = int(rollout.prompt_lengths[row]), int(rollout.lengths[row])
    parts = rollout.prompts[row, :prompt], rollout.responses[row, :response]
    return np.concatenate([np.asarray(part) for part in parts]), prompt


def execution_of(config, numerics=EXACT_F32, sampling=SAMPLING):
    return Execution(config, numerics, sampling)


def prepared(params, execution):
    return execution.prepare(jax.tree.map(jnp.asarray, params))


def test_sequences_join_prompt_and_response():
    rollout = rollout_of(CONFIGS["llama"])
    joined = np.asarray(layout.sequences(rollout))
    assert joined.shape == (3, 16)
    for row in range(3):
        tokens, _ = tokens_of(rollout, row)
        np.testing.assert_array_equal(joined[row, : len(tokens)], tokens)
    assert ((joined >= 0) & (joined < 41)).all()


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "numerics"),
    quick.pairs(list(CONFIGS), {"tiles": EXACT_F32, "native": NATIVE_F32}),
)
def test_log_probs_and_entropy_against_float64(name, numerics):
    config = CONFIGS[name]
    params, rollout = random_params(config, 0), rollout_of(config)
    execution = execution_of(config, numerics)
    weights = prepared(params, execution)
    found, entropy, energy, *_ = score(weights, rollout, execution=execution)
    assert energy is None  # nobody asked for it
    assert found.dtype == entropy.dtype == jnp.float32
    for row in range(3):
        tokens, prompt = tokens_of(rollout, row)
        exact = reference_log_probs(params, tokens, config, temperature=0.8)[prompt - 1 :]
        np.testing.assert_allclose(found[row, : len(exact)], exact, rtol=2e-5, atol=2e-5)
        logits = logits_in_float64(params, tokens, config)[prompt - 1 : -1] / 0.8
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = -(np.exp(logits) * logits).sum(-1)
        np.testing.assert_allclose(entropy[row, : len(exact)], expected, rtol=1e-4, atol=2e-5)


def test_values_beyond_the_lengths_are_finite():
    config = CONFIGS["llama"]
    execution = execution_of(config)
    weights = prepared(random_params(config, 0), execution)
    found = score(weights, rollout_of(config), execution=execution)
    assert len(jax.tree.leaves(found)) == 2
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("head_rows", quick.some([1, 4, 5, 256], 0, 2))
def test_head_tiles_of_any_size_give_the_same_bits(head_rows):
    """Whatever the tiles, a token gets its own log-prob, and padding rows get none."""
    execution = execution_of(tiny.CONFIG, tiny.NUMERICS)
    tiled = execution_of(tiny.CONFIG, replace(tiny.NUMERICS, head_rows=head_rows))
    weights, rollout = prepared(tiny.params(), execution), rollout_of(tiny.CONFIG)
    whole = score(weights, rollout, execution=execution)
    found = score(weights, rollout, execution=tiled)
    np.testing.assert_array_equal(found[0].view(jnp.int32), whole[0].view(jnp.int32))
    np.testing.assert_allclose(found[1], whole[1], rtol=1e-5)


# --- gradients -------------------------------------------------------------------------------


def gradient_program(execution, *, remat=False):
    """(params, rollout, cotangent f32[B, R]) -> gradient of the sum of cotangent x log-prob."""

    def loss(params, rollout, cotangent):
        weights = execution.prepare(params)
        log_probs = scoring.score(weights, rollout, execution=execution, remat=remat).log_probs
        return jnp.sum(jnp.where(rollout.mask, cotangent * log_probs, 0.0))

    return jax.jit(jax.grad(loss))


def cotangent_of(rollout):
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.standard_normal(rollout.responses.shape), jnp.float32)


def leaves(tree, prefix=""):
    """Name -> leaf."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    named = {}
    for key, node in tree.items():
        named |= leaves(node, f"{prefix}.{key}" if prefix else key)
    return named


def shifted(params, name, change):
    """NumPy float64 copy of params with `change` added to one leaf."""
    if not isinstance(params, dict):
        return np.asarray(params, np.float64) + change
    head, _, rest = name.partition(".")
    return {
        key: shifted(node, rest, change) if key == head else node for key, node in params.items()
    }


@pytest.mark.parametrize("name", quick.some(list(CONFIGS), 0))
def test_gradients_of_every_parameter_against_float64_differences(name):
    """Along one random direction per parameter, by central differences of the reference."""
    config = CONFIGS[name]
    params, rollout = random_params(config, 0), rollout_of(config)
    cotangent = cotangent_of(rollout)
    program = gradient_program(execution_of(config))
    found = leaves(program(jax.tree.map(jnp.asarray, params), rollout, cotangent))

    def loss(params):
        total = 0.0
        for row in range(3):
            tokens, prompt = tokens_of(rollout, row)
            exact = reference_log_probs(params, tokens, config, temperature=0.8)[prompt - 1 :]
            total += exact @ np.asarray(cotangent, np.float64)[row, : len(exact)]
        return total

    rng, step = np.random.default_rng(0), 1e-6
    for leaf, gradient in found.items():
        gradient = np.asarray(gradient, np.float64)
        direction = rng.standard_normal(gradient.shape)
        up, down = (loss(shifted(params, leaf, s * step * direction)) for s in (1, -1))
        slope = (up - down) / (2 * step)
        scale = np.linalg.norm(gradient)  # the slope's own size, but for chance
        assert scale > 0, leaf
        assert abs((gradient * direction).sum() - slope) < 1e-4 * scale, leaf


TRUNCATED = replace(SAMPLING, top_k=12, top_p=0.9)


@pytest.mark.parametrize(
    ("sampling", "remat"),
    quick.some([(SAMPLING, False), (TRUNCATED, True)], 1),
    ids=["plain", "truncated-remat"],
)
def test_gradients_of_the_exact_family_are_those_of_plain_autodiff(sampling, remat):
    config = CONFIGS["qwen3-awkward"]
    params, rollout = jax.tree.map(jnp.asarray, random_params(config, 0)), rollout_of(config)
    args = params, rollout, cotangent_of(rollout)
    # A few columns of the head's gradient at a time here, all of them there.
    in_parts = replace(EXACT_F32, head_gradient_columns=16)
    exact = gradient_program(execution_of(config, in_parts, sampling), remat=remat)(*args)
    plain = gradient_program(execution_of(config, NATIVE_F32, sampling))(*args)
    for (name, found), expected in zip(leaves(exact).items(), leaves(plain).values(), strict=True):
        assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max(), name


@pytest.mark.slow
def test_no_gradient_flows_through_the_entropy():
    execution = execution_of(tiny.CONFIG, tiny.NUMERICS)

    def loss(weights):
        return jnp.sum(scoring.score(weights, rollout_of(tiny.CONFIG), execution=execution).entropy)

    weights = prepared(tiny.params(), execution)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(jax.grad(loss)(weights)))


# --- programs --------------------------------------------------------------------------------


def test_compiles_once_for_all_lengths_and_contents():
    execution, traces = execution_of(tiny.CONFIG, tiny.NUMERICS), []

    @jax.jit
    def program(weights, rollout):
        traces.append(1)
        return scoring.score(weights, rollout, execution=execution)

    weights = prepared(tiny.params(), execution)
    for seed, lengths in enumerate([(1, 2, 3), (9, 9, 9), (4, 1, 8)]):
        rollout = rollout_of(tiny.CONFIG, seed=seed)
        program(weights, replace(rollout, prompt_lengths=jnp.asarray(lengths, jnp.int32)))
    assert len(traces) == 1


def temporary_bytes(rows, *, execution):
    """Of the compiled value-and-gradient program over `rows` sequences of 4 + 60 tokens."""
    of: Any = jax.ShapeDtypeStruct
    rollout = Rollout(
        prompts=of((rows, 4), jnp.int32),
        prompt_lengths=of((rows,), jnp.int32),
        responses=of((rows, 60), jnp.int32),
        lengths=of((rows,), jnp.int32),
        log_probs=of((rows, 60), jnp.float32),
        finished=of((rows,), bool),
    )
    weights = jax.eval_shape(execution.prepare, parameter_shapes(execution.config))

    def loss(weights, rollout):
        log_probs = scoring.score(weights, rollout, execution=execution).log_probs
        return jnp.sum(jnp.where(rollout.mask, log_probs, 0.0)), log_probs

    program = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(weights, rollout)
    analysis = program.compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.slow
def test_memory_does_not_grow_with_tokens_times_vocabulary():
    config = replace(tiny.CONFIG, vocab_size=151_936, num_layers=1)
    numerics = Numerics(rows=Rows(64, 64), attention_rows=Rows(64, 64), whole_kv=True)
    execution = execution_of(config, numerics)
    few, many = (temporary_bytes(rows, execution=execution) for rows in (8, 64))
    logits = 4 * (64 - 8) * 60 * config.vocab_size  # 2 GB, if they all existed
    assert many - few < 0.01 * logits
    assert few < 4 * 4 * numerics.head_rows * config.vocab_size  # a few tiles of them
