"""Where the rows of each expert lie, and bringing them there rounded (Pallas-Triton).

A pair is a row and one of its experts. An expert's pairs fill blocks of slots in order; the experts' blocks follow one
another. Only slots that a pair owns are written: with few rows and many experts most slots are nobody's, and what they
hold stays in their own column of a product.

Triton, because this is counting and elementwise work with computed positions. XLA takes a sort, some twenty launches
and passes over all slots for it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import backend
from pallas_kernels.expert_matmul import gpu_product
from pallas_kernels.formats import FP8_E8M0, Format
from pallas_kernels.gpu.rounding import round_under

# Pairs that the counting program of an expert looks at together: enough loads in flight, 16 registers a thread.
_COUNTED = 4096
# Pairs that are so few that whoever places a row compares them all with all instead: a launch less.
_FEW = 64
# Contraction steps of a row that a program of the tokens places, and inner rows of one step that a program rounds:
# 8 values a thread, stored as 16 bytes.
_STEPS, _INNER_ROWS, _WARPS = 4, 4, 4


class Placed(NamedTuple):
    """Rows in blocks of one expert; a static number of blocks, of which the first ones are live.

    Attributes:
      live: ``[1]`` int32 blocks in use.
      expert: ``[blocks]`` int32; undefined in blocks that are not live.
      slot: ``[rows, k]`` int32: where a pair lies in the flat blocks; −1 for one without an expert.
      weight: ``[blocks · size]`` float32 routing weights; undefined in slots without a pair, as are the tokens.
      tokens: ``[blocks · size, padded width]`` rounded rows of x in the product's order.
    """

    live: jax.Array
    expert: jax.Array
    slot: jax.Array
    weight: jax.Array
    tokens: jax.Array


def block_count(pairs: int, experts: int, size: int) -> int:
    """Blocks that so many pairs can need: every expert that is used may end in an unfilled one."""
    return min(pairs, pairs // size + min(experts, pairs))


def rank_pairs(ids: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """Counts the pairs of each expert.

    Args:
      ids: ``[pairs]`` int32; any that is none of the experts is nobody's.

    Returns:
      pairs of an expert ``[experts]``, and how many earlier pairs a pair's expert has ``[pairs]`` (undefined for a pair
      without an expert), both int32.
    """
    pairs = ids.size
    chunk = min(pl.next_power_of_2(pairs), _COUNTED)

    def kernel(ids_ref, count_ref, rank_ref):
        expert = pl.program_id(0)

        def some(i: jax.Array, count: jax.Array) -> jax.Array:
            at = i * chunk + jnp.arange(chunk)
            mine = plgpu.load(ids_ref.at[at], mask=at < pairs, other=-1) == expert
            hits = mine.astype(jnp.int32)
            plgpu.store(rank_ref.at[at], count + jnp.cumsum(hits) - hits, mask=mine)
            return count + jnp.sum(hits)

        count_ref[expert] = lax.fori_loop(0, pl.cdiv(pairs, chunk), some, jnp.int32(0))

    return pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct((experts,), jnp.int32), jax.ShapeDtypeStruct((pairs,), jnp.int32)),
        grid=(experts,),
        compiler_params=plgpu.CompilerParams(num_warps=max(min(chunk // 512, 8), 1)),
        interpret=backend.interpreted(),
        name="expert_ranks",
    )(ids)


def place_tokens(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    layer: jax.Array | None,
    *,
    experts: int,
    size: int,
    fmt: Format,
) -> Placed:
    """Rounds each row of x once and writes it to the slots of all its experts.

    Args:
      x: ``[rows, width]`` bfloat16.
      ids: ``[rows, k]`` int32, distinct in a row; any that is none of the experts is nobody's.
      weights: ``[rows, k]`` float32.
      layer: scalar int32, counts experts on from those of the layers before; None: 0.
      experts: of a layer (static).
      size: slots of a block, a power of two (static).
      fmt: rounding of x (static).
    """
    (rows, width), k, pairs = x.shape, ids.shape[1], ids.size
    blocks = block_count(pairs, experts, size)
    if fmt != FP8_E8M0:
        x = fmt.round(x)
    steps, whole = gpu_product.padded(width) // gpu_product.STEP, width % gpu_product.STEP == 0
    part = next(s for s in (_STEPS, 2, 1) if steps % s == 0)
    choices = pl.next_power_of_2(k)
    ids = ids.reshape(-1)
    ranks = () if pairs <= _FEW else rank_pairs(ids, experts)

    def kernel(x_ref, ids_ref, weights_ref, *refs):
        live_ref, expert_ref, slot_ref, weight_ref, tokens_ref = refs[-5:]
        row, choice = pl.program_id(0), jnp.arange(choices)
        pair = row * k + choice
        own = plgpu.load(ids_ref.at[pair], mask=choice < k, other=-1)
        real = (own >= 0) & (own < experts)
        if ranks:
            rank = plgpu.load(refs[1].at[pair], mask=real, other=0)
            before, live = _blocks_before(refs[0], own, size)
        else:
            rank, before, live = _compared(ids_ref, pair, own, experts, size)
        # Beyond the end: an interpreted store would write a masked slot back over a neighbour's.
        slot = jnp.where(real, before * size + rank, blocks * size)
        block = jnp.where(real & (lax.rem(rank, size) == 0), lax.div(slot, size), blocks)

        column = (pl.program_id(1) * part) * gpu_product.STEP + jnp.arange(part * gpu_product.STEP)
        source = _source(column)
        present = {} if whole else {"mask": source < width, "other": 0.0}
        values = plgpu.load(x_ref.at[row, source], **present)
        values = _rounded(values[None], fmt)
        shape = (choices, column.size)
        to = jnp.broadcast_to(slot[:, None], shape), jnp.broadcast_to(column[None], shape)
        plgpu.store(tokens_ref.at[to], jnp.broadcast_to(values, shape), mask=jnp.broadcast_to(real[:, None], shape))

        @pl.when(pl.program_id(1) == 0)
        def _():
            plgpu.store(slot_ref.at[row, choice], jnp.where(real, slot, -1), mask=choice < k)
            weight = plgpu.load(weights_ref.at[row, choice], mask=real, other=0.0)
            plgpu.store(weight_ref.at[slot], weight, mask=real)
            # The first pair of a block names the block's expert.
            first = 0 if layer is None else refs[len(ranks)][0] * experts
            plgpu.store(expert_ref.at[block], own + first, mask=block < blocks)

            @pl.when(row == 0)
            def _():
                live_ref[0] = live

    layers = () if layer is None else (layer.astype(jnp.int32).reshape(1),)
    return pl.pallas_call(
        kernel,
        out_shape=Placed(
            jax.ShapeDtypeStruct((1,), jnp.int32),
            jax.ShapeDtypeStruct((blocks,), jnp.int32),
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
            jax.ShapeDtypeStruct((blocks * size,), jnp.float32),
            jax.ShapeDtypeStruct((blocks * size, steps * gpu_product.STEP), x.dtype),
        ),
        grid=(rows, steps // part),
        compiler_params=plgpu.CompilerParams(num_warps=part, num_stages=1),
        interpret=backend.interpreted(),
        name="expert_tokens",
    )(x, ids, weights, *ranks, *layers)


def _blocks_before(count_ref, own: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Blocks of the experts below each of ``own``, and of all experts."""
    experts = count_ref.shape[0]
    expert = jnp.arange(pl.next_power_of_2(experts))
    count = plgpu.load(count_ref.at[expert], mask=expert < experts, other=0)
    used = lax.div(count + (size - 1), size)
    return jnp.sum(jnp.where(expert[None] < own[:, None], used[None], 0), axis=1), jnp.sum(used)


