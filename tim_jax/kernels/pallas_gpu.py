"""Exact kernels for GPUs, in Pallas' Triton dialect.

A result's bits do not depend on the batch, the padding or the surrounding program, because:

- A sum lives in one program and runs over ascending blocks from 0. Block sizes are constants of the
  numerics, never of the row count or the sequence length; nothing is split among programs.
- A single row takes the same path as a thousand: rows that a tile lacks are read as zeros, and not
  written. Before products of experts, logarithms and gradients XLA adds them.
- Key blocks start at a sequence's first token. Blocks of which a row sees nothing add exact zeros,
  so a tile may run as far as any of its rows needs.
- Whatever is not elementwise, and every exp, log and rsqrt, is inside a kernel, where XLA cannot
  choose another order or another approximation. XLA's elementwise sums are rounded to nearest.

In a product a program has a tile of the result and runs over all of K in steps of `block_k`, so
that an element is one chain of multiply-adds in the order of K. Float32 products are true float32
(no TF32).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from tim_jax.kernels import native, pallas_attention, pallas_attention_gradient
from tim_jax.kernels.families import Heads, Into
from tim_jax.kernels.pallas import (
    LOG2_E,
    PallasFamily,
    Product,
    block_of,
    in_blocks,
    inside,
    masked,
    padded,
    store,
    turned,
)
from tim_jax.kernels.pallas import gpu_call as call
from tim_jax.numerics import MatmulTile, Numerics


def _sums(x_ref, weight_refs, shape, block_k: int, *, there=None, expert: tuple = ()):
    """Sums over K for each of the weight tiles; with an expert, for its part of them.

    `there`: bool[rows], see `masked`; None: all are.
    """
    precise = native.precise(x_ref)

    def step(index, sums):
        at = pl.ds(index * block_k, block_k)
        x = x_ref[:, at] if there is None else masked(x_ref.at[:, at], there)
        return tuple(
            total + jnp.dot(x, ref[*expert, at, :], **precise)
            for total, ref in zip(sums, weight_refs, strict=True)
        )

    zeros = (jnp.zeros(shape, jnp.float32),) * len(weight_refs)
    return jax.lax.fori_loop(0, x_ref.shape[1] // block_k, step, zeros)


def _kernel(
    x_ref, *refs, halves: int, kinds: tuple[str, ...], count: int, block_k: int, epilogue: Callable
):
    """Sums over K for each of `halves` weight tiles, then the epilogue; of `count` rows in all."""
    weight_refs, extra_refs, out_ref = refs[:halves], refs[halves:-1], refs[-1]
    tile = pl.program_id(2) * pl.num_programs(0) + pl.program_id(0)
    there = inside(tile, out_ref.shape[0], count)
    sums = _sums(x_ref, weight_refs, out_ref.shape, block_k, there=there)
    extras = [
        masked(ref.at[:, :], there)
        if kind == "tile"
        else tuple(ref[half, :][None, :] for half in range(halves))
        for kind, ref in zip(kinds, extra_refs, strict=True)
    ]
    store(out_ref.at[:, :], epilogue(sums, *extras), there)


def product(
    x: jax.Array, weight: jax.Array, extras: Sequence[tuple[str, jax.Array]], what: Product
) -> jax.Array:
    """A `Product` of x [N, K] and weight [K, halves * M]; see `PallasFamily`.

    Programs run in groups of tiles of rows: all of a group take the same columns of the weight, and
    then the next ones, so that what they read comes from the cache.
    """
    numerics, halves = what.numerics, what.halves
    rows, width = x.shape[0], weight.shape[1] // halves
    tile = numerics.gpu.tile(rows, weight.shape[1], x.dtype, parts=halves)
    columns, block_k = blocks(weight.shape, halves, tile.columns, numerics)
    steps, tiles = width // columns, pl.cdiv(rows, tile.rows)
    groups = pl.cdiv(tiles, _TILES_OF_GROUP)
    together = pl.cdiv(tiles, groups)

    def columns_of(half: int) -> pl.BlockSpec:
        return pl.BlockSpec((weight.shape[0], columns), lambda i, j, g: (0, j + half * steps))

    specs = {
        "tile": pl.BlockSpec((tile.rows, columns), lambda i, j, g: (g * together + i, j)),
        "bias": pl.BlockSpec((halves, columns), lambda i, j, g: (0, j)),
    }
    return call(
        partial(
            _kernel,
            halves=halves,
            kinds=tuple(kind for kind, _ in extras),
            count=rows,
            block_k=block_k,
            epilogue=what.epilogue,
        ),
        numerics=numerics,
        name=what.name,
        warps=tile.warps,
        stages=_stages(tile, x),
        grid=(together, steps, groups),
        in_specs=[
            pl.BlockSpec((tile.rows, x.shape[1]), lambda i, j, g: (g * together + i, 0)),
            *(columns_of(half) for half in range(halves)),
            *(specs[kind] for kind, _ in extras),
        ],
        out_specs=specs["tile"],
        out_shape=jax.ShapeDtypeStruct((rows, width), what.dtype),
    )(x, *(weight,) * halves, *(extra for _, extra in extras))


LEAST = 16  # of a block in any direction
_NOWHERE = 2**30  # a position that no cache has
# About as high as what all cores take at a time is wide: the most that they can share.
_TILES_OF_GROUP = 16


def blocks(
    weight: tuple[int, ...],
    halves: int,
    columns: int,
    numerics: Numerics,
    name: str = "a weight",
    *,
    least: int = LEAST,
) -> tuple[int, int]:
    """Columns of a block of each half, and rows of a step, of weights [K, halves * M].

    Raises:
      InputError: there are no such blocks.
    """
    size, width = weight
    limit = max(least, columns // halves)
    what = "the columns of" if halves == 1 else "the columns of each part of"
    columns = block_of(limit, width // halves, least=least, what=f"{what} {name}")
    return columns, block_of(numerics.gpu.block_k, size, least=least, what=f"the rows of {name}")


def _stages(tile: MatmulTile, x: jax.Array) -> int:
    return max(1, tile.stages * 2 // x.dtype.itemsize)


def _grouped(expert_ref, used_ref, x_ref, *refs, halves: int, block_k: int, epilogue: Callable):
    """`_kernel` with the weight tiles of the block's expert; nothing for blocks without rows."""
    expert, weight_refs, out_ref = expert_ref[...], refs[:halves], refs[-1]

    @pl.when(pl.program_id(1) < used_ref[...])
    def _block():
        sums = _sums(x_ref, weight_refs, out_ref.shape, block_k, expert=(expert,))
        out_ref[...] = epilogue(sums).astype(out_ref.dtype)


