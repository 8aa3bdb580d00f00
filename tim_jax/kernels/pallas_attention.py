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

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels import native
from tim_jax.kernels.pallas import (
    LOG2_E,
    attention_cost,
    gpu_call,
    inside,
    masked,
    padded,
    parts_of,
    power_of_two_in,
    store,
    tpu_call,
)
from tim_jax.numerics import Numerics

_NEVER = 2**30  # after every position


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
) -> tuple[jax.Array, jax.Array]:
    """[B, Kv, N, E] in the compute dtype; the arguments are those of `kernels.attention`.

    And the logarithm to the base of 2 of the sum of each row's weights, float32 [B, Kv, N], for the
    gradient. Every call writes it, so that decoding and training have one kernel.
    """
    batch, heads, count, size = query.shape
    tiles, block, width = numerics.gpu, numerics.kv_block, value.shape[3]
    rows = tiles.attention_rows
    last_tile = pl.cdiv(count, rows) - 1

    def of_tile(*columns: int) -> pl.BlockSpec:
        """The last tile first, which sees the most keys, so that what ends last is short."""
        nothing = (0,) * len(columns)
        return pl.BlockSpec(
            (None, None, rows, *columns), lambda h, i, b: (b, h, last_tile - i, *nothing)
        )

    of_rows = pl.BlockSpec((None, rows), lambda h, i, b: (b, last_tile - i))
    inputs, specs = [query, positions], [of_tile(size), of_rows]
    if pages is None:
        key, value = padded(key, block, axis=3), padded(value, block, axis=2)
        whole = [(None, None, *x.shape[2:]) for x in (key, value)]
        specs += [pl.BlockSpec(shape, lambda h, i, b: (b, h, 0, 0)) for shape in whole]
    else:
        whole = [(x.shape[0], None, *x.shape[2:]) for x in (key, value)]
        specs += [pl.BlockSpec(shape, lambda h, i, b: (0, h, 0, 0)) for shape in whole]
        specs.append(pl.BlockSpec((None, pages.shape[1]), lambda h, i, b: (b, 0)))
    inputs += [key, value] if pages is None else [key, value, pages]
    if window is not None:
        inputs.append(window[None])
        specs.append(pl.BlockSpec((None,), lambda h, i, b: (0,)))
    keys = key.shape[3] if pages is None else pages.shape[1] * block
    cost = attention_cost(
        multiplied=rows * keys * (size + width),
        loaded=(rows + keys) * (size + width) * key.dtype.itemsize,
        exponentials=rows * keys,
        programs=(last_tile + 1) * heads * batch,
    )
    return gpu_call(
        partial(_on_gpu, block=block, count=count, windowed=window is not None),
        numerics=numerics,
        name="attention",
        cost_estimate=cost,
        warps=tiles.attention_warps,
        stages=tiles.attention_stages,
        grid=(heads, last_tile + 1, batch),
        in_specs=specs,
        out_specs=(of_tile(width), of_tile()),
        out_shape=(
            jax.ShapeDtypeStruct((*query.shape[:3], width), numerics.dtype),
            jax.ShapeDtypeStruct(query.shape[:3], jnp.float32),
        ),
    )(*inputs)


