"""Paged memory of packed entries on Hopper in Pallas-Triton: encode and write, or read and decode, in one pass.

A program owns a few entries: it looks their pages up, and every value crosses device memory once, packed on one side.
Triton, because entries lie wherever a table says: these are loads and stores by arrays of row numbers.

Bytes are those of :mod:`pallas_kernels.formats` to the bit as XLA compiles it: a quotient by a constant, or by a value
that a block shares, is a product with the rounded reciprocal there. Triton's own division is not exact enough for that,
so reciprocals are written down here.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import interpreted
from pallas_kernels.formats import E2M1_MAX, E4M3_MAX, BlockFormat, Format, Packed

# Values that a program holds: 32 a thread.
_VALUES = 4096


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
    if width < 32 or width > _VALUES or width & (width - 1):
        return f"width {width} is not a power of two in 32 … {_VALUES}"
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
    rows = _rows(batch * group, width)

    def kernel(payload_in, scales_in, table, start_ref, count_ref, values_ref, payload, scales):
        del payload_in, scales_in
        row = pl.program_id(0) * rows + jnp.arange(rows)
        here = row < batch * group
        request = jnp.where(here, row // group, 0)
        offset = row % group
        live = here & (offset < plt.load(count_ref.at[request]))
        page, slot, valid = _locate(table, request, plt.load(start_ref.at[request]) + offset, live, pages, page_entries)

        column = jnp.arange(width)
        x = plt.load(values_ref.at[row[:, None], column[None, :]], mask=valid[:, None], other=0)
        codes, steps = _encode(fmt, x.astype(jnp.float32))
        # Interpreted, a masked store writes back what it read: where nothing is to be written that must be nowhere.
        page = jnp.where(valid, page, pages)
        for leaf, new in ((payload, codes), (scales, steps)):
            at = (page[:, None], slot[:, None], jnp.arange(new.shape[1])[None, :])
            plt.store(leaf.at[at], new, mask=valid[:, None])

    return Packed(
        *pl.pallas_call(
            kernel,
            grid=(pl.cdiv(batch * group, rows),),
            out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in pool],
            input_output_aliases={0: 0, 1: 1},
            compiler_params=plt.CompilerParams(num_warps=4),
            interpret=interpreted(),
            name="paged_append",
        )(*pool, page_table, start, count, lax.stop_gradient(values).reshape(batch * group, width))
    )


def gather(
    pool: Packed, fmt: BlockFormat, page_table: jax.Array, indices: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """See :func:`pallas_kernels.paged_memory.gather`."""
    pages, page_entries = pool.payload.shape[:2]
    width, total = _width(pool, fmt), indices.size
    each = total // indices.shape[0]
    rows = _rows(total, width)
    interpret = interpreted()

    def kernel(payload, scales, table, indices_ref, out):
        row = pl.program_id(0) * rows + jnp.arange(rows)
        here = row < total
        entry = plt.load(indices_ref.at[row], mask=here, other=-1)
        page, slot, valid = _locate(table, jnp.where(here, row // each, 0), entry, here, pages, page_entries)

        def read(leaf, count: int) -> jax.Array:
            at = (page[:, None], slot[:, None], jnp.arange(count)[None, :])
            return plt.load(leaf.at[at], mask=valid[:, None], other=0)

        x = _decode(fmt, read(payload, payload.shape[-1]), read(scales, scales.shape[-1]))
        plt.store(out.at[row[:, None], jnp.arange(width)[None, :]], x.astype(dtype), mask=here[:, None])

    out = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(total, rows),),
        out_shape=jax.ShapeDtypeStruct((total, width), dtype),
        compiler_params=plt.CompilerParams(num_warps=4),
        interpret=interpret,
        name="paged_gather",
    )(*pool, page_table, indices.reshape(-1))
    return out.reshape(*indices.shape, width)


def _rows(total: int, width: int) -> int:
    """Entries of a program: enough for its warps, one where there are few."""
    return min(max(_VALUES // width, 1), pl.next_power_of_2(total))


def _locate(table, request: jax.Array, entry: jax.Array, live: jax.Array, pages: int, page_entries: int):
    """As :func:`~pallas_kernels.paged_memory.addressing.locate`, for a list of entries; invalid unless ``live``."""
    in_table = live & (entry >= 0) & (entry < table.shape[1] * page_entries)
    safe = jnp.where(in_table, entry, 0)
    page = plt.load(table.at[request, safe // page_entries], mask=in_table, other=-1)
    valid = in_table & (page >= 0) & (page < pages)
    return jnp.where(valid, page, 0), safe % page_entries, valid


def _encode(fmt: BlockFormat, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Payload and scale bytes of ``[rows, width]`` float32."""
    rows, width = x.shape
    blocks = x.reshape(rows, width // fmt.block, fmt.block)
    most = jnp.maximum(jnp.max(jnp.abs(blocks), axis=2), fmt.floor)
    limit = E2M1_MAX if fmt.element == "e2m1" else E4M3_MAX
    if fmt.scale == "e8m0":
        scales = _power_above(most, limit)
        inverse = lax.bitcast_convert_type((254 - scales) << 23, jnp.float32)
    else:
        scales = _e4m3_bits(jnp.minimum(most * (1 / limit), E4M3_MAX))
        inverse = _reciprocal(_e4m3_value(scales))
    scaled = jnp.clip(blocks * inverse[:, :, None], -limit, limit)
    return _elements(fmt, scaled).reshape(rows, -1), scales.astype(jnp.uint8)


def _elements(fmt: BlockFormat, x: jax.Array) -> jax.Array:
    """Payload bytes of values within the element's range ``[rows, blocks, block]``."""
    if fmt.element == "e4m3":
        return lax.bitcast_convert_type(x.astype(jnp.float8_e4m3fn), jnp.uint8)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    size = bits & 0x7FFFFFFF
    # As E4M3 below: to nearest even with one bit of mantissa, and by a sum where the step is 0.5 throughout.
    normal = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) - ((127 - 1) << 1)
    small = lax.bitcast_convert_type(jnp.abs(x) + 2.0**22, jnp.int32) & 7
    code = jnp.where(size < 127 << 23, small, normal) | ((bits >> 28) & 8)
    low, high = lax.split(code.reshape(*x.shape[:2], -1, 2), (1, 1), axis=3)
    return (low | high << 4).reshape(*x.shape[:2], -1).astype(jnp.uint8)


