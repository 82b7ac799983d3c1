"""Paged memory of packed entries on Hopper in Pallas-Triton: encode and write, or read and decode, in one pass.

A thread owns 8 or 16 neighbouring values of an entry and looks the entry's page up itself: values and bytes stay in its
registers, so that nothing passes through shared memory and every value crosses device memory once, packed on one side.
Triton, because entries lie wherever a table says: these are loads and stores by arrays of row numbers. Codes of E2M1
are packed and unpacked in PTX: arithmetic on one value at a time would take longer than memory.

Bytes are those of :mod:`pallas_kernels.formats` to the bit as XLA compiles it: a quotient by a constant, or by a value
that a block shares, is a product with the rounded reciprocal there. Triton's own division is not exact enough for that,
so reciprocals are written down here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import interpreted
from pallas_kernels.formats import E2M1_MAX, E2M1_MIDDLES, E4M3_MAX, BlockFormat, Format, Packed

_THREADS = 128
# Values that a thread reads or writes at once, 16 bytes of bfloat16, and those that it packs: a block of FP4_E4M3.
_PART, _PIECE = 8, 16
# Most items of a thread, and programs that keep an H200's 132 processors busy.
_STEPS, _PROGRAMS = 2, 1024


def append_unsupported(
    pool: Packed, fmt: Format, page_table: jax.Array, start: jax.Array, count: jax.Array, values: jax.Array
) -> str | None:
    """Why the kernel does not append these arguments; None if it does."""
    del page_table, start, count
    if values.dtype not in (jnp.float32, jnp.bfloat16):
        return f"values are {values.dtype}"
    return _pool_unsupported(pool, fmt, values.shape[-1]) or _rows_unsupported(values.size, values.shape)


def gather_unsupported(
    pool: Packed, fmt: Format, page_table: jax.Array, indices: jax.Array, dtype: jnp.dtype = jnp.float32
) -> str | None:
    """Why the kernel does not gather these arguments; None if it does."""
    del page_table
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"the result is {jnp.dtype(dtype).name}"
    width = _width(pool, fmt)
    return _pool_unsupported(pool, fmt, width) or _rows_unsupported(indices.size * width, indices.shape)


def _width(pool: Packed, fmt: Format) -> int:
    return pool.payload.shape[-1] // fmt.payload_width(2) * 2


def _pool_unsupported(pool: Packed, fmt: Format, width: int) -> str | None:
    if not isinstance(fmt, BlockFormat):
        return f"the pool is not packed ({pool.payload.dtype})"
    if width < 32 or width & (width - 1):
        return f"width {width} is not a power of two from 32 on"
    # Triton's offsets are signed 32-bit integers below 2³² bytes, 64-bit ones above.
    if 2**31 <= pool.payload.size <= 2**32:
        return f"the pool has {pool.payload.size} bytes, between 2³¹ and 2³²"
    return None


def _rows_unsupported(size: int, shape: tuple[int, ...]) -> str | None:
    if size == 0:
        return f"there are no entries: {shape}"
    return f"{size} values are 2³¹ or more" if size >= 2**31 else None


def append(
    pool: Packed, fmt: BlockFormat, page_table: jax.Array, start: jax.Array, count: jax.Array, values: jax.Array
) -> Packed:
    """See :func:`pallas_kernels.paged_memory.append`."""
    batch, group, width = values.shape
    pages, page_entries = pool.payload.shape[:2]
    pieces, parts = width // _PIECE, _PIECE // _PART
    total = batch * group * pieces
    steps = _steps(total)

    def kernel(payload_in, scales_in, table, start_ref, count_ref, values_ref, payload, scales):
        del payload_in, scales_in
        found = []
        for row, piece in _rows(steps, pieces):
            here = row < batch * group
            request = jnp.where(here, row // group, 0) if batch > 1 else jnp.zeros_like(row)
            offset = row % group if batch > 1 else row
            live = here & (offset < plt.load(count_ref.at[request]))
            entry = plt.load(start_ref.at[request]) + offset
            page, slot, valid = _locate(table, request, entry, live, pages, page_entries)

            def read(part: int, row=row, piece=piece, valid=valid) -> jax.Array:
                column = (piece * _PIECE + part * _PART)[:, None] + jnp.arange(_PART)[None, :]
                return plt.load(values_ref.at[row[:, None], column], mask=valid[:, None], other=0)

            # Interpreted, a masked store writes back what it read: where nothing is to be written must be nowhere.
            found.append((jnp.where(valid, page, pages), slot, piece, valid, [read(part) for part in range(parts)]))
        for page, slot, piece, valid, x in found:
            codes, scale = _encode(fmt, x)
            plt.store(scales.at[page, slot, piece * _PIECE // fmt.block], scale, mask=valid)
            for part, code in enumerate(codes):
                size = code.shape[1]
                column = ((piece * parts + part) * size)[:, None] + jnp.arange(size)[None, :]
                plt.store(payload.at[page[:, None], slot[:, None], column], code, mask=valid[:, None])

    return Packed(
        *pl.pallas_call(
            kernel,
            grid=(pl.cdiv(total, steps * _THREADS),),
            out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in pool],
            input_output_aliases={0: 0, 1: 1},
            compiler_params=plt.CompilerParams(num_warps=_THREADS // 32),
            interpret=interpreted(),
            name="paged_append",
        )(*pool, page_table, start, count, lax.stop_gradient(values).reshape(batch * group, width))
    )


def gather(
    pool: Packed, fmt: BlockFormat, page_table: jax.Array, indices: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """See :func:`pallas_kernels.paged_memory.gather`."""
    pages, page_entries = pool.payload.shape[:2]
    width, rows = _width(pool, fmt), indices.size
    each, parts = rows // indices.shape[0], width // _PART
    steps = _steps(rows * parts)

    def kernel(payload, scales, table, indices_ref, out):
        found = []
        for row, part in _rows(steps, parts):
            here = row < rows
            request = jnp.where(here, row // each, 0) if indices.shape[0] > 1 else jnp.zeros_like(row)
            entry = plt.load(indices_ref.at[row], mask=here, other=-1)
            page, slot, valid = _locate(table, request, entry, here, pages, page_entries)
            size = fmt.payload_width(_PART)
            column = (part * size)[:, None] + jnp.arange(size)[None, :]
            codes = plt.load(payload.at[page[:, None], slot[:, None], column], mask=valid[:, None], other=0)
            scale = plt.load(scales.at[page, slot, part * _PART // fmt.block], mask=valid, other=0)
            found.append((row, part, here, codes, scale))
        for row, part, here, codes, scale in found:
            column = (part * _PART)[:, None] + jnp.arange(_PART)[None, :]
            plt.store(out.at[row[:, None], column], _decode(fmt, codes, scale).astype(dtype), mask=here[:, None])

    out = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows * parts, steps * _THREADS),),
        out_shape=jax.ShapeDtypeStruct((rows, width), dtype),
        compiler_params=plt.CompilerParams(num_warps=_THREADS // 32),
        interpret=interpreted(),
        name="paged_gather",
    )(*pool, page_table, indices.reshape(-1))
    return out.reshape(*indices.shape, width)


def _steps(items: int) -> int:
    """Items of a thread: several, so that their loads are on their way together, where every processor has work."""
    return max(min(items // (_THREADS * _PROGRAMS), _STEPS), 1)


def _rows(steps: int, items: int) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Rows of a program's threads in each step and which of a row's ``items`` items each takes."""
    for step in range(steps):
        item = (pl.program_id(0) * steps + step) * _THREADS + jnp.arange(_THREADS)
        yield item // items, item % items


