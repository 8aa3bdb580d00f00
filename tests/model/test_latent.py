"""Latent attention (MLA) and DeepSeek-V3's mixtures: gradients, exactness, the cache, the dial."""

from dataclasses import replace
from functools import cache, partial

import dials
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny
from checkpoints import CASES, make_config
from interpreted import GPU, TPU
from reference import reference_log_probs

from tim_jax import kernels, mismatch, objectives, optimizers
from tim_jax.common.errors import InputError
from tim_jax.common.types import Rollout
from tim_jax.instruments.auditing import random_params
from tim_jax.mismatch.transfer import QuantisedWeights
from tim_jax.model import adapters, fitting, parameters, rope, transformer
from tim_jax.model.adapters import Lora
from tim_jax.model.config import DENSE, LatentConfig
from tim_jax.model.config_file import from_hf
from tim_jax.model.execution import Batching, Execution, Sampling
from tim_jax.model.hf import PUBLISHED
from tim_jax.numerics import GPU_EXACT_BF16, NATIVE_F32, TPU_EXACT_BF16, GpuTiles, MatmulTile
from tim_jax.placement import SINGLE, Placement
from tim_jax.policy import scoring
from tim_jax.rl import loop, programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

# A dense layer and one with experts; every size is another.
CONFIG = replace(
    tiny.UNTIED,
    model_type="deepseek_v3",
    qk_norm=False,
    num_kv_heads=2,
    head_dim=4,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    norm_topk_prob=True,
    num_shared_experts=2,
    first_dense_layers=1,
    router_groups=3,
    router_groups_per_tok=2,
    routed_scaling_factor=1.5,
    latent=LatentConfig(
        kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, q_lora_rank=8
    ),
)
EXECUTION = Execution(CONFIG, tiny.NUMERICS, tiny.SAMPLING)
LATENT = [name for name in CASES if name.startswith("deepseek")]


def case(name):
    return from_hf(make_config(name).to_dict() | {"architectures": None})


# --- gradients ------------------------------------------------------------------------------------


def fraction(params, direction, config, tokens, mask):
    """The reference's change of the mean log-prob along a direction: central differences, f64."""
    inv_freq, _ = rope.frequencies(config.rope, config.head_dim)

    def mean(step):
        moved = jax.tree.map(lambda p, d: np.float64(p) + step * d, params, direction)
        return (reference_log_probs(moved, tokens, config, inv_freq=inv_freq) * mask).sum()

    return (mean(1e-6) - mean(-1e-6)) / 2e-6


@pytest.mark.parametrize("name", quick.some([*LATENT, "qwen3_moe"], 0))
def test_the_gradient_of_every_weight_is_that_of_the_reference(name):
    """Along random directions, a weight at a time; the routers' choices stay as they are."""
    config = case(name)
    params, rng = random_params(config, 3), np.random.default_rng(3)
    tokens, prompt = rng.integers(0, config.vocab_size, 24), 7
    rollout = Rollout(
        prompts=jnp.asarray(tokens[None, :prompt], jnp.int32),
        prompt_lengths=jnp.asarray([prompt], jnp.int32),
        responses=jnp.asarray(tokens[None, prompt:], jnp.int32),
        lengths=jnp.asarray([24 - prompt], jnp.int32),
        log_probs=jnp.zeros((1, 24 - prompt)),
        finished=jnp.ones((1,), bool),
    )
    weights = rng.standard_normal(24 - prompt)
    execution = Execution(config, NATIVE_F32, Sampling(24 - prompt))

    @jax.jit
    def gradient(params):
        def loss(params):
            log_probs = scoring.score(execution.prepare(params), rollout, execution=execution)
            return jnp.vdot(log_probs.log_probs[0], jnp.asarray(weights, jnp.float32))

        return jax.grad(loss)(params)

    found = jax.device_get(gradient(jax.tree.map(jnp.asarray, params)))
    mask = np.concatenate([np.zeros(prompt - 1), weights])
    paths = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in paths:
        noise = rng.standard_normal(leaf.shape) / np.sqrt(leaf.size)
        direction = jax.tree_util.tree_map_with_path(
            lambda p, x, path=path, noise=noise: noise if p == path else np.zeros(x.shape), params
        )
        expected = fraction(params, direction, config, tokens, mask)
        mine = dict(jax.tree_util.tree_leaves_with_path(found))[path]
        size = np.linalg.norm(mine) / np.sqrt(leaf.size)
        assert np.vdot(mine, noise) == pytest.approx(expected, abs=2e-3 * size + 1e-6), path
        assert (size > 0) == (path[-1].key != "router_bias"), path


