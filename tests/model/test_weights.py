"""The table of weights: complete, true to `transformers`' own models, and all that is needed."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from checkpoints import CASES, make_config

from tim_jax.common.errors import InputError
from tim_jax.model import hf, parameters, weights
from tim_jax.model.config_file import from_hf
from tim_jax.model.weights import JOINED, NAMED, TABLE, Weight
from tim_jax.numerics import Numerics
from tim_jax.placement import Axes


def theirs(name, tied):
    """The `transformers` configuration of a case, with a head of its own or without."""
    found = make_config(name)
    found.tie_word_embeddings = tied
    return found


def ours(name, tied):
    values = json.loads(theirs(name, tied).to_json_string(use_diff=False))
    return from_hf(values | {"architectures": None})


def prepared(config, params, **how):
    return parameters.prepare(params, config=config, numerics=Numerics(**how))


def by_name(tree):
    """Leaves by name; no two in a tree of weights have the same."""
    return {path[-1].key: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def stored_shape(weight, config):
    shape = weight.shape(config)[weight.stacked :]
    return shape[::-1] if weight.transposed else shape


def by_expert(shapes):
    """(name, shape) of every expert's own tensors, which a module of `transformers` holds as one.

    A checkpoint that it saves has them apart.
    """
    for name, shape in shapes:
        module, _, projection = name.rpartition(".")
        if projection not in ("gate_up_proj", "down_proj"):
            yield name, shape
            continue
        parts = ("gate", "up") if projection == "gate_up_proj" else ("down",)
        for expert in range(shape[0]):
            for part in parts:
                own = shape[1] // len(parts), shape[2]
                yield f"{module}.{expert}.{part}_proj.weight", own


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_has_the_tensors_of_transformers_own_model(name, tied):
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs(name, tied))
    config = ours(name, tied)
    found = [
        (tensor, stored_shape(weight, config))
        for tensor, weight, _ in hf.checkpoint_tensors(config)
    ]
    expected = dict(by_expert((k, tuple(v.shape)) for k, v in model.state_dict().items()))
    if tied:
        expected.pop("lm_head.weight")
    assert len(found) == len(dict(found))
    assert dict(found) == expected


def test_every_row_belongs_to_some_model():
    used = {w.name for name in CASES for w in weights.table(ours(name, tied=False))}
    assert used == set(NAMED)
    assert len(NAMED) == len(TABLE)


def test_what_is_joined_is_made_of_like_parts():
    assert len({row.name for row in JOINED}) == len(JOINED)
    for config in (ours(name, tied=False) for name in CASES):
        whole = [part for row in weights.joined(config) if not row.dims for part in row.parts]
        assert len(set(whole)) == len(whole)  # else a matrix would be there twice
    parts = [part for row in JOINED for part in row.parts]
    for row in JOINED:
        like = {(w.kind, w.dims[:-1], w.axes) for w in (NAMED[part] for part in row.parts)}
        assert len(like) == 1, row.name
        assert row.matrix == bool(row.title)
        assert row.matrix or not (row.gated or row.quantised)
    matrices = {weight.name for weight in TABLE if weight.kind == "matrix"}
    assert matrices <= set(parts)  # else it would stay float32


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_compute_weights_are_those_of_the_tables(name, tied):
    config = ours(name, tied)
    shapes = weights.parameter_shapes(config)
    numerics = Numerics(compute_dtype="bfloat16")
    prepare = partial(parameters.prepare, config=config, numerics=numerics)
    found = by_name(jax.eval_shape(prepare, shapes))
    joined = {row.name for row in weights.joined(config)}
    parts = {part for row in weights.joined(config) for part in row.parts}
    assert set(found) == joined | (set(by_name(shapes)) - parts)

    matrices = weights.matrices(config)
    assert {name: found[name].shape[-2:] for name in matrices} == matrices
    narrow = {name for name, leaf in found.items() if leaf.dtype == jnp.bfloat16}
    assert narrow == {"embed", *matrices}
    assert all(found[name].dtype == jnp.float32 for name in set(found) - narrow)


@pytest.mark.parametrize("tiles", [1, 2])
def test_a_column_tile_has_its_part_of_everything_joined(tiles):
    config = replace(ours("llama-tied-biases", tied=True), num_heads=6, num_kv_heads=2)
    params = parameters.init_params(config, 0)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), params)
    found = prepared(config, params, column_tiles=tiles, compute_dtype="float32")["layers"]
    for name, parts in (
        ("qkv", ("q", "k", "v")),
        ("gate_up", ("gate", "up")),
        ("o", ("o",)),
        ("down", ("down",)),
        ("qkv_bias", ("q_bias", "k_bias", "v_bias")),
        ("gate_up_bias", ("gate_bias", "up_bias")),
    ):
        split = [np.split(params["layers"][part], tiles, axis=-1) for part in parts]
        for tile in range(tiles):
            expected = np.concatenate([columns[tile] for columns in split], axis=-1)
            own = found[name] if tiles == 1 else found[name][:, tile]
            np.testing.assert_array_equal(own, expected)
    for name in ("attn_norm", "mlp_norm", "o_bias", "down_bias"):
        np.testing.assert_array_equal(found[name], params["layers"][name])


def test_a_row_of_the_table_is_all_that_a_new_weight_needs(monkeypatch, tmp_path):
    """Initial values, checks, checkpoints, axes and compute weights follow from it."""
    name = "model.layers.{layer}.mlp.extra.weight"
    axes: Axes = ("whole", "in", "whole")
    dims = ("num_layers", "hidden_size", "num_heads x num_kv_heads")
    row = Weight("extra", "matrix", dims, axes, name, lambda config: config.max_positions > 32)
    monkeypatch.setattr(weights, "TABLE", (*TABLE, row))
    config = ours("llama-llama3", tied=False)
    params = parameters.init_params(config, 0)
    assert params["layers"]["extra"].shape == (3, 36, 12)
    assert params["layers"]["extra"].std() == pytest.approx(config.initializer_range, rel=0.1)
    folder = hf.save(tmp_path / "m", params, config)
    jax.tree.map(np.testing.assert_array_equal, hf.load_params(folder, config), params)
    assert weights.weight_axes(config, Numerics())["layers"]["extra"] == axes
    assert "extra" in prepared(config, params)["layers"]

    other = replace(config, max_positions=32)
    assert "extra" not in weights.parameter_shapes(other)["layers"]
    with pytest.raises(InputError, match=r"'layers.extra' is not one of a llama model's"):
        parameters.check_params(params, other)
