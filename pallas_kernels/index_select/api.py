"""Public functions of the index selection."""

from __future__ import annotations

import jax
from jax import lax

from pallas_kernels import backend
from pallas_kernels.formats import Format, Packed
from pallas_kernels.index_select.parts import part_pages, select_in_parts
from pallas_kernels.index_select.types import BlockSelection, Selection


def index_select(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    top_k: int,
    blocks: BlockSelection | None = None,
    first: jax.Array | None = None,
) -> Selection:
    """Top-k over all visible entries by score(t, j) = Σ_h weights_h · relu(q_h · k_j), float32.

    Ties go to the lower index. No gradient passes. With ``blocks``, also the best blocks by their largest visible
    score; the block of the newest visible entry is always among them.

    Scores of a few queries are there at once, and never more than :data:`pallas_kernels.tiling.TEMPORARY_BYTES`: of a
    history with more it chooses part by part, then the best of what the parts chose.

    Args:
      queries: ``[batch, query, heads, width]``.
      weights: ``[batch, query, heads]`` float32.
      pool: index keys, leaves ``[pages, page_entries, width']``.
      fmt: the pool's format (static).
      page_table: ``[batch, table_pages]`` int32.
      visible: ``[batch, query]`` int32: entries 0 … visible − 1 can be chosen (those without a page never are).
      top_k: entries to choose (static).
      blocks: blocks to choose besides (static).
      first: ``[batch, query]`` int32: entries below it cannot be chosen, nor count for their blocks; with none from
        it on visible, no block is chosen. None: 0.

    Returns:
      The selection, −1 where fewer are visible.
    """
    queries, weights, pool = lax.stop_gradient((queries, weights, pool))
    page_entries, table_pages = pool.payload.shape[1], page_table.shape[1]
    pages = part_pages(visible, table_pages, page_entries, blocks)

    def select(page_table: jax.Array, visible: jax.Array, first: jax.Array | None) -> Selection:
        return backend.run("index_select", queries, weights, pool, fmt, page_table, visible, top_k, blocks, first)

    if pages == table_pages:
        return select(page_table, visible, first)
    return select_in_parts(select, page_table, visible, page_entries, pages, top_k, blocks, first)


def index_reselect(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    block_ids: jax.Array,
    block_size: int,
    top_k: int,
    first: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Top-k of the visible entries inside candidate blocks; only those entries are read and scored.

    Ties go to the lower entry. No gradient passes.

    Args:
      queries: ``[batch, query, heads, width]``.
      weights: ``[batch, query, heads]`` float32.
      pool: index keys, leaves ``[pages, page_entries, width']``.
      fmt: the pool's format (static).
      page_table: ``[batch, table_pages]`` int32.
      visible: ``[batch, query]`` int32.
      block_ids: ``[batch, query, blocks]`` int32, distinct, in any order; negative = none.
      block_size: entries of a block (static).
      top_k: entries to choose (static).
      first: as in :func:`index_select`.

    Returns:
      ``[batch, query, top_k]`` int32 entries, best first, the −1 of a short selection last; and their scores float32,
      −inf where there is none.
    """
    queries, weights, pool = lax.stop_gradient((queries, weights, pool))
    return backend.run(
        "index_reselect", queries, weights, pool, fmt, page_table, visible, block_ids, block_size, top_k, first
    )
