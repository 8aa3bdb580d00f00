"""How XLA's own elementwise functions depend on how many numbers they are given.

    JAX_PLATFORMS=cpu python scripts/xla_functions.py

Prints for each function the shapes at which a number's result has other bits than among 4,096
numbers, and the largest share of them; `strict.py` beside it, which must have none.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.numerics import strict

MANY = 4096
SHAPES = (*((n,) for n in range(1, 18)), (2, 8), (4, 8), (16, 8), (16, 64))
FUNCTIONS = {
    "exp": (jnp.exp, strict.exp, (-80.0, 0.0)),
    "log": (jnp.log, strict.log, (0.1, 1000.0)),
    "sigmoid": (jax.nn.sigmoid, strict.sigmoid, (-8.0, 8.0)),
    "1 / sqrt": (jax.lax.rsqrt, strict.inverse_root, (0.01, 100.0)),
}


def unequal(function, numbers: jax.Array, shape: tuple[int, ...]) -> float:
    """Share of `numbers` whose result in arrays of `shape` is not that among all of them."""
    run = jax.jit(function)
    size = int(np.prod(shape))
    whole = np.asarray(run(numbers)).view(np.int32)
    used = numbers.size // size * size
    parts = [run(part.reshape(shape)) for part in numbers[:used].reshape(-1, size)]
    found = np.concatenate([np.asarray(part).reshape(-1) for part in parts]).view(np.int32)
    return float(np.mean(found != whole[:used]))


def main() -> None:
    """Prints the table."""
    print(f"jax {jax.__version__}, {jax.default_backend()}, float32, {MANY:,} numbers\n")
    print("| function | of | shapes with other bits | largest share |\n|---|---|---|--:|")
    for name, (theirs, ours, (low, high)) in FUNCTIONS.items():
        numbers = jnp.asarray(np.random.default_rng(0).uniform(low, high, MANY), jnp.float32)
        for whose, function in (("XLA", theirs), ("strict", ours)):
            shares = {shape: unequal(function, numbers, shape) for shape in SHAPES}
            shapes = ", ".join("x".join(map(str, s)) for s, share in shares.items() if share)
            print(f"| {name} | {whose} | {shapes or 'none'} | {max(shares.values()):.2%} |")


if __name__ == "__main__":
    main()