def grouped_product(
    x: jax.Array, weight: jax.Array, expert: jax.Array, used: jax.Array, what: Product
) -> jax.Array:
    """A `Product` of tiles x [T, R, K] and weight [E, K, halves * M]; see `PallasFamily`."""
    numerics, halves = what.numerics, what.halves
    (count, rows, size), tile = x.shape, numerics.gpu.experts
    columns, block_k = blocks(weight.shape[1:], halves, tile.columns, numerics)
    x, expert, used = in_blocks(x, expert, used, tile.rows)
    width = weight.shape[2] // halves
    steps = width // columns

    def columns_of(half: int) -> pl.BlockSpec:
        block = (weight.shape[0], size, columns)
        return pl.BlockSpec(block, lambda j, i: (0, 0, j + half * steps))

    result = call(
        partial(_grouped, halves=halves, block_k=block_k, epilogue=what.epilogue),
        numerics=numerics,
        name=what.name,
        warps=tile.warps,
        stages=_stages(tile, x),
        grid=(steps, expert.size),
        in_specs=[
            pl.BlockSpec((None,), lambda j, i: (i,)),
            pl.BlockSpec((None,), lambda j, i: (0,)),
            pl.BlockSpec((tile.rows, size), lambda j, i: (i, 0)),
            *(columns_of(half) for half in range(halves)),
        ],
        out_specs=pl.BlockSpec((tile.rows, columns), lambda j, i: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], width), what.dtype),
    )(expert, used, x, *(weight,) * halves)
    return result.reshape(count, -1, width)[:, :rows]


