"""What the Pallas families for GPU and TPU share.

Padding, refusals by name, elementwise maths that runs inside kernels (on tiles, float32 [rows,
columns]), and `PallasFamily`, which makes a kernel family of bare kernels: it adds the fences, the
gradients and the epilogues.

The fences are for interpret mode, where a kernel is ordinary code that could be fused with its
surroundings; around a real kernel they cost nothing. Gradients, but those of attention, are of the
plain XLA expressions at the same inputs: accurate, and not bound by the exactness contract.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

from tim_jax.common.errors import InputError
from tim_jax.kernels import native
from tim_jax.kernels.families import NATIVE, Heads, parted
from tim_jax.numerics import Numerics

_BEFORE_AMPERE = ("5.", "6.", "7.")  # compute capabilities
PLATFORMS: Mapping[str, str] = MappingProxyType(
    {"pallas_gpu": "gpu", "pallas_mosaic_gpu": "gpu", "pallas_tpu": "tpu"}
)
PRIMITIVES = ("pallas_call", "mpmd_map")  # of a kernel's call in a jaxpr; the latter is Mosaic's
Rows = tuple[jax.Array, ...]  # each [1, columns]
LOG2_E = 1.4426950408889634

fence = jax.lax.optimization_barrier


def padded(x: jax.Array, tile: int, axis: int = 0, value: int | float = 0) -> jax.Array:
    """`x` with `value` appended to `axis` up to a multiple of `tile`."""
    missing = -x.shape[axis] % tile
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths, constant_values=value)


# Epilogues, see `Product`.


def alone(sums: Sequence[jax.Array]) -> jax.Array:
    """The product itself."""
    return sums[0]


def residual_sum(sums: Sequence[jax.Array], residual: jax.Array, bias: Rows = ()) -> jax.Array:
    """residual + (product + bias); bias: none, or one row."""
    product = sums[0]
    if bias:
        product = product + jnp.broadcast_to(bias[0], product.shape)
    return residual.astype(jnp.float32) + product


def gated(sums: Sequence[jax.Array], bias: Rows = ()) -> jax.Array:
    """silu(gate) * up; bias: none, or two rows."""
    gate, up = sums
    if bias:
        gate = gate + jnp.broadcast_to(bias[0], gate.shape)
        up = up + jnp.broadcast_to(bias[1], up.shape)
    return gate / (1.0 + jnp.exp(-gate)) * up


def turned(pair, angle, norm, *, eps: float, scale: float) -> tuple[jax.Array, jax.Array]:
    """The halves `pair` of a head [rows, D / 2], normed, rotated by `angle` = (cos, sin), scaled.

    `norm`: the halves of the norm's weight, [1, D / 2] each, or None.
    """
    first, second = pair
    shape = first.shape
    if norm is not None:
        squares = jnp.sum(first * first, axis=1) + jnp.sum(second * second, axis=1)
        factor = jax.lax.rsqrt(squares * (0.5 / shape[1]) + eps)
        factor = jnp.broadcast_to(factor[:, None], shape)
        first = first * factor * jnp.broadcast_to(norm[0], shape)
        second = second * factor * jnp.broadcast_to(norm[1], shape)
    cos, sin = angle
    return (first * cos - second * sin) * scale, (second * cos + first * sin) * scale


def block_of(limit: int, size: int, *, least: int, what: str) -> int:
    """The largest power of two up to `limit` that divides `size`; a block of `what`.

    It follows from the weight alone, so that it is the same for every number of rows.

    Raises:
      InputError: it is smaller than `least`.
    """
    found = min(limit, power_of_two_in(size))
    if found < least:
        raise InputError(
            f"numerics: kernels need {what} to be a multiple of {least}, got {size};"
            ' family "tiles" takes any size'
        )
    return found


def power_of_two_in(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size


def parts_of(size: int, most: int | None = None) -> list[slice]:
    """A head of this many numbers in powers of two, the largest first: what Triton's arrays have.

    None is larger than `most`, if that is given, which is a power of two.
    """
    sizes = [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
    if most is not None:
        sizes = [part for one in sizes for part in [min(one, most)] * max(one // most, 1)]
    ends = list(accumulate(sizes))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def inside(tile: jax.Array, rows: int, count: int) -> jax.Array:
    """Which rows of a GPU program's tile are among the `count` that there are, bool[rows]."""
    return tile * rows + jnp.arange(rows) < count


