"""Index selection on Hopper in Pallas-Triton: packed keys to scores in one kernel, then the top-k kernels.

A program unpacks a tile of keys in registers, multiplies it with the heads of one query after another and reduces
over heads where the product lies; scores and the maxima of blocks go to memory, never the heads' products. Keys are
the rows of the product, so that a sum over heads stays within a few threads.

Triton, because keys are loaded through the page table, by row number, and unpacked in registers that feed the matrix
unit. Its dot takes operands by value, so even and odd channels (low and high nibbles) are two products and need no
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

from pallas_kernels import tiling
from pallas_kernels.backend import interpreted
from pallas_kernels.formats import FP4_E8M0, Format, Packed, e2m1_decode
from pallas_kernels.index_select.types import BlockSelection, Selection
from pallas_kernels.tiling import map_query_tiles
from pallas_kernels.top_k.gpu import select_rows
from pallas_kernels.top_k.gpu import unsupported as top_k_unsupported

# Keys of a tile: two row tiles of a warpgroup's matrix instruction.
_KEYS = 128
# Tiles of a program: its queries are loaded once for all of them.
_TILES = 8
# Columns of one product: heads of as many queries as fit. 64 and 256 were slower.
_COLUMNS = 128
# One warpgroup; 8 warps were slower throughout.
_WARPS = 4
# Keys are unpacked times 2⁻³² and head weights taken times 2³²: this leaves room for the exponents of scales up to
# 2³³ in bfloat16 on the way, and is exact.
_SHIFT = 32
# Queries of a tile are a multiple of this where several fit.
_TOGETHER = 4
# Block maxima without a block selection serve the top-k alone.
_GROUP = 8


def index_select(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    top_k: int,
    blocks: BlockSelection | None = None,
) -> Selection:
    """See :func:`pallas_kernels.index_select.index_select`."""
    batch, total = queries.shape[:2]
    page_entries, table_pages = pool.payload.shape[1], page_table.shape[1]
    capacity = table_pages * page_entries
    size = _GROUP if blocks is None else blocks.size
    query_tile = _query_tile(total, batch * (capacity + capacity // size) * 4)

    def one_tile(first: int, queries: jax.Array, weights: jax.Array, visible: jax.Array) -> Selection:
        shape = visible.shape
        lengths = jnp.clip(visible, 0, capacity)
        scores, maxima = _all_scores(queries, weights, pool, page_table, lengths, size)
        rows, best = scores.reshape(-1, scores.shape[-1]), maxima.reshape(-1, maxima.shape[-1])
        lengths = lengths.reshape(-1)
        shared = (best, size) if size > 1 else None
        values, indices = select_rows(rows, lengths, top_k, shared)
        indices = jnp.where(values == -jnp.inf, -1, indices).reshape(*shape, top_k)
        if blocks is None:
            return Selection(indices, None)
        count, chosen = pl.cdiv(lengths, size), blocks.chosen(capacity)
        values, ids = select_rows(best, count, chosen, pinned=count - 1)
        return Selection(indices, jnp.where(values == -jnp.inf, -1, ids).reshape(*shape, chosen))

    return map_query_tiles(one_tile, query_tile, (queries, weights, visible))


def index_reselect(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    block_ids: jax.Array,
    block_size: int,
    top_k: int,
) -> jax.Array:
    """See :func:`pallas_kernels.index_select.index_reselect`."""
    batch, total = queries.shape[:2]
    candidates = block_ids.shape[-1] * block_size
    query_tile = _query_tile(total, batch * candidates * 4)

    def one_tile(first: int, queries: jax.Array, weights: jax.Array, visible: jax.Array, ids: jax.Array) -> jax.Array:
        # In order of entries a position's order is an entry's, which is what decides ties.
        ids = jnp.sort(jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids), axis=-1)
        ids = jnp.where(ids == jnp.iinfo(jnp.int32).max, -1, ids)
        scores = _candidate_scores(queries, weights, pool, page_table, visible, ids, block_size)
        rows = scores.reshape(-1, candidates)
        values, at = select_rows(rows, jnp.full(rows.shape[0], candidates, jnp.int32), top_k)
        values, at = (x.reshape(*visible.shape, top_k) for x in (values, at))
        at = jnp.maximum(at, 0)
        chosen = jnp.take_along_axis(ids, at // block_size, axis=-1) * block_size + at % block_size
        return jnp.where(values == -jnp.inf, -1, chosen)

    return map_query_tiles(one_tile, query_tile, (queries, weights, visible, block_ids))


def index_select_unsupported(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    top_k: int,
    blocks: BlockSelection | None = None,
) -> str | None:
    """Why the kernels do not run these arguments; None if they do."""
    capacity = page_table.shape[1] * pool.payload.shape[1]
    reason = _unsupported(queries, pool, fmt, page_table) or _top_k_unsupported(capacity, top_k)
    if reason is None and blocks is not None:
        reason = _block_unsupported(blocks.size) or _top_k_unsupported(capacity, blocks.chosen(capacity))
    return reason


def index_reselect_unsupported(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    block_ids: jax.Array,
    block_size: int,
    top_k: int,
) -> str | None:
    """Why the kernels do not run these arguments; None if they do."""
    candidates = block_ids.shape[-1] * block_size
    return (
        _unsupported(queries, pool, fmt, page_table)
        or _block_unsupported(block_size)
        or _top_k_unsupported(candidates, top_k)
    )


def _unsupported(queries: jax.Array, pool: Packed, fmt: Format, page_table: jax.Array) -> str | None:
    heads, width = queries.shape[2:]
    if fmt != FP4_E8M0:
        return f"keys are {fmt}, not FP4_E8M0"
    if queries.dtype != jnp.bfloat16:
        return f"queries are {queries.dtype}, not bfloat16"
    if width % 32 or width != pl.next_power_of_2(width):
        return f"width {width} is not a power of two from 32 up"
    if not 16 <= heads <= _COLUMNS or heads != pl.next_power_of_2(heads):
        return f"{heads} heads are not a power of two from 16 to {_COLUMNS}"
    if 0 in (queries.size, page_table.size, pool.payload.size):
        return "an array is empty"
    # Triton's offsets are signed 32-bit numbers up to arrays of 2³² bytes.
    if 2**31 < pool.payload.size <= 2**32:
        return f"the pool has {pool.payload.size} bytes, between 2³¹ and 2³²"
    return None


def _top_k_unsupported(n: int, k: int) -> str | None:
    return top_k_unsupported(jax.ShapeDtypeStruct((n,), jnp.float32), k)


def _block_unsupported(size: int) -> str | None:
    if size > _KEYS or size != pl.next_power_of_2(size):
        return f"block size {size} is not a power of two up to {_KEYS}"
    return None


def _query_tile(total: int, query_bytes: int) -> int:
    """Queries of a tile: as many as the budget allows, since the selection wants rows for all processors."""
    most = max(tiling.TEMPORARY_BYTES // query_bytes, 1)
    tiles = pl.cdiv(total, most)
    tile = pl.cdiv(total, tiles)
    # A multiple of a few, so that several queries share a product.
    few = min(_TOGETHER, most)
    return tile if tiles == 1 else min(pl.cdiv(tile, few) * few, most // few * few)


def _all_scores(
    queries: jax.Array, weights: jax.Array, pool: Packed, page_table: jax.Array, lengths: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """Scores ``[batch, query, capacity]`` and maxima of blocks ``[batch, query, ⌈capacity / size⌉]``.

    What lies beyond a request's longest query is not written.
    """
    batch, total, heads = queries.shape[:3]
    pages, page_entries = pool.payload.shape[:2]
    capacity = page_table.shape[1] * page_entries
    together = math.gcd(total, _COLUMNS // heads)
    # With a single product for a tile its keys are copied ahead into shared memory, and threads read two bytes at a
    # time in the matrix unit's order. Otherwise queries are copied ahead, which are larger, and a thread loads 16
    # bytes of keys into registers.
    pack, stages = (2, 3) if together == total else (4, 2)
    even, odd, by_head = _operands(queries, weights, together)
    payload, scales = _rows(pool)
    block_count = pl.cdiv(capacity, size)

    def kernel(even_ref, odd_ref, weight_ref, payload_ref, scale_ref, table_ref, length_ref, needed_ref, out, maxima):
        request, first = pl.program_id(0), pl.program_id(1) * _TILES * _KEYS

        def tile(i: jax.Array, _: None) -> None:
            entry = first + i * _KEYS + jnp.arange(_KEYS)
            low, high, has_page = _keys(payload_ref, scale_ref, table_ref, request, entry, pages, page_entries, pack)

            def some_queries(group: jax.Array, _: None) -> None:
                q_even, q_odd = even_ref[request, group], odd_ref[request, group]
                total = _head_sums(low, high, q_even, q_odd, weight_ref[request, group], together)
                query = group * together + jnp.arange(together)
                live = has_page[:, None] & (entry[:, None] < length_ref[request, query][None])
                total = jnp.where(live, total, -jnp.inf)
                plt.store(out.at[request, query[None], entry[:, None]], total, mask=entry[:, None] < capacity)
                best = jnp.max(total.reshape(_KEYS // size, size, together), axis=1)
                block = (first + i * _KEYS) // size + jnp.arange(_KEYS // size)
                plt.store(maxima.at[request, query[None], block[:, None]], best, mask=block[:, None] < block_count)

            lax.fori_loop(0, queries.shape[1] // together, some_queries, None)

        lax.fori_loop(0, jnp.clip(pl.cdiv(needed_ref[request] - first, _KEYS), 0, _TILES), tile, None)

    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((batch, total, capacity), jnp.float32),
            jax.ShapeDtypeStruct((batch, total, block_count), jnp.float32),
        ),
        grid=(batch, pl.cdiv(capacity, _TILES * _KEYS)),
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=stages),
        interpret=interpreted(),
        name="index_scores",
    )(even, odd, by_head, payload, scales, page_table, lengths, jnp.max(lengths, axis=1))


def _candidate_scores(
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
        at = pl.program_id(1) * _KEYS + jnp.arange(_KEYS)
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
        grid=(batch * total, pl.cdiv(candidates, _KEYS)),
        compiler_params=plt.CompilerParams(num_warps=_WARPS),
        interpret=interpreted(),
        name="index_candidate_scores",
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
