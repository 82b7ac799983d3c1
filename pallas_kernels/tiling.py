"""How much temporary memory an operation may take at once, and the tiles that follow from it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# One large temporary of one operation. Big enough to keep matrix units busy, small beside weights and caches.
TEMPORARY_BYTES = 64 * 2**20


def largest_tile(total: int, tile_bytes: Callable[[int], int]) -> int:
    """Rows of a tile: all of them if their largest temporary fits, else equal parts that do; never less than 1.

    Args:
      total: rows to cover.
      tile_bytes: bytes of the largest temporary of a tile of that many rows.
    """
    parts = 1
    while -(-total // parts) > 1 and tile_bytes(-(-total // parts)) > TEMPORARY_BYTES:
        parts *= 2
    return max(-(-total // parts), 1)


def pad_axis(x: jax.Array, axis: int, after: int, value: int | float | bool = 0) -> jax.Array:
    """``x`` with ``after`` more elements of ``value`` at the end of one axis."""
    if after == 0:
        return x
    shape = list(x.shape)
    shape[axis] = after
    return jnp.concatenate([x, jnp.full(shape, value, x.dtype)], axis=axis)


def map_query_tiles(f: Callable, tile: int, arrays: tuple[jax.Array, ...], differentiable: bool = False):
    """Applies ``f`` to tiles of the query axis, one after another, and joins the results.

    Args:
      f: ``f(first_query, *tiles)`` with tiles ``[batch, tile, ...]``; returns a pytree of ``[batch, tile, ...]``.
      tile: queries of a tile. If one tile covers all queries there is no loop.
      arrays: ``[batch, query, ...]``, cut along the query axis; padded to whole tiles, floats with 0, integers
        (indices, counts) with −1, which is nothing.
      differentiable: recompute a tile in the backward pass instead of keeping its temporaries.

    Returns:
      The pytree of ``f`` with leaves ``[batch, query, ...]``.
    """
    total = arrays[0].shape[1]
    if tile >= total:
        return f(0, *arrays)
    count = -(-total // tile)

    def split(x: jax.Array) -> jax.Array:
        x = pad_axis(x, 1, count * tile - total, -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0)
        return jnp.moveaxis(x.reshape(x.shape[0], count, tile, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], count * tile, *x.shape[3:])[:, :total]

    body = jax.checkpoint(lambda args: f(*args)) if differentiable else lambda args: f(*args)
    first = jnp.arange(count, dtype=jnp.int32) * tile
    return jax.tree.map(join, lax.map(body, (first, *map(split, arrays))))
