"""Other attention kernels, for samplers only: what engines run in place of the family's own.

- `flash_attention`: one Pallas kernel, for GPU and TPU, prefill and decode. A program has one
  sequence, key head and tile of rows. It walks over the keys in fixed blocks from the sequence's
  first token, keeps a running maximum, sum and mix (Dao et al. 2022, algorithm 1), and stops after
  the last block that any of its rows can see. Query heads of one group share a key head's program;
  causality and lengths are in `positions`: a row attends to keys 0..position.
- `split_attention`: decoding attention cut along the keys, as FlashDecoding and the engines built
  on it do. Each piece of the keys has a softmax of its own, and the pieces are merged by their
  maxima and sums. The number of pieces follows the batch: a small batch is cut more, to fill the
  machine. So a sequence's bits depend on the batch it is decoded in, and that is the point.
- `triton_attention`: the kernel of `triton_source` through jax-triton, for NVIDIA GPUs. It needs
  the extra `triton`. Only some versions of jax, jax-triton and triton fit each other; `check`
  refuses others by name.
"""

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from tim_jax.common.errors import InputError
from tim_jax.kernels import formulas, native, pallas
from tim_jax.numerics import Numerics, strict

_MOST_ROWS = 64  # of a program
LEAST = 16  # rows, keys and head sizes that a matrix unit takes


