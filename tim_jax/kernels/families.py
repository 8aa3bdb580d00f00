"""What a kernel family is: the operations of the forward, as a type; and those of plain XLA.

N rows (tokens), K and M the sizes of a weight matrix, H query heads, Kv key heads, D head size,
V vocabulary. "compute" is the compute dtype of the numerics.

The families "tiles" and "native" are composed in the same way of a dot, an attention, a sum and
elementary functions (`Maths`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.kernels import formulas, native, tiles
from tim_jax.numerics import Numerics, strict


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


@dataclass(frozen=True)
class Composed:
    """A family of `Kernels`, made of the functions of `tiles` or `native`."""

    fence: Callable[[Any], Any]
    maths: formulas.Maths
    peak: Callable[..., jax.Array]
    unit: Callable[[Callable, Callable], Callable]
    dot: Callable[..., jax.Array]
    dots: Callable[..., jax.Array]
    attention: Callable[..., jax.Array]
    takes_pages = False

    def _in_both(self, formula: Callable) -> Callable:
        """A unit of formula(*args, maths) by the family's maths, with the gradient by XLA's."""
        return self.unit(partial(formula, maths=self.maths), partial(formula, maths=native.MATHS))

    def norm(self, x: jax.Array, weight: jax.Array, *, eps: float, numerics: Numerics):
        def norm(x, weight, maths):
            lanes = numerics.order.lanes
            y = formulas.rms_norm(x, weight, eps=eps, lanes=lanes, maths=maths)
            return strict.rounded(y, numerics.dtype)

        return self._in_both(norm)(x, weight)

    def dot_add(self, x, weight, residual, bias, *, numerics: Numerics):
        def add(x, y, bias):
            y = y if bias is None else y + jnp.broadcast_to(bias, y.shape)
            return strict.rounded(x.astype(jnp.float32) + y, numerics.dtype)

        return self.unit(add, add)(residual, self._reduced(x, weight, numerics), bias)

    def _reduced(self, x: jax.Array, weight: jax.Array, numerics: Numerics) -> jax.Array:
        """x @ weight, as a sum of partial products of `order.ranks` ranks."""
        order, product = numerics.order, partial(self.dot, numerics=numerics)
        if order.ranks == 1:
            return product(x, weight)
        dtype = numerics.compute_dtype if order.exchange == "compute" else "float32"
        return formulas.split_k(product, x, weight, pieces=order.ranks, dtype=dtype)

    def gated_dot(self, x, weight, bias, *, numerics: Numerics):
        gating = partial(gated, numerics=numerics)
        return self._in_both(gating)(self.dot(x, weight, numerics=numerics), bias)

    def grouped(self, x, gate_up, down, expert, filled, *, numerics: Numerics):
        rows = x.shape[1]
        least = rows if numerics.family == "native" else numerics.expert_rows(x.shape[2])
        sizes = [size for size in (rows // 4, rows // 2) if size >= least] + [rows]

        def products(tile, expert):
            own = (
                jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)
                for weights in (gate_up, down)
            )
            tile, own_gate_up, own_down = self.fence((tile, *own))
            hidden = self.gated_dot(tile, own_gate_up, None, numerics=numerics)
            return self.fence(self.dot(hidden, own_down, numerics=numerics))

        def of_rows(size, tile, expert):
            if size == 0:
                return jnp.zeros((rows, down.shape[-1]), jnp.float32)
            return jnp.pad(products(tile[:size], expert), ((0, rows - size), (0, 0)))

        # Few rows take less time than the whole tile, and have the same bits.
        branches = [partial(of_rows, size) for size in (0, *sizes)]
        enough = jnp.searchsorted(jnp.array([0, *sizes]), filled, method="compare_all")
        of_tiles = self.fence((enough, x, expert))
        return jax.lax.map(lambda t: jax.lax.switch(t[0], branches, *t[1:]), of_tiles)

    def project(self, y, cos, sin, optional, *, heads: Heads, eps: float, numerics: Numerics):
        shares = (heads.query, heads.key, heads.key)
        rms_norm = partial(formulas.rms_norm, eps=eps, lanes=numerics.order.lanes)

        def project(y, cos, sin, optional, maths):
            if "bias" in optional:
                y = y + jnp.broadcast_to(optional["bias"].reshape(-1), y.shape)
            query, key, value = parted(y, numerics.column_tiles, shares)
            query = query.reshape(-1, heads.query, heads.size)
            key = key.reshape(-1, heads.key, heads.size)
            if "q_norm" in optional:
                query = rms_norm(query, optional["q_norm"], maths=maths)
                key = rms_norm(key, optional["k_norm"], maths=maths)
            query = formulas.rotate(query, cos, sin, maths=maths) * heads.size**-0.5
            key = formulas.rotate(key, cos, sin, maths=maths)
            value = value.reshape(-1, heads.key, heads.size)
            return tuple(strict.rounded(part, numerics.dtype) for part in (query, key, value))

        return self._in_both(project)(y, cos, sin, optional)

    def exponentials(self, x: jax.Array, peak: jax.Array, *, numerics: Numerics):
        narrowed = _narrowed(numerics)
        return narrowed(self.fence(self.maths.exp(narrowed(x - peak[:, None]))))

    def row_sum(self, x: jax.Array, *, numerics: Numerics):
        return _narrowed(numerics)(self.fence(self.maths.total(x, lanes=numerics.order.lanes)))

    def log(self, x: jax.Array, *, numerics: Numerics):
        return _narrowed(numerics)(self.fence(self.maths.log(x)))

    def log_normaliser(self, x, peak, weights, *, numerics: Numerics):
        del x, peak
        return self.log(self.row_sum(weights, numerics=numerics), numerics=numerics)


def elementwise(formula: Callable, numerics: Numerics) -> Callable:
    """formula(*args, maths) as a unit of any family, with the gradient by XLA's maths.

    For what no kernel computes: the operations are those of "tiles", whose bits depend on nothing
    beside them, or of "native".
    """
    plain = partial(formula, maths=native.MATHS)
    if numerics.family == "native":
        return plain
    return tiles.unit(partial(formula, maths=tiles.MATHS), plain)


def gated(
    y: jax.Array, bias: jax.Array | None = None, *, numerics: Numerics, maths: formulas.Maths
) -> jax.Array:
    """silu(gate) * up of the joint product y = (gate, up) float32 [N, 2 M], rounded to compute."""
    y = y if bias is None else y + jnp.broadcast_to(bias.reshape(-1), y.shape)
    gate, up = parted(y, numerics.column_tiles, (1, 1))
    return strict.rounded(formulas.gated_silu(gate, up, maths=maths), numerics.dtype)


def _narrowed(numerics: Numerics):
    """Rounds a step of the vocabulary's softmax to its dtype; nothing for float32."""
    return partial(formulas.narrowed, dtype=numerics.precision.softmax)


def parted(y: jax.Array, tiles: int, shares: tuple[int, ...]) -> list[jax.Array]:
    """Splits joint columns [N, M] by shares; each column tile has its share of every part."""
    sizes = np.cumsum(shares[:-1]) * (y.shape[1] // tiles // sum(shares))
    if tiles == 1:
        return jnp.split(y, sizes, axis=-1)
    parts = jnp.split(y.reshape(y.shape[0], tiles, -1), sizes, axis=-1)
    return [part.reshape(y.shape[0], -1) for part in parts]


TILES = Composed(
    tiles.fence, tiles.MATHS, tiles.peak, tiles.unit, tiles.dot, tiles.dots, tiles.attention
)
NATIVE = Composed(
    native.fence, native.MATHS, native.peak, native.unit, native.dot, native.dots, native.attention
)
