"""The Triton attention: its source run on NumPy arrays, its versions, its lowering for CUDA."""

import importlib.util
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import lowering
import numpy as np
import pytest
from jaxlib import gpu_triton

from tim_jax.common.errors import InputError
from tim_jax.kernels import variants
from tim_jax.numerics import Numerics


class Block(np.ndarray):
    """An array with the one method of Triton's blocks that NumPy's do not have."""

    def to(self, dtype):
        return self.astype(dtype).view(Block)


def block(x):
    return np.asarray(x).view(Block)


class Pointer:
    """Addresses in a flat array."""

    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at

    def __add__(self, offset):
        return Pointer(self.memory, self.at + offset)


def language(program):
    """What the kernel uses of `triton.language`, for the program of these two numbers."""

    def load(pointer, mask, other):
        at = np.asarray(pointer.at)
        mask = np.broadcast_to(mask, at.shape)
        assert np.all((at[mask] >= 0) & (at[mask] < pointer.memory.size)), "read out of bounds"
        return block(np.where(mask, pointer.memory[np.where(mask, at, 0)], other))

    def store(pointer, value, mask):
        at = np.broadcast_to(pointer.at, value.shape)[mask]
        assert np.isnan(pointer.memory[at]).all(), "written twice"
        pointer.memory[at] = value[mask]

    def dot(a, b, input_precision):
        assert input_precision == "ieee"
        return block(a.astype(np.float32) @ b.astype(np.float32))

    return SimpleNamespace(
        constexpr=Any,
        float32=np.float32,
        int64=np.int64,
        program_id=lambda axis: block([program[axis]]).astype(np.int32),
        arange=lambda low, high: block(np.arange(low, high, dtype=np.int32)),
        full=lambda shape, value, dtype: block(np.full(shape, value, dtype)),
        zeros=lambda shape, dtype: block(np.zeros(shape, dtype)),
        max=lambda x, axis: block(np.max(x, axis)),
        sum=lambda x, axis: block(np.sum(x, axis)),
        where=lambda mask, x, y: block(np.where(mask, x, y).astype(np.float32)),
        maximum=lambda x, y: block(np.maximum(x, y)),
        exp=lambda x: block(np.exp(x)),
        load=load,
        store=store,
        dot=dot,
    )


@pytest.fixture
def source(monkeypatch):
    """The kernel's module, with a stand-in for Triton that leaves the function as it is."""
    fake: Any = SimpleNamespace(jit=lambda function: function, language=language((0, 0)))
    monkeypatch.setitem(sys.modules, "triton", fake)
    monkeypatch.setitem(sys.modules, "triton.language", fake.language)
    spec = importlib.util.find_spec("tim_jax.kernels.triton_source")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(query, key, value, last):
    """Attention in float64."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    scores = query @ key
    at = np.arange(key.shape[3])[None, None, None, :]
    scores = np.where(at <= last[:, None, :, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value


# (rows, head size, keys): decoding of a group of 2; a prefill that fills no tile; several tiles.
SHAPES = [(2, 8, 48), (10, 20, 37), (70, 16, 80)]


@pytest.mark.parametrize(("count", "size", "keys"), SHAPES)
def test_the_source_is_attention(source, monkeypatch, count, size, keys):
    """Grouped queries, causal, ragged lengths, keys beyond them full of junk."""
    rng = np.random.default_rng(count)
    query = rng.standard_normal((3, 2, count, size), np.float32)
    key = rng.standard_normal((3, 2, size, keys), np.float32)
    value = rng.standard_normal((3, 2, keys, size), np.float32)
    last = rng.integers(0, keys, (3, count)).astype(np.int32)
    expected = reference(query, key, value, last)
    for row in range(3):
        key[row, :, :, last[row].max() + 1 :] = 1e4
    calls = []

    def triton_call(*arrays, kernel, out_type, grid, num_warps, num_stages, **constants):
        del kernel, num_warps, num_stages
        out = np.full(out_type.shape, np.nan, np.float32)
        flat = [np.asarray(x).reshape(-1) for x in (*arrays, out)]
        for program in np.ndindex(*grid):
            source.tl = language(program)
            source.flash_kernel(*(Pointer(x) for x in flat), **constants)
        calls.append(grid)
        return out

    packages = {"jax_triton": SimpleNamespace(triton_call=triton_call)}
    monkeypatch.setattr(
        variants.importlib, "import_module", lambda name: packages.get(name, source)
    )
    numerics = Numerics(kv_block=16)
    found = variants.triton_attention(query, key, value, last, numerics=numerics)  # type: ignore
    assert calls == [(6, -(-count // 64))]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


class Zeros:
    """A large array that takes no memory."""

    def __init__(self, size):
        self.size = size

    def __getitem__(self, at):
        return np.zeros(np.shape(at), np.float32)


def test_offsets_reach_beyond_31_bits(source):
    """The last of 65 sequences with a head of 128 and 262,144 keys each: more than 2^31 numbers."""
    rows, keys, size, pairs = 16, 2**18, 128, 65
    sizes = [pairs * count * size for count in (rows, keys, keys)]
    source.tl = language((pairs - 1, 0))
    last, out = np.zeros(pairs * rows, np.int32), np.full(sizes[0], np.nan, np.float32)
    memories = [*map(Zeros, sizes), last, out]
    constants = {"HEADS": 1, "COUNT": rows, "KEYS": keys, "SIZE": size}
    source.flash_kernel(*map(Pointer, memories), **constants, ROWS=rows, DIMS=size, BLOCK=16)
    assert sizes[1] > 2**31
    assert (out[-rows * size :] == 0).all()


def versions(monkeypatch, found):
    def version(name):
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(variants, "version", version)


GOOD = {"jax": "0.11.2", "jax-triton": "0.4.1", "triton": "3.7.1"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"triton": None}, r"needs triton 3\.7 .* not installed; install tim-jax\[triton\]"),
        ({"jax": "0.12.0.1"}, r"needs jax 0\.11 up to, not with, 0\.12; here it is 0\.12\.0\.1"),
        ({"jax-triton": "0.3.1"}, r"needs jax-triton 0\.4 up to, not with, 0\.5; here it is 0\.3"),
    ],
)
def test_versions_that_do_not_fit_are_refused_by_name(monkeypatch, changes, message):
    versions(monkeypatch, GOOD)
    variants.check()
    versions(monkeypatch, {k: v for k, v in (GOOD | changes).items() if v is not None})
    with pytest.raises(InputError, match=message):
        variants.check()


def lowers():
    """Lowering asks JAX's CUDA plugin, which needs no device for it."""
    try:
        variants.check()
    except InputError:
        return False
    return hasattr(gpu_triton, "TritonKernelCall")


@pytest.mark.skipif(not lowers(), reason="needs the extra `triton` and JAX's CUDA plugin")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("count", "size", "keys"), SHAPES)
def test_it_lowers_for_cuda(count, size, keys, dtype):
    shape = jax.ShapeDtypeStruct
    shapes = (
        shape((3, 2, count, size), dtype),
        shape((3, 2, size, keys), dtype),
        shape((3, 2, keys, size), dtype),
        shape((3, count), jnp.int32),
    )
    function = partial(variants.triton_attention, numerics=Numerics(kv_block=16))
    assert "triton_kernel_call" in lowering.lower("pallas_gpu", function, shapes).as_text()
