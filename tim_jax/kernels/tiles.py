"""Exact kernels from plain XLA operations: fixed row tiles, explicit sums, fences.

Why each piece is there. XLA picks kernels, fusions and reduction orders per program and per shape,
so a dot or a sum is bit-stable only if its shape, its operands' layouts and its surroundings are
the same in every program. Hence:

- a dot sees a row count inside `Rows` (a fixed tile, or a range measured to give the same bits);
- sums are written as trees of adds, which are elementwise code and keep their order;
- elementwise code is made of correctly rounded operations that are not joined (see `strict`);
- `fence` (an optimisation barrier) stands on both sides of every unit, so that nothing is moved
  through it;
- units are `custom_vjp`: the forward inside a gradient is the very same program, and the backward,
  to which the exactness contract does not apply, is plain XLA.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from tim_jax.kernels import formulas, native
from tim_jax.numerics import Numerics, Rows, strict

fence = jax.lax.optimization_barrier
_LANES = 128
_WIDE_LANES = 2048
_UNROLLED = 16  # key blocks whose sum is written out


def total(x: jax.Array, *, lanes: int = _LANES) -> jax.Array:
    """Sum over the last axis in one fixed order.

    A long axis is first added up to 2,048 lanes, then to `lanes`, and the lanes by halving. Zeros
    appended to the axis change no bit once it has `lanes` elements.
    """
    return _reduce(x, jnp.add, lanes, 0.0)


def peak(x: jax.Array, *, lanes: int = _LANES) -> jax.Array:
    """Maximum over the last axis.

    A maximum does not round, so any order would do. But XLA:CPU starts library fusions at a reduce
    instruction, and they include the exp after it in spite of a fence; this is elementwise code.
    """
    return _reduce(x, _larger, lanes, -jnp.inf)


def _larger(x, y):
    """The maximum as a comparison: XLA's own also handles NaN, and takes three times as long."""
    return jnp.where(x > y, x, y)


def _reduce(x, combine, lanes, neutral):
    wide = max(_WIDE_LANES, lanes)
    if x.shape[-1] > wide:
        # Chunks of a few lanes would not be vectorised: ten times slower for a vocabulary.
        x = formulas.fold(x, combine, lanes=wide, neutral=neutral, fan=256)
    lanes = min(lanes, 1 << max(x.shape[-1] - 1, 0).bit_length())
    return formulas.halve(formulas.fold(x, combine, lanes=lanes, neutral=neutral), combine)


MATHS = formulas.Maths(
    total, strict.exp, strict.log, strict.sigmoid, strict.inverse_root, strict.uncontracted
)


def unit(forward: Callable, plain: Callable) -> Callable:
    """`forward` between fences; its gradient is that of `plain`, recomputed from the inputs."""

    def fenced(*args):
        return fence(forward(*fence(args)))

    def backward(args, cotangent):
        return jax.vjp(plain, *fence(args))[1](cotangent)

    call = jax.custom_vjp(fenced)
    call.defvjp(lambda *args: (fenced(*args), args), backward)
    return call


def by_rows(tile: Callable, x: jax.Array, rows: Rows) -> jax.Array:
    """Applies `tile` to `x` [N, ...] so that it only ever sees a row count allowed by `rows`."""
    count = x.shape[0]
    tiles, size = rows.split(count)
    x = jnp.pad(x, [(0, tiles * size - count)] + [(0, 0)] * (x.ndim - 1))
    if tiles == 1:
        return tile(x)[:count]
    x = x.reshape(tiles, size, *x.shape[1:])
    y = fence(jax.lax.map(lambda t: fence(tile(fence(t))), fence(x)))
    return y.reshape(tiles * size, *y.shape[2:])[:count]