def _power_above(most: jax.Array, limit: float) -> jax.Array:
    """E8M0 byte, as int32, of the smallest power of two p with p · limit ≥ most."""
    bits = lax.bitcast_convert_type(most, jnp.int32)
    mantissa, exponent = math.frexp(limit)
    return (bits >> 23) - (exponent - 1) + ((bits & 0x7FFFFF) > int((2 * mantissa - 1) * 2**23)).astype(jnp.int32)


def _reciprocal(x: jax.Array) -> jax.Array:
    """1/x to nearest, for values of E4M3: a table of its eight mantissas, and its exponent turned round."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    eighths = (bits >> 20) & 7
    inverse = jnp.ones_like(x)
    for i in range(1, 8):
        inverse = jnp.where(eighths == i, 8 / (8 + i), inverse)
    return inverse * lax.bitcast_convert_type((254 - (bits >> 23)) << 23, jnp.float32)


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


def _decode(fmt: BlockFormat, payload: jax.Array, scales: jax.Array) -> jax.Array:
    """Values ``[rows, width]`` float32 of payload and scale bytes."""
    rows, count = scales.shape
    step = (_e8m0_value(scales) if fmt.scale == "e8m0" else _e4m3_value(scales))[:, :, None]
    if fmt.element == "e4m3":
        return (_e4m3_value(payload).reshape(rows, count, fmt.block) * step).reshape(rows, -1)
    byte = payload.astype(jnp.int32).reshape(rows, count, fmt.block // 2)
    return jnp.stack([_e2m1_value(byte) * step, _e2m1_value(byte >> 4) * step], axis=-1).reshape(rows, -1)


def _e2m1_value(code: jax.Array) -> jax.Array:
    """Value of the code in the lowest four bits."""
    size = code & 7
    # From 1.0 (code 2) on a code is exponent and mantissa of a float; below it are 0 and 0.5.
    bits = jnp.where(size >= 2, (size << 22) + (126 << 23), -(size & 1) & (126 << 23))
    return lax.bitcast_convert_type(bits | (code & 8) << 28, jnp.float32)
