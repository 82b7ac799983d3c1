"""Index selection over dense scores of all entries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import Format, Packed
from pallas_kernels.index_select.types import BlockSelection, Selection
from pallas_kernels.paged_memory.addressing import locate
from pallas_kernels.top_k.reference import top_k as reference_top_k


def scores(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    first: jax.Array | None = None,
) -> jax.Array:
    """Index scores ``[batch, query, capacity]`` float32 of every entry of a request; −inf where it is not visible."""
    pages, page_entries = pool.payload.shape[:2]
    batch, table_pages = page_table.shape
    entries = jnp.broadcast_to(jnp.arange(table_pages * page_entries), (batch, table_pages * page_entries))
    page, slot, valid = locate(page_table, entries, pages, page_entries)
    keys = jnp.where(valid[..., None], fmt.decode(pool)[page, slot], 0)
    live = valid[:, None] & (entries[:, None] < visible[..., None])
    if first is not None:
        live &= entries[:, None] >= first[..., None]
    products = jnp.einsum("bshd,bnd->bshn", queries.astype(jnp.float32), keys, precision=lax.Precision.HIGHEST)
    total = jnp.sum(jax.nn.relu(products) * weights[..., None], axis=2)
    return jnp.where(live, jnp.where(total == 0, 0.0, total), -jnp.inf)


def choose_blocks(scores: jax.Array, visible: jax.Array, selection: BlockSelection) -> tuple[jax.Array, jax.Array]:
    """Best blocks ``[batch, query, chosen]`` of dense scores ``[batch, query, capacity]``, and their maxima."""
    capacity = scores.shape[-1]
    count = -(-capacity // selection.size)
    padding = [(0, 0), (0, 0), (0, count * selection.size - capacity)]
    padded = jnp.pad(scores, padding, constant_values=-jnp.inf)
    best = padded.reshape(*scores.shape[:2], count, selection.size).max(axis=-1)
    newest = (jnp.minimum(visible, capacity) - 1) // selection.size
    is_newest = (jnp.arange(count) == newest[..., None]) & (visible > 0)[..., None]
    values, indices = reference_top_k(jnp.where(is_newest, jnp.inf, best), selection.chosen(capacity))
    maxima = jnp.take_along_axis(best, jnp.maximum(indices, 0), axis=-1)
    chosen = values > -jnp.inf
    return jnp.where(chosen, indices, -1), jnp.where(chosen, maxima, -jnp.inf)


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
    dense = scores(queries, weights, pool, fmt, page_table, visible, first)
    values, indices = reference_top_k(dense, top_k)
    if first is not None:  # a query for which nothing is visible has no newest block
        visible = jnp.where(first < jnp.minimum(visible, dense.shape[-1]), visible, 0)
    chosen = () if blocks is None else choose_blocks(dense, visible, blocks)
    return Selection(jnp.where(values == -jnp.inf, -1, indices), values, *chosen)


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
    dense = scores(queries, weights, pool, fmt, page_table, visible, first)
    block = jnp.arange(dense.shape[-1]) // block_size
    candidate = jnp.any(block == block_ids[..., None], axis=2)
    values, indices = reference_top_k(jnp.where(candidate, dense, -jnp.inf), top_k)
    return jnp.where(values == -jnp.inf, -1, indices), values
