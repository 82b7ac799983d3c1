"""The steps that can be planned: which layers they run, for how many tokens of a request, after how many."""

from __future__ import annotations

import dataclasses
import functools

from dsv41.layer_table import Layer, LayerTable


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of every request of a batch.

    Attributes:
      queries: tokens of each request.
      history: tokens of each request before them.
      encoder, decoder: which stacks they pass. Without the encoder they are a replay, which appends nothing.
      logits: tokens of each request that pass the head.
      drafts: whether the drafter proposes a block too.
    """

    queries: int
    history: int
    encoder: bool = True
    decoder: bool = True
    logits: int = 1
    drafts: bool = False

    def layers(self, table: LayerTable) -> tuple[Layer, ...]:
        return (*(table.encoder if self.encoder else ()), *(table.decoder if self.decoder else ()))

    def mean_visible(self, ratio: int, most: int) -> float:
        """Entries of ``ratio`` tokens that a query sees, no more than ``most``, on average over the queries."""
        return _mean_visible(self.queries, self.history, ratio, most)

    def entries(self, ratio: int) -> int:
        """Entries that a request has when the step ends."""
        return (self.history + self.queries) // ratio


@functools.lru_cache(maxsize=256)
def _mean_visible(queries: int, history: int, ratio: int, most: int) -> float:
    return sum(min((history + i + 1) // ratio, most) for i in range(queries)) / queries
