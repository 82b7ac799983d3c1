"""Sparse attention on TPUs (Pallas, TensorCore): entries are fetched and decoded in VMEM, never in HBM.

A program takes a few queries one after another. The chosen entries of the next query are on their way, one copy each,
while those of this one are decoded; all logits of a query are in VMEM at once, so that there is one plain softmax.
The window's entries are few and shared by neighbouring queries: XLA decodes them, and a program reads a band.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backend import interpreted
from pallas_kernels.formats import Format, Packed
from pallas_kernels.products import narrow, operand_dtype
from pallas_kernels.sparse_attention import xla
from pallas_kernels.sparse_attention.partial import SINK_MARGIN, Partial, finite_top
from pallas_kernels.tiling import pad_axis
from pallas_kernels.tpu import pool as paged
from pallas_kernels.tpu.pool import TILE, Reader, Words

# Queries of a program. The first one's fetch is not hidden, so more are better; they and their outputs are in VMEM
# twice, and at 64 heads of 512 bfloat16 values each is 64 KiB.
_QUERIES = 16
# Values of a row of a register: a narrower last axis takes no less.
_LANES = 128
# Rows of a tile of 16-bit values.
_BAND_ROWS = 16
# The smallest VMEM of the supported chips is 64 MiB; the compiler's own default limit is 16. With 64 heads of 512
# values and 512 chosen entries a program is estimated at 17 MiB for long prompts, at 25 for 16 requests of one query.
_VMEM_BYTES = 48 * 2**20


class _Static(NamedTuple):
    """What the derivative must know of the call: its rule is traced later, where other contexts may hold."""

    local_fmt: Format
    pool_fmt: Format
    window: int
    scale: float
    probability_dtype: jnp.dtype
    return_partial: bool
    interpret: bool

    def options(self) -> dict:
        return {k: v for k, v in self._asdict().items() if k != "interpret"}


def unsupported(
    queries: jax.Array,
    local: Packed,
    local_fmt: Format,
    local_valid: jax.Array,
    pool: Packed | None,
    pool_fmt: Format,
    page_table: jax.Array | None,
    indices: jax.Array | None,
    sink: jax.Array,
    rotation: jax.Array | None = None,
    reach: jax.Array | None = None,
    *,
    window: int,
    scale: float,
    probability_dtype: jnp.dtype,
    return_partial: bool = False,
) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    del local, local_fmt, local_valid, page_table, sink, reach, scale, probability_dtype
    batch, total, heads, width = queries.shape
    if queries.dtype not in (jnp.bfloat16, jnp.float32):
        return f"queries are {queries.dtype}"
    if width % 128 or (pool is not None and paged.is_split(pool_fmt) and width % 256):
        return f"head_dim {width} is not a multiple of {128 if pool is None else 256}"
    if heads % 8:
        return f"{heads} heads are not a multiple of 8"
    need = _vmem_bytes(
        _tile(batch, total),
        queries,
        window,
        rotation is not None,
        pool,
        pool_fmt,
        0 if pool is None else indices.shape[-1],
        return_partial,
    )
    if need > _VMEM_BYTES:
        return f"a program needs {need >> 20} MiB of VMEM, more than {_VMEM_BYTES >> 20}"
    return None if pool is None else paged.unsupported(pool, pool_fmt, width)


class _Tile(NamedTuple):
    """What a program takes: all queries of some requests, or some queries of one."""

    requests: int
    queries: int


def _tile(batch: int, total: int) -> _Tile:
    if total >= _QUERIES:
        return _Tile(1, _QUERIES)
    return _Tile(max(n for n in range(1, batch + 1) if batch % n == 0 and n * total <= _QUERIES), total)


def _band(window: int, total: int, tile: _Tile, rotated: bool) -> int:
    """Local entries that a request's part of a program sees, in whole tiles."""
    return -(-(window + (total if rotated else tile.queries)) // _BAND_ROWS) * _BAND_ROWS


def _vmem_bytes(
    tile: _Tile,
    queries: jax.Array,
    window: int,
    rotated: bool,
    pool: Packed | None,
    pool_fmt: Format,
    chosen: int,
    return_partial: bool,
) -> int:
    """Upper estimate of a program's VMEM: blocks twice (one in use, one under way), scratch and temporaries."""
    _, total, heads, width = queries.shape
    band = _band(window, total, tile, rotated)
    chosen = -(-chosen // TILE) * TILE
    blocks = tile.requests * width * 4 * (2 * tile.queries * heads + band)
    blocks += tile.requests * tile.queries * heads * _LANES * 4 if return_partial else 0
    fetched = 0 if pool is None else Reader.of(pool, pool_fmt, width).buffer_bytes(chosen)
    return 2 * blocks + fetched + 4 * chosen * width + 4 * TILE * width * 4 + 4 * 4 * heads * (band + chosen + width)


def sparse_attention(
    queries: jax.Array,
    local: Packed,
    local_fmt: Format,
    local_valid: jax.Array,
    pool: Packed | None,
    pool_fmt: Format,
    page_table: jax.Array | None,
    indices: jax.Array | None,
    sink: jax.Array,
    rotation: jax.Array | None = None,
    reach: jax.Array | None = None,
    *,
    window: int,
    scale: float,
    probability_dtype: jnp.dtype,
    return_partial: bool = False,
) -> jax.Array | Partial:
    """See :func:`pallas_kernels.sparse_attention.sparse_attention`; its derivatives are XLA's."""
    static = _Static(local_fmt, pool_fmt, window, scale, jnp.dtype(probability_dtype), return_partial, interpreted())
    return _attend(static, queries, local, local_valid, pool, page_table, indices, sink, rotation, reach)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, queries, local, local_valid, pool, page_table, indices, sink, rotation, reach):
    batch, total, heads, width = queries.shape
    tile = _tile(batch, total)
    surplus = -total % tile.queries
    tiles = (total + surplus) // tile.queries
    bands, ahead = _bands(
        static, local, local_valid, rotation, tile, tiles, operand_dtype(queries.dtype, static.local_fmt)
    )
    split = pool is not None and paged.is_split(static.pool_fmt)
    x = pad_axis(queries, 1, surplus)
    if split:
        x, bands = paged.split_channels(x), paged.split_channels(bands)
    steps = tile.requests * tile.queries
    x = x.reshape(-1, steps, heads, width)
    programs = x.shape[0]
    # With a rotation the tiles of a request share one band.
    sharing = programs * tile.requests // bands.shape[0]

    def block(*shape: int, index=lambda p: p, **kwargs):
        return pl.BlockSpec(shape, lambda p: (index(p), *(0 for _ in shape[1:])), **kwargs)

    operands = [x, bands, ahead, sink.astype(jnp.float32)[:, None]]
    specs = [
        block(1, steps, heads, width),
        block(tile.requests, *bands.shape[1:], index=lambda p: p // sharing),
        block(tile.requests, *ahead.shape[1:]),
        block(heads, 1, index=lambda p: 0),
    ]
    if reach is not None:
        operands.append(pad_axis(reach, 1, surplus).reshape(programs, 1, steps))
        specs.append(block(1, 1, steps, memory_space=pltpu.SMEM))
    scratch, reader = [], None
    if pool is not None:
        reader = Reader.of(pool, static.pool_fmt, width)
        rows = paged.row_numbers(pool, page_table, pad_axis(indices, 1, surplus, -1))
        chosen = rows.shape[-1]
        view = paged.view(pool)
        leaves = [leaf for leaf in view if leaf is not None]
        rows = rows.reshape(programs, steps, chosen)
        # Selections come with what is nothing at their end: whole tiles of it are not fetched.
        last = jnp.max(jnp.where(rows >= 0, jnp.arange(1, chosen + 1, dtype=jnp.int32), 0), axis=-1)
        operands += [-(-last // TILE)[:, None], rows, rows[:, :, None], *leaves]
        specs += [
            block(1, 1, steps, memory_space=pltpu.SMEM),
            block(1, steps, chosen, memory_space=pltpu.SMEM),
            block(1, steps, 1, chosen),
        ]
        specs += [pl.BlockSpec(memory_space=pltpu.HBM) for _ in leaves]
        dtype = operand_dtype(queries.dtype, static.pool_fmt)
        scratch = [pltpu.VMEM((chosen, width), dtype), *reader.buffers(chosen)]
    kernel = functools.partial(
        _kernel,
        reader=reader,
        tile=tile,
        window=static.window,
        reaching=reach is not None,
        scale=static.scale,
        probability=static.probability_dtype,
        return_partial=static.return_partial,
        interpret=static.interpret,
    )
    out_specs = [block(1, steps, heads, width)]
    out_shape = [jax.ShapeDtypeStruct(x.shape, jnp.float32 if static.return_partial else queries.dtype)]
    if static.return_partial:
        out_specs.append(block(1, steps, heads, 2))
        out_shape.append(jax.ShapeDtypeStruct((*x.shape[:3], 2), jnp.float32))
    out, *sums = pl.pallas_call(
        kernel,
        grid=(programs,),
        in_specs=specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM_BYTES),
        interpret=static.interpret,
        name="sparse_attention",
    )(*operands)
    out = out.reshape(batch, total + surplus, heads, width)
    out = (paged.join_channels(out) if split else out)[:, :total]
    if not static.return_partial:
        return out
    sums = sums[0].reshape(batch, total + surplus, heads, 2)[:, :total]
    return Partial(out, sums[..., 0], sums[..., 1])


def _attend_forward(static, *arrays):
    return _attend(static, *arrays), arrays


def _attend_backward(static, saved, cotangent):
    def again(queries, local, local_valid, pool, page_table, indices, sink, rotation, reach):
        return xla.sparse_attention(
            queries=queries,
            local=local,
            local_valid=local_valid,
            pool=pool,
            page_table=page_table,
            indices=indices,
            sink=sink,
            rotation=rotation,
            reach=reach,
            **static.options(),
        )

    return jax.vjp(again, *saved)[1](cotangent)


_attend.defvjp(_attend_forward, _attend_backward)


def _bands(
    static: _Static,
    local: Packed,
    valid: jax.Array,
    rotation: jax.Array | None,
    tile: _Tile,
    tiles: int,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """Decoded local entries of every tile, and how far each lies ahead of the tile's first query's oldest.

    Returns:
      entries ``[batch · tiles, band, width]``, with a rotation ``[batch, band, width]``; zeros where not valid.
      ahead ``[batch · tiles, 1, band]`` int32: query s of the tile sees 1 + s … window + s; negative where not valid.
    """
    batch, columns = valid.shape
    entries = jnp.where(valid[..., None], static.local_fmt.decode(local, dtype), 0)
    band = _band(static.window, columns - static.window, tile, rotation is not None)
    first = jnp.arange(tiles, dtype=jnp.int32) * tile.queries
    if rotation is None:
        column = first[:, None] + jnp.arange(band, dtype=jnp.int32)
        entries = pad_axis(entries, 1, max(first.shape[0] * tile.queries - tile.queries + band - columns, 0))
        valid = pad_axis(valid, 1, entries.shape[1] - columns, False)
        entries = entries[:, column].reshape(batch * tiles, band, -1)
        ahead = jnp.where(valid[:, column], column - first[:, None], -1)
    else:
        order = (jnp.arange(columns, dtype=jnp.int32) - rotation[:, None]) % columns
        ahead = jnp.where(valid[:, None], order[:, None] - first[:, None], -1)
        entries, ahead = pad_axis(entries, 1, band - columns), pad_axis(ahead, 2, band - columns, -1)
    return entries, ahead.reshape(batch * tiles, 1, band)


def _kernel(
    queries_ref,
    bands_ref,
    ahead_ref,
    sink_ref,
    *refs,
    reader: Reader | None,
    tile: _Tile,
    window: int,
    reaching: bool,
    scale: float,
    probability: jnp.dtype,
    return_partial: bool,
    interpret: bool,
) -> None:
    steps = tile.requests * tile.queries
    # The chip's compiler drops no cast; XLA may.
    rounded = narrow if interpret else lambda x, dtype: x.astype(dtype)
    rest = list(refs)
    reach_ref = rest.pop(0) if reaching else None
    if reader is not None:
        tiles_ref, rows_ref, row_vectors_ref, payload_ref, *rest = rest
        pool = Words(payload_ref, rest.pop(0) if reader.scale_words else None)
    out_ref = rest.pop(0)
    sums_ref = rest.pop(0) if return_partial else None
    if reader is not None:
        entries_ref, *buffers = rest

    def attend(n: jax.Array) -> None:
        queries = queries_ref[0, n]
        ahead = ahead_ref[n // tile.queries] - n % tile.queries
        oldest = 0 if reach_ref is None else jnp.maximum(window - reach_ref[0, 0, n], 0)
        parts = [(bands_ref[n // tile.queries], (ahead > oldest) & (ahead <= window))]
        if reader is not None:
            tiles = tiles_ref[0, 0, n]
            reader.wait(buffers, n % 2, tiles)

            def decode(t: jax.Array, _) -> None:
                rows = pl.ds(pl.multiple_of(t * TILE, TILE), TILE)

                @pl.when(t < tiles)
                def _():
                    vector = row_vectors_ref[0, n, :, rows]
                    values = reader.decode(buffers, n % 2, t * TILE, lambda i: rows_ref[0, n, i], vector)
                    entries_ref[rows] = values.astype(entries_ref.dtype)

                # Their probabilities are zero, but what lies there may be NaN.
                @pl.when(t >= tiles)
                def _():
                    entries_ref[rows] = jnp.zeros((TILE, entries_ref.shape[1]), entries_ref.dtype)

            lax.fori_loop(0, entries_ref.shape[0] // TILE, decode, None)
            parts.append((entries_ref[...], row_vectors_ref[0, n] >= 0))
        if return_partial:
            out, top, total = _softmax(queries, parts, None, scale, probability, rounded)
            out_ref[0, n] = out
            sums_ref[0, n] = jnp.concatenate([top, total], axis=1)
        else:
            out, _, total = _softmax(queries, parts, sink_ref[...], scale, probability, rounded)
            out_ref[0, n] = rounded(out / total, out_ref.dtype)

    def fetch(n: jax.Array) -> None:
        reader.start(pool, buffers, n % 2, lambda i: rows_ref[0, n, i], tiles_ref[0, 0, n])

    def one(n: jax.Array, _) -> None:
        if reader is not None:
            pl.when(n < steps)(lambda: fetch(n))
        pl.when(n > 0)(lambda: attend(n - 1))

    lax.fori_loop(0, steps + 1, one, None)


def _softmax(
    queries: jax.Array,
    parts: list[tuple[jax.Array, jax.Array]],
    sink: jax.Array | None,
    scale: float,
    probability: jnp.dtype,
    rounded: Callable,
) -> Partial:
    """Sums of one query ``[heads, width]`` over parts of entries ``[n, width]`` seen where ``[1, n]``, float32.

    The sink ``[heads, 1]`` joins ``top`` and ``total``, both ``[heads, 1]``.
    """
    top = jnp.full((queries.shape[0], 1), -jnp.inf) if sink is None else sink - SINK_MARGIN
    logits = []
    for entries, seen in parts:
        product = _dot(queries.astype(entries.dtype), entries, 1)
        logits.append(jnp.where(seen, product * scale, -jnp.inf))
        top = jnp.maximum(top, logits[-1].max(axis=1, keepdims=True))
    subtracted = finite_top(top) if sink is None else top
    total = jnp.zeros_like(top) if sink is None else jnp.exp(sink - top)
    out = jnp.zeros(queries.shape, jnp.float32)
    for (entries, _), part in zip(parts, logits, strict=True):
        p = jnp.exp(part - subtracted)
        total += p.sum(axis=1, keepdims=True)
        p = rounded(p, probability)
        dtype = jnp.promote_types(p.dtype, entries.dtype)
        out += _dot(p.astype(dtype), entries.astype(dtype), 0)
    return Partial(out, top, total)


def _dot(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """``a`` times ``b``, contracted along this axis of ``b``; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
