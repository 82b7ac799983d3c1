"""Index scores on Hopper in Pallas-Triton, for shapes that the Mosaic kernel does not take.

A program unpacks a tile of keys in registers, multiplies it with the heads of one query after another and reduces
over heads where the product lies; scores and the maxima of blocks go to memory, never the heads' products. Keys are
the rows of the product, so that a sum over heads stays within a few threads.

Its dot takes operands by value, so even and odd channels (low and high nibbles) are two products and need no
interleaving.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import interpreted
from pallas_kernels.formats import Packed, e2m1_decode

# Keys of a tile: two row tiles of a warpgroup's matrix instruction.
KEYS = 128
# Tiles of a program: its queries are loaded once for all of them.
_TILES = 8
# Columns of one product: heads of as many queries as fit. 64 and 256 were slower.
COLUMNS = 128
# One warpgroup; 8 warps were slower throughout.
_WARPS = 4
# Keys are unpacked times 2⁻³² and head weights taken times 2³²: this leaves room for the exponents of scales up to
# 2³³ in bfloat16 on the way, and is exact.
_SHIFT = 32


def all_scores(
    queries: jax.Array, weights: jax.Array, pool: Packed, page_table: jax.Array, lengths: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Scores ``[batch, query, capacity]`` and maxima of blocks ``[batch, query, ⌈capacity / size⌉]``.

    What lies beyond a request's longest query is not written.
    """
    batch, total, heads = queries.shape[:3]
    pages, page_entries = pool.payload.shape[:2]
    capacity = page_table.shape[1] * page_entries
    together = math.gcd(total, COLUMNS // heads)
    # With a single product for a tile its keys are copied ahead into shared memory, and threads read two bytes at a
    # time in the matrix unit's order. Otherwise queries are copied ahead, which are larger, and a thread loads 16
    # bytes of keys into registers.
    pack, stages = (2, 3) if together == total else (4, 2)
    even, odd, by_head = _operands(queries, weights, together)
    payload, scales = _rows(pool)
    block_count = pl.cdiv(capacity, size)

    def kernel(even_ref, odd_ref, weight_ref, payload_ref, scale_ref, table_ref, length_ref, needed_ref, out, maxima):
        request, first = pl.program_id(0), pl.program_id(1) * _TILES * KEYS

        def tile(i: jax.Array, _: None) -> None:
            entry = first + i * KEYS + jnp.arange(KEYS)
            low, high, has_page = _keys(payload_ref, scale_ref, table_ref, request, entry, pages, page_entries, pack)

            def some_queries(group: jax.Array, _: None) -> None:
                q_even, q_odd = even_ref[request, group], odd_ref[request, group]
                total = _head_sums(low, high, q_even, q_odd, weight_ref[request, group], together)
                query = group * together + jnp.arange(together)
                live = has_page[:, None] & (entry[:, None] < length_ref[request, query][None])
                total = jnp.where(live, total, -jnp.inf)
                plt.store(out.at[request, query[None], entry[:, None]], total, mask=entry[:, None] < capacity)
                best = jnp.max(total.reshape(KEYS // size, size, together), axis=1)
                block = (first + i * KEYS) // size + jnp.arange(KEYS // size)
                plt.store(maxima.at[request, query[None], block[:, None]], best, mask=block[:, None] < block_count)

            lax.fori_loop(0, queries.shape[1] // together, some_queries, None)

        lax.fori_loop(0, jnp.clip(pl.cdiv(needed_ref[request] - first, KEYS), 0, _TILES), tile, None)

    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((batch, total, capacity), jnp.float32),
            jax.ShapeDtypeStruct((batch, total, block_count), jnp.float32),
        ),
        grid=(batch, pl.cdiv(capacity, _TILES * KEYS)),
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=stages),
        interpret=interpreted(),
        name="index_scores",
    )(even, odd, by_head, payload, scales, page_table, lengths, jnp.max(lengths, axis=1))


def candidate_scores(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    page_table: jax.Array,
    visible: jax.Array,
    ids: jax.Array,
    size: int,
) -> jax.Array:
    """Scores ``[batch, query, blocks · size]`` of the entries of each query's blocks, −inf where there is none."""
    batch, total = queries.shape[:2]
    pages, page_entries = pool.payload.shape[:2]
    table_pages = page_table.shape[1]
    even, odd, by_head = _operands(queries, weights, 1)
    payload, scales = _rows(pool)
    candidates = ids.shape[-1] * size

    def kernel(even_ref, odd_ref, weight_ref, payload_ref, scale_ref, table_ref, visible_ref, ids_ref, out):
        request, query = pl.program_id(0) // total, pl.program_id(0) % total
        at = pl.program_id(1) * KEYS + jnp.arange(KEYS)
        block = plt.load(ids_ref.at[request, query, at // size], mask=at < candidates, other=-1)
        # Compared before it is multiplied: any block number may stand there.
        inside = (block >= 0) & (block < pl.cdiv(table_pages * page_entries, size))
        entry = jnp.where(inside, block * size + at % size, -1)
        low, high, has_page = _keys(payload_ref, scale_ref, table_ref, request, entry, pages, page_entries, pack=4)
        score = _head_sums(low, high, even_ref[request, query], odd_ref[request, query], weight_ref[request, query], 1)
        live = has_page & (entry < visible_ref[request, query])
        score = jnp.where(live[:, None], score, -jnp.inf)
        plt.store(out.at[request, query, at[:, None] + jnp.arange(1)], score, mask=at[:, None] < candidates)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch, total, candidates), jnp.float32),
        grid=(batch * total, pl.cdiv(candidates, KEYS)),
        compiler_params=plt.CompilerParams(num_warps=_WARPS),
        interpret=interpreted(),
        name="indexcandidate_scores",
    )(even, odd, by_head, payload, scales, page_table, visible, ids)


