"""Exact kernels for TPUs, in Pallas' Mosaic dialect.

They are exact for the reasons given in `pallas_gpu`: a sum runs over ascending blocks of a fixed
size, here along the last, sequential axis of a kernel's grid with the partial sum in vector memory;
a tile may have more rows than there are, which hold anything and are not written (before products
of experts and over the vocabulary XLA adds some); key blocks start at a sequence's first token.

A row of the vocabulary is read in blocks of `lanes`, ascending: lane i of a sum takes elements i,
i + lanes, ..., and what a block has beyond the row's end counts as nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tim_jax.kernels import native, pallas_attention, pallas_attention_gradient
from tim_jax.kernels.families import Heads
from tim_jax.kernels.pallas import (
    PallasFamily,
    Product,
    block_of,
    in_blocks,
    padded,
    power_of_two_in,
    turned,
)
from tim_jax.kernels.pallas import tpu_call as call
from tim_jax.numerics import Numerics, strict


def _kernel(*refs, **options):
    """One step of the sums of a tile; the epilogue after the last."""
    _step(pl.program_id(2), pl.num_programs(2), *refs, **options)


def _step(index, count, x_ref, *refs, halves: int, kinds: tuple[str, ...] = (), epilogue: Callable):
    """Step `index` of `count`."""
    weight_refs, extra_refs = refs[:halves], refs[halves : -halves - 1]
    out_ref, sum_refs = refs[-halves - 1], refs[-halves:]

    @pl.when(index == 0)
    def _start():
        for ref in sum_refs:
            ref[...] = jnp.zeros_like(ref)

    x = x_ref[...]
    for total, weight in zip(sum_refs, weight_refs, strict=True):
        total[...] += jnp.dot(x, weight[...], **native.precise(x))

    @pl.when(index == count - 1)
    def _finish():
        extras = [
            ref[...] if kind == "tile" else tuple(ref[h : h + 1, :] for h in range(halves))
            for kind, ref in zip(kinds, extra_refs, strict=True)
        ]
        y = epilogue([ref[...] for ref in sum_refs], *extras)
        out_ref[...] = y.astype(out_ref.dtype)


def product(
    x: jax.Array, weight: jax.Array, extras: Sequence[tuple[str, jax.Array]], what: Product
) -> jax.Array:
    """A `Product` of x [N, K] and weight [K, halves * M]; see `PallasFamily`."""
    numerics, halves = what.numerics, what.halves
    rows, width = x.shape[0], weight.shape[1] // halves
    columns, block_k = blocks(weight.shape, halves, numerics)
    steps, depth = pl.cdiv(width, columns), weight.shape[0] // block_k
    tile = numerics.tpu.tile(rows)

    def columns_of(half: int) -> pl.BlockSpec:
        block = (block_k, columns)
        return pl.BlockSpec(block, lambda i, j, k: (k, j + half * steps))

    specs = {
        "tile": pl.BlockSpec((tile, columns), lambda i, j, k: (i, j)),
        "bias": pl.BlockSpec((halves, columns), lambda i, j, k: (0, j)),
    }
    return call(
        partial(_kernel, halves=halves, kinds=tuple(k for k, _ in extras), epilogue=what.epilogue),
        numerics=numerics,
        name=what.name,
        grid=(pl.cdiv(rows, tile), steps, depth),
        scratch=[(tile, columns)] * halves,
        in_specs=[
            pl.BlockSpec((tile, block_k), lambda i, j, k: (i, k)),
            *(columns_of(half) for half in range(halves)),
            *(specs[kind] for kind, _ in extras),
        ],
        out_specs=specs["tile"],
        out_shape=jax.ShapeDtypeStruct((rows, width), what.dtype),
    )(x, *(weight,) * halves, *(extra for _, extra in extras))


LEAST = 128  # of a block of a weight in any direction


def blocks(
    weight: tuple[int, ...], halves: int, numerics: Numerics, name: str = "a weight"
) -> tuple[int, int]:
    """Columns of a block of each half, and rows of a step, of weights [K, halves * M].

    Without halves the last block of columns may be a part of one.

    Raises:
      InputError: there are no such blocks.
    """
    (size, width), tiles = weight, numerics.tpu
    block_k = block_of(tiles.block_k, size, least=LEAST, what=f"the rows of {name}")
    if halves == 1:
        return min(tiles.columns, width), block_k
    what = f"the columns of each part of {name}"
    return block_of(tiles.columns, width // halves, least=LEAST, what=what), block_k


def _grouped(expert_ref, used_ref, *refs, **options):
    """`_kernel`; nothing for blocks without rows."""
    del expert_ref  # read by the index maps alone
    # Read here, because interpret mode has no programs inside a branch.
    at = pl.program_id(2), pl.num_programs(2)

    @pl.when(pl.program_id(1) < used_ref[0])
    def _block():
        _step(*at, *refs, **options)


def grouped_product(
    x: jax.Array, weight: jax.Array, expert: jax.Array, used: jax.Array, what: Product
) -> jax.Array:
    """A `Product` of tiles x [T, R, K] and weight [E, K, halves * M]; see `PallasFamily`.

    The blocks without rows come last. Their steps name what the step before them has read and
    written, so that nothing is copied for them, and compute nothing. So blocks run in order.
    """
    numerics, halves = what.numerics, what.halves
    (count, rows, _), tile = x.shape, numerics.tpu.expert_rows
    columns, block_k = blocks(weight.shape[1:], halves, numerics)
    steps, depth = pl.cdiv(weight.shape[2] // halves, columns), weight.shape[1] // block_k
    x, expert, used = in_blocks(x, expert, used, tile)

    def step(i, k, used):
        """The block and the step of its sum for which a step of the grid reads."""
        return jnp.minimum(i, used[0] - 1), jnp.where(i < used[0], k, depth - 1)

    def weights_at(half: int, j, i, k, expert, used):
        i, k = step(i, k, used)
        return expert[i], k, j + half * steps

    weights = (None, block_k, columns)
    result = call(
        partial(_grouped, halves=halves, epilogue=what.epilogue),
        numerics=numerics,
        name=what.name,
        grid=(steps, expert.size, depth),
        scalars=2,
        scratch=[(tile, columns)] * halves,
        ordered=2,
        in_specs=[
            pl.BlockSpec((tile, block_k), lambda j, i, k, e, used: step(i, k, used)),
            *(pl.BlockSpec(weights, partial(weights_at, half)) for half in range(halves)),
        ],
        out_specs=pl.BlockSpec((tile, columns), lambda j, i, k, e, used: (step(i, k, used)[0], j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], weight.shape[2] // halves), what.dtype),
    )(expert, used, x, *(weight,) * halves)
    return result.reshape(count, -1, result.shape[1])[:, :rows]


def normed(x: jax.Array, weight: jax.Array, *, eps: float, numerics: Numerics) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight, whole rows at a time."""
    rows, width = x.shape
    tile = pl.BlockSpec((numerics.tpu.row_tile, width), lambda i: (i, 0))
    return call(
        partial(_norm, eps=eps),
        numerics=numerics,
        name="norm",
        grid=(pl.cdiv(rows, numerics.tpu.row_tile),),
        in_specs=[tile, pl.BlockSpec((1, width), lambda i: (0, 0))],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(x.shape, numerics.dtype),
    )(x, weight[None, :])


