"""Sparse attention with every query's entries laid out: one softmax, materialised."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import Format, Packed
from pallas_kernels.paged_memory.addressing import locate
from pallas_kernels.sparse_attention.partial import SINK_MARGIN, Partial, finite_top


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
    if rotation is not None:
        columns = (jnp.arange(local_valid.shape[1]) + rotation[:, None]) % local_valid.shape[1]
        local = local.map(lambda leaf: jnp.take_along_axis(leaf, columns[..., None], axis=1))
        local_valid = jnp.take_along_axis(local_valid, columns, axis=1)
    seen = jnp.arange(queries.shape[1])[:, None] + 1 + jnp.arange(window)
    valid = local_valid[:, seen]
    if reach is not None:
        valid = valid & (jnp.arange(window) >= window - reach[..., None])
    entries = jnp.where(valid[..., None], local_fmt.decode(local)[:, seen], 0)
    if pool is not None:
        page, slot, chosen = locate(page_table, indices, *pool.payload.shape[:2])
        picked = jnp.where(chosen[..., None], pool_fmt.decode(pool)[page, slot], 0)
        entries, valid = jnp.concatenate([entries, picked], axis=2), jnp.concatenate([valid, chosen], axis=2)
    logits = jnp.einsum("bshd,bsnd->bshn", queries.astype(jnp.float32), entries, precision=lax.Precision.HIGHEST)
    logits = jnp.where(valid[:, :, None], logits * scale, -jnp.inf)
    top = lax.stop_gradient(logits.max(axis=-1))
    if not return_partial:
        top = jnp.maximum(top, lax.stop_gradient(sink) - SINK_MARGIN)
    p = jnp.exp(logits - finite_top(top)[..., None])
    total = p.sum(axis=-1)
    rounded = p.astype(probability_dtype).astype(jnp.float32)
    out = jnp.einsum("bshn,bsnd->bshd", rounded, entries, precision=lax.Precision.HIGHEST)
    if return_partial:
        return Partial(out, top, total)
    return (out / (total + jnp.exp(sink - top))[..., None]).astype(queries.dtype)
