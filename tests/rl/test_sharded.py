"""Sharding: the same bits on any devices, what lies where, and what crosses devices."""

import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny

from tim_jax import corrections, mismatch, objectives, optimizers, placement
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.model.execution import Batching, Execution
from tim_jax.placement import SINGLE, Placement
from tim_jax.placement import collectives as crossing
from tim_jax.policy import scoring
from tim_jax.rl import drawing, loop, programs, sharded
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

# 4 key heads, so that a tensor axis can have 4 devices; a vocabulary of 23, which none divides.
CONFIG = replace(tiny.UNTIED, hidden_size=32, num_heads=8, num_kv_heads=4, intermediate_size=32)
BIASED = replace(
    CONFIG,
    model_type="llama",
    tied_embeddings=True,
    qk_norm=False,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
)
MIXTURE = replace(
    CONFIG, model_type="qwen3_moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24
)
WINDOWED = replace(CONFIG, sliding_window=5, window_layers=(True, False))
TILED = replace(tiny.NUMERICS, column_tiles=4)
GROUP, PROMPTS = 4, 4
LEARNING = Learning(objectives.rloo(), GROUP)
OPTIMIZER = optimizers.adamw(optimizers.Rate(1e-2))
# All axes together, and many devices of each; fewer, and other pairs of axes, in tests below.
PLACEMENTS = (
    Placement(data=2, fsdp=2, tensor=2),
    Placement(tensor=4),
    Placement(fsdp=4, decode="sharded"),
    Placement(fsdp=8),
    Placement(data=4, fsdp=2),
)
BOTH = quick.some(PLACEMENTS, 0)


def execution(where=SINGLE, config=CONFIG, numerics=TILED, **options):
    return Execution(config, numerics, replace(tiny.SAMPLING, **options), where)


@cache
def built(what: Execution, **options):
    return programs.build(Training(what, LEARNING, OPTIMIZER, PROMPTS).varied(**options))


@cache
def rollout(what: Execution):
    weights = built(what).prepare(tiny.params(what.config))
    return jax.device_get(
        built(what).sample(weights, tiny.prompts(count=PROMPTS), jax.random.key(0))
    )


def stepped(what: Execution):
    """(state, exactness, metrics) of one update on `rollout(what)`."""
    run = built(what)
    state = run.init(tiny.params(what.config))
    weights, rewards = run.prepare(state.params), tiny.rewards(rows=PROMPTS * GROUP)
    state, _, found, metrics = loop.learn(state, weights, rollout(what), rewards, programs=run)
    return state, found, metrics


@cache
def single(what: Execution):
    return stepped(replace(what, placement=SINGLE))


def check(what: Execution):
    """Rollout and log-probs of `what` are those of one device; returns the update's results."""
    alone = rollout(replace(what, placement=SINGLE))
    here = rollout(what)
    assert int(here.lengths.sum()) > 50
    assert tiny.bits(here) == tiny.bits(alone)
    state, found, metrics = stepped(what)
    assert int(found.compared) == int(here.lengths.sum())
    assert int(found.unequal) == 0
    return state, metrics


