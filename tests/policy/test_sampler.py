"""The sampler: what it draws, when it stops, and that a sequence does not know its batch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from tim_jax.common.types import Prompts
from tim_jax.model.execution import Execution, Sampling
from tim_jax.policy import sampler

CONFIG = replace(tiny.CONFIG, vocab_size=11, tied_embeddings=False)
STATIC = ("samples", "execution")
_sample = jax.jit(sampler.sample, static_argnames=STATIC)


def prepared(params, config=CONFIG, numerics=tiny.NUMERICS):
    return jax.jit(Execution(config, numerics).prepare)(params)


def sample(weights, prompts, *, samples=1, sampling, config=CONFIG, seed=0, numerics=tiny.NUMERICS):
    rollout = _sample(
        weights,
        prompts,
        jax.random.key(seed),
        execution=Execution(config, numerics, sampling),
        samples=samples,
    )
    return jax.tree.map(np.asarray, rollout)


def without_layers():
    """Parameters whose layers add nothing to the embedding."""
    params = dict(tiny.params(CONFIG))
    layers = dict(params["layers"])
    layers |= {name: jnp.zeros_like(layers[name]) for name in ("o", "down")}
    return params | {"layers": layers}


@pytest.fixture(scope="module")
def counting():
    """Weights under which token t is followed by t + 1 modulo 11 with all but certainty."""
    size = CONFIG.vocab_size
    head = np.zeros((CONFIG.hidden_size, size), np.float32)
    head[np.arange(size), (np.arange(size) + 1) % size] = 50.0
    embed = np.eye(size, CONFIG.hidden_size, dtype=np.float32)
    ones = jnp.ones(CONFIG.hidden_size, jnp.float32)
    params = without_layers() | {"embed": jnp.asarray(embed), "head": jnp.asarray(head)}
    return prepared(params | {"final_norm": ones})


@pytest.fixture(scope="module")
def indifferent():
    """Weights under which all tokens are equally likely, always."""
    return prepared(without_layers() | {"final_norm": jnp.zeros(CONFIG.hidden_size, jnp.float32)})


def prompts_of(*rows, width=6, ids=None):
    tokens = np.full((len(rows), width), 7, np.int32)  # anything beyond the lengths
    for tokens_of_row, row in zip(tokens, rows, strict=True):
        tokens_of_row[: len(row)] = row
    return Prompts(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray([len(row) for row in rows], jnp.int32),
        ids=jnp.asarray(range(len(rows)) if ids is None else ids, jnp.int32),
    )


# --- stopping --------------------------------------------------------------------------------

TWO_STOPS = Sampling(5, temperature=1.0, stop_tokens=(3, 9))  # two tests share its program


@pytest.mark.parametrize("temperature", quick.some([0.0, 1.0], 1))
def test_responses_end_with_their_stop_token_or_at_the_limit(counting, temperature):
    sampling = replace(TWO_STOPS, temperature=temperature)
    rollout = sample(counting, prompts_of([5, 1], [4, 4, 4], [3], [8]), sampling=sampling)
    # from 1: 2 3; from 4: 5 6 7 8 9; from 3, the stop token of a prompt ends nothing: 4 5 6 7 8
    assert rollout.responses.tolist() == [
        [2, 3, 0, 0, 0],
        [5, 6, 7, 8, 9],
        [4, 5, 6, 7, 8],
        [9, 0, 0, 0, 0],
    ]
    assert rollout.lengths.tolist() == [2, 5, 5, 1]
    assert rollout.finished.tolist() == [True, True, False, True]
    np.testing.assert_array_equal(rollout.mask.sum(1), rollout.lengths)
    assert (rollout.log_probs[~rollout.mask] == 0).all()
    assert rollout.prompt_lengths.tolist() == [2, 3, 1, 1]


def test_without_stop_tokens_every_response_has_the_full_length(counting):
    rollout = sample(counting, prompts_of([0], [1, 2]), sampling=Sampling(40))
    assert rollout.lengths.tolist() == [40, 40]
    assert not rollout.finished.any()
    for first, response in zip((1, 3), rollout.responses, strict=True):
        assert response.tolist() == [(first + i) % 11 for i in range(40)]


def test_a_sampled_pad_token_is_a_token(counting):
    rollout = sample(counting, prompts_of([10], [9], [8], [7]), sampling=TWO_STOPS)
    assert rollout.responses[0, :4].tolist() == [0, 1, 2, 3]
    assert rollout.responses[1].tolist() == [10, 0, 1, 2, 3]
    assert rollout.lengths.tolist() == [4, 5, 1, 2]
    assert rollout.mask[0].tolist() == [True] * 4 + [False]
    assert rollout.mask[1].all()


def test_token_zero_can_stop(counting):
    rollout = sample(counting, prompts_of([8]), sampling=Sampling(6, stop_tokens=(0,)))
    assert rollout.lengths.tolist() == [3]
    assert rollout.responses[0].tolist() == [9, 10, 0, 0, 0, 0]
    assert rollout.finished.all()


def test_the_loop_ends_with_the_last_response(counting, monkeypatch):
    """And what was drawn last is not looked at: a draw more than forwards of a token."""
    draws, forwards = [], []

    def counted(function, calls):
        def run(*args, **options):
            jax.debug.callback(lambda: calls.append(1))
            return function(*args, **options)

        return run

    monkeypatch.setattr(sampler.distribution, "draw", counted(sampler.distribution.draw, draws))
    monkeypatch.setattr(
        sampler.transformer, "forward", counted(sampler.transformer.forward, forwards)
    )
    longer = replace(CONFIG, max_positions=512)
    program = jax.jit(sampler.sample, static_argnames=STATIC)
    rollout = program(
        counting,
        prompts_of([1], [6], [2]),
        jax.random.key(0),
        execution=Execution(longer, tiny.NUMERICS, Sampling(300, stop_tokens=(3,))),
        samples=1,
    )
    jax.effects_barrier()
    assert rollout.lengths.tolist() == [2, 8, 1]
    assert len(draws) == 8
    assert len(forwards) == 1 + 7  # the prompts' own first


# --- the distribution ------------------------------------------------------------------------


@pytest.mark.slow
def test_indifferent_weights_draw_all_tokens_equally_often(indifferent):
    rollout = sample(indifferent, prompts_of([0], [1]), samples=64, sampling=Sampling(40))
    drawn = np.bincount(rollout.responses.reshape(-1), minlength=11)
    expected = rollout.responses.size / 11
    assert np.abs(drawn - expected).max() < 4 * expected**0.5  # four standard deviations
    np.testing.assert_allclose(rollout.log_probs, -np.log(11), rtol=1e-6)
    # and one token does not depend on the one before it
    pairs = np.zeros((11, 11))
    np.add.at(pairs, (rollout.responses[:, :-1], rollout.responses[:, 1:]), 1)
    expected = pairs.sum() / 121
    assert np.abs(pairs - expected).max() < 5 * expected**0.5


def test_samples_prompts_and_keys_differ(indifferent):
    prompts = prompts_of([1], [1], ids=[4, 5])
    first = sample(indifferent, prompts, samples=3, sampling=Sampling(20))
    other = sample(indifferent, prompts, samples=3, sampling=Sampling(20), seed=1)
    rows = [tuple(row) for row in (*first.responses, *other.responses)]
    assert len(set(rows)) == 12


def test_a_prompts_name_and_not_its_row_decides_its_draws(indifferent):
    prompts = prompts_of([1], [1], ids=[4, 4])
    drawn = sample(indifferent, prompts, samples=3, sampling=Sampling(20))
    np.testing.assert_array_equal(drawn.responses[:3], drawn.responses[3:])


def test_greedy_samples_of_a_group_are_the_same():
    weights = prepared(tiny.params(CONFIG))
    sampling = Sampling(12, temperature=0.0, stop_tokens=(3,))
    rollout = sample(weights, prompts_of([1, 2], [5]), samples=3, sampling=sampling)
    for group in rollout.responses.reshape(2, 3, 12):
        assert (group == group[0]).all()
    assert (rollout.log_probs == 0).all()


# --- independence of the batch ---------------------------------------------------------------

POOL = Prompts(
    tokens=jnp.asarray(np.random.default_rng(5).integers(0, 11, (6, 18)), jnp.int32),
    lengths=jnp.asarray([1, 18, 4, 16, 17, 9], jnp.int32),
    ids=jnp.asarray([50, 3, 17, 4, 40, 1], jnp.int32),
)
NUMERICS = {"float32": tiny.NUMERICS, "bfloat16": tiny.BF16}
SAMPLING = Sampling(24, temperature=0.8, top_k=8, top_p=0.95, stop_tokens=(3,))


@pytest.fixture(scope="module", params=quick.some(list(NUMERICS), 0))
def pool(request):
    """Weights, numerics and the rollout of all prompts of the pool, four samples each."""
    numerics = NUMERICS[request.param]
    weights = prepared(tiny.params(CONFIG), numerics=numerics)
    whole = sample(weights, POOL, samples=4, sampling=SAMPLING, numerics=numerics)
    assert len({int(n) for n in whole.lengths}) > 4
    return weights, numerics, whole


def same(found, whole, rows):
    """Every field of the rollout is that of the given rows of `whole`, to the bit."""
    for name in ("responses", "lengths", "log_probs", "finished", "prompt_lengths"):
        expected = getattr(whole, name)[rows]
        assert getattr(found, name).tobytes() == expected.tobytes(), name


@pytest.mark.parametrize(
    ("prompts", "samples"),
    [
        ((5, 3, 1), 2),
        pytest.param((4,), 1, marks=pytest.mark.slow),
        pytest.param((2, 2), 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_response_is_the_same_in_any_batch_order_and_group(pool, prompts, samples):
    weights, numerics, whole = pool
    chosen = jax.tree.map(lambda x: x[jnp.asarray(prompts)], POOL)
    found = sample(weights, chosen, samples=samples, sampling=SAMPLING, numerics=numerics)
    same(found, whole, [4 * p + s for p in prompts for s in range(samples)])


@pytest.mark.slow
def test_writing_the_cache_in_one_scatter_changes_no_bit(pool):
    weights, numerics, whole = pool
    numerics = replace(numerics, cache_write="scatter")
    found = sample(weights, POOL, samples=4, sampling=SAMPLING, numerics=numerics)
    same(found, whole, np.arange(24))


@pytest.mark.parametrize("dtype", quick.some(list(NUMERICS), 0))
def test_a_head_in_parts_changes_no_bit(dtype):
    """Calibration compares the bits of a real model's parts; those of these widths are equal."""
    config, whole = replace(CONFIG, vocab_size=96, num_layers=1), NUMERICS[dtype]
    weights = prepared(tiny.params(config), config, whole)
    options = {"samples": 2, "sampling": Sampling(4), "config": config}
    in_parts = replace(whole, decode_head_columns=32)
    cut = sampler.by_layer(weights, Execution(config, in_parts))["head"]
    assert [part.shape[1] for part in cut] == [32, 32, 32]
    found = sample(weights, POOL, numerics=in_parts, **options)
    same(found, sample(weights, POOL, numerics=whole, **options), np.arange(12))


