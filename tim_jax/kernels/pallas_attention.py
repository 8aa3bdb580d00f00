"""Causal attention with an online softmax, as kernels for GPUs and TPUs.

The softmax is that of Milakov and Gimelshein (2018) and Dao et al. (2022). One kernel serves
prefill, decode and training: a tile of query rows against the key blocks of its sequence, ascending
from position 0.

A row's bits depend neither on the rows beside it nor on the number of keys, because what it does
not see adds exact zeros. Keys after its position have the weight exp(MASKED - peak) = 0, and the
running peak and sums stay as they are. Under a sliding window whole blocks come before the first
key that it sees. Their peak is MASKED itself, and exp(MASKED - MASKED) would be 1: there the
weights are set to 0. The sums stay 0 until the first block that the row sees, whose peak is then
its first. So it is the same whether a block without visible keys is passed over or not, and a tile
runs from the first to the last block that one of its rows sees.
"""

from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels import native
from tim_jax.kernels.pallas import LOG2_E, MASKED, padded, power_of_two_in
from tim_jax.kernels.pallas_calls import attention_cost, gpu_call, tpu_call
from tim_jax.numerics import Numerics


def seen(positions, window, tile: int):
    """The last and first keys that rows see, each i32[B, N up to whole tiles]; no window: None."""
    if window is None:
        return padded(positions, tile, axis=1, value=-1), None
    # What fills a tile is like its last row, so that it needs no further blocks.
    missing = -positions.shape[1] % tile
    last = jnp.pad(positions, ((0, 0), (0, missing)), mode="edge")
    return last, last - window + 1


