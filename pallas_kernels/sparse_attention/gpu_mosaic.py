"""Sparse attention forward on Hopper (Mosaic GPU), straight from packed entries.

Mosaic GPU and not Triton, because the entries must be unpacked between their gathering and the matrix units, at the
matrix units' pace. A block is one query: 64 heads fill the rows of a matrix instruction. Its warpgroups pass tiles of
64 entries on, each of which is key and value at once: producers gather a tile and unpack it into shared memory; one
warpgroup multiplies it with the queries and makes the softmax's weights; two multiply the weights with a half of the
tile's columns each. The next tile's logits so overlap with this tile's values.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import FP4_E4M3, FP8_E8M0, DenseFormat, Format, Packed
from pallas_kernels.gpu.unpack import GROUPS, TILE_ROWS, TRANSFORMS, WIDTH, copy_rows, fetch_rows, unpack_rows
from pallas_kernels.sparse_attention.partial import SINK_MARGIN, Partial, finite_top

HEADS = 64  # rows of a matrix instruction
BF16 = DenseFormat("bfloat16")
FORMATS = (FP4_E4M3, FP8_E8M0, BF16)

# Two tiles, their weights and the queries leave shared memory for the row numbers of so many tiles.
_STAGES = 2
MOST_TILES = 64
# Columns of one matrix instruction: with 256, ptxas wants more registers than a block of so many threads starts with.
_COLUMNS = 128
# Registers of a thread: the 64 × 256 outputs of a value warpgroup take 128. A block of 640 threads starts with 96
# each, which its warpgroups share out.
_PRODUCERS = 2
_LOGIT_REGISTERS, _VALUE_REGISTERS, _PRODUCER_REGISTERS = 80, 160, 40
# Groups of 8 rows that a producer's registers hold at once.
_GROUPS_AT_ONCE = {FP4_E4M3: 4, FP8_E8M0: 2}
# Fewer queries run all at once and end with the longest list: finding the others' ends costs more than it saves.
_FEW_TOKENS = 256
_LOG2_E = math.log2(math.e)


class Entries(NamedTuple):
    """Packed entries and who sees them.

    Attributes:
      packed: leaves ``[rows, width']``; rows that nobody sees may hold anything.
      seen: ``[tokens, slots]`` int32 rows, −1 = nothing; an entry counts as often as it is listed.
    """

    packed: Packed
    seen: jax.Array


class _Tiles(NamedTuple):
    """Tiles of one source in the kernel: ``count`` from ``first`` on."""

    fmt: Format
    first: int
    count: int


def forward(
    queries: jax.Array,
    window: Entries,
    window_fmt: Format,
    pool: Entries | None,
    pool_fmt: Format,
    sink: jax.Array | None,
    *,
    scale: float,
    parts: int = 1,
) -> jax.Array | Partial:
    """Attention of single queries to listed rows; probabilities are rounded to bfloat16 for the value product.

    Args:
      queries: ``[tokens, heads, 512]`` bfloat16, at most 64 heads.
      window, pool: entries of 512 values; pool is None in a window-only layer.
      window_fmt, pool_fmt: their formats, of :data:`FORMATS` (static).
      sink: ``[heads]`` float32; None asks for partial results.
      scale: factor of the logits (static).
      parts: blocks that share a query's tiles, only for partial results (static).

    Returns:
      The output ``[tokens, heads, 512]`` bfloat16; without a sink the sums, leaves ``[parts, tokens, heads, ...]``.
    """
    tokens, heads, _ = queries.shape
    queries = jnp.pad(queries, ((0, 0), (0, HEADS - heads), (0, 0)))
    sinks = [] if sink is None else [jnp.pad(sink.astype(jnp.float32), (0, HEADS - heads))]

    lists = [_tiled(entries.seen) for entries in (window, pool) if entries is not None]
    sources = [_Tiles(window_fmt, 0, lists[0].shape[1])]
    if pool is not None:
        sources.append(_Tiles(pool_fmt, sources[0].count, lists[1].shape[1]))
    seen = jnp.concatenate(lists, axis=1)
    counts = None
    if tokens > _FEW_TOKENS:
        # Early queries have chosen little: tiles behind a query's last entry are not visited.
        used = jnp.any(seen >= 0, axis=2) * jnp.arange(1, seen.shape[1] + 1, dtype=jnp.int32)
        counts = jnp.max(used, axis=1)
    leaves = [leaf for source in (window, pool) if source is not None for leaf in source.packed if leaf is not None]

    out_type = jax.ShapeDtypeStruct(queries.shape, jnp.bfloat16)
    if sink is None:
        sums = jax.ShapeDtypeStruct((parts, tokens, HEADS), jnp.float32)
        out_type = Partial(jax.ShapeDtypeStruct((parts, *queries.shape), jnp.float32), sums, sums)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            sources=tuple(sources),
            counted=counts is not None,
            scale=scale,
            parts=parts,
            return_partial=sink is None,
        ),
        out_type=out_type,
        grid=(tokens, parts),
        grid_names=("token", "part"),
        num_threads=3 + _PRODUCERS,
        thread_name="warpgroup",
        scratch_types={
            "q": plgpu.SMEM((2, HEADS, WIDTH // 2), jnp.bfloat16, transforms=TRANSFORMS),
            "tiles": plgpu.SMEM((_STAGES, TILE_ROWS, WIDTH), jnp.bfloat16, transforms=TRANSFORMS),
            "p": plgpu.SMEM((_STAGES, HEADS, TILE_ROWS), jnp.bfloat16, transforms=TRANSFORMS),
            "shrink": plgpu.SMEM((_STAGES, HEADS), jnp.float32),
            "seen": plgpu.SMEM(seen.shape[1:], jnp.int32),
            "sums": plgpu.SMEM((2, HEADS), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=3),
            "full": plgpu.Barrier(num_arrivals=_PRODUCERS, num_barriers=_STAGES),
            "weighted": plgpu.Barrier(num_barriers=_STAGES),
            "empty": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            "summed": plgpu.Barrier(),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    result = kernel(queries, seen, *sinks, *leaves, *([] if counts is None else [counts]))
    return result[:, :heads] if sink is not None else Partial(*(leaf[:, :, :heads] for leaf in result))


def _tiled(seen: jax.Array) -> jax.Array:
    """Lists ``[tokens, slots]`` as whole tiles ``[tokens, tiles, 64]``."""
    seen = jnp.pad(seen, ((0, 0), (0, -seen.shape[1] % TILE_ROWS)), constant_values=-1)
    return seen.reshape(seen.shape[0], -1, TILE_ROWS)


def _kernel(
    q_ref,
    seen_ref,
    *refs,
    q,
    tiles,
    p,
    shrink,
    seen,
    sums,
    loaded,
    full,
    weighted,
    empty,
    summed,
    sources,
    counted,
    scale,
    parts,
    return_partial,
) -> None:
    if return_partial:
        *leaves, out_ref, top_ref, total_ref = refs
    else:
        sink_ref, *leaves, out_ref = refs
    warpgroup, token, part = lax.axis_index("warpgroup"), lax.axis_index("token"), lax.axis_index("part")
    half = WIDTH // 2
    stop = leaves.pop()[token] if counted else sources[-1].first + sources[-1].count
    start = jnp.int32(0)
    if parts > 1:  # shares differ by a tile at most
        start, stop = (stop * part) // parts, (stop * (part + 1)) // parts
    count = stop - start
    by_head, by_entry = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    @pl.when(warpgroup == 0)
    def _load():
        plgpu.copy_gmem_to_smem(seen_ref.at[token], seen, loaded)
        for i in range(2):
            plgpu.copy_gmem_to_smem(q_ref.at[token, :, pl.ds(i * half, half)], q.at[i], loaded)

    plgpu.barrier_wait(loaded)

    def _logits():
        plgpu.set_max_registers(_LOGIT_REGISTERS, action="decrease")

        def tile(t, carry):
            top, total = carry
            slot = lax.rem(t, jnp.int32(_STAGES))
            plgpu.barrier_wait(full.at[slot])

            def products(acc):
                for i in range(2):
                    plgpu.wgmma(acc, q.at[i], tiles.at[slot, :, pl.ds(i * half, half)].transpose((1, 0)))
                return acc[...]

            logits = pl.run_scoped(products, plgpu.ACC((HEADS, TILE_ROWS), jnp.float32))
            there = plgpu.load(seen.at[start + t], layout=by_entry, optimized=False)
            there = lax.broadcast_in_dim(there, logits.shape, [1])
            logits = jnp.where(there >= 0, logits * (scale * _LOG2_E), -jnp.inf)
            new_top = jnp.maximum(top, logits.max(axis=1))
            subtracted = finite_top(new_top) if return_partial else new_top
            less = jnp.exp2(top - subtracted)
            weights = jnp.exp2(logits - lax.broadcast_in_dim(subtracted, logits.shape, [0]))
            p[slot] = weights.astype(jnp.bfloat16)
            shrink[slot] = less
            plgpu.commit_smem()
            plgpu.barrier_arrive(weighted.at[slot])
            return new_top, total * less + weights.sum(axis=1)

        def by_head_full(value: float) -> jax.Array:
            return plgpu.layout_cast(jnp.full(HEADS, value, jnp.float32), by_head)

        if return_partial:
            top, total = lax.fori_loop(0, count, tile, (by_head_full(-jnp.inf), by_head_full(0)))
            sums[0], sums[1] = top * (1 / _LOG2_E), total
            plgpu.commit_smem()
            for i, ref in enumerate((top_ref, total_ref)):
                plgpu.copy_smem_to_gmem(sums.at[i], ref.at[part, token])
            plgpu.wait_smem_to_gmem(0)
            return
        sink = plgpu.load(sink_ref, layout=by_head, optimized=False) * _LOG2_E
        top, total = lax.fori_loop(0, count, tile, (sink - SINK_MARGIN * _LOG2_E, by_head_full(0)))
        sums[0] = 1 / (total + jnp.exp2(sink - top))
        plgpu.barrier_arrive(summed)

    def _values():
        plgpu.set_max_registers(_VALUE_REGISTERS, action="increase")
        mine = warpgroup - 1

        def tile(t, out):
            slot = lax.rem(t, jnp.int32(_STAGES))
            plgpu.barrier_wait(weighted.at[slot])
            # The logits' warpgroup waited for the tile, but its waiting makes nothing visible here.
            plgpu.barrier_wait(full.at[slot])
            less = plgpu.load(shrink.at[slot], layout=by_head, optimized=False)
            out = tuple(sum_ * lax.broadcast_in_dim(less, sum_.shape, [0]) for sum_ in out)

            def values(accs):
                for i, acc in enumerate(accs):
                    columns = pl.ds(mine * half + i * _COLUMNS, _COLUMNS)
                    plgpu.wgmma(acc, p.at[slot], tiles.at[slot, :, columns])

            out = pl.run_state(values)(tuple(plgpu.ACC.init(sum_) for sum_ in out))
            plgpu.barrier_arrive(empty.at[slot])
            return out

        zeros = plgpu.layout_cast(jnp.zeros((HEADS, _COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
        out = (zeros,) * (half // _COLUMNS)
        out = lax.fori_loop(0, count, tile, out)
        if return_partial:
            for i, sum_ in enumerate(out):
                out_ref[part, token, :, pl.ds(mine * half + i * _COLUMNS, _COLUMNS)] = sum_
            return
        plgpu.barrier_wait(summed)
        factor = plgpu.load(sums.at[0], layout=by_head, optimized=False)
        # All products with the queries are done: the output takes their place.
        for i, sum_ in enumerate(out):
            columns = (sum_ * lax.broadcast_in_dim(factor, sum_.shape, [0])).astype(jnp.bfloat16)
            q[mine, :, pl.ds(i * _COLUMNS, _COLUMNS)] = columns
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q.at[mine], out_ref.at[token, :, pl.ds(mine * half, half)])
        plgpu.wait_smem_to_gmem(0)

    def produce(producer: int):
        _produce(producer, leaves, sources, start, stop, seen, tiles, full, empty)

    def producers():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        if _PRODUCERS == 1:
            produce(0)
        else:
            lax.cond(warpgroup == 3, lambda: produce(0), lambda: produce(1))

    # One tree of branches: ptxas must see how many registers each path has.
    lax.cond((warpgroup == 1) | (warpgroup == 2), _values, lambda: lax.cond(warpgroup == 0, _logits, producers))


def _produce(producer: int, leaves, sources, start, stop, seen, tiles, full, empty) -> None:
    """Fills tiles from ``start`` to ``stop``; each producer its share of their rows."""
    share = GROUPS // _PRODUCERS
    mine = range(producer * share, (producer + 1) * share)

    def fill(fmt: Format, packed_refs, t, _):
        slot = lax.rem(t - start, jnp.int32(_STAGES))

        def wait():
            @pl.when(t - start >= _STAGES)
            def _():
                plgpu.barrier_wait(empty.at[slot])

        if fmt == BF16:
            wait()
            copy_rows(mine, seen.at[t], *packed_refs, tiles.at[slot])
        else:
            step = _GROUPS_AT_ONCE[fmt]
            for first in range(mine.start, mine.stop, step):
                groups = range(first, first + step)
                packed = fetch_rows(fmt, groups, seen.at[t], *packed_refs)
                if first == mine.start:
                    wait()
                unpack_rows(fmt, groups, packed, tiles.at[slot])
        plgpu.commit_smem()
        plgpu.barrier_arrive(full.at[slot])

    first = 0
    for source in sources:
        refs = leaves[first : first + (1 if source.fmt == BF16 else 2)]
        first += len(refs)
        begin, end = jnp.maximum(source.first, start), jnp.minimum(source.first + source.count, stop)
        lax.fori_loop(begin, end, functools.partial(fill, source.fmt, refs), None)
