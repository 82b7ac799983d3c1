"""What a selection is asked for and what it gives."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax


@dataclasses.dataclass(frozen=True)
class BlockSelection:
    """Also choose blocks of consecutive entries, scored by their maximum.

    Attributes:
      size: entries of a block.
      count: blocks to choose.
    """

    size: int
    count: int

    def chosen(self, capacity: int) -> int:
        """Width of the chosen blocks' axis: no more than there are blocks in ``capacity`` entries."""
        return min(self.count, -(-capacity // self.size))


class Selection(NamedTuple):
    """Chosen entries and blocks.

    Attributes:
      indices: ``[batch, query, top_k]`` int32 entries, best first; the −1 of a short selection come last.
      blocks: ``[batch, query, chosen blocks]`` int32, best first, −1 last; None if no blocks were asked for.
    """

    indices: jax.Array
    blocks: jax.Array | None
