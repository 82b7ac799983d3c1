"""Index scores on Hopper (Mosaic GPU): packed keys are the matrix unit's left operand, straight from registers.

Mosaic GPU and not Triton, because an unpacked key then exists nowhere but in the registers that a product reads, and
the next keys are on their way meanwhile. 64 keys are the rows of a warpgroup's product and the heads of a few queries
its columns, so that a sum over heads stays within four threads. Warpgroups share nothing but the queries: while one
waits for its keys or its product, another unpacks its keys or sums its products.

The order of a contraction is free, so it is the one in which a thread's 16 bytes of a key are one block of the format,
with one scale; :func:`pallas_kernels.index_select.gpu_lanes.permute` brings the queries into it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import Packed
from pallas_kernels.gpu import registers
from pallas_kernels.index_select import gpu_lanes as lanes
from pallas_kernels.index_select.gpu_lanes import KEYS, RUN, WIDTH

# Heads of as many queries as fit into these columns share a product; a thread has half as many sums.
_COLUMNS = 128
# So many queries end with one for each of the four threads that share a row.
_TOGETHER = 4
# Products of a program's queries: 128 KiB of shared memory.
_PRODUCTS = 4
# Tiles of keys on their way to a warpgroup; more of them were no faster.
_SLOTS = 2
# Warpgroups of a program; three were no faster.
_WARPGROUPS = 2
# Programs: one for each multiprocessor, or two where their queries leave room.
_PROGRAMS = 132


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How queries are cut: ``together`` in a product, ``products`` in a block of queries, ``blocks`` of them."""

    total: int
    together: int
    products: int
    blocks: int

    @property
    def padded(self) -> int:
        return self.together * self.products * self.blocks

    @property
    def groups(self) -> int:
        """Products that hold a query."""
        return pl.cdiv(self.total, self.together)


