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
    """Chosen entries and blocks. Scores are there to join selections over parts of the entries.

    Attributes:
      indices: ``[batch, query, top_k]`` int32 entries, best first; the −1 of a short selection come last.
      scores: as ``indices``, float32; −inf where there is none.
      blocks: ``[batch, query, chosen blocks]`` int32, the newest entry's first, then best first, −1 last; None if no
        blocks were asked for.
      block_scores: as ``blocks``, float32: the largest visible score of each, of the newest too; −inf where none is.
    """

    indices: jax.Array
    scores: jax.Array
    blocks: jax.Array | None = None
    block_scores: jax.Array | None = None
