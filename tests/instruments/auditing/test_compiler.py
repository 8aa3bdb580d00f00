"""The compiler's gradients of the forward's units against float64: right, and seen where wrong."""

import json
from dataclasses import replace

import jax
import pytest

from tim_jax.instruments import auditing
from tim_jax.instruments.auditing import CaseResult, GradientResult, compiler
from tim_jax.instruments.auditing.compiler import Extent, check_gradients, units
from tim_jax.numerics import (
    EXACT_BF16,
    EXACT_F32,
    GPU_EXACT_BF16,
    NATIVE_BF16,
    NATIVE_F16,
    NATIVE_F32,
)

SMALL = Extent(examples=8, rows=3, width=4)
UNITS = ("norm", "dot", "dot_add", "gated_dot", "project", "attention", "log_prob")
# The audit's, narrow with many rows, and wide with few. Each array of activations has more than
# 32,768 elements, and so has each Jacobian.
EXTENTS = (Extent(), Extent(296, 40, 8), Extent(80, 5, 96))
# The backward of tiles is that of native numerics, so these have other extents. Each has the norm,
# and between them they have whatever is more than a product and its sum.
NARROW, WIDE = ("norm", "gated_dot", "attention"), ("norm", "project", "log_prob")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numerics", "extent", "names"),
    [
        (EXACT_F32, EXTENTS[0], UNITS),
        (EXACT_BF16, EXTENTS[0], UNITS),
        (NATIVE_F32, EXTENTS[1], NARROW),
        (NATIVE_F32, EXTENTS[2], WIDE),
        (NATIVE_BF16, EXTENTS[0], ("norm",)),
        (NATIVE_F16, EXTENTS[0], UNITS),
    ],
    ids=["tiles float32", "tiles bfloat16", "narrow", "wide", "native bfloat16", "float16"],
)
def test_gradients_of_every_unit_in_every_way_agree_with_float64(numerics, extent, names):
    if names == UNITS:
        results = check_gradients(numerics, extent)
    else:
        some = [unit for unit in units(numerics, extent) if unit.name in names]
        results = [one for unit in some for one in compiler._check(unit, numerics, extent)]
    assert not [result for result in results if not result.passed]
    ways = ["plain", "scan", "vmap", "sharded by 8"]
    if numerics.compute_dtype == "float32":
        ways.insert(3, "jacrev")
    assert [(one.unit, one.way) for one in results] == [(u, way) for u in names for way in ways]


def norm_unit():
    return units(NATIVE_F32, SMALL)[0]


def checked(unit):
    return list(compiler._check(unit, NATIVE_F32, SMALL))


def test_a_right_gradient_passes_in_every_way():
    results = checked(norm_unit())
    assert [one.way for one in results] == ["plain", "scan", "vmap", "jacrev", "sharded by 8"]
    assert all(one.passed and one.error < 1e-6 for one in results)


def test_a_right_gradient_passes_in_float16_too():
    norm = units(NATIVE_F16, SMALL)[0]
    results = list(compiler._check(norm, NATIVE_F16, SMALL))
    assert [one.way for one in results] == ["plain", "scan", "vmap", "sharded by 8"]
    assert all(one.passed and one.error < one.bound / 10 for one in results)


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_gradient_is_seen_in_every_way(factor):
    """Of the inputs alone, by a thousandth."""
    unit = norm_unit()

    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (x, None), lambda _, c: (factor * c,))
    wrong = unit._replace(call=lambda w, x: unit.call(w, (scaled(x[0]),)))
    assert not any(one.passed for one in checked(wrong))


def test_a_gradient_that_is_wrong_under_vmap_alone_is_seen_there():
    unit = norm_unit()

    @jax.custom_batching.custom_vmap
    def honest(c):
        return c

    @honest.def_vmap
    def _(size, batched, c):
        del size
        return c.at[-1].multiply(1.01), batched[0]

    @jax.custom_vjp
    def through(x):
        return x

    through.defvjp(lambda x: (x, None), lambda _, c: (honest(c),))
    wrong = unit._replace(call=lambda w, x: unit.call(w, (through(x[0]),)))
    assert {one.way for one in checked(wrong) if not one.passed} == {"vmap", "jacrev"}


def test_the_backward_that_is_checked_is_that_of_xla():
    options = {"xla_cpu_enable_fast_math": False}
    for numerics in (EXACT_BF16, GPU_EXACT_BF16):
        found = auditing.of_backward(replace(numerics, column_tiles=2).with_options(options))
        assert found.family == "native"
        assert found.compute_dtype == "bfloat16"
        assert found.column_tiles == 1
        assert dict(found.compiler_options).items() >= options.items()


EQUAL = CaseResult("equal", "tiles float32", 10, 0, 0.0, None)
RIGHT = GradientResult("norm", "plain", "native float32", 1e-7, 1e-4)
WRONG = GradientResult("norm", "jacrev", "native float32", 0.24321, 1e-4)


def test_an_audit_fails_on_a_compiler_that_is_wrong_and_says_so_in_one_line():
    right = auditing.summarise([EQUAL], gradients=[RIGHT])
    assert right.passed
    assert "right gradients: all 1 agree with float64" in auditing.verdict(right)
    found = auditing.summarise([EQUAL], gradients=[RIGHT, WRONG])
    assert not found.passed
    tokens, gradients = auditing.verdict(found).split("\n")
    assert tokens == "exact: 0 of 10 response tokens unequal"
    assert gradients == (
        f"WRONG GRADIENTS: 1 of 2, compiled by jaxlib {found.versions['jaxlib']} on cpu: norm by"
        " jacrev in float32 is off by 0.2 of its size"
    )
    of_json = json.loads(auditing.to_json(found))["gradients"]
    assert [one["passed"] for one in of_json] == [True, False]
    assert of_json[1]["error"] == 0.24321
    broken = auditing.summarise([EQUAL], gradients=[replace(WRONG, error=float("nan"))])
    assert not broken.passed
    assert json.loads(auditing.to_json(broken))["gradients"][0]["error"] is None


def test_an_audit_that_checked_no_gradients_says_nothing_of_them():
    assert "\n" not in auditing.verdict(auditing.summarise([EQUAL]))
