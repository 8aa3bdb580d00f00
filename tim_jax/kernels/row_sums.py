"""Adding rows to a table where several rows may go to one place: the gradient of an embedding."""

import jax
import jax.numpy as jnp

from tim_jax.numerics import Numerics


def added(table: jax.Array, places: jax.Array, rows: jax.Array, *, numerics: Numerics) -> jax.Array:
    """`table` f32[V, d] with every one of `rows` f32[N, d] added at its place i32[N] below V.

    Where `numerics.row_sums` is "sorted", the rows of one place are added in a tree that the order
    of the rows alone determines, so that the same rows give the same bits every time. A plain
    scatter does so on a CPU and a TPU. On a GPU it adds by atomic operations, in the order in which
    they happen to come.
    """
    if numerics.row_sums == "scatter":
        return table.at[places].add(rows)
    order = jnp.argsort(places, stable=True)
    places = places[order]
    changes = places[1:] != places[:-1]
    first = jnp.pad(changes, (1, 0), constant_values=True)
    last = jnp.pad(changes, (0, 1), constant_values=True)
    _, sums = jax.lax.associative_scan(_joined, (first[:, None], rows[order]))
    # Only the last row of a place has its whole sum. The others go to places that there are not,
    # each to one of its own, so that no place comes twice and nothing need be atomic.
    beyond = table.shape[0] + jnp.arange(len(places), dtype=places.dtype)
    return table.at[jnp.where(last, places, beyond)].add(sums, mode="drop", unique_indices=True)


def _joined(before: tuple[jax.Array, jax.Array], after: tuple[jax.Array, jax.Array]):
    """Two stretches of sorted rows: whether a place begins there, and the sum since it began."""
    (begun, earlier), (begins, later) = before, after
    return begun | begins, jnp.where(begins, later, earlier + later)