def _rows(count: int) -> int:
    """Rows of a program, of as many in all."""
    return min(_MOST_ROWS, max(LEAST, pl.next_power_of_2(count)))


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
    interpret: bool,
    window: jax.Array | None = None,
) -> jax.Array:
    """As `tiles.attention`: [B, Kv, N, D] by keys [B, Kv, D, S] and values [B, Kv, S, E].

    `positions` i32[B, N]; rows are (token, head of the group), so that decoding has the group's
    heads as rows. The result is float32 [B, Kv, N, E]. `interpret` runs the kernel's operations
    one by one on any backend: slow, for tests. No gradient: this is for samplers.
    """
    batch, heads, count, size = query.shape
    block, rows = max(numerics.kv_block, LEAST), _rows(count)
    padding, keys = -count % rows, key.shape[3] + -key.shape[3] % block
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padding), (0, 0)))
    last = jnp.pad(positions, ((0, 0), (0, padding)))[..., None]
    bounds = [last] if window is None else [last, last - window + 1]
    key = jnp.pad(key, ((0, 0), (0, 0), (0, 0), (0, keys - key.shape[3])))
    width = value.shape[3]
    value = jnp.pad(value, ((0, 0), (0, 0), (0, keys - value.shape[2]), (0, 0)))
    # Else JAX may compile for a GPU by Mosaic, whose shared memory has no room for the keys.
    of_triton = plt.CompilerParams() if pallas.platform() == "gpu" else None
    out = pl.pallas_call(
        partial(_kernel, block=block),
        compiler_params=of_triton,
        grid=(batch, heads, (count + padding) // rows),
        in_specs=[
            pl.BlockSpec((None, None, rows, size), lambda b, h, i: (b, h, i, 0)),
            pl.BlockSpec((None, None, size, keys), lambda b, h, i: (b, h, 0, 0)),
            pl.BlockSpec((None, None, keys, width), lambda b, h, i: (b, h, 0, 0)),
            *(pl.BlockSpec((None, rows, 1), lambda b, h, i: (b, i, 0)),) * len(bounds),
        ],
        out_specs=pl.BlockSpec((None, None, rows, width), lambda b, h, i: (b, h, i, 0)),
        out_shape=jax.ShapeDtypeStruct((*query.shape[:3], width), jnp.float32),
        interpret=interpret,
    )(query, key, value, *bounds)
    return out[:, :, :count]


def _kernel(query_ref, key_ref, value_ref, last_ref, *refs, block: int):
    """query [M, D], key [D, S], value [S, E], last [M, 1], maybe first [M, 1] -> out [M, E]."""
    query, last, out_ref = query_ref[...], last_ref[...], refs[-1]
    first = refs[0][...] if refs[1:] else None
    rows, width = out_ref.shape

    def step(index, carry):
        peak, total, mixed = carry
        span = pl.ds(index * block, block)
        scores = jnp.dot(query, key_ref[:, span], **native.precise(query))
        at = index * block + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        visible = at <= jnp.broadcast_to(last, scores.shape)
        if first is not None:
            visible &= at >= jnp.broadcast_to(first, scores.shape)
        scores = jnp.where(visible, scores, native.MASKED)
        highest = jnp.maximum(peak, jnp.max(scores, axis=1, keepdims=True))
        shrink = jnp.exp(peak - highest)
        weights = jnp.exp(scores - jnp.broadcast_to(highest, scores.shape))
        if first is not None:  # before the first visible key the peak is MASKED itself
            weights = jnp.where(visible, weights, 0.0)
        values = value_ref[span, :]
        part = jnp.dot(weights.astype(values.dtype), values, **native.precise(values))
        total = total * shrink + jnp.sum(weights, axis=1, keepdims=True)
        return highest, total, mixed * jnp.broadcast_to(shrink, mixed.shape) + part

    start = (
        jnp.full((rows, 1), native.MASKED, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )
    blocks = jnp.max(last) // block + 1
    _, total, mixed = jax.lax.fori_loop(0, blocks, step, start)
    out_ref[...] = mixed / jnp.broadcast_to(total, mixed.shape)


_KEYS = 8  # in the smallest piece


def pieces(batch: int, heads: int, keys: int, *, numerics: Numerics) -> int:
    """How many pieces: as many as fill `split_kv` programs, at most one per 8 keys."""
    wanted = -(-numerics.order.split_kv // (batch * heads))
    return max(1, min(wanted, -(-keys // _KEYS)))


def split_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
    fence: Callable,
    window: jax.Array | None = None,
) -> jax.Array:
    """As `tiles.attention` of rows that are not aligned: the same result up to rounding.

    With m_i, l_i, o_i the maximum, sum and mix of piece i and m the largest m_i, the result is
    (sum_i exp(m_i - m) o_i) / (sum_i exp(m_i - m) l_i) (Dao et al. 2023, Flash-Decoding). A piece
    of which a row sees nothing has m_i - m so far below 0 that it counts as nothing.
    """
    keys = key.shape[3]
    piece = partial(_piece, query, key, value, positions, window=window, numerics=numerics)
    count = pieces(query.shape[0], query.shape[1], keys, numerics=numerics)
    size = -(-keys // (count * _KEYS)) * _KEYS
    softmaxes = [
        fence(piece(start=start, stop=min(start + size, keys))) for start in range(0, keys, size)
    ]
    peaks, totals, mixes = (jnp.stack(parts) for parts in zip(*softmaxes, strict=True))
    narrowed = _narrowed(numerics)
    shares = narrowed(fence(jnp.exp(narrowed(peaks - jnp.max(peaks, axis=0, keepdims=True)))))
    mixed = jnp.sum(mixes * shares[..., None], axis=0)
    return fence(mixed / narrowed(jnp.sum(totals * shares, axis=0))[..., None])


def _narrowed(numerics: Numerics) -> Callable[[jax.Array], jax.Array]:
    """What rounds a step of the attention's softmax."""
    return partial(formulas.narrowed, dtype=numerics.precision.attention_softmax)


def _piece(query, key, value, last, *, start, stop, window, numerics):
    """Maximum [B, Kv, N], sum [B, Kv, N] and mix [B, Kv, N, D] over keys start..stop."""
    visible = formulas.visible(jnp.arange(start, stop)[None, None, :], last[:, :, None], window)
    scores = native.scores(query, key[..., start:stop])
    scores = jnp.where(visible[:, None], scores, native.MASKED)
    peak, narrowed = jnp.max(scores, axis=-1), _narrowed(numerics)
    weights = narrowed(jnp.exp(narrowed(scores - peak[..., None])))
    rounded = strict.rounded(weights, value.dtype)
    return peak, jnp.sum(weights, axis=-1), native.mix(rounded, value[:, :, start:stop])


NEEDS = {"jax": ((0, 11), (0, 12)), "jax-triton": ((0, 4), (0, 5)), "triton": ((3, 7), (3, 8))}


def triton_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    *,
    numerics: Numerics,
    window: jax.Array | None = None,
) -> jax.Array:
    """As `flash_attention`, by Triton; for the platform "cuda" only, and without windows."""
    if window is not None:
        raise InputError("numerics: attention 'triton' takes no sliding window")
    jax_triton = importlib.import_module("jax_triton")
    source = importlib.import_module("tim_jax.kernels.triton_source")
    batch, heads, count, size = query.shape
    rows = _rows(count)
    return jax_triton.triton_call(
        query,
        key,
        value,
        positions,
        kernel=source.flash_kernel,
        out_type=jax.ShapeDtypeStruct(query.shape, jnp.float32),
        grid=(batch * heads, -(-count // rows)),
        num_warps=4,
        num_stages=2,
        HEADS=heads,
        COUNT=count,
        KEYS=key.shape[3],
        SIZE=size,
        ROWS=rows,
        DIMS=max(LEAST, pl.next_power_of_2(size)),
        BLOCK=max(numerics.kv_block, LEAST),
    )


def check() -> None:
    """Raises InputError naming the first package that is missing or does not fit."""
    for name, (low, high) in NEEDS.items():
        wanted = f"{'.'.join(map(str, low))} up to, not with, {'.'.join(map(str, high))}"
        try:
            installed = version(name)
        except PackageNotFoundError:
            raise InputError(
                f"Triton attention needs {name} {wanted}, which is not installed; install"
                " tim-jax[triton] (Python 3.12 or newer)"
            ) from None
        if not low <= tuple(int(part) for part in installed.split(".")[:2]) < high:
            raise InputError(f"Triton attention needs {name} {wanted}; here it is {installed}")
