"""A kernel family made of Pallas kernels: fences, gradients and epilogues around them.

The fences are for interpret mode, where a kernel is ordinary code that could be fused with its
surroundings; around a real kernel they cost nothing. Gradients are those of the plain XLA
expressions at the same inputs: accurate, and not bound by the exactness contract.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tim_jax.kernels import formulas, native, pallas
from tim_jax.kernels.composed import NATIVE
from tim_jax.kernels.interface import Heads
from tim_jax.numerics import Numerics


def with_gradient(kernel: Callable, plain: Callable) -> Callable:
    """`kernel` between fences, with the gradient of `plain`."""

    def forward(*args):
        return pallas.fence(kernel(*pallas.fence(args)))

    def backward(args, cotangent):
        return jax.vjp(plain, *pallas.fence(args))[1](cotangent)

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *args: (forward(*args), args), backward)
    return call


@dataclass(frozen=True)
class PallasFamily:
    """A family of `interface.Kernels`, from bare kernels.

    product(x, weight, extras, epilogue, dtype, *, numerics, name, halves): the epilogue of
        x [N, K] @ weight [K, halves * M], [N, M] in `dtype`. It gets the `halves` tiles of the
        product, float32, and of each of the extras its part: of a "tile" [N, M] the tile, of a
        "bias" [halves, M] a tuple of `halves` rows.
    attend(query, key, value, positions, *, numerics): attention in the compute dtype.
    normed(x, weight, *, eps, numerics): RMSNorm.
    rotated(y, cos, sin, optional, *, heads, eps, numerics): query and key of `project`.
    exponentials, row_sum, log, log_normaliser: as in the interface.
    """

    product: Callable[..., jax.Array]
    attend: Callable[..., jax.Array]
    normed: Callable[..., jax.Array]
    rotated: Callable[..., tuple[jax.Array, jax.Array]]
    exponentials_kernel: Callable[..., jax.Array]
    row_sum_kernel: Callable[..., jax.Array]
    log_kernel: Callable[..., jax.Array]
    log_normaliser_kernel: Callable[..., jax.Array]

    def fence(self, x: Any, /) -> Any:
        return pallas.fence(x)

    def dot(self, x: jax.Array, weight: jax.Array, *, numerics: Numerics) -> jax.Array:
        def forward(x, weight):
            x, weight = pallas.fence((x, weight))
            options = {"numerics": numerics, "name": "dot", "halves": 1}
            product = self.product(x, weight, [], lambda sums: sums[0], jnp.float32, **options)
            return pallas.fence(product)

        call = jax.custom_vjp(forward)
        call.defvjp(lambda x, weight: (forward(x, weight), (x, weight)), native.dot_backward)
        return call(x, weight)

    def dot_add(self, x, weight, residual, bias, *, numerics: Numerics):
        def epilogue(sums, residual, bias=()):
            return pallas.residual_sum(sums[0], residual, bias)

        def kernel(x, weight, residual, *bias):
            extras = [("tile", residual), *(("bias", b.reshape(1, -1)) for b in bias)]
            options = {"numerics": numerics, "name": "dot_add", "halves": 1}
            return self.product(x, weight, extras, epilogue, numerics.dtype, **options)

        def plain(x, weight, residual, *bias):
            return NATIVE.dot_add(x, weight, residual, bias[0] if bias else None, numerics=numerics)

        return with_gradient(kernel, plain)(x, weight, residual, *_present(bias))

    def gated_dot(self, x, weight, bias, *, numerics: Numerics):
        def epilogue(sums, bias=()):
            gate, up = sums
            return pallas.gated(gate, up, bias)

        def kernel(x, weight, *bias):
            extras = [("bias", b.reshape(2, -1)) for b in bias]
            options = {"numerics": numerics, "name": "gated_dot", "halves": 2}
            return self.product(x, weight, extras, epilogue, numerics.dtype, **options)

        def plain(x, weight, *bias):
            return NATIVE.gated_dot(x, weight, bias[0] if bias else None, numerics=numerics)

        return with_gradient(kernel, plain)(x, weight, *_present(bias))

    def norm(self, x: jax.Array, weight: jax.Array, *, eps: float, numerics: Numerics):
        options = {"eps": eps, "numerics": numerics}
        return with_gradient(partial(self.normed, **options), partial(NATIVE.norm, **options))(
            x, weight
        )

    def project(self, y, cos, sin, optional, *, heads: Heads, eps: float, numerics: Numerics):
        options = {"heads": heads, "eps": eps, "numerics": numerics}

        def kernel(y, cos, sin, optional):
            query, key = self.rotated(y, cos, sin, optional, **options)
            # A value is only rounded: elementwise, so XLA may do it.
            value = y[:, (heads.query + heads.key) * heads.size :]
            if "bias" in optional:
                value = value + optional["bias"][None, -value.shape[1] :]
            value = value.reshape(-1, heads.key, heads.size)
            return query, key, formulas.rounded(value, numerics.dtype)

        return with_gradient(kernel, partial(NATIVE.project, **options))(y, cos, sin, optional)

    def attention(self, query, key, value, positions, *, numerics: Numerics, aligned: bool):
        def forward(*args):
            return pallas.fence(self.attend(*pallas.fence(args), numerics=numerics))

        def backward(args, cotangent):
            query, key, value, positions = pallas.fence(args)

            def plain(query, key, value):
                mixed = native.attention(
                    query, key, value, positions, numerics=numerics, aligned=aligned
                )
                return mixed.astype(numerics.dtype)

            return (*jax.vjp(plain, query, key, value)[1](cotangent), None)

        call = jax.custom_vjp(forward)
        call.defvjp(lambda *args: (forward(*args), args), backward)
        return call(query, key, value, positions)

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


def _present(bias: jax.Array | None) -> tuple[jax.Array, ...]:
    return () if bias is None else (bias,)


def _fenced(kernel, *args, numerics: Numerics):
    return pallas.fence(kernel(*pallas.fence(args), numerics=numerics))