def masked(ref: Any, there: jax.Array, other: int | float = 0) -> jax.Array:
    """On a GPU, the rows of `ref` that are there, and `other` in place of those that are not."""
    shape = ref.shape
    rows = there.reshape(-1, *(1,) * (len(shape) - 1))
    return plt.load(ref, mask=jnp.broadcast_to(rows, shape), other=other)


def store(ref: Any, values: jax.Array, there: jax.Array) -> None:
    """On a GPU, writes the rows of `values` that are there, in the ref's dtype."""
    mask = jnp.broadcast_to(there.reshape(-1, *(1,) * (values.ndim - 1)), values.shape)
    plt.store(ref, values.astype(ref.dtype), mask=mask)


def in_blocks(x: jax.Array, expert: jax.Array, used: jax.Array, rows: int):
    """Tiles x [T, R, K] as blocks of this many rows, below each other, with `expert` and `used`.

    Of `PallasFamily.grouped_product`; of the blocks i32[blocks] and i32[1].
    """
    x = padded(x, rows, axis=1)
    of_tile = x.shape[1] // rows
    return x.reshape(-1, x.shape[2]), jnp.repeat(expert, of_tile), used[None] * of_tile


def check_platform(numerics: Numerics) -> None:
    """Raises InputError where these kernels cannot run, before anything is compiled."""
    wanted = PLATFORMS.get(numerics.family)
    if wanted is None or numerics.interpret:
        return
    actual = platform()
    if actual != wanted:
        raise InputError(
            f"numerics: family {numerics.family!r} needs a {wanted.upper()}, the default device is"
            f' of platform {actual!r}; use family "tiles" there, or interpret mode for tests'
        )
    capability = compute_capability() if actual == "gpu" else None
    if capability is not None and capability.startswith(_BEFORE_AMPERE):
        raise InputError(
            f"numerics: family {numerics.family!r} needs a GPU of compute capability 8.0 or more,"
            f' which XLA compiles Triton for, and this one has {capability}; use family "tiles"'
        )


