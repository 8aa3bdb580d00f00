"""Bytes of the compiled programs, what an update leaves alone, and runs that cannot fit."""

import tomllib
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from tim_jax import objectives, optimizers
from tim_jax.app.config import toml
from tim_jax.app.jobs import planning
from tim_jax.common.errors import InputError
from tim_jax.instruments.plan import budget, workload
from tim_jax.model.adapters import Lora
from tim_jax.model.config import ModelConfig
from tim_jax.model.config_file import from_hf
from tim_jax.model.execution import Execution, Sampling
from tim_jax.model.weights import parameter_shapes
from tim_jax.numerics import Numerics
from tim_jax.placement import Placement
from tim_jax.rl.rules import Turns
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

# So large that weights outweigh what else a program needs; it is only compiled.
LARGE = ModelConfig(
    model_type="qwen3",
    vocab_size=16_384,
    hidden_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=768,
    max_positions=256,
    qk_norm=True,
    tied_embeddings=True,
)
NUMERICS = Numerics(compute_dtype="bfloat16", kv_block=32, head_rows=32, cache_write="rows")
TRAINING = Training(
    Execution(LARGE, NUMERICS, Sampling(32)),
    Learning(objectives.Objective(), 2, micro_batch=2, remat=True),
    optimizers.adamw(optimizers.Rate(1e-3), weight_decay=0.1),
    prompts_per_step=2,
)
STEP = workload.Workload(TRAINING, prompt_length=32)
DEVICES = tuple(jax.devices()[:1])
PARAMETERS = sum(leaf.size for leaf in jax.tree.leaves(parameter_shapes(LARGE)))
PROGRAMS = {"sampling": workload.sampling, "update": workload.updating}


def of_dtype(dtype: str, lora: Lora | None = None) -> workload.Workload:
    numerics = replace(NUMERICS, compute_dtype=dtype)
    return STEP.varied(numerics=numerics, lora=lora)


@cache
def compiled_bytes(what: str, step: workload.Workload, devices=DEVICES) -> int:
    """What the compiler says that a program of the step needs, and what of the run lies beside."""
    program = PROGRAMS[what](step, devices)
    found = program.function.lower(*program.arguments).compile().memory_analysis()
    beside = workload.resident(step, devices, "sampler" if what == "sampling" else "update")
    return found.argument_size_in_bytes + found.temp_size_in_bytes + beside


@pytest.mark.slow
def test_an_update_takes_at_most_22_bytes_a_parameter():
    """12 are masters and optimiser, 3 compute weights, 4 the gradient: nothing is held twice."""
    assert compiled_bytes("update", of_dtype("bfloat16")) / PARAMETERS < 22


@pytest.mark.parametrize(
    ("what", "dtype", "lora"),
    [
        ("update", "float32", None),
        pytest.param("update", "bfloat16", None, marks=pytest.mark.slow),
        pytest.param("update", "float32", Lora(4), marks=pytest.mark.slow),
        pytest.param("sampling", "bfloat16", None, marks=pytest.mark.slow),
        pytest.param("sampling", "float32", None, marks=pytest.mark.slow),
    ],
)
def test_an_estimate_is_near_what_the_compiler_says(what, dtype, lora):
    """And rather below it: a run that would fit is not to be refused."""
    step = of_dtype(dtype, lora)
    (need,) = (one for one in budget.needs(step, DEVICES) if one.stage == what)
    assert 0.85 < need.total / compiled_bytes(what, step) < 1.05


# Of the decode loop's copies.
WIDE = STEP.varied(
    execution=replace(STEP.execution, config=replace(LARGE, num_layers=2, intermediate_size=8192)),
    prompts_per_step=4,
    micro_batch=4,
)
FOUR = tuple(jax.devices()[:4])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("own", [None, Placement(data=4)], ids=["gathers", "another layout"])
def test_an_estimate_holds_for_the_weights_of_a_decode_loop(dtype, own):
    numerics = replace(NUMERICS, compute_dtype=dtype)
    step = WIDE.varied(numerics=numerics, placement=Placement(fsdp=4), sampler_placement=own)
    need, _ = budget.needs(step, FOUR)
    assert 0.85 < need.total / compiled_bytes("sampling", step, FOUR) < 1.05


def test_weights_that_are_gathered_for_decoding_are_counted_whole():
    step = WIDE.varied(placement=Placement(fsdp=4))
    need, _ = budget.needs(step, FOUR)
    assert need.parts["weights for decoding"] >= workload.weight_bytes(step)
    sharded = budget.needs(step.varied(placement=Placement(fsdp=4, decode="sharded")), FOUR)
    most = max(stage.total for stage in sharded)
    line = refused(step, most=most, devices=FOUR)
    assert line.endswith('; placement.decode = "sharded"')


