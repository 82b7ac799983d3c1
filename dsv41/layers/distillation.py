"""What trains an indexer: the divergence of its scores from what the attention's heads look at.

Top-k passes no gradient, so the backbone's loss says nothing to the indexer. Its scores are taken as logits over all
entries that a query may choose, and compared with the mass that the heads put on those that it chose.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import Format, Packed
from pallas_kernels.paged_memory import gather
from pallas_kernels.paged_memory.addressing import locate
from pallas_kernels.products import einsum
from pallas_kernels.tiling import largest_tile, map_query_tiles

_NO_MASS = 1e-20


class IndexScores(NamedTuple):
    """What an indexer scores with; arguments as of :func:`pallas_kernels.index_select.index_select`."""

    queries: jax.Array
    weights: jax.Array
    pool: Packed
    fmt: Format
    page_table: jax.Array
    visible: jax.Array
    first: jax.Array | None


def attention_mass(
    queries: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    chosen: jax.Array,
    log_sum: jax.Array,
    scale: float,
) -> jax.Array:
    """Probability that the heads put on each chosen entry, summed over heads: ``[batch, query, chosen]`` float32.

    Args:
      queries: ``[batch, query, heads, head_dim]``.
      pool, fmt, page_table: of the global entries.
      chosen: int32 ``[batch, query, chosen]``, −1 = nothing, which has no mass.
      log_sum: ``[batch, query, heads]`` float32, log of the softmax's denominator: window, entries and sink.
    """
    batch, total, heads, width = queries.shape

    def some(_, queries: jax.Array, chosen: jax.Array, log_sum: jax.Array) -> jax.Array:
        entries = gather(pool, fmt, page_table, chosen, jnp.float32)
        logits = einsum("bshd,bsnd->bshn", queries.astype(jnp.float32), entries) * scale
        mass = jnp.sum(jnp.exp(logits - log_sum[..., None]), axis=2)
        return jnp.where(locate(page_table, chosen, *pool.payload.shape[:2])[2], mass, 0)

    tile = largest_tile(total, lambda t: batch * t * 4 * chosen.shape[-1] * max(width, heads))
    return map_query_tiles(some, tile, (queries, chosen, log_sum))


def index_divergence(scores: IndexScores, chosen: jax.Array, mass: jax.Array) -> jax.Array:
    """Σ over queries of KL(mass ‖ softmax of the scores), float32 scalar; differentiable in the scores alone.

    Scores of all visible entries exist for a tile of queries at a time, in the backward pass too.

    Args:
      chosen: int32 ``[batch, query, chosen]``; mass: ``[batch, query, chosen]``, normalised here. Queries without any
        count nothing.
    """
    pool, fmt, page_table = scores.pool, scores.fmt, scores.page_table
    batch, total, heads, _ = scores.queries.shape
    capacity = page_table.shape[1] * pool.payload.shape[1]
    every = jnp.broadcast_to(jnp.arange(capacity, dtype=jnp.int32), (batch, capacity))
    keys = gather(pool, fmt, page_table, every[:, None], jnp.float32)[:, 0]
    first = jnp.zeros_like(scores.visible) if scores.first is None else scores.first
    mass = lax.stop_gradient(mass)
    target = mass / jnp.maximum(jnp.sum(mass, axis=-1, keepdims=True), _NO_MASS)

    def some(_, queries, weights, visible, first, chosen, target) -> jax.Array:
        products = einsum("bshd,bnd->bshn", queries.astype(jnp.float32), keys)
        logits = einsum("bsh,bshn->bsn", weights, jax.nn.relu(products))
        seen = (jnp.arange(capacity) < visible[..., None]) & (jnp.arange(capacity) >= first[..., None])
        any_seen = jnp.any(seen, axis=-1)
        logits = jnp.where(seen, logits, jnp.finfo(jnp.float32).min)
        log_q = jax.nn.log_softmax(logits, axis=-1)
        at = jnp.take_along_axis(log_q, jnp.maximum(chosen, 0), axis=-1)
        live = (chosen >= 0) & (target > 0) & any_seen[..., None]
        log_p = jnp.log(jnp.where(live, target, 1))
        return jnp.sum(jnp.where(live, target * (log_p - at), 0), axis=-1)

    tile = largest_tile(total, lambda t: batch * t * 4 * heads * capacity)
    arrays = (scores.queries, scores.weights, scores.visible, first, chosen, target)
    return jnp.sum(map_query_tiles(some, tile, arrays, differentiable=True))
