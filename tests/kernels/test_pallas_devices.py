"""The kernels for devices that are not here: lowered for CUDA and TPU, compiled for TPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import lowering
import pytest
import quick

from tim_jax.instruments.plan import comparison

HERE = Path(__file__).parents[1]
# Every chip by the newest compiler, one by an older one: a chip takes two minutes. Whole programs,
# which have the same kernels, are compiled for the first.
WHOLE = "v5e:1x1"
TPUS = (WHOLE, *(("v5p:2x2x1", "v6e:1x1") if jax.__version_info__ >= (0, 12) else ()))
TARGETS = {"pallas_gpu": "triton", "pallas_tpu": "tpu_custom_call"}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *quick.pairs(list(lowering.NUMERICS), ["bfloat16", "float32"]),
        pytest.param("pallas_gpu", "float16", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_lowers_for_its_device(family, dtype):
    operations = lowering.operations(lowering.NUMERICS[family][dtype])
    assert len(operations) == 28 + 2 * (family == "pallas_gpu")
    for name, (function, shapes) in operations.items():
        text = lowering.lower(family, function, shapes).as_text()
        calls = [line for line in text.splitlines() if TARGETS[family] in line]
        several = 3 if name.endswith("gradient") else 2  # the forward, and two of its gradient
        in_two = "grouped" if family == "pallas_gpu" else ("grouped", "project")
        more = name.startswith(in_two) or name.endswith("gradient")
        assert len(calls) == (several if more else 1), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_few_and_of_many_rows_differ_in_their_tiles_alone(dtype):
    """In bfloat16; the other dtypes have one tile. A plan compares them in this way."""
    numerics = lowering.NUMERICS["pallas_gpu"][dtype]
    few, many = (lowering.operations(numerics, rows) for rows in (5, 4096))
    for name in ("dot", "dot_add, bias", "gated_dot"):
        codes = [
            comparison.kernel_code(lowering.lower("pallas_gpu", *operations[name]).as_text())
            for operations in (few, many)
        ]
        assert (codes[0] != codes[1]) == (dtype == "bfloat16"), name
        assert comparison.without_tile(codes[0]) == comparison.without_tile(codes[1]), name
        assert "tt.dot" in codes[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_projection_into_the_cache_has_the_code_of_one_beside_it(dtype):
    """But for where its results lie."""
    operations = lowering.operations(lowering.NUMERICS["pallas_gpu"][dtype])
    beside, *into = (
        comparison.kernel_code(lowering.lower("pallas_gpu", *operations[name]).as_text())
        for name in ("project", "project into", "project into, pages")
    )
    assert into == [beside, beside]
    assert "tt.reduce" in beside


@pytest.mark.parametrize("family", lowering.NUMERICS)
def test_jax_s_default_precision_is_no_matter_of_a_kernel(family):
    """TPUs compile no kernel with bfloat16 operands that asks for more than the default."""
    operations = lowering.operations(lowering.NUMERICS[family]["bfloat16"])

    def codes(name):
        """Without the places in the source, which depend on who traced a function first."""
        text = lowering.lower(family, *operations[name]).as_text()
        return [comparison.kernel_code(x) for x in text.splitlines() if TARGETS[family] in x]

    for name, kernels in (("dot", 1), ("attention, gradient", 3)):
        expected = codes(name)
        assert len(expected) == kernels
        with jax.default_matmul_precision("highest"):
            assert codes(name) == expected, name


@pytest.mark.parametrize("family", lowering.NUMERICS)
def test_the_flash_attention_of_the_dial_lowers_for_the_device(family):
    """On a GPU by Triton with every JAX: Mosaic, the default of some, has no room for the keys."""
    function, shapes = lowering.flash(lowering.NUMERICS[family]["bfloat16"])
    text = lowering.lower(family, function, shapes).as_text()
    assert text.count(TARGETS[family]) == 1
    assert "mosaic_gpu" not in text


@pytest.mark.parametrize("family", lowering.NUMERICS)
def test_sampler_and_learner_lower_for_the_device(family):
    programs = lowering.programs(lowering.NUMERICS[family]["bfloat16"], config=lowering.one_layer())
    for name, (function, shapes) in programs.items():
        text = lowering.lower(family, function, shapes).as_text()
        assert text.count(TARGETS[family]) > 8, name


@pytest.mark.slow(minutes=5)
@pytest.mark.parametrize("device", TPUS)
def test_every_kernel_compiles_for_a_tpu(device):
    """In a process of its own: libtpu wants its environment before JAX is there."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (pip install tim-jax[plan], with the newest jax)")
    part = [] if device == WHOLE else ["--kernels"]
    found = subprocess.run(
        [sys.executable, str(HERE / "tpu_compile.py"), device, *part],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
            "XLA_FLAGS": "",  # the CPU's
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        },
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    lines = found.stdout.splitlines()
    assert sum(line.endswith("compiled") for line in lines) == 61 - 2 * len(part), found.stdout
