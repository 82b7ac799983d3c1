"""Window rings: the last W window entries of every layer, position p in slot p mod W."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dsv41.settings import Settings
from pallas_kernels.formats import Packed


@struct.dataclass
class Ring:
    """The rings of a stack of layers.

    Attributes:
      entries: leaves ``[layers, batch, W, width']``.
      positions: int32 ``[batch, W]``, the position that each slot holds, −1 while empty. Shared by the layers,
        which are always written together. Masks and rotary use it, never the slot number.
    """

    entries: Packed
    positions: jax.Array


def create_ring(settings: Settings, layers: int, batch: int) -> Ring:
    """Empty rings."""
    window = settings.text.sliding_window
    return Ring(
        settings.formats.window.zeros((layers, batch, window), settings.text.head_dim),
        jnp.full((batch, window), -1, jnp.int32),
    )


def entries_at(ring: Ring, positions: jax.Array) -> tuple[Packed, jax.Array]:
    """The entries of positions int32 ``[batch, n]``, and which of them are there.

    Returns:
      leaves ``[layers, batch, n, width']`` and bool ``[batch, n]``.
    """
    slots = positions % ring.positions.shape[1]
    entries = ring.entries.map(lambda leaf: jnp.take_along_axis(leaf, slots[None, :, :, None], axis=2))
    held = (positions >= 0) & (jnp.take_along_axis(ring.positions, slots, axis=1) == positions)
    return entries, held


def write_ring(ring: Ring, entries: Packed, start: jax.Array, count: jax.Array) -> Ring:
    """Writes the first ``count`` of a step's entries (of which the last W survive).

    Args:
      entries: leaves ``[layers, batch, query, width']`` of positions start, start + 1, …
      start, count: int32 ``[batch]``.
    """
    window, queries = ring.positions.shape[1], entries.payload.shape[2]
    offset = jnp.arange(queries, dtype=jnp.int32)
    positions = start[:, None] + offset
    lives = (offset < count[:, None]) & (offset >= count[:, None] - window)
    # Slot `window` does not exist: writes there are dropped. (−1 would write the last slot.)
    slots = jnp.where(lives, positions % window, window)
    rows = jnp.arange(slots.shape[0])[:, None]
    written = ring.entries.map(lambda leaf, new: leaf.at[:, rows, slots].set(new, mode="drop"), entries)
    return Ring(written, ring.positions.at[rows, slots].set(positions, mode="drop"))