def _on_gpu(query_ref, last_ref, key_ref, value_ref, *refs, block: int, count: int, windowed: bool):
    *refs, out_ref, normaliser_ref = refs
    pages = refs[: -1 if windowed else None]
    rows, width = out_ref.shape
    there = inside(pl.num_programs(1) - 1 - pl.program_id(1), rows, count)
    parts = parts_of(query_ref.shape[1])
    query = [masked(query_ref.at[:, part], there) for part in parts]
    last = masked(last_ref, there, other=-1)
    first = jnp.where(there, last - refs[-1][...] + 1, _NEVER) if windowed else None
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
        scores = jnp.where(visible, scores, native.MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        shrink = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores - new_peak[:, None])
        if first is not None:
            weights = jnp.where(visible, weights, 0.0)
        mixed = mixed * shrink[:, None] + jnp.dot(weights.astype(value.dtype), value, **precise)
        return mixed, new_peak, total * shrink + jnp.sum(weights, axis=1)

    start = (
        jnp.zeros((rows, width), jnp.float32),
        jnp.full((rows,), native.MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )
    skipped = 0 if first is None else jax.lax.div(jnp.maximum(jnp.min(first), 0), block)
    blocks = jax.lax.div(jnp.max(last) + block, block)
    mixed, peak, total = jax.lax.fori_loop(skipped, blocks, step, start)
    store(out_ref.at[:, :], mixed / total[:, None], there)
    store(normaliser_ref, peak + jnp.log2(total), there)


LANES = 128  # a statistic per row fills a whole register row


def on_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    window: jax.Array | None = None,
    pages: jax.Array | None = None,
    *,
    numerics: Numerics,
) -> tuple[jax.Array, None]:
    """[B, Kv, N, E] in the compute dtype; the arguments are those of `kernels.attention`.

    A tile of rows reads the key blocks from the first to the last that one of its rows sees. A step
    has several heads and several blocks, one after the other. Blocks of which no row sees anything
    are not computed, and mostly not copied.
    """
    batch, heads, count, size = query.shape
    rows, block, width = numerics.tpu.attention_rows, numerics.kv_block, value.shape[3]
    some = min(power_of_two_in(heads), numerics.tpu.heads)
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
    taken = numerics.tpu.attention_blocks

    def key_at(place, b, h, i, j, *scalars):
        """Where the keys lie that tile i of row b reads at step j as the block at `place`."""
        most = jnp.maximum(scalars[0][b, i], 0)
        least = 0 if first is None else scalars[1][b, i]
        found = block_of_step(j, place, taken, least, most)
        seen = jnp.maximum(found, 0)
        at = (b, h, 0, seen) if pages is None else (scalars[-1][b, seen], h, 0, 0)
        # A place without a block has the same one in every row, so that it is copied once.
        return tuple(jnp.where(found < 0, 0, index) for index in at)

    def value_at(*at):
        return tuple(key_at(*at)[axis] for axis in (0, 1, 3, 2))

    places = range(taken)
    keys = [pl.BlockSpec((None, some, size, block), partial(key_at, n)) for n in places]
    values = [pl.BlockSpec((None, some, block, width), partial(value_at, n)) for n in places]
    mixed = tpu_call(
        partial(_on_tpu, block=block, taken=taken, windowed=first is not None),
        numerics=numerics,
        name="attention",
        grid=(batch, heads // some, pl.cdiv(count, rows), pl.cdiv(steps, taken)),
        scalars=len(scalars),
        scratch=[(some, rows, width), (some, rows, LANES), (some, rows, LANES)],
        in_specs=[tile, *(of_rows,) * (1 if first is None else 2), *keys, *values],
        out_specs=mixed_tile,
        out_shape=jax.ShapeDtypeStruct((*query.shape[:3], width), numerics.dtype),
    )(
        *scalars,
        query,
        *(x[:, :, None] for x in (last, first) if x is not None),
        *(key,) * taken,
        *(value,) * taken,
    )
    return mixed, None


def block_of_step(step, place: int, taken: int, least, most):
    """The block of keys at `place` of the `taken` that a step has, a power of two.

    Of `least` to `most`, those that a tile sees. What the step has beyond them is the block that
    this place had in the step before, or will have in the next, so that it is not copied; -1 if it
    has none in any step.
    """
    lowest = least + ((place - least) & (taken - 1))
    highest = most - ((most - place) & (taken - 1))
    found = jnp.maximum(jnp.minimum(step * taken + place, highest), lowest)
    return jnp.where(lowest <= most, found, -1)


def _on_tpu(*refs, block: int, taken: int, windowed: bool):
    # The scalars before these are read by the index maps alone.
    given = refs[len(refs) - 2 * taken - (7 if windowed else 6) :]
    query_ref, last, first = given[0], given[1][...], given[2][...] if windowed else None
    key_refs, value_refs = given[-2 * taken - 4 : -taken - 4], given[-taken - 4 : -4]
    out_ref, mixed, peak, total = given[-4:]
    step = pl.program_id(3)

    @pl.when(step == 0)
    def _start():
        mixed[...] = jnp.zeros_like(mixed)
        peak[...] = jnp.full_like(peak, native.MASKED)
        total[...] = jnp.zeros_like(total)

    for place, (key_ref, value_ref) in enumerate(zip(key_refs, value_refs, strict=True)):
        index = step * taken + place
        needed = index * block <= jnp.max(last)
        if first is not None:
            needed &= (index + 1) * block > jnp.min(first)

        @pl.when(needed)
        def _block(index=index, key_ref=key_ref, value_ref=value_ref):
            seen_keys = visible(index, block, last, first)
            for head in range(query_ref.shape[0]):
                query, value = query_ref[head], value_ref[head]
                precise = native.precise(query)
                scores = jnp.dot(query, key_ref[head], **precise)
                scores = jnp.where(seen_keys, scores, native.MASKED)
                old = peak[head][:, :1]
                new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
                shrink = jnp.exp(old - new)
                weights = jnp.exp(scores - new)
                if first is not None:
                    weights = jnp.where(seen_keys, weights, 0.0)
                product = jnp.dot(weights.astype(value.dtype), value, **precise)
                mixed[head] = mixed[head] * shrink + product
                total[head] = total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
                peak[head] = jnp.broadcast_to(new, peak.shape[1:])

    @pl.when(step == pl.num_programs(3) - 1)
    def _finish():
        for head in range(query_ref.shape[0]):
            out_ref[head] = (mixed[head] / total[head][:, :1]).astype(out_ref.dtype)


def visible(index, keys: int, last, first):
    """Which keys of block `index` rows see, bool[rows, keys], of their last and first [rows, 1]."""
    shape = last.shape[0], keys
    at = index * keys + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    found = at <= jnp.broadcast_to(last, shape)
    return found if first is None else found & (at >= jnp.broadcast_to(first, shape))
