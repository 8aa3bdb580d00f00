"""A run's programs: how often they compile, what they refuse."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from tim_jax import corrections, objectives, optimizers
from tim_jax.common.errors import InputError
from tim_jax.model.execution import Sampling
from tim_jax.rl import drawing, loop, programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

OPTIMIZER = optimizers.adamw(optimizers.Rate(1e-2), decay=optimizers.Decay(period=2))


def build(**options):
    execution = replace(tiny.EXECUTION, sampling=Sampling(12, stop_tokens=(3, 5)))
    correction = options.pop("correction", corrections.none())
    learning = Learning(objectives.rloo(), tiny.GROUP, micro_batch=3, correction=correction)
    training = Training(execution, learning, OPTIMIZER, tiny.PROMPTS)
    return programs.build(training.varied(**options))


def copied(tree):
    return jax.tree.map(jnp.array, tree)


@pytest.mark.slow
def test_every_program_compiles_once_whatever_the_prompts():
    built = build(mini_batches=2, epochs=2, correction=corrections.build([{"name": "token_tis"}]))
    with tiny.compilations() as counted:
        state = built.init(copied(tiny.params()))
        weights = built.prepare(state.params)
        longest = set()
        for step in range(3):
            prompts = tiny.prompts(seed=step)
            longest.add(int(prompts.lengths.max()))
            rollout = built.sample(weights, prompts, drawing.step_key(0, step))
            before = jax.tree.leaves((state.params, weights["layers"]))
            state, weights, found, _ = loop.learn(
                state, weights, rollout, tiny.rewards(step), programs=built
            )
            # Donated: memory holds one copy of state and weights.
            assert all(leaf.is_deleted() for leaf in before)
            loop.check_exact(found, step)
            state = replace(state, step=state.step + jnp.int32(1))
    assert len(longest) > 1
    own = {name: n for name, n in counted.items() if name in ("sample", "experience", "update")}
    assert own == {"sample": 1, "experience": 1, "update": 1}
    assert counted["init"] == counted["prepare"] == 1


def test_who_waits_is_told_which_of_a_steps_programs_are_compiled():
    one = build()
    assert one.compiling("sampling").endswith("program 1 of 2 is compiled: the sampler")
    assert one.compiling("updating").endswith("program 2 of 2 is compiled: the update")
    more = build(mode="recompute", length_buckets=3)
    assert more.compiling("updating").endswith(
        "programs 2 and 3 of 3 are compiled: the learner's forward, the update for up to 3 lengths"
    )


def cut(rollout, longest):
    """The same responses, none longer than `longest`."""
    return replace(rollout, lengths=jnp.minimum(rollout.lengths, longest))


@pytest.mark.slow
def test_length_buckets_bound_the_learners_compilations():
    built = build(length_buckets=3)
    state = built.init(copied(tiny.params()))
    weights = built.prepare(state.params)
    prompts = tiny.prompts()
    rollout = built.sample(weights, prompts, drawing.step_key(0, 1))
    assert int(rollout.lengths.max()) == 12
    sizes = []
    with tiny.compilations() as counted:
        for longest in (12, 3, 5, 2, 8, 6, 1, 11):
            # Rewards without a signal: rloo's gradient is 0 and the weights stay.
            short = cut(rollout, longest)
            sizes.append(loop.trimmed(short, 3).responses.shape[1])
            state, weights, found, _ = loop.learn(
                state, weights, short, jnp.ones(tiny.ROWS, jnp.float32), programs=built
            )
            loop.check_exact(found, longest)
            assert int(found.compared) == int(short.lengths.sum())
    assert sizes == [12, 3, 6, 3, 12, 6, 3, 12]
    assert counted["update"] == counted["experience"] == 3


def test_trimming_keeps_every_token_and_halves_the_rest():
    rollout = tiny.rollout()
    assert rollout.responses.shape[1] == 10
    sizes = [(1, 2, 10), (2, 6, 10), (2, 5, 5), (3, 3, 3), (3, 4, 5), (9, 1, 1)]
    for buckets, longest, size in sizes:
        short = cut(rollout, longest)
        found = loop.trimmed(short, buckets)
        assert found.responses.shape == found.log_probs.shape == (tiny.ROWS, size)
        np.testing.assert_array_equal(found.lengths, short.lengths)
        np.testing.assert_array_equal(found.responses, short.responses[:, :size])


@pytest.mark.parametrize("name", ["mini_batches", "epochs", "length_buckets"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(InputError, match=name):
        build(**{name: 0})
