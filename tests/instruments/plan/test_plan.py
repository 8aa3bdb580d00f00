"""The plan: what is read off compiled programs, what fits, which slices there are.

Programs are compiled for the suite's eight virtual devices; only the last tests need libtpu.
"""

import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
import tiny
from jax.extend.core import jaxprs_in_params
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton

from tim_jax import kernels, mismatch, objectives, optimizers
from tim_jax.app import cli
from tim_jax.app.jobs import planning as planning_job
from tim_jax.common.errors import InputError
from tim_jax.instruments import plan
from tim_jax.instruments.plan import (
    budget,
    comparison,
    costs,
    hlo,
    roofline,
    topology,
    workload,
)
from tim_jax.instruments.plan.costs import Memory, Traffic
from tim_jax.instruments.plan.topology import Target
from tim_jax.model.adapters import Lora
from tim_jax.model.config_file import to_hf
from tim_jax.model.execution import Execution, Sampling
from tim_jax.numerics import GpuTiles, MatmulTile, TpuTiles
from tim_jax.placement import Placement
from tim_jax.rl import training
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

HERE = Path(__file__).parents[2]
GIB = 2**30
EIGHT = Target("eight virtual devices", "cpu", tuple(jax.devices()), 4 * GIB, 8)
TRAINING = Training(
    Execution(tiny.CONFIG, tiny.NUMERICS, replace(tiny.SAMPLING, max_tokens=6)),
    Learning(objectives.rloo(), 4, mode="recompute"),
    optimizers.adamw(optimizers.Rate(1e-2)),
    prompts_per_step=4,
)
RECIPE = workload.Workload(TRAINING, prompt_length=8)


def on(where: Placement) -> workload.Workload:
    return RECIPE.varied(placement=where)


@cache
def stage(what: str, layers: int):
    program = plan.PROGRAMS[what](on(Placement(fsdp=2)).with_layers(layers), EIGHT.devices)
    return costs.compiled(program, EIGHT)


# What programs say of themselves.


def over_all(local, ins, outs, *arguments):
    mesh = Mesh(jax.devices(), ("x",))
    call = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(arguments, ins, strict=True)
    ]
    return call.lower(*shapes).compile()


def arrays(*sizes):
    """The shapes of float32 arrays."""
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


def counted(function, *sizes) -> costs.Work:
    """The work of a function of float32 arrays of these sizes."""
    return costs.count(jax.jit(function).trace(*arrays(*sizes)).jaxpr)


def text_of(compiled) -> str:
    text = compiled.as_text()
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("local", "out", "kind", "received"),
    [
        (partial(jax.lax.all_gather, axis_name="x", tiled=True), Spec(), "all-gather", 7 * 64),
        (partial(jax.lax.psum, axis_name="x"), Spec(), "all-reduce", 2 * 7 * 64 // 8),
        (
            partial(jax.lax.ppermute, axis_name="x", perm=[(i, (i + 1) % 8) for i in range(8)]),
            Spec("x"),
            "collective-permute",
            64,
        ),
    ],
)
def test_collectives_are_found_with_what_a_chip_receives(local, out, kind, received):
    compiled = over_all(local, (Spec("x"),), out, (128,))
    found = costs.collectives(hlo.parse(text_of(compiled)))
    assert found == {kind: Traffic(1, received)}


def test_a_collective_in_a_loop_counts_at_every_turn():
    def local(x):
        def step(carry, _):
            whole = jax.lax.all_gather(carry, "x", tiled=True)
            return carry * 2 + whole[:16], None

        return jax.lax.scan(step, x, None, length=5)[0]

    compiled = over_all(local, (Spec("x"),), Spec("x"), (128,))
    found = costs.collectives(hlo.parse(text_of(compiled)))
    assert found == {"all-gather": Traffic(5, 5 * 7 * 64)}


def test_open_loops_turn_as_often_as_they_are_said_to():
    def local(x):
        def step(state):
            return state[0] + 1, state[1] + jax.lax.all_gather(state[1], "x", tiled=True)[:16]

        def going(state):
            return (state[0] < 9) & (state[1][0] < 3)

        return jax.lax.while_loop(going, step, (jnp.int32(0), x))[1]

    compiled = over_all(local, (Spec("x"),), Spec("x"), (128,))
    module = hlo.parse(text_of(compiled))
    assert costs.collectives(module)["all-gather"].count == 1
    assert costs.collectives(module, (9,))["all-gather"].count == 9


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['data'=2,'fsdp'=4,'tensor'=1] {'fsdp'}", 4),
        ("mesh['data'=2,'fsdp'=4,'tensor'=1] {'data','fsdp'}", 8),
        ("{}", 8),
    ],
)
def test_group_sizes(groups, size):
    assert costs.group_size(f"channel_id=1, replica_groups={groups}, dimensions=0", 8) == size


def test_memory_is_the_compilers_own():
    (shape,) = arrays((256, 256))
    compiled = jax.jit(lambda x, y: (x @ y, x), donate_argnums=1).lower(shape, shape).compile()
    found = costs.of(compiled)
    assert found.arguments == 2 * 4 * 256**2
    assert found.outputs >= 2 * 4 * 256**2
    assert found.aliased == 4 * 256**2
    beside = found.outputs + found.temporaries - found.aliased + found.code
    assert found.total == found.arguments + beside


def test_a_refusal_says_how_much_was_wanted():
    refused = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory"
        " required for HLO temporaries (22.50G) exceeds available HBM (15.75G). HLO module: jit_f."
    )
    found = costs.of_refusal(refused)
    assert found == Memory(together=round(22.5 * GIB))
    assert found is not None
    assert found.total == round(22.5 * GIB)
    assert costs.of_refusal("INTERNAL: something else") is None


def test_products_are_counted_as_the_compiler_does():
    """On a program without loops or kernels, where the compiler's own count is right."""
    shapes = arrays((3, 8, 32), (3, 32, 64))
    program = jax.jit(lambda x, y: jnp.einsum("bik,bkj->bij", x, y))
    theirs = program.lower(*shapes).compile().cost_analysis()
    assert theirs is not None
    assert costs.count(program.trace(*shapes).jaxpr).flops == theirs["flops"] == 2 * 3 * 8 * 32 * 64


def test_products_in_loops_and_in_kernels():
    def run(x, w):
        def step(x, _):
            return x @ w, None

        return jax.lax.scan(step, x, None, length=7)[0]

    assert counted(run, (16, 128), (128, 128)).flops == 7 * 2 * 16 * 128 * 128


