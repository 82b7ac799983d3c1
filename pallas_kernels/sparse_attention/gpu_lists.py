"""Row numbers of what a query sees, worked out by the block that attends: for Mosaic GPU kernels (PTX).

As an array made before, they would be two launches of their own and, with few queries, as long as a fifth of the
attention.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.gpu.unpack import TILE_ROWS

_SCALAR = plgpu.Layout.WG_STRIDED((128,), 1)  # a number in every thread's register


@dataclasses.dataclass(frozen=True)
class Lists:
    """Shape of a query's list of rows: first the window's, then the chosen entries', each in whole tiles of 64.

    Attributes:
      window, columns: entries of the window, and of the array that holds it.
      chosen: chosen entries, 0 without a pool.
      table_pages, pages, page_entries: of the page table, of the pool, and of a page.
    """

    window: int
    columns: int
    chosen: int = 0
    table_pages: int = 0
    pages: int = 0
    page_entries: int = 1

    @property
    def window_tiles(self) -> int:
        return pl.cdiv(self.window, TILE_ROWS)

    @property
    def pool_tiles(self) -> int:
        return pl.cdiv(self.chosen, TILE_ROWS)

    @property
    def tiles(self) -> int:
        return self.window_tiles + self.pool_tiles


def list_rows(shape: Lists, threads: int, request, oldest, valid, indices, page_table, seen, used) -> None:
    """Fills a list; every thread of the block must take part, and all see the result afterwards.

    Args:
      shape: of the list (static).
      threads: of the block (static).
      request: row of ``valid`` and ``page_table``.
      oldest: column of the oldest entry of the window, less than ``columns``; the others follow it around the end.
      valid: reference ``[batch, columns]`` bool.
      indices: reference int32 ``[chosen]`` of this query; None without a pool.
      page_table: reference ``[batch, table_pages]`` int32; None without a pool.
      seen: reference in shared memory, int32 ``[tiles, 64]``: rows, −1 = nothing.
      used: reference in shared memory, int32 ``[1]``: places up to the last row that is there.
    """
    numbers = [plgpu.layout_cast(jnp.full(128, n, jnp.int32), _SCALAR) for n in (request, oldest)]
    refs = [valid, seen, used] + ([] if indices is None else [indices, page_table])

    @plgpu.inline_mgpu(arg_types=(_SCALAR, _SCALAR, *(plgpu.RefType() for _ in refs)))
    def fill(ctx, request, oldest, valid, seen, used, *pool):
        del ctx
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        numbers = [llvm.bitcast(i32, next(iter(n.registers.flat))) for n in (request, oldest)]
        shared = [llvm.ptrtoint(i32, mgpu.utils.memref_ptr(ref)) for ref in (seen, used)]
        device = [llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)) for ref in (valid, *pool)]
        mgpu.utils.inline_ptx(_ptx(shape, threads), *numbers, *shared, *device)

    fill(*numbers, *refs)


def _ptx(shape: Lists, threads: int) -> str:
    request, oldest, seen, used, valid, indices, table = (f"${i}" for i in range(7))
    first = shape.window_tiles * TILE_ROWS
    lines = [
        "mov.u32 tid, %tid.x;",
        "setp.eq.u32 is, tid, 0;",
        f"@is st.shared.s32 [{used}], 0;",
        "bar.sync 0;",
        "mov.s32 last, 0;",
    ]
    for begin in range(0, shape.tiles * TILE_ROWS, threads):
        lines += [
            f"add.u32 place, tid, {begin};",
            "mov.s32 row, -1;",
            # The window.
            f"setp.lt.u32 is, place, {shape.window};",
            f"add.u32 x, place, {oldest};",
            f"setp.ge.u32 turn, x, {shape.columns};",
            f"@turn sub.u32 x, x, {shape.columns};",
            f"mad.lo.s32 x, {request}, {shape.columns}, x;",
            "cvt.u64.u32 at, x;",
            f"add.u64 at, at, {valid};",
            "mov.b16 byte, 0;",
            "@is ld.global.nc.u8 byte, [at];",
            "setp.ne.and.u16 is, byte, 0, is;",
            "@is mov.s32 row, x;",
        ]
        if shape.chosen:
            lines += [
                f"sub.u32 x, place, {first};",
                f"setp.lt.u32 is, x, {shape.chosen};",
                f"mad.wide.u32 at, x, 4, {indices};",
                "mov.s32 x, -1;",
                "@is ld.global.nc.s32 x, [at];",
                # As unsigned numbers negative ones are beyond any end.
                f"setp.lt.u32 is, x, {shape.table_pages * shape.page_entries};",
                f"div.u32 y, x, {shape.page_entries};",
                f"rem.u32 x, x, {shape.page_entries};",
                f"mad.lo.u32 y, {request}, {shape.table_pages}, y;",
                f"mad.wide.u32 at, y, 4, {table};",
                "mov.s32 y, -1;",
                "@is ld.global.nc.s32 y, [at];",
                f"setp.lt.u32 is, y, {shape.pages};",
                f"@is mad.lo.s32 row, y, {shape.page_entries}, x;",
            ]
        lines += [
            f"setp.lt.u32 is, place, {shape.tiles * TILE_ROWS};",
            f"mad.lo.u32 x, place, 4, {seen};",
            "@is st.shared.s32 [x], row;",
            "setp.ge.and.s32 is, row, 0, is;",
            "add.s32 x, place, 1;",
            "@is mov.s32 last, x;",
        ]
    lines += [
        "redux.sync.max.s32 last, last, 0xffffffff;",
        "and.b32 x, tid, 31;",
        "setp.eq.u32 is, x, 0;",
        f"@is red.shared.max.s32 [{used}], last;",
        "bar.sync 0;",
    ]
    declarations = ".reg .b32 tid, place, row, last, x, y; .reg .b64 at; .reg .b16 byte; .reg .pred is, turn;"
    return "\n".join(["{", declarations, *lines, "}"])
