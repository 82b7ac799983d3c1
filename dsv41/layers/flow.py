"""What passes through the layers of a step, what each layer is handed, and what all of them share."""

from __future__ import annotations

import jax
from flax import struct

from dsv41.layers.engram import EngramInputs
from dsv41.state.memory import Memory
from dsv41.state.tail import Projections, Tails
from pallas_kernels.formats import Packed

RotaryTable = tuple[jax.Array, jax.Array]


@struct.dataclass
class Flow:
    """Carried from layer to layer.

    Attributes:
      streams: ``[batch, query, C, d]`` in the activation dtype.
      mix: ``[batch, query, C]`` float32, predicted by the last sub-layer for the next.
      memory: the global memory; encoder layers extend it, decoder layers only read it.
      selection: entries chosen by the last index source, int32 ``[batch, query, index_topk]``, −1 = none.
      blocks: candidate blocks of the pool's source, int32 ``[batch, query, blocks]``, −1 = none.
      taps: what DSpark reads: ``[target layers, batch, query, d]``.
    """

    streams: jax.Array
    mix: jax.Array
    memory: Memory
    selection: jax.Array
    blocks: jax.Array
    taps: jax.Array


@struct.dataclass
class LayerInputs:
    """One layer's share of the state and its place in the tables; loops slice it along the layers.

    Attributes:
      ring: window entries before the step, in position order, ``[batch, W, width']``.
      source_slot: int32, the KV source among those of its ratio.
      index_slot: int32, the index source among all (only read with forced selections).
      engram_slot: int32, the Engram before this layer, −1 without.
      tap_slot: int32, place of this layer among DSpark's target layers; their number if it is none.
    """

    ring: Packed
    source_slot: jax.Array
    index_slot: jax.Array
    engram_slot: jax.Array
    tap_slot: jax.Array


@struct.dataclass
class LayerOutputs:
    """What a layer leaves for the state.

    Attributes:
      entries: window entries of the step's tokens ``[batch, query, width']``.
      projections: tokens for the compressor tail (sources of ratio ≥ 2), else None.
    """

    entries: Packed
    projections: Projections | None


@struct.dataclass
class ForcedSelection:
    """Selections to use instead of the layers' own (parity tests: implementations diverge at near-ties).

    Attributes:
      entries: int32 ``[index sources, batch, query, index_topk]``.
      blocks: int32 ``[batch, query, blocks]``.
      active: bool scalar; False leaves the layers' own choice (one compiled step serves both).
    """

    entries: jax.Array
    blocks: jax.Array
    active: jax.Array


@struct.dataclass
class Step:
    """Shared by all layers of one step.

    Attributes:
      start: int32 ``[batch]``, position of the first token of each row.
      count: int32 ``[batch]``, live tokens of each row; the rest of the row is padding.
      positions: int32 ``[batch, query]``.
      valid: bool ``[batch, query]``.
      write_from: int32 ``[batch]``; groups that begin below it are in the memory already (a replayed prefix).
      page_table: int32 ``[batch, table_pages]``.
      local_valid: bool ``[batch, W + query]``, which entries of [ring ‖ step] are live.
      is_image: bool ``[batch, query]``, positions of image spans.
      rope_window, rope_csa: rotary tables of the positions, ``[batch, query, R/2]`` each.
      tails: compressor tails before the step.
      engram: keys and values of all Engram layers, stacked; None without Engram.
      forced: see :class:`ForcedSelection`.
    """

    start: jax.Array
    count: jax.Array
    positions: jax.Array
    valid: jax.Array
    write_from: jax.Array
    page_table: jax.Array
    local_valid: jax.Array
    is_image: jax.Array
    rope_window: RotaryTable
    rope_csa: RotaryTable
    tails: Tails
    engram: EngramInputs | None
    forced: ForcedSelection | None = None
