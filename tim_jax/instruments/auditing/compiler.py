"""Whether the compiler at hand computes right gradients: the audit's canary.

Sampler and learner can agree to the bit on a compiler that is wrong. Here the gradients of each
unit of the forward are computed in several ways and compared with formulas in float64 NumPy. The
sizes are those at which compilers choose other methods: XLA:CPU of jaxlib 0.10.2 is right up to
32,768 float32 elements, and beyond them wrong by the gradient's own size (jax-ml/jax issue 39103).

    for result in check_gradients(NATIVE_F32):
        print(result.unit, result.way, result.error)

A formula (`*_gradients`) takes a unit's inputs with a leading axis B of examples, its weights
without, and the cotangent of its output. It returns the gradients of the weights, one for each
example, and of the inputs. `c` is the cotangent of an output, `d_x` that of x.
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
from tim_jax.kernels import Heads
from tim_jax.model.execution import Sampling, jit
from tim_jax.numerics import Numerics
from tim_jax.policy import distribution

Array = np.ndarray[Any, np.dtype[np.float64]]
Arrays = tuple[Array, ...]
Gradients = tuple[Arrays, Arrays]  # of the weights, of the inputs
# By the largest element of a gradient. Rounding takes a tenth of that or less; a wrong program is
# off by the order of 1, as the numbers are random.
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
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

    norm = by_rows(lambda w, x: ops.norm(*x, *w, eps=_EPS, numerics=numerics))
    weight, gradients = draw.vector(width, mean=1.0), partial(norm_gradients, eps=_EPS)
    yield Unit("norm", norm, (weight,), (rows_of(width),), gradients)
    dot = by_rows(lambda w, x: ops.dot(*x, *w, numerics=numerics))
    yield Unit("dot", dot, (matrix(width),), (rows_of(width),), dot_gradients)
    add = by_rows(lambda w, x: ops.dot_add(x[0], w[0], x[1], w[1], numerics=numerics))
    weights, inputs = (matrix(width), draw.vector(width)), (rows_of(width), rows_of(width))
    yield Unit("dot_add", add, weights, inputs, dot_add_gradients)
    gated = by_rows(lambda w, x: ops.gated_dot(*x, *w, numerics=numerics))
    weights = (matrix(2 * width), draw.vector(2 * width))
    yield Unit("gated_dot", gated, weights, (rows_of(width),), gated_dot_gradients)


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
    gradients = partial(project_gradients, angles=angles, heads=heads[:2], eps=_EPS)
    weights, inputs = (draw.vector(columns), *norms), (draw.vector(examples, rows, columns),)
    yield Unit("project", project, weights, inputs, gradients)

    def attend(weights, inputs):
        del weights
        positions = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), 2)
        positions = jnp.broadcast_to(positions, (len(inputs[0]), 2 * rows))
        query, key, value = inputs
        out = ops.attention(query, key, value, positions, numerics=numerics, aligned=True)
        return out.astype(jnp.float32)

    query = draw(examples, heads.key, 2 * rows, heads.size, scale=heads.size**-0.5)
    key = draw(examples, heads.key, heads.size, rows)
    value = draw(examples, heads.key, rows, heads.size)
    yield Unit("attention", attend, (), (query, key, value), attention_gradients)


def _head(draw: _Draw, extent: Extent) -> Unit:
    """Log-probs of a vocabulary of 4 times the width, and the product with the head."""
    numerics, ops = draw.numerics, kernels.family(draw.numerics)
    examples, rows, width = extent
    tokens = draw.rng.integers(0, 4 * width, rows)
    sampling = Sampling(rows, temperature=_TEMPERATURE)

    def call(weights, inputs):
        logits = ops.dot(_flat(*inputs), *weights, numerics=numerics)
        chosen = jnp.tile(jnp.asarray(tokens, jnp.int32), len(inputs[0]))
        log_probs = distribution.log_prob(logits, chosen, sampling=sampling, numerics=numerics)
        return log_probs.reshape(-1, rows)

    gradients = partial(log_prob_gradients, tokens=tokens, temperature=_TEMPERATURE)
    head, inputs = draw(width, 4 * width, scale=width**-0.5), draw(examples, rows, width)
    return Unit("log_prob", call, (head,), (inputs,), gradients)


def _check(unit: Unit, numerics: Numerics, extent: Extent) -> Iterator[GradientResult]:
    out = jax.eval_shape(unit.call, unit.weights, unit.inputs)
    cotangent = _Draw(np.random.default_rng(1), numerics)(*out.shape).astype(out.dtype)
    exact = unit.gradients(*_f64((unit.weights, unit.inputs, cotangent)))
    whole = tuple(gradient.sum(0) for gradient in exact[0]), exact[1]
    arguments = unit.weights, unit.inputs, cotangent

    def result(way: str, computed: Gradients, right: Gradients) -> GradientResult:
        words, bound = f"{numerics.family} {numerics.compute_dtype}", BOUNDS[numerics.compute_dtype]
        return GradientResult(unit.name, way, words, _error(computed, right), bound)

    yield result("plain", jit(partial(_plain, unit), numerics)(*arguments), whole)
    yield result("scan", jit(partial(_scanned, unit), numerics)(*arguments), whole)
    mapped = jax.vmap(partial(_of_example, unit), (None, 0, 0))
    yield result("vmap", jit(mapped, numerics)(*arguments), exact)
    if numerics.compute_dtype == "float32":  # XLA:CPU refuses bfloat16 products of such shapes
        yield result("jacrev", *_jacobians(unit, numerics))
    devices = jax.local_devices()  # as many of them as divide the examples
    devices = devices[: np.gcd(extent.examples, 1 << (len(devices).bit_length() - 1))]
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

    computed = jit(jax.jacrev(call, (0, 1)), numerics)(unit.weights, first)
    shape = jax.eval_shape(unit.call, unit.weights, first).shape
    each = np.eye(np.prod(shape)).reshape(-1, *shape[1:])
    weights, inputs = _f64((unit.weights, first))
    of_weights, of_inputs = unit.gradients(weights, inputs, each)
    return computed, (of_weights, tuple(gradient[:, None] for gradient in of_inputs))


def _f32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _f64(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(_f32(x)).astype(np.float64), tree)


def _error(computed: Gradients, right: Gradients) -> float:
    """The largest error of any array, relative to its largest element; NaN if there is one."""
    pairs = zip(jax.tree.leaves(_f64(computed)), jax.tree.leaves(right), strict=True)
    return float(np.max([np.max(np.abs(a - exact)) / np.max(np.abs(exact)) for a, exact in pairs]))


def norm_gradients(weights: Arrays, inputs: Arrays, c: Array, *, eps: float) -> Gradients:
    """RMSNorm of x [B, N, d] with weight [d]."""
    (weight,), (x,) = weights, inputs
    d_x, d_weight = _norm(x, weight, c, eps)
    return (d_weight.sum(1),), (d_x,)


def _norm(x: Array, weight: Array, c: Array, eps: float) -> tuple[Array, Array]:
    """Gradients of x * f * weight with f = (mean(x^2) + eps)^-1/2: of x, and of weight by row."""
    factor = (np.mean(x * x, axis=-1, keepdims=True) + eps) ** -0.5
    normed, scaled = x * factor, c * weight
    d_x = factor * (scaled - normed * np.mean(scaled * normed, axis=-1, keepdims=True))
    return d_x, c * normed


def dot_gradients(weights: Arrays, inputs: Arrays, c: Array) -> Gradients:
    """x [B, N, K] @ weight [K, M]."""
    (weight,), (x,) = weights, inputs
    return (x.swapaxes(1, 2) @ c,), (c @ weight.T,)


def dot_add_gradients(weights: Arrays, inputs: Arrays, c: Array) -> Gradients:
    """residual + (x @ weight + bias), with weights (weight, bias) and inputs (x, residual)."""
    weight, _ = weights
    x, _ = inputs
    d_weight, d_x = dot_gradients((weight,), (x,), c)
    return (*d_weight, c.sum(1)), (*d_x, c)


def gated_dot_gradients(weights: Arrays, inputs: Arrays, c: Array) -> Gradients:
    """silu(gate) * up of (gate, up) = x @ weight [K, 2 M] + bias."""
    weight, bias = weights
    gate, up = np.split(inputs[0] @ weight + bias, 2, axis=-1)
    sigmoid = 1 / (1 + np.exp(-gate))
    d_gate = c * up * sigmoid * (1 + gate * (1 - sigmoid))
    joint = np.concatenate([d_gate, c * gate * sigmoid], axis=-1)
    d_weight, d_x = dot_gradients((weight,), inputs, joint)
    return (*d_weight, joint.sum(1)), d_x


def project_gradients(
    weights: Arrays, inputs: Arrays, c: Array, *, angles: Array, heads: tuple[int, int], eps: float
) -> Gradients:
    """Query, key and value of y [B, N, (H + 2 Kv) D], with weights (bias, q_norm, k_norm).

    Query and key are normed and then turned by angles [N, D / 2]; the query is scaled by D^-1/2.
    `heads` is (H, Kv).
    """
    bias, q_norm, k_norm = weights
    size = q_norm.shape[0]
    split = np.cumsum([size * heads[0], size * heads[1]])
    outer, inner = (
        [part.reshape(*part.shape[:2], -1, size) for part in np.split(joint, split, axis=-1)]
        for joint in (c, inputs[0] + bias)
    )
    d_query, of_query = _norm(inner[0], q_norm, _rotate(outer[0] * size**-0.5, -angles), eps)
    d_key, of_key = _norm(inner[1], k_norm, _rotate(outer[1], -angles), eps)
    parts = (d_query, d_key, outer[2])
    joint = np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts], axis=-1)
    return (joint.sum(1), of_query.sum((1, 2)), of_key.sum((1, 2))), (joint,)


def _rotate(x: Array, angles: Array) -> Array:
    """Turns x [B, N, heads, D] by angles [N, D / 2], halves paired; -angles undo it."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention_gradients(weights: Arrays, inputs: Arrays, c: Array) -> Gradients:
    """Causal attention of query [B, Kv, N, D] over key [B, Kv, D, S] and value [B, Kv, S, D].

    N / S rows of a query belong to one token, tokens major (Dao et al. 2022, appendix B.2).
    """
    query, key, value = inputs
    rows, keys = query.shape[2], key.shape[3]
    hidden = np.arange(keys)[None, :] > (np.arange(rows) // (rows // keys))[:, None]
    scores = np.where(hidden, -np.inf, query @ key)
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    d_chances = c @ value.swapaxes(2, 3)
    d_scores = chances * (d_chances - np.sum(d_chances * chances, axis=-1, keepdims=True))
    d_query, d_key = d_scores @ key.swapaxes(2, 3), query.swapaxes(2, 3) @ d_scores
    return weights, (d_query, d_key, chances.swapaxes(2, 3) @ c)


def log_prob_gradients(
    weights: Arrays,
    inputs: Arrays,
    c: Array,
    *,
    tokens: np.ndarray[Any, np.dtype[np.int64]],
    temperature: float,
) -> Gradients:
    """log softmax(x @ head / temperature) at tokens [N], of x [B, N, d] and head [d, V]."""
    scaled = inputs[0] @ weights[0] / temperature
    chances = np.exp(scaled - scaled.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    chosen = np.arange(scaled.shape[-1]) == tokens[:, None]
    return dot_gradients(weights, inputs, c[..., None] * (chosen - chances) / temperature)
