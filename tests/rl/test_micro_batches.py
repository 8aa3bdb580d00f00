"""Micro-batches of as many tokens have the same bits, and no padding."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny
from hypothesis import given
from hypothesis import strategies as st

from tim_jax import objectives, optimizers
from tim_jax.app.config import toml
from tim_jax.common.errors import InputError
from tim_jax.corrections import Mode
from tim_jax.model.execution import Execution
from tim_jax.placement import SINGLE, Placement
from tim_jax.rl import loop, programs, rules, types
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

TILED = replace(tiny.NUMERICS, column_tiles=2)
CONFIG = replace(tiny.CONFIG, num_kv_heads=2)


LENGTHS = st.sampled_from([1, 3, 16, 40]).flatmap(  # sizes, each compiled once
    lambda size: st.lists(st.integers(1, 40), min_size=size, max_size=size)
)
FILL = jax.jit(types.fill)


@given(LENGTHS, st.integers(40, 90), st.integers(1, 9))
def test_every_part_holds_its_sequences_and_few_parts_do(lengths, tokens, rows):
    parts = np.asarray(FILL(jnp.asarray(lengths), tokens=tokens, rows=rows))
    held, number = np.bincount(parts, lengths), np.bincount(parts)
    assert held.max() <= tokens
    assert number.min() >= 1
    assert number.max() <= rows
    if rows >= len(lengths):
        # Of two parts that both fit into one, the later was not needed.
        assert len(held) < 2 or sum(sorted(held)[:2]) > tokens
        assert len(held) <= 2 * -(-sum(lengths) // tokens)


DEAL = jax.jit(types.deal, static_argnames="shares")


@given(st.sampled_from([(1, 4), (5, 2), (4, 3), (6, 1)]), st.data())  # each compiled once
def test_devices_are_dealt_about_as_many_tokens(sizes, data):
    each, shares = sizes
    size = each * shares
    lengths = np.asarray(data.draw(st.lists(st.integers(1, 99), min_size=size, max_size=size)))
    order = np.asarray(DEAL(jnp.asarray(lengths), shares=shares))
    assert sorted(order) == list(range(size))
    sums = lengths[order].reshape(shares, each).sum(axis=1)
    assert sums.max() - sums.min() <= lengths.max()


@cache
def execution(where=SINGLE, dtype="float32"):
    numerics = replace(TILED, compute_dtype=dtype)
    return Execution(CONFIG, numerics, tiny.SAMPLING, where)


def rollout(what):
    """Sixteen sequences of very different lengths."""
    found = drawn(replace(what, placement=SINGLE))
    assert found.lengths.min() <= 3
    assert found.lengths.max() >= 9
    return found


@cache
def drawn(what):
    sample = programs.sampling_program(what, samples=tiny.GROUP)
    return jax.device_get(sample(tiny.weights(what), tiny.prompts(count=4), jax.random.key(5)))


@cache
def stepped(what, tokens, *, mode: Mode = "bypass", micro=4, objective=None, placed=None):
    """(state, weights, exactness, metrics) of an update, and the programs."""
    learning = Learning(
        objective or objectives.rloo(),
        tiny.GROUP,
        mode=mode,
        micro_batch=micro,
        micro_batch_tokens=tokens,
    )
    run = programs.build(Training(what, learning, optimizers.adamw(optimizers.Rate(1e-2))))
    state = run.init(tiny.params(CONFIG))
    weights, rewards = run.prepare(state.params), tiny.rewards(rows=16)
    found = loop.learn(state, weights, rollout(what), rewards, programs=run)
    state, exactness = jax.device_get((found[0], found[2]))
    return state, exactness, found[3]


def same_but_for_sums(found, expected):
    """All that is said of tokens is equal; gradients are added in another order."""
    (state, exactness, metrics), (other, compared, values) = found, expected
    assert int(exactness.compared) == int(compared.compared) > 50
    assert int(exactness.unequal) == 0
    of_tokens = {k: v for k, v in metrics.items() if not k.startswith(("gradient", "noise"))}
    assert repr(of_tokens) == repr({name: values[name] for name in of_tokens})
    assert metrics["gradient_norm"] == pytest.approx(values["gradient_norm"], rel=1e-4)
    tiny.check_near(state.optimizer[1][0].mu, other.optimizer[1][0].mu, 1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    quick.some([("bypass", "float32"), ("recompute", "float32"), ("recompute", "bfloat16")], 0),
)
def test_what_is_said_of_every_token_does_not_depend_on_the_filling(mode, dtype):
    what = execution(dtype=dtype)
    expected = stepped(what, None, mode=mode)
    found = stepped(what, 33, mode=mode, micro=None)
    if dtype == "float32":
        same_but_for_sums(found, expected)
    assert int(found[1].unequal) == 0 < int(found[1].compared)


@pytest.mark.parametrize("tokens", [None, 33])
def test_products_see_tokens_and_no_padding(tokens):
    """In the traced gradient and forward: rows of the hidden size, of the buffer alone."""
    what, learning = execution(), Learning(objectives.rloo(), tiny.GROUP, micro_batch_tokens=tokens)
    policy = tiny.policy(what, learning)
    weights, rows = tiny.weights(what), rollout(what)
    traced = str(jax.make_jaxpr(policy.score)(weights, rows))
    count, length = rows.responses.shape[0], rows.prompts.shape[1] + rows.responses.shape[1]
    padded, packed = (f"f32[{n},{CONFIG.hidden_size}]" for n in (count * length, 33))
    assert (padded in traced) == (tokens is None)
    assert (packed in traced) == (tokens is not None)


@pytest.mark.slow
def test_one_sequence_at_a_time_and_all_at_once():
    expected = stepped(execution(), None)
    same_but_for_sums(stepped(execution(), 16, micro=2), expected)
    same_but_for_sums(stepped(execution(), 1000, micro=None), expected)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gspo", "dr_grpo"])
def test_losses_of_sequences_and_of_tokens(preset):
    objective = objectives.PRESETS[preset](max_length=10)
    found, expected = (
        stepped(execution(), tokens, micro=None, objective=objective) for tokens in (40, None)
    )
    same_but_for_sums(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [Placement(data=2, tensor=2), Placement(data=2, fsdp=2, tensor=2)], ids=str
)
def test_devices_fill_as_many_parts(where):
    same_but_for_sums(
        stepped(execution(where), 17 * where.shards, micro=None, mode="recompute"),
        stepped(execution(), None, mode="recompute"),
    )


def test_what_cannot_be():
    with pytest.raises(InputError, match="micro_batch_tokens = 0: must be 1 or more"):
        Learning(objectives.rloo(), tiny.GROUP, micro_batch_tokens=0)
    with pytest.raises(InputError, match="noise_scale = True: needs micro-batches of equally many"):
        Learning(objectives.rloo(), tiny.GROUP, micro_batch_tokens=99, noise_scale=True)
    with pytest.raises(
        InputError, match="micro_batch_tokens = 99: must be a multiple of 4, at least 80"
    ):
        rules.check_micro_batch_tokens(99, longest=20, placement=Placement(data=4))
    with pytest.raises(InputError, match=r"learner\.micro_batch_tokens = 30: .* up to 96 tokens"):
        toml.load(None, ["learner.micro_batch_tokens=30"])
    assert "learner.micro_batch_tokens" not in toml.load(None, []).may_change()
