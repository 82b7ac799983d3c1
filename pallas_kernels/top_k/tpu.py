"""Exact top-k on a TPU: threshold by bisection, compaction by a routing network, order by a bitonic sort.

A row lies in VMEM as ``[n/128, 128]``; several short rows are taken at once, so that the reductions' latency is
shared. Scores become int32 keys of the same order. 32 counting passes find the k-th largest key, a second bisection
over the index says which of the keys equal to it are in; both cost the same for any values. Tiles with a chosen key
are then compacted to the left by log2 shifts, appended, and the k pairs sorted by (key, index): nothing here is
floating-point arithmetic, so nothing can round.

VMEM: 3 × 4 bytes a score of a block (double-buffered input, keys), 8 × 4 bytes a slot of the result, and 8 MiB for
what the compiler adds: 20 MiB are asked for with a row of 2²⁰ scores, 9 MiB with rows up to 2¹⁶.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import backend
from pallas_kernels.tiling import pad_axis

LANE_BITS, SUBLANE_BITS = 7, 3
LANES, SUBLANES = 1 << LANE_BITS, 1 << SUBLANE_BITS
TILE = LANES * SUBLANES
MAX_SCORES = 2**20
MAX_K = 4096
# Scores of a block and slots of its results: enough rows to hide latency, few enough vector registers to unroll.
_BLOCK_SCORES, _BLOCK_SLOTS, _BLOCK_ROWS = 2**16, 2**13, 8
# Tiles that one step of a counting pass covers.
_PASS_TILES = 32
_NOTHING = np.int32(-(2**31))


def unsupported(scores: jax.Array, k: int) -> str | None:
    """Why these arguments are not for this kernel; None if they are."""
    if scores.dtype != jnp.float32:
        return f"scores are {scores.dtype}"
    if not 0 < k <= MAX_K:
        return f"k {k} is not in 1 … {MAX_K}"
    if not 0 < scores.shape[-1] <= MAX_SCORES:
        return f"{scores.shape[-1]} scores a row are not in 1 … {MAX_SCORES}"
    return None


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """See :func:`pallas_kernels.top_k.top_k`."""
    *leading, n = scores.shape
    rows = int(np.prod(leading))
    if rows == 0:
        return jnp.zeros((*leading, k), jnp.float32), jnp.zeros((*leading, k), jnp.int32)
    slots = max(TILE, 1 << (k - 1).bit_length())
    tiles = -(-n // TILE)
    step = min(_PASS_TILES, tiles)
    tiles = -(-tiles // step) * step
    block = max(1, min(_BLOCK_ROWS, _BLOCK_SCORES // (tiles * TILE), _BLOCK_SLOTS // slots, rows))
    padded = pad_axis(scores.reshape(rows, n), 1, tiles * TILE - n).reshape(rows, tiles * SUBLANES, LANES)
    shape = (block, tiles * SUBLANES, LANES)
    result = (block, slots // LANES, LANES)
    # One tile more than the result: what is appended may reach over the end of the last.
    found = (block, slots // LANES + SUBLANES, LANES)
    vmem = 4 * (3 * int(np.prod(shape)) + 8 * int(np.prod(result))) + 8 * 2**20
    values, indices = pl.pallas_call(
        functools.partial(_kernel, n=n, k=min(k, n), step=step * SUBLANES),
        grid=(pl.cdiv(rows, block),),
        in_specs=[pl.BlockSpec(shape, lambda i: (i, 0, 0))],
        out_specs=[pl.BlockSpec(result, lambda i: (i, 0, 0))] * 2,
        out_shape=[
            jax.ShapeDtypeStruct((rows, *result[1:]), jnp.float32),
            jax.ShapeDtypeStruct((rows, *result[1:]), jnp.int32),
        ],
        scratch_shapes=[pltpu.VMEM(x, jnp.int32) for x in (shape, found, found, (2, block, SUBLANES, LANES))],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=vmem),
        interpret=backend.interpreted(),
        name="top_k",
    )(padded)
    values, indices = (x.reshape(rows, slots)[:, :k].reshape(*leading, k) for x in (values, indices))
    return values, indices


def _kernel(scores, values, indices, keys, found_key, found_index, limits, *, n: int, k: int, step: int):
    block, sublanes, _ = keys.shape

    def position(shape: tuple[int, ...], first_sublane: int | jax.Array) -> jax.Array:
        sublane = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2) + first_sublane
        return sublane * LANES + lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)

    def fill(i, _):
        here = pl.ds(i * step, step)
        x = scores[:, here, :]
        key = _ordered(jnp.where(x == 0, 0.0, x))
        keys[:, here, :] = jnp.where(position(x.shape, i * step) < n, key, _NOTHING)
        return 0

    lax.fori_loop(0, sublanes // step, fill, 0)

    def count(chosen) -> jax.Array:
        """How many of each row's keys are chosen, ``[block, 1, 1]``."""

        def add(i, total):
            key = keys[:, pl.ds(i * step, step), :]
            hits = chosen(key, position(key.shape, i * step)).astype(jnp.int32)
            parts = hits.reshape(block, step // SUBLANES, SUBLANES, LANES)
            return total + jnp.sum(parts, axis=1)

        total = lax.fori_loop(0, sublanes // step, add, jnp.zeros((block, SUBLANES, LANES), jnp.int32))
        return jnp.sum(jnp.sum(total, axis=1, keepdims=True), axis=2, keepdims=True)

    def raise_threshold(i, threshold):
        # Bit by bit from the top, in the unsigned order of the keys.
        raised = threshold | lax.shift_left(jnp.int32(1), 31 - i)
        return jnp.where(count(lambda key, _: key >= (raised ^ _NOTHING)) >= k, raised, threshold)

    zero = jnp.zeros((block, 1, 1), jnp.int32)
    threshold = lax.fori_loop(0, 32, raise_threshold, zero) ^ _NOTHING
    # The first of the keys equal to the threshold, up to the index `last`, fill what the larger ones leave.
    wanted = k - count(lambda key, _: key > threshold)
    tied = count(lambda key, _: key == threshold) > wanted
    bits = (n - 1).bit_length()

    def raise_last(i, last):
        raised = last | lax.shift_left(jnp.int32(1), bits - 1 - i)
        before = count(lambda key, at: (key == threshold) & (at < raised))
        return jnp.where(before < wanted, raised, last)

    last = lax.fori_loop(0, jnp.where(jnp.max(tied.astype(jnp.int32)) > 0, bits, 0), raise_last, zero)
    last = jnp.where(tied, last, n)

    found_key[...] = jnp.full(found_key.shape, _NOTHING, jnp.int32)
    found_index[...] = jnp.full(found_index.shape, -1, jnp.int32)
    limits[0] = jnp.broadcast_to(threshold, limits.shape[1:])
    limits[1] = jnp.broadcast_to(last, limits.shape[1:])

    def append_row(row, _):
        _append_chosen(keys.at[row], found_key.at[row], found_index.at[row], limits[0, row], limits[1, row])
        return 0

    lax.fori_loop(0, block, append_row, 0)
    key, index = _sort(found_key[:, : values.shape[1], :], found_index[:, : values.shape[1], :])
    values[...] = jnp.where(key == _NOTHING, -jnp.inf, _unordered(key))
    indices[...] = index


def _ordered(x: jax.Array) -> jax.Array:
    """int32 keys in the order of float32 values, all above ``_NOTHING``."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.maximum(jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _NOTHING + 1)


def _unordered(key: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)


def _append_chosen(keys, found_key, found_index, threshold: jax.Array, last: jax.Array) -> None:
    """Packs one row's chosen keys and their indices, in order of index, at the start of ``found_*``."""
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    local = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0) * LANES + lane

    def one_tile(i, filled):
        key = keys[pl.ds(pl.multiple_of(i * SUBLANES, SUBLANES), SUBLANES), :]
        chosen = (key > threshold) | ((key == threshold) & (i * TILE + local <= last))
        count = jnp.sum(chosen.astype(jnp.int32))

        @pl.when(count > 0)
        def _():
            packed_key, packed_local = _compact(key, chosen, local)
            packed_index = i * TILE + packed_local
            start = filled & (TILE - 1)
            for ref, packed in ((found_key, packed_key), (found_index, packed_index)):
                turned = _turn(packed, start, lane)
                first = pl.multiple_of(lax.shift_right_logical(filled - start, LANE_BITS), SUBLANES)
                here, after = pl.ds(first, SUBLANES), pl.ds(first + SUBLANES, SUBLANES)
                ref[here, :] = jnp.where((local >= start) & (local < start + count), turned, ref[here, :])
                ref[after, :] = jnp.where(local + TILE < start + count, turned, ref[after, :])

        return filled + count

    lax.fori_loop(0, keys.shape[0] // SUBLANES, one_tile, jnp.int32(0))


def _compact(key: jax.Array, chosen: jax.Array, local: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Moves a tile's chosen keys and their positions in it to its start; what follows them is arbitrary.

    A chosen one moves left by the number of those before it that are not. Moved by its binary digits, lowest first,
    no two ever meet, because that number never falls from one chosen element to the next.
    """
    sublane, lane = lax.shift_right_logical(local, LANE_BITS), local & (LANES - 1)

    def sums(x: jax.Array, at: jax.Array, axis: int, bits: int) -> jax.Array:
        """Inclusive sums along an axis."""

        def step(b, x):
            by = lax.shift_left(jnp.int32(1), b)
            return x + jnp.where(at >= by, pltpu.roll(x, by, axis), 0)

        return lax.fori_loop(0, bits, step, x)

    gaps = sums(1 - chosen.astype(jnp.int32), lane, 1, LANE_BITS)
    row_gaps = jnp.broadcast_to(gaps[:, LANES - 1 :], gaps.shape)
    gaps += sums(row_gaps, sublane, 0, SUBLANE_BITS) - row_gaps
    # Distance above, position below: one word to move beside the key.
    pair = key, jnp.where(chosen, gaps * TILE, 0) + local

    def move(pair, distance, shift):
        key, word = pair
        moved_key, moved_word = shift(key), shift(word)
        bit = distance * TILE
        arrives = (moved_word & bit) != 0
        rest = jnp.where((word & bit) != 0, word & (TILE - 1), word)
        return jnp.where(arrives, moved_key, key), jnp.where(arrives, moved_word, rest)

    def by_lanes(b, pair):
        by = lax.shift_left(jnp.int32(1), b)

        def shift(x: jax.Array) -> jax.Array:
            turned = pltpu.roll(x, LANES - by, 1)
            return jnp.where(lane < LANES - by, turned, pltpu.roll(turned, SUBLANES - 1, 0))

        return move(pair, by, shift)

    def by_sublanes(b, pair):
        by = lax.shift_left(jnp.int32(1), b)
        return move(pair, by * LANES, lambda x: pltpu.roll(x, SUBLANES - by, 0))

    pair = lax.fori_loop(0, LANE_BITS, by_lanes, pair)
    key, word = lax.fori_loop(0, SUBLANE_BITS, by_sublanes, pair)
    return key, word & (TILE - 1)


def _turn(x: jax.Array, by: jax.Array, lane: jax.Array) -> jax.Array:
    """A tile in its flat order, turned right by a traced distance."""
    lanes = by & (LANES - 1)
    x = pltpu.roll(x, lanes, 1)
    x = jnp.where(lane >= lanes, x, pltpu.roll(x, 1, 0))
    return pltpu.roll(x, lax.shift_right_logical(by, LANE_BITS), 0)


def _sort(key: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows ``[block, slots/128, 128]`` in descending order of key, then ascending of index: a bitonic network."""
    sublane = lax.broadcasted_iota(jnp.int32, key.shape, 1)
    at = sublane * LANES + lax.broadcasted_iota(jnp.int32, key.shape, 2)

    def compare(pairs, size, distance, axis: int, by):
        """Each pair at ``distance`` in order, descending in every other run of ``size``."""
        key, index = pairs
        is_first = (at & distance) == 0

        def partner(x: jax.Array) -> jax.Array:
            return jnp.where(is_first, pltpu.roll(x, x.shape[axis] - by, axis), pltpu.roll(x, by, axis))

        other_key, other_index = partner(key), partner(index)
        wins = (key > other_key) | ((key == other_key) & (index < other_index))
        keeps = wins == (is_first == ((at & size) == 0))
        return jnp.where(keeps, key, other_key), jnp.where(keeps, index, other_index)

    def within_lanes(pairs, size, count):
        def step(i, pairs):
            distance = lax.shift_left(jnp.int32(1), count - 1 - i)
            return compare(pairs, size, distance, 2, distance)

        return lax.fori_loop(0, count, step, pairs)

    # Loops where the distance may be traced, to keep the program short.
    bits = (key.shape[1] * LANES).bit_length() - 1
    pairs = lax.fori_loop(
        1, LANE_BITS + 1, lambda b, pairs: within_lanes(pairs, lax.shift_left(jnp.int32(1), b), b), (key, index)
    )
    for b in range(LANE_BITS + 1, bits + 1):
        for d in range(b - 1, LANE_BITS - 1, -1):
            pairs = compare(pairs, 1 << b, 1 << d, 1, 1 << (d - LANE_BITS))
        pairs = within_lanes(pairs, 1 << b, LANE_BITS)
    return pairs
