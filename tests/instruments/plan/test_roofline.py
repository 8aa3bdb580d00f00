"""Times by a device's rates and by measured calls, and the arithmetic of the least work."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tim_jax import objectives, optimizers
from tim_jax.instruments.plan import roofline, topology
from tim_jax.instruments.plan.costs import Call, Figures, Instructions, Memory, Tile, Traffic
from tim_jax.instruments.plan.roofline import FORMULAS, SHOWN
from tim_jax.instruments.plan.topology import Rates, Target
from tim_jax.instruments.plan.workload import Workload
from tim_jax.model.config_file import from_hf
from tim_jax.model.execution import Batching, Execution, Sampling
from tim_jax.model.hf import PUBLISHED
from tim_jax.numerics import GPU_EXACT_BF16, TPU_EXACT_BF16
from tim_jax.placement import SINGLE, Placement
from tim_jax.rl.training import Sampler, Training
from tim_jax.rl.types import Learning

SCRIPTS = Path(__file__).parents[3] / "scripts"
H200 = Target("h200:1", "cuda", (), 1, 1)
RATES_H200 = topology.GENERATIONS["h200"].rates
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
        figures(flops=3 * call.flops, kernels={call: 3}, own=Instructions(launches=3)),
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
    own = Instructions(launches=12, accessed=50)
    work = figures(flops=500, kernels={call: 2}, own=own, collectives=gathers)
    found = roofline.estimate(work, RATES, "float32")
    assert found.others == 300 / 10 + 50 / 50  # a GPU's products are calls of their own
    assert found.launches == 10 * 0.5
    assert found.links == 15 / 5
    of_kernel = found.kernels["dot"].seconds
    assert found.total == of_kernel + found.others + found.launches + found.links
    on_tpu = replace(RATES, cache=0.0)
    fused = roofline.estimate(work, on_tpu, "float32")
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
    of_four = roofline.least(work.varied(mini_batches=4), "update")
    assert of_four.flops == pytest.approx(3 * flops / 4, rel=1e-3)  # one of the step's updates
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


# Measured calls: each is left out once.


@pytest.fixture(scope="module")
def calibrate():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import calibrate

        yield calibrate


@pytest.fixture(scope="module")
def measured():
    found = roofline.calibration(H200)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def fitted(calibrate):
    device = json.loads(calibrate.ROWS.read_text())["h200"]
    return device, calibrate.of_device("h200", device)


def test_the_parameters_are_those_of_the_measured_calls(fitted):
    _, found = fitted
    stored = json.loads(roofline.FILE.read_text())["h200"]
    assert found["ceilings"] == stored["ceilings"]
    assert list(found["classes"]) == list(stored["classes"])
    for kind, fit in found["classes"].items():
        assert fit["rows"] == stored["classes"][kind]["rows"]
        assert fit["parameters"] == pytest.approx(stored["classes"][kind]["parameters"], rel=0.01)
        assert fit["error"] == pytest.approx(stored["classes"][kind]["error"], abs=0.002)


def test_a_class_is_shown_only_where_each_call_is_predicted_by_the_others(
    calibrate, fitted, measured
):
    device, found = fitted
    for kind, rows in calibrate.by_class(device).items():
        error = found["classes"][kind]["error"]
        assert measured.fits[kind].shown == (error is not None and error <= SHOWN), kind
        assert all(roofline.class_of(r.call) in (kind, None) for r in rows if r.call.name)
    shown = {kind for kind, fit in measured.fits.items() if fit.shown}
    assert {roofline.MANY, roofline.FEW, roofline.GRADIENT} <= shown
    assert roofline.DECODING not in shown  # one call, that no other predicts


def test_a_call_that_was_timed_wrong_is_not_predicted(calibrate, fitted, measured):
    rows = calibrate.by_class(fitted[0])[roofline.FEW]
    wrong = [replace(rows[0], seconds=2 * rows[0].seconds), *rows[1:]]
    assert max(map(abs, calibrate.left_out(roofline.FEW, wrong, measured.rates))) > SHOWN


def test_a_product_is_of_the_class_of_its_rows_and_its_matrix():
    def of(rows, weight):
        tile = Tile(rows, height=128, width=256, depth=2048, stages=2, weight=weight, passes=1)
        return roofline.class_of(Call("dot", 1, 1, 1, 1, tile))

    assert of(128, 2**20) == roofline.FEW
    assert of(129, 2**20) == roofline.MANY
    assert of(1024, 622 * 10**6) == roofline.HEAD
    assert of(64, 622 * 10**6) == roofline.FEW
    assert roofline.class_of(Call("attention", 1, 10**9, 1, 10**6)) == roofline.ATTENTION
    assert roofline.class_of(Call("attention", 1, 10**8, 1, 10**6)) == roofline.DECODING
    assert roofline.class_of(Call("exponentials", 1, 0, 1, 1)) is None


def test_an_estimate_says_how_much_of_it_is_not_shown(measured):
    gradient = Call("attention_gradient_keys", 8, 10**12, 10**12 // 126, 10)
    decoding = Call("attention", 8, 10**6, 10**9, 10**9)
    work = figures(kernels={gradient: 3, decoding: 2}, own=Instructions(launches=5))
    rates = RATES_H200
    found = roofline.estimate(work, rates, "bfloat16", measured=measured)
    per_call = 10**12 / measured.fits[roofline.GRADIENT].parameters[0]
    read = 10**9 / measured.fits[roofline.DECODING].parameters[0]
    assert found.classes[roofline.GRADIENT] == pytest.approx(3 * per_call)
    assert found.total == pytest.approx(3 * per_call + 2 * read, rel=1e-3)
    assert found.unshown == pytest.approx(2 * read / found.total, rel=1e-2)
    assert sum(found.classes.values()) == pytest.approx(found.total)
    half = roofline.estimate(work, rates, "bfloat16", measured=measured, seen=0.5)
    assert half.total == pytest.approx(found.total / 2, rel=1e-3)
    prompts = replace(decoding, flops=10**12)  # products of a prefill
    both = replace(work, kernels={prompts: 1, decoding: 2})
    one, other = (
        roofline.estimate(both, rates, "bfloat16", measured=measured, prefill=share)
        for share in (None, 0.25)
    )
    saved = 0.75 * one.classes[roofline.ATTENTION]
    assert one.total - other.total == pytest.approx(saved)


def test_a_kernel_that_has_changed_since_is_not_shown(measured):
    fit = measured.fits[roofline.GRADIENT]
    keys = Call("attention_gradient_keys", 512, 126 * 10**9, 10**9, 10**6)
    assert fit.covers(keys)
    assert fit.covers(replace(keys, flops=115 * 10**9))
    assert not fit.covers(replace(keys, flops=250 * 10**9))  # of twice as many rows a program
    tile = Tile(4096, 128, 256, 2048, stages=2, weight=10**7, passes=1)
    product = Call("dot", 512, 1, 1, 1, tile)
    assert measured.fits[roofline.MANY].covers(product)
    changed = replace(product, tile=replace(tile, stages=4))
    assert not measured.fits[roofline.MANY].covers(changed)


def test_a_device_that_was_not_measured_has_no_calibration():
    assert roofline.calibration(replace(H200, name="h100:1")) is None
    assert roofline.calibration(replace(H200, name="v5e:1x1")) is None


def test_formulas_take_their_parameters():
    call = Call("", 1, 10**9, 10**6, 10**6, Tile(64, 64, 64, 64, 4, 10**6, 1))
    rates = RATES_H200
    for formula, start in FORMULAS.values():
        assert formula(call, rates, *start) > 0
