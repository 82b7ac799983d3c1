"""Engram rows for the steps of a batch of request slots: follows their tokens on the host and reads ahead.

What a driver calls: :meth:`EngramFeed.read_ahead` over a prompt's chunks and :meth:`EngramFeed.replay` for the
decoder's pass after them; then, for every step, :meth:`EngramFeed.start` as soon as its tokens are known,
:meth:`EngramFeed.rows` when the step needs them, :meth:`EngramFeed.advance` with what it consumed. A request that is
closed needs no call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from dsv41.engram.addresses import NgramHistory, RowIds
from dsv41.engram.prefetch import Lookups, Prefetcher, Ticket
from dsv41.engram.tables import EngramTable
from dsv41.layers.engram import EngramRows
from dsv41.model import TokenBatch
from dsv41.settings import Settings
from dsv41.state.request import ModelState, Segment


class EngramFeed:
    """Serves one batch of slots from the tables of all Engram layers. Close it, or use it as a context.

    Args:
      token_map: compressed ids, int ``[vocab]``.
      tables: by Engram layer.
      slots: requests of the batch.
    """

    def __init__(
        self, settings: Settings, token_map: np.ndarray, tables: Mapping[int, EngramTable], slots: int
    ) -> None:
        text, start = settings.text, settings.table.decoder_start
        self._history, self._prefetcher = NgramHistory(text, token_map, slots), Prefetcher(tables)
        self._slots = range(slots)
        self._encoder = tuple(layer for layer in text.engram_layer_ids if layer < start)
        self._decoder = tuple(layer for layer in text.engram_layer_ids if layer >= start)
        self._started: tuple[RowIds, Ticket] | None = None

    def read_ahead(
        self, state: ModelState, slots: Sequence[int], batches: Iterable[TokenBatch], all_layers: bool
    ) -> Iterator[tuple[TokenBatch, Ticket]]:
        """Chunks of prompts with their rows on the way; the next chunk's are read while the present one runs.

        Args:
          state: holds the n-gram tails after which the chunks follow.
          slots: the request of each row of the batches.
          batches: consecutive chunks, which the requests consume.
          all_layers: False reads for the encoder's Engrams only.
        """
        layers = self._encoder + self._decoder if all_layers else self._encoder
        self._history.place(slots, np.asarray(state.ngram_tail)[list(slots)])
        waiting = None
        for batch in batches:
            tokens, count = np.asarray(batch.tokens), np.asarray(batch.count)
            is_image = None if batch.is_image is None else np.asarray(batch.is_image)
            ids = self._history.rows(slots, tokens, count, is_image)
            self._history.advance(slots, tokens, count, is_image)
            ticket = self._prefetcher.start({layer: ids[layer] for layer in layers})
            if waiting is not None:
                yield waiting
            waiting = batch, ticket
        if waiting is not None:
            yield waiting

    def replay(self, tail: Segment) -> EngramRows:
        """Rows of the decoder's Engrams for an encoder tail, whose look-backs are fetched from the device for it."""
        if not self._decoder:
            return {}
        ids = self._history.rows_of(np.asarray(tail.lookback))
        return self._prefetcher.start({layer: ids[layer] for layer in self._decoder}).result()

    def start(self, tokens: np.ndarray, count: np.ndarray) -> None:
        """Begins to read for the next step of all slots.

        Args:
          tokens: int ``[slots, query]``, the pending token of each slot (and drafts after it).
          count: int ``[slots]``, live tokens; 0 in inactive slots.
        """
        ids = self._history.rows(self._slots, tokens, count)
        self._started = ids, self._prefetcher.start(ids)

    def rows(self, tokens: np.ndarray, count: np.ndarray, behind: jax.Array | None = None) -> EngramRows:
        """The rows of a step over all slots, all layers; arguments as of :meth:`start` and :meth:`Ticket.result`.

        What :meth:`start` began is used if it is what the step needs. It is not where a request came or went since:
        then its rows are dropped and the step's are read now.
        """
        ids = self._history.rows(self._slots, tokens, count)
        started, self._started = self._started, None
        if started is not None and all(np.array_equal(ids[layer], started[0][layer]) for layer in ids):
            return started[1].result(behind)
        return self._prefetcher.start(ids).result(behind)

    def advance(self, tokens: np.ndarray, count: np.ndarray) -> None:
        """Follows a step of all slots that consumed the first ``count`` [slots] of its tokens."""
        self._history.advance(self._slots, tokens, count)

    def report(self) -> Lookups:
        """What the look-ups have cost since the last :meth:`reset`."""
        return self._prefetcher.report()

    def reset(self) -> None:
        """Starts the report anew, so that it does not contain what was run to compile."""
        self._prefetcher.reset()

    def close(self) -> None:
        """Ends the threads."""
        self._prefetcher.close()

    def __enter__(self) -> EngramFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
