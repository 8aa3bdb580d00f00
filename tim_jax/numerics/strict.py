"""Elementwise functions of correctly rounded operations only, so that their bits are IEEE 754's.

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
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

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
