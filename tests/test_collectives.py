"""Gathers in stages move what a gather at once moves."""

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