def on_gpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    window: jax.Array | None = None,
    pages: jax.Array | None = None,
    *,
    numerics: Numerics,
) -> jax.Array:
    """[B, Kv, N, E] in the compute dtype; the arguments are those of `kernels.attention`."""
    batch, heads, count, size = query.shape
    tiles, block, width = numerics.gpu, numerics.kv_block, value.shape[3]
    rows = tiles.attention_rows
    query = padded(query, rows, axis=2)
    last, first = seen(positions, window, rows)
    tile = pl.BlockSpec((None, None, rows, size), lambda i, h, b: (b, h, i, 0))
    of_rows = pl.BlockSpec((None, rows), lambda i, h, b: (b, i))
    inputs, specs = [query, last], [tile, of_rows]
    if pages is None:
        key, value = padded(key, block, axis=3), padded(value, block, axis=2)
        whole = [(None, None, *x.shape[2:]) for x in (key, value)]
        specs += [pl.BlockSpec(shape, lambda i, h, b: (b, h, 0, 0)) for shape in whole]
    else:
        whole = [(x.shape[0], None, *x.shape[2:]) for x in (key, value)]
        specs += [pl.BlockSpec(shape, lambda i, h, b: (0, h, 0, 0)) for shape in whole]
        specs.append(pl.BlockSpec((None, pages.shape[1]), lambda i, h, b: (b, 0)))
    inputs += [key, value] if pages is None else [key, value, pages]
    if first is not None:
        inputs.append(first)
        specs.append(of_rows)
    keys = key.shape[3] if pages is None else pages.shape[1] * block
    cost = attention_cost(
        multiplied=rows * keys * (size + width),
        loaded=(rows + keys) * (size + width) * key.dtype.itemsize,
        exponentials=rows * keys,
        programs=query.shape[2] // rows * heads * batch,
    )
    mixed = gpu_call(
        partial(_on_gpu, block=block, windowed=first is not None),
        numerics=numerics,
        name="attention",
        cost_estimate=cost,
        warps=tiles.attention_warps,
        stages=tiles.attention_stages,
        grid=(query.shape[2] // rows, heads, batch),
        in_specs=specs,
        out_specs=pl.BlockSpec((None, None, rows, width), lambda i, h, b: (b, h, i, 0)),
        out_shape=jax.ShapeDtypeStruct((*query.shape[:3], width), numerics.dtype),
    )(*inputs)
    return mixed[:, :, :count]


def parts_of(size: int, most: int | None = None) -> list[slice]:
    """A head of so many numbers in powers of two, the largest first: what Triton's arrays have.

    None is larger than `most`, if that is given, which is a power of two.
    """
    sizes = [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
    if most is not None:
        sizes = [part for one in sizes for part in [min(one, most)] * max(one // most, 1)]
    ends = list(accumulate(sizes))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _on_gpu(query_ref, last_ref, key_ref, value_ref, *refs, block: int, windowed: bool):
    out_ref, pages = refs[-1], refs[: -2 if windowed else -1]
    parts = parts_of(query_ref.shape[1])
    query, last = [query_ref[:, part] for part in parts], last_ref[...]
    first = refs[-2][...] if windowed else None
    rows, width = out_ref.shape
    precise = native.precise(query[0])

    def keys_and_values(index):
        if pages:
            page = pages[0][index]
            return [key_ref[page, part, :] for part in parts], value_ref[page, :, :]
        at = pl.ds(index * block, block)
        return [key_ref[part, at] for part in parts], value_ref[at, :]

    def step(index, state):
        mixed, peak, total = state
        key, value = keys_and_values(index)
        products = [jnp.dot(q, k, **precise) for q, k in zip(query, key, strict=True)]
        scores = sum(products[1:], products[0]) * LOG2_E
        at = (index * block + jnp.arange(block))[None, :]
        visible = at <= last[:, None]
        if first is not None:
            visible &= at >= first[:, None]
        scores = jnp.where(visible, scores, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        shrink = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores - new_peak[:, None])
        if first is not None:
            weights = jnp.where(visible, weights, 0.0)
        mixed = mixed * shrink[:, None] + jnp.dot(weights.astype(value.dtype), value, **precise)
        return mixed, new_peak, total * shrink + jnp.sum(weights, axis=1)

    start = (
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    skipped = 0 if first is None else jax.lax.div(jnp.maximum(jnp.min(first), 0), block)
    blocks = jax.lax.div(jnp.max(last) + block, block)
    mixed, _, total = jax.lax.fori_loop(skipped, blocks, step, start)
    out_ref[...] = (mixed / total[:, None]).astype(out_ref.dtype)


_LANES = 128  # a statistic per row fills a whole register row


def on_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    window: jax.Array | None = None,
    pages: jax.Array | None = None,
    *,
    numerics: Numerics,
) -> jax.Array:
    """[B, Kv, N, E] in the compute dtype; the arguments are those of `kernels.attention`.

    A tile of rows reads the key blocks from the first to the last that one of its rows sees. The
    steps before and after name these again, so that nothing is copied for them, and compute
    nothing. A step has several heads, one after the other.
    """
    batch, heads, count, size = query.shape
    rows, block, width = numerics.tpu.attention_rows, numerics.kv_block, value.shape[3]
    some = min(power_of_two_in(heads), numerics.tpu.heads)
    query = padded(query, rows, axis=2)
    last, first = seen(positions, window, rows)
    tile = pl.BlockSpec((None, some, rows, size), lambda b, h, i, j, *scalars: (b, h, i, 0))
    mixed_tile = pl.BlockSpec((None, some, rows, width), tile.index_map)
    of_rows = pl.BlockSpec((None, rows, 1), lambda b, h, i, j, *scalars: (b, i, 0))
    scalars = [jnp.max(last.reshape(batch, -1, rows), axis=2) // block]
    if first is not None:
        scalars.append(jnp.maximum(jnp.min(first.reshape(batch, -1, rows), axis=2), 0) // block)
    if pages is None:
        key, value = padded(key, block, axis=3), padded(value, block, axis=2)
        steps = key.shape[3] // block
    else:
        scalars, steps = [*scalars, pages], pages.shape[1]

    def key_at(b, h, i, j, *scalars):
        """Where the keys lie that tile i of row b reads at step j."""
        seen = jnp.minimum(j, jnp.maximum(scalars[0][b, i], 0))
        if first is not None:
            seen = jnp.maximum(seen, scalars[1][b, i])
        return (b, h, 0, seen) if pages is None else (scalars[-1][b, seen], h, 0, 0)

    mixed = tpu_call(
        partial(_on_tpu, block=block, windowed=first is not None),
        numerics=numerics,
        name="attention",
        grid=(batch, heads // some, query.shape[2] // rows, steps),
        scalars=len(scalars),
        scratch=[(some, rows, width), (some, rows, _LANES), (some, rows, _LANES)],
        in_specs=[
            tile,
            pl.BlockSpec((None, some, size, block), key_at),
            pl.BlockSpec(
                (None, some, block, width), lambda *at: tuple(key_at(*at)[n] for n in (0, 1, 3, 2))
            ),
            *(of_rows,) * (1 if first is None else 2),
        ],
        out_specs=mixed_tile,
        out_shape=jax.ShapeDtypeStruct((*query.shape[:3], width), numerics.dtype),
    )(*scalars, query, key, value, *(x[:, :, None] for x in (last, first) if x is not None))
    return mixed[:, :, :count]


def _on_tpu(*refs, block: int, windowed: bool):
    # The scalars before these are read by the index maps alone.
    query_ref, key_ref, value_ref, last_ref = refs[-9 if windowed else -8 :][:4]
    out_ref, mixed, peak, total = refs[-4:]
    index = pl.program_id(3)
    last = last_ref[...]
    first = refs[-5][...] if windowed else None

    @pl.when(index == 0)
    def _start():
        mixed[...] = jnp.zeros_like(mixed)
        peak[...] = jnp.full_like(peak, MASKED)
        total[...] = jnp.zeros_like(total)

    needed = index * block <= jnp.max(last)
    if first is not None:
        needed &= (index + 1) * block > jnp.min(first)

    @pl.when(needed)
    def _step():
        shape = query_ref.shape[1], block
        at = index * block + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        visible = at <= jnp.broadcast_to(last, shape)
        if first is not None:
            visible &= at >= jnp.broadcast_to(first, shape)
        for head in range(query_ref.shape[0]):
            query, value = query_ref[head], value_ref[head]
            precise = native.precise(query)
            scores = jnp.where(visible, jnp.dot(query, key_ref[head], **precise), MASKED)
            old = peak[head][:, :1]
            new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
            shrink = jnp.exp(old - new)
            weights = jnp.exp(scores - new)
            if first is not None:
                weights = jnp.where(visible, weights, 0.0)
            product = jnp.dot(weights.astype(value.dtype), value, **precise)
            mixed[head] = mixed[head] * shrink + product
            total[head] = total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            peak[head] = jnp.broadcast_to(new, peak.shape[1:])

    @pl.when(index == pl.num_programs(3) - 1)
    def _finish():
        for head in range(query_ref.shape[0]):
            out_ref[head] = (mixed[head] / total[head][:, :1]).astype(out_ref.dtype)