def dot(x: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
    """x [N, K] @ weight [K, M] -> float32 [N, M]; a row's bits do not depend on N.

    With `weight` in column tiles [T, K, M / T], each is a dot of its own: a column's bits depend on
    its tile's columns, and not on how many tiles there are.
    """
    rows = numerics.rows_for(weight.shape[-2])

    def product(x, weight):
        return fence(native.product(*native.pin(x, weight)))

    def whole(x, weight):
        if numerics.order.split_k == 1:
            return product(x, weight)
        return fence(formulas.split_k(product, x, weight, pieces=numerics.order.split_k))

    def columns(x, weight):
        return by_rows(lambda t: whole(t, weight), x, rows)

    def forward(x, weight):
        if weight.ndim == 2:
            return columns(x, weight)
        return jnp.concatenate([columns(x, tile) for tile in fence(list(weight))], axis=-1)

    call = jax.custom_vjp(forward)
    call.defvjp(lambda x, w: (forward(x, w), (x, w)), native.dot_backward)
    return call(x, weight)


def dots(x: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
    """x [H, N, K] @ weight [H, K, M] -> float32 [H, N, M], each the `dot` of its own.

    In a loop: as one batched product a dot would have other bits.
    """
    return jax.lax.map(lambda pair: dot(*pair, numerics=numerics), fence((x, weight)))


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
    aligned: bool,
    window: jax.Array | None = None,
    runs: int = native.RUNS,
) -> jax.Array:
    """Causal attention of row tiles over the keys of their sequences.

    Args:
      query: [B, Kv, N, D], scaled; rows are (token, head of the group), tokens major.
      key: [B, Kv, D, S], stored with the head axis first so that no dot needs a transpose; or in n
        blocks of C keys, [B, n, Kv, D, C] (`cache.in_blocks`).
      value: [B, Kv, S, E], where E is D but in latent attention; or in blocks, [B, n, Kv, C, E].
      positions: i32[B, N], each row attends to keys 0..position.
      aligned: the rows are whole sequences, so that row tiles may skip the keys after them.
      window: i32[], each row attends to this many keys up to its position; None: to all of them.
      runs: that aligned rows are cut into, each over the keys that suffice: more of them compute
        less that is masked, and compile for longer. With 1, every row is compared with all keys, so
        that rows may be part of their sequences. No bit depends on it.

    Returns:
      [B, Kv, N, E] float32.
    """
    runs = runs if aligned else 0

    def forward(query, key, value, positions, window):
        return _attention(query, key, value, positions, window, numerics, runs)

    def backward(args, cotangent):
        query, key, value, positions, window = fence(args)
        options = {"numerics": numerics, "window": window, "runs": runs}
        attend = partial(native.attention, aligned=aligned, **options)

        def plain(query, key, value):
            return attend(query, key, value, positions)

        return (*jax.vjp(plain, query, key, value)[1](cotangent), None, None)

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *args: (forward(*args), args), backward)
    return call(query, key, value, positions, window)


