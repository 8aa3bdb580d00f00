"""From how many keys on XLA:CPU adds up attention's products in another order, in float32.

    JAX_PLATFORMS=cpu python scripts/xla_products.py

For heads of several sizes and several numbers of rows: scores of the first 32 keys among more keys
are compared with those among 32, and mixtures of which half of the keys weigh nothing with those of
the other half alone.
"""

import bench_common as common
import jax
import numpy as np

from tim_jax.kernels import native, tiles

SIZES, ROWS, BLOCK = (32, 64, 128), (2, 8, 48), 32
KEYS = (64, 128, 256, 288, 384, 512, 544, 768, 1024, 1056, 2048)


@jax.jit
def scores(query, key):
    return tiles.fence(native.scores(*native.pin(query, key)))


@jax.jit
def mixtures(weights, value):
    return tiles.fence(native.mix(*native.pin(weights, value)))


def first_other(size: int, rows: int) -> tuple[int | None, int | None]:
    """The smallest number of keys at which scores, and at which mixtures, have other bits."""
    draw = np.random.default_rng(0)
    shape, most = (2, 4), KEYS[-1]
    query = draw.standard_normal((*shape, rows, size), np.float32)
    key = draw.standard_normal((*shape, size, most), np.float32)
    value = draw.standard_normal((*shape, most, size), np.float32)
    weights = draw.random((*shape, rows, most), np.float32)
    alone = np.asarray(scores(query, key[..., :BLOCK])).tobytes()
    found: list[int | None] = [None, None]
    for keys in KEYS:
        among = np.asarray(scores(query, key[..., :keys]))[..., :BLOCK]
        if found[0] is None and among.tobytes() != alone:
            found[0] = keys
        half = np.where(np.arange(keys) < keys // 2, weights[..., :keys], 0.0).astype(np.float32)
        whole = np.asarray(mixtures(half, value[:, :, :keys]))
        part = mixtures(half[..., : keys // 2], value[:, :, : keys // 2])
        if found[1] is None and whole.tobytes() != np.asarray(part).tobytes():
            found[1] = keys
    return found[0], found[1]


def main() -> None:
    print(f"{common.cpu_model()}; jax {jax.__version__}; up to {KEYS[-1]:,} keys")
    for size in SIZES:
        for rows in ROWS:
            of_scores, of_mixtures = first_other(size, rows)
            print(
                f"heads of {size}, {rows} rows: scores from {of_scores or 'no'} keys on,"
                f" mixtures from {of_mixtures or 'no'} keys on"
            )


if __name__ == "__main__":
    main()
