"""Formulas of kernels' times, fitted to a device: each measured call is left out once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tim_jax.instruments.plan import calibration, roofline
from tim_jax.instruments.plan.calibration import FORMULAS, SHOWN
from tim_jax.instruments.plan.costs import Call, Figures, Memory, Tile
from tim_jax.instruments.plan.topology import Target

SCRIPTS = Path(__file__).parents[3] / "scripts"
H200 = Target("h200:1", "cuda", (), 1, 1)


@pytest.fixture(scope="module")
def calibrate():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import calibrate

        yield calibrate


@pytest.fixture(scope="module")
def measured():
    found = calibration.calibration(H200)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def fitted(calibrate):
    device = json.loads(calibrate.ROWS.read_text())["h200"]
    return device, calibrate.of_device("h200", device)


def test_the_parameters_are_those_of_the_measured_calls(fitted):
    _, found = fitted
    stored = json.loads(calibration.FILE.read_text())["h200"]
    assert found["ceilings"] == stored["ceilings"]
    assert list(found["classes"]) == list(stored["classes"])
    for kind, fit in found["classes"].items():
        assert fit["rows"] == stored["classes"][kind]["rows"]
        assert fit["parameters"] == pytest.approx(stored["classes"][kind]["parameters"], rel=0.01)
        assert fit["error"] == pytest.approx(stored["classes"][kind]["error"], abs=0.002)


def test_a_class_is_shown_only_where_each_call_is_predicted_by_the_others(calibrate, measured):
    device = json.loads(calibrate.ROWS.read_text())["h200"]
    for kind, rows in calibrate.by_class(device).items():
        errors = calibrate.left_out(kind, rows, measured.rates)
        within = errors is not None and max(map(abs, errors)) <= SHOWN
        assert measured.fits[kind].shown == within, kind
        assert all(calibration.class_of(r.call) in (kind, None) for r in rows if r.call.name)
    shown = {kind for kind, fit in measured.fits.items() if fit.shown}
    assert {calibration.MANY, calibration.FEW, calibration.GRADIENT} <= shown
    assert calibration.DECODING not in shown  # one call, that no other predicts


def test_a_call_that_was_timed_wrong_is_not_predicted(calibrate, measured):
    device = json.loads(calibrate.ROWS.read_text())["h200"]
    rows = calibrate.by_class(device)[calibration.FEW]
    wrong = [replace(rows[0], seconds=2 * rows[0].seconds), *rows[1:]]
    assert max(map(abs, calibrate.left_out(calibration.FEW, wrong, measured.rates))) > SHOWN


def test_a_product_is_of_the_class_of_its_rows_and_its_matrix():
    def of(rows, weight):
        tile = Tile(rows, height=128, width=256, depth=2048, stages=2, weight=weight, passes=1)
        return calibration.class_of(Call("dot", 1, 1, 1, 1, tile))

    assert of(128, 2**20) == calibration.FEW
    assert of(129, 2**20) == calibration.MANY
    assert of(1024, 622 * 10**6) == calibration.HEAD
    assert of(64, 622 * 10**6) == calibration.FEW
    assert calibration.class_of(Call("attention", 1, 10**9, 1, 10**6)) == calibration.ATTENTION
    assert calibration.class_of(Call("attention", 1, 10**8, 1, 10**6)) == calibration.DECODING
    assert calibration.class_of(Call("exponentials", 1, 0, 1, 1)) is None


def test_an_estimate_says_how_much_of_it_is_not_shown(measured):
    gradient = Call("attention_gradient_keys", 8, 10**12, 10**12 // 126, 10)
    decoding = Call("attention", 8, 10**6, 10**9, 10**9)
    moved = 2 * 10**9 + 30
    figures = Figures(Memory(), 4 * 10**12, moved, {}, {gradient: 3, decoding: 2}, 5)
    rates = calibration.RATES["h200"]
    found = roofline.estimate(figures, rates, "bfloat16", measured=measured)
    per_call = 10**12 / measured.fits[calibration.GRADIENT].parameters[0]
    read = 10**9 / measured.fits[calibration.DECODING].parameters[0]
    assert found.classes[calibration.GRADIENT] == pytest.approx(3 * per_call)
    assert found.total == pytest.approx(3 * per_call + 2 * read, rel=1e-3)
    assert found.unshown == pytest.approx(2 * read / found.total, rel=1e-2)
    assert sum(found.classes.values()) == pytest.approx(found.total)
    half = roofline.estimate(figures, rates, "bfloat16", measured=measured, seen=0.5)
    assert half.total == pytest.approx(found.total / 2, rel=1e-3)
    prompts = replace(decoding, flops=10**12)  # products of a prefill
    both = replace(figures, kernels={prompts: 1, decoding: 2})
    one, other = (
        roofline.estimate(both, rates, "bfloat16", measured=measured, prefill=share)
        for share in (None, 0.25)
    )
    saved = 0.75 * one.classes[calibration.ATTENTION]
    assert one.total - other.total == pytest.approx(saved)


def test_a_kernel_that_has_changed_since_is_not_shown(measured):
    fit = measured.fits[calibration.GRADIENT]
    keys = Call("attention_gradient_keys", 512, 126 * 10**9, 10**9, 10**6)
    assert fit.covers(keys)
    assert fit.covers(replace(keys, flops=115 * 10**9))
    assert not fit.covers(replace(keys, flops=250 * 10**9))  # of twice as many rows a program
    tile = Tile(4096, 128, 256, 2048, stages=2, weight=10**7, passes=1)
    product = Call("dot", 512, 1, 1, 1, tile)
    assert measured.fits[calibration.MANY].covers(product)
    changed = replace(product, tile=replace(tile, stages=4))
    assert not measured.fits[calibration.MANY].covers(changed)


def test_a_device_that_was_not_measured_has_no_calibration():
    assert calibration.calibration(replace(H200, name="h100:1")) is None
    assert calibration.calibration(replace(H200, name="v5e:1x1")) is None


def test_formulas_take_their_parameters():
    call = Call("", 1, 10**9, 10**6, 10**6, Tile(64, 64, 64, 64, 4, 10**6, 1))
    rates = calibration.RATES["h200"]
    for formula, start in FORMULAS.values():
        assert formula(call, rates, *start) > 0