def test_what_no_result_needs_is_not_counted():
    def run(x):
        return jnp.sum(x @ x), jax.lax.scan(lambda c, _: (c @ x, x @ x @ x), x, length=5)[0]

    jaxpr = jax.jit(run).trace(*arrays((8, 8))).jaxpr
    once = 2 * 8**3
    assert costs.count(jaxpr).flops == (1 + 5 * 3) * once
    found = costs.count(costs.live(jaxpr))
    assert found.flops == (1 + 5) * once
    ((call, times),) = found.products.items()
    assert (call.flops, call.memory, times) == (once, 3 * 8 * 8 * 4, 6)


def test_a_kernels_blocks_are_copied_when_their_place_changes():
    tiles = TpuTiles(rows=64, columns=128, block_k=128)
    numerics = replace(tiny.NUMERICS, family="pallas_tpu", interpret=True, tpu=tiles)
    dot = partial(kernels.family(numerics).dot, numerics=numerics)
    found = counted(dot, (200, 256), (256, 384))
    tiles, columns, depth = 4, 3, 2  # of 64 rows, 128 columns, 128 of the contraction
    assert found.flops == 2 * (tiles * 64) * 256 * 384
    inputs = tiles * columns * depth * (64 * 128 + 128 * 128)
    assert found.kernel_bytes == 4 * (inputs + tiles * columns * 64 * 128)
    ((call, times),) = found.kernels.items()
    assert (call.name, call.programs, times) == ("dot", tiles * columns * depth, 1)


def test_programs_of_a_gpu_load_their_own_blocks_through_a_cache():
    tiles = GpuTiles(matmul=(MatmulTile(rows=64, columns=64),))
    numerics = replace(tiny.NUMERICS, family="pallas_gpu", interpret=True, gpu=tiles)
    dot = partial(kernels.family(numerics).dot, numerics=numerics)
    found = counted(dot, (200, 256), (256, 384))
    (call,) = found.kernels
    assert call.programs == 4 * 6  # tiles of 64 rows, the last of 8, and 64 columns
    assert call.loaded == 4 * 24 * (64 * 256 + 256 * 64 + 64 * 64)
    assert call.memory == found.kernel_bytes == 4 * (200 * 256 + 256 * 384 + 200 * 384)
    stages = tiles.matmul[0].stages // 2  # of elements of four bytes
    assert call.tile == costs.Tile(200, 64, 64, 256, stages, 4 * 256 * 384, passes=1)


@pytest.mark.parametrize("family", ["pallas_gpu", "pallas_tpu"])
def test_of_a_tile_the_rows_that_there_are_are_counted(family):
    numerics = replace(tiny.NUMERICS, family=family, interpret=True)
    dot = partial(kernels.family(numerics).dot, numerics=numerics)
    found = counted(dot, (5, 1024), (1024, 1024))
    assert found.kernel_bytes == 4 * (5 * 1024 + 1024 * 1024 + 5 * 1024)


def test_a_weight_that_a_kernel_takes_twice_is_read_once():
    """As the columns of the gate and as those of up."""
    numerics = replace(tiny.NUMERICS, family="pallas_gpu", interpret=True)
    ops = kernels.family(numerics)

    def run(x, weight):
        return ops.gated_dot(x, weight, None, numerics=numerics)

    found = counted(run, (64, 256), (256, 2 * 384))
    assert found.kernel_bytes == 4 * (64 * 256 + 256 * 2 * 384 + 64 * 384)
    (call,) = found.kernels
    assert call.tile is not None
    assert call.tile.width * call.tile.height == call.flops // call.programs // (2 * 256)
    assert call.tile.weight == 4 * 256 * 2 * 384


def test_of_a_cache_what_is_written_counts():
    numerics = replace(tiny.NUMERICS, family="pallas_gpu", cache_write="kernel", interpret=True)
    caches = arrays((8, 2, 16, 999), (8, 2, 999, 16))
    rows = arrays((8, 1, 2, 16)) * 2
    at = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    found = costs.count(
        jax.jit(partial(kernels.written, numerics=numerics)).trace(caches, rows, at).jaxpr
    )
    read_and_written = 2 * 8 * 2 * 2 * 16 * 4
    assert found.kernel_bytes == read_and_written


@pytest.mark.parametrize("with_gradient", [False, True])
def test_attention_on_a_gpu_states_its_products_and_loads(with_gradient):
    """Its loops have lengths that are values, and are not those of the program's own loops."""
    numerics = replace(tiny.NUMERICS, family="pallas_gpu", interpret=True, kv_block=16)
    shapes = arrays((3, 2, 70, 32), (3, 2, 32, 40), (3, 2, 40, 16))
    at = jnp.zeros((3, 70), jnp.int32)
    attend = partial(kernels.attention, numerics=numerics, aligned=True)
    matrix = jnp.ones((8, 8))

    def total(arrays):
        query, key, value = arrays
        return jnp.sum(attend(query, key, value, at))

    def run(query, key, value):
        arrays = query, key, value
        made = jax.grad(total)(arrays) if with_gradient else attend(*arrays, at)
        times = jnp.argmax(value)  # known to nobody before the program runs
        return made, jax.lax.fori_loop(0, times, lambda _, x: x @ x, matrix)

    found = costs.count(jax.jit(run).trace(*shapes).jaxpr, (7,))
    # Rows are filled up to tiles of 64, keys to blocks of 16; in the gradient both to 128.
    pairs = 3 * 2 * 128
    products = pairs * 48 * (32 + 16)
    by_rows, by_keys = pairs * 128 * (2 * 32 + 16), pairs * 128 * 2 * (32 + 16)
    gradient = by_rows + by_keys if with_gradient else 0
    assert found.flops == 2 * (products + gradient + 7 * 8 * 8 * 8)
    tiles = 3 * 2 * 2
    loads = tiles * (64 + 48) * (32 + 16)
    by_rows = 3 * 2 * (128 * (2 * 32 + 2 * 16) + 128 * (32 + 16))
    by_keys = 3 * 2 * (128 + 2 * 128) * (32 + 16)
    loaded = sum(call.loaded for call in found.kernels)
    assert loaded == 4 * (loads + (by_rows + by_keys if with_gradient else 0))
    assert found.kernel_bytes < loaded


def test_bytes_of_a_loop_over_slices_are_those_of_the_slices():
    def run(stack, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]

    shapes = arrays((50, 64, 64), (8, 64))
    module = hlo.parse(text_of(jax.jit(run).lower(*shapes).compile()))
    once = 4 * 50 * 64 * 64
    assert once <= costs.instructions(module).accessed < 5 * once