@pytest.mark.parametrize("where", BOTH, ids=str)
def test_tokens_and_log_probs_are_those_of_one_device(where):
    what = execution(where)
    state, metrics = check(what)
    alone, _, expected = single(what)
    # Statistics of tokens take no notice of the split; gradients are sums over devices.
    known = {name: x for name, x in metrics.items() if not name.startswith("gradient")}
    assert {"loss", "loss/ppo_ratio_max", "tokens", "mismatch/kl_k3", "update_skew"} < set(known)
    assert known == {name: expected[name] for name in known}
    assert metrics["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-4)
    tiny.check_near(state.optimizer[1][0].mu, alone.optimizer[1][0].mu, 1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [Placement(data=2, tensor=2), Placement(fsdp=2, decode="sharded")], ids=str
)
def test_slots_of_every_device_change_no_bit(where):
    what = execution(where)
    weights = built(what).prepare(tiny.params(CONFIG))
    run = programs.sampling_program(what, samples=GROUP, batching=Batching(8, 1, 24))
    found = run(weights, tiny.prompts(count=PROMPTS), jax.random.key(0))
    assert tiny.bits(found) == tiny.bits(rollout(execution()))


BF16 = replace(TILED, compute_dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [Placement(data=2, fsdp=2, tensor=2), Placement(fsdp=2, tensor=2, decode="sharded")],
    ids=str,
)
def test_in_bfloat16_and_with_tied_embeddings_and_biases(where):
    check(execution(where, config=BIASED, numerics=BF16))


@pytest.mark.slow
def test_in_float16():
    """The learner scales its loss there; the update is that of one device as well."""
    where = Placement(data=2, fsdp=2, tensor=2)
    check(execution(where, config=BIASED, numerics=replace(TILED, compute_dtype="float16")))


@pytest.mark.slow
@pytest.mark.parametrize("where", [Placement(fsdp=2), Placement(tensor=2)], ids=str)
def test_sliding_windows_on_two_devices(where):
    check(execution(where, config=WINDOWED, numerics=replace(TILED, kv_block=4)))


def differentiated(where, rows, config, numerics=tiny.NUMERICS):
    """Log-probs, and the gradient of a sum of them, on a placement."""
    what = execution(where, config=config, numerics=numerics)
    weights = jax.jit(what.prepare)(tiny.params(config))
    on = placement.mesh(where, jax.devices())

    def local(weights, rows):
        def loss(weights):
            log_probs = scoring.score(weights, rows, execution=what).log_probs
            return jnp.sum(jnp.where(rows.mask, log_probs * log_probs, 0.0)), log_probs

        gradient, log_probs = jax.grad(loss, has_aux=True)(weights)
        return log_probs, gradient

    return jax.device_get(jax.jit(sharded.differentiating(what, on, local))(weights, rows))


def drawn_anyhow(rows=8, length=9):
    """Sequences of random tokens."""
    rng = np.random.default_rng(0)
    return Rollout(
        prompts=jnp.asarray(rng.integers(0, 23, (rows, 4)), jnp.int32),
        prompt_lengths=jnp.asarray(rng.integers(1, 5, rows), jnp.int32),
        responses=jnp.asarray(rng.integers(0, 23, (rows, length)), jnp.int32),
        lengths=jnp.full((rows,), length, jnp.int32),
        log_probs=jnp.zeros((rows, length)),
        finished=jnp.ones((rows,), bool),
    )


@pytest.mark.slow
def test_log_probs_and_gradient_of_a_mixture_of_experts():
    check_gradient(Placement(data=2, fsdp=2), drawn_anyhow(), MIXTURE)


@pytest.mark.slow
def test_rows_that_a_tensor_group_does_not_divide():
    """Three sequences of 13 tokens: a norm's 39 rows, and the head's 27, over four devices."""
    check_gradient(Placement(tensor=4), drawn_anyhow(rows=3), CONFIG, TILED)


def check_gradient(where, rows, *options):
    (log_probs, gradient), (alone, expected) = (
        differentiated(place, rows, *options) for place in (where, SINGLE)
    )
    assert tiny.bits(log_probs) == tiny.bits(alone)
    tiny.check_near(gradient, expected, 1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "numerics"),
    [(Placement(data=2, fsdp=2), tiny.NUMERICS), (Placement(fsdp=4, decode="sharded"), tiny.BF16)],
    ids=["data=2 fsdp=2 float32", "fsdp=4 sharded bfloat16"],
)
def test_a_mixture_of_experts_on_data_and_fsdp_axes(where, numerics):
    what = execution(where, config=MIXTURE, numerics=numerics)
    state, metrics = check(what)
    alone, _, expected = single(what)
    assert metrics["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-3)
    tiny.check_near(state.optimizer[1][0].mu, alone.optimizer[1][0].mu, 1e-2, rtol=1e-2)


@pytest.mark.slow
def test_any_fsdp_size_without_column_tiles():
    check(execution(Placement(data=2, fsdp=4), numerics=tiny.NUMERICS))


def test_parameters_and_optimizer_state_are_fully_sharded():
    what = execution(Placement(data=2, fsdp=2, tensor=2))
    run = built(what)
    state = run.init(tiny.params(CONFIG))
    weights = run.prepare(state.params)
    for tree in (state.params, state.optimizer[1][0].mu, state.optimizer[1][0].nu, weights):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            share = leaf.addressable_shards[0].data.size
            within_heads = path[-1].key in ("q_norm", "k_norm")
            assert share * (1 if within_heads else 4) == leaf.size, path
    after = stepped(what)[0]
    expected = jax.tree.map(lambda x: x.sharding, state)
    assert jax.tree.map(lambda x: x.sharding, after) == expected


def compiled(program: Any, *given):
    """A run's jitted program, compiled for these arguments."""
    return program.lower(*given).compile()


def collectives(compiled) -> Counter:
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return Counter(re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text()))


