"""The shared global memory: pages of packed main entries and index keys, one pool for all requests.

A page holds a fixed number of *tokens* for every KV source (``page_tokens / ratio`` entries each), so that one
page table serves all sources. Pools are stacked over the sources of one ratio: an entry of source s, page p,
slot e is ``[s, p, e]``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dsv41.settings import Settings
from pallas_kernels.formats import Packed
from pallas_kernels.paged_memory import append


@struct.dataclass
class SourcePool:
    """The pages of all KV sources of one ratio; leaves ``[sources, pages, page_entries, width']``.

    Attributes:
      main: entries used as keys and values.
      index: index keys.
    """

    main: Packed
    index: Packed


Memory = dict[int, SourcePool]
"""Pools by compression ratio."""


def create_memory(settings: Settings, pages: int) -> Memory:
    """Zeroed pools of ``pages`` pages for every ratio of the configuration."""
    text, formats = settings.text, settings.formats

    def pool(ratio: int) -> SourcePool:
        shape = (len(settings.table.sources_of_ratio(ratio)), pages, settings.page_entries(ratio))
        return SourcePool(
            formats.main_kv.zeros(shape, text.head_dim), formats.index_keys.zeros(shape, text.index_head_dim)
        )

    return {ratio: pool(ratio) for ratio in settings.table.ratios}


def entry_bytes(settings: Settings) -> dict[str, int]:
    """Bytes of one global entry by part: the main entry and the index key, scales included."""
    text, formats = settings.text, settings.formats
    return {
        "main KV": formats.main_kv.entry_bytes(text.head_dim),
        "index key": formats.index_keys.entry_bytes(text.index_head_dim),
    }


def bytes_per_token(settings: Settings) -> float:
    """Bytes of global memory that one token takes over all sources (890 for the official configuration)."""
    table = settings.table
    return sum(sum(entry_bytes(settings).values()) / table.layers[s].kind.ratio for s in table.kv_sources)


def source_view(pool: Packed, page_table: jax.Array, slot: jax.Array) -> tuple[Packed, jax.Array]:
    """One source of stacked pools as a flat pool and its page table, without copying a page.

    Args:
      pool: leaves ``[sources, pages, page_entries, width']``.
      page_table: int32 ``[batch, table_pages]``; any value outside [0, pages) means 'no page'.
      slot: the source's position on the first axis.

    Returns:
      leaves ``[sources · pages, page_entries, width']`` and the page table into them, whose missing pages point
      past the end, so that none of them can wrap into another source.
    """
    sources, pages = pool.payload.shape[:2]
    flat = pool.map(lambda leaf: leaf.reshape(sources * pages, *leaf.shape[2:]))
    held = (page_table >= 0) & (page_table < pages)
    return flat, jnp.where(held, page_table + slot * pages, sources * pages)


def append_entries(
    memory: SourcePool,
    settings: Settings,
    page_table: jax.Array,
    slot: jax.Array,
    start: jax.Array,
    count: jax.Array,
    main: jax.Array,
    index: jax.Array,
) -> SourcePool:
    """Encodes and appends entries ``start … start + count − 1`` of one source.

    Args:
      start, count: int32 ``[batch]``; the first ``count`` rows of each request are written.
      main: ``[batch, entries, head_dim]``; index: ``[batch, entries, index_head_dim]``.
    """

    def write(pool: Packed, fmt, values: jax.Array) -> Packed:
        flat, table = source_view(pool, page_table, slot)
        written = append(flat, fmt, table, start, count, values)
        return written.map(lambda leaf, old: leaf.reshape(old.shape), pool)

    formats = settings.formats
    return SourcePool(write(memory.main, formats.main_kv, main), write(memory.index, formats.index_keys, index))