def platform() -> str:
    """The platform of the abstract device that is lowered for, else of the default device."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def compute_capability() -> str | None:
    """That of the GPU that is traced for; None of an abstract device, which does not say."""
    if getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is not None:
        return None
    return getattr(jax.devices()[0], "compute_capability", None)


def gpu_call(
    kernel: Callable, *, numerics: Numerics, name: str, warps: int, stages: int = 1, **options: Any
) -> Callable:
    """`pl.pallas_call`, compiled by Triton, or interpreted if the numerics say so.

    A kernel that loads parts of its arguments in a loop should be given a `cost_estimate` (see
    `attention_cost`): a plan can count what is in the grid and its blocks, and nothing else.
    """
    check_platform(numerics)
    return pl.pallas_call(
        kernel,
        interpret=numerics.interpret,
        name=name,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        **options,
    )


def tpu_call(
    kernel: Callable,
    *,
    numerics: Numerics,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs: Any,
    out_shape: Any,
    scalars: int = 0,
    scratch: Sequence[tuple[int, ...]] = (),
    ordered: int | None = None,
    **options: Any,
) -> Callable:
    """`pl.pallas_call`, compiled by Mosaic, or interpreted if the numerics say so.

    The first `scalars` arguments are integers that the index maps may read. The last `ordered` axes
    of the grid run in order, as the steps of a sum; all other axes may run in any. If that is not
    given it is one axis with scratch (float32 arrays of vector memory), and none without.
    """
    check_platform(numerics)
    parallel = len(grid) - (bool(scratch) if ordered is None else ordered)
    semantics: Any = ("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel)
    return pl.pallas_call(
        kernel,
        interpret=numerics.interpret,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        **options,
    )


def attention_cost(
    *, multiplied: int, loaded: int, exponentials: int, programs: int
) -> pl.CostEstimate:
    """What programs of attention do at most, that is without the keys that a mask leaves out.

    Of one program: `multiplied` pairs of numbers of products, `loaded` and stored bytes.
    """
    return pl.CostEstimate(
        flops=2 * multiplied * programs,
        transcendentals=exponentials * programs,
        bytes_accessed=loaded * programs,
    )


def with_gradient(kernel: Callable, plain: Callable) -> Callable:
    """`kernel` between fences, with the gradient of `plain`."""

    def forward(*args):
        return fence(kernel(*fence(args)))

    def backward(args, cotangent):
        return jax.vjp(plain, *fence(args))[1](cotangent)

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *args: (forward(*args), args), backward)
    return call


@dataclass(frozen=True)
class Product:
    """What a kernel makes of rows and a weight, whose columns are `halves` parts of M each.

    The epilogue gets the `halves` tiles of the product, float32, and of each of the extras its
    part: of a "tile" [N, M] the tile, of a "bias" [halves, M] a tuple of `halves` rows.
    """

    name: str
    epilogue: Callable
    dtype: Any
    numerics: Numerics
    halves: int = 1


@dataclass(frozen=True)
class PallasFamily:
    """A family of `families.Kernels`, from bare kernels.

    product(x, weight, extras, what): a `Product` of x [N, K] and weight [K, halves * M], [N, M].
    grouped_product(x, weight, expert, used, what): the same, without extras, of tiles x [T, R, K]
        with weight [E, K, halves * M] at their experts, see `Kernels.grouped`.
    attend(query, key, value, positions, window=None, pages=None, *, numerics): attention in the
        compute dtype, and what its gradient takes beside that, or None.
    attend_gradient(query, key, value, positions, window, out, that, cotangent, *, numerics): the
        gradients of query, key and value.
    normed(x, weight, *, eps, numerics): RMSNorm.
    rotated(y, cos, sin, optional, *, heads, eps, numerics): query, key and value of `project`. On a
        GPU also with `into`: the query, and its caches with the keys and values in them.
    exponentials, row_sum, log, log_normaliser: as in the interface.
    """

    product: Callable[..., jax.Array]
    grouped_product: Callable[..., jax.Array]
    attend: Callable[..., tuple[jax.Array, jax.Array | None]]
    attend_gradient: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    normed: Callable[..., jax.Array]
    rotated: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    exponentials_kernel: Callable[..., jax.Array]
    row_sum_kernel: Callable[..., jax.Array]
    log_kernel: Callable[..., jax.Array]
    log_normaliser_kernel: Callable[..., jax.Array]
    takes_pages = True

    def fence(self, x: Any, /) -> Any:
        return fence(x)

    def dot(self, x: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
        def forward(x, weight):
            x, weight = fence((x, weight))
            what = Product("dot", alone, jnp.float32, numerics)
            return fence(self._columns(x, weight, [], what))

        call = jax.custom_vjp(forward)
        call.defvjp(lambda x, weight: (forward(x, weight), (x, weight)), native.dot_backward)
        return call(x, weight)

    def _columns(self, x, weight, extras, what: Product):
        """`product`; of a weight in column tiles [T, K, halves * M / T], one tile after the other.

        A "bias" lies as the product's columns do: of a weight in tiles [T, halves * M / T] or flat.
        """
        tiles = weight[None] if weight.ndim == 2 else weight
        of_tiles = {
            "tile": lambda extra: jnp.split(extra, len(tiles), axis=1),
            "bias": lambda extra: list(extra.reshape(len(tiles), what.halves, -1)),
        }
        parts = [[(kind, part) for part in of_tiles[kind](extra)] for kind, extra in extras]
        columns = [
            self.product(x, tile, [of_extra[index] for of_extra in parts], what)
            for index, tile in enumerate(fence(list(tiles)))
        ]
        return columns[0] if len(columns) == 1 else jnp.concatenate(fence(columns), axis=1)

    def dots(self, x: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
        return jax.vmap(partial(self.dot, numerics=numerics))(x, weight)

    def dot_add(self, x, weight, residual, bias, *, numerics: Numerics):
        what = Product("dot_add", residual_sum, numerics.dtype, numerics)

        def kernel(x, weight, residual, bias):
            return self._columns(x, weight, [("tile", residual), *_present(bias)], what)

        plain = partial(NATIVE.dot_add, numerics=numerics)
        return with_gradient(kernel, plain)(x, weight, residual, bias)

    def gated_dot(self, x, weight, bias, *, numerics: Numerics):
        what = Product("gated_dot", gated, numerics.dtype, numerics, halves=2)

        def kernel(x, weight, bias):
            return self._columns(x, weight, _present(bias), what)

        return with_gradient(kernel, partial(NATIVE.gated_dot, numerics=numerics))(x, weight, bias)

    def grouped(self, x, gate_up, down, expert, filled, *, numerics: Numerics):
        used = jnp.sum(filled > 0)

        def product(x, weight, what):
            return fence(self.grouped_product(*fence((x, weight, expert, used)), what))

        gating = Product("grouped_gated_dot", gated, numerics.dtype, numerics, halves=2)
        plain = Product("grouped_dot", alone, jnp.float32, numerics)
        return product(product(x, gate_up, gating), down, plain)

    def norm(self, x: jax.Array, weight: jax.Array, *, eps: float, numerics: Numerics):
        options = {"eps": eps, "numerics": numerics}
        return with_gradient(partial(self.normed, **options), partial(NATIVE.norm, **options))(
            x, weight
        )

    def project(
        self, y, cos, sin, optional, *, heads: Heads, eps: float, numerics: Numerics, into=None
    ):
        """Of the interface; with `into` (`families.Into`, on a GPU) what `rotated` returns then,
        without a gradient."""
        options = {"heads": heads, "eps": eps, "numerics": numerics}

        def whole(columns):
            """[N, M] with the parts of all column tiles beside each other."""
            if numerics.column_tiles == 1:
                return columns
            shares = (heads.query, heads.key, heads.key)
            return jnp.concatenate(parted(columns, numerics.column_tiles, shares), axis=1)

        def kernel(y, cos, sin, optional, **into):
            y = whole(y)
            if "bias" in optional:
                optional = optional | {"bias": whole(optional["bias"].reshape(1, -1))[0]}
            return self.rotated(y, cos, sin, optional, **options, **into)

        if into is not None:
            *given, into = fence((y, cos, sin, optional, into))
            return fence(kernel(*given, into=into))
        return with_gradient(kernel, partial(NATIVE.project, **options))(y, cos, sin, optional)

    def attention(
        self,
        query,
        key,
        value,
        positions,
        *,
        numerics: Numerics,
        aligned: bool,
        window=None,
        pages=None,
        runs=native.RUNS,
    ):
        del runs  # a kernel's loops end where a row sees no further key

        def kernel(*args):
            return fence(self.attend(*fence(args), numerics=numerics))

        def forward(*args):
            return kernel(*args)[0]

        if pages is not None:
            return forward(query, key, value, positions, window, pages)

        def backward(residuals, cotangent):
            gradient = partial(self.attend_gradient, numerics=numerics)
            return (*fence(gradient(*fence((*residuals, cotangent)))), None, None)

        def kept(*args):
            out, normaliser = kernel(*args)
            return out, (*args, out, normaliser)

        call = jax.custom_vjp(forward)
        call.defvjp(kept, backward)
        return call(query, key, value, positions, window)

    def peak(self, x: jax.Array, /) -> jax.Array:
        """By XLA: a maximum has no rounding, so that any order will do."""
        return jnp.max(x, axis=-1)

    def exponentials(self, x: jax.Array, peak: jax.Array, *, numerics: Numerics):
        return _fenced(self.exponentials_kernel, x, peak, numerics=numerics)

    def row_sum(self, x: jax.Array, *, numerics: Numerics):
        return _fenced(self.row_sum_kernel, x, numerics=numerics)

    def log(self, x: jax.Array, *, numerics: Numerics):
        return _fenced(self.log_kernel, x, numerics=numerics)

    def log_normaliser(self, x, peak, weights, *, numerics: Numerics):
        """In one pass over `x`; the exponentials are not kept."""
        del weights
        return _fenced(self.log_normaliser_kernel, x, peak, numerics=numerics)


def _present(bias: jax.Array | None) -> list[tuple[str, jax.Array]]:
    return [] if bias is None else [("bias", bias)]


def _fenced(kernel, *args, numerics: Numerics):
    return fence(kernel(*fence(args), numerics=numerics))
