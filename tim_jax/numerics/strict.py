"""Functions whose bits depend on the values alone: elementwise ones, sums, and means made of them.

Elementwise functions are made of correctly rounded operations only, so their bits are IEEE 754's.
XLA:CPU's own exp, log and rsqrt may give the same number other bits in an array of another size:
whole vectors are computed by one code, the elements left over by another, and a small loop that is
unrolled into its neighbours by a third. Also, a product that goes into a sum may or may not become
a fused multiply-add. The functions here use sums, products, quotients, roots and comparisons, each
rounded by itself, and bit patterns: a float gives the same bits in every program, and in NumPy.
That holds for float32; float64, which statistics may be computed in, has accuracy alone.

exp and log reduce the argument as Cody and Waite (1980) do. The polynomial of exp is a minimax fit
of (e^r - 1 - r) / r^2 over |r| <= ln(2) / 2, that of log is Moshier's (Cephes, logf). The results
are never subnormal, and log takes subnormal numbers as zero. The normal quantile's rational
functions are Wichura's (1988, algorithm AS 241, PPND7).

Sums depend on neither the split, the sharding nor the padding. A plain `jnp.sum` adds in an order
that the compiler picks per shape, fusion and device count. Here neighbours are added in pairs, then
the pair sums in pairs, and so on: elementwise code, whose order no compiler changes. Because the
pairs start at index 0 and missing partners are zeros, zeros appended to the axis change nothing
either. The input is clipped to the finite range. For finite values that is the identity, but it
keeps a product that feeds the sum from being contracted into a fused multiply-add, and an infinity
from becoming NaN in the two-sum. Each sum is one compiled program where it is called outside of
one, instead of some fifty; within one its operations are written out, as if it were not jitted.

Means, shares, quantiles and extremes of masked arrays, as f32[], are made of these sums, so they
agree with float64 too. A mean over nothing is 0. Of float64 values, what is f32 here is float64. A
device may divide by multiplying with the rounded reciprocal, and so may a compiler that knows the
divisor: 41 * (1 / 41) is 0.99999994. Rules compare shares and means with 1, so what is 1 by
definition is 1 exactly (`quotient`).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

# Log-ratios are clipped to ±20 before exp is taken: beyond exp(20) = 4.9e8 a ratio carries no
# information, only the risk of overflow. verl has the same bound.
LOG_RATIO_BOUND = 20.0

_INFO = jnp.finfo(jnp.float32)
_TINY, _HUGE = float(_INFO.tiny), float(_INFO.max)
_LOG2_E = 1.44269504088896341
# ln 2 in two parts of 15 bits: their products with an exponent, of 8 bits, are exact.
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.4285906217992306e-06
_FURTHEST = 87.33  # e^x and e^-x are normal numbers up to here
_MANTISSA, _BIAS, _EXPONENT_BITS = 23, 127, 8
_EXP = (1.3814539e-3, 8.3687454e-3, 4.1668389e-2, 1.6666521e-1, 4.9999994e-1)
# e^x - 1 - x = x^2 (1/2! + x/3! + ...): the Taylor coefficients, highest power first, up to 1/12!
# for float32 and 1/19! for float64.
_ABOVE_TANGENT = tuple(1.0 / math.factorial(n) for n in range(12, 1, -1))
_ABOVE_TANGENT_64 = tuple(1.0 / math.factorial(n) for n in range(19, 1, -1))
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
# Numerators and denominators of the normal quantile: in the middle, outside, and far outside.
_MIDDLE = (5.9109374720e1, 1.5929113202e2, 5.0434271938e1, 3.3871327179)
_MIDDLE_BELOW = (6.7187563600e1, 7.8757757664e1, 1.7895169469e1, 1.0)
_OUTSIDE = (1.7023821103e-1, 1.3067284816, 2.7568153900, 1.4234372777)
_OUTSIDE_BELOW = (1.2021132975e-1, 7.3700164250e-1, 1.0)
_FAR = (1.7337203997e-2, 4.2868294337e-1, 3.0812263860, 6.6579051150)
_FAR_BELOW = (1.2258202635e-2, 2.4197894225e-1, 1.0)
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32
# In thousandths.
QUANTILES = {"p01": 10, "p25": 250, "p50": 500, "p75": 750, "p99": 990, "p999": 999}


def unequal_bits(left: jax.Array, right: jax.Array) -> jax.Array:
    """bool[...], where two float32 (or two float64) arrays do not hold the same finite bits.

    A value that is not finite counts as unequal: two NaNs do not agree. 0 and -0 differ.
    """
    kind = jnp.int64 if left.dtype == jnp.float64 else jnp.int32
    bits = [jax.lax.bitcast_convert_type(x, kind) for x in (left, right)]
    return (bits[0] != bits[1]) | ~jnp.isfinite(left)


def arithmetic_dtype(*arrays: Any) -> Any:
    """Returns what the arrays are computed with: float64 if one of them has it, else float32.

    Sums and exponentials of 16 bits would be wrong, or overflow.
    """
    double = any(getattr(x, "dtype", None) == jnp.float64 for x in arrays)
    # Without `jax_enable_x64` JAX takes NumPy's float64 for float32.
    return jax.dtypes.canonicalize_dtype(jnp.float64) if double else jnp.dtype(jnp.float32)


def widened(*arrays: Any) -> list[Any]:
    """Returns the arrays in their `arithmetic_dtype`, one for all of them.

    A Python number has no dtype to consider. None stays None.
    """
    dtype = arithmetic_dtype(*arrays)
    return [x if x is None else jnp.asarray(x).astype(dtype) for x in arrays]


def rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rounds float32 to `dtype` and stays rounded.

    A cast alone is not enough: XLA may drop a cast down and up again when it fuses across it.
    """
    if dtype == jnp.float32:
        return x
    info = jnp.finfo(dtype)
    if info.nexp < _EXPONENT_BITS:
        return _rounded_to_subnormals(x, dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded_to_subnormals(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """To a dtype in which numbers that `reduce_precision` makes 0 are subnormal.

    The derivative is the cast's. That of rounding to a multiple would be 0, and that of
    `reduce_precision` rounds tangents by it, which makes 0 of what is subnormal.
    """
    info = jnp.finfo(dtype)
    x = x.astype(
        jnp.float32
    )  # a kernel's result may be of `dtype` already, which cannot hold 1 / step
    normal = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    step = float(info.smallest_subnormal)
    multiple = jax.lax.round(x * (1.0 / step), jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(jnp.abs(x) < float(info.tiny), multiple * step, normal).astype(dtype)


@_rounded_to_subnormals.defjvp
def _rounded_to_subnormals_jvp(dtype, primals, tangents):
    return _rounded_to_subnormals(primals[0], dtype), tangents[0].astype(dtype)


# Two functions keep a product from being contracted with the sum that it goes into to a fused
# multiply-add, which would change bits with the fusion: they put an operation between the two that
# XLA cannot remove (`optimization_barrier` does not prevent it on jax 0.10's CPU backend). There
# are two because they are different programs: `uncontracted`, a single comparison, stands in every
# step of the polynomials, where a clip would make exp and log a third slower, and
# `clipped_to_finite` has both bounds, for what must not be infinite either.


def uncontracted(x: jax.Array) -> jax.Array:
    """Returns x, and for inf the largest float32; for a product that goes into a sum."""
    return jnp.where(x > _HUGE, _HUGE, x)


def clipped_to_finite(x: jax.Array) -> jax.Array:
    """Returns x, of any float dtype, with both infinities clipped; for the same use."""
    limit = jnp.finfo(x.dtype).max
    return jnp.clip(x, -limit, limit)


def inverse_root(x: jax.Array) -> jax.Array:
    """1 / sqrt(x) of x >= 0, as a root and a quotient; not infinite at 0."""
    root = jnp.sqrt(x)
    return 1.0 / jnp.where(root > _TINY, root, _TINY)


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + e^-x); its value at -87.33 below that. Not for differentiation (overflow)."""
    return 1.0 / (1.0 + exp(jnp.where(x < -_FURTHEST, _FURTHEST, -x)))


@jax.custom_jvp
def exp(x: jax.Array) -> jax.Array:
    """e^x of float32 x up to 87.33, to 1 ulp; 0 below -87.33. Of float64, XLA's own exp.

    The result is meaningless beyond 87.33. A softmax subtracts its maximum before, so it never goes
    there, and a check would cost a tenth of the time.
    """
    if x.dtype == jnp.float64:
        return jnp.exp(x)
    exponent = jax.lax.round(x * _LOG2_E, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    rest = x - exponent * _LN2_HIGH - exponent * _LN2_LOW
    y = uncontracted(polynomial(rest, _EXP) * (rest * rest)) + rest + 1.0
    bits = jax.lax.bitcast_convert_type(y, jnp.int32) + (exponent.astype(jnp.int32) << _MANTISSA)
    return jnp.where(x < -_FURTHEST, 0.0, jax.lax.bitcast_convert_type(bits, jnp.float32))


@exp.defjvp
def _exp_jvp(primals, tangents):
    y = exp(*primals)
    return y, y * tangents[0]


def exp_above_tangent(x: jax.Array) -> jax.Array:
    """e^x - 1 - x to full relative precision, and its derivative: near 0 the terms would cancel."""
    inside = jnp.abs(x) <= 1.0
    near = jnp.where(inside, x, 0.0)
    series = _ABOVE_TANGENT_64 if x.dtype == jnp.float64 else _ABOVE_TANGENT
    return jnp.where(inside, jnp.square(near) * polynomial(near, series), exp(x) - 1.0 - x)


@jax.custom_jvp
def log(x: jax.Array) -> jax.Array:
    """The natural logarithm of float32 x, to 1 ulp; -inf at 0 and for subnormal numbers.

    Of float64, XLA's own.
    """
    if x.dtype == jnp.float64:
        return jnp.log(x)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits >> _MANTISSA) - (_BIAS - 1)
    mantissa = (bits & ((1 << _MANTISSA) - 1)) | ((_BIAS - 1) << _MANTISSA)
    part = jax.lax.bitcast_convert_type(mantissa, jnp.float32)  # in [1/2, 1)
    small = part < 0.5**0.5
    power = jnp.where(small, exponent - 1, exponent).astype(jnp.float32)
    rest = jnp.where(small, part + part, part) - 1.0
    square = uncontracted(rest * rest)
    y = uncontracted(uncontracted(polynomial(rest, _LOG) * rest) * square)
    y = y + power * _LN2_LOW - 0.5 * square
    y = rest + y + power * _LN2_HIGH
    y = jnp.where(x < _TINY, -jnp.inf, jnp.where(x > _HUGE, jnp.inf, y))
    return jnp.where(x >= 0, y, jnp.nan)


@log.defjvp
def _log_jvp(primals, tangents):
    return log(*primals), tangents[0] / primals[0]


def normal_quantile(u: jax.Array) -> jax.Array:
    """The quantile of the standard normal distribution at u in (0, 1), float32.

    To a relative accuracy of about 1e-6. Not for differentiation.
    """
    off = u - 0.5
    r = 0.180625 - uncontracted(off * off)
    middle = off * polynomial(r, _MIDDLE) / polynomial(r, _MIDDLE_BELOW)
    root = jnp.sqrt(-log(jnp.where(off < 0, u, 1.0 - u)))
    near, far = root - 1.6, root - 5.0
    outside = polynomial(near, _OUTSIDE) / polynomial(near, _OUTSIDE_BELOW)
    outside = jnp.where(root > 5.0, polynomial(far, _FAR) / polynomial(far, _FAR_BELOW), outside)
    outside = jnp.where(off < 0, -outside, outside)
    return jnp.where(jnp.abs(off) <= 0.425, middle, outside)


def polynomial(x: jax.Array, coefficients: tuple[float, ...]) -> jax.Array:
    """By Horner's rule, the highest power's coefficient first."""
    y = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        y = uncontracted(y * x) + coefficient
    return y


@partial(jax.jit, static_argnames="axis", inline=True)
def tree_sum(values: jax.Array, axis: int = -1) -> jax.Array:
    """Returns the sum of a float array over `axis`, in one fixed order. Differentiable."""
    values = _finite(jnp.moveaxis(values, axis, -1))
    while values.shape[-1] > 1:
        left, right = _pairs(values)
        values = left + right
    return values[..., 0]


@partial(jax.jit, static_argnames="axis", inline=True)
def compensated_sum(values: jax.Array, axis: int = -1) -> tuple[jax.Array, jax.Array]:
    """Returns `(high, low)`, the sum over `axis` as an unevaluated pair of floats.

    The same tree with Knuth's exact two-sum at every node: `high` is the correctly rounded sum in
    all but contrived cases, and `low` what it lacks. Same bits for any split, as for `tree_sum`.
    """
    high = _finite(jnp.moveaxis(values, axis, -1))
    low = jnp.zeros_like(high)
    while high.shape[-1] > 1:
        (a, b), (low_a, low_b) = _pairs(high), _pairs(low)
        high, error = two_sum(a, b)
        low = (low_a + low_b) + error
    return two_sum(high[..., 0], low[..., 0])


def running_sum(values: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Returns f32[..., R], the sums of the last axis up to each place, itself included.

    With `reverse`, from each place on. In log2(R) rounds of doubling: the order of additions at a
    place depends on how far it reaches only, so zeros appended to the axis change no bit.
    """
    before = jax.typeof(values).sharding
    values, reach = uncontracted(_gathered(values)), 1
    while reach < values.shape[-1]:
        pad = [(0, 0)] * (values.ndim - 1) + [(0, reach) if reverse else (reach, 0)]
        moved = values[..., reach:] if reverse else values[..., :-reach]
        values = values + jnp.pad(moved, pad)
        reach *= 2
    return _placed_as(before, values)


def run_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns f32[..., R], at each place the sum over the unbroken run of True that it lies in.

    0 where the mask is False. In rounds of doubling, as `running_sum`.
    """
    before = jax.typeof(values).sharding
    values, mask = _gathered(values), _gathered(mask)
    beyond = [(0, 0)] * (mask.ndim - 1)
    starts = mask & ~jnp.pad(mask[..., :-1], [*beyond, (1, 0)])
    ends = mask & ~jnp.pad(mask[..., 1:], [*beyond, (0, 1)])
    zero = jnp.zeros((), values.dtype)
    total = _segment_sum(jnp.where(mask, values, zero), starts | ~mask)
    # The last of a run has its sum, which the others are given from behind.
    last = jnp.where(ends, total, zero)
    sums = _segment_sum(last[..., ::-1], (ends | ~mask)[..., ::-1])[..., ::-1]
    return _placed_as(before, sums)


def _placed_as(before: Any, values: jax.Array) -> jax.Array:
    """The array with the sharding that its type had before."""
    same = all(axis is None for axis in before.spec)
    return values if same else jax.sharding.reshard(values, before)


def _segment_sum(values: jax.Array, starts: jax.Array) -> jax.Array:
    """The sums of the last axis up to each place, from the last start on."""
    values, reach = uncontracted(values), 1
    while reach < values.shape[-1]:
        pad = [(0, 0)] * (values.ndim - 1) + [(reach, 0)]
        moved = jnp.pad(values[..., :-reach], pad)
        values = values + jnp.where(starts, jnp.zeros((), values.dtype), moved)
        starts = starts | jnp.pad(starts[..., :-reach], pad, constant_values=True)
        reach *= 2
    return values


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `(s, e)` with `s = fl(a + b)` and `s + e = a + b` exactly (Knuth, TAOCP 2, 4.2.2)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def row_count(mask: jax.Array) -> jax.Array:
    """Returns i32[B], the number of True places in each row. Integers, so exact in any order."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32)


def count(mask: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Returns f32[], or of `dtype`, the number of True places, at least 1: a safe divisor.

    Of integers, their sum.
    """
    return jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1).astype(dtype)


def whole(values: jax.Array) -> jax.Array:
    """Returns the array unsharded where its sharding is part of the type, else as it is.

    Explicit meshes need this before an operation without a sharded form, such as a sort over all
    elements. On other meshes the compiler places the data.
    """
    sharding = jax.typeof(values).sharding
    if all(axis is None for axis in sharding.spec):
        return values
    return jax.sharding.reshard(values, NamedSharding(sharding.mesh, PartitionSpec()))


def _finite(values: jax.Array) -> jax.Array:
    if values.shape[-1] == 0:
        return jnp.zeros((*values.shape[:-1], 1), values.dtype)
    limit = float(jnp.finfo(values.dtype).max)
    return jnp.clip(_gathered(values), -limit, limit)


def _gathered(values: jax.Array) -> jax.Array:
    """Brings the last axis together where its sharding is part of the type (explicit meshes)."""
    sharding = jax.typeof(values).sharding
    if len(sharding.spec) < values.ndim or sharding.spec[-1] is None:
        return values
    together = PartitionSpec(*sharding.spec[:-1], None)
    return jax.sharding.reshard(values, NamedSharding(sharding.mesh, together))


def _pairs(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    if values.shape[-1] % 2:
        values = jnp.concatenate([values, jnp.zeros_like(values[..., :1])], axis=-1)
    pairs = values.reshape(*values.shape[:-1], values.shape[-1] // 2, 2)
    return pairs[..., 0], pairs[..., 1]


def mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns f32[], the mean of the values [...] where the mask bool[...] is True."""
    total = jnp.where(mask, values, 0.0)
    for _ in range(total.ndim):
        total, _ = compensated_sum(total)
    return quotient(total, count(mask, total.dtype))


def share(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Returns f32[], the number of True places of `part` over that of `whole`; 1 for all of them.

    Below 1 if one is missing, however many there are. 0 if `whole` has none.
    """
    number, total = (jnp.sum(x, dtype=jnp.int32) for x in (part, whole))
    found = quotient(number.astype(jnp.float32), count(whole))
    return jnp.where(number < total, jnp.minimum(found, _BELOW_ONE), found)


def quotient(part: jax.Array, whole: jax.Array) -> jax.Array:
    """Returns `part / whole`, of a `whole` that is not 0; exactly 1 where they are equal.

    Not for differentiation.
    """
    return jnp.where(part == whole, 1.0, part / whole)


def effective_share(
    mean: jax.Array, mean_square: jax.Array, *, least: jax.Array, most: jax.Array
) -> jax.Array:
    """Returns the effective sample size of weights as a share in [0, 1], `mean(w)^2 / mean(w^2)`.

    Exactly 1 where all weights are equal, `least` being the smallest and `most` the largest of
    them; 0 where all are 0; NaN where one is NaN.
    """
    equal = (least == most) & (least > 0.0)
    nothing = mean_square == 0.0
    share = jnp.minimum(jnp.square(mean) / jnp.where(nothing, 1.0, mean_square), 1.0)
    return jnp.where(equal, 1.0, jnp.where(nothing, 0.0, share))


def extreme(values: jax.Array, mask: jax.Array, function: Callable) -> jax.Array:
    """Returns f32[], `jnp.max` or `jnp.min` of the masked values; 0 if there are none."""
    outside = -jnp.inf if function is jnp.max else jnp.inf
    found = function(jnp.where(mask, values, outside), initial=outside)
    return jnp.where(jnp.any(mask), found, 0.0)


def quantiles(values: jax.Array, mask: jax.Array, name: str) -> dict[str, jax.Array]:
    """Returns `{name_p01: ...}`, linearly interpolated quantiles of the masked values, f32[].

    If one of them is NaN, all quantiles are NaN, as in NumPy.
    """
    if values.size == 0:
        return {f"{name}_{label}": jnp.zeros((), values.dtype) for label in QUANTILES}
    unordered = jnp.any(mask & jnp.isnan(values))
    ordered = jnp.sort(jnp.where(mask, values, jnp.inf).reshape(-1))
    last = jnp.maximum(jnp.sum(mask, dtype=jnp.int32) - 1, 0)
    result = {}
    for label, share in QUANTILES.items():
        # last * share / 1000 in integers: a float32 place is too coarse for millions of tokens.
        below = (last // 1000) * share + (last % 1000) * share // 1000
        part = ((last % 1000) * share % 1000).astype(values.dtype) / 1000.0
        left, right = ordered[below], ordered[jnp.minimum(below + 1, last)]
        quantile = left + part * (right - left)
        quantile = jnp.where(unordered, jnp.nan, quantile)
        result[f"{name}_{label}"] = jnp.where(jnp.any(mask), quantile, 0.0)
    return result
