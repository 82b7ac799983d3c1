"""Index selection on Hopper: packed keys to scores and maxima of blocks in one kernel, then the top-k kernels.

Scores of the official shapes are made by a Mosaic GPU kernel, others by a Pallas-Triton one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tiling
from pallas_kernels.backend import interpreted
from pallas_kernels.formats import FP4_E8M0, Format, Packed
from pallas_kernels.index_select import gpu_mosaic, gpu_triton
from pallas_kernels.index_select.types import BlockSelection, Selection
from pallas_kernels.index_select.xla import optional, unpinned, with_something_visible
from pallas_kernels.tiling import map_query_tiles, pad_axis
from pallas_kernels.top_k.gpu import select_rows
from pallas_kernels.top_k.gpu import unsupported as top_k_unsupported

# Queries of a tile are a multiple of this where so many fit: whole blocks of queries of 32 heads.
_TOGETHER = 16
# Block maxima without a block selection serve the top-k alone.
_GROUP = 8


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
    batch, total = queries.shape[:2]
    page_entries, table_pages = pool.payload.shape[1], page_table.shape[1]
    capacity = table_pages * page_entries
    size = _GROUP if blocks is None else blocks.size
    query_tile = _query_tile(total, batch * (capacity + capacity // size) * 4)
    mosaic = not interpreted() and gpu_mosaic.takes(queries, pool, size, gathered=False)

    def one_tile(
        _, queries: jax.Array, weights: jax.Array, visible: jax.Array, first: jax.Array | None = None
    ) -> Selection:
        shape = visible.shape
        lengths = jnp.clip(visible, 0, capacity)
        if mosaic:
            runs = gpu_mosaic.page_runs(page_table, *pool.payload.shape[:2])
            scores, maxima = gpu_mosaic.scores(queries, weights, pool, runs, gpu_mosaic.KEYS, lengths, size)
        else:
            scores, maxima = gpu_triton.all_scores(queries, weights, pool, page_table, lengths, size)
        if first is not None:
            scores, maxima = _from(first, scores, lengths, size)
            lengths = with_something_visible(lengths, capacity, first)
        rows, best = scores.reshape(-1, scores.shape[-1]), maxima.reshape(-1, maxima.shape[-1])
        lengths = lengths.reshape(-1)
        shared = (best, size) if size > 1 else None
        values, indices = select_rows(rows, lengths, top_k, shared)
        indices = jnp.where(values == -jnp.inf, -1, indices).reshape(*shape, top_k)
        entries = Selection(indices, values.reshape(*shape, top_k))
        if blocks is None:
            return entries
        count, chosen = pl.cdiv(lengths, size), blocks.chosen(capacity)
        values, ids = select_rows(best, count, chosen, pinned=count - 1)
        maxima = unpinned(values, best, count - 1).reshape(*shape, chosen)
        return Selection(*entries[:2], jnp.where(values == -jnp.inf, -1, ids).reshape(*shape, chosen), maxima)

    return map_query_tiles(one_tile, query_tile, (queries, weights, visible, *optional(first)))


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
    batch, total = queries.shape[:2]
    candidates = block_ids.shape[-1] * block_size
    query_tile = _query_tile(total, batch * candidates * 4)
    mosaic = not interpreted() and gpu_mosaic.takes(queries, pool, block_size, gathered=True)

    def one_tile(
        _, queries: jax.Array, weights: jax.Array, visible: jax.Array, ids: jax.Array, first: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        # In order of entries a position's order is an entry's, which is what decides ties.
        ids = jnp.sort(jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids), axis=-1)
        ids = jnp.where(ids == jnp.iinfo(jnp.int32).max, -1, ids)
        if mosaic:
            shape = pool.payload.shape[:2]
            runs, limits = gpu_mosaic.block_runs(page_table, *shape, ids, block_size, visible)
            # Every query has keys of its own: a list.
            lists = [x.reshape(-1, 1, *x.shape[2:]) for x in (queries, weights, limits)]
            scores, _ = gpu_mosaic.scores(
                *lists[:2], pool, runs.reshape(-1, runs.shape[-1]), gpu_mosaic.RUN, lists[2], block_size=0
            )
            lengths = limits.reshape(-1)
        else:
            scores = gpu_triton.candidate_scores(queries, weights, pool, page_table, visible, ids, block_size)
            lengths = jnp.full(visible.size, candidates, jnp.int32)
        rows = scores.reshape(visible.size, -1)
        if first is not None:
            at = jnp.arange(rows.shape[1], dtype=jnp.int32)
            block = ids.reshape(visible.size, -1)[:, jnp.minimum(at // block_size, ids.shape[-1] - 1)]
            rows = jnp.where(block * block_size + at % block_size >= first.reshape(-1, 1), rows, -jnp.inf)
        values, at = select_rows(rows, lengths, top_k)
        values, at = (x.reshape(*visible.shape, top_k) for x in (values, at))
        at = jnp.maximum(at, 0)
        chosen = jnp.take_along_axis(ids, at // block_size, axis=-1) * block_size + at % block_size
        return jnp.where(values == -jnp.inf, -1, chosen), values

    return map_query_tiles(one_tile, query_tile, (queries, weights, visible, block_ids, *optional(first)))


def _from(first: jax.Array, scores: jax.Array, lengths: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Scores ``[batch, query, entries]`` of entries from ``first`` to ``lengths``, else −inf; the maxima of blocks.

    A pass of its own over the scores: the kernels know only ends, and leave undefined what no query sees.
    """
    entry = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    scores = jnp.where((entry >= first[..., None]) & (entry < lengths[..., None]), scores, -jnp.inf)
    padded = pad_axis(scores, 2, -scores.shape[-1] % size, -jnp.inf)
    return scores, padded.reshape(*scores.shape[:2], -1, size).max(axis=-1)


