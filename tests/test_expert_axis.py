"""Experts on a mesh axis: the bits of one device, gradients, lockstep, and what is refused."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from tim_jax import kernels, placement
from tim_jax.errors import InputError
from tim_jax.kernels import experts
from tim_jax.model import parameters
from tim_jax.model.execution import ALL_AT_ONCE, Batching, Execution
from tim_jax.numerics import Numerics
from tim_jax.placement import SINGLE, Placement, exchange
from tim_jax.policy import scoring
from tim_jax.rl import programs, sharded

E, K, D, WIDTH = 8, 3, 16, 8
QWEN = replace(
    tiny.UNTIED,
    model_type="qwen3_moe",
    num_experts=E,
    num_experts_per_tok=K,
    moe_intermediate_size=WIDTH,
    norm_topk_prob=True,
)
PROMPTS = 8
EVERYWHERE, OF_EXPERT = PartitionSpec(), PartitionSpec("expert")


def chosen(kind: str, rows: int) -> np.ndarray:
    """i32[rows, K]: drawn, or of all rows the same experts, which lie on one device or two."""
    if kind == "one":
        return np.broadcast_to(np.array([6, 7, 5], np.int32), (rows, K))
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(E)[:K] for _ in range(rows)]).astype(np.int32)


def made_on(where: Placement, on, numerics: Numerics):
    """What experts make of rows on a mesh, and the gradients for a cotangent of it, by function."""

    def local(x, gate_up, down, choice, cotangent):
        call = partial(
            experts.outputs,
            experts=choice,
            ops=kernels.family(numerics),
            numerics=numerics,
            exchange=exchange.over(where, count=E),
        )
        found, transpose = jax.vjp(call, x, gate_up, down)
        return found, transpose(cotangent)

    return jax.shard_map(
        local,
        mesh=on,
        in_specs=(OF_EXPERT,) * 5,
        out_specs=OF_EXPERT,
        check_vma=False,
    )


def made(where: Placement, given, numerics: Numerics):
    """(outputs, gradients) on a placement."""
    on = placement.mesh(where, jax.devices())
    return jax.device_get(jax.jit(made_on(where, on, numerics))(*given))


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`jax.lax.ragged_all_to_all` as its documentation has it, by gathers: XLA:CPU has none."""
    operands, *sent = (
        jax.lax.all_gather(x, axis_name)
        for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    device = jax.lax.axis_index(axis_name)
    at = jnp.arange(output.shape[0])
    for source in range(operands.shape[0]):
        first, size, start = (x[source, device] for x in sent)
        inside = (at >= start) & (at < start + recv_sizes[source])
        rows = operands[source, jnp.where(inside, first + at - start, 0)]
        output = jnp.where(inside[:, None] & (size == recv_sizes[source]), rows, output)
    return output


def arguments(kind, numerics, rows=40):
    """Of `made`."""
    rng = np.random.default_rng(1)
    shapes = (rows, D), (E, D, 2 * WIDTH), (E, WIDTH, D)
    inputs = [jnp.asarray(rng.standard_normal(s, np.float32), numerics.dtype) for s in shapes]
    cotangent = rng.standard_normal((rows, K, D), np.float32)
    return (*inputs, jnp.asarray(chosen(kind, rows)), jnp.asarray(cotangent))


def check(where, kind, numerics):
    """Outputs are those of one device to the bit, gradients nearly."""
    given = arguments(kind, numerics)
    (alone, expected), (found, gradients) = (
        made(place, given, numerics) for place in (SINGLE, where)
    )
    assert np.abs(alone).max(axis=2).min() > 0
    assert tiny.bits(found) == tiny.bits(alone)
    near = 1e-5 if numerics == tiny.NUMERICS else 1e-2
    for ours, theirs in zip(gradients, expected, strict=True):
        ours, theirs = (x.astype(np.float32) for x in (ours, theirs))
        scale = float(np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=near, atol=near * scale)


@pytest.mark.parametrize("kind", ["drawn", "one"])
def test_outputs_have_the_bits_of_one_device(kind):
    for size in (2, 4, 8):
        check(Placement(expert=size), kind, tiny.NUMERICS)


@pytest.mark.slow
def test_outputs_in_bfloat16_have_the_bits_of_one_device():
    for size in (2, 4, 8):
        check(Placement(expert=size), "drawn", tiny.BF16)


@pytest.mark.parametrize("kind", ["drawn", "one"])
def test_what_tpus_and_gpus_move_is_the_same(monkeypatch, kind):
    def ragged(x, counts, *, most, block):
        del block
        return exchange._ragged(x, counts, most=most)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(exchange, "_dense", ragged)
    check(Placement(expert=4), kind, tiny.NUMERICS)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_tpus_and_gpus_move_no_more_than_is_needed(platform):
    where = Placement(data=2, expert=4)
    on = placement.mesh(where, jax.devices())
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments("drawn", tiny.NUMERICS)]
    lowered = jax.jit(made_on(where, on, tiny.NUMERICS)).trace(*given)
    text = lowered.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("@ragged_all_to_all") == 2  # of the forward and of the backward
    assert "all_to_all" in text.replace("ragged_all_to_all", "")  # sums of gradients of rows
