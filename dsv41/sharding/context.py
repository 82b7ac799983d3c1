"""The global memory over shards of the context: each device scores and attends to the pages that it holds.

Page j of a request lies on shard j mod C of the C shards, so that requests of any length spread evenly. A page table
numbers pages inside the pool of the request's batch shard: shard c holds numbers c·P … (c + 1)·P − 1. What a device
holds of a request it sees as a request of its own: page j // C of it is page j of the whole, and since both grow
together, the visible entries of the whole are the first few of each shard.

    selection   each shard chooses its best entries; all shards get the best of these, by their numbers in the whole
    attention   each shard attends to those it holds, the first one to the window too; sums come together

Numbers of candidate blocks go the same way as entries': a page is a whole number of blocks.

Every function here is its single-device counterpart where the context is not divided.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dsv41.sharding.parallel import Parallel
from dsv41.sharding.rules import MeshError
from pallas_kernels.formats import Format, Packed
from pallas_kernels.index_select import BlockSelection, Selection, index_reselect, index_select
from pallas_kernels.sparse_attention import Partial, merge_partials, sparse_attention
from pallas_kernels.sparse_attention.partial import finite_top
from pallas_kernels.tiling import pad_axis


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


def best(items: jax.Array, scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The best items of several lists, best first; of equal scores the lowest item.

    A bitonic merge: XLA's sort takes minutes to compile for a TPU.

    Args:
      items: int32 ``[lists, ..., n]``, distinct but for −1; each list ordered as the result is.
      scores: float32 ``[lists, ..., n]``; −inf: not an item.
      count: how many (static).

    Returns:
      items int32 and scores float32 ``[..., count]``; −1 and −inf behind the last.
    """
    n = scores.shape[-1]
    width = 1 << (max(n, count) - 1).bit_length()
    lists = (
        pad_axis(jnp.where(scores == -jnp.inf, -1, items), -1, width - n, -1),
        pad_axis(scores, -1, width - n, -jnp.inf),
    )
    while (number := lists[0].shape[0]) > 1:
        # Of an odd number of lists the last one waits.
        merged = _merge(*(tuple(x[first : number - number % 2 : 2] for x in lists) for first in range(2)))
        lists = tuple(jnp.concatenate([x, y[number - number % 2 :]]) for x, y in zip(merged, lists, strict=True))
    return tuple(x[0, ..., :count] for x in lists)