def _norm(x_ref, weight_ref, out_ref, *, eps: float):
    x = x_ref[...].astype(jnp.float32)
    mean_square = jnp.sum(x * x, axis=1, keepdims=True) * (1.0 / x.shape[1])
    y = x * jax.lax.rsqrt(mean_square + eps) * jnp.broadcast_to(weight_ref[...], x.shape)
    out_ref[...] = y.astype(out_ref.dtype)


def rotated(
    y: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    optional: dict[str, jax.Array],
    *,
    heads: Heads,
    eps: float,
    numerics: Numerics,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query, key and value of `Kernels.project`."""
    biased = y + optional["bias"][None, :] if "bias" in optional else y
    parts = biased.reshape(y.shape[0], -1, 2, heads.size // 2).transpose(1, 2, 0, 3)
    turn = partial(_turned, cos=cos, sin=sin, eps=eps, numerics=numerics)
    query, key = parts[: heads.query], parts[heads.query : heads.query + heads.key]
    query = turn(query, optional.get("q_norm"), scale=heads.size**-0.5)
    key = turn(key, optional.get("k_norm"), scale=1.0)
    # A value is only rounded: elementwise, so XLA may do it.
    value = y[:, (heads.query + heads.key) * heads.size :]
    if "bias" in optional:
        value = value + optional["bias"][None, -value.shape[1] :]
    value = value.reshape(-1, heads.key, heads.size)
    return query, key, strict.rounded(value, numerics.dtype)


def _turned(parts, weight, *, cos, sin, scale, eps, numerics: Numerics):
    """Heads of parts [heads, 2, N, D / 2], normed, rotated and scaled: [N, heads, D]."""
    count, _, rows, half = parts.shape
    tile, some = numerics.tpu.row_tile, min(power_of_two_in(count), numerics.tpu.heads)
    pair = pl.BlockSpec((some, 2, tile, half), lambda i, h: (h, 0, i, 0))
    angle = pl.BlockSpec((tile, half), lambda i, h: (i, 0))
    inputs, specs = [parts, cos, sin], [pair, angle, angle]
    if weight is not None:
        inputs.append(weight.reshape(2, half))
        specs.append(pl.BlockSpec((2, half), lambda i, h: (0, 0)))
    result = call(
        partial(_turn, normed=weight is not None, scale=scale, eps=eps),
        numerics=numerics,
        name="turn",
        grid=(pl.cdiv(rows, tile), count // some),
        in_specs=specs,
        out_specs=pair,
        out_shape=jax.ShapeDtypeStruct(parts.shape, numerics.dtype),
    )(*inputs)
    return result.transpose(2, 0, 1, 3).reshape(rows, count, 2 * half)


def _turn(parts_ref, cos_ref, sin_ref, *refs, normed: bool, scale: float, eps: float):
    """Some heads of a tile of rows; element i of each half form a pair that is rotated."""
    norm = [refs[0][half : half + 1, :] for half in (0, 1)] if normed else None
    angle = cos_ref[...], sin_ref[...]
    for head in range(parts_ref.shape[0]):
        pair = parts_ref[head, 0], parts_ref[head, 1]
        for half, part in enumerate(turned(pair, angle, norm, eps=eps, scale=scale)):
            refs[-1][head, half] = part.astype(refs[-1].dtype)


_ROWS = 8


def exponentials(x: jax.Array, peak: jax.Array, *, numerics: Numerics) -> jax.Array:
    """exp(x - peak), elementwise."""

    def kernel(x_ref, peak_ref, out_ref):
        out_ref[...] = jnp.exp(x_ref[...] - jnp.broadcast_to(peak_ref[...], x_ref.shape))

    rows, lanes = padded(x, _ROWS), numerics.tpu.lanes
    tile = pl.BlockSpec((_ROWS, lanes), lambda i, j: (i, j))
    return call(
        kernel,
        numerics=numerics,
        name="exponentials",
        grid=(rows.shape[0] // _ROWS, -(-x.shape[1] // lanes)),
        in_specs=[tile, pl.BlockSpec((_ROWS, 1), lambda i, j: (i, 0))],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
    )(rows, padded(peak[:, None], _ROWS))[: x.shape[0]]


def row_sum(x: jax.Array, *, numerics: Numerics) -> jax.Array:
    """Sum over the last axis."""
    return _folded(lambda x: x, lambda total: total, (x,), numerics, name="row_sum")


def log_normaliser(x: jax.Array, peak: jax.Array, *, numerics: Numerics) -> jax.Array:
    """log(sum(exp(x - peak))), in one pass."""

    def weight(x, peak):
        return jnp.exp(x - jnp.broadcast_to(peak, x.shape))

    inputs = x, peak[:, None]
    return _folded(weight, jnp.log, inputs, numerics, name="log_normaliser")


def log(x: jax.Array, *, numerics: Numerics) -> jax.Array:
    """Natural logarithm, elementwise."""

    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.log(x_ref[...])

    rows = padded(x[:, None], _ROWS, value=1.0)
    block = pl.BlockSpec((_ROWS, 1), lambda i: (i, 0))
    return call(
        kernel,
        numerics=numerics,
        name="log",
        grid=(rows.shape[0] // _ROWS,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
    )(rows)[: x.shape[0], 0]


def _folded(f, finish, inputs, numerics, *, name):
    """finish(sum of f(x)) per row, of x [N, V] and further numbers per row [N, 1]."""
    count, width = inputs[0].shape
    inputs = [padded(x, _ROWS) for x in inputs]
    lanes = numerics.tpu.lanes
    one = pl.BlockSpec((_ROWS, 1), lambda i, j: (i, 0))
    return call(
        partial(_fold, f=f, finish=finish, width=width),
        numerics=numerics,
        name=name,
        grid=(inputs[0].shape[0] // _ROWS, -(-width // lanes)),
        scratch=[(_ROWS, lanes)],
        in_specs=[pl.BlockSpec((_ROWS, lanes), lambda i, j: (i, j)), *(one,) * (len(inputs) - 1)],
        out_specs=one,
        out_shape=jax.ShapeDtypeStruct((inputs[0].shape[0], 1), jnp.float32),
    )(*inputs)[:count, 0]


def _fold(x_ref, *refs, f, finish, width: int):
    numbers, out_ref, total = refs[:-2], refs[-2], refs[-1]
    index = pl.program_id(1)

    @pl.when(index == 0)
    def _start():
        total[...] = jnp.zeros_like(total)

    x = x_ref[...]
    at = index * x.shape[1] + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    total[...] += jnp.where(at < width, f(x, *(ref[...] for ref in numbers)), 0.0)

    @pl.when(index == pl.num_programs(1) - 1)
    def _finish():
        out_ref[...] = finish(jnp.sum(total[...], axis=1, keepdims=True))


KERNELS = PallasFamily(
    product=product,
    grouped_product=grouped_product,
    attend=pallas_attention.on_tpu,
    attend_gradient=pallas_attention_gradient.on_tpu,
    normed=normed,
    rotated=rotated,
    exponentials_kernel=exponentials,
    row_sum_kernel=row_sum,
    log_kernel=log,
    log_normaliser_kernel=log_normaliser,
)