def _operands(queries: jax.Array, weights: jax.Array, together: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Even and odd channels ``[batch, group, width / 2, together · heads]`` and head weights of groups of queries."""
    batch, total, heads, width = queries.shape
    columns = queries.reshape(batch, total // together, together * heads, width // 2, 2)
    even, odd = (jnp.swapaxes(columns[..., i], -1, -2) for i in range(2))
    weights = weights.astype(jnp.float32) * 2.0**_SHIFT
    return even, odd, weights.reshape(batch, total // together, together * heads)


def _rows(pool: Packed) -> tuple[jax.Array, jax.Array]:
    """Payload ``[entries of the pool, blocks of 32 channels, 16]`` and scales ``[entries, blocks]``."""
    blocks = pool.scales.shape[-1]
    return pool.payload.reshape(-1, blocks, 16), pool.scales.reshape(-1, blocks)


def _keys(
    payload_ref,
    scale_ref,
    table_ref,
    request: jax.Array,
    entry: jax.Array,
    pages: int,
    page_entries: int,
    pack: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Even and odd channels of some entries' keys times 2⁻³², bfloat16 ``[entries, width / 2]``; whether they exist."""
    in_table = (entry >= 0) & (entry < table_ref.shape[1] * page_entries)
    page = plt.load(table_ref.at[request, entry // page_entries], mask=in_table, other=-1)
    has_page = in_table & (page >= 0) & (page < pages)
    row = jnp.where(has_page, page * page_entries + entry % page_entries, 0)
    low, high = _unpack(payload_ref[row], scale_ref[row], pack)
    flat = (low.shape[0], low.shape[1] * low.shape[2])
    return low.reshape(flat), high.reshape(flat), has_page


def _head_sums(
    low: jax.Array, high: jax.Array, even: jax.Array, odd: jax.Array, weights: jax.Array, together: int
) -> jax.Array:
    """Σ_h weights_h · relu(key · query_h), ``[keys, together]``."""
    products = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    positive = jnp.maximum(products(low, even) + products(high, odd), 0) * weights[None]
    return jnp.sum(positive.reshape(positive.shape[0], together, -1), axis=2)


# Two bytes to the values of two of their nibbles. A byte goes into 16 bits of its own; one product moves the nibble's
# sign to bit 15 and its magnitude to bits 8..6. That is, as bfloat16, its value times 2⁻¹²⁶ (subnormal or not), which a
# product with a power of two brings into range exactly.
_TWO = """
prmt.b32 x, bytes, 0, {select};
and.b32 x, x, {nibble};
mul.lo.u32 x, x, {places};
and.b32 x, x, 0x81C081C0;
mul.rn.bf16x2 {out}, x, {step};
"""
_LOW, _HIGH = ({"nibble": "0x000F000F", "places": "0x1040"}, {"nibble": "0x00F000F0", "places": "0x0104"})


def _assembly(nibbles: dict[str, str], pack: int) -> str:
    """PTX that unpacks 2 or 4 bytes."""
    first = {"select": "0x4140", "out": "$0"}
    if pack == 2:
        return "{ .reg .b32 x, bytes; cvt.u32.u16 bytes, $1;" + _TWO.format(step="$2", **first, **nibbles) + "}"
    second = {"select": "0x4342", "out": "$1"}
    both = _TWO.format(step="$3", **first, **nibbles) + _TWO.format(step="$4", **second, **nibbles)
    return "{ .reg .b32 x, bytes; mov.b32 bytes, $2;" + both + "}"


def _unpack(payload: jax.Array, scales: jax.Array, pack: int) -> tuple[jax.Array, jax.Array]:
    """Values times 2⁻³² of low and of high nibbles ``[keys, blocks, 16]``, bfloat16.

    ``pack`` is how many bytes one piece of assembly takes, 2 or 4: what a thread has side by side is best.
    """
    exponent = scales.astype(jnp.int32)
    if interpreted():
        step = lax.bitcast_convert_type(jnp.maximum(exponent - _SHIFT, 0) << 23, jnp.float32)[..., None]
        return tuple((e2m1_decode(code) * step).astype(jnp.bfloat16) for code in (payload & 15, payload >> 4))
    # 2^(exponent - 127 - 32 + 126) as bfloat16.
    field = jnp.minimum(exponent + (126 - _SHIFT), 254) << 7
    step = lax.bitcast_convert_type(field.astype(jnp.int16), jnp.bfloat16)
    step = jnp.broadcast_to(step[..., None], payload.shape)
    return tuple(
        plt.elementwise_inline_asm(
            _assembly(nibbles, pack),
            args=[payload, step],
            # Of two results the first is written before all inputs are read.
            constraints="=r,h,r" if pack == 2 else "=&r,=&r,r,r,r",
            pack=pack,
            result_shape_dtypes=[jax.ShapeDtypeStruct(payload.shape, jnp.bfloat16)],
        )[0]
        for nibbles in (_LOW, _HIGH)
    )
