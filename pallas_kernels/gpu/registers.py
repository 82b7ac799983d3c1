"""What threads of Mosaic GPU kernels do with single registers: where they stand in a product, decoding, storing."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

THREADS = 128  # of a warpgroup
ROWS = 64  # of a warpgroup's matrix instruction
# Bytes of a row of codes in shared memory: the widest swizzled tile.
ROW_BYTES = 128
CODES = (plgpu.TilingTransform((8, ROW_BYTES)), plgpu.SwizzleTransform(128))
TOKENS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# Of a multiprocessor for each thread of one warpgroup, and what a warpgroup keeps that only copies.
_REGISTERS, COPY_REGISTERS = 64 * 1024 // THREADS, 24


# Eight E2M1 codes to four pairs (i, i + 4) of bfloat16. A product moves a code's sign to bit 15 of 16 and its magnitude
# to bits 8 .. 6: as bfloat16 that is its value times 2^-126 (subnormal or not), which a power of two brings into range
# exactly.
UNPACK_E2M1 = """{
.reg .b32 a, b, c, d, high;
shr.b32 high, $4, 8;
and.b32 a, $4, 0x000F000F;
and.b32 b, $4, 0x00F000F0;
and.b32 c, high, 0x000F000F;
and.b32 d, high, 0x00F000F0;
mul.lo.u32 a, a, 0x1040;
mul.lo.u32 b, b, 0x0104;
mul.lo.u32 c, c, 0x1040;
mul.lo.u32 d, d, 0x0104;
and.b32 a, a, 0x81C081C0;
and.b32 b, b, 0x81C081C0;
and.b32 c, c, 0x81C081C0;
and.b32 d, d, 0x81C081C0;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $5;
mul.rn.bf16x2 $2, c, $5;
mul.rn.bf16x2 $3, d, $5;
}"""
E2M1_EXPONENT = 126


def compute_registers(groups: int) -> int:
    """Registers of a thread in each of ``groups`` warpgroups that compute, beside one that copies.

    Registers move between the warpgroups of a program, but it has no more than it started with.
    """
    started = _REGISTERS // (groups + 1) // 8 * 8
    return (started * (groups + 1) - COPY_REGISTERS) // groups // 8 * 8


def flat(words: int) -> plgpu.ShapeDtypeStruct:
    """The type of an opaque array of so many words of each thread of a warpgroup."""
    return plgpu.ShapeDtypeStruct((words * THREADS,), np.dtype("int32"), flat_layout(words))


def flat_layout(words: int):
    return plgpu.Layout.WG_STRIDED((words * THREADS,), vec_size=1)


def flat_array(words: list[ir.Value]) -> mgpu.FragmentedArray:
    """The opaque array of a thread's int32 values."""
    registers = np.array([vector(word) for word in words], dtype=object)
    layout = mgpu.WGStridedFragLayout((len(words) * THREADS,), 1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def i32(value: int) -> ir.Value:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def thread() -> tuple[ir.Value, ir.Value]:
    """A thread's first row among the rows of all warpgroups, and its place among the four that share the row.

    It holds that row and the one 8 below it.
    """
    index = mgpu.utils.thread_idx()
    quad = arith.andi(arith.shrui(index, i32(2)), i32(7))
    row = arith.addi(arith.muli(arith.shrui(index, i32(5)), i32(16)), quad)
    return row, arith.andi(index, i32(3))


def offset(pointer: ir.Value, bytes_: ir.Value) -> ir.Value:
    return mgpu.utils.getelementptr(pointer, [bytes_], ir.IntegerType.get_signless(8))


def stride(ref: ir.Value) -> int:
    """Elements from a row to the next."""
    return ir.MemRefType(ref.type).get_strides_and_offset()[0][-2]


def vector(value: ir.Value) -> ir.Value:
    return mgpu.utils.vector.from_elements(ir.VectorType.get((1,), value.type), [value])


def element(values: ir.Value, index: int = 0) -> ir.Value:
    return mgpu.utils.vector.extract(values, dynamic_position=[], static_position=[index])


def four_words(codes: ir.Value, row: ir.Value, chunk: ir.Value) -> list[ir.Value]:
    """The 16 bytes ``chunk`` (0 .. 7) of a row of a tile ``[rows, 128]`` bytes in shared memory."""
    # Swizzled: a chunk's place depends on the last bits of its row.
    place = arith.xori(chunk, arith.andi(row, i32(7)))
    at = arith.addi(arith.muli(row, i32(ROW_BYTES)), arith.muli(place, i32(16)))
    words = llvm.load(
        ir.VectorType.get((4,), ir.IntegerType.get_signless(32)),
        offset(mgpu.utils.memref_ptr(codes), at),
        alignment=16,
    )
    return [element(words, i) for i in range(4)]


def operand(pairs: dict[tuple[int, int], ir.Value], width: int) -> mgpu.FragmentedArray:
    """A warpgroup's left operand ``[64, width]`` bfloat16.

    Args:
      pairs: by (group of 8 columns, row below) a thread's two neighbouring values, as int32.
    """
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    registers = np.empty((1, width // 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)
    for (column, below), value in pairs.items():
        registers[0, column, 0, 0, below, 0, 0, 0, 0] = mgpu.utils.bitcast(vector(value), pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def store_columns(value: jax.Array, out, first: int, rows: int) -> None:
    """Writes a product transposed.

    Args:
      value: a warpgroup's ``[64, tokens]``.
      out: reference ``[tokens, columns]`` in device memory; the warpgroups' parts lie side by side from ``first``.
      rows: tokens to be written.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(ctx, value, out):
        del ctx
        row, place = thread()
        width, size = stride(out), mgpu.utils.bytewidth(value.mlir_dtype)
        pointer = mgpu.utils.memref_ptr(out)
        for index, register in np.ndenumerate(value.registers):
            column, below = index[1], index[4]
            for i in range(2):
                if 8 * column + i >= rows:
                    continue
                token = arith.addi(arith.muli(place, i32(2)), i32(8 * column + i))
                at = arith.addi(arith.muli(token, i32(width)), arith.addi(row, i32(first + 8 * below)))
                where = offset(pointer, arith.muli(at, i32(size)))
                if 8 * column + 8 <= rows:
                    llvm.store(element(register, i), where)
                else:
                    with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, token, i32(rows))):
                        llvm.store(element(register, i), where)

    store(value, out)