def test_the_bias_of_the_router_is_no_parameter_of_an_optimiser():
    """What an update and a warm start do with new parameters; weight decay moves all others."""
    params = tiny.moved(tiny.params(CONFIG))
    decayed = jax.tree.map(lambda x: 0.9 * x, params)
    kept = parameters.with_buffers(decayed, params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(kept):
        source = params if path[-1].key == "router_bias" else decayed
        expected = dict(jax.tree_util.tree_leaves_with_path(source))[path]
        np.testing.assert_array_equal(leaf, expected)


# --- exactness ------------------------------------------------------------------------------------


def unequal(execution, drawn, rows=slice(None)):
    """(tokens that differ, tokens compared) of a learner's forward within its gradient."""
    part = jax.tree.map(lambda x: jnp.asarray(x[rows]), drawn)
    found = np.asarray(tiny.learner(execution)(tiny.weights(execution), part)).view(np.int32)
    mask, recorded = np.asarray(part.mask), np.asarray(part.log_probs).view(np.int32)
    return int(((found != recorded) & mask).sum()), int(mask.sum())


def test_sampler_and_learner_agree_to_the_bit():
    """In other dtypes too for a preset with latent attention, in tests/test_exactness.py."""
    drawn = tiny.rollout(EXECUTION)
    for rows, least in ((slice(None), 50), (slice(3, 8), 10)):
        wrong, compared = unequal(EXECUTION, drawn, rows)
        assert wrong == 0
        assert compared > least


@pytest.mark.slow
def test_slots_and_pages_draw_the_same():
    whole = tiny.rollout(EXECUTION)
    assert whole.lengths.sum() > 50
    paged = tiny.rollout(EXECUTION, batching=Batching(4, 0, 12))
    assert tiny.bits(paged) == tiny.bits(whole)


# Sizes that four devices divide.
assert CONFIG.latent is not None
EVEN = replace(
    CONFIG,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=4,
    latent=replace(CONFIG.latent, qk_nope_head_dim=8, v_head_dim=12),
)
MESH = Placement(data=2, fsdp=2)


@cache
def built(where):
    learning = Learning(objectives.rloo(), tiny.GROUP, routing="compared")
    optimizer = optimizers.adamw(optimizers.Rate(1e-2), weight_decay=0.1)
    execution = Execution(EVEN, tiny.NUMERICS, tiny.SAMPLING, where)
    return programs.build(Training(execution, learning, optimizer))


def even_params():
    return tiny.moved(tiny.params(EVEN))


@cache
def drawn_on(where):
    """Sixteen sequences, and the experts of every token."""
    run = built(where)
    weights, prompts = run.prepare(even_params()), tiny.prompts(count=4)
    return jax.device_get(run.sample(weights, prompts, jax.random.key(0)))


@pytest.mark.slow
@pytest.mark.parametrize("where", [MESH, Placement(fsdp=4, decode="sharded")], ids=str)
def test_any_placement_draws_as_one_device_does(where):
    alone = drawn_on(SINGLE)
    assert alone.lengths.sum() > 50
    assert tiny.bits(drawn_on(where)) == tiny.bits(alone)


@pytest.mark.slow
def test_an_update_on_a_mesh_has_the_bits_of_its_rollout():
    """And the routers' biases stay."""
    run, drawn = built(MESH), drawn_on(MESH)
    state = run.init(even_params())
    before = np.asarray(state.params["layers"]["router_bias"])
    state, _, found, metrics = loop.learn(
        state, run.prepare(state.params), drawn, tiny.rewards(rows=16), programs=run
    )
    assert int(found.compared) == drawn.lengths.sum() > 50
    assert int(found.unequal) == 0
    assert metrics["routing/agreement"] == 1
    assert metrics["gradient_norm"] > 0
    assert before.any()
    np.testing.assert_array_equal(state.params["layers"]["router_bias"], before)


# --- the cache --------------------------------------------------------------------------------


def test_the_cache_has_the_compressed_states_and_no_heads():
    """One key for all heads, the state and the rotated part; the value is the state."""
    tokens = jnp.zeros((3, 7), jnp.int32)
    forward = jax.jit(partial(transformer.forward, execution=EXECUTION))
    positions = jnp.broadcast_to(jnp.arange(7)[None], (3, 7))
    _, cache, _ = forward(tiny.weights(EXECUTION), tokens, positions)
    latent, layers = CONFIG.latent, CONFIG.num_layers
    assert latent is not None
    assert cache.key.shape == (layers, 3, 1, latent.kv_lora_rank + latent.qk_rope_head_dim, 7)
    assert cache.value.shape == (layers, 3, 1, 7, latent.kv_lora_rank)
    states = np.asarray(cache.key)[:, :, :, : latent.kv_lora_rank]
    np.testing.assert_array_equal(states.swapaxes(3, 4), cache.value)


# --- kernels for devices ------------------------------------------------------------------------

# Whole tiles, but for what DeepSeek-V3 has not either: columns of the compressed state and the
# rotated key, and heads of a size that is no power of two. One layer: that of experts has every
# kernel, as the shared one is dense.
BLOCKS = replace(
    CONFIG,
    num_layers=1,
    first_dense_layers=0,
    vocab_size=128,
    hidden_size=128,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=128,
    max_positions=256,
    num_experts=16,
    router_groups=4,
    moe_intermediate_size=128,
    num_shared_experts=1,
    latent=LatentConfig(
        kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
)
GPU_TILES = GpuTiles(
    block_k=64, matmul=(MatmulTile(16, 32),), attention_rows=16, row_tile=8, lanes=32
)
FAMILIES = {
    "gpu": replace(GPU, gpu=GPU_TILES),
    "tpu": replace(TPU, tpu=replace(TPU.tpu, attention_blocks=4)),
}


@pytest.mark.parametrize(("name", "dtype"), [("gpu", "float32"), ("tpu", "bfloat16")])
def test_values_may_be_narrower_than_keys_in_every_kernel(name, dtype):
    """Against float64; a token alone has the bits of the whole sequence."""
    numerics = replace(FAMILIES[name], compute_dtype=dtype)
    rng, length = np.random.default_rng(0), 37

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape) * 0.3, numerics.dtype)

    query, key = normal(2, 1, length * 2, 48), normal(2, 1, 48, length)
    value = normal(2, 1, length, 32)
    at = jnp.broadcast_to(jnp.repeat(jnp.arange(length), 2)[None], (2, 2 * length))
    run = jax.jit(partial(kernels.family(numerics).attention, numerics=numerics, aligned=False))
    whole = np.asarray(run(query, key, value, at).astype(jnp.float32))
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64)[:, 0] for x in (query, key, value))
    hidden = np.asarray(at)[:, :, None] < np.arange(length)[None, None, :]
    scores = np.where(hidden, -np.inf, q @ k)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    expected = shares / shares.sum(-1, keepdims=True) @ v
    error = 2e-6 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(whole[:, 0], expected, atol=error * np.abs(expected).max())
    one = run(query[:, :, 20:22], key, value, at[:, 20:22])
    assert np.array_equal(np.asarray(one.astype(jnp.float32)), whole[:, :, 20:22])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("gpu", "bfloat16"), ("tpu", "float32")])
