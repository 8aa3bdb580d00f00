"""Times by a device's rates: the arithmetic of the estimate, and of the least work."""

from dataclasses import replace

import pytest

from tim_jax import objectives, optimizers
from tim_jax.instruments.plan import calibration, roofline, topology
from tim_jax.instruments.plan.calibration import Rates
from tim_jax.instruments.plan.costs import Call, Figures, Memory, Traffic
from tim_jax.instruments.plan.known_models import PUBLISHED
from tim_jax.instruments.plan.workload import Workload
from tim_jax.model.config_file import from_hf
from tim_jax.model.execution import Batching, Execution, Sampling
from tim_jax.numerics import GPU_EXACT_BF16, TPU_EXACT_BF16
from tim_jax.placement import SINGLE, Placement
from tim_jax.rl.training import Sampler, Training
from tim_jax.rl.types import Learning

RATES = Rates(
    100.0, 10.0, memory=50.0, links=5.0, launch=0.5, step=0.25, cache=200.0, cores=4, core=80.0
)


def figures(**changes):
    return Figures(
        **{"memory": Memory(), "flops": 0, "bytes_accessed": 0, "collectives": {}} | changes
    )


@pytest.mark.parametrize(
    ("call", "bound", "seconds"),
    [
        (Call("dot", programs=4, flops=800, loaded=400, memory=100), "products", 8.0),
        (Call("dot", programs=4, flops=80, loaded=400, memory=300), "memory", 6.0),
        (Call("dot", programs=4, flops=80, loaded=4000, memory=100), "loads", 20.0),
        # One core loads 80 and not 200 a second; three load 200, after a wave of four.
        (Call("dot", programs=1, flops=8, loaded=160, memory=1), "loads", 2.0),
        (Call("dot", programs=7, flops=8, loaded=700, memory=1), "loads", 3.5),
        # Two of four cores are used; then a second wave of one program.
        (Call("dot", programs=2, flops=800, loaded=0, memory=0), "products", 16.0),
        (Call("dot", programs=5, flops=1000, loaded=0, memory=0), "products", 16.0),
    ],
)
def test_a_kernel_takes_as_long_as_its_slowest_part(call, bound, seconds):
    found = roofline.estimate(
        figures(
            flops=3 * call.flops, bytes_accessed=3 * call.memory, kernels={call: 3}, launches=3
        ),
        RATES,
        "bfloat16",
    )
    timed = found.kernels["dot"]
    assert timed.calls == 3
    assert timed.bound == bound
    assert timed.seconds == pytest.approx(3 * (seconds + 0.5 + 0.25 * call.programs))
    assert found.total == timed.seconds
    assert found.others == found.launches == found.links == 0


def test_what_is_beside_kernels_is_added():
    call = Call("dot", programs=1, flops=100, loaded=10, memory=10)
    gathers = {"all-gather": Traffic(2, 15)}
    options = {"kernels": {call: 2}, "launches": 12, "collectives": gathers}
    found = roofline.estimate(figures(flops=500, bytes_accessed=70, **options), RATES, "float32")
    assert found.others == 300 / 10 + 50 / 50  # a GPU's products are calls of their own
    assert found.launches == 10 * 0.5
    assert found.links == 15 / 5
    of_kernel = found.kernels["dot"].seconds
    assert found.total == of_kernel + found.others + found.launches + found.links
    on_tpu = replace(RATES, cache=0.0)
    fused = roofline.estimate(figures(flops=500, bytes_accessed=70, **options), on_tpu, "float32")
    assert fused.others == max(300 / 10, 50 / 50)


def test_attention_takes_the_share_of_keys_that_are_seen():
    calls = {
        Call(name, 4, 800, 0, 0): 1 for name in ("dot", "attention", "attention_gradient_rows")
    }
    free = replace(RATES, launch=0.0, step=0.0)
    found = roofline.estimate(figures(flops=2400, kernels=calls), free, "bfloat16", seen=0.5)
    assert {name: one.seconds for name, one in found.kernels.items()} == {
        "dot": 8.0,
        "attention": 4.0,
        "attention_gradient_rows": 4.0,
    }


def work_of(name, *, prompt=1024, response=1024, placement=SINGLE, slots=None):
    config = from_hf(PUBLISHED[name])
    training = Training(
        Execution(config, GPU_EXACT_BF16, Sampling(response), placement),
        Learning(objectives.rloo(), 8),
        optimizers.adamw(optimizers.Rate(1e-6)),
        sampler=Sampler(batching=Batching(slots)),
    )
    return Workload(training, prompt_length=prompt)