def _attention(query, key, value, positions, window, numerics, runs):
    """Of aligned rows in `runs`, or of any in one that is 0."""
    rows, block, count = numerics.attention_rows, numerics.kv_block, query.shape[2]
    if numerics.whole_kv:
        length = key.shape[3]
        padding = -length % block
        key = jnp.pad(key, ((0, 0), (0, 0), (0, 0), (0, padding)))
        value = jnp.pad(value, ((0, 0), (0, 0), (0, padding), (0, 0)))
    else:
        length = key.shape[3] if key.ndim == 4 else key.shape[1] * block
        key, value = (key, value) if key.ndim == 5 else in_blocks(key, value, block)
        padding = key.shape[1] * block - length
    query, key, value = fence((query, key, value))

    def run(start, stop, keys):
        """Rows start..stop against the first `keys` keys."""
        if numerics.whole_kv:
            k, v = key[..., :keys], value[:, :, :keys]
        else:
            k, v = key[:, : keys // block], value[:, : keys // block]
        part = query[:, :, start:stop]
        k, v = native.pin(k, v)
        return _by_row_tiles(part, k, v, positions[:, start:stop], window, numerics)

    if not runs:
        return fence(run(0, count, length + padding))
    pieces = [
        run(start, stop, keys)
        for start, stop, keys in native.segments(count, length, rows.high or count, block, runs)
    ]
    return fence(jnp.concatenate(pieces, axis=2))


def in_blocks(key: jax.Array, value: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Keys [B, n, Kv, D, block] and values [B, n, Kv, block, E] of [B, Kv, D, S], [B, Kv, S, E].

    The last block is filled up with zeros.
    """
    batch, heads, size, length = key.shape
    padding = -length % block
    key = jnp.pad(key, ((0, 0), (0, 0), (0, 0), (0, padding)))
    value = jnp.pad(value, ((0, 0), (0, 0), (0, padding), (0, 0)))
    key = jnp.moveaxis(key.reshape(batch, heads, size, -1, block), 3, 1)
    value = jnp.moveaxis(value.reshape(batch, heads, -1, block, value.shape[3]), 2, 1)
    return key, value


def _by_row_tiles(query, key, value, last, window, numerics: Numerics):
    """`_attend` on row counts that the numerics allow.

    The tile axis is split off outside the loop: inside, the transpose would reach the dot as
    another operand layout, and so make XLA choose another kernel.
    """
    batch, heads, count, size = query.shape
    tiles, rows = numerics.attention_rows.split(count)
    padding = tiles * rows - count
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padding), (0, 0)))
    last = jnp.pad(last, ((0, 0), (0, padding)))
    attend = partial(_attend, window=window, numerics=numerics)
    if tiles == 1:
        return attend(query, key, value, last)[:, :, :count]
    query = jnp.moveaxis(query.reshape(batch, heads, tiles, rows, size), 2, 0)
    last = jnp.moveaxis(last.reshape(batch, tiles, rows), 1, 0)
    out = jax.lax.map(lambda t: fence(attend(t[0], key, value, t[1])), fence((query, last)))
    out = jnp.moveaxis(fence(out), 0, 2).reshape(batch, heads, tiles * rows, -1)
    return out[:, :, :count]


def _attend(query, key, value, last, window=None, *, numerics: Numerics):
    """One row tile: query [B, Kv, M, D], last [B, M]; keys and values whole or in blocks."""
    block = numerics.kv_block
    scores = _scores(query, key, numerics)
    at = jnp.arange(scores.shape[3])[None, None, :]
    visible = formulas.visible(at, last[:, :, None], window)
    # Without a fence XLA computes the mask again beside every exponential.
    scores = fence(jnp.where(visible[:, None], scores, native.MASKED))
    highest = fence(peak(scores, lanes=block))
    narrowed = partial(formulas.narrowed, dtype=numerics.precision.attention_softmax)
    weights = narrowed(fence(strict.exp(narrowed(scores - highest[..., None]))))
    # The reciprocal is written out, because XLA may or may not make one of a division.
    scale = fence(1.0 / narrowed(fence(total(weights, lanes=block))))
    mixed = _mix(strict.rounded(weights, value.dtype), value, numerics)
    return fence(mixed * scale[..., None])


def _scores(query, key, numerics: Numerics):
    """query @ key, float32 [B, Kv, M, S]: in one dot if that was found to keep the bits, else a dot
    for every block, all of them in one batched product."""
    if numerics.whole_kv:
        return fence(native.scores(*native.pin(query, key)))
    batch, blocks = key.shape[:2]
    query = jnp.broadcast_to(query[:, None], (batch, blocks, *query.shape[1:]))
    scores = jnp.moveaxis(_products(query, key), 1, 3)
    return scores.reshape(*scores.shape[:3], -1)


def _mix(weights, value, numerics: Numerics):
    """weights @ value: the sum over key blocks, ascending; a masked block adds exact zeros."""
    if numerics.whole_kv:
        return fence(native.mix(*native.pin(weights, value)))
    blocks, block = value.shape[1], value.shape[3]
    weights = weights.reshape(*weights.shape[:3], blocks, block)
    terms = _products(jnp.moveaxis(weights, 3, 1), value)

    def add(index, mixed):
        return mixed + jax.lax.dynamic_index_in_dim(terms, index, axis=1, keepdims=False)

    if blocks > _UNROLLED:
        return fence(jax.lax.fori_loop(1, blocks, add, terms[:, 0]))
    mixed = terms[:, 0]
    for index in range(1, blocks):
        mixed = mixed + terms[:, index]
    return fence(mixed)


def _products(left, right):
    """left [B, n, Kv, M, K] @ right [B, n, Kv, K, N] -> float32 [B, n, Kv, M, N]."""
    product = jnp.einsum("bnhmk,bnhkc->bnhmc", *native.pin(left, right), **native.precise(left))
    return fence(product)