def test_the_kernels_of_devices_agree_to_the_bit(name, dtype):
    numerics = fitting.fitted(BLOCKS, replace(FAMILIES[name], compute_dtype=dtype))
    fitting.check(BLOCKS, numerics)
    execution = Execution(BLOCKS, numerics, Sampling(7, stop_tokens=(3,)))
    wrong, compared = unequal(execution, tiny.rollout(execution), slice(2, 9))
    assert wrong == 0
    assert compared > 30


@pytest.mark.parametrize("numerics", [GPU_EXACT_BF16, TPU_EXACT_BF16], ids=["gpu", "tpu"])
@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "moonshotai/Moonlight-16B-A3B"])
def test_published_models_have_kernels(name, numerics):
    config = from_hf(PUBLISHED[name])
    numerics = replace(numerics, interpret=True)
    fitted = fitting.fitted(config, numerics)
    fitting.check(config, fitted)
    assert "attention" in fitting.kernels_used(config, fitted)


def test_what_a_gpu_cannot_take_is_refused_by_name():
    assert BLOCKS.latent is not None
    odd = replace(BLOCKS, latent=replace(BLOCKS.latent, kv_lora_rank=96))
    with pytest.raises(InputError, match="compressed state of 96 numbers"):
        fitting.check(odd, FAMILIES["gpu"])


# --- the dial -----------------------------------------------------------------------------------


@cache
def quantised(group):
    """An entry of the dial, and the weights that it makes; in one program, not one by one."""
    entry = dials.entry("quantised_weights", dtype="int8", group=group)
    entry.check(EXECUTION)
    return entry, jax.jit(entry.weights)(tiny.weights(EXECUTION))


