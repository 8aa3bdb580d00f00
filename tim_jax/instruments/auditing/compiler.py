"""Whether the compiler at hand computes right gradients: the audit's canary.

Sampler and learner can agree to the bit on a compiler that is wrong. Here the gradients of each
unit of the forward are computed in several ways and compared with formulas in float64 NumPy
(`derivatives`). The sizes are those at which compilers choose other methods: XLA:CPU of jaxlib
0.10.2 is right up to 32,768 float32 elements, and beyond them wrong by the gradient's own size
(jax-ml/jax issue 39103).

    for result in check_gradients(NATIVE_F32):
        print(result.unit, result.way, result.error)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as Spec

from tim_jax import kernels
from tim_jax.instruments.auditing import derivatives
from tim_jax.instruments.auditing.derivatives import Gradients
from tim_jax.kernels import Heads
from tim_jax.model.execution import Sampling, jit
from tim_jax.numerics import Numerics
from tim_jax.policy import distribution

# By the largest element of a gradient. Rounding takes a tenth of that or less; a wrong program is
# off by the order of 1, as the numbers are random.
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}
_EPS = 1e-6
_TEMPERATURE = 0.7


@dataclass(frozen=True)
class GradientResult:
    """One unit's gradients, computed in one way."""

    unit: str
    way: str
    numerics: str  # family and dtype
    error: float  # largest |difference|, by the largest element of the right gradient
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; one that is not a number is not."""
        return self.error <= self.bound


class Extent(NamedTuple):
    """How much a unit computes: `examples` of `rows` tokens, of vectors of `width` elements."""

    examples: int = 240
    rows: int = 17
    width: int = 16  # a multiple of 4


_SHORT = Extent()


class Unit(NamedTuple):
    """An operation of the forward with its inputs, and its gradients by formula.

    The examples share the weights; inputs and output have a leading axis of examples.
    """

    name: str
    call: Callable[[tuple, tuple], jax.Array]  # of weights and inputs
    weights: tuple[jax.Array, ...]
    inputs: tuple[jax.Array, ...]
    gradients: Callable[..., Gradients]  # of weights, inputs and cotangent, in float64


class _Draw(NamedTuple):
    """Random numbers in the dtypes of some numerics."""

    rng: np.random.Generator
    numerics: Numerics

    def __call__(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> jax.Array:
        """An array of the compute dtype."""
        values = mean + scale * self.rng.standard_normal(shape)
        return jnp.asarray(values, self.numerics.dtype)

    def vector(self, *shape: int, mean: float = 0.0) -> jax.Array:
        """A float32 array; in float32 are norms, biases and sums."""
        return jnp.asarray(mean + 0.3 * self.rng.standard_normal(shape), jnp.float32)


def of_backward(numerics: Numerics) -> Numerics:
    """The numerics by which XLA compiles a backward; `check_gradients` of them stands for it.

    The backward of every family is that of "native", but for attention's by Pallas kernels.
    """
    return Numerics(
        family="native",
        compute_dtype=numerics.compute_dtype,
        compiler_options=numerics.compiler_options,
    )


@cache
def check_gradients(numerics: Numerics, extent: Extent = _SHORT) -> tuple[GradientResult, ...]:
    """The gradients of all units, in all ways, against float64; once per process.

    The ways are those of a learner: at once ("plain"), over micro-batches in a loop ("scan") and
    over the devices of this process, if there are several ("sharded"). Users have two more: a
    gradient for each example ("vmap") and Jacobians ("jacrev", in float32 alone).
    It takes seconds, nearly all of it compilation.

    Args:
      numerics: of the family "tiles" or "native", with one column tile.
      extent: how much is computed.
    """
    return tuple(
        result for unit in units(numerics, extent) for result in _check(unit, numerics, extent)
    )


def units(numerics: Numerics, extent: Extent) -> tuple[Unit, ...]:
    """The units of the forward with random inputs, in the dtypes that they have in a model."""
    draw = _Draw(np.random.default_rng(0), numerics)
    return (*_products(draw, extent), *_of_attention(draw, extent), _head(draw, extent))


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _products(draw: _Draw, extent: Extent) -> Iterator[Unit]:
    """RMSNorm, and the products with weight matrices."""
    numerics, ops = draw.numerics, kernels.family(draw.numerics)
    examples, rows, width = extent
    rows_of = partial(draw, examples, rows)

    def by_rows(operation: Callable) -> Callable[[tuple, tuple], jax.Array]:
        def call(weights, inputs):
            out = operation(weights, tuple(map(_flat, inputs)))
            return out.reshape(*inputs[0].shape[:2], -1)

        return call

    def matrix(columns: int) -> jax.Array:
        return draw(width, columns, scale=width**-0.5)

    yield Unit(
        "norm",
        by_rows(lambda w, x: ops.norm(*x, *w, eps=_EPS, numerics=numerics)),
        (draw.vector(width, mean=1.0),),
        (rows_of(width),),
        partial(derivatives.norm, eps=_EPS),
    )
    yield Unit(
        "dot",
        by_rows(lambda w, x: ops.dot(*x, *w, numerics=numerics)),
        (matrix(width),),
        (rows_of(width),),
        derivatives.dot,
    )
    yield Unit(
        "dot_add",
        by_rows(lambda w, x: ops.dot_add(x[0], w[0], x[1], w[1], numerics=numerics)),
        (matrix(width), draw.vector(width)),
        (rows_of(width), rows_of(width)),
        derivatives.dot_add,
    )
    yield Unit(
        "gated_dot",
        by_rows(lambda w, x: ops.gated_dot(*x, *w, numerics=numerics)),
        (matrix(2 * width), draw.vector(2 * width)),
        (rows_of(width),),
        derivatives.gated_dot,
    )


def _of_attention(draw: _Draw, extent: Extent) -> Iterator[Unit]:
    """The projection with its rotation, and attention, with 4 heads of queries and 2 of keys."""
    numerics, ops = draw.numerics, kernels.family(draw.numerics)
    examples, rows, width = extent
    heads = Heads(4, 2, width // 2)
    angles = np.arange(rows)[:, None] * 100.0 ** -np.linspace(0, 1, heads.size // 2)

    def project(weights, inputs):
        cos, sin = (
            _flat(jnp.tile(jnp.asarray(part, jnp.float32), (len(inputs[0]), 1, 1)))
            for part in (np.cos(angles), np.sin(angles))
        )
        bias, q_norm, k_norm = weights
        optional = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm}
        parts = ops.project(
            _flat(inputs[0]), cos, sin, optional, heads=heads, eps=_EPS, numerics=numerics
        )
        joint = jnp.concatenate([part.reshape(len(part), -1) for part in parts], axis=-1)
        return joint.reshape(inputs[0].shape)

    columns = (heads.query + 2 * heads.key) * heads.size
    norms = (draw.vector(heads.size, mean=1.0), draw.vector(heads.size, mean=1.0))
    yield Unit(
        "project",
        project,
        (draw.vector(columns), *norms),
        (draw.vector(examples, rows, columns),),
        partial(derivatives.project, angles=angles, heads=heads[:2], eps=_EPS),
    )

    def attend(weights, inputs):
        del weights
        positions = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), 2)
        positions = jnp.broadcast_to(positions, (len(inputs[0]), 2 * rows))
        query, key, value = inputs
        out = ops.attention(query, key, value, positions, numerics=numerics, aligned=True)
        return out.astype(jnp.float32)

    yield Unit(
        "attention",
        attend,
        (),
        (
            draw(examples, heads.key, 2 * rows, heads.size, scale=heads.size**-0.5),
            draw(examples, heads.key, heads.size, rows),
            draw(examples, heads.key, rows, heads.size),
        ),
        derivatives.attention,
    )


def _head(draw: _Draw, extent: Extent) -> Unit:
    """Log-probs of a vocabulary of 4 times the width, and the product with the head."""
    numerics, ops = draw.numerics, kernels.family(draw.numerics)
    examples, rows, width = extent
    tokens = draw.rng.integers(0, 4 * width, rows)
    sampling = Sampling(rows, temperature=_TEMPERATURE)

    def call(weights, inputs):
        logits = ops.dot(_flat(*inputs), *weights, numerics=numerics)
        chosen = jnp.tile(jnp.asarray(tokens, jnp.int32), len(inputs[0]))
        found = distribution.log_prob(logits, chosen, sampling=sampling, numerics=numerics)
        return found.reshape(-1, rows)

    return Unit(
        "log_prob",
        call,
        (draw(width, 4 * width, scale=width**-0.5),),
        (draw(examples, rows, width),),
        partial(derivatives.log_prob, tokens=tokens, temperature=_TEMPERATURE),
    )


def _check(unit: Unit, numerics: Numerics, extent: Extent) -> Iterator[GradientResult]:
    out = jax.eval_shape(unit.call, unit.weights, unit.inputs)
    cotangent = _Draw(np.random.default_rng(1), numerics)(*out.shape).astype(out.dtype)
    exact = unit.gradients(*_f64((unit.weights, unit.inputs, cotangent)))
    whole = tuple(gradient.sum(0) for gradient in exact[0]), exact[1]
    arguments = unit.weights, unit.inputs, cotangent

    def result(way: str, found: Gradients, right: Gradients) -> GradientResult:
        words = f"{numerics.family} {numerics.compute_dtype}"
        return GradientResult(
            unit.name, way, words, _error(found, right), BOUNDS[numerics.compute_dtype]
        )

    yield result("plain", jit(partial(_plain, unit), numerics)(*arguments), whole)
    yield result("scan", jit(partial(_scanned, unit), numerics)(*arguments), whole)
    yield result("vmap", jit(partial(_mapped, unit), numerics)(*arguments), exact)
    if numerics.compute_dtype == "float32":  # XLA:CPU refuses bfloat16 products of such shapes
        yield result("jacrev", *_jacobians(unit, numerics))
    devices = _devices(extent)
    if len(devices) > 1:
        on = Mesh(np.array(devices), ("rows",))
        sharded = jit(partial(_sharded, unit, on), numerics)
        yield result(f"sharded by {len(devices)}", sharded(*arguments), whole)


def _plain(unit: Unit, weights, inputs, cotangent):
    return jax.vjp(unit.call, weights, inputs)[1](cotangent)


def _of_example(unit: Unit, weights, inputs, cotangent):
    """Gradients of one example, whose arrays have no axis of examples."""

    def call(weights, inputs):
        return unit.call(weights, jax.tree.map(lambda x: x[None], inputs))[0]

    return jax.vjp(call, weights, inputs)[1](cotangent)


def _mapped(unit: Unit, weights, inputs, cotangent):
    return jax.vmap(partial(_of_example, unit), (None, 0, 0))(weights, inputs, cotangent)


def _scanned(unit: Unit, weights, inputs, cotangent):
    def add(total, example):
        of_weights, of_inputs = _of_example(unit, weights, *example)
        return jax.tree.map(jnp.add, total, _f32(of_weights)), of_inputs

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), weights)
    return jax.lax.scan(add, nothing, (inputs, cotangent))


def _sharded(unit: Unit, on: Mesh, weights, inputs, cotangent):
    def local(weights, inputs, cotangent):
        of_weights, of_inputs = _plain(unit, weights, inputs, cotangent)
        return jax.lax.psum(_f32(of_weights), "rows"), of_inputs

    rows = Spec("rows")
    return jax.shard_map(
        local, mesh=on, in_specs=(Spec(), rows, rows), out_specs=(Spec(), rows), check_vma=False
    )(weights, inputs, cotangent)


def _jacobians(unit: Unit, numerics: Numerics) -> tuple[Gradients, Gradients]:
    """`jax.jacrev` of the first example's output, and the formula at all unit cotangents."""
    first = jax.tree.map(lambda x: x[:1], unit.inputs)

    def call(weights, inputs):
        return unit.call(weights, inputs).reshape(-1)

    found = jit(jax.jacrev(call, (0, 1)), numerics)(unit.weights, first)
    shape = jax.eval_shape(unit.call, unit.weights, first).shape
    each = np.eye(np.prod(shape)).reshape(-1, *shape[1:])
    weights, inputs = _f64((unit.weights, first))
    of_weights, of_inputs = unit.gradients(weights, inputs, each)
    return found, (of_weights, tuple(gradient[:, None] for gradient in of_inputs))


def _devices(extent: Extent) -> list[Any]:
    """As many devices of this process as divide the examples."""
    devices = jax.local_devices()
    return devices[: np.gcd(extent.examples, 1 << (len(devices).bit_length() - 1))]


def _f32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _f64(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(_f32(x)).astype(np.float64), tree)


def _error(found: Gradients, right: Gradients) -> float:
    """The largest error of any array, relative to its largest element; NaN if there is one."""
    errors = [
        np.max(np.abs(ours - exact)) / np.max(np.abs(exact))
        for ours, exact in zip(jax.tree.leaves(_f64(found)), jax.tree.leaves(right), strict=True)
    ]
    return float(np.max(errors))