def _locate(table, request: jax.Array, entry: jax.Array, live: jax.Array, pages: int, page_entries: int):
    """As :func:`~pallas_kernels.paged_memory.addressing.locate`, for a list of entries; invalid unless ``live``."""
    in_table = live & (entry >= 0) & (entry < table.shape[1] * page_entries)
    safe = jnp.where(in_table, entry, 0)
    page = plt.load(table.at[request, safe // page_entries], mask=in_table, other=-1)
    valid = in_table & (page >= 0) & (page < pages)
    return jnp.where(valid, page, 0), safe % page_entries, valid


def _encode(fmt: BlockFormat, parts: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Payload bytes ``[threads, ...]`` of each part ``[threads, 8]`` of a piece, and the scale byte ``[threads]``."""
    most = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1) for x in parts))
    shared = fmt.block // _PIECE
    if shared > 1:
        most = jnp.max(most.reshape(-1, shared), axis=1)
        most = jnp.broadcast_to(most[:, None], (most.shape[0], shared)).reshape(-1)
    most = jnp.maximum(most, fmt.floor)
    limit = E2M1_MAX if fmt.element == "e2m1" else E4M3_MAX
    packs = fmt.element == "e2m1" and parts[0].dtype == jnp.bfloat16 and not interpreted()
    if fmt.scale == "e8m0":
        scales = _power_above(most, limit)
        inverse = lax.bitcast_convert_type((254 - scales) << 23, jnp.float32)
    elif packs:
        code = jnp.minimum(most * (1 / limit), E4M3_MAX).astype(jnp.float8_e4m3fn)
        # How large products are in float16: see _pack_e2m1.
        scales, inverse = lax.bitcast_convert_type(code, jnp.uint8), 2.0**-14 / code.astype(jnp.float32)
    else:
        scales = _e4m3_bits(jnp.minimum(most * (1 / limit), E4M3_MAX))
    if packs:
        codes = [_pack_e2m1(x, inverse, fmt.scale) for x in parts]
    elif fmt.scale == "e8m0":
        # A power of two is rounded up, so that nothing is beyond the limit.
        codes = [_elements(fmt, x.astype(jnp.float32) * inverse[:, None]) for x in parts]
    else:
        step = _e4m3_value(scales)[:, None]
        codes = [_pair(_codes_over(x.astype(jnp.float32), step)) for x in parts]
    return codes, scales.astype(jnp.uint8)


def _elements(fmt: BlockFormat, x: jax.Array) -> jax.Array:
    """Payload bytes of values within the element's range ``[threads, 8]``."""
    if fmt.element == "e4m3":
        return lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    size = bits & 0x7FFFFFFF
    # As E4M3 below: to nearest even with one bit of mantissa, and by a sum where the step is 0.5 throughout.
    normal = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) - ((127 - 1) << 1)
    small = lax.bitcast_convert_type(jnp.abs(x) + 2.0**22, jnp.int32) & 7
    return _pair(jnp.where(size < 127 << 23, small, normal) | ((bits >> 28) & 8))


def _codes_over(x: jax.Array, step: jax.Array) -> jax.Array:
    """E2M1 codes int32 of x over E4M3 scales, compared with middles of codes as in formats.py."""
    size = jnp.abs(x)
    beyond = [size > m * step if i % 2 == 0 else size >= m * step for i, m in enumerate(E2M1_MIDDLES)]
    sign = (lax.bitcast_convert_type(x, jnp.int32) >> 28) & 8
    return functools.reduce(jnp.add, (jnp.where(b, 1, 0) for b in beyond)) | sign


def _pair(codes: jax.Array) -> jax.Array:
    """Bytes ``[threads, 4]`` of codes int32 ``[threads, 8]``."""
    low, high = _split(codes)
    return (low | high << 4).astype(jnp.uint8)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Even and odd columns of ``[threads, 8]``."""
    pairs = lax.split(x.reshape(x.shape[0], -1, 2), (1, 1), axis=2)
    return tuple(half.reshape(x.shape[0], -1) for half in pairs)


def _pack_e2m1(x: jax.Array, inverse: jax.Array, scale: str) -> jax.Array:
    """Payload bytes ``[threads, 4]`` of bfloat16 values ``[threads, 8]``, two values an instruction.

    E2M1 is float16 with one bit of mantissa, if 1 is its smallest normal number: after a division by 2¹⁴ both count
    their subnormals and binades alike, and a code is the upper bits of the rounded integer. What float16 rounds before
    reaches no middle of two codes that it was not on: a bfloat16 value over a scale is on it or 2⁻¹⁰ away.
    """
    lines = []
    for i, (low, high) in enumerate((("$1", "$3"), ("$2", "$4"))):
        for name, source in (("low", low), ("high", high)):
            lines += [
                f"shl.b32 a, {source}, 16;",
                f"and.b32 b, {source}, 0xFFFF0000;",
                "mul.f32 a, a, $5;",
                "mul.f32 b, b, $5;",
                "cvt.rn.f16x2.f32 a, b, a;",
                # Powers of two of all sizes leave no room for 2⁻¹⁴ in the factor.
                *(["mul.rn.f16x2 a, a, unit;"] if scale == "e8m0" else []),
                "shr.u32 b, a, 12;",
                "and.b32 b, b, 0x00080008;",
                "and.b32 a, a, 0x7FFF7FFF;",
                *(["min.f16x2 a, a, most;"] if scale != "e8m0" else []),
                "shr.u32 c, a, 9;",
                "and.b32 c, c, 0x00010001;",
                "add.u32 a, a, c;",
                "add.u32 a, a, 0x00FF00FF;",
                "shr.u32 a, a, 9;",
                f"lop3.b32 {name}, a, 0x00070007, b, 0xEA;",
            ]
        lines += ["shl.b32 high, high, 4;", f"or.b32 t{i}, low, high;"]
    registers = ".reg .b32 a, b, c, low, high, t0, t1, most, unit;"
    constants = ["mov.b32 most, 0x0E000E00;", "mov.b32 unit, 0x04000400;"]
    low, high = _split(x)
    codes = plt.elementwise_inline_asm(
        "\n".join(["{", registers, *constants, *lines, "prmt.b32 $0, t0, t1, 0x6420;", "}"]),
        args=[low, high, jnp.broadcast_to(inverse[:, None], low.shape)],
        constraints="=&r," + ",".join("r" * 8),
        pack=4,
        # Results are signed integers or floats here.
        result_shape_dtypes=[jax.ShapeDtypeStruct(low.shape, jnp.int8)],
    )[0]
    return lax.bitcast_convert_type(codes, jnp.uint8)


def _power_above(most: jax.Array, limit: float) -> jax.Array:
    """E8M0 byte, as int32, of the smallest power of two p with p · limit ≥ most."""
    bits = lax.bitcast_convert_type(most, jnp.int32)
    mantissa, exponent = math.frexp(limit)
    return (bits >> 23) - (exponent - 1) + ((bits & 0x7FFFFF) > int((2 * mantissa - 1) * 2**23)).astype(jnp.int32)


def _e4m3_bits(x: jax.Array) -> jax.Array:
    """E4M3 byte, as int32, of floats in [2⁻⁹, 448]: to nearest, ties to even."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2⁻⁶ the step is 2⁻⁹, which is the step of float32 at 2¹⁴: the sum rounds, and its last bits count.
    base = 2.0**14
    subnormal = lax.bitcast_convert_type(x + base, jnp.int32) - ((14 + 127) << 23)
    return jnp.where(bits < (127 - 6) << 23, subnormal, normal)


def _e4m3_value(byte: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(byte.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float32)


def _e8m0_value(byte: jax.Array) -> jax.Array:
    byte = byte.astype(jnp.int32)
    return lax.bitcast_convert_type(jnp.where(byte == 0, 1 << 22, byte << 23), jnp.float32)


def _decode(fmt: BlockFormat, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Values ``[threads, 8]`` of payload bytes ``[threads, ...]`` and a scale byte ``[threads]``."""
    step = _e8m0_value(scale) if fmt.scale == "e8m0" else _e4m3_value(scale)
    if fmt.element == "e4m3":
        return _e4m3_value(codes) * step[:, None]
    if interpreted():
        byte = codes.astype(jnp.int32)
        halves = [_e2m1_value(nibble) * step[:, None] for nibble in (byte, byte >> 4)]
    else:
        halves = _unpack_e2m1(codes, step)
    return jnp.stack(halves, axis=-1).reshape(codes.shape[0], -1)


def _unpack_e2m1(codes: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 values of the lower and the upper halves of bytes ``[threads, 4]``, times a step ``[threads]``.

    The three bits of a magnitude choose from a table of eight bytes: bfloat16's upper ones of 0 … 6, and the lower.
    Products are exact: an element has two significant bits, a scale four at most.
    """
    step = jnp.broadcast_to(step.astype(jnp.bfloat16)[:, None], codes.shape)
    tables = ["0x3F3F3F00", "0x40404040", "0xC0800000", "0xC0804000"]
    constants = [f"mov.b32 t{i}, {table};" for i, table in enumerate(tables)]
    halves = []
    # An operation has one result here; the assembler finds what both do. Results are float32: of bfloat16 ones Triton
    # would join pairs of values, not values.
    for pairs in ("0x6240", "0x7351"):
        lines = ["and.b32 x, $4, 0x77777777;", "shl.b32 w, $4, 4;"]
        for i, signs in enumerate(("0x5140", "0x7362")):
            lines += [
                "prmt.b32 y, t0, t1, x;",
                "prmt.b32 z, t2, t3, x;",
                # Signs: four codes in the upper halves of bytes.
                f"prmt.b32 s, w, $4, {signs};",
                "lop3.b32 y, s, 0x80808080, y, 0xEA;",
                f"prmt.b32 z, z, y, {pairs};",
                "mul.rn.bf16x2 z, z, $5;",
                f"shl.b32 ${2 * i}, z, 16;",
                f"and.b32 ${2 * i + 1}, z, 0xFFFF0000;",
                "shr.u32 x, x, 16;",
            ]
        halves += plt.elementwise_inline_asm(
            "\n".join(["{", ".reg .b32 t0, t1, t2, t3, w, x, y, z, s;", *constants, *lines, "}"]),
            args=[codes, step],
            constraints="=&r,=&r,=&r,=&r,r,r,r",
            pack=4,
            result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.float32)],
        )
    return tuple(halves)


def _e2m1_value(code: jax.Array) -> jax.Array:
    """Value of the code in the lowest four bits."""
    size = code & 7
    # From 1.0 (code 2) on a code is exponent and mantissa of a float; below it are 0 and 0.5.
    bits = jnp.where(size >= 2, (size << 22) + (126 << 23), -(size & 1) & (126 << 23))
    return lax.bitcast_convert_type(bits | (code & 8) << 28, jnp.float32)
