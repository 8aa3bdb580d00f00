"""Slots that decode a queue: the same rollout to the bit, in less memory, with no slot idle."""

from dataclasses import replace
from functools import cache, partial

import dials
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tim_jax.common.errors import InputError
from tim_jax.model.attention import LayerCache
from tim_jax.model.execution import Batching, Sampling
from tim_jax.placement import Placement
from tim_jax.policy import sampler, slots
from tim_jax.rl import sharded
from tim_jax.rl.programs import sampling_program

CONFIG = replace(tiny.CONFIG, max_positions=80)
LONG = replace(tiny.EXECUTION, config=CONFIG, sampling=replace(tiny.SAMPLING, max_tokens=70))


@cache
def weights(execution=LONG):
    return jax.jit(execution.prepare)(tiny.params(CONFIG))


@cache
def program(batching, execution=LONG):
    draw = partial(sampler.sample, execution=execution, samples=tiny.GROUP, batching=batching)
    return jax.jit(lambda weights, key, order: draw(weights, tiny.prompts(), key, order=order))


def arguments(order=None, seed=0, execution=LONG):
    order = jnp.arange(tiny.ROWS) if order is None else jnp.asarray(order)
    return weights(execution), jax.random.key(seed), order


def drawn(batching, *, order=None, seed=0, execution=LONG):
    return program(batching, execution)(*arguments(order, seed, execution))


@cache
def alone(seed=0):
    """All sequences at once."""
    return drawn(Batching(), seed=seed)


def slow(*batching):
    return pytest.param(Batching(*batching), marks=pytest.mark.slow, id=str(batching))


# Few slots, halved as often as that goes, to one; and more slots than there are sequences. 5 pages
# of 16 positions hold just one of the longest sequences, so that others must wait for it.
FEW, MANY = (4, 9), (99, 1, 5)


# Lengths from 1 token to the limit.
@pytest.mark.parametrize(
    "batching", [pytest.param(Batching(5, 1, 6), id="(5, 1, 6)"), slow(*FEW), slow(*MANY)]
)
@given(order=st.permutations(range(tiny.ROWS)), seed=st.integers(0, 3))
@settings(max_examples=12)
def test_neither_batching_nor_order_changes_a_bit(batching, order, seed):
    assert len({int(n) for n in alone(seed).lengths}) > 4
    found = drawn(batching, order=order, seed=seed)
    assert tiny.bits(found) == tiny.bits(alone(seed))


@pytest.mark.slow
def test_noise_is_that_of_all_at_once():
    """On the logits, and on the log-probs that are reported."""
    noisy = dials.dial(
        {"name": "logit_noise", "std": 0.1, "bias": 0.1},
        {"name": "log_prob_noise", "std": 0.1, "by": "probability"},
    )
    given = weights(), tiny.prompts(), jax.random.key(0)
    few, all_at_once = (
        sampling_program(LONG, samples=tiny.GROUP, batching=batching, mismatch=noisy)(*given)
        for batching in (Batching(5, 1, 7), Batching())
    )
    assert tiny.bits(few) == tiny.bits(all_at_once)
    drawn_with = few.drawn_log_probs
    assert tiny.bits(drawn_with) != tiny.bits(few.log_probs)
    assert tiny.bits(drawn_with) != tiny.bits(alone().log_probs)


def test_a_responses_first_token_may_be_its_last():
    one = replace(LONG, sampling=replace(LONG.sampling, max_tokens=1))
    found = drawn(Batching(2), execution=one)
    assert found.lengths.tolist() == [1] * tiny.ROWS
    np.testing.assert_array_equal(found.responses, alone().responses[:, :1])
    np.testing.assert_array_equal(found.log_probs, alone().log_probs[:, :1])


def test_no_slot_is_idle_while_a_sequence_waits(monkeypatch):
    """Steps are those of a schedule in which a free slot takes the next sequence at once."""
    forwards = []
    forward = sampler.transformer.forward

    def counted(weights, tokens, *args, **options):
        if tokens.shape[1] == 1:
            jax.debug.callback(lambda: forwards.append(1))
        return forward(weights, tokens, *args, **options)

    monkeypatch.setattr(sampler.transformer, "forward", counted)
    draw = partial(sampler.sample, execution=LONG, samples=tiny.GROUP, batching=Batching(3))
    rollout = jax.jit(draw)(weights(), tiny.prompts(), jax.random.key(0))
    jax.effects_barrier()
    busy = [0, 0, 0]  # the steps until each slot is free
    for length in np.asarray(rollout.lengths):
        if length > 1:  # the first token is drawn with the prompts
            slot = int(np.argmin(busy))
            busy[slot] += int(length) - 1
    assert len(forwards) == max(busy)
    assert max(busy) < int(rollout.lengths.sum()) / 3 + 70


