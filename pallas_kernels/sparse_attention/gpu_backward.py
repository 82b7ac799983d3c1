"""Gradients of the sparse attention over float entries (Pallas-Triton), probabilities recomputed.

With p the normalised probabilities and δ = Σ out · dout of a query and head: dS = p (dout · e − δ) · scale,
dq = Σ dS e, de = Σ dS q + p dout. Two kernels, each of which recomputes p and dS: together, dq and
de would not fit a block's registers, and cost half as much again. The entries' gradients are sums over all queries that
see them; programs add them up with atomics in float32, so that their order, and with it the last bits, differ between
runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpu.relaxed_add import relaxed_add
from pallas_kernels.sparse_attention.gpu_rows import Source
from pallas_kernels.sparse_attention.gpu_shapes import blocks, dot, load_entries

# Measured on an H200. Queries' gradients: half a tile, so that two of them, queries and cotangents fit the shared
# memory. Entries' gradients: few warps and columns at once, so that little is alive.
_QUERY_TILE_PARTS, _QUERY_STAGES = 2, 2
_ENTRY_WARPS, _ENTRY_COLUMNS = 4, 128


def backward(
    queries: jax.Array,
    sources: tuple[Source, ...],
    log_sum: jax.Array,
    delta: jax.Array,
    cotangent: jax.Array,
    *,
    scale: float,
    interpret: bool,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Derivatives of :func:`pallas_kernels.sparse_attention.gpu_triton.forward`.

    Args:
      queries, sources: its arguments.
      log_sum: ``[tokens, heads]`` float32, finite, the p are exp(logit − log_sum).
      delta: δ, as ``log_sum``.
      cotangent: of the output ``[tokens, heads, head_dim]``.

    Returns:
      gradients of the queries and of the entries of each source, in the dtypes of what they belong to.
    """
    tokens, heads = queries.shape[:2]
    sizes = blocks(heads, queries.dtype)
    arrays = (queries, cotangent.astype(queries.dtype), log_sum, delta, *(leaf for s in sources for leaf in s))
    call = functools.partial(pl.pallas_call, grid=(tokens, -(-heads // sizes.heads)), interpret=interpret)
    static = {"heads": sizes.heads, "scale": scale, "count": len(sources)}
    small = max(16, sizes.tile // _QUERY_TILE_PARTS)
    d_queries = call(
        functools.partial(_query_kernel, tile=small, **static),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=_QUERY_STAGES),
        name="sparse_attention_backward_queries",
    )(*arrays)
    sums = tuple(jnp.zeros(source.entries.shape, jnp.float32) for source in sources)
    d_entries = call(
        functools.partial(_entry_kernel, tile=sizes.tile, interpret=interpret, **static),
        out_shape=sums,
        input_output_aliases={len(arrays) + i: i for i in range(len(sums))},
        compiler_params=plgpu.CompilerParams(num_warps=_ENTRY_WARPS, num_stages=1),
        name="sparse_attention_backward_entries",
    )(*arrays, *sums)
    d_entries = tuple(d.astype(source.entries.dtype) for d, source in zip(d_entries, sources, strict=True))
    return d_queries, d_entries


class _Block:
    """What both kernels compute of a query and a block of its heads."""

    def __init__(self, queries_ref, cotangent_ref, log_sum_ref, delta_ref, heads: int, scale: float) -> None:
        self.token = pl.program_id(0)
        self.head = pl.program_id(1) * heads + jnp.arange(heads)
        self.present = self.head < queries_ref.shape[1]
        self.scale = scale
        width = jnp.arange(queries_ref.shape[-1])
        self.queries, self.cotangent = self.columns(queries_ref, width), self.columns(cotangent_ref, width)
        self.log_sum = plgpu.load(log_sum_ref.at[self.token, self.head], mask=self.present, other=0)
        self.delta = plgpu.load(delta_ref.at[self.token, self.head], mask=self.present, other=0)

    def columns(self, ref, column: jax.Array) -> jax.Array:
        """Some columns of all heads of the block."""
        return plgpu.load(ref.at[self.at(column)], mask=self.present[:, None], other=0)

    def at(self, column: jax.Array) -> tuple:
        return self.token, self.head[:, None], column[None, :]

    def probabilities(self, entries: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        """p and dS ``[heads, tile]`` in the entries' dtype."""
        logits = jnp.where(seen[None, :], dot(self.queries, entries.T) * self.scale, -jnp.inf)
        # Heads that pad the block would otherwise have probabilities of one.
        p = jnp.where(self.present[:, None], jnp.exp(logits - self.log_sum[:, None]), 0)
        d_logits = p * (dot(self.cotangent, entries.T) - self.delta[:, None]) * self.scale
        return p.astype(entries.dtype), d_logits.astype(entries.dtype)


def _over_tiles(seen_ref, tile: int, body: Callable, carry):
    return lax.fori_loop(0, seen_ref.shape[1] // tile, body, carry)


def _query_kernel(*refs, tile: int, heads: int, scale: float, count: int) -> None:
    sources, out_ref = refs[4 : 4 + 2 * count], refs[4 + 2 * count]
    block = _Block(*refs[:4], heads, scale)

    def body(entries_ref, seen_ref, i, total):
        entries, seen = load_entries(entries_ref, seen_ref, block.token, i, tile)
        return total + dot(block.probabilities(entries, seen)[1], entries)

    column = jnp.arange(out_ref.shape[-1])
    total = jnp.zeros((heads, column.shape[0]), jnp.float32)
    for entries_ref, seen_ref in zip(sources[::2], sources[1::2], strict=True):
        total = _over_tiles(seen_ref, tile, functools.partial(body, entries_ref, seen_ref), total)
    plgpu.store(out_ref.at[block.at(column)], total.astype(out_ref.dtype), mask=block.present[:, None])


def _entry_kernel(*refs, tile: int, heads: int, scale: float, count: int, interpret: bool) -> None:
    queries_ref, cotangent_ref = refs[:2]
    sources, sums = refs[4 : 4 + 2 * count], refs[4 + 3 * count :]
    block = _Block(*refs[:4], heads, scale)
    width = queries_ref.shape[-1]

    def body(entries_ref, seen_ref, sum_ref, i, _):
        entries, seen = load_entries(entries_ref, seen_ref, block.token, i, tile)
        p, d_logits = block.probabilities(entries, seen)
        rows = plgpu.load(seen_ref.at[block.token, i * tile + jnp.arange(tile)])
        for begin in range(0, width, min(width, _ENTRY_COLUMNS)):
            column = begin + jnp.arange(min(width, _ENTRY_COLUMNS))
            part = dot(d_logits.T, block.columns(queries_ref, column))
            part += dot(p.T, block.columns(cotangent_ref, column))
            _add(sum_ref, rows, column, part, interpret)

    for i, sum_ref in enumerate(sums):
        entries_ref, seen_ref = sources[2 * i : 2 * i + 2]
        _over_tiles(seen_ref, tile, functools.partial(body, entries_ref, seen_ref, sum_ref), None)


def _add(ref, rows: jax.Array, column: jax.Array, values: jax.Array, interpret: bool) -> None:
    """``ref[rows, column] += values`` for rows ≥ 0, also where rows repeat."""
    if not interpret:
        present = jnp.broadcast_to(rows[:, None] >= 0, values.shape)
        relaxed_add(ref, (rows[:, None], column[None, :]), values, present)
        return

    # The interpreter's atomic takes no mask and keeps one of several repeated rows.
    def one(n, _):
        row = jnp.maximum(rows[n], 0)
        ref[row, column] = ref[row, column] + jnp.where(rows[n] >= 0, values[n], 0)

    lax.fori_loop(0, rows.shape[0], one, None)
