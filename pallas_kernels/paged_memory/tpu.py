"""Paged memory on TPUs (Pallas, TensorCore): packed bytes change in place, single entries are fetched by copies.

XLA scatters into copies of whole pools, because it stores them in another layout than it scatters to. These kernels
take the layouts as they are (see :mod:`pallas_kernels.tpu.pool`): a page's part is fetched, changed and written back.
XLA rounds and packs the new values, which are few.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backend import interpreted
from pallas_kernels.formats import Format, Packed
from pallas_kernels.paged_memory import xla
from pallas_kernels.paged_memory.addressing import locate
from pallas_kernels.tiling import pad_axis
from pallas_kernels.tpu import pool as paged
from pallas_kernels.tpu.pool import LANES, TILE, Reader, Words


def append_unsupported(
    pool: Packed, fmt: Format, page_table: jax.Array, start: jax.Array, count: jax.Array, values: jax.Array
) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    del fmt, page_table, start, count, values
    for leaf in (leaf for leaf in pool if leaf is not None):
        if leaf.dtype not in (jnp.uint8, jnp.bfloat16, jnp.float32):
            return f"the pool is {leaf.dtype}"
        width, page_entries = leaf.shape[-1], leaf.shape[1]
        if paged.is_narrow(leaf):
            if leaf.dtype != jnp.uint8 or width % 4 or page_entries > LANES:
                return f"pages of {page_entries} entries of {width} {leaf.dtype} values"
        elif width % LANES or page_entries % (8 * 4 // leaf.dtype.itemsize):
            return f"pages of {page_entries} entries of {width} {leaf.dtype} values are no whole tiles"
    return None


def append(
    pool: Packed, fmt: Format, page_table: jax.Array, start: jax.Array, count: jax.Array, values: jax.Array
) -> Packed:
    """See :func:`pallas_kernels.paged_memory.append`; its derivative is XLA's."""
    return _append(fmt, pool, page_table, start, count, values)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _append(fmt: Format, pool: Packed, page_table, start, count, values) -> Packed:
    pages, page_entries = pool.payload.shape[:2]
    batch, group = values.shape[:2]
    # Pages that consecutive entries can touch, wherever the first one lies in its page.
    spans = (group + 2 * (page_entries - 1)) // page_entries
    first = start // page_entries
    span = jnp.arange(spans, dtype=jnp.int32)
    page, _, valid = locate(page_table, (first[:, None] + span) * page_entries, pages, page_entries)
    before = start[:, None] - (first[:, None] + span) * page_entries
    low = jnp.clip(before, 0, page_entries)
    high = jnp.where(valid, jnp.clip(before + count[:, None], 0, page_entries), 0)
    where = jnp.stack([page, low, high], axis=-1).reshape(-1, 3)
    # New entries at the slots at which they will lie.
    source = jnp.arange(spans * page_entries, dtype=jnp.int32) - (start % page_entries)[:, None]
    source = jnp.clip(source, 0, group - 1)

    def write(leaf: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.take_along_axis(new, source[..., None], axis=1).reshape(batch * spans, page_entries, -1)
        return (_write_columns if paged.is_narrow(leaf) else _write_rows)(leaf, where, new)

    return pool.map(write, fmt.encode(values))


def _append_forward(fmt, *arguments):
    return _append(fmt, *arguments), arguments


def _append_backward(fmt, arguments, cotangent):
    return jax.vjp(lambda pool, *rest: xla.append(pool, fmt, *rest), *arguments)[1](cotangent)


_append.defvjp(_append_forward, _append_backward)


def _call(kernel, leaf: jax.Array, where: jax.Array, new: jax.Array, scratch: list) -> jax.Array:
    """Runs ``kernel(where, new, pool, *scratch)`` for every page that is touched, one after another, in place."""

    def body(where_ref, new_ref, _, pool_ref, *scratch):
        kernel(where_ref, new_ref, pool_ref, *scratch)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(new.shape[0],),
            in_specs=[pl.BlockSpec((1, *new.shape[1:]), lambda i, _: (i, 0, 0)), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if interpreted() else pltpu.HBM(leaf.shape, leaf.dtype),
        input_output_aliases={2: 0},
        interpret=interpreted(),
        name="paged_append",
    )(where, new, paged.in_hbm(leaf))


def _write_rows(leaf: jax.Array, where: jax.Array, new: jax.Array) -> jax.Array:
    """Writes new ``[touched, page_entries, width]`` into pages; of each the rows that ``where`` names."""
    packing = 4 // leaf.dtype.itemsize
    words = (leaf.shape[1] // packing, leaf.shape[2])

    def kernel(where_ref, new_ref, pool_ref, buffer, semaphore):
        i = pl.program_id(0)
        page, low, high = (where_ref[i, k] for k in range(3))

        @pl.when(low < high)
        def _():
            stored = pool_ref.at[page]
            fetch = pltpu.make_async_copy(stored, buffer, semaphore)
            fetch.start()
            fetch.wait()
            row = lax.broadcasted_iota(jnp.int32, words, 0) * packing
            mask = jnp.zeros(words, jnp.int32)
            for k in range(packing):
                bits = ((1 << (32 // packing)) - 1) << (k * 32 // packing)
                bits -= (bits >> 31) << 32
                mask |= jnp.where((row + k >= low) & (row + k < high), bits, 0)
            old, fresh = pltpu.bitcast(buffer[...], jnp.int32), pltpu.bitcast(new_ref[0], jnp.int32)
            buffer[...] = pltpu.bitcast((old & ~mask) | (fresh & mask), buffer.dtype)
            back = pltpu.make_async_copy(buffer, stored, semaphore)
            back.start()
            back.wait()

    scratch = [pltpu.VMEM(leaf.shape[1:], leaf.dtype), pltpu.SemaphoreType.DMA]
    return _call(kernel, leaf, where, new, scratch)


def _write_columns(leaf: jax.Array, where: jax.Array, new: jax.Array) -> jax.Array:
    """The same for leaves that lie with the pages last: only the touched slots of the page's 128 are fetched."""
    pages, page_entries, width = leaf.shape

    def kernel(where_ref, new_ref, pool_ref, buffer, fetched, written):
        i = pl.program_id(0)
        page, low, high = (where_ref[i, k] for k in range(3))
        first, lane = pl.multiple_of(page // LANES * LANES, LANES), page % LANES

        def tile(slot):
            return pool_ref.at[slot, :, pl.ds(first, LANES)]

        def fetch(slot, _) -> None:
            pltpu.make_async_copy(tile(slot), buffer.at[slot], fetched).start()

        def change(slot, _) -> None:
            pltpu.make_async_copy(tile(slot), buffer.at[slot], fetched).wait()

        def write(slot, _) -> None:
            fresh = pltpu.roll(pltpu.bitcast(new_ref[0], jnp.int32), (lane - slot) & (LANES - 1), 1)
            mine = lax.broadcasted_iota(jnp.int32, fresh.shape, 1) == lane
            old = pltpu.bitcast(buffer[slot], jnp.int32)
            buffer[slot] = pltpu.bitcast(jnp.where(mine, fresh, old), buffer.dtype)
            pltpu.make_async_copy(buffer.at[slot], tile(slot), written).start()

        def finish(slot, _) -> None:
            pltpu.make_async_copy(buffer.at[slot], tile(slot), written).wait()

        for step in (fetch, change, write, finish):
            lax.fori_loop(low, high, step, None)

    scratch = [pltpu.VMEM((page_entries, width, LANES), leaf.dtype), pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA]
    new = pad_axis(new.transpose(0, 2, 1), 2, -page_entries % LANES)
    out = _call(kernel, paged.pages_last(leaf), where, new, scratch)
    return out[:, :, :pages].transpose(2, 0, 1)


def gather_unsupported(
    pool: Packed, fmt: Format, page_table: jax.Array, indices: jax.Array, dtype: jnp.dtype = jnp.float32
) -> str | None:
    """Why the kernel cannot run these arguments; None if it can."""
    del page_table, indices
    width = pool.payload.shape[-1] * (2 if paged.is_split(fmt) else 1)
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        return f"the result is {jnp.dtype(dtype)}"
    return paged.unsupported(pool, fmt, width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 4))
def _gather(pool: Packed, static: tuple[Format, bool], page_table: jax.Array, indices: jax.Array, dtype) -> jax.Array:
    fmt, interpret = static
    split = paged.is_split(fmt)
    width = pool.payload.shape[-1] * (2 if split else 1)
    reader = Reader.of(pool, fmt, width)
    rows = paged.row_numbers(pool, page_table, indices.reshape(indices.shape[0], -1)).reshape(-1, 1, TILE)
    leaves = [leaf for leaf in paged.view(pool) if leaf is not None]

    def kernel(rows_ref, row_vector_ref, *refs):
        payload_ref, *rest = refs
        scales_ref = rest.pop(0) if reader.scale_words else None
        out_ref, *buffers = rest
        read = lambda i: rows_ref[0, 0, i]  # noqa: E731
        reader.start(Words(payload_ref, scales_ref), buffers, 0, read, 1)
        reader.wait(buffers, 0, 1)
        out_ref[0] = reader.decode(buffers, 0, 0, read, row_vector_ref[0]).astype(dtype)

    out = pl.pallas_call(
        kernel,
        grid=(rows.shape[0],),
        in_specs=[
            pl.BlockSpec((1, 1, TILE), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((1, 1, TILE), lambda i: (i, 0, 0)),
            *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in leaves),
        ],
        out_specs=pl.BlockSpec((1, TILE, width), lambda i: (i, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], TILE, width), dtype),
        scratch_shapes=reader.buffers(TILE, slots=1),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="paged_gather",
    )(rows, rows, *leaves)
    if split:
        out = paged.join_channels(out)
    count = indices[0].size
    return out.reshape(indices.shape[0], -1, width)[:, :count].reshape(*indices.shape, width)


def _gather_forward(pool, static, page_table, indices, dtype):
    return _gather(pool, static, page_table, indices, dtype), (pool, page_table, indices)


def _gather_backward(static, dtype, saved, cotangent):
    return jax.vjp(lambda pool, table, indices: xla.gather(pool, static[0], table, indices, dtype), *saved)[1](
        cotangent
    )


_gather.defvjp(_gather_forward, _gather_backward)


def gather(
    pool: Packed, fmt: Format, page_table: jax.Array, indices: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """See :func:`pallas_kernels.paged_memory.gather`; its derivative is XLA's."""
    return _gather(pool, (fmt, interpreted()), page_table, indices, jnp.dtype(dtype))
