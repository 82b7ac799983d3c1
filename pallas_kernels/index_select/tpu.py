"""Index selection on a TPU: a kernel scores pages of packed keys, the exact top-k chooses.

Keys are fetched page by page through a page table in SMEM, decoded in VMEM in 32-bit lanes (even channels first, as the
queries come too), multiplied with all heads of several queries at once, and summed over heads before anything is
stored. Pages beyond the last visible entry are neither fetched nor scored. Queries are tiled so that their scores stay
within the temporaries' budget.

Candidate blocks are gathered, still packed, by XLA: every query has its own, and a kernel scores them query by query.

Index keys are narrower than 128 bytes, so that XLA stores a pool with its pages as last axis; a call turns it over once
(a copy of the packed keys, padded to 128 lanes). VMEM asked for at 32 heads of 128: 28 MiB.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import backend
from pallas_kernels.formats import BlockFormat, Format, Packed
from pallas_kernels.index_select.types import BlockSelection, Selection
from pallas_kernels.index_select.xla import choose_blocks, optional, with_something_visible
from pallas_kernels.paged_memory.addressing import locate
from pallas_kernels.products import operand_dtype
from pallas_kernels.tiling import largest_tile, map_query_tiles, pad_axis
from pallas_kernels.top_k import top_k as exact_top_k
from pallas_kernels.tpu import unpack

SUBLANES = 8
# Pages of one step: 1024 entries of the usual 64, so that a step's own overhead is small.
_PAGES = 16
# Candidates of one step.
_CANDIDATES = 1024
# Scores of all heads that one step holds.
_HEAD_SCORES = 2**20
# Page table slots that SMEM takes beside everything else.
_TABLE_SLOTS = 2**17
# Integers below it are exact in float32.
_EXACT_INTEGERS = 2**24


def index_select_unsupported(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    top_k: int,
    blocks: BlockSelection | None = None,
    first: jax.Array | None = None,
) -> str | None:
    """Why these arguments are not for this kernel; None if they are."""
    if page_table.size > _TABLE_SLOTS:
        return f"a page table of {page_table.size} slots is more than {_TABLE_SLOTS}"
    if pool.payload.shape[1] % 32:
        return f"pages of {pool.payload.shape[1]} entries are no whole tiles"
    return _unsupported(queries, pool, fmt)


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
    first: jax.Array | None = None,
) -> str | None:
    """Why these arguments are not for this kernel; None if they are."""
    if page_table.shape[1] * pool.payload.shape[1] > _EXACT_INTEGERS:
        return f"{page_table.shape[1]} pages a request are more entries than {_EXACT_INTEGERS}"
    return _unsupported(queries, pool, fmt)


def _unsupported(queries: jax.Array, pool: Packed, fmt: Format) -> str | None:
    if isinstance(fmt, BlockFormat) and (fmt.element, fmt.scale) != ("e2m1", "e8m0"):
        return f"keys are {fmt.element} with {fmt.scale} scales"
    if queries.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries are {queries.dtype}"
    if pool.payload.dtype not in (jnp.uint8, jnp.float32, jnp.bfloat16):
        return f"the pool is {pool.payload.dtype}"
    if queries.shape[2] % SUBLANES:
        return f"{queries.shape[2]} heads are no whole tiles"
    if queries.shape[3] % 128:
        return f"keys of {queries.shape[3]} channels are no whole tiles"
    return None


def index_select(
    queries: jax.Array,
    weights: jax.Array,
    pool: Packed,
    fmt: Format,
    page_table: jax.Array,
    visible: jax.Array,
    top_k: int,
    blocks: BlockSelection | None = None,
    first: jax.Array | None = None,
) -> Selection:
    """See :func:`pallas_kernels.index_select.index_select`."""
    batch, total = visible.shape
    capacity = page_table.shape[1] * pool.payload.shape[1]
    tile = largest_tile(total, lambda queries: batch * queries * capacity * 4)

    def one_tile(
        _, queries: jax.Array, weights: jax.Array, visible: jax.Array, first: jax.Array | None = None
    ) -> Selection:
        scores = _page_scores(queries, weights, pool, fmt, page_table, visible)
        if first is not None:
            scores = jnp.where(jnp.arange(scores.shape[-1], dtype=jnp.int32) >= first[..., None], scores, -jnp.inf)
        values, indices = exact_top_k(scores, top_k)
        shown = with_something_visible(visible, capacity, first)
        chosen = () if blocks is None else choose_blocks(scores[..., :capacity], shown, blocks)
        return Selection(jnp.where(values == -jnp.inf, -1, indices), values, *chosen)

    return map_query_tiles(one_tile, tile, (queries, weights, visible, *optional(first)))


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
    first: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.index_select.index_reselect`."""
    batch, total = visible.shape
    candidates = block_ids.shape[-1] * block_size
    # A row of packed bytes is padded to 128 lanes.
    tile = largest_tile(total, lambda queries: batch * queries * candidates * max(pool.payload.shape[-1], 128))

    def one_tile(
        _, queries: jax.Array, weights: jax.Array, visible: jax.Array, ids: jax.Array, first: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        # In order of entries a position's order is an entry's, which is what decides ties.
        # The top-k sorts them: numbers of blocks are exact in float32, and XLA's sort is slow to compile.
        order = exact_top_k(jnp.where(ids < 0, -jnp.inf, -ids.astype(jnp.float32)), ids.shape[-1])[0]
        absent = order == -jnp.inf
        entries = jnp.where(absent, 0, -order).astype(jnp.int32)[..., None] * block_size + jnp.arange(
            block_size, dtype=jnp.int32
        )
        entries = jnp.where(absent[..., None], -1, entries).reshape(*visible.shape, candidates)
        entries = pad_axis(entries, 2, -candidates % 128, -1)
        page, slot, has_page = locate(page_table, entries, *pool.payload.shape[:2])
        keys = _gathered(pool, page, slot, block_size)
        live = has_page & (entries < visible[..., None])
        if first is not None:
            live &= entries >= first[..., None]
        values, positions = exact_top_k(_own_scores(queries, weights, keys, fmt, live), top_k)
        chosen = jnp.take_along_axis(entries, jnp.maximum(positions, 0), axis=-1)
        return jnp.where(values == -jnp.inf, -1, chosen), values

    return map_query_tiles(one_tile, tile, (queries, weights, visible, block_ids, *optional(first)))


def _gathered(pool: Packed, page: jax.Array, slot: jax.Array, block_size: int) -> Packed:
    """Packed entries ``[batch, query, candidates, width']``; whole blocks at once where no page cuts one."""
    size = block_size if pool.payload.shape[1] % block_size == 0 and page.shape[-1] % block_size == 0 else 1

    def gather(leaf: jax.Array) -> jax.Array:
        cut = leaf.reshape(leaf.shape[0], leaf.shape[1] // size, size, leaf.shape[2])
        return cut[page[..., ::size], slot[..., ::size] // size].reshape(*page.shape, leaf.shape[2])

    return pool.map(gather)


def _split(queries: jax.Array, fmt: Format) -> jax.Array:
    """Channels in the order of decoded keys: even ones first if they are packed."""
    if not isinstance(fmt, BlockFormat):
        return queries
    return jnp.concatenate([queries[..., 0::2], queries[..., 1::2]], axis=-1)


def _page_scores(
    queries: jax.Array, weights: jax.Array, pool: Packed, fmt: Format, page_table: jax.Array, visible: jax.Array
) -> jax.Array:
    """Scores ``[batch, query, capacity up to a whole step]``, −inf where an entry is not visible."""
    batch, total, heads, width = queries.shape
    pages, page_entries = pool.payload.shape[:2]
    dtype = operand_dtype(queries.dtype, fmt)
    count = min(_PAGES, page_table.shape[1])
    table = pad_axis(page_table, 1, -page_table.shape[1] % count, -1)
    steps, entries = table.shape[1] // count, count * page_entries
    tile = max(_HEAD_SCORES // (heads * entries) // SUBLANES * SUBLANES, SUBLANES)
    tile = total if total <= tile else tile
    padding = -total % tile
    queries = pad_axis(_split(queries, fmt).astype(dtype), 1, padding)
    weights = pad_axis(weights.astype(jnp.float32), 1, padding)
    visible = pad_axis(visible, 1, padding)
    tiles = (total + padding) // tile
    # Steps that some query of a tile sees.
    needed = -(-jnp.max(visible.reshape(batch, tiles, tile), axis=-1) // entries)
    needed = jnp.clip(needed, 0, steps).astype(jnp.int32)

    def page(i: int):
        def index(b, t, s, table, needed):
            step = jnp.minimum(s, jnp.maximum(needed[b, t] - 1, 0))
            number = table[b, step * count + i]
            return jnp.where((number >= 0) & (number < pages), number, 0), 0, 0

        return index

    leaves = [leaf for leaf in pool if leaf is not None]
    specs = [pl.BlockSpec((None, page_entries, leaf.shape[2]), page(i)) for leaf in leaves for i in range(count)]
    rows = tile * heads
    vmem = 4 * (4 * rows * entries + 8 * entries * width + 4 * rows * (width + 128)) + 4 * 2**20
    scores = pl.pallas_call(
        functools.partial(_page_kernel, fmt=fmt, count=count, pages=pages),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, tiles, steps),
            in_specs=[
                pl.BlockSpec((None, rows, width), lambda b, t, s, *_: (b, t, 0)),
                pl.BlockSpec((None, rows, 1), lambda b, t, s, *_: (b, t, 0)),
                pl.BlockSpec((None, tile, 1), lambda b, t, s, *_: (b, t, 0)),
                *specs,
            ],
            out_specs=pl.BlockSpec((None, tile, entries), lambda b, t, s, *_: (b, t, s)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, total + padding, steps * entries), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem
        ),
        interpret=backend.interpreted(),
        name="index_scores",
    )(
        table,
        needed,
        queries.reshape(batch, -1, width),
        weights.reshape(batch, -1, 1),
        visible[..., None],
        *(leaf for leaf in leaves for _ in range(count)),
    )
    return scores[:, :total]


def _page_kernel(table, needed, queries, weights, visible, *refs, fmt: Format, count: int, pages: int):
    *stored, out = refs
    b, t, s = (pl.program_id(i) for i in range(3))
    is_needed = s < needed[b, t]

    @pl.when(jnp.logical_not(is_needed))
    def _():
        out[...] = jnp.full(out.shape, -jnp.inf, jnp.float32)

    @pl.when(is_needed)
    def _():
        payload = jnp.concatenate([_lanes(ref[...]) for ref in stored[:count]], axis=0)
        scales = jnp.concatenate([_lanes(ref[...]) for ref in stored[count:]], axis=0) if stored[count:] else None
        keys = _decode(payload, scales, fmt).astype(queries.dtype)
        total = _over_heads(queries[...], weights[...], keys, out.shape[0])
        here = lax.broadcasted_iota(jnp.int32, (1, out.shape[1]), 1)
        page_entries = out.shape[1] // count
        has_page = jnp.zeros(here.shape, jnp.int32)
        for i in range(count):
            number = table[b, s * count + i]
            is_page = ((number >= 0) & (number < pages)).astype(jnp.int32)
            inside = (here >= i * page_entries) & (here < (i + 1) * page_entries)
            has_page = jnp.where(inside, is_page, has_page)
        live = (has_page > 0) & (s * out.shape[1] + here < visible[...])
        out[...] = jnp.where(live, total, -jnp.inf)


def _own_scores(queries: jax.Array, weights: jax.Array, keys: Packed, fmt: Format, live: jax.Array) -> jax.Array:
    """Scores ``[batch, query, candidates]`` of keys that every query has for itself, −inf where not ``live``."""
    batch, total, heads, width = queries.shape
    candidates = live.shape[-1]
    dtype = operand_dtype(queries.dtype, fmt)
    step = next((n for n in range(_CANDIDATES, 0, -128) if candidates % n == 0), candidates)
    rows = batch * total

    def own(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda i, s: (i, 0, 0))

    leaves = [leaf.reshape(rows, candidates, -1) for leaf in keys if leaf is not None]
    vmem = 4 * (4 * heads * step + 12 * step * width) + 4 * 2**20
    scores = pl.pallas_call(
        functools.partial(_own_kernel, fmt=fmt),
        grid=(rows, candidates // step),
        in_specs=[
            own(heads, width),
            own(heads, 1),
            pl.BlockSpec((None, 1, step), lambda i, s: (i, 0, s)),
            *(pl.BlockSpec((None, step, leaf.shape[2]), lambda i, s: (i, s, 0)) for leaf in leaves),
        ],
        out_specs=pl.BlockSpec((None, 1, step), lambda i, s: (i, 0, s)),
        out_shape=jax.ShapeDtypeStruct((rows, 1, candidates), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=vmem),
        interpret=backend.interpreted(),
        name="index_candidate_scores",
    )(
        _split(queries, fmt).astype(dtype).reshape(rows, heads, width),
        weights.astype(jnp.float32).reshape(rows, heads, 1),
        live.astype(jnp.int32).reshape(rows, 1, candidates),
        *leaves,
    )
    return scores.reshape(batch, total, candidates)


def _own_kernel(queries, weights, live, payload, *refs, fmt: Format):
    *scales, out = refs
    keys = _decode(_lanes(payload[...]), _lanes(scales[0][...]) if scales else None, fmt).astype(queries.dtype)
    total = _over_heads(queries[...], weights[...], keys, 1)
    out[...] = jnp.where(live[...] > 0, total, -jnp.inf)


def _lanes(x: jax.Array) -> jax.Array:
    """Bytes in 32-bit lanes; floats as they are."""
    return x.astype(jnp.int32) if x.dtype == jnp.uint8 else x


def _decode(payload: jax.Array, scales: jax.Array | None, fmt: Format) -> jax.Array:
    """Keys ``[entries, width]``; even channels first if they are packed."""
    if scales is None:
        return payload
    steps = unpack.e8m0(scales) * 0.5
    column = lax.broadcasted_iota(jnp.int32, payload.shape, 1)
    spread = jnp.broadcast_to(steps[:, :1], payload.shape)
    for i in range(1, scales.shape[1]):
        spread = jnp.where(column >= i * fmt.block // 2, steps[:, i : i + 1], spread)
    return jnp.concatenate([unpack.e2m1_doubled(codes) * spread for codes in (payload, payload >> 4)], axis=1)


def _over_heads(queries: jax.Array, weights: jax.Array, keys: jax.Array, count: int) -> jax.Array:
    """Σ over heads of weight · relu(query · key), ``[count, entries]``, for queries ``[count · heads, width]``."""
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else lax.Precision.DEFAULT
    products = lax.dot_general(
        queries, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    weighted = jnp.maximum(products, 0) * weights
    return jnp.sum(weighted.reshape(count, -1, keys.shape[0]), axis=1)