def normed(x: jax.Array, weight: jax.Array, *, eps: float, numerics: Numerics) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight, one program per row; the block follows from the width."""
    rows, width = x.shape
    row = pl.BlockSpec((None, width), lambda i: (i, 0))
    return call(
        partial(_norm, eps=eps, width=width),
        numerics=numerics,
        name="norm",
        warps=4,
        grid=(rows,),
        in_specs=[row, pl.BlockSpec((width,), lambda i: (0,))],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(x.shape, numerics.dtype),
    )(x, weight)


def _norm(x_ref, weight_ref, out_ref, *, eps: float, width: int):
    at = jnp.arange(pl.next_power_of_2(width))
    inside = at < width
    x = plt.load(x_ref.at[at], mask=inside, other=0.0).astype(jnp.float32)
    weight = plt.load(weight_ref.at[at], mask=inside, other=0.0)
    mean_square = jnp.sum(x * x) * (1.0 / width)
    y = x * jax.lax.rsqrt(mean_square + eps) * weight
    plt.store(out_ref.at[at], y.astype(out_ref.dtype), mask=inside)


def rotated(
    y: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    optional: dict[str, jax.Array],
    *,
    heads: Heads,
    eps: float,
    numerics: Numerics,
    into: Into | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value of `Kernels.project`, by one kernel; a program has a tile of a head.

    With `into` keys and values are written into its caches, which are returned in their place.
    """
    rows, half, tile = y.shape[0], heads.size // 2, numerics.gpu.row_tile
    ends = (0, heads.query, heads.query + heads.key, heads.query + 2 * heads.key)
    angle = pl.BlockSpec((tile, half), lambda i, h: (i, 0))
    inputs = [y.reshape(rows, -1, 2, half), cos, sin]
    specs = [pl.BlockSpec((tile, None, 2, half), lambda i, h: (i, h, 0, 0)), angle, angle]
    if "bias" in optional:
        inputs.append(optional["bias"].reshape(-1, 2, half))
        specs.append(pl.BlockSpec((None, 2, half), lambda i, h: (h, 0, 0)))
    if normed := "q_norm" in optional:
        inputs += [optional[name].reshape(2, half) for name in ("q_norm", "k_norm")]
        specs += [pl.BlockSpec((2, half), lambda i, h: (0, 0))] * 2

    options: dict[str, Any] = {}
    out_specs, out_shape = _parts(rows, half, ends, into, numerics)
    if into is not None:
        of_rows = [x for x in (into.positions, into.pages) if x is not None]
        inputs += [*of_rows, *into.caches]
        specs += [*(pl.BlockSpec((tile,), lambda i, h: (i,)) for _ in of_rows), *out_specs[1:]]
        options["input_output_aliases"] = {len(inputs) - 2: 1, len(inputs) - 1: 2}
        moved = y.nbytes + cos.nbytes + sin.nbytes + y.size * numerics.dtype.itemsize
        # Of the caches, a program writes its rows' positions.
        options["cost_estimate"] = pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)
    query, key, value = call(
        partial(
            _turn,
            ends=ends,
            count=rows,
            biased="bias" in optional,
            normed=normed,
            of_page=into and rows // into.caches[0].shape[0],
            paged=into is not None and into.pages is not None,
            scale=heads.size**-0.5,
            eps=eps,
        ),
        numerics=numerics,
        name="turn",
        warps=4,
        grid=(pl.cdiv(rows, tile), ends[-1]),
        in_specs=specs,
        out_specs=out_specs,
        out_shape=out_shape,
        **options,
    )(*inputs)
    query = query.reshape(rows, heads.query, heads.size)
    if into is not None:
        return query, key, value
    return query, key.reshape(rows, -1, heads.size), value.reshape(rows, -1, heads.size)


def _parts(rows: int, half: int, ends: Sequence[int], into: Into | None, numerics: Numerics):
    """Blocks and shapes of queries, keys and values, whose heads end at `ends`.

    A block is a tile of rows of a head, or a head of a whole cache. A program that has a head of
    another part has some block of it, and writes nothing there.
    """
    shapes = [
        jax.ShapeDtypeStruct((rows, end - first, 2, half), numerics.dtype)
        for first, end in pairwise(ends)
    ]
    if into is not None:
        shapes[1:] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in into.caches]

    def blocks_of(part: int) -> pl.BlockSpec:
        whole = into is not None and part > 0
        first, last, (count, _, *sizes) = ends[part], ends[part + 1] - 1, shapes[part].shape
        return pl.BlockSpec(
            (count if whole else numerics.gpu.row_tile, None, *sizes),
            lambda i, h: (0 if whole else i, jnp.clip(h, first, last) - first, 0, 0),
        )

    return [blocks_of(part) for part in range(len(shapes))], shapes


