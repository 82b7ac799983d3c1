"""Gathering rows into shared memory as bfloat16, packed ones unpacked on the way: for Mosaic GPU kernels on Hopper.

Mosaic GPU has no loads through an array of addresses, and its layouts know no E2M1, so these are PTX. Every thread of
a warpgroup loads pieces of rows into registers and later writes their values into a tile in shared memory that matrix
units can read (8 × 64 tiles, 128-byte swizzle). Two calls, so that loads are on their way while their slot of the
pipeline is still in use.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.formats import FP4_E4M3, FP8_E8M0, BlockFormat

TILE_ROWS = 64
GROUPS = TILE_ROWS // 8
WIDTH = 512  # values of a row: 16 pieces of 32, one for each of the threads that share a row
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

_THREADS = 128
_PIECE = 32
# Registers of a piece: its codes, and one for its scales (two bytes of FP4_E4M3, one of FP8_E8M0).
_WORDS = {FP4_E4M3: 4 + 1, FP8_E8M0: 8 + 1}


def fetch_rows(fmt: BlockFormat, groups: range, rows, payload, scales) -> jax.Array:
    """Starts to load some of 64 packed rows.

    Args:
      fmt: FP4_E4M3 or FP8_E8M0 (static).
      groups: of the 8 groups of 8 rows (static); a group takes 5 registers of each thread, of FP8 9.
      rows: reference to int32 ``[64]`` row numbers in shared memory, −1 = a row of zeros.
      payload, scales: references to the packed rows in device memory, ``[rows, width']`` uint8.

    Returns:
      An opaque array for :func:`unpack_rows`.
    """
    layout = _layout(fmt, groups)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(layout.args[0], jnp.int32, layout),
    )
    def fetch(ctx, rows, payload, scales):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        addresses = (_shared_address(rows), _device_address(payload), _device_address(scales))
        words = []
        for group in groups:
            words += mgpu.utils.inline_ptx(
                _fetch_ptx(fmt, group), *addresses, result_types=(i32,) * _WORDS[fmt], has_side_effects=True
            )
        registers = np.empty(len(words), dtype=object)
        registers[:] = [llvm.bitcast(ir.VectorType.get((1,), i32), word) for word in words]
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    return fetch(rows, payload, scales)


def unpack_rows(fmt: BlockFormat, groups: range, packed: jax.Array, tile) -> None:
    """Writes the values of what :func:`fetch_rows` loaded; the caller commits shared memory and tells the readers.

    Args:
      fmt, groups: as there.
      packed: its result.
      tile: reference to ``[64, 512]`` bfloat16 in shared memory with :data:`TRANSFORMS`.
    """

    @plgpu.inline_mgpu(arg_types=(_layout(fmt, groups), plgpu.RefType(TRANSFORMS)))
    def unpack(ctx, packed, tile):
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        words = [llvm.bitcast(i32, register) for register in packed.registers.flat]
        address = _shared_address(tile)
        for i, group in enumerate(groups):
            piece = words[i * _WORDS[fmt] : (i + 1) * _WORDS[fmt]]
            mgpu.utils.inline_ptx(_unpack_ptx(fmt, group), *piece, address)

    unpack(packed, tile)


def copy_rows(groups: range, rows, source, tile) -> None:
    """Copies some of 64 rows of bfloat16 and waits for them; the caller commits shared memory and tells the readers.

    Args:
      groups: of the 8 groups of 8 rows (static).
      rows: reference to int32 ``[64]`` row numbers in shared memory, −1 = a row of zeros.
      source: reference to ``[rows, 512]`` bfloat16 in device memory.
      tile: reference to ``[64, 512]`` bfloat16 in shared memory with :data:`TRANSFORMS`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(TRANSFORMS)))
    def copy(ctx, rows, source, tile):
        del ctx
        mgpu.utils.inline_ptx(_copy_ptx(groups), _shared_address(rows), _device_address(source), _shared_address(tile))

    copy(rows, source, tile)


def _layout(fmt: BlockFormat, groups: range) -> plgpu.Layout:
    shape = (len(groups) * _WORDS[fmt] * _THREADS,)
    return plgpu.Layout.WG_STRIDED(shape, 1)


def _shared_address(ref) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))


def _device_address(ref) -> ir.Value:
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref))