_NESTED = """HloModule nested

%inside (stack: f32[50,64,64], at: s32[]) -> f32[64,64] {
  %stack = f32[50,64,64] parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,64,64] dynamic-slice(%stack, %at, %zero, %zero), dynamic_slice_sizes={1,64,64}
  ROOT %one = f32[64,64] bitcast(%slice)
}

%outside (stack: f32[50,64,64], x: f32[8,64], at: s32[]) -> f32[8,64] {
  %stack = f32[50,64,64] parameter(0)
  %x = f32[8,64] parameter(1)
  %at = s32[] parameter(2)
  %own = f32[64,64] fusion(%stack, %at), kind=kLoop, calls=%inside
  ROOT %y = f32[8,64] dot(%x, %own), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (stack: f32[50,64,64], x: f32[8,64], at: s32[]) -> f32[8,64] {
  %stack = f32[50,64,64] parameter(0)
  %x = f32[8,64] parameter(1)
  %at = s32[] parameter(2)
  ROOT %fusion = f32[8,64] fusion(%stack, %x, %at), kind=kOutput, calls=%outside
}
"""


def test_a_slice_in_a_fusion_inside_a_fusion_reads_the_slice():
    assert costs.instructions(hlo.parse(_NESTED)).accessed == 4 * (64 * 64 + 8 * 64 + 8 * 64 + 1)


_STARTED = """HloModule started

%inside (stack: f32[50,64,64], at: s32[]) -> f32[1,64,64] {
  %stack = f32[50,64,64] parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,64,64] dynamic-slice(%stack, %at, %zero, %zero), dynamic_slice_sizes={1,64,64}
}

ENTRY %main (stack: f32[50,64,64], at: s32[]) -> f32[1,64,64] {
  %stack = f32[50,64,64] parameter(0)
  %at = s32[] parameter(1)
  %start = ((f32[50,64,64], s32[]), f32[1,64,64], u32[]) fusion-start(%stack, %at), calls=%inside
  %done = f32[1,64,64] fusion-done(%start)
  %moved = (f32[1,64,64]{2,1,0:T(8,128)S(1)}, f32[1,64,64]{2,1,0:T(8,128)}, u32[]) copy-start(%done)
  ROOT %here = f32[1,64,64]{2,1,0:T(8,128)S(1)} copy-done(%moved)
  %part = ((f32[1,64,64]), f32[1,8,64]{2,1,0:T(8,128)S(1)}, s32[]) slice-start(%done), slice={[0:1]}
  %taken = f32[1,8,64]{2,1,0:T(8,128)S(1)} slice-done(%part)
  %layer = ((f32[50,64,64], s32[]), ON_CHIP, u32[]) dynamic-slice-start(%stack, %at)
  %got = f32[1,64,64]{2,1,0:T(8,128)S(1)} dynamic-slice-done(%layer)
  %ahead = ((f32[50,64,64], s32[]), ON_CHIP, u32[]) fusion-start(%stack, %at), calls=%inside
  %ended = f32[1,64,64]{2,1,0:T(8,128)S(1)} fusion-done(%ahead)
  %both = f32[64,64] all-reduce-start(%at_hand), replica_groups={{0,1}}, to_apply=%add
  %sum = f32[64,64] all-reduce-done(%both)
  %at_hand = f32[64,64] parameter(2)
  %kernel = ((f32[64,64]), f32[64,64], s32[]) custom-call-start(%at_hand)
}
"""


def test_what_is_started_and_ended_apart_is_counted_once():
    """And what goes into a TPU's vector memory takes the reading of memory alone."""
    text = _STARTED.replace("ON_CHIP", "f32[1,64,64]{2,1,0:T(8,128)S(1)}")
    module, size, flag = hlo.parse(text), 4 * 64 * 64, 4
    whole, copied, sliced = 2 * size + 2 * flag, size + flag, size // 8 + flag
    layer, ahead, summed = size + flag, size + 2 * flag, 2 * size
    found = costs.instructions(module)
    assert found.accessed == whole + copied + sliced + layer + ahead + summed
    assert found.launches == 7
    assert found.copied == whole + ahead


_ELSEWHERE = """HloModule elsewhere

%rows (stack: f32[50,64], at: s32[8]) -> f32[8,64] {
  %stack = f32[50,64] parameter(0)
  %at = s32[8] parameter(1)
  ROOT %gather = f32[8,64] gather(%stack, %at), offset_dims={1}
}

%called (stack: f32[50,64], at: s32[8]) -> f32[8,64] {
  %stack = f32[50,64] parameter(0)
  %at = s32[8] parameter(1)
  ROOT %fusion = f32[8,64] fusion(%stack, %at), kind=kCustom, calls=%rows
}

ENTRY %main (stack: f32[50,64], at: s32[8]) -> f32[8,64] {
  %stack = f32[50,64] parameter(0)
  %at = s32[8] parameter(1)
  %start = ((), (), s32[1]) call-start(), to_apply=%called
  %going = ((f32[50,64], s32[8]), f32[8,64]) call-update(%start, %stack, %at)
  ROOT %done = f32[8,64] call-done(%going)
}
"""


def test_a_gather_on_another_core_reads_the_rows_it_takes():
    """A TPU's sparse core gathers: what is handed to it meanwhile is no traffic of its own."""
    module, rows = hlo.parse(_ELSEWHERE), 4 * 8 * 64
    found = costs.instructions(module)
    assert (found.accessed, found.launches) == (rows + 4 * 8 + rows, 1)


_ON_CHIP = """HloModule on_chip

ENTRY %main (all: f32[8,1024], few: f32[1,1024], at: s32[]) -> f32[8,1024] {
  %all = f32[8,1024] parameter(0)
  %few = f32[1,1024] parameter(1)
  %at = s32[] parameter(2)
  %taken = f32[1,1024]{1,0:T(8,128)S(1)} dynamic-slice(%all, %at, %at), dynamic_slice_sizes={1,1024}
  %kept = f32[8,1024]{1,0:T(8,128)S(1)} custom-call(%few), custom_call_target="x"
  %back = f32[1,1024] dynamic-slice(%kept, %at, %at), dynamic_slice_sizes={1,1024}
  ROOT %put = f32[8,1024] dynamic-update-slice(%all, %taken, %at, %at)
}
"""


def test_of_a_slice_or_an_update_the_ends_in_memory_count():
    size = 4 * 1024
    assert costs.instructions(hlo.parse(_ON_CHIP)).accessed == size + size + size


