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
from pallas_kernels.sparse_attention.partial import SINK_MARGIN, Partial, finite_top


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
    """Why the kernel cannot run these arguments; None if it can."""
    del local_valid, page_table, indices, sink, rotation, reach, window, scale, return_partial
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
    reach: jax.Array | None = None,
    *,
    window: int,
    scale: float,
    probability_dtype: jnp.dtype,
    return_partial: bool = False,
) -> jax.Array | Partial:
    """See :func:`pallas_kernels.sparse_attention.sparse_attention`; differentiable in queries, floats and sink."""
    batch, total, heads, width = queries.shape
    dtype = _operands(queries, local_fmt, pool, pool_fmt)
    tile = blocks(heads, dtype).tile
    sources = [window_source(local, local_fmt, local_valid, rotation, window, dtype, tile, reach)]
    if pool is not None:
        sources.append(pool_source(pool, pool_fmt, page_table, indices, dtype, tile))
    flat = queries.reshape(batch * total, heads, width).astype(dtype)
    static = _Static(scale, jnp.dtype(probability_dtype).name, interpreted())
    if return_partial:
        return Partial(*(leaf.reshape(batch, total, *leaf.shape[1:]) for leaf in _part(static, flat, tuple(sources))))
    return _attend(static, flat, tuple(sources), sink).reshape(queries.shape).astype(queries.dtype)


class _Static(NamedTuple):
    """What the derivative must know of the call: its rule is traced later, where other contexts may hold."""

    scale: float
    probability_dtype: str
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, queries: jax.Array, sources: tuple[Source, ...], sink: jax.Array) -> jax.Array:
    return _attend_forward(static, queries, sources, sink)[0]


def _attend_forward(static, queries, sources, sink):
    out, top, total = forward(queries, sources, sink, **static._asdict())
    return out, (queries, sources, sink, out, top + jnp.log(total))


def _attend_backward(static, saved, cotangent):
    queries, sources, sink, out, log_sum = saved
    delta = jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32), axis=-1)
    d_sink = -jnp.sum(jnp.exp(sink - log_sum) * delta, axis=0)
    return *_backward(static, queries, sources, log_sum, delta, cotangent), d_sink.astype(sink.dtype)


_attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _part(static: _Static, queries: jax.Array, sources: tuple[Source, ...]) -> Partial:
    return _part_forward(static, queries, sources)[0]


def _part_forward(static, queries, sources):
    part = forward(queries, sources, None, **static._asdict())
    return part, (queries, sources, part.top)


def _part_backward(static, saved, cotangent):
    queries, sources, top = saved
    # Without the division p is exp(logit − top), and what a logit adds to ``total`` adds to dS.
    return _backward(static, queries, sources, finite_top(top), -cotangent.total, cotangent.out)


_part.defvjp(_part_forward, _part_backward)


def _backward(static: _Static, queries, sources, log_sum, delta, cotangent):
    d_queries, d_entries = gpu_backward.backward(
        queries, sources, log_sum, delta, cotangent, scale=static.scale, interpret=static.interpret
    )
    # Row numbers have no derivative.
    return d_queries, tuple(Source(d, None) for d in d_entries)


def forward(
    queries: jax.Array,
    sources: tuple[Source, ...],
    sink: jax.Array | None,
    *,
    scale: float,
    probability_dtype: str,
    interpret: bool,
) -> Partial:
    """Attention of single queries to listed rows.

    Args:
      queries: ``[tokens, heads, head_dim]`` bfloat16 or float32.
      sources: entries in the queries' dtype; the lists are whole numbers of tiles long.
      sink: ``[heads]`` float32; None: no sink and no division.

    Returns:
      Leaves ``[tokens, heads, ...]``. With a sink, ``out`` is divided and in the queries' dtype, and ``total`` has the
      sink's term.
    """
    tokens, heads, width = queries.shape
    sizes = blocks(heads, queries.dtype)
    kernel = functools.partial(_kernel, sizes=sizes, scale=scale, probability_dtype=probability_dtype)
    out_dtype, before = (jnp.float32, ()) if sink is None else (queries.dtype, (sink.astype(jnp.float32),))
    out, top, total = pl.pallas_call(
        kernel,
        grid=(tokens, -(-heads // sizes.heads)),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, heads, width), out_dtype),
            jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
            jax.ShapeDtypeStruct((tokens, heads), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=2),
        interpret=interpret,
        name="sparse_attention_forward",
    )(queries, *before, *(leaf for source in sources for leaf in source))
    return Partial(out, top, total)


def _kernel(queries_ref, *refs, sizes: Blocks, scale: float, probability_dtype: str) -> None:
    *sources, out_ref, top_ref, total_ref = refs
    sink_ref = sources.pop(0) if len(sources) % 2 else None
    token = pl.program_id(0)
    head = pl.program_id(1) * sizes.heads + jnp.arange(sizes.heads)
    column = jnp.arange(queries_ref.shape[-1])
    present = head < queries_ref.shape[1]
    at = (token, head[:, None], column[None, :])
    queries = plgpu.load(queries_ref.at[at], mask=present[:, None], other=0)

    def tile(entries_ref, seen_ref, i, carry):
        top, total, out = carry
        entries, seen = load_entries(entries_ref, seen_ref, token, i, sizes.tile)
        logits = jnp.where(seen[None, :], dot(queries, entries.T) * scale, -jnp.inf)
        new_top = jnp.maximum(top, logits.max(axis=1))
        subtracted = new_top if sink_ref is not None else finite_top(new_top)
        p = jnp.exp(logits - subtracted[:, None])
        shrink = jnp.exp(top - subtracted)
        out = out * shrink[:, None] + dot(p.astype(probability_dtype).astype(entries.dtype), entries)
        return new_top, total * shrink + p.sum(axis=1), out

    if sink_ref is None:
        top, total = jnp.full(sizes.heads, -jnp.inf), jnp.zeros(sizes.heads)
    else:  # the sink's own term joins first, at a maximum that keeps it finite
        sink = plgpu.load(sink_ref.at[head], mask=present, other=0)
        top = sink - SINK_MARGIN
        total = jnp.exp(sink - top)
    carry = (top, total, jnp.zeros((sizes.heads, column.shape[0]), jnp.float32))
    for entries_ref, seen_ref in zip(sources[::2], sources[1::2], strict=True):
        count = seen_ref.shape[1] // sizes.tile
        carry = lax.fori_loop(0, count, functools.partial(tile, entries_ref, seen_ref), carry)
    top, total, out = carry
    if sink_ref is not None:
        out = out / total[:, None]
    plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=present[:, None])
    plgpu.store(top_ref.at[token, head], top, mask=present)
    plgpu.store(total_ref.at[token, head], total, mask=present)
