"""Public function of the sparse attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.formats import Format, Packed
from pallas_kernels.sparse_attention.partial import Partial


def sparse_attention(
    queries: jax.Array,
    local: Packed,
    local_fmt: Format,
    local_valid: jax.Array,
    pool: Packed | None,
    pool_fmt: Format,
    page_table: jax.Array | None,
    indices: jax.Array | None,
    sink: jax.Array,
    rotation: jax.Array | None = None,
    reach: jax.Array | None = None,
    *,
    window: int,
    scale: float,
    probability_dtype: jnp.dtype,
    return_partial: bool = False,
) -> jax.Array | Partial:
    """Attention of each query to its window and to its chosen entries; an entry is key and value at once.

    out = Σ_i p_i e_i / (Σ_i p_i + exp(sink − m)), p_i = exp(scale · q · e_i − m), in float32; the p of the numerator
    are rounded to ``probability_dtype``. A query that sees nothing gives exactly 0. An entry that is both in the
    window and chosen, or chosen twice, counts twice.

    Args:
      queries: ``[batch, query, heads, head_dim]``.
      local: the window before this call and the call's own entries in order of position, leaves
        ``[batch, window + query, width']``; query s sees entries s + 1 … s + window.
      local_fmt: its format (static).
      local_valid: ``[batch, window + query]`` bool; entries where it is False are never seen and may hold anything.
      pool: global entries, leaves ``[pages, page_entries, width']``; None in a window-only layer.
      pool_fmt: its format (static).
      page_table: ``[batch, table_pages]`` int32; None without a pool.
      indices: ``[batch, query, chosen]`` int32 entries of the request, −1 = nothing; None without a pool.
      sink: ``[heads]`` float32, finite: a logit that joins the denominator only.
      rotation: int32 ``[batch]``, the column of ``local`` that holds the earliest entry; the others follow it
        around the end. None: column 0. Sums go over the columns as they lie or over the entries by age: either way
        a query rounds alike wherever in a call it stands, if entries keep their columns over the calls.
      reach: ``[batch, query]`` int32: how many of its window's entries a query sees, the newest ones (query s sees
        s + window − reach + 1 … s + window); beyond 0 … window it is as at the nearer end. None: the whole window.
      window: entries of the window (static).
      scale: factor of the logits (static).
      probability_dtype: bfloat16 or float32 (static).
      return_partial: give the sums without division and sink, which is not read, so that results over shards of the
        context merge (:func:`pallas_kernels.sparse_attention.merge_partials`); static.

    Returns:
      ``[batch, query, heads, head_dim]`` in the queries' dtype; a :class:`Partial` if that was asked for.

    Raises:
      ValueError: the local entries are not ``window + query``, or only some of pool, table and indices are given.
    """
    rows = local.payload.shape[1]
    if rows != window + queries.shape[1]:
        raise ValueError(f"local has {rows} entries, not window {window} + {queries.shape[1]} queries")
    if len({pool is None, page_table is None, indices is None}) > 1:
        raise ValueError("pool, page_table and indices come together or not at all")
    return backend.run(
        "sparse_attention",
        queries,
        local,
        local_fmt,
        local_valid,
        pool,
        pool_fmt,
        page_table,
        indices,
        sink,
        rotation,
        reach,
        window=window,
        scale=scale,
        probability_dtype=probability_dtype,
        return_partial=return_partial,
    )
