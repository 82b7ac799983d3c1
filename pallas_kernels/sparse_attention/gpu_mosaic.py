"""Sparse attention forward on Hopper (Mosaic GPU), straight from packed entries.

Mosaic GPU and not Triton, because the entries must be unpacked between their gathering and the matrix units, at the
matrix units' pace. A block is one query: 64 heads fill the rows of a matrix instruction. Its warpgroups pass tiles of
64 entries on, each of which is key and value at once: producers gather a tile and unpack it into shared memory; one
warpgroup multiplies it with the queries and makes the softmax's weights; two multiply the weights with a half of the
tile's columns each. The next tile's logits so overlap with this tile's values.

With few queries a query's list is cut among several blocks, whose sums are merged afterwards.
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
from pallas_kernels.gpu import barriers
from pallas_kernels.gpu.unpack import GROUPS, TILE_ROWS, TRANSFORMS, WIDTH, copy_rows, fetch_rows, unpack_rows
from pallas_kernels.sparse_attention.gpu_lists import Lists, list_rows
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
_GROUPS_AT_ONCE = {FP4_E4M3: 4, FP8_E8M0: 1}
_LOG2_E = math.log2(math.e)


class _Tiles(NamedTuple):
    """Tiles of one source in the kernel: ``count`` from ``first`` on."""

    fmt: Format
    first: int
    count: int


def forward(
    queries: jax.Array,
    local: Packed,
    local_fmt: Format,
    local_valid: jax.Array,
    rotation: jax.Array | None,
    pool: Packed | None,
    pool_fmt: Format,
    page_table: jax.Array | None,
    indices: jax.Array | None,
    sink: jax.Array | None,
    *,
    window: int,
    scale: float,
    parts: int = 1,
) -> jax.Array | Partial:
    """Attention of queries; probabilities are rounded to bfloat16 for the value product.

    Args:
      queries: ``[batch, query, heads, 512]`` bfloat16, at most 64 heads.
      sink: ``[heads]`` float32; None asks for partial results.
      parts: blocks that share a query's tiles, only for partial results (static).
      Others as in :func:`pallas_kernels.sparse_attention.sparse_attention`; formats of :data:`FORMATS`.

    Returns:
      The output ``[batch, query, heads, 512]`` bfloat16; without a sink the sums, leaves
      ``[parts, batch, query, heads, ...]``.
    """
    batch, total, heads, _ = queries.shape
    tokens, shape = batch * total, queries.shape
    queries = jnp.pad(queries.reshape(tokens, heads, WIDTH), ((0, 0), (0, HEADS - heads), (0, 0)))
    sinks = [] if sink is None else [jnp.pad(sink.astype(jnp.float32), (0, HEADS - heads))]
    lists = Lists(window, local_valid.shape[1])
    if pool is not None:
        pages, page_entries = pool.payload.shape[:2]
        lists = Lists(window, local_valid.shape[1], indices.shape[-1], page_table.shape[1], pages, page_entries)
    sources = [_Tiles(local_fmt, 0, lists.window_tiles)]
    if pool is not None:
        sources.append(_Tiles(pool_fmt, lists.window_tiles, lists.pool_tiles))
    leaves = [
        leaf.reshape(-1, leaf.shape[-1])
        for source in (local, pool)
        if source is not None
        for leaf in source
        if leaf is not None
    ]
    listing = [local_valid] + ([] if rotation is None else [rotation])
    listing += [] if pool is None else [indices.reshape(tokens, -1), page_table]

    out_type = jax.ShapeDtypeStruct(queries.shape, jnp.bfloat16)
    if sink is None:
        sums = jax.ShapeDtypeStruct((parts, tokens, HEADS), jnp.float32)
        out_type = Partial(jax.ShapeDtypeStruct((parts, *queries.shape), jnp.float32), sums, sums)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            sources=tuple(sources),
            lists=lists,
            queries=total,
            rotated=rotation is not None,
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
            "seen": plgpu.SMEM((lists.tiles, TILE_ROWS), jnp.int32),
            "used": plgpu.SMEM((1,), jnp.int32),
            "sums": plgpu.SMEM((2, HEADS), jnp.float32),
            "loaded": plgpu.Barrier(num_arrivals=2),
            "full": barriers.scratch(_STAGES),
            "weighted": barriers.scratch(_STAGES),
            "empty": barriers.scratch(_STAGES),
            "summed": plgpu.Barrier(),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    result = kernel(queries, *sinks, *listing, *leaves)
    if sink is not None:
        return result[:, :heads].reshape(shape)
    return Partial(*(leaf[:, :, :heads].reshape(parts, batch, total, heads, *leaf.shape[3:]) for leaf in result))


def _kernel(
    q_ref,
    *refs,
    q,
    tiles,
    p,
    shrink,
    seen,
    used,
    sums,
    loaded,
    full,
    weighted,
    empty,
    summed,
    sources,
    lists,
    queries,
    rotated,
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

    @pl.when(warpgroup == 0)
    def _load():
        for i in range(2):
            plgpu.copy_gmem_to_smem(q_ref.at[token, :, pl.ds(i * half, half)], q.at[i], loaded)

    barriers.initialise(full, _PRODUCERS)
    barriers.initialise(weighted, 1)
    barriers.initialise(empty, 2)
    request = lax.div(token, jnp.int32(queries))
    oldest = lax.rem(token, jnp.int32(queries)) + 1
    valid_ref, *leaves = leaves
    if rotated:
        rotation_ref, *leaves = leaves
        oldest = lax.rem(oldest + rotation_ref[request], jnp.int32(lists.columns))
    indices_ref, table_ref = (leaves.pop(0).at[token], leaves.pop(0)) if lists.chosen else (None, None)
    list_rows(lists, (3 + _PRODUCERS) * 128, request, oldest, valid_ref, indices_ref, table_ref, seen, used)
    # Early queries have chosen little: tiles behind a query's last entry are not visited.
    start, stop = jnp.int32(0), lax.div(used[0] + (TILE_ROWS - 1), jnp.int32(TILE_ROWS))
    if parts > 1:  # shares differ by a tile at most
        start, stop = lax.div(stop * part, jnp.int32(parts)), lax.div(stop * (part + 1), jnp.int32(parts))
    count = stop - start
    by_head, by_entry = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def _logits():
        plgpu.set_max_registers(_LOGIT_REGISTERS, action="decrease")

        def tile(t, carry):
            top, total = carry
            slot, use = lax.rem(t, jnp.int32(_STAGES)), lax.div(t, jnp.int32(_STAGES))

            def products(acc):
                barriers.wait(full.at[slot], use)
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
            barriers.arrive(weighted.at[slot], with_tile=True)
            return new_top, total * less + weights.sum(axis=1)

        def by_head_full(value: float) -> jax.Array:
            return plgpu.layout_cast(jnp.full(HEADS, value, jnp.float32), by_head)

        plgpu.barrier_wait(loaded)
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
            slot, use = lax.rem(t, jnp.int32(_STAGES)), lax.div(t, jnp.int32(_STAGES))
            barriers.wait(weighted.at[slot], use)
            # The logits' warpgroup waited for the tile, but its waiting makes nothing visible here.
            barriers.wait(full.at[slot], use)
            less = plgpu.load(shrink.at[slot], layout=by_head, optimized=False)
            out = tuple(sum_ * lax.broadcast_in_dim(less, sum_.shape, [0]) for sum_ in out)

            def values(accs):
                for i, acc in enumerate(accs):
                    columns = pl.ds(mine * half + i * _COLUMNS, _COLUMNS)
                    plgpu.wgmma(acc, p.at[slot], tiles.at[slot, :, columns])

            out = pl.run_state(values)(tuple(plgpu.ACC.init(sum_) for sum_ in out))
            barriers.arrive(empty.at[slot])
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
        slot, use = lax.rem(t - start, jnp.int32(_STAGES)), lax.div(t - start, jnp.int32(_STAGES))

        def wait():
            barriers.wait(empty.at[slot], use, first_free=True)

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
        barriers.arrive(full.at[slot], with_tile=True)

    first = 0
    for source in sources:
        refs = leaves[first : first + (1 if source.fmt == BF16 else 2)]
        first += len(refs)
        begin, end = jnp.maximum(source.first, start), jnp.minimum(source.first + source.count, stop)
        lax.fori_loop(begin, end, functools.partial(fill, source.fmt, refs), None)