_FILLING = """HloModule filling

%zeros () -> bf16[8,1024] {
  %zero = bf16[] constant(0)
  ROOT %broadcast = bf16[8,1024] broadcast(%zero), dimensions={}
}

%doubled (x: bf16[8,1024]) -> bf16[8,1024] {
  %x = bf16[8,1024] parameter(0)
  ROOT %sum = bf16[8,1024] add(%x, %x)
}

ENTRY %main () -> bf16[8,1024] {
  %made = bf16[8,1024] fusion(), kind=kLoop, calls=%zeros
  ROOT %out = bf16[8,1024] fusion(%made), kind=kLoop, calls=%doubled
}
"""


def test_arrays_that_are_made_of_nothing_are_told_apart():
    module, size = hlo.parse(_FILLING), 2 * 8 * 1024
    found = costs.instructions(module)
    assert (found.accessed, found.filled, found.made) == (3 * size, size, 8 * 1024)


_WRITING = """HloModule writing

%into (cache: f32[8,1024], at: s32[4,1], rows: f32[4,1024]) -> f32[8,1024] {
  %cache = f32[8,1024] parameter(0)
  %at = s32[4,1] parameter(1)
  %rows = f32[4,1024] parameter(2)
  ROOT %scatter = f32[8,1024] scatter(%cache, %at, %rows), to_apply=%second
}

ENTRY %main (cache: f32[8,1024], at: s32[4,1], rows: f32[4,1024]) -> f32[8,1024] {
  %cache = f32[8,1024] parameter(0)
  %at = s32[4,1] parameter(1)
  %rows = f32[4,1024] parameter(2)
  ROOT %fusion = f32[8,1024] fusion(%cache, %at, %rows), kind=kCustom, calls=%into
}
"""


def test_bytes_of_a_write_into_a_cache_are_those_of_what_is_written():
    """Not a pass over the cache, though the compiler put it into a fusion."""
    rows, at = 4 * 4 * 1024, 4 * 4
    assert costs.instructions(hlo.parse(_WRITING)).accessed == 2 * rows + at


# A step.


def test_a_line_through_two_values():
    first = costs.Figures(Memory(10, 4, 6), 100, 7, {"all-gather": Traffic(2, 8)})
    second = costs.Figures(Memory(14, 4, 9), 200, 7, {"all-gather": Traffic(4, 16)})
    found = costs.along(first, second, at=(2, 4, 10))
    assert found == costs.Figures(Memory(26, 4, 18), 500, 7, {"all-gather": Traffic(10, 40)})


@pytest.mark.slow
def test_four_and_six_layers_say_what_eight_take():
    """With fewer layers the most memory is taken in prefill, with more in decoding."""
    small, large, eight = (stage("sampler", n).figures for n in (4, 6, 8))
    found = costs.along(small, large, at=(4, 6, 8))
    assert found.collectives == eight.collectives
    assert found.flops == eight.flops
    assert found.memory.arguments == eight.memory.arguments
    assert found.memory.outputs == eight.memory.outputs
    assert found.memory.total == pytest.approx(eight.memory.total, rel=0.02)
    assert found.bytes_accessed == pytest.approx(eight.bytes_accessed, rel=0.02)


def test_decode_steps_add_up_to_the_longest_response_but_its_first_token():
    runs, _, steps = workload.decode_steps(RECIPE)
    assert runs * steps == RECIPE.execution.sampling.max_tokens - 1
    execution = replace(RECIPE.execution, sampling=replace(tiny.SAMPLING, max_tokens=100))
    long = RECIPE.varied(execution=execution, slots=4)
    assert workload.decode_steps(long) == (16, 1, 25)  # 16 sequences in four rounds of 4 x 25


@pytest.mark.slow
def test_truncation_adds_no_product_to_what_is_planned():
    """Its searches are loops of their own, which the decode loops' counts must not go to."""

    def program(**changes):
        sampling = replace(RECIPE.execution.sampling, max_tokens=100, **changes)
        changed = RECIPE.varied(sampling=sampling)
        return plan.PROGRAMS["sampler"](changed, EIGHT.devices)

    plain, truncated = program(), program(top_k=5, top_p=0.9)
    counted = [
        costs.count(p.function.trace(*p.arguments).jaxpr, p.trips).flops for p in (plain, truncated)
    ]
    assert counted[0] == counted[1] > 0
    misread = costs.count(truncated.function.trace(*truncated.arguments).jaxpr, plain.trips).flops
    assert misread < counted[0]


def test_what_stays_on_a_chip_beside_a_program():
    alone, four = (
        workload.resident(on(Placement(fsdp=n)), EIGHT.devices, "sampler") for n in (1, 4)
    )
    params = sum(leaf.size for leaf in jax.tree.leaves(workload.parameter_shapes(tiny.CONFIG)))
    assert alone == pytest.approx(12 * params, rel=0.01)  # masters and two moments
    assert four == pytest.approx(alone / 4, rel=0.05)
    assert workload.resident(RECIPE, EIGHT.devices, "update") == 0


def test_a_step_is_given_what_its_estimator_needs():
    """Shapes alone; with greedy responses every device of the sampler has as many prompts."""
    steered = {"reward_kl_coefficient": 0.1, "reward_kl_target": 1.0}
    for estimator, more in (("remax", {}), ("optimal_token_baseline", steered)):
        objective = objectives.rloo(estimator=estimator, **more)
        what = on(Placement(fsdp=4)).varied(objective=objective)
        program = workload.scoring(what, EIGHT.devices)
        made = jax.eval_shape(program.function, *program.arguments)
        assert made.experience.advantages.shape[0] == what.sequences
        assert what.training.least_prompts == (4 if estimator == "remax" else 1)
    assert made.carried.reward_kl.shape == ()
    several = on(Placement(data=4)).varied(
        prompts_per_step=24, micro_batch=12, sampler_placement=Placement(data=8), own_devices=True
    )
    least = several.training.least_prompts
    assert least == 6  # 3 prompts fill the learner's micro-batches; 8 shards share 2 of 4 samples
    several.varied(prompts_per_step=least).training.check()