@pytest.mark.parametrize(
    ("sampler", "beside"),
    [
        ({}, "learner"),
        ({"max_staleness": 2}, "learner"),
        ({"own_devices": True, "max_staleness": 2}, "sampler"),
    ],
)
def test_a_samplers_own_weights_have_its_own_layout(sampler, beside):
    """The program's arguments are one copy of them."""
    whole = workload.weight_bytes(WIDE)
    step = WIDE.varied(placement=Placement(fsdp=2), sampler_placement=Placement(data=2), **sampler)
    need, _ = budget.needs(step, FOUR)
    copies = 1 + step.training.kept_weights
    assert need.parts["the sampler's own weights"] == copies * whole
    state, weights, _ = workload.laid_out(step, FOUR)
    of_learner = copies * workload.bytes_per_device(weights) + workload.bytes_per_device(state)
    expected = (copies - 1) * whole + (beside == "learner") * of_learner
    assert workload.resident(step, FOUR, "sampler") == expected


@pytest.mark.slow
@pytest.mark.parametrize("what", PROGRAMS)
def test_an_estimate_holds_for_latent_attention_and_experts(what):
    config = from_hf(
        {
            "model_type": "deepseek_v3",
            "vocab_size": 16_384,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 192,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        }
    )
    step = STEP.varied(execution=replace(STEP.execution, config=config))
    (need,) = (one for one in budget.needs(step, DEVICES) if one.stage == what)
    assert 0.85 < need.total / compiled_bytes(what, step) < 1.05


# The guard


def trees(seed: int):
    """Parameters and a gradient of them."""
    params, rng = tiny.params(), np.random.default_rng(seed)
    gradient = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), params)
    return params, jax.tree.map(jnp.asarray, gradient)


