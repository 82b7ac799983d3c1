"""Allocation of memory pages: a free list and the page table that steps read."""

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

    def __init__(self, batch: int, pages: int, table_pages: int, page_tokens: int):
        self.pages, self.page_tokens = pages, page_tokens
        self.table = np.full((batch, table_pages), pages, np.int32)
        self._free = list(range(pages - 1, -1, -1))
        self._held = [0] * batch

    @property
    def free(self) -> int:
        return len(self._free)

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
        missing = wanted - self._held[row]
        if missing > len(self._free):
            raise OutOfPages(f"{tokens} tokens need {missing} more pages; {len(self._free)} are free")
        for slot in range(self._held[row], wanted):
            self.table[row, slot] = self._free.pop()
        self._held[row] = max(self._held[row], wanted)

    def release(self, row: int) -> None:
        """Takes all pages of a request back."""
        self._free.extend(int(page) for page in self.table[row, : self._held[row]][::-1])
        self.table[row] = self.pages
        self._held[row] = 0
