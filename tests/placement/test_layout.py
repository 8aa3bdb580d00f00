"""Placement: what it refuses, its mesh, and the logical axes of a model's arrays."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from tim_jax import placement
from tim_jax.common.errors import InputError
from tim_jax.instruments.auditing.cases import PRESETS, placements
from tim_jax.model import parameters
from tim_jax.model.weights import param_axes, parameter_shapes, table, weight_axes
from tim_jax.numerics import Numerics
from tim_jax.placement import SINGLE, Placement

WIDE = replace(
    tiny.CONFIG,
    model_type="llama",
    qk_norm=False,
    hidden_size=32,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=32,
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": 0}, "data must be a positive integer, got 0"),
        ({"fsdp": -1}, "fsdp must be a positive integer, got -1"),
        ({"tensor": 1.5}, "tensor must be a positive integer, got 1.5"),
        ({"decode": "hole"}, "decode must be 'whole' or 'sharded', got 'hole'"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Placement(**options)


def test_too_few_devices_are_refused_with_both_numbers():
    with pytest.raises(InputError, match=r"expert 1 x tensor 2 needs 32 devices, but there are 8"):
        placement.mesh(Placement(2, 8, 1, 2), jax.devices())


def test_a_mesh_has_tensor_neighbours_together():
    devices = jax.devices()
    found = placement.mesh(Placement(2, 2, tensor=2), devices)
    assert found.axis_names == ("data", "fsdp", "expert", "tensor")
    assert found.devices.tolist() == np.array(devices).reshape(2, 2, 1, 2).tolist()
    assert placement.mesh(Placement(fsdp=3), devices).devices.size == 3


def test_counts():
    where = Placement(2, 3, 5, 4)
    assert (where.devices, where.shards, where.shape) == (120, 30, (2, 3, 5, 4))
    assert SINGLE.single
    assert not where.single
    assert where.gathered == Placement(2, 1, 5, 4)
    assert where.shards_text == "data x fsdp x expert = 30"
    assert replace(where, expert=1).shards_text == "data x fsdp = 6"
    assert str(Placement(fsdp=2, decode="sharded")) == "fsdp=2 decode=sharded"


def test_rules():
    assert placement.spec(("whole", "in", "out")) == PartitionSpec(None, ("fsdp",), ("tensor",))
    assert placement.spec(("rows",)) == PartitionSpec(("data", "fsdp", "expert"))
    assert placement.missing(("whole", "out")) == ("data", "fsdp", "expert")
    assert placement.missing(("hidden",)) == ("data", "expert")
    assert placement.missing(("whole", "expert", "in", "out")) == ("data",)


CONFIGS = {**PRESETS, "biases": WIDE, "untied biases": replace(WIDE, tied_embeddings=False)}


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_logical_axes_are_those_of_the_arrays(name, tiles):
    """One for every dimension of every parameter and weight, and no more."""
    config, numerics = CONFIGS[name], Numerics(column_tiles=tiles)
    shapes = parameter_shapes(config)
    if any(n % tiles for n in (config.num_kv_heads, config.hidden_size)):
        pytest.skip("the model has no such column tiles")
    prepare = partial(parameters.prepare, config=config, numerics=numerics)
    for tree, found in (
        (shapes, param_axes(config)),
        (jax.eval_shape(prepare, shapes), weight_axes(config, numerics)),
    ):
        ranks = jax.tree.map(lambda leaf: leaf.ndim, tree)
        assert ranks == jax.tree.map(len, found, is_leaf=lambda node: isinstance(node, tuple))


def test_all_that_is_large_is_split_over_all_of_fsdp_and_tensor():
    """Master weights, and with them the optimiser's moments."""
    for config in CONFIGS.values():
        large = [row for row in table(config) if row.kind in ("embedding", "matrix")]
        assert len(large) >= 7
        assert all({"fsdp", "tensor"}.isdisjoint(placement.missing(row.axes)) for row in large)


@pytest.mark.parametrize(
    ("sizes", "where", "message"),
    [
        ({"intermediate_size": 36}, Placement(fsdp=8), "fsdp = 8 must .* intermediate_size = 36"),
        ({"head_dim": 2}, Placement(fsdp=32), "fsdp = 32 must .* num_heads x head_dim = 16"),
        ({"intermediate_size": 33}, Placement(tensor=2), "must .* intermediate_size = 33, got 2"),
    ],
)
def test_every_dimension_that_is_split_is_checked(sizes, where, message):
    config = replace(WIDE, **sizes)
    parameters.check(config, Numerics(), SINGLE)
    with pytest.raises(InputError, match=message):
        parameters.check(config, Numerics(column_tiles=where.tensor), where)


@pytest.mark.parametrize(
    ("where", "tiles", "message"),
    [
        (Placement(tensor=2), 1, "tensor = 2 needs numerics whose column_tiles are a multiple"),
        (Placement(tensor=2), 3, "got column_tiles = 3"),
        (SINGLE, 8, "column_tiles must divide the model's num_kv_heads = 4, got 8"),
        (Placement(fsdp=3), 1, "fsdp x tensor = 3 must divide the model's hidden_size = 32"),
    ],
)
def test_what_a_model_cannot_be_is_refused(where, tiles, message):
    with pytest.raises(InputError, match=message):
        parameters.check(WIDE, Numerics(column_tiles=tiles), where)


def test_a_mixture_of_experts_takes_no_tensor_axis():
    config = PRESETS["qwen3-moe-awkward"]
    for where, tiles in ((Placement(tensor=2), 2), (SINGLE, 2)):
        with pytest.raises(InputError, match=r"mixture of experts takes no tensor axis.*use fsdp"):
            parameters.check(config, Numerics(column_tiles=tiles), where)
    found = placements(config, 8)
    assert {p.tensor for p in found} == {1}
    assert {p.fsdp for p in found} >= {2, 4}


def test_an_audit_takes_the_placements_that_a_model_allows():
    found = placements(PRESETS["qwen3"], 8)
    assert {p.devices for p in found} == {2, 4, 8}
    assert {p.tensor for p in found} == {1, 2}  # two key heads
    assert any(p.decode == "sharded" for p in found)
    assert max(p.shards for p in placements(PRESETS["qwen3"], 64)) == 64
    assert placements(PRESETS["qwen3"], 1) == ()
    assert all(52 % p.fsdp == 0 for p in placements(PRESETS["qwen3-awkward"], 8))
