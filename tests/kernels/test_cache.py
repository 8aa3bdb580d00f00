"""The cache in a compiled sampler: written in place, and read whole by attention alone."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny

from tim_jax.app.run.assembly import fixed_numerics
from tim_jax.common.types import Prompts
from tim_jax.instruments.plan import hlo
from tim_jax.model.execution import Execution, Sampling
from tim_jax.rl import programs

SLOTS, HEADS, SIZE, SPAN, BLOCK = 6, 2, 8, 64, 32
CONFIG = replace(tiny.CONFIG, num_heads=4, num_kv_heads=HEADS)
_MOVES = ("parameter", "get-tuple-element", "tuple", "while", "bitcast", "opt-barrier")
_PRODUCTS = ("dot", "custom-call")


def lowered(numerics):
    """A sampler of SLOTS sequences with caches of SPAN positions, and its arguments."""
    execution = Execution(CONFIG, numerics, Sampling(40))
    weights = execution.prepare(tiny.params(CONFIG))
    prompts = Prompts(
        tokens=jnp.ones((SLOTS, 8), jnp.int32),
        lengths=jnp.full((SLOTS,), 8, jnp.int32),
        ids=jnp.arange(SLOTS, dtype=jnp.int32),
    )
    arguments = weights, prompts, jax.random.key(0)
    program: Any = programs.sampling_program(execution, samples=1)
    return program.lower(*arguments), arguments


def compiled(numerics):
    return lowered(numerics)[0].compile().as_text()


def in_loops(module):
    """Every instruction that a loop's body runs, fusions opened, with its computation."""
    found = {}

    def look(name):
        for one in module.computations[name].values():
            found[one.name] = one, module.computations[name]
            for role, names in one.called.items():
                for called in names if role != "condition" else ():
                    if called in module.computations:
                        look(called)

    for visit in hlo.visits(module):
        if visit.instruction.opcode == "while":
            look(visit.instruction.called["body"][0])
    return found.values()


def touches_of_whole_caches(text):
    """Instructions in loops that make or read a whole cache and are no update of one in place.

    Returns (opcodes, how many products read one).
    """
    shapes = (
        (SLOTS, HEADS, SIZE, SPAN),
        (SLOTS, HEADS, SPAN // BLOCK, SIZE, BLOCK),
        (SLOTS * SPAN // BLOCK, HEADS, SIZE, BLOCK),
    )
    whole = [sorted(shape) for shape in shapes]

    def is_whole(one):
        return len(one.types) == 1 and sorted(one.types[0].dims) in whole

    module = hlo.parse(text)
    touched, products = [], 0
    for one, computation in in_loops(module):
        inside = module.computations[one.called["calls"][0]] if one.is_fusion else {}
        roots = {inner.opcode for inner in inside.values() if inner.root}
        reads = any(is_whole(computation[name]) for name in one.operands if name in computation)
        in_place = one.opcode == "dynamic-update-slice" or roots == {"dynamic-update-slice"}
        if one.opcode in _MOVES or in_place or not (reads or is_whole(one)):
            continue
        opcodes = {one.opcode} | {inner.opcode for inner in inside.values()}
        if not is_whole(one) and opcodes & set(_PRODUCTS):
            products += one.opcode in _PRODUCTS
        else:
            touched.append(f"{one.opcode} {one.types[0]} of {one.op_name or one.name}")
    return touched, products


@pytest.mark.parametrize(
    ("dtype", "whole_kv"),
    [
        ("bfloat16", False),
        pytest.param("float32", False, marks=pytest.mark.slow),
        pytest.param("bfloat16", True, marks=pytest.mark.slow),
        pytest.param("float32", True, marks=pytest.mark.slow),
    ],
)
def test_a_decode_step_touches_a_whole_cache_in_attention_alone(dtype, whole_kv):
    numerics = replace(fixed_numerics("tiles", dtype, length=SPAN), whole_kv=whole_kv)
    touched, products = touches_of_whole_caches(compiled(numerics))
    assert touched == []
    assert products >= 2 * CONFIG.num_layers  # scores and mixtures of every layer


def test_a_copy_of_a_cache_would_be_seen():
    """A scatter has a form that XLA:CPU does not make in place."""
    numerics = fixed_numerics("tiles", "bfloat16", length=SPAN)
    text = compiled(replace(numerics, cache_write="scatter", compiler_options=()))
    touched, _ = touches_of_whole_caches(text)
    assert touched


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ >= (0, 11, 2), reason="there XLA has no other way")
def test_updates_in_place_change_no_bit():
    numerics = fixed_numerics("tiles", "bfloat16", length=SPAN)
    rollouts = []
    for options in (numerics.compiler_options, ()):
        program, arguments = lowered(replace(numerics, compiler_options=options))
        rollouts.append(jax.device_get(program.compile()(*arguments)))
    assert rollouts[0].lengths.sum() == SLOTS * 40
    assert tiny.bits(rollouts[0]) == tiny.bits(rollouts[1])
