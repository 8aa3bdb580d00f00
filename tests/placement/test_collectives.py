"""Gathers in stages move what a gather at once moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from tim_jax.placement import collectives


@given(count=st.integers(1, 300), most=st.integers(2, 16))
def test_after_all_stages_every_device_has_every_part_once(count, most):
    held = [[device] for device in range(count)]
    for groups in collectives.stages(count, most):
        if groups is None:
            groups = [list(range(count))]
        assert sorted(device for group in groups for device in group) == list(range(count))
        together = {device: group for group in groups for device in group}
        held = [
            [part for other in together[device] for part in held[other]] for device in range(count)
        ]
    assert all(parts == list(range(count)) for parts in held)


@pytest.mark.parametrize(
    ("count", "sizes"), [(16, [16]), (32, [16, 2]), (64, [16, 4]), (256, [16, 16]), (17, [17])]
)
def test_stages_are_few_and_small(count, sizes):
    found = collectives.stages(count, 16)
    assert [count if groups is None else len(groups[0]) for groups in found] == sizes


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("b",)], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_stages_change_nothing(names, axis, monkeypatch):
    monkeypatch.setattr(collectives, "_STAGE", 2)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))
    whole = jnp.arange(64.0).reshape(8, 8)
    parts = PartitionSpec(names) if axis == 0 else PartitionSpec(None, names)
    gather = jax.shard_map(
        lambda x: collectives._collect(x, names, axis),
        mesh=mesh,
        in_specs=parts,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    program = jax.jit(gather)
    np.testing.assert_array_equal(program(whole), whole)
    assert program.lower(whole).as_text().count("all_gather") >= 2


def test_parts_of_a_sum_are_sent_in_their_own_dtype_and_added_in_float32():
    """One large and three small addends: in bfloat16 the small ones would be lost."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    addends = np.asarray([256.0, 0.75, 0.75, 0.75], np.float32)
    x = jnp.asarray(np.repeat(addends, 8).reshape(4, 8), jnp.bfloat16)
    reduce = jax.shard_map(
        lambda x: collectives._reduce(x[0], ("a",), 0),
        mesh=mesh,
        in_specs=PartitionSpec("a"),
        out_specs=PartitionSpec("a"),
        check_vma=False,
    )
    program = jax.jit(reduce)
    found = program(x)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.full(8, 258.25, np.float32))
    sent = re.findall(r'"stablehlo.all_to_all"\(.*-> tensor<([^>]*)>', program.lower(x).as_text())
    assert sent
    assert all(kind.endswith("bf16") for kind in sent)
