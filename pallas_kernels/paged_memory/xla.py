"""Paged memory as XLA scatters and gathers of the packed bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.formats import Format, Packed
from pallas_kernels.paged_memory.addressing import locate


def append(
    pool: Packed, fmt: Format, page_table: jax.Array, start: jax.Array, count: jax.Array, values: jax.Array
) -> Packed:
    """See :func:`pallas_kernels.paged_memory.append`."""
    pages, page_entries = pool.payload.shape[:2]
    offset = jnp.arange(values.shape[1], dtype=jnp.int32)
    page, slot, valid = locate(page_table, start[:, None] + offset, pages, page_entries)
    # 'drop' only drops indices that are too large: a negative one would count from the end.
    page = jnp.where(valid & (offset < count[:, None]), page, pages)

    def write(leaf: jax.Array, new: jax.Array) -> jax.Array:
        return leaf.at[page, slot].set(new, mode="drop")

    return pool.map(write, fmt.encode(values))


def gather(
    pool: Packed, fmt: Format, page_table: jax.Array, indices: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """See :func:`pallas_kernels.paged_memory.gather`."""
    pages, page_entries = pool.payload.shape[:2]
    page, slot, valid = locate(page_table, indices, pages, page_entries)

    stored = pool.map(lambda leaf: leaf.at[page, slot].get(mode="promise_in_bounds"))
    return jnp.where(valid[..., None], fmt.decode(stored, dtype), 0)