def plain_adamw(clip: float) -> optax.GradientTransformation:
    return optax.chain(
        optimizers.clip_by_norm(clip),
        optax.adamw(optax.constant_schedule(1e-2), b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
    )


@pytest.mark.parametrize("ours", [True, False], ids=["guarded", "any of optax"])
def test_what_is_not_finite_leaves_every_bit(ours):
    guarded = optimizers.adamw(optimizers.Rate(1e-2), weight_decay=0.1)
    optimizer = guarded if ours else optax.with_extra_args_support(plain_adamw(1.0))
    step = jax.jit(partial(optimizers.guarded_step, optimizer))
    params, gradient = trees(0)
    before = step(gradient, jax.jit(optimizer.init)(params), params, finite=True)
    moved = step(gradient, before[1], before[0], finite=True)
    assert all(
        (np.asarray(a) != np.asarray(b)).any()
        for a, b in zip(*map(jax.tree.leaves, (before[0], moved[0])), strict=True)
    )
    broken = jax.tree.map(np.array, gradient)
    for leaf in jax.tree.leaves(broken):
        leaf.flat[0] = np.nan
    kept = step(broken, before[1], before[0], finite=False)
    for old, new in zip(*map(jax.tree.leaves, (before, kept)), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


@pytest.mark.slow
def test_the_guarded_adamw_has_the_bits_and_the_state_of_optax():
    ours, theirs = optimizers.adamw(optimizers.Rate(1e-2), weight_decay=0.1), plain_adamw(1.0)
    params, _ = trees(0)
    states = [optimizer.init(params) for optimizer in (ours, theirs)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    for seed in range(3):
        _, gradient = trees(seed)
        found = []
        for index, optimizer in enumerate((ours, theirs)):
            # Not jitted, so that each operation is rounded: a compiler may contract two into one.
            with jax.numpy_dtype_promotion("standard"):
                changes, states[index] = optimizer.update(gradient, states[index], params)
            found.append((changes, states[index]))
        for a, b in zip(*map(jax.tree.leaves, found), strict=True):
            np.testing.assert_array_equal(a, b)


# Runs that cannot fit


def test_what_is_only_near_the_limit_may_try():
    budget.check(STEP, DEVICES, most=int(max(totals(STEP)) / 1.04))
    assert "needs about" in refused(STEP, most=int(max(totals(STEP)) / 1.06))


def refused(step: workload.Workload, most: int, devices=DEVICES) -> str:
    with pytest.raises(InputError) as found:
        budget.check(step, devices, most=most)
    (line,) = str(found.value).splitlines()
    return line


def totals(step: workload.Workload) -> list[int]:
    return [need.total for need in budget.needs(step, DEVICES)]


def test_a_step_that_fits_is_not_refused():
    budget.check(STEP, DEVICES, most=max(totals(STEP)))


def test_the_line_says_what_how_much_and_how_it_would_fit():
    wide = STEP.varied(prompts_per_step=64).with_micro_batch(128)
    most = max(totals(wide.with_micro_batch(32)))
    line = refused(wide, most=most)
    needed = max(totals(wide)) / 1e6
    assert line.startswith(f"memory: an update needs about {needed:.1f} MB a device (")
    assert "optimiser 71.3 MB" in line  # two float32 moments of each of 8.9 million parameters
    assert f"), but this machine has {most / 1e6:.1f} MB; " in line
    rows = int(line.rpartition("; learner.micro_batch = ")[2])
    budget.check(wide.with_micro_batch(rows), DEVICES, most=most)
    assert "needs about" in refused(wide.with_micro_batch(2 * rows), most=most)
    tokens = wide.varied(micro_batch=None, micro_batch_tokens=128 * wide.longest)
    half = tokens.varied(micro_batch_tokens=64 * wide.longest)
    assert totals(half) == totals(wide.with_micro_batch(64))  # of as many tokens
    line = refused(tokens, most=most)
    assert line.endswith(f"; learner.micro_batch_tokens = {rows * wide.longest}")


def test_a_buffer_is_counted_with_all_its_tokens():
    """Also with those that no number of rows makes, and that no sequence of the step fills."""
    rows = STEP.varied(prompts_per_step=64)
    _, need = budget.needs(rows.with_micro_batch(1), DEVICES)
    for tokens in (127 * rows.longest, 200 * rows.longest):
        _, found = budget.needs(rows.varied(micro_batch=4, micro_batch_tokens=tokens), DEVICES)
        assert found.parts["activations"] * rows.longest == need.parts["activations"] * tokens


def test_a_sampler_that_is_too_large_is_told_its_slots():
    execution = replace(STEP.execution, sampling=Sampling(4096))
    long = STEP.varied(execution=execution, prompts_per_step=64).with_micro_batch(2)
    most = max(totals(long.varied(slots=8)))
    line = refused(long, most=most)
    assert line.startswith("memory: sampling needs about ")
    assert "(cache " in line
    slots = int(line.rpartition("sampler.slots = ")[2])
    assert slots < 128
    budget.check(long.varied(slots=slots), DEVICES, most=most)


def test_an_accelerators_state_may_wait_on_the_host():
    """Where the host's memory is the device's own, nothing is won."""

    class Accelerator:
        platform, device_kind = "tpu", "an accelerator"

    execution = replace(STEP.execution, sampling=Sampling(4096))
    step = STEP.varied(execution=execution, offload=True)
    here, there = (workload.offloaded(step, (device,)) for device in (DEVICES[0], Accelerator()))
    assert (here, there) == (False, True)
    assert not workload.offloaded(STEP, (Accelerator(),))
    state = workload.bytes_per_device(workload.laid_out(STEP, DEVICES)[0])
    before, here = (budget.needs(s, DEVICES)[0].parts for s in (step.varied(offload=False), step))
    assert here == before
    assert here["masters"] + here["optimiser"] == state


def test_a_state_that_no_setting_shrinks_names_more_devices():
    line = refused(STEP.with_micro_batch(2), most=-(-max(totals(STEP)) // 3))
    assert "no setting makes it fit on 1 of these; placement.fsdp = 3 or more" in line


def test_devices_that_nothing_lies_on_are_named():
    two, wider = tuple(jax.devices()[:2]), STEP.varied(placement=Placement(fsdp=2))
    most = max(need.total for need in budget.needs(wider, two))
    line = refused(STEP, most, devices=two)
    assert line.endswith("; placement.fsdp = 2")
    budget.check(wider, two, most=most)


@pytest.mark.parametrize(
    ("changes", "devices", "advice"),
    [
        # 6 do not divide the model's sizes, nor 5 the sequences.
        ({"prompts_per_step": 6, "micro_batch": 12}, 6, "placement.fsdp = 4"),
        (
            {"prompts_per_step": 8, "micro_batch": 2},
            4,
            "placement.fsdp = 4, learner.micro_batch = 4",
        ),
        (
            {"prompts_per_step": 8, "micro_batch": None, "micro_batch_tokens": 2 * STEP.longest},
            4,
            f"placement.fsdp = 4, learner.micro_batch_tokens = {4 * STEP.longest}",
        ),
    ],
)
def test_devices_are_only_named_where_a_run_takes_them(changes, devices, advice):
    there = tuple(jax.devices()[:devices])
    step = STEP.varied(**changes)
    spread = step.varied(placement=Placement(fsdp=int(advice[17])))
    if "," in advice:
        spread = spread.with_micro_batch(4)
    most = max(need.total for need in budget.needs(spread, there))
    assert refused(step, most, devices=there).endswith(f"; {advice}")
    spread.training.check()
    budget.check(spread, there, most=most)


def test_a_run_is_refused_before_a_weight_is_made(monkeypatch):
    config = toml.build(tomllib.loads(tiny.RUN))
    monkeypatch.setattr(budget, "capacity", lambda device, sharing=1: 10_000)
    with pytest.raises(InputError, match=r"memory: .* but this machine has 0\.0 MB"):
        planning.check_memory(config)


def noted(patch):
    """The steps that the budget makes of its own while the patch lasts."""
    made = []

    def make(*args, **fields):
        made.append(workload.Workload(*args, **fields))
        return made[-1]

    patch.setattr(budget, "Workload", make)
    return made


def test_an_evaluation_is_refused_for_what_it_needs_itself(monkeypatch):
    """Without optimiser, reference and older weights, and with its own number of sequences."""
    text = tiny.RUN + "\n[learner.objective]\nkl_coefficient = 0.1\n"
    config = toml.build(tomllib.loads(text))
    config = config.model_copy(
        update={"eval": config.eval.model_copy(update={"prompts": 1, "samples": 1})}
    )
    with monkeypatch.context() as patch:
        seen = noted(patch)
        planning.check_evaluation(config)
    (step,) = seen
    need, _ = budget.needs(step, DEVICES)
    assert not any(need.parts[name] > 100 for name in ("optimiser", "reference", "older weights"))
    assert step.sequences == 1
    monkeypatch.setattr(budget, "capacity", lambda device, sharing=1: need.total)
    planning.check_evaluation(config)
    with pytest.raises(InputError, match="memory: "):
        planning.check_memory(config)


def test_an_evaluation_of_adapters_needs_no_more_than_their_training():
    data = tomllib.loads(tiny.RUN)
    config = toml.build(data | {"lora": {}, "warmup": {"steps": 0}})
    model = planning.model_config(config)
    step = planning.workload_of(config, model, tuple(jax.devices()))
    with pytest.MonkeyPatch.context() as patch:
        seen = noted(patch)
        planning.check_evaluation(config)
    trained, evaluated = (budget.needs(one, DEVICES)[0].parts for one in (step, *seen))
    names = ("masters", "the adapters' base", "weights")
    assert [evaluated[name] for name in names] == [trained[name] for name in names]
    assert trained["the adapters' base"] > trained["masters"]


def test_parameters_on_the_host_are_there_while_weights_are_made(monkeypatch):
    """As on an accelerator."""
    monkeypatch.setattr(workload, "offloaded", lambda step, devices: step.training.offload)
    monkeypatch.setattr(budget, "_widened_bytes", lambda *_: 0)
    draw = partial(
        budget.check_sampling,
        STEP.execution,
        prompts=1,
        samples=1,
        prompt_length=32,
        helps="less",
    )
    weights = workload.weight_bytes(STEP)
    most = 4 * PARAMETERS + weights
    monkeypatch.setattr(budget, "capacity", lambda device, sharing=1: most)
    draw(offload=True)
    with pytest.raises(InputError, match=r"memory: sampling needs about .*masters"):
        draw()
    most = int(most / 1.06)
    with pytest.raises(InputError, match=r"memory: making the weights needs about .*; less"):
        draw(offload=True)


def test_a_container_has_what_its_control_group_says(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(budget, "_LIMITS", (tmp_path / "absent", limit))
    limit.write_text("max\n")
    whole = budget.capacity(DEVICES[0])
    limit.write_text("1000000\n")
    assert whole is not None
    assert budget.capacity(DEVICES[0], 4) == 250_000 < whole


def test_episodes_of_several_turns_keep_their_weights_laid_apart():
    single, _ = budget.needs(STEP, DEVICES)
    several, _ = budget.needs(STEP.varied(turns=Turns(4, 8)), DEVICES)
    assert several.parts["weights for decoding"] == single.parts["weights"]
    assert several.total > single.total


def test_a_plan_of_several_turns_is_refused_with_what_can_be_planned():
    given = ["task.history=cut", "task.environment=x.py:y", "task.environment_workers=2"]
    config = toml.load("configs/turns.toml", given)
    with pytest.raises(InputError, match="max_turns = 4: the programs of several turns") as error:
        planning.plan_run(config, "h100:1")
    changes = f"{error.value}".partition("same update: ")[2].split(" ")
    changed = toml.load("configs/turns.toml", [*given, *changes])
    assert (changed.sampling.max_turns, changed.sampling.longest) == (None, config.sampling.longest)
