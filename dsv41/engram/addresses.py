"""Which table rows the requests of a batch look up: their n-gram histories, followed on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsv41.config import TextConfig
from dsv41.numerics.ngram_hash import BLOCKED, hash_ids_host, lookback_host, next_tail_host, ngram_hash

RowIds = dict[int, np.ndarray]
"""By Engram layer: table rows, int32 ``[requests, query, columns]``."""


class NgramHistory:
    """The last compressed ids of every slot, as the device's state has them.

    Looking up does not move a history: a step may be given drafts, and how many of them count is known only after it.

    Args:
      token_map: compressed ids, int ``[vocab]``.
      slots: requests that are followed.
    """

    def __init__(self, text: TextConfig, token_map: np.ndarray, slots: int) -> None:
        self._text, self._constants = text, ngram_hash(text)
        self._token_map = np.array(token_map, np.int32)
        self._tails = np.full((slots, text.engram_max_ngram_size - 1), BLOCKED, np.int32)

    def place(self, slots: Sequence[int], tails: np.ndarray) -> None:
        """Puts requests where their states are; tails: int32 ``[slots, N − 1]``, their n-gram tails."""
        self._tails[list(slots)] = tails

    def rows(
        self, slots: Sequence[int], tokens: np.ndarray, count: np.ndarray, is_image: np.ndarray | None = None
    ) -> RowIds:
        """Rows of tokens that follow the histories of some slots.

        Args:
          tokens: int ``[slots, query]``; what stands beyond ``count`` is ignored, and looks up the pad's rows.
          count: int ``[slots]``.
          is_image: bool ``[slots, query]``, positions of image spans; None without.

        Raises:
          ValueError: a live token that is not in the vocabulary.
        """
        seen = lookback_host(self._compressed(tokens, count, is_image), self._tails[list(slots)])
        return self.rows_of(seen)

    def rows_of(self, lookback: np.ndarray) -> RowIds:
        """Rows of positions that look back on compressed ids int32 ``[..., N]`` (a segment's ``lookback``)."""
        pad = int(self._token_map[self._text.engram_pad_token_id])
        ids = hash_ids_host(self._constants, lookback, pad)
        return dict(zip(self._text.engram_layer_ids, ids, strict=True))

    def advance(
        self, slots: Sequence[int], tokens: np.ndarray, count: np.ndarray, is_image: np.ndarray | None = None
    ) -> None:
        """Moves histories on by the first ``count`` tokens of each slot; arguments and errors as of :meth:`rows`."""
        index, count = list(slots), np.asarray(count)
        ids = self._compressed(tokens, count, is_image)
        self._tails[index] = next_tail_host(ids, self._tails[index], count)

    def _compressed(self, tokens: np.ndarray, count: np.ndarray, is_image: np.ndarray | None) -> np.ndarray:
        tokens = np.asarray(tokens)
        text = np.arange(tokens.shape[1]) < np.asarray(count)[:, None]
        if is_image is not None:
            text &= ~np.asarray(is_image)
        outside = text & ((tokens < 0) | (tokens >= len(self._token_map)))
        if outside.any():
            raise ValueError(f"token {int(tokens[outside][0])} is not in the vocabulary of {len(self._token_map)}")
        return np.where(text, self._token_map[np.where(text, tokens, 0)], BLOCKED).astype(np.int32)
