"""What passes through the layers of a step, what each layer is handed, and what all of them share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dsv41.layers.engram import EngramInputs
from dsv41.sharding.split import WHOLE, Split
from dsv41.state.memory import Memory
from dsv41.state.tail import Projections, Tails
from pallas_kernels.formats import Packed

RotaryTable = tuple[jax.Array, jax.Array]


@struct.dataclass
class Flow:
    """Carried from layer to layer.

    Attributes:
      streams: ``[batch, query, C, d]`` in the activation dtype, of this device's columns (:class:`Split`).
      mix: ``[batch, query, C]`` float32, predicted by the last sub-layer for the next, of the same columns.
      memory: the global memory; encoder layers extend it, decoder layers only read it.
      selection: entries chosen by the last index source, int32 ``[batch, query, index_topk]``, −1 = none; of all
        columns, as every shard of the context looks some of them up.
      blocks: candidate blocks of the pool's source, int32 ``[batch, query, blocks]``, −1 = none; of all columns.
      taps: what DSpark reads: ``[target layers, batch, query, d]``, of this device's columns.
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
      ring: window entries before the step, ``[batch, W, width']`` in position order, or ``[batch, W + query,
        width']`` in the columns of :attr:`Step.order`.
      source_slot: int32, the KV source among those of its ratio.
      index_slot: int32, the index source among all (only read with forced selections).
      engram_slot: int32, the Engram before this layer, −1 without.
      tap_slot: int32, place of this layer among DSpark's target layers; their number if it is none.
      expert_slot: int32, place of this layer among those whose stacked experts it reads (:class:`Block`);
        None if it reads its own.
    """

    ring: Packed
    source_slot: jax.Array
    index_slot: jax.Array
    engram_slot: jax.Array
    tap_slot: jax.Array
    expert_slot: jax.Array | None = None


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
    """Shared by all layers of one step; of all columns where nothing else is said.

    Attributes:
      split: which of the columns this device computes.
      start: int32 ``[batch]``, position of the first token of each row.
      count: int32 ``[batch]``, live tokens of each row; the rest of the row is padding.
      columns: int32 ``[batch, query]``, places of the tokens in their rows' memory.
      positions: int32 ``[batch, query]``, places in their texts: the same, but for rows of several texts.
      valid: bool ``[batch, query]``.
      write_from: int32 ``[batch]``; groups that begin below it are in the memory already (a replayed prefix).
      page_table: int32 ``[batch, table_pages]``, pages of this device's part, to append to.
      read_table: int32 ``[batch, table_pages / context shards]``, those of them that lie on this shard of the context
        (:mod:`dsv41.sharding.context`); ``page_table`` itself where it is not divided.
      local_valid: bool ``[batch, W + query]``, which local entries are live: [ring ‖ step], or as ``order`` says.
      order: int32 ``[batch, W + query]``, in a short step: the place in [ring ‖ step] of what stands in each column.
        Position p stands in column p mod (W + query), so that sums over the window round alike wherever in the step a
        token stands. None in a long step, whose columns are in order.
      is_image: bool ``[batch, query]``, positions of image spans; this device's.
      documents: int32 ``[batch, query]``, columns at which the tokens' texts begin; None in rows of one text.
      reach: int32 ``[batch, query]``, how many window entries each token sees; None: all.
      rope_window, rope_csa: rotary tables of this device's positions, ``[batch, query, R/2]`` each.
      tails: compressor tails before the step.
      engram: keys and values of all Engram layers, stacked, of this device's columns; None without Engram.
      forced: see :class:`ForcedSelection`.
    """

    start: jax.Array
    count: jax.Array
    columns: jax.Array
    positions: jax.Array
    valid: jax.Array
    write_from: jax.Array
    page_table: jax.Array
    read_table: jax.Array
    local_valid: jax.Array
    order: jax.Array | None
    is_image: jax.Array
    rope_window: RotaryTable
    rope_csa: RotaryTable
    tails: Tails
    engram: EngramInputs | None
    forced: ForcedSelection | None = None
    documents: jax.Array | None = None
    reach: jax.Array | None = None
    split: Split = struct.field(pytree_node=False, default=WHOLE)

    def visible(self, ratio: int) -> tuple[jax.Array, jax.Array | None]:
        """The entries of a source of this ratio that each token may choose: from the second up to below the first.

        Returns:
          int32 ``[batch, query]`` each; the second is None where all that are visible begin with entry 0.
        """
        below = jnp.where(self.valid, (self.columns + 1) // ratio, 0)
        return below, None if self.documents is None else jnp.maximum(self.documents, 0) // ratio

    def group_positions(self, groups: jax.Array, ratio: int) -> jax.Array:
        """Positions of the first tokens of compression groups int32 ``[batch, groups]``, numbered along their rows."""
        first = groups * ratio
        if self.documents is None:
            return first
        at = jnp.minimum(first - self.start[:, None], self.documents.shape[1] - 1)
        return first - jnp.take_along_axis(self.documents, at, axis=1)

    def local_entries(self, ring: Packed, new: Packed) -> Packed:
        """The window entries that the step's tokens see: ``ring`` of a layer with the step's ``new`` ones."""
        if self.order is None:
            return ring.map(lambda old, fresh: jnp.concatenate([old, fresh], axis=1), new)
        index = (self.order - (self.order.shape[1] - self.positions.shape[1]))[..., None]

        def placed(old: jax.Array, fresh: jax.Array) -> jax.Array:
            if fresh.shape[1] > 1:
                fresh = jnp.take_along_axis(fresh, jnp.maximum(index, 0), axis=1)
            return jnp.where(index >= 0, fresh, old)

        return ring.map(placed, new)

    @property
    def rotation(self) -> jax.Array | None:
        """Column of the earliest entry int32 ``[batch]``; None where columns are in order."""
        return None if self.order is None else -self.order[:, 0] % self.order.shape[1]
