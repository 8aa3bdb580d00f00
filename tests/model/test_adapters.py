"""Adapters: one rule of merging for both sides, gradients, memory, and PEFT's files."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import tiny

from tim_jax import mismatch, objectives, optimizers
from tim_jax.common.errors import InputError
from tim_jax.instruments import auditing
from tim_jax.model import adapters, hf
from tim_jax.model.adapters import Adapter, Lora
from tim_jax.numerics import Precision
from tim_jax.placement import SINGLE, Placement
from tim_jax.policy import scoring
from tim_jax.rl import loop, programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Carried, Learning

LORA = Lora(rank=3, alpha=6.0)
LEARNING = Learning(objectives.rloo(), tiny.GROUP)
RATE = optimizers.Rate(5e-2)
UNTIED = replace(tiny.EXECUTION, config=tiny.UNTIED)
MIXTURE = replace(
    tiny.UNTIED,
    model_type="qwen3_moe",
    num_layers=1,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
)


def execution(config=tiny.CONFIG, numerics=tiny.NUMERICS, where=SINGLE, lora: Lora | None = LORA):
    return replace(tiny.EXECUTION, config=config, numerics=numerics, placement=where, lora=lora)


@cache
def built(what, learning=LEARNING, **options):
    optimizer = optimizers.adamw(RATE)
    if what.numerics.dtype == jnp.float16:
        # Small enough that no update of a test is skipped.
        optimizer = optimizers.LossScale(initial=2.0**8).transform(optimizer)
    return programs.build(Training(what, learning, optimizer, prompts_per_step=4).varied(**options))


def start(what, learning=LEARNING, **options):
    """(programs, state, base) before the first update."""
    run = built(what, learning, **options)
    base = run.place(adapters.narrowed(tiny.params(what.config)))
    return run, run.init(adapters.init(what.config, what.lora, 0)), base


def stepped(what, learning=LEARNING, updates=2, **options):
    """(state, base, weights, exactness of each step, metrics of the last) after some steps."""
    run, state, base = start(what, learning, **options)
    weights = run.prepare(adapters.whole(state.params, base))
    found, metrics = [], {}
    for number in range(updates):
        given = run.publish(adapters.whole(state.params, base), weights)
        rollout = run.sample(given, tiny.prompts(count=4), jax.random.key(number))
        rewards = tiny.rewards(seed=number, rows=4 * tiny.GROUP)
        state, weights, compared, metrics = loop.learn(
            state, weights, rollout, rewards, programs=run, base=base
        )
        found.append((int(compared.compared), int(compared.unequal)))
    return state, base, weights, found, metrics


def drawn(config=tiny.CONFIG, lora=LORA, seed=3):
    """Adapters that change the model."""
    rng = np.random.default_rng(seed)
    shapes = adapters.shapes(config, lora)
    return jax.tree.map(lambda x: 0.2 * rng.standard_normal(x.shape, np.float32), shapes)


@pytest.mark.slow
def test_micro_batches_of_tokens_are_exact_and_learn_the_same():
    """As all sequences at once, whose programs other tests have too."""
    ends = []
    for learning in (LEARNING, replace(LEARNING, micro_batch_tokens=40)):
        state, _, _, found, _ = stepped(execution(), learning)
        assert all(unequal == 0 < compared for compared, unequal in found)
        ends.append(state.params)
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


# The rule


@pytest.mark.parametrize("dtype", [np.float32, "bfloat16"])
def test_without_a_product_the_weights_have_the_bits_of_the_base(dtype):
    numerics = tiny.BF16 if dtype == "bfloat16" else tiny.NUMERICS
    what, params = execution(numerics=numerics), tiny.params()
    params = params | {"embed": params["embed"].at[0].set(-0.0)}
    params["layers"] = params["layers"] | {"q": params["layers"]["q"].at[0, 0].set(-0.0)}
    own = adapters.init(tiny.CONFIG, LORA, 0)
    assert all(np.abs(parts["a"]).max() > 0 for parts in own.values())
    base = adapters.narrowed(jax.device_get(params))
    prepare = jax.jit(what.prepare)
    assert tiny.bits(prepare(adapters.whole(own, base))) == tiny.bits(prepare(params))


def test_the_rule_is_a_float32_sum_rounded_once():
    own, params = drawn(), tiny.params()
    merged = adapters.merged(
        adapters.whole(own, params), config=tiny.CONFIG, lora=LORA, numerics=tiny.BF16
    )
    for name, row in adapters.targets(tiny.CONFIG, LORA).items():
        a, b = (np.asarray(own[name][part], np.float64) for part in ("a", "b"))
        whole = np.asarray(params["layers"][row.name], np.float64) + LORA.scale * (a @ b)
        found = np.asarray(merged["layers"][row.name])
        assert found.dtype == jnp.bfloat16
        # But for ties the nearest bfloat16: half a unit in the last place, and float32's error.
        error = np.abs(np.float64(found) - whole)
        assert (error <= np.abs(whole) * 2.0**-8 * 1.01 + 1e-6).all()
        wide = adapters.merged(
            adapters.whole(own, params), config=tiny.CONFIG, lora=LORA, numerics=tiny.NUMERICS
        )
        np.testing.assert_allclose(wide["layers"][row.name], whole, rtol=0, atol=1e-6)


def test_merged_parameters_follow_a_rule_that_the_learner_has_by_the_dial():
    """Else a model that was trained so would not compute what training did."""
    numerics = replace(tiny.NUMERICS, precision=Precision(lora="bfloat16"))
    what, params = execution(numerics=numerics), adapters.whole(drawn(), tiny.params())
    merged = programs.merged_program(what)(params)
    prepare = programs.weights_program(replace(what, lora=None))
    assert tiny.bits(prepare(merged)) == tiny.bits(jax.jit(what.prepare)(params))


def test_a_rule_that_rounds_rounds_a_base_to_which_nothing_is_added():
    numerics = replace(tiny.NUMERICS, precision=Precision(lora="bfloat16"))
    own, params = adapters.init(tiny.CONFIG, LORA, 0), tiny.params()
    found = adapters.merged(
        adapters.whole(own, params), config=tiny.CONFIG, lora=LORA, numerics=numerics
    )
    for row in adapters.targets(tiny.CONFIG, LORA).values():
        base = params["layers"][row.name]
        rounded = base.astype(jnp.bfloat16).astype(jnp.float32)
        assert (found["layers"][row.name] == rounded).all()
        assert (found["layers"][row.name] != base).any()


@pytest.mark.parametrize("where", [Placement(fsdp=2), Placement(fsdp=2, tensor=2)], ids=str)
def test_the_merged_bits_do_not_depend_on_the_mesh(where):
    config = replace(tiny.CONFIG, num_kv_heads=2)
    numerics = replace(tiny.NUMERICS, column_tiles=2)
    params = adapters.whole(drawn(config), tiny.params(config))
    found = [
        tiny.bits(programs.weights_program(execution(config, numerics, at))(params))
        for at in (SINGLE, where)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("tiles", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_is_learned_does_not_depend_on_the_tensor_axis(tiles):
    """One tile on each device, and two."""
    config = replace(tiny.CONFIG, num_layers=1, num_heads=4, num_kv_heads=4)
    numerics = replace(tiny.NUMERICS, column_tiles=tiles)
    ends = []
    for at in (SINGLE, Placement(tensor=2)):
        state, _, _, found, _ = stepped(execution(config, numerics, at))
        assert all(unequal == 0 < compared for compared, unequal in found)
        ends.append(state.params)
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_a_base_is_kept_in_the_narrowest_dtype_that_loses_nothing():
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((4, 4)).astype(np.float32)
    narrow = np.asarray(wide.astype(jnp.bfloat16)).astype(np.float32)
    zero = np.asarray([-0.0, 0.0], np.float32)
    found = adapters.narrowed({"wide": wide, "narrow": narrow, "zero": zero})
    assert found["wide"].dtype == np.float32
    assert found["narrow"].dtype == found["zero"].dtype == jnp.bfloat16
    assert np.array_equal(found["narrow"].astype(np.float32), narrow)
    assert np.signbit(found["zero"].astype(np.float32)).tolist() == [True, False]


# Training


# The first has two layers; what else differs does so in one.
CASES = [
    (tiny.CONFIG, tiny.NUMERICS, SINGLE),
    (replace(tiny.UNTIED, num_layers=1), tiny.BF16, Placement(fsdp=2)),
    (MIXTURE, tiny.F16, SINGLE),
]


@pytest.mark.parametrize(("config", "numerics", "where"), quick.some(CASES, 0))
def test_sampler_and_learner_are_equal_after_updates_and_the_base_stays(config, numerics, where):
    what = execution(config, numerics, where)
    before = tiny.bits(adapters.narrowed(tiny.params(config)))
    state, base, weights, found, metrics = stepped(what, updates=3)
    assert [unequal for _, unequal in found] == [0, 0, 0]
    assert min(compared for compared, _ in found) > 30
    assert metrics["gradient_norm"] > 0
    assert all(np.abs(parts["b"]).max() > 0.05 for parts in state.params.values())
    assert tiny.bits(base) == before
    # What an update hands on is what a resumed run makes again, and what the merged model computes.
    run = built(what)
    params = adapters.whole(state.params, base)
    assert tiny.bits(run.prepare(params)) == tiny.bits(weights)
    plain = programs.weights_program(replace(what, lora=None))
    assert run.merged is not None
    assert tiny.bits(plain(run.merged(params))) == tiny.bits(weights)


@pytest.mark.parametrize(
    "lora", quick.some([LORA, Lora(rank=2, targets=("q_proj", "down_proj"))], 0), ids=["all", "two"]
)
def test_the_weights_after_an_update_are_those_prepared_anew(lora):
    """Though only what adapters change is made again."""
    what = execution(lora=lora)
    state, base, weights, _, _ = stepped(what)
    fresh = built(what).prepare(adapters.whole(state.params, base))
    for one, other in zip(*map(jax.tree.leaves, (weights, fresh)), strict=True):
        assert tiny.bits(one) == tiny.bits(other)
    first = adapters.init(what.config, lora, 0)
    before = built(what).prepare(adapters.whole(first, base))
    moved = [
        name
        for name, leaf in weights["layers"].items()
        if tiny.bits(leaf) != tiny.bits(before["layers"][name])
    ]
    assert sorted(moved) == sorted(adapters.changed(what.config, lora))


def test_the_optimiser_has_the_size_of_the_adapters_alone():
    what = execution(lora=Lora(rank=2, targets=("q_proj", "down_proj")))
    _, state, base = start(what)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    inputs, query, inside = tiny.CONFIG.hidden_size, 16, tiny.CONFIG.intermediate_size
    assert count == tiny.CONFIG.num_layers * 2 * (inputs + query + inside + inputs)
    arrays = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert sum(leaf.size for leaf in arrays) == 2 * count
    assert not {leaf.shape for leaf in arrays} & {leaf.shape for leaf in jax.tree.leaves(base)}
    assert set(state.params) == {"q_proj", "down_proj"}


def plain_loss(own, params, batch, token_weights, what):
    """The loss by plain float32 operations, differentiated by JAX alone."""
    layers = dict(params["layers"])
    for name, row in adapters.targets(what.config, what.lora).items():
        product = jnp.matmul(own[name]["a"], own[name]["b"], precision="highest")
        layers[row.name] = layers[row.name] + what.lora.scale * product
    native = replace(what.numerics, family="native")
    plain = replace(what, numerics=native, lora=None)
    weights = plain.prepare({**params, "layers": layers})
    log_probs = scoring.score(weights, batch.rollout, execution=plain).log_probs
    losses = -log_probs * batch.advantages[:, None]
    return jnp.sum(token_weights * jnp.where(batch.mask, losses, 0.0))


@pytest.mark.slow
def test_gradients_are_those_of_a_plain_implementation():
    """Of a loss without a ratio, so that tokens may be those of the model without adapters."""
    config, lora = tiny.UNTIED, replace(LORA, targets=("k_proj", "o_proj", "up_proj", "down_proj"))
    what = execution(config, lora=lora)
    learning = replace(LEARNING, micro_batch=4)
    own, params, rollout = drawn(config, lora), tiny.params(config), tiny.rollout(UNTIED)
    weights = jax.jit(what.prepare)(adapters.whole(own, params))
    prepare = built(what, learning).experience
    batch = prepare(weights, None, Carried(()), rollout, tiny.rewards(), None).experience
    token_weights = learning.objective.token_weights(batch.mask, batch.kept)
    differentiate = jax.jit(tiny.policy(what, learning).gradient)
    found, _ = differentiate(weights, batch, token_weights, adapters=own)
    call = jax.jit(jax.grad(lambda own: plain_loss(own, params, batch, token_weights, what)))
    tiny.check_near(found, call(own), 2e-5)


@pytest.mark.slow
def test_no_sum_of_a_matrix_of_gradients_is_in_the_update():
    """Joined matrices of all layers are there in bfloat16, as weights; in float32, as sums of their
    gradients, only where all weights are trained."""
    learning = Learning(objectives.rloo(), tiny.GROUP, micro_batch=4)
    wide = {}
    for lora in (LORA, None):
        what = execution(tiny.UNTIED, tiny.BF16, lora=lora)
        params = tiny.params(tiny.UNTIED)
        base = None if lora is None else params
        trained = params if lora is None else adapters.init(tiny.UNTIED, lora, 0)
        run = built(what, learning)
        state = jax.eval_shape(run.init, trained)
        weights = jax.eval_shape(what.prepare, params)
        rewards = tiny.rewards()
        given = weights, None, state.carried, tiny.rollout(UNTIED), rewards, None
        batch = jax.eval_shape(run.experience, *given).experience
        update: Any = run.update
        text = update.lower(state, weights, batch, jnp.int32(0), jnp.float32(1.0), base).as_text()
        joined = [weights["layers"][name].shape for name in ("qkv", "gate_up")]
        found = ["x".join(map(str, shape)) for shape in joined]
        assert all(f"tensor<{shape}xbf16>" in text for shape in found)
        wide[lora] = [f"tensor<{shape}xf32>" in text for shape in found]
    assert wide == {LORA: [False, False], None: [True, True]}


# The dial


@pytest.mark.slow
def test_a_sampler_that_merges_in_bfloat16_is_seen_and_has_the_weights_of_that_rule():
    dial = mismatch.build([{"name": "lora_merge", "dtype": "bfloat16"}])
    what = execution(replace(tiny.CONFIG, num_layers=1), tiny.BF16)
    state, base, weights, found, metrics = stepped(what, mismatch=dial)
    assert found[0][1] == 0  # the product is 0 before the first update
    assert found[1][1] > 0
    assert 0 < metrics["mismatch/log_ratio_abs_mean"] < 0.1
    params = adapters.whole(state.params, base)
    published = tiny.bits(built(what, mismatch=dial).publish(params, weights))
    both = replace(what, numerics=dial.numerics(what.numerics))
    assert published == tiny.bits(programs.weights_program(both)(params))
    assert published != tiny.bits(weights)


def test_the_dial_refuses_it_where_it_can_do_nothing():
    dial = mismatch.build([{"name": "lora_merge", "dtype": "bfloat16"}])
    with pytest.raises(InputError, match="'lora_merge': this run trains no adapters"):
        mismatch.check(dial, tiny.EXECUTION)
    stale = mismatch.build(
        [{"name": "lora_merge", "dtype": "bfloat16"}, {"name": "stale_weights", "updates": 1}]
    )
    with pytest.raises(InputError, match="contradicts 'stale_weights'"):
        mismatch.check(stale, execution())


# What is refused


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"targets": ("qproj",)}, "'qproj' is unknown; did you mean 'q_proj'"),
        ({"targets": ("embed_tokens",)}, "'embed_tokens' is unknown"),
        ({"targets": ("gate",)}, "'gate' is unknown"),
        ({"targets": ("q_proj", "q_proj")}, "twice"),
        ({"targets": "q_proj"}, "list of names"),
        ({"rank": 0}, "rank"),
        ({"rank": 1.5}, "rank"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
    ],
)
def test_values_are_checked(options, said):
    with pytest.raises(InputError, match=said):
        Lora(**options)


def test_experts_have_no_adapters_and_attention_beside_them_has():
    assert list(adapters.targets(MIXTURE, LORA)) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    with pytest.raises(InputError, match=r"'up_proj' is a matrix of every expert.*q_proj"):
        adapters.targets(MIXTURE, Lora(targets=("q_proj", "up_proj")))


# PEFT's files


def written(tmp_path, config=tiny.CONFIG, lora=LORA):
    adapter = Adapter(lora, drawn(config, lora))
    return adapter, adapters.save(tmp_path / "adapter", adapter, config, base="somewhere")


def test_an_adapter_comes_back_as_it_was_written(tmp_path):
    lora = Lora(rank=2, alpha=3.0, targets=("v_proj", "down_proj"))
    adapter, folder = written(tmp_path, lora=lora)
    found = adapters.load(folder, tiny.CONFIG)
    assert found.lora == lora
    assert tiny.bits(found.arrays) == tiny.bits(adapter.arrays)
    with pytest.raises(InputError, match="exists already"):
        adapters.save(folder, adapter, tiny.CONFIG)
    with pytest.raises(InputError, match=r"'a' of 'v_proj' has the shape"):
        adapters.save(tmp_path / "other", adapter, replace(tiny.CONFIG, hidden_size=32))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"use_rslora": True}, "use_rslora"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"of_tomorrow": True}, "of_tomorrow"),
        ({"r": 4}, r"has shape \[3, 24\], expected \[4, 24\]"),
        ({"r": "three"}, "rank must be"),
        ({"lora_alpha": None}, "adapter_config.json"),
        *(
            ({"init_lora_weights": begun}, f"init_lora_weights = '{begun}'.*weight_conversion")
            for begun in ("pissa", "pissa_niter_16", "OLoRA", "corda", "loftq", "lora_ga")
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, change, said):
    _, folder = written(tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=said):
        adapters.load(folder, tiny.CONFIG)


@pytest.mark.parametrize("begun", [None, True, False, "gaussian", "orthogonal", "eva", "MiCA"])
def test_beginnings_that_leave_the_base_as_it_is_are_read(tmp_path, begun):
    adapter, folder = written(tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"init_lora_weights": begun}))
    assert tiny.bits(adapters.load(folder, tiny.CONFIG).arrays) == tiny.bits(adapter.arrays)


def test_settings_that_change_no_stored_tensor_are_passed_over(tmp_path):
    adapter, folder = written(tmp_path)
    path = folder / "adapter_config.json"
    eva = {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}
    more = eva | {"exclude_modules": ["lm_head"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    assert tiny.bits(adapters.load(folder, tiny.CONFIG).arrays) == tiny.bits(adapter.arrays)


def test_adapters_of_other_models_and_damaged_ones_are_refused(tmp_path):
    _, folder = written(tmp_path)
    with pytest.raises(InputError, match=r"layers.2.*is missing: every layer"):
        adapters.load(folder, replace(tiny.CONFIG, num_layers=3))
    with pytest.raises(InputError, match=r"layers.1.*is not one of an adapter of this model"):
        adapters.load(folder, replace(tiny.CONFIG, num_layers=1))
    (folder / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="truncated or corrupt"):
        adapters.load(folder, tiny.CONFIG)
    with pytest.raises(InputError, match="does not exist"):
        adapters.load(tmp_path / "absent", tiny.CONFIG)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_computes_the_same_logits(tmp_path):
    """Of what is written here, and what it writes itself is read: a round trip through PEFT."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = replace(tiny.UNTIED, eos_token_ids=(3,), pad_token_id=0)
    params = auditing.random_params(config, 0)
    hf.save(tmp_path / "base", params, config)
    adapter, folder = written(tmp_path, config)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager", dtype=torch.float32
    )
    model = theirs.PeftModel.from_pretrained(base, folder).eval()
    rollout = tiny.rollout(UNTIED)
    what = replace(execution(config), sampling=tiny.SAMPLING)
    weights = jax.jit(what.prepare)(adapters.whole(adapter.arrays, params))
    tokens = np.asarray(scoring.sequences(rollout))
    with torch.no_grad():
        logits = model(torch.tensor(tokens, dtype=torch.long)).logits.double().numpy()
    ours = jax.jit(
        lambda w, r: scoring.of_logits(w, r, lambda logits, tokens: logits, execution=what)
    )(weights, rollout)
    rows, at = np.nonzero(np.asarray(rollout.mask))
    before = np.asarray(rollout.prompt_lengths)[rows] + at - 1
    assert len(rows) > 20
    np.testing.assert_allclose(np.asarray(ours)[rows, at], logits[rows, before], rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    found = adapters.load(tmp_path / "again", config)
    assert found.lora == replace(LORA, targets=tuple(adapters.KNOWN))
    assert tiny.bits(found.arrays) == tiny.bits(adapter.arrays)
