"""The global memory over shards of the context: each device scores and attends to the pages that it holds.

Page j of a request lies on shard j mod C of the C shards, so that requests of any length spread evenly. A page table
numbers pages inside the pool of the request's batch shard: shard c holds numbers c·P … (c + 1)·P − 1. What a device
holds of a request it sees as a request of its own: page j // C of it is page j of the whole, and since both grow
together, the visible entries of the whole are the first few of each shard.

    selection   each shard chooses its best entries; all shards get the best of these, by their numbers in the whole
    attention   each shard attends to those it holds, the first one to the window too; sums come together. Of a query's
                chosen entries a shard holds about its share: it takes as many at once, and the rest, where one is left,
                in further rounds

Numbers of candidate blocks go the same way as entries': a page is a whole number of blocks.

In a long chunk a device has some columns (:mod:`dsv41.sharding.split`): every shard looks for what all of them ask,
and what it finds goes to the shard whose columns they are.

Every function here is its single-device counterpart where the context is not divided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv41.sharding.exchange import likely_most
from dsv41.sharding.parallel import Parallel
from dsv41.sharding.rules import MeshError
from dsv41.sharding.split import Split
from pallas_kernels.formats import Format, Packed
from pallas_kernels.index_select import BlockSelection, Selection, index_reselect, index_select
from pallas_kernels.index_select.best import best, best_blocks
from pallas_kernels.sparse_attention import Partial, merge_partials, sparse_attention
from pallas_kernels.sparse_attention.partial import finite_top, join_partials

_TILE = 64
"""Kernels take chosen entries in multiples of it."""


@dataclasses.dataclass(frozen=True)
class Share:
    """Which pages of a request one shard holds: pages ``shard``, ``shard`` + ``shards``, …

    *Items* are what a page holds a whole number of: entries, or blocks of entries.

    Attributes:
      shard: int32, this shard.
      shards: how many there are.
    """

    shard: jax.Array | int
    shards: int

    def pages(self, page_table: jax.Array) -> jax.Array:
        """The columns of a page table int32 ``[batch, table_pages]`` that are held, ``[batch, table_pages / shards]``.

        Raises:
          MeshError: the shards do not divide them.
        """
        batch, pages = page_table.shape
        if pages % self.shards:
            raise MeshError(f"page table: {pages} pages a request are not divisible by {self.shards} context shards")
        columns = page_table.reshape(batch, pages // self.shards, self.shards)
        return lax.dynamic_index_in_dim(columns, self.shard, axis=2, keepdims=False)

    def visible(self, visible: jax.Array, page_items: int) -> jax.Array:
        """How many of the first ``visible`` items (int32, any shape) are held; they are the first of those held."""
        rounds, rest = jnp.divmod(visible, self.shards * page_items)
        return rounds * page_items + jnp.clip(rest - self.shard * page_items, 0, page_items)

    def held(self, items: jax.Array, page_items: int) -> jax.Array:
        """Numbers of items among those held, int32 of any shape; −1 for items held elsewhere and for none (−1)."""
        page, at = jnp.divmod(items, page_items)
        ours = (items >= 0) & (page % self.shards == self.shard)
        return jnp.where(ours, page // self.shards * page_items + at, -1)

    def whole(self, held: jax.Array, page_items: int) -> jax.Array:
        """Numbers of held items in the whole request; −1 stays."""
        page, at = jnp.divmod(held, page_items)
        return jnp.where(held < 0, -1, (page * self.shards + self.shard) * page_items + at)


def context_places(parallel: Parallel) -> tuple[str, ...]:
    """The mesh axes that a request's pages are divided over: those of pages that requests are not divided over."""
    return tuple(axis for axis in parallel.places("pages") if axis not in parallel.places("batch"))


def context_share(parallel: Parallel) -> Share | None:
    """This device's share of its requests' pages; None where it holds all."""
    places = context_places(parallel)
    return Share(lax.axis_index(places), parallel.divided(places)) if places else None