@pytest.mark.parametrize("where", quick.some([PLACEMENTS[0], PLACEMENTS[2]], 0), ids=str)
def test_a_forward_moves_bits_and_adds_nothing(where):
    """Gathers and exchanges: the rows of embeddings over fsdp, of norms and head over tensor.

    A tensor group's sampler shares rows in prefill alone, for the two norms of the scanned layer. A
    sampler that decodes with sharded weights looks embeddings up in prefill and in the loop.
    """
    what = execution(where)
    run, drawn = built(what), rollout(what)
    weights = run.prepare(tiny.params(CONFIG))
    sample = compiled(run.sample, weights, tiny.prompts(count=PROMPTS), jax.random.key(0))
    shared, sharded_decoding = where.tensor > 1, where.decode == "sharded"
    assert set(collectives(sample)) - {"all-to-all"} == {"all-gather"}
    assert collectives(sample)["all-to-all"] == 2 * shared + 2 * sharded_decoding
    on = placement.mesh(where, jax.devices())
    score = jax.jit(sharded.scoring(what, on, micro_batch=None))
    found = collectives(score.lower(weights, drawn).compile())
    assert set(found) - {"all-to-all"} == {"all-gather"}
    # The embeddings; over tensor also the last norm, and the logits.
    assert found["all-to-all"] == 1 + 4 * shared


@pytest.mark.slow
def test_gradients_come_back_in_parts_added_in_the_order_of_the_devices():
    """By an exchange: no reduction of the runtime, whose order would be its own."""
    what = execution(Placement(fsdp=2))
    run = built(what)
    state = run.init(tiny.params(CONFIG))
    weights = run.prepare(state.params)
    rewards = tiny.rewards(rows=PROMPTS * GROUP)
    batch = run.experience(weights, None, state.carried, rollout(what), rewards).experience
    on = placement.mesh(what.placement, jax.devices())
    differentiate = jax.jit(sharded.gradient(what, on, learning=LEARNING))
    shares = jnp.ones(batch.mask.shape, jnp.float32)
    found = collectives(differentiate.lower(weights, batch, shares).compile())
    assert found["all-to-all"] > 0
    assert found["all-gather"] > 0
    assert found["reduce-scatter"] == found["all-reduce"] == 0


@pytest.mark.parametrize(
    "where", quick.some([Placement(data=2, fsdp=2), Placement(data=4)], 0), ids=str
)
def test_an_update_only_gathers_and_exchanges(where):
    """Statistics of tokens are worked out whole on every device, with nothing to reduce."""
    what = execution(where)
    run = built(what)
    state = run.init(tiny.params(CONFIG))
    weights, rewards = run.prepare(state.params), tiny.rewards(rows=PROMPTS * GROUP)
    batch = run.experience(weights, None, state.carried, rollout(execution()), rewards).experience
    update = compiled(run.update, state, weights, batch, jnp.int32(0), jnp.float32(3))
    assert set(collectives(update)) == {"all-gather", "all-to-all"}


def test_corrections_are_the_same_bits_for_any_split():
    correction = corrections.build([{"name": "token_tis"}, {"name": "normalise"}])
    results = []
    for where in (SINGLE, Placement(data=2, fsdp=2)):
        what = execution(where)
        learning = replace(LEARNING, mode="recompute", micro_batch=4, correction=correction)
        run = programs.build(Training(what, learning, OPTIMIZER, PROMPTS))
        # Another policy's log-probs, so that there is something to correct.
        other = run.prepare(tiny.moved(tiny.params(CONFIG)))
        state = run.init(tiny.params(CONFIG))
        rewards = tiny.rewards(rows=PROMPTS * GROUP)
        found = run.experience(other, None, state.carried, rollout(execution()), rewards)
        results.append(tiny.bits(found))
    assert results[0] == results[1]
    assert len(set(np.asarray(found.experience.coefficients).ravel().tolist())) > 5


