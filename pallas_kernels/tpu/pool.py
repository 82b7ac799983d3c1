"""Reading single entries of a paged pool by asynchronous copies, in the layouts in which the pool already lies.

A copy moves whole 32-bit words, and neighbouring entries share words: a byte of each of four entries makes one.

* Payloads lie row by row. One copy fetches a row of words, which is the wanted entry and the others of its four
  (1 KiB for 256 bytes); the wanted byte of every word is shifted out afterwards.
* Scales are too narrow for the 128 lanes, so that XLA stores them with the pages as last axis rather than pad every
  row fourfold. A view with that axis last costs nothing; one copy fetches the scales that 128 pages have in one slot
  (4 KiB for 32 bytes), and the wanted page's lane is rotated out.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backend import interpreted
from pallas_kernels.formats import BlockFormat, DenseFormat, Format, Packed
from pallas_kernels.paged_memory.addressing import locate
from pallas_kernels.tiling import pad_axis
from pallas_kernels.tpu import unpack

LANES, SUBLANES = 128, 8
# Entries that are decoded at once: as many as one tile has lanes, so that their scales are gathered in one tile.
TILE = LANES
# Copies that one step of the issuing loop starts: enough that the loop's own overhead is small.
_UNROLL = 8


class Words(NamedTuple):
    """A pool as the kernels address it; both leaves stay in HBM.

    Attributes:
      payload: ``[pages, page_entries, payload_width]``, as stored.
      scales: ``[page_entries, scale_width, pages]`` uint8, pages padded to whole tiles; None in a dense format.
    """

    payload: jax.Array
    scales: jax.Array | None


def unsupported(pool: Packed, fmt: Format, width: int) -> str | None:
    """Why single entries of this pool cannot be read; None if they can."""
    if pool.payload.dtype not in (jnp.uint8, jnp.bfloat16, jnp.float32):
        return f"the pool is {pool.payload.dtype}"
    if pool.payload.shape[-1] % LANES:
        return f"a payload of {pool.payload.shape[-1]} is not a multiple of {LANES}"
    if pool.payload.shape[1] % (4 * SUBLANES):
        return f"pages of {pool.payload.shape[1]} entries are no whole tiles"
    if pool.scales is not None and pool.scales.shape[-1] % (4 * SUBLANES):
        return f"{pool.scales.shape[-1]} scales an entry are no whole tiles"
    return None


def view(pool: Packed) -> Words:
    """The pool as kernels take it; no copy where the number of pages is a multiple of 128."""
    return Words(in_hbm(pool.payload), None if pool.scales is None else in_hbm(pages_last(pool.scales)))


def in_hbm(x: jax.Array) -> jax.Array:
    """Keeps XLA from moving a pool that fits there into VMEM first, of which a kernel then reads a few entries."""
    return x if interpreted() else pltpu.with_memory_space_constraint(x, pltpu.HBM)


def is_narrow(leaf: jax.Array) -> bool:
    """Whether XLA stores the leaf with the pages last, because its own last axis does not fill the lanes."""
    return leaf.shape[-1] < LANES


def pages_last(leaf: jax.Array) -> jax.Array:
    """``[page_entries, width, pages]`` of a narrow leaf, pages padded to whole tiles."""
    leaf = leaf.transpose(1, 2, 0)
    return pad_axis(leaf, 2, -leaf.shape[2] % LANES)


def row_numbers(pool: Packed, page_table: jax.Array, indices: jax.Array) -> jax.Array:
    """``page · page_entries + slot`` of every index, −1 where it names nothing; padded to whole tiles with −1."""
    pages, page_entries = pool.payload.shape[:2]
    page, slot, valid = locate(page_table, indices, pages, page_entries)
    rows = jnp.where(valid, page * page_entries + slot, -1)
    return pad_axis(rows, rows.ndim - 1, -rows.shape[-1] % TILE, -1)


def is_split(fmt: Format) -> bool:
    """Whether entries are decoded with their channels split."""
    return isinstance(fmt, BlockFormat) and fmt.element == "e2m1"


def split_channels(x: jax.Array) -> jax.Array:
    """Even channels, then odd ones: the order in which :meth:`Reader.decode` leaves E2M1 entries."""
    return _permuted(x, _split_order(x.shape[-1]))


def join_channels(x: jax.Array) -> jax.Array:
    """The inverse of :func:`split_channels`."""
    return _permuted(x, jnp.argsort(_split_order(x.shape[-1])))


def _split_order(width: int) -> jax.Array:
    return jnp.concatenate([jnp.arange(0, width, 2), jnp.arange(1, width, 2)])


def _permuted(x: jax.Array, order: jax.Array) -> jax.Array:
    # A product with a permutation matrix is exact; a strided copy along lanes would pad every pair to 128 of them.
    matrix = (jnp.arange(order.shape[0])[:, None] == order).astype(x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...c,cd->...d", x, matrix, precision=precision, preferred_element_type=x.dtype)


class Reader(NamedTuple):
    """Fetches and decodes entries inside a kernel.

    Attributes:
      fmt: the pool's format.
      width: values of an entry.
      page_entries: entries of a page.
      packing: entries that share a word of the payload.
    """

    fmt: Format
    width: int
    page_entries: int
    packing: int

    @classmethod
    def of(cls, pool: Packed, fmt: Format, width: int) -> Reader:
        return cls(fmt, width, pool.payload.shape[1], 4 // pool.payload.dtype.itemsize)

    def buffers(self, count: int, slots: int = 2) -> list:
        """Scratch shapes for ``count`` entries in each of ``slots`` fetches that are under way together."""
        dtype = jnp.float32 if self.packing == 1 else jnp.int32
        shapes = [pltpu.VMEM((slots, count, self.fmt.payload_width(self.width)), dtype)]
        if self.scale_words:
            shapes.append(pltpu.VMEM((slots, count, self.scale_words, LANES), jnp.int32))
        return [*shapes, pltpu.SemaphoreType.DMA((slots,))]

    def buffer_bytes(self, count: int, slots: int = 2) -> int:
        """VMEM that :meth:`buffers` takes."""
        return 4 * slots * count * (self.fmt.payload_width(self.width) + self.scale_words * LANES)

    @property
    def scale_words(self) -> int:
        """32-bit words of an entry's scales; 0 in a dense format."""
        return 0 if isinstance(self.fmt, DenseFormat) else self.fmt.scale_width(self.width) // 4

    def start(self, pool: Words, buffers: tuple, slot: jax.Array | int, rows, tiles: jax.Array | int) -> None:
        """Starts to fetch ``tiles`` tiles of entries ``rows(i)``, which reads SMEM; row 0 in place of nothing."""
        *leaves, semaphores = buffers
        payload = pool.payload if self.packing == 1 else pool.payload.bitcast(jnp.int32)
        scales = pool.scales.bitcast(jnp.int32) if self.scale_words else None

        def some(step: jax.Array, _) -> None:
            for k in range(_UNROLL):
                i = step * _UNROLL + k
                row = jnp.maximum(rows(i), 0)
                page, entry = row // self.page_entries, row % self.page_entries
                source = payload.at[page, pl.ds(entry // self.packing, 1)]
                pltpu.make_async_copy(source, leaves[0].at[slot, pl.ds(i, 1)], semaphores.at[slot]).start()
                if self.scale_words:
                    first = pl.multiple_of(page // LANES * LANES, LANES)
                    source = scales.at[entry, :, pl.ds(first, LANES)]
                    pltpu.make_async_copy(source, leaves[1].at[slot, i], semaphores.at[slot]).start()

        lax.fori_loop(0, tiles * (TILE // _UNROLL), some, None)

    def wait(self, buffers: tuple, slot: jax.Array | int, tiles: jax.Array | int) -> None:
        """Waits for all entries of a fetch."""
        *leaves, semaphores = buffers

        def one(t: jax.Array, _) -> None:
            for leaf in leaves:
                # Semaphores count bytes: one wait for as many as all copies into the tile have.
                part = leaf.at[slot, pl.ds(pl.multiple_of(t * TILE, TILE), TILE)]
                pltpu.make_async_copy(part, part, semaphores.at[slot]).wait()

        lax.fori_loop(0, tiles, one, None)

    def decode(
        self, buffers: tuple, slot: jax.Array | int, first: jax.Array | int, rows, row_vector: jax.Array
    ) -> jax.Array:
        """Values ``[TILE, width]`` float32 of fetched entries ``first`` …, 0 where there is nothing.

        E2M1 entries come with their even channels first, then the odd ones.

        Args:
          rows: as in :meth:`start`.
          row_vector: ``[1, TILE]`` int32, the same numbers.
        """
        words = buffers[0][slot, pl.ds(pl.multiple_of(first, TILE), TILE)]
        column = jnp.transpose(jnp.broadcast_to(row_vector, (SUBLANES, TILE)))[:, :1]
        if self.packing > 1:
            words = words >> (column & (self.packing - 1)) * (32 // self.packing)
        words = jnp.where(column >= 0, words, 0)
        if not self.scale_words:
            return words if self.packing == 1 else lax.bitcast_convert_type(words << 16, jnp.float32)
        steps = self._scales(buffers[1], slot, first, rows, row_vector)
        if self.fmt.element == "e4m3":
            return unpack.e4m3(words & 255) * steps
        values = [unpack.e2m1_doubled(words), unpack.e2m1_doubled(words >> 4)]
        return jnp.concatenate([half * (steps * 0.5) for half in values], axis=1)

    def _scales(self, buffer, slot, first: jax.Array | int, rows, row_vector: jax.Array) -> jax.Array:
        """The scale of every byte of the payload, ``[TILE, payload_width]``."""
        lane = lax.broadcasted_iota(jnp.int32, (self.scale_words, LANES), 1)

        def some(step: jax.Array, tile: jax.Array) -> jax.Array:
            for k in range(_UNROLL):
                i = step * _UNROLL + k
                page = jnp.maximum(rows(first + i), 0) // self.page_entries
                shift = (i - page) & (LANES - 1)
                tile = jnp.where(lane == i, pltpu.roll(buffer[slot, first + i], shift, 1), tile)
            return tile

        words = lax.fori_loop(0, TILE // _UNROLL, some, jnp.zeros((self.scale_words, LANES), jnp.int32))
        codes = jnp.concatenate([(words >> 8 * k) & 255 for k in range(4)], axis=0)
        scales = unpack.e4m3(codes) if self.fmt.scale == "e4m3" else unpack.e8m0(codes)
        # What another page's scales hold must not reach the product below, where one NaN spoils a whole row.
        scales = jnp.where(row_vector >= 0, scales, 0)
        # Row 8k + j of the codes is scale 4j + k, since byte k of word j came there.
        payload_width = self.fmt.payload_width(self.width)
        shape = (scales.shape[0], payload_width)
        position = lax.broadcasted_iota(jnp.int32, shape, 0)
        scale = position % self.scale_words * 4 + position // self.scale_words
        spread = scale == lax.broadcasted_iota(jnp.int32, shape, 1) // (payload_width * self.fmt.block // self.width)
        return lax.dot_general(
            # Exact: scales have at most four significant bits and each is multiplied by one.
            scales.astype(jnp.bfloat16),
            spread.astype(jnp.bfloat16),
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