def test_responses_of_a_mean_length_are_learnt_from_in_as_many_buffers_as_they_fill():
    """Buffers are those of the run: not rows of the longest, whose number divides an update's."""
    rows = RECIPE.varied(execution=replace(RECIPE.execution, sampling=Sampling(100)), remat=True)
    rows = rows.varied(micro_batch_tokens=3 * rows.longest + 1)
    what = replace(rows, mean_tokens=25)
    responses = what.lengths - what.prompt_length
    assert responses.max() <= 100 < 3 * responses.max()  # of 16 the longest is no outlier
    np.testing.assert_allclose(responses.mean(), 25, rtol=0.02)
    assert what.size == f"of {what.tokens:,} tokens"
    assert RECIPE.size == f"{RECIPE.training.micro_batch}"
    parts = workload.parts(what)
    assert max(part.sum() for part in parts) <= what.tokens
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), what.lengths)
    program = workload.updating(what, EIGHT.devices)
    traced = costs.live(program.function.trace(*program.arguments).jaxpr)
    found = list(equations(traced))
    assert sum(one.primitive.name == "while" for one in found) == len(program.trips)
    assert any(out.aval.shape[:1] == (what.tokens,) for one in found for out in one.outvars)
    assert program.trips[0] == len(parts)
    all_longest = workload.learner_trips(replace(what, mean_tokens=100), "update")
    flops = costs.count(traced, program.trips).flops
    assert flops < costs.count(traced, all_longest).flops / 2
    assert roofline.least(what, "update").flops < roofline.least(rows, "update").flops / 2


def equations(jaxpr) -> Iterator[Any]:
    """All that run, inner ones included."""
    for one in jaxpr.eqns:
        if costs.runs(one, jaxpr):
            yield one
            for part in jaxprs_in_params(one.params):
                yield from equations(getattr(part, "jaxpr", part))


def test_buffers_have_room_for_any_number_of_tokens():
    tokens = 7 * RECIPE.longest + 1
    what = RECIPE.varied(micro_batch_tokens=tokens)
    assert what.training.learning.micro_batch_tokens == tokens
    assert [len(part) for part in workload.parts(what)] == [7, 7, 2]
    assert workload.learner_trips(what, "update")[0] == 3


def test_no_more_sequences_share_a_buffer_than_the_run_allows():
    what = RECIPE.varied(micro_batch=4, micro_batch_tokens=16 * RECIPE.longest)
    what = replace(what, mean_tokens=3)
    assert what.training.learning.micro_batch == 4
    assert [len(part) for part in workload.parts(what)] == [4] * 4
    assert workload.learner_trips(what, "update")[0] == 4
    halves = what.varied(placement=Placement(fsdp=2), micro_batch=8)
    assert [len(part) for part in workload.parts(halves)] == [4, 4]


def test_noise_is_planned_for_where_there_are_several_micro_batches():
    noisy = RECIPE.varied(micro_batch=4, noise_scale=True)
    assert noisy.with_micro_batch(8).learning.noise_scale
    assert not noisy.with_micro_batch(16).learning.noise_scale
    assert not RECIPE.with_micro_batch(8).learning.noise_scale


def test_a_plan_asks_nothing_of_the_memory_of_devices_that_are_not_here(monkeypatch):
    """Those that are compiled for have none to move a state to."""
    monkeypatch.setattr(training, "check_host", pytest.fail)
    offloaded = RECIPE.varied(offload=True)
    for program in (workload.scoring, workload.updating):
        assert program(offloaded, EIGHT.devices).arguments


def test_a_sampler_elsewhere_leaves_the_learners_weights_where_they_are():
    apart = on(Placement(fsdp=4)).varied(sampler_placement=Placement(fsdp=2))
    beside = workload.resident(apart, EIGHT.devices, "sampler")
    together = workload.resident(apart.varied(sampler_placement=None), EIGHT.devices, "sampler")
    assert beside - together == pytest.approx(workload.weight_bytes(apart) / 4, rel=0.1)


@pytest.mark.parametrize(
    ("entry", "copies"),
    [
        ({"name": "stale_weights", "updates": 3}, 1),
        ({"name": "in_flight_updates", "updates": 3, "every": 2}, 4),
    ],
)
def test_a_sampler_elsewhere_has_a_copy_of_each_age_that_it_draws_with(entry, copies):
    here = RECIPE.varied(mismatch=mismatch.build([entry]))
    assert here.sampler_copies == 0
    assert here.varied(sampler_placement=Placement(fsdp=2)).sampler_copies == copies
    ahead = RECIPE.varied(max_staleness=2, sampler_placement=Placement(fsdp=2))
    assert ahead.sampler_copies == 3


def test_adapters_merged_by_a_rule_of_the_sampler_are_a_copy_of_the_weights():
    dial = mismatch.build([{"name": "lora_merge", "dtype": "bfloat16"}])
    trained = RECIPE.varied(lora=Lora(rank=2))
    own = trained.varied(mismatch=dial)
    assert (trained.sampler_copies, own.sampler_copies) == (0, 1)
    sizes = [workload.resident(one, EIGHT.devices, "sampler") for one in (trained, own)]
    assert sizes[1] - sizes[0] == workload.weight_bytes(trained)


def test_a_forward_before_the_updates_is_of_all_sequences():
    one, four = (RECIPE.varied(micro_batch_tokens=64, mini_batches=count) for count in (1, 4))
    of_scoring = [workload.scoring(what, EIGHT.devices).trips[0] for what in (one, four)]
    assert of_scoring[0] == of_scoring[1] == 4 * workload.learner_trips(four, "update")[0]


@pytest.mark.parametrize(
    ("where", "stage", "line"),
    [
        (Placement(fsdp=2), "sampler", "placement.fsdp = 8: the slice has devices"),
        (Placement(data=8), "update", "placement.data = 1 with placement.fsdp = 8: masters"),
        (Placement(fsdp=8), "sampler", 'placement.decode = "sharded"'),
        (Placement(fsdp=8), "sampler", "sampler.slots = 8: this many sequences"),
        (Placement(fsdp=8), "update", "learner.remat = true"),
        (Placement(fsdp=8), "update", "learner.micro_batch = 8: one sequence a device"),
        (Placement(fsdp=8), "scoring", 'numerics.dtype = "bfloat16"'),
    ],
)
def test_advice(where, stage, line):
    found = list(budget.advice(on(where), stage, EIGHT.devices, slots=8))
    assert any(one.startswith(line) for one in found)
    assert all("\n" not in one for one in found)


def test_advice_leaves_out_what_is_done_or_cannot_be():
    done = RECIPE.varied(remat=True, micro_batch=8)
    found = list(
        budget.advice(done.varied(placement=Placement(fsdp=8)), "update", EIGHT.devices, slots=None)
    )
    assert not any("remat" in one or "micro_batch" in one or "placement" in one for one in found)