def _turn(
    parts_ref,
    cos_ref,
    sin_ref,
    *refs,
    ends: tuple[int, ...],
    count: int,
    biased: bool,
    normed: bool,
    of_page: int | None,
    paged: bool,
    scale: float,
    eps: float,
):
    """One head of a tile of rows; element i of each half form a pair that is rotated."""
    *refs, query_ref, key_ref, value_ref = refs
    bias_ref, refs = (refs[0], refs[1:]) if biased else (None, refs)
    norms, refs = (refs[:2], refs[2:]) if normed else ((None, None), refs)
    rows, _, size = parts_ref.shape
    there = inside(pl.program_id(0), rows, count)
    halves = jnp.int32(0), jnp.int32(1)  # the interpreter takes no plain number beside a mask

    def pair():
        parts = [masked(parts_ref.at[:, half, :], there) for half in halves]
        if bias_ref is None:
            return parts
        biases = [bias_ref[half, :][None, :] for half in halves]
        return [x + jnp.broadcast_to(b, x.shape) for x, b in zip(parts, biases, strict=True)]

    def put(out_ref, parts, axis=None):
        """In rows, or in a cache whose positions lie along this axis."""
        for half, part in zip(halves, parts, strict=True):
            where = slice(None), half, slice(None)
            if axis is not None:
                where = [page[:, None], (half * size + jnp.arange(size))[None, :]]
                where.insert(axis, at[:, None])
            store(out_ref.at[tuple(where)], part, there)

    def turn(norm_ref, scale):
        norm = None if norm_ref is None else [norm_ref[half, :][None, :] for half in halves]
        angle = masked(cos_ref.at[:, :], there), masked(sin_ref.at[:, :], there)
        return turned(pair(), angle, norm, eps=eps, scale=scale)

    axes = None, None
    if of_page is not None:
        axes = 2, 1
        at = masked(refs[0], there, other=_NOWHERE)
        row = pl.program_id(0) * rows + jnp.arange(rows)
        page = masked(refs[1], there) if paged else jax.lax.div(row, of_page)
    head = pl.program_id(1)
    pl.when(head < ends[1])(lambda: put(query_ref, turn(norms[0], scale)))
    pl.when((head >= ends[1]) & (head < ends[2]))(
        lambda: put(key_ref, turn(norms[1], 1.0), axes[0])
    )
    pl.when(head >= ends[2])(lambda: put(value_ref, pair(), axes[1]))


# Sums and exponentials over the vocabulary. One program has a row, or a block of one. A row is read
# in blocks of `lanes`, ascending: lane i of the sum takes elements i, i + lanes, ...

_WARPS = 8
_TOGETHER = 4  # blocks of a row