def _compared(ids_ref, pair: jax.Array, own: jax.Array, experts: int, size: int):
    """Ranks of some pairs and their experts ``own``, and what :func:`_blocks_before` finds, from all ids alone."""
    every = jnp.arange(pl.next_power_of_2(ids_ref.shape[0]))
    theirs = plgpu.load(ids_ref.at[every], mask=every < ids_ref.shape[0], other=-1)

    def rank(at: jax.Array, expert: jax.Array) -> jax.Array:
        is_earlier = (theirs[None] == expert[:, None]) & (every[None] < at[:, None])
        return jnp.sum(is_earlier.astype(jnp.int32), axis=1)

    opens = (theirs >= 0) & (theirs < experts) & (lax.rem(rank(every, theirs), size) == 0)
    opens = opens.astype(jnp.int32)
    before = jnp.sum(jnp.where(theirs[None] < own[:, None], opens[None], 0), axis=1)
    return rank(pair, own), before, jnp.sum(opens)


def place_inner(inner: jax.Array, slot: jax.Array, width: int, fmt: Format) -> jax.Array:
    """Rounds the slots that a pair owns, each where it is, in the product's order; the others are undefined.

    Args:
      inner: ``[slots, padded width]`` bfloat16; columns from ``width`` on may hold anything and become 0.
      slot: ``[rows, k]`` int32, −1 for nobody's.
      width: columns that there are (static).
      fmt: rounding (static).
    """
    if fmt != FP8_E8M0:
        inner = fmt.round(inner)
    slots, pairs = inner.shape[0], slot.size

    def kernel(inner_ref, slot_ref, out_ref):
        pair = pl.program_id(0) * _INNER_ROWS + jnp.arange(_INNER_ROWS)
        row = plgpu.load(slot_ref.at[pair], mask=pair < pairs, other=-1)
        row = jnp.where(row < 0, slots, row)
        column = pl.program_id(1) * gpu_product.STEP + jnp.arange(gpu_product.STEP)
        shape = (_INNER_ROWS, gpu_product.STEP)
        rows, is_owned = jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to((row < slots)[:, None], shape)
        source = jnp.broadcast_to(_source(column)[None], shape)
        is_present = is_owned if width == inner.shape[1] else is_owned & (source < width)
        values = plgpu.load(inner_ref.at[rows, source], mask=is_present, other=0.0)
        if not backend.interpreted():
            # The result takes the place of the values: no thread may write before all have read.
            plgpu.debug_barrier()
        target = jnp.broadcast_to(column[None], shape)
        plgpu.store(out_ref.at[rows, target], _rounded(values, fmt), mask=is_owned)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(inner.shape, inner.dtype),
        grid=(pl.cdiv(pairs, _INNER_ROWS), inner.shape[1] // gpu_product.STEP),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=backend.interpreted(),
        name="expert_inner",
    )(inner, slot.reshape(-1))


def _source(column: jax.Array) -> jax.Array:
    """Columns that :func:`gpu_product.permute` brings to these.

    The low bits of a column are, from the highest: word (3), instruction, pair, thread (2), half of a pair.
    """
    word, instruction, pair = (column >> 5) & 7, (column >> 4) & 1, (column >> 3) & 1
    thread, half = (column >> 1) & 3, column & 1
    start = column - (column & (gpu_product.STEP - 1))
    return start + thread * 64 + word * 8 + half * 4 + instruction * 2 + pair


def _rounded(values: jax.Array, fmt: Format) -> jax.Array:
    """Permuted rows ``[rows, whole steps]`` rounded; any format but ``FP8_E8M0`` has been applied before."""
    if fmt != FP8_E8M0:
        return values
    # A scale is for half of a thread's eight words: [.., words, (word, instruction, pair), thread, half of a pair].
    blocks = values.astype(jnp.float32).reshape(-1, 16, 4, 2)
    top = jnp.max(jnp.max(jnp.abs(blocks), axis=3), axis=1)
    return round_under(blocks, top[:, None, :, None]).astype(values.dtype).reshape(values.shape)
