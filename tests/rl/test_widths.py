"""Micro-batches that are cut to a few widths: the same bits of every token, less padding."""

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
from tim_jax.model.execution import Execution
from tim_jax.placement import SINGLE, Placement
from tim_jax.rl import loop, programs, widths
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

TILED = replace(tiny.NUMERICS, column_tiles=2)
CONFIG = replace(tiny.CONFIG, num_kv_heads=2)


@given(st.integers(1, 1000), st.integers(1, 40))
def test_widths_rise_in_even_steps_to_the_longest(longest, count):
    found = widths.ladder(longest, count)
    assert found[-1] == longest
    assert len(found) == min(count, longest)
    steps = np.diff([0, *found])
    assert steps.min() >= 1
    assert steps.max() - steps.min() <= 1


@cache
def execution(where=SINGLE, dtype="float32"):
    numerics = replace(TILED, compute_dtype=dtype)
    return Execution(CONFIG, numerics, tiny.SAMPLING, where)


def rollout(what):
    """Sixteen sequences of very different lengths."""
    plain = replace(what, placement=SINGLE)
    weights = jax.jit(plain.prepare)(tiny.params(CONFIG))
    sample = programs.sampling_program(plain, samples=tiny.GROUP)
    found = jax.device_get(sample(weights, tiny.prompts(count=4), jax.random.key(3)))
    assert found.lengths.min() <= 3
    assert found.lengths.max() >= 9
    return found


@cache
def stepped(what, count, *, mode="bypass", micro=4, noise=False):
    """(state, weights, exactness, metrics) of an update, and the programs."""
    learning = Learning(
        objectives.rloo(),
        tiny.GROUP,
        mode=mode,
        micro_batch=micro,
        widths=count,
        noise_scale=noise,
    )
    run = programs.build(Training(what, learning, optimizers.adamw(optimizers.Rate(1e-2))))
    state = run.init(tiny.params(CONFIG))
    weights, rewards = run.prepare(state.params), tiny.rewards(rows=16)
    found = loop.learn(state, weights, rollout(what), rewards, programs=run)
    return *jax.device_get((found[0], found[2])), found[3]


def same_but_for_sums(found, expected):
    """All that is said of tokens is equal; gradients are added in another order."""
    (state, exactness, metrics), (other, compared, values) = found, expected
    assert int(exactness.compared) == int(compared.compared) > 50
    assert int(exactness.unequal) == 0
    of_tokens = {k: v for k, v in metrics.items() if not k.startswith(("gradient", "noise"))}
    assert repr(of_tokens) == repr({name: values[name] for name in of_tokens})
    assert metrics["gradient_norm"] == pytest.approx(values["gradient_norm"], rel=1e-4)
    moments = state.optimizer[1][0].mu, other.optimizer[1][0].mu
    for ours, theirs in zip(*map(jax.tree.leaves, moments), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4 * float(abs(theirs).max()))


@pytest.mark.parametrize(
    ("mode", "dtype"),
    quick.some([("bypass", "float32"), ("recompute", "float32"), ("recompute", "bfloat16")], 0),
)
def test_what_is_said_of_every_token_does_not_depend_on_widths(mode, dtype):
    what = execution(dtype=dtype)
    expected = stepped(what, 1, mode=mode)
    found = stepped(what, 2, mode=mode)
    if dtype == "float32":
        same_but_for_sums(found, expected)
    assert int(found[1].unequal) == 0 < int(found[1].compared)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [Placement(data=2, tensor=2), Placement(data=2, fsdp=2, tensor=2)], ids=str
)
def test_all_devices_compute_at_one_width(where):
    same_but_for_sums(
        stepped(execution(where), 3, mode="recompute"), stepped(execution(), 1, mode="recompute")
    )


@pytest.mark.slow
def test_with_noise_measured_and_with_one_row_at_a_time():
    expected = stepped(execution(), 1)
    same_but_for_sums(stepped(execution(), 4, micro=1), expected)
    noisy, plain = (stepped(execution(), n, noise=True)[2] for n in (4, 1))
    assert noisy["gradient_noise"] == pytest.approx(plain["gradient_noise"], rel=1e-3)


def test_what_is_computed_is_as_wide_as_needed():
    """Rows of 1, 2, 2, 3, 8 and 5 tokens, two at a time, at widths of 2, 4, 6 and 8."""
    lengths, seen = jnp.asarray([3, 8, 1, 2, 5, 2]), []

    def step(carry, part):
        seen.append(part.shape)
        return carry + 1, part * 2

    rows = jnp.where(jnp.arange(8)[None, :] < lengths[:, None], lengths[:, None], 0)

    def cut(part, width):
        return part[:, :width]

    chosen = []

    def agree(longest):
        chosen.extend(np.asarray(longest).tolist())
        return longest

    count, values = widths.scan(
        step, jnp.int32(0), rows, lengths, size=2, widths=[2, 4, 6, 8], cut=cut, agree=agree
    )
    assert chosen == [2, 3, 8]
    assert {shape[1] for shape in seen} == {2, 4, 6, 8}
    assert int(count) == 3
    np.testing.assert_array_equal(values, rows * 2)


def test_what_cannot_be():
    with pytest.raises(InputError, match="widths must be positive, got 0"):
        Learning(objectives.rloo(), tiny.GROUP, widths=0)
    with pytest.raises(InputError, match=r"learner\.widths"):
        toml.load(None, ["learner.widths=33"])
    assert "learner.widths" not in toml.load(None, []).may_change()
