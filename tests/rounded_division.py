"""Programs as a device runs them that divides by multiplying with the rounded reciprocal."""

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax


def with_rounded_division(function):
    """Returns the function with every quotient x / y of floats as `x * fl(1 / y)`.

    An accelerator may divide like that, and so may a compiler that knows the divisor. A loop that
    divides is refused, because its body would stay as it is.
    """

    def run(*arguments):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = _run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


def _run(jaxpr, constants, arguments):
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

    def value(atom):
        return atom.val if isinstance(atom, jax.extend.core.Literal) else known[atom]

    for equation in jaxpr.eqns:
        results = _apply(equation, [value(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _apply(equation, arguments):
    primitive, parameters = equation.primitive, equation.params
    if primitive.name == "div" and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating):
        part, whole = arguments
        # The barrier keeps the compiler from making a quotient of it again.
        return [part * lax.optimization_barrier(1.0 / jnp.asarray(whole))]
    inner = parameters.get("jaxpr", parameters.get("call_jaxpr"))
    if inner is not None and primitive.name not in ("scan", "while"):
        return _run(inner.jaxpr, inner.consts, arguments)
    assert "div" not in str(parameters.get("jaxpr", "")), primitive
    results = primitive.bind(*arguments, **parameters)
    return results if primitive.multiple_results else [results]
