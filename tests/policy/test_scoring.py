"""Log-probs of responses and their gradients, against float64; memory; a buffer without padding."""

from dataclasses import replace
from functools import partial
from typing import Any

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import reference_log_probs
from reference import reference_logits as logits_in_float64

from tim_jax.common.types import Rollout
from tim_jax.instruments.auditing import PRESETS, random_params
from tim_jax.model import packing
from tim_jax.model.execution import Execution, Sampling
from tim_jax.model.weights import parameter_shapes
from tim_jax.numerics import EXACT_F32, FAMILIES, NATIVE_F32, Numerics, Rows
from tim_jax.policy import scoring

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
    return jax.jit(execution.prepare)(params)


def test_sequences_join_prompt_and_response():
    rollout = rollout_of(CONFIGS["llama"])
    joined = np.asarray(jax.jit(scoring.sequences)(rollout))
    assert joined.shape == (3, 16)
    for row in range(3):
        tokens, _ = tokens_of(rollout, row)
        np.testing.assert_array_equal(joined[row, : len(tokens)], tokens)
    assert ((joined >= 0) & (joined < 41)).all()


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "numerics"), quick.pairs(list(CONFIGS), {"tiles": EXACT_F32, "native": NATIVE_F32})
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


# --- sequences in a buffer without padding: every bit of the padded rows, and their gradients -----

PROMPT, RESPONSE = 9, 40


def ragged(vocabulary: int, rows: int = 5, seed: int = 0, longest: int = RESPONSE) -> Rollout:
    """Random tokens, also behind the ends, in rows of very different lengths; one has none."""
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([[longest, 1, 0], rng.integers(1, longest + 1, rows - 3)])
    zeros = np.zeros((rows, longest), np.float32)
    return Rollout(
        prompts=jnp.asarray(rng.integers(0, vocabulary, (rows, PROMPT)), jnp.int32),
        prompt_lengths=jnp.asarray(rng.integers(1, PROMPT + 1, rows), jnp.int32),
        responses=jnp.asarray(rng.integers(0, vocabulary, (rows, longest)), jnp.int32),
        lengths=jnp.asarray(rng.permutation(lengths), jnp.int32),
        log_probs=jnp.asarray(zeros),
        finished=jnp.ones((rows,), bool),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_loops_turn_as_often_as_is_counted(family):
    longest, rng = 1500, np.random.default_rng(0)
    grouping = packing.grouping(family)
    kinds = [(loop.rows, loop.keys) for loop in grouping.loops(np.zeros(20), longest, 20)]

    def one(counts, part):
        rows = part.positions.size
        keys = part.keys_of(jnp.zeros((1, 1))).shape[1]
        return counts.at[kinds.index((rows, keys))].add(1)

    @jax.jit
    def folded(lengths):
        where = packing.Packing(jnp.zeros_like(lengths), lengths, longest)
        return grouping.fold(one, jnp.zeros(len(kinds), jnp.int32), where, 0)

    for scale in (30, 300, 1500):
        lengths = np.clip(np.sort(rng.integers(-9, scale, 20))[::-1], 0, None).astype(np.int32)
        counted = [loop.times for loop in grouping.loops(lengths, longest, 20)]
        assert folded(jnp.asarray(lengths)).tolist() == counted


@partial(jax.jit, static_argnames="size")
def lay_out(rollout, size):
    """A layout's arrays; each target, and the token before it, back in its response; the sequences.

    It is one program, which compiles sooner than many small ones.
    """
    found = scoring.packed(rollout, size)
    before = found.predicting(found.tokens.astype(jnp.float32))
    targets = found.targets.astype(jnp.float32)
    parts = found.packing.starts, found.packing.lengths, found.tokens, found.positions, found.used
    by_response = found.by_response(before), found.by_response(targets)
    return parts, *by_response, scoring.sequences(rollout), rollout.mask


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([(3, 12), (9, 1), (6, 7)]), st.booleans())
def test_every_token_lies_once_and_in_its_place(seed, shape, full):
    rows, longest = shape  # each is compiled
    rollout = ragged(1000, rows, seed, longest)
    if full:  # then so is the buffer
        most = {"prompt_lengths": PROMPT, "lengths": longest}
        rollout = replace(rollout, **{k: jnp.full((rows,), n, jnp.int32) for k, n in most.items()})
    prompts, responses = np.asarray(rollout.prompt_lengths), np.asarray(rollout.lengths)
    wholes = np.where(responses > 0, prompts + responses, 0)
    size = rows * (PROMPT + longest)
    found, before, targets, joined, mask = jax.device_get(lay_out(rollout, size))
    starts, lengths, tokens, positions, used = found
    order = np.argsort(-wholes, kind="stable")
    np.testing.assert_array_equal(lengths, wholes[order])
    for start, row in zip(starts, order, strict=True):
        own = slice(start, start + wholes[row])
        np.testing.assert_array_equal(tokens[0, own], joined[row, : wholes[row]])
        np.testing.assert_array_equal(positions[0, own], np.arange(int(wholes[row])))
    assert int(used) == responses.sum()
    # What predicts a token is the one before it, and its value comes back to its place.
    at = prompts[:, None] - 1 + np.arange(longest)
    expected = np.take_along_axis(joined, at, axis=1)
    np.testing.assert_array_equal(before, np.where(mask, expected, 0))
    np.testing.assert_array_equal(targets, np.where(mask, np.asarray(rollout.responses), 0))