# Thread t of the warpgroup: row t % 8 of each group of 8 (so that stores fall into different banks), and piece t / 8
# of the row's 16 (so that neighbouring threads of a row read on).
_PLACE = """
mov.u32 tid, %tid.x;
and.b32 row, tid, 7;
bfe.u32 piece, tid, 3, 4;"""


def _block(declarations: str, lines: list[str]) -> str:
    return "\n".join(["{", declarations, _PLACE, *lines, "}"])


def _fetch_ptx(fmt: BlockFormat, group: int) -> str:
    count = _WORDS[fmt]
    codes = [f"${i}" for i in range(count - 1)]
    payload_bytes, scale_bytes = fmt.payload_width(_PIECE), fmt.scale_width(_PIECE)
    lines = [
        "shl.b32 at, row, 2;",
        f"add.u32 at, at, ${count};",
        f"ld.shared.s32 row, [at + {32 * group}];",
        "setp.ge.s32 there, row, 0;",
        f"mad.wide.u32 base, piece, {payload_bytes}, ${count + 1};",
        f"mad.wide.s32 base, row, {fmt.payload_width(WIDTH)}, base;",
        f"mad.wide.u32 scale, piece, {scale_bytes}, ${count + 2};",
        f"mad.wide.s32 scale, row, {fmt.scale_width(WIDTH)}, scale;",
        *(f"mov.b32 {word}, 0;" for word in codes),
        "mov.b16 bytes, 0;",
    ]
    for first in range(0, len(codes), 4):
        four = ", ".join(codes[first : first + 4])
        lines.append(f"@there ld.global.nc.v4.b32 {{{four}}}, [base + {4 * first}];")
    lines += [
        f"@there ld.global.nc.{'b16' if scale_bytes == 2 else 'u8'} bytes, [scale];",
        f"cvt.u32.u16 ${count - 1}, bytes;",
    ]
    declarations = ".reg .b32 tid, row, piece, at; .reg .b64 base, scale; .reg .pred there; .reg .b16 bytes;"
    return _block(declarations, lines)


def _e4m3_ptx(out: str, source: str, bytes_: tuple[int, int]) -> list[str]:
    """Two E4M3 bytes of a register as bfloat16 times 2⁻¹²⁰, NaN as NaN.

    With its sign in bit 15 and the rest in bits 10..4, a byte's exponent and mantissa are bfloat16's, with another
    bias; products keep bfloat16's subnormals, and so those of E4M3.
    """
    low, high = bytes_
    return [
        # The bytes in the upper halves of both 16 bits.
        f"prmt.b32 x, {source}, 0, {high << 12 | 4 << 8 | low << 4 | 4:#x};",
        "shr.u32 y, x, 4;",
        "and.b32 y, y, 0x07F007F0;",
        # All ones are NaN: the carry into bit 11 fills the exponent.
        "add.u32 z, y, 0x00100010;",
        "and.b32 z, z, 0x08000800;",
        "mad.lo.u32 y, z, 15, y;",
        f"lop3.b32 {out}, x, 0x80008000, y, 0xEA;",
    ]


def _fp4_ptx() -> list[list[str]]:
    """For each 8 values of a piece the lines that leave them in v0 … v3.

    The three bits of an E2M1 magnitude choose a byte of a table: bfloat16's upper bytes of 0 … 6, and its lower ones.
    value · scale is exact: 2 and 4 significant bits.
    """
    tables = ["0x3F3F3F00", "0x40404040", "0xC0800000", "0xC0804000"]
    first = [f"mov.b32 t{i}, {table};" for i, table in enumerate(tables)]
    first.append("mov.b32 up, 0x7B807B80;")
    first += [
        *_e4m3_ptx("x", "$4", (0, 1)),
        "mul.rn.bf16x2 x, x, up;",
        "prmt.b32 s0, x, 0, 0x1010;",
        "prmt.b32 s1, x, 0, 0x3232;",
    ]
    chunks = [first, [], [], []]
    for word, lines in enumerate(chunks):
        lines += [f"and.b32 x, ${word}, 0x77777777;", f"shl.b32 w, ${word}, 4;"]
        for i in range(2):
            a, b = f"v{2 * i}", f"v{2 * i + 1}"
            lines += [
                "prmt.b32 y, t0, t1, x;",
                "prmt.b32 z, t2, t3, x;",
                # Signs: four codes in the upper halves of bytes.
                f"prmt.b32 {a}, w, ${word}, {0x7362 if i else 0x5140:#x};",
                f"lop3.b32 y, {a}, 0x80808080, y, 0xEA;",
                f"prmt.b32 {a}, z, y, 0x5140;",
                f"prmt.b32 {b}, z, y, 0x7362;",
                f"mul.rn.bf16x2 {a}, {a}, s{word // 2};",
                f"mul.rn.bf16x2 {b}, {b}, s{word // 2};",
            ]
            if i == 0:
                lines.append("shr.u32 x, x, 16;")
    return chunks


