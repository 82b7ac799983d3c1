"""Index selection in tiles of queries and keys: never a score of every head for every entry at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import paged_memory
from pallas_kernels.formats import Format, Packed
from pallas_kernels.index_select.types import BlockSelection, Selection
from pallas_kernels.paged_memory.addressing import locate
from pallas_kernels.products import einsum, operand_dtype
from pallas_kernels.tiling import largest_tile, map_query_tiles, pad_axis
from pallas_kernels.top_k import top_k as exact_top_k


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
    """See :func:`pallas_kernels.index_select.index_select`."""
    batch, total, heads, width = queries.shape
    page_entries, table_pages = pool.payload.shape[1], page_table.shape[1]
    capacity = table_pages * page_entries
    query_tile = largest_tile(total, lambda tile: batch * tile * max(capacity, 2 * heads * page_entries) * 4)
    # The heads' products and their positive parts are there at once.
    entry_bytes = batch * max(2 * query_tile * heads, width) * 4
    key_pages = largest_tile(table_pages, lambda pages: pages * page_entries * entry_bytes)

    def one_tile(
        _, queries: jax.Array, weights: jax.Array, visible: jax.Array, first: jax.Array | None = None
    ) -> Selection:
        scores = _scores_by_key_tiles(queries, weights, pool, fmt, page_table, visible, key_pages, first)
        values, indices = exact_top_k(scores, top_k)
        shown = with_something_visible(visible, capacity, first)
        chosen = () if blocks is None else choose_blocks(scores[..., :capacity], shown, blocks)
        return Selection(jnp.where(values == -jnp.inf, -1, indices), values, *chosen)

    return map_query_tiles(one_tile, query_tile, (queries, weights, visible, *optional(first)))


def optional(first: jax.Array | None) -> tuple[jax.Array, ...]:
    """``first`` as the last of the arrays that tiles cut, if it is there."""
    return () if first is None else (first,)


def with_something_visible(visible: jax.Array, capacity: int, first: jax.Array | None = None) -> jax.Array:
    """``visible``, but 0 for queries that see no entry from ``first`` on: they have no newest block."""
    return visible if first is None else jnp.where(first < jnp.minimum(visible, capacity), visible, 0)


def _scores_by_key_tiles(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    key_pages: int,
    first: jax.Array | None = None,
) -> jax.Array:
    """Head-summed scores ``[batch, query, capacity up to a whole key tile]``, −inf where an entry is not visible."""
    page_entries, table_pages = pool.payload.shape[1], page_table.shape[1]
    if key_pages >= table_pages:
        return _page_scores(queries, weights, pool, fmt, page_table, visible, 0, first)
    tiles = -(-table_pages // key_pages)
    page_table = pad_axis(page_table, 1, tiles * key_pages - table_pages, -1)
    tile_entries = key_pages * page_entries

    def write_tile(i: jax.Array, scores: jax.Array) -> jax.Array:
        table = lax.dynamic_slice_in_dim(page_table, i * key_pages, key_pages, axis=1)
        tile = _page_scores(queries, weights, pool, fmt, table, visible, i * tile_entries, first)
        return lax.dynamic_update_slice_in_dim(scores, tile, i * tile_entries, axis=2)

    # A table is as long as the longest request it could hold: tiles that nobody sees yet are not visited.
    needed = jnp.clip(-(-jnp.max(visible) // tile_entries), 0, tiles)
    begin = 0 if first is None else jnp.clip(jnp.min(first) // tile_entries, 0, tiles)
    nothing = jnp.full((*visible.shape, tiles * tile_entries), -jnp.inf, jnp.float32)
    return lax.fori_loop(begin, needed, write_tile, nothing)


def _page_scores(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    first_entry: int | jax.Array,
    first: jax.Array | None = None,
) -> jax.Array:
    """Scores ``[batch, query, entries]`` of the entries on some pages, of which the first is ``first_entry``."""
    batch, table_pages = page_table.shape
    page_entries = pool.payload.shape[1]
    entries = jnp.arange(table_pages * page_entries, dtype=jnp.int32)
    here = jnp.broadcast_to(entries, (batch, entries.size))
    keys = paged_memory.gather(pool, fmt, page_table, here, operand_dtype(queries.dtype, fmt))
    has_page = locate(page_table, here, pool.payload.shape[0], page_entries)[2]
    products = einsum("bshd,bnd->bshn", queries.astype(keys.dtype), keys)
    live = has_page[:, None] & (first_entry + entries < visible[..., None])
    if first is not None:
        live &= first_entry + entries >= first[..., None]
    return jnp.where(live, _over_heads(products, weights), -jnp.inf)


def _over_heads(products: jax.Array, weights: jax.Array) -> jax.Array:
    """Σ_h weights_h · relu(products_h) over axis 2 of ``[batch, query, heads, entries]``."""
    # As a product: a sum over a middle axis is several times slower on CPU.
    return einsum("bshn,bsh->bsn", jax.nn.relu(products), weights.astype(jnp.float32))


def choose_blocks(scores: jax.Array, visible: jax.Array, selection: BlockSelection) -> tuple[jax.Array, jax.Array]:
    """Best blocks ``[batch, query, chosen]`` of dense scores ``[batch, query, capacity]``, and their maxima."""
    batch, queries, capacity = scores.shape
    count = -(-capacity // selection.size)
    padded = pad_axis(scores, -1, count * selection.size - capacity, -jnp.inf)
    best = padded.reshape(batch, queries, count, selection.size).max(axis=-1)
    newest = (jnp.minimum(visible, capacity) - 1) // selection.size
    is_newest = (jnp.arange(count, dtype=jnp.int32) == newest[..., None]) & (visible > 0)[..., None]
    # Below +inf, so that an overflowed score cannot displace the newest block.
    ranked = jnp.where(is_newest, jnp.inf, jnp.minimum(best, jnp.finfo(jnp.float32).max))
    values, indices = exact_top_k(ranked, selection.chosen(capacity))
    return jnp.where(values == -jnp.inf, -1, indices), unpinned(values, best, newest)


def unpinned(values: jax.Array, best: jax.Array, newest: jax.Array) -> jax.Array:
    """The maxima of chosen blocks ``[..., chosen]``: they were ranked by ``values``, which is +inf for the newest.

    Args:
      best: maxima of all blocks ``[..., blocks]``.
      newest: number of the newest block ``[...]``, −1 without one.
    """
    return jnp.where(values == jnp.inf, jnp.take_along_axis(best, jnp.maximum(newest, 0)[..., None], axis=-1), values)


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
    """See :func:`pallas_kernels.index_select.index_reselect`."""
    batch, total, heads, width = queries.shape
    candidates = block_ids.shape[-1] * block_size
    dtype = operand_dtype(queries.dtype, fmt)
    # Decoding passes through float32, whatever the products run in.
    query_tile = largest_tile(total, lambda tile: batch * tile * candidates * max(width, 2 * heads) * 4)

    def one_tile(
        _, queries: jax.Array, weights: jax.Array, visible: jax.Array, ids: jax.Array, first: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        # In order of entries a position's order is an entry's, which is what decides ties.
        ids = jnp.sort(jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids), axis=-1)
        absent = ids == jnp.iinfo(jnp.int32).max
        entries = jnp.where(absent, 0, ids)[..., None] * block_size + jnp.arange(block_size, dtype=jnp.int32)
        entries = jnp.where(absent[..., None], -1, entries).reshape(*visible.shape, candidates)
        keys = paged_memory.gather(pool, fmt, page_table, entries, dtype)
        has_page = locate(page_table, entries, *pool.payload.shape[:2])[2]
        products = einsum("bshd,bsnd->bshn", queries.astype(dtype), keys)
        live = has_page & (entries < visible[..., None])
        if first is not None:
            live &= entries >= first[..., None]
        values, positions = exact_top_k(jnp.where(live, _over_heads(products, weights), -jnp.inf), top_k)
        chosen = jnp.take_along_axis(entries, jnp.maximum(positions, 0), axis=-1)
        return jnp.where(values == -jnp.inf, -1, chosen), values

    return map_query_tiles(one_tile, query_tile, (queries, weights, visible, block_ids, *optional(first)))