def test_search_by_a_line_confirms_what_it_finds():
    asked = []

    def total(count):
        asked.append(count)
        return 100 + 7 * count

    found = plan.largest(total, range(1, 1000), capacity=1000, known={16: 212})
    assert (found.count, found.total, found.bounded) == (128, 996, True)
    assert asked == [1, 128]


def test_search_goes_back_where_the_line_was_too_kind():
    found = plan.largest(lambda n: 10 * n + n * n, range(1, 50), capacity=500, known={})
    assert found.total == 10 * found.count + found.count**2 <= 500
    assert found.count > 10
    assert plan.largest(lambda n: 50 + n, [1, 2], capacity=10, known={}).count == 0
    assert not plan.largest(lambda n: n, [1, 2, 3], capacity=10, known={}).bounded


# The static audit.


def product_text(rows: int, *, dtype=jnp.float32, pieces: int = 1, transposed: bool = False) -> str:
    """A product and a sum of its rows; `pieces`: of the contraction, added up."""

    def run(x, w):
        w = w.T if transposed else w
        parts = zip(jnp.split(x, pieces, axis=1), jnp.split(w, pieces), strict=True)
        y = sum(jax.lax.optimization_barrier(a @ b) for a, b in parts)
        return jax.lax.reduce_sum_p.bind(jax.lax.optimization_barrier(y), axes=(1,))

    wide = (160, 96) if transposed else (96, 160)
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((rows, 96), wide)]
    return text_of(jax.jit(run).lower(*shapes).compile())


WEIGHTS = [(96, 160)]


def test_equal_programs_have_no_differences():
    text = product_text(24)
    found = comparison.compare(text, [text], weights=WEIGHTS)
    assert {match.operation.kind for match in found} == {"product", "sum"}
    assert not any(match.differences for match in found)


def test_more_rows_are_no_difference_and_are_named():
    found = comparison.compare(product_text(40), [product_text(48)], weights=WEIGHTS)
    assert "product" in {match.operation.kind for match in found}
    for match in found:
        assert not match.differences
        assert match.sizes == ("40 and 48",)


@pytest.mark.parametrize("planted", [{"dtype": jnp.bfloat16}, {"pieces": 2}, {"transposed": True}])
def test_a_planted_difference_is_found(planted):
    found = comparison.compare(product_text(24), [product_text(24, **planted)], weights=WEIGHTS)
    assert any(match.differences for match in found)


def test_rows_that_have_a_weights_shape_by_chance_are_no_difference():
    found = comparison.compare(product_text(40), [product_text(48)], weights=[*WEIGHTS, (40, 96)])
    assert found
    assert not any(match.differences for match in found)


def test_values_by_row_may_have_the_shapes_of_two_weights():
    weights = [*WEIGHTS, (40,), (48,)]
    found = comparison.compare(product_text(40), [product_text(48)], weights=weights)
    assert found
    assert not any(match.differences for match in found)


def test_weights_of_two_sizes_are_a_difference():
    def text(width):
        shapes = arrays((24, 96), (96, 160), (width,))
        run = jax.jit(lambda x, w, bias: jnp.sum(bias) + jnp.sum(x @ w, axis=1))
        return text_of(run.lower(*shapes).compile())

    weights = [*WEIGHTS, (40,), (48,)]
    found = comparison.compare(text(40), [text(48)], weights=weights)
    assert any("sizes [40] / [48]" in line for match in found for line in match.differences)


def test_a_difference_in_layouts_alone_is_told_apart():
    rows = "f32[24,96]{1,0"
    text = product_text(24)
    assert rows in text
    moved = text.replace(rows, rows + ":T(2,128)")
    found = comparison.compare(moved, [text], weights=WEIGHTS)
    other = comparison.compare(product_text(24, pieces=2), [text], weights=WEIGHTS)
    product = next(match for match in found if match.operation.kind == "product")
    assert "layout {1,0:T(2,128)} / {1,0}" in " ".join(product.differences)
    assert product.in_layout_alone
    assert not any(match.in_layout_alone for match in other)


def test_layout_and_sizes_of_integers_are_no_difference():
    def with_integers(dtype, layout, width):
        return f"""HloModule m
ENTRY %main (x: {dtype}[8,{width}], y: f32[8,96]) -> f32[8] {{
  %x = {dtype}[8,{width}]{{1,0{layout}}} parameter(0)
  %y = f32[8,96]{{1,0}} parameter(1)
  ROOT %sum = f32[8]{{0}} custom-call(%x, %y), custom_call_target="tpu_custom_call"
}}
"""

    for dtype, same in (("s32", True), ("f32", False)):
        for other in (with_integers(dtype, ":T(4,128)", 24), with_integers(dtype, ":T(8,128)", 40)):
            one, weights = with_integers(dtype, ":T(8,128)", 24), [*WEIGHTS, (8, 24)]
            (match,) = comparison.compare(one, [other], weights=weights)
            assert (not match.differences) == same


def test_another_width_is_a_difference():
    def text(width):
        program = jax.jit(lambda x, w: x @ w)
        return text_of(program.lower(*arrays((24, 96), (96, width))).compile())

    (match,) = comparison.compare(text(160), [text(320)], weights=[*WEIGHTS, (96, 320)])
    assert any("sizes [96, 160] / [96, 320]" in line for line in match.differences)


@cache
def kernel_body(family: str, operation: str, rows: int = 140) -> str:
    """Of a kernel lowered for a TPU or a GPU, as the audit reads it."""
    numerics = lowering.NUMERICS[family]["bfloat16"]
    function, shapes = lowering.operations(numerics, rows)[operation]
    text = lowering.lower(family, function, shapes).as_text()
    code = comparison.kernel_code(text.replace("\\22", '"') if family == "pallas_tpu" else text)
    return comparison.without_tile(code)