@pytest.mark.slow
def test_a_response_does_not_depend_on_the_padding(pool):
    weights, numerics, whole = pool
    padding = jnp.full((6, 9), 6, jnp.int32)
    longer = replace(POOL, tokens=jnp.concatenate([POOL.tokens, padding], axis=1))
    found = sample(weights, longer, samples=4, sampling=SAMPLING, numerics=numerics)
    same(found, whole, np.arange(24))


@pytest.mark.slow
def test_a_longer_limit_only_continues(pool):
    weights, numerics, whole = pool
    sampling = replace(SAMPLING, max_tokens=33)
    found = sample(weights, POOL, samples=4, sampling=sampling, numerics=numerics)
    np.testing.assert_array_equal(np.minimum(found.lengths, 24), whole.lengths)
    assert found.responses[:, :24].tobytes() == whole.responses.tobytes()
    assert found.log_probs[:, :24].tobytes() == whole.log_probs.tobytes()
    # In bfloat16 a processor's rounding may end the few that are left; float32 keeps the check.
    assert numerics.compute_dtype == "bfloat16" or (found.lengths > 24).any()


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20)
def test_compiles_once_and_ignores_what_lies_beyond_a_prompt(pool_program, seed):
    weights, program, traces = pool_program
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 19, 6)
    tokens, other = rng.integers(0, 11, (2, 6, 18))
    beyond = np.arange(18)[None, :] >= lengths[:, None]
    key = jax.random.key(seed)
    drawn = [
        program(
            weights,
            replace(
                POOL,
                tokens=jnp.asarray(np.where(beyond, padding, tokens), jnp.int32),
                lengths=jnp.asarray(lengths, jnp.int32),
            ),
            key,
        )
        for padding in (0, other)
    ]
    for name in ("responses", "lengths", "log_probs", "finished"):
        first, second = (np.asarray(getattr(rollout, name)) for rollout in drawn)
        assert first.tobytes() == second.tobytes(), name
    assert len(traces) == 1


@pytest.fixture(scope="module")
def pool_program():
    traces, execution = [], Execution(CONFIG, tiny.NUMERICS, SAMPLING)

    @jax.jit
    def sample(
        weights, prompts, key
    ):  # by this name, and for four samples, it is the pool's program
        traces.append(1)
        return sampler.sample(weights, prompts, key, execution=execution, samples=4)

    return prepared(tiny.params(CONFIG)), sample, traces