@pytest.mark.slow
def test_slots_take_the_memory_of_their_own_sequences():
    def temporaries(*batching):
        compiled = program(Batching(*batching)).lower(*arguments()).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert 0 < temporaries(*FEW) < temporaries()
    # A family that gathers the pages of a layer still keeps no more than one layer's rows.
    assert 0 < temporaries(*MANY) < temporaries()


def test_the_program_does_not_grow_with_the_length_of_responses():
    def lines(limit):
        sampling = Sampling(limit, stop_tokens=(3,))
        config = replace(LONG.config, max_positions=9_000)
        long = replace(LONG, config=config, sampling=sampling)
        draw = partial(sampler.sample, execution=long, samples=2, batching=Batching(2))
        shapes = weights(), tiny.prompts(), jax.random.key(0)
        return jax.jit(draw).lower(*shapes).as_text().count("\n")

    assert lines(8_192) <= 1.1 * lines(512)  # but for the steps of a sum over more keys


def test_what_was_in_a_slot_does_not_reach_the_next_sequence():
    """Numbers that are not finite would, through a product with zero."""
    prompts = LayerCache(key=jnp.ones((1, 1, 2, 1, 4, 3)), value=jnp.ones((1, 1, 2, 1, 3, 4)))
    queue = slots.Queue(
        order=jnp.arange(2),
        waiting=jnp.asarray([False, True]),
        prompt_lengths=jnp.asarray([3, 2]),
        prompts=prompts,
        samples=1,
        longest=2,
        pool=None,
    )
    results = slots.Results(
        tokens=jnp.asarray([[5, 0], [6, 0]]),
        log_probs=jnp.zeros((2, 2)),
        lengths=jnp.ones(2, jnp.int32),
        ended=jnp.zeros(2, bool),
        drawn=None,
        routes=None,
    )
    before = slots.empty(queue, 3, numerics=replace(tiny.NUMERICS, kv_block=8))
    before = replace(
        before,
        cache=jax.tree.map(lambda x: jnp.full(x.shape, jnp.inf), before.cache),
        working=jnp.asarray([False, True, False]),
    )
    refill = jax.jit(partial(slots.refill, steps=4))
    after, waiting = refill(before, queue.waiting, queue, results)
    assert not waiting.any()
    assert after.working.tolist() == [True, True, False]
    assert after.sequences.tolist()[0] == 1
    assert after.newest.tolist()[0] == 6
    (cache,) = after.cache
    assert np.asarray(cache.key)[0].sum() == 4 * 3
    assert np.asarray(cache.value)[0].sum() == 3 * 4
    assert np.isinf(cache.key[1:]).all()


@given(
    sequences=st.integers(1, 200),
    count=st.integers(1, 200),
    limit=st.integers(1, 3_000),
    halvings=st.integers(0, 4),
)
def test_planned_steps_are_those_of_the_longest_responses(sequences, count, limit, halvings):
    found = sampler.trips(sequences, Sampling(limit), Batching(count, halvings))
    count = min(count, sequences)
    if limit == 1:
        assert found == ()
        return
    runs, copies, steps = found[:3]
    rounds = -(-sequences // count)
    assert (limit - 1) * rounds <= runs * steps < (limit - 1) * rounds + runs
    assert runs * copies >= sequences
    assert set(found[3:]) <= {0}


@given(slots=st.integers(1, 100), pages=st.integers(1, 100), shards=st.integers(1, 16))
def test_rounded_batching_divides_over_a_mesh(slots, pages, shards):
    found = Batching(slots, 1, pages).rounded(shards)
    assert slots <= found.slots < slots + shards
    assert pages <= found.pages < pages + shards
    where = Placement(fsdp=shards)
    assert found.of_device(where) == Batching(found.slots // shards, 1, found.pages // shards)
    assert Batching().rounded(shards) == Batching()


def test_slots_that_do_not_divide_over_the_mesh_are_refused():
    two = replace(tiny.EXECUTION, placement=Placement(fsdp=2))
    with pytest.raises(InputError, match="slots = 3 must be a multiple of data x fsdp = 2"):
        sampling_program(two, samples=tiny.GROUP, batching=Batching(3))


@given(st.sampled_from([(1, 6), (4, 3), (6, 4), (5, 2)]), st.data())  # each compiled
@settings(max_examples=15)
def test_any_divisor_makes_equal_parts_that_come_back_in_order(sizes, data):
    (prompts, samples), total = sizes, sizes[0] * sizes[1]
    parts = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    blocks, shares = sharded.split(prompts, samples, parts)
    assert blocks * shares == parts
    assert prompts % blocks == 0
    assert samples % shares == 0
    size = samples // shares
    ids = np.arange(prompts)
    of_part = np.asarray(sharded.repeated(ids, blocks, shares)).reshape(parts, -1)
    first = np.tile(np.arange(shares) * size, blocks)
    rows = of_part[:, :, None] * samples + first[:, None, None] + np.arange(size)
    found = sharded.in_order(rows.reshape(-1), blocks, shares, size)
    np.testing.assert_array_equal(found, np.arange(total))