@pytest.mark.parametrize("family", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize(
    "operation",
    [
        *("dot", "gated_dot", "norm", "row_sum", "attention", "attention, latent"),
        *("attention, window", "attention, pages"),
    ],
)
def test_a_kernels_code_is_read_without_the_sizes_of_its_grid(family, operation):
    few, many = kernel_body(family, operation), kernel_body(family, operation, 700)
    assert {"pallas_tpu": "stable_mosaic", "pallas_gpu": "tt.load ["}[family] in few
    assert few == many


@pytest.mark.parametrize("family", ["pallas_tpu", "pallas_gpu"])
def test_kernels_that_only_move_values_are_known(family):
    computing = ("dot", "norm", "project", "attention", "row_sum", "log", "exponentials")
    assert all(comparison.computes(kernel_body(family, name)) for name in computing)
    assert comparison.computes("bytes that nobody can read")
    if family == "pallas_tpu":
        assert not comparison.computes(kernel_body(family, "cache_write"))


@pytest.mark.parametrize("family", ["pallas_tpu", "pallas_gpu"])
def test_kernels_that_differ_have_other_code(family):
    assert len({kernel_body(family, name) for name in ("dot", "dot_add", "row_sum")}) == 3


def triton_code(change: tuple[str, str] = ("", "")) -> str:
    """Of a kernel that adds three numbers, as a compiled program has it."""
    code = """
    tt.func public @f(%x: !tt.ptr<f32>, %n: i32) {
      %three = arith.constant 3 : i32
      %far = arith.addi %n, %three : i32
      %at = tt.addptr %x, %far : !tt.ptr<f32>, i32
      %a = tt.load %at : !tt.ptr<f32>
      %b = tt.load %x : !tt.ptr<f32>
      %one = arith.constant 1.0 : f32
      %s = arith.addf %a, %b : f32
      %t = arith.addf %s, %one : f32
      tt.store %x, %t : !tt.ptr<f32>
      tt.return
    }""".replace(*change)
    context = mlir.make_ir_context()
    triton.register_dialect(context)
    stored = io.BytesIO()
    with context:
        ir.Module.parse(code).operation.write_bytecode(stored)
    text = "".join(
        chr(byte) if bytes([byte]).isalnum() else f"\\{byte:02X}" for byte in stored.getvalue()
    )
    return comparison.kernel_code(f'{{debug = false, ir = "{text}", num_warps = 4 : i32}}')


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("constant 3", "constant 4"), True),  # a place in memory
        (("arith.addi %n, %three", "arith.muli %n, %three"), True),
        (("constant 1.0", "constant 2.0"), False),
        (("addf %s, %one", "addf %one, %s"), False),
        (("addf %s, %one", "addf %a, %one"), False),
        (("%t = arith.addf", "%t = arith.mulf"), False),
        (("%s, %one : f32", "%s, %one fastmath<contract> : f32"), False),
    ],
)
def test_code_for_a_gpu_is_the_order_of_its_operations_on_floats(change, same):
    assert "arith.addf" in triton_code()
    assert (triton_code(change) == triton_code()) == same


def test_a_product_left_to_a_library_is_a_product():
    text = product_text(24)
    call = 'custom-call(%x), custom_call_target="__cublas$lt$matmul", metadata={}'
    library = f"""HloModule m
ENTRY %main (x: f32[24,96]) -> f32[24,160] {{
  %x = f32[24,96]{{1,0}} parameter(0)
  ROOT %y = f32[24,160]{{1,0}} {call}
}}
"""
    (match,) = comparison.compare(library, [text], weights=WEIGHTS)
    assert match.operation.kind == "product"
    assert match.differences


def test_a_kernels_last_step_is_that_of_its_own_grid():
    code = """
    %1 = "stable_mosaic.arith.constant"() {value = 0 : i32} : () -> i32
    %2 = "stable_mosaic.arith.cmpi"(%arg1, %1) {predicate = 0 : i64} : (i32, i32) -> i1
    %3 = "stable_mosaic.arith.constant"() {value = LAST : i32} : () -> i32
    %4 = "stable_mosaic.arith.cmpi"(%arg1, %3) {predicate = 0 : i64} : (i32, i32) -> i1
    iteration_bounds = array<i64: 7, BOUND>"""

    def read(last: int, bound: int) -> str:
        return comparison.without_bounds(
            code.replace("LAST", str(last)).replace("BOUND", str(bound))
        )

    assert read(15, 16) == read(0, 1) == read(79, 80)
    assert read(14, 16) != read(15, 16)


def test_gradients_are_no_counterparts():
    text = product_text(24).replace("jit(run)", "jit(run)/transpose(jvp())")
    found = {
        m.operation.kind: m for m in comparison.compare(product_text(24), [text], weights=WEIGHTS)
    }
    assert found["product"].counterpart is None
    assert found["product"].differences == ("the learner has no product",)


# Slices.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e", "write GENERATION:SIZES"),
        ("v5e:4,4", "write GENERATION:SIZES"),
        ("v5x:4x4", "unknown generation 'v5x'; did you mean 'v5"),
        ("a100:1", "unknown generation 'a100'; did you mean 'h100'"),
        ("h200:16", "NVIDIA H200 has no slice 16; it has 1, 2, 4, 8"),
        ("v5e:4x5", "TPU v5e has no slice 4x5; it has 1x1, .*; nearest: v5e:4x8"),
        ("v5p:4x4", "TPU v5p has no slice 4x4; it has 2x2x1, .*; nearest: v5p:2x2x4"),
    ],
)
def test_slices_that_are_not_are_refused(name, message):
    with pytest.raises(InputError, match=message):
        topology.check(name)


def test_slices_of_every_generation():
    assert topology.check("v5e:16x16")[1] == topology.check("v5p:4x8x8")[1] == 256
    assert topology.check("tpu7x:4x4x8")[1] == 256  # two devices a chip
    for generation in topology.GENERATIONS.values():
        sizes = [topology.count_chips(one) for one in generation.slices]
        assert sizes == sorted(sizes)


def test_too_few_chips_are_refused_with_a_slice_that_has_enough():
    with pytest.raises(InputError, match=r"needs 64 devices, it has 16; v5e:8x8 has enough"):
        topology.check_devices("v5e:4x4", 64)


def test_a_missing_libtpu_names_the_extra(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"install tim-jax\[plan\]"):
        topology.target("v5e:1x1")


# The whole.


@pytest.fixture(scope="module")
def compiled_once():
    """A program of a step is compiled for the eight devices once, however much memory they have.

    Those of the learner know nothing of the sampler's slots.
    """
    compiled, made = plan._compiled, {}

    def once(what, target, name, say):
        key = name, what if name == "sampler" else what.varied(slots=None)
        if key not in made:
            made[key] = compiled(what, target, name, say)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_compiled", once)
        patch.setattr(plan, "_MOST_PROMPTS", 1)  # for which everything fits
        yield


