"""Flash attention in Triton: the kernel of `variants.triton_attention`. Importing needs Triton.

One program per sequence, key head and tile of rows; a row is (token, head of the group), so grouped
queries share a program, and a decode step has the group's heads as rows. Keys are walked in fixed
blocks from the sequence's first token up to the last one that any row of the tile can see.
Causality, ragged lengths and the unused end of a KV cache all follow from `last`, the position of
each row. No product, sum or maximum depends on how many sequences there are.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def flash_kernel(
    query,  # [B, Kv, COUNT, SIZE]
    key,  # [B, Kv, SIZE, KEYS]
    value,  # [B, Kv, KEYS, SIZE]
    last,  # i32 [B, COUNT]
    out,  # f32 [B, Kv, COUNT, SIZE]
    HEADS: tl.constexpr,
    COUNT: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = softmax(query @ key, over keys up to `last`) @ value, by an online softmax."""
    # sequence * HEADS + head; in 64 bits, as offsets in a large cache need them
    pair = tl.program_id(0).to(tl.int64)
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
        exists = at < KEYS
        k = tl.load(
            key + (pair * SIZE + dims)[:, None] * KEYS + at[None, :],
            mask=(dims < SIZE)[:, None] & exists[None, :],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee")
        scores = tl.where(at[None, :] <= position[:, None], scores, -1e30)
        highest = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp(peak - highest)
        weights = tl.exp(scores - highest[:, None])
        v = tl.load(
            value + (pair * KEYS + at)[:, None] * SIZE + dims[None, :],
            mask=exists[:, None] & (dims < SIZE)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = highest
    tl.store(out + at_rows, mixed / total[:, None], mask=inside)