@pytest.mark.slow
def test_energies_and_the_gradients_noise_are_those_of_one_device():
    """Advantages of tokens by the size of their score, from micro-batches of two rows a device."""
    objective = objectives.rloo(estimator="optimal_token_baseline")
    steps, prepared = [], []
    for where in (SINGLE, Placement(data=2, fsdp=2)):
        learning = Learning(objective, GROUP, micro_batch=8, noise_scale=True)
        run = programs.build(Training(execution(where), learning, OPTIMIZER, PROMPTS))
        state, rewards = run.init(tiny.params(CONFIG)), tiny.rewards(rows=PROMPTS * GROUP)
        weights, drawn = run.prepare(state.params), rollout(execution())
        prepared.append(run.experience(weights, None, state.carried, drawn, rewards))
        steps.append(loop.learn(state, weights, drawn, rewards, programs=run)[-1])
    assert tiny.bits(prepared[0]) == tiny.bits(prepared[1])
    assert prepared[0].experience.advantages.ndim == 2
    for name in ("gradient_signal", "gradient_noise", "noise_scale", "gradient_norm", "loss"):
        assert steps[0][name] == pytest.approx(steps[1][name], rel=1e-3), name
    assert steps[0]["gradient_noise"] > 0.0


@pytest.mark.slow
def test_greedy_responses_are_those_of_one_device():
    learning = Learning(objectives.rloo(estimator="remax"), GROUP)
    drawn = []
    for where in (SINGLE, Placement(data=2, fsdp=2)):
        run = programs.build(Training(execution(where), learning, OPTIMIZER, PROMPTS))
        assert run.greedy is not None
        weights = run.prepare(tiny.params(CONFIG))
        drawn.append(run.greedy(weights, tiny.prompts(count=PROMPTS), jax.random.key(where.data)))
    assert drawn[0].lengths.shape == (PROMPTS,)
    assert tiny.bits(drawn[0]) == tiny.bits(drawn[1])


def test_one_mesh_shares_the_very_arrays():
    what = execution(Placement(fsdp=2))
    run = built(what)
    weights = run.prepare(tiny.params(CONFIG))
    assert run.publish(None, weights) is weights


@pytest.mark.parametrize(
    ("learner_at", "sampler_at"),
    [
        (Placement(fsdp=4), Placement(data=2, tensor=2)),
        (SINGLE, Placement(fsdp=2)),
        (Placement(tensor=2), SINGLE),
    ],
    ids=str,
)
def test_publish_moves_every_bit(learner_at, sampler_at):
    learner, drawing = execution(learner_at), execution(sampler_at)
    params = tiny.params(CONFIG)
    weights = programs.weights_program(learner)(params)
    moved = programs.publication(learner, drawing)(params, weights)
    assert tiny.bits(moved) == tiny.bits(weights)
    expected = programs.weights_program(drawing)(params)
    assert tiny.bits(moved) == tiny.bits(expected)
    where = jax.tree.map(lambda x: x.sharding.device_set, expected)
    assert jax.tree.map(lambda x: x.sharding.device_set, moved) == where


