"""Which rows of which arrays every query attends to: the GPU kernels' one way to address entries.

A list of row numbers for each query hides windows, rotations, page tables and masks from a kernel; it is small beside
the queries (4 bytes an entry and query, where a query has ``heads · head_dim`` values).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.formats import Format, Packed
from pallas_kernels.paged_memory.addressing import locate
from pallas_kernels.tiling import pad_axis


class Source(NamedTuple):
    """Entries and who sees them.

    Attributes:
      entries: ``[rows, head_dim]`` floats; rows that nobody sees may hold anything.
      seen: ``[tokens, slots]`` int32 rows of ``entries``, −1 = nothing; an entry counts as often as it is listed.
    """

    entries: jax.Array
    seen: jax.Array


def window_source(
    local: Packed,
    fmt: Format,
    valid: jax.Array,
    rotation: jax.Array | None,
    window: int,
    dtype: jnp.dtype,
    tile: int,
    reach: jax.Array | None = None,
) -> Source:
    """The window of every query; arguments as in :func:`pallas_kernels.sparse_attention.sparse_attention`.

    A list goes from the oldest entry to the query's own, so that the order of its sums is the same wherever the query
    stands in a call, and wherever a rotation has put the entries.
    """
    batch, columns = valid.shape
    oldest = jnp.arange(1, columns - window + 1, dtype=jnp.int32)[:, None]
    if rotation is not None:
        oldest = oldest + rotation[:, None, None]
    column = jnp.broadcast_to(oldest + jnp.arange(window, dtype=jnp.int32), (batch, columns - window, window)) % columns
    seen = jnp.take_along_axis(valid[:, None], column, axis=2)
    if reach is not None:
        seen &= jnp.arange(window, dtype=jnp.int32) >= window - reach[..., None]
    rows = jnp.where(seen, column + columns * jnp.arange(batch, dtype=jnp.int32)[:, None, None], -1)
    entries = fmt.decode(local, dtype)
    return _source(entries, rows, tile)


def pool_source(
    pool: Packed, fmt: Format, page_table: jax.Array, indices: jax.Array, dtype: jnp.dtype, tile: int
) -> Source:
    """The chosen entries of every query; the whole pool is decoded, which costs nothing if it is of ``dtype``."""
    pages, page_entries = pool.payload.shape[:2]
    page, slot, valid = locate(page_table, indices, pages, page_entries)
    return _source(fmt.decode(pool, dtype), jnp.where(valid, page * page_entries + slot, -1), tile)


def _source(entries: jax.Array, rows: jax.Array, tile: int) -> Source:
    rows = rows.reshape(-1, rows.shape[-1])
    return Source(entries.reshape(-1, entries.shape[-1]), pad_axis(rows, 1, -rows.shape[1] % tile, -1))
