"""Paged memory as loops over requests and entries, on numpy arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import Format, Packed

_encode = jax.jit(lambda fmt, values: fmt.encode(values), static_argnums=0)


def append(
    pool: Packed, fmt: Format, page_table: jax.Array, start: jax.Array, count: jax.Array, values: jax.Array
) -> Packed:
    """See :func:`pallas_kernels.paged_memory.append`."""
    new = _encode(fmt, values).map(np.asarray)
    out = pool.map(lambda leaf: np.array(leaf))
    pages, page_entries = pool.payload.shape[:2]
    table = np.asarray(page_table)
    for b in range(table.shape[0]):
        for g in range(int(count[b])):
            entry = int(start[b]) + g
            if entry // page_entries >= table.shape[1]:
                continue
            page, slot = int(table[b, entry // page_entries]), entry % page_entries
            if 0 <= page < pages:
                out.payload[page, slot] = new.payload[b, g]
                if out.scales is not None:
                    out.scales[page, slot] = new.scales[b, g]
    return out.map(jnp.asarray)


def gather(
    pool: Packed, fmt: Format, page_table: jax.Array, indices: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """See :func:`pallas_kernels.paged_memory.gather`."""
    decoded = np.asarray(fmt.decode(pool, dtype))
    pages, page_entries, width = decoded.shape
    table, indices = np.asarray(page_table), np.asarray(indices)
    out = np.zeros((*indices.shape, width), decoded.dtype)
    for where in np.ndindex(indices.shape):
        entry = int(indices[where])
        if 0 <= entry < table.shape[1] * page_entries:
            page = int(table[where[0], entry // page_entries])
            if 0 <= page < pages:
                out[where] = decoded[page, entry % page_entries]
    return jnp.asarray(out)
