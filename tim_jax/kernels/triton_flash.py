"""Flash attention written in Triton and called through jax-triton: NVIDIA GPUs, for the sampler.

The source below can be read on its own. One program per sequence, key head and tile of rows; a row
is (token, head of the group), so grouped queries share a program, and a decode step has the
group's heads as rows. Keys are walked in fixed blocks from the sequence's first token up to the
last one that any row of the tile can see: causality, ragged lengths and the unused end of a KV
cache are all said by `last`, each row's own position.

Needs the extra `triton`. jax, jax-triton and triton fit each other only in part; `check` refuses
other versions by name.
"""

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp

from tim_jax.errors import InputError
from tim_jax.numerics import Numerics

NEEDS = {"jax": ((0, 11), (0, 13)), "jax-triton": ((0, 4), (0, 5)), "triton": ((3, 7), (3, 8))}
_ROWS = 64
_LEAST = 16  # rows, keys and head sizes that a matrix unit takes

# The kernel's body names the language as a global; without Triton it is never compiled.
tl: Any = importlib.import_module("triton.language") if importlib.util.find_spec("triton") else None


def flash_kernel(
    query,  # [B, Kv, COUNT, SIZE]
    key,  # [B, Kv, SIZE, KEYS]
    value,  # [B, Kv, KEYS, SIZE]
    last,  # i32 [B, COUNT]
    out,  # f32 [B, Kv, COUNT, SIZE]
    HEADS: "tl.constexpr",
    COUNT: "tl.constexpr",
    KEYS: "tl.constexpr",
    SIZE: "tl.constexpr",
    ROWS: "tl.constexpr",
    DIMS: "tl.constexpr",
    BLOCK: "tl.constexpr",
):
    """out = softmax(query @ key, over keys up to `last`) @ value, by an online softmax."""
    pair = tl.program_id(0)  # sequence * HEADS + head
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    inside = (rows < COUNT)[:, None] & (dims < SIZE)[None, :]
    at_rows = (pair * COUNT + rows)[:, None] * SIZE + dims[None, :]
    q = tl.load(query + at_rows, mask=inside, other=0.0)
    position = tl.load(last + (pair // HEADS) * COUNT + rows, mask=rows < COUNT, other=0)

    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIMS], tl.float32)
    for start in range(0, tl.max(position, 0) + 1, BLOCK):
        at = start + tl.arange(0, BLOCK)
        held = at < KEYS
        k = tl.load(
            key + (pair * SIZE + dims)[:, None] * KEYS + at[None, :],
            mask=(dims < SIZE)[:, None] & held[None, :],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee")
        scores = tl.where(at[None, :] <= position[:, None], scores, -1e30)
        highest = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp(peak - highest)
        weights = tl.exp(scores - highest[:, None])
        v = tl.load(
            value + (pair * KEYS + at)[:, None] * SIZE + dims[None, :],
            mask=held[:, None] & (dims < SIZE)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = highest
    tl.store(out + at_rows, mixed / total[:, None], mask=inside)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
) -> jax.Array:
    """As `flash.attention`, by the kernel above; under `jit` for the platform "cuda" only."""
    jax_triton, triton = (importlib.import_module(name) for name in ("jax_triton", "triton"))
    batch, heads, count, size = query.shape
    rows = min(_ROWS, max(_LEAST, 1 << (count - 1).bit_length()))
    return jax_triton.triton_call(
        query,
        key,
        value,
        positions,
        kernel=triton.jit(flash_kernel),
        out_type=jax.ShapeDtypeStruct(query.shape, jnp.float32),
        grid=(batch * heads, -(-count // rows)),
        num_warps=4,
        num_stages=2,
        HEADS=heads,
        COUNT=count,
        KEYS=key.shape[3],
        SIZE=size,
        ROWS=rows,
        DIMS=max(_LEAST, 1 << (size - 1).bit_length()),
        BLOCK=max(numerics.kv_block, _LEAST),
    )


def check() -> None:
    """Raises InputError naming the first package that is missing or does not fit."""
    for name, (low, high) in NEEDS.items():
        wanted = f"{'.'.join(map(str, low))} up to, not with, {'.'.join(map(str, high))}"
        try:
            found = version(name)
        except PackageNotFoundError:
            raise InputError(
                f"Triton attention needs {name} {wanted}, which is not installed; install"
                " tim-jax[triton] (Python 3.12 or newer)"
            ) from None
        if not low <= tuple(int(part) for part in found.split(".")[:2]) < high:
            raise InputError(f"Triton attention needs {name} {wanted}; here it is {found}")
