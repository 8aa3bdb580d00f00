"""Pages: a cache whose memory follows the tokens in use, not slots times the longest response.

The keys and values of a layer lie in a pool of pages of `kv_block` positions, the very blocks that
attention reads, so pages change no bit. A slot's table names its pages in the order of positions.
Pages that a prompt fills are shared by its samples; the page that it fills in part is copied for
each of them; all further pages come from the free ones, shortly before they are needed.

Where the free pages do not suffice, the slots with the latest sequences of the queue give theirs
back and their sequences wait again. A sequence that starts anew draws the same tokens, so this
costs time and changes no bit.

S: slots, n: pages of the longest sequence, W: pages of a prompt, Tp: padded prompt length.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import struct

from tim_jax.common.errors import InputError
from tim_jax.model.attention import Cache, LayerCache


@struct.dataclass
class Tables:
    """Which pages the slots have."""

    pages: jax.Array  # i32[S, n], numbers of pages; the sink where there is none
    held: jax.Array  # i32[S], how many of a slot's pages it has, those of its prompt included
    shared: jax.Array  # i32[S], how many of them are its prompt's


@dataclass(frozen=True)
class Pool:
    """The pages of a layer: those of the prompts, free ones, one of zeros, and a sink.

    The sink takes what slots without a sequence write.
    """

    prompts: int  # pages of all prompts
    width: int  # pages of one prompt, filled or not
    free: int
    block: int  # positions of a page

    @property
    def zeros(self) -> int:
        """The page that stays zero."""
        return self.prompts + self.free

    @property
    def sink(self) -> int:
        """The page that nobody reads from for a sequence."""
        return self.zeros + 1

    def check(self, longest: int) -> None:
        """Raises InputError if one sequence of `longest` positions does not fit."""
        needed = -(-longest // self.block)
        if self.free < needed:
            raise InputError(
                f"sampler: pages = {self.free} on each device do not hold the longest sequence of"
                f" {longest} tokens; it needs {needed} pages of {self.block} (numerics.kv_block)"
            )

    def filled(self, prompts: LayerCache) -> Cache:
        """The pools of all layers, with the prompts [P / k, L, k, ...] in their pages."""

        def paged(x: jax.Array, axis: int) -> jax.Array:
            x = x.reshape(-1, *x.shape[2:])
            missing = self.width * self.block - x.shape[axis]
            x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(4)])
            x = x.reshape(*x.shape[:axis], self.width, self.block, *x.shape[axis + 1 :])
            x = jnp.moveaxis(x, axis, 1)
            x = x.reshape(-1, *x.shape[2:])
            return jnp.pad(x, [(0, self.free + 2), (0, 0), (0, 0), (0, 0)])

        layers = range(prompts.key.shape[1])
        return tuple(
            LayerCache(key=paged(prompts.key[:, i], 3), value=paged(prompts.value[:, i], 2))
            for i in layers
        )

    def empty(self, slots: int, longest: int) -> Tables:
        """Tables of slots without a sequence."""
        none = jnp.zeros((slots,), jnp.int32)
        pages = jnp.full((slots, -(-longest // self.block)), self.sink, jnp.int32)
        return Tables(pages=pages, held=none, shared=none)


def released(tables: Tables, slots: jax.Array, sink: int) -> Tables:
    """The tables after the slots that are True in bool[S] have given their pages back."""
    return Tables(
        pages=jnp.where(slots[:, None], sink, tables.pages),
        held=jnp.where(slots, 0, tables.held),
        shared=jnp.where(slots, 0, tables.shared),
    )


def taken(tables: Tables, slots: jax.Array, prompts: jax.Array, lengths: jax.Array, pool: Pool):
    """The tables after slots have taken sequences of i32[S] prompts: they share the full pages."""
    index = jnp.arange(tables.pages.shape[1])[None, :]
    full = lengths // pool.block
    of_prompt = jnp.where(index < full[:, None], prompts[:, None] * pool.width + index, pool.sink)
    return Tables(
        pages=jnp.where(slots[:, None], of_prompt, tables.pages),
        held=jnp.where(slots, full, tables.held),
        shared=jnp.where(slots, full, tables.shared),
    )


def that_fit(tables: Tables, needed: jax.Array, age: jax.Array, pool: Pool) -> jax.Array:
    """bool[S], the slots whose pages are there: the oldest first, as long as there are enough.

    Args:
      needed: i32[S], pages that each slot must have; 0 for one without a sequence.
      age: i32[S], smaller for older.
    """
    own = jnp.maximum(needed - tables.shared, 0)
    order = jnp.argsort(age, stable=True)
    sums = jnp.zeros_like(own).at[order].set(jnp.cumsum(own[order]))
    return sums <= pool.free


def provided(
    cache: Cache, tables: Tables, needed: jax.Array, prompts: jax.Array, pool: Pool
) -> tuple[Cache, Tables]:
    """Gives every slot the pages up to `needed` i32[S], which must be free.

    A new page is a copy of its prompt's last page, if that is filled in part, or of zeros: a number
    that is not finite would reach another sequence through a product with zero.
    """
    count = tables.pages.shape[1]
    index = jnp.arange(count)[None, :]
    wanted = ((index >= tables.held[:, None]) & (index < needed[:, None])).reshape(-1)
    own = (index >= tables.shared[:, None]) & (index < tables.held[:, None])
    used = jnp.zeros((pool.free,), bool)
    used = used.at[jnp.where(own, tables.pages - pool.prompts, pool.free)].set(True, mode="drop")
    free = pool.prompts + jnp.argsort(used, stable=True).astype(jnp.int32)
    rank = jnp.cumsum(wanted.astype(jnp.int32)) - 1
    pages = jnp.where(wanted, free[jnp.clip(rank, 0, pool.free - 1)], tables.pages.reshape(-1))
    from_prompt = (index == tables.shared[:, None]) & (index < pool.width)
    source = jnp.where(from_prompt, prompts[:, None] * pool.width + index, pool.zeros)
    (new,) = jnp.nonzero(wanted, size=pool.free, fill_value=0)

    def one(number: jax.Array, cache: Cache) -> Cache:
        at = new[number]
        start, end = source.reshape(-1)[at], pages[at]

        def put(x: jax.Array) -> jax.Array:
            page = jax.lax.dynamic_slice_in_dim(x, start, 1)
            return jax.lax.dynamic_update_slice_in_dim(x, page, end, axis=0)

        return jax.tree.map(put, cache)

    cache = jax.lax.fori_loop(0, jnp.sum(wanted, dtype=jnp.int32), one, cache)
    tables = replace(
        tables,
        pages=pages.reshape(tables.pages.shape),
        held=jnp.maximum(tables.held, needed),
    )
    return cache, tables