@pytest.mark.slow
def test_a_plan_for_virtual_devices(compiled_once):
    made = plan.make(on(Placement(fsdp=2, tensor=1)), EIGHT, layers=None)
    assert made.fits
    for key, count in {"learner.prompts_per_step": 4, "learner.micro_batch": 16}.items():
        assert (made.largest[key].count, made.largest[key].bounded) == (count, False)
    assert [one.name for one in made.stages] == ["sampler", "scoring", "update"]
    sampler, scoring, update = (one.figures for one in made.stages)
    # A sampler that gathers its weights once has the embeddings; the others look them up by rows.
    assert set(sampler.collectives) == {"all-gather"}
    assert set(scoring.collectives) == {"all-gather", "all-to-all"}
    assert {"all-gather", "reduce-scatter"} <= set(update.collectives) | {"reduce-scatter"}
    assert update.flops > 2.5 * scoring.flops
    found = json.loads(json.dumps(plan.as_json(made)))
    assert found["stages"]["update"]["memory"]["total"] == made.stages[-1].total
    text = plan.text(made)
    assert "fits" in text
    assert "static audit" in text


@pytest.mark.slow
def test_what_does_not_fit_comes_with_advice(compiled_once):
    small = replace(EIGHT, capacity=2**16)
    made = plan.make(on(Placement(fsdp=2)), small, layers=None, searching=False)
    assert not made.fits
    assert any("placement.fsdp = 8" in line for line in made.advice)
    assert "DOES NOT FIT" in plan.text(made)


@pytest.mark.slow
def test_a_sampler_that_does_not_fit_is_planned_with_fewer_slots(compiled_once):
    what = on(Placement(fsdp=2))
    whole = plan.make(what, EIGHT, layers=None, searching=False).stages[0].total
    made = plan.make(what, replace(EIGHT, capacity=whole - 1), layers=None)
    found = made.largest["sampler.slots"]
    assert 2 <= found.count < what.sequences
    assert found.total < whole
    assert any(f"sampler.slots = {found.count}: " in line for line in made.advice)
    again = plan.make(what.varied(slots=found.count), EIGHT, layers=None, searching=False)
    assert again.stages[0].total == found.total
    assert f"{found.count} slots" in plan.text(again)


# What a kernel for TPUs can take.
POD = replace(
    tiny.UNTIED,
    vocab_size=640,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=384,
    max_positions=256,
)
CONFIG = """
[model]
preset = "tiny"

[numerics]
family = "tiles"
dtype = "bfloat16"

[sampling]
samples = 4
max_prompt_length = 64
max_tokens = 64

[learner]
prompts_per_step = 8
mode = "recompute"

[placement]
fsdp = 4
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "pod.toml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v5e:1x1"], "the placement needs 4 devices, it has 1; v5e:2x2 has enough"),
        (["--topology", "v5e:2x2", "--layers", "3"], "--layers '3': write"),
        (
            ["--topology", "v5e:2x2", "numerics.family=pallas_gpu"],
            'has no kernels for TPU v5e; there it can be "pallas_tpu"',
        ),
        (
            ["--topology", "h200:4", "numerics.family=pallas_tpu"],
            'has no kernels for NVIDIA H200; there it can be "pallas_gpu"',
        ),
        (["--topology", "v5e:2x2", "--architecture", "no.json"], "no.json: No such file"),
        (["--topology", "v6:2x2"], "did you mean 'v6e'"),
        (["--topology", "v5e:2x2", "--mean-tokens", "8"], "needs learner.micro_batch_tokens"),
        (
            [*("--topology", "v5e:2x2", "--mean-tokens", "65"), "learner.micro_batch_tokens=512"],
            "--mean-tokens 65: must be from 1 to sampling.max_tokens, which is 64",
        ),
    ],
)
def test_bad_input_is_one_line(config, arguments, message, capsys):
    assert cli.main(["plan", str(config), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_architecture_has_positions_of_its_own(config, monkeypatch, capsys):
    """And not those of the model that it replaces, which are too few here."""

    def plan_run(config, slice_name, *, architecture, **_):
        raise InputError(f"plans {architecture} for {config.sampling.max_tokens} tokens")

    monkeypatch.setattr(planning_job, "plan_run", plan_run)
    words = "plan", str(config), "--topology", "v5e:2x2", "sampling.max_tokens=5000"
    assert cli.main([*words]) == 2
    assert "more than the model's" in capsys.readouterr().err
    assert cli.main([*words, "--architecture", "large.json"]) == 2
    assert capsys.readouterr().err == "tim-jax: plans large.json for 5000 tokens\n"
    assert cli.main([*words, "--architecture", "\N{GRINNING FACE}.json"]) == 2
    assert "plans \N{GRINNING FACE}.json for" in capsys.readouterr().err


def planned(config, folder: Path, *words: str) -> tuple[dict, str]:
    """A plan as JSON and as text, made in a process of its own.

    libtpu wants its environment before JAX is there.
    """
    command = [sys.executable, "-m", "tim_jax", "plan", str(config)]
    (folder / "config.json").write_text(json.dumps(to_hf(POD)))
    options = ["--quick", "--json", str(folder / "plan.json")]
    options += ["--architecture", str(folder / "config.json")]
    found = subprocess.run(
        [*command, *options, *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(HERE.parent),
            "XLA_FLAGS": "",  # the CPU's
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        },
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads((folder / "plan.json").read_text()), found.stdout


@pytest.mark.slow
def test_the_command_plans_for_a_tpu(config, tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (pip install tim-jax[plan])")
    words = "--topology", "v5e:2x2", "numerics.family=pallas_tpu"
    made, text = planned(config, tmp_path, *words)
    assert made["fits"]
    assert made["stages"]["sampler"]["collectives"]["all-gather"]["bytes"] > 0
    assert "static audit" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("pallas_gpu", "float32"),
        ("pallas_gpu", "bfloat16"),
        ("pallas_gpu", "float16"),
        ("pallas_mosaic_gpu", "bfloat16"),
    ],
)
def test_the_command_plans_for_gpus(config, tmp_path, family, dtype):
    """Every kernel of the sampler's forward is the learner's; only the draw has one of its own."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("CUDA's compiler is not installed (pip install tim-jax[cuda])")
    if family == "pallas_mosaic_gpu" and jax.__version_info__ < (0, 12):
        pytest.skip("the family needs JAX 0.12")
    words = "--topology", "h200:4", f"numerics.family={family}", f"numerics.dtype={dtype}"
    made, _ = planned(config, tmp_path, *words)
    assert made["fits"]
    assert made["stages"]["sampler"]["collectives"]["all-gather"]["bytes"] > 0
    compared = [one for one in made["audit"] if one["kind"] in comparison.COMPARED]
    assert {one["kind"] for one in compared} == {"kernel"}
    assert len(compared) > 10
    assert [one["name"] for one in compared if one["differences"]] == ["exponentials"]