def _fp8_ptx() -> list[list[str]]:
    """As :func:`_fp4_ptx`; an E8M0 byte is bfloat16's exponent."""
    chunks = [["shl.b32 s0, $8, 7;", "prmt.b32 s0, s0, 0, 0x1010;", "mov.b32 up, 0x7B807B80;"], [], [], []]
    for chunk, lines in enumerate(chunks):
        for pair in range(4):
            word = f"${2 * chunk + pair // 2}"
            lines += [
                *_e4m3_ptx("x", word, (0, 1) if pair % 2 == 0 else (2, 3)),
                "mul.rn.bf16x2 x, x, up;",
                f"mul.rn.bf16x2 v{pair}, x, s0;",
            ]
    return chunks


def _unpack_ptx(fmt: BlockFormat, group: int) -> str:
    lines = [
        # Column 32 · piece of the row: tile of 64 columns piece / 2, and of its 128 bytes the chunks of 16 from
        # 4 · (piece % 2) on; chunk c of row r lies at c xor r.
        "shr.u32 at, piece, 1;",
        "shl.b32 at, at, 10;",
        f"add.u32 at, at, ${_WORDS[fmt]};",
        "shl.b32 x, row, 7;",
        "add.u32 at, at, x;",
        "and.b32 x, piece, 1;",
        "shl.b32 x, x, 2;",
        "xor.b32 x, x, row;",
        "shl.b32 x, x, 4;",
        "add.u32 at, at, x;",
    ]
    for chunk, values in enumerate(_fp4_ptx() if fmt == FP4_E4M3 else _fp8_ptx()):
        lines += [
            *values,
            # A tile's rows are 128 bytes apart, so that this reaches no other bits.
            f"xor.b32 x, at, {16 * chunk};",
            f"st.shared.v4.b32 [x + {group * 8 * WIDTH * 2}], {{v0, v1, v2, v3}};",
        ]
    return _block(".reg .b32 tid, row, piece, at, s0, s1, up, t0, t1, t2, t3, w, x, y, z, v0, v1, v2, v3;", lines)


def _copy_ptx(groups: range) -> str:
    lines = [
        # 16-byte chunk ``piece`` of 16 at a time: tile of 64 columns piece / 8, chunk piece % 8 of its 128 bytes.
        "shr.u32 to, piece, 3;",
        "shl.b32 to, to, 10;",
        "add.u32 to, to, $2;",
        "and.b32 x, piece, 7;",
        "xor.b32 x, x, row;",
        "shl.b32 x, x, 4;",
        "add.u32 to, to, x;",
        "shl.b32 x, row, 7;",
        "add.u32 to, to, x;",
        "shl.b32 at, row, 2;",
        "add.u32 at, at, $0;",
    ]
    for group in groups:
        lines += [
            f"ld.shared.s32 row, [at + {32 * group}];",
            "setp.ge.s32 there, row, 0;",
            # No bytes from the source: the copy fills with zeros.
            "selp.b32 size, 16, 0, there;",
            "max.s32 row, row, 0;",
            "mad.wide.u32 from, piece, 16, $1;",
            f"mad.wide.s32 from, row, {2 * WIDTH}, from;",
        ]
        for chunk in range(0, WIDTH // 8, 16):
            to = group * 16 * WIDTH + chunk // 8 * 1024
            lines.append(f"cp.async.cg.shared.global [to + {to}], [from + {16 * chunk}], 16, size;")
    lines.append("cp.async.wait_all;")
    return _block(".reg .b32 tid, row, piece, at, to, size, x; .reg .b64 from; .reg .pred there;", lines)
