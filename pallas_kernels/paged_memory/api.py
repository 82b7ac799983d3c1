"""Public functions of the paged memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.formats import Format, Packed


def append(
    pool: Packed, fmt: Format, page_table: jax.Array, start: jax.Array, count: jax.Array, values: jax.Array
) -> Packed:
    """Encodes values and writes them as entries ``start`` … ``start + count − 1`` of each request.

    In place when the pool is donated. Entries beyond the table, or on a table slot that names no page of the
    pool, are not written.

    Args:
      pool: leaves ``[pages, page_entries, width']``.
      fmt: the pool's format (static).
      page_table: ``[batch, table_pages]`` int32, physical pages of each request.
      start: ``[batch]`` int32, first entry to write.
      count: ``[batch]`` int32, rows of ``values`` to write, at most ``group``.
      values: ``[batch, group, width]`` floats; rows from ``count`` on are ignored.

    Returns:
      The pool with those entries replaced.
    """
    return backend.run("paged_append", pool, fmt, page_table, start, count, values)


def gather(
    pool: Packed, fmt: Format, page_table: jax.Array, indices: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """Decoded entries of each request.

    Args:
      pool: leaves ``[pages, page_entries, width']``.
      fmt: the pool's format (static).
      page_table: ``[batch, table_pages]`` int32.
      indices: ``[batch, ...]`` int32 entries.
      dtype: of the result (static).

    Returns:
      ``[batch, ..., width]``; zeros where the index is negative or has no page in the pool.
    """
    return backend.run("paged_gather", pool, fmt, page_table, indices, dtype)