def exponentials(x: jax.Array, peak: jax.Array, *, numerics: Numerics) -> jax.Array:
    """exp(x - peak), elementwise."""
    lanes = _lanes(x, numerics)
    row = pl.BlockSpec((None, x.shape[1]), lambda i, j: (i, 0))
    return call(
        partial(_exponentials, lanes=lanes, width=x.shape[1]),
        numerics=numerics,
        warps=_WARPS,
        name="exponentials",
        cost_estimate=pl.CostEstimate(  # of a row that it is given, a program reads `lanes`
            flops=0, transcendentals=x.size, bytes_accessed=2 * x.size * x.dtype.itemsize
        ),
        grid=(x.shape[0], -(-x.shape[1] // lanes)),
        in_specs=[row, pl.BlockSpec((None,), lambda i, j: (i,))],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
    )(x, peak)


def row_sum(x: jax.Array, *, numerics: Numerics) -> jax.Array:
    """Sum over the last axis."""
    kernel = partial(_row_sum, blocks=_blocks(x, numerics))
    return _by_row(kernel, (x,), numerics, name="row_sum")


def log_normaliser(x: jax.Array, peak: jax.Array, *, numerics: Numerics) -> jax.Array:
    """log(sum(exp(x - peak))), in one pass."""
    kernel = partial(_log_normaliser, blocks=_blocks(x, numerics))
    return _by_row(kernel, (x, peak), numerics, name="log_normaliser")


def log(x: jax.Array, *, numerics: Numerics) -> jax.Array:
    """Natural logarithm, elementwise."""
    tile = numerics.gpu.row_tile
    block = pl.BlockSpec((tile,), lambda i: (i,))
    rows = padded(x, tile, value=1.0)
    return call(
        _log,
        numerics=numerics,
        warps=_WARPS,
        name="log",
        grid=(rows.shape[0] // tile,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
    )(rows)[: x.shape[0]]


def _lanes(x, numerics: Numerics) -> int:
    return min(numerics.gpu.lanes, pl.next_power_of_2(x.shape[1]))


def _by_row(kernel, inputs, numerics, *, name):
    """One number per row, of x [N, V] and further numbers per row."""
    rows, width = inputs[0].shape
    one = pl.BlockSpec((None,), lambda i: (i,))
    return call(
        kernel,
        numerics=numerics,
        warps=_WARPS,
        name=name,
        grid=(rows,),
        in_specs=[pl.BlockSpec((None, width), lambda i: (i, 0)), *(one,) * (len(inputs) - 1)],
        out_specs=one,
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
    )(*inputs)


def _exponentials(x_ref, peak_ref, out_ref, *, lanes: int, width: int):
    at = pl.program_id(1) * lanes + jnp.arange(lanes)
    x = plt.load(x_ref.at[at], mask=at < width, other=0.0)
    plt.store(out_ref.at[at], jnp.exp2((x - peak_ref[...]) * LOG2_E), mask=at < width)


class _Blocks(NamedTuple):
    """How a row is read."""

    width: int
    lanes: int
    together: int  # blocks that are loaded at a time


def _blocks(x: jax.Array, numerics: Numerics) -> _Blocks:
    lanes, width = _lanes(x, numerics), x.shape[1]
    # XLA, which compiles what is interpreted, rounds sums of several by the number of rows.
    most = 1 if numerics.interpret else _TOGETHER
    return _Blocks(width, lanes, min(most, pl.cdiv(width, lanes)))


def _row_sum(x_ref, out_ref, *, blocks: _Blocks):
    out_ref[...] = jnp.sum(_folded(lambda x: x, x_ref, blocks, neutral=0.0))


def _log_normaliser(x_ref, peak_ref, out_ref, *, blocks: _Blocks):
    peak = peak_ref[...]
    weights = _folded(lambda x: jnp.exp2((x - peak) * LOG2_E), x_ref, blocks, neutral=-jnp.inf)
    out_ref[...] = jnp.log(jnp.sum(weights))


def _folded(f, x_ref, blocks: _Blocks, *, neutral):
    """f(x) [lanes], summed over the blocks of a row; `neutral` stands beyond its end.

    Several blocks are loaded a step before they are added: few rows have few programs, which would
    wait for one block after the other. Those beyond the end add zeros.
    """
    width, lanes, together = blocks

    def load(index):
        places = [
            (index * together + place) * lanes + jnp.arange(lanes) for place in range(together)
        ]
        return tuple(plt.load(x_ref.at[at], mask=at < width, other=neutral) for at in places)

    def step(index, state):
        total, blocks = state
        following = load(index + 1)
        for x in blocks:
            total = total + f(x)
        return total, following

    steps = pl.cdiv(width, together * lanes)
    return jax.lax.fori_loop(0, steps, step, (jnp.zeros((lanes,), jnp.float32), load(0)))[0]


def _log(x_ref, out_ref):
    out_ref[...] = jnp.log(x_ref[...])


KERNELS = PallasFamily(
    product=product,
    grouped_product=grouped_product,
    attend=pallas_attention.on_gpu,
    attend_gradient=pallas_attention_gradient.on_gpu,
    normed=normed,
    rotated=rotated,
    exponentials_kernel=exponentials,
    row_sum_kernel=row_sum,
    log_kernel=log,
    log_normaliser_kernel=log_normaliser,
)
