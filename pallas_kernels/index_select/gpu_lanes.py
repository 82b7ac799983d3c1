"""What single threads of the index scores' Mosaic kernel do: load and unpack their parts of keys, sum over heads.

Four threads share a row of a product, a key, and each holds that row and the one 8 below it: two keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.gpu import registers
from pallas_kernels.gpu.registers import element, flat, flat_array, flat_layout, i32

WIDTH = 128  # values of a key: for each of the four threads a block of 32
KEYS = registers.ROWS
# Rows of a warp that are side by side: the shortest run of keys that it loads, the largest block that it compares.
RUN = 8
# Keys are unpacked times 2⁻³² and sums taken times 2³²: this leaves room for the exponents of scales up to 2³³ in
# bfloat16 on the way, and is exact.
_UNSCALE = 2.0**32

# A thread copies its 16 bytes of a key and the key's scales to where it alone reads them.
_COPY = f"""{{
.reg .b64 from;
mad.wide.s32 from, $0, {WIDTH // 2}, $1;
cp.async.cg.shared.global [$3], [from], 16;
mad.wide.s32 from, $0, {WIDTH // 32}, $2;
cp.async.ca.shared.global [$4], [from], 4;
}}"""
_TAKE = """{
.reg .b32 at;
cp.async.wait_group $12;
ld.shared.v4.b32 {$0, $1, $2, $3}, [$10];
ld.shared.b32 $8, [$11];
ld.shared.v4.b32 {$4, $5, $6, $7}, [$10 + %(payload)d];
ld.shared.b32 $9, [$11 + %(scales)d];
}"""
# Keys are 2^-32 times their values.
_EXPONENT = registers.E2M1_EXPONENT - 32
# Of a tile in shared memory: for each of two keys of a thread four words of codes, then one of scales.
_CODE_BYTES, _SCALE_BYTES = 16 * registers.THREADS, 4 * registers.THREADS
SLOT_WORDS = 2 * (_CODE_BYTES + _SCALE_BYTES) // 4

LOCATED = flat(2)


def permute(x: jax.Array) -> jax.Array:
    """``[..., 128]`` in the order of the contraction.

    Of the 32 consecutive values of each of four threads, a word's eight codes are unpacked into four pairs
    (i, i + 4), and a matrix instruction takes two pairs of each thread.
    """
    parts = x.reshape(*x.shape[:-1], 4, 4, 2, 4)  # thread, word, half of a pair, pair
    lead = x.ndim - 1
    return parts.transpose(*range(lead), *(lead + axis for axis in (1, 3, 0, 2))).reshape(x.shape)


def locate(runs_ref, tile: jax.Array, run: int) -> jax.Array:
    """Starts to load where a thread's two keys are: rows of the pool, negative = none. Opaque to others.

    Args:
      runs_ref: reference to ``[runs]`` int32, the first rows of runs of consecutive ones.
      tile: of 64 keys; one behind the last is read as the last.
      run: rows of a run, 64 or 8 (static).
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=LOCATED)
    def located(ctx, runs, tile):
        del ctx
        row, _ = _place()
        tiles = ir.MemRefType(runs.type).shape[0] * run // KEYS
        first = arith.muli(arith.minsi(tile.registers.item(), i32(tiles - 1)), i32(KEYS // run))
        rows = []
        for below in (0, 8):
            if run == KEYS and below:
                rows.append(rows[0])
                continue
            at = first
            if run != KEYS:
                at = arith.addi(first, arith.divui(arith.addi(row, i32(below)), i32(run)))
            address = registers.offset(mgpu.utils.memref_ptr(runs), arith.muli(at, i32(4)))
            rows += _asm("ld.global.nc.b32 $0, [$1];", _integer(address), results=1, ordered=True)
        return flat_array(rows)

    return located(runs_ref, tile)


def fetch(payload_ref, scale_ref, rows: jax.Array, run: int, slot_ref) -> None:
    """Starts to copy a thread's blocks of its two keys; where there is no key, those of the pool's first ones.

    Args:
      slot_ref: reference to ``[SLOT_WORDS]`` int32 in shared memory.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), flat_layout(2), plgpu.RefType()),
    )
    def start(ctx, payload, scale, rows, slot):
        del ctx
        row, _ = _place()
        payload = _integer(mgpu.utils.memref_ptr(payload))
        scale = _integer(mgpu.utils.memref_ptr(scale))
        codes_at, scales_at = _slot_places(slot)
        block = arith.shli(arith.extui(ir.IntegerType.get_signless(64), _place()[1]), _i64(4))
        payload = arith.addi(payload, block)
        for i, register in enumerate(rows.registers.flat):
            inside = arith.remui(arith.addi(row, i32(8 * i)), i32(run))
            at = arith.addi(arith.maxsi(element(register), i32(0)), inside)
            codes = arith.addi(codes_at, i32(i * _CODE_BYTES))
            scales = arith.addi(scales_at, i32(i * _SCALE_BYTES))
            mgpu.utils.inline_ptx(_COPY, at, payload, scale, codes, scales, has_side_effects=True)
        mgpu.utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

    start(payload_ref, scale_ref, rows, slot_ref)


def drain() -> None:
    """Waits for all copies: the next ones go to the same places."""

    @plgpu.inline_mgpu(arg_types=())
    def wait(ctx):
        del ctx
        mgpu.utils.inline_ptx("cp.async.wait_all;", has_side_effects=True)

    wait()


def unpack(slot_ref, newer: int) -> jax.Array:
    """A warpgroup's keys times 2⁻³² as an operand ``[64, 128]`` bfloat16.

    Args:
      slot_ref: that of :func:`fetch`.
      newer: how many later copies may still be on their way (static).
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((KEYS, WIDTH), jnp.bfloat16, plgpu.Layout.WGMMA),
    )
    def unpacked(ctx, slot):
        del ctx
        codes_at, scales_at = _slot_places(slot)
        code = _TAKE % {"payload": _CODE_BYTES, "scales": _SCALE_BYTES}
        code = code.replace("$12", str(newer))
        words = _asm(code, codes_at, scales_at, results=10, ordered=True)
        shift = arith.muli(_place()[1], i32(8))
        pairs = {}
        for below in range(2):
            scale = arith.andi(arith.shrui(words[8 + below], shift), i32(255))
            exponent = arith.minui(arith.addi(scale, i32(_EXPONENT)), i32(254))
            factor = arith.muli(exponent, i32((1 << 7) | (1 << 23)))
            for i, code in enumerate(words[4 * below : 4 * below + 4]):
                four = _asm(registers.UNPACK_E2M1, code, factor, results=4)
                pairs |= {(4 * i + j, below): pair for j, pair in enumerate(four)}
        return registers.operand(pairs, WIDTH)

    return unpacked(slot_ref)


def _slot_places(slot) -> tuple[ir.Value, ir.Value]:
    """Addresses of a thread's codes and scales."""
    base = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(slot))
    thread = arith.andi(mgpu.utils.thread_idx(), i32(registers.THREADS - 1))
    scales = arith.addi(arith.addi(base, i32(2 * _CODE_BYTES)), arith.muli(thread, i32(4)))
    return arith.addi(base, arith.muli(thread, i32(16))), scales


def constants(weights_ref, limits_ref, columns: int) -> jax.Array:
    """A thread's head weights, and the limit of the query whose sums it will hold. Opaque to others.

    Args:
      weights_ref: reference to ``[columns]`` float32.
      limits_ref: reference to ``[together]`` int32, the limits of the queries of a product.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=flat(1 + columns // 4))
    def loaded(ctx, weights, limits):
        del ctx
        word = ir.IntegerType.get_signless(32)
        _, place = _place()
        together = ir.MemRefType(limits.type).shape[0]
        own = arith.minsi(_own_query(place, together), i32(together - 1))
        at = registers.offset(mgpu.utils.memref_ptr(limits), arith.muli(own, i32(4)))
        words = [llvm.load(word, at, alignment=4)]
        for column in range(0, columns, 8):
            at = arith.addi(arith.muli(place, i32(8)), i32(4 * column))
            at = registers.offset(mgpu.utils.memref_ptr(weights), at)
            pair = llvm.load(ir.VectorType.get((2,), word), at, alignment=8)
            words += [element(pair, 0), element(pair, 1)]
        return flat_array(words)

    return loaded(weights_ref, limits_ref)


def store_sums(
    products: jax.Array,
    values: jax.Array,
    rows: jax.Array,
    tile: jax.Array,
    queries: jax.Array,
    out_ref,
    best_ref,
    together: int,
    size: int,
) -> None:
    """Writes Σ_h weights_h · relu(products_h), and the maxima of blocks.

    Args:
      products: ``[64, together · heads]`` float32.
      values: of :func:`constants`.
      rows: of :func:`locate`.
      tile: number of the tile among the list's.
      queries: how many of the ``together`` queries there are.
      out_ref, best_ref: references to the first query's rows and the following ones'.
      size: keys of a block, up to 8; 0: no maxima (static).
    """
    columns = products.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            flat_layout(1 + columns // 4),
            flat_layout(2),
            plgpu.Layout.WG_SPLAT,
            plgpu.Layout.WG_SPLAT,
            plgpu.RefType(),
            plgpu.RefType(),
        )
    )
    def store(ctx, products, values, rows, tile, queries, out, best):
        del ctx
        limit, *weights = (element(register) for register in values.registers.flat)
        row, place = _place()
        found = _share_sums(_head_sums(products, weights, columns // together), place, together)
        own = _own_query(place, together)
        writes = _compare("slt", own, queries.registers.item())
        if together == 1:
            # Threads two apart hold the same.
            writes = arith.andi(writes, _compare("ult", place, i32(2)))
        there = [_compare("sge", element(register), i32(0)) for register in rows.registers.flat]
        first = arith.addi(arith.muli(tile.registers.item(), i32(KEYS)), row)
        out, best = (
            registers.offset(mgpu.utils.memref_ptr(ref), arith.muli(own, i32(4 * registers.stride(ref))))
            for ref in (out, best)
        )
        nothing, unscale = (arith.constant(ir.F32Type.get(), value) for value in (float("-inf"), _UNSCALE))
        for score, below in found:
            entry = arith.addi(first, arith.select(below, i32(8), i32(0)))
            live = arith.andi(arith.select(below, there[1], there[0]), _compare("slt", entry, limit))
            score = arith.select(live, arith.mulf(score, unscale), nothing)
            with mgpu.utils.when(writes):
                llvm.store(score, registers.offset(out, arith.muli(entry, i32(4))), alignment=4)
            if not size:
                continue
            distance = 1
            while distance < size:
                score = arith.maximumf(score, mgpu.utils.shfl_bfly(score, 4 * distance))
                distance *= 2
            leads = _compare("eq", arith.remui(row, i32(size)), i32(0))
            with mgpu.utils.when(arith.andi(writes, leads)):
                at = arith.muli(arith.divui(entry, i32(size)), i32(4))
                llvm.store(score, registers.offset(best, at), alignment=4)

    store(products, values, rows, tile, queries, out_ref, best_ref)


def _head_sums(products, weights: list[ir.Value], heads: int) -> dict[tuple[int, int], ir.Value]:
    """A thread's share of the sums, by (query, row below)."""
    zero = arith.constant(ir.F32Type.get(), 0.0)
    weights = [arith.bitcast(ir.F32Type.get(), weight) for weight in weights]
    # Two sums, of even and odd columns: half the latency.
    sums = {}
    for index, register in np.ndenumerate(products.registers):
        column, below = index[1], index[4]
        for i in range(2):
            key = (8 * column // heads, below, i)
            positive, weight = arith.maximumf(element(register, i), zero), weights[2 * column + i]
            sums[key] = llvm.intr_fma(positive, weight, sums[key]) if key in sums else arith.mulf(positive, weight)
    return {key[:2]: arith.addf(value, sums[*key[:2], 1]) for key, value in sums.items() if key[2] == 0}


def _share_sums(
    sums: dict[tuple[int, int], ir.Value], place: ir.Value, together: int
) -> list[tuple[ir.Value, ir.Value]]:
    """Adds up what the four threads of a row have: each ends with the sums of its own query.

    Returns:
      Sums, and whether they are those of the row 8 below.
    """
    zero = arith.constant(ir.F32Type.get(), 0.0)

    def bit(distance: int) -> ir.Value:
        return _compare("ne", arith.andi(place, i32(distance)), i32(0))

    def exchange(first: ir.Value, second: ir.Value, distance: int) -> ir.Value:
        """Threads whose place lacks the bit add up ``first``, the others ``second``."""
        keep, give = arith.select(bit(distance), second, first), arith.select(bit(distance), first, second)
        return arith.addf(keep, mgpu.utils.shfl_bfly(give, distance))

    if together == 1:
        total = exchange(sums[0, 0], sums[0, 1], 1)
        return [(arith.addf(total, mgpu.utils.shfl_bfly(total, 2)), bit(1))]
    if together == 2:
        return [(exchange(*(exchange(sums[0, below], sums[1, below], 1) for below in range(2)), 2), bit(2))]
    found = []
    for below in range(2):
        pairs = (exchange(sums[q, below], sums.get((q + 1, below), zero), 1) for q in (0, 2))
        found.append((exchange(*pairs, 2), arith.constant(ir.IntegerType.get_signless(1), below)))
    return found


def _own_query(place: ir.Value, together: int) -> ir.Value:
    """Which query's sums a thread ends with; of three, one thread has none."""
    return i32(0) if together == 1 else arith.andi(place, i32(1)) if together == 2 else place


def _place() -> tuple[ir.Value, ir.Value]:
    """A thread's first row among its warpgroup's 64, and its place among the four that share it."""
    row, place = registers.thread()
    return arith.andi(row, i32(KEYS - 1)), place


def _asm(code: str, *args: ir.Value, results: int, ordered: bool = False) -> list[ir.Value]:
    """PTX with int32 results; ``ordered``: it stays where it is, so that loads start early."""
    types = (ir.IntegerType.get_signless(32),) * results
    return list(mgpu.utils.inline_ptx(code, *args, result_types=types, has_side_effects=ordered))


def _integer(pointer: ir.Value) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)


def _i64(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(64), value)


def _compare(kind: str, a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.cmpi(getattr(arith.CmpIPredicate, kind), a, b)
