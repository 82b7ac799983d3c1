"""Where an entry of a request lies in a pool of pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def locate(
    page_table: jax.Array, entries: jax.Array, pages: int, page_entries: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Page and slot of entries; entry j of request b lies at ``page_table[b, j // page_entries]``.

    Args:
      page_table: ``[batch, table_pages]`` int32; slots that are not allocated may hold any integer.
      entries: ``[batch, ...]`` int32.
      pages: pages of the pool.
      page_entries: entries of a page.

    Returns:
      page, slot and valid, each shaped as ``entries``. An entry is invalid if it is negative, beyond the table,
      or its page is none of the pool's; its page and slot are 0 then, so that indexing with them is safe.
    """
    batch, table_pages = page_table.shape
    in_table = (entries >= 0) & (entries < table_pages * page_entries)
    # Never negative: a quotient that rounds to zero is one operation, where one that rounds down is ten.
    safe = jnp.where(in_table, entries, 0)
    size = jnp.asarray(page_entries, safe.dtype)
    flat = lax.div(safe, size).reshape(batch, -1)
    page = jnp.take_along_axis(page_table, flat, axis=1, mode="clip").reshape(entries.shape)
    valid = in_table & (page >= 0) & (page < pages)
    return jnp.where(valid, page, 0), jnp.where(valid, lax.rem(safe, size), 0), valid