def test_publish_casts_from_the_masters():
    learner = execution(Placement(fsdp=2))
    drawing = execution(Placement(tensor=2), numerics=BF16)
    params = programs.build(Training(learner, LEARNING, OPTIMIZER)).init(tiny.params(CONFIG)).params
    weights = programs.weights_program(learner)(params)
    moved = programs.publication(learner, drawing)(params, weights)
    assert tiny.bits(moved) == tiny.bits(programs.weights_program(drawing)(params))
    assert moved["head"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_sampler_on_another_mesh_is_exact():
    what = execution(Placement(fsdp=2))
    run = built(what, sampler_placement=Placement(tensor=4))
    state = run.init(tiny.params(CONFIG))
    weights = run.prepare(state.params)
    published = run.publish(state.params, weights)
    drawn = run.sample(published, tiny.prompts(count=PROMPTS), jax.random.key(0))
    rewards = tiny.rewards(rows=PROMPTS * GROUP)
    assert tiny.bits(drawn) == tiny.bits(rollout(execution()))
    _, _, found, _ = loop.learn(state, weights, drawn, rewards, programs=run)
    assert (int(found.unequal), int(found.compared)) == (0, int(drawn.lengths.sum()))


@pytest.mark.parametrize(
    ("count", "where"),
    [
        pytest.param(6, Placement(fsdp=4), marks=pytest.mark.slow),
        pytest.param(1, Placement(fsdp=2), marks=pytest.mark.slow),
    ],
)
def test_groups_may_be_split_over_devices(count, where):
    """More devices than prompts, or a number of prompts that they do not divide."""
    what = execution(where, numerics=tiny.NUMERICS)
    weights = programs.weights_program(what)(tiny.params(CONFIG))
    prompts = tiny.prompts(count=count) if count <= 4 else tiny.prompts(count=count, seed=3)
    found = built(what).sample(weights, prompts, jax.random.key(2))
    alone = replace(what, placement=SINGLE)
    weights = programs.weights_program(alone)(tiny.params(CONFIG))
    expected = built(alone).sample(weights, prompts, jax.random.key(2))
    assert tiny.bits(found) == tiny.bits(expected)


def test_rows_that_do_not_divide_are_refused():
    what = execution(Placement(fsdp=8), numerics=tiny.NUMERICS)
    with pytest.raises(InputError, match=r"data x fsdp = 8 must divide the 4 sequences"):
        built(what).sample({}, tiny.prompts(count=1), jax.random.key(0))


@pytest.mark.slow
def test_every_program_compiles_once():
    what = execution(Placement(data=2, fsdp=2))
    run = programs.build(Training(what, LEARNING, OPTIMIZER, PROMPTS))
    with tiny.compilations() as counted:
        state = run.init(tiny.params(CONFIG))
        weights = run.prepare(state.params)
        for step in range(3):
            prompts = tiny.prompts(seed=step, count=PROMPTS)
            published = run.publish(state.params, weights)
            drawn = run.sample(published, prompts, drawing.step_key(0, step))
            rewards = tiny.rewards(seed=step, rows=PROMPTS * GROUP)
            state, weights, found, _ = loop.learn(state, weights, drawn, rewards, programs=run)
            state = replace(state, step=state.step + jnp.int32(1))
            assert int(found.unequal) == 0
    for name in ("sample", "update", "init"):
        assert counted[name] == 1, (name, counted)


@pytest.mark.parametrize("names", [("fsdp",), ("data", "tensor")], ids=str)
def test_sums_over_devices_are_in_order_and_whole(names):
    """Of addends of very different sizes, one a device; against the same sum on one device."""
    where = Placement(data=2, fsdp=4) if names == ("fsdp",) else Placement(data=2, tensor=4)
    count = 4 if names == ("fsdp",) else 8
    on = placement.mesh(where, jax.devices())
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((count, 3, 5)) * 10.0 ** rng.integers(-6, 6, (count, 1, 1)))
    x = x.astype(jnp.float32)
    spec = jax.sharding.PartitionSpec(names)
    local = jax.shard_map(
        lambda x: crossing.total(x[0], names),
        mesh=on,
        in_specs=spec,
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    expected = x
    while expected.shape[0] > 1:
        expected = expected[::2] + expected[1::2]
    assert tiny.bits(jax.jit(local)(x)) == tiny.bits(expected[0])


DIAL = mismatch.build(
    [
        {"name": "quantised_weights", "dtype": "int8"},
        {"name": "kv_cache", "dtype": "float8_e4m3fn"},
        {"name": "tensor_parallel", "ranks": 4},
        {"name": "logit_noise", "std": 0.05},
        {"name": "raw_log_probs"},
        {"name": "dropped_end", "replacement": 0},
    ]
)


@pytest.mark.slow
def test_a_sampler_that_differs_differs_in_the_same_way_on_a_mesh():
    """Its entries see the same model, and its noise does not know the device."""
    what = execution(Placement(data=2, fsdp=2, tensor=2), temperature=0.8)
    found = []
    for here in (replace(what, placement=SINGLE), what):
        run = programs.build(Training(here, LEARNING, OPTIMIZER, PROMPTS).varied(mismatch=DIAL))
        state = run.init(tiny.params(CONFIG))
        weights = run.prepare(state.params)
        drawn = run.sample(weights, tiny.prompts(count=PROMPTS), jax.random.key(0))
        assert run.compare is not None
        compared, _ = run.compare(weights, weights, drawn, None)
        found.append((tiny.bits(drawn), {k: float(v) for k, v in compared.items()}))
    assert found[0] == found[1]
    assert found[0][1]["mismatch/log_ratio_abs_mean"] > 0.01


def test_ranks_need_whole_weights():
    dial = mismatch.build([{"name": "tensor_parallel", "ranks": 2}])
    with pytest.raises(InputError, match=r"'tensor_parallel': needs whole rows"):
        programs.build(
            Training(execution(Placement(fsdp=4, decode="sharded")), LEARNING, OPTIMIZER).varied(
                mismatch=dial
            )
        )
