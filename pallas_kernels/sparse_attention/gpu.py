"""Sparse attention on NVIDIA GPUs: the Mosaic GPU kernel for what it takes, the Triton one for other float entries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import interpreted
from pallas_kernels.formats import Format, Packed
from pallas_kernels.sparse_attention import gpu_mosaic, gpu_triton, xla
from pallas_kernels.sparse_attention.partial import Partial, join_partials, merge_partials

# Of an H200; other Hopper cards have some less, and then some blocks wait.
_PROCESSORS = 132


def unsupported(
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
) -> str | None:
    """Why no kernel can run these arguments; None if one can."""
    arrays = (queries, local, local_fmt, local_valid, pool, pool_fmt, page_table, indices, sink, rotation, reach)
    reason = _not_for_mosaic(queries, local_fmt, pool, pool_fmt, indices, reach, window, probability_dtype)
    if reason is None:
        return None
    options = {"window": window, "scale": scale, "probability_dtype": probability_dtype}
    other = gpu_triton.unsupported(*arrays, **options, return_partial=return_partial)
    return None if other is None else f"{reason}; {other}"


def _not_for_mosaic(
    queries: jax.Array,
    local_fmt: Format,
    pool: Packed | None,
    pool_fmt: Format,
    indices: jax.Array | None,
    reach: jax.Array | None,
    window: int,
    probability_dtype: jnp.dtype,
) -> str | None:
    if interpreted():
        return "the Mosaic GPU kernel has no interpret mode"
    if reach is not None:
        return "the Mosaic GPU kernel sees whole windows, not a reach"
    heads, width = queries.shape[-2:]
    if queries.dtype != jnp.bfloat16:
        return f"queries are {queries.dtype}"
    if jnp.dtype(probability_dtype) != jnp.bfloat16:
        return f"probabilities are {jnp.dtype(probability_dtype).name}"
    if heads > gpu_mosaic.HEADS:
        return f"{heads} heads are more than {gpu_mosaic.HEADS}"
    if width != gpu_mosaic.WIDTH:
        return f"head_dim {width} is not {gpu_mosaic.WIDTH}"
    tiles = _tiles(window, indices)
    if tiles > gpu_mosaic.MOST_TILES:
        return f"{tiles} tiles of entries are more than {gpu_mosaic.MOST_TILES}"
    for name, fmt in (("window", local_fmt), ("pool", pool_fmt if pool is not None else local_fmt)):
        if fmt not in gpu_mosaic.FORMATS:
            return f"{name} entries are {fmt}"
    return None


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
    static = {"window": window, "scale": scale, "probability_dtype": jnp.dtype(probability_dtype)}
    static["return_partial"] = return_partial
    if _not_for_mosaic(queries, local_fmt, pool, pool_fmt, indices, reach, window, probability_dtype) is not None:
        return gpu_triton.sparse_attention(
            queries, local, local_fmt, local_valid, pool, pool_fmt, page_table, indices, sink, rotation, reach, **static
        )
    arrays = (queries, local, local_valid, pool, page_table, indices, sink, rotation)
    return _attend(local_fmt, pool_fmt, tuple(static.items()), *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # what is made only for its shape must not be computed
def _attend(
    local_fmt: Format,
    pool_fmt: Format,
    static: tuple,
    queries: jax.Array,
    local: Packed,
    local_valid: jax.Array,
    pool: Packed | None,
    page_table: jax.Array | None,
    indices: jax.Array | None,
    sink: jax.Array,
    rotation: jax.Array | None,
) -> jax.Array | Partial:
    options = dict(static)
    arrays = (queries, local, local_fmt, local_valid, rotation, pool, pool_fmt, page_table, indices)
    forward = functools.partial(gpu_mosaic.forward, *arrays, window=options["window"], scale=options["scale"])
    parts = _parts(queries.shape[0] * queries.shape[1], _tiles(options["window"], indices))
    if options["return_partial"]:
        return join_partials(forward(None, parts=parts))
    return forward(sink) if parts == 1 else merge_partials(forward(None, parts=parts), sink, queries.dtype)


def _tiles(window: int, indices: jax.Array | None) -> int:
    chosen = 0 if indices is None else pl.cdiv(indices.shape[-1], gpu_mosaic.TILE_ROWS)
    return pl.cdiv(window, gpu_mosaic.TILE_ROWS) + chosen


def _parts(tokens: int, tiles: int) -> int:
    """Blocks among which a query's tiles are dealt out: as many as find an idle processor."""
    return min(tiles, max(_PROCESSORS // tokens, 1))


def _attend_forward(local_fmt, pool_fmt, static, *arrays):
    return _attend(local_fmt, pool_fmt, static, *arrays), arrays


def _attend_backward(local_fmt, pool_fmt, static, arrays, cotangent):
    queries, local, local_valid, pool, page_table, indices, sink, rotation = arrays

    def arguments(queries, local, pool, sink):
        return queries, local, local_fmt, local_valid, pool, pool_fmt, page_table, indices, sink, rotation

    options = dict(static)
    # The kernel for float entries has gradients of its own. Packed ones have none, and only XLA's are needed.
    reason = gpu_triton.unsupported(*arguments(queries, local, pool, sink), **options)
    function = gpu_triton.sparse_attention if reason is None else xla.sparse_attention

    def run(queries, local, pool, sink):
        return function(*arguments(queries, local, pool, sink), **options)

    d_queries, d_local, d_pool, d_sink = jax.vjp(run, queries, local, pool, sink)[1](cotangent)
    return d_queries, d_local, None, d_pool, None, None, d_sink, None


_attend.defvjp(_attend_forward, _attend_backward)