def page_tables(parallel: Parallel, page_table: jax.Array, pages: int) -> tuple[jax.Array, jax.Array]:
    """Page tables of a device's part of the pool.

    Args:
      page_table: int32 ``[batch, table_pages]``, as a state has it.
      pages: of this device's part.

    Returns:
      the table to append by, int32 ``[batch, table_pages]``, in which pages of other shards are outside
      [0, ``pages``), and the table to read by, ``[batch, table_pages / shards]``, of this shard's pages alone.

    Raises:
      MeshError: the shards do not divide ``table_pages``.
    """
    share = context_share(parallel)
    if share is None:
        return page_table, page_table
    # No number outside the pool becomes a page by it: the smallest ones wrap round to more than any pool has.
    own = page_table - share.shard * pages
    return own, share.pages(own)


def select(
    split: Split,
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
    """The best entries of whole requests, and the best blocks, for this device's columns.

    Args:
      queries, weights: of this device's columns.
      pool, page_table: this shard's, the latter of its own pages.
      others: as of :func:`pallas_kernels.index_select.index_select`, of all columns and equal on all shards.

    Returns:
      the same selection as over the whole pool, to the rounding of scores.

    Raises:
      MeshError: a page is no whole number of blocks.
    """
    share = context_share(split.parallel)
    if share is None:
        visible, first = split.own((visible, first))
        return index_select(queries, weights, pool, fmt, page_table, visible, top_k, blocks, first)
    queries, weights = split.whole((queries, weights))
    entries = pool.payload.shape[1]
    held = share.visible(visible, entries)
    begin = None if first is None else share.visible(first, entries)
    own = index_select(queries, weights, pool, fmt, page_table, held, top_k, blocks, begin)
    chosen = _best_of_all(split, share.whole(own.indices, entries), own.scores, top_k)
    if blocks is None:
        return Selection(*chosen)
    per_page = page_blocks(entries, blocks.size)
    capacity = page_table.shape[1] * share.shards * entries
    newest = jnp.where(visible > 0, (jnp.minimum(visible, capacity) - 1) // blocks.size, -1)
    numbers, scores = (_of_all(split, x) for x in (share.whole(own.blocks, per_page), own.block_scores))
    return Selection(*chosen, *best_blocks(numbers, scores, split.own(newest), blocks.chosen(capacity)))


def reselect(
    split: Split,
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
    """The best entries inside candidate blocks of whole requests, for this device's columns.

    Args:
      queries, weights: of this device's columns.
      pool, page_table: this shard's, the latter of its own pages.
      others: as of :func:`pallas_kernels.index_select.index_reselect`, of all columns and equal on all shards.

    Returns:
      entries and scores as over the whole pool, to the rounding of scores.

    Raises:
      MeshError: a page is no whole number of blocks.
    """
    share = context_share(split.parallel)
    if share is None:
        visible, block_ids, first = split.own((visible, block_ids, first))
        return index_reselect(queries, weights, pool, fmt, page_table, visible, block_ids, block_size, top_k, first)
    queries, weights = split.whole((queries, weights))
    entries = pool.payload.shape[1]
    held = share.held(block_ids, page_blocks(entries, block_size))
    shown = share.visible(visible, entries)
    begin = None if first is None else share.visible(first, entries)
    own, scores = index_reselect(queries, weights, pool, fmt, page_table, shown, held, block_size, top_k, begin)
    return _best_of_all(split, share.whole(own, entries), scores, top_k)


def attend(
    split: Split,
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
    **static: Any,
) -> jax.Array:
    """Attention of this device's columns to the window and to chosen entries of whole requests.

    Args:
      queries: of this device's columns.
      pool, page_table: this shard's, the latter of its own pages.
      indices: int32 ``[batch, query, chosen]``, entries of the whole request.
      others: as of :func:`pallas_kernels.sparse_attention.sparse_attention`, of all columns and equal on all shards.

    Returns:
      ``[batch, query, heads, head_dim]`` in the queries' dtype.
    """
    share = context_share(split.parallel) if pool is not None else None
    if share is None:
        local, local_valid = split.band((local, local_valid), static["window"])
        indices, reach = split.own((indices, reach))
        return sparse_attention(
            queries, local, local_fmt, local_valid, pool, pool_fmt, page_table, indices, sink, rotation, reach, **static
        )
    queries_of_all = split.whole(queries)

    def partial(valid: jax.Array, columns: jax.Array) -> Partial:
        arrays = (queries_of_all, local, local_fmt, valid, pool, pool_fmt, page_table, columns, sink, rotation, reach)
        return sparse_attention(*arrays, **static, return_partial=True)

    # Every shard has the window; it counts once.
    found = _in_rounds(partial, local_valid & (share.shard == 0), share.held(indices, pool.payload.shape[1]), share)
    return _joined(split, found, sink, queries.dtype)


def room(chosen: int, shards: int) -> int:
    """How many of a query's chosen entries one of the shards takes at once: more than it holds, but for bad luck.

    All of them where that would spare less than a quarter.
    """
    some = -(-likely_most(chosen / shards) // _TILE) * _TILE
    return some if some <= 3 * chosen // 4 else chosen


def _in_rounds(
    partial: Callable[[jax.Array, jax.Array], Partial], local_valid: jax.Array, held: jax.Array, share: Share
) -> Partial:
    """``partial`` of the window and of held entries, int32 ``[batch, query, chosen]``, −1 for those held elsewhere."""
    chosen = held.shape[-1]
    width = room(chosen, share.shards)
    if width == chosen:
        return partial(local_valid, held)
    order = jnp.argsort(held < 0, axis=-1, stable=True)
    held = jnp.take_along_axis(held, order, axis=-1)
    rounds = -(-jnp.max(jnp.sum(held >= 0, axis=-1)) // width)
    held = jnp.pad(held, ((0, 0), (0, 0), (0, -chosen % width)), constant_values=-1)

    def one_more(number: jax.Array, found: Partial) -> Partial:
        columns = lax.dynamic_slice_in_dim(held, number * width, width, axis=2)
        more = partial(jnp.zeros_like(local_valid), columns)
        # An empty part changes nothing, to the bit: what a query gets does not depend on others' rounds.
        return join_partials(jax.tree.map(lambda *parts: jnp.stack(parts), found, more))

    return lax.fori_loop(1, rounds, one_more, partial(local_valid, held[..., :width]))


def _joined(split: Split, partial: Partial, sink: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The attention of all shards' parts, for this device's columns; a query that sees nothing anywhere gives 0."""
    places = context_places(split.parallel)
    top = lax.pmax(partial.top, places)
    weight = jnp.exp(partial.top - finite_top(top))
    # Sums and no gather: a device of C then receives about two parts' bytes, or one, and not C − 1.
    out, total = split.sum((partial.out * weight[..., None], partial.total * weight), places)
    return merge_partials(Partial(out[None], split.own(top)[None], total[None]), sink, dtype)


def page_blocks(page_entries: int, block_size: int) -> int:
    """Blocks of a page.

    Raises:
      MeshError: it is no whole number.
    """
    if page_entries % block_size:
        raise MeshError(
            f"candidate_block_size: {block_size} does not divide a page's {page_entries} entries, "
            "which a mesh with a context axis needs"
        )
    return page_entries // block_size


def _best_of_all(split: Split, items: jax.Array, scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    return best(_of_all(split, items), _of_all(split, scores), count)


def _of_all(split: Split, x: jax.Array) -> jax.Array:
    """What all shards have for this device's columns of ``[batch, query, ...]``, along a new first axis."""
    if not split.places:
        return lax.all_gather(x, context_places(split.parallel))
    parts = x.reshape(x.shape[0], split.parts, -1, *x.shape[2:])
    return lax.all_to_all(jnp.moveaxis(parts, 1, 0), split.places, split_axis=0, concat_axis=0, tiled=True)
