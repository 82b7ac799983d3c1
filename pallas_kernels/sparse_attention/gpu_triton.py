"""Sparse attention over float entries, forward (Pallas-Triton): what training and unrounded caches take on a GPU.

Triton and not Mosaic GPU, because Triton loads rows by an array of row numbers. One program is one query with a block
of its heads: all heads share the entries, so that a tile of gathered entries is the right operand of two matrix
products. Packed pools are for :mod:`pallas_kernels.sparse_attention.gpu`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.backend import interpreted
from pallas_kernels.formats import DenseFormat, Format, Packed
from pallas_kernels.products import operand_dtype
from pallas_kernels.sparse_attention import gpu_backward
from pallas_kernels.sparse_attention.gpu_rows import Source, pool_source, window_source
from pallas_kernels.sparse_attention.gpu_shapes import Blocks, blocks, dot, load_entries
from pallas_kernels.sparse_attention.xla import SINK_MARGIN


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
    *,
    window: int,
    scale: float,
    probability_dtype: jnp.dtype,
) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    del local_valid, page_table, indices, sink, rotation, window, scale
    if pool is not None and not isinstance(pool_fmt, DenseFormat):
        return f"the pool is packed ({pool_fmt.element})"
    width = queries.shape[-1]
    if width < 16 or width & (width - 1):
        return f"head_dim {width} is not a power of two from 16 on"
    operands = _operands(queries, local_fmt, pool, pool_fmt)
    if operands == jnp.float32 and width > 128 and not interpreted():
        return f"float32 operands with head_dim {width} do not fit a block"
    if operands != jnp.float32 and jnp.dtype(probability_dtype) != operands:
        return f"{jnp.dtype(probability_dtype).name} probabilities with {operands.name} operands"
    # Offsets of gathered rows are 32-bit integers.
    if max(local.payload.size, 0 if pool is None else pool.payload.size) >= 2**31:
        return "an array of entries has 2^31 values or more"
    return None


def _operands(queries: jax.Array, local_fmt: Format, pool: Packed | None, pool_fmt: Format) -> jnp.dtype:
    """One dtype for all products in which every operand is exact."""
    dtype = operand_dtype(queries.dtype, local_fmt)
    return dtype if pool is None else jnp.promote_types(dtype, operand_dtype(queries.dtype, pool_fmt))


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
    *,
    window: int,
    scale: float,
    probability_dtype: jnp.dtype,
) -> jax.Array:
    """See :func:`pallas_kernels.sparse_attention.sparse_attention`; differentiable in queries, floats and sink."""
    batch, total, heads, width = queries.shape
    dtype = _operands(queries, local_fmt, pool, pool_fmt)
    tile = blocks(heads, dtype).tile
    sources = [window_source(local, local_fmt, local_valid, rotation, window, dtype, tile)]
    if pool is not None:
        sources.append(pool_source(pool, pool_fmt, page_table, indices, dtype, tile))
    flat = queries.reshape(batch * total, heads, width).astype(dtype)
    out = _attend(_Static(scale, jnp.dtype(probability_dtype).name, interpreted()), flat, tuple(sources), sink)
    return out.reshape(queries.shape).astype(queries.dtype)


class _Static(NamedTuple):
    """What the derivative must know of the call: its rule is traced later, where other contexts may hold."""

    scale: float
    probability_dtype: str
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, queries: jax.Array, sources: tuple[Source, ...], sink: jax.Array) -> jax.Array:
    return forward(queries, sources, sink, **static._asdict())[0]


def _attend_forward(static, queries, sources, sink):
    out, log_sum = forward(queries, sources, sink, **static._asdict())
    return out, (queries, sources, sink, out, log_sum)


def _attend_backward(static, saved, cotangent):
    d_queries, d_entries, d_sink = gpu_backward.backward(
        *saved, cotangent, scale=static.scale, interpret=static.interpret
    )
    # Row numbers have no derivative.
    return d_queries, tuple(Source(d, None) for d in d_entries), d_sink


_attend.defvjp(_attend_forward, _attend_backward)


def forward(
    queries: jax.Array,
    sources: tuple[Source, ...],
    sink: jax.Array,
    *,
    scale: float,
    probability_dtype: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of single queries to listed rows.

    Args:
      queries: ``[tokens, heads, head_dim]`` bfloat16 or float32.
      sources: entries in the queries' dtype; the lists are whole numbers of tiles long.
      sink: ``[heads]`` float32.

    Returns:
      The output ``[tokens, heads, head_dim]`` in the queries' dtype, and the logarithm of the denominator, sink
      included, float32 ``[tokens, heads]``.
    """
    tokens, heads, width = queries.shape
    sizes = blocks(heads, queries.dtype)
    kernel = functools.partial(_kernel, sizes=sizes, scale=scale, probability_dtype=probability_dtype)
    return pl.pallas_call(
        kernel,
        grid=(tokens, -(-heads // sizes.heads)),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, heads, width), queries.dtype),
            jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=2),
        interpret=interpret,
        name="sparse_attention_forward",
    )(queries, sink.astype(jnp.float32), *(leaf for source in sources for leaf in source))


def _kernel(queries_ref, sink_ref, *refs, sizes: Blocks, scale: float, probability_dtype: str) -> None:
    *sources, out_ref, log_sum_ref = refs
    token = pl.program_id(0)
    head = pl.program_id(1) * sizes.heads + jnp.arange(sizes.heads)
    column = jnp.arange(queries_ref.shape[-1])
    present = head < queries_ref.shape[1]
    at = (token, head[:, None], column[None, :])
    queries = plgpu.load(queries_ref.at[at], mask=present[:, None], other=0)
    sink = plgpu.load(sink_ref.at[head], mask=present, other=0)

    def tile(entries_ref, seen_ref, i, carry):
        top, total, out = carry
        entries, seen = load_entries(entries_ref, seen_ref, token, i, sizes.tile)
        logits = jnp.where(seen[None, :], dot(queries, entries.T) * scale, -jnp.inf)
        new_top = jnp.maximum(top, logits.max(axis=1))
        p = jnp.exp(logits - new_top[:, None])
        shrink = jnp.exp(top - new_top)
        out = out * shrink[:, None] + dot(p.astype(probability_dtype).astype(entries.dtype), entries)
        return new_top, total * shrink + p.sum(axis=1), out

    # The sink's own term joins first, at a maximum that keeps it finite.
    top = sink - SINK_MARGIN
    carry = (top, jnp.exp(sink - top), jnp.zeros((sizes.heads, column.shape[0]), jnp.float32))
    for entries_ref, seen_ref in zip(sources[::2], sources[1::2], strict=True):
        count = seen_ref.shape[1] // sizes.tile
        carry = lax.fori_loop(0, count, functools.partial(tile, entries_ref, seen_ref), carry)
    top, total, out = carry
    plgpu.store(out_ref.at[at], (out / total[:, None]).astype(out_ref.dtype), mask=present[:, None])
    plgpu.store(log_sum_ref.at[token, head], top + jnp.log(total), mask=present)