@pytest.mark.slow
def test_the_weights_of_every_layer_are_quantised():
    before, (_, after) = tiny.weights(EXECUTION), quantised(0)
    changed = {
        (stack, name)
        for stack in CONFIG.stacks
        for name in before[stack]
        if tiny.bits(before[stack][name]) != tiny.bits(after[stack][name])
    }
    common = {"q_down", "q_up", "kv_down", "k_up", "v_up", "o"}
    of_experts = {"expert_gate_up", "expert_down", "shared_gate_up", "shared_down"}
    assert changed == {
        *(("dense_layers", name) for name in common | {"gate_up", "down"}),
        *(("layers", name) for name in common | of_experts),
    }


@pytest.mark.slow
@pytest.mark.parametrize("group", [0, 4])
def test_a_head_by_head_matrix_is_quantised_as_the_checkpoint_has_it(group):
    """`kv_b_proj` makes keys and values out of states: a scale per key or value of a head."""
    entry, found = quantised(group)
    params, latent = tiny.params(CONFIG), CONFIG.latent
    assert latent is not None
    assert isinstance(entry, QuantisedWeights)
    rounded = {**params["layers"], "kv_up": jax.jit(entry.rounded)(params["layers"]["kv_up"])}
    expected = jax.jit(EXECUTION.prepare)({**params, "layers": rounded})["layers"]
    found, before = found["layers"], tiny.weights(EXECUTION)["layers"]
    for name in ("k_up", "v_up"):
        np.testing.assert_array_equal(found[name], expected[name])
        assert tiny.bits(found[name]) != tiny.bits(before[name])
    assert found["k_up"].shape[1:] == (2, latent.qk_nope_head_dim, latent.kv_lora_rank)


def test_a_group_that_does_not_divide_the_state_is_refused():
    with pytest.raises(InputError, match=r"group = 5 does not divide"):
        dials.entry("quantised_weights", dtype="int8", group=5).check(EXECUTION)


@pytest.mark.parametrize("name", ["tensor_parallel", "triton_attention"])
def test_what_needs_plain_heads_is_refused(name):
    dense = replace(CONFIG, **DENSE)
    arguments = {"ranks": 2} if name == "tensor_parallel" else {}
    with pytest.raises(InputError, match="latent attention"):
        dials.entry(name, **arguments).check(replace(EXECUTION, config=dense))


# One layer with experts: what an entry does to a layer it does to every one of that kind.
ONE = replace(EXECUTION, config=replace(CONFIG, num_layers=1, first_dense_layers=0))
CACHE = {"name": "kv_cache", "dtype": "float8_e4m3fn"}


@cache
def scorer(dial):
    """(weights, rollout) -> log-probs by a forward that differs as the dial says."""
    other = replace(ONE, numerics=dial.numerics(ONE.numerics))

    def log_probs(weights, rollout):
        return scoring.score(dial.weights(weights), rollout, execution=other).log_probs

    return jax.jit(log_probs)


def check_a_little(dial, rollout):
    """The forward of the dial gives the rollout's tokens other log-probs, but not far off."""
    found = scorer(dial)(tiny.weights(ONE), rollout)
    differences = np.abs(np.asarray(found) - np.asarray(rollout.log_probs))
    differences = differences[np.asarray(rollout.mask)]
    assert differences.size > 30
    assert differences.max() > 0
    assert np.median(differences) < 0.5  # a token that goes to another expert may be far off


@pytest.mark.slow
@pytest.mark.parametrize(
    "table",
    [
        CACHE,
        {"name": "split_k", "pieces": 3},
        {"name": "pallas_attention", "interpret": True},
        {"name": "quantised_weights", "dtype": "int8"},
        {"name": "router", "dtype": "bfloat16"},
    ],
    ids=lambda table: table["name"],
)
def test_sources_of_the_dial_change_log_probs_a_little(table):
    """By a forward of what an exact sampler drew."""
    dial = dials.dial(table)
    mismatch.check(dial, ONE)
    check_a_little(dial, tiny.rollout(ONE))


@pytest.mark.slow
def test_a_sampler_that_cuts_the_keys_differs_a_little():
    """Which only decoding does; the rounded cache is on both sides."""
    dial = dials.dial(CACHE, {"name": "split_kv", "programs": 132})
    program = programs.sampling_program(ONE, samples=tiny.GROUP, mismatch=dial)
    drawn = program(tiny.weights(ONE), tiny.prompts(), jax.random.key(0))
    check_a_little(dials.dial(CACHE), drawn)


def test_adapters_are_refused_for_latent_attention():
    with pytest.raises(InputError, match="deepseek_v3 model, with latent attention"):
        adapters.targets(CONFIG, Lora(rank=2))
