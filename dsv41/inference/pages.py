"""Allocation of memory pages: free lists and the page table that steps read."""

from __future__ import annotations

import numpy as np


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than a request needs."""


class PageAllocator:
    """Hands the pages of one pool to requests.

    Attributes:
      table: int32 ``[batch, table_pages]``, each row the pages of one request in order; the number of pages in
        the pool marks 'no page'.
    """

    def __init__(self, batch: int, pages: int, table_pages: int, page_tokens: int, shards: int = 1):
        """An unused pool.

        Args:
          shards: equal parts of the pool, one behind the other, over which the pages of every request go in turn
            (:mod:`dsv41.sharding.context`).
        """
        self.pages, self.page_tokens = pages, page_tokens
        self.table = np.full((batch, table_pages), pages, np.int32)
        part = pages // shards
        self._free = [list(range((shard + 1) * part - 1, shard * part - 1, -1)) for shard in range(shards)]
        self._held = [0] * batch

    @property
    def free(self) -> int:
        return sum(map(len, self._free))

    def fits(self, tokens: int) -> bool:
        """Whether a request of this length would get its pages now."""
        return all(len(free) >= wanted for free, wanted in zip(self._free, self._wanted(0, tokens), strict=True))

    def pages_for(self, tokens: int) -> int:
        """Pages that a request of this length holds."""
        return -(-tokens // self.page_tokens)

    def reserve(self, row: int, tokens: int) -> None:
        """Gives a request the pages for ``tokens`` tokens in all.

        Raises:
          OutOfPages: not enough are free; nothing is taken then.
          ValueError: more than the page table has room for.
        """
        wanted = self.pages_for(tokens)
        if wanted > self.table.shape[1]:
            raise ValueError(f"{tokens} tokens need {wanted} pages; the page table holds {self.table.shape[1]}")
        for free, more in zip(self._free, self._wanted(self._held[row], tokens), strict=True):
            if more > len(free):
                where = "" if len(self._free) == 1 else " on one shard"
                raise OutOfPages(f"{tokens} tokens need {more} more pages{where}; {len(free)} are free")
        for slot in range(self._held[row], wanted):
            self.table[row, slot] = self._free[slot % len(self._free)].pop()
        self._held[row] = max(self._held[row], wanted)

    def _wanted(self, held: int, tokens: int) -> list[int]:
        """Pages of each shard that a request needs beyond those it holds."""
        shards, wanted = len(self._free), self.pages_for(tokens)
        return [len(range(held + (shard - held) % shards, wanted, shards)) for shard in range(shards)]

    def release(self, row: int) -> None:
        """Takes all pages of a request back."""
        for slot in reversed(range(self._held[row])):
            self._free[slot % len(self._free)].append(int(self.table[row, slot]))
        self.table[row] = self.pages
        self._held[row] = 0