def index_select_unsupported(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    top_k: int,
    blocks: BlockSelection | None = None,
    first: jax.Array | None = None,
) -> str | None:
    """Why the kernels do not run these arguments; None if they do."""
    capacity = page_table.shape[1] * pool.payload.shape[1]
    reason = _unsupported(queries, pool, fmt, page_table) or _top_k_unsupported(capacity, top_k)
    if reason is None and blocks is not None:
        reason = _block_unsupported(blocks.size) or _top_k_unsupported(capacity, blocks.chosen(capacity))
    return reason


def index_reselect_unsupported(
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
) -> str | None:
    """Why the kernels do not run these arguments; None if they do."""
    candidates = block_ids.shape[-1] * block_size
    return (
        _unsupported(queries, pool, fmt, page_table)
        or _block_unsupported(block_size)
        or _top_k_unsupported(candidates, top_k)
    )


def _unsupported(queries: jax.Array, pool: Packed, fmt: Format, page_table: jax.Array) -> str | None:
    heads, width = queries.shape[2:]
    if fmt != FP4_E8M0:
        return f"keys are {fmt}, not FP4_E8M0"
    if queries.dtype != jnp.bfloat16:
        return f"queries are {queries.dtype}, not bfloat16"
    if width % 32 or width != pl.next_power_of_2(width):
        return f"width {width} is not a power of two from 32 up"
    if not 16 <= heads <= gpu_triton.COLUMNS or heads != pl.next_power_of_2(heads):
        return f"{heads} heads are not a power of two from 16 to {gpu_triton.COLUMNS}"
    if 0 in (queries.size, page_table.size, pool.payload.size):
        return "an array is empty"
    # Triton's offsets are signed 32-bit numbers up to arrays of 2³² bytes.
    if 2**31 < pool.payload.size <= 2**32:
        return f"the pool has {pool.payload.size} bytes, between 2³¹ and 2³²"
    return None


def _top_k_unsupported(n: int, k: int) -> str | None:
    return top_k_unsupported(jax.ShapeDtypeStruct((n,), jnp.float32), k)


def _block_unsupported(size: int) -> str | None:
    if size > gpu_triton.KEYS or size != pl.next_power_of_2(size):
        return f"block size {size} is not a power of two up to {gpu_triton.KEYS}"
    return None


def _query_tile(total: int, query_bytes: int) -> int:
    """Queries of a tile: as many as the budget allows, since the selection wants rows for all processors."""
    most = max(tiling.TEMPORARY_BYTES // query_bytes, 1)
    tiles = pl.cdiv(total, most)
    tile = pl.cdiv(total, tiles)
    # A multiple of a few, so that several queries share a product.
    few = min(_TOGETHER, most)
    return tile if tiles == 1 else min(pl.cdiv(tile, few) * few, most // few * few)