@pytest.mark.parametrize("longest", [1, 63, 64, 100, 1000, 10**6])
def test_every_chunk_has_the_keys_that_it_sees_and_few_more(longest):
    chunks = packing.grouping("tiles")
    assert isinstance(chunks, packing.Chunks)
    spans = chunks.spans(longest)
    assert [first for first, _, _ in spans] == [0, *(stop for _, stop, _ in spans[:-1])]
    assert [keys for _, _, keys in spans] == [
        min(stop * chunks.rows, longest) for _, stop, _ in spans
    ]
    assert spans[-1][2] == longest
    for first, stop, _ in spans:
        assert 4 * (stop - first - 1) <= max(first - 3, 0)
    # Each is compiled.
    assert len(chunks.spans(300)) == 5
    assert len(chunks.spans(32_768)) < 32


def test_classes_are_made_of_whole_units():
    tpu, gpu = packing.grouping("pallas_tpu"), packing.grouping("pallas_gpu")
    assert isinstance(tpu, packing.Groups)
    assert isinstance(gpu, packing.Groups)
    assert tpu.classes(1408) == [1536, 1024, 768, 512, 256]
    assert gpu.classes(1408) == [1408, 1024, 768, 512, 384, 256, 128]
    assert tpu.classes(100) == [256]
    assert len(gpu.classes(16_384)) == 8


SMALL = replace(tiny.NUMERICS, column_tiles=1)
CASES = {
    "float32": (tiny.CONFIG, SMALL),
    "bfloat16": (PRESETS["qwen3-awkward"], tiny.BF16),
    "windows": (PRESETS["windowed-awkward"], SMALL),
    "latent": (PRESETS["mla-awkward"], SMALL),  # with experts, see also tests/rl/test_routing.py
    "gpu": (interpreted.CONFIG, interpreted.with_dtype(interpreted.GPU, "bfloat16")),
}


@pytest.mark.parametrize("case", quick.some(list(CASES), 0))
def test_a_buffer_has_the_bits_of_padded_rows(case, monkeypatch):
    monkeypatch.setattr(packing, "_SHORTEST", 20)
    # Several chunks of a span, or groups of a class; the lengths of a device are whole blocks.
    grouping = packing.Groups(80, 16) if case == "gpu" else packing.Chunks(16)
    monkeypatch.setattr(packing, "_WIDER", 2)
    monkeypatch.setattr(packing, "grouping", lambda family: grouping)
    config, numerics = CASES[case]
    params = jax.tree.map(jnp.asarray, random_params(config, 0))
    execution = Execution(config, numerics, Sampling(RESPONSE))
    rollout = ragged(config.vocab_size)
    size = int((rollout.prompt_lengths + rollout.lengths).sum()) + 3
    weights = jax.jit(execution.prepare)(params)

    @partial(jax.jit, static_argnames="buffer")
    def differentiated(weights, buffer):
        def loss(weights):
            scores = scoring.score(
                weights, rollout, execution=execution, entropy_gradient=True, buffer=buffer
            )
            values = jnp.where(rollout.mask, scores.log_probs - scores.entropy, 0.0)
            return jnp.sum(
                values * jnp.cos(jnp.arange(RESPONSE, dtype=jnp.float32))[None, :]
            ), scores

        return jax.grad(loss, has_aux=True)(weights)

    (gradient, scores), (expected, padded) = (differentiated(weights, n) for n in (size, None))
    mask = np.asarray(rollout.mask)
    assert mask.sum() > 60
    for one, other in zip(scores[:2], padded[:2], strict=True):
        assert tiny.bits(np.asarray(one)[mask]) == tiny.bits(np.asarray(other)[mask])
        assert not np.asarray(one)[~mask].any()
    close = 1e-5 if numerics.compute_dtype == "float32" else 2e-2
    for one, other in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        np.testing.assert_allclose(one, other, atol=close * np.abs(other).max())


def test_a_buffer_holds_the_tokens_that_there_are():
    """And not the widths that the rows are padded to."""
    rollout = ragged(10, longest=20)
    wider = replace(rollout, responses=jnp.pad(rollout.responses, ((0, 0), (0, 99))))
    size = int((rollout.prompt_lengths + rollout.lengths).sum())
    longest = []

    @jax.jit
    def lay_out(rollout):
        found = scoring.packed(rollout, size)
        longest.append(found.packing.longest)
        return (found.tokens, found.positions, found.rows, found.target), found.targets, found.used

    (found, targets, _), (expected, others, used) = (lay_out(x) for x in (wider, rollout))
    assert longest[0] == min(size, PROMPT + 119)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(np.asarray(targets)[: int(used)], np.asarray(others)[: int(used)])