def test_the_least_work_is_the_models_own():
    work = work_of("Qwen/Qwen3-0.6B")
    parameters, layers, heads, kv_heads, size = 596e6, 28, 16, 8, 128
    tokens, rows = 2048, 64
    pairs = tokens * (tokens + 1) / 2
    flops = rows * (2 * parameters * tokens + 4 * layers * heads * size * pairs)
    least = roofline.least(work, "update")
    assert least.flops == pytest.approx(3 * flops, rel=1e-3)
    assert roofline.least(work, "scoring").flops == pytest.approx(flops, rel=1e-3)
    sampler = roofline.least(work, "sampler")
    # Of 8 prompts once, without logits, and of 64 responses.
    prompt = 2 * (parameters - 151936 * 1024) * 1024 + 2 * layers * heads * size * 1024 * 1025
    whole = 2 * parameters * tokens + 4 * layers * heads * size * pairs
    shared = 2 * parameters * 1024 + 2 * layers * heads * size * 1024 * 1025
    expected = 8 * prompt + rows * (whole - shared)
    assert sampler.flops == pytest.approx(expected, rel=1e-3)
    positions = 1024 * 1024 + 1024 * 1023 / 2
    cache = rows * positions * layers * kv_heads * 2 * size * 2
    assert sampler.bytes == pytest.approx(1024 * 2 * parameters + cache, rel=1e-3)


def test_windows_leave_out_pairs_and_reads():
    work = work_of("Qwen/Qwen3-0.6B", prompt=40, response=24)
    layers = work.execution.config.num_layers
    windowed = (True,) * (layers // 2) + (False,) * (layers - layers // 2)
    config = replace(work.execution.config, sliding_window=16, window_layers=windowed)
    narrow = work.varied(execution=replace(work.execution, config=config))
    of_window = sum(min(position + 1, 16) for position in range(40, 64))
    of_all = sum(position + 1 for position in range(40, 64))
    fewer = layers // 2 * (of_all - of_window)
    per_position = 8 * 2 * 128 * 2  # bytes of keys and values of a layer
    before, after = (roofline.least(one, "sampler") for one in (work, narrow))
    assert before.bytes - after.bytes == pytest.approx(64 * fewer * per_position)
    assert after.flops < before.flops
    long = replace(narrow, prompt_length=500)
    assert (
        0.5
        < roofline.seen(long, "sampler")
        < roofline.seen(replace(work, prompt_length=500), "sampler")
    )


def test_the_least_work_of_a_device_is_its_part():
    whole = roofline.least(work_of("Qwen/Qwen3-0.6B"), "sampler")
    split = roofline.least(work_of("Qwen/Qwen3-0.6B", placement=Placement(fsdp=4)), "sampler")
    assert split.flops == whole.flops / 4
    halves = roofline.least(work_of("Qwen/Qwen3-0.6B", placement=Placement(tensor=2)), "sampler")
    assert (halves.flops, halves.bytes) == (whole.flops / 2, whole.bytes / 2)
    slots = roofline.least(work_of("Qwen/Qwen3-0.6B", slots=16), "sampler")
    assert slots.bytes > whole.bytes
    assert slots.flops == whole.flops


def test_a_token_goes_through_some_experts_alone():
    update = roofline.least(work_of("Qwen/Qwen3-30B-A3B", prompt=1, response=1), "update")
    per_token = update.flops / (3 * 64 * 2 * 2)
    assert 2.9e9 < per_token < 3.4e9  # of 30.5e9 parameters, a table of rows left out


def test_rows_see_half_of_their_keys_on_average():
    """In whole blocks: of 4,096 positions and blocks of 256, row r sees r // 256 + 1 of 16."""
    work = work_of("Qwen/Qwen3-0.6B", prompt=1024, response=3072)
    execution = replace(work.execution, numerics=TPU_EXACT_BF16)
    work = work.varied(execution=execution)
    assert execution.numerics.kv_block == 256
    assert roofline.seen(work, "update") == 8.5 / 16
    assert roofline.seen(work, "sampler") == 10.5 / 16  # of 5 to 16
    config = replace(execution.config, sliding_window=257, window_layers=(True,) * 28)
    windowed = work.varied(execution=replace(execution, config=config))
    assert roofline.seen(windowed, "sampler") == 2 / 16


def test_every_device_that_is_planned_for_has_rates():
    assert set(calibration.RATES) == set(topology.GENERATIONS)
