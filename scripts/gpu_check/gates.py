"""Kernels one by one: does a row keep its bits whatever is around it, and is it right?"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from records import Case
from setting import Setting, normal, same_bits

from tim_jax import kernels
from tim_jax.common.errors import InputError
from tim_jax.kernels import native, variants
from tim_jax.numerics import (
    GPU_BF16,
    MOSAIC_GPU_BF16_SEVERAL_TILES,
    GpuTiles,
    MatmulTile,
    Numerics,
)

CANDIDATES = GPU_BF16.matmul
MOSAIC = MOSAIC_GPU_BF16_SEVERAL_TILES.matmul
_GROUP = 2  # query heads of a key head


def cases(setting: Setting) -> Iterator[Case]:
    for dtype in ("bfloat16", "float32"):
        yield from _gates(setting, setting.exact(dtype))
    yield from _products_of_mosaic(setting)
    yield from _sampler_attentions(setting)
    yield from _tiles(setting)
    if not setting.smoke:
        yield Case("native dot: rows against row count", lambda: _native(setting))


def _sizes(setting: Setting) -> tuple[int, int, tuple[int, ...]]:
    """(K, M, row counts)."""
    return (
        (32, 64, (1, 7, 17)) if setting.smoke else (2048, 4096, (1, 7, 8, 63, 65, 128, 500, 4096))
    )


def _factors(numerics: Numerics, size: int, width: int, counts: tuple[int, ...]):
    """The row counts, and factors of a product [the most rows, size] @ [size, width]."""
    x = normal(0, counts[-1], size, dtype=numerics.dtype)
    return counts, x, (normal(1, size, width) * size**-0.5).astype(numerics.dtype)


def _gates(setting: Setting, numerics: Numerics) -> Iterator[Case]:
    dtype = numerics.compute_dtype
    ops = kernels.family(numerics)
    counts, x, weight = _factors(numerics, *_sizes(setting))
    size = len(weight)
    logits = 3 * normal(2, counts[1], 48 if setting.smoke else 151936)
    norm_weight = 1 + 0.1 * normal(3, size)
    use = {"numerics": numerics}
    rows = {
        "dot": jax.jit(lambda x: ops.dot(x, weight, **use)),
        "gated_dot": jax.jit(lambda x: ops.gated_dot(x, weight, None, **use)),
        "dot_add": jax.jit(lambda x: ops.dot_add(x, weight[:, :size], x, None, **use)),
        "norm": jax.jit(lambda x: ops.norm(x, norm_weight, eps=1e-6, **use)),
    }
    if setting.smoke:
        rows = {name: rows[name] for name in ("dot", "norm")}
    for name, run in rows.items():
        yield Case(f"{name} {dtype}: rows against row count", partial(_row_counts, run, x, counts))
        yield Case(f"{name} {dtype}: place in the batch", partial(_places, run, x))
    heads = {
        "log_normaliser": lambda z: ops.log_normaliser(z, ops.peak(z), z, **use),
        "row_sum": lambda z: ops.row_sum(z, **use),
        "exponentials": lambda z: ops.exponentials(z, ops.peak(z), **use),
    }
    if dtype == "float32":
        for name, run in heads.items():
            run = jax.jit(run)
            yield Case(f"{name}: rows against row count", partial(_row_counts, run, logits, (1, 3)))
    yield Case(
        f"project {dtype}: into the cache against beside it", partial(_into, setting, numerics)
    )
    yield Case(f"dot {dtype}: against float64", partial(_accuracy, rows["dot"], x, weight))
    yield Case(
        f"attention {dtype}: decode against whole sequence", partial(_decode, setting, numerics)
    )


def _products_of_mosaic(setting: Setting) -> Iterator[Case]:
    """As `_gates`, of the only kernels that differ, and every tile against the first."""
    label = "pallas_mosaic_gpu dot bfloat16"
    if setting.without_mosaic:
        yield Case(label, lambda: {"left out": setting.without_mosaic})
        return
    numerics = setting.mosaic()
    sizes = (128, 128, (1, 7, 70)) if setting.smoke else _sizes(setting)
    counts, x, weight = _factors(numerics, *sizes)
    ops, default = kernels.family(numerics), dot(numerics)
    gated = jax.jit(lambda x: ops.gated_dot(x, weight, None, numerics=numerics))
    rows = {"dot": lambda x: default(x, weight), "gated_dot": gated}
    for name, run in rows.items():
        name = f"pallas_mosaic_gpu {name} bfloat16"
        yield Case(f"{name}: rows against row count", partial(_row_counts, run, x, counts))
        yield Case(f"{name}: place in the batch", partial(_places, run, x))
    yield Case(f"{label}: against float64", partial(_accuracy, rows["dot"], x, weight))

    def compare(tile):
        return {"passed": same_bits(dot(with_tile(numerics, tile))(x, weight), default(x, weight))}

    for tile in MOSAIC if not setting.smoke else ():
        yield Case(f"{label}: tile {text(tile)} against the default", partial(compare, tile))


def _row_counts(run, x, counts):
    whole = run(x)
    unequal = [n for n in counts if not same_bits(run(x[:n]), whole[:n])]
    tail = same_bits(run(x[-1:]), whole[-1:])
    return {"passed": not unequal and tail, "unequal at": unequal or "none"}


def _places(run, x):
    order = np.random.default_rng(0).permutation(x.shape[0])
    return {"passed": same_bits(run(x[order]), run(x)[order])}


def _accuracy(run, x, weight):
    x, found = x[:64], np.asarray(run(x[:64]), np.float64)
    exact = np.asarray(x.astype(jnp.float32), np.float64) @ np.asarray(
        weight.astype(jnp.float32), np.float64
    )
    error = float(np.abs(found - exact).max() / np.abs(exact).max())
    return {"passed": error < 1e-5, "largest error over largest value": error}


def _into(setting: Setting, numerics: Numerics):
    """A sampler's projection, which writes its keys and values, and a learner's, which does not."""
    heads = kernels.Heads(4, 2, 16) if setting.smoke else kernels.Heads(16, 8, 128)
    batch, span, size = (5, 16, heads.size) if setting.smoke else (70, 200, heads.size)
    y = normal(0, batch, (heads.query + 2 * heads.key) * size)
    angle = normal(1, batch, size // 2)
    optional = {"q_norm": normal(2, size), "k_norm": normal(3, size), "bias": normal(4, y.shape[1])}
    given = y, jnp.cos(angle), jnp.sin(angle), optional
    options = {"heads": heads, "eps": 1e-6, "numerics": numerics}
    shape, dtype = (batch, heads.key, size, span), numerics.dtype
    caches = normal(5, *shape, dtype=dtype), normal(6, *shape, dtype=dtype).swapaxes(2, 3)
    at = (7 * jnp.arange(batch, dtype=jnp.int32) % span)[:, None]
    found = jax.jit(partial(kernels.project_into, **options))(caches, at, None, *given)
    query, *rows = jax.jit(partial(kernels.family(numerics).project, **options))(*given)
    expected = query, *kernels.written(caches, [x[:, None] for x in rows], at, numerics=numerics)
    return {"passed": all(map(same_bits, found, expected))}


def _sequences(setting: Setting, numerics: Numerics) -> tuple[int, tuple[jax.Array, ...]]:
    """The length of whole sequences, and attention's query, key, value and positions of them."""
    heads, size = 2, 16 if setting.smoke else 128
    batch, length = (2, 24) if setting.smoke else (4, 1000)
    rows = length * _GROUP
    query = normal(5, batch, heads, rows, size, dtype=numerics.dtype) * size**-0.5
    key = normal(6, batch, heads, size, length, dtype=numerics.dtype)
    value = normal(7, batch, heads, length, size, dtype=numerics.dtype)
    at = jnp.broadcast_to(jnp.arange(rows)[None, :] // _GROUP, (batch, rows))
    return length, (query.astype(numerics.dtype), key, value, at)


def _decode(setting: Setting, numerics: Numerics):
    """Rows one at a time against longer caches, a batch cut in half, and the whole."""
    length, (query, key, value, at) = _sequences(setting, numerics)
    ops = kernels.family(numerics)
    attend = jax.jit(partial(ops.attention, numerics=numerics, aligned=False))
    whole = attend(query, key, value, at)
    longer = length + 70
    longer_key = jnp.pad(key, ((0, 0), (0, 0), (0, 0), (0, longer - length)))
    longer_value = jnp.pad(value, ((0, 0), (0, 0), (0, longer - length), (0, 0)))
    compared, unequal = 0, []
    for token in range(0, length, 7 if setting.smoke else 61):
        rows = slice(token * _GROUP, (token + 1) * _GROUP)
        one = attend(query[:, :, rows], longer_key, longer_value, at[:, rows])
        compared += 1
        if not same_bits(one, whole[:, :, rows]):
            unequal.append(token)
    half = attend(query[1:2], key[1:2], value[1:2], at[1:2])
    return {
        "passed": not unequal and compared > 2 and same_bits(half, whole[1:2]),
        "positions compared": compared,
        "unequal at": unequal[:5] or "none",
    }


def _sampler_attentions(setting: Setting) -> Iterator[Case]:
    """The attentions that only a divergent sampler has: Pallas, and Triton if installed."""
    for dtype in ("bfloat16", "float32"):
        plain = Numerics(compute_dtype=dtype)
        flash = replace(plain, attention="flash_interpreted" if setting.smoke else "flash")
        yield Case(f"flash attention {dtype}: against float64", partial(_attention, setting, flash))
        if not setting.smoke:
            yield Case(
                f"Triton attention {dtype}: against float64",
                partial(_attention, setting, replace(plain, attention="triton")),
            )


def _attention(setting: Setting, numerics: Numerics):
    """A prefill and a decode step of ragged lengths."""
    if numerics.attention == "triton":
        try:
            variants.check()
        except InputError as error:
            return {"left out": str(error)}
    length, (query, key, value, at) = _sequences(setting, numerics)
    attend = jax.jit(partial(kernels.attention, numerics=numerics, aligned=False))
    rows = slice((length - 5) * _GROUP, (length - 4) * _GROUP)
    exact = _attention_float64(query, key, value, at)
    errors = {
        "prefill": attend(query, key, value, at) - exact,
        "decode": attend(query[:, :, rows], key, value, at[:, rows]) - exact[:, :, rows],
    }
    largest = {name: float(np.abs(error).max()) for name, error in errors.items()}
    # In bfloat16 the weights are rounded to it before they meet the values.
    limit = 1e-5 if numerics.compute_dtype == "float32" else 2e-2
    return {"passed": max(largest.values()) < limit, **largest}


def _attention_float64(query, key, value, at) -> np.ndarray:
    query, key, value = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, key, value))
    visible = np.arange(key.shape[3])[None, None, None, :] <= np.asarray(at)[:, None, :, None]
    scores = np.where(visible, query @ key, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ value


def _tiles(setting: Setting) -> Iterator[Case]:
    """Every candidate tile against the first."""
    numerics = setting.exact("bfloat16")
    _, x, weight = _factors(numerics, *_sizes(setting))
    candidates = (MatmulTile(16, 16), MatmulTile(32, 32)) if setting.smoke else CANDIDATES

    def compare(tile):
        base = with_tile(numerics, candidates[0])
        found, expected = dot(with_tile(numerics, tile))(x, weight), dot(base)(x, weight)
        return {"passed": same_bits(found, expected)}

    for tile in candidates[1:]:
        yield Case(
            f"dot bfloat16: tile {text(tile)} against {text(candidates[0])}",
            partial(compare, tile),
        )
    if not setting.smoke:
        yield Case("dot bfloat16: steps of 128 against 64", lambda: _steps(numerics, x, weight))


def _steps(numerics: Numerics, x, weight):
    """A tensor core's sums are one chain, however much of it a step has."""
    tile = MatmulTile(128, 128, 8, 3)
    longer = replace(numerics, gpu=replace(numerics.gpu, block_k=128, matmul=(tile,)))
    return {"passed": same_bits(dot(longer)(x, weight), dot(numerics)(x, weight))}


def with_tile(numerics: Numerics, tile: MatmulTile) -> Numerics:
    """The same with this tile for all products."""
    tiles: GpuTiles = replace(numerics.gpu, matmul=(tile,))
    return replace(numerics, gpu=tiles)


def dot(numerics: Numerics):
    """Jitted (x [N, K], weight [K, M]) -> float32 [N, M]."""
    ops = kernels.family(numerics)
    return jax.jit(lambda x, weight: ops.dot(x, weight, numerics=numerics))


def text(tile: MatmulTile) -> str:
    """A tile for a table."""
    return f"{tile.rows}x{tile.columns}, {tile.warps} warps, {tile.stages} stages"


def _native(setting: Setting):
    """For information: what plain XLA does on this device."""
    counts, x, weight = _factors(setting.native("bfloat16"), *_sizes(setting))
    run = jax.jit(native.product)
    whole = run(x, weight)
    unequal = [n for n in counts if not same_bits(run(x[:n], weight), whole[:n])]
    return {"row counts with other bits": unequal or "none"}