def _plan(total: int, heads: int) -> _Plan:
    """Equal parts, so that as few as possible are padding."""
    groups = pl.cdiv(total, min(_TOGETHER, _COLUMNS // heads))
    together = pl.cdiv(total, groups)
    groups = pl.cdiv(total, together)
    blocks = pl.cdiv(groups, _PRODUCTS)
    return _Plan(total, together, pl.cdiv(groups, blocks), blocks)


def takes(queries: jax.Array, pool: Packed, block_size: int, gathered: bool) -> bool:
    """Whether :func:`scores` runs these; what the kernels of this folder do not run at all is not asked for.

    Args:
      block_size: of the blocks whose maxima are wanted, or of those that are gathered.
    """
    heads, width = queries.shape[2:]
    suits = block_size % RUN == 0 if gathered else block_size <= RUN
    return (
        width == WIDTH
        and heads % 8 == 0
        and heads <= _COLUMNS
        and pool.payload.shape[1] % KEYS == 0
        and suits
        and block_size <= KEYS
    )


def page_runs(page_table: jax.Array, pages: int, page_entries: int) -> jax.Array:
    """First rows ``[batch, capacity / 64]`` of each 64 entries of a request, −1 where there is no page."""
    first = jnp.where((page_table >= 0) & (page_table < pages), page_table * page_entries, -1)
    parts = jnp.arange(page_entries // KEYS, dtype=jnp.int32) * KEYS
    return jnp.where(first[..., None] < 0, -1, first[..., None] + parts).reshape(first.shape[0], -1)


def block_runs(
    page_table: jax.Array, pages: int, page_entries: int, ids: jax.Array, block_size: int, visible: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First rows of each 8 entries of blocks of entries, and how many of the entries can be chosen.

    Args:
      ids: ``[batch, query, blocks]`` int32 in ascending order, negative ones last.
      block_size: a multiple of 8 that divides a page (static).
      visible: ``[batch, query]`` int32.

    Returns:
      rows ``[batch, query, runs]`` int32, −1 = none, padded to whole tiles; counts ``[batch, query]``: as blocks are
      in order, the entries that can be chosen come first.
    """
    batch, table_pages = page_table.shape
    block_count = table_pages * page_entries // block_size
    inside = (ids >= 0) & (ids < block_count)
    # Compared before it is multiplied: any block number may stand there.
    first = jnp.where(inside, ids, 0) * block_size
    seen = jnp.where(inside, jnp.clip(visible[..., None] - first, 0, block_size), 0)
    page = jnp.take_along_axis(page_table, (first // page_entries).reshape(batch, -1), axis=1).reshape(first.shape)
    there = inside & (page >= 0) & (page < pages)
    rows = jnp.where(there, page * page_entries + first % page_entries, -1)
    parts = jnp.arange(block_size // RUN, dtype=jnp.int32) * RUN
    rows = jnp.where(rows[..., None] < 0, -1, rows[..., None] + parts).reshape(*ids.shape[:2], -1)
    padding = -rows.shape[-1] % (KEYS // RUN)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, padding)), constant_values=-1), jnp.sum(seen, axis=-1)


def scores(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    runs: jax.Array,
    run: int,
    limits: jax.Array,
    block_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Scores of lists of keys, and maxima of blocks of them.

    Args:
      queries: ``[lists, query, heads, 128]`` bfloat16.
      weights: ``[lists, query, heads]``.
      pool: keys, leaves ``[pages, page_entries, width']`` of FP4_E8M0.
      runs: ``[lists, runs]`` int32: a list's keys as runs of consecutive rows of the pool, each given by its first;
        −1 = none. They fill whole tiles of 64 keys.
      run: rows of a run, 64 or 8 (static).
      limits: ``[lists, query]`` int32: so many of a list's keys count for a query.
      block_size: 1, 2, 4 or 8; 0: no maxima, an array of one block (static).

    Returns:
      Scores ``[lists, query, keys]`` float32, −inf where there is no key or none that counts; maxima
      ``[lists, query, keys / block_size]``. Tiles behind a list's last key that counts are not written.
    """
    lists, total, heads, _ = queries.shape
    keys = runs.shape[1] * run
    plan = _plan(total, heads)
    columns = plan.together * heads
    padding = ((0, 0), (0, plan.padded - total))
    queries = lanes.permute(jnp.pad(queries, (*padding, (0, 0), (0, 0))))
    queries = queries.reshape(lists * plan.blocks, plan.products, columns, WIDTH)
    weights = jnp.pad(weights.astype(jnp.float32), (*padding, (0, 0)))
    weights = weights.reshape(lists * plan.blocks, plan.products, columns)
    programs = _PROGRAMS * (2 if plan.products == 1 else 1)
    # A block of queries and its list are a unit of work. Units lie one after another, in tiles of keys.
    units = lists * plan.blocks
    ends = jnp.cumsum(jnp.repeat(pl.cdiv(jnp.max(limits, axis=1), KEYS), plan.blocks), dtype=jnp.int32)

    def body(queries_ref, weights_ref, payload_ref, scale_ref, runs_ref, limits_ref, ends_ref, *refs):
        out_ref, best_ref, queries_smem, weights_smem, slots_smem, loaded, free = refs
        program, group = lax.axis_index("program"), lax.axis_index("group")
        begin, end = _share(ends_ref[units - 1], program, programs)

        def unit(number, _):
            """A program's share of one unit."""
            start = jnp.where(number > 0, ends_ref[jnp.maximum(number - 1, 0)], 0)
            low, high = jnp.maximum(begin - start, 0), jnp.minimum(end, ends_ref[number]) - start

            @pl.when(high > low)
            def _():
                plgpu.barrier_arrive(free)

                @pl.when(group == 0)
                def _():
                    plgpu.barrier_wait(free)
                    for i in range(plan.products):
                        plgpu.copy_gmem_to_smem(queries_ref.at[number, i], queries_smem.at[i], loaded)
                    plgpu.copy_gmem_to_smem(weights_ref.at[number], weights_smem, loaded)

                plgpu.barrier_wait(loaded)
                tiles(lax.div(number, jnp.int32(plan.blocks)), lax.rem(number, jnp.int32(plan.blocks)), low, high)

        def tiles(which, block, low, high):
            """Tiles ``low .. high`` of a list; warpgroups take turns."""
            first = low + group
            live = jnp.minimum(plan.groups - block * plan.products, plan.products)

            def locate(i):
                return lanes.locate(runs_ref.at[which], first + i * _WARPGROUPS, run)

            def query(product):
                return (block * plan.products + product) * plan.together

            def constants(product):
                limits_here = limits_ref.at[which, pl.ds(query(product), plan.together)]
                return lanes.constants(weights_smem.at[product], limits_here, columns)

            # With one product a thread keeps its weights; those of several would not fit.
            kept = constants(0) if plan.products == 1 else None

            def one_tile(number, located, operand):
                def one_product(product, _):
                    def multiply(acc):
                        plgpu.wgmma(acc, operand, queries_smem.at[product].transpose((1, 0)))
                        return acc[...]

                    values = constants(product) if kept is None else kept
                    products = pl.run_scoped(multiply, plgpu.ACC((KEYS, columns), jnp.float32))
                    here = (ref.at[which, pl.ds(query(product), 1)] for ref in (out_ref, best_ref))
                    lanes.store_sums(
                        products, values, located, number, total - query(product), *here, plan.together, block_size
                    )

                if plan.products == 1:
                    one_product(0, None)
                else:
                    lax.fori_loop(0, live, one_product, None)

            def slot(i):
                return slots_smem.at[group, lax.rem(i, jnp.int32(_SLOTS))]

            def fetch(i, rows):
                lanes.fetch(payload_ref, scale_ref, rows, run, slot(i))

            def one(i, carry):
                *located, ahead = carry
                operand = lanes.unpack(slot(i), _SLOTS - 1)
                fetch(i + _SLOTS, ahead)
                after = locate(i + _SLOTS + 1)
                one_tile(first + i * _WARPGROUPS, located[0], operand)
                return (*located[1:], ahead, after)

            located = tuple(locate(i) for i in range(_SLOTS + 1))
            for i in range(_SLOTS):
                fetch(jnp.int32(i), located[i])
            count = lax.div(high - first + (_WARPGROUPS - 1), jnp.int32(_WARPGROUPS))
            lax.fori_loop(0, count, one, located)
            lanes.drain()

        first, last = _ended(ends_ref, units, begin), _ended(ends_ref, units, end - 1)
        lax.fori_loop(first, last + 1, unit, None)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((lists, total, keys), jnp.float32),
            jax.ShapeDtypeStruct((lists, total, keys // block_size if block_size else 1), jnp.float32),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=_WARPGROUPS,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=[
            plgpu.SMEM((plan.products, columns, WIDTH), jnp.bfloat16, transforms=registers.TOKENS),
            plgpu.SMEM((plan.products, columns), jnp.float32),
            plgpu.SMEM((_WARPGROUPS, _SLOTS, lanes.SLOT_WORDS), jnp.int32),
            plgpu.Barrier(num_arrivals=plan.products + 1),
            plgpu.Barrier(num_arrivals=_WARPGROUPS),
        ],
    )
    return kernel(queries, weights, pool.payload, pool.scales, runs, jnp.pad(limits, padding), ends)


def _share(total: jax.Array, program: jax.Array, programs: int) -> tuple[jax.Array, jax.Array]:
    """First tile of a program's part of all tiles, and the one behind its last."""
    share = lax.div(lax.div(total + (programs - 1), jnp.int32(programs)) + (_WARPGROUPS - 1), jnp.int32(_WARPGROUPS))
    share *= _WARPGROUPS
    return program * share, jnp.minimum(program * share + share, total)


def _ended(ends, units: int, tile: jax.Array) -> jax.Array:
    """How many units end with a tile or before it: a binary search in their ends, ``[units]`` or a reference."""
    count = jnp.int32(0)
    for i in reversed(range(units.bit_length())):
        more = count + (1 << i)
        fits = (more <= units) & (ends[jnp.minimum(more, units) - 1] <= tile)
        count = jnp.where(fits, more, count)
    return count
