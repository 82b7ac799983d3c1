"""Index selection over a history whose scores are too many to be there at once: part by part, then the best of all."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tiling
from pallas_kernels.index_select.best import best, best_blocks
from pallas_kernels.index_select.types import BlockSelection, Selection
from pallas_kernels.tiling import pad_axis

# Queries whose scores shall fit together: with fewer, keys would be read again for almost every query.
_TOGETHER = 8


def part_pages(visible: jax.Array, table_pages: int, page_entries: int, blocks: BlockSelection | None) -> int:
    """Pages of a part: as many as have float32 scores within the temporaries' budget, in whole blocks; or all."""
    batch, queries = visible.shape
    together = 1 if blocks is None else math.lcm(page_entries, blocks.size) // page_entries
    fitting = tiling.TEMPORARY_BYTES // (4 * batch * min(queries, _TOGETHER) * page_entries)
    return min(max(fitting // together, 1) * together, table_pages)


def select_in_parts(
    select: Callable[..., Selection],
    page_table: jax.Array,
    visible: jax.Array,
    page_entries: int,
    pages: int,
    top_k: int,
    blocks: BlockSelection | None,
    first: jax.Array | None,
) -> Selection:
    """The selection over all entries from selections over parts of ``pages`` pages, made one after another.

    Args:
      select: ``select(page_table, visible, first)``, the selection of one part, whose entries are numbered from 0.
      others: as of :func:`pallas_kernels.index_select.index_select`.
    """
    batch, table_pages = page_table.shape
    capacity, entries = table_pages * page_entries, pages * page_entries
    visible = jnp.clip(visible, 0, capacity)
    count = -(-table_pages // pages)
    tables = pad_axis(page_table, 1, count * pages - table_pages, -1).reshape(batch, count, pages)

    def part(x: tuple[jax.Array, jax.Array]) -> Selection:
        table, begin = x
        here = jnp.clip(visible - begin, 0, entries)
        chosen = select(table, here, None if first is None else jnp.clip(first - begin, 0, entries))
        if blocks is None:
            return chosen._replace(indices=_from(chosen.indices, begin))
        numbers = _from(chosen.blocks, begin // blocks.size)
        return Selection(_from(chosen.indices, begin), chosen.scores, numbers, chosen.block_scores)

    begins = jnp.arange(count, dtype=jnp.int32) * entries
    parts = lax.map(part, (jnp.moveaxis(tables, 1, 0), begins))
    chosen = best(parts.indices, parts.scores, top_k)
    if blocks is None:
        return Selection(*chosen)
    newest = jnp.where(visible > 0, (visible - 1) // blocks.size, -1)
    return Selection(*chosen, *best_blocks(parts.blocks, parts.block_scores, newest, blocks.chosen(capacity)))


def _from(items: jax.Array, begin: jax.Array) -> jax.Array:
    """Numbers in the whole of items of a part; −1 stays."""
    return jnp.where(items < 0, -1, items + begin)
