"""What a kernel family is: the operations of the forward, as a type.

N rows (tokens), K and M the sizes of a weight matrix, H query heads, Kv key heads, D head size,
V vocabulary. "compute" is the compute dtype of the numerics.
"""

from typing import Any, NamedTuple, Protocol

import jax

from tim_jax.numerics import Numerics


class Heads(NamedTuple):
    """How a joint projection is divided."""

    query: int
    key: int
    size: int


class Into(NamedTuple):
    """Where a projection's keys and values go."""

    caches: tuple[jax.Array, jax.Array]  # keys [pages, Kv, D, S] and values [pages, Kv, S, D]
    # i32[N], the page of each row; None: a page has as many of the N rows as any other, in order
    pages: jax.Array | None
    positions: jax.Array  # i32[N], of each row in its page


class Kernels(Protocol):
    """One family. Everything but the head's operations is differentiable."""

    @property
    def takes_pages(self) -> bool:
        """Whether attention reads keys and values from pages."""
        ...

    def fence(self, x: Any, /) -> Any:
        """`x`, through which the compiler moves nothing."""
        ...

    def dot(self, x: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
        """x [N, K] @ weight [K, M] -> float32 [N, M], compute dtype in."""
        ...

    def dots(self, x: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
        """x [H, N, K] @ weight [H, K, M] -> float32 [H, N, M], each as `dot`."""
        ...

    def dot_add(
        self,
        x: jax.Array,
        weight: jax.Array,
        residual: jax.Array,
        bias: jax.Array | None,
        *,
        numerics: Numerics,
    ) -> jax.Array:
        """residual [N, M] + (x @ weight + bias), summed in float32, rounded to compute."""
        ...

    def gated_dot(
        self, x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, numerics: Numerics
    ) -> jax.Array:
        """silu(gate) * up of x @ weight [K, 2 M] = (gate, up), rounded to compute [N, M]."""
        ...

    def grouped(
        self,
        x: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
        expert: jax.Array,
        filled: jax.Array,
        *,
        numerics: Numerics,
    ) -> jax.Array:
        """Tiles of rows, each through its expert: compute [T, R, d] -> float32 [T, R, d].

        Of a tile they are the `gated_dot` with gate_up [E, d, 2 M] and of that the `dot` with down
        [E, M, d], at index expert[t] of i32[T]. The first filled[t] rows of a tile count; what is
        returned for the others means nothing. Tiles without rows come last, and are passed over.
        Without a gradient.
        """
        ...

    def norm(self, x: jax.Array, weight: jax.Array, *, eps: float, numerics: Numerics) -> jax.Array:
        """RMSNorm of x [N, d] with weight float32 [d], rounded to compute."""
        ...

    def project(
        self,
        y: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        optional: dict[str, jax.Array],
        *,
        heads: Heads,
        eps: float,
        numerics: Numerics,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value, [N, H or Kv, D] in compute, of y float32 [N, (H + 2 Kv) D].

        Query and key are normed (if `optional` has "q_norm" and "k_norm"), rotated by cos and sin
        [N, D / 2]; the query is scaled by D^-1/2. "bias" is added first, if there is one.
        """
        ...

    def attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        positions: jax.Array,
        *,
        numerics: Numerics,
        aligned: bool,
        window: jax.Array | None = None,
        pages: jax.Array | None = None,
        runs: int = ...,
    ) -> jax.Array:
        """See `tiles.attention`. Float32, or already rounded to compute.

        `pages`, for families that take them: see `kernels.attention`. Then without a gradient.
        """
        ...

    def peak(self, x: jax.Array, /) -> jax.Array:
        """Maximum over the last axis of float32 [N, V]."""
        ...

    def exponentials(self, x: jax.Array, peak: jax.Array, *, numerics: Numerics) -> jax.Array:
        """exp(x - peak) of x float32 [N, V] and peak [N]."""
        ...

    def row_sum(self, x: jax.Array, *, numerics: Numerics) -> jax.Array:
        """Sum over the last axis of float32 [N, V]."""
        ...

    def log(self, x: jax.Array, *, numerics: Numerics) -> jax.Array:
        """Natural logarithm of float32 [N]."""
        ...

    def log_normaliser(
        self, x: jax.Array, peak: jax.Array, weights: jax.Array, *, numerics: Numerics
    ) -> jax.Array:
        """log(sum(exp(x - peak))), float32 [N]. `weights` are those exponentials, for families that
        would otherwise compute them twice."""
        ...
