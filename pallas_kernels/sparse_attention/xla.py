"""Sparse attention in tiles of queries: a band of the window and the gathered entries of one tile at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import paged_memory
from pallas_kernels.formats import Format, Packed
from pallas_kernels.paged_memory.addressing import locate
from pallas_kernels.products import einsum, narrow, operand_dtype
from pallas_kernels.sparse_attention.partial import SINK_MARGIN, Partial, finite_top
from pallas_kernels.tiling import largest_tile, map_query_tiles, pad_axis


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
    """See :func:`pallas_kernels.sparse_attention.sparse_attention`."""
    batch, total, heads, width = queries.shape
    chosen = 0 if indices is None else indices.shape[-1]
    local_columns = window + total if rotation is not None else window
    tile = largest_tile(
        total,
        lambda t: (
            batch * t * 4 * max(chosen * width, heads * (local_columns + (t if rotation is None else 0) + chosen))
        ),
    )
    order = None
    if rotation is None:
        surplus = -total % tile
        local = local.map(lambda leaf: pad_axis(leaf, 1, surplus))
        local_valid = pad_axis(local_valid, 1, surplus, False)
    else:
        columns = local_valid.shape[1]
        order = (jnp.arange(columns, dtype=jnp.int32) - rotation[:, None]) % columns

    def one_tile(
        first: int | jax.Array, queries: jax.Array, indices: jax.Array | None = None, reach: jax.Array | None = None
    ) -> jax.Array | Partial:
        def band(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, first, window + queries.shape[1], axis=1)

        dtype = operand_dtype(queries.dtype, local_fmt)
        query = jnp.arange(queries.shape[1], dtype=jnp.int32)[:, None]
        if order is None:
            mine, valid = local.map(band), band(local_valid)
            ahead = jnp.arange(valid.shape[1], dtype=jnp.int32) - query
        else:  # every tile looks at all columns: they are few where rotation is of use
            mine, valid = local, local_valid
            ahead = order[:, None] - (first + query)
        entries = jnp.where(valid[..., None], local_fmt.decode(mine, dtype), 0)
        seen = (ahead > 0) & (ahead <= window) & valid[:, None]
        if reach is not None:
            seen &= ahead > window - reach[..., None]
        logits = _logits(einsum("bshd,bnd->bshn", queries.astype(dtype), entries), scale, seen)
        top = logits.max(axis=-1)
        if not return_partial:
            top = jnp.maximum(top, sink - SINK_MARGIN)
        if indices is not None:
            dtype = operand_dtype(queries.dtype, pool_fmt)
            picked = paged_memory.gather(pool, pool_fmt, page_table, indices, dtype)
            present = locate(page_table, indices, *pool.payload.shape[:2])[2]
            picked_logits = _logits(einsum("bshd,bsnd->bshn", queries.astype(dtype), picked), scale, present)
            top = jnp.maximum(top, picked_logits.max(axis=-1))

        # The quotient does not depend on the subtracted maximum, so neither does its derivative.
        top = lax.stop_gradient(top)
        subtracted = (finite_top(top) if return_partial else top)[..., None]
        p = jnp.exp(logits - subtracted)
        total = p.sum(axis=-1) if return_partial else jnp.exp(sink - top) + p.sum(axis=-1)
        out = _values("bshn,bnd->bshd", p, entries, probability_dtype)
        if indices is not None:
            p = jnp.exp(picked_logits - subtracted)
            total += p.sum(axis=-1)
            out += _values("bshn,bsnd->bshd", p, picked, probability_dtype)
        if return_partial:
            return Partial(out, top, total)
        return narrow(out / total[..., None], queries.dtype)

    arrays = {"queries": queries, "indices": indices, "reach": reach}
    arrays = {name: array for name, array in arrays.items() if array is not None}

    def named(first: int | jax.Array, *tiles: jax.Array) -> jax.Array | Partial:
        return one_tile(first, **dict(zip(arrays, tiles, strict=True)))

    return map_query_tiles(named, tile, tuple(arrays.values()), differentiable=True)


def _logits(products: jax.Array, scale: float, seen: jax.Array) -> jax.Array:
    """Masked logits ``[batch, query, heads, entries]``; ``seen`` is ``[batch, query, entries]``."""
    return jnp.where(seen[:, :, None], products * scale, -jnp.inf)


def _values(subscripts: str, p: jax.Array, entries: jax.Array, probability_dtype: jnp.dtype) -> jax.Array:
    """Value product of probabilities rounded to ``probability_dtype``."""
    p = narrow(p, probability_dtype)
    dtype = jnp.promote_types(p.dtype, entries.dtype)
    return einsum(subscripts, p.astype(dtype), entries.astype(dtype))