def _merge(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The better half of two ordered lists ``(items, scores)`` of a power of two, ordered."""
    turned = tuple(x[..., ::-1] for x in other)
    best = _pick(_is_better(one, turned), one, turned)
    width = best[0].shape[-1]
    at = jnp.arange(width)

    # A loop: written out, stages are slow to compile, the more so where a compiler computes each of them anew in all
    # that read it.
    def stage(i: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        distance = width >> (i + 1)
        leads = at & distance == 0
        after, before = (tuple(jnp.roll(leaf, by, axis=-1) for leaf in x) for by in (-distance, distance))
        partner = _pick(leads, after, before)
        return _pick(_is_better(x, partner) == leads, x, partner)

    return lax.fori_loop(0, width.bit_length() - 1, stage, best)


def _is_better(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> jax.Array:
    return (one[1] > other[1]) | ((one[1] == other[1]) & (one[0] < other[0]))


def _pick(which: jax.Array, *pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return tuple(jnp.where(which, x, y) for x, y in zip(*pair, strict=True))


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
    parallel: Parallel,
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
    """The best entries of whole requests, and the best blocks, on every shard.

    Args:
      pool, page_table: this shard's, the latter of its own pages.
      others: as of :func:`pallas_kernels.index_select.index_select`, and equal on all shards.

    Returns:
      the same selection as over the whole pool, to the rounding of scores.

    Raises:
      MeshError: a page is no whole number of blocks.
    """
    share = context_share(parallel)
    if share is None:
        return index_select(queries, weights, pool, fmt, page_table, visible, top_k, blocks, first)
    entries = pool.payload.shape[1]
    held = share.visible(visible, entries)
    begin = None if first is None else share.visible(first, entries)
    own = index_select(queries, weights, pool, fmt, page_table, held, top_k, blocks, begin)
    chosen = _best_of_all(parallel, share.whole(own.indices, entries), own.scores, top_k)
    if blocks is None:
        return Selection(*chosen)
    per_page = page_blocks(entries, blocks.size)
    capacity = page_table.shape[1] * share.shards * entries
    newest = jnp.where(visible > 0, (jnp.minimum(visible, capacity) - 1) // blocks.size, -1)
    numbers, scores = (_of_all(parallel, x) for x in (share.whole(own.blocks, per_page), own.block_scores))
    return Selection(*chosen, *best_blocks(numbers, scores, newest, blocks.chosen(capacity)))


def best_blocks(blocks: jax.Array, scores: jax.Array, newest: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The newest block and the best others, of what all shards chose.

    Each shard has chosen its own newest block whatever its score. That pushes out nothing: the whole choice has one
    place for the newest, so that of any other shard's blocks one less than ``count`` can be in it.

    Args:
      blocks, scores: ``[shards, batch, query, chosen]``, numbers in the whole request and largest scores, a shard's
        newest block first.
      newest: int32 ``[batch, query]``, number of the newest block; −1 where nothing is visible.
      count: blocks to choose (static).

    Returns:
      blocks and scores ``[batch, query, count]``, as of :class:`~pallas_kernels.index_select.Selection`.
    """
    is_newest = (blocks >= 0) & (blocks == newest[..., None])
    own = jnp.max(jnp.where(is_newest, scores, -jnp.inf), axis=(0, -1))[..., None]
    # As in the kernels, no other score may reach what the newest is ranked by.
    ranked = jnp.where(is_newest, jnp.inf, jnp.minimum(scores, jnp.finfo(jnp.float32).max))
    blocks, ranked = best(*_first_in_order(blocks, ranked), count)
    return blocks, jnp.where(ranked == jnp.inf, own, ranked)


def _first_in_order(items: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lists ``[..., n]`` that are in order but for their first item, in order."""
    lists = (items, scores)
    first, rest = (tuple(x[..., part] for x in lists) for part in (slice(1), slice(1, None)))
    better = jnp.sum(_is_better(rest, first), axis=-1, keepdims=True)
    at = jnp.arange(items.shape[-1])
    return _pick(at == better, first, _pick(at < better, tuple(jnp.roll(x, -1, axis=-1) for x in lists), lists))


def reselect(
    parallel: Parallel,
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
    """The best entries inside candidate blocks of whole requests, on every shard.

    Args:
      pool, page_table: this shard's, the latter of its own pages.
      others: as of :func:`pallas_kernels.index_select.index_reselect`, and equal on all shards.

    Returns:
      entries and scores as over the whole pool, to the rounding of scores.

    Raises:
      MeshError: a page is no whole number of blocks.
    """
    share = context_share(parallel)
    if share is None:
        return index_reselect(queries, weights, pool, fmt, page_table, visible, block_ids, block_size, top_k, first)
    entries = pool.payload.shape[1]
    held = share.held(block_ids, page_blocks(entries, block_size))
    shown = share.visible(visible, entries)
    begin = None if first is None else share.visible(first, entries)
    own, scores = index_reselect(queries, weights, pool, fmt, page_table, shown, held, block_size, top_k, begin)
    return _best_of_all(parallel, share.whole(own, entries), scores, top_k)


def attend(
    parallel: Parallel,
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
    """Attention to the window and to chosen entries of whole requests, on every shard.

    Args:
      pool, page_table: this shard's, the latter of its own pages.
      indices: int32 ``[batch, query, chosen]``, entries of the whole request.
      others: as of :func:`pallas_kernels.sparse_attention.sparse_attention`, and equal on all shards.

    Returns:
      ``[batch, query, heads, head_dim]`` in the queries' dtype.
    """
    share = context_share(parallel) if pool is not None else None
    if share is None:
        return sparse_attention(
            queries, local, local_fmt, local_valid, pool, pool_fmt, page_table, indices, sink, rotation, reach, **static
        )
    partial = sparse_attention(
        queries,
        local,
        local_fmt,
        # Every shard has the window; it counts once.
        local_valid & (share.shard == 0),
        pool,
        pool_fmt,
        page_table,
        share.held(indices, pool.payload.shape[1]),
        sink,
        rotation,
        reach,
        **static,
        return_partial=True,
    )
    return _joined(context_places(parallel), partial, sink, queries.dtype)


def _joined(places: tuple[str, ...], partial: Partial, sink: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The attention of all shards' parts, on each of them; a query that sees nothing anywhere gives 0."""
    # Sums and no gather: a device of C then receives about two parts' bytes, and not C − 1.
    top = lax.pmax(partial.top, places)
    weight = jnp.exp(partial.top - finite_top(top))
    out, total = lax.psum((partial.out * weight[..., None], partial.total * weight), places)
    return merge_partials(Partial(out[None], top[None], total[None]), sink, dtype)


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


def _best_of_all(parallel: Parallel, items: jax.Array, scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    return best(_of_all(parallel, items), _of_all(parallel, scores), count)


def _of_all(parallel: Parallel, x: jax.Array) -> jax.Array:
    """What all shards have, along a new first axis."""
    return lax.all_gather(x, context_places(parallel))
