"""How many parts a mesh makes of requests, heads, experts and pages, and what passing between parts costs."""

from __future__ import annotations

import math
from typing import NamedTuple

from dsv41.sharding.mesh import MeshPreset
from dsv41.sharding.rules import partition


class Spread:
    """Parts of logical axes on one mesh.

    Attributes:
      batch: parts of the requests; devices that differ in other axes only hold the same ones.
      experts: parts of the routed experts.
      dispatch: parts of the requests between which tokens travel to their experts.
      pages: parts of one request's pages.
      chunk, chunk_rows: parts of the columns of a long chunk, and those of them that divide Engram's rows too.
      heads, vocab, inner: parts of the heads, of the vocabulary and of an expert's inner values.
      rows, shared_rows: parts of Engram's rows, and those of them that hold the same requests.
      reduced: parts whose sums of one token's feed-forward output must be added up.
    """

    def __init__(self, preset: MeshPreset) -> None:
        self.preset = preset
        batch, experts = self._axes("batch"), self._axes("experts")
        self.batch = self._parts(batch)
        self.experts = self._parts(experts)
        self.dispatch = self._parts(batch & experts)
        self.pages = self._parts(self._axes("pages") - batch)
        self.chunk = self._parts(self._axes("chunk"))
        self.chunk_rows = self._parts(self._axes("chunk") & self._axes("engram_rows"))
        self.heads = self._parts(self._axes("heads"))
        self.vocab = self._parts(self._axes("vocab"))
        self.inner = self._parts(self._axes("expert_mlp"))
        self.rows = self._parts(self._axes("engram_rows"))
        self.shared_rows = self._parts(self._axes("engram_rows") - batch)
        self.reduced = self._parts((experts | self._axes("expert_mlp") | self._axes("mlp")) - batch)

    def requests(self, batch: int) -> int:
        """Requests of one device.

        Raises:
          MeshError: the mesh does not divide their number.
        """
        partition("requests", ["batch"], [batch], self.preset.axes, self.preset.rules)
        return batch // self.batch

    def gathered(self, logical: tuple[str | None, ...]) -> int:
        """Parts of the requests that a matrix of these axes is spread over too: its tokens come from all of them."""
        batch = self._axes("batch")
        return self._parts(set().union(*(self._axes(name) for name in logical if name)) & batch)

    def _axes(self, logical: str) -> set[str]:
        return set(self.preset.rules[logical])

    def _parts(self, axes: set[str]) -> int:
        return math.prod(self.preset.axes[axis] for axis in axes)


class Columns(NamedTuple):
    """A device's columns of a step (:mod:`dsv41.sharding.split`).

    Attributes:
      tokens: that it has, of all its requests.
      parts: of the whole step.
      attended: tokens whose attention to pages it computes: where pages are divided, those of all columns.
    """

    tokens: int
    parts: int
    attended: int

    @classmethod
    def of(cls, spread: Spread, requests: int, queries: int, window: int) -> Columns:
        """Of a step of so many queries of each of a device's requests."""
        parts = 1 if queries <= window or queries % spread.chunk else spread.chunk
        tokens = requests * queries // parts
        return cls(tokens, parts, tokens * parts if spread.pages > 1 else tokens)

    @property
    def all(self) -> int:
        """Tokens of the whole step."""
        return self.tokens * self.parts

    def gathered(self, token: float) -> float:
        """Link bytes of so many bytes of each token for all columns."""
        return all_gather(self.tokens * token, self.parts)


# Bytes that one of several devices sends and receives, together.


def all_gather(own: float, parts: int) -> float:
    """Every device gets the parts of all others; ``own`` are the bytes of one part."""
    return 2 * (parts - 1) * own


def exchange(whole: float, parts: int) -> float:
    """Every device gets its part of all others' (all-to-all), or the sum of its parts (reduce-scatter)."""
    return 2 * (parts - 1) / parts * whole


def all_reduce(whole: float, parts: int) -> float:
    """Every device gets the sum of all; in two passes, each of the whole but one part."""
    return 4 * (parts - 1) / parts * whole
