"""Sequences in a buffer without padding: every bit of the padded rows, and their gradients."""

from dataclasses import replace
from functools import partial

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tim_jax.common.types import Rollout
from tim_jax.instruments.auditing import PRESETS, random_params
from tim_jax.model import packing
from tim_jax.model.execution import Execution, Sampling
from tim_jax.numerics import FAMILIES
from tim_jax.policy import layout, scoring

PROMPT, RESPONSE = 9, 70


def rollout_of(vocabulary: int, rows: int = 5, seed: int = 0, longest: int = RESPONSE) -> Rollout:
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
    found = layout.packed(rollout, size)
    before = found.predicting(found.tokens.astype(jnp.float32))
    targets = found.targets.astype(jnp.float32)
    parts = found.packing.starts, found.packing.lengths, found.tokens, found.positions, found.used
    by_response = found.by_response(before), found.by_response(targets)
    return parts, *by_response, layout.sequences(rollout), rollout.mask


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.integers(3, 9), st.integers(1, 12), st.integers(0, 40))
def test_every_token_lies_once_and_in_its_place(seed, rows, longest, more):
    rollout = rollout_of(1000, rows, seed, longest)
    prompts, responses = np.asarray(rollout.prompt_lengths), np.asarray(rollout.lengths)
    wholes = np.where(responses > 0, prompts + responses, 0)
    size = max(int(wholes.sum()), PROMPT + longest) + more
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
    rollout = rollout_of(config.vocab_size)
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
    assert mask.sum() > 100
    for one, other in zip(scores[:2], padded[:2], strict=True):
        assert tiny.bits(np.asarray(one)[mask]) == tiny.bits(np.asarray(other)[mask])
        assert not np.asarray(one)[~mask].any()
    close = 1e-5 if numerics.compute_dtype == "float32" else 2e-2
    for one, other in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        np.testing.assert_allclose(one, other, atol=close * np.abs(other).max())


def test_a_buffer_holds_the_tokens_that_there_are():
    """And not the widths that the rows are padded to."""
    rollout = rollout_of(10, longest=20)
    wider = replace(rollout, responses=jnp.pad(rollout.responses, ((0, 0), (0, 99))))
    size = int((rollout.prompt_lengths + rollout.lengths).sum())
    found, expected = (layout.packed(x, size) for x in (wider, rollout))
    assert found.packing.longest == min(size, PROMPT + 119)
    for name in ("tokens", "positions", "rows", "target"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    used = int(expected.used)
    np.testing.assert_array_equal(found.targets[:used], expected.targets[:used])
